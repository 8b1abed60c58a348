"""A key of config.json of a wrong type is refused in a sentence that names it; none leads to another error."""

import copy
import json
from pathlib import Path

import pytest

from jaxfb.pretrained import sizes_of
from jaxfb.pretrained.architectures import ARCHITECTURES, with_depths
from jaxfb.refusal import Refused

GOLDEN = Path(__file__).parent.parent / "golden"
NAMES = [
    *("llama31", "mistral", "mixtral", "qwen2", "qwen3_yarn", "qwen3_moe_sparse", "phi4", "olmo2", "gemma"),
    *("gemma2", "gemma3", "smollm3", "gpt_oss", "deepseek_v3_yarn"),
]
WRONG = (None, True, "x", "2", -1, 0, 1.5, float("nan"), 10**400, [], [1], [[]], {}, {"a": 1})
ABSENT = (
    *(
        "rope_scaling",
        "rope_theta",
        "quantization_config",
        "layer_types",
        "head_dim",
        "partial_rotary_factor",
    ),
    *("sliding_window", "use_sliding_window", "num_nextn_predict_layers", "mlp_only_layers", "num_experts"),
    *("original_max_position_embeddings", "hidden_activation", "sliding_window_pattern"),
)
SCALINGS = (
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "longrope", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3, "attention_factor": 1.1},
    {"rope_type": "yarn", "factor": 2.0, "beta_slow": 1, "beta_fast": 2, "mscale": 1, "mscale_all_dim": 2},
)


def config(name):
    return json.loads((GOLDEN / f"hf_{name}_tiny" / "config.json").read_text())


def places(values, above=()):
    for key, value in values.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from places(value, (*above, key))


def changed(values, place, value):
    found = copy.deepcopy(values)
    inner = found
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return found


def check_every_wrong_value(values, wanted):
    for place in wanted:
        for value in WRONG:
            given = changed(values, place, value)
            try:
                with_depths(sizes_of(given), given)
            except Refused as refused:
                assert "\n" not in str(refused)
            except Exception as error:
                raise AssertionError(f"{'.'.join(place)}={value!r} gives {error!r}") from error


def test_every_architecture_is_among_them():
    assert {config(name)["model_type"] for name in NAMES} == set(ARCHITECTURES)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_value_of_a_key_is_refused_or_read(name):
    values = config(name)
    check_every_wrong_value(values, [*places(values), *((key,) for key in ABSENT if key not in values)])


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda one: one["rope_type"])
def test_a_wrong_value_of_a_scaling_is_refused_or_read(scaling):
    values = {**config("llama31"), "rope_parameters": {**scaling, "original_max_position_embeddings": 8}}
    assert sizes_of(values).rope_scaling
    check_every_wrong_value(values, [("rope_parameters", key) for key in scaling])


@pytest.mark.parametrize(
    "name, key, value, rule",
    [
        ("llama31", "hidden_act", [], r"hidden_act=\[\] is not supported; only hidden_act='silu' is"),
        ("llama31", "rope_parameters", "x", "rope_parameters must be an object, got 'x'"),
        ("llama31", "quantization_config", "x", "quantization_config must be an object, got 'x'"),
        ("llama31", "num_hidden_layers", "2", "num_hidden_layers must be a positive integer, got '2'"),
        ("llama31", "num_hidden_layers", 1.5, "num_hidden_layers must be a positive integer, got 1.5"),
        ("gemma", "hidden_size", None, "hidden_size must be a positive integer, got None"),
        (
            "gemma2",
            "query_pre_attn_scalar",
            0,
            "query_pre_attn_scalar must be a finite number above 0, got 0",
        ),
        ("gemma2", "layer_types", 5, "layer_types must be a list, got 5"),
        ("smollm3", "no_rope_layers", 5, "no_rope_layers must be a list, got 5"),
        ("smollm3", "no_rope_layers", [1, 0, 1, 0, 2], "no_rope_layers must be a list of 0 and 1"),
        (
            "mixtral",
            "router_aux_loss_coef",
            None,
            "router_aux_loss_coef must be a finite number of at least 0",
        ),
        ("deepseek_v3_yarn", "qk_rope_head_dim", "4", "qk_rope_head_dim must be a positive integer, got '4'"),
        ("deepseek_v3_yarn", "num_nextn_predict_layers", "1", "num_nextn_predict_layers must be an integer"),
        (
            "qwen3_moe_sparse",
            "decoder_sparse_step",
            0,
            "decoder_sparse_step must be a positive integer, got 0",
        ),
        (
            "qwen3_moe_sparse",
            "mlp_only_layers",
            ["0"],
            r"mlp_only_layers\[0\] must be an integer that is not",
        ),
    ],
)
def test_the_sentence_names_the_file_and_the_key(name, key, value, rule):
    with pytest.raises(Refused, match=rf"^\[hf\] config.json: {rule}"):
        sizes_of({**config(name), key: value})


@pytest.mark.parametrize(
    "name, key",
    [
        ("llama31", "tie_word_embeddings"),
        ("llama31", "attention_bias"),
        ("llama31", "mlp_bias"),
        ("qwen2", "use_sliding_window"),
        ("qwen3_moe_sparse", "norm_topk_prob"),
        ("qwen3_moe_sparse", "output_router_logits"),
        ("gemma", "tie_word_embeddings"),
        ("gemma3", "use_bidirectional_attention"),
        ("smollm3", "tie_word_embeddings"),
        ("deepseek_v3_yarn", "rope_interleave"),
    ],
)
def test_a_text_is_no_boolean(name, key):
    with pytest.raises(Refused, match=f"config.json: {key} must be True or False, got 'false'"):
        sizes_of({**config(name), key: "false"})


def test_null_is_false():
    assert not sizes_of({**config("qwen2"), "tie_word_embeddings": None}).tied_embeddings
