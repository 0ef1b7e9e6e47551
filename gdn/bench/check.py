"""The check that a workload must pass before it is timed, on the very arrays that are timed.

A readout and the states behind it are compared with the float64 oracle, for some sequences and heads: a wrong kernel is
wrong in all of them, and `gdn verify` is there for the rest. Verify and fold must then agree with forward calls to the
bit (promises E1 and E2), over every sequence, head and layer of the first set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdn import oracle
from gdn.bench.cases import BenchCase
from gdn.bench.workload import Window, Workload, bits
from gdn.errors import GdnError
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.compare import Comparison, bitwise, close, storage_tolerance
from gdn.testing.ring_cases import RingCase

#: Tokens times state elements that the oracle runs for one check: about a second.
_ORACLE_COST = 1 << 27
_ORACLE_SEQUENCES = 3
_LOOKED_AT = 32  # slots and sets, after the timing


class CheckFailed(GdnError):
    """A case gave wrong results, so it is not timed."""


def check_workload(workload: Workload) -> str:
    """Check the first set; returns what was compared, in a few words. Leaves records in every ring row of the workload.

    Raises CheckFailed with the first comparison that did not pass.
    """
    if isinstance(workload.case.call, RingCase):
        words = [_passed(comparison) for comparison in _check_ring(workload)]
        workload.repeat_records()
    else:
        window = workload.sets[0].windows[0]
        words = [_passed(comparison) for comparison in _check_forward(workload, window, workload.pool)]
    return ", ".join(dict.fromkeys(words))


def check_finite(workload: Workload) -> None:
    """After the timing: readouts and some states are finite numbers. Raises CheckFailed."""
    arrays = [workload.pool[:_LOOKED_AT]]
    arrays += [window.out for inputs in workload.sets[:_LOOKED_AT] for window in inputs.windows]
    for array in arrays:
        if not np.isfinite(workload.machine.get(array).astype(np.float32)).all():
            raise CheckFailed(f"{workload.case.call.name}: a readout or state is not finite after the timing")


def _passed(comparison: Comparison) -> str:
    if not comparison.passed:
        raise CheckFailed(comparison.message)
    promise, is_promise, _ = comparison.name.partition(":")
    return promise if is_promise else f"{comparison.name} {comparison.measure}"


# ---- Against the oracle ----


def _check_forward(workload: Workload, window: Window, pool: Any) -> Iterator[Comparison]:
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
    _poison(window.out)
    workload.forward(window, pool)
    reference, states_after = oracle.gated_delta_recurrence_fwd(*arrays.as_tuple())
    readout = _rows(get, window.out, spans).reshape(-1, heads.num_value_heads, heads.value_head_dim)[:, value_heads]
    tolerance = storage_tolerance(readout.dtype.name)
    yield close(readout.reshape(reference.shape), reference, tolerance, "readout")
    yield close(states(), states_after, storage_tolerance(case.call.state_dtype), "state")


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


# ---- Verify and fold ----


def _check_ring(workload: Workload) -> Iterator[Comparison]:
    """E1 and E2 on the first set, and forward itself against the oracle. Advances the set's states by one fold."""
    inputs, get = workload.sets[0], workload.machine.get
    places = _Places(workload)
    scratch = workload.machine.empty((len(places.slots), *workload.pool.shape[1:]), workload.pool.dtype.name)
    places.gather(scratch)
    for window in inputs.windows:
        _poison(window.out)
    workload.verify(inputs)
    yield places.compare(scratch, places.in_window, "E1: states after verify")
    readouts = [get(window.out) for window in inputs.windows]
    for layer, window in enumerate(inputs.windows):
        plain = places.on_scratch(window, layer)
        if layer == 0:
            yield from _check_forward(workload, plain, scratch)
        else:
            workload.forward(plain, scratch)
        yield bitwise(get(plain.out), readouts[layer], "E1: readout of verify against forward")
    yield places.compare(scratch, places.too_long, "E1: states of rows longer than the ring")
    if workload.case.regime == "verify":
        return
    places.gather(scratch)
    for layer, window in enumerate(inputs.windows):
        accepted = _accepted(workload, places.on_scratch(window, layer))
        if accepted is not None:
            workload.forward(accepted, scratch)
    workload.fold(inputs)
    yield places.compare(scratch, places.live, "E2: states after fold against forward")


class _Places:
    """The slots of the first set, all layers, beside a scratch pool that holds their states in the same order."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        inputs, get, call = workload.sets[0], workload.machine.get, workload.case.ring_call
        self.slots = get(inputs.row_ids).view(np.uint32).ravel()
        ring_rows = get(inputs.ring_row_ids).view(np.uint32).ravel()
        lengths = np.tile(np.asarray(call.lengths), call.num_layers)
        is_live = (self.slots != PAD_SLOT) & (ring_rows != PAD_SLOT)
        self.live = np.flatnonzero(is_live)
        self.in_window = np.flatnonzero(is_live & (lengths <= call.ring_len))
        self.too_long = np.flatnonzero(is_live & (lengths > call.ring_len))

    def gather(self, scratch: Any) -> None:
        """Copy the states of the live slots from the pool."""
        source, target = bits(self._workload.pool), bits(scratch)
        for place in self.live:
            target[int(place)] = source[int(self.slots[place])]

    def compare(self, scratch: Any, positions: Array, name: str) -> Comparison:
        """Whether pool and scratch hold the same bits at some positions; the first slot that differs, if one does."""
        pool, get = self._workload.pool, self._workload.machine.get
        for place in positions:
            ours, theirs = pool[int(self.slots[place])], scratch[int(place)]
            if bool((bits(ours) != bits(theirs)).any()):
                return bitwise(get(ours), get(theirs), f"{name}, slot {self.slots[place]}")
        return Comparison(name, True, "bits", 0.0, None, None, None, 0, f"{name}: {len(positions)} slots equal")

    def on_scratch(self, window: Window, layer: int) -> Window:
        """The window with the places of a layer for its slots; rows of no slot or ring row are padding."""
        batch_size = self._workload.case.batch_size
        places = np.full(len(self.slots), PAD_SLOT, np.uint32)
        places[self.live] = self.live
        own = places[layer * batch_size : (layer + 1) * batch_size]
        return replace(window, slot_idx=self._workload.machine.put(own))


def _poison(out: Any) -> None:
    """Fill a readout with NaN."""
    target = bits(out)
    target[...] = np.iinfo(target.dtype).max


def _accepted(workload: Workload, window: Window) -> Window | None:
    """The window cut down to the accepted tokens of rows that fit the ring; None where that leaves none."""
    call, get, put = workload.case.ring_call, workload.machine.get, workload.machine.put
    lengths, counts = np.asarray(call.lengths, np.int64), np.asarray(call.num_accepted, np.int64)
    kept = np.where(lengths > call.ring_len, 0, np.minimum(counts, lengths))
    if not kept.any():
        return None
    starts = get(window.input_row_offsets).astype(np.int64)[:-1]
    rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, kept, strict=True)])
    return replace(
        window,
        qkv_conv_output=put(get(window.qkv_conv_output)[rows]),
        decay_per_token=put(get(window.decay_per_token)[rows]),
        beta_per_token=put(get(window.beta_per_token)[rows]),
        input_row_offsets=put(np.cumsum([0, *kept]).astype(np.uint32)),
        out=workload.machine.empty((len(rows), window.out.shape[1]), window.out.dtype.name),
    )
