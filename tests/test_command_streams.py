"""The commands with streams and files that fail them: full disks, closed pipes, ASCII alone, 40 columns, signals."""

from __future__ import annotations

import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import gdn
from gdn.backends import host, nvrtc
from gdn.cli import bench as bench_module
from gdn.cli import compile as compile_module
from gdn.cli import report
from gdn.cli.files import save_text
from gdn.cli.main import main
from gdn.cli.report import Column
from gdn.errors import DeviceError

ROOT = Path(gdn.__file__).parents[1]
VERIFY = ("verify", "--backend", "numpy", "--case", "empty_sequences")
SOAK = ("soak", "--backend", "numpy", "--checkpoint", "8", "--steps", "40")
BENCH = ("bench", "--backend", "numpy", "--heads", "1,2", "--head-dims", "8,8", "--warm", "--repeats", "3")
QUICK_BENCH = (*BENCH, "decode", "step", "--batch", "2", "--accept", "0.5", "--state-dtype", "bfloat16")
HEADS = ("--heads", "1,2", "--head-dims", "16,16", "--state-dtype", "float32")
COMPILE = ("compile", *HEADS, "--arch", "sm_90", "--ops", "gated_delta_state_fold,pending_windows")


def _has_nvrtc() -> bool:
    try:
        nvrtc.version()
    except DeviceError:
        return False
    return True


#: A run of every command, of which two are for machines that have what they need.
COMMANDS = [("info",), VERIFY, SOAK, QUICK_BENCH, *([COMPILE] if _has_nvrtc() else [])]


def gdn_command(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments, prog_name="gdn")


# ---- Streams that fail, narrow ones, and those with few letters ----

#: Runs commands one after the other, each with the streams that it is given, and prints what came of it.
RUN_ALL = """
import json, os, sys
from gdn.bench.cpu import CpuMachine
from gdn.bench.traffic import Ceilings
from gdn.cli import report
from gdn.cli.main import main

CpuMachine.measure_ceilings = lambda self: Ceilings(1.0, 1.0)  # which takes longest
results, folder = os.dup(1), sys.argv[1]
report._SECONDS_BETWEEN_LINES = 0  # as in a run that takes long

def opened(kind, name):
    if kind == "file":
        return os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    if kind == "full":
        return os.open("/dev/full", os.O_WRONLY)
    reading_end, writing_end = os.pipe()
    os.close(reading_end)
    return writing_end

def content(name):
    with open(os.path.join(folder, name), "rb") as file:
        return file.read().decode()

found = []
for out, err, arguments in json.loads(sys.argv[2]):
    for kind, number in ((out, 1), (err, 2)):
        opened_here = opened(kind, str(number))
        os.dup2(opened_here, number)
        os.close(opened_here)
    try:
        main(arguments, prog_name="gdn")
    except SystemExit as end:
        found.append([end.code, content("1") if out == "file" else "", content("2") if err == "file" else ""])
os.write(results, json.dumps(found).encode())
"""


def run_all(folder: Path, runs: list[tuple[str, str, tuple[str, ...]]], **environment: str) -> list[Any]:
    """(exit code, standard output, standard error) of each run, a run being (kind of each stream, arguments)."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, str(folder), json.dumps(runs)],
        cwd=ROOT,
        env={**kept, "GDN_CACHE_DIR": str(folder / "cäche ☃"), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    assert len(found) == len(runs)
    return found


def test_output_that_fails(tmp_path: Path) -> None:
    """A full disk is one line and 1, a closed pipe nothing and 141; what is to be saved is; progress is not needed."""
    saved = tmp_path / "full.json", tmp_path / "closed.json"
    runs = [("full", "file", arguments) for arguments in (("verify", "--help"), ("info", "--json"), *COMMANDS)]
    runs += [(kind, "file", (option,)) for kind in ("full", "closed") for option in ("--help", "--version")]
    runs += [("full", "file", (*QUICK_BENCH, "--json", "--save", str(saved[0])))]
    runs += [("closed", "file", (*QUICK_BENCH, "--json", "--save", str(saved[1])))]
    runs += [("file", kind, (*VERIFY, "--json")) for kind in ("full", "closed")]
    found = run_all(tmp_path, runs)
    line = "Error: cannot write the output: No space left on device\n"
    for (out, _, arguments), (code, _, errors) in zip(runs[:-2], found, strict=False):
        ending = errors[errors.find("Error") :] if "Error" in errors else ""
        expected = (1, line) if out == "full" else (141, "")
        assert (code, ending) == expected, arguments
        assert errors.replace(line, "").count("\n") == errors.count(" done in "), errors  # and the progress
    for path in saved:
        assert len(json.loads(path.read_text())["rows"]) == 7
    for code, output, _ in found[-2:]:
        assert (code, json.loads(output)["passed"]) == (0, True)


#: A row of a table as narrow as that, whose numbers are in one line.
WHOLE_ROWS = {
    "soak": r"separate +2 +10 +ok",
    "bench": r"decode +B=2 +numpy +\d+\.\d +\d+\.\d copy",
    "compile": r"gated_delta\w* +sm_90 +\d+ +\d+",
}


def test_ascii_alone_in_forty_columns(tmp_path: Path) -> None:
    """Lines fit, no number is broken over two of them, and letters that the stream lacks are spelt out."""
    failing = (*VERIFY[:-1], "Übung")
    runs = [("file", "file", arguments) for arguments in (*COMMANDS, ("verify", "--list"), failing)]
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    found = run_all(tmp_path, runs, COLUMNS="40", **locale)
    for (_, _, arguments), (code, output, errors) in zip(runs[:-1], found, strict=False):
        assert (code, output.isascii(), errors.isascii()) == (0, True, True), errors
        lines = output.splitlines()
        assert [line for line in lines if len(line) > 40 or line != line.rstrip()] == []
        row = WHOLE_ROWS.get(arguments[0], ".*")
        assert any(re.fullmatch(row, line) for line in lines), output
    assert "c\\udcc3\\udca4" in re.sub(r"\s", "", found[0][1])  # of the cache's folder, in a locale without it
    assert (found[-1][0], found[-1][1]) == (2, "")
    assert "unknown case" in found[-1][2]


def test_numbers_of_a_table_stay_whole_where_words_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    columns = [Column("what"), *(Column(name, right=True) for name in "abcd")]
    report.print_table(report.output(), columns, [("accept separate", "1234.5678", "12.345", "123.4567", "1")])
    row = capsys.readouterr().out.splitlines()[2]
    assert row.split()[1:] == ["1234.5678", "12.345", "123.4567", "1"]


def test_streams_that_were_closed_from_the_start(tmp_path: Path) -> None:
    """Standard input too, while a compiler runs, whose pipes then have the numbers of these streams."""
    backend = "numpy" if host.unavailable_reason() is not None else "host"
    done = subprocess.run(
        [
            "sh",
            "-c",
            '"$0" -m gdn verify "$@" <&- >&- 2>&-',
            sys.executable,
            "--backend",
            backend,
            "--case",
            "gates_of_one",
        ],
        cwd=ROOT,
        env={**os.environ, "GDN_CACHE_DIR": str(tmp_path / "cache")},
        check=False,
        timeout=120,
    )
    assert done.returncode == 0
    assert (tmp_path / "cache").exists() == (backend == "host")


# ---- Signals ----


@pytest.fixture
def terminal() -> Iterator[tuple[bytearray, int]]:
    """What a pseudo-terminal shows, read as it comes so that nobody waits, and the end to write to."""
    ours, theirs = os.openpty()
    shown = bytearray()

    def read() -> None:
        with suppress(OSError):  # nobody has the other end open any more
            while True:
                shown.extend(os.read(ours, 4096))

    reader = threading.Thread(target=read)
    reader.start()
    yield shown, theirs
    reader.join(60)
    os.close(ours)


ALL_BATCHES = ",".join(map(str, range(1, 65)))
INTERRUPTED = {
    "bench": (signal.SIGTERM, (*BENCH, "decode", "verify", "--batch", ALL_BATCHES), "rows"),
    "soak": (signal.SIGTERM, (*SOAK[:-1], "1000000"), "checkpoints"),
    "compile": (
        signal.SIGINT,
        ("compile", *HEADS, "--ops", "gated_delta_state_fold,gated_delta_conv1d_fwd"),
        "kernels",
    ),
}


@pytest.mark.parametrize("command", INTERRUPTED)
def test_a_signal_from_outside_leaves_what_is_finished(
    command: str, terminal: tuple[bytearray, int], tmp_path: Path
) -> None:
    """As JSON on standard output and in the file, with exit code 130; a time limit sends SIGTERM, Ctrl-C is SIGINT."""
    if command == "compile" and not _has_nvrtc():
        pytest.skip("no NVRTC")
    number, arguments, finished = INTERRUPTED[command]
    shown, theirs = terminal
    saved = tmp_path / "saved.json"
    keep = () if command == "soak" else ("--save", str(saved))
    # A shell that started this in the background may have left Ctrl-C ignored, which a new process takes over.
    text = "import signal, sys; signal.signal(2, signal.default_int_handler); from gdn.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", text, *arguments, "--json", *keep],
        cwd=ROOT,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "GDN_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=theirs,
    )
    os.close(theirs)
    deadline = time.monotonic() + 60
    while not re.search(rb"[1-9]\d*/\d\d+", shown) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    document = json.loads(output)
    assert process.returncode == 130, bytes(shown)
    assert (document["interrupted"], document["passed"]) == (True, False)
    assert document[finished]
    if keep:
        assert json.loads(saved.read_text(encoding="ascii")) == document
    assert b"Traceback" not in shown


# ---- Usage, and files that cannot be written ----


@pytest.mark.parametrize("command", ["verify", "soak", "bench", "compile", "info"])
def test_a_mistake_in_the_usage_leaves_standard_output_empty(command: str) -> None:
    """With --json too; a name that is nearly right is found."""
    result = gdn_command(command, "--json", "--jsn")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Did you mean" in result.stderr
    assert "--json" in result.stderr.partition("Did you mean")[2]


UNWRITABLE: dict[str, tuple[str, str]] = {
    "a folder": ("folder", "is a directory"),
    "no name": ("", "it is a folder"),
    "in no folder": ("missing/saved.json", "no folder "),
    "in a file": ("file/saved.json", "no folder "),
    "a link to nowhere": ("link", "no folder "),
    "a name too long": ("x" * 300, "File name too long"),
}


@pytest.mark.parametrize("option", ["bench --save", "bench --plot", "compile --save"])
@pytest.mark.parametrize("path", UNWRITABLE)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    option: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "missing" / "saved.json")
    before = sorted(tmp_path.iterdir())
    for module in (bench_module, compile_module):
        monkeypatch.setattr(module.report, "progress", None)
    name, message = UNWRITABLE[path]
    command, _, file_option = option.partition(" ")
    words = {"bench": BENCH, "compile": COMPILE}[command]
    result = gdn_command(*words, file_option, str(tmp_path / name) if name else "")
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.replace("\n", " ")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
@pytest.mark.parametrize("name", ["read-only", "folder/new"])
def test_what_this_user_may_not_write_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "read-only").touch(0o400)
    (tmp_path / "folder").mkdir(0o500)
    result = gdn_command(*BENCH, "--save", str(tmp_path / name))
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Permission denied" in result.stderr or "not writable" in result.stderr


def test_a_saved_file_is_whole_or_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fills up while a run is saved leaves the run that was saved before."""
    target = tmp_path / "saved.json"
    save_text(target, "the first")
    write_text = Path.write_text

    def half(self: Path, text: str, **keywords: Any) -> int:
        write_text(self, text[: len(text) // 2], **keywords)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        for path in (target, tmp_path / "new.json"):
            with pytest.raises(click.ClickException, match=f"^cannot write {path}: No space left on device$"):
                save_text(path, "the second")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the first"]


def test_saving_keeps_permissions_links_and_streams(tmp_path: Path) -> None:
    """As if the file were written in place: of a new one the permissions of any other new one."""
    target, link = tmp_path / "saved.json", tmp_path / "link"
    save_text(target, "new")
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(target.stat().st_mode) == stat.S_IMODE((tmp_path / "plain").stat().st_mode)
    target.chmod(0o640)
    link.symlink_to(target)
    save_text(link, "through a link")
    assert (link.is_symlink(), target.read_text(), stat.S_IMODE(target.stat().st_mode)) == (
        True,
        "through a link",
        0o640,
    )
    save_text(Path(os.devnull), "nowhere")
    assert stat.S_ISCHR(os.stat(os.devnull).st_mode)


def test_a_file_in_a_folder_that_takes_no_other_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "saved.json"
    target.write_text("before")
    inode = target.stat().st_ino
    access: Callable[[Any, int], bool] = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path and access(path, mode))
    save_text(target, "after")
    assert (target.read_text(), target.stat().st_ino) == ("after", inode)


@pytest.mark.usefixtures("same_everywhere")
def test_results_are_shown_even_where_they_cannot_be_saved() -> None:
    result = gdn_command(*QUICK_BENCH, "--json", "--save", "/dev/full")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["rows"]) == 7
    assert result.stderr == "Error: cannot write /dev/full: No space left on device\n"
