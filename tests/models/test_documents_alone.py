"""Documents that share rows give the loss and the gradient of each alone in its row, whatever a model's layers are."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import apply

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.latent import Latent
from jaxfb.models.pattern import LayerKind
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.transformer import init_params, transformer
from jaxfb.models.variant import Variant

LENGTH, VOCAB = 12, 24
SIZES = dict(vocab_size=VOCAB, hidden_size=16, num_heads=4, mlp_size=16, loss_chunk=16, attention="xla")
EXPERTS = dict(num_experts=4, expert_mlp_size=8, balance_coefficient=0.3, router_z_coefficient=0.2)
BY_LENGTH = RopeScaling("longrope", 4.0, original_length=4, short_factors=(1.0, 1.5), long_factors=(2.0, 5.0))
CONFIGS = {
    "experts": TransformerConfig(
        **SIZES, **EXPERTS, num_layers=2, num_kv_heads=2, mtp_depth=1, qk_norm=True, rope_scaling=BY_LENGTH,
        variant=Variant(attention_sinks=True, attention_softcap=2.0),
    ),
    "latent": TransformerConfig(
        **SIZES, **EXPERTS, num_layers=3, head_size=8, leading=(LayerKind(experts=False),), mtp_depth=2,
        latent=Latent(key_value_rank=6, rotary_size=4, value_size=6),
    ),
    "windows": TransformerConfig(
        **SIZES, num_layers=4, num_kv_heads=4, pattern=(LayerKind(window=2), LayerKind(rope=False)),
        logit_softcap=5.0, variant=Variant(norms="both", attention_sinks=True),
    ),
}  # fmt: skip
ROWS = [[5, 1, 5], [1, 1, 5, 1], [], [5, 5, 1, 1], [5, 5], [1], [1, 5, 5], [5]]


@cache
def params(name):
    made = jax.jit(lambda key: init_params(CONFIGS[name], key, jnp.float64))(jax.random.key(0))
    draw = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: leaf + 0.3 * draw.normal(size=leaf.shape), made)


def documents():
    """{length: leaves [documents, length]} in the order of ROWS; each has a token that counts."""
    draw, found = np.random.default_rng(0), {}
    for length in (1, 5):
        shape = sum(row.count(length) for row in ROWS), length
        tokens, targets = draw.integers(0, VOCAB, (2, *shape), np.int32)
        mask = np.round(draw.random(shape) * (draw.random(shape) > 0.3), 2)
        mask[:, 0] += 0.5
        found[length] = {"tokens": tokens, "targets": targets, "loss_mask": mask}
    return found


def packed():
    """The same side by side, numbered in no order; what stands at padding is not inert."""
    draw, left = np.random.default_rng(2), {length: 0 for length in (1, 5)}
    tokens, targets = draw.integers(0, VOCAB, (2, len(ROWS), LENGTH), np.int32)
    segments, mask = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape)
    batch, whole = {"tokens": tokens, "targets": targets, "loss_mask": mask}, documents()
    for row, lengths in enumerate(ROWS):
        numbers, at = draw.permutation(20) + 1, 0
        for number, length in zip(numbers, lengths, strict=False):
            for name, leaf in batch.items():
                leaf[row, at : at + length] = whole[length][name][left[length]]
            segments[row, at : at + length] = number
            left[length], at = left[length] + 1, at + length
    return {**batch, "segments": segments}


def terms_alone(name, params):
    """The terms of every document in a row of its length, without the engine."""
    model = transformer(CONFIGS[name])
    outs = [apply(model, params, group).terms for group in documents().values()]
    return {
        term: jaxfb.Sum(sum(out[term].total for out in outs), sum(out[term].weight for out in outs))
        for term in outs[0]
    }


@cache
def alone(name):
    """(loss, gradient) of every document in a row of its length."""

    def loss(params):
        return sum(term.value for term in terms_alone(name, params).values())

    return jax.jit(jax.value_and_grad(loss))(params(name))


def test_each_term_of_documents_that_share_a_row_is_the_sum_of_those_alone():
    run = jax.jit(lambda params, batch: apply(transformer(CONFIGS["experts"]), params, batch).terms)
    found, wanted = (
        run(params("experts"), packed()),
        jax.jit(terms_alone, static_argnums=0)("experts", params("experts")),
    )
    terms = {"cross_entropy", "balance", "router_z", "mtp_1", "mtp_1_balance", "mtp_1_router_z"}
    assert set(found) == set(wanted) == terms
    for name in terms:
        np.testing.assert_allclose(found[name].weight, wanted[name].weight, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(found[name].total, wanted[name].total, rtol=1e-12, err_msg=name)


CASES = [
    ("experts", dict(context=2), {}),
    ("experts", dict(pipe=2, tensor=2, expert=2), dict(schedule="1f1b")),
    ("experts", dict(fsdp=2, expert=2, context=2), dict(remat="full")),
    ("latent", dict(pipe=2, context=2, tensor=2), dict(schedule="gpipe")),
    ("windows", dict(context=2, tensor=2), {}),
    ("windows", dict(pipe=2), dict(schedule="seq1f1b", num_pieces=4)),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, sizes, options", CASES, ids=str)
def test_documents_that_share_a_row_are_as_if_alone(name, sizes, options):
    """At borders of documents, of what a device has of a row, and of what a further depth predicts; without
    positions.
    """
    mesh = jaxfb.make_mesh(**sizes)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    plan = jaxfb.BatchPlan(rows=len(ROWS), data_parallel=replicas, num_microbatches=2)
    out = jaxfb.get_forward_backward_func(mesh, **options)(
        transformer(CONFIGS[name]), params(name), packed(), plan
    )
    loss, grads = alone(name)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-12)
    for (path, wanted), got in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(out.grads), strict=True
    ):
        scale = max(1, np.abs(wanted).max())
        np.testing.assert_allclose(
            got, wanted, rtol=0, atol=1e-12 * scale, err_msg=jax.tree_util.keystr(path)
        )
