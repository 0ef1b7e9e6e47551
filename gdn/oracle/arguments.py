"""What the oracle's functions take: index tables, types and shapes, held to what they must be."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

PAD_SLOT = 0xFFFFFFFF
_FLOAT_TYPES = ("float16", "bfloat16", "float32", "float64")
_INDEX_TYPES = ("uint32", "int32")


def live_sequences(
    slot_idx: NDArray[Any], input_row_offsets: NDArray[Any], max_slots: int, total_seq_len: int
) -> list[tuple[int, slice]]:
    """The slot and the rows of every sequence that is not padding and has tokens."""
    require_type("slot_idx", slot_idx, _INDEX_TYPES)
    require_type("input_row_offsets", input_row_offsets, _INDEX_TYPES)
    if slot_idx.ndim != 1:
        raise ValueError(f"slot_idx: expected shape [B], got {slot_idx.shape}")
    require_shape("input_row_offsets", input_row_offsets, (len(slot_idx) + 1,))
    offsets = input_row_offsets.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > total_seq_len or np.any(np.diff(offsets) < 0):
        raise ValueError(
            f"input_row_offsets: expected offsets that never decrease, within [0, {total_seq_len}], "
            f"got {offsets.tolist()}"
        )

    slots = slot_idx.astype(np.int64) & 0xFFFFFFFF  # an int32 is read as the same 32 bits
    sequences: dict[int, slice] = {}
    for sequence_idx, slot in enumerate(slots.tolist()):
        rows = slice(int(offsets[sequence_idx]), int(offsets[sequence_idx + 1]))
        if slot == PAD_SLOT:
            continue
        if slot >= max_slots:
            raise ValueError(
                f"slot_idx: expected slots below max_slots={max_slots}, got {slot} at position {sequence_idx}"
            )
        if rows.start == rows.stop:
            continue
        if slot in sequences:
            raise ValueError(
                f"slot_idx: expected a slot of its own for every sequence with tokens, got {slot} again at "
                f"position {sequence_idx}"
            )
        sequences[slot] = rows
    return list(sequences.items())


def require_floats(**arrays: NDArray[Any]) -> None:
    for name, array in arrays.items():
        require_type(name, array, _FLOAT_TYPES)


def require_type(name: str, array: NDArray[Any], accepted: tuple[str, ...]) -> None:
    if array.dtype.name not in accepted:
        raise ValueError(f"{name}: expected {' or '.join(accepted)}, got {array.dtype.name}")


def require_shape(name: str, array: NDArray[Any], expected: tuple[int, ...]) -> None:
    if array.shape != expected:
        raise ValueError(f"{name}: expected shape {expected}, got {array.shape}")
