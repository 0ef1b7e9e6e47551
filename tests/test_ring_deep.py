"""Pools and rings larger than 32-bit offsets reach, and the ops that take a ring inside a captured CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call, FoldCall, VerifyCall

HEADS = HeadGeometry(16, 32, 128, 128)
RING_LEN = 4
SLOT_ELEMENTS = HEADS.slot_state_elements
ROW_ELEMENTS = HEADS.num_key_heads * RING_LEN * HEADS.record_elements


@pytest.fixture
def _free_afterwards() -> Iterator[None]:
    """Give the GPU's memory back to others."""
    yield
    if "cuda" in gdn.available_backends():
        import cupy

        cupy.get_default_memory_pool().free_all_blocks()


def zeros(backend: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Memory that costs nothing on a CPU until it is written."""
    if backend == "cuda":
        import cupy

        return cupy.zeros(shape, dtype)
    try:
        return np.zeros(shape, dtype)
    except MemoryError:
        pytest.skip(f"the system lends no {int(np.prod(shape)) * np.dtype(dtype).itemsize} bytes of address space")


def around_32_bits(elements: int) -> list[int]:
    """Entries, of so many elements each, on both sides of the offsets 2^31 and 2^32."""
    return [limit // elements + step for limit in (2**31, 2**32) for step in (-1, 1)]


def aliases(entries: list[int], elements: int) -> set[int]:
    """The entries that offsets cut to 31 or 32 bits would reach instead, as far as they are others."""
    cut = {
        entry * elements % limit // elements + step for entry in entries for limit in (2**31, 2**32) for step in (0, 1)
    }
    return cut - set(entries)


@pytest.mark.usefixtures("_free_afterwards")
def test_slots_and_ring_rows_past_2_to_32_elements(backend: str) -> None:
    """Field cases 1, 2: a bfloat16 pool and a float32 ring of more than 2^32 elements each, low entries poisoned."""
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np
    case = RecurrenceCase("deep", HEADS, (4, 2, 3, 1), "bfloat16", state_dtype="bfloat16", spare_slots=0)
    small = build_arrays(case)
    slots, ring_rows = around_32_bits(SLOT_ELEMENTS), around_32_bits(ROW_ELEMENTS)[::-1]
    pool = zeros(backend, (max(slots) + 2, 32, 128, 128), small.recurrent_state.dtype)
    ring = zeros(backend, (max(ring_rows) + 2, 16, RING_LEN, HEADS.record_elements), np.float32)
    assert pool.size > 2**32 < ring.size
    for slot, small_slot in zip(slots, small.slot_idx, strict=True):
        pool[slot] = xp.asarray(small.recurrent_state[small_slot])
    low_slots, low_rows = (
        sorted(aliases(entries, elements)) for entries, elements in ((slots, SLOT_ELEMENTS), (ring_rows, ROW_ELEMENTS))
    )
    for array, entries in ((pool, low_slots), (ring, low_rows)):
        for entry in entries:
            array[entry] = xp.asarray(np.full(array.shape[1:], np.nan, array.dtype))
    tokens = [xp.asarray(array) for array in small.as_tuple()[:3]]
    offsets = xp.asarray(small.input_row_offsets)
    slot_idx, ring_slot_idx = (xp.asarray(entries, xp.uint32) for entries in (slots, ring_rows))
    small_pool = xp.asarray(small.recurrent_state)
    with on_backend(backend):
        plain_out = ops.gated_delta_recurrence_fwd(*tokens, small_pool, xp.asarray(small.slot_idx), offsets)
        out = ops.gated_delta_recurrence_verify_ring(*tokens, pool, slot_idx, offsets, ring, ring_slot_idx)
        counts = xp.asarray(case.lengths, xp.uint32)
        ops.gated_delta_state_fold(pool, slot_idx[None], ring, ring_slot_idx[None], counts)

    def to_numpy(array: Any) -> Any:
        return array.get() if backend == "cuda" else array

    assert_passed(bitwise(to_numpy(out), to_numpy(plain_out), "readout"))
    for slot, small_slot in zip(slots, small.slot_idx, strict=True):
        state, expected = to_numpy(pool[slot]), to_numpy(small_pool[int(small_slot)])
        assert_passed(bitwise(state, expected, f"slot {slot}"))
        pool[slot] = 0
    for row, length in zip(ring_rows, case.lengths, strict=True):
        written = to_numpy(ring[row]) != 0
        assert written[:, :length].any(axis=(0, 2)).all()
        assert not written[:, length:].any()
        ring[row] = 0
    for array, entries in ((pool, low_slots), (ring, low_rows)):
        for entry in entries:
            assert np.isnan(to_numpy(array[entry]).astype(np.float32)).all()
            array[entry] = 0
        if backend == "cuda":  # and nothing else was touched at all
            assert not bool(array.view(xp.uint32).any())


@pytest.mark.usefixtures("_free_afterwards")
def test_records_far_apart_in_a_ring_row(backend: str) -> None:
    """Beside field case 2: two ring rows, but records so far apart that heads and tokens of each span 2^31 elements.

    A verify, a fold, and a window that commits itself behind pending records leave what they leave on a small ring.
    """
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np
    heads = HeadGeometry(2, 6, 8, 8)
    case = RecurrenceCase("far records", heads, (4,), state_dtype="bfloat16", spare_slots=0)
    qkv, decay, beta, start, slots, offsets = (xp.asarray(array) for array in build_arrays(case).as_tuple())
    row, counts = xp.asarray([1], xp.uint32), xp.asarray([3], xp.uint32)
    results = []
    for record_stride in (heads.record_elements + 2, 2**28 + 2**27):
        ring = zeros(backend, (2, heads.num_key_heads, RING_LEN, record_stride), start.dtype)
        pool = start.copy()
        verify = (qkv, decay, beta, pool, slots, offsets, ring, row)
        with on_backend(backend):
            recorded = ops.gated_delta_recurrence_verify_ring(*verify)
            ops.gated_delta_state_fold(pool, slots[None], ring, row[None], counts)
            folded = pool.copy()
            committed = ops.gated_delta_recurrence_verify_ring(*verify, pending_ring_slot_idx=row, num_pending=counts)
        results.append((recorded, folded, committed, pool, ring[..., : heads.record_elements].copy()))
        assert not bool(ring[..., heads.record_elements :][..., :2].any())
    assert ring[0].size > 2**31
    assert ring.size > 2**32
    for near, far in zip(*results, strict=True):
        assert_passed(bitwise(*(array.get() if backend == "cuda" else array for array in (far, near))))
    assert bool((folded != start).any())
    assert bool((pool != folded).any())


# ---- CUDA graphs ----


@pytest.mark.gpu
def test_a_captured_graph_follows_its_tables(new_verify: type[VerifyCall], new_fold: type[FoldCall]) -> None:
    """Field cases 11, 84: slots, ring rows, offsets, counts, padding change between replays; a warm call comes first.

    Each replay equals the same two calls made plainly on copies of the same arrays.
    """
    import cupy

    verify, fold = new_verify(lengths=(2, 1), max_slots=5, ring_rows=4), new_fold()
    verify.arguments = {name: cupy.asarray(array) for name, array in verify.arguments.items()}
    fold.arguments = {name: cupy.asarray(array) for name, array in fold.arguments.items()}
    for shared in ("recurrent_state", "ring"):
        fold[shared] = verify[shared]
    pad = gdn.PAD_SLOT
    replays = [
        ([0, 1], [2, 0], [0, 2, 3], [[0, 1], [3, 2]], [[2, 0], [1, 3]], [2, 1]),
        ([3, pad], [1, 3], [0, 3, 3], [[3, 4], [pad, 0]], [[1, 3], [0, 2]], [3, 0]),
        ([4, 2], [pad, 3], [0, 1, 2], [[pad, 2], [1, pad]], [[0, 3], [2, pad]], [1, 1]),
        ([pad, 0], [0, 1], [1, 1, 3], [[1, 0], [2, 3]], [[3, 1], [0, 2]], [5, 2]),
        ([2, 1], [3, 2], [0, 0, 3], [[2, 1], [0, 4]], [[3, 2], [1, 0]], [0, 3]),
    ]

    def set_tables(replay: tuple[Any, ...]) -> None:
        places = ("slot_idx", "ring_slot_idx", "input_row_offsets"), ("row_ids", "ring_row_ids", "num_accepted")
        for call, names, values in ((verify, places[0], replay[:3]), (fold, places[1], replay[3:])):
            for name, table in zip(names, values, strict=True):
                call[name].set(np.array(table, np.int64).astype(np.uint32))

    stream = cupy.cuda.Stream(non_blocking=True)
    start = {name: verify[name].copy() for name in ("recurrent_state", "ring")}
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        verify.run()
        fold.run()
        stream.synchronize()
        stream.begin_capture()
        verify.run()
        fold.run()
        graph = stream.end_capture()
        results = []
        for run in (lambda: graph.launch(stream), lambda: (verify.run(), fold.run())):
            for name, values in start.items():
                verify[name][...] = values
            steps = []
            for replay in replays:
                set_tables(replay)
                verify["out"].fill(cupy.nan)
                run()
                stream.synchronize()
                steps.append({name: verify[name].get() for name in ("out", "recurrent_state", "ring")})
            results.append(steps)
    replayed, plain = results
    for number, (got, expected) in enumerate(zip(replayed, plain, strict=True)):
        assert_passed(*(bitwise(got[name], expected[name], f"{name} of replay {number}") for name in got))
    for before, after in pairwise(plain):  # every replay has something to do
        assert (before["recurrent_state"] != after["recurrent_state"]).any()


# ---- Pending records ----


@pytest.mark.usefixtures("_free_afterwards")
def test_pending_records_past_2_to_32_elements(backend: str) -> None:
    """Beside field cases 1, 2: windows behind pending records on both sides of 2^31 and 2^32 elements.

    They leave what the same calls on small arrays leave.
    The first two rows fold what lies in ring rows of their own, the last two keep it in that of their window.
    """
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np
    case = RecurrenceCase("deep", HEADS, (3, 1, 2, 3), "bfloat16", state_dtype="bfloat16", spare_slots=0)
    small = build_arrays(case)
    tokens = [xp.asarray(array) for array in small.as_tuple()[:3]]
    lengths = np.array(case.lengths)
    deep_slots, deep_rows = around_32_bits(SLOT_ELEMENTS), around_32_bits(ROW_ELEMENTS)
    deep_pending = [deep_rows[0] + 1, deep_rows[2] + 1, *deep_rows[:2]]  # the first two reach over the limits
    deep_windows = [deep_rows[2], deep_rows[3], *deep_rows[:2]]

    def run(pool: Any, slots: list[int], ring: Any, windows: list[int], pending: list[int]) -> Any:
        """Verify 2 tokens of each row and leave one or two pending, then run the step; returns its readout."""
        slot_idx, ring_rows, pending_rows = (xp.asarray(table, xp.uint32) for table in (slots, windows, pending))
        counts = xp.asarray([2, 1, 2, 1], xp.uint32)
        with on_backend(backend):
            before = [array[: 2 * len(lengths)] for array in tokens]
            offsets = xp.arange(0, 2 * len(lengths) + 1, 2, dtype=xp.uint32)
            ops.gated_delta_recurrence_verify_ring(*before, pool, slot_idx, offsets, ring, pending_rows)
            return ops.gated_delta_recurrence_verify_ring(
                *(*tokens, pool, slot_idx, xp.asarray(small.input_row_offsets), ring, ring_rows),
                pending_ring_slot_idx=pending_rows,
                num_pending=counts,
            )

    pool = zeros(backend, (max(deep_slots) + 2, 32, 128, 128), small.recurrent_state.dtype)
    ring = zeros(backend, (max(*deep_windows, *deep_pending) + 2, 16, RING_LEN, HEADS.record_elements), np.float32)
    assert pool.size > 2**32 < ring.size
    small_pool, small_ring = xp.array(small.recurrent_state), zeros(backend, (6, *ring.shape[1:]), np.float32)
    small_slots = [int(slot) for slot in small.slot_idx]
    for slot, small_slot in zip(deep_slots, small_slots, strict=True):
        pool[slot] = small_pool[small_slot]
    poisoned = [(pool, aliases(deep_slots, SLOT_ELEMENTS)), (ring, aliases(deep_windows + deep_pending, ROW_ELEMENTS))]
    for array, entries in poisoned:
        for entry in entries:
            array[entry] = xp.asarray(np.full(array.shape[1:], np.nan, array.dtype))
    small_windows, small_pending = [0, 1, 2, 3], [4, 5, 2, 3]
    expected = run(small_pool, small_slots, small_ring, small_windows, small_pending)
    out = run(pool, deep_slots, ring, deep_windows, deep_pending)

    def to_numpy(array: Any) -> Any:
        return array.get() if backend == "cuda" else array

    assert_passed(bitwise(to_numpy(out), to_numpy(expected), "readout"))
    start = small.recurrent_state
    changed = [bool((to_numpy(small_pool[slot]) != start[slot]).any()) for slot in small_slots]
    assert changed == [True, True, False, False]
    for array, reference, pairs in (
        (pool, small_pool, zip(deep_slots, small_slots, strict=True)),
        (ring, small_ring, zip(deep_windows + deep_pending, small_windows + small_pending, strict=True)),
    ):
        for entry, small_entry in pairs:
            assert_passed(bitwise(to_numpy(array[entry]), to_numpy(reference[small_entry]), f"entry {entry}"))
    for array, entries in poisoned:
        for entry in entries:
            assert np.isnan(to_numpy(array[entry]).astype(np.float32)).all()
    if backend == "cuda":  # and nothing else was touched at all
        for array, touched in ((pool, deep_slots), (ring, deep_windows + deep_pending)):
            for entry in {*touched, *next(entries for other, entries in poisoned if other is array)}:
                array[entry] = 0
            assert not bool(array.view(xp.uint32).any())


@pytest.mark.gpu
@pytest.mark.parametrize("op", ["verify", "fwd"])
@pytest.mark.parametrize("lengths", [(2, 1), (1, 0)], ids=["windows", "tokens"])
def test_a_captured_graph_follows_what_is_pending(
    new_verify: type[VerifyCall], new_call: type[Call], op: str, lengths: tuple[int, ...]
) -> None:
    """Beside field case 11: ring rows of pending records change, padding among them, and their counts.

    Each replay equals the same call made plainly on copies of the same arrays.
    """
    import cupy

    call: Call = new_verify(lengths=lengths, max_slots=5, ring_rows=6) if op == "verify" else new_call(lengths=lengths)
    source = new_verify(ring_rows=6)["ring"]
    call["ring"] = np.random.default_rng(2).standard_normal(source.shape).astype(np.float32)
    call["pending_ring_slot_idx"], call["num_pending"] = np.array([4, 5], np.uint32), np.array([3, 2], np.uint32)
    call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
    pad = gdn.PAD_SLOT
    # Ring rows of windows, of pending records, their counts.
    replays = [
        ([0, 1], [4, 5], [3, 2]),
        ([2, 3], [2, 3], [1, 3]),
        ([2, 3], [2, 1], [4, 4]),
        ([4, 0], [pad, 0], [2, 5]),
        ([pad, 5], [1, 5], [2, 2]),
        ([0, 1], [3, 2], [0, 2**32 - 1]),
        ([5, 4], [0, 4], [1, 4]),
    ]

    def set_tables(replay: tuple[list[int], ...]) -> None:
        for name, table in zip(("ring_slot_idx", "pending_ring_slot_idx", "num_pending"), replay, strict=True):
            if name in call.arguments:
                call[name].set(np.array(table, np.int64).astype(np.uint32))

    stream = cupy.cuda.Stream(non_blocking=True)
    written = ("recurrent_state", "ring")
    start = {name: call[name].copy() for name in written}
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        call.run()
        stream.synchronize()
        stream.begin_capture()
        call.run()
        graph = stream.end_capture()
        results = []
        for run in (lambda: graph.launch(stream), call.run):
            for name, values in start.items():
                call[name][...] = values
            steps = []
            for replay in replays:
                set_tables(replay)
                call["out"].fill(cupy.nan)
                run()
                stream.synchronize()
                steps.append({name: call[name].get() for name in ("out", *written)})
            results.append(steps)
    replayed, plain = results
    for number, (got, expected) in enumerate(zip(replayed, plain, strict=True)):
        assert_passed(*(bitwise(got[name], expected[name], f"{name} of replay {number}") for name in got))
    for before, after in pairwise(plain):  # every replay has something to do
        assert (before["out"] != after["out"]).any() or (before["ring"] != after["ring"]).any()
