"""Every kernel variant compiles for every architecture with no register spilled, on a machine without a GPU.

The default run takes a set that covers head sizes, types and architectures; `pytest --exhaustive` takes every key head
size with every thread map that its value head sizes make an op pick, every thread map of the common sizes, and every
streaming map. Variants that differ in VALUE_HEAD_DIM alone count as one, but for streaming blocks of whole heads: it
matters to a thread through its map, and through the way that states are copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, product
from types import SimpleNamespace

import pytest

from gdn.arrays import DTYPES, describe
from gdn.backends import gated_delta_chunk_walk_sm90 as sm90_walk_kernel
from gdn.backends import gated_delta_conv1d_commit as commit_kernel
from gdn.backends import gated_delta_conv1d_fwd as conv_kernel
from gdn.backends import gated_delta_gates as gates_kernel
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends import gated_delta_recurrence_verify_ring as verify_kernel
from gdn.backends import gated_delta_state_fold as fold_kernel
from gdn.backends import nvrtc, row_tile
from gdn.backends import pending_windows as windows_kernel
from gdn.backends import recurrence as recurrence_launch
from gdn.backends.launch import Variant
from gdn.backends.row_tile import RowTile
from gdn.backends.streamed_tile import (
    FEW_STREAMED_HEADS,
    LONG_ROW_TOKENS,
    streamed_tile_for,
    streamed_tiles,
    tiles_with_records,
)
from gdn.conv1d import commit_inputs, conv1d_inputs
from gdn.errors import DeviceError, KernelCompileError
from gdn.gates import gate_inputs
from gdn.geometry import HeadGeometry
from gdn.models import MODELS
from gdn.recurrence import recurrence_inputs
from gdn.ring import fold_inputs, pending_inputs, verify_inputs
from gdn.variants import Layer, uses

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
RING_SIZES = ((32, 32), (64, 64), (128, 128), (96, 192), (256, 256), (128, 64))
RING_LENS = (1, 4, 8, 64)
CHUNK_KERNELS = tuple(f"gated_delta_chunk_{part}" for part in ("plan", "prepare", "walk"))


def _no_nvrtc() -> str | None:
    """Why nothing can be compiled here, None where it can."""
    try:
        version = tuple(int(number) for number in nvrtc.version().split("."))
    except DeviceError as error:
        return str(error)
    return None if version >= (12, 8) else f"NVRTC {version} does not know every architecture; 12.8 does"


pytestmark = pytest.mark.skipif(_no_nvrtc() is not None, reason=str(_no_nvrtc()))


def shape_of(shape: tuple[int, ...], dtype: str) -> SimpleNamespace:
    return SimpleNamespace(shape=shape, dtype=DTYPES[dtype])


def variant_of(
    sizes: tuple[int, int],
    work_dtype: str,
    state_dtype: str,
    *,
    gate_dtype: str = "float32",
    out_dtype: str | None = None,
    tile: RowTile | None = None,
    batch_size: int = 100,
    ring: SimpleNamespace | None = None,
    pending: str | None = None,
) -> Variant:
    """The variant of a call with these head sizes and types, made from shapes alone: single tokens, two value heads.

    That of the forward op, with a ring that of the verify; pending: of the op, "fwd" or "verify", with pending records.
    """
    key_head_dim, value_head_dim = sizes
    gate, table = shape_of((batch_size, 2), gate_dtype), shape_of((batch_size,), "uint32")
    inputs = recurrence_inputs(
        describe,
        shape_of((batch_size, 2 * key_head_dim + 2 * value_head_dim), work_dtype),
        *(gate, gate),
        shape_of((3, 2, key_head_dim, value_head_dim), state_dtype),
        *(table, shape_of((batch_size + 1,), "uint32")),
    )
    out = describe("out", shape_of((batch_size, 2 * value_head_dim), out_dtype or work_dtype))
    tile = tile or recurrence_launch.row_tile(inputs, out, ring.shape[2] if ring and pending else 0)
    if pending == "fwd":
        return fwd_kernel.variant(inputs, out, tile, pending_inputs(describe, inputs, ring, table, table))
    if pending == "verify":
        return verify_kernel.variant(verify_inputs(describe, inputs, ring, table, table, table), out, tile)
    if ring is not None:
        return verify_kernel.variant(verify_inputs(describe, inputs, ring, table), out, tile)
    return fwd_kernel.variant(inputs, out, tile)


def ring_variants(
    sizes: tuple[int, int], state_dtype: str, ring_dtype: str, ring_len: int, batch_size: int
) -> tuple[Variant, Variant]:
    """The variants of a verify and of a fold."""
    key_head_dim, value_head_dim = sizes
    ring = ring_of(sizes, ring_len, ring_dtype)
    table, counts = shape_of((1, batch_size), "uint32"), shape_of((batch_size,), "uint32")
    pool = shape_of((3, 2, key_head_dim, value_head_dim), state_dtype)
    fold = fold_inputs(describe, pool, table, ring, table, counts)
    return (
        variant_of(sizes, state_dtype, state_dtype, batch_size=batch_size, ring=ring),
        fold_kernel.variant(fold, fold_kernel.row_tile(fold)),
    )


def ring_of(sizes: tuple[int, int], ring_len: int, dtype: str) -> SimpleNamespace:
    """A ring for two value heads of one key head. Records are aligned where RING_LEN is even."""
    key_head_dim, value_head_dim = sizes
    record_stride = key_head_dim + 2 * (value_head_dim + 1) + (6 if ring_len % 2 == 0 else 1)
    return shape_of((3, 1, ring_len, record_stride), dtype)


def distinct(variants: Iterable[Variant]) -> list[Variant]:
    """One of each set of variants that differ in VALUE_HEAD_DIM alone."""

    def key(variant: Variant) -> tuple[object, ...]:
        numbers = {name: int(value) for name, value in variant.macros if value.isdecimal()}
        columns = numbers["STREAMED_WARPS"] * numbers["LANES_PER_ROW"] * numbers["COLUMNS_PER_LANE"]
        takes_whole_heads = columns == numbers["VALUE_HEAD_DIM"]
        others = (macro for macro in variant.macros if macro[0] != "VALUE_HEAD_DIM")
        return variant.kernel.stem, takes_whole_heads, *others

    return list({key(variant): variant for variant in variants}.values())


def usable(architecture: str, variants: Iterable[Variant]) -> Iterator[str]:
    """What is wrong with each of the variants that is not fit for use."""

    def fault(variant: Variant) -> str | None:
        try:
            report = nvrtc.compile_report(variant, architecture)
        except KernelCompileError as error:
            return str(error)
        if report.spill_bytes or report.stack_bytes or report.serialized:
            return f"{architecture} {' '.join(variant.defines)}: {report}"
        return None

    # NVRTC works without Python's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        yield from filter(None, pool.map(fault, variants))


# Variants in groups: name, architecture, variants.
Group = tuple[str, str, list[Variant]]


def spread(name: str, variants: Iterable[Variant]) -> Iterator[Group]:
    """Each of the variants on one architecture, in turn."""
    variants = distinct(variants)
    for place, architecture in enumerate(ARCHITECTURES):
        yield name, architecture, variants[place :: len(ARCHITECTURES)]


def covering_groups() -> Iterator[Group]:
    """Every key head size with both widths of pool; common sizes with all types, spread over architectures."""
    for key_head_dim in HEAD_DIMS:
        sizes = (key_head_dim, 8 + (key_head_dim + 120) % 256)
        variants = [
            variant_of(sizes, pool, pool, batch_size=few_or_many) for pool in FLOATS[:2] for few_or_many in (1, 100)
        ]
        yield f"KEY_HEAD_DIM {key_head_dim}", "sm_90", distinct(variants)
    common = [
        variant_of(sizes, work_dtype, state_dtype)
        for sizes, work_dtype, state_dtype in product(COMMON_SIZES, FLOATS, FLOATS)
    ]
    for work_dtype in FLOATS[1:]:  # the types that the loops above left at their defaults
        common.append(variant_of((128, 128), work_dtype, "float32", gate_dtype=work_dtype))
        common.append(variant_of((128, 128), work_dtype, work_dtype, out_dtype="float32"))
    yield from spread("common sizes", common)
    # Types in turn: every size with every ring length, every pair of types more than once.
    types = cycle(product(FLOATS, FLOATS))
    yield from ring_groups(
        (sizes, *next(types), ring_len, 1 if ring_len == 4 else 100)
        for sizes, ring_len in product(RING_SIZES, RING_LENS)
    )
    yield from stream_groups(covering_streams())
    yield from pending_groups(covering_pending())
    for name, variants in (("gates", list(gate_variants())), ("conv1d", list(conv1d_variants()))):
        for place, architecture in enumerate(ARCHITECTURES):
            yield name, architecture, variants[place :: len(ARCHITECTURES)]
    for architecture in ARCHITECTURES:
        yield "windows", architecture, [windows_kernel.VARIANT]
    yield from chunk_groups()


#: Head sizes of calls by chunks: every padded width of keys, tiles of 64 columns and of 32.
CHUNKED_SIZES = ((128, 128), (256, 256), (96, 192), (64, 64), (192, 160), (32, 32), (160, 96), (224, 128))


def chunk_groups() -> Iterator[Group]:
    """Each size with each work type, other types and architectures in turn; the first on every architecture."""
    groups: dict[str, list[Variant]] = {architecture: [] for architecture in ARCHITECTURES}
    types, in_turn = cycle(product(FLOATS, FLOATS, (None, "float32"))), cycle(ARCHITECTURES)
    for sizes, work_dtype in product(CHUNKED_SIZES, FLOATS):
        gate_dtype, state_dtype, out_dtype = next(types)
        gate = work_dtype if gate_dtype == "bfloat16" else "float32"
        call = Layer(HeadGeometry(1, 2, *sizes), work_dtype, state_dtype, out_dtype, gate)
        used = [use.variant for use in uses(call, CHUNK_KERNELS)]
        assert {variant.kernel.stem for variant in used} >= set(CHUNK_KERNELS)
        for architecture in ARCHITECTURES if sizes == CHUNKED_SIZES[0] else (next(in_turn),):
            groups[architecture] += [variant for variant in used if not variant.kernel.only_on]
        groups["sm_90"] += [variant for variant in used if variant.kernel.only_on]
    for architecture, variants in groups.items():
        yield "chunked", architecture, list(dict.fromkeys(variants))


def gate_variants() -> Iterator[Variant]:
    """Those of the gates, with all types."""
    for projection, rate, bias in product(FLOATS, repeat=3):
        of_tokens = [shape_of((100, 32), projection)] * 2
        arrays = (*of_tokens, shape_of((32,), rate), shape_of((32,), bias))
        yield gates_kernel.variant(gate_inputs(describe, *arrays, allow_neg_eigval=False))


def conv1d_variants() -> Iterator[Variant]:
    """Those of the convolution and its commit: every width, with all types, lengths, layouts of the pool in turn."""
    types = cycle(product(FLOATS, repeat=3))
    layouts = cycle((None, "by place", "gaps"))
    for width, rows, activation in product(range(2, 9), (1, 500, 5000), (None, "silu", "silu")):
        work, pool, of_filter = next(types)
        out = "float32" if activation is None else work
        state = shape_of((100, 4096, width - 1), pool)
        layout, elements = next(layouts), 4096 * (width - 1)
        if layout is not None:
            strides = (elements, 1, 4096) if layout == "by place" else (elements + 1, width - 1, 1)
            state.strides = tuple(stride * DTYPES[pool].itemsize for stride in strides)
        tables = shape_of((100,), "uint32"), shape_of((101,), "int32")
        qkv, bias = shape_of((rows, 4096), work), shape_of((4096,), of_filter)
        weight = shape_of((4096, width), of_filter)
        inputs = conv1d_inputs(describe, qkv, weight, state, *tables, bias, activation=activation)
        yield conv_kernel.variant(inputs, describe("out", shape_of((rows, 4096), out)))
        yield commit_kernel.variant(commit_inputs(describe, qkv, state, *tables, tables[0]))


#: Head sizes, ring length and map of a call with pending records.
PendingCall = tuple[tuple[int, int], int, RowTile, int]


def covering_pending() -> Iterator[PendingCall]:
    """Every key head size that streams with its first map, others with a block's; models on every architecture."""
    for key_head_dim, value_head_dim in zip(HEAD_DIMS, cycle(STREAMED_VALUE_HEAD_DIMS), strict=False):
        itemsize, ring_len = (4, 16) if key_head_dim % 32 == 0 else (2, 4)
        sizes = key_head_dim, value_head_dim
        streams = tiles_with_records(*sizes, itemsize, ring_len)
        yield sizes, ring_len, (*streams, row_tile.nearest_row_tile(*sizes, itemsize))[0], itemsize
    for heads, itemsize in product(dict.fromkeys(MODELS.values()), (2, 4)):
        sizes = heads.key_head_dim, heads.value_head_dim
        for tile in (tiles_with_records(*sizes, itemsize, 8)[0], row_tile.nearest_row_tile(*sizes, itemsize)):
            yield from [(sizes, 8, tile, itemsize)] * len(ARCHITECTURES)


def all_pending() -> Iterator[PendingCall]:
    """Every map of every key head size, those of a block among them."""
    for key_head_dim, itemsize, ring_len in product(HEAD_DIMS, (4, 2), (4, 16)):
        for value_head_dim in STREAMED_VALUE_HEAD_DIMS:
            sizes = key_head_dim, value_head_dim
            blocks = (row_tile.nearest_row_tile(*sizes, itemsize, *size) for size in ((64, 128), (32, 64), (16, 32)))
            for tile in (*tiles_with_records(*sizes, itemsize, ring_len), *blocks):
                yield sizes, ring_len, tile, itemsize


def pending_groups(pending_calls: Iterable[PendingCall]) -> Iterator[Group]:
    """Each of the calls with types, op, alignment of records and architecture in turn."""
    types = {4: cycle((work, "float32") for work in FLOATS), 2: cycle(product(FLOATS, FLOATS[1:]))}
    in_turn = zip(cycle(ARCHITECTURES), cycle(("verify", "fwd", "verify")), cycle((0, 1, 0, 0, 1)), strict=False)
    groups: dict[str, list[Variant]] = {architecture: [] for architecture in ARCHITECTURES}
    for (sizes, ring_len, tile, itemsize), (architecture, op, odd) in zip(pending_calls, in_turn, strict=False):
        ring = ring_of(sizes, ring_len + odd, "float32")
        types_of_call = next(types[itemsize])
        groups[architecture].append(variant_of(sizes, *types_of_call, tile=tile, ring=ring, pending=op))
    for architecture, variants in groups.items():
        yield "pending", architecture, distinct(variants)


def ring_groups(calls: Iterable[tuple[tuple[int, int], str, str, int, int]]) -> Iterator[Group]:
    """The verifies and the folds of `calls`, each spread over architectures."""
    verifies, folds = zip(*(ring_variants(*call) for call in calls), strict=True)
    yield from spread("verify", verifies)
    yield from spread("fold", folds)


#: Value head sizes whose blocks have 4 warps, 3, 2, 1, 6 and 5.
STREAMED_VALUE_HEAD_DIMS = (128, 96, 64, 32, 192, 80)


def covering_streams() -> Iterator[tuple[tuple[int, int], RowTile, int]]:
    """Head sizes, map and width of the pool: every key head size with the maps that calls take by themselves."""
    few, many = 1, FEW_STREAMED_HEADS
    for key_head_dim, value_head_dim in zip(HEAD_DIMS[1::2], cycle(STREAMED_VALUE_HEAD_DIMS), strict=False):
        heads = HeadGeometry(1, 2, key_head_dim, value_head_dim)
        itemsize = 4 if key_head_dim % 32 == 0 else 2
        calls = ((many, 4 * many), (few, 4), (few, LONG_ROW_TOKENS))
        for tile in dict.fromkeys(streamed_tile_for(heads, itemsize, *call) for call in calls):
            assert tile is not None
            yield (key_head_dim, value_head_dim), tile, itemsize
    for heads, itemsize in product(dict.fromkeys(MODELS.values()), (2, 4)):  # on every architecture
        tile = streamed_tile_for(heads, itemsize, many, 4 * many)
        assert tile is not None
        yield from [((heads.key_head_dim, heads.value_head_dim), tile, itemsize)] * len(ARCHITECTURES)
    for itemsize in (2, 4):  # the common size with all of its maps
        for tile in streamed_tiles(128, 128, itemsize):
            yield (128, 128), tile, itemsize


def all_streams() -> Iterator[tuple[tuple[int, int], RowTile, int]]:
    """Every map of every key head size, on two architectures."""
    seen = set()
    for key_head_dim, value_head_dim, itemsize in product(HEAD_DIMS[1::2], HEAD_DIMS, (4, 2)):
        for tile in streamed_tiles(key_head_dim, value_head_dim, itemsize):
            takes_whole_heads = tile.streamed_warps * tile.columns == value_head_dim
            form = key_head_dim, tile, itemsize, takes_whole_heads
            if form not in seen:
                seen.add(form)
                yield from [((key_head_dim, value_head_dim), tile, itemsize)] * 2


def stream_groups(streams: Iterable[tuple[tuple[int, int], RowTile, int]]) -> Iterator[Group]:
    """Each of the maps with types, kernel and architecture in turn; their numbers have no divisor in common."""
    types = {4: cycle((work, "float32") for work in FLOATS), 2: cycle(product(FLOATS, FLOATS[1:]))}
    kernels = cycle((4, None, 4, 1, None))  # RING_LEN of a verify; None is a forward call
    groups: dict[str, list[Variant]] = {architecture: [] for architecture in ARCHITECTURES}
    for (sizes, tile, itemsize), architecture, ring_len in zip(streams, cycle(ARCHITECTURES), kernels, strict=False):
        work_dtype, state_dtype = next(types[itemsize])
        gate_dtype = work_dtype if len(groups[architecture]) % 3 == 0 else "float32"
        ring = ring_of(sizes, ring_len, "float32") if ring_len else None
        groups[architecture].append(
            variant_of(sizes, work_dtype, state_dtype, gate_dtype=gate_dtype, tile=tile, ring=ring)
        )
    for architecture, variants in groups.items():
        yield "streams", architecture, distinct(variants)


def all_groups() -> Iterator[Group]:
    """Every key head size on every architecture; every thread map of the common sizes, spread over architectures."""
    for architecture, key_head_dim in product(ARCHITECTURES, HEAD_DIMS):
        variants = distinct(
            variant_of((key_head_dim, value_head_dim), *types, batch_size=few_or_many)
            for value_head_dim, types, few_or_many in product(HEAD_DIMS, product(FLOATS[:2], repeat=2), (1, 100))
        )
        yield f"KEY_HEAD_DIM {key_head_dim}", architecture, variants
    for key_head_dim in sorted({size for size, _ in COMMON_SIZES}):
        variants = [
            variant_of(sizes, work_dtype, state_dtype, tile=tile)
            for sizes, work_dtype, state_dtype in product(COMMON_SIZES, FLOATS[:2], FLOATS[:2])
            if sizes[0] == key_head_dim
            for tile in row_tile.row_tiles(*sizes, DTYPES[state_dtype].itemsize)
        ]
        yield from spread(f"thread maps of KEY_HEAD_DIM {key_head_dim}", variants)
    yield from ring_groups(product(RING_SIZES, FLOATS, FLOATS, RING_LENS, (1, 100)))
    yield from stream_groups(all_streams())
    yield from pending_groups(all_pending())


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
    report = nvrtc.compile_report(variant_of((128, 128), "bfloat16", "float32"), "sm_90")
    assert 32 <= report.registers <= 255
    assert report.shared_bytes > 128 * 4
    assert (report.spill_bytes, report.stack_bytes) == (0, 0)


def test_the_covering_set_covers() -> None:
    groups = list(covering_groups())
    macros = [(architecture, dict(variant.macros)) for _, architecture, variants in groups for variant in variants]
    assert {architecture for architecture, _ in macros} == set(ARCHITECTURES)
    assert {int(each["KEY_HEAD_DIM"]) for _, each in macros if "KEY_HEAD_DIM" in each} == set(HEAD_DIMS)
    for pair in product(("float", "bfloat16", "float16"), repeat=2):
        assert pair in {
            (each["WORK_TYPE"], each["STATE_TYPE"]) for _, each in macros if {"WORK_TYPE", "STATE_TYPE"} <= each.keys()
        }


def test_the_covering_set_covers_the_ring() -> None:
    for kernel in ("verify", "fold"):
        groups = [group for group in covering_groups() if group[0] == kernel]
        macros = [(architecture, dict(variant.macros)) for _, architecture, group in groups for variant in group]
        assert {architecture for architecture, _ in macros} == set(ARCHITECTURES)
        assert {int(each["KEY_HEAD_DIM"]) for _, each in macros} == {size for size, _ in RING_SIZES}
        assert {int(each["RING_LEN"]) for _, each in macros} == set(RING_LENS)
        pairs = {(each["STATE_TYPE"], each["RING_TYPE"]) for _, each in macros}
        assert pairs == set(product(("float", "bfloat16", "float16"), repeat=2))


def test_the_covering_set_covers_streams() -> None:
    groups = [group for group in covering_groups() if group[0] == "streams"]
    assert {architecture for _, architecture, _ in groups} == set(ARCHITECTURES)
    variants = [variant for _, _, group in groups for variant in group]
    macros = [dict(variant.macros) for variant in variants]
    assert all(int(each["STREAMED_WARPS"]) for each in macros)
    assert {int(each["KEY_HEAD_DIM"]) for each in macros} == set(range(16, 257, 16))
    assert {each["STREAMED_WARPS"] for each in macros} >= {"1", "2", "3", "4"}
    assert {each["ROW_GROUPS"] for each in macros} == {"2", "4", "8", "16"}
    pairs = {(each["WORK_TYPE"], each["STATE_TYPE"]) for each in macros}
    assert pairs == set(product(("float", "bfloat16", "float16"), repeat=2))
    assert {each["GATE_TYPE"] for each in macros} == {"float", "bfloat16", "float16"}
    for kernel in (fwd_kernel, verify_kernel):
        by_kernel = [variant for variant in variants if variant.kernel == kernel.KERNEL]
        assert {dict(variant.macros)["ROW_GROUPS"] for variant in by_kernel} >= {"4", "8", "16"}
        for architecture in ARCHITECTURES:
            assert any(variant in by_kernel for _, each, group in groups if each == architecture for variant in group)


def test_the_covering_set_covers_pending_records() -> None:
    groups = [group for group in covering_groups() if group[0] == "pending"]
    assert {architecture for _, architecture, _ in groups} == set(ARCHITECTURES)
    variants = [variant for _, _, group in groups for variant in group]
    macros = [dict(variant.macros) for variant in variants]
    assert {each["HAS_PENDING"] for each in macros} == {"1"}
    assert {int(each["KEY_HEAD_DIM"]) for each in macros} == set(HEAD_DIMS)
    assert {each["RING_IS_PACKED"] for each in macros} == {"true", "false"}
    assert {each.get("RECORDS_PER_WARP") for each in macros} == {None, "1", "2"}
    for kernel in (fwd_kernel, verify_kernel):
        for architecture in ARCHITECTURES:
            assert any(
                variant.kernel == kernel.KERNEL_WITH_PENDING
                for _, each, group in groups
                if each == architecture
                for variant in group
            )


def test_the_covering_set_covers_chunks() -> None:
    groups = [group for group in covering_groups() if group[0] == "chunked"]
    assert {architecture for _, architecture, _ in groups} == set(ARCHITECTURES)
    macros = [dict(variant.macros) for _, _, group in groups for variant in group]
    assert {each.get("CHUNK_LEN") for each in macros} == {"32", "64"}
    assert {each.get("WALK_STAGES") for each in macros} == {None, "1", "2", "3"}
    for name in ("WORK_TYPE", "GATE_TYPE", "STATE_TYPE", "OUT_TYPE"):
        assert {each[name] for each in macros if name in each} == {"float", "bfloat16", "float16"}


def test_the_covering_set_covers_the_walk_of_hopper() -> None:
    for _, architecture, variants in (group for group in covering_groups() if group[0] == "chunked"):
        walks = [dict(variant.macros) for variant in variants if variant.kernel == sm90_walk_kernel.KERNEL]
        sizes = {(each["KEY_HEAD_DIM"], each["WARPGROUPS"]) for each in walks}
        assert sizes == ({("64", "1"), ("128", "1"), ("128", "2")} if architecture == "sm_90" else set())
        if walks:
            assert {each["WORK_TYPE"] for each in walks} == {"bfloat16", "float16"}


def test_variants_of_one_thread_map_count_once() -> None:
    wide, wider = (variant_of((64, dim), "float32", "float32") for dim in (64, 128))
    assert wide != wider
    assert distinct([wide, wider]) == [wider]
    narrow = variant_of((64, 8), "float32", "float32")
    assert len(distinct([wide, narrow, variant_of((64, 64), "bfloat16", "float32")])) == 3
