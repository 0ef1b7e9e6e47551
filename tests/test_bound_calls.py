"""`gdn.ops.bind`: a bound call is the op on the same arrays, as often as it is called."""

from __future__ import annotations

import gc
import statistics
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.backends import host
from gdn.errors import DTypeError, GdnError, IndexValueError, LayoutError, ShapeError
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call, FoldCall, VerifyCall

OPS = ("fwd", "verify", "fold")
CHANGED = ("recurrent_state", "ring", "out")


@pytest.fixture
def make(new_call: type[Call], new_verify: type[VerifyCall], new_fold: type[FoldCall]) -> Callable[[str], Call]:
    """Makes a call of the op of a name, each time with the same values."""
    return lambda name: {"fwd": new_call, "verify": new_verify, "fold": new_fold}[name]()


def put(call: Call, backend: str) -> Call:
    """The call with its arrays where a backend wants them."""
    if backend == "cuda":
        import cupy

        call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
    return call


def bind(call: Call, backend: str = "numpy") -> Any:
    with on_backend(backend):
        return ops.bind(call.op, *call.six, **call.keywords)


def bits(call: Call) -> dict[str, bytes]:
    """What a call has made of the arrays that it may change."""
    return {name: call[name].tobytes() for name in CHANGED if name in call.arguments}


@pytest.mark.parametrize("name", OPS)
def test_each_run_is_one_call_of_the_op(make: Callable[[str], Call], backend: str, name: str) -> None:
    plain, bound = put(make(name), backend), put(make(name), backend)
    before = bits(bound)
    run = bind(bound, backend)
    assert bits(bound) == before
    for _ in range(3):
        assert plain.run(backend) is plain.arguments.get("out")
        assert run() is bound.arguments.get("out")
        assert bits(bound) == bits(plain) != before


@pytest.mark.parametrize("name", ["fwd", "verify"])
def test_a_readout_not_given_is_made_once(make: Callable[[str], Call], backend: str, name: str) -> None:
    call, plain = put(make(name), backend), put(make(name), backend)
    del call.arguments["out"]
    run = bind(call, backend)
    out = run()
    assert out.tobytes() == plain.run(backend).tobytes()
    assert run() is out
    assert out.tobytes() == plain.run(backend).tobytes()


def test_values_may_change_between_runs(make: Callable[[str], Call], backend: str) -> None:
    bound, plain = (put(make("fwd"), backend) for _ in range(2))
    run = bind(bound, backend)
    run()
    plain.run(backend)
    for call in (bound, plain):
        call["qkv_conv_output"][...] = call["qkv_conv_output"][::-1].copy()
        call["slot_idx"][...] = call["slot_idx"][::-1].copy() + 2
        call["input_row_offsets"][1] = 1
    run()
    plain.run(backend)
    assert bits(bound) == bits(plain)


@pytest.mark.parametrize("op", ["fwd-pending", "verify", "verify-pending", "fold", "conv1d", "conv1d-commit"])
def test_padding_moves_from_run_to_run(op_calls: dict[str, Callable[[str], Call]], backend: str, op: str) -> None:
    """Beside field case 11: each run of a bound call skips the rows that are padding then, as a replay does."""
    bound, plain = (put(op_calls[op]("float32"), backend) for _ in range(2))
    run = bind(bound, backend)
    slots = "row_ids" if op == "fold" else "slot_idx"
    right = bound[slots].copy()
    written = [name for name in bound.arguments if name in ("ring", "out") or name.endswith("_state")]
    for places in ([], [0], [1], [0, 1], []):
        for call in (bound, plain):
            call[slots][...] = right
            call[slots][..., places] = gdn.PAD_SLOT
            if "out" in call.arguments:
                call["out"][...] = 7
        before = [bound[name].tobytes() for name in written]
        run()
        plain.run(backend)
        after = [bound[name].tobytes() for name in written]
        assert after == [plain[name].tobytes() for name in written]
        if len(places) == 2:
            for name, old, new in zip(written, before, after, strict=True):
                assert old == new if name != "out" else not bound["out"].any()


@pytest.mark.parametrize("table", ["slot_idx", "input_row_offsets"])
def test_index_values_of_numpy_arrays_are_checked_at_each_run(call: Call, cpu_backend: str, table: str) -> None:
    run = bind(call, cpu_backend)
    run()
    before, right = bits(call), call[table].copy()
    call[table][-1] = 99
    with pytest.raises(IndexValueError, match=rf"^{table}\[\d\]: expected .*, got 99$"):
        run()
    assert bits(call) == before
    call[table][...] = right
    assert run() is call["out"]


@pytest.mark.parametrize(
    ("name", "argument", "change", "error_class"),
    [
        ("fwd", "out", lambda out: out[:, :-1], ShapeError),
        ("fwd", "slot_idx", lambda slots: slots.astype(np.int64), DTypeError),
        ("fwd", "recurrent_state", lambda state: state.transpose(0, 1, 3, 2), LayoutError),
        ("verify", "ring", lambda ring: ring[..., :-3], ShapeError),
        ("fold", "num_accepted", lambda counts: counts.astype(np.float32), DTypeError),
    ],
)
def test_what_the_op_refuses_is_refused_when_bound(
    make: Callable[[str], Call],
    cpu_backend: str,
    name: str,
    argument: str,
    change: Callable[[Any], Any],
    error_class: type[GdnError],
) -> None:
    call = make(name)
    call[argument] = change(call[argument])
    message = call.refusal(error_class, cpu_backend)
    before = bits(call)
    with pytest.raises(error_class) as caught:
        bind(call, cpu_backend)
    assert str(caught.value) == message
    assert bits(call) == before


def test_memory_that_may_not_be_written_is_refused_when_bound(call: Call, cpu_backend: str) -> None:
    call["out"].flags.writeable = False
    with pytest.raises(LayoutError, match=r"^out: expected a writable array"):
        bind(call, cpu_backend)
    call["out"] = call["recurrent_state"].reshape(-1, 16)[:3]
    with pytest.raises(LayoutError, match=r"^out: expected memory of its own, apart from recurrent_state"):
        bind(call, cpu_backend)


def test_other_functions_and_other_arguments_are_refused(call: Call) -> None:
    known = (
        "gated_delta_conv1d_commit, gated_delta_conv1d_fwd, gated_delta_gates, gated_delta_recurrence_fwd, "
        "gated_delta_recurrence_verify_ring, gated_delta_state_fold"
    )
    with pytest.raises(GdnError, match=rf"^op: expected one of {known}, got gated_delta_recurrence_fwd_shape$"):
        ops.bind(ops.gated_delta_recurrence_fwd_shape, *call.six)
    with pytest.raises(TypeError, match="input_row_offsets"):
        ops.bind(call.op, *call.six[:-1])
    with pytest.raises(TypeError, match="row_ids"):
        ops.bind(call.op, *call.six, row_ids=call["out"])


def test_the_backend_is_that_of_the_binding(make: Callable[[str], Call], monkeypatch: pytest.MonkeyPatch) -> None:
    if host.unavailable_reason() is not None:
        pytest.skip("no host backend")
    names: list[str] = []
    monkeypatch.setattr(host, "run", lambda launch: names.append(launch.variant.kernel.stem))
    on_host, on_numpy = bind(make("fwd"), "host"), bind(make("fwd"), "numpy")
    on_host()
    with gdn.use_backend("host"):
        on_numpy()
    assert names == ["gated_delta_recurrence_fwd"]


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_nothing_to_do(new_call: type[Call], backend: str, lengths: tuple[int, ...]) -> None:
    call = put(new_call(lengths=lengths), backend)
    before = bits(call)
    assert bind(call, backend)().shape == (0, 16)
    assert bits(call) == before


def test_arrays_live_as_long_as_the_bound_call(call: Call) -> None:
    run = bind(call)
    watched = [weakref.ref(array) for array in call.arguments.values()]
    call.arguments.clear()
    gc.collect()
    assert all(reference() is not None for reference in watched)
    assert run().shape == (3, 16)
    del run
    gc.collect()
    assert all(reference() is None for reference in watched)


# ---- On a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("is_bound", [True, False])
def test_calls_in_a_graph(make: Callable[[str], Call], name: str, is_bound: bool) -> None:
    """Field cases 11 and 84: a replay reads what the arrays hold then; a bound call needs no run before the capture."""
    import cupy

    captured, plain = (put(make(name), "cuda") for _ in range(2))
    if is_bound:
        run = bind(captured, "cuda")
    else:
        warm = put(make(name), "cuda")
        warm.run("cuda")
        run = captured.run
    before = bits(captured)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    assert bits(captured) == before
    table = "slot_idx" if name != "fold" else "row_ids"
    for replay in range(3):
        for call in (captured, plain):
            if replay == 2:
                call[table].ravel()[0] = gdn.PAD_SLOT
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        plain.run("cuda")
        cupy.cuda.Device().synchronize()
        assert bits(captured) == bits(plain) != before


@pytest.mark.gpu
def test_a_bound_call_in_another_thread(make: Callable[[str], Call]) -> None:
    bound, plain = (put(make("fwd"), "cuda") for _ in range(2))
    run = bind(bound, "cuda")
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            pool.submit(run).result(60)
            plain.run("cuda")
            assert bits(bound) == bits(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
def test_pythons_part_of_a_call(make: Callable[[str], Call], name: str) -> None:
    """Meant to take 15 us with `out` given and 9 us bound, which `gdn bench` measures; in the midst of a test run, with
    all its objects to collect, they get half as much again, and several tries."""
    import cupy

    call = put(make(name), "cuda")
    run = bind(call, "cuda")

    def median_us(enqueue: Callable[[], object]) -> float:
        samples = []
        for _ in range(25):
            cupy.cuda.Device().synchronize()
            start = time.perf_counter_ns()
            for _ in range(100):
                enqueue()
            samples.append(1e-3 * (time.perf_counter_ns() - start) / 100)
        return statistics.median(samples[5:])

    positional, keywords = call.six, call.keywords
    assert min(median_us(lambda: call.op(*positional, **keywords)) for _ in range(3)) <= 1.5 * 15
    assert min(median_us(run) for _ in range(3)) <= 1.5 * 9
