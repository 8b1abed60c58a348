"""What is handed over by mistake is refused in one sentence that names it, before anything is traced."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from flax.training.train_state import TrainState as FlaxState
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb import BatchPlan, LossOutput, Max, Sum, get_forward_backward_func, make_mesh, schedules

X = np.random.default_rng(0).normal(size=(8, 3))
BATCH = {"x": X, "y": X[:, 0]}
PLAN = BatchPlan(rows=8, num_microbatches=2)
W = np.array([0.5, -1.0, 2.0])


def loss_fn(w, microbatch, rng):
    return Sum(((microbatch["x"] @ w - microbatch["y"]) ** 2).sum(), microbatch["x"].shape[0])


def call(model=loss_fn, params=W, batch=BATCH, plan=PLAN, rng=None, **options):
    return get_forward_backward_func()(model, params, batch, plan, rng, **options)


class Unhashable:
    __hash__: Callable = None

    def __call__(self, w, microbatch, rng):
        return loss_fn(w, microbatch, rng)


FLAX_STATE = FlaxState.create(apply_fn=None, params={"w": W}, tx=optax.sgd(0.1))
MLP = eqx.nn.MLP(3, 1, 4, 1, key=jax.random.key(0))

REFUSED = {
    "a state of Flax": (
        dict(params=FLAX_STATE),
        r"params must be the parameters alone, got a whole TrainState; hand over state\.params of it",
    ),
    "our state": (
        dict(params=jaxfb.TrainState.create(W, optax.sgd(0.1))),
        r"; hand over state\.params of it",
    ),
    "no model": (dict(model=None), r"model must be a loss function \(params, microbatch, rng\).*got None"),
    "a class": (dict(model=jaxfb.Pipelined), "model must be a loss function.*got <class"),
    "two arguments": (
        dict(model=lambda w, mb: loss_fn(w, mb, None)),
        r"must take \(params, microbatch, rng\), but <lambda> takes \(w, mb\)",
    ),
    "four arguments": (dict(model=lambda w, mb, rng, more: None), r"takes \(w, mb, rng, more\)"),
    "a model's own call": (dict(model=MLP), r"must take \(params, microbatch, rng\), but MLP takes"),
    "unhashable": (
        dict(model=Unhashable()),
        "must be hashable.*but Unhashable is not.*write a plain function",
    ),
    "a stage": (
        dict(model=jaxfb.Pipelined(toy.embed, lambda p, h: h, toy.head), params=toy.params()),
        r"Pipelined.layer must take \(layer_params, hidden, microbatch, rng\), but <lambda> takes \(p, h\)",
    ),
    "no stage": (
        dict(model=jaxfb.Pipelined(toy.embed, None, toy.head), params=toy.params()),
        "Pipelined.layer must be a function .*got None",
    ),
    "a Python float": (dict(params={"a": 1.0}), r"params\['a'\] is 1.0; make it jnp.asarray\(1.0\)"),
    "a text": (dict(params={"a": "x"}), r"must be an array, params\['a'\] is 'x'"),
    "an Equinox model": (dict(params=MLP), r"params.activation is .*eqx.partition"),
    "no batch": (dict(batch=None), "batch must have at least one array .*got None"),
    "an empty batch": (dict(batch={}), "batch must have at least one array .*got {}"),
    "a list of microbatches": (
        dict(batch=[{"x": X[:4]}, {"x": X[4:]}]),
        r"one tree of arrays \[rows, ...\], got a list of 2 dicts; concatenate microbatches",
    ),
    "text in the batch": (
        dict(batch={"x": X, "name": np.array(["a"] * 8)}),
        r"batch\['name'\] has dtype <U1",
    ),
    "another order of bytes": (
        dict(batch={"x": X.astype(">f4")}),
        r"batch\['x'\] is a ndarray of >f4; convert it with np.asarray\(leaf, 'float32'\)",
    ),
    "a masked array": (dict(batch={"x": np.ma.masked_array(X)}), r"batch\['x'\] is a MaskedArray"),
    "a generator": (dict(batch=(part for part in [BATCH])), "one tree of arrays .*got a generator"),
    "no plan": (dict(plan=None), "plan must be a jaxfb.BatchPlan, got None"),
    "rng of text": (dict(rng="seed"), "rng must be None, an integer, a key.*got 'seed'"),
    "rng of a float": (dict(rng=0.5), "rng must be None, an integer, a key.*got 0.5"),
    "rng of indices": (dict(rng=np.arange(8)), r"rng must be None.*got array\(\[0, 1"),
    "a scale of text": (dict(grad_scale="8"), "grad_scale must be one finite number.*got '8'"),
    "no scale": (dict(grad_scale=None), "grad_scale must be one finite number.*got None"),
    "scales": (dict(grad_scale=np.ones(2)), "grad_scale must be one finite number"),
    "forward_only": (dict(forward_only="yes"), "forward_only must be True or False, got 'yes'"),
}


@pytest.mark.parametrize("change, words", REFUSED.values(), ids=REFUSED)
def test_a_call_refuses_what_does_not_belong_there(change, words):
    with pytest.raises(ValueError, match=words):
        call(**change)


def returning(terms=None, **rest):
    return lambda w, mb, rng: LossOutput(
        {"a": loss_fn(w, mb, rng)} if terms is None else terms(w, mb), **rest
    )


ANSWERS = {
    "nothing": (lambda w, mb, rng: None, "must return jaxfb.LossOutput or jaxfb.Sum.*got a NoneType"),
    "a dict": (lambda w, mb, rng: {"a": loss_fn(w, mb, rng)}, r"got a dict with the keys \['a'\]"),
    "a list of terms": (returning(lambda w, mb: [1]), "LossOutput.terms must be a dict .*got a list"),
    "terms by number": (returning(lambda w, mb: {0: 1, "a": 2}), r"LossOutput.terms .*the keys \[0, 'a'\]"),
    "no metrics": (returning(metrics=None), "LossOutput.metrics must be a dict .*got a NoneType"),
    "a text": (lambda w, mb, rng: Sum("a", "b"), "term 'loss' must contain arrays of numbers, got a str"),
    "a weight of text": (lambda w, mb, rng: Sum(w.sum(), "b"), "term 'loss' must contain .* got a str"),
    "a complex weight": (lambda w, mb, rng: Sum(w.sum(), 1j), "real numbers, got complex128"),
    "no total": (lambda w, mb, rng: Sum(None, 1.0), "term 'loss' must contain .* got a NoneType"),
    "an empty metric": (returning(metrics={"m": Max(None)}), "metric 'm' must contain .* got a NoneType"),
    "weights of another shape": (
        returning(metrics={"m": Sum(np.ones(3), np.ones(2))}),
        r"one weight, or one for each of its totals \(3,\), got weights of shape \(2,\)",
    ),
    "outputs of text": (returning(outputs={"o": "text"}), r"leaf \['o'\] must be \[4, ...\], got a str"),
}


@pytest.mark.parametrize("model, words", ANSWERS.values(), ids=ANSWERS)
def test_a_loss_function_that_returns_something_else_is_refused(model, words):
    with pytest.raises(ValueError, match=words):
        call(model)


def test_an_int_is_the_seed_of_a_key():
    def noisy(w, mb, keys):
        noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        return Sum(((mb["x"] + noise) @ w).sum(), mb["x"].shape[0])

    raw = jax.random.key_data(jax.random.key(7))
    losses = [call(noisy, rng=rng).loss for rng in (7, np.int32(7), jax.random.key(7), raw, np.asarray(raw))]
    assert len({float(loss) for loss in losses}) == 1
    by_row = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(7), jnp.arange(8))
    assert call(noisy, rng=jax.random.key_data(by_row)).loss == losses[0]


OPTIONS = {
    "mesh": (dict(mesh="cpu"), "mesh must be a jax.sharding.Mesh.*got 'cpu'"),
    "sizes": (dict(mesh={"data": 2}), "mesh must be a jax.sharding.Mesh.*make_mesh"),
    "remat": (dict(remat=["full"]), r"remat must be one of .*got \['full'\]"),
    "lengths of text": (
        dict(mesh={"pipe": 2}, layers_per_stage="12"),
        "layers_per_stage must be a list .*'12'",
    ),
    "one length": (dict(mesh={"pipe": 2}, layers_per_stage=3), "layers_per_stage must be a list .*got 3"),
    "broken lengths": (dict(mesh={"pipe": 2}, layers_per_stage=(0.5, 1.5)), r"got \(0.5, 1.5\)"),
    "negative lengths": (dict(mesh={"pipe": 2}, layers_per_stage=(-1, 3)), r"got \(-1, 3\)"),
    "specs": (dict(param_specs={"w": P()}), "param_specs must be a function .*got {'w'"),
    "placement": (
        dict(mesh={"pipe": 2}, schedule=schedules.make("1f1b", 2, 2), head_placement="first"),
        "head_placement must be one of 'vocabulary', 'rows', 'last', got 'first'",
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_another_kind_are_refused(name):
    options, words = OPTIONS[name]
    if isinstance(options.get("mesh"), dict) and "pipe" in options["mesh"]:
        options = options | {"mesh": make_mesh(**options["mesh"])}
    with pytest.raises(ValueError, match=words):
        get_forward_backward_func(**options)


SPECS = {
    "of another tree": (lambda params: {"q": P()}, r"for params\['w'\] of shape \(4, 2\) it gives None"),
    "too long": (
        lambda params: {"w": P(None, None, "tensor")},
        r"for params\['w'\] of shape \(4, 2\) it gives .*'tensor'",
    ),
    "too many": (lambda params: {"w": P(), "v": P()}, r"entries that are not parameters: params\['v'\]"),
}


@pytest.mark.parametrize("rule, words", SPECS.values(), ids=SPECS)
def test_a_rule_that_does_not_fit_the_parameters_is_refused(rule, words):
    fb = get_forward_backward_func(make_mesh(tensor=2), param_specs=rule)
    with pytest.raises(ValueError, match=words):
        fb.param_specs(loss_fn, {"w": np.ones((4, 2))})


PIPELINE = dict(model=toy.model, params=toy.params(layers=2), batch=toy.batch(rows=4))


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.make("1f1b", 2, 2).forward_only(),
        schedules.Schedule.from_table([["F0.0", None], ["F1.0", "F0.0"], [None, "F1.0"]]),
    ],
    ids=["forward_only", "a table without B"],
)
def test_a_schedule_without_a_backward_trains_nothing(schedule):
    """It would give zero gradients of the layers, and wrong ones of the rest."""
    fb = get_forward_backward_func(make_mesh(pipe=2), schedule)
    plan = BatchPlan(rows=4, rows_per_microbatch=2)
    with pytest.raises(
        ValueError, match="has no backward, so it only serves forward_only=True; pass one with B"
    ):
        fb(**PIPELINE, plan=plan)
    assert np.isfinite(fb(**PIPELINE, plan=plan, forward_only=True).loss)


CHECKED = {
    "no model": (dict(model=None), "model must be a loss function"),
    "no batch": (dict(batch={}), "batch must have at least one array"),
    "ragged": (dict(batch={"x": X, "y": X[:6, 0]}), r"must have the same rows, got leaves of \[6, 8\] rows"),
    "a mesh of text": (dict(meshes=["data"]), "meshes must be a list of jax meshes or of sizes .*got 'data'"),
    "an axis": (dict(meshes=[{"datas": 2}]), "with axes among pipe, data, .*got {'datas': 2}"),
}


@pytest.mark.parametrize("change, words", CHECKED.values(), ids=CHECKED)
def test_check_equivalence_refuses_what_it_cannot_compare(change, words):
    given = dict(model=loss_fn, params=W, batch=BATCH, meshes=[{"data": 2}])
    with pytest.raises(ValueError, match=words):
        jaxfb.check_equivalence(**given | change)


def test_check_equivalence_takes_one_mesh_as_a_list_of_it():
    assert jaxfb.check_equivalence(loss_fn, W, BATCH, {"data": 2}, rng=0).worst.mesh == "data=2"
