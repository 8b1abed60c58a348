"""A part of each kind from a package of one's own, without a second file: the blocks of docs/extending.md."""

import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
import yaml
from tiny import write_tiny

import jaxfb
from jaxfb import parts
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.config import config_from_dict, config_to_dict, load_config
from jaxfb.forward_backward.head_placement import RowsPlacement, VocabularyPlacement, check_placement
from jaxfb.losses.estimators import Estimator, estimator_of
from jaxfb.losses.policy import PolicyTokens
from jaxfb.losses.preference import PreferenceLoss
from jaxfb.losses.surrogates import make_surrogate
from jaxfb.metrics import make_writers
from jaxfb.schedules import KINDS

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
REGISTRIES = (KINDS, *(part for part in vars(parts).values() if isinstance(part, parts.Registry)))


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The page's module in the directory where its author works; forgotten afterwards."""
    (tmp_path / "my_parts.py").write_text("\n\n".join(blocks("python")))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = [dict(registry._parts) for registry in REGISTRIES]
    yield tmp_path
    sys.modules.pop("my_parts", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]
    for registry, known in zip(REGISTRIES, before, strict=True):
        registry._parts = known


def test_a_schedule(own):
    assert jaxfb.schedules.make("my_parts:one_later", 2, 4).validate().summary()
    assert load_config("quickstart", ["mesh.pipe=2", "plugins=[my_parts]", "schedule=one_later"]).schedule


def test_an_optimizer_and_its_learning_rate(own):
    rate = jaxfb.lr_schedule("my_parts:steps", peak=0.5, total=40, warmup=2, every=4)
    assert [float(rate(count)) for count in (0, 1, 2, 6, 10)] == [0, 0.25, 0.5, 0.25, 0.125]
    optimizer = jaxfb.make_optimizer("my_parts:signed", learning_rate=0.5, weight_decay=0.1, scale=2.0)
    params = {"w": jnp.full((2, 2), 3.0)}
    updates, _ = optimizer.update({"w": jnp.full((2, 2), -7.0)}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["w"], -0.5 * (2 * -1 + 0.1 * 3.0), rtol=1e-6)
    with pytest.raises(ValueError, match="does not take 'scael'; did you mean 'scale'"):
        jaxfb.make_optimizer("my_parts:signed", learning_rate=0.5, scael=2.0)
    with pytest.raises(ValueError, match="must be an optax transformation"):
        jaxfb.make_optimizer("my_parts:init", learning_rate=0.5, key=jax.random.key(0))


def test_a_policy_loss(own):
    tokens = PolicyTokens(*(jnp.array([[x]]) for x in (-1.0, -2.0, 3.0)))
    loss, _ = make_surrogate("my_parts:unclipped", strength=2.0)(tokens, None)
    np.testing.assert_allclose(loss, [[-3 * np.e + 2.0]], rtol=1e-6)
    with pytest.raises(ValueError, match="has no setting 'strenght'; it has strength"):
        make_surrogate("my_parts:unclipped", strenght=2.0)


def test_an_advantage_estimator(own):
    inputs = {"rewards": np.array([1.0, 0.0]), "groups": np.zeros(2), "mask": np.array([[0, 1], [1, 1]])}
    found = estimator_of("my_parts:above_zero")(inputs, {})
    np.testing.assert_array_equal(found["advantages"], [[0, 1], [0, 0]])
    with pytest.raises(ValueError, match="'valeus' must be one of rewards, token_rewards"):
        Estimator(np.add, reads=("rewards", "valeus"))


def test_a_preference_loss(own):
    microbatch = {"loss_mask": jnp.ones((1, 2)), "segments": jnp.array([[1, 2]])}
    loss = PreferenceLoss("my_parts:squared", beta=0.5, reference_free=True)
    out = loss(jnp.array([[-1.0, -5.0]]), None, microbatch)
    assert float(out.terms["preference"].total) == (0.5 * 4 - 1) ** 2


@pytest.mark.slow
def test_a_head_placement(own):
    def gradients(placement):
        mesh = jaxfb.make_mesh(pipe=2, devices=jax.devices()[:2])
        fb = jaxfb.get_forward_backward_func(mesh, head_placement=placement)
        plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2, data_parallel=1)
        return jax.jit(fb, static_argnums=(0, 3))(
            toy.model, toy.params(layers=2), toy.batch(rows=4), plan
        ).grads

    jax.tree.map(np.testing.assert_array_equal, gradients("my_parts:Noted"), gradients("last"))
    with pytest.raises(ValueError, match="must name a subclass of"):
        check_placement("my_parts:Memory")


class OwnRows(RowsPlacement):
    """A placement that cuts rows, under a name that the engine does not know."""


class OwnVocabulary(VocabularyPlacement):
    """A placement that cuts the vocabulary, likewise."""


def test_the_rules_of_a_head_placement_are_those_of_its_class_not_of_its_name(own):
    rows, vocabulary = f"{__name__}:OwnRows", f"{__name__}:OwnVocabulary"
    mesh = jaxfb.make_mesh(pipe=2, devices=jax.devices()[:2])
    plan = jaxfb.BatchPlan(rows=3, rows_per_microbatch=3, data_parallel=1)
    parts = (toy.model, toy.params(layers=2), toy.batch(rows=3), plan)
    with pytest.raises(ValueError, match="OwnRows.* cuts a microbatch of 3 rows over pipe=2"):
        jaxfb.get_forward_backward_func(mesh, head_placement=rows)(*parts)
    with pytest.raises(ValueError, match="OwnVocabulary.* needs a model that offers Pipelined.vocabulary"):
        jaxfb.get_forward_backward_func(mesh, head_placement=vocabulary)(*parts)


def test_a_writer(own):
    writer = make_writers(["my_parts:Memory"], own, {}, None)
    writer.write(3, {"loss": 2.0})
    assert sys.modules["my_parts"].Memory.records == [(3, {"loss": 2.0})]
    with pytest.raises(ValueError, match="has no write; return an object with"):
        make_writers(["builtins:print"], own, {"a": 1}, 1)


@pytest.mark.slow
def test_a_block_with_its_rule_trains_from_the_config_of_the_page(own):
    """Loss, block, axis rule, optimizer, learning rate and writer together; the run knows them when it is resumed."""
    import my_parts

    jaxfb.check_equivalence(my_parts.gated, my_parts.init(jax.random.key(0)), my_parts.rows(), [{"tensor": 2}]) \
        .raise_if_above()  # fmt: skip
    (own / "own.yaml").write_text(blocks("yaml")[0])
    assert main(["train", "own.yaml", "run.updates=2", "mesh.data=1"]) == 0
    assert main(["train", "runs/gated", "--resume", "run.updates=3"]) == 0
    assert [step for step, _ in my_parts.Memory.records] == [1, 2, 3]
    assert CheckpointStore(own / "runs" / "gated" / "checkpoints", keep_best=None).latest() == 3


@pytest.mark.slow
def test_a_language_model_trains_on_text(own, capsys):
    model = {"name": "my_parts:bigram", "options": {"width": 8}}
    path = write_tiny(own, run={"updates": 4}, eval={"every": 4}, optimizer={"learning_rate": 0.3})
    values = {**yaml.safe_load(path.read_text()), "model": model}
    path.write_text(yaml.safe_dump(values))
    assert main(["train", "tiny.yaml"]) == 0
    assert main(["train", "run", "--resume", "run.updates=6"]) == 0
    assert "resuming run after update 4 of 6" in capsys.readouterr().out
    found = jaxfb.trainer.evaluate("run")
    assert found["eval/loss"] < np.log(257) and 0 < found["eval/accuracy"] < 1
    assert main(["train", "run", "--resume", "run.updates=8", "model.options.width=9"]) == 2
    assert "model.options.width=8 (now 9)" in capsys.readouterr().err
    for command in ("generate run --prompt a", "check tiny.yaml", "plan tiny.yaml --topology v5e:2x2"):
        assert main(command.split()) == 2
        assert "for the built-in transformer alone" in capsys.readouterr().err


def test_a_model_of_ones_own_has_its_own_keys(own):
    values = config_to_dict(load_config("quickstart")) | {
        "model": {"name": "bigram", "options": {"width": 8}}
    }
    config = config_from_dict({**values, "plugins": ["my_parts"]}, ["model.options.width=4"])
    assert config.model.options == {"width": 4} and config_from_dict(config_to_dict(config)) == config
    with pytest.raises(ValueError, match=r"model.name='bigramm' must be one of transformer, .*did you mean"):
        config_from_dict({**values, "plugins": ["my_parts"], "model": {"name": "bigramm"}})
    with pytest.raises(ValueError, match="name='bigram' cannot be used here: only `jaxfb train`"):
        load_config("sft", ["plugins=[my_parts]", "model.name=bigram"])


def test_a_registered_name_is_legal_once_its_plugin_is_named(own, capsys):
    given = ["optimizer.name=signed", "log.writers=[memory]", "parallel.head_placement=noted"]
    config = load_config("quickstart", ["plugins=[my_parts]", *given])
    assert config_from_dict(yaml.safe_load(yaml.safe_dump(config_to_dict(config)))) == config
    assert main(["config", "show", "quickstart", "plugins=[my_partz]"]) == 2
    assert "[plugins] 'my_partz' cannot be imported" in capsys.readouterr().err


def test_every_built_in_part_is_where_its_registry_looks_for_it():
    for registry in REGISTRIES:
        for name, part in registry.items():
            assert part is not None and name in registry, (registry.what, name)
        assert registry.names
    with pytest.raises(ValueError, match="the name 'adamw' is taken"):
        parts.OPTIMIZERS.register("adamw")(max)
