"""Options of the optimizer, of its schedules and of trained parameters are refused before data are read."""

import pytest
from tiny import write_tiny

from jaxfb.config import load_config
from jaxfb.rl import policy, preference, start, supervised
from jaxfb.rl.policy import make_policy_work
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training.custom import make_custom
from jaxfb.training.setup import make_setup

WRONG = {
    "optimizer.options={b3: 1}": r"^\[optimizer\] make_optimizer\('adamw'\) does not take 'b3'; did you mean",
    "optimizer.options={b1: 2}": r"^\[optimizer\] make_optimizer\('adamw'\): b1 must be .* below 1, got 2$",
}
OF_THE_LENGTH = {
    "lr.options={power: 1}": r"^\[lr\] lr_schedule\('cosine'\) does not take 'power'; choose from clamp, cycles",
    "lr={name: wsd, options: {decay: 999}}": r"^\[lr\] lr_schedule\('wsd'\): decay=999 must be from 1 to .* use",
    "optimizer={learning_rate: 1, weight_decay_ramp: linear, weight_decay_initial: -3}": r"^\[optimizer\] weight_d",
    "trainable=[layerz.*]": r"no parameter matches 'layerz\.\*'",
}


def unread(*arguments):
    pytest.fail("data were read")


@pytest.mark.parametrize("override", [*WRONG, *OF_THE_LENGTH])
def test_pretraining_refuses_them_before_the_text(override, tmp_path):
    config = load_config(write_tiny(tmp_path), ["lr.name=cosine", override])
    with pytest.raises(ValueError, match={**WRONG, **OF_THE_LENGTH}[override]):
        make_setup(config, lambda text: None, unread)


def test_a_run_in_epochs_reads_the_text_to_know_its_length(tmp_path):
    in_epochs = ["run.updates=null", "run.epochs=1"]
    with pytest.raises(ValueError, match="b3"):
        config = load_config(write_tiny(tmp_path), [*in_epochs, "optimizer.options={b3: 1}"])
        make_setup(config, lambda text: None, unread)
    with pytest.raises(pytest.fail.Exception, match="data were read"):
        make_setup(load_config(write_tiny(tmp_path), in_epochs), lambda text: None, unread)


OF_A_KNOWN_LENGTH = {
    **{
        override: OF_THE_LENGTH[override]
        for override in OF_THE_LENGTH
        if not override.startswith("trainable")
    },
    "lr.warmup=20": r"^\[lr\] lr_schedule\('cosine'\): warmup=20 must be below total=20; use at most 19",
    "lr={name: cosine, warmup: 900, total: 500}": r"^\[lr\] .*: warmup=900 must be below total=500",
}
TWENTY = ["lr.name=cosine", "lr.warmup=0", "batch.epochs=null", "batch.updates=20"]
TWENTY_OF_A_POLICY = ["lr.name=cosine", "lr.warmup=0", "rollout.rollouts=10"]


@pytest.mark.parametrize("override", [*WRONG, *OF_A_KNOWN_LENGTH])
@pytest.mark.parametrize("kind", ["sft", "dpo", "rl"])
def test_post_training_refuses_them_before_its_data(kind, override, monkeypatch):
    for where, name in (
        (supervised, "read_conversations"),
        (preference, "read_preferences"),
        (policy, "make_task"),
    ):
        monkeypatch.setattr(where, name, unread)
    monkeypatch.setattr(start, "tokenizer_of", unread)
    if kind == "rl":
        config = load_config("grpo_arithmetic", [*TWENTY_OF_A_POLICY, override])
    else:
        config = load_config(kind, [*TWENTY, override])
    make = {"sft": make_supervised_work, "dpo": make_preference_work, "rl": make_policy_work}[kind]
    with pytest.raises(ValueError, match={**WRONG, **OF_A_KNOWN_LENGTH}[override]):
        make(config)


def test_fine_tuning_in_epochs_refuses_what_needs_no_length(monkeypatch):
    monkeypatch.setattr(start, "tokenizer_of", unread)
    for override, said in (
        ("optimizer.options={b3: 1}", "b3"),
        ("lr={total: 500, warmup: 900}", "warmup=900 must be below total=500"),
        ("lr={name: cosine, total: 500, options: {power: 1}}", "does not take 'power'"),
    ):
        with pytest.raises(ValueError, match=said):
            make_supervised_work(load_config("sft", [override]))


def test_rows_of_a_policy_are_known_before_its_task(monkeypatch):
    monkeypatch.setattr(start, "tokenizer_of", unread)
    in_rows = [*TWENTY_OF_A_POLICY, "lr.unit=samples", "lr.warmup=5120"]
    with pytest.raises(ValueError, match=r"warmup=5120 must be below total=5120; use at most 5119"):
        make_policy_work(load_config("grpo_arithmetic", in_rows))


OWN = """
model: mine:model
params: mine:params
data: mine:data
batch: {rows: 2, rows_per_microbatch: 1}
run: {updates: 1, dir: run}
mesh: {data: 1}
"""


@pytest.mark.parametrize("optimizer", ["{learning_rate: 1, options: {b3: 1}}", "null"])
def test_a_model_of_ones_own_is_not_read_before(optimizer, tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN + f"optimizer: {optimizer}\n")
    config = load_config(path)
    with pytest.raises(ValueError, match=r"^\[optimizer\] (must be given|make_optimizer)"):
        make_custom(config, data=unread)


def test_a_model_of_ones_own_is_not_read_before_its_schedule_fits_the_run(tmp_path):
    path = tmp_path / "own.yaml"
    path.write_text(OWN + "optimizer: {learning_rate: 1}\nlr: {warmup: 1}\n")
    with pytest.raises(ValueError, match=r"^\[lr\] .*: warmup=1 must be below total=1; use at most 0"):
        make_custom(load_config(path), data=unread)
