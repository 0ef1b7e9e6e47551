"""Pending records on every backend: folded on the way or kept, to the bit, over all sizes, lengths and types."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.backends import host
from gdn.backends.recurrence import some_row_tiles
from gdn.backends.row_tile import forced_row_tile
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, same_bytes
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.execute import on_backend
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.pending_steps import PendingStep, PendingSubject, build_pending_arrays, pending_subject
from gdn.testing.pending_walk import walk_with_pending
from gdn.testing.ring_cases import RingCase
from gdn.testing.ring_device import Device, PendingTables

SIZES = ((32, 32), (64, 64), (128, 128), (96, 192), (256, 256), (128, 64))
GROUPS = (1, 2, 3, 8)
RING_LENS = (1, 2, 4, 5, 8, 16, 64)
POOLS = ("float32", "bfloat16", "float16")
SMALL = HeadGeometry(2, 4, 8, 8)
PAD = gdn.PAD_SLOT
EQUALITIES = ("fused", "lazy", "mixed", "kept", "fwd", "less")


# ---- Sizes, groups, lengths, counts and types ----


def case_of(sizes: tuple[int, int], group_size: int, ring_len: int, pool: str, **changes: Any) -> RingCase:
    """Nothing pending, a full ring, one that just fits the window, one record too many, a window before that committed.

    The last row's window commits itself.
    """
    window = (ring_len + 1) // 2
    rows = [(window, 0), (1, ring_len), (window, ring_len - window), (window, ring_len - window + 1), (1, ring_len + 1)]
    if ring_len < max(RING_LENS):  # as many tokens again, for what the other lengths show
        rows.append((ring_len + 1, 1))
    lengths, counts = zip(*rows, strict=True)
    accepted = tuple(ring_len + 1 if length > ring_len else length for length in lengths)
    name = f"{sizes[0]} x {sizes[1]}, group of {group_size}, ring of {ring_len}, {pool} pool"
    settings = {"num_layers": 1, "state_dtype": pool, "seed": ring_len, "pending_on_host": True, **changes}
    heads = HeadGeometry(1, group_size, *sizes)
    return RingCase(name, heads, ring_len, lengths, accepted, num_pending=counts, **settings)


def subject_of(case: RingCase, backend: str) -> PendingSubject:
    return pending_subject(case, backend, build_pending_arrays(case))


def failures_of(case: RingCase, backend: str, checks: tuple[str, ...] = EQUALITIES) -> Iterator[str]:
    """What these checks find; each must have something to compare."""
    subject = subject_of(case, backend)
    for check in checks:
        comparisons = list(PENDING_CHECKS[check](subject))
        assert comparisons != []
        yield from (f"{case.name}, {check}: {found.message}" for found in comparisons if not found.passed)


def covering_cases() -> list[RingCase]:
    """Seven of the product's 504, which bring every value together with several others."""
    return [
        case_of(SIZES[k % 6], GROUPS[k % 4], RING_LENS[k % 7], POOLS[(k + k // 3) % 3], num_layers=1 + k % 2)
        for k in range(7)
    ]


def test_the_covering_cases_cover() -> None:
    cases = covering_cases()
    assert {(case.heads.key_head_dim, case.heads.value_head_dim) for case in cases} == set(SIZES)
    assert {case.heads.group_size for case in cases} == set(GROUPS)
    assert {case.ring_len for case in cases} == set(RING_LENS)
    assert {case.state_dtype for case in cases} == set(POOLS)


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.name)
def test_covering_case(case: RingCase, backend: str) -> None:
    assert list(failures_of(case, backend, ("pending", *EQUALITIES))) == []


@pytest.mark.parametrize("ring_len", RING_LENS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{}x{}".format(*sizes))
def test_each_size_and_ring_length(sizes: tuple[int, int], ring_len: int) -> None:
    """The product on NumPy, groups and pools taking turns; test_pending_deep.py has all of it on a GPU."""
    turn = SIZES.index(sizes) + RING_LENS.index(ring_len)
    case = case_of(sizes, GROUPS[turn % len(GROUPS)], ring_len, POOLS[turn % len(POOLS)])
    assert list(failures_of(case, "numpy")) == []


@pytest.mark.parametrize(("group_size", "pool"), list(product(GROUPS, POOLS)))
def test_each_group_and_pool(group_size: int, pool: str) -> None:
    assert list(failures_of(case_of((32, 32), group_size, 4, pool), "numpy")) == []


@pytest.mark.parametrize("work_dtype", POOLS)
def test_work_and_pool_of_other_types(backend: str, work_dtype: str) -> None:
    if backend == "host" and work_dtype == "float16":
        pytest.skip("two pairs are compiled for the CPU; numpy and cuda run three")
    pool = {"float32": "bfloat16", "bfloat16": "float32", "float16": "bfloat16"}[work_dtype]
    assert list(failures_of(case_of((32, 32), 2, 4, pool, work_dtype=work_dtype), backend)) == []


@pytest.mark.parametrize("ring_dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_16_bit_ring_is_held_to_the_oracle(backend: str, state_dtype: str, ring_dtype: str) -> None:
    if backend == "host" and (state_dtype, ring_dtype) != ("bfloat16", "bfloat16"):
        pytest.skip("one pair is compiled for the CPU; numpy and cuda run them all")
    case = case_of((32, 32), 2, 4, state_dtype, ring_dtype=ring_dtype)
    assert list(failures_of(case, backend, ("pending", "less"))) == []


@pytest.mark.parametrize("record_padding", [0, 6])
@pytest.mark.parametrize("value_head_dim", [32, 64])
def test_records_that_begin_on_16_bytes_or_not(backend: str, value_head_dim: int, record_padding: int) -> None:
    """A record of 98 elements, or 162: with 6 more a multiple of 4 elements, without it not."""
    case = case_of((32, value_head_dim), 2, 4, "float32", record_padding=record_padding)
    if backend == "host" and value_head_dim == 64:
        pytest.skip("one size is compiled for the CPU; numpy and cuda run both")
    assert list(failures_of(case, backend)) == []


def forward_of(subject: PendingSubject) -> tuple[Array, Array]:
    """Readout and pool of a forward call with a subject's mixed pending records, in its first layer."""
    device, before = Device(subject.backend), subject.steps["mixed"].before
    pool = device.put(before.pool)
    tables = subject.pending("mixed", 0)
    return device.forward(subject.arrays.windows.layers[0], pool, device.put(before.ring), tables), device.get(pool)


def assert_same_steps(got: PendingSubject, expected: PendingSubject, how: str) -> None:
    def arrays(step: PendingStep) -> list[Array]:
        return [*step.readouts, step.after.pool, step.after.ring]

    for way, step in got.steps.items():
        pairs = zip(arrays(step), arrays(expected.steps[way]), strict=True)
        assert_passed(*(same_bytes(*pair, f"{how}: {way}") for pair in pairs))
    pairs = zip(forward_of(got), forward_of(expected), strict=True)
    assert_passed(*(same_bytes(one, other, f"{how}: fwd") for one, other in pairs))


def test_thread_maps_of_both_families(kernels: str) -> None:
    """Blocks of one tile and streams, of few records a chunk and many, give the same bits."""
    case = case_of((32, 64), 2, 16, "bfloat16")
    tiles = some_row_tiles(case.heads, 2, 2)
    assert {bool(tile.streamed_warps) for tile in tiles} == {True, False}
    subject = subject_of(case, kernels)
    for tile in tiles if kernels == "cuda" else tiles[::2]:
        with forced_row_tile(tile):
            assert_same_steps(subject_of(case, kernels), subject, str(tile))


@pytest.mark.parametrize("family", ["block", "stream"])
def test_the_order_of_threads_does_not_matter(family: str) -> None:
    """Threads of a block in seeded random orders: a barrier that is missing shows as other bits."""
    if host.unavailable_reason() is not None:
        pytest.skip(f"host backend: {host.unavailable_reason()}")
    case = case_of((32, 64), 2, 16, "bfloat16")
    tiles = some_row_tiles(case.heads, 2, 2)
    tile = next(tile for tile in tiles if bool(tile.streamed_warps) == (family == "stream"))
    with forced_row_tile(tile):
        plain = subject_of(case, "host")
        for seed in range(1, 5):
            with host.options(order_seed=seed, max_os_threads=1 + seed % 3):
                assert_same_steps(subject_of(case, "host"), plain, f"order {seed}")


# ---- Long runs ----


@pytest.mark.parametrize("ring_len", [1, 4, 7])
@pytest.mark.parametrize("state_dtype", POOLS)
def test_a_walk_of_200_steps(backend: str, state_dtype: str, ring_len: int) -> None:
    """Plain, separate, fused and lazy steps, acceptances from none to all: the pool of the accepted tokens alone."""
    if backend == "host" and (ring_len != 4 or state_dtype == "float16"):
        pytest.skip("one ring length and two pools are compiled for the CPU; numpy and cuda run them all")
    case = RingCase("walk", SMALL, ring_len, (), (), state_dtype=state_dtype, walk_steps=200, seed=ring_len)
    comparisons = list(walk_with_pending(case, backend))
    assert len(comparisons) > 120
    assert_passed(*comparisons)


class Stream:
    """One sequence in slot 0 on a backend, whose tokens are run in pieces; ring rows 0 and 1."""

    def __init__(self, backend: str, total: int, state_dtype: str = "float32", ring_len: int = 4) -> None:
        case = RecurrenceCase("stream", SMALL, (total,), state_dtype=state_dtype, spare_slots=0)
        self.device = Device(backend)
        self.arrays = build_arrays(case)
        ring_shape = (2, SMALL.num_key_heads, ring_len, SMALL.record_elements + 2)
        self.ring = self.device.put(np.full(ring_shape, np.nan, np.float32))
        self.pool = self.new_pool()

    def new_pool(self) -> Any:
        """A pool at the start of the sequence."""
        return self.device.put(self.arrays.recurrent_state)

    def state(self) -> Array:
        """A copy of the pool."""
        return self.device.get(self.pool)

    def tokens(self, first: int, length: int) -> RecurrenceArrays:
        """The call on some tokens."""
        rows = slice(first, first + length)
        names = ("qkv_conv_output", "decay_per_token", "beta_per_token")
        pieces = {name: getattr(self.arrays, name)[rows] for name in names}
        return replace(self.arrays, **pieces, input_row_offsets=np.array([0, length], np.uint32))

    def forward(self, first: int, length: int, pool: Any = None, pending: tuple[int, int] | None = None) -> Array:
        """A plain call, after the records (ring row, count)."""
        tables = None if pending is None else self.tables(*pending)
        return self.device.forward(
            self.tokens(first, length), self.pool if pool is None else pool, self.ring if pending else None, tables
        )

    def verify(self, first: int, length: int, row: int, pending: tuple[int, int] | None = None) -> Array:
        """A window recorded in a ring row, after the records (ring row, count)."""
        tables = None if pending is None else self.tables(*pending)
        return self.device.verify(self.tokens(first, length), np.array([row], np.uint32), self.pool, self.ring, tables)

    def fold(self, row: int, count: int) -> None:
        """A fold of the first records of a ring row."""
        tables = self.tables(row, count)
        self.device.fold(self.pool, np.array([[0]], np.uint32), self.ring, tables.ring_rows[None], tables.counts)

    def records(self) -> Array:
        """A copy of the ring."""
        return self.device.get(self.ring)

    @staticmethod
    def tables(row: int, count: int) -> PendingTables:
        """A ring row and a count as tables."""
        return PendingTables(np.array([row], np.uint32), np.array([count], np.uint32))


@pytest.mark.parametrize("ring_len", [1, 4, 16])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_lazy_plain_decoding(backend: str, state_dtype: str, ring_len: int) -> None:
    """Windows of one token, each accepted: the pool is written each ring_len + 1 tokens, and readouts are exact."""
    if backend == "host" and ring_len != 4:
        pytest.skip("one ring length is compiled for the CPU; numpy and cuda run them all")
    total = 5 * (ring_len + 1) + 1
    stream, plain = (Stream(backend, total, state_dtype, ring_len) for _ in range(2))
    pending, writes = 0, []
    for token in range(total):
        before = stream.state()
        readout = stream.verify(token, 1, 0, (0, pending))
        if (stream.state() != before).any():
            writes.append(token)
        group = token - pending
        expected = plain.forward(group, pending + 1, plain.device.put(plain.state()))[-1:]
        assert_passed(bitwise(readout, expected, f"readout of token {token}"))
        pending += 1
        if pending > ring_len:
            plain.forward(group, pending)
            pending = 0
    assert writes == list(range(ring_len, total, ring_len + 1))
    stream.fold(0, pending)
    plain.forward(total - pending, pending)
    assert_passed(bitwise(stream.state(), plain.state(), "pool"))
    if state_dtype == "float32":
        at_once = Stream(backend, total)
        at_once.forward(0, total)
        assert_passed(bitwise(stream.state(), at_once.state(), "pool of one call"))


def test_one_bit_pattern_in_many_runs(backend: str) -> None:
    """Beside field cases 68, 72: steps behind pending records again and again, of a whole batch on a GPU."""
    heads, batch_size, runs = SMALL, 3, 20
    if backend == "cuda":
        heads, batch_size, runs = HeadGeometry(16, 48, 128, 128), 8, 20
    lengths = (4, 1, 3) if backend != "cuda" else tuple(np.resize([4, 1, 3, 0, 2], batch_size).tolist())
    pending = tuple(np.resize([2, 4, 0, 3], batch_size).tolist())
    changes = {"state_dtype": "bfloat16", "record_padding": 2, "num_pending": pending, "pending_on_host": True}
    case = RingCase("again", heads, 4, lengths, lengths, **changes)
    arrays = build_pending_arrays(case)
    first = pending_subject(case, backend, arrays)
    for run in range(1, runs):
        assert_same_steps(pending_subject(case, backend, arrays), first, f"run {run}")


# ---- One step, in calls that a reader can follow ----


@pytest.mark.parametrize("state_dtype", POOLS)
def test_another_ring_row_is_a_fold(backend: str, state_dtype: str) -> None:
    """Three of four records: the slot is rounded and written, the window goes on from it, into its own ring row."""
    fused, apart = (Stream(backend, 7, state_dtype) for _ in range(2))
    for stream in (fused, apart):
        stream.verify(0, 4, 0)
    readout = fused.verify(3, 4, 1, (0, 3))
    apart.fold(0, 3)
    expected = apart.verify(3, 4, 1)
    assert_passed(
        bitwise(readout, expected, "readout"),
        same_bytes(fused.state(), apart.state(), "pool"),
        same_bytes(fused.records(), apart.records(), "ring"),
    )
    assert (fused.state() != fused.device.get(fused.new_pool())).any()


@pytest.mark.parametrize("state_dtype", POOLS)
def test_the_same_ring_row_keeps_its_records(backend: str, state_dtype: str) -> None:
    """Two of three records stay, the window follows them, the pool rests; all four together make one window."""
    lazy, at_once = (Stream(backend, 5, state_dtype) for _ in range(2))
    lazy.verify(0, 3, 0)
    start = lazy.state()
    readout = lazy.verify(2, 2, 0, (0, 2))
    expected = at_once.verify(0, 4, 0)
    assert_passed(
        bitwise(readout, expected[2:], "readout"),
        same_bytes(lazy.state(), start, "pool"),
        same_bytes(lazy.records(), at_once.records(), "ring"),
    )
    lazy.fold(0, 3)
    at_once.forward(0, 3)
    assert_passed(same_bytes(lazy.state(), at_once.state(), "pool after a fold of three"))


@pytest.mark.parametrize("state_dtype", POOLS)
@pytest.mark.parametrize("length", [2, 4, 5, 9])
def test_a_window_that_does_not_fit_commits_itself(backend: str, state_dtype: str, length: int) -> None:
    lazy, plain = (Stream(backend, 12, state_dtype) for _ in range(2))
    lazy.verify(0, 4, 0)
    ring = lazy.records()
    readout = lazy.verify(3, length, 0, (0, 3))
    expected = plain.forward(0, 3 + length)
    assert_passed(
        bitwise(readout, expected[3:], "readout"),
        same_bytes(lazy.state(), plain.state(), "pool"),
        same_bytes(lazy.records(), ring, "ring"),
    )


@pytest.mark.parametrize("state_dtype", POOLS)
@pytest.mark.parametrize("row", [0, 1])
def test_a_forward_folds_whatever_ring_row(backend: str, state_dtype: str, row: int) -> None:
    fused, apart = (Stream(backend, 8, state_dtype) for _ in range(2))
    for stream in (fused, apart):
        stream.verify(0, 4, row)
    readout = fused.forward(3, 5, pending=(row, 3))
    apart.fold(row, 3)
    expected = apart.forward(3, 5)
    assert_passed(
        bitwise(readout, expected, "readout"),
        same_bytes(fused.state(), apart.state(), "pool"),
        same_bytes(fused.records(), apart.records(), "ring"),
    )


@pytest.mark.parametrize("state_dtype", POOLS)
@pytest.mark.parametrize("op", ["verify in another row", "verify in the same row", "forward"])
def test_an_empty_window(backend: str, state_dtype: str, op: str) -> None:
    """It folds what lies in another ring row, and does nothing where the records would stay; no token is needed."""
    stream, apart = (Stream(backend, 4, state_dtype) for _ in range(2))
    for each in (stream, apart):
        each.verify(0, 4, 0)
    ring = stream.records()
    if op == "forward":
        readout = stream.forward(0, 0, pending=(0, 2))
    else:
        readout = stream.verify(0, 0, int(op == "verify in another row"), (0, 2))
    if op != "verify in the same row":
        apart.fold(0, 2)
        assert (stream.state() != stream.device.get(stream.new_pool())).any()
    assert readout.shape == (0, SMALL.value_dim)
    assert_passed(
        same_bytes(stream.state(), apart.state(), "pool"),
        same_bytes(stream.records(), ring, "ring"),
    )


@pytest.mark.parametrize("pending", [(0, 0), (1, 0), (0, 5), (1, 5), (1, 2**32 - 1), (0, 2**31), (PAD, 3)])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_nothing_is_pending(backend: str, state_dtype: str, pending: tuple[int, int]) -> None:
    """A count of 0 or above RING_LEN, or no ring row: the plain calls; no slot makes a round trip, NaN and -0 live."""
    stream, plain = (Stream(backend, 3, state_dtype) for _ in range(2))
    for each in (stream, plain):
        each.pool[0, 0, 0, :3] = each.device.put(
            np.array([np.nan, -0.0, 1e-30]).astype(each.arrays.recurrent_state.dtype)
        )
    before = stream.state()
    assert_passed(
        bitwise(stream.verify(0, 3, 0, pending), plain.verify(0, 3, 0), "readout"),
        same_bytes(stream.state(), before, "pool"),
        same_bytes(stream.records(), plain.records(), "ring"),
    )
    stream.forward(0, 0, pending=pending)
    assert_passed(same_bytes(stream.state(), before, "pool after an empty forward"))
    assert_passed(bitwise(stream.forward(0, 3, pending=pending), plain.forward(0, 3), "readout of a forward"))
    assert_passed(bitwise(stream.state(), plain.state(), "pool after a forward"))


@pytest.mark.parametrize("table", ["slot_idx", "ring_slot_idx"])
def test_padding_folds_nothing(backend: str, table: str) -> None:
    """A row that is padding in either table touches nothing, whatever is pending."""
    stream = Stream(backend, 4)
    stream.verify(0, 4, 0)
    before, ring = stream.state(), stream.records()
    window = stream.tokens(3, 1)
    row = np.array([PAD if table == "ring_slot_idx" else 1], np.uint32)
    if table == "slot_idx":
        window = replace(window, slot_idx=np.array([PAD], np.uint32))
    readout = stream.device.verify(window, row, stream.pool, stream.ring, stream.tables(0, 3))
    assert_passed(
        bitwise(readout, np.zeros_like(readout), "readout"),
        same_bytes(stream.state(), before, "pool"),
        same_bytes(stream.records(), ring, "ring"),
    )
    if table == "slot_idx":
        readout = stream.device.forward(window, stream.pool, stream.ring, stream.tables(0, 3))
        assert_passed(bitwise(readout, np.zeros_like(readout), "readout"), same_bytes(stream.state(), before, "pool"))


def test_records_stay_pending_over_many_windows(backend: str) -> None:
    """Two accepted of three, again and again, until the ring is full: then a fold on the way, and on from there."""
    stream, plain = (Stream(backend, 60, ring_len=8) for _ in range(2))
    position, pending, row, folds = 0, 0, 0, 0
    for _ in range(20):
        target = row if pending + 3 <= 8 else 1 - row
        readout = stream.verify(position, 3, target, (row, pending))
        assert_passed(bitwise(readout[:2], plain.forward(position, 2), f"readout at {position}"))
        folds += target != row
        pending = 2 + (pending if target == row else 0)
        position, row = position + 2, target
    assert folds == 6
    stream.fold(row, pending)
    assert_passed(bitwise(stream.state(), plain.state(), "pool"))


@pytest.mark.parametrize("form", ["fold", "fused", "lazy"])
def test_a_record_whose_decay_is_zero_erases_a_state_however_large(backend: str, form: str) -> None:
    """Beside field cases 39, 40, 42: the zero is a record's, and the state that it meets overflows every sum."""
    stream, erased = (Stream(backend, 4) for _ in range(2))
    for each in (stream, erased):
        each.arrays.decay_per_token[0] = 0
        each.pool[...] = 3e38 if each is stream else 0
    expected = erased.forward(0, 4)[3:]
    stream.verify(0, 4, 0)
    if form == "fold":
        stream.fold(0, 3)
        readout = stream.forward(3, 1)
    else:
        row = int(form == "fused")
        readout = stream.verify(3, 1, row, (0, 3))
        stream.fold(row, 1 if form == "fused" else 4)
    assert_passed(
        bitwise(readout, expected, "readout", ignore_zero_sign=True),
        bitwise(stream.state(), erased.state(), "pool", ignore_zero_sign=True),
    )
    assert np.isfinite(readout).all()


def test_repeated_folds_of_a_16_bit_pool_are_not_one(backend: str) -> None:
    """Beside field cases 48, 49, 52: pending records on a 16-bit pool are no stores of it.

    The lazy form rounds once where the fused form rounds each time: equality is with the same grouping of tokens.
    """
    pools = []
    for is_lazy in (True, False):
        stream = Stream(backend, 4, "bfloat16")
        for token in range(4):
            rows = (0, 0) if is_lazy else (token % 2, (token + 1) % 2)
            stream.verify(token, 1, rows[0], (rows[1], min(token, 1) if not is_lazy else token))
        stream.fold(0 if is_lazy else 1, 4 if is_lazy else 1)
        pools.append(stream.state())
    grouped = Stream(backend, 4, "bfloat16")
    grouped.forward(0, 4)
    single = Stream(backend, 4, "bfloat16")
    for token in range(4):
        single.forward(token, 1)
    assert_passed(
        bitwise(pools[0], grouped.state(), "lazy: one group"), bitwise(pools[1], single.state(), "fused: four groups")
    )
    assert all(not bitwise(*pair) for pair in pairwise(pools))


def test_bound_calls(backend: str) -> None:
    """A bound verify follows the tables that it was bound to, as the loop advances them."""
    stream, plain = (Stream(backend, 12) for _ in range(2))
    device = stream.device
    rows, pending_rows, counts = (device.put(np.array([value], np.uint32)) for value in (0, 1, 0))
    qkv, decay, beta = (
        device.put(getattr(stream.arrays, name)[:2])
        for name in ("qkv_conv_output", "decay_per_token", "beta_per_token")
    )
    out = device.put(np.zeros((2, SMALL.value_dim), np.float32))
    with on_backend(backend):
        run = ops.bind(
            ops.gated_delta_recurrence_verify_ring,
            *(
                qkv,
                decay,
                beta,
                stream.pool,
                device.put(np.zeros(1, np.uint32)),
                device.put(np.array([0, 2], np.uint32)),
            ),
            *(stream.ring, rows),
            pending_ring_slot_idx=pending_rows,
            num_pending=counts,
            out=out,
        )
    for step in range(6):
        window = plain.tokens(2 * step, 2)
        for array, values in (
            (qkv, window.qkv_conv_output),
            (decay, window.decay_per_token),
            (beta, window.beta_per_token),
        ):
            array[...] = device.put(values)
        run()
        assert_passed(bitwise(device.get(out), plain.forward(2 * step, 2), f"readout of step {step}"))
        rows[...], pending_rows[...] = pending_rows[0], rows[0].copy()
        counts[...] = 2
    stream.fold(int(device.get(pending_rows)[0]), 2)
    assert_passed(bitwise(stream.state(), plain.state(), "pool"))
