"""Verify and fold on every backend: promises E1 and E2 over all sizes, and faults from the field."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.arrays import DTYPES
from gdn.backends import host
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.execute import on_backend
from gdn.testing.ring_cases import RING_CASES, RingArrays, RingCase, build_ring_arrays, random_ring_case
from gdn.testing.ring_checks import RING_CHECKS, RingSubject, ring_subject
from gdn.testing.ring_device import Device
from gdn.testing.ring_walk import walk
from gdn.testing.sweep import run_sweep

SIZES = ((32, 32), (64, 64), (128, 128), (96, 192), (256, 256), (128, 64))
GROUPS = (1, 2, 3, 4, 8)
RING_LENS = (1, 2, 4, 5, 8, 16, 64)
POOLS = ("float32", "bfloat16", "float16")
SMALL = HeadGeometry(2, 4, 8, 8)
PAD = gdn.PAD_SLOT


def assert_sweep_passes(case: RingCase, backend: str) -> None:
    """Every check of one case."""
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    failures = [f"{case.name}, {check.check}: {failure}" for check in result.checks for failure in check.failures]
    assert failures == []
    assert result.passed


def failures_of(case: RingCase, backend: str, checks: tuple[str, ...]) -> Iterator[str]:
    """What these checks find; each must have something to compare."""
    subject = ring_subject(case, backend, build_ring_arrays(case))
    for check in checks:
        comparisons = list(RING_CHECKS[check](subject))
        assert comparisons != []
        yield from (f"{case.name}, {check}: {found.message}" for found in comparisons if not found.passed)


def fold(backend: str, pool: Array, row_ids: Array, ring: Array, ring_row_ids: Array, counts: Array) -> Array:
    """The pool after a fold."""
    device = Device(backend)
    result = device.put(pool)
    device.fold(result, row_ids, device.put(ring), ring_row_ids, counts)
    return device.get(result)


def fold_of(subject: RingSubject, **changes: Array) -> Array:
    """The pool after the verifies of a subject and one fold, its arguments changed by name."""
    arrays = subject.arrays
    arguments: dict[str, Array] = {
        "pool": subject.verified_pool,
        "row_ids": arrays.row_ids,
        "ring": subject.ring,
        "ring_row_ids": arrays.ring_row_ids,
        "counts": arrays.num_accepted,
    }
    return fold(subject.backend, **{**arguments, **changes})


def forward(backend: str, window: RecurrenceArrays, pool: Array) -> tuple[Array, Array]:
    """Readout and pool of the plain op."""
    device = Device(backend)
    result = device.put(pool)
    return device.forward(window, result), device.get(result)


# ---- E1 and E2 over sizes, groups, lengths and types ----


def case_of(sizes: tuple[int, int], group_size: int, ring_len: int, pool: str, **changes: Any) -> RingCase:
    """A window that fills the ring, half of it accepted, a single accepted token, a row that commits itself."""
    rows = [(ring_len, ring_len // 2 + 1), (1, 1), (ring_len + 1, ring_len + 1)]
    if ring_len == max(RING_LENS):
        del rows[2]  # as many tokens again, for what the other lengths show
    lengths, counts = zip(*rows, strict=True)
    name = f"{sizes[0]} x {sizes[1]}, group of {group_size}, ring of {ring_len}, {pool} pool"
    heads = HeadGeometry(1, group_size, *sizes)
    return RingCase(
        name, heads, ring_len, lengths, counts, **{"num_layers": 1, "state_dtype": pool, "seed": ring_len, **changes}
    )


def covering_cases() -> list[RingCase]:
    """Seven of the product's 630, which with the named cases below bring every value together with several others."""
    return [
        case_of(SIZES[k % 6], GROUPS[k % 5], RING_LENS[k % 7], POOLS[(k + k // 3) % 3], num_layers=1 + k % 2)
        for k in range(7)
    ]


@pytest.mark.parametrize("case", covering_cases(), ids=lambda case: case.name)
def test_covering_case_on_host(case: RingCase) -> None:
    """E1 and E2 by equality, and every other check, in the kernels' own code."""
    if host.unavailable_reason() is not None:
        pytest.skip(f"host backend: {host.unavailable_reason()}")
    assert_sweep_passes(case, "host")


def test_the_covering_cases_cover() -> None:
    cases = covering_cases()
    assert {(case.heads.key_head_dim, case.heads.value_head_dim) for case in cases} == set(SIZES)
    assert {case.heads.group_size for case in cases} == set(GROUPS)
    assert {case.ring_len for case in cases} == set(RING_LENS)
    assert {case.state_dtype for case in cases} == set(POOLS)
    assert len({(case.heads, case.ring_len, case.state_dtype) for case in cases}) == len(cases)


@pytest.mark.parametrize("ring_len", RING_LENS)
@pytest.mark.parametrize("sizes", SIZES, ids=lambda sizes: "{}x{}".format(*sizes))
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_verify_then_fold_equals_forward(backend: str, sizes: tuple[int, int], ring_len: int) -> None:
    """E1 and E2 by equality, over the whole product of sizes, groups, ring lengths and pool types."""
    failures = [
        failure
        for group_size, pool in product(GROUPS, POOLS)
        for failure in failures_of(case_of(sizes, group_size, ring_len, pool), backend, ("E1", "E2"))
    ]
    assert failures == []


@pytest.mark.parametrize("name", RING_CASES)
def test_named_case(name: str, backend: str) -> None:
    case = RING_CASES[name]
    sizes = case.heads.key_head_dim, case.heads.value_head_dim
    if backend == "host" and (sizes != (32, 32) or case.ring_len not in (4, 16) or case.walk_steps):
        pytest.skip("compiled for the CPU by the covering cases and the walks; numpy and cuda run it")
    assert_sweep_passes(case, backend)


@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("backend", ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_case(number: int, backend: str) -> None:
    assert_sweep_passes(random_ring_case(2, number), backend)


@pytest.mark.parametrize("num_key_heads", [1, 3])
@pytest.mark.parametrize("group_size", [1, 3])
def test_the_order_of_threads_does_not_matter(num_key_heads: int, group_size: int) -> None:
    """Threads of a block in seeded random orders: a barrier that is missing shows as other bits."""
    if host.unavailable_reason() is not None:
        pytest.skip(f"host backend: {host.unavailable_reason()}")
    case = replace(RING_CASES["ring_of_16"], heads=HeadGeometry(num_key_heads, num_key_heads * group_size, 32, 32))
    plain = ring_subject(case, "host", build_ring_arrays(case))
    expected = fold_of(plain)
    for seed in range(1, 4):
        with host.options(order_seed=seed, max_os_threads=1 + seed % 3):
            again = ring_subject(case, "host", build_ring_arrays(case))
            folded = fold_of(again)
        assert_passed(
            *(bitwise(*pair, "readout") for pair in zip(again.readouts, plain.readouts, strict=True)),
            same_bytes(again.ring, plain.ring, f"ring in order {seed}"),
            bitwise(folded, expected, f"pool in order {seed}"),
        )


# ---- Long runs ----


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_walk_of_200_steps(backend: str, state_dtype: str) -> None:
    """Field case 24: fwd(1), verify+fold(0..n) and abandoned verifies, bit-equal to fwd over the accepted tokens."""
    case = RingCase("walk", SMALL, 4, (), (), state_dtype=state_dtype, walk_steps=200)
    comparisons = list(walk(case, backend))
    assert len(comparisons) > 150
    assert_passed(*comparisons)


class Stream:
    """One sequence in slot 0 that a backend runs in pieces: its tokens, and calls on some of them."""

    def __init__(self, backend: str, heads: HeadGeometry, total: int, state_dtype: str) -> None:
        case = RecurrenceCase("stream", heads, (total,), state_dtype=state_dtype, spare_slots=0)
        self.device = Device(backend)
        *tokens, self.start, _, _ = build_arrays(case).as_tuple()
        self.tokens = [self.device.put(array) for array in tokens]
        self.zero = self.device.put(np.zeros((1, 1), np.uint32))

    def pool(self) -> Any:
        """A pool at the start of the sequence."""
        return self.device.put(self.start)

    def window(self, first: int, length: int, pool: Any) -> tuple[Any, ...]:
        """The six arguments of the call on tokens [first, first + length)."""
        tokens = (array[first : first + length] for array in self.tokens)
        return *tokens, pool, self.zero[0], self.device.put(np.array([0, length], np.uint32))

    def forward(self, first: int, length: int, pool: Any) -> Any:
        with on_backend(self.device.backend):
            return ops.gated_delta_recurrence_fwd(*self.window(first, length, pool))

    def verify_and_fold(self, first: int, length: int, accepted: int, pool: Any, ring: Any) -> Any:
        """Returns the readout of the whole window."""
        with on_backend(self.device.backend):
            out = ops.gated_delta_recurrence_verify_ring(*self.window(first, length, pool), ring, self.zero[0])
            count = self.device.put(np.array([accepted], np.uint32))
            ops.gated_delta_state_fold(pool, self.zero, ring, self.zero, count)
        return out


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_2000_rounds_of_verify_4_and_fold_3(backend: str, state_dtype: str) -> None:
    """Field case 25: bit-equal to fwd over the 6,000 tokens; a 16-bit pool (500 rounds) to fwd in pieces of 3."""
    rounds, drafted, accepted = 2000 if state_dtype == "float32" else 500, 4, 3
    stream = Stream(backend, HeadGeometry(1, 2, 8, 8), rounds * accepted + 1, state_dtype)
    pool, plain = stream.pool(), stream.pool()
    ring = stream.device.put(np.full((1, 1, drafted, 26), np.nan, np.float32))
    readouts, plain_readouts = [], []
    for first in range(0, rounds * accepted, accepted):
        readouts.append(stream.verify_and_fold(first, drafted, accepted, pool, ring)[:accepted])
        if state_dtype != "float32":
            plain_readouts.append(stream.forward(first, accepted, plain))
    if state_dtype == "float32":
        plain_readouts = [stream.forward(0, rounds * accepted, plain)]
    got, expected = (
        np.concatenate([stream.device.get(part) for part in parts]) for parts in (readouts, plain_readouts)
    )
    assert_passed(
        bitwise(got, expected, "readout"),
        bitwise(stream.device.get(pool), stream.device.get(plain), "pool"),
    )


@pytest.mark.parametrize("piece", [1, 4, 64])
@pytest.mark.parametrize("state_dtype", POOLS)
def test_a_pool_is_rounded_once_a_fold(backend: str, state_dtype: str, piece: int) -> None:
    """Field cases 26, 36: pieces of 1, 4 and 64 tokens: a float32 pool is equal, a 16-bit one within a bound.

    64 tokens are more than the ring holds, so that call commits itself.

    With beta at most 1 a token never lengthens an error in the state, it shrinks it by the decay. A rounding adds at
    most 2^-p of the state, p being the significant bits. So per head, with S after each piece and its error e:
    |e'| <= decay of the piece * |e| + 2^-p * (|S'| + |e|).
    """
    total, heads = 64, HeadGeometry(1, 2, 8, 8)
    stream = Stream(backend, heads, total, state_dtype)
    exact = Stream(backend, heads, total, "float32")
    pool, reference = stream.pool(), exact.device.put(stream.start.astype(np.float32))
    ring = stream.device.put(np.full((1, 1, 4, 26), np.nan, np.float32))
    decay = stream.device.get(stream.tokens[1]).astype(np.float64)
    rounding = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}[state_dtype]
    bound = np.zeros(heads.num_value_heads)
    for first in range(0, total, piece):
        stream.verify_and_fold(first, piece, piece, pool, ring)
        exact.forward(first, piece, reference)
        state = stream.device.get(reference)[0].astype(np.float64)
        shrunk = decay[first : first + piece].prod(axis=0) * bound
        bound = shrunk + rounding * (np.linalg.norm(state, axis=(1, 2)) + shrunk)
    error = np.linalg.norm(stream.device.get(pool)[0].astype(np.float64) - state, axis=(1, 2))
    if state_dtype == "float32":
        assert (error == 0).all()
    else:
        assert (error > 0).all()
        # Float32 arithmetic on states that differ has its own roundings, 2^-24 each, far below those of the pool.
        assert (error <= 1.001 * bound).all()


def test_windows_of_1_to_8_tokens(backend: str) -> None:
    """Field case 37: the readout of verify(n) is that of fwd at every position, for n of 1 to 8."""
    stream = Stream(backend, SMALL, 8, "float32")
    expected = stream.device.get(stream.forward(0, 8, stream.pool()))
    ring = stream.device.put(np.full((1, 2, 8, 26), np.nan, np.float32))
    for length in range(1, 9):
        out = stream.device.get(stream.verify_and_fold(0, length, 0, stream.pool(), ring))
        assert_passed(bitwise(out, expected[:length], f"readout of {length} tokens"))


# ---- What verify writes ----


def test_verify_leaves_the_pool_that_forward_writes(backend: str) -> None:
    """Field case 20: RING_LEN 4, fwd and verify both with length 4: fwd writes the pool, verify does not."""
    case = RingCase("both", SMALL, 4, (4,), (4,), num_layers=1, state_dtype="bfloat16")
    subject = ring_subject(case, backend, build_ring_arrays(case))
    (window,), start = subject.arrays.layers, subject.arrays.recurrent_state
    readout, written = forward(backend, window, start)
    slot = window.slot_idx[0]
    assert_passed(
        same_bytes(subject.verified_pool, start, "pool after verify"),
        bitwise(subject.readouts[0], readout, "readout"),
    )
    assert (written[slot] != start[slot]).any()


def test_slots_and_ring_rows_are_two_tables(backend: str) -> None:
    """Field case 15: ring_rows=2, max_slots=64, slots [60, 61], ring rows [1, 0]."""
    case = RecurrenceCase("tables", SMALL, (3, 2), spare_slots=62)
    arrays = build_arrays(case)
    pool = np.full((64, 4, 8, 8), np.nan, np.float32)
    pool[[60, 61]] = arrays.recurrent_state[arrays.slot_idx]
    slots, ring_rows = np.array([60, 61], np.uint32), np.array([1, 0], np.uint32)
    window = replace(arrays, recurrent_state=pool, slot_idx=slots)
    device = Device(backend)
    on_device, ring = device.put(pool), device.put(np.full((2, 2, 4, 26), np.nan, np.float32))
    readout = device.verify(window, ring_rows, on_device, ring)
    assert_passed(same_bytes(device.get(on_device), pool, "pool after verify"))
    written = np.isfinite(device.get(ring)).all(axis=(1, 3))
    np.testing.assert_array_equal(written, [[True, True, False, False], [True, True, True, False]])
    device.fold(on_device, slots[None], ring, ring_rows[None], np.array([3, 2], np.uint32))
    expected_readout, expected = forward(backend, window, pool)
    assert_passed(
        bitwise(readout, expected_readout, "readout"), same_bytes(device.get(on_device), expected, "pool after fold")
    )


def test_rows_longer_than_the_ring_commit_themselves(backend: str) -> None:
    """Field case 32: RING_LEN 4, lengths [4, 5, 1, 9]: long rows write the pool, fold skips them, no record strays."""
    case = RingCase("long rows", SMALL, 4, (4, 5, 1, 9), (4, 5, 1, 9), num_layers=1)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    (window,), start = subject.arrays.layers, subject.arrays.recurrent_state
    readout, expected = forward(backend, window, start)
    slots, rows = subject.arrays.row_ids[0], subject.arrays.ring_row_ids[0]
    committed = start.copy()
    committed[slots[[1, 3]]] = expected[slots[[1, 3]]]
    recorded = np.zeros(subject.ring.shape, bool)
    recorded[rows[0], :, :4, : SMALL.record_elements] = True
    recorded[rows[2], :, :1, : SMALL.record_elements] = True
    assert_passed(
        bitwise(subject.readouts[0], readout, "readout"),
        same_bytes(subject.verified_pool, committed, "pool after verify"),
        bitwise(np.isfinite(subject.ring), recorded, "where the ring was written"),
        same_bytes(fold_of(subject), expected, "pool after fold"),
    )


def test_poisoned_memory(backend: str) -> None:
    """Field cases 21, 22: lengths [1, 0, 63, 13], NaN in every other slot and in the ring: first call = tenth."""
    case = RingCase("poison", SMALL, 17, (1, 0, 63, 13), (1, 0, 63, 9), num_layers=1)
    assert_sweep_passes(case, backend)
    results = []
    for _ in range(10):
        subject = ring_subject(case, backend, build_ring_arrays(case))
        results.append((subject.readouts[0], subject.ring, fold_of(subject)))
    for result in results:
        for name, got, first in zip(("readout", "ring", "pool"), result, results[0], strict=True):
            assert_passed(same_bytes(got, first, name))
    used, pool = subject.arrays.row_ids[0], results[0][2]
    assert np.isfinite(pool[used]).all()
    assert np.isnan(np.delete(pool, used, axis=0)).all()


def test_windows_in_one_call_and_one_by_one(backend: str) -> None:
    """Beside field cases 70, 71: verify and fold of windows of 1, 4, 0, 9 and 3 tokens, together and each by itself."""
    case = RingCase("ragged", SMALL, 4, (1, 4, 0, 9, 3), (1, 2, 0, 5, 3), num_layers=1)
    arrays = build_ring_arrays(case)
    (together,) = arrays.layers
    device = Device(backend)
    pools, rings = ([device.put(array) for _ in range(2)] for array in (arrays.recurrent_state, arrays.ring))
    readout = device.verify(together, arrays.ring_row_ids[0], pools[0], rings[0])
    device.fold(pools[0], arrays.row_ids, rings[0], arrays.ring_row_ids, arrays.num_accepted)
    for sequence, length in enumerate(case.lengths):
        begin, one = int(together.input_row_offsets[sequence]), np.s_[sequence : sequence + 1]
        rows = slice(begin, begin + length)
        alone = replace(
            together,
            **{
                name: getattr(together, name)[rows] for name in ("qkv_conv_output", "decay_per_token", "beta_per_token")
            },
            slot_idx=together.slot_idx[one],
            input_row_offsets=np.array([0, length], np.uint32),
        )
        ring_row = arrays.ring_row_ids[:, one]
        its_readout = device.verify(alone, ring_row[0], pools[1], rings[1])
        assert its_readout.tobytes() == readout[rows].tobytes(), length
        device.fold(pools[1], arrays.row_ids[:, one], rings[1], ring_row, arrays.num_accepted[one])
    for name, (got, expected) in {"pool": pools[::-1], "ring": rings[::-1]}.items():
        assert_passed(same_bytes(device.get(got), device.get(expected), name))


def test_a_random_order_of_unlike_rings(backend: str) -> None:
    """Beside field cases 64, 65: ring lengths, strides, types and groups in turn, each step as if first."""
    cases = [
        RingCase("plain", SMALL, 4, (4, 2), (3, 2), num_layers=1),
        RingCase("wide records", SMALL, 4, (4, 2), (3, 2), num_layers=1, record_padding=6),
        RingCase("many rows", SMALL, 4, (4, 2), (3, 2), num_layers=3),
        RingCase("groups of 3", HeadGeometry(2, 6, 8, 8), 4, (4, 2), (3, 2), num_layers=1),
        RingCase("longer ring", SMALL, 17, (9, 17), (9, 8), num_layers=1),
        RingCase("bfloat16 pool", SMALL, 4, (4, 2), (3, 2), num_layers=1, state_dtype="bfloat16"),
        RingCase(
            "bfloat16 both", SMALL, 4, (4, 2), (3, 2), num_layers=1, state_dtype="bfloat16", ring_dtype="bfloat16"
        ),
    ]

    def step(case: RingCase) -> tuple[Array, ...]:
        subject = ring_subject(case, backend, build_ring_arrays(case))
        return (*subject.readouts, subject.ring, fold_of(subject))

    first = [step(case) for case in cases]
    for place in np.random.default_rng(0).integers(0, len(cases), 40):
        for got, expected in zip(step(cases[place]), first[place], strict=True):
            assert_passed(same_bytes(got, expected, cases[place].name))


# ---- What fold writes ----


@pytest.mark.parametrize("skipped", [0, 5, -1])
@pytest.mark.parametrize("state_dtype", POOLS)
def test_a_skipped_row_keeps_its_bytes(backend: str, state_dtype: str, skipped: int) -> None:
    """Field case 28: fold [0, 4, 2, 0] over 3 layers: rows with 0 are byte-identical in every layer, NaN and -0 too.

    So are rows whose count is above RING_LEN, or negative: no state makes a round trip through float32.
    """
    case = RingCase("counts", SMALL, 4, (4,) * 4, (0, 4, 2, 0), num_layers=3, state_dtype=state_dtype)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    pool = subject.verified_pool.copy()
    idle, busy = subject.arrays.row_ids[:, [0, 3]].ravel(), subject.arrays.row_ids[:, [1, 2]].ravel()
    integers = pool.view(np.dtype(f"u{pool.itemsize}"))
    odd_bits = np.random.default_rng(0).integers(0, 2 ** (8 * pool.itemsize), (len(idle), 4, 8, 8))
    integers[idle] = odd_bits.astype(integers.dtype)
    folded = fold_of(subject, pool=pool, counts=np.array([skipped, 4, 2, skipped], np.int32))
    assert_passed(same_bytes(np.delete(folded, busy, axis=0), np.delete(pool, busy, axis=0), "skipped rows"))
    assert (folded[busy] != pool[busy]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("count", [-1, -4, -(2**31)])
def test_negative_counts_skip_the_row(backend: str, count: int) -> None:
    case = RingCase("negative", SMALL, 4, (4, 4), (4, 4), num_layers=1, index_dtype="int32")
    subject = ring_subject(case, backend, build_ring_arrays(case))
    folded = fold_of(subject, counts=np.array([count, 4], np.int32))
    skipped, busy = subject.arrays.row_ids[0]
    assert_passed(same_bytes(np.delete(folded, busy, 0), np.delete(subject.verified_pool, busy, 0), "other slots"))
    assert_passed(bitwise(folded[busy], fold_of(subject)[busy], "the row beside it"))
    assert np.isfinite(folded[skipped]).all()


@pytest.mark.parametrize("ring_len", [15, 16, 17])
def test_both_sides_of_every_threshold(backend: str, ring_len: int) -> None:
    """Field case 33: windows and counts around the 8 records and 2 or 8 tokens that a block stages at once."""
    if backend == "host" and ring_len != 17:
        pytest.skip("one ring length is compiled for the CPU; numpy and cuda run them all")
    lengths, counts = [], []
    for length in (1, 2, 3, 7, 8, 9, ring_len - 1, ring_len, ring_len + 1, ring_len + 2):
        for count in (0, 1, length - 1, length) if length <= ring_len else (0, ring_len + 1, length):
            lengths.append(length)
            counts.append(count if length <= ring_len or count == 0 else max(count, ring_len + 1))
    case = RingCase("edges", SMALL, ring_len, tuple(lengths), tuple(counts), num_layers=1)
    assert list(failures_of(case, backend, ("E1", "hands off", "E2", "unread"))) == []


def rounded_after_each(key: Array, delta: Array, rest: Array) -> Array:
    """key * delta + rest in float32, as NumPy computes it."""
    return key * delta + rest


def fused(key: Array, delta: Array, rest: Array) -> Array:
    """fma(key, delta, rest): float32, rounded once.

    The product is exact in float64. The sum is rounded to odd there (where it is not exact and its last bit is 0, the
    neighbour towards what was lost ends in 1), and rounding that to float32 is rounding the exact sum.
    """
    product, addend = key.astype(np.float64) * delta.astype(np.float64), rest.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    is_even = total.view(np.uint64) % 2 == 0
    odd = np.where((lost != 0) & is_even, np.nextafter(total, np.copysign(np.inf, lost)), total)
    return odd.astype(np.float32)


def fold_by_hand(case: RingCase, pool: Array, tables: tuple[Array, ...], ring: Array, update: Any) -> Array:
    """A fold from what the documentation says of a record: the key, a row of deltas a value head, a decay a head."""
    heads, pool = case.heads, pool.copy()
    kd, vd, group = heads.key_head_dim, heads.value_head_dim, heads.group_size
    row_ids, ring_row_ids, counts = tables
    for layer, row in np.ndindex(row_ids.shape):
        if PAD in (row_ids[layer, row], ring_row_ids[layer, row]) or not 1 <= counts[row] <= case.ring_len:
            continue
        for head in range(heads.num_value_heads):
            state = pool[row_ids[layer, row], head].astype(np.float32)
            for token in range(counts[row]):
                record = ring[ring_row_ids[layer, row], head // group, token].astype(np.float32)
                key, deltas = record[:kd], record[kd : kd + group * vd].reshape(group, vd)
                decay = record[kd + group * vd :][head % group]
                state = update(key[:, None], deltas[head % group][None], decay * state)
            pool[row_ids[layer, row], head] = state.astype(pool.dtype)
    return pool


BY_HAND = RingCase("by hand", HeadGeometry(2, 6, 8, 8), 4, (4, 4, 2, 3), (4, 1, 0, 2), num_layers=3)


def tables_of(subject: RingSubject) -> tuple[Array, Array, Array]:
    return subject.arrays.row_ids, subject.arrays.ring_row_ids, subject.arrays.num_accepted


@pytest.mark.parametrize("ring_dtype", POOLS)
@pytest.mark.parametrize("state_dtype", POOLS)
def test_a_fold_written_by_hand(backend: str, state_dtype: str, ring_dtype: str) -> None:
    """Field case 38: a second fold, written from the documented layout alone, gives the same pool, bit for bit."""
    if backend == "host" and state_dtype != ring_dtype:
        pytest.skip("the types that are equal are compiled for the CPU; numpy and cuda run all pairs")
    case = replace(BY_HAND, state_dtype=state_dtype, ring_dtype=ring_dtype)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    update = rounded_after_each if backend == "numpy" else fused
    expected = fold_by_hand(case, subject.verified_pool, tables_of(subject), subject.ring, update)
    assert_passed(bitwise(fold_of(subject), expected, "pool"))


def test_a_ring_filled_by_hand(backend: str) -> None:
    """Field case 38: records written from the documented layout alone; small integers, so that no rounding matters."""
    arrays = build_ring_arrays(BY_HAND)
    random = np.random.default_rng(0)
    ring = random.integers(-3, 4, arrays.ring.shape).astype(np.float32)
    ring[..., -BY_HAND.record_padding :] = np.nan
    pool = random.integers(-9, 10, arrays.recurrent_state.shape).astype(np.float32)
    tables = arrays.row_ids, arrays.ring_row_ids, arrays.num_accepted
    expected = fold_by_hand(BY_HAND, pool, tables, ring, rounded_after_each)
    assert np.abs(expected).max() < 2**24
    got = fold(backend, pool, arrays.row_ids, ring, arrays.ring_row_ids, arrays.num_accepted)
    assert_passed(bitwise(got, expected, "pool", ignore_zero_sign=True))


def test_a_record_holds_the_tokens_key_and_decay(backend: str) -> None:
    """Field case 38: key and decays lie where the documentation says, unchanged; padding keeps its bytes."""
    subject = ring_subject(BY_HAND, backend, build_ring_arrays(BY_HAND))
    heads = BY_HAND.heads
    for layer, window in enumerate(subject.arrays.layers):
        for row, length in enumerate(BY_HAND.lengths):
            records = subject.ring[subject.arrays.ring_row_ids[layer, row], :, :length]  # [key head, token, record]
            tokens = slice(window.input_row_offsets[row], window.input_row_offsets[row + 1])
            keys = window.qkv_conv_output[tokens, heads.key_dim : 2 * heads.key_dim].reshape(length, 2, 8)
            decays = window.decay_per_token[tokens].reshape(length, 2, 3)
            assert_passed(
                bitwise(records[..., :8].swapaxes(0, 1), keys, "keys"),
                bitwise(records[..., 8 + 3 * 8 : heads.record_elements].swapaxes(0, 1), decays, "decays"),
            )
            assert np.isnan(records[..., heads.record_elements :]).all()


SINGLE = RingCase("single", SMALL, 4, (1,), (1,), num_layers=1)


def single_token(case: RingCase, key: Array, value: float, decay: float, beta: float, state: float) -> RingArrays:
    """One row of equal tokens: in each head this key as a query too, these values, and states that are all the same."""
    arrays, heads = build_ring_arrays(case), case.heads
    (window,) = arrays.layers
    vectors = np.tile(key.astype(np.float32), 2 * heads.num_key_heads)
    window.qkv_conv_output[:] = [*vectors, *np.full(heads.value_dim, value, np.float32)]
    window.decay_per_token[:], window.beta_per_token[:] = decay, beta
    arrays.recurrent_state[arrays.row_ids[0, 0]] = state
    return arrays


def record_of(subject: RingSubject, token: int = 0) -> tuple[Array, Array, Array]:
    """Keys [key head, element], delta factors [key head, value head of the group, column], decays, of a token."""
    heads, row = subject.case.heads, subject.arrays.ring_row_ids[0, 0]
    key, deltas, decays, _ = np.split(
        subject.ring[row, :, token],
        np.cumsum([heads.key_head_dim, heads.group_size * heads.value_head_dim, heads.group_size]),
        axis=1,
    )
    return key, deltas.reshape(len(deltas), heads.group_size, heads.value_head_dim), decays


def test_a_record_is_made_of_the_state_after_decay(backend: str) -> None:
    """Beside field case 50: the delta factor that a record keeps is of half the state too, and its fold leaves 0."""
    key = np.eye(8)[0]
    subject = ring_subject(SINGLE, backend, single_token(SINGLE, key, value=0, decay=0.5, beta=1, state=1))
    _, deltas, _ = record_of(subject)
    np.testing.assert_allclose(deltas, -0.5, rtol=2e-6)
    assert np.abs(subject.readouts[0][0]).max() < 1e-6
    state = fold_of(subject)[subject.arrays.row_ids[0, 0]]
    assert np.abs(state[:, 0]).max() < 1e-6
    np.testing.assert_array_equal(state[:, 1:], 0.5)


@pytest.mark.parametrize("size", [1e-3, 1e-6])
def test_a_record_of_a_tiny_key(backend: str, size: float) -> None:
    """Beside field cases 45, 46: a record has the raw key, so the delta factor has the norm, its epsilon in the root.

    At 1e-3 the epsilon is as large as the sum: outside the root it would make a norm of 2e-3 out of 1.4e-3.
    """
    subject = ring_subject(
        SINGLE, backend, single_token(SINGLE, size * np.eye(8)[2], value=3, decay=1, beta=1, state=0)
    )
    key, deltas, _ = record_of(subject)
    norm = np.sqrt(np.float64(np.float32(size)) ** 2 + 1e-6)
    np.testing.assert_array_equal(key[:, 2], np.float32(size))
    np.testing.assert_allclose(deltas, 3 / norm, rtol=2e-6)
    state = fold_of(subject)[subject.arrays.row_ids[0, 0]]
    np.testing.assert_allclose(state[:, 2], 3 * size / norm, rtol=2e-6)
    np.testing.assert_array_equal(np.delete(state, 2, axis=1), 0)


def test_a_record_of_no_key(backend: str) -> None:
    """Beside field cases 45, 46: a key of 0 has a finite delta factor all the same, and folds to exactly decay · S."""
    case = replace(SINGLE, name="no keys", lengths=(4,), num_accepted=(3,))
    subject = ring_subject(case, backend, single_token(case, np.zeros(8), value=3, decay=0.7, beta=1, state=-2))
    assert np.isfinite(record_of(subject, 2)[1]).all()
    assert_passed(bitwise(subject.readouts[0][:4], np.zeros_like(subject.readouts[0][:4]), "", ignore_zero_sign=True))
    decay, expected = np.float32(0.7), np.float32(-2)
    for _ in range(3):
        expected *= decay
    np.testing.assert_array_equal(fold_of(subject)[subject.arrays.row_ids[0, 0]], expected)


def test_a_fold_into_an_empty_state(backend: str) -> None:
    """Beside field case 53: the outer product lies as [key element, value element] behind verify and fold as well."""
    key = np.arange(1, 9) / 8
    arrays = single_token(SINGLE, key, value=1, decay=0.5, beta=0.25, state=0)
    values = np.arange(1, 33, dtype=np.float32).reshape(4, 8)
    arrays.layers[0].qkv_conv_output[:, -32:] = values.ravel()
    pool = fold_of(ring_subject(SINGLE, backend, arrays))
    key_hat = key / np.sqrt(key @ key + 1e-6)
    expected = key_hat[:, None] * 0.25 * values[:, None].astype(float)
    assert_passed(close(pool[arrays.row_ids[0, 0]], expected, storage_tolerance("float32"), "state"))


def test_records_are_of_the_key_head_of_their_group(backend: str) -> None:
    """Beside field case 54: key head i = e_i goes to record i and, folded, to value heads [0,0,0,1,1,1] of 2 and 6."""
    case = replace(BY_HAND, lengths=(1,), num_accepted=(1,), num_layers=1)
    arrays = single_token(case, np.eye(8)[0], value=1, decay=1, beta=1, state=0)
    tokens = arrays.layers[0].qkv_conv_output
    tokens[:, 16:32] = [*np.eye(8)[0], *np.eye(8)[1]]
    tokens[:, 32:] = np.repeat(np.arange(1, 7), 8)
    subject = ring_subject(case, backend, arrays)
    key, deltas, _ = record_of(subject)
    np.testing.assert_array_equal(key, np.eye(8)[:2])
    np.testing.assert_allclose(deltas[..., 0], [[1, 2, 3], [4, 5, 6]], rtol=2e-6)
    state = fold_of(subject)[arrays.row_ids[0, 0]]
    assert [np.flatnonzero(head.any(axis=1)).tolist() for head in state] == [[0]] * 3 + [[1]] * 3


@pytest.mark.parametrize("state_dtype", POOLS)
def test_folding_what_changes_nothing_keeps_a_state(backend: str, state_dtype: str) -> None:
    """Beside field case 41: records of beta 0 and decay 1 keep the bits of a state of any type, whatever the keys."""
    case = RingCase("kept", SMALL, 4, (4, 3), (4, 2), num_layers=1, state_dtype=state_dtype)
    arrays = build_ring_arrays(case)
    arrays.layers[0].decay_per_token[:], arrays.layers[0].beta_per_token[:] = 1, 0
    subject = ring_subject(case, backend, arrays)
    assert_passed(bitwise(fold_of(subject), arrays.recurrent_state, "pool", ignore_zero_sign=True))
    assert (subject.readouts[0][:7] != 0).any(axis=1).all()


@pytest.mark.parametrize("value", [np.inf, np.nan, 3e38])
@pytest.mark.parametrize("part", ["key", "delta", "decay", "state"])
def test_an_extreme_value_of_a_record_stays_in_its_row_and_head(backend: str, part: str, value: float) -> None:
    """Beside field case 51: in a record, or in the state that it is folded into; a delta even stays in its column."""
    case = RingCase("extreme", SMALL, 4, (4, 4, 4), (3, 3, 3), num_layers=1)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    clean = fold_of(subject)
    ring, pool = subject.ring.copy(), subject.verified_pool.copy()
    row, slot = subject.arrays.ring_row_ids[0, 1], subject.arrays.row_ids[0, 1]
    # Of key head 1, whose value heads are 2 and 3: of the second one column 5.
    heads, touched = slice(2, 4), np.s_[slot, 2:4]
    if part == "state":
        pool[slot, 3, 2, 5], touched = value, np.s_[slot, 3, 2, 5]
    else:
        at = {"key": 2, "delta": 8 + 8 + 5, "decay": 8 + 16 + 1}[part]
        ring[row, 1, 1, at] = value
        touched = {"key": np.s_[slot, heads, 2], "delta": np.s_[slot, 3, :, 5], "decay": np.s_[slot, 3]}[part]
    folded = fold_of(subject, ring=ring, pool=pool)
    assert not bitwise(folded, clean)
    folded[touched] = clean[touched]
    assert_passed(bitwise(folded, clean, "everything else"))


def test_folding_twice_applies_twice(backend: str) -> None:
    """Field case 34: a fold is no commit: nothing remembers that it ran."""
    subject = ring_subject(BY_HAND, backend, build_ring_arrays(BY_HAND))
    update = rounded_after_each if backend == "numpy" else fused
    once = fold_by_hand(BY_HAND, subject.verified_pool, tables_of(subject), subject.ring, update)
    twice = fold_by_hand(BY_HAND, once, tables_of(subject), subject.ring, update)
    assert_passed(bitwise(fold_of(subject, pool=fold_of(subject)), twice, "pool"))
    assert not bitwise(twice, once)


@pytest.mark.parametrize("parts", [[[0, 1], [2, 3]], [[2, 3], [0, 1]], [[0], [1], [2], [3]], [[0, 2], [3, 1]]])
def test_layers_in_parts(backend: str, parts: list[list[int]]) -> None:
    """Field case 34: halves of the layers, in any order, equal the whole."""
    case = replace(BY_HAND, num_layers=4)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    pool = subject.verified_pool
    for layers in parts:
        tables = {name: getattr(subject.arrays, name)[layers] for name in ("row_ids", "ring_row_ids")}
        pool = fold_of(subject, pool=pool, **tables)
    assert_passed(bitwise(pool, fold_of(subject), "pool"))


def test_rows_in_another_order(backend: str) -> None:
    """Field case 35: the batch is permuted between verify and fold, the tables with it."""
    subject = ring_subject(BY_HAND, backend, build_ring_arrays(BY_HAND))
    expected = fold_of(subject)
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(BY_HAND.lengths))
        row_ids, ring_row_ids, counts = (table[..., order] for table in tables_of(subject))
        folded = fold_of(subject, row_ids=row_ids, ring_row_ids=ring_row_ids, counts=counts)
        assert_passed(bitwise(folded, expected, f"rows in the order {order}"))
    wrong = fold_of(subject, counts=subject.arrays.num_accepted[[1, 0, 2, 3]])
    assert not bitwise(wrong, expected)


def test_a_slot_that_was_copied_elsewhere(backend: str) -> None:
    """Field cases 29, 31: a slot copied between verify and fold is folded where the table says; the old one rests."""
    case = RingCase("moved", SMALL, 4, (4, 3), (3, 2), num_layers=1)
    subject = ring_subject(case, backend, build_ring_arrays(case))
    (moved, resting), rows = subject.arrays.row_ids[0], subject.arrays.ring_row_ids
    spare = np.setdiff1d(np.arange(5), [moved, resting])[0]
    pool = subject.verified_pool.copy()
    pool[spare] = pool[moved]
    folded = fold_of(subject, pool=pool, row_ids=np.array([[spare, resting]], np.uint32), ring_row_ids=rows)
    expected = pool.copy()
    expected[[spare, resting]] = fold_of(subject)[[moved, resting]]
    assert_passed(same_bytes(folded, expected, "pool"))


def test_a_slot_that_was_written_between_verify_and_fold(backend: str) -> None:
    """Field cases 29, 31: records apply to whatever the slot holds by then; that was not what they were made from."""
    subject = ring_subject(BY_HAND, backend, build_ring_arrays(BY_HAND))
    pool = subject.verified_pool.copy()
    touched = subject.arrays.row_ids[0, 0]
    pool[touched] += 1
    update = rounded_after_each if backend == "numpy" else fused
    expected = fold_by_hand(BY_HAND, pool, tables_of(subject), subject.ring, update)
    folded = fold_of(subject, pool=pool)
    assert_passed(bitwise(folded, expected, "pool"))
    differs = (folded != fold_of(subject)) & ~np.isnan(folded)
    assert np.flatnonzero(differs.any(axis=(1, 2, 3))).tolist() == [touched]


def test_a_ring_row_that_was_verified_again(backend: str) -> None:
    """Field cases 29, 31: a second verify on a ring row leaves no trace of the first, whatever their lengths."""
    long, short = (RingCase("again", SMALL, 4, (length,), (2,), num_layers=1, seed=length) for length in (4, 2))
    first, alone = (ring_subject(case, backend, build_ring_arrays(case)) for case in (long, short))
    device, arrays = Device(backend), alone.arrays
    pool, ring = device.put(arrays.recurrent_state), device.put(first.ring)
    row = first.arrays.ring_row_ids
    device.verify(arrays.layers[0], row[0], pool, ring)
    device.fold(pool, arrays.row_ids, ring, row, arrays.num_accepted)
    assert_passed(same_bytes(device.get(pool), fold_of(alone), "pool"))


@pytest.mark.parametrize("dtype", POOLS)
def test_records_in_every_type_are_rounded_once(backend: str, dtype: str) -> None:
    """Field case 36: a 16-bit ring holds the float32 records, each rounded to nearest even; no readout differs."""
    if backend == "host" and dtype == "float16":
        pytest.skip("one 16-bit ring is compiled for the CPU; numpy and cuda run both")
    narrow_case = replace(BY_HAND, ring_dtype=dtype)
    narrow, wide = (ring_subject(case, backend, build_ring_arrays(case)) for case in (narrow_case, BY_HAND))
    assert_passed(
        *(bitwise(*pair, "readout") for pair in zip(narrow.readouts, wide.readouts, strict=True)),
        bitwise(narrow.ring, wide.ring.astype(DTYPES[dtype]), "ring"),
    )
