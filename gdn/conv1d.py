"""Arguments of the convolution and of its commit: their rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gdn.arrays import Argument
from gdn.check import (
    require_disjoint,
    require_distinct_elements,
    require_float,
    require_index,
    require_ndim,
    require_one_place,
    require_shape,
    require_writable,
)
from gdn.errors import GdnError, LayoutError, ShapeError, rejection
from gdn.recurrence import require_count

#: Taps of a filter; a compile-time constant of the kernels.
MIN_CONV_WIDTH, MAX_CONV_WIDTH = 2, 8

Take = Callable[[str, Any], Argument]


@dataclass(frozen=True, slots=True)
class Conv1dBatch:
    """What the convolution and its commit share: the tokens of a ragged batch, and the windows before them."""

    qkv: Argument
    conv_state: Argument
    slot_idx: Argument
    input_row_offsets: Argument

    @property
    def batch_size(self) -> int:
        """Sequences of the ragged batch, padding rows included."""
        return self.slot_idx.shape[0]

    @property
    def total_seq_len(self) -> int:
        """Token rows over all sequences, uncovered rows included."""
        return self.qkv.shape[0]

    @property
    def conv_dim(self) -> int:
        """Channels of a token."""
        return self.qkv.shape[1]

    @property
    def conv_width(self) -> int:
        """Taps of the filter."""
        return self.conv_state.shape[2] + 1

    @property
    def max_slots(self) -> int:
        """Slots of the pool."""
        return self.conv_state.shape[0]

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All four."""
        return self.qkv, self.conv_state, self.slot_idx, self.input_row_offsets


@dataclass(frozen=True, slots=True)
class Conv1dInputs:
    """The checked arguments of one convolution."""

    batch: Conv1dBatch
    conv_weight: Argument
    bias: Argument | None
    activation: str | None
    write_state: bool

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All arrays that were given, in the order of the call."""
        batch = self.batch
        return (batch.qkv, self.conv_weight, *batch.arguments[1:], *([self.bias] if self.bias else []))


@dataclass(frozen=True, slots=True)
class CommitInputs:
    """The checked arguments of one commit."""

    batch: Conv1dBatch
    num_accepted: Argument

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All five, in the order of the call."""
        return (*self.batch.arguments, self.num_accepted)


def conv1d_inputs(
    take: Take,
    qkv: Any,
    conv_weight: Any,
    conv_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    bias: Any = None,
    *,
    activation: str | None = None,
    write_state: bool = True,
) -> Conv1dInputs:
    """Describe the arrays with `take` and hold them to every rule that shapes, types and strides decide."""
    batch = _batch(take, qkv, conv_state, slot_idx, input_row_offsets)
    weight = take("conv_weight", conv_weight)
    require_shape(weight, "[conv_dim, conv_width]", (batch.conv_dim, batch.conv_width))
    require_float(weight)
    biases = None if bias is None else take("bias", bias)
    if biases is not None:
        require_shape(biases, "[conv_dim]", (batch.conv_dim,))
        require_float(biases)
    return Conv1dInputs(batch, weight, biases, known_activation(activation), bool(write_state))


def known_activation(activation: Any) -> str | None:
    """The name of an activation, or None; raises GdnError for another."""
    if activation is None or (isinstance(activation, str) and activation == "silu"):
        return activation
    raise GdnError(rejection("activation", "None or 'silu'", repr(activation)))


def commit_inputs(
    take: Take, qkv: Any, conv_state: Any, slot_idx: Any, input_row_offsets: Any, num_accepted: Any
) -> CommitInputs:
    """The same for a commit."""
    batch = _batch(take, qkv, conv_state, slot_idx, input_row_offsets)
    counts = take("num_accepted", num_accepted)
    require_shape(counts, "[batch_size]", (batch.batch_size,))
    require_index(counts)
    return CommitInputs(batch, counts)


def _batch(take: Take, *arrays: Any) -> Conv1dBatch:
    names = ("qkv", "conv_state", "slot_idx", "input_row_offsets")
    qkv, state, slots, offsets = (take(name, array) for name, array in zip(names, arrays, strict=True))
    require_ndim(qkv, "[total_seq_len, conv_dim]")
    require_ndim(state, "[max_slots, conv_dim, conv_width - 1]")
    require_ndim(slots, "[batch_size]")
    require_float(qkv)
    require_float(state)
    require_index(slots)
    require_index(offsets)
    conv_width = state.shape[2] + 1
    if not MIN_CONV_WIDTH <= conv_width <= MAX_CONV_WIDTH:
        expected = f"conv_width - 1 from {MIN_CONV_WIDTH - 1} to {MAX_CONV_WIDTH - 1} as its last axis"
        raise ShapeError(rejection("conv_state", expected, state.shape[2]))
    if state.shape[1] != qkv.shape[1]:
        raise ShapeError(rejection("conv_state", f"conv_dim = {qkv.shape[1]} as its second axis", state.shape[1]))
    require_shape(offsets, "[batch_size + 1]", (slots.shape[0] + 1,))
    _require_window_layout(state)
    for argument, axis in ((qkv, "total_seq_len"), (slots, "batch_size"), (state, "max_slots")):
        require_count(argument, axis)
    return Conv1dBatch(qkv, state, slots, offsets)


def _require_window_layout(state: Argument) -> None:
    """The windows of a slot lie without gaps, channel by channel or place by place, and slots do not overlap."""
    if not state.size:
        return
    max_slots, channels, places = state.shape
    by_place = (channels == 1 or state.strides[1] == 1) and (places == 1 or state.strides[2] == channels)
    if not state.is_dense(1) and not by_place:
        got = f"strides {state.strides} in elements for shape {state.shape}"
        raise LayoutError(rejection("conv_state", "its last two axes dense, in either order", got))
    if max_slots > 1 and abs(state.strides[0]) < channels * places:
        expected = f"a first stride of at least {channels * places} elements"
        raise LayoutError(rejection("conv_state", expected, state.strides[0]))


def require_conv_places(inputs: Conv1dInputs) -> str:
    """All arrays live in one place, and the pool can be written if it will be; returns that place."""
    place = require_one_place(inputs.arguments)
    if inputs.write_state:
        _require_own_windows(inputs.batch.conv_state, inputs.arguments)
    return place


def require_commit_places(inputs: CommitInputs) -> str:
    """All arrays live in one place, and the pool can be written; returns that place."""
    place = require_one_place(inputs.arguments)
    _require_own_windows(inputs.batch.conv_state, inputs.arguments)
    return place


def _require_own_windows(state: Argument, arguments: tuple[Argument, ...]) -> None:
    require_writable(state)
    require_disjoint(state, [argument for argument in arguments if argument is not state])


def require_conv_output(out: Argument, inputs: Conv1dInputs) -> None:
    """`out` can take the result: its shape, type, place and strides, and memory of its own."""
    qkv = inputs.batch.qkv
    require_shape(out, "[total_seq_len, conv_dim]", qkv.shape)
    require_float(out, ("float32",) if qkv.dtype == "float32" else (qkv.dtype, "float32"))
    require_one_place((qkv, out))
    require_writable(out)
    require_distinct_elements(out)
    require_disjoint(out, inputs.arguments)
