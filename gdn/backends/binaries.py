"""Kernels that were compiled ahead of time: the names of their files, and the folders where they are looked for.

A file is an entry of `gdn.backends.cache`: a line of JSON that says what it is, and the image. Its name holds all that
the image is made from but the version of NVRTC, since a machine that only runs kernels may have another one, or none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gdn.backends import cache
from gdn.backends.launch import Variant, source
from gdn.backends.nvrtc import Binary, CompileReport, all_options

#: Folders with kernels that were shipped, parted as in PATH.
FOLDERS_VARIABLE = "GDN_KERNEL_DIR"

#: The end of the name of a file with a kernel.
SUFFIX = ".kernel"

# Readable by all, as folders that are shipped may be another user's.
_FILE_MODE = 0o644


def folders() -> tuple[Path, ...]:
    """Where kernels are looked for: the folders of `GDN_KERNEL_DIR`, then the cache."""
    shipped = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    ours = cache.directory()
    return (*(Path(folder).absolute() for folder in shipped if folder), *([ours] if ours else []))


def file_name(variant: Variant, architecture: str) -> str:
    """The name of the file for a variant on `architecture`, such as "sm_90"."""
    return _file_name(variant, architecture, _identity(variant))


def _file_name(variant: Variant, architecture: str, identity: str) -> str:
    return f"{variant.kernel.stem}-{architecture}-{identity}{SUFFIX}"


def _identity(variant: Variant) -> str:
    """A digest of what a binary is made from on every architecture."""
    parts = (*all_options(variant), source(f"{variant.kernel.stem}.cu"))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def write(folder: Path, variant: Variant, architecture: str, binary: Binary) -> Path:
    """Write the file of a variant into a folder, and say where. Raises OSError where that fails."""
    facts = {**_made_from(variant, architecture), "nvrtc": binary.nvrtc, "report": asdict(binary.report)}
    content = json.dumps(facts).encode() + b"\n" + binary.image
    return cache.write(folder / file_name(variant, architecture), content, mode=_FILE_MODE)


def read(folder: Path, variant: Variant, architecture: str) -> Binary | None:
    """The binary of a variant in a folder, or None where it is missing or damaged."""
    return _read(folder, variant, architecture, _identity(variant))


def _made_from(variant: Variant, architecture: str) -> dict[str, Any]:
    return {"kernel": variant.kernel.stem, "architecture": architecture, "macros": dict(variant.macros)}


def _read(folder: Path, variant: Variant, architecture: str, identity: str) -> Binary | None:
    content = cache.read(folder / _file_name(variant, architecture, identity))
    if content is None:
        return None
    line, _, image = content.partition(b"\n")
    try:
        facts = json.loads(line)
        if any(facts[name] != fact for name, fact in _made_from(variant, architecture).items()):
            return None  # a file that was given another one's name
        return Binary(image, CompileReport(**facts["report"]), str(facts["nvrtc"]))
    except (ValueError, KeyError, TypeError):  # of another version of this module
        return None


def find(variant: Variant, capability: tuple[int, int]) -> Iterator[Binary]:
    """Binaries of a variant that a GPU of this compute capability may run, the one to try first coming first."""
    identity = _identity(variant)
    for folder in folders():
        for architecture in architectures_for(capability):
            binary = _read(folder, variant, architecture, identity)
            if binary is not None:
                yield binary


def architectures_for(capability: tuple[int, int]) -> tuple[str, ...]:
    """What a GPU of this compute capability may run: its own, then earlier ones of the same generation."""
    major, minor = capability
    return tuple(f"sm_{major}{earlier}" for earlier in range(minor, -1, -1))
