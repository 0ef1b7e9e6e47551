"""Rules for arguments by themselves: each at its edges, and each message in full."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from gdn import check
from gdn.arrays import Argument, take
from gdn.errors import DTypeError, GdnError, LayoutError, ShapeError


def argument(array: Any, **changes: Any) -> Argument:
    """What the rules see of an array, with some of it changed."""
    return take("given", array)._replace(**changes)


def refusal(error: type[GdnError], rule: Any, *arguments: Any) -> str:
    """The message with which a rule refuses its arguments."""
    with pytest.raises(GdnError) as caught:
        rule(*arguments)
    assert type(caught.value) is error
    return str(caught.value)


# ---- Types ----


@pytest.mark.parametrize(
    ("allowed", "words"),
    [
        (("float32",), "float32"),
        (("float32", "bfloat16"), "float32 or bfloat16"),
        (check.FLOAT_TYPES, "float32, float16 or bfloat16"),
    ],
)
def test_the_types_that_are_allowed_are_named(allowed: tuple[str, ...], words: str) -> None:
    message = refusal(DTypeError, check.require_float, argument(np.zeros(3, np.float64)), allowed)
    assert message == f"given: expected {words}, got float64"
    for name in allowed:
        check.require_float(argument(np.zeros(3), dtype=name), allowed)


# ---- Switches and functions ----


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_a_switch_is_a_bool_of_python_then(value: Any) -> None:
    known = check.known_flag("given", value)
    assert type(known) is bool
    assert known == value


@pytest.mark.parametrize("value", [0, 1, None, "True", np.zeros(1, bool), np.int8(1)], ids=repr)
def test_nothing_else_is_a_switch(value: Any) -> None:
    message = refusal(GdnError, check.known_flag, "given", value)
    assert message == f"given: expected True or False, got {value!r}"


def one() -> None:
    """A function of the table."""


def another() -> None:
    """A function of none."""


class Double:
    """Found in the table where `one` is, and no function."""

    def __eq__(self, other: object) -> bool:
        return other is one

    def __hash__(self) -> int:
        return hash(one)


TABLE = {one: 1, len: 2}
KNOWN = "given: expected one of one, len, got"


def test_a_function_stands_for_what_the_table_has() -> None:
    assert check.known_function("given", one, TABLE) == 1
    assert check.known_function("given", len, TABLE) == 2


@pytest.mark.parametrize(("function", "got"), [(another, "another"), (max, "max"), (Double.__eq__, "__eq__")])
def test_another_function_is_named(function: Any, got: str) -> None:
    assert refusal(GdnError, check.known_function, "given", function, TABLE) == f"{KNOWN} {got}"


NO_FUNCTIONS = {
    "nothing": None,
    "its name": "one",
    "unhashable": [],
    "an array": np.zeros(2),
    "its double": Double(),
    "a class": Double,
    "a part of it": functools.partial(one),
}


@pytest.mark.parametrize("thing", NO_FUNCTIONS.values(), ids=NO_FUNCTIONS)
def test_what_is_no_function_is_shown(thing: Any) -> None:
    """Unhashable things too, and things that would be found in the table."""
    assert refusal(GdnError, check.known_function, "given", thing, TABLE) == f"{KNOWN} {thing!r}"


# ---- A workspace ----


def workspace(num_bytes: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """Bytes that start so far behind a multiple of 16."""
    whole = np.zeros(num_bytes + offset + 16, np.uint8)
    first = -whole.ctypes.data % 16 + offset
    return whole[first : first + num_bytes]


@pytest.mark.parametrize("num_bytes", [0, 1, 100])
def test_a_workspace_of_just_enough_bytes_is_taken(num_bytes: int) -> None:
    check.require_workspace(argument(workspace(num_bytes)), num_bytes)
    check.require_workspace(argument(workspace(num_bytes + 1)), num_bytes)


def test_a_workspace_without_bytes_may_lie_anywhere() -> None:
    check.require_workspace(argument(workspace(0, offset=8)), 0)


def test_a_workspace_that_cannot_be_used() -> None:
    for array, error, words in (
        (workspace(64).reshape(1, 64), ShapeError, "shape [num_bytes], got shape (1, 64)"),
        (workspace(64).view(np.int8), DTypeError, "uint8, got int8"),
        (workspace(63), ShapeError, "at least 64 bytes, got 63"),
        (
            workspace(128)[::2],
            LayoutError,
            "its last 1 axes dense row-major, got strides (2,) in elements for shape (64,)",
        ),
    ):
        assert refusal(error, check.require_workspace, argument(array), 64) == f"given: expected {words}"


@pytest.mark.parametrize("offset", [1, 8, 15])
def test_a_workspace_starts_on_a_wide_boundary(offset: int) -> None:
    array = workspace(64, offset)
    message = refusal(LayoutError, check.require_workspace, argument(array), 64)
    assert message == f"given: expected an address that is a multiple of 16 bytes, got {array.ctypes.data}"


# ---- Strides ----


@pytest.mark.parametrize("shape", [(1, 4), (2, 4), (3, 4)])
def test_entries_may_touch_and_may_not_meet(shape: tuple[int, int]) -> None:
    """One entry has nothing to meet, whatever its stride."""
    memory = np.zeros(16, np.float32)
    for stride in (4, -4):
        check.require_dense_after(argument(np.zeros(shape, np.float32), strides=(stride, 1)), 1)
    close = argument(memory[:4].reshape(1, 4), shape=shape, size=shape[0] * 4, strides=(3, 1))
    if shape[0] == 1:
        check.require_dense_after(close, 1)
    else:
        expected = "given: expected a first stride of at least 4 elements, got 3"
        assert refusal(LayoutError, check.require_dense_after, close, 1) == expected


def test_strides_of_no_elements_mean_nothing() -> None:
    empty = argument(np.zeros((3, 0), np.float32), strides=(0, 7))
    check.require_dense_after(empty, 0)
    check.require_dense_after(empty._replace(shape=(0, 4)), 1)
    check.require_distinct_elements(empty._replace(strides=(0, 0)))


STEPS = range(-7, 8)


@pytest.mark.parametrize("shape", [(rows, columns) for rows in range(1, 5) for columns in range(1, 6)], ids=str)
def test_distinct_elements_are_those_that_never_meet(shape: tuple[int, int]) -> None:
    """Every pair of short strides, held against all places, counted."""
    rows, columns = shape
    for strides in itertools.product(STEPS, STEPS):
        places = {row * strides[0] + column * strides[1] for row in range(rows) for column in range(columns)}
        given = argument(np.zeros(1, np.float32), shape=shape, size=rows * columns, strides=strides)
        if len(places) == rows * columns:
            check.require_distinct_elements(given)
        else:
            got = f"strides {strides} in elements for shape {shape}"
            message = refusal(LayoutError, check.require_distinct_elements, given)
            assert message == f"given: expected distinct memory for every element, got {got}"
