"""Cases x backends x checks -> results. Nothing is printed here; `gdn verify` renders what this yields."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from threading import Event

from gdn.testing.cases import build_arrays
from gdn.testing.catalogue import Case
from gdn.testing.checks import checks_of, reference_of, subject
from gdn.testing.compare import Comparison
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.pending_steps import build_pending_arrays, pending_subject
from gdn.testing.ring_cases import RingCase, build_ring_arrays
from gdn.testing.ring_checks import RING_CHECKS, ring_subject


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

    case: Case
    backend: str
    checks: tuple[CheckResult, ...]
    error: str | None
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether the case ran, compared something, and every check passed."""
        return self.error is None and bool(self.checks) and all(check.passed for check in self.checks)


def run_sweep(cases: Sequence[Case], backends: Sequence[str], *, workers: int = 1) -> Generator[CaseResult, None, None]:
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


def _prepare(case: Case) -> Callable[[str], _Comparisons]:
    """Make the arrays that all backends share; returns what runs the case's checks on a backend."""
    if isinstance(case, RingCase):
        ring_arrays = build_ring_arrays(case)
        pending_arrays = build_pending_arrays(case) if case.num_pending else None

        def on_backend(backend: str) -> _Comparisons:
            under_test = ring_subject(case, backend, ring_arrays)
            yield from ((name, check(under_test)) for name, check in RING_CHECKS.items())
            if pending_arrays is not None and case.checks_pending(backend):
                steps = pending_subject(case, backend, pending_arrays)
                yield from ((name, check(steps)) for name, check in PENDING_CHECKS.items())

    else:
        arrays = build_arrays(case)
        reference = reference_of(arrays)

        def on_backend(backend: str) -> _Comparisons:
            under_test = subject(case, backend, arrays, reference)
            yield from ((name, check(under_test)) for name, check in checks_of(case).items())

    return on_backend


def _run_case(case: Case, backends: Sequence[str], abandoned: Event) -> list[CaseResult]:
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
