"""Rules about the values of index arrays. Reading them from a GPU copies and waits, so ops do it on demand."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn.arrays import Argument, to_numpy
from gdn.errors import IndexValueError, rejection
from gdn.recurrence import RecurrenceInputs

PAD_SLOT = 0xFFFFFFFF

IndexArray = np.ndarray[Any, np.dtype[np.int64]]


def slot_values(argument: Argument) -> IndexArray:
    """Slots as int64; int32 is read as the same 32 bits, so -1 is PAD_SLOT."""
    return to_numpy(argument).astype(np.int64) & 0xFFFFFFFF


def offset_values(argument: Argument) -> IndexArray:
    """Offsets as int64."""
    return to_numpy(argument).astype(np.int64)


def check_recurrence_indices(inputs: RecurrenceInputs) -> None:
    """Slots and offsets of a recurrence call; raises IndexValueError with the first offending position."""
    offsets = offset_values(inputs.input_row_offsets)
    _check_offsets(inputs.input_row_offsets.name, offsets, inputs.total_seq_len)
    slots = slot_values(inputs.slot_idx)
    _check_slots(inputs.slot_idx.name, slots, inputs.max_slots, np.diff(offsets) > 0)


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


def _check_slots(name: str, slots: IndexArray, max_slots: int, has_tokens: np.ndarray[Any, Any]) -> None:
    used = slots != PAD_SLOT
    outside = np.flatnonzero(used & (slots >= max_slots))
    if outside.size:
        at = outside[0]
        raise IndexValueError(
            rejection(f"{name}[{at}]", f"a slot below max_slots = {max_slots}, or PAD_SLOT", slots[at])
        )
    # An empty sequence leaves its slot alone, so it may name one that another sequence uses.
    live = np.flatnonzero(used & has_tokens)
    order = live[np.argsort(slots[live], kind="stable")]
    repeated = np.flatnonzero(np.diff(slots[order]) == 0)
    if repeated.size:
        first, second = order[repeated[0]], order[repeated[0] + 1]
        raise IndexValueError(
            rejection(
                f"{name}[{second}]",
                "a slot that no other live sequence uses",
                f"{slots[second]}, as {name}[{first}]",
            )
        )
