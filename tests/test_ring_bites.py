"""The sweep can fail on ring cases: every broken verify, fold or op is caught, and by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import host
from gdn.geometry import HeadGeometry
from gdn.testing.ring_cases import RING_CASES, RingCase, build_ring_arrays
from gdn.testing.ring_checks import fold_of_forward, ring_subject
from gdn.testing.sweep import run_sweep

#: Two key heads of two value heads, two tiles a head, and two stages of 8 records; the last row has no ring row.
PLAIN = RingCase("plain", HeadGeometry(2, 4, 8, 128), 16, (16, 11, 17, 3, 5), (16, 9, 17, 0, 5), ring_padding=(4,))
ROUNDED = replace(PLAIN, name="rounded", state_dtype="bfloat16")
RECORD, VERIFY = "ring_record.cuh", "gated_delta_recurrence_verify_ring.cu"
FOLD = "gated_delta_state_fold.cu"
UPDATE = "update_state(state, stage.key[place] + lane.first_row, delta, stage.decay[place]);"
EACH_ELEMENT = "for (int r = 0; r < ROWS_PER_LANE; ++r) for (int c = 0; c < COLUMNS_PER_LANE; ++c)"


def failed_checks(case: RingCase, backend: str) -> set[str]:
    """Names of the checks that found something; the case itself must have run."""
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert result.passed == all(check.passed for check in result.checks)
    return {check.check for check in result.checks if not check.passed}


@pytest.mark.parametrize("case", [PLAIN, ROUNDED], ids=lambda case: case.name)
def test_the_kernels_as_they_are_pass(case: RingCase, edit: Callable[..., None]) -> None:
    edit(RECORD, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert failed_checks(case, "host") == set()


# Fault: the file it is in, its edits, and checks that must find it.
Fault = tuple[str, tuple[tuple[str, str], ...], set[str]]

FAULTS: dict[str, Fault] = {
    "decay applied after the update": (
        FOLD,
        (
            (
                UPDATE,
                f"{UPDATE.replace('stage.decay[place]', '1.0f')} {EACH_ELEMENT} state[r][c] *= stage.decay[place];",
            ),
        ),
        {"oracle", "E2"},
    ),
    "second stage read from the first record": (
        FOLD,
        (("records + (first + STAGE_RECORDS) * record_stride", "records"),),
        {"oracle", "E2"},
    ),
    "records one element too close": (
        VERIFY,
        (("(token - first_token) * record_stride", "(token - first_token) * (record_stride - 1)"),),
        {"oracle", "E2", "hands off"},
    ),
    "decay of the group's first head": (
        FOLD,
        (("decay_offset(head_of_group, group_size)", "decay_offset(0, group_size)"),),
        {"oracle", "E2"},
    ),
    "deltas of the group's first head": (
        FOLD,
        (("delta_offset(head_of_group)", "delta_offset(0)"),),
        {"oracle", "E2"},
    ),
    "key of head 0 alone written": (
        VERIFY,
        (("work.tile_column == 0 && work.head_of_group == 0", "work.tile_column == 0 && work.value_head == 0"),),
        {"oracle", "E2", "hands off"},
    ),
    "key of the next key head read": (
        FOLD,
        (("num_key_heads, key_head, record_stride)", "num_key_heads, (key_head + 1) % num_key_heads, record_stride)"),),
        {"oracle", "E2"},
    ),
    "deltas of the first tile alone": (
        VERIFY,
        (("delta_offset(work.head_of_group) + work.tile_column", "delta_offset(work.head_of_group)"),),
        {"oracle", "E2", "hands off"},
    ),
    "one record too many": (
        FOLD,
        (("static_cast<int>(count);", "static_cast<int>(count < RING_LEN ? count + 1 : count);"),),
        {"oracle", "E2", "unread"},
    ),
    "counts of the first row for all": (
        FOLD,
        (("num_accepted[row * num_accepted_stride]", "num_accepted[0]"),),
        {"oracle", "E2", "parts"},
    ),
    "slots of the first layer for all": (
        FOLD,
        (("row_ids[layer * row_ids_layer_stride +", "row_ids[0 * row_ids_layer_stride +"),),
        {"oracle", "E2", "parts"},
    ),
    "pool written by verify": (
        VERIFY,
        (("if (!fits_ring) store_state", "store_state"),),
        {"oracle", "E2", "hands off"},
    ),
    "long row not written": (
        VERIFY,
        (("if (!fits_ring) store_state", "if (false) store_state"),),
        {"oracle", "hands off"},
    ),
    "long row recorded": (VERIFY, (("fits_ring ? first_record : nullptr", "first_record"),), {"hands off"}),
    "padding of a record written": (
        VERIFY,
        (
            (
                "from_float(decay, record[decay_offset]);",
                "{ from_float(decay, record[decay_offset]); from_float(0.0f, record[record_stride - 1]); }",
            ),
        ),
        {"hands off"},
    ),
    "decay recorded with an error of one bit": (
        VERIFY,
        (("first_token) * record_stride;", "first_token) * record_stride; decay *= 1.0f + 2e-7f;"),),
        {"E2"},
    ),
    "rows without a ring row left as they were": (
        VERIFY,
        (("live_slot(batch, sequence) >= 0 && ring_row_of(sequence) >= 0;", "live_slot(batch, sequence) >= 0;"),),
        {"oracle", "E1"},
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel(fault: str, edit: Callable[..., None]) -> None:
    file_name, changes, expected = FAULTS[fault]
    edit(file_name, *changes)
    assert expected <= failed_checks(PLAIN, "host")


def test_state_rounded_at_each_record(edit: Callable[..., None]) -> None:
    """Field case 48: the fold rounds once, at its store."""
    rounding = "STATE_TYPE stored; from_float(state[r][c], stored); state[r][c] = to_float(stored);"
    edit(FOLD, (UPDATE, f"{UPDATE} {EACH_ELEMENT} {{ {rounding} }}"))
    assert "E2" in failed_checks(ROUNDED, "host")


@pytest.mark.parametrize(
    "barrier",
    [
        ("__syncthreads();\n        for (int place = 0; place < num_staged", "for (int place = 0; place < num_staged"),
        ("__syncthreads();  // the next stage", "// the next stage"),
    ],
    ids=["after filling a stage", "before the next stage"],
)
def test_a_missing_barrier(barrier: tuple[str, str], edit: Callable[..., None]) -> None:
    edit(FOLD, barrier)
    arrays = build_ring_arrays(PLAIN)
    found = []
    for seed in range(1, 5):
        with host.options(order_seed=seed):
            found += fold_of_forward(ring_subject(PLAIN, "host", arrays))
    assert not all(found)


# ---- Broken ops ----


def fold_of_nothing(*arguments: Any) -> None:
    pass


def test_a_fold_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "gated_delta_state_fold", fold_of_nothing)
    assert {"oracle", "E2", "bites"} <= failed_checks(PLAIN, "numpy")
    cases = [case for case in RING_CASES.values() if any(0 < n <= case.ring_len for n in case.num_accepted)]
    assert [result.case.name for result in run_sweep(cases, ["numpy"]) if result.passed] == []


def test_a_verify_that_writes_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 20: a verify that is a forward."""
    monkeypatch.setattr(
        ops,
        "gated_delta_recurrence_verify_ring",
        lambda *arguments, out: ops.gated_delta_recurrence_fwd(*arguments[:6], out=out),
    )
    assert {"hands off", "E2"} <= failed_checks(PLAIN, "numpy")


def test_a_verify_that_changes_a_foreign_ring_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_delta_recurrence_verify_ring

    def broken(*arguments: Any, out: Any) -> Any:
        right(*arguments, out=out)
        ring, rows = arguments[6], arguments[7]
        foreign = np.setdiff1d(np.arange(len(ring)), rows)[-1]
        ring[foreign, 0, 0, 0] = np.copysign(np.nan, -1)
        return out

    case = replace(PLAIN, num_layers=1)
    assert failed_checks(case, "numpy") == set()
    monkeypatch.setattr(ops, "gated_delta_recurrence_verify_ring", broken)
    assert failed_checks(case, "numpy") == {"hands off"}


def test_a_verify_whose_readout_is_off_by_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """E1 is equality: a readout that is right to the tolerance is not enough."""
    right = ops.gated_delta_recurrence_verify_ring

    def broken(*arguments: Any, out: Any) -> Any:
        right(*arguments, out=out)
        out[0, 0] = np.nextafter(out[0, 0], np.float32(np.inf))
        return out

    monkeypatch.setattr(ops, "gated_delta_recurrence_verify_ring", broken)
    assert failed_checks(PLAIN, "numpy") == {"E1"}
