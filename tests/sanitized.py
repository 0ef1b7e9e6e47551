"""Calls that run every kernel of the backend host, for a sanitizer to watch; tests/test_sanitizers.py starts them.

    LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 \\
        python tests/sanitized.py address,undefined [--plant NAME]

Arrays lie as their case says, in memory of their own, and under AddressSanitizer nobody may touch what lies between and
around their elements. Prints the kernels that ran. --plant: the call of that fault of `PLANTS` alone, with
the fault in its kernel.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from gdn import ops
from gdn.arrays import DTYPES
from gdn.backends import host, launch
from gdn.geometry import HeadGeometry
from gdn.speculative import PendingWindows
from gdn.testing.buffers import Array, lay_out
from gdn.testing.cases import RECURRENCE_CASES, RecurrenceCase, build_arrays
from gdn.testing.chunked_cases import CHUNKED_CASES, ChunkedCase
from gdn.testing.conv1d_cases import CONV1D_CASES, Conv1dCase, build_conv1d_arrays
from gdn.testing.execute import Layouts, on_backend
from gdn.testing.gates_cases import GATES_CASES, GatesCase, build_gates_arrays
from gdn.testing.pending_steps import build_pending_arrays
from gdn.testing.ring_cases import RING_CASES, RingCase, build_ring_arrays

#: Lengths around the sizes of warps, stages and chunks.
EDGE_LENGTHS = (1, 31, 32, 33, 63, 64, 65, 127, 128, 129)
#: Memory with forbidden bytes, which must not be given to others.
_KEPT: list[Array] = []


def guarded(values: Array, layout: str = "dense", num_used: int | None = None) -> Array:
    """A copy in memory of its own, in which nobody may touch what are not its elements.

    num_used: of the elements of the last axis; the others are not to be touched either.
    """
    if layout == "dense" and num_used is None:
        return values.copy()  # of exactly its size, between the sanitizer's own red zones
    buffer = lay_out(values, layout)
    is_used = replace(buffer, memory=np.zeros_like(buffer.memory, np.bool_))
    is_used.array[..., :num_used] = True
    _forbid(buffer.memory, np.repeat(is_used.memory, buffer.memory.itemsize))
    _KEPT.append(buffer.memory)
    return buffer.array


def _forbid(memory: Array, is_used: Array) -> None:
    """Have AddressSanitizer report accesses to the bytes of `memory` that are not used."""
    forbid = getattr(ctypes.CDLL(None), "__asan_poison_memory_region", None)
    if forbid is None:
        return
    edges = np.flatnonzero(np.diff(is_used, prepend=True, append=True))
    for begin, end in edges.reshape(-1, 2):
        forbid(ctypes.c_void_p(memory.ctypes.data + int(begin)), ctypes.c_size_t(int(end - begin)))


def run_recurrence(case: RecurrenceCase) -> None:
    """The forward call of a case."""
    arrays, layouts = build_arrays(case), Layouts.of(case)
    six = (guarded(*pair) for pair in zip(arrays.as_tuple(), layouts.by_argument(), strict=True))
    out = guarded(np.empty((case.total_seq_len, case.heads.value_dim), DTYPES[case.out_dtype]), layouts.out)
    algorithm = "chunked" if isinstance(case, ChunkedCase) else "recurrent"
    ops.gated_delta_recurrence_fwd(*six, algorithm=algorithm, out=out)


def run_edges(case: RecurrenceCase) -> None:
    """The same with rows of every length around the edges, one alone, and one between others."""
    for length in EDGE_LENGTHS:
        run_recurrence(replace(case, lengths=(length,), spare_slots=0))
        run_recurrence(replace(case, lengths=(0, length, 1), leading_rows=1, trailing_rows=48, spare_slots=0))


def run_ring(case: RingCase) -> None:
    """Verify the windows of each layer, fold what was accepted."""
    arrays = build_ring_arrays(case)
    pool, ring = guarded(arrays.recurrent_state), guarded(arrays.ring, num_used=case.heads.record_elements)
    for window, ring_rows in zip(arrays.layers, arrays.ring_row_ids, strict=True):
        six = replace(window, recurrent_state=pool).as_tuple()
        ops.gated_delta_recurrence_verify_ring(*six, ring, guarded(ring_rows))
    ops.gated_delta_state_fold(pool, arrays.row_ids, ring, arrays.ring_row_ids, arrays.num_accepted)


def run_pending(case: RingCase) -> None:
    """Verify windows behind pending records, some folded, some not; then a forward call and a fold of the same."""
    arrays = build_pending_arrays(case)
    windows, pending_rows = arrays.windows, arrays.pending_row_ids("mixed")
    pool, ring = guarded(windows.recurrent_state), guarded(windows.ring, num_used=case.heads.record_elements)
    for layer, (window, ring_rows) in enumerate(zip(windows.layers, windows.ring_row_ids, strict=True)):
        six = replace(window, recurrent_state=pool).as_tuple()
        pending = {"pending_ring_slot_idx": guarded(pending_rows[layer]), "num_pending": guarded(arrays.counts)}
        earlier = replace(arrays.earlier[layer], recurrent_state=pool).as_tuple()
        # With tables that say nothing is pending: without them the windows before would take a kernel of their own.
        nothing = {**pending, "num_pending": np.zeros_like(arrays.counts)}
        ops.gated_delta_recurrence_verify_ring(*earlier, ring, pending_rows[layer], **nothing)
        ops.gated_delta_recurrence_verify_ring(*six, ring, guarded(ring_rows), **pending)
        ops.gated_delta_recurrence_fwd(*six, ring=ring, **pending)
    ops.gated_delta_state_fold(pool, windows.row_ids, ring, pending_rows, arrays.counts)


def run_conv1d(case: Conv1dCase) -> None:
    """The convolution of a case, and a commit of about half of its tokens."""
    arrays, index = build_conv1d_arrays(case), case.index_layout
    qkv, weight = guarded(arrays.qkv, case.qkv_layout), guarded(arrays.conv_weight, case.weight_layout)
    pool = guarded(arrays.conv_state, case.state_layout)
    tables = guarded(arrays.slot_idx, index), guarded(arrays.input_row_offsets, index)
    out = guarded(np.empty(arrays.qkv.shape, DTYPES[case.out_dtype]), case.out_layout)
    keywords = {"bias": arrays.bias, "activation": case.activation}
    ops.gated_delta_conv1d_fwd(qkv, weight, pool, *tables, **keywords, out=out)
    accepted = (np.asarray(case.lengths) + 1) // 2
    ops.gated_delta_conv1d_commit(qkv, pool, *tables, guarded(accepted.astype(np.uint32), index))


def run_gates(case: GatesCase) -> None:
    """The gates of a case."""
    arrays = build_gates_arrays(case)
    tokens = (guarded(each, case.token_layout) for each in (arrays.a, arrays.b))
    heads = (guarded(each, case.head_layout) for each in (arrays.A_log, arrays.dt_bias))
    out = tuple(guarded(np.empty(arrays.a.shape, np.float32), case.out_layout) for _ in range(2))
    ops.gated_delta_gates(*tokens, *heads, allow_neg_eigval=case.allow_neg_eigval, out=out)


@dataclass(frozen=True)
class WindowTables:
    """Tables of pending windows over the steps of a loop. lazy: whether records stay pending while there is room."""

    num_layers: int
    batch_size: int
    ring_len: int
    lazy: bool


def run_windows(case: WindowTables) -> None:
    """Steps of a loop, some sequences padding, and counts of accepted tokens that nothing limits."""
    rows = np.arange(2 * case.num_layers * case.batch_size, dtype=np.uint32)
    windows = PendingWindows(rows.reshape(2, case.num_layers, case.batch_size), case.ring_len, lazy=case.lazy)
    random = np.random.default_rng(0)
    for _ in range(4):
        lengths = random.integers(0, case.ring_len + 2, case.batch_size)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint32)
        slots = np.where(random.random(case.batch_size) < 0.2, -1, 0).astype(np.int32)
        windows.begin(guarded(offsets, "every_other"), guarded(slots))
        accepted = random.choice([0, 1, 2, 2**31 - 1], case.batch_size)
        windows.accept(guarded(accepted.astype(np.int32), "every_other"))


# What differs from a named case is what makes it take a kernel that another call has compiled already, or less time.
_FEW_HEADS = HeadGeometry(1, 2, 32, 32)
_CHUNKED = replace(CHUNKED_CASES["chunked_heads_32_32"], heads=HeadGeometry(1, 1, 32, 32), lengths=(66, 0, 2))
_PENDING = replace(RING_CASES["pending_of_4"], heads=_FEW_HEADS)
_ALIGNED = -_FEW_HEADS.record_elements % 8
CALLS: dict[str, tuple[Callable[[Any], None], Any]] = {
    "single tokens": (run_recurrence, RECURRENCE_CASES["padding_rows"]),
    "long rows": (run_recurrence, replace(RECURRENCE_CASES["uncovered_rows"], heads=_FEW_HEADS)),
    "edges": (run_edges, replace(RECURRENCE_CASES["ragged_batch"], heads=_FEW_HEADS)),
    "windows of 16 bits": (run_recurrence, RECURRENCE_CASES["sliced_inputs_bfloat16"]),
    "unaligned": (run_recurrence, RECURRENCE_CASES["unaligned"]),
    "chunks": (run_recurrence, _CHUNKED),
    "unaligned chunks": (
        run_recurrence,
        replace(CHUNKED_CASES["chunked_unaligned"], heads=HeadGeometry(1, 1, 32, 32), lengths=(33, 1)),
    ),
    "ring": (run_ring, RING_CASES["ring_bfloat16_pool"]),
    "pending, aligned records": (run_pending, replace(_PENDING, record_padding=_ALIGNED)),
    "convolution": (run_conv1d, CONV1D_CASES["conv_width_4"]),
    "unaligned convolution": (run_conv1d, CONV1D_CASES["conv_unaligned"]),
    "gates": (run_gates, GATES_CASES["gates_sliced"]),
    "strided gates": (run_gates, GATES_CASES["gates_strided"]),
    "tables, lazy": (run_windows, WindowTables(3, 130, 4, lazy=True)),
    "tables, eager": (run_windows, WindowTables(1, 5, 1, lazy=False)),
}
#: Calls that differ from others in where arrays lie, not in which threads meet: nothing to see for ThreadSanitizer.
ONLY_LAYOUTS = ("unaligned chunks", "unaligned convolution", "strided gates")


@dataclass(frozen=True)
class Plant:
    """A fault: the call that meets it, its file, what stands there and what instead, what a sanitizer says of it.

    seen_in: the file that the report names, where it is not the fault's own.
    """

    call: str
    file_name: str
    right: str
    wrong: str
    sanitize: str
    report: str
    seen_in: str = ""


_BOUNDS_AND_BEHAVIOUR = "address,undefined"
_RACES = "thread"
PLANTS: dict[str, Plant] = {
    "threads beyond the last element": Plant(
        *("gates", "gated_delta_gates.cu"),
        *("if (place >= total_seq_len * num_value_heads) return;", ""),
        *(_BOUNDS_AND_BEHAVIOUR, "heap-buffer-overflow"),
    ),
    "a row's end in the next gap": Plant(
        *("gates", "gated_delta_gates.cu"),
        *("decay[token * decay_token_stride + head ", "decay[token * decay_token_stride + (head + 1) "),
        *(_BOUNDS_AND_BEHAVIOUR, "use-after-poison"),
    ),
    "packed access to unaligned values": Plant(
        *("unaligned", "block_tokens.cuh"),
        *("Run<WORK_TYPE, COLUMNS_PER_LANE, IS_PACKED> value;", "Run<WORK_TYPE, COLUMNS_PER_LANE, true> value;"),
        *(_BOUNDS_AND_BEHAVIOUR, "misaligned address", "numeric_types.cuh"),
    ),
    "sum before its limit": Plant(
        *("tables, lazy", "pending_windows.cu"),
        "return first_place + (num_accepted < length ? num_accepted : length);",
        "return min(static_cast<int>(first_place) + static_cast<int>(num_accepted), static_cast<int>(ring_len));",
        *(_BOUNDS_AND_BEHAVIOUR, "signed integer overflow"),
    ),
    "shift by all bits": Plant(
        *("convolution", "gated_delta_conv1d_fwd.cu"),
        *("return low >= high ? 0u : (", "return ("),
        *(_BOUNDS_AND_BEHAVIOUR, "shift exponent"),
    ),
    "missing barrier of a block": Plant(
        *("unaligned", "block_tokens.cuh"),
        "1, sums);\n        __syncthreads();",
        "1, sums);",
        *(_RACES, "data race"),
    ),
    "missing barrier of a warp, behind a shuffle": Plant(
        *("long rows", "stream_tokens.cuh"),
        *("        }\n        __syncwarp();\n", "        }\n"),
        *(_RACES, "data race"),
    ),
    "missing barrier of a table in shared memory": Plant(
        *("convolution", "gated_delta_conv1d_fwd.cu"),
        *("rows = {0u, 0u};\n    __syncthreads();", "rows = {0u, 0u};"),
        *(_RACES, "data race"),
    ),
}


def plant(fault: Plant) -> None:
    """Have the backends read the kernels with this fault."""
    original = launch.kernel_text

    def text(file_name: str) -> str:
        right = original(file_name)
        if file_name != fault.file_name:
            return right
        if right.count(fault.right) != 1:
            raise SystemExit(f"{fault.right!r} stands {right.count(fault.right)} times in {file_name}")
        return right.replace(fault.right, fault.wrong)

    launch.kernel_text = text  # type: ignore[assignment]  # the process ends with the fault


def main() -> None:
    """Run calls under the sanitizer that this process was started with."""
    parser = argparse.ArgumentParser()
    parser.add_argument("sanitize")
    parser.add_argument("--plant", choices=PLANTS)
    given = parser.parse_args()
    calls = [name for name in CALLS if given.sanitize != "thread" or name not in ONLY_LAYOUTS]
    if given.plant:
        plant(PLANTS[given.plant])
        calls = [PLANTS[given.plant].call]
    stems: set[str] = set()
    run_launch = host.run

    def noted(request: launch.Launch) -> None:
        run_launch(request)
        stems.add(request.variant.kernel.stem)

    host.run = noted
    with host.options(sanitize=given.sanitize), on_backend("host"):
        for name in calls:
            run, case = CALLS[name]
            run(case)
    print(*sorted(stems), sep="\n")


if __name__ == "__main__":
    main()
