"""What is compiled ahead of time is all that calls of a layer pick, whatever their sizes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn
import gdn.calls
from gdn import ops, speculative, variants
from gdn.arrays import DTYPES
from gdn.backends.launch import Variant
from gdn.geometry import HeadGeometry
from gdn.models import MODELS
from gdn.variants import OPS, Layer, step_runs, uses

NUM_CALLS = 150  # of each op


def empty(shape: tuple[int, ...], dtype: str = "uint32") -> Any:
    """An array of whatever values; memory that nobody touches costs nothing."""
    return np.empty(shape, DTYPES[dtype])


class Calls:
    """Random calls of each op in a layer: arguments, of which keywords come in a dictionary."""

    def __init__(self, layer: Layer, seed: int) -> None:
        self.layer = layer
        self.random = Random(seed)

    def _batch(self) -> tuple[int, int]:
        """Sequences and tokens: near every threshold, or far from all."""
        size = self.random.choice((0, 1, 2, 3, 4, 5, 8, 12, 13, 16, 24, self.random.randrange(1, 300)))
        mean = self.random.choice((0, 1, 1.5, 2, 3, 4, 15, 15.9, 16, 20))
        return size, max(int(size * mean) + self.random.choice((-1, 0, 0, 1)), 0)

    def _six(self) -> tuple[Any, ...]:
        size, tokens = self._batch()
        heads, gate = self.layer.heads, self.layer.gate_dtype
        gates = (empty((tokens, heads.num_value_heads), gate) for _ in range(2))
        qkv = empty((tokens, heads.conv_dim), self.layer.work_dtype)
        return qkv, *gates, self._pool(), empty((size,)), empty((size + 1,))

    def _pool(self) -> Any:
        heads = self.layer.heads
        slots = self.random.choice((1, 3))
        return empty((slots, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), self.layer.state_dtype)

    def _ring(self) -> Any:
        heads, ring_len = self.layer.heads, self.random.choice(self.layer.ring_lens)
        stride = heads.record_elements + -heads.record_elements % 8
        return empty((self.random.choice((1, 4)), heads.num_key_heads, ring_len, stride), self.layer.ring_dtype)

    def _out(self, six: tuple[Any, ...]) -> Any:
        if self.layer.out_dtype is None and self.random.randrange(2):
            return None
        shape = six[0].shape[0], self.layer.heads.value_dim
        return empty(shape, self.layer.out_dtype or self.layer.work_dtype)

    def gated_delta_recurrence_fwd(self) -> Any:
        six = self._six()
        keywords: dict[str, Any] = {"out": self._out(six), "algorithm": self.random.choice(("recurrent", "auto"))}
        if self.layer.ring_lens and self.random.randrange(2):
            tables = {name: empty(six[4].shape) for name in ("pending_ring_slot_idx", "num_pending")}
            keywords |= {"ring": self._ring(), **tables}
        return ops.bind(ops.gated_delta_recurrence_fwd, *six, **keywords)

    def gated_delta_chunk_plan(self) -> Any:
        six = self._six()
        is_served = all(dim % 32 == 0 for dim in six[3].shape[2:])
        return ops.bind(
            ops.gated_delta_recurrence_fwd, *six, out=self._out(six), algorithm="chunked" if is_served else "auto"
        )

    gated_delta_chunk_prepare = gated_delta_chunk_walk = gated_delta_chunk_plan

    def gated_delta_recurrence_verify_ring(self) -> Any:
        six = self._six()
        keywords = {"out": self._out(six)}
        if self.random.randrange(2):
            keywords |= {name: empty(six[4].shape) for name in ("pending_ring_slot_idx", "num_pending")}
        ring = self._ring()
        return ops.bind(ops.gated_delta_recurrence_verify_ring, *six, ring, empty(six[4].shape), **keywords)

    def gated_delta_state_fold(self) -> Any:
        rows = self.random.choice((1, 2, 36)), self._batch()[0]
        arrays = self._pool(), empty(rows), self._ring(), empty(rows), empty(rows[1:])
        return ops.bind(ops.gated_delta_state_fold, *arrays)

    def gated_delta_gates(self) -> Any:
        heads, (_, tokens) = self.layer.heads.num_value_heads, self._batch()
        projections = (empty((tokens, heads), self.layer.work_dtype) for _ in range(2))
        of_heads = (empty((heads,), self.random.choice(("float32", self.layer.work_dtype))) for _ in range(2))
        return ops.bind(ops.gated_delta_gates, *projections, *of_heads)

    def _conv_batch(self, more_rows: int = 0) -> tuple[Any, ...]:
        size, tokens = self._batch()
        channels = self.layer.heads.conv_dim
        pool = empty((self.random.choice((1, 3)), channels, self.layer.conv_width - 1), self.layer.work_dtype)
        return empty((tokens + more_rows, channels), self.layer.work_dtype), pool, empty((size,)), empty((size + 1,))

    def gated_delta_conv1d_fwd(self) -> Any:
        qkv, *more = self._conv_batch(self.random.choice((0, 1000, 1024, 5000)))
        out = empty(qkv.shape, self.layer.work_dtype) if self.random.randrange(2) else None
        filter_dtype = self.random.choice(("float32", self.layer.work_dtype))
        weight = empty((qkv.shape[1], self.layer.conv_width), filter_dtype)
        keywords = {"activation": "silu", "write_state": bool(self.random.randrange(2)), "out": out}
        return ops.bind(ops.gated_delta_conv1d_fwd, qkv, weight, *more, **keywords)

    def gated_delta_conv1d_commit(self) -> Any:
        batch = self._conv_batch()
        return ops.bind(ops.gated_delta_conv1d_commit, *batch, empty(batch[2].shape))

    def pending_windows(self) -> Any:
        size = self._batch()[0]
        tables = *(empty((2, size)) for _ in range(3)), *(empty((size,)) for _ in range(3))
        rules = speculative._rules_of(8, bool(self.random.randrange(2)))
        return gdn.calls.BoundCall(rules, (None, None, empty((size + 1,)), None, *tables))


def variants_of(bound: Any) -> set[Variant]:
    """What a call would launch on a GPU."""
    ready = bound._ready
    return set() if ready.idle else {launch.variant for launch in ready.launches()}


def outside(layer: Layer, seed: int = 0) -> set[Variant]:
    """What random calls pick that is not in the list."""
    listed = {use.variant for use in uses(layer)}
    calls = Calls(layer, seed)
    makers: list[Callable[[], Any]] = [getattr(calls, op) for op in OPS]
    return set().union(*(variants_of(make()) for make in makers for _ in range(NUM_CALLS))) - listed


LAYERS = [
    Layer(MODELS["qwen3-next-80b-a3b"], ring_lens=(4, 8)),
    Layer(MODELS["qwen3.5-27b"], state_dtype="bfloat16", ring_lens=(1, 16)),
    Layer(MODELS["qwen3.5-0.8b"], "float16", "float16", "float32", gate_dtype="float16", ring_lens=(8,)),
    Layer(MODELS["olmo-hybrid-7b"], ring_dtype="bfloat16", ring_lens=(8, 64)),
    Layer(HeadGeometry(2, 8, 128, 128), "float32", ring_lens=(8,)),
    Layer(HeadGeometry(1, 200, 24, 8), state_dtype="float16", ring_lens=(5,)),
    Layer(HeadGeometry(1, 2, 256, 256), ring_lens=(8,)),
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: f"{layer.heads.num_value_heads}-{layer.types}")
def test_random_calls_pick_nothing_else(layer: Layer) -> None:
    assert outside(layer) == set()


def test_a_list_that_stops_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variants, "MAX_SEQUENCES", 4)
    assert outside(LAYERS[0]) != set()
    monkeypatch.undo()
    monkeypatch.setattr(variants, "MAX_TOKENS", 2)
    assert outside(LAYERS[0]) != set()


def test_a_threshold_that_moves_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {use.calls for use in uses(LAYERS[0], ["gated_delta_recurrence_fwd"])}
    monkeypatch.setattr("gdn.backends.streamed_tile.LONG_ROW_TOKENS", 11)
    after = {use.calls for use in uses(LAYERS[0], ["gated_delta_recurrence_fwd"])}
    assert {calls for calls in before if calls.endswith("16 tokens or more")}
    assert {calls for calls in after if calls.endswith("11 tokens or more")}
    assert outside(LAYERS[0]) == set()


def test_layers_without_rings_have_no_calls_with_rings() -> None:
    stems = {use.variant.kernel.stem for use in uses(Layer(HeadGeometry(1, 1, 32, 32)))}
    without = {"gated_delta_recurrence_verify_ring", "gated_delta_state_fold"}
    assert stems == OPS.keys() - without


def test_heads_that_chunks_do_not_serve_have_none() -> None:
    listed = list(uses(Layer(HeadGeometry(1, 1, 32, 40))))
    assert not any("chunk" in use.variant.kernel.stem or "CLEARS_ROWS" in dict(use.variant.macros) for use in listed)


def test_uses_say_which_calls() -> None:
    (use, *_) = uses(LAYERS[0], ["gated_delta_state_fold"])
    assert (use.calls, use.types) == ("up to 4 rows, ring of 4", "float32")
    fwd = [use.calls for use in uses(LAYERS[0], ["gated_delta_recurrence_fwd"])]
    assert fwd[0] == "up to 4 sequences of 1 token"
    assert "96 sequences or more of 16 tokens or more, ring of 8 with pending records" in fwd


def test_a_layer_that_ops_refuse() -> None:
    with pytest.raises(gdn.GdnError, match="RING_LEN from 1 to 64"):
        list(uses(Layer(HeadGeometry(1, 1, 8, 8), ring_lens=(65,))))
    with pytest.raises(gdn.GdnError, match="decay_per_token"):
        list(uses(Layer(HeadGeometry(1, 1, 8, 8), gate_dtype="float16")))


@given(st.sets(st.integers(2, 5000)), st.integers(1, 5000))
def test_runs_of_a_step_function(thresholds: set[int], end: int) -> None:
    runs = step_runs(lambda number: sum(number >= threshold for threshold in thresholds), 1, end)
    edges = [1, *sorted(threshold for threshold in thresholds if threshold <= end), end + 1]
    expected = [(first, behind - 1, place) for place, (first, behind) in enumerate(pairwise(edges))]
    assert runs == expected
