"""The architectures that can be read, and what a config.json means in sizes of the built-in transformer.

A key that changes what is computed is either understood or refused; `inert.py` lists those that change nothing here.
A further architecture is a file in `families/` and its name in the table below.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.variant import Variant
from jaxfb.pretrained import fp8, mxfp4
from jaxfb.pretrained.family import Architecture, depths, refuse
from jaxfb.pretrained.inert import INERT
from jaxfb.pretrained.repository import download_hint, read_json
from jaxfb.pretrained.rope_keys import rope_keys, rope_sizes
from jaxfb.pretrained.values import Values
from jaxfb.refusal import Refused, shown
from jaxfb.registry import Registry

ARCHITECTURES: Registry[Architecture] = Registry(
    "architecture",
    {
        name: f"jaxfb.pretrained.families.{name}:{name.upper()}"
        for name in (
            *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
            *("phi3", "olmo2", "gemma", "gemma2", "gemma3_text", "smollm3", "gpt_oss", "deepseek_v3"),
        )
    },
)
"""`family.Architecture` by the `model_type` of a config.json."""

# fields of the transformer that change how it is trained, and not which numbers its weights give
_TRAINING = frozenset(
    "dropout attention context_attention sequence_parallel expert_overlap expert_buffer loss_chunk label_smoothing "
    "z_loss mtp_weight balance_coefficient batch_balance_coefficient batch_balance_layers router_z_coefficient "
    "expert_capacity".split()
)
_NONE = object()
# tokens for which transformers takes those of the published model where config.json has none: it would end a text at
# them, and load no vocabulary without them
_OWN_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OF_EXPERTS = frozenset(
    "experts_per_token expert_mlp_size shared_expert_size router_scores router_renormalize router_scale "
    "router_bias_rate".split()
)


def architecture_of(values: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a config.json names.

    Raises:
      ValueError: it names none, or one that cannot be read; or the weights are quantised.
    """
    kind = values.get("model_type")
    # before it is looked up: a name with a colon would be imported
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise Refused(
            f"[hf] model_type={shown(kind)} cannot be read; it must be one of {', '.join(ARCHITECTURES)}"
        )
    is_read = fp8.is_used(values) or (kind == "gpt_oss" and mxfp4.is_used(values))
    quantised = Values(values).section("quantization_config")
    if quantised and not is_read:
        method = quantised.get("quant_method", "an unknown method")
        raise Refused(f"[hf] the weights are quantised ({method}); use the model's bfloat16 or float32 files")
    return ARCHITECTURES[kind]


def table() -> str:
    """Returns the table of docs/pretrained.md: every architecture, its models and what it is compared with."""
    rows = [f"| `{name}` | {found.models} | {found.tested} |" for name, found in ARCHITECTURES.items()]
    return "\n".join(["| `model_type` | models | compared with |", "|---|---|---|", *rows])


def sizes_of(values: Mapping[str, Any]) -> TransformerConfig:
    """Returns the transformer that a config.json describes.

    Raises:
      ValueError: an unknown architecture, a missing key, or keys that are unknown or whose value is not supported.
    """
    found, values = architecture_of(values), Values(values)
    values.get("quantization_config")  # one that is not refused: the weights are read as if there were none
    try:
        fields = {**_common(found, values), **found.sizes(values)}
        variant = Variant(**{"activation": _activation(found, values), **fields.pop("variant", {})})
        sizes = TransformerConfig(**fields, variant=variant)
    except KeyError as error:
        raise Refused(f"[hf] config.json of a {found.model_type} model must have {error.args[0]!r}") from None
    if unknown := [name for name in values.unread() if name not in INERT]:
        raise Refused(
            f"[hf] config.json of this {found.model_type} model has keys that are not known here and may change what "
            f"it computes: {', '.join(sorted(unknown))}"
        )
    return sizes


def _common(found: Architecture, values: Values) -> dict[str, Any]:
    """Returns the fields whose keys all architectures have."""
    refuse(values, is_causal=True)  # transformers reads it in every model
    heads = values.integer("num_attention_heads")
    return {
        "vocab_size": values.integer("vocab_size"),
        "num_layers": values.integer("num_hidden_layers"),
        "hidden_size": values.integer("hidden_size"),
        "mlp_size": values.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": values.integer_or_none("num_key_value_heads") or heads,
        "head_size": values.integer_or_none("head_dim"),
        "norm_eps": values.number("rms_norm_eps", above=0),
        "tied_embeddings": values.flag("tie_word_embeddings"),
        **({} if found.rope_by_type else rope_sizes(values, found.default_theta, found.rope_in_part)),
    }


def _activation(found: Architecture, values: Values) -> str:
    usual = next(iter(found.activations))
    given = values.get("hidden_act", usual)
    if not isinstance(given, str) or given not in found.activations:
        refuse(values, hidden_act=usual)
    return found.activations[given]


def sizes_in(directory: str | Path) -> TransformerConfig:
    """Returns the transformer that config.json of a directory of Hugging Face files describes; no weights are read.

    Raises:
      ValueError: there is no config.json, or it describes a model that cannot be read.
    """
    path = Path(directory)
    if not os.path.isfile(path / "config.json"):  # unlike pathlib's, False for what cannot be a name
        raise Refused(
            f"[model] from={shown(str(path))} must be a directory with config.json and *.safetensors"
            f"{download_hint(path)}"
        )
    return sizes_of(read_json(path / "config.json"))


def with_depths(sizes: TransformerConfig, values: Mapping[str, Any]) -> TransformerConfig:
    """Returns the sizes with the layers of multi-token prediction that a config.json counts.

    `sizes_of` leaves them out, as transformers does: the model computes its own tokens' logits without them.
    """
    return replace(sizes, mtp_depth=depths(values)) if sizes.mtp_as_published else sizes


def describe(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns a config.json of the architecture that computes what this transformer computes.

    That is the first whose config.json, read again, gives the same transformer.

    Raises:
      ValueError: no architecture in the list has all of its parts.
    """
    missing: list[list[str]] = []
    for _, architecture in ARCHITECTURES.items():
        values = _keys(architecture, sizes)
        lost = _lost(sizes, values) + _unloadable(architecture, sizes)
        if not lost:
            return values
        missing.append(lost)
    raise Refused(
        f"[hf] no architecture of transformers listed here has {', '.join(min(missing, key=len))}; "
        "it stays a jaxfb run"
    )


def _keys(architecture: Architecture, sizes: TransformerConfig) -> dict[str, Any]:
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": sizes.vocab_size,
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.mlp_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_size,
        "hidden_act": _hidden_act(architecture, sizes),
        "rms_norm_eps": sizes.norm_eps,
        "tie_word_embeddings": sizes.tied_embeddings,
        "rope_parameters": rope_keys(sizes),
        **dict.fromkeys(_OWN_TOKENS),
        **architecture.keys(sizes),
    }


def _hidden_act(architecture: Architecture, sizes: TransformerConfig) -> str:
    """Returns the name of the activation, or of the architecture's own where it has no other."""
    names = {ours: theirs for theirs, ours in reversed(list(architecture.activations.items()))}
    return names.get(sizes.variant.activation, next(iter(architecture.activations)))


def _lost(sizes: TransformerConfig, values: Mapping[str, Any]) -> list[str]:
    """Returns the fields, with their values, that are others when a config.json is read again."""
    try:
        again = with_depths(sizes_of(values), values)
    except Refused:
        again = None
    ignored = _TRAINING | ({"mlp_size"} if sizes.num_experts else _OF_EXPERTS)
    ignored |= set() if sizes.mtp_depth else {"mtp_as_published"}
    wanted, got = _plain(sizes), {} if again is None else _plain(again)
    return [
        f"{name}={value}"
        for name, value in wanted.items()
        if name not in ignored and got.get(name, _NONE) != value
    ]


def _unloadable(architecture: Architecture, sizes: TransformerConfig) -> list[str]:
    """Returns the fields with which transformers loads no model of the architecture."""
    is_refused = architecture.divided_width and sizes.hidden_size % sizes.num_heads
    return [f"hidden_size={sizes.hidden_size} with num_heads={sizes.num_heads}"] if is_refused else []


def _plain(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the fields, those of the variant among them."""
    variant = {f"variant.{name}": value for name, value in vars(sizes.variant).items()}
    return {**{name: value for name, value in vars(sizes).items() if name != "variant"}, **variant}
