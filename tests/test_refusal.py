"""Checks of single arguments: what passes, what is refused, and that the advice is legal."""

import inspect
import math

import numpy as np
import pytest

import jaxfb
from jaxfb import refusal
from jaxfb.batch_plan import BatchPlan
from jaxfb.batch_plan.budget import shape_for
from jaxfb.config.names import ALIASES
from jaxfb.mesh import SHORT
from jaxfb.refusal import Refused, shown


@pytest.mark.parametrize(
    ("check", "legal", "wrong", "message"),
    [
        (
            refusal.integer,
            [1, np.int8(3)],
            [0, -1, 1.0, True, np.True_, "1", None],
            "x must be a positive integer",
        ),
        (refusal.integer, [2**31 - 1], [2**31, 10**400], "of at most 2147483647, got"),
        (
            refusal.number,
            [0, -1.5, np.float32(2)],
            [math.nan, -math.inf, True, "1", None, 10**400],
            "a finite number",
        ),
        (
            refusal.text,
            ["", "é\u2028"],
            ["\ud800", "a\udfff", b"a", None, 3],
            "x must be (text in UTF-8|a string), got",
        ),
        (refusal.boolean, [True, False], [0, 1, "true", None, np.True_], "x must be True or False"),
    ],
)
def test_a_value_passes_or_is_refused_by_name(check, legal, wrong, message):
    for value in legal:
        assert check("x", value) == value
    for value in wrong:
        with pytest.raises(Refused, match=message) as refused:
            check("x", value, who="[here]")
        assert str(refused.value).startswith("[here] x must be ") and isinstance(refused.value, ValueError)
        assert all(check("x", choice["x"]) is not None for choice in refused.value.choices)


def test_bounds_are_open_or_closed():
    assert refusal.number("x", 0, least=0, below=1) == 0
    for value in (-0.1, 1):
        with pytest.raises(Refused, match=r"of at least 0 and below 1, got"):
            refusal.number("x", value, least=0, below=1)


def test_a_word_is_refused_with_the_nearest():
    assert refusal.choice("x", "pad", ("pad", "drop", None)) == "pad"
    with pytest.raises(
        Refused, match=r"x must be one of 'pad', 'drop', got 'pat'; did you mean 'pad'\?"
    ) as refused:
        refusal.choice("x", "pat", ("pad", "drop"))
    assert refused.value.choices == ({"x": "pad"},)
    for value in (np.zeros(2), ["pad"], True):
        with pytest.raises(Refused, match="must be one of"):
            refusal.choice("x", value, ("pad", 1))


def test_functions_and_instances():
    assert refusal.function("x", len, "(tree)") is len
    with pytest.raises(Refused, match=r"x must be a function \(tree\), got <class 'int'>"):
        refusal.function("x", int, "(tree)")
    with pytest.raises(Refused, match="x must be a string, got 3"):
        refusal.instance("x", 3, str, "a string")


def test_any_value_is_shown_on_one_short_line():
    class Hostile:
        def __repr__(self):
            raise RuntimeError

    assert shown(Hostile()) == "<Hostile>" and shown("a\nb") == r"'a\nb'"
    for value in (10**5000, "x" * 10**6, np.zeros((30, 30)), [10**5000]):
        assert len(shown(value)) <= 80 and "\n" not in shown(value)


@pytest.mark.parametrize("budget", [8, 16, 40, 100])
@pytest.mark.parametrize(
    "sizes", [dict(rows=1), dict(rows=57, multiple_of=3), dict(rows=200, data_parallel=3)]
)
def test_the_shapes_of_a_packed_plan_are_those_of_every_number_of_array_rows(budget, sizes):
    plan = BatchPlan(max_tokens_per_microbatch=budget, sequence_length=8, packing=True, **sizes)
    one_by_one = (shape_for(plan, width, n) for width in plan.widths for n in range(1, plan.rows + 1))
    assert plan.shapes() == tuple(dict.fromkeys(one_by_one))


@pytest.mark.parametrize(
    ("call", "given", "near"),
    [
        (jaxfb.make_mesh, "dp", "data"),
        (jaxfb.make_mesh, "tp", "tensor"),
        (jaxfb.make_mesh, "dta", "data"),
        (BatchPlan, "row", "rows"),
        (BatchPlan, "micro_batch_size", "rows_per_microbatch"),
        (jaxfb.schedules.make, "chunks", "num_chunks"),
    ],
)
def test_a_misspelt_keyword_names_the_one_that_is_meant(call, given, near):
    said = rf"got an unexpected keyword argument '{given}'; did you mean '{near}'\?"
    with pytest.raises(TypeError, match=said):
        call(**{given: 2})
    assert near in inspect.signature(call).parameters


def test_what_the_axes_are_called_for_short_is_the_same_in_a_program_and_in_a_config():
    assert {f"mesh.{short}": f"mesh.{axis}" for short, axis in SHORT.items()} == ALIASES


def test_text_that_python_read_as_ascii_is_told_from_text_that_is_none():
    """Under PYTHONUTF8=0 LC_ALL=C an argument such as "café" was said to be no UTF-8, which it is."""
    read = "café".encode().decode("ascii", errors="surrogateescape")
    with pytest.raises(ValueError, match=r"x must be text in UTF-8, got .*read as ASCII \(with PYTHONUTF8=1"):
        refusal.text("x", read)
    with pytest.raises(ValueError, match=r"x must be text in UTF-8, got 'caf.udce9'$"):
        refusal.text("x", "caf\udce9")
