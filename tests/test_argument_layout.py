"""Strides, alignment, writability, overlap and place of every argument."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import ops
from gdn.arrays import Argument, describe, take, to_numpy
from gdn.check import require_disjoint, require_one_place
from gdn.errors import DeviceError, DTypeError, LayoutError, ShapeError

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
    assert message.startswith(f"{argument}: expected strides and address in whole elements, got ")


@pytest.mark.parametrize("argument", ["qkv_conv_output", "slot_idx"])
def test_strides_between_elements(call: Call, cpu_backend: str, argument: str) -> None:
    values = call[argument]
    records = np.zeros(values.shape, [("value", values.dtype), ("rest", np.uint8)])
    records["value"] = values
    call[argument] = records["value"]
    message = call.refusal(LayoutError, cpu_backend)
    assert message.startswith(f"{argument}: expected strides and address in whole elements, got strides ")
    assert call.shape_refusal(LayoutError).startswith(f"{argument}: expected strides in whole elements, got ")


def test_elements_without_bytes(call: Call, cpu_backend: str) -> None:
    call["qkv_conv_output"] = np.zeros((3, 32), "V0")
    assert "of 0-byte elements" in call.refusal(LayoutError, cpu_backend)


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


@pytest.mark.parametrize("slot_stride", [0, 64, -64])
def test_slots_that_share_memory(call: Call, cpu_backend: str, slot_stride: int) -> None:
    strides = (slot_stride * 4, 64 * 4, 8 * 4, 4)
    memory = np.zeros((4 * 128,), np.float32)
    call["recurrent_state"] = np.ndarray((4, 2, 8, 8), np.float32, memory, 1024, strides)
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


@pytest.mark.parametrize(
    "strides", [(0, 4), (64, 0), (0, 0), (4, 4), (32, 4), (8, 4)], ids=lambda strides: str(strides)
)
def test_a_readout_whose_elements_share_memory(call: Call, cpu_backend: str, strides: tuple[int, int]) -> None:
    memory = np.full(64, 7, np.float32)
    call["out"] = np.lib.stride_tricks.as_strided(memory, (3, 16), strides)
    message = call.refusal(LayoutError, cpu_backend)
    elements = tuple(stride // 4 for stride in strides)
    assert message == (
        f"out: expected distinct memory for every element, got strides {elements} in elements for shape (3, 16)"
    )


@pytest.mark.parametrize("strides", [(64, 4), (4, 12), (128, 8), (8, 28), (12, 40)], ids=lambda strides: str(strides))
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


# ---- Overlap ----


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


def test_an_overlap_too_hard_to_decide_is_refused() -> None:
    """Strides without a common divisor make exact overlap a search; one that is cut short counts as overlap."""
    shape, strides = (40, 41, 43), (7919 * 6, 7907 * 10, 7901 * 15)

    def argument(name: str, pointer: int) -> Argument:
        return Argument(name, None, shape, strides, "float32", 4, pointer, "cpu")

    with pytest.raises(LayoutError, match=r"^one: expected memory of its own, apart from other, got overlapping"):
        require_disjoint(argument("one", 2**20), [argument("other", 2**20 + 4)])
    require_disjoint(argument("one", 2**20), [argument("other", 2**30)])


# ---- Places ----


class ThroughDLPack:
    """Memory of a NumPy array that another library owns."""

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)


class OnGpu:
    __cuda_array_interface__ = {"shape": (2,), "typestr": "<u4", "data": (0, True), "version": 3}  # noqa: RUF012 - as the protocol has it


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_arrays_of_other_libraries_are_taken_without_a_copy(
    new_call: type[Call], cpu_backend: str, argument: str
) -> None:
    call, plain = new_call(), new_call()
    memory = call[argument]
    call[argument] = ThroughDLPack(memory)
    call.run(cpu_backend)
    plain.run(cpu_backend)
    np.testing.assert_array_equal(memory, plain[argument])


def test_memory_that_cannot_be_shared(call: Call, cpu_backend: str) -> None:
    call["qkv_conv_output"] = ThroughDLPack(call["qkv_conv_output"].astype(">f4"))
    message = call.refusal(DTypeError, cpu_backend)
    assert message.startswith("qkv_conv_output: expected an array whose memory can be shared, got ")
    assert "ThroughDLPack: " in message


def test_memory_of_another_kind_of_device(call: Call, cpu_backend: str) -> None:
    call["qkv_conv_output"] = ThroughDLPack(call["qkv_conv_output"], device=(8, 0))
    message = call.refusal(DeviceError, cpu_backend)
    assert message == "qkv_conv_output: expected an array in CPU or CUDA memory, got DLPack device type 8"


@pytest.mark.parametrize("form", ["dlpack", "cuda_array_interface"])
def test_arrays_on_a_gpu_need_cupy(call: Call, cpu_backend: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    call["slot_idx"] = ThroughDLPack(call["slot_idx"], device=(2, 0)) if form == "dlpack" else OnGpu()
    message = call.refusal(DeviceError, cpu_backend)
    expected = "slot_idx: expected CuPy for arrays on a GPU (install gdn[cuda12] or gdn[cuda13]), got no CuPy: "
    assert message.startswith(expected)


def test_arrays_in_different_places() -> None:
    first = take("qkv_conv_output", np.zeros(3, np.float32))
    second = Argument("slot_idx", None, (3,), (1,), "uint32", 4, 64, "cuda:1")
    assert require_one_place([first, first]) == "cpu"
    assert require_one_place([second, second]) == "cuda:1"
    with pytest.raises(DeviceError) as caught:
        require_one_place([first, second])
    assert str(caught.value) == "slot_idx: expected an array on cpu, where qkv_conv_output is, got one on cuda:1"


def test_a_shape_alone_has_no_place_and_no_values() -> None:
    shape = describe("slot_idx", np.zeros(3, np.uint32))
    with pytest.raises(DeviceError, match=r"^slot_idx: expected an array, got a shape alone$"):
        require_one_place([shape])
    with pytest.raises(ShapeError, match=r"^slot_idx: expected an array with values, got a shape alone$"):
        to_numpy(shape)


@pytest.mark.gpu
def test_arrays_on_cpu_and_gpu_in_one_call(call: Call) -> None:
    import cupy

    for argument in ARGUMENTS[1:]:
        mixed = [call[name] if name != argument else cupy.asarray(call[name]) for name in ARGUMENTS]
        with pytest.raises(DeviceError, match=rf"^{argument}: expected an array on cpu, .*, got one on cuda:0$"):
            ops.gated_delta_recurrence_fwd(*mixed[:-1], out=mixed[-1])
    assert (call["out"] == 7).all()
