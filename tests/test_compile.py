"""Every kernel variant compiles for every architecture with no register spilled, on a machine without a GPU.

The default run takes a set that covers head sizes, types and architectures; `pytest --exhaustive` takes all
pairs of head sizes with all types, and every thread map of the common sizes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from types import SimpleNamespace

import pytest

from gdn.arrays import DTYPES, describe
from gdn.backends import cuda, row_tile
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import recurrence as recurrence_launch
from gdn.backends.launch import Variant
from gdn.backends.row_tile import RowTile
from gdn.errors import KernelCompileError
from gdn.models import MODELS
from gdn.recurrence import recurrence_inputs

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "sm_120")
FLOATS = ("float32", "bfloat16", "float16")
HEAD_DIMS = tuple(range(8, 257, 8))
COMMON_SIZES = tuple(
    dict.fromkeys(
        [
            *((heads.key_head_dim, heads.value_head_dim) for heads in MODELS.values()),
            *((128, 128), (64, 64), (96, 192), (256, 256), (32, 32), (8, 8), (248, 8), (256, 8)),
        ]
    )
)


def _no_nvrtc() -> str | None:
    """Why nothing can be compiled here, None where it can."""
    try:
        from cupy.cuda import nvrtc

        version = nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        return f"CuPy's NVRTC cannot be used: {error}"
    return None if version >= (12, 8) else f"NVRTC {version} does not know every architecture; 12.8 does"


pytestmark = pytest.mark.skipif(_no_nvrtc() is not None, reason=str(_no_nvrtc()))


def variant_of(
    sizes: tuple[int, int],
    work_dtype: str,
    state_dtype: str,
    *,
    gate_dtype: str = "float32",
    out_dtype: str | None = None,
    tile: RowTile | None = None,
) -> Variant:
    """The variant of a call with these head sizes and types, made from shapes alone."""
    key_head_dim, value_head_dim = sizes
    qkv, gate, state, slots, offsets = (
        SimpleNamespace(shape=shape, dtype=DTYPES[dtype])
        for shape, dtype in (
            ((4, 2 * key_head_dim + 2 * value_head_dim), work_dtype),
            ((4, 2), gate_dtype),
            ((3, 2, key_head_dim, value_head_dim), state_dtype),
            ((1,), "uint32"),
            ((2,), "uint32"),
        )
    )
    inputs = recurrence_inputs(describe, qkv, gate, gate, state, slots, offsets)
    return fwd_kernel.variant(inputs, out_dtype or work_dtype, tile or recurrence_launch.row_tile(inputs))


def usable(architecture: str, variants: Iterable[Variant]) -> Iterator[str]:
    """What is wrong with each of the variants that is not fit for use."""

    def fault(variant: Variant) -> str | None:
        try:
            report = cuda.compile_report(variant, architecture)
        except KernelCompileError as error:
            return str(error)
        if report.spill_bytes or report.stack_bytes:
            return f"{architecture} {' '.join(variant.defines)}: {report}"
        return None

    # NVRTC works without Python's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from filter(None, pool.map(fault, variants))


# Variants in groups: name, architecture, variants.
Group = tuple[str, str, list[Variant]]


def covering_groups() -> Iterator[Group]:
    """Every key head size with both widths of pool; common sizes with all types, spread over architectures."""
    for key_head_dim in HEAD_DIMS:
        sizes = (key_head_dim, 8 + (key_head_dim + 120) % 256)
        yield f"KEY_HEAD_DIM {key_head_dim}", "sm_90", [variant_of(sizes, pool, pool) for pool in FLOATS[:2]]
    spread = {architecture: [] for architecture in ARCHITECTURES}
    architectures = cycle(ARCHITECTURES)
    for sizes in COMMON_SIZES:
        for work_dtype, state_dtype in product(FLOATS, FLOATS):
            spread[next(architectures)].append(variant_of(sizes, work_dtype, state_dtype))
    for work_dtype in FLOATS[1:]:  # the types that the loops above left at their defaults
        spread[next(architectures)].append(variant_of((128, 128), work_dtype, "float32", gate_dtype=work_dtype))
        spread[next(architectures)].append(variant_of((128, 128), work_dtype, work_dtype, out_dtype="float32"))
    for architecture, variants in spread.items():
        yield "common sizes", architecture, variants


def all_groups() -> Iterator[Group]:
    """Every pair of head sizes with all types, every thread map of the common sizes, on every architecture."""
    for architecture, key_head_dim in product(ARCHITECTURES, HEAD_DIMS):
        sizes = [(key_head_dim, value_head_dim) for value_head_dim in HEAD_DIMS]
        variants = [variant_of(*combination) for combination in product(sizes, FLOATS, FLOATS)]
        yield f"KEY_HEAD_DIM {key_head_dim}", architecture, variants
    for architecture, sizes in product(ARCHITECTURES, COMMON_SIZES):
        variants = [
            variant_of(sizes, work_dtype, state_dtype, tile=tile)
            for work_dtype, state_dtype in product(FLOATS[:2], FLOATS[:2])
            for tile in row_tile.row_tiles(*sizes, DTYPES[state_dtype].itemsize)
        ]
        yield f"thread maps of {sizes}", architecture, variants


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "group" in metafunc.fixturenames:
        groups = all_groups if metafunc.config.getoption("--exhaustive") else covering_groups
        metafunc.parametrize("group", list(groups()), ids=lambda group: f"{group[1]}-{group[0]}")


def test_no_variant_spills(group: Group) -> None:
    _, architecture, variants = group
    assert variants != []
    assert list(usable(architecture, variants)) == []


def test_a_spill_would_be_seen() -> None:
    """A thread map that row_tiles() does not offer: 1,024 elements of state in one thread."""
    too_much = variant_of((256, 64), "float32", "float32", tile=RowTile(1, 32, 1))
    assert too_much.macros != variant_of((256, 64), "float32", "float32").macros
    (fault,) = usable("sm_90", [too_much])
    assert "spill_bytes=" in fault


def test_an_error_would_be_seen() -> None:
    broken = variant_of((64, 64), "float32", "float32", tile=RowTile(1, 1, 3))
    (fault,) = usable("sm_90", [broken])
    assert "a tile must divide VALUE_HEAD_DIM" in fault


def test_the_report_is_that_of_the_assembler() -> None:
    report = cuda.compile_report(variant_of((128, 128), "bfloat16", "float32"), "sm_90")
    assert 32 <= report.registers <= 255
    assert report.shared_bytes > 128 * 4
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


def test_the_covering_set_covers() -> None:
    groups = list(covering_groups())
    macros = [(architecture, dict(variant.macros)) for _, architecture, variants in groups for variant in variants]
    assert {architecture for architecture, _ in macros} == set(ARCHITECTURES)
    assert {int(each["KEY_HEAD_DIM"]) for _, each in macros} == set(HEAD_DIMS)
    for pair in product(("float", "bfloat16", "float16"), repeat=2):
        assert pair in {(each["WORK_TYPE"], each["STATE_TYPE"]) for _, each in macros}
