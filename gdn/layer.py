"""The token mixing of one Gated DeltaNet layer, put together from `gdn.ops`: convolution with SiLU, gates, recurrence.

What surrounds it in a model stays with the model: the projections that make queries, keys and values (``qkv``,
[T, conv_dim], channels as in `gdn.ops`), ``a`` and ``b`` ([T, num_value_heads]) out of hidden states, and behind it the
gated norm and the output projection. A Qwen3-Next layer is::

    qkv, z, b, a = projections(hidden)
    readout = gdn.layer.prefill(layer, qkv, a, b, slot_idx, input_row_offsets)   # [T, value_dim]
    hidden = output_projection(gated_rms_norm(readout, z))

Speculative decoding is `verify`, an acceptance, `commit`: the same bits as `prefill` over the accepted tokens alone.
A call is refused, by whichever op, before the first op runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, ParamSpec

import numpy as np

from gdn import arrays, calls
from gdn.arrays import Argument
from gdn.backends import chunked
from gdn.calls import Rules
from gdn.check import known_function, require_disjoint, require_float, require_ndim, require_shape
from gdn.conv1d import MAX_CONV_WIDTH, MIN_CONV_WIDTH
from gdn.errors import IndexValueError, ShapeError, rejection
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.indices import offset_values, slot_values
from gdn.layer_rules import commit_rules, conv1d_call, gate_call
from gdn.ring import MAX_RING_LEN
from gdn.rules import fold_rules, fwd_call, verify_rules

_Arguments = ParamSpec("_Arguments")
#: Calls of ops, each by its rules and what these take, that run one behind the other.
_Steps = list[tuple[Rules, tuple[Any, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class GatedDeltaLayer:
    """The weights of a layer's token mixing, and its pools, which the functions of this module change in place.

    conv_weight: [conv_dim, conv_width]. A_log, dt_bias: [num_value_heads]. conv_state: [max_slots, conv_dim,
    conv_width - 1]; recurrent_state: [max_slots, num_value_heads, key_head_dim, value_head_dim]; a sequence has one
    slot in both, zeros in the beginning. ring: [ring_rows, num_key_heads, RING_LEN, record_stride], for `verify`.
    conv_bias: [conv_dim] or None. activation: of the convolution. allow_neg_eigval: whether beta reaches 2
    (OLMo-Hybrid). Types and strides: see the ops.
    """

    conv_weight: Any
    A_log: Any
    dt_bias: Any
    conv_state: Any
    recurrent_state: Any
    ring: Any = None
    conv_bias: Any = None
    activation: str | None = "silu"
    allow_neg_eigval: bool = False

    def __post_init__(self) -> None:
        """Raise ShapeError where the pools have not the same slots, LayoutError where they share memory.

        All else is for the ops to see.
        """
        windows, states = (arrays.take(name, getattr(self, name)) for name in ("conv_state", "recurrent_state"))
        require_ndim(windows, "[max_slots, conv_dim, conv_width - 1]")
        require_ndim(states, "[max_slots, num_value_heads, key_head_dim, value_head_dim]")
        if windows.shape[0] != states.shape[0]:
            expected = f"max_slots = {windows.shape[0]}, as conv_state has"
            raise ShapeError(rejection("recurrent_state", expected, states.shape[0]))
        require_disjoint(states, [windows])
        if self.ring is not None:
            require_disjoint(arrays.take("ring", self.ring), [windows, states])


class Scratch(NamedTuple):
    """What is between the ops of a call: qkv behind the convolution [T, conv_dim], decay and beta [T, num_value_heads].

    A call makes it where none is given. Give one, of `new_scratch`, for a captured graph or to save the allocations.
    workspace: of a recurrence by chunks, as `gdn.ops.gated_delta_recurrence_fwd` takes it.
    """

    conv_output: Any
    decay: Any
    beta: Any
    workspace: Any = None


def new_pools(
    heads: HeadGeometry,
    max_slots: int,
    *,
    conv_width: int = 4,
    conv_dtype: str = "bfloat16",
    state_dtype: str = "float32",
    ring_rows: int = 0,
    ring_len: int = 0,
    place: str = "cpu",
) -> dict[str, Any]:
    """Zeros for the pools of a `GatedDeltaLayer`, by field: ``GatedDeltaLayer(..., **new_pools(...))``.

    conv_dtype is best the type of qkv, which it then holds without rounding. The ring, float32, is made where ring_rows
    is not 0, with records that start on 16-byte boundaries. place: "cpu" for NumPy arrays, "cuda:0" for CuPy arrays on
    that GPU.

    Raises ShapeError, DTypeError, DeviceError for a size, type or place that no op takes.
    """
    _require_size("max_slots", max_slots, 0)
    _require_size("conv_width", conv_width, MIN_CONV_WIDTH, MAX_CONV_WIDTH)
    _require_size("ring_rows", ring_rows, 0)
    shapes = {
        "conv_state": ((max_slots, heads.conv_dim, conv_width - 1), conv_dtype),
        "recurrent_state": ((max_slots, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), state_dtype),
    }
    if ring_rows:
        _require_size("ring_len", ring_len, 1, MAX_RING_LEN)
        record_stride = -(-heads.record_elements // 8) * 8
        shapes["ring"] = ((ring_rows, heads.num_key_heads, ring_len, record_stride), "float32")
    for name, dtype in (("conv_dtype", conv_dtype), ("state_dtype", state_dtype)):
        arrays.require_float_name(name, dtype)
    arrays.require_place(place)
    pools = {name: arrays.empty(shape, dtype, place, name) for name, (shape, dtype) in shapes.items()}
    with arrays.in_place(place):
        for pool in pools.values():
            pool[...] = 0
    return pools


def _require_size(name: str, size: Any, least: int, most: int | None = None) -> None:
    if not isinstance(size, (int, np.integer)) or size < least or (most is not None and size > most):
        limit = f"a whole number of at least {least}" if most is None else f"a whole number from {least} to {most}"
        raise ShapeError(rejection(name, limit, repr(size)))


def new_scratch(
    layer: GatedDeltaLayer, qkv: Any, *, algorithm: str = "recurrent", batch_size: int | None = None
) -> Scratch:
    """Memory for what is between the ops of calls with as many tokens as qkv, [T, conv_dim], has.

    algorithm, batch_size: of the `prefill` that it is for; batch_size only with another algorithm than "recurrent".

    Raises ShapeError and DTypeError for a qkv that the convolution would refuse by itself, and what
    `gdn.ops.gated_delta_recurrence_fwd_workspace_bytes` would of the algorithm.
    """
    tokens, heads = arrays.take("qkv", qkv), arrays.take("A_log", layer.A_log)
    require_ndim(tokens, "[total_seq_len, conv_dim]")
    require_float(tokens)
    require_ndim(heads, "[num_value_heads]")
    place, gate = tokens.place or arrays.CPU, (tokens.shape[0], heads.shape[0])
    num_bytes = _workspace_bytes(layer, tokens, chunked.known_algorithm(algorithm), batch_size)
    conv_output = arrays.empty(tokens.shape, tokens.dtype, place, "scratch")
    decay, beta = (arrays.empty(gate, "float32", place, "scratch") for _ in range(2))
    workspace = arrays.empty((num_bytes,), "uint8", place, "scratch") if num_bytes else None
    return Scratch(conv_output, decay, beta, workspace)


def _workspace_bytes(layer: GatedDeltaLayer, qkv: Argument, algorithm: str, batch_size: int | None) -> int:
    """What the recurrence of a prefill takes."""
    if algorithm == "recurrent":
        return 0
    _require_size("batch_size", batch_size, 0)
    states = arrays.take("recurrent_state", layer.recurrent_state)
    heads, types = HeadGeometry.from_shapes(qkv.shape[1], states.shape), (qkv.dtype, states.dtype)
    return chunked.workspace_bytes(chunked.layout_of(heads, *types, int(batch_size or 0), qkv.shape[0], algorithm))


# ---- What a layer does. Each function says which calls of ops it is; what stands above it runs them ----


_STEPS: dict[Callable[..., Any], Callable[..., _Steps]] = {}


def _runs(steps_of: Callable[_Arguments, _Steps]) -> Callable[_Arguments, Any]:
    """A function that runs these steps, once all were found right, and returns what the last one does."""

    @wraps(steps_of)
    def function(*arguments: _Arguments.args, **keywords: _Arguments.kwargs) -> Any:
        made_ready = [calls.made_ready(rules, *given) for rules, given in steps_of(*arguments, **keywords)]
        return [run() for run in made_ready][-1]

    _STEPS[function] = steps_of
    return function


@_runs
def prefill(
    layer: GatedDeltaLayer,
    qkv: Any,
    a: Any,
    b: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
    algorithm: str = "recurrent",
    scratch: Scratch | None = None,
    out: Any = None,
) -> Any:
    """Run a ragged batch of any lengths, and move windows and states on over all of it; returns the readout.

    Args:
        layer: weights and pools.
        qkv: [T, conv_dim], before the convolution.
        a, b: [T, num_value_heads], before the gates.
        slot_idx, input_row_offsets: [B] and [B + 1], as in the ops.
        pending_ring_slot_idx, num_pending: [B], where records of earlier windows wait in the layer's ring:
            `gdn.speculative.PendingWindows` has them.
        algorithm: "recurrent", "chunked" or "auto", as `gdn.ops.gated_delta_recurrence_fwd` takes it.
        scratch: memory for what is between the ops.
        out: [T, value_dim] to write to.

    Returns:
        The readout, [T, value_dim], and raises, as `gdn.ops.gated_delta_recurrence_fwd`.
    """
    scratch = _given_or_new(scratch, layer, qkv)
    more = *_pending(layer, pending_ring_slot_idx, num_pending), algorithm, scratch.workspace, out
    return _steps(layer, qkv, a, b, slot_idx, input_row_offsets, scratch, fwd_call, more, write_state=True)


@_runs
def decode(
    layer: GatedDeltaLayer,
    qkv: Any,
    a: Any,
    b: Any,
    slot_idx: Any,
    input_row_offsets: Any = None,
    *,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
    scratch: Scratch | None = None,
    out: Any = None,
) -> Any:
    """`prefill` of one token of each sequence: qkv [B, conv_dim], a and b [B, num_value_heads].

    input_row_offsets are 0, 1, ..., B; give them to save making them in each step.
    """
    slots, tokens = arrays.take("slot_idx", slot_idx), arrays.take("qkv", qkv)
    require_ndim(slots, "[batch_size]")
    require_shape(tokens, "[batch_size, conv_dim]", (*slots.shape, *tokens.shape[1:]))
    if input_row_offsets is None:
        input_row_offsets = _counting(slots.shape[0] + 1, slots.place or arrays.CPU)
    scratch = _given_or_new(scratch, layer, qkv)
    more = *_pending(layer, pending_ring_slot_idx, num_pending), "recurrent", None, out
    return _steps(layer, qkv, a, b, slot_idx, input_row_offsets, scratch, fwd_call, more, write_state=True)


@_runs
def verify(
    layer: GatedDeltaLayer,
    qkv: Any,
    a: Any,
    b: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    ring_slot_idx: Any,
    *,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
    scratch: Scratch | None = None,
    out: Any = None,
) -> Any:
    """Read out speculative windows as `prefill` would, leaving windows of inputs, and states, for `commit`.

    Arguments as in `prefill`, and ring_slot_idx: [B], the row of the layer's ring that takes each window's records.
    Keep qkv for `commit`. A window that does not fit into the ring, behind what stays pending there, moves its state
    itself over all of its tokens: commit all of them. Pending records of another ring row are folded into the states.

    Returns the readout, [T, value_dim]; raises as `gdn.ops.gated_delta_recurrence_verify_ring`.
    """
    scratch = _given_or_new(scratch, layer, qkv)
    more = layer.ring, ring_slot_idx, pending_ring_slot_idx, num_pending, out
    return _steps(layer, qkv, a, b, slot_idx, input_row_offsets, scratch, _verify_call, more, write_state=False)


@_runs
def commit(
    layer: GatedDeltaLayer,
    qkv: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    num_accepted: Any,
    ring_slot_idx: Any = None,
) -> Any:
    """Move windows of inputs and states over the first ``num_accepted[b]`` tokens of what `verify` was given.

    Args:
        layer, qkv, slot_idx, input_row_offsets: those of the verify.
        num_accepted: [B], uint32 or int32: 0 to the tokens of each window, all of them where it is longer than the
            ring; 0 where ring_slot_idx was ``gdn.PAD_SLOT``.
        ring_slot_idx: that of a verify without pending records, whose states are folded here. Without it states stay
            behind, the records are pending, and the next call is told so: what `gdn.speculative.PendingWindows` is for.

    Raises what the two ops do. NumPy arrays only: IndexValueError for a count that is none of the above, where windows
    and states would part.
    """
    steps: _Steps = [(commit_rules, (qkv, layer.conv_state, slot_idx, input_row_offsets, num_accepted))]
    if ring_slot_idx is not None:
        slots, ring_rows = arrays.take("slot_idx", slot_idx), arrays.take("ring_slot_idx", ring_slot_idx)
        require_ndim(slots, "[batch_size]")
        require_ndim(ring_rows, "[batch_size]")
        one_layer = layer.recurrent_state, slots.array[None], layer.ring, ring_rows.array[None], num_accepted
        steps.append((fold_rules, one_layer))
        if slots.place == arrays.CPU:
            for rules, given in steps:
                rules(*given).check_values()
            _require_whole_counts(slots, ring_rows, arrays.take("input_row_offsets", input_row_offsets), num_accepted)
    return steps


def _require_whole_counts(slots: Argument, ring_rows: Argument, offsets: Argument, num_accepted: Any) -> None:
    """Counts mean the same to the convolution, which takes them as at most all tokens, and to the fold."""
    counts, lengths = slot_values(arrays.take("num_accepted", num_accepted)), np.diff(offset_values(offsets))
    lengths[slot_values(ring_rows) == PAD_SLOT] = 0
    too_many = np.flatnonzero((counts > lengths) & (slot_values(slots) != PAD_SLOT))
    if too_many.size:
        at = too_many[0]
        raise IndexValueError(
            rejection(f"num_accepted[{at}]", f"at most the {lengths[at]} tokens recorded", counts[at])
        )


def warmup(function: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
    """Compile and load what a call of a function of this module needs, so that such calls may be captured.

    Takes the function and what it would be called with; nothing runs and nothing is written. In the capture give
    ``scratch`` and ``out``, and `decode` its offsets, since no array is made there.

    Raises GdnError for another function, and what the function would.
    """
    for rules, given in known_function("function", function, _STEPS)(*arguments, **keywords):
        calls.warmup(rules, *given)


def _steps(
    layer: GatedDeltaLayer,
    qkv: Any,
    a: Any,
    b: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    scratch: Scratch,
    recurrence: Callable[..., tuple[Rules, tuple[Any, ...]]],
    more: tuple[Any, ...],
    *,
    write_state: bool,
) -> _Steps:
    """Gates, convolution, and this call of a recurrence, which takes `more` behind the six arguments."""
    conv_output, decay, beta, _ = scratch
    tables = slot_idx, input_row_offsets
    of_filter = layer.conv_bias, layer.activation, write_state, conv_output
    return [
        gate_call(a, b, layer.A_log, layer.dt_bias, layer.allow_neg_eigval, (decay, beta)),
        conv1d_call(qkv, layer.conv_weight, layer.conv_state, *tables, *of_filter),
        recurrence(conv_output, decay, beta, layer.recurrent_state, *tables, *more),
    ]


def _verify_call(*given: Any) -> tuple[Rules, tuple[Any, ...]]:
    return verify_rules, given


def _pending(layer: GatedDeltaLayer, *tables: Any) -> tuple[Any, ...]:
    """What a forward call takes of pending records: the ring too, but only with the tables."""
    return (None if all(table is None for table in tables) else layer.ring, *tables)


def _given_or_new(scratch: Scratch | None, layer: GatedDeltaLayer, qkv: Any) -> Scratch:
    """The scratch of a call: arrays, each of memory of its own; no op sees the first three of them all."""
    if scratch is None:
        return new_scratch(layer, qkv)
    if not isinstance(scratch, tuple) or len(scratch) not in (3, 4):  # without a workspace, or with one
        raise ShapeError(rejection("scratch", "a Scratch", type(scratch).__name__))
    scratch = Scratch(*scratch)
    conv_output, decay, beta = (arrays.take(name, getattr(scratch, name)) for name in Scratch._fields[:3])
    require_disjoint(conv_output, [decay, beta])
    return scratch


def _counting(count: int, place: str) -> Any:
    """0, 1, ... as uint32."""
    table = arrays.empty((count,), "uint32", place, "input_row_offsets")
    with arrays.in_place(place):
        table[...] = 1
        return table.cumsum(dtype=table.dtype) - table.dtype.type(1)
