"""The recurrence, in two forms of one function.

* `gated_delta_recurrence_fwd` follows the definition token by token and is the one to read;
* `gated_delta_recurrence_fwd_chunked` takes a chunk of tokens at a time through matrix products. It is a
  second opinion on the first, and fast enough for long sequences.

Both are from Yang, Kautz and Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule"
(arXiv:2412.06464): the gated delta rule and its chunkwise form with the WY representation.

Shapes. T tokens of a ragged batch of B sequences; nk key heads of width KD, nv value heads of width VD,
nv a multiple of nk; value head h reads key head h // (nv / nk).
    qkv_conv_output    [T, 2·nk·KD + nv·VD], the channels of a token: Q, then K, then V
    decay_per_token    [T, nv], the linear factor itself, not its logarithm
    beta_per_token     [T, nv], after its sigmoid
    recurrent_state    [max_slots, nv, KD, VD]
    slot_idx           [B], the slot of each sequence; 0xFFFFFFFF (int32 -1) marks a padding row
    input_row_offsets  [B + 1]; sequence b is rows [offsets[b], offsets[b + 1])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gdn.oracle.arguments import live_sequences, require_floats, require_shape

Float64Array = NDArray[np.float64]

_NORM_EPSILON = 1e-6
_TOKENS_AT_HAND = 64  # tokens the token loop holds in float64 at a time; no number depends on it


def gated_delta_recurrence_fwd(
    qkv_conv_output: NDArray[Any],
    decay_per_token: NDArray[Any],
    beta_per_token: NDArray[Any],
    recurrent_state: NDArray[Any],
    slot_idx: NDArray[Any],
    input_row_offsets: NDArray[Any],
) -> tuple[Float64Array, Float64Array]:
    """Run every sequence from its slot's state, one token after the other.

    Shapes are those of the module's head. The four float arrays are float16, bfloat16, float32 or float64,
    in any mix, and are widened to float64 exactly; the two index arrays are uint32 or int32. No argument is
    changed.

    Returns ``(out, new_pool)``, both float64:

    * out, [T, nv·VD]: rows that no live sequence owns are zero.
    * new_pool, [max_slots, nv, KD, VD], never rounded to a storage type: the slot of each live sequence holds its
      last state, every other slot its old values. The whole pool is copied: of a huge pool, pass the slots in play.

    A padding row (slot 0xFFFFFFFF) gives zeros and touches no slot, an empty sequence touches no slot.
    Non-finite values follow IEEE arithmetic and stay in their sequence and value head.

    Raises ValueError, naming the argument, for a shape or type other than the above, a slot outside the
    pool or used by two sequences with tokens, and offsets that decrease or leave [0, T].
    """
    return _run(
        _advance_token_by_token,
        _TOKENS_AT_HAND,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )


def gated_delta_recurrence_fwd_chunked(
    qkv_conv_output: NDArray[Any],
    decay_per_token: NDArray[Any],
    beta_per_token: NDArray[Any],
    recurrent_state: NDArray[Any],
    slot_idx: NDArray[Any],
    input_row_offsets: NDArray[Any],
    chunk_size: int = 64,
) -> tuple[Float64Array, Float64Array]:
    """The same function as `gated_delta_recurrence_fwd`, ``chunk_size`` tokens at a time.

    Takes, returns and refuses what that function does, and agrees with it to float64 rounding (not to the
    bit). Also raises ValueError for a chunk_size below 1 and for a live sequence that meets a non-finite
    value: a matrix product would carry it to tokens that come before it.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size: expected at least 1, got {chunk_size}")
    return _run(
        _advance_one_chunk,
        chunk_size,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )


class _Heads(NamedTuple):
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int


class _Tokens(NamedTuple):
    """C consecutive tokens of one sequence, in float64, keys and queries as each value head reads them."""

    query_hat: Float64Array  # [C, nv, KD]
    key_hat: Float64Array  # [C, nv, KD]
    value: Float64Array  # [C, nv, VD]
    decay: Float64Array  # [C, nv]
    beta: Float64Array  # [C, nv]


# Takes tokens and the state [nv, KD, VD] before them; returns their readout [C, nv, VD] and the state after.
_Advance = Callable[[_Tokens, Float64Array], tuple[Float64Array, Float64Array]]


def _advance_token_by_token(tokens: _Tokens, state: Float64Array) -> tuple[Float64Array, Float64Array]:
    """The definition. S is ``state``; h runs over value heads, k and v over elements of a key and a value."""
    out = np.empty_like(tokens.value)
    key_head_dim = state.shape[1]
    for token, (query_hat, key_hat, value, decay, beta) in enumerate(zip(*tokens, strict=True)):
        # 1. S ← decay · S
        state = decay[:, None, None] * state
        # 2. memory[v] = Σ_k S[k,v] · k̂[k]
        memory = np.einsum("hkv,hk->hv", state, key_hat)
        # 3. delta[v] = beta · (value[v] − memory[v])
        delta = beta[:, None] * (value - memory)
        # 4. S[k,v] ← S[k,v] + k̂[k] · delta[v]
        state = state + np.einsum("hk,hv->hkv", key_hat, delta)
        # 5. out[v] = Σ_k S[k,v] · q̂[k] / √KD
        out[token] = np.einsum("hkv,hk->hv", state, query_hat) / np.sqrt(key_head_dim)
    return out, state


def _advance_one_chunk(tokens: _Tokens, state: Float64Array) -> tuple[Float64Array, Float64Array]:
    """All C tokens of a chunk at once, per value head.

    With S the state entering the chunk, D[i,j] the product of the decays of the tokens (j, i] and d[i]
    that of the tokens [0, i], step 3 of the definition reads, for the deltas of the chunk,
        delta_i = beta_i · (v_i − d_i · k̂_i S − Σ_{j<i} D[i,j] · (k̂_i · k̂_j) · delta_j)
    which is (I + A) delta = R with
        A[i,j] = beta_i · D[i,j] · (k̂_i · k̂_j) for j < i,      R = beta · (V − d · K̂ S).
    Once the deltas are known, every state inside the chunk is d_i · S + Σ_{j≤i} D[i,j] · k̂_jᵀ delta_j.
    """
    if not all(np.isfinite(array).all() for array in (*tokens, state)):
        raise ValueError("chunked form: expected finite values in every live sequence, got inf or NaN")
    query_hat, key_hat, value = (array.swapaxes(0, 1) for array in tokens[:3])  # [nv, C, width]
    decay, beta = tokens.decay.T, tokens.beta.T[:, :, None]
    decay_between = _decay_products(decay)  # D
    decay_since_entry = np.cumprod(decay, axis=1)[:, :, None]  # d
    key_hat_transposed = key_hat.swapaxes(1, 2)
    num_tokens, key_head_dim = key_hat.shape[1:]

    coupling = np.tril(beta * decay_between * (key_hat @ key_hat_transposed), k=-1)  # A
    uncoupled_delta = beta * (value - decay_since_entry * (key_hat @ state))  # R
    delta = np.linalg.solve(np.eye(num_tokens) + coupling, uncoupled_delta)

    scores = decay_between * (query_hat @ key_hat_transposed)
    out = (decay_since_entry * (query_hat @ state) + scores @ delta) / np.sqrt(key_head_dim)
    decay_to_end = decay_between[:, -1, None, :]
    new_state = decay_since_entry[:, -1:] * state + (key_hat_transposed * decay_to_end) @ delta
    return out.swapaxes(0, 1), new_state


def _decay_products(decay: Float64Array) -> Float64Array:
    """[nv, C] decays -> [nv, C, C]: at [h, i, j] the product over the tokens (j, i], 0 where j > i.

    A running product down each column, not exp of a difference of summed logarithms: a decay of exactly 0
    gives exactly 0 (no −inf − −inf), and nothing is divided.
    """
    is_after = np.tri(decay.shape[1], k=-1, dtype=bool)  # [i, j]: token i comes after token j
    factors = np.where(is_after, decay[:, :, None], 1.0)
    return np.tril(np.cumprod(factors, axis=1))


def _run(
    advance: _Advance,
    tokens_at_once: int,
    qkv_conv_output: NDArray[Any],
    decay_per_token: NDArray[Any],
    beta_per_token: NDArray[Any],
    recurrent_state: NDArray[Any],
    slot_idx: NDArray[Any],
    input_row_offsets: NDArray[Any],
) -> tuple[Float64Array, Float64Array]:
    """Check the arguments, then advance every live sequence from its slot, a few tokens at a time."""
    heads = _heads_from_shapes(qkv_conv_output, recurrent_state)
    total_seq_len, max_slots = len(qkv_conv_output), len(recurrent_state)
    require_floats(qkv_conv_output=qkv_conv_output, recurrent_state=recurrent_state)
    require_floats(decay_per_token=decay_per_token, beta_per_token=beta_per_token)
    require_shape("decay_per_token", decay_per_token, (total_seq_len, heads.num_value_heads))
    require_shape("beta_per_token", beta_per_token, (total_seq_len, heads.num_value_heads))
    sequences = live_sequences(slot_idx, input_row_offsets, max_slots, total_seq_len)

    out = np.zeros((total_seq_len, heads.num_value_heads * heads.value_head_dim))
    # Non-finite inputs are followed to where they lead; they are the tests' business, not a warning's.
    with np.errstate(invalid="ignore", over="ignore"):
        new_pool = recurrent_state.astype(np.float64)
        for slot, rows in sequences:
            for first_row in range(rows.start, rows.stop, tokens_at_once):
                some_rows = slice(first_row, min(first_row + tokens_at_once, rows.stop))
                tokens = _Tokens(
                    *_split_into_heads(qkv_conv_output[some_rows].astype(np.float64), heads),
                    decay_per_token[some_rows].astype(np.float64),
                    beta_per_token[some_rows].astype(np.float64),
                )
                readout, new_pool[slot] = advance(tokens, new_pool[slot])
                out[some_rows] = readout.reshape(len(readout), -1)
    return out, new_pool


def _split_into_heads(channels: Float64Array, heads: _Heads) -> tuple[Float64Array, Float64Array, Float64Array]:
    """[C, conv_dim] -> q̂ and k̂ [C, nv, KD] as each value head reads them, and the values [C, nv, VD]."""
    key_dim = heads.num_key_heads * heads.key_head_dim
    key_head_shape = (len(channels), heads.num_key_heads, heads.key_head_dim)
    query = channels[:, :key_dim].reshape(key_head_shape)
    key = channels[:, key_dim : 2 * key_dim].reshape(key_head_shape)
    value = channels[:, 2 * key_dim :].reshape(len(channels), heads.num_value_heads, heads.value_head_dim)

    group_size = heads.num_value_heads // heads.num_key_heads
    key_head_of_value_head = np.arange(heads.num_value_heads) // group_size
    return (
        _normalized(query)[:, key_head_of_value_head],
        _normalized(key)[:, key_head_of_value_head],
        value,
    )


def _normalized(vectors: Float64Array) -> Float64Array:
    """x̂ = x / √(Σ x² + ε): the epsilon is added to the sum, inside the root."""
    squared_norms: Float64Array = np.sum(vectors**2, axis=-1, keepdims=True)
    return vectors / np.sqrt(squared_norms + _NORM_EPSILON)


def _heads_from_shapes(qkv_conv_output: NDArray[Any], recurrent_state: NDArray[Any]) -> _Heads:
    if recurrent_state.ndim != 4 or 0 in recurrent_state.shape[1:]:
        raise ValueError(
            f"recurrent_state: expected shape [max_slots, nv, KD, VD], none of the last three 0, "
            f"got {recurrent_state.shape}"
        )
    if qkv_conv_output.ndim != 2:
        raise ValueError(f"qkv_conv_output: expected shape [T, conv_dim], got {qkv_conv_output.shape}")
    num_value_heads, key_head_dim, value_head_dim = recurrent_state.shape[1:]
    query_and_key_channels = qkv_conv_output.shape[1] - num_value_heads * value_head_dim
    num_key_heads, remainder = divmod(query_and_key_channels, 2 * key_head_dim)
    if num_key_heads < 1 or remainder or num_value_heads % num_key_heads:
        raise ValueError(
            f"qkv_conv_output: expected conv_dim = 2·nk·KD + nv·VD for a whole nk that divides nv, with "
            f"(nv, KD, VD) = {recurrent_state.shape[1:]}, got conv_dim={qkv_conv_output.shape[1]}"
        )
    return _Heads(num_key_heads, num_value_heads, key_head_dim, value_head_dim)
