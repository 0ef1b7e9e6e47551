"""Kernels through NVRTC, for any architecture and with no GPU: options, images, and what the assembler says of them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gdn.backends.launch import Variant, source
from gdn.errors import DeviceError, KernelCompileError, rejection

# What CuPy adds to the options of a module on its own, beside folders of headers, of which kernels include none. A test
# holds it against CuPy.
_CUPY_OPTIONS = ("-ftz=true", "--device-as-default-execution-space")

_MIN_VERSION_WITH_CACHE = (12, 9)


def module_options(variant: Variant) -> tuple[str, ...]:
    """The options that CuPy is given to compile a variant for the GPU that it runs on."""
    architecture = (f"-arch={variant.kernel.only_on}",) if variant.kernel.only_on else ()
    return ("-std=c++17", *architecture, *variant.defines)


def all_options(variant: Variant) -> tuple[str, ...]:
    """All that NVRTC gets then, through CuPy, but for the architecture that CuPy picks."""
    return (*module_options(variant), *_CUPY_OPTIONS)


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What the assembler says of one compiled variant, per thread except for shared memory."""

    registers: int
    spill_bytes: int
    stack_bytes: int
    shared_bytes: int
    serialized: int = 0  # times that it says why asynchronous products of matrices are not, as C75xx


@dataclass(frozen=True, slots=True)
class Binary:
    """A compiled variant: what a driver loads, what the assembler said of it, and the NVRTC that made it."""

    image: bytes
    report: CompileReport
    nvrtc: str


def version() -> str:
    """NVRTC's version, such as "12.9". Raises DeviceError where it cannot be used."""
    try:
        from cupy.cuda import nvrtc

        return "{}.{}".format(*nvrtc.getVersion())
    except Exception as error:  # a CuPy that is there but broken raises whatever broke it
        if is_about_a_folder(error):
            expected = "a folder for CuPy's cache (set CUPY_CACHE_DIR to one that can be written)"
            raise DeviceError(rejection("NVRTC", expected, error)) from error
        expected = "CuPy with NVRTC to compile kernels (install gdn[cuda12] or gdn[cuda13])"
        raise DeviceError(rejection("NVRTC", expected, error)) from error


def is_about_a_folder(error: Exception) -> bool:
    """Whether an import of CuPy ended at the folder of its cache, which it makes then, not at a library it lacks."""
    return isinstance(error, OSError) and error.filename is not None


def architectures() -> tuple[str, ...]:
    """All that this NVRTC compiles for, such as "sm_90", in order. Raises what `version` raises."""
    version()
    from cupy.cuda import nvrtc

    return tuple(f"sm_{number}" for number in sorted(nvrtc.getSupportedArchs()))


def compile_binary(variant: Variant, architecture: str) -> Binary:
    """Compile for `architecture`, such as "sm_90". Needs CuPy but no GPU.

    Raises DeviceError where there is no NVRTC, KernelCompileError where it refuses the source.
    """
    made_by = version()
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(source(f"{variant.kernel.stem}.cu"), f"{variant.kernel.stem}.cu", (), ())
    # The assembler's report changes no instruction.
    own_architecture = () if variant.kernel.only_on else (f"-arch={architecture}",)
    options = (*all_options(variant), *own_architecture, "--ptxas-options=-v", *_no_cache())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        raise compile_error(variant, nvrtc.getProgramLog(program) or str(error)) from error
    else:
        log, image = nvrtc.getProgramLog(program), nvrtc.getCUBIN(program)
    finally:
        nvrtc.destroyProgram(program)
    return Binary(image, _report(variant, log), made_by)


def _no_cache() -> tuple[str, ...]:
    """That NVRTC must compile, not answer from a cache of its own.

    It has this option for one. Beside a GPU a log came without the report once, which such an answer would explain.
    """
    from cupy.cuda import nvrtc

    return ("--no-cache",) if nvrtc.getVersion() >= _MIN_VERSION_WITH_CACHE else ()


def compile_report(variant: Variant, architecture: str) -> CompileReport:
    """What the assembler says of a variant compiled for `architecture`. Raises what `compile_binary` raises."""
    return compile_binary(variant, architecture).report


def compile_error(variant: Variant, log: str) -> KernelCompileError:
    """The error of a variant that does not compile, with the first error of the compiler's log."""
    lines = [line.strip() for line in log.replace("\0", "").splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")
    macros = " ".join(variant.defines)
    return KernelCompileError(f"{variant.kernel.stem}: expected a clean compile with {macros}, got {first}")


def _report(variant: Variant, log: str) -> CompileReport:
    usage = re.search(r"Used (\d+) registers", log)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if usage is None or stack is None:
        raise KernelCompileError(f"{variant.kernel.stem}: expected ptxas' usage report, got {log.strip()!r}")
    shared = re.search(r"(\d+) bytes smem", log)
    return CompileReport(
        registers=int(usage[1]),
        spill_bytes=int(stack[2]) + int(stack[3]),
        stack_bytes=int(stack[1]),
        shared_bytes=int(shared[1]) if shared else 0,
        serialized=len(re.findall(r"\bC75\d\d\b", log)),
    )
