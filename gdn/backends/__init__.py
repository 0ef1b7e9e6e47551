"""The three ways to run an op: `cuda`, `host` (the same kernels on the CPU) and `numpy`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from gdn.errors import DeviceError, rejection

BACKENDS = ("cuda", "host", "numpy")

_for_numpy_arrays: ContextVar[str] = ContextVar("gdn_backend", default="numpy")


def unavailable_backends() -> dict[str, str]:
    """The backends this machine cannot run, each with the reason in one line."""
    from gdn.backends import cuda, host

    reasons = {"cuda": cuda.unavailable_reason(), "host": host.unavailable_reason()}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def available_backends() -> tuple[str, ...]:
    """Names of the backends this machine can run, out of "cuda", "host" and "numpy"."""
    missing = unavailable_backends()
    return tuple(name for name in BACKENDS if name not in missing)


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Run calls on NumPy arrays on ``name``, "numpy" (the default) or "host", inside a with block.

    The choice holds for the current thread or task. CuPy arrays always run on "cuda".
    Raises DeviceError for another name, or where the machine cannot run that backend.
    """
    if name not in ("numpy", "host"):
        hint = " (CuPy arrays run on cuda by themselves)" if name == "cuda" else ""
        raise DeviceError(rejection("use_backend", '"numpy" or "host"', repr(name) + hint))
    if name == "host":
        from gdn.backends import host

        reason = host.unavailable_reason()
        if reason is not None:
            raise DeviceError(rejection("use_backend", "a backend that this machine can run", f'"host": {reason}'))
    token = _for_numpy_arrays.set(name)
    try:
        yield
    finally:
        _for_numpy_arrays.reset(token)


def backend_for_numpy_arrays() -> str:
    """The backend that runs calls on NumPy arrays here and now."""
    return _for_numpy_arrays.get()
