"""`model.from`: every kind of run begins with the weights, tokenizer and template of a directory, on its own mesh."""

import json
import math
import shutil

import chex
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from tiny import write_tiny
from tiny_directory import ROOT, make

from jaxfb.cli.commands import main
from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.pretrained import open_repository
from jaxfb.rl import make_work
from jaxfb.training import hugging_face
from jaxfb.training.from_config.sizes import model_sizes

SMALL = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}
SFT = {
    "conversations": {"path": str(ROOT / "examples" / "data" / "facts.jsonl"), "held_out_fraction": 0.0},
    "batch": {"rows": 4, "updates": 1},
    "plans": {"train": {"rows_per_microbatch": 1}},
    "optimizer": {"learning_rate": 1e-9, "weight_decay": 0.0},
    "mesh": {"data": 1, "fsdp": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hub") / "model", **SMALL)


def written(path, source, values, **more):
    values = {"model": {"from": str(source)}, **values, "run": {"dir": str(path / "run")}, **more}
    (path / "config.yaml").write_text(yaml.safe_dump(values))
    return path / "config.yaml"


def post_training(path, directory, **more):
    return load_config(written(path, directory, SFT, **more))


def test_the_sizes_come_from_the_directory_and_stay_when_it_is_gone(tmp_path, directory):
    source = shutil.copytree(directory, tmp_path / "model")
    config = post_training(tmp_path, source, model={"from": str(source), "attention": "xla"})
    assert (config.model.num_layers, config.model.vocab_size, config.model.mlp_size) == (2, 320, 16)
    shutil.rmtree(source)
    again = config_from_dict(config_to_dict(config))
    assert again == config and again.model.from_ == str(source) and again.model.attention == "xla"


@pytest.mark.parametrize(
    "change, wanted",
    [
        ({"num_layers": 3}, "num_layers=3 differs from 2, that of from="),
        ({"rope_theta": 5e5}, "differs from 10000.0, that of from="),
        ({"from": ""}, "from='' must not be empty; use model.from=null, or a path"),
        ({"from": "nowhere"}, "from='nowhere' must be a directory with config.json"),
        ({"from": "Qwen/Qwen3-0.6B"}, "jaxfb downloads nothing: .* `hf download Qwen/Qwen3-0.6B --local-dir"),
    ],
)
def test_what_the_directory_contradicts_is_refused(tmp_path, directory, change, wanted):
    with pytest.raises(ValueError, match=wanted):
        post_training(tmp_path, directory, model={"from": str(directory), **change})


def test_two_places_to_begin_are_refused(tmp_path, directory):
    with pytest.raises(ValueError, match="both give the initial parameters; leave one out"):
        post_training(tmp_path, directory, start={"run": "runs/x"})


def test_weights_are_read_cut_and_unchanged_with_the_tokenizer_and_its_stops(tmp_path, directory):
    work = make_work(post_training(tmp_path, directory), None)
    work.start(print)
    chat = work.base.chat
    assert chat.stop_tokens == (256, 258) and "<|im_start|>" in chat.template
    params = work.train_state.params
    embedding = params["embed"]["embedding"]
    assert not embedding.sharding.is_fully_replicated
    stored = load_file(directory / "model.safetensors")
    np.testing.assert_array_equal(embedding, stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(
        params["layers"]["mlp"]["up"]["kernel"][1], stored["model.layers.1.mlp.up_proj.weight"].T
    )


@pytest.mark.slow
@pytest.mark.slow
def test_a_checkpoint_goes_on_where_the_directory_began(tmp_path, directory, capsys):
    """Trains, loses the directory's weights, resumes, generates and exports."""
    source = shutil.copytree(directory, tmp_path / "model")
    config = str(written(tmp_path, source, SFT))
    assert main(["sft", config]) == 0
    (source / "model.safetensors").unlink()
    assert main(["sft", config, "--resume", "batch.updates=2"]) == 0
    run = str(tmp_path / "run")
    assert main(["generate", run, "--prompt", "Who?", "--tokens", "3"]) == 0
    assert main(["export-hf", run, str(tmp_path / "out")]) == 0
    assert "chat_template.jinja" in capsys.readouterr().out
    before, after = (
        load_file(directory / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    chex.assert_trees_all_close(before, after, atol=1e-8)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == {
        "eos_token_id": [256, 258]
    }


@pytest.mark.slow
@pytest.mark.slow
def test_pretraining_goes_on_with_a_directory(tmp_path, directory, capsys):
    same = {"eval": {"every": None, "prompt": "", "batches": 1}, "optimizer": {"learning_rate": 1e-9}}
    path = write_tiny(tmp_path, run={"updates": 1}, lr={"warmup": 0}, **same)
    values = yaml.safe_load(path.read_text())
    values["model"] = {"from": str(directory)}
    del values["data"]["tokenizer"]
    path.write_text(yaml.safe_dump(values))
    config = load_config(path)
    assert config.data.tokenizer == str(directory / "tokenizer.json")
    assert model_sizes(config, 259).vocab_size == 320
    assert main(["plan", str(path), "--topology", "cpu:1", "--no-compile"]) == 0
    assert main(["train", str(path)]) == 0
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert "held-out tokens" in capsys.readouterr().out
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    before, after = (
        load_file(directory / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    chex.assert_trees_all_close(before, after, atol=1e-7)


def test_a_text_with_another_tokenizer_than_the_models_is_refused(tmp_path, directory):
    source = shutil.copytree(directory, tmp_path / "model")
    (source / "tokenizer.json").unlink()
    path = write_tiny(tmp_path)
    values = yaml.safe_load(path.read_text())
    values["model"] = {"from": str(source)}
    del values["data"]["tokenizer"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ValueError, match="has no tokenizer.json"):
        load_config(path)


def test_an_import_copies_files_and_reads_no_weights(tmp_path, directory, monkeypatch, capsys):
    """What uses the run reads them; 16-bit weights stay so on the disk."""
    source = tmp_path / "half"
    import_of, half = tmp_path / "run", {"dtype": "bfloat16"}
    assert main(["import-hf", str(directory), "--out", str(tmp_path / "first")]) == 0
    hugging_face.export_run(tmp_path / "first", source, **half)
    monkeypatch.setattr(type(open_repository(source)), "read", None)
    assert main(["import-hf", str(source), "--out", str(import_of)]) == 0
    monkeypatch.undo()
    assert {t[2] for t in open_repository(import_of / "hf").tensors.values()} == {"BF16"}
    hugging_face.export_run(import_of, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()
    moved = import_of.rename(tmp_path / "moved")
    assert main(["generate", str(moved), "--prompt", "Who?", "--tokens", "3"]) == 0
    config = load_config(written(tmp_path, directory, SFT, model=None, start={"run": str(moved)}))
    work = make_work(config, None)
    work.start(print)
    stored = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    np.testing.assert_array_equal(work.train_state.params["embed"]["embedding"], stored.astype(np.float32))


@pytest.mark.slow
def test_a_checkpoint_is_exported_layer_by_layer(tmp_path, directory, monkeypatch, capsys):
    from jaxfb.checkpoint.store import CheckpointStore
    from jaxfb.checkpoint.stored_parts import StoredArrays

    assert main(["sft", str(written(tmp_path, directory, SFT))]) == 0
    read, parts = [], StoredArrays.parts

    def watched(self, name, depth):
        for part in parts(self, name, depth):
            read.append(part.shape)
            yield part

    monkeypatch.setattr(StoredArrays, "parts", watched)
    monkeypatch.delattr(CheckpointStore, "restore")
    hugging_face.export_run(tmp_path / "run", tmp_path / "out", "bfloat16")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(map(math.prod, read)) == sorted(tensor.size for tensor in stored.values())
    assert stored["lm_head.weight"].dtype == jnp.bfloat16


@pytest.mark.slow
@pytest.mark.parametrize("through", [pytest.param("model.from", marks=pytest.mark.slow), "start.run"])
def test_adapters_begin_beside_the_weights_of_a_directory(tmp_path, directory, through):
    lora = {
        "lora": {"rank": 2},
        "optimizer": {"learning_rate": 0.1},
        "precision": {"frozen_dtype": "bfloat16"},
    }
    if through == "start.run":
        assert main(["import-hf", str(directory), "--out", str(tmp_path / "imported")]) == 0
        lora |= {"model": None, "start": {"run": str(tmp_path / "imported")}}
    config = written(tmp_path, directory, SFT, **lora)
    assert main(["sft", str(config)]) == 0
    out, adapter = tmp_path / "out", tmp_path / "adapter"
    assert main(["export-hf", str(tmp_path / "run"), str(out), "--dtype", "float32"]) == 0
    assert main(["export-hf", str(tmp_path / "run"), str(adapter), "--adapter"]) == 0
    before, after = (load_file(side / "model.safetensors") for side in (directory, out))
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, old in before.items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = np.asarray(jnp.asarray(old, jnp.bfloat16), np.float32)
        if f"{key}.lora_A.weight" in tensors:
            a, b = (tensors[f"{key}.lora_{part}.weight"] for part in "AB")
            assert np.any(b)
            wanted = wanted + 8.0 * b @ a  # alpha / rank
        np.testing.assert_allclose(after[name], wanted, rtol=1e-5, atol=1e-6)
    assert len(tensors) == 2 * 7 * 2
