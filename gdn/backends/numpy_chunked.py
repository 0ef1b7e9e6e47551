"""Chunked prefill in vectorised NumPy, float32: the chunkwise (WY) form of the recurrence, a matrix product at a time.

With S the state that enters a chunk, D[i,j] the product of the decays of tokens (j, i] and d[i] that of tokens [0, i]:

    A[i,j] = beta[i] · D[i,j] · (k̂[i] · k̂[j])   for j < i
    (I + A) V' = beta · (V − d · K̂ S)            V'[i] is the delta of token i
    O = Q̂ (d · S) + (D ⊙ Q̂ K̂ᵀ) V'               for j ≤ i; Q̂ holds the scale 1/√KD
    S ← d[last] · S + Σ_j D[last,j] · k̂[j] ⊗ V'[j]

Products of decays are formed token after token: no logarithm meets a decay of 0. Every row is run by itself and every
chunk has the same shape, so that a product's order of summation depends on the heads alone: a row's bits do not depend
on its batch, nor those of a token on the tokens behind it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gdn.arrays import Argument
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.numpy import NORM_EPSILON, Float32Array, run_sequences, tree_sum
from gdn.geometry import PAD_SLOT
from gdn.indices import offset_values, slot_values
from gdn.recurrence import RecurrenceInputs

BoolArray = np.ndarray[Any, np.dtype[np.bool_]]


class _Chunk(NamedTuple):
    """C tokens of a row; those behind its end change nothing. nk key heads, a group of G value heads each.

    is_lost: what a non-finite key, gate or value at that token or before has reached. They are replaced here, because a
    matrix product would carry them to tokens that come before.
    """

    query_hat: Float32Array  # [nk, 1, C, KD], scaled
    key_hat: Float32Array  # [nk, 1, C, KD]
    value: Float32Array  # [nk, G, C, VD]
    decay: Float32Array  # [nk, G, C]
    beta: Float32Array  # [nk, G, C]
    is_lost: BoolArray  # [nk, G, C]


def gated_delta_recurrence_fwd_chunked(inputs: RecurrenceInputs, out: Argument, min_row_len: int) -> None:
    """Advance live rows of at least `min_row_len` tokens chunk by chunk, shorter ones token by token.

    Every other row of `out` is zeroed.
    """
    heads, pool = inputs.geometry, inputs.recurrent_state.array
    slots, offsets = slot_values(inputs.slot_idx), offset_values(inputs.input_row_offsets)
    lengths = np.diff(offsets)
    is_chunked = lengths >= max(min_row_len, 1)
    is_live = slots != PAD_SLOT
    # Token by token first: this also zeroes the rows of all others.
    for sequences, state in run_sequences(inputs, out.array, is_live & ~is_chunked):
        pool[slots[sequences]] = state.astype(pool.dtype, copy=False)
    with np.errstate(all="ignore"):  # non-finite values are the caller's data, on every backend
        for sequence in np.flatnonzero(is_live & is_chunked):
            slot = slots[sequence]
            state = pool[slot].astype(np.float32)
            grouped = state.reshape(heads.num_key_heads, heads.group_size, heads.key_head_dim, heads.value_head_dim)
            _run_row(inputs, out.array, int(offsets[sequence]), int(offsets[sequence + 1]), grouped)
            pool[slot] = state.astype(pool.dtype, copy=False)


def _run_row(inputs: RecurrenceInputs, out: np.ndarray[Any, Any], begin: int, end: int, state: Float32Array) -> None:
    """Run tokens [begin, end) from this state on, which becomes the last one."""
    types = inputs.qkv_conv_output.dtype, inputs.recurrent_state.dtype
    chunk_len = ChunkLayout(inputs.geometry, *types, 1, end - begin, 1).chunk_len
    for first in range(begin, end, chunk_len):
        rows = slice(first, min(first + chunk_len, end))
        readout = _advance(_load(inputs, rows, chunk_len), state)
        tokens = np.moveaxis(readout, 2, 0)[: rows.stop - rows.start]
        out[rows] = tokens.reshape(len(tokens), -1).astype(out.dtype, copy=False)


def _load(inputs: RecurrenceInputs, rows: slice, chunk_len: int) -> _Chunk:
    """Tokens of a chunk, keys and queries normalised, behind its end those that change nothing."""
    heads, num_tokens = inputs.geometry, rows.stop - rows.start

    def padded(array: np.ndarray[Any, Any], of_head: tuple[int, ...], beyond: float = 0) -> Float32Array:
        """[tokens, heads x elements] as float32 with the tokens before the last axis of `of_head`."""
        tokens = np.full((chunk_len, array.shape[1]), beyond, np.float32)
        tokens[:num_tokens] = array
        return np.moveaxis(tokens.reshape(chunk_len, *of_head), 0, 2)

    channels = inputs.qkv_conv_output.array[rows]
    of_key, of_gate = (heads.num_key_heads, 1, heads.key_head_dim), (heads.num_key_heads, heads.group_size)
    query = padded(channels[:, : heads.key_dim], of_key)
    key = padded(channels[:, heads.key_dim : 2 * heads.key_dim], of_key)
    value = padded(channels[:, 2 * heads.key_dim :], (*of_gate, heads.value_head_dim))
    decay = padded(inputs.decay_per_token.array[rows], of_gate, beyond=1)
    beta = padded(inputs.beta_per_token.array[rows], of_gate)

    is_key_lost = ~np.all(np.isfinite(key), axis=-1)
    is_lost: BoolArray = is_key_lost | ~np.isfinite(decay) | ~np.isfinite(beta)
    return _Chunk(
        query * (1 / (_norm(query) * np.sqrt(np.float32(heads.key_head_dim)))),
        np.where(is_key_lost[..., None], 0, key * (1 / _norm(key))),
        value,
        np.where(is_lost, 1, decay),
        np.where(is_lost, 0, beta),
        is_lost,
    )


def _norm(vectors: Float32Array) -> Float32Array:
    norms: Float32Array = np.sqrt(tree_sum((vectors * vectors)[..., None]) + NORM_EPSILON)
    return norms


def _advance(chunk: _Chunk, state: Float32Array) -> Float32Array:
    """Advance `state` [nk, G, KD, VD] over a chunk, in place; returns its readout [nk, G, C, VD]."""
    is_before = np.tri(chunk.decay.shape[-1], k=-1, dtype=bool)  # [i, j]: j < i
    between = np.where(is_before, chunk.decay[..., None], np.float32(1))
    decays = np.where(is_before | np.eye(len(is_before), dtype=bool), np.multiply.accumulate(between, axis=-2), 0)  # D
    since_start = np.multiply.accumulate(chunk.decay, axis=-1)[..., None]  # d
    memory, old_readout = chunk.key_hat @ state, chunk.query_hat @ state
    # A decay of 0 erases the state before the sums: they count as 0 even if a huge state made them overflow.
    is_erased = np.logical_or.accumulate(chunk.decay == 0, axis=-1)
    memory[is_erased] = 0
    old_readout[is_erased] = 0

    keys = np.swapaxes(chunk.key_hat, -1, -2)
    beta = chunk.beta[..., None]
    coupling = beta * np.where(is_before, decays, 0) * (chunk.key_hat @ keys)  # A
    deltas = _solve(coupling, beta * (chunk.value - since_start * memory))
    is_lost = np.logical_or.accumulate(_take_out(deltas) | chunk.is_lost[..., None], axis=2)
    readout: Float32Array = since_start * old_readout + (decays * (chunk.query_hat @ keys)) @ deltas
    state *= since_start[..., -1:, :]
    state += keys @ (decays[..., -1, :, None] * deltas)

    readout[is_lost] = np.nan
    state[np.broadcast_to(is_lost[:, :, -1:], state.shape)] = np.nan
    return readout


def _solve(coupling: Float32Array, deltas: Float32Array) -> Float32Array:
    """The V' of (I + A) V' = `deltas`, in their place: each token after those before it."""
    for token in range(1, deltas.shape[-2]):
        deltas[..., token, None, :] -= coupling[..., token, None, :token] @ deltas[..., :token, :]
    return deltas


def _take_out(deltas: Float32Array) -> BoolArray:
    """Put 0 in place of deltas that are not finite, and say which: a product would carry them to earlier tokens too."""
    is_out: BoolArray = ~np.isfinite(deltas)
    deltas[is_out] = 0
    return is_out
