"""A Gated DeltaNet layer on a backend, as a decode loop uses it: run plainly, or verified and then accepted."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn import ops
from gdn.testing.buffers import Array
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device
from gdn.testing.steps_cases import SPARE, LayerTokens, StepsArrays, StepsCase

ACTIVATION = "silu"


class Layer:
    """Weights and pools of a layer on a backend."""

    def __init__(self, case: StepsCase, backend: str, arrays: StepsArrays) -> None:
        """Copies of the weights and pools of `arrays`, and a ring of NaN."""
        self._device = Device(backend)
        put = self._device.put
        self._weight, self._rate, self._bias = put(arrays.conv_weight), put(arrays.A_log), put(arrays.dt_bias)
        self._windows, self._states = put(arrays.conv_state), put(arrays.recurrent_state)
        heads = case.heads
        ring_shape = (case.num_rows + SPARE, heads.num_key_heads, case.ring_len, heads.record_elements)
        self._ring = put(np.full(ring_shape, np.nan, np.float32))

    def windows(self) -> Array:
        """A copy of the windows of past inputs."""
        return self._device.get(self._windows)

    def states(self) -> Array:
        """A copy of the states."""
        return self._device.get(self._states)

    def run(self, tokens: LayerTokens) -> Array:
        """Run tokens plainly; returns their readout."""
        with on_backend(self._device.backend):
            return self._device.get(ops.gated_delta_recurrence_fwd(*self._call(tokens, write_state=True)))

    def verify(self, tokens: LayerTokens, ring_rows: Array) -> Array:
        """Read out a window and move nothing; returns the readout."""
        with on_backend(self._device.backend):
            call = (*self._call(tokens, write_state=False), self._ring, self._device.put(ring_rows))
            return self._device.get(ops.gated_delta_recurrence_verify_ring(*call))

    def accept(self, tokens: LayerTokens, ring_rows: Array, num_accepted: Array) -> None:
        """Move windows and states over the accepted tokens of the window that was verified last."""
        put = self._device.put
        counts = put(num_accepted.astype(tokens.slot_idx.dtype))
        slots, offsets = put(tokens.slot_idx), put(tokens.input_row_offsets)
        with on_backend(self._device.backend):
            ops.gated_delta_conv1d_commit(put(tokens.qkv), self._windows, slots, offsets, counts)
            ops.gated_delta_state_fold(self._states, slots[None], self._ring, put(ring_rows)[None], counts)

    def _call(self, tokens: LayerTokens, *, write_state: bool) -> tuple[Any, ...]:
        """Run the convolution and the gates; returns the six arguments of the recurrence."""
        put = self._device.put
        tables = put(tokens.slot_idx), put(tokens.input_row_offsets)
        qkv = ops.gated_delta_conv1d_fwd(
            put(tokens.qkv), self._weight, self._windows, *tables, activation=ACTIVATION, write_state=write_state
        )
        decay, beta = ops.gated_delta_gates(put(tokens.a), put(tokens.b), self._rate, self._bias, allow_neg_eigval=True)
        return qkv, decay, beta, self._states, *tables
