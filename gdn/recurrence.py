"""The six arguments that every recurrence function shares: their rules, and what follows from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.arrays import Argument
from gdn.check import (
    require_dense_after,
    require_disjoint,
    require_distinct_elements,
    require_float,
    require_index,
    require_ndim,
    require_one_place,
    require_shape,
    require_writable,
)
from gdn.errors import ShapeError, rejection
from gdn.geometry import HeadGeometry

#: Token rows, sequences and slots are counted in what a 32-bit offset can name.
MAX_COUNT = 2**32 - 1


@dataclass(frozen=True, slots=True)
class RecurrenceInputs:
    """The checked arguments of one call."""

    geometry: HeadGeometry
    qkv_conv_output: Argument
    decay_per_token: Argument
    beta_per_token: Argument
    recurrent_state: Argument
    slot_idx: Argument
    input_row_offsets: Argument

    @property
    def batch_size(self) -> int:
        """Sequences of the ragged batch, padding rows included."""
        return self.slot_idx.shape[0]

    @property
    def total_seq_len(self) -> int:
        """Token rows over all sequences, uncovered rows included."""
        return self.qkv_conv_output.shape[0]

    @property
    def max_slots(self) -> int:
        """Slots of the pool."""
        return self.recurrent_state.shape[0]

    @property
    def out_shape(self) -> tuple[int, int]:
        """Shape of the readout, [total_seq_len, value_dim]."""
        return self.total_seq_len, self.geometry.value_dim

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All six, in the order of the call."""
        return (
            self.qkv_conv_output,
            self.decay_per_token,
            self.beta_per_token,
            self.recurrent_state,
            self.slot_idx,
            self.input_row_offsets,
        )


def recurrence_inputs(take: Callable[[str, Any], Argument], *arrays: Any) -> RecurrenceInputs:
    """Describe the six arrays with `take` and hold them to every rule that shapes, types and strides decide."""
    names = (
        "qkv_conv_output",
        "decay_per_token",
        "beta_per_token",
        "recurrent_state",
        "slot_idx",
        "input_row_offsets",
    )
    qkv, decay, beta, state, slots, offsets = (take(name, array) for name, array in zip(names, arrays, strict=True))
    require_ndim(qkv, "[total_seq_len, conv_dim]")
    require_ndim(state, "[max_slots, num_value_heads, key_head_dim, value_head_dim]")
    require_ndim(slots, "[batch_size]")
    require_ndim(offsets, "[batch_size + 1]")
    require_float(qkv)
    require_float(state)
    require_index(slots)
    require_index(offsets)
    geometry = HeadGeometry.from_shapes(qkv.shape[1], state.shape)
    for gate in (decay, beta):
        require_shape(gate, "[total_seq_len, num_value_heads]", (qkv.shape[0], geometry.num_value_heads))
    require_float(decay, ("float32",) if qkv.dtype == "float32" else ("float32", qkv.dtype))
    require_float(beta, (decay.dtype,))
    require_shape(offsets, "[batch_size + 1]", (slots.shape[0] + 1,))
    require_dense_after(state, 1)
    for argument, axis in ((qkv, "total_seq_len"), (slots, "batch_size"), (state, "max_slots")):
        require_count(argument, axis)
    return RecurrenceInputs(geometry, qkv, decay, beta, state, slots, offsets)


def require_count(argument: Argument, axis: str) -> None:
    """The first axis, `axis` by name, has no more entries than a 32-bit index can name."""
    if argument.shape[0] > MAX_COUNT:
        raise ShapeError(rejection(argument.name, f"{axis} of at most {MAX_COUNT}", argument.shape[0]))


def require_writable_pool(inputs: RecurrenceInputs) -> str:
    """The pool can be written and lies apart from the inputs, all in one place; returns that place."""
    place = require_one_place(inputs.arguments)
    state = inputs.recurrent_state
    require_writable(state)
    require_disjoint(state, [argument for argument in inputs.arguments if argument is not state])
    return place


def require_readout(out: Argument, inputs: RecurrenceInputs) -> None:
    """`out` can take the readout: its shape, type, place and strides, and memory of its own."""
    require_shape(out, "[total_seq_len, value_dim]", inputs.out_shape)
    work = inputs.qkv_conv_output.dtype
    require_float(out, ("float32",) if work == "float32" else (work, "float32"))
    require_one_place((inputs.qkv_conv_output, out))
    require_writable(out)
    require_distinct_elements(out)
    require_disjoint(out, inputs.arguments)
