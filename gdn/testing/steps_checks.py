"""What the steps of a speculative decode loop must satisfy, with the whole layer in them.

A step convolves every row's window without moving it, computes the gates and verifies; once it is known how much is
accepted, the commit and the fold move windows and states on. A layer that runs the accepted tokens plainly,
convolution, gates and recurrence, must read out and leave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gdn import oracle
from gdn.testing.buffers import Array
from gdn.testing.compare import FLOAT32_TOLERANCE, Comparison, Tolerance, bitwise, close
from gdn.testing.steps_cases import LayerTokens, StepsArrays, StepsCase, advance, piece
from gdn.testing.steps_layer import ACTIVATION, Layer

_LAYER_TOLERANCE = Tolerance(
    3 * FLOAT32_TOLERANCE.relative_norm,
    3 * FLOAT32_TOLERANCE.max_element,
    "convolution, gates and recurrence in a row, each with float32 arithmetic and storage",
)


@dataclass(frozen=True, slots=True)
class StepsSubject:
    """A case that was run both ways on one backend.

    readouts: of each step the accepted tokens' as the verify and as the plain layer gave them, and whether padding
    read zero. pools: windows and states of the speculative layer and of the plain one after each step.
    """

    case: StepsCase
    backend: str
    arrays: StepsArrays
    readouts: list[tuple[Array, Array]] = field(default_factory=list)
    paused: list[Array] = field(default_factory=list)
    pools: list[tuple[Array, Array, Array, Array]] = field(default_factory=list)
    position: Array = field(default_factory=lambda: np.zeros(0, np.int64))


def steps_subject(case: StepsCase, backend: str, arrays: StepsArrays) -> StepsSubject:
    """Run all steps of a case on a backend, speculatively and plainly."""
    speculative, plain = Layer(case, backend, arrays), Layer(case, backend, arrays)
    subject = StepsSubject(case, backend, arrays, position=np.zeros(case.num_rows, np.int64))
    for step in arrays.steps:
        window = piece(arrays.tokens, subject.position, step.drafted, step.is_paused)
        readout = speculative.verify(window, step.ring_rows)
        speculative.accept(window, step.ring_rows, step.accepted)
        expected = plain.run(piece(arrays.tokens, subject.position, advance(step), step.is_paused))
        subject.readouts.append((readout[_first_rows(step.drafted, advance(step))], expected))
        subject.paused.append(readout[_first_rows(step.drafted, np.where(step.is_paused, step.drafted, 0))])
        subject.pools.append((speculative.windows(), plain.windows(), speculative.states(), plain.states()))
        subject.position[:] += advance(step)
    return subject


def _first_rows(counts: Array, wanted: Array) -> Array:
    """Of each row's `counts` tokens the places of the first `wanted`."""
    starts = np.cumsum(counts) - counts
    return np.concatenate([np.arange(start, start + number) for start, number in zip(starts, wanted, strict=True)])


def against_oracle(subject: StepsSubject) -> Iterator[Comparison]:
    """Windows, states and the last readouts of a float32 layer within tolerance of three oracles in a row."""
    arrays = subject.arrays
    if (subject.case.work_dtype, subject.case.state_dtype) != ("float32", "float32") or not subject.position.any():
        return
    everything = _accepted_tokens(subject)
    tables = everything.slot_idx, everything.input_row_offsets
    qkv, windows = oracle.gated_delta_conv1d_fwd(
        everything.qkv, arrays.conv_weight, arrays.conv_state, *tables, activation=ACTIVATION
    )
    gates = oracle.gated_delta_gates(everything.a, everything.b, arrays.A_log, arrays.dt_bias, allow_neg_eigval=True)
    _, states = oracle.gated_delta_recurrence_fwd(qkv, *gates, arrays.recurrent_state, *tables)
    slots = arrays.tokens.slot_idx.view(np.uint32)
    yield bitwise(subject.pools[-1][0][slots], windows[slots].astype(np.float32), "windows")
    yield close(subject.pools[-1][2][slots], states[slots], _LAYER_TOLERANCE, "states")


def _accepted_tokens(subject: StepsSubject) -> LayerTokens:
    """All tokens that the steps accepted, in one call."""
    nothing = np.zeros_like(subject.position)
    return piece(subject.arrays.tokens, nothing, subject.position, nothing > 0)


def step_by_step(subject: StepsSubject) -> Iterator[Comparison]:
    """Readouts of accepted tokens, and both pools after every step, are those of the plain layer to the bit."""
    for number, (readout, expected) in enumerate(subject.readouts):
        if readout.size:
            yield bitwise(readout, expected, f"step {number}: readout")
        if subject.paused[number].size:
            zeros = np.zeros_like(subject.paused[number])
            yield bitwise(subject.paused[number], zeros, f"step {number}: readout of padding")
        windows, plain_windows, states, plain_states = subject.pools[number]
        yield bitwise(windows, plain_windows, f"step {number}: windows")
        yield bitwise(states, plain_states, f"step {number}: states")


def at_once(subject: StepsSubject) -> Iterator[Comparison]:
    """E4: with float32 states all accepted tokens in one plain call leave the same pools."""
    if not subject.case.is_exact:
        return
    layer = Layer(subject.case, subject.backend, subject.arrays)
    layer.run(_accepted_tokens(subject))
    yield bitwise(subject.pools[-1][0], layer.windows(), "windows after one call")
    yield bitwise(subject.pools[-1][2], layer.states(), "states after one call")


def wrong_counts_differ(subject: StepsSubject) -> Iterator[Comparison]:
    """The comparison bites: accepting a token less than was accepted leaves other windows and other states."""
    case, arrays = subject.case, subject.arrays
    step, nothing = arrays.steps[0], np.zeros(case.num_rows, np.int64)
    shortened = (step.accepted > 0) & (step.drafted <= case.ring_len) & ~step.is_paused
    if not shortened.any():
        return
    layer = Layer(case, subject.backend, arrays)
    window = piece(arrays.tokens, nothing, step.drafted, step.is_paused)
    layer.verify(window, step.ring_rows)
    layer.accept(window, step.ring_rows, step.accepted - shortened)
    for name, wrong, right in (
        ("windows", layer.windows(), subject.pools[0][0]),
        ("states", layer.states(), subject.pools[0][2]),
    ):
        found = bitwise(wrong, right, f"{name} of a token less")
        message = f"{found.name}: expected a difference, got equal pools" if found.passed else f"{found.name}: differ"
        yield replace(found, passed=not found.passed, measure="must differ", worst_error=0.0, message=message)


_Check = Callable[[StepsSubject], Iterator[Comparison]]

STEPS_CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "steps": step_by_step,
    "bites": wrong_counts_differ,
    "E4": at_once,
}
