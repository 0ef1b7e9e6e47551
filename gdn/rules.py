"""The rules of each recurrence op, in the order of its signature, and what runs it."""

from __future__ import annotations

from typing import Any

from gdn import arrays
from gdn.arrays import Argument
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import numpy as numpy_backend
from gdn.backends import recurrence
from gdn.calls import Checked, Ready
from gdn.check import require_disjoint
from gdn.indices import check_fold_indices, check_recurrence_indices, check_verify_indices
from gdn.recurrence import RecurrenceInputs, recurrence_inputs, require_readout, require_writable_pool
from gdn.ring import (
    fold_inputs,
    pending_inputs,
    require_apart_from_pool,
    require_writable_fold,
    require_writable_ring,
    ring_len,
    verify_inputs,
)


def fwd_rules(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    ring: Any,
    pending_ring_slot_idx: Any,
    num_pending: Any,
    out: Any,
) -> Checked:
    six = qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    inputs = recurrence_inputs(arrays.take, *six)
    pending = pending_inputs(arrays.take, inputs, ring, pending_ring_slot_idx, num_pending)
    place = require_writable_pool(inputs)
    require_apart_from_pool(inputs, pending)
    more = (None, None, None) if pending is None else pending.arguments
    given = None if out is None else _readout_argument(out, inputs, *(pending.arguments if pending else ()))

    def ready() -> Ready:
        tile = recurrence.row_tile(inputs, given, ring_len(pending.ring) if pending else 0)
        num_blocks = recurrence.num_blocks(inputs, tile)
        readout = given or _new_readout(inputs, place)
        return Ready(
            (*inputs.arguments, *more, readout),
            written=(inputs.recurrent_state, readout),
            numpy_form=lambda: numpy_backend.gated_delta_recurrence_fwd(inputs, readout, pending),
            launch=lambda: fwd_kernel.launch(inputs, readout, tile, pending),
            idle=num_blocks == 0,
            result=readout.array,
        )

    return Checked(place, lambda: check_recurrence_indices(inputs, pending), ready)


def verify_rules(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    ring: Any,
    ring_slot_idx: Any,
    pending_ring_slot_idx: Any,
    num_pending: Any,
    out: Any,
) -> Checked:
    six = qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    ring_and_tables = ring, ring_slot_idx, pending_ring_slot_idx, num_pending
    inputs = verify_inputs(arrays.take, recurrence_inputs(arrays.take, *six), *ring_and_tables)
    place = require_writable_ring(inputs)
    more = () if inputs.pending else (None, None)
    given = None if out is None else _readout_argument(out, inputs.recurrence, inputs.ring, *inputs.tables)

    def ready() -> Ready:
        tile = recurrence.row_tile(inputs.recurrence, given, ring_len(inputs.ring) if inputs.pending else 0)
        num_blocks = recurrence.num_blocks(inputs.recurrence, tile)
        readout = given or _new_readout(inputs.recurrence, place)
        return Ready(
            (*inputs.arguments, *more, readout),
            written=(inputs.recurrence.recurrent_state, inputs.ring, readout),
            numpy_form=lambda: numpy_backend.gated_delta_recurrence_verify_ring(inputs, readout),
            launch=lambda: verify_kernel.launch(inputs, readout, tile),
            idle=num_blocks == 0,
            result=readout.array,
        )

    return Checked(place, lambda: check_verify_indices(inputs), ready)


def fold_rules(recurrent_state: Any, row_ids: Any, ring: Any, ring_row_ids: Any, num_accepted: Any) -> Checked:
    inputs = fold_inputs(arrays.take, recurrent_state, row_ids, ring, ring_row_ids, num_accepted)
    place = require_writable_fold(inputs)

    def ready() -> Ready:
        tile = fold_kernel.row_tile(inputs)
        return Ready(
            inputs.arguments,
            written=(inputs.recurrent_state,),
            numpy_form=lambda: numpy_backend.gated_delta_state_fold(inputs),
            launch=lambda: fold_kernel.launch(inputs, tile),
            idle=fold_kernel.num_blocks(inputs, tile) == 0,
        )

    return Checked(place, lambda: check_fold_indices(inputs), ready)


def _readout_argument(out: Any, inputs: RecurrenceInputs, *others: Argument) -> Argument:
    """`out` as given, checked; `others` are arrays of the call that it must not overlap either."""
    readout = arrays.take("out", out)
    require_readout(readout, inputs)
    require_disjoint(readout, others)
    return readout


def _new_readout(inputs: RecurrenceInputs, place: str) -> Argument:
    return arrays.take("out", arrays.empty(inputs.out_shape, inputs.qkv_conv_output.dtype, place))
