"""Long random walks of a speculative loop that leaves records pending: plain, separate, fused and lazy steps in turn.

Whatever the walk, readouts and pool must be those of forward calls over the accepted tokens, to the bit: for any pool,
of calls that end where the walk wrote a state; for a float32 pool, of a single call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, build_arrays
from gdn.testing.compare import Comparison, bitwise
from gdn.testing.ring_cases import RingCase
from gdn.testing.ring_device import Device, PendingTables
from gdn.testing.ring_walk import first_rows, piece, token_streams

_NUM_ROWS = 3
_RING_ROWS = 3 * _NUM_ROWS


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step does with each row.

    kind: "plain", a forward call; "separate", a fold of what is pending, a verify and a fold; "pending", one verify.
    drafted, accepted: tokens of the window, and how many of them are kept. folds: rows whose records a verify folds, as
    it records in another ring row; it leaves those of other rows pending. ring_rows: where windows are recorded.
    counts: what the call is told of pending records.
    """

    kind: str
    drafted: Array
    accepted: Array
    folds: Array
    ring_rows: Array
    counts: Array


class _Loop:
    """What a decode loop knows of its rows: where their pending records lie and how many they are."""

    def __init__(self, case: RingCase) -> None:
        self.ring_len = case.ring_len
        self.random = np.random.default_rng([case.seed, case.ring_len])
        self.pending = np.zeros(_NUM_ROWS, np.int64)
        self.ring_rows = self.random.permutation(_RING_ROWS)[:_NUM_ROWS].astype(np.uint32)

    def draw(self) -> _Step:
        """The next step."""
        kind = str(self.random.choice(["plain", "separate", "pending"], p=[0.15, 0.15, 0.7]))
        folds = self.random.random(_NUM_ROWS) < (0.5 if kind == "pending" else 1.1)
        others = self.random.permutation(np.setdiff1d(np.arange(_RING_ROWS), self.ring_rows))[:_NUM_ROWS]
        ring_rows = np.where(folds, others, self.ring_rows).astype(np.uint32)
        drafted = self.random.integers(0, self.ring_len + (2 if kind == "pending" else 1), _NUM_ROWS)
        accepted = self.random.integers(0, drafted + 1)
        if self.random.random() < 0.3:
            accepted = drafted if self.random.random() < 0.5 else np.zeros_like(drafted)
        # A forward keeps all its tokens, and so does a window that does not fit behind what is pending.
        ends = drafted + np.where(folds, 0, self.pending)
        accepted = np.where((ends > self.ring_len) | (kind == "plain"), drafted, accepted)
        # Nothing pending may also be said as after a window that committed itself.
        committed = self.ring_len + self.random.integers(1, 3, _NUM_ROWS)
        is_said_so = (self.pending == 0) & (self.random.random(_NUM_ROWS) < 0.5)
        counts = np.where(is_said_so, committed, self.pending).astype(np.uint32)
        return _Step(kind, drafted, accepted, folds, ring_rows, counts)

    def advance(self, step: _Step) -> Array:
        """Know of what a step left; returns the rows whose window was written into the pool."""
        ends = step.drafted + np.where(step.folds, 0, self.pending)
        committed: Array = (ends > self.ring_len) | (step.kind != "pending")
        self.pending = np.where(committed, 0, np.where(step.folds, 0, self.pending) + step.accepted)
        self.ring_rows = step.ring_rows
        return committed


class _Plain:
    """The same rows by forward calls alone, in groups of tokens that end where the walk writes a state."""

    def __init__(self, device: Device, tokens: RecurrenceArrays) -> None:
        self.device, self.tokens = device, tokens
        self.pool = device.put(tokens.recurrent_state)
        self.written = np.zeros(_NUM_ROWS, np.int64)  # tokens that are in the pool

    def write(self, rows: Array, position: Array) -> None:
        """Advance the slots of some rows to a position."""
        counts = np.where(rows, position - self.written, 0)
        self.device.forward(piece(self.tokens, self.written, counts), self.pool)
        self.written = self.written + counts

    def readout(self, position: Array, counts: Array) -> Array:
        """Of so many tokens from a position on, in one call with all that is not in the pool before them."""
        behind = position - self.written
        pool = self.device.put(self.device.get(self.pool))
        readout = self.device.forward(piece(self.tokens, self.written, behind + counts), pool)
        starts = np.cumsum(behind + counts) - counts
        return np.concatenate([readout[start : start + count] for start, count in zip(starts, counts, strict=True)])


def walk_with_pending(case: RingCase, backend: str) -> Iterator[Comparison]:
    """Walk `case.walk_steps` steps and compare readouts and pool with plain forward calls; none without steps."""
    if not case.walk_steps:
        return
    loop, steps = _Loop(case), _steps_of(case)
    total = sum((step.accepted for step in steps), np.zeros(_NUM_ROWS, np.int64))
    tokens = build_arrays(token_streams(case, total + case.ring_len + 1))
    device = Device(backend)
    plain, pool = _Plain(device, tokens), device.put(tokens.recurrent_state)
    ring_shape = (_RING_ROWS, case.heads.num_key_heads, case.ring_len, case.heads.record_elements + case.record_padding)
    ring = device.put(np.full(ring_shape, np.nan, np.float32))
    position = np.zeros(_NUM_ROWS, np.int64)
    for number, step in enumerate(steps):
        plain.write(step.folds & (loop.pending > 0), position)
        readout = _run(device, step, loop, piece(tokens, position, step.drafted), pool, ring)
        if step.accepted.any():
            expected = plain.readout(position, step.accepted)
            yield bitwise(first_rows(readout, step.drafted, step.accepted), expected, f"step {number}, {step.kind}")
        position = position + step.accepted
        plain.write(loop.advance(step), position)
    device.fold(pool, tokens.slot_idx[None], ring, loop.ring_rows[None], loop.pending.astype(np.uint32))
    plain.write(np.ones(_NUM_ROWS, bool), position)
    yield bitwise(device.get(pool), device.get(plain.pool), "pool after the walk")
    if case.state_dtype == "float32":
        at_once = device.put(tokens.recurrent_state)
        device.forward(piece(tokens, np.zeros_like(position), position), at_once)
        yield bitwise(device.get(pool), device.get(at_once), "pool after one call")


def _steps_of(case: RingCase) -> list[_Step]:
    loop, steps = _Loop(case), []
    for _ in range(case.walk_steps):
        steps.append(loop.draw())
        loop.advance(steps[-1])
    return steps


def _run(device: Device, step: _Step, loop: _Loop, window: RecurrenceArrays, pool: object, ring: object) -> Array:
    """Run a step on pool and ring; returns the readout of its windows."""
    pending = PendingTables(loop.ring_rows, step.counts)
    if step.kind == "plain":
        return device.forward(window, pool, ring, pending)
    if step.kind == "pending":
        return device.verify(window, step.ring_rows, pool, ring, pending)
    slots = window.slot_idx[None]
    device.fold(pool, slots, ring, pending.ring_rows[None], pending.counts)
    readout = device.verify(window, step.ring_rows, pool, ring)
    device.fold(pool, slots, ring, step.ring_rows[None], step.accepted.astype(np.uint32))
    return readout
