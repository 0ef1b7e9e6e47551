"""A run of `gdn bench`: what is timed and what came of it, and the saved run that it is compared with."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import click

from gdn.bench.cases import BenchCase, CaseOptions
from gdn.bench.measure import Overhead, Row, Timing
from gdn.bench.traffic import Ceilings


@dataclass(slots=True)
class BenchRun:
    """What is timed and what came of it so far.

    repeats: None for the machine's own number. absent_peers: packages that cannot be timed, with the reason. baseline:
    a saved run. overhead: Python's part of a call, by op. too_short: lengths of rings that lazy loops do without.
    """

    cases: Sequence[BenchCase]
    backends: Sequence[str]
    unavailable: dict[str, str]
    options: CaseOptions
    repeats: int | None = None
    absent_peers: dict[str, str] = field(default_factory=dict)
    baseline: Baseline | None = None
    fail_above: float | None = None
    facts: dict[str, str] = field(default_factory=dict)
    ceilings: dict[str, Ceilings] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    overhead: dict[str, Overhead] = field(default_factory=dict)
    interrupted: bool = False
    too_short: tuple[int, ...] = ()

    @property
    def num_left_out(self) -> int:
        """Cases that were not reached before Ctrl-C."""
        return len(self.cases) * len(self.backends) - sum(row.by in self.backends for row in self.rows)

    @property
    def failed(self) -> list[Row]:
        """Rows whose check failed."""
        return [row for row in self.rows if row.failed]

    @property
    def timed(self) -> list[tuple[Row, Timing]]:
        """Rows that have a time, with it."""
        return [(row, row.timing) for row in self.rows if row.timing is not None]

    def ratio(self, row: Row) -> float | None:
        """The row's time over that of the saved run, where both have one."""
        if self.baseline is None or row.timing is None:
            return None
        before = self.baseline.us.get(row.key)
        return row.timing.us.median_us / before if before else None

    def speedup(self, row: Row) -> tuple[str, float] | None:
        """What a loop is held against, and how many times its speed it has: decode plainly, or the form "separate"."""
        loop = row.case.loop
        if loop is None or row.timing is None:
            return None
        is_decode = row.case.regime == "decode"
        wanted = (row.by, *_kind(row.case), None if is_decode else replace(loop, form="separate"))
        for other, timing in self.timed:
            if other is not row and (other.by, *_kind(other.case), other.case.loop) == wanted:
                return ("plain" if is_decode else "separate"), timing.us.median_us / row.timing.us.median_us
        return None

    @property
    def slower(self) -> list[Row]:
        """Rows beyond the ratio that is allowed."""
        limit = self.fail_above
        return [row for row in self.rows if limit is not None and (self.ratio(row) or 0) > limit]

    @property
    def is_incomparable(self) -> bool:
        """Whether a limit is set and no row has a ratio to hold against it."""
        return self.fail_above is not None and all(self.ratio(row) is None for row in self.rows)

    @property
    def exit_code(self) -> int:
        """0 only where something was timed, every check passed and no row is beyond the limit."""
        if self.interrupted:
            return 130
        return 1 if self.failed or self.slower or self.is_incomparable or not self.timed else 0


def _kind(case: BenchCase) -> tuple[object, ...]:
    """What calls have in common that do the same by different means."""
    return case.regime, case.heads, case.call.lengths, case.call.types(), case.slots


@dataclass(frozen=True, slots=True)
class Baseline:
    """A saved run: where it is from, and medians by the key of their row."""

    title: str
    us: dict[str, float]


def load_baseline(path: Path) -> Baseline:
    """Read what --save wrote. Raises UsageError for another file."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        us = {str(row["key"]): float(row["us"]) for row in document["rows"] if row["us"] is not None}
        facts = ", ".join(str(value) for value in document["machine"].values())
        title = f"gdn {document['gdn']} of {document['date']} ({facts})"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise click.UsageError(
            f"{path} is not what gdn bench --save writes ({type(error).__name__}: {error})"
        ) from error
    return Baseline(title, us)
