"""What the gates must satisfy: the oracle, hands kept off everything else, and promises by equality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from gdn import ops, oracle
from gdn.testing.buffers import Array
from gdn.testing.compare import FLOAT32_TOLERANCE, Comparison, bitwise, close
from gdn.testing.gates_cases import GatesArrays, GatesCase
from gdn.testing.watched import run_watched


@dataclass(frozen=True, slots=True)
class Gates:
    """What a call left: dense copies of its results, and whether it kept its hands off everything else."""

    decay: Array
    beta: Array
    kept: tuple[Comparison, ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class GatesSubject:
    """One case on one backend: its arrays, and what its call left."""

    case: GatesCase
    backend: str
    arrays: GatesArrays
    gates: Gates


def gates_subject(case: GatesCase, backend: str, arrays: GatesArrays) -> GatesSubject:
    """Run the call of a case on a backend."""
    layouts = {
        **dict.fromkeys(("a", "b"), case.token_layout),
        **dict.fromkeys(("A_log", "dt_bias"), case.head_layout),
        **dict.fromkeys(("decay", "beta"), case.out_layout),
    }
    return GatesSubject(case, backend, arrays, _compute(case, backend, arrays, layouts))


def _compute(case: GatesCase, backend: str, arrays: GatesArrays, layouts: dict[str, str]) -> Gates:
    """Run `gated_delta_gates` on copies of `arrays` with NaN-filled results."""
    given = {name: getattr(arrays, name) for name in ("a", "b", "A_log", "dt_bias")}
    given |= {name: np.full(arrays.a.shape, np.nan, np.float32) for name in ("decay", "beta")}
    results, kept = run_watched(
        backend,
        lambda decay, beta, **four: ops.gated_delta_gates(
            **four, allow_neg_eigval=case.allow_neg_eigval, out=(decay, beta)
        ),
        given,
        ("decay", "beta"),
        layouts,
    )
    return Gates(results["decay"], results["beta"], kept)


def against_oracle(subject: GatesSubject) -> Iterator[Comparison]:
    """Decay and beta within tolerance of the float64 oracle."""
    arrays, gates = subject.arrays, subject.gates
    decay, beta = oracle.gated_delta_gates(
        arrays.a, arrays.b, arrays.A_log, arrays.dt_bias, allow_neg_eigval=subject.case.allow_neg_eigval
    )
    yield close(gates.decay, decay, FLOAT32_TOLERANCE, "decay")
    yield close(gates.beta, beta, FLOAT32_TOLERANCE, "beta")


def untouched(subject: GatesSubject) -> Iterator[Comparison]:
    """Inputs, and the memory around the results, keep their bytes."""
    yield from subject.gates.kept


def independence(subject: GatesSubject) -> Iterator[Comparison]:
    """E3: tokens give the same bits alone, in another order, and beside tokens of NaN."""
    arrays, num_tokens = subject.arrays, subject.case.num_tokens
    order = np.random.default_rng(0).permutation(num_tokens)
    for how, rows in (
        ("first alone", np.arange(1)),
        ("last alone", np.arange(num_tokens - 1, num_tokens)),
        ("some", np.arange(num_tokens // 3, num_tokens)),
        ("shuffled", order),
    ):
        yield from _same(subject, replace(arrays, a=arrays.a[rows], b=arrays.b[rows]), (rows, slice(None)), how)
    a, b = arrays.a.copy(), arrays.b.copy()
    a[num_tokens // 2, 0] = b[num_tokens // 2, 0] = np.nan
    others = np.ones(a.shape, bool)
    others[num_tokens // 2, 0] = False
    if others.any():
        gates = _compute(subject.case, subject.backend, replace(arrays, a=a, b=b), {})
        yield bitwise(gates.decay[others], subject.gates.decay[others], "NaN elsewhere: decay")
        yield bitwise(gates.beta[others], subject.gates.beta[others], "NaN elsewhere: beta")


def repeats(subject: GatesSubject) -> Iterator[Comparison]:
    """E5: the same call again, on dense arrays, gives the same bits."""
    yield from _same(subject, subject.arrays, (slice(None), slice(None)), "again")


def head_splits(subject: GatesSubject) -> Iterator[Comparison]:
    """E7: two calls on half of the heads each give the bits of one call on all heads."""
    arrays, cut = subject.arrays, subject.case.num_value_heads // 2
    if not cut:
        return
    for heads in (slice(0, cut), slice(cut, None)):
        part = GatesArrays(arrays.a[:, heads], arrays.b[:, heads], arrays.A_log[heads], arrays.dt_bias[heads])
        yield from _same(subject, part, (slice(None), heads), "half the heads")


def doubled(subject: GatesSubject) -> Iterator[Comparison]:
    """With allow_neg_eigval beta is exactly twice what it is without, and decay the same."""
    other = replace(subject.case, allow_neg_eigval=not subject.case.allow_neg_eigval)
    gates = _compute(other, subject.backend, subject.arrays, {})
    wide, plain = (subject.gates, gates) if subject.case.allow_neg_eigval else (gates, subject.gates)
    yield bitwise(wide.decay, plain.decay, "decay")
    yield bitwise(wide.beta, 2 * plain.beta, "beta")


def _same(
    subject: GatesSubject, arrays: GatesArrays, part: tuple[Array | slice, slice], how: str
) -> Iterator[Comparison]:
    """A call on these arrays, densely laid out, leaves this part of what the call under test left."""
    gates = _compute(subject.case, subject.backend, arrays, {})
    yield bitwise(gates.decay, subject.gates.decay[part], f"{how}: decay")
    yield bitwise(gates.beta, subject.gates.beta[part], f"{how}: beta")


_Check = Callable[[GatesSubject], Iterator[Comparison]]

GATES_CHECKS: dict[str, _Check] = {
    "oracle": against_oracle,
    "untouched": untouched,
    "doubled": doubled,
    "E3": independence,
    "E5": repeats,
    "E7": head_splits,
}
