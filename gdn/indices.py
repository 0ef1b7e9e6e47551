"""Rules about the values of index arrays. Reading them from a GPU copies and waits, so ops do it on demand."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn.arrays import Argument, to_numpy
from gdn.conv1d import Conv1dBatch
from gdn.errors import IndexValueError, rejection
from gdn.geometry import PAD_SLOT
from gdn.recurrence import RecurrenceInputs
from gdn.ring import FoldInputs, Pending, VerifyInputs, ring_len

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


def slot_values(argument: Argument) -> IndexArray:
    """Slots as int64; int32 is read as the same 32 bits, so -1 is PAD_SLOT."""
    return to_numpy(argument).astype(np.int64) & 0xFFFFFFFF


def offset_values(argument: Argument) -> IndexArray:
    """Offsets as int64."""
    return to_numpy(argument).astype(np.int64)


def check_recurrence_indices(inputs: RecurrenceInputs, pending: Pending | None = None) -> None:
    """Slots and offsets of a recurrence call, and rows of pending records.

    Raises IndexValueError with the first offending position.
    """
    is_live = _has_tokens(inputs.input_row_offsets, inputs.total_seq_len)
    if pending is not None:
        folds = has_pending(pending) & (slot_values(inputs.slot_idx) != PAD_SLOT)
        is_live |= folds
        _check_table(pending.ring_slot_idx, "ring row", "ring_rows", pending.ring.shape[0], folds)
    _check_table(inputs.slot_idx, "slot", "max_slots", inputs.max_slots, is_live)


def check_verify_indices(inputs: VerifyInputs) -> None:
    """Those of the recurrence, and ring rows; raises IndexValueError with the first offending position."""
    slots, ring_rows, pending = inputs.recurrence.slot_idx, inputs.ring_slot_idx, inputs.pending
    is_no_padding = _names_both(slots, ring_rows)
    is_live = _has_tokens(inputs.recurrence.input_row_offsets, inputs.recurrence.total_seq_len) & is_no_padding
    reads = is_live if pending is None else is_live | (is_no_padding & folds_pending(inputs, pending))
    _check_table(slots, "slot", "max_slots", inputs.recurrence.max_slots, reads)
    _check_table(ring_rows, "ring row", "ring_rows", inputs.ring.shape[0], is_live)
    if pending is not None:
        reads_records = reads & has_pending(pending)
        _check_table(pending.ring_slot_idx, "ring row", "ring_rows", inputs.ring.shape[0], reads_records)
        _check_not_recorded_by_others(ring_rows, is_live, pending.ring_slot_idx, reads_records)


def has_pending(pending: Pending) -> np.ndarray[Any, Any]:
    """Sequences that have records pending: a count of 0 or above RING_LEN says that all are in the state."""
    counts, rows = slot_values(pending.num_pending), slot_values(pending.ring_slot_idx)
    some: np.ndarray[Any, Any] = (counts > 0) & (counts <= ring_len(pending.ring)) & (rows != PAD_SLOT)
    return some


def folds_pending(inputs: VerifyInputs, pending: Pending) -> np.ndarray[Any, Any]:
    """Sequences of a verify whose pending records lie in another ring row than their window's, and so are folded."""
    is_another: np.ndarray[Any, Any] = slot_values(pending.ring_slot_idx) != slot_values(inputs.ring_slot_idx)
    folds: np.ndarray[Any, Any] = is_another & has_pending(pending)
    return folds


def _check_not_recorded_by_others(
    ring_rows: Argument, records: np.ndarray[Any, Any], pending_rows: Argument, reads: np.ndarray[Any, Any]
) -> None:
    """No sequence reads records from a ring row that another one writes. Each table names no row twice."""
    written, read = slot_values(ring_rows), slot_values(pending_rows)
    writer_of = {int(written[at]): int(at) for at in np.flatnonzero(records)}
    for at in np.flatnonzero(reads):
        writer = writer_of.get(int(read[at]), int(at))
        if writer != at:
            got = f"{read[at]}, as {ring_rows.name}[{writer}]"
            raise IndexValueError(
                rejection(f"{pending_rows.name}[{at}]", "a ring row that no other live sequence records in", got)
            )


def check_fold_indices(inputs: FoldInputs) -> None:
    """Slots and ring rows of a fold; raises IndexValueError with the first offending position.

    A row whose count says that nothing is folded is not live. Counts themselves may be anything.
    """
    counts = slot_values(inputs.num_accepted)
    is_live = (counts > 0) & (counts <= ring_len(inputs.ring)) & _names_both(inputs.row_ids, inputs.ring_row_ids)
    _check_table(inputs.row_ids, "slot", "max_slots", inputs.recurrent_state.shape[0], is_live)
    _check_table(inputs.ring_row_ids, "ring row", "ring_rows", inputs.ring.shape[0], is_live)


def _names_both(slots: Argument, ring_rows: Argument) -> np.ndarray[Any, Any]:
    """Rows that are padding in neither table: one that is padding in either touches nothing."""
    names_both: np.ndarray[Any, Any] = (slot_values(slots) != PAD_SLOT) & (slot_values(ring_rows) != PAD_SLOT)
    return names_both


def check_conv1d_indices(batch: Conv1dBatch, num_accepted: Argument | None = None) -> None:
    """Slots and offsets of a convolution, or of its commit: a sequence whose count is 0 is not live there.

    Raises IndexValueError with the first offending position. Counts themselves may be anything.
    """
    is_live = _has_tokens(batch.input_row_offsets, batch.total_seq_len)
    if num_accepted is not None:
        is_live &= slot_values(num_accepted) > 0
    _check_table(batch.slot_idx, "slot", "max_slots", batch.max_slots, is_live)


def _has_tokens(input_row_offsets: Argument, total_seq_len: int) -> np.ndarray[Any, Any]:
    """Sequences that have tokens; raises IndexValueError for offsets that break a rule."""
    offsets = offset_values(input_row_offsets)
    _check_offsets(input_row_offsets.name, offsets, total_seq_len)
    has_tokens: np.ndarray[Any, Any] = np.diff(offsets) > 0
    return has_tokens


def _check_offsets(name: str, offsets: IndexArray, total_seq_len: int) -> None:
    below = np.flatnonzero(offsets < 0)
    if below.size:
        raise IndexValueError(rejection(f"{name}[{below[0]}]", "at least 0", offsets[below[0]]))
    decreasing = np.flatnonzero(np.diff(offsets) < 0) + 1
    if decreasing.size:
        at = decreasing[0]
        raise IndexValueError(rejection(f"{name}[{at}]", f"at least {name}[{at - 1}] = {offsets[at - 1]}", offsets[at]))
    beyond = np.flatnonzero(offsets > total_seq_len)
    if beyond.size:
        raise IndexValueError(
            rejection(f"{name}[{beyond[0]}]", f"at most total_seq_len = {total_seq_len}", offsets[beyond[0]])
        )


def _check_table(table: Argument, entry: str, count_name: str, count: int, is_live: np.ndarray[Any, Any]) -> None:
    """Entries name one of `count` slots or ring rows, or are PAD_SLOT, and no two live ones name the same.

    A row that is not live (an empty sequence, say) reads and writes nothing, so it may name what another uses.
    """
    values = slot_values(table)
    used = values != PAD_SLOT
    outside = np.argwhere(used & (values >= count))
    if outside.size:
        at = tuple(outside[0])
        raise IndexValueError(
            rejection(_place(table, at), f"a {entry} below {count_name} = {count}, or PAD_SLOT", values[at])
        )
    live = np.flatnonzero(used & is_live)
    order = live[np.argsort(values.flat[live], kind="stable")]
    repeated = np.flatnonzero(np.diff(values.flat[order]) == 0)
    if repeated.size:
        first, second = (np.unravel_index(order[repeated[0] + step], values.shape) for step in (0, 1))
        got = f"{values[second]}, as {_place(table, first)}"
        raise IndexValueError(rejection(_place(table, second), f"a {entry} that no other live sequence uses", got))


def _place(table: Argument, position: tuple[np.intp, ...]) -> str:
    return f"{table.name}[{', '.join(str(int(axis)) for axis in position)}]"
