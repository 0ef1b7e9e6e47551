"""The public functions. Contract of arrays, index values and exactness: see the docstrings and README.

Arrays of one call live in one place. On a GPU (CuPy, or anything that shares its memory by DLPack or
``__cuda_array_interface__``) a call enqueues its kernels on the current stream that CuPy has for the arrays' device,
and returns without waiting: keep arrays of other frameworks alive, and their stream CuPy's current one, until they have
run (docs/frameworks.md). In a stream capture a call is refused that would have to compile or allocate: give ``out``
(and ``workspace``), and call `gdn.warmup` before. Calls on a CPU are computed at once, by the backend that
`gdn.use_backend` names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from numbers import Integral
from typing import Any

from gdn import arrays, calls
from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.backends import gated_delta_gates as gates_kernel
from gdn.backends import recurrence
from gdn.calls import BoundCall, Rules
from gdn.check import known_function
from gdn.conv1d import conv1d_inputs
from gdn.errors import GdnError, ShapeError, rejection
from gdn.gates import gate_inputs
from gdn.geometry import HeadGeometry
from gdn.layer_rules import commit_rules, conv1d_call, gate_call
from gdn.recurrence import recurrence_inputs
from gdn.rules import fold_rules, fwd_call, fwd_workspace_bytes, verify_rules

__all__ = [
    "bind",
    "check_indices",
    "gated_delta_conv1d_commit",
    "gated_delta_conv1d_fwd",
    "gated_delta_conv1d_fwd_shape",
    "gated_delta_gates",
    "gated_delta_gates_shape",
    "gated_delta_recurrence_fwd",
    "gated_delta_recurrence_fwd_shape",
    "gated_delta_recurrence_fwd_workspace_bytes",
    "gated_delta_recurrence_verify_ring",
    "gated_delta_ring_record_elements",
    "gated_delta_state_fold",
    "warmup",
]


def gated_delta_recurrence_fwd(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    ring: Any = None,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
    algorithm: str = "recurrent",
    workspace: Any = None,
    out: Any = None,
) -> Any:
    """Run the Gated DeltaNet recurrence over a ragged batch, advancing the states of a pool in place.

    Per sequence and value head ``h``, with state ``S`` of shape [key_head_dim, value_head_dim], per token ``t``::

        S     = decay[t, h] * S
        delta = beta[t, h] * (value - S.T @ k)          k = key / sqrt(sum(key**2) + 1e-6)
        S     = S + outer(k, delta)
        out   = S.T @ q / sqrt(key_head_dim)            q = query / sqrt(sum(query**2) + 1e-6)

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, equation 10, with normalised keys and
    queries as in Qwen3-Next.) Value head ``h`` reads key head ``h // group_size``. Arithmetic is float32 whatever
    the storage types; the state is rounded to the pool's type once, at the end of the call. Sums run over the raw key
    and query and are scaled afterwards: they must stay below the largest float32, 3.4e38.

    The algorithm "chunked" computes the same in the chunkwise form, on tensor cores, for long rows. Readout and states
    are within 1e-3 of the exact ones in relative norm with 16-bit qkv_conv_output, within 2e-4 with float32 (beside the
    rounding to the types of out and pool), for decay from 0 to 1 and beta from 0 to 2. A sequence's bits depend neither
    on the rest of the batch nor on the run; but they are not those of "recurrent", of a verify, or of the same tokens
    in several calls. It serves head sizes that are multiples of 32. "auto" runs rows of at least 128 tokens so, and
    shorter ones as "recurrent" does, with the bits of either; for heads of other sizes it is "recurrent".

    Args:
        qkv_conv_output: [total_seq_len, conv_dim], float32, float16 or bfloat16 (the work type), any strides. A
            token's channels are its queries, keys and values: conv_dim = 2 * num_key_heads * key_head_dim +
            num_value_heads * value_head_dim.
        decay_per_token: [total_seq_len, num_value_heads], the factor itself (not its logarithm), float32 or the
            work type, any strides.
        beta_per_token: the same shape and type, the step size after its sigmoid (0 to 1, or to 2).
        recurrent_state: [max_slots, num_value_heads, key_head_dim, value_head_dim], float32, float16 or bfloat16,
            dense but for a free slot stride. Changed in place: slots of live sequences that have tokens, or pending
            records, only.
        slot_idx: [batch_size], uint32, or int32 read as the same bits: each sequence's slot. ``gdn.PAD_SLOT``
            marks a padding row: its output is zero and no slot is touched.
        input_row_offsets: [batch_size + 1], uint32 or int32: sequence b owns rows [offsets[b], offsets[b + 1]).
        ring, pending_ring_slot_idx, num_pending: all three or none: records that `gated_delta_recurrence_verify_ring`
            left in ``ring`` and that the states have yet to advance over. Each live sequence's slot is first folded
            over the first ``num_pending[b]`` records of ring row ``pending_ring_slot_idx[b]``, also where the sequence
            has no tokens; the bits are those of `gated_delta_state_fold` and then this call, in one pass over the
            states. Both tables are [batch_size], uint32 or int32; a count of 0 or above RING_LEN, or the ring row
            ``gdn.PAD_SLOT``, folds nothing. The ring is only read.
        algorithm: "recurrent", "chunked" or "auto".
        workspace: memory for what is between the kernels of "chunked" and "auto", made when not given: a dense array
            [num_bytes] of uint8 that starts on a 16-byte boundary, of at least
            `gated_delta_recurrence_fwd_workspace_bytes`. What it holds before and after means nothing; "recurrent"
            does not look at it. Calls that may run at the same time take one each.
        out: [total_seq_len, value_dim] to write to, of the work type or float32, any strides; made in the work
            type when not given. Every row is written; rows that no live sequence owns become zero.

    Returns:
        ``out``, a NumPy or CuPy array.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError: an argument breaks a rule above; nothing was written.
        GdnError: another algorithm.
        IndexValueError: NumPy arrays only: an index value breaks a rule of `check_indices`. On a GPU such values
            are safe (a bad slot is padding, offsets are clamped) but not reported.
        KernelCompileError: the kernel did not compile.
    """
    rules, given = fwd_call(
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
        ring,
        pending_ring_slot_idx,
        num_pending,
        algorithm,
        workspace,
        out,
    )
    return calls.run(rules, *given)


def gated_delta_recurrence_fwd_workspace_bytes(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    algorithm: str,
) -> int:
    """The bytes that `gated_delta_recurrence_fwd` needs as ``workspace``; 0 for "recurrent".

    From shapes and types alone: takes what `gated_delta_recurrence_fwd_shape` does. At most 64 MiB, unless heads are so
    many that a single chunk of 64 tokens is more, or sequences more than a million.

    Raises:
        ShapeError, DTypeError, LayoutError: where the op would refuse these shapes, types or strides.
        GdnError: another algorithm.
    """
    six = qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets
    return fwd_workspace_bytes(*six, algorithm=algorithm)


def gated_delta_recurrence_fwd_shape(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
) -> tuple[int, int]:
    """The shape of `gated_delta_recurrence_fwd`'s result, (total_seq_len, value_dim), from shapes and types alone.

    Takes the same six arguments, or anything with ``.shape`` and ``.dtype`` in their place (``numpy.empty`` on no
    data, ``jax.ShapeDtypeStruct``, a PyTorch meta tensor); needs no device and reads no data.

    Raises:
        ShapeError, DTypeError, LayoutError: where the op would refuse these shapes, types or strides. Where arrays
            live, overlap and may be written is for the op to see.
    """
    inputs = recurrence_inputs(
        arrays.describe,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
    )
    recurrence.num_blocks(inputs, recurrence.row_tile(inputs))
    return inputs.out_shape


def gated_delta_ring_record_elements(key_head_dim: int, value_head_dim: int, group_size: int) -> int:
    """Elements of one ring record, the least that a ring's last axis may be.

    = key_head_dim + group_size * (value_head_dim + 1): the raw key; then per value head of the group a row of
    value_head_dim delta factors; then per value head of the group one decay. Records start on 16-byte boundaries, and
    are written and read faster, where the last axis is rounded up to a multiple of 8.

    Raises ShapeError for a head size or group that no kernel serves.
    """
    if not isinstance(group_size, Integral) or group_size < 1:
        raise ShapeError(rejection("group_size", "at least 1", group_size))
    return int(HeadGeometry(1, group_size, key_head_dim, value_head_dim).record_elements)


def gated_delta_recurrence_verify_ring(
    qkv_conv_output: Any,
    decay_per_token: Any,
    beta_per_token: Any,
    recurrent_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    ring: Any,
    ring_slot_idx: Any,
    *,
    pending_ring_slot_idx: Any = None,
    num_pending: Any = None,
    out: Any = None,
) -> Any:
    """Read out a speculative window without touching the states, and leave a record of each token.

    The readout is that of `gated_delta_recurrence_fwd` on the same arguments, bit for bit. Where nothing is pending, a
    row of at most RING_LEN tokens leaves its slot alone; its token ``i`` writes record ``i`` of ring row
    ``ring_slot_idx[b]``, one record per key head, from which `gated_delta_state_fold` advances the state over as many
    tokens as were accepted. A row longer than RING_LEN records nothing and advances its slot itself, as
    gated_delta_recurrence_fwd does.

    With ``pending_ring_slot_idx`` and ``num_pending`` each state first advances over the first ``n = num_pending[b]``
    records of that ring row, in the same pass. If that is

    * another ring row than ``ring_slot_idx[b]``, the slot is folded: rounded to its type and written, also where the
      window is empty. The window runs from there and records from position 0 of its own row. Bits:
      `gated_delta_state_fold`, then this function.
    * the same ring row, the records stay pending: the slot is left alone, and the window's records follow them, from
      position n on. Bits: one forward call over the pending tokens and the window's. A window that does not fit behind
      them (n + length above RING_LEN) commits itself: the state advances over all of it and is written, nothing is
      recorded, and nothing is pending afterwards.

    Args:
        qkv_conv_output, decay_per_token, beta_per_token, recurrent_state, slot_idx, input_row_offsets, out: as in
            `gated_delta_recurrence_fwd`.
        ring: [ring_rows, num_key_heads, RING_LEN, record_stride], dense, float32 (float16 and bfloat16 are taken
            too; the fold is then within their rounding, not exact). RING_LEN is 1 to 64, record_stride at least
            `gated_delta_ring_record_elements`. Changed in place: the records of live windows only; elements beyond a
            record are neither read nor written.
        ring_slot_idx: [batch_size], uint32 or int32: the ring row of each sequence. A table of its own: nothing ties
            ring rows to slots. ``gdn.PAD_SLOT`` makes the row padding.
        pending_ring_slot_idx, num_pending: both or none, [batch_size], uint32 or int32: the ring row and the number of
            each sequence's pending records. On a GPU they are read there, so that neither choice nor count needs a
            synchronisation. A count of 0 or above RING_LEN (a window that committed itself), or the ring row
            ``gdn.PAD_SLOT``, says that nothing is pending. A pending row may be no other live sequence's ring row.

    Returns:
        ``out``, a NumPy or CuPy array.

    Raises what `gated_delta_recurrence_fwd` does.
    """
    return calls.run(
        verify_rules,
        qkv_conv_output,
        decay_per_token,
        beta_per_token,
        recurrent_state,
        slot_idx,
        input_row_offsets,
        ring,
        ring_slot_idx,
        pending_ring_slot_idx,
        num_pending,
        out,
    )


def gated_delta_state_fold(recurrent_state: Any, row_ids: Any, ring: Any, ring_row_ids: Any, num_accepted: Any) -> None:
    """Advance states over the first accepted records of their windows, all layers in one launch.

    For each layer and row, with ``n = num_accepted[b]``, the state in slot ``row_ids[layer, b]`` becomes what
    `gated_delta_recurrence_fwd` over the first n tokens of the window would have left, bit for bit with a float32
    ring. A count of 0, or one above RING_LEN (the verify advanced that row itself), leaves the row's bytes alone.
    Records from the n-th on are never read. Folding twice applies twice.

    Args:
        recurrent_state: [max_slots, num_value_heads, key_head_dim, value_head_dim], as in the recurrence; the slots
            of all layers. Changed in place.
        row_ids: [num_layers, batch_size], uint32 or int32: slots. ``gdn.PAD_SLOT`` skips a row.
        ring: [ring_rows, num_key_heads, RING_LEN, record_stride], as `gated_delta_recurrence_verify_ring` left it;
            the rows of all layers.
        ring_row_ids: [num_layers, batch_size], uint32 or int32: ring rows. ``gdn.PAD_SLOT`` skips a row.
        num_accepted: [batch_size], uint32 or int32: accepted tokens of each row, the same in all layers.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError: an argument breaks a rule above; nothing was written.
        IndexValueError: NumPy arrays only: an index value breaks a rule of `check_indices`.
        KernelCompileError: the kernel did not compile.
    """
    calls.run(fold_rules, recurrent_state, row_ids, ring, ring_row_ids, num_accepted)


def gated_delta_conv1d_fwd(
    qkv: Any,
    conv_weight: Any,
    conv_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    write_state: bool = True,
    out: Any = None,
) -> Any:
    """Convolve the channels of a ragged batch with a short causal filter, and move the windows of past inputs on.

    With ``x`` a sequence's rows behind its window, the last ``conv_width - 1`` inputs that came before them, token
    ``t`` of the sequence has, per channel::

        out[t] = act(bias + conv_weight[0] * x[t] + ... + conv_weight[conv_width - 1] * x[t + conv_width - 1])

    (the short convolution of Mamba, arXiv:2312.00752, section 3.4, as Qwen3-Next applies it to queries, keys and
    values, whose channels make up a token). The last weight is that of the token itself; ``act(y)`` is y, or
    ``y / (1 + exp(-y))`` with the activation "silu". Arithmetic is float32, taps in this order, fused on GPU and host.
    A sequence of fewer tokens than the window keeps the newest of the old inputs, so that any split of a sequence over
    calls has the outputs of one call, bit for bit where conv_state holds the work type without rounding.

    Args:
        qkv: [total_seq_len, conv_dim], float32, float16 or bfloat16 (the work type), any strides.
        conv_weight: [conv_dim, conv_width], float32, float16 or bfloat16, any strides. conv_width is 2 to 8.
        conv_state: [max_slots, conv_dim, conv_width - 1], float32, float16 or bfloat16, the windows, oldest input
            first; zeros for a new sequence. Its last two axes dense, in either order; the slot stride is free. Changed
            in place: the slots of live sequences that have tokens.
        slot_idx, input_row_offsets: as in `gated_delta_recurrence_fwd`.
        bias: [conv_dim], float32, float16 or bfloat16, any stride; none is 0.
        activation: None or "silu".
        write_state: False leaves conv_state as it is, for a speculative window; `gated_delta_conv1d_commit` moves the
            windows once it is known how much of it was accepted.
        out: [total_seq_len, conv_dim] to write to, of the work type or float32, any strides; made in the work type when
            not given. Every row is written; rows that no live sequence owns become zero.

    Returns:
        ``out``, a NumPy or CuPy array.

    Raises what `gated_delta_recurrence_fwd` does.
    """
    arguments = qkv, conv_weight, conv_state, slot_idx, input_row_offsets, bias, activation, write_state, out
    rules, given = conv1d_call(*arguments)
    return calls.run(rules, *given)


def gated_delta_conv1d_fwd_shape(
    qkv: Any,
    conv_weight: Any,
    conv_state: Any,
    slot_idx: Any,
    input_row_offsets: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
) -> tuple[int, int]:
    """The shape of `gated_delta_conv1d_fwd`'s result, (total_seq_len, conv_dim), from shapes and types alone.

    Takes and raises what `gated_delta_recurrence_fwd_shape` does, for the arguments of the convolution.
    """
    six = qkv, conv_weight, conv_state, slot_idx, input_row_offsets, bias
    inputs = conv1d_inputs(arrays.describe, *six, activation=activation)
    conv_kernel.num_blocks(inputs)
    return inputs.batch.total_seq_len, inputs.batch.conv_dim


def gated_delta_conv1d_commit(
    qkv: Any, conv_state: Any, slot_idx: Any, input_row_offsets: Any, num_accepted: Any
) -> None:
    """Move the windows of past inputs over the first ``num_accepted[b]`` tokens of each sequence.

    conv_state becomes, byte for byte, what `gated_delta_conv1d_fwd` over those tokens leaves.

    Args:
        qkv, conv_state, slot_idx, input_row_offsets: what `gated_delta_conv1d_fwd` took with ``write_state=False``.
            conv_state is changed in place: the slots of live sequences whose count is not 0.
        num_accepted: [batch_size], uint32 or int32: accepted tokens of each sequence. 0 leaves a slot's bytes alone;
            more than the sequence has tokens means all of them.

    Raises what `gated_delta_recurrence_fwd` does.
    """
    calls.run(commit_rules, qkv, conv_state, slot_idx, input_row_offsets, num_accepted)


def gated_delta_gates(
    a: Any, b: Any, A_log: Any, dt_bias: Any, *, allow_neg_eigval: bool = False, out: Any = None
) -> tuple[Any, Any]:
    """Decay and step size of every token and value head, from the projections of a model.

    ::

        decay = exp(-exp(A_log) * softplus(a + dt_bias))    softplus(x) = log(1 + exp(x)), and x itself above 20
        beta  = sigmoid(b)                                  twice that with allow_neg_eigval

    (Yang, Kautz, Hatamizadeh, "Gated Delta Networks", arXiv:2412.06464, with the decay of Mamba2, arXiv:2405.21060;
    step sizes up to 2 give the state's update negative eigenvalues, arXiv:2411.12537.) Arithmetic is float32. The
    results are the ``decay_per_token`` and ``beta_per_token`` of the recurrence.

    Args:
        a, b: [total_seq_len, num_value_heads], float32, float16 or bfloat16, both the same; any strides.
        A_log, dt_bias: [num_value_heads], float32, float16 or bfloat16 each; any strides.
        allow_neg_eigval: whether beta is doubled.
        out: decay and beta to write to, two arrays [total_seq_len, num_value_heads] of float32, any strides; made when
            not given.

    Returns:
        ``(decay, beta)``, NumPy or CuPy arrays.

    Raises:
        ShapeError, DTypeError, LayoutError, DeviceError: an argument breaks a rule above; nothing was written.
        KernelCompileError: the kernel did not compile.
    """
    rules, given = gate_call(a, b, A_log, dt_bias, allow_neg_eigval, out)
    result = calls.run(rules, *given)
    # A call with a plan returns its last array alone; it was given arrays of CuPy's own.
    return result if isinstance(result, tuple) else given[-2:]


def gated_delta_gates_shape(a: Any, b: Any, A_log: Any, dt_bias: Any) -> tuple[int, int]:
    """The shape of both results of `gated_delta_gates`, (total_seq_len, num_value_heads), from shapes and types alone.

    Takes and raises what `gated_delta_recurrence_fwd_shape` does, for the arguments of the gates.
    """
    inputs = gate_inputs(arrays.describe, a, b, A_log, dt_bias, allow_neg_eigval=False)
    gates_kernel.num_blocks(inputs)
    total_seq_len, num_value_heads = inputs.a.shape
    return total_seq_len, num_value_heads


def bind(op: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> BoundCall:
    """Check a call once, to run it many times: the result runs it whenever it is called, and returns what the op does.

    ::

        decode = gdn.ops.bind(gdn.ops.gated_delta_recurrence_fwd, qkv, decay, beta, state, slot_idx, offsets, out=out)
        for _ in range(steps):
            ...  # put the values of the next token into qkv, decay and beta
            decode()

    The call is on these arrays, which are kept alive: values in them may change between runs; shape, type and memory of
    an array may not. Where ``out`` is not given, it is made once and every run writes to it again. On a GPU a run
    enqueues its kernels on the stream that is CuPy's current one at that time, from any thread, and may be captured
    into a CUDA graph at once: they are compiled here. A workspace that is not given is made once as well, so runs of a
    chunked call must not be under way on two streams at once. Arrays of other frameworks are taken over here, once and
    for all: their streams are not waited for again. NumPy arrays stay with the backend that is chosen here, and each
    run checks their index values, as the op does.

    Args:
        op: a function of this module that runs a kernel.
        *arguments, **keywords: what the op would be called with. Nothing is written here.

    Raises:
        GdnError: what the op itself would refuse, index values aside, and an op that is none.
        TypeError: arguments are missing or unknown, as for any call.
    """
    return BoundCall(*_rules_of(op, arguments, keywords))


def warmup(op: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
    """Check a call and compile and load what it needs, so that it and others of its kind may be captured into a graph.

    Nothing is enqueued or written. Calls are of one kind where their arrays differ in nothing but addresses, and these
    in multiples of 16 bytes; in the calling thread ops check such calls no more in full. NumPy arrays compile a kernel
    where `gdn.use_backend` names the backend host. `gdn.warmup` is the same function::

        gdn.warmup(gdn.ops.gated_delta_recurrence_fwd, qkv, decay, beta, state, slot_idx, offsets, out=out)

    Args:
        op: a function of this module that runs a kernel.
        *arguments, **keywords: what the op will be called with, ``out`` included where it will be given.

    Raises:
        GdnError: what the op itself would refuse, index values aside, and an op that is none.
        TypeError: arguments are missing or unknown, as for any call.
    """
    rules, given = _rules_of(op, arguments, keywords)
    calls.warmup(rules, *given)


def check_indices(op: Callable[..., Any], /, *arguments: Any, **keywords: Any) -> None:
    """Read the index arrays of a call and raise where a value breaks a rule, naming its position.

    On a GPU an op does not look at index values, because that would wait for the device; this does, and waits::

        gdn.ops.check_indices(gdn.ops.gated_delta_recurrence_fwd, qkv, decay, beta, state, slot_idx, offsets)

    Args:
        op: a function of this module that takes index arrays.
        *arguments, **keywords: what the op would be called with. Nothing is written.

    Raises:
        IndexValueError: a slot or ring row outside its pool, or shared by two live rows (a padding row is not live,
            nor one with nothing to do); an offset below 0, below its predecessor or past total_seq_len.
        GdnError: what the op itself would refuse, and an op that takes no index arrays.
        TypeError: arguments are missing or unknown, as for any call.
    """
    if op is gated_delta_gates:
        raise GdnError(rejection("op", "one that takes index arrays", op.__name__))
    rules, given = _rules_of(op, arguments, keywords)
    rules(*given).check_values()


def _rules_of(
    op: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[Rules, tuple[Any, ...]]:
    """The rules of an op, and what they take for a call of it."""
    call = known_function("op", op, _CALLS)
    bound = inspect.signature(op).bind(*arguments, **keywords)  # puts keywords in the order of the signature
    bound.apply_defaults()
    return call(*bound.arguments.values())


def _plain(rules: Rules, *given: Any) -> tuple[Rules, tuple[Any, ...]]:
    return rules, given


#: Makes of an op's arguments, in the order of its signature, its rules and the arrays that these take.
_CALLS: dict[Callable[..., Any], Callable[..., tuple[Rules, tuple[Any, ...]]]] = {
    gated_delta_conv1d_commit: partial(_plain, commit_rules),
    gated_delta_conv1d_fwd: conv1d_call,
    gated_delta_gates: gate_call,
    gated_delta_recurrence_fwd: fwd_call,
    gated_delta_recurrence_verify_ring: partial(_plain, verify_rules),
    gated_delta_state_fold: partial(_plain, fold_rules),
}
