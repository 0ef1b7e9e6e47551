"""One step of a speculative loop over records that an earlier window left, and the plain calls that it must equal.

A row's pending records lie in another ring row than its window's, where the step folds them; or in the same, where they
stay pending; or its entry is padding, and nothing is pending whatever its count says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.ring_cases import RingArrays, RingCase, build_ring_arrays
from gdn.testing.ring_device import Device, PendingTables

#: What the rows of a batch do with their pending records, by the name of the way; the rows go through it in turn.
WAYS: dict[str, tuple[str, ...]] = {
    "fused": ("another row",),
    "lazy": ("same row",),
    "mixed": ("another row", "same row", "same row", "another row", "no row"),
}
#: Other ways to say that a window committed itself than one more than the ring holds.
_ABOVE_ANY_RING = (65, 2**31, 2**32 - 1)


@dataclass(frozen=True, slots=True)
class PendingArrays:
    """Arrays of a case's windows and of the windows before them, whose tokens are the pending ones.

    windows: as without pending records, but for a ring that has a second row for every row of the batch.
    other_row_ids: [num_layers, batch_size], those second rows. counts: [batch_size], what the step is told.
    """

    windows: RingArrays
    earlier: tuple[RecurrenceArrays, ...]
    other_row_ids: Array
    counts: Array

    def pending_row_ids(self, way: str) -> Array:
        """Where pending records lie, [num_layers, batch_size]."""
        kinds = np.resize(WAYS[way], len(self.counts))
        rows = np.where(kinds == "another row", self.other_row_ids, self.windows.ring_row_ids).view(np.uint32)
        rows[:, kinds == "no row"] = PAD_SLOT
        return rows.view(self.other_row_ids.dtype)


def build_pending_arrays(case: RingCase) -> PendingArrays:
    """The arrays of a case. The ring holds NaN: nobody may read more of it than the windows before have written."""
    windows = build_ring_arrays(case)
    before = replace(case, lengths=case.num_pending, num_accepted=(0,) * len(case.lengths), seed=case.seed + 500)
    earlier = tuple(
        replace(tokens, recurrent_state=window.recurrent_state, slot_idx=window.slot_idx)
        for tokens, window in zip(build_ring_arrays(before).layers, windows.layers, strict=True)
    )
    num_rows = windows.ring_row_ids.size
    rows = np.random.default_rng([case.seed, num_rows]).permutation(2 * num_rows + 2)[: 2 * num_rows]
    own, other = rows.astype(np.uint32).reshape(2, *windows.ring_row_ids.shape)
    own[:, list(case.ring_padding)] = PAD_SLOT
    index = windows.ring_row_ids.dtype
    ring = np.full((2 * num_rows + 2, *windows.ring.shape[1:]), np.nan, windows.ring.dtype)
    counts = np.asarray(case.num_pending, np.uint32)
    committed = np.flatnonzero(counts > case.ring_len)[1::2]
    counts[committed] = np.resize(np.asarray(_ABOVE_ANY_RING, np.uint32), len(committed))
    return PendingArrays(
        replace(windows, ring=ring, ring_row_ids=own.view(index)), earlier, other.view(index), counts.view(index)
    )


@dataclass(frozen=True, slots=True)
class Memory:
    """Pool and ring at one time."""

    pool: Array
    ring: Array


@dataclass(frozen=True, slots=True)
class PendingStep:
    """What a step made of pool and ring as the windows before left them, and the readout of each layer's windows."""

    way: str
    before: Memory
    readouts: tuple[Array, ...]
    after: Memory


@dataclass(frozen=True, slots=True)
class PendingSubject:
    """One case on one backend: its arrays, and the steps by their ways."""

    case: RingCase
    backend: str
    arrays: PendingArrays
    steps: Mapping[str, PendingStep]

    @property
    def lengths(self) -> Array:
        """Tokens of each row's window."""
        return np.asarray(self.case.lengths, np.int64)

    def slots(self, layer: int) -> Array:
        """Slots of a layer."""
        slots: Array = self.arrays.windows.row_ids[layer].view(np.uint32)
        return slots

    def is_live(self, layer: int) -> Array:
        """Rows that have a slot and a ring row, tokens or not."""
        rows = self.arrays.windows.ring_row_ids[layer].view(np.uint32)
        live: Array = (self.slots(layer) != PAD_SLOT) & (rows != PAD_SLOT)
        return live

    def pending(self, way: str, layer: int) -> PendingTables:
        """What the step is told of pending records."""
        return PendingTables(self.arrays.pending_row_ids(way)[layer], self.arrays.counts)

    def counts(self, way: str, layer: int, *, folded: bool) -> Array:
        """Records that each row's state advances over, of those in another ring row (folded), or in the window's."""
        rows, counts = (table.view(np.uint32) for table in self.pending(way, layer))
        own = self.arrays.windows.ring_row_ids[layer].view(np.uint32)
        applies = self.is_live(layer) & (rows != PAD_SLOT) & (counts <= self.case.ring_len) & ((rows != own) == folded)
        return np.where(applies, counts, 0).astype(np.int64)

    def joined(self, way: str, layer: int) -> tuple[RecurrenceArrays, Array]:
        """The call on pending tokens that are not folded and the window's behind them, and where the latter lie.

        Rows of no ring row are padding.
        """
        window = self.arrays.windows.layers[layer]
        slots = np.where(self.is_live(layer), self.slots(layer), PAD_SLOT).astype(np.uint32)
        stays = self.counts(way, layer, folded=False)
        call, places = joined(self.arrays.earlier[layer], stays, window, self.lengths)
        return replace(call, slot_idx=slots.view(window.slot_idx.dtype)), places


def pending_subject(case: RingCase, backend: str, arrays: PendingArrays) -> PendingSubject:
    """Run the steps of a case on a backend."""
    steps: dict[str, PendingStep] = {}
    subject = PendingSubject(case, backend, arrays, steps)
    for way in WAYS:
        steps[way] = run_step(subject, way, before_step(subject, way))
    return subject


def before_step(subject: PendingSubject, way: str) -> Memory:
    """Pool and ring after verifies of the windows before."""
    device, arrays = Device(subject.backend), subject.arrays
    pool, ring = device.put(arrays.windows.recurrent_state), device.put(arrays.windows.ring)
    for tokens, rows in zip(arrays.earlier, arrays.pending_row_ids(way), strict=True):
        device.verify(tokens, rows, pool, ring)
    return Memory(device.get(pool), device.get(ring))


def run_step(subject: PendingSubject, way: str, before: Memory, counts: Array | None = None) -> PendingStep:
    """Verify every layer's windows from a memory, with pending records as the case says, or `counts` of them."""
    device, windows = Device(subject.backend), subject.arrays.windows
    pool, ring = device.put(before.pool), device.put(before.ring)
    readouts = []
    for layer, (window, rows) in enumerate(zip(windows.layers, windows.ring_row_ids, strict=True)):
        tables = subject.pending(way, layer)
        tables = tables if counts is None else tables._replace(counts=counts)
        readouts.append(device.verify(window, rows, pool, ring, tables))
    return PendingStep(way, before, tuple(readouts), Memory(device.get(pool), device.get(ring)))


def folded_before(subject: PendingSubject, step: PendingStep) -> Array:
    """The pool of a step after plain folds of the records that lie in another ring row."""
    device, windows = Device(subject.backend), subject.arrays.windows
    pool, ring = device.put(step.before.pool), device.put(step.before.ring)
    for layer in range(subject.case.num_layers):
        tables = windows.row_ids[layer][None], subject.pending(step.way, layer).ring_rows[None]
        counts = subject.counts(step.way, layer, folded=True).astype(np.uint32)
        device.fold(pool, tables[0], ring, tables[1], counts)
    return device.get(pool)


def plain_step(subject: PendingSubject, step: PendingStep) -> PendingStep:
    """The same step in plain calls: a fold of what lies in another ring row, then a verify.

    Where the records lie in the window's own ring row, the verify runs over their tokens and the window's, on a ring of
    its own, from which the window's records are taken.
    """
    device, windows = Device(subject.backend), subject.arrays.windows
    pool, ring = device.put(folded_before(subject, step)), step.before.ring.copy()
    readouts = []
    for layer, rows in enumerate(windows.ring_row_ids):
        call, places = subject.joined(step.way, layer)
        scratch = device.put(np.full_like(ring, np.nan))
        readout = device.verify(call, rows, pool, scratch)
        readouts.append(readout[places])
        recorded = device.get(scratch)
        stays = subject.counts(step.way, layer, folded=False)
        fits = subject.is_live(layer) & (stays + subject.lengths <= subject.case.ring_len)
        for row in np.flatnonzero(fits):
            window = rows.view(np.uint32)[row], slice(None), slice(stays[row], stays[row] + subject.lengths[row])
            elements = slice(0, subject.case.heads.record_elements)
            ring[window][..., elements] = recorded[window][..., elements]
    return PendingStep(step.way, step.before, tuple(readouts), Memory(device.get(pool), ring))


def joined(
    first: RecurrenceArrays, taken: Array, second: RecurrenceArrays, kept: Array
) -> tuple[RecurrenceArrays, Array]:
    """The call on the first tokens `taken` of each row of one call, then the first `kept` of each row of another.

    Also returns where the second call's token rows lie in it, rows that no sequence covers included if all are kept.
    """
    rows: list[tuple[int, int]] = []
    places: list[int] = []
    place = 0
    for from_first, from_second, num_taken, num_kept in zip(
        first.input_row_offsets[:-1], second.input_row_offsets[:-1], taken, kept, strict=True
    ):
        rows += [(0, int(from_first) + token) for token in range(num_taken)]
        rows += [(1, int(from_second) + token) for token in range(num_kept)]
        places += range(place + num_taken, place + num_taken + num_kept)
        place += num_taken + num_kept
    uncovered = range(int(second.input_row_offsets[-1]), len(second.qkv_conv_output))
    rows += [(1, row) for row in uncovered]
    places += range(place, place + len(uncovered))
    source, row = np.array(rows, np.int64).reshape(-1, 2).T

    def pick(name: str) -> Array:
        picked: Array = getattr(second, name)[np.where(source == 1, row, 0)]
        picked[source == 0] = getattr(first, name)[row[source == 0]]
        return picked

    lengths = np.asarray(taken, np.int64) + np.asarray(kept, np.int64)
    call = replace(
        second,
        qkv_conv_output=pick("qkv_conv_output"),
        decay_per_token=pick("decay_per_token"),
        beta_per_token=pick("beta_per_token"),
        input_row_offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(second.input_row_offsets.dtype),
    )
    return call, np.array(places, np.int64)
