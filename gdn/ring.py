"""Arguments of the speculative functions: the ring of records, and the tables that point into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.arrays import Argument
from gdn.check import (
    require_dense_after,
    require_disjoint,
    require_float,
    require_index,
    require_ndim,
    require_one_place,
    require_shape,
    require_writable,
)
from gdn.errors import DTypeError, ShapeError, rejection
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs, require_count, require_writable_pool

#: The longest window a ring can hold; RING_LEN is a compile-time constant of the kernels.
MAX_RING_LEN = 64

Take = Callable[[str, Any], Argument]


@dataclass(frozen=True, slots=True)
class Pending:
    """Where the records lie that each sequence's state has yet to advance over, and how many they are."""

    ring: Argument
    ring_slot_idx: Argument
    num_pending: Argument

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All three, the ring first."""
        return self.ring, self.ring_slot_idx, self.num_pending


@dataclass(frozen=True, slots=True)
class VerifyInputs:
    """The checked arguments of one verify: those of the recurrence, the ring, its tables."""

    recurrence: RecurrenceInputs
    ring: Argument
    ring_slot_idx: Argument
    pending: Pending | None = None

    @property
    def tables(self) -> tuple[Argument, ...]:
        """The tables that a forward call has not."""
        return (self.ring_slot_idx, *(self.pending.arguments[1:] if self.pending else ()))

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All of them, in the order of the call."""
        return (*self.recurrence.arguments, self.ring, *self.tables)


@dataclass(frozen=True, slots=True)
class FoldInputs:
    """The checked arguments of one fold."""

    geometry: HeadGeometry
    recurrent_state: Argument
    row_ids: Argument
    ring: Argument
    ring_row_ids: Argument
    num_accepted: Argument

    @property
    def num_layers(self) -> int:
        """Layers folded by the call."""
        return self.row_ids.shape[0]

    @property
    def batch_size(self) -> int:
        """Rows of each layer."""
        return self.row_ids.shape[1]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All five, in the order of the call."""
        return self.recurrent_state, self.row_ids, self.ring, self.ring_row_ids, self.num_accepted


def ring_len(ring: Argument) -> int:
    """Records that one row of the ring holds."""
    return ring.shape[2]


def require_ring(ring: Argument, geometry: HeadGeometry) -> None:
    """The ring's rank, type, density, length and record stride serve these heads."""
    require_ndim(ring, "[ring_rows, num_key_heads, RING_LEN, record_stride]")
    require_float(ring)
    _, num_key_heads, length, record_stride = ring.shape
    if num_key_heads != geometry.num_key_heads:
        expected = f"num_key_heads = {geometry.num_key_heads} as its second axis"
        raise ShapeError(rejection("ring", expected, f"shape {ring.shape}"))
    if not 1 <= length <= MAX_RING_LEN:
        raise ShapeError(rejection("ring", f"RING_LEN from 1 to {MAX_RING_LEN} as its third axis", length))
    if record_stride < geometry.record_elements:
        expected = (
            f"a record_stride of at least key_head_dim + group_size * (value_head_dim + 1) = "
            f"{geometry.record_elements} as its last axis"
        )
        raise ShapeError(rejection("ring", expected, record_stride))
    require_dense_after(ring, 0)
    require_count(ring, "ring_rows")


def verify_inputs(
    take: Take,
    recurrence: RecurrenceInputs,
    ring: Any,
    ring_slot_idx: Any,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
) -> VerifyInputs:
    """Describe the ring and its tables with `take` and hold them to every rule that shapes and types decide."""
    rows = take("ring_slot_idx", ring_slot_idx)
    records = take("ring", ring)
    require_ring(records, recurrence.geometry)
    _require_row_table(rows, recurrence)
    given = {"pending_ring_slot_idx": pending_ring_slot_idx, "num_pending": num_pending}
    pending = _pending(take, recurrence, records, **given) if _all_given(given) else None
    return VerifyInputs(recurrence, records, rows, pending)


def pending_inputs(
    take: Take, recurrence: RecurrenceInputs, ring: Any, pending_ring_slot_idx: Any, num_pending: Any
) -> Pending | None:
    """The same for a forward call, which takes a ring only for what is pending; None where it takes none."""
    given = {"ring": ring, "pending_ring_slot_idx": pending_ring_slot_idx, "num_pending": num_pending}
    if not _all_given(given):
        return None
    records = take("ring", ring)
    require_ring(records, recurrence.geometry)
    return _pending(take, recurrence, records, pending_ring_slot_idx, num_pending)


def _all_given(arrays: dict[str, Any]) -> bool:
    """Whether these arrays, which belong together, were given; raises DTypeError where only some were."""
    missing = [name for name, array in arrays.items() if array is None]
    if missing and len(missing) < len(arrays):
        present = " and ".join(name for name in arrays if name not in missing)
        raise DTypeError(rejection(missing[0], f"an array, since {present} came too", None))
    return not missing


def _pending(
    take: Take, recurrence: RecurrenceInputs, ring: Argument, pending_ring_slot_idx: Any, num_pending: Any
) -> Pending:
    pending = Pending(ring, take("pending_ring_slot_idx", pending_ring_slot_idx), take("num_pending", num_pending))
    _require_row_table(pending.ring_slot_idx, recurrence)
    _require_row_table(pending.num_pending, recurrence)
    return pending


def _require_row_table(table: Argument, recurrence: RecurrenceInputs) -> None:
    require_index(table)
    require_shape(table, "[batch_size]", (recurrence.batch_size,))


def require_writable_ring(inputs: VerifyInputs) -> str:
    """Pool and ring can be written and lie apart from the inputs, all in one place; returns that place."""
    place = require_one_place(inputs.arguments)
    require_writable_pool(inputs.recurrence)
    require_writable(inputs.ring)
    require_disjoint(inputs.ring, [*inputs.recurrence.arguments, *inputs.tables])
    require_disjoint(inputs.recurrence.recurrent_state, inputs.tables)
    return place


def require_apart_from_pool(inputs: RecurrenceInputs, pending: Pending | None) -> None:
    """The pool of a forward call lies apart from what is pending, in the same place."""
    if pending is not None:
        require_one_place((inputs.recurrent_state, *pending.arguments))
        require_disjoint(inputs.recurrent_state, pending.arguments)


def fold_inputs(take: Take, *arrays: Any) -> FoldInputs:
    """Describe the five arrays of a fold with `take` and hold them to every rule that shapes and types decide."""
    names = ("recurrent_state", "row_ids", "ring", "ring_row_ids", "num_accepted")
    state, row_ids, ring, ring_row_ids, num_accepted = (
        take(name, array) for name, array in zip(names, arrays, strict=True)
    )
    require_ndim(state, "[max_slots, num_value_heads, key_head_dim, value_head_dim]")
    require_float(state)
    require_dense_after(state, 1)
    require_count(state, "max_slots")
    require_ndim(ring, "[ring_rows, num_key_heads, RING_LEN, record_stride]")
    if ring.shape[1] < 1 or state.shape[1] % ring.shape[1]:
        expected = f"num_key_heads as its second axis, dividing the {state.shape[1]} value heads of recurrent_state"
        raise ShapeError(rejection("ring", expected, ring.shape[1]))
    query_key_value_channels = 2 * ring.shape[1] * state.shape[2] + state.shape[1] * state.shape[3]
    geometry = HeadGeometry.from_shapes(query_key_value_channels, state.shape)
    require_ring(ring, geometry)
    require_ndim(row_ids, "[num_layers, batch_size]")
    require_shape(ring_row_ids, "[num_layers, batch_size]", row_ids.shape)
    require_shape(num_accepted, "[batch_size]", row_ids.shape[1:])
    for table in (row_ids, ring_row_ids, num_accepted):
        require_index(table)
    return FoldInputs(geometry, state, row_ids, ring, ring_row_ids, num_accepted)


def require_writable_fold(inputs: FoldInputs) -> str:
    """The pool can be written and lies apart from the other arrays, all in one place; returns that place."""
    place = require_one_place(inputs.arguments)
    require_writable(inputs.recurrent_state)
    require_disjoint(inputs.recurrent_state, inputs.arguments[1:])
    return place
