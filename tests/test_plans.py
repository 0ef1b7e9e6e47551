"""Calls on CuPy arrays that find a plan: the very launch of a call that is checked in full, or its very refusal.

CuPy arrays can be described without a GPU: here they lie at made-up addresses, and launches are written down.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

import gdn
from gdn import arrays, calls, layer_rules, ops, plans, rules
from gdn.backends import chunk_layout, cuda
from gdn.backends.launch import Variant
from gdn.backends.row_tile import RowTile, forced_row_tile
from gdn.errors import DeviceError, DTypeError, GdnError, LayoutError, ShapeError

if TYPE_CHECKING:
    from tests.conftest import Call, FoldCall, VerifyCall

cupy = pytest.importorskip("cupy")

FIRST_ADDRESS = 1 << 40
ROOM = 1 << 16  # bytes between the starts of arrays, more than any of them has
WRITTEN = {
    "gated_delta_recurrence_fwd": ("recurrent_state", "out"),
    "gated_delta_recurrence_verify_ring": ("recurrent_state", "ring", "out"),
    "gated_delta_state_fold": ("recurrent_state",),
}


class Launched(NamedTuple):
    """A launch as the driver would see it, and the device that was current."""

    variant: Variant
    grid_and_block: tuple[int, ...]
    shared_bytes: int
    stream: int
    arguments: tuple[int, ...]
    device: int


class Gpu:
    """What CuPy and the driver do, written down. `num_checked` counts calls that went through all checks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launched: list[Launched] = []
        self.num_checked = 0
        self.num_contexts = 0
        self.current_device = 0
        self._variants: list[Variant] = []
        gpu = self

        class Device:
            def __init__(self, device: int) -> None:
                self.device = device

            def __enter__(self) -> None:
                self.before, gpu.current_device = gpu.current_device, self.device

            def __exit__(self, *reason: object) -> None:
                gpu.current_device = self.before

        def load(variant: Variant, device: int) -> Any:
            self._variants.append(variant)
            return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self._variants) - 1))

        def set_device(device: int) -> None:
            assert device == self.current_device
            self.num_contexts += 1

        def checked(*given: Any, right: Callable[..., Any] = rules.recurrence_inputs, **keywords: Any) -> Any:
            self.num_checked += 1
            return right(*given, **keywords)

        monkeypatch.setattr(rules, "recurrence_inputs", checked)
        monkeypatch.setattr(rules, "fold_inputs", lambda *given, right=rules.fold_inputs: checked(*given, right=right))
        for name in ("gate_inputs", "conv1d_inputs", "commit_inputs"):
            monkeypatch.setattr(layer_rules, name, partial(checked, right=getattr(layer_rules, name)))
        monkeypatch.setattr(plans, "_plans", plans._Plans())
        monkeypatch.setattr(cuda, "_thread", cuda._Thread())
        monkeypatch.setattr(cuda, "require_device", lambda device: None)
        monkeypatch.setattr(cuda, "load", load)
        monkeypatch.setattr(cupy.cuda, "Device", Device)
        monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: SimpleNamespace(ptr=100 + device))
        monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: self.current_device)
        monkeypatch.setattr(cupy.cuda.runtime, "setDevice", set_device)
        monkeypatch.setattr(cupy.cuda.driver, "launchKernel", self._launch)

    def _launch(self, function: int, *numbers: int) -> None:
        *grid_and_block, shared_bytes, stream, addresses, extra = numbers
        variant = self._variants[function]
        count = len(variant.kernel.parameters)
        pointers = (ctypes.c_void_p * count).from_address(addresses)
        arguments = tuple(ctypes.c_int64.from_address(pointer).value for pointer in pointers)
        assert extra == 0
        device = self.current_device
        self.launched.append(Launched(variant, tuple(grid_and_block), shared_bytes, stream, arguments, device))

    def last(self, run: Callable[[], object], *, num_checked: int) -> Launched:
        """The one launch of `run`, in which so many calls are checked in full."""
        launched, checked = len(self.launched), self.num_checked
        run()
        assert len(self.launched) == launched + 1
        assert self.num_checked == checked + num_checked
        return self.launched[-1]

    def refuses(self, run: Callable[[], object]) -> GdnError:
        """The error of `run`, which launches nothing."""
        launched = len(self.launched)
        with pytest.raises(GdnError) as caught:
            run()
        assert len(self.launched) == launched
        return caught.value


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """No plan is known, and nothing was launched."""
    with monkeypatch.context() as patch:
        yield Gpu(patch)


class OnGpu:
    """The call of `tests/conftest.py` on CuPy arrays at addresses of our choice."""

    def __init__(self, call: Call, first: int = 0) -> None:
        self.op = call.op
        self.arrays: dict[str, Any] = {}
        for number, (name, values) in enumerate(call.arguments.items()):
            self.place(name, first + number * ROOM, values.shape, values.dtype)

    def place(
        self,
        name: str,
        address: int,
        shape: tuple[int, ...] | None = None,
        dtype: Any = None,
        strides: tuple[int, ...] | None = None,
        device: int = 0,
    ) -> None:
        """Put an array at another address, by default as it is."""
        before = self.arrays.get(name)
        if before is not None:
            shape = before.shape if shape is None else shape
            dtype = before.dtype if dtype is None else dtype
            strides = before.strides if strides is None else strides
        memory = cupy.cuda.UnownedMemory(FIRST_ADDRESS, 1 << 40, None, device)
        pointer = cupy.cuda.MemoryPointer(memory, address)
        self.arrays[name] = cupy.ndarray(shape, dtype, pointer, strides)

    def at(self, name: str) -> int:
        """Where an array lies, from the first address."""
        return int(self.arrays[name].data.ptr) - FIRST_ADDRESS

    def run(self) -> Any:
        """The op."""
        positional = [array for name, array in self.arrays.items() if name != "out"]
        return self.op(*positional, **{name: array for name, array in self.arrays.items() if name == "out"})

    def warm_up(self, call: Call) -> Callable[[], Any]:
        """Warm up for calls like `call` on these arrays; returns the op on them."""
        call.arguments = self.arrays
        gdn.warmup(call.op, *call.six, **call.keywords)
        return lambda: call.op(*call.six, **call.keywords)


@pytest.fixture(params=["fwd", "verify", "fold"])
def call(request: pytest.FixtureRequest, new_verify: type[VerifyCall], new_fold: type[FoldCall]) -> Call:
    """A call of each op."""
    if request.param == "fwd":
        fixture: Call = request.getfixturevalue("call_of_fwd")
        return fixture
    return new_verify() if request.param == "verify" else new_fold()


@pytest.fixture
def call_of_fwd(new_call: type[Call]) -> Call:
    return new_call()


def checked_in_full(gpu: Gpu, call: OnGpu) -> Launched:
    """The launch of a call that finds no plan."""
    plans._plans.by_kind.clear()
    return gpu.last(call.run, num_checked=1)


def test_a_call_of_a_kind_that_ran_is_not_checked_again_and_launches_the_same(gpu: Gpu, call: Call) -> None:
    first, second = OnGpu(call), OnGpu(call, first=1 << 30)
    launch = gpu.last(first.run, num_checked=1)
    assert gpu.last(first.run, num_checked=0) == launch
    moved = gpu.last(second.run, num_checked=0)
    assert moved == checked_in_full(gpu, second)
    assert moved.arguments != launch.arguments
    assert gpu.last(first.run, num_checked=0) == launch
    expected = {FIRST_ADDRESS + second.at(name) for name in second.arrays}
    kinds = [kind for _, kind in moved.variant.kernel.parameters]
    found = {value for kind, value in zip(kinds, moved.arguments, strict=True) if kind == "pointer"}
    assert found == expected


def test_what_an_op_returns(gpu: Gpu, call: Call) -> None:
    on_gpu = OnGpu(call)
    for _ in range(2):
        assert on_gpu.run() is on_gpu.arrays.get("out")


CHANGES: dict[str, Callable[[OnGpu], None]] = {
    "shape": lambda call: call.place(
        "recurrent_state", call.at("recurrent_state"), (9, 2, 8, 8), strides=(512, 256, 32, 4)
    ),
    "stride": lambda call: call.place("recurrent_state", call.at("recurrent_state"), strides=(1024, 256, 32, 4)),
    "type": lambda call: call.place(
        "recurrent_state", call.at("recurrent_state"), dtype="f2", strides=(256, 128, 16, 2)
    ),
    "alignment": lambda call: call.place("recurrent_state", call.at("recurrent_state") + 8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_of_another_kind_is_checked_and_launched_anew(gpu: Gpu, call: Call, change: str) -> None:
    plain, changed = OnGpu(call), OnGpu(call)
    CHANGES[change](changed)
    launch = gpu.last(plain.run, num_checked=1)
    other = gpu.last(changed.run, num_checked=1)
    assert other != launch
    assert other == gpu.last(changed.run, num_checked=0) == checked_in_full(gpu, changed)


@pytest.mark.parametrize("name", ["qkv_conv_output", "recurrent_state", "out"])
def test_an_address_that_forbids_wide_accesses_gets_another_kernel(gpu: Gpu, call_of_fwd: Call, name: str) -> None:
    plain, shifted = OnGpu(call_of_fwd), OnGpu(call_of_fwd)
    shifted.place(name, shifted.at(name) + 4)
    assert ("IS_PACKED", "true") in gpu.last(plain.run, num_checked=1).variant.macros
    for num_checked in (1, 0):
        assert ("IS_PACKED", "false") in gpu.last(shifted.run, num_checked=num_checked).variant.macros
    assert ("IS_PACKED", "true") in gpu.last(plain.run, num_checked=0).variant.macros


def test_a_forced_map_has_plans_of_its_own(gpu: Gpu, call: Call) -> None:
    on_gpu = OnGpu(call)
    plain = gpu.last(on_gpu.run, num_checked=1)
    for num_checked in (1, 0):
        with forced_row_tile(RowTile(1, 8, 1)):
            forced = gpu.last(on_gpu.run, num_checked=num_checked)
        assert ("LANES_PER_ROW", "8") in forced.variant.macros
        assert forced.variant != plain.variant
        assert gpu.last(on_gpu.run, num_checked=0) == plain


def test_one_op_does_not_take_the_plan_of_another(gpu: Gpu, call_of_fwd: Call) -> None:
    call = OnGpu(call_of_fwd)
    gpu.last(call.run, num_checked=1)

    def rules_of_another(*given: Any) -> calls.Checked:
        return rules.fwd_rules(*given)

    *six, out = call.arrays.values()
    gpu.last(lambda: calls.run(rules_of_another, *six, None, None, None, out), num_checked=1)


def test_a_call_after_a_warmup_is_not_checked_again(gpu: Gpu, new_op_call: Callable[..., Call]) -> None:
    call = new_op_call()
    run = OnGpu(call).warm_up(call)
    assert gpu.launched == []
    launch = gpu.last(run, num_checked=0)
    plans._plans.by_kind.clear()
    assert gpu.last(run, num_checked=1) == launch


def test_strides_of_any_size_and_sign_reach_a_launch_whole(gpu: Gpu, call: Call) -> None:
    """Beside field case 78: strides beyond 32 bits and below 0, checked in full and by the plan of a kind."""
    on_gpu = OnGpu(call)
    table = "num_accepted" if "num_accepted" in on_gpu.arrays else "slot_idx"
    on_gpu.place("recurrent_state", 1 << 50, strides=(1 << 42, 256, 32, 4))
    on_gpu.place(table, 1 << 48, strides=(-(1 << 36),))
    launch = gpu.last(on_gpu.run, num_checked=1)
    assert {1 << 40, -(1 << 34)} <= set(launch.arguments)
    assert gpu.last(on_gpu.run, num_checked=0) == launch


# ---- Overlap, which addresses decide ----


def pairs(call: Call) -> Iterator[tuple[str, str]]:
    """Each array that a call writes, with each other one."""
    for written in WRITTEN[call.op.__name__]:
        for other in call.arguments:
            if other != written:
                yield written, other


def test_overlap_is_refused_of_a_kind_that_ran(gpu: Gpu, call: Call) -> None:
    OnGpu(call).run()
    far = 1 << 30
    for written, other in pairs(call):
        for low, high in ((written, other), (other, written)):
            beside = OnGpu(call)
            beside.place(low, far)
            end = far + beside.arrays[low].nbytes
            aligned_end = -(-end // arrays.ALIGNMENT) * arrays.ALIGNMENT
            beside.place(high, aligned_end)
            gpu.last(beside.run, num_checked=0)
            beside.place(high, aligned_end - arrays.ALIGNMENT)
            error = gpu.refuses(beside.run)
            assert isinstance(error, LayoutError)
            assert "overlapping arrays" in str(error)
            plans._plans.by_kind.clear()
            assert str(gpu.refuses(beside.run)) == str(error)
            OnGpu(call).run()


def test_an_array_written_twice_is_refused_of_a_kind_that_ran(gpu: Gpu, new_verify: type[VerifyCall]) -> None:
    """All arrays at one address, as if memory had been given back and handed out again."""
    call = OnGpu(new_verify())
    call.run()
    for name in call.arrays:
        call.place(name, 0)
    assert isinstance(gpu.refuses(call.run), LayoutError)


def test_arrays_that_interleave(gpu: Gpu, call_of_fwd: Call) -> None:
    """Readout and channels as slices of one buffer: apart at one distance, and found so once; not at others."""

    def slices(first: int, columns: int) -> OnGpu:
        call = OnGpu(call_of_fwd)
        row = 4 * (32 + 32 + 16)
        call.place("qkv_conv_output", first, strides=(row, 4))
        call.place("out", first + 4 * columns, strides=(row, 4))
        return call

    launch = gpu.last(slices(1 << 30, 32).run, num_checked=1)
    moved = gpu.last(slices(1 << 31, 32).run, num_checked=0)
    assert moved.arguments != launch.arguments
    gpu.last(slices(1 << 30, 64).run, num_checked=1)  # apart too, but for the checks to see
    assert isinstance(gpu.refuses(slices(1 << 30, 28).run), LayoutError)
    gpu.last(slices(1 << 30, 64).run, num_checked=0)


def test_an_empty_array_overlaps_nothing(gpu: Gpu, new_call: type[Call]) -> None:
    call = OnGpu(new_call(lengths=()))
    call.place("qkv_conv_output", 0, shape=(3, 32), strides=(128, 4))
    for name in ("decay_per_token", "beta_per_token"):
        call.place(name, call.at(name), shape=(3, 2), strides=(8, 4))
    call.place("out", call.at("out"), shape=(3, 16), strides=(64, 4))
    call.run()
    call.place("slot_idx", call.at("recurrent_state") + arrays.ALIGNMENT)
    assert gpu.last(call.run, num_checked=0) == checked_in_full(gpu, call)


# ---- What no plan may let through ----


def test_refusals_of_other_kinds_stay(gpu: Gpu, call_of_fwd: Call) -> None:
    OnGpu(call_of_fwd).run()
    wrong: list[tuple[type[GdnError], Callable[[OnGpu], None]]] = [
        (ShapeError, lambda call: call.place("out", call.at("out"), shape=(3, 8), strides=(64, 4))),
        (DTypeError, lambda call: call.place("slot_idx", call.at("slot_idx"), dtype="f4")),
        (DTypeError, lambda call: call.place("qkv_conv_output", call.at("qkv_conv_output"), dtype=">f4")),
        (LayoutError, lambda call: call.place("out", call.at("out"), strides=(0, 4))),
        (LayoutError, lambda call: call.place("out", call.at("out") + 2)),
        (DeviceError, lambda call: call.place("out", call.at("out"), device=1)),
        (DeviceError, lambda call: call.arrays.update(out=np.zeros((3, 16), np.float32))),
        (DTypeError, lambda call: call.arrays.update(slot_idx=[0, 1])),
    ]
    for error_class, change in wrong:
        call = OnGpu(call_of_fwd)
        change(call)
        assert type(gpu.refuses(call.run)) is error_class


def test_a_readout_that_is_made_is_made_each_time(gpu: Gpu, call_of_fwd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    call, other = OnGpu(call_of_fwd), OnGpu(call_of_fwd, first=1 << 30)
    made = [call.arrays.pop("out"), other.arrays["out"]]
    monkeypatch.setattr(arrays, "empty", lambda *_: made.pop(0))
    position = [name for name, _ in gpu.last(call.run, num_checked=1).variant.kernel.parameters].index("out")
    assert gpu.last(call.run, num_checked=1).arguments[position] == FIRST_ADDRESS + other.at("out")


def test_a_readout_that_is_made_and_empty_is_made_each_time(
    gpu: Gpu, new_call: type[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CuPy gives an empty array the address 0, like that of an array left out."""
    call = OnGpu(new_call(lengths=(0, 0)))
    call.arrays.pop("out")
    nowhere = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)
    monkeypatch.setattr(arrays, "empty", lambda *_: cupy.ndarray((0, 16), "f4", nowhere))
    assert [type(call.run()) for _ in range(3)] == [cupy.ndarray] * 3


def test_an_address_of_something_else_makes_no_plan(
    gpu: Gpu, call_of_fwd: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch may take memory that the call was not given; nobody would put that of the next call there."""
    right = rules.fwd_kernel.launch

    def launch(*call: Any) -> Any:
        made = right(*call)
        variant = type(made.variant)(made.variant.kernel, (*made.variant.macros, ("SHARED_BYTES", "64")))
        return type(made)(variant, made.num_blocks, made.threads_per_block, (12345, *made.arguments[1:]))

    monkeypatch.setattr(rules.fwd_kernel, "launch", launch)
    call = OnGpu(call_of_fwd)
    for _ in range(2):
        launched = gpu.last(call.run, num_checked=1)
        assert (launched.arguments[0], launched.shared_bytes) == (12345, 64)


def test_plans_are_bounded(gpu: Gpu, call_of_fwd: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "MAX_PLANS", 3)
    for shift in (0, 4, 8, 12):
        call = OnGpu(call_of_fwd)
        call.place("out", call.at("out") + shift)
        call.run()
        assert 1 <= len(plans._plans.by_kind) <= 3
    gpu.last(call.run, num_checked=0)


# ---- Threads and devices ----


def test_each_thread_makes_its_own_plans_and_its_context(gpu: Gpu, call_of_fwd: Call) -> None:
    """Two threads must not write to one launch, and a thread's first launch needs a context."""
    call = OnGpu(call_of_fwd)
    call.run()
    assert gpu.num_contexts == 1
    with ThreadPoolExecutor(1) as pool:
        for num_checked in (1, 0):
            pool.submit(gpu.last, call.run, num_checked=num_checked).result(10)
    assert gpu.num_contexts == 2


def test_a_bound_call_makes_the_context_of_another_thread(gpu: Gpu, call_of_fwd: Call) -> None:
    call = OnGpu(call_of_fwd)
    out = call.arrays.pop("out")
    bound = ops.bind(call.op, *call.arrays.values(), out=out)
    assert gpu.launched == []
    first = gpu.last(bound, num_checked=0)
    with ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            assert pool.submit(gpu.last, bound, num_checked=0).result(10) == first
    assert gpu.num_contexts == 2


def test_a_call_runs_where_its_arrays_are(gpu: Gpu, call_of_fwd: Call) -> None:
    """Field case 80."""
    call = OnGpu(call_of_fwd)
    for name in call.arrays:
        call.place(name, call.at(name), device=1)
    for num_checked in (1, 0):
        launched = gpu.last(call.run, num_checked=num_checked)
        assert (launched.device, launched.stream) == (1, 101)
        assert gpu.current_device == 0
    gpu.current_device = 1
    assert gpu.last(call.run, num_checked=0) == launched
    for name in call.arrays:
        call.place(name, call.at(name), device=0)
    launched = gpu.last(call.run, num_checked=1)
    assert (launched.device, launched.stream) == (0, 100)


def test_a_call_runs_on_the_stream_that_is_current_then(
    gpu: Gpu, call: Call, by_chunks: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside field case 83: not on that of the binding, of the plan, or of the first of several launches alone."""
    streams = iter(range(1, 100))
    monkeypatch.setattr(cupy.cuda, "get_current_stream", lambda device: SimpleNamespace(ptr=current))
    on_gpu, chunked = OnGpu(call), by_chunks()
    current = next(streams)
    out = on_gpu.arrays.get("out")
    bound = ops.bind(
        call.op,
        *(array for name, array in on_gpu.arrays.items() if name != "out"),
        **({} if out is None else {"out": out}),
    )
    runs = (on_gpu.run, bound, lambda: chunked.op(*chunked.six, **chunked.keywords))
    for run in 3 * runs:
        current, before = next(streams), len(gpu.launched)
        run()
        launched = gpu.launched[before:]
        assert {each.stream for each in launched} == {current}
        assert len(launched) == (3 if run is runs[-1] else 1)


# ---- Calls of several launches ----


@pytest.fixture
def by_chunks(gpu: Gpu, new_call: type[Call], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Call]:
    """Makes a call by chunks on CuPy arrays, with a workspace."""
    monkeypatch.setattr(cuda, "num_multiprocessors", lambda device: 10)
    monkeypatch.setattr(cuda, "shared_bytes_of_multiprocessor", lambda device: 200_000)
    monkeypatch.setattr(cuda, "capability", lambda device: (8, 0))

    def make(algorithm: str = "chunked", lengths: tuple[int, ...] = (130, 3), device: int = 0) -> Call:
        call = new_call((1, 2, 32, 32), lengths)
        call["workspace"] = np.empty(1 << 21, np.uint8)
        arrays = OnGpu.__new__(OnGpu)
        arrays.arrays = {}
        for number, (name, values) in enumerate(call.arguments.items()):
            arrays.place(name, number << 22, values.shape, values.dtype, device=device)
        call.arguments = {**arrays.arrays, "algorithm": algorithm}
        return call

    return make


def launched_by(gpu: Gpu, call: Call, *, num_checked: int) -> list[Launched]:
    launched, checked = len(gpu.launched), gpu.num_checked
    assert call.op(*call.six, **call.keywords) is call["out"]
    assert gpu.num_checked == checked + num_checked
    return gpu.launched[launched:]


def test_a_call_of_several_launches(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    call = by_chunks()
    first, second = (launched_by(gpu, call, num_checked=number) for number in (1, 0))
    assert first == second
    _, prepare, walk = first
    stems = [launched.variant.kernel.stem.removeprefix("gated_delta_chunk_") for launched in first]
    assert stems == ["plan", "prepare", "walk"]
    assert [launched.grid_and_block[::3] for launched in first] == [(4, 1024), (5, 256), (4, 64)]
    assert [launched.shared_bytes for launched in first] == [
        0,
        *(int(dict(launched.variant.macros)["SHARED_BYTES"]) for launched in (prepare, walk)),
    ]
    workspace = {"chunk_plan": call["workspace"].data.ptr}
    for launched in first:
        values = dict(zip(dict(launched.variant.kernel.parameters), launched.arguments, strict=True))
        for name in call.arguments.keys() & values.keys():
            assert values[name] == call[name].data.ptr
        parts = {name: values[name] for name in ("chunk_plan", "slab", "carry_in", "carry_out") if name in values}
        workspace |= parts
        assert parts.items() <= workspace.items()
    assert workspace["chunk_plan"] < workspace["carry_in"] < workspace["carry_out"] < workspace["slab"]


@pytest.mark.parametrize(("algorithm", "lengths", "count"), [("chunked", (130, 3), 3), ("auto", (130, 3, 200), 4)])
@pytest.mark.parametrize(("moved_by", "num_checked"), [(1 << 20, 0), (256, 0), (16, 1)])
def test_parts_of_a_workspace_move_with_it(
    gpu: Gpu,
    by_chunks: Callable[..., Call],
    algorithm: str,
    lengths: tuple[int, ...],
    count: int,
    moved_by: int,
    num_checked: int,
) -> None:
    """By the plan of the kind where they keep their distances from its start, else found anew."""
    call, moved = by_chunks(algorithm, lengths), by_chunks(algorithm, lengths)
    first = launched_by(gpu, call, num_checked=1)
    workspace = moved["workspace"]
    place = cupy.cuda.MemoryPointer(workspace.data.mem, workspace.data.ptr - FIRST_ADDRESS + moved_by)
    moved["workspace"] = cupy.ndarray(workspace.shape, workspace.dtype, place)
    by_plan = launched_by(gpu, moved, num_checked=num_checked)
    plans._plans.by_kind.clear()
    assert by_plan == launched_by(gpu, moved, num_checked=1)
    assert len(by_plan) == len(first) == count
    assert all(one.arguments != other.arguments for one, other in zip(first, by_plan, strict=True))
    assert launched_by(gpu, call, num_checked=1 if moved_by % 256 else 0) == first


def test_slabs_have_a_plan(gpu: Gpu, by_chunks: Callable[..., Call], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", 100_000)
    call = by_chunks("chunked", (1000,))
    first, second = (launched_by(gpu, call, num_checked=number) for number in (1, 0))
    assert first == second
    assert len(first) > 6


def test_chunks_behind_pending_records_have_no_plan(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    """Their fold takes tables by other names, two of which may be one array: they are found anew each time."""
    call = by_chunks()
    table = call["slot_idx"]
    ring = cupy.ndarray(
        (3, 1, 4, call.heads.record_elements), np.float32, cupy.cuda.MemoryPointer(table.data.mem, 1 << 30)
    )
    call.arguments |= {"ring": ring, "pending_ring_slot_idx": table, "num_pending": table}
    first, second = (launched_by(gpu, call, num_checked=1) for _ in range(2))
    assert first == second
    moved = cupy.ndarray(table.shape, table.dtype, cupy.cuda.MemoryPointer(table.data.mem, 1 << 31))
    call["num_pending"] = moved
    fold, *rest = launched_by(gpu, call, num_checked=1)
    assert rest == first[1:]
    values = dict(zip(dict(fold.variant.kernel.parameters), fold.arguments, strict=True))
    assert (values["row_ids"], values["num_accepted"]) == (table.data.ptr, moved.data.ptr)


def test_a_workspace_that_comes_to_overlap(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    call = by_chunks()
    launched_by(gpu, call, num_checked=1)
    call["workspace"] = cupy.ndarray(call["workspace"].shape, np.uint8, call["recurrent_state"].data)
    error = gpu.refuses(lambda: call.op(*call.six, **call.keywords))
    assert "overlapping arrays" in str(error)


def test_a_bound_call_of_several_launches(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    call = by_chunks("auto", (130, 3, 200))
    expected = launched_by(gpu, call, num_checked=1)
    run = gdn.ops.bind(call.op, *call.six, **call.keywords)
    gdn.warmup(call.op, *call.six, **call.keywords)
    launched = len(gpu.launched)
    for _ in range(2):
        run()
    assert gpu.launched[launched:] == 2 * expected
    assert len(expected) == 4


def test_all_launches_of_a_call_run_where_its_arrays_are(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    """Beside field case 80: several kernels and a bound call, whichever device is current meanwhile."""
    call = by_chunks("auto", (130, 3, 200), device=1)
    bound = ops.bind(call.op, *call.six, **call.keywords)
    for current in (0, 1, 2):
        gpu.current_device = current
        for run in (bound, lambda: call.op(*call.six, **call.keywords)):
            launched = len(gpu.launched)
            run()
            assert [(each.device, each.stream) for each in gpu.launched[launched:]] == [(1, 101)] * 4
            assert gpu.current_device == current


def test_a_short_call_of_auto_has_a_plan(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    short = by_chunks("auto", (124, 3))
    first, second = (launched_by(gpu, short, num_checked=number) for number in (1, 0))
    assert first == second == launched_by(gpu, by_chunks("recurrent", (124, 3)), num_checked=1)
    launched_by(gpu, by_chunks("chunked", (124, 3)), num_checked=1)


def test_a_workspace_in_another_place(gpu: Gpu, by_chunks: Callable[..., Call]) -> None:
    call = by_chunks()
    call["workspace"] = np.empty(1 << 21, np.uint8)
    error = gpu.refuses(lambda: call.op(*call.six, **call.keywords))
    assert isinstance(error, DeviceError)
    assert str(error) == "workspace: expected an array on cuda:0, where qkv_conv_output is, got one on cpu"


def test_no_workspace_is_made_in_a_capture(
    gpu: Gpu, by_chunks: Callable[..., Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gdn.arrays.is_capturing", lambda device: True)
    call = by_chunks()
    assert len(launched_by(gpu, call, num_checked=1)) == 3
    call["workspace"] = None
    error = gpu.refuses(lambda: call.op(*call.six, **call.keywords))
    assert str(error).startswith("workspace: expected an array to write to, which a stream capture does not make")
