"""The ops around the recurrence, convolution and gates, in vectorised NumPy, float32."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gdn.arrays import Argument
from gdn.conv1d import CommitInputs, Conv1dBatch, Conv1dInputs
from gdn.gates import GateInputs
from gdn.geometry import PAD_SLOT
from gdn.indices import IndexArray, offset_values, slot_values

Float32Array = np.ndarray[Any, np.dtype[np.float32]]


def gated_delta_conv1d_fwd(inputs: Conv1dInputs, out: Argument) -> None:
    """Convolve the live sequences of a checked call, zero every other row of `out`, and move the windows on."""
    batch = inputs.batch
    weight = inputs.conv_weight.array.astype(np.float32)
    out.array[...] = 0
    for slot, rows in _live_rows(batch, np.diff(offset_values(batch.input_row_offsets))):
        tokens = batch.qkv.array[rows]
        looked_back_on = _with_window(batch, slot, tokens)
        sums = np.zeros(tokens.shape, np.float32)
        with np.errstate(all="ignore"):  # non-finite values are the caller's data, on every backend
            if inputs.bias is not None:
                sums += inputs.bias.array.astype(np.float32)
            for tap in range(batch.conv_width):
                sums += weight[:, tap] * looked_back_on[tap : tap + len(tokens)]
            if inputs.activation == "silu":
                sums *= 1 / (1 + np.exp(-sums))
            out.array[rows] = sums.astype(out.array.dtype, copy=False)
        if inputs.write_state:
            _move_window(batch, slot, looked_back_on)


def gated_delta_conv1d_commit(inputs: CommitInputs) -> None:
    """Move the windows of the live sequences of a checked call over their accepted tokens."""
    batch = inputs.batch
    lengths = np.diff(offset_values(batch.input_row_offsets))
    for slot, rows in _live_rows(batch, np.minimum(slot_values(inputs.num_accepted), lengths)):
        _move_window(batch, slot, _with_window(batch, slot, batch.qkv.array[rows]))


def _live_rows(batch: Conv1dBatch, lengths: IndexArray) -> Iterator[tuple[int, slice]]:
    """Slot and first rows, so many, of every sequence that is not padding and has some."""
    offsets = offset_values(batch.input_row_offsets)
    for slot, begin, length in zip(slot_values(batch.slot_idx), offsets, lengths, strict=False):
        if slot != PAD_SLOT and length > 0:
            yield int(slot), slice(int(begin), int(begin + length))


def _with_window(batch: Conv1dBatch, slot: int, tokens: np.ndarray[Any, Any]) -> Float32Array:
    """What tokens of a sequence look back on, [conv_width - 1 + tokens, conv_dim]: its window, then they."""
    window = batch.conv_state.array[slot].T.astype(np.float32)
    return np.concatenate([window, tokens.astype(np.float32)])


def _move_window(batch: Conv1dBatch, slot: int, looked_back_on: Float32Array) -> None:
    newest = looked_back_on[len(looked_back_on) - batch.conv_width + 1 :]
    with np.errstate(all="ignore"):
        batch.conv_state.array[slot] = newest.T.astype(batch.conv_state.array.dtype, copy=False)


def gated_delta_gates(inputs: GateInputs, decay: Argument, beta: Argument) -> None:
    """Decay and step size of a checked call, in float32."""
    a, b, log_rate, bias = (argument.array.astype(np.float32) for argument in inputs.arguments)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):  # infinities lead to the gates' limits
        step = a + bias
        softplus = np.where(step > 20, step, np.log1p(np.exp(step)))
        # Far below 0 softplus is an exponential too: there one factor may vanish and the other be infinite.
        negative_log_decay = np.where(step < -20, np.exp(log_rate + step), np.exp(log_rate) * softplus)
        decay.array[...] = np.exp(-negative_log_decay)
        sigmoid = 1 / (1 + np.exp(-b))
    beta.array[...] = 2 * sigmoid if inputs.allow_neg_eigval else sigmoid
