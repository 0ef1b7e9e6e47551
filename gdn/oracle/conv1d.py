"""The short causal convolution before the recurrence, and its window of inputs that came before.

Shapes. T tokens of a ragged batch of B sequences, C channels, W taps:
    qkv                [T, C]
    conv_weight        [C, W], the tap of the newest input last
    conv_state         [max_slots, C, W - 1], the last W - 1 inputs of a sequence, oldest first
    slot_idx           [B], the slot of each sequence; 0xFFFFFFFF (int32 -1) marks a padding row
    input_row_offsets  [B + 1]; sequence b is rows [offsets[b], offsets[b + 1])
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn.oracle.arguments import live_sequences, require_floats, require_shape, require_type

Float64Array = NDArray[np.float64]


def gated_delta_conv1d_fwd(
    qkv: NDArray[Any],
    conv_weight: NDArray[Any],
    conv_state: NDArray[Any],
    slot_idx: NDArray[Any],
    input_row_offsets: NDArray[Any],
    *,
    bias: NDArray[Any] | None = None,
    activation: str | None = None,
    write_state: bool = True,
) -> tuple[Float64Array, Float64Array]:
    """Convolve every sequence, each channel by itself, with the inputs before it in its slot's window.

    With x the window followed by the sequence's rows, token t of the sequence has::

        y[c] = act(bias[c] + sum over j of conv_weight[c, j] * x[t + j, c])

    and act(y) = y, or y / (1 + exp(-y)) for the activation "silu".

    The float arrays are float16, bfloat16, float32 or float64, in any mix, and are widened to float64 exactly; bias is
    [C]. No argument is changed.

    Returns ``(out, new_pool)``, both float64: out [T, C], zero in rows that no live sequence owns, and new_pool,
    conv_state with the window of each live sequence that has tokens moved on by them, or as it was without write_state.

    Raises ValueError, naming the argument, for a shape or type other than the above, another activation, and what the
    recurrence refuses of slots and offsets.
    """
    _require(qkv, conv_state)
    num_channels, window = conv_state.shape[1:]
    require_floats(conv_weight=conv_weight)
    require_shape("conv_weight", conv_weight, (num_channels, window + 1))
    bias = np.zeros(num_channels) if bias is None else bias
    require_floats(bias=bias)
    require_shape("bias", bias, (num_channels,))
    if activation not in (None, "silu"):
        raise ValueError(f"activation: expected None or silu, got {activation}")
    out = np.zeros(qkv.shape)
    new_pool = conv_state.astype(np.float64)
    for slot, rows in live_sequences(slot_idx, input_row_offsets, len(conv_state), len(qkv)):
        inputs = _with_window(new_pool[slot], qkv[rows])
        for token in range(rows.stop - rows.start):
            taps = inputs[token : token + window + 1].T * conv_weight.astype(np.float64)
            out[rows.start + token] = bias.astype(np.float64) + taps.sum(axis=1)
        if write_state:
            new_pool[slot] = inputs[len(inputs) - window :].T
    if activation == "silu":
        with np.errstate(over="ignore", invalid="ignore"):
            out = out / (1 + np.exp(-out))
    return out, new_pool


def gated_delta_conv1d_commit(
    qkv: NDArray[Any],
    conv_state: NDArray[Any],
    slot_idx: NDArray[Any],
    input_row_offsets: NDArray[Any],
    num_accepted: NDArray[Any],
) -> Float64Array:
    """Move the window of each sequence on by the first ``num_accepted[b]`` of its rows; returns the new pool, float64.

    num_accepted is [B], uint32 or int32; more than a sequence has rows count as all of them. The other arguments, and
    what is refused, are those of `gated_delta_conv1d_fwd`.
    """
    _require(qkv, conv_state)
    require_type("num_accepted", num_accepted, ("uint32", "int32"))
    require_shape("num_accepted", num_accepted, slot_idx.shape)
    window = conv_state.shape[2]
    new_pool = conv_state.astype(np.float64)
    of_slot = dict(zip((slot_idx.astype(np.int64) & 0xFFFFFFFF).tolist(), num_accepted.tolist(), strict=True))
    for slot, rows in live_sequences(slot_idx, input_row_offsets, len(conv_state), len(qkv)):
        accepted = of_slot[slot] & 0xFFFFFFFF  # an int32 is read as the same 32 bits
        inputs = _with_window(new_pool[slot], qkv[rows.start : min(rows.start + accepted, rows.stop)])
        new_pool[slot] = inputs[len(inputs) - window :].T
    return new_pool


def _with_window(window: Float64Array, rows: NDArray[Any]) -> Float64Array:
    """What a sequence's tokens look back on, [W - 1 + tokens, C]: its window, then its rows."""
    return np.concatenate([window.T, rows.astype(np.float64)])


def _require(qkv: NDArray[Any], conv_state: NDArray[Any]) -> None:
    require_floats(qkv=qkv, conv_state=conv_state)
    if qkv.ndim != 2:
        raise ValueError(f"qkv: expected shape [T, C], got {qkv.shape}")
    if conv_state.ndim != 3 or conv_state.shape[1] != qkv.shape[1] or conv_state.shape[2] < 1:
        raise ValueError(
            f"conv_state: expected shape [max_slots, {qkv.shape[1]}, W - 1], W at least 2, got {conv_state.shape}"
        )
