"""Which file may import which, and what an import pulls in."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import gdn

ROOT = Path(gdn.__file__).parents[1]

# What a module may import of the library, from the bottom up; patterns as in a shell.
ALLOWED: dict[str, tuple[str, ...]] = {
    "gdn.errors": (),
    "gdn.oracle": ("gdn.oracle.*",),
    "gdn.oracle.arguments": (),
    "gdn.oracle.*": ("gdn.oracle.arguments",),
    "gdn.geometry": ("gdn.errors",),
    "gdn.models": ("gdn.errors", "gdn.geometry"),
    "gdn.dlpack": (),
    "gdn.arrays": ("gdn.errors", "gdn.dlpack"),
    "gdn.check": ("gdn.errors", "gdn.arrays"),
    "gdn.recurrence": ("gdn.errors", "gdn.arrays", "gdn.check", "gdn.geometry"),
    "gdn.ring": ("gdn.errors", "gdn.arrays", "gdn.check", "gdn.geometry", "gdn.recurrence"),
    "gdn.gates": ("gdn.arrays", "gdn.check"),
    "gdn.conv1d": ("gdn.errors", "gdn.arrays", "gdn.check", "gdn.recurrence"),
    "gdn.indices": ("gdn.errors", "gdn.arrays", "gdn.conv1d", "gdn.geometry", "gdn.recurrence", "gdn.ring"),
    "gdn.backends.cache": (),
    "gdn.backends.row_tile": ("gdn.geometry",),
    "gdn.backends.streamed_tile": ("gdn.geometry", "gdn.backends.row_tile"),
    "gdn.backends.launch": ("gdn.errors",),
    "gdn.backends.nvrtc": ("gdn.errors", "gdn.backends.launch"),
    "gdn.backends.binaries": ("gdn.backends.cache", "gdn.backends.launch", "gdn.backends.nvrtc"),
    "gdn.backends.early_launch": (),
    "gdn.backends.cuda": (
        *("gdn.errors", "gdn.arrays", "gdn.backends.cache", "gdn.backends.launch", "gdn.backends.nvrtc"),
        *("gdn.backends.binaries", "gdn.backends.early_launch"),
    ),
    "gdn.backends.ahead": (
        *("gdn.errors", "gdn.backends.cache", "gdn.backends.launch"),
        *("gdn.backends.nvrtc", "gdn.backends.binaries", "gdn.backends.cuda"),
    ),
    "gdn.backends.host": ("gdn.errors", "gdn.backends.launch", "gdn.backends.cache"),
    "gdn.backends.numpy": (
        "gdn.arrays",
        "gdn.backends.pending_windows",
        "gdn.geometry",
        "gdn.indices",
        "gdn.recurrence",
        "gdn.ring",
    ),
    "gdn.backends.numpy_chunked": (
        *("gdn.arrays", "gdn.backends.chunk_layout", "gdn.backends.numpy"),
        *("gdn.geometry", "gdn.indices", "gdn.recurrence"),
    ),
    "gdn.backends.numpy_layer": ("gdn.arrays", "gdn.conv1d", "gdn.gates", "gdn.geometry", "gdn.indices"),
    "gdn.backends.recurrence": (
        *("gdn.errors", "gdn.arrays", "gdn.geometry", "gdn.recurrence"),
        *("gdn.backends.cuda", "gdn.backends.launch", "gdn.backends.row_tile", "gdn.backends.streamed_tile"),
    ),
    "gdn.backends.ring": ("gdn.arrays", "gdn.ring", "gdn.backends.launch"),
    "gdn.backends.conv1d": (
        *("gdn.errors", "gdn.arrays", "gdn.conv1d", "gdn.backends.launch", "gdn.backends.recurrence"),
    ),
    "gdn.backends.pending_windows": ("gdn.arrays", "gdn.backends.launch"),
    "gdn.backends.gated_delta_*": (
        *("gdn.errors", "gdn.arrays", "gdn.conv1d", "gdn.gates", "gdn.recurrence", "gdn.ring", "gdn.backends.conv1d"),
        *("gdn.backends.launch", "gdn.backends.row_tile", "gdn.backends.recurrence", "gdn.backends.ring"),
    ),
    **dict.fromkeys(
        (f"gdn.backends.gated_delta_chunk_{part}" for part in ("plan", "prepare", "walk")),
        (
            *("gdn.arrays", "gdn.recurrence", "gdn.backends.chunk_layout", "gdn.backends.cuda"),
            *("gdn.backends.launch", "gdn.backends.recurrence"),
        ),
    ),
    "gdn.backends.gated_delta_chunk_walk_sm90": (
        *("gdn.arrays", "gdn.recurrence", "gdn.backends.chunk_layout", "gdn.backends.cuda"),
        *("gdn.backends.launch", "gdn.backends.gated_delta_chunk_walk"),
    ),
    "gdn.backends.chunk_layout": ("gdn.errors", "gdn.geometry"),
    "gdn.backends.chunked": (
        *("gdn.errors", "gdn.arrays", "gdn.geometry", "gdn.recurrence", "gdn.ring", "gdn.backends.chunk_layout"),
        *("gdn.backends.launch", "gdn.backends.numpy", "gdn.backends.numpy_chunked", "gdn.backends.recurrence"),
        "gdn.backends.gated_delta_*",
    ),
    "gdn.backends": ("gdn.errors", "gdn.backends.cuda", "gdn.backends.host"),
    "gdn": ("gdn.errors", "gdn.geometry", "gdn.backends", "gdn.ops"),
    "gdn.plans": ("gdn.arrays", "gdn.backends.chunk_layout", "gdn.backends.cuda"),
    "gdn.calls": (
        *("gdn.arrays", "gdn.plans", "gdn.backends"),
        *("gdn.backends.cuda", "gdn.backends.host", "gdn.backends.launch", "gdn.backends.row_tile"),
    ),
    "gdn.rules": (
        *("gdn.arrays", "gdn.check", "gdn.indices", "gdn.recurrence", "gdn.ring", "gdn.calls"),
        *("gdn.backends.numpy", "gdn.backends.recurrence", "gdn.backends.gated_delta_*"),
        *("gdn.backends.chunk_layout", "gdn.backends.chunked"),
    ),
    "gdn.layer_rules": (
        *("gdn.errors", "gdn.arrays", "gdn.check", "gdn.conv1d", "gdn.gates", "gdn.indices", "gdn.calls"),
        *("gdn.backends.numpy_layer", "gdn.backends.gated_delta_*"),
    ),
    "gdn.ops": (
        *("gdn.errors", "gdn.arrays", "gdn.check", "gdn.conv1d", "gdn.gates", "gdn.geometry", "gdn.recurrence"),
        *("gdn.calls", "gdn.rules", "gdn.layer_rules", "gdn.backends.recurrence"),
        *("gdn.backends.gated_delta_conv1d_fwd", "gdn.backends.gated_delta_gates"),
    ),
    "gdn.variants": (
        *("gdn.arrays", "gdn.conv1d", "gdn.gates", "gdn.geometry", "gdn.recurrence", "gdn.ring", "gdn.backends.*"),
    ),
    "gdn.layer": (
        *("gdn.errors", "gdn.arrays", "gdn.check", "gdn.conv1d", "gdn.geometry", "gdn.indices", "gdn.ring"),
        *("gdn.calls", "gdn.rules", "gdn.layer_rules", "gdn.backends.chunked"),
    ),
    "gdn.speculative": (
        *("gdn.errors", "gdn.arrays", "gdn.check", "gdn.geometry", "gdn.indices", "gdn.ring", "gdn.calls", "gdn.ops"),
        *("gdn.backends", "gdn.backends.numpy", "gdn.backends.pending_windows"),
    ),
    "gdn.testing.compare": ("gdn.errors",),
    "gdn.testing.buffers": (),
    "gdn.testing.ragged": ("gdn.geometry", "gdn.testing.buffers"),
    "gdn.testing.cases": ("gdn.arrays", "gdn.geometry", "gdn.testing.buffers"),
    "gdn.testing.execute": ("gdn", "gdn.ops", "gdn.arrays", "gdn.testing.[bc]*"),
    "gdn.testing.checks": (
        *("gdn.oracle", "gdn.geometry", "gdn.backends.row_tile", "gdn.backends.recurrence"),
        *("gdn.testing.[bc]*", "gdn.testing.execute", "gdn.testing.ragged"),
    ),
    "gdn.testing.chunked_cases": ("gdn.geometry", "gdn.testing.cases"),
    "gdn.testing.chunked_checks": (
        *("gdn.ops", "gdn.backends.chunk_layout", "gdn.backends.chunked"),
        *("gdn.testing.[bc]*", "gdn.testing.execute"),
    ),
    "gdn.testing.ring_cases": ("gdn.arrays", "gdn.geometry", "gdn.testing.[bc]*"),
    "gdn.testing.ring_device": ("gdn.ops", "gdn.testing.[bc]*", "gdn.testing.execute"),
    "gdn.testing.ring_walk": ("gdn.testing.[bc]*", "gdn.testing.ring_cases", "gdn.testing.ring_device"),
    "gdn.testing.ring_checks": (
        *("gdn.oracle", "gdn.geometry", "gdn.backends.row_tile", "gdn.backends.recurrence"),
        *("gdn.testing.[bc]*", "gdn.testing.ring_cases", "gdn.testing.ring_device", "gdn.testing.ring_walk"),
    ),
    "gdn.testing.pending_steps": (
        "gdn.geometry",
        "gdn.testing.[bc]*",
        "gdn.testing.ring_cases",
        "gdn.testing.ring_device",
    ),
    "gdn.testing.pending_walk": (
        *("gdn.testing.[bc]*", "gdn.testing.ring_cases", "gdn.testing.ring_device", "gdn.testing.ring_walk"),
    ),
    "gdn.testing.pending_checks": (
        *("gdn.oracle", "gdn.geometry", "gdn.backends.row_tile", "gdn.backends.recurrence", "gdn.testing.[bc]*"),
        *(
            "gdn.testing.ring_checks",
            "gdn.testing.ring_device",
            "gdn.testing.pending_steps",
            "gdn.testing.pending_walk",
        ),
    ),
    "gdn.testing.watched": ("gdn.testing.[bc]*", "gdn.testing.execute"),
    "gdn.testing.conv1d_cases": ("gdn.arrays", "gdn.geometry", "gdn.testing.buffers"),
    "gdn.testing.conv1d_checks": (
        *("gdn.ops", "gdn.oracle", "gdn.arrays", "gdn.geometry"),
        *("gdn.testing.buffers", "gdn.testing.compare", "gdn.testing.conv1d_cases"),
        *("gdn.testing.ragged", "gdn.testing.watched"),
    ),
    "gdn.testing.gates_cases": ("gdn.arrays", "gdn.geometry", "gdn.testing.buffers"),
    "gdn.testing.gates_checks": (
        *("gdn.ops", "gdn.oracle"),
        *("gdn.testing.buffers", "gdn.testing.compare", "gdn.testing.gates_cases", "gdn.testing.watched"),
    ),
    "gdn.testing.soak": (
        *("gdn.ops", "gdn.geometry", "gdn.speculative", "gdn.testing.[bc]*"),
        *("gdn.testing.execute", "gdn.testing.ring_device"),
    ),
    "gdn.testing.steps_cases": ("gdn.arrays", "gdn.geometry", "gdn.testing.buffers"),
    "gdn.testing.steps_layer": (
        *("gdn.ops", "gdn.testing.buffers", "gdn.testing.execute"),
        *("gdn.testing.ring_device", "gdn.testing.steps_cases"),
    ),
    "gdn.testing.steps_checks": (
        *("gdn.oracle", "gdn.testing.buffers", "gdn.testing.compare"),
        *("gdn.testing.steps_cases", "gdn.testing.steps_layer"),
    ),
    "gdn.testing.layer_cases": (
        *("gdn.geometry", "gdn.testing.conv1d_cases", "gdn.testing.gates_cases", "gdn.testing.steps_cases"),
    ),
    "gdn.testing.catalogue": (
        *("gdn.geometry", "gdn.testing.cases", "gdn.testing.chunked_cases"),
        *("gdn.testing.ring_cases", "gdn.testing.layer_cases"),
    ),
    "gdn.testing.sweep": (
        *("gdn.testing.[bc]*", "gdn.testing.ring_c*", "gdn.testing.pending_[cs]*"),
        *("gdn.testing.gates_c*", "gdn.testing.steps_c*"),
    ),
    "gdn.testing": ("gdn.testing.compare",),
    "gdn.bench": (),
    "gdn.bench.timing": (),
    "gdn.bench.cases": ("gdn.geometry", "gdn.testing.*"),
    "gdn.bench.case_lists": (
        *("gdn.errors", "gdn.ring", "gdn.backends.chunk_layout", "gdn.bench.cases", "gdn.testing.*"),
    ),
    "gdn.bench.loops": ("gdn.speculative", "gdn.bench.cases", "gdn.testing.*"),
    "gdn.bench.traffic": ("gdn.arrays", "gdn.geometry", "gdn.bench.cases", "gdn.bench.loops", "gdn.testing.*"),
    "gdn.bench.machine": ("gdn.bench.timing", "gdn.bench.traffic", "gdn.testing.*"),
    "gdn.bench.c[pu]*": ("gdn", "gdn.arrays", "gdn.bench.[mt]*", "gdn.testing.*"),
    "gdn.bench.values": ("gdn.geometry", "gdn.bench.cases", "gdn.testing.*"),
    "gdn.bench.workload": (
        *("gdn", "gdn.ops", "gdn.geometry"),
        *("gdn.bench.cases", "gdn.bench.machine", "gdn.bench.timing", "gdn.bench.values"),
    ),
    "gdn.bench.build": (
        *("gdn.errors", "gdn.arrays", "gdn.geometry", "gdn.backends.chunked", "gdn.testing.*"),
        *("gdn.bench.cases", "gdn.bench.loops", "gdn.bench.machine", "gdn.bench.tables", "gdn.bench.traffic"),
        *("gdn.bench.values", "gdn.bench.workload"),
    ),
    "gdn.bench.tables": (
        *("gdn.arrays", "gdn.geometry", "gdn.testing.*"),
        *("gdn.bench.cases", "gdn.bench.loops", "gdn.bench.machine", "gdn.bench.workload"),
    ),
    "gdn.bench.places": ("gdn.geometry", "gdn.bench.values", "gdn.bench.workload", "gdn.testing.*"),
    "gdn.bench.oracle_check": (
        *("gdn", "gdn.oracle", "gdn.geometry", "gdn.testing.*"),
        *("gdn.bench.cases", "gdn.bench.places", "gdn.bench.workload"),
    ),
    "gdn.bench.check_pending": ("gdn.bench.oracle_check", "gdn.bench.places", "gdn.bench.workload", "gdn.testing.*"),
    "gdn.bench.check_loop": (
        *("gdn.bench.loops", "gdn.bench.oracle_check", "gdn.bench.places", "gdn.bench.values", "gdn.bench.workload"),
        "gdn.testing.*",
    ),
    "gdn.bench.layer_workload": (*("gdn", "gdn.ops", "gdn.bench.cases", "gdn.bench.machine", "gdn.bench.timing"),),
    "gdn.bench.layer_build": (
        *("gdn", "gdn.ops", "gdn.arrays", "gdn.testing.*", "gdn.bench.build", "gdn.bench.cases"),
        *("gdn.bench.layer_workload", "gdn.bench.machine", "gdn.bench.tables", "gdn.bench.values"),
    ),
    "gdn.bench.check_layer": (
        *("gdn", "gdn.oracle", "gdn.testing.*", "gdn.bench.layer_workload", "gdn.bench.places", "gdn.bench.values"),
    ),
    "gdn.bench.check": (
        *("gdn.errors", "gdn.bench.cases", "gdn.bench.check_*", "gdn.bench.loops", "gdn.bench.oracle_check"),
        *("gdn.bench.layer_workload", "gdn.bench.places", "gdn.bench.workload", "gdn.testing.*"),
    ),
    "gdn.bench.peers": ("gdn.bench.peers.*",),
    "gdn.bench.peers.*": (
        *("gdn.errors", "gdn.geometry", "gdn.bench.cases", "gdn.bench.timing", "gdn.bench.workload"),
        *("gdn.bench.peers.*", "gdn.testing.*"),
    ),
    "gdn.bench.measure": ("gdn.bench.*", "gdn.testing.execute"),
    "gdn.cli": (),
    "gdn.cli.*": ("*",),
    "gdn.__main__": ("gdn.cli.main",),
}

# Where other packages may be imported.
OUTSIDE: dict[str, tuple[str, ...]] = {
    "numpy": (
        "gdn.arrays",
        "gdn.check",
        "gdn.dlpack",
        "gdn.indices",
        "gdn.layer",
        "gdn.oracle.*",
        "gdn.backends.numpy*",
        "gdn.testing.*",
        "gdn.bench.*",
    ),
    "ml_dtypes": ("gdn.arrays", "gdn.dlpack"),
    "cupy": (
        *("gdn.arrays", "gdn.backends.cuda", "gdn.backends.early_launch", "gdn.backends.nvrtc", "gdn.cli.info"),
        *("gdn.testing.buffers", "gdn.testing.ring_device", "gdn.bench.cuda"),
    ),
    "matplotlib": ("gdn.cli.bench_plot",),
    "ctypes": ("gdn.backends.early_launch", "gdn.backends.host", "gdn.dlpack"),
    "subprocess": ("gdn.backends.host",),
    "click": ("gdn.cli.*",),
    "rich": ("gdn.cli.*",),
}


@cache
def modules() -> dict[str, Path]:
    """Every module of the library by name."""
    files = {
        **{path: path.relative_to(ROOT) for path in (ROOT / "gdn").rglob("*.py")},
        **{path: Path("gdn", path.relative_to(ROOT)) for path in (ROOT / "cli").glob("*.py")},
    }
    return {".".join(place.with_suffix("").parts).removesuffix(".__init__"): path for path, place in files.items()}


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Names of the modules that a file imports, `from package import module` resolved."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names: set[str] = set()
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found = inner & modules().keys()
            names |= found
            if len(found) < len(inner):
                names.add(str(node.module))
    return names


def line_of(module: str, table: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """The line of the table for a module: its own, or that of the pattern it matches."""
    lines = [table[module]] if module in table else [table[name] for name in table if fnmatchcase(module, name)]
    assert len(lines) == 1, f"{module} needs a line in the table"
    return lines[0]


def test_every_module_is_found() -> None:
    assert {"gdn", "gdn.ops", "gdn.backends", "gdn.backends.host", "gdn.cli.main"} <= modules().keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_are_those_of_the_table(module: str) -> None:
    allowed = line_of(module, ALLOWED)
    of_the_library = {name for name in imports(modules()[module]) if name.partition(".")[0] == "gdn"}
    refused = {name for name in of_the_library if not any(fnmatchcase(name, pattern) for pattern in allowed)}
    assert refused == set()


def test_no_import_leads_back() -> None:
    flow = {module: imports(path) & modules().keys() for module, path in modules().items()}
    order = list(TopologicalSorter(flow).static_order())
    assert order.index("gdn.errors") < order.index("gdn.check") < order.index("gdn.ops") < order.index("gdn.cli.verify")


def test_nothing_below_the_command_line_knows_it() -> None:
    for module, path in modules().items():
        if not module.startswith("gdn.cli") and module != "gdn.__main__":
            assert not any(name.startswith("gdn.cli") for name in imports(path)), module


@pytest.mark.parametrize("package", OUTSIDE)
def test_other_packages_stay_in_their_rooms(package: str) -> None:
    importers = {m for m, path in modules().items() if package in {name.partition(".")[0] for name in imports(path)}}
    assert importers != set()
    assert {m for m in importers if not any(fnmatchcase(m, pattern) for pattern in OUTSIDE[package])} == set()


def test_everything_else_is_of_the_standard_library() -> None:
    for module, path in modules().items():
        roots = {name.partition(".")[0] for name in imports(path)}
        assert roots - sys.stdlib_module_names - OUTSIDE.keys() - {"gdn", "__future__"} == set(), module


def test_cupy_is_never_imported_at_the_top() -> None:
    for module, path in modules().items():
        assert not any(name.partition(".")[0] == "cupy" for name in imports(path, top_only=True)), module


def test_one_file_knows_raw_modules() -> None:
    knowing = {module for module, path in modules().items() if "RawModule(" in path.read_text(encoding="utf-8")}
    assert knowing == {"gdn.backends.cuda"}


def test_the_oracle_imports_numpy_alone_and_errors_nothing() -> None:
    assert imports(modules()["gdn.errors"]) == {"__future__"}
    of_oracle = [path for module, path in modules().items() if module.startswith("gdn.oracle")]
    outside = set().union(*map(imports, of_oracle)) - {"__future__", "collections.abc", "typing"}
    assert {name for name in outside if not name.startswith("gdn.oracle.")} == {"numpy", "numpy.typing"}


# ---- What an import pulls in ----


def run_python(script: str, folder: Path) -> str:
    """Output of a fresh Python that finds this `gdn`, with warnings as errors."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


CALL = """
import numpy as np
import gdn.ops
pool = np.ones((2, 1, 8, 8), np.float32)
gates = np.ones((3, 1), np.float32)
out = gdn.ops.gated_delta_recurrence_fwd(
    np.ones((3, 24), np.float32), gates, gates, pool, np.array([1], np.int32), np.array([0, 3], np.int32))
print(out.shape, pool[0, 0, 0, 0])
"""


def test_importing_the_package_loads_no_array_library(tmp_path: Path) -> None:
    script = (
        "import sys, gdn; print([name for name in ('numpy', 'cupy', 'ctypes', 'subprocess') if name in sys.modules])"
    )
    assert run_python(script, tmp_path) == "[]\n"


def test_ops_load_no_cupy_and_run_on_numpy(tmp_path: Path) -> None:
    """Field case 86."""
    script = f"import sys\n{CALL}\nprint([name for name in sys.modules if name.partition('.')[0] == 'cupy'])"
    assert run_python(script, tmp_path) == "(3, 8) 1.0\n[]\n"


def test_numpy_calls_run_where_cupy_is_missing(tmp_path: Path) -> None:
    """Field case 86."""
    script = f"import sys\nsys.modules['cupy'] = None\n{CALL}\nprint(gdn.unavailable_backends()['cuda'])"
    output = run_python(script, tmp_path)
    assert output.startswith("(3, 8) 1.0\nCuPy cannot be imported (")
    assert output.count("\n") == 2
