"""The check of convolutions, commits and gates: the first set against the float64 oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gdn import oracle
from gdn.bench.layer_workload import LayerWorkload
from gdn.bench.places import poison
from gdn.bench.values import bits
from gdn.testing.buffers import Array
from gdn.testing.compare import Comparison, bitwise, close, storage_tolerance

#: Tokens times channels that the oracle runs for one check: about a second.
_ORACLE_COST = 1 << 24


def check_layer(workload: LayerWorkload) -> Iterator[Comparison]:
    """Run the first set, its outputs poisoned. All its sequences go to the oracle, long ones with some channels only.

    Windows hold inputs as they were, so that they must equal the oracle's to the bit.
    """
    call = workload.sets[0]
    for output in call.outputs:
        poison(output)
    regime = workload.case.regime
    yield from {"conv": _check_conv, "commit": _check_commit, "gates": _check_gates}[regime](workload)


def _check_conv(workload: LayerWorkload) -> Iterator[Comparison]:
    call = workload.sets[0]
    qkv, weights, _, slot_idx, offsets = call.arguments
    part = _Part(workload, slot_idx)
    before = part.windows()
    call.run()
    reference, windows = oracle.gated_delta_conv1d_fwd(
        part.channels_of(qkv, 1),
        part.channels_of(weights, 0),
        before,
        part.slots,
        workload.machine.get(offsets),
        activation=call.keywords["activation"],
        write_state=call.keywords["write_state"],
    )
    out = part.channels_of(call.outputs[0], 1)
    yield close(out, reference, storage_tolerance(out.dtype.name), "out")
    yield bitwise(part.windows(), windows.astype(before.dtype), "windows")


def _check_commit(workload: LayerWorkload) -> Iterator[Comparison]:
    call, get = workload.sets[0], workload.machine.get
    qkv, _, slot_idx, offsets, num_accepted = call.arguments
    part = _Part(workload, slot_idx)
    before = part.windows()
    call.run()
    tables = part.slots, get(offsets), get(num_accepted)
    windows = oracle.gated_delta_conv1d_commit(part.channels_of(qkv, 1), before, *tables)
    yield bitwise(part.windows(), windows.astype(before.dtype), "windows")


def _check_gates(workload: LayerWorkload) -> Iterator[Comparison]:
    call, get = workload.sets[0], workload.machine.get
    call.run()
    references = oracle.gated_delta_gates(*(get(argument) for argument in call.arguments))
    for gate, reference, name in zip(call.outputs, references, ("decay", "beta"), strict=True):
        yield close(get(gate), reference, storage_tolerance("float32"), name)


class _Part:
    """The channels of a set that the oracle can afford, spread out; and the set's windows as a pool of their own."""

    def __init__(self, workload: LayerWorkload, slot_idx: Array) -> None:
        self._machine, self._conv_state = workload.machine, workload.conv_state
        places = workload.machine.get(slot_idx).view(np.uint32).astype(np.int64)
        self._places = workload.machine.put(places)
        self.slots = np.arange(len(places), dtype=np.uint32)
        conv_dim = workload.case.heads.conv_dim
        affordable = max(1, _ORACLE_COST // sum(workload.case.call.lengths))
        spread_out = np.linspace(0, conv_dim - 1, min(conv_dim, affordable)).astype(np.int64)
        self._channels = workload.machine.put(spread_out)

    def channels_of(self, array: Array, axis: int) -> Array:
        """Those channels of an array, whose axis of channels is given."""
        return self._machine.get(bits(array).take(self._channels, axis)).view(array.dtype)

    def windows(self) -> Array:
        """Those channels of the set's windows, in the order of its sequences."""
        own = bits(self._conv_state)[self._places].take(self._channels, 1)
        return self._machine.get(own).view(self._conv_state.dtype)
