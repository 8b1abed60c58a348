"""The same job as one process and as several: the same curve, and the same again after one of them is lost."""

import json
import os
import re
import signal
import subprocess
import sys

import pytest
from processes import PATIENCE, ROOT, finish, logs, start, wait_for
from quickly import flags
from tiny import write_tiny

from jaxfb.inference import complete
from jaxfb.inference.model import open_model
from jaxfb.inference.scores import Scorer, perplexity
from jaxfb.metrics import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.processes]

UPDATES, EVERY = 4, 2
SECTIONS = {
    "model": {"dropout": 0.1},
    "precision": {"compute_dtype": "float64"},
    "batch": {"rows": 18, "rows_per_microbatch": 2, "remainder": "pad"},
    "run": {"updates": UPDATES},
    "lr": {"name": "constant"},
    "eval": {"every": EVERY, "rows": 16, "batches": 2},
    "checkpoint": {"every": EVERY},
}
ONE_DEVICE = {}
HYBRID_FSDP = {"data": 2, "fsdp": 4}  # over two processes: data across, fsdp inside
STAGES = {"pipe": 2, "data": 2, "tensor": 2}  # over two processes: a stage each, so both hold all rows
CONTEXT = {"data": 2, "context": 2, "tensor": 2}  # over four processes: a sequence on two of them


def write(directory, data, mesh, **sections):
    directory.mkdir(exist_ok=True)
    sections = {**SECTIONS, "mesh": {"data": 1, **mesh}, "data": {"cache_dir": str(data)}, **sections}
    write_tiny(directory, **sections)


def run(directory, data, mesh, processes, devices, *arguments, **sections):
    write(directory, data, mesh, **sections)
    codes = finish(start(directory, processes, devices, *arguments))
    assert codes == [0] * processes, logs(directory, processes)
    return directory


def curve(directory):
    """(step, name) -> number: losses, gradient norms, held-out losses."""
    records = read_jsonl(directory / "run" / "metrics.jsonl")
    names = ("loss", "grad_norm", "eval/loss", "tokens")
    return {(record["step"], name): record[name] for record in records for name in names if name in record}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, data):
    """The job on one device."""
    return run(tmp_path_factory.mktemp("whole"), data, ONE_DEVICE, 1, 1)


@pytest.mark.parametrize(
    ("mesh", "processes", "devices"),
    [(HYBRID_FSDP, 1, 8), (HYBRID_FSDP, 2, 4), (STAGES, 2, 4), (CONTEXT, 4, 2)],
    ids=["1x8 data2 fsdp4", "2x4 data2 fsdp4", "2x4 pipe2 data2 tensor2", "4x2 data2 context2 tensor2"],
)
def test_the_curve_is_one_devices(tmp_path, data, whole, mesh, processes, devices):
    several = run(tmp_path, data, mesh, processes, devices)
    assert curve(several) == pytest.approx(curve(whole), rel=1e-10, abs=0)
    assert len(curve(whole)) == 3 * UPDATES + 2
    said = logs(several, processes)
    assert "4/4  loss" in said[0] and all("loss" not in text for text in said[1:])
    assert (several / "run" / "sample.txt").read_text().startswith("def ")
    assert not (several / "run" / ".shared").exists()


def test_two_processes_keep_their_parts_of_the_state_in_their_own_hosts_memory(tmp_path, data):
    """Also those of a checkpoint, from which a run with the state on the devices goes on."""
    mesh, more = {"data": 2, "fsdp": 2}, {"updates": UPDATES + EVERY}
    wanted = curve(run(tmp_path / "device", data, mesh, 1, 4, run=more))
    there = run(tmp_path / "host", data, mesh, 2, 2, optimizer={"memory": "host"})
    found = curve(there)
    assert len(found) == 3 * UPDATES + 2
    assert found == pytest.approx({key: wanted[key] for key in found}, rel=1e-10, abs=0)
    again = run(there, data, mesh, 2, 2, "--resume", optimizer={"memory": "device"}, run=more)
    assert curve(again) == pytest.approx(wanted, rel=1e-10, abs=0)


def test_two_processes_continue_and_score_as_one_does(tmp_path, whole):
    """Also where each has a replica of all parameters, so that one alone could do it."""
    prompts, out = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text("def one\nimport\n")
    how = ("--samples", 2, "--tokens", 6, "--temperature", 0.7, "--out", out)
    mesh = ("mesh.data=2", "mesh.tensor=2")
    jobs = start(whole, 2, 2, "--prompts", prompts, *how, *mesh, verb="generate")
    assert finish(jobs) == [0, 0], logs(whole, 2)
    model = open_model(whole / "tiny.yaml", ("mesh.tensor=2",))
    sampling = complete.Sampling(tokens=6, temperature=0.7, samples=2)
    wanted = complete.complete(model, ["def one", "import"], sampling)
    assert [json.loads(line)["answers"] for line in out.read_text().splitlines()] == wanted
    jobs = start(whole, 2, 2, "--text", prompts, "--json", "mesh.fsdp=4", verb="eval")
    assert finish(jobs) == [0, 0], logs(whole, 2)
    first, second = logs(whole, 2)
    found = json.loads(first[first.index("{") :])["scores"][str(prompts)]
    scorer = Scorer(open_model(whole / "tiny.yaml", ("mesh.fsdp=2",), on_mesh=True))
    assert found == pytest.approx(perplexity(scorer, prompts.read_text()), rel=1e-10)
    assert "scores" not in second


@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_other_and_what_is_saved_goes_on(tmp_path, data, whole, lost):
    write(tmp_path, data, HYBRID_FSDP, run={"updates": 100_000}, hosts={"lost_after": 5})
    jobs = start(tmp_path, 2, 4)
    wait_for(tmp_path / "run" / "checkpoints" / str(EVERY), jobs)
    jobs[lost].send_signal(signal.SIGKILL)
    codes = finish(jobs)
    said = logs(tmp_path, 2)[1 - lost]
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == 76, said
    assert re.search(rf"jaxfb: \[hosts\] process {lost} of 2.*update \d+ is saved.*--resume", said), said
    if lost == 1:  # goes on as one process
        again = run(tmp_path, data, HYBRID_FSDP, 1, 8, "--resume", run={"updates": 2 * UPDATES})
        assert f"of {2 * UPDATES}" in re.search(r"resuming .* after update \d+ (.*)", logs(again, 1)[0])[1]
        goes_on, began = curve(again), curve(whole)
        assert goes_on.keys() > began.keys()
        assert {key: goes_on[key] for key in began} == pytest.approx(began, rel=1e-10, abs=0)


@pytest.mark.parametrize(("lost", "code"), [(0, 76), (1, 0)])
def test_a_process_lost_after_the_last_update_takes_nothing_with_it(tmp_path, data, whole, lost, code):
    """Whether all was written only process 0 knows."""
    write(tmp_path, data, HYBRID_FSDP, hosts={"lost_after": 5})
    kill = ({} if k == 1 - lost else {"JAXFB_KILL_AT": "end"} for k in range(2))
    codes = finish(start(tmp_path, 2, 4, environments=list(kill)))
    assert codes[lost] == -signal.SIGKILL and codes[1 - lost] == code, logs(tmp_path, 2)
    said = logs(tmp_path, 2)[1 - lost]
    assert lost == 0 or "Check failure" not in said
    assert (
        "process 1 of 2 ended early; all was written" if lost else "start the run again with --resume"
    ) in said
    assert curve(tmp_path) == pytest.approx(curve(whole), rel=1e-10, abs=0)


def launched(directory, processes, *arguments, **environment):
    """`jaxfb launch` without a restart, each process with one device; (exit code, what was printed)."""
    command = [sys.executable, "-m", "jaxfb.cli", "launch", "--processes", str(processes), "--restarts", "0"]
    command += ["train", str(directory / "tiny.yaml"), *arguments]
    own = {
        "XLA_FLAGS": flags(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    environment = {**os.environ, **own, **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    return done.returncode, done.stdout + done.stderr


def test_with_one_replica_instead_of_two_a_killed_job_goes_on_with_the_same_rows(tmp_path, data, whole):
    write(tmp_path, data, {"data": -1})
    code, said = launched(tmp_path, 2, JAXFB_KILL_AT="save.done")
    assert code != 0 and "killed by SIGKILL" in said, said
    code, said = launched(tmp_path, 1, "--resume")
    assert code == 0 and f"after update {EVERY} of {UPDATES}" in said, said
    assert re.search(r"\d+ rows on 1 replica:", said)
    assert curve(tmp_path) == pytest.approx(curve(whole), rel=1e-10, abs=0)


def test_a_signal_to_one_process_ends_all_after_the_same_update(tmp_path, data):
    write(tmp_path, data, HYBRID_FSDP, run={"updates": 100_000})
    jobs = start(tmp_path, 2, 4)
    wait_for(tmp_path / "run" / "checkpoints" / str(EVERY), jobs)
    jobs[1].send_signal(signal.SIGTERM)
    assert finish(jobs) == [75, 75], logs(tmp_path, 2)
    stopped = int(re.search(r"SIGTERM: saved after update (\d+) of", logs(tmp_path, 2)[0])[1])
    assert (tmp_path / "run" / "checkpoints" / str(stopped)).is_dir()
    assert finish(start(tmp_path, 2, 4)) == [2, 2]  # what process 0 finds in the way, all refuse
    assert all(f"contains a run saved at update {stopped}" in text for text in logs(tmp_path, 2))
    said = []
    for processes, devices, mesh in ((2, 4, []), (1, 1, ["mesh.data=1", "mesh.fsdp=1"])):
        assert finish(start(tmp_path, processes, devices, *mesh, verb="eval")) == [0] * processes
        said.append(
            [line for line in logs(tmp_path, 1)[0].splitlines() if re.match(r".*(after \d|  \w+ )", line)]
        )
    assert said[0] == said[1] and f"after {stopped} updates" in said[0][0] and len(said[0]) == 4


def test_a_process_that_is_refused_before_it_joins_ends_the_other_with_its_reason(tmp_path, data):
    """The other would wait for it for hosts.timeout; under a `jaxfb launch` on each host, at every restart."""
    write(tmp_path, data, {"data": 2})
    jobs = start(tmp_path, 2, 1, own={1: ["model.num_heads=3"]}, verb="launch train")
    assert finish(jobs) == [2, 2], logs(tmp_path, 2)
    said = logs(tmp_path, 1)[0]
    assert "process 1 of 2" in said and "is refused" in said and "num_heads=3" in said
    assert "starting again" not in said


def test_the_local_recipe_trains(tmp_path, data):
    write(
        tmp_path, data, {"data": 4}, run={"updates": 1}, lr={"warmup": 0}, eval={"every": None, "prompt": ""}
    )
    command = [str(ROOT / "examples" / "launch" / "local.sh"), str(tmp_path / "tiny.yaml")]
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "DEVICES": "2",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": flags(),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0 and "1/1  loss" in done.stdout, done.stderr
    assert re.search(r"processes +2\n", done.stdout)
