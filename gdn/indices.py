"""Rules about the values of index arrays. Reading them from a GPU copies and waits, so ops do it on demand."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn.arrays import Argument, to_numpy
from gdn.errors import IndexValueError, rejection
from gdn.geometry import PAD_SLOT
from gdn.recurrence import RecurrenceInputs
from gdn.ring import FoldInputs, VerifyInputs, ring_len

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


def slot_values(argument: Argument) -> IndexArray:
    """Slots as int64; int32 is read as the same 32 bits, so -1 is PAD_SLOT."""
    return to_numpy(argument).astype(np.int64) & 0xFFFFFFFF


def offset_values(argument: Argument) -> IndexArray:
    """Offsets as int64."""
    return to_numpy(argument).astype(np.int64)


def check_recurrence_indices(inputs: RecurrenceInputs) -> None:
    """Slots and offsets of a recurrence call; raises IndexValueError with the first offending position."""
    _check_table(inputs.slot_idx, "slot", "max_slots", inputs.max_slots, _has_tokens(inputs))


def check_verify_indices(inputs: VerifyInputs) -> None:
    """Those of the recurrence, and ring rows; raises IndexValueError with the first offending position."""
    slots, ring_rows = inputs.recurrence.slot_idx, inputs.ring_slot_idx
    is_live = _has_tokens(inputs.recurrence) & _names_both(slots, ring_rows)
    _check_table(slots, "slot", "max_slots", inputs.recurrence.max_slots, is_live)
    _check_table(ring_rows, "ring row", "ring_rows", inputs.ring.shape[0], is_live)


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


def _has_tokens(inputs: RecurrenceInputs) -> np.ndarray[Any, Any]:
    """Sequences that have tokens; raises IndexValueError for offsets that break a rule."""
    offsets = offset_values(inputs.input_row_offsets)
    _check_offsets(inputs.input_row_offsets.name, offsets, inputs.total_seq_len)
    return np.diff(offsets) > 0


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
