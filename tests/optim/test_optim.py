"""Optimizers: step by step against torch, per-layer Muon and Adafactor, the decay mask, the logged rate."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxfb.gradients import clip_by_global_norm, global_norm, names_of, nonfinite_leaves
from jaxfb.optim import decay_mask, learning_rate_of, lr_schedule, make_optimizer, weight_decay_schedule
from jaxfb.optim.muon import muon_matrices

OPTIMIZERS = ["adamw", "lion", "adafactor", "muon", "sgd"]


def mixed_params():
    """A tiny transformer's kinds of leaves, float32."""
    key = iter(jax.random.split(jax.random.key(0), 20))

    def leaf(*shape):
        return jax.random.normal(next(key), shape, jnp.float32)

    return {
        "embed": leaf(11, 4),
        "layers": {"w": leaf(3, 4, 6), "norm": leaf(3, 4), "bias": leaf(3, 6), "experts": leaf(3, 2, 4, 6)},
        "norm": leaf(4),
        "head": leaf(4, 11),
    }


def mlp_loss(params, microbatches, normalisation):
    """The objective of adamw_clip_steps.json over one global batch of microbatches."""
    sums, weights = [], []
    for batch in microbatches:
        x, y, weight = batch["x"], batch["y"], batch["weight"]
        out = jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]
        rows = jnp.sum((out - y) ** 2, axis=-1)
        sums.append(jnp.sum(jnp.where(weight > 0, weight * rows, 0)))
        weights.append(jnp.sum(weight))
    if normalisation == "weighted_mean":
        return sum(sums) / sum(weights)
    return sum(s / jnp.maximum(w, 1) for s, w in zip(sums, weights, strict=True)) / len(sums)


loss_and_grads = jax.jit(jax.value_and_grad(mlp_loss), static_argnums=2)


def optimizer_of(inputs):
    given, lr = inputs["optimizer"], inputs["lr"]
    rate = lr_schedule(
        lr["style"],
        peak=lr["max_lr"],
        initial=lr["init_lr"],
        final=lr["min_lr"],
        warmup=lr["warmup"],
        total=lr["decay"],
    )
    everywhere = dict(mask=lambda params: True) if given["decay_on"] == "all" else {}
    return make_optimizer(
        "adamw",
        learning_rate=rate,
        weight_decay=given["weight_decay"],
        b1=given["beta1"],
        b2=given["beta2"],
        eps=given["eps"],
        **everywhere,
    )


def attempt(optimizer, params, state, microbatches, normalisation, clip):
    """One update from gradients.py and optim, or none if the gradients are not finite."""
    loss, grads = loss_and_grads(params, microbatches, normalisation)
    norm = global_norm(grads)
    if not jnp.isfinite(norm):
        assert names_of(nonfinite_leaves(grads), grads)
        return params, state, dict(skipped=True)
    convention = {"torch": "torch"}.get(clip["kind"], "exact")
    clipped, coefficient = clip_by_global_norm(grads, norm, clip["max_norm"], convention)
    lr = learning_rate_of(optimizer, state)
    updates, state = optimizer.update(clipped, state, params)
    assert lr == state.learning_rate
    record = dict(
        skipped=False,
        loss=loss,
        lr=lr,
        grad_norm_pre_clip=norm,
        grad_norm_post_clip=global_norm(clipped),
        clip_coefficient=coefficient,
    )
    return optax.apply_updates(params, updates), state, record


def test_every_step_is_that_of_torch_adamw_with_clipping(golden):
    num_skipped = 0
    for case in golden("adamw_clip_steps.json")["cases"]:
        inputs, expected = case["inputs"], case["expected"]
        params = {name: jnp.asarray(value, float) for name, value in inputs["params"].items()}
        optimizer = optimizer_of(inputs)
        state = optimizer.init(params)
        for data, step in zip(inputs["data"], expected["steps"], strict=True):
            microbatches = [{k: np.asarray(v, float) for k, v in batch.items()} for batch in data]
            params, state, record = attempt(
                optimizer, params, state, microbatches, inputs["normalisation"], inputs["clip"]
            )
            num_skipped += record["skipped"]
            for name, value in record.items():
                np.testing.assert_allclose(value, step[name], rtol=1e-9, err_msg=f"{case['name']} {name}")
            np.testing.assert_allclose(global_norm(params), step["global_param_norm"], rtol=1e-9)
        assert state.count == expected["applied_updates"]
        for ours, theirs in (
            (params, "final_params"),
            (state.inner.mu, "final_first_moment"),
            (state.inner.nu, "final_second_moment"),
        ):
            for name, value in expected[theirs].items():
                np.testing.assert_allclose(ours[name], value, rtol=1e-9, atol=1e-12, err_msg=case["name"])
    assert num_skipped > 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_three_jitted_steps_lower_a_loss_and_keep_every_dtype(name):
    params = mixed_params()
    optimizer = make_optimizer(name, learning_rate=0.01, weight_decay=0.1)
    state = optimizer.init(params)

    def loss(params):
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))

    @jax.jit
    def step(params, state):
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    before, dtypes = params, [leaf.dtype for leaf in jax.tree.leaves(state)]
    for _ in range(3):
        params, state = step(params, state)
    assert loss(params) < loss(before)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: (a != b).all(), params, before)))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    assert [leaf.dtype for leaf in jax.tree.leaves(state)] == dtypes
    assert state.count == 3 and state.count.dtype == jnp.int32


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_stacked_leaf_is_updated_layer_by_layer(name):
    params = mixed_params()["layers"]
    grads = jax.tree.map(lambda x: jnp.sin(7 * x), params)
    listed = [jax.tree.map(lambda x, i=i: x[i], params) for i in range(3)]
    listed_grads = [jax.tree.map(lambda x, i=i: x[i], grads) for i in range(3)]
    optimizer = make_optimizer(name, learning_rate=0.1, weight_decay=0.1)

    def update(params, grads):
        tree = {"layers": params}
        return optimizer.update({"layers": grads}, optimizer.init(tree), tree)[0]["layers"]

    stacked, one_by_one = update(params, grads), update(listed, listed_grads)
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], stacked)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-7), layer, one_by_one[i])


def test_adafactor_factors_no_layer_with_another():
    """Of [layers, width] and [layers, few, width] the layers are one of the two largest dims."""
    key = jax.random.key(0)
    params = {"norm": jax.random.normal(key, (5, 4)), "q_norm": jax.random.normal(key, (5, 2, 4))}
    optimizer = make_optimizer("adafactor", learning_rate=0.1, min_dim_size_to_factor=2)

    def two_updates(tree):
        state = optimizer.init(tree)
        for step in (1, 2):
            grads = jax.tree.map(lambda x, step=step: jnp.sin(7 * step * x), tree)
            updates, state = optimizer.update(grads, state, tree)
        return updates

    stacked = two_updates({"layers": params})["layers"]
    for i in range(5):
        alone = two_updates(jax.tree.map(lambda x, i=i: x[i], params))
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=1e-5), stacked, alone)


def test_adafactors_averages_have_the_layers_first():
    params = {"layers": {"norm": jnp.ones((5, 4)), "w": jnp.ones((5, 2, 4))}}
    state = make_optimizer("adafactor", learning_rate=0.1, min_dim_size_to_factor=2).init(params)
    shapes = {leaf.shape for leaf in jax.tree.leaves(state)}
    assert shapes >= {(5, 4), (5, 2)} and not shapes & {(4, 5), (2, 5)}


def test_muon_orthogonalises_hidden_matrices_and_gives_the_rest_to_adamw():
    params = mixed_params()
    grads = jax.tree.map(lambda x: jnp.sin(7 * x), params)
    muon = make_optimizer("muon", learning_rate=0.1, consistent_rms=None, ns_steps=12)
    adamw = make_optimizer("adamw", learning_rate=0.1)
    ours, adams = (o.update(grads, o.init(params), params)[0] for o in (muon, adamw))
    for leaf in (ours["layers"]["w"], ours["layers"]["experts"]):
        values = jnp.linalg.svd(leaf, compute_uv=False) / 0.1 / np.sqrt(6 / 4)
        assert (jnp.abs(values - 1) < 0.35).all()
    for tree in (ours, adams):
        del tree["layers"]["w"], tree["layers"]["experts"]
    jax.tree.map(np.testing.assert_array_equal, ours, adams)


def test_muon_of_one_matrix_is_optaxs():
    params = {"w": jax.random.normal(jax.random.key(1), [4, 6])}
    ours = make_optimizer("muon", learning_rate=0.1)
    theirs = optax.contrib.muon(0.1, consistent_rms=0.2)
    a, b = (o.update(params, o.init(params), params)[0] for o in (ours, theirs))
    np.testing.assert_allclose(a["w"], b["w"], rtol=1e-12)


@pytest.mark.parametrize(
    "own", [{"decay_rate": 0.6}, {"clipping_threshold": None, "scale_by_parameter": False}], ids=str
)
def test_adafactor_without_decay_is_optaxs(own):
    params = {"w": jax.random.normal(jax.random.key(1), [13, 14]), "b": jnp.ones(7)}
    own = own | {"min_dim_size_to_factor": 8}
    ours = make_optimizer("adafactor", learning_rate=0.1, **own)
    renamed = {"scale_by_parameter": "multiply_by_parameter_scale"}
    theirs = optax.adafactor(0.1, **{renamed.get(name, name): value for name, value in own.items()})
    states = [ours.init(params), theirs.init(params)]
    for step in range(3):
        grads = jax.tree.map(lambda x, step=step: jnp.sin(x + step), params)
        (a, states[0]), (b, states[1]) = (
            optimizer.update(grads, state, params)
            for optimizer, state in zip((ours, theirs), states, strict=True)
        )
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


def test_only_matrices_decay_unless_a_mask_says_otherwise():
    params = mixed_params() | {"numbered": {"layers": [{"w": jnp.ones([2, 2]), "scale": jnp.ones([2])}]}}
    zeros = jax.tree.map(jnp.zeros_like, params)
    expected = {
        "embed": False,
        "layers": {"w": True, "norm": False, "bias": False, "experts": True},
        "norm": False,
        "head": True,
        "numbered": {"layers": [{"w": True, "scale": False}]},
    }
    assert decay_mask(params) == expected
    optimizer = make_optimizer("adamw", learning_rate=0.5, weight_decay=0.1)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    jax.tree.map(
        lambda u, p, m: np.testing.assert_allclose(u, -0.05 * p * m, rtol=1e-6), updates, params, expected
    )

    def only_norm(params):
        return {name: name == "norm" for name in params}

    optimizer = make_optimizer("sgd", learning_rate=0.5, weight_decay=0.1, mask=only_norm)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    assert (updates["norm"] != 0).all() and not any(x.any() for x in jax.tree.leaves(updates["layers"]))


NAMED = {"block_0": {"kernel": (4, 6), "bias": (6,)}, "block_1": {"kernel": (6, 4), "bias": (4,)}}


def test_layers_that_are_named_and_not_stacked_have_their_matrices():
    """As Flax names the blocks of a module that is called "layers"; arrays of one first dim would be a stack."""
    leaf = lambda shape: jnp.sin(jnp.arange(float(np.prod(shape)))).reshape(shape)  # noqa: E731
    blocks = jax.tree.map(leaf, NAMED, is_leaf=lambda node: isinstance(node, tuple))
    is_matrix = {name: {"kernel": True, "bias": False} for name in NAMED}
    assert decay_mask({"layers": blocks}) == muon_matrices({"layers": blocks}) == {"layers": is_matrix}
    adafactor = make_optimizer("adafactor", learning_rate=0.1)

    def updates(name):
        params = {name: blocks}
        return adafactor.update(params, adafactor.init(params), params)[0][name]

    chex.assert_trees_all_equal(updates("layers"), updates("blocks"))


def test_two_stacks_may_have_different_numbers_of_layers():
    stacks = {
        name: {"layers": {"w": jnp.ones((number, 3, 3)), "scale": jnp.ones((number, 3))}}
        for name, number in (("encoder", 2), ("decoder", 4))
    }
    expected = {name: {"layers": {"w": True, "scale": False}} for name in stacks}
    assert decay_mask(stacks) == muon_matrices(stacks) == expected


def test_muon_takes_the_matrices_of_each_layer_and_expert():
    """What is in a layer is not the head, whatever its name; of three dims only experts' are matrices for sure."""
    shapes = {
        "layers": {
            "w": (3, 4, 6),
            "experts": (3, 2, 4, 6),
            "head_mix": (3, 4, 4),
            "attention": (3, 2, 4, 6),
            "expert_bias": (3, 2, 6),
            "norm": (3, 4),
        },
        "projection": (4, 4),
        "embed": (11, 4),
        "head": (4, 11),
    }
    params = jax.tree.map(np.ones, shapes, is_leaf=lambda node: isinstance(node, tuple))
    found = {
        path[-1].key for path, is_matrix in jax.tree.leaves_with_path(muon_matrices(params)) if is_matrix
    }
    assert found == {"w", "experts", "head_mix", "projection"}


def test_muon_takes_attention_of_many_heads_for_no_head():
    kernel = {"kernel": jnp.ones((4, 4))}
    params = {"MultiHeadAttention_0": kernel, "multi_head": kernel, "lm_head": kernel, "Head_0": kernel}
    flags = {name: tree["kernel"] for name, tree in muon_matrices(params).items()}
    assert flags == {"MultiHeadAttention_0": True, "multi_head": True, "lm_head": False, "Head_0": False}


def test_norms_biases_and_embeddings_do_not_decay_whatever_their_shape():
    """By name, for a norm's scale may be [heads, head size] and a bias [experts, width]."""
    matrix = jnp.ones([3, 2])
    decayed = {"w": True, "RMSNorm_0": {"scale": False}, "qk_norm": False, "bias": False, "Embed_0": False}
    params = {
        "layers": jax.tree.map(lambda _: jnp.ones([4, 3, 2]), decayed),
        "outer": jax.tree.map(lambda _: matrix, decayed),
    }
    chex.assert_trees_all_equal(decay_mask(params), {"layers": decayed, "outer": decayed})


def test_rates_by_samples_follow_the_rows_consumed():
    params = {"w": jnp.ones([2, 2])}
    rate = lr_schedule("linear", peak=1.0, total=100, warmup=10, unit="samples")
    ramp = weight_decay_schedule("linear", initial=0.0, final=0.5, total=4)
    optimizer = make_optimizer("sgd", learning_rate=rate, weight_decay=ramp)
    chain = optax.chain(optax.scale(1.0), optimizer)
    zeros, state, chained = {"w": jnp.zeros([2, 2])}, optimizer.init(params), chain.init(params)
    for count, samples in enumerate([0, 5, 55]):
        assert learning_rate_of(optimizer, state, samples) == rate(samples)
        updates, state = optimizer.update(zeros, state, params, samples=samples)
        np.testing.assert_allclose(updates["w"], -rate(samples) * ramp(count) * params["w"])
        in_chain, after = chain.update(zeros, chained, params, samples=samples)
        np.testing.assert_array_equal(in_chain["w"], updates["w"])
        assert learning_rate_of(chain, chained, samples, updated=after) == rate(samples)
        chained = after
    with pytest.raises(ValueError, match="pass samples= to update"):
        optimizer.update(zeros, state, params)


def test_the_rate_of_optax_transformations_is_read_from_their_state():
    params = {"w": jnp.ones(2)}
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(1.0, 0.0, 4))
    state = injected.init(params)
    for expected in (1.0, 0.75, 0.5):
        _, after = injected.update(params, state, params)
        assert learning_rate_of(injected, state, updated=after) == expected
        state = after
    plain = optax.adam(1.0)
    assert jnp.isnan(learning_rate_of(plain, plain.init(params)))


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("adamv", {}, "unknown optimizer 'adamv'; did you mean 'adamw'?"),
        ("adamw", dict(beta1=0.9), "make_optimizer('adamw') does not take 'beta1'; did you mean 'b1'?"),
        ("sgd", dict(momentun=0.9), "did you mean 'momentum'?"),
        ("adamw", dict(learning_rate=-1), "learning_rate=-1 must be finite and not negative"),
        ("adamw", dict(weight_decay=-1), "weight_decay=-1 must be finite and not negative"),
    ],
)
def test_refused_with_the_nearest_legal_choice(name, arguments, sentence):
    with pytest.raises(ValueError) as refusal:
        make_optimizer(name, **dict(learning_rate=1.0) | arguments)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    "name, hyperparameters, sentence",
    [
        ("adamw", {"b1": "abc"}, "b1 must be a finite number of at least 0 and below 1, got 'abc'"),
        ("adamw", {"b1": None}, "b1 must be a finite number"),
        ("adamw", {"b1": 1.5}, "b1 must be a finite number of at least 0 and below 1, got 1.5"),
        ("lion", {"b2": 1}, "b2 must be a finite number of at least 0 and below 1, got 1"),
        ("adamw", {"eps": float("nan")}, "eps must be a finite number of at least 0, got nan"),
        (
            "adamw",
            {"mu_dtype": "abc"},
            "mu_dtype must be a floating dtype such as 'bfloat16', or None, got 'abc'",
        ),
        ("adamw", {"mu_dtype": "int32"}, "mu_dtype must be a floating dtype"),
        ("sgd", {"nesterov": "yes"}, "nesterov must be True or False, got 'yes'"),
        ("muon", {"ns_steps": 0}, "ns_steps must be a positive integer, got 0"),
        ("adafactor", {"clipping_threshold": 0}, "clipping_threshold must be a finite number above 0, got 0"),
    ],
)
def test_impossible_hyperparameters_are_refused_by_name(name, hyperparameters, sentence):
    with pytest.raises(ValueError, match=rf"make_optimizer\('{name}'\): {sentence}"):
        make_optimizer(name, learning_rate=0.1, **hyperparameters)


@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor"])
def test_an_eps_that_float16_does_not_have_is_warned_of_and_the_advice_trains(name):
    """Every update is skipped, as not finite, in which one gradient is exactly 0."""
    params = {"w": jnp.ones((2, 2), jnp.float16), "x": jnp.ones(2, jnp.float32)}
    with pytest.warns(UserWarning, match=r"is 0 in float16, the dtype of params\['w'\].*use eps=0.0001, or"):
        make_optimizer(name, learning_rate=0.1).init(params)
    made = make_optimizer(name, learning_rate=0.1, eps=1e-4)
    grads = jax.tree.map(jnp.zeros_like, params)
    updates, _ = made.update(grads, made.init(params), params)
    assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves(updates))
    make_optimizer(name, learning_rate=0.1).init(jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params))


def test_every_default_is_a_legal_hyperparameter():
    from inspect import signature

    from jaxfb.optim.hyperparameters import LEGAL
    from jaxfb.parts import OPTIMIZERS

    for name, builder in OPTIMIZERS.items():
        defaults = {k: p.default for k, p in signature(builder).parameters.items() if k in LEGAL}
        make_optimizer(name, learning_rate=0.1, **defaults)
        assert defaults


def test_rates_and_hyperparameters_can_be_injected():
    """`optax.inject_hyperparams` calls make_optimizer while it traces, with numbers that are not known yet."""
    params = {"w": jnp.ones((2, 2))}

    def made(learning_rate, b1):
        return make_optimizer("adamw", learning_rate=learning_rate, b1=b1)

    injected = optax.inject_hyperparams(made)(learning_rate=optax.linear_schedule(0.1, 0.0, 10), b1=0.5)
    plain = make_optimizer("adamw", learning_rate=optax.linear_schedule(0.1, 0.0, 10), b1=0.5)
    states = [injected.init(params), plain.init(params)]
    for _ in range(3):
        updates = []
        for which, optimizer in enumerate((injected, plain)):
            update, states[which] = jax.jit(optimizer.update)(params, states[which], params)
            updates.append(update["w"])
        np.testing.assert_allclose(*updates, rtol=1e-6)


@pytest.mark.parametrize("further", [{}, {"b2": 0.9}])
def test_an_injected_make_optimizer_names_the_function_to_inject(further):
    injected = optax.inject_hyperparams(make_optimizer)("adamw", learning_rate=0.1, **further)
    written = "optax.inject_hyperparams(lambda rate: make_optimizer('adamw', learning_rate=rate))(rate=...)"
    with pytest.raises(ValueError, match="takes each hyperparameter by its name") as refused:
        injected.init({"w": jnp.ones((2, 2))})
    assert str(refused.value).endswith(f"hyperparameters={further}; to inject rates, write {written}")
    advised = eval(written.replace("...", "0.1"), {"optax": optax, "make_optimizer": make_optimizer})
    assert advised.init({"w": jnp.ones((2, 2))}).hyperparams == {"rate": 0.1}


@pytest.mark.parametrize(
    "name", ["optax.contrib:prodigy", "optax.contrib:schedule_free_adamw", "optax:polyak_sgd"]
)
def test_a_whole_optimizer_in_place_of_directions_is_refused(name):
    """Its minus and that of the step together would climb; seen when a state is made, since it takes a device."""
    params = {"w": jnp.ones((2, 3))}
    optimizer = make_optimizer(name, learning_rate=0.1)
    for init in (optimizer.init, jax.jit(optimizer.init)):
        with pytest.raises(
            ValueError, match="must give directions, .* name one of optax's scale_by_ functions"
        ):
            init(params)
    jax.jit(make_optimizer("optax:scale_by_adam", learning_rate=0.1).init)(params)


def test_an_argument_without_a_default_is_asked_for():
    with pytest.raises(ValueError, match="needs 'learning_rate', which has no default; give it in options"):
        make_optimizer("optax:adabelief", learning_rate=0.1)
