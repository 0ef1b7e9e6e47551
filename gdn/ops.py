"""The public functions. Contract of arrays, index values and exactness: see the docstrings and README.

Arrays of one call live in one place. On a GPU (CuPy, or anything that shares its memory by DLPack or
`__cuda_array_interface__`) a call enqueues a kernel on CuPy's current stream and returns without waiting. NumPy
arrays are computed at once, by the backend that `gdn.use_backend` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from gdn import arrays
from gdn.backends import backend_for_numpy_arrays, cuda, host
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import numpy as numpy_backend
from gdn.errors import GdnError, rejection
from gdn.indices import check_recurrence_indices
from gdn.recurrence import recurrence_inputs, require_readout, require_writable_pool

__all__ = ["check_indices", "gated_delta_recurrence_fwd", "gated_delta_recurrence_fwd_shape"]


def gated_delta_recurrence_fwd(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    out: Any = None,
) -> Any:
    """Run the Gated DeltaNet recurrence over a ragged batch, advancing the states of a pool in place.

    Per sequence and value head ``h``, with state ``S`` of shape [key_head_dim, value_head_dim], per token ``t``::

        S     = decay[t, h] * S
        delta = beta[t, h] * (value - S.T @ k)          k = key / sqrt(sum(key**2) + 1e-6)
        S     = S + outer(k, delta)
        out   = S.T @ q / sqrt(key_head_dim)            q = query / sqrt(sum(query**2) + 1e-6)

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10, with normalised keys and
    queries as in Qwen3-Next.) Value head ``h`` reads key head ``h // group_size``. Arithmetic is float32 whatever
    the storage types; the state is rounded to the pool's type once, at the end of the call.

    Args:
        qkv_conv_output: [total_seq_len, conv_dim], float32, float16 or bfloat16 (the work type), any strides. A
            token's channels are its queries, keys and values: conv_dim = 2 * num_key_heads * key_head_dim +
            num_value_heads * value_head_dim.
        decay_per_token: [total_seq_len, num_value_heads], the factor itself (not its logarithm), float32 or the
            work type, any strides.
        beta_per_token: the same shape and type, the step size after its sigmoid (0 to 1, or to 2).
        recurrent_state: [max_slots, num_value_heads, key_head_dim, value_head_dim], float32, float16 or bfloat16,
            dense but for a free slot stride. Changed in place: slots of live, non-empty sequences only.
        slot_idx: [batch_size], uint32, or int32 read as the same bits: each sequence's slot. ``gdn.PAD_SLOT``
            marks a padding row: its output is zero and no slot is touched.
        input_row_offsets: [batch_size + 1], uint32 or int32: sequence b owns rows [offsets[b], offsets[b + 1]).
        out: [total_seq_len, value_dim] to write to, of the work type or float32, any strides; made in the work
            type when not given. Every row is written; rows that no live sequence owns become zero.

    Returns:
        ``out``, a NumPy or CuPy array.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError: an argument breaks a rule above; nothing was written.
        IndexValueError: NumPy arrays only: an index value breaks a rule of `check_indices`. On a GPU such values
            are safe (a bad slot is padding, offsets are clamped) but not reported.
        KernelCompileError: the kernel did not compile.
    """
    inputs = recurrence_inputs(
        arrays.take,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )
    place = require_writable_pool(inputs)
    if out is not None:
        readout = arrays.take("out", out)
        require_readout(readout, inputs)
    if place == arrays.CPU:
        check_recurrence_indices(inputs)
    tile = fwd_kernel.row_tile(inputs)
    num_blocks = fwd_kernel.num_blocks(inputs, tile)
    if out is None:
        readout = arrays.take("out", arrays.empty(inputs.out_shape, inputs.qkv_conv_output.dtype, place))
    if num_blocks == 0:
        return readout.array
    if place == arrays.CPU and backend_for_numpy_arrays() == "numpy":
        numpy_backend.gated_delta_recurrence_fwd(inputs, readout)
    elif place == arrays.CPU:
        host.run(fwd_kernel.launch(inputs, readout, tile))
    else:
        cuda.run(fwd_kernel.launch(inputs, readout, tile), cuda.device_index(place))
    return readout.array


def gated_delta_recurrence_fwd_shape(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
) -> tuple[int, int]:
    """The shape of `gated_delta_recurrence_fwd`'s result, (total_seq_len, value_dim), from shapes and types alone.

    Takes the same six arguments, or anything with ``.shape`` and ``.dtype`` in their place (``numpy.empty`` on no
    data, ``jax.ShapeDtypeStruct``, a PyTorch meta tensor); needs no device and reads no data.

    Raises:
        ShapeError, DTypeError, LayoutError: where the op would refuse these shapes, types or strides.
    """
    inputs = recurrence_inputs(
        arrays.describe,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )
    fwd_kernel.num_blocks(inputs, fwd_kernel.row_tile(inputs))
    return inputs.out_shape


def check_indices(op: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
    """Read the index arrays of a call and raise where a value breaks a rule, naming its position.

    On a GPU an op does not look at index values, because that would wait for the device; this does, and waits::

        gdn.ops.check_indices(gdn.ops.gated_delta_recurrence_fwd, qkv, decay, beta, state, slot_idx, offsets)

    Args:
        op: a function of this module that takes index arrays.
        *arguments, **keywords: what the op would be called with. Nothing is written.

    Raises:
        IndexValueError: a slot outside the pool, a slot that two live sequences share (an empty or padding row is
            not live), an offset below 0, below its predecessor or past total_seq_len.
        GdnError: what the op itself would refuse.
    """
    check = _INDEX_CHECKS.get(op)
    if check is None:
        known = ", ".join(function.__name__ for function in _INDEX_CHECKS)
        raise GdnError(rejection("op", f"one of {known}", getattr(op, "__name__", repr(op))))
    bound = inspect.signature(op).bind(*arguments, **keywords)  # puts keywords in the order of the signature
    check(**bound.arguments)


def _check_fwd_indices(*, out: Any = None, **six: Any) -> None:
    inputs = recurrence_inputs(arrays.take, *six.values())
    require_writable_pool(inputs)
    if out is not None:
        require_readout(arrays.take("out", out), inputs)
    check_recurrence_indices(inputs)


_INDEX_CHECKS: dict[Callable[..., Any], Callable[..., None]] = {
    gated_delta_recurrence_fwd: _check_fwd_indices,
}
