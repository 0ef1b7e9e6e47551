"""The launch of `kernels/gated_delta_recurrence_fwd.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends import recurrence
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.backends.row_tile import RowTile
from gdn.recurrence import RecurrenceInputs

KERNEL = Kernel("gated_delta_recurrence_fwd", recurrence.PARAMETERS)


def variant(inputs: RecurrenceInputs, out: Argument, tile: RowTile) -> Variant:
    """The compile-time constants for these inputs."""
    return Variant(KERNEL, recurrence.macros(inputs, out, tile, keeps_records=False))


def launch(inputs: RecurrenceInputs, out: Argument, tile: RowTile) -> Launch:
    """The complete launch; index values are not looked at."""
    return Launch(
        variant(inputs, out, tile),
        recurrence.num_blocks(inputs, tile),
        tile.threads,
        recurrence.arguments(inputs, out),
    )
