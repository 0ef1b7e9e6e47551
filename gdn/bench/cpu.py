"""Timing on a CPU: calls return when they are done, and a monotonic clock is all there is."""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gdn import arrays
from gdn.bench.machine import Machine
from gdn.bench.timing import Call, spread
from gdn.bench.traffic import Ceilings
from gdn.testing.buffers import Array

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_COLD_LIMITS = 16 << 20, 64 << 20
_CEILING_BYTES = 256 << 20
_CEILING_REPEATS = 5
_UNKNOWN_FREE_BYTES = 2 << 30


class CpuMachine(Machine):
    """The backends `numpy` and `host`."""

    loop_calls = 16

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.empty(shape, dtype, arrays.CPU)

    def put(self, array: Array) -> Any:
        return array.copy()

    def get(self, array: Any) -> Array:
        result: Array = array.copy()
        return result

    def free_bytes(self) -> int:
        with suppress(OSError, ValueError, AttributeError):  # not every system counts its pages
            return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return _UNKNOWN_FREE_BYTES

    def cold_bytes(self) -> int:
        """Four times the largest cache, between 16 and 64 MiB: these backends compute more than they wait."""
        low, high = _COLD_LIMITS
        return min(max(4 * _largest_cache_bytes(), low), high)

    def time_us(self, calls: Sequence[Call], repeats: int, reset: Call | None = None) -> list[float]:
        calls[0]()  # pages of new arrays are mapped, lazy imports done
        samples = []
        for repeat in range(repeats):
            position = repeat % len(calls)
            if position == 0 and reset is not None:
                reset()
            start = time.perf_counter_ns()
            calls[position]()
            samples.append(1e-3 * (time.perf_counter_ns() - start))
        return samples

    def python_overhead_us(self, call: Call) -> float | None:
        return None

    def measure_ceilings(self) -> Ceilings:
        """One thread: copying with `numpy.copyto`, reading with the fastest of some reductions."""
        source = np.ones(min(_CEILING_BYTES, self.free_bytes() // 8) // 8, np.int64)
        target = np.zeros_like(source)
        copy = spread(self.time_us([lambda: np.copyto(target, source)], _CEILING_REPEATS)).median_us
        readings = (source.max, source.view(np.float32).max, lambda: np.bitwise_or.reduce(source))
        read = min(spread(self.time_us([reading], _CEILING_REPEATS)).median_us for reading in readings)
        return Ceilings(copy_gb_s=2e-3 * source.nbytes / copy, read_gb_s=1e-3 * source.nbytes / read)

    def facts(self) -> dict[str, str]:
        return {"CPU": f"{_processor()}, {_num_cpus()} CPUs for this process", "NumPy": np.__version__}


def _num_cpus() -> int:
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1


def _processor() -> str:
    with suppress(OSError):
        name = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        if name:
            return name[1]
    return platform.processor() or platform.machine()


def _largest_cache_bytes() -> int:
    """From what Linux says of the first CPU; 0 where it says nothing."""
    largest = 0
    with suppress(OSError):
        for size in _CACHES.glob("index*/size"):
            text = size.read_text(encoding="ascii").strip()
            if re.fullmatch(r"\d+K", text):
                largest = max(largest, int(text[:-1]) << 10)
    return largest
