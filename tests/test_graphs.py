"""Warm-up and CUDA graphs: what may be captured, and what is refused in a capture before anything happens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import arrays, ops, plans
from gdn.backends import cuda, host
from gdn.backends.launch import Kernel, Variant
from gdn.errors import DeviceError, GdnError, ShapeError
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call

NewOpCall = Callable[..., "Call"]
VARIANT = Variant(Kernel("gated_delta_recurrence_fwd", ()), ())


def warm_up(call: Call, backend: str) -> None:
    with on_backend(backend):
        gdn.warmup(call.op, *call.six, **call.keywords)


def bits(call: Call) -> dict[str, bytes]:
    """The memory of all arrays of a call."""
    return {name: array.tobytes() for name, array in call.arguments.items()}


# ---- On a CPU ----


def test_a_warmup_writes_nothing_and_compiles_for_the_host(
    new_op_call: NewOpCall, cpu_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, load = [], host.load
    monkeypatch.setattr(host, "load", lambda variant: loaded.append(variant) or load(variant))
    monkeypatch.setattr(host, "run", lambda launch: pytest.fail("it ran"))
    call = new_op_call()
    before = bits(call)
    warm_up(call, cpu_backend)
    assert bits(call) == before
    assert len(loaded) == (cpu_backend == "host")


def test_a_warmup_is_checked_as_the_op_is(call: Call) -> None:
    right = call["out"]
    call["out"] = right[:, :-1]
    message = call.refusal(ShapeError)
    with pytest.raises(ShapeError) as caught:
        warm_up(call, "numpy")
    assert str(caught.value) == message
    call["out"], call["slot_idx"] = right, np.array([0, 99], np.uint32)
    warm_up(call, "numpy")  # index values are not looked at
    with pytest.raises(GdnError, match=r"^op: expected one of gated_delta_conv1d_commit, "):
        gdn.warmup(gdn.ops.check_indices, call["out"])
    with pytest.raises(TypeError, match="input_row_offsets"):
        gdn.warmup(call.op, *call.six[:-1])


def test_a_warmup_with_nothing_to_do(new_call: type[Call], cpu_backend: str) -> None:
    warm_up(new_call(lengths=()), cpu_backend)


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CuPy's current stream is being captured; the list is of the devices that were asked."""
    cupy = pytest.importorskip("cupy")
    asked: list[int] = []

    @contextmanager
    def device(number: int) -> Iterator[None]:
        yield

    def stream(number: int = 0) -> Any:
        asked.append(number)
        return SimpleNamespace(is_capturing=lambda: True)

    monkeypatch.setattr(cupy.cuda, "Device", device)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", stream)
    return asked


def test_a_kernel_is_not_compiled_in_a_capture(capturing: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_functions", {})
    monkeypatch.setattr(cuda, "_compile", lambda variant, device: pytest.fail("it compiled"))
    with pytest.raises(DeviceError) as caught:
        cuda.load(VARIANT, 1)
    assert str(caught.value) == (
        "gated_delta_recurrence_fwd: expected a kernel that was compiled and loaded before a stream capture "
        "(call gdn.warmup first), got a first call in one"
    )
    assert capturing == [1]


def test_a_kernel_that_is_loaded_is_not_asked_about_a_capture(
    capturing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "_functions", {(VARIANT, 1): "the function"})
    assert cuda.load(VARIANT, 1) == "the function"
    assert capturing == []


def test_no_array_is_made_in_a_capture(capturing: list[int]) -> None:
    with pytest.raises(DeviceError, match=r"^out: expected an array to write to, .*, got None$"):
        arrays.empty((3, 16), "float32", "cuda:0")
    assert arrays.empty((3, 16), "float32", "cpu").shape == (3, 16)


# ---- On a GPU ----


def on_gpu(call: Call) -> Call:
    """The call with CuPy arrays."""
    import cupy

    call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
    return call


def is_written(name: str) -> bool:
    return name in ("ring", "out", "decay", "beta") or name.endswith("_state")


def change(call: Call, originals: dict[str, Any], step: int) -> None:
    """Give what a call reads other values: tables of slots are permuted, and padding moves through them."""
    for name, original in originals.items():
        if is_written(name):
            continue
        values = np.roll(original, step, axis=-1 if original.dtype == np.uint32 else 0)
        if name == "input_row_offsets":
            values = original.copy()
            values[1] = (values[1] + step) % (values[-1] + 1)
        if name in ("slot_idx", "row_ids"):
            values.flat[step % values.size] = gdn.PAD_SLOT
        call[name].set(values)


@contextmanager
def capture(stream: Any) -> Iterator[list[Any]]:
    """Capture a stream, CuPy's current one in here, with whatever may be illegal being refused; the list gets the
    graph."""
    import cupy

    graphs: list[Any] = []
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        try:
            yield graphs
        finally:
            graphs.append(stream.end_capture())


@pytest.mark.gpu
@pytest.mark.parametrize("is_planned", [False, True], ids=["first-seen", "planned"])
def test_every_op_in_a_graph(new_op_call: NewOpCall, is_planned: bool) -> None:
    """Field case 84: after a warm-up a capture works at once, and replays read what the arrays hold then."""
    import cupy

    originals = new_op_call().arguments
    warm, captured, plain = (on_gpu(new_op_call()) for _ in range(3))
    before = bits(warm)
    warm_up(warm, "cuda")
    assert bits(warm) == before
    if not is_planned:
        plans._plans.by_kind.clear()
    stream = cupy.cuda.Stream(non_blocking=True)
    with capture(stream) as graphs:
        captured.run("cuda")
    assert bits(captured) == before, "a capture runs nothing"
    seen = set()
    for step in range(6):
        for call in (captured, plain):
            change(call, originals, step)
        cupy.cuda.Device().synchronize()
        graphs[0].launch(stream)
        stream.synchronize()
        plain.run("cuda")
        cupy.cuda.Device().synchronize()
        assert bits(captured) == bits(plain)
        seen.add(tuple(value for name, value in bits(captured).items() if is_written(name)))
    assert len(seen) >= 3, "what is written changes, but where a step leaves no row to work on"


@pytest.mark.gpu
def test_a_call_with_its_outputs_given_allocates_nothing(new_op_call: NewOpCall) -> None:
    import cupy

    class Allocations(cupy.cuda.MemoryHook):  # type: ignore[misc]  # CuPy has no types
        name = "allocations"

        def __init__(self) -> None:
            self.sizes: list[int] = []

        def alloc_preprocess(self, **keywords: int) -> None:
            self.sizes.append(keywords["mem_size"])

        malloc_preprocess = alloc_preprocess

    call = on_gpu(new_op_call())
    warm_up(call, "cuda")
    with Allocations() as allocations:
        for _ in range(3):
            call.run("cuda")
        assert allocations.sizes == []
        cupy.empty(100, cupy.uint8)
        assert len(allocations.sizes) > 0, "the hook sees allocations"


@pytest.mark.gpu
def test_a_cold_call_in_a_capture_is_refused_and_does_no_harm(
    new_op_call: NewOpCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cupy

    monkeypatch.setattr(plans, "_plans", plans._Plans())
    call, plain = (on_gpu(new_op_call()) for _ in range(2))
    before = bits(call)
    stream = cupy.cuda.Stream(non_blocking=True)
    empty_graphs = []  # kept, since no graph may be destroyed while another one is captured
    with monkeypatch.context() as patch:
        patch.setattr(cuda, "_functions", {})
        for attempt in (call.run, lambda backend: ops.bind(call.op, *call.six, **call.keywords)):
            with capture(stream) as graphs, pytest.raises(DeviceError, match=r"\(call gdn\.warmup first\)"):
                attempt("cuda")
            empty_graphs.append(graphs)
    warm_up(call, "cuda")
    with capture(stream) as graphs:
        call.run("cuda")
    assert bits(call) == before
    graphs[-1].launch(stream)
    plain.run("cuda")
    cupy.cuda.Device().synchronize()
    assert bits(call) == bits(plain)


@pytest.mark.gpu
def test_a_readout_is_not_made_in_a_capture(new_op_call: NewOpCall) -> None:
    import cupy

    call = on_gpu(new_op_call())
    keywords = {name: value for name, value in call.keywords.items() if name != "out"}
    if keywords == call.keywords:
        pytest.skip("this op returns nothing")
    call.op(*call.six, **keywords)
    before = bits(call)
    with capture(cupy.cuda.Stream(non_blocking=True)), pytest.raises(DeviceError, match=r"^out: expected an array"):
        call.op(*call.six, **keywords)
    assert bits(call) == before


@pytest.mark.gpu
def test_the_first_launch_of_a_thread_may_be_captured(new_op_call: NewOpCall) -> None:
    """It has to make CUDA's context its own, which must be allowed in there."""
    import cupy

    call, plain = (on_gpu(new_op_call()) for _ in range(2))
    warm_up(call, "cuda")
    stream = cupy.cuda.Stream(non_blocking=True)

    def run() -> Any:
        with capture(stream) as graphs:
            call.run("cuda")
        return graphs[0]

    with ThreadPoolExecutor(1) as pool:
        pool.submit(run).result(60).launch(stream)
    plain.run("cuda")
    cupy.cuda.Device().synchronize()
    assert bits(call) == bits(plain)


@pytest.mark.gpu
@pytest.mark.parametrize("are_tensors", [False, True], ids=["taken-before", "tensors"])
def test_a_capture_by_torch(new_op_call: NewOpCall, are_tensors: bool) -> None:
    """On tensors, or on CuPy arrays that were made of them before."""
    import cupy

    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no GPU")
    call, plain = new_op_call(), on_gpu(new_op_call())
    tensors = {name: torch.from_numpy(array).cuda() for name, array in call.arguments.items()}
    call.arguments = tensors if are_tensors else {name: cupy.from_dlpack(tensors[name]) for name in tensors}
    warm_up(call, "cuda")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # CuPy's current stream is PyTorch's, which captures.
    with torch.cuda.graph(graph), cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
        call.run("cuda")
    for _ in range(2):
        graph.replay()
        plain.run("cuda")
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    for name, tensor in tensors.items():
        assert tensor.cpu().numpy().tobytes() == plain[name].get().tobytes(), name
