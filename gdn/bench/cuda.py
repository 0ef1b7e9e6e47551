"""Timing on an NVIDIA GPU: CUDA graphs over rotating arrays, replayed back to back between events."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from gdn import arrays
from gdn.bench.machine import Machine
from gdn.bench.timing import Call, spread
from gdn.bench.traffic import Ceilings
from gdn.testing.buffers import Array

_MIN_COLD_BYTES = 320_000_000
_CEILING_BYTES = 1 << 30
_CEILING_REPEATS = 20
_CLOCK_UP_SECONDS = 0.03  # of work before the first sample
_MIN_GRAPH_US = 1000.0  # a replay is long beside the gap to the next one
_MAX_ROUNDS = 64
_OVERHEAD_CALLS = 200  # far fewer than the launches that a stream holds before it makes the caller wait
_OVERHEAD_REPEATS = 5


class GpuMachine(Machine):
    """The backend `cuda` on CuPy's current device."""

    loop_calls = 1 << 15  # nodes of a graph that is made in about a second

    def __init__(self) -> None:
        """Needs CuPy and a GPU."""
        super().__init__("cuda")
        import cupy

        self._cupy: Any = cupy
        self._device = cupy.cuda.Device()

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return arrays.empty(shape, dtype, f"cuda:{self._device.id}")

    def put(self, array: Array) -> Any:
        return self._cupy.asarray(array)

    def get(self, array: Any) -> Array:
        result: Array = array.get()
        return result

    def free_bytes(self) -> int:
        self._cupy.get_default_memory_pool().free_all_blocks()
        free, _ = self._cupy.cuda.runtime.memGetInfo()
        return int(free)

    def cold_bytes(self) -> int:
        """Four times the L2 cache, 320 MB at least."""
        return max(_MIN_COLD_BYTES, 4 * int(self._properties()["l2CacheSize"]))

    def time_us(self, calls: Sequence[Call], repeats: int, reset: Call | None = None) -> list[float]:
        """One graph holds all calls once, or several rounds of them where one would be short; its replays are timed.

        States are not reset: decays below 1 keep them finite however often a call is repeated.
        """
        stream = self._cupy.cuda.Stream(non_blocking=True)
        once = self._replays_us(self._capture(calls, stream), stream, 3)
        rounds = min(max(math.ceil(_MIN_GRAPH_US / max(min(once), 1e-3)), 1), _MAX_ROUNDS)
        graph = self._capture([*calls] * rounds, stream)
        self._clock_up(graph, stream)
        return [replay / (rounds * len(calls)) for replay in self._replays_us(graph, stream, repeats)]

    def _capture(self, calls: Sequence[Call], stream: Any) -> Any:
        """A graph of the calls, in order. All of them must have run before: nothing may be compiled in a capture."""
        # The stream does not wait for the default stream, on which arrays were filled.
        self._device.synchronize()
        with stream:
            stream.begin_capture()
            try:
                for call in calls:
                    call()
            except BaseException:
                with suppress(Exception):  # the stream must leave the capture, whatever became of it
                    stream.end_capture()
                raise
            return stream.end_capture()

    def _clock_up(self, graph: Any, stream: Any) -> None:
        """Work until clocks have had time to rise."""
        start = time.perf_counter()
        while time.perf_counter() - start < _CLOCK_UP_SECONDS:
            graph.launch(stream)
            stream.synchronize()

    def _replays_us(self, graph: Any, stream: Any, repeats: int) -> list[float]:
        return self._enqueued_us(lambda: graph.launch(stream), stream, repeats)

    def _enqueued_us(self, enqueue: Call, stream: Any, repeats: int) -> list[float]:
        """Time between events around each repeat; one before them keeps the GPU busy while they are queued."""
        events = [self._cupy.cuda.Event() for _ in range(repeats + 1)]
        enqueue()
        events[0].record(stream)
        for event in events[1:]:
            enqueue()
            event.record(stream)
        events[-1].synchronize()
        elapsed_ms = self._cupy.cuda.get_elapsed_time
        return [1e3 * float(elapsed_ms(*pair)) for pair in pairwise(events)]

    def python_overhead_us(self, call: Call) -> float | None:
        """Host time of calls that are enqueued and not waited for."""
        call()
        samples = []
        for _ in range(_OVERHEAD_REPEATS):
            self._device.synchronize()
            start = time.perf_counter_ns()
            for _ in range(_OVERHEAD_CALLS):
                call()
            samples.append(1e-3 * (time.perf_counter_ns() - start) / _OVERHEAD_CALLS)
        self._device.synchronize()
        return spread(samples).median_us

    def measure_ceilings(self) -> Ceilings:
        """Copying from device to device, and the faster of two reductions, over arrays far larger than the L2 cache."""
        num_bytes = min(_CEILING_BYTES, self.free_bytes() // 8) // 1024 * 1024
        source = self.put(np.resize(np.random.default_rng(0).integers(0, 2**32, 1 << 20, np.uint32), num_bytes // 4))
        target = self._cupy.empty_like(source)
        stream = self._cupy.cuda.Stream(non_blocking=True)
        self._device.synchronize()

        def copy() -> None:
            target.data.copy_from_device_async(source.data, num_bytes, stream)

        with stream:
            copy_us = spread(self._enqueued_us(copy, stream, _CEILING_REPEATS)).median_us
            readings = (source.view(np.int32).max, source.view(np.int64).max)
            read_us = min(spread(self._enqueued_us(r, stream, _CEILING_REPEATS)).median_us for r in readings)
        return Ceilings(copy_gb_s=2e-3 * num_bytes / copy_us, read_gb_s=1e-3 * num_bytes / read_us)

    def facts(self) -> dict[str, str]:
        runtime = self._cupy.cuda.runtime
        properties = self._properties()
        return {
            "GPU": f"{properties['name'].decode(errors='replace')}, {properties['l2CacheSize'] / 2**20:.0f} MiB L2",
            "driver": _driver_version() or f"for CUDA {_dotted(runtime.driverGetVersion())}",
            "CUDA": _dotted(runtime.runtimeGetVersion()),
            "CuPy": str(self._cupy.__version__),
        }

    def _properties(self) -> dict[str, Any]:
        properties: dict[str, Any] = self._cupy.cuda.runtime.getDeviceProperties(self._device.id)
        return properties


def _driver_version() -> str | None:
    """The version that Linux's driver says of itself."""
    with suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
        version = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
        return version[0] if version else None
    return None


def _dotted(cuda_version: int) -> str:
    """12090 is CUDA 12.9."""
    return f"{cuda_version // 1000}.{cuda_version % 1000 // 10}"
