"""The token mixing of one Gated DeltaNet layer, put together from `gdn.ops`: convolution with SiLU, gates, recurrence.

What surrounds it in a model stays with the model: the projections that make queries, keys and values (``qkv``,
[T, conv_dim], channels as in `gdn.ops`), ``a`` and ``b`` ([T, num_value_heads]) out of hidden states, and behind it the
gated norm and the output projection. A Qwen3-Next layer is::

    qkv, z, b, a = projections(hidden)
    readout = gdn.layer.prefill(layer, qkv, a, b, slot_idx, input_row_offsets)   # [T, value_dim]
    hidden = output_projection(gated_rms_norm(readout, z))

Speculative decoding is `verify`, an acceptance, `commit`: the same bits as `prefill` over the accepted tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from gdn import arrays, calls
from gdn.calls import Rules
from gdn.check import require_ndim
from gdn.errors import ShapeError, rejection
from gdn.geometry import HeadGeometry
from gdn.layer_rules import commit_rules, conv1d_call, gate_call
from gdn.rules import fold_rules, fwd_rules, verify_rules


@dataclass(frozen=True, slots=True)
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
        """Raise ShapeError where the pools have not the same slots; all else is for the ops to see."""
        windows, states = (arrays.take(name, getattr(self, name)) for name in ("conv_state", "recurrent_state"))
        require_ndim(windows, "[max_slots, conv_dim, conv_width - 1]")
        require_ndim(states, "[max_slots, num_value_heads, key_head_dim, value_head_dim]")
        if windows.shape[0] != states.shape[0]:
            expected = f"max_slots = {windows.shape[0]}, as conv_state has"
            raise ShapeError(rejection("recurrent_state", expected, states.shape[0]))


class Scratch(NamedTuple):
    """What is between the ops of a call: qkv behind the convolution [T, conv_dim], decay and beta [T, num_value_heads].

    A call makes it where none is given. Give one, of `new_scratch`, for a captured graph or to save the allocations.
    """

    conv_output: Any
    decay: Any
    beta: Any


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
    """
    shapes = {
        "conv_state": ((max_slots, heads.conv_dim, conv_width - 1), conv_dtype),
        "recurrent_state": (
            (max_slots, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim),
            state_dtype,
        ),
    }
    if ring_rows:
        record_stride = -(-heads.record_elements // 8) * 8
        shapes["ring"] = ((ring_rows, heads.num_key_heads, ring_len, record_stride), "float32")
    pools = {name: arrays.empty(shape, dtype, place) for name, (shape, dtype) in shapes.items()}
    with arrays.in_place(place):
        for pool in pools.values():
            pool[...] = 0
    return pools


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
    scratch: Scratch | None = None,
    out: Any = None,
) -> Any:
    """Run a ragged batch of any lengths, and move windows and states on over all of it; returns the readout.

    Args:
        layer: weights and pools.
        qkv: [T, conv_dim], before the convolution.
        a, b: [T, num_value_heads], before the gates.
        slot_idx: [B], and input_row_offsets: [B + 1], as in the ops.
        pending_ring_slot_idx, num_pending: [B], where records of earlier windows wait in the layer's ring:
            `gdn.speculative.PendingWindows` has them.
        scratch: memory for what is between the ops.
        out: [T, value_dim] to write to.

    Returns:
        The readout, [T, value_dim], and raises, as `gdn.ops.gated_delta_recurrence_fwd`.
    """
    pending = pending_ring_slot_idx, num_pending
    ring = None if all(table is None for table in pending) else layer.ring
    tokens = qkv, a, b, slot_idx, input_row_offsets
    return _run(layer, *tokens, scratch, fwd_rules, (ring, *pending, out), write_state=True)


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
    if input_row_offsets is None:
        table = arrays.take("slot_idx", slot_idx)
        input_row_offsets = _counting(table.shape[0] + 1, table.place or arrays.CPU)
    pending = {"pending_ring_slot_idx": pending_ring_slot_idx, "num_pending": num_pending}
    return prefill(layer, qkv, a, b, slot_idx, input_row_offsets, **pending, scratch=scratch, out=out)


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
    """Read out speculative windows as `prefill` would, leaving windows of inputs and states as they are.

    Arguments as in `prefill`, and ring_slot_idx: [B], the row of the layer's ring that takes each window's records.
    Keep qkv for `commit`. A window longer than RING_LEN moves its state itself, over all its tokens: commit all of
    them.

    Returns the readout, [T, value_dim]; raises as `gdn.ops.gated_delta_recurrence_verify_ring`.
    """
    more = layer.ring, ring_slot_idx, pending_ring_slot_idx, num_pending, out
    return _run(layer, qkv, a, b, slot_idx, input_row_offsets, scratch, verify_rules, more, write_state=False)


def commit(
    layer: GatedDeltaLayer,
    qkv: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    num_accepted: Any,
    ring_slot_idx: Any = None,
) -> None:
    """Move windows of inputs and states over the first ``num_accepted[b]`` tokens of what `verify` was given.

    Without ring_slot_idx states stay behind: the records are pending, and the next `verify`, `prefill` or `decode` is
    told so. Raises as the two ops do.
    """
    steps: list[tuple[Rules, tuple[Any, ...]]] = [
        (commit_rules, (qkv, layer.conv_state, slot_idx, input_row_offsets, num_accepted))
    ]
    if ring_slot_idx is not None:
        slots, ring_rows = arrays.take("slot_idx", slot_idx), arrays.take("ring_slot_idx", ring_slot_idx)
        require_ndim(slots, "[batch_size]")
        require_ndim(ring_rows, "[batch_size]")
        one_layer = layer.recurrent_state, slots.array[None], layer.ring, ring_rows.array[None], num_accepted
        steps.append((fold_rules, one_layer))
    _run_all(steps)


def new_scratch(layer: GatedDeltaLayer, qkv: Any) -> Scratch:
    """Memory for what is between the ops of calls with as many tokens as qkv, [T, conv_dim], has."""
    tokens, heads = arrays.take("qkv", qkv), arrays.take("A_log", layer.A_log)
    require_ndim(tokens, "[total_seq_len, conv_dim]")
    require_ndim(heads, "[num_value_heads]")
    place, gate = tokens.place or arrays.CPU, (tokens.shape[0], heads.shape[0])
    conv_output = arrays.empty(tokens.shape, tokens.dtype, place)
    return Scratch(conv_output, *(arrays.empty(gate, "float32", place) for _ in range(2)))


def _run(
    layer: GatedDeltaLayer,
    qkv: Any,
    a: Any,
    b: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    scratch: Scratch | None,
    recurrence: Rules,
    more: tuple[Any, ...],
    *,
    write_state: bool,
) -> Any:
    """Gates, convolution, and the recurrence with these rules, which take `more` behind the six arguments."""
    conv_output, decay, beta = scratch or new_scratch(layer, qkv)
    tables = slot_idx, input_row_offsets
    of_filter = layer.conv_bias, layer.activation, write_state, conv_output
    return _run_all(
        [
            gate_call(a, b, layer.A_log, layer.dt_bias, layer.allow_neg_eigval, (decay, beta)),
            conv1d_call(qkv, layer.conv_weight, layer.conv_state, *tables, *of_filter),
            (recurrence, (conv_output, decay, beta, layer.recurrent_state, *tables, *more)),
        ]
    )


def _run_all(steps: list[tuple[Rules, tuple[Any, ...]]]) -> Any:
    """Run calls one behind the other, once all were found right; returns what the last one does."""
    for rules, given in steps:
        calls.check(rules, *given)
    result = None
    for rules, given in steps:
        result = calls.run(rules, *given)
    return result


def _counting(count: int, place: str) -> Any:
    """0, 1, ... as uint32."""
    table = arrays.empty((count,), "uint32", place)
    with arrays.in_place(place):
        table[...] = 1
        return table.cumsum(dtype=table.dtype) - table.dtype.type(1)
