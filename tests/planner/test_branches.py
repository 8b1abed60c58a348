"""How often the ticks of a pipeline take their branches: beside what `simulate` charges, and in compiled programs."""

import re
from contextlib import contextmanager

import jax
import pytest

import jaxfb
from jaxfb.config import load_config
from jaxfb.hlo import parse
from jaxfb.planner.compiled import _read
from jaxfb.planner.job import make_job
from jaxfb.planner.program_cost.branches import EVENTS, Branch, TakenBranches, branch_of
from jaxfb.planner.program_cost.hlo_cost import cost_of
from jaxfb.planner.program_cost.routing import Routed
from jaxfb.planner.topology import parse_topology
from jaxfb.schedules import KINDS, make

BY_DEVICE = [name for name in KINDS if KINDS[name].by_device]
HEAD = 3 * 2 * 4 * 32 * 32 * 128
"""Operations of the head below: three products of 4 rows of 32 tokens, with 32 numbers each, and the 128 entries of the
vocabulary of 512 that a device of four has."""


@pytest.mark.parametrize("name", BY_DEVICE)
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 2.5, 0.9), (2.0, 1.0, 3.0)])
def test_by_device_a_tick_takes_as_long_as_in_a_simulation(name, seconds):
    schedule = make(name, 4, 12, 2)
    costs = dict(zip("FBW", seconds, strict=True))
    taken = TakenBranches(schedule.program)
    mean = sum(taken.share(Branch("FBW", kind), costs) * costs[kind] for kind in costs)
    forward, backward_input, backward_weight = seconds
    simulated = schedule.simulate(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight
    )
    assert mean * len(schedule.table) == pytest.approx(simulated.time * schedule.num_chunks)


@pytest.mark.parametrize(
    "name, chunks", [("interleaved", 2), ("zero_bubble", 2), ("zb_v", 2), ("v_shape", 2)]
)
def test_a_loss_is_computed_once_a_microbatch(name, chunks):
    program = make(name, 4, 12, chunks).program
    for event in EVENTS:
        always = sum(
            phase.num_ticks
            for phase in program.phases
            if all(program.rows[f"{event}_valid"][phase.start : phase.stop])
        )
        sometimes = 0.0
        for kinds in {phase.kinds for phase in program.phases}:
            if (share := TakenBranches(program).share(Branch(kinds, event), {})) is None:
                continue
            with_branch = [
                phase.num_ticks
                for phase in program.phases
                if phase.kinds == kinds
                and 0 < sum(program.rows[f"{event}_valid"][phase.start : phase.stop]) < phase.num_ticks
            ]
            sometimes += share * sum(with_branch)
        assert always + sometimes == pytest.approx(12)


def test_a_schedule_whose_devices_compute_alike_has_no_branch_for_a_kind():
    taken = TakenBranches(make("interleaved", 4, 8, 2).program)
    assert taken.share(Branch("FB", "B"), {"B": 1.0}) is None
    assert taken.share(Branch("W", "loss"), {}) is None  # no phase computes that alone


def compiled(schedule: str, chunks: int = 2):
    """Returns a step of 8 layers, 16 microbatches and four stages, its text, and its program."""
    job = make_job(
        load_config(
            "configs/quickstart.yaml",
            [
                *("model.num_layers=8", "model.hidden_size=32", "model.num_heads=2", "model.num_kv_heads=2"),
                *("model.mlp_size=64", "model.head_size=16", "data.sequence_length=32"),
                *("batch.rows=64", "batch.num_microbatches=16", "mesh.data=1", "mesh.pp=4"),
                *(f"schedule={schedule}", f"chunks={chunks}"),
            ],
        ),
        jaxfb.make_mesh(pipe=4, devices=jax.devices()[:4]),
    )
    with names_in_the_cache():
        program = job.step.trace(job.state, job.batch).lower().compile()
    return job, program.as_text(), program


@contextmanager
def names_in_the_cache():
    """Takes no program from the cache that differs in scopes alone."""
    name = "jax_compilation_cache_include_metadata_in_key"
    before = getattr(jax.config, name)
    jax.config.update(name, True)
    try:
        yield
    finally:
        jax.config.update(name, before)


@pytest.fixture(scope="module")
def interleaved():
    return compiled("interleaved")


@pytest.fixture(scope="module")
def by_device():
    return compiled("zb_v")


def branches(text: str) -> list[Branch]:
    return [found for rows in parse(text)[0].values() for one in rows if (found := branch_of(one))]


def test_a_program_names_its_branches(interleaved, by_device):
    assert {one.what for one in branches(interleaved[1])} == set(EVENTS)
    assert {one.what for one in branches(by_device[1])} == {*"FBW", *EVENTS}
    assert len(branches(by_device[1])) == len(re.findall(r" conditional\([^\n]*/phase_", by_device[1]))


def test_a_head_counts_once_a_microbatch(interleaved):
    job, text, program = interleaved
    longest = cost_of(text, job.mesh).flops
    counted = cost_of(text, job.mesh, taken=TakenBranches(job.schedule.program)).flops
    rows = job.schedule.program.rows["loss_valid"]
    ticks = sum(phase.num_ticks for phase in job.schedule.phases if any(rows[phase.start : phase.stop]))
    assert longest - counted == pytest.approx((ticks - 16) * HEAD)
    assert (
        _read(program, job, parse_topology("cpu:4"), Routed(), 0.0, 0.0).flops == counted
    )  # as `jaxfb plan`


def test_a_device_computes_one_kind_in_a_tick(interleaved, by_device):
    """All schedules have the same work; what they idle is less than a tenth, a branch taken every time three times."""
    (alike, program, _), (job, text, _) = interleaved, by_device
    longest, counted = (
        cost_of(text, job.mesh, taken=taken).flops for taken in (None, TakenBranches(job.schedule.program))
    )
    other = cost_of(program, alike.mesh, taken=TakenBranches(alike.schedule.program)).flops
    assert 0.9 * other < counted < other
    assert longest > 3 * counted
