"""Muon on a mesh: devices orthogonalise whole matrices of their own layers, and the update is that of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.optim.muon import muon_matrices
from jaxfb.update.pipeline_state import PipelineState, in_model_order

ROWS, LENGTH = 8, 8
SIZES = dict(vocab_size=16, num_layers=6, hidden_size=16, mlp_size=24, num_heads=4, num_kv_heads=2)
EXPERTS = dict(num_experts=4, experts_per_token=2, expert_mlp_size=8)


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(0, 16, (ROWS, LENGTH)).astype(np.int32)
    return {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((ROWS, LENGTH))}


def step_on(mesh, sizes, hyperparameters=(), **options):
    config = TransformerConfig(**(SIZES | sizes))
    mesh = jaxfb.make_mesh(**mesh)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=1, data_parallel=replicas)
    optimizer = jaxfb.make_optimizer("muon", learning_rate=0.1, weight_decay=0.1, **dict(hyperparameters))
    step = jaxfb.make_train_step(transformer(config), optimizer, mesh, plan, dropout=False, **options)
    return step, step.init(init_params(config, jax.random.key(0), jnp.float64))


def after_two(mesh, sizes, **options):
    step, state = step_on(mesh, sizes, **options)
    for seed in range(2):
        state, metrics = step(state, batch_of(seed))
    saved = in_model_order(state) if isinstance(state, PipelineState) else state
    return jax.tree.map(np.asarray, (saved.params, saved.opt_state)), float(metrics.update_norm)


@pytest.mark.parametrize(
    "mesh, sizes, options",
    [
        pytest.param(dict(fsdp=2, tensor=2), {}, {}, marks=pytest.mark.slow),
        pytest.param(dict(fsdp=8), {}, {}, marks=pytest.mark.slow),  # more devices than layers
        pytest.param(dict(data=4), {}, {}, marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2, tensor=2), {}, {}, marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2), {}, dict(optimizer_sharding="data"), marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2), {}, dict(optimizer_sharding="gradients"), marks=pytest.mark.slow),
        pytest.param(dict(expert=2, fsdp=2), EXPERTS, {}, marks=pytest.mark.slow),
        pytest.param(dict(pipe=2, fsdp=2), {}, dict(schedule="1f1b"), marks=pytest.mark.slow),
        pytest.param(dict(data=2, fsdp=2), {}, dict(optimizer_memory="host"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_updates_are_those_of_one_device(mesh, sizes, options):
    (wanted, norm), (found, found_norm) = after_two({}, sizes), after_two(mesh, sizes, **options)
    assert found_norm == pytest.approx(norm, rel=1e-12)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=1e-12), found, wanted)


def test_layers_are_shared_out_unevenly():
    """6 layers on 4 devices."""
    test_updates_are_those_of_one_device(dict(fsdp=4), {}, {})


# an own function of the matrices may look at all layers, so that their state is not moved a layer at a time
WHOLE_FROM_HOST = dict(hyperparameters=dict(matrices=muon_matrices), optimizer_memory="host")


@pytest.mark.parametrize(
    "mesh, options",
    [(dict(fsdp=4), {}), (dict(fsdp=2, tensor=2), {}), (dict(fsdp=4), WHOLE_FROM_HOST)],
    ids=["fsdp", "tensor", "host"],
)
def test_no_device_has_the_matrices_of_all_layers(mesh, options):
    """Of 8 layers a device gets 2, and no array is all layers' matrices of a kind."""
    step, state = step_on(mesh, dict(num_layers=8), **options)
    text = step.lower(state, batch_of(0)).compile().as_text()
    exchanged = sum(one.bytes for one in collectives(text) if one.kind == "all-to-all")
    leaves = jax.tree.leaves_with_path(state.params["layers"])
    matrices = sum(leaf.nbytes for path, leaf in leaves if leaf.ndim == 3)
    # a quarter of them along each axis, there and back, to judge the update and to make it
    assert exchanged == matrices * len(mesh)
    assert "f64[8,16,24]" not in text and "f64[8,24,16]" not in text


def test_one_step_is_optaxs_with_and_without_nesterov():
    params = {"layers": {"w": jax.random.normal(jax.random.key(1), [3, 4, 6])}}
    for nesterov in (True, False):
        ours = jaxfb.make_optimizer("muon", learning_rate=0.1, nesterov=nesterov)
        theirs = optax.contrib.muon(
            0.1,
            nesterov=nesterov,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=lambda tree: jax.tree.map(
                lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), tree
            ),
        )
        states = ours.init(params), theirs.init(params)
        for seed in range(3):
            grads = jax.tree.map(lambda x, seed=seed: jnp.sin((seed + 2) * x), params)
            (a, first), (b, second) = (
                one.update(grads, state, params) for one, state in zip((ours, theirs), states, strict=True)
            )
            states = first, second
            np.testing.assert_allclose(a["layers"]["w"], b["layers"]["w"], rtol=1e-12)


@pytest.mark.parametrize("consistent_rms", [0.2, None])
def test_a_matrix_without_rows_stays(consistent_rms):
    params = {"layers": {"w": jnp.ones([3, 4, 6]), "none": jnp.ones([3, 0, 6])}}
    optimizer = jaxfb.make_optimizer("muon", learning_rate=0.1, consistent_rms=consistent_rms)
    updates, _ = optimizer.update(params, optimizer.init(params), params)
    assert updates["layers"]["none"].shape == (3, 0, 6) and np.isfinite(updates["layers"]["w"]).all()
