"""How a chunked call lies in its workspace: chunks of a batch, slabs of chunks, and the parts with their sizes.

Every formula of the kernels `gated_delta_chunk_*` that decides how much memory a call takes stands here, once. The
parts start on multiples of `PART_ALIGNMENT`: the plan, two carries (what passes from slab to slab: states, where the
pool would round them, and units of states), one slab or two that take turns, and where rows may be too short for the
list, the slots of those.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from gdn.errors import ShapeError, rejection
from gdn.geometry import HeadGeometry

#: What every part of a workspace starts on a multiple of.
PART_ALIGNMENT = 256
#: Bytes that a workspace stays below, unless one chunk alone is more.
MAX_WORKSPACE_BYTES = 128 << 20
#: Chunks that the kernels can count.
MAX_CHUNKS = 2**30 - 1
#: What rows are walked along at once to have, counted in WALK_COLUMNS columns whatever a kernel takes at a time: about
#: as many as a large GPU has multiprocessors. A constant, so that a workspace depends on shapes and types alone.
WALKS_AT_ONCE = 128
WALK_COLUMNS = 128
#: Head sizes that the chunked kernels serve are multiples of this.
SERVED_HEAD_DIM_MULTIPLE = 32

_OPERAND_BYTES = 2  # of an element of a tensor core's operand
_HEADER_ENTRIES = 4  # of the plan
_ENTRIES_OF_CHUNK = 9  # a chunk, a row, a place (kernels/chunk_plan.cuh)
_SCALARS_OF_TOKEN, _SCALARS_OF_CHUNK = 4, 16  # ChunkScalars of kernels/chunk_workspace.cuh
_SCALAR_BYTES = 4
_KEY_DIM_MULTIPLE = 64  # to which rows of keys and queries are padded
_CHUNK_LEN = 64
_CARRY_ITEMSIZE = 4
_CARRIED_BYTES_OF_COLUMN = 8  # ColumnUnits of kernels/gated_delta_chunk_walk_sm90.cu


def unserved_reason(geometry: HeadGeometry) -> str | None:
    """Why the chunked kernels do not serve these heads, as a message about an argument; None where they do."""
    for name in ("key_head_dim", "value_head_dim"):
        dim = getattr(geometry, name)
        if dim % SERVED_HEAD_DIM_MULTIPLE:
            return rejection(name, f"a multiple of {SERVED_HEAD_DIM_MULTIPLE} for algorithm='chunked'", dim)
    return None


@dataclass(frozen=True)  # without slots, so that what launches ask for again and again is worked out once
class ChunkLayout:
    """The chunks of a call and its workspace, by what shapes and types say. min_row_len: of rows that become chunks."""

    geometry: HeadGeometry
    work_dtype: str
    state_dtype: str
    batch_size: int
    total_seq_len: int
    min_row_len: int

    def __post_init__(self) -> None:
        """Raise ShapeError for a batch of more chunks than kernels can count."""
        if self.max_chunks > MAX_CHUNKS:
            expected = f"a batch of at most {MAX_CHUNKS} chunks of {self.chunk_len} tokens"
            raise ShapeError(rejection("qkv_conv_output", expected, self.max_chunks))

    @cached_property
    def chunk_len(self) -> int:
        """Tokens of a chunk, but for the last one of a row."""
        is_wide = self.work_dtype == "float32" and self.geometry.key_head_dim > 128
        return _CHUNK_LEN // 2 if is_wide else _CHUNK_LEN

    @cached_property
    def operand_terms(self) -> int:
        """16-bit numbers that an element of an operand is the sum of."""
        return 2 if self.work_dtype == "float32" else 1

    @cached_property
    def padded_key_dim(self) -> int:
        """Elements of a row of keys or queries in the workspace."""
        return _rounded_up(self.geometry.key_head_dim, _KEY_DIM_MULTIPLE)

    @cached_property
    def max_rows(self) -> int:
        """The most sequences that can be long enough, each of tokens of its own."""
        return min(self.batch_size, self.total_seq_len // self.min_row_len)

    @cached_property
    def max_chunks(self) -> int:
        """The most chunks that rows of tokens of their own can have."""
        return self.total_seq_len // self.chunk_len + self.max_rows if self.max_rows else 0

    @cached_property
    def rows_at_once(self) -> int:
        """Rows whose chunks are interleaved, so that a slab has work for a whole GPU.

        Not more than a slab has room for a chunk of each: the next chunk of a row then lies in the same slab or the
        next one, which is how far a carry reaches.
        """
        heads = self.geometry
        enough = WALKS_AT_ONCE // (heads.num_value_heads * -(-heads.value_head_dim // WALK_COLUMNS))
        room = self._bytes_of_slabs_and_carries // (2 * self.chunk_bytes + 2 * self._carried_row_bytes)
        return max(1, min(enough, room, self.max_rows))

    # ---- Bytes ----

    @cached_property
    def key_image_bytes(self) -> int:
        """Keys and queries of a chunk and key head."""
        return 2 * self.operand_terms * self.chunk_len * self.padded_key_dim * _OPERAND_BYTES

    @cached_property
    def matrices_bytes(self) -> int:
        """Two matrices of chunk_len by chunk_len, of a chunk and value head."""
        return 2 * self.operand_terms * self.chunk_len * self.chunk_len * _OPERAND_BYTES

    @cached_property
    def value_image_bytes(self) -> int:
        """What else a chunk and value head needs: the matrices, and numbers of each token."""
        return self.matrices_bytes + (_SCALARS_OF_TOKEN * self.chunk_len + _SCALARS_OF_CHUNK) * _SCALAR_BYTES

    @cached_property
    def chunk_bytes(self) -> int:
        """A chunk of all heads."""
        heads = self.geometry
        return heads.num_key_heads * self.key_image_bytes + heads.num_value_heads * self.value_image_bytes

    @cached_property
    def plan_bytes(self) -> int:
        """The list of chunks and rows, as `kernels/gated_delta_chunk_plan.cu` writes it."""
        return _whole_part(4 * (_HEADER_ENTRIES + _ENTRIES_OF_CHUNK * self.max_chunks))

    @cached_property
    def carry_bytes(self) -> int:
        """What passes from slab to slab of each row that may go on: a float32 state of every value head, but where the
        pool has float32 and holds it; and two words of each of its columns.
        """
        return _whole_part(self.rows_at_once * self._carried_row_bytes)

    @cached_property
    def _carried_row_bytes(self) -> int:
        heads = self.geometry
        state_bytes = 0 if self.state_dtype == "float32" else _CARRY_ITEMSIZE * heads.slot_state_elements
        return state_bytes + _CARRIED_BYTES_OF_COLUMN * heads.value_dim

    @cached_property
    def short_slots_bytes(self) -> int:
        """A slot for each sequence, where one that has tokens may be too short to be in the list."""
        return _whole_part(4 * self.batch_size) if self.min_row_len > 1 else 0

    @cached_property
    def slab_bytes(self) -> int:
        """The chunks of a slab."""
        return _whole_part(self.slab_chunks * self.chunk_bytes)

    @cached_property
    def all_slabs_bytes(self) -> int:
        """The slabs that are in the workspace at a time."""
        return min(2, self.num_slabs) * self.slab_bytes

    @cached_property
    def total_bytes(self) -> int:
        """A workspace that starts anywhere."""
        return PART_ALIGNMENT + self.plan_bytes + 2 * self.carry_bytes + self.all_slabs_bytes + self.short_slots_bytes

    @cached_property
    def _bytes_of_slabs_and_carries(self) -> int:
        """What is left for them, in whole parts; negative where there is too little."""
        beside = PART_ALIGNMENT + self.plan_bytes + self.short_slots_bytes
        return (MAX_WORKSPACE_BYTES - beside) // PART_ALIGNMENT * PART_ALIGNMENT

    # ---- Slabs ----

    @cached_property
    def num_slabs(self) -> int:
        """Slabs that the chunks are split into."""
        largest = (self._bytes_of_slabs_and_carries - 2 * self.carry_bytes) // (2 * self.chunk_bytes)
        rows = self.rows_at_once
        return -(-self.max_chunks // max(1, largest // rows * rows))

    @cached_property
    def slabs_overlap(self) -> bool:
        """Whether a slab is made ready while the one before is walked over, by what walks leave idle.

        Where walks fill a GPU, grids that begin early take time from them: 3 % on an H200.
        """
        heads = self.geometry
        num_walks = self.rows_at_once * heads.num_value_heads * -(-heads.value_head_dim // WALK_COLUMNS)
        return self.num_slabs > 1 and num_walks <= WALKS_AT_ONCE // 2

    @cached_property
    def slab_chunks(self) -> int:
        """Chunks of a slab, the last one maybe less: all slabs of about one size, a multiple of the rows at once."""
        return _rounded_up(-(-self.max_chunks // self.num_slabs), self.rows_at_once) if self.max_chunks else 0

    # ---- Where the parts start, from the first multiple of PART_ALIGNMENT on; the plan does there ----

    @cached_property
    def carry_offsets(self) -> tuple[int, int]:
        """The two carries."""
        return self.plan_bytes, self.plan_bytes + self.carry_bytes

    def slab_offset(self, slab: int) -> int:
        """A slab, by its number. The next one lies elsewhere; the one after that takes its place."""
        return self.plan_bytes + 2 * self.carry_bytes + slab % 2 * self.slab_bytes

    @cached_property
    def short_slots_offset(self) -> int:
        """The slots of rows that are too short."""
        return self.plan_bytes + 2 * self.carry_bytes + self.all_slabs_bytes


def first_part(workspace: int) -> int:
    """The address of the first part of a workspace that starts at this address."""
    return _rounded_up(workspace, PART_ALIGNMENT)


def _whole_part(num_bytes: int) -> int:
    return _rounded_up(num_bytes, PART_ALIGNMENT)


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
