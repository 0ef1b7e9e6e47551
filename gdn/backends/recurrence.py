"""What the launches of all recurrence kernels share: parameters, constants, grid and arguments."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.launch import KERNEL_TYPE, MAX_GRID_BLOCKS
from gdn.backends.row_tile import RowTile, row_tile_for
from gdn.errors import ShapeError, rejection
from gdn.recurrence import RecurrenceInputs

#: As in `kernels/ragged_rows.cuh`.
ROWS_PER_CLEARING_BLOCK = 64

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


def row_tile(inputs: RecurrenceInputs) -> RowTile:
    """The thread map for these inputs."""
    num_heads = inputs.batch_size * inputs.geometry.num_value_heads
    return row_tile_for(inputs.geometry, inputs.recurrent_state.itemsize, num_heads)


def num_blocks(inputs: RecurrenceInputs, tile: RowTile) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them."""
    geometry = inputs.geometry
    recurrence = inputs.batch_size * geometry.num_value_heads * (geometry.value_head_dim // tile.columns)
    clearing = -(-inputs.total_seq_len // ROWS_PER_CLEARING_BLOCK)
    if recurrence + clearing > MAX_GRID_BLOCKS:
        expected = f"a batch of at most {MAX_GRID_BLOCKS} blocks in one launch"
        raise ShapeError(rejection("slot_idx", expected, f"{recurrence + clearing} for {inputs.batch_size} sequences"))
    return recurrence + clearing


def macros(inputs: RecurrenceInputs, out: Argument, tile: RowTile) -> tuple[tuple[str, str], ...]:
    """The compile-time constants for these inputs."""
    geometry = inputs.geometry
    return (
        ("KEY_HEAD_DIM", str(geometry.key_head_dim)),
        ("VALUE_HEAD_DIM", str(geometry.value_head_dim)),
        ("WORK_TYPE", KERNEL_TYPE[inputs.qkv_conv_output.dtype]),
        ("GATE_TYPE", KERNEL_TYPE[inputs.decay_per_token.dtype]),
        ("STATE_TYPE", KERNEL_TYPE[inputs.recurrent_state.dtype]),
        ("OUT_TYPE", KERNEL_TYPE[out.dtype]),
        ("IS_PACKED", str(is_packed(inputs, out)).lower()),
        *tile.macros(geometry.key_head_dim),
    )


def is_packed(inputs: RecurrenceInputs, out: Argument) -> bool:
    """Whether queries, keys, values, states and readout allow the kernels' widest accesses."""
    return inputs.qkv_conv_output.rows_are_packed() and pool_is_packed(inputs.recurrent_state) and out.rows_are_packed()


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
