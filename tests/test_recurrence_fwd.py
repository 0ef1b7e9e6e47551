"""`gated_delta_recurrence_fwd` on every backend: the shared cases through the sweep, and faults from the field."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import ops
from gdn.backends import host
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, close, storage_tolerance
from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, build_arrays, random_recurrence_case
from gdn.testing.execute import execute
from gdn.testing.sweep import run_sweep

if TYPE_CHECKING:
    from tests.conftest import Call

SMALL = HeadGeometry(2, 4, 32, 32)


def assert_sweep_passes(case: RecurrenceCase, backend: str) -> None:
    """Every check of one case."""
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert [failure for check in result.checks for failure in check.failures] == []
    assert result.passed


@pytest.mark.parametrize("name", RECURRENCE_CASES)
def test_named_case(name: str, backend: str) -> None:
    assert_sweep_passes(RECURRENCE_CASES[name], backend)


@pytest.mark.parametrize("number", range(8))
def test_random_case(number: int, backend: str) -> None:
    assert_sweep_passes(random_recurrence_case(1, number), backend)


@pytest.mark.parametrize("name", ["decode_batch", "heads_96_192", "many_lengths", "uncovered_rows", "heads_8_256"])
def test_the_order_of_threads_does_not_matter(name: str) -> None:
    """Threads of a block in seeded random orders: a barrier that is missing shows as other bits."""
    if host.unavailable_reason() is not None:
        pytest.skip(f"host backend: {host.unavailable_reason()}")
    case = RECURRENCE_CASES[name]
    arrays = build_arrays(case)
    plain = execute("host", arrays, case.out_dtype)
    for seed in range(1, 5):
        with host.options(order_seed=seed, max_os_threads=1 + seed % 3):
            again = execute("host", arrays, case.out_dtype)
        assert_passed(
            bitwise(again.out, plain.out, f"readout in order {seed}"),
            bitwise(again.recurrent_state, plain.recurrent_state, f"state in order {seed}"),
        )


# ---- The arithmetic, by hand ----


def run(call: Call, backend: str) -> tuple[Any, Any]:
    """Readout and pool of a call, as NumPy arrays, on any backend."""
    if backend != "cuda":
        call.run(backend)
        return call["out"], call["recurrent_state"]
    import cupy

    *six, out = (cupy.asarray(array) for array in call.arguments.values())
    ops.gated_delta_recurrence_fwd(*six, out=out)
    call["out"], call["recurrent_state"] = out.get(), six[3].get()
    return call["out"], call["recurrent_state"]


def test_one_token_into_an_empty_state(new_call: type[Call], backend: str) -> None:
    """Field case 53: with S = 0 and T = 1 the pool holds pool[slot, h, k, v] = k̂[k] · beta · v[v]."""
    call = new_call(heads=(1, 2, 8, 16), lengths=(1,))
    call["recurrent_state"][:] = 0
    key, value = call["qkv_conv_output"][0, 8:16].astype(np.float64), call["qkv_conv_output"][0, 16:]
    key_hat = key / np.sqrt(np.sum(key**2) + 1e-6)
    beta = call["beta_per_token"][0].astype(np.float64)
    expected = key_hat[None, :, None] * beta[:, None, None] * value.reshape(2, 1, 16)
    _, pool = run(call, backend)
    assert_passed(close(pool[0], expected, storage_tolerance("float32"), "state"))


def test_value_heads_read_key_heads_by_group(new_call: type[Call], backend: str) -> None:
    """Field case 54: nk=2, nv=6, key head i = e_i: value heads read key heads [0,0,0,1,1,1], never h % nk."""
    call = new_call(heads=(2, 6, 8, 8), lengths=(1,))
    call["qkv_conv_output"][:] = 0
    for part in (0, 16):  # queries, keys
        call["qkv_conv_output"][0, part + np.array([0, 8 + 1])] = 1
    call["qkv_conv_output"][0, 32:] = np.repeat(np.arange(1, 7), 8)
    call["recurrent_state"][:] = 0
    call["beta_per_token"][:] = 1
    out, pool = run(call, backend)
    rows_written = [np.flatnonzero(pool[0, head].any(axis=1)).tolist() for head in range(6)]
    assert rows_written == [[0], [0], [0], [1], [1], [1]]
    expected = np.repeat(np.arange(1, 7), 8)[None] / np.sqrt(8)
    np.testing.assert_allclose(out, expected, rtol=2e-6)


def test_scale_is_applied_once(new_call: type[Call], backend: str) -> None:
    """Field case 47: one-hot q and k with KD = 64, VD = 128: the readout is v / √64."""
    call = new_call(heads=(1, 1, 64, 128), lengths=(1,))
    call["qkv_conv_output"][0, :128] = 0
    call["qkv_conv_output"][0, [3, 64 + 3]] = 1
    call["recurrent_state"][:] = 0
    call["beta_per_token"][:] = 1
    out, _ = run(call, backend)
    np.testing.assert_allclose(out[0], call["qkv_conv_output"][0, 128:] / 8, rtol=2e-6)


@pytest.mark.parametrize("sizes", [(192, 64), (48, 128)])
def test_a_scale_that_is_no_power_of_two(new_call: type[Call], backend: str, sizes: tuple[int, int]) -> None:
    """Beside field case 47: one-hot q and k with KD = 192 and 48, whose roots are not whole, above VD and below it."""
    key_head_dim, value_head_dim = sizes
    call = new_call(heads=(1, 2, *sizes), lengths=(1,))
    call["qkv_conv_output"][0, : 2 * key_head_dim] = 0
    call["qkv_conv_output"][0, [key_head_dim - 1, 2 * key_head_dim - 1]] = 1
    call["recurrent_state"][:] = 0
    call["beta_per_token"][:] = 1
    out, _ = run(call, backend)
    values = call["qkv_conv_output"][0, 2 * key_head_dim :]
    assert values.shape == (2 * value_head_dim,)
    np.testing.assert_allclose(out[0], values / np.sqrt(key_head_dim), rtol=2e-6)


def test_decay_comes_before_the_error(new_call: type[Call], backend: str) -> None:
    """Field case 50: S = 1, k = q = e0, v = 0, decay 1/2, beta 1 leaves nothing of row 0."""
    call = new_call(heads=(1, 1, 8, 8), lengths=(1,))
    call["qkv_conv_output"][:] = 0
    call["qkv_conv_output"][0, [0, 8]] = 1
    call["recurrent_state"][:] = 1
    call["decay_per_token"][:] = 0.5
    call["beta_per_token"][:] = 1
    out, pool = run(call, backend)
    assert np.abs(out).max() < 1e-6
    assert np.abs(pool[0, 0, 0]).max() < 1e-6
    np.testing.assert_array_equal(pool[0, 0, 1:], 0.5)


def test_a_decay_of_zero_erases_exactly(new_call: type[Call], backend: str) -> None:
    """Field case 40: decay 0 over a state of 1e30 leaves no trace of it."""
    huge, none = new_call(lengths=(1,)), new_call(lengths=(1,))
    for call, content in ((huge, 1e30), (none, 0)):
        call["recurrent_state"][0] = content
        call["decay_per_token"][:] = 0
    for got, expected in zip(run(huge, backend), run(none, backend), strict=True):
        assert_passed(bitwise(got[:1], expected[:1], "after erasing", ignore_zero_sign=True))


@pytest.mark.parametrize("length", [7, 50, 64, 65, 257])
def test_a_decay_of_one_is_the_ungated_rule(new_call: type[Call], backend: str, length: int) -> None:
    """Field case 41: the delta rule without a gate, S += k (beta (v - S k)), written out here on its own."""
    call = new_call(lengths=(length,))
    call["decay_per_token"][:] = 1
    queries, keys, values = np.split(call["qkv_conv_output"].astype(float), [8, 16], axis=1)
    queries, keys = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (queries, keys))
    states, readout = call["recurrent_state"][0].astype(float), np.empty((length, 2, 8))
    for t in range(length):
        for head, state in enumerate(states):
            error = values[t, 8 * head : 8 * head + 8] - state.T @ keys[t]
            state += np.outer(keys[t], call["beta_per_token"][t, head] * error)
            readout[t, head] = state.T @ queries[t] / np.sqrt(8)
    out, pool = run(call, backend)
    assert_passed(
        close(out, readout.reshape(length, 16), storage_tolerance("float32"), "readout"),
        close(pool[0], states, storage_tolerance("float32"), "state"),
    )


@pytest.mark.parametrize("length", [7, 65])
def test_beta_zero_keeps_a_state_that_does_not_decay(new_call: type[Call], backend: str, length: int) -> None:
    """Field case 41: the state keeps its bits."""
    call = new_call(lengths=(length,))
    call["decay_per_token"][:], call["beta_per_token"][:] = 1, 0
    before = call["recurrent_state"].copy()
    _, pool = run(call, backend)
    assert_passed(bitwise(pool, before, "pool", ignore_zero_sign=True))


@pytest.mark.parametrize("zeros", ["key", "query", "both"])
def test_keys_and_queries_of_zero(new_call: type[Call], backend: str, zeros: str) -> None:
    """Field case 46: a key of 0 leaves exactly decay times the state, a query of 0 reads exactly 0."""
    call = new_call(lengths=(3,))
    if zeros != "key":
        call["qkv_conv_output"][:, :8] = 0
    if zeros != "query":
        call["qkv_conv_output"][:, 8:16] = 0
    expected = call["recurrent_state"][0].copy()
    for decay in call["decay_per_token"]:
        expected *= decay[:, None, None]
    out, pool = run(call, backend)
    if zeros != "key":
        assert_passed(bitwise(out, np.zeros_like(out), "readout", ignore_zero_sign=True))
    if zeros != "query":
        assert_passed(bitwise(pool[0], expected, "state"))


def test_many_tokens_that_nothing_damps(new_call: type[Call], backend: str) -> None:
    """Beside field cases 74, 75: decay 1 and beta 2, where each token mirrors the state and no error dies away.

    With values of 0 a mirrored state keeps its length in every column.
    """
    call = new_call(lengths=(2_000 if backend == "numpy" else 20_000,))
    call["decay_per_token"][:], call["beta_per_token"][:] = 1, 2
    call["qkv_conv_output"][:, 16:] = 0
    before = np.linalg.norm(call["recurrent_state"][0].astype(float), axis=1)
    out, pool = run(call, backend)
    assert np.isfinite(out).all()
    # The epsilon of a norm has each token mirror a little less; roundings add up far below that.
    np.testing.assert_allclose(np.linalg.norm(pool[0].astype(float), axis=1), before, rtol=5e-3)


# ---- Storage types ----


@pytest.mark.parametrize("state_dtype", ["bfloat16", "float16"])
def test_4096_tokens_round_once(backend: str, state_dtype: str) -> None:
    """Field case 48: the state of 4,096 tokens is rounded at the store alone, to nearest even.

    The same call on a float32 pool, started from the same values and rounded afterwards, gives the same bits.
    """
    case = RecurrenceCase("long", HeadGeometry(1, 1, 32, 32), (4096,), state_dtype=state_dtype, out_dtype="float32")
    arrays = build_arrays(case)
    wide = replace(arrays, recurrent_state=arrays.recurrent_state.astype(np.float32))
    narrow_outcome, wide_outcome = (execute(backend, a, "float32") for a in (arrays, wide))
    rounded = wide_outcome.recurrent_state.astype(arrays.recurrent_state.dtype)
    assert_passed(
        bitwise(narrow_outcome.out, wide_outcome.out, "readout"),
        bitwise(narrow_outcome.recurrent_state, rounded, "state"),
    )


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16", "float16"])
def test_every_pair_of_types(backend: str, work_dtype: str, state_dtype: str) -> None:
    """Field case 49: every pair of work and pool types."""
    assert_sweep_passes(
        RecurrenceCase("types", SMALL, (5, 1), work_dtype=work_dtype, state_dtype=state_dtype, out_dtype=work_dtype),
        backend,
    )
