"""The launch of `kernels/gated_delta_chunk_walk_sm90.cu`, for what it serves of the walks."""

from __future__ import annotations

from gdn.arrays import CPU, Argument, device_index
from gdn.backends import cuda
from gdn.backends import gated_delta_chunk_walk as portable
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.recurrence import RecurrenceInputs

KERNEL = Kernel("gated_delta_chunk_walk_sm90", portable.KERNEL.parameters, only_on="sm_90a")

_KEY_HEAD_DIMS = (64, 128)
_COLUMNS = 64  # of a value head, that a warpgroup walks with
_MAX_SHARED_BYTES = 227 * 1024
_MAX_STAGES = 3
_THREADS = {1: 192, 2: 384}
_BARRIER_BYTES = 8
_PIECES_BYTES = 24  # of SlabPieces, rounded up to a barrier


def serves(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout) -> bool:
    """Whether this kernel walks for these inputs, on an architecture that has its instructions."""
    heads = layout.geometry
    return (
        inputs.qkv_conv_output.itemsize == 2
        and heads.key_head_dim in _KEY_HEAD_DIMS
        and heads.value_head_dim % _COLUMNS == 0
        and inputs.qkv_conv_output.rows_are_packed()
        and out.rows_are_packed()
    )


def is_for(place: str | None) -> bool:
    """Whether the GPU at this place has the kernel's instructions."""
    return place not in (None, CPU) and cuda.capability(device_index(place)) == (9, 0)


def warpgroups(layout: ChunkLayout, num_multiprocessors: int) -> int:
    """Warpgroups of a block that walk: one while there are not more blocks than multiprocessors, else two.

    The bits are the same; one is faster, two share what they read.
    """
    heads = layout.geometry
    num_walks = min(layout.max_rows, layout.slab_chunks) * heads.num_value_heads * (heads.value_head_dim // _COLUMNS)
    return possible_warpgroups(layout)[0 if num_walks <= num_multiprocessors else -1]


def possible_warpgroups(layout: ChunkLayout) -> tuple[int, ...]:
    """What `warpgroups` may say for these heads."""
    return (1,) if layout.geometry.value_head_dim % (2 * _COLUMNS) else (1, 2)


def variant(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, num_warpgroups: int) -> Variant:
    """The compile-time constants for these inputs."""
    macros = dict(portable.variant(inputs, out, layout).macros)
    num_stages, shared_bytes = _stages(layout, out.itemsize, num_warpgroups)
    macros |= {
        "WARPGROUPS": str(num_warpgroups),
        "WALK_STAGES": str(num_stages),
        "SHARED_BYTES": str(shared_bytes),
    }
    return Variant(KERNEL, tuple(macros.items()))


def _stages(layout: ChunkLayout, out_itemsize: int, num_warpgroups: int) -> tuple[int, int]:
    """Chunks that a block holds at once, and its shared memory, as the kernel lays it out."""
    values = layout.chunk_len * (_COLUMNS * 2 + 16)
    readouts = layout.chunk_len * (_COLUMNS * out_itemsize + 16)
    stage = -(-(portable.stage_bytes(layout) + num_warpgroups * values) // 1024) * 1024
    beside = num_warpgroups * readouts + _PIECES_BYTES
    num_stages = min(_MAX_STAGES, (_MAX_SHARED_BYTES - beside) // (stage + 2 * _BARRIER_BYTES))
    return num_stages, num_stages * (stage + 2 * _BARRIER_BYTES) + beside


def launch(inputs: RecurrenceInputs, out: Argument, layout: ChunkLayout, first_part: int, slab: int) -> Launch:
    """The complete launch for a slab, by its number. first_part: the address of the first part of the workspace."""
    num_multiprocessors = cuda.num_multiprocessors(device_index(str(inputs.recurrent_state.place)))
    num_warpgroups = warpgroups(layout, num_multiprocessors)
    heads = layout.geometry
    tiles = heads.num_value_heads * (heads.value_head_dim // (_COLUMNS * num_warpgroups))
    bound = min(layout.max_rows, layout.slab_chunks) * tiles
    return Launch(
        variant(inputs, out, layout, num_warpgroups),
        min(bound, num_multiprocessors),
        _THREADS[num_warpgroups],
        portable.arguments(inputs, out, layout, first_part, slab),
        begins_early=layout.slabs_overlap,
    )
