"""Weights of 4 bits are read as the numbers that they stand for, whole and in parts, and written in 16 bits."""

import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, mxfp4, open_repository, sizes_of

MODEL = dict(
    model_type="gpt_oss", vocab_size=8, hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=4,
    num_attention_heads=2, num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0}, sliding_window=4,
)  # fmt: skip


def test_every_code_and_exponent():
    """A loop over the numbers of a format with one sign, two exponent and one mantissa bit."""
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 4, 4, 16)
    scales = np.arange(118, 134, dtype=np.uint8).reshape(1, 4, 4)
    found = mxfp4.numbers(blocks, scales)
    assert found.shape == (1, 128, 4) and found.dtype == ml_dtypes.bfloat16
    for out in range(4):
        for place in range(128):
            byte = int(blocks[0, out, place // 32, place % 32 // 2])
            code = byte >> 4 if place % 2 else byte & 15
            exponent, mantissa = (code >> 1) & 3, code & 1
            value = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
            signed = (-1) ** (code >> 3) * value * 2.0 ** (int(scales[0, out, place // 32]) - 127)
            assert float(found[0, place, out]) == signed


@pytest.fixture
def packed(tmp_path):
    """A model in 16 bits, and the same directory with its experts in 4 bits."""
    sizes, draw = sizes_of(MODEL), np.random.default_rng(0)
    params = init_params(sizes, jax.random.key(0), jnp.bfloat16)
    export_model(tmp_path / "wide", params, MODEL)
    wide = open_repository(tmp_path / "wide")
    tensors = {}
    for name in wide.tensors:
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, into, out = wide.tensors[name][1]
            blocks = draw.integers(0, 256, (experts, out, into // 32, 16)).astype(np.uint8)
            tensors |= {f"{name}_blocks": blocks}
            tensors |= {f"{name}_scales": draw.integers(120, 128, blocks.shape[:-1]).astype(np.uint8)}
        else:
            tensors[name] = wide.read(name)
    (tmp_path / "packed").mkdir()
    save_file(tensors, tmp_path / "packed" / "model.safetensors")
    config = {
        **MODEL,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    return tmp_path / "packed"


@pytest.mark.slow
def test_a_directory_is_read_in_parts_and_exported_in_16_bits(packed, tmp_path):
    repository = open_repository(packed)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    assert repository.tensors[name][1:] == ((3, 32, 128), "MXFP4")
    whole = repository.read(name)
    for part in ((slice(1, 3),), (slice(0, 1), slice(3, 20)), (slice(None), slice(4, 9), slice(1, None, 2))):
        np.testing.assert_array_equal(repository.read(name, part), whole[part])
    sizes = sizes_of(repository.config)
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), jnp.bfloat16))
    params = load_params(repository, sizes, shapes)
    experts = params["layers"]["layer_1"]["moe"]["experts"]
    np.testing.assert_array_equal(experts["up"][0], whole[..., 1::2])
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    assert "quantization_config" not in again.config
    np.testing.assert_array_equal(again.read(name), whole)


def test_other_formats_and_architectures_are_refused():
    with pytest.raises(ValueError, match=r"quantised \(awq\)"):
        sizes_of({**MODEL, "quantization_config": {"quant_method": "awq"}})
    with pytest.raises(ValueError, match=r"quantised \(mxfp4\)"):
        sizes_of({**MODEL, "model_type": "llama", "quantization_config": {"quant_method": "mxfp4"}})
