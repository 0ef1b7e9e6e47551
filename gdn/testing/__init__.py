"""Judging kernels, ours and yours: comparisons that cannot pass by accident, as ``numpy.testing`` is usable."""

from gdn.testing.compare import (
    FLOAT32_TOLERANCE,
    Comparison,
    Tolerance,
    assert_passed,
    bitwise,
    close,
    same_bytes,
    storage_tolerance,
)

__all__ = [
    "FLOAT32_TOLERANCE",
    "Comparison",
    "Tolerance",
    "assert_passed",
    "bitwise",
    "close",
    "same_bytes",
    "storage_tolerance",
]
