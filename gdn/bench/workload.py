"""Arrays of a timed case: several sets of inputs over one pool and one ring, so that calls rotate past the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from gdn import ops
from gdn.arrays import DTYPES
from gdn.bench.cases import BenchCase
from gdn.bench.machine import Machine
from gdn.bench.timing import Call
from gdn.bench.traffic import case_bytes, state_bytes, token_bytes
from gdn.errors import GdnError, rejection
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

#: Sets of one rotation: enough for two megabytes of state a call to pass a cache of any GPU.
MAX_SETS = 512
#: Of the memory that is free, at most this part is used.
_FREE_MEMORY_USED = 0.6
_VALUE_TOKENS, _VALUE_SLOTS = 256, 8  # distinct values that large arrays repeat


class DoesNotFit(GdnError):
    """One call of a case needs more memory than there is."""


@dataclass(frozen=True, slots=True)
class Window:
    """The tokens of one call, in the order of its arguments. `ring_rows` is None without a ring."""

    qkv_conv_output: Any
    decay_per_token: Any
    beta_per_token: Any
    slot_idx: Any
    input_row_offsets: Any
    out: Any
    ring_rows: Any


@dataclass(frozen=True, slots=True)
class InputSet:
    """What one timed call uses of a workload: a window for each layer, and the tables of a fold."""

    windows: tuple[Window, ...]
    row_ids: Any
    ring_row_ids: Any
    num_accepted: Any


@dataclass(frozen=True, slots=True)
class Workload:
    """The arrays of a case on one machine. `is_cold` says whether a rotation touches more than the cache holds."""

    case: BenchCase
    machine: Machine
    pool: Any
    ring: Any
    sets: tuple[InputSet, ...]
    is_cold: bool

    def forward(self, window: Window, pool: Any = None) -> None:
        """Run a window plainly, on the workload's pool unless another is given."""
        ops.gated_delta_recurrence_fwd(*self._six(window, pool), out=window.out)

    def verify(self, inputs: InputSet) -> None:
        """Verify the windows of all layers."""
        for window in inputs.windows:
            ops.gated_delta_recurrence_verify_ring(*self._eight(window), out=window.out)

    def fold(self, inputs: InputSet) -> None:
        """Fold what is accepted, all layers at once."""
        ops.gated_delta_state_fold(*self._five(inputs))

    def bound(self, part: str) -> Call:
        """The op of a regime of one op, bound to arrays of the first set: of a verify, those of its first layer."""
        inputs = self.sets[0]
        window = inputs.windows[0]
        if part == "fold":
            return ops.bind(ops.gated_delta_state_fold, *self._five(inputs))
        if part == "verify":
            return ops.bind(ops.gated_delta_recurrence_verify_ring, *self._eight(window), out=window.out)
        return ops.bind(ops.gated_delta_recurrence_fwd, *self._six(window), out=window.out)

    def _six(self, window: Window, pool: Any = None) -> tuple[Any, ...]:
        """The arguments that all recurrence functions take first."""
        return (
            window.qkv_conv_output,
            window.decay_per_token,
            window.beta_per_token,
            self.pool if pool is None else pool,
            window.slot_idx,
            window.input_row_offsets,
        )

    def _eight(self, window: Window) -> tuple[Any, ...]:
        """The arguments of a verify."""
        return *self._six(window), self.ring, window.ring_rows

    def _five(self, inputs: InputSet) -> tuple[Any, ...]:
        """The arguments of a fold."""
        return self.pool, inputs.row_ids, self.ring, inputs.ring_row_ids, inputs.num_accepted

    def step(self, inputs: InputSet) -> None:
        """Verify, then fold."""
        self.verify(inputs)
        self.fold(inputs)

    def calls(self, part: str) -> list[Call]:
        """One call for each set. `part` is a regime: "decode", "prefill", "verify", "fold" or "step"."""
        return [self._call(part, inputs) for inputs in self.sets]

    def _call(self, part: str, inputs: InputSet) -> Call:
        if part == "verify":
            return lambda: self.verify(inputs)
        if part == "fold":
            return lambda: self.fold(inputs)
        if part == "step":
            return lambda: self.step(inputs)
        (window,) = inputs.windows
        return lambda: self.forward(window)

    def repeat_records(self) -> None:
        """Copy the records of the first set's windows to the ring rows of all others."""
        ring, first = bits(self.ring), self._live_ring_rows(self.sets[0])
        for inputs in self.sets[1:]:
            ring[self._live_ring_rows(inputs)] = ring[first]

    def _live_ring_rows(self, inputs: InputSet) -> Any:
        """Ring rows of a set as int64, padding left out."""
        rows = self.machine.get(inputs.ring_row_ids).view(np.uint32).ravel()
        return self.machine.put(rows[rows != PAD_SLOT].astype(np.int64))

    def reset(self) -> None:
        """Put the states back that the workload began with."""
        fill(self.pool, self.machine.put(_values_for(self.case).recurrent_state))


def build_workload(case: BenchCase, machine: Machine) -> Workload:
    """Arrays for as many sets as the rotation needs and memory allows. Raises DoesNotFit where not one fits."""
    num_sets, is_cold = plan_sets(case, machine)
    values = _values_for(case)
    call, heads = case.call, case.heads
    total_rows = num_sets * case.num_layers * _rows_of_window(call)
    tokens = [
        _filled(machine, (total_rows, *value.shape[1:]), value)
        for value in (values.qkv_conv_output, values.decay_per_token, values.beta_per_token)
    ]
    out = machine.empty((total_rows, heads.value_dim), _out_dtype(call))
    bits(out)[...] = 0
    num_slots = num_sets * case.slots_in_use
    pool = _filled(machine, (num_slots, *values.recurrent_state.shape[1:]), values.recurrent_state)
    ring = _new_ring(machine, call, num_slots) if isinstance(call, RingCase) else None
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
    return _states_bytes(case) + case.slots_in_use * ring_row + case.num_layers * _window_bytes(call)


def _scratch_bytes(case: BenchCase) -> int:
    """What the check of verify and fold needs beside the workload: the states of a set, and the tokens of a window."""
    return _states_bytes(case) + _window_bytes(case.call) if isinstance(case.call, RingCase) else 0


def _states_bytes(case: BenchCase) -> int:
    return case.slots_in_use * state_bytes(case.heads, case.call.state_dtype)


def _window_bytes(call: Case) -> int:
    gate_bytes = DTYPES[_gate_dtype(call)].itemsize
    return _rows_of_window(call) * token_bytes(call.heads, call.work_dtype, gate_bytes, _out_dtype(call))


def _rows_of_window(call: Case) -> int:
    return sum(call.lengths) if isinstance(call, RingCase) else call.total_seq_len


def _out_dtype(call: Case) -> str:
    return call.work_dtype if isinstance(call, RingCase) else call.out_dtype


def _gate_dtype(call: Case) -> str:
    return "float32" if isinstance(call, RingCase) else call.gate_dtype


def _values_for(case: BenchCase) -> RecurrenceArrays:
    call = case.call
    return _values(case.heads, call.work_dtype, _gate_dtype(call), call.state_dtype)


@lru_cache(maxsize=4)
def _values(heads: HeadGeometry, work_dtype: str, gate_dtype: str, state_dtype: str) -> RecurrenceArrays:
    """Values as a trained layer has them, of some tokens and slots."""
    return build_arrays(
        RecurrenceCase(
            "values",
            heads,
            (_VALUE_TOKENS // _VALUE_SLOTS,) * _VALUE_SLOTS,
            work_dtype=work_dtype,
            gate_dtype=gate_dtype,
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

        def places(padding: Sequence[int]) -> Any:
            numbers = np.arange(num_sets * case.slots_in_use)
            if case.slots == "permuted":
                numbers = random.permutation(numbers)
            table = numbers.reshape(shape).astype(np.uint32)
            table[..., list(padding)] = PAD_SLOT
            return machine.put(table.view(index))

        self.slots = places(call.padding)
        self.ring_rows = places(call.ring_padding) if isinstance(call, RingCase) else None
        first = 0 if isinstance(call, RingCase) else call.leading_rows
        offsets = first + np.concatenate([[0], np.cumsum(call.lengths, dtype=np.int64)])
        self.offsets = machine.put(np.tile(offsets.astype(np.uint32), (num_sets * case.num_layers, 1)).view(index))
        accepted = call.num_accepted if isinstance(call, RingCase) else ()
        self.num_accepted = machine.put(np.tile(np.asarray(accepted, np.uint32), (num_sets, 1)).view(index))


def _input_set(case: BenchCase, tables: _Tables, rows: tuple[Any, ...], idx: int) -> InputSet:
    """Set `idx`: its windows are neighbouring rows of the token arrays in `rows`."""
    length = _rows_of_window(case.call)
    windows = []
    for layer in range(case.num_layers):
        number = idx * case.num_layers + layer
        qkv, decay, beta, out = (array[number * length : (number + 1) * length] for array in rows)
        ring_rows = None if tables.ring_rows is None else tables.ring_rows[idx, layer]
        windows.append(Window(qkv, decay, beta, tables.slots[idx, layer], tables.offsets[number], out, ring_rows))
    ring_row_ids = None if tables.ring_rows is None else tables.ring_rows[idx]
    return InputSet(tuple(windows), tables.slots[idx], ring_row_ids, tables.num_accepted[idx])
