"""The gates of the recurrence from the projections that a model gives them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gdn.oracle.arguments import require_floats, require_shape

Float64Array = NDArray[np.float64]

_LINEAR_ABOVE = 20.0  # as in PyTorch's softplus, whose published layers are trained with it


def gated_delta_gates(
    a: NDArray[Any], b: NDArray[Any], A_log: NDArray[Any], dt_bias: NDArray[Any], *, allow_neg_eigval: bool = False
) -> tuple[Float64Array, Float64Array]:
    """Decay and step size of every token and value head.

    a, b             [T, nv]
    A_log, dt_bias   [nv]
    decay = exp(-exp(A_log) · softplus(a + dt_bias)), softplus(x) = log(1 + exp(x)), and x itself above 20
    beta  = 1 / (1 + exp(-b)), twice that with allow_neg_eigval

    All four are float16, bfloat16, float32 or float64 and are widened exactly. Returns ``(decay, beta)``,
    float64, [T, nv].

    Raises ValueError, naming the argument, for another shape or type.
    """
    require_floats(a=a, b=b, A_log=A_log, dt_bias=dt_bias)
    if a.ndim != 2:
        raise ValueError(f"a: expected shape [T, nv], got {a.shape}")
    require_shape("b", b, a.shape)
    require_shape("A_log", A_log, a.shape[1:])
    require_shape("dt_bias", dt_bias, a.shape[1:])
    step = a.astype(np.float64) + dt_bias.astype(np.float64)
    # Neither exponential may overflow: that of a large number is divided by, or replaced by its limit.
    softplus = np.where(step > _LINEAR_ABOVE, step, np.log1p(np.exp(np.minimum(step, _LINEAR_ABOVE))))
    with np.errstate(over="ignore", under="ignore"):
        decay = np.exp(-np.exp(A_log.astype(np.float64)) * softplus)
        beta = 1 / (1 + np.exp(-b.astype(np.float64)))
    return decay, 2 * beta if allow_neg_eigval else beta
