"""Reads and writes windows of some layers, and other keys of config.json, with the logits of transformers."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import logits

from jaxfb.models.pattern import stack_of
from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.pretrained.architectures import describe
from jaxfb.pretrained.layer_types import layers_in
from jaxfb.pretrained.repository import Repository

GOLDEN = Path(__file__).parent.parent / "golden"
FILES = ("hf_layer_kinds.json", "hf_changed_keys.json")
CASES = [case for name in FILES for case in json.loads((GOLDEN / name).read_text())["cases"]]
SLOW = {"qwen2_window", "mixtral_window", "mistral_window", "qwen3_moe_window", "gelu_tanh"}
BY_NAME = pytest.mark.parametrize(
    "case", [pytest.param(c, id=c["name"], marks=[pytest.mark.slow] * (c["name"] in SLOW)) for c in CASES]
)
all_logits = jax.jit(logits, static_argnums=0)


def loaded(case, dtype=jnp.float64):
    repository = open_repository(GOLDEN / case["inputs"]["model_dir"])
    repository = Repository(
        repository.path, {**repository.config, **case["inputs"]["config"]}, repository.tensors
    )
    sizes = sizes_of(repository.config)
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), dtype))
    return repository, sizes, load_params(repository, sizes, shapes)


@BY_NAME
def test_logits_are_those_of_transformers(case):
    _, sizes, params = loaded(case)
    ours = all_logits(sizes, params, {"tokens": np.asarray(case["inputs"]["input_ids"])})
    picked = np.asarray(ours)[:, case["inputs"]["positions"]]
    np.testing.assert_allclose(picked, case["expected"]["logits"], rtol=0, atol=5e-5)


@BY_NAME
def test_a_round_trip_is_bitwise_and_a_description_is_read_as_the_same_stack(case, tmp_path):
    repository, sizes, params = loaded(case, jnp.float32)
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    assert set(again.tensors) == set(repository.tensors)
    chex.assert_trees_all_equal(load_params(again, sizes_of(again.config), params), params)
    for name in again.tensors:
        np.testing.assert_array_equal(again.read(name), repository.read(name))
    written = sizes_of(describe(sizes))
    assert stack_of(written).period == stack_of(sizes).period
    assert stack_of(written).leading == stack_of(sizes).leading


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"layer_types": ["full_attention", "linear_attention"]}, "'linear_attention'.* are not supported"),
        ({"layer_types": ["full_attention"]}, "has 1 entries for num_hidden_layers=2 layers"),
        ({"layer_types": ["sliding_attention"] * 2}, "use_sliding_window is false or sliding_window null"),
    ],
)
def test_layers_of_other_types_are_refused(keys, sentence):
    config = json.loads((GOLDEN / "hf_qwen2_tiny" / "config.json").read_text())
    with pytest.raises(ValueError, match=sentence):
        sizes_of({**config, **keys})


@pytest.mark.parametrize("of_local", [{}, {"rope_type": "linear", "factor": 2.0}])
def test_each_kind_of_gemma_3_has_its_own_scaling(of_local):
    values = json.loads((GOLDEN / "hf_gemma3_tiny" / "config.json").read_text())
    values["rope_parameters"]["sliding_attention"] |= of_local
    found = stack_of(sizes_of(values)).period
    assert {layer.window: (layer.rope_scaling and layer.rope_scaling.factor) for layer in found} == {
        5: of_local.get("factor"),
        None: 8.0,
    }
    if not of_local:  # as Gemma 3 was published
        del values["rope_parameters"]
        older = {
            "rope_theta": 1e5,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        }
        assert stack_of(sizes_of(values | older)).period == found
    values["rope_parameters"] = {
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0},
        "full_attention": {"rope_theta": 1e5, "rope_type": "default"},
    }
    assert [layer.rope_scaling is None for layer in stack_of(sizes_of(values)).period] == [True, False]


def test_the_pattern_of_gemma_3_has_one_name():
    values = json.loads((GOLDEN / "hf_gemma3_tiny" / "config.json").read_text())
    del values["layer_types"]
    windows = [one.window for one in layers_in(sizes_of({**values, "_sliding_window_pattern": 2}))]
    assert windows == [5] * 5  # of six layers the last would have none
    windows = [one.window for one in layers_in(sizes_of({**values, "sliding_window_pattern": 2}))]
    assert windows == [5, None, 5, None, 5]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss"])
def test_a_description_without_windows_has_the_width_of_one_for_transformers(name):
    values = json.loads((GOLDEN / f"hf_{name}_tiny" / "config.json").read_text())
    sizes = sizes_of({**values, "layer_types": ["full_attention"] * values["num_hidden_layers"]})
    found = describe(sizes)
    assert found["model_type"] == values["model_type"] and set(found["layer_types"]) == {"full_attention"}
    assert isinstance(found.get("sliding_window", 4096), int)  # null makes its mask of local layers fail
    assert sizes_of(found) == sizes
