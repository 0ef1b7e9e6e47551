"""Decode loops that hypothesis makes up, step by step, over pools, rings and pending records.

After every step pool and readouts must have the bits of plain forward calls, whose groups of tokens end where the loop
writes a state; and be what the float64 oracle, which knows no ring, makes of the same tokens.

How long it goes on is the profile's to say: see CONTRIBUTING.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from gdn import oracle
from gdn.arrays import DTYPES
from gdn.backends import numpy as numpy_backend
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.speculative import PendingWindows
from gdn.testing import assert_passed, bitwise, close
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.compare import same_bytes, storage_tolerance
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device, PendingTables

Array = np.ndarray[Any, Any]

INPUTS = ("model", "wide_beta", "mixed_decay", "tiny_keys", "zero_keys_and_queries", "scaled_rows", "one_hot")


@dataclass(frozen=True)
class Sizes:
    """What a loop's kernels are compiled for."""

    heads: HeadGeometry
    work_dtype: str
    state_dtype: str
    ring_len: int


#: Each is some kernels to compile for the host.
FEW_SIZES = (
    Sizes(HeadGeometry(2, 4, 8, 16), "float32", "float32", 4),
    Sizes(HeadGeometry(1, 3, 32, 8), "bfloat16", "bfloat16", 5),
)
TYPES = st.sampled_from(("float32", "float16", "bfloat16"))
DIMS = st.sampled_from((8, 16, 24, 32, 40, 64))
ANY_SIZES = st.builds(
    lambda key_heads, group, dims, *more: Sizes(HeadGeometry(key_heads, key_heads * group, *dims), *more),
    *(
        st.integers(1, 3),
        st.integers(1, 3),
        st.tuples(DIMS, DIMS),
        TYPES,
        TYPES,
        st.sampled_from((1, 2, 4, 4, 5, 8, 9)),
    ),
)


RARELY = st.sampled_from((False, False, False, True))


class Tokens(NamedTuple):
    """Tokens of one row in one layer."""

    qkv: Array
    decay: Array
    beta: Array

    def first(self, count: int) -> Tokens:
        return Tokens(*(array[:count] for array in self))

    def then(self, others: Tokens) -> Tokens:
        return Tokens(*(np.concatenate(pair) for pair in zip(self, others, strict=True)))


@dataclass
class Row:
    """What a loop knows of a row, the same in all layers: how much of it is pending, and in which ring row, by place.

    padding: in this step.
    """

    pending: int = 0
    place: int = 0
    padding: bool = False


class Loop(RuleBasedStateMachine):
    """A loop's pool and ring, the pool of plain calls, and the tokens that are accepted but in neither pool."""

    def __init__(self, backend: str) -> None:
        super().__init__()
        self.device = Device(backend)

    @initialize(data=st.data(), num_layers=st.integers(1, 2), num_rows=st.integers(1, 4), seed=st.integers(0, 2**32))
    def begin(self, data: st.DataObject, num_layers: int, num_rows: int, seed: int) -> None:
        few = self.device.backend == "host"
        self.sizes = sizes = data.draw(st.sampled_from(FEW_SIZES) if few else ANY_SIZES, label="sizes")
        self.random = np.random.default_rng(seed)
        self.index = np.dtype(data.draw(st.sampled_from(("uint32", "int32")), label="index type"))
        self.rows = [Row() for _ in range(num_rows)]
        num_slots = num_layers * num_rows
        places = self.random.permutation(num_slots + 2).astype(np.uint32)
        self.slots = places[:num_slots].reshape(num_layers, num_rows)
        self.tokens_in_pool = [[self.new_tokens(1)[0].first(0)] * num_rows for _ in range(num_layers)]
        self.unwritten = [list(row) for row in self.tokens_in_pool]
        heads = sizes.heads
        states = 0.3 * self.random.standard_normal((num_slots + 2, *state_shape(heads)))
        states[places[num_slots:]] = np.nan  # of nobody
        self.first_pool = states.astype(DTYPES[sizes.state_dtype])
        self.pool, self.plain_pool = self.device.put(self.first_pool), self.device.put(self.first_pool)
        # Two ring rows of each row and layer, and one of nobody, full of NaN as all of them are in the beginning.
        self.ring_rows = self.random.permutation(2 * num_slots + 1)[: 2 * num_slots].astype(np.uint32)
        self.ring_rows = self.ring_rows.reshape(2, num_layers, num_rows)
        stride = heads.record_elements + int(self.random.integers(0, 9))
        self.ring = self.device.put(
            np.full((2 * num_slots + 1, heads.num_key_heads, sizes.ring_len, stride), np.nan, np.float32)
        )

    # ---- Tokens and calls ----

    def new_tokens(self, *lengths: int, inputs: str = "model") -> list[Tokens]:
        """Tokens of each row."""
        seed = int(self.random.integers(2**31))
        case = RecurrenceCase("", self.sizes.heads, lengths, work_dtype=self.sizes.work_dtype, inputs=inputs, seed=seed)
        arrays = build_arrays(case)
        cuts = np.cumsum(lengths)[:-1]
        parts = (np.split(array, cuts) for array in arrays.as_tuple()[:3])
        return [Tokens(*part) for part in zip(*parts, strict=True)]

    def call(self, layer: int, tokens: Sequence[Tokens], order: Sequence[int], *, all_live: bool = False) -> Any:
        """The arguments of a call on tokens of the rows, in this order."""
        slots = [PAD_SLOT if self.rows[row].padding and not all_live else self.slots[layer, row] for row in order]
        lengths = [len(tokens[row].qkv) for row in order]
        joined = Tokens(*map(np.concatenate, zip(*(tokens[row] for row in order), strict=True)))
        offsets = np.cumsum([0, *lengths]).astype(self.index)
        return RecurrenceArrays(*joined, self.first_pool, np.array(slots, np.uint32).view(self.index), offsets)

    def by_row(self, readout: Array, tokens: Sequence[Tokens], order: Sequence[int]) -> list[Array]:
        """The parts of a readout, in the order of the rows."""
        parts = np.split(readout, np.cumsum([len(tokens[row].qkv) for row in order])[:-1])
        return [parts[order.index(row)] for row in range(len(self.rows))]

    def table(self, entries: Sequence[int]) -> Array:
        return np.array(entries, np.uint32).view(self.index)

    def draw_rows(self, data: st.DataObject, entries: st.SearchStrategy[Any], label: str) -> list[Any]:
        count = len(self.rows)
        drawn: list[Any] = data.draw(st.lists(entries, min_size=count, max_size=count), label=label)
        return drawn

    def draw_order(self, data: st.DataObject) -> list[int]:
        order: list[int] = data.draw(st.permutations(range(len(self.rows))), label="order in the batch")
        return order

    # ---- What is right ----

    def write(self, chosen: Sequence[bool], more: Sequence[Sequence[Tokens]] | None = None) -> None:
        """Advance the plain pool of the chosen rows over what is not in it, and these tokens behind it, in one call."""
        for layer, unwritten in enumerate(self.unwritten):
            behind = [tokens.then(more[layer][row]) if more else tokens for row, tokens in enumerate(unwritten)]
            taken = [tokens.first(len(tokens.qkv) * chosen[row]) for row, tokens in enumerate(behind)]
            if not sum(len(tokens.qkv) for tokens in taken):
                continue
            call = self.call(layer, taken, range(len(self.rows)), all_live=True)
            before = self.device.get(self.plain_pool)
            self.device.forward(call, self.plain_pool)
            live = self.slots[layer][[len(tokens.qkv) > 0 for tokens in taken]]
            _, expected = oracle.gated_delta_recurrence_fwd(*replace(call, recurrent_state=before).as_tuple())
            for row, tokens in enumerate(taken):
                if chosen[row]:
                    self.tokens_in_pool[layer][row] = self.tokens_in_pool[layer][row].then(tokens)
                    unwritten[row] = tokens.first(0)
            near_the_oracle(self.device.get(self.plain_pool)[live], expected[live], "states")

    def plain_readouts(self, windows: Sequence[Sequence[Tokens]]) -> list[list[Array]]:
        """Of the tokens of each layer and row, each row alone (E3), in one call with all that is not in the pool."""
        readouts = []
        for layer, unwritten in enumerate(self.unwritten):
            readouts.append([])
            for row, window in enumerate(windows[layer]):
                joined = [tokens.first(0) for tokens in windows[layer]]
                joined[row] = unwritten[row].then(window)
                call = self.call(layer, joined, [row])
                before = self.device.get(self.plain_pool)
                readout = self.device.forward(call, self.device.put(before))
                expected, pool = oracle.gated_delta_recurrence_fwd(*replace(call, recurrent_state=before).as_tuple())
                if readout.size:
                    terms = terms_of_readouts(pool[self.slots[layer][row]])
                    near_the_oracle(readout, expected, f"readout of row {row}", terms)
                readouts[layer].append(readout[len(unwritten[row].qkv) :])
        return readouts

    def check(self, readouts: Sequence[Sequence[Array]] = (), expected: Sequence[Sequence[Array]] = ()) -> None:
        """Pool and readouts have the bits of the plain calls, those of padding are zero."""
        assert_passed(same_bytes(self.device.get(self.pool), self.device.get(self.plain_pool), "pool"))
        for of_layer, right in zip(readouts, expected, strict=True):
            for row, (readout, plain) in enumerate(zip(of_layer, right, strict=True)):
                assert readout.shape == plain.shape
                if readout.size:
                    assert_passed(bitwise(readout, plain, f"readout of row {row}"))

    def accept(self, windows: Sequence[Sequence[Tokens]], counts: Sequence[int]) -> None:
        """Keep the first so many tokens of each row's window, which are in no pool yet."""
        for unwritten, window in zip(self.unwritten, windows, strict=True):
            for row, count in enumerate(counts):
                unwritten[row] = unwritten[row].then(window[row].first(count))

    def draw_windows(self, data: st.DataObject, longest: int) -> list[list[Tokens]]:
        lengths = self.draw_rows(data, st.one_of(st.integers(0, 2), st.integers(0, longest)), "lengths")
        inputs = data.draw(st.sampled_from(INPUTS), label="inputs")
        return [self.new_tokens(*lengths, inputs=inputs) for _ in self.slots]

    def draw_accepted(self, data: st.DataObject, windows: Sequence[Sequence[Tokens]], commits: Array) -> list[int]:
        """How many tokens are kept of each window: all of one that advances its state, none of padding."""
        counts = []
        for row, window in zip(self.rows, windows[0], strict=True):
            length = len(window.qkv)
            least = length if commits[len(counts)] else 0
            counts.append(
                0 if row.padding else data.draw(st.sampled_from([length, *range(least, length)]), label="accepted")
            )
        return counts

    def teardown(self) -> None:
        """E4: with float32 states one call over all tokens of each row has the bits of all these calls."""
        if not hasattr(self, "ring") or self.sizes.state_dtype != "float32":
            return
        at_once = self.device.put(self.first_pool)
        for layer, tokens in enumerate(self.tokens_in_pool):
            self.device.forward(self.call(layer, tokens, range(len(self.rows)), all_live=True), at_once)
        # The loop's pool had the same bytes behind its last step; behind one that failed it may lag.
        assert_passed(same_bytes(self.device.get(self.plain_pool), self.device.get(at_once), "pool of one call"))


def near_the_oracle(actual: Array, expected: Array, name: str, terms: float = 0.0) -> None:
    """Within one rounding to the type of `actual`, which of subnormal numbers of float16 is one of absolute size.

    terms: the size of the terms of sums that may cancel to almost nothing.
    """
    tolerance = storage_tolerance(actual.dtype.name)
    least = max(terms, 2.0**-8 if actual.dtype == np.float16 else 0.0)
    if least:  # so that what lies below it altogether is no scale
        actual, expected = (np.concatenate([array.ravel(), np.full(1, least)]) for array in (actual, expected))
    assert_passed(close(actual, expected, tolerance, name))


def terms_of_readouts(state: Array) -> float:
    """About the size of what a readout of a slot's state [num_value_heads, KD, VD] sums: a query has the norm 1/√KD."""
    columns = np.linalg.norm(state.astype(np.float64), axis=1) / np.sqrt(state.shape[1])
    return float(np.sqrt(np.mean(columns**2)))


def state_shape(heads: HeadGeometry) -> tuple[int, int, int]:
    return heads.num_value_heads, heads.key_head_dim, heads.value_head_dim


class TablesByHand(Loop):
    """Forward, verify and fold in any order, with tables that a caller might make."""

    def tables(self, layer: int, order: Sequence[int], counts: Sequence[int]) -> PendingTables:
        rows = [self.ring_rows[self.rows[row].place, layer, row] for row in order]
        return PendingTables(self.table(rows), self.table([counts[row] for row in order]))

    def draw_counts(self, data: st.DataObject) -> list[int]:
        """What a call is told of pending records: that there are none may also be a count that no ring holds."""
        none = st.sampled_from((0, 0, self.sizes.ring_len + 1, 65, 2**31, 2**32 - 1))
        return [row.pending or data.draw(none, label="none pending, as") for row in self.rows]

    @rule(data=st.data(), padding=RARELY, fused=st.booleans())
    def forward(self, data: st.DataObject, padding: bool, fused: bool) -> None:
        order = self.draw_order(data)
        if not fused:
            self.fold_rows([True] * len(order), self.draw_counts(data))
        for row in self.rows:
            row.padding = padding and data.draw(st.booleans(), label="padding")
        windows = self.draw_windows(data, 12)
        counts = self.draw_counts(data)
        live = [not row.padding for row in self.rows]
        self.write([runs and fused for runs in live])
        expected = self.plain_readouts(windows)
        readouts = []
        for layer, tokens in enumerate(windows):
            given = (self.ring, self.tables(layer, order, counts)) if fused else ()
            readout = self.device.forward(self.call(layer, tokens, order), self.pool, *given)
            readouts.append(self.by_row(readout, tokens, order))
        self.write(live, windows)
        for row in self.rows:
            row.pending = row.pending * row.padding
        self.check(readouts, expected)

    @rule(data=st.data(), in_a_row=st.integers(1, 5))
    def verifies(self, data: st.DataObject, in_a_row: int) -> None:
        for _ in range(in_a_row):  # records add up between other steps
            self.verify(data, *data.draw(st.tuples(RARELY, RARELY), label="padding, twice"))

    def verify(self, data: st.DataObject, padding: bool, twice: bool) -> None:
        order, ring_len = self.draw_order(data), self.sizes.ring_len
        for row in self.rows:
            row.padding = padding and data.draw(st.booleans(), label="padding")
        windows = self.draw_windows(data, ring_len + 2)
        lengths = np.array([len(window.qkv) for window in windows[0]])
        moves = np.array(self.draw_rows(data, st.booleans(), "to another ring row"))
        counts = self.draw_counts(data)
        pending = np.array([row.pending for row in self.rows])
        live = np.array([not row.padding for row in self.rows])
        stays = np.where(moves, 0, pending)
        commits = live & (lengths > 0) & (stays + lengths > ring_len)
        accepted = self.draw_accepted(data, windows, commits)

        self.write(list(moves & live))
        expected = self.plain_readouts(windows)
        if twice:
            self.again(data, windows, order, moves, counts)
        readouts = self.verified(windows, order, moves, counts, self.pool, self.ring)
        self.write(list(commits), windows)
        self.accept(windows, [0 if commits[at] else count for at, count in enumerate(accepted)])
        for at, row in enumerate(self.rows):
            if live[at]:
                row.place ^= int(moves[at])
                row.pending = 0 if commits[at] else int(stays[at]) + accepted[at]
        self.check(readouts, expected)

    def verified(
        self,
        windows: Sequence[Sequence[Tokens]],
        order: Sequence[int],
        moves: Array,
        counts: Sequence[int],
        pool: Any,
        ring: Any,
    ) -> list[list[Array]]:
        """The readouts of a verify of all layers."""
        readouts = []
        for layer, tokens in enumerate(windows):
            rows = [self.ring_rows[self.rows[row].place ^ int(moves[row]), layer, row] for row in order]
            tables = self.tables(layer, order, counts)
            readout = self.device.verify(self.call(layer, tokens, order), self.table(rows), pool, ring, tables)
            readouts.append(self.by_row(readout, tokens, order))
        return readouts

    def again(
        self,
        data: st.DataObject,
        windows: Sequence[Sequence[Tokens]],
        order: Sequence[int],
        moves: Array,
        counts: Sequence[int],
    ) -> None:
        """E5 and E3: the same call on copies, and in another order of the batch, leaves the same bytes."""
        left = []
        for one_order in (order, self.draw_order(data)):
            pool, ring = (self.device.put(self.device.get(array)) for array in (self.pool, self.ring))
            readouts = self.verified(windows, one_order, moves, counts, pool, ring)
            flat = np.concatenate([np.concatenate(of_layer) for of_layer in readouts])
            left.append([flat, self.device.get(pool), self.device.get(ring)])
        for first, second in zip(*left, strict=True):
            assert not first.size or same_bytes(second, first)

    @rule(data=st.data())
    def fold(self, data: st.DataObject) -> None:
        self.fold_rows(self.draw_rows(data, st.booleans(), "folded"), self.draw_counts(data))
        self.check()

    def fold_rows(self, chosen: Sequence[bool], counts: Sequence[int]) -> None:
        """Fold some rows; others are padding in this call."""
        ring_rows = [
            [self.ring_rows[row.place, layer, at] for at, row in enumerate(self.rows)]
            for layer in range(len(self.slots))
        ]
        row_ids = np.where(chosen, self.slots, np.uint32(PAD_SLOT)).astype(np.uint32)
        self.device.fold(self.pool, row_ids.view(self.index), self.ring, self.table(ring_rows), self.table(counts))
        self.write(chosen)
        for row, is_chosen in zip(self.rows, chosen, strict=True):
            row.pending = 0 if is_chosen else row.pending

    @rule(data=st.data())
    def a_sequence_begins_anew(self, data: st.DataObject) -> None:
        at = data.draw(st.integers(0, len(self.rows) - 1), label="row")
        forget(self, at)
        self.rows[at].pending = 0

    @rule(data=st.data(), kind=st.sampled_from(("beta 0 and decay 1", "key 0", "query 0")))
    def neutral_tokens(self, data: st.DataObject, kind: str) -> None:
        """E6. Behind a fold, so that the states before are at hand."""
        for row in self.rows:
            row.padding = False
        self.fold_rows([True] * len(self.rows), [row.pending for row in self.rows])
        windows = [
            [neutral(tokens, kind, self.sizes.heads) for tokens in layer] for layer in self.draw_windows(data, 5)
        ]
        before = self.device.get(self.pool)
        expected = self.plain_readouts(windows)
        order = self.draw_order(data)
        readouts = [
            self.by_row(self.device.forward(self.call(layer, tokens, order), self.pool), tokens, order)
            for layer, tokens in enumerate(windows)
        ]
        self.write([True] * len(self.rows), windows)
        self.check(readouts, expected)
        after = self.device.get(self.pool)
        for slots, tokens, of_layer in zip(self.slots, windows, readouts, strict=True):
            for slot, window, readout in zip(slots, tokens, of_layer, strict=True):
                if kind == "query 0":
                    assert (readout == 0).all()
                else:
                    decayed = before[slot].astype(np.float32)
                    for decay in window.decay.astype(np.float32):
                        decayed *= decay[:, None, None]
                    decayed = decayed.astype(before.dtype) if len(window.qkv) else before[slot]
                    assert_passed(bitwise(after[slot], decayed, f"{kind}: state", ignore_zero_sign=True))

    @precondition(lambda self: self.sizes.heads.num_key_heads > 1)
    @rule(data=st.data())
    def heads_apart(self, data: st.DataObject) -> None:
        """E7: a verify of each key head by itself, with what is pending, has the bits of one call; nothing is kept."""
        for row in self.rows:
            row.padding = False
        windows = self.draw_windows(data, self.sizes.ring_len + 1)
        moves = np.array(self.draw_rows(data, st.booleans(), "to another ring row"))
        counts, order = self.draw_counts(data), list(range(len(self.rows)))
        pool, ring = (self.device.get(array) for array in (self.pool, self.ring))
        whole_pool, whole_ring = self.device.put(pool), self.device.put(ring)
        heads = self.sizes.heads
        for layer, tokens in enumerate(windows):
            rows = self.table([self.ring_rows[self.rows[row].place ^ int(moves[row]), layer, row] for row in order])
            tables, call = self.tables(layer, order, counts), self.call(layer, tokens, order)
            whole = self.device.verify(call, rows, whole_pool, whole_ring, tables)
            if not whole.size:
                continue
            for head in range(heads.num_key_heads):
                values = slice(head * heads.group_size, (head + 1) * heads.group_size)
                part = one_key_head(call, heads, head)
                part_pool, part_ring = self.device.put(pool[:, values]), self.device.put(ring[:, head : head + 1])
                readout = self.device.verify(
                    replace(part, recurrent_state=pool[:, values]), rows, part_pool, part_ring, tables
                )
                channels = slice(values.start * heads.value_head_dim, values.stop * heads.value_head_dim)
                assert_passed(bitwise(readout, whole[:, channels].copy(), f"readout of key head {head}"))
                slots = self.slots[layer]
                after = self.device.get(whole_pool)[slots][:, values]
                assert_passed(same_bytes(self.device.get(part_pool)[slots], after, f"states of key head {head}"))


def forget(loop: Loop, row: int) -> None:
    """Zero a row's states in both pools, and forget its tokens."""
    for layer, slots in enumerate(loop.slots):
        for pool in (loop.pool, loop.plain_pool, loop.first_pool):
            pool[int(slots[row])] = 0
        for tokens in (loop.unwritten[layer], loop.tokens_in_pool[layer]):
            tokens[row] = tokens[row].first(0)


def neutral(tokens: Tokens, kind: str, heads: HeadGeometry) -> Tokens:
    if kind == "beta 0 and decay 1":
        return tokens._replace(decay=np.ones_like(tokens.decay), beta=np.zeros_like(tokens.beta))
    qkv, part = tokens.qkv.copy(), heads.key_dim if kind == "key 0" else 0
    qkv[:, part : part + heads.key_dim] = 0
    # Products of decays stay clear of subnormal numbers, which a GPU flushes to zero.
    return tokens._replace(qkv=qkv, decay=np.maximum(tokens.decay, np.float32(0.5)))


def one_key_head(call: RecurrenceArrays, heads: HeadGeometry, head: int) -> RecurrenceArrays:
    """The call on one key head and its value heads."""
    query, key, value = np.split(call.qkv_conv_output, [heads.key_dim, 2 * heads.key_dim], axis=1)
    keys = slice(head * heads.key_head_dim, (head + 1) * heads.key_head_dim)
    of_group = slice(head * heads.group_size, (head + 1) * heads.group_size)
    values = slice(of_group.start * heads.value_head_dim, of_group.stop * heads.value_head_dim)
    return replace(
        call,
        qkv_conv_output=np.concatenate([query[:, keys], key[:, keys], value[:, values]], axis=1),
        decay_per_token=call.decay_per_token[:, of_group].copy(),
        beta_per_token=call.beta_per_token[:, of_group].copy(),
    )


class TablesOfPendingWindows(Loop):
    """Steps whose tables `PendingWindows` keeps: begin, a verify in each layer, accept; fold and reset between them."""

    @initialize(lazy=st.booleans())
    def begin_windows(self, lazy: bool) -> None:
        self.lazy = lazy
        self.windows: PendingWindows | None = None  # made behind the other initialisation, whose order is not given

    def tables(self) -> PendingWindows:
        if self.windows is None:
            rows = self.device.put(self.ring_rows.view(self.index))
            self.windows = PendingWindows(rows, self.sizes.ring_len, lazy=self.lazy)
        return self.windows

    @rule(data=st.data(), in_a_row=st.integers(1, 5))
    def steps(self, data: st.DataObject, in_a_row: int) -> None:
        for _ in range(in_a_row):
            self.step(data, *data.draw(st.tuples(RARELY, RARELY), label="padding, begun again"))

    def step(self, data: st.DataObject, padding: bool, again: bool) -> None:
        windows, ring_len, order = self.tables(), self.sizes.ring_len, list(range(len(self.rows)))
        for row in self.rows:
            row.padding = padding and data.draw(st.booleans(), label="padding")
        tokens = self.draw_windows(data, ring_len + 2)
        lengths = np.array([len(window.qkv) for window in tokens[0]])
        pending = np.array([row.pending for row in self.rows])
        runs = (lengths > 0) & [not row.padding for row in self.rows]
        folds = runs & (pending > 0) & ~(self.lazy & (pending + lengths <= ring_len))
        commits = runs & (np.where(folds, 0, pending) + lengths > ring_len)
        accepted = self.draw_accepted(data, tokens, commits)

        self.write(list(folds))
        expected = self.plain_readouts(tokens)
        calls = [self.call(layer, window, order) for layer, window in enumerate(tokens)]
        for _ in range(1 + again):  # a step that failed before its verifies
            self.on_device(windows.begin, calls[0].input_row_offsets, *([calls[0].slot_idx] if padding else []))
        moved = self.device.get(windows.ring_slot_idx) != self.device.get(windows.pending_ring_slot_idx)
        assert (moved == folds).all(), "windows take another ring row just where their states are to be folded"
        readouts = []
        for layer, call in enumerate(calls):
            rows, pending_rows = (
                self.device.get(table[layer]) for table in (windows.ring_slot_idx, windows.pending_ring_slot_idx)
            )
            tables = PendingTables(pending_rows, self.device.get(windows.num_pending))
            readout = self.device.verify(call, rows, self.pool, self.ring, tables)
            readouts.append(self.by_row(readout, tokens[layer], order))
        # More than a window has counts as all of it; of padding, empty and long windows nobody looks at the count.
        said = [2**31 if count == length else count for count, length in zip(accepted, lengths, strict=True)]
        self.on_device(windows.accept, self.table(said))
        self.write(list(commits), tokens)
        self.accept(tokens, [0 if commits[at] else count for at, count in enumerate(accepted)])
        for at, row in enumerate(self.rows):
            if runs[at]:
                row.pending = 0 if commits[at] else int(pending[at]) * int(not folds[at]) + accepted[at]
        assert self.device.get(windows.num_pending).tolist() == [row.pending for row in self.rows]
        self.check(readouts, expected)

    @rule()
    def fold(self) -> None:
        with on_backend(self.device.backend):
            self.tables().fold(self.pool, self.device.put(self.slots.view(self.index)), self.ring)
        self.write([True] * len(self.rows))
        for row in self.rows:
            row.pending = 0
        self.check()

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        is_new = self.draw_rows(data, st.booleans(), "new")
        self.on_device(self.tables().reset, np.array(is_new))
        for at, row in enumerate(self.rows):
            if is_new[at]:
                forget(self, at)
                row.pending = 0

    def on_device(self, method: Any, *tables: Array) -> None:
        with on_backend(self.device.backend):
            method(*(self.device.put(table) for table in tables))


def run(machine: type[Loop], backend: str, **options: Any) -> None:
    """Loops of a machine, a fifth of the profile's examples, since each is many calls."""
    options = {"max_examples": hypothesis.settings().max_examples // 5, **options}
    settings = hypothesis.settings(
        stateful_step_count=12, suppress_health_check=list(hypothesis.HealthCheck), **options
    )
    run_state_machine_as_test(lambda: machine(backend), settings=settings)


def test_tables_by_hand(backend: str) -> None:
    run(TablesByHand, backend)


def test_tables_of_pending_windows(backend: str) -> None:
    """Beside field case 24: loops that `PendingWindows` leads, with resets, folds and abandoned steps on the way."""
    run(TablesOfPendingWindows, backend)


# ---- What it finds ----


def _empty_windows_fold_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_backend._fold_rows

    def fold(inputs: Any, pending: Any, sequences: Array) -> None:
        right(inputs, pending, sequences[np.diff(inputs.input_row_offsets.array.astype(np.int64))[sequences] > 0])

    monkeypatch.setattr(numpy_backend, "_fold_rows", fold)


def _unowned_rows_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy_backend, "_clear_unowned_rows", lambda *arguments: None)


def _records_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window that is padding counts its records as accepted."""
    right = numpy_backend.pending_windows

    def windows(step: Any, tables: Any, ring_len: int, *, is_lazy: bool) -> None:
        right(replace(step, slot_idx=None), tables, ring_len, is_lazy=is_lazy)

    monkeypatch.setattr(numpy_backend, "pending_windows", windows)


def _a_full_ring_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    right = numpy_backend._fold_slot

    def fold(heads: HeadGeometry, pool: Array, slot: int, records: Array) -> None:
        if records.shape[1] < 4:
            right(heads, pool, slot, records)

    monkeypatch.setattr(numpy_backend, "_fold_slot", fold)


@pytest.mark.parametrize(
    ("machine", "fault"),
    [
        (TablesByHand, _empty_windows_fold_nothing),
        (TablesByHand, _unowned_rows_are_left),
        (TablesByHand, _a_full_ring_is_not_folded),
        (TablesOfPendingWindows, _records_too_many),
        (TablesOfPendingWindows, _a_full_ring_is_not_folded),
    ],
)
def test_a_fault_is_found(monkeypatch: pytest.MonkeyPatch, machine: type[Loop], fault: Any) -> None:
    fault(monkeypatch)
    once = {"derandomize": True, "database": None, "phases": [hypothesis.Phase.generate], "report_multiple_bugs": False}
    with pytest.raises(AssertionError):
        run(machine, "numpy", max_examples=60, **once)
