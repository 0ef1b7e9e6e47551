"""How the host backend compiles a kernel, loads it by its variant, and keeps it in a cache."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gdn
from gdn.backends import cache, host, launch
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.errors import DeviceError, KernelCompileError

pytestmark = pytest.mark.skipif(
    host.unavailable_reason() is not None, reason=f"host backend: {host.unavailable_reason()}"
)

ROOT = Path(gdn.__file__).parents[1]


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the entries of a test go, none of which is there before."""
    folder = tmp_path / "empty"
    monkeypatch.setenv("GDN_CACHE_DIR", str(folder))
    return folder


def description(*kinds: str) -> Kernel:
    return Kernel("kernel", tuple((f"parameter_{i}", kind) for i, kind in enumerate(kinds)))


def compiled(text: str, *kinds: str, defines: tuple[str, ...] = ()) -> host.Library:
    """The kernel `kernel` of `text`, whose parameters are of these kinds."""
    return host.build(description(*kinds), text, defines)


# ---- The compiler ----


def test_compile_error_names_the_line() -> None:
    with pytest.raises(KernelCompileError, match=r"^kernel does not compile for the CPU: kernel\.cu:2:\d+: error"):
        compiled('// a comment\nextern "C" __global__ void kernel() { return missing; }')


def test_frame_too_large_for_a_fiber_does_not_compile() -> None:
    text = """extern "C" __global__ void kernel(float* out, long long i) {
        volatile float values[20000];
        values[i] = 1.0f;
        out[0] = values[i / 2];
    }"""
    with pytest.raises(KernelCompileError, match=r"frame size .*(larger than|exceeds)"):
        compiled(text, "pointer", "int64")


def test_no_compiler_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    reason = host.unavailable_reason()
    assert reason == "no C++ compiler: set CXX, or put one of g++, c++, clang++ on PATH"
    with pytest.raises(DeviceError, match="no C"):
        host.compiler_version()
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert host.unavailable_reason() == "no C++ compiler: CXX=no-such-compiler is not on PATH"


def test_compiler_that_fails_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    reason = host.unavailable_reason()
    assert reason is not None
    assert reason.startswith("the C++ compiler does not work")


def test_a_compiler_that_is_gone_since_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = host._compiler_command(os.environ.get("CXX", ""), os.environ["PATH"])
    gone = tmp_path / "c++"
    gone.write_text(f'#!/bin/sh\nexec {" ".join(real)} "$@"\n')
    gone.chmod(0o755)
    monkeypatch.setenv("CXX", str(gone))
    assert host.unavailable_reason() is None
    gone.unlink()
    with pytest.raises(DeviceError, match=r"^the C\+\+ compiler does not work: .* failed$") as caught:
        compiled('extern "C" __global__ void kernel() {} // of a compiler that is gone')
    assert str(gone) in str(caught.value)


def test_a_compiler_that_the_system_ends_leaves_no_files(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that takes too much memory, which cannot clean up itself."""
    real = host._compiler_command(os.environ.get("CXX", ""), os.environ["PATH"])
    ended = tmp_path / "ended"
    write_and_end = 'case "$*" in *kernel.so*) echo half > "$TMPDIR/half.s"; kill -KILL $$;; esac'
    ended.write_text(f'#!/bin/sh\n{write_and_end}\nexec {" ".join(real)} "$@"\n')
    ended.chmod(0o755)
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("CXX", str(ended))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with pytest.raises(KernelCompileError, match=r"^kernel does not compile for the CPU: .* ended by signal 9\n"):
        compiled(TRIVIAL, "pointer")
    assert files_below(folder) == []
    assert not empty_cache.exists()


@pytest.mark.parametrize("name", ["mein Übersetzer", "o'brien's c++", 'a "c++"'])
def test_a_compiler_whose_path_is_no_word_of_a_shell(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside field cases 77, 89: blanks, quotes and letters beyond ASCII in the path of the compiler; CXX is that path
    as it is, with nothing quoted."""
    (real,) = host._compiler_command(os.environ.get("CXX", ""), os.environ["PATH"])
    compiler = tmp_path / name
    compiler.symlink_to(Path(shutil.which(real) or real))
    monkeypatch.setenv("CXX", str(compiler))
    assert host.unavailable_reason() is None
    assert host._toolchain().command[0] == str(compiler)
    compiler.unlink()
    monkeypatch.setenv("CXX", f"{compiler} ")  # of another value, as answers are remembered
    assert host.unavailable_reason() == f"no C++ compiler: CXX={compiler}  is not on PATH"


def test_flag_that_the_compiler_lacks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = host._compiler_command(os.environ.get("CXX", ""), os.environ["PATH"])
    picky = tmp_path / "picky c++"
    picky.write_text(f'#!/bin/sh\ncase "$*" in *-march=native*) exit 1;; esac\nexec {" ".join(real)} "$@"\n')
    picky.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{picky}'")
    assert host.unavailable_reason() is None
    assert "-march=native" not in host._toolchain().command
    compiled('extern "C" __global__ void kernel() {}')


# ---- Loading by variant ----


@pytest.fixture
def variant_of(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> Callable[[int], Variant]:
    """Variants of a kernel that writes its macro VALUE, served in place of the files of `kernels/`."""
    text = 'extern "C" __global__ void kernel(unsigned int* out) { out[0] = VALUE; }'
    real = launch.source
    monkeypatch.setattr(launch, "source", lambda name: text if name == "kernel.cu" else real(name))
    return lambda value: Variant(description("pointer"), (("VALUE", str(value)),))


def start_all(functions: list[Callable[[], Any]]) -> list[Any]:
    """The results of calling each in a Python thread of its own."""
    results: list[Any] = [None] * len(functions)

    def call(place: int) -> None:
        results[place] = functions[place]()

    threads = [threading.Thread(target=call, args=(place,)) for place in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_run_checks_and_launches(variant_of: Callable[[int], Variant]) -> None:
    out = np.zeros(1, np.uint32)
    host.run(Launch(variant_of(1001), 1, 1, (out.ctypes.data,)))
    assert out[0] == 1001
    with pytest.raises(DeviceError, match="blocks in a launch"):
        host.run(Launch(variant_of(1001), 0, 1, (out.ctypes.data,)))


def test_one_variant_is_compiled_once(variant_of: Callable[[int], Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = host._compile

    def compile_and_count(*arguments: Any) -> bytes:
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(host, "_compile", compile_and_count)
    libraries = start_all([lambda: host.load(variant_of(1002))] * 4)
    assert len(calls) == 1
    assert libraries[0] is not None
    assert all(library is libraries[0] for library in libraries)


def test_different_variants_are_compiled_at_the_same_time(
    variant_of: Callable[[int], Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(2)
    real = host._compile

    def compile_together(*arguments: Any) -> bytes:
        together.wait(timeout=30)
        return real(*arguments)

    monkeypatch.setattr(host, "_compile", compile_together)
    libraries = start_all([lambda: host.load(variant_of(1003)), lambda: host.load(variant_of(1004))])
    assert None not in libraries


# ---- The cache ----

TRIVIAL = 'extern "C" __global__ void kernel(unsigned int* out) { out[0] = 17; }'


def in_another_process(script: str, **environment: str) -> subprocess.Popen[str]:
    """A Python that finds this `gdn`, the name `TRIVIAL`, and runs `script`."""
    prelude = "import numpy as np\nfrom gdn.backends import cache, host\nfrom gdn.backends.launch import Kernel\n"
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", f"{prelude}TRIVIAL = {TRIVIAL!r}\n{script}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


BUILD_AND_RUN = """
out = np.zeros(1, np.uint32)
host.build(Kernel("kernel", (("out", "pointer"),)), TRIVIAL).launch(1, 1, (out.ctypes.data,))
print(out[0])
"""


def test_second_build_takes_the_entry(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.size_bytes() == 0
    compiled(TRIVIAL, "pointer")
    (entry,) = empty_cache.iterdir()
    assert cache.size_bytes() == entry.stat().st_size > 0
    monkeypatch.setattr(host, "_compile", None)
    compiled(TRIVIAL, "pointer")


def test_everything_that_changes_the_binary_changes_the_entry(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled(TRIVIAL, "pointer")
    compiled(TRIVIAL + "\n", "pointer")
    compiled(TRIVIAL, "pointer", defines=("-DOTHER=1",))
    monkeypatch.setattr(host, "_PLAIN_FLAGS", ("-O3",))
    compiled(TRIVIAL, "pointer")
    real = launch.source
    monkeypatch.setattr(launch, "source", lambda name: real(name) + "\n")
    compiled(TRIVIAL, "pointer")
    assert len(list(empty_cache.iterdir())) == 5


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied"])
def test_damaged_entry_is_built_again(empty_cache: Path, damage: str) -> None:
    content = bytes(range(256)) * 8
    entry = cache.store("entry", content)
    stored = entry.read_bytes()
    assert cache.find("entry") == entry
    flipped = bytes([stored[0] ^ 1]) + stored[1:]
    entry.write_bytes({"cut": stored[:-1], "flipped": flipped, "emptied": b""}[damage])
    assert cache.find("entry") is None

    compiled(TRIVIAL, "pointer", defines=(f"-D{damage}",))
    (library,) = empty_cache.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # a new file: this process still has the old one mapped
    library.write_bytes(whole[: len(whole) // 2])
    compiled(TRIVIAL, "pointer", defines=(f"-D{damage}",))
    assert library.read_bytes() == whole


def test_processes_that_start_together_all_succeed(empty_cache: Path) -> None:
    processes = [in_another_process(BUILD_AND_RUN) for _ in range(4)]
    for process in processes:
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output, errors) == (0, "17\n", "")
    assert len(list(empty_cache.iterdir())) == 1, "one entry and no temporary file is left"


def test_cache_that_cannot_be_written_gives_way_to_a_folder_of_the_process(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("in the way")
    report = "folder = cache._private_directory(); print(folder, len(list(folder.iterdir())))"
    script = f"{BUILD_AND_RUN}{BUILD_AND_RUN}{report}"
    process = in_another_process(script, GDN_CACHE_DIR=str(file / "cache"), TMPDIR=str(tmp_path))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    first, second, place = output.splitlines()
    assert (first, second) == ("17", "17")
    folder, num_entries = place.rsplit(" ", 1)
    assert num_entries == "1"
    assert Path(folder).parent == tmp_path
    assert not Path(folder).exists(), "it goes when the process ends"


def files_below(*folders: Path) -> list[Path]:
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


@pytest.fixture
def empty_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go, those of this process's private folder too."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(cache, "_private_directories", {})
    return folder


def test_a_disk_without_room_for_the_entry(
    empty_cache: Path, empty_temporary_folder: Path, full_disk: Callable[[], AbstractContextManager[None]]
) -> None:
    """One line names both folders and what to do, nothing half-written stays, and with room the call succeeds."""
    with full_disk(), pytest.raises(DeviceError) as caught:
        compiled(TRIVIAL, "pointer")
    assert str(caught.value) == (
        "kernel: expected a folder that takes the compiled kernel (make room, or set GDN_CACHE_DIR or TMPDIR to "
        f"another), got {empty_cache}: No space left on device; {empty_temporary_folder}: No space left on device"
    )
    assert files_below(empty_cache, empty_temporary_folder) == []
    compiled(TRIVIAL, "pointer")
    assert len(files_below(empty_cache)) == 1
    assert files_below(empty_temporary_folder) == []


LIMITED = """
import os, resource, sys
from pathlib import Path
from gdn.errors import DeviceError

def build():
    return host.build(Kernel("kernel", (("out", "pointer"),)), TRIVIAL)

def below(*names):
    return [str(path) for name in names for path in Path(os.environ[name]).rglob("*") if path.is_file()]

hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
for limit in (0, 16384):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        build()
    except DeviceError as error:
        print(error, below("TMPDIR", "GDN_CACHE_DIR"))
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
out = np.zeros(1, np.uint32)
build().launch(1, 1, (out.ctypes.data,))
print(out[0], len(below("GDN_CACHE_DIR")), below("TMPDIR"))
"""


def test_a_disk_without_room_for_the_compiler(empty_cache: Path, tmp_path: Path) -> None:
    """By a limit on the size of files, which needs no rights: at first no file can be written, then none that is long.

    What is refused leaves nothing, not even what a compiler leaves that the system ends; without the limit all is well.
    """
    folder = tmp_path / "temporary"
    folder.mkdir()
    process = in_another_process(LIMITED, TMPDIR=str(folder))
    output, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")
    expected = "kernel: expected room for the compiler's files (make some, or set TMPDIR to another folder), got "
    none, little, enough = output.splitlines()
    assert none.startswith(f"{expected}No usable temporary directory found in ['{folder}', ")
    assert little.startswith(f"{expected}{folder}: File ")
    assert none.endswith("] []")
    assert little.endswith(" []")
    assert enough == "17 1 []"


def test_a_cache_that_is_read_only_is_read(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image of a container: the second start compiles nothing."""
    compiled(TRIVIAL, "pointer")
    for path in (*files_below(empty_cache), empty_cache):
        path.chmod(0o500 if path.is_dir() else 0o400)
    monkeypatch.setattr(host, "_compile", None)
    monkeypatch.setattr(cache, "write", None)
    compiled(TRIVIAL, "pointer")
    empty_cache.chmod(0o700)


def test_without_a_home_a_process_keeps_what_it_compiled(
    empty_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user that the system does not know, in a container: no cache, and nothing below the current folder."""

    def unknown(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("GDN_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.chdir(empty_temporary_folder)
    assert (cache.directory(), cache.size_bytes(), cache.find("entry")) == (None, 0, None)
    compiled(TRIVIAL, "pointer")
    assert len(files_below(empty_temporary_folder)) == 1
    monkeypatch.setattr(host, "_compile", None)
    compiled(TRIVIAL, "pointer")


def test_a_temporary_folder_that_was_cleaned_up_is_made_again(
    empty_temporary_folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Systems remove what lies there for days, while a server runs on."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    first = cache.store("entry", b"content")
    shutil.rmtree(first.parent)
    assert cache.find("entry") is None
    again = cache.store("entry", b"content")
    assert cache.find("entry") == again
    assert again.parent.parent == empty_temporary_folder


def test_two_versions_of_the_sources_share_a_cache(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A header alone differs: each version finds its own entry, whichever was there first."""
    whole = launch.kernel_text
    kernel = '#include "shared.cuh"\nextern "C" __global__ void kernel(unsigned int* out) { out[0] = VALUE; }'

    def computed(version: int) -> int:
        texts = {"kernel.cu": kernel, "shared.cuh": f"#define VALUE {version}\n"}
        with monkeypatch.context() as patch:
            patch.setattr(launch, "kernel_text", lambda name: texts.get(name) or whole(name))
            patch.setattr(host, "_libraries", {})
            launch.source.cache_clear()
            out = np.zeros(1, np.uint32)
            host.run(Launch(Variant(description("pointer"), ()), 1, 1, (out.ctypes.data,)))
        launch.source.cache_clear()
        return int(out[0])

    assert [computed(version) for version in (1, 2)] == [1, 2]
    assert len(files_below(empty_cache)) == 2
    monkeypatch.setattr(host, "_compile", None)
    assert [computed(version) for version in (1, 2, 1)] == [1, 2, 1]


def test_place_of_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("GDN_CACHE_DIR", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    monkeypatch.setenv("HOME", str(tmp_path / "c"))
    assert cache.directory() == tmp_path / "a"
    monkeypatch.delenv("GDN_CACHE_DIR")
    assert cache.directory() == tmp_path / "b" / "gdn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.directory() == tmp_path / "c" / ".cache" / "gdn"
