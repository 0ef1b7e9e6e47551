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

#: State elements a thread may hold in registers beside its working set without spilling.
MAX_ELEMENTS_PER_LANE = 128
#: Registers of one multiprocessor, the same from sm_80 to sm_120.
REGISTERS_PER_MULTIPROCESSOR = 65536
#: Registers a thread may use, by how many values it keeps in them at once.
_REGISTER_CAPS = ((100, 128), (120, 168))
MAX_THREADS = 256
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

        The caps leave room for addresses and scalars beside what a thread keeps in registers at once: its state, two
        chains of a token it prepares, and per column two sums, a delta factor and a readout. A test compiles every
        variant and fails on a spill.
        """
        chain_length = key_head_dim // num_chains(key_head_dim)
        values = self.elements_per_lane(key_head_dim) + 2 * chain_length + 4 * self.columns_per_lane
        registers = next((cap for most, cap in _REGISTER_CAPS if values <= most), 256)
        return REGISTERS_PER_MULTIPROCESSOR // (self.threads * registers)

    def shared_bytes(self, key_head_dim: int) -> int:
        """Static shared memory of `kernels/recurrence.cuh` with this map: a stage of tokens, and sums of warps."""
        tokens, warps = self.threads // 16, self.threads // WARP
        stage = tokens * 4 * (2 * key_head_dim + self.columns + 5)
        sums = 2 * warps * self.columns * 8 if warps > 1 else 0
        return stage + sums + 64  # alignment, and the bits of a clearing block

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


def row_tile_for(key_head_dim: int, value_head_dim: int, state_itemsize: int) -> RowTile:
    """The map of a call: the forced one inside `forced_row_tile`, else the default."""
    return _forced.get() or default_row_tile(key_head_dim, value_head_dim, state_itemsize)


@cache
def default_row_tile(key_head_dim: int, value_head_dim: int, state_itemsize: int) -> RowTile:
    """The map an op picks: the widest accesses, then four warps on a tile of up to 64 columns.

    A thread should move 16 bytes and its neighbours continue the same row for 128 to 256 bytes; that decides
    bandwidth more than anything else.
    """

    def merit(tile: RowTile) -> tuple[int, int, int, int]:
        return (
            min(tile.columns_per_lane * state_itemsize, 16),
            min(tile.columns, 64),
            -abs(tile.threads - 4 * WARP),
            tile.row_groups,
        )

    return max(row_tiles(key_head_dim, value_head_dim, state_itemsize), key=merit)
