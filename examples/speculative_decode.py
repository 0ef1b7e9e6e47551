"""Speculative decoding of a toy model: drafts, a verify in every layer, an acceptance, one fold for all layers.

    python examples/speculative_decode.py          # NumPy arrays
    python examples/speculative_decode.py --cupy   # CuPy arrays, on a GPU

A layer of the toy takes tokens to tokens: each token looks up its queries, keys, values and gates, and the largest
channel of its readout is the token that goes on. What follows a token is guessed from what followed it last time. In
the end the tokens and the states are those of plain decoding, to the last bit.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

import gdn.ops

LAYERS, BATCH, VOCABULARY, ROUNDS = 3, 4, 64, 40
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 32, 32
WINDOW = 4  # tokens of a verify: the last one of the text and three drafts


def main(xp: Any) -> None:
    """Decode with `xp`, NumPy or CuPy."""
    random = np.random.default_rng(0)
    channels = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    qkv = xp.asarray(random.standard_normal((LAYERS, VOCABULARY, channels)).astype(np.float32))
    decay = xp.asarray(random.uniform(0.8, 1, (LAYERS, VOCABULARY, VALUE_HEADS)).astype(np.float32))
    beta = xp.asarray(random.uniform(0, 1, (LAYERS, VOCABULARY, VALUE_HEADS)).astype(np.float32))

    def following(op: Any, tokens: Any, slots: Any, pool: Any, *ring_and_rows: Any) -> Any:
        """What follows each of `tokens`, [BATCH, length], by all layers of the model."""
        offsets = xp.arange(BATCH + 1, dtype=xp.uint32) * xp.uint32(tokens.shape[1])
        flat = xp.asarray(tokens).ravel()
        for layer in range(LAYERS):
            token_arrays = (array[layer][flat] for array in (qkv, decay, beta))
            ring = [ring_and_rows[0], ring_and_rows[1][layer]] if ring_and_rows else []
            flat = op(*token_arrays, pool, slots[layer], offsets, *ring).argmax(axis=1)
        return np.array(flat.tolist()).reshape(tokens.shape)

    # One pool and one ring for all layers; each layer and sequence has a slot and a ring row.
    slots = xp.arange(LAYERS * BATCH, dtype=xp.uint32).reshape(LAYERS, BATCH)
    ring_rows = slots[::-1].copy()
    pool = xp.zeros((LAYERS * BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM), xp.float32)
    record_stride = gdn.ops.gated_delta_ring_record_elements(KEY_DIM, VALUE_DIM, VALUE_HEADS // KEY_HEADS)
    ring = xp.empty((LAYERS * BATCH, KEY_HEADS, WINDOW, -(-record_stride // 8) * 8), xp.float32)

    texts, guess = [[row] for row in range(BATCH)], np.zeros((BATCH, VOCABULARY), np.int64)
    for _ in range(ROUNDS):
        window = np.zeros((BATCH, WINDOW), np.int64)
        window[:, 0] = [text[-1] for text in texts]
        for place in range(1, WINDOW):
            window[:, place] = guess[range(BATCH), window[:, place - 1]]
        verified = following(gdn.ops.gated_delta_recurrence_verify_ring, window, slots, pool, ring, ring_rows)
        # The first token of a window is no draft; a draft is right if it is what followed the token before it.
        is_right = window[:, 1:] == verified[:, :-1]
        num_accepted = 1 + np.cumprod(is_right, axis=1).sum(axis=1)
        gdn.ops.gated_delta_state_fold(pool, slots, ring, ring_rows, xp.asarray(num_accepted.astype(np.uint32)))
        for row, count in enumerate(num_accepted):
            texts[row] += verified[row, :count].tolist()
            guess[row, window[row, :count]] = verified[row, :count]

    # The same texts decoded plainly, a token a call; a sequence that has come to its end is padding.
    lengths, plain_pool = np.array([len(text) - 1 for text in texts]), xp.zeros_like(pool)
    for step in range(lengths.max()):
        running = xp.where(xp.asarray(step < lengths), slots, xp.uint32(gdn.PAD_SLOT))
        tokens = np.array([[text[min(step, len(text) - 1)]] for text in texts])
        plain = following(gdn.ops.gated_delta_recurrence_fwd, tokens, running, plain_pool)
        for row in np.flatnonzero(step < lengths):
            assert texts[row][step + 1] == plain[row, 0], "another token than plain decoding"
    assert bool((pool == plain_pool).all()), "other states than plain decoding"
    print(f"{lengths.sum()} tokens in {ROUNDS} rounds of {BATCH} sequences, tokens and states of plain decoding")


if __name__ == "__main__":
    if "--cupy" in sys.argv[1:]:
        import cupy

        main(cupy)
    else:
        main(np)
