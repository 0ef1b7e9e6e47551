"""What packages on top of PyTorch share: our arrays as tensors, their clock, and the comparison with our results.

A peer never pays for the conversion: its tensors are dense, gates are in its own form, and states have its own layout
before anything is timed.
"""

from __future__ import annotations

import gc
import inspect
import math
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any

import numpy as np

from gdn.bench.cases import PENDING_REGIMES
from gdn.bench.peers.peer import Peer, PeerRefused
from gdn.bench.timing import Call, Spread, spread
from gdn.bench.workload import Window, Workload
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array
from gdn.testing.compare import Tolerance, close
from gdn.testing.ring_cases import RingCase

PEER_TOLERANCE = Tolerance(
    relative_norm=2e-2,
    max_element=6e-2,
    reason=(
        "16-bit queries, keys and gates, tensor cores in places: published kernels were measured at a relative norm of "
        "4e-3; the rest is room for gates that a package takes in bfloat16 and before their nonlinearity"
    ),
)
#: Where tensors that a peer makes for itself live.
DEVICE = "cuda"
_CLOCK_UP_SECONDS = 0.03
_MIN_GRAPH_US = 1000.0
_MAX_ROUNDS = 64
#: Sequences whose states are compared.
COMPARED_SEQUENCES = 3


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens of one set as dense tensors, [total_seq_len, heads, head_dim] and [total_seq_len, num_value_heads]."""

    query: Any
    key: Any
    value: Any
    decay: Any
    beta: Any

    def batched(self, batch_size: int) -> Tokens:
        """The same with axes [batch_size, tokens, ...], for rows of equal length."""
        return Tokens(*(part.unflatten(0, (batch_size, -1)) for part in self._parts()))

    def rows(self, rows: Any) -> Tokens:
        """Some rows of the tokens, copied."""
        return Tokens(*(part[rows].contiguous() for part in self._parts()))

    def _parts(self) -> tuple[Any, ...]:
        return self.query, self.key, self.value, self.decay, self.beta


@dataclass(frozen=True, slots=True)
class PeerCalls:
    """What a peer runs for each set, by part; and how its results are seen after the calls of the first set.

    readout: [total_seq_len, num_value_heads, value_head_dim], None where the regime has none. states: those of the
    first sequences, [sequence, value head, key element, value element].
    """

    parts: dict[str, list[Call]]
    readout: Callable[[], Any] | None
    states: Callable[[], Any] | None


class TorchPeer(Peer):
    """A package whose calls take PyTorch tensors."""

    def __init__(self) -> None:
        """Raises ImportError where PyTorch is not here, PeerRefused where it sees no GPU."""
        self.torch: Any = import_module("torch")
        if not self.torch.cuda.is_available():
            raise PeerRefused("its PyTorch finds no CUDA device")

    @abstractmethod
    def prepare(self, workload: Workload) -> PeerCalls:
        """Tensors and calls for a case. Raises PeerRefused for one that the package has no public call for."""

    def run(self, workload: Workload, repeats: int) -> tuple[str, Spread, dict[str, float]]:
        try:
            with self.torch.no_grad():
                return self._run(workload, repeats)
        finally:
            gc.collect()
            self.torch.cuda.empty_cache()  # the next case counts what is free

    def _run(self, workload: Workload, repeats: int) -> tuple[str, Spread, dict[str, float]]:
        case = workload.case
        if case.regime in PENDING_REGIMES:
            raise PeerRefused("it has no records that could be pending: hold its step against ours")
        if isinstance(case.call, RingCase) and (
            case.call.num_layers > 1 or case.call.padding or case.call.ring_padding
        ):
            raise PeerRefused("timed for one layer without padding rows only")
        if len(set(case.call.lengths)) > 1 and case.regime != "prefill":
            raise PeerRefused("timed for windows of one length only")
        calls = self.prepare(workload)
        self.torch.cuda.synchronize()
        checked = self._check(workload, calls)
        parts = {part: self._spread(calls.parts[part], repeats) for part in calls.parts}
        if case.regime != "step":
            return checked, parts[case.regime], {}
        both = [_in_order(*pair) for pair in zip(calls.parts["verify"], calls.parts["fold"], strict=True)]
        return checked, self._spread(both, repeats), {part: us.median_us for part, us in parts.items()}

    def tensor(self, array: Any) -> Any:
        """A CuPy array as a tensor over the same memory."""
        integers = np.dtype(f"i{array.dtype.itemsize}")
        tensor = self.torch.from_dlpack(array.view(integers))
        return tensor if array.dtype.kind in "iu" else tensor.view(getattr(self.torch, array.dtype.name))

    def tokens(self, window: Window, heads: HeadGeometry) -> Tokens:
        """The tokens of a window, dense; gates in float32.

        All are copies: a row of one token counts as dense where it lies, but not with the strides and the alignment
        that packages compile for.
        """
        qkv = self.tensor(window.qkv_conv_output)
        query, key, value = qkv.split([heads.key_dim, heads.key_dim, heads.value_dim], dim=1)
        return Tokens(
            self.copy(query.unflatten(1, (heads.num_key_heads, -1))),
            self.copy(key.unflatten(1, (heads.num_key_heads, -1))),
            self.copy(value.unflatten(1, (heads.num_value_heads, -1))),
            self.copy(self.tensor(window.decay_per_token).float()),
            self.copy(self.tensor(window.beta_per_token).float()),
        )

    def copy(self, tensor: Any) -> Any:
        """A dense copy, aligned as any allocation is."""
        return tensor.clone(memory_format=self.torch.contiguous_format)

    def accepted_rows(self, call: RingCase) -> tuple[Any, Any, list[int]]:
        """Rows of the tokens that are accepted, their prefix table, and the sequences that accept something."""
        counts = np.asarray(call.num_accepted, np.int64)
        starts = np.cumsum(call.lengths, dtype=np.int64) - np.asarray(call.lengths, np.int64)
        rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
        accepting = np.flatnonzero(counts)
        offsets = np.cumsum([0, *counts[accepting]])
        return self.index(rows), self.index(offsets), [int(sequence) for sequence in accepting]

    def index(self, values: Any) -> Any:
        """Positions as a tensor."""
        return self.torch.as_tensor(np.asarray(values, np.int64), device=DEVICE)

    # ---- Checking ----

    def _check(self, workload: Workload, calls: PeerCalls) -> str:
        """Run the peer's first set, then ours from the same states, and compare."""
        case, get = workload.case, workload.machine.get
        for part in calls.parts.values():
            part[0]()
        readout = None if calls.readout is None else self._array(calls.readout())
        states = None if calls.states is None else self._array(calls.states())
        workload.machine.get(workload.pool[:1])  # waits
        if case.regime == "fold":
            workload.verify(workload.sets[0])  # leaves the records of these very tokens
        workload.calls(case.regime)[0]()
        window, words = workload.sets[0].windows[0], []
        if readout is not None:
            ours = get(window.out).reshape(readout.shape)
            words.append(self._compared(readout, ours, "readout"))
        if states is not None:
            slots = get(window.slot_idx).view(np.uint32)[: len(states)]
            ours = np.stack([get(workload.pool[int(slot)]) for slot in slots if slot != PAD_SLOT])
            words.append(self._compared(states, ours, "state"))
        return ", ".join(words)

    def _compared(self, theirs: Array, ours: Array, name: str) -> str:
        comparison = close(theirs, ours.astype(np.float32), PEER_TOLERANCE, name)
        if not comparison.passed:
            raise PeerRefused(f"its results differ from ours: {comparison.message}")
        return f"{name} {comparison.measure} of ours"

    def _array(self, tensor: Any) -> Array:
        result: Array = tensor.float().cpu().numpy()
        return result

    # ---- Timing ----

    def _spread(self, calls: Sequence[Call], repeats: int) -> Spread:
        """As our own are timed: a CUDA graph of all sets, replayed back to back between events."""
        once = min(self._replays_us(self._capture(calls, 1), 3))
        rounds = min(max(math.ceil(_MIN_GRAPH_US / max(once, 1e-3)), 1), _MAX_ROUNDS)
        graph = self._capture(calls, rounds)
        start = time.perf_counter()
        while time.perf_counter() - start < _CLOCK_UP_SECONDS:
            graph.replay()
            self.torch.cuda.synchronize()
        return spread([replay / (rounds * len(calls)) for replay in self._replays_us(graph, repeats)])

    def _capture(self, calls: Sequence[Call], rounds: int) -> Any:
        side = self.torch.cuda.Stream()
        side.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(side):  # compiles and tunes, which a capture forbids
            for call in calls:
                call()
        self.torch.cuda.synchronize()
        graph = self.torch.cuda.CUDAGraph()
        # Results of a whole round are kept, so that they are not written to one cached place over and over.
        kept: deque[object] = deque(maxlen=len(calls))
        with self.torch.cuda.graph(graph):
            for _ in range(rounds):
                for call in calls:
                    kept.append(call())
        return graph

    def _replays_us(self, graph: Any, repeats: int) -> list[float]:
        events = [self.torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
        graph.replay()
        events[0].record()
        for event in events[1:]:
            graph.replay()
            event.record()
        self.torch.cuda.synchronize()
        return [1e3 * begin.elapsed_time(end) for begin, end in pairwise(events)]


def _in_order(first: Call, second: Call) -> Call:
    return lambda: (first(), second())


def require_keywords(function: Any, *keywords: str) -> Any:
    """The function, if its signature has the keywords. Raises PeerRefused where it does not."""
    missing = missing_keywords(function, *keywords)
    if missing:
        raise PeerRefused(f"its {function.__name__} takes no {', '.join(missing)}")
    return function


def missing_keywords(function: Any, *keywords: str) -> list[str]:
    """Those of the keywords that the function does not take."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [keyword for keyword in keywords if keyword not in parameters]
