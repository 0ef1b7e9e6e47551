"""The README's Python runs as it stands, and does what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import gdn.layer
import gdn.ops
from gdn.geometry import HeadGeometry

if TYPE_CHECKING:
    from tests.conftest import Call

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
LAYER, GRAPH, _ = re.findall(r"```py\n(.*?)```", README, re.DOTALL)  # the third is held to that of frameworks.md


def test_the_example_runs_and_equals_the_numpy_of_the_readme() -> None:
    call, definition, bound = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(call, "README.md", "exec"), names)
    exec(compile(definition, "README.md", "exec"), names)
    heads, dim = names["num_value_heads"], names["value_head_dim"]
    qkv, out = names["qkv"].astype(np.float64), names["out"].reshape(5, heads, dim)
    query, key, value = np.split(qkv, [2 * 64, 4 * 64], axis=1)
    for head in range(heads):
        key_head = slice(64 * (head // 2), 64 * (head // 2) + 64)
        for slot, rows in ((6, range(4)), (2, range(4, 5))):
            state = np.zeros((64, 64))
            for row in rows:
                inputs = query[row, key_head], key[row, key_head], value[row, 64 * head : 64 * head + 64]
                gates = names["decay"][row, head], names["beta"][row, head]
                state, readout = names["token"](state, *inputs, *gates)
                np.testing.assert_allclose(out[row, head], readout, atol=1e-6)
            np.testing.assert_allclose(names["pool"][slot, head], state, atol=1e-6)
    arrays = [names[name].copy() for name in ("qkv", "decay", "beta", "pool", "slot_idx", "input_row_offsets")]
    exec(compile(bound, "README.md", "exec"), names)
    np.testing.assert_array_equal(names["out"], gdn.ops.gated_delta_recurrence_fwd(*arrays))


def test_the_layer_prefills_and_speculates() -> None:
    """The block on a CPU: a prefill, then windows of which some tokens are accepted, as if only these had been run."""
    heads, rng = HeadGeometry(1, 2, 16, 16), np.random.default_rng(0)
    names: dict[str, Any] = {
        "heads": heads,
        "conv_weight": rng.standard_normal((heads.conv_dim, 4), dtype=np.float32),
        **{name: rng.standard_normal(2, dtype=np.float32) for name in ("A_log", "dt_bias")},
        "qkv": rng.standard_normal((7, heads.conv_dim), dtype=np.float32),
        **{name: rng.standard_normal((7, 2), dtype=np.float32) for name in ("a", "b")},
        "slot_idx": np.array([60, 2], np.uint32),
        "input_row_offsets": np.array([0, 4, 7], np.uint32),
        "ring_slot_idx": np.array([0, 63], np.uint32),
        "num_accepted": np.array([2, 3], np.uint32),
    }
    assert 'place="cuda:0"' in LAYER
    exec(compile(LAYER.replace("cuda:0", "cpu"), "README.md", "exec"), names)
    pools = gdn.layer.new_pools(heads, max_slots=64)
    plain = gdn.layer.GatedDeltaLayer(names["conv_weight"], names["A_log"], names["dt_bias"], **pools)
    tokens, tables = (names["qkv"], names["a"], names["b"]), (names["slot_idx"], names["input_row_offsets"])
    gdn.layer.prefill(plain, *tokens, *tables)
    accepted = [0, 1, 4, 5, 6]
    readout = gdn.layer.prefill(
        plain, *(array[accepted] for array in tokens), names["slot_idx"], np.array([0, 2, 5], np.uint32)
    )
    np.testing.assert_array_equal(names["readout"][accepted], readout)
    for pool in ("conv_state", "recurrent_state"):
        assert getattr(names["layer"], pool).tobytes() == getattr(plain, pool).tobytes()


@pytest.mark.gpu
def test_the_graph_decodes(new_call: type[Call]) -> None:
    """One graph of bound calls leaves what the calls leave one by one."""
    import cupy

    captured, plain = ([new_call() for _ in range(3)] for _ in range(2))
    for call in (*captured, *plain):
        call.arguments = {name: cupy.asarray(array) for name, array in call.arguments.items()}
    names = {"cupy": cupy, "layers": [gdn.ops.bind(call.op, *call.six, **call.keywords) for call in captured]}
    cupy.cuda.Device().synchronize()
    exec(compile(GRAPH, "README.md", "exec"), names)
    names["stream"].synchronize()
    for call, same in zip(captured, plain, strict=True):
        same.run("cuda")
        for name in ("recurrent_state", "out"):
            assert call[name].get().tobytes() == same[name].get().tobytes()
