"""The sweep of chunked prefill on every backend, what its cases reach, and that every one of its checks can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import chunk_layout, numpy_chunked
from gdn.backends.chunked import MIN_CHUNKED_LEN
from gdn.geometry import HeadGeometry
from gdn.testing import Tolerance, assert_passed, bitwise, close
from gdn.testing.buffers import LAYOUTS
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.catalogue import SWEEP_CASES
from gdn.testing.checks import reference_of
from gdn.testing.chunked_cases import CHUNKED_CASES, EDGE_LENGTHS, ChunkedCase, rare_cases
from gdn.testing.chunked_checks import (
    CHUNKED_CHECKS,
    ChunkedSubject,
    chunk_len_of,
    chunked_subject,
    chunked_tolerance,
)
from gdn.testing.execute import ARGUMENTS, on_backend
from gdn.testing.ring_device import Device
from gdn.testing.sweep import CaseResult, run_sweep

EVERY_CASE = {**CHUNKED_CASES, **{case.name: case for case in rare_cases()}}
SMALL = HeadGeometry(2, 4, 32, 32)
PLAIN = ChunkedCase("plain", SMALL, (3, 150, 70), out_dtype="float32", leading_rows=1, trailing_rows=2)
STRAYS = replace(PLAIN, name="strays", lengths=(140, 3), has_strays=True)


def sweep(case: ChunkedCase, backend: str) -> CaseResult:
    (result,) = run_sweep([case], [backend])
    return result


def failed_checks(case: ChunkedCase) -> set[str]:
    """Names of the checks that found something on numpy; the case itself must have run."""
    result = sweep(case, "numpy")
    assert result.error is None
    return {check.check for check in result.checks if not check.passed}


@pytest.mark.parametrize("name", EVERY_CASE)
def test_cases(name: str, backend: str) -> None:
    result = sweep(EVERY_CASE[name], backend)
    assert result.error is None
    assert result.passed, [message for check in result.checks for message in check.failures]


# ---- Lengths and slabs ----


def run(case: ChunkedCase, backend: str) -> ChunkedSubject:
    arrays = build_arrays(case)
    return chunked_subject(case, backend, arrays, reference_of(arrays))


def assert_each_row_is_right(case: ChunkedCase, backend: str) -> None:
    """Each row by itself: an error in a short one would vanish in the norm of all."""
    subject = run(case, backend)
    readout, pool = subject.reference
    limits = chunked_tolerance(case.work_dtype, "float32")
    limits = Tolerance(2 * limits.relative_norm, 3 * limits.max_element, f"{limits.reason}; of a single row")
    for sequence in subject.live:
        rows, slot = subject.rows(sequence), subject.slots[sequence]
        assert_passed(
            close(subject.outcome.out[rows], readout[rows], limits, f"readout of {subject.lengths[sequence]}"),
            close(subject.outcome.recurrent_state[slot], pool[slot], limits, f"state of {subject.lengths[sequence]}"),
        )


@pytest.mark.parametrize("work_dtype", ["bfloat16", "float32"])
def test_every_length_of_two_chunks(work_dtype: str, backend: str) -> None:
    case = ChunkedCase("every_length", HeadGeometry(1, 2, 32, 32), EDGE_LENGTHS, work_dtype, out_dtype="float32")
    assert_each_row_is_right(case, backend)


@pytest.mark.parametrize("work_dtype", ["bfloat16", "float32"])
def test_rows_without_decay_of_any_length(work_dtype: str, backend: str) -> None:
    """Beside field case 41: decay exactly 1 in chunks that are full, one short of it, one over, and of one token."""
    lengths = (1, 31, 33, 63, 66, 128, 193)
    case = ChunkedCase("ungated", HeadGeometry(1, 2, 32, 32), lengths, work_dtype, out_dtype="float32")
    assert_each_row_is_right(replace(case, inputs="no_decay"), backend)


@pytest.mark.parametrize("heads", [SMALL, HeadGeometry(1, 2, 64, 64), HeadGeometry(1, 1, 128, 128)], ids=str)
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rows_at_once", "chunks_of_a_slab"), [(1, 1), (1, 3), (2, 2), (2, 4), (3, 3), (3, 6), (5, 5), (4, 100)]
)
def test_slabs_do_not_show(
    heads: HeadGeometry,
    rows_at_once: int,
    chunks_of_a_slab: int,
    state_dtype: str,
    kernels: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that begin, end and go on within slabs of any size, any number at once, have the bits of those in one.

    Of each of the kernels: on some GPUs 16-bit inputs with heads of 64 and 128 have their own, whose units remember the
    chunks before.
    """
    lengths = (1, 700, 64, 5, 130, 0, 70, 200)
    work_dtype = "float32" if heads is SMALL else "bfloat16"
    case = replace(PLAIN, heads=heads, lengths=lengths, padding=(3,), work_dtype=work_dtype, state_dtype=state_dtype)
    plain = run(case, kernels)
    monkeypatch.setattr(chunk_layout, "WALKS_AT_ONCE", rows_at_once * case.heads.num_value_heads)
    types = case.work_dtype, state_dtype
    layout = chunk_layout.ChunkLayout(case.heads, *types, len(case.lengths), case.total_seq_len, 1)
    slab_bytes = chunks_of_a_slab * layout.chunk_bytes // 256 * 256 + 256
    room = layout.total_bytes - layout.all_slabs_bytes + 2 * slab_bytes
    monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", room + chunk_layout.PART_ALIGNMENT)
    layout = replace(layout)
    assert (layout.rows_at_once, layout.num_slabs) == (rows_at_once, -(-layout.max_chunks // chunks_of_a_slab))
    in_slabs = run(case, kernels)
    assert_passed(
        bitwise(in_slabs.outcome.out, plain.outcome.out, "readout"),
        bitwise(in_slabs.outcome.recurrent_state, plain.outcome.recurrent_state, "state"),
    )


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("key_head_dim", [64, 128])
def test_slabs_do_not_show_where_values_fade(
    key_head_dim: int, state_dtype: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units of a state may be those of the larger one that it was: it must go on in them in the next slab.

    Keys have one large channel and queries lack it, so that readouts are of elements too small for all of float16's
    digits in some units.
    """
    heads = HeadGeometry(1, 2, key_head_dim, 128)
    case = replace(PLAIN, heads=heads, lengths=(1500,), work_dtype="bfloat16", state_dtype=state_dtype)
    arrays = build_arrays(case)
    queries, keys, values = np.split(arrays.qkv_conv_output, (key_head_dim, 2 * key_head_dim), axis=1)
    queries[:, 0] = 0
    keys[:, 0] = 2048
    values[...] = (values * np.exp2(-np.arange(case.total_seq_len) / 64)[:, None]).astype(values.dtype)

    def outcome() -> Any:
        return chunked_subject(case, kernels, arrays, reference_of(arrays)).outcome

    plain = outcome()
    monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", 0)
    in_slabs = outcome()
    assert_passed(
        bitwise(in_slabs.out, plain.out, "readout"),
        bitwise(in_slabs.recurrent_state, plain.recurrent_state, "state"),
    )


def test_a_row_of_several_slabs_is_rounded_once(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside field cases 48, 49, 52: from slab to slab a state of a 16-bit pool goes on in float32.

    A float32 pool that began with the same values and is rounded afterwards has the same bits.
    """
    monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", 0)
    narrow = replace(PLAIN, lengths=(300, 5, 130), state_dtype="bfloat16")
    arrays = build_arrays(narrow)
    wide = replace(arrays, recurrent_state=arrays.recurrent_state.astype(np.float32))
    outcomes = [
        chunked_subject(replace(narrow, state_dtype=dtype), kernels, given, reference_of(given)).outcome
        for dtype, given in (("bfloat16", arrays), ("float32", wide))
    ]
    rounded = outcomes[1].recurrent_state.astype(arrays.recurrent_state.dtype)
    assert_passed(
        bitwise(outcomes[0].out, outcomes[1].out, "readout"), bitwise(outcomes[0].recurrent_state, rounded, "state")
    )


def test_one_bit_pattern_in_many_runs(backend: str) -> None:
    """Beside field cases 68, 72: many rows walked at once, again and again; at full size where there is a GPU."""
    lengths, heads, runs = (1238, 1199, 1240, 1216, 1187, 1203, 519), HeadGeometry(16, 48, 128, 128), 30
    if backend != "cuda":
        lengths, heads, runs = tuple(length // 10 for length in lengths), HeadGeometry(1, 2, 32, 32), 8
    arrays = build_arrays(ChunkedCase("ragged", heads, lengths, "bfloat16", state_dtype="bfloat16"))
    results = []
    for _ in range(runs):
        given = [Device(backend).put(array) for array in arrays.as_tuple()]
        with on_backend(backend):
            out = ops.gated_delta_recurrence_fwd(*given, algorithm="chunked")
        results.append(Device(backend).get(out).tobytes() + Device(backend).get(given[3]).tobytes())
    assert results == [results[0]] * runs


def test_auto_runs_heads_that_are_not_served_token_by_token(backend: str) -> None:
    case = replace(PLAIN, heads=HeadGeometry(1, 2, 24, 40))
    arrays = build_arrays(case)
    subject = ChunkedSubject(case, backend, arrays, run(PLAIN, "numpy").outcome, reference_of(arrays))
    auto, recurrent = (subject.run_as(algorithm, arrays) for algorithm in ("auto", "recurrent"))
    assert_passed(
        bitwise(auto.out, recurrent.out, "readout"), bitwise(auto.recurrent_state, recurrent.recurrent_state, "state")
    )


# ---- What the cases reach ----


def test_cases_use_everything() -> None:
    cases = list(EVERY_CASE.values())
    floats = {"float32", "float16", "bfloat16"}
    for field in ("work_dtype", "state_dtype", "out_dtype"):
        assert {getattr(case, field) for case in cases} == floats
    assert {case.gate_dtype for case in cases} == {"float32", "bfloat16"}
    assert {case.index_dtype for case in cases} == {"uint32", "int32"}
    for field, num_axes in (("qkv_layout", 2), ("gate_layout", 2), ("out_layout", 2), ("state_layout", 4)):
        assert len({getattr(case, field) for case in cases}) >= min(len(LAYOUTS[num_axes]), 4 if num_axes == 2 else 3)
    assert {case.heads.group_size for case in cases} == {1, 2, 3, 4}
    dims = {dim for case in cases for dim in (case.heads.key_head_dim, case.heads.value_head_dim)}
    assert {32, 64, 96, 128, 192, 256} <= dims
    assert {chunk_len_of(case) for case in cases} == {32, 64}
    assert any(case.padding for case in cases)
    for is_float32 in (True, False):
        inputs = {case.inputs for case in cases if (case.work_dtype == "float32") == is_float32}
        assert {"no_decay", "erasing_decay", "vanishing_keys", "small_values", "large_values"} <= inputs
        assert {"near_equal_keys", "mixed_decay", "model"} <= inputs
        assert any(case.has_strays and (case.work_dtype == "float32") == is_float32 for case in cases)


def test_named_cases_are_in_the_catalogue_under_names_of_their_own() -> None:
    assert CHUNKED_CASES.items() <= SWEEP_CASES.items()
    assert all(name.startswith("chunked_") for name in CHUNKED_CASES)
    assert [name for name in SWEEP_CASES if name.startswith("chunked_")] == list(CHUNKED_CASES)


def test_some_batch_has_rows_of_both_algorithms_of_auto() -> None:
    kinds = [{length >= MIN_CHUNKED_LEN for length in case.lengths if length} for case in CHUNKED_CASES.values()]
    assert {True, False} in kinds


def test_every_check_compares_something_in_a_named_case() -> None:
    results = run_sweep(list(CHUNKED_CASES.values()), ["numpy"])
    used = [{check.check for check in result.checks} for result in results]
    assert set.union(*used) == set(CHUNKED_CHECKS)
    assert set.intersection(*used) == {"oracle", "untouched"}


def test_tolerances_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[1] / "docs" / "chunked.md").read_text(encoding="utf-8")
    for inputs, work_dtypes in (("float16, bfloat16", ("float16", "bfloat16")), ("float32", ("float32",))):
        (line,) = [line for line in page.splitlines() if line.startswith(f"| {inputs} | ")]
        stated = [float(cell) for cell in line.split("|")[2:4]]
        for work_dtype in work_dtypes:
            tolerances = [chunked_tolerance(work_dtype, dtype) for dtype in ("float32", "bfloat16")]
            assert [tolerance.relative_norm for tolerance in tolerances] == stated
    assert "holds it to 5e-3" in page
    assert chunked_tolerance("bfloat16", "float32", "near_equal_keys").relative_norm == 5e-3


# ---- Broken NumPy ----


def test_the_backend_as_it_is_passes() -> None:
    assert failed_checks(PLAIN) == set()
    assert failed_checks(STRAYS) == set()


Part = Callable[..., Any]


def at_edges_of_the_batch(run_row: Part) -> Part:
    """Chunks that begin at multiples of 64 rows of the batch, not of the sequence."""

    def run(inputs: Any, out: Any, begin: int, end: int, state: Any) -> None:
        edge = min(-(-begin // 64) * 64, end)
        run_row(inputs, out, begin, edge, state)
        run_row(inputs, out, edge, end, state)

    return run


def first_state_for_all(advance: Part) -> Part:
    """A readout from the state as it was before the row."""
    first: list[Any] = []

    def run(chunk: Any, state: Any) -> Any:
        kept = state.copy()
        first.append(kept)
        readout = advance(chunk, state)
        return advance(chunk, first[-2].copy()) if len(first) > 1 and first[-2].shape == kept.shape else readout

    return run


def other_bits_each_time(advance: Part) -> Part:
    calls: list[None] = []

    def run(chunk: Any, state: Any) -> Any:
        calls.append(None)
        return advance(chunk, state) * np.float32(1 + 1e-6 * (len(calls) % 5))

    return run


def with_chunk(**changes: Callable[[Any], Any]) -> Callable[[Part], Part]:
    """Chunks some of whose parts are other ones."""

    def broken(load: Part) -> Part:
        def run(inputs: Any, rows: slice, chunk_len: int) -> Any:
            chunk = load(inputs, rows, chunk_len)
            return chunk._replace(**{name: change(chunk) for name, change in changes.items()})

        return run

    return broken


BROKEN_NUMPY: dict[str, tuple[str, Callable[[Part], Part], ChunkedCase, str]] = {
    "no coupling of tokens": ("_solve", lambda _: lambda coupling, deltas: deltas, PLAIN, "oracle"),
    "one step too few": (
        "_solve",
        lambda solve: lambda coupling, deltas: solve(np.where(np.arange(64) == 17, 0, coupling), deltas),
        PLAIN,
        "oracle",
    ),
    "decay forgotten": ("_load", with_chunk(decay=lambda chunk: np.ones_like(chunk.decay)), PLAIN, "oracle"),
    "last token forgotten": (
        "_run_row",
        lambda right: lambda inputs, out, begin, end, state: right(inputs, out, begin, end - 1, state),
        PLAIN,
        "oracle",
    ),
    "state of another chunk": ("_advance", first_state_for_all, PLAIN, "oracle"),
    "chunks of the batch": ("_run_row", at_edges_of_the_batch, PLAIN, "E3"),
    "other bits each time": ("_advance", other_bits_each_time, PLAIN, "E5"),
    "values in products": ("_take_out", lambda _: lambda deltas: np.zeros(deltas.shape, bool), STRAYS, "strays"),
    "keys and gates hidden": (
        "_load",
        with_chunk(is_lost=lambda chunk: np.zeros_like(chunk.is_lost)),
        STRAYS,
        "strays",
    ),
    "values hidden": ("_take_out", lambda right: lambda deltas: right(deltas) & False, STRAYS, "strays"),
    "strays everywhere": (
        "_load",
        with_chunk(is_lost=lambda chunk: np.broadcast_to(chunk.is_lost.any(), chunk.is_lost.shape)),
        STRAYS,
        "strays",
    ),
}


@pytest.mark.parametrize("fault", BROKEN_NUMPY)
def test_broken_numpy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, case, check = BROKEN_NUMPY[fault]
    monkeypatch.setattr(numpy_chunked, name, broken(getattr(numpy_chunked, name)))
    assert check in failed_checks(case)


# ---- Broken ops ----

# What a fault does: changes the keywords of a call before it, or its arrays, by name, behind it.
Fault = Callable[[dict[str, Any], dict[str, Any]], None]


def foreign_slot_written(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    spare = np.setdiff1d(np.arange(len(arrays["recurrent_state"])), arrays["slot_idx"])
    arrays["recurrent_state"][spare[-1], -1, -1, -1] = 0


def unowned_row_written(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    arrays["out"][-1] = 1


def workspace_overrun(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    if keywords.get("workspace") is not None:
        keywords["workspace"].base[-1] = 0


def workspace_read(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    if keywords.get("workspace") is not None:
        arrays["out"][1] += 1e-6


def long_rows_cut(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    """What is wrong in rows of more than a chunk alone."""
    offsets = arrays["input_row_offsets"].astype(np.int64)
    for slot, length in zip(arrays["slot_idx"], np.diff(offsets), strict=True):
        if length > 128:
            arrays["recurrent_state"][slot] *= 1.01


def key_of_input_changed(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    arrays["qkv_conv_output"][1, 0] += 1


def auto_by_batch(arrays: dict[str, Any], keywords: dict[str, Any]) -> None:
    if keywords["algorithm"] == "auto":
        arrays["out"][1:4] *= np.float32(1 + 1e-6)


FAULTS: dict[str, tuple[Fault, str]] = {
    "foreign slot written": (foreign_slot_written, "untouched"),
    "unowned row written": (unowned_row_written, "oracle"),
    "input changed": (key_of_input_changed, "untouched"),
    "workspace overrun": (workspace_overrun, "workspace"),
    "workspace read": (workspace_read, "workspace"),
    "long rows cut": (long_rows_cut, "edges"),
    "auto by something else": (auto_by_batch, "auto"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_op(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    misbehave, check = FAULTS[fault]
    right = ops.gated_delta_recurrence_fwd

    def broken(*six: Any, out: Any, **keywords: Any) -> Any:
        right(*six, out=out, **keywords)
        misbehave({**dict(zip(ARGUMENTS, six, strict=True)), "out": out}, keywords)
        return out

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    assert check in failed_checks(PLAIN)


@pytest.mark.parametrize("algorithm", ["chunked", "recurrent"])
def test_an_auto_that_knows_one_algorithm_is_caught(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_delta_recurrence_fwd

    def broken(*six: Any, **keywords: Any) -> Any:
        if keywords.get("algorithm") == "auto":
            keywords["algorithm"] = algorithm
        return right(*six, **keywords)

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    assert failed_checks(PLAIN) == {"auto"}


def test_an_op_that_does_nothing_fails_every_case_that_has_something_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", lambda *six, out, **keywords: out)
    cases: list[RecurrenceCase] = [case for case in CHUNKED_CASES.values() if case.total_seq_len]
    passed = [result.case.name for result in run_sweep(cases, ["numpy"]) if result.passed]
    assert passed == []


@pytest.mark.parametrize("name", EVERY_CASE)
def test_a_relative_error_past_the_tolerance_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every named case that runs a token, by the check against the oracle."""
    case = EVERY_CASE[name]
    if not any(length and row not in case.padding for row, length in enumerate(case.lengths)):
        return
    right = ops.gated_delta_recurrence_fwd
    error = 1 + 3 * chunked_tolerance(case.work_dtype, case.out_dtype, case.inputs).relative_norm

    def broken(*six: Any, out: Any, **keywords: Any) -> Any:
        right(*six, out=out, **keywords)
        out[...] = (out.astype(np.float32) * np.float32(error)).astype(out.dtype)
        return out

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", broken)
    assert "oracle" in failed_checks(case)
