"""Which dtype each number has: masters, compute copy, gradient sum, loss scale."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from comparisons import close

import jaxfb
from jaxfb import BatchPlan, DynamicLossScale, LossOutput, Sum, get_forward_backward_func, make_mesh

F32, BF16 = jnp.float32, jnp.bfloat16


def narrow(tree, dtype=np.float32):
    return jax.tree.map(lambda x: x.astype(dtype) if x.dtype == np.float64 else x, tree)


def equations(jaxpr, inside_loop=False):
    """Every equation of a program, with whether it is inside a scan or while."""
    for eqn in jaxpr.eqns:
        yield eqn, inside_loop
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                yield from equations(
                    getattr(value, "jaxpr", value), inside_loop or eqn.primitive.name in ("scan", "while")
                )


# float32


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "count"), [({"data": 2}, 4), ({"data": 2, "fsdp": 2}, 2)], ids=str)
def test_the_law_in_float32(mesh, count):
    params, batch = narrow(toy.params()), narrow(toy.batch())
    plan = BatchPlan(rows=16, data_parallel=2 * mesh.get("fsdp", 1), num_microbatches=count)
    out = get_forward_backward_func(make_mesh(**mesh))(toy.model, params, batch, plan)
    loss, grads = jax.jit(jax.value_and_grad(lambda p: toy.whole_batch(p, batch)[0]))(params)
    close((out.loss, out.grads), (loss, grads), 2e-6)
    assert {leaf.dtype for leaf in jax.tree.leaves((out.loss, out.grads))} == {np.dtype(F32)}


# bfloat16 compute, float32 masters


def bf16_loss(params, microbatch, rng):
    """Asserts what it is given: the compute copy."""
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(BF16)}
    hidden = jnp.tanh(microbatch["x"].astype(BF16) @ params["w"])
    return Sum((hidden @ params["v"]).sum(), microbatch["x"].shape[0])


W = {"w": np.random.default_rng(0).normal(size=(7, 5)).astype(F32), "v": np.ones(5, F32)}
X = {"x": np.random.default_rng(1).normal(size=(16, 7)).astype(F32)}


@pytest.mark.parametrize("mesh", [{"data": 2}, {"fsdp": 5}], ids=str)
def test_gradients_come_in_float32_and_equal_those_of_the_compute_copy(mesh):
    rows = 16 if "data" in mesh else 15
    batch, replicas = {"x": X["x"][:rows]}, next(iter(mesh.values()))
    fb = get_forward_backward_func(
        make_mesh(**mesh, devices=jax.devices()[:replicas]), compute_dtype="bfloat16"
    )
    out = fb(bf16_loss, W, batch, BatchPlan(rows=rows, data_parallel=replicas, rows_per_microbatch=1))

    def by_row(params):
        """Sum in float32 of what each row gives in bfloat16."""
        one = lambda x: jax.grad(lambda p: bf16_loss(p, {"x": x[None]}, None).total)(params)  # noqa: E731
        return jax.tree.map(lambda g: g.astype(F32).mean(0), jax.vmap(one)(batch["x"]))

    assert {leaf.dtype for leaf in jax.tree.leaves(out.grads)} == {np.dtype(F32)}
    # a seed of 1/rows is rounded to bfloat16 on its way down, so a few parts in 2**8
    close(out.grads, by_row(jax.tree.map(lambda p: jnp.asarray(p, BF16), W)), 2.0**-7)


@pytest.mark.parametrize("fsdp_gather", ["layer", "step"])
def test_the_masters_are_cast_once_a_call_outside_the_loop(fsdp_gather):
    fb = get_forward_backward_func(make_mesh(data=2), compute_dtype="bfloat16", fsdp_gather=fsdp_gather)
    plan = BatchPlan(rows=16, data_parallel=2, num_microbatches=4)
    program = jax.make_jaxpr(lambda p: fb(bf16_loss, p, X, plan).grads)(W)
    casts = [
        inside
        for eqn, inside in equations(program.jaxpr)
        if eqn.primitive.name == "convert_element_type"
        and eqn.params["new_dtype"] == BF16
        and eqn.invars[0].aval.shape == (7, 5)
    ]
    assert casts == [False]


def test_a_bfloat16_model_may_take_bfloat16_inputs():
    """Its layers must give hidden back as they got it, which only holds in the compute dtype."""
    model = jaxfb.Pipelined(
        lambda outer, mb, rng: mb["x"],
        lambda w, h, mb, rng: jnp.tanh(h @ w),
        lambda outer, h, mb, rng: Sum(h.sum(), h.shape[0]),
    )
    fb = get_forward_backward_func(compute_dtype="bfloat16")
    params = {"layers": np.eye(7, dtype=F32)[None].repeat(3, 0)}
    out = fb(model, params, {"x": X["x"].astype(BF16)}, BatchPlan(rows=16, num_microbatches=4))
    assert out.grads["layers"].dtype == F32 and np.any(out.grads["layers"])


def test_totals_in_low_precision_are_summed_in_float32():
    """257 microbatches of total 1 and weight 1: bfloat16 has no 257."""

    def loss(w, microbatch, rng):
        one = (w * microbatch["x"]).sum()
        return LossOutput({"t": Sum(one, microbatch["x"].sum())}, {"m": Sum(one, microbatch["x"].sum())})

    fb = get_forward_backward_func(normalize="none")
    out = fb(
        loss, jnp.ones((), BF16), {"x": jnp.ones((257,), BF16)}, BatchPlan(rows=257, num_microbatches=257)
    )
    values = {"loss": out.loss, "term": out.terms["t"].total, "weight": out.terms["t"].weight}
    values |= {"metric": out.metrics["m"].total, "counted": out.metrics["m"].weight, "grad": out.grads}
    assert {name: float(value) for name, value in values.items()} == dict.fromkeys(values, 257)
    assert {value.dtype for value in values.values()} == {np.dtype(F32)}


def small_after_large(w, microbatch, rng):
    return Sum(w * microbatch["x"].sum(), microbatch["x"].shape[0])


def test_the_accumulator_is_float32_unless_asked_and_asking_for_less_warns():
    x = np.array([1.0] + [2.0**-9] * 15, np.float32).astype(BF16)
    plan = BatchPlan(rows=16, num_microbatches=16)
    run = lambda **options: get_forward_backward_func(normalize="none", **options)(  # noqa: E731
        small_after_large, jnp.zeros((), BF16), {"x": x}, plan
    )
    assert float(run().grads) == 1 + 15 * 2.0**-9
    with pytest.warns(UserWarning, match="accum_dtype=bfloat16 sums 16 microbatches below float32"):
        lossy = run(accum_dtype="bfloat16")
    assert lossy.grads.dtype == BF16 and float(lossy.grads) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(accum_dtype="float64").grads.dtype == np.float64


# float16 and its loss scale


def half_loss(params, microbatch, rng):
    per_row = (microbatch["x"].astype(params["w"].dtype) @ params["w"]) * microbatch["size"].astype(
        jnp.float16
    )
    return Sum(per_row.sum(), microbatch["x"].shape[0])


def half_step(scale, **options):
    plan = BatchPlan(rows=8, data_parallel=2, num_microbatches=2)
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=0.1)
    return jaxfb.make_train_step(
        half_loss, optimizer, make_mesh(data=2), plan, compute_dtype="float16", loss_scale=scale, **options
    )


def half_batch(size):
    return {"x": X["x"][:8] / 4, "size": np.full(8, size, F32)}


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def test_an_overflow_skips_the_update_and_halves_the_scale():
    step = half_step(DynamicLossScale(initial=2.0**18, hysteresis=1, growth_interval=2))
    state = step.init({"w": W["w"][:, 0]})
    seen = []
    for _ in range(7):
        before = bits((state.params, state.opt_state))
        state, metrics = step(state, half_batch(2.0))
        same = bits((state.params, state.opt_state)) == before
        seen.append((float(metrics.loss_scale), bool(metrics.skipped), same))
        assert np.isfinite(metrics.loss)
    # a cotangent of 2 * 2**18 / 8 rows is past 65504; two finite updates in a row double the scale again
    assert seen == [
        (2.0**18, True, True),
        (2.0**17, False, False),
        (2.0**17, False, False),
        (2.0**18, True, True),
        (2.0**17, False, False),
        (2.0**17, False, False),
        (2.0**18, True, True),
    ]
    assert int(state.nonfinite_updates) == 3 and int(state.step) == 4


def test_gradients_are_unscaled_before_they_are_measured_and_clipped():
    step = half_step(DynamicLossScale(initial=2.0**10), max_grad_norm=0.05)
    state, metrics = step(step.init({"w": W["w"][:, 0]}), half_batch(2.0))
    norm = np.linalg.norm(2 * half_batch(2.0)["x"].mean(0))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=2e-3)
    np.testing.assert_allclose(metrics.clip_coefficient, 0.05 / norm, rtol=2e-3)
    np.testing.assert_allclose(metrics.clipped_grad_norm, 0.05, rtol=1e-6)


def test_the_scale_saves_gradients_too_small_for_float16():
    tiny = half_batch(2.0**-22)
    lost, kept = (half_step(scale, dropout=False) for scale in (None, DynamicLossScale(initial=2.0**16)))
    norms = [float(step(step.init({"w": W["w"][:, 0]}), tiny)[1].grad_norm) for step in (lost, kept)]
    wanted = np.linalg.norm(tiny["x"].mean(0) * 2.0**-22)
    np.testing.assert_allclose(norms[1], wanted, rtol=1e-2)
    assert abs(norms[0] - wanted) > 0.1 * wanted


def test_optax_sees_gradients_of_the_dtype_of_the_parameters():
    seen = []

    def update(grads, state, params=None):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(grads))
        return grads, state

    plan = BatchPlan(rows=16, num_microbatches=2)
    step = jaxfb.make_train_step(
        bf16_loss,
        optax.GradientTransformation(lambda p: (), update),
        make_mesh(),
        plan,
        compute_dtype="bfloat16",
    )
    state, _ = step(step.init(W), X)
    assert set(seen) == {np.dtype(F32)} and state.params["w"].dtype == F32
