"""forward_backward with one wrong argument, one wrong leaf, or a model that gives one wrong answer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from legal import boolean, float_dtypes, integers, maybe, nothing, numbers, one_of, positive_int
from wrong import Call, pool

import jaxfb
from jaxfb import (
    BatchPlan,
    Last,
    LossOutput,
    Max,
    Min,
    Pipelined,
    Sum,
    get_forward_backward_func,
    make_mesh,
)
from jaxfb.parts import HEADS
from jaxfb.recomputation import REMAT_POLICIES
from jaxfb.schedules import NAMES
from jaxfb.shared_options import NORMALIZATIONS

ROWS, WIDTH = 4, 3
PLAN = BatchPlan(rows=ROWS, num_microbatches=2)


def params():
    return {
        "layers": {"w": np.ones((2, WIDTH, WIDTH), np.float32)},
        "b": np.ones(WIDTH, np.float32),
    }


def batch():
    return {"x": np.ones((ROWS, WIDTH), np.float32), "y": np.zeros(ROWS, np.float32)}


def loss(params, microbatch, rng):
    """Takes any parameters and any rows."""
    leaves = jax.tree.leaves(microbatch)
    of_rows, of_params = (sum(map(jnp.sum, found)) for found in (leaves, jax.tree.leaves(params)))
    return Sum(jnp.asarray(of_rows * of_params, float), float(leaves[0].shape[0]))


def embed(outer, microbatch, rng):
    return microbatch["x"]


def layer(weights, hidden, microbatch, rng):
    return jnp.tanh(hidden @ weights["w"])


def head(outer, hidden, microbatch, rng):
    return Sum(((hidden @ outer["b"] - microbatch["y"]) ** 2).sum(), float(len(microbatch["y"])))


MODEL = Pipelined(embed, layer, head)
ONE, PIPE = get_forward_backward_func(), get_forward_backward_func(make_mesh(pipe=2))


dtypes = maybe(float_dtypes)


OPTIONS = {
    "mesh": maybe(nothing),
    "num_chunks": positive_int,
    "normalize": one_of(NORMALIZATIONS),
    "accum_dtype": dtypes,
    "reduce_dtype": dtypes,
    "compute_dtype": dtypes,
    "remat": one_of((None, *REMAT_POLICIES)),
    "fsdp_gather": lambda value: one_of(("layer", "step"))(value) or positive_int(value),
    "gather_ahead": one_of((None, True, False, "half")),
    "overlap_grad_reduce": one_of((None, True, False)),
    "compiler_options": maybe(lambda value: isinstance(value, dict | tuple)),
    "optimizer_sharding": one_of((None, "none", "data", "gradients")),
    "param_specs": lambda value: value is None or (callable(value) and not isinstance(value, type)),
    "head_placement": one_of((None, *HEADS)),
    "layers_per_stage": maybe(
        lambda value: isinstance(value, list | tuple | range) or hasattr(value, "shape")
    ),
    "layer_order": one_of(("model", "pipeline")),
    "trainable": maybe(
        lambda value: isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
    ),
    "poison_bubbles": boolean,
}


def _arrays(value):
    return isinstance(value, np.ndarray | np.generic | jax.Array) and value.dtype.kind in "fiu"


CALL = {
    "model": nothing,
    "params": _arrays,
    "batch": _arrays,
    "plan": nothing,
    "rng": maybe(integers(-(2**63), 2**63 - 1)),
    "forward_only": boolean,
    "grad_scale": lambda value: numbers()(value) or _is_one_number(value),
}
NAMED = {"model": "model|loss function|argument", "rng": "rng|key"}


def _is_one_number(value):
    return hasattr(value, "dtype") and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)


def call(fb, model):
    return lambda: dict(model=model, params=params(), batch=batch(), plan=PLAN)


CALLS = [
    Call(
        "get_forward_backward_func", get_forward_backward_func, dict, OPTIONS | {"schedule": maybe(nothing)}
    ),
    Call(
        "get_forward_backward_func of a pipeline",
        get_forward_backward_func,
        lambda: dict(mesh=make_mesh(pipe=2), schedule="1f1b"),
        OPTIONS | {"schedule": one_of((None, *NAMES))},
    ),
    Call("forward_backward", ONE, call(ONE, loss), CALL, NAMED, use=jax.block_until_ready),
    Call("forward_backward of a pipeline", PIPE, call(PIPE, MODEL), CALL, NAMED, use=jax.block_until_ready),
    Call(
        "Microbatches",
        lambda leaves: ONE(loss, params(), jaxfb.Microbatches(leaves), PLAN),
        lambda: dict(leaves=jax.tree.map(lambda leaf: leaf.reshape(2, 2, *leaf.shape[1:]), batch())),
        {"leaves": nothing},
        {"leaves": "batch|microbatch"},
    ),
    Call(
        "from_megatron",
        jaxfb.from_megatron,
        lambda: dict(loss_func=lambda params, microbatch, rng: None, per_token=True),
        {"loss_func": lambda value: callable(value) and not isinstance(value, type), "per_token": boolean},
    ),
    Call(
        "check_equivalence",
        jaxfb.check_equivalence,
        lambda: dict(model=loss, params=params(), batch=batch(), meshes=[{}], schedules=["1f1b"]),
        {
            "model": nothing,
            "params": _arrays,
            "batch": _arrays,
            "meshes": one_of((None, [], (), {})),
            "rng": CALL["rng"],
            "rows_per_microbatch": positive_int,
            "report": maybe(lambda value: callable(value) and not isinstance(value, type)),
            "remat": OPTIONS["remat"],
            "no_such_option": nothing,
        },
        NAMED | {"meshes": "mesh", "rng": "rng|key"},
    ),
    Call(
        "check_random",
        lambda cases=1, axes=("data",), **rest: jaxfb.check_random(cases=cases, axes=axes, **rest),
        lambda: dict(model=loss, params=params(), batch=batch()),
        {
            "model": nothing,
            "params": _arrays,
            "batch": _arrays,
            "cases": integers(1, 2**63 - 1),
            "seed": integers(-(2**63), 2**63 - 1),
            "axes": one_of((None, [], ())),
            "tries": integers(0, 2**63 - 1),
            "report": lambda value: value is None or (callable(value) and not isinstance(value, type)),
        },
        NAMED,
    ),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_one_wrong_argument_is_refused_by_name(call):
    assert not call.failures(pool(seed=4), legal_too=False)


QUICK = [call for call in CALLS if call.name != "check_random"]  # which runs as long as it is asked to


@pytest.mark.slow
@pytest.mark.parametrize("call", QUICK, ids=lambda call: call.name)
def test_one_changed_argument_is_refused_by_name_or_runs(call):
    call()
    assert not call.failures(pool(seed=5))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_an_argument_left_out_or_unknown_is_named(call):
    assert not call.signature_failures()


def answers(give):
    """A `Call` whose only argument is what a loss function, or a stage of a model, answers."""

    def run(answer):
        fb, model = give(answer)
        return fb(model, params(), batch(), PLAN)

    return run


def _scalar(value):
    if isinstance(value, bool | int | float | complex | np.generic):
        return not isinstance(value, complex)
    return hasattr(value, "dtype") and value.shape == () and value.dtype != object and value.dtype.kind != "U"


def _numbers(value):
    """Arrays of numbers, and lists that jnp.asarray makes one of."""
    return _scalar(value) or isinstance(value, list | tuple | range) or hasattr(value, "dtype")


TOTAL = jnp.float32(1)
ANSWERS = {
    "a loss": lambda x: (ONE, lambda p, mb, rng: x),
    "terms": lambda x: (ONE, lambda p, mb, rng: LossOutput(x)),
    "a term": lambda x: (ONE, lambda p, mb, rng: LossOutput({"loss": x})),
    "a total": lambda x: (ONE, lambda p, mb, rng: Sum(x, 1.0)),
    "a weight": lambda x: (ONE, lambda p, mb, rng: Sum(p["b"].sum(), x)),
    "metrics": lambda x: (ONE, lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, x)),
    "a metric": lambda x: (ONE, lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, {"metric": x})),
    "a metric's total": lambda x: (
        ONE,
        lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, {"metric": Sum(x, 2.0)}),
    ),
    "a metric's weight": lambda x: (
        ONE,
        lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, {"metric": Sum(TOTAL, x)}),
    ),
    **{
        name: lambda x, kind=kind: (
            ONE,
            lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, {"metric": kind(x)}),
        )
        for name, kind in {"a maximum": Max, "a minimum": Min, "a last value": Last}.items()
    },
    "outputs": lambda x: (ONE, lambda p, mb, rng: LossOutput({"loss": loss(p, mb, rng)}, {}, {"outputs": x})),
    "embed": lambda x: (PIPE, Pipelined(lambda *_: x, layer, head)),
    "layer": lambda x: (PIPE, Pipelined(embed, lambda *_: x, head)),
    "head": lambda x: (PIPE, Pipelined(embed, layer, lambda *_: x)),
    "from_megatron": lambda x: (ONE, jaxfb.from_megatron(lambda p, mb, rng: x, per_token=True)),
    "from_megatron's metrics": lambda x: (
        ONE,
        jaxfb.from_megatron(lambda p, mb, rng: (p["b"].sum(), 1, x), per_token=True),
    ),
}
EMPTY = one_of((None, {}))
LEGAL_ANSWERS = {
    "a total": _scalar,
    "a weight": lambda x: x is None or _scalar(x),
    "metrics": EMPTY,
    "a metric's total": _numbers,
    "a metric's weight": lambda x: x is None or _numbers(x),
    **dict.fromkeys(("a maximum", "a minimum", "a last value"), _numbers),
    "embed": lambda x: hasattr(x, "shape") and x.shape[:1] == (2,),
    "from_megatron's metrics": one_of([{}, {"a": 1}]),
    "outputs": lambda x: (
        one_of((None, [], (), {}, [None], {None: None}))(x) or (hasattr(x, "shape") and x.shape[:1] == (2,))
    ),
}


def wrong_answers(name):
    words = "loss|term|metric|output|embed|layer|head|hidden|Megatron|weight|total"
    rule = LEGAL_ANSWERS.get(name, nothing)
    return Call(name, answers(ANSWERS[name]), dict, {"answer": rule}, {"answer": words})


@pytest.mark.parametrize("name", ANSWERS)
def test_a_model_that_answers_something_else_is_refused_in_a_sentence(name):
    assert not wrong_answers(name).failures(pool(seed=6, count=16), legal_too=False)


ALIKE = ("a minimum", "a last value")  # to a maximum: one class checks and one function adds all three


@pytest.mark.slow
@pytest.mark.parametrize("name", ANSWERS)
def test_whatever_a_model_answers_is_refused_in_a_sentence_or_runs(name):
    """Each legal value is a program to compile; of kinds that are alike, one tries all of them and each some."""
    call = wrong_answers(name)
    if name in ALIKE:
        assert not call.failures(pool(seed=7), legal_too=False)
        assert not call.failures(pool(seed=8 + ALIKE.index(name), count=20))
    else:
        assert not call.failures(pool(seed=7))


def test_a_function_that_makes_parameters_is_called_first():
    forward_backward = get_forward_backward_func(make_mesh(data=1))
    with pytest.raises(
        ValueError, match="must be a tree of arrays, got the function <lambda>; call it first"
    ):
        forward_backward(loss, lambda key: params(), batch(), PLAN)
