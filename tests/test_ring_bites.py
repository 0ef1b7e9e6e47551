"""The sweep can fail on ring cases: every broken verify, fold or op is caught, and by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends.row_tile import RowTile, forced_row_tile
from gdn.geometry import HeadGeometry
from gdn.testing.ring_cases import RING_CASES, RingCase
from gdn.testing.sweep import run_sweep

#: Two key heads of two value heads, two tiles a head; the last row has no ring row. No streaming map
#: serves these sizes: test_stream_bites.py has the faults of streams.
PLAIN = RingCase("plain", HeadGeometry(2, 4, 8, 128), 16, (16, 11, 17, 3, 5), (16, 9, 17, 0, 5), ring_padding=(4,))
ROUNDED = replace(PLAIN, name="rounded", state_dtype="bfloat16")
RECORD, WINDOW, FOLD = "ring_record.cuh", "ring_window.cuh", "gated_delta_state_fold.cu"
BLOCK, RECURRENCE = "block_tokens.cuh", "recurrence.cuh"
UPDATE = "update_state(state, key_rows, delta_factors, to_float(decay));"
EACH_ELEMENT = "for (int r = 0; r < PART_ROWS; ++r) for (int c = 0; c < COLUMNS_PER_LANE; ++c)"


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
                f"{UPDATE.replace('to_float(decay)', '1.0f')} {EACH_ELEMENT} state[r][c] *= to_float(decay);",
            ),
        ),
        {"oracle", "E2"},
    ),
    "every record read from the first one": (
        FOLD,
        (("is_last ? first_record : record + record_stride;", "first_record;"),),
        {"oracle", "E2"},
    ),
    "records one element too close": (
        WINDOW,
        (
            (
                "first_place * record_stride,\n                record_stride,",
                "first_place * record_stride, record_stride - 1,",
            ),
        ),
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
        WINDOW,
        (("work.tile_column == 0 && work.head_of_group == 0", "work.tile_column == 0 && work.value_head == 0"),),
        {"oracle", "E2", "hands off"},
    ),
    "key of the next key head read": (
        FOLD,
        (("num_key_heads, key_head, record_stride)", "num_key_heads, (key_head + 1) % num_key_heads, record_stride)"),),
        {"oracle", "E2"},
    ),
    "deltas of the first tile alone": (
        WINDOW,
        (("delta_offset(work.head_of_group) + work.tile_column", "delta_offset(work.head_of_group)"),),
        {"oracle", "E2", "hands off"},
    ),
    "one record too many": (
        FOLD,
        (
            (
                "const unsigned int count = num_accepted[row * num_accepted_stride];",
                "const unsigned int right = num_accepted[row * num_accepted_stride];"
                " const unsigned int count = right > 0 && right < RING_LEN ? right + 1 : right;",
            ),
        ),
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
        BLOCK,
        (("&& !window.is_recorded) store_state", ") store_state"),),
        {"oracle", "E2", "hands off"},
    ),
    "long row not written": (
        BLOCK,
        (("&& !window.is_recorded) store_state", "&& window.record_stride == 0) store_state"),),
        {"oracle", "hands off"},
    ),
    "long row recorded": (
        WINDOW,
        (
            (
                "is_recorded && work.tile_column == 0 && work.head_of_group == 0",
                "work.tile_column + work.head_of_group == 0",
            ),
        ),
        {"hands off"},
    ),
    "padding of a record written": (
        WINDOW,
        (
            (
                "if (writes_decay) from_float(decay,",
                "if (writes_decay) from_float(0.0f, first[(place + 1) * record_stride - 1]);"
                " if (writes_decay) from_float(decay,",
            ),
        ),
        {"hands off"},
    ),
    "decay recorded with an error of one bit": (
        WINDOW,
        (("from_float(decay, first[", "from_float(decay * (1.0f + 2e-7f), first["),),
        {"E2"},
    ),
    "rows without a ring row left as they were": (
        RECURRENCE,
        (
            (
                "live_slot(batch, entries) >= 0 && records.has_place(records.entries(sequence));",
                "live_slot(batch, entries) >= 0;",
            ),
        ),
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


#: Two parts of eight rows for each lane, in the map that the test forces.
PARTS = replace(PLAIN, name="parts", heads=HeadGeometry(2, 4, 16, 64))


@pytest.mark.parametrize("rows", ["is_last && part < LAST_PART ? part + PART_ROWS : part", "0"], ids=["right", "wrong"])
def test_the_second_part_of_a_lane(rows: str, edit: Callable[..., None]) -> None:
    edit(FOLD, ("is_last && part < LAST_PART ? part + PART_ROWS : part", rows))
    with forced_row_tile(RowTile(1, 16, 4)):
        assert ("E2" in failed_checks(PARTS, "host")) == (rows == "0")


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


@pytest.mark.parametrize("place", [0, 7, 15])
def test_a_record_of_another_size(monkeypatch: pytest.MonkeyPatch, place: int) -> None:
    """Beside field case 5: a fold over records of which one is a hundredth too large is finite, and wrong."""
    right = ops.gated_delta_state_fold

    def broken(pool: Any, row_ids: Any, ring: Any, *tables: Any) -> None:
        larger = ring.copy()
        larger[:, :, place, : PLAIN.heads.key_head_dim] *= np.float32(1.01)
        right(pool, row_ids, larger, *tables)
        assert np.isfinite(pool[row_ids[:, :4]]).all()

    monkeypatch.setattr(ops, "gated_delta_state_fold", broken)
    assert {"oracle", "E2"} <= failed_checks(PLAIN, "numpy")


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
