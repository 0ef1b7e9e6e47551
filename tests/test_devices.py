"""Several GPUs: a call runs where its arrays are, whatever CuPy's current device is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

import gdn
from gdn import plans
from gdn.errors import DeviceError

if TYPE_CHECKING:
    from tests.conftest import Call

NewOpCall = Callable[..., "Call"]


@pytest.fixture
def num_devices() -> int:
    """At least two."""
    import cupy

    count = int(cupy.cuda.runtime.getDeviceCount())
    if count < 2:
        pytest.skip("one GPU")
    return count


def put(call: Call, device: int) -> Call:
    """The call with arrays on one device."""
    import cupy

    with cupy.cuda.Device(device):
        call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
        cupy.cuda.Device().synchronize()
    return call


def bits(call: Call) -> dict[str, bytes]:
    """The memory of all arrays of a call, once its device has done everything."""
    import cupy

    with cupy.cuda.Device(next(iter(call.arguments.values())).device.id) as device:
        device.synchronize()
        return {name: array.get().tobytes() for name, array in call.arguments.items()}


@pytest.mark.gpu
def test_every_device_computes_the_same_bits(new_op_call: NewOpCall, num_devices: int) -> None:
    """Field case 80 and promise E5: in turn, with another device current, cold and by a plan of its own."""
    import cupy

    first = put(new_op_call(), 0)
    first.run("cuda")
    expected = bits(first)
    for repeat in range(2):
        for device in range(num_devices):
            for current in {0, device, (device + 1) % num_devices}:
                call = put(new_op_call(), device)
                with cupy.cuda.Device(current):
                    call.run("cuda")
                    assert cupy.cuda.runtime.getDevice() == current
                assert bits(call) == expected, (repeat, device, current)


@pytest.mark.gpu
def test_each_device_has_plans_of_its_own(
    new_op_call: NewOpCall, num_devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plans, "_plans", plans._Plans())
    for count, device in enumerate((0, 1, 0, 1)):
        put(new_op_call(), device).run("cuda")
        assert len(plans._plans.by_kind) == min(count + 1, 2)


@pytest.mark.gpu
def test_a_readout_is_made_where_the_arrays_are(new_op_call: NewOpCall, num_devices: int) -> None:
    """Beside field case 80: what a call allocates itself is on the device of its arrays, not on the current one."""
    import cupy

    call, given = put(new_op_call(), 1), put(new_op_call(), 1)
    expected = given.run("cuda")
    keywords = {name: value for name, value in call.keywords.items() if name != "out"}
    with cupy.cuda.Device(0):
        result = call.op(*call.six, **keywords)
    if expected is None:
        pytest.skip("this op returns nothing")
    pairs = zip(*((value if isinstance(value, tuple) else (value,)) for value in (result, expected)), strict=True)
    with cupy.cuda.Device(1):
        for made, same in pairs:
            assert made.device.id == 1
            assert made.get().tobytes() == same.get().tobytes()


@pytest.mark.gpu
def test_a_call_goes_to_the_current_stream_of_its_device(new_op_call: NewOpCall, num_devices: int) -> None:
    """Which is that of device 1, though device 0 is the current one with a stream of its own: a capture shows it."""
    import cupy

    call, plain = put(new_op_call(), 1), put(new_op_call(), 1)
    gdn.warmup(call.op, *call.six, **call.keywords)
    before = bits(call)
    with cupy.cuda.Device(0):
        stream_of_first = cupy.cuda.Stream(non_blocking=True)
    with cupy.cuda.Device(1):
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            with cupy.cuda.Device(0), stream_of_first:
                call.run("cuda")
            graph = stream.end_capture()
        assert bits(call) == before
        graph.launch(stream)
        stream.synchronize()
    plain.run("cuda")
    assert bits(call) == bits(plain) != before


@pytest.mark.gpu
def test_arrays_on_two_devices_are_refused(new_op_call: NewOpCall, num_devices: int) -> None:
    """Each argument in turn, all others being on device 0."""
    call, elsewhere = put(new_op_call(), 0), put(new_op_call(), 1)
    call.run("cuda")  # a plan must not let them through
    before = bits(call)
    first, *others = call.arguments
    for name in others:
        here, call[name] = call[name], elsewhere[name]
        with pytest.raises(
            DeviceError, match=rf"^{name}: expected an array on cuda:0, where \w+ is, got one on cuda:1$"
        ):
            call.run("cuda")
        call[name] = here
    here, call[first] = call[first], elsewhere[first]
    with pytest.raises(DeviceError, match=r"expected an array on cuda:[01], where \w+ is, got one on cuda:[01]$"):
        call.run("cuda")
    call[first] = here
    assert bits(call) == before


@pytest.mark.gpu
def test_torch_tensors_on_another_device(new_op_call: NewOpCall, num_devices: int) -> None:
    torch: Any = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("this PyTorch has less than two GPUs")
    call, plain = new_op_call(), put(new_op_call(), 0)
    plain.run("cuda")
    tensors = {name: torch.from_numpy(array).to("cuda:1") for name, array in call.arguments.items()}
    call.arguments = tensors
    call.run("cuda")
    torch.cuda.synchronize(1)
    for name, values in bits(plain).items():
        assert tensors[name].cpu().numpy().tobytes() == values, name
