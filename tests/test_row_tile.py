"""The thread maps that are offered, and what they need of the hardware."""

from __future__ import annotations

from itertools import product

import pytest

from gdn.backends.row_tile import (
    FEW_HEADS,
    MAX_SHARED_BYTES,
    RowTile,
    default_row_tile,
    forced_row_tile,
    num_chains,
    row_tile_for,
    row_tiles,
)
from gdn.geometry import HeadGeometry

HEAD_DIMS = tuple(range(8, 257, 8))


@pytest.mark.parametrize("few_heads", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_map_that_is_offered(itemsize: int, few_heads: bool) -> None:
    for key_head_dim, value_head_dim in product(HEAD_DIMS, HEAD_DIMS):
        offered = row_tiles(key_head_dim, value_head_dim, itemsize)
        assert default_row_tile(key_head_dim, value_head_dim, itemsize, few_heads=few_heads) in offered
        for tile in offered:
            assert value_head_dim % tile.columns == 0
            assert num_chains(key_head_dim) % tile.row_groups == 0
            assert tile.shared_bytes(key_head_dim) <= MAX_SHARED_BYTES
            assert tile.min_blocks(key_head_dim) >= 1


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_maps_of_the_common_size(itemsize: int) -> None:
    """Measured best: 64 columns on four warps for many heads, 16 columns on one warp for few."""
    assert default_row_tile(128, 128, itemsize) == RowTile(row_groups=8, lanes_per_row=16, columns_per_lane=4)
    few = default_row_tile(128, 128, itemsize, few_heads=True)
    assert few == RowTile(row_groups=8, lanes_per_row=4, columns_per_lane=4)


def test_the_number_of_heads_decides() -> None:
    heads = HeadGeometry(16, 32, 128, 128)
    assert row_tile_for(heads, 4, FEW_HEADS) == default_row_tile(128, 128, 4, few_heads=True)
    assert row_tile_for(heads, 4, FEW_HEADS + 1) == default_row_tile(128, 128, 4)
    with forced_row_tile(RowTile(1, 32, 1)):
        assert row_tile_for(heads, 4, 1) == RowTile(1, 32, 1)
