"""Which cases a run times: those of a regime, and cases of `gdn verify` by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from gdn.backends.chunk_layout import unserved_reason
from gdn.bench.cases import LAYER_REGIMES, PENDING_REGIMES, BenchCase, CaseOptions, Loop
from gdn.errors import GdnError, ShapeError, rejection
from gdn.ring import MAX_RING_LEN
from gdn.testing.cases import RecurrenceCase
from gdn.testing.catalogue import NAMED_CASES, Case
from gdn.testing.ring_cases import RingCase

#: Sequences of a batch, where none are asked for.
GPU_BATCHES = {"decode": (1, 8, 32, 128, 512), "verify": (1, 8, 64, 256)}
CPU_BATCHES = {"decode": (1, 8), "verify": (1, 4)}
#: Records of a ring row of a lazy loop, and the least steps of any loop.
GPU_RING_LENS, CPU_RING_LENS = (8, 16, 32), (8,)
_GPU_STEPS, _CPU_STEPS = 48, 4
#: Records that are pending, where no number is given.
PENDING = 4
#: Tokens of each row of a prefill, one tuple for each call.
GPU_ROWS: tuple[tuple[int, ...], ...] = ((512,), (2048,), (8192,), tuple(range(550, 3551, 200)), (512,) * 64)
CPU_ROWS: tuple[tuple[int, ...], ...] = ((64,), (1, 30, 9, 24))
#: The same and longer ones, for which the token loop takes too long.
GPU_CHUNKED_ROWS = (*GPU_ROWS[:3], (32768,), *GPU_ROWS[3:])
CPU_CHUNKED_ROWS = ((64,), (192,), (1, 30, 9, 24))


def build_cases(regimes: Sequence[str], options: CaseOptions, *, on_gpu: bool) -> list[BenchCase]:
    """The cases of some regimes; small ones for a CPU. Raises GdnError for options that contradict each other."""
    ring_len = options.window if options.ring_len is None else options.ring_len
    if ring_len > MAX_RING_LEN:
        name = "window" if options.ring_len is None else "ring_len"
        raise GdnError(rejection(name, f"at most {MAX_RING_LEN}, the longest ring", ring_len))
    if options.window > ring_len:
        raise GdnError(
            rejection("window", f"at most ring_len = {ring_len} tokens, the records of a row", options.window)
        )
    if max(options.ring_lens, default=0) > MAX_RING_LEN:
        raise GdnError(rejection("ring_lens", f"at most {MAX_RING_LEN}, the longest ring", max(options.ring_lens)))
    cases = [
        case
        for state_dtype in options.state_dtypes
        for regime in regimes
        if regime not in LAYER_REGIMES
        for case in _cases_of(regime, options, state_dtype, on_gpu)
    ]
    for regime in regimes:
        if regime in LAYER_REGIMES:
            cases += [_case(regime, call, options) for call in _layer_calls(regime, options, on_gpu)]
    for case in cases:
        _require_slots(case)
    return cases


def _cases_of(regime: str, options: CaseOptions, state_dtype: str, on_gpu: bool) -> Iterator[BenchCase]:
    if regime == "prefill":
        rows = _rows(on_gpu)
        if options.algorithm != "recurrent":
            rows = GPU_CHUNKED_ROWS if on_gpu else CPU_CHUNKED_ROWS
        yield from (_case(regime, call, options) for call in _prefill_calls(options, state_dtype, rows))
        return
    for size in _batches(regime, options, on_gpu):
        if regime == "decode":
            yield _case(regime, _decode_call(options, state_dtype, size), options)
            if options.lazy:
                yield from _lazy_decode_cases(options, state_dtype, size, on_gpu)
        elif regime in PENDING_REGIMES:
            yield _pending_case(regime, options, state_dtype, size)
        else:
            yield from (_case(regime, call, options) for call in _ring_calls(regime, options, state_dtype, size))
            if regime == "step":
                yield from _loop_cases(options, state_dtype, size, on_gpu)


def _layer_calls(regime: str, options: CaseOptions, on_gpu: bool) -> Iterator[Case]:
    """The calls of the recurrence beside which an op of a layer runs; its windows are of the work type, as engines
    keep them, whatever the type of the states.

    conv: those of decode, verify and prefill. commit: one layer's part of a fold. gates: those of decode and prefill.
    """
    work_dtype, one_layer = options.work_dtype, replace(options, num_layers=1)
    if regime != "commit":
        for size in _batches("decode", options, on_gpu):
            yield _decode_call(options, work_dtype, size)
    if regime != "gates":
        beside = "fold" if regime == "commit" else "verify"
        for size in _batches(beside, options, on_gpu):
            yield from _ring_calls(beside, one_layer, work_dtype, size)
    if regime != "commit":
        yield from _prefill_calls(options, work_dtype, _rows(on_gpu))


def named_cases() -> dict[str, Case]:
    """The cases of `gdn verify` that can be timed: dense arrays, ordinary values, a sequence that is alive."""
    return {name: call for name, call in NAMED_CASES.items() if _can_be_timed(call)}


def named_case(name: str, options: CaseOptions) -> BenchCase:
    """A case of `gdn verify` under the regime it belongs to, with the heads and types that it has."""
    call = named_cases()[name]
    regime = "step" if isinstance(call, RingCase) else "decode" if set(call.lengths) == {1} else "prefill"
    case = _case(regime, call, options)
    _require_slots(case)
    return case


def _can_be_timed(call: Case) -> bool:
    if isinstance(call, RingCase):
        return call.ring_dtype == "float32" and not call.walk_steps
    layouts = {call.qkv_layout, call.gate_layout, call.state_layout, call.index_layout, call.out_layout}
    is_alive = any(length and row not in call.padding for row, length in enumerate(call.lengths))
    return layouts == {"dense"} and call.inputs == "model" and is_alive


def _case(regime: str, call: Case, options: CaseOptions) -> BenchCase:
    algorithm = options.algorithm if regime == "prefill" else None
    reason = unserved_reason(call.heads) if algorithm == "chunked" else None
    if reason is not None:
        raise ShapeError(reason)
    return BenchCase(regime, call, options.slots, options.cold, options.max_slots, algorithm=algorithm)


def _require_slots(case: BenchCase) -> None:
    if case.max_slots is not None and case.slots_in_use > case.max_slots:
        layers = f" of {case.num_layers} layers" if case.num_layers > 1 else ""
        expected = f"at most max_slots = {case.max_slots} sequences{layers}"
        raise GdnError(rejection("batch", expected, case.batch_size))


def _batches(regime: str, options: CaseOptions, on_gpu: bool) -> tuple[int, ...]:
    defaults = GPU_BATCHES if on_gpu else CPU_BATCHES
    return options.batches or defaults.get(regime, defaults["verify"])


def _decode_call(options: CaseOptions, state_dtype: str, batch_size: int) -> RecurrenceCase:
    return _recurrence_call(f"B={batch_size}", options, state_dtype, (1,) * batch_size)


def _rows(on_gpu: bool) -> tuple[tuple[int, ...], ...]:
    return GPU_ROWS if on_gpu else CPU_ROWS


def _prefill_calls(options: CaseOptions, state_dtype: str, rows: tuple[tuple[int, ...], ...]) -> list[RecurrenceCase]:
    """The rows that are asked for, else these."""
    rows = tuple((length,) for length in options.seq_lens) or rows
    return [_recurrence_call(rows_in_words(lengths), options, state_dtype, lengths) for lengths in rows]


def rows_in_words(lengths: Sequence[int]) -> str:
    """Rows of equal length as 64 x 512, others by their number and their tokens."""
    runs = [(length, len(list(equal))) for length, equal in groupby(lengths)]
    if len(runs) == 1:
        return f"{runs[0][1]} x {runs[0][0]}"
    return f"{len(lengths)} ragged, {sum(lengths)} tokens"


def _recurrence_call(name: str, options: CaseOptions, state_dtype: str, lengths: tuple[int, ...]) -> RecurrenceCase:
    work_dtype = options.work_dtype
    return RecurrenceCase(
        name,
        options.heads,
        lengths,
        work_dtype=work_dtype,
        state_dtype=state_dtype,
        out_dtype=work_dtype,
        spare_slots=0,
    )


def _ring_calls(regime: str, options: CaseOptions, state_dtype: str, batch_size: int) -> list[RingCase]:
    """Verify and fold once, the fold accepting all; step at every acceptance."""
    window, full = options.window, (options.window,) * batch_size
    layers = options.num_layers if regime == "fold" else 1
    name = f"B={batch_size} T={window}"
    if regime == "fold":
        accepted = {f"B={batch_size} n={window}" + (f" layers={layers}" if layers > 1 else ""): full}
    elif regime == "verify":
        accepted = {name: full}
    else:
        accepted = {
            f"{name} accept none": (0,) * batch_size,
            f"{name} accept some": partial_acceptance(batch_size, window),
            f"{name} accept all": full,
        }
    ring_len = options.ring_len or window
    return [
        replace(_windows(shape, options, state_dtype, batch_size, ring_len), num_accepted=counts, num_layers=layers)
        for shape, counts in accepted.items()
    ]


def _windows(name: str, options: CaseOptions, state_dtype: str, batch_size: int, ring_len: int) -> RingCase:
    """A full window of every sequence of one layer, all of it accepted, records aligned."""
    full = (options.window,) * batch_size
    return RingCase(
        name,
        options.heads,
        ring_len,
        full,
        full,
        num_layers=1,
        work_dtype=options.work_dtype,
        state_dtype=state_dtype,
        record_padding=-options.heads.record_elements % 8,
    )


def _pending_case(regime: str, options: CaseOptions, state_dtype: str, batch_size: int) -> BenchCase:
    """A window that finds records pending, in a ring that has just room for both unless its length is given.

    Raises GdnError for more records than fit.
    """
    window, ring_len = options.window, options.ring_len or MAX_RING_LEN
    room = ring_len - window if regime == "lazy" else ring_len
    pending = min(PENDING, room) if options.pending is None else options.pending
    if pending > room:
        ahead = f" ahead of a window of {window}" if regime == "lazy" else ""
        raise GdnError(rejection("pending", f"at most {room} records, in a ring of {ring_len}{ahead}", pending))
    needed = pending + window if regime == "lazy" else max(pending, window)
    name = f"B={batch_size} T={window} n={pending}"
    call = _windows(name, options, state_dtype, batch_size, options.ring_len or needed)
    return replace(_case(regime, call, options), pending=pending)


def _ring_lens(options: CaseOptions, *, on_gpu: bool) -> tuple[int, ...]:
    """Lengths of ring rows that lazy loops are asked for."""
    return options.ring_lens or (GPU_RING_LENS if on_gpu else CPU_RING_LENS)


def too_short_ring_lens(options: CaseOptions, *, on_gpu: bool) -> tuple[int, ...]:
    """Those that hold no window, and so have no loop."""
    return tuple(length for length in _ring_lens(options, on_gpu=on_gpu) if length < options.window)


def _loop_cases(options: CaseOptions, state_dtype: str, batch_size: int, on_gpu: bool) -> Iterator[BenchCase]:
    """Every form at every rate of acceptance; lazily for every ring that holds a window.

    Where nothing is accepted nothing is ever pending, so that one ring stands for all.
    """
    window, min_steps = options.window, _GPU_STEPS if on_gpu else _CPU_STEPS
    ring_lens = [length for length in _ring_lens(options, on_gpu=on_gpu) if length >= window]
    for accept in options.accept:
        lazy = [("lazy", length) for length in (ring_lens if accept else ring_lens[:1])]
        forms = [("separate", window), ("fused", window), *lazy]
        for form, ring_len in forms:
            words = f"{form} {ring_len}" if form == "lazy" else form
            name = f"B={batch_size} T={window} accept {accept:g} {words}"
            call = _windows(name, options, state_dtype, batch_size, ring_len)
            yield replace(_case("step", call, options), loop=Loop(form, accept, min_steps))


def _lazy_decode_cases(options: CaseOptions, state_dtype: str, batch_size: int, on_gpu: bool) -> Iterator[BenchCase]:
    """Windows of one token that is always accepted."""
    one_token = replace(options, window=1)
    for ring_len in _ring_lens(options, on_gpu=on_gpu):
        call = _windows(f"B={batch_size} lazy {ring_len}", one_token, state_dtype, batch_size, ring_len)
        yield replace(_case("decode", call, options), loop=Loop("lazy", 1.0, _GPU_STEPS if on_gpu else _CPU_STEPS))


def partial_acceptance(batch_size: int, window: int) -> tuple[int, ...]:
    """Accepted tokens of each row: every count from 0 to the window in turn, beginning with half the window."""
    return tuple((window // 2 + row) % (window + 1) for row in range(batch_size))
