"""Chunked calls: whether a call is one, what memory it takes, and the launches that it is made of.

First comes, for pending records, a fold of all sequences; then the plan; then, slab by slab, what makes the chunks of
the slab ready and what walks over them. With "auto", rows too short to gain come last, by the recurrent kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gdn import arrays
from gdn.arrays import Argument
from gdn.backends import gated_delta_chunk_plan as plan_kernel
from gdn.backends import gated_delta_chunk_prepare as prepare_kernel
from gdn.backends import gated_delta_chunk_walk as portable_walk
from gdn.backends import gated_delta_chunk_walk_sm90 as sm90_walk
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import numpy as numpy_backend
from gdn.backends import numpy_chunked, recurrence
from gdn.backends.chunk_layout import ChunkLayout, first_part, unserved_reason
from gdn.backends.launch import Launch
from gdn.errors import GdnError, ShapeError, rejection
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs
from gdn.ring import FoldInputs, Pending

ALGORITHMS = ("recurrent", "chunked", "auto")
#: Tokens from which on "auto" takes a row as chunks. It must not depend on the batch, or a row's bits would.
MIN_CHUNKED_LEN = 128


def known_algorithm(algorithm: Any) -> str:
    """The name of an algorithm; raises GdnError for anything else."""
    if isinstance(algorithm, str) and algorithm in ALGORITHMS:
        return algorithm
    raise GdnError(rejection("algorithm", "'recurrent', 'chunked' or 'auto'", repr(algorithm)))


def layout_of(
    geometry: HeadGeometry, work_dtype: str, state_dtype: str, batch_size: int, total_seq_len: int, algorithm: str
) -> ChunkLayout | None:
    """The chunks of a call, None for one that the recurrent kernel runs alone.

    Raises ShapeError for "chunked" on heads that its kernels do not serve, or of too many chunks.
    """
    reason = unserved_reason(geometry)
    if algorithm == "chunked":
        if reason is not None:
            raise ShapeError(reason)
        return ChunkLayout(geometry, work_dtype, state_dtype, batch_size, total_seq_len, min_row_len=1)
    if algorithm == "recurrent" or reason is not None or total_seq_len < MIN_CHUNKED_LEN:
        return None
    return ChunkLayout(geometry, work_dtype, state_dtype, batch_size, total_seq_len, MIN_CHUNKED_LEN)


def workspace_bytes(layout: ChunkLayout | None) -> int:
    """Bytes of the workspace of such a call."""
    return 0 if layout is None or layout.total_seq_len == 0 else layout.total_bytes


def is_idle(layout: ChunkLayout, pending: Pending | None) -> bool:
    """Whether there is nothing to run, to clear or to fold."""
    return layout.total_seq_len == 0 and (pending is None or layout.batch_size == 0)


def launches(
    inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, workspace: Argument, pending: Pending | None
) -> tuple[Launch, ...]:
    """All launches of a call, in order; index values are not looked at."""
    first = first_part(workspace.pointer)
    found: list[Launch] = []
    if pending is not None and layout.batch_size:
        fold = _fold_of(inputs, pending)
        found.append(fold_kernel.launch(fold, fold_kernel.row_tile(fold)))
    if layout.total_seq_len:
        found.append(plan_kernel.launch(inputs, out, layout, first))
        found += _slab_launches(inputs, out, layout, first)
        if layout.short_slots_bytes:
            found.append(_short_rows(inputs, out, first + layout.short_slots_offset))
    return tuple(found)


def _slab_launches(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, first: int) -> Iterator[Launch]:
    has_own = sm90_walk.is_for(inputs.recurrent_state.place) and sm90_walk.serves(inputs, out, layout)
    walk = sm90_walk if has_own else portable_walk
    for slab in range(layout.num_slabs):
        yield prepare_kernel.launch(inputs, layout, first, slab)
        yield walk.launch(inputs, out, layout, first, slab)


def _short_rows(inputs: RecurrenceInputs, out: Argument, slots: int) -> Launch:
    """The recurrent kernel over all sequences, of which those that have no slot in the table at `slots` are padding."""
    table = inputs.slot_idx._replace(array=None, strides=(1,), dtype="uint32", pointer=slots)
    rows = replace(inputs, slot_idx=table)
    return fwd_kernel.launch(rows, out, recurrence.row_tile(rows, out), clears_rows=False)


def _fold_of(inputs: RecurrenceInputs, pending: Pending) -> FoldInputs:
    """The fold of what is pending, of one layer."""
    slots, ring_rows = inputs.slot_idx.array[None], pending.ring_slot_idx.array[None]
    tables = arrays.take("row_ids", slots), pending.ring, arrays.take("ring_row_ids", ring_rows)
    return FoldInputs(inputs.geometry, inputs.recurrent_state, *tables, pending.num_pending)


def run_on_numpy(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, pending: Pending | None) -> None:
    """The same on the backend numpy."""
    if pending is not None:
        numpy_backend.gated_delta_state_fold(_fold_of(inputs, pending))
    numpy_chunked.gated_delta_recurrence_fwd_chunked(inputs, out, layout.min_row_len)
