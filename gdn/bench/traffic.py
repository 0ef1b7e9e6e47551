"""Bytes that a call cannot do without, and the floating-point operations of its definition.

Every array element that a call needs is counted once for each direction, whatever a kernel does: what is read twice or
written in vain makes a kernel slower, not its traffic larger. Rows that are padding or empty count nothing but their
index entries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gdn.arrays import DTYPES
from gdn.bench.cases import CONV_WIDTH, BenchCase
from gdn.bench.loops import loop_tables
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

_INDEX_BYTES = 4
_GATE_BYTES = 4  # of gates in float32: those of the ring's cases, and all that the gates' own op makes


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bandwidths measured on this machine: a copy (bytes read plus bytes written), and reading alone."""

    copy_gb_s: float
    read_gb_s: float


def state_bytes(heads: HeadGeometry, state_dtype: str) -> int:
    """One slot, once: num_value_heads · key_head_dim · value_head_dim elements."""
    return heads.slot_state_elements * DTYPES[state_dtype].itemsize


def token_bytes(heads: HeadGeometry, work_dtype: str, gate_bytes: int, out_dtype: str) -> int:
    """One token: conv_dim channels and two gates of each value head are read, value_dim readouts are written."""
    channels = heads.conv_dim * DTYPES[work_dtype].itemsize
    return channels + 2 * heads.num_value_heads * gate_bytes + heads.value_dim * DTYPES[out_dtype].itemsize


def record_bytes(heads: HeadGeometry, ring_dtype: str) -> int:
    """What one token leaves in the ring: a record for each key head, without padding."""
    return heads.num_key_heads * heads.record_elements * DTYPES[ring_dtype].itemsize


def recurrence_bytes(call: RecurrenceCase) -> int:
    """Forward: the state of each live sequence is read and written, its tokens pass once.

    Index arrays: batch_size slots, batch_size + 1 offsets. Uncovered rows of `out`, zeroed, are not counted.
    """
    live = [length for row, length in enumerate(call.lengths) if length and row not in call.padding]
    gate_bytes = DTYPES[call.gate_dtype].itemsize
    return (
        2 * len(live) * state_bytes(call.heads, call.state_dtype)
        + sum(live) * token_bytes(call.heads, call.work_dtype, gate_bytes, call.out_dtype)
        + _INDEX_BYTES * (2 * len(call.lengths) + 1)
    )


def verify_bytes(call: RingCase) -> int:
    """Verify, all layers: each live state is read, its tokens pass once, and each leaves its records.

    A row longer than RING_LEN leaves none and writes its state instead. Index arrays: batch_size slots, batch_size ring
    rows, batch_size + 1 offsets.
    """
    live = [length for row, length in enumerate(call.lengths) if length and _has_places(call, row)]
    states = sum(2 if length > call.ring_len else 1 for length in live)
    recorded = sum(length for length in live if length <= call.ring_len)
    layer = (
        states * state_bytes(call.heads, call.state_dtype)
        + sum(live) * token_bytes(call.heads, call.work_dtype, _GATE_BYTES, call.work_dtype)
        + recorded * record_bytes(call.heads, call.ring_dtype)
        + _INDEX_BYTES * (3 * len(call.lengths) + 1)
    )
    return call.num_layers * layer


def fold_bytes(call: RingCase) -> int:
    """Fold, all layers: the state of each row that accepts something is read and written, its accepted records read.

    Index arrays: batch_size slots and ring rows for each layer, batch_size counts. Nothing of a row with a count of 0,
    or above RING_LEN, is touched.
    """
    counts = [
        count for row, count in enumerate(call.num_accepted) if 0 < count <= call.ring_len and _has_places(call, row)
    ]
    layer = (
        2 * len(counts) * state_bytes(call.heads, call.state_dtype)
        + sum(counts) * record_bytes(call.heads, call.ring_dtype)
        + _INDEX_BYTES * 2 * len(call.lengths)
    )
    return call.num_layers * layer + _INDEX_BYTES * len(call.lengths)


def fused_bytes(call: RingCase, pending: int) -> int:
    """A verify that folds `pending` records of each live sequence first: each state is read and written once, the
    pending records are read, the window's tokens pass once and leave their records.

    Where nothing is pending no state is written. Index arrays: those of a verify, and two of batch_size for what is
    pending.
    """
    written = _num_live(call) * state_bytes(call.heads, call.state_dtype) if pending else 0
    return lazy_bytes(call, pending) + written


def lazy_bytes(call: RingCase, pending: int) -> int:
    """A verify behind `pending` records of each live sequence that stay pending: as `fused_bytes`, no state written."""
    read = _num_live(call) * pending * record_bytes(call.heads, call.ring_dtype)
    return verify_bytes(call) + read + _INDEX_BYTES * 2 * len(call.lengths)


def loop_bytes(case: BenchCase) -> tuple[float, float]:
    """What a layer reads and writes in a step of a loop, on average over the timed steps: for rows whose state is only
    read, and for rows whose state is folded and written.

    separate: a verify, and a fold of what was accepted. Otherwise a verify of each row that reads its pending records
    and, in the steps in which it folds them, writes its state.
    """
    tables, call = loop_tables(case), case.ring_call
    timed = slice(tables.first_timed, None)
    if case.form == "separate":
        folds = [fold_bytes(replace(call, num_accepted=tuple(map(int, row)))) for row in tables.num_accepted[timed]]
        return verify_bytes(call), sum(folds) / len(folds)
    moves, counts = tables.folds[timed], tables.num_pending[timed]
    of_a_row = lazy_bytes(call, 0) / len(call.lengths)
    record, state = record_bytes(call.heads, call.ring_dtype), state_bytes(call.heads, call.state_dtype)
    reading = (~moves).sum() * of_a_row + counts[~moves].sum() * record
    updating = moves.sum() * (of_a_row + state) + counts[moves].sum() * record
    return float(reading) / len(moves), float(updating) / len(moves)


def window_bytes(call: Case) -> int:
    """The window of a sequence, once: CONV_WIDTH - 1 past inputs of every channel, of the work type."""
    return (CONV_WIDTH - 1) * _channel_bytes(call)


def filter_bytes(call: Case) -> int:
    """The weights of a layer's convolution: CONV_WIDTH of every channel, of the work type."""
    return CONV_WIDTH * _channel_bytes(call)


def _channel_bytes(call: Case) -> int:
    return call.heads.conv_dim * DTYPES[call.work_dtype].itemsize


def conv_bytes(call: Case, *, moves_windows: bool) -> int:
    """A convolution: every channel of each token is read and written once, the window of each live sequence is read,
    and written where it moves, and the weights are read once.

    Index arrays: batch_size slots, batch_size + 1 offsets.
    """
    live = [length for row, length in enumerate(call.lengths) if length and row not in call.padding]
    return (
        2 * sum(live) * _channel_bytes(call)
        + (1 + moves_windows) * len(live) * window_bytes(call)
        + filter_bytes(call)
        + _INDEX_BYTES * (2 * len(call.lengths) + 1)
    )


def commit_bytes(call: RingCase) -> int:
    """A commit: each window that moves is written once, and as many inputs are read, old ones or those of tokens.

    Index arrays: batch_size slots, batch_size counts, batch_size + 1 offsets.
    """
    moving = sum(count > 0 and row not in call.padding for row, count in enumerate(call.num_accepted))
    return 2 * moving * window_bytes(call) + _INDEX_BYTES * (3 * len(call.lengths) + 1)


def gates_bytes(call: Case) -> int:
    """Gates: a and b of each token and value head are read, decay and beta written in float32; of each value head a
    rate and a bias in float32 are read once.
    """
    of_a_token = 2 * DTYPES[call.work_dtype].itemsize + 2 * _GATE_BYTES
    return call.heads.num_value_heads * (sum(call.lengths) * of_a_token + 2 * _GATE_BYTES)


def _num_live(call: RingCase) -> int:
    return sum(length > 0 and _has_places(call, row) for row, length in enumerate(call.lengths))


def _has_places(call: RingCase, row: int) -> bool:
    return row not in call.padding and row not in call.ring_padding


def case_bytes(case: BenchCase) -> int:
    """Bytes of one timed call of a case; of a loop, those of one layer's part of a step."""
    return round(sum(_read_and_written(case)))


def _read_and_written(case: BenchCase) -> tuple[float, float]:
    """Bytes of the part that mostly reads (verify, lazy), and of the part that reads and writes (everything else)."""
    if case.loop is not None:
        return loop_bytes(case)
    if case.regime in ("decode", "prefill"):
        return 0, recurrence_bytes(case.recurrence_call)
    if case.regime == "conv":
        return 0, conv_bytes(case.call, moves_windows=case.moves_windows)
    if case.regime == "gates":
        return 0, gates_bytes(case.call)
    call = case.ring_call
    if case.regime == "commit":
        return 0, commit_bytes(call)
    if case.regime == "fused" and case.pending:
        return 0, fused_bytes(call, case.pending)
    if case.regime in ("fused", "lazy"):  # with nothing pending there is nothing to fold
        return lazy_bytes(call, case.pending), 0
    reading = 0 if case.regime == "fold" else verify_bytes(call)
    return reading, 0 if case.regime == "verify" else fold_bytes(call)


def attainable_us(case: BenchCase, ceilings: Ceilings) -> float:
    """The time in which this machine moves the bytes of a case and does nothing else.

    What leaves the states alone (verify, lazy) is held against the read-only bandwidth, everything else against that of
    a copy, a step or loop against both parts.
    """
    reading, updating = _read_and_written(case)
    return 1e-3 * (reading / ceilings.read_gb_s + updating / ceilings.copy_gb_s)


def recurrence_flops(call: RecurrenceCase) -> int:
    """Floating-point operations of the definition, a multiplication or an addition counting one.

    For each token, value head and state element: 1 to decay it, 2 for its part of memory = S^T k, 2 for the update
    S + k delta^T, 2 for its part of the readout S^T q: 7. What grows with one head size only (norms, delta) is left
    out, below 1 % at 128 x 128.
    """
    tokens = sum(length for row, length in enumerate(call.lengths) if row not in call.padding)
    return 7 * tokens * call.heads.slot_state_elements


def num_tokens(case: BenchCase) -> int:
    """Tokens that one timed call runs."""
    return case.num_layers * sum(case.call.lengths)
