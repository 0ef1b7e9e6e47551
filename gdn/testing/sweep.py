"""Cases x backends x checks -> results. Nothing is printed here; `gdn verify` renders what this yields."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event
from typing import TypeVar

from gdn.testing.cases import build_arrays
from gdn.testing.catalogue import SweepCase
from gdn.testing.checks import checks_of, reference_of, subject
from gdn.testing.chunked_cases import ChunkedCase
from gdn.testing.chunked_checks import chunked_checks_of, chunked_subject
from gdn.testing.compare import Comparison
from gdn.testing.conv1d_cases import Conv1dCase, build_conv1d_arrays
from gdn.testing.conv1d_checks import CONV1D_CHECKS, conv1d_subject, reference_of_conv1d
from gdn.testing.gates_cases import GatesCase, build_gates_arrays
from gdn.testing.gates_checks import GATES_CHECKS, gates_subject
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.pending_steps import build_pending_arrays, pending_subject
from gdn.testing.ring_cases import RingCase, build_ring_arrays
from gdn.testing.ring_checks import RING_CHECKS, ring_subject
from gdn.testing.steps_cases import StepsCase, build_steps_arrays
from gdn.testing.steps_checks import STEPS_CHECKS, steps_subject

_Subject = TypeVar("_Subject")


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check of one case found. `worst` is its first failed comparison, else the one with most error."""

    check: str
    num_comparisons: int
    worst: Comparison
    failures: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Whether every comparison of the check passed."""
        return not self.failures


@dataclass(frozen=True, slots=True)
class CaseResult:
    """All checks of one case on one backend. `error` is what kept the case from running, if anything did."""

    case: SweepCase
    backend: str
    checks: tuple[CheckResult, ...]
    error: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the case ran, compared something, and every check passed."""
        return self.error is None and bool(self.checks) and all(check.passed for check in self.checks)


def run_sweep(
    cases: Sequence[SweepCase], backends: Sequence[str], *, workers: int = 1
) -> Generator[CaseResult, None, None]:
    """Run every check of every case on every backend; results come in the order of cases, then backends.

    A case's arrays and reference are made once. With several workers cases run side by side, which changes
    nothing but the time. Leaving the iteration early abandons the cases that have not begun, and those that
    have after the check they are at.

    Args:
        cases: what to run, in order.
        backends: names out of `gdn.available_backends()`.
        workers: threads that run cases.
    """
    abandoned = Event()
    with ThreadPoolExecutor(workers) as pool:
        runs = [pool.submit(copy_context().run, _run_case, case, backends, abandoned) for case in cases]
        try:
            for run in runs:
                yield from run.result()
        finally:
            abandoned.set()
            pool.shutdown(wait=False, cancel_futures=True)


#: Comparisons of a case on one backend by the name of their check, made as they are asked for.
_Comparisons = Iterator[tuple[str, Iterator[Comparison]]]


#: What runs a case's checks on a backend.
_OnBackend = Callable[[str], _Comparisons]


def _prepare(case: SweepCase) -> _OnBackend:
    """Make the arrays that all backends share; returns what runs the case's checks on a backend."""
    if isinstance(case, RingCase):
        return _prepare_ring(case)
    if isinstance(case, Conv1dCase):
        return _prepare_conv1d(case)
    if isinstance(case, GatesCase):
        gates_arrays = build_gates_arrays(case)
        return lambda backend: _named(GATES_CHECKS, gates_subject(case, backend, gates_arrays))
    if isinstance(case, StepsCase):
        steps_arrays = build_steps_arrays(case)
        return lambda backend: _named(STEPS_CHECKS, steps_subject(case, backend, steps_arrays))
    arrays = build_arrays(case)
    reference = reference_of(arrays)
    if isinstance(case, ChunkedCase):
        return lambda backend: _named(chunked_checks_of(case), chunked_subject(case, backend, arrays, reference))
    return lambda backend: _named(checks_of(case), subject(case, backend, arrays, reference))


def _prepare_ring(case: RingCase) -> _OnBackend:
    ring_arrays = build_ring_arrays(case)
    pending_arrays = build_pending_arrays(case) if case.num_pending else None

    def on_backend(backend: str) -> _Comparisons:
        yield from _named(RING_CHECKS, ring_subject(case, backend, ring_arrays))
        if pending_arrays is not None and case.checks_pending(backend):
            yield from _named(PENDING_CHECKS, pending_subject(case, backend, pending_arrays))

    return on_backend


def _prepare_conv1d(case: Conv1dCase) -> _OnBackend:
    arrays = build_conv1d_arrays(case)
    reference = reference_of_conv1d(case, arrays)
    return lambda backend: _named(CONV1D_CHECKS, conv1d_subject(case, backend, arrays, reference))


def _named(checks: Mapping[str, Callable[[_Subject], Iterator[Comparison]]], under_test: _Subject) -> _Comparisons:
    """These checks of a subject."""
    return ((name, check(under_test)) for name, check in checks.items())


def _run_case(case: SweepCase, backends: Sequence[str], abandoned: Event) -> list[CaseResult]:
    try:
        on_backend = _prepare(case)
    except Exception as refusal:  # a case that cannot even be made must not take the others with it
        return [CaseResult(case, backend, (), _in_words(refusal), 0.0) for backend in backends]
    results: list[CaseResult] = []
    for backend in backends:
        start = time.perf_counter()
        checks: list[CheckResult] = []
        error = None
        try:
            for check in _run_checks(on_backend(backend)):
                checks.append(check)
                if abandoned.is_set():
                    return results
        except Exception as refusal:  # whatever it was, a case that cannot run has failed
            error = _in_words(refusal)
        results.append(CaseResult(case, backend, tuple(checks), error, time.perf_counter() - start))
    return results


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _run_checks(named: _Comparisons) -> Iterator[CheckResult]:
    """The checks that have something to compare in this case."""
    for name, check in named:
        comparisons = list(check)
        if comparisons:
            failed = [comparison for comparison in comparisons if not comparison.passed]
            worst = failed[0] if failed else max(comparisons, key=lambda comparison: comparison.worst_error)
            yield CheckResult(name, len(comparisons), worst, tuple(comparison.message for comparison in failed))
