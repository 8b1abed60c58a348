"""Rotary positions in config.json: theta, scaling and the share of a head that turns, read and written."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.pretrained.family import refuse
from jaxfb.pretrained.layer_types import TYPES
from jaxfb.refusal import Refused

_KNOWN = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_slow "
    "beta_fast attention_factor mscale mscale_all_dim truncate partial_rotary_factor".split()
)


def rotary_share(values: Mapping[str, Any]) -> float:
    """Returns the part of each head that turns."""
    rope = values.get("rope_parameters") or {}
    return rope.get("partial_rotary_factor") or values.get("partial_rotary_factor") or 1.0


def rope_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns theta and scaling, from today's `rope_parameters` or yesterday's `rope_theta` and `rope_scaling`."""
    rope = dict(values.get("rope_parameters") or values.get("rope_scaling") or {})
    if set(rope) & set(TYPES):  # one for each type of layers, which the architecture reads itself
        return {}
    theta = rope.get("rope_theta", values.get("rope_theta", 10_000.0))
    if theta is None:
        raise Refused(
            "[hf] rope_theta must be a number; only layers of some architectures have no rotary positions"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if unknown := [name for name, value in rope.items() if name not in _KNOWN and value]:
        raise Refused(f"[hf] rope_parameters has keys that are not known here: {', '.join(sorted(unknown))}")
    if kind == "default":
        return {"rope_theta": theta}
    if kind not in ("linear", "llama3", "yarn"):
        raise Refused(
            f"[hf] rope_type={kind!r} is not supported; it must be one of default, linear, llama3, yarn"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, rope, values)}


def _scaling(kind: str, rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    original = rope.get("original_max_position_embeddings") or values.get("max_position_embeddings")
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope["factor"],
            original,
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
        )
    refuse(rope, mscale=None, mscale_all_dim=None)
    return RopeScaling(
        "yarn",
        rope["factor"],
        original,
        beta_slow=rope.get("beta_slow") or 1.0,
        beta_fast=rope.get("beta_fast") or 32.0,
        attention_factor=rope.get("attention_factor"),
        truncate=rope.get("truncate", True),
    )


def rope_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the values of `rope_parameters`."""
    scaling = sizes.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": sizes.rope_theta}
    values = {"rope_type": scaling.kind, "rope_theta": sizes.rope_theta, "factor": scaling.factor}
    if scaling.kind != "linear":
        values["original_max_position_embeddings"] = scaling.original_length
    if scaling.kind == "llama3":
        values |= {
            "low_freq_factor": scaling.low_frequency_factor,
            "high_freq_factor": scaling.high_frequency_factor,
        }
    if scaling.kind == "yarn":
        values |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast}
        if not scaling.truncate:
            values["truncate"] = False
        if scaling.attention_factor is not None:
            values["attention_factor"] = scaling.attention_factor
    return values
