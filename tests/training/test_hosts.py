"""Several processes: who is who, who differs in what, who is gone. Without a device, but for one job of two."""

import errno
import io
import itertools
import json
import socket
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import jax
import pytest
import yaml
from processes import finish, free_port, launch, logs, start, wait_for
from tiny import write_tiny

import jaxfb
from jaxfb.batch_plan import BatchPlan
from jaxfb.config import load_config
from jaxfb.config.operation import HostsConfig
from jaxfb.process.position import Position
from jaxfb.refusal import Refused, StorageError
from jaxfb.training.job.agreement import check_agreement, what_runs
from jaxfb.training.job.cluster import Place, find_place
from jaxfb.training.job.hosts import Hosts, LostProcess
from jaxfb.training.job.interrupt import Stopped
from jaxfb.training.job.join import _bind_address
from jaxfb.training.job.watch import EXIT_CODES, Watch, start_again
from jaxfb.training.rows.batches import rows_here
from jaxfb.training.run_dir import RunDirectory

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
GIVEN = {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}


@pytest.mark.parametrize(
    ("config", "environment", "place"),
    [
        ({}, {}, None),
        ({"processes": 1}, {}, None),
        ({"coordinator": "a:1", "processes": 2, "process_id": 1}, {}, Place("a:1", 2, 1)),
        ({}, GIVEN, Place("a:1", 4, 3)),
        ({"process_id": 0}, GIVEN, Place("a:1", 4, 0)),
        ({}, SLURM, Place("node003:61517", 2, 1)),
        ({}, {**SLURM, "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"cluster": "none"}, SLURM, None),
        ({"cluster": "slurm"}, SLURM, Place("node003:61517", 2, 1)),
        ({"coordinator": "b:2"}, SLURM, Place("b:2", 2, 1)),
        ({"coordinator": "[::1]:2"}, SLURM, Place("[::1]:2", 2, 1)),
        # one accelerator each where a host runs several, all of them where it runs one
        (
            {},
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "5"},
            Place("node003:61517", 2, 1, (5,)),
        ),
        (
            {"local_devices": (4, 5)},
            {**SLURM, "SLURM_STEP_TASKS_PER_NODE": "2"},
            Place("node003:61517", 2, 1, (4, 5)),
        ),
        (
            {"coordinator": "a:1"},
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            Place("a:1", 2, 1),
        ),
        ({}, {"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
    ],
)
def test_a_process_finds_its_place(config, environment, place, monkeypatch):
    for name, value in environment.items():  # jax's own detection reads the process's environment
        monkeypatch.setenv(name, value)
    assert find_place(HostsConfig(**config), environment) == place


@pytest.mark.parametrize(
    ("coordinator", "bound"),
    [
        *(("127.0.0.1:81", "127.0.0.1:81"), ("localhost:81", "localhost:81"), ("node0:81", None)),
        *(("198.51.100.77:81", None), ("0.0.0.0:81", None), ("[2001:db8::77]:81", None), ("[::]:81", None)),
    ],
)
def test_a_coordinator_at_an_address_of_its_machine_listens_there_alone(coordinator, bound):
    """198.51.100.* and 2001:db8:* are for documentation, and so of no machine; a name may mean loopback here alone."""
    assert _bind_address(coordinator) == bound


def test_a_coordinator_at_the_address_of_a_card_listens_there_alone(monkeypatch):
    monkeypatch.setattr(socket, "create_server", lambda place, family: io.BytesIO())
    assert _bind_address("198.51.100.77:81") == "198.51.100.77:81"
    assert _bind_address("[::1]:81") == "[::1]:81"


@pytest.mark.parametrize(
    ("config", "environment", "sentence"),
    [
        (
            {"coordinator": "a:1"},
            {},
            "coordinator=a:1 is given but not processes and process_id; give all of",
        ),
        ({"processes": 2, "process_id": 0}, {}, "processes=2, process_id=0 is given but not coordinator"),
        ({}, {"JAX_PROCESS_ID": "0"}, "process_id=0 is given but not coordinator and processes"),
        ({}, {**GIVEN, "JAX_NUM_PROCESSES": "four"}, r"\$JAX_NUM_PROCESSES='four' must be a number"),
        ({"process_id": 4}, GIVEN, "process_id=4 must be below processes=4.*use 0 to 3"),
        ({"coordinator": "a"}, GIVEN, "coordinator='a' must be HOST:PORT, .*; try a:8476"),
        ({"coordinator": "a:0"}, GIVEN, "coordinator='a:0' must be HOST:PORT, .* up to 65535; try a:8476"),
        ({"coordinator": "a:65536"}, GIVEN, "coordinator='a:65536' must be HOST:PORT, .*; try a:8476"),
        ({"coordinator": "::1:8476"}, GIVEN, r"coordinator='::1:8476' must be .*; try \[::1\]:8476"),
        ({"coordinator": "::1"}, GIVEN, r"coordinator='::1' must be HOST:PORT, .*; try \[::1\]:8476"),
        ({"coordinator": "[fe80::1]"}, GIVEN, r".*IPv6 in brackets.*; try \[fe80::1\]:8476"),
        ({"coordinator": "[a]:1"}, GIVEN, r"coordinator='\[a\]:1' must be HOST:PORT, .*; try localhost:8476"),
        ({"coordinator": "a..b:1"}, GIVEN, "coordinator='a..b:1' must be HOST:PORT, .*; try localhost:8476"),
        ({}, {**GIVEN, "JAX_NUM_PROCESSES": "0"}, "processes=0 must be at least 1; use 1 to run alone"),
        ({"cluster": "slum"}, {}, "cluster='slum' is not known to jax; use auto, none or one of .*slurm"),
        ({"cluster": "slurm"}, {}, "this process was not started by it; use cluster=auto"),
        ({}, {"PMI_SIZE": "8", "PMI_RANK": "3"}, "PMI numbers this process 3 of 8, but does not give"),
    ],
)
def test_half_a_place_is_refused(config, environment, sentence):
    with pytest.raises(ValueError, match=sentence):
        find_place(HostsConfig(**config), environment)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_TASKS_PER_NODE"])
def test_what_a_launcher_left_behind_is_refused_in_a_sentence(name, monkeypatch):
    """It was a sentence of Python's about the literal of an int."""
    for variable, value in {**SLURM, name: "two"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(
        Refused, match="set in the environment cannot be read: .*'two'; correct or unset it, or use "
    ):
        find_place(HostsConfig())


def test_who_differs_in_what_is_one_sentence():
    facts = [{"jax": "0.10.2", "batch.rows": 8}, {"jax": "0.10.2", "batch.rows": 16}]
    check_agreement("config", [facts[0]] * 4, list("abcd"))
    with pytest.raises(ValueError) as refusal:
        check_agreement("config", [*facts, *[facts[0]] * 3, {"batch.rows": 8}], list("abcdef"))
    assert str(refusal.value) == (
        "[hosts] the 6 processes differ in config: jax is 0.10.2 on processes 0-4 but (absent) on process 5 (f); "
        "batch.rows is 8 on processes 0, 2-5 but 16 on process 1 (b); start all with the same"
    )


def test_where_a_job_runs_is_no_difference(tmp_path):
    here, there = (load_config(write_tiny(tmp_path), [f"hosts.process_id={index}"]) for index in range(2))
    assert what_runs(here) == what_runs(there)
    assert what_runs(here) != what_runs(load_config(write_tiny(tmp_path), ["batch.rows=16"]))
    assert {"jax", "jaxfb's source", "model.num_layers"} <= what_runs(here).keys()


@pytest.mark.parametrize(
    "name, value", [("jax_default_prng_impl", "rbg"), ("jax_threefry_partitionable", False)]
)
def test_processes_with_another_setting_of_random_numbers_differ(tmp_path, name, value):
    """Cut over the processes, such parameters were trained on, and their first checkpoint could not be written."""
    config, before = load_config(write_tiny(tmp_path)), getattr(jax.config, name)
    usual = what_runs(config)
    jax.config.update(name, value)
    try:
        assert {key for key, one in what_runs(config).items() if one != usual[key]} == {name}
    finally:
        jax.config.update(name, before)


def test_processes_with_other_flags_of_the_compiler_differ(tmp_path, monkeypatch):
    """One computed with other bits: the copies differed, and the sentence was about weights or a broken device."""
    config, flags = load_config(write_tiny(tmp_path)), tmp_path / "flags"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=false --xla_dump_to=/a")
    usual = what_runs(config)
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/b --xla_force_host_platform_device_count=4 " * 2)
    assert differing(what_runs(config), usual) == {"XLA_FLAGS --xla_cpu_enable_fast_math"}
    flags.write_text("--xla_cpu_enable_fast_math=false\n--xla_gpu_per_fusion_autotune_cache_dir=/c")
    monkeypatch.setenv("XLA_FLAGS", str(flags))
    assert what_runs(config) == usual
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_tpu_rwb_fusion")
    assert differing(what_runs(config), usual) == {"LIBTPU_INIT_ARGS --xla_tpu_rwb_fusion"}


def differing(facts, others):
    return {name for name in {**facts, **others} if facts.get(name) != others.get(name)}


@pytest.mark.parametrize(
    ("mesh", "of_each"),
    [
        ({"data": 2, "fsdp": 4}, [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]),
        ({"data": 2, "context": 2, "tensor": 2}, [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]),
        ({"pipe": 2, "data": 4}, [list(range(16))] * 2),  # a stage each
    ],
    ids=str,
)
def test_a_process_reads_the_rows_of_its_replicas_and_no_others(mesh, of_each):
    mesh = jaxfb.make_mesh(**mesh)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    plan = BatchPlan(rows=16, rows_per_microbatch=1 if replicas == 8 else 2, data_parallel=replicas)
    halves = tuple(mesh.devices.flat[:4]), tuple(mesh.devices.flat[4:])
    assert [rows_here(plan, mesh, half).tolist() for half in halves] == of_each
    assert sorted(rows_here(plan, mesh)) == list(range(16))


@pytest.mark.parametrize("path", sorted(LAUNCH.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_jobset_says_the_same_number_of_hosts_everywhere(path):
    jobset = yaml.safe_load(path.read_text())
    [job] = jobset["spec"]["replicatedJobs"]
    template = job["template"]["spec"]
    [container] = template["template"]["spec"]["containers"]
    assert template["completionMode"] == "Indexed" and template["parallelism"] == template["completions"]
    assert template["template"]["spec"]["restartPolicy"] == "Never" and "--resume" in container["command"]
    told = {variable["name"]: variable.get("value") for variable in container.get("env", [])}
    if told:
        first = f"{jobset['metadata']['name']}-{job['name']}-0-0.{jobset['metadata']['name']}"
        environment = {**told, "JAX_PROCESS_ID": "1"}
        assert find_place(HostsConfig(), environment) == Place(f"{first}:8476", template["parallelism"], 1)


def test_another_directory_of_the_same_name_is_noticed(tmp_path):
    one, other = RunDirectory(tmp_path / "one"), RunDirectory(tmp_path / "other")
    for directory in (one, other):
        directory.path.mkdir()
    stale = other.mark()
    mark = one.mark()
    assert one.shows(mark, 0) and not other.shows(mark, 0) and stale != mark
    one.unmark()
    assert not one.shows(mark, 0) and not list(one.path.iterdir())


class Store:
    """The coordination service's keys and values, in memory."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, text, allow_overwrite=False):
        self.values[key] = text

    def blocking_key_value_get(self, key, milliseconds):
        deadline = time.monotonic() + milliseconds / 1000
        while key not in self.values:
            if time.monotonic() > deadline:
                raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
            time.sleep(0.01)
        return self.values[key]

    def key_value_dir_get(self, prefix):
        return [(key, text) for key, text in self.values.items() if key.startswith(prefix)]


def watch(store, index, position=None, **config):
    names = [f"process {k} of 3" for k in range(3)]
    made = Watch(store, "job", index, names, HostsConfig(**config), position or Position())
    made.start()
    return made


def test_a_process_that_hears_of_the_end_of_another_looks_at_once():
    """Process 0 waits 10 s for those that it ends; one that looked 5 s later found it gone."""
    store = Store()
    store.key_value_set("job/failed/0", '["refuses", "there is no file"]')
    made = Watch(store, "job", 1, [f"process {k} of 2" for k in range(2)], HostsConfig(), Position())
    made._every = 1000.0  # seconds
    made.start()
    try:
        assert "process 0 of 2 is refused: there is no file" in (made.cause(20) or "")
        assert made.kind == "refuses"
    finally:
        made.stop()


def test_process_0_leaves_with_a_refusal_only_after_the_others_have_read_it():
    """It runs the store: gone before, the others would end with another sentence than the reason."""

    def refuse():
        raise ValueError("no")

    def run(hosts):
        with pytest.raises(ValueError, match="no"):
            hosts.first(refuse)
        left.append(hosts.index)

    store, left = Store(), []
    first, second = (of_two(store, index) for index in (0, 1))
    thread = threading.Thread(target=run, args=[first])
    thread.start()
    thread.join(0.3)
    assert left == []
    run(second)
    thread.join(5)
    assert left == [1, 0]


def test_where_the_coordinator_ends_the_job_the_last_word_is_a_sentence(monkeypatch):
    """As where a process was started again on its own: a stack trace of C++ and exit code 134 was all there was."""
    store, hung = Store(), threading.Event()
    first, second = (of_two(store, index) for index in (0, 1))
    for hosts in (first, second):
        hosts._coordinator = "a:1"
    monkeypatch.setattr("jaxfb.training.job.hosts.ABORT_PATIENCE", 0.2)
    monkeypatch.setattr("jaxfb.training.job.hosts.is_answering", lambda address, seconds: True)
    assert first._before_abort() is None and second._before_abort() is None  # an abort for another reason
    monkeypatch.setattr(store, "key_value_dir_get", lambda key: hung.wait(10))
    for hosts in (first, second):
        said = hosts._before_abort()
        assert "the coordinator has ended the job" in said and f"; process {hosts.index} of 2" in said
    hung.set()
    monkeypatch.setattr("jaxfb.training.job.hosts.is_answering", lambda address, seconds: False)
    assert "process 0 of 2, the coordinator at a:1, is gone" in second._before_abort()


def of_two(store, index):
    """One of two processes that share a store, without `jax.distributed`."""
    hosts = Hosts.__new__(Hosts)
    hosts._client, hosts.index, hosts.count, hosts.config = store, index, 2, HostsConfig()
    hosts._prefix, hosts._calls, hosts._advice = "job", itertools.count(), start_again
    return hosts


def test_where_a_compiled_function_finds_another_process_gone_that_process_is_named(monkeypatch):
    """JAX raises a plain ValueError then; it was printed with its traceback, and the process ended with exit code 1."""
    monkeypatch.setattr("jaxfb.training.job.hosts.atexit.register", lambda *_: None)
    store = Store()
    watches = [watch(store, index, lost_after=15.0) for index in range(3)]
    hosts = of_two(store, 0)
    hosts._advice = lambda: "start again"
    try:
        for other in watches[1:]:
            other.fail("OSError: disk full")
        with pytest.raises(LostProcess, match="process 1 of 3 failed: OSError: disk full.*; start again"):
            hosts._fail(watches[0], ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"))
    finally:
        [one.stop() for one in watches]


def test_where_a_computation_breaks_though_all_are_alive_the_job_ends_as_lost(monkeypatch):
    """Gloo reads for 30 s at most: a job that was suspended for longer ended with two tracebacks and exit code 1."""
    monkeypatch.setattr("jaxfb.training.job.hosts.atexit.register", lambda *_: None)
    monkeypatch.setattr("jaxfb.training.job.hosts.SLICE", 0.1)
    store = Store()
    watches = [watch(store, index, lost_after=1.0) for index in range(3)]
    alone = watch(Store(), 1, lost_after=60.0)
    hosts, timeout = of_two(store, 1), "UNKNOWN: Gloo ReduceScatter failed: Read timeout [127.0.0.1]:4"
    hosts.config = HostsConfig(lost_after=1.0)
    try:
        with pytest.raises(
            LostProcess, match="though none is lost.* suspended .*Read timeout.*; start"
        ) as ended:
            hosts._fail(watches[1], jax.errors.JaxRuntimeError(timeout))
        assert ended.value.exit_code == 76
        assert "though none is lost" in json.loads(store.values["job/failed/1"])[1]
        hosts._fail(alone, jax.errors.JaxRuntimeError("INTERNAL: a bug"))  # which keeps its traceback
    finally:
        [one.stop() for one in [*watches, alone]]


def test_a_process_that_ends_early_is_not_waited_for(capsys, monkeypatch):
    """jax would wait for it, and abort the others minutes after they have done everything."""
    left, store = [], Store()
    monkeypatch.setattr("jaxfb.training.job.hosts.leave_coordination", lambda: left.append(1))
    hosts, one, two = of_two(store, 0), watch(store, 0, lost_after=1.0), watch(store, 2, lost_after=60.0)
    try:
        two.fail("OSError: disk full")  # that of another process hides nothing
        thread = threading.Thread(target=hosts._end_together, args=[one])
        thread.start()
        thread.join(0.2)
        assert thread.is_alive() and left == []
        thread.join(20)
        assert not thread.is_alive() and left == [1]
    finally:
        one.stop(), two.stop()
    assert "process 1 of 2 ended early; all was written before, nothing is missing" in capsys.readouterr().err


def test_processes_that_all_come_to_the_end_leave_it_to_jax(monkeypatch, capsys):
    left, store = [], Store()
    monkeypatch.setattr("jaxfb.training.job.hosts.leave_coordination", lambda: left.append(1))
    hosts = [of_two(store, index) for index in (0, 1)]
    watches = [watch(store, index, lost_after=60.0) for index in (0, 1)]
    threads = [
        threading.Thread(target=one._end_together, args=[its])
        for one, its in zip(hosts, watches, strict=True)
    ]
    [thread.start() for thread in threads]
    [thread.join(10) for thread in threads]
    [one.stop() for one in watches]
    assert not any(thread.is_alive() for thread in threads) and left == []
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_process_without_a_sign_of_life_is_named():
    store = Store()
    watches = [watch(store, index, lost_after=1.0) for index in range(3)]
    try:
        assert watches[0].cause(2.0) is None
        watches[1].stop()
        said = watches[0].cause(30.0)
        assert said.startswith("[hosts] process 1 of 3 has given no sign of life for 1 s and counts as lost")
        assert watches[2].cause(30.0).startswith("[hosts] process 1 of 3 has given no sign of life")
    finally:
        [one.stop() for one in watches]


def test_a_process_that_fails_says_why():
    store = Store()
    one, two = watch(store, 0, lost_after=1.0), watch(store, 1, lost_after=1.0)
    try:
        two.fail("OSError: disk full")
        assert one.cause(30.0) == "[hosts] process 1 of 3 failed: OSError: disk full; process 0 of 3 ends"
    finally:
        one.stop(), two.stop()


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (Refused("[model] num_heads=3 is wrong"), 2, "is refused: [model] num_heads=3 is wrong"),
        (StorageError("the disk is full"), 74, "failed: StorageError: the disk is full"),
        (OSError(errno.ENOSPC, "No space left"), 74, "failed: OSError: [Errno 28] No space left"),
        (OSError(errno.ECONNRESET, "reset"), 76, "failed: ConnectionResetError: [Errno 104] reset"),
        (Stopped("SIGTERM"), 75, "was stopped: SIGTERM"),
        (KeyError("layer"), 76, "failed: KeyError: 'layer'"),
    ],
)
def test_the_others_end_for_good_where_another_start_would_change_nothing(error, code, sentence, monkeypatch):
    """Each host's `jaxfb launch` sees its own process alone."""
    monkeypatch.setattr("jaxfb.training.job.hosts.atexit.register", lambda *_: None)
    monkeypatch.setattr("jaxfb.training.job.watch.LAST_WORDS", 0.3)
    store = Store()
    one, two = watch(store, 0, lost_after=1.0), watch(store, 1, lost_after=1.0)
    try:
        of_two(store, 1)._fail(two, error)
        assert one.cause(30.0) == f"[hosts] process 1 of 3 {sentence}; process 0 of 3 ends"
        broken = jax.errors.JaxRuntimeError("connection closed by peer")
        with pytest.raises(LostProcess) as lost:
            of_two(store, 0)._fail(one, broken)
        assert lost.value.exit_code == code
        three = watch(store, 2, lost_after=1.0)
        assert three.cause(30.0) and EXIT_CODES[three.kind] == code
        three.stop()
    finally:
        one.stop(), two.stop()


def test_processes_that_live_but_do_not_move_end_with_the_one_behind():
    store, positions = Store(), [Position() for _ in range(3)]
    for index, phases in enumerate([("data_wait", "update"), ("data_wait",), ("data_wait", "update")]):
        for phase in phases:
            positions[index].enter(phase, 7)
    watches = [watch(store, k, one, lost_after=2.0, stuck_after=1.0) for k, one in enumerate(positions)]
    try:
        said = watches[0].cause(30.0)
        assert said == (
            "[hosts] nothing has moved for 1 s: process 1 of 3 is behind, reading the rows of update 7; process 0 of 3 "
            "starting the computation of update 7; process 2 of 3 starting the computation of update 7; process 0 of 3 "
            "ends (hosts.stuck_after is how long one step may take)"
        )
    finally:
        [one.stop() for one in watches]


def test_a_process_that_becomes_a_fifth_slower_is_named_within_twenty_updates():
    """With threads, signs through the store, and updates of a tenth of a second."""
    store, positions = Store(), [Position() for _ in range(3)]
    for position in positions * 10:
        position.pace(0.01, 0.1)
    watches = [watch(store, index, position) for index, position in enumerate(positions)]
    began, named = 5, None
    try:
        for update in range(began + 20):
            for index, position in enumerate(positions):
                slow = index == 1 and update >= began
                position.pace(0.03 if slow else 0.01, 0.1)
                position.enter("update", update)
            time.sleep(0.1)
            if watches[0].pace()[1]:
                named = update
                break
        assert named is not None and named >= began
        assert "process 1 of 3 is slow" in watches[0].pace()[1][1]
    finally:
        [one.stop() for one in watches]


def test_a_thread_that_watches_ends_before_the_run_does_and_keeps_nothing_of_it():
    """Arrays of JAX that a thread frees while the interpreter ends abort the process, after all was done."""
    made = watch(Store(), 0, lost_after=60.0)
    run = Position()
    made.advice, left = partial(str, run), weakref.ref(run)
    del run
    made.stop()
    assert left() is None and not made._thread.is_alive()


def test_signs_are_not_more_frequent_than_a_large_job_can_bear():
    def interval(count, whole):
        position = Position()
        position.whole = whole
        return Watch(Store(), "job", 0, ["name"] * count, HostsConfig(), position)._interval()

    assert interval(2, 0.0) == 5.0 and interval(2, 0.2) == pytest.approx(0.6) and interval(2, 60) == 5.0
    assert interval(2, 0.001) < 0.3 and interval(4096, 0.001) == 5.0


@pytest.mark.slow
def test_a_coordinator_that_answers_nothing_counts_as_lost():
    """A stopped process keeps its connections: calls to it neither succeed nor fail."""
    store = Store()
    zero, one, two = (watch(store, index, lost_after=1.0) for index in range(3))
    try:
        assert one.cause(2.0) is None
        store.key_value_set = lambda *_, **__: time.sleep(60)
        said = one.cause(30.0)
        assert said.startswith("[hosts] process 0 of 3, which runs the coordinator, has not answered for 1 s")
    finally:
        [each.stop() for each in (zero, one, two)]


@pytest.mark.processes
@pytest.mark.slow
def test_processes_that_differ_stop_with_one_sentence_before_they_compute(tmp_path):
    write_tiny(tmp_path)
    codes = finish(start(tmp_path, 2, 1, own={1: ["optimizer.learning_rate=0.5", "batch.rows=16"]}))
    said = logs(tmp_path, 2)
    assert codes == [2, 2], said
    for text in said:
        assert "differ in config or code: batch.rows is 8 on process 0" in text
        assert "but 16 on process 1" in text and "optimizer.learning_rate is 0.01 on process 0" in text
        assert "Traceback" not in text and "reading the text" not in text
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_process_that_never_comes_is_said_in_time(tmp_path):
    write_tiny(tmp_path)
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--process-id", 0]
    codes = finish([launch(tmp_path, 0, 1, "train", *place, "hosts.timeout=2")])
    said = logs(tmp_path, 1)[0]
    assert codes == [76] and "not all of the 2 processes came to 127.0.0.1" in said, said
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_with_one_number_end_the_job_with_a_sentence(tmp_path):
    """The runtime aborts the others as soon as the second of that number knocks."""
    write_tiny(tmp_path, run={"updates": 100_000}, eval={"every": None}, checkpoint={"every": None})
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "hosts.timeout=30"]
    jobs = [launch(tmp_path, k, 1, "train", *place, "--process-id", k, "mesh.data=2") for k in (0, 1)]
    wait_for(tmp_path / "run" / "metrics.jsonl", jobs)
    jobs.append(launch(tmp_path, 2, 1, "train", *place, "--process-id", 1, "mesh.data=2", "hosts.timeout=5"))
    assert finish(jobs) == [76, 76, 76], logs(tmp_path, 3)
    first, second, late = logs(tmp_path, 3)
    assert "has ended the job, as where a process was started again on its own" in first
    assert "jaxfb: [hosts]" in second and "not all of the 2 processes came" in late


@pytest.mark.slow
def test_a_coordinator_that_cannot_be_reached_is_said_in_time(tmp_path):
    write_tiny(tmp_path)
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", 2, "--process-id", 1]
    codes = finish([launch(tmp_path, 0, 1, "train", *place, "hosts.timeout=1")])
    said = logs(tmp_path, 1)[0]
    assert codes == [76] and "process 1 of 2" in said and "could not reach the coordinator" in said, said
    assert "Traceback" not in said


@pytest.mark.processes
def test_a_port_that_is_in_use_is_said(tmp_path):
    write_tiny(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        place = ["--coordinator", address, "--processes", 2, "--process-id", 0]
        codes = finish([launch(tmp_path, 0, 1, "train", *place, "hosts.timeout=5")])
    said = logs(tmp_path, 1)[0]
    assert codes == [76] and f"cannot listen at {address}: the port is in use" in said, said
    assert "Traceback" not in said
