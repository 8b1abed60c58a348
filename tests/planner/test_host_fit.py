"""A run on CPUs that the memory of the machine cannot hold is refused before anything is allocated, or before its first
update."""

import re
from types import SimpleNamespace

import jax
import pytest
from marks import some_slow
from tiny import write_own, write_tiny

from jaxfb import trainer
from jaxfb.cli import commands as cli
from jaxfb.config import load_config
from jaxfb.planner import host_fit
from jaxfb.planner.host_fit import check_host
from jaxfb.planner.topology import parse_topology
from jaxfb.planner.verdict import plan
from jaxfb.platforms import machine_memory

ON_ONE = ["mesh.data=8", "batch.rows=512"]


def refusal(monkeypatch, memory, name, *overrides):
    monkeypatch.setattr(host_fit, "host_memory", lambda: memory)
    with pytest.raises(ValueError, match=r"^\[memory\] the run needs") as refused:
        check_host(load_config(name, [*ON_ONE, *overrides]))
    return str(refused.value)


@pytest.mark.parametrize(
    "key, cut",
    [
        ("rows_per_microbatch", ["batch.rows_per_microbatch=16"]),
        ("num_microbatches", ["batch.rows_per_microbatch=null", "batch.num_microbatches=4"]),
    ],
)
def test_the_advice_is_a_change_that_fits(monkeypatch, key, cut):
    said = refusal(monkeypatch, int(100e9), "125m", *cut)
    assert re.search(r"needs [\d.]+ GB at the least, .* this machine has 100\.0 GB; use batch\.", said)
    change = re.search(r"; use (.*)$", said)[1].split()
    assert change[0].startswith(f"batch.{key}=")
    check_host(load_config("125m", [*ON_ONE, *cut, *change]))


def test_otherwise_it_is_the_largest_starter_config_that_fits(monkeypatch):
    said = refusal(monkeypatch, int(30e9), "1b")
    elsewhere = "or another machine: `jaxfb plan` computes what fits where"
    assert said.endswith(f"; use a smaller model, such as the starter config moe, {elsewhere}")
    said = refusal(monkeypatch, 10**6, "quickstart", "batch.rows=16", "batch.rows_per_microbatch=1")
    assert said.endswith(f"; use a smaller model, {elsewhere}")


def test_nothing_is_said_where_there_is_room_and_a_line_where_it_is_used(monkeypatch, tmp_path):
    config, lines = load_config(write_tiny(tmp_path, mesh={"data": -1}), ["batch.rows=16"]), []
    check_host(config, lines.append)
    assert lines == []
    monkeypatch.setattr(host_fit, "free_memory", lambda: 1000)
    check_host(config, lines.append)
    assert len(lines) == 1 and "of this machine's" in lines[0] and lines[0].endswith("are free")


def test_what_is_not_known_is_not_refused(monkeypatch, tmp_path):
    config = load_config("125m", ON_ONE)
    monkeypatch.setattr(host_fit, "host_memory", lambda: None)
    check_host(config)
    monkeypatch.setattr(host_fit, "host_memory", lambda: 1)
    check_host(load_config("grpo_arithmetic"))
    check_host(load_config("125m", ["mesh.data=3"]))  # the trainer names the devices
    monkeypatch.setattr(machine_memory, "MEMINFO", tmp_path / "nothing")
    assert machine_memory.free_memory() is None


def test_the_commands_refuse_before_the_text_is_read(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(host_fit, "host_memory", lambda: 1000)
    monkeypatch.setattr(trainer, "make_work", lambda *arguments: pytest.fail("the text was read"))
    assert cli.main(["train", str(write_tiny(tmp_path)), "mesh.data=-1", "batch.rows=16"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("jaxfb: [memory] the run needs ") and said.count("\n") == 1


SMALL = ["model.num_layers=1", "model.hidden_size=16", "mesh.data=1", "lr.warmup=0", "eval.every=null"]
ONE = ["batch.rows=8", "batch.updates=1", "batch.epochs=null"]
PAIRS = ["start.run=null", "start.tokenizer=bytes", "preferences.template=plain", "model.num_heads=4"]
PAIRS += ["plans.train.rows_per_microbatch=4"]
FEW = ["rollout.prompts=2", "rollout.samples_per_prompt=4", "rollout.rows_per_update=8"]
FEW += ["rollout.rollouts=1", "warm_start.updates=0", "task.held_out=16"]
FEW += [f"plans.{name}.rows_per_microbatch=4" for name in ("train", "logprob_old", "logprob_ref")]
COMMANDS = {
    "sft": ["sft", "sft", *SMALL, *ONE],
    "dpo": ["dpo", "dpo", *SMALL, *ONE, *PAIRS],
    "rl": ["rl", "grpo_arithmetic", *SMALL, *FEW],
}


def command_of(kind, directory, monkeypatch):
    """Returns a command that trains something tiny for a few updates."""
    if kind == "train":
        return ["train", str(write_tiny(directory, run={"updates": 2}, lr={"warmup": 0}))]
    if kind == "own":
        monkeypatch.chdir(directory)
        return ["train", write_own(directory).name, "mesh.data=1", "run.updates=1"]
    return [*COMMANDS[kind], f"run.dir={directory}/run"]


@pytest.mark.parametrize("kind", some_slow(["own", "train", "sft", "dpo", "rl"], ["own"]))
def test_every_command_refuses_an_update_larger_than_what_is_free(kind, monkeypatch, capsys, tmp_path):
    arguments = command_of(kind, tmp_path, monkeypatch)
    monkeypatch.setattr(host_fit, "free_memory", lambda: 1)
    monkeypatch.setattr(host_fit, "free_swap", lambda: 0)
    assert cli.main(arguments) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert re.match(
        r"jaxfb: \[memory\] the compiled update needs 0\.0 GB beside its state, but 0\.0 of this", said
    )
    assert "; use " in said
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(
        host_fit, "free_swap", lambda: 2**30
    )  # it fits with that, and the same command trains
    assert cli.main(arguments) == 0


@pytest.mark.slow
def test_the_update_is_compiled_once_and_its_program_is_what_runs(monkeypatch, caplog, tmp_path):
    seen = []
    monkeypatch.setattr(host_fit, "_check_program", lambda config, counted: seen.append(counted))
    with jax.log_compiles():
        assert cli.main(command_of("train", tmp_path, monkeypatch)) == 0
    assert len(seen) == 1 and seen[0].temp_size_in_bytes > 0
    compiled = [one for one in caplog.messages if one.startswith("Finished XLA compilation of jit(_update)")]
    assert len(compiled) == 1


def test_the_advice_beside_the_state_fits_by_the_compilers_count(monkeypatch):
    config = load_config("125m", ON_ONE)
    counted = SimpleNamespace(temp_size_in_bytes=17e9, output_size_in_bytes=10, alias_size_in_bytes=10)
    monkeypatch.setattr(host_fit, "free_memory", lambda: int(100e9))
    monkeypatch.setattr(host_fit, "free_swap", lambda: 0)
    with pytest.raises(
        ValueError, match=r"needs 136\.0 GB beside its state, but 100\.0 of .*; use batch\."
    ) as said:
        host_fit.check_of_programs(config)(SimpleNamespace(memory_analysis=lambda: counted))
    change = str(said.value).partition("; use ")[2]
    assert change == "batch.rows_per_microbatch=4"
    monkeypatch.setattr(host_fit, "free_memory", lambda: int(140e9))
    host_fit.check_of_programs(config)(SimpleNamespace(memory_analysis=lambda: counted))


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [[], ["precision.compute_dtype=bfloat16"], ["parallel.remat=layer"]])
def test_the_compiler_for_cpus_counts_no_less(overrides):
    config = load_config("quickstart", ["mesh.data=1", *overrides])
    verdict = plan(config, parse_topology("cpu:1"))
    assert verdict.compiled.temporaries >= host_fit.least_times(config) * verdict.estimate.temporaries
