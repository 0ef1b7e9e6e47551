"""What the launches of all recurrence kernels share: parameters, constants, grid and arguments."""

from __future__ import annotations

import math

from gdn.arrays import CPU, Argument, device_index
from gdn.backends import cuda
from gdn.backends.launch import KERNEL_TYPE, MAX_GRID_BLOCKS
from gdn.backends.row_tile import (
    MAX_SHORT_STAY_BYTES,
    RowTile,
    is_common_size,
    nearest_row_tile,
    row_tile_for,
    row_tiles,
)
from gdn.backends.streamed_tile import (
    blocks_at_once,
    streamed_registers,
    streamed_tile_for,
    streamed_tiles,
)
from gdn.errors import ShapeError, rejection
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs

#: Columns of a tile and threads of its block, up to a number of heads; None for any number.
TileSizes = tuple[tuple[int | None, tuple[int, int]], ...]

#: As in `kernels/ragged_rows.cuh`.
ROWS_PER_CLEARING_BLOCK = 64

#: Stands for the multiprocessors of a GPU where there is none: few, so that blocks have much to stream through.
HOST_MULTIPROCESSORS = 1

#: Columns of a tile and threads of its block, by the most heads over all sequences, for each size of a pool's element.
_TILES: dict[int, TileSizes] = {
    4: ((128, (16, 32)), (384, (32, 64)), (None, (64, 128))),
    2: ((512, (32, 64)), (None, (64, 128))),
}

#: The parameters that every recurrence kernel begins with.
PARAMETERS = (
    ("qkv_conv_output", "pointer"),
    ("qkv_token_stride", "int64"),
    ("qkv_channel_stride", "int64"),
    ("decay_per_token", "pointer"),
    ("decay_token_stride", "int64"),
    ("decay_head_stride", "int64"),
    ("beta_per_token", "pointer"),
    ("beta_token_stride", "int64"),
    ("beta_head_stride", "int64"),
    ("recurrent_state", "pointer"),
    ("state_slot_stride", "int64"),
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
    ("num_key_heads", "int64"),
    ("group_size", "int64"),
)


def row_tile(inputs: RecurrenceInputs, out: Argument | None = None, pending_ring_len: int = 0) -> RowTile:
    """The thread map for these inputs and this readout; None is a readout yet to be made.

    pending_ring_len: RING_LEN of a call with pending records.
    """
    geometry, itemsize = inputs.geometry, inputs.recurrent_state.itemsize
    if is_packed(inputs, out):
        streamed = streamed_tile_for(geometry, itemsize, inputs.batch_size, inputs.total_seq_len, pending_ring_len)
        if streamed is not None:
            return streamed
    return row_tile_for(geometry, itemsize, *tile_size(_TILES[itemsize], inputs.batch_size * geometry.num_value_heads))


def tile_size(sizes: TileSizes, num_heads: int) -> tuple[int, int]:
    """Columns and threads for so many heads."""
    return next(size for most, size in sizes if most is None or num_heads <= most)


def registers(inputs: RecurrenceInputs, out: Argument, tile: RowTile, *, has_records: bool) -> int:
    """Registers that a thread may use: as few as it can without spilling, so that more of them fit.

    A test compiles every variant and fails on a spill.
    """
    key_head_dim, itemsize = inputs.geometry.key_head_dim, inputs.recurrent_state.itemsize
    if tile.streamed_warps:
        return streamed_registers(tile, key_head_dim)
    values = tile.elements_per_lane(key_head_dim) + 4 * tile.columns_per_lane  # and sums, delta factors, readouts
    if values <= 32:
        return 128
    is_light = not has_records and is_packed(inputs, out) and inputs.qkv_conv_output.itemsize == 2
    if (
        is_light
        and is_common_size(key_head_dim)
        and values <= 80
        and tile.threads <= 128
        and (itemsize == 2 or tile.columns <= 32)
    ):
        return 128
    return 168 if values <= 80 else 256


def num_blocks(inputs: RecurrenceInputs, tile: RowTile, *, clears_rows: bool = True) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them."""
    geometry = inputs.geometry
    tiles = inputs.batch_size * geometry.num_value_heads * (geometry.value_head_dim // tile.columns)
    clearing = num_clearing_blocks(inputs.total_seq_len) if clears_rows else 0
    if tiles + clearing > MAX_GRID_BLOCKS:
        expected = f"a batch of at most {MAX_GRID_BLOCKS} blocks in one launch"
        raise ShapeError(rejection("slot_idx", expected, f"{tiles + clearing} for {inputs.batch_size} sequences"))
    if not tile.streamed_warps:
        return tiles + clearing
    return min(tiles // tile.streamed_warps + clearing, _blocks_at_once(inputs, tile))


def num_clearing_blocks(total_seq_len: int) -> int:
    """Blocks that clear rows of a readout (`kernels/ragged_rows.cuh`)."""
    return -(-total_seq_len // ROWS_PER_CLEARING_BLOCK)


def _blocks_at_once(inputs: RecurrenceInputs, tile: RowTile) -> int:
    """Streaming blocks that the device of the arrays runs at once."""
    key_head_dim, state = inputs.geometry.key_head_dim, inputs.recurrent_state
    if state.place in (None, CPU):
        return HOST_MULTIPROCESSORS * blocks_at_once(tile, key_head_dim)
    device = device_index(state.place)
    shared_bytes = cuda.shared_bytes_of_multiprocessor(device)
    return cuda.num_multiprocessors(device) * blocks_at_once(tile, key_head_dim, state.itemsize, shared_bytes)


def state_stays(state: Argument, num_states: int) -> bool:
    """Whether a launch over so many slots should leave them in the cache as long as usual."""
    return num_states * math.prod(state.shape[1:]) * state.itemsize > MAX_SHORT_STAY_BYTES


def macros(inputs: RecurrenceInputs, out: Argument, tile: RowTile, *, has_records: bool) -> tuple[tuple[str, str], ...]:
    """The compile-time constants for these inputs, of a kernel that writes or reads records or of one that does not."""
    geometry = inputs.geometry
    stays = state_stays(inputs.recurrent_state, inputs.batch_size)
    cap = registers(inputs, out, tile, has_records=has_records)
    return (
        ("KEY_HEAD_DIM", str(geometry.key_head_dim)),
        ("VALUE_HEAD_DIM", str(geometry.value_head_dim)),
        ("WORK_TYPE", KERNEL_TYPE[inputs.qkv_conv_output.dtype]),
        ("GATE_TYPE", KERNEL_TYPE[inputs.decay_per_token.dtype]),
        ("STATE_TYPE", KERNEL_TYPE[inputs.recurrent_state.dtype]),
        ("OUT_TYPE", KERNEL_TYPE[out.dtype]),
        ("IS_PACKED", str(is_packed(inputs, out)).lower()),
        ("STATE_STAYS", str(stays).lower()),
        *tile.macros(geometry.key_head_dim, inputs.recurrent_state.itemsize, cap),
    )


def is_packed(inputs: RecurrenceInputs, out: Argument | None) -> bool:
    """Whether queries, keys, values, states and readout allow the kernels' widest accesses; a new readout does."""
    return (
        inputs.qkv_conv_output.rows_are_packed()
        and pool_is_packed(inputs.recurrent_state)
        and (out is None or out.rows_are_packed())
    )


def pool_is_packed(pool: Argument) -> bool:
    """Whether every slot of a pool starts on a 16-byte boundary."""
    return pool.pointer % 16 == 0 and (pool.shape[0] <= 1 or pool.strides[0] * pool.itemsize % 16 == 0)


def arguments(inputs: RecurrenceInputs, out: Argument) -> tuple[int, ...]:
    """The values of `PARAMETERS`."""
    qkv, state = inputs.qkv_conv_output, inputs.recurrent_state
    decay, beta = inputs.decay_per_token, inputs.beta_per_token
    slots, offsets = inputs.slot_idx, inputs.input_row_offsets
    return (
        *(qkv.pointer, *qkv.strides),
        *(decay.pointer, *decay.strides),
        *(beta.pointer, *beta.strides),
        *(state.pointer, state.strides[0]),
        *(slots.pointer, *slots.strides),
        *(offsets.pointer, *offsets.strides, int(offsets.dtype == "int32")),
        *(out.pointer, *out.strides),
        *(inputs.batch_size, inputs.total_seq_len, inputs.max_slots),
        *(inputs.geometry.num_key_heads, inputs.geometry.group_size),
    )


def some_row_tiles(heads: HeadGeometry, state_itemsize: int, count: int) -> tuple[RowTile, ...]:
    """Maps that calls pick by themselves, and `count` more spread over all that serve these heads."""
    sizes = heads.key_head_dim, heads.value_head_dim, state_itemsize
    tiles, streamed = row_tiles(*sizes), streamed_tiles(*sizes)
    picked = (nearest_row_tile(*sizes, *_TILES[state_itemsize][place][1]) for place in (0, -1))
    spread = tiles[:: max(1, len(tiles) // count)][:count]
    return tuple(dict.fromkeys((*picked, *streamed[:1], *streamed[-2:], *spread)))
