"""Arrays and calls of a caller who has a mesh too: explicit axes, `jax.set_mesh`, devices in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfb

ROWS = 24
RNG = np.random.default_rng(0)
PARAMS = {"w": RNG.normal(size=(6, 3))}
BATCH = {"x": RNG.normal(size=(ROWS, 6)), "y": RNG.normal(size=(ROWS, 3))}
PLAN = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2, data_parallel=4)
SIZES = {"data": 2, "fsdp": 2}


def loss(params, microbatch, rng):
    error = jnp.square(microbatch["x"] @ params["w"] - microbatch["y"]).sum(-1)
    if rng is not None:
        error = error * jax.vmap(jax.random.uniform)(rng)
    return jaxfb.Sum(error.sum(), error.size)


def grads(params=PARAMS, batch=BATCH, rng=None, devices=None, **call):
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**SIZES, devices=devices))
    return fb(loss, params, batch, PLAN, rng, **call).grads["w"]


def expected(rng=None):
    keys = None if rng is None else jax.random.split(jax.random.key(0), ROWS)
    return jax.grad(lambda params: loss(params, BATCH, keys).value)(PARAMS)["w"]


def close(got, rng=None):
    np.testing.assert_allclose(got, expected(rng), rtol=1e-12)


def explicit(tree):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    return jax.device_put(tree, NamedSharding(mesh, P("data")))


OTHERS = {
    "explicit": lambda: jax.make_mesh((8,), ("x",)),
    "of other sizes": lambda: jaxfb.make_mesh(data=8),
    "the same": lambda: jaxfb.make_mesh(**SIZES),
}


def test_rows_and_keys_may_be_cut_over_explicit_axes():
    close(grads(batch=explicit(BATCH)))
    close(grads(rng=explicit(jax.random.split(jax.random.key(0), ROWS))), rng=True)


@pytest.mark.parametrize("other", OTHERS)
def test_a_mesh_that_the_caller_has_set_changes_nothing(other):
    step = jaxfb.make_train_step(loss, optax.sgd(0.1), jaxfb.make_mesh(**SIZES), PLAN, dropout=False)
    before = step.init(PARAMS)
    with jax.set_mesh(OTHERS[other]()):
        close(grads())
        for state in (before, step.init(PARAMS)):
            state, _ = step(state, explicit(BATCH))
            np.testing.assert_allclose(state.params["w"], PARAMS["w"] - 0.1 * expected(), rtol=1e-12)


def test_devices_may_be_in_another_order():
    mesh, reordered = jaxfb.make_mesh(**SIZES), [jax.devices()[place] for place in (3, 1, 2, 0)]
    close(grads(jax.device_put(PARAMS, NamedSharding(mesh, P())), devices=reordered))
    close(grads(batch=jax.device_put(BATCH, NamedSharding(mesh, P("data"))), devices=reordered))


def test_dtypes_need_no_promotion():
    """A count of a mask is an integer beside a total in float64."""

    def masked(params, microbatch, rng):
        real = microbatch["x"][:, 0] > 0
        error = jnp.square(microbatch["x"] @ params["w"]).sum(-1)
        return jaxfb.Sum(jnp.where(real, error, jnp.zeros_like(error)).sum(), real.sum())

    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**SIZES))
    with jax.numpy_dtype_promotion("strict"):
        got = fb(masked, PARAMS, BATCH, PLAN).loss
    np.testing.assert_allclose(got, masked(PARAMS, BATCH, None).value, rtol=1e-12)


@pytest.mark.parametrize(
    ("total", "weight"), [("int32", "int32"), ("int32", "float32"), ("bfloat16", "float32")]
)
def test_a_ratio_needs_no_promotion(total, weight):
    """A metric such as accuracy counts in integers."""
    one = jaxfb.Sum(jnp.asarray(3, total), jnp.asarray(4, weight))
    with jax.numpy_dtype_promotion("strict"):
        got = one.value
    assert got == 0.75 and got.dtype == one.value.dtype


def test_numbers_may_be_on_another_device():
    elsewhere = jax.devices()[7]
    close(grads(grad_scale=jax.device_put(1.0, elsewhere), weights={"loss": jax.device_put(24.0, elsewhere)}))


def late_loss(params, microbatch, rng):
    """Reads the batch after a computation that takes a while."""
    w = jax.lax.fori_loop(0, 40, lambda _, w: jnp.tanh(w @ w), params["w"])
    return jaxfb.Sum(jnp.square(microbatch["x"] @ w[:6]).sum(), microbatch["x"].size)


def aligned(values):
    """Returns a copy of an array of the host whose memory a program on a CPU device can read where it lies."""
    numbers = np.zeros(values.size + 8)
    start = -numbers.ctypes.data % 64 // 8
    array = numbers[start : start + values.size].reshape(values.shape)
    array[...] = values
    return array


@pytest.mark.parametrize("of_a_step", [False, True], ids=["call", "step"])
def test_a_batch_of_the_host_may_be_filled_anew_once_a_call_returned(of_a_step):
    params = {"w": np.eye(256)}
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=ROWS)
    step = jaxfb.make_train_step(late_loss, optax.sgd(0.1), None, plan)
    fb = jaxfb.get_forward_backward_func()

    def loss_of(batch):
        return (
            step(step.init(params), batch)[1].loss if of_a_step else fb(late_loss, params, batch, plan).loss
        )

    batch = {"x": aligned(BATCH["x"])}
    wanted = float(loss_of(batch))
    got = loss_of(batch)
    batch["x"][...] = np.nan
    assert float(got) == wanted


def test_what_a_traced_call_cannot_change_is_refused():
    one = jaxfb.get_forward_backward_func()
    with pytest.raises(ValueError, match="explicit axes data of a mesh in a function that JAX traces"):
        jax.jit(lambda batch: grads(batch=batch))(explicit(BATCH))
    with jax.set_mesh(OTHERS["explicit"]()), pytest.raises(ValueError, match="has set a mesh of {'x': 8}"):
        jax.jit(lambda batch: grads(batch=batch))(BATCH)
    with pytest.raises(ValueError, match="inside jax.shard_map over i, but"):
        jax.shard_map(
            lambda batch: one(loss, PARAMS, batch, jaxfb.BatchPlan(rows=12, rows_per_microbatch=3)).grads,
            mesh=Mesh(np.array(jax.devices()[:2]), ("i",)),
            in_specs=P("i"),
            out_specs=P(),
            check_vma=False,
        )(BATCH)


def test_outputs_on_other_devices_cannot_be_added():
    half = jax.tree.map(lambda leaf: leaf[:12], BATCH)
    on_mesh = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**SIZES))(
        loss, PARAMS, half, jaxfb.BatchPlan(rows=12, rows_per_microbatch=3, data_parallel=4)
    )
    alone = jaxfb.get_forward_backward_func()(
        loss, PARAMS, half, jaxfb.BatchPlan(rows=12, rows_per_microbatch=3)
    )
    with pytest.raises(ValueError, match=r"if their devices agree, got \[0, 1, 2, 3\] and \[0\]"):
        on_mesh + alone
