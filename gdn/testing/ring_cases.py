"""Cases of the speculative functions: windows verified in some layers, then folded over what was accepted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdn.arrays import DTYPES
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays

#: Token-elements (layers x tokens x value heads x state elements of one) that a random case may cost.
_RANDOM_COST = 1_500_000
_HEAD_DIMS = ((32, 32), (64, 64), (128, 128), (96, 192), (256, 256), (128, 64), (24, 72))


@dataclass(frozen=True, slots=True)
class RingCase:
    """One verify per layer and one fold over all layers.

    lengths: tokens of each row's window. num_accepted: what the fold is told of each row; a count above ring_len says
    that the verify advanced the row itself. padding: rows whose slot is padding; ring_padding: rows whose ring row is.
    record_padding: elements of a record's stride beyond the record. walk_steps: steps of a random walk that mixes
    forward, verify, fold and abandoned verifies.
    num_pending: records of each row that an earlier window left and nobody folded, a count above ring_len for one that
    advanced its slot itself; without them the case has no checks of pending records. pending_on_host: whether the
    backend host makes those checks too: its compiler takes a while for each kernel that takes pending records.
    """

    name: str
    heads: HeadGeometry
    ring_len: int
    lengths: tuple[int, ...]
    num_accepted: tuple[int, ...]
    num_layers: int = 2
    work_dtype: str = "float32"
    state_dtype: str = "float32"
    ring_dtype: str = "float32"
    index_dtype: str = "uint32"
    padding: tuple[int, ...] = ()
    ring_padding: tuple[int, ...] = ()
    record_padding: int = 3
    seed: int = 0
    thread_maps: int = 0
    walk_steps: int = 0
    num_pending: tuple[int, ...] = ()
    pending_on_host: bool = False

    def __post_init__(self) -> None:
        if self.num_pending and len(self.num_pending) != len(self.lengths):
            raise ValueError(f"{self.name}: {len(self.num_pending)} pending counts for {len(self.lengths)} rows")
        for length, count in zip(self.lengths, self.num_accepted, strict=True):
            if length > self.ring_len and count <= self.ring_len and count != 0:
                raise ValueError(f"{self.name}: a row of {length} tokens leaves no records to accept {count} of")
            if length <= self.ring_len and length < count <= self.ring_len:
                raise ValueError(f"{self.name}: {count} of {length} tokens accepted")

    @property
    def inputs(self) -> str:
        """What is special about the values."""
        return "walk" if self.walk_steps else "model"

    def checks_pending(self, backend: str) -> bool:
        """Whether a backend makes the checks of pending records."""
        return bool(self.num_pending) and (backend != "host" or self.pending_on_host)

    def types(self) -> str:
        """Type of work and pool, or both with a slash, and that of the ring where it is not float32."""
        text = self.work_dtype if self.work_dtype == self.state_dtype else f"{self.work_dtype}/{self.state_dtype}"
        return text if self.ring_dtype == "float32" else f"{text} ring {self.ring_dtype}"


@dataclass(frozen=True, slots=True)
class RingArrays:
    """Dense NumPy arrays of a case. The pool and the ring hold the slots and rows of all layers."""

    layers: tuple[RecurrenceArrays, ...]  # all on one pool, each with its slots
    recurrent_state: Array
    ring: Array
    row_ids: Array  # [num_layers, batch_size]
    ring_row_ids: Array  # [num_layers, batch_size]
    num_accepted: Array  # [batch_size]


def build_ring_arrays(case: RingCase) -> RingArrays:
    """The arrays of a case. Spare slots and the whole ring hold NaN; tables are shuffled, each on its own."""
    random = np.random.default_rng([case.seed, case.ring_len, len(case.lengths)])
    batch_size, rows = len(case.lengths), case.num_layers * len(case.lengths)
    slots = random.permutation(rows + 3)[:rows].reshape(case.num_layers, batch_size)
    ring_rows = random.permutation(rows + 2)[:rows].reshape(case.num_layers, batch_size)
    slots[:, list(case.padding)] = PAD_SLOT
    ring_rows[:, list(case.ring_padding)] = PAD_SLOT
    heads = case.heads
    shape = (rows + 3, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim)
    pool = (0.3 * random.standard_normal(shape)).astype(DTYPES[case.state_dtype])
    pool[np.setdiff1d(np.arange(rows + 3), slots)] = np.nan
    ring_shape = (rows + 2, heads.num_key_heads, case.ring_len, heads.record_elements + case.record_padding)
    index = DTYPES[case.index_dtype]
    row_ids = slots.astype(np.uint32).view(index)
    layers = tuple(
        replace(build_arrays(_window(case, layer)), recurrent_state=pool, slot_idx=row_ids[layer])
        for layer in range(case.num_layers)
    )
    return RingArrays(
        layers,
        pool,
        np.full(ring_shape, np.nan, DTYPES[case.ring_dtype]),
        row_ids,
        ring_rows.astype(np.uint32).view(index),
        np.asarray(case.num_accepted, np.uint32).view(index),
    )


def _window(case: RingCase, layer: int) -> RecurrenceCase:
    """The recurrence case whose tokens are one layer's windows."""
    return RecurrenceCase(
        case.name,
        case.heads,
        case.lengths,
        work_dtype=case.work_dtype,
        state_dtype=case.state_dtype,
        out_dtype=case.work_dtype,
        index_dtype=case.index_dtype,
        padding=case.padding,
        trailing_rows=1,
        inputs="wide_beta",
        seed=case.seed + 1000 * layer,
    )


def _case(name: str, heads: tuple[int, int, int, int], ring_len: int, **changes: Any) -> RingCase:
    """A case whose rows, unless given, go through every kind of length and count around the ring's length."""
    if "lengths" not in changes:
        lengths, counts = [], []
        for length in sorted({0, 1, ring_len // 2, ring_len - 1, ring_len, ring_len + 1}):
            for count in sorted({0, 1, length // 2, length}):
                if length > ring_len:
                    count = 0 if count == 0 else ring_len + 1
                if count <= length or length > ring_len:
                    lengths.append(length)
                    counts.append(count)
        changes["lengths"], changes["num_accepted"] = tuple(lengths), tuple(counts)
    return RingCase(name, HeadGeometry(*heads), ring_len, **changes)


def _pending_case(name: str, ring_len: int, windows: Iterable[int], counts: Sequence[int], **changes: Any) -> RingCase:
    """A case in which windows of all these lengths come after each of these counts of pending records."""
    rows = [(length, count) for length in windows for count in counts]
    # Rows of all kinds beside each other, whatever a block or a stream takes together.
    order = np.random.default_rng(ring_len).permutation(len(rows))
    lengths, pending = zip(*(rows[place] for place in order), strict=True)
    # All but one token, since calls on two accepted tokens a row take kernels that other cases have compiled already.
    accepted = tuple(ring_len + 1 if length > ring_len else max(length - 1, min(length, 1)) for length in lengths)
    heads = changes.pop("heads", (2, 4, 32, 32))
    return _case(
        name, heads, ring_len, lengths=lengths, num_accepted=accepted, num_pending=pending, num_layers=1, **changes
    )


def _named_cases() -> tuple[RingCase, ...]:
    small = (2, 4, 32, 32)
    few = {"lengths": (4, 3, 5, 0, 4), "num_accepted": (2, 3, 5, 0, 0)}
    # Nothing, room for just this window, a ring that committed itself, a full one, too little room.
    few_pending = {**few, "num_pending": (0, 1, 5, 4, 2)}
    every_count = tuple(place % 6 for place in range(17))
    return (
        *(_case(f"ring_of_{ring_len}", small, ring_len) for ring_len in (1, 4, 5, 16)),
        _case("ring_of_64", (1, 2, 32, 32), 64, lengths=(64, 65, 33), num_accepted=(64, 65, 7)),
        _case("ring_bfloat16_pool", small, 4, work_dtype="bfloat16", state_dtype="bfloat16"),
        _case("ring_float16_pool", small, 4, work_dtype="float16", state_dtype="float16"),
        _case("ring_float32_pool_bfloat16_work", small, 4, work_dtype="bfloat16"),
        _case("ring_group_of_1", (2, 2, 32, 32), 4, thread_maps=1, **few_pending),
        _case("ring_group_of_3", (1, 3, 32, 32), 4, **few_pending),
        _case("ring_group_of_8", (1, 8, 32, 32), 4, **few_pending),
        _case("ring_128_128", (1, 2, 128, 128), 4, thread_maps=1, state_dtype="bfloat16", **few_pending),
        _case("ring_96_192", (1, 2, 96, 192), 4, **few_pending),
        _case("ring_256_256", (1, 1, 256, 256), 4, **few_pending),
        _case("ring_128_64_unpadded", (1, 2, 128, 64), 4, record_padding=0, **few_pending),
        _case("ring_aligned_records", small, 4, record_padding=-(32 + 2 * 33) % 8, **few_pending),
        _case(
            "ring_padding_rows",
            small,
            4,
            lengths=(4, 4, 3, 9, 2),
            num_accepted=(4, 4, 1, 9, 2),
            padding=(1,),
            ring_padding=(2, 3),
            index_dtype="int32",
            num_pending=(2, 3, 1, 4, 2),
        ),
        _case("ring_48_layers", (1, 2, 32, 32), 4, num_layers=48, **few),
        _case("ring_in_bfloat16", small, 4, ring_dtype="bfloat16", num_pending=every_count),
        _case("ring_in_float16", small, 4, ring_dtype="float16", num_pending=every_count),
        _case(
            "ring_stream_of_windows",
            (4, 32, 32, 32),
            4,
            num_layers=1,
            lengths=(4, 0, 3, 1, 2, 7, 4, 2) * 7,
            num_accepted=(4, 0, 1, 1, 0, 7, 3, 2) * 7,
            padding=(2, 21),
        ),
        _case("ring_walk", small, 4, walk_steps=30, **few_pending),
        _case("ring_walk_bfloat16_pool", small, 4, walk_steps=60, state_dtype="bfloat16", **few_pending),
        _pending_case("pending_of_1", 1, range(3), range(3)),
        _pending_case("pending_of_4", 4, range(6), range(6), pending_on_host=True),
        _pending_case("pending_of_16", 16, (1, 4, 16, 17), (0, 1, 8, 15, 16, 17)),
        _pending_case("pending_of_64", 64, (2, 65), (1, 32, 62, 63, 64, 65), heads=(1, 2, 32, 32)),
        _pending_case(
            "pending_bfloat16_pool", 4, (0, 1, 2, 4, 5), range(6), work_dtype="bfloat16", state_dtype="bfloat16"
        ),
        _pending_case(
            "pending_float16_pool", 4, (0, 1, 2, 4, 5), range(6), work_dtype="float16", state_dtype="float16"
        ),
    )


RING_CASES: dict[str, RingCase] = {case.name: case for case in _named_cases()}


def random_ring_case(seed: int, number: int, **fixed: Any) -> RingCase:
    """Case `number` of a seed, whatever other cases are drawn. Keywords fix `heads` or types; the rest is drawn."""
    random = np.random.default_rng([0x72_696E_67, seed, number])
    num_key_heads, group_size = int(random.integers(1, 4)), int(random.integers(1, 9))
    key_head_dim, value_head_dim = _HEAD_DIMS[int(random.integers(len(_HEAD_DIMS)))]
    floats = ("float32", "float16", "bfloat16")
    case = RingCase(
        name=f"random-{seed}-{number}",
        heads=HeadGeometry(num_key_heads, num_key_heads * group_size, key_head_dim, value_head_dim),
        ring_len=int(random.choice([1, 2, 3, 4, 5, 8, 16])),
        lengths=(),
        num_accepted=(),
        num_layers=int(random.integers(1, 5)),
        work_dtype=floats[int(random.integers(3))],
        state_dtype=floats[int(random.integers(3))],
        index_dtype=("uint32", "int32")[int(random.integers(2))],
        record_padding=int(random.integers(0, 9)),
        seed=int(random.integers(2**31)),
    )
    case = replace(case, **fixed)
    budget = max(2, _RANDOM_COST // (case.heads.slot_state_elements * case.num_layers))
    lengths = [int(length) for length in random.integers(0, case.ring_len + 3, int(random.integers(1, 9)))]
    while sum(lengths) > budget and len(lengths) > 1:
        lengths.pop()
    counts = [
        int(random.choice([0, case.ring_len + 1])) if length > case.ring_len else int(random.integers(0, length + 1))
        for length in lengths
    ]
    padding = tuple(position for position in range(len(lengths)) if random.random() < 0.1)
    pending = [int(count) for count in random.integers(0, case.ring_len + 2, len(lengths))]
    return replace(
        case,
        lengths=tuple(lengths),
        num_accepted=tuple(counts),
        padding=padding,
        num_pending=tuple(pending) if random.random() < 0.7 else (),
    )
