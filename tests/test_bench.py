"""`gdn bench`: byte formulas, rotation, the check before the clock, the report, and the GPU's clock without a GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import gdn
from gdn import ops
from gdn.backends import host
from gdn.backends import numpy as numpy_backend
from gdn.bench import build as build_module
from gdn.bench import check as check_module
from gdn.bench import cpu as cpu_module
from gdn.bench import measure as measure_module
from gdn.bench import oracle_check
from gdn.bench.build import DoesNotFit, build_workload, plan_sets
from gdn.bench.case_lists import build_cases, named_case, named_cases, partial_acceptance
from gdn.bench.cases import REGIMES, BenchCase, CaseOptions
from gdn.bench.check import CheckFailed, check_workload
from gdn.bench.cpu import CpuMachine
from gdn.bench.cuda import GpuMachine
from gdn.bench.measure import measure
from gdn.bench.peers import load_peer
from gdn.bench.peers.flash_infer import FlashInfer
from gdn.bench.peers.peer import Peer, PeerRefused
from gdn.bench.peers.torch_peer import TorchPeer
from gdn.bench.timing import Spread, spread
from gdn.bench.traffic import (
    Ceilings,
    attainable_us,
    case_bytes,
    fold_bytes,
    fused_bytes,
    lazy_bytes,
    recurrence_bytes,
    recurrence_flops,
    verify_bytes,
)
from gdn.bench.workload import Workload
from gdn.calls import BoundCall
from gdn.cli import bench as bench_module
from gdn.cli.main import main
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.execute import on_backend
from gdn.testing.ring_cases import RingCase

pytestmark = pytest.mark.usefixtures("same_everywhere")

SMALL_HEADS = HeadGeometry(1, 2, 8, 16)
TINY = ("--backend", "numpy", "--heads", "1,2", "--head-dims", "8,8", "--repeats", "3", "--state-dtype", "float32")
QUICK = (*TINY, "--batch", "2", "--warm")
CEILINGS = Ceilings(copy_gb_s=4000.0, read_gb_s=5000.0)


MEASURE_CEILINGS = CpuMachine.measure_ceilings  # what `same_everywhere` puts aside


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("bench", *arguments))


def document(*arguments: str) -> dict[str, Any]:
    result = bench(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def ring_call(**changes: Any) -> RingCase:
    values: dict[str, Any] = {"lengths": (4, 4, 4), "num_accepted": (4, 0, 2), "num_layers": 1} | changes
    return RingCase("windows", SMALL_HEADS, 4, record_padding=0, **values)


def cases(*regimes: str, **changes: Any) -> list[BenchCase]:
    values: dict[str, Any] = {"batches": (3,), "seq_lens": (9,), "state_dtypes": ("float32",)} | changes
    return build_cases(regimes, CaseOptions(HeadGeometry(2, 4, 16, 8), **values), on_gpu=False)


# ---- Bytes and flops, against numbers worked out by hand ----


def test_bytes_of_a_forward() -> None:
    call = RecurrenceCase("", SMALL_HEADS, (1, 3, 0, 2), work_dtype="bfloat16", out_dtype="bfloat16", padding=(3,))
    # A state is 2 x 8 x 16 float32; a token is 2 x 8 + 2 x 16 channels, 2 x 2 gates and 2 x 16 readouts.
    state, token = 1024, 96 + 16 + 64
    assert recurrence_bytes(call) == 2 * 2 * state + 4 * token + 4 * (4 + 5)


def test_bytes_of_a_decode_step_of_a_model() -> None:
    call = RecurrenceCase("", HeadGeometry(16, 32, 128, 128), (1,) * 512, work_dtype="bfloat16", out_dtype="bfloat16")
    states = 2 * 512 * 32 * 64 * 1024
    assert recurrence_bytes(call) == states + 512 * (8192 * 2 + 64 * 4 + 4096 * 2) + 4 * 1025
    assert states / 4.28e12 == pytest.approx(502e-6, rel=1e-3)


def test_bytes_of_a_verify() -> None:
    # A record is 8 + 2 x 17 float32; the second row is longer than the ring and writes its state instead.
    state, token, record = 1024, 192 + 16 + 128, 168
    assert verify_bytes(ring_call()) == 3 * state + 12 * (token + record) + 4 * (3 + 3 + 4)
    too_long = ring_call(lengths=(4, 5), num_accepted=(4, 5))
    assert verify_bytes(too_long) == 3 * state + 9 * token + 4 * record + 4 * (2 + 2 + 3)
    assert verify_bytes(ring_call(num_layers=3)) == 3 * verify_bytes(ring_call())
    assert verify_bytes(ring_call(ring_padding=(0, 1, 2))) == 40


def test_bytes_of_a_fold() -> None:
    state, record = 1024, 168
    assert fold_bytes(ring_call()) == 2 * 2 * state + 6 * record + 4 * (3 + 3) + 4 * 3
    assert fold_bytes(ring_call(num_layers=2)) == 2 * (2 * 2 * state + 6 * record + 4 * (3 + 3)) + 4 * 3
    assert fold_bytes(ring_call(num_accepted=(0, 0, 0))) == 36


def test_a_verify_is_held_against_reading_and_a_fold_against_copying() -> None:
    call = ring_call()
    assert attainable_us(BenchCase("verify", call), CEILINGS) == pytest.approx(1e6 * verify_bytes(call) / 5e12)
    assert attainable_us(BenchCase("fold", call), CEILINGS) == pytest.approx(1e6 * fold_bytes(call) / 4e12)
    both = 1e6 * (verify_bytes(call) / 5e12 + fold_bytes(call) / 4e12)
    assert attainable_us(BenchCase("step", call), CEILINGS) == pytest.approx(both)
    assert case_bytes(BenchCase("step", call)) == verify_bytes(call) + fold_bytes(call)


def test_bytes_with_pending_records() -> None:
    state, token, record = 1024, 192 + 16 + 128, 168
    call = ring_call(num_accepted=(4, 4, 4))
    tables = 4 * (3 + 3 + 4 + 3 + 3)
    assert fused_bytes(call, 2) == 3 * 2 * state + 12 * (token + record) + 3 * 2 * record + tables
    assert lazy_bytes(call, 2) == fused_bytes(call, 2) - 3 * state
    assert fused_bytes(call, 0) == lazy_bytes(call, 0) == verify_bytes(call) + 4 * 6
    fused, lazy = (BenchCase(regime, call, pending=2) for regime in ("fused", "lazy"))
    assert attainable_us(fused, CEILINGS) == pytest.approx(1e6 * fused_bytes(call, 2) / 4e12)
    assert attainable_us(lazy, CEILINGS) == pytest.approx(1e6 * lazy_bytes(call, 2) / 5e12)


def test_flops_of_a_prefill() -> None:
    call = RecurrenceCase("", SMALL_HEADS, (10, 4), padding=(1,))
    assert recurrence_flops(call) == 7 * 10 * 2 * 8 * 16


def test_spread() -> None:
    assert spread([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(3.0, 1.4, 4.6, 5)
    assert spread([2.0]) == Spread(2.0, 2.0, 2.0, 1)


# ---- Cases ----


def test_a_step_is_timed_at_every_acceptance() -> None:
    accepted = {case.call.name: case.ring_call.num_accepted for case in cases("step") if case.loop is None}
    assert accepted == {
        "B=3 T=4 accept none": (0, 0, 0),
        "B=3 T=4 accept some": (2, 3, 4),
        "B=3 T=4 accept all": (4, 4, 4),
    }
    assert partial_acceptance(6, 2) == (1, 2, 0, 1, 2, 0)


def test_only_a_fold_has_layers() -> None:
    layers = {case.regime: case.num_layers for case in cases("verify", "fold", "step", num_layers=5)}
    assert layers == {"verify": 1, "fold": 5, "step": 1}


def test_pending_records_fill_the_ring_and_no_more() -> None:
    def shapes(**changes: Any) -> list[tuple[str, int, int]]:
        return [(case.call.name, case.pending, case.ring_call.ring_len) for case in cases("fused", "lazy", **changes)]

    assert shapes() == [("B=3 T=4 n=4", 4, 4), ("B=3 T=4 n=4", 4, 8)]
    assert shapes(pending=7) == [("B=3 T=4 n=7", 7, 7), ("B=3 T=4 n=7", 7, 11)]
    assert shapes(ring_len=5) == [("B=3 T=4 n=4", 4, 5), ("B=3 T=4 n=1", 1, 5)]
    assert shapes(window=62, pending=0) == [("B=3 T=62 n=0", 0, 62), ("B=3 T=62 n=0", 0, 62)]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("pending", [0, 1, 6])
def test_pending_records_of_any_number_pass_their_check(pending: int, state_dtype: str) -> None:
    for case in cases("fused", "lazy", pending=pending, state_dtypes=(state_dtype,), slots="permuted"):
        workload = build_workload(case, SmallMachine())
        assert case.regime in check_workload(workload).split(", ")
        first, last = (
            workload.ring[inputs.windows[0].pending_rows] for inputs in (workload.sets[0], workload.sets[-1])
        )
        assert np.array_equal(first, last)
        assert first[:, :, :pending].any() == (pending > 0)


def test_fused_and_lazy_differ_in_what_they_write() -> None:
    fused, lazy = (build_workload(case, SmallMachine()) for case in cases("fused", "lazy"))
    for workload, moves in ((fused, True), (lazy, False)):
        check_workload(workload)
        window, before = workload.sets[1].windows[0], workload.pool.copy()
        workload.calls(workload.case.regime)[1]()
        assert np.array_equal(workload.pool[window.slot_idx], before[window.slot_idx]) != moves
        assert np.array_equal(window.pending_rows, window.ring_rows) != moves


def test_regimes_have_batches_of_their_own() -> None:
    options = CaseOptions(SMALL_HEADS, state_dtypes=("bfloat16",))
    names = [case.call.name for case in build_cases(("decode", "prefill"), options, on_gpu=True)]
    assert names[:5] == ["B=1", "B=8", "B=32", "B=128", "B=512"]
    assert names[5:] == ["1 x 512", "1 x 2048", "1 x 8192", "16 ragged, 32800 tokens", "64 x 512"]


def test_chunks_have_longer_rows_in_prefill_alone() -> None:
    options = CaseOptions(HeadGeometry(1, 2, 32, 32), state_dtypes=("float32",), algorithm="auto")
    built = build_cases(("prefill", "gates", "decode"), options, on_gpu=True)
    prefill = [case for case in built if case.regime == "prefill"]
    assert [case.call.name for case in prefill] == [
        *("1 x 512", "1 x 2048", "1 x 8192", "1 x 32768", "16 ragged, 32800 tokens", "64 x 512"),
    ]
    assert {case.algorithm for case in prefill} == {"auto"}
    others = [case for case in built if case.regime != "prefill"]
    assert {case.algorithm for case in others} == {None}
    assert "1 x 32768" not in [case.call.name for case in others]


def test_a_workspace_counts_as_memory() -> None:
    (recurrent,), (chunked,) = (
        build_cases(
            ("prefill",), CaseOptions(HeadGeometry(1, 2, 32, 32), seq_lens=(200,), algorithm=algorithm), on_gpu=False
        )[:1]
        for algorithm in ("recurrent", "chunked")
    )
    workload = build_workload(chunked, SmallMachine())
    assert build_workload(recurrent, SmallMachine()).workspace is None
    machine = SmallMachine(cold=1 << 40, free=3 * len(workload.workspace))
    assert plan_sets(recurrent, machine)[0] > plan_sets(chunked, machine)[0]


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
def test_chunked_results_are_held_to_their_own_tolerance(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    options = CaseOptions(HeadGeometry(1, 2, 32, 32), "float32", ("float32",), seq_lens=(200,), algorithm=algorithm)
    (case,) = build_cases(("prefill",), options, on_gpu=False)
    right, seen = ops.gated_delta_recurrence_fwd, []

    def off_by(error: float) -> Callable[..., Any]:
        def broken(*six: Any, out: Any, **keywords: Any) -> Any:
            seen.append((keywords["algorithm"], keywords["workspace"] is not None))
            right(*six, out=out, **keywords)
            out *= np.float32(1 + error)

        return broken

    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", off_by(1e-4))
    assert check_workload(build_workload(case, CpuMachine("numpy"))).startswith("readout rel 1.0e-04")
    monkeypatch.setattr(ops, "gated_delta_recurrence_fwd", off_by(3e-4))
    with pytest.raises(CheckFailed, match="readout: relative norm 3"):
        check_workload(build_workload(case, CpuMachine("numpy")))
    assert set(seen) == {(algorithm, True)}


@pytest.mark.parametrize("name", sorted(named_cases()))
def test_cases_of_verify_pass_their_check(name: str) -> None:
    case = named_case(name, CaseOptions(SMALL_HEADS, cold=False))
    if sum(case.call.lengths) > 200:
        pytest.skip("long on a CPU")
    assert check_workload(build_workload(case, CpuMachine("numpy")))


# ---- Arrays that rotate ----


class SmallMachine(CpuMachine):
    """A machine with a cache and a memory of given sizes."""

    def __init__(self, cold: int = 1 << 16, free: int = 1 << 30) -> None:
        super().__init__("numpy")
        self.cold, self.free = cold, free

    def cold_bytes(self) -> int:
        return self.cold

    def free_bytes(self) -> int:
        return self.free


@pytest.mark.parametrize("regime", ["decode", "verify", "fold", "fused", "lazy", "step", "prefill"])
def test_a_rotation_passes_the_cache(regime: str) -> None:
    case = cases(regime)[0]
    num_sets, is_cold = plan_sets(case, SmallMachine())
    assert is_cold
    assert (num_sets - 1) * case_bytes(case) < 1 << 16 <= num_sets * case_bytes(case)


def test_sets_share_no_slot_no_ring_row_and_no_token() -> None:
    case = cases("fold", num_layers=2, slots="permuted")[0]
    workload = build_workload(case, SmallMachine())
    slots = np.concatenate([inputs.row_ids.ravel() for inputs in workload.sets])
    ring_rows = np.concatenate([inputs.ring_row_ids.ravel() for inputs in workload.sets])
    assert len(workload.sets) > 2
    for table, count in ((slots, len(workload.pool)), (ring_rows, len(workload.ring))):
        assert sorted(table) == list(range(count))
        assert list(table) != sorted(table)
    assert list(slots) != list(ring_rows)
    starts = [window.qkv_conv_output.ctypes.data for inputs in workload.sets for window in inputs.windows]
    assert len(set(starts)) == 2 * len(workload.sets)


def test_ordered_slots_are_in_order() -> None:
    workload = build_workload(cases("decode")[0], SmallMachine())
    assert [int(slot) for inputs in workload.sets for slot in inputs.row_ids[0]] == list(range(len(workload.pool)))


def test_memory_and_slots_bound_a_rotation() -> None:
    (case,) = cases("decode")
    one_set = build_module._set_bytes(case)
    assert plan_sets(case, SmallMachine(free=2 * int(4.5 * one_set / 0.6) // 2)) == (4, False)
    with pytest.raises(DoesNotFit, match="GB"):
        plan_sets(case, SmallMachine(free=one_set))
    (case,) = cases("decode", max_slots=7)
    assert plan_sets(case, SmallMachine()) == (2, False)
    (case,) = cases("decode", cold=False)
    assert plan_sets(case, SmallMachine()) == (1, False)


def test_a_case_without_room_is_a_row_without_a_time() -> None:
    (row,) = measure(cases("decode")[0], SmallMachine(free=1000), CEILINGS, 3).rows
    assert (row.timing, row.failed) == (None, False)
    assert "GB" in str(row.problem)


def test_records_of_every_set_are_real_and_reset_restores_the_states() -> None:
    workload = build_workload(cases("fold", slots="permuted")[0], SmallMachine())
    before = workload.pool.copy()
    check_workload(workload)
    first, last = (workload.ring[inputs.ring_row_ids[0]] for inputs in (workload.sets[0], workload.sets[-1]))
    assert first.any()
    assert np.array_equal(first, last)
    assert not np.array_equal(workload.pool, before)
    workload.reset()
    assert np.array_equal(workload.pool, before)


# ---- No clock without a check ----


@pytest.fixture
def no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timing anything is an error."""

    def refuse(*arguments: Any) -> None:
        raise AssertionError("timed in spite of a failed check")

    monkeypatch.setattr(CpuMachine, "time_us", refuse)


def changed(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[..., None]) -> None:
    """Run `change` on the arguments of a function of the numpy backend after it has run."""
    right = getattr(numpy_backend, op)

    def wrong(*arguments: Any) -> None:
        right(*arguments)
        change(*arguments)

    monkeypatch.setattr(numpy_backend, op, wrong)


def grow_readout(inputs: Any, readout: Any, *pending: Any) -> None:
    readout.array[-1, -1] += 1


def grow_state(inputs: Any, *readout: Any) -> None:
    recurrence = getattr(inputs, "recurrence", inputs)
    recurrence.recurrent_state.array[0, 0, 0, 0] += 1


def grow_record(inputs: Any, readout: Any) -> None:
    inputs.ring.array[:, 0, 0, 0] += 1


def grow_last_record(inputs: Any, readout: Any) -> None:
    inputs.ring.array[:, 0, -1, 0] += 1


@pytest.mark.usefixtures("no_clock")
@pytest.mark.parametrize(
    ("regime", "op", "change", "message"),
    [
        ("decode", "gated_delta_recurrence_fwd", grow_readout, "readout"),
        ("decode", "gated_delta_recurrence_fwd", grow_state, "state"),
        ("prefill", "gated_delta_recurrence_fwd", grow_readout, "readout"),
        ("verify", "gated_delta_recurrence_fwd", grow_readout, "readout"),
        ("verify", "gated_delta_recurrence_verify_ring", grow_readout, "E1"),
        ("verify", "gated_delta_recurrence_verify_ring", grow_state, "E1: states after verify"),
        ("fold", "gated_delta_recurrence_verify_ring", grow_record, "E2"),
        ("fold", "gated_delta_state_fold", grow_state, "E2"),
        ("step", "gated_delta_state_fold", grow_state, "E2"),
        ("fused", "gated_delta_recurrence_verify_ring", grow_readout, "fused: readout against forward"),
        ("fused", "gated_delta_recurrence_verify_ring", grow_state, "fused: states after the call"),
        ("fused", "gated_delta_recurrence_verify_ring", grow_record, "fused: "),
        ("lazy", "gated_delta_recurrence_verify_ring", grow_readout, "lazy: readout against forward"),
        ("lazy", "gated_delta_recurrence_verify_ring", grow_state, "lazy: states after the call"),
        ("lazy", "gated_delta_recurrence_verify_ring", grow_last_record, "lazy: states after folding its records"),
    ],
)
def test_a_case_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, regime: str, op: str, change: Callable[..., None], message: str
) -> None:
    """Beside field case 90: the check before the clock is fed one wrong element, or a wrong state alone.

    Beside field case 5: each of them is finite.
    """
    changed(monkeypatch, op, change)
    case = next(case for case in cases(regime, cold=False)[::-1] if case.loop is None)
    (row,) = measure(case, CpuMachine("numpy"), CEILINGS, 3).rows
    assert row.failed
    assert row.timing is None
    assert message in str(row.problem)


def test_a_failed_check_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    changed(monkeypatch, "gated_delta_recurrence_fwd", grow_readout)
    result = bench("decode", *QUICK)
    assert result.exit_code == 1
    assert "FAILED decode B=2" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("1 FAILED, nothing was timed: 0 rows timed")


def test_a_case_that_cannot_run_is_a_failed_row_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What took minutes before it is kept, whatever is raised, a broken driver's errors included."""
    seen: list[Any] = []

    def check(workload: Any) -> str:
        seen.append(workload)
        if len(seen) == 2:
            raise MemoryError("no room\nin several lines")
        return "not at all"

    monkeypatch.setattr(measure_module, "check_workload", check)
    result = bench("decode", "verify", "fold", *QUICK, "--json")
    report = json.loads(result.stdout)
    assert (result.exit_code, report["passed"]) == (1, False)
    assert [row["problem"] for row in report["rows"]] == [None, "MemoryError: no room", None]
    assert [row["us"] is None for row in report["rows"]] == [False, True, False]


def test_states_must_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 92: a state that a long timing blew up is no result."""
    workload = build_workload(cases("fold", cold=False)[0], CpuMachine("numpy"))
    check_module.check_finite(workload)
    workload.pool[0, 0, 0, 0] = np.inf
    with pytest.raises(CheckFailed, match="not finite"):
        check_module.check_finite(workload)


@pytest.mark.skipif(host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}")
@pytest.mark.parametrize("regime", ["decode", "fold"])
def test_states_stay_finite_over_10000_timed_calls(regime: str) -> None:
    """Beside field cases 92, 93: as often as a long timing applies the same tokens, or folds the same records."""
    options = CaseOptions(HeadGeometry(1, 2, 8, 8), "float32", ("float32",), batches=(1,), cold=False)
    (case,) = build_cases((regime,), options, on_gpu=False)
    machine = CpuMachine("host")
    with on_backend("host"):
        workload = build_workload(case, machine)
        check_workload(workload)
        before = workload.pool.copy()
        assert len(machine.time_us([workload.bound(regime)], 10_000)) == 10_000
    check_module.check_finite(workload)
    assert np.isfinite(workload.pool).all()
    assert (workload.pool != before).any()


def test_the_oracle_gets_what_it_can_afford(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cases("prefill", seq_lens=(64,), cold=False)[0]
    workload = build_workload(case, CpuMachine("numpy"))
    monkeypatch.setattr(oracle_check, "_ORACLE_COST", 64 * 2 * 16 * 8)  # one key head of one row
    assert check_workload(workload).startswith("readout rel ")


# ---- The command ----


def test_the_report() -> None:
    result = bench("decode", "step", "prefill", *QUICK, "--seq-len", "5")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"gdn {gdn.__version__}: timing numpy, 20")
    assert "No GPU is timed" in lines[1]
    assert "cuda cannot run here: no GPU in this test" in lines
    assert "1,2 heads of 8,8; slots ordered; warm inputs" in lines
    assert "measured here: copy 4000 GB/s (read + written), read 5000 GB/s" in lines
    step = next(line for line in lines if line.startswith("step") and "accept some" in line)
    assert "both" in step
    assert " = " in step.partition("verify ")[2]
    assert any(line.startswith("prefill  1 x 5") for line in lines)
    assert lines[-1] == "all right: 14 rows timed, each after its check"
    assert result.stderr == ""


def test_pythons_part_of_a_call_stands_beside_that_of_a_bound_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def overhead_us(self: CpuMachine, call: Callable[[], object]) -> float:
        call()
        return 3.0 if isinstance(call, BoundCall) else 11.0

    monkeypatch.setattr(CpuMachine, "python_overhead_us", overhead_us)
    parts = "gated_delta_recurrence_verify_ring 11.0 us (bound 3.0), gated_delta_state_fold 11.0 us (bound 3.0)"
    assert f"Python's part of one call with out given: {parts}" in bench("step", *QUICK).stdout.replace("\n", " ")
    report = document("decode", "prefill", *QUICK, "--seq-len", "5")
    assert report["python_overhead_us"] == {"gated_delta_recurrence_fwd": 11.0}
    assert report["bound_overhead_us"] == {"gated_delta_recurrence_fwd": 3.0}


def test_all_regimes_without_a_word() -> None:
    rows = document(*QUICK, "--seq-len", "5")["rows"]
    assert [row["regime"] for row in rows] == [
        *("decode", "verify", "fold", "fused", "lazy", *["step"] * 12, "prefill"),
        *("conv", "conv", "conv", "commit", "gates", "gates"),
    ]


def test_json_is_alone_on_stdout_and_says_everything() -> None:
    report = document("decode", *QUICK, "--slots", "permuted")
    (row,) = report["rows"]
    assert report["passed"] is True
    assert report["ceilings_gb_s"] == {"numpy": {"copy": 4000.0, "read": 5000.0}}
    assert (row["by"], row["slots"], row["cold"], row["num_samples"]) == ("numpy", "permuted", False, 3)
    assert row["p10_us"] <= row["us"] <= row["p90_us"]
    assert row["gb_per_s"] == pytest.approx(1e-3 * row["bytes"] / row["us"])
    assert row["percent"] == pytest.approx(100 * row["attainable_us"] / row["us"])
    assert row["checked"].startswith("readout rel ")


def test_both_cpu_backends_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdn, "unavailable_backends", lambda: {"cuda": "none", "host": "no compiler"})
    assert bench_module.select_backends(())[0] == ["numpy"]
    monkeypatch.setattr(gdn, "unavailable_backends", lambda: {"cuda": "none"})
    assert bench_module.select_backends(())[0] == ["host", "numpy"]
    monkeypatch.setattr(gdn, "unavailable_backends", dict)
    assert bench_module.select_backends(())[0] == ["cuda"]


def test_heads_of_a_model_and_an_eighth_without_one() -> None:
    def heads(**changes: Any) -> HeadGeometry:
        values: dict[str, Any] = {"on_gpu": False, "model": None, "heads": None, "head_dims": None}
        values |= dict.fromkeys(("batches", "seq_lens", "state_dtypes", "accept", "ring_lens"), ())
        values |= {"layers": 1, "warm": False} | changes
        return bench_module.case_options(**values).heads

    assert heads() == HeadGeometry(2, 4, 128, 128)
    assert heads(on_gpu=True) == HeadGeometry(16, 32, 128, 128)
    assert heads(model="olmo-hybrid-7b") == HeadGeometry(30, 30, 96, 192)
    assert heads(model="olmo-hybrid-7b", heads=(15, 15), head_dims=(8, 8)) == HeadGeometry(15, 15, 8, 8)


def test_a_named_case() -> None:
    (row,) = document("--case", "group_of_8", *QUICK)["rows"]
    assert (row["regime"], row["shape"], row["heads"]) == ("prefill", "group_of_8", [1, 8])


def test_rows_of_an_algorithm_are_compared_with_their_own(tmp_path: Path) -> None:
    quick = (
        "prefill",
        "--backend",
        "numpy",
        "--heads",
        "1,2",
        "--head-dims",
        "32,32",
        "--warm",
        "--repeats",
        "3",
        "--seq-len",
        "5,140",
    )
    saved = {}
    for algorithm in ("recurrent", "chunked", "auto"):
        report = document(*quick, "--state-dtype", "float32", "--algorithm", algorithm)
        saved[algorithm] = report
        first, second = report["rows"]
        assert (first["algorithm"], second["algorithm"]) == (algorithm, algorithm)
        assert first["bytes"] == saved["recurrent"]["rows"][0]["bytes"]
    keys = [row["key"] for report in saved.values() for row in report["rows"]]
    assert len(set(keys)) == 6
    assert keys[0].startswith("numpy | prefill | 1 x 5 |")
    assert keys[2].startswith("numpy | prefill chunked | 1 x 5 |")
    path = tmp_path / "recurrent.json"
    path.write_text(json.dumps(saved["recurrent"]))
    result = bench(*quick, "--state-dtype", "float32", "--algorithm", "chunked", "--compare", str(path))
    row = next(line for line in result.stdout.splitlines() if line.startswith("prefill"))
    assert row.split()[1] == "chunked"
    assert row.split()[-1] == "-"


def test_a_rotation_that_slots_cut_short_is_said_to_be_warm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Beside field cases 92, 93: where --max-slots leaves no room to pass the cache, nobody is told of cold inputs."""
    monkeypatch.setattr(CpuMachine, "cold_bytes", lambda self: 1 << 16)
    saved, rotating = tmp_path / "cold.json", ("decode", *TINY, "--batch", "4")
    cold = bench(*rotating, "--save", str(saved))
    short = bench(*rotating, "--max-slots", "8", "--compare", str(saved))
    (row,), (cut,) = (
        json.loads(saved.read_text(encoding="ascii"))["rows"],
        document(*rotating, "--max-slots", "8")["rows"],
    )
    assert (row["cold"], cut["cold"]) == (True, False)
    assert row["key"].endswith("| cold")
    assert cut["key"].endswith("| warm")
    assert "rotation smaller than the cache" not in cold.stdout
    (line,) = [line for line in short.stdout.splitlines() if line.startswith("decode")]
    assert line.endswith(" -  rotation smaller than the cache")  # and is compared with nothing


def test_batches_by_list_and_by_repetition() -> None:
    rows = document("decode", *TINY, "--warm", "--batch", "1,2", "--batch", "3", "--batch", "2")["rows"]
    assert [row["batch"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decode", "--batch", "8,-1"), "expected counts of at least 1"),
        (("decode", "--batch", "0"), "expected counts of at least 1"),
        (("decode", "--batch", "9", "--max-slots", "8"), "batch: expected at most max_slots = 8 sequences, got 9"),
        (("fold", "--batch", "4", "--layers", "3", "--max-slots", "8"), "sequences of 3 layers, got 4"),
        (("decode", "--max-slots", "0"), "0 is not in the range"),
        (("verify", "--window", "-1"), "-1 is not in the range"),
        (("verify", "--window", "5", "--ring-len", "4"), "window: expected at most ring_len = 4"),
        (("verify", "--window", "65"), "window: expected at most 64"),
        (("verify", "--ring-len", "65"), "ring_len: expected at most 64"),
        (("step", "--ring-lens", "65"), "ring_lens: expected at most 64"),
        (("step", "--accept", "1.5"), "expected numbers from 0 to 1"),
        (("step", "--accept", "0,none"), "expected numbers from 0 to 1"),
        (("verify", "--lazy"), "--lazy is about decode"),
        (("decode", "--algorithm", "chunked"), "--algorithm is about prefill"),
        (("prefill", "--algorithm", "chunk"), "'chunk' is not one of 'recurrent', 'chunked', 'auto'"),
        (("prefill", "--algorithm", "chunked", "--head-dims", "24,32"), "key_head_dim: expected a multiple of 32"),
        (("fused", "--pending", "65"), "65 is not in the range"),
        (("fused", "--pending", "-1"), "-1 is not in the range"),
        (("fused", "--pending", "5", "--ring-len", "4"), "pending: expected at most 4 records, in a ring of 4, got 5"),
        (("lazy", "--pending", "5", "--ring-len", "8"), "4 records, in a ring of 8 ahead of a window of 4, got 5"),
        (("fold", "--layers", "0"), "0 is not in the range"),
        (("decode", "--repeats", "0"), "0 is not in the range"),
        (("prefill", "--seq-len", "x"), "expected counts"),
        (("decode", "--model", "qwen3.6-27"), "did you mean qwen3.6-27b"),
        (("decode", "--heads", "2,3"), "num_value_heads: expected"),
        (("decode", "--state-dtype", "float64"), "unknown type"),
        (("decod",), "did you mean decode"),
        (("--case", "walk"), "unknown case"),
        (("decode", "--backend", "cuda"), "backend cuda cannot run here: no GPU in this test"),
        (("decode", "--fail-above", "1.05"), "--compare FILE, which is missing"),
        (("decode", "--compare", "no/such/file"), "does not exist"),
        (("decode", "--save", "no/such/folder/file"), "no folder"),
        (("decode", "--peer", "vlm"), "unknown peer"),
    ],
)
def test_a_mistake_in_the_usage_ends_with_2(arguments: tuple[str, ...], message: str) -> None:
    """Field case 16: a batch larger than the pool among them; nothing is launched."""
    result = bench(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert message in result.stderr


@pytest.mark.parametrize("regime", [regime for regime in REGIMES if regime not in ("prefill", "gates")])
def test_every_regime_is_held_to_the_pool(monkeypatch: pytest.MonkeyPatch, regime: str) -> None:
    """Beside field case 16: in each regime with a pool a second batch that is too large ends it before the first."""
    for module in ("build", "layer_build"):
        monkeypatch.setattr(f"gdn.bench.{module}.plan_sets", lambda *case: pytest.fail("it began"))
    result = bench(regime, *TINY, "--batch", "8,9", "--max-slots", "8")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "batch: expected at most max_slots = 8 sequences, got 9" in result.stderr


def test_named_cases_and_rows_are_held_to_the_pool() -> None:
    """Beside field case 16: a batch may also come with a named case, or with the rows of a prefill."""
    for arguments, words in (
        (("--case", "decode_batch", "--max-slots", "23"), "at most max_slots = 23 sequences, got 24"),
        (("--case", "ring_48_layers", "--max-slots", "239"), "at most max_slots = 239 sequences of 48 layers, got 5"),
        (("prefill", "--max-slots", "3"), "at most max_slots = 3 sequences, got 4"),
    ):
        result = bench(*TINY, *arguments)
        assert (result.exit_code, result.stdout) == (2, ""), result.output
        assert f"batch: expected {words}" in result.stderr


@pytest.mark.parametrize("regime", ["decode", "verify", "fold", "fused", "lazy", "step"])
def test_a_batch_that_fills_the_pool(regime: str) -> None:
    """Beside field case 16: as many sequences as the pool may have slots are one set, and no slot lies behind it."""
    for case in cases(regime, batches=(8,), max_slots=8):
        workload = build_workload(case, SmallMachine())
        assert len(workload.pool) == 8
        assert [sorted(inputs.row_ids.ravel().tolist()) for inputs in workload.sets] == [list(range(8))]
        check_workload(workload)


def test_save_and_compare(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    result = bench("decode", *QUICK, "--save", str(saved))
    assert result.exit_code == 0, result.output
    before = json.loads(saved.read_text(encoding="ascii"))
    (row,) = before["rows"]
    row["us"] *= 1e6
    saved.write_text(json.dumps(before), encoding="ascii")
    result = bench("decode", *QUICK, "--compare", str(saved), "--fail-above", "1.05")
    assert result.exit_code == 0, result.output
    assert "ratio: time over that of gdn " in result.stdout
    assert any(line.split()[-1] == "0.000" for line in result.stdout.splitlines() if line.startswith("decode"))
    row["us"] = 1e-6
    saved.write_text(json.dumps(before), encoding="ascii")
    result = bench("decode", *QUICK, "--compare", str(saved), "--fail-above", "1.05")
    assert result.exit_code == 1
    assert "1 SLOWER than 1.05 times before (decode B=2 by numpy)" in result.stdout
    assert bench("decode", *QUICK, "--compare", str(saved)).exit_code == 0


@pytest.mark.parametrize("regime", ["verify", "fold", "fused", "step"])
def test_rows_of_another_ring_length_are_not_compared(regime: str, tmp_path: Path) -> None:
    """Records lie further apart in a longer ring: its times are not those of a short one."""
    quick, saved = (*QUICK, "--window", "2", "--accept", "1"), tmp_path / "before.json"
    arguments = quick if regime == "step" else quick[:-2]
    assert bench(regime, *arguments, "--ring-len", "4", "--save", str(saved)).exit_code == 0
    again, other = (
        document(regime, *arguments, "--ring-len", ring_len, "--compare", str(saved))["rows"][0]
        for ring_len in ("4", "8")
    )
    assert (again["ring_len"], other["ring_len"]) == (4, 8)
    assert again["ratio"] is not None
    assert other["ratio"] is None


def test_the_ring_beside_a_convolution_does_not_tell_its_rows_apart() -> None:
    keys = {document("conv", *QUICK, "--ring-len", ring_len)["rows"][1]["key"] for ring_len in ("4", "8")}
    assert len(keys) == 1


def test_nothing_to_compare_with_is_a_failure_only_with_a_limit(tmp_path: Path) -> None:
    saved = tmp_path / "before.json"
    bench("decode", *QUICK, "--save", str(saved))
    assert bench("verify", *QUICK, "--compare", str(saved)).exit_code == 0
    result = bench("verify", *QUICK, "--compare", str(saved), "--fail-above", "2")
    assert result.exit_code == 1
    assert "no row of the saved run to compare with" in result.stdout


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"rows": [{"us": 1}]}', '{"rows": [], "machine": 3}', "\xff"])
def test_a_file_that_is_no_saved_run(tmp_path: Path, text: str) -> None:
    saved = tmp_path / "other.json"
    saved.write_bytes(text.encode("latin-1"))
    result = bench("decode", *QUICK, "--compare", str(saved))
    assert result.exit_code == 2
    assert "is not what gdn bench --save writes" in result.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_the_finished_rows_printed_and_saved(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finished: list[BenchCase] = []

    def interrupted(case: BenchCase, *arguments: Any, **keywords: Any) -> Any:
        if finished:
            if number == signal.SIGINT:  # which a shell has its background jobs ignore
                raise KeyboardInterrupt
            signal.raise_signal(number)
        finished.append(case)
        return measure(case, *arguments, **keywords)

    monkeypatch.setattr(bench_module, "measure", interrupted)
    saved = tmp_path / "rows.json"
    result = bench("decode", "verify", *QUICK, "--save", str(saved))
    assert result.exit_code == 130
    assert any(line.split()[:2] == ["decode", "B=2"] for line in result.stdout.splitlines())
    assert result.stdout.splitlines()[-1] == "INTERRUPTED: 1 row timed, each after its check (1 not reached)"
    kept = json.loads(saved.read_text(encoding="ascii"))
    assert (kept["interrupted"], kept["passed"], len(kept["rows"])) == (True, False, 1)


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "bench.png"
    result = bench("decode", "--lazy", "step", *TINY, "--warm", "--batch", "1,2", "--plot", str(picture))
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = bench("decode", *QUICK, "--plot", str(tmp_path / "bench.doc"))
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (2, "", [])
    assert "--plot writes no file that ends in .doc; expected a name such as " in result.stderr


def test_a_picture_needs_matplotlib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("matplotlib", "matplotlib.axes", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "gdn.cli.bench_plot", raising=False)
    result = bench("decode", *QUICK, "--plot", str(tmp_path / "bench.png"))
    assert result.exit_code == 2
    assert "install gdn[plot]" in result.stderr


# ---- Other packages ----


def test_a_peer_is_timed_beside_a_gpu_only() -> None:
    result = bench("decode", *QUICK, "--peer", "fla", "--peer", "flashinfer")
    assert result.exit_code == 0
    assert "fla is not timed: it is timed beside the cuda backend" in result.stdout
    assert "flashinfer is not timed: " in result.stdout


@pytest.mark.parametrize("name", ["fla", "flashinfer"])
def test_a_peer_that_is_absent_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PeerRefused) as refused:
        load_peer(name)
    assert "cannot be imported" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["fla", "flashinfer"])
def test_a_peer_whose_call_is_another_is_one_line(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    def other(q: Any, k: Any, v: Any) -> None:
        pass

    functions = ("fused_recurrent_gated_delta_rule", "chunk_gated_delta_rule", "gated_delta_rule_mtp")
    module = SimpleNamespace(**dict.fromkeys((*functions, "gated_delta_rule_decode_pretranspose"), other))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    for path in ("fla.ops.gated_delta_rule", "flashinfer.gdn_decode", "flashinfer.gdn_prefill"):
        parts = path.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[0]))
        monkeypatch.setitem(sys.modules, path, module)
    with pytest.raises(PeerRefused, match=r"its other takes no "):
        load_peer(name)


@pytest.mark.parametrize(
    ("regime", "state_dtype", "reason"),
    [
        ("prefill", "bfloat16", "timed for prefill on a pool of float32 only"),
        ("verify", "bfloat16", "no public call for a verify on a pool of bfloat16"),
        ("decode", "float16", "float32 or bfloat16 only"),
    ],
)
def test_what_flashinfer_has_no_call_for_is_one_line(
    monkeypatch: pytest.MonkeyPatch, regime: str, state_dtype: str, reason: str
) -> None:
    def decode(q: Any, state: Any, initial_state: Any, initial_state_indices: Any, output: Any) -> None:
        pass

    def other(**keywords: Any) -> None:
        pass

    functions = {"gated_delta_rule_mtp": other, "chunk_gated_delta_rule": other}
    module = SimpleNamespace(gated_delta_rule_decode_pretranspose=decode, **functions)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: True)))
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    for path in ("flashinfer.gdn_decode", "flashinfer.gdn_prefill"):
        monkeypatch.setitem(sys.modules, path, module)
    peer = FlashInfer()
    options = CaseOptions(
        HeadGeometry(1, 1, 128, 128), state_dtypes=(state_dtype,), batches=(1,), seq_lens=(3,), cold=False
    )
    (case,) = build_cases((regime,), options, on_gpu=False)
    workload = build_workload(case, CpuMachine("numpy"))
    with pytest.raises(PeerRefused, match=reason):
        peer.prepare(workload)


@pytest.mark.parametrize("regime", ["fused", "lazy"])
def test_a_peer_without_records_is_one_line(monkeypatch: pytest.MonkeyPatch, regime: str) -> None:
    class Other(TorchPeer):
        name = "other"

        def prepare(self, workload: Workload) -> Any:
            raise AssertionError("prepared")

    cuda = SimpleNamespace(is_available=lambda: True, empty_cache=lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, no_grad=nullcontext))
    (case,) = cases(regime, cold=False)
    ours, theirs = measure(case, CpuMachine("numpy"), CEILINGS, 3, peers=(Other(),)).rows
    assert ours.timing is not None
    assert (theirs.failed, theirs.timing) == (False, None)
    assert "no records that could be pending" in str(theirs.problem)


class _Peer(Peer):
    name = "other"

    def __init__(self, run: Callable[[Workload], tuple[str, Spread, dict[str, float]]]) -> None:
        self._run = run

    def run(self, workload: Workload, repeats: int) -> tuple[str, Spread, dict[str, float]]:
        return self._run(workload)


def failing(error: Exception) -> Callable[[Workload], Any]:
    def run(workload: Workload) -> Any:
        raise error

    return run


def test_peers_have_rows_and_their_failures_are_lines() -> None:
    peers = (
        _Peer(lambda workload: ("readout", Spread(2.0, 1.0, 3.0, 5), {})),
        _Peer(failing(PeerRefused("no such call"))),
        _Peer(failing(RuntimeError("CUDA error\nat some place"))),
    )
    rows = measure(cases("decode", cold=False)[0], CpuMachine("numpy"), CEILINGS, 3, peers=peers).rows
    assert [row.by for row in rows] == ["numpy", "other", "other", "other"]
    assert rows[1].timing is not None
    assert rows[1].timing.gb_per_s == pytest.approx(1e-3 * rows[1].num_bytes / 2)
    assert [row.problem for row in rows[2:]] == ["no such call", "RuntimeError: CUDA error"]
    assert not any(row.failed for row in rows)


# ---- The GPU's clock, with a CuPy that only takes notes ----


class Notes:
    """A CuPy whose GPU needs 1000 us for each launch of a graph, on a clock of its own."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now_us = 0.0
        notes = self

        class Event:
            def record(self, stream: Any) -> None:
                self.at_us = notes.now_us

            def synchronize(self) -> None:
                notes.log.append("wait")

        class Graph:
            def launch(self, stream: Any) -> None:
                notes.now_us += 1000

        class Stream:
            def __init__(self, *, non_blocking: bool) -> None:
                assert non_blocking

            def __enter__(self) -> Stream:
                notes.log.append("enter")
                return self

            def __exit__(self, *reason: object) -> None:
                notes.log.append("exit")

            def begin_capture(self) -> None:
                notes.log.append("begin")

            def end_capture(self) -> Graph:
                notes.log.append("end")
                return Graph()

            def synchronize(self) -> None:
                notes.log.append("wait")

        class Device:
            id = 0

            def synchronize(self) -> None:
                notes.log.append("device")

        properties = {"l2CacheSize": 50 << 20, "name": b"A GPU", "totalGlobalMem": 1 << 30}
        runtime = SimpleNamespace(
            getDeviceProperties=lambda device: properties,
            memGetInfo=lambda: (12345, 99999),
            driverGetVersion=lambda: 13000,
            runtimeGetVersion=lambda: 12090,
        )
        self.cupy = SimpleNamespace(
            __version__="14.2.0",
            asarray=np.array,
            get_default_memory_pool=lambda: SimpleNamespace(free_all_blocks=lambda: self.log.append("free")),
            cuda=SimpleNamespace(
                Device=Device,
                Event=Event,
                Stream=Stream,
                runtime=runtime,
                get_elapsed_time=lambda begin, end: 1e-3 * (end.at_us - begin.at_us),
            ),
        )


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    """CuPy replaced by one that takes notes."""
    taken = Notes()
    monkeypatch.setitem(sys.modules, "cupy", taken.cupy)
    monkeypatch.setattr("gdn.bench.cuda._CLOCK_UP_SECONDS", 0.0)
    return taken


def test_a_graph_of_all_sets_is_captured_after_everything_else_and_replayed(notes: Notes) -> None:
    calls = [lambda idx=idx: notes.log.append(f"call {idx}") for idx in range(4)]  # type: ignore[misc] # bound per call
    samples = GpuMachine().time_us(calls, 20)
    assert samples == [pytest.approx(250.0)] * 20
    capture = ["device", "enter", "begin", "call 0", "call 1", "call 2", "call 3", "end", "exit"]
    assert notes.log[: len(capture)] == capture


def test_a_capture_that_fails_is_ended(notes: Notes) -> None:
    with pytest.raises(ZeroDivisionError):
        GpuMachine().time_us([lambda: 1 / 0], 3)
    assert notes.log == ["device", "enter", "begin", "end", "exit"]


def test_pythons_part_of_a_call_is_timed_without_waiting(notes: Notes) -> None:
    overhead = GpuMachine().python_overhead_us(lambda: notes.log.append("call"))
    assert overhead is not None
    assert 0 < overhead < 1e3
    assert notes.log.count("call") == 1001
    assert notes.log.count("device") == 6


def test_facts_and_sizes_of_a_gpu(notes: Notes) -> None:
    machine = GpuMachine()
    facts = machine.facts()
    assert facts["GPU"] == "A GPU, 50 MiB L2"
    assert (facts["CUDA"], facts["CuPy"]) == ("12.9", "14.2.0")
    assert machine.cold_bytes() == 320_000_000
    assert machine.free_bytes() == 12345
    assert notes.log == ["free"]


def test_the_row_of_a_peer_is_the_same_whatever_our_algorithm() -> None:
    keys = []
    for algorithm in ("recurrent", "chunked"):
        options = CaseOptions(HeadGeometry(1, 2, 32, 32), seq_lens=(70,), cold=False, algorithm=algorithm)
        case = build_cases(("prefill",), options, on_gpu=False)[0]
        peers = (_Peer(lambda _: ("readout", Spread(5.0, 4.0, 6.0, 3), {})), _Peer(failing(PeerRefused("absent"))))
        ours, *theirs = measure(case, CpuMachine("numpy"), CEILINGS, 3, peers=peers).rows
        assert ours.case.algorithm == algorithm
        assert [row.case.algorithm for row in theirs] == [None, None]
        keys.append([row.key for row in (ours, *theirs)])
    assert keys[0][0] != keys[1][0]
    assert keys[0][1:] == keys[1][1:]


# ---- A CPU ----


def test_ceilings_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying counts the bytes read and written; reading goes by the fastest of its three ways."""
    took_us = iter([50.0, 400.0, 100.0, 200.0])

    def time_us(self: CpuMachine, calls: list[Callable[[], object]], repeats: int) -> list[float]:
        for call in calls:
            call()
        return [next(took_us)] * repeats

    monkeypatch.setattr(cpu_module, "_CEILING_BYTES", 1 << 20)
    monkeypatch.setattr(CpuMachine, "time_us", time_us)
    ceilings = MEASURE_CEILINGS(CpuMachine("numpy"))
    assert ceilings.copy_gb_s == pytest.approx(2 * (1 << 20) / 50e-6 / 1e9)
    assert ceilings.read_gb_s == pytest.approx((1 << 20) / 100e-6 / 1e9)


def test_a_system_that_does_not_count_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    def sysconf(name: str) -> int:
        raise ValueError(f"unrecognized configuration name {name}")

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert CpuMachine("numpy").free_bytes() == 2 << 30


def test_a_case_has_the_call_of_its_regime_alone() -> None:
    decode, verify = next(iter(cases("decode"))), next(iter(cases("verify")))
    assert decode.recurrence_call is decode.call
    assert verify.ring_call is verify.call
    with pytest.raises(TypeError, match=r"^decode of .* has no ring$"):
        _ = decode.ring_call
    with pytest.raises(TypeError, match=r"^verify of .* has a ring$"):
        _ = verify.recurrence_call
