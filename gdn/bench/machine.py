"""What timing asks of a backend: memory on its side, a clock, its ceilings, and facts for the head of a report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from gdn.bench.timing import Call
from gdn.bench.traffic import Ceilings
from gdn.testing.buffers import Array


class Machine(ABC):
    """A backend together with the memory and the clock that belong to it.

    loop_calls: how many steps of layers a timed loop may consist of.
    """

    loop_calls: int

    def __init__(self, backend: str) -> None:
        """`backend` is "cuda", "host" or "numpy"."""
        self.backend = backend

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A new array whose values are whatever was there."""

    @abstractmethod
    def put(self, array: Array) -> Any:
        """A copy of a NumPy array on the backend's side."""

    @abstractmethod
    def get(self, array: Any) -> Array:
        """A copy of a backend's array as a NumPy array; waits for it."""

    @abstractmethod
    def free_bytes(self) -> int:
        """Memory that could be allocated now."""

    @abstractmethod
    def cold_bytes(self) -> int:
        """How much a rotation must touch for nothing of its beginning to be cached when it starts over."""

    @abstractmethod
    def time_us(self, calls: Sequence[Call], repeats: int, reset: Call | None = None) -> list[float]:
        """Microseconds of one call, `repeats` times.

        The calls rotate. `reset` puts the arrays back as they were; it may be called between repeats, outside the
        timed region, where a backend wants it.
        """

    @abstractmethod
    def python_overhead_us(self, call: Call) -> float | None:
        """Microseconds that Python spends on one call which does not wait; None where every call waits."""

    @abstractmethod
    def measure_ceilings(self) -> Ceilings:
        """Bandwidths of this machine, measured now."""

    @abstractmethod
    def facts(self) -> dict[str, str]:
        """What the head of a report says of the machine."""
