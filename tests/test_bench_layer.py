"""`gdn bench`: the ops around the recurrence, convolution, commit and gates: bytes, cases, arrays, check and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gdn.backends import numpy_layer
from gdn.bench import check_layer as check_layer_module
from gdn.bench.build import MAX_LAYER_SETS, plan_sets
from gdn.bench.case_lists import build_cases
from gdn.bench.cases import LAYER_REGIMES, BenchCase, CaseOptions
from gdn.bench.check import CheckFailed, check_finite, check_workload
from gdn.bench.cpu import CpuMachine
from gdn.bench.layer_build import build_layer_workload
from gdn.bench.measure import measure
from gdn.bench.peers.peer import Peer
from gdn.bench.traffic import Ceilings, attainable_us, case_bytes, commit_bytes, conv_bytes, gates_bytes
from gdn.calls import BoundCall
from gdn.cli.main import main
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.ring_cases import RingCase

pytestmark = pytest.mark.usefixtures("same_everywhere")

CEILINGS = Ceilings(copy_gb_s=4000.0, read_gb_s=5000.0)
HEADS = HeadGeometry(1, 2, 8, 16)  # 48 channels
TINY = ("--backend", "numpy", "--heads", "1,2", "--head-dims", "8,8", "--repeats", "3", "--warm")
QUICK = (*TINY, "--batch", "2", "--seq-len", "5")


class SmallMachine(CpuMachine):
    """A machine with a small cache and a memory of a given size."""

    def __init__(self, free: int = 1 << 30) -> None:
        super().__init__("numpy")
        self.free = free

    def cold_bytes(self) -> int:
        return 1 << 16

    def free_bytes(self) -> int:
        return self.free


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("bench", *arguments))


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def cases(*regimes: str, on_gpu: bool = False, **changes: Any) -> list[BenchCase]:
    values: dict[str, Any] = {"batches": (3,), "seq_lens": (9,)} | changes
    return build_cases(regimes, CaseOptions(HEADS, **values), on_gpu=on_gpu)


# ---- Bytes, against numbers worked out by hand ----


def test_bytes_of_a_convolution() -> None:
    call = RecurrenceCase("", HEADS, (1, 3, 0, 2), work_dtype="bfloat16", padding=(3,))
    # A token is read and written, 2 x 96 bytes; a window is 3 inputs; a filter is 4 weights of every channel.
    token, window, weights, tables = 2 * 96, 3 * 96, 4 * 96, 4 * (4 + 5)
    assert conv_bytes(call, moves_windows=True) == 4 * token + 2 * 2 * window + weights + tables
    assert conv_bytes(call, moves_windows=False) == 4 * token + 2 * window + weights + tables


def test_bytes_of_a_models_convolution() -> None:
    call = RecurrenceCase("", HeadGeometry(16, 32, 128, 128), (1,), work_dtype="bfloat16")
    assert conv_bytes(call, moves_windows=True) == 8192 * 2 * (2 + 2 * 3 + 4) + 4 * 3


def test_bytes_of_a_commit() -> None:
    call = RingCase("", HEADS, 4, (4, 4, 4), (4, 0, 1), num_layers=1, work_dtype="float32")
    assert commit_bytes(call) == 2 * 2 * (3 * 192) + 4 * (3 + 3 + 4)


def test_bytes_of_gates() -> None:
    call = RecurrenceCase("", HEADS, (1, 3), work_dtype="bfloat16")
    assert gates_bytes(call) == 4 * 2 * (2 + 2 + 4 + 4) + 2 * (4 + 4)


@pytest.mark.parametrize("regime", LAYER_REGIMES)
def test_they_are_held_against_copying(regime: str) -> None:
    for case in cases(regime):
        assert attainable_us(case, CEILINGS) == pytest.approx(1e6 * case_bytes(case) / 4e12)


def test_the_convolution_ahead_of_a_verify_writes_no_windows() -> None:
    decode, windows, _ = cases("conv")
    assert (decode.moves_windows, windows.moves_windows) == (True, False)
    assert case_bytes(windows) == conv_bytes(windows.call, moves_windows=False)


# ---- Cases and arrays ----


def test_cases_are_those_of_the_calls_they_run_beside() -> None:
    names = [case.call.name for case in cases("conv", on_gpu=True, batches=(), seq_lens=())]
    assert names[:5] == ["B=1", "B=8", "B=32", "B=128", "B=512"]
    assert names[5:9] == ["B=1 T=4", "B=8 T=4", "B=64 T=4", "B=256 T=4"]
    assert names[9:] == ["1 x 512", "1 x 2048", "1 x 8192", "16 ragged, 32800 tokens", "64 x 512"]
    assert [case.call.name for case in cases("commit", num_layers=5)] == ["B=3 n=4"]
    assert [case.call.name for case in cases("gates")] == ["B=3", "1 x 9"]


def test_types_of_states_are_none_of_theirs() -> None:
    found = cases(*LAYER_REGIMES, "decode", state_dtypes=("float32", "bfloat16"), work_dtype="float16")
    types = [(case.regime, case.call.types()) for case in found]
    assert types[:2] == [("decode", "float16/float32"), ("decode", "float16/bfloat16")]
    assert types[2:] == [
        *[("conv", "float16")] * 3,
        ("commit", "float16"),
        *[("gates", "float16")] * 2,
    ]


@pytest.mark.parametrize("regime", LAYER_REGIMES)
def test_a_rotation_passes_the_cache(regime: str) -> None:
    for case in cases(regime):
        num_sets, is_cold = plan_sets(case, SmallMachine())
        assert is_cold
        assert (num_sets - 1) * case_bytes(case) < 1 << 16 <= num_sets * case_bytes(case)


def test_what_is_too_small_to_pass_the_cache_is_said_to_be_warm() -> None:
    """Field case 93: cold or warm is labelled."""
    (case, _) = cases("gates", batches=(1,))
    workload = build_layer_workload(case, CpuMachine("numpy"))
    assert (len(workload.sets), workload.is_cold) == (MAX_LAYER_SETS, False)


@pytest.mark.parametrize("slots", ["ordered", "permuted"])
def test_every_set_is_a_layer_of_its_own(slots: str) -> None:
    workload = build_layer_workload(cases("conv", slots=slots)[0], SmallMachine())
    qkv, weights, pool, slot_idx, offsets = zip(*(call.arguments for call in workload.sets), strict=True)
    for arrays in (qkv, weights, [call.outputs[0] for call in workload.sets]):
        assert len({array.ctypes.data for array in arrays}) == len(workload.sets) > 2
    assert all(array is workload.conv_state for array in pool)
    assert sorted(np.concatenate(slot_idx)) == list(range(len(workload.conv_state)))
    assert (list(np.concatenate(slot_idx)) == sorted(np.concatenate(slot_idx))) == (slots == "ordered")
    assert all(list(table) == [0, 1, 2, 3] for table in offsets)


def test_a_case_without_room_is_a_row_without_a_time() -> None:
    for regime in LAYER_REGIMES:
        (row,) = measure(cases(regime)[0], SmallMachine(free=100), CEILINGS, 3).rows
        assert (row.timing, row.failed) == (None, False)
        assert "GB" in str(row.problem)


# ---- No clock without a check ----


@pytest.mark.parametrize("work_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("regime", LAYER_REGIMES)
def test_every_case_passes_its_check(regime: str, work_dtype: str) -> None:
    for case in cases(regime, work_dtype=work_dtype, slots="permuted"):
        workload = build_layer_workload(case, SmallMachine())
        checked = check_workload(workload)
        assert ("out rel" in checked, "windows bits" in checked) == (regime == "conv", regime != "gates")
        check_finite(workload)


def change_output(inputs: Any, out: Any) -> None:
    out.array[-1, -1] += 1


def change_window(inputs: Any, *out: Any) -> None:
    inputs.batch.conv_state.array[inputs.batch.slot_idx.array[-1], -1, -1] += 1


def change_decay(inputs: Any, decay: Any, beta: Any) -> None:
    decay.array[-1, -1] += 1


def leave_beta(inputs: Any, decay: Any, beta: Any) -> None:
    beta.array[-1, -1] = np.nan


@pytest.mark.parametrize(
    ("regime", "op", "change", "message"),
    [
        ("conv", "gated_delta_conv1d_fwd", change_output, "out: "),
        ("conv", "gated_delta_conv1d_fwd", change_window, "windows: "),
        ("commit", "gated_delta_conv1d_commit", change_window, "windows: "),
        ("gates", "gated_delta_gates", change_decay, "decay: "),
        ("gates", "gated_delta_gates", leave_beta, "beta: "),
    ],
)
def test_a_case_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, regime: str, op: str, change: Callable[..., None], message: str
) -> None:
    right = getattr(numpy_layer, op)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        change(*arguments)

    def refuse(*arguments: Any) -> None:
        raise AssertionError("timed in spite of a failed check")

    monkeypatch.setattr(numpy_layer, op, wrong)
    monkeypatch.setattr(CpuMachine, "time_us", refuse)
    for case in cases(regime, cold=False):
        (row,) = measure(case, CpuMachine("numpy"), CEILINGS, 3).rows
        assert (row.failed, row.timing) == (True, None)
        assert str(row.problem).startswith(message)


def test_of_long_rows_the_oracle_gets_some_channels_from_the_first_to_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_layer_module, "_ORACLE_COST", 9 * 3)
    workload = build_layer_workload(cases("conv")[-1], SmallMachine())
    part = check_layer_module._Part(workload, workload.sets[0].arguments[3])
    channels = np.arange(HEADS.conv_dim, dtype=np.uint16)
    assert list(part.channels_of(channels, 0)) == [0, 23, 47]
    assert "windows bits" in check_workload(workload)


def test_what_is_computed_must_stay_finite() -> None:
    workload = build_layer_workload(cases("conv", cold=False)[0], SmallMachine())
    check_finite(workload)
    workload.conv_state[0, 0, 0] = np.inf
    with pytest.raises(CheckFailed, match="not finite"):
        check_finite(workload)


# ---- Rows ----


def test_the_report() -> None:
    result = bench("conv", "commit", "gates", *QUICK)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    for words in ("conv B=2 bfloat16", "conv B=2 T=4 bfloat16", "conv 1 x 5", "commit B=2 n=4", "gates 1 x 5"):
        assert any(line[: len(words.split())] == words.split() and "copy" in line for line in lines), words
    assert result.stdout.splitlines()[-1] == "all right: 6 rows timed, each after its check"


def test_rows_say_what_was_timed() -> None:
    found = rows("conv", "commit", "gates", *QUICK)
    assert [(row["regime"], row["shape"], row["state_dtype"]) for row in found] == [
        ("conv", "B=2", "bfloat16"),
        ("conv", "B=2 T=4", "bfloat16"),
        ("conv", "1 x 5", "bfloat16"),
        ("commit", "B=2 n=4", "bfloat16"),
        ("gates", "B=2", None),
        ("gates", "1 x 5", None),
    ]
    for row in found:
        assert (row["ring_len"], row["form"], row["parts_us"], row["tokens_per_s"]) == (None, None, {}, None)
        assert row["percent"] == pytest.approx(100 * row["attainable_us"] / row["us"])
    assert len({row["key"] for row in found}) == len(found)


def test_save_and_compare(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    assert bench("conv", *QUICK, "--save", str(saved)).exit_code == 0
    found = rows("conv", *QUICK, "--compare", str(saved), "--fail-above", "1e9")
    assert all(row["ratio"] > 0 for row in found)


def test_pythons_part_of_a_call_stands_beside_that_of_a_bound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def overhead_us(self: CpuMachine, call: Callable[[], object]) -> float:
        call()
        return 3.0 if isinstance(call, BoundCall) else 11.0

    monkeypatch.setattr(CpuMachine, "python_overhead_us", overhead_us)
    text = bench("conv", "commit", "gates", *QUICK).stdout.replace("\n", " ")
    for op in ("gated_delta_conv1d_fwd", "gated_delta_conv1d_commit", "gated_delta_gates"):
        assert f"{op} 11.0 us (bound 3.0)" in text


def test_other_packages_are_not_timed_beside_them() -> None:
    class Other(Peer):
        name = "other"

        def run(self, *arguments: Any) -> Any:
            raise AssertionError("run")

    for case in cases(*LAYER_REGIMES, cold=False):
        assert [row.by for row in measure(case, CpuMachine("numpy"), CEILINGS, 3, peers=(Other(),)).rows] == ["numpy"]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    result = bench("conv", "commit", "gates", *TINY, "--batch", "1,2", "--seq-len", "3,5", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")
