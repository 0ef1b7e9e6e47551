"""Cases of the recurrence that tests, `gdn verify` and the benchmark share: named ones, and seeded random ones.

A case is a small description; `build_arrays` makes its arrays, the same ones on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from gdn.arrays import DTYPES
from gdn.geometry import HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, PAD_SLOT, HeadGeometry
from gdn.testing.buffers import LAYOUTS, Array

#: Token-elements (tokens x value heads x state elements of one) that a random case may cost.
_RANDOM_COST = 3_000_000
_POPULAR_HEAD_DIMS = ((128, 128), (64, 64), (96, 192), (128, 64), (256, 256), (32, 32), (192, 128))


@dataclass(frozen=True, slots=True)
class RecurrenceCase:
    """One call of `gated_delta_recurrence_fwd`.

    lengths: tokens of each sequence. padding: positions of the batch that are padding rows.
    leading_rows, trailing_rows: token rows that no sequence covers. spare_slots: slots nobody uses.
    inputs: what is special about the values, a key of `INPUTS`.
    thread_maps: 0, or how many launch configurations to hold against each other beside those that calls pick.
    """

    name: str
    heads: HeadGeometry
    lengths: tuple[int, ...]
    work_dtype: str = "float32"
    gate_dtype: str = "float32"
    state_dtype: str = "float32"
    out_dtype: str = "float32"
    index_dtype: str = "uint32"
    padding: tuple[int, ...] = ()
    leading_rows: int = 0
    trailing_rows: int = 0
    spare_slots: int = 2
    qkv_layout: str = "dense"
    gate_layout: str = "dense"
    state_layout: str = "dense"
    index_layout: str = "dense"
    out_layout: str = "dense"
    inputs: str = "model"
    seed: int = 0
    thread_maps: int = 0

    @property
    def total_seq_len(self) -> int:
        """Token rows of the call, uncovered ones included."""
        return self.leading_rows + sum(self.lengths) + self.trailing_rows

    @property
    def cost(self) -> int:
        """State elements that the call updates."""
        return sum(self.lengths) * self.heads.slot_state_elements

    def types(self) -> str:
        """Type of work and pool, or both with a slash, and the types that differ from their defaults."""
        text = self.work_dtype
        if self.state_dtype != self.work_dtype:
            text += f"/{self.state_dtype}"
        if self.gate_dtype != "float32":
            text += f" gates {self.gate_dtype}"
        if self.out_dtype != self.work_dtype:
            text += f" out {self.out_dtype}"
        return text


@dataclass(frozen=True, slots=True)
class RecurrenceArrays:
    """Dense NumPy arrays of one call, in the order of its arguments."""

    qkv_conv_output: Array
    decay_per_token: Array
    beta_per_token: Array
    recurrent_state: Array
    slot_idx: Array
    input_row_offsets: Array

    def as_tuple(self) -> tuple[Array, ...]:
        """The six arrays, not copied."""
        return tuple(getattr(self, field.name) for field in fields(self))


def build_arrays(case: RecurrenceCase) -> RecurrenceArrays:
    """The arrays of a case. Uncovered rows and half of the spare slots hold NaN: nobody may use them."""
    random = np.random.default_rng([case.seed, len(case.lengths), case.total_seq_len])
    heads = case.heads
    batch_size, total = len(case.lengths), case.total_seq_len
    max_slots = batch_size + case.spare_slots
    qkv = _silu(random.standard_normal((total, heads.conv_dim)))
    decay, beta = _gates(random, total, heads.num_value_heads)
    pool = 0.3 * random.standard_normal((max_slots, *_state_shape(heads)))
    slots = random.permutation(max_slots)[:batch_size].astype(np.int64)
    slots[list(case.padding)] = PAD_SLOT
    offsets = case.leading_rows + np.concatenate([[0], np.cumsum(case.lengths, dtype=np.int64)])

    values = {"qkv": qkv, "decay": decay, "beta": beta, "pool": pool}
    INPUTS[case.inputs](values, heads, random)
    qkv[: case.leading_rows] = np.nan
    qkv[total - case.trailing_rows :] = np.nan
    # Half of the slots that nobody names hold NaN, which must not spread; the others, and those of empty sequences,
    # hold values, which must not change.
    spare = np.setdiff1d(np.arange(max_slots), slots)
    pool[spare[::2]] = np.nan
    index = DTYPES[case.index_dtype]
    return RecurrenceArrays(
        values["qkv"].astype(DTYPES[case.work_dtype]),
        values["decay"].astype(DTYPES[case.gate_dtype]),
        values["beta"].astype(DTYPES[case.gate_dtype]),
        values["pool"].astype(DTYPES[case.state_dtype]),
        slots.astype(np.uint32).view(index),
        offsets.astype(np.uint32).view(index),
    )


def _state_shape(heads: HeadGeometry) -> tuple[int, int, int]:
    return heads.num_value_heads, heads.key_head_dim, heads.value_head_dim


def _silu(values: Array) -> Array:
    result: Array = values / (1 + np.exp(-values))
    return result


def _gates(random: np.random.Generator, total: int, num_value_heads: int) -> tuple[Array, Array]:
    """Decay and beta as a trained layer makes them.

    decay = exp(-exp(A_log) softplus(a + dt_bias)) with A_log = log U(1, 16) and softplus(dt_bias) log-uniform
    in [1e-3, 1e-1], the initialisation of published Gated DeltaNet layers; beta = sigmoid(b).
    """
    rate = random.uniform(1, 16, num_value_heads)
    step = np.exp(random.uniform(np.log(1e-3), np.log(1e-1), num_value_heads))
    dt_bias = np.log(np.expm1(step))
    softplus = np.logaddexp(0, random.standard_normal((total, num_value_heads)) + dt_bias)
    beta = 1 / (1 + np.exp(-random.standard_normal((total, num_value_heads))))
    return np.exp(-rate * softplus), beta


# Changes to the values of a case. Each takes the float64 arrays by name and changes them in place.

Values = dict[str, Array]


def _query(values: Values, heads: HeadGeometry) -> Array:
    return values["qkv"][:, : heads.key_dim]


def _key(values: Values, heads: HeadGeometry) -> Array:
    return values["qkv"][:, heads.key_dim : 2 * heads.key_dim]


def _as_drawn(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    pass


def _tiny_decay(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["decay"][:] = 1e-12


def _erasing_decay(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    """Zeros around the edges of 32- and 64-token chunks, over a state that must not shine through."""
    values["pool"] *= 1e30
    for token in (0, 31, 32, 63):
        values["decay"][token : token + 1] = 0


def _mixed_decay(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["decay"][:] = random.choice([0, 1e-12, 0.5, 1], values["decay"].shape)


def _no_decay(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["decay"][:] = 1


def _wide_beta(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["beta"] *= 2


def _tiny_keys(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    """Norms around and far below the root of the epsilon, 1e-3."""
    _key(values, heads)[...] *= random.choice([1e-2, 1e-3, 1e-4, 1e-9], (len(values["qkv"]), 1))
    _query(values, heads)[...] *= random.choice([1e-2, 1e-3, 1e-4, 1e-9], (len(values["qkv"]), 1))


def _vanishing_keys(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    """Keys that vanish beside the epsilon, in all tokens."""
    _key(values, heads)[...] *= 1e-9


def _small_values(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["qkv"][:, 2 * heads.key_dim :] *= 1e-4
    values["pool"] *= 1e-4


def _large_values(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    values["qkv"][:, 2 * heads.key_dim :] *= 1e4
    values["pool"] *= 1e4


def _zero_keys_and_queries(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    _key(values, heads)[0::3] = 0
    _query(values, heads)[1::3] = 0
    values["qkv"][2::6, : 2 * heads.key_dim] = 0


def _near_equal_keys(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    key = _key(values, heads)
    key[:] = random.standard_normal(heads.key_dim) + 0.01 * random.standard_normal(key.shape)
    values["decay"][:] = 1
    values["beta"] *= 2


def _scaled_rows(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    """Every row has its own size, so that a row read from the wrong place shows in the values (field case 5)."""
    values["qkv"] *= np.exp(random.uniform(-3, 3, (len(values["qkv"]), 1)))


def _one_hot(values: Values, heads: HeadGeometry, random: np.random.Generator) -> None:
    """Key head i asks for key element i: shows the head map and that the scale is applied once."""
    for part in (_query(values, heads), _key(values, heads)):
        by_head = part.reshape(len(part), heads.num_key_heads, heads.key_head_dim)
        by_head[...] = 0
        for key_head in range(heads.num_key_heads):
            by_head[:, key_head, key_head % heads.key_head_dim] = 1


INPUTS: dict[str, Callable[[Values, HeadGeometry, np.random.Generator], None]] = {
    "model": _as_drawn,
    "tiny_decay": _tiny_decay,
    "erasing_decay": _erasing_decay,
    "mixed_decay": _mixed_decay,
    "no_decay": _no_decay,
    "wide_beta": _wide_beta,
    "tiny_keys": _tiny_keys,
    "vanishing_keys": _vanishing_keys,
    "small_values": _small_values,
    "large_values": _large_values,
    "zero_keys_and_queries": _zero_keys_and_queries,
    "near_equal_keys": _near_equal_keys,
    "scaled_rows": _scaled_rows,
    "one_hot": _one_hot,
}


def _case(name: str, heads: tuple[int, int, int, int], lengths: tuple[int, ...], **changes: Any) -> RecurrenceCase:
    work_dtype = changes.setdefault("work_dtype", "float32")
    changes.setdefault("out_dtype", work_dtype)
    return RecurrenceCase(name, HeadGeometry(*heads), lengths, **changes)


def _named_cases() -> tuple[RecurrenceCase, ...]:
    small = (2, 4, 32, 32)
    few_heads = (1, 2, 32, 32)
    bfloat16 = {"work_dtype": "bfloat16", "state_dtype": "bfloat16"}
    return (
        _case("decode_batch", small, (1,) * 24, leading_rows=1, trailing_rows=3, thread_maps=1),
        _case("decode_batch_bfloat16", (2, 4, 128, 128), (1,) * 8, **bfloat16),
        _case("ragged_batch", few_heads, (1, 1, 512, 1, 0, 37)),
        _case("empty_sequences", small, (0, 3, 0, 0, 2, 0), **bfloat16),
        _case("only_empty_sequences", small, (0, 0, 0), leading_rows=2, trailing_rows=1),
        _case("no_sequences", small, (), leading_rows=70),
        _case("no_tokens", small, (0, 0)),
        _case("padding_rows", small, (1, 1, 3, 1), padding=(1, 3), index_dtype="int32"),
        _case("padding_rows_bfloat16", small, (1, 1, 3, 1), padding=(1, 3), **bfloat16),
        _case("uncovered_rows", small, (5, 1, 9), leading_rows=130, trailing_rows=67, padding=(1,)),
        _case("long_row", (1, 2, 64, 64), (4096,)),
        _case("long_row_into_bfloat16", (1, 1, 32, 32), (4096,), inputs="no_decay", **bfloat16),
        _case("many_lengths", (1, 2, 64, 64), (1, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65)),
        _case("scaled_rows", small, (300, 1, 44), inputs="scaled_rows"),
        _case("one_hot_heads", (2, 6, 64, 128), (4, 1), inputs="one_hot"),
        _case("group_of_1", (3, 3, 32, 32), (9, 2)),
        _case("group_of_8", (1, 8, 32, 32), (9, 2)),
        _case("heads_96_192", (2, 2, 96, 192), (12, 1, 3), inputs="wide_beta"),
        _case("heads_96_192_bfloat16", (2, 2, 96, 192), (12, 1, 3), thread_maps=1, **bfloat16),
        _case("heads_256_256", (1, 2, 256, 256), (10, 1)),
        _case("heads_8_8", (1, 2, 8, 8), (40, 1)),
        _case("heads_248_24_float16", (1, 1, 248, 24), (10, 1), work_dtype="float16", state_dtype="float16"),
        _case("heads_8_256", (1, 1, 8, 256), (20, 1), state_dtype="bfloat16"),
        _case("float16_into_float32", small, (9, 1), work_dtype="float16"),
        _case("bfloat16_into_float16", small, (9, 1), work_dtype="bfloat16", state_dtype="float16"),
        _case("bfloat16_gates", small, (9, 1), gate_dtype="bfloat16", **bfloat16),
        _case("float32_readout", small, (9, 1), out_dtype="float32", work_dtype="bfloat16"),
        _case(
            "sliced_inputs", small, (17, 1, 4), qkv_layout="slice", gate_layout="slice", state_layout="gaps",
            out_layout="slice"
        ),
        _case(
            "sliced_inputs_bfloat16", small, (17, 1, 4), qkv_layout="slice", state_layout="gaps", out_layout="slice",
            **bfloat16
        ),
        _case(
            "unaligned", small, (17, 1, 4), qkv_layout="unaligned", gate_layout="unaligned", state_layout="unaligned",
            index_layout="every_other", out_layout="unaligned", **bfloat16
        ),
        _case(
            "strided", small, (17, 1, 4), qkv_layout="every_other", gate_layout="column_major",
            index_layout="every_other", out_layout="column_major", index_dtype="int32"
        ),
        _case("reversed_rows", small, (17, 1, 4), qkv_layout="reversed", gate_layout="reversed", out_layout="reversed"),
        _case("tiny_decay", small, (70, 3), inputs="tiny_decay"),
        _case("erasing_decay", small, (70,), inputs="erasing_decay"),
        _case("mixed_decay", few_heads, (130, 5), inputs="mixed_decay"),
        _case("no_decay", few_heads, (7, 50, 64, 65, 257), inputs="no_decay"),
        _case("beta_up_to_2", few_heads, (200,), inputs="wide_beta"),
        _case("tiny_keys", small, (60, 2), inputs="tiny_keys"),
        _case("zero_keys_and_queries", small, (30, 2), inputs="zero_keys_and_queries"),
        _case("near_equal_keys", few_heads, (300,), inputs="near_equal_keys"),
        _case(
            "stream_of_windows", (4, 32, 32, 32), (4, 0, 7, 1, 2, 11, 3, 5, 1, 9, 6, 4, 4, 8) * 4, padding=(2, 21),
            index_dtype="int32", leading_rows=3, trailing_rows=70
        ),
    )  # fmt: skip


RECURRENCE_CASES: dict[str, RecurrenceCase] = {case.name: case for case in _named_cases()}


def random_recurrence_case(seed: int, number: int, **fixed: Any) -> RecurrenceCase:
    """Case `number` of a seed, whatever other cases are drawn. Keywords fix `heads` or types; the rest is drawn."""
    random = np.random.default_rng([0x6764_6E, seed, number])
    heads = _random_heads(random)
    work_dtype, state_dtype, gate_dtype, out_dtype = _random_types(random, fixed.get("work_dtype"))
    case = RecurrenceCase(
        name=f"random-{seed}-{number}",
        heads=heads,
        lengths=(),
        work_dtype=work_dtype,
        gate_dtype=gate_dtype,
        state_dtype=state_dtype,
        out_dtype=out_dtype,
        index_dtype=_pick(random, ("uint32", "int32")),
        leading_rows=int(random.choice([0, 0, 1, 66])),
        trailing_rows=int(random.choice([0, 0, 2, 65])),
        spare_slots=int(random.integers(1, 6)),
        qkv_layout=_pick(random, LAYOUTS[2]),
        gate_layout=_pick(random, LAYOUTS[2]),
        state_layout=_pick(random, LAYOUTS[4]),
        index_layout=_pick(random, LAYOUTS[1]),
        out_layout=_pick(random, LAYOUTS[2]),
        inputs=_pick(random, ("model", "model", "model", "wide_beta", "mixed_decay", "scaled_rows", "tiny_keys")),
        seed=int(random.integers(2**31)),
    )
    case = replace(case, **fixed)
    lengths = _random_lengths(random, max(1, _RANDOM_COST // case.heads.slot_state_elements))
    padding = tuple(position for position in range(len(lengths)) if random.random() < 0.1)
    return replace(case, lengths=lengths, padding=padding)


def _pick(random: np.random.Generator, choices: tuple[str, ...]) -> str:
    return choices[int(random.integers(len(choices)))]


def _random_heads(random: np.random.Generator) -> HeadGeometry:
    num_key_heads, group_size = int(random.integers(1, 4)), int(random.integers(1, 9))
    if random.random() < 0.5:
        key_head_dim, value_head_dim = _POPULAR_HEAD_DIMS[int(random.integers(len(_POPULAR_HEAD_DIMS)))]
    else:
        steps = random.integers(1, MAX_HEAD_DIM // HEAD_DIM_MULTIPLE + 1, 2)
        key_head_dim, value_head_dim = (HEAD_DIM_MULTIPLE * int(step) for step in steps)
    return HeadGeometry(num_key_heads, num_key_heads * group_size, key_head_dim, value_head_dim)


def _random_types(random: np.random.Generator, work_dtype: str | None) -> tuple[str, str, str, str]:
    floats = ("float32", "float16", "bfloat16")
    drawn = _pick(random, floats)
    work_dtype = work_dtype or drawn
    return (
        work_dtype,
        _pick(random, floats),
        _pick(random, ("float32", work_dtype)),
        _pick(random, ("float32", work_dtype)),
    )


def _random_lengths(random: np.random.Generator, budget: int) -> tuple[int, ...]:
    """A ragged batch within a token budget: many ones, some empty, some short, sometimes one of thousands."""
    lengths: list[int] = []
    if random.random() < 0.3:
        lengths.append(int(min(budget, np.exp(random.uniform(np.log(64), np.log(4096))))))
    for _ in range(int(random.integers(1, 17))):
        kind = random.random()
        length = 1 if kind < 0.5 else 0 if kind < 0.6 else int(random.integers(2, 40))
        if sum(lengths) + length <= budget:
            lengths.append(length)
    return tuple(int(length) for length in random.permutation(lengths)) if lengths else (1,)
