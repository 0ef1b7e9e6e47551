"""Where `gated_delta_recurrence_fwd` reads and writes: offsets past 32 bits, and nothing beside its arrays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import pytest

from gdn import ops, oracle
from gdn.geometry import HeadGeometry
from gdn.testing import assert_passed, bitwise, close, storage_tolerance
from gdn.testing.cases import RecurrenceCase, build_arrays
from gdn.testing.execute import Layouts, execute, on_backend

if TYPE_CHECKING:
    from tests.conftest import Call

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
