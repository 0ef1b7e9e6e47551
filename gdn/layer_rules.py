"""The rules of each op around the recurrence, and what runs it.

An op that takes more than arrays has a function `..._call`: of its arguments, in the order of its signature, it makes
rules that take arrays alone, and these arrays.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from gdn import arrays
from gdn.backends import gated_delta_conv1d_commit as commit_kernel
from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.backends import gated_delta_gates as gates_kernel
from gdn.backends import numpy_layer
from gdn.calls import Checked, Ready, Rules
from gdn.check import known_flag, require_one_place
from gdn.conv1d import (
    commit_inputs,
    conv1d_inputs,
    known_activation,
    require_commit_places,
    require_conv_output,
    require_conv_places,
)
from gdn.errors import ShapeError, rejection
from gdn.gates import gate_inputs, require_gate
from gdn.indices import check_conv1d_indices


def conv1d_call(
    qkv: Any,
    conv_weight: Any,
    conv_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    bias: Any,
    activation: str | None,
    write_state: bool,
    out: Any,
) -> tuple[Rules, tuple[Any, ...]]:
    rules = _conv1d_rules(known_activation(activation), known_flag("write_state", write_state))
    return rules, (qkv, conv_weight, conv_state, slot_idx, input_row_offsets, bias, out)


@cache  # so that calls of one kind take one plan
def _conv1d_rules(activation: str | None, write_state: bool) -> Rules:
    def rules(
        qkv: Any, conv_weight: Any, conv_state: Any, slot_idx: Any, input_row_offsets: Any, bias: Any, out: Any
    ) -> Checked:
        six = qkv, conv_weight, conv_state, slot_idx, input_row_offsets, bias
        inputs = conv1d_inputs(arrays.take, *six, activation=activation, write_state=write_state)
        place = require_conv_places(inputs)
        given = None
        if out is not None:
            given = arrays.take("out", out)
            require_conv_output(given, inputs)

        def ready() -> Ready:
            batch = inputs.batch
            num_blocks = conv_kernel.num_blocks(inputs, given)
            result = given or arrays.take("out", arrays.empty(batch.qkv.shape, batch.qkv.dtype, place))
            biases = () if inputs.bias else (None,)
            return Ready(
                (*inputs.arguments, *biases, result),
                written=(*((batch.conv_state,) if write_state else ()), result),
                numpy_form=lambda: numpy_layer.gated_delta_conv1d_fwd(inputs, result),
                launches=lambda: (conv_kernel.launch(inputs, result),),
                idle=num_blocks == 0,
                result=result.array,
            )

        return Checked(place, lambda: check_conv1d_indices(inputs.batch), ready)

    return rules


def commit_rules(qkv: Any, conv_state: Any, slot_idx: Any, input_row_offsets: Any, num_accepted: Any) -> Checked:
    inputs = commit_inputs(arrays.take, qkv, conv_state, slot_idx, input_row_offsets, num_accepted)
    place = require_commit_places(inputs)

    def ready() -> Ready:
        return Ready(
            inputs.arguments,
            written=(inputs.batch.conv_state,),
            numpy_form=lambda: numpy_layer.gated_delta_conv1d_commit(inputs),
            launches=lambda: (commit_kernel.launch(inputs),),
            idle=commit_kernel.num_blocks(inputs) == 0,
        )

    return Checked(place, lambda: check_conv1d_indices(inputs.batch, inputs.num_accepted), ready)


def gate_call(
    a: Any, b: Any, A_log: Any, dt_bias: Any, allow_neg_eigval: bool, out: Any
) -> tuple[Rules, tuple[Any, ...]]:
    return _gate_rules(known_flag("allow_neg_eigval", allow_neg_eigval)), (a, b, A_log, dt_bias, *_gates_given(out))


def _gates_given(out: Any) -> tuple[Any, Any]:
    """The two arrays of a pair, or None for each of none."""
    if out is None:
        return None, None
    if not isinstance(out, (tuple, list)) or len(out) != 2 or any(gate is None for gate in out):
        raise ShapeError(rejection("out", "two arrays, decay and beta", type(out).__name__))
    return out[0], out[1]


@cache  # so that calls of one kind take one plan
def _gate_rules(allow_neg_eigval: bool) -> Rules:
    def rules(a: Any, b: Any, A_log: Any, dt_bias: Any, decay: Any, beta: Any) -> Checked:
        inputs = gate_inputs(arrays.take, a, b, A_log, dt_bias, allow_neg_eigval=allow_neg_eigval)
        place = require_one_place(inputs.arguments)
        given = None
        if decay is not None:
            given = arrays.take("decay", decay), arrays.take("beta", beta)
            require_gate(given[0], inputs, given[1])
            require_gate(given[1], inputs)

        def ready() -> Ready:
            num_blocks = gates_kernel.num_blocks(inputs)
            gates = given or tuple(
                arrays.take(name, arrays.empty(inputs.a.shape, "float32", place)) for name in ("decay", "beta")
            )
            return Ready(
                (*inputs.arguments, *gates),
                written=gates,
                numpy_form=lambda: numpy_layer.gated_delta_gates(inputs, *gates),
                launches=lambda: (gates_kernel.launch(inputs, *gates),),
                idle=num_blocks == 0,
                result=tuple(gate.array for gate in gates),
            )

        return Checked(place, lambda: None, ready)

    return rules
