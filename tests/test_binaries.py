"""Kernels compiled ahead of time: their names, where they are found, and what happens where they are no use."""

from __future__ import annotations

import errno
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gdn.backends import binaries, cache, cuda, launch, nvrtc
from gdn.backends.launch import Kernel, Variant
from gdn.backends.nvrtc import Binary, CompileReport
from gdn.errors import DeviceError, KernelCompileError

VARIANT = Variant(Kernel("gated_delta_gates", ()), (("INPUT_TYPE", "float"), ("RATE_TYPE", "float")))
STREAMED = Variant(VARIANT.kernel, (*VARIANT.macros, ("SHARED_BYTES", "70000")))
REPORT = CompileReport(registers=40, spill_bytes=0, stack_bytes=8, shared_bytes=16)


def binary(image: bytes = b"\x7fELF image") -> Binary:
    return Binary(image, REPORT, "12.9")


@pytest.fixture(autouse=True)
def cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache, and no folders beside it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("GDN_CACHE_DIR", str(folder))
    monkeypatch.delenv("GDN_KERNEL_DIR", raising=False)
    return folder


@pytest.fixture
def shipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """Two empty folders that GDN_KERNEL_DIR names."""
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    monkeypatch.setenv("GDN_KERNEL_DIR", os.pathsep.join(map(str, folders)))
    return folders


# ---- Names and files ----


def test_a_name_holds_all_that_changes_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {binaries.file_name(VARIANT, "sm_90"), binaries.file_name(VARIANT, "sm_80")}
    names.add(binaries.file_name(STREAMED, "sm_90"))
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "_CUPY_OPTIONS", ("-ftz=false",))
        names.add(binaries.file_name(VARIANT, "sm_90"))
    text = launch.source("gated_delta_gates.cu")
    with monkeypatch.context() as patch:
        patch.setattr(binaries, "source", lambda name: text + "\n")
        names.add(binaries.file_name(VARIANT, "sm_90"))
    assert len(names) == 5
    assert all(name.startswith("gated_delta_gates-sm_") and name.endswith(".kernel") for name in names)
    assert binaries.file_name(VARIANT, "sm_90") in names


def test_a_name_follows_a_header(monkeypatch: pytest.MonkeyPatch) -> None:
    before = binaries.file_name(VARIANT, "sm_90")
    right = launch.kernel_text
    header = "numeric_types.cuh"
    monkeypatch.setattr(launch, "kernel_text", lambda name: right(name) + ("// edited\n" if name == header else ""))
    launch.source.cache_clear()
    try:
        assert binaries.file_name(VARIANT, "sm_90") != before
    finally:
        monkeypatch.undo()
        launch.source.cache_clear()
    assert binaries.file_name(VARIANT, "sm_90") == before


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    image = bytes(range(256)) + b"\n"
    path = binaries.write(tmp_path, VARIANT, "sm_90", binary(image))
    assert path == tmp_path / binaries.file_name(VARIANT, "sm_90")
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.glob("*.kernel")) == [path]
    assert binaries.read(tmp_path, VARIANT, "sm_90") == binary(image)
    assert binaries.read(tmp_path, VARIANT, "sm_80") is None
    assert binaries.read(tmp_path / "none", VARIANT, "sm_90") is None


def damaged(path: Path) -> Iterator[bytes]:
    whole = path.read_bytes()
    yield b""
    yield whole[:-1]
    yield whole[: len(whole) // 2]
    yield whole[:20] + bytes([whole[20] ^ 1]) + whole[21:]
    for content in (b"not JSON\nimage", b"{}\nimage", b'{"report": {"registers": 1}, "nvrtc": "12.9"}\n', b"[1]\n"):
        yield content + hashlib.sha256(content).digest()


def test_a_damaged_file_is_none(tmp_path: Path) -> None:
    """Beside field cases 81, 82: kernels that were shipped, cut, flipped, or of another version."""
    path = binaries.write(tmp_path, VARIANT, "sm_90", binary())
    for content in damaged(path):
        path.write_bytes(content)
        assert binaries.read(tmp_path, VARIANT, "sm_90") is None


def test_a_file_that_is_replaced_is_read_whole(tmp_path: Path) -> None:
    """Beside field cases 81, 82: processes that compile ahead into one folder while others load from it."""
    images = [bytes([number]) * (1 << 20) for number in range(3)]
    binaries.write(tmp_path, VARIANT, "sm_90", binary(images[0]))
    with ThreadPoolExecutor(2) as pool:
        writers = [
            pool.submit(lambda: [binaries.write(tmp_path, VARIANT, "sm_90", binary(image)) for image in 4 * images])
            for _ in range(2)
        ]
        found = []
        while not all(writer.done() for writer in writers):
            found.append(binaries.read(tmp_path, VARIANT, "sm_90"))
    assert [len(writer.result()) for writer in writers] == [12, 12]
    assert all(each is not None and each.image in images for each in found)
    assert len(list(tmp_path.glob("*.kernel"))) == 1


def test_a_file_under_another_one_s_name_is_none(tmp_path: Path) -> None:
    path = binaries.write(tmp_path, VARIANT, "sm_90", binary())
    path.rename(tmp_path / binaries.file_name(VARIANT, "sm_80"))
    assert binaries.read(tmp_path, VARIANT, "sm_80") is None
    other = Variant(VARIANT.kernel, (*VARIANT.macros, ("ANOTHER", "1")))
    path = binaries.write(tmp_path, VARIANT, "sm_90", binary())
    path.rename(tmp_path / binaries.file_name(other, "sm_90"))
    assert binaries.read(tmp_path, other, "sm_90") is None


def test_folders(shipped: tuple[Path, Path], cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert binaries.folders() == (*shipped, cache_folder)
    monkeypatch.setenv("GDN_KERNEL_DIR", f"relative{os.pathsep}{os.pathsep}")
    assert binaries.folders() == (Path("relative").absolute(), cache_folder)
    monkeypatch.setenv("GDN_KERNEL_DIR", "")
    assert binaries.folders() == (cache_folder,)


def test_a_generation_of_gpus() -> None:
    assert binaries.architectures_for((8, 6)) == tuple(f"sm_8{minor}" for minor in (6, 5, 4, 3, 2, 1, 0))
    assert binaries.architectures_for((12, 1)) == ("sm_121", "sm_120")


# ---- What a call loads ----


class FakeCupy:
    """A CuPy with a GPU of each capability, that notes what it loads and compiles, and on which.

    refused: images that its driver does not take.
    """

    def __init__(self, *capabilities: str) -> None:
        self.current: list[int] = []
        self.used: list[int] = []
        self.loaded: list[bytes] = []
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.refused: set[bytes] = set()
        self.files: list[Path] = []
        self.ready: list[SimpleNamespace] = []
        compiler = SimpleNamespace(CompileException=type("CompileException", (Exception,), {}))
        stream = SimpleNamespace(is_capturing=lambda: False)
        self.cuda = SimpleNamespace(
            Device=self._device(capabilities), compiler=compiler, get_current_stream=lambda device: stream
        )

    def _device(self, capabilities: tuple[str, ...]) -> Any:
        current = self.current

        class Device:
            def __init__(self, device: int) -> None:
                self.id = device
                self.compute_capability = capabilities[device]

            def __enter__(self) -> None:
                current.append(self.id)

            def __exit__(self, *reason: object) -> None:
                current.pop()

        return Device

    def RawModule(self, *, path: str = "", code: str = "", options: tuple[str, ...] = ()) -> SimpleNamespace:
        def get_function(stem: str) -> SimpleNamespace:
            assert stem == "gated_delta_gates"
            self.used.append(self.current[-1])
            if path:
                self.files.append(Path(path))
                image = Path(path).read_bytes()
                if image in self.refused:
                    raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
                self.loaded.append(image)
            else:
                self.compiled.append((code, options))
            return SimpleNamespace(num_regs=32)

        return SimpleNamespace(get_function=get_function)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    """In place of CuPy one with GPUs of compute capability 8.6 and 9.0."""
    fake = FakeCupy("86", "90")
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(cuda, "require_device", lambda device: None)
    monkeypatch.setattr(cuda, "_functions", {})
    return fake


def test_without_binaries_a_kernel_is_compiled(cupy: FakeCupy) -> None:
    cuda.load(VARIANT, 0)
    options = ("-std=c++17", "-DINPUT_TYPE=float", "-DRATE_TYPE=float")
    assert cupy.compiled == [(launch.source("gated_delta_gates.cu"), options)]
    assert cupy.loaded == []


def test_a_binary_is_loaded_once_and_nothing_compiled(cupy: FakeCupy, shipped: tuple[Path, Path]) -> None:
    binaries.write(shipped[1], STREAMED, "sm_86", binary())
    kernel = cuda.load(STREAMED, 0)
    assert cuda.load(STREAMED, 0) is kernel
    assert kernel.max_dynamic_shared_size_bytes == 70000
    assert (cupy.loaded, cupy.compiled) == ([binary().image], [])
    assert not any(path.exists() for path in cupy.files)


def test_which_binary_comes_first(cupy: FakeCupy, shipped: tuple[Path, Path], cache_folder: Path) -> None:
    places = [
        (shipped[0], "sm_86", b"own"),
        (shipped[0], "sm_80", b"earlier"),
        (shipped[1], "sm_86", b"second folder"),
        (cache_folder, "sm_86", b"cache"),
    ]
    for folder, architecture, image in places:
        binaries.write(folder, VARIANT, architecture, binary(image))
    for folder in shipped:
        for other in ("sm_89", "sm_90"):  # later ones, which the GPU cannot run
            binaries.write(folder, VARIANT, other, binary(b"other"))
    for folder, architecture, image in places:
        cuda._functions.clear()
        cuda.load(VARIANT, 0)
        assert cupy.loaded.pop() == image
        (folder / binaries.file_name(VARIANT, architecture)).unlink()
    cuda._functions.clear()
    cuda.load(VARIANT, 0)
    assert (cupy.loaded, len(cupy.compiled)) == ([], 1)


def test_what_a_driver_refuses_is_passed_over(cupy: FakeCupy, shipped: tuple[Path, Path], cache_folder: Path) -> None:
    cupy.refused = {b"new"}
    binaries.write(shipped[0], VARIANT, "sm_86", binary(b"new"))
    binaries.write(cache_folder, VARIANT, "sm_86", binary(b"right"))
    cuda.load(VARIANT, 0)
    assert (cupy.loaded, cupy.compiled) == ([b"right"], [])
    cupy.refused.add(b"right")
    cuda._functions.clear()
    cuda.load(VARIANT, 0)
    assert len(cupy.compiled) == 1


def test_damaged_binaries_are_passed_over(cupy: FakeCupy, shipped: tuple[Path, Path]) -> None:
    path = binaries.write(shipped[0], VARIANT, "sm_86", binary())
    path.write_bytes(path.read_bytes()[:-5])
    cuda.load(VARIANT, 0)
    assert (cupy.loaded, len(cupy.compiled)) == ([], 1)


def test_without_a_place_for_the_image_a_kernel_is_compiled(
    cupy: FakeCupy, shipped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**keywords: Any) -> Any:
        raise PermissionError("read-only file system")

    binaries.write(shipped[0], VARIANT, "sm_86", binary())
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", refuse)
    cuda.load(VARIANT, 0)
    assert (cupy.loaded, len(cupy.compiled)) == ([], 1)


def test_without_a_place_for_cupy_s_cache_a_kernel_is_compiled(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Field case 82: a cache folder that is read-only."""
    whole = cupy.RawModule

    def raw_module(*, path: str = "", code: str = "", options: tuple[str, ...] = ()) -> SimpleNamespace:
        if code:
            raise PermissionError("[Errno 13] Permission denied: '/cache/tmp1'")
        return whole(path=path)

    monkeypatch.setattr(cupy, "RawModule", raw_module)
    asked: list[tuple[Variant, str]] = []
    monkeypatch.setattr(nvrtc, "compile_binary", lambda *given: asked.append(given) or binary(b"compiled"))
    cuda.load(VARIANT, 0)
    assert (asked, cupy.loaded) == ([(VARIANT, "sm_86")], [b"compiled"])
    assert not any(path.exists() for path in cupy.files)


def test_each_of_two_gpus_loads_its_own(cupy: FakeCupy, cache_folder: Path) -> None:
    """Field case 80: what one has loaded is no use on the other, be it a binary or compiled there."""
    binaries.write(cache_folder, VARIANT, "sm_86", binary(b"for 8.6"))
    first = cuda.load(VARIANT, 0)
    second = cuda.load(VARIANT, 1)
    assert first is not second
    assert (cupy.loaded, len(cupy.compiled), cupy.used) == ([b"for 8.6"], 1, [0, 1])
    binaries.write(cache_folder, VARIANT, "sm_90", binary(b"for 9.0"))
    cuda._functions.clear()
    for device in (1, 0, 1, 0):
        cuda.load(VARIANT, device)
    assert (cupy.loaded[1:], len(cupy.compiled), cupy.used[2:]) == ([b"for 9.0", b"for 8.6"], 1, [1, 0])


def test_without_room_for_any_image_one_line_says_what_to_do(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither CuPy's cache nor the temporary folder takes a file; with room the same call succeeds."""

    def full(**keywords: Any) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(nvrtc, "compile_binary", lambda *given: binary())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(cupy, "RawModule", full)
        patch.setattr(tempfile, "NamedTemporaryFile", full)
        with pytest.raises(DeviceError) as caught:
            cuda.load(VARIANT, 0)
    expected = "a folder that takes the compiled kernel (make room, or set CUPY_CACHE_DIR or TMPDIR to another)"
    refusal = f"gated_delta_gates: expected {expected}, got {tmp_path}: No space left on device"
    assert str(caught.value) == refusal
    cuda.load(VARIANT, 0)
    assert len(cupy.compiled) == 1


def test_a_kernel_that_does_not_compile_is_said_once(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CuPy's cache too, whose way round it goes through another compile."""

    def raw_module(**keywords: Any) -> Any:
        raise PermissionError("read-only file system")

    def compile_binary(variant: Variant, architecture: str) -> Binary:
        raise nvrtc.compile_error(variant, "kernel.cu(1): error: wrong")

    monkeypatch.setattr(cupy, "RawModule", raw_module)
    monkeypatch.setattr(nvrtc, "compile_binary", compile_binary)
    with pytest.raises(KernelCompileError) as caught:
        cuda.load(VARIANT, 0)
    assert str(caught.value).count("expected a clean compile") == 1


@pytest.mark.parametrize("kind", ["CompileException", "RuntimeError"])
def test_what_the_compiler_or_the_driver_refuses_is_said(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    refusal = cupy.cuda.compiler.CompileException if kind == "CompileException" else RuntimeError

    def raw_module(**keywords: Any) -> Any:
        raise refusal("a warning\ngates.cu(7): error: wrong\nmore")

    monkeypatch.setattr(cupy, "RawModule", raw_module)
    with pytest.raises(KernelCompileError) as caught:
        cuda.load(VARIANT, 0)
    macros = " ".join(VARIANT.defines)
    expected = f"gated_delta_gates: expected a clean compile with {macros}, got gates.cu(7): error: wrong"
    assert str(caught.value) == expected
    assert caught.value.__cause__.__class__ is refusal


def test_an_assembler_that_says_nothing_of_registers_is_an_error() -> None:
    with pytest.raises(KernelCompileError) as caught:
        nvrtc._report(VARIANT, "ptxas info: 0 bytes gmem\n")
    assert str(caught.value) == "gated_delta_gates: expected ptxas' usage report, got 'ptxas info: 0 bytes gmem'"


def test_a_folder_that_is_none_is_no_matter(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GDN_KERNEL_DIR", str(tmp_path / "missing"))
    cuda.load(VARIANT, 0)
    assert len(cupy.compiled) == 1


def test_without_a_home_there_is_no_cache_to_look_in(
    shipped: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "directory", lambda: None)
    assert binaries.folders() == shipped


# ---- One set of options ----


class _Compiled(Exception):
    """Ends a compile whose options are known."""


def test_options_are_those_of_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVRTC is given through CuPy at run time is what it is given ahead of time."""
    compiler = pytest.importorskip("cupy.cuda.compiler")
    from cupy._core import core

    class Program:
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            pass

        def compile(self, options: tuple[str, ...], log: Any) -> None:
            raise _Compiled(options)

    for name in [name for name in os.environ if name.startswith("CUPY_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(compiler, "_NVRTCProgram", Program)
    monkeypatch.setattr(compiler, "_preprocess", lambda *arguments: "")
    monkeypatch.setattr(compiler, "_get_arch", lambda: "90")
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", lambda arch: (f"-arch=sm_{arch}", "cubin"))
    monkeypatch.setattr(compiler, "_kernel_cache_backend", SimpleNamespace(load=lambda name: None))
    with pytest.raises(_Compiled) as caught:
        core.compile_with_cache("", nvrtc.module_options(VARIANT), prepend_cupy_headers=False)
    seen = [option for option in caught.value.args[0] if not option.startswith("-I")]
    assert sorted(seen) == sorted((*nvrtc.all_options(VARIANT), "-arch=sm_90"))


def test_kernels_include_no_header_of_a_toolkit() -> None:
    """So that the folders of headers, which CuPy names and nobody else, change nothing, and wheels are enough: field
    case 77, as test_compile.py, which compiles every kernel with nothing else."""
    folder = Path(launch.__file__).parents[2] / "kernels"
    for path in folder.glob("*.cu"):
        assert "#include <" not in launch.source(path.name), path.name


def test_the_report_changes_no_image() -> None:
    """`--ptxas-options=-v`, with which nothing is compiled at run time."""
    compiler = pytest.importorskip("cupy.cuda").nvrtc
    variant = Variant(VARIANT.kernel, (*VARIANT.macros, ("BIAS_TYPE", "float")))
    program = compiler.createProgram(launch.source("gated_delta_gates.cu"), "/another/name.cu", (), ())
    compiler.compileProgram(program, (*nvrtc.all_options(variant), "-arch=sm_90"))
    assert compiler.getCUBIN(program) == nvrtc.compile_binary(variant, "sm_90").image
    compiler.destroyProgram(program)
