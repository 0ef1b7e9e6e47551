"""A run of `gdn compile`: what is compiled, and what came of it as table and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import gdn
from gdn.backends import nvrtc
from gdn.backends.ahead import Built
from gdn.backends.launch import Variant
from gdn.cli import report
from gdn.cli.names import joined
from gdn.cli.report import Column
from gdn.variants import Layer, uses

_MOST_SHOWN = 2  # calls of a kernel, in the table


@dataclass(slots=True)
class CompileRun:
    """What is compiled and what came of it so far.

    uses: types and calls of each variant, in words. error: what ended the run before all was compiled.
    """

    architectures: Sequence[str]
    folder: Path
    layers: Sequence[Layer] = ()
    uses: dict[Variant, list[tuple[str, str]]] = field(default_factory=dict)
    built: list[Built] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    error: str | None = None

    def add_uses(self, layers: Sequence[Layer], ops: Sequence[str]) -> None:
        """Fill in what calls of these ops pick in these layers."""
        self.layers = layers
        heads = dict.fromkeys(layer.heads for layer in layers)
        for layer in layers:
            prefix = f"{layer.heads.num_key_heads},{layer.heads.num_value_heads} heads: " if len(heads) > 1 else ""
            for use in uses(layer, ops):
                found = self.uses.setdefault(use.variant, [])
                if (use.types, prefix + use.calls) not in found:
                    found.append((use.types, prefix + use.calls))

    @property
    def num_wanted(self) -> int:
        """Kernels that the folder is to hold, each architecture's apart."""
        return len(self.uses) * len(self.architectures)

    @property
    def num_new(self) -> int:
        """Kernels that were compiled by this run."""
        return sum(built.is_new for built in self.built)

    @property
    def num_bytes(self) -> int:
        """Bytes of the files."""
        return sum(built.num_bytes for built in self.built)

    @property
    def num_spilling(self) -> int:
        """Kernels that spill registers."""
        return sum(built.spills for built in self.built)

    @property
    def exit_code(self) -> int:
        """0 for kernels that spill, too: they are right."""
        return 130 if self.interrupted else int(self.error is not None)


# ---- Showing ----


def show_head(run: CompileRun) -> None:
    """Print what is compiled, for what, and where to."""
    console = report.output()
    what = f"gdn {gdn.__version__}: {len(run.uses)} kernels for {joined(run.architectures, 'and')}"
    report.print_indented(console, f"{what}, with NVRTC {nvrtc.version()}", indent=0)
    for heads in dict.fromkeys(layer.heads for layer in run.layers):
        counts = f"{heads.num_key_heads},{heads.num_value_heads} heads of {heads.key_head_dim},{heads.value_head_dim}"
        report.print_indented(console, counts, indent=0)
    console.print()


def show_results(run: CompileRun) -> None:
    """Print the table and the summary."""
    console = report.output()
    if run.built:
        columns, cells = zip(*_table(run), strict=True)
        report.print_table(console, columns, list(zip(*cells, strict=True)))
        console.print()
    if run.error is not None:
        report.print_indented(console, run.error, indent=0)
    report.print_verdict(console, summary(run), passed=run.exit_code == 0)


def _table(run: CompileRun) -> Iterator[tuple[Column, list[str]]]:
    """Each column with its cells, in order."""
    built = run.built
    yield Column("kernel"), [each.variant.kernel.stem for each in built]
    yield Column("calls", min_width=56), [_calls(run, each.variant) for each in built]
    yield Column("work/pool", min_width=88), [_types(run, each.variant) for each in built]
    yield Column("arch"), [each.architecture for each in built]
    yield Column("registers", right=True), [str(each.report.registers) for each in built]
    yield Column("shared", right=True, min_width=48), [str(each.shared_bytes) for each in built]
    yield Column("stack", right=True, min_width=72), [str(each.report.stack_bytes) for each in built]
    yield Column("spills", right=True), [str(each.report.spill_bytes) for each in built]


def _calls(run: CompileRun, variant: Variant) -> str:
    calls = list(dict.fromkeys(calls for _, calls in run.uses[variant]))
    more = f"; {len(calls) - _MOST_SHOWN} more" if len(calls) > _MOST_SHOWN else ""
    return "; ".join(calls[:_MOST_SHOWN]) + more


def _types(run: CompileRun, variant: Variant) -> str:
    return ", ".join(dict.fromkeys(types for types, _ in run.uses[variant]))


def summary(run: CompileRun) -> str:
    """One line: verdict, kernels, seconds, bytes, spills."""
    verdict = {0: "all right", 1: "FAILED", 130: "INTERRUPTED"}[run.exit_code]
    left_out = f" ({run.num_wanted - len(run.built)} not reached)" if run.exit_code else ""
    spills = {0: "none spills", 1: "1 spills registers"}.get(run.num_spilling, f"{run.num_spilling} spill registers")
    return (
        f"{verdict}: {_count(len(run.built), 'kernel')} of {report.size(run.num_bytes)} in {run.folder}{left_out}, "
        f"{run.num_new} compiled in {run.seconds:.1f} s, {spills}"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


# ---- JSON ----


def as_document(run: CompileRun) -> dict[str, Any]:
    """The run for machines."""
    return {
        "gdn": gdn.__version__,
        "nvrtc": nvrtc.version(),
        "passed": run.exit_code == 0,
        "interrupted": run.interrupted,
        "error": run.error,
        "folder": str(run.folder),
        "architectures": list(run.architectures),
        "layers": [asdict(layer) for layer in run.layers],
        "num_kernels": len(run.built),
        "num_compiled": run.num_new,
        "num_spilling": run.num_spilling,
        "bytes": run.num_bytes,
        "seconds": round(run.seconds, 3),
        "kernels": [_kernel_document(run, built) for built in run.built],
    }


def _kernel_document(run: CompileRun, built: Built) -> dict[str, Any]:
    return {
        "kernel": built.variant.kernel.stem,
        "architecture": built.architecture,
        "macros": dict(built.variant.macros),
        "uses": [{"types": types, "calls": calls} for types, calls in run.uses[built.variant]],
        **asdict(built.report),
        "launch_shared_bytes": built.variant.launch_shared_bytes,
        "file": built.path.name,
        "bytes": built.num_bytes,
        "compiled": built.is_new,
    }
