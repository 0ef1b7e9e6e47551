"""Building the arrays of a timed case: as many sets of inputs as it takes for calls to rotate past the cache."""

from __future__ import annotations

from typing import Any

from gdn.arrays import DTYPES
from gdn.backends.chunked import layout_of, workspace_bytes
from gdn.bench.cases import LAYER_REGIMES, BenchCase
from gdn.bench.loops import loop_tables
from gdn.bench.machine import Machine
from gdn.bench.tables import Tables, loop_steps
from gdn.bench.traffic import (
    case_bytes,
    filter_bytes,
    state_bytes,
    token_bytes,
    verify_bytes,
    window_bytes,
)
from gdn.bench.values import bits, fill, gate_dtype, out_dtype, values_for
from gdn.bench.workload import InputSet, Window, Workload
from gdn.errors import GdnError, rejection
from gdn.testing.buffers import Array
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

#: Sets of one rotation: enough for two megabytes of state a call to pass a cache of any GPU.
MAX_SETS = 512
#: The same for ops around the recurrence: enough for the 200 kB of one token's convolution, with its layer's weights.
MAX_LAYER_SETS = 4096
#: Of the memory that is free, at most this part is used.
_FREE_MEMORY_USED = 0.6


class DoesNotFit(GdnError):
    """One call of a case needs more memory than there is."""


def build_workload(case: BenchCase, machine: Machine) -> Workload:
    """Arrays for as many sets as the rotation needs and memory allows. Raises DoesNotFit where not one fits."""
    num_sets, is_cold = plan_sets(case, machine)
    values = values_for(case)
    call, heads = case.call, case.heads
    total_rows = num_sets * case.num_layers * rows_of_window(call)
    tokens = [
        filled(machine, (total_rows, *value.shape[1:]), value)
        for value in (values.qkv_conv_output, values.decay_per_token, values.beta_per_token)
    ]
    out = machine.empty((total_rows, heads.value_dim), out_dtype(call))
    bits(out)[...] = 0
    num_slots = num_sets * case.slots_in_use
    pool = filled(machine, (num_slots, *values.recurrent_state.shape[1:]), values.recurrent_state)
    ring = _new_ring(machine, call, num_slots * case.ring_rows_of_a_sequence) if isinstance(call, RingCase) else None
    tables = Tables(case, machine, num_sets)
    sets = tuple(_input_set(case, tables, (*tokens, out), idx) for idx in range(num_sets))
    loop = loop_steps(case, machine, tables, sets) if case.loop else ()
    num_bytes = _workspace_bytes(case)
    workspace = machine.empty((num_bytes,), "uint8") if num_bytes else None
    return Workload(case, machine, pool, ring, sets, is_cold, loop, workspace)


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
    # A loop comes back to a state within a step: what is read and written there counts once, the same in all forms.
    touched = case_bytes(case) if case.loop is None else verify_bytes(case.ring_call)
    wanted = max(2, -(-target // touched)) if case.cold else 1
    most = MAX_LAYER_SETS if case.regime in LAYER_REGIMES else MAX_SETS
    if case.loop is not None:
        most = machine.loop_calls // loop_tables(case).num_timed
    num_sets = max(1, min(wanted, fitting, most))
    return num_sets, case.cold and num_sets * touched >= target


def _set_bytes(case: BenchCase) -> int:
    """Memory of one set: its slots and ring rows, its tokens and readouts."""
    call, heads = case.call, case.heads
    if case.regime in LAYER_REGIMES:
        return _layer_set_bytes(case)
    ring_row = 0
    if isinstance(call, RingCase):
        record_stride = heads.record_elements + call.record_padding
        ring_row = heads.num_key_heads * call.ring_len * record_stride * DTYPES[call.ring_dtype].itemsize
    ring_rows = case.slots_in_use * case.ring_rows_of_a_sequence
    return _states_bytes(case) + ring_rows * ring_row + case.num_layers * _window_bytes(call)


def _layer_set_bytes(case: BenchCase) -> int:
    """The same of an op around the recurrence: tokens, outputs (a commit has none), windows and weights."""
    if case.regime == "gates":
        return case_bytes(case)
    call, tokens = case.call, rows_of_window(case.call)
    channels = call.heads.conv_dim * DTYPES[call.work_dtype].itemsize
    return 2 * tokens * channels + case.batch_size * window_bytes(call) + filter_bytes(call)


def _scratch_bytes(case: BenchCase) -> int:
    """What there is beside the sets: the workspace of chunked calls, or where there is a ring, what a check needs:
    states of a set, twice for a loop, and tokens.
    """
    if case.is_chunked:
        return _workspace_bytes(case)
    if not isinstance(case.call, RingCase) or case.regime in LAYER_REGIMES:
        return 0
    loop = case.loop is not None
    token = _window_bytes(case.call) // max(rows_of_window(case.call), 1)
    before = case.ring_call.ring_len if loop else case.pending
    return (1 + loop) * _states_bytes(case) + 2 * _window_bytes(case.call) + case.batch_size * before * token


def _workspace_bytes(case: BenchCase) -> int:
    call = case.call
    if not case.is_chunked or case.algorithm is None:
        return 0
    types = call.work_dtype, call.state_dtype
    layout = layout_of(case.heads, *types, case.batch_size, rows_of_window(call), case.algorithm)
    return workspace_bytes(layout)


def _states_bytes(case: BenchCase) -> int:
    return case.slots_in_use * state_bytes(case.heads, case.call.state_dtype)


def _window_bytes(call: Case) -> int:
    gate_bytes = DTYPES[gate_dtype(call)].itemsize
    return rows_of_window(call) * token_bytes(call.heads, call.work_dtype, gate_bytes, out_dtype(call))


def rows_of_window(call: Case) -> int:
    """Token rows of one layer of a call."""
    return sum(call.lengths) if isinstance(call, RingCase) else call.total_seq_len


def filled(machine: Machine, shape: tuple[int, ...], values: Array) -> Any:
    """A new array that repeats `values` along its first axis."""
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


def _input_set(case: BenchCase, tables: Tables, rows: tuple[Any, ...], idx: int) -> InputSet:
    """Set `idx`: its windows are neighbouring rows of the token arrays in `rows`."""
    length = rows_of_window(case.call)
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
