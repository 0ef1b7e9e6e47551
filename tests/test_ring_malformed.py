"""Index values that ops with a ring refuse, given to their kernels all the same: nothing beside the arrays is touched.

A GPU call does not look at index values, so kernels meet whatever they hold. A slot or ring row out of range makes its
row padding, and a count above RING_LEN, a negative one among them, skips its row. Where either is wrong of pending
records, nothing is pending.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import arrays, ops
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import host as host_backend
from gdn.backends import recurrence as recurrence_launch
from gdn.geometry import HeadGeometry
from gdn.recurrence import recurrence_inputs
from gdn.ring import fold_inputs, pending_inputs, ring_len, verify_inputs
from gdn.testing import assert_passed, bitwise
from gdn.testing.buffers import Array, Buffer, lay_out

HEADS = HeadGeometry(1, 2, 16, 32)
TOTAL, MAX_SLOTS, RING_ROWS, RING_LEN = 12, 4, 5, 4
RECORD_STRIDE = HEADS.record_elements + 2
CANARY = 7.0
LAYOUTS = {1: "every_other", 2: "every_other", 4: "gaps"}
FAR = (100, 2**20, 2**31 - 1, 2**31, 2**32 - 2)


def amid_canaries(name: str, values: Array) -> Buffer:
    """An array in memory whose other elements are canaries; a ring is dense and has them before and behind."""
    if name != "ring":
        return lay_out(values, LAYOUTS[values.ndim], CANARY)
    row = values[0].size
    buffer = Buffer(
        np.full(values.size + 2 * row, CANARY, values.dtype), row, values.shape, (row, row, RECORD_STRIDE, 1)
    )
    buffer.array[...] = values
    return buffer


def as_index(values: Any, index_type: Any) -> Array:
    index: Array = np.array(values, np.int64).astype(np.uint32).view(index_type)
    return index


def tokens_and_pools() -> dict[str, Array]:
    random = np.random.default_rng(3)
    return {
        "qkv_conv_output": random.standard_normal((TOTAL, HEADS.conv_dim)).astype(np.float32),
        "decay_per_token": random.uniform(0.5, 1, (TOTAL, 2)).astype(np.float32),
        "beta_per_token": random.uniform(0, 1, (TOTAL, 2)).astype(np.float32),
        "recurrent_state": random.standard_normal((MAX_SLOTS, 2, 16, 32)).astype(np.float32),
        "ring": random.standard_normal((RING_ROWS, 1, RING_LEN, RECORD_STRIDE)).astype(np.float32),
        "out": np.full((TOTAL, HEADS.value_dim), np.nan, np.float32),
    }


BY_PLACE = ("qkv_conv_output", "decay_per_token", "beta_per_token", "recurrent_state", "slot_idx", "input_row_offsets")
BY_NAME = ("out", "pending_ring_slot_idx", "num_pending")

#: Ring rows and counts of pending records.
Pending = tuple[Any, Any]


def unchecked_call(slots: Any, offsets: Any, index_type: Any, pending: Pending | None, **more: Any) -> dict[str, Array]:
    """The arrays of a recurrence call on tables of these values."""
    tables = {"slot_idx": slots, "input_row_offsets": offsets, **more}
    if pending is not None:
        tables |= dict(zip(BY_NAME[1:], pending, strict=True))
    values = tokens_and_pools() | {name: as_index(table, index_type) for name, table in tables.items()}
    return {name: values[name] for name in (*BY_PLACE, "ring", *more, *BY_NAME) if name in values}


def verify_unchecked(
    kernels: str, slots: Any, offsets: Any, ring_rows: Any, index_type: Any = np.uint32, pending: Pending | None = None
) -> dict[str, Array]:
    """Readout, pool and ring after a verify that nobody checked; asserts that all canaries and inputs live."""
    call = unchecked_call(slots, offsets, index_type, pending, ring_slot_idx=ring_rows)

    def on_host(*eight: Array, out: Array, **tables: Array) -> None:
        recurrence = recurrence_inputs(arrays.take, *eight[:6])
        inputs = verify_inputs(arrays.take, recurrence, *eight[6:], **tables)
        tile = recurrence_launch.row_tile(recurrence, None, ring_len(inputs.ring) if pending is not None else 0)
        host_backend.run(verify_kernel.launch(inputs, arrays.take("out", out), tile))

    return run_unchecked(kernels, call, ops.gated_delta_recurrence_verify_ring, on_host)


def fwd_unchecked(
    kernels: str, slots: Any, offsets: Any, pending: Pending, index_type: Any = np.uint32
) -> dict[str, Array]:
    """The same of a forward call with pending records."""
    call = unchecked_call(slots, offsets, index_type, pending)

    def on_host(*seven: Array, out: Array, **tables: Array) -> None:
        inputs = recurrence_inputs(arrays.take, *seven[:6])
        records = pending_inputs(arrays.take, inputs, seven[6], *tables.values())
        tile = recurrence_launch.row_tile(inputs, None, seven[6].shape[2])
        host_backend.run(fwd_kernel.launch(inputs, arrays.take("out", out), tile, records))

    def on_gpu(*seven: Any, **by_name: Any) -> None:
        ops.gated_delta_recurrence_fwd(*seven[:6], ring=seven[6], **by_name)

    return run_unchecked(kernels, call, on_gpu, on_host)


def fold_unchecked(
    kernels: str, row_ids: Any, ring_row_ids: Any, counts: Any, index_type: Any = np.uint32
) -> dict[str, Array]:
    """Pool and ring after a fold that nobody checked; asserts that all canaries and inputs live."""
    values = tokens_and_pools()
    call = {
        "recurrent_state": values["recurrent_state"],
        "row_ids": as_index(row_ids, index_type),
        "ring": values["ring"],
        "ring_row_ids": as_index(ring_row_ids, index_type),
        "num_accepted": as_index(counts, index_type),
    }

    def on_host(*five: Array) -> None:
        inputs = fold_inputs(arrays.take, *five)
        host_backend.run(fold_kernel.launch(inputs, fold_kernel.row_tile(inputs)))

    return run_unchecked(kernels, call, ops.gated_delta_state_fold, on_host)


def run_unchecked(kernels: str, call: dict[str, Array], op: Any, on_host: Any) -> dict[str, Array]:
    """Run a call on arrays amid canaries; returns its arrays afterwards, those that it may write among them."""
    clean = {name: amid_canaries(name, values) for name, values in call.items()}

    def run(function: Any, given: dict[str, Any]) -> None:
        by_place = (array for name, array in given.items() if name not in BY_NAME)
        function(*by_place, **{name: array for name, array in given.items() if name in BY_NAME})

    if kernels == "cuda":
        on_gpu = {name: buffer.on_gpu() for name, buffer in clean.items()}
        run(op, {name: array for name, (_, array) in on_gpu.items()})
        memories = {name: memory.get() for name, (memory, _) in on_gpu.items()}
    else:
        copies = {name: buffer.copy() for name, buffer in clean.items()}
        run(on_host, {name: buffer.array for name, buffer in copies.items()})
        memories = {name: buffer.memory for name, buffer in copies.items()}
    results = {name: replace(clean[name], memory=memories[name]).array.copy() for name in call}
    written = {"recurrent_state", "out"} | ({"ring"} if "ring_slot_idx" in call else set())
    for name in written & call.keys():
        clean[name].array[...] = results[name]
    assert_passed(*(bitwise(memories[name], clean[name].memory, f"memory of {name}") for name in clean))
    return results


def assert_same(got: dict[str, Array], expected: dict[str, Array]) -> None:
    for name in ("recurrent_state", "ring", "out"):
        if name in got:
            assert_passed(bitwise(got[name], expected[name], name))


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("far", [RING_ROWS, RING_ROWS + 1, *FAR])
def test_a_ring_row_outside_the_ring_is_padding_in_verify(kernels: str, far: int, index_type: Any) -> None:
    offsets, slots = [0, 4, 7, 12], [1, 0, 3]
    got = verify_unchecked(kernels, slots, offsets, [2, far, far], index_type)
    assert_same(got, verify_unchecked(kernels, slots, offsets, [2, gdn.PAD_SLOT, gdn.PAD_SLOT], index_type))
    start = tokens_and_pools()
    assert (got["out"][:4] != 0).all()
    assert (got["out"][4:] == 0).all()
    assert_passed(bitwise(got["recurrent_state"], start["recurrent_state"], "pool: the row of 5 is padding too"))
    assert_passed(bitwise(np.delete(got["ring"], 2, 0), np.delete(start["ring"], 2, 0), "other ring rows"))


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("far", [MAX_SLOTS, MAX_SLOTS + 1, *FAR])
def test_a_slot_outside_the_pool_is_padding_in_verify(kernels: str, far: int, index_type: Any) -> None:
    offsets, ring_rows = [0, 4, 7, 12], [2, 0, 4]
    got = verify_unchecked(kernels, [1, far, far], offsets, ring_rows, index_type)
    start = tokens_and_pools()
    assert (got["out"][:4] != 0).all()
    assert (got["out"][4:] == 0).all()
    assert_passed(bitwise(got["recurrent_state"], start["recurrent_state"], "pool"))
    assert_passed(bitwise(np.delete(got["ring"], 2, 0), np.delete(start["ring"], 2, 0), "other ring rows"))


def test_offsets_past_the_end_are_clamped_in_verify(kernels: str) -> None:
    """A row that is longer than the ring by its offsets, and not once they are clamped, is a window."""
    got = verify_unchecked(kernels, [1, 0], [0, 9, 2**31 - 1], [2, 0])
    assert_same(got, verify_unchecked(kernels, [1, 0], [0, 9, TOTAL], [2, 0]))
    changed = (got["recurrent_state"] != tokens_and_pools()["recurrent_state"]).any(axis=(1, 2, 3))
    assert changed.tolist() == [False, True, False, False]


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("far", [max(MAX_SLOTS, RING_ROWS), *FAR])
@pytest.mark.parametrize("table", ["row_ids", "ring_row_ids"])
def test_an_entry_out_of_range_is_padding_in_fold(kernels: str, table: str, far: int, index_type: Any) -> None:
    tables = {"row_ids": [[0, 1], [2, 3]], "ring_row_ids": [[4, 1], [0, 2]], "counts": [3, 4]}
    expected = fold_unchecked(kernels, **tables, index_type=index_type)["recurrent_state"]
    start = tokens_and_pools()["recurrent_state"]
    tables[table] = [[tables[table][0][0], far], [far, tables[table][1][1]]]
    got = fold_unchecked(kernels, **tables, index_type=index_type)["recurrent_state"]
    assert_passed(
        bitwise(got[[0, 3]], expected[[0, 3]], "healthy rows"), bitwise(got[[1, 2]], start[[1, 2]], "other slots")
    )
    assert (got[[0, 3]] != start[[0, 3]]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("count", [0, RING_LEN + 1, 64, 65, *FAR, 2**32 - 1])
def test_counts_that_skip_their_rows(kernels: str, count: int, index_type: Any) -> None:
    """Field case 32: a count above RING_LEN reads no record of the next ring row, whatever the slots are."""
    got = fold_unchecked(kernels, [[0, 1], [2, 3]], [[4, 1], [0, 2]], [count, 4], index_type)
    start = tokens_and_pools()["recurrent_state"]
    assert_passed(bitwise(got["recurrent_state"][[0, 2]], start[[0, 2]], "skipped rows"))
    assert (got["recurrent_state"][[1, 3]] != start[[1, 3]]).any(axis=(1, 2, 3)).all()


def test_a_shared_slot_leaves_the_healthy_rows_right(kernels: str) -> None:
    """Field cases 12, 13: rows that share a slot leave only that slot undefined."""
    got = fold_unchecked(kernels, [[0, 1], [1, 3]], [[4, 1], [0, 2]], [3, 4])["recurrent_state"]
    expected = fold_unchecked(kernels, [[0, 1], [2, 3]], [[4, 1], [0, 2]], [3, 4])["recurrent_state"]
    assert_passed(
        bitwise(got[[0, 3]], expected[[0, 3]], "healthy rows"),
        bitwise(got[2], tokens_and_pools()["recurrent_state"][2], "unused slot"),
    )


def test_a_shared_ring_row_leaves_the_other_ones_right(kernels: str) -> None:
    """Beside field cases 12, 13: windows that share a ring row leave only its records undefined, and read out right."""
    slots, offsets = [1, 0, 3, 2], [0, 4, 6, 9, 12]
    got = verify_unchecked(kernels, slots, offsets, [2, 0, 0, 4])
    expected = verify_unchecked(kernels, slots, offsets, [2, 0, 3, 4])
    start = tokens_and_pools()
    assert_passed(
        bitwise(got["out"], expected["out"], "readout"),
        bitwise(got["recurrent_state"], start["recurrent_state"], "pool"),
        bitwise(got["ring"][[2, 4]], expected["ring"][[2, 4]], "healthy ring rows"),
        bitwise(got["ring"][[1, 3]], start["ring"][[1, 3]], "unused ring rows"),
        bitwise(got["ring"][0, :, 3:], start["ring"][0, :, 3:], "records behind both windows"),
    )
    assert (got["ring"][2] != start["ring"][2]).any()


def test_random_bits_touch_nothing_beside_the_arrays(kernels: str) -> None:
    """Whatever 32 bits stand in the tables: no fault, no canary harmed, no row left as it was found."""
    random = np.random.default_rng(0)

    def bits(shape: Any, limit: int) -> Array:
        near = random.integers(-2, limit + 3, shape) & 0xFFFFFFFF
        return np.where(random.random(shape) < 0.7, near, random.integers(0, 2**32, shape))

    for number in range(20):
        index_type = (np.uint32, np.int32)[number % 2]
        batch_size, num_layers = (int(size) for size in random.integers(1, 5, 2))
        slots, ring_rows = bits(batch_size, MAX_SLOTS), bits(batch_size, RING_ROWS)
        got = verify_unchecked(kernels, slots, bits(batch_size + 1, TOTAL), ring_rows, index_type)
        assert np.isfinite(got["out"]).all()
        tables = bits((num_layers, batch_size), MAX_SLOTS), bits((num_layers, batch_size), RING_ROWS)
        fold_unchecked(kernels, *tables, bits(batch_size, RING_LEN), index_type)


# ---- Pending records ----

#: Windows of 2 tokens, 1 and 5 in ring rows 2, 0 and 4: the last is longer than the ring.
SLOTS, OFFSETS, WINDOW_ROWS = [1, 0, 3], [0, 2, 3, 8], [2, 0, 4]
BAD_COUNTS = (RING_LEN + 1, 64, 65, *FAR, 2**32 - 1)


def with_pending(kernels: str, op: str, pending: Pending, index_type: Any = np.uint32) -> dict[str, Array]:
    """What a verify or a forward call leaves of those windows."""
    if op == "fwd":
        return fwd_unchecked(kernels, SLOTS, OFFSETS, pending, index_type)
    return verify_unchecked(kernels, SLOTS, OFFSETS, WINDOW_ROWS, index_type, pending)


@pytest.mark.parametrize("op", ["verify", "fwd"])
@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("far", [RING_ROWS, RING_ROWS + 1, *FAR, gdn.PAD_SLOT])
def test_nothing_is_pending_in_a_ring_row_outside_the_ring(kernels: str, op: str, far: int, index_type: Any) -> None:
    got = with_pending(kernels, op, ([far, 1, far], [3, 2, 4]), index_type)
    assert_same(got, with_pending(kernels, op, ([3, 1, 3], [0, 2, 0])))
    other = with_pending(kernels, op, ([3, 1, gdn.PAD_SLOT], [3, 2, 4]))
    assert (got["out"][:2] != other["out"][:2]).any()


@pytest.mark.parametrize("op", ["verify", "fwd"])
@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("count", BAD_COUNTS)
@pytest.mark.parametrize("rows", [[3, 1, gdn.PAD_SLOT], [2, 0, 4]], ids=["another row", "same row"])
def test_counts_that_say_nothing_is_pending(
    kernels: str, op: str, rows: list[int], count: int, index_type: Any
) -> None:
    """0xFFFFFFFF, which is -1, among them: no record is read, and none of the next ring row."""
    got = with_pending(kernels, op, (rows, [count, 2, count]), index_type)
    assert_same(got, with_pending(kernels, op, (rows, [0, 2, 0])))
    assert (got["out"][:2] != with_pending(kernels, op, (rows, [2, 2, 0]))["out"][:2]).any()


@pytest.mark.parametrize("far", [RING_ROWS, *FAR, gdn.PAD_SLOT])
@pytest.mark.parametrize("table", ["slots", "ring rows"])
def test_padding_folds_nothing(kernels: str, table: str, far: int) -> None:
    """A slot or a window's ring row that is none keeps every record pending where it is."""
    slots, ring_rows = ([1, far, 3], WINDOW_ROWS) if table == "slots" else (SLOTS, [2, far, 4])
    pending = [3, 1, gdn.PAD_SLOT], [3, 2, 0]
    got = verify_unchecked(kernels, slots, OFFSETS, ring_rows, pending=pending)
    start = tokens_and_pools()
    assert (got["out"][2] == 0).all()
    assert_passed(
        bitwise(got["recurrent_state"][[0, 2]], start["recurrent_state"][[0, 2]], "other slots"),
        bitwise(got["ring"][[0, 1, 3, 4]], start["ring"][[0, 1, 3, 4]], "other ring rows"),
    )
    assert (got["recurrent_state"][[1, 3]] != start["recurrent_state"][[1, 3]]).any(axis=(1, 2, 3)).all()
    if table == "slots":
        got = fwd_unchecked(kernels, slots, OFFSETS, pending)
        assert (got["out"][2] == 0).all()
        assert_passed(bitwise(got["recurrent_state"][[0, 2]], start["recurrent_state"][[0, 2]], "other slots"))


@pytest.mark.parametrize("op", ["verify", "fwd"])
def test_a_window_that_ends_before_it_begins_folds(kernels: str, op: str) -> None:
    """It is an empty one."""
    pending = [3, 1, gdn.PAD_SLOT], [3, 2, 0]
    for offsets, empty in (([0, 4, 2, 12], [0, 4, 4, 12]), ([0, 4, 2**31 - 1, 7], [0, 4, 12, 12])):
        results = [
            fwd_unchecked(kernels, SLOTS, table, pending)
            if op == "fwd"
            else verify_unchecked(kernels, SLOTS, table, WINDOW_ROWS, pending=pending)
            for table in (offsets, empty)
        ]
        # The last window begins elsewhere: only what the first two leave is the same.
        for name, entries in (("recurrent_state", [0, 1, 2]), ("ring", [0, 1, 2, 3])):
            assert_passed(bitwise(results[0][name][entries], results[1][name][entries], name))
        assert (results[0]["recurrent_state"][0] != tokens_and_pools()["recurrent_state"][0]).any()


def test_a_window_that_fits_behind_what_is_pending_once_it_is_clamped(kernels: str) -> None:
    """By its offsets it would commit itself."""
    pending = [3, 0], [1, 2]
    got = verify_unchecked(kernels, [1, 0], [0, TOTAL - 2, 2**31 - 1], [2, 0], pending=pending)
    assert_same(got, verify_unchecked(kernels, [1, 0], [0, TOTAL - 2, TOTAL], [2, 0], pending=pending))
    start = tokens_and_pools()
    assert_passed(bitwise(got["recurrent_state"][0], start["recurrent_state"][0], "its slot"))
    recorded = (got["ring"][0] != start["ring"][0]).any(axis=(0, 2))
    assert recorded.tolist() == [False, False, True, True]


def test_random_bits_of_pending_records_touch_nothing_beside_the_arrays(kernels: str) -> None:
    """Whatever 32 bits stand in the tables: no fault, no canary harmed, no row left as it was found."""
    random = np.random.default_rng(1)

    def bits(shape: Any, limit: int) -> Array:
        near = random.integers(-2, limit + 3, shape) & 0xFFFFFFFF
        return np.where(random.random(shape) < 0.8, near, random.integers(0, 2**32, shape))

    for number in range(20):
        index_type = (np.uint32, np.int32)[number % 2]
        batch_size = int(random.integers(1, 7))
        slots, ring_rows, offsets = (
            bits(batch_size, MAX_SLOTS),
            bits(batch_size, RING_ROWS),
            bits(batch_size + 1, TOTAL),
        )
        pending_rows = np.where(random.random(batch_size) < 0.4, ring_rows, bits(batch_size, RING_ROWS))
        pending = pending_rows, bits(batch_size, RING_LEN)
        assert not np.isnan(verify_unchecked(kernels, slots, offsets, ring_rows, index_type, pending)["out"]).any()
        assert not np.isnan(fwd_unchecked(kernels, slots, offsets, pending, index_type)["out"]).any()
