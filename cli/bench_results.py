"""What `gdn bench` has to show: head, table, verdict, the same as JSON, and the comparison with a saved run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import click
from rich.text import Text

import gdn
from gdn.bench.cases import BenchCase, CaseOptions
from gdn.bench.measure import Overhead, Row, Timing
from gdn.bench.traffic import Ceilings
from gdn.cli import report
from gdn.cli.names import joined
from gdn.cli.report import Column

#: The bandwidth that a regime is held against.
_CEILING_NAMES = {"verify": "read", "lazy": "read", "step": "both"}


@dataclass(slots=True)
class BenchRun:
    """What is timed and what came of it so far.

    repeats: None for the machine's own number. absent_peers: packages that cannot be timed, with the reason. baseline:
    a saved run. overhead: Python's part of a call, by op.
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


# ---- Showing ----


def show_head(run: BenchRun) -> None:
    """Print what is timed, on what, and how."""
    console = report.output()
    for line in _head_lines(run):
        report.print_indented(console, line, indent=0)
    console.print()


def _head_lines(run: BenchRun) -> Iterator[str]:
    yield f"gdn {gdn.__version__}: timing {joined(run.backends, 'and')}, {date.today().isoformat()}"
    if "cuda" not in run.backends:
        yield "No GPU is timed: numpy and host compute on the CPU, and are there to check, not to be fast."
    for name, reason in run.unavailable.items():
        yield f"{name} cannot run here: {reason}"
    for name, reason in run.absent_peers.items():
        yield f"{name} is not timed: {reason}"
    yield "; ".join(f"{name} {value}" for name, value in run.facts.items())
    for backend, ceilings in run.ceilings.items():
        if backend == run.backends[0] or backend == "cuda":
            copy, read = ceilings.copy_gb_s, ceilings.read_gb_s
            yield f"measured here: copy {copy:.0f} GB/s (read + written), read {read:.0f} GB/s"
    yield f"{heads_in_words(run)}; slots {run.options.slots}; {'cold' if run.options.cold else 'warm'} inputs"
    if run.baseline is not None:
        yield f"ratio: time over that of {run.baseline.title}"


def heads_in_words(run: BenchRun) -> str:
    """The heads that cases have unless they are named ones."""
    heads = run.options.heads
    return f"{heads.num_key_heads},{heads.num_value_heads} heads of {heads.key_head_dim},{heads.value_head_dim}"


def show_results(run: BenchRun) -> None:
    """Print the table, Python's part of a call, what went wrong, and the summary."""
    console = report.output()
    if run.timed:
        columns, cells = zip(*_table(run), strict=True)
        report.print_table(console, columns, list(zip(*cells, strict=True)))
        console.print()
    if run.overhead:
        parts = ", ".join(f"{op} {part.op_us:.1f} us (bound {part.bound_us:.1f})" for op, part in run.overhead.items())
        report.print_indented(console, f"Python's part of one call with out given: {parts}", indent=0)
    for row in run.rows:
        if row.problem is not None:
            verdict = ("FAILED", "bold red") if row.failed else ("not timed", "yellow")
            console.print(Text.assemble(verdict, f" {row.case.regime} {row.case.call.name} {_types(row)} by {row.by}"))
            report.print_indented(console, row.problem)
    console.print(summary(run), style="bold green" if run.exit_code == 0 else "bold red")


def _table(run: BenchRun) -> Iterator[tuple[Column, list[str]]]:
    """Each column with its cells, in order; those that no row would fill are left out."""
    timed = run.timed
    yield Column("regime"), [row.case.regime for row, _ in timed]
    yield Column("shape"), [row.case.call.name for row, _ in timed]
    yield Column("work/pool", min_width=72), [_types(row) for row, _ in timed]
    yield Column("by"), [row.by for row, _ in timed]
    yield Column("us", right=True), [f"{timing.us.median_us:.1f}" for _, timing in timed]
    yield (
        Column("p10-p90", right=True, min_width=88),
        [f"{timing.us.p10_us:.1f}-{timing.us.p90_us:.1f}" for _, timing in timed],
    )
    yield Column("MB", right=True, min_width=96), [f"{row.num_bytes / 1e6:.2f}" for row, _ in timed]
    yield Column("GB/s", right=True), [f"{timing.gb_per_s:.3g}" for _, timing in timed]
    yield Column("% of", right=True), [_percent(row, timing) for row, timing in timed]
    if any(timing.tokens_per_s for _, timing in timed):
        yield Column("tokens/s", right=True, min_width=104), [_count(timing.tokens_per_s) for _, timing in timed]
        yield Column("GFLOP/s", right=True, min_width=112), [_count(timing.gflop_per_s) for _, timing in timed]
    if run.baseline is not None:
        ratios = [run.ratio(row) for row, _ in timed]
        yield Column("ratio", right=True), ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    notes = [_note(row, timing) for row, timing in timed]
    if any(notes):
        yield Column("note", min_width=120), notes


def _types(row: Row) -> str:
    return row.case.call.types()


def _percent(row: Row, timing: Timing) -> str:
    return f"{timing.percent:.1f} {_CEILING_NAMES.get(row.case.regime, 'copy')}"


def _count(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _note(row: Row, timing: Timing) -> str:
    parts = []
    if timing.parts_us:
        alone = " + ".join(f"{part} {us:.1f}" for part, us in timing.parts_us.items())
        parts.append(f"{alone} = {sum(timing.parts_us.values()):.1f}")
    if row.case.cold and not row.is_cold:
        parts.append("rotation smaller than the cache")
    return "; ".join(parts)


def summary(run: BenchRun) -> str:
    """One line: verdict, and how many cases were timed."""
    parts = []
    if run.interrupted:
        parts.append("INTERRUPTED")
    if run.failed:
        parts.append(f"{len(run.failed)} FAILED")
    if run.slower:
        rows = ", ".join(f"{row.case.regime} {row.case.call.name} by {row.by}" for row in run.slower)
        parts.append(f"{len(run.slower)} SLOWER than {run.fail_above:g} times before ({rows})")
    elif run.is_incomparable:
        parts.append("FAILED: no row of the saved run to compare with")
    if not run.timed:
        parts.append("nothing was timed")
    left_out = f" ({run.num_left_out} not reached)" if run.num_left_out else ""
    rows = "1 row" if len(run.timed) == 1 else f"{len(run.timed)} rows"
    return f"{', '.join(parts) or 'all right'}: {rows} timed, each after its check{left_out}"


# ---- JSON ----


def as_document(run: BenchRun) -> dict[str, Any]:
    """The run for machines, and for --compare."""
    return {
        "gdn": gdn.__version__,
        "date": date.today().isoformat(),
        "machine": run.facts,
        "ceilings_gb_s": {
            backend: {"copy": ceilings.copy_gb_s, "read": ceilings.read_gb_s}
            for backend, ceilings in run.ceilings.items()
        },
        "passed": run.exit_code == 0,
        "interrupted": run.interrupted,
        "backends": list(run.backends),
        "unavailable_backends": run.unavailable,
        "absent_peers": run.absent_peers,
        "python_overhead_us": {op: overhead.op_us for op, overhead in run.overhead.items()},
        "bound_overhead_us": {op: overhead.bound_us for op, overhead in run.overhead.items()},
        "compared_with": None if run.baseline is None else run.baseline.title,
        "fail_above": run.fail_above,
        "rows": [_row_document(run, row) for row in run.rows],
    }


def _row_document(run: BenchRun, row: Row) -> dict[str, Any]:
    heads, call, timing = row.case.heads, row.case.call, row.timing
    return {
        "key": row.key,
        "by": row.by,
        "regime": row.case.regime,
        "shape": call.name,
        "heads": [heads.num_key_heads, heads.num_value_heads],
        "head_dims": [heads.key_head_dim, heads.value_head_dim],
        "batch": row.case.batch_size,
        "work_dtype": call.work_dtype,
        "state_dtype": call.state_dtype,
        "slots": row.case.slots,
        "cold": row.is_cold,
        "num_sets": row.num_sets,
        "checked": row.checked,
        "failed": row.failed,
        "problem": row.problem,
        "bytes": row.num_bytes,
        "us": timing and timing.us.median_us,
        "p10_us": timing and timing.us.p10_us,
        "p90_us": timing and timing.us.p90_us,
        "num_samples": timing and timing.us.num_samples,
        "parts_us": timing and timing.parts_us,
        "gb_per_s": timing and timing.gb_per_s,
        "attainable_us": timing and timing.attainable_us,
        "percent": timing and timing.percent,
        "tokens_per_s": timing and timing.tokens_per_s,
        "gflop_per_s": timing and timing.gflop_per_s,
        "ratio": run.ratio(row),
    }
