"""Index arrays of a timed case: slots, ring rows and counts of all sets, and of all steps of a loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from gdn.arrays import DTYPES
from gdn.bench.cases import PENDING_REGIMES, BenchCase
from gdn.bench.loops import loop_tables
from gdn.bench.machine import Machine
from gdn.bench.workload import InputSet
from gdn.geometry import PAD_SLOT
from gdn.testing.ring_cases import RingCase


class Tables:
    """Index arrays of all sets: slots and ring rows by set and layer, and what is the same for all."""

    def __init__(self, case: BenchCase, machine: Machine, num_sets: int) -> None:
        call = case.call
        random = np.random.default_rng(call.seed)
        shape = (num_sets, case.num_layers, case.batch_size)
        index = DTYPES[call.index_dtype]

        def places(padding: Sequence[int], first: int = 0) -> Any:
            numbers = np.arange(num_sets * case.slots_in_use)
            if case.slots == "permuted":
                numbers = random.permutation(numbers)
            table = (first + numbers).reshape(shape).astype(np.uint32)
            table[..., list(padding)] = PAD_SLOT
            return machine.put(table.view(index))

        def counts(of_each_sequence: Any) -> Any:
            return machine.put(np.tile(np.asarray(of_each_sequence, np.uint32), (num_sets, 1)).view(index))

        self.slots = places(call.padding)
        self.ring_rows = places(call.ring_padding) if isinstance(call, RingCase) else None
        first = 0 if isinstance(call, RingCase) else call.leading_rows
        offsets = first + np.concatenate([[0], np.cumsum(call.lengths, dtype=np.int64)])
        self.offsets = machine.put(np.tile(offsets.astype(np.uint32), (num_sets * case.num_layers, 1)).view(index))
        self.num_accepted = counts(case.num_folded)
        is_apart = case.ring_rows_of_a_sequence == 2
        self.other_ring_rows = places((), num_sets * case.slots_in_use) if is_apart else self.ring_rows
        self.pending_rows: Any = None
        self.num_pending: Any = None
        if case.regime in PENDING_REGIMES:
            self.pending_rows = self.other_ring_rows
            self.num_pending = counts((case.pending,) * case.batch_size)


def loop_steps(case: BenchCase, machine: Machine, tables: Tables, sets: Sequence[InputSet]) -> tuple[InputSet, ...]:
    """The steps of a loop, whose layers are the sets."""
    told = loop_tables(case)
    both = np.stack([machine.get(table)[:, 0] for table in (tables.ring_rows, tables.other_ring_rows)])
    layers, sequences = np.arange(len(sets))[:, None], np.arange(case.batch_size)
    own, pending = (machine.put(both[which[:, None], layers, sequences]) for which in (told.own, told.pending))
    finds_pending = case.form != "separate"
    counts, accepted = (machine.put(table.astype(both.dtype)) for table in (told.num_pending, told.num_accepted))
    slots = tables.slots[:, 0]

    def step(idx: int) -> InputSet:
        windows = []
        for layer, inputs in enumerate(sets):
            more = {"pending_rows": pending[idx, layer], "num_pending": counts[idx]} if finds_pending else {}
            windows.append(replace(inputs.windows[0], ring_rows=own[idx, layer], **more))
        return InputSet(tuple(windows), slots, own[idx], accepted[idx])

    return tuple(step(idx) for idx in range(len(told.own)))
