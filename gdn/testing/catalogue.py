"""The one list of cases: of the recurrence, chunked or not, of the ring and the fold, and of the ops around them."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from gdn.geometry import HeadGeometry
from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, random_recurrence_case
from gdn.testing.chunked_cases import CHUNKED_CASES
from gdn.testing.layer_cases import LAYER_CASES, LayerCase, layer_heads, random_layer_case
from gdn.testing.ring_cases import RING_CASES, RingCase, random_ring_case

#: A case of the recurrence itself, with the ring or without.
Case: TypeAlias = RecurrenceCase | RingCase
SweepCase: TypeAlias = Case | LayerCase

NAMED_CASES: dict[str, Case] = {**RECURRENCE_CASES, **RING_CASES}
SWEEP_CASES: dict[str, SweepCase] = {**NAMED_CASES, **CHUNKED_CASES, **LAYER_CASES}

_RANDOM_NAME = re.compile(r"random-([0-9]{1,20})-([0-9]{1,20})")


def random_case(seed: int, number: int, **fixed: Any) -> SweepCase:
    """Case `number` of a seed, whatever other cases are drawn. Keywords fix `heads` or types; the rest is drawn.

    Every third case is one of the ring, every sixth one of the ops around the recurrence.
    """
    if _is_of_layer(number):
        return random_layer_case(seed, number, **fixed)
    draw = random_ring_case if number % 3 == 2 else random_recurrence_case
    return draw(seed, number, **fixed)


def random_heads(seed: int, number: int) -> HeadGeometry:
    """The heads that a random case is drawn with."""
    if _is_of_layer(number):
        return layer_heads(seed, number)
    draw = random_ring_case if number % 3 == 2 else random_recurrence_case
    return draw(seed, number).heads


def _is_of_layer(number: int) -> bool:
    return number % 6 == 3


def random_case_numbers(name: str) -> tuple[int, int] | None:
    """Seed and number of the random case of that name, None for any other name."""
    match = _RANDOM_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
