"""`jaxfb replay` on the built-in transformer: the bits of the run, and the layer where the first nan appears."""

import dataclasses

import jax
import pytest
from tiny import write_tiny

from jaxfb import trainer
from jaxfb.chaos.injectors import AfterUpdate
from jaxfb.cli.commands import main
from jaxfb.config import load_config


def poisoned(layer):
    def change(state):
        params = dict(state.params)
        leaves, structure = jax.tree.flatten(params["layers"])
        leaves[0] = leaves[0].at[layer].set(float("nan"))
        params["layers"] = jax.tree.unflatten(structure, leaves)
        return dataclasses.replace(state, params=params)

    return change


@pytest.mark.slow
@pytest.mark.slow
def test_a_layer_whose_parameters_went_bad_is_named(tmp_path, capsys):
    short = {
        "run": {"updates": 8, "max_nonfinite": 2},
        "eval": {"every": None, "prompt": ""},
        "lr": {"warmup": 0},
    }
    config = load_config(write_tiny(tmp_path, **short, checkpoint={"every": None}))
    with pytest.raises(trainer.NonFiniteAbort, match="computed again with: jaxfb replay") as error:
        trainer.train(config, callbacks=[AfterUpdate(3, poisoned(1))])
    dump = str(error.value).rpartition(" ")[2]
    assert dump.endswith("update-000005")
    capsys.readouterr()
    assert main(["replay", dump]) == 0
    out = capsys.readouterr().out
    assert "update 5 computed again: loss nan" in out and "the same bits as in the run" in out
    assert "parameter ['layers']" in out
    assert "first value that is not finite: what layer 1 returns, in microbatch 0" in out


def test_a_wrong_path_is_one_sentence(tmp_path, capsys):
    assert main(["replay", str(tmp_path)]) == 2
    assert "is not a dump; use a directory RUN/dumps/update-N" in capsys.readouterr().err


def test_a_run_in_place_of_its_dump_is_answered_with_the_dump(tmp_path, capsys):
    dump = tmp_path / "dumps" / "update-000005"
    dump.mkdir(parents=True)
    (dump / "dump.json").touch()
    for wrong in (tmp_path, tmp_path / "dumps" / "update-5"):
        assert main(["replay", str(wrong)]) == 2
        assert f"use a directory RUN/dumps/update-N such as {dump}\n" in capsys.readouterr().err
