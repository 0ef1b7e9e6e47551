"""Files that a run ends with, and streams that nobody reads, or that have no room, any more."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import click


def discard(stream: TextIO | None) -> None:
    """Send a stream nowhere: what Python still holds for it must not become a message at its exit."""
    with suppress(OSError, ValueError, AttributeError):  # it may be no file at all
        if stream is not None and not stream.isatty():
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
            stream.flush()


def require_writable(path: Path) -> None:
    """Refuse a file that could not be written when the work is done. Raises UsageError; leaves nothing behind."""
    target = path.resolve()
    if not target.parent.is_dir():
        raise click.UsageError(f"no folder {target.parent} to write {target.name} to")
    try:
        if target.is_file() or not target.exists():
            is_new = not target.exists()
            target.open("ab").close()
            if is_new:
                target.unlink()
        elif target.is_dir() or not os.access(target, os.W_OK):  # opening a pipe would wait for its reader
            raise click.UsageError(f"cannot write {path}: it is {'a folder' if target.is_dir() else 'read-only'}")
    except OSError as error:
        raise click.UsageError(f"cannot write {path}: {error.strerror or error}") from error


def save_text(path: Path, text: str) -> None:
    """Write a file, whole or not at all: what was there stays until all of the text is on the disk.

    Raises ClickException where that fails.
    """
    target = path.resolve()
    try:
        if os.access(target.parent, os.W_OK) and (target.is_file() or not target.exists()):
            _replace(target, text)
        else:  # a pipe, a device, or a file in a folder that takes no other
            target.write_text(text, encoding="ascii")
    except OSError as error:
        raise click.ClickException(f"cannot write {path}: {error.strerror or error}") from error


def _replace(target: Path, text: str) -> None:
    temporary = target.with_name(f".gdn-{os.getpid()}.tmp")  # short, and with the permissions of any new file
    try:
        temporary.write_text(text, encoding="ascii")
        if target.exists():
            shutil.copymode(target, temporary)
        temporary.replace(target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
