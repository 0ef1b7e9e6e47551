"""`gated_delta_gates` on every backend: against the oracle, through every layout and type, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import gdn
from gdn import ops, oracle
from gdn.arrays import DTYPES
from gdn.backends import gated_delta_gates as gates_kernel
from gdn.backends import host
from gdn.testing import assert_passed, bitwise, close, same_bytes, storage_tolerance
from gdn.testing.buffers import LAYOUTS, Array, lay_out
from gdn.testing.compare import Comparison
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device

FLOATS = ("float32", "float16", "bfloat16")
ARGUMENTS = ("a", "b", "A_log", "dt_bias")


def projections(
    num_tokens: int = 70, num_heads: int = 24, dtype: str = "float32", of_heads: str = "float32"
) -> list[Array]:
    """As models have them, and ends at which an exponential overflows or vanishes."""
    random = np.random.default_rng(num_tokens)
    a, b = random.normal(0, 3, (2, num_tokens, num_heads)).astype(DTYPES[dtype])
    if num_tokens:
        a[0, :8] = b[0, :8] = np.array([-1e4, -100, -20, 0, 19.9, 20.1, 100, 1e4], DTYPES[dtype])
    rate = np.log(random.uniform(1, 16, num_heads)).astype(DTYPES[of_heads])
    rate[6:7] = -10  # so that softplus(100) can be told from infinity
    return [a, b, rate, random.normal(-2, 2, num_heads).astype(DTYPES[of_heads])]


def run(backend: str, arrays: list[Array], **keywords: Any) -> tuple[Array, Array]:
    device = Device(backend)
    with on_backend(backend):
        decay, beta = ops.gated_delta_gates(*map(device.put, arrays), **keywords)
    return device.get(decay), device.get(beta)


def against_oracle(gates: tuple[Array, Array], arrays: list[Array], **keywords: Any) -> list[Comparison]:
    references = oracle.gated_delta_gates(*arrays, **keywords)
    named = zip(gates, references, ("decay", "beta"), strict=True)
    return [close(gate, reference, storage_tolerance("float32"), name) for gate, reference, name in named]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gates_are_those_of_the_oracle(backend: str, dtype: str, allow_neg_eigval: bool) -> None:
    for of_heads in FLOATS if backend != "host" else (dtype,):
        arrays = projections(dtype=dtype, of_heads=of_heads)
        gates = run(backend, arrays, allow_neg_eigval=allow_neg_eigval)
        assert [gate.dtype for gate in gates] == [np.float32] * 2
        assert_passed(*against_oracle(gates, arrays, allow_neg_eigval=allow_neg_eigval))
        assert gates[0].min() >= 0
        assert gates[0].max() <= 1
        assert (gates[1].min(), gates[1].max()) == (0, 2 if allow_neg_eigval else 1)


def far_apart() -> list[Array]:
    """Rates that overflow beside softplus that vanishes, and all between: what a decay is made of has no limit."""
    log_rates = np.array([-100, -88, 0, 3, 60, 88, 90, 100], np.float32)
    steps = np.array([-1e4, -200, -110, -100, -90, -60, -20.5, -19.5, 0, 20, 100, 1e4], np.float32)
    return [*np.broadcast_to(steps[:, None], (2, 12, 8)).copy(), log_rates, np.zeros(8, np.float32)]


def test_a_rate_that_overflows_and_a_softplus_that_vanishes(backend: str) -> None:
    """Beside field cases 39, 40, 42: where a decay is made, 0 x infinity is a decay like others, mostly 1."""
    gates = run(backend, far_apart())
    assert np.isfinite(gates[0]).all()
    assert_passed(*against_oracle(gates, far_apart()))


def test_a_doubled_beta_is_exactly_twice_the_other(backend: str) -> None:
    arrays = projections()
    (decay, beta), (same, doubled) = run(backend, arrays), run(backend, arrays, allow_neg_eigval=True)
    assert_passed(bitwise(same, decay, "decay"), bitwise(doubled, 2 * beta, "beta"))


@pytest.mark.parametrize("shape", [(0, 4), (1, 1), (1, 32), (257, 3), (300, 16)])
def test_tokens_and_heads_of_any_number(backend: str, shape: tuple[int, int]) -> None:
    arrays = (
        projections(*shape)
        if shape[1] >= 8 or not shape[0]
        else [array[..., : shape[1]] for array in projections(shape[0])]
    )
    arrays = [np.ascontiguousarray(array) for array in arrays]
    gates = run(backend, arrays)
    assert [gate.shape for gate in gates] == [shape] * 2
    if shape[0]:
        assert_passed(*against_oracle(gates, arrays))


def test_layouts_change_nothing(backend: str) -> None:
    """Inputs and results of every stride; memory beside them keeps its bytes."""
    device, arrays = Device(backend), projections(20)
    dense = run(backend, arrays)
    for of_tokens, of_heads in product(LAYOUTS[2], LAYOUTS[1]):
        laid = [lay_out(array, of_tokens if array.ndim == 2 else of_heads, filler=7) for array in arrays]
        results = [lay_out(np.full(arrays[0].shape, np.nan, np.float32), of_tokens, filler=7) for _ in range(2)]
        if backend == "cuda":
            memories, views = zip(*(buffer.on_gpu() for buffer in (*laid, *results)), strict=True)
        else:
            memories, views = [buffer.memory for buffer in (*laid, *results)], [b.array for b in (*laid, *results)]
        before = [buffer.copy() for buffer in (*laid, *results)]
        with on_backend(backend):
            returned = ops.gated_delta_gates(*views[:4], out=tuple(views[4:]))
        for given, result in zip(views[4:], returned, strict=True):
            assert device.get(given).tobytes() == device.get(result).tobytes()
        for place, (memory, old) in enumerate(zip(memories, before, strict=True)):
            after = memory.get() if backend == "cuda" else memory
            if place >= 4:
                old.array[...] = dense[place - 4]
            assert_passed(same_bytes(after, old.memory, f"array {place} in {of_tokens}, {of_heads}"))


def test_non_finite_projections_stay_in_their_gate(backend: str) -> None:
    """Beside field case 51: before the recurrence a NaN or infinity of a projection is one gate's of one token."""
    arrays = projections()
    right = run(backend, arrays)
    arrays[0][3, 5] = np.nan
    arrays[1][4, 6] = np.inf
    decay, beta = run(backend, arrays)
    assert np.isnan(decay[3, 5])
    assert beta[4, 6] == 1
    decay[3, 5], beta[4, 6] = right[0][3, 5], right[1][4, 6]
    assert_passed(bitwise(decay, right[0], "decay"), bitwise(beta, right[1], "beta"))


def test_a_token_does_not_depend_on_the_others(backend: str) -> None:
    arrays = projections(40)
    whole = run(backend, arrays)
    for rows in (slice(0, 1), slice(7, 30)):
        part = run(backend, [arrays[0][rows].copy(), arrays[1][rows].copy(), *arrays[2:]])
        for of_part, of_whole in zip(part, whole, strict=True):
            assert_passed(bitwise(of_part, of_whole[rows], "rows alone"))


def test_a_bound_call_runs_on_what_its_arrays_hold(backend: str) -> None:
    device = Device(backend)
    first, second = projections(5), projections(5)
    second[0][...] = second[1][...] = 0.5
    arrays = [device.put(array) for array in first]
    with on_backend(backend):
        bound = ops.bind(ops.gated_delta_gates, *arrays, allow_neg_eigval=True)
        for values in (first, second):
            for array, value in zip(arrays, values, strict=True):
                array[...] = device.put(value)
            gates = tuple(device.get(gate) for gate in bound())
            assert_passed(*against_oracle(gates, values, allow_neg_eigval=True))


FAULTS = {
    "decay without its sign": ("expf(-negative_log_decay(", "expf(negative_log_decay("),
    "softplus linear too early": ("step > 20.0f", "step > 2.0f"),
    "softplus of an overflow": ("step > 20.0f ? step :", "step > 1e30f ? step :"),
    "softplus an exponential too early": ("step < -20.0f", "step < -2.0f"),
    "softplus never an exponential": ("step < -20.0f", "step < -1e30f"),
    "bias left out": ("to_float(dt_bias[head * dt_bias_stride])", "0.0f"),
    "rate of the first head": ("A_log[head * A_log_stride]", "A_log[0]"),
    "beta of a": (
        "to_float(b[token * b_token_stride + head * b_head_stride])",
        "to_float(a[token * a_token_stride + head])",
    ),
    "last block left out": (
        "if (place >= total_seq_len * num_value_heads) return;",
        "if (place >= total_seq_len * num_value_heads || place >= 1536) return;",  # in no case beyond the arrays
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_kernel_is_noticed(fault: str, edit: Callable[..., None]) -> None:
    edit("gated_delta_gates.cu", FAULTS[fault])
    arrays = projections()
    out = tuple(np.full(arrays[0].shape, np.nan, np.float32) for _ in range(2))
    gates = run("host", arrays, out=out)
    comparisons = [*against_oracle(gates, arrays), *against_oracle(run("host", far_apart()), far_apart())]
    assert not all(comparison.passed for comparison in comparisons)


def test_the_kernel_as_it_is_passes(edit: Callable[..., None]) -> None:
    edit("gated_delta_gates.cu", ("// MUTATES    decay, beta", "// an edit that changes nothing"))
    assert_passed(*against_oracle(run("host", projections()), projections()))


# ---- What is refused ----


def read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


REFUSED: list[tuple[str, Any, str]] = [
    ("a", np.zeros(24, np.float32), "expected shape [total_seq_len, num_value_heads]"),
    ("a", np.zeros((70, 24), np.float64), "expected float32, float16 or bfloat16"),
    ("a", np.zeros((70, 24, 1), np.float32), "expected shape [total_seq_len, num_value_heads]"),
    ("b", np.zeros((70, 23), np.float32), "expected shape [total_seq_len, num_value_heads] = (70, 24)"),
    ("b", np.zeros((70, 1), np.float32), "expected shape [total_seq_len, num_value_heads] = (70, 24)"),
    ("b", np.zeros((1, 24), np.float32), "expected shape [total_seq_len, num_value_heads] = (70, 24)"),
    ("b", np.zeros((70, 24), np.float16), "expected float32, got float16"),
    ("A_log", np.zeros(23, np.float32), "expected shape [num_value_heads] = (24,)"),
    ("A_log", np.zeros((), np.float32), "expected shape [num_value_heads] = (24,)"),
    ("A_log", np.zeros((70, 24), np.float32), "expected shape [num_value_heads] = (24,)"),
    ("A_log", np.zeros(24, np.int32), "expected float32, float16 or bfloat16"),
    ("dt_bias", np.zeros((1, 24), np.float32), "expected shape [num_value_heads] = (24,)"),
    ("dt_bias", [0.0] * 24, "expected a NumPy or CuPy array"),
]


@pytest.mark.parametrize(
    ("argument", "value", "words"), REFUSED, ids=[f"{name}-{place}" for place, (name, *_) in enumerate(REFUSED)]
)
def test_wrong_inputs_are_refused_before_anything_is_written(
    cpu_backend: str, argument: str, value: Any, words: str
) -> None:
    """Beside field case 61: projections and rates that would broadcast are refused, as decay of a wrong shape is."""
    call = dict(zip(ARGUMENTS, projections(), strict=True)) | {argument: value}
    out = tuple(np.full((70, 24), 7, np.float32) for _ in range(2))
    with pytest.raises(gdn.GdnError) as refusal, on_backend(cpu_backend):
        ops.gated_delta_gates(**call, out=out)
    assert str(refusal.value).startswith(f"{argument}: {words}")
    assert (np.stack(out) == 7).all()


def test_wrong_results_are_refused_before_anything_is_written(cpu_backend: str) -> None:
    arrays, good = projections(), np.full((70, 24), 7, np.float32)
    both = np.full((70, 24), 7, np.float32)
    refused: list[tuple[Any, str]] = [
        (good, "out: expected two arrays, decay and beta"),
        ((good,), "out: expected two arrays, decay and beta"),
        ((good, None), "out: expected two arrays, decay and beta"),
        ((good[1:], good.copy()), "decay: expected shape"),
        ((good, good.astype(np.float16)), "beta: expected float32, got float16"),
        ((both, both), "decay: expected memory of its own, apart from beta"),
        ((good, arrays[1]), "beta: expected memory of its own, apart from b"),
        ((read_only(both.copy()), good), "decay: expected a writable array"),
        ((np.broadcast_to(np.float32(7), (70, 24)), good), "decay: expected"),
    ]
    before = arrays[1].copy()
    for out, words in refused:
        with pytest.raises(gdn.GdnError) as refusal, on_backend(cpu_backend):
            ops.gated_delta_gates(*arrays, out=out)
        assert str(refusal.value).startswith(words)
    assert (good == 7).all()
    np.testing.assert_array_equal(arrays[1], before)


def test_the_shape_alone() -> None:
    arrays = projections(7)
    assert ops.gated_delta_gates_shape(*arrays) == (7, 24)
    for place, words in enumerate(("b: expected shape", "b: expected shape", "A_log: ", "dt_bias: ")):
        wrong = [array[1:] if at == place else array for at, array in enumerate(arrays)]
        with pytest.raises(gdn.ShapeError, match=f"^{words}"):
            ops.gated_delta_gates_shape(*wrong)


def test_there_are_no_indices_to_check() -> None:
    with pytest.raises(gdn.GdnError, match="op: expected one that takes index arrays, got gated_delta_gates"):
        ops.check_indices(ops.gated_delta_gates, *projections())


@pytest.mark.skipif(host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}")
def test_the_order_of_threads_does_not_matter() -> None:
    plain = run("host", projections())
    with host.options(order_seed=3, max_os_threads=2):
        again = run("host", projections())
    assert_passed(*(bitwise(new, old, "gates") for new, old in zip(again, plain, strict=True)))


def test_gates_that_no_launch_can_hold() -> None:
    """A grid has 2^31 - 1 blocks of 256 threads, a thread for each gate."""
    most = 256 * (2**31 - 1)
    assert gates_kernel.num_blocks(SimpleNamespace(a=SimpleNamespace(size=most))) == 2**31 - 1
    with pytest.raises(gdn.ShapeError) as caught:
        gates_kernel.num_blocks(SimpleNamespace(a=SimpleNamespace(size=most + 1)))
    assert str(caught.value) == f"a: expected at most {most} gates in one launch, got {most + 1}"
