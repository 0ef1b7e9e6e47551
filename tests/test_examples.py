"""The examples run as they stand, from any folder, and end by asserting what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("arguments", [(), pytest.param(("--cupy",), marks=pytest.mark.gpu)])
def test_speculative_decode(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "speculative_decode.py"), *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    said = re.fullmatch(r"(\d+) tokens in 40 rounds of 4 sequences, tokens and states of plain decoding\n", done.stdout)
    assert said is not None
    # A token a round is what comes without any draft, four are all that a window can bring.
    assert 160 < int(said[1]) < 640
