"""The streaming thread maps that are offered, which of them a call takes, and the grid and memory of its launch."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest

import gdn
from gdn.arrays import DTYPES, describe
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import host, recurrence
from gdn.backends.launch import Variant
from gdn.backends.row_tile import (
    REGISTERS_PER_MULTIPROCESSOR,
    WARP,
    RowTile,
    forced_row_tile,
    nearest_row_tile,
    num_chains,
    row_tiles,
)
from gdn.backends.streamed_tile import (
    FEW_STREAMED_HEADS,
    LONG_ROW_TOKENS,
    MAX_LAUNCH_SHARED_BYTES,
    MAX_STREAMED_ELEMENTS,
    MAX_STREAMED_VALUES,
    blocks_at_once,
    streamed_tile_for,
    streamed_tiles,
    streamed_values,
    tiles_with_records,
)
from gdn.geometry import HeadGeometry
from gdn.models import MODELS
from gdn.recurrence import RecurrenceInputs, recurrence_inputs
from gdn.ring import fold_inputs, verify_inputs
from gdn.testing import assert_passed, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.catalogue import NAMED_CASES
from gdn.testing.checks import subject, untouched
from gdn.testing.execute import execute
from gdn.testing.ring_cases import RingCase, build_ring_arrays
from gdn.testing.ring_checks import ring_subject

HEAD_DIMS = tuple(range(8, 257, 8))
HEADS = HeadGeometry(16, 32, 128, 128)

# ---- What is offered ----


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_map_keeps_its_constraints(itemsize: int) -> None:
    for key_head_dim, value_head_dim in product(HEAD_DIMS, HEAD_DIMS):
        for tile in streamed_tiles(key_head_dim, value_head_dim, itemsize):
            assert tile.row_groups * tile.lanes_per_row == WARP
            assert tile.row_groups >= 2 <= tile.lanes_per_row
            assert tile.threads == WARP * tile.streamed_warps
            assert num_chains(key_head_dim) % tile.row_groups == 0
            assert value_head_dim % (tile.streamed_warps * tile.columns) == 0
            assert blocks_at_once(tile, key_head_dim, itemsize, 100 * 1024) >= 1
            assert tile.columns_per_lane * tile.lanes_per_row % 8 == 0
            assert tile.columns * itemsize % 16 == 0
            assert tile.elements_per_lane(key_head_dim) <= MAX_STREAMED_ELEMENTS
            assert streamed_values(tile, key_head_dim) <= MAX_STREAMED_VALUES
            assert tile.shared_bytes(key_head_dim, itemsize) <= MAX_LAUNCH_SHARED_BYTES < 99 * 1024
            assert 1 <= blocks_at_once(tile, key_head_dim) <= REGISTERS_PER_MULTIPROCESSOR // (tile.threads * 128)
            assert tile not in row_tiles(key_head_dim, value_head_dim, itemsize)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_of_16_chains_has_a_map_and_no_other(itemsize: int) -> None:
    for key_head_dim, value_head_dim in product(HEAD_DIMS, HEAD_DIMS):
        tiles = streamed_tiles(key_head_dim, value_head_dim, itemsize)
        assert bool(tiles) == (key_head_dim % 16 == 0)
        assert len(set(tiles)) == len(tiles)
        sizes = [(tile.columns, -tile.tokens_per_warp) for tile in tiles]
        assert sizes == sorted(sizes, reverse=True), "from large tiles to small ones, short windows first"


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_maps_of_the_common_size(itemsize: int) -> None:
    """Of many heads 32 columns a warp; a multiprocessor holds two such blocks, at most 256 registers a thread."""
    tiles = streamed_tiles(128, 128, itemsize)
    assert tiles[0] == RowTile(4, 8, 4, streamed_warps=4, tokens_per_warp=1)
    assert blocks_at_once(tiles[0], 128) == 2
    assert tiles[-2:] == (RowTile(16, 2, 4, 4, 1), RowTile(16, 2, 4, 4, 4))


def test_large_heads_of_every_model_stream_with_a_whole_block() -> None:
    for heads in MODELS.values():
        assert streamed_tiles(heads.key_head_dim, heads.value_head_dim, 2)[0].streamed_warps >= 2


# ---- Which map a call takes ----


def inputs_of(
    lengths: tuple[int, ...], heads: HeadGeometry = HEADS, *, state_dtype: str = "float32", place: str | None = None
) -> RecurrenceInputs:
    """A call described from shapes alone."""
    total = sum(lengths)
    gate = shape_of((total, heads.num_value_heads), "float32")
    inputs = recurrence_inputs(
        describe,
        shape_of((total, heads.conv_dim), "bfloat16"),
        *(gate, gate),
        shape_of((len(lengths) + 2, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), state_dtype),
        shape_of((len(lengths),), "uint32"),
        shape_of((len(lengths) + 1,), "uint32"),
    )
    return replace(inputs, recurrent_state=inputs.recurrent_state._replace(place=place))


def shape_of(shape: tuple[int, ...], dtype: str) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=DTYPES[dtype])


def test_many_heads_take_the_largest_tile_and_few_the_smallest() -> None:
    tiles = streamed_tiles(128, 128, 4)
    few = FEW_STREAMED_HEADS // 32
    assert recurrence.row_tile(inputs_of((4,) * (few + 1))) == tiles[0]
    assert recurrence.row_tile(inputs_of((4,) * few)) == tiles[-2]
    assert recurrence.row_tile(inputs_of((LONG_ROW_TOKENS,) * few)) == tiles[-1]
    assert recurrence.row_tile(inputs_of((LONG_ROW_TOKENS,) * (few + 1))) == tiles[0]


def test_single_tokens_take_a_block_a_tile() -> None:
    assert recurrence.row_tile(inputs_of((1,) * 100)) == nearest_row_tile(128, 128, 4)
    assert recurrence.row_tile(inputs_of((2, *(1,) * 99))) == nearest_row_tile(128, 128, 4)
    assert recurrence.row_tile(inputs_of((2,) * 100)) == streamed_tiles(128, 128, 4)[0]
    assert recurrence.row_tile(inputs_of((1,))) == nearest_row_tile(128, 128, 4, 16, 32)


def test_a_call_without_sequences_does_not_stream() -> None:
    """A streaming block would read the tables of a sequence that is not there."""
    assert streamed_tile_for(HEADS, 4, batch_size=0, total_seq_len=70) is None
    with forced_row_tile(streamed_tiles(128, 128, 4)[0]):
        assert streamed_tile_for(HEADS, 4, batch_size=0, total_seq_len=70) is None


@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_head_size_has_a_map_for_every_kind_of_call(itemsize: int) -> None:
    """The sizes for which there is but one map, or one map of the smallest tile, among them."""
    for key_head_dim, value_head_dim in product(HEAD_DIMS[1::2], HEAD_DIMS):
        heads = HeadGeometry(1, 1, key_head_dim, value_head_dim)
        tiles = streamed_tiles(key_head_dim, value_head_dim, itemsize)
        few, long, many = (
            streamed_tile_for(heads, itemsize, batch_size, total)
            for batch_size, total in ((1, 2), (1, LONG_ROW_TOKENS), (FEW_STREAMED_HEADS + 1, 1000))
        )
        assert few is not None is not long
        assert few.columns == long.columns == min(tile.columns for tile in tiles)
        assert few.tokens_per_warp <= long.tokens_per_warp
        assert many == tiles[0]
        assert {few, long, many} <= set(recurrence.some_row_tiles(heads, itemsize, 1))


@pytest.mark.parametrize("name", ["qkv_conv_output", "recurrent_state", "out"])
def test_arrays_off_their_boundary_take_a_block_a_tile(name: str) -> None:
    inputs = inputs_of((4,) * 100)
    out = describe("out", shape_of((400, 32 * 128), "bfloat16"))
    assert recurrence.row_tile(inputs, out).streamed_warps
    if name == "out":
        out = out._replace(pointer=8)
    else:
        inputs = replace(inputs, **{name: getattr(inputs, name)._replace(pointer=8)})
    assert recurrence.row_tile(inputs, out) == nearest_row_tile(128, 128, 4)
    with forced_row_tile(streamed_tiles(128, 128, 4)[0]):
        assert recurrence.row_tile(inputs, out) == nearest_row_tile(128, 128, 4)


def test_calls_can_be_forced_to_either_family() -> None:
    short, single = inputs_of((4,) * 100), inputs_of((1,) * 100)
    block, streamed = RowTile(8, 4, 4), streamed_tiles(128, 128, 4)[-1]
    for inputs in (short, single):
        with forced_row_tile(block):
            assert recurrence.row_tile(inputs) == block
        with forced_row_tile(streamed):
            assert recurrence.row_tile(inputs) == streamed
    with forced_row_tile(RowTile(4, 8, 4, streamed_warps=3, tokens_per_warp=9)):
        assert recurrence.row_tile(short) == nearest_row_tile(128, 128, 4), "a map that is not offered"


def test_a_fold_never_streams() -> None:
    table = shape_of((1, 100), "uint32")
    ring = shape_of((100, 16, 4, 400), "float32")
    pool = shape_of((100, 32, 128, 128), "float32")
    fold = fold_inputs(describe, pool, table, ring, table, shape_of((100,), "uint32"))
    with forced_row_tile(streamed_tiles(128, 128, 4)[0]):
        tile = fold_kernel.row_tile(fold)
    assert tile == fold_kernel.row_tile(fold) == nearest_row_tile(128, 128, 4)
    assert dict(fold_kernel.variant(fold, tile).macros)["STREAMED_WARPS"] == "0"


# ---- Grid and memory ----


def test_a_launch_has_no_more_blocks_than_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrence.cuda, "num_multiprocessors", lambda device: {0: 10, 3: 100, 4: 100}[device])
    shared_kib = {0: 228, 3: 228, 4: 100}
    monkeypatch.setattr(recurrence.cuda, "shared_bytes_of_multiprocessor", lambda device: 1024 * shared_kib[device])
    tile = streamed_tiles(128, 128, 4)[0]
    assert (blocks_at_once(tile, 128), tile.streamed_warps * tile.columns) == (2, 128)
    many = inputs_of((4,) * 100, place="cuda:3")  # 3200 heads
    assert recurrence.num_blocks(many, tile) == 200
    assert recurrence.num_blocks(inputs_of((4,) * 100, place="cuda:0"), tile) == 20
    assert recurrence.num_blocks(inputs_of((4,) * 100, place="cuda:4"), tile) == 100, "no room for two"
    assert recurrence.num_blocks(inputs_of((4,), place="cuda:3"), tile) == 32 + 1
    # Blocks of half a head; 130 tokens have three pieces to clear.
    smaller = streamed_tiles(128, 128, 4)[-1]
    assert recurrence.num_blocks(inputs_of((130,), place="cuda:3"), smaller) == 32 * 4 + 3
    assert recurrence.num_blocks(many, nearest_row_tile(128, 128, 4)) == 100 * 32 * 2 + 7


@pytest.mark.parametrize("place", [None, "cpu"])
def test_the_host_stands_for_one_multiprocessor(place: str | None) -> None:
    for tile in streamed_tiles(128, 128, 4):
        assert recurrence.num_blocks(inputs_of((4,) * 100, place=place), tile) == blocks_at_once(tile, 128)


@pytest.mark.parametrize("tile", streamed_tiles(128, 128, 4))
def test_tiles_beyond_31_bits_are_refused(tile: RowTile) -> None:
    """Jobs are numbered with 32 bits whatever the number of blocks."""
    wide = HeadGeometry(2**20, 2**20, 128, 128)
    tiles_of_head = 128 // tile.columns
    fitting = inputs_of((1,) * (2**11 // tiles_of_head - 1), wide)
    assert recurrence.num_blocks(fitting, tile) == blocks_at_once(tile, 128)
    with pytest.raises(gdn.ShapeError, match=r"^slot_idx: expected a batch of at most 2147483647 blocks in one launch"):
        recurrence.num_blocks(inputs_of((1,) * (2**11 // tiles_of_head), wide), tile)


def variants_of(tile: RowTile, heads: HeadGeometry) -> tuple[Variant, Variant]:
    """Those of a forward call and a verify."""
    inputs = inputs_of((4, 4), heads)
    out = describe("out", shape_of((8, heads.value_dim), "bfloat16"))
    ring = shape_of((2, heads.num_key_heads, 4, heads.record_elements), "float32")
    verify = verify_inputs(describe, inputs, ring, shape_of((2,), "uint32"))
    return fwd_kernel.variant(inputs, out, tile), verify_kernel.variant(verify, out, tile)


def test_a_launch_asks_for_the_memory_of_its_map() -> None:
    for tile in streamed_tiles(128, 128, 4):
        for variant in variants_of(tile, HEADS):
            assert variant.launch_shared_bytes == tile.shared_bytes(128, 4)
    for variant in variants_of(nearest_row_tile(128, 128, 4), HEADS):
        assert variant.launch_shared_bytes == 0


@pytest.mark.skipif(host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}")
@pytest.mark.parametrize(
    ("sizes", "place"), [((32, 64), -1), ((16, 24), 0), ((48, 32), 0)], ids=["copies", "three warps", "bulk"]
)
def test_memory_that_is_too_small_does_not_compile(sizes: tuple[int, int], place: int) -> None:
    """`SHARED_BYTES` holds what the kernel lays out, with little to spare: the unused barrier, and free columns."""
    heads = HeadGeometry(1, 1, *sizes)
    tile = streamed_tiles(*sizes, 4)[place]
    variant, _ = variants_of(tile, heads)
    host.load(variant)
    spare = 16 + (tile.streamed_warps - 1) * tile.row_groups * tile.columns * 4
    macros = {**dict(variant.macros), "SHARED_BYTES": str(variant.launch_shared_bytes - spare - 16)}
    with pytest.raises(gdn.KernelCompileError, match="more than the launch asks for"):
        host.load(Variant(variant.kernel, tuple(macros.items())))


# ---- Pending records ----


def with_pending(tile: RowTile, heads: HeadGeometry, ring_dtype: str = "float32") -> Variant:
    """That of a verify with pending records, in a ring of 16."""
    inputs = inputs_of((4, 4), heads)
    out = describe("out", shape_of((8, heads.value_dim), "bfloat16"))
    table, ring = shape_of((2,), "uint32"), shape_of((2, heads.num_key_heads, 16, heads.record_elements), ring_dtype)
    return verify_kernel.variant(verify_inputs(describe, inputs, ring, table, table, table), out, tile)


def test_maps_with_records_hold_states_as_other_maps_do() -> None:
    dims = HEAD_DIMS[1::2]
    for key_head_dim, value_head_dim, itemsize, ring_len in product(dims, dims, (2, 4), (1, 4, 5, 64)):
        plain = streamed_tiles(key_head_dim, value_head_dim, itemsize)
        for tile in tiles_with_records(key_head_dim, value_head_dim, itemsize, ring_len):
            assert any(tile.holds_state_as(other) and tile.tokens_per_warp <= other.tokens_per_warp for other in plain)
            assert 1 <= tile.records_per_warp <= -(-ring_len // tile.streamed_warps)
            assert tile.shared_bytes(key_head_dim, itemsize) <= MAX_LAUNCH_SHARED_BYTES
    assert [tiles_with_records(128, 128, 4, length)[0].records_per_warp for length in (1, 4, 5, 64)] == [1, 1, 2, 2]


def test_single_tokens_with_pending_records_stream_unless_there_are_few() -> None:
    for batch_size, ring_len in ((4, 8), (5, 8), (5, 0)):
        tile = recurrence.row_tile(inputs_of((1,) * batch_size), None, ring_len)
        assert (tile.streamed_warps > 0) == (batch_size > 4 and ring_len > 0)


def test_a_forced_map_takes_records_along() -> None:
    for wanted in streamed_tiles(128, 128, 4):
        with forced_row_tile(wanted):
            tile = recurrence.row_tile(inputs_of((1,) * 5), None, 8)
        assert tile.holds_state_as(wanted)
        assert tile.records_per_warp > 0


@pytest.mark.skipif(host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}")
@pytest.mark.parametrize("sizes", [(32, 64), (48, 24)], ids=["rows apart", "rows side by side"])
def test_memory_that_is_too_small_for_records_does_not_compile(sizes: tuple[int, int]) -> None:
    heads = HeadGeometry(1, 1, *sizes)
    tile = tiles_with_records(*sizes, 4, 16)[-1]
    variant = with_pending(tile, heads)
    host.load(variant)
    # Without a chunk's records, and with no more than the gaps between rows to spare.
    gaps = 2 * tile.streamed_warps * tile.records_per_warp * tile.row_groups * 16
    spare = 16 + (tile.streamed_warps - 1) * tile.row_groups * tile.columns * 4 + gaps
    macros = {**dict(variant.macros), "SHARED_BYTES": str(variant.launch_shared_bytes - spare - 16)}
    with pytest.raises(gdn.KernelCompileError, match="more than the launch asks for"):
        host.load(Variant(variant.kernel, tuple(macros.items())))


# ---- Bits ----

#: Windows of 1 to 11 tokens, single ones, empty ones and padding rows: many more jobs than a host launch has blocks.
LENGTHS = (1, 4, 0, 7, 2, 11, 3, 1, 5, 0, 9, 6, 1, 10, 8, 4, 4, 1, 2)
PADDING = (3, 9, 12)
HEADS_OF = {"float32": HeadGeometry(1, 3, 48, 24), "bfloat16": HeadGeometry(2, 4, 32, 64)}
#: Five warps a block, whose 80 values are no multiple of a warp's lanes.
FIVE_WARPS = HeadGeometry(1, 2, 64, 80)


def maps_of(heads: HeadGeometry, state_dtype: str) -> tuple[RowTile, tuple[RowTile, ...]]:
    """A block a tile, and every streaming map."""
    sizes = heads.key_head_dim, heads.value_head_dim, DTYPES[state_dtype].itemsize
    return nearest_row_tile(*sizes), streamed_tiles(*sizes)


@pytest.mark.parametrize("dtype", HEADS_OF)
def test_a_ragged_batch_streams_with_the_bits_of_a_block_a_tile(dtype: str, kernels: str) -> None:
    case = RecurrenceCase(
        *("ragged", HEADS_OF[dtype], LENGTHS, dtype),
        state_dtype=dtype,
        out_dtype=dtype,
        index_dtype="int32",
        padding=PADDING,
        leading_rows=67,
        trailing_rows=140,
    )
    arrays = build_arrays(case)
    block, streamed = maps_of(case.heads, dtype)
    with forced_row_tile(block):
        expected = execute(kernels, arrays, dtype)
    assert len(LENGTHS) * case.heads.num_value_heads > 4 * max(blocks_at_once(tile, 48) for tile in streamed)
    for tile in streamed:
        with forced_row_tile(tile):
            found = subject(case, kernels, arrays, (expected.out, expected.recurrent_state))
        assert_passed(
            bitwise(found.outcome.out, expected.out, f"{tile}: readout"),
            bitwise(found.outcome.recurrent_state, expected.recurrent_state, f"{tile}: state"),
            *untouched(found),
        )
    plain = execute("numpy", arrays, dtype)
    live = np.flatnonzero(np.isfinite(arrays.recurrent_state.astype(np.float32)).all((1, 2, 3)))
    assert_passed(
        close(expected.out, plain.out, storage_tolerance(dtype), "readout of numpy"),
        close(expected.recurrent_state[live], plain.recurrent_state[live], storage_tolerance(dtype), "state of numpy"),
    )


def test_values_that_do_not_fill_the_lanes(kernels: str) -> None:
    tile = streamed_tiles(64, 80, 4)[0]
    assert tile.streamed_warps == 5
    case = RecurrenceCase("five warps", FIVE_WARPS, (3, 7, 1, 5), "float32")
    arrays = build_arrays(case)
    with forced_row_tile(nearest_row_tile(64, 80, 4)):
        expected = execute(kernels, arrays, "float32")
    with forced_row_tile(tile):
        found = execute(kernels, arrays, "float32")
    assert_passed(
        bitwise(found.out, expected.out, "readout"),
        bitwise(found.recurrent_state, expected.recurrent_state, "state"),
    )


@pytest.mark.parametrize("dtype", HEADS_OF)
def test_a_ragged_verify_streams_with_the_bits_of_a_block_a_tile(dtype: str, kernels: str) -> None:
    """Windows longer than the ring advance their slots; ring rows that are padding make their sequences padding."""
    ring_len = 8
    counts = tuple(length if length <= ring_len else ring_len + 1 for length in LENGTHS)
    case = RingCase(
        *("ragged", HEADS_OF[dtype], ring_len, LENGTHS, counts, 1, dtype),
        state_dtype=dtype,
        index_dtype="int32",
        padding=PADDING,
        ring_padding=(5, 7),
    )
    arrays = build_ring_arrays(case)
    block, streamed = maps_of(case.heads, dtype)
    with forced_row_tile(block):
        expected = ring_subject(case, kernels, arrays)
    for tile in streamed:
        with forced_row_tile(tile):
            found = ring_subject(case, kernels, arrays)
        assert_passed(
            bitwise(found.readouts[0], expected.readouts[0], f"{tile}: readout"),
            same_bytes(found.ring, expected.ring, f"{tile}: ring"),
            same_bytes(found.verified_pool, expected.verified_pool, f"{tile}: pool"),
        )
    plain = ring_subject(case, "numpy", arrays)
    live = np.flatnonzero(np.isfinite(arrays.recurrent_state.astype(np.float32)).all((1, 2, 3)))
    assert_passed(
        close(expected.readouts[0], plain.readouts[0], storage_tolerance(dtype), "readout of numpy"),
        close(expected.verified_pool[live], plain.verified_pool[live], storage_tolerance(dtype), "pool of numpy"),
    )


@pytest.mark.parametrize("name", ["stream_of_windows", "ring_stream_of_windows"])
def test_named_cases_have_more_jobs_than_a_large_gpu_has_blocks(name: str) -> None:
    """Only then a block streams from one job to the next there; an H200 has 132 multiprocessors."""
    case = NAMED_CASES[name]
    lengths, heads = case.lengths, case.heads
    tile = streamed_tile_for(heads, 4, len(lengths), sum(lengths))
    assert tile is not None
    jobs = len(lengths) * heads.num_value_heads * heads.value_head_dim // (tile.streamed_warps * tile.columns)
    assert jobs > 132 * blocks_at_once(tile, heads.key_head_dim)
