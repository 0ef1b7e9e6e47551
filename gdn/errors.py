"""The one exception family. Every message names the argument, what was expected and what came."""

from __future__ import annotations


class GdnError(Exception):
    """Base of everything that gdn raises on purpose."""


class ShapeError(GdnError, ValueError):
    """An array's shape, or a size derived from shapes, cannot be served."""


class DTypeError(GdnError, TypeError):
    """An argument is not an array, or its element type is not accepted."""


class LayoutError(GdnError, ValueError):
    """Strides, alignment, writability or overlap of an array cannot be served."""


class IndexValueError(GdnError, ValueError):
    """An index array holds a value that its op cannot follow."""


class DeviceError(GdnError, RuntimeError):
    """Arrays live in different places, or the place or backend asked for cannot be used."""


class KernelCompileError(GdnError, RuntimeError):
    """A kernel did not compile; the message holds the compiler's first error."""


def rejection(argument: str, expected: str, got: object) -> str:
    """The one form of every message about an argument."""
    return f"{argument}: expected {expected}, got {got}"
