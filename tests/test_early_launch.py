"""Launches that begin early: what the driver is handed, when they are used, and that kernels say what they wait for."""

from __future__ import annotations

import ctypes
from array import array
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from gdn.arrays import take
from gdn.backends import chunked, cuda, early_launch
from gdn.backends import gated_delta_chunk_prepare as prepare_kernel
from gdn.backends.chunk_layout import ChunkLayout
from gdn.backends.early_launch import EarlyLaunch
from gdn.backends.launch import Launch, source
from gdn.geometry import HeadGeometry
from gdn.recurrence import RecurrenceInputs

cupy = pytest.importorskip("cupy")

HEADS = HeadGeometry(1, 1, 32, 32)


def chunked_launches(total_seq_len: int, monkeypatch: pytest.MonkeyPatch, num_slabs: int = 1) -> tuple[Launch, ...]:
    """The launches of a call of one sequence, which nobody runs."""
    monkeypatch.setattr(ChunkLayout, "num_slabs", num_slabs)
    zeros = {
        "qkv_conv_output": np.zeros((total_seq_len, HEADS.conv_dim), np.float32),
        "decay_per_token": np.zeros((total_seq_len, 1), np.float32),
        "beta_per_token": np.zeros((total_seq_len, 1), np.float32),
        "recurrent_state": np.zeros((1, 1, 32, 32), np.float32),
        "slot_idx": np.zeros(1, np.uint32),
        "input_row_offsets": np.array([0, total_seq_len], np.uint32),
    }
    inputs = RecurrenceInputs(HEADS, **{name: take(name, values) for name, values in zeros.items()})
    layout = ChunkLayout(HEADS, "float32", "float32", 1, total_seq_len, 1)
    out = take("out", np.zeros((total_seq_len, 32), np.float32))
    workspace = take("workspace", np.zeros(layout.total_bytes, np.uint8))
    return chunked.launches(inputs, out, layout, workspace, None)


class Driver:
    """In the place of cuLaunchKernelEx: remembers what it was handed, and returns `status`."""

    def __init__(self) -> None:
        self.status = 0
        self.launched: list[dict[str, Any]] = []

    def __call__(self, config_reference: Any, function: Any, addresses: Any, extra: Any) -> int:
        config = config_reference._obj
        value = ctypes.string_at(ctypes.addressof(config), ctypes.sizeof(config))
        words = np.frombuffer(value, np.uint32)
        attribute = np.frombuffer(ctypes.string_at(int(words[10:12].view(np.uint64)[0]), 72), np.uint32)
        self.launched.append(
            {
                "grid": words[:3].tolist(),
                "block": words[3:6].tolist(),
                "shared_bytes": int(words[6]),
                "stream": int(words[8:10].view(np.uint64)[0]),
                "num_attributes": int(words[12]),
                "attribute": attribute.tolist(),
                "function": function.value,
                "addresses": addresses.value,
                "extra": extra,
            }
        )
        return self.status


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(early_launch, "_launch_function", lambda: driver)
    return driver


def test_the_driver_is_handed_what_its_interface_asks_for(driver: Driver) -> None:
    """The layout of CUlaunchConfig (56 bytes) and CUlaunchAttribute (72 bytes), written down here on its own."""
    launch = EarlyLaunch(11, 70_000, 384, 200_000, 2**40 + 8)
    launch(2**41)
    launch(0)
    first, second = driver.launched
    assert first == {
        "grid": [70_000, 1, 1],
        "block": [384, 1, 1],
        "shared_bytes": 200_000,
        "stream": 2**41,
        "num_attributes": 1,
        "attribute": [6, 0, 1, *[0] * 15],
        "function": 11,
        "addresses": 2**40 + 8,
        "extra": None,
    }
    assert second == {**first, "stream": 0}


def test_what_the_driver_refuses_is_an_error(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class DriverError(RuntimeError):
        """CuPy's own asks the driver for its text, and there may be none here."""

    monkeypatch.setattr(cupy.cuda.driver, "CUDADriverError", DriverError)
    driver.status = 700
    with pytest.raises(DriverError, match=r"^700$"):
        EarlyLaunch(11, 1, 32, 0, 8)(0)


@pytest.mark.parametrize(
    ("begins_early", "capability", "driver_version", "is_early"),
    [
        (True, (9, 0), 12030, True),
        (True, (12, 0), 13000, True),
        (False, (9, 0), 13000, False),
        (True, (8, 9), 13000, False),  # kernels for it do not wait
        (True, (9, 0), 12020, False),
    ],
)
def test_when_a_launch_begins_early(
    begins_early: bool,
    capability: tuple[int, int],
    driver_version: int,
    is_early: bool,
    driver: Driver,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Device:
        def __init__(self, device: int) -> None:
            assert device == 0

        def __enter__(self) -> None: ...
        def __exit__(self, *reason: object) -> None: ...

    others: list[tuple[int, ...]] = []
    early_launch.is_possible.cache_clear()
    monkeypatch.setattr(cuda, "capability", lambda device: capability)
    monkeypatch.setattr(cuda, "load", lambda variant, device: SimpleNamespace(kernel=SimpleNamespace(ptr=11)))
    monkeypatch.setattr(cuda, "_thread", cuda._Thread())
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: SimpleNamespace(ptr=7))
    monkeypatch.setattr(cupy.cuda.runtime, "driverGetVersion", lambda: driver_version)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(cupy.cuda.runtime, "setDevice", lambda device: None)
    monkeypatch.setattr(cupy.cuda.driver, "launchKernel", lambda *given: others.append(given))
    launch = replace(chunked_launches(100, monkeypatch)[1], begins_early=begins_early)
    ready = cuda.ReadyLaunch(launch, 0)
    ready()
    early_launch.is_possible.cache_clear()
    assert (len(driver.launched), len(others)) == ((1, 0) if is_early else (0, 1))
    if is_early:
        (given,) = driver.launched
        where = given["grid"], given["block"], given["shared_bytes"], given["stream"], given["addresses"]
        shared_bytes = launch.variant.launch_shared_bytes
        assert where[:4] == ([launch.num_blocks, 1, 1], [launch.threads_per_block, 1, 1], shared_bytes, 7)
        addresses = array("Q", ctypes.string_at(given["addresses"], 8 * len(launch.arguments)))
        values = [ctypes.c_int64.from_address(address).value for address in addresses]
        assert values == list(launch.arguments)
    else:
        assert others == [(*ready._before_stream, 7, *ready._behind_stream)]


def test_slabs_take_turns_in_memory_and_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes a slab ready may overlap the walk over the one before, which lies elsewhere."""
    plan, *slabs = chunked_launches(4096, monkeypatch, num_slabs=4)
    assert not plan.begins_early
    prepares, walks = slabs[::2], slabs[1::2]
    assert len(prepares) == len(walks) == 4
    assert [prepare.begins_early for prepare in prepares] == [False, True, True, True]
    assert all(walk.begins_early for walk in walks)

    def slab_of(launch: Launch) -> int:
        return launch.arguments[[name for name, _ in launch.variant.kernel.parameters].index("slab")]

    places = [slab_of(prepare) for prepare in prepares]
    assert places == [slab_of(walk) for walk in walks]
    assert places[0] == places[2] != places[1] == places[3]


def test_a_call_of_one_slab_overlaps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [launch.begins_early for launch in chunked_launches(100, monkeypatch)] == [False, False, False]


def test_the_last_block_that_makes_a_slab_ready_has_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the walk in front, so that the grid does not end before."""
    _, prepare, _ = chunked_launches(100, monkeypatch)
    parameters = dict(zip((name for name, _ in prepare_kernel.KERNEL.parameters), prepare.arguments, strict=True))
    pairs = -(-parameters["group_size"] // 2)
    assert prepare.num_blocks == parameters["slab_chunks"] * parameters["num_key_heads"] * pairs + 1


@pytest.mark.parametrize("stem", ["gated_delta_chunk_walk", "gated_delta_chunk_walk_sm90"])
def test_a_walk_waits_before_it_does_anything(stem: str) -> None:
    """The slab is ready, and the walk before has ended, when it lets the next grid begin."""
    body = source(f"{stem}.cu").split('extern "C" __global__')[1].split("{", 1)[1]
    assert body.split()[:2] == ["wait_for_grid_before();", "let_next_grid_begin();"]


def test_kernels_that_begin_early_are_those_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = chunked_launches(4096, monkeypatch, num_slabs=4)
    early = {launch.variant.kernel.stem for launch in launches if launch.begins_early}
    assert all("wait_for_grid_before()" in source(f"{stem}.cu").split('extern "C" __global__')[1] for stem in early)
    assert early == {"gated_delta_chunk_prepare", "gated_delta_chunk_walk"}
