"""Gated DeltaNet recurrence kernels for CuPy and NumPy, with a float64 oracle that checks them.

The functions are in `gdn.ops`. Importing this package loads neither CuPy nor CUDA.
"""

from __future__ import annotations

import os as _os
from collections.abc import Callable as _Callable
from typing import Any as _Any

# The distribution maps the checkout's top-level `cli/` and `kernels/` into this package. Run from a checkout
# without installing, the mapping does not exist yet, so the checkout's root joins the search path.
_checkout = _os.path.dirname(_os.path.dirname(_os.path.abspath(__file__)))
if _os.path.isfile(_os.path.join(_checkout, "pyproject.toml")) and _checkout not in __path__:
    __path__.append(_checkout)

from gdn.backends import available_backends, unavailable_backends, use_backend  # noqa: E402 - needs the path above
from gdn.errors import (  # noqa: E402 - needs the path above
    DeviceError,
    DTypeError,
    GdnError,
    IndexValueError,
    KernelCompileError,
    LayoutError,
    ShapeError,
)
from gdn.geometry import PAD_SLOT  # noqa: E402 - needs the path above


def warmup(op: _Callable[..., _Any], /, *arguments: _Any, **keywords: _Any) -> None:
    """Compile and load what a call of an op needs, and run nothing: `gdn.ops.warmup`."""
    from gdn import ops  # loads NumPy, which this package does not by itself

    ops.warmup(op, *arguments, **keywords)


__version__ = "0.1.0"

__all__ = [
    "PAD_SLOT",
    "DTypeError",
    "DeviceError",
    "GdnError",
    "IndexValueError",
    "KernelCompileError",
    "LayoutError",
    "ShapeError",
    "available_backends",
    "unavailable_backends",
    "use_backend",
    "warmup",
]
