"""The comparator fed every kind of wrong result (case 90), and right ones that must pass."""

from __future__ import annotations

import math
import time

import ml_dtypes
import numpy as np
import pytest

from gdn.errors import DTypeError
from gdn.testing import (
    FLOAT32_TOLERANCE,
    Comparison,
    Tolerance,
    assert_passed,
    bitwise,
    close,
    same_bytes,
    storage_tolerance,
)

SHAPE = (3, 4, 50)


def reference_array(shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape)


def compare_closely(actual: object, reference: object, **options: bool) -> Comparison:
    return close(actual, reference, FLOAT32_TOLERANCE, name="out", **options)


# ---- close: right results


@pytest.mark.parametrize("dtype_name", ["float32", "float16", "bfloat16"])
def test_one_rounding_passes_and_a_coarser_one_does_not(dtype_name):
    reference = reference_array()
    rounded = reference.astype(np.dtype(dtype_name))
    comparison = close(rounded, reference, storage_tolerance(dtype_name), name="state")
    assert comparison
    assert comparison.num_differing == 0
    assert comparison.measure.startswith("rel ")
    assert close(rounded, reference, Tolerance(1e-9, 1e-9, "far below any rounding")).passed is False


@pytest.mark.parametrize(("dtype_name", "smallest_above_one"), [("bfloat16", 1 + 2**-7), ("float16", 1 + 2**-10)])
def test_the_storage_tolerance_is_one_rounding_and_not_two(dtype_name, smallest_above_one):
    """Half way between two neighbours is the worst rounding there is; a whole step is too much."""
    halfway = np.full(SHAPE, (1 + smallest_above_one) / 2)
    tolerance = storage_tolerance(dtype_name)
    assert close(halfway.astype(np.dtype(dtype_name)), halfway, tolerance)
    assert not close(np.full(SHAPE, smallest_above_one), np.ones(SHAPE), tolerance)


def test_the_same_array_passes_at_any_magnitude():
    for magnitude in (1e-300, 1e-30, 1.0, 1e30, 1e300):
        reference = magnitude * reference_array()
        comparison = compare_closely(reference * (1 + 1e-7), reference)
        assert comparison
        assert comparison.measure == "rel 1.0e-07"


def test_zero_throughout_is_equal_to_zero():
    assert compare_closely(-np.zeros(SHAPE), np.zeros(SHAPE))


def test_scalars_compare():
    assert compare_closely(np.float32(2), np.float64(2))


# ---- close: wrong results


def one_wrong(reference: np.ndarray) -> np.ndarray:
    wrong = reference.copy()
    wrong[2, 1, 7] += 0.01
    return wrong


@pytest.mark.parametrize(
    ("wrong", "measure"),
    [
        (lambda reference: np.full_like(reference, np.nan), "non-finite"),
        (np.zeros_like, "rel"),
        (lambda reference: np.random.default_rng(1).standard_normal(reference.shape), "rel"),
        (lambda reference: reference * 1.001, "rel"),
        (lambda reference: -reference, "rel"),
        (lambda reference: reference[::-1], "rel"),
        (lambda reference: reference.astype(ml_dtypes.bfloat16), "rel"),
        (one_wrong, "rel"),
        (lambda reference: None, "missing"),
        (lambda reference: reference[:0], "shape"),
        (lambda reference: reference[0], "shape"),
        (lambda reference: reference.mean(), "shape"),
        (lambda reference: reference.astype(np.complex128), "dtype"),
        (lambda reference: reference.astype(object), "dtype"),
    ],
)
def test_every_kind_of_wrong_result_fails(wrong, measure):
    """Field case 90: zeros, noise, NaN and what else a kernel may leave."""
    reference = reference_array()
    comparison = compare_closely(wrong(reference), reference)
    assert not comparison
    assert not comparison.passed
    assert comparison.measure.startswith(measure)
    assert comparison.worst_error > FLOAT32_TOLERANCE.max_element
    assert comparison.message.startswith("out: ")


def test_the_worst_element_is_named():
    reference = reference_array()
    comparison = compare_closely(one_wrong(reference), reference)
    scale = np.abs(reference).max()
    assert comparison.worst_coordinate == (2, 1, 7)
    assert comparison.expected == reference[2, 1, 7]
    assert comparison.got == reference[2, 1, 7] + 0.01
    assert comparison.worst_error == pytest.approx(0.01 / scale)
    assert comparison.num_differing == 1
    for text in ("(2, 1, 7)", repr(comparison.expected), repr(comparison.got), FLOAT32_TOLERANCE.reason):
        assert text in comparison.message


def test_one_wrong_element_in_ten_million_fails():
    """Field case 90: the norm alone is blind to it."""
    reference = reference_array((10, 1000, 1000)).astype(np.float32)
    actual = reference.copy()
    actual[7, 345, 678] += 0.001
    comparison = compare_closely(actual, reference)
    assert float(comparison.measure.removeprefix("rel ")) < FLOAT32_TOLERANCE.relative_norm
    assert not comparison
    assert comparison.worst_coordinate == (7, 345, 678)
    assert comparison.num_differing == 1


def test_a_small_error_everywhere_fails_by_the_norm_alone():
    reference = np.where(np.arange(1000) == 0, 1000.0, 1.0)
    comparison = close(reference + 0.005, reference, Tolerance(1e-5, 1e-5, "test"))
    assert comparison.num_differing == 0
    assert not comparison


@pytest.mark.parametrize("magnitude", [5e-324, 1e-30, 1.0])
def test_nothing_but_zero_is_close_to_zero(magnitude):
    actual = np.zeros(SHAPE)
    actual[1, 2, 3] = magnitude
    comparison = compare_closely(actual, np.zeros(SHAPE))
    assert not comparison
    assert comparison.worst_coordinate == (1, 2, 3)
    assert comparison.worst_error == math.inf


def test_an_empty_selection_fails():
    assert compare_closely(np.zeros((0, 4)), np.zeros((0, 4))).measure == "empty"
    assert bitwise(np.zeros((0, 4)), np.zeros((0, 4))).measure == "empty"


@pytest.mark.parametrize("judge", [compare_closely, bitwise])
def test_a_missing_array_fails_on_either_side_and_on_both(judge):
    for actual, expected in ((None, np.ones(3)), (np.ones(3), None), (None, None)):
        comparison = judge(actual, expected)
        assert not comparison
        assert comparison.measure == "missing"


def test_a_result_that_leaves_the_range_of_float64_fails():
    assert not compare_closely(np.array([1e308, 1]), np.array([-1e308, 1]))


# ---- close: non-finite values


@pytest.mark.parametrize(
    ("actual", "reference"), [(np.nan, 1), (1, np.nan), (np.inf, 1), (np.inf, -np.inf), (np.inf, np.nan)]
)
@pytest.mark.parametrize("allow_non_finite", [False, True])
def test_a_value_non_finite_on_one_side_fails(actual, reference, allow_non_finite):
    left, right = reference_array(), reference_array()
    left[1, 3, 9], right[1, 3, 9] = actual, reference
    comparison = compare_closely(left, right, allow_non_finite=allow_non_finite)
    assert not comparison
    assert comparison.measure == "non-finite"
    assert comparison.worst_coordinate == (1, 3, 9)
    assert comparison.num_differing == 1
    np.testing.assert_array_equal([comparison.got, comparison.expected], [actual, reference])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_shared_non_finite_value_fails_unless_allowed(value):
    shared = reference_array()
    shared[0, 1, 2] = value
    comparison = compare_closely(shared, shared)
    assert not comparison
    assert comparison.worst_coordinate == (0, 1, 2)
    assert compare_closely(shared, shared, allow_non_finite=True)


def test_allowing_non_finite_values_still_compares_the_others():
    reference = reference_array()
    reference[0, 0, :] = np.nan
    comparison = compare_closely(one_wrong(reference), reference, allow_non_finite=True)
    assert not comparison
    assert comparison.worst_coordinate == (2, 1, 7)


def test_nothing_but_nan_fails_even_when_allowed():
    nothing = np.full(SHAPE, np.nan)
    assert not compare_closely(nothing, nothing)
    assert not compare_closely(nothing, nothing, allow_non_finite=True)


# ---- bitwise

TYPES = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.uint32, np.int8]


@pytest.mark.parametrize("dtype", TYPES)
def test_equal_bits_pass_through_any_strides(dtype):
    values = (100 * reference_array()).astype(dtype)
    comparison = bitwise(np.repeat(values, 2, axis=2)[:, :, ::2], values.copy(), name="pool")
    assert comparison
    assert comparison.measure == "bits"
    assert comparison.worst_coordinate is None
    assert comparison.num_differing == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_the_first_different_bit_is_named(dtype):
    expected = np.ones(SHAPE, dtype)
    actual = expected.copy()
    actual.view(f"u{actual.itemsize}")[1:, 2, 48:] ^= 1
    comparison = bitwise(actual, expected, name="pool")
    assert not comparison
    assert comparison.worst_coordinate == (1, 2, 48)
    assert comparison.num_differing == 4
    assert comparison.expected == 1
    assert comparison.got == float(actual[1, 2, 48]) != 1
    assert comparison.worst_error == abs(comparison.got - 1)
    assert "4 of 600" in comparison.message
    assert "(1, 2, 48)" in comparison.message


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_nan_payloads_are_ignored_and_nan_against_a_number_is_not(dtype):
    expected = np.array([1, np.nan, 2], dtype)
    actual = expected.copy()
    actual.view(f"u{actual.itemsize}")[1:2] ^= 1
    assert bitwise(actual, expected)
    assert bitwise(actual, expected, ignore_zero_sign=True)
    comparison = bitwise(np.array([1, 3, 2], dtype), expected)
    assert not comparison
    assert comparison.worst_coordinate == (1,)
    assert comparison.worst_error == math.inf


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_sign_of_zero_counts_unless_told_otherwise(dtype):
    actual, expected = np.array([1, -0.0, 2], dtype), np.array([1, 0.0, 2], dtype)
    comparison = bitwise(actual, expected)
    assert not comparison
    assert comparison.worst_coordinate == (1,)
    assert "got -0.0" in comparison.message
    assert bitwise(actual, expected, ignore_zero_sign=True)
    zero, one = np.array([0], dtype), np.array([1], dtype)
    assert not bitwise(zero, one, ignore_zero_sign=True)
    assert not bitwise(one, zero, ignore_zero_sign=True)


def test_equal_values_of_another_type_or_shape_fail():
    ones = np.ones(SHAPE, np.float32)
    assert bitwise(ones.astype(np.float64), ones).measure == "dtype"
    assert bitwise(ones.astype(np.float16), ones.astype(ml_dtypes.bfloat16)).measure == "dtype"
    assert bitwise(ones.astype(np.longdouble), ones.astype(np.longdouble)).measure == "dtype"
    assert bitwise(ones[:1], ones).measure == "shape"


def test_ten_million_elements_are_compared_quickly():
    """Beside field case 90: the least bit of one element in 10^7, in the comparison that has no tolerance."""
    expected = reference_array((10, 1000, 1000)).astype(np.float32)
    actual = expected.copy()
    actual[9, 999, 998] = np.nextafter(actual[9, 999, 998], np.float32(np.inf))
    started = time.perf_counter()
    comparison = bitwise(actual, expected)
    assert time.perf_counter() - started < 2
    assert comparison.worst_coordinate == (9, 999, 998)
    assert comparison.num_differing == 1


# ---- tolerances and reports


def test_a_wrong_state_beside_a_right_output_fails_and_is_named():
    out, state = reference_array(), reference_array((2, 3, 8, 8))
    wrong_state = state.copy()
    wrong_state[1, 2, 7, 0] *= 1.5
    right = close(out, out, FLOAT32_TOLERANCE, name="out")
    assert_passed(right, close(state, state, FLOAT32_TOLERANCE, name="recurrent_state"))
    with pytest.raises(AssertionError, match=r"^recurrent_state: .*\(1, 2, 7, 0\)"):
        assert_passed(right, close(wrong_state, state, FLOAT32_TOLERANCE, name="recurrent_state"))
    with pytest.raises(AssertionError, match="recurrent_state: missing"):
        assert_passed(right, close(None, state, FLOAT32_TOLERANCE, name="recurrent_state"))


def test_every_failure_is_reported_and_none_compared_is_a_failure():
    ones = np.ones(3)
    failures = bitwise(-ones, ones, name="out"), bitwise(2 * ones, ones, name="pool")
    with pytest.raises(AssertionError) as caught:
        assert_passed(failures[0], bitwise(ones, ones), failures[1])
    assert str(caught.value) == f"{failures[0].message}\n{failures[1].message}"
    with pytest.raises(AssertionError, match=r"^nothing was compared$"):
        assert_passed()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1e-6, 1e-5, ""), "reason: expected where the limits come from, got ''"),
        ((1e-6, 1e-5, " "), "reason: expected where the limits come from, got ' '"),
        ((-1e-6, 1e-5, "x"), "relative_norm: expected a finite limit of at least 0, got -1e-06"),
        ((1e-6, math.nan, "x"), "max_element: expected a finite limit of at least 0, got nan"),
        ((math.inf, 1, "x"), "relative_norm: expected a finite limit of at least 0, got inf"),
    ],
)
def test_a_tolerance_needs_a_reason_and_real_limits(arguments, message):
    with pytest.raises(ValueError, match="expected") as caught:
        Tolerance(*arguments)
    assert str(caught.value) == message


def test_a_tolerance_of_zero_takes_what_is_equal_and_nothing_else():
    exact, reference = Tolerance(0, 0, "test"), reference_array()
    assert close(reference, reference, exact)
    assert not close(np.nextafter(reference, 9), reference, exact)


def report(judged, passed, measure, worst_error, coordinate, expected, got, num_differing, message):
    """All that a comparison of arrays named "pool" should say."""
    assert judged == Comparison(
        "pool", passed, measure, worst_error, coordinate, expected, got, num_differing, f"pool: {message}"
    )


def test_reports_of_close_in_full():
    reference = np.array([[4.0, 3.0], [0.0, 0.0]])
    wrong = np.array([[4.0, 3.0], [0.0, 0.5]])
    tolerance = Tolerance(0.05, 0.1, "because")
    measured = (
        "relative norm 1.0e-01 (limit 5.0e-02), largest element error 1.2e-01 of the scale 4 (limit 1.0e-01) at "
        "(1, 1): expected 0.0, got 0.5"
    )
    said = f"{measured}; 1 of 4 elements past that limit; limits: because"
    report(close(wrong, reference, tolerance, "pool"), False, "rel 1.0e-01", 0.125, (1, 1), 0.0, 0.5, 1, said)
    wide = Tolerance(0.1, 0.125, "because")  # both limits are met, to the bit
    said = measured.replace("5.0e-02", "1.0e-01").replace("limit 1.0e-01) at", "limit 1.2e-01) at")
    report(close(wrong, reference, wide, "pool"), True, "rel 1.0e-01", 0.125, (1, 1), 0.0, 0.5, 0, said)


def test_reports_of_values_that_are_not_finite_in_full():
    reference = np.array([1.0, np.inf, 2.0, np.inf])
    got = np.array([1.0, -np.inf, 2.0, 3.0])
    said = "2 of 4 elements are non-finite on one side only or in another way, first at (1,): expected inf, got -inf"
    judged = close(got, reference, FLOAT32_TOLERANCE, "pool", allow_non_finite=True)
    report(judged, False, "non-finite", math.inf, (1,), math.inf, -math.inf, 2, said)
    said = (
        "2 of 4 elements are non-finite on both sides, so their values were not compared, first at (1,): "
        "expected inf, got inf"
    )
    judged = close(reference, reference, FLOAT32_TOLERANCE, "pool")
    report(judged, False, "non-finite", math.inf, (1,), math.inf, math.inf, 0, said)


def test_reports_of_bits_in_full():
    expected = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    got = np.array([[1, 2, 3], [4, 7, 8.5]], np.float32)
    for compare in (bitwise, same_bytes):
        same = compare(expected, expected.copy(), "pool")
        report(same, True, "bits", 0.0, None, None, None, 0, "all 6 elements equal to the bit")
    said = "2 of 6 elements differ in their bits, first at (1, 1): expected 5.0, got 7.0"
    report(bitwise(got, expected, "pool"), False, "bits", 2.0, (1, 1), 5.0, 7.0, 2, said)
    bits = [int(array[1, 1].view(np.uint32)) for array in (expected, got)]
    said = f"2 of 6 elements differ in their bits, first at (1, 1): expected {float(bits[0])!r}, got {float(bits[1])!r}"
    distance = float(bits[1] - bits[0])
    report(same_bytes(got, expected, "pool"), False, "bits", distance, (1, 1), *map(float, bits), 2, said)


def test_reports_of_what_cannot_be_compared_in_full():
    ones = np.ones((2, 3))
    real = "expected real numbers of at most 8 bytes, got"
    for judge in (lambda *pair: close(*pair, FLOAT32_TOLERANCE, "pool"), lambda *pair: bitwise(*pair, "pool")):
        for actual, expected, measure, why in (
            (None, ones, "missing", "the actual array is None"),
            (ones, None, "missing", "the expected array is None"),
            (ones.astype(complex), ones, "dtype", f"{real} complex128 and float64"),
            (ones, ones.astype(np.longdouble), "dtype", f"{real} float64 and {np.dtype(np.longdouble).name}"),
            (ones, np.full((2, 3), "1"), "dtype", f"{real} float64 and str32"),
            (ones[:1], ones, "shape", "expected (2, 3), got (1, 3)"),
            (ones[:0], ones[:0], "empty", "no element to compare in shape (0, 3)"),
        ):
            judged = judge(actual, expected)
            report(judged, False, measure, math.inf, None, None, None, 0, f"{measure}: {why}")
    for judge in (bitwise, same_bytes):
        judged = judge(ones.astype(np.float32), ones, "pool")
        report(judged, False, "dtype", math.inf, None, None, None, 0, "dtype: expected float64, got float32")


def test_an_array_without_a_name_is_called_array():
    ones = np.ones(3)
    for judged in (close(ones, ones, FLOAT32_TOLERANCE), bitwise(ones, ones), same_bytes(ones, ones)):
        assert judged.name == "array"


def test_storage_tolerances_are_ordered_by_their_types():
    limits = [storage_tolerance(name).relative_norm for name in ("float32", "float16", "bfloat16")]
    assert limits == [2e-6, 2e-6 + 2**-11, 2e-6 + 2**-8]
    with pytest.raises(DTypeError, match=r"^dtype_name: expected float32 or bfloat16 or float16, got 'float64'$"):
        storage_tolerance("float64")
    for name, rounding, error in (("float16", 2**-11, "4.9e-04"), ("bfloat16", 2**-8, "3.9e-03")):
        tolerance = storage_tolerance(name)
        assert tolerance.max_element == 1e-5 + rounding
        assert tolerance.reason == f"float32 arithmetic, then one rounding to {name}, a relative {error}"
