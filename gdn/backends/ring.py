"""What the launches of kernels that read or write a ring share: parameters, constants and arguments."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.launch import KERNEL_TYPE
from gdn.ring import Pending, ring_len

RING_PARAMETERS = (
    ("ring", "pointer"),
    ("ring_rows", "int64"),
    ("record_stride", "int64"),
)
PENDING_PARAMETERS = (
    ("pending_ring_slot_idx", "pointer"),
    ("pending_ring_slot_idx_stride", "int64"),
    ("num_pending", "pointer"),
    ("num_pending_stride", "int64"),
)


def ring_macros(ring: Argument) -> tuple[tuple[str, str], ...]:
    """The compile-time constants for this ring."""
    return (
        ("RING_LEN", str(ring_len(ring))),
        ("RING_TYPE", KERNEL_TYPE[ring.dtype]),
        ("RING_IS_PACKED", str(_records_are_packed(ring)).lower()),
    )


def _records_are_packed(ring: Argument) -> bool:
    """Whether every record of a ring starts on a 16-byte boundary."""
    return ring.pointer % 16 == 0 and ring.shape[3] * ring.itemsize % 16 == 0


def pending_macros(*, has_pending: bool) -> tuple[tuple[str, str], ...]:
    """Whether a recurrence kernel takes pending records."""
    return (("HAS_PENDING", str(int(has_pending))),)


def ring_arguments(ring: Argument) -> tuple[int, ...]:
    """The values of `RING_PARAMETERS`."""
    return ring.pointer, ring.shape[0], ring.shape[3]


def pending_arguments(pending: Pending) -> tuple[int, ...]:
    """The values of `PENDING_PARAMETERS`."""
    rows, counts = pending.ring_slot_idx, pending.num_pending
    return rows.pointer, *rows.strides, counts.pointer, *counts.strides
