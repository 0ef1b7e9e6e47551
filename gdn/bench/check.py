"""The check that a workload must pass before it is timed, on the very arrays that are timed.

A readout and the states behind it are compared with the float64 oracle, for some sequences and heads: a wrong kernel is
wrong in all of them, and `gdn verify` is there for the rest. Verify and fold must then agree with forward calls to the
bit (promises E1 and E2), over every sequence, head and layer of the first set; so must calls with pending records. The
ops around the recurrence are held against the oracle alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gdn.bench.cases import PENDING_REGIMES
from gdn.bench.check_layer import check_layer
from gdn.bench.check_loop import check_loop
from gdn.bench.check_pending import check_pending
from gdn.bench.layer_workload import LayerWorkload
from gdn.bench.loops import loop_tables
from gdn.bench.oracle_check import check_forward
from gdn.bench.places import Places, accepted, poison
from gdn.bench.workload import Workload
from gdn.errors import GdnError
from gdn.testing.compare import Comparison, bitwise
from gdn.testing.ring_cases import RingCase

_LOOKED_AT = 32  # slots and sets, after the timing


class CheckFailed(GdnError):
    """A case gave wrong results, so it is not timed."""


def check_workload(workload: Workload | LayerWorkload) -> str:
    """Check the first set; returns what was compared, in a few words.

    Leaves records in every ring row of the workload, and a loop where its timed steps begin. Raises
    CheckFailed with the first comparison that did not pass.
    """
    if isinstance(workload, LayerWorkload):
        words = [_passed(comparison) for comparison in check_layer(workload)]
    elif workload.case.loop is not None:
        words = [_passed(comparison) for comparison in check_loop(workload)]
        workload.run_loop(slice(loop_tables(workload.case).first_timed))
    elif isinstance(workload.case.call, RingCase):
        check = check_pending if workload.case.regime in PENDING_REGIMES else _check_ring
        words = [_passed(comparison) for comparison in check(workload)]
        workload.repeat_records()
    else:
        window = workload.sets[0].windows[0]
        words = [_passed(comparison) for comparison in check_forward(workload, window, workload.pool)]
    return ", ".join(dict.fromkeys(words))


def check_finite(workload: Workload | LayerWorkload) -> None:
    """After the timing: what was computed and some states, or windows, are finite. Raises CheckFailed."""
    if isinstance(workload, LayerWorkload):
        arrays = [] if workload.conv_state is None else [workload.conv_state[:_LOOKED_AT]]
        arrays += [output for call in workload.sets[:_LOOKED_AT] for output in call.outputs]
    else:
        arrays = [workload.pool[:_LOOKED_AT]]
        arrays += [window.out for inputs in workload.sets[:_LOOKED_AT] for window in inputs.windows]
    for array in arrays:
        if not np.isfinite(workload.machine.get(array).astype(np.float32)).all():
            raise CheckFailed(f"{workload.case.call.name}: an output or state is not finite after the timing")


def _passed(comparison: Comparison) -> str:
    if not comparison.passed:
        raise CheckFailed(comparison.message)
    promise, is_promise, _ = comparison.name.partition(":")
    return promise if is_promise else f"{comparison.name} {comparison.measure}"


def _check_ring(workload: Workload) -> Iterator[Comparison]:
    """E1 and E2 on the first set, and forward itself against the oracle. Advances the set's states by one fold."""
    inputs, get = workload.sets[0], workload.machine.get
    places = Places(workload)
    scratch = places.new_scratch()
    places.gather(scratch)
    for window in inputs.windows:
        poison(window.out)
    workload.verify(inputs)
    yield places.compare(scratch, places.in_window, "E1: states after verify")
    readouts = [get(window.out) for window in inputs.windows]
    for layer, window in enumerate(inputs.windows):
        plain = places.on_scratch(window, layer)
        if layer == 0:
            yield from check_forward(workload, plain, scratch)
        else:
            workload.forward(plain, scratch)
        yield bitwise(get(plain.out), readouts[layer], "E1: readout of verify against forward")
    yield places.compare(scratch, places.too_long, "E1: states of rows longer than the ring")
    if workload.case.regime == "verify":
        return
    places.gather(scratch)
    for layer, window in enumerate(inputs.windows):
        kept = accepted(workload, places.on_scratch(window, layer))
        if kept is not None:
            workload.forward(kept, scratch)
    workload.fold(inputs)
    yield places.compare(scratch, places.live, "E2: states after fold against forward")
