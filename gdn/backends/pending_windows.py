"""The launch of `kernels/pending_windows.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.launch import Kernel, Launch, Variant

KERNEL = Kernel(
    "pending_windows",
    (
        ("num_accepted", "pointer"),
        ("num_accepted_stride", "int64"),
        ("input_row_offsets", "pointer"),
        ("input_row_offsets_stride", "int64"),
        ("offsets_are_signed", "int64"),
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
_THREADS = 128


def launch(
    num_accepted: Argument | None,
    input_row_offsets: Argument | None,
    tables: tuple[Argument, ...],
    ring_len: int,
    *,
    is_lazy: bool,
) -> Launch:
    """The complete launch. tables: the three of ring rows, then the three of counts; values are not looked at."""
    num_layers, batch_size = tables[0].shape
    counts = (num_accepted.pointer, num_accepted.strides[0]) if num_accepted else (0, 0)
    offsets = (0, 0, 0)
    if input_row_offsets:
        is_signed = input_row_offsets.dtype == "int32"
        offsets = (input_row_offsets.pointer, input_row_offsets.strides[0], int(is_signed))
    return Launch(
        Variant(KERNEL, ()),
        -(-batch_size // _THREADS),
        _THREADS,
        (*counts, *offsets, *(table.pointer for table in tables), num_layers, batch_size, ring_len, int(is_lazy)),
    )
