"""What is true, in float64, in NumPy alone: the recurrence, and the convolution and gates before it.

Nothing else of the library is imported here, head counts and row offsets included: an offset bug shared by
both sides of a comparison would cancel.
"""

from __future__ import annotations

from gdn.oracle.conv1d import gated_delta_conv1d_commit, gated_delta_conv1d_fwd
from gdn.oracle.gates import gated_delta_gates
from gdn.oracle.recurrence import gated_delta_recurrence_fwd, gated_delta_recurrence_fwd_chunked

__all__ = [
    "gated_delta_conv1d_commit",
    "gated_delta_conv1d_fwd",
    "gated_delta_gates",
    "gated_delta_recurrence_fwd",
    "gated_delta_recurrence_fwd_chunked",
]
