"""`gdn.speculative.PendingWindows`: its tables against a plain model, and whole decode loops that it leads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.geometry import HeadGeometry
from gdn.speculative import PendingWindows
from gdn.testing import assert_passed, bitwise, same_bytes
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device

PAD = gdn.PAD_SLOT


@dataclass
class Sequence:
    """What one sequence goes through, in words: its two ring rows, the current one first."""

    rows: list[int]
    ring_len: int
    lazy: bool
    pending: int = 0
    length: int = 0
    first_place: int = 0
    pending_row: int = field(default=0)

    def begin(self, length: int) -> None:
        self.pending_row, self.length, self.first_place = self.rows[0], length, self.pending
        has_room = self.lazy and self.pending + length <= self.ring_len
        if self.pending and length and not has_room:
            self.rows.reverse()
            self.first_place = 0

    def accept(self, count: int) -> None:
        if self.length > self.ring_len:
            self.pending = 0
        elif self.length:
            self.pending = self.first_place + min(count, self.length)
        self.pending_row = self.rows[0]


def offsets_of(lengths: Array, dtype: str = "uint32") -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(dtype)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("index_dtype", ["uint32", "int32"])
def test_tables_are_those_of_the_model(backend: str, lazy: bool, index_dtype: str) -> None:
    random = np.random.default_rng(7)
    device = Device(backend)
    for ring_len, num_layers, batch_size in ((1, 1, 1), (4, 3, 5), (16, 2, 200)):
        rows = random.permutation(2 * num_layers * batch_size).reshape(2, num_layers, batch_size)
        windows = PendingWindows(device.put(rows.astype(index_dtype)), ring_len, lazy=lazy)
        model = [
            [Sequence([*rows[:, layer, b]], ring_len, lazy) for b in range(batch_size)] for layer in range(num_layers)
        ]
        for _ in range(25):
            lengths = random.integers(0, ring_len + 2, batch_size)
            counts = random.integers(0, ring_len + 3, batch_size)
            with on_backend(backend):
                windows.begin(device.put(offsets_of(lengths, index_dtype)))
            for layer in model:
                for sequence, length in zip(layer, lengths, strict=True):
                    sequence.begin(int(length))
            assert device.get(windows.ring_slot_idx).tolist() == [[s.rows[0] for s in layer] for layer in model]
            assert device.get(windows.pending_ring_slot_idx).tolist() == [
                [s.pending_row for s in layer] for layer in model
            ]
            assert device.get(windows.num_pending).tolist() == [s.pending for s in model[0]]
            with on_backend(backend):
                windows.accept(device.put(counts.astype(index_dtype)))
            for layer in model:
                for sequence, count in zip(layer, counts, strict=True):
                    sequence.accept(int(count))
            named = device.get(windows.pending_ring_slot_idx).tolist()
            assert named == [[s.pending_row for s in layer] for layer in model]
        assert device.get(windows.num_pending).tolist() == [s.pending for s in model[0]]


@pytest.mark.parametrize(("index_dtype", "tokens"), [("int32", [3, 0, 7]), ("uint32", [0, 3, 7])])
def test_offsets_below_zero_are_zero(backend: str, index_dtype: str, tokens: list[int]) -> None:
    """As in the ops; as uint32 they are the largest there are."""
    device = Device(backend)
    windows = PendingWindows(device.put(np.arange(6, dtype=np.uint32).reshape(2, 1, 3)), 8)
    offsets = np.array([-1, 3, 3, 10] if index_dtype == "int32" else [2**32 - 1, 0, 3, 10], index_dtype)
    with on_backend(backend):
        windows.begin(device.put(offsets))
        windows.accept(device.put(np.full(3, 8, np.uint32)))
    assert device.get(windows.num_pending).tolist() == tokens


class Loop:
    """A decode loop of some layers on one backend, and the streams of tokens that it decodes."""

    def __init__(self, backend: str, ring_len: int, lazy: bool, state_dtype: str = "float32") -> None:
        self.device, self.ring_len, heads = Device(backend), ring_len, HeadGeometry(1, 2, 16, 16)
        self.num_layers, self.batch_size, capacity = 2, 4, 200
        self.tokens: list[RecurrenceArrays] = [
            build_arrays(RecurrenceCase("loop", heads, (capacity,) * 4, state_dtype=state_dtype, seed=layer))
            for layer in range(2)
        ]
        put = self.device.put
        slots = np.arange(8, dtype=np.uint32).reshape(2, 4)[:, ::-1].copy()
        slots[:, 1] = PAD  # a padding row
        rows = np.random.default_rng(0).permutation(16).reshape(2, 2, 4).astype(np.uint32)
        rows[:, :, 1] = PAD
        shape = (8, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim)
        self.start = np.random.default_rng(1).standard_normal(shape).astype(self.tokens[0].recurrent_state.dtype)
        self.slots, self.row_ids = slots, put(slots)
        self.pool = put(self.start)
        self.ring = put(np.full((16, 1, ring_len, heads.record_elements + 2), np.nan, np.float32))
        self.windows = PendingWindows(put(rows), ring_len, lazy=lazy)
        self.position = np.zeros(4, np.int64)

    def piece(self, layer: int, lengths: Array) -> RecurrenceArrays:
        """The next tokens of every sequence."""
        tokens = self.tokens[layer]
        starts = tokens.input_row_offsets[:-1].astype(np.int64) + self.position
        rows = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        return RecurrenceArrays(
            tokens.qkv_conv_output[rows],
            tokens.decay_per_token[rows],
            tokens.beta_per_token[rows],
            self.start,
            self.slots[layer],
            offsets_of(lengths),
        )

    def step(self, lengths: Array, accepted: Array, paused: tuple[int, ...] = ()) -> list[Array]:
        """Verify windows in all layers and accept some of their tokens; returns the readouts.

        paused: sequences whose slots are padding in this step.
        """
        put, windows, backend = self.device.put, self.windows, self.device.backend
        slots = self.slots.copy()
        slots[:, list(paused)] = PAD
        with on_backend(backend):
            windows.begin(put(offsets_of(lengths)), put(slots[0]) if paused else None)
            readouts = [
                ops.gated_delta_recurrence_verify_ring(
                    *(put(array) for array in self.piece(layer, lengths).as_tuple()[:3]),
                    self.pool,
                    put(slots[layer]),
                    put(offsets_of(lengths)),
                    self.ring,
                    windows.ring_slot_idx[layer],
                    pending_ring_slot_idx=windows.pending_ring_slot_idx[layer],
                    num_pending=windows.num_pending,
                )
                for layer in range(2)
            ]
            windows.accept(put(accepted.astype(np.uint32)))
        self.position += accepted
        return [self.device.get(readout) for readout in readouts]

    def plain_pool(self) -> Array:
        """The states of plain forward calls over all accepted tokens."""
        counts, self.position = self.position, np.zeros(4, np.int64)
        pool = self.device.put(self.start)
        for layer in range(2):
            self.device.forward(self.piece(layer, counts), pool)
        return self.device.get(pool)

    def fold(self) -> Array:
        with on_backend(self.device.backend):
            self.windows.fold(self.pool, self.row_ids, self.ring)
        return self.device.get(self.pool)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ring_len", [1, 4, 16])
def test_a_decode_loop_ends_in_the_states_of_plain_decoding(backend: str, ring_len: int, lazy: bool) -> None:
    loop = Loop(backend, ring_len, lazy)
    random = np.random.default_rng(ring_len)
    stored, before = 0, loop.device.get(loop.pool)
    for _ in range(20):
        lengths = random.integers(0, min(ring_len, 5) + 2, 4)
        accepted = np.where(lengths > ring_len, lengths, random.integers(0, lengths + 1))
        loop.step(lengths, accepted)
        stored += not np.array_equal(before, loop.device.get(loop.pool))
        before = loop.device.get(loop.pool)
    assert_passed(bitwise(loop.fold(), loop.plain_pool(), "pool after the loop"))
    assert loop.device.get(loop.windows.num_pending).tolist() == [0] * 4
    assert stored > 0
    if lazy and ring_len == 16:
        assert stored < 16, "records stay pending over several steps"


def test_lazy_plain_decoding_stores_a_state_once_a_ring(backend: str) -> None:
    loop = Loop(backend, ring_len=8, lazy=True)
    ones = np.ones(4, np.int64)
    changes = []
    for _ in range(24):
        before = loop.device.get(loop.pool)
        loop.step(ones, ones)
        changes.append(not np.array_equal(before, loop.device.get(loop.pool)))
    assert changes == [step % 8 == 0 and step > 0 for step in range(24)]
    assert_passed(bitwise(loop.fold(), loop.plain_pool(), "pool after the loop"))


def test_a_new_sequence_begins_with_nothing_pending(backend: str) -> None:
    loop = Loop(backend, ring_len=8, lazy=True)
    lengths = np.full(4, 3)
    loop.step(lengths, lengths)
    assert loop.device.get(loop.windows.num_pending).tolist() == [3] * 4
    loop.windows.reset(loop.device.put(np.array([True, False, False, True])))
    assert loop.device.get(loop.windows.num_pending).tolist() == [0, 3, 3, 0]


@pytest.mark.parametrize("is_zeroed", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_a_slot_that_another_sequence_takes_over(backend: str, lazy: bool, is_zeroed: bool) -> None:
    """Beside field cases 17, 18: a slot changes hands amid a loop, zeroed or as it is, with records pending for it.

    Its new sequence starts from what the slot holds, whatever is left in its ring rows; the others go on.
    """
    loop = Loop(backend, ring_len=8, lazy=lazy)
    lengths, accepted = np.full(4, 3), np.array([2, 1, 3, 3])
    for _ in range(3):
        loop.step(lengths, accepted)
    assert loop.device.get(loop.windows.num_pending)[0] > 0
    begins, start = loop.position * [1, 0, 0, 0], loop.start.copy()
    loop.windows.reset(loop.device.put(np.array([True, False, False, False])))
    for slot in loop.slots[:, 0]:
        if is_zeroed:
            loop.pool[slot] = 0
        start[slot] = loop.device.get(loop.pool[slot])
    for _ in range(3):
        loop.step(lengths, accepted)
    counts, loop.position = loop.position - begins, begins
    plain = loop.device.put(start)
    for layer in range(2):
        loop.device.forward(loop.piece(layer, counts), plain)
    assert_passed(bitwise(loop.fold(), loop.device.get(plain), "pool after the loop"))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_second_fold_finds_nothing(backend: str, lazy: bool) -> None:
    """Beside field case 34: what `fold` advances the states over is pending no more, unlike after the op by itself."""
    loop = Loop(backend, ring_len=8, lazy=lazy)
    for _ in range(2):
        loop.step(np.full(4, 3), np.array([2, 1, 0, 3]))
    tables = [loop.device.get(table) for table in (loop.windows.pending_ring_slot_idx, loop.windows.num_pending)]
    assert tables[1].any()
    once = loop.fold()
    assert_passed(same_bytes(loop.fold(), once, "pool after a second fold"))
    loop.device.fold(loop.pool, loop.slots, loop.ring, *tables)
    assert not bitwise(loop.device.get(loop.pool), once)


def test_tables_out_of_the_middle_of_longer_ones(backend: str) -> None:
    """Beside field case 10: offsets, counts and flags as views amid the entries of a larger batch."""
    device, results = Device(backend), []
    rows = np.arange(12, dtype=np.uint32).reshape(2, 2, 3)
    given = (np.array([0, 2, 5, 6]), np.array([1, 3, 0]), np.array([0, PAD, 2]), np.array([False, True, False]))
    for is_cut in (False, True):
        windows = PendingWindows(device.put(rows), 8, lazy=True)

        def put(values: Array, is_cut: bool = is_cut) -> Any:
            values = values.astype(bool if values.dtype == bool else np.uint32)
            longer = np.concatenate([values[::-1], values, values[::-1] + 1, values[:1]]).astype(values.dtype)
            return device.put(longer)[len(values) : 2 * len(values)] if is_cut else device.put(values)

        offsets, counts, slots, is_new = given
        with on_backend(backend):
            for _ in range(3):
                windows.begin(put(offsets), put(slots))
                windows.accept(put(counts))
            windows.reset(put(is_new))
        results.append([device.get(table) for table in windows._tables])
    for cut, plain in zip(*results[::-1], strict=True):
        assert_passed(same_bytes(cut, plain, "table"))
    assert results[0][3].tolist() == [3, 0, 0]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_paused_sequence_keeps_what_is_pending(backend: str, lazy: bool) -> None:
    loop = Loop(backend, ring_len=4, lazy=lazy)
    for step in range(8):
        paused = (0, 3) if step % 3 == 1 else ()
        accepted = np.array([2, 1, 0, 2])
        accepted[list(paused)] = 0
        loop.step(np.full(4, 2), accepted, paused)
        assert loop.device.get(loop.windows.num_pending)[0] > 0
    assert_passed(bitwise(loop.fold(), loop.plain_pool(), "pool after the loop"))


@pytest.mark.parametrize("lazy", [False, True])
def test_a_step_may_be_begun_again(backend: str, lazy: bool) -> None:
    """After a verify that was refused, say; with other windows."""
    loop = Loop(backend, ring_len=4, lazy=lazy)
    for step in range(8):
        for lengths in ([4, 1, 0, 3], [1, 4, 3, 0])[: step % 3]:
            with on_backend(backend):
                loop.windows.begin(loop.device.put(offsets_of(np.array(lengths))))
        loop.step(np.full(4, 2), np.array([2, 1, 0, 2]))
    assert_passed(bitwise(loop.fold(), loop.plain_pool(), "pool after the loop"))


@pytest.mark.parametrize("begun", [False, True])
def test_a_fold_on_the_way_changes_nothing_in_the_end(backend: str, begun: bool) -> None:
    """Before or after the next windows are begun."""
    loop = Loop(backend, ring_len=8, lazy=True)
    for step in range(6):
        if step == 3:
            if begun:
                with on_backend(backend):
                    loop.windows.begin(loop.device.put(offsets_of(np.full(4, 2))))
            loop.fold()
        loop.step(np.full(4, 2), np.array([2, 1, 0, 2]))
    assert_passed(bitwise(loop.fold(), loop.plain_pool(), "pool after the loop"))


def test_a_ring_of_another_length_is_not_folded(cpu_backend: str) -> None:
    loop = Loop(cpu_backend, ring_len=8, lazy=True)
    with pytest.raises(gdn.ShapeError, match="ring: expected RING_LEN = 8 as its third axis, got 4"):
        loop.windows.fold(loop.pool, loop.row_ids, loop.ring[:, :, :4].copy())


@pytest.mark.parametrize("second", [5, PAD])
def test_a_sequence_needs_two_ring_rows(second: int) -> None:
    rows = np.arange(12, dtype=np.uint32).reshape(2, 3, 2)
    rows[0, 2, 1] = 5
    rows[1, 2, 1] = second
    with pytest.raises(gdn.IndexValueError, match=r"ring_rows\[1, 2, 1\]: expected another ring row than"):
        PendingWindows(rows, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("lazy", [False, True])
def test_a_captured_step_is_replayed(lazy: bool) -> None:
    import cupy

    loops = [Loop("cuda", 8, lazy), Loop("cuda", 8, lazy)]
    lengths, accepted = cupy.zeros(5, cupy.uint32), cupy.zeros(4, cupy.uint32)
    is_new = cupy.zeros(4, bool)
    graphed = loops[0].windows
    random = np.random.default_rng(3)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)  # no call came before
        graphed.begin(lengths)
        graphed.accept(accepted)
        graphed.reset(is_new)
        graph = stream.end_capture()
    for _ in range(12):
        window, counts = random.integers(0, 6, 4), random.integers(0, 6, 4).astype(np.uint32)
        ends = random.random(4) < 0.2
        lengths.set(offsets_of(window))
        accepted.set(counts)
        is_new.set(ends)
        others = [cupy.full(4, 255, cupy.uint8) for _ in range(8)]  # memory that a graph must not think its own
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        loops[1].windows.begin(cupy.asarray(offsets_of(window)))
        loops[1].windows.accept(cupy.asarray(counts))
        loops[1].windows.reset(cupy.asarray(ends))
        assert all((other == 255).all() for other in others)
        for name in ("ring_slot_idx", "pending_ring_slot_idx", "num_pending"):
            replayed, called = (getattr(loop.windows, name).get() for loop in loops)
            assert_passed(same_bytes(replayed, called, name))


@pytest.mark.gpu
def test_a_captured_fold_is_replayed() -> None:
    import cupy

    captured, called = Loop("cuda", 8, lazy=True), Loop("cuda", 8, lazy=True)
    windows, arguments = captured.windows, (captured.pool, captured.row_ids, captured.ring)
    gdn.warmup(ops.gated_delta_state_fold, *arguments, windows.pending_ring_slot_idx, windows.num_pending)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        windows.fold(*arguments)
        graph = stream.end_capture()
    for _ in range(3):
        for loop in (captured, called):
            loop.step(np.full(4, 2), np.array([2, 1, 0, 2]))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert_passed(same_bytes(captured.pool.get(), called.fold(), "pool"))
        assert windows.num_pending.get().tolist() == [0] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((np.zeros((2, 3), np.uint32), 4), "ring_rows: expected shape"),
        ((np.zeros((3, 3, 2), np.uint32), 4), "ring_rows: expected shape"),
        ((np.zeros((2, 3, 2), np.int64), 4), "ring_rows: expected uint32 or int32"),
        ((np.zeros((2, 3, 2), np.uint32), True), "ring_len: expected a whole number from 1 to 64, got True"),
        ((np.zeros((2, 3, 2), np.uint32), 4.0), "ring_len: expected a whole number from 1 to 64, got 4.0"),
        ((np.zeros((2, 3, 2), np.uint32), 0), "ring_len: expected a whole number from 1 to 64, got 0"),
        ((np.zeros((2, 3, 2), np.uint32), 65), "ring_len: expected a whole number from 1 to 64, got 65"),
    ],
)
def test_a_wrong_beginning_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(gdn.GdnError, match=words):
        PendingWindows(*arguments)


def test_wrong_tables_change_nothing(cpu_backend: str) -> None:
    windows = PendingWindows(np.arange(12, dtype=np.uint32).reshape(2, 3, 2), 4)
    windows.begin(np.array([0, 2, 4], np.uint32))
    windows.accept(np.array([1, 2], np.uint32))
    tables = (windows.ring_slot_idx, windows.pending_ring_slot_idx, windows.num_pending)
    before = [table.copy() for table in tables]
    refused = [
        (windows.begin, np.array([0, 2], np.uint32), "input_row_offsets: expected shape"),
        (windows.begin, np.array([0, 2, 4], np.int64), "input_row_offsets: expected uint32 or int32"),
        (windows.accept, np.array([1, 2, 3], np.uint32), "num_accepted: expected shape"),
        (windows.accept, np.array([1.0, 2.0], np.float32), "num_accepted: expected uint32 or int32"),
        (windows.accept, windows.num_pending, "num_pending: expected memory of its own, apart from num_accepted"),
        (windows.reset, np.array([1, 0], np.uint32), "is_new: expected bool"),
        (windows.begin, None, "input_row_offsets: expected an array, got None"),
        (windows.accept, None, "num_accepted: expected an array, got None"),
        (windows.reset, None, "is_new: expected an array, got None"),
        (windows.reset, np.array([True]), "is_new: expected shape"),
    ]
    for call, given, words in refused:
        with pytest.raises(gdn.GdnError, match=words), on_backend(cpu_backend):
            call(given)
    for table, kept in zip(tables, before, strict=True):
        assert_passed(same_bytes(table, kept, "table"))
