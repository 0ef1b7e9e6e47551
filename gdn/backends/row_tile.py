"""Thread maps of the row-tile kernels: how a block splits the state of one head among its threads.

The choice changes speed, never bits: the reduction tree in `kernels/gated_delta_step.cuh` depends on the key
head dimension alone, and a map only says which chains of it a thread holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache

from gdn.geometry import HeadGeometry

#: State elements a thread may hold in registers beside its working set without spilling.
MAX_ELEMENTS_PER_LANE = 64
#: Registers of one multiprocessor, the same from sm_80 to sm_120.
REGISTERS_PER_MULTIPROCESSOR = 65536
#: Registers a thread may use, by how many state elements, sums, delta factors and readouts it holds.
_REGISTER_CAPS = ((32, 128), (80, 168))
MAX_THREADS = 256
#: Up to so many heads over all sequences, tiles of 64 columns would leave multiprocessors idle.
FEW_HEADS = 128
#: Static shared memory that a block may have.
MAX_SHARED_BYTES = 48 * 1024
WARP = 32


def num_chains(key_head_dim: int) -> int:
    """Chains of the reduction tree, as in `kernels/gated_delta_step.cuh`."""
    return 16 if key_head_dim % 16 == 0 else 8


@dataclass(frozen=True, slots=True)
class RowTile:
    """One thread map. A row group is `lanes_per_row` neighbouring threads with `columns_per_lane` columns each."""

    row_groups: int
    lanes_per_row: int
    columns_per_lane: int

    @property
    def columns(self) -> int:
        """Columns of the state that one block owns."""
        return self.lanes_per_row * self.columns_per_lane

    @property
    def threads(self) -> int:
        """Threads of a block; at least one warp."""
        return max(WARP, self.row_groups * self.lanes_per_row)

    def elements_per_lane(self, key_head_dim: int) -> int:
        """State elements that one thread holds."""
        return key_head_dim // self.row_groups * self.columns_per_lane

    def min_blocks(self, key_head_dim: int) -> int:
        """Blocks a multiprocessor must be able to hold, which caps the registers of a thread.

        The caps leave room for a thread's sums, delta factors, addresses and scalars beside its part of the state. A
        test compiles every variant and fails on a spill.
        """
        values = self.elements_per_lane(key_head_dim) + 4 * self.columns_per_lane
        registers = next((cap for most, cap in _REGISTER_CAPS if values <= most), 256)
        return REGISTERS_PER_MULTIPROCESSOR // (self.threads * registers)

    def shared_bytes(self, key_head_dim: int) -> int:
        """Static shared memory of `kernels/recurrence.cuh` with this map: two tokens, and twice the sums of warps."""
        warps = self.threads // WARP
        sums = 4 + 2 * self.columns_per_lane + (4 - 2 * self.columns_per_lane % 4) % 4
        tokens = 2 * 2 * 4 * key_head_dim
        return tokens + (2 * 4 * warps * self.lanes_per_row * sums if warps > 1 else 0) + 64  # and bits of clearing

    def macros(self, key_head_dim: int) -> tuple[tuple[str, str], ...]:
        """The map as compile-time constants of a kernel."""
        return (
            ("ROW_GROUPS", str(self.row_groups)),
            ("LANES_PER_ROW", str(self.lanes_per_row)),
            ("COLUMNS_PER_LANE", str(self.columns_per_lane)),
            ("MIN_BLOCKS", str(self.min_blocks(key_head_dim))),
        )


def _powers_of_two(limit: int) -> Iterator[int]:
    power = 1
    while power <= limit:
        yield power
        power *= 2


@cache
def row_tiles(key_head_dim: int, value_head_dim: int, state_itemsize: int) -> tuple[RowTile, ...]:
    """Every map that serves these head sizes, for a pool whose elements have `state_itemsize` bytes."""
    return tuple(
        tile
        for columns_per_lane in _powers_of_two(16 // state_itemsize)
        for lanes_per_row in _powers_of_two(WARP)
        for row_groups in _powers_of_two(num_chains(key_head_dim))
        for tile in (RowTile(row_groups, lanes_per_row, columns_per_lane),)
        if value_head_dim % tile.columns == 0
        and row_groups * lanes_per_row <= MAX_THREADS
        and tile.elements_per_lane(key_head_dim) <= MAX_ELEMENTS_PER_LANE
        and tile.shared_bytes(key_head_dim) <= MAX_SHARED_BYTES
    )


_forced: ContextVar[RowTile | None] = ContextVar("gdn_forced_row_tile", default=None)


@contextmanager
def forced_row_tile(tile: RowTile) -> Iterator[None]:
    """Run calls with this map instead of the one that would be picked, to show that bits do not depend on it."""
    token = _forced.set(tile)
    try:
        yield
    finally:
        _forced.reset(token)


def row_tile_for(heads: HeadGeometry, state_itemsize: int, num_heads: int) -> RowTile:
    """The map of a call on `num_heads` value heads, all sequences together; inside `forced_row_tile` the forced one."""
    forced = _forced.get()
    if forced is not None:
        return forced
    few_heads = num_heads <= FEW_HEADS
    return default_row_tile(heads.key_head_dim, heads.value_head_dim, state_itemsize, few_heads=few_heads)


@cache
def default_row_tile(
    key_head_dim: int, value_head_dim: int, state_itemsize: int, *, few_heads: bool = False
) -> RowTile:
    """The map an op picks: four columns a thread on a tile of up to 64, four warps a block.

    Neighbouring threads should continue the same row for 128 to 256 bytes; that decides bandwidth more than anything
    else. More than 64 state elements a thread would leave too few threads to hide a load. For `few_heads` one warp
    takes 16 columns: that spreads them over more multiprocessors, and a block of one warp needs no barrier.
    """
    columns, threads = (16, WARP) if few_heads else (64, 4 * WARP)

    def merit(tile: RowTile) -> tuple[int, int, int, int]:
        return (
            min(tile.columns_per_lane, 4),
            -abs(tile.columns - columns),
            -abs(tile.threads - threads),
            -tile.columns_per_lane,
        )

    return max(row_tiles(key_head_dim, value_head_dim, state_itemsize), key=merit)


def some_row_tiles(heads: HeadGeometry, state_itemsize: int, count: int) -> tuple[RowTile, ...]:
    """The maps that calls pick by themselves, and `count` more spread over all that serve these heads."""
    sizes = heads.key_head_dim, heads.value_head_dim, state_itemsize
    tiles = row_tiles(*sizes)
    spread = tiles[:: max(1, len(tiles) // count)][:count]
    defaults = (default_row_tile(*sizes, few_heads=few_heads) for few_heads in (False, True))
    return tuple(dict.fromkeys((*defaults, *spread)))
