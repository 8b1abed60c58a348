"""A directory of Hugging Face files becomes a run that generates and trains, and a run becomes a directory."""

import json
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import yaml
from marks import some_slow
from safetensors.numpy import load_file

from jaxfb.checkpoint import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.pretrained.architectures import describe

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = ("hf_llama31_tiny", "hf_mixtral_tiny", "hf_qwen2_tiny", "hf_qwen3_moe_tiny", "hf_qwen3_yarn_tiny")


COMPANIONS = {
    "generation_config.json": '{"eos_token_id": [3, 5], "temperature": 0.7}',
    "tokenizer.json": '{"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}',
    "tokenizer_config.json": '{"bos_token": "b"}\n',
    "special_tokens_map.json": '{ "bos_token":"b" }',
    "chat_template.jinja": "{% for message in messages %}{{ message['content'] }}\n{% endfor %}",
}


@pytest.mark.parametrize("name", CASES)
def test_a_run_goes_out_as_it_came_in(name, tmp_path, capsys):
    shutil.copytree(GOLDEN / name, tmp_path / "in")
    for file, text in COMPANIONS.items():
        (tmp_path / "in" / file).write_text(text)
    assert main(["import-hf", str(tmp_path / "in"), "--out", str(tmp_path / "run")]) == 0
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    assert "generation_config.json" in capsys.readouterr().out
    before, after = (
        {path.name: path.read_bytes() for path in (tmp_path / side).iterdir()} for side in ("in", "out")
    )
    assert set(before) == set(after) >= {"model.safetensors", "config.json", *COMPANIONS}
    assert before == after


def test_the_best_checkpoint_is_exported_or_any_that_is_named(tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["import-hf", str(GOLDEN / "hf_llama31_tiny"), "--out", str(run)]) == 0
    for given in ("best", "4"):
        assert main(["export-hf", str(run), str(tmp_path / "x"), "--update", given]) == 2
        assert f"{run} has saved no update, so update=" in capsys.readouterr().err
    repository = open_repository(GOLDEN / "hf_llama31_tiny")
    params = load_params(repository, sizes := sizes_of(repository.config), shapes_of(sizes))
    with CheckpointStore(run / "checkpoints", asynchronous=False) as store:
        for update, loss in ((2, 3.0), (4, 1.0), (6, 2.0)):
            state = {"params": jax.tree.map(lambda leaf, update=update: leaf + update, params)}
            store.save(update, state, {"update": update, "metrics": {"eval/loss": loss}})
    before = load_file(GOLDEN / "hf_llama31_tiny" / "model.safetensors")["model.norm.weight"]
    for given, added in {None: 6, "best": 4, "2": 2}.items():
        out = tmp_path / f"out{given}"
        assert main(["export-hf", str(run), str(out), *(["--update", given] if given else [])]) == 0
        scale = load_file(out / "model.safetensors")["model.norm.weight"]
        np.testing.assert_allclose(scale, before + added, rtol=1e-6)
    capsys.readouterr()
    for given in ("3", "bets", "-2", "9" * 5000):
        assert main(["export-hf", str(run), str(tmp_path / "x"), "--update", given]) == 2
        assert f"the updates that {run} has saved: 2, 4, 6" in capsys.readouterr().err
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("keep_best: eval/loss", "keep_best: null"))
    assert main(["export-hf", str(run), str(tmp_path / "x"), "--update", "best"]) == 2
    assert "no checkpoint is known to be the best: checkpoint.keep_best is null" in capsys.readouterr().err
    for file in (run / "checkpoints" / "4").rglob("d/*"):
        file.write_bytes(b"")
    assert main(["export-hf", str(run), str(tmp_path / "x"), "--update", "4"]) != 0
    assert f"jaxfb: [export] update 4 of {run} is damaged" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_run_in_float64_is_exported(tmp_path):
    """A command has no arrays of float64 until a config asks for them."""
    run = tmp_path / "run"
    assert main(["import-hf", str(GOLDEN / "hf_llama31_tiny"), "--out", str(run)]) == 0
    repository = open_repository(GOLDEN / "hf_llama31_tiny")
    params = load_params(repository, sizes := sizes_of(repository.config), shapes_of(sizes))
    with CheckpointStore(run / "checkpoints", asynchronous=False) as store:
        state = {"params": jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) + 2, params)}
        store.save(2, state, {"update": 2, "metrics": {}})
    config = run / "config.yaml"
    values = yaml.safe_load(config.read_text())
    values["precision"]["compute_dtype"] = "float64"
    config.write_text(yaml.safe_dump(values))
    with jax.enable_x64(False):
        assert main(["export-hf", str(run), str(tmp_path / "out")]) == 0
    name = "model.norm.weight"
    before, after = (load_file(at / "model.safetensors")[name] for at in (repository.path, tmp_path / "out"))
    np.testing.assert_allclose(after, before + 2, rtol=1e-6)


def shapes_of(sizes):
    return jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))


def test_a_full_directory_is_refused_and_untouched(tmp_path, capsys):
    (tmp_path / "kept").write_text("")
    assert main(["import-hf", str(GOLDEN / "hf_llama_tiny"), "--out", str(tmp_path)]) == 2
    assert "must be a new or an empty directory" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


SMALL = {"vocab_size": 32, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 24}
KINDS = {
    "llama": {"tied_embeddings": True},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "mixtral": {"num_experts": 4, "expert_mlp_size": 8},
    "qwen3_moe": {"num_experts": 4, "expert_mlp_size": 8, "qk_norm": True, "router_renormalize": False},
}


@pytest.mark.parametrize("kind", some_slow(KINDS, fast=("qwen2", "mixtral")))
def test_a_model_of_ours_is_described_so_that_it_comes_back(kind, tmp_path):
    sizes = TransformerConfig(**SMALL, **KINDS[kind])
    params = init_params(sizes, jax.random.key(1))
    values = describe(sizes)
    assert values["model_type"] == kind
    export_model(tmp_path / "out", params, values)
    repository = open_repository(tmp_path / "out")
    again = load_params(repository, sizes_of(repository.config), jax.eval_shape(lambda: params))
    chex.assert_trees_all_equal(params, again)


@pytest.mark.parametrize(
    "field", [{"mtp_depth": 1}, {"logit_softcap": 30.0}, {"num_experts": 4, "shared_expert_size": 8}]
)
def test_a_model_that_transformers_lacks_stays_a_run(field):
    with pytest.raises(ValueError, match=f"has {list(field)[-1]}"):
        describe(TransformerConfig(**SMALL, **field))


@pytest.mark.slow
def test_a_trained_run_is_exported(tmp_path, capsys):
    from tiny import write_tiny

    config = write_tiny(tmp_path, run={"updates": 2}, lr={"warmup": 1}, eval={"every": None, "prompt": ""})
    assert main(["train", str(config)]) == 0
    capsys.readouterr()
    assert main(["export-hf", str(tmp_path / "run"), str(config / "out")]) == 2  # below a file
    assert "Not a directory" in capsys.readouterr().err
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["dtype"] == "bfloat16" and values["tie_word_embeddings"]
    assert tensors["model.embed_tokens.weight"].shape == (values["vocab_size"], values["hidden_size"])
    assert {str(np.dtype(tensor.dtype)) for tensor in tensors.values()} == {"bfloat16"}
