"""Long random walks of a speculative decode loop: forward, verify and fold, verifies whose drafts are all dropped.

Whatever the walk, the pool must end where plain forward calls over the accepted tokens end, to the bit: in calls of the
same grouping for any pool, in a single call for a float32 pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.compare import Comparison, bitwise
from gdn.testing.ring_cases import RingCase
from gdn.testing.ring_device import Device

_NUM_ROWS = 3
_RING_ROWS = 7


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step does: `drafted` tokens of each row are verified (none: a plain forward), `accepted` are kept."""

    drafted: Array
    accepted: Array
    ring_rows: Array


def walk(case: RingCase, backend: str) -> Iterator[Comparison]:
    """Walk `case.walk_steps` steps and compare readouts and pool with plain forward calls; none without steps."""
    if not case.walk_steps:
        return
    steps = _draw_steps(case)
    advance = sum((step.accepted for step in steps), np.zeros(_NUM_ROWS, np.int64))
    tokens = build_arrays(token_streams(case, advance + case.ring_len))
    device = Device(backend)
    pool, plain_pool = device.put(tokens.recurrent_state), device.put(tokens.recurrent_state)
    ring_shape = (_RING_ROWS, case.heads.num_key_heads, case.ring_len, case.heads.record_elements + case.record_padding)
    ring = device.put(np.full(ring_shape, np.nan, np.float32))
    position = np.zeros(_NUM_ROWS, np.int64)
    for number, step in enumerate(steps):
        accepted = piece(tokens, position, step.accepted)
        plain = device.forward(accepted, plain_pool)
        if step.drafted.any():
            window = piece(tokens, position, step.drafted)
            readout = device.verify(window, step.ring_rows, pool, ring)
            device.fold(pool, window.slot_idx[None], ring, step.ring_rows[None], step.accepted.astype(np.uint32))
            readout = first_rows(readout, step.drafted, step.accepted)
        else:
            readout = device.forward(accepted, pool)
        if readout.size:
            yield bitwise(readout, plain, f"step {number}: readout")
        position += step.accepted
    yield bitwise(device.get(pool), device.get(plain_pool), "pool after the walk")
    if case.state_dtype == "float32":
        at_once = device.put(tokens.recurrent_state)
        device.forward(piece(tokens, np.zeros_like(position), position), at_once)
        yield bitwise(device.get(pool), device.get(at_once), "pool after one call")


def _draw_steps(case: RingCase) -> list[_Step]:
    random = np.random.default_rng(case.seed)
    steps = []
    for _ in range(case.walk_steps):
        ring_rows = random.permutation(_RING_ROWS)[:_NUM_ROWS].astype(np.uint32)
        kind = random.random()
        if kind < 0.25:
            drafted, accepted = np.zeros(_NUM_ROWS, np.int64), np.ones(_NUM_ROWS, np.int64)
        else:
            drafted = random.integers(1, case.ring_len + 1, _NUM_ROWS)
            accepted = np.zeros_like(drafted) if kind < 0.4 else random.integers(0, drafted + 1)
        steps.append(_Step(drafted, accepted, ring_rows))
    return steps


def token_streams(case: RingCase, lengths: Array) -> RecurrenceCase:
    """The case whose sequences are the tokens of each row of a walk, so many of each."""
    return RecurrenceCase(
        case.name,
        case.heads,
        tuple(int(length) for length in lengths),
        work_dtype=case.work_dtype,
        state_dtype=case.state_dtype,
        out_dtype=case.work_dtype,
        seed=case.seed,
    )


def piece(tokens: RecurrenceArrays, position: Array, counts: Array) -> RecurrenceArrays:
    """The call on the next `counts` tokens of every row's stream."""
    starts = tokens.input_row_offsets[:-1].astype(np.int64) + position
    rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    return replace(
        tokens,
        qkv_conv_output=tokens.qkv_conv_output[rows],
        decay_per_token=tokens.decay_per_token[rows],
        beta_per_token=tokens.beta_per_token[rows],
        input_row_offsets=np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
    )


def first_rows(readout: Array, drafted: Array, accepted: Array) -> Array:
    """Of each row's part of a readout, the accepted tokens."""
    starts = np.cumsum(drafted) - drafted
    return np.concatenate([readout[start : start + count] for start, count in zip(starts, accepted, strict=True)])
