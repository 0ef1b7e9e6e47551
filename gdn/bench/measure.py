"""One case on one machine: build, check, time, and what follows from the time."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gdn.bench.build import DoesNotFit, build_workload
from gdn.bench.cases import LAYER_REGIMES, PENDING_REGIMES, BenchCase
from gdn.bench.check import CheckFailed, check_finite, check_workload
from gdn.bench.layer_build import build_layer_workload
from gdn.bench.layer_workload import LayerWorkload
from gdn.bench.loops import loop_tables
from gdn.bench.machine import Machine
from gdn.bench.peers.peer import Peer, PeerRefused
from gdn.bench.timing import Spread, spread
from gdn.bench.traffic import Ceilings, attainable_us, case_bytes, num_tokens, recurrence_flops
from gdn.bench.workload import Workload
from gdn.testing.execute import on_backend

#: The op that a regime calls; a step calls two.
OPS = {
    "decode": "gated_delta_recurrence_fwd",
    "prefill": "gated_delta_recurrence_fwd",
    "verify": "gated_delta_recurrence_verify_ring",
    "fold": "gated_delta_state_fold",
    **dict.fromkeys(PENDING_REGIMES, "gated_delta_recurrence_verify_ring with pending records"),
    "conv": "gated_delta_conv1d_fwd",
    "commit": "gated_delta_conv1d_commit",
    "gates": "gated_delta_gates",
}


def op_of(case: BenchCase, part: str) -> str:
    """The op that a part of a case calls, with its algorithm where it is not the default."""
    return f"{OPS[part]} by {case.algorithm}" if case.is_chunked else OPS[part]


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of one call, and what follows from it.

    parts_us: medians of the launches of a step, each timed alone. percent: of the time in which this machine could move
    the bytes; None for a call that moves none. tokens_per_s and gflop_per_s: of a prefill.
    """

    us: Spread
    parts_us: dict[str, float]
    gb_per_s: float
    attainable_us: float
    percent: float
    tokens_per_s: float | None
    gflop_per_s: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one case. `timing` is None where a check failed, or where there was no room.

    by: the backend, or the package, that ran. problem: why there is no timing. failed: whether a check did.
    """

    case: BenchCase
    by: str
    num_bytes: int
    is_cold: bool
    num_sets: int
    checked: str
    timing: Timing | None = None
    problem: str | None = None
    failed: bool = False

    @property
    def key(self) -> str:
        """What must be equal for two rows to be comparable."""
        heads, call = self.case.heads, self.case.call
        counts = f"{heads.num_key_heads},{heads.num_value_heads}x{heads.key_head_dim},{heads.value_head_dim}"
        temperature = "cold" if self.is_cold else "warm"
        regime = f"{self.case.regime} {self.case.algorithm}" if self.case.is_chunked else self.case.regime
        name = call.name if self.case.ring_len is None else f"{call.name} in a ring of {self.case.ring_len}"
        return " | ".join((self.by, regime, name, counts, call.types(), self.case.slots, temperature))


@dataclass(frozen=True, slots=True)
class Overhead:
    """Python's part of one call in microseconds: of the op with `out` given, and of the same call bound."""

    op_us: float
    bound_us: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """The rows of one case, ours first, then other packages', and Python's part of a call by op."""

    rows: tuple[Row, ...]
    overhead: dict[str, Overhead]


def measure(
    case: BenchCase,
    machine: Machine,
    ceilings: Ceilings,
    repeats: int,
    *,
    with_overhead: bool = False,
    peers: tuple[Peer, ...] = (),
) -> Measurement:
    """Check and time a case; one that fails its check, or that cannot run, is not timed, by nobody."""
    with on_backend(machine.backend):
        try:
            workload = _built(case, machine)
            checked = check_workload(workload)
            timing = _timed(workload, ceilings, repeats)
            check_finite(workload)
            overhead = _overhead(workload) if with_overhead else {}
        except DoesNotFit as refusal:
            return Measurement((_untimed(case, machine.backend, str(refusal)),), {})
        except CheckFailed as failure:
            return Measurement((_untimed(case, machine.backend, str(failure), failed=True),), {})
        except Exception as error:  # whatever it was, a case that cannot run has failed, and must not end the others
            return Measurement((_untimed(case, machine.backend, _in_words(error), failed=True),), {})
        ours = _row(workload, machine.backend, checked, timing)
    if isinstance(workload, LayerWorkload) or case.loop is not None:
        return Measurement((ours,), overhead)  # other packages are timed beside single calls of the recurrence
    theirs = tuple(_peer_row(peer, workload, ceilings, repeats) for peer in peers)
    return Measurement((ours, *theirs), overhead)


def _built(case: BenchCase, machine: Machine) -> Workload | LayerWorkload:
    return (build_layer_workload if case.regime in LAYER_REGIMES else build_workload)(case, machine)


def _timed(workload: Workload | LayerWorkload, ceilings: Ceilings, repeats: int) -> Timing:
    case, machine = workload.case, workload.machine
    if isinstance(workload, LayerWorkload):  # nothing is reset: windows hold inputs, however often a call is repeated
        return timing_of(case, spread(machine.time_us(workload.calls(case.regime), repeats)), {}, ceilings)
    if case.loop is not None:
        return timing_of(case, _step_of_loop(workload, repeats), {}, ceilings)
    mutates = case.regime not in ("verify", "lazy")

    def median_us(part: str) -> Spread:
        return spread(machine.time_us(workload.calls(part), repeats, workload.reset if mutates else None))

    parts = {part: median_us(part).median_us for part in ("verify", "fold")} if case.regime == "step" else {}
    return timing_of(case, median_us(case.regime), parts, ceilings)


def _step_of_loop(workload: Workload, repeats: int) -> Spread:
    """One layer's part of a step: all timed steps of all layers as one call, divided by their number."""
    told = loop_tables(workload.case)
    samples = workload.machine.time_us(
        [lambda: workload.run_loop(slice(told.first_timed, None))], repeats, workload.reset
    )
    return spread([sample / (told.num_timed * len(workload.sets)) for sample in samples])


def timing_of(case: BenchCase, us: Spread, parts_us: dict[str, float], ceilings: Ceilings) -> Timing:
    """What follows from a time."""
    attainable = attainable_us(case, ceilings)
    is_prefill = case.regime == "prefill"
    return Timing(
        us=us,
        parts_us=parts_us,
        gb_per_s=1e-3 * case_bytes(case) / us.median_us,
        attainable_us=attainable,
        percent=100 * attainable / us.median_us,
        tokens_per_s=1e6 * num_tokens(case) / us.median_us if is_prefill else None,
        gflop_per_s=1e-3 * recurrence_flops(case.recurrence_call) / us.median_us if is_prefill else None,
    )


def _row(workload: Workload | LayerWorkload, by: str, checked: str, timing: Timing) -> Row:
    case = workload.case
    return Row(case, by, case_bytes(case), workload.is_cold, len(workload.sets), checked, timing)


def _untimed(case: BenchCase, by: str, problem: str, *, failed: bool = False) -> Row:
    return Row(case, by, case_bytes(case), case.cold, 0, "", None, problem, failed)


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _overhead(workload: Workload | LayerWorkload) -> dict[str, Overhead]:
    """Python's part of one call of each op of the regime, where it can be told apart."""
    regime, machine = workload.case.regime, workload.machine
    found = {}
    for part in ("verify", "fold") if regime == "step" else (regime,):
        op_us = machine.python_overhead_us(workload.calls(part)[0])
        bound_us = machine.python_overhead_us(workload.bound(part))
        if op_us is not None and bound_us is not None:
            found[op_of(workload.case, part)] = Overhead(op_us, bound_us)
    return found


def _peer_row(peer: Peer, workload: Workload, ceilings: Ceilings, repeats: int) -> Row:
    """Check and time another package on the same inputs; whatever goes wrong there is one line of the report."""
    case = replace(workload.case, algorithm=None)  # what it runs is its own choice
    try:
        checked, us, parts = peer.run(workload, repeats)
    except PeerRefused as refusal:
        return _untimed(case, peer.name, str(refusal))
    except Exception as error:  # another package may fail in any way, and must not end the run
        return _untimed(case, peer.name, _in_words(error))
    return replace(_row(workload, peer.name, checked, timing_of(case, us, parts, ceilings)), case=case)
