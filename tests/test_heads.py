"""Head counts and head sizes: derived from shapes, right at every size that is served, refused with the limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from gdn import models, ops
from gdn.backends import host as host_backend
from gdn.errors import GdnError, ShapeError
from gdn.geometry import HeadGeometry
from gdn.testing.cases import RecurrenceCase
from gdn.testing.ring_cases import RingCase
from gdn.testing.sweep import run_sweep

if TYPE_CHECKING:
    from tests.conftest import Call

FIELD_HEAD_DIMS = (1, 16, 32, 48, 64, 72, 80, 96, 128, 136, 160, 192, 256, 257)
SERVED = tuple(dim for dim in FIELD_HEAD_DIMS if dim % 8 == 0)
LIMIT = "expected a multiple of 8 from 8 to 256"


def with_heads(
    call: Call, num_key_heads: int, num_value_heads: int, key_head_dim: int = 8, value_head_dim: int = 8
) -> Call:
    """Give the arrays of a call the shapes of these heads, possible or not."""
    conv_dim = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim
    call["qkv_conv_output"] = np.zeros((3, conv_dim), np.float32)
    call["decay_per_token"] = np.zeros((3, num_value_heads), np.float32)
    call["beta_per_token"] = np.zeros((3, num_value_heads), np.float32)
    call["recurrent_state"] = np.ones((4, num_value_heads, key_head_dim, value_head_dim), np.float32)
    call["out"] = np.full((3, num_value_heads * value_head_dim), 7, np.float32)
    return call


@pytest.fixture
def _nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(variant: object) -> None:
        raise AssertionError(f"{variant} was compiled")

    monkeypatch.setattr(host_backend, "load", load)


# ---- Counts ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize(("num_key_heads", "num_value_heads"), [(2, 3), (4, 2), (0, 4), (3, 0), (0, 0), (6, 4)])
def test_head_counts_that_do_not_group(call: Call, cpu_backend: str, num_key_heads: int, num_value_heads: int) -> None:
    """Field case 55: counts that do not group are refused, naming both."""
    heads = f"got num_key_heads={num_key_heads}, num_value_heads={num_value_heads}"
    expected = (
        "qkv_conv_output and recurrent_state: expected value heads in a multiple of at least one key head, " + heads
    )
    with_heads(call, num_key_heads, num_value_heads)
    assert call.refusal(ShapeError, cpu_backend) == expected
    assert call.shape_refusal(ShapeError) == expected
    with pytest.raises(ShapeError) as caught:
        HeadGeometry(num_key_heads, num_value_heads, 8, 8)
    assert str(caught.value) == f"num_value_heads: expected a multiple of at least one key head, {heads}"


def test_counts_that_are_no_whole_numbers() -> None:
    for counts in ((1.5, 3), (1, 2.0), ("1", 2), (None, 2)):
        with pytest.raises(ShapeError, match=r"^num_value_heads: expected a multiple of at least one key head, got "):
            HeadGeometry(*counts, 8, 8)  # type: ignore[arg-type]


def test_numbers_of_numpy_do_not_overflow() -> None:
    heads = HeadGeometry(np.int8(16), np.int8(32), np.int16(128), np.uint8(128))  # type: ignore[arg-type]
    assert heads == HeadGeometry(16, 32, 128, 128)
    assert type(heads.conv_dim) is int
    assert (heads.conv_dim, heads.slot_state_elements) == (8192, 524_288)


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("conv_dim", [31, 33, 40, 24, 16, 1, 0])
def test_channels_that_leave_no_whole_number_of_key_heads(call: Call, cpu_backend: str, conv_dim: int) -> None:
    call["qkv_conv_output"] = np.zeros((3, conv_dim), np.float32)
    message = call.refusal(ShapeError, cpu_backend)
    if conv_dim == 16:
        assert message.endswith("a multiple of at least one key head, got num_key_heads=0, num_value_heads=2")
    else:
        assert message == (
            "qkv_conv_output: expected conv_dim = 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim "
            f"= num_key_heads * 16 + 16 channels, got {conv_dim}"
        )
    assert call.shape_refusal(ShapeError) == message


def test_everything_follows_from_four_numbers() -> None:
    heads = HeadGeometry(num_key_heads=2, num_value_heads=6, key_head_dim=96, value_head_dim=192)
    assert heads.group_size == 3
    assert heads.key_dim == 192
    assert heads.value_dim == 1152
    assert heads.conv_dim == 2 * 192 + 1152
    assert heads.head_state_elements == 96 * 192
    assert heads.slot_state_elements == 6 * 96 * 192
    assert heads.record_elements == 96 + 3 * (192 + 1)
    assert HeadGeometry.from_shapes(1536, (7, 6, 96, 192)) == heads


def test_published_models_have_heads_that_are_served() -> None:
    for name, heads in models.MODELS.items():
        assert models.model_geometry(name) is heads
        assert (
            HeadGeometry.from_shapes(
                heads.conv_dim, (1, heads.num_value_heads, heads.key_head_dim, heads.value_head_dim)
            )
            == heads
        )
    with pytest.raises(GdnError, match=r"^model: expected one of qwen3-next-80b-a3b, .*, got 'gpt-2'$"):
        models.model_geometry("gpt-2")


# ---- Sizes ----


@pytest.mark.usefixtures("_nothing_compiles")
@pytest.mark.parametrize("dim", [0, 1, 4, 12, 72 + 4, 257, 264, 512])
@pytest.mark.parametrize("which", ["key_head_dim", "value_head_dim"])
def test_head_sizes_that_are_not_served(call: Call, cpu_backend: str, which: str, dim: int) -> None:
    """Field cases 56-59, 63: sizes beyond the kernels are refused before compiling, with the limit."""
    with_heads(call, 1, 2, **{which: dim})
    message = call.refusal(ShapeError, cpu_backend)
    axis = {"key_head_dim": "third", "value_head_dim": "last"}[which]
    limit = LIMIT.removeprefix("expected ")
    assert message == f"recurrent_state: expected {which} as its {axis} axis, {limit}, got {dim}"
    assert call.shape_refusal(ShapeError) == message


@pytest.mark.parametrize("value_head_dim", FIELD_HEAD_DIMS)
@pytest.mark.parametrize("key_head_dim", FIELD_HEAD_DIMS)
def test_every_pair_of_sizes_is_right_or_refused(key_head_dim: int, value_head_dim: int) -> None:
    """Field cases 56-59, 63: every pair of sizes, on NumPy arrays."""
    refused = [
        f"{name}: {LIMIT}, got {dim}"
        for name, dim in (("key_head_dim", key_head_dim), ("value_head_dim", value_head_dim))
        if dim not in SERVED
    ]
    if refused:
        with pytest.raises(ShapeError) as caught:
            HeadGeometry(1, 1, key_head_dim, value_head_dim)
        assert str(caught.value) == refused[0]
    else:
        assert_right(HeadGeometry(1, 1, key_head_dim, value_head_dim), "numpy")


@pytest.mark.parametrize("place", range(len(SERVED)))
def test_every_size_is_right_in_the_kernels(backend: str, place: int) -> None:
    """Field cases 56-59, 63: each size once as a key's and once as a value's; test_compile.py has every pair."""
    value_head_dim = SERVED[(place + 5) % len(SERVED)]
    assert_right(HeadGeometry(1, 2, SERVED[place], value_head_dim), backend)


@pytest.mark.parametrize("backend", ["numpy", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("place", range(len(FIELD_HEAD_DIMS)))
def test_every_size_is_verified_and_folded_right(backend: str, place: int) -> None:
    """Beside field cases 56-59, 63: the ops with a ring at each size, once a key's, once a value's, or refused alike.

    (On the CPU's kernels test_ring.py has sizes from 8 x 8 to 256 x 256: each is two compiles.)
    """
    heads = FIELD_HEAD_DIMS[place], FIELD_HEAD_DIMS[(place + 5) % len(FIELD_HEAD_DIMS)]
    if not set(heads) <= set(SERVED):
        with pytest.raises(ShapeError, match=f"{LIMIT}, got "):
            ops.gated_delta_ring_record_elements(*heads, 2)
        return
    case = RingCase("sizes", HeadGeometry(1, 2, *heads), 3, (3, 1, 4), (2, 1, 4), num_layers=1)
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert [failure for check in result.checks for failure in check.failures] == []
    assert result.passed


def assert_right(heads: HeadGeometry, backend: str) -> None:
    """The sweep passes on a small ragged batch of these heads."""
    case = RecurrenceCase("heads", heads, (3, 0, 1), state_dtype="float32", trailing_rows=1)
    (result,) = run_sweep([case], [backend])
    assert result.error is None
    assert [failure for check in result.checks for failure in check.failures] == []
    assert result.passed
