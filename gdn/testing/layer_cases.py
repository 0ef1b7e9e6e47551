"""The cases of the ops around the recurrence: the convolution, the gates, and steps of the whole layer."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from gdn.geometry import HeadGeometry
from gdn.testing.conv1d_cases import CONV1D_CASES, Conv1dCase, random_conv1d_case
from gdn.testing.gates_cases import GATES_CASES, GatesCase, random_gates_case
from gdn.testing.steps_cases import STEPS_CASES, StepsCase, random_steps_case

LayerCase: TypeAlias = Conv1dCase | GatesCase | StepsCase

LAYER_CASES: dict[str, LayerCase] = {**CONV1D_CASES, **GATES_CASES, **STEPS_CASES}

_HEAD_DIMS = ((32, 32), (64, 64), (128, 128), (96, 192), (24, 72))


def random_layer_case(seed: int, number: int, heads: HeadGeometry | None = None, **types: Any) -> LayerCase:
    """Case `number` of a seed, whatever other cases are drawn. `heads` and types fix what a case has of them.

    Half of them are convolutions.
    """
    random = np.random.default_rng([0x6C_61_79_72, seed, number])
    drawn, kind = _random_heads(random), random.random()
    name = f"random-{seed}-{number}"
    if kind < 0.5:
        return random_conv1d_case(name, random, heads, **types)
    draw = random_gates_case if kind < 0.65 else random_steps_case
    return draw(name, random, heads or drawn, **types)


def layer_heads(seed: int, number: int) -> HeadGeometry:
    """The heads that a random case is drawn with, where its op knows heads."""
    return _random_heads(np.random.default_rng([0x6C_61_79_72, seed, number]))


def _random_heads(random: np.random.Generator) -> HeadGeometry:
    num_key_heads, group_size = int(random.integers(1, 4)), int(random.integers(1, 9))
    return HeadGeometry(num_key_heads, num_key_heads * group_size, *_HEAD_DIMS[int(random.integers(len(_HEAD_DIMS)))])
