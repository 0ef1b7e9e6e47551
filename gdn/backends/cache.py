"""Where compiled kernels live between processes: one file per entry, with a digest of its bytes at its end.

An entry is written under another name and moved into place, so that processes that start together see whole
entries only; the digest finds those that a full disk or a crash left damaged. A shared library is loaded from
its entry as it lies: the loader does not mind bytes behind the image. Kernels for a GPU are entries too
(`gdn.backends.binaries`), here or in a folder that was shipped.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from threading import Lock

_DIGEST_BYTES = hashlib.sha256().digest_size

_lock = Lock()
_private_directories: dict[int, Path] = {}  # by process id, since a forked child must not share its parent's


class NoPlace(OSError):
    """No folder takes an entry; says which were tried, and why each did not."""


def directory() -> Path | None:
    """The folder of the entries: `GDN_CACHE_DIR`, else `$XDG_CACHE_HOME/gdn`, else `~/.cache/gdn`.

    It need not exist, nor be writable: then entries go to a temporary folder of this process. None without a home.
    """
    chosen = os.environ.get("GDN_CACHE_DIR")
    if chosen:
        return Path(chosen).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification has relative paths ignored.
    base = Path(xdg) if os.path.isabs(xdg) else Path(os.path.expanduser("~"), ".cache")
    # Without a home, as some containers have it, "~" stays what it is; never load code from below the current folder.
    return base / "gdn" if base.is_absolute() else None


def size_bytes() -> int:
    """Bytes of all entries in `directory()`."""
    total = 0
    folder = directory()
    with suppress(OSError):
        for entry in os.scandir(folder) if folder else ():
            with suppress(OSError):  # another process may be replacing it
                total += entry.stat().st_size
    return total


def find(name: str) -> Path | None:
    """The entry `name`, or None where there is none or its bytes are not those that were stored."""
    for folder in (directory(), _private_directories.get(os.getpid())):
        if folder is not None and read(folder / name) is not None:
            return folder / name
    return None


def store(name: str, content: bytes) -> Path:
    """Write the entry `name` and say where it lies.

    Raises NoPlace where not even the temporary folder can be written.
    """
    refusals = []
    folder = directory()
    if folder is not None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            return write(folder / name, content)
        except OSError as error:
            refusals.append(f"{folder}: {error.strerror or error}")
    try:
        return write(_private_directory() / name, content)
    except OSError as error:
        refusals.append(refusal_of_temporary_folder(error))
        raise NoPlace("; ".join(refusals)) from error


def read(path: Path) -> bytes | None:
    """What `write` was given for this file; None where there is none or its bytes are not those that were stored."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    content, digest = stored[:-_DIGEST_BYTES], stored[-_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


def write(path: Path, content: bytes, *, mode: int = 0o600) -> Path:
    """Write an entry into a folder that exists, and say where it lies.

    Raises OSError where the folder cannot be written.
    """
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, mode)
            file.write(content + hashlib.sha256(content).digest())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def refusal_of_temporary_folder(error: OSError) -> str:
    """Which temporary folder did not take a file, and why."""
    try:
        return f"{tempfile.gettempdir()}: {error.strerror or error}"
    except OSError as none_is_usable:  # it names all that were tried
        return none_is_usable.strerror or str(none_is_usable)


def _private_directory() -> Path:
    """A folder of this process alone, removed when it ends."""
    pid = os.getpid()
    with _lock:
        # What cleans temporary folders up may have removed it from under a process that runs for weeks.
        if pid not in _private_directories or not _private_directories[pid].is_dir():
            path = Path(tempfile.mkdtemp(prefix="gdn-"))
            _private_directories[pid] = path
            atexit.register(_remove_private_directory, pid, path)
        return _private_directories[pid]


def _remove_private_directory(pid: int, path: Path) -> None:
    if pid == os.getpid():  # a forked child inherits the registration, not the folder
        shutil.rmtree(path, ignore_errors=True)
