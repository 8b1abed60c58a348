"""Configs, checkpoints, callbacks and whole runs with one wrong argument."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from legal import boolean, either, functions, integers, maybe, nothing, numbers, one_of, positive_int, texts
from wrong import Call, outcome, pool, refusal_problem, text_of

import jaxfb
from jaxfb.callbacks import HOOKS, combine
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import config_from_dict, config_to_dict
from jaxfb.config.fields import all_keys
from jaxfb.config.load import kind_of

STARTERS = ("quickstart", "moe", "sft", "dpo", "grpo_arithmetic", "ppo_arithmetic")
STATE = {"w": jnp.ones(3)}
CONFIG = r"\[config\]"


def starter(name):
    """The plain values of a starter config, as YAML has them."""
    return config_to_dict(jaxfb.load_config(name))


def arrays(value):
    """Arrays of numbers that a checkpoint can have as its only leaf."""
    return isinstance(value, np.ndarray | jax.Array) and value.size and value.dtype.kind in "fiu"


def calls(directory, store):
    """Every call; `store` holds one checkpoint, and nothing else is written."""
    numbers_of_steps = iter(range(10, 10**6))
    legal_data = {"x": np.ones((8, 3), np.float32)}
    return [
        Call(
            "load_config",
            jaxfb.load_config,
            lambda: dict(path="quickstart"),
            {
                "path": nothing,
                "overrides": one_of(((), [], {}, set())),
                "command": maybe(one_of(("train",))),
            },
            {"path": f"{CONFIG}", "overrides": f"override|{CONFIG}", "command": CONFIG},
        ),
        Call(
            "config_from_dict",
            config_from_dict,
            lambda: dict(values=starter("quickstart")),
            {"values": nothing},
            {"values": CONFIG},
        ),
        Call("callback", jaxfb.callback, dict, dict.fromkeys(HOOKS, functions)),
        Call(
            "combine callbacks",
            combine,
            lambda: dict(callbacks=[]),
            {"callbacks": one_of(([], (), {}, set()))},
            {"callbacks": r"\[callbacks\]"},
        ),
        Call(
            "CheckpointStore",
            CheckpointStore,
            lambda: dict(directory=directory / "new"),
            {
                "directory": lambda value: isinstance(value, str | pathlib.Path),
                "keep": positive_int,
                "keep_best": maybe(texts),
                "asynchronous": boolean,
                "best_is": one_of((None, "lowest", "highest")),
            },
        ),
        Call(
            "CheckpointStore.save",
            lambda step=None, **rest: store.save(next(numbers_of_steps) if step is None else step, **rest),
            lambda: dict(state=STATE, host={}),
            {
                "step": maybe(integers(0, 2**63 - 1)),
                "state": arrays,
                "host": one_of(({}, {"a": 1}, {None: None})),
            },
            {"state": "state|leaf"},
        ),
        Call(
            "CheckpointStore.restore",
            store.restore,
            lambda: dict(abstract_state=STATE),
            {"abstract_state": nothing, "step": maybe(integers(0, 2**63 - 1)), "partial": boolean},
            {"abstract_state": "state|leaf|checkpoint"},
        ),
        Call("CheckpointStore.host", store.host, dict, {"step": maybe(integers(0, 2**63 - 1))}),
        Call(
            "Trainer",
            jaxfb.Trainer,
            lambda: dict(
                model=lambda params, microbatch, rng: None,
                params={"w": np.ones(3, np.float32)},
                data=legal_data,
                optimizer=optax.sgd(0.1),
                dir=str(directory / "run"),
                updates=3,
                rows=4,
                rows_per_microbatch=2,
            ),
            {
                "optimizer": nothing,
                "dir": either(texts, lambda value: isinstance(value, pathlib.Path)),
                "rows": positive_int,
                "rows_per_microbatch": maybe(positive_int),
                "num_microbatches": maybe(positive_int),
                "updates": maybe(positive_int),
                "epochs": maybe(numbers(above=0)),
                "loss": maybe(functions),
                "evaluate": maybe(functions),
                "callbacks": one_of(([], (), {}, set())),
                "seed": integers(0, 2**64),
                "max_grad_norm": maybe(numbers(above=0)),
                "mesh": one_of(({},)),
                "batch": one_of(({},)),
                "run": one_of(({},)),
                "no_such_section": nothing,
            },
        ),
        *(
            Call(name, function, lambda starter=starter: dict(config=short(starter, directory)), RUN)
            for name, function, starter in (
                ("train", jaxfb.train, "quickstart"),
                ("post_train", jaxfb.post_train, "sft"),
            )
        ),
    ]


RUN = {
    "config": nothing,
    "resume": boolean,
    "fresh": boolean,
    "allow_changes": boolean,
    "callbacks": one_of(([], (), {}, set())),
}


def short(name, directory):
    """A starter config that would run in this directory; no call gets so far."""
    return jaxfb.load_config(name, [f"run.dir={directory / 'never'}"])


@pytest.fixture(scope="module")
def all_calls(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    with CheckpointStore(directory / "checkpoints", asynchronous=False) as store:
        store.save(1, STATE, {"update": 1})
        yield calls(directory, store)


@pytest.mark.slow
def test_one_wrong_argument_is_refused_by_name(all_calls):
    failures = [failure for call in all_calls for failure in call.failures(pool(seed=9), legal_too=False)]
    assert not failures


def test_an_argument_left_out_or_unknown_is_named(all_calls):
    assert not [failure for call in all_calls for failure in call.signature_failures()]


def config_failures(name, seed, count):
    """What is wrong with the answers to one key of a config that has another value, or that does not exist."""
    values = starter(name)
    found = []
    for number, key in enumerate(all_keys(kind_of(values))):
        for make in pool(seed + number, count):
            changed = node = dict(values)
            *sections, leaf = key.split(".")
            for section in sections:
                node[section] = dict(node[section]) if isinstance(node.get(section), dict) else {}
                node = node[section]
            node[leaf] = make()
            error = outcome(lambda changed=changed: config_from_dict(changed))
            problem = error and refusal_problem(error, leaf, key, *sections)
            if problem:
                found.append(f"{name}: {key}={text_of(make())}: {problem}")
    return found


@pytest.mark.parametrize("name", STARTERS, ids=str)
def test_any_value_of_any_key_is_taken_or_refused_by_the_key(name):
    assert not config_failures(name, seed=10, count=3)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTERS, ids=str)
def test_many_values_of_any_key_are_taken_or_refused_by_the_key(name):
    assert not config_failures(name, seed=11, count=40)
