"""Arrays of PyTorch and JAX: taken without a copy, written in place, results as with arrays of our own."""

from __future__ import annotations

import ast
import ctypes
import gc
import os
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from gdn import arrays, dlpack, ops
from gdn.arrays import DTYPES, take
from gdn.errors import DTypeError, GdnError, LayoutError

if TYPE_CHECKING:
    from tests.conftest import Call

BFLOAT16 = DTYPES["bfloat16"]


class OfAnotherLibrary:
    """The memory of a NumPy array as a library shows it that has bfloat16, which NumPy does not export.

    is_versioned: whether it speaks DLPack 1.0, in which memory may be said to be writable.
    """

    def __init__(self, array: Any, device: tuple[int, int] = (1, 0), *, is_versioned: bool = True) -> None:
        if is_versioned and np.lib.NumpyVersion(np.__version__) < "2.1.0":
            pytest.skip("this NumPy does not speak DLPack 1.0, with which another library would")
        self.array, self.device, self.is_versioned = array, device, is_versioned

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **keywords: Any) -> Any:
        if keywords and not self.is_versioned:
            raise TypeError("unexpected keyword argument")
        is_bfloat16 = self.array.dtype == BFLOAT16
        capsule = (self.array.view(np.uint16) if is_bfloat16 else self.array).__dlpack__(**keywords)
        if is_bfloat16:
            dlpack.read(capsule)[0].type_code = 4
        return capsule


def bits(call: Call) -> dict[str, bytes]:
    """The memory of all arrays of a call."""
    return {name: array.tobytes() for name, array in call.arguments.items()}


def run_as(call: Call, convert: Callable[[Any], Any], backend: str) -> Any:
    """Run a call on what `convert` makes of its arrays; returns what the op does."""
    kept = dict(call.arguments)
    call.arguments = {name: convert(array) for name, array in kept.items()}
    try:
        return call.run(backend)
    finally:
        call.arguments = kept


def outputs(result: Any) -> tuple[Any, ...]:
    """The arrays that an op returned."""
    return () if result is None else result if isinstance(result, tuple) else (result,)


# ---- On a CPU, by DLPack, whoever speaks it ----


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device", [(1, 0), (3, 0)], ids=["plain", "pinned"])
def test_memory_of_another_library(new_op_call: Callable[..., Call], dtype: str, device: tuple[int, int]) -> None:
    call, plain = (new_op_call(dtype) for _ in range(2))
    result = run_as(call, lambda array: OfAnotherLibrary(array, device), "numpy")
    expected = plain.run()
    assert bits(call) == bits(plain)
    for array, same in zip(outputs(result), outputs(expected), strict=True):
        assert type(array) is np.ndarray
        assert array.dtype == same.dtype
        assert array.tobytes() == same.tobytes()


@pytest.mark.parametrize("is_versioned", [False, True])
@pytest.mark.parametrize("strides", [slice(None), (slice(None), slice(None, None, -2)), slice(0, 0)])
def test_bfloat16_is_described_as_it_lies(strides: Any, is_versioned: bool) -> None:
    array = np.arange(24).reshape(4, 6).astype(BFLOAT16)[strides]
    taken, plain = take("a", OfAnotherLibrary(array, is_versioned=is_versioned)), take("a", array)
    assert taken._replace(array=None) == plain._replace(array=None)
    assert taken.array.tobytes() == array.tobytes()
    assert taken.array.flags.writeable == is_versioned


def test_memory_that_is_said_to_be_read_only_is() -> None:
    array = np.zeros(3, BFLOAT16)
    assert take("a", OfAnotherLibrary(array)).array.flags.writeable
    array.flags.writeable = False
    assert not take("a", OfAnotherLibrary(array)).array.flags.writeable


def test_memory_that_nobody_says_may_be_written_is_not(call: Call, cpu_backend: str) -> None:
    for name in ("recurrent_state", "out"):
        before = call[name]
        call[name] = OfAnotherLibrary(before, is_versioned=False)
        assert call.refusal(LayoutError, cpu_backend) == f"{name}: expected a writable array, got a read-only one"
        call[name] = before


def of_capsule(change: Callable[[Any], Any]) -> Any:
    """Memory whose capsule was changed."""

    class Wrong(OfAnotherLibrary):
        def __dlpack__(self, **keywords: Any) -> Any:
            capsule = super().__dlpack__(**keywords)
            return change(capsule) or capsule

    return Wrong(np.zeros(3, np.float32))


def set_field(name: str, value: int) -> Callable[[Any], None]:
    return lambda capsule: setattr(dlpack.read(capsule)[0], name, value)


def set_major_version(capsule: Any) -> None:
    ctypes.c_uint32.from_address(ctypes.addressof(dlpack.read(capsule)[0]) - 32).value = 2  # 32 bytes before the tensor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_major_version, r"DLPack 2\.\d, later than 1"),
        (lambda capsule: 3, "int instead of a DLPack capsule"),
        (set_field("type_code", 3), "DLPack type 3 of 32 bits and 1 lanes"),
        (set_field("lanes", 4), "DLPack type 2 of 32 bits and 4 lanes"),
        (set_field("bits", 4), "DLPack type 2 of 4 bits and 1 lanes"),
    ],
)
def test_a_capsule_that_numpy_has_no_type_for(change: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(DTypeError, match=rf"^a: expected an array whose memory can be shared, got .*Wrong: {words}$"):
        take("a", of_capsule(change))


def test_memory_is_given_back_once() -> None:
    """When the last array over it is gone, and not before."""
    memory = np.full(100, 3, BFLOAT16)
    producer = OfAnotherLibrary(memory)
    del memory
    arrays_over_it = [take("a", producer).array for _ in range(3)]
    views = [array[5:] for array in arrays_over_it]
    del arrays_over_it
    gc.collect()
    assert all((view == BFLOAT16.type(3)).all() for view in views)
    watched = weakref.ref(producer.array)
    del producer
    gc.collect()
    assert watched() is not None
    views.clear()
    gc.collect()
    assert watched() is None


def test_a_copy_is_no_help() -> None:
    class Copying(OfAnotherLibrary):
        def __dlpack__(self, **keywords: Any) -> Any:
            if keywords.get("copy", False) is False:
                raise BufferError("this needs a copy")
            return super().__dlpack__(**keywords)

    with pytest.raises(DTypeError, match=r"Copying: this needs a copy$"):
        take("a", Copying(np.zeros(3, np.float32)))


# ---- PyTorch on a CPU ----


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def to_torch(array: Any) -> Any:
    """A tensor over the memory of a NumPy array."""
    import torch

    if array.dtype != BFLOAT16:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_torch_tensors_on_a_cpu(torch: Any, new_op_call: Callable[..., Call], cpu_backend: str, dtype: str) -> None:
    call, plain = (new_op_call(dtype) for _ in range(2))
    result = run_as(call, to_torch, cpu_backend)
    expected = plain.run(cpu_backend)
    assert bits(call) == bits(plain)
    for array, same in zip(outputs(result), outputs(expected), strict=True):
        assert array.tobytes() == same.tobytes()


def test_torch_views_are_taken_as_they_lie(torch: Any) -> None:
    tensor = torch.arange(48, dtype=torch.bfloat16).reshape(6, 8)[::2, 1::3]
    taken = take("a", tensor)
    assert (taken.pointer, taken.strides) == (tensor.data_ptr(), tensor.stride())
    assert taken.dtype == "bfloat16"


def test_torch_tensors_that_are_no_plain_memory_are_refused(torch: Any, call: Call) -> None:
    float32 = call["qkv_conv_output"]
    negated = torch.complex(torch.zeros(3, 32), to_torch(float32)).conj().imag
    assert negated.is_neg()
    assert (negated.numpy(force=True) == -float32).all(), "memory and value differ, then"
    refused: list[tuple[Any, type[GdnError], str]] = [
        (torch.zeros(3, 32, requires_grad=True), DTypeError, r"torch\.Tensor: .*use tensor\.detach\(\)"),
        (torch.nn.Parameter(torch.zeros(3, 32)), DTypeError, r"Parameter: .*use tensor\.detach\(\)"),
        (torch.zeros(3, 32, dtype=torch.complex64).conj(), DTypeError, "conjugate bit"),
        (torch.zeros(3, 32, dtype=torch.complex64), DTypeError, "expected float32, float16 or bfloat16, got complex64"),
        (torch.zeros(3, 32, dtype=torch.float64), DTypeError, "expected float32, float16 or bfloat16, got float64"),
        (negated, LayoutError, r"call \.resolve_neg\(\)\), got torch\.Tensor with the negative bit set"),
        (torch.eye(3, 32).to_sparse(), DTypeError, "layout"),
        (torch.zeros(3, 32, device="meta"), DTypeError, "meta"),
    ]
    for tensor, error_class, words in refused:
        call["qkv_conv_output"] = tensor
        message = call.refusal(error_class)
        assert message.startswith("qkv_conv_output: expected ")
        with pytest.raises(error_class, match=words):
            call.run()
    call["qkv_conv_output"] = negated.resolve_neg()
    call.run()


def test_torch_index_types(torch: Any, new_call: type[Call]) -> None:
    call, plain = new_call(), new_call()
    plain.run()
    for dtype in (torch.int32, torch.uint32):
        call = new_call()
        call["slot_idx"] = torch.arange(2, dtype=torch.int32).to(dtype)
        call.run()
        assert call["out"].tobytes() == plain["out"].tobytes()
    call["slot_idx"] = torch.arange(2)
    assert call.refusal(DTypeError) == (
        "slot_idx: expected uint32 or int32, got int64 (cast it: slot_idx.astype('uint32'))"
    )


# ---- JAX on a CPU, in a process of its own: its threads must not meet the forks of other tests ----


def in_jax(script: str) -> None:
    """Run a script that has `jax`, `np`, `ops` and `gdn`, on the CPU; warnings of JAX are its own."""
    pytest.importorskip("jax")
    head = "import os; os.environ['JAX_PLATFORMS'] = 'cpu'\nimport jax, jax.numpy as jnp, numpy as np, gdn\n"
    command = [sys.executable, "-c", f"{head}from gdn import ops\n{script}"]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


JAX_CALL = """
random = np.random.default_rng(0)
def call(put, work, pool):
    arrays = [random.standard_normal((3, 32)), random.uniform(0.5, 1, (3, 2)), random.uniform(0, 1, (3, 2))]
    arrays = [put(jnp.asarray(array, work)) for array in arrays]
    tables = put(jnp.arange(2, dtype='int32')), put(jnp.asarray([0, 2, 3], 'uint32'))
    return ops.gated_delta_recurrence_fwd(*arrays, pool, *tables)
"""


def test_jax_arrays_on_a_cpu() -> None:
    in_jax(f"""{JAX_CALL}
for work in ('float32', 'bfloat16'):
    results = []
    for put in (lambda array: array, lambda array: np.array(array)):
        random = np.random.default_rng(0)
        pool = np.full((4, 2, 8, 8), 0.5, np.dtype(jnp.bfloat16))
        results += [call(put, work, pool).tobytes(), pool.tobytes()]
    assert results[:2] == results[2:]
""")


def test_jax_arrays_on_a_cpu_are_not_written() -> None:
    in_jax(f"""{JAX_CALL}
for state in ('float32', 'bfloat16'):
    pool = jnp.full((4, 2, 8, 8), 0.5, state)
    try:
        call(lambda array: array, 'float32', pool)
    except gdn.LayoutError as error:
        assert str(error) == 'recurrent_state: expected a writable array, got a read-only one'
    else:
        raise SystemExit('written')
    assert bool((pool == 0.5).all())
""")


def test_jax_arrays_without_values_are_refused() -> None:
    in_jax(f"""{JAX_CALL}
@jax.jit
def traced(qkv):
    gates, pool = np.ones((3, 2), 'f4'), np.zeros((4, 2, 8, 8), 'f4')
    ops.gated_delta_recurrence_fwd(qkv, gates, gates, pool, np.arange(2, dtype='i4'), np.array([0, 2, 3], 'i4'))
try:
    traced(np.ones((3, 32), 'f4'))
except gdn.DTypeError as error:
    assert str(error).startswith('qkv_conv_output: expected '), error
else:
    raise SystemExit('taken')
""")


# ---- On a GPU ----


@pytest.fixture(params=["torch", "jax"])
def to_gpu(request: pytest.FixtureRequest) -> Iterator[tuple[Callable[[Any], Any], Callable[[Any], int]]]:
    """What makes a framework's own GPU array of a NumPy array, and what says where that lies."""
    if request.param == "torch":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("this PyTorch has no GPU")
        yield lambda array: to_torch(array).cuda(), lambda tensor: tensor.data_ptr()
        return
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX would take most of the memory
    jax = pytest.importorskip("jax")
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        pytest.skip(f"this JAX has no GPU: {error}")
    yield lambda array: jax.device_put(array, device), lambda array: array.unsafe_buffer_pointer()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_of_a_framework_on_a_gpu(
    to_gpu: tuple[Callable[[Any], Any], Callable[[Any], int]], new_op_call: Callable[..., Call], dtype: str
) -> None:
    import cupy

    put, address_of = to_gpu
    theirs, ours = new_op_call(dtype), new_op_call(dtype)
    theirs.arguments = {name: put(array) for name, array in theirs.arguments.items()}
    ours.arguments = {name: cupy.asarray(array) for name, array in ours.arguments.items()}
    before = {name: address_of(array) for name, array in theirs.arguments.items()}
    result, expected = theirs.run("cuda"), ours.run("cuda")
    cupy.cuda.Device().synchronize()
    for name, array in theirs.arguments.items():
        assert address_of(array) == before[name]
        seen = arrays.take(name, array)
        assert (seen.pointer, seen.place) == (before[name], "cuda:0")
        assert seen.array.get().tobytes() == ours[name].get().tobytes(), name
    for array, same in zip(outputs(result), outputs(expected), strict=True):
        assert type(array) is cupy.ndarray
        assert array.data.ptr in before.values()
        assert array.get().tobytes() == same.get().tobytes()


@pytest.mark.gpu
def test_a_result_goes_back_to_torch(torch: Any, new_call: type[Call]) -> None:
    """Made by the op, and over the tensor that was given."""
    call = new_call(work_dtype="bfloat16")
    call.arguments = {name: to_torch(array).cuda() for name, array in call.arguments.items()}
    out = call.arguments.pop("out")
    made = torch.from_dlpack(ops.gated_delta_recurrence_fwd(*call.six))
    assert (made.dtype, made.device.type, tuple(made.shape)) == (torch.bfloat16, "cuda", (3, 16))
    call["out"] = out
    assert torch.from_dlpack(call.run("cuda")).data_ptr() == out.data_ptr()


@pytest.mark.gpu
def test_torch_tensors_on_a_gpu_that_are_refused(torch: Any, new_call: type[Call]) -> None:
    call = new_call()
    call.arguments = {name: to_torch(array).cuda() for name, array in call.arguments.items()}
    call["recurrent_state"].requires_grad_()
    with pytest.raises(DTypeError, match=r"^recurrent_state: .*use tensor\.detach\(\)"):
        call.run("cuda")
    call["recurrent_state"] = call["recurrent_state"].detach()
    call["slot_idx"] = call["slot_idx"].cpu()
    with pytest.raises(GdnError, match=r"^slot_idx: expected an array on cuda:0"):
        call.run("cuda")


ROOT = Path(__file__).parent.parent
PAGE, README = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/frameworks.md", "README.md"))
NAMES_OF_PAGE = {
    "qkv_conv_output": "qkv",
    "decay_per_token": "decay",
    "beta_per_token": "beta",
    "recurrent_state": "pool",
    "slot_idx": "slot_idx",
    "input_row_offsets": "input_row_offsets",
}


def blocks_of_page(heading: str) -> list[str]:
    """The Python under a heading of docs/frameworks.md."""
    return re.findall(r"```python\n(.*?)```", PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0], re.DOTALL)


@pytest.mark.parametrize(("heading", "count"), [("PyTorch", 3), ("JAX", 1)])
def test_the_python_of_the_page_is_python(heading: str, count: int) -> None:
    for block in blocks_of_page(heading):
        compile(block, "frameworks.md", "exec")
        count -= 1
    assert count == 0


def test_the_readme_has_the_first_block_of_the_page() -> None:
    (in_readme,) = re.findall(r"```py\n(with cupy.cuda.Stream.from_external.*?)```", README, re.DOTALL)
    without_imports = [
        node for node in ast.parse(blocks_of_page("PyTorch")[0]).body if not isinstance(node, ast.Import)
    ]
    assert [ast.dump(node) for node in ast.parse(in_readme).body] == [ast.dump(node) for node in without_imports]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_page_does_what_it_says(
    to_gpu: tuple[Callable[[Any], Any], Callable[[Any], int]], new_call: type[Call], dtype: str
) -> None:
    """The blocks under the framework's heading run: with PyTorch three calls one after the other, with JAX one."""
    import cupy

    put, _ = to_gpu
    call, plain = (new_call(work_dtype=dtype, state_dtype=dtype) for _ in range(2))
    names = {NAMES_OF_PAGE[name]: put(call[name]) for name in NAMES_OF_PAGE}
    heading = "PyTorch" if hasattr(names["qkv"], "data_ptr") else "JAX"
    for block in blocks_of_page(heading):
        exec(compile(block, "frameworks.md", "exec"), names)
    cupy.cuda.Device().synchronize()
    plain.arguments = {name: cupy.asarray(array) for name, array in plain.arguments.items()}
    for _ in range(3 if heading == "PyTorch" else 1):
        plain.run("cuda")
    for name, expected in (("pool", plain["recurrent_state"]), ("readout", plain["out"])):
        assert take(name, names[name]).array.get().tobytes() == expected.get().tobytes(), name
