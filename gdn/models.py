"""Head counts of published models with Gated DeltaNet layers, for presets and tests."""

from __future__ import annotations

from gdn.errors import GdnError, rejection
from gdn.geometry import HeadGeometry

_QWEN_16_16 = HeadGeometry(num_key_heads=16, num_value_heads=16, key_head_dim=128, value_head_dim=128)
_QWEN_16_32 = HeadGeometry(num_key_heads=16, num_value_heads=32, key_head_dim=128, value_head_dim=128)
_QWEN_16_48 = HeadGeometry(num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128)
_QWEN_16_64 = HeadGeometry(num_key_heads=16, num_value_heads=64, key_head_dim=128, value_head_dim=128)
_OLMO_30_30 = HeadGeometry(num_key_heads=30, num_value_heads=30, key_head_dim=96, value_head_dim=192)

MODELS: dict[str, HeadGeometry] = {
    "qwen3-next-80b-a3b": _QWEN_16_32,
    "qwen3.5-0.8b": _QWEN_16_16,
    "qwen3.5-2b": _QWEN_16_16,
    "qwen3.5-4b": _QWEN_16_32,
    "qwen3.5-9b": _QWEN_16_32,
    "qwen3.5-27b": _QWEN_16_48,
    "qwen3.6-27b": _QWEN_16_48,
    "qwen3.5-35b-a3b": _QWEN_16_32,
    "qwen3.5-122b-a10b": _QWEN_16_64,
    "qwen3.5-397b-a17b": _QWEN_16_64,
    "olmo-hybrid-7b": _OLMO_30_30,
}


def model_geometry(name: str) -> HeadGeometry:
    """The heads of one Gated DeltaNet layer of a model, on one device. Raises GdnError for an unknown name."""
    if name not in MODELS:
        raise GdnError(rejection("model", f"one of {', '.join(MODELS)}", repr(name)))
    return MODELS[name]
