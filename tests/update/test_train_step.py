"""One global batch, one update: golden AdamW steps, plain optax, skips, ZeRO-1, learning rate, donation."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from marks import some_slow

import jaxfb
from jaxfb import BatchPlan, LossOutput, Sum, make_mesh, make_train_step

CASES = [
    "clip_torch",
    "clip_torch_skip_nonfinite",
    "clip_optax",
    "clip_optax_skip_nonfinite",
    "no_clip",
    "loose_clip",
    "decay_on_matrices_only",
    "mean_of_micro_means",
    "no_weight_decay_large_eps",
]


def mlp_loss(normalisation, params, microbatch, rng):
    x, y, weight = microbatch["x"], microbatch["y"], microbatch["weight"]
    out = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
    total = jnp.where(weight > 0, weight * ((out - y) ** 2).sum(-1), 0).sum()
    return Sum(total, weight.sum() if normalisation == "weighted_mean" else jnp.maximum(weight.sum(), 1))


def golden_optimizer(inputs):
    given, lr = inputs["optimizer"], inputs["lr"]
    rate = jaxfb.lr_schedule(
        lr["style"],
        peak=lr["max_lr"],
        initial=lr["init_lr"],
        final=lr["min_lr"],
        warmup=lr["warmup"],
        total=lr["decay"],
    )
    mask = dict(mask=lambda params: True) if given["decay_on"] == "all" else {}
    betas = dict(b1=given["beta1"], b2=given["beta2"], eps=given["eps"])
    return jaxfb.make_optimizer(
        "adamw", learning_rate=rate, weight_decay=given["weight_decay"], **betas, **mask
    )


def golden_batches(inputs):
    """Every attempt as one global batch of rows; the strings "nan" and "inf" are read by float."""
    for microbatches in inputs["data"]:
        yield {
            name: np.concatenate([np.array(mb[name], dtype=object).astype(float) for mb in microbatches])
            for name in ("x", "y", "weight")
        }


def golden_step(inputs, mesh, **plan):
    clip = inputs["clip"]
    mean_of_means = inputs["normalisation"] == "mean_of_micro_means"
    return make_train_step(
        partial(mlp_loss, inputs["normalisation"]),
        golden_optimizer(inputs),
        mesh,
        BatchPlan(rows=12, **plan),
        max_grad_norm=clip["max_norm"],
        clip_convention="torch" if clip["kind"] == "torch" else "exact",
        normalize="microbatch" if mean_of_means else "global",
        dropout=False,
    )


GOLDEN_FAST = ("clip_torch", "mean_of_micro_means")


@pytest.mark.parametrize("name", some_slow(CASES, fast=GOLDEN_FAST))
def test_golden_steps_of_torch_adamw_are_reproduced(golden, name):
    case = next(case for case in golden("adamw_clip_steps.json")["cases"] if case["name"] == name)
    inputs, expected = case["inputs"], case["expected"]
    step = golden_step(inputs, make_mesh(), num_microbatches=3)
    state = step.init(jax.tree.map(np.array, inputs["params"], is_leaf=lambda x: isinstance(x, list)))
    near = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)
    for batch, want in zip(golden_batches(inputs), expected["steps"], strict=True):
        state, metrics = step(state, batch)
        assert bool(metrics.skipped) == want["skipped"]
        near(float(metrics.learning_rate), want["lr"])
        near(float(jaxfb.gradients.global_norm(state.params)), want["global_param_norm"])
        if not want["skipped"]:
            near(metrics.loss, want["loss"])
            near(metrics.grad_norm, want["grad_norm_pre_clip"])
            near(metrics.clipped_grad_norm, want["grad_norm_post_clip"])
            near(metrics.clip_coefficient, want["clip_coefficient"])
    assert int(state.step) == expected["applied_updates"]
    adam = state.opt_state.inner
    moments = next(part for part in jax.tree.leaves(adam, is_leaf=is_adam) if is_adam(part))
    for got, wanted in (
        (state.params, "params"),
        (moments.mu, "first_moment"),
        (moments.nu, "second_moment"),
    ):
        jax.tree.map(near, got, {k: np.array(v) for k, v in expected[f"final_{wanted}"].items()})


def is_adam(part):
    return isinstance(part, optax.ScaleByAdamState)


@pytest.mark.parametrize("num_microbatches", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_the_golden_run_is_the_same_on_replicas(golden, num_microbatches):
    case = golden("adamw_clip_steps.json")["cases"][0]
    step = golden_step(case["inputs"], make_mesh(data=2), data_parallel=2, num_microbatches=num_microbatches)
    state = step.init({k: np.array(v) for k, v in case["inputs"]["params"].items()})
    for batch in golden_batches(case["inputs"]):
        state, _ = step(state, batch)
    for name, wanted in case["expected"]["final_params"].items():
        np.testing.assert_allclose(state.params[name], wanted, rtol=1e-9)


# A tiny problem for the rest

ROWS = 8
W = {"w": np.array([0.5, -1.0, 2.0, 0.3]), "b": np.array([0.1])}


def batch_of(seed, mask=1.0):
    rng = np.random.default_rng(seed)
    return {"x": rng.normal(size=(ROWS, 4)), "y": rng.normal(size=ROWS), "mask": np.full(ROWS, mask)}


def loss(params, microbatch, rng):
    per_row = (microbatch["x"] @ params["w"] + params["b"][0] - microbatch["y"]) ** 2
    return Sum(jnp.where(microbatch["mask"] > 0, per_row, 0).sum(), microbatch["mask"].sum())


def whole_loss(params, batch):
    term = loss(params, batch, None)
    return term.total / term.weight


def plan_of(num_microbatches=2, data_parallel=1):
    return BatchPlan(rows=ROWS, num_microbatches=num_microbatches, data_parallel=data_parallel)


def host(tree):
    """Copies on the host: the state itself is donated."""
    unkeyed = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return jax.tree.map(lambda x: np.array(unkeyed(x)), tree)


def same_bits(a, b):
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), host(a), host(b)))


OPTIMIZERS = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "a chain": optax.chain(
        optax.clip_by_global_norm(0.5), optax.sgd(optax.linear_schedule(0.1, 0.0, 5), 0.9)
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(1e-2, 10)),
    "masked": optax.masked(optax.adam(1e-2), {"w": True, "b": False}),
    "multi_transform": optax.multi_transform(
        {"fast": optax.sgd(0.1), "slow": optax.rmsprop(1e-3)}, {"w": "fast", "b": "slow"}
    ),
    "lookahead of params": optax.chain(optax.adam(1e-2), optax.add_decayed_weights(1e-3)),
}


@pytest.mark.parametrize("name", some_slow(OPTIMIZERS, fast=("adamw", "masked")))
def test_any_optax_transformation_updates_once_a_call_as_on_the_full_batch(name):
    optimizer = OPTIMIZERS[name]
    step = make_train_step(loss, optimizer, make_mesh(data=2), plan_of(2, 2))
    state = step.init(W)
    params, opt_state = W, optimizer.init(W)
    for seed in range(3):
        state, metrics = step(state, batch_of(seed))
        grads = jax.grad(whole_loss)(params, batch_of(seed))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        np.testing.assert_allclose(metrics.update_norm, jaxfb.gradients.global_norm(updates), rtol=1e-12)
        np.testing.assert_allclose(metrics.grad_norm, jaxfb.gradients.global_norm(grads), rtol=1e-12)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15), host(state.params), host(params)
    )
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-15), host(state.opt_state), host(opt_state)
    )


@pytest.mark.slow
def test_dropout_keys_depend_on_the_update_and_not_on_the_split():
    """Two updates on one batch draw two masks; a split in four draws the same two."""
    losses = []
    for num_microbatches, mesh in ((1, make_mesh()), (4, make_mesh()), (4, make_mesh(data=2))):
        plan = BatchPlan(rows=16, num_microbatches=num_microbatches, data_parallel=mesh.shape["data"])
        step = make_train_step(toy.model, optax.sgd(0.0), mesh, plan)
        state, seen = step.init(toy.params(layers=1), rng=7), []
        for _ in range(2):
            state, metrics = step(state, toy.batch())
            seen.append(float(metrics.loss))
        losses.append(seen)
    assert abs(losses[0][0] - losses[0][1]) > 1e-6
    np.testing.assert_allclose(losses[1:], [losses[0]] * 2, rtol=1e-12)


# Skips


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("dtype", [np.float64, pytest.param(np.float32, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_leaves_everything_as_it_was(bad, dtype):
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    step = make_train_step(loss, optimizer, make_mesh(data=2), plan_of(2, 2), max_grad_norm=1.0)
    cast = lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)  # noqa: E731
    state, first = step(step.init(cast(W)), cast(batch_of(0)))
    before, poisoned = host(state), cast(batch_of(1))
    poisoned["x"][3, 1] = bad
    state, metrics = step(state, poisoned)
    assert bool(metrics.skipped) and int(metrics.nonfinite_updates) == 1 and metrics.update_norm == 0
    assert metrics.nonfinite_leaves(state.params) == ["['b']", "['w']"]
    same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.step), int(state.samples), int(state.attempts)) == (1, ROWS, 2)
    state, third = step(state, cast(batch_of(2)))
    assert not bool(third.skipped) and int(third.step) == 1
    assert float(third.learning_rate) < float(first.learning_rate)


def test_only_the_leaves_that_are_not_finite_are_named():
    def partly(params, microbatch, rng):
        return Sum((microbatch["x"] @ params["w"]).sum() * 1e308 * 1e308 + params["b"].sum(), ROWS)

    step = make_train_step(partly, optax.sgd(0.1), make_mesh(), plan_of())
    state, metrics = step(step.init(W), batch_of(0))
    assert metrics.nonfinite_leaves(state.params) == ["['w']"]


def test_an_update_of_rows_that_count_nothing_is_skipped_and_counted():
    """Not even weight decay and momentum move the parameters."""
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=0.1, weight_decay=0.1)
    step = make_train_step(loss, optimizer, make_mesh(), plan_of())
    state, _ = step(step.init(W), batch_of(0))
    before = host(state)
    state, metrics = step(state, batch_of(1, mask=0.0))
    assert bool(metrics.skipped) and metrics.loss == 0
    assert (int(state.zero_weight_updates), int(state.nonfinite_updates), int(state.step)) == (1, 0, 1)
    same_bits((state.params, state.opt_state), (before.params, before.opt_state))


def test_weights_that_cancel_are_not_weights_that_are_zero():
    def two_terms(params, microbatch, rng):
        term = loss(params, microbatch, rng)
        return LossOutput({"plus": term, "minus": Sum(3 * term.total, -term.weight)})

    step = make_train_step(two_terms, optax.sgd(0.1), make_mesh(), plan_of())
    state, metrics = step(step.init(W), batch_of(0))
    assert not bool(metrics.skipped) and int(state.step) == 1 and metrics.update_norm > 0


def test_a_skipped_update_does_not_repeat_its_dropout():
    """The key is that of the attempt: drawn again, the same mask might overflow again and again."""

    def drawn(params, microbatch, rng):
        draw = jax.vmap(jax.random.uniform)(rng)
        term = loss(params, microbatch, rng)
        return LossOutput({"loss": term}, {"draw": Sum(draw.sum(), float(len(draw)))})

    step = make_train_step(drawn, optax.sgd(0.1), make_mesh(), plan_of())
    state, poisoned = step.init(W), batch_of(1)
    poisoned["x"][3, 1] = np.inf
    draws, skipped = [], []
    for batch in (batch_of(0), poisoned, batch_of(2)):
        state, metrics = step(state, batch)
        draws.append(float(metrics.metrics["draw"]))
        skipped.append(bool(metrics.skipped))
    assert skipped == [False, True, False] and len(set(draws)) == 3


# Where things live


def adam_of(state):
    return next(part for part in jax.tree.leaves(state.opt_state, is_leaf=is_adam) if is_adam(part))


ZERO1_PLAN = BatchPlan(rows=16, data_parallel=4, num_microbatches=2)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"data": 4}, {"data": 2, "fsdp": 2}], ids=str)
def test_zero1_gives_the_same_parameters_from_a_sharded_optimizer_state(mesh):
    optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-2, weight_decay=0.1)
    runs = []
    for sharding in ("none", "data"):
        step = make_train_step(
            toy.model, optimizer, make_mesh(**mesh), ZERO1_PLAN,
            max_grad_norm=0.1, dropout=False, optimizer_sharding=sharding,
        )  # fmt: skip
        state = step.init(toy.params())
        for seed in range(2):
            state, metrics = step(state, toy.batch(seed))
        runs.append((host(state), host(metrics)))
    for (path, a), b in zip(jax.tree.leaves_with_path(runs[0]), jax.tree.leaves(runs[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13, err_msg=jax.tree_util.keystr(path))
    moments = adam_of(state).mu
    assert "data" in moments["embed"].sharding.spec and "data" in moments["layers"]["w"].sharding.spec
    assert moments["embed"].addressable_shards[0].data.size * 4 == moments["embed"].size
    assert "data" not in state.params["embed"].sharding.spec
    placed = jax.tree.map(lambda leaf, target: leaf.sharding == target, state, step.state_shardings(state))
    assert jax.tree.all(placed)


def test_an_array_at_two_places_of_the_parameters_is_not_donated_twice():
    weight = jnp.ones(())
    loss = lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"] * p["v"]).sum(), len(mb["x"]))  # noqa: E731
    step = jaxfb.make_train_step(loss, optax.sgd(0.1), None, jaxfb.BatchPlan(rows=4, num_microbatches=2))
    with pytest.raises(ValueError, match=r"params\['v'\] and params\['w'\] are the same array"):
        step.init({"w": weight, "v": weight}, donate=True)
    state = step.init({"w": weight, "v": weight})
    assert step(state, {"x": jnp.ones(4)})[1].loss == 1


def test_the_state_is_donated_and_what_it_was_made_of_is_not():
    params = jax.tree.map(jnp.array, W)
    step = make_train_step(loss, optax.adam(1e-2), make_mesh(), plan_of())
    state = step.init(params)
    new, _ = step(state, batch_of(0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.params))
    same_bits(params, jax.tree.map(jnp.array, W))
    again, _ = step(step.init(params), batch_of(0))
    same_bits(again.params, new.params)


def test_params_made_by_a_function_are_born_sharded():
    step = make_train_step(
        toy.model,
        optax.adam(1e-2),
        make_mesh(fsdp=4),
        BatchPlan(rows=16, data_parallel=4, num_microbatches=2),
    )
    state = step.init(lambda key: jax.tree.map(lambda x: x * jax.random.normal(key), toy.params()), rng=3)
    assert state.params["layers"]["w"].addressable_shards[0].data.shape == (4, 2, 8)
    assert jax.tree.all(jax.tree.map(lambda x, y: x.sharding == y, state, step.state_shardings(state)))


def test_a_batch_on_one_device_is_moved_to_the_mesh():
    step = make_train_step(loss, optax.sgd(0.1), make_mesh(data=2), plan_of(2, 2))
    onto = jax.device_put(batch_of(0), jax.devices()[0])
    state, _ = step(step.init(W), onto)
    other, _ = step(step.init(W), batch_of(0))
    same_bits(state.params, other.params)


def test_a_step_compiles_once_and_its_result_is_where_the_next_wants_it(caplog, monkeypatch):
    step = make_train_step(toy.model, optax.adam(1e-2), make_mesh(data=2, fsdp=2), ZERO1_PLAN, dropout=False)
    state = step.init(toy.params())
    with jax.log_compiles():
        for seed in range(3):
            state, _ = step(state, toy.batch(seed))
            assert step.place(state) is state
    finished = [
        record for record in caplog.messages if record.startswith("Finished XLA compilation of jit(_update)")
    ]
    assert len(finished) == 1


# Learning rate


@pytest.mark.parametrize("way", ["call", "timed", "split"])
def test_nothing_is_nan_to_jax_where_the_learning_rate_is_unknown(way):
    step, batch = make_train_step(loss, optax.adam(0.1), make_mesh(data=2), plan_of(2, 2)), batch_of(0)
    with jax.debug_nans(True):
        state = step.init(W)
        if way == "call":
            _, metrics = step(state, batch)
        elif way == "timed":
            _, metrics, _ = step.timed(state, batch)
        else:
            _, metrics = step.apply(state, step.gradients(state, batch))
    assert np.isnan(metrics.learning_rate) and not metrics.skipped


@pytest.mark.parametrize("way", ["__call__", "timed"])
def test_the_first_program_is_seen_compiled_and_may_be_refused(way):
    batch, seen = batch_of(0), []

    def refuse(program):
        seen.append(program.memory_analysis().temp_size_in_bytes)
        raise ValueError("too large")

    step = make_train_step(loss, optax.adam(1e-2), None, plan_of(), check_program=refuse)
    state = step.init(W)
    with pytest.raises(ValueError, match="too large"):
        getattr(step, way)(state, batch)
    state = getattr(step, way)(state, batch)[0]  # it was not donated
    assert int(state.step) == 1 and len(seen) == 1 and seen[0] > 0


@pytest.mark.parametrize("unit", ["updates", "samples"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_logged_learning_rate_is_the_one_used_whatever_the_split(num_microbatches, unit):
    """SGD with a unit gradient shows the rate that was used; the series does not depend on the split."""

    def slope(params, microbatch, rng):
        return Sum(params.sum() * microbatch["x"].shape[0], microbatch["x"].shape[0])

    per = ROWS if unit == "samples" else 1
    rate = jaxfb.lr_schedule("linear", peak=1.0, final=0.0, warmup=2 * per, total=6 * per, unit=unit)
    step = make_train_step(
        slope, jaxfb.make_optimizer("sgd", learning_rate=rate), make_mesh(), plan_of(num_microbatches)
    )
    state, used, logged = step.init(np.zeros(1)), [], []
    for seed in range(7):
        before = float(state.params[0])
        state, metrics = step(state, {"x": batch_of(seed)["x"]})
        used.append(before - float(state.params[0]))
        logged.append(float(metrics.learning_rate))
    np.testing.assert_allclose(used, logged, rtol=0, atol=1e-12)
    np.testing.assert_allclose(logged, [float(rate(count * per)) for count in range(7)], rtol=1e-12)
    assert max(logged) == 1.0 and logged[-1] == 0.0 and len(set(logged)) > 4


def test_a_short_last_window_is_divided_by_its_real_weights_and_counts_its_real_rows():
    plan = BatchPlan(rows=ROWS, num_microbatches=4)
    step = make_train_step(loss, optax.sgd(0.1), make_mesh(), plan)
    short = batch_of(0)
    short["mask"][5:] = 0
    state, metrics = step(step.init(W), short, rows=5)
    grads = jax.grad(whole_loss)(W, jax.tree.map(lambda leaf: leaf[:5], short))
    np.testing.assert_allclose(metrics.grad_norm, jaxfb.gradients.global_norm(grads), rtol=1e-12)
    assert int(state.samples) == 5 and metrics.weights["loss"] == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_grad_norm=0.0), "use None to disable"),
        (dict(clip_convention="megatron"), 'must be "exact" or "torch"'),
        (dict(normalize="mean"), "normalize must be one of"),
        (dict(plan=BatchPlan("eval", rows=8, num_microbatches=2)), 'got plan "eval"'),
    ],
)
def test_options_that_are_not_legal_are_refused(options, message):
    plan = options.pop("plan", plan_of())
    with pytest.raises(ValueError, match=message):
        make_train_step(loss, optax.sgd(0.1), make_mesh(), plan, **options)


# Whose arrays they are, and what counts as a function


def caller_params(mesh):
    """Arrays on one device, on the host and already on the mesh: any of them may share a buffer with the state."""
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return [
        jax.tree.map(jnp.array, W),
        jax.tree.map(np.array, W),
        jax.device_put(W, replicated),
    ]


@pytest.mark.filterwarnings("ignore:tensor=2 cuts no parameter")
@pytest.mark.parametrize("sizes", [{}, {"data": 2}, {"fsdp": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_the_arrays_that_a_state_is_made_of_stay_the_callers(sizes):
    mesh = make_mesh(**sizes)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    optimizer = optax.contrib.schedule_free_sgd(0.1)  # its state has the parameters once more
    step = make_train_step(loss, optimizer, mesh, plan_of(2, replicas))
    for params in caller_params(mesh):
        ends = []
        for _ in range(2):
            state = step.init(params)
            ends.append(step(state, batch_of(0))[0].params)
        same_bits(*ends)
        same_bits(params, W)


def test_a_host_array_that_its_owner_changes_does_not_change_the_state():
    for sizes in ({}, {"data": 2}):
        mesh = make_mesh(**sizes)
        params = {"w": np.zeros(1 << 22), "b": np.zeros(1)}  # so many that a copy takes a while
        state = make_train_step(loss, optax.sgd(0.1), mesh, plan_of(2, mesh.shape["data"])).init(params)
        assert all(leaf.is_ready() for leaf in jax.tree.leaves(state.params))
        params["w"][:] = 7
        assert not np.any(host(state.params["w"]))


class Affine:
    def make(self, key):
        return W

    def __call__(self, key):
        return W


MAKERS = {
    "function": lambda key: W,
    "method": Affine().make,
    "callable object": Affine(),
    "partial": partial(lambda tree, key: tree, W),
    "jax partial": jax.tree_util.Partial(lambda tree, key: tree, W),
    "jitted": jax.jit(lambda key: W),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_function_makes_the_parameters_whatever_kind_it_is(name):
    step = make_train_step(loss, optax.sgd(0.1), None, plan_of())
    same_bits(step.init(MAKERS[name]).params, W)


def test_an_update_needs_no_promotion_of_dtypes():
    """optax.sgd needs none either; most of optax's other optimizers do."""

    def squares(params, microbatch, rng):
        return Sum(jnp.square(microbatch["x"] @ params["w"]).sum(), microbatch["x"].shape[0])

    step = make_train_step(
        squares, optax.sgd(0.1), None, BatchPlan(rows=4, rows_per_microbatch=2), max_grad_norm=1.0
    )
    state = step.init({"w": jnp.ones((3, 2), jnp.float32)})
    with jax.numpy_dtype_promotion("strict"):
        state, _ = step(state, {"x": jnp.ones((4, 3), jnp.float32)})
    assert int(state.step) == 1
