"""A speculative decode loop that runs for very long: what a short check cannot see adds up.

Stretches of steps with random windows and acceptances, in the three forms of such a loop by turns. At the checkpoint
behind each, states and accepted readouts must be those of one plain forward call over the accepted tokens, to the bit,
and finite; memory must have stopped growing once the loop is warm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gdn import ops
from gdn.geometry import PAD_SLOT, HeadGeometry
from gdn.speculative import PendingWindows
from gdn.testing.buffers import Array
from gdn.testing.cases import RecurrenceArrays, RecurrenceCase, build_arrays
from gdn.testing.compare import Comparison, bitwise, same_bytes
from gdn.testing.execute import on_backend
from gdn.testing.ring_device import Device

#: A verify and a fold; a verify that folds what the one before left; one that leaves it pending while there is room.
FORMS = ("separate", "fused", "lazy")
_HEADS = HeadGeometry(1, 2, 16, 16)  # small, for CPUs: what adds up over many steps does so in any size
_VOCABULARY = 2048  # tokens that windows are drawn from
_SHARE_OF_PADDING = 0.05
_WARM_SHARE = 0.1  # of the checkpoints: caches, plans and allocators fill up before the loop is warm
#: What memory may grow by once the loop is warm. A leak of a small object a call is past it in 10^5 steps.
_ALLOWED_GROWTH = {"resident": 16 << 20, "cupy pool": 0}


@dataclass(frozen=True, slots=True)
class SoakCase:
    """A decode loop. The pool is float32: only then has a stretch in any form the bits of one call."""

    heads: HeadGeometry = _HEADS
    num_layers: int = 2
    num_rows: int = 4
    ring_len: int = 4
    work_dtype: str = "bfloat16"
    steps_to_checkpoint: int = 1000
    seed: int = 0

    @property
    def max_tokens(self) -> int:
        """Tokens of the largest step: every row's window is longer than the ring by one."""
        return self.num_rows * (self.ring_len + 1)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What was found after so many steps and accepted tokens of each layer. memory: bytes in use, by kind."""

    num_steps: int
    num_tokens: int
    form: str
    comparisons: tuple[Comparison, ...]
    memory: Mapping[str, int]

    @property
    def failures(self) -> tuple[str, ...]:
        """Messages of the comparisons that failed; one where nothing was compared."""
        if not self.comparisons:
            return ("nothing was compared",)
        return tuple(comparison.message for comparison in self.comparisons if not comparison.passed)


@dataclass(frozen=True, slots=True)
class Growth:
    """The most bytes in use until the loop was warm, and the most since."""

    kind: str
    warm: int
    most: int

    @property
    def passed(self) -> bool:
        """Whether memory stayed flat."""
        return self.most - self.warm <= _ALLOWED_GROWTH[self.kind]


def soak(case: SoakCase, backend: str, num_steps: int) -> Generator[Checkpoint, None, None]:
    """Run a loop for so many steps; yields what is found at each checkpoint, the last one at the end."""
    random = np.random.default_rng(case.seed)
    loop = _Loop(case, backend, random)
    steps_done = tokens_done = number = 0
    while steps_done < num_steps:
        stretch = _draw(case, random, min(case.steps_to_checkpoint, num_steps - steps_done))
        form = FORMS[number % len(FORMS)]
        comparisons = loop.run(stretch, form)
        steps_done += len(stretch.lengths)
        tokens_done += int(stretch.accepted.sum())
        number += 1
        yield Checkpoint(steps_done, tokens_done, form, comparisons, loop.device.bytes_in_use())


def growth(checkpoints: Sequence[Checkpoint]) -> list[Growth]:
    """How memory grew after the first checkpoints, a tenth of all and one of each form; empty where none follow."""
    num_warm = max(len(FORMS), math.ceil(_WARM_SHARE * len(checkpoints)))
    memories = [checkpoint.memory for checkpoint in checkpoints]
    warm, since = memories[:num_warm], memories[num_warm:]
    if not since:
        return []
    return [
        Growth(kind, max(memory[kind] for memory in warm), max(memory[kind] for memory in since)) for kind in warm[0]
    ]


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Steps between two checkpoints. Axes: steps, rows; of `tokens` steps, places in the call."""

    lengths: Array
    accepted: Array
    is_padding: Array
    tokens: Array

    @property
    def offsets(self) -> Array:
        """[steps, rows + 1], of the windows in their call."""
        return np.pad(np.cumsum(self.lengths, axis=1), ((0, 0), (1, 0)))

    def accepted_places(self) -> tuple[Array, Array]:
        """Where each row's accepted tokens lie in the flat `tokens`, row behind row, and how many each has."""
        in_window = np.arange(self.lengths.max(initial=0))
        steps = np.arange(len(self.tokens))[:, None, None] * self.tokens.shape[1]
        places = steps + self.offsets[:, :-1, None] + in_window
        kept = in_window < self.accepted[..., None]
        by_row = [places[:, row][kept[:, row]] for row in range(self.lengths.shape[1])]
        return np.concatenate(by_row), np.array([len(row) for row in by_row])


def _draw(case: SoakCase, random: np.random.Generator, num_steps: int) -> _Stretch:
    """Empty windows, full ones, some longer than the ring, some of padding; all, none or a few of the drafts right."""
    shape = num_steps, case.num_rows
    lengths = random.integers(0, case.ring_len + 2, shape)
    is_padding = random.random(shape) < _SHARE_OF_PADDING
    accepted = np.where(random.random(shape) < 0.3, lengths, random.integers(0, lengths + 1))
    accepted = np.where(lengths > case.ring_len, lengths, accepted)  # such a window advances its state itself
    accepted[is_padding] = 0
    tokens = random.integers(0, _VOCABULARY, (num_steps, case.max_tokens))
    return _Stretch(lengths, accepted, is_padding, tokens)


class _Loop:
    """The memory of a decode loop on a backend, and of plain calls that must end where it does."""

    def __init__(self, case: SoakCase, backend: str, random: np.random.Generator) -> None:
        self.case, self.device, heads = case, Device(backend), case.heads
        put = self.device.put
        self.layers = [build_arrays(_vocabulary(case, layer)) for layer in range(case.num_layers)]
        num_slots = case.num_layers * case.num_rows
        self.slots = random.permutation(num_slots + 1)[:num_slots].astype(np.uint32).reshape(-1, case.num_rows)
        states = np.zeros((num_slots + 1, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim), np.float32)
        states[np.setdiff1d(np.arange(num_slots + 1), self.slots)] = np.nan  # of nobody: it may neither spread nor go
        self.pool, self.plain_pool = put(states), put(states)
        ring_rows = random.permutation(2 * num_slots).astype(np.uint32).reshape(2, *self.slots.shape)
        record_stride = -(-heads.record_elements // 8) * 8
        self.ring = put(np.full((2 * num_slots, heads.num_key_heads, case.ring_len, record_stride), np.nan, np.float32))
        self.row_ids, self.ring_rows = put(self.slots), put(ring_rows[0])
        self.windows = {
            form: PendingWindows(put(ring_rows), case.ring_len, lazy=form == "lazy") for form in ("fused", "lazy")
        }

    def run(self, stretch: _Stretch, form: str) -> tuple[Comparison, ...]:
        """Run a stretch in a form, then the plain calls; compares what both left."""
        with on_backend(self.device.backend):
            readouts = self._steps(stretch, form)
            places, counts = stretch.accepted_places()
            kept = readouts.reshape(len(self.layers), -1, self.case.heads.value_dim)[:, places]
            plain = self._plain(stretch.tokens.ravel()[places], counts)
        return tuple(self._compare(kept, plain))

    def _steps(self, stretch: _Stretch, form: str) -> Array:
        """The readouts of all steps, [layers, steps, max_tokens, value_dim]. Steps find their arguments on the device.

        A step has as many token rows as the largest one; the last of them no window covers.
        """
        put, num_steps = self.device.put, len(stretch.lengths)
        inputs = [[put(table[stretch.tokens]) for table in _tokens_of(layer)] for layer in self.layers]
        out = put(np.full((len(inputs), *stretch.tokens.shape, self.case.heads.value_dim), np.nan, inputs[0][0].dtype))
        slots = put(np.where(stretch.is_padding[:, None], np.uint32(PAD_SLOT), self.slots))
        offsets, accepted = put(stretch.offsets.astype(np.uint32)), put(stretch.accepted.astype(np.uint32))
        end = self._fold if form == "separate" else self.windows[form].accept
        for step in range(num_steps):
            verify = self._verify(form, slots[step], offsets[step])
            for layer, arrays in enumerate(inputs):
                verify(layer, *(array[step] for array in arrays), out[layer, step])
            end(accepted[step])
        if form != "separate":
            self.windows[form].fold(self.pool, self.row_ids, self.ring)
        return self.device.get(out)

    def _verify(self, form: str, slots: Any, offsets: Any) -> Callable[..., None]:
        """What verifies the windows of a layer in a step that begins now."""
        if form == "separate":
            rows, pending, counts = self.ring_rows, [None] * len(self.layers), None
        else:
            windows = self.windows[form]
            windows.begin(offsets, slots[0])
            rows, pending, counts = windows.ring_slot_idx, windows.pending_ring_slot_idx, windows.num_pending

        def verify(layer: int, qkv: Any, decay: Any, beta: Any, out: Any) -> None:
            ops.gated_delta_recurrence_verify_ring(
                *(qkv, decay, beta, self.pool, slots[layer], offsets, self.ring, rows[layer]),
                pending_ring_slot_idx=pending[layer],
                num_pending=counts,
                out=out,
            )

        return verify

    def _fold(self, accepted: Any) -> None:
        # A window longer than the ring has advanced its state: the fold skips counts like its length.
        ops.gated_delta_state_fold(self.pool, self.row_ids, self.ring, self.ring_rows, accepted)

    def _plain(self, tokens: Array, counts: Array) -> Array:
        """Advance the plain pool over tokens of each row in one call a layer; returns the readouts."""
        offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32)
        readouts = []
        for layer, slots in zip(self.layers, self.slots, strict=True):
            qkv, decay, beta = (table[tokens] for table in _tokens_of(layer))
            call = RecurrenceArrays(qkv, decay, beta, layer.recurrent_state, slots, offsets)
            readouts.append(self.device.forward(call, self.plain_pool))
        return np.stack(readouts)

    def _compare(self, readouts: Array, plain: Array) -> Iterator[Comparison]:
        pool, plain_pool = self.device.get(self.pool), self.device.get(self.plain_pool)
        states, spare = pool[self.slots], np.setdiff1d(np.arange(len(pool)), self.slots)
        yield bitwise(states, plain_pool[self.slots], "states against one plain call")
        yield bitwise(np.isfinite(states), np.ones_like(states, bool), "states are finite")
        yield same_bytes(pool[spare], plain_pool[spare], "a slot of nobody")
        if readouts.size:
            yield bitwise(readouts, plain, "accepted readouts against one plain call")
            finite = np.isfinite(readouts.astype(np.float32))
            yield bitwise(finite, np.ones_like(finite), "accepted readouts are finite")


def _vocabulary(case: SoakCase, layer: int) -> RecurrenceCase:
    seed = case.seed * case.num_layers + layer
    return RecurrenceCase("vocabulary", case.heads, (_VOCABULARY,), work_dtype=case.work_dtype, seed=seed)


def _tokens_of(layer: RecurrenceArrays) -> tuple[Array, Array, Array]:
    """What a call takes of each token."""
    return layer.qkv_conv_output, layer.decay_per_token, layer.beta_per_token
