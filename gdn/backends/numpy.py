"""The ops in vectorised NumPy, float32, with the same promises as the kernels.

Only element-wise operations and sums in a fixed order are used: a matrix product or `np.sum` may add in an
order that depends on shapes and threads, and then a sequence's bits would depend on its batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn.arrays import Argument
from gdn.indices import PAD_SLOT, IndexArray, offset_values, slot_values
from gdn.recurrence import RecurrenceInputs

Float32Array = np.ndarray[Any, np.dtype[np.float32]]

NORM_EPSILON = np.float32(1e-6)
#: States advanced together; bounds the temporary memory and keeps it near the caches.
_STATE_BYTES_AT_ONCE = 8 << 20


def gated_delta_recurrence_fwd(inputs: RecurrenceInputs, out: Argument) -> None:
    """Advance the live sequences of a checked call, write their readout, and zero every other row of `out`."""
    offsets = offset_values(inputs.input_row_offsets)
    slots = slot_values(inputs.slot_idx)
    lengths = np.diff(offsets)
    live = np.flatnonzero((lengths > 0) & (slots != PAD_SLOT))
    _clear_unowned_rows(out.array, offsets, live)
    # Longest first: then the sequences that still have a token at a step are the first few of their group.
    live = live[np.argsort(-lengths[live], kind="stable")]
    state_bytes = 4 * inputs.geometry.slot_state_elements
    group_size = max(1, _STATE_BYTES_AT_ONCE // state_bytes)
    with np.errstate(all="ignore"):  # non-finite values are the caller's data, on every backend
        for first in range(0, live.size, group_size):
            group = live[first : first + group_size]
            _advance(inputs, out.array, slots[group], offsets[group], lengths[group])


def _clear_unowned_rows(out: np.ndarray[Any, Any], offsets: IndexArray, live: IndexArray) -> None:
    unowned = np.ones(out.shape[0], bool)
    for sequence in live:
        unowned[offsets[sequence] : offsets[sequence + 1]] = False
    out[unowned] = 0


def _advance(
    inputs: RecurrenceInputs,
    out: np.ndarray[Any, Any],
    slots: IndexArray,
    starts: IndexArray,
    lengths: IndexArray,
) -> None:
    """Run a group of sequences, sorted by falling length, from and to their slots of the pool."""
    pool = inputs.recurrent_state.array
    heads = inputs.geometry
    # [sequence, key head, value head of the group, key element, value element]
    state = pool[slots].astype(np.float32, copy=False)
    grouped = state.reshape(-1, heads.num_key_heads, heads.group_size, heads.key_head_dim, heads.value_head_dim)
    for step in range(lengths[0]):
        num_running = int(np.searchsorted(-lengths, -step, side="left"))
        tokens = starts[:num_running] + step
        readout = _token_step(inputs, tokens, grouped[:num_running])
        out[tokens] = readout.reshape(num_running, heads.value_dim).astype(out.dtype, copy=False)
    pool[slots] = state.astype(pool.dtype, copy=False)


def _token_step(inputs: RecurrenceInputs, tokens: IndexArray, state: Float32Array) -> Float32Array:
    """One token of each running sequence: updates `state` in place, returns [sequence, key head, group, value]."""
    heads = inputs.geometry
    per_key_head = (-1, heads.num_key_heads, heads.key_head_dim)
    per_value_head = (-1, heads.num_key_heads, heads.group_size)
    channels = inputs.qkv_conv_output.array[tokens].astype(np.float32)
    query = channels[:, : heads.key_dim].reshape(per_key_head)
    key = channels[:, heads.key_dim : 2 * heads.key_dim].reshape(per_key_head)
    value = channels[:, 2 * heads.key_dim :].reshape(*per_value_head, heads.value_head_dim)
    decay = inputs.decay_per_token.array[tokens].astype(np.float32).reshape(per_value_head)[..., None]
    beta = inputs.beta_per_token.array[tokens].astype(np.float32).reshape(per_value_head)[..., None]

    inverse_key_norm = 1 / np.sqrt(_tree_sum((key * key)[..., None]) + NORM_EPSILON)[:, :, None]
    query_norm = np.sqrt(_tree_sum((query * query)[..., None]) + NORM_EPSILON)[:, :, None]
    readout_scale = 1 / (query_norm * np.sqrt(np.float32(heads.key_head_dim)))
    query_dot_key = _tree_sum((query * key)[..., None])[:, :, None]
    key_column = key[:, :, None, :, None]
    memory = _tree_sum(state * key_column)
    old_readout = _tree_sum(state * query[:, :, None, :, None])

    delta = (beta * inverse_key_norm) * (value - (decay * inverse_key_norm) * memory)
    state *= decay[..., None]
    state += key_column * delta[..., None, :]
    result: Float32Array = (decay * old_readout + query_dot_key * delta) * readout_scale
    return result


def _tree_sum(products: Float32Array) -> Float32Array:
    """Sum over the axis before the last in the order of `kernels/gated_delta_step.cuh`."""
    rows = products.shape[-2]
    num_chains = 16 if rows % 16 == 0 else 8
    chains = products.reshape(*products.shape[:-2], num_chains, rows // num_chains, products.shape[-1])
    sums = chains[..., 0, :].copy()
    for row in range(1, rows // num_chains):
        sums += chains[..., row, :]
    while sums.shape[-2] > 1:
        sums = sums[..., 0::2, :] + sums[..., 1::2, :]
    result: Float32Array = sums[..., 0, :]
    return result
