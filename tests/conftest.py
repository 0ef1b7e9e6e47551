"""What every test file may use: where tests run, and a small call whose refusals leave nothing behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest

import gdn
from gdn import arrays, ops
from gdn.arrays import DTYPES
from gdn.backends import host, launch
from gdn.geometry import HeadGeometry
from gdn.testing.execute import on_backend

# What tests/test_fuzz_*.py take: a minute, the same examples on every run where CI is set; or about an hour, with
# `pytest tests/test_fuzz_*.py --hypothesis-profile hour`.
hypothesis.settings.register_profile(
    "minute", deadline=None, max_examples=100, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.register_profile("hour", deadline=None, max_examples=8000, print_blob=True)
hypothesis.settings.load_profile("minute")

BACKENDS = ("numpy", "host", pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="compile every kernel variant for every architecture, and run all thread maps on a GPU (an hour)",
    )
    parser.addoption("--soak", action="store_true", help="also run the tests marked soak (an hour)")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("soak") is not None and not item.config.getoption("--soak"):
        pytest.skip("runs with --soak")
    if item.get_closest_marker("gpu") is not None:
        _skip_where_missing("cuda")


def _skip_where_missing(backend: str) -> None:
    reason = gdn.unavailable_backends().get(backend)
    if reason is not None:
        pytest.skip(f"{backend} backend: {reason}")


#: GCC's library of each sanitizer, the one to preload first.
_SANITIZER_RUNTIMES = {
    "address,undefined": ("libasan.so", "libubsan.so"),
    "thread": ("libtsan.so",),
}


@pytest.fixture
def run_sanitized() -> Callable[..., tuple[int, str]]:
    """Runs a Python under a sanitizer: `run_sanitized("thread", "-c", "print()")` is its exit status and output.

    Skips where the compiler has no such sanitizer. ThreadSanitizer's exit status is 66.
    """
    _skip_where_missing("host")

    def run(sanitize: str, *arguments: str) -> tuple[int, str]:
        runtimes = [_sanitizer_runtime(name) for name in _SANITIZER_RUNTIMES[sanitize]]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(gdn.__file__).parents[1]),
            "PYTHONMALLOC": "malloc",
            "LD_PRELOAD": runtimes[0],
            "ASAN_OPTIONS": "detect_leaks=0",  # Python frees little at its end
            "TSAN_OPTIONS": "exitcode=66",
        }
        done = subprocess.run(
            [sys.executable, "-W", "error", *arguments],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,
            check=False,
        )
        return done.returncode, done.stdout

    return run


def _sanitizer_runtime(name: str) -> str:
    """Where the compiler has a sanitizer's library."""
    if "clang" in host.compiler_version():
        pytest.skip("the sanitizers are GCC's")
    asked = (host._toolchain().command[0], f"-print-file-name={name}")
    found = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"the compiler brings no {name}")
    return found


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend that this machine can run."""
    _skip_where_missing(request.param)
    return str(request.param)


@pytest.fixture(params=("numpy", "host"))
def cpu_backend(request: pytest.FixtureRequest) -> str:
    """Each backend that takes NumPy arrays."""
    _skip_where_missing(request.param)
    return str(request.param)


@pytest.fixture(params=("host", pytest.param("cuda", marks=pytest.mark.gpu)))
def kernels(request: pytest.FixtureRequest) -> str:
    """Each backend that runs `kernels/*.cu`."""
    _skip_where_missing(request.param)
    return str(request.param)


class Call:
    """The six arguments of a recurrence call and `out`, by name; NumPy arrays of random values."""

    op: Callable[..., Any] = staticmethod(ops.gated_delta_recurrence_fwd)
    #: Arguments that are given by name.
    by_name: tuple[str, ...] = ("ring", "pending_ring_slot_idx", "num_pending", "algorithm", "workspace", "out")

    def __init__(
        self,
        heads: tuple[int, int, int, int] = (1, 2, 8, 8),
        lengths: tuple[int, ...] = (2, 1),
        *,
        max_slots: int = 4,
        work_dtype: str = "float32",
        state_dtype: str = "float32",
        seed: int = 0,
    ) -> None:
        self.heads = HeadGeometry(*heads)
        random = np.random.default_rng(seed)
        total, num_value_heads = sum(lengths), self.heads.num_value_heads
        state_shape = (max_slots, num_value_heads, self.heads.key_head_dim, self.heads.value_head_dim)
        self.arguments: dict[str, Any] = {
            "qkv_conv_output": random.standard_normal((total, self.heads.conv_dim)).astype(DTYPES[work_dtype]),
            "decay_per_token": random.uniform(0.5, 1, (total, num_value_heads)).astype(np.float32),
            "beta_per_token": random.uniform(0, 1, (total, num_value_heads)).astype(np.float32),
            "recurrent_state": random.standard_normal(state_shape).astype(DTYPES[state_dtype]),
            "slot_idx": np.arange(len(lengths), dtype=np.uint32),
            "input_row_offsets": np.cumsum([0, *lengths]).astype(np.uint32),
            "out": np.full((total, self.heads.value_dim), 7, DTYPES[work_dtype]),
        }

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.arguments[name] = value

    @property
    def six(self) -> tuple[Any, ...]:
        """The positional arguments."""
        return tuple(value for name, value in self.arguments.items() if name not in self.by_name)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {name: value for name, value in self.arguments.items() if name in self.by_name}

    def run(self, backend: str = "numpy") -> Any:
        """The call itself."""
        with on_backend(backend):
            return self.op(*self.six, **self.keywords)

    def shape(self) -> tuple[int, int]:
        """What the shape function says of the call."""
        return ops.gated_delta_recurrence_fwd_shape(*self.six)

    def check_indices(self) -> None:
        """What the index check says of the call."""
        ops.check_indices(self.op, *self.six, **self.keywords)

    def refusal(self, error_class: type[Exception], backend: str = "numpy") -> str:
        """The message with which op and `check_indices` both refuse the call, changing not one byte."""
        before = self._bytes()
        messages = set()
        for refused in (lambda: self.run(backend), self.check_indices):
            with pytest.raises(gdn.GdnError) as caught:
                refused()
            assert type(caught.value) is error_class
            assert self._bytes() == before
            messages.add(str(caught.value))
        (message,) = messages
        return message

    def shape_refusal(self, error_class: type[Exception]) -> str:
        """The message with which the shape function refuses the call."""
        with pytest.raises(gdn.GdnError) as caught:
            self.shape()
        assert type(caught.value) is error_class
        return str(caught.value)

    def _bytes(self) -> list[bytes]:
        """All memory behind the arguments."""
        given = [value for value in self.arguments.values() if isinstance(value, np.ndarray)]
        return [_whole_memory(array).tobytes() for array in given]


class VerifyCall(Call):
    """A call of the verify, the ring filled with 7."""

    op = staticmethod(ops.gated_delta_recurrence_verify_ring)
    by_name = ("pending_ring_slot_idx", "num_pending", "out")

    def __init__(
        self,
        heads: tuple[int, int, int, int] = (1, 2, 8, 8),
        lengths: tuple[int, ...] = (2, 1),
        *,
        ring_len: int = 4,
        ring_rows: int = 3,
        ring_dtype: str = "float32",
        record_padding: int = 2,
        **keywords: Any,
    ) -> None:
        super().__init__(heads, lengths, **keywords)
        record_stride = self.heads.record_elements + record_padding
        ring_shape = (ring_rows, self.heads.num_key_heads, ring_len, record_stride)
        self.arguments["ring"] = np.full(ring_shape, 7, DTYPES[ring_dtype])
        self.arguments["ring_slot_idx"] = np.arange(len(lengths), dtype=np.uint32)


class FoldCall(Call):
    """A call of the fold over a ring of random values: 2 layers of 2 rows, 5 slots of 2 heads of 8 x 8."""

    op = staticmethod(ops.gated_delta_state_fold)
    by_name = ()

    def __init__(self, *, state_dtype: str = "float32", ring_dtype: str = "float32") -> None:
        self.heads = HeadGeometry(1, 2, 8, 8)
        random = np.random.default_rng(0)
        record_stride = self.heads.record_elements + 2
        self.arguments = {
            "recurrent_state": random.standard_normal((5, 2, 8, 8)).astype(DTYPES[state_dtype]),
            "row_ids": np.array([[0, 1], [3, 2]], np.uint32),
            "ring": random.standard_normal((4, 1, 4, record_stride)).astype(DTYPES[ring_dtype]),
            "ring_row_ids": np.array([[2, 0], [1, 3]], np.uint32),
            "num_accepted": np.array([3, 1], np.uint32),
        }


class GatesCall(Call):
    """A call of the gates of 5 tokens and 3 heads; its readout is a pair."""

    op = staticmethod(ops.gated_delta_gates)
    by_name = ("decay", "beta")

    def __init__(self, *, work_dtype: str = "float32") -> None:
        random = np.random.default_rng(0)
        self.arguments = {name: random.standard_normal((5, 3)).astype(DTYPES[work_dtype]) for name in "ab"}
        self.arguments |= {name: random.standard_normal(3).astype(np.float32) for name in ("A_log", "dt_bias")}
        self.arguments |= {name: np.full((5, 3), 7, np.float32) for name in ("decay", "beta")}

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {"allow_neg_eigval": True, "out": (self["decay"], self["beta"])}


class ConvCall(Call):
    """A call of the convolution of two sequences of 3 and 2 tokens, or of the commit of 1 and 2 of them."""

    op = staticmethod(ops.gated_delta_conv1d_fwd)
    by_name = ("bias", "out")

    def __init__(self, *, work_dtype: str = "float32", is_commit: bool = False) -> None:
        random, dtype = np.random.default_rng(0), DTYPES[work_dtype]
        self.arguments = {"qkv": random.standard_normal((5, 16)).astype(dtype)}
        if not is_commit:
            self.arguments["conv_weight"] = random.standard_normal((16, 4)).astype(dtype)
        self.arguments |= {
            "conv_state": random.standard_normal((4, 16, 3)).astype(dtype),
            "slot_idx": np.array([2, 0], np.uint32),
            "input_row_offsets": np.array([0, 3, 5], np.uint32),
        }
        if is_commit:
            self.op = ops.gated_delta_conv1d_commit
            self.arguments["num_accepted"] = np.array([1, 2], np.uint32)
        else:
            self.arguments["bias"] = random.standard_normal(16).astype(np.float32)
            self.arguments["out"] = np.full((5, 16), 7, dtype)

    @property
    def keywords(self) -> dict[str, Any]:
        """The keyword arguments."""
        return {**super().keywords, "activation": "silu"} if "out" in self.arguments else {}


def _with_pending(call: Call) -> Call:
    """The call behind pending records: of another ring row, of its own, in part."""
    random = np.random.default_rng(1)
    if "ring" not in call.arguments:
        call["ring"] = np.zeros((3, 1, 4, call.heads.record_elements + 2), np.float32)
    call["ring"][...] = random.standard_normal(call["ring"].shape)
    call["pending_ring_slot_idx"] = np.array([2, 1], np.uint32)
    call["num_pending"] = np.array([2, 1], np.uint32)
    return call


#: A call of every op, whose arrays of a model's values have the type that is given.
OP_CALLS: dict[str, Callable[[str], Call]] = {
    "fwd": lambda dtype: Call(work_dtype=dtype, state_dtype=dtype),
    "fwd-pending": lambda dtype: _with_pending(Call(work_dtype=dtype, state_dtype=dtype)),
    "verify": lambda dtype: VerifyCall(work_dtype=dtype, state_dtype=dtype),
    "verify-pending": lambda dtype: _with_pending(VerifyCall(work_dtype=dtype, state_dtype=dtype)),
    "fold": lambda dtype: FoldCall(state_dtype=dtype),
    "conv1d": lambda dtype: ConvCall(work_dtype=dtype),
    "conv1d-commit": lambda dtype: ConvCall(work_dtype=dtype, is_commit=True),
    "gates": lambda dtype: GatesCall(work_dtype=dtype),
}


@pytest.fixture(params=OP_CALLS)
def new_op_call(request: pytest.FixtureRequest) -> Callable[..., Call]:
    """Makes calls of each op, each time with the same values: `new_op_call(dtype)`."""
    make = OP_CALLS[request.param]
    return lambda dtype="float32": make(dtype)


@pytest.fixture
def op_calls() -> dict[str, Callable[[str], Call]]:
    """Makes a call of any op, by name and type: `op_calls["fold"](dtype)`."""
    return OP_CALLS


def _whole_memory(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


@pytest.fixture
def new_call() -> type[Call]:
    """Makes calls: `new_call(heads, lengths, ...)`."""
    return Call


@pytest.fixture
def call() -> Call:
    """A small valid call: one key head, two value heads of 8 x 8, two sequences of 2 tokens and 1, 4 slots."""
    return Call()


@pytest.fixture
def new_verify() -> type[VerifyCall]:
    """Makes verify calls: `new_verify(heads, lengths, ...)`."""
    return VerifyCall


@pytest.fixture
def new_fold() -> type[FoldCall]:
    """Makes fold calls."""
    return FoldCall


@contextmanager
def _full() -> Iterator[None]:
    """In the block no entry of a cache fits on the disk: half of it is written, then the system refuses."""
    whole = os.fdopen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdopen", lambda *arguments: _HalfWritten(whole(*arguments)))
        yield


@pytest.fixture
def full_disk() -> Callable[[], AbstractContextManager[None]]:
    """`with full_disk():` no entry of a cache fits on the disk, as above."""
    return _full


class _HalfWritten:
    """What `os.fdopen` gives then; the method of a real file cannot be replaced."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, content: bytes) -> int:
        self._file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __enter__(self) -> _HalfWritten:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()


@pytest.fixture
def stale_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays that gdn makes hold bytes of 0xFF, NaN in every float, as memory that was used before may."""
    new_array = arrays.empty

    def stale(*arguments: Any) -> Any:
        array = new_array(*arguments)
        array.ravel().view(np.uint8)[...] = 0xFF
        return array

    monkeypatch.setattr(arrays, "empty", stale)


@pytest.fixture
def same_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a terminal, nor a GPU, nor bandwidths decide what tests of `gdn bench` see."""
    from gdn.bench.cpu import CpuMachine
    from gdn.bench.traffic import Ceilings

    ceilings = Ceilings(copy_gb_s=4000.0, read_gb_s=5000.0)
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(gdn, "unavailable_backends", lambda: {"cuda": "no GPU in this test"})
    monkeypatch.setattr(CpuMachine, "measure_ceilings", lambda self: ceilings)


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Edits a file of `kernels/` as the backends read it: `edit(file_name, (old, new), ...)`."""
    _skip_where_missing("host")
    original = launch.kernel_text

    def edit(file_name: str, *changes: tuple[str, str]) -> None:
        text = original(file_name)
        for old, new in changes:
            assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {file_name}"
            text = text.replace(old, new)
        monkeypatch.setattr(launch, "kernel_text", lambda name: text if name == file_name else original(name))
        launch.source.cache_clear()

    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "broken-kernels"))
    monkeypatch.setattr(host, "_libraries", {})
    yield edit
    monkeypatch.undo()
    launch.source.cache_clear()
