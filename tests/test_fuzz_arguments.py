"""Valid calls of every op with one or two arguments made strange: a right result, or a GdnError and nothing written.

How long it goes on is the profile's to say: see CONTRIBUTING.md.
"""

from __future__ import annotations

import faulthandler
import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import gdn
from gdn import ops, oracle
from gdn.arrays import DTYPES
from gdn.backends import numpy as numpy_backend
from gdn.geometry import PAD_SLOT
from gdn.speculative import PendingWindows
from gdn.testing import assert_passed, close
from gdn.testing.compare import storage_tolerance
from gdn.testing.execute import on_backend

Arguments = dict[str, Any]
Array = np.ndarray[Any, Any]

FLOATS = ("float32", "float16", "bfloat16")
SECONDS_OF_A_HANG = 60
WITHOUT_END = 2**33  # entries, of which one is in memory
#: Arguments that an op writes.
WRITTEN = {
    "gated_delta_recurrence_fwd": ("recurrent_state", "out"),
    "gated_delta_recurrence_verify_ring": ("recurrent_state", "ring", "out"),
    "gated_delta_state_fold": ("recurrent_state",),
    "gated_delta_conv1d_fwd": ("conv_state", "out"),
    "gated_delta_conv1d_commit": ("conv_state",),
    "gated_delta_gates": ("out",),
}
SHAPES: dict[str, Callable[..., tuple[int, int]]] = {
    "gated_delta_recurrence_fwd": ops.gated_delta_recurrence_fwd_shape,
    "gated_delta_conv1d_fwd": ops.gated_delta_conv1d_fwd_shape,
    "gated_delta_gates": ops.gated_delta_gates_shape,
}


# ---- Strange values ----


class ByDlpack:
    """An array that only speaks DLPack."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Pretender:
    """Something with the attributes that it is given, whatever they are worth."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.capsule


class Exploding:
    """Something that fails however it is looked at."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")


NO_ARRAYS: tuple[Any, ...] = (
    *(None, True, 0, 3, -1, 2**70, 2.5, float("nan"), 1j, "out", b"bytes", (), [], [[1.0, 2.0]], {}, {1}, object()),
    *(np.float32(1), np.uint32(3), np.bool_(True), ..., NotImplemented, range(3), slice(3), lambda: 0, int, Exploding),
    *(Exploding(), Pretender(shape=5, dtype="float32"), Pretender(shape=("a",), dtype=np.float32)),
    *(Pretender(shape=(-1, 4), dtype=np.uint32), Pretender(shape=(2,), dtype=object()), Pretender(shape=None)),
    *(Pretender(device=None, capsule=None), Pretender(device=(1,), capsule=7), Pretender(device=(2, 0), capsule=7)),
    *(Pretender(device="cpu", capsule=None), Pretender(device=(1, 0), capsule=object()), Pretender(device=(99, 0))),
    Pretender(__cuda_array_interface__={}),
    *(memoryview(b"12345678"), bytearray(8), np.array(3.0), np.array(7, np.uint32), np.array(None), np.array("text")),
)


def _as_structs(array: Array) -> Array:
    """The same values as a field of wider elements: strides that are no multiple of the element."""
    structs = np.zeros(array.shape, [("value", array.dtype), ("odd", np.uint8, 3)])
    structs["value"] = array
    view: Array = structs["value"]
    return view


def _odd_address(array: Array) -> Array:
    memory = np.zeros(array.nbytes + 1, np.uint8)
    view: Array = np.ndarray(array.shape, array.dtype, buffer=memory, offset=1)
    view[...] = array
    return view


def _read_only(array: Array) -> Array:
    copy = array.copy()
    copy.flags.writeable = False
    return copy


def _reversed(array: Array) -> Array:
    flip = (slice(None, None, -1),) * array.ndim
    view: Array = array[flip].copy()[flip]
    return view


def _every_other(array: Array) -> Array:
    wide = np.zeros([2 * length + 1 for length in array.shape], array.dtype)
    view: Array = wide[tuple(slice(1, 1 + 2 * length, 2) for length in array.shape)]
    view[...] = array
    return view


def _gap_after_first_axis(array: Array) -> Array:
    rows = array.reshape(len(array), -1)
    wide = np.zeros((rows.shape[0], rows.shape[1] + 5), array.dtype)
    wide[:, : rows.shape[1]] = rows
    inner = np.zeros(array.shape[1:], array.dtype).strides
    view: Array = np.ndarray(array.shape, array.dtype, buffer=wide, strides=(wide.strides[0], *inner))
    return view


def _masked(array: Array) -> Array:
    return np.ma.masked_array(array.copy(), np.zeros(array.shape, bool))


def _subclass(array: Array) -> Array:
    class Special(np.ndarray[Any, Any]):
        pass

    return array.copy().view(Special)


#: The same values, otherwise kept.
LAYOUTS: dict[str, Callable[[Array], Any]] = {
    "copied": np.copy,
    "column major": lambda array: np.asfortranarray(array.copy()),
    "reversed": _reversed,
    "every other": _every_other,
    "gap after the first axis": _gap_after_first_axis,
    "read-only": _read_only,
    "odd address": _odd_address,
    "field of structs": _as_structs,
    "other byte order": lambda array: array.astype(array.dtype.newbyteorder()) if array.dtype.kind != "V" else array,
    "by DLPack": lambda array: ByDlpack(array.copy()),
    "masked": _masked,
    "subclass": _subclass,
    "list": lambda array: array.tolist(),
    "objects": lambda array: array.astype(object),
}

RESHAPED: dict[str, Callable[[Array], Any]] = {
    "axis in front": lambda array: array[None].copy(),
    "axis behind": lambda array: array[..., None].copy(),
    "flat": lambda array: array.ravel().copy(),
    "transposed": lambda array: array.T,
    "first entry": lambda array: array[0],
    "one less": lambda array: array[:-1],
    "one less of the last axis": lambda array: array[..., :-1],
    "one less of the second axis": lambda array: array[:, :-1] if array.ndim > 1 else array,
    "one more": lambda array: np.concatenate([array, array[:1]]),
    "one more of the last axis": lambda array: np.concatenate([array, array[..., :1]], -1),
    "none": lambda array: array[:0],
    "none of the last axis": lambda array: array[..., :0],
    "twice": lambda array: np.concatenate([array, array]),
    "one entry for all": lambda array: np.broadcast_to(array[:1], array.shape),
    "one number for all": lambda array: np.broadcast_to(array.ravel()[:1].reshape((1,) * array.ndim), array.shape),
    "without end": lambda array: np.broadcast_to(array[:1], (WITHOUT_END, *array.shape[1:])),
}

OTHER_TYPES = (
    *("float64", "int64", "uint64", "int16", "uint8", "bool", "complex64", "object", "U8", "S4", "M8[s]", "V4"),
    *("longdouble", ">f4", ">u4", ">i4", "f4,f4"),
)
TABLES = (
    *("slot_idx", "input_row_offsets", "ring_slot_idx", "pending_ring_slot_idx", "num_pending"),
    *("row_ids", "ring_row_ids", "num_accepted"),
)
INDEX_VALUES = (
    *(0, 1, 2, 3, 4, 5, 6, 64, 65, PAD_SLOT, PAD_SLOT - 1, 2**31 - 1, 2**31, 2**31 + 1, 2**24, 65535, 65536),
)


class Mutation(NamedTuple):
    """What to put in the place of an argument: something of a kind, found by name or number; or other index values."""

    argument: str
    kind: str
    choice: Any
    entry: int = 0

    def apply(self, arguments: Arguments) -> Any:
        """The argument's new value."""
        value = arguments[self.argument]
        if isinstance(value, tuple) and self.entry < len(value) == 2:  # of the pair of gates, one
            pair = list(value)
            pair[self.entry] = self._changed(pair[self.entry], arguments)
            return tuple(pair)
        return self._changed(value, arguments)

    def _changed(self, value: Any, arguments: Arguments) -> Any:
        if self.kind == "no array" or not isinstance(value, np.ndarray):
            return NO_ARRAYS[self.choice % len(NO_ARRAYS)] if isinstance(self.choice, int) else value
        if self.kind == "layout":
            return LAYOUTS[self.choice](value)
        if self.kind == "shape":
            return RESHAPED[self.choice](value)
        if self.kind == "type":
            return _cast(value, DTYPES[self.choice] if self.choice in DTYPES else np.dtype(self.choice))
        if self.kind == "shared":
            return _sharing(value, list(arguments.values())[self.choice % len(arguments)], self.entry)
        return _with_values(value, self.choice)


def mutations(names: Sequence[str], types: tuple[str, ...]) -> st.SearchStrategy[Mutation]:
    """Changes of arguments with these names. types: those of models' values that an array may change to."""
    names = sorted(names)
    choices = {
        "no array": st.integers(0, len(NO_ARRAYS) - 1),
        "layout": st.sampled_from(sorted(LAYOUTS)),
        "shape": st.sampled_from(sorted(RESHAPED)),
        "type": st.sampled_from(("uint32", "int32", *types, *OTHER_TYPES)),
        "shared": st.integers(0, 15),
    }
    of_any = (
        st.builds(Mutation, st.sampled_from(names), st.just(kind), choice, st.integers(0, 3))
        for kind, choice in choices.items()
    )
    values = st.lists(st.tuples(st.integers(0, 7), st.sampled_from(INDEX_VALUES)), min_size=1, max_size=3).map(tuple)
    of_tables = (
        st.builds(Mutation, st.just(name), st.just("index values"), values) for name in names if name in TABLES
    )
    return st.one_of(*of_any, *of_tables)


def _with_values(value: Array, changes: Sequence[tuple[int, int]]) -> Array:
    changed = np.array(value)
    for at, entry in changes:
        changed.view(np.uint32).flat[at % value.size] = entry
    return changed


def _cast(value: Array, dtype: np.dtype[Any]) -> Array:
    if dtype not in DTYPES.values() and dtype.kind in "VMUS":
        return np.zeros(value.shape, dtype)
    with np.errstate(invalid="ignore"):
        return value.astype(dtype)


def _sharing(value: Array, other: Any, offset: int) -> Array:
    """Memory of another argument in place of the value, where it has enough of the same type."""
    if not isinstance(other, np.ndarray) or other.dtype != value.dtype or not other.flags.c_contiguous:
        return value
    if other.size < value.size + offset:
        return value
    return np.ndarray(value.shape, value.dtype, buffer=other, offset=offset * value.itemsize)


# ---- What is right, from the documentation and the oracle ----


def plain(value: Any) -> Any:
    """A copy of the values of an argument, if it is an array or holds some; None for one without end."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    array = value.array if isinstance(value, ByDlpack) else value
    if not isinstance(array, np.ndarray):
        return value
    return np.array(array) if array.size < WITHOUT_END else None


def _apply(state: Array, records: Array) -> Array:
    """A state [nv, KD, VD], float64, after records [nk, n, record_stride], as the documentation lays them out."""
    num_value_heads, key_head_dim, value_head_dim = state.shape
    group_size = num_value_heads // len(records)
    for value_head in range(num_value_heads):
        place = value_head % group_size
        for record in records[value_head // group_size].astype(np.float64):
            key, rest = record[:key_head_dim], record[key_head_dim:]
            delta = rest[place * value_head_dim : (place + 1) * value_head_dim]
            decay = rest[group_size * value_head_dim + place]
            state[value_head] = decay * state[value_head] + np.outer(key, delta)
    return state


def _rows(table: Array) -> list[int]:
    return [int(entry) for entry in table.view(np.uint32).ravel()]


def _folded(pool: Array, slots: list[int], ring: Array, rows: list[int], counts: list[int]) -> Array:
    """The pool after a fold, rounded to its type."""
    pool = pool.copy()
    for slot, row, count in zip(slots, rows, counts, strict=True):
        if 0 < count <= ring.shape[2] and PAD_SLOT not in (slot, row):
            pool[slot] = _apply(pool[slot].astype(np.float64), ring[row, :, :count]).astype(pool.dtype)
    return pool


def right_fwd(given: Arguments) -> Arguments:
    slots = _rows(given["slot_idx"])
    pool = given["recurrent_state"]
    if given["num_pending"] is not None:
        tables = _rows(given["pending_ring_slot_idx"]), _rows(given["num_pending"])
        pool = _folded(pool, slots, given["ring"], *tables)
    out, states = _oracle(given, pool, slots)
    return {"out": out, "recurrent_state": states}


def _oracle(given: Arguments, pool: Array, slots: list[int]) -> tuple[Array, Array]:
    inputs = (given[name] for name in ("qkv_conv_output", "decay_per_token", "beta_per_token"))
    return oracle.gated_delta_recurrence_fwd(*inputs, pool, np.array(slots, np.uint32), given["input_row_offsets"])


def right_verify(given: Arguments) -> Arguments:
    """Of the ring, what its records say: see `records_lead_on`."""
    own, ring = _rows(given["ring_slot_idx"]), given["ring"]
    slots = [PAD_SLOT if row == PAD_SLOT else slot for slot, row in zip(_rows(given["slot_idx"]), own, strict=True)]
    first = [0] * len(slots)
    pool = given["recurrent_state"]
    if given["num_pending"] is not None:
        rows, counts = _rows(given["pending_ring_slot_idx"]), _rows(given["num_pending"])
        stays = [row == mine for row, mine in zip(rows, own, strict=True)]
        folds = [0 if stay else count for stay, count in zip(stays, counts, strict=True)]
        pool = _folded(pool, slots, ring, rows, folds)
        first = [n if stay and n <= ring.shape[2] else 0 for stay, n in zip(stays, counts, strict=True)]
    lengths = np.diff(given["input_row_offsets"].astype(np.int64))
    begun = pool.astype(np.float64)
    for slot, row, count in zip(slots, own, first, strict=True):
        if slot != PAD_SLOT and count:
            begun[slot] = _apply(begun[slot], ring[row, :, :count])
    out, ends = _oracle(given, begun, slots)
    states = pool.astype(np.float64)
    records: list[tuple[Array, int, int, Array]] = []
    for slot, row, count, length in zip(slots, own, first, lengths, strict=True):
        if slot == PAD_SLOT or not length:
            continue
        if count + length > ring.shape[2]:
            states[slot] = ends[slot]
        else:
            records.append((pool[slot].astype(np.float64), row, count + int(length), ends[slot]))
    return {"out": out, "recurrent_state": states, "records": records}


def records_lead_on(ring: Array, before: Array, records: list[tuple[Array, int, int, Array]]) -> None:
    """Records take the states they were made from to where the windows end; all other memory of the ring is kept."""
    for state, row, end, expected in records:
        assert_passed(close(_apply(state, ring[row, :, :end]), expected, storage_tolerance(ring.dtype.name), "records"))
    kept = np.ones(ring.shape, bool)
    for _, row, end, _ in records:
        kept[row, :, :end] = False
    assert (ring[kept] == before[kept]).all()


def right_fold(given: Arguments) -> Arguments:
    pool = given["recurrent_state"]
    counts = _rows(given["num_accepted"])
    for slots, rows in zip(given["row_ids"], given["ring_row_ids"], strict=True):
        pool = _folded(pool, _rows(slots), given["ring"], _rows(rows), counts)
    return {"recurrent_state": pool}


def right_conv1d(given: Arguments) -> Arguments:
    six = (given[name] for name in ("qkv", "conv_weight", "conv_state", "slot_idx", "input_row_offsets"))
    options = {name: given[name] for name in ("bias", "activation", "write_state")}
    return dict(zip(("out", "conv_state"), oracle.gated_delta_conv1d_fwd(*six, **options), strict=True))


def right_commit(given: Arguments) -> Arguments:
    """A sequence that takes none of its tokens is not live: another may have its slot."""
    counts = _rows(given["num_accepted"])
    slots = [slot if count else PAD_SLOT for slot, count in zip(_rows(given["slot_idx"]), counts, strict=True)]
    return {"conv_state": oracle.gated_delta_conv1d_commit(**{**given, "slot_idx": np.array(slots, np.uint32)})}


def right_gates(given: Arguments) -> Arguments:
    options = {"allow_neg_eigval": bool(given["allow_neg_eigval"])}
    gates = oracle.gated_delta_gates(*(given[name] for name in ("a", "b", "A_log", "dt_bias")), **options)
    return {"out": gates}


RIGHT: dict[str, Callable[[Arguments], Arguments]] = {
    "gated_delta_recurrence_fwd": right_fwd,
    "gated_delta_recurrence_verify_ring": right_verify,
    "gated_delta_state_fold": right_fold,
    "gated_delta_conv1d_fwd": right_conv1d,
    "gated_delta_conv1d_commit": right_commit,
    "gated_delta_gates": right_gates,
}


# ---- Running a call ----


def arrays_in(value: Any) -> Iterator[Array]:
    """The NumPy arrays that an argument is, or holds."""
    if isinstance(value, ByDlpack):
        yield value.array
    elif isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, (tuple, list)):
        for entry in value:
            yield from arrays_in(entry)


def memory_of(arguments: Arguments) -> list[bytes]:
    """Every byte that the call could reach through an argument."""
    memory = []
    for value in arguments.values():
        for array in arrays_in(value):
            while isinstance(array.base, np.ndarray):
                array = array.base
            memory.append(array.tobytes())
    return memory


def refusal(call: Callable[[], Any]) -> tuple[type[gdn.GdnError], str] | None:
    """How gdn refuses to do this, or None. Any other exception is the test's, and so is a hang."""
    faulthandler.dump_traceback_later(SECONDS_OF_A_HANG, exit=True)
    try:
        call()
    except gdn.GdnError as error:
        return type(error), str(error)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return None


def run_and_judge(op: Callable[..., Any], arguments: Arguments, backend: str) -> bool:
    """Run a call; says whether it was taken. All that the module's head promises is asserted."""
    name = op.__name__
    before = memory_of(arguments)
    refused: dict[str, Any] = {}
    for how, call in {"check_indices": ops.check_indices, "bind": ops.bind, "warmup": ops.warmup}.items():
        refused[how] = refusal(partial(call, op, **arguments))
        assert memory_of(arguments) == before, how
    given = {key: plain(value) for key, value in arguments.items()}
    result: list[Any] = []
    with on_backend(backend):
        refused["op"] = refusal(lambda: result.append(op(**arguments)))
    if op is not ops.gated_delta_gates:  # which has no index arrays to check
        assert refused["check_indices"] == refused["op"]
    if refused["op"] is not None:
        assert memory_of(arguments) == before
        assert refused["bind"] in (None, refused["op"])
        assert refused["warmup"] == refused["bind"]
        return False
    assert refused["bind"] is refused["warmup"] is None
    judge(name, arguments, given, result[0])
    restore(name, arguments, given)
    assert memory_of(arguments) == before, "memory beside the arrays, or of an array that is only read"
    if name in SHAPES:
        taken = inspect.signature(SHAPES[name]).parameters
        shape = SHAPES[name](**{key: value for key, value in given.items() if key in taken})
        assert shape == (result[0][0] if isinstance(result[0], tuple) else result[0]).shape
    return True


def judge(name: str, arguments: Arguments, given: Arguments, result: Any) -> None:
    """Everything written is what the oracle says."""
    right = RIGHT[name](given)
    found = {key: arguments[key] for key in WRITTEN[name]}
    if "out" in found:
        found["out"] = result
    if "records" in right:
        records_lead_on(plain(found.pop("ring")), given["ring"], right["records"])
    for key, value in found.items():
        pairs = zip(value, right[key], strict=True) if isinstance(value, tuple) else [(value, right[key])]
        for actual, expected in pairs:
            if expected.size:
                actual = plain(actual)
                assert_passed(close(actual, expected, storage_tolerance(actual.dtype.name), key))


def restore(name: str, arguments: Arguments, given: Arguments) -> None:
    """Put back what the call found in what it writes."""
    for key in WRITTEN[name]:
        for array, values in zip(arrays_in(arguments[key]), arrays_in(given[key]), strict=True):
            if array.flags.writeable:
                array[...] = values


def arguments_of(call: Any) -> Arguments:
    """All arguments of a call by name, those left out included."""
    bound = inspect.signature(call.op).bind(*call.six, **call.keywords)
    bound.apply_defaults()
    return dict(bound.arguments)


# Half of the profile's examples for each op and backend.
FUZZ = hypothesis.settings(
    max_examples=hypothesis.settings().max_examples // 2, suppress_health_check=list(hypothesis.HealthCheck)
)


@FUZZ
@hypothesis.given(data=st.data())
def test_a_right_result_or_a_refusal(new_op_call: Callable[..., Any], cpu_backend: str, data: st.DataObject) -> None:
    types = FLOATS if cpu_backend == "numpy" else ()  # each combination of them is compiled for the host
    call = new_op_call(data.draw(st.sampled_from(FLOATS if types else ("float32",)), label="type of the call"))
    arguments = arguments_of(call)
    drawn = st.lists(mutations(list(arguments), types), min_size=1, max_size=2, unique_by=lambda one: one.argument)
    changed = {change.argument: change.apply(arguments) for change in data.draw(drawn, label="mutations")}
    arguments.update(changed)
    was_taken = run_and_judge(call.op, arguments, cpu_backend)
    hypothesis.event("taken" if was_taken else "refused")


def test_calls_as_they_are_made_are_taken(new_op_call: Callable[..., Any], cpu_backend: str) -> None:
    """Without which nothing above would say much."""
    call = new_op_call("float32")
    assert run_and_judge(call.op, arguments_of(call), cpu_backend)


# ---- What runs no kernel of its own ----


def taken_or_refused(call: Callable[[], Any], arguments: Arguments) -> Any:
    """What a call returns, or None for a refusal; neither writes."""
    before, result = memory_of(arguments), []
    was_refused = refusal(lambda: result.append(call()))
    assert memory_of(arguments) == before
    return None if was_refused else result[0]


@FUZZ
@hypothesis.given(data=st.data())
def test_shapes_alone(new_op_call: Callable[..., Any], data: st.DataObject) -> None:
    call = new_op_call("float32")
    shape_of = SHAPES.get(call.op.__name__)
    if shape_of is None:
        pytest.skip("it returns no array")
    names = inspect.signature(shape_of).parameters
    arguments = {name: value for name, value in arguments_of(call).items() if name in names}
    mutation = data.draw(mutations(list(arguments), FLOATS))
    arguments[mutation.argument] = mutation.apply(arguments)
    shape = taken_or_refused(lambda: shape_of(**arguments), arguments)
    assert shape is None or (len(shape) == 2 and all(type(length) is int for length in shape))


SIZES = st.one_of(st.integers(-1, 300), st.integers(), st.sampled_from(NO_ARRAYS), st.just(np.int64(8)))


@hypothesis.given(key_head_dim=SIZES, value_head_dim=SIZES, group_size=SIZES)
@hypothesis.example(key_head_dim=np.int64(8), value_head_dim=np.int64(8), group_size=2**63)
def test_elements_of_a_record(key_head_dim: Any, value_head_dim: Any, group_size: Any) -> None:
    sizes = {"key_head_dim": key_head_dim, "value_head_dim": value_head_dim, "group_size": group_size}
    elements = taken_or_refused(lambda: ops.gated_delta_ring_record_elements(**sizes), {})
    assert elements is None or elements == int(key_head_dim) + int(group_size) * (int(value_head_dim) + 1)


@pytest.mark.parametrize("function", [ops.bind, ops.warmup, ops.check_indices], ids=lambda function: function.__name__)
def test_ops_that_are_none(function: Callable[..., Any]) -> None:
    for value in (*NO_ARRAYS, np.zeros(3), [ops.gated_delta_gates]):
        with pytest.raises(gdn.GdnError, match=r"^op: expected one "):
            function(value)


def tables_of(windows: PendingWindows) -> Arguments:
    return {name: value for name, value in vars(windows).items() if isinstance(value, np.ndarray)}


@FUZZ
@hypothesis.given(data=st.data())
def test_tables_of_pending_windows(cpu_backend: str, data: st.DataObject) -> None:
    """Every method with one argument made strange changes no table where it refuses."""
    made = {"ring_rows": np.arange(8, dtype=np.uint32).reshape(2, 2, 2), "ring_len": 3}
    pool = np.zeros((4, 1, 8, 8), np.float32)
    row_ids, ring = np.arange(4, dtype=np.uint32).reshape(2, 2), np.zeros((8, 1, 3, 17), np.float32)
    given: dict[str, Arguments] = {
        "begin": {"input_row_offsets": np.array([0, 2, 3], np.uint32), "slot_idx": np.array([0, 1], np.uint32)},
        "accept": {"num_accepted": np.array([1, 0], np.uint32)},
        "fold": {"recurrent_state": pool, "row_ids": row_ids, "ring": ring},
        "reset": {"is_new": np.array([True, False])},
    }
    name = data.draw(st.sampled_from(("made", *given)), label="method")
    arguments = made if name == "made" else given[name]
    mutation = data.draw(mutations(list(arguments), ()))
    changed = {**arguments, mutation.argument: mutation.apply(arguments)}
    with on_backend(cpu_backend):
        if name == "made":
            taken_or_refused(lambda: PendingWindows(**changed), changed)
            return
        windows = PendingWindows(**made)
        windows.begin(given["begin"]["input_row_offsets"])
        tables = memory_of(tables_of(windows))
        before = memory_of(changed)
        if refusal(lambda: getattr(windows, name)(**changed)) is not None:
            assert memory_of(tables_of(windows)) == tables
        assert memory_of(changed) == before  # nothing is pending, so that a fold changes no state either


# ---- What it finds ----


def _off_by_little(inputs: Any, out: Any, pending: Any) -> None:
    out.array[...] *= np.float32(1.001)


def _an_input_is_written(inputs: Any, out: Any, pending: Any) -> None:
    inputs.decay_per_token.array[0, 0] *= 2


def _memory_beside_is_written(inputs: Any, out: Any, pending: Any) -> None:
    out.array.base[..., 0] += 1


def _another_exception(inputs: Any, out: Any, pending: Any) -> None:
    raise KeyError("slot")


def _refused_too_late(inputs: Any, out: Any, pending: Any) -> None:
    raise gdn.errors.IndexValueError("slot_idx[0]: expected another")


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (_off_by_little, AssertionError),
        (_an_input_is_written, AssertionError),
        (_memory_beside_is_written, AssertionError),
        (_another_exception, KeyError),
        (_refused_too_late, AssertionError),
    ],
)
def test_a_fault_behind_the_call(
    monkeypatch: pytest.MonkeyPatch, new_call: type[Any], fault: Callable[..., None], found: type[Exception]
) -> None:
    right = numpy_backend.gated_delta_recurrence_fwd
    call = new_call()
    arguments = arguments_of(call)
    arguments["out"] = _every_other(arguments["out"])
    assert run_and_judge(call.op, arguments, "numpy")

    def wrong(*given: Any) -> None:
        right(*given)
        fault(*given)

    monkeypatch.setattr(numpy_backend, "gated_delta_recurrence_fwd", wrong)
    with pytest.raises(found):
        run_and_judge(call.op, arguments, "numpy")
