"""Compiling ahead of time: for which architectures, into which folder, many kernels at once."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from gdn.backends import binaries, cache, cuda, nvrtc
from gdn.backends.launch import Variant
from gdn.backends.nvrtc import CompileReport
from gdn.errors import GdnError, rejection

#: The first of each generation of GPUs that kernels serve; what is compiled for one runs on its whole generation.
GENERATIONS = ("sm_80", "sm_90", "sm_100", "sm_120")

_DEFAULT_WORKERS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Built:
    """A variant on one architecture, whose file lies in the folder. is_new: whether it was compiled just now."""

    variant: Variant
    architecture: str
    report: CompileReport
    path: Path
    num_bytes: int
    is_new: bool

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block: the kernel's own and what a launch asks for."""
        return self.report.shared_bytes + self.variant.launch_shared_bytes

    @property
    def spills(self) -> bool:
        """Whether threads have values outside of registers."""
        return self.report.spill_bytes > 0


def choose_architectures(names: Sequence[str]) -> tuple[str, ...]:
    """The architectures by these names, each once; without names those of the GPUs here, without GPUs all generations.

    Raises DeviceError where there is no NVRTC, GdnError for a name that it or `gdn` does not know.
    """
    known = _served()
    for name in names:
        if name not in known:
            raise GdnError(rejection("arch", f"one of {', '.join(known)}", name))
    chosen = names or _of_gpus(known) or [name for name in GENERATIONS if name in known]
    return tuple(dict.fromkeys(chosen))


def _served() -> tuple[str, ...]:
    """All that NVRTC compiles for and kernels serve."""
    lowest = int("{}{}".format(*cuda.MIN_COMPUTE_CAPABILITY))
    return tuple(name for name in nvrtc.architectures() if int(name.removeprefix("sm_")) >= lowest)


def _of_gpus(known: Sequence[str]) -> list[str]:
    """For each GPU that kernels serve the nearest architecture that NVRTC knows."""
    nearest = (
        next((name for name in binaries.architectures_for(capability) if name in known), None)
        for capability in cuda.served_capabilities()
    )
    return [name for name in nearest if name is not None]


def open_folder(out: Path | None) -> Path:
    """The folder `out`, or that of the cache, made where there is none. Raises GdnError where it cannot be written."""
    folder = out or cache.directory()
    if folder is None:
        raise GdnError(rejection("out", "a folder, or GDN_CACHE_DIR", "neither, and no home folder for a cache"))
    try:
        folder.mkdir(mode=0o777 if out else 0o700, parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _unwritable(folder, error) from error
    return folder


def _unwritable(folder: Path, error: OSError) -> GdnError:
    return GdnError(rejection("out", "a folder that can be written", f"{folder}: {error.strerror or error}"))


def build(
    variants: Sequence[Variant], architectures: Sequence[str], folder: Path, workers: int | None = None
) -> Generator[Built, None, None]:
    """Compile what the folder lacks of these variants on these architectures, and yield all of them in order.

    A file that is damaged, or that another version of NVRTC made, is made anew. workers: kernels compiled at once, one
    for each CPU unless given. Closing the iterator drops what has not begun.

    Raises GdnError where the folder cannot be written, KernelCompileError for a kernel that does not compile.
    """
    version = nvrtc.version()

    def make(variant: Variant, architecture: str) -> Built:
        found = binaries.read(folder, variant, architecture)
        is_new = found is None or found.nvrtc != version
        binary = nvrtc.compile_binary(variant, architecture) if found is None or is_new else found
        path = folder / binaries.file_name(variant, architecture)
        try:
            if is_new:
                binaries.write(folder, variant, architecture, binary)
            return Built(variant, architecture, binary.report, path, path.stat().st_size, is_new)
        except OSError as error:
            raise _unwritable(folder, error) from error

    with ThreadPoolExecutor(workers or _DEFAULT_WORKERS) as pool:  # NVRTC works without Python's lock
        pairs = [
            (variant, architecture)
            for variant in variants
            for architecture in architectures
            if variant.kernel.runs_on(architecture)
        ]
        running = [pool.submit(make, *pair) for pair in pairs]
        try:
            for future in running:
                yield future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
