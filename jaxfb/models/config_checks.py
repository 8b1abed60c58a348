"""Checks of the transformer's sizes, each a sentence with the nearest legal choice. Plain Python."""

from __future__ import annotations

import math
from dataclasses import fields
from math import isqrt
from typing import TYPE_CHECKING

from jaxfb.models.latent import Latent
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.variant import Variant
from jaxfb.refusal import FLOAT32, INT32, Refused, boolean, instance, integer, number, shown

if TYPE_CHECKING:
    from jaxfb.models.config import TransformerConfig

# the first two are each traced or initialised by itself
_MOST = {"num_layers": 10_000, "mtp_depth": 100, "dropout": math.inf, "label_smoothing": math.inf}

ROUTER_SCORES = ("softmax", "sigmoid")
BALANCED_LAYERS = ("each", "together")
ATTENTION_BACKENDS = ("auto", "xla", "cudnn", "splash")
CONTEXT_ATTENTION = ("auto", "ring", "all_gather", "all_to_all")


def check_types(config: TransformerConfig) -> None:
    """Refuses a number of another kind, NaN and infinity, what is neither a flag nor text."""
    for one in fields(config):
        name, value, kind = one.name, getattr(config, one.name), str(one.type)
        if value is None and (one.default is None or "None" in kind):
            continue
        if kind.startswith("int"):
            integer(name, value, who="[model]", least=0, most=_MOST.get(name, INT32))
        elif kind.startswith("float"):
            number(name, value, who="[model]", most=_MOST.get(name, FLOAT32))
        elif kind.startswith("bool"):
            boolean(name, value, who="[model]")
        elif kind.startswith("str"):
            instance(name, value, str, "a string", who="[model]")
        elif name == "latent":
            instance(name, value, Latent, "a jaxfb.models.latent.Latent, or None", who="[model]")
        elif name == "variant":
            instance(name, value, Variant, "a jaxfb.models.variant.Variant", who="[model]")
        elif name == "rope_scaling":
            instance(
                name, value, RopeScaling, "a jaxfb.models.rope_scaling.RopeScaling, or None", who="[model]"
            )


def check_positive(config: TransformerConfig, names: tuple[str, ...]) -> None:
    """Refuses sizes that are given and not above 0."""
    for name in names:
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            least = {
                "hidden_size": 2 * (config.num_heads or 1),
                "head_size": 2,
                "rope_theta": 10_000.0,
                "norm_eps": 1e-5,
            }
            use = least.get(name, 1)
            raise Refused(
                f"[model] {name}={getattr(config, name)} must be positive; use {use}", [{name: use}]
            )


def check_rate(name: str, rate: float, who: str = "[model]") -> None:
    """Refuses a rate outside [0, 1)."""
    if not 0 <= rate < 1:
        raise Refused(f"{who} {name}={rate} must be at least 0 and below 1; use 0 for none", [{name: 0.0}])


def check_head_size_derives(config: TransformerConfig) -> None:
    """Refuses a width that the heads do not divide, where no head_size is given."""
    width, heads = config.hidden_size, config.num_heads
    if width % heads:
        below = width - width % (2 * heads)  # heads of an even size, as rotary positions need
        legal = [size for size in (below, below + 2 * heads) if size]
        raise Refused(
            f"[model] hidden_size={width} must be a multiple of num_heads={heads} unless head_size is given; "
            f"use hidden_size={' or '.join(map(str, legal))}",
            [{"hidden_size": size} for size in legal],
        )


def check_heads(config: TransformerConfig) -> None:
    """Refuses heads that do not fit: key and value heads, an odd size, what latent attention lacks."""
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    if heads % kv_heads:
        small = [n for n in range(1, isqrt(heads) + 1) if heads % n == 0]
        nearest = min({*small, *(heads // n for n in small)}, key=lambda n: (abs(n - kv_heads), n))
        raise Refused(
            f"[model] num_heads={heads} must be a multiple of num_kv_heads={kv_heads}; "
            f"use num_kv_heads={nearest}",
            [{"num_kv_heads": nearest}],
        )
    if size % 2:
        raise Refused(
            f"[model] head_size={size} must be even for rotary positions; use {size + 1}",
            [{"head_size": size + 1}],
        )
    config.variant.rotary_size(size)
    if config.latent:
        _check_latent(config, config.latent)


def check_factors(config: TransformerConfig) -> None:
    """Refuses factors of rotary positions that are not one for each pair of a head that turns."""
    latent, size = config.latent, config.head_size
    turned = latent.rotary_size if latent else config.variant.rotary_size(size)
    for one in (config, *config.pattern, *config.leading):
        if one.rope_scaling is not None:
            one.rope_scaling.check_pairs(turned // 2)


def _check_latent(config: TransformerConfig, latent: Latent) -> None:
    latent.check_head(config.head_size)
    without = {"num_kv_heads": config.num_heads, "qkv_bias": False, "qk_norm": False}
    for name, wanted in without.items():
        if getattr(config, name) != wanted:
            raise Refused(
                f"[model] {name}={getattr(config, name)} does not go with latent attention; use {wanted}",
                [{name: wanted}],
            )
    plain = Variant()
    for name in ("attention_sinks", "output_bias", "rotary_share"):
        if getattr(config.variant, name) != getattr(plain, name):
            raise Refused(
                f"[model] variant.{name}={getattr(config.variant, name)} does not go with latent attention; use "
                f"{getattr(plain, name)}",
                [{name: getattr(plain, name)}],
            )


def check_choices(config: TransformerConfig) -> None:
    """Refuses a dropout rate outside [0, 1) and unknown names of attention."""
    check_rate("dropout", config.dropout)
    for name, legal in (("attention", ATTENTION_BACKENDS), ("context_attention", CONTEXT_ATTENTION)):
        _check_word(config, name, legal)


def _check_word(config: TransformerConfig, name: str, legal: tuple[str, ...]) -> None:
    if getattr(config, name) not in legal:
        raise Refused(
            f"[model] {name}={shown(getattr(config, name))} must be one of {', '.join(legal)}",
            [{name: one} for one in legal],
        )


def check_loss(config: TransformerConfig) -> None:
    """Refuses settings of the loss outside their ranges."""
    check_rate("label_smoothing", config.label_smoothing)
    balance = ("balance_coefficient", "batch_balance_coefficient", "router_bias_rate", "router_z_coefficient")
    for name in ("z_loss", "mtp_depth", "mtp_weight", *balance, "num_experts", "shared_expert_size"):
        if getattr(config, name) < 0:
            raise Refused(
                f"[model] {name}={getattr(config, name)} must not be negative; use 0 for none", [{name: 0}]
            )
    without = dict.fromkeys(("logit_softcap", "expert_capacity", "window"), "none")
    for name, null in (without | {"expert_buffer": "space for all rows"}).items():
        if getattr(config, name) is not None and not getattr(config, name) > 0:
            raise Refused(
                f"[model] {name}={getattr(config, name)} must be positive; use null for {null}",
                [{name: None}],
            )


def _check_groups(config: TransformerConfig) -> None:
    groups, best, number = config.router_groups, config.router_top_groups, config.num_experts
    if groups > 1 and (number % groups or number // groups < 2):
        raise Refused(
            f"[model] num_experts={number} must be a multiple of router_groups={groups} and at least twice as "
            "many; use router_groups=1",
            [{"router_groups": 1, "router_top_groups": 1}],
        )
    if not 1 <= best <= groups:
        raise Refused(
            f"[model] router_top_groups={best} must be from 1 to router_groups={groups}; use {groups}",
            [{"router_top_groups": groups}],
        )
    if config.experts_per_token > best * (number // groups):
        raise Refused(
            f"[model] experts_per_token={config.experts_per_token} must be at most the {best * (number // groups)} "
            f"experts of router_top_groups={best} groups; use router_top_groups={groups}",
            [{"router_top_groups": groups}],
        )


def check_experts(config: TransformerConfig) -> None:
    """Refuses experts, groups and a router that do not fit each other."""
    check_positive(config, ("experts_per_token", "expert_mlp_size", "router_scale", "router_groups"))
    if config.experts_per_token > config.num_experts:
        raise Refused(
            f"[model] experts_per_token={config.experts_per_token} must be at most num_experts="
            f"{config.num_experts}; use experts_per_token={config.num_experts}",
            [{"experts_per_token": config.num_experts}],
        )
    _check_groups(config)
    for name, legal in (("router_scores", ROUTER_SCORES), ("batch_balance_layers", BALANCED_LAYERS)):
        _check_word(config, name, legal)
