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
    few, small = (1, 2, 64, 64), (2, 4, 32, 32)
    float32 = {"work_dtype": "float32"}
    bfloat16 = {"out_dtype": "bfloat16", "state_dtype": "bfloat16"}
    one_row = (150,)
    return (
        _case("bfloat16", (1, 130, 0, 65, 3), few, padding=(4,), **bfloat16),
        _case("float32", (1, 130, 0, 65, 3), few, padding=(4,), **float32),
        _case("float16", (130, 37), few, work_dtype="float16", out_dtype="float16", state_dtype="float16"),
        _case("into_bfloat16", (200,), few, state_dtype="bfloat16", gate_dtype="bfloat16"),
        _case("float32_into_float16", (70, 5), small, state_dtype="float16", **float32),
        _case("short_edges", (0, 1, 2, 8, 15, 16, 17, 31, 32, 33, 48, 63), small),
        _case("long_edges", (64, 65, 80, 96, 127, 128, 129), small),
        _case("short_edges_float32", (0, 1, 15, 16, 17, 32, 33, 63, 64, 65), small, **float32),
        _case("ragged_batch", (1, 7, 200, 1, 0, 66, 2, 128, 5, 190), small, padding=(3, 5), index_dtype="int32"),
        _case("uncovered_rows", (5, 1, 70), small, padding=(1,), leading_rows=130, trailing_rows=67),
        _case("only_padding", (3, 70), small, padding=(0, 1), trailing_rows=2),
        _case("no_tokens", (0, 0), small, leading_rows=3),
        _case("group_of_1", (66, 9), (3, 3, 32, 64)),
        _case("group_of_4", (66, 9), (1, 4, 64, 32), **float32),
        _case("heads_128_128", (130, 1), (1, 2, 128, 128)),
        _case("heads_128_128_float32", (70,), (1, 1, 128, 128), **float32),
        _case("heads_128_64", (66, 3), (1, 2, 128, 64), **bfloat16),
        _case("heads_96_192", (66, 3), (1, 1, 96, 192), inputs="wide_beta"),
        _case("heads_256_256", (66,), (1, 1, 256, 256)),
        _case("heads_256_32_float32", (66, 31), (1, 1, 256, 32), **float32),
        _case("heads_32_256", (66, 3), (1, 1, 32, 256), state_dtype="bfloat16"),
        _case("heads_224_160", (66, 3), (1, 1, 224, 160)),
        _case(
            "sliced", (70, 1, 4), small, qkv_layout="slice", gate_layout="slice", state_layout="gaps",
            out_layout="slice", **bfloat16
        ),
        _case(
            "unaligned", (70, 1, 4), small, qkv_layout="unaligned", gate_layout="unaligned", state_layout="unaligned",
            index_layout="every_other", out_layout="unaligned", **bfloat16
        ),
        _case(
            "strided", (70, 1, 4), small, qkv_layout="every_other", gate_layout="column_major",
            index_layout="every_other", out_layout="column_major", index_dtype="int32", **float32
        ),
        _case("reversed", (70, 1, 4), small, qkv_layout="reversed", gate_layout="reversed", out_layout="reversed"),
        _case("no_decay", one_row, few, inputs="no_decay"),
        _case("no_decay_float32", one_row, few, inputs="no_decay", **float32),
        _case("tiny_decay", one_row, few, inputs="tiny_decay"),
        _case("erasing_decay", one_row, few, inputs="erasing_decay"),
        _case("erasing_decay_float32", one_row, few, inputs="erasing_decay", **float32),
        _case("mixed_decay", one_row, few, inputs="mixed_decay"),
        _case("mixed_decay_float32", one_row, few, inputs="mixed_decay", **float32),
        _case("beta_up_to_2", one_row, few, inputs="wide_beta"),
        _case("tiny_keys", one_row, few, inputs="tiny_keys"),
        _case("vanishing_keys", one_row, few, inputs="vanishing_keys"),
        _case("vanishing_keys_float32", one_row, few, inputs="vanishing_keys", **float32),
        _case("zero_keys_and_queries", one_row, few, inputs="zero_keys_and_queries"),
        _case("small_values", one_row, few, inputs="small_values"),
        _case("small_values_float32", one_row, few, inputs="small_values", **float32),
        _case("large_values", one_row, few, inputs="large_values"),
        _case("large_values_float32", one_row, few, inputs="large_values", **float32),
        _case("scaled_rows", one_row, few, inputs="scaled_rows"),
        _case("near_equal_keys", one_row, few, inputs="near_equal_keys"),
        _case("near_equal_keys_float32", one_row, few, inputs="near_equal_keys", **float32),
        _case("non_finite", (140, 3), (2, 4, 32, 32), has_strays=True),
        _case("non_finite_float32", (3, 140), (2, 4, 32, 32), has_strays=True, **float32),
    )  # fmt: skip


CHUNKED_CASES: dict[str, ChunkedCase] = {case.name: case for case in _named_cases()}
