"""Label smoothing, z-loss and soft-capped logits equal the plain formulas, wherever the vocabulary is cut."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfb.losses.cross_entropy import chunked_cross_entropy
from jaxfb.losses.language_model import next_token_loss

ROWS, SEQ, WIDTH, VOCAB = 2, 5, 8, 28
SETTINGS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 3.0}
# what each term's total is multiplied by: they need not have one weight
SEEDS = {"cross_entropy": 0.3, "label_smoothing": 0.7, "z_loss": -1.1}


def _inputs():
    """Hidden states that are NaN, and targets that do not exist, where the mask is 0."""
    draw = np.random.default_rng(0)
    mask = np.round(2 * draw.random((ROWS, SEQ)), 1) * (draw.random((ROWS, SEQ)) > 0.3)
    hidden = np.where(mask[..., None] == 0, np.nan, draw.normal(size=(ROWS, SEQ, WIDTH)))
    targets = np.where(mask == 0, -100, draw.integers(0, VOCAB, (ROWS, SEQ)))
    assert (mask == 0).any()
    return hidden, draw.normal(size=(WIDTH, VOCAB)), {"targets": targets, "loss_mask": mask}


def _plain(hidden, kernel, microbatch):
    """Each term's total, from all the logits."""
    mask = microbatch["loss_mask"]
    logits = jnp.where(mask[..., None] == 0, 0, hidden) @ kernel
    logits = SETTINGS["logit_softcap"] * jnp.tanh(logits / SETTINGS["logit_softcap"])
    log_probs, share = jax.nn.log_softmax(logits), SETTINGS["label_smoothing"]
    one_hot = jax.nn.one_hot(microbatch["targets"], VOCAB)
    nll = -(one_hot * log_probs).sum(-1)
    smoothed = -(((1 - share) * one_hot + share / VOCAB) * log_probs).sum(-1)
    z = SETTINGS["z_loss"] * jax.nn.logsumexp(logits, axis=-1) ** 2
    per_token = {"cross_entropy": nll, "label_smoothing": smoothed - nll, "z_loss": z}
    return {name: (mask * value).sum() for name, value in per_token.items()}


def _chunked(hidden, kernel, microbatch, **where):
    out = next_token_loss(hidden, kernel, microbatch, chunk=3, **SETTINGS, **where)
    weight = jnp.sum(microbatch["loss_mask"])
    assert all(term.weight.shape == weight.shape for term in out.terms.values())
    return {name: term.total for name, term in out.terms.items()}


def _seeded(totals, seeds=SEEDS):
    def run(*inputs, **where):
        terms = totals(*inputs, **where)
        return sum(seeds[name] * total for name, total in terms.items()), terms

    return jax.value_and_grad(run, (0, 1), has_aux=True)


def _same(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13), got, wanted)


def test_every_term_and_its_gradient_equal_the_plain_formula():
    hidden, kernel, microbatch = _inputs()
    (_, wanted), (hidden_grad, kernel_grad) = _seeded(_plain)(hidden, kernel, microbatch)
    (_, got), grads = jax.jit(_seeded(_chunked))(hidden, kernel, microbatch)
    _same(got, wanted)
    _same(grads, (jnp.where(microbatch["loss_mask"][..., None] == 0, 0, hidden_grad), kernel_grad))


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e12])
def test_negative_cotangents_of_any_size_keep_their_gradient(size):
    """The backward scales its seeds by the largest of them, which is the largest in size and not in value."""
    hidden, kernel, microbatch = _inputs()
    hidden = np.where(microbatch["loss_mask"][..., None] == 0, 0, hidden)
    seeds = {name: -size * abs(seed) for name, seed in SEEDS.items()}
    wanted = _seeded(_plain, seeds)(hidden, kernel, microbatch)[1]
    got = jax.jit(_seeded(_chunked, seeds))(hidden, kernel, microbatch)[1]
    wanted, got = (jax.tree.map(lambda leaf: leaf / size, grads) for grads in (wanted, got))
    chex.assert_trees_all_close(got, wanted, rtol=1e-11, atol=1e-12)


def test_a_vocabulary_cut_over_two_axes_changes_nothing():
    """Over `pipe` by hand and over `tensor` by the compiler: smoothing spreads over the whole vocabulary."""
    hidden, kernel, microbatch = _inputs()
    mesh = jax.make_mesh(
        (2, 2), ("pipe", "tensor"), devices=jax.devices()[:4], axis_types=(AxisType.Auto,) * 2
    )
    cut = jax.shard_map(
        lambda *inputs: _seeded(_chunked)(*inputs, axis="pipe"),
        mesh=mesh,
        in_specs=(P(), P(None, "pipe"), P()),
        out_specs=(P(), (P(), P(None, "pipe"))),
        axis_names={"pipe"},
        check_vma=False,
    )
    kernel = jax.device_put(kernel, jax.NamedSharding(mesh, P(None, ("pipe", "tensor"))))
    _same(jax.jit(cut)(hidden, kernel, microbatch), _seeded(_chunked)(hidden, np.asarray(kernel), microbatch))


@pytest.mark.parametrize("regularizers", [False, True])
def test_a_cut_vocabulary_brings_devices_together_for_maxima_and_for_sums_only(regularizers):
    hidden, kernel, microbatch = _inputs()
    score = jax.shard_map(
        lambda h, k, t, m: chunked_cross_entropy(h, k, t, m, axis="pipe", regularizers=regularizers).loss_sum,
        mesh=jax.make_mesh((2,), ("pipe",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,)),
        in_specs=(P(), P(None, "pipe"), P(), P()),
        out_specs=P(),
        check_vma=False,
    )
    traced = jax.make_jaxpr(score)(hidden, kernel, microbatch["targets"], microbatch["loss_mask"])
    found = re.findall(r"\b(pmax|pmin|psum|all_gather)\w*\[", str(traced))
    assert sorted(found) == ["pmax", "psum"]


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 must be at least 0 and below 1"),
        ({"z_loss": -1.0}, "z_loss=-1.0 must be at least 0"),
        ({"logit_softcap": 0.0}, "logit_softcap=0.0 must be positive; use None"),
    ],
)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(ValueError, match=message):
        next_token_loss(*_inputs(), **setting)
