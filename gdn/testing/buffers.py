"""Arrays laid out in memory as callers lay them out: dense, sliced out of wider buffers, strided, reversed.

The whole memory around an array is kept, so that a check can see a write beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

#: Layouts by the number of axes they serve.
LAYOUTS: dict[int, tuple[str, ...]] = {
    1: ("dense", "every_other"),
    2: ("dense", "slice", "unaligned", "every_other", "column_major", "reversed"),
    3: ("dense", "gaps", "unaligned", "by_place", "reversed"),
    4: ("dense", "gaps", "unaligned"),
}
_GAP = 32  # elements, a multiple of 16 bytes for every type


@dataclass(frozen=True, slots=True)
class Buffer:
    """A strided array and all the memory it lies in. Offset and strides are in elements."""

    memory: Array
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def array(self) -> Array:
        """The array as a NumPy view of the memory."""
        itemsize = self.memory.dtype.itemsize
        view: Array = np.ndarray(
            self.shape,
            self.memory.dtype,
            buffer=self.memory,
            offset=self.offset * itemsize,
            strides=tuple(stride * itemsize for stride in self.strides),
        )
        return view

    def copy(self) -> Buffer:
        """The same layout over memory of its own."""
        return replace(self, memory=self.memory.copy())

    def on_gpu(self) -> tuple[Any, Any]:
        """A copy of the memory on the current device, and the array as a CuPy view of it."""
        import cupy

        memory = cupy.asarray(self.memory)
        itemsize = self.memory.dtype.itemsize
        strides = tuple(stride * itemsize for stride in self.strides)
        pointer = memory.data + self.offset * itemsize
        return memory, cupy.ndarray(self.shape, memory.dtype, pointer, strides=strides)


def lay_out(values: Array, layout: str, filler: float = 0) -> Buffer:
    """Copy `values` into memory of the given layout; memory beside the array holds `filler`."""
    offset, strides = _placement(values.shape, layout)
    last = offset + sum(step * (length - 1) for step, length in zip(strides, values.shape, strict=True) if step > 0)
    memory = np.full(last + 1 + _GAP if values.size else _GAP, filler, values.dtype)
    buffer = Buffer(memory, offset if values.size else 0, values.shape, strides)
    buffer.array[...] = values
    return buffer


def _placement(shape: tuple[int, ...], layout: str) -> tuple[int, tuple[int, ...]]:
    """First element and strides of an array in its memory."""
    if layout not in LAYOUTS[len(shape)]:
        raise ValueError(f"layout: expected one of {LAYOUTS[len(shape)]} for {len(shape)} axes, got {layout!r}")
    if len(shape) == 1:
        return (0, (1,)) if layout == "dense" else (1, (2,))
    if len(shape) == 3:
        slots, channels, places = shape
        dense = channels * places
        return {
            "dense": (0, (dense, places, 1)),
            "gaps": (_GAP, (dense + _GAP, places, 1)),
            "unaligned": (1, (dense + 3, places, 1)),
            "by_place": (_GAP, (dense + _GAP, 1, channels)),
            "reversed": (max(slots - 1, 0) * dense, (-dense, places, 1)),
        }[layout]
    if len(shape) == 4:
        dense = shape[1] * shape[2] * shape[3]
        offset, gap = {"dense": (0, 0), "gaps": (_GAP, _GAP), "unaligned": (1, 3)}[layout]
        return offset, (dense + gap, shape[2] * shape[3], shape[3], 1)
    rows, columns = shape
    return {
        "dense": (0, (columns, 1)),
        "slice": (_GAP, (columns + 2 * _GAP, 1)),
        "unaligned": (1, (columns + 1, 1)),
        "every_other": (1, (2 * columns + 3, 2)),
        "column_major": (0, (1, rows)),
        "reversed": (max(rows - 1, 0) * columns, (-columns, 1)),
    }[layout]
