"""The launch of `kernels/gated_delta_chunk_prepare.cu`."""

from __future__ import annotations

from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.launch import KERNEL_TYPE, Kernel, Launch, Variant
from gdn.recurrence import RecurrenceInputs

KERNEL = Kernel(
    "gated_delta_chunk_prepare",
    (
        ("qkv_conv_output", "pointer"),
        ("qkv_token_stride", "int64"),
        ("qkv_channel_stride", "int64"),
        ("decay_per_token", "pointer"),
        ("decay_token_stride", "int64"),
        ("decay_head_stride", "int64"),
        ("beta_per_token", "pointer"),
        ("beta_token_stride", "int64"),
        ("beta_head_stride", "int64"),
        ("chunk_plan", "pointer"),
        ("slab", "pointer"),
        ("first_place", "int64"),
        ("slab_chunks", "int64"),
        ("max_chunks", "int64"),
        ("num_key_heads", "int64"),
        ("group_size", "int64"),
    ),
)
_THREADS = 256
_HEADS_AT_ONCE = 2  # value heads of a block


def shared_bytes(layout: ChunkLayout) -> int:
    """Shared memory of a block, as the kernel lays it out: its `Shared`."""
    chunk_len, blocks = layout.chunk_len, layout.chunk_len // 16
    tiles = max(layout.key_image_bytes, _HEADS_AT_ONCE * layout.matrices_bytes)
    triangle = blocks * (blocks + 1) * 512  # two terms of half a square of 16 x 16 blocks, with its diagonal
    gates = 4 * 4 * chunk_len + 2 * 4  # four numbers of each token, two powers
    norms = 2 * 4 * chunk_len
    return -(-(tiles + _HEADS_AT_ONCE * (triangle + gates) + norms) // 16) * 16


def variant(inputs: RecurrenceInputs, layout: ChunkLayout) -> Variant:
    """The compile-time constants for these inputs."""
    return Variant(
        KERNEL,
        (
            ("KEY_HEAD_DIM", str(layout.geometry.key_head_dim)),
            ("VALUE_HEAD_DIM", str(layout.geometry.value_head_dim)),
            ("CHUNK_LEN", str(layout.chunk_len)),
            ("OPERAND_TERMS", str(layout.operand_terms)),
            ("WORK_TYPE", KERNEL_TYPE[inputs.qkv_conv_output.dtype]),
            ("GATE_TYPE", KERNEL_TYPE[inputs.decay_per_token.dtype]),
            ("IS_PACKED", str(inputs.qkv_conv_output.rows_are_packed()).lower()),
            ("SHARED_BYTES", str(shared_bytes(layout))),
        ),
    )


def launch(inputs: RecurrenceInputs, layout: ChunkLayout, first_part: int, slab: int) -> Launch:
    """The complete launch for a slab, by its number. first_part: the address of the first part of the workspace."""
    qkv, decay, beta = inputs.qkv_conv_output, inputs.decay_per_token, inputs.beta_per_token
    return Launch(
        variant(inputs, layout),
        layout.slab_chunks * layout.geometry.num_key_heads * -(-layout.geometry.group_size // _HEADS_AT_ONCE) + 1,
        _THREADS,
        (
            *(qkv.pointer, *qkv.strides),
            *(decay.pointer, *decay.strides),
            *(beta.pointer, *beta.strides),
            *(first_part, first_part + layout.slab_offset(slab)),
            *(slab * layout.slab_chunks, layout.slab_chunks, layout.max_chunks),
            *(layout.geometry.num_key_heads, layout.geometry.group_size),
        ),
        begins_early=layout.slabs_overlap and slab > 0,  # the plan, which comes before the first, lets none begin
    )
