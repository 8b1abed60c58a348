"""Sequence parallel over tensor: the same numbers, tokens split between the parts of a layer, two half reductions."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.sharding import shardings

ROWS, LENGTH = 4, 16
CONFIG = TransformerConfig(
    vocab_size=32, num_layers=2, hidden_size=16, mlp_size=16, num_heads=4, num_kv_heads=2, loss_chunk=32,
    dropout=0.1, tied_embeddings=True, mtp_depth=1,
)  # fmt: skip


def _batch():
    draw = np.random.default_rng(0)
    tokens, targets = draw.integers(0, 32, (2, ROWS, LENGTH)).astype(np.int32)
    mask = (draw.random((ROWS, LENGTH)) > 0.3).astype(np.float64)
    segments = np.repeat([[1] * 5 + [2] * 8 + [0] * 3], ROWS, 0).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "loss_mask": mask, "segments": segments}


def _run(config, sizes, **options):
    mesh = jaxfb.make_mesh(**sizes)
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2, data_parallel=mesh.shape["data"])
    params = jax.jit(lambda key: init_params(CONFIG, key, jnp.float64))(jax.random.key(0))
    fb = jaxfb.get_forward_backward_func(mesh, **options)
    return fb(transformer(config), params, _batch(), plan, rng=jax.random.key(1))


@cache
def _one_device():
    return _run(CONFIG, {})


@pytest.mark.parametrize(
    "sizes, options",
    [
        pytest.param(dict(data=2, tensor=2), {}, marks=pytest.mark.slow),
        pytest.param(dict(pipe=2, context=2, tensor=2), dict(schedule="1f1b"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_it_changes_no_number(sizes, options):
    wanted, found = _one_device(), _run(replace(CONFIG, sequence_parallel=True), sizes, **options)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), found.grads, wanted.grads)


def _compiled(devices, sequence_parallel, **sizes):
    """(mesh, program) of a call on abstract arguments, wide enough for memory to be that of activations."""
    mesh = jaxfb.make_mesh(devices=devices, **sizes)
    config = TransformerConfig(
        vocab_size=256,
        num_layers=2,
        hidden_size=128,
        num_heads=4,
        mlp_size=512,
        sequence_parallel=sequence_parallel,
    )
    fb, model = jaxfb.get_forward_backward_func(mesh, compute_dtype="bfloat16"), transformer(config)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes,
        shardings(fb.param_specs(model, shapes), mesh),
    )
    dtypes = {"tokens": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct((4, 512), dtype) for name, dtype in dtypes.items()}
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2)
    return mesh, jax.jit(lambda params, batch: fb(model, params, batch, plan).grads).lower(
        params, batch
    ).compile()


def _of_layers(mesh, program):
    """Kinds of the collectives over tensor of whole activations, bf16[2, 512, 128], that run once a layer."""
    return {
        one.kind
        for one in collectives(program.as_text())
        if "tensor" in one.axes(mesh) and one.times == 4 and one.bytes >= 2 * 512 * 128 * 2
    }


@pytest.mark.slow
def test_layers_gather_their_tokens_and_hold_fewer():
    """The CPU's compiler makes no reduce-scatters: there, it is an all-reduce and a slice."""
    programs = {on: _compiled(jax.devices()[:4], on, tensor=4) for on in (False, True)}
    kinds = {on: _of_layers(*program) for on, program in programs.items()}
    assert kinds == {False: {"all-reduce"}, True: {"all-reduce", "all-gather"}}
    temp = {on: program.memory_analysis().temp_size_in_bytes for on, (_, program) in programs.items()}
    assert temp[True] < 0.95 * temp[False]


@pytest.fixture
def as_on_a_tpu():
    """32-bit loop counters, whose trip counts the compiled text tells; no cache, which cannot hold its programs."""
    settings = ("jax_enable_x64", "jax_enable_compilation_cache")
    before = {name: getattr(jax.config, name) for name in settings}
    for name in settings:
        jax.config.update(name, False)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.slow
def test_the_tpu_compiler_makes_reduce_scatters(monkeypatch, as_on_a_tpu):
    pytest.importorskip("libtpu", reason="the TPU compiler comes with libtpu, which is not installed")
    names = ("TPU_SKIP_MDS_QUERY", "ALLOW_MULTIPLE_LIBTPU_LOAD")
    for name, value in {**dict.fromkeys(names, "1"), "TPU_WORKER_HOSTNAMES": "localhost"}.items():
        monkeypatch.setenv(name, value)
    devices = topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
    assert _of_layers(*_compiled(devices, True, tensor=4)) == {"reduce-scatter", "all-gather"}
