"""What a loss function, a model, a batch and a plan may be; and that everything else is refused with a reason."""

import re
import warnings
from dataclasses import dataclass

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb import BatchPlan, LossOutput, Max, Sum, get_forward_backward_func, make_mesh

ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, 3))
Y = np.random.default_rng(1).normal(size=(ROWS,))
W = np.array([0.5, -1.0, 2.0])
BATCH = {"x": X, "y": Y}
PLAN = BatchPlan(rows=ROWS, data_parallel=2, num_microbatches=2)


def squares(w, microbatch):
    return (microbatch["x"] @ w - microbatch["y"]) ** 2


def loss_fn(w, microbatch, rng=None):
    return Sum(squares(w, microbatch).sum(), microbatch["x"].shape[0])


def run(loss, params=W, batch=BATCH, plan=PLAN, mesh=None, **call):
    fb = get_forward_backward_func(make_mesh(data=2) if mesh is None else mesh)
    return fb(loss, params, batch, plan, **call)


def expected(loss_of_whole=lambda w: squares(w, BATCH).mean(), params=W):
    return jax.value_and_grad(loss_of_whole)(params)


def equal(out, wanted, atol=1e-13):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), (out.loss, out.grads), wanted
    )


# What a loss function may return


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
def test_a_sum_without_a_weight_is_divided_by_nothing(normalize):
    """Over three microbatches on two replicas, a number that has no exact reciprocal."""
    batch = {"x": X[:6], "y": Y[:6]}
    fb = get_forward_backward_func(make_mesh(data=2), normalize=normalize)
    total = lambda w, mb, rng: Sum(squares(w, mb).sum(), None)  # noqa: E731
    out = fb(total, W, batch, BatchPlan(rows=6, data_parallel=2, num_microbatches=3))
    loss, grad = jax.value_and_grad(lambda w: squares(w, batch).sum())(jnp.asarray(W))
    np.testing.assert_allclose(out.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(out.grads, grad, rtol=1e-13)


def test_a_bare_sum_is_a_loss_named_loss():
    out = run(loss_fn)
    equal(out, expected())
    assert set(out.terms) == {"loss"} and out.outputs is None and out.metrics == {}


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda w, mb: squares(w, mb).mean(), "must return jaxfb.LossOutput or jaxfb.Sum.*return Sum"),
        (lambda w, mb: (squares(w, mb).sum(), 4), "got a tuple.*jaxfb.from_megatron"),
        (lambda w, mb: Sum(squares(w, mb), 4.0), r"term 'loss' must be a scalar sum.*total \(2,\)"),
        (lambda w, mb: Sum(squares(w, mb).sum(), mb["y"]), r"weight \(2,\); sum over rows"),
        (lambda w, mb: Sum(jnp.int32(3), 4.0), "term 'loss' must have a floating total, got int32"),
        (lambda w, mb: LossOutput({}), "must name at least one jaxfb.Sum"),
        (lambda w, mb: LossOutput({"a": squares(w, mb).sum()}), "term 'a' must be a jaxfb.Sum"),
        (
            lambda w, mb: LossOutput({"a": Sum(squares(w, mb).sum())}, {"m": squares(w, mb).max()}),
            "metric 'm' must be a jaxfb.Sum, Max, Min or Last",
        ),
        (
            lambda w, mb: LossOutput({"a": Sum(squares(w, mb).sum())}, outputs={"o": jnp.zeros(3)}),
            r"leaf \['o'\] must be \[2, ...\], got shape \(3,\)",
        ),
    ],
)
def test_what_breaks_the_contract_of_a_loss_function_is_refused(returned, message):
    with pytest.raises(ValueError, match=message):
        run(lambda w, mb, rng: returned(w, mb))


def test_a_weight_that_depends_on_params_is_refused_with_their_names():
    params = {"gate": np.float64(0.3), "w": W}

    def loss(p, mb, rng):
        gate = jax.nn.sigmoid(p["gate"] * mb["y"])
        return LossOutput({"ok": Sum(squares(p["w"], mb).sum(), 2.0), "gated": Sum(gate.sum(), gate.sum())})

    with pytest.raises(ValueError, match=r"weight of term 'gated'.*params\['gate'\].*the data alone"):
        try:
            run(loss, params)
        except ValueError as error:
            raise ValueError(re.sub(r"(the data alone), (.*?);.*", r"\2 \1", str(error))) from None


def test_a_weight_may_pass_through_a_layer_of_the_params_it_does_not_read():
    """The layers carry the mask along in `hidden`: the path from params to the weight is cut, not guessed."""

    def embed(outer, mb, rng):
        return {"h": mb["x"], "mask": mb["mask"]}

    def layer(weights, hidden, mb, rng):
        return {"h": jnp.tanh(hidden["h"] @ weights), "mask": hidden["mask"] * 1.0}

    def head(outer, hidden, mb, rng):
        return Sum((hidden["h"].sum(1) * hidden["mask"]).sum(), hidden["mask"].sum())

    params = {"layers": np.random.default_rng(2).normal(size=(2, 3, 3))}
    batch = {"x": X, "mask": np.arange(ROWS) % 3 * 1.0}
    out = run(jaxfb.Pipelined(embed, layer, head), params, batch)

    def whole(p):
        hidden = jnp.tanh(jnp.tanh(X @ p["layers"][0]) @ p["layers"][1])
        return (hidden.sum(1) * batch["mask"]).sum() / batch["mask"].sum()

    equal(out, expected(whole, params))


# Values that must do no harm


def masked_loss(w, mb, rng):
    counted = mb["mask"] > 0
    x = jnp.where(counted[:, None], mb["x"], 0)
    per_row = jnp.where(counted, squares(w, {"x": x, "y": jnp.where(counted, mb["y"], 0)}), 0)
    return LossOutput({"loss": Sum(per_row.sum(), mb["mask"].sum())}, {"worst": Max(per_row.max())})


def test_nan_in_a_masked_slot_is_inert():
    mask = np.array([1.0, 0, 1, 1, 0, 0, 0, 0])
    poisoned = {"x": np.where(mask[:, None] > 0, X, np.nan), "y": np.where(mask > 0, Y, np.inf), "mask": mask}
    clean, out = run(masked_loss, batch={**BATCH, "mask": mask}), run(masked_loss, batch=poisoned)
    assert jax.tree.all(jax.tree.map(np.array_equal, clean, out))
    assert np.isfinite(out.loss) and np.any(out.grads)


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
def test_a_batch_that_counts_nothing_has_zero_loss_and_zero_gradient(normalize):
    fb = get_forward_backward_func(make_mesh(data=2), normalize=normalize)
    out = fb(masked_loss, W, {**BATCH, "mask": np.zeros(ROWS)}, PLAN)
    assert out.loss == 0 and not np.any(out.grads) and out.terms["loss"].value == 0


# Programs a loss function may hold


@jax.custom_vjp
def doubled_gradient(x):
    return x


doubled_gradient.defvjp(lambda x: (x, None), lambda _, g: (2 * g,))


def with_scan(w, mb, rng):
    """A loop whose carry starts as a constant: equal on every replica, and then no longer."""
    total, _ = lax.scan(lambda acc, row: (acc + (row[0] @ w - row[1]) ** 2, None), 0.0, (mb["x"], mb["y"]))
    return Sum(total, mb["x"].shape[0])


def with_while(w, mb, rng):
    count = lax.while_loop(lambda i: i < mb["y"].shape[0], lambda i: i + 1, 0)
    return Sum(squares(w, mb).sum(), count)


def with_print(w, mb, rng):
    per_row = squares(w, mb)
    jax.debug.print("largest {}", per_row.max())
    jax.debug.callback(lambda rows: None, per_row)
    return Sum(per_row.sum(), mb["x"].shape[0])


def with_print_of_the_weight(w, mb, rng):
    weight = jnp.ones_like(mb["y"]).sum()
    jax.debug.print("counted {} for {}", weight, w.sum())
    return Sum(squares(w, mb).sum(), weight)


def with_cond_jit_and_remat(w, mb, rng):
    per_row = jax.checkpoint(jax.jit(squares))(w, mb)
    return Sum(lax.cond(mb["y"][0] > 99, lambda: 0.0, lambda: per_row.sum()), mb["x"].shape[0])


def with_vmap_over_rows(w, mb, rng):
    return Sum(jax.vmap(lambda x, y: (x @ w - y) ** 2)(mb["x"], mb["y"]).sum(), len(mb["y"]))


@pytest.mark.parametrize(
    "loss",
    [
        with_scan,
        with_while,
        with_print,
        with_print_of_the_weight,
        with_cond_jit_and_remat,
        with_vmap_over_rows,
    ],
    ids=lambda loss: loss.__name__,
)
def test_loops_prints_and_transformations_inside_the_loss_are_welcome(loss, capfd):
    equal(run(loss), expected())
    jax.effects_barrier()


def test_a_loss_may_constrain_an_array_over_tensor_where_that_axis_has_one_device_too():
    """Such a loss leaves the axis to XLA's partitioner, for which JAX annotates every operation; others do not."""

    def annotations(spec):
        """Returns how many annotations the program has; its numbers are those of one device."""

        def loss(w, mb, rng):
            hidden = (
                lax.with_sharding_constraint(mb["x"] @ jnp.diag(w), spec) if spec else mb["x"] @ jnp.diag(w)
            )
            return Sum(((hidden.sum(-1) - mb["y"]) ** 2).sum(), mb["x"].shape[0])

        program = jax.jit(lambda w, batch: get_forward_backward_func(make_mesh(data=2))(loss, w, batch, PLAN))
        equal(program(W, BATCH), expected())
        return program.lower(W, BATCH).as_text().count("sharding_constraint")

    assert annotations(None) == 0 < annotations(P(None, "tensor")) == annotations(P(None, P.UNCONSTRAINED))


def test_custom_vjp_inside_the_loss_is_obeyed():
    out = run(lambda w, mb, rng: Sum(squares(doubled_gradient(w), mb).sum(), mb["x"].shape[0]))
    loss, grads = expected()
    equal(out, (loss, 2 * grads))


# Models


def test_a_linen_model_in_a_few_lines():
    model = nn.Sequential([nn.Dense(4, param_dtype=float), jnp.tanh, nn.Dense(1, param_dtype=float)])
    variables = model.init(jax.random.key(0), X)

    def loss(v, mb, rng):
        return Sum(((model.apply(v, mb["x"])[:, 0] - mb["y"]) ** 2).sum(), len(mb["y"]))

    equal(run(loss, variables), expected(lambda v: ((model.apply(v, X)[:, 0] - Y) ** 2).mean(), variables))


def test_an_nnx_model_in_a_few_lines():
    graph, params = nnx.split(nnx.Linear(3, 1, param_dtype=float, rngs=nnx.Rngs(0)))

    def loss(p, mb, rng):
        return Sum(((nnx.merge(graph, p)(mb["x"])[:, 0] - mb["y"]) ** 2).sum(), len(mb["y"]))

    out = run(loss, params)
    assert isinstance(out.grads, nnx.State)
    equal(out, expected(lambda p: ((nnx.merge(graph, p)(X)[:, 0] - Y) ** 2).mean(), params))


@jax.tree_util.register_dataclass
@dataclass
class Affine:
    """A model that is itself a pytree, as in equinox."""

    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight + self.bias


def test_a_model_that_is_a_pytree():
    model = Affine(jnp.asarray(W), jnp.asarray(0.1))
    out = run(lambda m, mb, rng: Sum(((m(mb["x"]) - mb["y"]) ** 2).sum(), len(mb["y"])), model)
    assert isinstance(out.grads, Affine)
    equal(out, expected(lambda m: ((m(X) - Y) ** 2).mean(), model))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"w": W}, 'must be a dict with "layers"'),
        (
            {"layers": {"a": np.ones((2, 3)), "b": np.ones((3, 3))}},
            r"one num_layers, 1 or more, got \[2, 3\]",
        ),
        ({"layers": {"a": np.ones((0, 3))}}, r"one num_layers, 1 or more, got \[0\]"),
        ({"layers": {"a": np.ones(())}}, r"one num_layers, 1 or more, got \[0\]"),
    ],
)
def test_params_that_are_not_stacked_are_no_pipelined_models(params, message):
    with pytest.raises(ValueError, match=message):
        run(toy.model, params, toy.batch(rows=ROWS))


def test_a_layer_that_changes_the_shape_of_hidden_is_refused():
    model = jaxfb.Pipelined(
        lambda outer, mb, rng: mb["x"], lambda w, h, mb, rng: h[:, :2], lambda outer, h, mb, rng: Sum(h.sum())
    )
    with pytest.raises(
        ValueError,
        match=r"must return hidden with the shapes and dtypes it was given: embed gives float64\[2, 3\]",
    ):
        run(model, {"layers": np.ones((2, 3))})


def test_the_head_and_the_layers_may_not_name_one_term_twice():
    model = jaxfb.Pipelined(
        lambda outer, mb, rng: mb["x"],
        lambda w, h, mb, rng: (h * w, {"aux": Sum(h.sum(), 1.0)}),
        lambda outer, h, mb, rng: LossOutput({"aux": Sum(h.sum())}),
    )
    with pytest.raises(ValueError, match="both return a term named 'aux'"):
        run(model, {"layers": np.ones((2, 3))})


# Arguments


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(params={"w": W, "steps": np.arange(3)}),
            r"every parameter must be a float.*\['steps'\] is int64",
        ),
        (
            dict(params={"w": W, "c": np.ones(3, complex)}),
            r"\['c'\] is complex128; keep its real and imaginary parts as two float arrays",
        ),
        (
            dict(plan=BatchPlan("eval", rows=ROWS, data_parallel=2, num_microbatches=2)),
            'got plan "eval".*train',
        ),
        (dict(plan=BatchPlan(rows=ROWS, num_microbatches=2)), "data_parallel=1 replicas, the mesh has.*= 2"),
        (dict(plan={"rows": 8}), "plan must be a jaxfb.BatchPlan"),
        (dict(batch={"x": X[:6], "y": Y[:6]}), "covers 8 rows, batch has 6; add 2 rows of weight 0"),
        (
            dict(batch={"x": X, "y": Y[:4]}),
            r"must have one number of rows, but batch\['x'\] has 8 and batch\['y'\] has 4",
        ),
        (dict(batch={**BATCH, "micro_batch_size": X}), r"batch\[\"micro_batch_size\"\] is a size"),
        (dict(batch={**BATCH, "scale": 2.0}), r"batch\['scale'\] is 2.0"),
        (dict(rng=jax.random.split(jax.random.key(0), 3)), r"plan has 8 rows, rng shape is \(3,\)"),
        (dict(batch=jaxfb.Microbatches({"x": X})), r"\[microbatches, rows, ...\] = \[2, 4\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        run(loss_fn, **change)


def test_another_purpose_is_fine_forward_only_and_integer_params_too():
    plan = BatchPlan("logprob_ref", rows=ROWS, data_parallel=2, num_microbatches=4)
    loss = lambda p, mb, rng: loss_fn(p["w"], mb)  # noqa: E731
    out = run(loss, {"w": W, "steps": np.arange(3)}, plan=plan, forward_only=True)
    np.testing.assert_allclose(out.loss, expected()[0])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (dict(normalize="mean"), "normalize must be one of 'global', 'microbatch', 'none', got 'mean'"),
        (dict(remat="some"), "remat must be one of"),
        (dict(fsdp_gather="once"), "fsdp_gather must be one of 'layer', 'step'"),
        (dict(optimizer_sharding="fsdp"), "optimizer_sharding must be one of 'none', 'data'"),
        (dict(accum_dtype="int32"), "accum_dtype must be a float dtype"),
        (dict(compute_dtype="half-ish"), "compute_dtype must be a float dtype"),
        (dict(schedule="1f1b"), "belongs to a pipeline, but the mesh has pipe=1"),
        (dict(num_chunks=2), "belongs to a pipeline, but the mesh has pipe=1"),
    ],
)
def test_options_that_are_not_legal_are_refused(option, message):
    with pytest.raises(ValueError, match=message):
        get_forward_backward_func(make_mesh(), **option)


# Where arrays come from


def test_called_directly_and_inside_the_callers_jit():
    fb = get_forward_backward_func(make_mesh(data=2))
    direct = fb(loss_fn, W, BATCH, PLAN)
    jitted = jax.jit(lambda w, batch: fb(loss_fn, w, batch, PLAN))(jnp.asarray(W), BATCH)
    equal(direct, expected())
    equal(jitted, expected())


def test_params_and_batch_may_live_on_one_device_or_anywhere():
    mesh = make_mesh(data=2, fsdp=2)
    plan = BatchPlan(rows=ROWS, data_parallel=4, num_microbatches=2)
    for device in (jax.devices()[0], jax.devices()[5]):
        params, batch = jax.device_put((jnp.asarray(W), BATCH), device)
        equal(run(loss_fn, params, batch, plan, mesh), expected())
    everywhere = jax.device_put((jnp.asarray(W), BATCH), jax.sharding.NamedSharding(mesh, P()))
    equal(run(loss_fn, *everywhere, plan, mesh), expected())


def test_params_may_live_on_another_mesh_of_the_same_devices():
    plan, params = BatchPlan(rows=ROWS, data_parallel=2, num_microbatches=2), jnp.asarray(W)
    params = {"w": params, "u": jnp.ones((2, 4))}
    fb = get_forward_backward_func(
        make_mesh(data=2, tensor=2), param_specs=lambda _: {"w": P(), "u": P(None, "tensor")}
    )
    loss = lambda p, mb, rng: loss_fn(p["w"] + 0 * p["u"].sum(), mb)  # noqa: E731
    for other in (
        make_mesh(data=4),
        make_mesh(fsdp=4),
        jax.make_mesh((4,), ("x",), devices=jax.devices()[:4]),
    ):
        placed = jax.device_put(params, jax.sharding.NamedSharding(other, P()))
        out = fb(loss, placed, BATCH, plan)
        np.testing.assert_allclose(out.loss, expected()[0])
        np.testing.assert_allclose(out.grads["w"], expected()[1])


def test_one_device_is_the_default_mesh():
    plan = BatchPlan(rows=ROWS, num_microbatches=4)
    equal(get_forward_backward_func()(loss_fn, W, BATCH, plan), expected())


def test_microbatches_split_beforehand_are_taken_as_they_are():
    split = jaxfb.Microbatches(jax.tree.map(lambda leaf: leaf.reshape(2, 4, *leaf.shape[1:]), BATCH))
    equal(run(loss_fn, batch=split), expected())


@pytest.mark.parametrize(("impl", "warns"), [("threefry2x32", False), ("rbg", True), ("unsafe_rbg", True)])
def test_keys_whose_numbers_depend_on_the_cut_are_warned_of(impl, warns):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(loss_fn, rng=jax.random.key(0, impl=impl))
    assert any("dropout will depend on how the batch is cut" in str(one.message) for one in caught) == warns


class Dropped(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False)(x)


OF_ONE_KEY = {
    "jax.random": lambda x, rng: jax.random.normal(rng, x.shape),
    "a split": lambda x, rng: x * jax.random.normal(jax.random.split(rng)[0], x.shape),
    "linen": lambda x, rng: Dropped().apply({}, x, rngs={"dropout": rng}),
}


@pytest.mark.parametrize("draw", OF_ONE_KEY.values(), ids=OF_ONE_KEY)
def test_keys_of_rows_that_are_taken_for_one_key_are_refused_and_draw_row_by_row(draw):
    def loss_fn(params, microbatch, rng, draw=draw):
        return jaxfb.Sum((draw(microbatch, rng) @ params).sum(), microbatch.shape[0])

    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2)
    given = (jnp.ones(3), jnp.ones((4, 3)), plan)
    with pytest.raises(ValueError, match="rng must be taken as an array of keys, one for each row"):
        jaxfb.get_forward_backward_func(None)(loss_fn, *given, rng=1)
    by_rows = lambda params, microbatch, rng: loss_fn(params, microbatch, rng, jax.vmap(draw))  # noqa: E731
    assert np.isfinite(jaxfb.get_forward_backward_func(None)(by_rows, *given, rng=1).loss)


@pytest.mark.parametrize("spec", [P("data"), P(("data", "fsdp"), "tensor"), P("model")])
@pytest.mark.parametrize("in_stages", [False, True])
def test_a_constraint_over_an_axis_that_is_cut_already_is_refused_in_a_sentence(spec, in_stages):
    def layer(weights, hidden, microbatch, rng):
        return jax.lax.with_sharding_constraint(hidden, spec) @ weights

    def head(outer, hidden, microbatch, rng):
        return jaxfb.Sum(hidden.sum(), hidden.shape[0])

    stages = jaxfb.Pipelined(lambda outer, microbatch, rng: microbatch, layer, head)
    loss_fn = lambda params, x, rng: head(params, layer(params["layers"][0], x, x, rng), x, rng)  # noqa: E731
    mesh = jaxfb.make_mesh(pipe=2 if in_stages else 1, data=2)
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=1, data_parallel=2)
    given = (stages if in_stages else loss_fn, {"layers": jnp.ones((2, 3, 3))}, jnp.ones((4, 3)), plan)
    with pytest.raises(ValueError, match=rf"may name no axis but 'tensor', got {re.escape(str(spec)[:8])}"):
        jaxfb.get_forward_backward_func(mesh)(*given)


def test_a_teacher_from_outside_that_lies_on_the_mesh_is_refused_with_the_two_ways_to_give_it():
    mesh, plan = jaxfb.make_mesh(data=2), jaxfb.BatchPlan(rows=4, rows_per_microbatch=1, data_parallel=2)
    student, teacher = jnp.ones((5, 3)), 2 * jnp.ones((5, 3))

    def distance(params, microbatch, rng):
        apart = params["student"][microbatch] - params["teacher"][microbatch]
        return jaxfb.Sum(jnp.square(apart).sum(), microbatch.size)

    def with_teacher(teacher):
        return lambda params, *rest: distance({"student": params, "teacher": teacher}, *rest)

    fb = jaxfb.get_forward_backward_func(mesh)
    given, placed = (student, jnp.arange(4), plan), jax.device_put(teacher, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="indexes an array that it has from outside"):
        fb(with_teacher(placed), *given)
    expected = fb(with_teacher(jnp.asarray(jax.device_get(placed))), *given)
    fb = jaxfb.get_forward_backward_func(mesh, trainable=["student"])
    out = fb(distance, {"student": student, "teacher": placed}, *given[1:])
    np.testing.assert_array_equal(out.grads["student"], expected.grads)
    assert out.grads["teacher"] is None
