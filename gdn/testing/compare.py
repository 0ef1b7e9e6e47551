"""Two comparisons and the tolerances they are held to.

`close` judges a result against a more exact reference, `bitwise` judges two results that must be the same.
Both return a `Comparison`, which is true when it passed and otherwise names the first or worst place:

    assert_passed(
        close(out, reference_out, FLOAT32_TOLERANCE, name="out"),
        close(new_pool, reference_pool, storage_tolerance("bfloat16"), name="recurrent_state"),
    )

A comparison that compared nothing fails: a missing array, an empty one, two arrays of different shapes
(nothing is broadcast), and for `close` a NaN on either side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn.errors import DTypeError, rejection


@dataclass(frozen=True, slots=True)
class Tolerance:
    """How far a result may lie from its reference, and why that far.

    Attributes:
        relative_norm: the most that ‖actual − reference‖ / ‖reference‖ may be.
        max_element: the most that one element's error may be, over the reference's own scale, its largest magnitude.
            The norm alone would let one wrong element in 10^7 pass.
        reason: where the two limits come from; it is printed when they are exceeded.
    """

    relative_norm: float
    max_element: float
    reason: str

    def __post_init__(self) -> None:
        for limit in ("relative_norm", "max_element"):
            value = getattr(self, limit)
            if not 0 <= value < math.inf:
                raise ValueError(rejection(limit, "a finite limit of at least 0", value))
        if not self.reason.strip():
            raise ValueError(rejection("reason", "where the limits come from", repr(self.reason)))


FLOAT32_TOLERANCE = Tolerance(
    relative_norm=2e-6,
    max_element=1e-5,
    reason=(
        "float32 arithmetic and storage: prototypes measured a relative norm of 1.3e-7; the rest is room for "
        "wide heads and long sequences. The largest of 10^7 normally distributed errors is about 5 standard "
        "deviations, and the scale is at least the reference's root mean square: 5 x 2e-6 for one element"
    ),
)

# The largest relative error of one rounding to nearest is 2^-p for p significant bits, the implicit one
# counted: half the spacing 2^(1-p) of the numbers from 1 to 2.
_ROUNDING_ERROR = {"bfloat16": 2.0**-8, "float16": 2.0**-11}


def storage_tolerance(dtype_name: str) -> Tolerance:
    """The tolerance of float32 arithmetic whose result was rounded once to ``dtype_name`` at its store.

    dtype_name is "float32", "bfloat16" (8 significant bits, so one rounding adds at most 2^-8) or "float16"
    (11 bits, 2^-11). Both limits grow by that: no element's error exceeds 2^-p of itself, so neither does
    the norm's.

    float16 is subnormal below 2^-14 = 6.1e-5, where its spacing stays at 2^-24 and the relative error of a
    rounding has no bound. An array that is larger than that as a whole may hold such elements (their
    errors, at most 2^-25 each, vanish in the norm and the scale); an array that lies below it altogether
    needs a tolerance of its own. Past 65504 float16 is infinite, which no tolerance accepts.

    Raises DTypeError for another name.
    """
    if dtype_name == "float32":
        return FLOAT32_TOLERANCE
    if dtype_name not in _ROUNDING_ERROR:
        accepted = " or ".join(("float32", *_ROUNDING_ERROR))
        raise DTypeError(rejection("dtype_name", accepted, repr(dtype_name)))
    rounding_error = _ROUNDING_ERROR[dtype_name]
    return Tolerance(
        relative_norm=FLOAT32_TOLERANCE.relative_norm + rounding_error,
        max_element=FLOAT32_TOLERANCE.max_element + rounding_error,
        reason=f"float32 arithmetic, then one rounding to {dtype_name}, a relative {rounding_error:.1e}",
    )


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one comparison found. True when it passed.

    Attributes:
        measure: what was measured, in a table cell's width: "rel 1.3e-07", "bits", or what kept it from being
            measured, such as "shape".
        worst_error: for `close` the largest element error over the reference's scale; for `bitwise` the
            distance at worst_coordinate; infinite where there is no number to give.
        worst_coordinate: where that is (for `bitwise`, and for non-finite values, the first place); None where nothing
            was compared or nothing differs.
        expected: the value of the reference there.
        got: the value of the result there.
        num_differing: for `close` the elements past max_element or wrongly finite or non-finite; for `bitwise`
            the elements whose bits differ.
        message: one line that says it all.
    """

    name: str
    passed: bool
    measure: str
    worst_error: float
    worst_coordinate: tuple[int, ...] | None
    expected: float | None
    got: float | None
    num_differing: int
    message: str

    def __bool__(self) -> bool:
        """So that ``assert close(...)`` asserts what it says."""
        return self.passed


def assert_passed(*comparisons: Comparison) -> None:
    """Raise AssertionError with the message of every comparison that failed, or if there were none."""
    if not comparisons:
        raise AssertionError("nothing was compared")
    failures = [comparison.message for comparison in comparisons if not comparison.passed]
    if failures:
        raise AssertionError("\n".join(failures))


def close(
    actual: NDArray[Any] | None,
    reference: NDArray[Any] | None,
    tolerance: Tolerance,
    name: str = "array",
    *,
    allow_non_finite: bool = False,
) -> Comparison:
    """Judge ``actual`` against a more exact ``reference`` of the same shape, of any real types.

    First the places of NaN, +inf and −inf must be the same, and there must be none unless
    ``allow_non_finite`` is given (then they are left out of what follows, and something must remain). Then
    the relative norm and the largest element error must both be within ``tolerance``. Where the reference
    is zero throughout, ``actual`` must be exactly zero.
    """
    pair = _comparable_pair(actual, reference, name)
    if isinstance(pair, Comparison):
        return pair
    actual, reference = (array.astype(np.float64) for array in pair)
    kinds_differ = _kind_of_number(actual) != _kind_of_number(reference)
    if kinds_differ.any():
        return _not_the_same_kind(actual, reference, kinds_differ, name)
    non_finite = ~np.isfinite(reference)
    if non_finite.any():
        if not allow_non_finite or non_finite.all():
            return _non_finite_on_both_sides(actual, reference, non_finite, name)
        # A place that both sides share counts as 0 = 0: coordinates stay those of the whole array.
        actual, reference = np.where(non_finite, 0.0, actual), np.where(non_finite, 0.0, reference)
    return _within_tolerance(actual, reference, tolerance, name)


def bitwise(
    actual: NDArray[Any] | None,
    expected: NDArray[Any] | None,
    name: str = "array",
    *,
    ignore_zero_sign: bool = False,
) -> Comparison:
    """Judge whether two arrays of one shape and type hold the same bits.

    A NaN equals a NaN whatever its payload. −0 differs from +0 unless ``ignore_zero_sign`` is given.
    """
    pair = _comparable_pair(actual, expected, name)
    if isinstance(pair, Comparison):
        return pair
    actual, expected = pair
    if actual.dtype != expected.dtype:
        return _not_comparable(name, "dtype", f"expected {expected.dtype.name}, got {actual.dtype.name}")
    differing = _flat_positions_of_different_bits(actual, expected, ignore_zero_sign)
    if not differing.size:
        message = f"{name}: all {actual.size} elements equal to the bit"
        return Comparison(name, True, "bits", 0.0, None, None, None, 0, message)

    coordinate = _coordinate(differing[0], actual.shape)
    expected_there, got_there = float(expected[coordinate]), float(actual[coordinate])
    distance = abs(got_there - expected_there)
    return Comparison(
        name,
        passed=False,
        measure="bits",
        worst_error=distance if math.isfinite(distance) else math.inf,
        worst_coordinate=coordinate,
        expected=expected_there,
        got=got_there,
        num_differing=differing.size,
        message=(
            f"{name}: {differing.size} of {actual.size} elements differ in their bits, first at "
            f"{coordinate}: expected {expected_there!r}, got {got_there!r}"
        ),
    )


def same_bytes(actual: NDArray[Any], expected: NDArray[Any], name: str = "array") -> Comparison:
    """Judge whether two arrays of one shape and type hold the same bytes, the payload of every NaN included."""
    if actual.dtype != expected.dtype:
        return _not_comparable(name, "dtype", f"expected {expected.dtype.name}, got {actual.dtype.name}")
    integers = np.dtype(f"u{actual.dtype.itemsize}")
    return bitwise(np.ascontiguousarray(actual).view(integers), np.ascontiguousarray(expected).view(integers), name)


def _within_tolerance(
    actual: NDArray[np.float64], reference: NDArray[np.float64], tolerance: Tolerance, name: str
) -> Comparison:
    """Judge two finite arrays by the norm and by the largest element."""
    scale = float(np.abs(reference).max())
    with np.errstate(over="ignore"):
        errors = np.abs(actual - reference)
        # Against a reference of zeros every error is infinitely large, and no error is none.
        relative_errors = errors / scale if scale else np.where(errors > 0, np.inf, 0.0)
        relative_norm = float(np.linalg.norm(relative_errors))
    if scale:
        # Both norms are taken over the scale, so that no square leaves the range of float64.
        relative_norm /= float(np.linalg.norm(reference / scale))
    coordinate = _coordinate(relative_errors.argmax(), actual.shape)
    worst_error = float(relative_errors[coordinate])
    num_differing = int(np.count_nonzero(relative_errors > tolerance.max_element))
    passed = relative_norm <= tolerance.relative_norm and worst_error <= tolerance.max_element

    expected, got = float(reference[coordinate]), float(actual[coordinate])
    found = (
        f"{name}: relative norm {relative_norm:.1e} (limit {tolerance.relative_norm:.1e}), largest element "
        f"error {worst_error:.1e} of the scale {scale:.3g} (limit {tolerance.max_element:.1e}) at "
        f"{coordinate}: expected {expected!r}, got {got!r}"
    )
    blame = f"; {num_differing} of {actual.size} elements past that limit; limits: {tolerance.reason}"
    return Comparison(
        name,
        passed=passed,
        measure=f"rel {relative_norm:.1e}",
        worst_error=worst_error,
        worst_coordinate=coordinate,
        expected=expected,
        got=got,
        num_differing=num_differing,
        message=found if passed else found + blame,
    )


def _flat_positions_of_different_bits(
    actual: NDArray[Any], expected: NDArray[Any], ignore_zero_sign: bool
) -> NDArray[np.intp]:
    """Row-major positions, in order. Values are looked at only where bits differ, which is nearly nowhere."""
    bits = np.dtype(f"u{actual.dtype.itemsize}")
    differing = np.flatnonzero(actual.view(bits) != expected.view(bits))
    actual_there, expected_there = actual.flat[differing], expected.flat[differing]
    excused = np.isnan(actual_there) & np.isnan(expected_there)
    if ignore_zero_sign:
        excused |= (actual_there == 0) & (expected_there == 0)
    remaining: NDArray[np.intp] = differing[~excused]
    return remaining


def _kind_of_number(values: NDArray[np.float64]) -> NDArray[np.int8]:
    """0 for a finite value, 1 and −1 for the infinities, 2 for NaN."""
    kinds = np.zeros(values.shape, np.int8)
    kinds[np.isposinf(values)] = 1
    kinds[np.isneginf(values)] = -1
    kinds[np.isnan(values)] = 2
    return kinds


def _not_the_same_kind(
    actual: NDArray[np.float64], reference: NDArray[np.float64], kinds_differ: NDArray[np.bool_], name: str
) -> Comparison:
    coordinate = _coordinate(kinds_differ.argmax(), actual.shape)
    num_differing = int(np.count_nonzero(kinds_differ))
    expected, got = float(reference[coordinate]), float(actual[coordinate])
    message = (
        f"{name}: {num_differing} of {actual.size} elements are non-finite on one side only or in another "
        f"way, first at {coordinate}: expected {expected!r}, got {got!r}"
    )
    return Comparison(name, False, "non-finite", math.inf, coordinate, expected, got, num_differing, message)


def _non_finite_on_both_sides(
    actual: NDArray[np.float64], reference: NDArray[np.float64], non_finite: NDArray[np.bool_], name: str
) -> Comparison:
    coordinate = _coordinate(non_finite.argmax(), actual.shape)
    expected, got = float(reference[coordinate]), float(actual[coordinate])
    message = (
        f"{name}: {np.count_nonzero(non_finite)} of {actual.size} elements are non-finite on both sides, so "
        f"their values were not compared, first at {coordinate}: expected {expected!r}, got {got!r}"
    )
    return Comparison(name, False, "non-finite", math.inf, coordinate, expected, got, 0, message)


def _comparable_pair(
    actual: NDArray[Any] | None, expected: NDArray[Any] | None, name: str
) -> tuple[NDArray[Any], NDArray[Any]] | Comparison:
    """Both as NumPy arrays, or the failed comparison of two that leave nothing to compare."""
    if actual is None or expected is None:
        side = "actual" if actual is None else "expected"
        return _not_comparable(name, "missing", f"the {side} array is None")
    actual, expected = np.asarray(actual), np.asarray(expected)
    if not (_is_real(actual.dtype) and _is_real(expected.dtype)):
        types = f"{actual.dtype.name} and {expected.dtype.name}"
        return _not_comparable(name, "dtype", f"expected real numbers of at most 8 bytes, got {types}")
    if actual.shape != expected.shape:
        return _not_comparable(name, "shape", f"expected {expected.shape}, got {actual.shape}")
    if actual.size == 0:
        return _not_comparable(name, "empty", f"no element to compare in shape {actual.shape}")
    return actual, expected


def _not_comparable(name: str, measure: str, why: str) -> Comparison:
    return Comparison(name, False, measure, math.inf, None, None, None, 0, f"{name}: {measure}: {why}")


def _is_real(dtype: np.dtype[Any]) -> bool:
    """Booleans, integers and floats of at most 8 bytes, and the bfloat16 of `ml_dtypes`."""
    return dtype.name == "bfloat16" or (dtype.kind in "biuf" and dtype.itemsize <= 8)


def _coordinate(flat_position: np.intp, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(idx) for idx in np.unravel_index(flat_position, shape))
