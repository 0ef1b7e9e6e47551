"""What `gdn verify` has to show: the run, its verdict, the table, the failures, the same as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from rich.text import Text

import gdn
from gdn.cli import report
from gdn.cli.names import joined
from gdn.cli.report import Column
from gdn.testing.catalogue import SweepCase, random_case_numbers
from gdn.testing.conv1d_cases import Conv1dCase
from gdn.testing.gates_cases import GatesCase
from gdn.testing.steps_cases import StepsCase
from gdn.testing.sweep import CaseResult, CheckResult

_SHOWN_FAILURES = 2  # messages of one check
_SHOWN_LENGTH = 600  # characters of one message
_SHOWN_ERROR_LINES = 3

_COLUMNS = (
    Column("case"),
    Column("backend"),
    Column("checks", min_width=104),
    Column("compared", right=True, min_width=80),
    Column("error", right=True, min_width=60),
    Column("worst at", min_width=72),
    Column("verdict"),
)


@dataclass(slots=True)
class Run:
    """What is run and what came of it so far.

    unavailable: why other backends cannot run here. random_options: the options that shaped the random cases.
    command: how `gdn verify` was called, without options.
    """

    cases: Sequence[SweepCase]
    backends: Sequence[str]
    unavailable: dict[str, str]
    random_options: Sequence[str]
    command: str
    results: list[CaseResult] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False

    @property
    def failed(self) -> list[CaseResult]:
        """The results that are not right."""
        return [result for result in self.results if not result.passed]

    @property
    def num_left_out(self) -> int:
        """Results that are missing, after Ctrl-C or --fail-fast."""
        return len(self.cases) * len(self.backends) - len(self.results)

    @property
    def num_comparisons(self) -> int:
        """Comparisons of all results."""
        return sum(check.num_comparisons for result in self.results for check in result.checks)

    @property
    def exit_code(self) -> int:
        """0 only where something was compared, everything that was asked for was run, and all of it was right."""
        if self.interrupted:
            return 130
        return 0 if self.num_comparisons and not self.num_left_out and not self.failed else 1

    def reproduction(self, result: CaseResult) -> str:
        """The one command that runs this case on this backend again."""
        is_random = random_case_numbers(result.case.name) is not None
        options = self.random_options if is_random else ()
        words = ("--backend", result.backend, "--case", result.case.name, *options)
        return f"{self.command} {shlex.join(words)}"


def show_cases(cases: Sequence[SweepCase], as_json: bool) -> None:
    """Print the cases, a line each."""
    if as_json:
        report.print_json([asdict(case) for case in cases])
        return
    columns = (Column("case"), Column("description"))
    report.print_table(report.output(), columns, [(case.name, describe(case)) for case in cases], head=False)


def describe(case: SweepCase) -> str:
    """Sizes, lengths, types and inputs of a case."""
    parts = [*_sizes(case), case.types()]
    if isinstance(case, Conv1dCase) and case.activation:
        parts.append(case.activation)
    return "; ".join(parts if case.inputs == "model" else [*parts, case.inputs])


def _sizes(case: SweepCase) -> tuple[str, str]:
    """What a call is on, and how much of it."""
    if isinstance(case, GatesCase):
        return _count(case.num_value_heads, "head"), _count(case.num_tokens, "token")
    if isinstance(case, Conv1dCase):
        return f"{_count(case.conv_dim, 'channel')}, {case.conv_width} taps", _lengths(case.lengths)
    heads = case.heads
    text = f"{heads.num_key_heads},{heads.num_value_heads} heads of {heads.key_head_dim},{heads.value_head_dim}"
    if isinstance(case, StepsCase):
        return text, f"{_count(case.num_steps, 'step')} of {_count(case.num_rows, 'row')}"
    return text, _lengths(case.lengths)


def _lengths(lengths: tuple[int, ...]) -> str:
    """The lengths of a batch, equal neighbours as 3x17; of a long batch its size."""
    if not lengths:
        return "no sequences"
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    if len(runs) > 8:
        return f"{len(lengths)} sequences of {min(lengths)} to {max(lengths)}"
    return "lengths " + " ".join(f"{count}x{length}" if count > 1 else f"{length}" for length, count in runs)


def show_backends(run: Run) -> None:
    """Print which backends are checked, and why others are not."""
    console = report.output()
    what = f"gdn {gdn.__version__}: checking {joined(run.backends, 'and')} against the float64 oracle"
    report.print_indented(console, what, indent=0)
    for name, reason in run.unavailable.items():
        report.print_indented(console, f"{name} cannot run here: {reason}", indent=0)
    console.print()


def show_results(run: Run) -> None:
    """Print the table, the failures and the summary."""
    console = report.output()
    if run.results:
        report.print_table(console, _COLUMNS, [_row(result) for result in run.results])
        console.print()
    for result in run.failed:
        verdict = ("FAILED ", "bold red")
        report.print_indented(console, f"{result.case.name} on {result.backend}", indent=0, verdict=verdict)
        for line in _failure_lines(result):
            report.print_indented(console, line)
        report.print_command(console, "reproduce:", run.reproduction(result))
        console.print()
    report.print_verdict(console, summary(run), passed=run.exit_code == 0)


def _row(result: CaseResult) -> tuple[str | Text, ...]:
    worst = _worst(result)
    return (
        result.case.name,
        result.backend,
        _check_names(result.checks),
        str(sum(check.num_comparisons for check in result.checks)),
        _error(worst),
        _place(worst),
        Text("ok", "green") if result.passed else Text("FAILED", "bold red"),
    )


def _worst(result: CaseResult) -> CheckResult | None:
    """The first check that failed, else the one with the largest error."""
    failed = [check for check in result.checks if not check.passed]
    if failed:
        return failed[0]
    return max(result.checks, key=lambda check: check.worst.worst_error, default=None)


def _error(check: CheckResult | None) -> str:
    if check is None:
        return "-"
    return f"{check.worst.worst_error:.1e}" if check.worst.worst_error else "0"


def _place(check: CheckResult | None) -> str:
    """Where the worst error of a check is: readout[3,17] for the oracle's, E3[3,17] for one with more arrays."""
    if check is None or check.worst.worst_coordinate is None:
        return "-"
    array = check.worst.name if check.check in ("oracle", "pending") else check.check
    return f"{array}[{','.join(map(str, check.worst.worst_coordinate))}]"


def _check_names(checks: Sequence[CheckResult]) -> str:
    """The checks that compared something; a run of promises such as E3, E4, E5 as E3-E5."""
    names = [check.check for check in checks]
    promises = [name for name in names if name[1:].isdigit()]
    others = [name for name in names if name not in promises]
    if len(promises) > 2 and int(promises[-1][1:]) - int(promises[0][1:]) == len(promises) - 1:
        promises = [f"{promises[0]}-{promises[-1]}"]
    return " ".join((*others, *promises))


def _failure_lines(result: CaseResult) -> Iterator[str]:
    """What to tell of a failure: the first messages of each check, and the beginning of an error."""
    for check in result.checks:
        for message in check.failures[:_SHOWN_FAILURES]:
            yield f"{check.check}: {_beginning(message)}"
        if len(check.failures) > _SHOWN_FAILURES:
            yield f"{check.check}: and {len(check.failures) - _SHOWN_FAILURES} more"
    if result.error is not None:
        lines = result.error.splitlines()
        for line in lines[:_SHOWN_ERROR_LINES]:
            yield _beginning(line)
        if len(lines) > _SHOWN_ERROR_LINES:
            yield f"and {len(lines) - _SHOWN_ERROR_LINES} more lines (all of them with --json)"
    elif not result.checks:
        yield "nothing was compared"


def _beginning(message: str) -> str:
    return message if len(message) <= _SHOWN_LENGTH else message[: _SHOWN_LENGTH - 4] + " ..."


def summary(run: Run) -> str:
    """One line: verdict, cases, comparisons, backends, seconds."""
    num_failed = len(run.failed)
    if run.interrupted:
        verdict = "INTERRUPTED"
    elif not run.num_comparisons and not num_failed:
        verdict = "FAILED: nothing was compared"
    else:
        verdict = f"{num_failed} FAILED" if num_failed else "all right"
    left_out = f" ({run.num_left_out} not run)" if run.num_left_out else ""
    num_cases = len({result.case.name for result in run.results})
    return (
        f"{verdict}: {_count(num_cases, 'case')} on {joined(run.backends, 'and')}{left_out}, "
        f"{_count(run.num_comparisons, 'comparison')} in {run.seconds:.1f} s"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---- JSON ----


def as_document(run: Run) -> dict[str, Any]:
    """The run for machines."""
    return {
        "gdn": gdn.__version__,
        "passed": run.exit_code == 0,
        "interrupted": run.interrupted,
        "backends": list(run.backends),
        "unavailable_backends": run.unavailable,
        "num_cases": len(run.cases),
        "num_comparisons": run.num_comparisons,
        "num_failed": len(run.failed),
        "seconds": round(run.seconds, 3),
        "results": [_result_document(run, result) for result in run.results],
    }


def _result_document(run: Run, result: CaseResult) -> dict[str, Any]:
    return {
        "case": result.case.name,
        "backend": result.backend,
        "passed": result.passed,
        "error": result.error,
        "seconds": round(result.seconds, 3),
        "description": describe(result.case),
        "reproduce": run.reproduction(result),
        "checks": [
            {
                "check": check.check,
                "passed": check.passed,
                "num_comparisons": check.num_comparisons,
                "worst": asdict(check.worst),
                "failures": check.failures,
            }
            for check in result.checks
        ],
    }
