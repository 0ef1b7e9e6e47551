"""The README's Python runs as it stands, and does what the text says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import gdn.ops

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


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
