"""NumPy arrays over the CPU memory of other libraries, by DLPack.

NumPy's own reader refuses bfloat16, and before NumPy 2.1 it makes every array read-only. A capsule of DLPack is a
struct with a destructor, so that there is little to do: an array over the memory keeps the capsule.
"""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

_VERSION = (1, 0)
_READ_ONLY = 1
_BFLOAT = 4
#: NumPy's letter for a type code; bfloat16 is shown as words first.
_KINDS = {0: "i", 1: "u", 2: "f", _BFLOAT: "u", 5: "c", 6: "b"}


class _Tensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # in elements; none for a dense array
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    """`DLManagedTensorVersioned` of dlpack.h, from DLPack 1.0 on; before, a capsule holds the tensor first."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes, _is_capsule.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_address_in = ctypes.pythonapi.PyCapsule_GetPointer
_address_in.argtypes, _address_in.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


class _Shown:
    """Memory as NumPy takes it; lives as long as arrays over it, and keeps the capsule, whose end frees the memory."""

    def __init__(self, capsule: Any, interface: dict[str, Any]) -> None:
        self._capsule = capsule
        self.__array_interface__ = interface


def numpy_array(producer: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over the CPU memory of whatever has `__dlpack__`, bfloat16 included, without a copy.

    It is read-only unless the producer says, as DLPack 1.0 lets it, that its memory may be written.
    Raises BufferError for what NumPy has no type for, and what the producer raises.
    """
    try:
        capsule = producer.__dlpack__(max_version=_VERSION, copy=False)
    except TypeError:  # it knows DLPack from before 1.0
        capsule = producer.__dlpack__()
    tensor, is_writable = read(capsule)
    kind = _KINDS.get(tensor.type_code)
    if kind is None or tensor.lanes != 1 or tensor.bits % 8:
        raise BufferError(f"DLPack type {tensor.type_code} of {tensor.bits} bits and {tensor.lanes} lanes")
    itemsize = tensor.bits // 8
    interface = {
        "version": 3,
        "shape": tuple(tensor.shape[: tensor.ndim]),
        "strides": tuple(stride * itemsize for stride in tensor.strides[: tensor.ndim]) if tensor.strides else None,
        "typestr": f"{'|' if itemsize == 1 else '='}{kind}{itemsize}",
        "data": ((tensor.data or 0) + tensor.byte_offset, not is_writable),
    }
    array: np.ndarray[Any, Any] = np.asarray(_Shown(capsule, interface))
    return array.view(ml_dtypes.bfloat16) if tensor.type_code == _BFLOAT else array


def read(capsule: Any) -> tuple[_Tensor, bool]:
    """What a capsule holds, at its very address, and whether it may be written.

    Raises BufferError for something else, and for a version of DLPack that is not known here.
    """
    if _is_capsule(capsule, b"dltensor_versioned"):
        versioned = _Versioned.from_address(_address_in(capsule, b"dltensor_versioned"))
        if versioned.major > _VERSION[0]:
            raise BufferError(f"DLPack {versioned.major}.{versioned.minor}, later than {_VERSION[0]}")
        return versioned.tensor, not versioned.flags & _READ_ONLY
    if _is_capsule(capsule, b"dltensor"):
        return _Tensor.from_address(_address_in(capsule, b"dltensor")), False
    raise BufferError(f"{type(capsule).__name__} instead of a DLPack capsule")
