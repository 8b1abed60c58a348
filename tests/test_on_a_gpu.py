"""What only a GPU can show; skipped without one.

JAX_PLATFORMS=cuda,cpu python -m pytest tests/test_on_a_gpu.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from comparisons import close, on_the_host

import jaxfb
from jaxfb.models.attention import packed_attention
from jaxfb.models.attention_kernels import cudnn
from jaxfb.models.config import TransformerConfig
from jaxfb.models.grouped_matmul import grouped_matmul
from jaxfb.models.transformer import init_params, transformer

if jax.default_backend() != "gpu":
    pytest.skip("needs a GPU", allow_module_level=True)

ROWS, LENGTH = 8, 32
DENSE = TransformerConfig(
    vocab_size=40, num_layers=3, hidden_size=32, num_heads=4, num_kv_heads=2, mlp_size=48, loss_chunk=16
)
EXPERTS = TransformerConfig(
    vocab_size=40, num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, mlp_size=48, loss_chunk=16,
    num_experts=4, experts_per_token=2, expert_mlp_size=24,
)  # fmt: skip
TOLERANCE = {"float64": 1e-12, "float32": 2e-5}


def batch_of():
    rng = np.random.default_rng(0)
    return {
        "tokens": rng.integers(0, 40, (ROWS, LENGTH), np.int32),
        "targets": rng.integers(0, 40, (ROWS, LENGTH), np.int32),
        "loss_mask": (rng.random((ROWS, LENGTH)) > 0.3).astype(np.float32),
    }


def memory_of_moments(state):
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1}


def gradients(config, batch, rows_per_microbatch, *, dtype="float64", device=None, **options):
    """(loss, gradients) of a batch on one device, as numpy."""
    mesh = jaxfb.make_mesh(devices=[device or jax.devices()[0]])
    plan = jaxfb.BatchPlan(rows=len(batch["tokens"]), rows_per_microbatch=rows_per_microbatch)
    run = jaxfb.get_forward_backward_func(mesh, **options)
    # numbers drawn on another platform differ by their last bits
    with jax.default_device(jax.devices("cpu")[0]):
        params = jax.device_get(init_params(config, jax.random.key(0), jnp.dtype(dtype)))
    with jax.default_matmul_precision("highest"):
        out = run(transformer(config), params, batch, plan=plan)
    return float(out.loss), jax.device_get(out.grads)


@pytest.mark.parametrize("remat", ["none", "selective", "full", "offload"])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("config", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_accumulated_gradients_are_those_of_the_full_batch_on_a_cpu(config, dtype, remat):
    batch = batch_of()
    cpu = jax.devices("cpu")[0]
    wanted = gradients(config, batch, ROWS, dtype="float64", device=cpu, remat="none")
    got = gradients(config, batch, 2, dtype=dtype, remat=remat)
    close(got, wanted, TOLERANCE[dtype])


@pytest.mark.parametrize("segments", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("size", [64, 128])
def test_flash_attention_is_attention(size, segments):
    rng = np.random.default_rng(0)
    draw = lambda heads: jnp.asarray(rng.normal(size=(2, 256, heads, size)), jnp.bfloat16)  # noqa: E731
    query, key, value = draw(4), draw(2), draw(2)
    documents = jnp.broadcast_to(jnp.arange(256) // 100 + 1, (2, 256)) if segments else None

    def summed(backend, *arguments):
        out = packed_attention(*arguments, segments=documents, backend=backend)
        return (out.astype(jnp.float32) ** 2).sum()

    ours, plain = (
        jax.jit(jax.grad(lambda *arguments, backend=backend: summed(backend, *arguments), (0, 1, 2)))(
            query, key, value
        )
        for backend in ("cudnn", "xla")
    )
    close(ours, plain, 3e-2)


@pytest.mark.parametrize("window", [None, 50])
def test_blocks_of_queries_are_attention_at_once(monkeypatch, window):
    rng = np.random.default_rng(0)
    draw = lambda heads: jnp.asarray(rng.normal(size=(2, 1024, heads, 64)), jnp.bfloat16)  # noqa: E731
    query, key, value = draw(4), draw(2), draw(2)
    documents = jnp.broadcast_to(jnp.arange(1024) // 300 + 1, (2, 1024))

    def gradients(backend, largest):
        monkeypatch.setattr(cudnn, "LARGEST_WHOLE", largest)

        def loss(*qkv):
            out = packed_attention(*qkv, segments=documents, backend=backend, window=window)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)

    close(gradients("cudnn", 0), gradients("xla", 0), 3e-2)
    close(gradients("cudnn", 0), gradients("cudnn", 2**31), 3e-2)


@pytest.mark.parametrize("sizes", [[100, 0, 700, 200], [0, 0, 0, 0], [1, 1022, 0, 1]], ids=str)
def test_kernels_of_experts_are_products_of_each_group(sizes):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)  # noqa: E731
    used = sum(sizes)
    rows, kernels, cotangent = draw(1024, 256), draw(4, 256, 384), draw(1024, 384)
    rows, cotangent = rows.at[used:].set(jnp.nan), cotangent.at[used:].set(jnp.nan)

    @jax.jit
    def run(rows, kernels, cotangent):
        out, pull = jax.vjp(
            lambda rows, kernels: grouped_matmul(rows, kernels, jnp.array(sizes)), rows, kernels
        )
        return out, *pull(cotangent)

    assert "triton" in run.lower(rows, kernels, cotangent).compile().as_text()
    out, of_rows, of_kernels = (np.asarray(x, np.float64) for x in run(rows, kernels, cotangent))
    r, k, c = (np.asarray(x, np.float64) for x in (rows[:used], kernels, cotangent[:used]))
    group = np.repeat(np.arange(4), sizes)
    wanted = np.zeros_like(k)
    for one in range(4):
        wanted[one] = r[group == one].T @ c[group == one]
        close(out[:used][group == one], r[group == one] @ k[one], 1e-2)
        close(of_rows[:used][group == one], c[group == one] @ k[one].T, 1e-2)
    close(of_kernels, wanted, 1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_optimizer_state_on_the_host_makes_the_same_updates(optimizer):
    states = {}
    for memory in ("device", "host"):
        plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2)
        step = jaxfb.make_train_step(
            transformer(DENSE), jaxfb.make_optimizer(optimizer, learning_rate=0.01), jaxfb.make_mesh(
                devices=jax.devices()[:1]), plan, dropout=False, optimizer_memory=memory, max_grad_norm=1.0,
        )  # fmt: skip
        state = step.init(lambda key: init_params(DENSE, key, jnp.float64), 0)
        assert memory_of_moments(state) == {"pinned_host" if memory == "host" else "device"}
        for _ in range(3):
            state, metrics = step(state, batch_of())
        assert memory_of_moments(state) == {"pinned_host" if memory == "host" else "device"}
        states[memory] = (float(metrics.loss), on_the_host(state.params), on_the_host(state.opt_state))
    close(states["host"], states["device"])


def test_a_skipped_update_leaves_the_state_where_it_was():
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2)
    step = jaxfb.make_train_step(
        transformer(DENSE), jaxfb.make_optimizer("adamw", learning_rate=0.01),
        jaxfb.make_mesh(devices=jax.devices()[:1]), plan, dropout=False, compute_dtype="bfloat16",
    )  # fmt: skip
    state = step.init(lambda key: init_params(DENSE, key), 0)
    before = on_the_host(state.params)
    batch = batch_of()
    batch["loss_mask"][0, 0] = np.nan
    state, metrics = step(state, batch)
    assert bool(metrics.skipped)
    for old, new in zip(before, on_the_host(state.params), strict=True):
        np.testing.assert_array_equal(old, new)


def test_the_toy_of_all_other_tests_agrees_in_float64():
    mesh = jaxfb.make_mesh(devices=jax.devices()[:1])
    plan = jaxfb.BatchPlan(rows=toy.ROWS, rows_per_microbatch=2)
    out = jaxfb.get_forward_backward_func(mesh)(toy.model, toy.params(), toy.batch(), plan=plan)
    with jax.default_device(jax.devices("cpu")[0]):
        loss, wanted = toy.gradient()
    close((out.loss, out.grads), (loss, wanted))
