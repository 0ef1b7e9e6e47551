"""The launch of `kernels/gated_delta_state_fold.cu`."""

from __future__ import annotations

from gdn.backends import ring
from gdn.backends.launch import KERNEL_TYPE, MAX_GRID_BLOCKS, Kernel, Launch, Variant
from gdn.backends.recurrence import TileSizes, pool_is_packed, state_stays, tile_size
from gdn.backends.row_tile import RowTile, is_common_size, row_tile_for
from gdn.errors import ShapeError, rejection
from gdn.ring import FoldInputs

KERNEL = Kernel(
    "gated_delta_state_fold",
    (
        ("recurrent_state", "pointer"),
        ("state_slot_stride", "int64"),
        ("max_slots", "int64"),
        ("row_ids", "pointer"),
        ("row_ids_layer_stride", "int64"),
        ("row_ids_row_stride", "int64"),
        *ring.RING_PARAMETERS,
        ("ring_row_ids", "pointer"),
        ("ring_row_ids_layer_stride", "int64"),
        ("ring_row_ids_row_stride", "int64"),
        ("num_accepted", "pointer"),
        ("num_accepted_stride", "int64"),
        ("batch_size", "int64"),
        ("num_key_heads", "int64"),
        ("group_size", "int64"),
    ),
)


#: As in `gdn.backends.recurrence`.
_TILES: dict[int, TileSizes] = {
    4: ((128, (16, 64)), (384, (32, 64)), (None, (64, 128))),
    2: ((128, (32, 128)), (None, (32, 64))),
}


def row_tile(inputs: FoldInputs) -> RowTile:
    """The thread map for these inputs."""
    num_heads = inputs.num_layers * inputs.batch_size * inputs.geometry.num_value_heads
    itemsize = inputs.recurrent_state.itemsize
    return row_tile_for(inputs.geometry, itemsize, *tile_size(_TILES[itemsize], num_heads))


def registers(inputs: FoldInputs, tile: RowTile) -> int:
    """Registers that a thread may use: as few as it can without spilling, so that more of them fit."""
    key_head_dim, itemsize = inputs.geometry.key_head_dim, inputs.recurrent_state.itemsize
    elements = tile.elements_per_lane(key_head_dim)
    is_light = is_common_size(key_head_dim) and pool_is_packed(inputs.recurrent_state) and tile.columns_per_lane <= 4
    if is_light and (elements <= 32 or itemsize == 2):
        return 80 if elements <= 32 else 96
    return 128 if elements <= 64 else 256


def num_blocks(inputs: FoldInputs, tile: RowTile) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them."""
    geometry = inputs.geometry
    rows = inputs.num_layers * inputs.batch_size
    blocks = rows * geometry.num_value_heads * (geometry.value_head_dim // tile.columns)
    if blocks > MAX_GRID_BLOCKS:
        expected = f"tables of at most {MAX_GRID_BLOCKS} blocks in one launch"
        raise ShapeError(rejection("row_ids", expected, f"{blocks} for {rows} rows"))
    return blocks


def variant(inputs: FoldInputs, tile: RowTile) -> Variant:
    """The compile-time constants for these inputs."""
    geometry = inputs.geometry
    stays = state_stays(inputs.recurrent_state, inputs.num_layers * inputs.batch_size)
    return Variant(
        KERNEL,
        (
            ("KEY_HEAD_DIM", str(geometry.key_head_dim)),
            ("VALUE_HEAD_DIM", str(geometry.value_head_dim)),
            ("STATE_TYPE", KERNEL_TYPE[inputs.recurrent_state.dtype]),
            ("IS_PACKED", str(pool_is_packed(inputs.recurrent_state)).lower()),
            ("STATE_STAYS", str(stays).lower()),
            *ring.ring_macros(inputs.ring),
            *tile.macros(geometry.key_head_dim, inputs.recurrent_state.itemsize, registers(inputs, tile)),
        ),
    )


def launch(inputs: FoldInputs, tile: RowTile) -> Launch:
    """The complete launch; index values are not looked at."""
    state = inputs.recurrent_state
    return Launch(
        variant(inputs, tile),
        num_blocks(inputs, tile),
        tile.threads,
        (
            *(state.pointer, state.strides[0], state.shape[0]),
            *(inputs.row_ids.pointer, *inputs.row_ids.strides),
            *ring.ring_arguments(inputs.ring),
            *(inputs.ring_row_ids.pointer, *inputs.ring_row_ids.strides),
            *(inputs.num_accepted.pointer, *inputs.num_accepted.strides),
            *(inputs.batch_size, inputs.geometry.num_key_heads, inputs.geometry.group_size),
        ),
    )
