"""Cases of the convolution before the recurrence and of its commit: named ones, and seeded random ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdn.arrays import DTYPES
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import LAYOUTS, Array

_FLOATS = ("float32", "float16", "bfloat16")
#: Token-channels that a random case may cost.
_RANDOM_COST = 100_000


@dataclass(frozen=True, slots=True)
class Conv1dCase:
    """One call of `gated_delta_conv1d_fwd`, and commits of the same tokens.

    lengths: tokens of each sequence. padding: positions of the batch that are padding rows.
    leading_rows, trailing_rows: token rows that no sequence covers. spare_slots: slots nobody uses.
    bias_dtype: None for no bias. inputs: "model", or "scaled_rows", every row and channel of a size of its own.
    """

    name: str
    conv_dim: int
    conv_width: int
    lengths: tuple[int, ...]
    work_dtype: str = "float32"
    state_dtype: str = "float32"
    weight_dtype: str = "float32"
    bias_dtype: str | None = None
    out_dtype: str = "float32"
    activation: str | None = "silu"
    index_dtype: str = "uint32"
    padding: tuple[int, ...] = ()
    leading_rows: int = 0
    trailing_rows: int = 0
    spare_slots: int = 2
    qkv_layout: str = "dense"
    weight_layout: str = "dense"
    state_layout: str = "dense"
    index_layout: str = "dense"
    out_layout: str = "dense"
    inputs: str = "model"
    seed: int = 0

    @property
    def total_seq_len(self) -> int:
        """Token rows of the call, uncovered ones included."""
        return self.leading_rows + sum(self.lengths) + self.trailing_rows

    @property
    def state_is_exact(self) -> bool:
        """Whether the windows hold inputs without rounding."""
        return self.state_dtype in ("float32", self.work_dtype)

    def types(self) -> str:
        """Type of work and windows, or both with a slash, those of weights and bias, and a readout's own."""
        text = self.work_dtype if self.state_dtype == self.work_dtype else f"{self.work_dtype}/{self.state_dtype}"
        text += f" weights {self.weight_dtype}" + (f" bias {self.bias_dtype}" if self.bias_dtype else "")
        return text if self.out_dtype == self.work_dtype else f"{text} out {self.out_dtype}"


@dataclass(frozen=True, slots=True)
class Conv1dArrays:
    """Dense NumPy arrays of one call, by the names of its arguments."""

    qkv: Array
    conv_weight: Array
    conv_state: Array
    slot_idx: Array
    input_row_offsets: Array
    bias: Array | None


def build_conv1d_arrays(case: Conv1dCase) -> Conv1dArrays:
    """The arrays of a case. Uncovered rows and half of the spare slots hold NaN: nobody may use them."""
    random = np.random.default_rng([case.seed, len(case.lengths), case.conv_width])
    batch_size, total, channels = len(case.lengths), case.total_seq_len, case.conv_dim
    max_slots = batch_size + case.spare_slots
    qkv = random.standard_normal((total, channels))
    if case.inputs == "scaled_rows":
        qkv *= np.exp(random.uniform(-2, 2, (total, 1)) + random.uniform(-2, 2, channels))
    qkv[: case.leading_rows] = qkv[total - case.trailing_rows :] = np.nan
    weight = random.uniform(-1, 1, (channels, case.conv_width))
    bias = random.uniform(-1, 1, channels)
    pool = random.standard_normal((max_slots, channels, case.conv_width - 1))
    slots = random.permutation(max_slots)[:batch_size].astype(np.int64)
    slots[list(case.padding)] = PAD_SLOT
    pool[np.setdiff1d(np.arange(max_slots), slots)[::2]] = np.nan
    offsets = case.leading_rows + np.concatenate([[0], np.cumsum(case.lengths, dtype=np.int64)])
    index = DTYPES[case.index_dtype]
    return Conv1dArrays(
        qkv.astype(DTYPES[case.work_dtype]),
        weight.astype(DTYPES[case.weight_dtype]),
        pool.astype(DTYPES[case.state_dtype]),
        slots.astype(np.uint32).view(index),
        offsets.astype(np.uint32).view(index),
        None if case.bias_dtype is None else bias.astype(DTYPES[case.bias_dtype]),
    )


def _case(name: str, conv_dim: int, conv_width: int, lengths: tuple[int, ...], **changes: Any) -> Conv1dCase:
    changes.setdefault("out_dtype", changes.get("work_dtype", "float32"))
    return Conv1dCase(name, conv_dim, conv_width, lengths, **changes)


def _named_cases() -> tuple[Conv1dCase, ...]:
    short = (0, 1, 2, 3, 4, 5, 9)  # around the windows of 1 to 7 inputs
    edges = (3, 1, 17, 0, 8, 2, 16, 7, 33)  # around heads and tiles of 8 rows, and tiles of 32
    everyone = {"padding": (2, 5), "leading_rows": 5, "trailing_rows": 19}
    bfloat16 = {"work_dtype": "bfloat16", "state_dtype": "bfloat16", "weight_dtype": "bfloat16"}
    float16 = {"work_dtype": "float16", "state_dtype": "float16", "weight_dtype": "float16"}
    return (
        _case("conv_width_2", 20, 2, edges, bias_dtype="float32", activation=None, index_layout="every_other"),
        _case(
            "conv_width_3", 7, 3, short, bias_dtype="bfloat16", weight_layout="slice", index_dtype="int32", **float16,
            **everyone
        ),
        _case("conv_width_4", 1032, 4, short, inputs="scaled_rows", **everyone),
        _case(
            "conv_width_5", 8, 5, edges, state_dtype="bfloat16", activation=None, qkv_layout="column_major", **everyone
        ),
        _case(
            "conv_width_6", 5, 6, short, work_dtype="bfloat16", state_dtype="float16", bias_dtype="float16",
            weight_layout="every_other", out_layout="every_other"
        ),
        _case("conv_width_7", 12, 7, edges, weight_dtype="float16", bias_dtype="float32", state_layout="by_place"),
        _case("conv_width_8", 12, 8, (*short, 6, 7, 8, 40), bias_dtype="float32", **everyone),
        _case("conv_decode", 1032, 4, (1,) * 24, padding=(7,), trailing_rows=3),
        _case("conv_decode_bfloat16", 1032, 4, (1,) * 9, state_layout="by_place", padding=(7,), **bfloat16),
        _case("conv_bfloat16", 520, 4, edges, inputs="scaled_rows", **bfloat16, **everyone),
        # Outputs of bfloat16 would hide bits that depend on how a batch is split over blocks.
        _case("conv_windows", 12, 4, (4, 3, 5, 0, 8, 4, 2, 1), padding=(3,)),
        _case("conv_windows_of_8", 12, 4, (8, 7, 9, 0, 12, 6, 3, 5), work_dtype="bfloat16", out_dtype="float32"),
        _case("conv_many_sequences", 12, 4, (9, 0, 17, 8) * 33, work_dtype="bfloat16", out_dtype="float32"),
        _case("conv_long_rows", 12, 4, (700, 0, 2, 455, 1, 3), work_dtype="bfloat16", out_dtype="float32"),
        _case("conv_blocks_of_single_channels", 515, 4, short, **everyone),
        _case("conv_only_padding", 12, 4, (2, 1), padding=(0, 1)),
        _case("conv_only_empty_sequences", 12, 4, (0, 0, 0), leading_rows=2, trailing_rows=1),
        _case("conv_no_sequences", 12, 4, (), leading_rows=20),
        _case(
            "conv_sliced", 12, 4, edges, qkv_layout="slice", state_layout="gaps", out_layout="slice",
            index_dtype="int32", **everyone
        ),
        _case(
            "conv_unaligned", 12, 4, short, qkv_layout="unaligned", weight_layout="unaligned", state_layout="unaligned",
            index_layout="every_other", out_layout="unaligned", **bfloat16, **everyone
        ),
        _case(
            "conv_strided", 12, 4, short, qkv_layout="every_other", weight_layout="column_major",
            state_layout="by_place", index_layout="every_other", out_layout="column_major", index_dtype="int32"
        ),
        _case(
            "conv_reversed", 12, 4, edges, qkv_layout="reversed", weight_layout="reversed", state_layout="reversed",
            out_layout="reversed"
        ),
    )  # fmt: skip


CONV1D_CASES: dict[str, Conv1dCase] = {case.name: case for case in _named_cases()}


def random_conv1d_case(name: str, random: np.random.Generator, heads: HeadGeometry | None, **types: str) -> Conv1dCase:
    """A case of any size, or of the channels of these heads; `types` fix work_dtype and state_dtype."""
    of_any_size = int(random.integers(1, 1200))

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(random.integers(len(choices)))]

    case = Conv1dCase(
        name,
        conv_dim=heads.conv_dim if heads else of_any_size,
        conv_width=int(random.integers(2, 9)),
        lengths=(),
        work_dtype=pick(_FLOATS),
        state_dtype=pick(_FLOATS),
        weight_dtype=pick(_FLOATS),
        bias_dtype=pick(_FLOATS) if random.random() < 0.5 else None,
        activation="silu" if random.random() < 0.7 else None,
        index_dtype=pick(("uint32", "int32")),
        leading_rows=int(random.integers(0, 20)),
        trailing_rows=int(random.integers(0, 20)),
        qkv_layout=pick(LAYOUTS[2]),
        weight_layout=pick(LAYOUTS[2]),
        state_layout=pick(LAYOUTS[3]),
        index_layout=pick(LAYOUTS[1]),
        out_layout=pick(LAYOUTS[2]),
        inputs=pick(("model", "scaled_rows")),
        seed=int(random.integers(2**31)),
    )
    case = replace(case, **types)  # type: ignore[arg-type]  # mypy takes the types' names for those of other fields
    lengths = [int(length) for length in random.integers(0, 20, int(random.integers(1, 12)))]
    if random.random() < 0.3:
        lengths.append(int(min(1500, _RANDOM_COST // case.conv_dim)))
    return replace(
        case,
        lengths=tuple(lengths),
        padding=tuple(position for position in range(len(lengths)) if random.random() < 0.1),
        out_dtype=case.work_dtype if random.random() < 0.7 else "float32",
    )
