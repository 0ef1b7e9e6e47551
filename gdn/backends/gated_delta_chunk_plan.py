"""The launch of `kernels/gated_delta_chunk_plan.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.launch import KERNEL_TYPE, Kernel, Launch, Variant
from gdn.backends.recurrence import num_clearing_blocks
from gdn.recurrence import RecurrenceInputs

KERNEL = Kernel(
    "gated_delta_chunk_plan",
    (
        ("slot_idx", "pointer"),
        ("slot_idx_stride", "int64"),
        ("input_row_offsets", "pointer"),
        ("input_row_offsets_stride", "int64"),
        ("offsets_are_signed", "int64"),
        ("out", "pointer"),
        ("out_token_stride", "int64"),
        ("out_channel_stride", "int64"),
        ("batch_size", "int64"),
        ("total_seq_len", "int64"),
        ("max_slots", "int64"),
        ("value_dim", "int64"),
        ("chunk_plan", "pointer"),
        ("max_chunks", "int64"),
        ("min_row_len", "int64"),
        ("rows_at_once", "int64"),
        ("short_slot_idx", "pointer"),
    ),
)
_THREADS = 1024
_MAX_CLEARING_BLOCKS = 128  # which share the rows


def variant(out: Argument, layout: ChunkLayout) -> Variant:
    """The compile-time constants for this readout."""
    return Variant(KERNEL, (("CHUNK_LEN", str(layout.chunk_len)), ("OUT_TYPE", KERNEL_TYPE[out.dtype])))


def launch(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, first_part: int) -> Launch:
    """The complete launch. first_part: the address of the first part of the workspace."""
    slots, offsets = inputs.slot_idx, inputs.input_row_offsets
    short_slots = first_part + layout.short_slots_offset if layout.short_slots_bytes else 0
    return Launch(
        variant(out, layout),
        1 + min(_MAX_CLEARING_BLOCKS, num_clearing_blocks(layout.total_seq_len)),
        _THREADS,
        (
            *(slots.pointer, *slots.strides),
            *(offsets.pointer, *offsets.strides, int(offsets.dtype == "int32")),
            *(out.pointer, *out.strides),
            *(inputs.batch_size, inputs.total_seq_len, inputs.max_slots, inputs.geometry.value_dim),
            *(first_part, layout.max_chunks, layout.min_row_len, layout.rows_at_once, short_slots),
        ),
    )
