"""Arrays that share memory: refused where one of them is written, down to the byte."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import check
from gdn.arrays import Argument
from gdn.errors import LayoutError

if TYPE_CHECKING:
    from tests.conftest import Call

INPUTS = ("qkv_conv_output", "decay_per_token", "beta_per_token", "slot_idx", "input_row_offsets")
ARGUMENTS = (*INPUTS, "recurrent_state", "out")


def assert_same_results(call: Call, plain: Call, backend: str) -> None:
    call.run(backend)
    plain.run(backend)
    np.testing.assert_array_equal(call["out"], plain["out"])
    np.testing.assert_array_equal(call["recurrent_state"], plain["recurrent_state"])


@pytest.mark.parametrize("other", ARGUMENTS[:-1])
def test_a_readout_that_overlaps(call: Call, cpu_backend: str, other: str) -> None:
    values = call[other]
    memory = np.zeros(values.nbytes + call["out"].nbytes - 4, np.uint8)
    call[other] = memory[: values.nbytes].view(values.dtype).reshape(values.shape)
    call[other][...] = values
    call["out"] = memory[values.nbytes - 4 :].view(np.float32).reshape(3, 16)
    message = f"out: expected memory of its own, apart from {other}, got overlapping arrays"
    assert call.refusal(LayoutError, cpu_backend) == message


@pytest.mark.parametrize("other", INPUTS)
def test_a_pool_that_overlaps(call: Call, cpu_backend: str, other: str) -> None:
    values, pool = call[other], call["recurrent_state"]
    memory = np.zeros(values.nbytes + pool.nbytes - 4, np.uint8)
    call["recurrent_state"] = memory[: pool.nbytes].view(np.float32).reshape(pool.shape)
    call[other] = memory[pool.nbytes - 4 :].view(values.dtype).reshape(values.shape)
    call[other][...] = values
    message = f"recurrent_state: expected memory of its own, apart from {other}, got overlapping arrays"
    assert call.refusal(LayoutError, cpu_backend) == message


def test_arrays_that_touch_do_not_overlap(new_call: type[Call], cpu_backend: str) -> None:
    call = new_call()
    memory = np.zeros(sum(call[name].nbytes for name in ARGUMENTS), np.uint8)
    first = 0
    for name in ARGUMENTS:
        values = call[name]
        call[name] = memory[first : first + values.nbytes].view(values.dtype).reshape(values.shape)
        call[name][...] = values
        first += values.nbytes
    assert_same_results(call, new_call(), cpu_backend)


def test_interleaved_slices_of_one_buffer_do_not_overlap(new_call: type[Call], cpu_backend: str) -> None:
    """The readout in the value channels' neighbours: rows of both alternate in one buffer."""
    call = new_call()
    rows = np.full((3, 32 + 16), 7, np.float32)
    rows[:, :32] = call["qkv_conv_output"]
    call["qkv_conv_output"], call["out"] = rows[:, :32], rows[:, 32:]
    slots = np.zeros((4, 2, 2, 8, 8), np.float32)
    slots[:, 0] = call["recurrent_state"]
    call["recurrent_state"] = slots[:, 0]
    assert_same_results(call, new_call(), cpu_backend)


@pytest.mark.parametrize("column", [31, 32])
def test_slices_that_share_one_column_overlap(call: Call, cpu_backend: str, column: int) -> None:
    rows = np.full((3, 64), 7, np.float32)
    call["qkv_conv_output"], call["out"] = rows[:, :32], rows[:, column : column + 16]
    if column < 32:
        message = call.refusal(LayoutError, cpu_backend)
        assert message == "out: expected memory of its own, apart from qkv_conv_output, got overlapping arrays"
    else:
        assert call.run(cpu_backend) is call["out"]


def test_inputs_may_overlap_each_other(new_call: type[Call], cpu_backend: str) -> None:
    call, plain = new_call(), new_call()
    plain["beta_per_token"] = plain["decay_per_token"].copy()
    call["beta_per_token"] = call["decay_per_token"]
    call["slot_idx"] = call["input_row_offsets"][:2]
    plain["slot_idx"] = call["slot_idx"].copy()
    assert_same_results(call, plain, cpu_backend)


def described(name: str, shape: tuple[int, int], strides: tuple[int, int], pointer: int, itemsize: int = 4) -> Argument:
    """An argument of these strides in bytes at an address where there may be no memory at all."""
    size = shape[0] * shape[1]
    end = pointer + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + itemsize
    elements = tuple(stride // itemsize for stride in strides)
    return Argument(name, None, shape, elements, size, "", itemsize, pointer, pointer, end, "cpu")


def test_an_overlap_too_hard_to_decide_is_refused() -> None:
    """Exact overlap of strided arrays is a search; one that is cut short counts as overlap."""
    one = described("one", (343, 262), (246268, 32784), 2**40)
    other = described("other", (214, 122), (13228, 140220), 2**40 + 32)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(check._Addresses(one), check._Addresses(other), max_work=check._OVERLAP_STEPS)
    with pytest.raises(LayoutError, match=r"^one: expected memory of its own, apart from other, got overlapping"):
        check.require_disjoint(one, [other])
    check.require_disjoint(one, [other._replace(pointer=2**41, begin=2**41, end=2**41 + 2**30)])


def test_arrays_apart_after_some_search_are_taken() -> None:
    one = described("one", (17, 99), (7124, 19280), 2**40)
    other = described("other", (37, 62), (22540, 21888), 2**40 + 175864)
    with pytest.raises(np.exceptions.TooHardError):
        np.shares_memory(check._Addresses(one), check._Addresses(other), max_work=1000)
    check.require_disjoint(one, [other])


def test_arrays_apart_that_are_too_hard_to_tell_apart_are_refused() -> None:
    """A search without a bound would find these apart, others not in a lifetime."""
    one = described("one", (288, 103), (158448, 165916), 2**40)
    other = described("other", (129, 100), (21348, 26596), 2**40 + 40848)
    assert not np.shares_memory(check._Addresses(one), check._Addresses(other))
    with pytest.raises(LayoutError, match=r"^one: expected memory of its own, apart from other, got overlapping"):
        check.require_disjoint(one, [other])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (((262400, 8192), (32768, 2), 2**40, 2), ((262400, 4096), (32768, 4), 2**40 + 16384)),
        (((262400, 8192), (32770, 2), 2**40, 2), ((262400, 8193), (32770, 2), 2**40 + 16384, 2)),
        (((262400, 8192), (65536, 8), 2**40), ((262400, 8192), (65536, 8), 2**40 + 4)),
        (((262400, 48), (16512, 2), 2**40, 2), ((262400, 8192), (16512, 2), 2**40 + 96, 2)),
    ],
    ids=["columns of one buffer", "columns and nothing between", "every other element", "gates beside channels"],
)
def test_large_interleaved_arrays_are_decided(first: Any, second: Any) -> None:
    check.require_disjoint(described("first", *first), [described("second", *second)])
    shape, strides, pointer, *itemsize = second
    one_element_lower = described("second", shape, strides, pointer - (itemsize or [4])[0], *itemsize)
    with pytest.raises(LayoutError, match=r"^first: expected memory of its own, apart from second"):
        check.require_disjoint(described("first", *first), [one_element_lower])


def test_empty_arrays_overlap_nothing(new_call: type[Call], cpu_backend: str) -> None:
    call = new_call(lengths=(0, 0))
    pool = call["recurrent_state"].copy()
    call["out"] = call["recurrent_state"].reshape(-1, 16)[3:3]
    assert call.run(cpu_backend).shape == (0, 16)
    np.testing.assert_array_equal(call["recurrent_state"], pool)
