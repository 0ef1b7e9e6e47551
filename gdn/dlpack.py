"""NumPy arrays over the CPU memory of other libraries, by DLPack; bfloat16 too, which NumPy's own reader refuses."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np

# As in dlpack.h. A capsule's name says which struct it holds; the number is where in it the type code lies.
_TYPE_CODE_OFFSETS = {b"dltensor": 20, b"dltensor_versioned": 32 + 20}
_UNSIGNED = 1
_BFLOAT = 4

_is_capsule = ctypes.pythonapi.PyCapsule_IsValid
_is_capsule.argtypes, _is_capsule.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_int
_address_in = ctypes.pythonapi.PyCapsule_GetPointer
_address_in.argtypes, _address_in.restype = (ctypes.py_object, ctypes.c_char_p), ctypes.c_void_p


def numpy_array(producer: Any) -> np.ndarray[Any, Any]:
    """A NumPy array over the CPU memory of whatever has `__dlpack__`, without a copy.

    It is read-only unless the producer says, as DLPack 1.0 lets it, that its memory may be written.
    Raises what the producer and NumPy raise where memory cannot be shared.
    """
    words = _Words(producer)
    array: np.ndarray[Any, Any] = np.from_dlpack(words)
    return array.view(ml_dtypes.bfloat16) if words.are_bfloat16 else array


class _Words:
    """A producer whose bfloat16 elements are shown as words of 16 bits, a type that NumPy takes."""

    def __init__(self, producer: Any) -> None:
        self._producer = producer
        self.are_bfloat16 = False

    def __dlpack_device__(self) -> Any:
        return self._producer.__dlpack_device__()

    def __dlpack__(self, **keywords: Any) -> Any:
        capsule = self._producer.__dlpack__(**keywords)  # holds a struct of its own, so that it may be changed
        type_code = type_code_of(capsule)
        if type_code is not None and type_code.value == _BFLOAT:
            type_code.value = _UNSIGNED
            self.are_bfloat16 = True
        return capsule


def type_code_of(capsule: Any) -> ctypes.c_uint8 | None:
    """The type code in a DLPack capsule, to be read and changed; None for something else."""
    for name, offset in _TYPE_CODE_OFFSETS.items():
        if _is_capsule(capsule, name):
            return ctypes.c_uint8.from_address(_address_in(capsule, name) + offset)
    return None
