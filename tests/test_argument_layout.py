"""Strides, alignment and writability of every argument."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import arrays
from gdn.errors import LayoutError

if TYPE_CHECKING:
    from tests.conftest import Call

ARGUMENTS = (
    "qkv_conv_output",
    "decay_per_token",
    "beta_per_token",
    "recurrent_state",
    "slot_idx",
    "input_row_offsets",
    "out",
)
INPUTS = tuple(name for name in ARGUMENTS if name not in ("recurrent_state", "out"))


def result_of(call: Call, backend: str) -> tuple[Any, Any]:
    call.run(backend)
    return call["out"].copy(), call["recurrent_state"].copy()


def assert_same_results(call: Call, plain: Call, backend: str) -> None:
    for given, expected in zip(result_of(call, backend), result_of(plain, backend), strict=True):
        np.testing.assert_array_equal(given, expected)


# ---- Alignment ----


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_address_between_elements(call: Call, cpu_backend: str, argument: str) -> None:
    values = call[argument]
    memory = bytearray(values.nbytes + 1)
    shifted = np.frombuffer(memory, values.dtype, offset=1, count=values.size).reshape(values.shape)
    shifted[...] = values
    call[argument] = shifted
    message = call.refusal(LayoutError, cpu_backend)
    expected = f"{argument}: expected an address that is a multiple of 4 bytes, got {shifted.ctypes.data}"
    assert message == expected


@pytest.mark.parametrize("argument", ["qkv_conv_output", "slot_idx"])
def test_strides_between_elements(call: Call, cpu_backend: str, argument: str) -> None:
    values = call[argument]
    records = np.zeros(values.shape, [("value", values.dtype), ("rest", np.uint8)])
    records["value"] = values
    call[argument] = records["value"]
    got = f"{records.strides} bytes for elements of 4"
    assert call.refusal(LayoutError, cpu_backend) == f"{argument}: expected strides in whole elements, got {got}"
    assert call.shape_refusal(LayoutError) == f"{argument}: expected strides in whole elements, got {got}"


def test_elements_without_bytes(call: Call, cpu_backend: str) -> None:
    call["qkv_conv_output"] = np.zeros((3, 32), "V0")
    message = "qkv_conv_output: expected strides in whole elements, got (0, 0) bytes for elements of 0"
    assert call.refusal(LayoutError, cpu_backend) == message


# ---- The pool ----


@pytest.mark.parametrize(
    "order", [(0, 1, 3, 2), (0, 2, 1, 3), (1, 0, 2, 3)], ids=["transposed", "heads inside", "slots inside"]
)
def test_a_pool_that_is_not_dense(new_call: type[Call], cpu_backend: str, order: tuple[int, ...]) -> None:
    call = new_call(heads=(1, 2, 8, 16))
    pool = call["recurrent_state"]
    call["recurrent_state"] = np.transpose(np.transpose(pool, order).copy(), np.argsort(order))
    np.testing.assert_array_equal(call["recurrent_state"], pool)
    message = call.refusal(LayoutError, cpu_backend)
    if order[0] == 0:
        assert message.startswith("recurrent_state: expected its last 3 axes dense row-major, got strides (")
    assert message.startswith("recurrent_state: expected ")
    assert call.shape_refusal(LayoutError) == message


def test_a_pool_that_is_a_slice_of_columns(call: Call, cpu_backend: str) -> None:
    call["recurrent_state"] = np.zeros((4, 2, 8, 16), np.float32)[..., :8]
    expected = (
        "recurrent_state: expected its last 3 axes dense row-major, "
        "got strides (256, 128, 16, 1) in elements for shape (4, 2, 8, 8)"
    )
    assert call.refusal(LayoutError, cpu_backend) == expected
    assert call.shape_refusal(LayoutError) == expected


@pytest.mark.parametrize("slot_stride", [0, 64, 127, -64])
def test_slots_that_share_memory(call: Call, cpu_backend: str, slot_stride: int) -> None:
    memory = np.zeros(6 * 128, np.float32)
    strides = (slot_stride * 4, 64 * 4, 8 * 4, 4)
    call["recurrent_state"] = np.ndarray((4, 2, 8, 8), np.float32, memory, 4 * 192, strides)
    message = f"recurrent_state: expected a first stride of at least 128 elements, got {slot_stride}"
    assert call.refusal(LayoutError, cpu_backend) == message
    assert call.shape_refusal(LayoutError) == message


def test_slots_in_falling_order_are_accepted(new_call: type[Call], cpu_backend: str) -> None:
    call, plain = new_call(), new_call()
    call["recurrent_state"] = call["recurrent_state"][::-1].copy()[::-1]
    assert call["recurrent_state"].strides[0] < 0
    assert_same_results(call, plain, cpu_backend)


@pytest.mark.parametrize("slots", [0, 1])
def test_strides_of_axes_that_are_never_stepped_along_do_not_matter(
    new_call: type[Call], cpu_backend: str, slots: int
) -> None:
    call = new_call(heads=(1, 1, 8, 8), lengths=(1,) * slots, max_slots=slots)
    pool = call["recurrent_state"]
    call["recurrent_state"] = np.lib.stride_tricks.as_strided(pool, strides=(4, 0, 32, 4))
    plain = new_call(heads=(1, 1, 8, 8), lengths=(1,) * slots, max_slots=slots)
    assert_same_results(call, plain, cpu_backend)


# ---- Arrays that are written ----


@pytest.mark.parametrize("argument", ["recurrent_state", "out"])
def test_read_only_arrays_that_would_be_written(call: Call, cpu_backend: str, argument: str) -> None:
    call[argument].flags.writeable = False
    message = f"{argument}: expected a writable array, got a read-only one"
    assert call.refusal(LayoutError, cpu_backend) == message


def test_read_only_inputs_are_accepted(new_call: type[Call], cpu_backend: str) -> None:
    call = new_call()
    for argument in INPUTS:
        call[argument].flags.writeable = False
    assert_same_results(call, new_call(), cpu_backend)


@pytest.mark.parametrize("strides", [(0, 4), (64, 0), (0, 0), (4, 4), (32, 4), (8, 4)], ids=str)
def test_a_readout_whose_elements_share_memory(call: Call, cpu_backend: str, strides: tuple[int, int]) -> None:
    memory = np.full(64, 7, np.float32)
    call["out"] = np.lib.stride_tricks.as_strided(memory, (3, 16), strides)
    message = call.refusal(LayoutError, cpu_backend)
    elements = tuple(stride // 4 for stride in strides)
    assert message == (
        f"out: expected distinct memory for every element, got strides {elements} in elements for shape (3, 16)"
    )


@pytest.mark.parametrize("strides", [(64, 4), (4, 12), (128, 8), (8, 28), (12, 40)], ids=str)
def test_a_readout_of_any_other_strides(new_call: type[Call], cpu_backend: str, strides: tuple[int, int]) -> None:
    """Strides that interleave rows and columns without ever meeting are taken: (12, 40) bytes for one."""
    call = new_call()
    memory = np.full(256, 7, np.float32)
    call["out"] = np.lib.stride_tricks.as_strided(memory, (3, 16), strides)
    assert_same_results(call, new_call(), cpu_backend)
    assert np.count_nonzero(memory != 7) == 48


@pytest.mark.parametrize("lengths", [(1,), (0, 0)])
def test_a_readout_of_one_row_or_none_may_have_any_row_stride(
    new_call: type[Call], cpu_backend: str, lengths: tuple[int, ...]
) -> None:
    call = new_call(lengths=lengths)
    call["out"] = np.lib.stride_tricks.as_strided(call["out"], strides=(0, 4))
    assert_same_results(call, new_call(lengths=lengths), cpu_backend)


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_an_array_without_elements_is_packed(shape: tuple[int, int]) -> None:
    """NumPy and CuPy give it strides of 0; a batch without tokens needs no kernel of its own for that."""
    assert arrays.take("qkv_conv_output", np.empty(shape, np.float32)).rows_are_packed()
