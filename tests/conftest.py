"""What every test file may use: where tests run, and a small call whose refusals leave nothing behind."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.arrays import DTYPES
from gdn.geometry import HeadGeometry
from gdn.testing.execute import on_backend

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

BACKENDS = ("numpy", "host", pytest.param("cuda", marks=pytest.mark.gpu))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="compile every kernel variant for every architecture (hours of one core)",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        _skip_where_missing("cuda")


def _skip_where_missing(backend: str) -> None:
    reason = gdn.unavailable_backends().get(backend)
    if reason is not None:
        pytest.skip(f"{backend} backend: {reason}")


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
        return tuple(value for name, value in self.arguments.items() if name != "out")

    def run(self, backend: str = "numpy") -> Any:
        """The call itself."""
        with on_backend(backend):
            return ops.gated_delta_recurrence_fwd(*self.six, out=self["out"])

    def shape(self) -> tuple[int, int]:
        """What the shape function says of the call."""
        return ops.gated_delta_recurrence_fwd_shape(*self.six)

    def check_indices(self) -> None:
        """What the index check says of the call."""
        ops.check_indices(ops.gated_delta_recurrence_fwd, *self.six, out=self["out"])

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
        arrays = [value for value in self.arguments.values() if isinstance(value, np.ndarray)]
        return [_whole_memory(array).tobytes() for array in arrays]


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
