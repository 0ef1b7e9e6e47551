"""tests/on_gpu.py on a machine that lacks what it runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("on_gpu.py")


def test_a_missing_program_fails_its_part_alone(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--part", "memcheck", "--part", "synccheck", "--save", str(tmp_path)]
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "memcheck done\nsynccheck done\n"
    head, *rows = done.stdout.splitlines()
    assert head.startswith("nvidia-smi is not on PATH, ")
    assert [(row.split()[:2], row.partition(" s  ")[2]) for row in rows] == [
        (["FAIL", "memcheck"], "compute-sanitizer is not on PATH"),
        (["FAIL", "synccheck"], "compute-sanitizer is not on PATH"),
    ]
