"""Element types, ranks and shapes of every argument: what is refused, how it is said, and that nothing changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from gdn import ops
from gdn.arrays import DTYPES
from gdn.errors import DTypeError, LayoutError, ShapeError

if TYPE_CHECKING:
    from tests.conftest import Call

FLOAT_ARGUMENTS = ("qkv_conv_output", "decay_per_token", "beta_per_token", "recurrent_state", "out")
INDEX_ARGUMENTS = ("slot_idx", "input_row_offsets")
ARGUMENTS = (*FLOAT_ARGUMENTS[:4], *INDEX_ARGUMENTS, "out")


def test_the_call_that_the_others_break_is_accepted(call: Call, cpu_backend: str) -> None:
    pool = call["recurrent_state"].copy()
    assert call.run(cpu_backend) is call["out"]
    assert (call["out"] != 7).all()
    assert call.shape() == call["out"].shape
    np.testing.assert_array_equal(call["recurrent_state"][2:], pool[2:])
    assert (call["recurrent_state"][:2] != pool[:2]).any(axis=(1, 2, 3)).all()


# ---- Element types ----


@pytest.mark.parametrize("dtype", ["float64", ">f4", "complex64", "int64", "int32", "uint16", "bool", "object"])
@pytest.mark.parametrize("argument", FLOAT_ARGUMENTS)
def test_wrong_float_types(call: Call, cpu_backend: str, argument: str, dtype: str) -> None:
    expected = "float32, float16 or bfloat16" if argument in FLOAT_ARGUMENTS[::3] else "float32"
    call[argument] = call[argument].astype(dtype)
    assert call.refusal(DTypeError, cpu_backend) == f"{argument}: expected {expected}, got {dtype}"
    if argument != "out":
        assert call.shape_refusal(DTypeError) == f"{argument}: expected {expected}, got {dtype}"


@pytest.mark.parametrize("dtype", ["int64", "uint64", "int16", "uint8", "float32", "float64", ">u4", ">i4", "bool"])
@pytest.mark.parametrize("argument", INDEX_ARGUMENTS)
def test_wrong_index_types_name_the_cast(call: Call, cpu_backend: str, argument: str, dtype: str) -> None:
    call[argument] = call[argument].astype(dtype)
    expected = f"uint32 or int32, got {dtype} (cast it: {argument}.astype('uint32'))"
    assert call.refusal(DTypeError, cpu_backend) == f"{argument}: expected {expected}"
    assert call.shape_refusal(DTypeError) == f"{argument}: expected {expected}"


@pytest.mark.parametrize("work_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("gate_dtype", ["float32", "bfloat16", "float16", "float64"])
def test_gates_are_float32_or_of_the_work_type(
    new_call: type[Call], cpu_backend: str, work_dtype: str, gate_dtype: str
) -> None:
    """Field case 52: decay as bfloat16 and float16 is taken where the work type is the same; float64 never."""
    call = new_call(work_dtype=work_dtype)
    for gate in ("decay_per_token", "beta_per_token"):
        call[gate] = call[gate].astype(DTYPES.get(gate_dtype, np.dtype(np.float64)))
    if gate_dtype in ("float32", work_dtype):
        decay, beta = call["decay_per_token"].astype(np.float32), call["beta_per_token"].astype(np.float32)
        widened = new_call(work_dtype=work_dtype)
        widened["decay_per_token"], widened["beta_per_token"] = decay, beta
        np.testing.assert_array_equal(call.run(cpu_backend), widened.run(cpu_backend))
    else:
        accepted = "float32" if work_dtype == "float32" else f"float32 or {work_dtype}"
        message = f"decay_per_token: expected {accepted}, got {gate_dtype}"
        assert call.refusal(DTypeError, cpu_backend) == message


def test_decay_and_beta_are_of_one_type(new_call: type[Call], cpu_backend: str) -> None:
    call = new_call(work_dtype="bfloat16")
    call["beta_per_token"] = call["beta_per_token"].astype(ml_dtypes.bfloat16)
    assert call.refusal(DTypeError, cpu_backend) == "beta_per_token: expected float32, got bfloat16"


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16", "float16"])
def test_readout_is_float32_or_of_the_work_type(
    new_call: type[Call], cpu_backend: str, work_dtype: str, out_dtype: str
) -> None:
    call = new_call(work_dtype=work_dtype)
    call["out"] = call["out"].astype(DTYPES[out_dtype])
    if out_dtype in ("float32", work_dtype):
        assert call.run(cpu_backend).dtype == DTYPES[out_dtype]
    else:
        accepted = "float32" if work_dtype == "float32" else f"{work_dtype} or float32"
        assert call.refusal(DTypeError, cpu_backend) == f"out: expected {accepted}, got {out_dtype}"


@pytest.mark.parametrize("work_dtype", ["float32", "bfloat16", "float16"])
def test_readout_is_made_in_the_work_type(new_call: type[Call], cpu_backend: str, work_dtype: str) -> None:
    call = new_call(work_dtype=work_dtype)
    given = call.run(cpu_backend)
    again = new_call(work_dtype=work_dtype)
    again["out"] = None
    made = again.run(cpu_backend)
    assert made.dtype == DTYPES[work_dtype]
    np.testing.assert_array_equal(made, given)


# ---- Things that are no arrays ----


@pytest.mark.parametrize(
    "value", [[[1.0, 2.0]], ((1.0,),), "float32", 1.0, {"shape": 2}, np.float32(1), SimpleNamespace(shape=(2,))]
)
@pytest.mark.parametrize("argument", ARGUMENTS)
def test_things_that_are_no_arrays(call: Call, cpu_backend: str, argument: str, value: Any) -> None:
    call[argument] = value
    message = call.refusal(DTypeError, cpu_backend)
    kind = {np.float32: "numpy.float32", SimpleNamespace: "types.SimpleNamespace"}
    got = kind.get(type(value), type(value).__name__)
    assert message == f"{argument}: expected a NumPy or CuPy array, or a GPU array by DLPack, got {got}"


@pytest.mark.parametrize("argument", ARGUMENTS[:-1])
def test_none_is_no_array(call: Call, cpu_backend: str, argument: str) -> None:
    call[argument] = None
    assert call.refusal(DTypeError, cpu_backend).startswith(f"{argument}: expected a NumPy or CuPy array")
    assert call.shape_refusal(DTypeError) == f"{argument}: expected something with a shape and a dtype, got NoneType"


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_masked_arrays_are_refused(call: Call, cpu_backend: str, argument: str) -> None:
    """A mask would be ignored silently, and differently on every backend."""
    call[argument] = np.ma.masked_array(call[argument], mask=np.zeros(call[argument].shape, bool))
    message = call.refusal(DTypeError, cpu_backend)
    assert message.startswith(f"{argument}: expected ")
    assert "MaskedArray" in message


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_other_subclasses_are_read_as_plain_arrays(
    new_call: type[Call], cpu_backend: str, argument: str, tmp_path: Any
) -> None:
    """A memory map is an array like another; a matrix, whose operators mean other things, must not compute."""
    plain = new_call()
    plain.run(cpu_backend)
    call = new_call()
    mapped = np.memmap(tmp_path / "array", call[argument].dtype, "w+", shape=call[argument].shape)
    mapped[...] = call[argument]
    call[argument] = mapped
    call.run(cpu_backend)
    np.testing.assert_array_equal(call["out"], plain["out"])
    np.testing.assert_array_equal(call["recurrent_state"], plain["recurrent_state"])


@pytest.mark.parametrize("argument", ["qkv_conv_output", "decay_per_token", "beta_per_token", "out"])
def test_matrices_are_read_as_plain_arrays(new_call: type[Call], cpu_backend: str, argument: str) -> None:
    plain = new_call()
    plain.run(cpu_backend)
    call = new_call()
    call[argument] = call[argument].view(np.matrix)
    call.run(cpu_backend)
    np.testing.assert_array_equal(np.asarray(call["out"]), plain["out"])
    np.testing.assert_array_equal(call["recurrent_state"], plain["recurrent_state"])


# ---- Ranks and shapes ----

AXES = {
    "qkv_conv_output": "[total_seq_len, conv_dim]",
    "recurrent_state": "[max_slots, num_value_heads, key_head_dim, value_head_dim]",
    "slot_idx": "[batch_size]",
    "input_row_offsets": "[batch_size + 1]",
}


@pytest.mark.parametrize("change", ["one more", "one less"])
@pytest.mark.parametrize("argument", AXES)
def test_wrong_number_of_axes(call: Call, cpu_backend: str, argument: str, change: str) -> None:
    call[argument] = call[argument][None].copy() if change == "one more" else call[argument][0, ...].copy()
    expected = f"{argument}: expected shape {AXES[argument]}, got shape {call[argument].shape}"
    assert call.refusal(ShapeError, cpu_backend) == expected
    assert call.shape_refusal(ShapeError) == expected


@pytest.mark.parametrize("shape", [(3, 1), (3, 2, 1), (2,), (6,), (), (2, 2), (4, 2), (3, 3), (2, 3)])
@pytest.mark.parametrize("gate", ["decay_per_token", "beta_per_token"])
def test_gates_have_one_shape(call: Call, cpu_backend: str, gate: str, shape: tuple[int, ...]) -> None:
    """Field case 61: [T, nk], [T, nv, 1], [nv], [T * nv] and a scalar are refused; [T, nv] alone is right."""
    call[gate] = np.full(shape, 0.5, np.float32)
    expected = f"{gate}: expected shape [total_seq_len, num_value_heads] = (3, 2), got shape {shape}"
    assert call.refusal(ShapeError, cpu_backend) == expected
    assert call.shape_refusal(ShapeError) == expected


@pytest.mark.parametrize("length", [0, 1, 2, 4])
def test_offsets_are_one_more_than_slots(call: Call, cpu_backend: str, length: int) -> None:
    call["input_row_offsets"] = np.zeros(length, np.uint32)
    expected = f"input_row_offsets: expected shape [batch_size + 1] = (3,), got shape ({length},)"
    assert call.refusal(ShapeError, cpu_backend) == expected
    assert call.shape_refusal(ShapeError) == expected


@pytest.mark.parametrize("shape", [(2, 16), (4, 16), (3, 15), (3, 17), (16, 3), (48,), (3, 16, 1), (3, 2, 8), (1, 16)])
def test_readout_has_one_shape(call: Call, cpu_backend: str, shape: tuple[int, ...]) -> None:
    call["out"] = np.zeros(shape, np.float32)
    message = f"out: expected shape [total_seq_len, value_dim] = (3, 16), got shape {shape}"
    assert call.refusal(ShapeError, cpu_backend) == message


# ---- Shapes alone ----


def shapes_of(call: Call, **changes: tuple[int, ...]) -> list[SimpleNamespace]:
    """The six arguments as shapes and types, without data or strides."""
    names = [name for name in call.arguments if name != "out"]
    return [SimpleNamespace(shape=changes.get(name, call[name].shape), dtype=call[name].dtype) for name in names]


def test_shapes_alone_are_enough_for_the_shape_function(call: Call) -> None:
    assert ops.gated_delta_recurrence_fwd_shape(*shapes_of(call)) == (3, 16)


@pytest.mark.parametrize("argument", ["qkv_conv_output", "decay_per_token", "recurrent_state", "slot_idx"])
def test_wrong_shapes_alone_are_refused(call: Call, argument: str) -> None:
    wrong = (*call[argument].shape, 1)
    with pytest.raises(ShapeError, match=rf"^{argument}: .*got shape \({wrong[0]}, "):
        ops.gated_delta_recurrence_fwd_shape(*shapes_of(call, **{argument: wrong}))


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "bfloat16", "float8_e4m3"])
def test_types_of_other_libraries_are_known_by_their_names(call: Call, dtype: str) -> None:
    class ForeignType:
        def __str__(self) -> str:
            return dtype

    six = shapes_of(call)
    six[0].dtype = ForeignType()
    if dtype.endswith("bfloat16"):
        assert ops.gated_delta_recurrence_fwd_shape(*six) == (3, 16)
    else:
        with pytest.raises(DTypeError, match=r"^qkv_conv_output: expected float32, .*, got float8_e4m3$"):
            ops.gated_delta_recurrence_fwd_shape(*six)


def test_strides_are_read_where_an_object_has_them(call: Call) -> None:
    """PyTorch counts strides in elements, by a method; the shape function refuses what the op would."""
    six = shapes_of(call)
    six[3].stride = lambda: (128, 64, 8, 1)
    assert ops.gated_delta_recurrence_fwd_shape(*six) == (3, 16)
    six[3].stride = lambda: (128, 64, 1, 8)
    with pytest.raises(LayoutError, match=r"^recurrent_state: .* dense row-major, got strides \(128, 64, 1, 8\)"):
        ops.gated_delta_recurrence_fwd_shape(*six)


MANY_ROWS = {"qkv_conv_output": (2**32, 32), "decay_per_token": (2**32, 2), "beta_per_token": (2**32, 2)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (MANY_ROWS, "qkv_conv_output: expected total_seq_len of at most 4294967295, got 4294967296"),
        (
            {"slot_idx": (2**32,), "input_row_offsets": (2**32 + 1,)},
            "slot_idx: expected batch_size of at most 4294967295, got 4294967296",
        ),
        (
            {"recurrent_state": (2**32, 2, 8, 8)},
            "recurrent_state: expected max_slots of at most 4294967295, got 4294967296",
        ),
        (
            {"slot_idx": (2**30,), "input_row_offsets": (2**30 + 1,)},
            "slot_idx: expected a batch of at most 2147483647 blocks in one launch, got 2147483649 for "
            "1073741824 sequences",
        ),
    ],
)
def test_counts_that_no_launch_can_hold(call: Call, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as caught:
        ops.gated_delta_recurrence_fwd_shape(*shapes_of(call, **changes))
    assert str(caught.value) == message


def test_counts_at_their_limits_are_taken(call: Call) -> None:
    rows = {name: (rows - 1, width) for name, (rows, width) in MANY_ROWS.items()}
    shapes = shapes_of(call, **rows, recurrent_state=(2**32 - 1, 2, 8, 8))
    assert ops.gated_delta_recurrence_fwd_shape(*shapes) == (2**32 - 1, 16)
    shapes = shapes_of(call, slot_idx=(2**30 - 1,), input_row_offsets=(2**30,))
    assert ops.gated_delta_recurrence_fwd_shape(*shapes) == (3, 16)
