"""The launch of `kernels/gated_delta_recurrence_verify_ring.cu`."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends import recurrence
from gdn.backends.launch import KERNEL_TYPE, Kernel, Launch, Variant
from gdn.backends.row_tile import RowTile
from gdn.ring import VerifyInputs, ring_len

KERNEL = Kernel(
    "gated_delta_recurrence_verify_ring",
    (
        *recurrence.PARAMETERS,
        ("ring", "pointer"),
        ("ring_rows", "int64"),
        ("record_stride", "int64"),
        ("ring_slot_idx", "pointer"),
        ("ring_slot_idx_stride", "int64"),
    ),
)


def records_are_packed(ring: Argument) -> bool:
    """Whether every record of a ring starts on a 16-byte boundary."""
    return ring.pointer % 16 == 0 and ring.shape[3] * ring.itemsize % 16 == 0


def variant(inputs: VerifyInputs, out: Argument, tile: RowTile) -> Variant:
    """The compile-time constants for these inputs."""
    return Variant(
        KERNEL,
        (
            *recurrence.macros(inputs.recurrence, out, tile, keeps_records=True),
            ("RING_LEN", str(ring_len(inputs.ring))),
            ("RING_TYPE", KERNEL_TYPE[inputs.ring.dtype]),
            ("RING_IS_PACKED", str(records_are_packed(inputs.ring)).lower()),
        ),
    )


def launch(inputs: VerifyInputs, out: Argument, tile: RowTile) -> Launch:
    """The complete launch; index values are not looked at."""
    ring, rows = inputs.ring, inputs.ring_slot_idx
    ring_rows, _, _, record_stride = ring.shape
    return Launch(
        variant(inputs, out, tile),
        recurrence.num_blocks(inputs.recurrence, tile),
        tile.threads,
        (
            *recurrence.arguments(inputs.recurrence, out),
            *(ring.pointer, ring_rows, record_stride),
            *(rows.pointer, *rows.strides),
        ),
    )
