"""The thread maps with a block for each tile: which are offered, which a call takes, what they need of the hardware."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest

from gdn.arrays import DTYPES, describe
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import recurrence
from gdn.backends.row_tile import (
    MAX_SHARED_BYTES,
    MAX_SHORT_STAY_BYTES,
    RowTile,
    forced_row_tile,
    nearest_row_tile,
    num_chains,
    row_tile_for,
    row_tiles,
)
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs, recurrence_inputs
from gdn.ring import FoldInputs, fold_inputs, verify_inputs

HEAD_DIMS = tuple(range(8, 257, 8))
HEADS = HeadGeometry(16, 32, 128, 128)


def shape_of(shape: tuple[int, ...], dtype: str) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=DTYPES[dtype])


def decode_of(batch_size: int, state_dtype: str, work_dtype: str = "bfloat16") -> RecurrenceInputs:
    """One token of each sequence, described from shapes alone."""
    gate = shape_of((batch_size, 32), "float32")
    return recurrence_inputs(
        describe,
        shape_of((batch_size, HEADS.conv_dim), work_dtype),
        *(gate, gate),
        shape_of((batch_size, 32, 128, 128), state_dtype),
        shape_of((batch_size,), "uint32"),
        shape_of((batch_size + 1,), "uint32"),
    )


def fold_of(batch_size: int, state_dtype: str) -> FoldInputs:
    table = shape_of((1, batch_size), "uint32")
    pool, ring = shape_of((batch_size, 32, 128, 128), state_dtype), shape_of((batch_size, 16, 4, 392), "float32")
    return fold_inputs(describe, pool, table, ring, table, shape_of((batch_size,), "uint32"))


@pytest.mark.parametrize("size", [(16, 32), (32, 64), (64, 128)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_map_that_is_offered(itemsize: int, size: tuple[int, int]) -> None:
    for key_head_dim, value_head_dim in product(HEAD_DIMS, HEAD_DIMS):
        offered = row_tiles(key_head_dim, value_head_dim, itemsize)
        assert nearest_row_tile(key_head_dim, value_head_dim, itemsize, *size) in offered
        for tile in offered:
            assert value_head_dim % tile.columns == 0
            assert num_chains(key_head_dim) % tile.row_groups == 0
            assert tile.shared_bytes(key_head_dim, itemsize) <= MAX_SHARED_BYTES
            assert tile.min_blocks(256) >= 1


@pytest.mark.parametrize(
    ("state_dtype", "batch_size", "expected"),
    [
        ("float32", 4, RowTile(8, 4, 4)),
        ("float32", 5, RowTile(8, 8, 4)),
        ("float32", 12, RowTile(8, 8, 4)),
        ("float32", 13, RowTile(8, 16, 4)),
        ("bfloat16", 1, RowTile(8, 8, 4)),
        ("bfloat16", 16, RowTile(8, 8, 4)),
        ("bfloat16", 17, RowTile(8, 16, 4)),
    ],
)
def test_the_map_of_a_decode_step(state_dtype: str, batch_size: int, expected: RowTile) -> None:
    """Measured best: few heads are spread by small tiles, 16-bit rows want more columns."""
    assert recurrence.row_tile(decode_of(batch_size, state_dtype)) == expected


@pytest.mark.parametrize(
    ("state_dtype", "batch_size", "expected"),
    [
        ("float32", 4, RowTile(16, 4, 4)),
        ("float32", 8, RowTile(8, 8, 4)),
        ("float32", 13, RowTile(8, 16, 4)),
        ("bfloat16", 4, RowTile(16, 8, 4)),
        ("bfloat16", 256, RowTile(8, 8, 4)),
    ],
)
def test_the_map_of_a_fold(state_dtype: str, batch_size: int, expected: RowTile) -> None:
    assert fold_kernel.row_tile(fold_of(batch_size, state_dtype)) == expected


def test_a_map_can_be_forced() -> None:
    with forced_row_tile(RowTile(1, 32, 1)):
        assert row_tile_for(HEADS, 4, 64, 128) == RowTile(1, 32, 1)
        assert fold_kernel.row_tile(fold_of(8, "float32")) == RowTile(1, 32, 1)
    assert row_tile_for(HEADS, 4, 64, 128) == RowTile(8, 16, 4)


def stays(variant_macros: tuple[tuple[str, str], ...]) -> bool:
    return {"true": True, "false": False}[dict(variant_macros)["STATE_STAYS"]]


def test_states_leave_the_cache_at_once_where_they_are_few() -> None:
    most = MAX_SHORT_STAY_BYTES // (32 * 128 * 128 * 4)
    for batch_size, expected in ((most, False), (most + 1, True)):
        inputs = decode_of(batch_size, "float32")
        out = describe("out", shape_of((batch_size, 32 * 128), "bfloat16"))
        tile = recurrence.row_tile(inputs)
        assert stays(fwd_kernel.variant(inputs, out, tile).macros) == expected
        ring = shape_of((batch_size, 16, 4, 392), "float32")
        verify = verify_inputs(describe, inputs, ring, shape_of((batch_size,), "uint32"))
        assert stays(verify_kernel.variant(verify, out, tile).macros) == expected
        fold = fold_of(batch_size, "float32")
        assert stays(fold_kernel.variant(fold, fold_kernel.row_tile(fold)).macros) == expected
