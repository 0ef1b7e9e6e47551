"""The convolution and its commit on every backend: against the oracle, and what is promised to the bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import ops, oracle
from gdn.arrays import DTYPES
from gdn.backends import conv1d as conv_launch
from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.backends import host
from gdn.testing import assert_passed, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device
from gdn.testing.watched import run_watched

FLOATS = ("float32", "float16", "bfloat16")
PAD = gdn.PAD_SLOT


@dataclass
class Conv:
    """A convolution of NumPy arrays: sequences of `lengths` tokens, `gap` rows before the first and behind the last."""

    lengths: tuple[int, ...] = (0, 1, 2, 3, 5, 17, 40, 1)
    slots: tuple[int, ...] = (3, 0, 5, 7, PAD, 9, 1, 2)
    channels: int = 24
    width: int = 4
    dtype: str = "float32"
    state_dtype: str = "float32"
    filter_dtype: str = "float32"
    has_bias: bool = True
    activation: str | None = "silu"
    gap: int = 2
    arrays: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.arrays:
            return
        random = np.random.default_rng(self.channels)
        offsets = self.gap + np.cumsum([0, *self.lengths])
        shapes = {
            "qkv": ((int(offsets[-1]) + self.gap, self.channels), self.dtype),
            "conv_weight": ((self.channels, self.width), self.filter_dtype),
            "conv_state": ((12, self.channels, self.width - 1), self.state_dtype),
            "bias": ((self.channels,), self.filter_dtype),
        }
        self.arrays = {name: random.standard_normal(shape).astype(DTYPES[d]) for name, (shape, d) in shapes.items()}
        self.arrays["slot_idx"] = np.array(self.slots, np.uint32)
        self.arrays["input_row_offsets"] = offsets.astype(np.uint32)
        if not self.has_bias:
            del self.arrays["bias"]

    def __getitem__(self, name: str) -> Array:
        return self.arrays[name]

    def with_arrays(self, **arrays: Any) -> Conv:
        """The same call on other arrays."""
        return replace(self, arrays={**self.arrays, **arrays})

    @property
    def inputs(self) -> dict[str, Array]:
        """The arrays, copied."""
        return {name: array.copy() for name, array in self.arrays.items()}

    def reference(self) -> tuple[Array, Array]:
        return oracle.gated_delta_conv1d_fwd(**self.inputs, activation=self.activation)

    def run(self, backend: str, **keywords: Any) -> tuple[Array, Array]:
        """Output, float32 unless `out` says otherwise, and pool; rows that are not written stay NaN."""
        device = Device(backend)
        given = {name: device.put(array) for name, array in self.arrays.items()}
        out = keywords.pop("out", np.full(self["qkv"].shape, np.nan, np.float32))
        with on_backend(backend):
            result = ops.gated_delta_conv1d_fwd(
                **given, activation=self.activation, out=None if out is None else device.put(out), **keywords
            )
        return device.get(result), device.get(given["conv_state"])

    def commit(self, backend: str, num_accepted: Any) -> Array:
        """The pool after a commit of so many tokens of each sequence."""
        device = Device(backend)
        names = ("qkv", "conv_state", "slot_idx", "input_row_offsets")
        given = [device.put(self[name]) for name in names]
        with on_backend(backend):
            ops.gated_delta_conv1d_commit(*given, device.put(np.asarray(num_accepted, np.uint32)))
        return device.get(given[1])

    def against_oracle(self, results: tuple[Array, Array]) -> list[Comparison]:
        out, pool = self.reference()
        in_pool = bitwise(results[1], pool.astype(self["conv_state"].dtype), "pool")
        return [
            in_pool,
            *([close(results[0], out, storage_tolerance(str(results[0].dtype)), "out")] if out.size else []),
        ]

    def first_tokens(self, counts: list[int]) -> Conv:
        """The same with the sequences cut to so many tokens; rows that were behind are nobody's."""
        offsets = self["input_row_offsets"].astype(int)
        rows = [slice(begin, begin + count) for begin, count in zip(offsets, counts, strict=False)]
        pieces = [self["qkv"][part] for part in rows]
        return self.with_arrays(
            qkv=np.concatenate([self["qkv"][:0], *pieces]),
            input_row_offsets=np.cumsum([0, *counts]).astype(np.uint32),
        )


CALLS = {
    "plain": Conv(has_bias=False, activation=None),
    "one channel": Conv(channels=1),
    "channels in twos": Conv(channels=22, width=2),
    "more than a block of channels": Conv(channels=520),
    "blocks of single channels": Conv(channels=131, width=5, dtype="bfloat16", state_dtype="bfloat16"),
    **{f"width {width}": Conv(width=width, dtype="float16", state_dtype="float16") for width in range(2, 9)},
    "half a pool": Conv(dtype="float32", state_dtype="bfloat16", filter_dtype="float16"),
    "wide pool": Conv(dtype="bfloat16", state_dtype="float32", filter_dtype="bfloat16"),
    "long rows": Conv(lengths=(1200, 0, 300), slots=(4, 5, 6), channels=8, dtype="bfloat16", state_dtype="bfloat16"),
    "one token each": Conv(lengths=(1,) * 11, slots=tuple(range(11)), gap=0),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_windows_are_those_of_the_oracle(backend: str, name: str) -> None:
    call = CALLS[name]
    results = call.run(backend)
    assert_passed(*call.against_oracle(results))
    assert np.isfinite(results[0]).all()


@pytest.mark.parametrize(("dtype", "state_dtype", "filter_dtype"), list(product(FLOATS, repeat=3)))
def test_types(backend: str, dtype: str, state_dtype: str, filter_dtype: str) -> None:
    if backend == "host" and len({dtype, state_dtype, filter_dtype}) == 2:
        pytest.skip("host: pairs of types are left to the other backends, each costs a compile")
    call = Conv(dtype=dtype, state_dtype=state_dtype, filter_dtype=filter_dtype)
    results = call.run(backend)
    assert_passed(*call.against_oracle(results))
    own_type, _ = call.run(backend, out=None)
    assert own_type.dtype == DTYPES[dtype]
    assert_passed(bitwise(own_type, results[0].astype(DTYPES[dtype]), "in the work type"))


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_both_index_types(backend: str, index_type: Any) -> None:
    call = Conv()
    tables = {name: call[name].view(index_type) for name in ("slot_idx", "input_row_offsets")}
    results = call.with_arrays(**tables).run(backend)
    for result, of_others in zip(results, call.run(backend), strict=True):
        assert_passed(bitwise(result, of_others, "result"))


def strided(array: Any, xp: Any, how: str) -> Any:
    """The same values laid out otherwise, every gap NaN or 7: every other element, transposed, or unaligned."""
    filler = xp.nan if array.dtype.kind not in "iu" else 7
    if how == "every other":
        memory = xp.full(tuple(2 * length + 1 for length in array.shape), filler, array.dtype)
        view = memory[tuple(slice(1, None, 2) for _ in array.shape)]
    elif how == "transposed":
        memory = xp.full(array.shape[::-1], filler, array.dtype)
        view = memory.T
    else:
        memory = xp.full(array.size + 1, filler, array.dtype)
        view = memory[1:].reshape(array.shape)
    view[...] = array
    return view


def test_strides_of_every_array_but_the_pool(backend: str) -> None:
    """Beside field case 79: weights, bias and tables of the convolution as views equal the packed copies."""
    call, device = Conv(), Device(backend)
    expected = call.run(backend)
    for how in ("every other", "transposed", "unaligned"):
        given = {name: device.put(array) for name, array in call.arrays.items()}
        xp = np if backend != "cuda" else __import__("cupy")
        for name in given:
            if name != "conv_state":
                given[name] = strided(given[name], xp, how)
        out = strided(device.put(np.full(call["qkv"].shape, np.nan, np.float32)), xp, how)
        with on_backend(backend):
            ops.gated_delta_conv1d_fwd(**given, activation=call.activation, out=out)
        assert_passed(
            bitwise(device.get(out), expected[0], f"out {how}"),
            bitwise(device.get(given["conv_state"]), expected[1], f"pool {how}"),
        )


@pytest.mark.parametrize("commits", [False, True])
def test_pools_in_every_layout(backend: str, commits: bool) -> None:
    """By channel, by place, with a free slot stride, unaligned; bytes beside a slot stay."""
    call, device = Conv(), Device(backend)
    accepted = np.array([2] * len(call.slots), np.uint32)
    expected = call.commit(backend, accepted) if commits else call.run(backend)[1]
    slots, channels, places = call["conv_state"].shape
    elements = channels * places
    for stride, first, by_place in product((elements, elements + 8, elements + 3), (0, 1), (False, True)):
        memory = device.put(np.full(slots * stride + 1, 7, np.float32))
        rows = memory[first : first + slots * stride].reshape(slots, stride)[:, :elements]
        pool = rows.reshape(slots, places, channels).transpose(0, 2, 1) if by_place else None
        pool = rows.reshape(slots, channels, places) if pool is None else pool
        if backend != "cuda":
            assert np.shares_memory(pool, memory)
        pool[...] = device.put(call["conv_state"])
        with on_backend(backend):
            given = {name: device.put(array) for name, array in call.arrays.items()} | {"conv_state": pool}
            if commits:
                del given["conv_weight"], given["bias"]
                ops.gated_delta_conv1d_commit(**given, num_accepted=device.put(accepted))
            else:
                ops.gated_delta_conv1d_fwd(**given, activation=call.activation)
        assert_passed(bitwise(device.get(pool).copy(), expected, "pool"))
        pool[...] = 7
        assert (device.get(memory) == 7).all()


# ---- What is promised to the bit ----


@pytest.mark.parametrize("width", [2, 4, 8])
def test_tokens_one_at_a_time_are_one_call(backend: str, width: int) -> None:
    """Field case 23: rows shorter than the window. Any split of a sequence has the outputs of one call."""
    for length in (1, 2, 3, 4, 9):
        call = Conv(lengths=(length, 2), slots=(4, 1), width=width, gap=0)
        whole, pool = call.run(backend)
        for step in (1, 2, 5):
            part, pieces = call["conv_state"], []
            for first in range(0, length, step):
                rows = call["qkv"][first : min(first + step, length)]
                tables = {"slot_idx": np.uint32([4]), "input_row_offsets": np.uint32([0, len(rows)])}
                piece, part = call.with_arrays(qkv=rows, conv_state=part, **tables).run(backend)
                pieces.append(piece)
            assert_passed(
                bitwise(np.concatenate(pieces), whole[:length], f"{length} tokens by {step}"),
                bitwise(part[4], pool[4], "window"),
            )


def test_a_sequence_does_not_depend_on_the_batch(backend: str) -> None:
    """Nor on the tile that its rows fall into: the long batch has longer tiles than its rows alone."""
    call = CALLS["long rows"]
    out, pool = call.run(backend)
    offsets = call["input_row_offsets"].astype(int)
    for slot, begin, end in zip(call.slots, offsets, offsets[1:], strict=False):
        if begin == end:
            continue
        for first in (begin, max(begin, end - 700)):
            tables = {"slot_idx": np.uint32([slot]), "input_row_offsets": np.uint32([0, end - begin])}
            alone, its_pool = call.with_arrays(qkv=call["qkv"][begin:end], **tables).run(backend)
            assert_passed(
                bitwise(alone[first - begin :], out[first:end], "rows"), bitwise(its_pool[slot], pool[slot], "window")
            )


def test_any_split_gives_the_same_bits(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Conv()
    expected = call.run(kernels)
    for split in ((3, 1), (4, 2), (3, 4), (8, 8), (11, 16), (5, 32)):
        monkeypatch.setattr(conv_kernel, "split", lambda batch, split=split: conv_kernel.Split(*split))
        for result, same in zip(call.run(kernels), expected, strict=True):
            assert_passed(bitwise(result, same, f"heads and tiles of {split}"))


@pytest.mark.parametrize("width", [2, 4, 8])
def test_every_mean_length_has_its_split(backend: str, width: int) -> None:
    """Beside field case 33: mean lengths on both sides of the window's, of twice that, and of many long rows."""
    for lengths in ((1, 1, 1), (4, 4, 4), (1, 12, 3, 4), (20, 2, 2), (9, 9, 9), (2000, *(1,) * 149)):
        slots = (*range(10), *(PAD,) * (len(lengths) - 10))[: len(lengths)]
        call = Conv(lengths=lengths, slots=slots, width=width, channels=8)
        assert_passed(*call.against_oracle(call.run(backend)))


def test_splits_follow_the_mean_length() -> None:
    def split(batch_size: int, total_seq_len: int, width: int = 4, itemsize: int = 2) -> tuple[int, int]:
        sizes = {"batch_size": batch_size, "total_seq_len": total_seq_len, "conv_width": width}
        return conv_kernel.split(SimpleNamespace(**sizes, qkv=SimpleNamespace(itemsize=itemsize)))

    assert [split(10, total) for total in (0, 10, 30, 31, 40, 41, 80, 81)] == [
        *([(3, 32)] * 3),
        *([(4, 32)] * 2),
        *([(8, 32)] * 2),
        (3, 8),
    ]
    assert split(10, 60, width=8) == (7, 32)
    assert (split(1, 1024), split(1, 1025), split(1, 1025, itemsize=4)) == ((3, 8), (3, 16), (3, 8))
    assert (split(128, 5000), split(129, 5000), split(0, 7)) == ((3, 16), (3, 32), (3, 8))


def test_other_rows_do_not_matter(backend: str) -> None:
    """NaN in rows of others, in uncovered rows and in unused slots stays where it is."""
    call = Conv()
    out, pool = call.run(backend)
    poisoned = call.inputs
    offsets = poisoned["input_row_offsets"].astype(int)
    poisoned["qkv"][: offsets[0]] = np.nan
    poisoned["qkv"][offsets[-1] :] = np.nan
    poisoned["qkv"][offsets[4] : offsets[5]] = np.nan  # of the padding row
    poisoned["conv_state"][[4, 6, 8, 10, 11, 3]] = np.nan
    again, its_pool = call.with_arrays(**poisoned).run(backend)
    assert_passed(bitwise(again, out, "out"))
    used = [0, 5, 7, 9, 1, 2]
    assert_passed(bitwise(its_pool[used], pool[used], "windows"))
    assert np.isnan(its_pool[[4, 6, 8, 10, 11, 3]]).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
@pytest.mark.parametrize("where", ["qkv", "conv_state", "conv_weight"])
def test_an_extreme_value_stays_in_its_channel(backend: str, where: str, value: float) -> None:
    """Beside field case 51: one value of one channel; channels that share a word with it keep their bits."""
    call = Conv()
    clean = [array.copy() for array in call.run(backend)]
    tokens = slice(5, 8)  # of the sequence in slot 7
    place = {"qkv": (6, 9), "conv_state": (7, 9, 1), "conv_weight": (9, 2)}[where]
    poisoned = call.inputs
    poisoned[where][place] = value
    out, pool = call.with_arrays(**poisoned).run(backend)
    assert not bitwise(out, clean[0])
    rows = slice(None) if where == "conv_weight" else tokens
    out[rows, 9], pool[7, 9] = clean[0][rows, 9], clean[1][7, 9]
    assert_passed(bitwise(out, clean[0], "other outputs"), bitwise(pool, clean[1], "other windows"))


def test_a_window_after_a_single_token(backend: str) -> None:
    """Beside field case 53: a look at the other pool: conv_state[slot, channel, place] is oldest to newest."""
    call = Conv(lengths=(1, 2), slots=(5, 0), gap=0)
    _, pool = call.with_arrays(conv_state=np.zeros_like(call["conv_state"])).run(backend)
    nothing, (first, second, third) = np.zeros(24, np.float32), call["qkv"]
    np.testing.assert_array_equal(pool[5].T, [nothing, nothing, first])
    np.testing.assert_array_equal(pool[0].T, [nothing, second, third])


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 31, 32, 33])
def test_canaries_around_tokens_and_windows(backend: str, length: int) -> None:
    """Beside field cases 60, 69: rows around the width and the tiles of a block, amid memory that stays as it is."""
    call = Conv(lengths=(1, length, 1), slots=(2, 0, 1), gap=0)
    layouts = {"qkv": "slice", "conv_state": "gaps", "out": "slice", "slot_idx": "every_other", "bias": "every_other"}
    given = {**call.inputs, "out": np.full(call["qkv"].shape, np.nan, np.float32)}
    silu = partial(ops.gated_delta_conv1d_fwd, activation="silu")
    written, kept = run_watched(backend, silu, given, ("conv_state", "out"), layouts)
    assert_passed(*kept, *call.against_oracle((written["out"], written["conv_state"])))
    del given["out"], given["conv_weight"], given["bias"]
    given["num_accepted"] = np.array([1, length, 0], np.uint32)
    written, kept = run_watched(backend, ops.gated_delta_conv1d_commit, given, ("conv_state",), layouts)
    _, expected = call.first_tokens([1, length, 0]).reference()
    assert_passed(*kept, bitwise(written["conv_state"], expected.astype(np.float32), "windows"))


def test_a_window_that_is_not_written_keeps_its_bytes(backend: str) -> None:
    """Beside field case 20: the convolution of a decode and of a speculative window of the same lengths."""
    call = Conv()
    out, pool = call.run(backend)
    same, unwritten = call.run(backend, write_state=False)
    assert_passed(bitwise(same, out, "out"), bitwise(unwritten, call["conv_state"], "pool"))
    assert not (pool == unwritten).all()


@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_commit_is_the_convolution_of_the_accepted_tokens(backend: str, width: int, dtype: str) -> None:
    """Beside field case 23: commits of 0, 1, 2, 3 and more tokens of rows as short as that."""
    call = Conv(width=width, dtype=dtype, state_dtype="bfloat16", channels=12)
    for counts in ([0] * 8, [0, 1, 1, 2, 3, 17, 9, 0], [0, 1, 2, 3, 5, 16, 4, 1], [2**32 - 1] * 8):
        accepted = [min(count, length) for count, length in zip(counts, call.lengths, strict=True)]
        _, expected = call.first_tokens(accepted).run(backend)
        assert_passed(bitwise(call.commit(backend, counts), expected, f"counts {counts}"))
        reference = oracle.gated_delta_conv1d_commit(
            *(call[name] for name in ("qkv", "conv_state", "slot_idx", "input_row_offsets")), np.uint32(counts)
        )
        assert_passed(bitwise(expected, reference.astype(expected.dtype), "oracle"))


ODD_BITS = Conv(lengths=(4,) * 4, slots=(3, 0, 5, 7), state_dtype="bfloat16", channels=12, gap=0)


def test_a_commit_of_nothing_keeps_every_byte(backend: str) -> None:
    """Beside field case 28: counts [0, 4, 2, 0] leave windows of whatever bits alone, NaN and -0 among them."""
    pool = ODD_BITS["conv_state"].copy()
    odd = [0x7F81, 0xFFFF, 0x7FC1, 0x8000, 0x0001, 0x7F80, *range(0x3F80, 0x3F80 + 30)]  # NaN of 3 payloads, -0, tiny
    pool.view(np.uint16)[[3, 7]] = np.array(odd, np.uint16).reshape(pool.shape[1:])
    after = ODD_BITS.with_arrays(conv_state=pool).commit(backend, [0, 4, 2, 0])
    assert_passed(same_bytes(np.delete(after, [0, 5], axis=0), np.delete(pool, [0, 5], axis=0), "other windows"))
    assert (after[[0, 5]] != pool[[0, 5]]).any(axis=(1, 2)).all()


def test_commits_twice_and_in_parts(backend: str) -> None:
    """Beside field case 34: a second commit moves windows again; halves of the batch, in any order, equal the whole."""
    counts = np.array([4, 2, 1, 0], np.uint32)
    once = ODD_BITS.commit(backend, counts)
    twice = ODD_BITS.with_arrays(conv_state=once).commit(backend, counts)
    for sequence, (slot, count) in enumerate(zip(ODD_BITS.slots, counts, strict=True)):
        tokens = ODD_BITS["qkv"][4 * sequence : 4 * sequence + count].astype(once.dtype).T
        window = np.concatenate([ODD_BITS["conv_state"][slot], tokens, tokens], axis=1)
        assert_passed(bitwise(twice[slot], window[:, -3:], f"window {slot}"))
    assert not bitwise(twice, once)
    for parts in ((slice(0, 2), slice(2, 4)), (slice(2, 4), slice(0, 2)), (slice(3, 4), slice(0, 3))):
        pool = ODD_BITS["conv_state"]
        for part in parts:
            tables = {
                "slot_idx": ODD_BITS["slot_idx"][part],
                "input_row_offsets": ODD_BITS["input_row_offsets"][part.start : part.stop + 1],
            }
            pool = ODD_BITS.with_arrays(conv_state=pool, **tables).commit(backend, counts[part])
        assert_passed(bitwise(pool, once, "pool"))


def test_a_commit_in_another_order(backend: str) -> None:
    """Beside field case 35: the batch is permuted between convolution and commit, tokens and tables with it."""
    counts, lengths = np.array([4, 2, 1, 3], np.uint32), (4, 2, 3, 4)
    call = replace(ODD_BITS, lengths=lengths, arrays={})
    expected = call.commit(backend, counts)
    offsets = call["input_row_offsets"].astype(int)
    for order in ([3, 0, 2, 1], [1, 2, 3, 0]):
        rows = [call["qkv"][offsets[at] : offsets[at + 1]] for at in order]
        permuted = call.with_arrays(
            qkv=np.concatenate(rows),
            slot_idx=call["slot_idx"][order],
            input_row_offsets=np.cumsum([0, *(lengths[at] for at in order)]).astype(np.uint32),
        )
        assert_passed(bitwise(permuted.commit(backend, counts[order]), expected, f"rows in the order {order}"))
        assert not bitwise(permuted.commit(backend, counts), expected)


def test_a_window_that_was_written_between_convolution_and_commit(backend: str) -> None:
    """Beside field cases 29, 31: a commit moves on whatever the slot holds by then; a slot that was copied rests."""
    call = ODD_BITS
    _, pool = call.run(backend, write_state=False)
    pool[9] = pool[3]  # the first sequence goes on in another slot
    pool[5] = 2  # somebody wrote the window of the third
    moved = call.with_arrays(conv_state=pool, slot_idx=np.array([9, 0, 5, 7], np.uint32))
    after = moved.commit(backend, [1, 0, 2, 0])
    expected = pool.copy()
    first, third = (call["qkv"][rows].astype(pool.dtype).T for rows in (slice(0, 1), slice(8, 10)))
    expected[9] = np.concatenate([pool[3][:, 1:], first], axis=1)
    expected[5] = np.concatenate([pool[5][:, 2:], third], axis=1)
    assert_passed(same_bytes(after, expected, "pool"))


@pytest.mark.parametrize("reset", [True, False])
def test_a_slot_used_again(backend: str, reset: bool) -> None:
    """Beside field cases 17, 18: first tokens on slots that others left, zeroed or not, and on a fresh one.

    A sequence of one token looks back on whatever its slot holds: zeros are no past, and all else is one.
    """
    old = Conv(lengths=(9, 1, 2), slots=(4, 2, 7), gap=0)
    _, pool = old.run(backend)
    if reset:
        pool[[4, 2]] = 0
    tables = {"slot_idx": np.array([4, 2, 0], np.uint32), "input_row_offsets": np.array([0, 1, 2, 3], np.uint32)}
    new = old.with_arrays(conv_state=pool, qkv=old["qkv"][[3, 5, 7]], **tables)
    results = new.run(backend)
    assert_passed(*new.against_oracle(results))
    sums = old["bias"] + old["conv_weight"][:, -1] * new["qkv"]
    without_a_past = close(results[0][:2], (sums / (1 + np.exp(-sums)))[:2], storage_tolerance("float32"))
    assert without_a_past.passed == reset


def test_500_rounds_of_windows_and_commits(backend: str) -> None:
    """Beside field case 25: 500 windows of 4 tokens, of which 3 are committed, are one convolution of 1,500."""
    rounds, drafted, accepted = 500, 4, 3
    call = Conv(lengths=(rounds * accepted + 1,), slots=(4,), gap=0)
    device = Device(backend)
    plain = call.first_tokens([rounds * accepted])
    expected, pool = plain.run(backend)
    given = {name: device.put(array) for name, array in call.arrays.items()}
    qkv, offsets = given.pop("qkv"), device.put(np.array([0, drafted], np.uint32))
    given["input_row_offsets"], count = offsets, device.put(np.array([accepted], np.uint32))
    pieces = []
    with on_backend(backend):
        for first in range(0, rounds * accepted, accepted):
            window = qkv[first : first + drafted]
            out = ops.gated_delta_conv1d_fwd(window, **given, activation="silu", write_state=False)
            ops.gated_delta_conv1d_commit(window, given["conv_state"], given["slot_idx"], offsets, count)
            pieces.append(out[:accepted])
    assert_passed(
        bitwise(np.concatenate([device.get(piece) for piece in pieces]), expected, "out"),
        bitwise(device.get(given["conv_state"]), pool, "windows"),
    )


@pytest.mark.parametrize("piece", [1, 4, 64])
def test_windows_of_16_bits_are_rounded_once(backend: str, piece: int) -> None:
    """Beside field cases 26, 36: pieces of 1, 4 and 64 tokens with a bfloat16 pool of windows, and with one of float32.

    An input that is looked back on out of the pool was rounded once, and no output is off by more than the taps on such
    inputs times 2^-8 of them (silu steepens that by a tenth at most); pieces of float32 windows are one call.
    """
    call = Conv(lengths=(64,), slots=(4,), gap=0, state_dtype="bfloat16", filter_dtype="float16")
    exact = call.with_arrays(conv_state=call["conv_state"].astype(np.float32))
    whole, _ = exact.run(backend)
    for narrow in (True, False):
        part, pieces = (call if narrow else exact)["conv_state"], []
        for first in range(0, 64, piece):
            rows = call["qkv"][first : first + piece]
            tables = {"input_row_offsets": np.array([0, len(rows)], np.uint32)}
            out, part = call.with_arrays(qkv=rows, conv_state=part, **tables).run(backend)
            pieces.append(out)
        error = np.abs(np.concatenate(pieces).astype(float) - whole)
        looked_back = np.concatenate([np.zeros((3, 24)), np.abs(call["qkv"])])
        looked_back[3:][np.arange(64) % piece < max(piece - 3, 0)] = 0  # what no later piece reads
        taps = np.abs(call["conv_weight"].astype(float))
        bound = 1.1 * 2.0**-8 * sum(taps[:, tap] * looked_back[tap : tap + 64] for tap in range(3)) + 1e-6
        assert (error <= (bound if narrow else 0)).all()
        assert error.any() == (narrow and piece < 64)


@pytest.mark.parametrize("lengths", [(), (0, 0), (3,), (0, 3, 0, 0, 2, 0)])
@pytest.mark.parametrize("gap", [0, 3])
def test_small_batches(backend: str, lengths: tuple[int, ...], gap: int) -> None:
    """Beside field cases 66, 67: no sequences, no tokens, or none between others: their windows keep every bit."""
    call = Conv(lengths=lengths, slots=tuple(range(len(lengths))), gap=gap)
    results = call.run(backend)
    assert_passed(*call.against_oracle(results))
    shape = ops.gated_delta_conv1d_fwd_shape(
        *(call[name] for name in ("qkv", "conv_weight", "conv_state", "slot_idx", "input_row_offsets"))
    )
    assert shape == results[0].shape == (sum(lengths) + 2 * gap, 24)


def test_shapes_are_refused_as_calls_are() -> None:
    call = Conv()
    five = [call[name] for name in ("qkv", "conv_weight", "conv_state", "slot_idx", "input_row_offsets")]
    assert ops.gated_delta_conv1d_fwd_shape(*five, bias=call["bias"], activation="silu") == (73, 24)
    for wrong, words in (
        ({"bias": call["bias"][1:]}, "bias: expected shape"),
        ({"activation": "tanh"}, "activation: "),
    ):
        with pytest.raises(gdn.GdnError, match=f"^{words}"):
            ops.gated_delta_conv1d_fwd_shape(*five, **wrong)


def test_no_channels(backend: str) -> None:
    call = Conv(channels=1)
    nothing = {name: call[name][..., :0] for name in ("qkv", "bias")}
    of_channels = {"conv_weight": call["conv_weight"][:0], "conv_state": call["conv_state"][:, :0]}
    out, pool = call.with_arrays(**nothing, **of_channels).run(backend)
    assert (out.shape, pool.shape) == ((73, 0), (12, 0, 3))


def test_extreme_sums(backend: str) -> None:
    """Where the exponential of the activation overflows or vanishes."""
    call = Conv(lengths=(8,), slots=(0,), gap=0, has_bias=False)
    values = np.float32([-1e30, -1e4, -100, -80, 0, 80, 100, 1e30])
    weight = np.zeros((24, 4), np.float32)
    weight[:, 3] = 1
    call = call.with_arrays(qkv=np.repeat(values[:, None], 24, axis=1), conv_weight=weight)
    out, _ = call.run(backend)
    expected, _ = call.reference()
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-30)


@pytest.mark.skipif(host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}")
def test_the_order_of_threads_does_not_matter() -> None:
    call = Conv()
    expected = call.run("host")
    with host.options(order_seed=5, max_os_threads=2):
        for new, old in zip(call.run("host"), expected, strict=True):
            assert_passed(bitwise(new, old, "results"))


@pytest.mark.parametrize("is_bound", [False, True])
def test_every_optional_argument_counts(backend: str, is_bound: bool) -> None:
    """Beside field case 19: bias, activation, write_state and out of a convolution, on and off, also where it is bound.

    Each has the effect that the oracle knows, and no other one.
    """
    device, outputs = Device(backend), set()
    for has_bias, activation, write_state, has_out in product((False, True), (None, "silu"), *[(False, True)] * 2):
        call = Conv(lengths=(5, 2), slots=(4, 1), has_bias=has_bias, activation=activation)
        given = {name: device.put(array) for name, array in call.arrays.items()}
        out = device.put(np.full(call["qkv"].shape, np.nan, np.float32)) if has_out else None
        keywords = {"activation": activation, "write_state": write_state, "out": out}
        with on_backend(backend):
            op = ops.gated_delta_conv1d_fwd
            made = ops.bind(op, **given, **keywords)() if is_bound else op(**given, **keywords)
        assert (made is out) == has_out
        pool = device.get(given["conv_state"])
        if not write_state:
            assert_passed(same_bytes(pool, call["conv_state"], "pool"))
            pool = call.reference()[1].astype(np.float32)
        assert_passed(*call.against_oracle((device.get(made), pool)))
        outputs.add(device.get(made).tobytes())
    assert len(outputs) == 4


# ---- Indices that nobody has looked at ----


def run_unchecked(kernels: str, call: Conv, monkeypatch: pytest.MonkeyPatch) -> tuple[Array, Array]:
    """Run the kernel whatever the tables hold."""
    monkeypatch.setattr("gdn.layer_rules.check_conv1d_indices", lambda *batch: None)
    return call.run(kernels)


@pytest.mark.parametrize("index_type", [np.uint32, np.int32])
def test_malformed_tables_are_what_the_contract_says(
    kernels: str, index_type: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside field cases 70, 71: offsets that the convolution meets unchecked, at both ends and falling.

    A slot outside the pool is padding, offsets are clamped, a decreasing pair is an empty row.
    """
    call = Conv(lengths=(60,), slots=(0,), gap=5)
    far = 2**31 - 1
    for slots, offsets, right_slots, right_offsets in (
        ([1, 12, 3], [0, 5, 60, 70], [1, PAD, 3], [0, 5, 60, 70]),
        ([1, 2**32 - 2, 3], [0, 5, 60, 70], [1, PAD, 3], [0, 5, 60, 70]),
        ([0, 2, 3], [3, 9, far, far], [0, 2], [3, 9, 70]),
        ([0, 1, 2], [40, 50, 10, 33], [2, PAD, 0], [10, 33, 40, 50]),
        ([0, 1, 2], [69, 40, 20, 0], [], [0]),
    ):
        tables = {"slot_idx": slots, "input_row_offsets": offsets}
        broken = {name: np.array(table, np.uint32).view(index_type) for name, table in tables.items()}
        out, pool = run_unchecked(kernels, call.with_arrays(**broken), monkeypatch)
        right = {"slot_idx": np.uint32(right_slots), "input_row_offsets": np.uint32(right_offsets)}
        assert_passed(*call.with_arrays(**right).against_oracle((out, pool)))


def test_a_shared_slot_leaves_the_other_rows_right(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside field cases 12, 13: two sequences on one window leave it and their own first outputs undefined."""
    call = Conv(lengths=(5, 3, 40, 2), slots=(1, 6, 6, 0), gap=2)
    out, pool = run_unchecked(kernels, call, monkeypatch)
    apart, right_pool = call.with_arrays(slot_idx=np.array([1, 6, 8, 0], np.uint32)).run(kernels)
    shared = np.arange(len(out))
    is_first = ((shared >= 7) & (shared < 10)) | ((shared >= 10) & (shared < 13))
    assert_passed(
        bitwise(out[~is_first], apart[~is_first], "outputs that look back on no window of theirs, and other rows"),
        bitwise(pool[[0, 1]], right_pool[[0, 1]], "healthy windows"),
        bitwise(np.delete(pool, [0, 1, 6], axis=0), np.delete(call["conv_state"], [0, 1, 6], axis=0), "other slots"),
    )


def test_random_bits_touch_nothing_beside_the_arrays(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever 32 bits stand in the tables: no byte around the arrays changes, and no row is left as it was found."""
    monkeypatch.setattr("gdn.layer_rules.check_conv1d_indices", lambda *batch: None)
    call, random = Conv(lengths=(60,), slots=(0,), gap=5), np.random.default_rng(0)
    layouts = {"qkv": "slice", "conv_state": "gaps", "out": "slice", "slot_idx": "every_other"}
    for _ in range(20):
        size = int(random.integers(0, 6))
        near, far = random.integers(-2, 75, 2 * size + 1) & 0xFFFFFFFF, random.integers(0, 2**32, 2 * size + 1)
        bits = np.where(random.random(2 * size + 1) < 0.7, near, far).astype(np.uint32)
        given = {**call.inputs, "slot_idx": bits[:size], "input_row_offsets": bits[size:]}
        given["out"] = np.full(call["qkv"].shape, np.nan, np.float32)
        written, kept = run_watched(kernels, ops.gated_delta_conv1d_fwd, given, ("conv_state", "out"), layouts)
        assert_passed(*kept)
        assert np.isfinite(written["out"]).all()
        others = [slot for slot in range(12) if slot not in bits[:size]]
        assert_passed(bitwise(written["conv_state"][others], call["conv_state"][others], "other slots"))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    """Field case 3: 262,400 tokens of 8,192 channels, 2,050 sequences; the last ones are as they are alone."""
    import cupy

    lengths, channels = 128, 8192
    random = cupy.random.default_rng(0)
    qkv = (random.random((2050 * lengths, channels), cupy.float32) - 0.5).astype(DTYPES["bfloat16"])
    weight = random.random((channels, 4), cupy.float32)
    state = cupy.zeros((2050, channels, 3), DTYPES["bfloat16"])
    offsets = cupy.arange(2051, dtype=cupy.uint32) * cupy.uint32(lengths)
    out = ops.gated_delta_conv1d_fwd(qkv, weight, state, cupy.arange(2050, dtype=cupy.uint32), offsets)
    last = cupy.zeros_like(state[:3])
    tables = cupy.arange(3, dtype=cupy.uint32), cupy.arange(4, dtype=cupy.uint32) * cupy.uint32(lengths)
    alone = ops.gated_delta_conv1d_fwd(qkv[-3 * lengths :], weight, last, *tables)
    assert_passed(
        bitwise(out[-3 * lengths :].get(), alone.get(), "last rows"), bitwise(state[-3:].get(), last.get(), "windows")
    )


# ---- Faults are noticed ----

FWD, SHARED = "gated_delta_conv1d_fwd.cu", "conv1d.cuh"
FAULTS: dict[str, tuple[str, tuple[str, str]]] = {
    "taps reversed": (
        FWD,
        ("weights[tap][channel], window.inputs[tap]", "weights[tap][channel], window.inputs[WINDOW_LEN - 1 - tap]"),
    ),
    "newest left out": (FWD, ("sum = __fmaf_rn(weights[WINDOW_LEN][channel], newest.of[channel], sum);", "")),
    "bias left out": (FWD, ("HAS_BIAS ? to_float", "false ? to_float")),
    "no activation": (FWD, ("IS_SILU ? __fmul_rn(sum, sigmoid(sum))", "false ? 0.0f")),
    "inner rows begin too early": (FWD, ("of_sequence.begin + HEAD_TOKENS", "of_sequence.begin + HEAD_TOKENS - 3")),
    "inner rows begin too late": (FWD, ("of_sequence.begin + HEAD_TOKENS", "of_sequence.begin + HEAD_TOKENS + 1")),
    "padding owns rows": (FWD, ("if (live_slot(batch, entries) < 0) continue;", "")),
    "unowned rows left": (FWD, ("if (is_inner || (tile.owned & bit) == 0)", "if (is_inner)")),
    "window of the first rows": (SHARED, ("window.take(i, tokens.last[i]);", "window.take(i, tokens.first[i]);")),
    "window not moved over short rows": (SHARED, ("            window.advance(inputs);", "")),
    "window always written": (SHARED, ("if (!writes) return;", "")),
    "newest input first": (
        SHARED,
        ("of_run[i] = BY_CHANNEL ? values[i % COLUMNS]", "of_run[i] = BY_CHANNEL ? values[COLUMNS - 1 - i % COLUMNS]"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(fault: str, edit: Callable[..., None]) -> None:
    call = Conv()
    file_name, change = FAULTS[fault]
    edit(file_name, change)
    unwritten = call.run("host", write_state=False)[1]
    comparisons = [*call.against_oracle(call.run("host")), bitwise(unwritten, call["conv_state"], "unwritten")]
    assert not all(comparison.passed for comparison in comparisons)


@pytest.mark.parametrize(
    "change", [("if (rows.begin + count < rows.end)", "if (false)"), ("rows.begin + count;", "rows.begin + count + 1;")]
)
def test_a_broken_commit_is_noticed(change: tuple[str, str], edit: Callable[..., None]) -> None:
    call = Conv()
    counts = [0, 1, 1, 2, 3, 15, 9, 0]
    edit("gated_delta_conv1d_commit.cu", change)
    names = ("qkv", "conv_state", "slot_idx", "input_row_offsets")
    reference = oracle.gated_delta_conv1d_commit(*(call[name] for name in names), np.uint32(counts))
    assert not bitwise(call.commit("host", counts), reference.astype(np.float32), "pool").passed


def test_the_kernels_as_they_are_pass(edit: Callable[..., None]) -> None:
    edit(SHARED, ("// The last inputs of a thread's channels, oldest first.", "// an edit that changes nothing"))
    assert_passed(*Conv().against_oracle(Conv().run("host")))


# ---- What is refused ----


def zeros(*shape: int, dtype: Any = np.float32) -> Array:
    return np.zeros(shape, dtype)


REFUSED: list[tuple[str, Any, str]] = [
    ("qkv", zeros(24), "expected shape [total_seq_len, conv_dim]"),
    ("qkv", zeros(73, 24, dtype=np.float64), "expected float32, float16 or bfloat16"),
    ("conv_weight", zeros(24, 3), "expected shape [conv_dim, conv_width] = (24, 4)"),
    ("conv_weight", zeros(24, 4, dtype=np.int32), "expected float32, float16 or bfloat16"),
    ("conv_state", zeros(12, 24), "expected shape [max_slots, conv_dim, conv_width - 1]"),
    ("conv_state", zeros(12, 23, 3), "expected conv_dim = 24 as its second axis, got 23"),
    ("conv_state", zeros(12, 24, 0), "expected conv_width - 1 from 1 to 7 as its last axis, got 0"),
    ("conv_state", zeros(12, 24, 8), "expected conv_width - 1 from 1 to 7 as its last axis, got 8"),
    ("conv_state", zeros(12, 24, 6)[:, :, ::2], "expected its last two axes dense, in either order"),
    ("conv_state", np.broadcast_to(zeros(24, 3), (12, 24, 3)), "expected a first stride of at least 72 elements"),
    ("conv_state", zeros(12, 24, 3, dtype=np.uint32), "expected float32, float16 or bfloat16"),
    ("slot_idx", zeros(8, dtype=np.int64), "expected uint32 or int32"),
    ("slot_idx", zeros(8, 1, dtype=np.uint32), "expected shape [batch_size]"),
    ("input_row_offsets", zeros(8, dtype=np.uint32), "expected shape [batch_size + 1] = (9,)"),
    ("input_row_offsets", zeros(9), "expected uint32 or int32"),
    ("bias", zeros(23), "expected shape [conv_dim] = (24,)"),
    ("bias", zeros(24, dtype=np.float64), "expected float32, float16 or bfloat16"),
    ("activation", "relu", "expected None or 'silu', got 'relu'"),
    ("activation", True, "expected None or 'silu', got True"),
    ("activation", [], "expected None or 'silu', got []"),
    ("write_state", np.array([1, 0]), "expected True or False, got array([1, 0])"),
    ("write_state", 1, "expected True or False, got 1"),
    ("out", zeros(73, 23), "expected shape [total_seq_len, conv_dim] = (73, 24)"),
    ("out", zeros(73, 24, dtype=np.float16), "expected float32, got float16"),
    ("out", np.broadcast_to(zeros(24), (73, 24)), "expected a writable array"),
    ("slot_idx[1]", np.uint32([3, 12, 5, 7, PAD, 9, 1, 2]), "expected a slot below max_slots = 12, or PAD_SLOT"),
    ("slot_idx[2]", np.uint32([3, 0, 0, 7, PAD, 9, 1, 2]), "expected a slot that no other live sequence uses"),
    ("input_row_offsets[8]", np.uint32([0, 0, 1, 3, 6, 11, 28, 68, 90]), "expected at most total_seq_len = 73"),
]


@pytest.mark.parametrize(("place", "value", "words"), REFUSED)
def test_bad_arguments_are_refused_before_anything_is_written(
    cpu_backend: str, place: str, value: Any, words: str
) -> None:
    call = Conv()
    given = {**call.inputs, "activation": "silu", "out": np.full((73, 24), 7, np.float32)}
    given[place.partition("[")[0]] = value
    before = {name: np.array(array) for name, array in given.items() if isinstance(array, np.ndarray)}
    with on_backend(cpu_backend), pytest.raises(gdn.GdnError) as caught:
        ops.gated_delta_conv1d_fwd(**given)
    assert str(caught.value).startswith(f"{place}: {words}")
    for name, array in before.items():
        np.testing.assert_array_equal(given[name], array)


def test_memory_that_is_written_is_nobody_elses(cpu_backend: str) -> None:
    call = Conv(channels=3)
    shared = np.zeros((73, 3), np.float32)
    with on_backend(cpu_backend):
        for name, given in (
            ("out", {"qkv": shared, "out": shared}),
            ("out", {"conv_state": (pool := zeros(12, 3, 3)), "out": pool.ravel()[:99].reshape(33, 3)}),
            ("conv_state", {"conv_state": (pool := zeros(12, 3, 3)), "conv_weight": pool.ravel()[:12].reshape(3, 4)}),
        ):
            arrays = call.inputs | given
            if len(arrays.get("out", shared)) != 73:
                arrays["qkv"], arrays["input_row_offsets"] = zeros(33, 3), zeros(9, dtype=np.uint32)
            with pytest.raises(gdn.LayoutError, match=rf"^{name}: expected memory of its own"):
                ops.gated_delta_conv1d_fwd(**arrays)


def test_a_read_only_pool(cpu_backend: str) -> None:
    call = Conv()
    pool = call["conv_state"].copy()
    pool.flags.writeable = False
    read_only = call.inputs | {"conv_state": pool}
    with on_backend(cpu_backend):
        with pytest.raises(gdn.LayoutError, match=r"^conv_state: expected a writable array"):
            ops.gated_delta_conv1d_fwd(**read_only)
        out = ops.gated_delta_conv1d_fwd(**read_only, activation="silu", write_state=False)
        with pytest.raises(gdn.LayoutError, match=r"^conv_state: expected a writable array"):
            ops.gated_delta_conv1d_commit(
                call["qkv"], pool, call["slot_idx"], call["input_row_offsets"], np.zeros(8, np.uint32)
            )
    assert_passed(bitwise(out, call.run(cpu_backend)[0], "out"))


def test_a_commit_refuses_what_it_must() -> None:
    call, counts = Conv(), np.ones(8, np.uint32)
    names = ("qkv", "conv_state", "slot_idx", "input_row_offsets")
    given = [call[name] for name in names]
    for wrong, words in (
        (counts[:7], "num_accepted: expected shape [batch_size] = (8,)"),
        (counts.astype(np.int64), "num_accepted: expected uint32 or int32"),
        (call["conv_state"].view(np.uint32).ravel()[:8], "conv_state: expected memory of its own"),
    ):
        with pytest.raises(gdn.GdnError) as caught:
            ops.gated_delta_conv1d_commit(*given, wrong)
        assert str(caught.value).startswith(words)


def test_index_checks_look_at_live_rows_alone() -> None:
    """Two sequences may share a slot where one of them has nothing to commit."""
    call = Conv(lengths=(2, 2), slots=(1, 1))
    names = ("qkv", "conv_state", "slot_idx", "input_row_offsets")
    given = [call[name] for name in names]
    ops.check_indices(ops.gated_delta_conv1d_commit, *given, np.uint32([0, 2]))
    with pytest.raises(gdn.IndexValueError, match=r"^slot_idx\[1\]: expected a slot that no other live sequence uses"):
        ops.check_indices(ops.gated_delta_conv1d_commit, *given, np.uint32([1, 2]))
    with pytest.raises(gdn.IndexValueError, match=r"^slot_idx\[1\]: expected a slot"):
        ops.check_indices(ops.gated_delta_conv1d_fwd, given[0], call["conv_weight"], *given[1:])


def test_a_bound_call_runs_on_what_its_arrays_hold(backend: str) -> None:
    call, device = Conv(), Device(backend)
    given = {name: device.put(array) for name, array in call.arrays.items()}
    with on_backend(backend):
        bound = ops.bind(ops.gated_delta_conv1d_fwd, **given, activation="silu")
        first = device.get(bound())
        given["conv_state"][...] = device.put(call["conv_state"])
        again = device.get(bound())
    expected, _ = call.run(backend)
    assert_passed(bitwise(first, expected, "first"), bitwise(again, expected, "again"))


def test_a_batch_that_no_launch_can_hold() -> None:
    """From shapes alone: parts of the batch, times the blocks that channels are split over."""
    batch = SimpleNamespace(
        conv_dim=2 * conv_launch.THREADS + 1, qkv=SimpleNamespace(shape=(9, 2 * conv_launch.THREADS + 1))
    )
    most = (2**31 - 1) // 3
    assert conv_launch.grid(batch, most, 1) == 3 * most
    assert conv_launch.grid(batch, most, 4) == most
    with pytest.raises(gdn.ShapeError) as caught:
        conv_launch.grid(batch, most + 1, 1)
    words = f"expected a batch of at most {2**31 - 1} blocks in one launch, got {3 * most + 3} for shape"
    assert str(caught.value) == f"qkv: {words} {batch.qkv.shape}"
