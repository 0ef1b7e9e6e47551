"""Building the arrays of a timed case of the ops around the recurrence; every set is a layer of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gdn import ops
from gdn.arrays import DTYPES
from gdn.bench.build import filled, plan_sets, rows_of_window
from gdn.bench.cases import CONV_WIDTH, BenchCase
from gdn.bench.layer_workload import LayerWorkload, OpCall
from gdn.bench.machine import Machine
from gdn.bench.tables import Tables
from gdn.bench.values import bits
from gdn.testing.buffers import Array

_VALUE_ROWS, _VALUE_SLOTS = 256, 64  # distinct values that large arrays repeat


def build_layer_workload(case: BenchCase, machine: Machine) -> LayerWorkload:
    """Arrays for as many sets as the rotation needs and memory allows. Raises DoesNotFit where not one fits."""
    num_sets, is_cold = plan_sets(case, machine)
    if case.regime == "gates":
        return LayerWorkload(case, machine, None, tuple(_gates(case, machine, num_sets)), is_cold)
    batch = _ConvBatch(case, machine, num_sets)
    calls = (_convolutions if case.regime == "conv" else _commits)(batch, num_sets)
    return LayerWorkload(case, machine, batch.conv_state, tuple(calls), is_cold)


class _ConvBatch:
    """Tokens and windows of all sets: inputs before the convolution, in the work type, in one array and one pool."""

    def __init__(self, case: BenchCase, machine: Machine, num_sets: int) -> None:
        self.case, self.machine = case, machine
        self.random = np.random.default_rng(case.call.seed)
        self.tables = Tables(case, machine, num_sets)
        self._length, channels = rows_of_window(case.call), case.heads.conv_dim
        self.qkv = self.filled((num_sets * self._length,), (_VALUE_ROWS, channels))
        self.conv_state = self.filled((num_sets * case.slots_in_use,), (_VALUE_SLOTS, channels, CONV_WIDTH - 1))

    def filled(self, count: tuple[int], shape: tuple[int, ...], scale: float = 1) -> Any:
        """So many of what is drawn in the given shape, in the work type."""
        drawn = _normal(self.random, shape, self.case.call.work_dtype, scale)
        return filled(self.machine, (*count, *shape[1:]), drawn)

    def rows(self, array: Any, idx: int) -> Any:
        """A set's rows of an array of all tokens."""
        return array[idx * self._length : (idx + 1) * self._length]

    def arguments(self, idx: int) -> tuple[Any, Any, Any, Any]:
        """What convolution and commit of a set share, in the order of their arguments: the tokens first."""
        return self.rows(self.qkv, idx), self.conv_state, self.tables.slots[idx, 0], self.tables.offsets[idx]


def _convolutions(batch: _ConvBatch, num_sets: int) -> Iterator[OpCall]:
    """Convolutions with SiLU and without a bias; ahead of a verify they leave the windows alone."""
    weights = batch.filled((num_sets,), (1, batch.case.heads.conv_dim, CONV_WIDTH), CONV_WIDTH**-0.5)
    out = _zeros(batch.machine, batch.qkv.shape, batch.case.call.work_dtype)
    for idx in range(num_sets):
        qkv, *others = batch.arguments(idx)
        own_out = batch.rows(out, idx)
        keywords = {"activation": "silu", "write_state": batch.case.moves_windows, "out": own_out}
        yield OpCall(ops.gated_delta_conv1d_fwd, (qkv, weights[idx], *others), keywords, (own_out,))


def _commits(batch: _ConvBatch, num_sets: int) -> Iterator[OpCall]:
    for idx in range(num_sets):
        arguments = (*batch.arguments(idx), batch.tables.num_accepted[idx])
        yield OpCall(ops.gated_delta_conv1d_commit, arguments, {}, ())


def _gates(case: BenchCase, machine: Machine, num_sets: int) -> Iterator[OpCall]:
    """Gates of a layer whose rates and biases are those of a new one, in float32."""
    call, length, heads = case.call, rows_of_window(case.call), case.heads.num_value_heads
    random = np.random.default_rng(call.seed)
    projection = _normal(random, (_VALUE_ROWS, heads), call.work_dtype)
    shape = (num_sets * length, heads)
    a, b = filled(machine, shape, projection), filled(machine, shape, projection[::-1].copy())
    step = np.exp(random.uniform(np.log(1e-3), np.log(1e-1), (1, heads)))
    per_head = np.log(random.uniform(1, 16, (1, heads))), np.log(np.expm1(step))
    A_log, dt_bias = (filled(machine, (num_sets, heads), values.astype(np.float32)) for values in per_head)
    decay, beta = (_zeros(machine, shape, "float32") for _ in range(2))
    for idx in range(num_sets):
        rows = slice(idx * length, (idx + 1) * length)
        out = decay[rows], beta[rows]
        yield OpCall(ops.gated_delta_gates, (a[rows], b[rows], A_log[idx], dt_bias[idx]), {"out": out}, out)


def _normal(random: np.random.Generator, shape: tuple[int, ...], dtype: str, scale: float = 1) -> Array:
    result: Array = (scale * random.standard_normal(shape)).astype(DTYPES[dtype])
    return result


def _zeros(machine: Machine, shape: tuple[int, ...], dtype: str) -> Any:
    array = machine.empty(shape, dtype)
    bits(array)[...] = 0
    return array
