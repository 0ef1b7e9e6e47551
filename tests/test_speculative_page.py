"""The Python of docs/speculative.md runs as it stands and does what the text says; its picture is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import gdn.ops
import gdn.speculative
from gdn.testing.buffers import Array

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "speculative.md").read_text(encoding="utf-8")
CAPACITY = 64


def names_of_the_page(change: Callable[[str], str] = str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(change(block), "speculative.md", "exec"), names)
    return names


class Streams:
    """What each sequence of the page's batch decodes in each layer, and how far it has come."""

    def __init__(self, names: dict[str, Any]) -> None:
        random = np.random.default_rng(0)
        self.names = names
        self.num_layers, self.batch_size = names["num_layers"], names["batch_size"]
        shape, heads = (self.num_layers, self.batch_size, CAPACITY), names["num_value_heads"]
        channels = 2 * names["num_key_heads"] * names["key_head_dim"] + heads * names["value_head_dim"]
        self.tokens = (
            random.standard_normal((*shape, channels), dtype=np.float32),
            random.uniform(0.9, 1, (*shape, heads)).astype(np.float32),
            random.uniform(0, 1, (*shape, heads)).astype(np.float32),
        )
        self.position = np.zeros(self.batch_size, np.int64)

    def piece(self, layer: int, lengths: Sequence[int]) -> tuple[Array, ...]:
        """The next tokens of all sequences."""
        pieces = [(b, slice(start, start + n)) for b, (start, n) in enumerate(zip(self.position, lengths, strict=True))]
        return tuple(np.concatenate([array[layer, b][rows] for b, rows in pieces]) for array in self.tokens)

    def layers(self, lengths: Sequence[int]) -> list[Callable[[Any], tuple[Array, ...]]]:
        def inputs(layer: int) -> Callable[[Any], tuple[Array, ...]]:
            return lambda _: self.piece(layer, lengths)

        return [inputs(layer) for layer in range(self.num_layers)]

    def plain(self) -> tuple[Array, list[Array]]:
        """Pool and last layer's readouts of plain decoding up to where each sequence is, a token a call."""
        slots, pool = self.names["slots"], np.zeros_like(self.names["pool"])
        readouts = []
        for b, length in enumerate(self.position):
            for layer in range(self.num_layers):
                outs = [
                    gdn.ops.gated_delta_recurrence_fwd(
                        *(array[layer, b, t : t + 1] for array in self.tokens),
                        pool,
                        slots[layer, b : b + 1],
                        np.array([0, 1], np.uint32),
                    )
                    for t in range(length)
                ]
            readouts.append(np.concatenate(outs))
        return pool, readouts


@pytest.mark.parametrize("lazy", [True, False])
def test_steps_end_in_the_bits_of_plain_decoding(lazy: bool) -> None:
    names = names_of_the_page(lambda block: block.replace("lazy=True", f"lazy={lazy}"))
    streams, windows = Streams(names), names["windows"]
    readouts: list[list[Array]] = [[] for _ in range(streams.batch_size)]
    writes = 0
    # The third window of the third sequence is longer than the ring; the second sequence rests once.
    for lengths, accepted in (
        ([4, 4, 4], [3, 1, 4]),
        ([4, 4, 4], [2, 4, 1]),
        ([4, 0, 20], [4, 0, 20]),
        ([4, 4, 4], [1, 1, 1]),
        ([2, 4, 4], [0, 2, 4]),
        ([4, 4, 4], [4, 4, 4]),
        ([4, 4, 4], [4, 4, 4]),
    ):
        before, offsets = names["pool"].copy(), np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
        out = names["step"](offsets, streams.layers(lengths), lambda _, n=accepted: np.array(n, np.uint32))
        for b, count in enumerate(accepted):
            readouts[b].append(out[offsets[b] : offsets[b] + count])
        streams.position += accepted
        writes += not np.array_equal(before[names["slots"][:, 0]], names["pool"][names["slots"][:, 0]])
    assert writes == (1 if lazy else 5)
    plain_pool, plain_readouts = streams.plain()
    for sequence, plain in zip(readouts, plain_readouts, strict=True):
        np.testing.assert_array_equal(np.concatenate(sequence), plain)

    # A forward call takes along what is pending, as the page says.
    folded, empty = names["pool"].copy(), np.zeros(streams.batch_size + 1, np.uint32)
    for layer in range(streams.num_layers):
        gdn.ops.gated_delta_recurrence_fwd(
            *streams.piece(layer, [0, 0, 0]),
            folded,
            names["slots"][layer],
            empty,
            ring=names["ring"],
            pending_ring_slot_idx=windows.ring_slot_idx[layer],
            num_pending=windows.num_pending,
        )
    np.testing.assert_array_equal(folded, plain_pool)
    assert not np.array_equal(names["pool"], plain_pool)
    windows.fold(names["pool"], names["slots"], names["ring"])
    np.testing.assert_array_equal(names["pool"], plain_pool)
    windows.reset(np.ones(streams.batch_size, np.bool_))
    assert windows.num_pending.tolist() == [0, 0, 0]


def test_lazy_plain_decoding_writes_once_in_ring_len_steps() -> None:
    names = names_of_the_page()
    streams, writes = Streams(names), []
    for step in range(40):
        before = names["pool"].copy()
        names["decode"](streams.layers([1, 1, 1]))
        streams.position += 1
        if not np.array_equal(before, names["pool"]):
            writes.append(step)
    assert writes == [16, 32]
    names["windows"].fold(names["pool"], names["slots"], names["ring"])
    np.testing.assert_array_equal(names["pool"], streams.plain()[0])


@pytest.mark.parametrize(("window", "accepted", "ring_len"), [(4, 3, 16), (4, 4, 16), (4, 1, 8), (4, 2, 4), (1, 1, 8)])
def test_steps_between_two_writes_are_as_many_as_the_page_says(window: int, accepted: int, ring_len: int) -> None:
    """Counted on the tables alone, with how many records are read in the mean."""
    assert "n = floor((R - T) / a) + 1\n" in PAGE
    windows = gdn.speculative.PendingWindows(np.array([[[0]], [[1]]], np.uint32), ring_len, lazy=True)
    read, folds = [], []
    for step in range(1, 40):
        windows.begin(np.array([0, window], np.uint32))
        read.append(int(windows.num_pending[0]))
        if windows.ring_slot_idx[0, 0] != windows.pending_ring_slot_idx[0, 0]:
            folds.append(step)
        windows.accept(np.array([accepted], np.uint32))
    num_steps = (ring_len - window) // accepted + 1
    assert set(np.diff(folds)) == {num_steps}
    period = read[folds[0] : folds[1]]
    assert (np.mean(period), max(period)) == (accepted * (num_steps + 1) / 2, num_steps * accepted)


def test_links_lead_somewhere_and_the_picture_is_one() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE)
    assert "speculative.svg" in links
    assert [link for link in links if not (DOCS / link).exists()] == []
    assert ElementTree.parse(DOCS / "speculative.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"
