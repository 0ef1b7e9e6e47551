"""What is timed: calls of `gdn.testing`, each under one of five regimes.

decode   one token of every sequence: `gated_delta_recurrence_fwd`
verify   a speculative window of every sequence: `gated_delta_recurrence_verify_ring`
fold     accepting whole windows in all layers: `gated_delta_state_fold`
step     verify, then fold, as two launches
prefill  long rows, one or many: `gated_delta_recurrence_fwd`
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from gdn.errors import GdnError, rejection
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.catalogue import NAMED_CASES, Case
from gdn.testing.ring_cases import RingCase

REGIMES = ("decode", "verify", "fold", "step", "prefill")
SLOT_ORDERS = ("ordered", "permuted")

#: Sequences of a batch, where none are asked for.
GPU_BATCHES = {"decode": (1, 8, 32, 128, 512), "verify": (1, 8, 64, 256)}
CPU_BATCHES = {"decode": (1, 8), "verify": (1, 4)}
#: Tokens of each row of a prefill, one tuple for each call.
GPU_ROWS = ((512,), (2048,), (8192,), tuple(range(550, 3551, 200)), (512,) * 64)
CPU_ROWS = ((64,), (1, 30, 9, 24))


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A call of `gdn.testing`, and how it is timed.

    slots: "ordered" (neighbouring sequences use neighbouring slots) or "permuted". cold: inputs rotate over sets larger
    than the cache. max_slots: the most slots of the pool, None for as many as the rotation wants.
    """

    regime: str
    call: Case
    slots: str = "ordered"
    cold: bool = True
    max_slots: int | None = None

    @property
    def heads(self) -> HeadGeometry:
        """Heads of the call."""
        return self.call.heads

    @property
    def num_layers(self) -> int:
        """Layers of the call."""
        return self.call.num_layers if isinstance(self.call, RingCase) else 1

    @property
    def batch_size(self) -> int:
        """Sequences of each layer."""
        return len(self.call.lengths)

    @property
    def slots_in_use(self) -> int:
        """Slots that one call names."""
        return self.num_layers * self.batch_size

    @property
    def ring_call(self) -> RingCase:
        """The call of the regimes verify, fold and step."""
        if not isinstance(self.call, RingCase):
            raise TypeError(f"{self.regime} of {self.call.name} has no ring")
        return self.call

    @property
    def recurrence_call(self) -> RecurrenceCase:
        """The call of the regimes decode and prefill."""
        if isinstance(self.call, RingCase):
            raise TypeError(f"{self.regime} of {self.call.name} has a ring")
        return self.call


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """What all cases of a run share. batches and seq_lens: empty for the regime's own."""

    heads: HeadGeometry
    work_dtype: str = "bfloat16"
    state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    window: int = 4
    ring_len: int | None = None
    num_layers: int = 1
    slots: str = "ordered"
    cold: bool = True
    max_slots: int | None = None


def build_cases(regimes: Sequence[str], options: CaseOptions, *, on_gpu: bool) -> list[BenchCase]:
    """The cases of some regimes; small ones for a CPU. Raises GdnError for options that contradict each other."""
    ring_len = options.window if options.ring_len is None else options.ring_len
    if options.window > ring_len:
        raise GdnError(
            rejection("window", f"at most ring_len = {ring_len} tokens, the records of a row", options.window)
        )
    calls: list[tuple[str, Case]] = []
    for state_dtype in options.state_dtypes:
        for regime in regimes:
            if regime == "prefill":
                calls += [(regime, call) for call in _prefill_calls(options, state_dtype, on_gpu)]
            elif regime == "decode":
                calls += [
                    (regime, _decode_call(options, state_dtype, size)) for size in _batches(regime, options, on_gpu)
                ]
            else:
                calls += [
                    (regime, call)
                    for size in _batches(regime, options, on_gpu)
                    for call in _ring_calls(regime, options, state_dtype, size, ring_len)
                ]
    return [_case(regime, call, options) for regime, call in calls]


def named_cases() -> dict[str, Case]:
    """The cases of `gdn verify` that can be timed: dense arrays, ordinary values, a sequence that is alive."""
    return {name: call for name, call in NAMED_CASES.items() if _can_be_timed(call)}


def named_case(name: str, options: CaseOptions) -> BenchCase:
    """A case of `gdn verify` under the regime it belongs to, with the heads and types that it has."""
    call = named_cases()[name]
    if isinstance(call, RingCase):
        return _case("step", call, options)
    return _case("decode" if set(call.lengths) == {1} else "prefill", call, options)


def _can_be_timed(call: Case) -> bool:
    if isinstance(call, RingCase):
        return call.ring_dtype == "float32" and not call.walk_steps
    layouts = {call.qkv_layout, call.gate_layout, call.state_layout, call.index_layout, call.out_layout}
    is_alive = any(length and row not in call.padding for row, length in enumerate(call.lengths))
    return layouts == {"dense"} and call.inputs == "model" and is_alive


def _case(regime: str, call: Case, options: CaseOptions) -> BenchCase:
    case = BenchCase(regime, call, options.slots, options.cold, options.max_slots)
    if options.max_slots is not None and case.slots_in_use > options.max_slots:
        layers = f" of {case.num_layers} layers" if case.num_layers > 1 else ""
        expected = f"at most max_slots = {options.max_slots} sequences{layers}"
        raise GdnError(rejection("batch", expected, case.batch_size))
    return case


def _batches(regime: str, options: CaseOptions, on_gpu: bool) -> tuple[int, ...]:
    defaults = GPU_BATCHES if on_gpu else CPU_BATCHES
    return options.batches or defaults.get(regime, defaults["verify"])


def _decode_call(options: CaseOptions, state_dtype: str, batch_size: int) -> RecurrenceCase:
    return _recurrence_call(f"B={batch_size}", options, state_dtype, (1,) * batch_size)


def _prefill_calls(options: CaseOptions, state_dtype: str, on_gpu: bool) -> list[RecurrenceCase]:
    rows = tuple((length,) for length in options.seq_lens) or (GPU_ROWS if on_gpu else CPU_ROWS)
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


def _ring_calls(regime: str, options: CaseOptions, state_dtype: str, batch_size: int, ring_len: int) -> list[RingCase]:
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
    return [
        RingCase(
            shape,
            options.heads,
            ring_len,
            (window,) * batch_size,
            counts,
            num_layers=layers,
            work_dtype=options.work_dtype,
            state_dtype=state_dtype,
            record_padding=-options.heads.record_elements % 8,
        )
        for shape, counts in accepted.items()
    ]


def partial_acceptance(batch_size: int, window: int) -> tuple[int, ...]:
    """Accepted tokens of each row: every count from 0 to the window in turn, beginning with half the window."""
    return tuple((window // 2 + row) % (window + 1) for row in range(batch_size))
