"""Rows of mixed length on as few context devices as hold them: the loss and gradient of one device's whole batch."""

from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from whole import ragged_batch, value_and_grad

import jaxfb
from jaxfb.forward_backward import calls
from jaxfb.hlo import collectives
from jaxfb.losses.language_model import next_token_loss
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.context import context_attention, size_here

ROWS, LENGTH = 7, 16
LENGTHS = np.array([3, 16, 0, 7, 4, 9, 2])
CONFIG = TransformerConfig(vocab_size=16, num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=2)
WIDTHS = {"max_tokens_per_microbatch": 16, "sequence_length": LENGTH, "widths": (4, 8, 16)}


def loss(hidden, kernel, microbatch, axis=None):
    return next_token_loss(hidden, kernel, microbatch, chunk=64, outputs="tokens", axis=axis)


MODEL = transformer(CONFIG, loss=loss)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(CONFIG, key, jnp.float64))(jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
    return ragged_batch(LENGTHS, LENGTH)


@pytest.fixture(scope="module")
def whole(params, batch):
    return value_and_grad(MODEL, params, batch)


def small(params, microbatch, keys):
    """A layer of attention, dropout by row and two terms of different weights."""
    hidden = params["embed"][microbatch["tokens"]]
    if keys is not None:
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (8,)))(keys)
        hidden = hidden * keep[:, None]
    heads, segments = hidden.reshape(*hidden.shape[:2], 2, 4), microbatch["segments"]
    if size_here() > 1:
        mixed = context_attention(heads, heads, heads, segments=segments, method="all_gather")
    else:
        scores = jnp.einsum("rthk,rshk->rhts", heads, heads) / 2
        seen = jnp.tril(segments[:, :, None] == segments[:, None, :])[:, None]
        mixed = jnp.einsum("rhts,rshk->rthk", jax.nn.softmax(jnp.where(seen, scores, -1e30)), heads)
    return read_out(mixed.reshape(hidden.shape), microbatch)


def alone(params, microbatch, keys):
    """No token looks at another one."""
    return read_out(jnp.tanh(params["embed"][microbatch["tokens"]]), microbatch)


def read_out(hidden, microbatch):
    of_token = (hidden**2).sum(-1)
    mask, real = microbatch["loss_mask"], microbatch["segments"] > 0
    terms = {
        "masked": jaxfb.Sum((of_token * mask).sum(), mask.sum()),
        "all": jaxfb.Sum(jnp.where(real, hidden[..., 0], 0).sum(), real.sum()),
    }
    metrics = {"largest": jaxfb.Max(jnp.where(real, of_token, 0).max())}
    return jaxfb.LossOutput(terms, metrics, jnp.where(real, of_token, 0))


TABLE = {"embed": np.random.default_rng(1).normal(size=(16, 8))}
KEY = jax.random.key(3)


def close(got, wanted):
    chex.assert_trees_all_equal_structs(got, wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * max(1, np.abs(b).max()))


def plan_on(mesh, **more):
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    sizes = WIDTHS | {"max_context": mesh.get("context", 1)} | more
    return jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, **sizes)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


CASES = [
    ({"context": 2}, {"widths": (4, 16), "packing": True}, {}),
    slow({"data": 2, "fsdp": 2, "context": 2}, {}, {"optimizer_sharding": "gradients"}),
    slow(
        {"fsdp": 2, "context": 2, "tensor": 2},
        {"packing": True},
        {"normalize": "none", "fsdp_gather": "step", "optimizer_sharding": "data"},
    ),
    slow({"pipe": 2, "context": 4}, {"packing": True}, {}),
    slow({"pipe": 2, "data": 2}, {}, {"schedule": "zero_bubble"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("mesh, budget, options", CASES, ids=str)
def test_context_sizes_change_nothing(mesh, budget, options, params, batch, whole):
    (value, out), grads = whole
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    got = fb(MODEL, params, batch, plan_on(mesh, **budget))
    by = out.terms["cross_entropy"].weight if options.get("normalize") == "none" else 1
    wanted = (value * by, jax.tree.map(lambda leaf: leaf * by, grads), out.outputs)
    close((got.loss, got.grads, got.outputs), wanted)
    assert float(got.terms["cross_entropy"].weight) == batch["loss_mask"].sum()


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss_fn, rng",
    [(small, KEY), (alone, None)],
    ids=["attention and dropout", "no attention"],
)
def test_any_loss_function_keeps_its_numbers(loss_fn, rng, batch):
    one = jaxfb.get_forward_backward_func(jaxfb.make_mesh(devices=jax.devices()[:1]))
    wanted = one(loss_fn, TABLE, batch, jaxfb.BatchPlan(rows=ROWS, num_microbatches=1), rng)
    mesh = {"data": 2, "context": 2}
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh))
    with pytest.warns(UserWarning, match="does not communicate") if loss_fn is alone else nullcontext():
        got = fb(loss_fn, TABLE, batch, plan_on(mesh), rng, grad_scale=4.0)
    scaled = jax.tree.map(lambda leaf: leaf / 4, got.grads)
    close(
        (got.loss, scaled, got.outputs, got.terms, got.metrics),
        (wanted.loss, wanted.grads, wanted.outputs, wanted.terms, wanted.metrics),
    )
    assert len(got.per_microbatch["masked"].total) > 1 and int(got.origin.rows) == ROWS
    if loss_fn is small:
        return
    only = fb(loss_fn, TABLE, batch, plan_on(mesh, purpose="eval"), rng, forward_only=True)
    close((only.loss, only.outputs, only.grads), (wanted.loss, wanted.outputs, None))


def test_short_rows_on_one_device_and_long_ones_on_two_keep_their_numbers(batch):
    """Against the loss function itself, differentiated on all rows."""

    def whole(table):
        out = small(table, batch, None)
        return sum(term.value for term in out.terms.values()), out

    (loss, wanted), grads = jax.jit(jax.value_and_grad(whole, has_aux=True))(TABLE)
    mesh = {"context": 2}
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh, devices=jax.devices()[:2]))
    got = fb(small, TABLE, batch, plan_on(mesh, widths=(8, 16)), grad_scale=4.0)
    terms = {name: jaxfb.Sum(term.total, float(term.weight)) for name, term in got.terms.items()}
    scaled = jax.tree.map(lambda leaf: leaf / 4, got.grads)
    close(
        (got.loss, scaled, got.outputs, terms, got.metrics),
        (loss, grads, wanted.outputs, wanted.terms, wanted.metrics),
    )
    assert int(got.origin.rows) == ROWS


def test_a_plan_of_another_purpose_than_an_update_is_for_passes_without_a_backward(batch):
    """Log-probs of a policy and evaluations have plans of their own, also by width."""
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=1))
    plan = plan_on({}, purpose="logprob_ref")
    assert fb(alone, TABLE, batch, plan, forward_only=True).outputs.shape == (ROWS, LENGTH)
    with pytest.raises(ValueError, match='got plan "logprob_ref"'):
        fb(alone, TABLE, batch, plan)


def test_one_reduction_whatever_the_number_of_widths(batch, monkeypatch):
    """The programs of the widths reduce records, that of the end all gradients: into shards, and these over data."""
    texts, table = {}, {"embed": np.zeros((1024, 8))}

    def recorded(function, of_options):
        def jitted(options):
            def run(*given):
                texts.setdefault(function.__name__, []).append(
                    of_options(options).lower(*given).compile().as_text()
                )
                return of_options(options)(*given)

            return run

        return jitted

    made = {function: recorded(function, how) for function, how in calls.JITTED.items()}
    monkeypatch.setattr(calls, "JITTED", made)
    mesh = {"data": 2, "context": 2}
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), fsdp_gather="step")
    fb(small, table, batch, plan_on(mesh))
    size = table["embed"].nbytes
    reductions = {
        name: [
            (one.kind, one.bytes)
            for text in each
            for one in collectives(text)
            if one.kind in ("all-reduce", "reduce-scatter") and one.bytes >= size / 2
        ]
        for name, each in texts.items()
    }
    assert len(texts["add"]) == 3 and not reductions["add"] and not reductions["weigh"]
    assert reductions["reduce"] == [("reduce-scatter", size), ("all-reduce", size / 2)]
    assert "run" not in texts


@pytest.mark.slow
def test_an_update_is_that_of_one_device(batch):
    options = {"max_grad_norm": 0.5, "dropout": True}
    one = jaxfb.make_train_step(
        small, optax.adam(0.1), None, jaxfb.BatchPlan(rows=ROWS, num_microbatches=1), **options
    )
    mesh = {"fsdp": 2, "context": 2}
    plan = plan_on(mesh, max_tokens_per_microbatch=32)
    step = jaxfb.make_train_step(small, optax.adam(0.1), jaxfb.make_mesh(**mesh), plan, **options)
    state, metrics = one(one.init(TABLE), batch)
    other, of_other = step(step.init(TABLE), batch)
    close(other.params, state.params)
    close(
        (of_other.loss, of_other.grad_norm, of_other.weights),
        (metrics.loss, metrics.grad_norm, metrics.weights),
    )
    assert int(other.samples) == ROWS
    again, _ = step.apply(other, step.gradients(other, batch))
    state, _ = one(state, batch)
    close(again.params, state.params)


def test_what_cannot_run_so_is_refused(batch):
    mesh = {"data": 2, "context": 2}
    on = lambda **options: jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)  # noqa: E731
    with pytest.raises(ValueError, match=r"max_context=4, the mesh has context=2"):
        on()(small, TABLE, batch, plan_on(mesh, max_context=4))
    with pytest.raises(ValueError, match='normalize="microbatch" divides by the number of microbatches'):
        on(normalize="microbatch")(small, TABLE, batch, plan_on(mesh))
    with pytest.raises(ValueError, match="has no weight and reads nothing of the microbatch"):
        penalty = lambda p, m, r: jaxfb.LossOutput({"size": jaxfb.Sum((p["embed"] ** 2).sum())})  # noqa: E731
        on()(penalty, TABLE, batch, plan_on(mesh))
