"""Pending records at length: the whole product of sizes and types on a GPU, every thread map, many jobs, plans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from gdn.backends.row_tile import RowTile, forced_row_tile, row_tiles
from gdn.backends.streamed_tile import streamed_tiles
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, same_bytes
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.pending_steps import PendingSubject, build_pending_arrays, pending_subject, run_step
from gdn.testing.pending_walk import walk_with_pending
from gdn.testing.ring_cases import RING_CASES, RingCase, random_ring_case
from gdn.testing.ring_device import Device, PendingTables
from gdn.testing.sweep import run_sweep

SIZES = ((32, 32), (64, 64), (128, 128), (96, 192), (256, 256), (128, 64))
GROUPS = (1, 2, 3, 8)
RING_LENS = (1, 2, 4, 5, 8, 16, 64)
POOLS = ("float32", "bfloat16", "float16")
EQUALITIES = ("fused", "lazy", "mixed", "kept", "fwd", "less")


def case_of(heads: HeadGeometry, ring_len: int, pool: str, **changes: Any) -> RingCase:
    """Windows of every kind behind pending counts of every kind; of a long ring, a few of each."""
    windows = sorted({0, 1, ring_len // 2, ring_len, ring_len + 1})
    counts = sorted({0, 1, ring_len - 1, ring_len, ring_len + 1})
    if ring_len == max(RING_LENS):
        windows, counts = [1, 33, 65], [31, 32, 64]
    lengths, pending = zip(*product(windows, counts), strict=True)
    accepted = tuple(ring_len + 1 if length > ring_len else (length + 1) // 2 for length in lengths)
    name = f"{heads}, ring of {ring_len}, {pool} pool"
    settings = {"num_layers": 1, "state_dtype": pool, "seed": ring_len, "pending_on_host": True, **changes}
    return RingCase(name, heads, ring_len, lengths, accepted, num_pending=pending, **settings)


def subject_of(case: RingCase, backend: str) -> PendingSubject:
    return pending_subject(case, backend, build_pending_arrays(case))


def failures_of(case: RingCase, backend: str) -> Iterator[str]:
    """What the equalities find; each must have something to compare."""
    subject = subject_of(case, backend)
    for check in EQUALITIES:
        comparisons = list(PENDING_CHECKS[check](subject))
        assert comparisons != []
        yield from (f"{case.name}, {check}: {found.message}" for found in comparisons if not found.passed)


@pytest.mark.gpu
@pytest.mark.parametrize("ring_len", RING_LENS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{}x{}".format(*sizes))
def test_sizes_and_ring_lengths(sizes: tuple[int, int], ring_len: int, request: pytest.FixtureRequest) -> None:
    """Each with one group and pool, which take turns; with --exhaustive the whole product, a thousand kernels."""
    turn = SIZES.index(sizes) + RING_LENS.index(ring_len)
    combinations = [(GROUPS[turn % len(GROUPS)], POOLS[turn % len(POOLS)])]
    if request.config.getoption("--exhaustive"):
        combinations = list(product(GROUPS, POOLS))
    failures = [
        failure
        for group_size, pool in combinations
        for failure in failures_of(case_of(HeadGeometry(1, group_size, *sizes), ring_len, pool), "cuda")
    ]
    assert failures == []


@pytest.mark.gpu
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("group_size", GROUPS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{}x{}".format(*sizes))
def test_sizes_groups_and_pools(sizes: tuple[int, int], group_size: int, pool: str) -> None:
    assert list(failures_of(case_of(HeadGeometry(1, group_size, *sizes), 4, pool), "cuda")) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("work_dtype", "pool"), list(product(POOLS, POOLS)))
def test_every_pair_of_types(work_dtype: str, pool: str) -> None:
    case = case_of(HeadGeometry(2, 4, 128, 128), 4, pool, work_dtype=work_dtype)
    assert list(failures_of(case, "cuda")) == []


def maps_of(sizes: tuple[int, int], itemsize: int, *, all_of_them: bool) -> tuple[RowTile, ...]:
    """Maps with a block for each tile, all or every fifth, and all that stream."""
    return (*row_tiles(*sizes, itemsize)[:: 1 if all_of_them else 5], *streamed_tiles(*sizes, itemsize))


@pytest.mark.parametrize("pool", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(32, 32), (128, 128), (96, 192), (24, 72)], ids=lambda sizes: "{}x{}".format(*sizes))
def test_thread_maps(kernels: str, sizes: tuple[int, int], pool: str, request: pytest.FixtureRequest) -> None:
    """Each one's steps and forward calls have the bits of the map that the call picks; --exhaustive runs every map."""
    if kernels == "host" and (sizes, pool) != ((32, 32), "float32"):
        pytest.skip("a few maps of one size are compiled for the CPU; cuda runs them all")
    case = case_of(HeadGeometry(1, 2, *sizes), 4, pool)
    subject = subject_of(case, kernels)
    expected = forward_of(subject)
    all_of_them = bool(request.config.getoption("--exhaustive"))
    maps = maps_of(sizes, 4 if pool == "float32" else 2, all_of_them=all_of_them)
    assert len(maps) > 6
    for tile in maps if kernels == "cuda" else maps[::4]:
        with forced_row_tile(tile):
            steps = [run_step(subject, way, step.before) for way, step in subject.steps.items()]
            forward = forward_of(subject)
        for step in steps:
            plain = subject.steps[step.way]
            assert_passed(
                bitwise(step.readouts[0], plain.readouts[0], f"{tile}, {step.way}: readout"),
                same_bytes(step.after.pool, plain.after.pool, f"{tile}, {step.way}: pool"),
                same_bytes(step.after.ring, plain.after.ring, f"{tile}, {step.way}: ring"),
            )
        assert_passed(*(same_bytes(*pair, f"{tile}: fwd") for pair in zip(forward, expected, strict=True)))


def forward_of(subject: PendingSubject) -> tuple[Any, Any]:
    """Readout and pool of a forward call with a subject's mixed pending records."""
    device, before = Device(subject.backend), subject.steps["mixed"].before
    pool, ring = device.put(before.pool), device.put(before.ring)
    window, tables = subject.arrays.windows.layers[0], subject.pending("mixed", 0)
    return device.forward(window, pool, ring, tables), device.get(pool)


def test_more_jobs_than_blocks(kernels: str) -> None:
    """Streams go from job to job, on a large GPU too: each with another count, in another ring row or the same."""
    case = replace(
        RING_CASES["ring_stream_of_windows"], num_pending=(1, 4, 0, 5, 2, 3, 4) * 8, ring_padding=(3, 50), num_layers=1
    )
    assert {(length, count) for length, count in zip(case.lengths, case.num_pending, strict=True)} >= set(
        product((0, 1, 2, 3, 4, 7), range(6))
    )
    assert list(failures_of(case, kernels)) == []


@pytest.mark.parametrize("number", range(24))
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_case(number: int, backend: str) -> None:
    if backend == "numpy" and number >= 8:
        pytest.skip("eight cases on numpy; cuda runs them all")
    case = random_ring_case(7, number)
    if not case.num_pending:
        case = replace(case, num_pending=tuple(range(len(case.lengths))))
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert {"fused", "lazy", "mixed"} <= {check.check for check in result.checks}
    assert [f"{check.check}: {failure}" for check in result.checks for failure in check.failures] == []


@pytest.mark.gpu
@pytest.mark.parametrize("ring_len", [1, 4, 16, 64])
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("sizes", [(128, 128), (96, 192)], ids=lambda sizes: "{}x{}".format(*sizes))
def test_a_walk_of_300_steps(sizes: tuple[int, int], pool: str, ring_len: int) -> None:
    case = RingCase("walk", HeadGeometry(2, 4, *sizes), ring_len, (), (), state_dtype=pool, walk_steps=300)
    assert_passed(*walk_with_pending(case, "cuda"))


@pytest.mark.gpu
def test_plans_of_calls_with_pending_records() -> None:
    """Calls of one kind, which are checked in full only once, each on arrays of its own: the bits of the first."""
    case = case_of(HeadGeometry(2, 4, 64, 64), 4, "bfloat16")
    subject = subject_of(case, "cuda")
    device, step = Device("cuda"), subject.steps["mixed"]
    window, rows = subject.arrays.windows.layers[0], subject.arrays.windows.ring_row_ids[0]
    kept = []  # so that no array comes to lie where one before it lay
    for number in range(4):
        pool, ring = device.put(step.before.pool), device.put(step.before.ring)
        kept.append((pool, ring))
        readout = device.verify(window, rows, pool, ring, subject.pending("mixed", 0))
        assert_passed(
            bitwise(readout, step.readouts[0], f"readout of call {number}"),
            same_bytes(device.get(pool), step.after.pool, f"pool of call {number}"),
            same_bytes(device.get(ring), step.after.ring, f"ring of call {number}"),
        )
    # With other counts, and without any: another kind of call, whose plan is another.
    nothing = PendingTables(subject.pending("mixed", 0).ring_rows, np.zeros(len(rows), np.uint32))
    pools = [device.put(step.before.pool) for _ in range(2)]
    readouts = [
        device.verify(window, rows, pool, device.put(step.before.ring), tables)
        for pool, tables in zip(pools, (nothing, None), strict=True)
    ]
    states = [device.get(pool) for pool in pools]
    assert_passed(
        bitwise(readouts[0], readouts[1], "readout of nothing pending"),
        same_bytes(states[0], states[1], "pool of nothing pending"),
    )
    assert not bitwise(readouts[0], step.readouts[0])
