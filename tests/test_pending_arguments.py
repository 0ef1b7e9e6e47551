"""Arguments that say what is pending: what is refused, how it is said, and that nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.backends import host as host_backend
from gdn.errors import DTypeError, IndexValueError, LayoutError, ShapeError
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call, VerifyCall

PAD = gdn.PAD_SLOT
INDEX_TYPES = (np.uint32, np.int32)
TABLES = ("pending_ring_slot_idx", "num_pending")
PENDING = ("ring", *TABLES)
RING_LEN, RING_ROWS = 4, 6


def as_index(values: Any, index_type: Any = np.uint32) -> Any:
    return np.array(values, np.int64).astype(np.uint32).view(index_type)


def with_pending(call: Call) -> Call:
    """Give a call what is pending: 3 records of ring row 4 for its first sequence, 2 of row 5 for its second."""
    more = len(call["slot_idx"]) - 2
    call["pending_ring_slot_idx"] = as_index([4, 5, *[PAD] * more])
    call["num_pending"] = as_index([3, 2, *[0] * more])
    return call


@pytest.fixture
def make_verify(new_verify: type[VerifyCall]) -> Callable[..., VerifyCall]:
    """Makes verify calls with pending records: 6 ring rows of 4 records; windows take the first ones."""

    def make(**keywords: Any) -> VerifyCall:
        call = new_verify(ring_rows=RING_ROWS, ring_len=RING_LEN, **keywords)
        call["ring"] = np.random.default_rng(1).standard_normal(call["ring"].shape).astype(call["ring"].dtype)
        with_pending(call)
        return call

    return make


@pytest.fixture
def make_fwd(new_call: type[Call], make_verify: Callable[..., VerifyCall]) -> Callable[..., Call]:
    """Makes forward calls with pending records in the same ring; their six arrays may be given by place."""

    def make(**keywords: Any) -> Call:
        call = new_call(**keywords)
        call["ring"] = make_verify()["ring"]
        return with_pending(call)

    return make


@pytest.fixture
def verify(make_verify: Callable[..., VerifyCall]) -> VerifyCall:
    """One key head, two value heads of 8 x 8, rows of 2 tokens and 1, 4 slots."""
    return make_verify()


@pytest.fixture
def fwd(make_fwd: Callable[..., Call]) -> Call:
    """The same as a forward call."""
    return make_fwd()


@pytest.fixture(params=["verify", "fwd"])
def either(request: pytest.FixtureRequest) -> Call:
    """A call of each op that takes pending records."""
    call: Call = request.getfixturevalue(request.param)
    return call


@pytest.fixture
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(variant: object) -> None:
        raise AssertionError(f"{variant} was compiled")

    monkeypatch.setattr(host_backend, "load", load)


def copies(call: Call) -> dict[str, Any]:
    return {name: value.copy() for name, value in call.arguments.items()}


def test_the_calls_that_the_others_break_are_accepted(either: Call, cpu_backend: str) -> None:
    before = copies(either)
    either.check_indices()
    assert either.run(cpu_backend) is either["out"]
    assert (either["out"] != 7).all()
    changed = (either["recurrent_state"] != before["recurrent_state"]).any(axis=(1, 2, 3))
    assert changed.tolist() == [True, True, False, False]
    np.testing.assert_array_equal(either["ring"][2:], before["ring"][2:])
    for name in TABLES:
        np.testing.assert_array_equal(either[name], before[name])


def test_pending_records_make_a_difference(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    for make in (make_verify, make_fwd):
        plain, pending = make(), make()
        plain["num_pending"][:] = 0
        assert (plain.run(cpu_backend) != pending.run(cpu_backend)).all()


# ---- Together or not at all ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize(("given", "missing"), [TABLES, TABLES[::-1]])
def test_one_table_of_a_verify_without_the_other(
    verify: VerifyCall, cpu_backend: str, given: str, missing: str
) -> None:
    for absent in ("None", "left out"):
        if absent == "None":
            verify[missing] = None
        else:
            del verify.arguments[missing]
        message = f"{missing}: expected an array, since {given} came too, got None"
        assert verify.refusal(DTypeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("given", [(name,) for name in PENDING] + [PENDING[:2], PENDING[1:], PENDING[::2]])
def test_some_of_a_forwards_three_without_the_others(fwd: Call, cpu_backend: str, given: tuple[str, ...]) -> None:
    missing = [name for name in PENDING if name not in given]
    for name in missing:
        fwd[name] = None
    message = f"{missing[0]}: expected an array, since {' and '.join(given)} came too, got None"
    assert fwd.refusal(DTypeError, cpu_backend) == message


def test_none_of_them_is_the_plain_call(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    for make, names in ((make_verify, TABLES), (make_fwd, PENDING)):
        without, none, nothing = make(), make(), make()
        for name in names:
            del without.arguments[name]
            none[name] = None
        nothing["num_pending"][:] = 0
        for call in (without, none, nothing):
            call.check_indices()
            call.run(cpu_backend)
        for name in ("out", "recurrent_state", "ring"):
            if name in without.arguments and none[name] is not None:
                np.testing.assert_array_equal(none[name], without[name])
                np.testing.assert_array_equal(nothing[name], without[name])


def test_they_are_keywords_alone(fwd: Call, verify: VerifyCall) -> None:
    for call in (fwd, verify):
        positional = call.six if call is verify else (*call.six, call["ring"])
        with pytest.raises(TypeError, match="positional argument"):
            call.op(*positional, *(call[name] for name in TABLES))


def test_the_shape_function_takes_none_of_them(fwd: Call) -> None:
    assert ops.gated_delta_recurrence_fwd_shape(*fwd.six) == (3, 16)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        ops.gated_delta_recurrence_fwd_shape(*fwd.six, **{name: fwd[name] for name in PENDING})


# ---- The ring of a forward call ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(6, 1, 4), (6, 2, 4, 28), (6, 1, 0, 28), (6, 1, 65, 28), (6, 1, 4, 25)])
def test_a_ring_of_another_shape(fwd: Call, cpu_backend: str, shape: tuple[int, ...]) -> None:
    fwd["ring"] = np.zeros(shape, np.float32)
    assert fwd.refusal(ShapeError, cpu_backend).startswith("ring: expected ")


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dtype", ["float64", "int32"])
def test_a_ring_of_another_type(fwd: Call, cpu_backend: str, dtype: str) -> None:
    fwd["ring"] = fwd["ring"].astype(dtype)
    assert fwd.refusal(DTypeError, cpu_backend) == f"ring: expected float32, float16 or bfloat16, got {dtype}"


def test_a_ring_that_is_not_dense(fwd: Call, cpu_backend: str) -> None:
    fwd["ring"] = np.zeros((6, 1, 4, 56), np.float32)[..., ::2]
    assert fwd.refusal(LayoutError, cpu_backend).startswith("ring: expected its last 4 axes dense row-major")


def test_a_read_only_ring_is_taken(make_fwd: Callable[..., Call], verify: VerifyCall, cpu_backend: str) -> None:
    """A forward only reads it; a verify writes it."""
    fwd, plain = make_fwd(), make_fwd()
    for name in PENDING:
        fwd[name].flags.writeable = False
    np.testing.assert_array_equal(fwd.run(cpu_backend), plain.run(cpu_backend))
    verify["ring"].flags.writeable = False
    assert verify.refusal(LayoutError, cpu_backend) == "ring: expected a writable array, got a read-only one"


# ---- Tables ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16", "float32", "float64", ">u4", "bool"])
@pytest.mark.parametrize("table", TABLES)
def test_tables_of_another_type_name_the_cast(either: Call, cpu_backend: str, table: str, dtype: str) -> None:
    either[table] = either[table].astype(dtype)
    message = f"{table}: expected uint32 or int32, got {dtype} (cast it: {table}.astype('uint32'))"
    assert either.refusal(DTypeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("shape", [(1,), (3,), (1, 2), (2, 1), ()])
@pytest.mark.parametrize("table", TABLES)
def test_tables_have_one_entry_a_sequence(either: Call, cpu_backend: str, table: str, shape: tuple[int, ...]) -> None:
    either[table] = np.zeros(shape, np.uint32)
    message = f"{table}: expected shape [batch_size] = (2,), got shape {shape}"
    assert either.refusal(ShapeError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("value", [[0, 1], 3, np.float32(1), SimpleNamespace(shape=(2,))])
@pytest.mark.parametrize("argument", PENDING)
def test_things_that_are_no_arrays(either: Call, cpu_backend: str, argument: str, value: Any) -> None:
    either[argument] = value
    message = either.refusal(DTypeError, cpu_backend)
    assert message.startswith(f"{argument}: expected a NumPy or CuPy array, or a GPU array by DLPack, got ")


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("argument", PENDING)
def test_masked_arrays_are_refused(either: Call, cpu_backend: str, argument: str) -> None:
    either[argument] = np.ma.masked_array(either[argument], mask=np.zeros(either[argument].shape, bool))
    assert either.refusal(DTypeError, cpu_backend).startswith(f"{argument}: expected an array without a mask")


@pytest.mark.parametrize("layout", ["every other", "reversed", "repeated"])
def test_tables_with_any_strides(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], backend: str, layout: str
) -> None:
    """Field case 79: every table as a view equals the packed copy; a stride of 0 counts the same for all rows."""
    if backend == "cuda":
        import cupy as xp
    else:
        xp = np

    def strided(values: Any) -> Any:
        view = xp.zeros(7, values.dtype)[1::3] if layout == "every other" else xp.zeros(2, values.dtype)[::-1]
        view[...] = xp.asarray(values)
        return view

    for make in (make_verify, make_fwd):
        packed, views = make(), make()
        if layout == "repeated":
            packed["num_pending"][:] = 2
        for call in (packed, views):
            call.arguments = {name: xp.asarray(value) for name, value in call.arguments.items()}
        if layout == "repeated":
            views["num_pending"] = xp.broadcast_to(xp.asarray(2, xp.uint32), 2)
        else:
            for table in TABLES:
                views[table] = strided(make()[table])
        packed.run(backend)
        views.run(backend)
        for name in ("out", "recurrent_state", "ring"):
            assert bool((packed[name] == views[name]).all()), name
        assert bool((packed["recurrent_state"] != xp.asarray(make()["recurrent_state"])).any())


def test_int32_tables_are_the_same_bits(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    for make in (make_verify, make_fwd):
        unsigned, signed = make(), make()
        for table in TABLES:
            signed[table] = unsigned[table].view(np.int32)
        unsigned.run(cpu_backend)
        signed.run(cpu_backend)
        for name in ("out", "recurrent_state", "ring"):
            np.testing.assert_array_equal(signed[name], unsigned[name])


# ---- Places and shared memory ----


def overlap(call: Call, first: str, second: str) -> None:
    """Put two arguments of a call in one memory, the last element of the first on the second's first."""
    left, right = call[first], call[second]
    memory = np.zeros(left.nbytes + right.nbytes - 4, np.uint8)
    call[first] = memory[: left.nbytes].view(left.dtype).reshape(left.shape)
    call[second] = memory[left.nbytes - 4 :].view(right.dtype).reshape(right.shape)
    call[second][...] = right
    call[first].flat[:-1] = left.flat[:-1]


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("written", ["ring", "recurrent_state", "out"])
def test_what_verify_writes_lies_apart_from_the_tables(
    verify: VerifyCall, cpu_backend: str, written: str, table: str
) -> None:
    overlap(verify, written, table)
    message = f"{written}: expected memory of its own, apart from {table}, got overlapping arrays"
    assert verify.refusal(LayoutError, cpu_backend) == message


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("other", PENDING)
@pytest.mark.parametrize("written", ["recurrent_state", "out"])
def test_what_forward_writes_lies_apart_from_what_is_pending(
    fwd: Call, cpu_backend: str, written: str, other: str
) -> None:
    overlap(fwd, written, other)
    message = f"{written}: expected memory of its own, apart from {other}, got overlapping arrays"
    assert fwd.refusal(LayoutError, cpu_backend) == message


def test_one_array_may_be_two_tables(make_verify: Callable[..., VerifyCall], cpu_backend: str) -> None:
    """The lazy form: the rows of the windows are those of the pending records."""
    shared, apart = make_verify(), make_verify()
    shared["pending_ring_slot_idx"] = shared["ring_slot_idx"]
    apart["pending_ring_slot_idx"] = apart["ring_slot_idx"].copy()
    for call in (shared, apart):
        call["num_pending"][:] = 2
        call.run(cpu_backend)
    for name in ("out", "recurrent_state", "ring"):
        np.testing.assert_array_equal(shared[name], apart[name])
    np.testing.assert_array_equal(shared["recurrent_state"], make_verify()["recurrent_state"])


@pytest.mark.gpu
def test_arrays_on_cpu_and_gpu_in_one_call(verify: VerifyCall, fwd: Call) -> None:
    import cupy

    for call, names in ((verify, TABLES), (fwd, PENDING)):
        for argument in names:
            plain = call[argument]
            call[argument] = cupy.asarray(plain)
            with pytest.raises(
                gdn.DeviceError, match=rf"^{argument}: expected an array on cpu, .*, got one on cuda:0$"
            ):
                call.run()
            call[argument] = plain


# ---- Bound calls, keywords ----


def test_a_bound_call_follows_its_tables(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    for make in (make_verify, make_fwd):
        bound, plain = make(), make()
        with on_backend(cpu_backend):
            run = ops.bind(bound.op, *bound.six, **bound.keywords)
        for rows, counts in (([4, 5], [3, 2]), ([5, 4], [1, 0]), ([PAD, 3], [4, 4]), ([4, 2], [5, 1])):
            for call in (bound, plain):
                call["pending_ring_slot_idx"][:] = rows
                call["num_pending"][:] = counts
            run()
            plain.run(cpu_backend)
            for name in ("out", "recurrent_state", "ring"):
                np.testing.assert_array_equal(bound[name], plain[name])


def test_all_arguments_by_name(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    for make in (make_verify, make_fwd):
        by_name, by_place = make(), make()
        by_place.run(cpu_backend)
        backwards = dict(reversed(by_name.arguments.items()))
        ops.check_indices(by_name.op, **backwards)
        with on_backend(cpu_backend):
            by_name.op(**backwards)
        for name in ("out", "recurrent_state", "ring"):
            np.testing.assert_array_equal(by_name[name], by_place[name])


# ---- Index values ----


@pytest.mark.parametrize("index_type", INDEX_TYPES)
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([4, 6], "pending_ring_slot_idx[1]: expected a ring row below ring_rows = 6, or PAD_SLOT, got 6"),
        ([9, 6], "pending_ring_slot_idx[0]: expected a ring row below ring_rows = 6, or PAD_SLOT, got 9"),
        ([4, -2], f"pending_ring_slot_idx[1]: expected a ring row below ring_rows = 6, or PAD_SLOT, got {2**32 - 2}"),
        (
            [4, 4],
            "pending_ring_slot_idx[1]: expected a ring row that no other live sequence uses, "
            "got 4, as pending_ring_slot_idx[0]",
        ),
    ],
)
def test_pending_rows(either: Call, cpu_backend: str, values: list[int], message: str, index_type: Any) -> None:
    either["pending_ring_slot_idx"] = as_index(values, index_type)
    assert either.refusal(IndexValueError, cpu_backend) == message


@pytest.mark.parametrize(("rows", "at", "writer"), [([1, 5], 0, 1), ([4, 0], 1, 0), ([1, 0], 0, 1)])
def test_a_pending_row_that_another_sequence_records_in(
    verify: VerifyCall, cpu_backend: str, rows: list[int], at: int, writer: int
) -> None:
    verify["pending_ring_slot_idx"] = as_index(rows)
    assert verify.refusal(IndexValueError, cpu_backend) == (
        f"pending_ring_slot_idx[{at}]: expected a ring row that no other live sequence records in, "
        f"got {rows[at]}, as ring_slot_idx[{writer}]"
    )


def test_rows_that_read_nothing_may_name_what_another_records_in(
    make_verify: Callable[..., VerifyCall], cpu_backend: str
) -> None:
    """A count that says nothing, or padding in any table, reads no record."""
    for counts, slots in (([0, 0], [0, 1]), ([5, 2**32 - 1], [0, 1]), ([0, 3], [0, PAD])):
        call, plain = make_verify(), make_verify()
        for each in (call, plain):
            each["slot_idx"] = as_index(slots)
        call["pending_ring_slot_idx"] = as_index([1, 0])
        call["num_pending"] = as_index(counts)
        plain["num_pending"][:] = 0
        call.check_indices()
        call.run(cpu_backend)
        plain.run(cpu_backend)
        for name in ("out", "recurrent_state", "ring"):
            np.testing.assert_array_equal(call[name], plain[name])


def test_two_rows_that_read_nothing_may_name_one_pending_row(either: Call, cpu_backend: str) -> None:
    either["pending_ring_slot_idx"] = as_index([4, 4])
    either["num_pending"] = as_index([2, 5])
    pool = either["recurrent_state"].copy()
    either.check_indices()
    either.run(cpu_backend)
    assert (either["recurrent_state"][0] != pool[0]).any()


def test_pending_rows_that_are_read_by_nobody_are_held_to_the_ring_too(either: Call, cpu_backend: str) -> None:
    either["pending_ring_slot_idx"] = as_index([4, 6])
    either["num_pending"] = as_index([2, 0])
    assert either.refusal(IndexValueError, cpu_backend).startswith(
        "pending_ring_slot_idx[1]: expected a ring row below"
    )


def test_an_empty_window_that_folds_is_live(
    make_verify: Callable[..., VerifyCall], make_fwd: Callable[..., Call], cpu_backend: str
) -> None:
    """It writes its slot, which no other may name then; where nothing is folded, another may."""
    for make in (make_verify, make_fwd):
        call = make(lengths=(2, 0))
        call["slot_idx"] = as_index([1, 1])
        assert call.refusal(IndexValueError, cpu_backend) == (
            "slot_idx[1]: expected a slot that no other live sequence uses, got 1, as slot_idx[0]"
        )
        call["num_pending"] = as_index([3, 0])
        call.check_indices()


def test_an_empty_window_on_the_ring_row_of_its_pending_records_is_not_live(
    make_verify: Callable[..., VerifyCall], cpu_backend: str
) -> None:
    call = make_verify(lengths=(2, 0))
    call["slot_idx"] = as_index([1, 1])
    call["pending_ring_slot_idx"] = as_index([4, 1])
    before = copies(call)
    call.check_indices()
    call.run(cpu_backend)
    changed = np.flatnonzero((call["ring"] != before["ring"]).any(axis=(1, 2, 3)))
    assert changed.tolist() == [0]
    changed = np.flatnonzero((call["recurrent_state"] != before["recurrent_state"]).any(axis=(1, 2, 3)))
    assert changed.tolist() == [1]


def test_pending_rows_are_judged_last(verify: VerifyCall, fwd: Call, cpu_backend: str) -> None:
    for call in (verify, fwd):
        call["pending_ring_slot_idx"] = as_index([9, 9])
        assert call.refusal(IndexValueError, cpu_backend).startswith("pending_ring_slot_idx[0]")
    for table, values in (("ring_slot_idx", [9, 9]), ("slot_idx", [9, 9]), ("input_row_offsets", [0, 2, 4])):
        verify[table] = as_index(values)
        assert verify.refusal(IndexValueError, cpu_backend).startswith(f"{table}[")


@pytest.mark.gpu
def test_values_on_a_gpu_are_read_on_demand(either: Call) -> None:
    import cupy

    either["pending_ring_slot_idx"] = as_index([4, 9], np.int32)
    either.arguments = {name: cupy.asarray(value) for name, value in either.arguments.items()}
    either.run()
    with pytest.raises(IndexValueError, match=r"^pending_ring_slot_idx\[1\]: "):
        either.check_indices()
