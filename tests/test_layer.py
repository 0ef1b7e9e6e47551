"""`gdn.layer`: against the published layer, rendered on its own in float64, and its promises to the bit."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

import gdn
from gdn import layer as layers
from gdn.arrays import DTYPES
from gdn.backends import host
from gdn.geometry import HeadGeometry
from gdn.layer import GatedDeltaLayer
from gdn.models import MODELS
from gdn.speculative import PendingWindows
from gdn.testing import assert_passed, bitwise, close, storage_tolerance
from gdn.testing.buffers import Array
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device

SMALL = HeadGeometry(2, 4, 16, 32)
PAD = gdn.PAD_SLOT


class Tokens(NamedTuple):
    """What the projections of a model give for some tokens."""

    qkv: Array
    a: Array
    b: Array

    def __getitem__(self, rows: Any) -> Tokens:  # type: ignore[override]
        return Tokens(*(array[rows] for array in (self.qkv, self.a, self.b)))


class Model:
    """Random weights of a layer as models have them, and tokens for it."""

    def __init__(self, heads: HeadGeometry = SMALL, dtype: str = "bfloat16", has_bias: bool = False) -> None:
        self.heads, self.dtype, self.random = heads, DTYPES[dtype], np.random.default_rng(0)
        self.weights: dict[str, Array] = {
            "conv_weight": self._normal(0.5, heads.conv_dim, 4).astype(self.dtype),
            "A_log": np.log(self.random.uniform(1, 16, heads.num_value_heads)).astype(np.float32),
            "dt_bias": self._normal(1, heads.num_value_heads).astype(np.float32),
        }
        if has_bias:
            self.weights["conv_bias"] = self._normal(0.5, heads.conv_dim).astype(np.float32)

    def _normal(self, scale: float, *shape: int) -> Array:
        return self.random.normal(0, scale, shape)

    def tokens(self, count: int) -> Tokens:
        heads = self.heads
        qkv = self._normal(1, count, heads.conv_dim)
        gates = self._normal(1, 2, count, heads.num_value_heads)
        return Tokens(qkv.astype(self.dtype), *gates.astype(self.dtype))

    def on(self, device: Device, max_slots: int = 4, **keywords: Any) -> GatedDeltaLayer:
        """The layer with empty pools on a backend."""
        place = "cuda:0" if device.backend == "cuda" else "cpu"
        pools = layers.new_pools(self.heads, max_slots, conv_dtype=self.dtype.name, place=place, **keywords)
        return GatedDeltaLayer(**{name: device.put(weight) for name, weight in self.weights.items()}, **pools)


def published_layer(weights: dict[str, Array], heads: HeadGeometry, tokens: Tokens) -> Array:
    """The readout of one sequence from its beginning, as the Qwen3-Next model describes it, all in float64."""
    conv_weight, A_log, dt_bias = (weights[name].astype(float) for name in ("conv_weight", "A_log", "dt_bias"))
    qkv, a, b = (array.astype(float) for array in (tokens.qkv, tokens.a, tokens.b))
    padded = np.vstack([np.zeros((3, heads.conv_dim)), qkv])
    mixed = np.stack([np.einsum("tc,ct->c", padded[t : t + 4], conv_weight) for t in range(len(qkv))])
    mixed += weights.get("conv_bias", np.zeros(1)).astype(float)  # Qwen3-Next has none
    mixed = mixed / (1 + np.exp(-mixed))

    queries, keys, values = np.split(mixed, [heads.key_dim, 2 * heads.key_dim], axis=1)
    by_head = len(qkv), heads.num_key_heads, heads.key_head_dim
    queries, keys = (x.reshape(by_head) for x in (queries, keys))
    queries, keys = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (queries, keys))
    queries, keys = (np.repeat(x, heads.group_size, axis=1) for x in (queries, keys))
    values = values.reshape(len(qkv), heads.num_value_heads, heads.value_head_dim)
    log_decay = -np.exp(A_log) * np.logaddexp(0, a + dt_bias)
    beta = 1 / (1 + np.exp(-b))

    state = np.zeros((heads.num_value_heads, heads.key_head_dim, heads.value_head_dim))
    readout = np.empty_like(values)
    for t in range(len(qkv)):
        state *= np.exp(log_decay[t])[:, None, None]
        error = values[t] - np.einsum("hkv,hk->hv", state, keys[t])
        state += np.einsum("hk,hv->hkv", keys[t], beta[t][:, None] * error)
        readout[t] = np.einsum("hkv,hk->hv", state, queries[t]) / np.sqrt(heads.key_head_dim)
    return readout.reshape(len(qkv), heads.value_dim)


def put(device: Device, tokens: Tokens, *tables: Any) -> list[Any]:
    """Tokens and tables on a backend."""
    return [*(device.put(array) for array in tokens), *(device.put(np.asarray(table, np.uint32)) for table in tables)]


@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "olmo-hybrid-7b"])
def test_prefill_and_decode_are_the_published_layer(backend: str, model: str) -> None:
    """Real shapes: two prompts, then tokens one at a time."""
    made, device = Model(MODELS[model], "float32"), Device(backend)
    layer, lengths = made.on(device), (7, 5)
    prompts = [made.tokens(length + 3) for length in lengths]
    with on_backend(backend):
        joined = Tokens(*(np.concatenate([a[:n], b[:m]]) for a, b in zip(*prompts, strict=True) for n, m in [lengths]))
        found = [device.get(layers.prefill(layer, *put(device, joined, [2, 0], [0, 7, 12])))]
        for step in range(3):
            at = [length + step for length in lengths]
            pair = Tokens(*(np.stack([a[at[0]], b[at[1]]]) for a, b in zip(*prompts, strict=True)))
            found.append(device.get(layers.decode(layer, *put(device, pair, [2, 0]))))
    for place, (prompt, rows) in enumerate(zip(prompts, (slice(0, 7), slice(7, 12)), strict=True)):
        readout = np.concatenate([found[0][rows], *(step[place : place + 1] for step in found[1:])])
        expected = published_layer(made.weights, made.heads, prompt)
        assert_passed(close(readout, expected, storage_tolerance("float32"), f"sequence {place}"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_the_published_layer(backend: str, dtype: str) -> None:
    """What the layer rounds is the convolution's output and the readout."""
    made, device = Model(SMALL, dtype), Device(backend)
    tokens = made.tokens(20)
    with on_backend(backend):
        readout = device.get(layers.prefill(made.on(device), *put(device, tokens, [1], [0, 20])))
    expected = published_layer(made.weights, SMALL, tokens)
    error = np.abs(readout.astype(float) - expected).max() / np.abs(expected).max()
    assert error < {"bfloat16": 2e-2, "float16": 2e-3}[dtype]


def test_the_convolution_s_bias(backend: str) -> None:
    made, device = Model(SMALL, "float32", has_bias=True), Device(backend)
    tokens = made.tokens(6)
    with on_backend(backend):
        readout = device.get(layers.prefill(made.on(device), *put(device, tokens, [1], [0, 6])))
    assert_passed(close(readout, published_layer(made.weights, SMALL, tokens), storage_tolerance("float32"), "readout"))


WINDOWS = [[4, 3, 1, 4], [2, 4, 4, 0], [4, 4, 4, 4], [1, 2, 3, 4], [4, 0, 4, 1]]
ACCEPTED = [[2, 3, 0, 4], [1, 4, 2, 0], [0, 1, 4, 3], [1, 0, 3, 2], [4, 0, 1, 1]]


@pytest.mark.parametrize("form", ["separate", "fused", "lazy"])
@pytest.mark.parametrize(
    ("dtype", "state_dtype"), [("bfloat16", "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")]
)
def test_speculative_steps_are_the_accepted_tokens_alone(backend: str, form: str, dtype: str, state_dtype: str) -> None:
    """verify, acceptance, commit: readouts of accepted tokens, windows and states as of plain steps, to the bit."""
    if form == "lazy" and state_dtype != "float32":
        pytest.skip("lazy states are rounded when records are folded, plain ones at each step")
    made, device = Model(SMALL, dtype), Device(backend)
    keywords = {"state_dtype": state_dtype, "ring_rows": 8, "ring_len": 12 if form == "lazy" else 4}
    speculative, plain = (made.on(device, max_slots=6, **keywords) for _ in range(2))
    slots = np.uint32([5, 0, 3, 2])
    rows = device.put(np.arange(8, dtype=np.uint32).reshape(2, 1, 4))
    windows = None if form == "separate" else PendingWindows(rows, keywords["ring_len"], lazy=form == "lazy")
    on_device = device.put(slots)
    for lengths, accepted in zip(WINDOWS, ACCEPTED, strict=True):
        tokens, offsets = made.tokens(sum(lengths)), np.cumsum([0, *lengths])
        arrays = put(device, tokens, slots, offsets)
        counts = device.put(np.uint32(accepted))
        with on_backend(backend):
            ring_rows, pending = rows[0, 0], {}
            if windows is not None:
                windows.begin(arrays[4])
                ring_rows = windows.ring_slot_idx[0]
                tables = windows.pending_ring_slot_idx[0], windows.num_pending
                pending = dict(zip(("pending_ring_slot_idx", "num_pending"), tables, strict=True))
            readout = device.get(layers.verify(speculative, *arrays, ring_rows, **pending))
            layers.commit(speculative, arrays[0], on_device, arrays[4], counts, None if windows else ring_rows)
            if windows is not None:
                windows.accept(counts)
            kept = [slice(begin, begin + n) for begin, n in zip(offsets, accepted, strict=False)]
            alone = Tokens(*(np.concatenate([array[part] for part in kept]) for array in tokens))
            expected = device.get(layers.prefill(plain, *put(device, alone, slots, np.cumsum([0, *accepted]))))
        assert_passed(bitwise(np.concatenate([readout[part] for part in kept]), expected, "readout"))
        assert_passed(bitwise(device.get(speculative.conv_state), device.get(plain.conv_state), "windows"))
        if windows is None:
            assert_passed(bitwise(device.get(speculative.recurrent_state), device.get(plain.recurrent_state), "states"))
    if windows is not None:
        with on_backend(backend):
            windows.fold(speculative.recurrent_state, on_device[None], speculative.ring)
        assert_passed(bitwise(device.get(speculative.recurrent_state), device.get(plain.recurrent_state), "folded"))


def state_of(layer: GatedDeltaLayer) -> list[bytes]:
    return [pool.tobytes() for pool in (layer.conv_state, layer.recurrent_state, layer.ring)]


def test_a_verify_leaves_windows_and_states_alone(cpu_backend: str) -> None:
    made, device = Model(), Device(cpu_backend)
    layer = made.on(device, ring_rows=2, ring_len=4)
    with on_backend(cpu_backend):
        layers.prefill(layer, *put(device, made.tokens(5), [1], [0, 5]))
        before = state_of(layer)
        layers.verify(layer, *put(device, made.tokens(3), [1], [0, 3], [0]))
    assert state_of(layer)[:2] == before[:2]
    assert state_of(layer)[2] != before[2]


def test_a_window_longer_than_the_ring_is_committed_whole(backend: str) -> None:
    made, device = Model(), Device(backend)
    speculative, plain = (made.on(device, ring_rows=2, ring_len=4) for _ in range(2))
    arrays = put(device, made.tokens(6), [1], [0, 6])
    row = device.put(np.uint32([1]))
    with on_backend(backend):
        readout = layers.verify(speculative, *arrays, row)
        layers.commit(speculative, arrays[0], arrays[3], arrays[4], device.put(np.uint32([6])), row)
        expected = layers.prefill(plain, *arrays)
    pairs = ((readout, expected), (speculative.conv_state, plain.conv_state))
    for left, right in (*pairs, (speculative.recurrent_state, plain.recurrent_state)):
        assert_passed(bitwise(device.get(left), device.get(right), "result"))


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_a_layer_with_nothing_to_do(backend: str, lengths: tuple[int, ...]) -> None:
    """Beside field cases 66, 67: every function of a layer on no sequences, and on none that has a token."""
    made, device = Model(), Device(backend)
    layer = made.on(device, ring_rows=2, ring_len=4)
    slots = [1, 3][: len(lengths)]
    *inputs, rows, counts = put(device, made.tokens(0), slots, np.cumsum([0, *lengths]), range(len(lengths)), lengths)
    with on_backend(backend):
        layers.prefill(layer, *put(device, made.tokens(3), [1, 3], [0, 1, 3]))  # so that there is something to lose
        before = state_of(layer)
        outs = [layers.prefill(layer, *inputs), layers.verify(layer, *inputs, rows)]
        outs += [] if lengths else [layers.decode(layer, *inputs)]
        layers.commit(layer, inputs[0], *inputs[3:], counts, rows)
        windows = PendingWindows(device.put(np.arange(2 * len(lengths), dtype=np.uint32).reshape(2, 1, -1)), 4)
        windows.begin(inputs[4])
        windows.accept(counts)
        windows.fold(layer.recurrent_state, inputs[3][None], layer.ring)
    assert {out.shape for out in outs} == {(0, SMALL.value_dim)}
    assert state_of(layer) == before


def test_scratch_changes_nothing(backend: str) -> None:
    made, device = Model(), Device(backend)
    first, second = made.on(device), made.on(device)
    arrays = put(device, made.tokens(9), [3, 1], [0, 5, 9])
    with on_backend(backend):
        scratch = layers.new_scratch(first, arrays[0])
        out = device.put(np.zeros((9, SMALL.value_dim), made.dtype))
        given = layers.prefill(first, *arrays, scratch=scratch, out=out)
        plain = layers.prefill(second, *arrays)
    assert_passed(bitwise(device.get(given), device.get(plain), "readout"))
    assert_passed(bitwise(device.get(out), device.get(plain), "out"))


@pytest.mark.parametrize("algorithm", ["chunked", "auto"])
def test_a_prefill_by_chunks(backend: str, algorithm: str) -> None:
    """The recurrence alone is another one; a workspace of the scratch is used, and big enough."""
    made, device = Model(HeadGeometry(1, 2, 32, 32)), Device(backend)
    exact, chunked, given = (made.on(device) for _ in range(3))
    arrays = put(device, made.tokens(140), [3, 1], [0, 131, 140])
    scratch = layers.new_scratch(given, arrays[0], algorithm=algorithm, batch_size=2)
    with on_backend(backend):
        expected = device.get(layers.prefill(exact, *arrays)).astype(float)
        plain = device.get(layers.prefill(chunked, *arrays, algorithm=algorithm))
        readout = device.get(layers.prefill(given, *arrays, algorithm=algorithm, scratch=scratch))
        with pytest.raises(gdn.GdnError, match=r"^workspace: expected at least \d+ bytes"):
            layers.prefill(
                given, *arrays, algorithm=algorithm, scratch=scratch._replace(workspace=scratch.workspace[1:])
            )
    assert_passed(bitwise(readout, plain, "readout"))
    for name in ("conv_state", "recurrent_state"):
        assert_passed(bitwise(device.get(getattr(given, name)), device.get(getattr(chunked, name)), name))
    assert np.linalg.norm(plain.astype(float) - expected) < 4e-3 * np.linalg.norm(expected)
    assert (device.get(given.recurrent_state) != device.get(exact.recurrent_state)).any()


def test_scratch_of_another_algorithm() -> None:
    made, device = Model(HeadGeometry(1, 2, 32, 32)), Device("numpy")
    layer, qkv = made.on(device), made.tokens(140).qkv
    assert layers.new_scratch(layer, qkv).workspace is None
    assert layers.new_scratch(layer, qkv[:100], algorithm="auto", batch_size=1).workspace is None
    with pytest.raises(gdn.GdnError, match=r"^algorithm: expected 'recurrent', 'chunked' or 'auto', got 'fast'"):
        layers.new_scratch(layer, qkv, algorithm="fast")
    for wrong in (None, -1, 1.5):
        with pytest.raises(gdn.GdnError, match=r"^batch_size: expected a whole number of at least 0, got"):
            layers.new_scratch(layer, qkv, algorithm="chunked", batch_size=wrong)  # type: ignore[arg-type]  # on purpose


def aliased_scratch() -> layers.Scratch:
    base = np.zeros((5, 256), np.float32)
    return layers.Scratch(base, base[:, :4], np.zeros((5, 4), np.float32))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"qkv": np.zeros((5, 129), np.float32)}, "conv_state: expected conv_dim = 129"),
    ({"qkv": np.zeros((5, 256), np.float64)}, "qkv: expected float32, float16 or bfloat16"),
    ({"qkv": np.zeros(5, np.float32)}, "qkv: expected shape"),
    ({"a": np.zeros((4, 4), np.float32)}, "b: expected shape"),
    ({"b": np.zeros((5, 4), np.float16)}, "b: expected float32"),
    ({"scratch": np.zeros(3)}, "scratch: expected a Scratch, got ndarray"),
    ({"scratch": (np.zeros((5, 256), np.float32),)}, "scratch: expected a Scratch, got tuple"),
    ({"scratch": aliased_scratch()}, "conv_output: expected memory of its own, apart from decay"),
    ({"slot_idx": np.uint32([1, 4])}, "slot_idx[1]: expected a slot below max_slots = 4"),
    ({"input_row_offsets": np.uint32([0, 2, 6])}, "input_row_offsets[2]: expected at most total_seq_len = 5"),
    ({"out": np.zeros((5, 127), np.float32)}, "out: expected shape [total_seq_len, value_dim] = (5, 128)"),
    ({"num_pending": np.uint32([0, 0])}, "pending_ring_slot_idx: expected an array"),
    (
        {"num_pending": np.uint32([0, 3]), "pending_ring_slot_idx": np.uint32([0, 9])},
        "pending_ring_slot_idx[1]: expected a ring row below ring_rows = 2",
    ),
    ({"scratch": layers.Scratch(*(np.zeros((5, n), np.float32) for n in (256, 4, 5)))}, "beta: expected shape"),
]


@pytest.mark.parametrize(("wrong", "words"), REFUSED)
def test_a_call_is_refused_before_any_op_runs(cpu_backend: str, wrong: dict[str, Any], words: str) -> None:
    made, device = Model(SMALL, "float32"), Device(cpu_backend)
    layer = made.on(device, ring_rows=2, ring_len=4)
    tokens = made.tokens(5)
    good = {**tokens._asdict(), "slot_idx": np.uint32([1, 2]), "input_row_offsets": np.uint32([0, 2, 5])}
    layer.conv_state[...] = layer.recurrent_state[...] = 0.5
    before = state_of(layer)
    with on_backend(cpu_backend), pytest.raises(gdn.GdnError) as caught:
        layers.prefill(layer, **{**good, **wrong})
    assert str(caught.value).startswith(words)
    assert state_of(layer) == before


def test_a_commit_is_refused_before_any_op_runs(cpu_backend: str) -> None:
    made, device = Model(SMALL, "float32"), Device(cpu_backend)
    layer = made.on(device, ring_rows=2, ring_len=4)
    layer.ring[...] = 0.5
    before, (tables, counts) = state_of(layer), (np.uint32([0, 1, 2]), np.uint32([1, 1]))
    for ring_rows, words in (
        (np.uint32([0, 5]), r"ring_row_ids\[0, 1\]: expected a ring row below"),
        (np.uint32([0]), "ring_row_ids: expected shape"),
        (np.uint32([[0, 1]]), "ring_slot_idx: expected shape"),
        (np.uint32([0, PAD]), r"num_accepted\[1\]: expected at most the 0 tokens recorded, got 1"),
    ):
        with on_backend(cpu_backend), pytest.raises(gdn.GdnError, match=f"^{words}"):
            layers.commit(layer, made.tokens(2).qkv, np.uint32([1, 2]), tables, counts, ring_rows)
        assert state_of(layer) == before


def test_counts_that_the_two_ops_of_a_commit_read_differently() -> None:
    """Above its window the convolution takes all tokens; the fold takes none, or records of another window."""
    made = Model(SMALL, "float32")
    layer = made.on(Device("numpy"), ring_rows=2, ring_len=4)
    layer.ring[...] = 0.5
    before, qkv = state_of(layer), made.tokens(5).qkv
    given = layer, qkv, np.uint32([1, 2]), np.uint32([0, 3, 5])
    for counts in ([4, 0], [7, 2], [3, 3]):
        with pytest.raises(gdn.IndexValueError, match=r"^num_accepted\[\d\]: expected at most the . tokens recorded"):
            layers.commit(*given, np.uint32(counts), np.uint32([0, 1]))
        assert state_of(layer) == before
    layers.commit(*given, np.uint32([3, 2]), np.uint32([0, 1]))
    assert state_of(layer) != before


def test_a_kernel_that_does_not_compile_stops_a_call_before_its_first_op(monkeypatch: pytest.MonkeyPatch) -> None:
    if host.unavailable_reason() is not None:
        pytest.skip("no host backend")
    made, device = Model(SMALL, "float32"), Device("host")
    layer, load = made.on(device), host.load

    def without_recurrence(variant: Any) -> Any:
        if "recurrence" in variant.kernel.stem:
            raise gdn.KernelCompileError("as on a machine without a compiler")
        return load(variant)

    monkeypatch.setattr(host, "load", without_recurrence)
    before = [layer.conv_state.tobytes(), layer.recurrent_state.tobytes()]
    layer.conv_state[...] = 0
    with gdn.use_backend("host"), pytest.raises(gdn.KernelCompileError):
        layers.prefill(layer, *put(device, made.tokens(5), [1], [0, 5]))
    assert [layer.conv_state.tobytes(), layer.recurrent_state.tobytes()] == before


def test_decode_takes_a_token_of_each_sequence() -> None:
    made, device = Model(SMALL, "float32"), Device("numpy")
    layer = made.on(device)
    for count in (1, 3):
        with pytest.raises(gdn.ShapeError, match=r"^qkv: expected shape \[batch_size, conv_dim\] = \(2, 192\)"):
            layers.decode(layer, *put(device, made.tokens(count), [0, 1]))
    with pytest.raises(gdn.ShapeError, match=r"^slot_idx: expected shape"):
        layers.decode(layer, *put(device, made.tokens(2), 1))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"max_slots": -1}, "max_slots: expected a whole number of at least 0, got -1"),
        ({"max_slots": 1.5}, "max_slots: expected a whole number of at least 0, got 1.5"),
        ({"conv_width": 1}, "conv_width: expected a whole number from 2 to 8, got 1"),
        ({"ring_rows": 3}, "ring_len: expected a whole number from 1 to 64, got 0"),
        ({"ring_rows": 3, "ring_len": 65}, "ring_len: expected a whole number from 1 to 64, got 65"),
        ({"conv_dtype": "float64"}, "conv_dtype: expected one of float32, float16, bfloat16, got 'float64'"),
        ({"state_dtype": "uint32"}, "state_dtype: expected one of float32, float16, bfloat16, got 'uint32'"),
        ({"place": "gpu"}, "place: expected"),
        ({"place": "cuda"}, "place: expected"),
    ],
)
def test_pools_that_no_op_takes(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(gdn.GdnError) as caught:
        layers.new_pools(**{"heads": SMALL, "max_slots": 2, **wrong})
    assert str(caught.value).startswith(words)


def test_pools_that_share_memory_are_refused() -> None:
    made, memory = Model(SMALL, "float32"), np.zeros((3, 4, 16, 32), np.float32)
    shared = memory.reshape(3, -1)[:, : 3 * SMALL.conv_dim].reshape(3, SMALL.conv_dim, 3)
    assert np.shares_memory(shared, memory)
    with pytest.raises(gdn.LayoutError, match=r"^recurrent_state: expected memory of its own, apart from conv_state"):
        GatedDeltaLayer(**made.weights, conv_state=shared, recurrent_state=memory)


def test_warming_up_runs_nothing(cpu_backend: str) -> None:
    made, device = Model(), Device(cpu_backend)
    layer = made.on(device, ring_rows=2, ring_len=4)
    before = state_of(layer)
    arrays = put(device, made.tokens(4), [1, 2], [0, 2, 4])
    with on_backend(cpu_backend):
        layers.warmup(layers.prefill, layer, *arrays)
        layers.warmup(layers.verify, layer, *arrays, np.uint32([0, 1]))
        layers.warmup(layers.commit, layer, arrays[0], *arrays[3:], np.uint32([1, 2]), np.uint32([0, 1]))
        layers.warmup(layers.decode, layer, *put(device, made.tokens(2), [1, 2]))
        with pytest.raises(gdn.ShapeError, match=r"^conv_state"):
            layers.warmup(layers.prefill, layer, arrays[0][:, 1:], *arrays[1:])
    assert state_of(layer) == before
    known = ", ".join(("prefill", "decode", "verify", "commit"))
    with pytest.raises(gdn.GdnError, match=rf"^function: expected one of {known}, got new_pools$"):
        layers.warmup(layers.new_pools, SMALL, 1)


def test_pools_of_other_slots_are_refused() -> None:
    pools = layers.new_pools(SMALL, 3) | {"recurrent_state": layers.new_pools(SMALL, 2)["recurrent_state"]}
    with pytest.raises(gdn.ShapeError, match=r"^recurrent_state: expected max_slots = 3, as conv_state has, got 2$"):
        GatedDeltaLayer(**Model().weights, **pools)


@pytest.mark.gpu
def test_a_step_in_a_graph() -> None:
    """Beside field cases 11, 84: a warm step of a whole layer with its memory given; replays follow the tables."""
    import cupy

    made, device = Model(), Device("cuda")
    graphed, plain = (made.on(device, ring_rows=4, ring_len=4) for _ in range(2))
    tokens = [made.tokens(6) for _ in range(4)]
    arrays = put(device, tokens[0], [1, 2], [0, 2, 6], [0, 1], [1, 3])
    *inputs, slots, offsets, rows, counts = arrays
    scratch = layers.new_scratch(graphed, inputs[0])
    out = cupy.empty((6, SMALL.value_dim), made.dtype)

    def step(layer: GatedDeltaLayer) -> None:
        layers.verify(layer, *inputs, slots, offsets, rows, scratch=scratch, out=out)
        layers.commit(layer, inputs[0], slots, offsets, counts, rows)

    layers.warmup(layers.verify, graphed, *inputs, slots, offsets, rows, scratch=scratch, out=out)
    layers.warmup(layers.commit, graphed, inputs[0], slots, offsets, counts, rows)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        step(graphed)
        graph = stream.end_capture()
    for number, values in enumerate(tokens):
        for array, value in zip(inputs, values, strict=True):
            array.set(value)
        slots.set(np.roll(np.uint32([1, 2, PAD, 0]), number)[:2])
        counts.set(np.uint32([number % 3, (number + 2) % 5]))
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        readout = out.get()
        step(plain)
        assert_passed(bitwise(readout, out.get(), f"readout {number}"))
        for name in ("conv_state", "recurrent_state"):
            assert_passed(bitwise(getattr(graphed, name).get(), getattr(plain, name).get(), name))
