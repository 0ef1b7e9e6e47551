"""The one list of cases: those of the recurrence, and those of the ring and the fold."""

from __future__ import annotations

import re
from typing import Any, TypeAlias

from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, random_recurrence_case
from gdn.testing.ring_cases import RING_CASES, RingCase, random_ring_case

Case: TypeAlias = RecurrenceCase | RingCase

NAMED_CASES: dict[str, Case] = {**RECURRENCE_CASES, **RING_CASES}

_RANDOM_NAME = re.compile(r"random-([0-9]{1,20})-([0-9]{1,20})")


def random_case(seed: int, number: int, **fixed: Any) -> Case:
    """Case `number` of a seed, whatever other cases are drawn. Keywords fix `heads` or types; the rest is drawn.

    Every third case is one of the ring.
    """
    draw = random_ring_case if number % 3 == 2 else random_recurrence_case
    return draw(seed, number, **fixed)


def random_case_numbers(name: str) -> tuple[int, int] | None:
    """Seed and number of the random case of that name, None for any other name."""
    match = _RANDOM_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None
