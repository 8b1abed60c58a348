"""What the optional members of a `Pipelined` must be: refused in a sentence before anything of the model is traced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb
from jaxfb import Pipelined, Sum
from jaxfb.types import Counted, Halves, VocabularyParallel

ROWS, LENGTH, WIDTH = 4, 4, 3
PARAMS = {
    "into": np.ones((WIDTH, WIDTH)),
    "gain": np.ones(WIDTH),
    "layers": {"w": np.ones((2, WIDTH, WIDTH))},
}


def embed(outer, microbatch, rng):
    return microbatch["x"] @ outer["into"]


def layer(weights, hidden, microbatch, rng):
    return jnp.tanh(hidden @ weights["w"])


def head(outer, hidden, microbatch, rng):
    return Sum((hidden * outer["gain"]).sum(), hidden.size)


MODEL = Pipelined(embed, layer, head)


def run(mesh, params=PARAMS, options=None, **members):
    made = jaxfb.make_mesh(**mesh)
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=jaxfb.mesh.data_parallel(made))
    fb = jaxfb.get_forward_backward_func(made, **(options or {}))
    return fb(dataclasses.replace(MODEL, **members), params, {"x": np.ones((ROWS, LENGTH, WIDTH))}, plan)


def with_dims(dims, shared=None, embed=lambda outer, microbatch, rng, axis: None):
    """A vocabulary that is refused before its functions are called."""
    return VocabularyParallel(dims, embed, lambda outer, hidden, microbatch, rng, axis: None, shared)


WHOLE = {"into": -1, "gain": -1}
PIPE, FSDP = {"pipe": 2}, {"fsdp": 2}
REFUSED = {
    "vocabulary_of_another_kind": (
        PIPE,
        {"vocabulary": embed},
        "vocabulary must be a jaxfb.types.VocabularyParallel or None",
    ),
    "halves_in_a_tuple": (
        FSDP,
        {"halves": (layer, layer)},
        "Pipelined.halves must be a jaxfb.types.Halves or None",
    ),
    "counted_of_another_kind": (
        {},
        {"counted": layer},
        "Pipelined.counted must be a jaxfb.types.Counted or None",
    ),
    "second_without_beside": (FSDP, {"halves": Halves(layer, layer)}, r"halves.second must take .*beside\)"),
    "embed_without_axis": (
        PIPE,
        {"vocabulary": with_dims(lambda outer: WHOLE, embed=embed)},
        r"vocabulary.embed must take .*axis\)",
    ),
    "dims_of_a_part": (
        PIPE,
        {"vocabulary": with_dims(lambda outer: {"into": 0})},
        r"vocabulary.dims must give a tree like .* got \{'into': 0\}",
    ),
    "dims_of_none": (
        PIPE,
        {"vocabulary": with_dims(lambda outer: WHOLE | {"gain": None})},
        "vocabulary.dims must give a tree like",
    ),
    "no_such_dim": (
        PIPE,
        {"vocabulary": with_dims(lambda outer: WHOLE | {"gain": 1})},
        r"one of its dims, or -1 .*\['gain'\] of shape \(3,\) it gives 1",
    ),
    "dim_in_a_float": (PIPE, {"vocabulary": with_dims(lambda outer: WHOLE | {"into": 0.0})}, "it gives 0.0"),
    "shared_of_a_part": (
        PIPE,
        {"vocabulary": with_dims(lambda outer: WHOLE, lambda outer: {"gain": True})},
        "vocabulary.shared must give a tree",
    ),
    "tables_of_a_part": (FSDP, {"tables": lambda outer: {"into": 0}}, "Pipelined.tables must give a tree"),
    "no_such_dim_of_a_table": (
        FSDP,
        {"tables": lambda outer: WHOLE | {"into": 2}},
        r"tables must .* of shape \(3, 3\) it gives 2",
    ),
    "counted_of_a_part": (
        {},
        {"counted": Counted(lambda params: {"gain": False})},
        "counted.leaves must give a tree",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_member_that_is_not_what_it_must_be_is_refused(name):
    mesh, members, words = REFUSED[name]
    with pytest.raises(ValueError, match=words):
        run(mesh, **members)


def test_a_second_half_that_does_not_return_what_is_beside_is_refused():
    halves = Halves(layer, lambda weights, hidden, microbatch, rng, beside=(): hidden)
    with pytest.raises(
        ValueError, match=r"halves.second must return two results, \(what layer returns, beside\)"
    ):
        run(FSDP, options={"remat": "halves"}, halves=halves)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda hidden: hidden, r"layer_piece must return two results, \(hidden, own\)"),
        (lambda hidden: (hidden, hidden.sum()), r"arrays \[rows, tokens, ...\] as `own`, .* of shape \(\)"),
        (lambda hidden: (hidden, {"k": hidden[:, 0]}), r"own\['k'\] is .* of shape \(2, 3\)"),
        (lambda hidden: (hidden, jnp.zeros(hidden.shape[:2], int)), "in int64"),
    ],
    ids=["hidden_alone", "number", "without_tokens", "integers"],
)
def test_what_a_piece_of_a_layer_must_return(answer, words):
    with pytest.raises(ValueError, match=words):
        run(
            PIPE,
            options={"num_pieces": 2},
            layer_piece=lambda w, hidden, microbatch, rng, piece: answer(hidden),
        )


def test_members_that_mark_parameters_are_asked_where_they_are_read_alone():
    def never(outer):
        raise AssertionError

    run({"data": 2}, vocabulary=with_dims(never), tables=never)


def test_marks_may_be_numpy_numbers():
    marked = jax.tree.map(lambda _: np.bool_(False), PARAMS)
    run({}, counted=Counted(lambda params: marked), tables=lambda outer: {"into": np.int64(0), "gain": -1})
