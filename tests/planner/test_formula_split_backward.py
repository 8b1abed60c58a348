"""The formula counts what a backward in two passes keeps between them, and the head of a schedule by device."""

import jax
import pytest

from jaxfb.config import load_config
from jaxfb.forward_backward.layers import stage
from jaxfb.forward_backward.pipeline import executor
from jaxfb.planner import parse_topology
from jaxfb.planner.formula.memory import kept_bytes
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job, model_sizes
from jaxfb.planner.verdict import estimated

ONE_B = "mesh.fsdp=4 mesh.pipe=4 batch.rows=128 batch.rows_per_microbatch=1"
EIGHT_B = "mesh.pp=4 mesh.fsdp=32 mesh.tp=2 chunks=4 batch.rows_per_microbatch=1"
SMALL = (
    "model.num_layers=8 model.hidden_size=256 model.num_heads=2 model.num_kv_heads=1 model.mlp_size=1536 "
    "model.vocab_size=512 data.sequence_length=256 mesh.fsdp=1 mesh.pipe=4 mesh.data=1 batch.rows=16 "
    "batch.rows_per_microbatch=1"
)


@pytest.mark.parametrize(
    "config, topology, gigabytes, seconds",
    [
        # by libtpu 0.0.48; before, the formula had 6.2, 7.5 and 16.2 GB, and for the first 0.35 s
        (f"1b {ONE_B} schedule=zb_v chunks=2", "v5p:2x2x4", 7.86, 0.451),
        (
            f"1b {ONE_B} schedule=zero_bubble parallel.remat=layer parallel.fsdp_gather=layer "
            "model.tied_embeddings=false",
            "v5p:2x2x4",
            6.50,
            0.478,
        ),
        (
            f"8b {EIGHT_B} schedule=zero_bubble parallel.remat=selective parallel.fsdp_gather=step",
            "v5e:16x16",
            16.49,
            5.29,
        ),
    ],
)
def test_gradients_wait_for_the_pass_that_takes_those_of_weights(config, topology, gigabytes, seconds):
    name, *layout = config.split()
    found = estimated(load_config(f"configs/{name}.yaml", layout), parse_topology(topology))
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.05)
    assert found.step_seconds == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize("remat", ["none", "selective", "layer"])
@pytest.mark.parametrize("schedule, chunks", [("1f1b", 1), ("zero_bubble", 1), ("zb_v", 2)])
def test_what_a_pipeline_keeps_is_what_its_slots_take(monkeypatch, schedule, chunks, remat):
    """But for a number of each head that attention keeps of a token; and for jax 0.10, with which "selective" keeps one
    hidden state fewer.
    """
    layout = [*SMALL.split(), f"schedule={schedule}", f"chunks={chunks}", f"parallel.remat={remat}"]
    config, topology = load_config("configs/1b.yaml", layout), parse_topology("v5p:2x2x1")
    slots = []

    def counted(shapes, number, *rest):
        slots.append(number * sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes)))
        return empty_slots(shapes, number, *rest)

    empty_slots = executor.empty_slots
    monkeypatch.setattr(executor, "empty_slots", counted)
    monkeypatch.setattr(stage, "empty_slots", counted)
    job = make_job(config, abstract_mesh(config, 4, abstract_device(topology)))
    job.step.trace(job.state, job.batch)
    assert job.schedule is not None
    on_the_way = 2 * 256 * 256 * (len(job.schedule.program.forward_channels) + 1)
    assert kept_bytes(config, model_sizes(config), topology) == pytest.approx(
        sum(slots) + on_the_way, rel=0.07
    )
