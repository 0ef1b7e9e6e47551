"""What calls that take pending records must satisfy: all they leave has the bits of the plain calls they stand for.

Promises of bits are for float32 rings. A 16-bit ring is held to the oracle, within a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from gdn import oracle
from gdn.backends.recurrence import some_row_tiles
from gdn.backends.row_tile import forced_row_tile
from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.compare import Comparison, Tolerance, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.pending_steps import (
    PendingStep,
    PendingSubject,
    folded_before,
    joined,
    plain_step,
    run_step,
)
from gdn.testing.pending_walk import walk_with_pending
from gdn.testing.ring_checks import record_roundings
from gdn.testing.ring_device import Device


def fused(subject: PendingSubject) -> Iterator[Comparison]:
    """Records in another ring row: the bits of a fold, then a verify, in readout, pool and ring."""
    yield from _as_plain_calls(subject, "fused")


def lazy(subject: PendingSubject) -> Iterator[Comparison]:
    """Records in the window's own ring row: the bits of one call over pending and window tokens, in all three."""
    yield from _as_plain_calls(subject, "lazy")
    yield from _as_one_forward(subject, "lazy")


def mixed(subject: PendingSubject) -> Iterator[Comparison]:
    """Rows of both kinds beside rows of no pending ring row keep to the same."""
    yield from _as_plain_calls(subject, "mixed")
    yield from _as_one_forward(subject, "mixed")


def _as_plain_calls(subject: PendingSubject, way: str) -> Iterator[Comparison]:
    if subject.case.ring_dtype != "float32":
        return
    yield from _same_step(subject.steps[way], plain_step(subject, subject.steps[way]), way)


def _same_step(got: PendingStep, expected: PendingStep, name: str) -> Iterator[Comparison]:
    for layer, readouts in enumerate(zip(got.readouts, expected.readouts, strict=True)):
        if readouts[1].size:
            yield bitwise(*readouts, f"{name}: readout of layer {layer}")
    yield same_bytes(got.after.pool, expected.after.pool, f"{name}: pool")
    yield same_bytes(got.after.ring, expected.after.ring, f"{name}: ring")


def _as_one_forward(subject: PendingSubject, way: str) -> Iterator[Comparison]:
    """Readout, and the slots of rows that do not fit behind what is pending, as a forward call leaves them."""
    if subject.case.ring_dtype != "float32":
        return
    step = subject.steps[way]
    device, expected = Device(subject.backend), folded_before(subject, step)
    for layer in range(subject.case.num_layers):
        call, places = subject.joined(way, layer)
        pool = device.put(expected)
        readout = device.forward(call, pool)[places]
        if readout.size:
            yield bitwise(step.readouts[layer], readout, f"{way}: readout of one forward in layer {layer}")
        commits = subject.counts(way, layer, folded=False) + subject.lengths > subject.case.ring_len
        slots = subject.slots(layer)[commits & subject.is_live(layer)]
        expected[slots] = device.get(pool)[slots]
    yield same_bytes(step.after.pool, expected, f"{way}: pool of one forward")


def accepted(subject: PendingSubject) -> Iterator[Comparison]:
    """A fold of pending and accepted records leaves what one forward over just their tokens leaves."""
    if subject.case.ring_dtype != "float32":
        return
    device, windows = Device(subject.backend), subject.arrays.windows
    for way, step in subject.steps.items():
        pool, ring = device.put(step.after.pool), device.put(step.after.ring)
        expected = device.put(folded_before(subject, step))
        for layer, rows in enumerate(windows.ring_row_ids):
            stays = subject.counts(way, layer, folded=False)
            commits = stays + subject.lengths > subject.case.ring_len
            kept = np.where(commits, subject.lengths, np.minimum(subject.case.num_accepted, subject.lengths))
            counts = np.where(commits, subject.case.ring_len + 1, stays + kept).astype(np.uint32)
            device.fold(pool, windows.row_ids[layer][None], ring, rows[None], counts)
            call, _ = joined(subject.arrays.earlier[layer], stays, windows.layers[layer], kept)
            device.forward(replace(call, slot_idx=subject.joined(way, layer)[0].slot_idx), expected)
        yield bitwise(device.get(pool), device.get(expected), f"{way}: pool after a fold of what is accepted")


def forward(subject: PendingSubject) -> Iterator[Comparison]:
    """A forward call folds what is pending in any ring row: the bits of a fold, then a forward; it writes no ring."""
    if subject.case.ring_dtype != "float32":
        return
    step = subject.steps["mixed"]
    readouts, pool, ring = _forward_step(subject, step)
    device, windows = Device(subject.backend), subject.arrays.windows
    expected, records = device.put(step.before.pool), device.put(step.before.ring)
    for layer, window in enumerate(windows.layers):
        rows, counts = subject.pending("mixed", layer)
        device.fold(expected, windows.row_ids[layer][None], records, rows[None], counts)
        readout = device.forward(window, expected)
        if readout.size:
            yield bitwise(readouts[layer], readout, f"fwd: readout of layer {layer}")
    yield same_bytes(pool, device.get(expected), "fwd: pool")
    yield same_bytes(ring, step.before.ring, "fwd: ring")


def _forward_step(subject: PendingSubject, step: PendingStep) -> tuple[list[Array], Array, Array]:
    """Readouts, pool and ring of forward calls from where a step began, with what is pending there."""
    device = Device(subject.backend)
    pool, ring = device.put(step.before.pool), device.put(step.before.ring)
    readouts = [
        device.forward(window, pool, ring, subject.pending(step.way, layer))
        for layer, window in enumerate(subject.arrays.windows.layers)
    ]
    return readouts, device.get(pool), device.get(ring)


def against_oracle(subject: PendingSubject) -> Iterator[Comparison]:
    """Readouts and states within tolerance of the float64 oracle over pending and window tokens."""
    # Steps on a float32 ring are held to plain calls, which the oracle judges: one way shows that this is no accident.
    for way in subject.steps if subject.case.ring_dtype != "float32" else ("mixed",):
        step, pool = subject.steps[way], subject.arrays.windows.recurrent_state.astype(np.float64)
        for layer in range(subject.case.num_layers):
            before, call, places, written = _oracle_calls(subject, way, layer)
            _, pool = oracle.gated_delta_recurrence_fwd(*replace(before, recurrent_state=pool).as_tuple())
            readout, after = oracle.gated_delta_recurrence_fwd(*replace(call, recurrent_state=pool).as_tuple())
            pool[written] = after[written]
            if (subject.is_live(layer) & (subject.lengths > 0)).any():
                tolerance = _tolerance(subject, subject.case.work_dtype)
                yield close(step.readouts[layer], readout[places], tolerance, f"{way}: readout of layer {layer}")
        used = np.isfinite(pool).all(axis=(1, 2, 3))
        if used.any():
            tolerance = _tolerance(subject, subject.case.state_dtype)
            yield close(step.after.pool[used], pool[used], tolerance, f"{way}: states")


def _oracle_calls(
    subject: PendingSubject, way: str, layer: int
) -> tuple[RecurrenceArrays, RecurrenceArrays, Array, Array]:
    """The tokens that are in the pool once a step has folded, those that it runs, the window's, and slots it writes."""
    earlier = subject.arrays.earlier[layer]
    rows, counts = (table.view(np.uint32) for table in subject.pending(way, layer))
    committed = (counts > subject.case.ring_len) & (rows != PAD_SLOT)
    num_before = np.where(committed, np.diff(earlier.input_row_offsets.astype(np.int64)), 0)
    num_before += subject.counts(way, layer, folded=True)
    call, places = subject.joined(way, layer)
    before, _ = joined(earlier, num_before, call, np.zeros_like(num_before))
    ends = subject.counts(way, layer, folded=False) + subject.lengths
    written = subject.slots(layer)[subject.is_live(layer) & (ends > subject.case.ring_len)]
    return replace(before, slot_idx=earlier.slot_idx), call, places, written


def _tolerance(subject: PendingSubject, dtype: str) -> Tolerance:
    """That of a readout or state of a type, computed from a state that was rounded to the pool's when it was folded."""
    case, storage = subject.case, storage_tolerance(dtype)
    pool = storage_tolerance(case.state_dtype)
    roundings = record_roundings(case)
    reason = f"{storage.reason}; so for a state between; records of {case.ring_dtype}"
    return Tolerance(
        storage.relative_norm + 2 * pool.relative_norm + roundings,
        storage.max_element + 2 * pool.max_element + roundings,
        reason,
    )


def wrong_steps_differ(subject: PendingSubject) -> Iterator[Comparison]:
    """The comparisons bite: one pending record less, or a folded state that was not rounded, gives other bits."""
    for way in ("fused", "lazy"):
        step = subject.steps[way]
        counts = subject.arrays.counts.copy()
        some = (subject.counts(way, 0, folded=way == "fused") > 0) & (subject.lengths > 0)
        if some.any():
            counts[some] -= 1
            wrong = run_step(subject, way, step.before, counts)
            yield _must_differ(wrong.readouts[0], step.readouts[0], f"{way}: readout after one record less")
    if subject.case.state_dtype != "float32" and (some := _rounded_rows(subject)).any():
        step = subject.steps["fused"]
        call, places = joined(
            subject.arrays.earlier[0],
            subject.counts("fused", 0, folded=True),
            subject.joined("fused", 0)[0],
            subject.lengths,
        )
        device = Device(subject.backend)
        exact = device.forward(call, device.put(step.before.pool))[places]
        yield _must_differ(step.readouts[0], exact, "fused: readout of a state that was not rounded")


def _rounded_rows(subject: PendingSubject) -> Array:
    """Rows of the first layer that fold something and then read it out."""
    rows: Array = (subject.counts("fused", 0, folded=True) > 0) & (subject.lengths > 0)
    return rows


def _must_differ(got: Array, other: Array, name: str) -> Comparison:
    same = bitwise(got, other, name)
    message = f"{name}: expected a difference, got equal arrays" if same.passed else f"{name}: differs"
    return replace(same, passed=not same.passed, measure="must differ", worst_error=0.0, message=message)


def thread_maps(subject: PendingSubject) -> Iterator[Comparison]:
    """Every way to split a head over threads gives the same bits of verify and forward with pending records."""
    num_maps = subject.case.thread_maps
    if subject.backend == "numpy" or (subject.backend == "cuda" and not num_maps):
        return
    itemsize = subject.arrays.windows.recurrent_state.itemsize
    tiles = some_row_tiles(subject.case.heads, itemsize, max(1, num_maps))
    plain = _forward_step(subject, subject.steps["mixed"])
    # The first has a block for each tile, where calls on windows stream; more would take the CPU's compiler too long.
    for tile in tiles if num_maps else tiles[:1]:
        with forced_row_tile(tile):
            steps = [run_step(subject, way, step.before) for way, step in subject.steps.items()]
            readouts, pool, ring = _forward_step(subject, subject.steps["mixed"])
        for step in steps:
            yield from _same_step(step, subject.steps[step.way], f"{tile}: {step.way}")
        yield from (bitwise(*pair, f"{tile}: fwd readout") for pair in zip(readouts, plain[0], strict=True))
        yield same_bytes(pool, plain[1], f"{tile}: pool of fwd")
        yield same_bytes(ring, plain[2], f"{tile}: ring of fwd")


def walks(subject: PendingSubject) -> Iterator[Comparison]:
    """A long walk of plain, separate, fused and lazy steps, against forward calls over the accepted tokens."""
    return walk_with_pending(subject.case, subject.backend)


_Check = Callable[[PendingSubject], Iterator[Comparison]]

PENDING_CHECKS: dict[str, _Check] = {
    "pending": against_oracle,
    "fused": fused,
    "lazy": lazy,
    "mixed": mixed,
    "kept": accepted,
    "fwd": forward,
    "less": wrong_steps_differ,
    "tiles": thread_maps,
    "long walk": walks,
}
