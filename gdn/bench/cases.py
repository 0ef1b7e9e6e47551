"""What is timed: calls of `gdn.testing`, each under one of ten regimes.

decode   one token of every sequence: `gated_delta_recurrence_fwd`
verify   a speculative window of every sequence: `gated_delta_recurrence_verify_ring`
fold     accepting whole windows in all layers: `gated_delta_state_fold`
fused    a verify that first folds what is pending in another ring row: both in one pass over the states
lazy     a verify behind records that stay pending in its own ring row: the states are only read
step     verify, then fold, as two launches; and steps of a decode loop in its three forms
prefill  long rows, one or many: `gated_delta_recurrence_fwd`
conv     the convolution that makes the channels of a call: `gated_delta_conv1d_fwd`
commit   moving its windows over the tokens that a fold accepts: `gated_delta_conv1d_commit`
gates    decay and step size of a call's tokens: `gated_delta_gates`
"""

from __future__ import annotations

from dataclasses import dataclass

from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.catalogue import Case
from gdn.testing.ring_cases import RingCase

REGIMES = ("decode", "verify", "fold", "fused", "lazy", "step", "prefill", "conv", "commit", "gates")
#: Those whose verify finds records pending.
PENDING_REGIMES = ("fused", "lazy")
#: Those of the ops around the recurrence, which have no states: the call of their cases is the recurrence's.
LAYER_REGIMES = ("conv", "commit", "gates")
#: Taps of the convolution, as published models have them.
CONV_WIDTH = 4
SLOT_ORDERS = ("ordered", "permuted")


@dataclass(frozen=True, slots=True)
class Loop:
    """Steps of a decode loop, of which a row is the average.

    form: what a layer does in a step. "separate": a verify, and its part of one fold of all layers. "fused": a verify
    that folds what the step before left. "lazy": that only when a ring row is full, records staying pending till then.
    accept: the share of a window's tokens that is accepted. min_steps: how many steps are timed at least.
    """

    form: str
    accept: float
    min_steps: int


@dataclass(frozen=True, slots=True)
class BenchCase:
    """A call of `gdn.testing`, and how it is timed.

    slots: "ordered" (neighbouring sequences use neighbouring slots) or "permuted". cold: inputs rotate over sets larger
    than the cache. max_slots: the most slots of the pool, None for as many as the rotation wants. pending: records of
    every sequence that the regimes fused and lazy find. loop: None for a call that is timed alone. algorithm: of a
    prefill; None for what has no choice.
    """

    regime: str
    call: Case
    slots: str = "ordered"
    cold: bool = True
    max_slots: int | None = None
    pending: int = 0
    loop: Loop | None = None
    algorithm: str | None = None

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
    def ring_rows_of_a_sequence(self) -> int:
        """Ring rows that a sequence has in each layer: a second one where its pending records lie apart."""
        return 2 if self.regime == "fused" or (self.loop and self.loop.form != "separate") else 1

    @property
    def moves_windows(self) -> bool:
        """Whether a convolution moves its windows on: not ahead of a verify, whose tokens may be refused."""
        return not isinstance(self.call, RingCase)

    @property
    def form(self) -> str | None:
        """The form of a loop, None for a call that is timed alone."""
        return None if self.loop is None else self.loop.form

    @property
    def is_chunked(self) -> bool:
        """Whether a call may take rows as chunks: it has a workspace then, and a tolerance of its own."""
        return self.algorithm not in (None, "recurrent")

    @property
    def num_folded(self) -> tuple[int, ...]:
        """Records of each sequence that a fold after the call takes: lazily, what was pending too."""
        if not isinstance(self.call, RingCase):
            return ()
        before = self.pending if self.regime == "lazy" else 0
        return tuple(before + count for count in self.call.num_accepted)

    @property
    def ring_len(self) -> int | None:
        """RING_LEN of the call's ring, None where it has no ring."""
        return self.call.ring_len if isinstance(self.call, RingCase) and self.regime not in LAYER_REGIMES else None

    @property
    def ring_call(self) -> RingCase:
        """The call of the regimes that have a ring: verify, fold, fused, lazy and step."""
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
    """What all cases of a run share. batches, seq_lens and ring_lens: empty for the regime's own.

    ring_len: None for as short a ring as a regime needs. pending: None for a default, or fewer where no more fit.
    accept, ring_lens: rates of acceptance, and lengths of ring rows of lazy loops. lazy: decode is timed lazily too.
    algorithm: of every prefill.
    """

    heads: HeadGeometry
    work_dtype: str = "bfloat16"
    state_dtypes: tuple[str, ...] = ("float32", "bfloat16")
    batches: tuple[int, ...] = ()
    seq_lens: tuple[int, ...] = ()
    window: int = 4
    ring_len: int | None = None
    pending: int | None = None
    accept: tuple[float, ...] = (0.0, 0.5, 1.0)
    ring_lens: tuple[int, ...] = ()
    lazy: bool = False
    algorithm: str = "recurrent"
    num_layers: int = 1
    slots: str = "ordered"
    cold: bool = True
    max_slots: int | None = None
