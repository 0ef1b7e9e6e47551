"""Which compiled variants the calls of a layer may pick: what is compiled ahead of time.

Calls are made from shapes alone and walked through the functions that an op asks at run time, over every size of batch
and length of sequences, so that the rules themselves stand there only. All arrays are dense and aligned to 16 bytes,
records too; other layouts are compiled at their first use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import TypeVar

from gdn.arrays import DTYPES, Argument, describe
from gdn.backends import gated_delta_chunk_plan as plan_kernel
from gdn.backends import gated_delta_chunk_prepare as prepare_kernel
from gdn.backends import gated_delta_chunk_walk as walk_kernel
from gdn.backends import gated_delta_chunk_walk_sm90 as sm90_walk_kernel
from gdn.backends import gated_delta_conv1d_commit as commit_kernel
from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.backends import gated_delta_gates as gates_kernel
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import pending_windows as windows_kernel
from gdn.backends import recurrence as recurrence_launch
from gdn.backends.chunk_layout import ChunkLayout, unserved_reason
from gdn.backends.launch import Variant
from gdn.conv1d import commit_inputs, conv1d_inputs
from gdn.gates import gate_inputs
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs, recurrence_inputs
from gdn.ring import fold_inputs, pending_inputs, verify_inputs

#: Sequences of a batch, and tokens of a sequence, beyond which nothing changes: choices depend on means.
MAX_SEQUENCES = 2**24
MAX_TOKENS = 64

# Elements to which the stride of records is rounded up, as `gdn.ops` advises.
_RECORD_MULTIPLE = 8

_Value = TypeVar("_Value")
#: From one number to another, both included, a function has this value.
_Runs = list[tuple[int, int, _Value]]


@dataclass(frozen=True, slots=True)
class Layer:
    """What all calls for a Gated DeltaNet layer have in common.

    out_dtype: of the readout, None for the work type. ring_lens: RING_LEN of each ring that calls may be given.
    conv_width: taps of the convolution, which has SiLU, no bias, and its pool in the work type.
    """

    heads: HeadGeometry
    work_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    out_dtype: str | None = None
    gate_dtype: str = "float32"
    ring_dtype: str = "float32"
    ring_lens: tuple[int, ...] = ()
    conv_width: int = 4

    @property
    def types(self) -> str:
        """The types that tell layers of one table apart."""
        return f"{self.work_dtype}/{self.state_dtype}" + (f" to {self.out_dtype}" if self.out_dtype else "")


@dataclass(frozen=True, slots=True)
class Use:
    """A variant, and the calls that pick it. types: of queries and states, empty where the kernel has none."""

    variant: Variant
    calls: str
    types: str


def uses(layer: Layer, ops: Iterable[str] | None = None) -> Iterator[Use]:
    """What the calls of a layer pick; one variant may have several uses.

    ops: names out of `OPS`, all of them unless given. Raises ShapeError and DTypeError for a layer that ops refuse.
    """
    for op in OPS if ops is None else ops:
        for calls, variant, types in OPS[op](layer):
            yield Use(variant, calls, types)


# ---- The uses of each op: calls in words, variant, types ----

_Uses = Iterator[tuple[str, Variant, str]]


def _fwd_uses(layer: Layer) -> _Uses:
    def variant(ring_len: int, batch_size: int, total_seq_len: int) -> Variant:
        inputs, out = _recurrence(layer, batch_size, total_seq_len)
        table = _shape((batch_size,), "uint32")
        pending = pending_inputs(describe, inputs, _ring(layer, ring_len), table, table) if ring_len else None
        return fwd_kernel.variant(inputs, out, recurrence_launch.row_tile(inputs, out, ring_len), pending)

    for ring_len in (0, *layer.ring_lens):
        for calls, found in _of_ragged_batches(partial(variant, ring_len)):
            yield calls + (_ring_in_words(ring_len, has_pending=True) if ring_len else ""), found, layer.types
    if _is_chunked(layer):
        for calls, found in _of_ragged_batches(partial(_short_rows_variant, layer)):
            yield f"{calls}, short rows of 'auto'", found, layer.types


def _short_rows_variant(layer: Layer, batch_size: int, total_seq_len: int) -> Variant:
    inputs, out = _recurrence(layer, batch_size, total_seq_len)
    return fwd_kernel.variant(inputs, out, recurrence_launch.row_tile(inputs, out), clears_rows=False)


def _is_chunked(layer: Layer) -> bool:
    return unserved_reason(layer.heads) is None


def _plan_uses(layer: Layer) -> _Uses:
    for _, out, layout in _chunked_calls(layer):
        yield "chunked, any batch", plan_kernel.variant(out, layout), layer.types


def _prepare_uses(layer: Layer) -> _Uses:
    for inputs, _, layout in _chunked_calls(layer):
        yield "chunked, any batch", prepare_kernel.variant(inputs, layout), layer.types


def _walk_uses(layer: Layer) -> _Uses:
    for inputs, out, layout in _chunked_calls(layer):
        yield "chunked, any batch", walk_kernel.variant(inputs, out, layout), layer.types
        if sm90_walk_kernel.serves(inputs, out, layout):
            for num_warpgroups in sm90_walk_kernel.possible_warpgroups(layout):
                yield "chunked, by batch", sm90_walk_kernel.variant(inputs, out, layout, num_warpgroups), layer.types


def _chunked_calls(layer: Layer) -> Iterator[tuple[RecurrenceInputs, Argument, ChunkLayout]]:
    """A call by chunks, which all have the same variants; none where heads are not served."""
    if _is_chunked(layer):
        inputs, out = _recurrence(layer, 1, 1)
        yield inputs, out, ChunkLayout(layer.heads, layer.work_dtype, layer.state_dtype, 1, 1, min_row_len=1)


def _verify_uses(layer: Layer) -> _Uses:
    def variant(ring_len: int, has_pending: bool, batch_size: int, total_seq_len: int) -> Variant:
        recurrence, out = _recurrence(layer, batch_size, total_seq_len)
        table = _shape((batch_size,), "uint32")
        tables = (table, table, table) if has_pending else (table,)
        inputs = verify_inputs(describe, recurrence, _ring(layer, ring_len), *tables)
        tile = recurrence_launch.row_tile(recurrence, out, ring_len if has_pending else 0)
        return verify_kernel.variant(inputs, out, tile)

    for ring_len, has_pending in product(layer.ring_lens, (False, True)):
        for calls, found in _of_ragged_batches(partial(variant, ring_len, has_pending)):
            yield calls + _ring_in_words(ring_len, has_pending), found, layer.types


def _fold_uses(layer: Layer) -> _Uses:
    def variant(ring_len: int, num_rows: int) -> Variant:
        table, counts = _shape((1, num_rows), "uint32"), _shape((num_rows,), "uint32")
        inputs = fold_inputs(describe, _pool(layer), table, _ring(layer, ring_len), table, counts)
        return fold_kernel.variant(inputs, fold_kernel.row_tile(inputs))

    for ring_len in layer.ring_lens:  # of rows, layers and sequences count alike
        for first, last, found in step_runs(partial(variant, ring_len), 1, MAX_SEQUENCES):
            yield f"{_counted(first, last, MAX_SEQUENCES, 'row')}, ring of {ring_len}", found, layer.state_dtype


def _gate_uses(layer: Layer) -> _Uses:
    tokens, types = _shape((1, layer.heads.num_value_heads), layer.work_dtype), ("float32", layer.work_dtype)
    for rate, bias in dict.fromkeys((rate, bias) for rate in types for bias in types):
        of_heads = (_shape((layer.heads.num_value_heads,), dtype) for dtype in (rate, bias))
        inputs = gate_inputs(describe, tokens, tokens, *of_heads, allow_neg_eigval=False)
        yield f"A_log {rate}, dt_bias {bias}", gates_kernel.variant(inputs), layer.work_dtype


def _conv1d_uses(layer: Layer) -> _Uses:
    channels = layer.heads.conv_dim

    def variant(filter_dtype: str, batch_size: int, total_seq_len: int) -> Variant:
        qkv = _shape((total_seq_len, channels), layer.work_dtype)
        weight = _shape((channels, layer.conv_width), filter_dtype)
        inputs = conv1d_inputs(describe, qkv, weight, *_windows(layer, batch_size), activation="silu")
        return conv_kernel.variant(inputs, describe("out", qkv))

    for filter_dtype in dict.fromkeys((layer.work_dtype, "float32")):
        for calls, found in _of_ragged_batches(partial(variant, filter_dtype)):
            yield f"{calls}, conv_weight {filter_dtype}", found, layer.work_dtype


def _commit_uses(layer: Layer) -> _Uses:
    qkv, counts = _shape((1, layer.heads.conv_dim), layer.work_dtype), _shape((1,), "uint32")
    yield (
        "any batch",
        commit_kernel.variant(commit_inputs(describe, qkv, *_windows(layer, 1), counts)),
        layer.work_dtype,
    )


def _window_uses(layer: Layer) -> _Uses:
    yield "any batch", windows_kernel.VARIANT, ""


#: What yields the uses of each op that runs a kernel, by the kernel's stem.
OPS: dict[str, Callable[[Layer], _Uses]] = {
    fwd_kernel.KERNEL.stem: _fwd_uses,
    plan_kernel.KERNEL.stem: _plan_uses,
    prepare_kernel.KERNEL.stem: _prepare_uses,
    walk_kernel.KERNEL.stem: _walk_uses,
    verify_kernel.KERNEL.stem: _verify_uses,
    fold_kernel.KERNEL.stem: _fold_uses,
    conv_kernel.KERNEL.stem: _conv1d_uses,
    commit_kernel.KERNEL.stem: _commit_uses,
    gates_kernel.KERNEL.stem: _gate_uses,
    windows_kernel.KERNEL.stem: _window_uses,
}


# ---- Calls made from shapes ----


def _shape(shape: tuple[int, ...], dtype: str) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=DTYPES[dtype])


def _pool(layer: Layer) -> SimpleNamespace:
    heads = layer.heads
    return _shape((2, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), layer.state_dtype)


def _windows(layer: Layer, batch_size: int) -> tuple[SimpleNamespace, SimpleNamespace, SimpleNamespace]:
    """conv_state, slot_idx and input_row_offsets."""
    pool = _shape((2, layer.heads.conv_dim, layer.conv_width - 1), layer.work_dtype)
    return pool, _shape((batch_size,), "uint32"), _shape((batch_size + 1,), "uint32")


def _ring(layer: Layer, ring_len: int) -> SimpleNamespace:
    stride = -(-layer.heads.record_elements // _RECORD_MULTIPLE) * _RECORD_MULTIPLE
    return _shape((2, layer.heads.num_key_heads, ring_len, stride), layer.ring_dtype)


def _recurrence(layer: Layer, batch_size: int, total_seq_len: int) -> tuple[RecurrenceInputs, Argument]:
    """The six arrays of a recurrence and its readout."""
    gate = _shape((total_seq_len, layer.heads.num_value_heads), layer.gate_dtype)
    inputs = recurrence_inputs(
        describe,
        _shape((total_seq_len, layer.heads.conv_dim), layer.work_dtype),
        *(gate, gate),
        _pool(layer),
        *(_shape((batch_size,), "uint32"), _shape((batch_size + 1,), "uint32")),
    )
    return inputs, describe("out", _shape(inputs.out_shape, layer.out_dtype or layer.work_dtype))


# ---- Walking over sizes ----


def _of_ragged_batches(variant_of: Callable[[int, int], Variant]) -> Iterator[tuple[str, Variant]]:
    """What batches pick, in words. variant_of: takes the sequences of a batch and its tokens."""

    def of_length(num_tokens: int) -> _Runs[Variant]:
        return step_runs(lambda size: variant_of(size, num_tokens * size), 1, MAX_SEQUENCES)

    for first, last, runs in step_runs(of_length, 1, MAX_TOKENS):
        tokens = _counted(first, last, MAX_TOKENS, "token")
        for first_size, last_size, variant in runs:
            yield f"{_counted(first_size, last_size, MAX_SEQUENCES, 'sequence')} of {tokens}", variant
    yield "no sequence", variant_of(0, 1)  # rows of the readout are cleared all the same


def step_runs(value_at: Callable[[int], _Value], first: int, end: int) -> _Runs[_Value]:
    """The runs of a step function from `first` to `end`, found by doubling, then halving.

    A value that returns before the number has doubled hides what is between; thresholds only ever move one way.
    """
    runs = [(first, first, value_at(first))]
    while runs[-1][1] < end:
        start, low, value = runs[-1]
        high = min(2 * low, end)
        if value_at(high) == value:
            runs[-1] = (start, high, value)
            continue
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if value_at(middle) == value else (low, middle)
        runs[-1] = (start, low, value)
        runs.append((high, high, value_at(high)))
    return runs


def _ring_in_words(ring_len: int, has_pending: bool) -> str:
    return f", ring of {ring_len}" + (" with pending records" if has_pending else "")


def _counted(first: int, last: int, end: int, what: str) -> str:
    """A range of counts in words; `end` stands for no end."""
    if first == last:
        return f"{first} {what}" if first == 1 else f"{first} {what}s"
    if first == 1:
        return f"any {what}s" if last == end else f"up to {last} {what}s"
    return f"{first} {what}s or more" if last == end else f"{first} to {last} {what}s"
