"""A few of the configs that `python tests/misuse/configs.py` draws by the thousand: read, planned or refused."""

import pytest

from configs import BASES, config, keys, outcome
from jaxfb.config.load import load_config
from jaxfb.schedules import KINDS


@pytest.mark.parametrize("base", BASES)
def test_the_configs_that_are_changed_are_legal_themselves(base):
    load_config(base)


def test_every_config_is_read_or_refused_in_a_sentence():
    assert {outcome(seed) for seed in range(150)} == {"read", "refused"}


def test_what_is_read_can_be_planned_or_is_refused():
    outcomes = [outcome(seed, plans=True) for seed in range(12)]
    assert "planned" in outcomes and set(outcomes) <= {"planned", "refused"}


@pytest.mark.slow
def test_the_keys_of_every_command_are_drawn():
    every = {".".join(path) for base in BASES for path, _ in keys(type(load_config(base)))}
    configs = [config(seed) for seed in range(1200)]
    drawn = {key for _, changed in configs for key in changed}
    assert len(every - drawn) < 0.1 * len(every)
    assert {str(values.get("schedule")) for values, _ in configs} >= set(KINDS)
    late = {
        "trainable",
        "lora",
        "model.from",
        "model.window",
        "model.pattern",
        "model.latent",
        "checkpoint.local",
    }
    assert late <= drawn and {"schedule", "guard.verify_every"} <= drawn
