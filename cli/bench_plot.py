"""The picture of `gdn bench --plot`: bandwidth achieved and attainable over batch size. The only user of matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from gdn.bench.cases import REGIMES
from gdn.bench.measure import Row, Timing
from gdn.cli.bench_results import heads_in_words
from gdn.cli.bench_run import BenchRun

_COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8e6bbf", "#c77d0a", "#555555")
_MARKERS = "osD^vP"
#: Regimes whose size is that of the rows, all together.
_BY_TOKENS = ("prefill", "conv", "gates")
_Points = list[tuple[Row, Timing]]


def endings() -> list[str]:
    """The endings of files that can be drawn."""
    return sorted(Figure().canvas.get_supported_filetypes())


def draw(run: BenchRun, path: Path) -> None:
    """Write the picture; its kind follows from the ending of `path`. A run that timed nothing leaves no picture."""
    panels = [(regime, points) for regime in REGIMES if (points := _of_regime(run, regime))]
    if not panels:
        return
    width = min(len(panels), 2)
    height = -(-len(panels) // width)
    figure = Figure(figsize=(6.4 * width, 4.2 * height), layout="constrained")
    axes = figure.subplots(height, width, squeeze=False).ravel()
    for axis, (regime, points) in zip(axes, panels, strict=False):
        _draw_panel(axis, regime, points)
    for axis in axes[len(panels) :]:
        axis.set_axis_off()
    machine = next(iter(run.facts.values()), "")
    figure.suptitle(f"{machine}\n{heads_in_words(run)}, slots {run.options.slots}", fontsize=10)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise click.ClickException(f"cannot write {path}: {error}") from error


def _of_regime(run: BenchRun, regime: str) -> _Points:
    return [(row, timing) for row, timing in run.timed if row.case.regime == regime]


def _draw_panel(axis: Axes, regime: str, points: _Points) -> None:
    """One line for each backend and type, and what is attainable, which differs with the type's bytes, dashed."""
    for number, (label, series) in enumerate(_series(points)):
        colour = _COLOURS[number % len(_COLOURS)]
        sizes = [_size(row) for row, _ in series]
        achieved = [timing.gb_per_s for _, timing in series]
        attainable = [1e-3 * row.num_bytes / timing.attainable_us for row, timing in series]
        marker = _MARKERS[(number + number // len(_COLOURS)) % len(_MARKERS)]  # no pair twice in 36 lines
        axis.plot(sizes, achieved, color=colour, marker=marker, markersize=5, linewidth=1.6, label=label)
        once = "attainable" if number == 0 else None
        axis.plot(sizes, attainable, color="#999999", linestyle="--", linewidth=1, zorder=1, label=once)
    ticks = sorted({_size(row) for row, _ in points})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(ticks, [str(tick) for tick in ticks])
    axis.minorticks_off()
    axis.set_title(regime, fontsize=11)
    axis.set_xlabel("tokens" if regime in _BY_TOKENS else "batch size")
    axis.set_ylabel("GB/s")
    axis.grid(visible=True, which="major", color="#dddddd", linewidth=0.6)
    axis.legend(fontsize=7, frameon=False)


def _size(row: Row) -> int:
    return sum(row.case.call.lengths) if row.case.regime in _BY_TOKENS else row.case.batch_size


def _kind(row: Row) -> tuple[str, ...]:
    """What tells apart rows of one size, if something does."""
    case = row.case
    if case.regime in ("conv", "gates"):
        if max(case.call.lengths) == 1:
            return ()
        return ("rows" if case.moves_windows else "windows",)
    words = re.search(r"\b(accept|lazy) .*", case.call.name)
    return (words[0],) if words else ()


def _series(points: _Points) -> Iterator[tuple[str, _Points]]:
    """Points by what ran, types, what was accepted and in which form or the kind of rows, each in the order of size."""
    groups: dict[str, _Points] = {}
    for row, timing in points:
        label = " ".join((row.by, row.case.call.types(), *_kind(row)))
        groups.setdefault(label, []).append((row, timing))
    for label, series in groups.items():
        yield label, sorted(series, key=lambda point: _size(point[0]))
