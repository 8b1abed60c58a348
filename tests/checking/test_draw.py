"""Cases are drawn reproducibly, legally and widely; a finding is made small. No JAX runs."""

import subprocess
import sys
from collections import Counter
from math import prod

import pytest

from jaxfb.checking.drawing import draw as drawing
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.draw import METRICS, OPTIMIZERS, OUTPUTS, TERMS, Own, draw
from jaxfb.checking.drawing.shrink import build, features_of, shrink
from jaxfb.checking.drawing.tables import random_schedule

CASES = [draw(seed, index) for seed in (0, 1) for index in range(400)]


def test_a_case_follows_from_seed_and_index_alone():
    assert [draw(3, index) for index in (5, 4)] == [draw(3, 5), draw(3, 4)]
    assert draw(3, 5) != draw(4, 5)
    text = "from jaxfb.checking.drawing.draw import draw; print(draw(3, 5))"
    other = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == str(draw(3, 5))


def test_drawing_imports_no_jax():
    text = (
        "import sys, jaxfb.checking.command; assert 'jax' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


CHOICES = {
    "axis": drawing.AXES,
    "axes": range(5),
    "model": drawing.MODELS,
    "attention": (None, *drawing.ATTENTION),
    "container": ("dict", "ordered", "namedtuple", "list"),
    "leaves": drawing.LEAVES,
    "terms": ("tokens", *TERMS),
    "metrics": METRICS,
    "outputs": OUTPUTS,
    "masks": ("full", "ragged", "empty_microbatch", "empty"),
    "num_microbatches": (1, 2, 3, 4, 5, 8),
    "remainder": ("error", "pad", "drop"),
    "rng": ("none", "key", "rows", "legacy"),
    "call": ("direct", "jit", "split", "placed"),
    "schedule": (None, *drawing.SCHEDULES),
    "num_chunks": (1, 2, 3),
    "stages": ("even", "uneven", "empty"),
    "head_placement": (None, "last", "rows", "vocabulary"),
    "normalize": ("global", "microbatch", "none"),
    "remat": ("none", "selective", "layer", "halves", "offload", "full"),
    "fsdp_gather": ("layer", "step"),
    "large_tables": (False, True),
    "optimizer_sharding": ("none", "data", "gradients"),
    "param_dtype": ("float64", "float32", "bfloat16", "float16"),
    "compute_dtype": (None, "float32", "bfloat16", "float16"),
    "accum_dtype": (None, "float32", "float64"),
    "reduce_dtype": (None, "bfloat16", "float32", "float64"),
    "grad_scale": (1.0, 4.0),
    "optimizer": OPTIMIZERS,
    "max_grad_norm": (None, 0.3, 100.0),
    "clip_convention": ("exact", "torch"),
    "loss_scale": (None, "static", "dynamic"),
    "second": ("none", "same", "nonfinite", "empty"),
    **dict.fromkeys(
        ("tied", "dropout", "tensor_specs", "mixed", "layer_terms", "layer_metrics", "poison_bubbles")
        + ("splits_backward", "forward_only", "update", "x64"),
        (False, True),
    ),
}


def values_of(case, name):
    """What a case has of a dimension of `CHOICES`."""
    if name in ("axis", "axes"):
        return case.mesh if name == "axis" else [len(case.mesh)]
    if name == "stages":
        sizes = case.layers_per_stage or ()
        return ["even" if len(set(sizes)) <= 1 else "empty" if 0 in sizes else "uneven"]
    value = getattr(case, name)
    return value if isinstance(value, tuple) else [value]


@pytest.mark.parametrize("name", CHOICES)
def test_every_value_is_drawn_in_500_cases(name):
    seen = Counter(value for index in range(500) for value in values_of(draw(0, index), name))
    assert set(seen) >= set(CHOICES[name]), seen


@pytest.mark.parametrize("case", CASES[:200], ids=str)
def test_a_case_fits_together(case):
    assert (
        case.num_devices <= (16 if len(case.mesh) == 4 else 8)
        and 0 < case.real_rows <= case.padded_rows <= 48
    )
    assert 0 <= case.surplus < case.rows_per_global_microbatch or case.surplus == 0
    stages = case.pipe * case.num_chunks
    if case.layers_per_stage:
        assert (len(case.layers_per_stage), sum(case.layers_per_stage)) == (stages, case.num_layers)
    else:
        assert case.num_layers % stages == 0
    assert case.length % (2 * case.mesh.get("context", 1)) == 0 or "context" not in case.mesh


@pytest.mark.parametrize(
    "own", [Own(16, 4), Own(24, None, ("data", "context")), Own(7, 1), Own(8, 3, num_devices=2)]
)
def test_around_a_users_model_its_rows_and_layers_stay(own):
    for index in range(100):
        case = draw(0, index, own)
        assert (case.model, case.rows) == ("own", own.rows)
        assert set(case.mesh) <= set(own.axes) and case.num_devices <= own.num_devices
        assert own.num_layers is None or case.num_layers == own.num_layers
        assert case.pipe * case.num_chunks <= (own.num_layers or 1)


def test_a_case_is_put_together_again_from_its_features():
    for case in CASES:
        assert build(case, features_of(case)) == case


def needs(*names):
    """A finding that shows where all of these are in the text of a case."""
    return lambda case: all(name in str(case) for name in names)


@pytest.mark.parametrize(
    "names", [("pipe=",), ("data=", "masks=ragged"), ("update=True", "sum_vector", "fsdp=")]
)
def test_a_finding_shrinks_to_what_it_needs(names):
    fails, tried = needs(*names), []
    for case in filter(fails, CASES):
        smallest = shrink(case, lambda smaller: tried.append(smaller) or fails(smaller))
        assert fails(smallest)
        assert len(features_of(smallest)) <= len(names) + 2, (
            f"{case}\n{smallest}"
        )  # lengths, layers of a pipeline
        assert prod(smallest.mesh.values()) <= 2
    assert tried


def test_shrinking_stops_after_so_many_tries():
    tried = []
    shrink(CASES[0], lambda case: bool(tried.append(case)), most=5)
    assert len(tried) == 5


def test_a_users_rows_stay_while_a_finding_shrinks():
    own = Own(12, 4)
    for index in range(50):
        case = draw(1, index, own)
        smallest = shrink(case, lambda smaller: "data" in smaller.mesh or "data" not in case.mesh)  # noqa: B023
        assert (smallest.model, smallest.rows, smallest.num_layers) == ("own", 12, 4)


def test_a_case_prints_what_is_not_simplest():
    case = Case(mesh={"pipe": 2}, terms=("tokens", "sum"), num_microbatches=3)
    assert str(case) == "pipe=2 | stages | terms=tokens+sum num_microbatches=3"
    assert str(Case()) == "one device | stages | "


@pytest.mark.parametrize("seed", range(30))
def test_random_tables_are_schedules_of_all_kinds(seed):
    """`Schedule.from_table` validates them: each action once, in order, stages a hop apart."""
    pipe, microbatches, chunks, splits = 2 + seed % 3, 1 + seed % 5, 1 + seed % 2, seed % 4 > 1
    schedule = random_schedule(seed, pipe, microbatches, chunks, splits)
    assert schedule == random_schedule(seed, pipe, microbatches, chunks, splits)
    sizes = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks, schedule.splits_backward)
    assert sizes == (pipe, microbatches, chunks, splits)
    assert schedule.table != random_schedule(seed + 100, pipe, microbatches, chunks, splits).table
