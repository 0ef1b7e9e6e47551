"""Sanitizers watch every kernel of the backend host, find nothing, and find what is planted (tests/sanitized.py)."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from gdn.backends import launch

SCRIPT = Path(__file__).with_name("sanitized.py")
#: Kernels whose instructions no CPU has a stand-in for.
ONLY_ON_GPU = {"gated_delta_chunk_walk_sm90"}


def script() -> ModuleType:
    """tests/sanitized.py as a module."""
    spec = importlib.util.spec_from_file_location("sanitized", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sanitized"] = module  # where dataclasses look for their module
    spec.loader.exec_module(module)
    return module


PLANTS = script().PLANTS


@pytest.fixture(autouse=True, scope="module")
def _cache_of_this_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GDN_CACHE_DIR", str(tmp_path_factory.mktemp("sanitized")))
        yield


@pytest.mark.parametrize("sanitize", ["address,undefined", "thread"])
def test_nothing_is_found_in_any_kernel(run_sanitized: Callable[..., tuple[int, str]], sanitize: str) -> None:
    """Field cases 60, 69: no access beside an array, none unaligned, no two threads at one place without a barrier."""
    code, output = run_sanitized(sanitize, str(SCRIPT), sanitize)
    kernels = {path.name.removesuffix(".cu") for path in launch.files("gdn.kernels").iterdir() if path.suffix == ".cu"}
    assert (code, output.split()) == (0, sorted(kernels - ONLY_ON_GPU)), output


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_fault_is_found(run_sanitized: Callable[..., tuple[int, str]], name: str) -> None:
    planted = PLANTS[name]
    code, output = run_sanitized(planted.sanitize, str(SCRIPT), planted.sanitize, "--plant", name)
    assert code != 0
    assert planted.report in output
    assert (planted.seen_in or planted.file_name) in output
