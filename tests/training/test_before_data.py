"""Options of the optimizer, of its schedules and of trained parameters are refused before data are read."""

import pytest
from tiny import write_tiny

from jaxfb.config import load_config
from jaxfb.rl import supervised
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


@pytest.mark.parametrize("override", WRONG)
def test_fine_tuning_refuses_them_before_the_conversations(override, monkeypatch):
    monkeypatch.setattr(supervised, "read_conversations", unread)
    with pytest.raises(ValueError, match=WRONG[override]):
        make_supervised_work(load_config("sft", [override]))


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
