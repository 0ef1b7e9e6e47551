"""The launch of `kernels/gated_delta_chunk_walk.cu`."""

from __future__ import annotations

from gdn.arrays import CPU, Argument, device_index
from gdn.backends import cuda
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.launch import KERNEL_TYPE, Kernel, Launch, Variant
from gdn.backends.recurrence import is_packed
from gdn.recurrence import RecurrenceInputs

KERNEL = Kernel(
    "gated_delta_chunk_walk",
    (
        ("qkv_conv_output", "pointer"),
        ("qkv_token_stride", "int64"),
        ("qkv_channel_stride", "int64"),
        ("recurrent_state", "pointer"),
        ("state_slot_stride", "int64"),
        ("out", "pointer"),
        ("out_token_stride", "int64"),
        ("out_channel_stride", "int64"),
        ("chunk_plan", "pointer"),
        ("slab", "pointer"),
        ("carry_in", "pointer"),
        ("carry_out", "pointer"),
        ("first_place", "int64"),
        ("slab_chunks", "int64"),
        ("max_chunks", "int64"),
        ("rows_at_once", "int64"),
        ("num_key_heads", "int64"),
        ("group_size", "int64"),
    ),
)
#: Blocks for each multiprocessor of a GPU, which share the work.
BLOCKS_PER_MULTIPROCESSOR = 2
#: Blocks where there is none: few, so that each has much to walk over.
HOST_BLOCKS = 4

# What a block of every GPU may have, but for what the system takes of it.
_MAX_SHARED_BYTES = 99 * 1024 - 1024


def tile_columns(layout: ChunkLayout) -> int:
    """Columns of a value head that a block walks with."""
    return 64 if layout.geometry.value_head_dim % 64 == 0 else 32


def stage_bytes(layout: ChunkLayout) -> int:
    """What a block holds in shared memory of a chunk."""
    return layout.key_image_bytes + layout.value_image_bytes


def num_stages(layout: ChunkLayout) -> int:
    """Chunks that a block holds at once."""
    return 2 if 2 * stage_bytes(layout) <= _MAX_SHARED_BYTES else 1


def shared_bytes(layout: ChunkLayout) -> int:
    """Shared memory of a block, as the kernel lays it out."""
    return num_stages(layout) * stage_bytes(layout)


def num_blocks(layout: ChunkLayout, place: str | None) -> int:
    """Blocks of the grid: one for each piece of a row in a slab, value head and tile, but not more than run at once."""
    tiles = layout.geometry.num_value_heads * (layout.geometry.value_head_dim // tile_columns(layout))
    bound = min(layout.max_rows, layout.slab_chunks) * tiles
    if place in (None, CPU):
        return min(bound, HOST_BLOCKS)
    return min(bound, BLOCKS_PER_MULTIPROCESSOR * cuda.num_multiprocessors(device_index(place)))


def variant(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout) -> Variant:
    """The compile-time constants for these inputs."""
    return Variant(
        KERNEL,
        (
            ("KEY_HEAD_DIM", str(layout.geometry.key_head_dim)),
            ("VALUE_HEAD_DIM", str(layout.geometry.value_head_dim)),
            ("CHUNK_LEN", str(layout.chunk_len)),
            ("OPERAND_TERMS", str(layout.operand_terms)),
            ("WORK_TYPE", KERNEL_TYPE[inputs.qkv_conv_output.dtype]),
            ("STATE_TYPE", KERNEL_TYPE[inputs.recurrent_state.dtype]),
            ("OUT_TYPE", KERNEL_TYPE[out.dtype]),
            ("IS_PACKED", str(is_packed(inputs, out)).lower()),
            ("WALK_STAGES", str(num_stages(layout))),
            ("SHARED_BYTES", str(shared_bytes(layout))),
        ),
    )


def launch(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, first_part: int, slab: int) -> Launch:
    """The complete launch for a slab, by its number. first_part: the address of the first part of the workspace."""
    return Launch(
        variant(inputs, out, layout),
        num_blocks(layout, inputs.recurrent_state.place),
        2 * tile_columns(layout),
        arguments(inputs, out, layout, first_part, slab),
        begins_early=layout.slabs_overlap,
    )


def arguments(
    inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, first_part: int, slab: int
) -> tuple[int, ...]:
    """The values of the kernel's parameters."""
    qkv, state = inputs.qkv_conv_output, inputs.recurrent_state
    carry_in, carry_out = (first_part + layout.carry_offsets[(slab + side) % 2] for side in (0, 1))
    return (
        *(qkv.pointer, *qkv.strides),
        *(state.pointer, state.strides[0]),
        *(out.pointer, *out.strides),
        *(first_part, first_part + layout.slab_offset(slab), carry_in, carry_out),
        *(slab * layout.slab_chunks, layout.slab_chunks, layout.max_chunks, layout.rows_at_once),
        *(layout.geometry.num_key_heads, layout.geometry.group_size),
    )
