"""Plans: what is known of a call on CuPy arrays because one of its kind passed every check and ran.

Calls are of one kind where their arrays differ in nothing but addresses. The kind decides almost everything: whether a
call is right, which kernels run, and with which arguments. A plan holds that. A call that has one is only checked for
what it writes lying apart from the rest, and puts its addresses into the launches.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from gdn.arrays import Argument
from gdn.backends.chunk_layout import PART_ALIGNMENT
from gdn.backends.cuda import ReadyLaunch

#: Plans of one thread. Beyond that it begins anew: most calls of a program are like one of a few.
MAX_PLANS = 1024

#: The argument that launches take parts of, which start at multiples of PART_ALIGNMENT.
_PARTED = "workspace"


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """A launch of a call, and where its addresses come from.

    launch: that of the call before. places: a parameter, and the position in the call of the array whose address it
    takes. parts: a parameter, and how far behind the start of the array with parts its address lies.
    """

    launch: ReadyLaunch
    places: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What calls of one kind need to run, but for addresses.

    parted, remainder: the position of the array with parts, and that of its address by PART_ALIGNMENT; 0 and None where
    there is none. too_near: positions of an array that is written and of another, and two distances from the address of
    the first to that of the second, between which the two might overlap.
    """

    launches: tuple[PlannedLaunch, ...]
    parted: int
    remainder: int | None
    too_near: tuple[tuple[int, int, int, int], ...]

    def takes(self, addresses: Sequence[int]) -> bool:
        """Whether arrays at these addresses are surely apart where they must be, and parts lie where they did."""
        if self.remainder is not None and addresses[self.parted] % PART_ALIGNMENT != self.remainder:
            return False
        for written, other, low, high in self.too_near:
            if low < addresses[other] - addresses[written] < high:
                return False
        return True

    def run(self, addresses: Sequence[int]) -> None:
        """Enqueue the call for arrays at these addresses, which the plan takes."""
        for planned in self.launches:
            arguments = planned.launch.arguments
            for parameter, position in planned.places:
                arguments[parameter] = addresses[position]
            for parameter, offset in planned.parts:
                arguments[parameter] = addresses[self.parted] + offset
            planned.launch()


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
    launches: Sequence[ReadyLaunch],
    arguments: Sequence[Argument | None],
    written: Sequence[Argument],
) -> None:
    """Make a plan of a call that passed every check.

    Args:
        kind: all that its checks and its launches depend on, but the addresses of its arrays.
        launches: its launches, in order.
        arguments: its arrays, in the order of the call; None for one that was left out.
        written: those that it writes, which the checks found apart from all others.

    Launches that take an address of anything else make no plan.
    """
    arrays = {argument.name: (position, argument) for position, argument in enumerate(arguments) if argument}
    planned = [_planned(launch, arrays) for launch in launches]
    if None in planned:
        return
    if len(_plans.by_kind) >= MAX_PLANS:
        _plans.by_kind.clear()
    parted, argument = arrays.get(_PARTED, (0, None))
    remainder = None if argument is None else argument.pointer % PART_ALIGNMENT
    too_near = tuple(_too_near(list(arrays.values()), written))
    _plans.by_kind[kind] = Plan(tuple(launch for launch in planned if launch), parted, remainder, too_near)


def _planned(launch: ReadyLaunch, arrays: Mapping[str, tuple[int, Argument]]) -> PlannedLaunch | None:
    """The launch, with where its addresses come from in a call of these arrays; None where one comes from elsewhere."""
    places, parts = [], []
    for parameter, (name, of_type) in enumerate(launch.launch.variant.kernel.parameters):
        address = launch.launch.arguments[parameter]
        if of_type != "pointer":
            continue
        position, argument = arrays.get(name, (0, None))
        _, whole = arrays.get(_PARTED, (0, None))
        if argument is not None and address == argument.pointer:
            places.append((parameter, position))
        elif whole is not None and whole.begin <= address < whole.end:  # which overlaps no other array
            parts.append((parameter, address - whole.pointer))
        elif argument is not None or address != 0:  # 0: of an array that such calls leave out
            return None
    return PlannedLaunch(launch, tuple(places), tuple(parts))


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
