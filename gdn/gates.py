"""Arguments of the gates: their rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.arrays import Argument
from gdn.check import (
    require_disjoint,
    require_distinct_elements,
    require_float,
    require_ndim,
    require_one_place,
    require_shape,
    require_writable,
)


@dataclass(frozen=True, slots=True)
class GateInputs:
    """The checked arguments of one call."""

    a: Argument
    b: Argument
    A_log: Argument
    dt_bias: Argument
    allow_neg_eigval: bool

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All four arrays, in the order of the call."""
        return self.a, self.b, self.A_log, self.dt_bias


def gate_inputs(take: Callable[[str, Any], Argument], *arrays: Any, allow_neg_eigval: bool) -> GateInputs:
    """Describe the four arrays with `take` and hold them to every rule that shapes and types decide."""
    names = ("a", "b", "A_log", "dt_bias")
    a, b, rate, bias = (take(name, array) for name, array in zip(names, arrays, strict=True))
    require_ndim(a, "[total_seq_len, num_value_heads]")
    require_shape(b, "[total_seq_len, num_value_heads]", a.shape)
    for of_heads in (rate, bias):
        require_shape(of_heads, "[num_value_heads]", a.shape[1:])
        require_float(of_heads)
    require_float(a)
    require_float(b, (a.dtype,))
    return GateInputs(a, b, rate, bias, allow_neg_eigval)


def require_gate(gate: Argument, inputs: GateInputs, *others: Argument) -> None:
    """An array can take decay or beta: its shape, type, place and strides, and memory of its own."""
    require_shape(gate, "[total_seq_len, num_value_heads]", inputs.a.shape)
    require_float(gate, ("float32",))
    require_one_place((inputs.a, gate))
    require_writable(gate)
    require_distinct_elements(gate)
    require_disjoint(gate, (*inputs.arguments, *others))
