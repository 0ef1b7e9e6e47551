"""Chunks of a batch: the layout of a workspace, and the plan that the device makes, held against a plain one."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gdn
from gdn.arrays import DTYPES, Argument, take
from gdn.backends import chunk_layout, host
from gdn.backends import gated_delta_chunk_plan as plan_kernel
from gdn.backends import gated_delta_chunk_prepare as prepare_kernel
from gdn.backends import gated_delta_chunk_walk as walk_kernel
from gdn.backends.chunk_layout import ChunkLayout, first_part, unserved_reason
from gdn.backends.launch import Launch
from gdn.errors import ShapeError
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs

QWEN = HeadGeometry(16, 32, 128, 128)
SMALL = HeadGeometry(1, 2, 32, 32)

needs_host = pytest.mark.skipif(
    host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}"
)


# ---- The layout ----


def test_sizes_of_a_model() -> None:
    layout = ChunkLayout(QWEN, "bfloat16", "float32", 16, 32_800, 1)
    assert (layout.chunk_len, layout.operand_terms, layout.max_chunks) == (64, 1, 512 + 16)
    assert layout.key_image_bytes == 2 * 64 * 128 * 2
    assert layout.value_image_bytes == 2 * 64 * 64 * 2 + (4 * 64 + 16) * 4
    assert layout.chunk_bytes == 16 * layout.key_image_bytes + 32 * layout.value_image_bytes
    assert (layout.rows_at_once, layout.num_slabs, layout.slab_chunks) == (4, 9, 60)
    assert layout.carry_bytes == 4 * 32 * 128 * 8
    rounded = replace(layout, state_dtype="bfloat16")
    assert (rounded.rows_at_once, rounded.num_slabs, rounded.slab_chunks) == (4, 11, 48)
    assert rounded.carry_bytes == 4 * 32 * 128 * (128 * 4 + 8)


@pytest.mark.parametrize(
    ("heads", "batch_size", "row_len", "expected"),
    [
        (QWEN, 1, 512, (1, False)),
        (QWEN, 1, 2048, (1, False)),
        (QWEN, 1, 8192, (3, True)),
        (QWEN, 2, 8192, (5, True)),
        (QWEN, 3, 8192, (7, False)),
        (QWEN, 64, 512, (10, False)),
        (HeadGeometry(4, 8, 128, 256), 1, 65_536, (5, True)),
        (HeadGeometry(4, 8, 128, 256), 5, 65_536, (21, False)),
    ],
)
def test_slabs_overlap_where_walks_leave_a_gpu_idle(
    heads: HeadGeometry, batch_size: int, row_len: int, expected: tuple[int, bool]
) -> None:
    layout = ChunkLayout(heads, "bfloat16", "float32", batch_size, batch_size * row_len, 1)
    assert (layout.num_slabs, layout.slabs_overlap) == expected
    assert layout.all_slabs_bytes == min(2, layout.num_slabs) * layout.slab_bytes


@pytest.mark.parametrize(
    ("heads", "work_dtype", "expected"),
    [
        (HeadGeometry(1, 1, 128, 128), "float32", (64, 2, 128)),
        (HeadGeometry(1, 1, 160, 32), "float32", (32, 2, 192)),
        (HeadGeometry(1, 1, 256, 256), "float16", (64, 1, 256)),
        (HeadGeometry(1, 1, 96, 192), "bfloat16", (64, 1, 128)),
    ],
)
def test_sizes_by_heads_and_types(heads: HeadGeometry, work_dtype: str, expected: tuple[int, int, int]) -> None:
    layout = ChunkLayout(heads, work_dtype, "float32", 1, 1, 1)
    assert (layout.chunk_len, layout.operand_terms, layout.padded_key_dim) == expected
    chunk_len, terms, padded = expected
    assert layout.key_image_bytes == 2 * terms * chunk_len * padded * 2
    assert layout.value_image_bytes == 2 * terms * chunk_len * chunk_len * 2 + (4 * chunk_len + 16) * 4


@pytest.mark.parametrize(
    ("heads", "batch_size", "expected"),
    [
        (QWEN, 100, 4),
        (QWEN, 3, 3),
        (HeadGeometry(4, 8, 128, 128), 100, 16),
        (HeadGeometry(4, 8, 128, 256), 100, 8),
        (HeadGeometry(1, 1, 32, 32), 200, 128),
        (HeadGeometry(64, 256, 128, 128), 100, 1),
    ],
)
def test_rows_at_once(heads: HeadGeometry, batch_size: int, expected: int) -> None:
    for state_dtype in ("float32", "bfloat16"):
        assert ChunkLayout(heads, "bfloat16", state_dtype, batch_size, 100 * batch_size, 1).rows_at_once == expected


def test_a_slab_holds_a_chunk_of_each_row_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever memory there is, with carries in it or without."""
    reached = set()
    for state_dtype, num_bytes in product(("float32", "bfloat16"), range(0, 48 << 20, 200_000)):
        monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", num_bytes)
        layout = ChunkLayout(QWEN, "bfloat16", state_dtype, 16, 3000, 1)
        assert layout.slab_chunks % layout.rows_at_once == 0
        assert layout.total_bytes <= num_bytes or (layout.rows_at_once, layout.slab_chunks) == (1, 1)
        reached.add((state_dtype, layout.rows_at_once))
    assert reached == set(product(("float32", "bfloat16"), range(1, 5)))


@given(
    st.lists(st.integers(0, 400), max_size=30),
    st.integers(0, 90),
    st.sampled_from([1, 64, 128]),
    st.sampled_from([1, 200]),
    st.sampled_from(["float32", "float16"]),
)
def test_no_batch_has_more_chunks_and_parts_do_not_meet(
    lengths: list[int], uncovered: int, min_row_len: int, scale: int, state_dtype: str
) -> None:
    lengths = [scale * length for length in lengths]
    layout = ChunkLayout(QWEN, "float32", state_dtype, len(lengths), sum(lengths) + uncovered, min_row_len)
    rows = [length for length in lengths if length >= min_row_len]
    assert sum(-(-length // layout.chunk_len) for length in rows) <= layout.max_chunks
    assert len(rows) <= layout.max_rows <= layout.max_chunks
    assert (layout.max_chunks == 0) == (layout.num_slabs == 0) == (layout.max_rows == 0)
    assert layout.max_chunks <= layout.num_slabs * layout.slab_chunks
    assert layout.max_chunks > (layout.num_slabs - 1) * layout.slab_chunks or layout.num_slabs == 0
    assert layout.slab_chunks % layout.rows_at_once == 0
    states = 0 if state_dtype == "float32" else layout.rows_at_once
    carry_bytes = 4 * states * QWEN.slot_state_elements + 8 * layout.rows_at_once * QWEN.value_dim
    carries = [(offset, carry_bytes) for offset in layout.carry_offsets]
    parts = [
        (0, 4 * (4 + 9 * layout.max_chunks)),
        *carries,
        *(
            (layout.slab_offset(slab), layout.slab_chunks * layout.chunk_bytes)
            for slab in range(min(2, layout.num_slabs))
        ),
    ]
    if min_row_len > 1:
        parts.append((layout.short_slots_offset, 4 * len(lengths)))
    for (start, size), (behind, _) in pairwise([*parts, (layout.total_bytes - 256, 0)]):
        assert start % 256 == 0
        assert start + size <= behind
    assert [layout.slab_offset(slab) for slab in (2, 3)] == [layout.slab_offset(slab) for slab in (0, 1)]
    assert layout.total_bytes <= chunk_layout.MAX_WORKSPACE_BYTES
    assert first_part(1040) == 1280
    assert first_part(1024) == 1024


def test_one_chunk_may_be_more_than_a_workspace_should() -> None:
    layout = ChunkLayout(HeadGeometry(2048, 4096, 128, 128), "bfloat16", "bfloat16", 1, 200, 1)
    assert (layout.max_chunks, layout.slab_chunks) == (4, 1)
    assert layout.total_bytes > layout.chunk_bytes > chunk_layout.MAX_WORKSPACE_BYTES


def test_more_chunks_than_can_be_counted() -> None:
    with pytest.raises(
        ShapeError, match=r"^qkv_conv_output: expected a batch of at most 1073741823 chunks of 64 tokens"
    ):
        ChunkLayout(SMALL, "bfloat16", "float32", 2**32 - 1, 2**32 - 1, 1)


def test_heads_that_are_not_served() -> None:
    served = [dim for dim in range(8, 257, 8) if unserved_reason(HeadGeometry(1, 1, dim, 256)) is None]
    assert served == list(range(32, 257, 32))
    assert served == [dim for dim in range(8, 257, 8) if unserved_reason(HeadGeometry(1, 1, 32, dim)) is None]


def test_blocks_of_a_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdn.backends.cuda.num_multiprocessors", lambda device: 132)
    layout = ChunkLayout(QWEN, "bfloat16", "float32", 3, 1000, 1)
    assert walk_kernel.num_blocks(layout, "cuda:0") == 3 * 32 * 2
    assert walk_kernel.num_blocks(layout, "cpu") == walk_kernel.HOST_BLOCKS
    assert walk_kernel.num_blocks(ChunkLayout(QWEN, "bfloat16", "float32", 30, 1000, 1), "cuda:0") == 264
    assert walk_kernel.num_blocks(ChunkLayout(SMALL, "bfloat16", "float32", 1, 1000, 1), "cpu") == 2


@pytest.mark.parametrize("key_head_dim", range(32, 257, 32))
@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16"])
def test_a_block_of_every_gpu_has_room(key_head_dim: int, work_dtype: str) -> None:
    layout = ChunkLayout(HeadGeometry(1, 1, key_head_dim, 64), work_dtype, "float32", 1, 1, 1)
    for kernel in (prepare_kernel, walk_kernel):
        assert kernel.shared_bytes(layout) <= 98 * 1024


# ---- The plan ----


class Plan(NamedTuple):
    """What the kernel leaves in its arrays, as far as there are chunks and rows."""

    chunks: list[tuple[int, int, int, int]]  # token, length, row, place
    rows: list[tuple[int, int, int, int]]  # slot, first chunk, end, 0
    place_chunk: list[int]


class Batch:
    """A batch of nothing but tables, its plan, and a readout to clear."""

    def __init__(
        self, slots: Any, offsets: Any, total_seq_len: int, *, min_row_len: int = 1, max_slots: int | None = None
    ) -> None:
        self.slots, self.offsets = np.asarray(slots), np.asarray(offsets)
        self.layout = ChunkLayout(SMALL, "bfloat16", "float32", len(slots), total_seq_len, min_row_len)
        self.max_slots = len(slots) + 1 if max_slots is None else max_slots
        self.out = np.full((total_seq_len, 3 * SMALL.value_dim), 7, np.float32)[:, ::3]

    def _rows(self) -> list[tuple[int, int, int]]:
        """Slot, begin and end of each sequence, -1 for the slot of one that is not live."""
        total = self.layout.total_seq_len
        rows = []
        for sequence, slot in enumerate(self.slots):
            slot, bounds = int(slot) & 0xFFFFFFFF, self.offsets[sequence : sequence + 2]
            begin, end = (min(max(int(offset), 0), total) for offset in bounds)
            rows.append((slot if slot < self.max_slots and begin < end else -1, begin, end))
        return rows

    def plain(self) -> tuple[Plan, list[int]]:
        """The plan in plain Python, and the slots of short rows."""
        rows: list[tuple[int, int]] = []  # slot, first chunk
        chunks: list[tuple[int, int, int]] = []  # token, length, row
        short, chunk_len, is_full = [], self.layout.chunk_len, False
        for slot, begin, end in self._rows():
            is_short = slot >= 0 and end - begin < self.layout.min_row_len
            short.append(slot if is_short else gdn.PAD_SLOT)
            starts = range(begin, end, chunk_len)
            if slot < 0 or is_short:
                continue
            is_full = is_full or len(chunks) + len(starts) > self.layout.max_chunks
            if is_full:
                continue
            rows.append((slot, len(chunks)))
            chunks += [(start, min(chunk_len, end - start), len(rows) - 1) for start in starts]
        ends = [*(first for _, first in rows[1:]), len(chunks)]

        def order(chunk: int) -> tuple[int, int, int]:
            row = chunks[chunk][2]
            return row // self.layout.rows_at_once, chunk - rows[row][1], row

        place_chunk = sorted(range(len(chunks)), key=order)
        places = np.argsort(place_chunk).tolist()
        return Plan(
            [(*chunk, place) for chunk, place in zip(chunks, places, strict=True)],
            [(slot, first, end, 0) for (slot, first), end in zip(rows, ends, strict=False)],
            place_chunk,
        ), short

    def run(self) -> tuple[Plan, list[int]]:
        """The same by the kernel; every number that nobody should write is still there."""
        layout, (batch_size,) = self.layout, self.slots.shape
        workspace = np.full(layout.total_bytes, 0xFF, np.uint8)
        host.run(self.launch(workspace))
        start = -workspace.ctypes.data % 256
        words = workspace[start : start + layout.total_bytes - 256].view(np.uint32)
        num_chunks, num_rows, *zeros = (int(word) for word in words[:4])
        assert zeros == [0, 0]
        chunks, rows, place_chunk, rest = np.split(words, 4 + layout.max_chunks * np.array([4, 8, 9]))
        chunks, rows = chunks[4:].reshape(-1, 4), rows.reshape(-1, 4)
        for array, size in ((chunks, num_chunks), (rows, num_rows), (place_chunk, num_chunks)):
            assert (array[size:] == 0xFFFFFFFF).all()
        short = words[layout.short_slots_offset // 4 :][:batch_size] if layout.short_slots_bytes else []
        assert (rest[: layout.short_slots_offset // 4 - 4 - 9 * layout.max_chunks] == 0xFFFFFFFF).all()
        records = ([tuple(record) for record in array.tolist()] for array in (chunks[:num_chunks], rows[:num_rows]))
        return Plan(*records, place_chunk[:num_chunks].tolist()), [int(s) for s in short]

    def launch(self, workspace: np.ndarray[Any, Any]) -> Launch:
        first = first_part(take("workspace", workspace).pointer)
        return plan_kernel.launch(self._inputs(), take("out", self.out), self.layout, first)

    def _inputs(self) -> RecurrenceInputs:
        """Arrays of which only shapes matter, but for the tables."""
        total, heads = self.layout.total_seq_len, SMALL
        pool = np.empty((self.max_slots, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), np.float32)
        qkv, gate = np.empty((total, heads.conv_dim), DTYPES["bfloat16"]), np.empty((total, 2), np.float32)
        six: list[Argument] = [take("any", array) for array in (qkv, gate, gate, pool, self.slots, self.offsets)]
        return RecurrenceInputs(heads, *six)

    def check(self) -> None:
        """The kernel makes the plain plan, and clears the rows that no live sequence owns."""
        plan, short = self.plain()
        assert self.run() == (plan, short if self.layout.short_slots_bytes else [])
        for (_, _, row, place), (_, _, next_row, next_place) in pairwise(plan.chunks):
            if row == next_row:  # as far as a carry reaches
                assert place < next_place
                assert next_place // self.layout.slab_chunks - place // self.layout.slab_chunks <= 1
        owned = np.zeros(self.layout.total_seq_len, bool)
        for slot, begin, end in self._rows():
            owned[begin:end] |= slot >= 0
        assert (self.out[owned] == 7).all()
        assert (self.out[~owned] == 0).all()
        rest = self.out.base
        assert rest is not None
        assert (np.delete(rest, np.s_[::3], axis=1) == 7).all()


def random_batch(seed: int, *, goes_back: bool) -> Batch:
    """Padding, empty and short rows, gaps; one table in four with a stride, signed or not."""
    random = np.random.default_rng(seed)
    batch_size = int(random.choice([0, 1, 2, 7, 50, 1023, 1024, 1025, 2100]))
    lengths = random.choice([0, 1, 3, 63, 64, 65, 127, 128, 129, 300], batch_size, p=[0.3, 0.2, *[0.0625] * 8])
    total = int(lengths.sum()) + int(random.integers(0, 70))
    offsets = np.cumsum([int(random.integers(0, 2)) * (total - lengths.sum()), *lengths])
    dtype = random.choice([np.uint32, np.int32])
    if goes_back and batch_size:
        offsets = random.integers(-50 if dtype == np.int32 else 0, total + 60, batch_size + 1)
    slots = random.permutation(batch_size + 3)[:batch_size].astype(np.uint32)  # two of them outside the pool
    slots[random.random(batch_size) < 0.2] = gdn.PAD_SLOT
    tables = slots.view(random.choice([np.uint32, np.int32])), offsets.astype(dtype)
    strided = (np.repeat(table, 2)[::2] if random.random() < 0.25 else table for table in tables)
    return Batch(*strided, total, min_row_len=int(random.choice([1, 64, 128])))


@needs_host
@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("goes_back", [False, True])
def test_plans_of_random_batches(seed: int, goes_back: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows_at_once = (1, 2, 4, 7, 64)[seed % 5]
    monkeypatch.setattr(chunk_layout, "WALKS_AT_ONCE", rows_at_once * SMALL.num_value_heads)
    batch = random_batch(seed, goes_back=goes_back)
    assert batch.layout.rows_at_once == max(1, min(rows_at_once, batch.layout.max_rows))
    batch.check()


@needs_host
def test_rows_at_once_of_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows before and behind the 1024th sequence, of lengths that cross."""
    monkeypatch.setattr(chunk_layout, "WALKS_AT_ONCE", 5 * SMALL.num_value_heads)
    lengths = np.array([200, 64, 400, 1, 129] * 410)
    Batch(np.arange(len(lengths), dtype=np.uint32), np.cumsum([0, *lengths]).astype(np.uint32), lengths.sum()).check()


@needs_host
@pytest.mark.parametrize("seed", [1, 2])
def test_the_order_of_threads_does_not_matter(seed: int) -> None:
    for batch in range(6):
        with host.options(order_seed=seed):
            random_batch(batch, goes_back=bool(batch % 2)).check()


@needs_host
def test_sums_that_no_32_bits_hold() -> None:
    """Behind two short rows come sequences that each have all tokens there could be: 64 of them make 2^32 chunks."""
    num_tokens, max_chunks = 2**32 - 1, 8
    offsets = np.array([0, 100, 130, *[0, num_tokens] * 200], np.uint32)
    batch = Batch(np.arange(len(offsets) - 1, dtype=np.uint32), offsets, 1000)
    launch = batch.launch(np.empty(4096, np.uint8))
    plan = np.full(4 + 9 * max_chunks, 0xFFFFFFFF, np.uint32)
    changes = {"total_seq_len": num_tokens, "max_chunks": max_chunks, "chunk_plan": plan.ctypes.data}
    names = dict(launch.variant.kernel.parameters)
    arguments = tuple(changes.get(name, value) for name, value in zip(names, launch.arguments, strict=True))
    host.run(replace(launch, num_blocks=1, arguments=arguments))  # no row is cleared
    assert plan[:2].tolist() == [3, 2]
    chunks, rows = plan[4:-max_chunks].reshape(2, max_chunks, 4)
    assert chunks[:4, 0].tolist() == [0, 64, 100, 0xFFFFFFFF]
    assert chunks[:3, 3].tolist() == plan[-max_chunks:][:3].tolist() == [0, 2, 1]
    assert rows[:3, 1].tolist() == [0, 2, 0xFFFFFFFF]


@needs_host
def test_nothing_at_all() -> None:
    Batch(np.zeros(0, np.uint32), [0], 0).check()
    Batch(np.zeros(0, np.uint32), np.zeros(1, np.uint32), 70).check()
    Batch(np.arange(3, dtype=np.uint32), np.zeros(4, np.uint32), 0).check()
    Batch(np.arange(3, dtype=np.uint32), np.zeros(4, np.uint32), 5, max_slots=0).check()
