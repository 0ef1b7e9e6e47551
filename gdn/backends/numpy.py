"""The ops in vectorised NumPy, float32, with the same promises as the kernels.

Only element-wise operations and sums in a fixed order are used: a matrix product or `np.sum` may add in an
order that depends on shapes and threads, and then a sequence's bits would depend on its batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from gdn.arrays import Argument
from gdn.backends.pending_windows import WindowStep
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.indices import IndexArray, folds_pending, has_pending, offset_values, slot_values
from gdn.recurrence import RecurrenceInputs
from gdn.ring import FoldInputs, Pending, VerifyInputs, ring_len

Float32Array = np.ndarray[Any, np.dtype[np.float32]]

NORM_EPSILON = np.float32(1e-6)
#: States advanced together; bounds the temporary memory and keeps it near the caches.
_STATE_BYTES_AT_ONCE = 8 << 20


class _Token(NamedTuple):
    """One token of some sequences: what it read out, and what it did to their states. R sequences."""

    readout: Float32Array  # [R, num_key_heads, group_size, value_head_dim]
    key: Float32Array  # [R, num_key_heads, key_head_dim], raw
    delta: Float32Array  # [R, num_key_heads, group_size, value_head_dim]
    decay: Float32Array  # [R, num_key_heads, group_size]


def gated_delta_recurrence_fwd(inputs: RecurrenceInputs, out: Argument, pending: Pending | None = None) -> None:
    """Advance the live sequences of a checked call, write their readout, and zero every other row of `out`."""
    slots = slot_values(inputs.slot_idx)
    pool = inputs.recurrent_state.array
    if pending is not None:
        _fold_rows(inputs, pending, np.flatnonzero(has_pending(pending) & (slots != PAD_SLOT)))
    for sequences, state in run_sequences(inputs, out.array, slots != PAD_SLOT):
        pool[slots[sequences]] = state.astype(pool.dtype, copy=False)


def gated_delta_recurrence_verify_ring(inputs: VerifyInputs, out: Argument) -> None:
    """The readout of gated_delta_recurrence_fwd; windows go to the ring, rows longer than it to the pool."""
    recurrence, pending, ring = inputs.recurrence, inputs.pending, inputs.ring.array
    slots, ring_rows = slot_values(recurrence.slot_idx), slot_values(inputs.ring_slot_idx)
    pool = recurrence.recurrent_state.array
    length = ring_len(inputs.ring)
    is_live = (slots != PAD_SLOT) & (ring_rows != PAD_SLOT)
    # Records of another ring row are folded before anything else; those of the window's own row stay pending.
    first_places = np.zeros_like(slots)
    if pending is not None:
        folds = folds_pending(inputs, pending)
        _fold_rows(recurrence, pending, np.flatnonzero(folds & is_live))
        stays = has_pending(pending) & ~folds
        first_places[stays] = slot_values(pending.num_pending)[stays]
    ends = first_places + np.diff(offset_values(recurrence.input_row_offsets))
    key_head_dim, record_elements = recurrence.geometry.key_head_dim, recurrence.geometry.record_elements
    group_size = recurrence.geometry.group_size

    def catch_up(sequences: IndexArray, state: Float32Array) -> None:
        for sequence, of_sequence in zip(sequences, state, strict=True):
            records = ring[ring_rows[sequence], :, : first_places[sequence], :record_elements]
            _apply_records(recurrence.geometry, of_sequence, records.astype(np.float32))

    def record(sequences: IndexArray, step: int, token: _Token) -> None:
        in_window = ends[sequences] <= length
        if step >= length or not in_window.any():
            return
        records = np.empty((int(in_window.sum()), ring.shape[1], record_elements), ring.dtype)
        records[..., :key_head_dim] = token.key[in_window]
        records[..., key_head_dim:-group_size] = token.delta[in_window].reshape(*records.shape[:2], -1)
        records[..., -group_size:] = token.decay[in_window]
        recorded = sequences[in_window]
        ring[ring_rows[recorded], :, first_places[recorded] + step, :record_elements] = records

    for sequences, state in run_sequences(recurrence, out.array, is_live, catch_up, record):
        too_long = ends[sequences] > length
        pool[slots[sequences[too_long]]] = state[too_long].astype(pool.dtype, copy=False)


def _fold_rows(inputs: RecurrenceInputs, pending: Pending, sequences: IndexArray) -> None:
    """Fold what is pending of these sequences into their slots."""
    slots, counts = slot_values(inputs.slot_idx), slot_values(pending.num_pending)
    ring_rows = slot_values(pending.ring_slot_idx)
    for sequence in sequences:
        records = pending.ring.array[ring_rows[sequence], :, : counts[sequence]]
        _fold_slot(inputs.geometry, inputs.recurrent_state.array, slots[sequence], records)


def gated_delta_state_fold(inputs: FoldInputs) -> None:
    """Advance the pool over the accepted records of a checked call."""
    slots, ring_rows = slot_values(inputs.row_ids), slot_values(inputs.ring_row_ids)
    counts = slot_values(inputs.num_accepted)
    pool, ring = inputs.recurrent_state.array, inputs.ring.array
    counts_of_rows = np.broadcast_to(counts, slots.shape)
    in_use = (counts_of_rows > 0) & (counts_of_rows <= ring_len(inputs.ring))
    for place in zip(*np.nonzero(in_use & (slots != PAD_SLOT) & (ring_rows != PAD_SLOT)), strict=True):
        _fold_slot(inputs.geometry, pool, slots[place], ring[ring_rows[place], :, : counts_of_rows[place]])


def pending_windows(step: WindowStep, tables: Sequence[Argument], ring_len: int, *, is_lazy: bool) -> None:
    """What `kernels/pending_windows.cu` says, on the tables that it changes."""
    own, pending_rows, spare, num_pending, window_len, first_place = (table.array for table in tables)
    if step.is_new is not None:
        num_pending[step.is_new.array] = 0
    if step.num_accepted is not None:
        accepted = first_place + np.minimum(slot_values(step.num_accepted), window_len)
        num_pending[...] = np.select([window_len == 0, window_len > ring_len], [num_pending, 0], accepted)
        pending_rows[...] = own
    if step.input_row_offsets is None:
        return
    offsets = np.maximum(offset_values(step.input_row_offsets), 0)
    is_padding = False if step.slot_idx is None else slot_values(step.slot_idx) == PAD_SLOT
    window_len[...] = np.where(is_padding, 0, np.maximum(np.diff(offsets), 0))
    fits = is_lazy & (num_pending.astype(np.int64) + window_len <= ring_len)
    moves = (num_pending > 0) & (window_len > 0) & ~fits
    first_place[...] = np.where(moves, 0, num_pending)
    other = np.where(own == pending_rows, spare, own)
    own[...] = np.where(moves, other, pending_rows)
    spare[...] = np.where(moves, pending_rows, other)


def _fold_slot(heads: HeadGeometry, pool: np.ndarray[Any, Any], slot: int, records: np.ndarray[Any, Any]) -> None:
    """Advance one slot of a pool over records [num_key_heads, n, record_stride]."""
    state = pool[slot].astype(np.float32)
    with np.errstate(all="ignore"):  # non-finite values are the caller's data, on every backend
        _apply_records(heads, state, records[..., : heads.record_elements].astype(np.float32))
        pool[slot] = state.astype(pool.dtype, copy=False)


def _apply_records(heads: HeadGeometry, state: Float32Array, records: Float32Array) -> None:
    """Advance one state, [num_value_heads, key_head_dim, value_head_dim], over [num_key_heads, n, record_elements]."""
    grouped = state.reshape(heads.num_key_heads, heads.group_size, heads.key_head_dim, heads.value_head_dim)
    decays_at = heads.record_elements - heads.group_size
    for step in range(records.shape[1]):
        record = records[:, step]
        delta = record[:, heads.key_head_dim : decays_at].reshape(heads.num_key_heads, heads.group_size, -1)
        _update(grouped, record[:, : heads.key_head_dim], delta, record[:, decays_at:])


def run_sequences(
    inputs: RecurrenceInputs,
    out: np.ndarray[Any, Any],
    has_a_place: np.ndarray[Any, Any],
    catch_up: Callable[[IndexArray, Float32Array], None] | None = None,
    record: Callable[[IndexArray, int, _Token], None] | None = None,
) -> Iterator[tuple[IndexArray, Float32Array]]:
    """Run the sequences that have tokens and a place in the pool; yields groups of them with their last states.

    Writes their readout and zeroes every other row of `out`. Before its first step, `catch_up` may advance the states
    of a group. After each step, `record` is told the positions of the sequences that ran a token, the step, and the
    tokens.
    """
    offsets = offset_values(inputs.input_row_offsets)
    lengths = np.diff(offsets)
    live = np.flatnonzero((lengths > 0) & has_a_place)
    _clear_unowned_rows(out, offsets, live)
    # Longest first: then the sequences that still have a token at a step are the first few of their group.
    live = live[np.argsort(-lengths[live], kind="stable")]
    at_once = max(1, _STATE_BYTES_AT_ONCE // (4 * inputs.geometry.slot_state_elements))
    with np.errstate(all="ignore"):  # non-finite values are the caller's data, on every backend
        for first in range(0, live.size, at_once):
            sequences = live[first : first + at_once]
            state = inputs.recurrent_state.array[slot_values(inputs.slot_idx)[sequences]].astype(np.float32, copy=False)
            if catch_up is not None:
                catch_up(sequences, state)
            _advance(inputs, out, state, sequences, offsets[sequences], lengths[sequences], record)
            yield sequences, state


def _clear_unowned_rows(out: np.ndarray[Any, Any], offsets: IndexArray, live: IndexArray) -> None:
    unowned = np.ones(out.shape[0], bool)
    for sequence in live:
        unowned[offsets[sequence] : offsets[sequence + 1]] = False
    out[unowned] = 0


def _advance(
    inputs: RecurrenceInputs,
    out: np.ndarray[Any, Any],
    state: Float32Array,
    sequences: IndexArray,
    starts: IndexArray,
    lengths: IndexArray,
    record: Callable[[IndexArray, int, _Token], None] | None,
) -> None:
    """Run sequences, sorted by falling length, from these states on, which become their last ones."""
    heads = inputs.geometry
    grouped = state.reshape(-1, heads.num_key_heads, heads.group_size, heads.key_head_dim, heads.value_head_dim)
    for step in range(lengths[0]):
        num_running = int(np.searchsorted(-lengths, -step, side="left"))
        rows = starts[:num_running] + step
        token = _run_token(inputs, rows, grouped[:num_running])
        out[rows] = token.readout.reshape(num_running, heads.value_dim).astype(out.dtype, copy=False)
        if record is not None:
            record(sequences[:num_running], step, token)


def _run_token(inputs: RecurrenceInputs, rows: IndexArray, state: Float32Array) -> _Token:
    """One token of each running sequence; updates `state`, [R, key head, value head of the group, key, value]."""
    heads = inputs.geometry
    per_key_head = (-1, heads.num_key_heads, heads.key_head_dim)
    per_value_head = (-1, heads.num_key_heads, heads.group_size)
    channels = inputs.qkv_conv_output.array[rows].astype(np.float32)
    query = channels[:, : heads.key_dim].reshape(per_key_head)
    key = channels[:, heads.key_dim : 2 * heads.key_dim].reshape(per_key_head)
    value = channels[:, 2 * heads.key_dim :].reshape(*per_value_head, heads.value_head_dim)
    decay = inputs.decay_per_token.array[rows].astype(np.float32).reshape(per_value_head)
    beta = inputs.beta_per_token.array[rows].astype(np.float32).reshape(per_value_head)

    inverse_key_norm = 1 / np.sqrt(tree_sum((key * key)[..., None]) + NORM_EPSILON)
    query_norm = np.sqrt(tree_sum((query * query)[..., None]) + NORM_EPSILON)[:, :, None]
    readout_scale = 1 / (query_norm * np.sqrt(np.float32(heads.key_head_dim)))
    query_dot_key = tree_sum((query * key)[..., None])[:, :, None]
    memory = tree_sum(state * key[:, :, None, :, None])
    old_readout = tree_sum(state * query[:, :, None, :, None])

    # A decay of 0 erases the state before the sums: they count as 0 even if a huge state made them overflow.
    memory[decay == 0] = 0
    old_readout[decay == 0] = 0

    delta = (beta * inverse_key_norm)[..., None] * (value - (decay * inverse_key_norm)[..., None] * memory)
    _update(state, key, delta, decay)
    readout = (decay[..., None] * old_readout + query_dot_key * delta) * readout_scale
    return _Token(readout, key, delta, decay)


def _update(state: Float32Array, key: Float32Array, delta: Float32Array, decay: Float32Array) -> None:
    """S ← decay · S + k ⊗ delta, in place: what a token does to the state, and what its record repeats."""
    state *= decay[..., None, None]
    state += key[..., None, :, None] * delta[..., None, :]


def tree_sum(products: Float32Array) -> Float32Array:
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
