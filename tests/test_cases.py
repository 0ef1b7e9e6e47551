"""The shared cases: the same arrays everywhere, poison where nobody may look, and every kind of input in use."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gdn import ops
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import LAYOUTS, lay_out
from gdn.testing.cases import INPUTS, RECURRENCE_CASES, RecurrenceCase, build_arrays, random_recurrence_case
from gdn.testing.checks import CHECKS, checks_of
from gdn.testing.chunked_cases import CHUNKED_CASES
from gdn.testing.ring_cases import RingCase

HEADS = HeadGeometry(1, 2, 8, 8)
PLAIN = RecurrenceCase("plain", HEADS, (3, 0, 2, 1), padding=(2,), leading_rows=2, trailing_rows=1, spare_slots=2)


@pytest.mark.parametrize("name", RECURRENCE_CASES)
def test_arrays_are_the_same_at_every_call(name: str) -> None:
    first, second = (build_arrays(RECURRENCE_CASES[name]).as_tuple() for _ in range(2))
    assert [array.tobytes() for array in first] == [array.tobytes() for array in second]
    assert ops.gated_delta_recurrence_fwd_shape(*first) == (
        RECURRENCE_CASES[name].total_seq_len,
        RECURRENCE_CASES[name].heads.value_dim,
    )


def test_every_part_of_a_case_reaches_the_arrays() -> None:
    arrays = build_arrays(PLAIN)
    assert arrays.input_row_offsets.tolist() == [2, 5, 5, 7, 8]
    assert arrays.slot_idx[2] == PAD_SLOT
    assert len(set(arrays.slot_idx.tolist())) == 4
    assert arrays.recurrent_state.shape == (6, 2, 8, 8)
    assert arrays.qkv_conv_output.shape == (9, 32)
    assert np.isnan(arrays.qkv_conv_output[[0, 1, 8]]).all()
    assert np.isfinite(arrays.qkv_conv_output[2:8]).all()
    named = arrays.slot_idx[[0, 1, 3]]
    assert np.isfinite(arrays.recurrent_state[named]).all()
    spare = np.delete(arrays.recurrent_state, named, axis=0)
    assert np.isnan(spare[::2]).all()
    assert np.isfinite(spare[1::2]).all()
    other_seed = build_arrays(replace(PLAIN, seed=1))
    assert (other_seed.qkv_conv_output[2:8] != arrays.qkv_conv_output[2:8]).all()


def test_random_cases_do_not_depend_on_each_other() -> None:
    drawn = [random_recurrence_case(7, number) for number in range(40)]
    assert random_recurrence_case(7, 31) == drawn[31]
    assert len({case.seed for case in drawn}) == 40
    assert random_recurrence_case(8, 31) != drawn[31]
    fixed = [random_recurrence_case(7, number, heads=HEADS, work_dtype="bfloat16") for number in range(40)]
    assert {(case.heads, case.work_dtype) for case in fixed} == {(HEADS, "bfloat16")}
    assert {case.out_dtype for case in fixed} == {"float32", "bfloat16"}


def test_random_cases_reach_everything() -> None:
    drawn = [random_recurrence_case(1, number) for number in range(400)]
    for field in ("qkv_layout", "gate_layout", "out_layout"):
        assert {getattr(case, field) for case in drawn} == set(LAYOUTS[2])
    assert {case.state_layout for case in drawn} == set(LAYOUTS[4])
    floats = {"float32", "float16", "bfloat16"}
    assert len({(case.work_dtype, case.state_dtype) for case in drawn}) == len(floats) ** 2
    assert {len(case.padding) > 0 for case in drawn} == {True, False}
    assert max(max(case.lengths) for case in drawn) > 1000


def test_named_cases_use_every_layout_input_and_type() -> None:
    cases = list(RECURRENCE_CASES.values())
    assert {case.inputs for case in (*cases, *CHUNKED_CASES.values())} == set(INPUTS)
    assert {case.state_layout for case in cases} == set(LAYOUTS[4])
    assert {case.index_layout for case in cases} == set(LAYOUTS[1])
    for field in ("qkv_layout", "gate_layout", "out_layout"):
        assert {getattr(case, field) for case in cases} >= {"dense", "slice", "unaligned", "reversed"}
    assert (
        {case.work_dtype for case in cases}
        == {case.state_dtype for case in cases}
        == {"float32", "bfloat16", "float16"}
    )
    assert any(case.thread_maps for case in cases)
    assert any(case.padding for case in cases)
    assert any(case.index_dtype == "int32" for case in cases)


def test_every_check_has_a_named_case_for_it() -> None:
    used = {name for case in RECURRENCE_CASES.values() for name in checks_of(case)}
    assert used == set(CHECKS)
    assert {"oracle", "untouched"} <= set.intersection(*(set(checks_of(case)) for case in RECURRENCE_CASES.values()))


@pytest.mark.parametrize(("ndim", "layout"), [(ndim, layout) for ndim, names in LAYOUTS.items() for layout in names])
def test_layouts_place_the_same_values(ndim: int, layout: str) -> None:
    shape = (5, 4, 3, 2)[:ndim]
    values = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    buffer = lay_out(values, layout, filler=-1)
    np.testing.assert_array_equal(buffer.array, values)
    assert np.count_nonzero(buffer.memory == -1) == buffer.memory.size - values.size > 0
    copy = buffer.copy()
    copy.array[...] = 5
    np.testing.assert_array_equal(buffer.array, values)
    assert (layout == "dense") == (buffer.array.flags.c_contiguous and buffer.offset == 0)


def test_a_layout_for_another_number_of_axes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layout: expected one of .* for 4 axes, got 'reversed'$"):
        lay_out(np.zeros((1, 1, 1, 1), np.float32), "reversed")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_pending": (1,)}, "1 pending counts for 2 rows"),
        ({"num_accepted": (3, 1)}, "3 of 2 tokens accepted"),
        ({"lengths": (2, 5), "num_accepted": (2, 4)}, "a row of 5 tokens leaves no records to accept 4 of"),
    ],
)
def test_a_ring_case_that_accepts_what_there_is_not(changes: dict[str, tuple[int, ...]], words: str) -> None:
    counts = {"lengths": (2, 5), "num_accepted": (2, 0)} | changes
    with pytest.raises(ValueError, match=rf"^case: {words}$"):
        RingCase("case", HeadGeometry(1, 2, 8, 8), ring_len=4, **counts)
