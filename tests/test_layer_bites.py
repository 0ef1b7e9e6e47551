"""The sweep can fail on the ops around the recurrence: every broken kernel, backend or op is caught by its check."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import host, numpy_layer
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.conv1d_cases import CONV1D_CASES, Conv1dCase
from gdn.testing.gates_cases import GATES_CASES, GatesCase
from gdn.testing.layer_cases import LayerCase
from gdn.testing.steps_cases import STEPS_CASES, StepsCase
from gdn.testing.sweep import run_sweep

#: Rows shorter than the window of 3, as long, longer than heads and tiles; two padding rows; rows that nobody owns.
PLAIN = Conv1dCase(
    "plain", 12, 4, (1, 2, 0, 3, 17, 5, 8, 4), bias_dtype="float32", padding=(1, 5), leading_rows=20, trailing_rows=9
)
WIDE = replace(PLAIN, name="wide", conv_dim=1032)
MANY = CONV1D_CASES["conv_many_sequences"]  # in longer tiles than one of them alone
GATES = GatesCase("gates", 40, 24, inputs="extremes")
STEPS = StepsCase("steps", HeadGeometry(1, 2, 32, 32), 4)
CONV, FWD, COMMIT = "conv1d.cuh", "gated_delta_conv1d_fwd.cu", "gated_delta_conv1d_commit.cu"
GATES_KERNEL = "gated_delta_gates.cu"


def failed_checks(case: LayerCase, backend: str) -> set[str]:
    """Names of the checks that found something; the case itself must have run."""
    with host.options(max_os_threads=1):  # so that a block that wrongly writes another's rows does so after it
        (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert result.passed == all(check.passed for check in result.checks)
    return {check.check for check in result.checks if not check.passed}


@pytest.mark.parametrize("case", [PLAIN, WIDE, MANY, GATES, STEPS], ids=lambda case: case.name)
def test_the_kernels_as_they_are_pass(case: LayerCase, edit: Callable[..., None]) -> None:
    edit(CONV, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert failed_checks(case, "host") == set()


# ---- Broken kernels ----

LIVE_SLOT = "const long long slot = live_slot(batch, entries);"
SLOT_0_FOR_PADDING = (
    LIVE_SLOT,
    "const long long found = live_slot(batch, entries); const long long slot = found < 0 ? 0 : found;",
)
ONE_TOO_MANY = (
    "if (rows.begin + count < rows.end) rows.end = rows.begin + count;",
    "if (rows.begin + count + 1 < rows.end) rows.end = rows.begin + count + 1;",
)
DENSE_PLACES = "window.load(first + slot * slot_stride, channel_stride, 1)"
OTHER_BITS = "for (int c = 0; c < CHANNELS; ++c) outputs[c] *= 1.0f + 2e-7f;"
OF_TILE = "if (is_inner) filter.output(window, newest, outputs);"

# Fault: the case that shows it, its file, its edit, and the checks that must find it.
Fault = tuple[LayerCase, str, tuple[str, str], set[str]]

FAULTS: dict[str, Fault] = {
    "taps reversed": (
        PLAIN,
        FWD,
        ("fmaf_rn(weights[tap][channel]", "fmaf_rn(weights[WINDOW_LEN - 1 - tap][channel]"),
        {"oracle"},
    ),
    "bias forgotten": (PLAIN, FWD, ("float sum = biases[channel];", "float sum = 0.0f;"), {"oracle"}),
    "silu missing": (PLAIN, FWD, ("IS_SILU ? __fmul_rn(sum, sigmoid(sum)) : sum", "sum"), {"oracle"}),
    "window not moved by short rows": (
        PLAIN,
        CONV,
        ("if (!writes) return;", "if (!writes || rows.end - rows.begin < WINDOW_LEN) return;"),
        {"oracle", "E4"},
    ),
    "window of the first rows": (
        PLAIN,
        CONV,
        ("take(i, tokens.last[i])", "take(i, tokens.first[i])"),
        {"oracle", "E4"},
    ),
    "window not advanced within short rows": (
        PLAIN,
        CONV,
        ("            window.advance(inputs);", "            if (i > 0) window.advance(inputs);"),
        {"oracle", "E4"},
    ),
    "padding written to a slot": (PLAIN, FWD, SLOT_0_FOR_PADDING, {"untouched"}),
    "padding committed to a slot": (PLAIN, COMMIT, SLOT_0_FOR_PADDING, {"commit"}),
    "one token too many committed": (
        PLAIN,
        COMMIT,
        ONE_TOO_MANY,
        {"commit"},
    ),
    "counts of the first row for all": (
        PLAIN,
        COMMIT,
        ("num_accepted[sequence * num_accepted_stride]", "num_accepted[0]"),
        {"commit"},
    ),
    "counts taken for signed numbers": (
        PLAIN,
        COMMIT,
        ("const unsigned int count =", "const int count = (int)"),
        {"commit"},
    ),
    "window written in any case": (PLAIN, FWD, ("writes_state != 0", "true"), {"kept"}),
    "tile that ignores where a row starts": (
        PLAIN,
        FWD,
        ("tile_bits(of_sequence.begin + HEAD_TOKENS,", "tile_bits(of_sequence.begin,"),
        {"oracle", "E3", "E4"},
    ),
    "tile that looks back too little": (
        PLAIN,
        FWD,
        ("first_row - WINDOW_LEN + place;", "first_row - WINDOW_LEN + place + 1;"),
        {"oracle", "E3"},
    ),
    "last row of a tile left out": (
        PLAIN,
        FWD,
        ("if (is_inner || (tile.owned & bit) == 0)", "if ((is_inner || (tile.owned & bit) == 0) && i < 7)"),
        {"oracle"},
    ),
    "rows left as they were": (
        PLAIN,
        FWD,
        ("if (is_inner || (tile.owned & bit) == 0)", "if (is_inner)"),
        {"oracle"},
    ),
    "padding's rows convolved": (
        PLAIN,
        FWD,
        ("if (live_slot(batch, entries) < 0) continue;", ""),
        {"oracle"},
    ),
    "channels of the first block alone": (
        WIDE,
        FWD,
        ("first_channel(blockIdx.x % static_cast<unsigned int>(channel_blocks))", "first_channel(0)"),
        {"oracle"},
    ),
    "commit of the first block alone": (
        WIDE,
        COMMIT,
        ("first_channel(blockIdx.x % static_cast<unsigned int>(channel_blocks))", "first_channel(0)"),
        {"commit"},
    ),
    "other bits at the head of a row": (
        PLAIN,
        FWD,
        ("out.store(rows.begin + i, outputs);", f"{OTHER_BITS} out.store(rows.begin + i, outputs);"),
        {"E4"},
    ),
    "other bits in tiles of another size": (
        MANY,
        FWD,
        (OF_TILE, f"{OF_TILE} if (TILE_TOKENS > TOKENS_AT_ONCE) {OTHER_BITS}"),
        {"E3"},
    ),
    "other bits for a thread of one channel": (
        PLAIN,
        FWD,
        (OF_TILE, f"{OF_TILE} if (CHANNELS == 1) {OTHER_BITS}"),
        {"E7"},
    ),
    "output rounded on its way": (
        MANY,
        FWD,
        ("float sum = biases[channel];", "float sum = biases[channel] + (sizeof(OUT_TYPE) == 2 ? 0.01f : 0.0f);"),
        {"rounded"},
    ),
    "stride of places ignored": (
        CONV1D_CASES["conv_strided"],
        CONV,
        ("window.load(first + slot * slot_stride, channel_stride, place_stride)", DENSE_PLACES),
        {"oracle", "E5"},
    ),
    "stride of taps ignored": (
        CONV1D_CASES["conv_strided"],
        FWD,
        ("stored.channel_stride, stored.tap_stride)", "stored.channel_stride, 1)"),
        {"oracle", "E5"},
    ),
    "stride of biases ignored": (
        CONV1D_CASES["conv_width_2"],
        FWD,
        ("bias + channel * bias_stride", "bias + channel"),
        {"oracle", "E5"},
    ),
    "stride of counts ignored": (
        CONV1D_CASES["conv_unaligned"],
        COMMIT,
        ("num_accepted[sequence * num_accepted_stride]", "num_accepted[sequence]"),
        {"commit"},
    ),
    "decay without its sign": (
        GATES,
        GATES_KERNEL,
        ("expf(-negative_log_decay(", "expf(negative_log_decay("),
        {"oracle"},
    ),
    "gates of the first tokens alone": (
        GATES,
        GATES_KERNEL,
        ("(place >= total_seq_len * num_value_heads)", "(place >= total_seq_len * num_value_heads || place >= 512)"),
        {"oracle", "E3"},
    ),
    "gates of other bits in a later block": (
        GATES,
        GATES_KERNEL,
        ("expf(-negative_log_decay(", "(blockIdx.x ? 1.0f + 2e-7f : 1.0f) * expf(-negative_log_decay("),
        {"E3"},
    ),
    "beta doubled in any case": (
        GATES,
        GATES_KERNEL,
        ("allow_neg_eigval != 0 ? 2.0f * sigmoid : sigmoid", "2.0f * sigmoid"),
        {"oracle", "doubled"},
    ),
    "steps: one token too many committed": (
        STEPS,
        COMMIT,
        ONE_TOO_MANY,
        {"steps", "oracle", "E4"},
    ),
    "steps: window written by a draft": (STEPS, FWD, ("writes_state != 0", "true"), {"steps", "oracle", "E4"}),
    "steps: one record too few folded": (
        STEPS,
        "gated_delta_state_fold.cu",
        (
            "const unsigned int count = num_accepted[row * num_accepted_stride];",
            "const unsigned int right = num_accepted[row * num_accepted_stride];"
            " const unsigned int count = right > 0 && right <= RING_LEN ? right - 1 : right;",
        ),
        {"steps", "oracle", "E4"},
    ),
    "steps: padding committed to a slot": (STEPS, COMMIT, SLOT_0_FOR_PADDING, {"steps"}),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel(fault: str, edit: Callable[..., None]) -> None:
    case, file_name, change, expected = FAULTS[fault]
    edit(file_name, change)
    assert expected <= failed_checks(case, "host")


# ---- Broken NumPy ----


def window_in_the_wrong_order(right: Callable[..., Any]) -> Callable[..., Any]:
    def looked_back_on(batch: Any, slot: int, tokens: Any) -> Any:
        inputs = right(batch, slot, tokens)
        inputs[: batch.conv_width - 1] = inputs[: batch.conv_width - 1][::-1].copy()
        return inputs

    return looked_back_on


def window_moved_by_long_rows_alone(right: Callable[..., Any]) -> Callable[..., Any]:
    def move(batch: Any, slot: int, inputs: Any) -> None:
        if len(inputs) >= 2 * (batch.conv_width - 1):
            right(batch, slot, inputs)

    return move


def padding_on_slot_0(right: Callable[..., Any]) -> Callable[..., Any]:
    def live_rows(batch: Any, lengths: Any) -> Any:
        for slot, begin, length in zip(
            batch.slot_idx.array.view(np.uint32), batch.input_row_offsets.array, lengths, strict=False
        ):
            if length > 0:
                yield 0 if slot == PAD_SLOT else int(slot), slice(int(begin), int(begin + length))

    return live_rows


BROKEN_NUMPY: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "window in the wrong order": ("_with_window", window_in_the_wrong_order, {"oracle", "E4"}),
    "window moved by long rows alone": ("_move_window", window_moved_by_long_rows_alone, {"oracle", "E4"}),
    "padding on slot 0": ("_live_rows", padding_on_slot_0, {"oracle"}),
}


@pytest.mark.parametrize("fault", BROKEN_NUMPY)
def test_broken_numpy(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, broken, expected = BROKEN_NUMPY[fault]
    assert failed_checks(PLAIN, "numpy") == set()
    monkeypatch.setattr(numpy_layer, name, broken(getattr(numpy_layer, name)))
    assert expected <= failed_checks(PLAIN, "numpy")


# ---- Broken ops ----


def last_row_unwritten(given: dict[str, Any]) -> None:
    given["out"][-1] = np.nan


def foreign_slot_written(given: dict[str, Any]) -> None:
    spare = np.setdiff1d(np.arange(len(given["conv_state"])), given["slot_idx"])[0]
    given["conv_state"][spare, -1, -1] = 0


def slot_of_an_empty_sequence_written(given: dict[str, Any]) -> None:
    empty = np.diff(given["input_row_offsets"].astype(np.int64)) == 0
    slots = given["slot_idx"][empty]
    given["conv_state"][slots[slots != PAD_SLOT]] = 1


def written_beside(name: str) -> Callable[[dict[str, Any]], None]:
    def write(given: dict[str, Any]) -> None:
        given[name].base[-1] += 1

    return write


def input_changed(name: str) -> Callable[[dict[str, Any]], None]:
    def write(given: dict[str, Any]) -> None:
        place = np.unravel_index(given[name].size // 2, given[name].shape)
        old = given[name][place]
        given[name][place] = old ^ 1 if given[name].dtype.kind == "u" else old + 1

    return write


CONV_INPUTS = ("qkv", "conv_weight", "bias", "slot_idx", "input_row_offsets")
GATES_INPUTS = ("a", "b", "A_log", "dt_bias")
Misbehaviour = tuple[str, LayerCase, Callable[[dict[str, Any]], None], str]
MISBEHAVIOURS: dict[str, Misbehaviour] = {
    "last row unwritten": ("gated_delta_conv1d_fwd", PLAIN, last_row_unwritten, "oracle"),
    "foreign slot written": ("gated_delta_conv1d_fwd", PLAIN, foreign_slot_written, "untouched"),
    "slot of an empty sequence": ("gated_delta_conv1d_fwd", PLAIN, slot_of_an_empty_sequence_written, "untouched"),
    "foreign slot committed": ("gated_delta_conv1d_commit", PLAIN, foreign_slot_written, "commit"),
    "slot of an empty sequence committed": (
        *("gated_delta_conv1d_commit", PLAIN),
        *(slot_of_an_empty_sequence_written, "commit"),
    ),
    **{f"{name} changed": ("gated_delta_conv1d_fwd", PLAIN, input_changed(name), "untouched") for name in CONV_INPUTS},
    **{
        f"written beside {name}": ("gated_delta_conv1d_fwd", PLAIN, written_beside(name), "untouched")
        for name in (*CONV_INPUTS, "conv_state", "out")
    },
    **{
        f"{name} changed by the commit": ("gated_delta_conv1d_commit", PLAIN, input_changed(name), "commit")
        for name in ("qkv", "slot_idx", "input_row_offsets", "num_accepted")
    },
    "written beside the commit": ("gated_delta_conv1d_commit", PLAIN, written_beside("conv_state"), "commit"),
    **{f"{name} changed": ("gated_delta_gates", GATES, input_changed(name), "untouched") for name in GATES_INPUTS},
    **{
        f"written beside {name}": ("gated_delta_gates", GATES, written_beside(name), "untouched")
        for name in GATES_INPUTS
    },
}


@pytest.mark.parametrize("fault", MISBEHAVIOURS)
def test_a_broken_op(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, case, misbehave, check = MISBEHAVIOURS[fault]
    right = getattr(ops, op)

    def broken(**given: Any) -> Any:
        result = right(**given)
        misbehave(given)
        return result

    monkeypatch.setattr(ops, op, broken)
    assert check in failed_checks(case, "numpy")


def test_a_result_of_the_gates_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_delta_gates

    def broken(*arrays: Any, out: Any, **given: Any) -> Any:
        return right(*arrays, **given, out=(out[0], out[1].copy()))

    monkeypatch.setattr(ops, "gated_delta_gates", broken)
    assert "oracle" in failed_checks(GATES, "numpy")


@pytest.mark.parametrize("op", ["gated_delta_conv1d_fwd", "gated_delta_conv1d_commit", "gated_delta_gates"])
def test_an_op_that_does_nothing_fails_every_case_that_has_something_to_do(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, op, lambda **given: None)
    cases: list[LayerCase] = list(GATES_CASES.values()) if op == "gated_delta_gates" else list(CONV1D_CASES.values())
    if op == "gated_delta_conv1d_commit":
        idle = {"conv_only_padding", "conv_only_empty_sequences", "conv_no_sequences"}
        cases = [case for case in cases if case.name not in idle]
    assert [result.case.name for result in run_sweep(cases, ["numpy"]) if result.passed] == []


@pytest.mark.parametrize("op", ["gated_delta_conv1d_commit", "gated_delta_state_fold"])
def test_steps_of_an_op_that_does_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, op, lambda *given: None)
    for result in run_sweep(list(STEPS_CASES.values()), ["numpy"]):
        assert {"steps", "bites"} <= {check.check for check in result.checks if not check.passed}, result.case.name


def test_steps_whose_readout_is_off_by_one_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    right = ops.gated_delta_recurrence_verify_ring

    def broken(*arguments: Any) -> Any:
        out = right(*arguments)
        return np.nextafter(out, np.float32(np.inf))

    monkeypatch.setattr(ops, "gated_delta_recurrence_verify_ring", broken)
    assert failed_checks(STEPS, "numpy") == {"steps"}
