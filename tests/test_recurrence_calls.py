"""Calls of `gated_delta_recurrence_fwd` one after the other and side by side: nothing stale, nothing shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import arrays as gdn_arrays
from gdn import ops, oracle
from gdn.geometry import HeadGeometry
from gdn.testing import FLOAT32_TOLERANCE, assert_passed, bitwise, close, storage_tolerance
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.checks import reference_of
from gdn.testing.execute import ARGUMENTS, Layouts, execute, on_backend
from gdn.testing.ring_device import Device

if TYPE_CHECKING:
    from tests.conftest import Call

SMALL = HeadGeometry(2, 4, 32, 32)


def test_an_earlier_readout_is_not_changed(new_call: type[Call], backend: str) -> None:
    """Field case 85: o1 = fwd(x1), o2 = fwd(x2): o1 keeps its bytes."""
    calls = [new_call(seed=seed) for seed in (0, 1)]
    for call in calls:
        if backend == "cuda":
            import cupy

            call.arguments = {name: cupy.asarray(value) for name, value in call.arguments.items()}
        call["out"] = None
    with on_backend(backend):
        first = ops.gated_delta_recurrence_fwd(*calls[0].six)
        kept = first.copy()
        second = ops.gated_delta_recurrence_fwd(*calls[1].six)
    assert second is not first
    assert bool((first == kept).all())
    assert bool((first != second).any())


@pytest.mark.parametrize("reset", [True, False])
def test_a_slot_used_again(backend: str, reset: bool) -> None:
    """Field cases 17, 18: a second sequence on a slot starts from whatever the slot holds."""
    case = RecurrenceCase("reuse", SMALL, (9, 1, 1), spare_slots=1)
    first = build_arrays(case)
    pool = execute(backend, first, "float32").recurrent_state
    second = build_arrays(replace(case, lengths=(1, 1, 1), seed=1))
    slots = np.where(np.isnan(pool).all(axis=(1, 2, 3)))[0].tolist() + first.slot_idx[:2].tolist()
    pool[slots[0]] = 0  # a fresh slot beside two used ones
    if reset:
        pool[slots[1]] = 0
    second = replace(second, recurrent_state=pool, slot_idx=np.array(slots, np.uint32))
    reference_out, reference_pool = oracle.gated_delta_recurrence_fwd(*second.as_tuple())
    outcome = execute(backend, second, "float32")
    assert_passed(
        close(outcome.out, reference_out, storage_tolerance("float32"), "readout"),
        close(outcome.recurrent_state, reference_pool, storage_tolerance("float32"), "state"),
    )


def test_rows_in_one_call_and_one_by_one(backend: str) -> None:
    """Field case 70: lengths [1, 1, 512, 1, 0, 37] in one call and in six give the same bits."""
    case = RecurrenceCase("ragged", SMALL, (1, 1, 512, 1, 0, 37))
    arrays = build_arrays(case)
    together = execute(backend, arrays, "float32")
    pool = arrays.recurrent_state
    readouts = []
    for sequence, length in enumerate(case.lengths):
        rows = slice(*arrays.input_row_offsets[sequence : sequence + 2])
        single = replace(
            arrays,
            qkv_conv_output=arrays.qkv_conv_output[rows],
            decay_per_token=arrays.decay_per_token[rows],
            beta_per_token=arrays.beta_per_token[rows],
            recurrent_state=pool,
            slot_idx=arrays.slot_idx[sequence : sequence + 1],
            input_row_offsets=np.array([0, length], np.uint32),
        )
        outcome = execute(backend, single, "float32")
        pool = outcome.recurrent_state
        readouts.append(outcome.out)
    assert_passed(
        bitwise(np.concatenate(readouts), together.out, "readout"),
        bitwise(pool, together.recurrent_state, "state"),
    )


# ---- Stale memory ----


@pytest.fixture
def _stale_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """New arrays hold NaN, as memory that was used before may."""
    new_array = gdn_arrays.empty

    def stale(*arguments: Any) -> Any:
        array = new_array(*arguments)
        array[...] = np.nan
        return array

    monkeypatch.setattr(gdn_arrays, "empty", stale)


def run_without_out(backend: str, arrays: RecurrenceArrays) -> tuple[Any, Any]:
    """Readout that the op allocated itself, and pool, of a call on copies."""
    six = [array.copy() for array in arrays.as_tuple()]
    if backend != "cuda":
        with on_backend(backend):
            return ops.gated_delta_recurrence_fwd(*six), six[3]
    import cupy

    six = [cupy.asarray(array) for array in six]
    out = ops.gated_delta_recurrence_fwd(*six)
    return out.get(), six[3].get()


@pytest.mark.usefixtures("_stale_memory")
def test_uncovered_rows_are_zero_in_a_new_readout(backend: str) -> None:
    """Field case 9: memory full of NaN, offsets that cover T - 3 of T rows."""
    arrays = build_arrays(RecurrenceCase("uncovered", SMALL, (4, 7), leading_rows=1, trailing_rows=2))
    out, _ = run_without_out(backend, arrays)
    assert_passed(bitwise(out[[0, -2, -1]], np.zeros_like(out[:3]), "uncovered rows"))
    assert np.isfinite(out).all()


@pytest.mark.usefixtures("_stale_memory")
def test_the_first_call_equals_the_tenth(backend: str) -> None:
    """Field cases 21, 22: lengths [1, 0, 63, 13], all other slots NaN, new arrays NaN."""
    arrays = build_arrays(RecurrenceCase("repeated", SMALL, (1, 0, 63, 13), spare_slots=3))
    used = arrays.slot_idx[[0, 2, 3]]
    arrays.recurrent_state[np.setdiff1d(np.arange(7), used)] = np.nan
    first_out, first_pool = run_without_out(backend, arrays)
    assert np.isfinite(first_out).all()
    assert np.isfinite(first_pool[used]).all()
    assert np.isnan(np.delete(first_pool, used, axis=0)).all()
    for _ in range(9):
        out, pool = run_without_out(backend, arrays)
        assert_passed(bitwise(out, first_out, "readout"), bitwise(pool, first_pool, "pool"))


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_slots_as_a_view_of_a_longer_array(backend: str, index_type: Any) -> None:
    """Field case 10: slot_idx is the view [:3] of an array whose other entries are slots in use and nonsense."""
    arrays = build_arrays(RecurrenceCase("view", SMALL, (2, 1, 3), spare_slots=3))
    longer = np.array([*arrays.slot_idx, *np.setdiff1d(range(6), arrays.slot_idx), 99], np.uint32).view(index_type)
    plain = run_without_out(backend, arrays)
    if backend == "cuda":
        import cupy

        longer = cupy.asarray(longer)
        six = [cupy.asarray(array) for array in arrays.as_tuple()]
    else:
        six = [array.copy() for array in arrays.as_tuple()]
    six[4] = longer[:3]
    with on_backend(backend):
        out = ops.gated_delta_recurrence_fwd(*six)
    got = [array.get() if backend == "cuda" else array for array in (out, six[3])]
    assert_passed(*(bitwise(*pair) for pair in zip(got, plain, strict=True)))


@pytest.mark.parametrize("algorithm", ["recurrent", "chunked"])
@pytest.mark.parametrize("layout", ["backwards", "one row for all", "one head for all"])
def test_inputs_of_any_strides(backend: str, algorithm: str, layout: str) -> None:
    """Beside field case 79: strides below 0 and of 0, which are no slices of a wider array, equal the packed copies."""
    packed = build_arrays(RecurrenceCase("strides", HeadGeometry(1, 2, 32, 32), (70, 3)))
    names = ("qkv_conv_output", "decay_per_token", "beta_per_token")
    if layout == "one head for all":
        names = names[1:]
    for name in names:
        values = getattr(packed, name)
        if layout != "backwards":
            values[...] = values[:1] if layout == "one row for all" else values[:, :1]

    def as_laid_out(array: Any) -> Any:
        if layout == "backwards":
            return array[::-1, ::-1].copy()[::-1, ::-1]
        one = array[:1] if layout == "one row for all" else array[:, :1]
        xp = np if backend != "cuda" else __import__("cupy")
        return xp.broadcast_to(one, array.shape)

    results = []
    for lay_out in (lambda array: array, as_laid_out):
        device = Device(backend)
        six = {name: device.put(getattr(packed, name)) for name in ARGUMENTS}
        six |= {name: lay_out(six[name]) for name in names}
        with on_backend(backend):
            out = ops.gated_delta_recurrence_fwd(*six.values(), algorithm=algorithm)
        results.append([device.get(out), device.get(six["recurrent_state"])])
    assert all(min(six[name].strides) <= 0 for name in names)
    assert_passed(*(bitwise(*pair) for pair in zip(*results, strict=True)))


# ---- Non-finite values ----


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
@pytest.mark.parametrize("where", ["query", "key", "value", "decay", "beta", "state"])
def test_extreme_values_stay_in_their_sequence_and_head(backend: str, where: str, value: float) -> None:
    """Field case 51: one extreme value leaves every other sequence and group of heads bit-equal to a clean run."""
    case = RecurrenceCase("extreme", SMALL, (3, 5, 2))
    clean = build_arrays(case)
    dirty = RecurrenceArrays(*(array.copy() for array in clean.as_tuple()))
    slot, row = int(clean.slot_idx[1]), 4
    channels = {"query": 32, "key": 64 + 32, "value": 128 + 2 * 32}
    if where in channels:
        dirty.qkv_conv_output[row, channels[where] + 3] = value
    elif where == "state":
        dirty.recurrent_state[slot, 2, 5, 6] = value
    else:
        getattr(dirty, f"{where}_per_token")[row, 2] = value
    clean_outcome, outcome = (execute(backend, arrays, "float32") for arrays in (clean, dirty))
    same_rows = outcome.out.copy()
    same_rows[3:8, 64:] = clean_outcome.out[3:8, 64:]
    same_pool = outcome.recurrent_state.copy()
    same_pool[slot, 2:] = clean_outcome.recurrent_state[slot, 2:]
    assert_passed(
        bitwise(same_rows, clean_outcome.out, "readout elsewhere"),
        bitwise(same_pool, clean_outcome.recurrent_state, "state elsewhere"),
    )
    assert not bitwise(outcome.out, clean_outcome.out)


# ---- Many calls ----


def test_a_random_order_of_unlike_calls(backend: str) -> None:
    """Field cases 64, 65: calls of different types, sizes and strides, each as if it were the first."""
    cases = [
        RecurrenceCase("plain", SMALL, (3, 1)),
        RecurrenceCase("bfloat16 pool", SMALL, (3, 1), state_dtype="bfloat16"),
        RecurrenceCase("group of 3", HeadGeometry(1, 3, 32, 32), (3, 1)),
        RecurrenceCase("strided", SMALL, (3, 1), qkv_layout="every_other", state_layout="unaligned"),
        RecurrenceCase("wider", HeadGeometry(1, 1, 32, 64), (3, 1)),
        RecurrenceCase("taller", HeadGeometry(1, 1, 64, 32), (3, 1)),
    ]
    arrays = [build_arrays(case) for case in cases]
    first = [execute(backend, a, "float32", Layouts.of(case)) for a, case in zip(arrays, cases, strict=True)]
    for idx in np.random.default_rng(0).integers(0, len(cases), 60):
        again = execute(backend, arrays[idx], "float32", Layouts.of(cases[idx]))
        assert_passed(
            bitwise(again.out, first[idx].out, f"{cases[idx].name}: readout"),
            bitwise(again.recurrent_state, first[idx].recurrent_state, f"{cases[idx].name}: state"),
        )


def test_a_random_order_of_unlike_ops(backend: str, op_calls: dict[str, Callable[[str], Call]]) -> None:
    """Beside field cases 64, 65: every op and type, behind pending records too, in turn, each as if first.

    (On the CPU's kernels in float32 alone, as each type is a compile.)
    """

    def bits_after(name: str, dtype: str) -> list[bytes]:
        call = op_calls[name](dtype)
        if backend == "cuda":
            import cupy

            call.arguments = {of: cupy.asarray(array) for of, array in call.arguments.items()}
        call.run(backend)
        return [array.tobytes() for array in call.arguments.values()]

    kinds = list(product(op_calls, ("float32",) if backend == "host" else ("float32", "bfloat16")))
    first = [bits_after(*kind) for kind in kinds]
    for place in np.random.default_rng(0).integers(0, len(kinds), 60):
        assert bits_after(*kinds[place]) == first[place], kinds[place]


def test_one_bit_pattern_in_many_runs(backend: str) -> None:
    """Field cases 68, 72: a ragged batch run again and again; at full size where there is a GPU."""
    lengths, heads, runs = (1238, 1199, 1240, 1216, 1187, 1203, 519), HeadGeometry(16, 48, 128, 128), 100
    if backend != "cuda":
        lengths, heads, runs = tuple(length // 20 for length in lengths), HeadGeometry(1, 3, 32, 32), 20
    arrays = build_arrays(RecurrenceCase("ragged", heads, lengths))
    first = run_without_out(backend, arrays)
    for _ in range(runs - 1):
        again = run_without_out(backend, arrays)
        assert_passed(*(bitwise(*pair) for pair in zip(again, first, strict=True)))


def test_a_decay_of_zero_erases_a_state_however_large(backend: str) -> None:
    """Field cases 39, 40, 42: sums over such a state overflow, and must not come back as 0 x infinity."""
    case = RecurrenceCase("huge", HeadGeometry(1, 2, 128, 64), (3,), inputs="no_decay")
    arrays = build_arrays(case)
    arrays.decay_per_token[0] = 0
    arrays.qkv_conv_output[0] = np.abs(arrays.qkv_conv_output[0])
    arrays.recurrent_state[...] = 1e38
    readout, pool = reference_of(arrays)
    outcome = execute(backend, arrays, "float32")
    slot = arrays.slot_idx[0]
    assert_passed(
        close(outcome.out, readout, FLOAT32_TOLERANCE, "readout"),
        close(outcome.recurrent_state[slot], pool[slot], FLOAT32_TOLERANCE, "state"),
    )


def test_decay_comes_before_the_error(backend: str) -> None:
    """Field case 50: S = 1, k = q = e0, v = 0, decay 1/2, beta 1 leave 0 where decay after the error leaves -1/2."""
    case = RecurrenceCase("first", HeadGeometry(1, 1, 8, 8), (1,))
    arrays = build_arrays(case)
    arrays.qkv_conv_output[0] = [1, *[0] * 7, 1, *[0] * 15]
    arrays.decay_per_token[0], arrays.beta_per_token[0] = 0.5, 1
    slot = arrays.slot_idx[0]
    arrays.recurrent_state[slot] = 1
    outcome = execute(backend, arrays, "float32")
    # The epsilon leaves 5e-7 of the state, and float32 rounding of 1 its own 6e-8.
    np.testing.assert_allclose(outcome.recurrent_state[slot, 0, 0], 0, atol=1e-6)
    np.testing.assert_array_equal(outcome.recurrent_state[slot, 0, 1:], 0.5)
    np.testing.assert_allclose(outcome.out, 0, atol=1e-6)
