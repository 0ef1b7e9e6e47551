"""Arguments of verify and fold: what is refused, how it is said, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.arrays import DTYPES, describe, take
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import host as host_backend
from gdn.backends.row_tile import nearest_row_tile
from gdn.errors import DTypeError, IndexValueError, LayoutError, ShapeError
from gdn.geometry import HeadGeometry
from gdn.recurrence import recurrence_inputs
from gdn.ring import fold_inputs, verify_inputs
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call, FoldCall, VerifyCall

RING_AXES = "[ring_rows, num_key_heads, RING_LEN, record_stride]"
RECORD_STRIDE = "a record_stride of at least key_head_dim + group_size * (value_head_dim + 1)"
PAD = gdn.PAD_SLOT

VERIFY_ARGUMENTS = (
    "qkv_conv_output",
    "decay_per_token",
    "beta_per_token",
    "recurrent_state",
    "slot_idx",
    "input_row_offsets",
    "ring",
    "ring_slot_idx",
)
FOLD_ARGUMENTS = ("recurrent_state", "row_ids", "ring", "ring_row_ids", "num_accepted")
TABLES = {"row_ids": "[num_layers, batch_size]", "ring_row_ids": "[num_layers, batch_size]"}


@pytest.fixture
def verify(new_verify: type[VerifyCall]) -> VerifyCall:
    """One key head, two value heads of 8 x 8, rows of 2 tokens and 1, 4 slots, 3 ring rows of 4 records."""
    return new_verify()


@pytest.fixture
def fold(new_fold: type[FoldCall]) -> FoldCall:
    """2 layers of 2 rows; 5 slots, 4 ring rows of 4 records."""
    return new_fold()


@pytest.fixture(params=["verify", "fold"])
def either(request: pytest.FixtureRequest) -> Call:
    """A call of each op that takes a ring."""
    call: Call = request.getfixturevalue(request.param)
    return call


@pytest.fixture
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(variant: object) -> None:
        raise AssertionError(f"{variant} was compiled")

    monkeypatch.setattr(host_backend, "load", load)


def copies(call: Call) -> dict[str, Any]:
    return {name: value.copy() for name, value in call.arguments.items()}


def test_the_calls_that_the_others_break_are_accepted(verify: VerifyCall, fold: FoldCall, cpu_backend: str) -> None:
    before = copies(verify)
    assert verify.check_indices() is None
    assert verify.run(cpu_backend) is verify["out"]
    assert (verify["out"] != 7).all()
    assert (verify["ring"] != before["ring"]).any()
    np.testing.assert_array_equal(verify["recurrent_state"], before["recurrent_state"])

    before = copies(fold)
    assert fold.check_indices() is None
    assert fold.run(cpu_backend) is None
    assert (fold["recurrent_state"][:4] != before["recurrent_state"][:4]).any(axis=(1, 2, 3)).all()
    for name in FOLD_ARGUMENTS[1:]:
        np.testing.assert_array_equal(fold[name], before[name])


# ---- Sizes of a record ----


@pytest.mark.parametrize(
    ("sizes", "elements"),
    [((128, 128, 2), 386), ((96, 192, 1), 289), ((8, 8, 1), 17), ((256, 256, 8), 2312), ((64, 32, 3), 163)],
)
def test_record_elements(sizes: tuple[int, int, int], elements: int) -> None:
    key_head_dim, value_head_dim, group_size = sizes
    assert ops.gated_delta_ring_record_elements(*sizes) == elements
    assert elements == key_head_dim + group_size * (value_head_dim + 1)


@pytest.mark.parametrize(
    ("sizes", "argument", "got"),
    [
        ((12, 8, 1), "key_head_dim", "12"),
        ((264, 8, 1), "key_head_dim", "264"),
        ((8, 0, 1), "value_head_dim", "0"),
        ((8, 257, 1), "value_head_dim", "257"),
    ],
)
def test_record_elements_of_sizes_that_are_not_served(sizes: tuple[int, int, int], argument: str, got: str) -> None:
    with pytest.raises(ShapeError) as caught:
        ops.gated_delta_ring_record_elements(*sizes)
    assert str(caught.value) == f"{argument}: expected a multiple of 8 from 8 to 256, got {got}"


@pytest.mark.parametrize("group_size", [0, -1])
def test_record_elements_of_no_group(group_size: int) -> None:
    with pytest.raises(ShapeError, match=rf"^group_size: expected at least 1, got {group_size}$"):
        ops.gated_delta_ring_record_elements(8, 8, group_size)


# ---- The ring ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("change", ["one more", "one less"])
def test_a_ring_of_another_rank(either: Call, cpu_backend: str, change: str) -> None:
    either["ring"] = either["ring"][None].copy() if change == "one more" else either["ring"][0].copy()
    message = f"ring: expected shape {RING_AXES}, got shape {either['ring'].shape}"
    assert either.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dtype", ["float64", ">f4", "int32", "uint16", "complex64"])
def test_a_ring_of_another_type(either: Call, cpu_backend: str, dtype: str) -> None:
    either["ring"] = either["ring"].astype(dtype)
    assert either.refusal(DTypeError, cpu_backend) == f"ring: expected float32, float16 or bfloat16, got {dtype}"


@pytest.mark.parametrize("ring_dtype", ["float32", "float16", "bfloat16"])
def test_every_type_of_ring_is_taken(
    new_verify: type[VerifyCall], new_fold: type[FoldCall], cpu_backend: str, ring_dtype: str
) -> None:
    verify, fold = new_verify(ring_dtype=ring_dtype), new_fold(ring_dtype=ring_dtype)
    plain = new_verify()
    np.testing.assert_array_equal(verify.run(cpu_backend), plain.run(cpu_backend))
    written = plain["ring"] != 7
    rounded = plain["ring"][written].astype(DTYPES[ring_dtype])
    np.testing.assert_array_equal(verify["ring"][written], rounded)
    wide = new_fold()
    wide["ring"] = fold["ring"].astype(np.float32)
    fold.run(cpu_backend)
    wide.run(cpu_backend)
    np.testing.assert_array_equal(fold["recurrent_state"], wide["recurrent_state"])


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("length", [0, 65, 128])
def test_ring_lengths_that_are_not_served(either: Call, cpu_backend: str, length: int) -> None:
    rows, heads, _, stride = either["ring"].shape
    either["ring"] = np.zeros((rows, heads, length, stride), np.float32)
    message = f"ring: expected RING_LEN from 1 to 64 as its third axis, got {length}"
    assert either.refusal(ShapeError, cpu_backend) == message


@pytest.mark.parametrize("length", [1, 64])
def test_the_shortest_and_the_longest_ring_are_taken(either: Call, length: int) -> None:
    rows, heads, _, stride = either["ring"].shape
    either["ring"] = np.zeros((rows, heads, length, stride), np.float32)
    either.run("numpy")


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("stride", [0, 8, 25])
def test_records_that_are_too_small(either: Call, cpu_backend: str, stride: int) -> None:
    rows, heads, length, _ = either["ring"].shape
    either["ring"] = np.zeros((rows, heads, length, stride), np.float32)
    message = f"ring: expected {RECORD_STRIDE} = 26 as its last axis, got {stride}"
    assert either.refusal(ShapeError, cpu_backend) == message


def test_records_without_padding_are_taken(new_verify: type[VerifyCall], cpu_backend: str) -> None:
    exact, wide = new_verify(record_padding=0), new_verify()
    np.testing.assert_array_equal(exact.run(cpu_backend), wide.run(cpu_backend))
    np.testing.assert_array_equal(exact["ring"], wide["ring"][..., :26])
    np.testing.assert_array_equal(wide["ring"][..., 26:], 7)


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("num_key_heads", [0, 2, 3])
def test_a_ring_of_other_key_heads(verify: VerifyCall, cpu_backend: str, num_key_heads: int) -> None:
    verify["ring"] = np.zeros((3, num_key_heads, 4, 28), np.float32)
    message = f"ring: expected num_key_heads = 1 as its second axis, got shape {verify['ring'].shape}"
    assert verify.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("num_key_heads", [0, 3, 4])
def test_a_pool_whose_heads_are_no_multiple_of_the_rings(fold: FoldCall, cpu_backend: str, num_key_heads: int) -> None:
    """Beside field case 55: a fold has key heads from the ring and value heads from the pool; both are named."""
    fold["ring"] = np.zeros((4, num_key_heads, 4, 28), np.float32)
    expected = "num_key_heads as its second axis, dividing the 2 value heads of recurrent_state"
    assert fold.refusal(ShapeError, cpu_backend) == f"ring: expected {expected}, got {num_key_heads}"


@pytest.mark.parametrize("axis", range(4))
def test_a_ring_that_is_not_dense(either: Call, cpu_backend: str, axis: int) -> None:
    """A gap in any axis, that of the single key head too: it moves the rows apart."""
    values = either["ring"]
    wide = [length * 2 if place == axis else length for place, length in enumerate(values.shape)]
    gaps = tuple(slice(None, None, 2) if place == axis else slice(None) for place in range(4))
    either["ring"] = np.full(wide, 7, np.float32)[gaps]
    either["ring"][...] = values
    assert either["ring"].shape == values.shape
    strides = tuple(stride // 4 for stride in either["ring"].strides)
    message = (
        f"ring: expected its last 4 axes dense row-major, got strides {strides} in elements for shape {values.shape}"
    )
    assert either.refusal(LayoutError, cpu_backend) == message


def test_a_ring_in_falling_order_is_not_dense(either: Call, cpu_backend: str) -> None:
    either["ring"] = either["ring"][::-1]
    assert either.refusal(LayoutError, cpu_backend).startswith("ring: expected its last 4 axes dense row-major")


def test_an_address_between_elements(either: Call, cpu_backend: str) -> None:
    values = either["ring"]
    shifted = np.frombuffer(bytearray(values.nbytes + 1), values.dtype, offset=1, count=values.size)
    either["ring"] = shifted.reshape(values.shape)
    message = f"ring: expected an address that is a multiple of 4 bytes, got {shifted.ctypes.data}"
    assert either.refusal(LayoutError, cpu_backend) == message


# ---- The pool ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dim", [4, 12, 257, 264])
@pytest.mark.parametrize("which", ["key_head_dim", "value_head_dim"])
def test_head_sizes_that_are_not_served(either: Call, cpu_backend: str, which: str, dim: int) -> None:
    sizes = {"key_head_dim": 8, "value_head_dim": 8, which: dim}
    key_head_dim, value_head_dim = sizes.values()
    either["recurrent_state"] = np.zeros((5, 2, key_head_dim, value_head_dim), np.float32)
    either["ring"] = np.zeros((4, 1, 4, 2048), np.float32)
    if "qkv_conv_output" in either.arguments:
        either["qkv_conv_output"] = np.zeros((3, 2 * key_head_dim + 2 * value_head_dim), np.float32)
        either["out"] = np.full((3, 2 * value_head_dim), 7, np.float32)
    message = either.refusal(ShapeError, cpu_backend)
    assert which in message
    assert message.endswith(f"a multiple of 8 from 8 to 256, got {dim}")


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(2, 8, 8), (1, 5, 2, 8, 8), (5,)])
def test_a_pool_of_another_rank(fold: FoldCall, cpu_backend: str, shape: tuple[int, ...]) -> None:
    fold["recurrent_state"] = np.zeros(shape, np.float32)
    axes = "[max_slots, num_value_heads, key_head_dim, value_head_dim]"
    message = f"recurrent_state: expected shape {axes}, got shape {shape}"
    assert fold.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dtype", ["float64", ">f4", "int32"])
def test_a_pool_of_another_type(fold: FoldCall, cpu_backend: str, dtype: str) -> None:
    fold["recurrent_state"] = fold["recurrent_state"].astype(dtype)
    message = f"recurrent_state: expected float32, float16 or bfloat16, got {dtype}"
    assert fold.refusal(DTypeError, cpu_backend) == message


def test_a_pool_that_is_not_dense(fold: FoldCall, cpu_backend: str) -> None:
    fold["recurrent_state"] = np.zeros((5, 2, 8, 16), np.float32)[..., :8]
    expected = "its last 3 axes dense row-major, got strides (256, 128, 16, 1) in elements for shape (5, 2, 8, 8)"
    assert fold.refusal(LayoutError, cpu_backend) == f"recurrent_state: expected {expected}"


def test_slots_that_share_memory(fold: FoldCall, cpu_backend: str) -> None:
    memory = np.zeros(5 * 128, np.float32)
    fold["recurrent_state"] = np.ndarray((5, 2, 8, 8), np.float32, memory, 0, (127 * 4, 256, 32, 4))
    message = "recurrent_state: expected a first stride of at least 128 elements, got 127"
    assert fold.refusal(LayoutError, cpu_backend) == message


@pytest.mark.parametrize("layout", ["gaps", "falling"])
def test_any_stride_of_slots_is_taken(new_fold: type[FoldCall], cpu_backend: str, layout: str) -> None:
    fold, plain = new_fold(), new_fold()
    pool = fold["recurrent_state"]
    wide = np.full((10, *pool.shape[1:]), 7, np.float32)
    fold["recurrent_state"] = wide[1::2] if layout == "gaps" else wide[8::-2]
    fold["recurrent_state"][...] = pool
    fold.run(cpu_backend)
    plain.run(cpu_backend)
    np.testing.assert_array_equal(fold["recurrent_state"], plain["recurrent_state"])
    assert np.count_nonzero((wide == 7).all(axis=(1, 2, 3))) == 5


# ---- Tables ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16", "float32", "float64", ">u4", "bool"])
@pytest.mark.parametrize("table", ["row_ids", "ring_row_ids", "num_accepted", "ring_slot_idx"])
def test_tables_of_another_type_name_the_cast(
    verify: VerifyCall, fold: FoldCall, cpu_backend: str, table: str, dtype: str
) -> None:
    call: Call = verify if table == "ring_slot_idx" else fold
    call[table] = call[table].astype(dtype)
    message = f"{table}: expected uint32 or int32, got {dtype} (cast it: {table}.astype('uint32'))"
    assert call.refusal(DTypeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(2,), (4,), (1, 2, 2), ()])
def test_slots_of_another_rank(fold: FoldCall, cpu_backend: str, shape: tuple[int, ...]) -> None:
    fold["row_ids"] = np.zeros(shape, np.uint32)
    message = f"row_ids: expected shape [num_layers, batch_size], got shape {shape}"
    assert fold.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(2,), (1, 2), (2, 1), (2, 3), (3, 2), (2, 2, 1), ()])
def test_ring_rows_have_the_shape_of_the_slots(fold: FoldCall, cpu_backend: str, shape: tuple[int, ...]) -> None:
    fold["ring_row_ids"] = np.zeros(shape, np.uint32)
    message = f"ring_row_ids: expected shape [num_layers, batch_size] = (2, 2), got shape {shape}"
    assert fold.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 2), (1, 2), ()])
def test_counts_have_one_entry_a_row(fold: FoldCall, cpu_backend: str, shape: tuple[int, ...]) -> None:
    """Beside field case 61: a scalar, or one count for all, would broadcast to something.

    Counts are those of the batch: a count per layer would let layers fall out of step.
    """
    fold["num_accepted"] = np.zeros(shape, np.uint32)
    message = f"num_accepted: expected shape [batch_size] = (2,), got shape {shape}"
    assert fold.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 2), (2, 1), ()])
def test_ring_rows_have_one_entry_a_sequence(verify: VerifyCall, cpu_backend: str, shape: tuple[int, ...]) -> None:
    verify["ring_slot_idx"] = np.zeros(shape, np.uint32)
    message = f"ring_slot_idx: expected shape [batch_size] = (2,), got shape {shape}"
    assert verify.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("value", [None, [[0, 1]], 3, np.float32(1), SimpleNamespace(shape=(2, 2))])
@pytest.mark.parametrize("argument", ["ring", "ring_slot_idx", *FOLD_ARGUMENTS])
def test_things_that_are_no_arrays(
    verify: VerifyCall, fold: FoldCall, cpu_backend: str, argument: str, value: Any
) -> None:
    call: Call = verify if argument == "ring_slot_idx" else fold
    call[argument] = value
    message = call.refusal(DTypeError, cpu_backend)
    assert message.startswith(f"{argument}: expected a NumPy or CuPy array, or a GPU array by DLPack, got ")


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("argument", ["ring", "ring_slot_idx", *FOLD_ARGUMENTS[1:]])
def test_masked_arrays_are_refused(verify: VerifyCall, fold: FoldCall, cpu_backend: str, argument: str) -> None:
    call: Call = verify if argument == "ring_slot_idx" else fold
    call[argument] = np.ma.masked_array(call[argument], mask=np.zeros(call[argument].shape, bool))
    message = call.refusal(DTypeError, cpu_backend)
    assert message.startswith(f"{argument}: expected an array without a mask")


@pytest.mark.parametrize("layout", ["every other", "column major", "reversed"])
def test_tables_with_any_strides(
    new_verify: type[VerifyCall], new_fold: type[FoldCall], backend: str, layout: str
) -> None:
    """Field case 79: every table as a view equals the packed copy."""
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np

    def strided(values: Any) -> Any:
        if layout == "every other":
            view = xp.zeros([3 * length + 1 for length in values.shape], values.dtype)
            view = view[tuple(slice(1, None, 3) for _ in values.shape)]
        elif layout == "column major":
            view = xp.zeros(values.shape[::-1], values.dtype).T
        else:
            view = xp.zeros(values.shape, values.dtype)[tuple(slice(None, None, -1) for _ in values.shape)]
        view[...] = xp.asarray(values)
        return view

    for new, tables in (
        (new_verify, ("slot_idx", "input_row_offsets", "ring_slot_idx")),
        (new_fold, ("row_ids", "ring_row_ids", "num_accepted")),
    ):
        packed, views = new(), new()
        for call in (packed, views):
            call.arguments = {name: xp.asarray(value) for name, value in call.arguments.items()}
        for table in tables:
            views[table] = strided(new()[table])
        packed.run(backend)
        views.run(backend)
        written = "ring" if new is new_verify else "recurrent_state"
        assert bool((packed[written] != xp.asarray(new()[written])).any())
        for name in packed.arguments:
            assert bool((packed[name] == views[name]).all()), name


def test_one_count_for_all_rows(new_fold: type[FoldCall], backend: str) -> None:
    """A stride of 0: every row reads one element."""
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np
    packed, repeated = new_fold(), new_fold()
    for call in (packed, repeated):
        call.arguments = {name: xp.asarray(value) for name, value in call.arguments.items()}
    packed["num_accepted"][:] = 2
    repeated["num_accepted"] = xp.broadcast_to(xp.asarray(2, xp.uint32), 2)
    assert repeated["num_accepted"].strides == (0,)
    packed.run(backend)
    repeated.run(backend)
    assert bool((packed["recurrent_state"] == repeated["recurrent_state"]).all())
    assert bool((packed["recurrent_state"] != xp.asarray(new_fold()["recurrent_state"])).any())


def test_int32_tables_are_the_same_bits(
    new_verify: type[VerifyCall], new_fold: type[FoldCall], cpu_backend: str
) -> None:
    for new in (new_verify, new_fold):
        unsigned, signed = new(), new()
        for name, value in unsigned.arguments.items():
            if value.dtype == np.uint32:
                signed[name] = value.view(np.int32)
        unsigned.run(cpu_backend)
        signed.run(cpu_backend)
        for name in ("recurrent_state", "ring", *unsigned.keywords):
            np.testing.assert_array_equal(signed[name], unsigned[name])


# ---- Arrays that are written, and what they may share ----


def test_read_only_arrays_that_would_be_written(verify: VerifyCall, fold: FoldCall, cpu_backend: str) -> None:
    for call, argument in ((fold, "recurrent_state"), (verify, "ring"), (verify, "recurrent_state"), (verify, "out")):
        call[argument].flags.writeable = False
        message = f"{argument}: expected a writable array, got a read-only one"
        assert call.refusal(LayoutError, cpu_backend) == message
        call[argument].flags.writeable = True


def test_read_only_inputs_are_taken(new_verify: type[VerifyCall], new_fold: type[FoldCall], cpu_backend: str) -> None:
    for new, written in ((new_verify, ("recurrent_state", "ring", "out")), (new_fold, ("recurrent_state",))):
        call, plain = new(), new()
        for name, value in call.arguments.items():
            value.flags.writeable = name in written
        call.run(cpu_backend)
        plain.run(cpu_backend)
        for name in written:
            np.testing.assert_array_equal(call[name], plain[name])


def overlap(call: Call, first: str, second: str) -> None:
    """Put two arguments of a call in one memory, the last element of the first on the second's first."""
    left, right = call[first], call[second]
    memory = np.zeros(left.nbytes + right.nbytes - 4, np.uint8)
    call[first] = memory[: left.nbytes].view(left.dtype).reshape(left.shape)
    call[second] = memory[left.nbytes - 4 :].view(right.dtype).reshape(right.shape)
    call[second][...] = right
    call[first].flat[:-1] = left.flat[:-1]


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("other", [name for name in VERIFY_ARGUMENTS if name != "ring"])
def test_a_ring_that_overlaps(verify: VerifyCall, cpu_backend: str, other: str) -> None:
    overlap(verify, "ring", other)
    message = f"ring: expected memory of its own, apart from {other}, got overlapping arrays"
    assert verify.refusal(LayoutError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("other", ["ring_slot_idx", "slot_idx", "qkv_conv_output"])
def test_a_pool_that_overlaps_in_verify(verify: VerifyCall, cpu_backend: str, other: str) -> None:
    overlap(verify, "recurrent_state", other)
    message = f"recurrent_state: expected memory of its own, apart from {other}, got overlapping arrays"
    assert verify.refusal(LayoutError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("other", VERIFY_ARGUMENTS)
def test_a_readout_that_overlaps(verify: VerifyCall, cpu_backend: str, other: str) -> None:
    overlap(verify, "out", other)
    message = f"out: expected memory of its own, apart from {other}, got overlapping arrays"
    assert verify.refusal(LayoutError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("other", FOLD_ARGUMENTS[1:])
def test_a_pool_that_overlaps_in_fold(fold: FoldCall, cpu_backend: str, other: str) -> None:
    overlap(fold, "recurrent_state", other)
    message = f"recurrent_state: expected memory of its own, apart from {other}, got overlapping arrays"
    assert fold.refusal(LayoutError, cpu_backend) == message


def test_one_table_may_name_slots_and_ring_rows(new_fold: type[FoldCall], cpu_backend: str) -> None:
    shared, apart = new_fold(), new_fold()
    shared["ring_row_ids"] = shared["row_ids"]
    apart["ring_row_ids"] = apart["row_ids"].copy()
    shared.run(cpu_backend)
    apart.run(cpu_backend)
    np.testing.assert_array_equal(shared["recurrent_state"], apart["recurrent_state"])


@pytest.mark.parametrize("op", ["verify", "verify-pending", "fold"])
def test_checked_arguments_keep_the_order_of_the_call(op_calls: dict[str, Callable[[str], Call]], op: str) -> None:
    """A plan finds the address of each array by its place among them."""
    call = op_calls[op]("float32")
    if op == "fold":
        inputs: Any = fold_inputs(take, *call.arguments.values())
    else:
        *six, ring, ring_slot_idx = call.six
        keywords = {name: value for name, value in call.keywords.items() if name != "out"}
        inputs = verify_inputs(take, recurrence_inputs(take, *six), ring, ring_slot_idx, **keywords)
    assert [argument.name for argument in inputs.arguments] == [name for name in call.arguments if name != "out"]


# ---- Optional arguments, keywords ----


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "none"])
def test_the_readout_is_given_or_made(new_verify: type[VerifyCall], cpu_backend: str, out_dtype: str) -> None:
    """Field case 19: `out` is honoured or made, on every backend, and everything else is the same."""
    plain, call = new_verify(work_dtype="bfloat16"), new_verify(work_dtype="bfloat16")
    expected = plain.run(cpu_backend)
    call["out"] = None if out_dtype == "none" else np.zeros(call["out"].shape, DTYPES[out_dtype])
    got = call.run(cpu_backend)
    assert got.dtype == DTYPES["bfloat16" if out_dtype == "none" else out_dtype]
    assert call["out"] is None or got is call["out"]
    np.testing.assert_array_equal(got.astype(expected.dtype), expected)
    for name in ("ring", "recurrent_state"):
        np.testing.assert_array_equal(call[name], plain[name])


def test_a_readout_of_another_type_or_shape(verify: VerifyCall, cpu_backend: str) -> None:
    verify["out"] = verify["out"].astype(np.float16)
    assert verify.refusal(DTypeError, cpu_backend) == "out: expected float32, got float16"
    verify["out"] = np.zeros((4, 16), np.float32)
    message = "out: expected shape [total_seq_len, value_dim] = (3, 16), got shape (4, 16)"
    assert verify.refusal(ShapeError, cpu_backend) == message


def test_the_keywords_of_the_ops_are_taken(
    new_verify: type[VerifyCall], new_fold: type[FoldCall], cpu_backend: str
) -> None:
    for new in (new_verify, new_fold):
        by_name, by_place = new(), new()
        by_place.run(cpu_backend)
        backwards = dict(reversed(by_name.arguments.items()))
        ops.check_indices(by_name.op, **backwards)
        with on_backend(cpu_backend):
            by_name.op(**backwards)
        np.testing.assert_array_equal(by_name["recurrent_state"], by_place["recurrent_state"])
        np.testing.assert_array_equal(by_name["ring"], by_place["ring"])


@pytest.mark.gpu
def test_arrays_on_cpu_and_gpu_in_one_call(verify: VerifyCall, fold: FoldCall) -> None:
    import cupy

    for call, names in ((verify, VERIFY_ARGUMENTS), (fold, FOLD_ARGUMENTS)):
        for argument in names[1:]:
            plain = call[argument]
            call[argument] = cupy.asarray(plain)
            with pytest.raises(
                gdn.DeviceError, match=rf"^{argument}: expected an array on cpu, .*, got one on cuda:0$"
            ):
                call.run()
            call[argument] = plain


# ---- Index values ----


def as_index(values: Any, index_type: Any) -> Any:
    return np.array(values, np.int64).astype(np.uint32).view(index_type)


INDEX_TYPES = (np.uint32, np.int32)


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("ring_slot_idx", [0, 3], "ring_slot_idx[1]: expected a ring row below ring_rows = 3, or PAD_SLOT, got 3"),
        ("ring_slot_idx", [9, 3], "ring_slot_idx[0]: expected a ring row below ring_rows = 3, or PAD_SLOT, got 9"),
        ("ring_slot_idx", [0, -2], "ring_slot_idx[1]: expected a ring row below ring_rows = 3, or PAD_SLOT, got {}"),
        ("slot_idx", [4, 0], "slot_idx[0]: expected a slot below max_slots = 4, or PAD_SLOT, got 4"),
        ("ring_slot_idx", [2, 2], "ring_slot_idx[1]: expected a ring row that no other live "),
        ("slot_idx", [1, 1], "slot_idx[1]: expected a slot that no other live "),
    ],
)
def test_index_values_of_a_verify(
    verify: VerifyCall, cpu_backend: str, table: str, values: list[int], message: str, index_type: Any
) -> None:
    """Field case 15: slots and ring rows are held to their own pools."""
    verify[table] = as_index(values, index_type)
    assert verify.refusal(IndexValueError, cpu_backend).startswith(message.format(2**32 - 2))


def test_a_shared_ring_row_is_named_with_both_positions(new_verify: type[VerifyCall], cpu_backend: str) -> None:
    verify = new_verify(lengths=(1, 1, 0, 1), max_slots=4)
    verify["ring_slot_idx"] = as_index([1, 0, 0, 0], np.uint32)
    assert verify.refusal(IndexValueError, cpu_backend).endswith("got 0, as ring_slot_idx[1]")


@pytest.mark.parametrize("index_type", INDEX_TYPES)
def test_rows_without_tokens_or_places_share_ring_rows(
    new_verify: type[VerifyCall], cpu_backend: str, index_type: Any
) -> None:
    """Field case 7: an empty row and padding, by slot or by ring row, are not live."""
    verify = new_verify(lengths=(1, 0, 1, 1), max_slots=4)
    verify["slot_idx"] = as_index([1, 1, PAD, 2], index_type)
    verify["ring_slot_idx"] = as_index([2, 2, PAD, PAD], index_type)
    before = copies(verify)
    verify.check_indices()
    verify.run(cpu_backend)
    assert (verify["out"][0] != 0).all()
    assert (verify["out"][1:] == 0).all()
    np.testing.assert_array_equal(verify["recurrent_state"], before["recurrent_state"])
    np.testing.assert_array_equal(verify["ring"][:2], before["ring"][:2])
    np.testing.assert_array_equal(verify["ring"][2, :, 1:], before["ring"][2, :, 1:])
    assert (verify["ring"][2, :, 0, :26] != before["ring"][2, :, 0, :26]).all()


@pytest.mark.parametrize("op", ["verify", "fold"])
def test_padding_in_one_table_frees_what_the_other_names(
    new_verify: type[VerifyCall], new_fold: type[FoldCall], cpu_backend: str, op: str
) -> None:
    """Field case 7: a row whose ring row is padding uses no slot, and one whose slot is padding no ring row."""
    for slots, ring_rows in (([1, 1], [0, PAD]), ([1, PAD], [0, 0])):
        call: Call = new_verify() if op == "verify" else new_fold()
        tables = ("slot_idx", "ring_slot_idx") if op == "verify" else ("row_ids", "ring_row_ids")
        for table, values in zip(tables, (slots, ring_rows), strict=True):
            call[table] = as_index(values if op == "verify" else [values, [PAD, PAD]], np.uint32)
        pool = call["recurrent_state"].copy()
        call.check_indices()
        call.run(cpu_backend)
        changed = np.flatnonzero((call["recurrent_state"] != pool).any(axis=(1, 2, 3)))
        assert changed.tolist() == ([] if op == "verify" else [1])


def test_ring_rows_of_empty_sequences_are_held_to_the_ring_too(new_verify: type[VerifyCall], cpu_backend: str) -> None:
    verify = new_verify(lengths=(1, 0))
    verify["ring_slot_idx"] = as_index([0, 3], np.uint32)
    assert verify.refusal(IndexValueError, cpu_backend).startswith("ring_slot_idx[1]: expected a ring row below")


def test_offsets_then_slots_then_ring_rows(verify: VerifyCall, cpu_backend: str) -> None:
    verify["ring_slot_idx"] = as_index([9, 9], np.uint32)
    assert verify.refusal(IndexValueError, cpu_backend).startswith("ring_slot_idx[0]")
    verify["slot_idx"] = as_index([9, 9], np.uint32)
    assert verify.refusal(IndexValueError, cpu_backend).startswith("slot_idx[0]")
    verify["input_row_offsets"] = as_index([0, 2, 4], np.uint32)
    assert verify.refusal(IndexValueError, cpu_backend).startswith("input_row_offsets[2]")


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize(
    ("table", "values", "message"),
    [
        ("row_ids", [[0, 1], [3, 5]], "row_ids[1, 1]: expected a slot below max_slots = 5, or PAD_SLOT, got 5"),
        ("row_ids", [[0, -2], [9, 2]], "row_ids[0, 1]: expected a slot below max_slots = 5, or PAD_SLOT, got {}"),
        ("row_ids", [[0, 1], [1, 2]], "row_ids[1, 0]: expected a slot that no other live "),
        ("row_ids", [[4, 4], [3, 2]], "row_ids[0, 1]: expected a slot that no other live "),
        (
            "ring_row_ids",
            [[2, 4], [1, 3]],
            "ring_row_ids[0, 1]: expected a ring row below ring_rows = 4, or PAD_SLOT, got 4",
        ),
        ("ring_row_ids", [[2, 0], [1, 2]], "ring_row_ids[1, 1]: expected a ring row that no other live "),
    ],
)
def test_index_values_of_a_fold(
    fold: FoldCall, cpu_backend: str, table: str, values: list[list[int]], message: str, index_type: Any
) -> None:
    fold[table] = as_index(values, index_type)
    assert fold.refusal(IndexValueError, cpu_backend).startswith(message.format(2**32 - 2))


def test_a_slot_shared_over_layers_is_named_with_both_positions(fold: FoldCall, cpu_backend: str) -> None:
    """Beside field cases 12, 13: rows of two layers share a pool, and so may share a slot."""
    fold["row_ids"] = as_index([[0, 1], [2, 0]], np.uint32)
    assert fold.refusal(IndexValueError, cpu_backend).endswith("got 0, as row_ids[0, 0]")


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize("count", [0, 5, 64, 65, 2**31 - 1, 2**31, -1])
def test_rows_whose_count_folds_nothing_are_not_live(
    fold: FoldCall, cpu_backend: str, count: int, index_type: Any
) -> None:
    """A count of 0, above RING_LEN, or negative as int32, skips its row; the row may name what another uses."""
    fold["num_accepted"] = as_index([2, count], index_type)
    fold["row_ids"] = as_index([[0, 0], [1, 1]], np.uint32)
    fold["ring_row_ids"] = as_index([[0, 0], [1, 1]], np.uint32)
    before = copies(fold)
    fold.check_indices()
    fold.run(cpu_backend)
    changed = (fold["recurrent_state"] != before["recurrent_state"]).any(axis=(1, 2, 3))
    assert changed.tolist() == [True, True, False, False, False]
    fold["num_accepted"] = as_index([2, 4], index_type)
    assert fold.refusal(IndexValueError, cpu_backend).startswith("row_ids[0, 1]: expected a slot that no other live ")


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize("table", TABLES)
def test_padding_skips_a_row(fold: FoldCall, cpu_backend: str, table: str, index_type: Any) -> None:
    """Field case 7: PAD_SLOT as uint32 and -1 as int32 in either table."""
    fold[table] = as_index([[2, PAD], [PAD, 3]], index_type)
    pool = fold["recurrent_state"].copy()
    fold.check_indices()
    fold.run(cpu_backend)
    changed = np.flatnonzero((fold["recurrent_state"] != pool).any(axis=(1, 2, 3)))
    assert changed.tolist() == ([2, 3] if table == "row_ids" else [0, 2])


@pytest.mark.parametrize("shape", [(0, 2), (2, 0), (0, 0)])
def test_no_layers_and_no_rows_fold_nothing(fold: FoldCall, cpu_backend: str, shape: tuple[int, int]) -> None:
    before = copies(fold)
    for table in TABLES:
        fold[table] = np.zeros(shape, np.uint32)
    fold["num_accepted"] = np.zeros(shape[1], np.uint32)
    fold.check_indices()
    fold.run(cpu_backend)
    np.testing.assert_array_equal(fold["recurrent_state"], before["recurrent_state"])


@pytest.mark.parametrize(("lengths", "shape"), [((), (0, 16)), ((0, 0), (0, 16))])
def test_no_sequences_and_no_tokens_record_nothing(
    new_verify: type[VerifyCall], cpu_backend: str, lengths: tuple[int, ...], shape: tuple[int, int]
) -> None:
    verify = new_verify(lengths=lengths)
    before = copies(verify)
    verify.check_indices()
    assert verify.run(cpu_backend).shape == shape
    for name in ("ring", "recurrent_state"):
        np.testing.assert_array_equal(verify[name], before[name])


def test_a_ring_without_rows_serves_padding_alone(new_verify: type[VerifyCall], cpu_backend: str) -> None:
    verify = new_verify(ring_rows=0)
    assert "ring_rows = 0" in verify.refusal(IndexValueError, cpu_backend)
    verify["ring_slot_idx"][:] = PAD
    assert (verify.run(cpu_backend) == 0).all()


@pytest.mark.gpu
def test_values_on_a_gpu_are_read_on_demand(verify: VerifyCall, fold: FoldCall) -> None:
    import cupy

    verify["ring_slot_idx"] = as_index([2, 2], np.int32)
    fold["row_ids"] = as_index([[0, 1], [3, 9]], np.int32)
    for call, place in ((verify, r"ring_slot_idx\[1\]"), (fold, r"row_ids\[1, 1\]")):
        call.arguments = {name: cupy.asarray(value) for name, value in call.arguments.items()}
        call.run()
        with pytest.raises(IndexValueError, match=f"^{place}: "):
            call.check_indices()


def test_tables_that_no_launch_can_hold() -> None:
    """From shapes alone: 2^31 blocks are one too many."""
    heads = HeadGeometry(1, 2, 8, 8)
    tile = nearest_row_tile(8, 8, 4)
    blocks_a_row = heads.num_value_heads * (heads.value_head_dim // tile.columns)
    layers = 2**31 // (4 * blocks_a_row)

    def blocks(batch_size: int) -> int:
        shapes = ((5, 2, 8, 8), "float32"), ((layers, batch_size), "uint32"), ((4, 1, 4, 26), "float32")
        described = [SimpleNamespace(shape=shape, dtype=DTYPES[dtype]) for shape, dtype in shapes]
        counts = SimpleNamespace(shape=(batch_size,), dtype=DTYPES["uint32"])
        return fold_kernel.num_blocks(fold_inputs(describe, *described, described[1], counts), tile)

    assert blocks(3) == 3 * 2**29
    expected = f"tables of at most {2**31 - 1} blocks in one launch, got {2**31} for {4 * layers} rows"
    with pytest.raises(ShapeError) as caught:
        blocks(4)
    assert str(caught.value) == f"row_ids: expected {expected}"


@pytest.mark.parametrize("heads", [(2, 6, 8, 16), (1, 2, 32, 8), (3, 3, 16, 24)], ids=str)
def test_the_heads_of_a_fold_are_those_of_its_pool_and_ring(heads: tuple[int, int, int, int]) -> None:
    num_key_heads, num_value_heads, key_head_dim, value_head_dim = heads
    geometry = HeadGeometry(*heads)
    shapes = (
        ((5, num_value_heads, key_head_dim, value_head_dim), "float32"),
        ((1, 2), "uint32"),
        ((4, num_key_heads, 4, geometry.record_elements), "float32"),
        ((1, 2), "uint32"),
        ((2,), "uint32"),
    )
    described = [SimpleNamespace(shape=shape, dtype=DTYPES[dtype]) for shape, dtype in shapes]
    assert fold_inputs(describe, *described).geometry == geometry


@pytest.mark.parametrize(
    ("argument", "place", "axis"), [("recurrent_state", 0, "max_slots"), ("ring", 2, "ring_rows")], ids=["pool", "ring"]
)
def test_counts_that_no_index_can_name(argument: str, place: int, axis: str) -> None:
    """From shapes alone: one slot or ring row more than a 32-bit table can tell apart from padding."""

    def described(rows: int) -> list[Any]:
        shapes = [((5, 2, 8, 8), "float32"), ((1, 2), "uint32"), ((4, 1, 4, 26), "float32"), ((1, 2), "uint32")]
        shapes[place] = ((rows, *shapes[place][0][1:]), "float32")
        return [SimpleNamespace(shape=shape, dtype=DTYPES[dtype]) for shape, dtype in (*shapes, ((2,), "uint32"))]

    fold_inputs(describe, *described(2**32 - 1))
    with pytest.raises(ShapeError) as caught:
        fold_inputs(describe, *described(2**32))
    assert str(caught.value) == f"{argument}: expected {axis} of at most 4294967295, got 4294967296"
