"""The command line: what it prints where, its exit codes, and every kind of stream it may be given."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result

import gdn
from gdn.backends import cuda
from gdn.backends import numpy as numpy_backend
from gdn.cli import verify as verify_module
from gdn.cli.main import main
from gdn.cli.names import suggestion
from gdn.testing import sweep
from gdn.testing.catalogue import SWEEP_CASES, random_case

ROOT = Path(gdn.__file__).parents[1]
SMALL = ("--backend", "numpy", "--case", "empty_sequences")
TINY_RANDOM = ("--backend", "numpy", "--heads", "2,2", "--head-dims", "8,8")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the caller's terminal wants must not reach these tests."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "PYTHONIOENCODING"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def wrong_numpy_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numpy backend, wrong in the last element of its readout."""
    right = numpy_backend.gated_delta_recurrence_fwd

    def wrong(inputs: Any, readout: Any, pending: Any) -> None:
        right(inputs, readout, pending)
        readout.array[-1:, -1:] += 1

    monkeypatch.setattr(numpy_backend, "gated_delta_recurrence_fwd", wrong)


def gdn_command(*arguments: str, charset: str = "utf-8", **environment: str) -> Result:
    return CliRunner(charset=charset, env=environment).invoke(main, arguments)


def process(*arguments: str, **keywords: Any) -> subprocess.Popen[bytes]:
    """`python -m gdn` in a process of its own, with pipes unless the keywords say otherwise."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, "-m", "gdn", *arguments], cwd=ROOT, **(pipes | keywords))


def script(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True, check=False)


# ---- The command itself ----


def test_help_needs_neither_numpy_nor_rich() -> None:
    done = script(
        "import sys\n"
        "from gdn.cli.main import main\n"
        "main(['--help'], standalone_mode=False)\n"
        "loaded = {'numpy', 'rich', 'cupy'} & set(sys.modules)\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    assert done.returncode == 0, done.stderr
    assert "verify" in done.stdout
    assert "info" in done.stdout


@pytest.mark.parametrize("command", [(), ("verify",), ("soak",), ("bench",), ("compile",), ("info",)])
def test_help_of_each_command(command: tuple[str, ...]) -> None:
    result = gdn_command(*command, "--help")
    assert result.exit_code == 0
    assert "Usage: gdn" in result.stdout


def test_version() -> None:
    assert gdn.__version__ in gdn_command("--version").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("verfy",), "did you mean verify?"),
        (("bogus",), "expected one of verify, soak, bench, compile, info"),
        (("verify", "--case", "decode_bach"), "did you mean decode_batch"),
        (("verify", "--case", "random-1--2"), "unknown case 'random-1--2'"),
        (("verify", "--model", "qwen3.6-27"), "did you mean qwen3.6-27b"),
        (("verify", "--model", "Qwen3.6-27B"), "did you mean qwen3.6-27b"),
        (("verify", "--work-dtype", "BF16"), "did you mean bfloat16?"),
        (("verify", "--backend", "hots"), "did you mean host?"),
        (("verify", "--work-dtype", "float64"), "float16"),
        (("verify", "--heads", "2,3"), "heads: expected"),
        (("verify", "--head-dims", "12,8"), "key_head_dim: expected a multiple of 8"),
        (("verify", "--heads", "-2,4"), "got '-2,4'"),
        (("verify", "--heads", "2"), "two counts"),
        (("verify", "--cases", "-1"), "-1 is not in the range"),
        (("verify", "--seed", "-1"), "-1 is not in the range"),
        (("verify", "--workers", "0"), "0 is not in the range"),
        (("verify", "--cases", "0", "--heads", "2,2"), "no case to run"),
        (("verify", *SMALL, "--heads", "2,2"), "--heads is for random cases"),
    ],
)
def test_a_mistake_in_the_usage_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = gdn_command(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("Error:") == 1


@pytest.mark.parametrize("command", ["verify", "soak", "bench", "compile"])
def test_head_counts_that_do_not_group(command: str) -> None:
    """Beside field case 55: as options of every command, refused naming both before anything runs."""
    for num_key_heads, num_value_heads in ((2, 3), (4, 2), (0, 4), (3, 0)):
        result = gdn_command(command, "--heads", f"{num_key_heads},{num_value_heads}")
        assert (result.exit_code, result.stdout) == (2, "")
        both = f"got num_key_heads={num_key_heads}, num_value_heads={num_value_heads}"
        assert result.stderr.endswith(f"num_value_heads: expected a multiple of at least one key head, {both}\n")


def test_a_backend_that_cannot_run_ends_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "unavailable_backends", lambda: {"cuda": "no GPU visible"})
    result = gdn_command("verify", "--backend", "cuda")
    assert result.exit_code == 2
    assert "backend cuda cannot run here: no GPU visible" in result.stderr


def test_suggestions() -> None:
    assert suggestion("b", ["x", "y"]) == "expected one of x, y"
    assert suggestion("namd", ["named", "x"]) == "did you mean named?"
    assert suggestion("NAMD", ["Named", "x"]) == "did you mean Named?"
    assert suggestion("?", [f"name{number}" for number in range(50)]) == "expected a name such as name0, name1, name2"


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["verify", "--case"], "decode", ["decode_batch", "decode_batch_bfloat16"]),
        (["verify", "--model"], "olmo", ["olmo-hybrid-7b"]),
        (["verify", "--backend"], "", ["cuda", "host", "numpy"]),
        ([], "ver", ["verify"]),
    ],
)
def test_completion(words: list[str], incomplete: str, found: list[str]) -> None:
    completion = BashComplete(main, {}, "gdn", "_GDN_COMPLETE")
    assert [item.value for item in completion.get_completions(words, incomplete)] == found


# ---- gdn verify: which cases ----


def listed(*arguments: str) -> list[str]:
    result = gdn_command("verify", "--list", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_list_describes_every_case_in_a_line() -> None:
    lines = listed()
    names = [line.split()[0] for line in lines]
    assert names[: len(SWEEP_CASES)] == list(SWEEP_CASES)
    assert names[len(SWEEP_CASES) :] == [f"random-0-{i}" for i in range(verify_module.DEFAULT_RANDOM_CASES)]
    described = dict(line.split(maxsplit=1) for line in lines)
    assert described["ragged_batch"] == "1,2 heads of 32,32; lengths 2x1 512 1 0 37; float32"
    assert described["tiny_decay"].endswith("; tiny_decay")
    assert described["conv_only_padding"] == "12 channels, 4 taps; lengths 2 1; float32 weights float32; silu"
    assert described["conv_width_2"].endswith("; float32 weights float32 bias float32")
    assert described["gates_of_one"] == "1 head; 1 token; float32"
    assert described["steps_group_of_3"] == "1,3 heads of 32,32; 12 steps of 2 rows; float32"
    assert described["no_sequences"] == "2,4 heads of 32,32; no sequences; float32"


def test_a_random_case_does_not_depend_on_how_many_there_are() -> None:
    few, many = listed("--seed", "7", "--cases", "2"), listed("--seed", "7", "--cases", "5")
    assert [line.split() for line in few] == [line.split() for line in many[: len(few)]]
    assert listed("--case", "random-7-1")[0].split() == few[-1].split()


def test_head_and_type_options_shape_random_cases_alone() -> None:
    lines = listed("--cases", "2", "--model", "olmo-hybrid-7b", "--heads", "15,15", "--work-dtype", "float16")
    assert [line.split()[0] for line in lines] == ["random-0-0", "random-0-1"]
    assert all("15,15 heads of 96,192;" in line and "; float16" in line for line in lines)
    assert "8,16 heads" in listed("--cases", "1", "--heads", "8,16")[0]
    assert "heads of 8,24;" in listed("--cases", "1", "--head-dims", "8,24")[0]
    with_named = listed("--case", "group_of_1", "--cases", "1", "--state-dtype", "float16")
    assert [line.split()[0] for line in with_named] == ["group_of_1", "random-0-0"]


def test_options_shape_random_cases_of_the_other_ops_too() -> None:
    """Each option as far as an op has what it says: a convolution has the channels of the heads, gates value heads."""
    options = ("--heads", "2,6", "--head-dims", "24,32", "--work-dtype", "float16", "--state-dtype", "bfloat16")
    lines = listed("--cases", "100", *options)[3::6]
    words = {
        "channels,": "288 channels, {}; float16/bfloat16 weights",
        "heads;": "6 heads; {}; float16 heads",
        "steps": "2,6 heads of 24,32; {}; float16/bfloat16",
    }
    for kind, expected in words.items():
        of_kind = [line for line in lines if f" {kind} " in line]
        assert of_kind
        for line in of_kind:
            assert all(part in line for part in expected.split("{}"))


def test_fixing_heads_leaves_the_rest_as_drawn() -> None:
    choice = verify_module.RandomChoice(head_dims=(8, 16), state_dtype="float32")
    free, fixed = random_case(3, 4), choice.case(3, 4)
    assert (fixed.heads.key_head_dim, fixed.heads.value_head_dim, fixed.state_dtype) == (8, 16, "float32")
    assert fixed.heads.num_value_heads == free.heads.num_value_heads
    assert (fixed.inputs, fixed.work_dtype, fixed.seed) == (free.inputs, free.work_dtype, free.seed)


def test_list_as_json() -> None:
    result = gdn_command("verify", "--list", "--json", "--case", "group_of_8", "--case", "random-1-2")
    cases = json.loads(result.stdout)
    assert [case["name"] for case in cases] == ["group_of_8", "random-1-2"]
    assert cases[0]["heads"]["num_value_heads"] == 8


# ---- gdn verify: what it finds ----


def test_a_right_case() -> None:
    result = gdn_command("verify", *SMALL)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"gdn {gdn.__version__}: checking numpy against the float64 oracle"
    row = next(line for line in lines if line.startswith("empty_sequences"))
    assert row.split()[1:4] == ["numpy", "oracle", "untouched"]
    assert re.search(r" \d\.\de-0\d +(state|readout)\[\d+(,\d+)+\] +ok$", row)
    assert re.fullmatch(r"all right: 1 case on numpy, \d+ comparisons in \d+\.\d s", lines[-1])
    assert result.stderr == ""


def test_backends_that_cannot_run_are_named_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "unavailable_backends", lambda: {"cuda": "no GPU", "host": "no compiler"})
    result = gdn_command("verify", "--case", "no_tokens")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[1:3] == ["cuda cannot run here: no GPU", "host cannot run here: no compiler"]


def test_a_gpu_gets_one_worker() -> None:
    assert verify_module.default_workers(["cuda", "host"]) == 1
    assert 1 <= verify_module.default_workers(["host", "numpy"]) <= 8


def test_json_is_alone_on_stdout() -> None:
    result = gdn_command("verify", *SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passed"] is True
    assert document["num_comparisons"] > 0
    oracle = document["results"][0]["checks"][0]
    assert oracle["check"] == "oracle"
    assert oracle["worst"]["worst_coordinate"]


@pytest.mark.usefixtures("wrong_numpy_backend")
def test_a_failed_check_ends_with_1_and_the_command_that_shows_it() -> None:
    result = gdn_command("verify", *TINY_RANDOM, "--cases", "1", "--seed", "5")
    assert result.exit_code == 1
    assert "FAILED random-5-0 on numpy" in result.stdout
    reproduce = re.search(r"^  reproduce: gdn (.*)$", result.stdout, re.MULTILINE)
    assert reproduce is not None
    assert reproduce[1] == "verify --backend numpy --case random-5-0 --heads 2,2 --head-dims 8,8"
    assert result.stdout.splitlines()[-1].startswith("1 FAILED: 1 case on numpy")
    again = gdn_command(*reproduce[1].split())
    assert again.exit_code == 1
    assert [line for line in result.stdout.splitlines() if "E3: " in line] == [
        line for line in again.stdout.splitlines() if "E3: " in line
    ]


@pytest.mark.usefixtures("wrong_numpy_backend")
def test_json_of_a_failure() -> None:
    result = gdn_command("verify", *SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (document["passed"], document["num_failed"]) == (False, 1)
    assert document["results"][0]["reproduce"] == "gdn verify --backend numpy --case empty_sequences"
    assert any(check["failures"] for check in document["results"][0]["checks"])


@pytest.mark.usefixtures("wrong_numpy_backend")
def test_fail_fast_stops_at_the_first_failure() -> None:
    result = gdn_command("verify", *TINY_RANDOM, "--cases", "9", "--workers", "1", "--fail-fast")
    assert result.exit_code == 1
    assert result.stdout.count("reproduce:") == 1
    assert "1 FAILED: 1 case on numpy (8 not run)" in result.stdout


def test_numbers_that_json_lacks_are_words(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_backend.gated_delta_recurrence_fwd

    def without_readout(inputs: Any, readout: Any, pending: Any) -> None:
        right(inputs, readout, pending)
        readout.array[...] = float("nan")

    monkeypatch.setattr(numpy_backend, "gated_delta_recurrence_fwd", without_readout)
    result = gdn_command("verify", *SMALL, "--json")
    worst = json.loads(result.stdout)["results"][0]["checks"][0]["worst"]
    assert (worst["got"], worst["worst_error"]) == ("nan", "inf")


def test_nothing_compared_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "checks_of", lambda case: {})
    result = gdn_command("verify", *SMALL)
    assert result.exit_code == 1
    assert "nothing was compared" in result.stdout


def test_no_result_at_all_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify_module, "run_sweep", lambda *args, **keywords: (_ for _ in ()))
    result = gdn_command("verify", *SMALL)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].startswith("FAILED: nothing was compared")


@pytest.mark.parametrize("where", ["subject", "reference_of"])
def test_a_case_that_cannot_run_is_a_failure(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def refuse(*arguments: Any) -> None:
        raise MemoryError("no room\n" + "line\n" * 9)

    monkeypatch.setattr(sweep, where, refuse)
    result = gdn_command("verify", *SMALL)
    assert result.exit_code == 1
    assert "  MemoryError: no room\n" in result.stdout
    assert "more lines" in result.stdout


# ---- Streams ----


@pytest.mark.usefixtures("wrong_numpy_backend")
def test_forty_columns() -> None:
    result = gdn_command("verify", *SMALL, COLUMNS="40")
    lines = result.stdout.splitlines()
    assert all(len(line) <= 40 for line in lines if "reproduce:" not in line)
    assert "  reproduce: gdn verify --backend numpy --case empty_sequences" in lines
    assert any(re.fullmatch(r"empty_sequences  numpy    FAILED", line) for line in lines)


def test_no_line_ends_in_blanks() -> None:
    for arguments in (("verify", *SMALL), ("verify", "--list"), ("info",)):
        lines = gdn_command(*arguments, COLUMNS="80").stdout.splitlines()
        assert all(line == line.rstrip() and len(line) <= 80 for line in lines)


def test_ascii_stream(tmp_path: Path) -> None:
    for arguments in (("verify", *SMALL), ("info",)):
        result = gdn_command(*arguments, charset="ascii", GDN_CACHE_DIR=str(tmp_path / "cäche ☃"))
        assert result.exit_code == 0, result.exception
        assert result.stdout_bytes.isascii()
    assert "c\\xe4che \\u2603" in result.stdout


def test_colour_only_where_it_is_wanted() -> None:
    colour = re.compile(r"\x1b\[[0-9;]*3[0-7]")
    assert "\x1b" not in gdn_command("verify", *SMALL).output
    assert colour.search(gdn_command("verify", *SMALL, FORCE_COLOR="1", TERM="xterm").stdout)
    without = gdn_command("verify", *SMALL, FORCE_COLOR="1", TERM="xterm", NO_COLOR="1")
    assert not colour.search(without.output)
    assert "\x1b" not in gdn_command("verify", *SMALL, FORCE_COLOR="1", TERM="dumb").output


@pytest.mark.parametrize("arguments", [("verify", "--list"), ("verify", *SMALL), ("verify", *SMALL, "--json")])
def test_a_closed_pipe_ends_quietly(arguments: tuple[str, ...]) -> None:
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    with process(*arguments, stdout=writing_end) as running:
        os.close(writing_end)
        _, messages = running.communicate(timeout=60)
    assert messages == b""
    assert running.returncode == 141


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """Both ends of a pseudo-terminal."""
    ours, theirs = os.openpty()
    yield ours, theirs
    os.close(ours)


def test_interrupt_keeps_the_finished_rows(terminal: tuple[int, int]) -> None:
    ours, theirs = terminal
    # A shell that started this in the background may have left Ctrl-C ignored, which a new process takes over.
    text = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nfrom gdn.cli.main import main\nmain()"
    )
    command = [sys.executable, "-c", text, "verify", *TINY_RANDOM, "--cases", "999"]
    environment = {**os.environ, "TERM": "xterm"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=theirs) as running:
        os.close(theirs)
        seen = b""
        while not re.search(rb"[1-9]\d*/999", seen):
            seen += os.read(ours, 4096)
        running.send_signal(signal.SIGINT)
        output, _ = running.communicate(timeout=60)
    lines = output.decode().splitlines()
    assert running.returncode == 130
    assert re.match(r"random-0-0 +numpy .* ok$", next(line for line in lines if line.startswith("random-0-0 ")))
    assert re.match(r"INTERRUPTED: \d+ cases? on numpy \(\d+ not run\), \d+ comparisons in ", lines[-1])


def test_interrupt_leaves_valid_json(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        yield from sweep.run_sweep(*arguments, **keywords)
        raise KeyboardInterrupt

    monkeypatch.setattr(verify_module, "run_sweep", interrupted)
    result = gdn_command("verify", *SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 130
    assert (document["interrupted"], document["passed"], len(document["results"])) == (True, False, 1)


def test_interrupt_outside_the_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gdn, "unavailable_backends", interrupted)
    result = gdn_command("verify", *SMALL)
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"


# ---- gdn info ----


def test_info() -> None:
    result = gdn_command("info")
    assert result.exit_code == 0, result.exception
    facts = dict(re.split(r"  +", line, maxsplit=1) for line in result.stdout.splitlines())
    assert facts["gdn"] == gdn.__version__
    assert facts["backend numpy"] == "available"
    assert facts["head sizes"] == "multiples of 8 up to 256"
    assert {"Python", "NumPy", "ml_dtypes", "CuPy", "CUDA", "C++ compiler"} < set(facts)
    assert {"gdn cache", "CuPy cache", "ready kernels"} < set(facts)


def test_info_as_json(tmp_path: Path) -> None:
    ours, shipped = tmp_path / "ours", tmp_path / "shipped"
    for folder in (ours, shipped):
        folder.mkdir()
    (ours / "entry").write_bytes(bytes(3000))
    (shipped / "a.kernel").touch()
    caches = {"GDN_CACHE_DIR": str(ours), "CUPY_CACHE_DIR": str(tmp_path / "none")}
    result = gdn_command("info", "--json", GDN_KERNEL_DIR=str(shipped), **caches)
    facts = json.loads(result.stdout)
    assert facts["ready_kernels"] == {str(shipped): 1, str(ours): 0}
    assert facts["caches"] == {
        "gdn": {"path": str(ours), "bytes": 3000},
        "cupy": {"path": str(tmp_path / "none"), "bytes": 0},
    }
    assert list(facts["backends"]) == ["cuda", "host", "numpy"]
    assert facts["limits"]["types"] == ["float32", "float16", "bfloat16"]


def test_info_without_cupy() -> None:
    done = script(
        "import sys\n"
        "sys.modules['cupy'] = None\n"  # makes every import of it fail
        "from gdn.cli.main import main\n"
        "main(['info'])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert re.search(r"^CuPy +cannot be imported \(", done.stdout, re.MULTILINE)
    assert re.search(r"^CUDA +driver none, runtime none, nvrtc none$", done.stdout, re.MULTILINE)
    assert re.search(r"^backend cuda +not here: CuPy cannot be imported", done.stdout, re.MULTILINE)


@pytest.fixture
def fresh_cuda_probe() -> Iterator[None]:
    """The probe for CUDA keeps its answer; a CuPy of the test's own must leave none."""
    cuda.unavailable_reason.cache_clear()
    yield
    cuda.unavailable_reason.cache_clear()


def fail(*arguments: Any) -> Any:
    raise RuntimeError("cudaErrorUnknown: unknown error\nat some place")


@pytest.mark.usefixtures("fresh_cuda_probe")
def test_info_where_cuda_fails_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside field cases 86-88: a CuPy that is there, and a driver that answers with errors alone: one line."""
    runtime = SimpleNamespace(driverGetVersion=fail, runtimeGetVersion=fail, getDeviceCount=fail)
    cupy = SimpleNamespace(__version__="0", is_available=fail, cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    result = gdn_command("info")
    assert result.exit_code == 0, result.exception
    assert re.search(r"^backend cuda +not here: .*cudaErrorUnknown", result.stdout, re.MULTILINE)
    assert re.search(r"^GPU +none$", result.stdout, re.MULTILINE)


@pytest.mark.usefixtures("fresh_cuda_probe")
def test_info_describes_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {
        "name": b"A GPU",
        "major": 9,
        "minor": 0,
        "totalGlobalMem": 80 * 2**30,
        "multiProcessorCount": 132,
        "l2CacheSize": 50 * 2**20,
    }
    runtime = SimpleNamespace(
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 12090,
        getDeviceCount=lambda: 2,
        getDeviceProperties=lambda idx: properties if idx == 0 else fail(),
    )
    cupy = SimpleNamespace(__version__="14.2", is_available=lambda: True, cuda=SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    lines = gdn_command("info").stdout.splitlines()
    described = "A GPU, compute capability 9.0, 80.0 GiB, 132 multiprocessors, 50.0 MiB L2"
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("GPU ")] == [described, "does not answer"]
    assert any(line.startswith("CUDA") and "driver 13.0, runtime 12.9" in line for line in lines)
