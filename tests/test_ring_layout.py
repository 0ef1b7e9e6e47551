"""How the ring's layout reaches the kernels: constants and arguments of a launch, read off the arrays of a call."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gdn.arrays import DTYPES, Argument, take
from gdn.backends import ring as ring_launch
from gdn.ring import Pending

RING_LEN, NUM_KEY_HEADS, RING_ROWS = 3, 2, 5


def ring_of(dtype: str, record_stride: int, offset: int = 0) -> Argument:
    """A ring whose first record lies so many bytes behind a multiple of 16."""
    shape = (RING_ROWS, NUM_KEY_HEADS, RING_LEN, record_stride)
    num_bytes = int(np.prod(shape)) * DTYPES[dtype].itemsize
    memory = np.zeros(num_bytes + offset + 16, np.uint8)
    first = -memory.ctypes.data % 16 + offset
    return take("ring", memory[first : first + num_bytes].view(DTYPES[dtype]).reshape(shape))


def table(length: int, stride: int) -> Any:
    return np.zeros(length * stride, np.uint32)[::stride]


@pytest.mark.parametrize(
    ("dtype", "record_stride", "offset", "is_packed"),
    [
        ("float32", 28, 0, True),
        ("float32", 28, 4, False),
        ("float32", 28, 8, False),
        ("float32", 26, 0, False),
        ("float32", 27, 0, False),
        ("float32", 27, 4, False),
        ("float16", 32, 0, True),
        ("float16", 32, 2, False),
        ("float16", 28, 0, False),
        ("bfloat16", 40, 0, True),
        ("bfloat16", 40, 8, False),
        ("bfloat16", 36, 0, False),
    ],
)
def test_records_are_packed_where_each_starts_on_a_wide_boundary(
    dtype: str, record_stride: int, offset: int, is_packed: bool
) -> None:
    """A wrong yes is a misaligned access on a GPU, which a CPU forgives; a wrong no costs speed alone."""
    ring = ring_of(dtype, record_stride, offset)
    starts = ring.pointer + ring.itemsize * record_stride * np.arange(RING_ROWS * NUM_KEY_HEADS * RING_LEN)
    assert (starts % 16 == 0).all() == is_packed
    ring_type = {"float32": "float"}.get(dtype, dtype)
    assert ring_launch.ring_macros(ring) == (
        ("RING_LEN", "3"),
        ("RING_TYPE", ring_type),
        ("RING_IS_PACKED", "true" if is_packed else "false"),
    )


def test_a_launch_is_told_where_records_lie() -> None:
    """By the names that the kernels give their parameters."""
    ring = ring_of("float32", 28)
    names = [name for name, _ in ring_launch.RING_PARAMETERS]
    told = dict(zip(names, ring_launch.ring_arguments(ring), strict=True))
    assert told == {"ring": ring.pointer, "ring_rows": RING_ROWS, "record_stride": 28}


def test_a_launch_is_told_where_pending_records_lie() -> None:
    rows, counts = take("pending_ring_slot_idx", table(4, 2)), take("num_pending", table(4, 3))
    names = [name for name, _ in ring_launch.PENDING_PARAMETERS]
    told = dict(zip(names, ring_launch.pending_arguments(Pending(ring_of("float32", 28), rows, counts)), strict=True))
    assert told == {
        "pending_ring_slot_idx": rows.pointer,
        "pending_ring_slot_idx_stride": 2,
        "num_pending": counts.pointer,
        "num_pending_stride": 3,
    }


@pytest.mark.parametrize(("has_pending", "value"), [(True, "1"), (False, "0")])
def test_kernels_are_made_with_pending_records_or_without(has_pending: bool, value: str) -> None:
    assert ring_launch.pending_macros(has_pending=has_pending) == (("HAS_PENDING", value),)
