"""`gdn info`: versions, GPUs, compiler, backends, caches and limits of this machine."""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

import gdn
from gdn.backends import BACKENDS, binaries, cache, cuda, host
from gdn.backends.launch import KERNEL_TYPE
from gdn.cli import report
from gdn.cli.report import Column
from gdn.errors import DeviceError
from gdn.geometry import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone on standard output.")
def info(as_json: bool) -> None:
    """Show versions, GPUs, compiler, backends, caches and limits."""
    facts = gather()
    if as_json:
        report.print_json(facts)
    else:
        columns = (Column("what"), Column("value"))
        report.print_table(report.output(), columns, list(_rows(facts)), head=False)


def gather() -> dict[str, Any]:
    """All facts, as JSON shows them. What cannot be found out is None or says why."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuPy warns of what is said here in order
        cupy, cupy_version = _import_cupy()
        return {
            "versions": {
                "gdn": gdn.__version__,
                "python": platform.python_version(),
                "numpy": version("numpy"),
                "ml_dtypes": version("ml_dtypes"),
                "cupy": cupy_version,
            },
            "cuda": _cuda_versions(cupy),
            "gpus": _gpus(cupy),
            "cpp_compiler": _compiler(),
            "backends": _backends(),
            "caches": _caches(),
            "ready_kernels": {str(folder): _num_kernels(folder) for folder in binaries.folders()},
            "limits": {
                "head_dim_multiple": HEAD_DIM_MULTIPLE,
                "max_head_dim": MAX_HEAD_DIM,
                "types": list(KERNEL_TYPE),
                "min_compute_capability": "{}.{}".format(*cuda.MIN_COMPUTE_CAPABILITY),
            },
        }


def _import_cupy() -> tuple[Any, str]:
    """CuPy, or None, and its version, or why there is none."""
    try:
        import cupy
    except Exception as error:  # a broken installation raises more than ImportError
        return None, f"cannot be imported ({_in_one_line(error)})"
    return cupy, cupy.__version__


def _cuda_versions(cupy: Any) -> dict[str, str | None]:
    """Versions of what CuPy works with. A driver that does not answer has none."""
    if cupy is None:
        return {"driver": None, "runtime": None, "nvrtc": None}

    def nvrtc_version() -> str | None:
        from cupy.cuda import nvrtc

        return "{}.{}".format(*nvrtc.getVersion())

    runtime = cupy.cuda.runtime
    return {
        "driver": _attempt(lambda: _cuda_version(runtime.driverGetVersion())),
        "runtime": _attempt(lambda: _cuda_version(runtime.runtimeGetVersion())),
        "nvrtc": _attempt(nvrtc_version),
    }


def _cuda_version(number: int) -> str | None:
    """12090 is CUDA 12.9; 0 is no driver."""
    return f"{number // 1000}.{number % 1000 // 10}" if number else None


def _gpus(cupy: Any) -> list[dict[str, Any]]:
    if cupy is None:
        return []
    num_gpus = _attempt(cupy.cuda.runtime.getDeviceCount) or 0
    return [_attempt(partial(_gpu, cupy, idx)) or {"name": "does not answer"} for idx in range(num_gpus)]


def _gpu(cupy: Any, idx: int) -> dict[str, Any]:
    properties = cupy.cuda.runtime.getDeviceProperties(idx)
    return {
        "name": properties["name"].decode(errors="replace"),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "memory_bytes": properties["totalGlobalMem"],
        "num_multiprocessors": properties["multiProcessorCount"],
        "l2_cache_bytes": properties["l2CacheSize"],
    }


def _attempt(question: Callable[[], Any]) -> Any:
    """The answer, or None where CuPy or CUDA fails in whatever way: this command is for such machines."""
    try:
        return question()
    except Exception:
        return None


def _compiler() -> str:
    try:
        return host.compiler_version()
    except DeviceError as error:
        return _in_one_line(error)


def _backends() -> dict[str, str]:
    """Each backend with "available", or with the reason why it is not."""
    try:
        reasons = gdn.unavailable_backends()
    except Exception as error:  # CuPy again; the other two need no driver
        reasons = {"cuda": _in_one_line(error)}
    return {name: reasons.get(name, "available") for name in BACKENDS}


def _caches() -> dict[str, dict[str, Any]]:
    # CuPy has no function that says where its cache is; this is what its documentation says.
    # Without a home "~" stays what it is, where pathlib would raise.
    cupy_cache = Path(os.path.expanduser(os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"))
    ours = cache.directory()
    return {
        "gdn": {"path": None if ours is None else str(ours), "bytes": cache.size_bytes()},
        "cupy": {"path": str(cupy_cache), "bytes": _size_bytes(cupy_cache)},
    }


def _size_bytes(folder: Path) -> int:
    """Bytes of the files in a folder; 0 where there is none."""
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder) if entry.is_file())
    except OSError:
        return 0


def _num_kernels(folder: Path) -> int:
    """Kernels in a folder that were compiled ahead of time; 0 where there is no folder."""
    return sum(1 for _ in folder.glob(f"*{binaries.SUFFIX}"))


def _in_one_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


# ---- Showing ----


def _rows(facts: dict[str, Any]) -> Iterator[tuple[str, str]]:
    versions, limits = facts["versions"], facts["limits"]
    for name, title in (("gdn", "gdn"), ("python", "Python"), ("numpy", "NumPy"), ("ml_dtypes",) * 2):
        yield title, versions[name]
    yield "CuPy", versions["cupy"]
    yield "CUDA", ", ".join(f"{part} {version or 'none'}" for part, version in facts["cuda"].items())
    for idx, gpu in enumerate(facts["gpus"]):
        yield f"GPU {idx}", _gpu_line(gpu)
    if not facts["gpus"]:
        yield "GPU", "none"
    yield "C++ compiler", facts["cpp_compiler"]
    for name, state in facts["backends"].items():
        yield f"backend {name}", state if state == "available" else f"not here: {state}"
    for name, title in (("gdn", "gdn cache"), ("cupy", "CuPy cache")):
        path = facts["caches"][name]["path"] or "none, since there is no home folder; set GDN_CACHE_DIR"
        yield title, f"{path} ({report.size(facts['caches'][name]['bytes'])})"
    for folder, num_kernels in facts["ready_kernels"].items():
        yield "ready kernels", f"{num_kernels} in {folder}"
    yield "head sizes", f"multiples of {limits['head_dim_multiple']} up to {limits['max_head_dim']}"
    yield "types", ", ".join(limits["types"])
    yield "GPUs served", f"compute capability {limits['min_compute_capability']} or later"


def _gpu_line(gpu: dict[str, Any]) -> str:
    if "memory_bytes" not in gpu:
        return str(gpu["name"])
    return (
        f"{gpu['name']}, compute capability {gpu['compute_capability']}, {report.size(gpu['memory_bytes'])}, "
        f"{gpu['num_multiprocessors']} multiprocessors, {report.size(gpu['l2_cache_bytes'])} L2"
    )
