"""Thread maps of the streaming kernels, `kernels/streamed_tokens.cuh`: which there are, and which one a call takes.

They serve windows of several tokens: a warp keeps its tile in registers from one token to the next, and meets the other
warps of its block once a chunk of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product

from gdn.backends.row_tile import WARP, RowTile, forced, num_chains
from gdn.geometry import HeadGeometry

#: State elements a streaming thread may hold: a few large tiles need fewer exchanges than many small ones.
MAX_STREAMED_ELEMENTS = 128
#: ... and those together with the values of the tokens that it makes ready: one more and some variant spills.
MAX_STREAMED_VALUES = 188
#: ... in calls with pending records.
MAX_VALUES_WITH_RECORDS = 174
#: ... and key head sizes, with the row groups, that spill all the same on sm_80 with four tokens a warp, not with two.
_FEW_TOKENS = ((176, 8), (240, 16))
#: Shared memory that a block may ask for on every architecture that is served, beside a few bytes of its own variables.
MAX_LAUNCH_SHARED_BYTES = 99 * 1024 - 64
#: Mean tokens of a sequence from which on streaming pays: a single token is bound by the state's bytes.
MIN_STREAMED_TOKENS = 2
#: ... and from which on a warp makes several tokens ready at a time.
LONG_ROW_TOKENS = 16
#: Up to so many heads over all sequences, large tiles would leave multiprocessors idle; measured on an H200.
FEW_STREAMED_HEADS = 64

#: Up to so many, single tokens with pending records are better off with a block for each tile; measured there too.
FEW_PENDING_HEADS = 128

_COLUMNS_PER_LANE = 4
_MAX_ROW_GROUPS = 16
_CHUNK_TOKENS = 4  # at least
_MAX_TOKENS_PER_WARP = 4
_MAX_RECORDS_PER_WARP = 2
_MAX_WARPS = 4
#: Warps that may share a whole head, which is then copied in bulk.
_MAX_WARPS_OF_HEAD = 6


@cache
def streamed_tiles(key_head_dim: int, value_head_dim: int, state_itemsize: int) -> tuple[RowTile, ...]:
    """Every streaming map that serves these head sizes, from large tiles to small ones."""
    maps = (
        tile
        for row_groups in (2, 4, 8, _MAX_ROW_GROUPS)
        for tile in _maps_of(row_groups, key_head_dim, value_head_dim)
        if num_chains(key_head_dim) == 16
        and tile.elements_per_lane(key_head_dim) <= MAX_STREAMED_ELEMENTS
        and streamed_values(tile, key_head_dim) <= MAX_STREAMED_VALUES
        and tile.shared_bytes(key_head_dim, state_itemsize) <= MAX_LAUNCH_SHARED_BYTES
    )
    return tuple(dict.fromkeys(maps))


def _maps_of(row_groups: int, key_head_dim: int, value_head_dim: int) -> Iterator[RowTile]:
    """Blocks of a whole head, or of as many warps as divide it; small tiles for long rows too.

    A thread that holds a small part of the state has registers left for the tokens of a long chunk.
    """
    lanes_per_row = WARP // row_groups
    num_tiles, rest = divmod(value_head_dim, lanes_per_row * _COLUMNS_PER_LANE)
    if rest:
        return
    warps = next(count for count in range(_MAX_WARPS, 0, -1) if num_tiles % count == 0)
    if num_tiles <= _MAX_WARPS_OF_HEAD:
        warps = num_tiles
    most = 2 if (key_head_dim, row_groups) in _FEW_TOKENS else _MAX_TOKENS_PER_WARP
    yield RowTile(row_groups, lanes_per_row, _COLUMNS_PER_LANE, warps, min(most, -(-_CHUNK_TOKENS // warps)))
    if row_groups == _MAX_ROW_GROUPS:
        yield RowTile(row_groups, lanes_per_row, _COLUMNS_PER_LANE, warps, most)


def streamed_tile_for(
    heads: HeadGeometry, state_itemsize: int, batch_size: int, total_seq_len: int, pending_ring_len: int = 0
) -> RowTile | None:
    """The map of a call, None where it should not stream, or no such map serves its heads.

    pending_ring_len: RING_LEN of a call with pending records. Inside `forced_row_tile` the forced map, or None if that
    does not stream.
    """
    if not batch_size:  # a streaming block reads the tables of a sequence before it knows that there is one
        return None
    sizes = heads.key_head_dim, heads.value_head_dim, state_itemsize
    tiles = tiles_with_records(*sizes, pending_ring_len) if pending_ring_len else streamed_tiles(*sizes)
    wanted = forced()
    if wanted is not None:
        if not pending_ring_len:
            return wanted if wanted in tiles else None
        like = [tile for tile in tiles if tile.holds_state_as(wanted)]
        return min(like, key=lambda tile: abs(tile.tokens_per_warp - wanted.tokens_per_warp), default=None)
    num_heads = batch_size * heads.num_value_heads
    # Pending records count as tokens, but how many there are is known on the device alone.
    is_short = total_seq_len < MIN_STREAMED_TOKENS * batch_size
    if not tiles or (is_short and not (pending_ring_len and num_heads > FEW_PENDING_HEADS)):
        return None
    if num_heads > FEW_STREAMED_HEADS:
        return tiles[0]
    small = [tile for tile in tiles if tile.row_groups == tiles[-1].row_groups]
    return small[-1] if total_seq_len >= LONG_ROW_TOKENS * batch_size else small[0]


@cache
def tiles_with_records(
    key_head_dim: int, value_head_dim: int, state_itemsize: int, ring_len: int
) -> tuple[RowTile, ...]:
    """The maps for calls with pending records: as many records and tokens at a time as there is room for."""

    def widened(tile: RowTile) -> Iterator[RowTile]:
        most = min(_MAX_RECORDS_PER_WARP, -(-ring_len // tile.streamed_warps))
        for records, tokens in product(range(most, 0, -1), range(tile.tokens_per_warp, 0, -1)):
            candidate = replace(tile, records_per_warp=records, tokens_per_warp=tokens)
            if (
                candidate.shared_bytes(key_head_dim, state_itemsize) <= MAX_LAUNCH_SHARED_BYTES
                and streamed_values(candidate, key_head_dim) <= MAX_VALUES_WITH_RECORDS
            ):
                yield candidate
                return

    tiles = streamed_tiles(key_head_dim, value_head_dim, state_itemsize)
    return tuple(dict.fromkeys(candidate for tile in tiles for candidate in widened(tile)))


def streamed_values(tile: RowTile, key_head_dim: int) -> int:
    """How much a streaming thread holds: of each token that it makes ready a chain, values and gates; its state.

    A state element counts for more than one, since what a token does to it takes registers as well.
    """
    chain, columns = key_head_dim // num_chains(key_head_dim), tile.streamed_warps * tile.columns
    values = next(count for count in range(-(-columns // WARP), columns + 1) if columns % count == 0)
    return tile.elements_per_lane(key_head_dim) * 5 // 4 + tile.tokens_per_warp * (chain + values + 2)


def streamed_registers(tile: RowTile, key_head_dim: int) -> int:
    """Registers a streaming thread may use, so that it spills none; found by compiling, as numbers do not tell."""
    elements = tile.elements_per_lane(key_head_dim)
    small_rest = streamed_values(tile, key_head_dim) <= 136 and tile.streamed_warps != 5
    fits = elements <= 32 or (elements == 96 and small_rest)
    return 168 if fits and not tile.records_per_warp else 256


def blocks_at_once(tile: RowTile, key_head_dim: int, state_itemsize: int = 4, shared_bytes: int | None = None) -> int:
    """Blocks that a multiprocessor holds at once: as registers allow, and its shared memory if that is given."""
    by_registers = tile.min_blocks(streamed_registers(tile, key_head_dim))
    if shared_bytes is None:
        return by_registers
    # The system takes 1 KiB of each block.
    return min(by_registers, shared_bytes // (tile.shared_bytes(key_head_dim, state_itemsize) + 1024))
