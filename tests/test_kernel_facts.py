"""Facts that stand in Python and in CUDA C alike, and what the kernels' text may hold."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gdn
from gdn import geometry, indices, oracle
from gdn.arrays import DTYPES, describe
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import launch, row_tile
from gdn.backends import numpy as numpy_backend
from gdn.backends import recurrence as recurrence_launch
from gdn.backends.launch import KERNEL_TYPE
from gdn.backends.streamed_tile import streamed_tiles
from gdn.recurrence import recurrence_inputs
from gdn.ring import Pending

KERNELS = Path(gdn.__file__).parents[1] / "kernels"


def in_kernels(pattern: str) -> tuple[str, ...]:
    """The groups of the one match of a pattern in the text of all kernels."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(KERNELS.glob("*.cu*")))
    (match,) = re.finditer(pattern, text)
    return match.groups()


KINDS = {"long long": "int64", "unsigned int": "uint32"}


@pytest.mark.parametrize("stem", sorted(path.stem for path in KERNELS.glob("*.cu")))
def test_declared_parameters_are_those_of_the_source(stem: str) -> None:
    """Beside field case 78: what a launch is held to has the names, the order and the widths of every kernel's own."""
    text = (KERNELS / f"{stem}.cu").read_text(encoding="utf-8")
    (signature,) = re.findall(rf'extern "C" __global__ void __launch_bounds__\([^)]*\) {stem}\(([^)]*)\)', text)
    always, *optional = re.split(r"#if HAS_PENDING\n|#endif\n", signature)
    module = import_module(f"gdn.backends.{stem}")
    assert list(module.KERNEL.parameters) == parameters_in(always)
    assert module.KERNEL.stem == stem
    if optional:
        assert list(module.KERNEL_WITH_PENDING.parameters) == parameters_in(always + optional[0])
        assert module.KERNEL_WITH_PENDING.stem == stem
    assert bool(optional) == hasattr(module, "KERNEL_WITH_PENDING")


def parameters_in(signature: str) -> list[tuple[str, str]]:
    parameters = []
    for parameter in signature.split(","):
        kind, name = parameter.rsplit(maxsplit=1)
        parameters.append((name, "pointer" if "*" in kind else KINDS[kind.strip()]))
    return parameters


def test_kernels_include_nothing_of_the_system() -> None:
    for path in KERNELS.glob("*.cu*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.lstrip().startswith("#include"):
                name = re.fullmatch(r'#include "([a-z0-9_]+\.cuh)"', line)
                assert name is not None, f"{path.name}: {line}"
                assert (KERNELS / name[1]).is_file()


@pytest.mark.parametrize("family", ["block", "stream"])
def test_every_macro_is_used_and_explained(family: str) -> None:
    shapes = [(4, 96), (4, 2), (4, 2), (2, 2, 16, 16), (1,), (2,)]
    types = ["float32"] * 4 + ["uint32"] * 2
    six = [SimpleNamespace(shape=shape, dtype=DTYPES[name]) for shape, name in zip(shapes, types, strict=True)]
    inputs = recurrence_inputs(describe, *six)
    source = launch.source("gated_delta_recurrence_fwd.cu")
    out = describe("out", SimpleNamespace(shape=(4, 32), dtype=DTYPES["float32"]))
    tile = row_tile.nearest_row_tile(16, 16, 4) if family == "block" else streamed_tiles(16, 16, 4)[0]
    tile = tile if family == "block" else replace(tile, records_per_warp=1)
    ring = describe("ring", SimpleNamespace(shape=(1, 1, 4, 66), dtype=DTYPES["float32"]))
    table = describe("table", SimpleNamespace(shape=(1,), dtype=DTYPES["uint32"]))
    macros = dict(fwd_kernel.variant(inputs, out, tile, Pending(ring, table, table)).macros)
    assert ("SHARED_BYTES" in macros) == ("RECORDS_PER_WARP" in macros) == (family == "stream")
    for name in macros:
        assert re.search(rf"^// .*\b{name}\b", source, re.MULTILINE), name
        assert re.search(rf"^(?!//).*\b{name}\b", source, re.MULTILINE), name


def test_padding_has_one_number() -> None:
    (in_cuda,) = in_kernels(r"constexpr unsigned int PAD_SLOT = (0x[0-9A-F]+)u;")
    assert {gdn.PAD_SLOT, indices.PAD_SLOT, oracle.arguments.PAD_SLOT, int(in_cuda, 16)} == {0xFFFFFFFF}
    assert np.uint32(gdn.PAD_SLOT).view(np.int32) == -1


def test_the_epsilon_has_one_value() -> None:
    (in_cuda,) = in_kernels(r"constexpr float NORM_EPSILON = ([0-9.e-]+)f;")
    assert float(in_cuda) == oracle.recurrence._NORM_EPSILON == 1e-6
    assert np.float32(in_cuda) == numpy_backend.NORM_EPSILON


def test_clearing_blocks_have_one_size() -> None:
    (in_cuda,) = in_kernels(r"constexpr int ROWS_PER_CLEARING_BLOCK = (\d+);")
    assert int(in_cuda) == recurrence_launch.ROWS_PER_CLEARING_BLOCK


@pytest.mark.parametrize("name", ["KEY_HEAD_DIM", "VALUE_HEAD_DIM"])
def test_head_sizes_have_one_limit(name: str) -> None:
    limits = in_kernels(rf"static_assert\({name} % (\d+) == 0 && {name} >= (\d+) && {name} <= (\d+),")
    assert tuple(map(int, limits)) == (
        *(geometry.HEAD_DIM_MULTIPLE, geometry.HEAD_DIM_MULTIPLE),
        geometry.MAX_HEAD_DIM,
    )


def test_storage_types_have_one_name() -> None:
    for name in set(KERNEL_TYPE.values()) - {"float"}:
        assert in_kernels(rf"struct ({name}) {{") == (name,)
    assert KERNEL_TYPE.keys() == DTYPES.keys() - {"uint32", "int32", "uint8"}


def test_the_reduction_tree_is_one() -> None:
    """Every sum over the key head dimension: chains of neighbouring rows, then neighbours in pairs."""
    multiple, many, few = map(int, in_kernels(r"NUM_CHAINS = KEY_HEAD_DIM % (\d+) == 0 \? (\d+) : (\d+);"))
    random = np.random.default_rng(0)
    for key_head_dim in range(8, geometry.MAX_HEAD_DIM + 1, geometry.HEAD_DIM_MULTIPLE):
        num_chains = many if key_head_dim % multiple == 0 else few
        assert row_tile.num_chains(key_head_dim) == num_chains
        products = random.standard_normal((key_head_dim, 3)).astype(np.float32)
        sums = []
        for chain in np.split(products, num_chains):
            total = chain[0]
            for row in chain[1:]:
                total = total + row
            sums.append(total)
        while len(sums) > 1:
            sums = [lower + upper for lower, upper in zip(sums[0::2], sums[1::2], strict=True)]
        np.testing.assert_array_equal(numpy_backend.tree_sum(products), sums[0])
