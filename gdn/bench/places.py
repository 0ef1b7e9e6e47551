"""The slots of a workload's first set beside a scratch pool on which the same tokens run plainly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdn.bench.values import bits
from gdn.bench.workload import Window, Workload
from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison, bitwise


class Places:
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

    def new_scratch(self) -> Any:
        """A pool with a place for each of the slots, whose states are whatever was there."""
        pool = self._workload.pool
        return self._workload.machine.empty((len(self.slots), *pool.shape[1:]), pool.dtype.name)

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


def poison(out: Any) -> None:
    """Fill a readout with NaN."""
    target = bits(out)
    target[...] = np.iinfo(target.dtype).max


def accepted(workload: Workload, window: Window) -> Window | None:
    """The window cut down to the accepted tokens of rows that fit the ring; None where that leaves none."""
    call = workload.case.ring_call
    lengths, counts = np.asarray(call.lengths, np.int64), np.asarray(call.num_accepted, np.int64)
    kept = np.where(lengths > call.ring_len, 0, np.minimum(counts, lengths))
    if not kept.any():
        return None
    return with_tokens(workload, window, [np.arange(count) for count in kept])


def with_tokens(workload: Workload, window: Window, tokens: Sequence[Array]) -> Window:
    """The window whose sequence b runs `tokens[b]`, positions in what it has now; a position may come twice.

    Its arrays are new, readout included.
    """
    machine = workload.machine
    starts = machine.get(window.input_row_offsets).astype(np.int64)[:-1]
    rows = machine.put(np.concatenate([start + own for start, own in zip(starts, tokens, strict=True)]))

    def gathered(array: Any) -> Any:
        target = machine.empty((len(rows), *array.shape[1:]), array.dtype.name)
        bits(target)[...] = bits(array)[rows]
        return target

    return replace(
        window,
        qkv_conv_output=gathered(window.qkv_conv_output),
        decay_per_token=gathered(window.decay_per_token),
        beta_per_token=gathered(window.beta_per_token),
        input_row_offsets=machine.put(np.cumsum([0, *map(len, tokens)]).astype(np.uint32)),
        out=machine.empty((len(rows), window.out.shape[1]), window.out.dtype.name),
    )


def last_tokens(workload: Workload, window: Window) -> Array:
    """The readout of a window's last tokens, as many of each sequence as a window of the case has."""
    offsets = workload.machine.get(window.input_row_offsets).astype(np.int64)
    ends = offsets[1:]
    lengths = workload.case.call.lengths
    rows = np.concatenate([np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)])
    readout: Array = workload.machine.get(window.out)[rows]
    return readout
