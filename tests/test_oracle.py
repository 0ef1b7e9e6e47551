"""The oracle against numbers worked by hand, against properties, and its two forms against each other."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gdn import oracle
from gdn.oracle import gated_delta_recurrence_fwd, gated_delta_recurrence_fwd_chunked

PAD_SLOT = 0xFFFFFFFF
FORMS = [gated_delta_recurrence_fwd, gated_delta_recurrence_fwd_chunked]


class Call(NamedTuple):
    """The six arguments."""

    qkv_conv_output: NDArray[Any]
    decay_per_token: NDArray[Any]
    beta_per_token: NDArray[Any]
    recurrent_state: NDArray[Any]
    slot_idx: NDArray[Any]
    input_row_offsets: NDArray[Any]


def one_sequence(tokens: Any, decay: Any, beta: Any, state: Any) -> Call:
    """A single sequence on slot 0; ``state`` is [nv, KD, VD]."""
    return Call(
        np.array(tokens, np.float64),
        np.array(decay, np.float64),
        np.array(beta, np.float64),
        np.array(state, np.float64)[None],
        np.array([0], np.uint32),
        np.array([0, len(tokens)], np.uint32),
    )


def random_call(
    lengths: list[int],
    slots: list[int] | None = None,
    *,
    num_key_heads: int = 2,
    group_size: int = 2,
    key_head_dim: int = 8,
    value_head_dim: int = 6,
    max_slots: int = 8,
    seed: int = 0,
) -> Call:
    rng = np.random.default_rng(seed)
    num_value_heads = num_key_heads * group_size
    total_seq_len = sum(lengths)
    conv_dim = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim
    return Call(
        rng.standard_normal((total_seq_len, conv_dim)),
        rng.uniform(0.5, 1, (total_seq_len, num_value_heads)),
        rng.uniform(0, 1, (total_seq_len, num_value_heads)),
        rng.standard_normal((max_slots, num_value_heads, key_head_dim, value_head_dim)),
        np.array(range(len(lengths)) if slots is None else slots, np.uint32),
        np.cumsum([0, *lengths], dtype=np.uint32),
    )


# ---- by hand


@pytest.mark.parametrize("form", FORMS)
def test_two_tokens_by_hand(form):
    """KD = 2, VD = 1. Keys and queries in thousandths (a, b) are normalised by √(a² + b² + 1) thousandths:
    (2, 2) -> (2, 2) / 3, (4, 8) -> (4, 8) / 9.

    First token: decay 1/2, beta 1/2, v 15, k̂ (2, 2) / 3, q̂ (8, 4) / 9, S (9, 18):
    S (4.5, 9); memory 9; delta (15 − 9) / 2 = 3; S (6.5, 11); out (52 + 44) / 9 / √2.
    Second token: decay 1/4, beta 2, v 5, k̂ (4, 8) / 9, q̂ (2, 2) / 3:
    S (1.625, 2.75); memory 19/6; delta 2 · 11/6 = 11/3; S (1.625 + 44/27, 2.75 + 88/27); out 667/108 / √2."""
    tokens = [
        [8e-3, 4e-3, 2e-3, 2e-3, 15],
        [2e-3, 2e-3, 4e-3, 8e-3, 5],
    ]
    out, new_pool = form(*one_sequence(tokens, [[1 / 2], [1 / 4]], [[1 / 2], [2]], [[[9], [18]]]))
    np.testing.assert_allclose(out, [[32 / 3 / math.sqrt(2)], [667 / 108 / math.sqrt(2)]], rtol=1e-14)
    np.testing.assert_allclose(new_pool, [[[[1.625 + 44 / 27], [2.75 + 88 / 27]]]], rtol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_epsilon_is_added_to_the_sum_inside_the_root(form):
    """Case 45. k = q = (1e-3, 0): the squares sum to 1e-6, so k̂ = 1e-3 / √2e-6 = 1/√2.
    S = 0, v = 4, beta 1: S (4/√2, 0), out 4 / 2 / √2. An epsilon anywhere else gives nothing like it."""
    out, new_pool = form(*one_sequence([[1e-3, 0, 1e-3, 0, 4]], [[1]], [[1]], [[[0], [0]]]))
    np.testing.assert_allclose(new_pool, [[[[4 / math.sqrt(2)], [0]]]], rtol=1e-14)
    np.testing.assert_allclose(out, [[2 / math.sqrt(2)]], rtol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_decay_comes_before_the_error(form):
    """Case 50. S = 1, k = q = e0, v = 0, decay .5, beta 1. With k̂² = 1 / (1 + 1e-6), S[0] becomes
    .5 − k̂ · .5 k̂ = .5e-6 / (1 + 1e-6); the other order leaves .5 − k̂², about −.5."""
    out, new_pool = form(*one_sequence([[1, 0, 1, 0, 0]], [[0.5]], [[1]], [[[1], [1]]]))
    remainder = 0.5e-6 / (1 + 1e-6)
    np.testing.assert_allclose(new_pool, [[[[remainder], [0.5]]]], rtol=0, atol=1e-15)
    np.testing.assert_allclose(out, [[remainder / math.sqrt(1 + 1e-6) / math.sqrt(2)]], rtol=0, atol=1e-15)


@pytest.mark.parametrize("form", FORMS)
def test_scale_is_applied_once(form):
    """Case 47. One-hot q and k with KD = 64 and VD = 128: out = v · k̂ · q̂ / 8, on every value element."""
    one_hot = np.zeros(64)
    one_hot[17] = 1
    value = np.arange(1.0, 129)
    call = one_sequence([[*one_hot, *one_hot, *value]], [[1]], [[1]], np.zeros((1, 64, 128)))
    out, _ = form(*call)
    np.testing.assert_allclose(out[0], value / (1 + 1e-6) / 8, rtol=1e-14)


@pytest.mark.parametrize("form", FORMS)
def test_layout_of_the_pool(form):
    """Case 53. From S = 0 one token leaves pool[slot, h, k, v] = k̂[k] · beta · v[v], in its slot only."""
    call = random_call([1], [3], num_key_heads=1, group_size=2, key_head_dim=3, value_head_dim=2)
    call.recurrent_state[...] = 0
    _, new_pool = form(*call)
    key, value = call.qkv_conv_output[0, 3:6], call.qkv_conv_output[0, 6:]
    for head in range(2):
        for k in range(3):
            for v in range(2):
                key_hat = key[k] / math.sqrt(key[0] ** 2 + key[1] ** 2 + key[2] ** 2 + 1e-6)
                expected = key_hat * call.beta_per_token[0, head] * value[2 * head + v]
                assert new_pool[3, head, k, v] == pytest.approx(expected, rel=1e-14)
    assert not new_pool[[0, 1, 2, 4, 5, 6, 7]].any()


@pytest.mark.parametrize("form", FORMS)
def test_value_heads_read_key_heads_by_group(form):
    """Case 54. nk = 2, nv = 6, key head i = e_i: value heads write the rows [0, 0, 0, 1, 1, 1] of their S."""
    query, key, value = [0, 0, 0, 0], [1, 0, 0, 1], [1] * 6
    call = one_sequence([[*query, *key, *value]], [[1] * 6], [[1] * 6], np.zeros((6, 2, 1)))
    _, new_pool = form(*call)
    assert [int(np.flatnonzero(head_state)[0]) for head_state in new_pool[0]] == [0, 0, 0, 1, 1, 1]


# ---- decay at its extremes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_decay_of_zero_erases(form, scale):
    """Case 40. After decay 0 at tokens 0, 31, 32 and 63, nothing remains of what came before."""
    call = random_call([100], [0])
    call.recurrent_state[...] *= scale
    erasing_tokens = [0, 31, 32, 63]
    call.decay_per_token[erasing_tokens] = 0
    out, new_pool = form(*call)
    assert np.isfinite(out).all()
    for start, end in [(0, 31), (31, 32), (32, 63), (63, 100)]:
        alone = one_sequence(
            call.qkv_conv_output[start:end],
            call.decay_per_token[start:end],
            call.beta_per_token[start:end],
            np.zeros((4, 8, 6)),
        )
        out_alone, pool_alone = gated_delta_recurrence_fwd(*alone)
        np.testing.assert_allclose(out[start:end], out_alone, rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(new_pool[0], pool_alone[0], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("decays", [[1e-12], [0, 1e-12, 0.5, 1]])
def test_tiny_and_mixed_decays_are_finite_and_forget(form, decays):
    """Cases 39 and 42: a state of 1e30 under decays of 1e-12, or a mix with 0, leaves a finite result."""
    call = random_call([130], [0])
    call.recurrent_state[...] = 1e30
    call.decay_per_token[...] = np.random.default_rng(1).choice(decays, call.decay_per_token.shape)
    out, new_pool = form(*call)
    assert np.isfinite(out).all()
    assert np.isfinite(new_pool).all()
    assert np.abs(out[5 * 4 :]).max() < 1e3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("total_seq_len", [7, 50, 64, 65, 257])
def test_decay_of_one_is_the_ungated_delta_rule(form, total_seq_len):
    """Case 41. S ← (I − beta k̂ k̂ᵀ) S + beta k̂ vᵀ, written with matrices, one value head at a time."""
    call = random_call([total_seq_len], [0])
    call.decay_per_token[...] = 1
    out, new_pool = form(*call)
    for head in range(4):
        first = head // 2 * 8
        state = call.recurrent_state[0, head]
        for token, row in enumerate(call.qkv_conv_output):
            query, key, value = row[first : first + 8], row[16 + first : 24 + first], row[32 + head * 6 :][:6]
            query_hat = query / math.sqrt(query @ query + 1e-6)
            key_hat = key / math.sqrt(key @ key + 1e-6)
            beta = call.beta_per_token[token, head]
            state = (np.eye(8) - beta * np.outer(key_hat, key_hat)) @ state + beta * np.outer(key_hat, value)
            expected = query_hat @ state / math.sqrt(8)
            np.testing.assert_allclose(out[token, head * 6 : head * 6 + 6], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(new_pool[0, head], state, rtol=1e-9, atol=1e-12)


# ---- exact properties of the token loop


def test_beta_zero_and_decay_one_keep_the_state():
    call = random_call([65], [2])
    call.decay_per_token[...], call.beta_per_token[...] = 1, 0
    _, new_pool = gated_delta_recurrence_fwd(*call)
    np.testing.assert_array_equal(new_pool, call.recurrent_state)


def test_key_of_zero_only_decays_and_query_of_zero_reads_zero():
    """Cases 45 and 46."""
    call = random_call([3], [0])
    call.qkv_conv_output[:, :32] = 0
    out, new_pool = gated_delta_recurrence_fwd(*call)
    expected = call.recurrent_state[0]
    for decay in call.decay_per_token:
        expected = decay[:, None, None] * expected
    np.testing.assert_array_equal(new_pool[0], expected)
    np.testing.assert_array_equal(out, 0)


def test_sequences_do_not_depend_on_their_batch():
    lengths, slots = [3, 1, 0, 9], [5, 0, 2, 7]
    call = random_call(lengths, slots)
    out, new_pool = gated_delta_recurrence_fwd(*call)
    for sequence_idx, slot in enumerate(slots):
        rows = slice(*call.input_row_offsets[sequence_idx : sequence_idx + 2])
        alone = one_sequence(*(array[rows] for array in call[:3]), call.recurrent_state[slot])
        out_alone, pool_alone = gated_delta_recurrence_fwd(*alone)
        np.testing.assert_array_equal(out[rows], out_alone)
        np.testing.assert_array_equal(new_pool[slot], pool_alone[0])


def test_splitting_a_sequence_over_calls_changes_nothing():
    call = random_call([20], [1])
    out, new_pool = gated_delta_recurrence_fwd(*call)
    pool, readouts = call.recurrent_state, []
    for rows in (slice(0, 1), slice(1, 8), slice(8, 20)):
        offsets = np.array([0, rows.stop - rows.start], np.int32)
        part, pool = gated_delta_recurrence_fwd(*(array[rows] for array in call[:3]), pool, call.slot_idx, offsets)
        readouts.append(part)
    np.testing.assert_array_equal(np.concatenate(readouts), out)
    np.testing.assert_array_equal(pool, new_pool)


def test_each_group_of_heads_alone_gives_what_all_give():
    call = random_call([9, 2], [1, 0])
    out, new_pool = gated_delta_recurrence_fwd(*call)
    query, key, value = np.split(call.qkv_conv_output, [16, 32], axis=1)
    for key_head in range(2):
        channels, value_heads = slice(8 * key_head, 8 * key_head + 8), slice(2 * key_head, 2 * key_head + 2)
        value_channels = slice(12 * key_head, 12 * key_head + 12)
        shard = Call(
            np.concatenate([query[:, channels], key[:, channels], value[:, value_channels]], axis=1),
            call.decay_per_token[:, value_heads],
            call.beta_per_token[:, value_heads],
            call.recurrent_state[:, value_heads],
            call.slot_idx,
            call.input_row_offsets,
        )
        shard_out, shard_pool = gated_delta_recurrence_fwd(*shard)
        np.testing.assert_array_equal(shard_out, out[:, value_channels])
        np.testing.assert_array_equal(shard_pool, new_pool[:, value_heads])


def test_non_finite_values_stay_in_their_sequence_and_head():
    """Case 51, and NaN in slots and rows that no live sequence uses (cases 21, 22)."""
    call = random_call([4, 4], [1, 2])
    clean_out, clean_pool = gated_delta_recurrence_fwd(*call)
    call.recurrent_state[[0, *range(3, 8)]] = np.nan
    call.qkv_conv_output[5, 32] = np.nan  # first value element of value head 0, second sequence
    call.qkv_conv_output[6, 33] = np.inf
    out, new_pool = gated_delta_recurrence_fwd(*call)
    assert np.isnan(out[5:, 0]).all()
    assert not np.isfinite(out[6:, 1]).any()
    np.testing.assert_array_equal(out[:, 6:], clean_out[:, 6:])
    np.testing.assert_array_equal(out[:5], clean_out[:5])
    np.testing.assert_array_equal(new_pool[2, 1:], clean_pool[2, 1:])
    np.testing.assert_array_equal(new_pool[1], clean_pool[1])


def test_ieee_arithmetic_is_followed_without_a_warning():
    """Infinity times a decay of 0 is NaN, and so is infinity minus infinity."""
    call = random_call([2], [0], group_size=1)
    call.recurrent_state[0, 0], call.decay_per_token[0, 0] = np.inf, 0
    call.qkv_conv_output[0, 32 + 6 :], call.recurrent_state[0, 1] = np.inf, np.inf
    out, _ = gated_delta_recurrence_fwd(*call)
    assert np.isnan(out).all()


# ---- indices, types, arguments


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_padding_empty_and_uncovered_rows(form, index_type):
    """Case 7, 9, 66: padding and uncovered rows read zero whatever they hold; only live slots change."""
    call = random_call([1, 1, 3, 0, 1, 2], [2, 0, 5, 6, 0, 1])
    slots = np.array([2, PAD_SLOT, 5, 6, PAD_SLOT], np.uint32).view(index_type)
    call.qkv_conv_output[[1, 5, 6, 7]] = np.nan  # padding, padding, and two rows past the last offset
    offsets = call.input_row_offsets[:6].astype(index_type)
    out, new_pool = form(*call[:4], slots, offsets)
    assert out.shape == (8, 24)
    np.testing.assert_array_equal(out[[1, 5, 6, 7]], 0)
    assert out[[0, 2, 3, 4]].all()
    changed = [slot for slot in range(8) if (new_pool[slot] != call.recurrent_state[slot]).any()]
    assert changed == [2, 5]


@pytest.mark.parametrize("form", FORMS)
def test_no_sequences_and_no_tokens(form):
    call = random_call([])
    out, new_pool = form(*call)
    assert out.shape == (0, 24)
    np.testing.assert_array_equal(new_pool, call.recurrent_state)
    out, _ = form(*random_call([0, 0]))
    assert out.shape == (0, 24)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("float_type", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_storage_types_are_widened_exactly(form, float_type):
    call = random_call([5, 70], [1, 4])
    narrow = [array.astype(float_type) for array in call[:4]]
    wide = [array.astype(np.float64) for array in narrow]
    out, new_pool = form(*narrow, *call[4:])
    expected_out, expected_pool = form(*wide, *call[4:])
    assert out.dtype == new_pool.dtype == np.float64
    np.testing.assert_array_equal(out, expected_out)
    np.testing.assert_array_equal(new_pool, expected_pool)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_are_read_through_views_and_never_changed(form):
    packed = random_call([3, 5], [1, 0])
    strided = Call(*(np.repeat(array, 2, axis=0)[::2] for array in packed))
    for array in strided:
        array.flags.writeable = False
    for result, expected in zip(form(*strided), form(*packed), strict=True):
        np.testing.assert_array_equal(result, expected)
        assert not any(np.shares_memory(result, array) for array in strided)
    for array, untouched in zip(packed, random_call([3, 5], [1, 0]), strict=True):
        np.testing.assert_array_equal(array, untouched)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("argument", "replacement"),
    [
        ("qkv_conv_output", np.zeros((4, 57))),
        ("qkv_conv_output", np.zeros((4, 24))),  # no key head is left
        ("qkv_conv_output", np.zeros((4, 24 + 3 * 16))),  # 3 key heads for 4 value heads
        ("qkv_conv_output", np.zeros(4)),
        ("qkv_conv_output", np.zeros((4, 56), np.int64)),
        ("decay_per_token", np.zeros((4, 2))),
        ("decay_per_token", np.zeros((4, 4, 1))),
        ("decay_per_token", np.zeros((4, 4), np.complex128)),
        ("beta_per_token", np.zeros((3, 4))),
        ("recurrent_state", np.zeros((8, 4, 8))),
        ("recurrent_state", np.zeros((8, 4, 0, 6))),
        ("slot_idx", np.array([0, 1], np.int64)),
        ("slot_idx", np.array([0, 1], np.float32)),
        ("slot_idx", np.array([[0, 1]], np.uint32)),
        ("slot_idx", np.array([0, 8], np.uint32)),
        ("slot_idx", np.array([0, -2], np.int32)),
        ("slot_idx", np.array([3, 3], np.uint32)),
        ("input_row_offsets", np.array([0, 1, 4], np.int64)),
        ("input_row_offsets", np.array([0, 4], np.uint32)),
        ("input_row_offsets", np.array([0, 3, 2], np.uint32)),
        ("input_row_offsets", np.array([0, 1, 5], np.uint32)),
        ("input_row_offsets", np.array([-1, 1, 4], np.int32)),
    ],
)
def test_malformed_arguments_are_refused_by_name(form, argument, replacement):
    call = random_call([1, 3], [0, 1])._replace(**{argument: replacement})
    with pytest.raises(ValueError, match=argument):
        form(*call)


def test_an_empty_sequence_may_share_a_slot():
    call = random_call([2, 0], [3, 3])
    out, _ = gated_delta_recurrence_fwd(*call)
    assert out.all()


def test_the_chunked_form_refuses_what_it_cannot_isolate():
    call = random_call([3], [0])
    with pytest.raises(ValueError, match="chunk_size"):
        gated_delta_recurrence_fwd_chunked(*call, chunk_size=0)
    call.qkv_conv_output[2, 0] = np.nan
    with pytest.raises(ValueError, match="finite"):
        gated_delta_recurrence_fwd_chunked(*call)


def test_the_oracle_imports_nothing_of_the_library():
    imported = set()
    for path in Path(oracle.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                imported.add(str(node.module))
    own = {name for name in imported if name.startswith("gdn.oracle.")}
    assert imported - own == {"__future__", "collections.abc", "typing", "numpy", "numpy.typing"}


# ---- the two forms


def assert_forms_agree(call: Call, chunk_size: int) -> None:
    out, new_pool = gated_delta_recurrence_fwd(*call)
    chunked_out, chunked_pool = gated_delta_recurrence_fwd_chunked(*call, chunk_size=chunk_size)
    for result, expected in ((chunked_out, out), (chunked_pool, new_pool)):
        scale = np.abs(expected).max(initial=0)
        np.testing.assert_allclose(result, expected, rtol=0, atol=1e-10 * scale)


@st.composite
def hard_calls(draw: st.DrawFn, chunk_size: int) -> Call:
    """Ragged lengths around multiples of the chunk, padding, groups, near-equal keys, extreme decays."""
    lengths = draw(
        st.lists(
            st.builds(lambda chunks, more: max(0, chunks * chunk_size + more), st.integers(0, 4), st.integers(-1, 1)),
            min_size=1,
            max_size=4,
        )
    )
    call = random_call(
        lengths,
        num_key_heads=draw(st.integers(1, 3)),
        group_size=draw(st.integers(1, 3)),
        key_head_dim=draw(st.sampled_from([1, 2, 8])),
        value_head_dim=draw(st.sampled_from([1, 3, 16])),
        seed=draw(st.integers(0, 2**32 - 1)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    decays = draw(st.lists(st.sampled_from([0.0, 1e-300, 1e-12, 0.5, 0.999, 1.0]), min_size=1, max_size=3))
    call.decay_per_token[...] = rng.choice(decays, call.decay_per_token.shape)
    call.beta_per_token[...] *= draw(st.sampled_from([0.0, 1.0, 2.0]))
    if draw(st.booleans()):
        call.beta_per_token[...] = 2
    if draw(st.booleans()):
        call.qkv_conv_output[...] = 1 + 1e-6 * call.qkv_conv_output
    padded = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    call.slot_idx[padded] = PAD_SLOT
    return call


@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data(), chunk_size=st.sampled_from([1, 2, 16, 64]))
def test_the_chunked_form_agrees_with_the_token_loop(data, chunk_size):
    assert_forms_agree(data.draw(hard_calls(chunk_size)), chunk_size)


@pytest.mark.parametrize("decay", [0.0, 1e-12, 0.99, 1.0])
@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_the_forms_agree_on_a_long_sequence_of_equal_keys(decay, beta):
    call = random_call([1000], [0], key_head_dim=32, value_head_dim=16)
    call.qkv_conv_output[:, :128] = call.qkv_conv_output[0, :128]
    call.decay_per_token[...], call.beta_per_token[...] = decay, beta
    assert_forms_agree(call, chunk_size=64)


def test_the_forms_agree_at_the_size_of_a_real_head():
    assert_forms_agree(random_call([257, 64, 300], group_size=1, key_head_dim=128, value_head_dim=128), chunk_size=64)
