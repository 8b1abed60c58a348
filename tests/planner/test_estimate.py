"""The estimate without a compiler, held to the compiler: memory within 10%, products and traffic exactly."""

import math

import pytest

import jaxfb
from jaxfb.config import load_config
from jaxfb.planner.estimate import estimate
from jaxfb.planner.hlo_cost import cost_of
from jaxfb.planner.job import make_job
from jaxfb.planner.topology import parse_topology

CONFIG = "configs/mesh8.yaml"
SIZES = (
    "model.num_layers=8 model.hidden_size=256 data.sequence_length=256 batch.rows=64 data.tokenizer=bpe "
    "data.vocab_size=2048 optimizer.sharding=none mesh.dp=1 mesh.fsdp=1 mesh.tp=1"
).split()
LAYOUTS = {
    "data": "mesh.dp=4",
    "fsdp": "mesh.fsdp=4 parallel.remat=selective",
}
SLOW = {
    "full": "mesh.dp=4 parallel.remat=full",
    "zero": "mesh.dp=4 parallel.remat=full optimizer.sharding=data",
    "step": "mesh.fsdp=8 parallel.fsdp_gather=step parallel.remat=full",
    "tensor": "mesh.dp=2 mesh.tp=2",
    "1f1b": "mesh.pp=4 schedule=1f1b",
    "selective": "mesh.pp=4 mesh.dp=2 schedule=1f1b parallel.remat=selective",
    "v_shape": "mesh.pp=4 schedule=v_shape chunks=2 parallel.remat=full",
    "gpipe": "mesh.pp=2 mesh.tp=2 schedule=gpipe",
    "zero_bubble": "mesh.pp=2 mesh.fsdp=2 schedule=zero_bubble",
}


@pytest.mark.parametrize(
    "layout",
    [*LAYOUTS.values(), *(pytest.param(one, marks=pytest.mark.slow, id=name) for name, one in SLOW.items())],
)
def test_memory_within_ten_percent_of_the_compiler(layout):
    job, counted, compiled = both(layout)
    memory = compiled.memory_analysis()
    assert counted.arguments == pytest.approx(memory.argument_size_in_bytes, rel=0.001)
    needed = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    needed += memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert counted.total == pytest.approx(needed, rel=0.1)
    moved = cost_of(compiled.as_text(), job.mesh).traffic
    # XLA may still find that two gathers are one; a gradient is reduced as often as was written
    large = {
        key: row.bytes for key, row in counted.traffic.items() if row.bytes > 1e6 and "tensor" not in key[0]
    }
    assert {key: size for key, size in large.items() if key[1] != "all-gather"} == pytest.approx(
        {key: moved[key].bytes for key in large if key[1] != "all-gather"}, rel=0.02
    )
    assert all(0 < moved[key].bytes <= 1.02 * size for key, size in large.items())


def both(layout: str):
    config = load_config(CONFIG, SIZES + layout.split())
    _, counted = estimate(config, parse_topology(f"cpu:{math.prod(vars(config.mesh).values())}"))
    job = make_job(config, jaxfb.make_mesh(**vars(config.mesh)))
    return job, counted, job.step.lower(job.state, job.batch).compile()
