"""Token ids outside the vocabulary: zeros without a gradient, wherever the embedding is and however it is cut."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import data
from jaxfb.parallel import look_up as look_up_module

ROWS, LENGTH, VOCAB, WIDTH = 8, 6, 16, 8
OUTSIDE = (-1, VOCAB, -100, 99)


def config(tied):
    return TransformerConfig(
        vocab_size=VOCAB, num_layers=2, hidden_size=WIDTH, num_heads=2, mlp_size=16, tied_embeddings=tied
    )


@cache
def params(tied):
    return init_params(config(tied), jax.random.key(0), jnp.float64)


def answer(mesh, tied=False, given=None, forward_only=False, **options):
    """Loss and gradient of rows with an id outside the vocabulary each."""
    tokens = np.random.default_rng(0).integers(0, VOCAB - 1, (ROWS, LENGTH), dtype=np.int32)
    batch = {"tokens": tokens.copy(), "targets": tokens, "loss_mask": np.ones((ROWS, LENGTH))}
    batch["tokens"][:, 2] = np.resize(OUTSIDE, ROWS)
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=2)
    run = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), **options)
    given = params(tied) if given is None else given
    return run(transformer(config(tied)), given, batch, plan, forward_only=forward_only)


@cache
def of_one_device(tied):
    return answer({"data": 1}, tied)


@pytest.mark.parametrize("tied", [False, True])
def test_the_gradient_is_that_of_the_loss(tied):
    """By a difference of two losses along a line in all parameters."""
    leaves, tree = jax.tree.flatten(params(tied))
    keys = jax.random.split(jax.random.key(1), len(leaves))
    line = [jax.random.normal(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]

    def loss(step):
        moved = [leaf + step * along for leaf, along in zip(leaves, line, strict=True)]
        return answer({"data": 1}, tied, jax.tree.unflatten(tree, moved), forward_only=True).loss

    slope = sum(
        jnp.vdot(*both) for both in zip(jax.tree.leaves(of_one_device(tied).grads), line, strict=True)
    )
    np.testing.assert_allclose((loss(1e-7) - loss(-1e-7)) / 2e-7, slope, rtol=1e-6)


def test_they_are_as_a_row_of_zeros_that_is_no_parameter():
    grad = of_one_device(False).grads["embed"]["embedding"]
    assert not grad[VOCAB - 1].any()  # -1 is not the last row, and VOCAB not the nearest


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"tensor": 2}, {"fsdp": 4}, {"pipe": 2, "tensor": 2}], ids=str)
def test_they_are_zeros_without_a_gradient_on_every_mesh(mesh):
    out, wanted = answer(mesh), of_one_device(False)
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


@pytest.mark.parametrize("mesh", [{"pipe": 2}, {"fsdp": 2}], ids=str)
def test_an_embedding_that_is_the_head_too_is_no_exception(mesh):
    out, wanted = answer(mesh, True), of_one_device(True)
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


@pytest.mark.parametrize("by_columns", [True, False])
def test_nor_is_one_in_parts(by_columns, monkeypatch):
    monkeypatch.setattr(data, "LARGEST_SCATTER", VOCAB * WIDTH * 8 // 4)
    if not by_columns:
        monkeypatch.setattr(look_up_module, "columns_of", lambda table, num_tokens: None)
    out, wanted = answer({"fsdp": 4}, fsdp_gather="layer"), of_one_device(False)
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)
