"""Where arrays live: NumPy, other libraries by DLPack, GPUs, and mixtures of them."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import ops
from gdn.arrays import describe, take, to_numpy
from gdn.check import require_one_place
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
    if np.lib.NumpyVersion(np.__version__) < "2.1.0":
        pytest.skip("this NumPy does not speak DLPack 1.0, with which another library would")
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


def test_a_view_that_negates_what_its_memory_holds(call: Call, cpu_backend: str) -> None:
    """PyTorch's `x.conj().imag`: the sign is a flag of the view, which the memory that it exports is without."""
    values = ThroughDLPack(call["qkv_conv_output"])
    values.is_neg = lambda: True  # type: ignore[attr-defined]
    call["qkv_conv_output"] = values
    kind = f"{ThroughDLPack.__module__}.ThroughDLPack"
    expected = "memory that holds the values themselves (call .resolve_neg())"
    message = f"qkv_conv_output: expected {expected}, got {kind} with the negative bit set"
    assert call.refusal(LayoutError, cpu_backend) == message


@pytest.mark.parametrize("form", ["dlpack", "cuda_array_interface"])
def test_arrays_on_a_gpu_need_cupy(call: Call, cpu_backend: str, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    call["slot_idx"] = ThroughDLPack(call["slot_idx"], device=(2, 0)) if form == "dlpack" else OnGpu()
    message = call.refusal(DeviceError, cpu_backend)
    expected = "slot_idx: expected CuPy for arrays on a GPU (install gdn[cuda12] or gdn[cuda13]), got no CuPy: "
    assert message.startswith(expected)


def test_arrays_in_different_places() -> None:
    first = take("qkv_conv_output", np.zeros(3, np.float32))
    second = first._replace(name="slot_idx", place="cuda:1")
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


@pytest.mark.parametrize("shape", [(-1,), (3, -2), "ab", (1.5, None)], ids=str)
def test_a_shape_that_is_none(shape: Any) -> None:
    with pytest.raises(DTypeError, match=r"^slot_idx: expected something with a shape and a dtype, got "):
        describe("slot_idx", SimpleNamespace(shape=shape, dtype=np.uint32))


@pytest.mark.gpu
def test_arrays_on_cpu_and_gpu_in_one_call(call: Call) -> None:
    import cupy

    for argument in ARGUMENTS[1:]:
        mixed = [call[name] if name != argument else cupy.asarray(call[name]) for name in ARGUMENTS]
        with pytest.raises(DeviceError, match=rf"^{argument}: expected an array on cpu, .*, got one on cuda:0$"):
            ops.gated_delta_recurrence_fwd(*mixed[:-1], out=mixed[-1])
    assert (call["out"] == 7).all()
