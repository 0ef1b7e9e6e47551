"""Run what a GPU must show, save the full output, and end with one line per part.

    python tests/on_gpu.py --save results            # every part
    python tests/on_gpu.py --part verify --part pytest --workers 8 --save results

Parts: `pytest` (the tests marked gpu; compiling is most of it, which --workers share), `verify` (the sweep on the cuda
backend, as JSON), `bench`, `chunked` (the same of prefill by chunks), `soak` (a million steps of a decode loop), and
`memcheck`, `racecheck`, `initcheck` and `synccheck` (compute-sanitizer over the named
cases). Exits 1 when a part fails.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def run(command: list[str], log: Path) -> tuple[int, str]:
    """Run in the checkout, keep stdout and stderr in `log`, return the exit status and stdout."""
    with log.open("w", encoding="utf-8") as stderr:
        if shutil.which(command[0]) is None:
            return 127, f"{command[0]} is not on PATH"
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False)
    log.write_text(done.stdout + log.read_text(encoding="utf-8"), encoding="utf-8")
    return done.returncode, done.stdout


def last_line(text: str) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no output")


def run_pytest(folder: Path, workers: int = 0) -> tuple[bool, str]:
    """The tests marked gpu."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-n", str(workers), "--dist", "worksteal"] if workers else []
    status, output = run(command, folder / "pytest.log")
    return status == 0, last_line(output)


def run_verify(folder: Path) -> tuple[bool, str]:
    """The sweep over named and random cases on the cuda backend."""
    command = [sys.executable, "-m", "gdn", "verify", "--backend", "cuda", "--cases", "200", "--json"]
    status, output = run(command, folder / "verify.log")
    (folder / "verify.json").write_text(output, encoding="utf-8")
    try:
        report = json.loads(output)
    except json.JSONDecodeError:
        return False, "no report"
    counts = ", ".join(
        f"{report[key]} {key.removeprefix('num_')}" for key in ("num_cases", "num_comparisons", "num_failed")
    )
    return status == 0, counts


def run_bench(folder: Path) -> tuple[bool, str]:
    """The benchmark of all regimes on the cuda backend."""
    command = [sys.executable, "-m", "gdn", "bench", "--backend", "cuda", "--save", str(folder / "bench.json")]
    status, output = run(command, folder / "bench.log")
    return status == 0, last_line(output)


def run_chunked(folder: Path) -> tuple[bool, str]:
    """The benchmark of prefill by chunks on the cuda backend."""
    command = [sys.executable, "-m", "gdn", "bench", "prefill", "--algorithm", "chunked", "--backend", "cuda"]
    command += ["--model", "qwen3-next-80b-a3b", "--state-dtype", "float32", "--save", str(folder / "chunked.json")]
    status, output = run(command, folder / "chunked.log")
    return status == 0, last_line(output)


def run_soak(folder: Path) -> tuple[bool, str]:
    """A million steps of a decode loop."""
    status, output = run([sys.executable, "-m", "gdn", "soak", "--backend", "cuda"], folder / "soak.log")
    return status == 0, last_line(output)


def run_sanitizer(tool: str, folder: Path) -> tuple[bool, str]:
    """compute-sanitizer over the named cases; an error makes the exit status 86."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "86"]
    command += [sys.executable, "-m", "gdn", "verify", "--backend", "cuda", "--cases", "0"]
    status, output = run(command, folder / f"{tool}.log")
    summary = [line for line in output.splitlines() if "SUMMARY" in line]
    return status == 0 and bool(summary), summary[-1] if summary else last_line(output)


def parts(workers: int = 0) -> dict[str, Callable[[Path], tuple[bool, str]]]:
    """What can be run, by name."""
    table: dict[str, Callable[[Path], tuple[bool, str]]] = {
        "pytest": partial(run_pytest, workers=workers),
        "verify": run_verify,
        "bench": run_bench,
        "chunked": run_chunked,
        "soak": run_soak,
    }
    for tool in SANITIZERS:
        table[tool] = partial(run_sanitizer, tool)
    return table


def main() -> int:
    """Run the parts asked for and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=tuple(parts()), help="repeatable; all when not given")
    parser.add_argument("--workers", type=int, default=0, help="processes that share the tests; needs pytest-xdist")
    parser.add_argument("--save", type=Path, default=ROOT / "build" / "on_gpu", help="folder for logs and JSON")
    arguments = parser.parse_args()
    folder = arguments.save.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in arguments.part or parts():
        start = time.monotonic()
        passed, text = parts(arguments.workers)[name](folder)
        rows.append((name, passed, time.monotonic() - start, text))
        print(f"{name} done", file=sys.stderr, flush=True)
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    print(f"{last_line(run(query, folder / 'gpu.log')[1])}, {date.today()}")
    for name, passed, seconds, text in rows:
        print(f"{'ok  ' if passed else 'FAIL'} {name:10} {seconds:6.1f} s  {text}")
    return 0 if all(passed for _, passed, _, _ in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
