"""Launches whose grid may begin before the one in front of it in the stream has ended, which CuPy has no call for.

CUDA calls this programmatic dependent launch: `cuLaunchKernelEx` with the attribute "programmatic stream
serialization". The structures are those of the CUDA driver API, `CUlaunchConfig` and `CUlaunchAttribute`.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

#: Compute capability from which on grids can begin early, and wait for each other in a kernel.
MIN_COMPUTE_CAPABILITY = (9, 0)

_MIN_DRIVER = 12030  # stream captures know such launches from CUDA 12.3 on
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_int),
        ("padding", ctypes.c_char * 4),
        ("is_allowed", ctypes.c_int),
        ("rest", ctypes.c_char * 60),  # the value is a union of 64 bytes
    )


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("num_attributes", ctypes.c_uint),
    )


class EarlyLaunch:
    """A kernel with its grid and the addresses of its arguments, for any stream, by one thread at a time."""

    def __init__(
        self, function: int, num_blocks: int, threads_per_block: int, shared_bytes: int, argument_addresses: int
    ) -> None:
        self._attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, b"", 1)
        attributes = ctypes.pointer(self._attribute)
        self._config = _Config((num_blocks, 1, 1), (threads_per_block, 1, 1), shared_bytes, None, attributes, 1)
        self._behind_config = ctypes.c_void_p(function), ctypes.c_void_p(argument_addresses), None

    def __call__(self, stream: int) -> None:
        """Enqueue the kernel; CuPy's CUDADriverError where the driver refuses."""
        self._config.stream = stream
        status = _launch_function()(ctypes.byref(self._config), *self._behind_config)
        if status:
            import cupy

            raise cupy.cuda.driver.CUDADriverError(status)


@cache
def is_possible() -> bool:
    """Whether the driver here has such launches."""
    import cupy

    if cupy.cuda.runtime.driverGetVersion() < _MIN_DRIVER:
        return False
    try:
        _launch_function()
    except (OSError, AttributeError):  # a driver by another name, say
        return False
    return True


@cache
def _launch_function() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.POINTER(_Config), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    function.restype = ctypes.c_int
    return function
