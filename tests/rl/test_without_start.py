"""A saved run of post-training needs nothing of the run that it started from, which may be gone or replaced."""

import dataclasses
import json
import shutil

import pytest
import yaml

from jaxfb.config import config_to_dict, load_config, save_yaml
from jaxfb.data.chat import make_chat
from jaxfb.data.tokenizer import ByteTokenizer
from jaxfb.pretrained.companions import CARRIED
from jaxfb.rl.start import make_base
from jaxfb.training.from_config.sizes import config_with_model
from jaxfb.training.parameters import carried_of, carry_from
from jaxfb.training.run_dir import RunDirectory

PLANS = {name: {"rows_per_microbatch": 4} for name in ("train", "eval", "logprob_ref")}
MODEL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "mlp_size": 16}
BASE = {"batch": {"rows": 4, "updates": 6}, "optimizer": {"learning_rate": 0.01}, "plans": PLANS}
SFT = {**BASE, "model": MODEL, "start": {"tokenizer": "bytes"}, "conversations": {"path": "unused"}}
DPO = {**BASE, "preferences": {"path": "unused"}}


def config_of(directory, values):
    """Writes a run's directory with a config in it, and reads that."""
    directory.mkdir(parents=True)
    values = {**values, "run": {"dir": str(directory)}}
    (directory / "config.yaml").write_text(yaml.safe_dump(values))
    return load_config(directory / "config.yaml")


def keep(config, chat, first):
    """Writes what a run keeps of its start once it is saved."""
    directory = RunDirectory.of(config)
    (directory.checkpoints / "4").mkdir(parents=True)
    chat.tokenizer.save(directory.tokenizer)
    chat.save(directory.path)
    save_yaml(first, directory.first_config)


@pytest.fixture
def runs(tmp_path):
    """A run whose chat has a stop token and a template of its own, and one that started from it and is saved."""
    chat = make_chat(ByteTokenizer(), "plain", [10])
    first = config_of(tmp_path / "first", SFT)
    keep(first, chat, first)
    last = config_of(tmp_path / "last", {**DPO, "start": {"run": str(tmp_path / "first")}})
    keep(last, chat, first)
    return first, last


def parts(base):
    return base.sizes, base.tokenizer.fingerprint, base.chat.template, base.chat.stop_tokens


def test_a_saved_run_continues_without_the_run_that_it_started_from(runs, tmp_path):
    first, last = runs
    before = parts(make_base(last, fresh=True))
    shutil.rmtree(first.run.dir)
    assert parts(make_base(last)) == before
    with pytest.raises(ValueError, match="there is no run .*first to start from"):
        make_base(last, fresh=True)
    RunDirectory.of(last).checkpoints.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="there is no run .*first to start from"):
        make_base(last)


def test_a_run_that_took_the_place_of_the_first_one_is_not_read(runs):
    first, last = runs
    other = dataclasses.replace(first, model=dataclasses.replace(first.model, rope_theta=100.0))
    save_yaml(other, RunDirectory.of(first).path / "config.yaml")
    make_chat(ByteTokenizer(), "chatml").save(RunDirectory.of(first).path)
    assert config_with_model(last).model.rope_theta == first.model.rope_theta
    kept, begins = make_base(last), make_base(last, fresh=True)
    assert (kept.sizes.rope_theta, kept.chat.template) == (first.model.rope_theta, "plain")
    assert (begins.sizes.rope_theta, begins.chat.template) == (100.0, "chatml")


def test_a_config_that_starts_from_another_run_reads_that_one(runs, tmp_path):
    first, last = runs
    values = {**config_to_dict(first), "model": {**MODEL, "rope_theta": 100.0}}
    other = config_of(tmp_path / "other", values)
    keep(other, make_chat(ByteTokenizer(), "chatml"), other)
    changed = dataclasses.replace(last, start=dataclasses.replace(last.start, run=other.run.dir))
    assert make_base(changed).sizes.rope_theta == 100.0 and make_base(changed).chat.template == "chatml"


def test_a_template_that_the_run_was_begun_with_may_be_gone(runs, tmp_path):
    """Its text is kept; a config that names another one is read as it is."""
    first, last = runs
    chosen = dataclasses.replace(last.preferences, template=str(tmp_path / "gone.jinja"))
    with pytest.raises(ValueError, match="there is no chat template .*gone.jinja"):
        _ = make_base(dataclasses.replace(last, preferences=chosen)).chat
    save_yaml(dataclasses.replace(last, preferences=chosen), RunDirectory.of(last).path / "config.yaml")
    assert make_base(dataclasses.replace(last, preferences=chosen)).chat.template == "plain"
    assert make_base(last).chat.template == "plain"  # of the first run again


def test_a_run_keeps_the_files_that_an_imported_model_came_with(runs):
    """How the exported model is prompted and where it stops is written there."""
    first, last = runs
    files = RunDirectory.of(first).path / CARRIED
    files.mkdir()
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        (files / name).write_text(json.dumps({"of": name}))
    directory = RunDirectory.of(last)
    carry_from(last, directory)
    shutil.rmtree(first.run.dir)
    carry_from(last, directory)
    assert carried_of(directory.path, last) == directory.path / CARRIED
    assert (directory.path / CARRIED / "generation_config.json").is_file()
