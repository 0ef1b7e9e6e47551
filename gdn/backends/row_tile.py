"""Thread maps of the row-tile kernels: how a block splits the state of one head among its threads.

The choice changes speed, never bits: the reduction tree in `kernels/gated_delta_step.cuh` depends on the key
head dimension alone, and a map only says which chains of it a thread holds. There are two families: a block for each
tile (here), and blocks whose warps stream through tiles (`gdn.backends.streamed_tile`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache

from gdn.geometry import HeadGeometry

#: State elements a thread may hold in registers beside its working set without spilling.
MAX_ELEMENTS_PER_LANE = 64
#: Registers of one multiprocessor, the same from sm_80 to sm_120.
REGISTERS_PER_MULTIPROCESSOR = 65536
MAX_THREADS = 256
#: Bytes of state up to which a launch on an H200 gains from states that leave the cache at once; beyond it loses.
MAX_SHORT_STAY_BYTES = 200_000_000
#: Static shared memory that a block may have.
MAX_SHARED_BYTES = 48 * 1024
WARP = 32


def num_chains(key_head_dim: int) -> int:
    """Chains of the reduction tree, as in `kernels/gated_delta_step.cuh`."""
    return 16 if key_head_dim % 16 == 0 else 8


@dataclass(frozen=True, slots=True)
class RowTile:
    """One thread map. A row group is `lanes_per_row` neighbouring threads with `columns_per_lane` columns each.

    streamed_warps: 0 where a block holds one tile; otherwise the warps of a block, each of which holds a tile of its
    own and goes from one to the next. tokens_per_warp: that each of them makes ready at a time. records_per_warp: that
    each of them asks for at a time, in a call with pending records.
    """

    row_groups: int
    lanes_per_row: int
    columns_per_lane: int
    streamed_warps: int = 0
    tokens_per_warp: int = 1
    records_per_warp: int = 0

    @property
    def columns(self) -> int:
        """Columns of a tile of the state."""
        return self.lanes_per_row * self.columns_per_lane

    @property
    def threads(self) -> int:
        """Threads of a block; at least one warp."""
        return self.streamed_warps * WARP or max(WARP, self.row_groups * self.lanes_per_row)

    def holds_state_as(self, other: RowTile) -> bool:
        """Whether threads hold the same parts of the state, however many tokens and records they make ready."""
        return replace(self, tokens_per_warp=other.tokens_per_warp, records_per_warp=other.records_per_warp) == other

    def elements_per_lane(self, key_head_dim: int) -> int:
        """State elements that one thread holds."""
        return key_head_dim // self.row_groups * self.columns_per_lane

    def min_blocks(self, registers: int) -> int:
        """Blocks a multiprocessor must be able to hold, which caps the registers of a thread."""
        return REGISTERS_PER_MULTIPROCESSOR // (self.threads * registers)

    def shared_bytes(self, key_head_dim: int, state_itemsize: int) -> int:
        """Shared memory of a block of the recurrence kernels, at most."""
        if self.streamed_warps:
            return self._streamed_bytes(key_head_dim, state_itemsize)
        warps = self.threads // WARP
        sums = 4 + 2 * self.columns_per_lane + (4 - 2 * self.columns_per_lane % 4) % 4
        tokens = 2 * 2 * 4 * key_head_dim
        return tokens + (2 * 4 * warps * self.lanes_per_row * sums if warps > 1 else 0) + 64  # and bits of clearing

    def _streamed_bytes(self, key_head_dim: int, state_itemsize: int) -> int:
        """States on their way, two chunks of tokens and records; `BlockMemory` in `kernels/streamed_tokens.cuh`."""

        def aligned(num_bytes: int) -> int:
            return -(-num_bytes // 16) * 16

        rows, warps = key_head_dim // self.row_groups, self.streamed_warps
        free_columns = 0 if self.columns * state_itemsize % 128 == 0 else self.columns
        state = aligned(self.row_groups * (rows * self.columns + free_columns) * state_itemsize)
        token = aligned(4 * (2 * self.row_groups * (rows + 4) + warps * self.columns + 5))
        record = aligned(4 * (key_head_dim + 4 * self.row_groups + warps * self.columns + 1))  # of float32, the widest
        chunks = 2 * (self.tokens_per_warp * token + self.records_per_warp * record)
        return warps * (state + chunks) + 16  # and a barrier

    def macros(self, key_head_dim: int, state_itemsize: int, registers: int) -> tuple[tuple[str, str], ...]:
        """The map as compile-time constants of a kernel whose threads may use so many registers."""
        shared: tuple[tuple[str, str], ...] = ()
        if self.streamed_warps:
            shared = (
                ("TOKENS_PER_WARP", str(self.tokens_per_warp)),
                ("SHARED_BYTES", str(self.shared_bytes(key_head_dim, state_itemsize))),
            )
        if self.records_per_warp:
            shared += (("RECORDS_PER_WARP", str(self.records_per_warp)),)
        return (
            ("ROW_GROUPS", str(self.row_groups)),
            ("LANES_PER_ROW", str(self.lanes_per_row)),
            ("COLUMNS_PER_LANE", str(self.columns_per_lane)),
            ("MIN_BLOCKS", str(self.min_blocks(registers))),
            ("STREAMED_WARPS", str(self.streamed_warps)),
            *shared,
        )


def is_common_size(key_head_dim: int) -> bool:
    """Whether compilers get along with fewer registers: chains of the reduction tree are whole 16-byte runs."""
    return key_head_dim in (64, 128)


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
        and tile.shared_bytes(key_head_dim, state_itemsize) <= MAX_SHARED_BYTES
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


def forced() -> RowTile | None:
    """The map that calls here and now are forced to."""
    return _forced.get()


def row_tile_for(heads: HeadGeometry, state_itemsize: int, columns: int, threads: int) -> RowTile:
    """The map, of those with a block for each tile, nearest to a tile of `columns` on `threads` threads.

    Inside `forced_row_tile` the forced one, if it is of this family.
    """
    wanted = forced()
    if wanted is not None and not wanted.streamed_warps:
        return wanted
    return nearest_row_tile(heads.key_head_dim, heads.value_head_dim, state_itemsize, columns, threads)


@cache
def nearest_row_tile(
    key_head_dim: int, value_head_dim: int, state_itemsize: int, columns: int = 64, threads: int = 128
) -> RowTile:
    """Of all maps the one with four columns a thread, so that one access moves them, and the nearest numbers.

    Neighbouring threads should continue the same row for 128 to 256 bytes; that decides bandwidth more than anything
    else, for many heads. Few heads are spread over more multiprocessors by smaller tiles. More than 64 state elements a
    thread would leave too few threads to hide a load.
    """

    def merit(tile: RowTile) -> tuple[int, int, int, int]:
        return (
            min(tile.columns_per_lane, 4),
            -abs(tile.columns - columns),
            -abs(tile.threads - threads),
            -tile.columns_per_lane,
        )

    return max(row_tiles(key_head_dim, value_head_dim, state_itemsize), key=merit)
