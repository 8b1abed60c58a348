"""Every axis together: experts, tied tables, dropout, packing and ragged masks on meshes of many axes."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

ROWS, LENGTH, VOCAB = 8, 12, 32


@cache
def model():
    config = TransformerConfig(
        vocab_size=VOCAB, num_layers=2, hidden_size=16, mlp_size=16, num_heads=4, num_kv_heads=2, tied_embeddings=True,
        dropout=0.1, loss_chunk=16, num_experts=4, expert_mlp_size=8, shared_expert_size=8, balance_coefficient=0.1,
        router_z_coefficient=0.1, z_loss=0.01,
    )  # fmt: skip
    return transformer(config), init_params(config, jax.random.key(0), jnp.float64)


def batch():
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)  # noqa: E731
    mask = (rng.random((ROWS, LENGTH)) > 0.3).astype(np.float64)
    segments = np.repeat([[1] * 5 + [2] * 5 + [0] * 2], ROWS, 0).astype(np.int32)
    return {"tokens": ids(), "targets": ids(), "loss_mask": mask, "segments": segments}


def run(rows_per_microbatch, sizes, **options):
    mesh = jaxfb.make_mesh(**sizes)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=rows_per_microbatch, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(mesh, **options)
    return fb(*model(), batch(), plan, rng=jax.random.key(1))


@cache
def one_device():
    return run(ROWS, {})


# experts with zero_bubble, fsdp_gather="step" or optimizer_sharding="data": tests/models/test_moe.py
CASES = [
    (dict(expert=2, fsdp=2, tensor=2), dict(remat="selective")),
    (dict(pipe=2, context=2, tensor=2), dict(schedule="1f1b", remat="full")),
    (dict(pipe=2, expert=2, data=2), dict(schedule="gpipe")),
    (dict(pipe=2, context=2, expert=2), dict(schedule="1f1b")),
    (dict(pipe=2, fsdp=2, context=2), dict(schedule="1f1b")),
]


@pytest.mark.slow  # of the fast ones tests/models/test_moe.py has experts on a mesh of three axes
@pytest.mark.parametrize("sizes, options", CASES, ids=str)
def test_equals_one_device(sizes, options):
    found, wanted = run(1, sizes, **options), one_device()
    assert set(found.terms) == {"cross_entropy", "balance", "router_z", "z_loss"}
    for name, term in wanted.terms.items():
        np.testing.assert_allclose(found.terms[name].total, term.total, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(found.terms[name].weight, term.weight, rtol=1e-12, err_msg=name)
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(wanted.grads), jax.tree.leaves(found.grads), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-12, err_msg=jax.tree_util.keystr(path))
