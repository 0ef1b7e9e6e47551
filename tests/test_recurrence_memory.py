"""Where `gated_delta_recurrence_fwd` reads and writes: offsets past 32 bits, and nothing beside its arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from gdn import ops, oracle
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.execute import Layouts, execute, on_backend
from gdn.testing.watched import run_watched

if TYPE_CHECKING:
    from tests.conftest import Call, VerifyCall

ONE_BEFORE_ONE_BEHIND = Layouts("unaligned", "unaligned", "unaligned", "every_other", "unaligned")
EDGE_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)


def zeros(backend: str, num_elements: int, dtype: Any) -> Any:
    """Memory that costs nothing on a CPU until it is written."""
    if backend == "cuda":
        import cupy

        return cupy.zeros(num_elements, dtype)
    try:
        return np.zeros(num_elements, dtype)
    except MemoryError:
        pytest.skip(f"the system lends no {num_elements * np.dtype(dtype).itemsize} bytes of address space")


def strided(memory: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """A view of the start of NumPy or CuPy memory; strides in elements."""
    byte_strides = tuple(stride * memory.dtype.itemsize for stride in strides)
    if isinstance(memory, np.ndarray):
        return np.lib.stride_tricks.as_strided(memory, shape, byte_strides)
    import cupy

    return cupy.lib.stride_tricks.as_strided(memory, shape, byte_strides)


def to_backend(backend: str, array: Any) -> Any:
    if backend != "cuda":
        return array
    import cupy

    return cupy.asarray(array)


def to_numpy(array: Any) -> Any:
    return array if isinstance(array, np.ndarray) else array.get()


@pytest.mark.parametrize(
    ("argument", "axis"),
    [
        *((argument, axis) for argument in ("qkv_conv_output", "decay_per_token", "out") for axis in (0, 1)),
        ("beta_per_token", 0),
        ("beta_per_token", 1),
        ("recurrent_state", 0),
        ("slot_idx", 0),
        ("input_row_offsets", 0),
    ],
)
def test_offsets_past_32_bits(new_call: type[Call], backend: str, argument: str, axis: int) -> None:
    """Field case 3: the last elements lie 2^32 elements behind the first (index arrays: 2^31); 32 bits alias them."""

    def new() -> Call:
        call = new_call(lengths=(2, 1), max_slots=3, work_dtype="bfloat16", state_dtype="bfloat16")
        call["slot_idx"][:] = [2, 1]
        for gate in ("decay_per_token", "beta_per_token"):
            call[gate] = call[gate].astype(ml_dtypes.bfloat16)
        return call

    plain, call = new(), new()
    values = call[argument]
    # 8 GiB of address space either way.
    distance = 2**32 if values.itemsize == 2 else 2**31
    strides = [1, 1, 1, 1][: values.ndim] if axis else [stride // values.itemsize for stride in values.strides]
    strides[axis] = distance // (values.shape[axis] - 1) + 64
    memory = zeros(backend, strides[axis] * (values.shape[axis] - 1) + values[0].size + 64, values.dtype)
    call.arguments = {name: to_backend(backend, array) for name, array in call.arguments.items()}
    call[argument] = strided(memory, values.shape, tuple(strides))
    call[argument][...] = to_backend(backend, values)
    call.run(backend)
    plain.run("numpy")
    for name in ("out", "recurrent_state"):
        tolerance = storage_tolerance("bfloat16")
        assert_passed(close(to_numpy(call[name]), plain[name], tolerance, name))
    if argument not in ("recurrent_state", "out"):
        np.testing.assert_array_equal(to_numpy(call[argument]), plain[argument])


def test_slots_past_2_to_31_elements(backend: str) -> None:
    """Field case 1: nv=32, 128x128, a bfloat16 pool of 4,104 slots: slots 4095, 4096 and 4103."""
    heads, slots = HeadGeometry(16, 32, 128, 128), np.array([4095, 4096, 4103], np.uint32)
    small = build_arrays(
        RecurrenceCase("far", heads, (1, 2, 1), work_dtype="bfloat16", state_dtype="bfloat16", spare_slots=0)
    )
    reference_out, reference_pool = oracle.gated_delta_recurrence_fwd(*small.as_tuple())
    pool = zeros(backend, 4104 * heads.slot_state_elements, small.recurrent_state.dtype).reshape(4104, 32, 128, 128)
    for slot, small_slot in zip(slots, small.slot_idx, strict=True):
        pool[int(slot)] = to_backend(backend, small.recurrent_state[small_slot])
    six = [to_backend(backend, array) for array in small.as_tuple()]
    six[3], six[4] = pool, to_backend(backend, slots)
    with on_backend(backend):
        out = to_numpy(ops.gated_delta_recurrence_fwd(*six))
    tolerance = storage_tolerance("bfloat16")
    assert_passed(close(out, reference_out, tolerance, "readout"))
    for slot, small_slot in zip(slots, small.slot_idx, strict=True):
        assert_passed(close(to_numpy(pool[int(slot)]), reference_pool[small_slot], tolerance, f"slot {slot}"))
        pool[int(slot)] = 0
    if backend == "cuda":
        assert not bool(pool.view("uint16").any())
    else:  # where a 32-bit offset would have landed, and the neighbours
        for slot in (*range(9), *range(4088, 4104)):
            assert not pool[slot].view(np.uint16).any()


def far_apart(backend: str, values: Any) -> Any:
    """The same values with more than 2^32 elements from the first row to the last, every row on 128 bytes or more."""
    stride = -(-(2**32) // (len(values) - 1) // 64) * 64
    memory = zeros(backend, stride * (len(values) - 1) + values[0].size, values.dtype)
    view = strided(memory, values.shape, (stride, *(step // values.itemsize for step in values.strides[1:])))
    view[...] = to_backend(backend, values)
    return view


def assert_same_far_apart(backend: str, make: Callable[[], Call], argument: str) -> None:
    """A call has the same results, to the bit, where the rows of one of its arrays lie far apart."""
    near, far, before = make(), make(), make()
    for call in (near, far):
        call.arguments = {
            name: to_backend(backend, value) if isinstance(value, np.ndarray) else value
            for name, value in call.arguments.items()
        }
    far[argument] = far_apart(backend, before[argument])
    for call in (near, far):
        call.run(backend)
    changed = []
    for name, value in before.arguments.items():
        if isinstance(value, np.ndarray):
            assert_passed(bitwise(to_numpy(far[name]), to_numpy(near[name]), name))
            changed += [name] if (to_numpy(near[name]) != value).any() else []
    assert changed != []


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        *(("verify", "recurrent_state"), ("verify-pending", "recurrent_state"), ("fold", "recurrent_state")),
        *(("conv1d", "conv_state"), ("conv1d-commit", "conv_state")),
    ],
)
def test_slots_of_every_op_past_32_bits(
    op_calls: dict[str, Callable[[str], Call]], backend: str, op: str, argument: str
) -> None:
    """Beside field cases 1, 2: slots 2^32 elements behind the first, in the ops that find them by themselves."""

    def make() -> Call:
        call = op_calls[op]("float32")
        last = len(call[argument]) - 1
        if op == "fold":
            call["row_ids"][...] = [[last, 1], [last - 1, 0]]
        else:
            call["slot_idx"][...] = [last, 1]
        return call

    assert_same_far_apart(backend, make, argument)


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        *(("verify", name) for name in ("qkv_conv_output", "out")),
        *(("conv1d", name) for name in ("qkv", "out")),
        *(("conv1d-commit", "qkv"), ("fold", "row_ids")),
        *(("gates", name) for name in ("a", "b", "decay", "beta")),
    ],
)
def test_tokens_of_every_op_past_32_bits(
    op_calls: dict[str, Callable[[str], Call]], backend: str, op: str, argument: str
) -> None:
    """Beside field case 3: in the other ops the last tokens, or layers of a table, 2^32 elements behind the first."""
    assert_same_far_apart(backend, lambda: op_calls[op]("float32"), argument)


@pytest.mark.parametrize("argument", ["qkv_conv_output", "decay_per_token", "beta_per_token", "recurrent_state", "out"])
def test_chunks_past_32_bits(new_call: type[Call], backend: str, argument: str) -> None:
    """Beside field cases 1, 3: by chunks, whose kernels find tokens and slots by a plan and not by the tables."""

    def make() -> Call:
        call = new_call((1, 2, 32, 32), (65, 0, 3, 65), max_slots=6)  # the last token is a chunk
        call["algorithm"], call["slot_idx"] = "chunked", np.array([5, 2, 1, 4], np.uint32)
        return call

    assert_same_far_apart(backend, make, argument)


@pytest.mark.gpu
def test_a_batch_of_2050_sequences() -> None:
    """Field case 3: conv_dim 8192, T = 262,400 in 2,050 sequences; the last ones equal those sequences alone."""
    import cupy

    heads, length, batch_size = HeadGeometry(16, 32, 128, 128), 128, 2050
    total = length * batch_size
    block = np.random.default_rng(0).standard_normal((50 * length, heads.conv_dim), np.float32)
    qkv = cupy.empty((total, heads.conv_dim), cupy.float32)
    for part, rows in enumerate(np.split(np.arange(total), total // len(block))):
        qkv[rows[0] : rows[-1] + 1] = cupy.asarray(block * np.float32(1 + part / 41))
    decay, beta = (cupy.asarray(np.random.default_rng(seed).random((total, 32), np.float32)) for seed in (1, 2))
    pool = cupy.zeros((batch_size, 32, 128, 128), cupy.float32)
    offsets = cupy.arange(0, total + 1, length, dtype=cupy.uint32)
    last = slice(total - 3 * length, total)
    alone_pool = pool[-3:].copy()
    alone = ops.gated_delta_recurrence_fwd(
        qkv[last], decay[last], beta[last], alone_pool, cupy.arange(3, dtype=cupy.uint32), offsets[:4]
    )
    out = ops.gated_delta_recurrence_fwd(qkv, decay, beta, pool, cupy.arange(batch_size, dtype=cupy.uint32), offsets)
    assert_passed(
        bitwise(out[last].get(), alone.get(), "readout of the last sequences"),
        bitwise(pool[-3:].get(), alone_pool.get(), "their states"),
    )


# ---- Nothing beside the arrays ----


@pytest.mark.parametrize("length", EDGE_LENGTHS)
def test_canaries_around_exact_size_arrays(backend: str, length: int) -> None:
    """Field cases 60, 69: lengths around the sizes of warps, stages and chunks; canaries stay and never matter."""
    case = RecurrenceCase("edge", HeadGeometry(1, 2, 16, 8), (length,))
    arrays = build_arrays(case)
    reference_out, reference_pool = oracle.gated_delta_recurrence_fwd(*arrays.as_tuple())
    slot, tolerance = arrays.slot_idx, storage_tolerance("float32")
    for layouts in (Layouts(), Layouts("slice", "slice", "gaps", "every_other", "slice"), ONE_BEFORE_ONE_BEHIND):
        outcome = execute(backend, arrays, "float32", layouts)
        assert_passed(
            *(kept for kept in outcome.kept if kept.measure != "empty"),
            close(outcome.out, reference_out, tolerance, "readout"),
            close(outcome.recurrent_state[slot], reference_pool[slot], tolerance, "state"),
        )


@pytest.mark.parametrize("filler", [7, np.nan], ids=["sevens", "nan"])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 9])
def test_canaries_around_windows_and_records(
    new_verify: type[VerifyCall], backend: str, length: int, filler: float
) -> None:
    """Beside field cases 60, 69: windows around the end of a ring of 4, between windows of one token.

    Pool and ring have no row to spare; what lies around them, and records of nobody, stays and never matters.
    """

    def new() -> VerifyCall:
        call = new_verify(lengths=(1, length, 1), max_slots=3, record_padding=0)
        call["ring"][...], call["out"][...] = filler, np.nan
        return call

    call, plain = new(), new()
    layouts = {"qkv_conv_output": "slice", "recurrent_state": "gaps", "slot_idx": "every_other", "out": "slice"}
    written, kept = run_watched(backend, call.op, call.arguments, ("recurrent_state", "ring", "out"), layouts)
    is_recorded = np.arange(4) < np.array([1, length if length <= 4 else 0, 1])[:, None]
    of_nobody = written["ring"].swapaxes(1, 2)[~is_recorded]
    assert_passed(*kept, same_bytes(of_nobody, np.full_like(of_nobody, filler), "records of nobody"))

    fold = {
        **{name: written[name] for name in ("recurrent_state", "ring")},
        "row_ids": call["slot_idx"][None],
        "ring_row_ids": call["ring_slot_idx"][None],
        "num_accepted": np.array([1, length, 1], np.uint32),
    }
    folded, kept = run_watched(backend, ops.gated_delta_state_fold, fold, ("recurrent_state",), layouts)
    ops.gated_delta_recurrence_fwd(*plain.six[:6], out=plain["out"])
    tolerance = storage_tolerance("float32")
    assert_passed(
        *kept,
        close(written["out"], plain["out"], tolerance, "readout"),
        close(folded["recurrent_state"], plain["recurrent_state"], tolerance, "state"),
    )
