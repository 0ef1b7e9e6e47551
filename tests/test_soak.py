"""`gdn soak`: it finds what goes wrong slowly; and what takes hours, with the option --soak."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import gdn
from gdn.backends import numpy as numpy_backend
from gdn.cli import soak as soak_module
from gdn.cli.main import main
from gdn.testing.ring_device import Device
from gdn.testing.soak import FORMS, Checkpoint, Growth, SoakCase, growth, soak

ROOT = Path(gdn.__file__).parents[1]
SMALL = ("--backend", "numpy", "--checkpoint", "8", "--steps", "40")


def gdn_soak(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["soak", *arguments], prog_name="gdn", env={"COLUMNS": "200"})


def failures_of(case: SoakCase, backend: str, num_steps: int) -> list[str]:
    return [failure for checkpoint in soak(case, backend, num_steps) for failure in checkpoint.failures]


# ---- What it runs ----


@pytest.mark.parametrize("rows", [1, 5])
def test_a_right_loop(backend: str, rows: int) -> None:
    case = SoakCase(num_rows=rows, num_layers=3, ring_len=3, steps_to_checkpoint=10, seed=rows)
    checkpoints = list(soak(case, backend, 65))
    assert [checkpoint.failures for checkpoint in checkpoints] == [()] * 7
    assert [checkpoint.num_steps for checkpoint in checkpoints] == [10, 20, 30, 40, 50, 60, 65]
    assert [checkpoint.form for checkpoint in checkpoints] == [*FORMS, *FORMS, FORMS[0]]
    # States (2), a slot of nobody, and readouts (2) where a token was accepted, as it always was here.
    assert {len(checkpoint.comparisons) for checkpoint in checkpoints} == {5}


def test_windows_of_every_kind_are_drawn() -> None:
    """Else the checkpoints say less than they seem to."""
    from gdn.testing.soak import _draw

    case = SoakCase(ring_len=4)
    stretch = _draw(case, np.random.default_rng(0), 2000)
    assert set(stretch.lengths.flat) == {0, 1, 2, 3, 4, 5}
    fits = (stretch.lengths <= 4) & (stretch.lengths > 0) & ~stretch.is_padding
    for length in (1, 2, 3, 4):
        assert set(stretch.accepted[fits & (stretch.lengths == length)]) == set(range(length + 1))
    assert (stretch.accepted[(stretch.lengths == 5) & ~stretch.is_padding] == 5).all()
    assert 0 < stretch.is_padding.mean() < 0.1
    assert not stretch.accepted[stretch.is_padding].any()


def test_two_seeds_are_two_loops() -> None:
    first, again, other = (list(soak(SoakCase(steps_to_checkpoint=5, seed=seed), "numpy", 5)) for seed in (1, 1, 2))
    assert first[0].num_tokens == again[0].num_tokens
    assert first[0].num_tokens != other[0].num_tokens


# ---- What it finds ----


def test_a_record_that_goes_lost_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = numpy_backend._fold_slot, []

    def forgetful(heads: Any, pool: Any, slot: int, records: Any) -> None:
        calls.append(slot)
        right(heads, pool, slot, records[:, :-1] if len(calls) % 50 == 0 else records)

    monkeypatch.setattr(numpy_backend, "_fold_slot", forgetful)
    assert any("states against one plain call" in failure for failure in failures_of(SoakCase(), "numpy", 60))


def test_a_count_of_pending_records_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_backend.pending_windows

    def off_by_one(step: Any, tables: Any, ring_len: int, *, is_lazy: bool) -> None:
        right(step, tables, ring_len, is_lazy=is_lazy)
        if step.num_accepted is not None and is_lazy:
            counts = tables[3].array
            counts[counts == ring_len] -= 1

    monkeypatch.setattr(numpy_backend, "pending_windows", off_by_one)
    case = SoakCase(steps_to_checkpoint=20)
    assert [bool(checkpoint.failures) for checkpoint in soak(case, "numpy", 60)] == [False, False, True]


def test_a_wrong_bit_in_one_accepted_readout(monkeypatch: pytest.MonkeyPatch) -> None:
    right, calls = numpy_backend.gated_delta_recurrence_verify_ring, []

    def wrong_once(inputs: Any, out: Any) -> None:
        right(inputs, out)
        calls.append(out)
        if len(calls) == 30:
            out.array.view(np.uint16)[...] ^= 1

    monkeypatch.setattr(numpy_backend, "gated_delta_recurrence_verify_ring", wrong_once)
    failures = failures_of(SoakCase(), "numpy", 40)
    assert any("accepted readouts against one plain call" in failure for failure in failures)


def test_nan_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two arrays that are NaN in the same places are equal to the bit, and no less wrong."""
    right = numpy_backend._run_token

    def poisoned(*arguments: Any) -> Any:
        token = right(*arguments)
        token.key[..., 0] = np.nan
        arguments[2][..., 0, :] = np.nan
        return token._replace(readout=token.readout * np.float32(np.nan))

    monkeypatch.setattr(numpy_backend, "_run_token", poisoned)
    failures = " ".join(failures_of(SoakCase(), "numpy", 5))
    assert "states are finite" in failures
    assert "accepted readouts are finite" in failures


def test_a_write_to_the_slot_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_backend.gated_delta_state_fold

    def careless(inputs: Any) -> None:
        right(inputs)
        pool = inputs.recurrent_state.array
        pool[np.isnan(pool)] = 0

    monkeypatch.setattr(numpy_backend, "gated_delta_state_fold", careless)
    assert any("a slot of nobody" in failure for failure in failures_of(SoakCase(), "numpy", 5))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell")
def test_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that is really held, a block a step."""
    right, leaked = numpy_backend.gated_delta_state_fold, []

    def leaking(inputs: Any) -> None:
        right(inputs)
        block = mmap.mmap(-1, 1 << 18)  # not out of the heap, which may have as much free that is resident already
        block.write(b"1" * (1 << 18))
        leaked.append(block)

    monkeypatch.setattr(numpy_backend, "gated_delta_state_fold", leaking)
    result = gdn_soak(*SMALL[:4], "--steps", "320")
    assert len(leaked) << 18 > 32 << 20
    assert result.exit_code == 1, result.output
    assert "resident memory: " in result.stdout
    assert ": GROWS" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAILED: memory grows: 320 of 320 steps on numpy")


def test_a_checkpoint_that_compared_nothing_failed() -> None:
    assert Checkpoint(1000, 4000, "lazy", (), {}).failures == ("nothing was compared",)


def test_growth_begins_where_the_loop_is_warm() -> None:
    def points(*used: int) -> list[Checkpoint]:
        return [Checkpoint(1, 1, "lazy", (), {"resident": some << 20, "cupy pool": some}) for some in used]

    assert growth(points(50, 60, 55)) == []
    assert growth(points(10, 60, 55, 76)) == [Growth("resident", 60 << 20, 76 << 20), Growth("cupy pool", 60, 76)]
    assert [grown.passed for grown in growth(points(10, 60, 55, 76))] == [True, False]
    assert [grown.passed for grown in growth(points(10, 60, 55, 77))] == [False, False]
    assert [grown.passed for grown in growth(points(10, 60, 55, 60))] == [True, True]
    assert growth(points(*range(40))) == [Growth("resident", 3 << 20, 39 << 20), Growth("cupy pool", 3, 39)]


@pytest.mark.gpu
def test_an_array_that_a_gpu_keeps() -> None:
    import cupy

    before = Device("cuda").bytes_in_use()["cupy pool"]
    kept = cupy.zeros(1 << 20, cupy.uint8)
    assert Device("cuda").bytes_in_use()["cupy pool"] == before + kept.nbytes


# ---- The command ----


def test_the_command() -> None:
    result = gdn_soak(*SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"gdn {gdn.__version__}: 40 steps of 4 rows in 2 layers on numpy, ")
    rows = [line.split() for line in result.stdout.splitlines() if line.startswith(FORMS)]
    assert rows == [["separate", "2", "10", "ok"], ["fused", "2", "10", "ok"], ["lazy", "1", "5", "ok"]]
    assert result.stdout.splitlines()[-1].startswith("all right: 40 of 40 steps on numpy, ")
    assert result.stderr == ""


def test_json_and_the_options() -> None:
    sizes = ("--heads", "1,3", "--head-dims", "8,24", "--rows", "2", "--layers", "1", "--ring-len", "2")
    options = (*sizes, "--work-dtype", "float32", "--seed", "7")
    result = gdn_soak(*SMALL, *options, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 0
    assert document["passed"] is True
    assert (document["steps_done"], document["num_comparisons"], document["failures"]) == (40, 25, [])
    heads = {"num_key_heads": 1, "num_value_heads": 3, "key_head_dim": 8, "value_head_dim": 24}
    assert document["case"]["heads"] == heads
    assert document["reproduce"].startswith("gdn soak --backend numpy --steps 40 --seed 7 --checkpoint 8 --rows 2 ")
    again = gdn_soak(*document["reproduce"].split()[2:], "--json")
    assert json.loads(again.stdout)["case"] == document["case"]


def test_the_first_wrong_checkpoint_ends_it_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "_fold_slot", lambda *arguments: None)
    result = gdn_soak(*SMALL)
    assert result.exit_code == 1
    assert "states against one plain call: " in result.stdout
    assert "  reproduce: gdn soak --backend numpy --steps 8 --seed 0 --checkpoint 8 " in result.stdout
    assert result.stdout.splitlines()[-1].startswith("FAILED: 8 of 40 steps on numpy")


def test_a_loop_that_cannot_go_on_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def stops(case: SoakCase, backend: str, num_steps: int) -> Iterator[Checkpoint]:
        yield from soak(case, backend, 8)
        raise MemoryError("no room")

    monkeypatch.setattr(soak_module.loop, "soak", stops)
    result = gdn_soak(*SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 1
    assert document["failures"] == ["MemoryError: no room"]
    assert "--steps 16 " in document["reproduce"]


def test_interrupt_keeps_the_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(case: SoakCase, backend: str, num_steps: int) -> Iterator[Checkpoint]:
        yield from soak(case, backend, 16)
        raise KeyboardInterrupt

    monkeypatch.setattr(soak_module.loop, "soak", interrupted)
    result = gdn_soak(*SMALL, "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == 130
    assert (document["interrupted"], document["passed"], document["steps_done"]) == (True, False, 16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--backend", "hots"), "did you mean host?"),
        (("--steps", "0"), "--steps"),
        (("--head-dims", "12,8"), "key_head_dim: expected a multiple of 8"),
        (("--ring-len", "65"), "--ring-len"),
    ],
)
def test_usage_errors(arguments: tuple[str, ...], message: str) -> None:
    result = gdn_soak(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


# ---- Long ----


@pytest.mark.soak
def test_a_million_tokens_of_one_sequence(kernels: str) -> None:
    """Field case 74: no NaN, and the bits of plain calls, however far a sequence goes."""
    case = SoakCase(num_rows=1, num_layers=1, ring_len=16, seed=74)
    checkpoints = list(soak(case, kernels, 185_000))
    assert [failure for checkpoint in checkpoints for failure in checkpoint.failures] == []
    assert checkpoints[-1].num_tokens >= 1_000_000
    assert [grown for grown in growth(checkpoints) if not grown.passed] == []


def swept(*options: str, **environment: str) -> dict[str, Any]:
    """What `gdn verify` finds in a process of its own, without times."""
    command = [sys.executable, "-m", "gdn", "verify", "--json", *options]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    for results in (document, *document["results"]):
        del results["seconds"]
    return document


def test_a_sweep_in_fresh_processes() -> None:
    """Field case 75, a part of it: the same worst errors at the same places, whatever the process."""
    first, second = (swept("--case", "padding_rows", "--case", "ring_of_4", "--cases", "1") for _ in range(2))
    assert first["num_comparisons"] > 0
    assert first == second


def test_a_sweep_by_other_workers_and_other_hashes() -> None:
    """Beside field cases 74, 75: one worker and three, with other hashes, find the same errors in each place."""
    cases = ("mixed_decay", "ring_of_4", "conv_width_4", "steps")
    options = ("--backend", "numpy", *(word for case in cases for word in ("--case", case)))
    first, second = (
        swept(*options, "--workers", workers, PYTHONHASHSEED=seed)["results"]
        for workers, seed in (("1", "1"), ("3", "2"))
    )
    assert [result["case"] for result in first] == list(cases)
    assert first == second


@pytest.mark.soak
def test_twenty_sweeps_in_fresh_processes() -> None:
    """Field case 75: the whole of `gdn verify` on all that the machine has, twenty times."""
    first, *others = (swept() for _ in range(20))
    assert all(other == first for other in others)
