"""Streams: a launch goes to CuPy's current one, in its order, and nothing waits (on a GPU)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call

NewOpCall = Callable[..., "Call"]
#: A fifth of a second of a GPU's time, much more than Python needs to enqueue what follows.
CYCLES = 400_000_000

pytestmark = pytest.mark.gpu


@pytest.fixture
def spin() -> Callable[[], None]:
    """Keeps the current stream busy for `CYCLES`."""
    import cupy

    source = """extern "C" __global__ void spin(long long cycles) {
        for (long long start = clock64(); clock64() - start < cycles;) {}
    }"""
    kernel = cupy.RawKernel(source, "spin")
    kernel((1,), (1,), (np.int64(0),))
    return lambda: kernel((1,), (1,), (np.int64(CYCLES),))


def warm_up(call: Call) -> None:
    with on_backend("cuda"):
        gdn.warmup(call.op, *call.six, **call.keywords)


def put(call: Call) -> Call:
    """The call with CuPy arrays."""
    import cupy

    call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
    return call


def bits_after_a_plain_call(call: Call) -> dict[str, bytes]:
    """What a call leaves in its arrays when everything else has waited for everything."""
    import cupy

    put(call).run("cuda")
    cupy.cuda.Device().synchronize()
    return {name: array.get().tobytes() for name, array in call.arguments.items()}


def test_a_call_runs_between_what_was_enqueued_before_and_behind_it(
    new_op_call: NewOpCall, spin: Callable[[], None]
) -> None:
    import cupy

    sources, call = put(new_op_call()), put(new_op_call())
    after = {name: cupy.zeros_like(array) for name, array in call.arguments.items()}
    for name, array in call.arguments.items():
        cupy.copyto(array, after[name])  # zeros; and what copies is loaded, as loading may wait
    warm_up(call)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        spin()
        for name, array in call.arguments.items():
            cupy.copyto(array, sources[name])
        call.run("cuda")
        for name, array in call.arguments.items():
            cupy.copyto(after[name], array)
        assert not stream.done, "the call waited for the stream"
    stream.synchronize()
    expected = bits_after_a_plain_call(new_op_call())
    assert {name: array.get().tobytes() for name, array in after.items()} == expected


NUM_OTHERS = 32
WRITTEN = ("ring", "out", "decay", "beta")


def garbage(count: int) -> list[Any]:
    """So many arrays of the least size that is allocated, full of bits."""
    import cupy

    return [cupy.full(512, 255, cupy.uint8) for _ in range(count)]


@pytest.mark.parametrize("is_other", [False, True], ids=["same-stream", "another-stream"])
def test_inputs_may_be_dropped_at_once(new_op_call: NewOpCall, spin: Callable[[], None], is_other: bool) -> None:
    """Field case 83: their memory is given away again in the order of the stream that they were made on."""
    import cupy

    expected, sources = bits_after_a_plain_call(new_op_call()), put(new_op_call())
    warm_up(put(new_op_call()))
    stream = cupy.cuda.Stream(non_blocking=True)
    maker = cupy.cuda.Stream(non_blocking=True) if is_other else stream
    cupy.cuda.Device().synchronize()
    call = new_op_call()
    with maker:
        # What is allocated below is allocated once before, as a new allocation may wait.
        rehearsed = [array.copy() for array in sources.arguments.values()], garbage(NUM_OTHERS)
        del rehearsed
        spin()
        call.arguments = {name: sources[name].copy() for name in call.arguments}
    stream.wait_event(maker.record())
    with stream:
        call.run("cuda")
    maker.wait_event(stream.record())
    written = {name: call[name] for name in call.arguments if name in WRITTEN or name.endswith("_state")}
    dropped = {array.data.ptr for name, array in call.arguments.items() if name not in written}
    call.arguments.clear()
    with maker:
        others = garbage(NUM_OTHERS + len(dropped))
        assert not maker.done, "the call waited"
    assert dropped & {other.data.ptr for other in others}, "memory is used again"
    cupy.cuda.Device().synchronize()
    assert written
    for name, array in written.items():
        assert array.get().tobytes() == expected[name], name


def test_what_a_call_makes_is_given_away_in_the_order_of_its_stream(
    new_call: type[Call], spin: Callable[[], None]
) -> None:
    """Beside field case 83: a workspace, which nobody holds once its kernels are enqueued, is used again."""
    import cupy

    def arguments() -> list[Any]:
        return [cupy.asarray(array) for array in new_call((1, 2, 32, 32), (200, 3)).six]

    op, six = ops.gated_delta_recurrence_fwd, arguments()
    num_bytes = ops.gated_delta_recurrence_fwd_workspace_bytes(*six, algorithm="chunked")
    expected = [op(*six, algorithm="chunked").tobytes(), six[3].tobytes()]
    stream, six = cupy.cuda.Stream(non_blocking=True), arguments()
    cupy.cuda.Device().synchronize()
    with stream:
        # What is allocated below is allocated once before, as a new allocation may wait.
        rehearsed = op(*arguments(), algorithm="chunked"), [cupy.full(num_bytes, 255, cupy.uint8) for _ in range(4)]
        del rehearsed
        stream.synchronize()
        spin()
        out = op(*six, algorithm="chunked")
        others = [cupy.full(num_bytes, 255, cupy.uint8) for _ in range(4)]
        assert not stream.done, "the call waited"
    stream.synchronize()
    assert [out.tobytes(), six[3].tobytes()] == expected
    assert all(bool((other == 255).all()) for other in others)


@pytest.mark.parametrize("is_current", [True, False], ids=["one-stream", "by-dlpack"])
def test_a_call_between_kernels_of_torch(new_op_call: NewOpCall, is_current: bool) -> None:
    """With PyTorch's stream as CuPy's current one; and without, when DLPack has each side wait for the other."""
    import cupy

    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no GPU")

    def tensor(array: Any) -> Any:  # PyTorch copies no uint32 on a GPU
        return torch.from_numpy(array.view(np.int32) if array.dtype == np.uint32 else array).cuda()

    call, expected = new_op_call(), bits_after_a_plain_call(new_op_call())
    sources = {name: tensor(array) for name, array in call.arguments.items()}
    call.arguments = {name: torch.zeros_like(source) for name, source in sources.items()}
    after = {name: torch.zeros_like(source) for name, source in sources.items()}
    warm_up(call)
    torch.cuda.synchronize()
    cupy.cuda.Device().synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        del_later = [torch.zeros(1 << 18, device="cuda") for _ in range(4)]  # an allocation may wait, so not below
        del del_later
        torch.cuda.synchronize()
        torch.cuda._sleep(CYCLES)
        for name, array in call.arguments.items():
            array.copy_(sources[name])
        with cupy.cuda.Stream.from_external(side) if is_current else nullcontext():
            result = call.run("cuda")
        if is_current:
            for name, array in call.arguments.items():
                after[name].copy_(array)
        else:
            results = () if result is None else result if isinstance(result, tuple) else (result,)
            names = ("decay", "beta") if len(results) == 2 else ("out",)
            after = {name: torch.from_dlpack(array).clone() for name, array in zip(names, results, strict=False)}
        assert not side.query(), "the call waited"
    torch.cuda.synchronize()
    for name, array in after.items():
        assert array.cpu().numpy().tobytes() == expected[name], name
