"""A forward call held against the float64 oracle, for some sequences and heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gdn import oracle
from gdn.bench.cases import BenchCase
from gdn.bench.places import poison
from gdn.bench.workload import Window, Workload
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.chunked_checks import chunked_tolerance
from gdn.testing.compare import Comparison, Tolerance, close, storage_tolerance

#: Tokens times state elements that the oracle runs for one check: about a second.
_ORACLE_COST = 1 << 27
_ORACLE_SEQUENCES = 3


def check_forward(workload: Workload, window: Window, pool: Any) -> Iterator[Comparison]:
    """Run a window plainly on `pool`, which advances; some sequences and heads of it go to the oracle."""
    case, get = workload.case, workload.machine.get
    heads = case.heads
    slots = get(window.slot_idx).view(np.uint32)
    offsets = get(window.input_row_offsets).astype(np.int64)
    sequences = _some_sequences(case, slots, np.diff(offsets))
    key_heads = _some_key_heads(heads, int(np.diff(offsets)[sequences].sum()))
    spans = [(int(offsets[sequence]), int(offsets[sequence + 1])) for sequence in sequences]
    value_heads = _value_heads(heads, key_heads)

    def states() -> Array:
        return np.stack([get(pool[int(slots[sequence])])[value_heads] for sequence in sequences])

    arrays = RecurrenceArrays(
        _rows(get, window.qkv_conv_output, spans)[:, _channels(heads, key_heads)],
        _rows(get, window.decay_per_token, spans)[:, value_heads],
        _rows(get, window.beta_per_token, spans)[:, value_heads],
        states(),
        np.arange(len(sequences), dtype=np.uint32),
        np.cumsum([0, *(end - begin for begin, end in spans)]).astype(np.uint32),
    )
    poison(window.out)
    workload.forward(window, pool)
    # Too long for the token loop, the oracle's other form is as exact.
    cost = len(arrays.qkv_conv_output) * len(value_heads) * heads.head_state_elements
    run = oracle.gated_delta_recurrence_fwd if cost <= 8 * _ORACLE_COST else oracle.gated_delta_recurrence_fwd_chunked
    reference, states_after = run(*arrays.as_tuple())
    readout = _rows(get, window.out, spans).reshape(-1, heads.num_value_heads, heads.value_head_dim)[:, value_heads]
    yield close(readout.reshape(reference.shape), reference, _tolerance(case, readout.dtype.name), "readout")
    yield close(states(), states_after, _tolerance(case, case.call.state_dtype), "state")


def _tolerance(case: BenchCase, dtype: str) -> Tolerance:
    """How far what is stored as `dtype` may lie from the oracle, by the algorithm."""
    return chunked_tolerance(case.call.work_dtype, dtype) if case.is_chunked else storage_tolerance(dtype)


def _some_sequences(case: BenchCase, slots: Array, lengths: Array) -> list[int]:
    """The first, the last and the middle live sequence, as far as the oracle can run them with one key head."""
    live = [int(sequence) for sequence in np.flatnonzero((slots != PAD_SLOT) & (lengths > 0))]
    cost_of_token = case.heads.group_size * case.heads.head_state_elements
    chosen: list[int] = []
    for sequence in dict.fromkeys((live[0], live[-1], live[len(live) // 2])):
        tokens = int(lengths[[*chosen, sequence]].sum())
        if not chosen or (len(chosen) < _ORACLE_SEQUENCES and tokens * cost_of_token <= _ORACLE_COST):
            chosen.append(sequence)
    return chosen


def _some_key_heads(heads: HeadGeometry, num_tokens: int) -> list[int]:
    """All key heads where the oracle can afford them, else as many as it can, at least the first."""
    affordable = _ORACLE_COST // max(num_tokens * heads.group_size * heads.head_state_elements, 1)
    if affordable >= heads.num_key_heads:
        return list(range(heads.num_key_heads))
    spread_out = np.linspace(0, heads.num_key_heads - 1, max(1, affordable))
    return [int(head) for head in spread_out]


def _value_heads(heads: HeadGeometry, key_heads: Sequence[int]) -> list[int]:
    return [head * heads.group_size + member for head in key_heads for member in range(heads.group_size)]


def _channels(heads: HeadGeometry, key_heads: Sequence[int]) -> Array:
    """Channels of a token that belong to some key heads: queries, keys, values."""
    queries = np.arange(heads.key_dim).reshape(heads.num_key_heads, -1)[list(key_heads)].ravel()
    values = np.arange(heads.value_dim).reshape(heads.num_value_heads, -1)[_value_heads(heads, key_heads)].ravel()
    return np.concatenate([queries, heads.key_dim + queries, 2 * heads.key_dim + values])


def _rows(get: Any, array: Any, spans: Sequence[tuple[int, int]]) -> Array:
    return np.concatenate([get(array[begin:end]) for begin, end in spans])
