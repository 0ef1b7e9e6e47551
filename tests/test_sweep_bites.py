"""The sweep can fail: every deliberately broken kernel, backend or op is caught, and by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import host
from gdn.backends import numpy as numpy_backend
from gdn.backends.row_tile import RowTile, forced_row_tile, nearest_row_tile
from gdn.backends.streamed_tile import streamed_tiles
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, build_arrays
from gdn.testing.checks import against_oracle, reference_of, subject
from gdn.testing.execute import ARGUMENTS
from gdn.testing.sweep import CaseResult, run_sweep

SMALL = HeadGeometry(2, 4, 32, 32)
ROUNDING = RecurrenceCase("rounding", SMALL, (300,), state_dtype="bfloat16", inputs="no_decay")
PLAIN = RecurrenceCase("plain", SMALL, (3, 0, 17), leading_rows=1, trailing_rows=2)
MAPS = RecurrenceCase("maps", HeadGeometry(1, 1, 64, 64), (9,), thread_maps=3)
STEP, TILE, ROWS, WORK = "gated_delta_step.cuh", "row_tile.cuh", "ragged_rows.cuh", "recurrence.cuh"
BLOCK, STREAM, STREAM_TOKENS, STREAM_WORK = (
    *("block_tokens.cuh", "streamed_tokens.cuh"),
    *("stream_tokens.cuh", "stream_work.cuh"),
)


def sweep(case: RecurrenceCase, backend: str, tile: RowTile | None = None) -> CaseResult:
    """All checks of a case, with every call forced to a thread map if one is given."""
    with forced_row_tile(tile) if tile else nullcontext():
        (result,) = run_sweep([case], [backend])
    return result


def failed_checks(result: CaseResult) -> set[str]:
    """Names of the checks that found something; the case itself must have run."""
    assert result.error is None
    assert result.passed == all(check.passed for check in result.checks)
    return {check.check for check in result.checks if not check.passed}


# ---- Broken kernels ----


def maps_of(case: RecurrenceCase) -> dict[str, RowTile]:
    """One thread map of each family for a case."""
    sizes = case.heads.key_head_dim, case.heads.value_head_dim, 2 if case.state_dtype != "float32" else 4
    return {"block": nearest_row_tile(*sizes), "stream": streamed_tiles(*sizes)[2]}


@pytest.mark.parametrize("case", [PLAIN, MAPS], ids=["plain", "maps"])
@pytest.mark.parametrize("family", [None, "block", "stream"])
def test_the_kernels_as_they_are_pass(family: str | None, case: RecurrenceCase, edit: Callable[..., None]) -> None:
    edit(STEP, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert failed_checks(sweep(case, "host", maps_of(case).get(str(family)))) == set()


# Fault: the family of thread maps it is shown to break, its file, its edits.
BROKEN_ARITHMETIC = {
    "sign of the delta": ("block", STEP, ("fmaf(-scalars.decay_over_key_norm", "fmaf(scalars.decay_over_key_norm")),
    "decay after the error": ("stream", STEP, ("__fmul_rn(decay, inverse_key_norm)", "inverse_key_norm")),
    "beta forgotten": ("block", STEP, ("__fmul_rn(beta, inverse_key_norm)", "inverse_key_norm")),
    "no scale": (
        "stream",
        STEP,
        ("__fmul_rn(inverse_query_norm, __fdiv_rn(1.0f, root))", "inverse_query_norm + 0 * root"),
    ),
    "scale applied twice": (
        "block",
        STEP,
        ("__fsqrt_rn(static_cast<float>(KEY_HEAD_DIM))", "static_cast<float>(KEY_HEAD_DIM)"),
    ),
    "readout before the update": ("stream", STEP, ("fmaf(scalars.query_dot_key, delta, ", "fmaf(0.0f, delta, ")),
    "estimate of the norm doubled": (
        "block",
        STEP,
        ("fmaf(__fmul_rn(0.5f, estimate), error, estimate)", "2 * estimate"),
    ),
    "heads interleaved": ("block", WORK, ("key_head = value_head / group_size;", "key_head = value_head % 2;")),
    "heads interleaved in a stream": (
        "stream",
        WORK,
        ("key_head = value_head / group_size;", "key_head = value_head % 2;"),
    ),
    "query and key exchanged": (
        "block",
        BLOCK,
        ("const WORK_TYPE* query;", "const WORK_TYPE* other;"),
        ("const WORK_TYPE* key;", "const WORK_TYPE* query;"),
        ("const WORK_TYPE* other;", "const WORK_TYPE* key;"),
    ),
    "query and key exchanged in a stream": (
        "stream",
        STREAM_TOKENS,
        ("(lane < 16 ? key_dim : 0)", "(lane < 16 ? 0 : key_dim)"),
    ),
    "last token of a long row skipped": (
        "block",
        BLOCK,
        ("token < rows.end; ++token", "token < rows.end - (rows.end - rows.begin > 9); ++token"),
    ),
    "last token of a long row skipped in a stream": (
        "stream",
        STREAM_WORK,
        (
            "static_cast<unsigned int>(rows.end) : begin;",
            "static_cast<unsigned int>(rows.end - (rows.end - rows.begin > 9)) : begin;",
        ),
    ),
    "state not stored": ("block", TILE, ("if (threadIdx.x % TILE_THREADS >= WORKING_THREADS) return;", "return;")),
    "state not stored in a stream": (
        "stream",
        TILE,
        ("if (threadIdx.x % TILE_THREADS >= WORKING_THREADS) return;", "return;"),
    ),
    "stored to the next slot": (
        "block",
        BLOCK,
        (
            "store_state(state, lane_pool)",
            "store_state(state, lane_pool + ((slot + 1) % batch.max_slots - slot) * pool.slot_stride)",
        ),
    ),
    "stored to the next slot in a stream": (
        "stream",
        STREAM,
        (
            "return pool.lane(chunk.slot,",
            "return pool.lane((chunk.slot + 1) % batch.max_slots,",
        ),
    ),
    "rows left as they were": ("block", ROWS, ("owned[threadIdx.x] = 0;", "owned[threadIdx.x] = ~0u;")),
    "rows left as they were in a stream": ("stream", ROWS, ("owned[threadIdx.x] = 0;", "owned[threadIdx.x] = ~0u;")),
}


@pytest.mark.parametrize("fault", BROKEN_ARITHMETIC)
def test_a_broken_kernel(fault: str, edit: Callable[..., None]) -> None:
    family, file_name, *changes = BROKEN_ARITHMETIC[fault]
    edit(file_name, *changes)
    found = failed_checks(sweep(PLAIN, "host", maps_of(PLAIN)[family]))
    assert "oracle" in found
    assert ("untouched" in found) == fault.startswith("stored to the next slot")


def test_an_empty_sequence_whose_slot_is_stored_again(edit: Callable[..., None]) -> None:
    """Field case 66: the state of an empty sequence makes no round trip, whatever its type."""
    stored_again = """if (slot < 0) return;
    if (rows.begin >= rows.end) {
        STATE_TYPE* const idle = pool.lane(slot, work.value_head, work.tile_column);
        StoredState stored;
        stored.load_from_pool(idle);
        LaneState halved;
        stored.widen(halved);
        for (int row = 0; row < ROWS_PER_LANE; ++row)
            for (int column = 0; column < COLUMNS_PER_LANE; ++column) halved[row][column] *= 0.5f;
        return store_state(halved, idle);
    }"""
    edit(BLOCK, ("if (slot < 0 || !records.has_place(record_entries) || !has_work) return;", stored_again))
    case = RECURRENCE_CASES["empty_sequences"]
    assert "untouched" in failed_checks(sweep(case, "host", maps_of(case)["block"]))


def test_an_empty_sequence_whose_slot_a_stream_stores(edit: Callable[..., None]) -> None:
    edit(STREAM, ("chunk.num_tokens() > 0 &&", "(chunk.num_tokens() > 0 || chunk.slot < batch.max_slots) &&"))
    case = RECURRENCE_CASES["empty_sequences"]
    assert "untouched" in failed_checks(sweep(case, "host", maps_of(case)["stream"]))


@pytest.mark.parametrize("vector", ["key", "query"])
@pytest.mark.parametrize("family", ["block", "stream"])
def test_epsilon_outside_the_root(family: str, vector: str, edit: Callable[..., None]) -> None:
    """Field case 45."""

    def outside(total: str) -> str:
        return f"__fdiv_rn(1.0f, __fadd_rn(__fsqrt_rn({total}), NORM_EPSILON))"

    if family == "block":
        total = "sums[0]" if vector == "key" else "sums[1]"
        edit(BLOCK, (f"inverse_norm({total})", outside(total)))
    else:
        total = "add_across_lanes(thread_dot<1>(own[i], own[i]), 1, 16)"
        is_meant = "lane < 16" if vector == "key" else "lane >= 16"
        broken = f"total = {total}; inverse[i] = {is_meant} ? {outside('total')} : inverse_norm(total);"
        edit(STREAM_TOKENS, (f"inverse[i] = inverse_norm({total});", f"const float {broken}"))
    case = RECURRENCE_CASES["tiny_keys"]
    assert "oracle" in failed_checks(sweep(case, "host", maps_of(case)[family]))


@pytest.mark.parametrize("family", ["block", "stream"])
def test_state_rounded_between_tokens(family: str, edit: Callable[..., None]) -> None:
    """Field case 48."""
    update = {
        "block": """state[row][column] =
                updated_element(decayed_element(state[row][column], decay), key[row], delta[column]);""",
        "stream": "state[row][column] = updated_element(state[row][column], key[row], delta[column]);",
    }[family]
    rounding = "STATE_TYPE stored; from_float(state[row][column], stored); state[row][column] = to_float(stored);"
    edit(TILE, (update, f"{{ {update} {rounding} }}"))
    assert "oracle" in failed_checks(sweep(ROUNDING, "host", maps_of(ROUNDING)[family]))


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


@pytest.mark.parametrize("family", ["block", "stream"])
def test_sums_of_other_bits_in_one_family_of_maps(family: str, edit: Callable[..., None]) -> None:
    edit(*perturbed(family, "true"))
    assert failed_checks(sweep(MAPS, "host", maps_of(MAPS)[family])) == {"maps"}


def perturbed(family: str, condition: str) -> tuple[Any, ...]:
    """An edit that changes the last bits of a sum where `condition` holds, in the words of the family's file."""
    if family == "block":
        sums = "thread_sums<CHAINS_PER_LANE>(state, key, query, memory, readout);"
        return BLOCK, (sums, f"{sums} if ({condition}) memory[0] *= 1.0f + 2e-7f;")
    sums = "thread_sums<CHAINS_PER_LANE>(state, rows.kept(token, lane), rows.sent(token, lane), kept, sent);"
    return (
        STREAM,
        (
            "const TokenTargets<Records>& targets, bool updates_state)",
            "const TokenTargets<Records>& targets, bool updates_state, bool is_perturbed)",
        ),
        (sums, f"{sums} if (is_perturbed) kept[0] *= 1.0f + 2e-7f;"),
        ("state_is_read || i + 1 < num_tokens)", f"state_is_read || i + 1 < num_tokens, {condition})"),
    )


#: What bits must not depend on, as conditions in the words of each family, and the promise that each breaks.
DEPENDENCES = {
    "where a call began": ({"block": "token >= rows.begin + 4", "stream": "chunk.token + i >= chunk.begin + 4"}, "E4"),
    "the place in the batch": ({"block": "work.sequence > 0", "stream": "chunk.work.sequence > 0"}, "E3"),
    "the heads beside them": ({"block": "arrays.num_key_heads > 1", "stream": "arrays.num_key_heads > 1"}, "E7"),
}


@pytest.mark.parametrize("family", ["block", "stream"])
@pytest.mark.parametrize("dependence", DEPENDENCES)
def test_sums_that_depend_on(dependence: str, family: str, edit: Callable[..., None]) -> None:
    """Other bits, right to the tolerance, from the fifth token of a call on, for a later sequence, for many heads."""
    conditions, promise = DEPENDENCES[dependence]
    edit(*perturbed(family, conditions[family]))
    assert failed_checks(sweep(PLAIN, "host", maps_of(PLAIN)[family])) == {promise}


@pytest.mark.parametrize(
    "barrier",
    [("    __syncwarp();\n}", "}"), ("        __syncthreads();\n        #pragma unroll", "        #pragma unroll")],
    ids=["after staging a token", "between warps"],
)
def test_a_missing_barrier(barrier: tuple[str, str], edit: Callable[..., None]) -> None:
    edit(BLOCK, barrier)
    case = RecurrenceCase("barrier", HeadGeometry(1, 2, 64, 64), (40, 9))
    arrays = build_arrays(case)
    reference = reference_of(arrays)
    found = []
    for seed in range(1, 5):
        with host.options(order_seed=seed), forced_row_tile(nearest_row_tile(64, 64, 4)):
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
    "last row not summed": ("tree_sum", lambda old: lambda p: old(p) - p[..., -1, :], PLAIN),
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


@pytest.mark.parametrize("distance", [1, 43, 256])
def test_a_late_row_read_from_elsewhere(monkeypatch: pytest.MonkeyPatch, distance: int) -> None:
    """Field case 5: a long row whose last tokens are read from other rows of the batch is finite, and wrong."""
    right, is_finite = ops.gated_delta_recurrence_fwd, []

    def broken(qkv: Any, *five: Any, out: Any) -> Any:
        other = qkv.copy()
        if len(qkv) >= 300:
            other[256:300] = qkv[256 - distance : 300 - distance]
        right(other, *five, out=out)
        is_finite.append(bool(np.isfinite(out).all()))
        return out

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    assert "oracle" in failed_checks(sweep(RECURRENCE_CASES["scaled_rows"], "numpy"))
    assert is_finite[0]  # the call that is held to the oracle


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
