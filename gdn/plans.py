"""Plans: what is known of a call on CuPy arrays because one of its kind passed every check and ran.

Calls are of one kind where their arrays differ in nothing but addresses. The kind decides almost everything: whether a
call is right, which kernel runs, and with which arguments. A plan holds that. A call that has one is only checked for
what it writes lying apart from the rest, and puts its addresses into the launch.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from gdn.arrays import Argument
from gdn.backends.cuda import ReadyLaunch

#: Plans of one thread. Beyond that it begins anew: most calls of a program are like one of a few.
MAX_PLANS = 1024


@dataclass(frozen=True, slots=True)
class Plan:
    """What calls of one kind need to run, but for addresses.

    launch: that of the call before. places: a parameter of it, and the position in the call of the array whose address
    it takes. too_near: positions of an array that is written and of another, and two distances from the address of the
    first to that of the second, between which the two might overlap.
    """

    launch: ReadyLaunch
    places: tuple[tuple[int, int], ...]
    too_near: tuple[tuple[int, int, int, int], ...]

    def takes(self, addresses: Sequence[int]) -> bool:
        """Whether arrays at these addresses are surely apart where they must be."""
        for written, other, low, high in self.too_near:
            if low < addresses[other] - addresses[written] < high:
                return False
        return True

    def run(self, addresses: Sequence[int]) -> None:
        """Enqueue the call for arrays at these addresses, which the plan takes."""
        arguments = self.launch.arguments
        for parameter, position in self.places:
            arguments[parameter] = addresses[position]
        self.launch()


class _Plans(threading.local):
    """Plans of each thread, since a plan's launch is written to before it is enqueued."""

    def __init__(self) -> None:
        self.by_kind: dict[Hashable, Plan] = {}


_plans = _Plans()


def find(kind: Hashable) -> Plan | None:
    """The plan for calls of this kind."""
    return _plans.by_kind.get(kind)


def keep(
    kind: Hashable,
    launch: ReadyLaunch,
    arguments: Sequence[Argument | None],
    written: Sequence[Argument],
) -> None:
    """Make a plan of a call that passed every check.

    Args:
        kind: all that its checks and its launch depend on, but the addresses of its arrays.
        launch: its launch.
        arguments: its arrays, in the order of the call; None for one that was left out.
        written: those that it writes, which the checks found apart from all others.

    A launch that takes an address of anything else makes no plan.
    """
    arrays = {argument.name: (position, argument) for position, argument in enumerate(arguments) if argument}
    places = []
    for parameter, (name, of_type) in enumerate(launch.launch.variant.kernel.parameters):
        if of_type != "pointer":
            continue
        address = launch.launch.arguments[parameter]
        position, argument = arrays.get(name, (0, None))
        if argument is None and address == 0:  # of an array that such calls leave out
            continue
        if argument is None or address != argument.pointer:
            return
        places.append((parameter, position))
    if len(_plans.by_kind) >= MAX_PLANS:
        _plans.by_kind.clear()
    _plans.by_kind[kind] = Plan(launch, tuple(places), tuple(_too_near(list(arrays.values()), written)))


def _too_near(
    arrays: Sequence[tuple[int, Argument]], written: Sequence[Argument]
) -> Iterator[tuple[int, int, int, int]]:
    """`Plan.too_near` for arrays with their positions, `written` being some of them."""
    positions = {argument.name: position for position, argument in arrays}
    done = set()
    for target in written:
        done.add(target.name)
        for position, other in arrays:
            if other.name in done or not (target.size and other.size):
                continue
            distance = other.pointer - target.pointer
            low = (target.begin - target.pointer) - (other.end - other.pointer)
            high = (target.end - target.pointer) - (other.begin - other.pointer)
            # Arrays that interleave and do not overlap may do so again, at this very distance.
            for bounds in [(low, distance), (distance, high)] if low < distance < high else [(low, high)]:
                yield positions[target.name], position, *bounds
