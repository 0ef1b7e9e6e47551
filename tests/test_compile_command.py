"""`gdn compile`: what it writes and says, what it refuses, and that ops run from what it wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import BashComplete
from click.testing import CliRunner, Result

import gdn
from gdn.backends import ahead, binaries, cuda, nvrtc, pending_windows
from gdn.backends.ahead import Built
from gdn.backends.launch import Kernel, Variant
from gdn.backends.nvrtc import Binary, CompileReport
from gdn.cli.compile_results import CompileRun, summary
from gdn.cli.main import main
from gdn.errors import DeviceError, GdnError
from gdn.geometry import HeadGeometry
from gdn.variants import Layer, uses

ROOT = Path(gdn.__file__).parents[1]
HEADS = ("--heads", "1,2", "--head-dims", "16,16")
SMALL = (*HEADS, "--state-dtype", "float32", "--arch", "sm_90", "--ops", "gated_delta_state_fold,pending_windows")
PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
LAYER = Layer(HeadGeometry(1, 2, 16, 16), ring_lens=(8,))


def _no_nvrtc() -> str | None:
    try:
        nvrtc.version()
    except DeviceError as error:
        return str(error)
    return None


needs_nvrtc = pytest.mark.skipif(_no_nvrtc() is not None, reason=str(_no_nvrtc()))


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the caller's terminal wants must not reach these tests, nor these tests the caller's cache."""
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "GDN_KERNEL_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "cache"))


def gdn_compile(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("compile", *arguments))


def document(*arguments: str) -> Any:
    result = gdn_compile(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def wanted(*ops: str) -> list[Variant]:
    return list(dict.fromkeys(use.variant for use in uses(LAYER, ops)))


# ---- What it writes and says ----


@needs_nvrtc
def test_numbers_are_those_of_the_assembler(tmp_path: Path) -> None:
    result = gdn_compile(*SMALL, "--out", str(tmp_path / "out"), "--save", str(tmp_path / "saved.json"))
    assert result.exit_code == 0, result.output
    saved = json.loads((tmp_path / "saved.json").read_text(encoding="ascii"))
    variants = wanted("gated_delta_state_fold", "pending_windows")
    assert [kernel["macros"] for kernel in saved["kernels"]] == [dict(variant.macros) for variant in variants]
    table = [line for line in result.stdout.splitlines() if " sm_90 " in line]
    for variant, kernel, line in zip(variants, saved["kernels"], table, strict=True):
        report = nvrtc.compile_report(variant, "sm_90")
        names = ("registers", "shared_bytes", "stack_bytes", "spill_bytes")
        assert [kernel[name] for name in names] == [getattr(report, name) for name in names]
        shared = report.shared_bytes + variant.launch_shared_bytes
        shown = [report.registers, shared, report.stack_bytes, report.spill_bytes]
        assert line.split()[-4:] == [str(number) for number in shown]
        assert line.startswith(f"{variant.kernel.stem} ")
    assert result.stdout.splitlines()[-1].startswith(f"all right: {len(variants)} kernels of ")
    assert f"in {tmp_path / 'out'}, {len(variants)} compiled in " in result.stdout


@needs_nvrtc
def test_shared_memory_that_launches_ask_for_is_shown(tmp_path: Path) -> None:
    arguments = (*HEADS, "--arch", "sm_90", "--ops", "gated_delta_recurrence_fwd", "--state-dtype", "float32")
    kernels = document(*arguments)["kernels"]
    assert any(kernel["launch_shared_bytes"] > 4096 for kernel in kernels)
    lines = gdn_compile(*arguments).stdout.splitlines()
    for kernel in kernels:
        shared = str(kernel["shared_bytes"] + kernel["launch_shared_bytes"])
        assert any(line.split()[-3:] == [shared, "0", "0"] for line in lines)


@needs_nvrtc
def test_what_is_there_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "out"))
    first = document(*SMALL, *out)
    assert first["num_compiled"] == first["num_kernels"] == len(first["kernels"])
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "compile_binary", None)
        second = document(*SMALL, *out)
    assert second["num_compiled"] == 0
    for kernel in (*first["kernels"], *second["kernels"]):
        del kernel["compiled"]
    assert second["kernels"] == first["kernels"]
    assert second["bytes"] == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())

    damaged, other_version = (tmp_path / "out" / kernel["file"] for kernel in first["kernels"][:2])
    damaged.write_bytes(damaged.read_bytes()[:100])
    variant = wanted("gated_delta_state_fold")[1]
    binaries.write(tmp_path / "out", variant, "sm_90", Binary(b"", CompileReport(1, 0, 0, 0), "11.0"))
    third = document(*SMALL, *out)
    rebuilt = [kernel.pop("file") for kernel in third["kernels"] if kernel.pop("compiled")]
    assert rebuilt == [damaged.name, other_version.name]
    assert binaries.read(tmp_path / "out", variant, "sm_90") == nvrtc.compile_binary(variant, "sm_90")


@needs_nvrtc
def test_a_folder_with_spaces_and_letters_beyond_ascii(tmp_path: Path) -> None:
    """Beside field cases 77, 89: kernels compiled into such a folder in the C locale, and read from it in another."""
    folder = tmp_path / "Kerne für ß"
    arguments = (*SMALL[:-1], "pending_windows", "--out", str(folder))
    done = subprocess.run(
        [sys.executable, "-m", "gdn", "compile", *arguments],
        env={**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b""), done.stderr
    assert b"1 kernel of " in done.stdout
    assert binaries.read(folder, pending_windows.VARIANT, "sm_90") is not None


@needs_nvrtc
def test_without_a_folder_the_cache_is_used(tmp_path: Path) -> None:
    seen = document(*HEADS, "--arch", "sm_80,sm_90", "--ops", "pending_windows", "--workers", "1")
    assert seen["folder"] == str(tmp_path / "cache")
    assert [kernel["architecture"] for kernel in seen["kernels"]] == ["sm_80", "sm_90"]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (found, *_) = binaries.find(pending_windows.VARIANT, (8, 9))
    assert found == nvrtc.compile_binary(pending_windows.VARIANT, "sm_80")


@needs_nvrtc
def test_processes_that_start_together_share_a_folder(tmp_path: Path) -> None:
    """Field case 81: all succeed, each file is whole, and no other is left."""
    command = [sys.executable, "-m", "gdn", "compile", *HEADS, "--arch", "sm_90", "--ops", "pending_windows", "--json"]
    start = [subprocess.Popen([*command, "--out", str(tmp_path / "out")], cwd=ROOT, **PIPES) for _ in range(3)]
    files = set()
    for process in start:
        printed, errors = process.communicate(timeout=120)
        assert (process.returncode, errors) == (0, "")
        files |= {kernel["file"] for kernel in json.loads(printed)["kernels"]}
    assert [path.name for path in (tmp_path / "out").iterdir()] == list(files)
    found = binaries.read(tmp_path / "out", pending_windows.VARIANT, "sm_90")
    assert found == nvrtc.compile_binary(pending_windows.VARIANT, "sm_90")


@needs_nvrtc
def test_a_disk_that_fills_up_halfway_keeps_what_is_finished(
    full_disk: Callable[[], AbstractContextManager[None]], tmp_path: Path
) -> None:
    """The report has it, on the terminal, as JSON and saved; the next run goes on from there."""
    options = (*HEADS, "--state-dtype", "float32", "--arch", "sm_90", "--out", str(tmp_path / "out"))
    (kernel,) = document(*options, "--ops", "pending_windows")["kernels"]
    reason = f"out: expected a folder that can be written, got {tmp_path / 'out'}: No space left on device"
    options = (*options, "--ops", "pending_windows,gated_delta_state_fold", "--save", str(tmp_path / "saved.json"))
    with full_disk():
        result = gdn_compile(*options, "--json")
        lines = gdn_compile(*options).stdout.splitlines()
    seen = json.loads(result.stdout)
    assert (result.exit_code, seen["passed"], seen["error"]) == (1, False, reason)
    assert [kernel["file"] for kernel in seen["kernels"]] == [kernel["file"]]
    assert lines[-2] == reason
    assert re.match(r"FAILED: 1 kernel of .* \(2 not reached\), 0 compiled in ", lines[-1])
    assert [path.name for path in (tmp_path / "out").iterdir()] == [kernel["file"]]
    assert json.loads((tmp_path / "saved.json").read_text(encoding="ascii"))["error"] == reason
    assert document(*options)["num_compiled"] == 2


def test_options_make_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "version", lambda: "12.9")
    monkeypatch.setattr(nvrtc, "architectures", lambda: ("sm_75", "sm_80", "sm_90", "sm_120"))
    monkeypatch.setattr(ahead, "build", lambda *arguments: (built for built in ()))
    models = ("--model", "qwen3.5-27b", "--model", "olmo-hybrid-7b", "--float32-out", "--ops", "pending_windows")
    ring = "--ring-lens", "4,8", "--ring-lens", "8,16", "--ring-dtype", "bfloat16"
    seen = document(*models, *ring, "--work-dtype", "float16")
    assert len(seen["layers"]) == 2 * 2 * 2
    assert {tuple(layer["ring_lens"]) for layer in seen["layers"]} == {(4, 8, 16)}
    assert {layer["work_dtype"] for layer in seen["layers"]} == {"float16"}
    assert {layer["state_dtype"] for layer in seen["layers"]} == {"float32", "bfloat16"}
    assert {layer["out_dtype"] for layer in seen["layers"]} == {None, "float32"}
    assert {layer["ring_dtype"] for layer in seen["layers"]} == {"bfloat16"}
    assert {layer["heads"]["num_value_heads"] for layer in seen["layers"]} == {48, 30}
    assert document("--arch", "sm_80", "--ops", "pending_windows")["architectures"] == ["sm_80"]


def test_calls_of_several_models_are_told_apart() -> None:
    run = CompileRun(("sm_90",), Path())
    layers = [Layer(HeadGeometry(2, heads, 16, 16), ring_lens=(8,)) for heads in (4, 8)]
    run.add_uses(layers, ["gated_delta_state_fold", "pending_windows"])
    assert run.uses[pending_windows.VARIANT] == [("", "2,4 heads: any batch"), ("", "2,8 heads: any batch")]
    run = CompileRun(("sm_90",), Path())
    run.add_uses([layers[0], layers[0]], ["pending_windows"])
    assert run.uses[pending_windows.VARIANT] == [("", "any batch")]


def test_the_last_line_says_whether_any_spills() -> None:
    def built(spill_bytes: int) -> Built:
        report = CompileReport(32, spill_bytes, 0, 0)
        return Built(Variant(Kernel("a", ()), ()), "sm_90", report, Path("a"), 512, is_new=True)

    run = CompileRun(("sm_90",), Path("folder"), built=[built(0)], seconds=2.0)
    assert summary(run) == "all right: 1 kernel of 512 B in folder, 1 compiled in 2.0 s, none spills"
    run.built.append(built(8))
    assert summary(run) == "all right: 2 kernels of 1.0 KiB in folder, 2 compiled in 2.0 s, 1 spills registers"
    run.built.append(built(8))
    assert summary(run).endswith("2 spill registers")
    assert run.exit_code == 0


@needs_nvrtc
def test_interrupt_keeps_the_finished_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = ahead.build

    def interrupted(*arguments: Any) -> Iterator[Built]:
        yield next(right(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(ahead, "build", interrupted)
    result = gdn_compile(*SMALL, "--workers", "1", "--json", "--save", str(tmp_path / "saved.json"))
    assert result.exit_code == 130
    seen = json.loads(result.stdout)
    assert (seen["interrupted"], seen["num_kernels"]) == (True, 1)
    assert json.loads((tmp_path / "saved.json").read_text(encoding="ascii")) == seen
    result = gdn_compile(*SMALL)
    assert result.exit_code == 130
    assert result.stdout.splitlines()[-1].startswith("INTERRUPTED: 1 kernel of ")
    assert " not reached), " in result.stdout


@needs_nvrtc
def test_what_was_not_begun_is_dropped(tmp_path: Path) -> None:
    results = ahead.build(wanted("gated_delta_recurrence_fwd"), ("sm_80", "sm_90"), ahead.open_folder(tmp_path), 1)
    next(results)
    results.close()
    assert 1 <= len(list(tmp_path.iterdir())) <= 3


# ---- What it refuses ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "hopper"), "unknown architecture 'hopper'"),
        (("--arch", "sm_90,"), "unknown architecture ''"),
        (("--ops", "gated_delta_gate"), "did you mean gated_delta_gates, "),
        (("--model", "qwen"), "unknown model 'qwen'"),
        (("--save", "/no/such/folder/file"), "no folder /no/such/folder to write file to"),
    ],
)
def test_a_mistake_in_the_usage(arguments: tuple[str, ...], message: str) -> None:
    result = gdn_compile(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@needs_nvrtc
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arch", "sm_90,sm_75"), "Error: arch: expected one of sm_80, "),
        (("--arch", "sm_999"), ", got sm_999\n"),
        (("--head-dims", "12,8"), "Error: key_head_dim: expected a multiple of 8"),
        (("--ring-lens", "8,65"), "Error: ring: expected RING_LEN from 1 to 64"),
        (("--gate-dtype", "float16"), "Error: decay_per_token: expected float32 or bfloat16, got float16\n"),
    ],
)
def test_a_refusal_comes_before_anything_is_compiled(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "build", None)
    result = gdn_compile(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@needs_nvrtc
def test_a_folder_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    result = gdn_compile(*SMALL, "--out", str(folder))
    assert result.exit_code == 2
    assert result.stderr == f"Error: out: expected a folder that can be written, got {folder}: Not a directory\n"

    def refuse(*arguments: Any) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(binaries, "write", refuse)
    with pytest.raises(GdnError, match=r"got .*: No space left on device"):
        list(ahead.build([pending_windows.VARIANT], ("sm_90",), ahead.open_folder(tmp_path / "out")))


def test_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside field cases 86-88: what compiles ahead of time has no CuPy to do it with: one clear line."""
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    monkeypatch.setitem(sys.modules, "cupy", None)
    result = gdn_compile(*SMALL)
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: NVRTC: expected CuPy with NVRTC to compile kernels (install gdn[cuda12]")


def test_architectures_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "architectures", lambda: ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100"))
    monkeypatch.setattr(cuda, "served_capabilities", lambda: ())
    assert ahead.choose_architectures([]) == ("sm_80", "sm_90", "sm_100")
    monkeypatch.setattr(cuda, "served_capabilities", lambda: ((9, 0), (8, 9), (9, 0)))
    assert ahead.choose_architectures([]) == ("sm_90", "sm_86")
    assert ahead.choose_architectures(["sm_80", "sm_80"]) == ("sm_80",)


def test_completion_of_lists() -> None:
    complete = BashComplete(main, {}, "gdn", "_GDN_COMPLETE")
    found = [item.value for item in complete.get_completions(["compile", "--arch"], "sm_80,sm_1")]
    assert found == ["sm_80,sm_100", "sm_80,sm_120"]


# ---- On a GPU ----

CALLS = """
import hashlib, sys
import cupy, numpy as np
import gdn.ops
from gdn.speculative import PendingWindows

if sys.argv[1] == "ready":
    whole = cupy.RawModule
    def of_file(*, path):
        return whole(path=path)
    cupy.RawModule = of_file  # the source of a kernel is refused

random = np.random.default_rng(0)
def array(*shape, dtype=np.float32):
    return cupy.asarray(random.uniform(0.1, 0.9, shape).astype(dtype))
def table(*values):
    return cupy.asarray(np.array(values, np.uint32))
def show(name, *arrays):
    print(name, *(hashlib.sha256(each.get().tobytes()).hexdigest()[:16] for each in arrays))

heads, dim, channels = 4, 64, 2 * 2 * 64 + 4 * 64
pool, ring = array(3, heads, dim, dim), array(6, 2, 8, 200)
decay, beta = gdn.ops.gated_delta_gates(*(array(48, heads) for _ in range(2)), *(array(heads) for _ in range(2)))
show("gates", decay, beta)
slots = table(0, 1, 2)
weight, windows = array(channels, 4), array(3, channels, 3)
for tokens in (1, 4, 6, 16):
    batch = windows, slots, table(*range(0, 3 * tokens + 1, tokens))
    qkv = array(3 * tokens, channels)
    show("conv", gdn.ops.gated_delta_conv1d_fwd(qkv, weight, *batch, activation="silu"), windows)
    gdn.ops.gated_delta_conv1d_commit(qkv, *batch, slots)
    show("commit", windows)
for tokens in (1, 4, 16):
    rows = 3 * tokens
    qkv, offsets = array(rows, channels), table(*range(0, rows + 1, tokens))
    six = qkv, decay[:rows], beta[:rows], pool, slots, offsets
    out = gdn.ops.gated_delta_recurrence_fwd(*six)
    show(f"fwd of {tokens}", out, pool)
    out = gdn.ops.gated_delta_recurrence_verify_ring(*six, ring, slots)
    show(f"verify of {tokens}", out, pool, ring)
    if tokens <= 8:
        gdn.ops.gated_delta_state_fold(pool, slots[None], ring, slots[None], table(tokens, 1, 0))
        show(f"fold of {tokens}", pool)
windows = PendingWindows(cupy.asarray(np.arange(6, dtype=np.uint32).reshape(2, 1, 3)), 8)
windows.begin(table(0, 2, 4, 6))
six = array(6, channels), decay[:6], beta[:6], pool, slots, table(0, 2, 4, 6)
pending = {"pending_ring_slot_idx": windows.pending_ring_slot_idx[0], "num_pending": table(3, 0, 2)}
out = gdn.ops.gated_delta_recurrence_verify_ring(*six, ring, table(3, 4, 5), **pending)
show("fused", out, pool, ring, windows.ring_slot_idx)
"""


@pytest.mark.gpu
def test_ops_run_from_a_folder_with_the_bits_of_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def output(mode: str) -> str:
        command = [sys.executable, "-c", CALLS, mode]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "cupy"))
    compiled = output("compiled")
    types = ("--work-dtype", "float32", "--state-dtype", "float32")
    built = document("--heads", "2,4", "--head-dims", "64,64", *types, "--out", str(tmp_path / "shipped"))
    assert built["num_compiled"] == built["num_kernels"]
    monkeypatch.setenv("GDN_KERNEL_DIR", str(tmp_path / "shipped"))
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "another"))
    assert output("ready") == compiled
    assert compiled.count("\n") == 18
