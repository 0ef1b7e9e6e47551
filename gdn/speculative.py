"""Bookkeeping of pending records: which ring row each window takes, and how many records its state has yet to fold.

`gdn.ops.gated_delta_recurrence_verify_ring` advances states over pending records and then runs a window, in one pass;
what it does is decided by tables. `PendingWindows` owns these for a batch and all layers of a model, on the device.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from gdn import arrays, calls
from gdn.arrays import Argument
from gdn.backends import numpy as numpy_backend
from gdn.backends import pending_windows as kernel
from gdn.backends.pending_windows import WindowStep
from gdn.calls import Checked, Ready, Rules
from gdn.check import (
    require_disjoint,
    require_index,
    require_ndim,
    require_one_place,
    require_shape,
)
from gdn.errors import DTypeError, IndexValueError, ShapeError, rejection
from gdn.geometry import PAD_SLOT
from gdn.indices import slot_values
from gdn.ops import gated_delta_state_fold
from gdn.ring import MAX_RING_LEN


class PendingWindows:
    """The ring rows of a batch's windows, and what is pending of them, from one step of a decode loop to the next.

    ::

        windows = PendingWindows(ring_rows, ring_len, lazy=True)
        while decoding:
            windows.begin(input_row_offsets)
            for layer in range(num_layers):
                gdn.ops.gated_delta_recurrence_verify_ring(
                    ..., ring, windows.ring_slot_idx[layer],
                    pending_ring_slot_idx=windows.pending_ring_slot_idx[layer], num_pending=windows.num_pending)
            windows.accept(num_accepted)
        windows.fold(recurrent_state, row_ids, ring)

    Eagerly (``lazy=False``) a window takes the other one of its sequence's two ring rows whenever records are pending,
    so that its verify folds them. With ``lazy=True`` the records stay pending as long as the window fits behind them in
    the same ring row; only then it takes the other one. A window longer than ring_len advances the state itself, and
    nothing is pending after it. A sequence whose window is empty keeps what it has. Plain decoding is a window of one
    token that is always accepted.

    The tables are changed in place, by one small kernel a call, on CuPy's current stream: nothing waits, and the calls
    may be captured into a CUDA graph (`fold` after a `gdn.warmup` of `gdn.ops.gated_delta_state_fold`).

    Attributes:
        ring_slot_idx: [num_layers, batch_size], the ring row in which each window records.
        pending_ring_slot_idx: [num_layers, batch_size], the ring row with each sequence's pending records, at any time.
        num_pending: [batch_size], how many there are.
    """

    def __init__(self, ring_rows: Any, ring_len: int, *, lazy: bool = False) -> None:
        """Begin with nothing pending.

        Args:
            ring_rows: [2, num_layers, batch_size], uint32 or int32, NumPy or CuPy: the two ring rows of each sequence
                in each layer; ``gdn.PAD_SLOT`` for padding. It is copied.
            ring_len: RING_LEN of the ring, 1 to 64.
            lazy: whether records stay pending while the ring row has room.

        Raises:
            ShapeError, DTypeError: an argument breaks a rule above.
            IndexValueError: NumPy arrays only: a sequence has the same ring row twice, or is padding in one of them.
        """
        rows = arrays.take("ring_rows", ring_rows)
        require_index(rows)
        require_ndim(rows, "[2, num_layers, batch_size]")
        require_shape(rows, "[2, num_layers, batch_size]", (2, *rows.shape[1:]))
        if type(ring_len) is not int or not 1 <= ring_len <= MAX_RING_LEN:
            raise ShapeError(rejection("ring_len", f"a whole number from 1 to {MAX_RING_LEN}", repr(ring_len)))
        self._place = rows.place or arrays.CPU
        if self._place == arrays.CPU:
            _require_two_rows(rows)
        self._ring_len = ring_len
        self._rules = _rules_of(ring_len, bool(lazy))
        with arrays.in_place(self._place):
            self.ring_slot_idx = rows.array[0].copy()
            self.pending_ring_slot_idx = rows.array[0].copy()
            self._spare_ring_slot_idx = rows.array[1].copy()
        self.num_pending, self._window_len, self._first_place = (self._new_counts(rows.shape[2:]) for _ in range(3))
        calls.BoundCall(self._rules, (*(None,) * 4, *self._tables))  # compiles for a GPU, as a capture may not

    def _new_counts(self, shape: tuple[int, ...]) -> Any:
        counts = arrays.empty(shape, "uint32", self._place)
        with arrays.in_place(self._place):
            counts[...] = 0
        return counts

    def begin(self, input_row_offsets: Any, slot_idx: Any = None) -> None:
        """Say where the next windows record, which `accept` ends once they are verified.

        A step that failed before its verifies may be begun again.

        Args:
            input_row_offsets: [batch_size + 1], uint32 or int32: of the windows.
            slot_idx: [batch_size], uint32 or int32: the slots of any layer, to be given where some are
                ``gdn.PAD_SLOT`` in this step though their windows are not empty: such sequences keep what is pending,
                as with an empty window.

        Raises:
            ShapeError, DTypeError, DeviceError: it breaks a rule above; nothing was written.
        """
        if input_row_offsets is None:
            raise DTypeError(rejection("input_row_offsets", "an array", None))
        self._advance(None, None, input_row_offsets, slot_idx)

    def accept(self, num_accepted: Any) -> None:
        """Count the accepted records of the windows as pending.

        Args:
            num_accepted: [batch_size], uint32 or int32: accepted tokens of each window, from its first on. More than a
                window has count as all of them. Not looked at where a window is empty, or longer than the ring.

        Raises:
            ShapeError, DTypeError, DeviceError: it breaks a rule above; nothing was written.
        """
        if num_accepted is None:
            raise DTypeError(rejection("num_accepted", "an array", None))
        self._advance(None, num_accepted, None, None)

    def fold(self, recurrent_state: Any, row_ids: Any, ring: Any) -> None:
        """Advance the pool over all that is pending, which then is nothing; for whoever needs the states themselves.

        At any time but between the verifies of a step and its `accept`.

        Args:
            recurrent_state, row_ids, ring: as in `gdn.ops.gated_delta_state_fold`.

        Raises:
            ShapeError: RING_LEN of the ring is another than ring_len.
            GdnError: what `gdn.ops.gated_delta_state_fold` refuses.
        """
        records = arrays.take("ring", ring)
        if len(records.shape) == 4 and records.shape[2] != self._ring_len:
            raise ShapeError(rejection("ring", f"RING_LEN = {self._ring_len} as its third axis", records.shape[2]))
        gated_delta_state_fold(recurrent_state, row_ids, records.array, self.pending_ring_slot_idx, self.num_pending)
        with arrays.in_place(self._place):
            self.num_pending[...] = 0
            self._first_place[...] = 0

    def reset(self, is_new: Any) -> None:
        """Forget what is pending of sequences that start anew, between `accept` and `begin`.

        Args:
            is_new: [batch_size], bool, where the tables are.

        Raises:
            ShapeError, DTypeError, DeviceError: it breaks a rule above; nothing was written.
        """
        if is_new is None:
            raise DTypeError(rejection("is_new", "an array", None))
        self._advance(is_new, None, None, None)

    @property
    def _tables(self) -> tuple[Any, ...]:
        """All that a step changes."""
        return (
            self.ring_slot_idx,
            self.pending_ring_slot_idx,
            self._spare_ring_slot_idx,
            self.num_pending,
            self._window_len,
            self._first_place,
        )

    def _advance(self, *given: Any) -> None:
        calls.run(self._rules, *given, *self._tables)


def _require_two_rows(rows: Argument) -> None:
    """Each sequence has two ring rows, or is padding in both."""
    first, second = slot_values(rows)
    is_wrong = (first == second) & (first != PAD_SLOT) | (first == PAD_SLOT) ^ (second == PAD_SLOT)
    for layer, sequence in zip(*is_wrong.nonzero(), strict=True):
        place = f"ring_rows[1, {layer}, {sequence}]"
        expected = f"another ring row than ring_rows[0, {layer}, {sequence}], or PAD_SLOT in both"
        raise IndexValueError(rejection(place, expected, int(second[layer, sequence])))


#: What a step of the tables changes, by the names of the kernel.
_TABLES = (
    *("ring_slot_idx", "pending_ring_slot_idx", "spare_ring_slot_idx"),
    *("num_pending", "window_len", "first_place"),
)


@cache  # so that calls of like batches are of one kind
def _rules_of(ring_len: int, lazy: bool) -> Rules:
    return partial(_rules, ring_len, lazy)


def _rules(
    ring_len: int,
    lazy: bool,
    is_new: Any,
    num_accepted: Any,
    input_row_offsets: Any,
    slot_idx: Any,
    *tables: Any,
) -> Checked:
    """The rules of a step of the tables, and what runs it."""
    own = tuple(arrays.take(name, table) for name, table in zip(_TABLES, tables, strict=True))
    batch_size = own[0].shape[1]
    step = WindowStep(
        _given("is_new", is_new, "[batch_size]", batch_size, own),
        _given("num_accepted", num_accepted, "[batch_size]", batch_size, own),
        _given("input_row_offsets", input_row_offsets, "[batch_size + 1]", batch_size + 1, own),
        _given("slot_idx", slot_idx, "[batch_size]", batch_size, own),
    )
    place = require_one_place(own)

    def ready() -> Ready:
        return Ready(
            (*step.arguments, *own),
            written=own,
            numpy_form=lambda: numpy_backend.pending_windows(step, own, ring_len, is_lazy=lazy),
            launches=lambda: (kernel.launch(step, own, ring_len, is_lazy=lazy),),
            idle=batch_size == 0,
        )

    return Checked(place, lambda: None, ready)


def _given(name: str, value: Any, axes: str, length: int, tables: tuple[Argument, ...]) -> Argument | None:
    """A table that the caller gives, checked; None where this step does without."""
    if value is None:
        return None
    table = arrays.take(name, value)
    if name != "is_new":
        require_index(table)
    elif table.dtype != "bool":
        raise DTypeError(rejection(name, "bool", table.dtype))
    require_shape(table, axes, (length,))
    require_one_place((tables[0], table))
    for own in tables:
        require_disjoint(own, (table,))
    return table
