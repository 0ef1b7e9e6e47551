"""flash-linear-attention (`fla`): recurrent and chunked Gated DeltaNet in Triton.

It has no pool: a call takes the states [batch, num_value_heads, key_head_dim, value_head_dim] and returns new ones, in
float32. It has no rollback either: a verify keeps no state, and accepting runs the accepted tokens again.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from gdn.bench.peers.peer import PeerRefused
from gdn.bench.peers.torch_peer import COMPARED_SEQUENCES, PeerCalls, Tokens, TorchPeer, require_keywords
from gdn.bench.timing import Call
from gdn.bench.workload import Workload

_LEAST_LOG_DECAY = -60.0  # sums of logarithms must stay finite; exp(-60) is no part of any result
_KEYWORDS = ("g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel", "cu_seqlens")


class FlashLinearAttention(TorchPeer):
    """`fused_recurrent_gated_delta_rule` for decode, verify and fold, `chunk_gated_delta_rule` for prefill."""

    name = "fla"

    def __init__(self) -> None:
        super().__init__()
        module = import_module("fla.ops.gated_delta_rule")
        self._recurrent = require_keywords(module.fused_recurrent_gated_delta_rule, *_KEYWORDS)
        self._chunked = require_keywords(module.chunk_gated_delta_rule, *_KEYWORDS)

    def prepare(self, workload: Workload) -> PeerCalls:
        call = workload.case.call
        if call.state_dtype != "float32":
            raise PeerRefused("it keeps states in float32 only")
        if workload.case.slots != "ordered":
            raise PeerRefused("it has no slot tables: time it with ordered slots")
        if call.padding:
            raise PeerRefused("it has no padding rows")
        pool = self.tensor(workload.pool)
        sets = [
            (self.tokens(inputs.windows[0], workload.case.heads), self._states(workload, pool, idx))
            for idx, inputs in enumerate(workload.sets)
        ]
        regime = workload.case.regime
        return (
            self._speculative(workload, sets) if regime in ("verify", "fold", "step") else self._forward(workload, sets)
        )

    def _states(self, workload: Workload, pool: Any, idx: int) -> Any:
        batch_size = workload.case.batch_size
        return pool[idx * batch_size : (idx + 1) * batch_size]

    def _forward(self, workload: Workload, sets: list[tuple[Tokens, Any]]) -> PeerCalls:
        case = workload.case
        function = self._recurrent if case.regime == "decode" else self._chunked
        offsets = None
        if len(set(case.call.lengths)) > 1:
            offsets = self.tensor(workload.sets[0].windows[0].input_row_offsets).long()
        calls = [_Run(function, _shaped(tokens, case.batch_size, offsets), states, offsets) for tokens, states in sets]
        first = calls[0]
        return PeerCalls(
            {case.regime: list[Call](calls)},
            lambda: first.result[0].reshape(-1, case.heads.num_value_heads, case.heads.value_head_dim),
            lambda: first.result[1][:COMPARED_SEQUENCES],
        )

    def _speculative(self, workload: Workload, sets: list[tuple[Tokens, Any]]) -> PeerCalls:
        """A verify without a final state; then, for those that accept something, a run over what they accept."""
        case, call = workload.case, workload.case.ring_call
        verify = [
            _Run(self._recurrent, _shaped(tokens, case.batch_size, None), states, None, keeps_state=False)
            for tokens, states in sets
        ]
        rows, offsets, accepting = self.accepted_rows(call)
        fold = [
            _Run(self._recurrent, _shaped(tokens.rows(rows), 1, offsets), states[accepting].contiguous(), offsets)
            for tokens, states in sets
            if accepting
        ]
        parts: dict[str, list[Call]] = {"verify": list[Call](verify), "fold": list[Call](fold)}
        if case.regime != "step":
            parts = {case.regime: parts[case.regime]}
        elif not accepting:
            raise PeerRefused("where nothing is accepted it has only the verify to run")
        all_accept = accepting[:COMPARED_SEQUENCES] == list(range(min(COMPARED_SEQUENCES, case.batch_size)))
        return PeerCalls(
            parts,
            None
            if case.regime == "fold"
            else lambda: verify[0].result[0].reshape(-1, case.heads.num_value_heads, case.heads.value_head_dim),
            (lambda: fold[0].result[1][:COMPARED_SEQUENCES]) if case.regime != "verify" and all_accept else None,
        )


class _Run:
    """One call with its arguments; what it returned last is kept."""

    def __init__(
        self, function: Any, tokens: tuple[Any, ...], states: Any, offsets: Any, *, keeps_state: bool = True
    ) -> None:
        query, key, value, log_decay, beta = tokens
        self._function = function
        self._tokens = query, key, value
        self._keywords = {
            "g": log_decay,
            "beta": beta,
            "initial_state": states,
            "output_final_state": keeps_state,
            "use_qk_l2norm_in_kernel": True,
            "cu_seqlens": offsets,
        }
        self.result: Any = None

    def __call__(self) -> Any:
        self.result = self._function(*self._tokens, **self._keywords)
        return self.result


def _shaped(tokens: Tokens, batch_size: int, offsets: Any) -> tuple[Any, ...]:
    """Queries, keys, values, logarithms of decays, and betas with a batch axis: one row of all where it is ragged."""
    rows = tokens.batched(1 if offsets is not None else batch_size)
    return rows.query, rows.key, rows.value, rows.decay.log().clamp(min=_LEAST_LOG_DECAY), rows.beta
