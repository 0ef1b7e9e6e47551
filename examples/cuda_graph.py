"""Decode with one CUDA graph a step: bound calls of all layers are captured once and replayed for every token.

    python examples/cuda_graph.py          # NumPy arrays: no graphs, the bound calls themselves
    python examples/cuda_graph.py --cupy   # CuPy arrays, on a GPU

The arrays stay where they are; their values change between replays, slots included: a sequence ends on the way and its
row becomes padding. In the end readouts and states are those of plain calls, to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

import gdn.ops

LAYERS, BATCH, STEPS = 4, 3, 16
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 32, 32
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM


def main(xp: Any) -> None:
    """Decode with `xp`, NumPy or CuPy."""
    random = np.random.default_rng(0)
    # What a model would compute: the tokens of every step, for all layers.
    tokens = [
        (
            xp.asarray(random.standard_normal((LAYERS, BATCH, CHANNELS)).astype(np.float32)),
            xp.asarray(random.uniform(0.8, 1, (LAYERS, BATCH, VALUE_HEADS)).astype(np.float32)),
            xp.asarray(random.uniform(0, 1, (LAYERS, BATCH, VALUE_HEADS)).astype(np.float32)),
        )
        for _ in range(STEPS)
    ]
    slots = xp.arange(LAYERS * BATCH, dtype=xp.uint32).reshape(LAYERS, BATCH)
    offsets = xp.arange(BATCH + 1, dtype=xp.uint32)  # a token a sequence
    pool = xp.zeros((LAYERS * BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM), xp.float32)
    plain_slots, plain_pool = slots.copy(), pool.copy()

    # The arrays that a graph works on, and a bound call for each layer. Binding compiles, so that a capture needs no
    # call before it.
    qkv, decay, beta = (xp.empty_like(array) for array in tokens[0])
    out = xp.empty((LAYERS, BATCH, VALUE_HEADS * VALUE_DIM), xp.float32)
    layers = [
        gdn.ops.bind(
            gdn.ops.gated_delta_recurrence_fwd,
            *(qkv[layer], decay[layer], beta[layer], pool, slots[layer], offsets),
            out=out[layer],
        )
        for layer in range(LAYERS)
    ]
    step = captured(xp, layers)

    for number, values in enumerate(tokens):
        if number == STEPS // 2:  # the first sequence has come to its end
            slots[:, 0] = plain_slots[:, 0] = gdn.PAD_SLOT
        for array, value in zip((qkv, decay, beta), values, strict=True):
            array[...] = value
        step()
        for layer in range(LAYERS):
            arguments = (*(value[layer] for value in values), plain_pool, plain_slots[layer], offsets)
            plain = gdn.ops.gated_delta_recurrence_fwd(*arguments)
            assert bool((out[layer] == plain).all()), "another readout than a plain call"
    assert bool((pool == plain_pool).all()), "other states than plain calls"
    how = "one by one" if xp is np else "as one graph"
    print(f"{STEPS} steps of {LAYERS} layers {how}, readouts and states of plain calls")


def captured(xp: Any, calls: list[Any]) -> Callable[[], object]:
    """What runs the calls in order: with CuPy a graph of them, on CuPy's current stream."""
    if xp is np:
        return lambda: [call() for call in calls]
    stream = xp.cuda.Stream(non_blocking=True)  # only another stream than the default one can capture
    with stream:
        stream.begin_capture()
        for call in calls:
            call()
        graph = stream.end_capture()
    return lambda: graph.launch(xp.cuda.get_current_stream())


if __name__ == "__main__":
    if "--cupy" in sys.argv[1:]:
        import cupy

        main(cupy)
    else:
        main(np)
