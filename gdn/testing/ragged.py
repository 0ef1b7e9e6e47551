"""What is known of the sequences of a ragged batch from the tables of a case."""

from __future__ import annotations

from typing import Any

import numpy as np

from gdn.geometry import PAD_SLOT
from gdn.testing.buffers import Array


class RaggedSubject:
    """A case, `case.lengths`, with its tables, `arrays.slot_idx` and `arrays.input_row_offsets`."""

    __slots__ = ()
    case: Any
    arrays: Any

    @property
    def lengths(self) -> Array:
        """Tokens of each sequence."""
        return np.asarray(self.case.lengths, np.int64)

    @property
    def slots(self) -> Array:
        """Slots as uint32."""
        slots: Array = self.arrays.slot_idx.view(np.uint32)
        return slots

    @property
    def live(self) -> Array:
        """Positions of the sequences that have tokens and a slot."""
        return np.flatnonzero((self.lengths > 0) & (self.slots != PAD_SLOT))

    def rows(self, sequence: int) -> slice:
        """Token rows of a sequence."""
        offsets = self.arrays.input_row_offsets
        return slice(int(offsets[sequence]), int(offsets[sequence + 1]))
