"""The launch of `kernels/gated_delta_conv1d_fwd.cu`."""

from __future__ import annotations

from gdn.arrays import ALIGNMENT, Argument
from gdn.backends.conv1d import (
    POOL_PARAMETERS,
    SIZE_PARAMETERS,
    THREADS,
    channels,
    grid,
    macros,
    pool_arguments,
    size_arguments,
)
from gdn.backends.launch import KERNEL_TYPE, Kernel, Launch, Variant
from gdn.conv1d import Conv1dBatch, Conv1dInputs

KERNEL = Kernel(
    "gated_delta_conv1d_fwd",
    (
        ("qkv", "pointer"),
        ("qkv_token_stride", "int64"),
        ("qkv_channel_stride", "int64"),
        ("conv_weight", "pointer"),
        ("weight_channel_stride", "int64"),
        ("weight_tap_stride", "int64"),
        *POOL_PARAMETERS,
        ("bias", "pointer"),
        ("bias_stride", "int64"),
        ("out", "pointer"),
        ("out_token_stride", "int64"),
        ("out_channel_stride", "int64"),
        *SIZE_PARAMETERS,
        ("writes_state", "int64"),
    ),
)
#: Rows of a tile that are under way together.
TOKENS_AT_ONCE = 8
#: Tiles of so many rows; short ones where there are few rows, so that there are blocks enough, or where they are wide.
TILE_SIZES = (8, 16)
_FEW_ROWS = 1024


def tile_tokens(batch: Conv1dBatch) -> int:
    """Rows of a tile."""
    return TILE_SIZES[0] if batch.total_seq_len <= _FEW_ROWS or batch.qkv.itemsize == 4 else TILE_SIZES[1]


def num_blocks(inputs: Conv1dInputs, out: Argument | None = None) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them. None is an output yet to be made."""
    batch = inputs.batch
    parts = batch.batch_size + -(-batch.total_seq_len // tile_tokens(batch))
    return grid(batch, parts, channels(batch, _is_packed(inputs, out)))


def _is_packed(inputs: Conv1dInputs, out: Argument | None) -> bool:
    """Whether inputs and outputs allow wide accesses; a new output does."""
    return inputs.batch.qkv.rows_are_packed() and (out is None or out.rows_are_packed())


def variant(inputs: Conv1dInputs, out: Argument) -> Variant:
    """The compile-time constants for these inputs."""
    batch, is_packed = inputs.batch, _is_packed(inputs, out)
    weight = inputs.conv_weight
    weight_is_packed = channels(batch, is_packed) > 1 and weight.is_dense() and weight.pointer % ALIGNMENT == 0
    return Variant(
        KERNEL,
        (
            *macros(batch, is_packed),
            ("WEIGHT_TYPE", KERNEL_TYPE[weight.dtype]),
            ("WEIGHT_IS_PACKED", str(weight_is_packed).lower()),
            ("BIAS_TYPE", KERNEL_TYPE[inputs.bias.dtype if inputs.bias else "float32"]),
            ("HAS_BIAS", str(inputs.bias is not None).lower()),
            ("IS_SILU", str(inputs.activation == "silu").lower()),
            ("OUT_TYPE", KERNEL_TYPE[out.dtype]),
            ("TILE_TOKENS", str(tile_tokens(batch))),
            ("TOKENS_AT_ONCE", str(TOKENS_AT_ONCE)),
        ),
    )


def launch(inputs: Conv1dInputs, out: Argument) -> Launch:
    """The complete launch."""
    batch, bias = inputs.batch, inputs.bias
    return Launch(
        variant(inputs, out),
        num_blocks(inputs, out),
        THREADS,
        (
            *(batch.qkv.pointer, *batch.qkv.strides),
            *(inputs.conv_weight.pointer, *inputs.conv_weight.strides),
            *pool_arguments(batch),
            *((bias.pointer, *bias.strides) if bias else (0, 0)),
            *(out.pointer, *out.strides),
            *size_arguments(batch, channels(batch, _is_packed(inputs, out))),
            int(inputs.write_state),
        ),
    )
