"""The launch of `kernels/gated_delta_recurrence_fwd.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends import recurrence, ring
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.backends.row_tile import RowTile
from gdn.recurrence import RecurrenceInputs
from gdn.ring import Pending

KERNEL = Kernel("gated_delta_recurrence_fwd", recurrence.PARAMETERS)
#: With HAS_PENDING.
KERNEL_WITH_PENDING = Kernel(KERNEL.stem, (*KERNEL.parameters, *ring.RING_PARAMETERS, *ring.PENDING_PARAMETERS))


def variant(
    inputs: RecurrenceInputs, out: Argument, tile: RowTile, pending: Pending | None = None, *, clears_rows: bool = True
) -> Variant:
    """The compile-time constants for these inputs. clears_rows: False where another kernel clears unowned rows."""
    if pending is None:
        macros = recurrence.macros(inputs, out, tile, has_records=False)
        more = () if clears_rows else (("CLEARS_ROWS", "false"),)
        return Variant(KERNEL, (*macros, *ring.pending_macros(has_pending=False), *more))
    macros = recurrence.macros(inputs, out, tile, has_records=True)
    return Variant(
        KERNEL_WITH_PENDING,
        (*macros, *ring.ring_macros(pending.ring), *ring.pending_macros(has_pending=True)),
    )


def launch(
    inputs: RecurrenceInputs, out: Argument, tile: RowTile, pending: Pending | None = None, *, clears_rows: bool = True
) -> Launch:
    """The complete launch; index values are not looked at."""
    more = () if pending is None else (*ring.ring_arguments(pending.ring), *ring.pending_arguments(pending))
    return Launch(
        variant(inputs, out, tile, pending, clears_rows=clears_rows),
        recurrence.num_blocks(inputs, tile, clears_rows=clears_rows),
        tile.threads,
        (*recurrence.arguments(inputs, out), *more),
    )
