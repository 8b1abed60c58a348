"""Post-training goes on from its first checkpoint without losing what was written, and refuses another meaning."""

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

from jaxfb import load_config, post_train
from jaxfb.callbacks import callback
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import config_to_dict
from jaxfb.config.load import config_from_dict
from jaxfb.metrics import read_jsonl
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training.ending import length_key
from jaxfb.training.guard import NonFiniteAbort
from jaxfb.training.persistence.changes import check_changes
from jaxfb.training.persistence.run_lock import RunLock

CONFIG = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 16, "tied_embeddings": True},
    "start": {"tokenizer": "bytes"},
    "batch": {"rows": 4, "updates": 2},
    "lr": {"name": "constant"},
    "optimizer": {"learning_rate": 0.01},
    "mesh": {"data": 1},
    "plans": {"train": {"rows_per_microbatch": 4}, "eval": {"rows_per_microbatch": 4}},
}


def conversations(path, numbers):
    lines = [
        {"messages": [{"role": "user", "content": f"{k} + 1"}, {"role": "assistant", "content": str(k + 1)}]}
        for k in numbers
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A run that was stopped before its first update, with the evaluation of its start saved; its config."""
    directory = tmp_path_factory.mktemp("sft")
    conversations(directory / "data.jsonl", range(20))
    section = {"path": "data.jsonl", "held_out_fraction": 0.2, "sequence_length": 48, "template": "plain"}
    section["path"] = str(directory / "data.jsonl")
    values = {**CONFIG, "conversations": section, "run": {"dir": str(directory / "run")}}
    (directory / "sft.yaml").write_text(yaml.safe_dump(values))
    stop = callback(on_save=lambda step, path: os.kill(os.getpid(), signal.SIGINT))
    assert post_train(load_config(directory / "sft.yaml"), callbacks=[stop]).updates == 0
    return directory


@pytest.fixture
def stopped(template, tmp_path):
    return Path(shutil.copytree(template / "run", tmp_path / "run"))


@pytest.mark.parametrize(
    "name, key",
    [
        ("quickstart", "run.updates"),
        ("sft", "batch.epochs"),
        ("dpo", "batch.epochs"),
        ("grpo_arithmetic", "rollout.rollouts"),
    ],
)
def test_a_finished_run_is_made_longer_by_its_own_key(name, key):
    assert length_key(load_config(name)) == key


@pytest.mark.slow
def test_resumed_at_checkpoint_0_it_keeps_the_record_of_the_start(stopped):
    (start,) = read_jsonl(stopped / "metrics.jsonl")
    assert start["step"] == 0 and start["eval/loss"] > 0
    assert main(["sft", str(stopped), "--resume"]) == 0
    records = read_jsonl(stopped / "metrics.jsonl")
    assert records[0] == start
    assert [record["step"] for record in records if "loss" in record] == [1, 2]


@pytest.mark.slow
def test_another_meaning_is_refused_and_no_file_is_changed(template, stopped, tmp_path, capsys):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    conversations(tmp_path / "other.jsonl", range(20, 40))
    moved = shutil.copy(template / "data.jsonl", tmp_path / "moved.jsonl")
    cases = {
        "model.rope_theta=2.0": "model.rope_theta=10000.0 (now 2.0)",
        "conversations.learn=last": "conversations.learn=assistant (now last)",
        "run.seed=3": "run.seed=0 (now 3)",
        f"conversations.path={tmp_path / 'other.jsonl'}": "would train on other rows than the saved run: dataset_rows",
    }
    for override, sentence in cases.items():
        assert main(["sft", str(stopped), "--resume", override]) == 2
        said = capsys.readouterr().err
        assert sentence in said and len(said.splitlines()) == 1, said
        assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    with RunLock(stopped) as lock:
        lock.acquire()
        assert main(["sft", str(stopped), "--resume"]) == 2
        assert "is in use by process" in capsys.readouterr().err
    assert main(["sft", str(stopped), "--resume", f"conversations.path={moved}", "batch.updates=1"]) == 0
    assert "batch.updates: 2 -> 1" in capsys.readouterr().out
    assert (stopped / "config.until-0.yaml").is_file()


def test_other_conversations_may_be_allowed_but_not_another_number_of_them(tmp_path, monkeypatch):
    """The refusal of more rows offered --allow-changes, with which they were refused again."""
    monkeypatch.chdir(tmp_path)
    section = {"held_out_fraction": 0.0, "sequence_length": 48, "template": "plain"}

    def work(numbers):
        conversations(tmp_path / "data.jsonl", numbers)
        values = {**CONFIG, "conversations": {**section, "path": "data.jsonl"}, "run": {"dir": "run"}}
        return make_supervised_work(config_from_dict(values))

    record = {"plan": work(range(8)).to_dict(), "update": 1}
    work(range(8)).check_resume(record, False)
    with pytest.raises(ValueError, match="trained on other rows .* or --allow-changes .* to continue anyway"):
        work(range(8, 16)).check_resume(record, False)
    work(range(8, 16)).check_resume(record, True)
    more = work(range(12))
    for allow_changes in (False, True):
        with pytest.raises(ValueError, match="dataset_rows 8 vs 12") as refusal:
            more.check_resume(record, allow_changes)
        assert "--allow-changes" not in str(refusal.value)


def test_a_run_whose_last_update_was_short_is_not_made_longer(tmp_path, monkeypatch):
    """The rows behind the short update were passed over."""
    monkeypatch.chdir(tmp_path)
    conversations(tmp_path / "data.jsonl", range(10))
    section = {
        "path": "data.jsonl",
        "held_out_fraction": 0.0,
        "sequence_length": 48,
        "template": "plain",
    }

    def work(epochs):
        values = {
            **CONFIG,
            "conversations": section,
            "batch": {"rows": 4, "epochs": epochs},
            "run": {"dir": "run"},
        }
        return make_supervised_work(config_from_dict(values))

    saved, longer = work(1.5), work(2)
    assert [window.rows for window in saved.plan.windows()] == [4, 4, 2, 4, 1]
    plan = json.loads(json.dumps(saved.to_dict()))
    for update in range(5):
        longer.check_resume({"plan": plan, "update": update}, False)
    with pytest.raises(ValueError, match="consumed 15 rows in 5 updates, by this config they would be 18"):
        longer.check_resume({"plan": plan, "update": 5}, False)


PAIRS = {"path": "pairs.jsonl", "held_out_path": "held.jsonl", "sequence_length": 48, "template": "none"}
DPO = {
    **CONFIG,
    "preferences": PAIRS,
    "plans": {**CONFIG["plans"], "logprob_ref": {"rows_per_microbatch": 4}},
    "run": {"dir": "run"},
}


def preferences(path, numbers):
    lines = [{"prompt": f"{k} + 1", "chosen": str(k + 1), "rejected": str(k)} for k in numbers]
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def pairs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    numbers = {"pairs": range(8), "held": range(8, 10), "other": range(10, 18), "held_too": range(20, 22)}
    for name, found in numbers.items():
        preferences(f"{name}.jsonl", found)
    Path("dpo.yaml").write_text(yaml.safe_dump(DPO))


def work_on_pairs(**keys):
    return make_preference_work(load_config("dpo.yaml", [f"preferences.{key}={keys[key]}" for key in keys]))


@pytest.mark.parametrize(
    "key, path",
    [("path", "other.jsonl"), ("held_out_path", "held_too.jsonl"), ("held_out_path", "other.jsonl")],
)
def test_a_reference_is_not_used_for_other_pairs_whatever_is_allowed(pairs, key, path):
    record = {"plan": work_on_pairs().to_dict(), "update": 1}
    for allow_changes in (False, True):
        work_on_pairs(path=shutil.copy("pairs.jsonl", "moved.jsonl")).check_resume(record, allow_changes)
        with pytest.raises(ValueError, match=rf"\[preferences\] {key}={path} gives other pairs") as refusal:
            work_on_pairs(**{key: path}).check_resume(record, allow_changes)
        assert "--allow-changes" not in str(refusal.value)


def test_what_makes_other_pairs_is_refused_without_an_offer_to_allow_it(pairs):
    saved = config_to_dict(load_config("dpo.yaml"))
    with pytest.raises(
        ValueError, match="preferences.template=none .*; use the saved values or another"
    ) as refusal:
        check_changes(saved, load_config("dpo.yaml", ["preferences.template=plain"]), 3)
    assert "--allow-changes" not in str(refusal.value)


def test_without_held_out_pairs_nothing_of_them_is_saved(pairs):
    work = work_on_pairs(held_out_path="null", held_out_fraction=0.0)
    assert set(work.abstract_state()["reference"]) == {"train"}
    assert set(work_on_pairs().abstract_state()["reference"]) == {"train", "held_out"}


@pytest.mark.slow
def test_without_held_out_pairs_a_run_ends_and_resumes(pairs, capsys):
    keys = ["preferences.held_out_path=null", "preferences.held_out_fraction=0.0"]
    for _ in range(2):
        assert main(["dpo", "dpo.yaml", "batch.updates=1", *keys]) == 0
    assert "run is finished: 1 update. To train it longer, resume it with a larger batch.updates" in (
        capsys.readouterr().out
    )
    assert main(["dpo", "dpo.yaml", "--resume", *keys]) == 0
    assert [record["step"] for record in read_jsonl("run/metrics.jsonl") if "loss" in record] == [1, 2]


@pytest.mark.slow
def test_poison_is_not_saved_and_the_checkpoint_of_before_stays(template, tmp_path, capsys):
    def spoil(step, batch):
        if step == 3:
            run.state.params["norm"]["scale"] *= np.nan

    def keep(started):
        nonlocal run
        run = started

    run, overrides = (
        None,
        [f"run.dir={tmp_path / 'run'}", "batch.updates=8", "checkpoint.every=1", "run.max_nonfinite=2"],
    )
    with pytest.raises(NonFiniteAbort, match="2 updates in a row, .*; nothing was saved since update 2"):
        post_train(
            load_config(template / "sft.yaml", overrides),
            callbacks=[callback(on_train_start=keep, before_update=spoil)],
        )
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [0, 1, 2]


@pytest.mark.slow
def test_a_tokenizer_that_does_not_know_the_conversations_is_reported(template, tmp_path):
    small = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "1": 2, "2": 3}, unk_token="<unk>"))
    small.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    small.save(str(tmp_path / "small.json"))
    overrides = [f"start.tokenizer={tmp_path / 'small.json'}", f"run.dir={tmp_path / 'run'}"]
    with pytest.warns(
        UserWarning, match=r"tokenizer cannot encode \d\d\.\d\d% of the characters of the text, such as"
    ):
        make_supervised_work(load_config(template / "sft.yaml", overrides))
