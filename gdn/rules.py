"""The rules of each recurrence op, in the order of its signature, and what runs it.

A function `..._call` makes of an op's arguments rules that take arrays alone, and these arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gdn import arrays
from gdn.arrays import Argument
from gdn.backends import chunked, recurrence
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import numpy as numpy_backend
from gdn.backends.chunk_layout import ChunkLayout
from gdn.calls import Checked, Ready, Rules
from gdn.check import require_disjoint, require_one_place, require_workspace, require_writable
from gdn.indices import check_fold_indices, check_recurrence_indices, check_verify_indices
from gdn.recurrence import RecurrenceInputs, recurrence_inputs, require_readout, require_writable_pool
from gdn.ring import (
    Pending,
    fold_inputs,
    pending_inputs,
    require_apart_from_pool,
    require_writable_fold,
    require_writable_ring,
    ring_len,
    verify_inputs,
)


def fwd_call(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    ring: Any,
    pending_ring_slot_idx: Any,
    num_pending: Any,
    algorithm: str,
    workspace: Any,
    out: Any,
) -> tuple[Rules, tuple[Any, ...]]:
    """The rules of a forward call, and the arrays that these take."""
    six = qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    pending = ring, pending_ring_slot_idx, num_pending
    if chunked.known_algorithm(algorithm) == "recurrent":
        return fwd_rules, (*six, *pending, out)
    return _rules_of_algorithm(algorithm), (*six, *pending, workspace, out)


@dataclass(frozen=True, slots=True)
class _Forward:
    """The checked arguments of a forward call; out: the readout, if it was given."""

    inputs: RecurrenceInputs
    pending: Pending | None
    out: Argument | None
    place: str

    @classmethod
    def of(cls, six: tuple[Any, ...], pending_arrays: tuple[Any, ...], out: Any) -> _Forward:
        inputs = recurrence_inputs(arrays.take, *six)
        pending = pending_inputs(arrays.take, inputs, *pending_arrays)
        place = require_writable_pool(inputs)
        require_apart_from_pool(inputs, pending)
        given = None if out is None else _readout_argument(out, inputs, *(pending.arguments if pending else ()))
        return cls(inputs, pending, given, place)

    @property
    def arguments(self) -> tuple[Argument | None, ...]:
        """All but the readout, in the order of the call."""
        more = (None, None, None) if self.pending is None else self.pending.arguments
        return (*self.inputs.arguments, *more)

    def checked(self, ready: Callable[[], Ready]) -> Checked:
        return Checked(self.place, lambda: check_recurrence_indices(self.inputs, self.pending), ready)

    def recurrent(self, *unused: None) -> Checked:
        """The call by the recurrent kernel alone. unused: stands for arguments between its own and the readout."""
        inputs, pending = self.inputs, self.pending

        def ready() -> Ready:
            tile = recurrence.row_tile(inputs, self.out, ring_len(pending.ring) if pending else 0)
            num_blocks = recurrence.num_blocks(inputs, tile)
            readout = self.out or _new_readout(inputs, self.place)
            return Ready(
                (*self.arguments, *unused, readout),
                written=(inputs.recurrent_state, readout),
                numpy_form=lambda: numpy_backend.gated_delta_recurrence_fwd(inputs, readout, pending),
                launches=lambda: (fwd_kernel.launch(inputs, readout, tile, pending),),
                idle=num_blocks == 0,
                result=readout.array,
            )

        return self.checked(ready)


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
    return _Forward.of(six, (ring, pending_ring_slot_idx, num_pending), out).recurrent()


@cache  # so that calls of one kind take one plan
def _rules_of_algorithm(algorithm: str) -> Rules:
    """Those of "chunked" and "auto"."""

    def rules(
        qkv_conv_output: Any,
        decay_per_token: Any,
        beta_per_token: Any,
        recurrent_state: Any,
        slot_idx: Any,
        input_row_offsets: Any,
        ring: Any,
        pending_ring_slot_idx: Any,
        num_pending: Any,
        workspace: Any,
        out: Any,
    ) -> Checked:
        six = qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
        call = _Forward.of(six, (ring, pending_ring_slot_idx, num_pending), out)
        layout = _layout(call.inputs, algorithm)
        memory = None if workspace is None else _workspace_argument(workspace, chunked.workspace_bytes(layout), call)
        return call.recurrent(None) if layout is None else _chunked(call, layout, memory)

    return rules


def _chunked(call: _Forward, layout: ChunkLayout, memory: Argument | None) -> Checked:
    """The call by chunks; memory: the workspace, if it was given."""

    def ready() -> Ready:
        readout = call.out or _new_readout(call.inputs, call.place)
        workspace = memory or _new_workspace(chunked.workspace_bytes(layout), call.place)
        return Ready(
            (*call.arguments, workspace, readout),
            written=(call.inputs.recurrent_state, workspace, readout),
            numpy_form=lambda: chunked.run_on_numpy(call.inputs, readout, layout, call.pending),
            launches=lambda: chunked.launches(call.inputs, readout, layout, workspace, call.pending),
            idle=chunked.is_idle(layout, call.pending),
            result=readout.array,
        )

    return call.checked(ready)


def fwd_workspace_bytes(*six: Any, algorithm: str) -> int:
    """Bytes of the workspace of a forward call, from shapes and types alone."""
    return chunked.workspace_bytes(
        _layout(recurrence_inputs(arrays.describe, *six), chunked.known_algorithm(algorithm))
    )


def _layout(inputs: RecurrenceInputs, algorithm: str) -> ChunkLayout | None:
    types = inputs.qkv_conv_output.dtype, inputs.recurrent_state.dtype
    return chunked.layout_of(inputs.geometry, *types, inputs.batch_size, inputs.total_seq_len, algorithm)


def _workspace_argument(workspace: Any, num_bytes: int, call: _Forward) -> Argument:
    """`workspace` as given, checked."""
    memory = arrays.take("workspace", workspace)
    require_workspace(memory, num_bytes)
    others = [argument for argument in (*call.arguments, call.out) if argument is not None]
    require_one_place((call.inputs.qkv_conv_output, memory))
    require_writable(memory)
    require_disjoint(memory, others)
    return memory


def _new_workspace(num_bytes: int, place: str) -> Argument:
    return arrays.take("workspace", arrays.empty((num_bytes,), "uint8", place, "workspace"))


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
            launches=lambda: (verify_kernel.launch(inputs, readout, tile),),
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
            launches=lambda: (fold_kernel.launch(inputs, tile),),
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
