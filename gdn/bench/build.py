"""Building the arrays of a timed case: as many sets of inputs as it takes for calls to rotate past the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gdn.arrays import DTYPES
from gdn.bench.cases import PENDING_REGIMES, BenchCase
from gdn.bench.machine import Machine
from gdn.bench.traffic import case_bytes, state_bytes, token_bytes
from gdn.bench.values import bits, fill, gate_dtype, out_dtype, values_for
from gdn.bench.workload import InputSet, Window, Workload
from gdn.errors import GdnError, rejection
from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

#: Sets of one rotation: enough for two megabytes of state a call to pass a cache of any GPU.
MAX_SETS = 512
#: Of the memory that is free, at most this part is used.
_FREE_MEMORY_USED = 0.6


class DoesNotFit(GdnError):
    """One call of a case needs more memory than there is."""


def build_workload(case: BenchCase, machine: Machine) -> Workload:
    """Arrays for as many sets as the rotation needs and memory allows. Raises DoesNotFit where not one fits."""
    num_sets, is_cold = plan_sets(case, machine)
    values = values_for(case)
    call, heads = case.call, case.heads
    total_rows = num_sets * case.num_layers * _rows_of_window(call)
    tokens = [
        _filled(machine, (total_rows, *value.shape[1:]), value)
        for value in (values.qkv_conv_output, values.decay_per_token, values.beta_per_token)
    ]
    out = machine.empty((total_rows, heads.value_dim), out_dtype(call))
    bits(out)[...] = 0
    num_slots = num_sets * case.slots_in_use
    pool = _filled(machine, (num_slots, *values.recurrent_state.shape[1:]), values.recurrent_state)
    ring = _new_ring(machine, call, num_slots * case.ring_rows_of_a_sequence) if isinstance(call, RingCase) else None
    tables = _Tables(case, machine, num_sets)
    sets = tuple(_input_set(case, tables, (*tokens, out), idx) for idx in range(num_sets))
    return Workload(case, machine, pool, ring, sets, is_cold)


def plan_sets(case: BenchCase, machine: Machine) -> tuple[int, bool]:
    """How many sets the rotation has, and whether it touches more than the cache holds.

    Two at least where inputs shall be cold: a single large one would find its own end in the cache.
    """
    room = int(_FREE_MEMORY_USED * machine.free_bytes()) - _scratch_bytes(case)
    fitting = room // max(_set_bytes(case), 1)
    if fitting < 1:
        needed = (_set_bytes(case) + _scratch_bytes(case)) / 1e9
        raise DoesNotFit(rejection(case.call.name, f"at most {max(room, 0) / 1e9:.2f} GB", f"{needed:.2f} GB"))
    if case.max_slots is not None:
        fitting = min(fitting, case.max_slots // max(case.slots_in_use, 1))
    target = machine.cold_bytes()
    wanted = max(2, -(-target // case_bytes(case))) if case.cold else 1
    num_sets = max(1, min(wanted, fitting, MAX_SETS))
    return num_sets, case.cold and num_sets * case_bytes(case) >= target


def _set_bytes(case: BenchCase) -> int:
    """Memory of one set: its slots and ring rows, its tokens and readouts."""
    call, heads = case.call, case.heads
    ring_row = 0
    if isinstance(call, RingCase):
        record_stride = heads.record_elements + call.record_padding
        ring_row = heads.num_key_heads * call.ring_len * record_stride * DTYPES[call.ring_dtype].itemsize
    ring_rows = case.slots_in_use * case.ring_rows_of_a_sequence
    return _states_bytes(case) + ring_rows * ring_row + case.num_layers * _window_bytes(call)


def _scratch_bytes(case: BenchCase) -> int:
    """What a check needs beside the workload where there is a ring: the states of a set, and the tokens of a row."""
    if not isinstance(case.call, RingCase):
        return 0
    token = _window_bytes(case.call) // max(_rows_of_window(case.call), 1)
    return _states_bytes(case) + 2 * _window_bytes(case.call) + case.batch_size * case.pending * token


def _states_bytes(case: BenchCase) -> int:
    return case.slots_in_use * state_bytes(case.heads, case.call.state_dtype)


def _window_bytes(call: Case) -> int:
    gate_bytes = DTYPES[gate_dtype(call)].itemsize
    return _rows_of_window(call) * token_bytes(call.heads, call.work_dtype, gate_bytes, out_dtype(call))


def _rows_of_window(call: Case) -> int:
    return sum(call.lengths) if isinstance(call, RingCase) else call.total_seq_len


def _filled(machine: Machine, shape: tuple[int, ...], values: Array) -> Any:
    array = machine.empty(shape, values.dtype.name)
    fill(array, machine.put(values))
    return array


def _new_ring(machine: Machine, call: RingCase, num_rows: int) -> Any:
    """A ring that holds zeros until a verify writes it."""
    heads = call.heads
    shape = (num_rows, heads.num_key_heads, call.ring_len, heads.record_elements + call.record_padding)
    ring = machine.empty(shape, call.ring_dtype)
    bits(ring)[...] = 0
    return ring


class _Tables:
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
        self.pending_rows: Any = None
        self.num_pending: Any = None
        if case.regime in PENDING_REGIMES:
            is_apart = case.ring_rows_of_a_sequence == 2
            self.pending_rows = places((), num_sets * case.slots_in_use) if is_apart else self.ring_rows
            self.num_pending = counts((case.pending,) * case.batch_size)


def _input_set(case: BenchCase, tables: _Tables, rows: tuple[Any, ...], idx: int) -> InputSet:
    """Set `idx`: its windows are neighbouring rows of the token arrays in `rows`."""
    length = _rows_of_window(case.call)
    windows = []
    for layer in range(case.num_layers):
        number = idx * case.num_layers + layer
        qkv, decay, beta, out = (array[number * length : (number + 1) * length] for array in rows)
        ring_rows = None if tables.ring_rows is None else tables.ring_rows[idx, layer]
        pending = () if tables.pending_rows is None else (tables.pending_rows[idx, layer], tables.num_pending[idx])
        windows.append(
            Window(qkv, decay, beta, tables.slots[idx, layer], tables.offsets[number], out, ring_rows, *pending)
        )
    ring_row_ids = None if tables.ring_rows is None else tables.ring_rows[idx]
    return InputSet(tuple(windows), tables.slots[idx], ring_row_ids, tables.num_accepted[idx])
