"""Rules that arguments of any op must meet. Each raises a GdnError that names the argument, expected and got."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any, TypeVar

import numpy as np

from gdn.arrays import ALIGNMENT, CPU, Argument
from gdn.errors import DeviceError, DTypeError, GdnError, LayoutError, ShapeError, rejection

_Value = TypeVar("_Value")

FLOAT_TYPES = ("float32", "float16", "bfloat16")
INDEX_TYPES = ("uint32", "int32")
# Exact overlap of two strided arrays is a hard problem in general; a few thousand steps decide every layout
# seen in practice, and a layout they do not decide is refused.
_OVERLAP_STEPS = 4096


def require_float(argument: Argument, allowed: Sequence[str] = FLOAT_TYPES) -> None:
    """The element type is one of `allowed`."""
    if argument.dtype not in allowed:
        raise DTypeError(rejection(argument.name, _one_of(allowed), argument.dtype))


def known_flag(name: str, value: Any) -> bool:
    """A switch, which is True or False and nothing that Python would take for either."""
    if not isinstance(value, (bool, np.bool_)):
        raise GdnError(rejection(name, "True or False", repr(value)))
    return bool(value)


def known_function(name: str, function: Any, known: Mapping[Any, _Value]) -> _Value:
    """What stands for a function in a table of those that are taken; anything at all may have been given."""
    if inspect.isroutine(function) and function in known:
        return known[function]
    expected = f"one of {', '.join(one.__name__ for one in known)}"
    raise GdnError(rejection(name, expected, function.__name__ if inspect.isroutine(function) else repr(function)))


def require_workspace(argument: Argument, num_bytes: int) -> None:
    """Memory of at least so many bytes, whatever it holds."""
    require_ndim(argument, "[num_bytes]")
    if argument.dtype != "uint8":
        raise DTypeError(rejection(argument.name, "uint8", argument.dtype))
    if argument.shape[0] < num_bytes:
        raise ShapeError(rejection(argument.name, f"at least {num_bytes} bytes", argument.shape[0]))
    require_dense_after(argument, 0)
    if argument.size and argument.pointer % ALIGNMENT:
        expected = f"an address that is a multiple of {ALIGNMENT} bytes"
        raise LayoutError(rejection(argument.name, expected, argument.pointer))


def require_index(argument: Argument) -> None:
    """The element type is a 32-bit integer; wider ones are refused rather than reinterpreted."""
    if argument.dtype not in INDEX_TYPES:
        cast = f"{argument.dtype} (cast it: {argument.name}.astype('uint32'))"
        raise DTypeError(rejection(argument.name, _one_of(INDEX_TYPES), cast))


def _one_of(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def require_ndim(argument: Argument, axes: str) -> None:
    """As many axes as `axes` names, for example "[total_seq_len, conv_dim]"."""
    if len(argument.shape) != axes.count(",") + 1:
        raise ShapeError(rejection(argument.name, f"shape {axes}", f"shape {argument.shape}"))


def require_shape(argument: Argument, axes: str, expected: tuple[int, ...]) -> None:
    """Exactly this shape; `axes` says what its numbers mean."""
    if argument.shape != expected:
        raise ShapeError(rejection(argument.name, f"shape {axes} = {expected}", f"shape {argument.shape}"))


def require_dense_after(argument: Argument, axis: int) -> None:
    """Axes from `axis` on are dense row-major, and steps along earlier axes never land in another entry."""
    entry = 1
    for length in argument.shape[axis:]:
        entry *= length
    if argument.size and not argument.is_dense(axis):
        raise LayoutError(
            rejection(
                argument.name,
                f"its last {len(argument.shape) - axis} axes dense row-major",
                f"strides {argument.strides} in elements for shape {argument.shape}",
            )
        )
    if axis and argument.size and argument.shape[0] > 1 and abs(argument.strides[0]) < entry:
        raise LayoutError(rejection(argument.name, f"a first stride of at least {entry} elements", argument.strides[0]))


def require_distinct_elements(argument: Argument) -> None:
    """No two index pairs of a two-dimensional array that will be written name the same memory."""
    (rows, columns), (row_stride, column_stride) = argument.shape, argument.strides
    if argument.size <= 1:
        return
    # row_stride * i = column_stride * j has its smallest non-zero solution at the strides over their gcd.
    divisor = gcd(row_stride, column_stride)
    if divisor == 0 or (abs(column_stride) // divisor < rows and abs(row_stride) // divisor < columns):
        raise LayoutError(
            rejection(
                argument.name,
                "distinct memory for every element",
                f"strides {argument.strides} in elements for shape {argument.shape}",
            )
        )


def require_writable(argument: Argument) -> None:
    """The array may be written."""
    if argument.place == CPU and not argument.array.flags.writeable:
        raise LayoutError(rejection(argument.name, "a writable array", "a read-only one"))


def require_one_place(arguments: Sequence[Argument]) -> str:
    """All arrays of a call live together; returns where."""
    first = arguments[0]
    for argument in arguments[1:]:
        if argument.place != first.place:
            raise DeviceError(
                rejection(
                    argument.name,
                    f"an array on {first.place}, where {first.name} is",
                    f"one on {argument.place}",
                )
            )
    if first.place is None:
        raise DeviceError(rejection(first.name, "an array", "a shape alone"))
    return first.place


def require_disjoint(written: Argument, others: Sequence[Argument]) -> None:
    """Memory that a call writes is not memory that it reads or writes through another argument."""
    for other in others:
        if _overlaps(written, other):
            raise LayoutError(
                rejection(written.name, f"memory of its own, apart from {other.name}", "overlapping arrays")
            )


def _overlaps(left: Argument, right: Argument) -> bool:
    if left.end <= right.begin or right.end <= left.begin or not (left.size and right.size):
        return False
    try:
        return np.shares_memory(_Addresses(left), _Addresses(right), max_work=_OVERLAP_STEPS)  # type: ignore[arg-type]  # NumPy's stub forgets __array_interface__
    except np.exceptions.TooHardError:
        return True


class _Addresses:
    """The addresses of an array, wherever it lives, in the form NumPy's overlap test takes; never read from."""

    def __init__(self, argument: Argument) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "shape": argument.shape,
            "strides": tuple(stride * argument.itemsize for stride in argument.strides),
            "typestr": f"|V{argument.itemsize}",
            "data": (argument.pointer, True),
        }
