"""What the CUDA and the host backend share: a kernel's description, its source text, a typed launch.

A kernel is `kernels/<stem>.cu` with one entry point of the same name. Its parameters are declared here
in Python, because neither CuPy nor ctypes knows the signature and both would pass a wrong width silently.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from gdn.errors import DeviceError, rejection

#: Name of a storage type in `kernels/numeric_types.cuh`, by element type name.
KERNEL_TYPE = {"float32": "float", "float16": "float16", "bfloat16": "bfloat16"}

MAX_GRID_BLOCKS = 2**31 - 1

_INCLUDE = re.compile(r'^\s*#include "([^"]+)"\s*$')
#: Values of a parameter by its kind. Every parameter is 8 bytes wide, so that CuPy may be handed Python ints.
_RANGES = {
    "pointer": (0, 2**64 - 1),
    "int64": (-(2**63), 2**63 - 1),
}


@dataclass(frozen=True, slots=True)
class Kernel:
    """One entry point: `kernels/<stem>.cu` defines `stem` with these parameters, in this order.

    only_on: the architecture whose instructions it uses, such as "sm_90a"; empty for one that runs on all.
    """

    stem: str
    parameters: tuple[tuple[str, str], ...]  # (name, "pointer" | "int64")
    only_on: str = ""

    def runs_on(self, architecture: str) -> bool:
        """Whether a GPU of this architecture, such as "sm_90", can run it."""
        return self.only_on.removesuffix("a") in ("", architecture)


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its compile-time constants: what one compiled binary is made from."""

    kernel: Kernel
    macros: tuple[tuple[str, str], ...]

    @property
    def launch_shared_bytes(self) -> int:
        """Shared memory that a launch must ask for, beside the kernel's own __shared__ variables."""
        return int(dict(self.macros).get("SHARED_BYTES", 0))

    @property
    def defines(self) -> tuple[str, ...]:
        """The macros as compiler options."""
        return tuple(f"-D{name}={value}" for name, value in self.macros)


@dataclass(frozen=True, slots=True)
class Launch:
    """A variant, its grid and block (both one-dimensional) and one integer per declared parameter.

    begins_early: that the grid may begin before the one in front of it in the stream has ended, where a GPU can do so;
    its kernel waits for that where it must (`kernels/grid_order.cuh`).
    """

    variant: Variant
    num_blocks: int
    threads_per_block: int
    arguments: tuple[int, ...]
    begins_early: bool = False

    def check(self) -> None:
        """Refuse what the hardware or the declared widths cannot carry."""
        if not 1 <= self.num_blocks <= MAX_GRID_BLOCKS:
            raise DeviceError(
                rejection(self.variant.kernel.stem, f"1 to {MAX_GRID_BLOCKS} blocks in a launch", self.num_blocks)
            )
        check_arguments(self.variant.kernel, self.arguments)


def check_arguments(kernel: Kernel, arguments: Sequence[int]) -> None:
    """Hold the arguments of a launch against the declared parameters: their number and their widths."""
    if len(arguments) != len(kernel.parameters):
        raise TypeError(f"{kernel.stem}: {len(kernel.parameters)} parameters, {len(arguments)} arguments")
    for (name, kind), value in zip(kernel.parameters, arguments, strict=True):
        low, high = _RANGES[kind]
        if not low <= value <= high:
            raise OverflowError(f"{kernel.stem}: {name}={value} does not fit {kind}")


@cache
def kernel_text(file_name: str) -> str:
    """The text of one file of `kernels/`."""
    return (files("gdn.kernels") / file_name).read_text(encoding="utf-8")


@cache
def source(file_name: str) -> str:
    """`kernels/<file_name>` with its own includes put in place, once each.

    Compilers' caches know only the text they are given, so an edited header must change it. `#line`
    keeps the file names in compiler messages true.
    """
    seen: set[str] = set()

    def expand(name: str) -> list[str]:
        seen.add(name)
        lines = [f'#line 1 "{name}"']
        for number, line in enumerate(kernel_text(name).splitlines(), start=1):
            match = _INCLUDE.match(line)
            if match is None:
                lines.append(line)
            elif match[1] not in seen:
                lines += [*expand(match[1]), f'#line {number + 1} "{name}"']
            else:
                lines.append("")
        return lines

    return "\n".join(expand(file_name)) + "\n"
