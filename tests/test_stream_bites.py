"""The checks of the sweep notice broken streaming kernels: copies, meetings, chunks, jobs and owners of columns.

Every fault runs one call forced to a streaming map, and is found by a comparison or refused by the stand-in for CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from gdn.backends import host
from gdn.backends.row_tile import RowTile, forced_row_tile
from gdn.backends.streamed_tile import streamed_tiles
from gdn.errors import DeviceError
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.checks import against_oracle, reference_of, subject, thread_maps, untouched
from gdn.testing.compare import Comparison
from gdn.testing.ring_cases import RingCase, build_ring_arrays
from gdn.testing.ring_checks import against_oracle as ring_against_oracle
from gdn.testing.ring_checks import hands_off, ring_subject

STATES, TOKENS, WORK, STREAM = "stream_state.cuh", "stream_tokens.cuh", "stream_work.cuh", "streamed_tokens.cuh"

#: A block takes a whole head, whose state comes in bulk: one warp, 4 tokens a chunk.
BULK = RowTile(row_groups=4, lanes_per_row=8, columns_per_lane=4, streamed_warps=1, tokens_per_warp=4)
#: Two blocks a head, whose states are copied by each thread: 4 warps, 4 tokens a chunk.
COPIES = RowTile(row_groups=16, lanes_per_row=2, columns_per_lane=4, streamed_warps=4, tokens_per_warp=1)
#: Windows below, of and above the length of a chunk, an empty one between them, several jobs for each block.
WINDOWS = (3, 8, 1, 0, 4, 11, 2, 5, 1)
SIZES = {BULK: (32, 32), COPIES: (32, 64)}


@pytest.fixture(params=[True, False], ids=["bulk", "no bulk"])
def with_and_without_bulk(request: pytest.FixtureRequest, edit: Callable[..., None]) -> None:
    """As on a GPU that has no copy engine, whole heads are copied by each thread too."""
    if not request.param:
        edit(
            "host/cuda_on_cpu.h", ("constexpr bool HAS_BULK_COPIES = true;", "constexpr bool HAS_BULK_COPIES = false;")
        )


def forward_case(tile: RowTile, state_dtype: str = "float32") -> RecurrenceCase:
    """Every block clears more than one piece of the unowned rows."""
    heads = HeadGeometry(2, 4, *SIZES[tile])
    return RecurrenceCase("stream", heads, WINDOWS, state_dtype=state_dtype, leading_rows=1, trailing_rows=900)


def ring_case(tile: RowTile, ring_len: int = 8) -> RingCase:
    """The last row is longer than the ring and advances its slot itself."""
    lengths = (3, 8, 1, 4, 6, 2, 11)
    return RingCase("stream", HeadGeometry(2, 4, *SIZES[tile]), ring_len, lengths, (*lengths[:-1], 9), num_layers=1)


def forward(tile: RowTile, seeds: range = range(1), state_dtype: str = "float32") -> Iterator[Comparison]:
    case = forward_case(tile, state_dtype)
    arrays = build_arrays(case)
    reference = reference_of(arrays)
    for seed in seeds:
        with host.options(order_seed=seed), forced_row_tile(tile):
            under_test = subject(case, "host", arrays, reference)
        yield from against_oracle(under_test)
        yield from untouched(under_test)


def verify(tile: RowTile, ring_len: int = 8) -> Iterator[Comparison]:
    case = ring_case(tile, ring_len)
    with forced_row_tile(tile):
        under_test = ring_subject(case, "host", build_ring_arrays(case))
    yield from ring_against_oracle(under_test)
    yield from hands_off(under_test)


@pytest.mark.parametrize("tile", [BULK, COPIES], ids=["bulk", "copies"])
def test_the_kernels_as_they_are_pass(tile: RowTile, edit: Callable[..., None]) -> None:
    assert tile in streamed_tiles(*SIZES[tile], 4)
    edit(STREAM, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert [found.message for found in (*forward(tile, range(5)), *verify(tile)) if not found.passed] == []


# Fault: the map, its file, its edits.
Fault = tuple[RowTile, str, tuple[tuple[str, str], ...]]

FORWARD_FAULTS: dict[str, Fault] = {
    "copies not waited for": (COPIES, STATES, (("wait_for_copies();", ""),)),
    "bulk copies not waited for": (BULK, STATES, (("wait_for_round(barrier, round % 2);", ""),)),
    "buffers not exchanged": (COPIES, STREAM, (("buffer ^= 1)", "buffer ^= 0)"),)),
    "next chunk prepared over this one": (COPIES, STREAM, (("memory.tokens[buffer ^ 1]", "memory.tokens[buffer]"),)),
    "state of the job before": (COPIES, STREAM, (("request_state(next);", "request_state(chunk);"),)),
    "bulk state of the job before": (BULK, STREAM, (("request_state(next);", "request_state(chunk);"),)),
    "first state not requested": (COPIES, STREAM, (("if (chunk.begins_window()) request_state(chunk);", ""),)),
    "state kept from the window before": (
        *(COPIES, STREAM),
        (("if (chunk.begins_window()) memory", "if (chunk.begins_window() && num_states == 0) memory"),),
    ),
    "state of the first tile for all warps": (COPIES, STATES, (("+ warp * TILE_COLUMNS + column", "+ column"),)),
    "state of the first warp read by all": (
        *(COPIES, STATES),
        (("tiles[threadIdx.x / 32].read(state, 0)", "tiles[0].read(state, 0)"),),
    ),
    "rows of the first row group for all": (
        *(BULK, STATES),
        (("block + group * ROWS_PER_LANE * VALUE_HEAD_DIM", "block"),),
    ),
    "every second row not copied": (
        COPIES,
        STATES,
        (("request_rows<ROW + ROWS_AT_ONCE,", "request_rows<ROW + 2 * ROWS_AT_ONCE,"),),
    ),
    "owner of a column": (COPIES, STREAM, (("if (column % count >= count / 2)", "if (column % count < count / 2)"),)),
    "owner of a pair of columns": (
        BULK,
        STREAM,
        (("if (column % count >= count / 2)", "if (column % count < count / 2)"),),
    ),
    "owned columns": (BULK, STREAM, (("if (row_group & distance) first += count / 2;", ""),)),
    "delta factors of a readout kept for another column": (
        BULK,
        STREAM,
        (("values[i] = (row_group & DISTANCE) != 0 ?", "values[i] = false ?"),),
    ),
    "memory and readout exchanged": (COPIES, STREAM, (("row_group % 2 != 0,", "row_group % 2 == 0,"),)),
    "key and query exchanged in the sums": (
        COPIES,
        STREAM,
        (("return (lane.is_odd ? token.query : token.key)", "return (lane.is_odd ? token.key : token.query)"),),
    ),
    "last update of a stored state skipped": (
        *(BULK, STREAM),
        (
            (
                "const bool state_is_read = !window.is_recorded || !chunk.ends_window();",
                "const bool state_is_read = !chunk.ends_window();",
            ),
        ),
    ),
    "states decayed but not updated": (
        COPIES,
        STREAM,
        (("if (updates_state) update_decayed_state", "if (false) update_decayed_state"),),
    ),
    "states updated but not decayed": (COPIES, STREAM, (("if (updates_state) decay_state", "if (false) decay_state"),)),
    "state of the first warp stored by all": (
        COPIES,
        STREAM,
        (("chunk.work.tile_column + lane.tile_column)", "chunk.work.tile_column)"),),
    ),
    "tokens of a chunk in another order": (
        *(COPIES, TOKENS),
        (
            (
                "const int token = first_token() + i < num_tokens ? first_token() + i : num_tokens - 1;",
                "const int token = first_token() + i < num_tokens ? num_tokens - 1 - first_token() - i : 0;",
            ),
        ),
    ),
    "rows of the token before kept": (
        COPIES,
        STREAM,
        (("tokens[i + 1 < num_tokens ? i + 1 : i], lane", "tokens[i], lane"),),
    ),
    "readouts of a chunk in one row": (COPIES, STREAM, (("targets.readout += arrays.out_token_stride;", ""),)),
    "chunks of a window overlap": (
        BULK,
        WORK,
        (("chunk.ends_records() ? CHUNK_TOKENS : 0;", "CHUNK_TOKENS - 1;"),),
    ),
    "window of exactly one chunk": (
        COPIES,
        WORK,
        (("ends_records() && end - token <= CHUNK_TOKENS;", "ends_records() && end - token < CHUNK_TOKENS;"),),
    ),
    "jobs passed over by long windows": (
        BULK,
        WORK,
        (("job_after(upcoming.job), moves_on)", "job_after(upcoming.job), true)"),),
    ),
    "first job of every block": (
        COPIES,
        WORK,
        (("blockIdx.x / jobs_of_sequence, blockIdx.x % jobs_of_sequence", "0, 0"),),
    ),
    "columns of the head's first block": (
        COPIES,
        WORK,
        (("job.of_sequence % BLOCKS_PER_HEAD) * BLOCK_COLUMNS", "job.of_sequence % BLOCKS_PER_HEAD) * 0"),),
    ),
    "slots of the first sequence": (
        BULK,
        WORK,
        (("request_entries(batch, sequence, is_wanted", "request_entries(batch, 0, is_wanted"),),
    ),
    "parity of the first round": (
        BULK,
        STATES,
        (("wait_for_round(barrier, round % 2)", "wait_for_round(barrier, 0)"),),
    ),
    "parity exchanged": (
        BULK,
        STATES,
        (("wait_for_round(barrier, round % 2)", "wait_for_round(barrier, (round + 1) % 2)"),),
    ),
    "rounds not counted": (BULK, STREAM, (("num_states++", "num_states"),)),
    "fewer bytes expected than copied": (
        BULK,
        STATES,
        (("expect_bytes(barrier, ROW_GROUPS * ROW_GROUP_BYTES)", "expect_bytes(barrier, ROW_GROUP_BYTES)"),),
    ),
    "barrier not prepared": (BULK, STATES, (("if (threadIdx.x == 0) prepare_barrier(barrier);", ""),)),
    "unowned rows left as they were": (
        COPIES,
        STREAM,
        (("clear_rows(arrays, batch, records, static_cast<unsigned int>(clearing_block));", ""),),
    ),
    "unowned rows of the last clearing block alone": (
        COPIES,
        STREAM,
        (("gridDim.x - 1 - blockIdx.x; clearing_block <", "num_clearing_blocks - 1; clearing_block <"),),
    ),
}

#: The same of the verify, with the ring's length: the readout is right, what is left in the ring or the pool is not.
VERIFY_FAULTS: dict[str, Fault] = {
    "last update of an over-long row skipped": (
        *(BULK, STREAM),
        (
            (
                "const bool state_is_read = !window.is_recorded || !chunk.ends_window();",
                "const bool state_is_read = !chunk.ends_window();",
            ),
        ),
    ),
    "over-long row not stored": (COPIES, STREAM, (("&& !chunk.window(records).is_recorded)", "&& false)"),)),
    "recorded windows stored": (COPIES, STREAM, (("&& !chunk.window(records).is_recorded)", ")"),)),
    "delta factors of a later chunk over those of the first": (
        COPIES,
        STREAM,
        (("window.delta_row(chunk.token - chunk.begin,", "window.delta_row(0,"),),
    ),
    "delta factors of a chunk in one record": (BULK, STREAM, (("targets.delta += window.record_stride;", ""),)),
    "keys of a later chunk over those of the first": (
        COPIES,
        TOKENS,
        (("place = chunk.token - chunk.begin + first_token() + i;", "place = first_token() + i;"),),
    ),
    "records beyond the window": (COPIES, TOKENS, (("if (first_token() + i < num_tokens) {", "if (true) {"),)),
    "bulk: records beyond the window": (BULK, TOKENS, (("if (first_token() + i < num_tokens) {", "if (true) {"),)),
    "keys of half the rows": (COPIES, TOKENS, (("if (lane < 16) window.write_key", "if (lane < 8) window.write_key"),)),
    "queries recorded as keys": (
        BULK,
        TOKENS,
        (("if (lane < 16) window.write_key", "if (lane >= 16) window.write_key"),),
    ),
    "decays not recorded": (BULK, TOKENS, (("if (lane == 0) window.write_decay", "if (false) window.write_decay"),)),
    "delta factors of readouts recorded": (
        COPIES,
        STREAM,
        (
            (
                "window.is_recorded && !lane.is_odd && !lane.is_spare",
                "window.is_recorded && lane.is_odd && !lane.is_spare",
            ),
        ),
    ),
    "delta factors of over-long rows recorded": (
        COPIES,
        STREAM,
        (("window.is_recorded && !lane.is_odd", "window.record_stride > 0 && !lane.is_odd"),),
    ),
    "ring rows of the first sequence": (
        COPIES,
        WORK,
        (("records.request(sequence,", "records.request(0,"),),
    ),
}


def is_noticed(comparisons: Iterator[Comparison]) -> bool:
    """Whether a comparison fails, or the stand-in for CUDA refuses what the kernel does."""
    try:
        return not all(found.passed for found in comparisons)
    except DeviceError:
        return True


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
def test_a_broken_stream(fault: str, edit: Callable[..., None]) -> None:
    tile, file_name, changes = FORWARD_FAULTS[fault]
    edit(file_name, *changes)
    assert is_noticed(forward(tile))


@pytest.mark.parametrize("fault", VERIFY_FAULTS)
def test_a_broken_stream_of_records(fault: str, edit: Callable[..., None]) -> None:
    tile, file_name, changes = VERIFY_FAULTS[fault]
    edit(file_name, *changes)
    assert is_noticed(verify(tile, ring_len=8))


#: Barriers: the map, the file, and the text around each. (Between the rows of a prepared token and their use there is
#: one more, which only ThreadSanitizer misses: on a CPU the shuffles before it wait for all lanes.)
BARRIERS: dict[str, Fault] = {
    "at the end of a chunk": (
        *(COPIES, STREAM),
        (("        loaded.load(arrays, next);\n        __syncthreads();", "        loaded.load(arrays, next);"),),
    ),
    "before the first chunk": (
        *(COPIES, STREAM),
        (("    loaded.load(arrays, next);\n    __syncthreads();\n\n", "    loaded.load(arrays, next);\n\n"),),
    ),
    "between copies and their use": (
        COPIES,
        STATES,
        (("wait_for_copies();\n        __syncwarp();", "wait_for_copies();"),),
    ),
    "between a state and the next": (
        *(COPIES, STATES),
        (
            (
                "tiles[threadIdx.x / 32].read(state, 0);\n        __syncwarp();",
                "tiles[threadIdx.x / 32].read(state, 0);",
            ),
        ),
    ),
    "between a bulk state and the next": (
        *(BULK, STATES),
        (("* TILE_COLUMNS);\n        __syncthreads();", "* TILE_COLUMNS);"),),
    ),
    "between clearing blocks": (
        COPIES,
        STREAM,
        (("        __syncthreads();\n        clear_rows", "        clear_rows"),),
    ),
}


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier(barrier: str, edit: Callable[..., None]) -> None:
    """With a pool of 16 bits, of which a lane copies elements for another: 8 of them are 16 bytes."""
    tile, file_name, changes = BARRIERS[barrier]
    edit(file_name, *changes)
    assert is_noticed(forward(tile, range(1, 9), "bfloat16"))


def test_a_map_that_gives_other_bits(edit: Callable[..., None]) -> None:
    """The maps check compares bits: a sum right to the tolerance is not enough."""
    sums = "thread_sums<CHAINS_PER_LANE>(state, rows.kept(token, lane), rows.sent(token, lane), kept, sent);"
    edit(STREAM, (sums, f"{sums} kept[0] *= 1.0f + 2e-7f;"))
    case = replace(forward_case(BULK), thread_maps=1)
    arrays = build_arrays(case)
    under_test = subject(case, "host", arrays, reference_of(arrays))
    assert all(against_oracle(under_test))
    assert not all(thread_maps(under_test))


@pytest.mark.usefixtures("with_and_without_bulk")
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_a_whole_head_can_be_copied_either_way(state_dtype: str) -> None:
    assert [one.message for one in forward(BULK, range(2), state_dtype) if not one.passed] == []
    assert [one.message for one in verify(BULK) if not one.passed] == []
