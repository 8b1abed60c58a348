"""`lora` and `trainable` of the config: what is trained, kept, resumed and exported, from the command line."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from test_policy import TINY as POLICY
from test_policy import Evens, one_update
from test_supervised import DPO, SFT, write
from tiny import write_tiny
from tiny_directory import make

from jaxfb import trainable
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.config.load import config_from_dict
from jaxfb.models.adapted import PATTERNS, LoRA
from jaxfb.models.lora import merged, without_adapters
from jaxfb.pretrained.architectures import architecture_of, describe
from jaxfb.pretrained.peft import load_adapter, save_adapter
from jaxfb.rl.policy import make_policy_work
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training import hugging_face
from jaxfb.training.from_config.sizes import abstract_params, model_sizes

LORA = {"lora": {"rank": 2, "targets": ["query", "value", "down"], "dropout": 0.1}}


def started(work):
    work.start(lambda text: None)
    return work


def saved(run):
    """Returns the parameters of a run's newest checkpoint."""
    config = load_config(run)
    shapes = abstract_params(config, model_sizes(config, 257))
    return CheckpointStore(run / "checkpoints", keep_best=None).restore({"params": shapes}, partial=True)[0][
        "params"
    ]


def host(tree):
    return jax.tree.map(np.array, tree)


def changed(before, after):
    """Returns the names of the leaves that differ."""
    both = zip(jax.tree_util.tree_leaves_with_path(before), jax.tree.leaves(after), strict=True)
    return {trainable.name_of(path) for (path, old), new in both if np.any(np.asarray(new) != old)}


def adapters_of(params):
    leaves = jax.tree_util.tree_leaves_with_path(trainable.pruned(PATTERNS, params))
    return {trainable.name_of(path) for path, _ in leaves}


@pytest.mark.parametrize("start", ["random", pytest.param("run", marks=pytest.mark.slow)])
def test_supervised_training_changes_the_adapters_alone(tmp_path, start):
    more = {}
    if start == "run":
        assert main(["sft", str(write(tmp_path / "base", SFT, batch={"rows": 16, "updates": 1}))]) == 0
        more = {"model": None, "start": {"run": str(tmp_path / "base" / "run")}}
    work = started(make_supervised_work(load_config(write(tmp_path / "lora", SFT, LORA, **more))))
    before = host(work.train_state.params)
    if start == "run":
        chex.assert_trees_all_equal(without_adapters(before), saved(tmp_path / "base" / "run"))
    for number in range(2):
        metrics, _ = one_update(work, number)
        assert not metrics.skipped
    assert changed(before, work.train_state.params) == adapters_of(before)
    moments = [leaf.shape for leaf in jax.tree.leaves(work.train_state.opt_state) if leaf.ndim]
    trained = jax.tree.leaves(trainable.pruned(PATTERNS, before))
    assert sorted(moments) == sorted(2 * [leaf.shape for leaf in trained])


@pytest.mark.slow
def test_the_first_preference_loss_is_log_2_and_no_reference_is_kept(tmp_path):
    work = started(make_preference_work(load_config(write(tmp_path, DPO, LORA, lora={"rank": 2}))))
    metrics, _ = one_update(work, 0)
    np.testing.assert_allclose(metrics.loss, np.log(2), atol=1e-12)
    assert set(work.state()["reference"]) == {"train", "held_out"}  # log-probs, no parameters


@pytest.mark.slow
def test_the_reference_of_a_policy_is_its_frozen_base(tmp_path):
    values = {
        **POLICY,
        "run": {"dir": str(tmp_path / "run")},
        "lora": {"rank": 2},
        "optimizer": {"learning_rate": 0.3},
    }
    work = started(make_policy_work(config_from_dict(values), Evens(1, "+", 10)))
    kept = work.state()["reference"]
    assert {trainable.name_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(kept)} == adapters_of(
        work.train_state.params
    )
    before, kl = host(work.train_state.params), []
    for number in range(
        work.plan.updates_per_rollout + 1
    ):  # the next rollout is scored by the reference again
        metrics, _ = one_update(work, number)
        kl.append(float(metrics.metrics["ref_kl"]))
    assert kl[0] < 1e-12 < kl[-1] and changed(before, work.train_state.params) == adapters_of(before)


@pytest.mark.slow
@pytest.mark.slow
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one_and_refuses_other_adapters(tmp_path, capsys):
    whole = write(tmp_path / "whole", SFT, LORA)
    assert main(["sft", str(whole)]) == 0
    cut = write(tmp_path / "cut", SFT, LORA, run={"dir": str(tmp_path / "cut" / "run"), "stop_at": 3})
    assert main(["sft", str(cut)]) == 75
    capsys.readouterr()
    for wrong in ("lora.rank=4", "lora.alpha=3.0", "trainable=[norm]", "lora=null"):
        assert main(["sft", str(cut), "--resume", wrong]) == 2
        assert wrong.partition("=")[0] in capsys.readouterr().err
    assert main(["sft", str(cut), "--resume", "run.stop_at=null"]) == 0
    chex.assert_trees_all_equal(*(saved(tmp_path / name / "run") for name in ("whole", "cut")))


@pytest.mark.slow
@pytest.mark.slow
def test_a_run_is_exported_merged_or_as_an_adapter_that_is_read_again(tmp_path):
    targets = {"rank": 2, "alpha": 3.0, "targets": ["query", "gate"]}
    narrow = {"precision": {"compute_dtype": "float32", "frozen_dtype": "bfloat16"}}
    config = write(tmp_path / "lora", SFT, narrow, lora=targets, batch={"rows": 16, "updates": 2})
    assert main(["sft", str(config)]) == 0
    run = tmp_path / "lora" / "run"
    assert main(["export-hf", str(run), str(tmp_path / "merged")]) == 0
    assert main(["export-hf", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    params, lora = saved(run), LoRA(2, 3.0, ("query", "gate"))
    kernels = merged(params, lora)["layers"]["attention"]["query"]["kernel"]
    found = load_file(tmp_path / "merged" / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"]
    np.testing.assert_allclose(found, np.asarray(kernels[1]).T, rtol=1e-6)
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (values["r"], values["lora_alpha"], values["target_modules"]) == (2, 3.0, ["gate_proj", "q_proj"])
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    a = tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"]
    np.testing.assert_allclose(
        a, np.asarray(params["layers"]["attention"]["query"]["lora_a"][0]).T, rtol=1e-6
    )
    assert len(tensors) == 2 * 2 * 2
    again = write(tmp_path / "again", SFT, lora={**targets, "adapter": str(tmp_path / "adapter")})
    work = started(make_supervised_work(load_config(again)))
    for name in adapters_of(params):
        one, other = (dict_of(tree)[name] for tree in (params, work.train_state.params))
        np.testing.assert_allclose(one, other, rtol=1e-6)
    continued = write(tmp_path / "next", SFT, LORA, model=None, start={"run": str(run)})
    work = started(make_supervised_work(load_config(continued)))
    chex.assert_trees_all_close(
        without_adapters(host(work.train_state.params)), host(merged(params, lora)), rtol=1e-12
    )


def test_an_adapter_alone_is_not_written_where_more_was_trained(tmp_path, capsys):
    config = write(tmp_path / "lora", SFT, lora={"rank": 2}, trainable=["norm"])
    (tmp_path / "lora" / "run").mkdir()
    shutil.copyfile(config, tmp_path / "lora" / "run" / "config.yaml")
    assert main(["export-hf", str(tmp_path / "lora" / "run"), str(tmp_path / "adapter"), "--adapter"]) == 2
    assert "trained norm beside its adapters" in capsys.readouterr().err
    assert not (tmp_path / "adapter").exists()


def test_an_adapter_names_the_files_of_its_weights_or_warns(tmp_path, caplog):
    def base(**more):
        values = {"start": SimpleNamespace(run=None), "model": SimpleNamespace(from_=None), **more}
        return hugging_face._base_of(tmp_path / "run", SimpleNamespace(**values))

    assert base(model=SimpleNamespace(from_="files")) == Path("files") and not caplog.records
    assert base() == tmp_path / "run" and "only the run" in caplog.text
    directory = make(
        tmp_path / "model", num_layers=1, hidden_size=16, num_heads=2, num_kv_heads=1, mlp_size=16
    )
    hugging_face.import_run(directory, tmp_path / "imported")
    caplog.clear()
    begun = {"start": SimpleNamespace(run=str(tmp_path / "imported")), "model": None}
    assert base(**begun) == tmp_path / "imported" / "hf" and not caplog.records
    (tmp_path / "imported" / "checkpoints" / "3").mkdir()  # as if it had been trained
    assert base(**begun) == tmp_path / "imported" and "export that run too" in caplog.text
    shutil.rmtree(tmp_path / "imported")
    assert base(**begun) == tmp_path / "imported" and "is no longer there" in caplog.text


def dict_of(tree):
    return {
        trainable.name_of(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.mark.slow
def test_pretraining_takes_both_and_stores_frozen_parameters_in_16_bits(tmp_path, capsys):
    config = write_tiny(
        tmp_path,
        lora={"rank": 2},
        run={"updates": 2},
        lr={"warmup": 1},
        precision={"frozen_dtype": "bfloat16"},
    )
    values = yaml.safe_load(config.read_text())
    config.write_text(yaml.safe_dump({**values, "trainable": ["norm"]}))
    assert main(["train", str(config)]) == 0
    leaves = dict_of(saved(tmp_path / "run"))
    of_bits = {name for name, leaf in leaves.items() if leaf.dtype == "bfloat16"}
    assert "embed.embedding" in of_bits and "norm.scale" not in of_bits
    assert not of_bits & {name for name in leaves if "lora" in name}
    assert "the others are frozen" in capsys.readouterr().out
    assert main(["eval", str(tmp_path / "run")]) == 0
    assert main(["generate", str(tmp_path / "run"), "--prompt", "def "]) == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"trainable": ["layers.attention.querry"]},
            "no parameter matches 'layers.attention.querry'; the nearest are",
        ),
        ({"trainable": []}, "would freeze every parameter"),
        ({"precision": {"frozen_dtype": "bfloat16"}}, "no parameter is frozen without lora or trainable"),
        ({"lora": {"targets": ["q_proj"]}}, "'q_proj' is not a projection of a layer"),
        ({"lora": {"rank": 0}}, "rank must be a positive integer"),
        ({"lora": {"adapter": "nowhere"}}, "has no file adapter_config.json"),
    ],
)
def test_refusals(tmp_path, capsys, changes, words):
    assert main(["sft", str(write(tmp_path, SFT, **changes))]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_an_adapter_of_another_shape_is_refused_with_the_list(tmp_path):
    from jaxfb.models.adapted import adapted
    from jaxfb.models.config import TransformerConfig
    from jaxfb.models.transformer import init_params

    sizes = TransformerConfig(vocab_size=32, num_layers=2, hidden_size=16, num_heads=2, mlp_size=24)
    few, more = LoRA(rank=2, targets=("query",)), LoRA(rank=2, targets=("query", "up"))
    params = {lora: init_params(adapted(sizes, lora), jax.random.key(1)) for lora in (few, more)}
    save_adapter(tmp_path / "few", params[few], few, architecture_of(describe(sizes)), "base")
    chex.assert_trees_all_equal(load_adapter(tmp_path / "few", params[few], few), params[few])
    with pytest.raises(ValueError, match=r"mlp.up_proj.lora_A.weight: missing"):
        load_adapter(tmp_path / "few", params[more], more)
    with pytest.raises(ValueError, match="rank=4, but .* has r=2; use lora.rank=2"):
        load_adapter(tmp_path / "few", params[few], LoRA(rank=4, targets=("query",)))
    file = Path(tmp_path / "few" / "adapter_config.json")
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_dora": True}))
    with pytest.raises(ValueError, match="use_dora=True is not supported"):
        load_adapter(tmp_path / "few", params[few], few)
