"""Kernels on an NVIDIA GPU through CuPy: load or compile, keep, launch on the current stream.

The only file that knows `cupy.RawModule`. CuPy is imported at the first use of a GPU.
"""

from __future__ import annotations

import tempfile
import threading
from array import array
from contextlib import suppress
from functools import cache, lru_cache
from threading import Lock
from typing import Any

from gdn.arrays import is_capturing
from gdn.backends import binaries, early_launch, nvrtc
from gdn.backends import cache as entries
from gdn.backends.early_launch import EarlyLaunch
from gdn.backends.launch import Launch, Variant, source
from gdn.errors import DeviceError, rejection

#: Rounding instructions for bfloat16 exist from here on.
MIN_COMPUTE_CAPABILITY = (8, 0)

_ALL_BITS = 2**64 - 1

_functions: dict[tuple[Variant, int], Any] = {}
_compile_lock = Lock()


@lru_cache(maxsize=1)
def unavailable_reason() -> str | None:
    """Why no kernel can run here, in one line; None where it can."""
    try:
        import cupy
    except Exception as error:  # a CuPy that is there but broken raises whatever broke it
        if nvrtc.is_about_a_folder(error):
            return f"CuPy finds no folder for its cache ({error}); set CUPY_CACHE_DIR to one that can be written"
        return f"CuPy cannot be imported ({error}); install gdn[cuda12] or gdn[cuda13]"
    if not cupy.is_available():
        return "CuPy finds no CUDA device (no NVIDIA driver, or no GPU visible)"
    try:
        cupy.cuda.nvrtc.getVersion()
        capabilities = [capability(device) for device in range(cupy.cuda.runtime.getDeviceCount())]
    except Exception as error:  # a library or driver that is there but does not work
        return f"CuPy cannot use the GPU: {error}"
    if max(capabilities) < MIN_COMPUTE_CAPABILITY:
        return f"no GPU of compute capability {_dotted(MIN_COMPUTE_CAPABILITY)} or later"
    return None


def capability(device: int) -> tuple[int, int]:
    """The compute capability of a device."""
    import cupy

    return divmod(int(cupy.cuda.Device(device).compute_capability), 10)


def served_capabilities() -> tuple[tuple[int, int], ...]:
    """The compute capabilities of the GPUs here that the kernels serve."""
    if unavailable_reason() is not None:
        return ()
    import cupy

    all_here = (capability(device) for device in range(cupy.cuda.runtime.getDeviceCount()))
    return tuple(capability for capability in all_here if capability >= MIN_COMPUTE_CAPABILITY)


def _architecture(device: int) -> str:
    major, minor = capability(device)
    return f"sm_{major}{minor}"


def _dotted(capability: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in capability)


@cache
def require_device(device: int) -> None:
    """The kernels serve this device; raises DeviceError where they do not."""
    found = capability(device)
    if found < MIN_COMPUTE_CAPABILITY:
        expected = f"compute capability {_dotted(MIN_COMPUTE_CAPABILITY)} or later"
        raise DeviceError(rejection(f"cuda:{device}", expected, _dotted(found)))


@cache
def num_multiprocessors(device: int) -> int:
    """Multiprocessors of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


@cache
def shared_bytes_of_multiprocessor(device: int) -> int:
    """Shared memory of a multiprocessor of a device."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerMultiprocessor"])


class _Thread(threading.local):
    """Of each thread: the devices whose context CUDA has made current to it once."""

    def __init__(self) -> None:
        self.devices: set[int] = set()


_thread = _Thread()


class ReadyLaunch:
    """A launch on one device, checked and compiled, that a call enqueues on the device's current stream.

    The arguments lie in memory as the driver reads them; a launch copies them, so that they may be changed between
    launches, by one thread at a time. CuPy's own launch would convert every argument each time, which takes longer than
    everything else.

    Raises what `Launch.check` and `load` raise.
    """

    def __init__(self, launch: Launch, device: int) -> None:
        import cupy

        launch.check()
        kernel = load(launch.variant, device)
        self.launch = launch
        self._cuda: Any = cupy.cuda
        self._device = device
        self.arguments = array("Q", [value & _ALL_BITS for value in launch.arguments])
        first, count = self.arguments.buffer_info()
        self._addresses = array("Q", range(first, first + 8 * count, 8))
        with cupy.cuda.Device(device):
            self._ensure_context()
            self._function = kernel.kernel  # of this device
        addresses, _ = self._addresses.buffer_info()
        num_blocks, block, shared = launch.num_blocks, launch.threads_per_block, launch.variant.launch_shared_bytes
        self._before_stream = (self._function.ptr, num_blocks, 1, 1, block, 1, 1, shared)
        self._behind_stream = (addresses, 0)
        self._early: EarlyLaunch | None = None
        if launch.begins_early and _launches_early(device):
            self._early = EarlyLaunch(self._function.ptr, num_blocks, block, shared, addresses)

    def __call__(self) -> None:
        """Enqueue the kernel. Does not wait."""
        cuda, device = self._cuda, self._device
        if cuda.runtime.getDevice() == device and device in _thread.devices:
            stream = cuda.get_current_stream(device).ptr
            if self._early is None:
                cuda.driver.launchKernel(*self._before_stream, stream, *self._behind_stream)
            else:
                self._early(stream)
            return
        with cuda.Device(device):
            self._ensure_context()
            self()

    def _ensure_context(self) -> None:
        """Make the context of the current device that of this thread, which the driver does not do by itself."""
        if self._device not in _thread.devices:
            self._cuda.runtime.setDevice(self._device)  # allowed in a capture, too
            _thread.devices.add(self._device)


def _launches_early(device: int) -> bool:
    """Whether grids on this device may begin early, and kernels that are compiled for it know how to wait."""
    return capability(device) >= early_launch.MIN_COMPUTE_CAPABILITY and early_launch.is_possible()


def load(variant: Variant, device: int) -> Any:
    """The compiled kernel of a variant on one device; at the first call a ready binary, else compiled.

    Raises DeviceError for a device the kernels cannot serve, and for a first call in a stream capture;
    KernelCompileError when no binary can be made.
    """
    function = _functions.get((variant, device))
    if function is None:
        if is_capturing(device):
            expected = "a kernel that was compiled and loaded before a stream capture (call gdn.warmup first)"
            raise DeviceError(rejection(variant.kernel.stem, expected, "a first call in one"))
        with _compile_lock:
            function = _functions.get((variant, device)) or _compile(variant, device)
            _functions[variant, device] = function
    return function


def _compile(variant: Variant, device: int) -> Any:
    import cupy

    require_device(device)
    with cupy.cuda.Device(device):
        ready = _load_ready(variant, device)
        if ready is not None:
            return ready
        text = source(f"{variant.kernel.stem}.cu")
        try:
            return _function(cupy.RawModule(code=text, options=nvrtc.module_options(variant)), variant)
        except OSError:  # CuPy's cache cannot be written, so do without
            return _without_cache(variant, device)
        except (cupy.cuda.compiler.CompileException, RuntimeError) as error:
            raise nvrtc.compile_error(variant, str(error)) from error


def _without_cache(variant: Variant, device: int) -> Any:
    """The kernel compiled by NVRTC alone. Raises DeviceError where there is no room for its image either."""
    image = nvrtc.compile_binary(variant, _architecture(device)).image
    try:
        return _of_image(image, variant)
    except OSError as error:
        expected = "a folder that takes the compiled kernel (make room, or set CUPY_CACHE_DIR or TMPDIR to another)"
        refusal = entries.refusal_of_temporary_folder(error)
        raise DeviceError(rejection(variant.kernel.stem, expected, refusal)) from error
    except RuntimeError as error:
        raise nvrtc.compile_error(variant, str(error)) from error


def _load_ready(variant: Variant, device: int) -> Any | None:
    """The kernel from a binary that was compiled ahead of time, None where no such binary can be used here."""
    for binary in binaries.find(variant, capability(device)):
        with suppress(RuntimeError, OSError):  # a driver may refuse what a later compiler made
            return _of_image(binary.image, variant)
    return None


def _of_image(image: bytes, variant: Variant) -> Any:
    """The kernel of an image. The driver gets a file with that alone, which it reads at once."""
    import cupy

    with tempfile.NamedTemporaryFile(prefix="gdn-", suffix=".cubin") as file:
        file.write(image)
        file.flush()
        return _function(cupy.RawModule(path=file.name), variant)


def _function(module: Any, variant: Variant) -> Any:
    """The kernel of a module, which is loaded here, ready for the shared memory that launches ask for."""
    function = module.get_function(variant.kernel.stem)
    if variant.launch_shared_bytes:
        function.max_dynamic_shared_size_bytes = variant.launch_shared_bytes
    _ = function.num_regs  # the driver may load lazily, but for this; a first launch could wait otherwise
    return function
