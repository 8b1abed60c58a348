"""Rotary positions in config.json: theta, scaling and the share of a head that turns, read and written."""

from __future__ import annotations

import math
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.rope_scaling import KINDS, RopeScaling
from jaxfb.pretrained.layer_types import TYPES
from jaxfb.pretrained.values import WHO, Values
from jaxfb.refusal import FLOAT32, Refused, shown

_KNOWN = frozenset(
    "rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_slow "
    "beta_fast attention_factor mscale mscale_all_dim truncate partial_rotary_factor short_factor long_factor".split()
)


def _rope(values: Values) -> Values:
    return values.section("rope_parameters") or values.section("rope_scaling")


def rotary_share(values: Values) -> float:
    """Returns the part of each head that turns."""
    return _share(_rope(values), values)


def _share(rope: Values, values: Values) -> float:
    name = "partial_rotary_factor"
    found = [one.number_or_none(name, above=0, most=1) for one in (rope, values)]
    return found[0] or found[1] or 1.0


def rope_sizes(values: Values, theta: float = 10_000.0, in_part: bool = False) -> dict[str, Any]:
    """Returns theta and scaling, from today's `rope_parameters` or yesterday's `rope_theta` and `rope_scaling`.

    theta: where there is none.  in_part: whether the architecture reads which part of each head turns.
    """
    rope, kind = _rope(values), values.get("model_type")
    if by_type := [name for name in TYPES if name in rope]:
        raise Refused(
            f"{WHO} rope_parameters has {', '.join(by_type)}, but all layers of a {kind} model have the same rotary "
            "positions"
        )
    return sizes_of_rope(rope, values, values.number("rope_theta", theta, above=0), in_part)


def sizes_of_rope(rope: Values, values: Values, theta: float, in_part: bool = False) -> dict[str, Any]:
    """Returns the fields that one object of rotary positions describes."""
    theta = rope.number("rope_theta", theta, above=0, most=FLOAT32)
    if not in_part and (share := _share(rope, values)) != 1:
        raise Refused(
            f"{WHO} partial_rotary_factor={share} is not supported in a {values.get('model_type')} model; only 1.0 is"
        )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if unknown := [name for name, value in rope.items() if name not in _KNOWN and value]:
        raise Refused(f"{WHO} rope_parameters has keys that are not known here: {', '.join(sorted(unknown))}")
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
            f"{WHO} rope_type={shown(kind)} is not supported; it must be one of default, {', '.join(KINDS)}"
        )
    return {"rope_theta": theta, "rope_scaling": _scaling(kind, rope, values)}


def _scaling(kind: str, rope: Values, values: Values) -> RopeScaling:
    if kind == "linear":
        return RopeScaling("linear", rope.number("factor", least=1))
    original = _original(rope, values)
    if kind == "llama3":
        return RopeScaling(
            "llama3",
            rope.number("factor", least=1),
            original,
            low_frequency_factor=rope.number("low_freq_factor", above=0),
            high_frequency_factor=rope.number("high_freq_factor", above=0),
        )
    if kind == "longrope":
        return _longrope(rope, values)
    return RopeScaling(
        "yarn",
        _factor(rope, values),
        original,
        beta_slow=rope.number_or_none("beta_slow", least=0) or 1.0,
        beta_fast=rope.number_or_none("beta_fast", least=0) or 32.0,
        attention_factor=_attention_factor(rope, values),
        truncate=rope.flag("truncate", True),
    )


def _original(rope: Values, values: Values) -> int:
    """Returns the tokens of a sequence in training; a key beside the scaling comes before the one in it."""
    found = [one.integer_or_none("original_max_position_embeddings") for one in (values, rope)]
    return found[0] or found[1] or values.integer("max_position_embeddings")


def _longrope(rope: Values, values: Values) -> RopeScaling:
    return RopeScaling(
        "longrope",
        max(1.0, _factor(rope, values)),
        _original(rope, values),
        attention_factor=rope.number_or_none("attention_factor", above=0, most=FLOAT32),
        short_factors=tuple(rope.several("short_factor")),
        long_factors=tuple(rope.several("long_factor")),
    )


def _factor(rope: Values, values: Values) -> float:
    given = rope.number_or_none("factor", above=0)
    return given or values.integer("max_position_embeddings") / _original(rope, values)


def _attention_factor(rope: Values, values: Values) -> float | None:
    """Returns the factor of yarn; None for the usual one."""
    given = rope.number_or_none("attention_factor", above=0, most=FLOAT32)
    both = [rope.number_or_none(name, least=0, most=FLOAT32) or 0 for name in ("mscale", "mscale_all_dim")]
    if given is not None or not all(both):
        return given
    above, below = (_grown(_factor(rope, values), mscale) for mscale in both)
    return above / below


def _grown(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def grown_scale(values: Values) -> float | None:
    """Returns what DeepSeek multiplies the scale of attention by for `mscale_all_dim`; None for nothing."""
    rope = _rope(values)
    all_dim = rope.number_or_none("mscale_all_dim", least=0, most=FLOAT32)
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
