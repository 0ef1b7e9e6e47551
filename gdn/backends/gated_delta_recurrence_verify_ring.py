"""The launch of `kernels/gated_delta_recurrence_verify_ring.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends import recurrence, ring
from gdn.backends.launch import Kernel, Launch, Variant
from gdn.backends.row_tile import RowTile
from gdn.ring import VerifyInputs

KERNEL = Kernel(
    "gated_delta_recurrence_verify_ring",
    (
        *recurrence.PARAMETERS,
        *ring.RING_PARAMETERS,
        ("ring_slot_idx", "pointer"),
        ("ring_slot_idx_stride", "int64"),
    ),
)
#: With HAS_PENDING.
KERNEL_WITH_PENDING = Kernel(KERNEL.stem, (*KERNEL.parameters, *ring.PENDING_PARAMETERS))


def variant(inputs: VerifyInputs, out: Argument, tile: RowTile) -> Variant:
    """The compile-time constants for these inputs."""
    has_pending = inputs.pending is not None
    return Variant(
        KERNEL_WITH_PENDING if has_pending else KERNEL,
        (
            *recurrence.macros(inputs.recurrence, out, tile, has_records=True),
            *ring.ring_macros(inputs.ring),
            *ring.pending_macros(has_pending=has_pending),
        ),
    )


def launch(inputs: VerifyInputs, out: Argument, tile: RowTile) -> Launch:
    """The complete launch; index values are not looked at."""
    rows, pending = inputs.ring_slot_idx, inputs.pending
    return Launch(
        variant(inputs, out, tile),
        recurrence.num_blocks(inputs.recurrence, tile),
        tile.threads,
        (
            *recurrence.arguments(inputs.recurrence, out),
            *ring.ring_arguments(inputs.ring),
            *(rows.pointer, *rows.strides),
            *(() if pending is None else ring.pending_arguments(pending)),
        ),
    )
