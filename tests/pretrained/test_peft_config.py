"""An adapter_config.json is read where its adapters add to the model's own weights, and otherwise refused."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxfb.models.adapted import LoRA, adapted
from jaxfb.models.transformer import init_params
from jaxfb.pretrained import sizes_of
from jaxfb.pretrained.architectures import architecture_of
from jaxfb.pretrained.peft import load_adapter, save_adapter
from jaxfb.refusal import Refused

CONFIG = json.loads((Path(__file__).parent.parent / "golden" / "hf_llama_tiny" / "config.json").read_text())
LORA_OF = LoRA(rank=2, targets=("query", "value"))
# every key that PEFT writes for LoRA, with its default, and those of earlier versions
WRITTEN = {
    **dict.fromkeys(
        "alora_invocation_tokens arrow_config auto_mapping corda_config eva_config exclude_modules kasa_config "
        "layer_replication layers_pattern layers_to_transform lora_ga_config megatron_config modules_to_save "
        "monteclora_config revision target_parameters trainable_token_indices use_bdlora velora_config "
        "enable_lora".split()
    ),
    **dict.fromkeys(
        "ensure_weight_tying fan_in_fan_out lora_bias use_dora use_qalora use_rslora merge_weights".split(),
        False,
    ),
    **{name: {} for name in ("alpha_pattern", "loftq_config", "rank_pattern")},
    "base_model_name_or_path": "base",
    "bias": "none",
    "inference_mode": True,
    "init_lora_weights": True,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "megatron_core": "megatron.core",
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 2,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}


@pytest.fixture(scope="module")
def params():
    shapes = jax.eval_shape(lambda: init_params(adapted(sizes_of(CONFIG), LORA_OF), jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)


@pytest.fixture
def directory(params, tmp_path):
    save_adapter(tmp_path / "adapter", params, LORA_OF, architecture_of(CONFIG), "base")
    return tmp_path / "adapter"


def read(directory, params, **changed):
    (directory / "adapter_config.json").write_text(json.dumps({**WRITTEN, **changed}))
    return load_adapter(directory, params, LORA_OF)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        *({"init_lora_weights": name} for name in (False, None, "gaussian", "eva", "orthogonal", "mica")),
        {"init_lora_weights": "Gaussian"},
        {"auto_mapping": {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}},
        {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
        {"lora_ga_config": {"direction": "ArB2r"}},  # as PEFT saves it after a conversion
        {"later_key": None, "other_key": {}},
    ],
    ids=str,
)
def test_what_peft_writes_is_read(directory, params, changed):
    assert read(directory, params, **changed)["layers"]["attention"]["query"]["lora_a"].shape


@pytest.mark.parametrize(
    "name", ["pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga", "later", 3, ["pissa"]]
)
def test_an_initialisation_that_changes_the_model_is_refused(directory, params, name):
    with pytest.raises(Refused, match="init_lora_weights=.* is not supported; only true, false, gaussian"):
        read(directory, params, init_lora_weights=name)


def test_unknown_keys_are_refused(directory, params):
    with pytest.raises(Refused, match="are not known here and may change .* computes: gate_scale, twist$"):
        read(directory, params, twist="left", gate_scale=0.5, off=False)


@pytest.mark.parametrize("key, value", [("r", "2"), ("r", None), ("lora_alpha", "16"), ("lora_alpha", [])])
def test_a_rank_and_an_alpha_are_numbers(directory, params, key, value):
    with pytest.raises(Refused, match=f"adapter_config.json: {key} must be a"):
        read(directory, params, **{key: value})


@pytest.mark.parametrize("text", ["{", "[]", "3", "[" * 10**5])
def test_a_config_that_is_no_object_is_refused(directory, params, text):
    (directory / "adapter_config.json").write_text(text)
    with pytest.raises(Refused, match="adapter_config.json (is not JSON|must be a JSON object)"):
        load_adapter(directory, params, LORA_OF)


@pytest.mark.parametrize("wrong", WRITTEN)
def test_a_wrong_value_of_a_key_is_refused_or_read(directory, params, wrong):
    for value in (None, True, "x", -1, 1.5, [], [[]], {}, {"a": 1}):
        try:
            read(directory, params, **{wrong: value})
        except Refused as refused:
            assert wrong in str(refused) or wrong in ("r", "lora_alpha")


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.bool_])
def test_adapters_that_are_no_floats_are_refused(directory, params, dtype):
    file = directory / "adapter_model.safetensors"
    save_file({name: value.astype(dtype) for name, value in load_file(file).items()}, file)
    with pytest.raises(Refused, match="has dtype .*, must be one of F64, F32, F16, BF16"):
        read(directory, params)
