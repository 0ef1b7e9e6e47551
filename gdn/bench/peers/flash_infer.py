"""FlashInfer (`flashinfer`): decode, multi-token verify and chunked prefill for GPUs from sm_90 on.

States lie as [slot, num_value_heads, value_head_dim, key_head_dim]. Gates are taken before their nonlinearity: with
A_log = 0 and dt_bias = 0 its decay is exp(-softplus(a)) and its beta sigmoid(b), from which a and b follow. A verify
leaves a snapshot of the state after every token, and accepting copies one of them into the pool. On a pool of bfloat16
the decode call is also the one that verifies, in the versions in which it takes a buffer for snapshots.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np

from gdn.bench.peers.peer import PeerRefused
from gdn.bench.peers.torch_peer import (
    COMPARED_SEQUENCES,
    DEVICE,
    PeerCalls,
    Tokens,
    TorchPeer,
    missing_keywords,
    require_keywords,
)
from gdn.bench.timing import Call
from gdn.bench.workload import Workload
from gdn.testing.ring_cases import RingCase

_HEAD_DIM = 128  # the least that its decode takes, and the only one that all of its calls take
_SNAPSHOT_KEYWORDS = ("intermediate_states_buffer", "disable_state_update")


class FlashInfer(TorchPeer):
    """`gated_delta_rule_decode_pretranspose`, `gated_delta_rule_mtp` and `chunk_gated_delta_rule`."""

    name = "flashinfer"

    def __init__(self) -> None:
        super().__init__()
        decode = import_module("flashinfer.gdn_decode")
        self._decode = require_keywords(
            decode.gated_delta_rule_decode_pretranspose, "initial_state", "initial_state_indices", "output"
        )
        self._verify = require_keywords(decode.gated_delta_rule_mtp, *_SNAPSHOT_KEYWORDS, "output")
        self._prefill = require_keywords(
            import_module("flashinfer.gdn_prefill").chunk_gated_delta_rule, "output_state", "cu_seqlens", "g"
        )

    def prepare(self, workload: Workload) -> PeerCalls:
        case, call = workload.case, workload.case.call
        if (case.heads.key_head_dim, case.heads.value_head_dim) != (_HEAD_DIM, _HEAD_DIM):
            raise PeerRefused(f"timed for heads of {_HEAD_DIM},{_HEAD_DIM} only")
        if call.work_dtype == "float32":
            raise PeerRefused("it takes queries, keys and values of 16 bits only")
        if call.padding:
            raise PeerRefused("timed without padding rows only")
        if call.state_dtype not in ("float32", "bfloat16"):
            raise PeerRefused("it keeps states in float32 or bfloat16 only")
        if case.regime == "prefill" and call.state_dtype != "float32":
            raise PeerRefused("timed for prefill on a pool of float32 only")
        prepare = {"decode": self._decode_calls, "prefill": self._prefill_calls}.get(case.regime, self._step_calls)
        return prepare(workload)

    def _pool(self, workload: Workload) -> Any:
        """A pool of its own, keys last."""
        return self.tensor(workload.pool).transpose(-1, -2).contiguous()

    def _gates(self, tokens: Tokens) -> dict[str, Any]:
        """Its four gate arguments, with values that give our decay and beta."""
        torch, num_heads = self.torch, tokens.decay.shape[-1]
        log_decay = tokens.decay.double().log().clamp(min=-60.0, max=-1e-8)
        zeros = torch.zeros(num_heads, dtype=torch.float32, device=DEVICE)
        a = torch.log(torch.expm1(-log_decay))
        b = torch.logit(tokens.beta.double(), eps=1e-6)
        work = tokens.query.dtype
        return {"A_log": zeros, "a": a.to(work).contiguous(), "dt_bias": zeros, "b": b.to(work).contiguous()}

    def _empty_readout(self, tokens: Tokens) -> Any:
        return self.torch.empty_like(tokens.value)

    def _slots(self, workload: Workload, idx: int) -> Any:
        """Copied: its kernels want more than the alignment of one slot of a table."""
        return self.copy(self.tensor(workload.sets[idx].windows[0].slot_idx).int())

    def _decode_calls(self, workload: Workload) -> PeerCalls:
        case, pool = workload.case, self._pool(workload)
        calls, outs = [], []
        for idx, inputs in enumerate(workload.sets):
            tokens = self.tokens(inputs.windows[0], case.heads).batched(case.batch_size)
            outs.append(self._empty_readout(tokens))
            calls.append(
                _bound(
                    self._decode,
                    q=tokens.query,
                    k=tokens.key,
                    v=tokens.value,
                    state=None,
                    output=outs[-1],
                    initial_state=pool,
                    initial_state_indices=self._slots(workload, idx),
                    **self._gates(tokens),
                )
            )
        return PeerCalls({"decode": calls}, lambda: _flat(outs[0]), lambda: _keys_first(pool, self._slots(workload, 0)))

    def _step_calls(self, workload: Workload) -> PeerCalls:
        """Verify with a snapshot of every token, and the copy of the snapshot that was accepted."""
        case, call = workload.case, workload.case.ring_call
        function, keywords = self._verifier(call.state_dtype)
        pool = self._pool(workload)
        verify, fold, outs = [], [], []
        for idx, inputs in enumerate(workload.sets):
            tokens = self.tokens(inputs.windows[0], case.heads).batched(case.batch_size)
            slots = self._slots(workload, idx)
            shape = (case.batch_size, call.lengths[0], *pool.shape[1:])
            snapshots = self.torch.empty(shape, dtype=pool.dtype, device=DEVICE)
            outs.append(self._empty_readout(tokens))
            verify.append(
                _bound(
                    function,
                    q=tokens.query,
                    k=tokens.key,
                    v=tokens.value,
                    initial_state=pool,
                    initial_state_indices=slots,
                    output=outs[-1],
                    intermediate_states_buffer=snapshots,
                    disable_state_update=True,
                    **keywords,
                    **self._gates(tokens),
                )
            )
            fold.append(self._copy_of_snapshots(workload, pool, slots, snapshots, idx))
        parts: dict[str, list[Call]] = {"verify": verify, "fold": fold}
        if case.regime == "verify":
            parts = {"verify": verify}
        elif case.regime == "fold":
            for each in verify:  # leaves the snapshots
                each()
            parts = {"fold": fold}
        return PeerCalls(
            parts,
            None if case.regime == "fold" else lambda: _flat(outs[0]),
            None if case.regime == "verify" else lambda: _keys_first(pool, self._slots(workload, 0)),
        )

    def _verifier(self, state_dtype: str) -> tuple[Any, dict[str, Any]]:
        """Its call that verifies on a pool of some type, and what that call wants beside the arguments of both."""
        if state_dtype == "float32":
            return self._verify, {}
        if missing_keywords(self._decode, *_SNAPSHOT_KEYWORDS):
            raise PeerRefused(f"this version has no public call for a verify on a pool of {state_dtype}")
        return self._decode, {"state": None}

    def _copy_of_snapshots(self, workload: Workload, pool: Any, slots: Any, snapshots: Any, idx: int) -> Call:
        """Into neighbouring slots straight from the buffer, else through a temporary array, as PyTorch does it."""
        case, call = workload.case, workload.case.ring_call
        sources, sequences = self._snapshots_accepted(call)
        flat = snapshots.flatten(0, 1)
        if case.slots == "ordered" and len(sequences) == case.batch_size:
            target = pool[idx * case.batch_size : (idx + 1) * case.batch_size]
            return lambda: self.torch.index_select(flat, 0, sources, out=target)
        targets = slots.long()[sequences]
        return lambda: pool.index_copy_(0, targets, flat.index_select(0, sources))

    def _snapshots_accepted(self, call: RingCase) -> tuple[Any, Any]:
        """Of each sequence that accepts something: which of all snapshots, and which sequence."""
        counts = np.asarray(call.num_accepted, np.int64)
        sequences = np.flatnonzero(counts)
        sources = sequences * call.lengths[0] + counts[sequences] - 1
        return self.index(sources), self.index(sequences)

    def _prefill_calls(self, workload: Workload) -> PeerCalls:
        """Queries and keys are normalised beforehand, which its kernel for sm_90 expects, and not timed."""
        case, torch = workload.case, self.torch
        offsets = self.tensor(workload.sets[0].windows[0].input_row_offsets).long()
        calls, outs, states_after = [], [], []
        pool = self._pool(workload)
        for idx, inputs in enumerate(workload.sets):
            tokens = self.tokens(inputs.windows[0], case.heads)
            states = pool[self._slots(workload, idx).long()].contiguous()
            outs.append(self._empty_readout(tokens))
            states_after.append(torch.empty_like(states))
            calls.append(
                _bound(
                    self._prefill,
                    q=torch.nn.functional.normalize(tokens.query.float(), dim=-1).to(tokens.query.dtype),
                    k=torch.nn.functional.normalize(tokens.key.float(), dim=-1).to(tokens.key.dtype),
                    v=tokens.value,
                    g=tokens.decay,
                    beta=tokens.beta,
                    initial_state=states,
                    output_final_state=True,
                    cu_seqlens=offsets,
                    use_qk_l2norm_in_kernel=False,
                    output=outs[-1],
                    output_state=states_after[-1],
                )
            )
        return PeerCalls(
            {"prefill": calls}, lambda: outs[0], lambda: states_after[0][:COMPARED_SEQUENCES].transpose(-1, -2)
        )


def _bound(function: Any, **keywords: Any) -> Call:
    return lambda: function(**keywords)


def _flat(readout: Any) -> Any:
    """[batch, tokens, heads, head_dim] without its batch axis."""
    return readout.flatten(0, 1)


def _keys_first(pool: Any, slots: Any) -> Any:
    return pool[slots.long()[:COMPARED_SEQUENCES]].transpose(-1, -2)
