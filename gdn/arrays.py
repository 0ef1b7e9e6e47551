"""Taking arrays without a copy: NumPy, CuPy, and whatever speaks DLPack or `__cuda_array_interface__`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from gdn import dlpack
from gdn.errors import DeviceError, DTypeError, GdnError, LayoutError, ShapeError, rejection

CPU = "cpu"
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "uint32": np.dtype(np.uint32),
    "int32": np.dtype(np.int32),
    "uint8": np.dtype(np.uint8),  # memory, whatever it holds
}
#: Bytes of the kernels' widest accesses. What is compiled and launched may depend on addresses by this much alone.
ALIGNMENT = 16
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# Device types of DLPack: memory of the CPU, plain or pinned for a GPU; memory of a GPU, plain or managed.
_DLPACK_CPU = (1, 3)
_DLPACK_CUDA = (2, 13)


class Argument(NamedTuple):
    """One array of a call. Strides are in elements; `place` is "cpu" or "cuda:<device>".

    `begin` and `end` are the first byte it occupies and the one behind its last, equal for an empty array. For a
    description made from a shape alone, `array` and `place` are None and addresses are 0.
    """

    name: str
    array: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int
    dtype: str
    itemsize: int
    pointer: int
    begin: int
    end: int
    place: str | None

    def is_dense(self, first_axis: int = 0) -> bool:
        """Whether the axes from `first_axis` on lie row-major without gaps."""
        expected = 1
        for length, stride in zip(self.shape[:first_axis:-1], self.strides[:first_axis:-1], strict=True):
            if length != 1 and stride != expected:
                return False
            expected *= length
        return first_axis >= len(self.shape) or self.shape[first_axis] == 1 or self.strides[first_axis] == expected

    def rows_are_packed(self) -> bool:
        """Whether the last axis is dense and every start of a row lies on a 16-byte boundary; so it is without rows.

        Kernels then use their widest accesses; the results are the same bits either way.
        """
        if not self.size:  # strides of such arrays, which NumPy and CuPy make 0, say nothing
            return True
        channel_is_next = self.shape[-1] <= 1 or self.strides[-1] == 1
        starts = (self.pointer, *(stride * self.itemsize for stride in self.strides[:1] if self.shape[0] > 1))
        return channel_is_next and all(start % ALIGNMENT == 0 for start in starts)


def take(name: str, value: Any) -> Argument:
    """Describe an array argument without copying it.

    Raises DTypeError for something that is no array and DeviceError for one that lives in a place no backend
    can reach.
    """
    array = value if type(value) is np.ndarray else _adopt(name, value)
    if isinstance(array, np.ndarray):
        pointer, place = array.ctypes.data, CPU
    else:
        pointer, place = array.data.ptr, f"cuda:{array.device.id}"
    shape, dtype, itemsize = array.shape, array.dtype, array.itemsize
    strides = _whole_elements(name, array.strides, itemsize)
    if pointer % (itemsize or 1):
        raise LayoutError(rejection(name, f"an address that is a multiple of {itemsize} bytes", pointer))
    size = array.size
    begin = end = pointer
    if size:
        for length, stride in zip(shape, strides, strict=True):
            if stride > 0:
                end += stride * (length - 1) * itemsize
            else:
                begin += stride * (length - 1) * itemsize
        end += itemsize
    dtype_name = _NAMES.get(dtype) or _dtype_name(dtype)
    return Argument(name, array, shape, strides, size, dtype_name, itemsize, pointer, begin, end, place)


def signature(values: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
    """What a call can see of CuPy arrays: first all but their addresses, then these.

    The first part has an address's remainder by `ALIGNMENT`, and compares equal for like arrays. None where there is
    another array than CuPy's own; an argument left out, None, has the address 0.
    """
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)  # another thread may be importing it
    if ndarray is None:
        return None
    seen: list[Any] = []
    addresses: list[int] = []
    for value in values:
        if type(value) is ndarray:
            memory = value.data
            address = memory.ptr
            seen.append((value.shape, value.strides, value.dtype, memory.device_id, address % ALIGNMENT))
            addresses.append(address)
        elif value is None:
            seen.append(None)
            addresses.append(0)
        else:
            return None
    return seen, addresses


def _whole_elements(name: str, byte_strides: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in elements; raises LayoutError where one is not whole."""
    strides = tuple([stride // itemsize for stride in byte_strides]) if itemsize else ()
    if tuple([stride * itemsize for stride in strides]) != byte_strides:
        raise LayoutError(
            rejection(name, "strides in whole elements", f"{byte_strides} bytes for elements of {itemsize}")
        )
    return strides


def _adopt(name: str, value: Any) -> Any:
    """A NumPy or CuPy array over the memory of `value`."""
    _refuse_mask(name, value)
    if isinstance(value, np.ndarray):
        return np.asarray(value)
    ndarray = getattr(sys.modules.get("cupy"), "ndarray", None)  # another thread may be importing it
    if ndarray is not None and isinstance(value, ndarray):
        return value
    try:
        _refuse_negation(name, value)
        if hasattr(value, "__dlpack_device__"):
            device_type = int(value.__dlpack_device__()[0])
            if device_type in _DLPACK_CPU:
                return dlpack.numpy_array(value)
            if device_type in _DLPACK_CUDA:
                # CuPy names its current stream, and the producer has that wait for what it has enqueued elsewhere.
                return _cupy(name).from_dlpack(value)
            raise DeviceError(rejection(name, "an array in CPU or CUDA memory", f"DLPack device type {device_type}"))
        if hasattr(value, "__cuda_array_interface__"):
            return _cupy(name).asarray(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, GdnError):
            raise
        raise DTypeError(
            rejection(name, "an array whose memory can be shared", f"{_type_name(value)}: {error}")
        ) from error
    raise DTypeError(rejection(name, "a NumPy or CuPy array, or a GPU array by DLPack", _type_name(value)))


def _refuse_mask(name: str, value: Any) -> None:
    if isinstance(value, np.ma.MaskedArray):
        raise DTypeError(rejection(name, "an array without a mask, which no op would honour", _type_name(value)))


def _refuse_negation(name: str, value: Any) -> None:
    """PyTorch keeps the sign of some views (`x.conj().imag`) in a flag, and exports the memory all the same."""
    is_negated = getattr(value, "is_neg", None)
    if callable(is_negated) and is_negated():
        expected = "memory that holds the values themselves (call .resolve_neg())"
        raise LayoutError(rejection(name, expected, f"{_type_name(value)} with the negative bit set"))


def _cupy(name: str) -> Any:
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            rejection(name, "CuPy for arrays on a GPU (install gdn[cuda12] or gdn[cuda13])", f"no CuPy: {error}")
        ) from error
    return cupy


def _type_name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")


def describe(name: str, value: Any) -> Argument:
    """Describe anything that has `.shape` and `.dtype`, without touching its memory or its place."""
    _refuse_mask(name, value)
    try:
        shape, dtype_name = _lengths(value.shape), _dtype_name(value.dtype)
        itemsize = DTYPES[dtype_name].itemsize if dtype_name in DTYPES else 1
        strides = _strides_of(name, value, shape, itemsize)
    except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, GdnError):
            raise
        raise DTypeError(rejection(name, "something with a shape and a dtype", _type_name(value))) from error
    return Argument(name, None, shape, strides, math.prod(shape), dtype_name, itemsize, 0, 0, 0, None)


def _lengths(shape: Any) -> tuple[int, ...]:
    lengths = tuple(int(length) for length in shape)
    if any(length < 0 for length in lengths):
        raise ValueError(f"a negative length in {lengths}")
    return lengths


def _dtype_name(dtype: Any) -> str:
    """The element type's name for NumPy, JAX ("float32") and PyTorch ("torch.float32") alike."""
    try:
        numpy_dtype = np.dtype(dtype)
    except TypeError:
        return str(dtype).rpartition(".")[2]
    return numpy_dtype.name if numpy_dtype.isnative else str(numpy_dtype)


def _strides_of(name: str, value: Any, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides where the object has them (NumPy, CuPy), row-major where it is a shape alone."""
    strides = getattr(value, "strides", None)
    if isinstance(strides, tuple) and len(strides) == len(shape):
        return _whole_elements(name, strides, itemsize)
    if callable(getattr(value, "stride", None)):  # PyTorch counts in elements already
        return tuple(int(stride) for stride in value.stride())
    dense: list[int] = []
    step = 1
    for length in reversed(shape):
        dense.insert(0, step)
        step *= length
    return tuple(dense)


def empty(shape: tuple[int, ...], dtype: str, place: str, name: str = "out") -> Any:
    """A new array in the place of a call's arguments; `name` is what the caller could have given instead.

    Raises DeviceError in a stream capture: there an allocation may fail, and memory that CuPy gives away again once the
    array is gone would be written by every replay.
    """
    if place == CPU:
        return np.empty(shape, DTYPES[dtype])
    import cupy

    if is_capturing(device_index(place)):
        raise DeviceError(rejection(name, "an array to write to, which a stream capture does not make", None))
    with in_place(place):
        return cupy.empty(shape, DTYPES[dtype])


def is_capturing(device: int) -> bool:
    """Whether CuPy's current stream of a device is being captured into a graph, or cannot be asked for one that is."""
    import cupy

    with cupy.cuda.Device(device):
        try:
            return bool(cupy.cuda.get_current_stream(device).is_capturing())
        except RuntimeError:  # a capture that was broken, or one of another stream that the default stream waits for
            return True


def require_float_name(name: str, dtype: Any) -> None:
    """The name of an element type that models' values have; raises DTypeError for anything else."""
    floats = [known for known, of_numpy in DTYPES.items() if of_numpy.kind not in "iu"]
    if dtype not in floats:
        raise DTypeError(rejection(name, f"one of {', '.join(floats)}", repr(dtype)))


def require_place(place: Any) -> None:
    """A place as arrays of a call have one; raises DeviceError for anything else."""
    if place != CPU and not re.fullmatch(r"cuda:\d+", str(place)):
        raise DeviceError(rejection("place", '"cpu", or "cuda:0" and so on', repr(place)))


def device_index(place: str) -> int:
    """The number of the GPU that a place is."""
    return int(place.removeprefix("cuda:"))


def in_place(place: str) -> AbstractContextManager[Any]:
    """Array operations in here run on the device of that place."""
    if place == CPU:
        return nullcontext()
    import cupy

    device: AbstractContextManager[Any] = cupy.cuda.Device(device_index(place))
    return device


def to_numpy(argument: Argument) -> np.ndarray[Any, Any]:
    """The values on the CPU; for a GPU array this copies and waits."""
    if argument.array is None:
        raise ShapeError(rejection(argument.name, "an array with values", "a shape alone"))
    if argument.place == CPU:
        return np.asarray(argument.array)
    result: np.ndarray[Any, Any] = argument.array.get()
    return result
