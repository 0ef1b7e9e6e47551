"""Head counts and widths of one call, and everything that follows from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from numbers import Integral

from gdn.errors import ShapeError, rejection

HEAD_DIM_MULTIPLE = 8
MAX_HEAD_DIM = 256


#: The slot or ring row that marks a padding row, on every path and backend. As int32 it is -1.
PAD_SLOT = 0xFFFFFFFF


def _require_head_dim(argument: str, axis: str, dim: int) -> None:
    if not isinstance(dim, Integral) or dim % HEAD_DIM_MULTIPLE or not HEAD_DIM_MULTIPLE <= dim <= MAX_HEAD_DIM:
        limit = f"a multiple of {HEAD_DIM_MULTIPLE} from {HEAD_DIM_MULTIPLE} to {MAX_HEAD_DIM}"
        raise ShapeError(rejection(argument, axis + limit, dim))


@dataclass(frozen=True, slots=True)
class HeadGeometry:
    """The heads of a Gated DeltaNet layer (or of one tensor-parallel shard of it).

    Value head ``h`` reads key head ``h // group_size``. A token's channels lie as Q, then K, then V.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int

    def __post_init__(self) -> None:
        for name in ("key_head_dim", "value_head_dim"):
            _require_head_dim(name, "", getattr(self, name))
        counts = self.num_key_heads, self.num_value_heads
        are_whole = all(isinstance(count, Integral) for count in counts)
        if not are_whole or min(counts) < 1 or self.num_value_heads % self.num_key_heads:
            heads = f"num_key_heads={self.num_key_heads}, num_value_heads={self.num_value_heads}"
            raise ShapeError(rejection("num_value_heads", "a multiple of at least one key head", heads))
        for field in fields(self):  # NumPy's integers would overflow in products
            object.__setattr__(self, field.name, int(getattr(self, field.name)))

    @classmethod
    def from_shapes(cls, conv_dim: int, state_shape: tuple[int, ...]) -> HeadGeometry:
        """Derive the counts from ``qkv_conv_output.shape[1]`` and ``recurrent_state.shape``.

        conv_dim = 2 · num_key_heads · key_head_dim + num_value_heads · value_head_dim, so the number of
        key heads is what the other three leave. Raises ShapeError when it is not whole, or when no kernel serves
        the heads.
        """
        _, num_value_heads, key_head_dim, value_head_dim = state_shape
        _require_head_dim("recurrent_state", "key_head_dim as its third axis, ", key_head_dim)
        _require_head_dim("recurrent_state", "value_head_dim as its last axis, ", value_head_dim)
        num_key_heads, remainder = divmod(conv_dim - num_value_heads * value_head_dim, 2 * key_head_dim)
        if remainder or num_key_heads < 0:
            expected = (
                f"conv_dim = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim = "
                f"num_key_heads * {2 * key_head_dim} + {num_value_heads * value_head_dim} channels"
            )
            raise ShapeError(rejection("qkv_conv_output", expected, conv_dim))
        if num_key_heads < 1 or num_value_heads < 1 or num_value_heads % num_key_heads:
            heads = f"num_key_heads={num_key_heads}, num_value_heads={num_value_heads}"
            expected = "value heads in a multiple of at least one key head"
            raise ShapeError(rejection("qkv_conv_output and recurrent_state", expected, heads))
        return cls(num_key_heads, num_value_heads, key_head_dim, value_head_dim)

    @property
    def group_size(self) -> int:
        """Value heads that share one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def key_dim(self) -> int:
        """Channels of all keys of a token (and of all its queries)."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Channels of all values of a token, and of its readout."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_dim(self) -> int:
        """Channels of a token of ``qkv_conv_output``."""
        return 2 * self.key_dim + self.value_dim

    @property
    def head_state_elements(self) -> int:
        """Elements of one value head's state."""
        return self.key_head_dim * self.value_head_dim

    @property
    def slot_state_elements(self) -> int:
        """Elements of one slot of the pool."""
        return self.num_value_heads * self.head_state_elements

    @property
    def record_elements(self) -> int:
        """Elements of a ring record (the raw key, then delta factors and decay of each value head of the group)."""
        return self.key_head_dim + self.group_size * (self.value_head_dim + 1)
