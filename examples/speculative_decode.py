"""Speculative decoding of a toy model in three forms: drafts, a verify in every layer, an acceptance, and folds.

    python examples/speculative_decode.py          # NumPy arrays
    python examples/speculative_decode.py --cupy   # CuPy arrays, on a GPU

* separate: after the acceptance one fold advances the states of all layers.
* fused: each verify first folds what the step before left.
* lazy: accepted records stay pending until the ring is full; only then a verify folds them.

A layer of the toy takes tokens to tokens: each token looks up its queries, keys, values and gates, and the largest
channel of its readout is the token that goes on. What follows a token is guessed from what followed it last time. In
the end the tokens and the states of each form are those of plain decoding, to the last bit. docs/speculative.md says
more about the forms.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gdn.ops
from gdn.speculative import PendingWindows

LAYERS, BATCH, VOCABULARY, ROUNDS = 3, 4, 64, 40
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 32, 32
WINDOW = 4  # tokens of a verify: the last one of the text and three drafts
RING_LEN = {"separate": WINDOW, "fused": WINDOW, "lazy": 16}


class Toy:
    """The model and the slots of its states: one pool for all layers, a slot for each layer and sequence."""

    def __init__(self, xp: Any) -> None:
        self.xp, random = xp, np.random.default_rng(0)
        channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
        self.qkv = xp.asarray(random.standard_normal((LAYERS, VOCABULARY, channels)).astype(np.float32))
        self.decay = xp.asarray(random.uniform(0.8, 1, (LAYERS, VOCABULARY, VALUE_HEADS)).astype(np.float32))
        self.beta = xp.asarray(random.uniform(0, 1, (LAYERS, VOCABULARY, VALUE_HEADS)).astype(np.float32))
        self.slots = xp.arange(LAYERS * BATCH, dtype=xp.uint32).reshape(LAYERS, BATCH)

    def new_pool(self) -> Any:
        """States of sequences that begin."""
        return self.xp.zeros((LAYERS * BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM), self.xp.float32)

    def following(self, tokens: Any, run_layer: Callable[..., Any]) -> Any:
        """What follows each of `tokens`, [BATCH, length]; run_layer(layer, qkv, decay, beta) gives the readout."""
        flat = self.xp.asarray(tokens).ravel()
        for layer in range(LAYERS):
            inputs = (array[layer][flat] for array in (self.qkv, self.decay, self.beta))
            flat = run_layer(layer, *inputs).argmax(axis=1)
        return np.array(flat.tolist()).reshape(tokens.shape)


def decode(model: Toy, form: str) -> tuple[list[list[int]], Any]:
    """The texts of all sequences, and the pool with their states."""
    xp, slots, pool = model.xp, model.slots, model.new_pool()
    offsets = xp.arange(BATCH + 1, dtype=xp.uint32) * xp.uint32(WINDOW)

    # Each layer and sequence has two ring rows; the separate form needs the first of them only.
    ring_rows = xp.arange(2 * LAYERS * BATCH, dtype=xp.uint32).reshape(2, LAYERS, BATCH)
    record_stride = gdn.ops.gated_delta_ring_record_elements(KEY_DIM, VALUE_DIM, VALUE_HEADS // KEY_HEADS)
    ring = xp.empty((2 * LAYERS * BATCH, KEY_HEADS, RING_LEN[form], -(-record_stride // 8) * 8), xp.float32)
    windows = PendingWindows(ring_rows, RING_LEN[form], lazy=form == "lazy")

    def verify(layer: int, *inputs: Any) -> Any:
        arguments = *inputs, pool, slots[layer], offsets, ring
        if form == "separate":
            return gdn.ops.gated_delta_recurrence_verify_ring(*arguments, ring_rows[0, layer])
        return gdn.ops.gated_delta_recurrence_verify_ring(
            *arguments,
            windows.ring_slot_idx[layer],
            pending_ring_slot_idx=windows.pending_ring_slot_idx[layer],
            num_pending=windows.num_pending,
        )

    texts, guess = [[row] for row in range(BATCH)], np.zeros((BATCH, VOCABULARY), np.int64)
    for _ in range(ROUNDS):
        window = np.zeros((BATCH, WINDOW), np.int64)
        window[:, 0] = [text[-1] for text in texts]
        for place in range(1, WINDOW):
            window[:, place] = guess[range(BATCH), window[:, place - 1]]

        if form != "separate":
            windows.begin(offsets)
        verified = model.following(window, verify)
        # The first token of a window is no draft; a draft is right if it is what followed the token before it.
        is_right = window[:, 1:] == verified[:, :-1]
        num_accepted = 1 + np.cumprod(is_right, axis=1).sum(axis=1)
        counts = xp.asarray(num_accepted.astype(np.uint32))
        if form == "separate":
            gdn.ops.gated_delta_state_fold(pool, slots, ring, ring_rows[0], counts)
        else:
            windows.accept(counts)

        for row, count in enumerate(num_accepted):
            texts[row] += verified[row, :count].tolist()
            guess[row, window[row, :count]] = verified[row, :count]
    if form != "separate":
        windows.fold(pool, slots, ring)  # what is still pending
    return texts, pool


def compare_with_plain_decoding(model: Toy, texts: list[list[int]], pool: Any) -> None:
    """Decode the same texts a token a call; a sequence that has come to its end is padding."""
    xp, plain_pool = model.xp, model.new_pool()
    offsets = xp.arange(BATCH + 1, dtype=xp.uint32)
    lengths = np.array([len(text) - 1 for text in texts])
    for step in range(lengths.max()):
        running = xp.where(xp.asarray(step < lengths), model.slots, xp.uint32(gdn.PAD_SLOT))

        def forward(layer: int, *inputs: Any, running: Any = running) -> Any:
            return gdn.ops.gated_delta_recurrence_fwd(*inputs, plain_pool, running[layer], offsets)

        plain = model.following(np.array([[text[min(step, len(text) - 1)]] for text in texts]), forward)
        for row in np.flatnonzero(step < lengths):
            assert texts[row][step + 1] == plain[row, 0], "another token than plain decoding"
    assert bool((pool == plain_pool).all()), "other states than plain decoding"


def main(xp: Any) -> None:
    """Decode with `xp`, NumPy or CuPy."""
    model = Toy(xp)
    for form in RING_LEN:
        texts, pool = decode(model, form)
        compare_with_plain_decoding(model, texts, pool)
        num_tokens = sum(len(text) - 1 for text in texts)
        print(
            f"{form}: {num_tokens} tokens in {ROUNDS} rounds of {BATCH} sequences, tokens and states of plain decoding"
        )


if __name__ == "__main__":
    if "--cupy" in sys.argv[1:]:
        import cupy

        main(cupy)
    else:
        main(np)
