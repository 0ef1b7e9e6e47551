"""Cases of chunked prefill: the recurrence's, in lengths around the edges of chunks and with heads that are served."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase

#: Tokens of the chunks of all cases but one.
_CHUNK_LEN = 64
#: Every length that the first and the second chunk of a row can have.
EDGE_LENGTHS = tuple(range(2 * _CHUNK_LEN + 2))


@dataclass(frozen=True, slots=True)
class ChunkedCase(RecurrenceCase):
    """One call of `gated_delta_recurrence_fwd` with algorithm="chunked".

    has_strays: whether it is run with non-finite tokens too.
    """

    has_strays: bool = False


def _case(name: str, lengths: tuple[int, ...], heads: tuple[int, int, int, int], **changes: Any) -> ChunkedCase:
    """Bfloat16 inputs and an unrounded readout unless said otherwise."""
    types = {"work_dtype": "bfloat16", "out_dtype": "float32"}
    return ChunkedCase(f"chunked_{name}", HeadGeometry(*heads), lengths, **{**types, **changes})


def _named_cases() -> tuple[ChunkedCase, ...]:
    """Few head sizes and types: each is a kernel to compile. `rare_cases` has the others."""
    few = (1, 2, 64, 64)
    float32 = {"work_dtype": "float32"}
    bfloat16 = {"out_dtype": "bfloat16", "state_dtype": "bfloat16"}
    return (
        _case("bfloat16", (1, 130, 0, 65, 3), few, padding=(4,), **bfloat16),
        _case("float32", (130, 0, 65, 3), few, padding=(3,), **float32),
        _case("float16", (66, 5), few, work_dtype="float16", out_dtype="float16", state_dtype="float16"),
        _case("short_edges", (0, 1, 2, 15, 16, 17, 31, 32, 33, 63), few),
        _case("long_edges", (64, 65, 127, 128, 129), few),
        _case("edges_float32", (1, 16, 33, 64, 65), few, **float32),
        _case("ragged_batch", (1, 7, 140, 1, 0, 66, 2, 128, 5), few, padding=(3, 5), index_dtype="int32"),
        _case("uncovered_rows", (5, 1, 70), few, padding=(1,), leading_rows=130, trailing_rows=67),
        _case("only_padding", (3, 70), few, padding=(0, 1), trailing_rows=2),
        _case("no_tokens", (0, 0), few, leading_rows=3),
        _case("group_of_1", (66, 9), (2, 2, 64, 64)),
        _case("group_of_4", (66, 9), (1, 4, 64, 64)),
        _case("heads_32_32", (66, 9), (2, 4, 32, 32)),
        _case("heads_96_192", (66, 3), (1, 1, 96, 192), **bfloat16),
        _case("heads_128_128", (66,), (1, 2, 128, 128)),
        _case("heads_256_256_float32", (40,), (1, 1, 256, 256), **float32),
        _case(
            "sliced", (70, 1, 4), few, qkv_layout="slice", gate_layout="slice", state_layout="gaps",
            out_layout="slice", **bfloat16
        ),
        _case(
            "unaligned", (70, 1, 4), few, qkv_layout="unaligned", gate_layout="unaligned", state_layout="unaligned",
            index_layout="every_other", out_layout="unaligned"
        ),
        _case(
            "strided", (70, 1, 4), few, qkv_layout="every_other", gate_layout="column_major",
            index_layout="every_other", out_layout="column_major", index_dtype="int32"
        ),
        _case("reversed", (70, 1, 4), few, qkv_layout="reversed", gate_layout="reversed", out_layout="reversed"),
        *(_case(inputs, (140,), few, inputs=inputs) for inputs in _INPUTS),
        *(_case(f"{inputs}_float32", (140,), few, inputs=inputs, **float32) for inputs in _INPUTS_OF_FLOAT32),
        _case("non_finite", (75, 3), (2, 2, 64, 64), has_strays=True),
        _case("non_finite_float32", (3, 75), (2, 2, 64, 64), has_strays=True, **float32),
    )  # fmt: skip


#: What is special about the values of cases of 16-bit inputs, and of those in float32 that have two terms to lose.
_INPUTS = (
    *("no_decay", "tiny_decay", "erasing_decay", "mixed_decay", "wide_beta", "tiny_keys", "vanishing_keys"),
    *("zero_keys_and_queries", "small_values", "large_values", "scaled_rows", "near_equal_keys"),
)
_INPUTS_OF_FLOAT32 = (
    *("no_decay", "erasing_decay", "mixed_decay", "vanishing_keys", "small_values", "large_values", "near_equal_keys"),
)

CHUNKED_CASES: dict[str, ChunkedCase] = {case.name: case for case in _named_cases()}


def rare_cases() -> tuple[ChunkedCase, ...]:
    """Head sizes and types that no named case has, for tests."""
    float32 = {"work_dtype": "float32"}
    return (
        _case("into_bfloat16", (130, 3), (1, 2, 64, 64), state_dtype="bfloat16", gate_dtype="bfloat16"),
        _case("float32_into_float16", (70, 5), (2, 4, 32, 32), state_dtype="float16", **float32),
        _case("float16_readout", (70, 5), (1, 3, 32, 32), work_dtype="float16", out_dtype="float16"),
        _case("heads_32_256", (66, 3), (1, 1, 32, 256), state_dtype="bfloat16"),
        _case("heads_64_32_float32", (66, 3), (3, 3, 64, 32), **float32),
        _case("heads_96_192_float32", (66, 3), (1, 1, 96, 192), inputs="wide_beta", **float32),
        _case("heads_128_64", (66, 3), (1, 2, 128, 64), out_dtype="bfloat16"),
        _case("heads_128_128_float32", (130, 1), (1, 1, 128, 128), **float32),
        _case("heads_160_96_float32", (66, 31), (1, 1, 160, 96), **float32),
        _case("heads_224_160", (66, 3), (1, 1, 224, 160)),
        _case("heads_256_32_float32", (66, 31), (1, 1, 256, 32), **float32),
        _case("heads_256_256", (66,), (1, 1, 256, 256)),
    )
