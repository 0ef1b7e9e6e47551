"""The launch of `kernels/gated_delta_conv1d_commit.cu`."""

from __future__ import annotations

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
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.conv1d import CommitInputs

KERNEL = Kernel(
    "gated_delta_conv1d_commit",
    (
        ("qkv", "pointer"),
        ("qkv_token_stride", "int64"),
        ("qkv_channel_stride", "int64"),
        *POOL_PARAMETERS,
        ("num_accepted", "pointer"),
        ("num_accepted_stride", "int64"),
        *SIZE_PARAMETERS,
    ),
)


def num_blocks(inputs: CommitInputs) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them."""
    batch = inputs.batch
    return grid(batch, batch.batch_size, channels(batch, batch.qkv.rows_are_packed()))


def variant(inputs: CommitInputs) -> Variant:
    """The compile-time constants for these inputs."""
    batch = inputs.batch
    return Variant(KERNEL, macros(batch, batch.qkv.rows_are_packed(), head_tokens=batch.conv_width - 1))


def launch(inputs: CommitInputs) -> Launch:
    """The complete launch."""
    batch = inputs.batch
    return Launch(
        variant(inputs),
        num_blocks(inputs),
        THREADS,
        (
            *(batch.qkv.pointer, *batch.qkv.strides),
            *pool_arguments(batch),
            *(inputs.num_accepted.pointer, *inputs.num_accepted.strides),
            *size_arguments(batch, channels(batch, batch.qkv.rows_are_packed())),
        ),
    )
