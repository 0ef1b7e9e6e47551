"""Index values that ops refuse, given to the kernels all the same: nothing beside the arrays is touched.

A GPU call does not look at index values, so kernels meet whatever they hold. Offsets are clamped to
[0, total_seq_len], a decreasing pair is an empty sequence, a slot outside the pool is padding, and every row
that no live sequence owns becomes zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import arrays, ops, oracle
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import host as host_backend
from gdn.backends import recurrence as recurrence_launch
from gdn.geometry import HeadGeometry
from gdn.recurrence import recurrence_inputs
from gdn.testing import assert_passed, bitwise, close, storage_tolerance
from gdn.testing.buffers import Array, lay_out

HEADS = HeadGeometry(1, 2, 16, 32)
TOTAL, MAX_SLOTS = 70, 4
CANARY = 7.0
LAYOUTS = {1: "every_other", 2: "slice", 4: "gaps"}


@dataclass(frozen=True)
class Outcome:
    """What an unchecked call left, and the arrays it started from."""

    before: dict[str, Array]
    out: Array
    pool: Array


def run_unchecked(kernels: str, slots: list[int], offsets: list[int], index_type: Any = np.uint32) -> Outcome:
    """Launch the kernel on arrays amid canaries, without a look at the indices; asserts that the canaries live."""
    random = np.random.default_rng(3)
    before = {
        "qkv_conv_output": random.standard_normal((TOTAL, HEADS.conv_dim)).astype(np.float32),
        "decay_per_token": random.uniform(0.5, 1, (TOTAL, 2)).astype(np.float32),
        "beta_per_token": random.uniform(0, 1, (TOTAL, 2)).astype(np.float32),
        "recurrent_state": random.standard_normal((MAX_SLOTS, 2, 16, 32)).astype(np.float32),
        "slot_idx": np.array(slots, np.int64).astype(np.uint32).view(index_type),
        "input_row_offsets": np.array(offsets, np.int64).astype(np.uint32).view(index_type),
        "out": np.full((TOTAL, HEADS.value_dim), np.nan, np.float32),
    }
    clean = {name: lay_out(values, LAYOUTS[values.ndim], CANARY) for name, values in before.items()}
    memories = _launch(kernels, {name: buffer.copy() for name, buffer in clean.items()})
    results = {name: replace(clean[name], memory=memories[name]).array for name in ("out", "recurrent_state")}
    for name, result in results.items():
        clean[name].array[...] = result
    assert_passed(*(bitwise(memories[name], clean[name].memory, f"memory of {name}") for name in clean))
    return Outcome(before, results["out"], results["recurrent_state"])


def _launch(kernels: str, buffers: dict[str, Any]) -> dict[str, Array]:
    """Run on the arrays of the buffers; returns all their memory as it is afterwards."""
    if kernels == "cuda":
        on_gpu = {name: buffer.on_gpu() for name, buffer in buffers.items()}
        *six, out = (array for _, array in on_gpu.values())
        ops.gated_delta_recurrence_fwd(*six, out=out)
        return {name: memory.get() for name, (memory, _) in on_gpu.items()}
    *six, out = (buffer.array for buffer in buffers.values())
    inputs = recurrence_inputs(arrays.take, *six)
    launch = fwd_kernel.launch(inputs, arrays.take("out", out), recurrence_launch.row_tile(inputs))
    host_backend.run(launch)
    return {name: buffer.memory for name, buffer in buffers.items()}


def alone(before: dict[str, Array], slot: int, begin: int, end: int) -> tuple[Array, Array]:
    """The oracle's readout and state of one sequence on rows [begin, end)."""
    rows = slice(begin, end)
    out, pool = oracle.gated_delta_recurrence_fwd(
        *(before[name][rows] for name in ("qkv_conv_output", "decay_per_token", "beta_per_token")),
        before["recurrent_state"],
        np.array([slot], np.uint32),
        np.array([0, end - begin], np.uint32),
    )
    return out, pool[slot]


def assert_only(outcome: Outcome, *live: tuple[int, int, int]) -> None:
    """The call did what sequences (slot, begin, end) do, all other rows are zero, other slots as they were."""
    unowned = np.ones(TOTAL, bool)
    expected_pool = outcome.before["recurrent_state"].copy()
    tolerance = storage_tolerance("float32")
    for slot, begin, end in live:
        readout, state = alone(outcome.before, slot, begin, end)
        assert_passed(
            close(outcome.out[begin:end], readout, tolerance, f"readout of rows {begin} to {end}"),
            close(outcome.pool[slot], state, tolerance, f"state of slot {slot}"),
        )
        unowned[begin:end] = False
        expected_pool[slot] = outcome.pool[slot]
    assert_passed(
        bitwise(outcome.out[unowned], np.zeros_like(outcome.out[unowned]), "unowned rows"),
        bitwise(outcome.pool, expected_pool, "other slots"),
    )


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
@pytest.mark.parametrize("slot", [MAX_SLOTS, MAX_SLOTS + 1, 100, 2**20, 2**31 - 1, 2**31, 2**32 - 2, gdn.PAD_SLOT])
def test_a_slot_outside_the_pool_is_padding(kernels: str, slot: int, index_type: Any) -> None:
    outcome = run_unchecked(kernels, [1, slot, 3], [0, 5, 60, 70], index_type)
    assert_only(outcome, (1, 0, 5), (3, 60, 70))


@pytest.mark.parametrize("far", [71, 1000, 2**31 - 1])
@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_offsets_past_the_end_are_clamped(kernels: str, far: int, index_type: Any) -> None:
    """Field case 71: malformed offsets are treated as the contract says."""
    outcome = run_unchecked(kernels, [0, 2, 3], [3, 9, far, far], index_type)
    assert_only(outcome, (0, 3, 9), (2, 9, 70))
    outcome = run_unchecked(kernels, [0, 2], [far, far, far], index_type)
    assert_only(outcome)


@pytest.mark.parametrize("far", [-1, -2, -70, -(2**31)])
def test_negative_offsets_are_clamped_to_the_start(kernels: str, far: int) -> None:
    outcome = run_unchecked(kernels, [0, 2, 1], [far, far, 9, 30], np.int32)
    assert_only(outcome, (2, 0, 9), (1, 9, 30))


def test_the_same_bits_unsigned_are_far_past_the_end(kernels: str) -> None:
    outcome = run_unchecked(kernels, [0, 2, 1], [5, -1, 9, 30], np.uint32)
    readout, state = alone(outcome.before, 0, 5, 70)
    tolerance = storage_tolerance("float32")
    assert_passed(
        close(outcome.pool[0], state, tolerance, "state of the clamped sequence"),
        close(outcome.out[30:], readout[25:], tolerance, "rows that it alone owns"),
        close(outcome.pool[1], alone(outcome.before, 1, 9, 30)[1], tolerance, "state of the sequence inside it"),
        bitwise(outcome.pool[[2, 3]], outcome.before["recurrent_state"][[2, 3]], "slots without rows"),
    )


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_a_decreasing_pair_is_an_empty_sequence(kernels: str, index_type: Any) -> None:
    outcome = run_unchecked(kernels, [0, 1, 2], [40, 50, 10, 33], index_type)
    assert_only(outcome, (0, 40, 50), (2, 10, 33))


def test_falling_offsets_own_nothing(kernels: str) -> None:
    outcome = run_unchecked(kernels, [0, 1, 2], [69, 40, 20, 0])
    assert_only(outcome)


def test_rows_of_two_sequences_hold_what_one_of_them_wrote(kernels: str) -> None:
    outcome = run_unchecked(kernels, [0, 1, 2], [0, 30, 10, 50])
    tolerance = storage_tolerance("float32")
    first, first_state = alone(outcome.before, 0, 0, 30)
    last, last_state = alone(outcome.before, 2, 10, 50)
    assert_passed(
        close(outcome.pool[0], first_state, tolerance, "state of the first"),
        close(outcome.pool[2], last_state, tolerance, "state of the last"),
        bitwise(outcome.pool[[1, 3]], outcome.before["recurrent_state"][[1, 3]], "other slots"),
        close(outcome.out[:10], first[:10], tolerance, "rows of the first alone"),
        close(outcome.out[30:50], last[20:], tolerance, "rows of the last alone"),
        bitwise(outcome.out[50:], np.zeros_like(outcome.out[50:]), "unowned rows"),
    )
    scale = max(np.abs(first).max(), np.abs(last).max())
    from_first, from_last = (np.abs(outcome.out[10:30] - wrote) / scale for wrote in (first[10:], last[:20]))
    assert (np.minimum(from_first, from_last) <= tolerance.max_element).all()


def test_a_shared_slot_leaves_the_healthy_rows_right(kernels: str) -> None:
    """Field cases 12, 13: slots [3, 3] beside healthy ones; only slot 3 and its readout are undefined."""
    outcome = run_unchecked(kernels, [1, 3, 3, 0], [0, 20, 21, 40, 70])
    tolerance = storage_tolerance("float32")
    for slot, begin, end in ((1, 0, 20), (0, 40, 70)):
        readout, state = alone(outcome.before, slot, begin, end)
        assert_passed(
            close(outcome.out[begin:end], readout, tolerance, "readout"),
            close(outcome.pool[slot], state, tolerance, "state"),
        )
    assert_passed(bitwise(outcome.pool[2], outcome.before["recurrent_state"][2], "unused slot"))


def test_random_bits_touch_nothing_beside_the_arrays(kernels: str) -> None:
    """Whatever 32 bits stand in the tables: no fault, no canary harmed, no row left as it was found."""
    random = np.random.default_rng(0)
    for _ in range(20):
        batch_size = int(random.integers(0, 6))
        slots = _bits(random, batch_size, MAX_SLOTS)
        offsets = _bits(random, batch_size + 1, TOTAL)
        outcome = run_unchecked(kernels, slots, offsets, (np.uint32, np.int32)[int(random.integers(2))])
        assert np.isfinite(outcome.out).all()


def _bits(random: np.random.Generator, count: int, limit: int) -> list[int]:
    """Values near and far from [0, limit), as 32 bits."""
    near = random.integers(-2, limit + 3, count) & 0xFFFFFFFF
    far = random.integers(0, 2**32, count)
    return [int(value) for value in np.where(random.random(count) < 0.7, near, far)]
