"""Train steps, optimizers, schedules and loss scales with one wrong argument: refused in a sentence that names it."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from legal import (
    boolean,
    either,
    float_dtypes,
    functions,
    integers,
    maybe,
    nothing,
    numbers,
    one_of,
    positive_int,
)
from wrong import Call, pool

import jaxfb
from jaxfb import BatchPlan, Sum, TrainState, lr_schedule, make_mesh, make_optimizer, make_train_step
from jaxfb.gradients import clip_by_global_norm
from jaxfb.optim import DynamicLossScale, StaticLossScale, weight_decay_schedule
from jaxfb.parts import OPTIMIZERS

ROWS = 4
PLAN = BatchPlan(rows=ROWS, num_microbatches=2)
PARAMS = {"w": np.ones(3, np.float32)}
BATCH = {"x": np.ones((ROWS, 3), np.float32)}
FLOAT32 = float(np.finfo(np.float32).max)

fraction = numbers(least=0, below=1)
positive = numbers(above=0)
not_negative = numbers(least=0)
one_number = either(not_negative, functions)
dtypes = maybe(float_dtypes)


def loss(params, microbatch, rng):
    return Sum(((microbatch["x"] @ params["w"]) ** 2).sum(), float(microbatch["x"].shape[0]))


def float_array(value):
    """An array is a tree of one leaf."""
    is_array = isinstance(value, np.ndarray | np.generic | jax.Array)
    return is_array and jnp.issubdtype(value.dtype, jnp.floating)


def step_arguments():
    return dict(model=loss, optimizer=optax.sgd(0.1), mesh=None, plan=PLAN)


def of_optimizer(name, rules):
    """make_optimizer(name, ...), whose state is made and updated, so that nothing is put off."""

    def use(optimizer):
        grads = {"w": np.ones((2, 2), np.float32)}
        jax.eval_shape(optimizer.update, grads, optimizer.init(grads), grads)

    return Call(
        f"make_optimizer {name}",
        make_optimizer,
        lambda: dict(name=name, learning_rate=0.1),
        rules,
        {"name": "optimizer"},
        use,
    )


def of_schedule(name, legal, rules):
    return Call(
        f"lr_schedule {name}",
        lr_schedule,
        lambda: dict(name=name, peak=1.0, total=10, **legal),
        rules,
        {"name": "schedule", "tail": "tail", "warmup_shape": "warmup shape"},
        lambda schedule: float(schedule(3)),
    )


SHAPES = one_of(("linear", "cosine", "exponential", "minus_sqrt"))
RATES = {
    "name": one_of(("constant", "linear", "cosine", "cosine_restarts", "polynomial", "inverse_sqrt")),
    "peak": not_negative,
    "total": numbers(above=0),
    "warmup": numbers(least=0, below=10),
    "initial": numbers(least=0, most=1),
    "final": numbers(least=0, most=1),
    "warmup_shape": SHAPES,
    "unit": one_of(("updates", "samples")),
}

CALLS = [
    Call(
        "make_train_step",
        make_train_step,
        step_arguments,
        {
            "model": functions,
            "optimizer": nothing,
            "mesh": maybe(nothing),
            "plan": nothing,
            "max_grad_norm": maybe(numbers(above=0, most=FLOAT32)),
            "clip_convention": one_of(("exact", "torch")),
            "layer_order": one_of((None, "model", "pipeline")),
            "loss_scale": maybe(nothing),
            "dropout": boolean,
            "count_zeros": boolean,
            "check_program": maybe(functions),
            "normalize": one_of(("global", "microbatch", "none")),
            "compute_dtype": dtypes,
        },
        {"model": "model|loss function"},
    ),
    Call(
        "TrainState.create",
        TrainState.create,
        lambda: dict(params=PARAMS, optimizer=optax.sgd(0.1)),
        {
            "params": float_array,
            "optimizer": nothing,
            "rng": integers(-(2**63), 2**63 - 1),
            "loss_scale": maybe(nothing),
        },
    ),
    Call(
        "clip_by_global_norm",
        clip_by_global_norm,
        lambda: dict(grads=PARAMS, norm=jnp.float32(1), max_norm=1.0),
        {"max_norm": maybe(numbers(above=0, most=FLOAT32)), "convention": one_of(("exact", "torch"))},
    ),
    of_optimizer(
        "adamw",
        {
            "name": one_of(("adamw", "lion", "adafactor", "muon", "sgd")),
            "learning_rate": one_number,
            "weight_decay": one_number,
            "mask": lambda value: value is None or functions(value),
            "b1": fraction,
            "b2": fraction,
            "eps": not_negative,
            "mu_dtype": dtypes,
        },
    ),
    of_optimizer("lion", {"b1": fraction, "b2": fraction, "mu_dtype": dtypes}),
    of_optimizer("sgd", {"momentum": fraction, "nesterov": boolean}),
    of_optimizer(
        "adafactor",
        {
            "decay_rate": numbers(above=0, most=1),
            "clipping_threshold": maybe(positive),
            "scale_by_parameter": boolean,
            "min_dim_size_to_factor": positive_int,
            "eps": not_negative,
        },
    ),
    of_optimizer(
        "muon",
        {
            "momentum": fraction,
            "nesterov": boolean,
            "ns_steps": positive_int,
            "consistent_rms": maybe(positive),
            "b1": fraction,
            "b2": fraction,
            "eps": not_negative,
            "matrices": functions,
        },
    ),
    of_schedule("linear", {}, RATES),
    of_schedule("polynomial", {}, {"power": positive}),
    of_schedule("cosine", {}, {"cycles": positive, "clamp": boolean}),
    of_schedule("cosine_restarts", {}, {"cycles": numbers(least=1)}),
    of_schedule("inverse_sqrt", {}, {"timescale": maybe(positive)}),
    of_schedule("wsd", {"decay": 3}, {"decay": numbers(above=0, most=10), "tail": SHAPES}),
    Call(
        "weight_decay_schedule",
        weight_decay_schedule,
        lambda: dict(name="linear", initial=0.0, final=1.0, total=10),
        {
            "name": one_of(("linear", "cosine")),
            "initial": numbers(least=0, most=1),
            "final": not_negative,
            "total": positive,
            "unit": one_of(("updates", "samples")),
        },
        {"name": "ramp"},
        lambda schedule: float(schedule(3)),
    ),
    Call(
        "StaticLossScale", StaticLossScale, lambda: dict(scale=2.0), {"scale": numbers(above=0, most=FLOAT32)}
    ),
    Call(
        "DynamicLossScale",
        DynamicLossScale,
        lambda: dict(initial=8.0),
        {
            "initial": numbers(least=1, most=FLOAT32),
            "minimum": numbers(above=0, most=8),
            "growth_interval": positive_int,
            "hysteresis": positive_int,
            "growth": numbers(above=1),
            "backoff": numbers(above=0, below=1),
        },
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    call()
    assert not call.failures(pool(seed=5))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()


@pytest.fixture(scope="module")
def step():
    return make_train_step(**step_arguments())


def test_what_a_state_is_made_of_is_refused_by_name(step):
    seeds = integers(-(2**63), 2**63 - 1)
    call = Call("init", step.init, lambda: dict(params=PARAMS), {"params": float_array, "rng": seeds})
    wrong = [make for make in pool(seed=7) if not callable(make()) or isinstance(make(), type)]
    assert not call.failures(wrong)


def test_what_an_update_is_given_is_refused_by_name(step):
    state = step.init(PARAMS)
    legal = lambda: dict(state=jax.tree.map(jnp.copy, state), batch=BATCH)  # noqa: E731
    call = Call("step", step, legal, {"state": nothing, "rows": either(maybe(nothing), integers(most=ROWS))})
    call()
    assert not call.failures(pool(seed=9))


@pytest.mark.parametrize("rows", [99, -3, 0, float("nan"), ROWS + 1, 2.0, True])
def test_a_number_of_rows_that_the_batch_has_not_is_refused(step, rows):
    with pytest.raises(ValueError, match="rows must be a positive integer"):
        step(step.init(PARAMS), BATCH, rows=rows)


def test_rows_of_the_plan_are_accepted_as_any_integer(step):
    for rows in (1, ROWS, np.int64(2), jnp.int32(3)):
        state, _ = step(step.init(PARAMS), BATCH, rows=rows)
        assert int(state.samples) == int(rows)


@pytest.mark.parametrize("sizes", [{}, {"data": 2}], ids=str)
def test_a_state_that_a_step_has_overwritten_is_refused(sizes):
    mesh = make_mesh(**sizes)
    plan = BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=mesh.shape["data"])
    step = make_train_step(loss, optax.adam(0.1), mesh, plan)
    state = step.init(PARAMS)
    step(state, BATCH)
    for use in (lambda: step(state, BATCH), lambda: step.place(state)):
        with pytest.raises(ValueError, match=r"state.* is deleted: a step overwrites the state.*jnp.copy"):
            use()


FOR_FOUR = jaxfb.schedules.make("1f1b", 2, 4)
FORWARD = jaxfb.schedules.make("1f1b", 2, 2).forward_only()


def plan_of(data_parallel=1, num_microbatches=2, **options):
    return BatchPlan(rows=8, num_microbatches=num_microbatches, data_parallel=data_parallel, **options)


def pipelined():
    embed = lambda outer, microbatch, rng: microbatch["x"]  # noqa: E731
    layer = lambda weights, hidden, microbatch, rng: hidden  # noqa: E731
    head = lambda outer, hidden, microbatch, rng: Sum(hidden.sum(), 1.0)  # noqa: E731
    return jaxfb.Pipelined(embed, layer, head)


@pytest.mark.parametrize(
    ("model", "mesh", "plan", "options", "message"),
    [
        (loss, {"data": 2}, plan_of(), {}, "data_parallel=1 replicas, the mesh has .* = 2"),
        (loss, {"fsdp": 2}, plan_of(4), {}, "data_parallel=4 replicas, the mesh has .* = 2"),
        (loss, {}, BatchPlan("eval", rows=8, num_microbatches=2), {}, 'plan "eval"'),
        (loss, {"pipe": 2}, plan_of(), {}, "needs a model cut for stages"),
        (pipelined(), {"pipe": 2}, plan_of(), {"schedule": FOR_FOUR}, "is for pipe=2 and 4 microbatches"),
        (pipelined(), {"pipe": 2}, plan_of(), {"schedule": FORWARD}, "has no backward"),
        (pipelined(), {"pipe": 2}, plan_of(), {"schedule": "no such"}, "schedule"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_when_the_step_is_made(model, mesh, plan, options, message):
    with pytest.raises(ValueError, match=message):
        make_train_step(model, optax.sgd(0.1), make_mesh(**mesh), plan, **options)


@pytest.mark.parametrize(
    ("rate", "message"),
    [
        (lambda count: None, "learning_rate must be a function from a count"),
        (lambda count: jnp.ones(2), "learning_rate must give one number for a count"),
        (lambda count, more: 1.0, "learning_rate must be a function from a count"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused(rate, message):
    with pytest.raises(ValueError, match=message):
        make_optimizer(learning_rate=rate)


@pytest.mark.parametrize(
    "mask", [lambda params: {"other": True}, lambda params: {"w": 1.0}, lambda params: None]
)
def test_a_mask_that_is_not_like_the_parameters_is_refused(mask):
    optimizer = make_optimizer(learning_rate=0.1, weight_decay=0.1, mask=mask)
    with pytest.raises(ValueError, match=r"make_optimizer\('adamw'\): mask must give"):
        optimizer.init(PARAMS)


@pytest.mark.parametrize(
    "params",
    [{"w": 1.0}, {"w": "text"}, {"w": np.ones(2, np.int32)}, {}, {"w": jax.ShapeDtypeStruct((2,), float)}]
    + [{"w": np.ones(2, dtype)} for dtype in (">f4", np.longdouble)]
    + [{"w": np.ma.ones(2)}],
)
def test_leaves_that_are_no_float_arrays_are_refused(step, params):
    with pytest.raises(ValueError, match="params"):
        step.init(params)


@pytest.mark.parametrize(
    "params", [PARAMS, dict, lambda: PARAMS, None], ids=["tree", "class", "no key", "None"]
)
def test_shapes_of_a_state_are_asked_for_with_a_function_of_a_key(step, params):
    with pytest.raises(ValueError, match="^params must "):
        step.abstract_state(params)


@pytest.mark.parametrize("call", ["lower", "trace"])
def test_a_program_is_asked_for_with_a_state(step, call):
    with pytest.raises(
        ValueError, match="^state must be a jaxfb.TrainState, such as init.params. returns, got"
    ):
        getattr(step, call)(PARAMS, BATCH)


def test_a_state_of_another_step_is_refused(step):
    of_adam = make_train_step(loss, optax.adam(0.1), None, PLAN).init(PARAMS)
    with pytest.raises(ValueError, match="state.opt_state is not of this step's optimizer"):
        step(of_adam, BATCH)
    wider = jax.tree.map(lambda leaf: jnp.zeros([2, *leaf.shape], leaf.dtype), PARAMS)
    by_adam = make_train_step(loss, optax.adam(0.1), None, PLAN)
    with pytest.raises(ValueError, match=r"state.opt_state.* has shape .* this step's optimizer keeps"):
        by_adam(replace(by_adam.init(PARAMS), params=wider), BATCH)
    scaled = make_train_step(loss, optax.sgd(0.1), None, PLAN, loss_scale=StaticLossScale(2.0)).init(PARAMS)
    with pytest.raises(
        ValueError, match="state.loss_scale is present, but this step was made with loss_scale=None"
    ):
        step(scaled, BATCH)


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self.array, self.shape, self.dtype = array, array.shape, array.dtype

    def __array__(self, dtype=None, copy=None):
        return self.array


@pytest.mark.parametrize(
    "call", [lambda step, *given: step(*given), lambda step, *given: step.gradients(*given)]
)
@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.array(["a"] * ROWS), r"batch\['more'\] has dtype <U1"),
        (["a"] * ROWS, r"batch\['more'\]\[0\] is 'a'"),
        (np.zeros(ROWS, [("a", float)]), r"batch\['more'\] has dtype \[\('a', '<f8'\)\]"),
        (np.ma.ones(ROWS), r"batch\['more'\] is a MaskedArray"),
        (Foreign(np.ones(ROWS)), r"batch\['more'\] is a .*Foreign; convert it with np.asarray"),
        (0.5, r"batch\['more'\] is 0.5"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_leaf_of_a_batch_that_is_no_array_of_numbers_is_refused(step, call, leaf, message):
    with pytest.raises(ValueError, match=message):
        call(step, step.init(PARAMS), {**BATCH, "more": leaf})


def test_arrays_that_a_function_of_the_caller_overwrote_are_refused(step):
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(ValueError, match=r"params\['w'\] is deleted: a compiled function overwrote it"):
        step.init({"w": gone})
    with pytest.raises(ValueError, match=r"batch\['x'\] is deleted: a compiled function overwrote it"):
        step(step.init(PARAMS), {"x": gone})


def test_a_batch_of_an_array_that_the_step_overwrites_is_refused():
    step = make_train_step(
        lambda params, microbatch, rng: Sum(microbatch.sum() * params.sum()), optax.sgd(0.1), None, PLAN
    )
    state = step.init(jnp.ones((ROWS, 3)), donate=True)
    with pytest.raises(ValueError, match="batch is the same array as state.params, which a step overwrites"):
        step(state, state.params)
    assert int(step(state, jnp.copy(state.params))[0].step) == 1


def test_parameters_of_eight_bits_are_refused_unless_they_are_frozen(step):
    narrow = {"w": jnp.ones(3), "table": jnp.ones(3, jnp.float8_e4m3fn)}
    with pytest.raises(ValueError, match=r"at least 16 bits, params\['table'\] is float8_e4m3fn"):
        step.init(narrow)
    frozen = make_train_step(**step_arguments(), trainable=["w"])
    assert int(frozen(frozen.init(narrow), BATCH)[0].step) == 1


def of_results(change, kept=()):
    """An optimizer whose updates are changed gradients, and whose state is `kept`."""
    update = lambda grads, state, params=None: (jax.tree.map(change, grads), state)  # noqa: E731
    return optax.GradientTransformation(lambda params: kept, update)


WRONG_OPTIMIZERS = {
    "lookahead": (optax.lookahead(optax.sgd(0.1), 5, 0.5), "optax.lookahead has two sets of parameters"),
    "lookahead in MultiSteps": (
        optax.MultiSteps(optax.lookahead(optax.sgd(0.1), 5, 0.5), 2),
        "optax.lookahead has two sets of parameters",
    ),
    "text": (of_results(lambda g: g, "text"), r"optimizer.init\(params\) is 'text'"),
    "a mean": (
        of_results(lambda g: g.mean()),
        r"update\(...\)\[0\]\['w'\] must be float32\[3\], got float32\[\]",
    ),
    "nothing": (of_results(lambda g: None), r"optimizer.update\(...\)\[0\] must be a tree like params"),
    "another state": (
        optax.GradientTransformation(lambda params: (), lambda grads, state, params=None: (grads, (1,))),
        r"optimizer.update\(...\)\[1\] must be a tree like the state that it was given",
    ),
    "sam": (
        optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True),
        "needs arguments .*grad_fn must be provided",
    ),
}


@pytest.mark.parametrize(("optimizer", "message"), WRONG_OPTIMIZERS.values(), ids=WRONG_OPTIMIZERS)
def test_an_optimizer_whose_results_are_not_like_the_parameters_is_refused(optimizer, message):
    step = make_train_step(**{**step_arguments(), "optimizer": optimizer})
    with pytest.raises(ValueError, match=message):
        step(step.init(PARAMS), BATCH)


def test_an_optimizer_may_keep_numbers_of_python():
    update = lambda grads, kept, params=None: (jax.tree.map(lambda g: kept * g, grads), kept / 2)  # noqa: E731
    step = make_train_step(
        **{**step_arguments(), "optimizer": optax.GradientTransformation(lambda params: 1.0, update)}
    )
    state = step.init(PARAMS)
    for kept in (0.5, 0.25):
        state, _ = step(state, BATCH)
        assert float(state.opt_state) == kept


ACCUMULATING = {
    "MultiSteps": optax.MultiSteps(optax.sgd(0.1), 2),
    "apply_every": optax.chain(optax.apply_every(2), optax.sgd(0.1)),
}


@pytest.mark.parametrize("optimizer", ACCUMULATING.values(), ids=ACCUMULATING)
def test_an_optimizer_that_accumulates_over_updates_is_warned_of(optimizer):
    step = make_train_step(**{**step_arguments(), "optimizer": optimizer})
    with pytest.warns(UserWarning, match="accumulates over several updates .* give all rows to one update"):
        step.init(PARAMS)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [("change_gradient", "change_gradients"), ("max_norm", "max_grad_norm"), ("remats", "remat")],
)
def test_a_misspelt_keyword_is_told_the_nearest_of_all_arguments(wrong, nearest):
    with pytest.raises(TypeError, match=rf"make_train_step\(\) got .* '{wrong}'; did you mean '{nearest}'\?"):
        make_train_step(**step_arguments(), **{wrong: None})


@pytest.mark.parametrize("name", ["change_gradients", "check_program"])
def test_a_function_of_other_arguments_is_refused_when_the_step_is_made(name):
    with pytest.raises(ValueError, match=f"{name} must take "):
        make_train_step(**step_arguments(), **{name: lambda: None})


def summed():
    return optax.stateless(lambda grads, params: jax.tree.map(jnp.sum, grads))


def test_directions_of_another_shape_than_their_parameter_are_refused(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS._parts, "summed", summed)
    optimizer = make_optimizer("summed", learning_rate=0.1)
    with pytest.raises(ValueError, match=r"direction of a parameter must have its shape \[3\], got \[\]"):
        optimizer.update(PARAMS, optimizer.init(PARAMS), PARAMS)


def test_a_misspelt_axis_in_param_specs_is_told_the_nearest():
    step = make_train_step(**step_arguments(), param_specs=lambda params: {"w": jax.P("tensr")})
    with pytest.raises(
        ValueError, match=r"param_specs gives for params\['w'\] must be one of .*mean 'tensor'"
    ):
        step.init(PARAMS)
