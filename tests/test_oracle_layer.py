"""The oracle's convolution and gates, against numbers worked by hand, NumPy's own convolution, and properties."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gdn.oracle import gated_delta_conv1d_commit, gated_delta_conv1d_fwd, gated_delta_gates

PAD_SLOT = 0xFFFFFFFF
Array = np.ndarray[Any, Any]


def indices(*values: int) -> Array:
    return np.array(values, np.uint32)


def random_call(lengths: tuple[int, ...], channels: int = 3, taps: int = 4, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    return {
        "qkv": random.standard_normal((sum(lengths), channels)),
        "conv_weight": random.standard_normal((channels, taps)),
        "conv_state": random.standard_normal((len(lengths) + 1, channels, taps - 1)),
        "slot_idx": random.permutation(len(lengths) + 1)[: len(lengths)].astype(np.uint32),
        "input_row_offsets": np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32),
    }


def test_two_tokens_by_hand() -> None:
    out, pool = gated_delta_conv1d_fwd(
        np.array([[5.0], [7.0]]),
        np.array([[1.0, 10.0, 100.0]]),
        np.array([[[2.0, 3.0]]]),
        indices(0),
        indices(0, 2),
        bias=np.array([0.5]),
    )
    assert out.tolist() == [[2 + 30 + 500 + 0.5], [3 + 50 + 700 + 0.5]]
    assert pool.tolist() == [[[5.0, 7.0]]]


def test_silu_by_hand() -> None:
    inputs = np.array([[2.0, -800.0, 0.0, 800.0]]).T
    call = inputs, np.array([[0.0, 1.0]]), np.zeros((1, 1, 1)), indices(0), indices(0, 4)
    out, _ = gated_delta_conv1d_fwd(*call, activation="silu")
    np.testing.assert_allclose(out[:, 0], [2 / (1 + math.exp(-2)), 0, 0, 800], rtol=1e-15)


@pytest.mark.parametrize("taps", [2, 4, 8])
def test_a_row_is_the_convolution_of_window_and_row(taps: int) -> None:
    call = random_call((1, 2, 3, 9), taps=taps)
    out, pool = gated_delta_conv1d_fwd(**call)
    for slot, begin, end in zip(
        call["slot_idx"], call["input_row_offsets"], call["input_row_offsets"][1:], strict=False
    ):
        for channel in range(3):
            inputs = np.concatenate([call["conv_state"][slot, channel], call["qkv"][begin:end, channel]])
            expected = np.convolve(inputs, call["conv_weight"][channel, ::-1], "valid")
            np.testing.assert_allclose(out[begin:end, channel], expected, rtol=1e-12)
            np.testing.assert_array_equal(pool[slot, channel], inputs[len(inputs) - taps + 1 :])


def test_tokens_one_at_a_time_are_those_of_one_call() -> None:
    """Rows shorter than the window among them."""
    call = random_call((0, 1, 2, 3, 6))
    whole, last_pool = gated_delta_conv1d_fwd(**call)
    pool = call["conv_state"]
    for step in range(6):
        begins = np.minimum(call["input_row_offsets"][:-1] + step, call["input_row_offsets"][1:])
        rows = np.concatenate(
            [call["qkv"][b : min(b + 1, e)] for b, e in zip(begins, call["input_row_offsets"][1:], strict=True)]
        )
        has_token = (begins < call["input_row_offsets"][1:]).astype(np.uint32)
        offsets = np.concatenate([[0], np.cumsum(has_token)]).astype(np.uint32)
        out, pool = gated_delta_conv1d_fwd(rows, call["conv_weight"], pool, call["slot_idx"], offsets)
        np.testing.assert_array_equal(out, whole[begins[has_token > 0]])
    np.testing.assert_array_equal(pool, last_pool)


def test_a_commit_moves_windows_as_a_call_over_the_accepted_tokens_does() -> None:
    call = random_call((4, 4, 4, 0, 4))
    without, kept = gated_delta_conv1d_fwd(**call, write_state=False)
    np.testing.assert_array_equal(kept, call["conv_state"])
    np.testing.assert_array_equal(without, gated_delta_conv1d_fwd(**call)[0])
    accepted = indices(0, 1, 4, 3, 9)
    taken = np.minimum(accepted, np.diff(call["input_row_offsets"]))
    starts = call["input_row_offsets"][:-1]
    rows = np.concatenate([call["qkv"][s : s + n] for s, n in zip(starts, taken, strict=True)])
    offsets = np.concatenate([[0], np.cumsum(taken)]).astype(np.uint32)
    _, expected = gated_delta_conv1d_fwd(rows, call["conv_weight"], call["conv_state"], call["slot_idx"], offsets)
    tables = call["conv_state"], call["slot_idx"], call["input_row_offsets"]
    np.testing.assert_array_equal(gated_delta_conv1d_commit(call["qkv"], *tables, accepted), expected)


def test_padding_and_uncovered_rows_are_zero_and_touch_nothing() -> None:
    call = random_call((2, 2, 2)) | {"slot_idx": indices(1, PAD_SLOT, 0), "input_row_offsets": indices(1, 3, 4, 5)}
    out, pool = gated_delta_conv1d_fwd(**call, bias=np.ones(3), activation="silu")
    assert (out == 0).all(axis=1).tolist() == [True, False, False, True, False, True]
    np.testing.assert_array_equal(pool[2:], call["conv_state"][2:])
    signed = call | {
        "slot_idx": call["slot_idx"].view(np.int32),
        "input_row_offsets": call["input_row_offsets"].view(np.int32),
    }
    np.testing.assert_array_equal(gated_delta_conv1d_fwd(**signed, bias=np.ones(3), activation="silu")[0], out)


@pytest.mark.parametrize("float_type", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_storage_types_are_widened_exactly(float_type: Any) -> None:
    call = random_call((3, 5))
    narrow = {name: array if array.dtype == np.uint32 else array.astype(float_type) for name, array in call.items()}
    wide = {name: array if array.dtype == np.uint32 else array.astype(np.float64) for name, array in narrow.items()}
    for ours, expected in zip(gated_delta_conv1d_fwd(**narrow), gated_delta_conv1d_fwd(**wide), strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize(
    ("argument", "replacement"),
    [
        ("qkv", np.zeros(9)),
        ("qkv", np.zeros((9, 3), np.int64)),
        ("conv_weight", np.zeros((3, 3))),
        ("conv_weight", np.zeros((4, 3))),
        ("conv_state", np.zeros((3, 3, 0))),
        ("conv_state", np.zeros((3, 4, 3))),
        ("slot_idx", indices(0, 3)),
        ("slot_idx", indices(1, 1)),
        ("slot_idx", np.zeros(2, np.int64)),
        ("input_row_offsets", indices(0, 5, 4)),
        ("input_row_offsets", indices(0, 5, 99)),
        ("bias", np.zeros(4)),
        ("activation", "relu"),
    ],
)
def test_malformed_arguments_are_refused_by_name(argument: str, replacement: Any) -> None:
    call: dict[str, Any] = random_call((4, 5)) | {argument: replacement}
    with pytest.raises(ValueError, match=f"^{argument}: expected"):
        gated_delta_conv1d_fwd(**call)


def test_a_commit_refuses_counts_of_another_shape_or_type() -> None:
    call = random_call((4, 5))
    call.pop("conv_weight")
    for counts in (indices(1, 2, 3), np.zeros(2, np.int64)):
        with pytest.raises(ValueError, match=r"^num_accepted: expected"):
            gated_delta_conv1d_commit(**call, num_accepted=counts)


# ---- Gates ----


def test_gates_by_hand() -> None:
    a, b = np.array([[0.0, 30.0], [-1.0, 1.0]]), np.array([[0.0, 2.0], [-800.0, 800.0]])
    a_log, dt_bias = np.array([0.0, -1.0]), np.array([1.0, 0.5])
    decay, beta = gated_delta_gates(a, b, a_log, dt_bias)
    softplus = [[math.log1p(math.e), 30.5], [math.log(2), math.log1p(math.exp(1.5))]]
    expected = [[math.exp(-math.exp(rate) * value) for rate, value in zip(a_log, row, strict=True)] for row in softplus]
    np.testing.assert_allclose(decay, expected, rtol=1e-14)
    np.testing.assert_allclose(beta, [[0.5, 1 / (1 + math.exp(-2))], [0, 1]], rtol=1e-14, atol=0)
    np.testing.assert_array_equal(gated_delta_gates(a, b, a_log, dt_bias, allow_neg_eigval=True)[1], 2 * beta)


def test_gates_stay_in_their_ranges_at_the_ends() -> None:
    ends = np.array([[-1e30, -100.0, 0.0, 100.0, 1e30]])
    decay, beta = gated_delta_gates(ends, ends, np.zeros(5), np.zeros(5))
    assert decay[0, 0] == 1
    assert decay[0, -1] == 0
    assert ((decay >= 0) & (decay <= 1) & (beta >= 0) & (beta <= 1)).all()
    assert (np.diff(decay[0]) <= 0).all()
    assert (np.diff(beta[0]) >= 0).all()


@pytest.mark.parametrize("argument", ["b", "A_log", "dt_bias"])
def test_malformed_gates_are_refused_by_name(argument: str) -> None:
    call = {"a": np.zeros((2, 3)), "b": np.zeros((2, 3)), "A_log": np.zeros(3), "dt_bias": np.zeros(3)}
    for wrong in (np.zeros(2), np.zeros((3, 2)), call[argument].astype(np.int64)):
        with pytest.raises(ValueError, match=f"^{argument}: expected"):
            gated_delta_gates(**call | {argument: wrong})
    with pytest.raises(ValueError, match=r"^a: expected shape"):
        gated_delta_gates(**call | {"a": np.zeros(3)})
