"""The transformer's own laws: packing, row splits, dtypes and where params are born change nothing."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from whole import apply, hidden_states, logits

import jaxfb
from jaxfb.models import attention
from jaxfb.models.attention import KEPT, choose_backend
from jaxfb.models.attention_kernels.blocked_attention import blocked_attention
from jaxfb.models.block import Block, rebuilder
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.tensor import transformer_param_specs

CONFIG = TransformerConfig(
    vocab_size=24,
    num_layers=2,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    mlp_size=24,
    dropout=0.3,
    loss_chunk=4,
)
all_logits = jax.jit(logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    return jax.jit(lambda key: init_params(CONFIG, key, jnp.float64))(jax.random.key(0))


def test_packed_documents_are_as_if_alone(params):
    documents = [np.arange(1, 6), np.arange(7, 10)]
    packed = np.zeros((1, 10), np.int32), np.zeros((1, 10), np.int32), np.zeros((1, 10), np.int32)
    for array, parts in zip(
        packed,
        (documents, [np.full(5, 1), np.full(3, 2)], [np.arange(5), np.arange(3)]),
        strict=True,
    ):
        array[0, :8] = np.concatenate(parts)
    together = all_logits(
        CONFIG, params, dict(zip(("tokens", "segments", "positions"), packed, strict=True))
    )[0]
    for start, document in zip((0, 5), documents, strict=True):
        alone = all_logits(CONFIG, params, {"tokens": document[None]})[0]
        np.testing.assert_allclose(together[start : start + len(document)], alone, rtol=0, atol=1e-13)
    assert np.isfinite(together).all()


@pytest.mark.parametrize(
    "remat, norm, by_product, times",
    [
        ("selective", False, True, 2),
        ("layer", False, True, 4),
        ("selective", True, True, 0),
        ("selective", False, False, 0),
    ],
)
def test_selective_keeps_queries_and_keys_rotated(monkeypatch, remat, norm, by_product, times):
    """Neither is rotated again in the backward; of what a norm has made, the backward reads what it was made from."""
    monkeypatch.setattr(attention, "turns_by_product", lambda x: by_product)
    config = replace(CONFIG, qk_norm=norm)
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    fb = jaxfb.get_forward_backward_func(remat=remat)
    batch = {name: np.ones((4, 8), np.int32) for name in ("tokens", "targets", "loss_mask")}
    plan = jaxfb.BatchPlan(rows=4, num_microbatches=2)
    keys = jax.random.key(1)
    program = jax.make_jaxpr(lambda params: fb(transformer(config), params, batch, plan, keys).grads)(params)
    assert str(program).count(f"name={KEPT}]") == times


def test_dropout_follows_the_row_wherever_it_goes(params):
    model, tokens = transformer(CONFIG), np.random.default_rng(0).integers(0, 24, (3, 5), np.int32)
    keys = jax.random.split(jax.random.key(2), 3)
    run = jax.jit(lambda tokens, keys: hidden_states(model, params, {"tokens": tokens}, keys))
    whole = run(tokens, keys)
    np.testing.assert_allclose(run(tokens[2:], keys[2:])[0], whole[2], rtol=0, atol=1e-13)
    same_row_twice = run(tokens[[1, 1]], keys[:2])
    assert np.abs(same_row_twice[0] - same_row_twice[1]).max() > 0.01


@pytest.mark.slow
def test_the_two_branches_of_a_layer_drop_different_entries(params):
    model, keys = transformer(CONFIG), jax.random.split(jax.random.key(2), 3)
    ones = jax.tree.map(lambda x: jnp.ones_like(x[0]), params["layers"])
    hidden, microbatch = jnp.ones((3, 2, 16)), {"tokens": jnp.zeros((3, 2), jnp.int32)}

    def kept(silenced, keys):
        weights = {**ones, silenced: jax.tree.map(jnp.zeros_like, ones[silenced])}
        return np.asarray(model.layer(weights, hidden, microbatch, keys) != hidden)

    assert kept("mlp", None).all() and kept("attention", None).all()
    assert 0.5 < kept("mlp", keys).mean() < 0.9
    assert (kept("mlp", keys) != kept("attention", keys)).any()


@pytest.mark.slow
def test_loss_of_float32_params_is_that_of_float64(params):
    microbatch = {
        "tokens": jnp.arange(10).reshape(2, 5),
        "targets": jnp.arange(1, 11, dtype=jnp.int32).reshape(2, 5),
        "loss_mask": jnp.ones((2, 5), jnp.float32).at[0, 3].set(0),
        "segments": jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]]),
    }
    run = jax.jit(lambda params: apply(transformer(CONFIG), params, microbatch).terms["cross_entropy"])
    exact = run(params)
    for dtype, close in ((jnp.float32, 1e-6), (jnp.bfloat16, 5e-3), (jnp.float16, 1e-3)):
        term = run(jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), params))
        assert term.total.dtype == jnp.float32
        np.testing.assert_allclose(term.total, exact.total, rtol=close)


def test_attention_in_float32_is_that_in_float64():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, 6, 4, 8), (2, 6, 2, 8), (2, 6, 2, 8))
    q, k, v = (jax.random.normal(key, shape, jnp.float64) for key, shape in zip(keys, shapes, strict=True))
    mask = jax.random.bernoulli(keys[0], 0.5, (2, 1, 6, 6)) | jnp.eye(6, dtype=bool)
    every = ({"is_causal": True}, {"mask": mask}, {"mask": mask, "is_causal": True})
    run = jax.jit(lambda *args: [blocked_attention(*args, **how) for how in every])
    singles = run(*(x.astype(jnp.float32) for x in (q, k, v)))
    for single, double in zip(singles, run(q, k, v), strict=True):
        np.testing.assert_allclose(single, double, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    "platform, capability, dtype, size, length, packed, expected",
    [
        ("gpu", "9.0", jnp.bfloat16, 128, 64, True, "cudnn"),
        ("gpu", "9.0", jnp.bfloat16, 256, 64, False, "cudnn"),
        ("gpu", "8.0", jnp.bfloat16, 256, 64, False, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 128, 63, True, "xla"),
        ("gpu", "9.0", jnp.bfloat16, 20, 64, False, "xla"),
        ("gpu", "9.0", jnp.float32, 128, 64, False, "xla"),
        ("gpu", "gfx942", jnp.bfloat16, 128, 64, False, "xla"),
        ("tpu", None, jnp.bfloat16, 128, 64, False, "xla"),
    ],
)
def test_cudnn_is_chosen_where_it_can_train(
    monkeypatch, platform, capability, dtype, size, length, packed, expected
):
    device = type("Device", (), {"compute_capability": capability} if capability else {})()
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    q = jax.ShapeDtypeStruct((2, length, 4, size), dtype)
    assert choose_backend("auto", q, q, packed=packed) == expected


def test_a_raw_key_draws_the_numbers_of_a_typed_one():
    raw, typed = init_params(CONFIG, jax.random.PRNGKey(3)), init_params(CONFIG, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, raw, typed)


def test_params_born_sharded_are_the_same_bits(params):
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    make = lambda key: init_params(CONFIG, key, jnp.float64)  # noqa: E731
    specs = transformer_param_specs(jax.eval_shape(make, jax.random.key(0)))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    sharded = jax.jit(make, out_shardings=shardings)(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, sharded, params)
    first, second = params["layers"]["mlp"]["up"]["kernel"]
    assert (first != second).any()


def test_the_structure_of_a_module_is_found_once_for_equal_configs():
    made = []

    class Counted(Block):
        def __init__(self, config, *, rngs):
            made.append(config)
            super().__init__(config, rngs=rngs)

    for mlp_size in (4, 4, 8):
        sizes = {"vocab_size": 16, "num_layers": 2, "hidden_size": 8, "num_heads": 2}
        rebuilder(Counted, TransformerConfig(**sizes, mlp_size=mlp_size))
    assert [config.mlp_size for config in made] == [4, 8]
