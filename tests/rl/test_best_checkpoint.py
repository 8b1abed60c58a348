"""The checkpoint that a run keeps as its best: by the held-out loss, or by an accuracy, which is best if highest."""

from types import SimpleNamespace

import pytest

from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.rl import supervised
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training.session import Run
from tests.rl.test_supervised import DPO, SFT, write

BEST = {"quickstart": "eval/loss", "sft": "eval/loss", "dpo": "eval/loss", "grpo_arithmetic": "eval/accuracy"}


@pytest.mark.parametrize("section", [{}, {"checkpoint": {"every": 2}}], ids=["no section", "section"])
@pytest.mark.parametrize("kind, metric", BEST.items())
def test_the_best_is_kept_without_a_setting_whether_or_not_there_is_a_section(kind, metric, section):
    values = {**config_to_dict(load_config(kind)), **section}
    if not section:
        del values["checkpoint"]
    assert config_from_dict(values).checkpoint.keep_best == metric


@pytest.mark.parametrize(
    "kind, make, term",
    [(SFT, make_supervised_work, "cross_entropy"), (DPO, make_preference_work, "preference")],
)
def test_the_held_out_loss_has_one_name_for_conversations_and_preferences(
    tmp_path, monkeypatch, kind, make, term
):
    work = make(load_config(write(tmp_path, kind)))
    work.train_state = SimpleNamespace(params=None)
    means = {f"eval/{term}": 0.5, "eval/other": 2.0}
    monkeypatch.setattr(supervised, "held_out_means", lambda *_: dict(means))
    assert work.evaluate() == {"eval/loss": 0.5, "eval/other": 2.0}


@pytest.mark.parametrize(
    "metric, lines", [("eval/los", 1), ("eval/loss", 0), ("eval/accuracy", 0), (None, 0)]
)
def test_a_run_prints_once_where_no_evaluation_has_the_number_of_its_best_checkpoint(tmp_path, metric, lines):
    config = load_config(write(tmp_path, SFT, checkpoint={"keep_best": metric}))
    printed = []
    found = {"eval/loss": 1.0, "eval/accuracy": 0.5}
    work = SimpleNamespace(config=config, evaluate=lambda: found)
    run = Run(work, SimpleNamespace(checkpoints=tmp_path / "checkpoints"), printed.append)
    run.evaluate()
    run.evaluate()
    assert len(printed) == lines
    if lines:
        assert printed[0].endswith("is kept as the best; use one of eval/accuracy, eval/loss")
