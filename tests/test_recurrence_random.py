"""Ragged batches that nobody thought of, on the CPU backends, against the oracle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
from hypothesis import strategies as st

from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise
from gdn.testing.buffers import LAYOUTS
from gdn.testing.cases import INPUTS, RecurrenceCase, build_arrays
from gdn.testing.checks import CHECKS, reference_of, subject
from gdn.testing.execute import execute

# Few sizes and types, so that the host backend compiles few variants.
HEADS = (HeadGeometry(1, 1, 8, 8), HeadGeometry(1, 3, 8, 16), HeadGeometry(2, 4, 32, 8))
TYPES = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
LENGTHS = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 40)), max_size=9).map(tuple)


@st.composite
def cases(draw: st.DrawFn) -> RecurrenceCase:
    lengths = draw(LENGTHS)
    work_dtype, state_dtype = draw(st.sampled_from(TYPES))
    padding = st.lists(st.integers(0, len(lengths) - 1), unique=True) if lengths else st.just([])
    return RecurrenceCase(
        "drawn",
        draw(st.sampled_from(HEADS)),
        lengths,
        work_dtype=work_dtype,
        state_dtype=state_dtype,
        out_dtype=work_dtype,
        index_dtype=draw(st.sampled_from(("uint32", "int32"))),
        padding=tuple(sorted(draw(padding))),
        leading_rows=draw(st.integers(0, 3)),
        trailing_rows=draw(st.integers(0, 66)),
        spare_slots=draw(st.integers(1, 3)),
        qkv_layout=draw(st.sampled_from(LAYOUTS[2])),
        gate_layout=draw(st.sampled_from(LAYOUTS[2])),
        state_layout=draw(st.sampled_from(LAYOUTS[4])),
        index_layout=draw(st.sampled_from(LAYOUTS[1])),
        out_layout=draw(st.sampled_from(LAYOUTS[2])),
        inputs=draw(st.sampled_from(sorted(INPUTS))),
        seed=draw(st.integers(0, 2**31)),
    )


# The fixture only names a backend, so it may serve all examples.
@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(case=cases())
def test_every_check_passes(cpu_backend: str, case: RecurrenceCase) -> None:
    arrays = build_arrays(case)
    under_test = subject(case, cpu_backend, arrays, reference_of(arrays))
    comparisons = [comparison for check in CHECKS.values() for comparison in check(under_test)]
    assert [comparison.message for comparison in comparisons if not comparison] == []


@hypothesis.settings(max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(case=cases(), data=st.data())
def test_any_split_into_calls_is_one_call(cpu_backend: str, case: RecurrenceCase, data: st.DataObject) -> None:
    """E4 for any split of every sequence, not only a third: the float32 pool ends with the same bits."""
    arrays = build_arrays(case)
    pool = np.nan_to_num(arrays.recurrent_state.astype(np.float32))
    whole = _run(cpu_backend, case, arrays, pool, [(0, length) for length in case.lengths])
    ends = [(0, *sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2), label=f"cuts of {n}")), n) for n in case.lengths]
    parts = []
    for part in range(3):
        ranges = [(cuts[part], cuts[part + 1]) for cuts in ends]
        out, pool = _run(cpu_backend, case, arrays, pool, ranges)
        parts.append(out)
    whole_out, whole_pool = whole
    assert_passed(bitwise(pool, whole_pool, "pool"))
    for sequence in range(len(case.lengths)):
        joined = np.concatenate([out[sequence] for out in parts])
        if joined.size:
            assert_passed(bitwise(joined, whole_out[sequence], f"readout of sequence {sequence}"))


def _run(
    backend: str, case: RecurrenceCase, arrays: Any, pool: Any, ranges: list[tuple[int, int]]
) -> tuple[list[Any], Any]:
    """Readout of every sequence and the new pool after its tokens [begin, end)."""
    starts = arrays.input_row_offsets[:-1].astype(np.int64)
    rows = [np.arange(s + b, s + e) for s, (b, e) in zip(starts, ranges, strict=True)]
    tokens = np.concatenate([np.zeros(0, np.int64), *rows])
    offsets = np.cumsum([0, *map(len, rows)])
    part = replace(
        arrays,
        qkv_conv_output=arrays.qkv_conv_output[tokens],
        decay_per_token=arrays.decay_per_token[tokens],
        beta_per_token=arrays.beta_per_token[tokens],
        recurrent_state=pool,
        input_row_offsets=offsets.astype(arrays.input_row_offsets.dtype),
    )
    outcome = execute(backend, part, case.out_dtype)
    return np.split(outcome.out, offsets[1:-1]) if len(rows) else [], outcome.recurrent_state
