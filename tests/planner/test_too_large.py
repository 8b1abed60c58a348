"""A run that does not fit is answered with the plan's table and with changes that would fit."""

import re
from types import SimpleNamespace

import jax
import pytest
from tiny import write_tiny

from jaxfb import rl, trainer
from jaxfb.cli import commands as cli
from jaxfb.config import load_config
from jaxfb.planner import parse_topology, too_large
from jaxfb.planner.too_large import advice, is_lack_of_memory, remedy, topology_of
from jaxfb.planner.verdict import estimated
from jaxfb.platforms import pinned_memory
from jaxfb.refusal import Refused

H100 = [SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")] * 8
BIG = "model.vocab_size=384 model.hidden_size=1024 model.mlp_size=4096 model.num_layers=8 data.sequence_length=2048"
BIG = [*BIG.split(), "batch.rows=512", "batch.rows_per_microbatch=64"]
BFLOAT16 = "precision.compute_dtype=bfloat16"


def test_devices_are_known_by_their_kind():
    assert topology_of(H100).chip.name == "h100" and topology_of(H100).num_devices == 8
    v5e = [SimpleNamespace(platform="tpu", device_kind="TPU v5 lite")] * 4
    assert topology_of(v5e).chip.name == "v5e"
    assert topology_of(jax.devices()).chip is None


def needed(config):
    return float(re.search(r"total +([\d.]+) GB", advice(config, H100, None))[1])


@pytest.mark.slow
def test_three_changes_are_proposed_that_fit_by_the_same_formula(tmp_path):
    config = load_config(write_tiny(tmp_path, mesh={"data": -1}), BIG)
    now = needed(config)
    text = advice(config, H100, now * 0.9e9)
    changes = re.findall(r"^  ((?:[\w.]+=\w+ ?)+): ([\d.]+) GB$", text, re.M)
    assert 1 <= len(changes) <= 3 and "total" in text and "of a device" in text
    for change, then in changes:
        smaller = load_config(write_tiny(tmp_path, mesh={"data": -1}), [*BIG, *change.split()])
        assert needed(smaller) == pytest.approx(float(then), abs=0.011) and float(then) < 0.81 * now
    assert "shorter rows" in advice(config, H100, 1000.0)


def test_half_a_layer_ahead_is_proposed_where_a_whole_one_is_gathered(tmp_path):
    config = load_config(
        write_tiny(tmp_path, mesh={"data": 1, "fsdp": 8}), [*BIG, "model.mlp_size=16384", BFLOAT16]
    )
    topology = topology_of(H100)
    proposed = {" ".join(change): verdict.needed for change, verdict in too_large.changes(config, topology)}
    weights, gradients = (3 * 1024 * 16384 * size for size in (2, 4))
    less = estimated(config, topology).needed - proposed["parallel.gather_ahead=half"]
    assert less == pytest.approx(weights + gradients, rel=0.01)
    assert proposed["parallel.gather_ahead=false"] < proposed["parallel.gather_ahead=half"]


def test_gradients_that_wait_in_a_pipeline_are_proposed_to_be_reduced_at_the_end(tmp_path):
    """By the formula two layers' gradients less; nothing is proposed where none wait."""
    mesh = {"pipe": 2, "data": 2}
    config = load_config(write_tiny(tmp_path, mesh=mesh), [*BIG, "model.num_layers=4"])
    name = "parallel.overlap_grad_reduce=false"
    proposed = {
        where: [" ".join(change) for change, _ in too_large.changes(config, parse_topology(where))]
        for where in ("v5p:2x2x1", "v5e:2x2")
    }
    assert name in proposed["v5p:2x2x1"] and name not in proposed["v5e:2x2"]


@pytest.mark.parametrize(
    "name, layout, topology, change",
    [
        ("8b", "parallel.fsdp_gather=step batch.rows=64", "v5e:4x4", "parallel.fsdp_gather=layer"),
        ("8b", "mesh.data=4 mesh.fsdp=2 batch.rows=64", "v6e:2x4", "mesh.data=1 mesh.fsdp=8"),
        ("8b", "mesh.fsdp=4 batch.rows=64", "v6e:2x2", "optimizer.memory=host"),
        (
            "1b",
            "mesh.data=4 mesh.fsdp=1 batch.rows=64",
            "v5e:2x2",
            "mesh.data=1 mesh.fsdp=4 parallel.fsdp_gather=layer parallel.remat=full",
        ),
    ],
)
def test_what_cuts_or_moves_parameters_and_state_is_proposed(name, layout, topology, change):
    config, machine = load_config(f"configs/{name}.yaml", layout.split()), parse_topology(topology)
    assert f"  {change}: " in too_large.would_fit(config, estimated(config, machine))
    assert estimated(load_config(f"configs/{name}.yaml", [*layout.split(), *change.split()]), machine).fits


SFT = ["model.hidden_size=1024", "model.num_layers=8", "conversations.sequence_length=1024", "batch.rows=512"]
RL = [
    "task.digits=1",
    "task.held_out=8",
    "model.hidden_size=1024",
    "model.num_layers=8",
    "rollout.prompts=512",
    "rollout.rows_per_update=512",
]
BY_ROWS = [f"plans.train.{key}=null" for key in ("max_tokens_per_microbatch", "widths")]
BY_ROWS += ["plans.train.packing=false"]
POST_TRAINING = {
    "sft": [*SFT, *BY_ROWS, "plans.train.rows_per_microbatch=64", "plans.eval.rows_per_microbatch=64"],
    "ppo_arithmetic": [*RL, "plans.train.rows_per_microbatch=64", "plans.critic.rows_per_microbatch=64"],
    "grpo_arithmetic": [
        *RL,
        "plans.train.rows_per_microbatch=null",
        "plans.train.max_tokens_per_microbatch=8192",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", POST_TRAINING)
def test_changes_of_post_training_are_keys_of_its_own_and_need_what_they_promise(name):
    config = load_config(name, POST_TRAINING[name])
    now = estimated(config, topology_of(H100)).needed
    changes = re.findall(r"^  ((?:[\w.]+=\w+ ?)+): ([\d.]+) GB$", advice(config, H100, now), re.M)
    assert 1 <= len(changes) <= 3
    for change, then in changes:
        smaller = load_config(name, [*POST_TRAINING[name], *change.split()])
        assert estimated(smaller, topology_of(H100)).needed == pytest.approx(float(then) * 1e9, abs=0.006e9)


BY_NUMBER = ["batch.rows_per_microbatch=null", "batch.num_microbatches=1"]


@pytest.mark.slow
def test_the_number_of_microbatches_is_changed_where_it_cuts_the_rows(tmp_path):
    config = load_config(write_tiny(tmp_path, mesh={"data": -1}), [*BIG, *BY_NUMBER])
    for change, _ in re.findall(r"^  ((?:[\w.]+=\w+ ?)+): ([\d.]+) GB$", advice(config, H100, None), re.M):
        load_config(write_tiny(tmp_path, mesh={"data": -1}), [*BIG, *BY_NUMBER, *change.split()])


def test_what_cannot_be_planned_gets_a_sentence_all_the_same(monkeypatch):
    def refuses(*arguments):
        raise Refused("[model] jaxfb plan works for the built-in transformer alone")

    assert "use fewer rows or tokens" in remedy(None)
    with monkeypatch.context() as patch:
        patch.setattr(too_large, "advice", refuses)
        assert "use fewer rows or tokens" in remedy(load_config("quickstart"))


HOST_IS_FULL = (
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes with allocator xla_gpu_host_bfc"
)


KEEP_LESS, RAISE = (
    "keep less on the host with",
    f"set the environment variable {pinned_memory.LIMIT} to as much as",
)
BOTH = ["optimizer.memory=host", "parallel.remat=offload"]


@pytest.mark.parametrize(
    ("overrides", "gib", "advice"),
    [
        (BOTH, 2000, f"{KEEP_LESS} optimizer.memory=device parallel.remat=layer or {RAISE} 2000"),
        (BOTH[:1], 100, f"{KEEP_LESS} optimizer.memory=device"),
        ([], 2000, f"{RAISE} 2000"),
        ([], 100, "use more hosts, or hosts with more memory"),
    ],
)
def test_a_lack_of_the_hosts_memory_is_answered_with_its_limit(monkeypatch, overrides, gib, advice):
    monkeypatch.setenv(pinned_memory.LIMIT, "100")
    monkeypatch.setattr(too_large, "host_memory", lambda: gib * 2**30)
    answer = remedy(load_config("quickstart", overrides), jax.errors.JaxRuntimeError(HOST_IS_FULL))
    assert answer == f"each GPU may use 100 GiB of the host's memory, and no more is free; {advice}"
    monkeypatch.delenv(pinned_memory.LIMIT)
    assert "64 GiB" in remedy(None, jax.errors.JaxRuntimeError(HOST_IS_FULL))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["sft", "generate"])
def test_other_commands_end_without_a_traceback_too(verb, monkeypatch, capsys, tmp_path):
    def runs_out(*arguments, **more):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")

    monkeypatch.setattr(rl, "post_train", runs_out)
    monkeypatch.setattr(trainer, "generate", runs_out)
    arguments = ["sft"] if verb == "sft" else [str(tmp_path), "--prompt", "a"]
    assert cli.main([verb, *arguments, *(["mesh.data=1"] if verb == "sft" else [])]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxfb: [memory] the run does not fit: ") and "Traceback" not in said
    assert ("optimizer state" in said) == (verb == "sft")


@pytest.mark.parametrize(
    "error",
    [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")],
)
def test_a_command_without_memory_ends_with_the_table_and_not_with_a_traceback(
    tmp_path, monkeypatch, capsys, error
):
    def train(*arguments, **more):
        raise error

    monkeypatch.setattr(trainer, "train", train)
    assert (
        cli.main(
            ["train", str(write_tiny(tmp_path)), "model.vocab_size=384", "mesh.data=-1", "batch.rows=16"]
        )
        == 2
    )
    said = capsys.readouterr().err
    assert said.startswith("jaxfb: [memory] the run does not fit: ") and "optimizer state" in said
    assert "Traceback" not in said
    assert not is_lack_of_memory(jax.errors.JaxRuntimeError("INTERNAL: other"))
    of_a_disk = "RESOURCE_EXHAUSTED: trace/vm.xplane.pb; No space left on device"
    assert not is_lack_of_memory(jax.errors.JaxRuntimeError(of_a_disk))
