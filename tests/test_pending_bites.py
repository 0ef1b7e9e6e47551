"""The checks of pending records can fail: every broken NumPy form or op is caught, and by the check that should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import indices, ops
from gdn.backends import numpy as numpy_backend
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.pending_steps import WAYS, build_pending_arrays
from gdn.testing.ring_cases import RING_CASES, RingCase
from gdn.testing.sweep import run_sweep

#: Every kind of window behind every kind of pending records; the last two rows are padding, by slot and by ring row.
PLAIN = RingCase(
    "plain",
    HeadGeometry(2, 4, 8, 16),
    4,
    lengths=(1, 2, 0, 3, 4, 5, 2, 4, 1, 2, 2),
    num_accepted=(1, 1, 0, 2, 4, 5, 0, 0, 1, 2, 2),
    num_pending=(3, 2, 2, 2, 0, 4, 5, 5, 1, 3, 3),
    padding=(9,),
    ring_padding=(10,),
)
ROUNDED = replace(PLAIN, name="rounded", state_dtype="bfloat16")
WALK = replace(PLAIN, name="walk", walk_steps=40)
EQUALITIES = {"fused", "lazy", "mixed", "kept", "fwd"}


def failed_checks(case: RingCase) -> set[str]:
    """Names of the checks that found something; the case itself must have run."""
    (result,) = run_sweep([case], ["numpy"])
    assert result.error is None
    assert result.passed == all(check.passed for check in result.checks)
    return {check.check for check in result.checks if not check.passed}


@pytest.mark.parametrize("case", [PLAIN, ROUNDED, WALK], ids=lambda case: case.name)
def test_the_numpy_form_as_it_is_passes(case: RingCase) -> None:
    assert failed_checks(case) == set()


# ---- Broken parts of the NumPy form ----


def fold_nothing(fold_rows: Any) -> Any:
    return lambda inputs, pending, sequences: None


def fold_padding_too(fold_rows: Any) -> Any:
    """Rows whose window has no ring row fold what is pending elsewhere."""

    def broken(inputs: Any, pending: Any, sequences: Any) -> None:
        slots = indices.slot_values(inputs.slot_idx)
        fold_rows(inputs, pending, np.flatnonzero(indices.has_pending(pending) & (slots != PAD_SLOT)))

    return broken


def fold_rows_with_tokens(fold_rows: Any) -> Any:
    """Empty windows do not fold."""

    def broken(inputs: Any, pending: Any, sequences: Any) -> None:
        lengths = np.diff(indices.offset_values(inputs.input_row_offsets))
        fold_rows(inputs, pending, sequences[lengths[sequences] > 0])

    return broken


def count_above_ring_len_applies(has_pending: Any) -> Any:
    """A count above RING_LEN takes all records that there are."""

    def broken(pending: Any) -> Any:
        counts, rows = indices.slot_values(pending.num_pending), indices.slot_values(pending.ring_slot_idx)
        return (counts > 0) & (rows != PAD_SLOT)

    return broken


def fold_in_the_same_row_too(folds_pending: Any) -> Any:
    return lambda inputs, pending: indices.has_pending(pending)


def keep_in_another_row_too(folds_pending: Any) -> Any:
    return lambda inputs, pending: np.zeros(inputs.recurrence.batch_size, bool)


# Fault: what is broken in the module, how, and checks that must find it.
BROKEN_NUMPY: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "nothing is folded": ("_fold_rows", fold_nothing, {"pending", "fused", "mixed", "kept", "fwd", "less"}),
    "padding folds": ("_fold_rows", fold_padding_too, {"pending", "fused", "mixed"}),
    "empty windows do not fold": ("_fold_rows", fold_rows_with_tokens, {"fused", "kept", "fwd"}),
    "a count above the ring's length applies": (
        *("has_pending", count_above_ring_len_applies),
        {"pending", "fused", "mixed", "kept", "fwd"},
    ),
    "the same row folds": ("folds_pending", fold_in_the_same_row_too, {"pending", "lazy", "mixed", "kept"}),
    "another row stays": ("folds_pending", keep_in_another_row_too, {"pending", "fused", "mixed", "kept"}),
}


@pytest.mark.parametrize("fault", BROKEN_NUMPY)
def test_broken_numpy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, expected = BROKEN_NUMPY[fault]
    monkeypatch.setattr(numpy_backend, name, broken(getattr(numpy_backend, name)))
    assert expected <= failed_checks(PLAIN)


# ---- Broken ops ----

Op = Callable[..., Any]


def ignoring_pending(op: Op) -> Op:
    """As if nothing were pending."""

    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        return op(*arrays, out=out)

    return broken


def one_record_less(op: Op) -> Op:
    """The last pending record is lost wherever there is one."""

    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        if pending:
            counts = pending["num_pending"].copy()
            counts[counts.view(np.uint32) - 1 < 4] -= 1
            pending["num_pending"] = counts
        return op(*arrays, out=out, **pending)

    return broken


def rounded_once(op: Op) -> Op:
    """What is pending is folded and the window run from a state that was not rounded between."""

    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        pool = arrays[3]
        wide = pool.astype(np.float32)
        op(*arrays[:3], wide, *arrays[4:], out=out, **pending)
        pool[...] = wide.astype(pool.dtype)
        return out

    return broken


def readout_off_by_one_bit(op: Op) -> Op:
    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        op(*arrays, out=out, **pending)
        if pending:
            out[0, 0] = np.nextafter(out[0, 0], np.float32(np.inf))
        return out

    return broken


def pending_ring_row_written(op: Op) -> Op:
    """A byte of the padding of a row's first pending record changes."""

    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        op(*arrays, out=out, **pending)
        if pending:
            ring = pending["ring"] if "ring" in pending else arrays[6]
            row = pending["pending_ring_slot_idx"].view(np.uint32)[0]
            ring[row, 0, 0, -1] = np.copysign(np.nan, -1)
        return out

    return broken


def pool_written_in_place_of_records(op: Op) -> Op:
    """A lazy window advances its slot, as a forward over the window would."""

    def broken(*arrays: Any, out: Any, **pending: Any) -> Any:
        op(*arrays, out=out, **pending)
        if pending:
            ops.gated_delta_recurrence_fwd(*arrays[:6], out=out.copy())
        return out

    return broken


VERIFY, FORWARD = "gated_delta_recurrence_verify_ring", "gated_delta_recurrence_fwd"

# Fault: the op, how it is broken, the case, and exactly the checks that find it.
BROKEN_OPS: dict[str, tuple[str, Callable[[Op], Op], RingCase, set[str]]] = {
    "verify ignores what is pending": (
        *(VERIFY, ignoring_pending, PLAIN),
        {"pending", "fused", "lazy", "mixed", "kept", "less"},
    ),
    "verify loses a record": (VERIFY, one_record_less, PLAIN, {"pending", "fused", "lazy", "mixed", "kept"}),
    "verify folds without rounding": (VERIFY, rounded_once, ROUNDED, {"fused", "mixed", "kept", "less"}),
    "verify is off by one bit": (VERIFY, readout_off_by_one_bit, PLAIN, {"fused", "lazy", "mixed"}),
    "verify writes a pending record": (VERIFY, pending_ring_row_written, PLAIN, {"fused", "lazy", "mixed"}),
    "verify writes the pool": (
        *(VERIFY, pool_written_in_place_of_records, PLAIN),
        {"pending", "fused", "lazy", "mixed", "kept"},
    ),
    "fwd ignores what is pending": (FORWARD, ignoring_pending, PLAIN, {"fwd"}),
    "fwd loses a record": (FORWARD, one_record_less, PLAIN, {"fwd"}),
    "fwd folds without rounding": (FORWARD, rounded_once, ROUNDED, {"fwd"}),
    "fwd is off by one bit": (FORWARD, readout_off_by_one_bit, PLAIN, {"fwd"}),
    "fwd writes a pending record": (FORWARD, pending_ring_row_written, PLAIN, {"fwd"}),
}


@pytest.mark.parametrize("fault", BROKEN_OPS)
def test_a_broken_op(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, case, expected = BROKEN_OPS[fault]
    monkeypatch.setattr(ops, name, broken(getattr(ops, name)))
    assert failed_checks(case) == expected


@pytest.mark.parametrize("fault", ["verify loses a record", "verify folds without rounding", "fwd loses a record"])
def test_a_walk_of_a_broken_op(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, case, _ = BROKEN_OPS[fault]
    monkeypatch.setattr(ops, name, broken(getattr(ops, name)))
    assert "long walk" in failed_checks(replace(case, walk_steps=40))


def test_an_op_that_ignores_pending_records_fails_every_case_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, VERIFY, ignoring_pending(ops.gated_delta_recurrence_verify_ring))
    cases = [case for case in RING_CASES.values() if case.num_pending]
    assert len(cases) > 15
    assert [result.case.name for result in run_sweep(cases, ["numpy"]) if result.passed] == []


# ---- What the cases are made of ----


def test_records_beyond_the_pending_ones_are_poison() -> None:
    """Nobody may read more of the ring than a window before has left there: all else is NaN."""
    arrays = build_pending_arrays(PLAIN)
    assert np.isnan(arrays.windows.ring).all()
    assert [len(np.unique(table)) for table in (arrays.windows.ring_row_ids, arrays.other_row_ids)] == [21, 22]
    assert np.intersect1d(arrays.windows.ring_row_ids, arrays.other_row_ids).size == 0
    assert [np.diff(tokens.input_row_offsets).tolist() for tokens in arrays.earlier] == [list(PLAIN.num_pending)] * 2
    assert arrays.counts.tolist() == [3, 2, 2, 2, 0, 4, 5, 65, 1, 3, 3]


def test_rows_go_through_the_ways_in_turn() -> None:
    arrays = build_pending_arrays(PLAIN)
    own, other = arrays.windows.ring_row_ids, arrays.other_row_ids
    np.testing.assert_array_equal(arrays.pending_row_ids("fused"), other)
    np.testing.assert_array_equal(arrays.pending_row_ids("lazy"), own)
    mixed = arrays.pending_row_ids("mixed")
    choices = {"another row": other, "same row": own, "no row": np.full_like(own, PAD_SLOT)}
    for row in range(own.shape[1]):
        kind = WAYS["mixed"][row % len(WAYS["mixed"])]
        np.testing.assert_array_equal(mixed[:, row], choices[kind][:, row])


@pytest.mark.parametrize("ring_len", [1, 4])
def test_a_named_case_has_every_window_behind_every_count(ring_len: int) -> None:
    case = RING_CASES[f"pending_of_{ring_len}"]
    pairs = {(length, count) for length in range(ring_len + 2) for count in range(ring_len + 2)}
    assert set(zip(case.lengths, case.num_pending, strict=True)) == pairs


def test_pending_counts_have_one_entry_a_row() -> None:
    with pytest.raises(ValueError, match=r"^plain: 1 pending counts for 11 rows$"):
        replace(PLAIN, num_pending=(1,))


def test_a_host_that_is_not_asked_to_leaves_pending_records_out() -> None:
    assert {backend for backend in ("cuda", "host", "numpy") if PLAIN.checks_pending(backend)} == {"cuda", "numpy"}
    assert replace(PLAIN, pending_on_host=True).checks_pending("host")
    assert not replace(PLAIN, num_pending=(), pending_on_host=True).checks_pending("numpy")
