"""Which backend a call runs on: `use_backend`, and what this machine can run."""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import gdn
from gdn.backends import backend_for_numpy_arrays, cuda, host, nvrtc
from gdn.backends import numpy as numpy_backend
from gdn.errors import DeviceError

if TYPE_CHECKING:
    from tests.conftest import Call

needs_host = pytest.mark.skipif(
    host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}"
)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the backends that calls reach, in order; none of them computes."""
    names: list[str] = []
    monkeypatch.setattr(numpy_backend, "gated_delta_recurrence_fwd", lambda *_: names.append("numpy"))
    monkeypatch.setattr(host, "run", lambda _: names.append("host"))
    monkeypatch.setattr(cuda, "ReadyLaunch", lambda *_: lambda: names.append("cuda"))
    return names


def run(call: Call) -> None:
    gdn.ops.gated_delta_recurrence_fwd(*call.six)


@needs_host
def test_the_choice_holds_inside_the_block_and_nests(call: Call, ran: list[str]) -> None:
    run(call)
    with gdn.use_backend("host"):
        run(call)
        with gdn.use_backend("numpy"):
            run(call)
        run(call)
    run(call)
    assert ran == ["numpy", "host", "numpy", "host", "numpy"]


@needs_host
def test_an_error_inside_the_block_ends_the_choice() -> None:
    with pytest.raises(KeyError), gdn.use_backend("host"):
        raise KeyError
    assert backend_for_numpy_arrays() == "numpy"


@needs_host
def test_each_thread_chooses_for_itself(call: Call, ran: list[str]) -> None:
    inside, outside = threading.Event(), threading.Event()

    def other_thread() -> str:
        assert inside.wait(10)
        chosen = backend_for_numpy_arrays()
        outside.set()
        return chosen

    with ThreadPoolExecutor(1) as pool:
        chosen = pool.submit(other_thread)
        with gdn.use_backend("host"):
            inside.set()
            assert outside.wait(10)
            run(call)
        assert chosen.result() == "numpy"
    assert ran == ["host"]


@needs_host
@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_nothing_to_do_is_no_launch(new_call: type[Call], ran: list[str], lengths: tuple[int, ...]) -> None:
    """Field cases 66, 67: B = 0 and T = 0 are ordinary, and a grid of no blocks is never launched."""
    call = new_call(lengths=lengths)
    pool = call["recurrent_state"].copy()
    with gdn.use_backend("host"):
        out = gdn.ops.gated_delta_recurrence_fwd(*call.six)
    assert out.shape == (0, 16)
    assert out.dtype == pool.dtype
    assert (call["recurrent_state"] == pool).all()
    if not lengths:
        assert ran == []


@pytest.mark.parametrize("name", ["cuda", "gpu", "", "NumPy", None, 3])
def test_other_names_are_refused(name: Any) -> None:
    with pytest.raises(DeviceError) as caught, gdn.use_backend(name):
        raise AssertionError("the block was entered")
    hint = " (CuPy arrays run on cuda by themselves)" if name == "cuda" else ""
    assert str(caught.value) == f'use_backend: expected "numpy" or "host", got {name!r}{hint}'
    assert backend_for_numpy_arrays() == "numpy"


def test_a_backend_that_this_machine_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    reason = "no C++ compiler: CXX=no-such-compiler is not on PATH"
    with pytest.raises(DeviceError) as caught, gdn.use_backend("host"):
        raise AssertionError("the block was entered")
    assert str(caught.value) == f'use_backend: expected a backend that this machine can run, got "host": {reason}'
    assert gdn.unavailable_backends()["host"] == reason
    assert "host" not in gdn.available_backends()


def test_numpy_runs_everywhere_and_every_other_backend_has_a_reason() -> None:
    available, missing = gdn.available_backends(), gdn.unavailable_backends()
    assert "numpy" in available
    assert sorted((*available, *missing)) == ["cuda", "host", "numpy"]
    for reason in missing.values():
        assert reason
        assert "\n" not in reason


NO_CUPY = "CuPy cannot be imported (import of cupy halted; None in sys.modules); install gdn[cuda12] or gdn[cuda13]"
NO_DEVICE = "CuPy finds no CUDA device (no NVIDIA driver, or no GPU visible)"


def cupy_with(*capabilities: str, available: bool = True) -> SimpleNamespace:
    """As much of CuPy as is asked about the GPUs, which have these compute capabilities."""
    parts = SimpleNamespace(
        nvrtc=SimpleNamespace(getVersion=lambda: (12, 9)),
        runtime=SimpleNamespace(getDeviceCount=lambda: len(capabilities)),
        Device=lambda device: SimpleNamespace(compute_capability=capabilities[device]),
    )
    return SimpleNamespace(is_available=lambda: available, cuda=parts)


@pytest.mark.parametrize(
    ("cupy", "reason"),
    [
        (None, NO_CUPY),
        (cupy_with(available=False), NO_DEVICE),
        (cupy_with("75", "61"), "no GPU of compute capability 8.0 or later"),
        (SimpleNamespace(is_available=lambda: True), "CuPy cannot use the GPU: "),
        (cupy_with("75", "90"), None),
        (cupy_with("100"), None),
    ],
    ids=["no CuPy", "no driver", "old GPUs", "broken CuPy", "an old GPU and a new one", "a GPU"],
)
def test_why_cuda_cannot_run(monkeypatch: pytest.MonkeyPatch, cupy: Any, reason: str | None) -> None:
    """Field cases 86, 87: no CuPy, or CuPy and no driver: one clear line."""
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    cuda.unavailable_reason.cache_clear()
    try:
        found = cuda.unavailable_reason()
        assert found == reason or (reason is not None and reason.endswith(": ") and str(found).startswith(reason))
        assert ("cuda" in gdn.available_backends()) == (reason is None)
    finally:
        cuda.unavailable_reason.cache_clear()


def test_a_device_that_the_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside one that they do: a call there is refused with what it lacks, before anything compiles."""
    monkeypatch.setitem(sys.modules, "cupy", cupy_with("75", "90", "121"))
    cuda.unavailable_reason.cache_clear()
    cuda.require_device.cache_clear()
    try:
        assert cuda.served_capabilities() == ((9, 0), (12, 1))
        cuda.require_device(1)
        with pytest.raises(DeviceError) as caught:
            cuda.require_device(0)
        assert str(caught.value) == "cuda:0: expected compute capability 8.0 or later, got 7.5"
    finally:
        cuda.unavailable_reason.cache_clear()
        cuda.require_device.cache_clear()


def test_no_gpu_has_no_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "unavailable_reason", lambda: "no GPU in this test")
    assert cuda.served_capabilities() == ()


def test_a_library_that_cupy_lacks_is_no_matter_of_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are an OSError; only one of a file says which."""
    right, errors = builtins.__import__, [OSError("libnvrtc.so.12: cannot open shared object file")]

    def broken(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "cupy":
            raise errors[-1]
        return right(name, *rest)

    for module in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(builtins, "__import__", broken)
    said = []
    for _ in range(2):
        cuda.unavailable_reason.cache_clear()
        with pytest.raises(DeviceError) as caught:
            nvrtc.version()
        said.append((cuda.unavailable_reason(), str(caught.value)))
        errors.append(PermissionError(13, "Permission denied", "/home/.cupy"))
    cuda.unavailable_reason.cache_clear()
    assert all("install gdn[cuda12]" in text and "libnvrtc" in text for text in said[0])
    assert all("CUPY_CACHE_DIR" in text and "/home/.cupy" in text for text in said[1])
