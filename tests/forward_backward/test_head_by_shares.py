"""A head of which neighbours have a share each and score all their tokens: the gradients of one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close, worst_error

import jaxfb
from jaxfb.losses import cross_entropy, heads, token_log_probs
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import data
from jaxfb.parallel.shares import shares_of
from jaxfb.platforms.compat import equations

ROWS, LENGTH, VOCAB = 16, 8, 224
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "mlp_size": 32,
    "loss_chunk": 5,
}
TIED, CAPPED, ODD = {"tied_embeddings": True}, {"logit_softcap": 2.0}, {"vocab_size": VOCAB + 6}
EIGHT = {"fsdp": 8}


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def found(monkeypatch):
    """A head of more than one part in float64; returns the shares that were found for it, as they are."""
    shares = []

    def spied(*given):
        shares.append(shares_of(*given))
        return shares[-1]

    monkeypatch.setattr(data, "LARGEST_SCATTER", 48 * 16 * 8)
    monkeypatch.setattr(cross_entropy, "shares_of", spied)
    monkeypatch.setattr(token_log_probs, "shares_of", spied)
    yield shares
    assert None not in shares


@cache
def batch(uneven=False):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    mask = rng.random((ROWS, LENGTH)) > 0.2
    targets = np.where(mask, np.roll(tokens, -1, 1), -100).astype(np.int32)
    weights = np.array([0.1, 1, 2, 0.3] * 4)[:, None] if uneven else 1
    return {"tokens": tokens, "targets": targets, "loss_mask": mask * weights}


def gradients(mesh, sizes=None, dtype=np.float64, num_microbatches=2, model=None, uneven=False, **options):
    config = TransformerConfig(**SIZES | (sizes or {}))
    params = init_params(config, jax.random.key(1), dtype)
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), fsdp_gather="layer", **options)
    return fb(model or transformer(config), params, batch(uneven), plan)


@pytest.mark.parametrize(
    ("mesh", "sizes", "options"),
    [
        (EIGHT, {}, {}),
        (EIGHT, TIED | CAPPED, {"gather_ahead": True}),
        (EIGHT, ODD | CAPPED, {}),
        slow(EIGHT, TIED | ODD, {}),
        slow({"fsdp": 4}, {}, {"num_microbatches": 4}),
        slow({"data": 2, "fsdp": 4}, {}, {"optimizer_sharding": "data"}),
        slow({"fsdp": 2, "context": 2}, {}, {}),
        slow({"fsdp": 4, "context": 2}, TIED, {}),
        slow({"fsdp": 2, "expert": 4}, {"num_experts": 4}, {}),
        slow(EIGHT, {"mtp_depth": 1}, {}),
        slow(EIGHT, {}, {"gather_ahead": "half"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(mesh, sizes, options, found):
    out, wanted = gradients(mesh, sizes, **options), gradients({"data": 1}, sizes, num_microbatches=1)
    assert found
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)
    close(out.metrics, wanted.metrics)


@pytest.mark.parametrize("sizes", [{}, slow(TIED | CAPPED)], ids=str)
def test_neighbours_whose_tokens_weigh_differently_each_scale_their_own(sizes, found):
    """A mean of the microbatches' means: the cotangent of a device's sum is one over the weight of its rows."""
    options = {"sizes": sizes, "normalize": "microbatch", "uneven": True}
    out = gradients(EIGHT, num_microbatches=2, **options)
    assert found
    close(out.grads, gradients({"data": 1}, num_microbatches=ROWS, **options).grads)


@pytest.mark.parametrize("sizes", [{}, slow(TIED | CAPPED | ODD)], ids=str)
def test_log_probs_and_entropies_are_scored_together_too(sizes, found):
    """Of a sampler with a temperature, that never draws some ids; a loss that weighs each token differently."""

    def loss(log_probs, entropy, microbatch):
        weights = microbatch["loss_mask"] * jnp.exp(microbatch["tokens"] / 20)
        total = jnp.sum(weights * (jnp.exp(log_probs) - 0.1 * entropy))
        return jaxfb.LossOutput(
            {"loss": jaxfb.Sum(total, microbatch["loss_mask"].sum())}, outputs=(log_probs, entropy)
        )

    model = transformer(TransformerConfig(**SIZES | sizes))
    own = heads.policy_loss_fn(model, loss, temperature=0.7, absent_ids=((40, 60), (200, VOCAB)))
    out = gradients(EIGHT, sizes, model=own)
    assert found
    wanted = gradients({"data": 1}, sizes, model=own)
    close(out.outputs, wanted.outputs)
    close(out.grads, wanted.grads)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"compute_dtype": "bfloat16"}, 0.1),
        slow({"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, 0.1),
        slow({"compute_dtype": "float16"}, 0.01),
        slow({"dtype": np.float32}, 3e-6),
    ],
    ids=str,
)
def test_in_other_dtypes_gradients_are_as_close_as_those_of_a_whole_head(
    options, tolerance, found, monkeypatch
):
    options = {"dtype": np.float32} | options
    wanted = gradients({"data": 1}, num_microbatches=1).grads
    by_shares = gradients(EIGHT, **options).grads
    assert found
    monkeypatch.setattr(data, "LARGEST_SCATTER", 2**28)
    whole = gradients(EIGHT, num_microbatches=1, **options).grads

    assert worst_error(by_shares, wanted) < min(tolerance, 1.5 * worst_error(whole, wanted))


def test_no_device_has_the_whole_head(found):
    """Nor its gradient, nor logits of the whole vocabulary."""
    config = TransformerConfig(**SIZES | {"num_layers": 1})
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(1), jnp.float32))
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(fsdp=8), fsdp_gather="layer")
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=8, num_microbatches=2)
    program = jax.make_jaxpr(lambda p, b: fb(transformer(config), p, b, plan).grads)(params, batch())
    assert found
    (inside,) = (one.params["jaxpr"] for one in equations(program.jaxpr) if one.primitive.name == "shard_map")
    products = [one for one in equations(inside) if one.primitive.name == "dot_general"]
    shapes = {var.aval.shape for one in products for var in (*one.invars, *one.outvars)}
    shares = [shape for shape in shapes if VOCAB // found[0].grid.across in shape]
    assert shares and not any(VOCAB in shape for shape in shapes)
