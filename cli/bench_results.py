"""What `gdn bench` shows: head, table, verdict, and the comparison with a saved run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date

import gdn
from gdn.bench.measure import Row, Timing
from gdn.cli import report
from gdn.cli.bench_run import BenchRun
from gdn.cli.names import joined
from gdn.cli.report import Column

#: The bandwidth that a regime is held against.
_CEILING_NAMES = {"verify": "read", "lazy": "read", "step": "both"}


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
    for length in run.too_short:
        yield f"lazy loops in a ring of {length} are not timed: it holds no window of {run.options.window}"
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
            verdict = ("FAILED ", "bold red") if row.failed else ("not timed ", "yellow")
            what = f"{row.case.regime} {row.case.call.name} {_types(row)} by {row.by}"
            report.print_indented(console, what, indent=0, verdict=verdict)
            report.print_indented(console, row.problem)
    report.print_verdict(console, summary(run), passed=run.exit_code == 0)


def _table(run: BenchRun) -> Iterator[tuple[Column, list[str]]]:
    """Each column with its cells, in order; those that no row would fill are left out."""
    timed = run.timed
    yield Column("regime"), [row.case.regime for row, _ in timed]
    if any(row.case.is_chunked for row, _ in timed):
        yield Column("algorithm"), [row.case.algorithm or "-" for row, _ in timed]
    yield Column("shape"), [row.case.call.name for row, _ in timed]
    yield Column("work/pool", min_width=72), [_types(row) for row, _ in timed]
    yield Column("by"), [row.by for row, _ in timed]
    yield Column("us", right=True), [f"{timing.us.median_us:.1f}" for _, timing in timed]
    yield (
        Column("p10-p90", right=True, min_width=88),
        [f"{timing.us.p10_us:.1f}-{timing.us.p90_us:.1f}" for _, timing in timed],
    )
    yield Column("MB", right=True, min_width=96), [f"{row.num_bytes / 1e6:.2f}" for row, _ in timed]
    yield Column("GB/s", right=True, min_width=48), [f"{timing.gb_per_s:.3g}" for _, timing in timed]
    yield Column("% of", right=True), [_percent(row, timing) for row, timing in timed]
    if any(timing.tokens_per_s for _, timing in timed):
        yield Column("tokens/s", right=True, min_width=104), [_count(timing.tokens_per_s) for _, timing in timed]
        yield Column("GFLOP/s", right=True, min_width=112), [_count(timing.gflop_per_s) for _, timing in timed]
    if run.baseline is not None:
        ratios = [run.ratio(row) for row, _ in timed]
        yield Column("ratio", right=True), ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
    notes = [_note(run, row, timing) for row, timing in timed]
    if any(notes):
        yield Column("note", min_width=120), notes


def _types(row: Row) -> str:
    return row.case.call.types()


def _percent(row: Row, timing: Timing) -> str:
    name = "both" if row.case.loop else _CEILING_NAMES.get(row.case.regime, "copy")
    return f"{timing.percent:.1f} {name}"


def _count(number: float | None) -> str:
    if number is None:
        return "-"
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _note(run: BenchRun, row: Row, timing: Timing) -> str:
    parts = []
    faster = run.speedup(row)
    if faster is not None:
        parts.append(f"{faster[1]:.2f}x {faster[0]}")
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
