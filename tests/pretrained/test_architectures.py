"""The registry of architectures: its table in the docs, keys that it does not know, parts of tensors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from jaxfb.pretrained import sizes_of
from jaxfb.pretrained.architectures import ARCHITECTURES, describe, table
from jaxfb.pretrained.names import Part
from jaxfb.pretrained.tensors import Every, Rows

ROOT = Path(__file__).parent.parent
LLAMA = json.loads((ROOT / "golden" / "hf_llama_tiny" / "config.json").read_text())


def test_the_docs_list_what_the_registry_does():
    assert table() in (ROOT.parent / "docs" / "pretrained.md").read_text()


def test_an_architecture_is_filed_under_its_own_name():
    assert all(found.model_type == name for name, found in ARCHITECTURES.items())


def test_unknown_keys_are_listed_and_those_that_are_off_or_inert_are_not():
    odd = {"residual_gain": 0.5, "twist": "left", "shift": None, "gated": False, "attention_dropout": 0.1}
    with pytest.raises(ValueError, match="may change what it computes: residual_gain, twist$"):
        sizes_of({**LLAMA, **odd})


@pytest.mark.parametrize("kind", ["os:getcwd", None, 3, ["llama"]])
def test_a_name_that_is_no_architecture_imports_nothing(kind):
    with pytest.raises(ValueError, match="must be one of llama, mistral"):
        sizes_of({**LLAMA, "model_type": kind})


@pytest.mark.parametrize("part", [(), (slice(1, 3),), (slice(0, 2), slice(2, 5))])
@pytest.mark.parametrize("place", [Rows("x", part=1, rows=lambda _: (2, 4, 3)), Every("x", first=1)])
def test_a_part_of_a_part_of_a_tensor(place, part):
    shape, cut = place.within((4, 6), None)
    whole = np.arange(np.prod(shape)).reshape(shape)
    own = Part("x", (), shape, cut)
    assert whole[cut].shape == (4, 6)
    np.testing.assert_array_equal(whole[own.within(part)], whole[cut][part])


@pytest.mark.parametrize(
    ("name", "dense"),
    [
        ("hf_qwen3_moe_sparse_tiny", {"mlp_only_layers": [0, 1, 2, 3, 4]}),
        ("hf_qwen3_moe_sparse_tiny", {"num_local_experts": 0}),
        ("hf_deepseek_v3_dense_tiny", {"first_k_dense_replace": 3}),
    ],
)
def test_a_mixture_whose_layers_are_all_dense_is_a_dense_model(name, dense):
    values = json.loads((ROOT / "golden" / name / "config.json").read_text())
    sizes = sizes_of({**values, **dense})
    assert (sizes.num_experts, sizes.leading, sizes.pattern) == (0, (), ())
    assert sizes_of(values).num_experts and (sizes.latent is None) == ("qwen" in name)


@pytest.mark.parametrize("value", [False, None, 0])
def test_a_model_that_sees_later_tokens_is_refused_though_the_key_is_off(value):
    assert sizes_of({**LLAMA, "is_causal": True}) == sizes_of(LLAMA)
    with pytest.raises(ValueError, match="is_causal=.* is not supported; only is_causal=True is"):
        sizes_of({**LLAMA, "is_causal": value})


def test_a_width_that_is_no_multiple_of_the_heads_is_described_where_transformers_loads_it():
    sizes = sizes_of({**LLAMA, "head_dim": 8})
    assert describe(sizes)["model_type"] == "llama"
    odd = replace(sizes, num_heads=5, num_kv_heads=5)
    assert odd.hidden_size % 5 and describe(odd)["model_type"] == "mistral"
    gemma = sizes_of(json.loads((ROOT / "golden" / "hf_gemma2_tiny" / "config.json").read_text()))
    with pytest.raises(ValueError, match=r"listed here has hidden_size=\d+ with num_heads=5;"):
        describe(replace(gemma, num_heads=5, num_kv_heads=5))


@pytest.mark.parametrize("name", ["hf_llama_tiny", "hf_phi3_tiny", "hf_smollm3_tiny", "hf_gemma_tiny"])
def test_a_description_has_no_tokens_of_another_model(name):
    values = describe(sizes_of(json.loads((ROOT / "golden" / name / "config.json").read_text())))
    assert all(values[key] is None for key in ("bos_token_id", "eos_token_id", "pad_token_id"))
