"""Running an op on a backend so that every byte it could touch is seen afterwards, whatever its arguments are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from gdn.testing.buffers import Array, Buffer, lay_out
from gdn.testing.compare import Comparison, same_bytes
from gdn.testing.execute import on_backend


def run_watched(
    backend: str,
    call: Callable[..., Any],
    arrays: Mapping[str, Array],
    written: Collection[str],
    layouts: Mapping[str, str],
) -> tuple[dict[str, Array], tuple[Comparison, ...]]:
    """Give copies of `arrays` to `call` by name; returns dense copies of the written ones, and what was kept.

    The arrays lie as `layouts` says, densely where it says nothing. All others must keep every byte, the written ones
    the memory between and around their elements.
    """
    before = {name: lay_out(values, layouts.get(name, "dense"), filler=7) for name, values in arrays.items()}
    with on_backend(backend):
        after = _run(backend, call, before)
    kept = tuple(_kept(name, before[name], after[name], name in written) for name in arrays)
    return {name: after[name].array.copy() for name in written}, tuple(c for c in kept if c.measure != "empty")


def _run(backend: str, call: Callable[..., Any], buffers: Mapping[str, Buffer]) -> dict[str, Buffer]:
    if backend == "cuda":
        on_gpu = {name: buffer.on_gpu() for name, buffer in buffers.items()}
        call(**{name: view for name, (_, view) in on_gpu.items()})
        return {name: replace(buffers[name], memory=memory.get()) for name, (memory, _) in on_gpu.items()}
    copies = {name: buffer.copy() for name, buffer in buffers.items()}
    call(**{name: buffer.array for name, buffer in copies.items()})
    return copies


def _kept(name: str, before: Buffer, after: Buffer, is_written: bool) -> Comparison:
    if is_written:
        after = after.copy()
        after.array[...] = before.array
        name = f"memory around {name}"
    return same_bytes(after.memory, before.memory, name)
