"""What the convolution and its commit must satisfy: the oracle, hands kept off the rest, and promises by equality.

Windows are compared by equality too: they hold inputs, rounded once to their type and never computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gdn import ops, oracle
from gdn.arrays import DTYPES
from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.conv1d_cases import Conv1dArrays, Conv1dCase
from gdn.testing.ragged import RaggedSubject
from gdn.testing.watched import run_watched

_DENSE: dict[str, str] = {}
_ALL_COUNTS_OF = 9  # tokens: of longer sequences the first counts and the last are enough


@dataclass(frozen=True, slots=True)
class Conv1dOutcome:
    """What a call left: dense copies of its results, and whether it kept its hands off everything else."""

    out: Array
    conv_state: Array
    kept: tuple[Comparison, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class Conv1dSubject(RaggedSubject):
    """One case on one backend: its arrays, what its call left, and the reference (out, pool)."""

    case: Conv1dCase
    backend: str
    arrays: Conv1dArrays
    outcome: Conv1dOutcome
    reference: tuple[Array, Array]

    def run(self, arrays: Conv1dArrays, *, write_state: bool = True) -> Conv1dOutcome:
        """Another call of the same types and layouts."""
        return convolve(self.case, self.backend, arrays, write_state=write_state)


def reference_of_conv1d(case: Conv1dCase, arrays: Conv1dArrays) -> tuple[Array, Array]:
    """Out and pool of the float64 oracle."""
    return oracle.gated_delta_conv1d_fwd(
        arrays.qkv,
        arrays.conv_weight,
        arrays.conv_state,
        arrays.slot_idx,
        arrays.input_row_offsets,
        bias=arrays.bias,
        activation=case.activation,
    )


def conv1d_subject(
    case: Conv1dCase, backend: str, arrays: Conv1dArrays, reference: tuple[Array, Array]
) -> Conv1dSubject:
    """Run the call of a case on a backend."""
    return Conv1dSubject(case, backend, arrays, convolve(case, backend, arrays), reference)


def convolve(
    case: Conv1dCase,
    backend: str,
    arrays: Conv1dArrays,
    *,
    write_state: bool = True,
    layouts: dict[str, str] | None = None,
) -> Conv1dOutcome:
    """Run `gated_delta_conv1d_fwd` on copies of `arrays` with a NaN-filled `out`, laid out as the case says."""
    given = _given(arrays)
    if arrays.bias is not None:
        given["bias"] = arrays.bias
    given["conv_weight"] = arrays.conv_weight
    given["out"] = np.full(arrays.qkv.shape, np.nan, DTYPES[case.out_dtype])
    results, kept = run_watched(
        backend,
        lambda **named: ops.gated_delta_conv1d_fwd(**named, activation=case.activation, write_state=write_state),
        given,
        ("out", "conv_state"),
        layouts_of(case) if layouts is None else layouts,
    )
    return Conv1dOutcome(results["out"], results["conv_state"], kept)


def commit(subject: Conv1dSubject, pool: Array, num_accepted: Array) -> tuple[Array, tuple[Comparison, ...]]:
    """Run `gated_delta_conv1d_commit` on a copy of a pool; returns it, and what was kept."""
    given = {**_given(replace(subject.arrays, conv_state=pool)), "num_accepted": num_accepted}
    results, kept = run_watched(
        subject.backend,
        ops.gated_delta_conv1d_commit,
        given,
        ("conv_state",),
        layouts_of(subject.case),
    )
    return results["conv_state"], kept


def _given(arrays: Conv1dArrays) -> dict[str, Array]:
    """What both ops take, by name."""
    return {name: getattr(arrays, name) for name in ("qkv", "conv_state", "slot_idx", "input_row_offsets")}


def layouts_of(case: Conv1dCase) -> dict[str, str]:
    """How the arrays of a case lie."""
    return {
        "qkv": case.qkv_layout,
        "conv_weight": case.weight_layout,
        "conv_state": case.state_layout,
        "out": case.out_layout,
        **dict.fromkeys(("slot_idx", "input_row_offsets", "num_accepted", "bias"), case.index_layout),
    }


def against_oracle(subject: Conv1dSubject) -> Iterator[Comparison]:
    """Outputs within tolerance, windows equal to the rounded inputs, exact zeros in rows that nobody owns."""
    out, pool = subject.reference
    unowned = np.ones(len(out), bool)
    for sequence in subject.live:
        unowned[subject.rows(sequence)] = False
    if subject.live.size:
        yield close(subject.outcome.out, out, storage_tolerance(subject.case.out_dtype), "out")
        slots = subject.slots[subject.live]
        windows = subject.outcome.conv_state[slots]
        yield bitwise(windows, pool[slots].astype(np.float32).astype(windows.dtype), "windows")
    if unowned.any():
        rows = subject.outcome.out[unowned]
        yield bitwise(rows, np.zeros_like(rows), "unowned rows")


def untouched(subject: Conv1dSubject) -> Iterator[Comparison]:
    """Inputs, gaps and every slot but those of live sequences keep their bytes."""
    yield from subject.outcome.kept
    yield from _others_kept(subject, subject.outcome.conv_state, subject.live)


def _others_kept(subject: Conv1dSubject, pool: Array, moved: Array) -> Iterator[Comparison]:
    """Every slot but those of these sequences keeps its bytes."""
    others = np.setdiff1d(np.arange(len(pool)), subject.slots[moved])
    if others.size:
        yield same_bytes(pool[others], subject.arrays.conv_state[others], "other slots")


def batch_independence(subject: Conv1dSubject) -> Iterator[Comparison]:
    """E3: a sequence gives the same bits alone, in a shuffled batch, and beside a neighbour full of NaN.

    Alone it may also be split over blocks in another way: the batch decides that.
    """
    if not subject.live.size:
        return
    longest = subject.live[np.argmax(subject.lengths[subject.live])]
    for sequence in dict.fromkeys((int(subject.live[0]), int(longest), int(subject.live[-1]))):
        yield from _same_sequences(subject, [sequence], "alone")
    yield from _same_sequences(subject, np.random.default_rng(0).permutation(len(subject.lengths)).tolist(), "shuffled")
    arrays, rows, slot = subject.arrays, subject.rows(longest), subject.slots[longest]
    qkv, channel = arrays.qkv.copy(), subject.case.conv_dim // 2
    qkv[rows, channel] = np.nan
    outcome = subject.run(replace(arrays, qkv=qkv))
    outcome.out[rows, channel] = subject.outcome.out[rows, channel]
    outcome.conv_state[slot, channel] = subject.outcome.conv_state[slot, channel]
    yield from _same_outcome(subject, outcome, "NaN elsewhere")


def _same_sequences(subject: Conv1dSubject, order: Sequence[int], how: str) -> Iterator[Comparison]:
    """A call with these sequences in this order leaves what the call under test left for each of them."""
    arrays = _select(subject, order, [(0, int(subject.lengths[sequence])) for sequence in order])
    outcome = subject.run(arrays)
    for place, sequence in enumerate(order):
        if sequence in subject.live:
            begin, end = arrays.input_row_offsets[place : place + 2]
            slot, expected = subject.slots[sequence], subject.outcome.out[subject.rows(sequence)]
            yield bitwise(outcome.out[int(begin) : int(end)], expected, f"{how}: out of sequence {sequence}")
            window = subject.outcome.conv_state[slot]
            yield bitwise(outcome.conv_state[slot], window, f"{how}: window of sequence {sequence}")


def _select(subject: Conv1dSubject, order: Sequence[int], parts: Sequence[tuple[int, int]]) -> Conv1dArrays:
    """The call with these sequences in this order, of each the tokens [begin, end)."""
    arrays = subject.arrays
    starts = [subject.rows(sequence).start for sequence in order]
    rows = [np.arange(start + begin, start + end) for start, (begin, end) in zip(starts, parts, strict=True)]
    offsets = np.cumsum([0, *(end - begin for begin, end in parts)])
    return replace(
        arrays,
        qkv=arrays.qkv[np.concatenate([np.zeros(0, np.int64), *rows])],
        slot_idx=arrays.slot_idx[list(order)],
        input_row_offsets=offsets.astype(arrays.input_row_offsets.dtype),
    )


def splits(subject: Conv1dSubject) -> Iterator[Comparison]:
    """E4: where windows hold inputs without rounding, calls that share the tokens out equal one call."""
    if not subject.case.state_is_exact or not subject.live.size:
        return
    everyone = range(len(subject.lengths))
    arrays, out, done = subject.arrays, np.zeros_like(subject.outcome.out), np.zeros_like(subject.lengths)
    for until in (np.minimum(subject.lengths, 1), subject.lengths // 2, subject.lengths):
        parts = [(int(begin), int(max(begin, end))) for begin, end in zip(done, until, strict=True)]
        piece = _select(subject, everyone, parts)
        outcome = subject.run(replace(piece, conv_state=arrays.conv_state))
        arrays = replace(arrays, conv_state=outcome.conv_state)
        for sequence in subject.live:
            start = subject.rows(sequence).start
            begin, end = piece.input_row_offsets[sequence : sequence + 2]
            out[start + parts[sequence][0] : start + parts[sequence][1]] = outcome.out[int(begin) : int(end)]
        done = np.maximum(done, until)
    yield bitwise(out, subject.outcome.out, "split: out")
    yield bitwise(arrays.conv_state, subject.outcome.conv_state, "split: windows")


def repeats(subject: Conv1dSubject) -> Iterator[Comparison]:
    """E5: the same call again gives the same bits, and so does the same call on dense arrays."""
    yield from _same_outcome(subject, subject.run(subject.arrays), "again")
    if set(layouts_of(subject.case).values()) != {"dense"}:
        dense = convolve(subject.case, subject.backend, subject.arrays, layouts=_DENSE)
        yield from _same_outcome(subject, dense, "dense arrays")


def channel_splits(subject: Conv1dSubject) -> Iterator[Comparison]:
    """E7: two calls on some of the channels each give the bits of one call on all."""
    cut = subject.case.conv_dim // 2 + 1  # so that a thread takes one channel where it took several
    if cut >= subject.case.conv_dim or not subject.case.total_seq_len:
        return
    outcomes = [subject.run(_channels(subject.arrays, part)) for part in (slice(0, cut), slice(cut, None))]
    out = np.concatenate([outcome.out for outcome in outcomes], axis=1)
    pool = np.concatenate([outcome.conv_state for outcome in outcomes], axis=1)
    yield from _same_outcome(subject, Conv1dOutcome(out, pool, kept=()), "some channels")


def _channels(arrays: Conv1dArrays, part: slice) -> Conv1dArrays:
    """The call on these channels alone."""
    bias = None if arrays.bias is None else arrays.bias[part]
    weight, pool = arrays.conv_weight[part], arrays.conv_state[:, part]
    return replace(arrays, qkv=arrays.qkv[:, part], conv_weight=weight, conv_state=pool, bias=bias)


def rounded_readout(subject: Conv1dSubject) -> Iterator[Comparison]:
    """The outputs in float32, rounded once, are those in the work type."""
    case = subject.case
    if case.work_dtype == "float32" or not subject.live.size:
        return
    wide, narrow = (
        convolve(replace(case, out_dtype=name), subject.backend, subject.arrays).out
        for name in ("float32", case.work_dtype)
    )
    yield bitwise(wide.astype(narrow.dtype), narrow, "float32 out, rounded")


def kept_windows(subject: Conv1dSubject) -> Iterator[Comparison]:
    """Without write_state the outputs are the same and the pool keeps every byte."""
    outcome = subject.run(subject.arrays, write_state=False)
    if outcome.out.size:
        yield bitwise(outcome.out, subject.outcome.out, "without write_state: out")
    yield same_bytes(outcome.conv_state, subject.arrays.conv_state, "without write_state: pool")
    yield from (comparison for comparison in outcome.kept if not comparison.passed)


def commits(subject: Conv1dSubject) -> Iterator[Comparison]:
    """A commit of n tokens leaves what a call over the first n leaves, for n from 0 to all and above."""
    for number, counts in enumerate(tables_of_counts(subject.lengths)):
        taken = np.minimum(counts, subject.lengths)
        plain = subject.run(_select(subject, range(len(taken)), [(0, int(n)) for n in taken]))
        # More than there are is also said with the largest number, -1 as int32.
        told = np.where((counts > subject.lengths) & (number % 2 == 0), 0xFFFFFFFF, counts).astype(np.uint32)
        pool, kept = commit(subject, subject.arrays.conv_state, told.view(subject.arrays.slot_idx.dtype))
        yield same_bytes(pool, plain.conv_state, f"commit of {_few(counts)} tokens")
        yield from _others_kept(subject, pool, np.flatnonzero((taken > 0) & (subject.slots != PAD_SLOT)))
        yield from (comparison for comparison in kept if not comparison.passed)


def tables_of_counts(lengths: Array) -> Iterator[Array]:
    """Counts for each sequence, in turn all from 0 to one above its length; in long ones those at either end."""
    shorter = np.minimum(lengths, _ALL_COUNTS_OF)
    for first in range(int(shorter.max()) + 2 if len(lengths) else 0):
        count = (np.arange(len(lengths)) + first) % (shorter + 2)
        yield np.where(count <= shorter // 2, count, lengths - shorter + count)


def _few(counts: Array) -> str:
    return ",".join(map(str, counts[:6])) + (",..." if len(counts) > 6 else "")


def _same_outcome(subject: Conv1dSubject, outcome: Conv1dOutcome, how: str) -> Iterator[Comparison]:
    if subject.outcome.out.size:
        yield bitwise(outcome.out, subject.outcome.out, f"{how}: out")
    yield bitwise(outcome.conv_state, subject.outcome.conv_state, f"{how}: windows")


_Check = Callable[[Conv1dSubject], Iterator[Comparison]]

CONV1D_CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "untouched": untouched,
    "kept": kept_windows,
    "commit": commits,
    "rounded": rounded_readout,
    "E3": batch_independence,
    "E4": splits,
    "E5": repeats,
    "E7": channel_splits,
}
