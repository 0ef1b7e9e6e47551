"""The values that the arrays of a timed case repeat, and how they get there."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gdn.bench.cases import BenchCase
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

_VALUE_TOKENS, _VALUE_SLOTS = 256, 8  # distinct values that large arrays repeat


def out_dtype(call: Case) -> str:
    """The type of a call's readout."""
    return call.work_dtype if isinstance(call, RingCase) else call.out_dtype


def gate_dtype(call: Case) -> str:
    """The type of a call's decay and beta."""
    return "float32" if isinstance(call, RingCase) else call.gate_dtype


def values_for(case: BenchCase) -> RecurrenceArrays:
    """Values as a trained layer has them, of the types of a case."""
    call = case.call
    return _values(case.heads, call.work_dtype, gate_dtype(call), call.state_dtype)


@lru_cache(maxsize=4)
def _values(heads: HeadGeometry, work_dtype: str, gate: str, state_dtype: str) -> RecurrenceArrays:
    return build_arrays(
        RecurrenceCase(
            "values",
            heads,
            (_VALUE_TOKENS // _VALUE_SLOTS,) * _VALUE_SLOTS,
            work_dtype=work_dtype,
            gate_dtype=gate,
            state_dtype=state_dtype,
            spare_slots=0,
        )
    )


def bits(array: Any) -> Any:
    """The same memory as unsigned integers, which every array library copies and compares as they are."""
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))


def fill(array: Any, values: Any) -> None:
    """Repeat `values` along the first axis of `array`."""
    target, source = bits(array), bits(values)
    for start in range(0, len(target), len(source)):
        part = target[start : start + len(source)]
        part[...] = source[: len(part)]
