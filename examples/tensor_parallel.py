"""Tensor parallelism: the heads of a layer shared out over GPUs, and no GPU ever needs what another one has.

    python examples/tensor_parallel.py                      # NumPy arrays, four shards one after the other
    python examples/tensor_parallel.py --cupy               # CuPy arrays, a shard on every GPU
    python examples/tensor_parallel.py --cupy --shards 8 --model qwen3.5-27b

A shard has some of the key heads, with all value heads that read them: their columns of the projections, their gates
and their part of every state. Where there are fewer GPUs than shards, they take turns. A ragged batch of prompts is
read, then tokens follow one by one; in the end readouts and states are those of the whole layer on one device, to the
last bit.
"""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np

import gdn.ops
from gdn.geometry import HeadGeometry
from gdn.models import MODELS, model_geometry

PROMPTS, STEPS = (5, 2, 9), 8


class Shard:
    """Some heads of a layer and their part of the states, on one device."""

    def __init__(self, xp: Any, device: int, heads: HeadGeometry, number: int, num_shards: int) -> None:
        self.xp, self.device = xp, device
        keys, values = heads.num_key_heads // num_shards, heads.num_value_heads // num_shards
        self.value_heads = slice(number * values, (number + 1) * values)
        # A token's channels are all its queries, then its keys, then its values: a shard has columns of each.
        widths = keys * heads.key_head_dim, keys * heads.key_head_dim, values * heads.value_head_dim
        starts = 0, heads.key_dim, 2 * heads.key_dim
        self.channels = np.concatenate(
            [np.arange(width) + start + number * width for start, width in zip(starts, widths, strict=True)]
        )
        own = replace(heads, num_key_heads=keys, num_value_heads=values)
        with self.on_device():
            self.slots = xp.arange(len(PROMPTS), dtype=xp.uint32)
            shape = (len(PROMPTS), own.num_value_heads, own.key_head_dim, own.value_head_dim)
            self.pool = xp.zeros(shape, xp.float32)

    def on_device(self) -> AbstractContextManager[Any]:
        """Arrays made in here are made on the shard's device."""
        return nullcontext() if self.xp is np else self.xp.cuda.Device(self.device)

    def forward(self, qkv: Any, decay: Any, beta: Any, offsets: Any) -> Any:
        """Its part of the readout, on its device. A model would make no more than these columns in the first place."""
        own = qkv[:, self.channels], decay[:, self.value_heads], beta[:, self.value_heads]
        with self.on_device():
            arrays = [self.xp.asarray(array) for array in own]
            return gdn.ops.gated_delta_recurrence_fwd(*arrays, self.pool, self.slots, self.xp.asarray(offsets))

    def get(self, array: Any) -> Any:
        """The values of one of its arrays on the CPU."""
        with self.on_device():
            return np.asarray(array if self.xp is np else array.get())


def decode(shards: list[Shard], calls: list[tuple[Any, ...]]) -> tuple[list[Any], Any]:
    """The readouts of all calls and the states in the end, with the heads of all shards side by side."""
    readouts = []
    for call in calls:
        parts = [shard.forward(*call) for shard in shards]  # on GPUs nothing waits in here, so that all are at work
        readouts.append(np.concatenate([shard.get(part) for shard, part in zip(shards, parts, strict=True)], axis=1))
    return readouts, np.concatenate([shard.get(shard.pool) for shard in shards], axis=1)


def decode_whole(xp: Any, heads: HeadGeometry, calls: list[tuple[Any, ...]]) -> tuple[list[Any], Any]:
    """The same of the whole layer, on one device."""
    slots = xp.arange(len(PROMPTS), dtype=xp.uint32)
    pool = xp.zeros((len(PROMPTS), heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), xp.float32)
    readouts = []
    for call in calls:
        *inputs, offsets = map(xp.asarray, call)
        readouts.append(gdn.ops.gated_delta_recurrence_fwd(*inputs, pool, slots, offsets))
    return readouts, pool


def tokens(heads: HeadGeometry) -> list[tuple[Any, ...]]:
    """What a model would compute for the prompts, and for a token of each sequence in every step that follows."""
    random = np.random.default_rng(0)
    calls = []
    for lengths in (PROMPTS, *[(1,) * len(PROMPTS)] * STEPS):
        shape = sum(lengths), heads.num_value_heads
        calls.append(
            (
                random.standard_normal((shape[0], heads.conv_dim)).astype(np.float32),
                random.uniform(0.8, 1, shape).astype(np.float32),
                random.uniform(0, 1, shape).astype(np.float32),
                np.cumsum([0, *lengths]).astype(np.uint32),
            )
        )
    return calls


def main(xp: Any, model: str, num_shards: int, num_devices: int) -> None:
    """Decode with `xp`, NumPy or CuPy, in shards and whole."""
    heads = model_geometry(model)
    calls = tokens(heads)
    shards = [Shard(xp, number % num_devices, heads, number, num_shards) for number in range(num_shards)]
    readouts, states = decode(shards, calls)
    whole_readouts, whole_states = decode_whole(xp, heads, calls)
    for readout, whole in zip(readouts, whole_readouts, strict=True):
        assert readout.tobytes() == whole.tobytes(), "another readout than on one device"
    assert states.tobytes() == whole_states.tobytes(), "other states than on one device"
    where = "the CPU" if xp is np else f"{len({shard.device for shard in shards})} of {num_devices} GPUs"
    print(
        f"{model}: {heads.num_key_heads} key and {heads.num_value_heads} value heads in {num_shards} shards on {where},"
        f" {sum(PROMPTS)} tokens of prompts and {STEPS} steps, readouts and states of one device"
    )


def parse() -> tuple[Any, str, int, int]:
    """The arguments of `main`, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cupy", action="store_true", help="CuPy arrays, on GPUs, instead of NumPy arrays")
    parser.add_argument("--shards", type=int, help="parts of the layer; as many as GPUs and heads allow if not given")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen3-next-80b-a3b", help="whose heads")
    given = parser.parse_args()
    if given.cupy:
        import cupy as xp

        num_devices = xp.cuda.runtime.getDeviceCount()
    else:
        xp, num_devices = np, 4
    num_key_heads = model_geometry(given.model).num_key_heads
    most = max(shards for shards in range(1, num_devices + 1) if num_key_heads % shards == 0)
    num_shards = most if given.shards is None else given.shards
    if num_shards < 1 or num_key_heads % num_shards:
        parser.error(
            f"--shards: expected a divisor of the {num_key_heads} key heads of {given.model}, got {num_shards}"
        )
    return xp, given.model, num_shards, num_devices


if __name__ == "__main__":
    main(*parse())
