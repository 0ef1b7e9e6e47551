"""The checks of pending records can fail: broken kernels, run on the CPU in both of their forms, are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gdn.backends.row_tile import RowTile, forced_row_tile, nearest_row_tile
from gdn.backends.streamed_tile import streamed_tiles, tiles_with_records
from gdn.geometry import HeadGeometry
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.pending_steps import build_pending_arrays, pending_subject
from gdn.testing.ring_cases import RingCase

PENDING, WINDOW, RECORDS, WORK = "pending.cuh", "ring_window.cuh", "stream_records.cuh", "stream_work.cuh"
BLOCK, STREAM, TILE = "block_tokens.cuh", "streamed_tokens.cuh", "row_tile.cuh"
SIZES = (32, 64)
TILES = {"block": nearest_row_tile(*SIZES, 4, 16, 32), "stream": streamed_tiles(*SIZES, 4)[0]}

#: Every kind of window behind every kind of pending records, more of them than a streaming block asks for at a time.
CASE = RingCase(
    "plain",
    HeadGeometry(1, 2, *SIZES),
    16,
    lengths=(1, 3, 0, 4, 4, 17, 5, 4, 9, 2, 0, 3),
    num_accepted=(0,) * 12,
    num_pending=(15, 15, 2, 9, 0, 16, 17, 1, 3, 16, 5, 13),
    num_layers=1,
    record_padding=-(32 + 2 * 65) % 4,
)
ROUNDED = replace(CASE, name="rounded", state_dtype="bfloat16")


def is_noticed(case: RingCase, tile: RowTile) -> bool:
    """Whether a step of fused and of lazy rows differs from plain calls."""
    with forced_row_tile(tile):
        subject = pending_subject(case, "host", build_pending_arrays(case))
        return not all(found.passed for found in PENDING_CHECKS["mixed"](subject))


def test_a_window_takes_several_chunks_of_records() -> None:
    (tile,) = (each for each in tiles_with_records(*SIZES, 4, 16) if each.holds_state_as(TILES["stream"]))
    assert 1 <= tile.records_per_warp * tile.streamed_warps < 13


@pytest.mark.parametrize("case", [CASE, ROUNDED], ids=lambda case: case.name)
@pytest.mark.parametrize("form", TILES)
def test_the_kernels_as_they_are_pass(form: str, case: RingCase, edit: Callable[..., None]) -> None:
    edit(PENDING, ("#pragma once", "#pragma once\n// an edit that changes nothing"))
    assert not is_noticed(case, TILES[form])


# Fault: the form that has it, the case that shows it, its file, its edit.
Fault = tuple[str, RingCase, str, tuple[str, str]]

FAULTS: dict[str, Fault] = {
    "records not waited for": ("stream", CASE, RECORDS, ("const { wait_for_copies(); }", "const {}")),
    "records of the next chunk over this one's": (
        *("stream", CASE, STREAM),
        ("memory.request_records(buffer ^ 1,", "memory.request_records(buffer,"),
    ),
    "key of the chunk's first record": (
        *("stream", CASE, RECORDS),
        ("records[buffer][i].template apply<false>", "records[buffer][0].template apply<false>"),
    ),
    "decay of the record before": (
        *("stream", CASE, RECORDS),
        ("records[buffer][i + 1 < num_records ? i + 1 : i].decay", "records[buffer][i].decay"),
    ),
    "records from the first one in every chunk": (
        *("stream", CASE, RECORDS),
        (".request(pending, chunk.record + i)", ".request(pending, i)"),
    ),
    "key rows of the first row group for all": (
        *("stream", CASE, RECORDS),
        ("key + row_group * (ROWS_PER_LANE + GAP)", "key"),
    ),
    "tokens run before the last record": ("stream", CASE, WORK, ("if (!ends_records()) return 0;", "")),
    "states of lazy rows stored": (
        *("stream", CASE, RECORDS),
        ("folds = chunk.ends_records() && pending.is_folded;", "folds = chunk.ends_records();"),
    ),
    "rounded after each chunk": (
        *("stream", ROUNDED, RECORDS),
        ("folds = chunk.ends_records() && pending.is_folded;", "folds = pending.is_folded;"),
    ),
    "folded state of a stream not stored": (
        *("stream", CASE, RECORDS),
        ("is_stored_later ? nullptr : pool(chunk)", "nullptr"),
    ),
    "folded state of a block not stored": ("block", CASE, BLOCK, ("stores = !is_stored_later &&", "stores = false &&")),
    "first record of a block again and again": (
        *("block", CASE, BLOCK),
        ("next.load(pending, i + 1 < pending.count ? i + 1 : i);", "next.load(pending, 0);"),
    ),
    "state not rounded": (
        *("block", ROUNDED, TILE),
        ("elements[column] = float_of_word(words, column, STATE_TYPE{});", "static_cast<void>(words);"),
    ),
    "records written over the pending ones": (
        "block",
        CASE,
        WINDOW,
        ("first_place * record_stride,", "0 * record_stride,"),
    ),
    "room judged without the pending ones": (
        *("stream", CASE, WINDOW),
        ("first_place + (rows.end - rows.begin) <= RING_LEN", "rows.end - rows.begin <= RING_LEN"),
    ),
    "one record too many taken for a whole ring": (
        *("block", CASE, PENDING),
        ("entries.count <= RING_LEN", "entries.count <= RING_LEN + 1"),
    ),
    "an empty window folds nothing": (
        *("stream", CASE, WINDOW),
        ("rows.begin < rows.end || is_folded(entries)", "rows.begin < rows.end"),
    ),
    "pending deltas of the first tile": (
        *("block", CASE, PENDING),
        ("::delta_offset(work.head_of_group) + work.tile_column", "::delta_offset(work.head_of_group)"),
    ),
    "pending decays of the first head": (
        *("stream", CASE, PENDING),
        ("::decay_offset(work.head_of_group, group_size)", "::decay_offset(0, group_size)"),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel(fault: str, edit: Callable[..., None]) -> None:
    form, case, file_name, change = FAULTS[fault]
    edit(file_name, change)
    assert is_noticed(case, TILES[form])
