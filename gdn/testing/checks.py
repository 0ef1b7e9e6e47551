"""What a recurrence call must satisfy: agreement with the oracle, and the exact promises E3 to E7.

Each check takes a `Subject`, the call under test with its outcome, and yields comparisons. The numbers of the
promises are those of the README's table "Exact promises".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from gdn import oracle
from gdn.backends.recurrence import some_row_tiles
from gdn.backends.row_tile import forced_row_tile
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase
from gdn.testing.compare import Comparison, Tolerance, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.execute import DENSE, Layouts, Outcome, execute
from gdn.testing.ragged import RaggedSubject


@dataclass(frozen=True, slots=True)
class Subject(RaggedSubject):
    """One case on one backend: its arrays, what its call left, and the reference (readout, pool)."""

    case: RecurrenceCase
    backend: str
    arrays: RecurrenceArrays
    outcome: Outcome
    reference: tuple[Array, Array]

    def run(self, arrays: RecurrenceArrays, layouts: Layouts = DENSE) -> Outcome:
        """Another call of the same types, densely laid out unless said otherwise."""
        return execute(self.backend, arrays, self.case.out_dtype, layouts)

    def tolerance(self, dtype: str) -> Tolerance:
        """How far a result that is stored as `dtype` may lie from the oracle's."""
        return storage_tolerance(dtype)


def reference_of(arrays: RecurrenceArrays) -> tuple[Array, Array]:
    """Readout and pool of the float64 oracle."""
    return oracle.gated_delta_recurrence_fwd(*arrays.as_tuple())


def subject(case: RecurrenceCase, backend: str, arrays: RecurrenceArrays, reference: tuple[Array, Array]) -> Subject:
    """Run the call of a case on a backend."""
    outcome = execute(backend, arrays, case.out_dtype, Layouts.of(case))
    return Subject(case, backend, arrays, outcome, reference)


def against_oracle(subject: Subject) -> Iterator[Comparison]:
    """Readout and state within tolerance, and exact zeros in rows that no live sequence owns."""
    readout, pool = subject.reference
    unowned = np.ones(len(readout), bool)
    for sequence in subject.live:
        unowned[subject.rows(sequence)] = False
    if subject.live.size:
        yield close(subject.outcome.out, readout, subject.tolerance(subject.case.out_dtype), "readout")
        slots = subject.slots[subject.live]
        # Slots that nobody uses hold NaN; they are compared elsewhere, by their bytes.
        state, expected = np.zeros((2, *pool.shape))
        state[slots], expected[slots] = subject.outcome.recurrent_state[slots], pool[slots]
        yield close(state, expected, subject.tolerance(subject.case.state_dtype), "state")
    if unowned.any():
        rows = subject.outcome.out[unowned]
        yield bitwise(rows, np.zeros_like(rows), "unowned rows")


def untouched(subject: Subject) -> Iterator[Comparison]:
    """Inputs, gaps and every slot but those of live sequences keep their bytes."""
    yield from (comparison for comparison in subject.outcome.kept if comparison.measure != "empty")
    others = np.setdiff1d(np.arange(len(subject.outcome.recurrent_state)), subject.slots[subject.live])
    if others.size:
        yield same_bytes(subject.outcome.recurrent_state[others], subject.arrays.recurrent_state[others], "other slots")


def batch_independence(subject: Subject) -> Iterator[Comparison]:
    """E3: a sequence gives the same bits alone, in a shuffled batch, and beside a neighbour full of NaN."""
    if not subject.live.size:
        return
    longest = subject.live[np.argmax(subject.lengths[subject.live])]
    for sequence in dict.fromkeys((int(subject.live[0]), int(longest), int(subject.live[-1]))):
        yield from _same_sequences(subject, [sequence], "alone")
    order = np.random.default_rng(0).permutation(len(subject.lengths))
    yield from _same_sequences(subject, [int(sequence) for sequence in order], "shuffled")
    yield from _nan_stays_where_it_is(subject, int(longest))


def _same_sequences(subject: Subject, order: list[int], how: str) -> Iterator[Comparison]:
    """A call with these sequences in this order leaves what the call under test left for each of them."""
    arrays = select(subject, order, lambda length: (0, length))
    outcome = subject.run(arrays)
    for place, sequence in enumerate(order):
        if sequence in subject.live:
            first_row = int(arrays.input_row_offsets[place])
            readout = outcome.out[first_row : first_row + int(subject.lengths[sequence])]
            slot = subject.slots[sequence]
            yield bitwise(
                readout, subject.outcome.out[subject.rows(sequence)], f"{how}: readout of sequence {sequence}"
            )
            state = subject.outcome.recurrent_state[slot]
            yield bitwise(outcome.recurrent_state[slot], state, f"{how}: state of sequence {sequence}")


def select(subject: Subject, order: list[int], part: Callable[[int], tuple[int, int]]) -> RecurrenceArrays:
    """The call with these sequences in this order, of each the tokens [begin, end) that `part` gives for its length."""
    arrays = subject.arrays
    ranges = [part(int(subject.lengths[sequence])) for sequence in order]
    starts = [subject.rows(sequence).start for sequence in order]
    rows = np.concatenate(
        [np.zeros(0, np.int64), *(np.arange(s + b, s + e) for s, (b, e) in zip(starts, ranges, strict=True))]
    )
    offsets = np.cumsum([0, *(end - begin for begin, end in ranges)])
    return RecurrenceArrays(
        arrays.qkv_conv_output[rows],
        arrays.decay_per_token[rows],
        arrays.beta_per_token[rows],
        arrays.recurrent_state,
        arrays.slot_idx[order],
        offsets.astype(arrays.input_row_offsets.dtype),
    )


def _nan_stays_where_it_is(subject: Subject, sequence: int) -> Iterator[Comparison]:
    """A NaN in the first key head of one sequence reaches that sequence's first group of value heads alone."""
    arrays, heads = subject.arrays, subject.case.heads
    qkv = arrays.qkv_conv_output.copy()
    rows = subject.rows(sequence)
    qkv[(rows.start + rows.stop) // 2, heads.key_dim] = np.nan
    outcome = subject.run(replace(arrays, qkv_conv_output=qkv))
    out, pool = outcome.out.copy(), outcome.recurrent_state.copy()
    channels = heads.group_size * heads.value_head_dim
    slot = subject.slots[sequence]
    out[rows, :channels] = subject.outcome.out[rows, :channels]
    pool[slot, : heads.group_size] = subject.outcome.recurrent_state[slot, : heads.group_size]
    yield bitwise(out, subject.outcome.out, "NaN elsewhere: readout")
    yield bitwise(pool, subject.outcome.recurrent_state, "NaN elsewhere: state")


def thread_maps(subject: Subject) -> Iterator[Comparison]:
    """E3: every way to split a head over threads gives the same bits; as many maps as the case asks for."""
    num_maps = subject.case.thread_maps
    if subject.backend == "numpy" or not num_maps:
        return
    heads = subject.case.heads
    for tile in some_row_tiles(heads, subject.arrays.recurrent_state.itemsize, num_maps):
        with forced_row_tile(tile):
            outcome = subject.run(subject.arrays)
        yield from same_outcome(subject, outcome, str(tile))


def splits(subject: Subject) -> Iterator[Comparison]:
    """E4: with a float32 pool, one call equals two calls that share the tokens out between them."""
    if subject.case.state_dtype != "float32" or not subject.live.size:
        return
    order = list(range(len(subject.lengths)))
    first = select(subject, order, lambda length: (0, length // 3))
    second = select(subject, order, lambda length: (length // 3, length))
    first_outcome = subject.run(first)
    second_outcome = subject.run(replace(second, recurrent_state=first_outcome.recurrent_state))
    out = np.zeros_like(subject.outcome.out)
    for sequence in subject.live:
        cut = subject.rows(sequence).start + int(subject.lengths[sequence]) // 3
        for arrays, outcome, rows in (
            (first, first_outcome, slice(subject.rows(sequence).start, cut)),
            (second, second_outcome, slice(cut, subject.rows(sequence).stop)),
        ):
            begin, end = arrays.input_row_offsets[sequence : sequence + 2]
            out[rows] = outcome.out[int(begin) : int(end)]
    yield bitwise(out, subject.outcome.out, "split: readout")
    yield bitwise(second_outcome.recurrent_state, subject.outcome.recurrent_state, "split: state")


def repeats(subject: Subject) -> Iterator[Comparison]:
    """E5: the same call again gives the same bits, and so does the same call on dense arrays."""
    again = subject.run(subject.arrays, Layouts.of(subject.case))
    yield from same_outcome(subject, again, "again")
    yield from same_outcome(subject, subject.run(subject.arrays), "dense arrays")


def neutral_inputs(subject: Subject) -> Iterator[Comparison]:
    """E6: beta 0 and decay 1 keep the state; key 0 leaves decay times the state; query 0 gives 0."""
    if not subject.live.size:
        return
    heads, slots = subject.case.heads, subject.slots[subject.live]
    # At most 64 tokens and no decay between 0 and 1/2: products of decays stay clear of subnormal numbers,
    # which a GPU flushes to zero.
    short = select(subject, list(range(len(subject.lengths))), lambda length: (0, min(length, 64)))
    decay = short.decay_per_token.copy()
    decay[(decay > 0) & (decay < 0.5)] = 0.5
    zeros, ones = np.zeros_like(decay), np.ones_like(decay)
    pool = subject.arrays.recurrent_state

    outcome = subject.run(replace(short, decay_per_token=ones, beta_per_token=zeros))
    yield bitwise(outcome.recurrent_state[slots], pool[slots], "beta 0, decay 1: state", ignore_zero_sign=True)

    qkv = short.qkv_conv_output.copy()
    qkv[:, heads.key_dim : 2 * heads.key_dim] = 0
    outcome = subject.run(replace(short, decay_per_token=decay, qkv_conv_output=qkv))
    decayed = _decayed(replace(short, decay_per_token=decay), subject)
    yield bitwise(outcome.recurrent_state[slots], decayed[slots], "key 0: state", ignore_zero_sign=True)

    qkv = short.qkv_conv_output.copy()
    qkv[:, : heads.key_dim] = 0
    outcome = subject.run(replace(short, qkv_conv_output=qkv))
    yield bitwise(outcome.out, np.zeros_like(outcome.out), "query 0: readout", ignore_zero_sign=True)


def _decayed(arrays: RecurrenceArrays, subject: Subject) -> Array:
    """The pool after nothing but decay: a float32 product a token, one rounding to the pool's type."""
    pool: Array = arrays.recurrent_state.copy()
    for sequence in subject.live:
        slot = subject.slots[sequence]
        state = pool[slot].astype(np.float32)
        begin, end = arrays.input_row_offsets[sequence : sequence + 2]
        for decay in arrays.decay_per_token[int(begin) : int(end)].astype(np.float32):
            state *= decay[:, None, None]
        pool[slot] = state.astype(pool.dtype)
    return pool


def head_splits(subject: Subject) -> Iterator[Comparison]:
    """E7: two calls on half of the key-head groups each give the bits of one call on all heads."""
    heads = subject.case.heads
    if heads.num_key_heads < 2 or not subject.case.total_seq_len:
        return
    cut = heads.num_key_heads // 2
    outcomes = [subject.run(_heads(subject, begin, end)) for begin, end in ((0, cut), (cut, heads.num_key_heads))]
    out = np.concatenate([outcome.out for outcome in outcomes], axis=1)
    pool = np.concatenate([outcome.recurrent_state for outcome in outcomes], axis=1)
    yield bitwise(out, subject.outcome.out, "half the heads: readout")
    yield bitwise(pool, subject.outcome.recurrent_state, "half the heads: state")


def _heads(subject: Subject, begin: int, end: int) -> RecurrenceArrays:
    """The call on key heads [begin, end) and their value heads alone."""
    arrays, heads = subject.arrays, subject.case.heads
    keys = slice(begin * heads.key_head_dim, end * heads.key_head_dim)
    value_heads = slice(begin * heads.group_size, end * heads.group_size)
    values = slice(value_heads.start * heads.value_head_dim, value_heads.stop * heads.value_head_dim)
    query, key, value = np.split(arrays.qkv_conv_output, [heads.key_dim, 2 * heads.key_dim], axis=1)
    return replace(
        arrays,
        qkv_conv_output=np.concatenate([query[:, keys], key[:, keys], value[:, values]], axis=1),
        decay_per_token=arrays.decay_per_token[:, value_heads],
        beta_per_token=arrays.beta_per_token[:, value_heads],
        recurrent_state=arrays.recurrent_state[:, value_heads],
    )


def same_outcome(subject: Subject, outcome: Outcome, how: str) -> Iterator[Comparison]:
    if subject.outcome.out.size:
        yield bitwise(outcome.out, subject.outcome.out, f"{how}: readout")
    if subject.outcome.recurrent_state.size:
        yield bitwise(outcome.recurrent_state, subject.outcome.recurrent_state, f"{how}: state")


_Check = Callable[[Subject], Iterator[Comparison]]

CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "untouched": untouched,
    "E3": batch_independence,
    "maps": thread_maps,
    "E4": splits,
    "E5": repeats,
    "E6": neutral_inputs,
    "E7": head_splits,
}

#: The checks of a case whose call is long: those that say something new about length, in few calls.
_CHECKS_OF_LONG_CASES = ("oracle", "untouched", "E4")
_LONG_COST = 2**23  # state elements that a call updates
_LONG_ROW = 1024  # tokens


def checks_of(case: RecurrenceCase) -> dict[str, _Check]:
    """The checks to run for a case."""
    if case.cost < _LONG_COST and max(case.lengths, default=0) < _LONG_ROW:
        return CHECKS
    return {name: CHECKS[name] for name in _CHECKS_OF_LONG_CASES}
