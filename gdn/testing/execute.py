"""Running a recurrence call on a backend so that every byte it could touch is seen afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gdn import ops, use_backend
from gdn.arrays import DTYPES
from gdn.testing.buffers import Array, Buffer, lay_out
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase
from gdn.testing.compare import Comparison, same_bytes

ARGUMENTS = (
    "qkv_conv_output",
    "decay_per_token",
    "beta_per_token",
    "recurrent_state",
    "slot_idx",
    "input_row_offsets",
)


@dataclass(frozen=True, slots=True)
class Layouts:
    """How the arrays of a call lie in memory."""

    qkv: str = "dense"
    gate: str = "dense"
    state: str = "dense"
    index: str = "dense"
    out: str = "dense"

    @classmethod
    def of(cls, case: RecurrenceCase) -> Layouts:
        """The layouts a case asks for."""
        return cls(case.qkv_layout, case.gate_layout, case.state_layout, case.index_layout, case.out_layout)

    def by_argument(self) -> tuple[str, ...]:
        """One layout per argument, in the order of the call."""
        return self.qkv, self.gate, self.gate, self.state, self.index, self.index


DENSE = Layouts()


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call left: dense copies of its results, and whether it kept its hands off everything else."""

    out: Array
    recurrent_state: Array
    kept: tuple[Comparison, ...] = field(repr=False)


@contextmanager
def on_backend(name: str) -> Iterator[None]:
    """Calls on NumPy arrays run on `name`; for "cuda" nothing needs to be chosen."""
    if name == "cuda":
        yield
    else:
        with use_backend(name):
            yield


def execute(
    backend: str,
    arrays: RecurrenceArrays,
    out_dtype: str,
    layouts: Layouts = DENSE,
    call: Callable[..., Any] | None = None,
) -> Outcome:
    """Run `gated_delta_recurrence_fwd`, or another `call`, on copies of `arrays` with a NaN-filled `out`."""
    buffers = [
        lay_out(values, layout, filler=7)
        for values, layout in zip(arrays.as_tuple(), layouts.by_argument(), strict=True)
    ]
    out_shape = ops.gated_delta_recurrence_fwd_shape(*(buffer.array for buffer in buffers))
    out = lay_out(np.full(out_shape, np.nan, DTYPES[out_dtype]), layouts.out, filler=7)
    before = [buffer.copy() for buffer in (*buffers, out)]
    with on_backend(backend):
        run = _run_on_gpu if backend == "cuda" else _run_in_place
        after = run(call or ops.gated_delta_recurrence_fwd, buffers, out)
    kept = tuple(_kept(name, old, new) for name, old, new in zip((*ARGUMENTS, "out"), before, after, strict=True))
    return Outcome(after[-1].array.copy(), after[ARGUMENTS.index("recurrent_state")].array.copy(), kept)


def _run_in_place(call: Callable[..., Any], buffers: list[Buffer], out: Buffer) -> list[Buffer]:
    call(*(buffer.array for buffer in buffers), out=out.array)
    return [*buffers, out]


def _run_on_gpu(call: Callable[..., Any], buffers: list[Buffer], out: Buffer) -> list[Buffer]:
    memories, on_gpu = zip(*(buffer.on_gpu() for buffer in (*buffers, out)), strict=True)
    call(*on_gpu[:-1], out=on_gpu[-1])
    return [replace(buffer, memory=memory.get()) for memory, buffer in zip(memories, (*buffers, out), strict=True)]


def _kept(name: str, before: Buffer, after: Buffer) -> Comparison:
    """Inputs keep every byte; the two written arrays keep the memory between and around their elements."""
    if name in ("recurrent_state", "out"):
        after = after.copy()
        after.array[...] = before.array
        name = f"memory around {name}"
    return same_bytes(after.memory, before.memory, name)
