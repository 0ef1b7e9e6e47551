"""What the launches of the convolution and of its commit share: how channels are split, and how windows lie."""

from __future__ import annotations

from gdn.arrays import Argument
from gdn.backends.launch import KERNEL_TYPE, MAX_GRID_BLOCKS
from gdn.backends.recurrence import pool_is_packed
from gdn.conv1d import Conv1dBatch
from gdn.errors import ShapeError, rejection

#: Threads of a block.
THREADS = 128
#: Neighbouring channels of a thread. Twice as many are as fast on long rows and slower on short ones.
_PACKED_CHANNELS = 4

#: The parameters of the batch, up to the offsets.
POOL_PARAMETERS = (
    ("conv_state", "pointer"),
    ("state_slot_stride", "int64"),
    ("state_channel_stride", "int64"),
    ("state_place_stride", "int64"),
    ("slot_idx", "pointer"),
    ("slot_idx_stride", "int64"),
    ("input_row_offsets", "pointer"),
    ("input_row_offsets_stride", "int64"),
    ("offsets_are_signed", "int64"),
)
#: And those of its sizes.
SIZE_PARAMETERS = (
    ("batch_size", "int64"),
    ("total_seq_len", "int64"),
    ("max_slots", "int64"),
    ("conv_dim", "int64"),
    ("channel_blocks", "int64"),
)


def channels(batch: Conv1dBatch, is_packed: bool) -> int:
    """Channels of a thread."""
    return _PACKED_CHANNELS if is_packed and batch.conv_dim % _PACKED_CHANNELS == 0 else 1


def channel_blocks(batch: Conv1dBatch, of_thread: int) -> int:
    """Blocks that the channels of a token are split over."""
    return -(-batch.conv_dim // (THREADS * of_thread))


def grid(batch: Conv1dBatch, parts: int, of_thread: int) -> int:
    """Blocks for so many parts of the batch; raises ShapeError when one launch cannot hold them."""
    blocks = parts * channel_blocks(batch, of_thread)
    if blocks > MAX_GRID_BLOCKS:
        expected = f"a batch of at most {MAX_GRID_BLOCKS} blocks in one launch"
        raise ShapeError(rejection("qkv", expected, f"{blocks} for shape {batch.qkv.shape}"))
    return blocks


def macros(batch: Conv1dBatch, is_packed: bool, head_tokens: int) -> tuple[tuple[str, str], ...]:
    """The compile-time constants of `kernels/conv1d.cuh`."""
    of_thread = channels(batch, is_packed)
    by_channel, is_packed_state = _windows_are_packed(batch.conv_state, of_thread)
    return (
        ("CONV_WIDTH", str(batch.conv_width)),
        ("HEAD_TOKENS", str(head_tokens)),
        ("CHANNELS", str(of_thread)),
        ("NUM_THREADS", str(THREADS)),
        ("WORK_TYPE", KERNEL_TYPE[batch.qkv.dtype]),
        ("STATE_TYPE", KERNEL_TYPE[batch.conv_state.dtype]),
        ("IS_PACKED", str(of_thread > 1).lower()),
        ("STATE_BY_CHANNEL", str(by_channel).lower()),
        ("STATE_IS_PACKED", str(is_packed_state).lower()),
    )


def _windows_are_packed(state: Argument, of_thread: int) -> tuple[bool, bool]:
    """Whether wide accesses can take a thread's windows channel by channel, and whether they can in any order."""
    if of_thread == 1 or not pool_is_packed(state):
        return False, False
    by_channel = state.is_dense(1)
    return by_channel, by_channel or state.strides[1] == 1


def pool_arguments(batch: Conv1dBatch) -> tuple[int, ...]:
    """The values of `POOL_PARAMETERS`."""
    state, slots, offsets = batch.conv_state, batch.slot_idx, batch.input_row_offsets
    return (
        *(state.pointer, *state.strides),
        *(slots.pointer, *slots.strides),
        *(offsets.pointer, *offsets.strides, int(offsets.dtype == "int32")),
    )


def size_arguments(batch: Conv1dBatch, of_thread: int) -> tuple[int, ...]:
    """The values of `SIZE_PARAMETERS`."""
    sizes = batch.batch_size, batch.total_seq_len, batch.max_slots, batch.conv_dim
    return (*sizes, channel_blocks(batch, of_thread))
