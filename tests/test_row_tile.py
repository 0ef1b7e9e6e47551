"""The thread maps that are offered, and what they need of the hardware."""

from __future__ import annotations

from itertools import product

import pytest

from gdn.backends.row_tile import MAX_SHARED_BYTES, RowTile, default_row_tile, num_chains, row_tiles

HEAD_DIMS = tuple(range(8, 257, 8))


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_map_that_is_offered(itemsize: int) -> None:
    for key_head_dim, value_head_dim in product(HEAD_DIMS, HEAD_DIMS):
        offered = row_tiles(key_head_dim, value_head_dim, itemsize)
        assert default_row_tile(key_head_dim, value_head_dim, itemsize) in offered
        for tile in offered:
            assert value_head_dim % tile.columns == 0
            assert num_chains(key_head_dim) % tile.row_groups == 0
            assert tile.shared_bytes(key_head_dim) <= MAX_SHARED_BYTES
            assert tile.min_blocks(key_head_dim) >= 1


def test_the_map_of_the_common_sizes() -> None:
    """What the performance notes measured as best: 64 columns, four warps, 16 bytes a thread."""
    assert default_row_tile(128, 128, 4) == RowTile(row_groups=8, lanes_per_row=16, columns_per_lane=4)
    assert default_row_tile(128, 128, 2) == RowTile(row_groups=16, lanes_per_row=8, columns_per_lane=8)


def test_a_map_with_too_much_shared_memory_is_not_offered() -> None:
    greedy = RowTile(row_groups=8, lanes_per_row=32, columns_per_lane=8)
    assert greedy.shared_bytes(128) > MAX_SHARED_BYTES
    assert greedy not in row_tiles(128, 256, 2)
