"""The `host` backend: the kernels of `kernels/`, compiled for the CPU by a C++ compiler.

A kernel's text, behind that of `kernels/host/cuda_on_cpu.h`, becomes a shared library with one entry
point. It is compiled when it is first needed and kept in the cache (`gdn.backends.cache`).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache as remember
from pathlib import Path
from threading import Lock

from gdn.backends import cache, launch
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.errors import DeviceError, GdnError, KernelCompileError, rejection

_HEADER = "host/cuda_on_cpu.h"
_COMPILERS = ("g++", "c++", "clang++")

# -ffp-contract=off: a product and a sum round separately unless the kernel says fmaf, as `gdn` promises bits.
# -fvisibility, -fno-gnu-unique: two kernels' libraries in one process must not share variables of one name.
# -fno-strict-aliasing: kernels read 16-bit values as the words that hold two.
# -fno-math-errno, -fno-trapping-math: change no value, and let loops over sqrtf and comparisons use vectors.
_FLAGS = (
    "-std=c++17",
    "-shared",
    "-fPIC",
    "-pthread",
    "-ffp-contract=off",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-DGDN_ON_CPU=1",
)
# Used where the compiler knows them. A thread of a block has a stack of 64 KiB (kernels/host/context.h), and
# GCC and Clang spell a limit on frames differently.
_OPTIONAL_FLAGS = (
    ("-march=native",),
    ("-fno-gnu-unique",),
    ("-Werror=frame-larger-than=49152",),
    ("-Wframe-larger-than=49152", "-Werror=frame-larger-than"),
)
_PLAIN_FLAGS = ("-O1",)
# Without the variables' places (-g1) and with fewer passes (-Og) a build takes half the time, and hides no fault.
_SANITIZER_FLAGS = ("-Og", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all")
_MESSAGE_BYTES = 512
_MAX_OUTPUT_LINES = 60
#: What compilers say, in English, where their files find no room; the last of a limit on the size of files.
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large", "File size limit exceeded")

#: How a parameter of each kind lies in its 8 bytes.
_PACKING = {"pointer": "Q", "int64": "q"}


@dataclass(frozen=True, slots=True)
class HostOptions:
    """How kernels are built and run on the CPU; for tests of the kernels themselves.

    sanitize: value for GCC's `-fsanitize=`: "address,undefined" or "thread". The runtime must be preloaded into
        the process: `LD_PRELOAD=$(g++ -print-file-name=libasan.so)`, or libtsan.so.
    order_seed: 0 runs blocks, and the threads of a block, in plain order; another number in an order drawn
        from it, which makes a missing barrier show as a wrong result.
    max_os_threads: blocks that run at once at most; 0 means as many as this process has CPUs.
    """

    sanitize: str = ""
    order_seed: int = 0
    max_os_threads: int = 0


_DEFAULT_OPTIONS = HostOptions()
_options: ContextVar[HostOptions] = ContextVar("gdn_host_options", default=_DEFAULT_OPTIONS)


@contextmanager
def options(*, sanitize: str = "", order_seed: int = 0, max_os_threads: int = 0) -> Iterator[None]:
    """Use these `HostOptions` inside a with block, in the current thread or task."""
    token = _options.set(HostOptions(sanitize, order_seed, max_os_threads))
    try:
        yield
    finally:
        _options.reset(token)


@dataclass(frozen=True, slots=True)
class _Toolchain:
    """A compiler that works: its command with all flags, its name for itself, a digest of what it is."""

    command: tuple[str, ...]
    version: str
    identity: str


def unavailable_reason() -> str | None:
    """Why this machine cannot build kernels for the CPU, in one line; None where it can."""
    try:
        _toolchain()
    except DeviceError as error:
        return str(error)
    return None


def compiler_version() -> str:
    """The compiler's own first line of `--version`. Raises DeviceError where there is none."""
    return _toolchain().version


def _toolchain() -> _Toolchain:
    return _probe(os.environ.get("CXX", ""), os.environ.get("PATH", os.defpath))


@remember
def _probe(cxx: str, path: str) -> _Toolchain:
    """Find the compiler and ask what it is and what it makes of this CPU."""
    if sys.platform != "linux":
        raise DeviceError(f"kernels are compiled for the CPU on Linux only, not on {sys.platform}")
    command = _compiler_command(cxx, path)
    flags = _FLAGS + _supported_flags(command)
    macros = _compiler_output((*command, *flags, "-dM", "-E", "-x", "c++", os.devnull))
    version = _compiler_output((*command, "--version")).partition("\n")[0]
    identity = hashlib.sha256("\0".join((*flags, version, macros)).encode()).hexdigest()
    return _Toolchain(command + flags, version, identity)


def _compiler_command(cxx: str, path: str) -> tuple[str, ...]:
    if cxx.strip():
        command = _words(cxx, path)
        if not command or shutil.which(command[0], path=path) is None:
            raise DeviceError(f"no C++ compiler: CXX={cxx} is not on PATH")
        return command
    for name in _COMPILERS:
        if shutil.which(name, path=path) is not None:
            return (name,)
    raise DeviceError(f"no C++ compiler: set CXX, or put one of {', '.join(_COMPILERS)} on PATH")


def _words(cxx: str, path: str) -> tuple[str, ...]:
    """The words of a command line, none where its quotes do not close; a program whose path has blanks is one word."""
    if shutil.which(cxx, path=path) is not None:
        return (cxx,)
    try:
        return tuple(shlex.split(cxx))  # "ccache g++" is usual
    except ValueError:
        return ()


def _supported_flags(command: tuple[str, ...]) -> tuple[str, ...]:
    def accepts(flags: tuple[str, ...]) -> bool:
        # -Werror: Clang only warns of a flag that it does not know.
        arguments = [*command, *flags, "-Werror", "-fsyntax-only", "-x", "c++", os.devnull]
        return _run(arguments).returncode == 0

    return tuple(flag for flags in _OPTIONAL_FLAGS if accepts(flags) for flag in flags)


def _compiler_output(arguments: Sequence[str]) -> str:
    result = _run(arguments)
    if result.returncode != 0:
        raise _broken(arguments)
    return result.stdout.decode(errors="replace")


def _run(
    arguments: Sequence[str], text: bytes = b"", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the compiler to its end. Raises DeviceError where it cannot even be started."""
    try:
        return subprocess.run(arguments, input=text, capture_output=True, check=False, env=environment)
    except OSError as error:  # it was removed since, or is for another machine
        raise _broken(arguments) from error


def _broken(arguments: Sequence[str]) -> DeviceError:
    return DeviceError(f"the C++ compiler does not work: {shlex.join(arguments)} failed")


class Library:
    """One compiled kernel, loaded into this process."""

    def __init__(self, path: Path, kernel: Kernel) -> None:
        """Load the library and hold the kernel's declared parameters against its compiled ones.

        Raises DeviceError where the file cannot be loaded, TypeError where the parameters differ.
        """
        self._kernel = kernel
        try:
            library = ctypes.CDLL(os.fspath(path))
        except OSError as error:
            raise DeviceError(f"{kernel.stem}: the compiled kernel cannot be loaded: {error}") from error
        _check_parameters(library, kernel)
        self._launch = library.gdn_launch
        self._launch.argtypes = (
            ctypes.c_uint,
            ctypes.c_uint,
            ctypes.c_void_p,
            ctypes.c_ulonglong,
            ctypes.c_uint,
            ctypes.c_char_p,
            ctypes.c_size_t,
        )
        self._packing = struct.Struct("=" + "".join(_PACKING[kind] for _, kind in kernel.parameters))
        self._addresses = ctypes.c_void_p * max(1, len(kernel.parameters))

    def launch(self, num_blocks: int, threads_per_block: int, arguments: Sequence[int]) -> None:
        """Run the kernel to its end under the current `HostOptions`.

        Raises DeviceError where the block size cannot be served or threads wait for each other in vain.
        """
        chosen = _options.get()
        values = ctypes.create_string_buffer(self._packing.pack(*arguments))
        first = ctypes.addressof(values)
        addresses = self._addresses(*range(first, first + self._packing.size, 8))
        message = ctypes.create_string_buffer(_MESSAGE_BYTES)
        failed = self._launch(
            num_blocks,
            threads_per_block,
            addresses,
            chosen.order_seed,
            chosen.max_os_threads or _num_cpus(),
            message,
            _MESSAGE_BYTES,
        )
        if failed:
            raise DeviceError(f"{self._kernel.stem}: {message.value.decode(errors='replace')}")


def _num_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


def _check_parameters(library: ctypes.CDLL, kernel: Kernel) -> None:
    kind_of = library.gdn_parameter_kind
    kind_of.argtypes = (ctypes.c_uint,)
    kind_of.restype = ctypes.c_char_p
    compiled: list[str] = []
    while (kind := kind_of(len(compiled))) is not None:
        compiled.append(kind.decode())
    declared = [kind for _, kind in kernel.parameters]
    if compiled != declared:
        raise TypeError(f"{kernel.stem}: declared parameters ({', '.join(declared)}), compiled ({', '.join(compiled)})")


@dataclass(frozen=True, slots=True)
class _Build:
    """What one library of this process was made from."""

    variant: Variant
    sanitize: str
    compiler_identity: str


_lock = Lock()
_build_locks: dict[_Build, Lock] = {}
_libraries: dict[_Build, Library] = {}


def load(variant: Variant) -> Library:
    """The compiled form of `variant`, built at the first call for it.

    Threads that ask for one variant wait for one build; different variants build at the same time.
    Raises DeviceError where there is no compiler, KernelCompileError where the kernel does not compile.
    """
    wanted = _Build(variant, _options.get().sanitize, _toolchain().identity)
    library = _libraries.get(wanted)
    if library is not None:
        return library
    with _lock:
        build_lock = _build_locks.setdefault(wanted, Lock())
    with build_lock:
        if wanted not in _libraries:
            text = launch.source(f"{variant.kernel.stem}.cu")
            _libraries[wanted] = build(variant.kernel, text, variant.defines)
        return _libraries[wanted]


def run(request: Launch) -> None:
    """Run a launch to its end. Raises what `Launch.check`, `load` and `Library.launch` raise."""
    request.check()
    load(request.variant).launch(request.num_blocks, request.threads_per_block, request.arguments)


def build(kernel: Kernel, text: str, defines: tuple[str, ...] = ()) -> Library:
    """Compile the text of a kernel, or take it from the cache, and load it.

    Raises KernelCompileError with the compiler's first error, and what `Library` raises.
    """
    sanitize = _options.get().sanitize
    toolchain = _toolchain()
    _require_sanitizer_runtime(sanitize)
    command = (*toolchain.command, *_mode_flags(sanitize), *defines)
    whole_text = _whole_text(kernel.stem, text)
    key = hashlib.sha256("\0".join((toolchain.identity, *command, whole_text)).encode()).hexdigest()
    name = f"{kernel.stem}-{key[:32]}.so"
    path = cache.find(name)
    if path is None:
        content = _compile(kernel.stem, command, whole_text)
        try:
            path = cache.store(name, content)
        except cache.NoPlace as error:
            expected = "a folder that takes the compiled kernel (make room, or set GDN_CACHE_DIR or TMPDIR to another)"
            raise DeviceError(rejection(kernel.stem, expected, error)) from error
    return Library(path, kernel)


def _whole_text(stem: str, text: str) -> str:
    """What is compiled: the stand-in for CUDA, the kernel, its entry point for Python."""
    parts = (launch.source(_HEADER), f'#line 1 "{stem}.cu"', text, f"GDN_EXPORT_KERNEL({stem})", "")
    # Includes are in place already, and compilers warn of this line in a text that is no included file.
    return "\n".join(parts).replace("#pragma once", "")


def _mode_flags(sanitize: str) -> tuple[str, ...]:
    return (*_SANITIZER_FLAGS, f"-fsanitize={sanitize}") if sanitize else _PLAIN_FLAGS


def _require_sanitizer_runtime(sanitize: str) -> None:
    """A library that brings such a runtime late ends the whole process, so ask first."""
    for name, symbol in (("address", "__asan_init"), ("thread", "__tsan_init")):
        if name in sanitize.split(",") and not hasattr(ctypes.CDLL(None), symbol):
            raise DeviceError(f'sanitize="{sanitize}" needs the {name} sanitizer\'s runtime in LD_PRELOAD')


def _compile(stem: str, command: Sequence[str], text: str) -> bytes:
    """The bytes of the shared library that `command` makes of `text`."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="gdn-", ignore_cleanup_errors=True)
    except OSError as error:
        raise _no_room(stem, cache.refusal_of_temporary_folder(error)) from error
    with temporary as folder:
        # LC_ALL: _compile_error knows English. LD_PRELOAD: a sanitizer's runtime would slow the compiler down.
        # TMPDIR: what a compiler that is killed leaves goes with the folder.
        environment = {**os.environ, "LC_ALL": "C", "LD_PRELOAD": "", "TMPDIR": folder}
        target = Path(folder, "kernel.so")
        result = _run([*command, "-x", "c++", "-", "-o", os.fspath(target)], text.encode(), environment)
        if result.returncode != 0:
            output = result.stderr.decode(errors="replace")
            if result.returncode < 0:
                output += f"\nerror: the compiler was ended by signal {-result.returncode}"
            raise _compile_error(stem, output.strip(), Path(folder).parent)
        return target.read_bytes()


def _no_room(stem: str, got: str) -> DeviceError:
    expected = "room for the compiler's files (make some, or set TMPDIR to another folder)"
    return DeviceError(rejection(stem, expected, got))


def _compile_error(stem: str, output: str, folder: Path) -> GdnError:
    reason = next((reason for reason in _NO_ROOM if reason in output), None)
    if reason is not None:
        return _no_room(stem, f"{folder}: {reason}")
    lines = output.splitlines()
    first = next((line for line in lines if "error" in line), lines[0] if lines else "no message")
    shown = lines[:_MAX_OUTPUT_LINES]
    if len(lines) > len(shown):
        shown.append(f"... {len(lines) - len(shown)} more lines")
    return KernelCompileError(f"{stem} does not compile for the CPU: {first}\n" + "\n".join(shown))
