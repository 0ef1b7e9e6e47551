"""The launch of `kernels/pending_windows.cu`."""

from __future__ import annotations

from dataclasses import dataclass

from gdn.arrays import Argument
from gdn.backends.launch import Kernel, Launch, Variant

KERNEL = Kernel(
    "pending_windows",
    (
        ("is_new", "pointer"),
        ("is_new_stride", "int64"),
        ("num_accepted", "pointer"),
        ("num_accepted_stride", "int64"),
        ("input_row_offsets", "pointer"),
        ("input_row_offsets_stride", "int64"),
        ("offsets_are_signed", "int64"),
        ("slot_idx", "pointer"),
        ("slot_idx_stride", "int64"),
        ("ring_slot_idx", "pointer"),
        ("pending_ring_slot_idx", "pointer"),
        ("spare_ring_slot_idx", "pointer"),
        ("num_pending", "pointer"),
        ("window_len", "pointer"),
        ("first_place", "pointer"),
        ("num_layers", "int64"),
        ("batch_size", "int64"),
        ("ring_len", "int64"),
        ("is_lazy", "int64"),
    ),
)
#: It has no compile-time constants.
VARIANT = Variant(KERNEL, ())
_THREADS = 128


@dataclass(frozen=True, slots=True)
class WindowStep:
    """What a step of the tables is given, each None where it does without."""

    is_new: Argument | None = None
    num_accepted: Argument | None = None
    input_row_offsets: Argument | None = None
    slot_idx: Argument | None = None

    @property
    def arguments(self) -> tuple[Argument | None, ...]:
        """All four."""
        return self.is_new, self.num_accepted, self.input_row_offsets, self.slot_idx


def launch(step: WindowStep, tables: tuple[Argument, ...], ring_len: int, *, is_lazy: bool) -> Launch:
    """The complete launch. tables: the three of ring rows, then the three of counts; values are not looked at."""
    num_layers, batch_size = tables[0].shape
    is_new, accepted, offsets, slots = (
        (table.pointer, table.strides[0]) if table else (0, 0) for table in step.arguments
    )
    are_signed = int(step.input_row_offsets is not None and step.input_row_offsets.dtype == "int32")
    return Launch(
        VARIANT,
        -(-batch_size // _THREADS),
        _THREADS,
        (
            *(*is_new, *accepted, *offsets, are_signed, *slots),
            *(table.pointer for table in tables),
            *(num_layers, batch_size, ring_len, int(is_lazy)),
        ),
    )
