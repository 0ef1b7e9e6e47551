"""The sweep can fail: every deliberately broken kernel, backend or op is caught, and by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import host
from gdn.backends import numpy as numpy_backend
from gdn.backends.row_tile import default_row_tile, forced_row_tile
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, build_arrays
from gdn.testing.checks import against_oracle, reference_of, subject
from gdn.testing.execute import ARGUMENTS
from gdn.testing.sweep import CaseResult, run_sweep

SMALL = HeadGeometry(2, 4, 32, 32)
ROUNDING = RecurrenceCase("rounding", SMALL, (300,), state_dtype="bfloat16", inputs="no_decay")
PLAIN = RecurrenceCase("plain", SMALL, (3, 0, 17), leading_rows=1, trailing_rows=2)
MAPS = RecurrenceCase("maps", HeadGeometry(1, 1, 64, 64), (9,), thread_maps=3)
STEP, TOKENS, TILE, ROWS = "gated_delta_step.cuh", "recurrence.cuh", "row_tile.cuh", "ragged_rows.cuh"
KERNEL = "gated_delta_recurrence_fwd.cu"


def sweep(case: RecurrenceCase, backend: str) -> CaseResult:
    (result,) = run_sweep([case], [backend])
    return result


def failed_checks(result: CaseResult) -> set[str]:
    """Names of the checks that found something; the case itself must have run."""
    assert result.error is None
    assert result.passed == all(check.passed for check in result.checks)
    return {check.check for check in result.checks if not check.passed}


# ---- Broken kernels ----


@pytest.mark.parametrize("case", [PLAIN, MAPS], ids=["plain", "maps"])
def test_the_kernels_as_they_are_pass(case: RecurrenceCase, edit: Callable[..., None]) -> None:
    edit(STEP, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert failed_checks(sweep(case, "host")) == set()


BROKEN_ARITHMETIC = {
    "sign of the delta": (STEP, ("fmaf(-scalars.decay_over_key_norm", "fmaf(scalars.decay_over_key_norm")),
    "decay after the error": (STEP, ("__fmul_rn(decay, inverse_key_norm)", "inverse_key_norm")),
    "beta forgotten": (STEP, ("__fmul_rn(beta, inverse_key_norm)", "inverse_key_norm")),
    "no scale": (STEP, ("__fmul_rn(query_norm, __fsqrt_rn(static_cast<float>(KEY_HEAD_DIM)))", "query_norm")),
    "scale applied twice": (STEP, ("__fsqrt_rn(static_cast<float>(KEY_HEAD_DIM))", "static_cast<float>(KEY_HEAD_DIM)")),
    "readout before the update": (STEP, ("fmaf(scalars.query_dot_key, delta, ", "fmaf(0.0f, delta, ")),
    "heads interleaved": (
        TOKENS,
        ("work.value_head / group_size;", "work.value_head % 2;"),
    ),
    "query and key exchanged": (
        TOKENS,
        ("const WORK_TYPE* query;", "const WORK_TYPE* other;"),
        ("const WORK_TYPE* key;", "const WORK_TYPE* query;"),
        ("const WORK_TYPE* other;", "const WORK_TYPE* key;"),
    ),
    "last token of a long row skipped": (
        TOKENS,
        ("token < rows.end; ++token", "token < rows.end - (rows.end - rows.begin > 9); ++token"),
    ),
    "state not stored": (TILE, ("if (threadIdx.x >= WORKING_THREADS) return;", "return;")),
    "stored to the next slot": (
        KERNEL,
        (
            "store_state(state, pool)",
            "store_state(state, pool + ((slot + 1) % max_slots - slot) * state_slot_stride)",
        ),
    ),
    "rows left as they were": (ROWS, ("owned[threadIdx.x] = 0;", "owned[threadIdx.x] = ~0u;")),
}


@pytest.mark.parametrize("fault", BROKEN_ARITHMETIC)
def test_a_broken_kernel(fault: str, edit: Callable[..., None]) -> None:
    edit(*BROKEN_ARITHMETIC[fault])
    found = failed_checks(sweep(PLAIN, "host"))
    assert "oracle" in found
    assert ("untouched" in found) == (fault == "stored to the next slot")


def test_an_empty_sequence_whose_slot_is_stored_again(edit: Callable[..., None]) -> None:
    """Field case 66: the state of an empty sequence makes no round trip, whatever its type."""
    stored_again = """if (slot < 0) return;
    if (rows.begin >= rows.end) {
        STATE_TYPE* const idle =
            lane_state(recurrent_state, slot, state_slot_stride, work.value_head, work.tile_column);
        StoredState stored;
        stored.load(idle);
        LaneState halved;
        stored.widen(halved);
        for (int row = 0; row < ROWS_PER_LANE; ++row)
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) halved[row][column] *= 0.5f;
        return store_state(halved, idle);
    }"""
    edit(KERNEL, ("if (slot < 0 || rows.begin >= rows.end) return;", stored_again))
    assert "untouched" in failed_checks(sweep(RECURRENCE_CASES["empty_sequences"], "host"))


@pytest.mark.parametrize("vector", ["key_dot_key", "query_dot_query"])
def test_epsilon_outside_the_root(vector: str, edit: Callable[..., None]) -> None:
    """Field case 45."""
    inside = f"__fsqrt_rn(__fadd_rn({vector}, NORM_EPSILON))"
    edit(STEP, (inside, f"__fadd_rn(__fsqrt_rn({vector}), NORM_EPSILON)"))
    assert "oracle" in failed_checks(sweep(RECURRENCE_CASES["tiny_keys"], "host"))


def test_state_rounded_between_tokens(edit: Callable[..., None]) -> None:
    """Field case 48."""
    update = "state[row][column] = updated_element(state[row][column], key[row], delta[column], decay);"
    rounding = "STATE_TYPE stored; from_float(state[row][column], stored); state[row][column] = to_float(stored);"
    edit(TILE, (update, f"{{ {update} {rounding} }}"))
    assert "oracle" in failed_checks(sweep(ROUNDING, "host"))


def test_a_reduction_tree_that_depends_on_the_thread_map(edit: Callable[..., None]) -> None:
    """Chains of one thread added from left to right: right to the tolerance, other bits for other maps."""
    edit(
        STEP,
        ("thread_sums<CHAINS / 2, FIRST_ROW>(", "thread_sums<CHAINS - 1, FIRST_ROW>("),
        (
            "thread_sums<CHAINS / 2, FIRST_ROW + CHAINS / 2 * CHAIN_LENGTH>(",
            "thread_sums<1, FIRST_ROW + (CHAINS - 1) * CHAIN_LENGTH>(",
        ),
    )
    assert failed_checks(sweep(MAPS, "host")) == {"maps"}


def test_sums_that_depend_on_where_a_call_began(edit: Callable[..., None]) -> None:
    """Other bits from the fifth token of a call on: right to the tolerance, wrong when a row is split."""
    sums = "thread_sums<CHAINS_PER_LANE>(state, key, query, memory, readout);"
    edit(TOKENS, (sums, f"{sums} if (token >= rows.begin + 4) memory[0] *= 1.0f + 2e-7f;"))
    assert failed_checks(sweep(PLAIN, "host")) == {"E4"}


def test_sums_that_depend_on_the_place_in_the_batch(edit: Callable[..., None]) -> None:
    sums = "thread_sums<CHAINS_PER_LANE>(state, key, query, memory, readout);"
    edit(TOKENS, (sums, f"{sums} if (work.sequence > 0) memory[0] *= 1.0f + 2e-7f;"))
    assert failed_checks(sweep(PLAIN, "host")) == {"E3"}


def test_sums_that_depend_on_the_heads_beside_them(edit: Callable[..., None]) -> None:
    sums = "thread_sums<CHAINS_PER_LANE>(state, key, query, memory, readout);"
    edit(TOKENS, (sums, f"{sums} if (arrays.num_key_heads > 1) memory[0] *= 1.0f + 2e-7f;"))
    assert failed_checks(sweep(PLAIN, "host")) == {"E7"}


@pytest.mark.parametrize(
    "barrier",
    [("    __syncwarp();\n}", "}"), ("        __syncthreads();\n        #pragma unroll", "        #pragma unroll")],
    ids=["after staging a token", "between warps"],
)
def test_a_missing_barrier(barrier: tuple[str, str], edit: Callable[..., None]) -> None:
    edit(TOKENS, barrier)
    case = RecurrenceCase("barrier", HeadGeometry(1, 2, 64, 64), (40, 9))
    arrays = build_arrays(case)
    reference = reference_of(arrays)
    found = []
    for seed in range(1, 5):
        with host.options(order_seed=seed), forced_row_tile(default_row_tile(64, 64, 4)):
            found += against_oracle(subject(case, "host", arrays, reference))
    assert not all(found)


# ---- Broken NumPy ----


def rounding_every_token(token_step: Callable[..., Any]) -> Callable[..., Any]:
    def step(inputs: Any, rows: Any, state: Any) -> Any:
        token = token_step(inputs, rows, state)
        state[...] = state.astype(inputs.recurrent_state.array.dtype)
        return token

    return step


BROKEN_NUMPY: dict[str, tuple[str, Callable[[Any], Any], RecurrenceCase]] = {
    "epsilon": ("NORM_EPSILON", lambda old: old * 2, RECURRENCE_CASES["tiny_keys"]),
    "last row not summed": ("_tree_sum", lambda old: lambda p: old(p) - p[..., -1, :], PLAIN),
    "rounded every token": ("_run_token", rounding_every_token, ROUNDING),
    "rows left as they were": ("_clear_unowned_rows", lambda _: lambda *_: None, PLAIN),
}


@pytest.mark.parametrize("fault", BROKEN_NUMPY)
def test_broken_numpy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, case = BROKEN_NUMPY[fault]
    assert failed_checks(sweep(case, "numpy")) == set()
    monkeypatch.setattr(numpy_backend, name, broken(getattr(numpy_backend, name)))
    assert "oracle" in failed_checks(sweep(case, "numpy"))


# ---- Broken ops ----


def last_row_unwritten(arrays: dict[str, Any]) -> None:
    arrays["out"][-1] = np.nan


def foreign_slot_written(arrays: dict[str, Any]) -> None:
    used = set(arrays["slot_idx"].tolist())
    spare = next(slot for slot in range(len(arrays["recurrent_state"])) if slot not in used)
    arrays["recurrent_state"][spare, -1, -1, -1] = 0


def slot_of_an_empty_sequence_written(arrays: dict[str, Any]) -> None:
    empty = np.diff(arrays["input_row_offsets"].astype(np.int64)) == 0
    arrays["recurrent_state"][arrays["slot_idx"][empty]] = 1


def written_beside(name: str) -> Callable[[dict[str, Any]], None]:
    def write(arrays: dict[str, Any]) -> None:
        arrays[name].base[-1] += 1

    return write


def input_changed(name: str) -> Callable[[dict[str, Any]], None]:
    def write(arrays: dict[str, Any]) -> None:
        arrays[name].flat[arrays[name].size // 2] += 1

    return write


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "last row unwritten": (last_row_unwritten, "oracle"),
    "foreign slot written": (foreign_slot_written, "untouched"),
    "slot of an empty sequence written": (slot_of_an_empty_sequence_written, "untouched"),
    **{f"written beside {name}": (written_beside(name), "untouched") for name in (*ARGUMENTS, "out")},
    **{f"{name} changed": (input_changed(name), "untouched") for name in ARGUMENTS if name != "recurrent_state"},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_op(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehave, check = FAULTS[fault]
    right = ops.gated_delta_recurrence_fwd

    def broken(*six: Any, out: Any) -> Any:
        right(*six, out=out)
        misbehave({**dict(zip(ARGUMENTS, six, strict=True)), "out": out})
        return out

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    assert check in failed_checks(sweep(PLAIN, "numpy"))


def test_an_op_that_raises_fails_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*six: Any, out: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    result = sweep(PLAIN, "numpy")
    assert not result.passed
    assert result.error == "RuntimeError: out of order"


def test_an_op_that_does_nothing_fails_every_case_that_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", lambda *six, out: out)
    cases = [case for case in RECURRENCE_CASES.values() if case.total_seq_len]
    passed = [result.case.name for result in run_sweep(cases, ["numpy"]) if result.passed]
    assert passed == []


def test_a_result_without_a_check_has_not_passed() -> None:
    assert not CaseResult(PLAIN, "numpy", (), None, 0.0).passed


def test_results_come_in_order_whatever_the_number_of_workers() -> None:
    cases = [replace(PLAIN, name=f"case {number}", seed=number) for number in range(6)]
    results = list(run_sweep(cases, ["numpy", "numpy"], workers=3))
    assert [result.case.seed for result in results] == [number for number in range(6) for _ in range(2)]
    assert all(result.passed for result in results)
