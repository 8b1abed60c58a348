"""Which files of a directory hold the weights, and in which dtype each tensor is written."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.pretrained.companions import copy_companions
from jaxfb.pretrained.repository import INDEX, SINGLE
from jaxfb.refusal import Refused
from jaxfb.training import hugging_face

GOLDEN = Path(__file__).parent.parent / "golden"


def loaded(directory):
    repository = open_repository(directory)
    sizes = sizes_of(repository.config)
    return repository, load_params(
        repository, sizes, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
    )


def write_index(directory, weight_map):
    (directory / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def split(directory, repeated):
    """Writes the tensors as two files, of which the second has another value of one that the first has too."""
    tensors = load_file(directory / SINGLE)
    (directory / SINGLE).unlink()
    names = sorted(tensors)
    first = {name: tensors[name] for name in names[:3]}
    second = {name: tensors[name] for name in names[3:]} | {repeated: np.zeros_like(tensors[repeated])}
    save_file(first, directory / "a.safetensors")
    save_file(second, directory / "b.safetensors")
    return tensors, {name: "a.safetensors" if name in first else "b.safetensors" for name in names}


def test_the_single_file_comes_before_an_index_as_in_transformers(copied, tmp_path):
    tensors = load_file(copied / SINGLE)
    save_file({name: np.zeros_like(value) for name, value in tensors.items()}, copied / "a.safetensors")
    write_index(copied, dict.fromkeys(tensors, "a.safetensors"))
    repository, _ = loaded(copied)
    assert repository.files == [copied / SINGLE]
    np.testing.assert_array_equal(repository.read("lm_head.weight"), tensors["lm_head.weight"])
    kept = hugging_face.import_run(copied, tmp_path / "run") / "hf"
    assert not (kept / INDEX).exists() and open_repository(kept).files == [kept / SINGLE]


def test_a_tensor_of_two_files_is_taken_from_the_one_that_the_index_names(copied):
    tensors, weight_map = split(copied, "lm_head.weight")
    for file, wanted in (("a", tensors["lm_head.weight"]), ("b", np.zeros_like(tensors["lm_head.weight"]))):
        write_index(copied, {**weight_map, "lm_head.weight": f"{file}.safetensors"})
        repository, _ = loaded(copied)
        np.testing.assert_array_equal(repository.read("lm_head.weight"), wanted)
        assert [path.name for path in repository.files] == [INDEX, "a.safetensors", "b.safetensors"]
    del weight_map["lm_head.weight"]
    write_index(copied, weight_map)
    with pytest.raises(Refused, match="weight_map must name the file of lm_head.weight, which a.* and b"):
        open_repository(copied)


@pytest.mark.parametrize("listed", [["a"], None, {}, "x", 3, {"a": 1}, {"a": "x", "b": None}, {"a": ["x"]}])
def test_an_index_that_maps_no_tensors_to_files_is_refused(copied, listed):
    (copied / SINGLE).unlink()
    write_index(copied, listed)
    with pytest.raises(
        Refused, match="index.json: weight_map must be an object with the file of each tensor, got"
    ):
        open_repository(copied)


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "\ud800", ""])
def test_a_name_that_no_file_can_have_is_missing(copied, name):
    (copied / SINGLE).unlink()
    write_index(copied, {"lm_head.weight": name})
    with pytest.raises(Refused, match="has no"):
        open_repository(copied)


@pytest.mark.parametrize("text", ["{", "[" * 10**5, "9" * 5000, "[]", "\xff"])
def test_a_file_that_is_no_object_is_refused(copied, text):
    (copied / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(Refused, match=r"config.json (is not JSON|must be a JSON object)"):
        open_repository(copied)


def mixed(params, narrow):
    """Casts the arrays whose path has one of these words to its dtype."""

    def cast(path, leaf):
        words = [dtype for word, dtype in narrow.items() if word in jax.tree_util.keystr(path)]
        return leaf.astype(words[0]) if words else leaf

    return jax.tree_util.tree_map_with_path(cast, params)


@pytest.mark.parametrize("narrow", [{"embed": jnp.bfloat16}, {"norm": jnp.float16, "mlp": jnp.bfloat16}])
def test_parameters_of_several_dtypes_are_written_each_in_its_own(narrow, tmp_path):
    repository, params = loaded(GOLDEN / "hf_llama_tiny")
    params = mixed(params, narrow)
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    for ours, theirs in zip(
        *map(jax.tree.leaves, (params, load_params(again, sizes_of(again.config), like))), strict=True
    ):
        assert ours.dtype == theirs.dtype and ours.tobytes() == theirs.tobytes()
    assert {dtype for _, _, dtype in again.tensors.values()} > {"F32"}
    assert again.config["dtype"] == again.config["torch_dtype"] == "float32"


def test_parts_of_one_tensor_are_written_in_the_widest_dtype(tmp_path):
    repository, params = loaded(GOLDEN / "hf_phi3_tiny")
    params = mixed(
        params, {"query": jnp.bfloat16, "key": jnp.float16, "value": jnp.bfloat16, "": jnp.bfloat16}
    )
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    wide = {name for name, (_, _, dtype) in again.tensors.items() if dtype == "F32"}
    assert wide == {name for name in again.tensors if "qkv_proj" in name}
    assert again.config["dtype"] == "float32"


def test_a_dtype_that_is_no_float_is_refused(tmp_path):
    repository, params = loaded(GOLDEN / "hf_llama_tiny")
    with pytest.raises(Refused, match="norm.scale cannot be written as int32; it must be one of float64"):
        export_model(tmp_path / "out", mixed(params, {"'norm'": jnp.int32}), repository.config)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", ["auto", "int8", 5, {"a": 1}])
def test_a_dtype_of_config_json_that_cannot_be_written_is_refused(dtype, monkeypatch, tmp_path):
    monkeypatch.setattr(hugging_face, "_described", lambda *_: (None, {"dtype": dtype}))
    with pytest.raises(Refused, match="config.json: dtype must be one of 'float64', 'float32'"):
        hugging_face._export_checkpoint(tmp_path, None, tmp_path / "out", None)


def test_a_model_in_the_cache_of_the_hub_is_its_snapshot(tmp_path):
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0a1b"
    shutil.copytree(GOLDEN / "hf_llama_tiny", snapshot)
    with pytest.raises(
        ValueError, match=rf"in the cache of the Hugging Face hub, whose files are in {snapshot}"
    ):
        open_repository(tmp_path / "models--a--b")
    (snapshot / "chat_template.jinja").symlink_to("../../blobs/none")
    with pytest.raises(ValueError, match="chat_template.jinja is a symbolic link to nothing"):
        copy_companions(snapshot, tmp_path)
