"""The sweep of the ops around the recurrence on every backend, and what its cases reach."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import LAYOUTS
from gdn.testing.catalogue import SWEEP_CASES, random_case, random_heads
from gdn.testing.conv1d_cases import CONV1D_CASES, Conv1dCase, build_conv1d_arrays
from gdn.testing.conv1d_checks import CONV1D_CHECKS, tables_of_counts
from gdn.testing.gates_cases import GATES_CASES, GatesCase, build_gates_arrays
from gdn.testing.gates_checks import GATES_CHECKS
from gdn.testing.layer_cases import LAYER_CASES, LayerCase, random_layer_case
from gdn.testing.steps_cases import STEPS_CASES, StepsCase, advance, build_steps_arrays
from gdn.testing.steps_checks import STEPS_CHECKS
from gdn.testing.sweep import run_sweep

FLOATS = {"float32", "float16", "bfloat16"}


def assert_sweep_passes(case: LayerCase, backend: str) -> None:
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert result.passed, [message for check in result.checks for message in check.failures]


@pytest.mark.parametrize("name", LAYER_CASES)
def test_named_cases(name: str, backend: str) -> None:
    assert_sweep_passes(LAYER_CASES[name], backend)


@pytest.mark.parametrize("number", range(12))
def test_random_cases(number: int, backend: str) -> None:
    assert_sweep_passes(random_layer_case(1, number), backend)


# ---- What the cases reach ----


def memory_of(arrays: Any) -> list[bytes]:
    values = [getattr(arrays, field.name) for field in fields(arrays)]
    return [value.tobytes() for value in values if isinstance(value, np.ndarray)]


@pytest.mark.parametrize("name", LAYER_CASES)
def test_arrays_are_the_same_at_every_call(name: str) -> None:
    case = LAYER_CASES[name]
    build: Any = {Conv1dCase: build_conv1d_arrays, GatesCase: build_gates_arrays, StepsCase: build_steps_arrays}
    first, second = (memory_of(build[type(case)](case)) for _ in range(2))
    assert first == second
    assert len(first) > 3
    assert name == case.name


def test_names_are_those_of_one_case() -> None:
    assert len(LAYER_CASES) == len(CONV1D_CASES) + len(GATES_CASES) + len(STEPS_CASES)
    assert LAYER_CASES.items() <= SWEEP_CASES.items()


def test_every_part_of_a_convolution_reaches_the_arrays() -> None:
    case = Conv1dCase("plain", 12, 4, (3, 0, 2, 1), padding=(2,), leading_rows=2, trailing_rows=1, bias_dtype="float16")
    arrays = build_conv1d_arrays(case)
    assert arrays.bias is not None
    assert arrays.bias.dtype == np.float16
    assert arrays.input_row_offsets.tolist() == [2, 5, 5, 7, 8]
    assert arrays.slot_idx[2] == PAD_SLOT
    assert (arrays.qkv.shape, arrays.conv_weight.shape, arrays.conv_state.shape) == ((9, 12), (12, 4), (6, 12, 3))
    assert np.isnan(arrays.qkv[[0, 1, 8]]).all()
    assert np.isfinite(arrays.qkv[2:8]).all()
    spare = np.delete(arrays.conv_state, arrays.slot_idx[[0, 1, 3]], axis=0)
    assert np.isnan(spare[::2]).all()
    assert np.isfinite(spare[1::2]).all()


def test_named_convolutions_use_everything() -> None:
    cases = list(CONV1D_CASES.values())
    assert {case.conv_width for case in cases} == set(range(2, 9))
    assert {case.activation for case in cases} == {None, "silu"}
    assert {case.index_dtype for case in cases} == {"uint32", "int32"}
    for field in ("work_dtype", "state_dtype", "weight_dtype"):
        assert {getattr(case, field) for case in cases} == FLOATS
    assert {case.bias_dtype for case in cases} == FLOATS | {None}
    assert {case.state_layout for case in cases} == set(LAYOUTS[3])
    assert {case.index_layout for case in cases} == set(LAYOUTS[1])
    for field in ("qkv_layout", "weight_layout", "out_layout"):
        assert {getattr(case, field) for case in cases} == set(LAYOUTS[2])
    for several in (4 * 128, 128):  # channels of a block, and of one whose threads take one each
        assert any(case.conv_dim > several and (case.conv_dim % 4 == 0) == (several > 128) for case in cases)


def test_named_convolutions_are_split_over_blocks_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """In heads and tiles of every length; most cases in several ways, which must not show."""
    ways: set[tuple[int, ...]] = set()
    right = conv_kernel.split

    def split(batch: Any) -> Any:
        found = right(batch)
        ways.add((batch.conv_width, *found))
        return found

    monkeypatch.setattr(conv_kernel, "split", split)
    found = {}
    for name in ("conv_decode", "conv_windows", "conv_windows_of_8", "conv_many_sequences", "conv_long_rows"):
        ways.clear()
        assert_sweep_passes(CONV1D_CASES[name], "numpy")
        found[name] = set(ways)
    assert set.union(*found.values()) == {(4, 3, 8), (4, 3, 16), (4, 3, 32), (4, 4, 32), (4, 8, 32)}
    assert {name for name in found if len(found[name]) == 1} == {"conv_decode"}


def test_commits_go_over_every_count() -> None:
    """All from 0 to one above the length; of a long row the first ones and the last."""
    lengths = np.array([0, 1, 3, 9, 17])
    tables = list(tables_of_counts(lengths))
    for row, length in enumerate(lengths):
        counts = {int(table[row]) for table in tables}
        assert counts == ({*range(length + 2)} if length <= 9 else {0, 1, 2, 3, 4, 13, 14, 15, 16, 17, 18})
    assert list(tables_of_counts(np.zeros(0, np.int64))) == []


def test_named_steps_use_every_kind_of_window() -> None:
    """Windows of every length up to one that commits itself, every count of acceptance, and padding."""
    found, paused = set(), 0
    for case in STEPS_CASES.values():
        for step in build_steps_arrays(case).steps:
            paused += int(step.is_paused.sum())
            assert (advance(step)[step.is_paused] == 0).all()
            if case.ring_len == 4:
                found |= set(zip(step.drafted.tolist(), step.accepted.tolist(), strict=True))
    assert found == {(length, count) for length in range(5) for count in range(length + 1)} | {(5, 5)}
    assert paused


def test_every_check_compares_something_in_a_named_case() -> None:
    used: dict[type, set[str]] = {Conv1dCase: set(), GatesCase: set(), StepsCase: set()}
    for result in run_sweep(list(LAYER_CASES.values()), ["numpy"]):
        used[type(result.case)] |= {check.check for check in result.checks}
        if isinstance(result.case, StepsCase):
            assert {"steps", "bites"} <= {check.check for check in result.checks}
    assert list(map(sorted, used.values())) == [sorted(c) for c in (CONV1D_CHECKS, GATES_CHECKS, STEPS_CHECKS)]


def test_random_cases_reach_everything() -> None:
    drawn = [random_layer_case(1, number) for number in range(400)]
    assert {type(case) for case in drawn} == {Conv1dCase, GatesCase, StepsCase}
    convolutions = [case for case in drawn if isinstance(case, Conv1dCase)]
    assert {case.conv_width for case in convolutions} == set(range(2, 9))
    assert {case.state_layout for case in convolutions} == set(LAYOUTS[3])
    assert len({(case.work_dtype, case.state_dtype) for case in convolutions}) == 9
    assert {case.conv_dim % 4 for case in convolutions} == {0, 1, 2, 3}
    assert {case.work_dtype == case.out_dtype for case in convolutions} == {True, False}


def test_random_cases_do_not_depend_on_each_other() -> None:
    drawn = [random_case(7, number) for number in range(40)]
    assert random_case(7, 33) == drawn[33]
    assert random_case(8, 33) != drawn[33]
    assert [isinstance(case, Conv1dCase | GatesCase | StepsCase) for case in drawn[:10]] == [
        number in (3, 9) for number in range(10)
    ]
    for number, case in enumerate(drawn):
        if not isinstance(case, Conv1dCase | GatesCase):
            assert random_heads(7, number) == case.heads
    heads = HeadGeometry(1, 2, 8, 8)
    for number in range(3, 90, 6):
        case = random_case(7, number, heads=heads, work_dtype="bfloat16", state_dtype="float32")
        assert case.work_dtype == "bfloat16"
        assert isinstance(case, GatesCase) or case.state_dtype == "float32"
        if isinstance(case, Conv1dCase):
            assert case.conv_dim == heads.conv_dim
