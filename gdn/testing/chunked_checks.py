"""What chunked prefill must satisfy: agreement with the oracle within its own tolerance, and promises by equality.

It keeps E3 and E5 of the README's table of promises. A readout or state that is cut at an edge of a chunk agrees within
the tolerance, and `auto` gives the bits of the algorithm that it takes for a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdn import ops
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.chunked import MIN_CHUNKED_LEN
from gdn.testing.buffers import Array, Buffer
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.checks import Subject, against_oracle, batch_independence, repeats, same_outcome, select, untouched
from gdn.testing.chunked_cases import ChunkedCase
from gdn.testing.compare import Comparison, Tolerance, bitwise, close, same_bytes
from gdn.testing.execute import Layouts, Outcome, execute

_POISON = 0xFF  # repeated, a NaN of every type and an index that is far out of range
_BEYOND = 4096  # bytes around a workspace that must stay as they are


def chunked_tolerance(work_dtype: str, dtype: str, inputs: str = "model") -> Tolerance:
    """The tolerance of a chunked readout or state that is stored as `dtype`."""
    norm, element, reason = 1e-3, 4e-3, "operands of tensor cores with 11 significant bits, measured up to 6e-4"
    if work_dtype == "float32":
        norm, element, reason = 2e-4, 1e-3, "operands of tensor cores in two terms of 11 significant bits"
    elif inputs == "near_equal_keys":
        norm, element = 5e-3, 2e-2
        reason += "; keys that are nearly equal and steps near 2 let errors of a chunk's deltas grow"
    if dtype == "bfloat16":
        norm, element = max(2e-3, 1.2 * norm), element + 2.0**-8
        reason += "; one rounding to bfloat16 at the store, a norm of 1.7e-3"
    elif dtype == "float16":
        norm, element = norm + 2.0**-12, element + 2.0**-11
        reason += "; one rounding to float16 at the store, a norm of 2e-4"
    return Tolerance(norm, element, reason)


@dataclass(frozen=True, slots=True)
class ChunkedSubject(Subject):
    """One case on one backend, whose calls are chunked."""

    case: ChunkedCase

    def run(self, arrays: RecurrenceArrays, layouts: Layouts | None = None) -> Outcome:
        """Another call of the same types, laid out as the case says: the kernel that walks depends on that."""
        return self.run_as("chunked", arrays, layouts)

    def run_as(self, algorithm: str, arrays: RecurrenceArrays, layouts: Layouts | None = None) -> Outcome:
        """The same by an algorithm of another name."""
        chosen = Layouts.of(self.case) if layouts is None else layouts
        return execute(self.backend, arrays, self.case.out_dtype, chosen, _by(algorithm))

    def tolerance(self, dtype: str) -> Tolerance:
        """How far a result that is stored as `dtype` may lie from the oracle's."""
        return chunked_tolerance(self.case.work_dtype, dtype, self.case.inputs)

    @property
    def longest(self) -> int:
        """Position of the longest live sequence."""
        return int(self.live[np.argmax(self.lengths[self.live])])


def chunked_subject(
    case: ChunkedCase, backend: str, arrays: RecurrenceArrays, reference: tuple[Array, Array]
) -> ChunkedSubject:
    """Run the call of a case on a backend."""
    outcome = execute(backend, arrays, case.out_dtype, Layouts.of(case), _by("chunked"))
    return ChunkedSubject(case, backend, arrays, outcome, reference)


def _by(algorithm: str, **keywords: Any) -> Callable[..., Any]:
    return lambda *six, out: ops.gated_delta_recurrence_fwd(*six, out=out, algorithm=algorithm, **keywords)


def auto_takes_the_better(subject: ChunkedSubject) -> Iterator[Comparison]:
    """auto: long rows have the bits of chunked, short ones those of recurrent, all in one call."""
    if len({int(length) >= MIN_CHUNKED_LEN for length in subject.lengths[subject.live]}) < 2:
        return
    auto = subject.run_as("auto", subject.arrays)
    recurrent = subject.run_as("recurrent", subject.arrays)
    for sequence in subject.live:
        is_long = subject.lengths[sequence] >= MIN_CHUNKED_LEN
        name, expected = ("chunked", subject.outcome) if is_long else ("recurrent", recurrent)
        rows, slot = subject.rows(sequence), subject.slots[sequence]
        yield bitwise(auto.out[rows], expected.out[rows], f"as {name}: readout of sequence {sequence}")
        state = auto.recurrent_state[slot]
        yield bitwise(state, expected.recurrent_state[slot], f"as {name}: state of sequence {sequence}")


def edges(subject: ChunkedSubject) -> Iterator[Comparison]:
    """edges: the longest row, cut in two calls at an edge of chunks, agrees with one call within the tolerance."""
    chunk_len = chunk_len_of(subject.case)
    if subject.case.state_dtype != "float32" or not subject.live.size:
        return
    sequence = subject.longest
    cut = (int(subject.lengths[sequence]) - 1) // chunk_len * chunk_len
    if not cut:
        return
    first = subject.run(select(subject, [sequence], lambda length: (0, cut)))
    rest = select(subject, [sequence], lambda length: (cut, length))
    second = subject.run(replace(rest, recurrent_state=first.recurrent_state))
    out = np.concatenate([first.out, second.out])
    slot, whole = subject.slots[sequence], subject.outcome
    yield close(out, whole.out[subject.rows(sequence)], subject.tolerance(subject.case.out_dtype), "cut: readout")
    state = second.recurrent_state[slot]
    yield close(state, whole.recurrent_state[slot], subject.tolerance("float32"), "cut: state")


def chunk_len_of(case: ChunkedCase) -> int:
    """Tokens of a chunk of a case."""
    types = case.work_dtype, case.state_dtype
    return ChunkLayout(case.heads, *types, len(case.lengths), case.total_seq_len, 1).chunk_len


def workspace(subject: ChunkedSubject) -> Iterator[Comparison]:
    """workspace: what was in the caller's workspace does not matter, and nothing beyond it is written."""
    beyond: list[Array] = []

    def call(*six: Any, out: Any) -> None:
        num_bytes = ops.gated_delta_recurrence_fwd_workspace_bytes(*six, algorithm="chunked")
        poison = np.full(num_bytes + 2 * _BEYOND, _POISON, np.uint8)
        buffer = Buffer(poison, 0, poison.shape, (1,))
        memory = buffer.array if isinstance(six[0], np.ndarray) else buffer.on_gpu()[0]
        given = memory[_BEYOND : _BEYOND + num_bytes]
        ops.gated_delta_recurrence_fwd(*six, out=out, algorithm="chunked", workspace=given)
        after = memory if isinstance(memory, np.ndarray) else memory.get()
        beyond.extend((after[:_BEYOND], after[_BEYOND + num_bytes :]))

    outcome = execute(subject.backend, subject.arrays, subject.case.out_dtype, Layouts.of(subject.case), call)
    yield from same_outcome(subject, outcome, "poisoned workspace")
    for part in beyond:
        yield same_bytes(part, np.full_like(part, _POISON), "memory around the workspace")


@dataclass(frozen=True, slots=True)
class _Stray:
    """A non-finite number in the longest row. reach: (value heads, columns) that it may reach from its token on.

    stays: whether it must reach them for good. A query reaches its own token alone.
    """

    name: str
    arrays: RecurrenceArrays
    heads: slice
    columns: slice
    stays: bool = True


_BESIDE_A_STRAY = Tolerance(
    relative_norm=1e-5,
    max_element=1e-4,
    reason=(
        "the powers of two taken out of a chunk are those of its finite tokens, so that without one of them other "
        "operands may be too small for a second term"
    ),
)


def strays(subject: ChunkedSubject) -> Iterator[Comparison]:
    """strays: a non-finite token changes no bit of chunks before it, and nothing but itself and what follows it."""
    if not subject.case.has_strays:
        return
    chunk_len = chunk_len_of(subject.case)
    for place, value in ((chunk_len // 2 + 3, np.nan), (chunk_len + 5, np.inf)):
        for stray in _strays(subject, subject.rows(subject.longest).start + place, value):
            yield from _stays_within_reach(subject, stray, place)


def _strays(subject: ChunkedSubject, row: int, value: float) -> Iterator[_Stray]:
    """A call for each argument with one such number in the last key head, or in a value head of it."""
    heads = subject.case.heads
    group = slice(heads.num_value_heads - heads.group_size, heads.num_value_heads)
    head, column, everything = heads.num_value_heads - 1, 3, slice(None)
    for name, channel, reached, columns in (
        ("query", heads.key_dim - 2, group, everything),
        ("key", 2 * heads.key_dim - 2, group, everything),
        ("value", heads.conv_dim - heads.value_head_dim + column, slice(head, head + 1), slice(column, column + 1)),
    ):
        qkv = subject.arrays.qkv_conv_output.copy()
        qkv[row, channel] = value
        yield _Stray(name, replace(subject.arrays, qkv_conv_output=qkv), reached, columns, stays=name != "query")
    for name in ("decay_per_token", "beta_per_token"):
        gate = getattr(subject.arrays, name).copy()
        gate[row, head] = value
        yield _Stray(name, replace(subject.arrays, **{name: gate}), slice(head, head + 1), everything)


def _stays_within_reach(subject: ChunkedSubject, stray: _Stray, place: int) -> Iterator[Comparison]:
    heads, case = subject.case.heads, subject.case
    shape = (-1, heads.num_value_heads, heads.value_head_dim)
    rows, slot = subject.rows(subject.longest), subject.slots[subject.longest]
    outcome = subject.run(stray.arrays)
    out, expected = outcome.out.reshape(shape), subject.outcome.out.reshape(shape).copy()
    state, expected_state = outcome.recurrent_state[slot], subject.outcome.recurrent_state[slot].copy()
    name = f"{stray.name} at {place}"
    at, chunk = rows.start + place, rows.start + place // chunk_len_of(case) * chunk_len_of(case)
    if chunk > rows.start:
        yield bitwise(out[rows.start : chunk], expected[rows.start : chunk], f"{name}: readout of chunks before it")
    yield close(out[chunk:at], expected[chunk:at], _BESIDE_A_STRAY, f"{name}: readout before it in its chunk")
    others = np.ones(len(out), bool)
    others[rows] = False
    yield bitwise(out[others], expected[others], f"{name}: readout of other sequences")

    behind = slice(at, rows.stop if stray.stays else at + 1)
    reached = out[behind, stray.heads, stray.columns]
    yield bitwise(np.isfinite(reached), np.zeros(reached.shape, bool), f"{name}: readout from it on, finite")
    out = out.copy()
    out[behind, stray.heads, stray.columns] = expected[behind, stray.heads, stray.columns]
    yield close(out, expected, subject.tolerance(case.out_dtype), f"{name}: readout out of its reach")
    if stray.stays:
        reached = state[stray.heads, :, stray.columns]
        yield bitwise(np.isfinite(reached), np.zeros(reached.shape, bool), f"{name}: state, finite")
        state = state.copy()
        state[stray.heads, :, stray.columns] = expected_state[stray.heads, :, stray.columns]
    yield close(state, expected_state, subject.tolerance(case.state_dtype), f"{name}: state out of its reach")


_Check = Callable[[ChunkedSubject], Iterator[Comparison]]

CHUNKED_CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "untouched": untouched,
    "edges": edges,
    "auto": auto_takes_the_better,
    "strays": strays,
    "workspace": workspace,
    "E3": batch_independence,
    "E5": repeats,
}

#: The checks of a case of special values: those that values decide.
_CHECKS_OF_VALUES = ("oracle", "untouched", "edges")


def chunked_checks_of(case: ChunkedCase) -> dict[str, _Check]:
    """The checks to run for a case."""
    if case.inputs == "model":
        return CHUNKED_CHECKS
    return {name: CHUNKED_CHECKS[name] for name in _CHECKS_OF_VALUES}
