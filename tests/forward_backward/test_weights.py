"""What a weight may depend on, what a term without one may be, and rows that must not count."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxfb import BatchPlan, Last, LossOutput, Min, Pipelined, Sum, get_forward_backward_func, make_mesh
from jaxfb.forward_backward import Packed

ROWS = 8
X = np.random.default_rng(0).normal(size=(ROWS, 3))
BATCH = {"x": X, "y": X[:, 0], "mask": np.array([1.0, 0, 1, 1, 0, 1, 1, 1])}
W = np.array([0.5, -1.0, 2.0])


def squares(w, microbatch):
    return (microbatch["x"] @ w - microbatch["y"]) ** 2


def masked(w, microbatch):
    return jnp.where(microbatch["mask"] > 0, squares(w, microbatch), 0).sum(), microbatch["mask"].sum()


def expected(params=W):
    return jax.value_and_grad(lambda w: Sum(*masked(w, BATCH)).value)(params)


def run(loss, params=W, mesh=None, batch=BATCH, normalize="global", plan=None, **call):
    mesh = make_mesh(data=2) if mesh is None else mesh
    plan = BatchPlan(rows=ROWS, data_parallel=2, num_microbatches=2) if plan is None else plan
    return get_forward_backward_func(mesh, normalize=normalize)(loss, params, batch, plan, **call)


# Total and weight out of one operation: the weight does not depend on the parameters


@jax.custom_vjp
def with_own_backward(w, microbatch):
    return masked(w, microbatch)


def own_backward(residuals, cotangents):
    w, microbatch = residuals
    return jax.vjp(lambda w: masked(w, microbatch)[0], w)[1](cotangents[0])[0], None


with_own_backward.defvjp(lambda w, mb: (masked(w, mb), (w, mb)), own_backward)
with_own_derivative = jax.custom_jvp(masked)
with_own_derivative.defjvp(lambda primals, tangents: jax.jvp(masked, primals, tangents))


def by_row(w, microbatch):
    """Both sums are carried through one loop."""

    def step(sums, row):
        total, weight = with_own_derivative(w, jax.tree.map(lambda leaf: leaf[None], row))
        return (sums[0] + total, sums[1] + weight), None

    return lax.scan(step, (0.0, 0.0), microbatch)[0]


def while_counting(w, microbatch):
    """A loop whose totals depend on the parameters and whose number of turns does not."""
    count = lambda mask: lax.while_loop(  # noqa: E731
        lambda c: c[0] < mask.size, lambda c: (c[0] + 1, c[1] + mask[c[0]], c[2] * w[0]), (0, 0.0, 1.0)
    )
    _, weight, product = count(microbatch["mask"])
    return masked(w, microbatch)[0] + 0 * lax.stop_gradient(product), weight


def in_a_branch(w, microbatch):
    return lax.cond(microbatch["y"][0] > 99, lambda: (0.0, 0.0), lambda: with_own_backward(w, microbatch))


def in_calls(w, microbatch):
    return jax.checkpoint(jax.jit(with_own_backward))(w, microbatch)


@pytest.mark.parametrize(
    "sums",
    [with_own_backward, with_own_derivative, by_row, while_counting, in_a_branch, in_calls],
    ids=["custom_vjp", "custom_jvp", "scan", "while_loop", "cond", "calls"],
)
def test_a_weight_is_followed_through_what_makes_it_and_the_total(sums):
    out, (loss, grads) = run(lambda w, mb, rng: Sum(*sums(w, mb))), expected()
    np.testing.assert_allclose(out.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(out.grads, grads, rtol=1e-12)


def test_a_weight_is_followed_through_a_pipeline():
    def head(outer, hidden, microbatch, rng):
        return Sum(*with_own_backward(outer["w"], {**microbatch, "x": hidden}))

    def layer(weights, hidden, microbatch, rng):
        return hidden * weights

    params = {"layers": np.ones((2, 3)), "w": W}
    plan = BatchPlan(rows=ROWS, num_microbatches=2)
    model = Pipelined(lambda outer, mb, rng: mb["x"], layer, head)
    out = run(model, params, make_mesh(pipe=2), plan=plan)
    np.testing.assert_allclose(out.grads["w"], expected()[1], rtol=1e-12)


GUILTY = {
    "turns of a loop": lambda w, mb: lax.while_loop(lambda c: c < w[2], lambda c: c + 1.0, 0.0),
    "a branch": lambda w, mb: lax.cond(w[0] > 0, lambda: mb["mask"].sum(), lambda: 1.0),
    "a carry": lambda w, mb: lax.scan(lambda c, m: (c * w[0] + m, None), 0.0, mb["mask"])[0],
    "a custom_vjp": lambda w, mb: with_own_backward(w, mb)[0],
}


@pytest.mark.parametrize("weight", GUILTY.values(), ids=GUILTY)
def test_a_weight_that_does_depend_on_the_parameters_is_refused(weight):
    with pytest.raises(
        ValueError, match="weight of term 'loss' must depend on the data alone, but .* on params"
    ):
        run(lambda w, mb, rng: Sum(masked(w, mb)[0], weight(w, mb)))


# Terms without a weight, and weights that are constant or negative


@pytest.mark.parametrize("mesh, count", [({}, 1), ({}, 4), ({"data": 2}, 2), ({"data": 4}, 1)], ids=str)
def test_a_sum_without_a_weight_is_the_same_of_any_split(mesh, count):
    plan = BatchPlan(rows=ROWS, data_parallel=mesh.get("data", 1), num_microbatches=count)
    out = run(lambda w, mb, rng: Sum(squares(w, mb).sum()), mesh=make_mesh(**mesh), plan=plan)
    loss, grads = jax.value_and_grad(lambda w: squares(w, BATCH).sum())(W)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(out.grads, grads, rtol=1e-12)


def test_a_penalty_on_the_parameters_is_counted_once():
    """With a constant weight; without one it would be counted in every microbatch, and is refused."""

    def penalized(weight):
        return lambda w, mb, rng: LossOutput(
            {"fit": Sum(*masked(w, mb)), "penalty": Sum((w**2).sum(), weight)}
        )

    loss, grads = jax.value_and_grad(lambda w: Sum(*masked(w, BATCH)).value + (w**2).sum())(W)
    for normalize in ("global", "microbatch"):
        out = run(penalized(1.0), normalize=normalize)
        np.testing.assert_allclose(out.terms["penalty"].value, (W**2).sum(), rtol=1e-13)
    np.testing.assert_allclose(run(penalized(1.0)).loss, loss, rtol=1e-13)
    np.testing.assert_allclose(run(penalized(1.0)).grads, grads, rtol=1e-12)
    with pytest.raises(
        ValueError, match=r"term 'penalty' has no weight .* each of the 4 .*Sum\(total, 1.0\)"
    ):
        run(penalized(None))
    whole = BatchPlan(rows=ROWS, num_microbatches=1)
    np.testing.assert_allclose(run(penalized(None), mesh=make_mesh(), plan=whole).loss, loss, rtol=1e-13)


def test_sums_with_and_without_weights_are_not_added():
    assert (Sum(1.0) + Sum(2.0)).weight is None
    with pytest.raises(ValueError, match="both have a weight or neither"):
        Sum(1.0) + Sum(2.0, 3.0)


@pytest.mark.parametrize("normalize", ["global", "microbatch"])
def test_a_negative_weight_divides_like_any_other(normalize):
    """Importance weights may be negative; only a weight of zero divides by nothing."""
    batch = BATCH | {"mask": np.array([-1.0, -2, 3, 1, -4, -1, 0, 0])}
    weighted = lambda w, mb: ((squares(w, mb) * mb["mask"]).sum(), mb["mask"].sum())  # noqa: E731
    out = run(lambda w, mb, rng: Sum(*weighted(w, mb)), batch=batch, normalize=normalize)

    def whole(w):
        parts = 1 if normalize == "global" else 4
        cut = jax.tree.map(lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:]), batch)
        return jax.vmap(lambda part: Sum(*weighted(w, part)).value)(cut).mean()

    loss, grads = jax.value_and_grad(whole)(jnp.asarray(W))
    np.testing.assert_allclose(out.loss, loss, rtol=1e-13)
    np.testing.assert_allclose(out.grads, grads, rtol=1e-12)


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
@pytest.mark.parametrize("pipe", [1, 2])
def test_gradients_are_scaled_and_the_loss_is_not(normalize, pipe):
    model = Pipelined(
        lambda outer, mb, rng: mb["x"],
        lambda weights, hidden, mb, rng: hidden * weights,
        lambda outer, hidden, mb, rng: Sum(*masked(outer["w"], {**mb, "x": hidden})),
    )
    params, plan = {"layers": np.ones((2, 3)), "w": W}, BatchPlan(rows=ROWS, num_microbatches=2)
    one, scaled = (
        run(model, params, make_mesh(pipe=pipe), plan=plan, normalize=normalize, grad_scale=scale)
        for scale in (1.0, 1024.0)
    )
    assert one.loss == scaled.loss and np.any(one.grads["w"])
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(1024 * a, b), one.grads, scaled.grads)


# Rows that fill up a microbatch

PADDED = BatchPlan(rows=7, rows_per_microbatch=2, remainder="pad")
SEVEN = jax.tree.map(lambda leaf: leaf[:7], BATCH)
COUNTING = {
    "rows by shape": (lambda w, mb, rng: Sum(squares(w, mb).sum(), len(mb["y"])), "weight is 2"),
    "an id other than 0": (
        lambda w, mb, rng: Sum(squares(w, mb).sum(), (mb["y"] != -1).sum()),
        "weight is 2",
    ),
    "a total beside a masked weight": (
        lambda w, mb, rng: Sum((squares(w, mb) + w[0]).sum(), masked(w, mb)[1]),
        "total is",
    ),
    "a sum without a weight": (lambda w, mb, rng: Sum((squares(w, mb) + w[0]).sum()), "total is"),
}


@pytest.mark.parametrize("loss, words", COUNTING.values(), ids=COUNTING)
@pytest.mark.parametrize("jitted", [False, True])
def test_a_loss_that_counts_rows_of_padding_is_refused(loss, words, jitted):
    def call(w, batch):
        return run(loss, w, make_mesh(), batch, plan=PADDED).loss

    with pytest.raises(
        ValueError, match=f"rows of zeros, and term 'loss' counts them: its {words}.*remainder="
    ):
        (jax.jit(call) if jitted else call)(W, SEVEN)


def test_losses_that_read_a_mask_are_those_of_the_real_rows():
    terms = lambda w, mb, rng: LossOutput(  # noqa: E731
        {"mean": Sum(*masked(w, mb)), "sum": Sum(masked(w, mb)[0]), "penalty": Sum((w**2).sum(), 1.0)}
    )
    out = run(terms, W, make_mesh(), SEVEN, plan=PADDED, rng=3)
    mean, total = Sum(*masked(W, SEVEN)).value, masked(W, SEVEN)[0]
    np.testing.assert_allclose(out.loss, mean + total + (W**2).sum(), rtol=1e-13)


def test_metrics_that_count_rows_of_padding_are_named_in_a_warning():
    def loss(w, mb, rng):
        x, mask = mb["x"], mb["mask"] > 0
        metrics = {
            "mean": Sum(x.sum(), x.size),
            "least": Min(squares(w, mb).min()),
            "newest": Last(x[-1, 0]),
            "scale": Last(w[0]),
            "rows": Sum(mask.sum()),
            "least_masked": Min(jnp.where(mask, squares(w, mb), jnp.inf).min()),
        }
        return LossOutput({"loss": Sum(*masked(w, mb))}, metrics)

    with pytest.warns(UserWarning, match="rows of zeros, and least, mean, newest of the metrics count them"):
        run(loss, W, make_mesh(), SEVEN, plan=PADDED)


@pytest.mark.parametrize("packing", [False, True])
def test_a_count_by_shape_is_refused_under_a_token_budget(packing):
    batch = {
        "x": X,
        "segments": (np.arange(3) < np.array([1, 2, 3, 1, 1, 2, 3, 1])[:, None]).astype(np.int32),
    }
    plan = BatchPlan(rows=ROWS, max_tokens_per_microbatch=9, sequence_length=3, packing=packing)
    right = lambda w, mb, rng: Sum((mb["x"] * w[0] * (mb["segments"] > 0)).sum(), (mb["segments"] > 0).sum())  # noqa: E731
    out = run(right, mesh=make_mesh(), batch=batch, plan=plan)
    np.testing.assert_allclose(
        out.loss, (X * W[0] * batch["segments"]).sum() / batch["segments"].sum(), rtol=1e-12
    )
    wrong = lambda w, mb, rng: Sum((mb["x"] * w[0] * (mb["segments"] > 0)).sum(), mb["x"].shape[0])  # noqa: E731
    with pytest.raises(ValueError, match="rows of zeros, and term 'loss' counts them"):
        run(wrong, mesh=make_mesh(), batch=batch, plan=plan)


def test_what_is_collected_of_padding_is_not_restored():
    """Outputs at places where no token stood are zeros, in the length of the rows, whatever was computed there."""
    lengths = np.array([2, 0, 4, 1, 3])
    batch = {"segments": (np.arange(6) < lengths[:, None]).astype(np.int32), "x": np.ones((5, 6))}
    for packing in (False, True):
        plan = BatchPlan(
            rows=5, max_tokens_per_microbatch=8, sequence_length=6, widths=(4, 6), packing=packing
        )
        packed = Packed(batch, plan)
        computed = np.full((len(packed.batch["x"]), 4), 7.0)
        np.testing.assert_array_equal(packed.restore({"o": computed})["o"], 7.0 * batch["segments"])
        segments = packed.batch["segments"]
        assert (packed.batch["x"] == (segments > 0)).all(), "padding of an array row is zeros"


def test_gradients_that_only_rows_of_zeros_spoil_get_a_warning():
    """jnp.where hides the value of a norm of zeros, but not its derivative."""
    batch = {"x": 1 + X[:3] ** 2, "mask": np.ones(3)}
    plan = BatchPlan(rows=3, rows_per_microbatch=2, remainder="pad")

    def tried(of_row, **how):
        def loss(params, microbatch, keys):
            mask = microbatch["mask"]
            return Sum(jnp.where(mask > 0, of_row(params, microbatch["x"], mask), 0).sum(), mask.sum())

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = get_forward_backward_func()(loss, {"w": -jnp.ones(3)}, batch, plan, **how)
        finite = out.grads is not None and bool(jnp.isfinite(out.grads["w"]).all())
        return finite, [str(one.message) for one in caught]

    finite, said = tried(lambda params, x, mask: jnp.linalg.norm(x * params["w"], axis=1))
    assert not finite and len(said) == 1 and "gradient of loss is NaN or infinite" in said[0]
    assert not tried(lambda params, x, mask: jnp.linalg.norm(x * params["w"], axis=1), forward_only=True)[1]
    finite, said = tried(lambda params, x, mask: x @ jnp.sqrt(params["w"]))
    assert not finite and not said  # of other rows too
    finite, said = tried(
        lambda params, x, mask: jnp.linalg.norm(jnp.where(mask[:, None] > 0, x, 1) * params["w"], axis=1)
    )
    assert finite and not said
    finite, said = tried(lambda params, x, mask: (x @ params["w"]) ** 2 / jnp.where(mask > 0, x.sum(1), 1))
    assert finite and not said
