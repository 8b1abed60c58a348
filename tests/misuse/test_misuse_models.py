"""Sizes of a model, settings of its data and its loader with one wrong argument."""

import pytest
from legal import boolean, either, functions, integers, maybe, nothing, numbers, one_of, positive_int, texts
from wrong import Call, pool

from jaxfb.data.config import DataConfig, SourceConfig
from jaxfb.data.loader import Loader
from jaxfb.models.config import TransformerConfig
from jaxfb.models.config_checks import ATTENTION_BACKENDS, CONTEXT_ATTENTION
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind
from jaxfb.models.rope_scaling import KINDS, RopeScaling
from jaxfb.models.variant import ACTIVATIONS, NORMS, QK_NORM_OVER, Variant
from jaxfb.refusal import FLOAT32
from tests.data.test_loader import numbered_rows

COUNT, POSITIVE = integers(0), numbers(above=0, most=FLOAT32)
COEFFICIENT, SHARE = numbers(0, FLOAT32), numbers(0, below=1)


def paths(value):
    """A path, or several."""
    return texts(value) or (isinstance(value, list | tuple) and all(map(texts, value)))


def empty(value):
    """A list of no kinds."""
    return isinstance(value, list | tuple) and not len(value)


CALLS = [
    Call(
        "TransformerConfig",
        TransformerConfig,
        lambda: dict(vocab_size=32, num_layers=2, hidden_size=16, num_heads=4, num_experts=4),
        {
            **dict.fromkeys(
                ("vocab_size", "num_layers", "hidden_size", "num_heads", "loss_chunk"), positive_int
            ),
            **dict.fromkeys(
                ("mlp_size", "num_kv_heads", "head_size", "expert_mlp_size", "window"), maybe(positive_int)
            ),
            **dict.fromkeys(("mtp_depth", "num_experts", "shared_expert_size"), COUNT),
            "experts_per_token": integers(1, 4),
            **dict.fromkeys(("norm_eps", "router_scale"), POSITIVE),
            **dict.fromkeys(("rope_theta", "logit_softcap", "expert_capacity"), maybe(POSITIVE)),
            **dict.fromkeys(("pattern", "leading"), empty),
            **dict.fromkeys(("dropout", "label_smoothing"), SHARE),
            **dict.fromkeys(("z_loss", "mtp_weight", "balance_coefficient"), COEFFICIENT),
            **dict.fromkeys(
                ("batch_balance_coefficient", "router_z_coefficient", "router_bias_rate"), COEFFICIENT
            ),
            **dict.fromkeys(("tied_embeddings", "qkv_bias", "qk_norm", "sequence_parallel"), boolean),
            "router_renormalize": boolean,
            "attention": one_of(ATTENTION_BACKENDS),
            "context_attention": one_of(CONTEXT_ATTENTION),
            "router_scores": one_of(("softmax", "sigmoid")),
            "batch_balance_layers": one_of(("each", "together")),
            "rope_scaling": maybe(nothing),
            "variant": nothing,
            "latent": maybe(nothing),
            "router_bias": boolean,
            "router_groups": integers(1, 1),
            "router_top_groups": integers(1, 1),
        },
        {"mlp_size": "mlp_size|expert_mlp_size"},
    ),
    Call(
        "LayerKind",
        LayerKind,
        dict,
        {
            "layers": integers(1, 1000),
            "window": maybe(positive_int),
            "rope_theta": maybe(POSITIVE),
            "rope_scaling": maybe(nothing),
            **dict.fromkeys(("rope", "experts"), boolean),
        },
    ),
    Call(
        "Latent",
        Latent,
        lambda: dict(key_value_rank=4, rotary_size=4, value_size=4),
        {
            **dict.fromkeys(("key_value_rank", "value_size"), positive_int),
            "rotary_size": lambda value: positive_int(value) and value % 2 == 0,
            "query_rank": maybe(positive_int),
            "interleaved": boolean,
        },
    ),
    Call(
        "Variant",
        Variant,
        dict,
        {
            "activation": one_of(ACTIVATIONS),
            "norms": one_of(NORMS),
            "qk_norm_over": one_of(QK_NORM_OVER),
            **dict.fromkeys(("norm_offset", "attention_sinks", "output_bias", "mlp_bias"), boolean),
            **dict.fromkeys(("embedding_scale", "attention_scale", "attention_softcap"), maybe(POSITIVE)),
            "rotary_share": numbers(above=0, most=1),
        },
    ),
    Call(
        "RopeScaling",
        RopeScaling,
        lambda: dict(kind="yarn", factor=2.0, original_length=8),
        {
            "kind": one_of(KINDS),
            "factor": numbers(1),
            "truncate": boolean,
            "original_length": positive_int,
            "low_frequency_factor": numbers(above=0, below=4),
            "high_frequency_factor": numbers(above=1),
            "beta_slow": numbers(above=0, below=32),
            "beta_fast": numbers(above=1),
            "attention_factor": maybe(POSITIVE),
            **dict.fromkeys(("short_factors", "long_factors"), empty),
        },
        {"high_frequency_factor": "(high|low)_frequency_factor", "beta_fast": "beta_(fast|slow)"},
    ),
    Call(
        "DataConfig",
        DataConfig,
        lambda: dict(source="text", path="a.txt"),
        {
            "source": one_of(("text", "jsonl", "tokens", "parquet", "arrow")),
            "packing": one_of(("concat", "best_fit", "stream")),
            "sequence_length": integers(2),
            "vocab_size": integers(257),
            "held_out_fraction": SHARE,
            "seed": integers(0, 2**63 - 1),
            "max_bytes": maybe(integers(1, 2**63 - 1)),
            "tokenizer": texts,
            "text_field": texts,
            "cache_dir": maybe(texts),
            "path": lambda value: (
                texts(value) or (isinstance(value, list | tuple) and all(map(texts, value)))
            ),
            "held_out_path": maybe(paths),
        },
    ),
    Call(
        "SourceConfig",
        SourceConfig,
        lambda: dict(weight=1.0, source="text", path="a.txt"),
        {
            "weight": numbers(0),
            "source": one_of(("text", "jsonl", "tokens", "parquet", "arrow")),
            "held_out_fraction": SHARE,
        },
    ),
    Call(
        "Loader",
        lambda **given: Loader(numbered_rows(11), **given),
        lambda: dict(rows_per_update=3),
        {
            "rows_per_update": either(positive_int, functions),
            "seed": maybe(integers(0, 2**63 - 1)),
            "total_rows": maybe(integers(1, 2**63 - 1)),
            "remainder": one_of(("pad", "drop", "error")),
        },
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    assert not call.failures(pool(seed=14))
