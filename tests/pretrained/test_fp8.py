"""Weights of 8 bits are read as their numbers times the scale of their block, whole and in parts, and written in 16."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of

GOLDEN = Path(__file__).parent.parent / "golden" / "hf_qwen3_tiny"
BLOCK = (16, 10)  # neither divides all of the matrices
DTYPES = {"float8_e4m3fn": "F8_E4M3", "float32": "F32", "bfloat16": "BF16"}


def save(file, tensors):
    """The format by hand: the library's numpy part has no 8 bits."""
    header, at = {}, 0
    for name, value in tensors.items():
        header[name] = {"dtype": DTYPES[str(value.dtype)], "shape": list(value.shape)}
        header[name]["data_offsets"] = [at, at := at + value.nbytes]
    text = json.dumps(header).encode()
    content = [np.ascontiguousarray(value).tobytes() for value in tensors.values()]
    file.write_bytes(b"".join([len(text).to_bytes(8, "little"), text, *content]))


@pytest.fixture
def packed(tmp_path):
    """The tensors of a tiny model with its projections in 8 bits, and what those stand for, number by number."""
    draw, source = np.random.default_rng(0), open_repository(GOLDEN)
    stored, meant = {}, {}
    for name in source.tensors:
        value = source.read(name)
        if not name.endswith("_proj.weight"):
            stored[name] = meant[name] = value.astype(ml_dtypes.bfloat16)
            continue
        scales = draw.uniform(0.5, 2, [math.ceil(n / of) for n, of in zip(value.shape, BLOCK, strict=True)])
        stored[name], scales = value.astype(ml_dtypes.float8_e4m3fn), scales.astype(np.float32)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = np.empty(value.shape, ml_dtypes.bfloat16)
        for row, column in np.ndindex(*value.shape):
            scale = scales[row // BLOCK[0], column // BLOCK[1]]
            meant[name][row, column] = np.float32(stored[name][row, column]) * scale
    save(tmp_path / "model.safetensors", stored)
    how = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK),
    }
    change(tmp_path, {**source.config, "quantization_config": how})
    return tmp_path, meant


def change(directory, values):
    (directory / "config.json").write_text(json.dumps(values))


def test_matrices_are_read_whole_and_in_parts(packed):
    directory, meant = packed
    found = open_repository(directory)
    assert set(found.tensors) == set(meant)
    for name, value in meant.items():
        np.testing.assert_array_equal(found.read(name), value)
    name = "model.layers.1.mlp.down_proj.weight"
    part = (slice(3, 21), slice(7, 33))
    np.testing.assert_array_equal(found.read(name, part), meant[name][part])


def test_such_a_model_is_loaded_and_exported_in_16_bits(packed, tmp_path):
    directory, meant = packed
    found = open_repository(directory)
    sizes = sizes_of(found.config)
    params = load_params(
        found, sizes, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), jnp.bfloat16))
    )
    export_model(tmp_path / "out", params, found.config)
    again = open_repository(tmp_path / "out")
    assert "quantization_config" not in again.config
    for name, value in meant.items():
        np.testing.assert_array_equal(again.read(name), value)


def test_scales_of_other_blocks_or_of_whole_matrices_are_refused(packed):
    directory, _ = packed
    config = json.loads((directory / "config.json").read_text())
    how = config["quantization_config"]
    change(directory, {**config, "quantization_config": {**how, "weight_block_size": [8, 8]}})
    found = open_repository(directory)
    shapes = jax.eval_shape(lambda: init_params(sizes_of(found.config), jax.random.key(0)))
    with pytest.raises(ValueError, match=r"weight_scale_inv: unexpected"):
        load_params(found, sizes_of(found.config), shapes)
    change(directory, {**config, "quantization_config": {**how, "weight_block_size": None}})
    with pytest.raises(ValueError, match=r"quantised \(fp8\)"):
        sizes_of(open_repository(directory).config)
