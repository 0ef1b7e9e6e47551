"""Calls by chunks: their arguments, their workspace, and the launches that they are made of."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn
from gdn import ops
from gdn.arrays import take
from gdn.backends import chunk_layout, chunked, host
from gdn.backends import gated_delta_recurrence_fwd as fwd_kernel
from gdn.backends.row_tile import RowTile, row_tiles
from gdn.backends.streamed_tile import streamed_tiles
from gdn.errors import DTypeError, GdnError, IndexValueError, KernelCompileError, LayoutError, ShapeError
from gdn.recurrence import recurrence_inputs
from gdn.testing.execute import on_backend

if TYPE_CHECKING:
    from tests.conftest import Call

HEADS = (1, 2, 32, 32)
LENGTHS = (150, 3, 0, 128, 127)  # for "auto" two rows of chunks, two short ones, and one without tokens
OP = ops.gated_delta_recurrence_fwd


@pytest.fixture
def make(new_call: type[Call]) -> Callable[..., Call]:
    """Makes a call by chunks, each time with the same values."""

    def make(
        algorithm: str = "chunked", lengths: tuple[int, ...] = LENGTHS, heads: tuple[int, int, int, int] = HEADS
    ) -> Call:
        call = new_call(heads, lengths, max_slots=6)
        call["algorithm"] = algorithm
        return call

    return make


def workspace_bytes(call: Call) -> int:
    return ops.gated_delta_recurrence_fwd_workspace_bytes(*call.six, algorithm=call["algorithm"])


def results(call: Call, backend: str) -> tuple[bytes, bytes]:
    """The bits that a call leaves."""
    call.run(backend)
    return call["out"].tobytes(), call["recurrent_state"].tobytes()


def memory(num_bytes: int, offset: int = 0) -> np.ndarray[Any, Any]:
    """Bytes that start so far behind a multiple of 256."""
    whole = np.full(num_bytes + offset + 512, 0xFF, np.uint8)
    first = -whole.ctypes.data % 256 + offset
    return whole[first : first + num_bytes]


# ---- Arguments ----


@pytest.mark.parametrize("algorithm", ["fast", "Chunked", "", None, 1, ["chunked"]])
def test_another_algorithm_is_refused(make: Callable[..., Call], algorithm: Any) -> None:
    message = make(algorithm).refusal(GdnError)
    assert message == f"algorithm: expected 'recurrent', 'chunked' or 'auto', got {algorithm!r}"
    with pytest.raises(GdnError, match=r"^algorithm: expected 'recurrent', "):
        workspace_bytes(make(algorithm))


@pytest.mark.parametrize(("heads", "name"), [((1, 2, 24, 32), "key_head_dim"), ((1, 2, 32, 40), "value_head_dim")])
def test_heads_that_chunks_do_not_serve(
    make: Callable[..., Call], cpu_backend: str, heads: tuple[int, int, int, int], name: str
) -> None:
    """Beside field cases 56-59, 63: chunks have a limit of their own, which is named; "auto" does without them."""
    dim = dict(zip(("key_head_dim", "value_head_dim"), heads[2:], strict=True))[name]
    expected = f"{name}: expected a multiple of 32 for algorithm='chunked', got {dim}"
    assert make(heads=heads).refusal(ShapeError, cpu_backend) == expected
    with pytest.raises(ShapeError, match=rf"^{name}: expected a multiple of 32 "):
        workspace_bytes(make(heads=heads))
    assert workspace_bytes(make("auto", heads=heads)) == 0
    assert results(make("auto", heads=heads), cpu_backend) == results(make("recurrent", heads=heads), cpu_backend)


def test_what_a_recurrent_call_refuses_a_call_by_chunks_refuses(make: Callable[..., Call], cpu_backend: str) -> None:
    for name, value, error in (
        ("decay_per_token", np.zeros((3, 2), np.float32), ShapeError),
        ("slot_idx", np.arange(5), DTypeError),
        ("out", np.zeros((3, 64), np.float32), ShapeError),
    ):
        call, recurrent = make(), make("recurrent")
        call[name] = recurrent[name] = value
        assert call.refusal(error, cpu_backend) == recurrent.refusal(error, cpu_backend)
    call = make()
    call["slot_idx"] = np.array([0, 1, 2, 0, 3], np.uint32)
    assert call.refusal(IndexValueError, cpu_backend).startswith("slot_idx[3]: expected")


def test_a_workspace_that_cannot_be_used(make: Callable[..., Call], cpu_backend: str) -> None:
    size = workspace_bytes(make())
    read_only = memory(size)
    read_only.flags.writeable = False
    for workspace, error, expected in (
        (memory(size - 1), ShapeError, f"at least {size} bytes, got {size - 1}"),
        (memory(size).reshape(1, -1), ShapeError, f"shape [num_bytes], got shape (1, {size})"),
        (memory(size * 4).view(np.float32), DTypeError, "uint8, got float32"),
        (memory(size).view(np.int8), DTypeError, "uint8, got int8"),
        (memory(2 * size)[::2], LayoutError, "its last 1 axes dense row-major"),
        (read_only, LayoutError, "a writable array, got a read-only one"),
        (memory(size, offset=8), LayoutError, "an address that is a multiple of 16 bytes"),
        ([0], DTypeError, "a NumPy or CuPy array"),
    ):
        call = make()
        call["workspace"] = workspace
        assert call.refusal(error, cpu_backend).startswith(f"workspace: expected {expected}")


@pytest.mark.parametrize("name", ["qkv_conv_output", "decay_per_token", "recurrent_state", "slot_idx", "out"])
def test_a_workspace_apart_from_all_arrays(make: Callable[..., Call], name: str) -> None:
    call = make()
    size, values = workspace_bytes(call), call[name]
    whole = memory(size + values.nbytes)
    call["workspace"] = whole[:size]
    for start in (size, size - values.itemsize):
        call[name] = whole[start : start + values.nbytes].view(values.dtype).reshape(values.shape)
        call[name][...] = values
        if start == size:
            call.run()
    message = call.refusal(LayoutError)
    assert message == f"workspace: expected memory of its own, apart from {name}, got overlapping arrays"


def test_pending_records_apart_from_the_workspace(make: Callable[..., Call]) -> None:
    call = with_pending(make())
    call["workspace"] = memory(workspace_bytes(call))
    call["num_pending"] = call["workspace"][:20].view(np.uint32)
    assert "apart from num_pending" in call.refusal(LayoutError)


def test_a_recurrent_call_does_not_look_at_a_workspace(make: Callable[..., Call]) -> None:
    call = make("recurrent")
    assert workspace_bytes(call) == 0
    call["workspace"] = "nothing"
    call.run()


# ---- The workspace ----


def test_bytes_of_a_workspace(make: Callable[..., Call]) -> None:
    assert workspace_bytes(make("auto", (127,))) == 0
    assert workspace_bytes(make("auto", (100, 28))) > 0
    assert workspace_bytes(make("chunked", (1,))) > 0
    assert workspace_bytes(make("chunked", (0, 0))) == 0
    call = make()
    shapes = [SimpleNamespace(shape=array.shape, dtype=array.dtype) for array in call.six]
    assert ops.gated_delta_recurrence_fwd_workspace_bytes(*shapes, algorithm="chunked") == workspace_bytes(call)


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
@pytest.mark.parametrize("offset", [0, 16, 240])
def test_a_workspace_may_hold_anything_and_nothing_beside_it_is_written(
    make: Callable[..., Call], cpu_backend: str, algorithm: str, offset: int
) -> None:
    plain, given = make(algorithm), make(algorithm)
    size = workspace_bytes(given)
    whole = memory(size + 1024 + offset)
    given["workspace"] = whole[offset : offset + size]
    assert results(given, cpu_backend) == results(plain, cpu_backend)
    assert set(whole[:offset]) | set(whole[offset + size :]) == {0xFF}


def test_slabs_do_not_change_bits(make: Callable[..., Call], monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    if kernels == "cuda":
        pytest.skip("values are compared where kernels are checked on a GPU")
    lengths = (1, 200, 0, 70, 130)
    expected = results(make("chunked", lengths), kernels)
    for num_bytes in (0, 150_000):
        monkeypatch.setattr(chunk_layout, "MAX_WORKSPACE_BYTES", num_bytes)
        assert results(make("chunked", lengths), kernels) == expected


# ---- By hand ----


def by_chunks(call: Call, backend: str) -> tuple[Any, Any]:
    """Readout and pool of a call, as NumPy arrays."""
    if backend == "cuda":
        import cupy

        call.arguments |= {name: cupy.asarray(array) for name, array in call.arguments.items() if name != "algorithm"}
    call.run(backend)
    return tuple(array.get() if backend == "cuda" else array for array in (call["out"], call["recurrent_state"]))


def one_hot(call: Call, element: int, value: float) -> Call:
    """Queries and keys of all tokens and heads are this element, values are of one number, no state decays."""
    heads, qkv = call.heads, call["qkv_conv_output"]
    qkv[:] = 0
    qkv[:, : 2 * heads.key_dim].reshape(len(qkv), -1, heads.key_head_dim)[..., element] = 1
    qkv[:, 2 * heads.key_dim :] = value
    call["decay_per_token"][:] = call["beta_per_token"][:] = 1
    return call


def test_a_chunk_decays_before_the_error(make: Callable[..., Call], backend: str) -> None:
    """Beside field case 50: the first tokens of chunks over a state, and one behind a delta of its own chunk.

    Half of what there was decays, and of that the first two erase all, the one in the middle, with beta 1/2, half. An
    error before the decay would erase twice as much.
    """
    call = one_hot(make(lengths=(66,)), 0, 0)
    call["recurrent_state"][0] = 1
    call["qkv_conv_output"][32, 64:] = 1  # the value of the one token that writes
    call["decay_per_token"][[0, 33, 64]] = 0.5
    call["beta_per_token"][33:64] = 0
    call["beta_per_token"][33] = 0.5
    out, pool = by_chunks(call, backend)
    expected = np.repeat([0, 1, 0.25, 0], [32, 1, 31, 2]) / np.sqrt(32)
    np.testing.assert_allclose(out, np.tile(expected[:, None], (1, 64)), rtol=1e-3, atol=1e-4)
    assert np.abs(pool[0, :, 0]).max() < 1e-3
    np.testing.assert_allclose(pool[0, :, 1:], 0.125, rtol=1e-3)


@pytest.mark.parametrize("heads", [(3, 3, 64, 32), (1, 2, 32, 32)])
def test_a_scale_on_both_ways_to_a_readout(
    make: Callable[..., Call], backend: str, heads: tuple[int, int, int, int]
) -> None:
    """Beside field case 47: a value is read in its own chunk and, out of the state, in the next one: 1/√KD of it each.

    Of keys twice as wide as values too: √VD is another number there.
    """
    call = one_hot(make(lengths=(70,), heads=heads), 3, 2)
    call["recurrent_state"][:] = 0
    call["beta_per_token"][1:] = 0  # the first token alone writes
    out, _ = by_chunks(call, backend)
    np.testing.assert_allclose(out, 2 / np.sqrt(heads[2]), rtol=1e-3)


def test_value_heads_of_chunks_read_key_heads_by_group(make: Callable[..., Call], backend: str) -> None:
    """Beside field case 54: nk=2, nv=6 in chunks, key head i = e_i: value heads [0,0,0,1,1,1] in state and readout."""
    call = make(lengths=(66,), heads=(2, 6, 32, 32))
    qkv = call["qkv_conv_output"]
    qkv[:] = 0
    for part in (0, 64):  # queries, keys
        qkv[:, part + np.array([0, 32 + 1])] = 1
    values = np.repeat(np.arange(1, 7), 32)
    qkv[:, 128:] = values
    call["recurrent_state"][:] = 0
    call["decay_per_token"][:] = call["beta_per_token"][:] = 1
    out, pool = by_chunks(call, backend)
    rows_written = [np.flatnonzero(np.abs(head).max(axis=1) > 1e-3).tolist() for head in pool[0]]
    assert rows_written == [[0], [0], [0], [1], [1], [1]]
    np.testing.assert_allclose(out, np.tile(values / np.sqrt(32), (66, 1)), rtol=1e-3)


@pytest.mark.parametrize("zeros", ["key", "query"])
def test_chunks_without_a_key_or_a_query(make: Callable[..., Call], backend: str, zeros: str) -> None:
    """Beside field cases 45, 46: of a whole chunk of zeros no power of two can be taken out, and no NaN comes of it."""
    call = make(lengths=(70,))
    first = 0 if zeros == "query" else 32
    call["qkv_conv_output"][:, first : first + 32] = 0
    call["decay_per_token"][:] = 1 - 2.0**-7
    state = call["recurrent_state"][0].astype(float)
    out, pool = by_chunks(call, backend)
    assert np.isfinite(out).all()
    if zeros == "query":
        assert not out.any()
    else:
        np.testing.assert_allclose(pool[0], (1 - 2.0**-7) ** 70 * state, rtol=2e-4)


# ---- Several launches in a call ----


def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that the backend host runs from now on."""
    names: list[str] = []
    run = host.run

    def noted(launch: Any) -> None:
        names.append(launch.variant.kernel.stem.removeprefix("gated_delta_"))
        run(launch)

    monkeypatch.setattr(host, "run", noted)
    return names


def with_pending(call: Call) -> Call:
    """The call behind pending records: some, none, too many, and one of a sequence that has no tokens."""
    random, batch_size = np.random.default_rng(1), len(call["slot_idx"])
    shape = batch_size + 1, call.heads.num_key_heads, 4, call.heads.record_elements
    call["ring"] = random.normal(0, 0.1, shape).astype(np.float32)
    call["pending_ring_slot_idx"] = np.arange(batch_size, 0, -1).astype(np.uint32)
    call["num_pending"] = np.resize(np.array([2, 0, 4, 5], np.uint32), batch_size)
    return call


SLABS = ["chunk_prepare", "chunk_walk"]


@pytest.mark.parametrize(
    ("algorithm", "lengths", "pending", "expected"),
    [
        ("recurrent", LENGTHS, False, ["recurrence_fwd"]),
        ("chunked", LENGTHS, False, ["chunk_plan", *SLABS]),
        ("chunked", LENGTHS, True, ["state_fold", "chunk_plan", *SLABS]),
        ("auto", LENGTHS, False, ["chunk_plan", *SLABS, "recurrence_fwd"]),
        ("auto", LENGTHS, True, ["state_fold", "chunk_plan", *SLABS, "recurrence_fwd"]),
        ("auto", (3, 124), True, ["recurrence_fwd"]),
        ("auto", (3, 2), False, ["recurrence_fwd"]),
        ("chunked", (0, 0), False, []),
        ("chunked", (0, 0), True, ["state_fold"]),
        ("chunked", (), True, []),
    ],
)
def test_the_launches_of_a_call(
    make: Callable[..., Call],
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    lengths: tuple[int, ...],
    pending: bool,
    expected: list[str],
) -> None:
    needs_host()
    names = ran(monkeypatch)
    call = make(algorithm, lengths)
    (with_pending(call) if pending else call).run("host")
    assert names == expected


def needs_host() -> None:
    if host.unavailable_reason() is not None:
        pytest.skip(f"host backend: {host.unavailable_reason()}")


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
def test_pending_records_are_folded_first(make: Callable[..., Call], cpu_backend: str, algorithm: str) -> None:
    call, plain = with_pending(make(algorithm)), make(algorithm)
    tables = plain["slot_idx"][None], call["ring"], call["pending_ring_slot_idx"][None], call["num_pending"]
    with on_backend(cpu_backend):
        ops.gated_delta_state_fold(plain["recurrent_state"], *tables)
    assert results(call, cpu_backend) == results(plain, cpu_backend) != results(make(algorithm), cpu_backend)


def test_auto_takes_each_row_as_one_of_the_others(make: Callable[..., Call], cpu_backend: str) -> None:
    calls = {algorithm: make(algorithm) for algorithm in chunked.ALGORITHMS}
    for call in calls.values():
        call["slot_idx"] = np.array([4, 1, 0, 5, gdn.PAD_SLOT], np.uint32)  # the last short row is padding
        call.run(cpu_backend)
    for sequence, (begin, length) in enumerate(zip(calls["auto"]["input_row_offsets"], LENGTHS, strict=False)):
        other = calls["chunked" if length >= chunked.MIN_CHUNKED_LEN else "recurrent"]
        rows, slot = slice(begin, begin + length), calls["auto"]["slot_idx"][sequence]
        np.testing.assert_array_equal(calls["auto"]["out"][rows], other["out"][rows])
        if slot != gdn.PAD_SLOT:
            np.testing.assert_array_equal(calls["auto"]["recurrent_state"][slot], other["recurrent_state"][slot])
    assert not calls["auto"]["out"][-127:].any()
    assert not np.array_equal(calls["chunked"]["out"], calls["recurrent"]["out"])


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
def test_rows_that_no_sequence_owns(make: Callable[..., Call], cpu_backend: str, algorithm: str) -> None:
    call = make(algorithm, (300,))
    call["slot_idx"] = np.array([gdn.PAD_SLOT, 2, 3, 1], np.uint32)
    call["input_row_offsets"] = np.array([5, 10, 20, 20, 170], np.uint32)
    before = call["recurrent_state"].copy()
    call.run(cpu_backend)
    owned = np.zeros(300, bool)
    owned[10:170] = True
    assert not call["out"][~owned].any()
    assert (call["out"][owned] != 7).all()
    changed = (call["recurrent_state"] != before).any(axis=(1, 2, 3))
    np.testing.assert_array_equal(changed, [False, True, True, False, False, False])


def test_no_sequences_at_all(make: Callable[..., Call], cpu_backend: str) -> None:
    call = make("chunked", (200,))
    call["slot_idx"], call["input_row_offsets"] = np.zeros(0, np.uint32), np.zeros(1, np.uint32)
    assert not call.run(cpu_backend).any()


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
def test_a_bound_call_is_the_op_each_time(make: Callable[..., Call], cpu_backend: str, algorithm: str) -> None:
    plain, bound = with_pending(make(algorithm)), with_pending(make(algorithm))
    with on_backend(cpu_backend):
        run = ops.bind(OP, *bound.six, **bound.keywords)
    assert bound["recurrent_state"].tobytes() == plain["recurrent_state"].tobytes()
    for _ in range(2):
        assert run() is bound["out"]
        plain.run(cpu_backend)
        for name in ("out", "recurrent_state"):
            assert bound[name].tobytes() == plain[name].tobytes()


def test_a_readout_is_made_where_none_is_given(make: Callable[..., Call], cpu_backend: str) -> None:
    call = make()
    expected = make().run(cpu_backend)
    call["out"] = None
    np.testing.assert_array_equal(call.run(cpu_backend), expected)


def test_warming_up_compiles_every_kernel(make: Callable[..., Call], monkeypatch: pytest.MonkeyPatch) -> None:
    needs_host()
    loaded: list[str] = []
    monkeypatch.setattr(host, "load", lambda variant: loaded.append(variant.kernel.stem))
    call = make("auto")
    with gdn.use_backend("host"):
        gdn.warmup(OP, *call.six, **call.keywords)
    assert [stem.removeprefix("gated_delta_") for stem in loaded] == ["chunk_plan", *SLABS, "recurrence_fwd"]


def test_what_does_not_compile_is_refused_before_the_fold(make: Callable[..., Call], edit: Callable[..., None]) -> None:
    edit("gated_delta_chunk_walk.cu", ('#include "chunk_pieces.cuh"', "#error no walk today"))
    call = with_pending(make())
    with pytest.raises(KernelCompileError, match="no walk today"):
        call.run("host")
    for name in ("recurrent_state", "out"):
        np.testing.assert_array_equal(call[name], make()[name])


# ---- On a GPU ----


@pytest.mark.gpu
@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
@pytest.mark.parametrize("is_bound", [True, False])
def test_a_call_in_a_graph(make: Callable[..., Call], algorithm: str, is_bound: bool) -> None:
    """Beside field cases 11, 84: several launches and a workspace; a replay reads what the arrays hold then.

    A call that is not bound needs its workspace, its readout, a warmup.
    """
    import cupy

    captured, plain = with_pending(make(algorithm)), with_pending(make(algorithm))
    for call in (captured, plain):
        arrays = {name: cupy.asarray(array) for name, array in call.arguments.items() if name != "algorithm"}
        call.arguments |= arrays
    captured["workspace"] = cupy.empty(workspace_bytes(captured), cupy.uint8)
    if is_bound:
        run = ops.bind(OP, *captured.six, **captured.keywords)
    else:
        gdn.warmup(OP, *captured.six, **captured.keywords)
        run = captured.run
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        run()
        graph = stream.end_capture()
    for replay in range(3):
        for call in (captured, plain):
            if replay == 2:
                call["slot_idx"][0] = gdn.PAD_SLOT
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        plain.run("cuda")
        for name in ("out", "recurrent_state"):
            assert captured[name].tobytes() == plain[name].tobytes()


# ---- The recurrent kernel that clears nothing ----


@pytest.mark.parametrize("tile", [row_tiles(32, 32, 4)[0], streamed_tiles(32, 32, 4)[0]], ids=["block", "stream"])
def test_rows_are_left_alone_where_another_kernel_clears_them(make: Callable[..., Call], tile: RowTile) -> None:
    needs_host()
    left, cleared = make("recurrent"), make("recurrent")
    for call, clears_rows in ((left, False), (cleared, True)):
        call["slot_idx"][[0, 4]] = gdn.PAD_SLOT
        inputs = recurrence_inputs(take, *call.six)
        host.run(fwd_kernel.launch(inputs, take("out", call["out"]), tile, clears_rows=clears_rows))
    owned = slice(LENGTHS[0], sum(LENGTHS[:4]))
    np.testing.assert_array_equal(left["out"][owned], cleared["out"][owned])
    assert left["recurrent_state"].tobytes() == cleared["recurrent_state"].tobytes()
    for call, value in ((left, 7), (cleared, 0)):
        assert (call["out"][: owned.start] == value).all()
        assert (call["out"][owned.stop :] == value).all()
