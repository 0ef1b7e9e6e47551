"""Kernels in processes of their own: odd folders, empty, damaged and read-only caches, forks, foreign GPUs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gdn.backends import host, nvrtc
from gdn.backends.gated_delta_gates import KERNEL
from gdn.backends.launch import Kernel, Variant, check_arguments
from gdn.errors import KernelCompileError

ROOT = Path(__file__).parents[1]

#: Runs an op on the backend that is named first, and prints what came out; "found" refuses to compile anything.
RUN = """
import hashlib, sys
import numpy as np
import gdn, gdn.ops

backend, how = sys.argv[1:3]
if how == "found":
    from gdn.backends import host
    host._compile = None
    if backend == "cuda":
        import cupy.cuda.compiler
        cupy.cuda.compiler._compile_using_nvrtc_no_warning = None
if backend == "cuda":
    import cupy as xp
else:
    xp = np

def run():
    random = np.random.default_rng(0)
    qkv, weight = (xp.asarray(random.standard_normal(shape).astype(np.float32)) for shape in ((9, 40), (40, 4)))
    tables = xp.asarray(np.uint32([1, 0])), xp.asarray(np.uint32([0, 4, 9]))
    pool = xp.zeros((2, 40, 3), np.float32)
    out = gdn.ops.gated_delta_conv1d_fwd(qkv, weight, pool, *tables, activation="silu")
    both = [array if backend == "host" else array.get() for array in (out, pool)]
    return hashlib.sha256(b"".join(array.tobytes() for array in both)).hexdigest()

if backend == "host":
    with gdn.use_backend("host"):
        print(run())
else:
    print(run())
"""


def start(backend: str, how: str = "compiled", *, root: Path = ROOT, **environment: str) -> subprocess.Popen[str]:
    """A process that runs the op above; the environment says where its caches are."""
    return subprocess.Popen(
        [sys.executable, "-W", "error::UserWarning", "-c", RUN, backend, how],
        env={**os.environ, "PYTHONPATH": str(root), **environment},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def output(process: subprocess.Popen[str]) -> str:
    found, errors = process.communicate(timeout=300)
    assert process.returncode == 0, errors
    return found


def caches(folder: Path) -> dict[str, str]:
    """Both caches, below a folder."""
    return {"GDN_CACHE_DIR": str(folder / "gdn"), "CUPY_CACHE_DIR": str(folder / "cupy")}


def test_many_processes_on_an_empty_cache_and_damaged_entries(kernels: str, tmp_path: Path) -> None:
    """Field cases 81, 82: all succeed with equal bits, a second start compiles nothing, a cut entry is made again."""
    where = caches(tmp_path)
    processes = [start(kernels, **where) for _ in range(8)]
    (expected,) = {output(process) for process in processes}
    assert output(start(kernels, "found", **where)) == expected
    entries = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(entries) == 1
    for entry in entries:
        whole = entry.read_bytes()
        entry.unlink()
        entry.write_bytes(whole[: len(whole) // 2])
    assert output(start(kernels, **where)) == expected
    assert output(start(kernels, "found", **where)) == expected


def test_a_cache_that_is_read_only(kernels: str, tmp_path: Path) -> None:
    """Field case 82. A file in the way of an entry's folder stops root as well."""
    expected = output(start(kernels, **caches(tmp_path / "usual")))
    (tmp_path / "file").write_text("in the way")
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy").chmod(0o500)
    where = {"GDN_CACHE_DIR": str(tmp_path / "file" / "gdn"), "CUPY_CACHE_DIR": str(tmp_path / "cupy")}
    assert output(start(kernels, **where)) == expected


def test_folders_with_spaces_and_letters_beyond_ascii(kernels: str, tmp_path: Path) -> None:
    """Field case 89: the checkout and the caches in such a folder, in the C locale without UTF-8 mode."""
    root = tmp_path / "ein Ordner für Übungen"
    for name in ("gdn", "cli", "kernels"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    locale = {"LANG": "C", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    where = {**caches(root / "der Zwischenspeicher ß"), **locale}
    expected = output(start(kernels, **caches(tmp_path / "usual")))
    assert output(start(kernels, root=root, **where)) == expected
    assert output(start(kernels, "found", root=root, **where)) == expected


FORK = """
import os, sys
import numpy as np
import gdn, gdn.ops

def run():
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in ((5, 4), (5, 4), (4,), (4,))]
    return b"".join(gate.tobytes() for gate in gdn.ops.gated_delta_gates(*arrays))

with gdn.use_backend(sys.argv[1]):
    before = run()
    child = os.fork()
    right = run() == before
    if child == 0:
        sys.exit(0 if right else 1)  # with all that is registered for the end of a process
    print(right, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(os.listdir(os.environ["TMPDIR"])))
"""


def test_a_fork_after_the_import(cpu_backend: str, tmp_path: Path) -> None:
    """Field case 88: on the CPU both processes go on. (CUDA allows no use in a child of a process that used it.)

    Without a cache what was compiled lies in a folder of the parent, which outlives the child and not the parent.
    """
    (tmp_path / "file").touch()
    (tmp_path / "temporary").mkdir()
    where = {"GDN_CACHE_DIR": str(tmp_path / "file" / "cache"), "TMPDIR": str(tmp_path / "temporary")}
    done = subprocess.run(
        [sys.executable, "-c", FORK, cpu_backend],
        env={**os.environ, "PYTHONPATH": str(ROOT), **where},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    num_folders = 1 if cpu_backend == "host" else 0
    assert (done.returncode, done.stdout) == (0, f"True 0 {num_folders}\n"), done.stderr
    assert list((tmp_path / "temporary").iterdir()) == []


FULL = """
import sys, tempfile
from pathlib import Path
import numpy as np
from gdn.backends import host
from gdn.backends.launch import Kernel
from gdn.errors import DeviceError

folder = Path(sys.argv[1])
kernel = Kernel("kernel", (("out", "pointer"),))

def computed(number):
    text = 'extern "C" __global__ void kernel(unsigned int* out) { out[0] = %d; }' % number
    out = np.zeros(1, np.uint32)
    host.build(kernel, text).launch(1, 1, (out.ctypes.data,))
    return out[0]

def files():
    return [path.name for path in folder.rglob("*") if path.is_file()]

filler = (folder / "filler").open("wb", buffering=0)
try:
    while True:
        filler.write(bytes(4096))
except OSError as error:
    assert error.errno == 28, error
print(computed(1), files())
tempfile.tempdir = None  # the folder that was found instead is forgotten
filler.truncate(filler.tell() - 12288)
try:
    computed(2)
except DeviceError as error:
    print(error)
print(files())
filler.truncate(0)
print(computed(2), len(files()))
"""


def test_a_full_disk(tmp_path: Path) -> None:
    """Where there is another folder for temporary files, work goes on there, for this process alone. Where a file fits
    but not the compiler's, one line says which folder and what to do; nothing is left, and with room the call succeeds.
    """
    if host.unavailable_reason() is not None:
        pytest.skip("no host backend")
    folder = tmp_path / "full disk"
    folder.mkdir()
    mount = 'mount -t tmpfs -o size=1m tmpfs "$1" && exec "$0" -c "$2" "$1"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount, sys.executable]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare to mount a small disk")
    done = subprocess.run(
        [*command, str(folder), FULL],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GDN_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no small disk: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")
    expected = "kernel: expected room for the compiler's files (make some, or set TMPDIR to another folder), got "
    assert done.stdout.splitlines() == [
        "1 ['filler']",
        f"{expected}{folder}: No space left on device",
        "['filler']",
        "2 2",
    ]


HOMELESS = """
import json, sys
from click.testing import CliRunner
from gdn.cli.main import main
for arguments in (["info", "--json"], ["compile", "--ops", "pending_windows", "--arch", "sm_90", "--out", sys.argv[1]]):
    result = CliRunner().invoke(main, arguments)
    print(json.dumps([result.exit_code, result.stdout, result.stderr]))
"""


def test_a_home_that_takes_no_folder(tmp_path: Path) -> None:
    """Such as /nonexistent: CuPy cannot even be imported, and it is said what helps; the other backends run."""
    pytest.importorskip("cupy")
    kept = {name: value for name, value in os.environ.items() if name not in ("CUPY_CACHE_DIR", "XDG_CACHE_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", HOMELESS, str(tmp_path)],
        env={**kept, "PYTHONPATH": str(ROOT), "HOME": os.devnull},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    info, refused = (json.loads(line) for line in done.stdout.splitlines())
    backends = json.loads(info[1])["backends"]
    assert backends["cuda"].startswith("CuPy finds no folder for its cache (")
    assert backends["cuda"].endswith("; set CUPY_CACHE_DIR to one that can be written")
    assert backends["numpy"] == "available"
    assert (refused[0], refused[1]) == (2, "")
    expected = "a folder for CuPy's cache (set CUPY_CACHE_DIR to one that can be written)"
    assert refused[2].startswith(f"Error: NVRTC: expected {expected}, got ")


def test_an_architecture_that_nvrtc_does_not_know() -> None:
    """Field case 88: one clear line."""
    pytest.importorskip("cupy")
    types = (("INPUT_TYPE", "float"), ("RATE_TYPE", "float"), ("BIAS_TYPE", "float"))
    with pytest.raises(KernelCompileError, match=r"^gated_delta_gates: expected a clean compile .*-arch") as caught:
        nvrtc.compile_binary(Variant(KERNEL, types), "sm_999")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "low", "high"), [("pointer", 0, 2**64 - 1), ("int64", -(2**63), 2**63 - 1)])
def test_scalars_at_their_extremes(kind: str, low: int, high: int) -> None:
    """Field case 78: every argument of a launch has a declared width, and what does not fit is no launch."""
    parameters = [parameter for parameter in KERNEL.parameters if parameter[1] == kind]
    place = KERNEL.parameters.index(parameters[0])
    arguments = [0] * len(KERNEL.parameters)
    for value in (low, high):
        arguments[place] = value
        check_arguments(KERNEL, arguments)
    for value in (low - 1, high + 1):
        arguments[place] = value
        with pytest.raises(OverflowError, match=f"{parameters[0][0]}={value} does not fit {kind}"):
            check_arguments(KERNEL, arguments)


WIDE = """extern "C" __global__ void kernel(long long* out, long long low, long long high, long long minus_one) {
    out[0] = low;
    out[1] = high;
    out[2] = minus_one;
}"""


def test_a_kernel_gets_every_bit_of_its_scalars() -> None:
    """Field case 78, on the CPU; on a GPU the arguments lie in memory as 64-bit words, which test_plans.py holds."""
    if host.unavailable_reason() is not None:
        pytest.skip("no host backend")
    names = ("low", "high", "minus_one")
    kernel = Kernel("kernel", (("out", "pointer"), *((name, "int64") for name in names)))
    values, out = (-(2**63), 2**63 - 1, -1), np.zeros(3, np.int64)
    host.build(kernel, WIDE).launch(1, 1, (out.ctypes.data, *values))
    assert tuple(out) == values
