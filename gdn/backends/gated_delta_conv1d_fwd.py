"""The launch of `kernels/gated_delta_conv1d_fwd.cu`."""

from __future__ import annotations

from typing import NamedTuple

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
#: Sequences that a block looks at in one go; with more of them, tiles are longer, so that fewer blocks look.
_FEW_SEQUENCES = THREADS
#: Rows of a batch that short tiles make blocks enough of; tiles of wide rows are short in any case.
_FEW_ROWS = 1024


class Split(NamedTuple):
    """Rows of a sequence's head, and rows of a tile; any give the same bits."""

    head_tokens: int
    tile_tokens: int


def split(batch: Conv1dBatch) -> Split:
    """What suits the batch: windows of a few tokens lie in heads whole and leave tiles nothing, which then are long."""
    window_len = batch.conv_width - 1
    for head_tokens in (window_len, 4, 8):
        if head_tokens >= window_len and batch.total_seq_len <= head_tokens * batch.batch_size:
            return Split(head_tokens, 32)
    if batch.batch_size > _FEW_SEQUENCES:
        return Split(window_len, 32)
    return Split(window_len, 8 if batch.total_seq_len <= _FEW_ROWS or batch.qkv.itemsize == 4 else 16)


def num_blocks(inputs: Conv1dInputs, out: Argument | None = None) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them. None is an output yet to be made."""
    batch = inputs.batch
    parts = batch.batch_size + -(-batch.total_seq_len // split(batch).tile_tokens)
    return grid(batch, parts, channels(batch, _is_packed(inputs, out)))


def _is_packed(inputs: Conv1dInputs, out: Argument | None) -> bool:
    """Whether inputs and outputs allow wide accesses; a new output does."""
    return inputs.batch.qkv.rows_are_packed() and (out is None or out.rows_are_packed())


def variant(inputs: Conv1dInputs, out: Argument) -> Variant:
    """The compile-time constants for these inputs."""
    batch, is_packed = inputs.batch, _is_packed(inputs, out)
    head_tokens, tile_tokens = split(batch)
    weight = inputs.conv_weight
    weight_is_packed = channels(batch, is_packed) > 1 and weight.is_dense() and weight.pointer % ALIGNMENT == 0
    return Variant(
        KERNEL,
        (
            *macros(batch, is_packed, head_tokens),
            ("WEIGHT_TYPE", KERNEL_TYPE[weight.dtype]),
            ("WEIGHT_IS_PACKED", str(weight_is_packed).lower()),
            ("BIAS_TYPE", KERNEL_TYPE[inputs.bias.dtype if inputs.bias else "float32"]),
            ("HAS_BIAS", str(inputs.bias is not None).lower()),
            ("IS_SILU", str(inputs.activation == "silu").lower()),
            ("OUT_TYPE", KERNEL_TYPE[out.dtype]),
            ("TILE_TOKENS", str(tile_tokens)),
            ("TOKENS_AT_ONCE", str(min(TOKENS_AT_ONCE, tile_tokens))),
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
