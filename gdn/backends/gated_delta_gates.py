"""The launch of `kernels/gated_delta_gates.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.launch import KERNEL_TYPE, MAX_GRID_BLOCKS, Kernel, Launch, Variant
from gdn.errors import ShapeError, rejection
from gdn.gates import GateInputs

KERNEL = Kernel(
    "gated_delta_gates",
    (
        ("a", "pointer"),
        ("a_token_stride", "int64"),
        ("a_head_stride", "int64"),
        ("b", "pointer"),
        ("b_token_stride", "int64"),
        ("b_head_stride", "int64"),
        ("A_log", "pointer"),
        ("A_log_stride", "int64"),
        ("dt_bias", "pointer"),
        ("dt_bias_stride", "int64"),
        ("decay", "pointer"),
        ("decay_token_stride", "int64"),
        ("decay_head_stride", "int64"),
        ("beta", "pointer"),
        ("beta_token_stride", "int64"),
        ("beta_head_stride", "int64"),
        ("total_seq_len", "int64"),
        ("num_value_heads", "int64"),
        ("allow_neg_eigval", "int64"),
    ),
)
_THREADS = 256


def num_blocks(inputs: GateInputs) -> int:
    """Blocks of the grid; raises ShapeError when one launch cannot hold them."""
    blocks = -(-inputs.a.size // _THREADS)
    if blocks > MAX_GRID_BLOCKS:
        raise ShapeError(rejection("a", f"at most {MAX_GRID_BLOCKS * _THREADS} gates in one launch", inputs.a.size))
    return blocks


def variant(inputs: GateInputs) -> Variant:
    """The compile-time constants for these inputs."""
    return Variant(
        KERNEL,
        (
            ("INPUT_TYPE", KERNEL_TYPE[inputs.a.dtype]),
            ("RATE_TYPE", KERNEL_TYPE[inputs.A_log.dtype]),
            ("BIAS_TYPE", KERNEL_TYPE[inputs.dt_bias.dtype]),
        ),
    )


def launch(inputs: GateInputs, decay: Argument, beta: Argument) -> Launch:
    """The complete launch."""
    arrays = (*inputs.arguments, decay, beta)
    return Launch(
        variant(inputs),
        num_blocks(inputs),
        _THREADS,
        (
            *(number for array in arrays for number in (array.pointer, *array.strides)),
            *(*inputs.a.shape, int(inputs.allow_neg_eigval)),
        ),
    )
