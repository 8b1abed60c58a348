"""Rotary positions in config.json: theta, scaling and the share of a head that turns, read and written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.rope_scaling import KINDS, RopeScaling
from jaxfb.pretrained.layer_types import TYPES
from jaxfb.refusal import Refused

_KNOWN = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_slow "
    "beta_fast attention_factor mscale mscale_all_dim truncate partial_rotary_factor short_factor long_factor".split()
)


def rotary_share(values: Mapping[str, Any]) -> float:
    """Returns the part of each head that turns."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    older = values.get("partial_rotary_factor")
    return rope.get("partial_rotary_factor") or older or 1.0


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
    kind = "longrope" if kind == "su" else kind  # what it was called at first
    if kind == "dynamic":
        length = _original(rope, values)
        raise Refused(
            "[hf] rope_type='dynamic' is not supported: its frequencies follow the length of the text so far, and "
            f"cached keys would not be those of training; texts of at most {length} tokens are computed the same "
            "with rope_type='default' in config.json"
        )
    if kind not in KINDS:
        raise Refused(
            f"[hf] rope_type={kind!r} is not supported; it must be one of default, {', '.join(KINDS)}"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, rope, values)}


def _scaling(kind: str, rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    original = _original(rope, values)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope["factor"],
            original,
            low_frequency_factor=rope["low_freq_factor"],
            high_frequency_factor=rope["high_freq_factor"],
        )
    if kind == "longrope":
        return _longrope(rope, values)
    return RopeScaling(
        "yarn",
        _factor(rope, values),
        original,
        beta_slow=rope.get("beta_slow") or 1.0,
        beta_fast=rope.get("beta_fast") or 32.0,
        attention_factor=_attention_factor(rope, values),
        truncate=rope.get("truncate", True),
    )


def _original(rope: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Returns the tokens of a sequence in training; a key beside the scaling comes before the one in it."""
    names = "original_max_position_embeddings", "max_position_embeddings"
    return values.get(names[0]) or rope.get(names[0]) or values[names[1]]


def _longrope(rope: Mapping[str, Any], values: Mapping[str, Any]) -> RopeScaling:
    return RopeScaling(
        "longrope",
        max(1.0, _factor(rope, values)),
        _original(rope, values),
        attention_factor=rope.get("attention_factor"),
        short_factors=rope["short_factor"],
        long_factors=rope["long_factor"],
    )


def _factor(rope: Mapping[str, Any], values: Mapping[str, Any]) -> float:
    return rope.get("factor") or values["max_position_embeddings"] / _original(rope, values)


def _attention_factor(rope: Mapping[str, Any], values: Mapping[str, Any]) -> float | None:
    """Returns the factor of yarn; None for the usual one."""
    both = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or not all(both):
        return rope.get("attention_factor")
    above, below = (_grown(_factor(rope, values), mscale) for mscale in both)
    return above / below


def _grown(factor: float, mscale: Any) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def grown_scale(values: Mapping[str, Any]) -> float | None:
    """Returns what DeepSeek multiplies the scale of attention by for `mscale_all_dim`; None for nothing."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    all_dim = rope.get("mscale_all_dim")
    is_plain = rope.get("rope_type", rope.get("type", "default")) == "default"
    return None if is_plain or not all_dim else _grown(_factor(rope, values), all_dim) ** 2


def grown_keys(sizes: TransformerConfig) -> dict[str, float]:
    """Returns the key of `rope_parameters` from which `grown_scale` gives the scale of attention."""
    scale, scaling = sizes.variant.attention_scale, sizes.rope_scaling
    if scale is None or scaling is None or scaling.factor <= 1:
        return {}
    root = math.sqrt(scale * sizes.head_size**0.5)
    return {"mscale_all_dim": round((root - 1) / (0.1 * math.log(scaling.factor)), 9)}


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
    if scaling.kind == "longrope":
        values |= {"short_factor": list(scaling.short_factors), "long_factor": list(scaling.long_factors)}
    if scaling.kind == "yarn":
        values |= {"beta_slow": scaling.beta_slow, "beta_fast": scaling.beta_fast}
        if not scaling.truncate:
            values["truncate"] = False
    if scaling.attention_factor is not None:
        values["attention_factor"] = scaling.attention_factor
    return values
