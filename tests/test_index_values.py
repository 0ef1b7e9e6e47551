"""The values of slots and offsets: what ops on NumPy arrays and `check_indices` refuse, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.errors import GdnError, IndexValueError, ShapeError

if TYPE_CHECKING:
    from tests.conftest import Call

INDEX_TYPES = (np.uint32, np.int32)


def with_indices(call: Call, slots: list[int], offsets: list[int], index_type: Any) -> Call:
    """Give a call of 3 token rows and 4 slots these slots and offsets."""
    call["slot_idx"] = np.array(slots, np.int64).astype(np.uint32).view(index_type)
    call["input_row_offsets"] = np.array(offsets, np.int64).astype(np.uint32).view(index_type)
    return call


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ([0, 4], "slot_idx[1]: expected a slot below max_slots = 4, or PAD_SLOT, got 4"),
        ([4, 9], "slot_idx[0]: expected a slot below max_slots = 4, or PAD_SLOT, got 4"),
        ([0, -2], "slot_idx[1]: expected a slot below max_slots = 4, or PAD_SLOT, got 4294967294"),
        ([2**31, 0], "slot_idx[0]: expected a slot below max_slots = 4, or PAD_SLOT, got 2147483648"),
    ],
)
def test_slots_outside_the_pool(call: Call, cpu_backend: str, index_type: Any, slots: list[int], message: str) -> None:
    with_indices(call, slots, [0, 2, 3], index_type)
    assert call.refusal(IndexValueError, cpu_backend) == message


def test_slots_of_empty_sequences_are_held_to_the_pool_too(call: Call, cpu_backend: str) -> None:
    with_indices(call, [0, 4], [0, 3, 3], np.uint32)
    assert call.refusal(IndexValueError, cpu_backend).startswith("slot_idx[1]: expected a slot below max_slots")


@pytest.mark.parametrize(
    ("slots", "offsets", "first", "second"),
    [
        ([3, 3], [0, 2, 3], 0, 1),
        ([1, 0, 2, 0], [0, 1, 2, 2, 3], 1, 3),
        ([2, 2, 2], [0, 1, 2, 3], 0, 1),
    ],
)
def test_slots_that_two_live_sequences_share(
    call: Call, cpu_backend: str, slots: list[int], offsets: list[int], first: int, second: int
) -> None:
    """Field cases 12, 13: a shared slot is named with both positions (the kernels: test_malformed_indices.py)."""
    with_indices(call, slots, offsets, np.uint32)
    assert call.refusal(IndexValueError, cpu_backend) == (
        f"slot_idx[{second}]: expected a slot that no other live sequence uses, "
        f"got {slots[first]}, as slot_idx[{first}]"
    )


def test_sequences_that_are_not_live_may_name_any_used_slot(call: Call, cpu_backend: str) -> None:
    pad = gdn.PAD_SLOT
    with_indices(call, [1, 1, pad, pad, 1], [0, 1, 1, 2, 3, 3], np.uint32)
    call.check_indices()
    pool = call["recurrent_state"].copy()
    call.run(cpu_backend)
    assert (call["out"][0] != 0).all()
    assert (call["out"][1:] == 0).all()
    np.testing.assert_array_equal(call["recurrent_state"][[0, 2, 3]], pool[[0, 2, 3]])


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([-1, 2, 3], "input_row_offsets[0]: expected at least 0, got -1"),
        ([0, -(2**31), 3], "input_row_offsets[1]: expected at least 0, got -2147483648"),
        ([0, 3, 2], "input_row_offsets[2]: expected at least input_row_offsets[1] = 3, got 2"),
        ([2, 0, 3], "input_row_offsets[1]: expected at least input_row_offsets[0] = 2, got 0"),
        ([0, 2, 4], "input_row_offsets[2]: expected at most total_seq_len = 3, got 4"),
        ([4, 4, 4], "input_row_offsets[0]: expected at most total_seq_len = 3, got 4"),
        ([0, 3, 2**31 - 1], "input_row_offsets[2]: expected at most total_seq_len = 3, got 2147483647"),
    ],
)
def test_offsets_that_are_no_row_ranges(call: Call, cpu_backend: str, offsets: list[int], message: str) -> None:
    with_indices(call, [0, 1], offsets, np.int32)
    assert call.refusal(IndexValueError, cpu_backend) == message


def test_unsigned_offsets_past_2_to_31_are_no_negative_ones(call: Call, cpu_backend: str) -> None:
    with_indices(call, [0, 1], [0, 2, 2**32 - 1], np.uint32)
    message = "input_row_offsets[2]: expected at most total_seq_len = 3, got 4294967295"
    assert call.refusal(IndexValueError, cpu_backend) == message


def test_no_sequences_still_have_one_offset_that_counts(call: Call, cpu_backend: str) -> None:
    with_indices(call, [], [4], np.uint32)
    message = "input_row_offsets[0]: expected at most total_seq_len = 3, got 4"
    assert call.refusal(IndexValueError, cpu_backend) == message
    with_indices(call, [], [3], np.uint32)
    call.run(cpu_backend)
    assert (call["out"] == 0).all()


def test_offsets_are_judged_before_slots(call: Call, cpu_backend: str) -> None:
    with_indices(call, [9, 9], [0, 2, 4], np.uint32)
    assert call.refusal(IndexValueError, cpu_backend).startswith("input_row_offsets[2]")


@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_padding_is_the_same_32_bits_in_both_types(new_call: type[Call], cpu_backend: str, index_type: Any) -> None:
    """Field case 7: PAD_SLOT as uint32 and -1 as int32 both give zeros and touch no slot."""
    call = new_call(lengths=(1, 1, 3, 1), max_slots=6)
    with_indices(call, [2, gdn.PAD_SLOT, 5, gdn.PAD_SLOT], [0, 1, 2, 5, 6], index_type)
    assert call["slot_idx"][1] == (gdn.PAD_SLOT if index_type is np.uint32 else -1)
    pool = call["recurrent_state"].copy()
    call.check_indices()
    call.run(cpu_backend)
    assert (call["out"][[1, 5]] == 0).all()
    assert (call["out"][[0, 2, 3, 4]] != 0).all()
    np.testing.assert_array_equal(call["recurrent_state"][[0, 1, 3, 4]], pool[[0, 1, 3, 4]])
    assert (call["recurrent_state"][[2, 5]] != pool[[2, 5]]).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_a_batch_of_nothing_but_padding(
    op_calls: dict[str, Callable[[str], Call]], backend: str, index_type: Any
) -> None:
    """Beside field case 7: where every row is padding each op zeroes its output and changes nothing else."""
    for op, make in op_calls.items():
        call = make("float32")
        if op == "gates":  # no tables
            continue
        slots = "row_ids" if op == "fold" else "slot_idx"
        call[slots] = np.full(call[slots].shape, gdn.PAD_SLOT, np.uint32).view(index_type)
        before = {name: value.copy() for name, value in call.arguments.items()}
        call.check_indices()
        put(call, backend).run(backend)
        for name, value in before.items():
            expected = np.zeros_like(value) if name == "out" else value
            np.testing.assert_array_equal(get(call[name]), expected, f"{op}: {name}")


def put(call: Call, backend: str) -> Call:
    """The call with its arrays where a backend wants them."""
    call.arguments = {name: on(backend, value) for name, value in call.arguments.items()}
    return call


def on(backend: str, array: Any) -> Any:
    if backend != "cuda":
        return array
    import cupy

    return cupy.asarray(array)


def get(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


def test_tables_out_of_the_middle_of_longer_ones(op_calls: dict[str, Callable[[str], Call]], backend: str) -> None:
    """Beside field case 10: each op's tables as views amid entries that are rows in use, padding and nonsense."""
    for op, make in op_calls.items():
        plain, cut = put(make("float32"), backend), put(make("float32"), backend)
        longer = {}
        for name, values in make("float32").arguments.items():
            if values.dtype != np.uint32:
                continue
            first = values[..., :1]
            margins = [np.full_like(first, value) for value in (99, 2**32 - 1, 1, 0, 2, 3)]
            longer[name] = np.concatenate([*margins[:3], values, *margins[3:]], axis=-1)
            cut[name] = on(backend, longer[name])[..., 3 : 3 + values.shape[-1]]
        plain.run(backend)
        cut.run(backend)
        for name, value in plain.arguments.items():
            np.testing.assert_array_equal(get(cut[name]), get(value), f"{op}: {name}")
        assert op == "gates" or len(longer) >= 2


def test_padding_is_refused_where_a_pool_has_no_slots_but_it(new_call: type[Call], cpu_backend: str) -> None:
    call = new_call(max_slots=0)
    assert "max_slots = 0" in call.refusal(IndexValueError, cpu_backend)
    call["slot_idx"][:] = gdn.PAD_SLOT
    assert (call.run(cpu_backend) == 0).all()


# ---- check_indices itself ----


def test_a_right_call_passes_and_changes_nothing(call: Call) -> None:
    before = {name: value.tobytes() for name, value in call.arguments.items()}
    assert ops.check_indices(ops.gated_delta_recurrence_fwd, *call.six) is None
    assert ops.check_indices(ops.gated_delta_recurrence_fwd, *call.six, out=call["out"]) is None
    assert {name: value.tobytes() for name, value in call.arguments.items()} == before


@pytest.mark.parametrize("op", [ops.gated_delta_recurrence_fwd_shape, np.sum, "gated_delta_recurrence_fwd", None])
def test_an_op_without_index_rules(call: Call, op: Any) -> None:
    with pytest.raises(GdnError) as caught:
        ops.check_indices(op, *call.six)
    got = getattr(op, "__name__", repr(op))
    known = (
        "gated_delta_conv1d_commit, gated_delta_conv1d_fwd, gated_delta_gates, gated_delta_recurrence_fwd, "
        "gated_delta_recurrence_verify_ring, gated_delta_state_fold"
    )
    assert str(caught.value) == f"op: expected one of {known}, got {got}"


def test_the_keywords_of_the_op_are_taken(call: Call) -> None:
    names = [name for name in call.arguments if name != "out"]
    by_name = {name: call[name] for name in names}
    assert ops.gated_delta_recurrence_fwd(**by_name).shape == (3, 16)
    ops.check_indices(ops.gated_delta_recurrence_fwd, **by_name)
    assert ops.gated_delta_recurrence_fwd_shape(**by_name) == (3, 16)


def test_everything_that_the_op_refuses_is_refused(call: Call) -> None:
    with pytest.raises(ShapeError, match=r"^slot_idx: expected shape \[batch_size\]"):
        ops.check_indices(ops.gated_delta_recurrence_fwd, *call.six[:4], call["slot_idx"][None], call.six[5])


@pytest.mark.gpu
def test_values_on_a_gpu_are_read_on_demand(call: Call) -> None:
    import cupy

    with_indices(call, [3, 3], [0, 2, 3], np.int32)
    arrays = [cupy.asarray(array) for array in call.six]
    ops.gated_delta_recurrence_fwd(*arrays)
    with pytest.raises(IndexValueError, match=r"^slot_idx\[1\]: .*, got 3, as slot_idx\[0\]$"):
        ops.check_indices(ops.gated_delta_recurrence_fwd, *arrays)
