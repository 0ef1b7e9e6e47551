"""What verify and fold must satisfy: agreement with the oracle, promises E1 and E2, and hands kept off the rest.

The oracle knows nothing of rings: for it, folding n records means running the first n tokens again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gdn import oracle
from gdn.backends.recurrence import some_row_tiles
from gdn.backends.row_tile import forced_row_tile
from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.compare import Comparison, Tolerance, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.ring_cases import RingArrays, RingCase
from gdn.testing.ring_device import Device
from gdn.testing.ring_walk import walk

#: Folding from a 16-bit ring rounds key, delta factor and decay of each accepted token to the ring's type. An update is
#: as large as the state's scale at most, so each of RING_LEN tokens may add three roundings of it; measured below one.
_RING_ROUNDINGS = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


@dataclass(frozen=True, slots=True)
class RingSubject:
    """One case on one backend: its arrays, the readouts of the verifies, and pool and ring after them."""

    case: RingCase
    backend: str
    arrays: RingArrays
    readouts: tuple[Array, ...]
    verified_pool: Array
    ring: Array

    @property
    def lengths(self) -> Array:
        """Tokens of each row."""
        return np.asarray(self.case.lengths, np.int64)

    @property
    def counts(self) -> Array:
        """What the fold is told of each row."""
        return np.asarray(self.case.num_accepted, np.int64)

    @property
    def commits_itself(self) -> Array:
        """Rows longer than the ring."""
        too_long: Array = self.lengths > self.case.ring_len
        return too_long

    def is_live(self, layer: int) -> Array:
        """Rows that have tokens, a slot and a ring row."""
        slots, rows = (table[layer].view(np.uint32) for table in (self.arrays.row_ids, self.arrays.ring_row_ids))
        live: Array = (self.lengths > 0) & (slots != PAD_SLOT) & (rows != PAD_SLOT)
        return live


def ring_subject(case: RingCase, backend: str, arrays: RingArrays) -> RingSubject:
    """Verify every layer's windows on a backend."""
    device = Device(backend)
    pool, ring = device.put(arrays.recurrent_state), device.put(arrays.ring)
    tables = zip(arrays.layers, arrays.ring_row_ids, strict=True)
    readouts = tuple(device.verify(window, ring_rows, pool, ring) for window, ring_rows in tables)
    return RingSubject(case, backend, arrays, readouts, device.get(pool), device.get(ring))


def _accepted_rows(subject: RingSubject, layer: int) -> RecurrenceArrays:
    """The call that runs plainly what the case accepts: the first tokens of folded rows, all of over-long ones."""
    window = subject.arrays.layers[layer]
    keep = np.where(subject.commits_itself, subject.lengths, np.where(subject.is_live(layer), subject.counts, 0))
    keep[~subject.is_live(layer)] = 0
    starts = window.input_row_offsets[:-1].astype(np.int64)
    rows = np.concatenate([np.zeros(0, np.int64), *(np.arange(s, s + n) for s, n in zip(starts, keep, strict=True))])
    return replace(
        window,
        qkv_conv_output=window.qkv_conv_output[rows],
        decay_per_token=window.decay_per_token[rows],
        beta_per_token=window.beta_per_token[rows],
        input_row_offsets=np.concatenate([[0], np.cumsum(keep)]).astype(window.input_row_offsets.dtype),
    )


def _live_window(subject: RingSubject, layer: int) -> RecurrenceArrays:
    """A layer's window with rows of no ring row made padding, as the verify treats them."""
    window = subject.arrays.layers[layer]
    slots = window.slot_idx.view(np.uint32).copy()
    slots[subject.arrays.ring_row_ids[layer].view(np.uint32) == PAD_SLOT] = PAD_SLOT
    return replace(window, slot_idx=slots.view(window.slot_idx.dtype))


def _folded(subject: RingSubject, ring: Array, counts: Array) -> Array:
    """The pool after the verifies and one fold over all layers."""
    device = Device(subject.backend)
    pool = device.put(subject.verified_pool)
    arrays = subject.arrays
    device.fold(pool, arrays.row_ids, device.put(ring), arrays.ring_row_ids, counts)
    return device.get(pool)


def _plain_pool(subject: RingSubject) -> Array:
    """The pool after plain forward calls over the accepted tokens of every layer."""
    device = Device(subject.backend)
    pool = device.put(subject.arrays.recurrent_state)
    for layer in range(subject.case.num_layers):
        device.forward(_accepted_rows(subject, layer), pool)
    return device.get(pool)


def against_oracle(subject: RingSubject) -> Iterator[Comparison]:
    """Readouts and folded states within tolerance of the float64 oracle over the same tokens."""
    case = subject.case
    folded = _folded(subject, subject.ring, subject.arrays.num_accepted)
    pool = subject.arrays.recurrent_state.astype(np.float64)
    for layer, readout in enumerate(subject.readouts):
        reference, _ = oracle.gated_delta_recurrence_fwd(*_live_window(subject, layer).as_tuple())
        if subject.is_live(layer).any():
            yield close(readout, reference, storage_tolerance(case.work_dtype), f"readout of layer {layer}")
        _, pool = oracle.gated_delta_recurrence_fwd(
            *replace(_accepted_rows(subject, layer), recurrent_state=pool).as_tuple()
        )
    used = np.unique(subject.arrays.row_ids.view(np.uint32))
    used = used[used != PAD_SLOT]
    if used.size:
        state, expected = np.zeros((2, *pool.shape))
        state[used], expected[used] = folded[used], pool[used]
        yield close(state, expected, _fold_tolerance(case), "folded state")


def record_roundings(case: RingCase) -> float:
    """How far a state may be off, relative to its size, after a full ring row was applied to it."""
    return 3 * case.ring_len * _RING_ROUNDINGS.get(case.ring_dtype, 0.0)


def _fold_tolerance(case: RingCase) -> Tolerance:
    storage = storage_tolerance(case.state_dtype)
    if case.ring_dtype == "float32":
        return storage
    roundings = record_roundings(case)
    reason = f"{storage.reason}; three roundings of each accepted token's record to {case.ring_dtype}"
    return Tolerance(storage.relative_norm + roundings, storage.max_element + roundings, reason)


def readout_of_forward(subject: RingSubject) -> Iterator[Comparison]:
    """E1: the readout is that of the forward call, to the bit, whatever the lengths."""
    for layer, readout in enumerate(subject.readouts):
        device = Device(subject.backend)
        plain = device.forward(_live_window(subject, layer), device.put(subject.arrays.recurrent_state))
        yield bitwise(readout, plain, f"readout of layer {layer}")


def hands_off(subject: RingSubject) -> Iterator[Comparison]:
    """Verify leaves the pool, foreign ring rows and padding alone; over-long rows advance as forward does."""
    case, arrays = subject.case, subject.arrays
    expected_pool = arrays.recurrent_state.copy()
    may_be_written = np.zeros(arrays.ring.shape, bool)
    for layer in range(case.num_layers):
        device = Device(subject.backend)
        pool = device.put(arrays.recurrent_state)
        device.forward(_live_window(subject, layer), pool)
        live = subject.is_live(layer)
        slots = arrays.row_ids[layer].view(np.uint32)[live & subject.commits_itself]
        expected_pool[slots] = device.get(pool)[slots]
        for row in np.flatnonzero(live & ~subject.commits_itself):
            ring_row = arrays.ring_row_ids[layer].view(np.uint32)[row]
            may_be_written[ring_row, :, : subject.lengths[row], : case.heads.record_elements] = True
    yield same_bytes(subject.verified_pool, expected_pool, "pool after verify")
    untouched = np.where(may_be_written, arrays.ring, subject.ring)
    yield same_bytes(untouched, arrays.ring, "ring around the records")
    if may_be_written.any():
        records = np.isfinite(subject.ring[may_be_written].astype(np.float32))
        yield bitwise(records, np.ones_like(records), "every element of a record is written")


def fold_of_forward(subject: RingSubject) -> Iterator[Comparison]:
    """E2: verify, then fold(n), leaves what forward over the first n tokens leaves, to the bit, in every layer."""
    if subject.case.ring_dtype != "float32":
        return
    yield bitwise(_folded(subject, subject.ring, subject.arrays.num_accepted), _plain_pool(subject), "pool after fold")


def unread_records(subject: RingSubject) -> Iterator[Comparison]:
    """Records past the count, padding and foreign rows of the ring may hold anything."""
    ring = np.full_like(subject.ring, np.nan)
    for layer in range(subject.case.num_layers):
        for row in np.flatnonzero(subject.is_live(layer) & ~subject.commits_itself):
            ring_row = subject.arrays.ring_row_ids[layer].view(np.uint32)[row]
            read = (ring_row, slice(None), slice(0, subject.counts[row]), slice(0, subject.case.heads.record_elements))
            ring[read] = subject.ring[read]
    expected = _folded(subject, subject.ring, subject.arrays.num_accepted)
    yield bitwise(_folded(subject, ring, subject.arrays.num_accepted), expected, "pool after fold from a poisoned ring")


def fold_in_parts(subject: RingSubject) -> Iterator[Comparison]:
    """Layers folded in two calls, and rows in another order, give the pool of one call."""
    arrays, device = subject.arrays, Device(subject.backend)
    expected = _folded(subject, subject.ring, arrays.num_accepted)
    pool, ring = device.put(subject.verified_pool), device.put(subject.ring)
    cut = max(1, subject.case.num_layers // 2)
    for layers in (slice(0, cut), slice(cut, None)):
        device.fold(pool, arrays.row_ids[layers], ring, arrays.ring_row_ids[layers], arrays.num_accepted)
    yield bitwise(device.get(pool), expected, "layers in two calls")
    order = np.random.default_rng(0).permutation(len(subject.lengths))
    pool = device.put(subject.verified_pool)
    device.fold(pool, arrays.row_ids[:, order], ring, arrays.ring_row_ids[:, order], arrays.num_accepted[order])
    yield bitwise(device.get(pool), expected, "rows in another order")


def wrong_counts_differ(subject: RingSubject) -> Iterator[Comparison]:
    """The comparison of E2 bites: folding one record less than was accepted leaves another pool."""
    counts = subject.arrays.num_accepted.copy()
    folds = (subject.counts > 0) & (subject.counts <= subject.case.ring_len) & subject.is_live(0)
    if not folds.any():
        return
    counts[folds] -= 1
    right = _folded(subject, subject.ring, subject.arrays.num_accepted)
    wrong = bitwise(_folded(subject, subject.ring, counts), right, "fold with a wrong count")
    message = f"{wrong.name}: expected a difference, got equal pools" if wrong.passed else f"{wrong.name}: differs"
    yield replace(wrong, passed=not wrong.passed, measure="must differ", worst_error=0.0, message=message)


def thread_maps(subject: RingSubject) -> Iterator[Comparison]:
    """Every way to split a head over threads gives the same readouts, records and pool."""
    num_maps = subject.case.thread_maps
    if subject.backend == "numpy" or not num_maps:
        return
    heads = subject.case.heads
    expected = _folded(subject, subject.ring, subject.arrays.num_accepted)
    for tile in some_row_tiles(heads, subject.arrays.recurrent_state.itemsize, num_maps):
        with forced_row_tile(tile):
            other = ring_subject(subject.case, subject.backend, subject.arrays)
            folded = _folded(other, other.ring, subject.arrays.num_accepted)
        for layer, readout in enumerate(other.readouts):
            yield bitwise(readout, subject.readouts[layer], f"{tile}: readout of layer {layer}")
        yield same_bytes(other.ring, subject.ring, f"{tile}: ring")
        yield bitwise(folded, expected, f"{tile}: pool")


def walks(subject: RingSubject) -> Iterator[Comparison]:
    """E1 and E2 over a long walk of forward, verify, fold and dropped drafts, against plain forward calls."""
    return walk(subject.case, subject.backend)


_Check = Callable[[RingSubject], Iterator[Comparison]]

RING_CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "E1": readout_of_forward,
    "hands off": hands_off,
    "E2": fold_of_forward,
    "unread": unread_records,
    "parts": fold_in_parts,
    "bites": wrong_counts_differ,
    "maps": thread_maps,
    "walk": walks,
}
