"""`gdn bench`: loops of a decode step in its three forms, their tables, bytes, check, clock and rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gdn.backends import numpy as numpy_backend
from gdn.bench import check_loop as check_loop_module
from gdn.bench.build import build_workload, plan_sets
from gdn.bench.case_lists import build_cases, too_short_ring_lens
from gdn.bench.cases import BenchCase, CaseOptions, Loop
from gdn.bench.check import CheckFailed, check_workload
from gdn.bench.cpu import CpuMachine
from gdn.bench.loops import loop_tables
from gdn.bench.measure import measure
from gdn.bench.peers.peer import Peer
from gdn.bench.timing import Spread
from gdn.bench.traffic import Ceilings, attainable_us, case_bytes, fold_bytes, fused_bytes, lazy_bytes, verify_bytes
from gdn.bench.workload import Workload
from gdn.cli.main import main
from gdn.geometry import HeadGeometry

pytestmark = pytest.mark.usefixtures("same_everywhere")

CEILINGS = Ceilings(copy_gb_s=4000.0, read_gb_s=5000.0)
TINY = ("--backend", "numpy", "--heads", "1,2", "--head-dims", "8,8", "--repeats", "3", "--state-dtype", "float32")
QUICK = (*TINY, "--batch", "2", "--warm")


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(main, ("bench", *arguments))


def rows(*arguments: str) -> list[dict[str, Any]]:
    result = bench(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def loops(*regimes: str, on_gpu: bool = False, **changes: Any) -> list[BenchCase]:
    values: dict[str, Any] = {"batches": (3,), "state_dtypes": ("float32",), "lazy": True, "cold": False} | changes
    options = CaseOptions(HeadGeometry(2, 4, 16, 8), **values)
    return [case for case in build_cases(regimes or ("step",), options, on_gpu=on_gpu) if case.loop]


def loop(words: str, **changes: Any) -> BenchCase:
    """The loop whose name ends with some words."""
    (case,) = (case for case in loops("decode", "step", **changes) if case.call.name.endswith(words))
    return case


# ---- Cases and tables ----


def test_every_form_at_every_acceptance_and_lazily_in_every_ring_that_holds_a_window() -> None:
    found = loops(accept=(0.0, 0.25, 1.0), ring_lens=(2, 4, 9))
    assert [case.call.name.removeprefix("B=3 T=4 accept ") for case in found] == [
        *("0 separate", "0 fused", "0 lazy 4"),
        *("0.25 separate", "0.25 fused", "0.25 lazy 4", "0.25 lazy 9"),
        *("1 separate", "1 fused", "1 lazy 4", "1 lazy 9"),
    ]
    assert [case.ring_call.ring_len for case in found[-4:]] == [4, 4, 4, 9]
    options = CaseOptions(HeadGeometry(1, 1, 8, 8), ring_lens=(2, 4, 9))
    assert too_short_ring_lens(options, on_gpu=False) == (2,)


def test_decode_is_timed_lazily_only_where_that_is_asked_for() -> None:
    assert [case.call.name for case in loops("decode", on_gpu=True)] == ["B=3 lazy 8", "B=3 lazy 16", "B=3 lazy 32"]
    assert [case.call.lengths for case in loops("decode", window=4)] == [(1, 1, 1)]
    assert loops("decode", lazy=False) == []


def test_a_full_ring_row_is_folded_and_the_window_moves_to_the_other() -> None:
    told = loop_tables(loop("accept 1 lazy 8", batches=(1,)))
    assert list(told.num_pending[:6, 0]) == [0, 4, 8, 4, 8, 4]
    assert list(told.own[:6, 0]) == [0, 0, 1, 1, 0, 0]
    assert list(told.pending[:6, 0]) == [0, 0, 0, 1, 1, 0]
    assert list(told.folds[:6, 0]) == [False, False, True, False, True, False]


@pytest.mark.parametrize(
    "words", ["accept 1 separate", "accept 1 fused", "accept 0 fused", "accept 1 lazy 9", "B=3 lazy 5"]
)
def test_timed_steps_can_follow_upon_themselves(words: str) -> None:
    """The step after the last timed one is told what the first one is."""
    case = loop(words, ring_lens=(5, 9))
    told = loop_tables(case)
    assert case.loop is not None
    longer = loop_tables(replace(case, loop=replace(case.loop, min_steps=told.num_timed + 1)))
    first, after = told.first_timed, len(told.own)
    for table in ("own", "pending", "num_pending"):
        assert np.array_equal(getattr(longer, table)[first], getattr(longer, table)[after])
    assert np.array_equal(longer.own[:after], told.own)


def test_acceptance_is_the_share_it_is_said_to_be_and_the_same_in_all_forms() -> None:
    separate, fused, lazy = (
        loop_tables(case) for case in loops(accept=(0.5,), batches=(200,), ring_lens=(16,), on_gpu=True)
    )
    assert 0.48 * 4 < separate.num_accepted.mean() < 0.52 * 4
    assert np.array_equal(fused.num_accepted[:40], separate.num_accepted[:40])
    assert np.array_equal(lazy.num_accepted[:40], separate.num_accepted[:40])
    assert (lazy.num_pending + 4 * ~lazy.folds <= 16).all()
    assert lazy.folds.any(axis=1).sum() > lazy.folds.all(axis=1).sum(), "sequences fold at different times"


# ---- Bytes ----


def test_bytes_of_a_loop_are_those_of_an_average_step() -> None:
    separate, fused, lazy = loops(accept=(1.0,), ring_lens=(8,))
    call = separate.ring_call
    assert case_bytes(separate) == verify_bytes(call) + fold_bytes(call)
    assert case_bytes(fused) == fused_bytes(call, 4)
    assert attainable_us(fused, CEILINGS) == pytest.approx(1e6 * fused_bytes(call, 4) / 4e12)
    # Every other step reads four pending records and no more, every other folds eight.
    assert case_bytes(lazy) == (lazy_bytes(call, 4) + fused_bytes(call, 8)) / 2
    reading, updating = 1e6 * lazy_bytes(call, 4) / 5e12, 1e6 * fused_bytes(call, 8) / 4e12
    assert attainable_us(lazy, CEILINGS) == pytest.approx((reading + updating) / 2)


def test_bytes_of_a_loop_that_accepts_nothing() -> None:
    separate, fused, lazy = loops(accept=(0.0,), ring_lens=(8,))
    call = separate.ring_call
    assert case_bytes(separate) == verify_bytes(call) + fold_bytes(replace(call, num_accepted=(0, 0, 0)))
    assert case_bytes(fused) == case_bytes(lazy) == lazy_bytes(call, 0)


# ---- The check ----


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_loops_pass_their_check(accept: float, state_dtype: str) -> None:
    options: dict[str, Any] = {"accept": (accept,), "state_dtypes": (state_dtype,), "slots": "permuted", "cold": True}
    for case in loops("decode", "step", ring_lens=(5, 8), **options):
        workload = build_workload(case, CpuMachine("numpy"))
        assert "loop" in check_workload(workload).split(", ")
        assert workload.ring.any()


def test_the_check_goes_on_until_a_fold_was_read_from(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    right = check_loop_module._Walk.accept
    monkeypatch.setattr(
        check_loop_module._Walk, "accept", lambda walk, counts: (counted.append(1), right(walk, counts))
    )
    for words, steps in (
        ("accept 1 separate", 2),
        ("accept 1 fused", 3),
        ("accept 1 lazy 16", 6),
        ("accept 0 fused", 2),
    ):
        counted.clear()
        check_workload(build_workload(loop(words, ring_lens=(16,)), CpuMachine("numpy")))
        assert len(counted) == steps, words


def changed(monkeypatch: pytest.MonkeyPatch, op: str, change: Callable[[Any], None]) -> None:
    """Run `change` on the arguments of a function of the numpy backend after it has run."""
    right = getattr(numpy_backend, op)

    def wrong(inputs: Any, *more: Any) -> None:
        right(inputs, *more)
        change((inputs, *more))

    monkeypatch.setattr(numpy_backend, op, wrong)


def grow_readout(arguments: Any) -> None:
    arguments[1].array[-1, -1] += 1


def grow_state(arguments: Any) -> None:
    recurrence = getattr(arguments[0], "recurrence", arguments[0])
    recurrence.recurrent_state.array[0, 0, 0, 0] += 1


def grow_third_record(arguments: Any) -> None:
    arguments[0].ring.array[:, 0, 2, 0] += 1


@pytest.mark.parametrize(
    ("words", "op", "change", "message"),
    [
        ("accept 1 separate", "gated_delta_recurrence_verify_ring", grow_readout, "loop: readout"),
        ("accept 1 separate", "gated_delta_state_fold", grow_state, "loop: states after a fold"),
        ("accept 1 fused", "gated_delta_recurrence_verify_ring", grow_state, "loop: states after a verify"),
        ("accept 1 fused", "gated_delta_recurrence_verify_ring", grow_third_record, "loop: states after a verify"),
        ("accept 1 lazy 8", "gated_delta_recurrence_verify_ring", grow_third_record, "loop: readout"),
        ("B=3 lazy 8", "gated_delta_recurrence_verify_ring", grow_readout, "loop: readout"),
    ],
)
def test_a_loop_that_fails_its_check_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, words: str, op: str, change: Callable[[Any], None], message: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("timed in spite of a failed check")

    changed(monkeypatch, op, change)
    monkeypatch.setattr(CpuMachine, "time_us", refuse)
    (row,) = measure(loop(words), CpuMachine("numpy"), CEILINGS, 3).rows
    assert row.failed
    assert message in str(row.problem)


def test_a_step_that_is_told_wrong_counts_fails_the_check() -> None:
    workload = build_workload(loop("accept 1 lazy 8"), CpuMachine("numpy"))
    workload.loop[1].windows[0].num_pending[:] -= 1
    with pytest.raises(CheckFailed, match="loop: readout against forward"):
        check_workload(workload)


# ---- The clock ----


class LargeMachine(CpuMachine):
    """A machine whose loops may go through many layers."""

    loop_calls = 10_000

    def cold_bytes(self) -> int:
        return 1 << 16


def test_all_forms_go_through_the_same_number_of_layers() -> None:
    planned = {plan_sets(case, LargeMachine("numpy")) for case in loops(cold=True)}
    assert planned == {(-(-(1 << 16) // verify_bytes(loops()[0].ring_call)), True)}
    assert plan_sets(loop("accept 1 fused", cold=True), CpuMachine("numpy")) == (16 // 4, False)


@pytest.mark.parametrize(("words", "folds_of_a_step"), [("accept 1 separate", 1), ("accept 1 fused", 0)])
def test_a_step_verifies_every_layer_and_folds_all_at_once(
    monkeypatch: pytest.MonkeyPatch, words: str, folds_of_a_step: int
) -> None:
    case = loop(words, cold=True)
    workload = build_workload(case, LargeMachine("numpy"))
    check_workload(workload)
    ran: list[str] = []
    changed(monkeypatch, "gated_delta_recurrence_verify_ring", lambda arguments: ran.append("verify"))
    changed(monkeypatch, "gated_delta_state_fold", lambda arguments: ran.append("fold"))
    workload.run_loop(slice(2, 4))
    assert len(workload.sets) > 2
    assert ran == (["verify"] * len(workload.sets) + ["fold"] * folds_of_a_step) * 2
    moved = [inputs.row_ids.ravel() for inputs in workload.sets]
    before = workload.pool.copy()
    workload.run_loop(slice(4, 5))
    assert all((workload.pool[slots] != before[slots]).any() for slots in moved)


def test_the_time_of_a_loop_is_that_of_one_layer_in_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    case = loop("accept 1 lazy 8", cold=True)
    machine = LargeMachine("numpy")
    ran: list[int] = []
    monkeypatch.setattr(Workload, "run_loop", lambda self, steps: ran.append(len(self.loop[steps])))
    monkeypatch.setattr(LargeMachine, "time_us", lambda self, calls, *more: [calls[0](), 7000.0, 7000.0][1:])
    (row,) = measure(case, machine, CEILINGS, 3).rows
    told = loop_tables(case)
    assert row.timing is not None
    assert ran == [told.first_timed, told.num_timed]
    assert row.timing.us.median_us == pytest.approx(7000 / (told.num_timed * row.num_sets))
    assert row.num_sets > 2


def test_other_packages_are_not_asked_for_loops() -> None:
    class Other(Peer):
        name = "other"

        def run(self, workload: Workload, repeats: int) -> tuple[str, Spread, dict[str, float]]:
            raise AssertionError("asked")

    (row,) = measure(loop("accept 1 fused"), CpuMachine("numpy"), CEILINGS, 3, peers=(Other(),)).rows
    assert row.by == "numpy"


# ---- Rows ----


def test_a_lazy_decode_is_held_against_a_plain_one() -> None:
    plain, lazy = rows("decode", "--lazy", *QUICK, "--ring-lens", "3")
    assert (plain["shape"], plain["form"], plain["speedup"]) == ("B=2", None, None)
    assert (lazy["shape"], lazy["form"], lazy["ring_len"], lazy["accept"]) == ("B=2 lazy 3", "lazy", 3, 1)
    assert lazy["speedup"] == {"over": "plain", "times": pytest.approx(plain["us"] / lazy["us"])}
    assert plain["key"] != lazy["key"]
    lines = bench("decode", "--lazy", *QUICK, "--ring-lens", "3").stdout.splitlines()
    (line,) = (line for line in lines if "lazy 3" in line)
    assert "both" in line
    assert line.rstrip().endswith("x plain")


def test_forms_are_held_against_the_separate_one_of_their_acceptance_and_batch() -> None:
    found = rows("step", *TINY, "--warm", "--batch", "1,2", "--accept", "0.25,1", "--accept", "1", "--ring-lens", "8")
    by_name = {row["shape"]: row for row in found if row["form"]}
    assert len(by_name) == 2 * 2 * 3
    for start in ("B=1 T=4 accept 1", "B=2 T=4 accept 0.25"):
        separate, fused, lazy = (by_name[f"{start} {form}"] for form in ("separate", "fused", "lazy 8"))
        assert separate["speedup"] is None
        for row in (fused, lazy):
            assert row["speedup"] == {"over": "separate", "times": pytest.approx(separate["us"] / row["us"])}


def test_a_ring_that_is_too_short_is_one_line() -> None:
    result = bench("step", *QUICK, "--ring-lens", "3,4", "--accept", "1")
    assert result.exit_code == 0
    assert "lazy loops in a ring of 3 are not timed: it holds no window of 4" in result.stdout
    assert "lazy 4" in result.stdout
    assert "are not timed" not in bench("decode", "--lazy", *QUICK, "--ring-lens", "3").stdout


def test_loops_compare_with_a_saved_run(tmp_path: Any) -> None:
    saved = tmp_path / "before.json"
    arguments = ("step", *QUICK, "--accept", "1", "--ring-lens", "4,8")
    assert bench(*arguments, "--save", str(saved)).exit_code == 0
    again = rows(*arguments, "--compare", str(saved))
    assert len({row["key"] for row in again}) == len(again) == 3 + 4
    assert all(row["ratio"] is not None for row in again)


def test_a_loop_is_no_step_of_its_own() -> None:
    with pytest.raises(TypeError, match="is no loop"):
        loop_tables(BenchCase("verify", loops()[0].call))
    assert loops()[0].loop == Loop("separate", 0.0, 4)
