"""Cases of the whole layer in a speculative decode loop: named ones, and seeded random ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from gdn.arrays import DTYPES
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array

SPARE = 2  # slots and ring rows that nobody uses
_FLOATS = ("float32", "float16", "bfloat16")
#: State elements that a step of a random case may update.
_RANDOM_COST = 400_000


@dataclass(frozen=True, slots=True)
class StepsCase:
    """Steps of a speculative loop over some rows.

    Windows are of 0 to ring_len + 1 tokens; those longer than the ring commit themselves. In every step some rows may
    be padding: their windows must leave no trace.
    """

    name: str
    heads: HeadGeometry
    ring_len: int
    num_rows: int = 5
    num_steps: int = 6
    conv_width: int = 4
    work_dtype: str = "float32"
    state_dtype: str = "float32"
    index_dtype: str = "uint32"
    seed: int = 0

    @property
    def inputs(self) -> str:
        """What is special about the values."""
        return "model"

    @property
    def is_exact(self) -> bool:
        """Whether one call equals any split of it: both pools hold their values without rounding."""
        return self.state_dtype == "float32"

    def types(self) -> str:
        """Type of work and states, or both with a slash; windows hold inputs of the work type."""
        return self.work_dtype if self.work_dtype == self.state_dtype else f"{self.work_dtype}/{self.state_dtype}"


@dataclass(frozen=True, slots=True)
class Step:
    """What a step does to each row, and where its records go. Rows that are paused are padding."""

    drafted: Array
    accepted: Array
    is_paused: Array
    ring_rows: Array


@dataclass(frozen=True, slots=True)
class LayerTokens:
    """Tokens of a layer, row after row: its inputs, and the tables of a call on them."""

    qkv: Array
    a: Array
    b: Array
    slot_idx: Array
    input_row_offsets: Array


@dataclass(frozen=True, slots=True)
class StepsArrays:
    """Weights, pools and tokens of a case, and its steps."""

    conv_weight: Array
    A_log: Array
    dt_bias: Array
    conv_state: Array
    recurrent_state: Array
    tokens: LayerTokens  # all tokens of every row
    steps: tuple[Step, ...]


def build_steps_arrays(case: StepsCase) -> StepsArrays:
    """The arrays of a case. Slots that nobody uses hold NaN."""
    random = np.random.default_rng([case.seed, case.ring_len, case.num_rows])
    heads, steps = case.heads, tuple(_draw_steps(case))
    lengths = np.full(case.num_rows, case.ring_len + 1) + sum(advance(step) for step in steps)
    total, num_slots, nv = int(lengths.sum()), case.num_rows + SPARE, heads.num_value_heads
    slots = random.permutation(num_slots)[: case.num_rows]
    windows = random.standard_normal((num_slots, heads.conv_dim, case.conv_width - 1))
    states = 0.3 * random.standard_normal((num_slots, nv, heads.key_head_dim, heads.value_head_dim))
    for pool in (windows, states):
        pool[np.setdiff1d(np.arange(num_slots), slots)] = np.nan
    work, index = DTYPES[case.work_dtype], DTYPES[case.index_dtype]
    tokens = LayerTokens(
        random.standard_normal((total, heads.conv_dim)).astype(work),
        random.normal(0, 1, (total, nv)).astype(work),
        random.normal(0, 1, (total, nv)).astype(work),
        slots.astype(np.uint32).view(index),
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32).view(index),
    )
    return StepsArrays(
        random.uniform(-1, 1, (heads.conv_dim, case.conv_width)).astype(work),
        np.log(random.uniform(1, 16, nv)).astype(np.float32),
        random.uniform(-7, -2, nv).astype(np.float32),
        windows.astype(work),
        states.astype(DTYPES[case.state_dtype]),
        tokens,
        steps,
    )


def _draw_steps(case: StepsCase) -> Iterator[Step]:
    """Every length and count of acceptance there is, in turn from row to row and step to step."""
    random = np.random.default_rng(case.seed)
    for _ in range(case.num_steps):
        drafted = random.integers(0, case.ring_len + 2, case.num_rows)
        accepted = random.integers(0, drafted + 1)
        accepted[drafted > case.ring_len] = case.ring_len + 1
        is_paused = random.random(case.num_rows) < 0.15
        ring_rows = random.permutation(case.num_rows + SPARE)[: case.num_rows]
        yield Step(drafted, accepted, is_paused, ring_rows.astype(np.uint32).view(DTYPES[case.index_dtype]))


def advance(step: Step) -> Array:
    """How far each row is after the step from where it was before."""
    return np.where(step.is_paused, 0, step.accepted)


def piece(tokens: LayerTokens, position: Array, counts: Array, is_paused: Array) -> LayerTokens:
    """The next `counts` tokens of every row; paused rows are padding."""
    starts = tokens.input_row_offsets[:-1].astype(np.int64) + position
    rows = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
    slots = tokens.slot_idx.view(np.uint32).copy()
    slots[is_paused] = PAD_SLOT
    index = tokens.slot_idx.dtype
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32).view(index)
    return LayerTokens(tokens.qkv[rows], tokens.a[rows], tokens.b[rows], slots.view(index), offsets)


def _named_cases() -> tuple[StepsCase, ...]:
    bfloat16 = ("bfloat16", "bfloat16")
    return (
        StepsCase("steps", HeadGeometry(2, 4, 32, 32), 4, num_steps=12),
        StepsCase("steps_bfloat16", HeadGeometry(2, 4, 32, 32), 4, 5, 8, 4, *bfloat16, index_dtype="int32"),
        StepsCase("steps_bfloat16_into_float32", HeadGeometry(2, 4, 32, 32), 4, 7, 6, 4, "bfloat16", "float32"),
        StepsCase("steps_group_of_3", HeadGeometry(1, 3, 32, 32), 4, num_rows=1, num_steps=12),
        StepsCase("steps_of_16", HeadGeometry(2, 4, 32, 32), 16, num_rows=3),
        StepsCase("steps_96_192", HeadGeometry(1, 2, 96, 192), 4, num_rows=3),
    )


STEPS_CASES: dict[str, StepsCase] = {case.name: case for case in _named_cases()}


def random_steps_case(name: str, random: np.random.Generator, heads: HeadGeometry, **types: str) -> StepsCase:
    """Steps with these heads; `types` fix work_dtype and state_dtype."""
    most_rows = max(1, _RANDOM_COST // (4 * heads.slot_state_elements))
    case = StepsCase(
        name,
        heads,
        ring_len=int(random.choice([1, 2, 3, 4, 8])),
        num_rows=min(most_rows, int(random.integers(1, 9))),
        num_steps=int(random.integers(2, 7)),
        conv_width=int(random.integers(2, 9)),
        work_dtype=_FLOATS[int(random.integers(3))],
        state_dtype=_FLOATS[int(random.integers(3))],
        index_dtype=("uint32", "int32")[int(random.integers(2))],
        seed=int(random.integers(2**31)),
    )
    return replace(case, **types)  # type: ignore[arg-type]  # mypy takes the types' names for those of other fields
