"""The examples run as they stand, from any folder, and end by asserting what they claim."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


on_each_array_library = pytest.mark.parametrize("arguments", [(), pytest.param(("--cupy",), marks=pytest.mark.gpu)])


def output_of(name: str, arguments: tuple[str, ...], folder: Path) -> str:
    """What an example prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@on_each_array_library
def test_speculative_decode(arguments: tuple[str, ...], tmp_path: Path) -> None:
    output = output_of("speculative_decode.py", arguments, tmp_path)
    said = re.findall(r"(\w+): (\d+) tokens in 40 rounds of 4 sequences, tokens and states of plain decoding\n", output)
    assert output.count("\n") == len(said)
    assert [form for form, _ in said] == ["separate", "fused", "lazy"]
    (num_tokens,) = {int(count) for _, count in said}
    # A token a round is what comes without any draft, four are all that a window can bring.
    assert 160 < num_tokens < 640


@on_each_array_library
def test_cuda_graph(arguments: tuple[str, ...], tmp_path: Path) -> None:
    how = "as one graph" if arguments else "one by one"
    assert output_of("cuda_graph.py", arguments, tmp_path) == (
        f"16 steps of 4 layers {how}, readouts and states of plain calls\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--shards", "1"),
        ("--shards", "5", "--model", "olmo-hybrid-7b"),
        pytest.param(("--cupy",), marks=pytest.mark.gpu),
        pytest.param(("--cupy", "--shards", "8", "--model", "qwen3.5-27b"), marks=pytest.mark.gpu),
    ],
)
def test_tensor_parallel(arguments: tuple[str, ...], tmp_path: Path) -> None:
    output = output_of("tensor_parallel.py", arguments, tmp_path)
    where = r"\d+ of \d+ GPUs" if "--cupy" in arguments else "the CPU"
    assert re.fullmatch(
        rf"(\S+): \d+ key and \d+ value heads in (\d+) shards on {where}, "
        r"16 tokens of prompts and 8 steps, readouts and states of one device\n",
        output,
    )
    if "--shards" in arguments:
        assert f" in {arguments[arguments.index('--shards') + 1]} shards " in output


def test_a_group_of_heads_stays_whole() -> None:
    command = [sys.executable, str(ROOT / "examples" / "tensor_parallel.py"), "--shards", "5"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    expected = "--shards: expected a divisor of the 16 key heads of qwen3-next-80b-a3b, got 5\n"
    assert done.stderr.endswith(expected)
