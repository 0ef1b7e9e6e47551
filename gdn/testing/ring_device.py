"""Runs the speculative ops on a backend with arrays that stay where the backend wants them between calls."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gdn import ops
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays
from gdn.testing.execute import on_backend


class PendingTables(NamedTuple):
    """Where each row's pending records lie, and how many they are."""

    ring_rows: Array
    counts: Array


class Device:
    """A backend and its memory."""

    def __init__(self, backend: str) -> None:
        """`backend` is "cuda", "host" or "numpy"."""
        self.backend = backend

    def put(self, array: Array) -> Any:
        """A copy of an array on the backend's side."""
        if self.backend == "cuda":
            import cupy

            return cupy.asarray(array)
        return array.copy()

    def get(self, array: Any) -> Array:
        """A copy of an array on this side."""
        result: Array = array.get() if self.backend == "cuda" else array.copy()
        return result

    def bytes_in_use(self) -> dict[str, int]:
        """Memory that this process holds, where the system tells, and for a GPU what CuPy's pool has given out."""
        used = {}
        statm = Path("/proc/self/statm")
        if statm.exists():
            used["resident"] = int(statm.read_text().split()[1]) * mmap.PAGESIZE
        if self.backend == "cuda":
            import cupy

            used["cupy pool"] = cupy.get_default_memory_pool().used_bytes()
        return used

    def forward(
        self, window: RecurrenceArrays, pool: Any, ring: Any = None, pending: PendingTables | None = None
    ) -> Array:
        """Run a window plainly on a pool of the backend's, after what is pending in `ring`; returns the readout."""
        given = {} if pending is None else {"ring": ring, **self._put_tables(pending)}
        return self._with_readout(ops.gated_delta_recurrence_fwd, window, pool, **given)

    def verify(
        self, window: RecurrenceArrays, ring_rows: Array, pool: Any, ring: Any, pending: PendingTables | None = None
    ) -> Array:
        """Verify a window on a pool and a ring of the backend's, after what is pending there; returns the readout."""
        given = {} if pending is None else self._put_tables(pending)
        return self._with_readout(
            ops.gated_delta_recurrence_verify_ring, window, pool, ring, self.put(ring_rows), **given
        )

    def fold(self, pool: Any, row_ids: Array, ring: Any, ring_row_ids: Array, num_accepted: Array) -> None:
        """Fold on a pool and a ring of the backend's."""
        with on_backend(self.backend):
            ops.gated_delta_state_fold(pool, self.put(row_ids), ring, self.put(ring_row_ids), self.put(num_accepted))

    def _put_tables(self, pending: PendingTables) -> dict[str, Any]:
        """The tables of pending records by the names of their arguments."""
        return {"pending_ring_slot_idx": self.put(pending.ring_rows), "num_pending": self.put(pending.counts)}

    def _with_readout(
        self, op: Callable[..., Any], window: RecurrenceArrays, pool: Any, *more: Any, **given: Any
    ) -> Array:
        """Call with the window on `pool`, and a NaN-filled `out` of the work type."""
        value_dim = window.recurrent_state.shape[1] * window.recurrent_state.shape[3]
        out = self.put(np.full((len(window.qkv_conv_output), value_dim), np.nan, window.qkv_conv_output.dtype))
        with on_backend(self.backend):
            op(
                self.put(window.qkv_conv_output),
                self.put(window.decay_per_token),
                self.put(window.beta_per_token),
                pool,
                self.put(window.slot_idx),
                self.put(window.input_row_offsets),
                *more,
                **given,
                out=out,
            )
        return self.get(out)
