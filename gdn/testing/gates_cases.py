"""Cases of the gates: named ones, and seeded random ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from gdn.arrays import DTYPES
from gdn.geometry import HeadGeometry
from gdn.testing.buffers import LAYOUTS, Array

_FLOATS = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class GatesCase:
    """One call of `gated_delta_gates`.

    inputs: "model", or "extremes", whose first token goes to where an exponential overflows or vanishes.
    """

    name: str
    num_tokens: int
    num_value_heads: int
    work_dtype: str = "float32"
    rate_dtype: str = "float32"
    bias_dtype: str = "float32"
    allow_neg_eigval: bool = False
    token_layout: str = "dense"
    head_layout: str = "dense"
    out_layout: str = "dense"
    inputs: str = "model"
    seed: int = 0

    def types(self) -> str:
        """Type of the projections, those of A_log and dt_bias where they differ, and the range of beta."""
        text = self.work_dtype
        if (self.rate_dtype, self.bias_dtype) != (text, text):
            text += f" heads {self.rate_dtype} {self.bias_dtype}"
        return f"{text} beta to 2" if self.allow_neg_eigval else text


@dataclass(frozen=True, slots=True)
class GatesArrays:
    """Dense NumPy arrays of one call, by the names of its arguments."""

    a: Array
    b: Array
    A_log: Array
    dt_bias: Array


def build_gates_arrays(case: GatesCase) -> GatesArrays:
    """The arrays of a case, drawn as published layers initialise them."""
    random = np.random.default_rng([case.seed, case.num_tokens, case.num_value_heads])
    a, b = random.normal(0, 3, (2, case.num_tokens, case.num_value_heads))
    rate = np.log(random.uniform(1, 16, case.num_value_heads))
    step = np.exp(random.uniform(np.log(1e-3), np.log(1e-1), case.num_value_heads))
    if case.inputs == "extremes" and case.num_tokens:
        ends = np.resize([-1e4, -100, -20, 0, 19.9, 20.1, 100, 1e4], case.num_value_heads)
        a[0], b[0] = ends, ends[::-1]
        rate[ends == 100] = -10  # so that softplus(100) can be told from infinity
    return GatesArrays(
        a.astype(DTYPES[case.work_dtype]),
        b.astype(DTYPES[case.work_dtype]),
        rate.astype(DTYPES[case.rate_dtype]),
        np.log(np.expm1(step)).astype(DTYPES[case.bias_dtype]),
    )


def _named_cases() -> tuple[GatesCase, ...]:
    bfloat16 = {"work_dtype": "bfloat16", "bias_dtype": "bfloat16"}
    return (
        GatesCase("gates", 70, 24, inputs="extremes"),
        GatesCase("gates_beta_up_to_2", 70, 24, allow_neg_eigval=True, inputs="extremes"),
        GatesCase("gates_bfloat16", 70, 32, inputs="extremes", **bfloat16),  # type: ignore[arg-type]  # as in conv1d_cases
        GatesCase("gates_float16", 9, 5, "float16", "float16", "float16", allow_neg_eigval=True),
        GatesCase("gates_of_one", 1, 1),
        GatesCase("gates_sliced", 33, 8, token_layout="slice", out_layout="slice"),
        GatesCase(
            "gates_strided", 33, 8, token_layout="every_other", head_layout="every_other", out_layout="unaligned"
        ),
        GatesCase("gates_reversed", 33, 8, token_layout="reversed", out_layout="column_major", inputs="extremes"),
    )


GATES_CASES: dict[str, GatesCase] = {case.name: case for case in _named_cases()}


def random_gates_case(name: str, random: np.random.Generator, heads: HeadGeometry, **types: str) -> GatesCase:
    """A case of the value heads of `heads`; `types` may fix work_dtype, and has nothing else that gates have."""

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(random.integers(len(choices)))]

    case = GatesCase(
        name,
        num_tokens=int(random.integers(1, 400)),
        num_value_heads=heads.num_value_heads,
        work_dtype=pick(_FLOATS),
        rate_dtype=pick(_FLOATS),
        bias_dtype=pick(_FLOATS),
        allow_neg_eigval=bool(random.integers(2)),
        token_layout=pick(LAYOUTS[2]),
        head_layout=pick(LAYOUTS[1]),
        out_layout=pick(LAYOUTS[2]),
        inputs=pick(("model", "extremes")),
        seed=int(random.integers(2**31)),
    )
    return replace(case, work_dtype=types.get("work_dtype", case.work_dtype))
