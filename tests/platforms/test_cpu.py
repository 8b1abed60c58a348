"""Collectives of one CPU's devices never mix up: fresh, from the cache, and in a user's own jit."""

import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import thunks
import toy
from jax import lax
from jax.sharding import PartitionSpec as P
from quickly import flags

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.platforms import cpu
from jaxfb.training.check import synthetic_batch

ROOT = Path(__file__).parents[2]
COUNT = "--xla_force_host_platform_device_count=8"


# what XLA is told before it starts


@pytest.fixture
def before_start(monkeypatch):
    """An environment in which XLA has not started yet."""
    monkeypatch.setattr(cpu, "_has_started", lambda: False)
    for name in ("XLA_FLAGS", "NPROC", "PJRT_NPROC"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_several_devices_get_the_schedule_and_threads_to_wait_in(before_start):
    before_start.setenv("XLA_FLAGS", COUNT)
    cpu.prepare()
    cpu.prepare()
    assert os.environ["XLA_FLAGS"] == f"{COUNT} --{cpu.SCHEDULER}=false"
    assert int(os.environ["PJRT_NPROC"]) > 4 * 8


def test_devices_asked_for_by_jax_config_count_too(before_start):
    before_start.setattr(type(jax.config), "jax_num_cpu_devices", 4, raising=False)
    cpu.prepare()
    assert os.environ["XLA_FLAGS"] == f"--{cpu.SCHEDULER}=false"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"XLA_FLAGS": ""}, {"XLA_FLAGS": ""}),
        ({"XLA_FLAGS": COUNT[:-1] + "1"}, {"XLA_FLAGS": COUNT[:-1] + "1"}),
        *(2 * ({"XLA_FLAGS": f"{COUNT} --{cpu.SCHEDULER}=true", "NPROC": "9"},),),
    ],
    ids=["no devices asked for", "one device", "the user's own choice"],
)
def test_what_is_one_device_or_already_set_stays(before_start, given, kept):
    for name, value in given.items():
        before_start.setenv(name, value)
    cpu.prepare()
    assert {name: os.environ[name] for name in kept} == kept and "PJRT_NPROC" not in os.environ


def test_a_started_xla_and_one_that_does_not_know_the_flag_are_left_alone(before_start):
    before_start.setenv("XLA_FLAGS", COUNT)
    before_start.setattr(cpu, "_has_started", lambda: True)
    cpu.prepare()
    before_start.setattr(cpu, "_has_started", lambda: False)
    before_start.setattr(cpu, "_knows_scheduler", lambda: False)
    cpu.prepare()
    assert os.environ["XLA_FLAGS"] == COUNT


def test_compiler_options_are_for_the_outermost_jit_over_several_devices_without_the_flag(monkeypatch):
    seen = []
    several = jaxfb.make_mesh(data=2)
    assert not cpu.wants_options(several)  # the tests' XLA started with the flag
    monkeypatch.setenv("XLA_FLAGS", COUNT)
    assert cpu.wants_options(several) and not cpu.wants_options(jaxfb.make_mesh(devices=jax.devices()[:1]))
    jax.jit(lambda x: seen.append(cpu.wants_options(several)) or x)(1)
    assert seen == [False]


def test_calls_and_steps_take_the_options_and_so_does_a_user_who_jits_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", COUNT)
    plan = jaxfb.BatchPlan(rows=4, data_parallel=2, num_microbatches=2)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2))
    loss = lambda p, mb, rng: jaxfb.Sum((p * mb).sum(), len(mb))  # noqa: E731
    args = np.ones(3), np.ones((4, 3))
    alone = fb(loss, *args, plan).grads
    inside = jax.jit(lambda p, b: fb(loss, p, b, plan).grads)(*args)
    np.testing.assert_array_equal(alone, inside)
    step = jaxfb.make_train_step(loss, jaxfb.make_optimizer("sgd", learning_rate=1.0), fb.mesh, plan)
    state = step.init(args[0])
    lowered = jax.jit(lambda s, b: step(s, b)[0].params).lower(state, args[1])
    np.testing.assert_allclose(step(state, args[1])[0].params, lowered.compile()(step.init(args[0]), args[1]))


# channels


def handles(platform):
    """The channels of a program with five collectives, three of them equal, as lowered for a platform."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def body(x):
        both = lax.psum(x, "data") + lax.psum(2 * x, "data"), lax.ppermute(x, "data", [(0, 1), (1, 0)])
        return both[0] + both[1] + lax.psum_scatter(lax.all_gather(x, "data", tiled=True), "data", tiled=True)

    whole = jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    text = jax.jit(whole).trace(jnp.ones(4)).lower(lowering_platforms=(platform,)).as_text()
    return [part.split(",")[0] for part in text.split("channel_handle<handle = ")[1:]]


def test_every_collective_of_a_program_for_cpu_has_its_own_channel():
    assert len(handles("cpu")) == len(set(handles("cpu"))) == 5
    assert len(handles("tpu")) == 5 and len(set(handles("tpu"))) == 1


# what may run at the same time


@lru_cache
def problem(experts=0):
    sizes = TransformerConfig(
        vocab_size=16, hidden_size=8, num_layers=4, num_heads=2, num_kv_heads=2, head_size=4, mlp_size=8,
        num_experts=experts, experts_per_token=min(experts, 2), expert_mlp_size=8, attention="xla",
    )  # fmt: skip
    return transformer(sizes), init_params(sizes, jax.random.key(0))


def compiled(mesh, num_microbatches, schedule=None):
    sizes = dict(mesh)
    replicas = int(np.prod([sizes.get(axis, 1) for axis in ("data", "fsdp", "expert")]))
    rows = 2 * replicas * num_microbatches
    plan = jaxfb.BatchPlan(rows=rows, data_parallel=replicas, num_microbatches=num_microbatches)
    chunks = 2 if schedule in ("interleaved", "v_shape") else 1
    options = {"schedule": schedule, "num_chunks": chunks} if schedule else {}
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**sizes, devices=devices), **options)
    if "context" in sizes or "expert" in sizes:
        (model, params), batch = problem(4 if "expert" in sizes else 0), synthetic_batch(rows)
        batch = batch | {name: batch[name] % 16 for name in ("tokens", "targets")}
    else:
        model, params, batch = toy.model, toy.params(layers=8), toy.batch(rows=rows)
    return jax.jit(lambda p, b: fb(model, p, b, plan)).lower(params, batch).compile()


SCHEDULES = ("gpipe", "1f1b", "zero_bubble", "interleaved", "v_shape")
CASES = [({"pipe": 2, "fsdp": 2}, count, schedule) for schedule in SCHEDULES for count in (1, 2)]
CASES += [({"pipe": 2, "context": 2}, 1, "zero_bubble"), ({"pipe": 2, "context": 2}, 2, "1f1b")]
CASES += [({"pipe": 2, axis: 2}, 2, "zero_bubble") for axis in ("data", "tensor", "expert")]
CASES += [({"pipe": 4, "fsdp": 2}, 4, "v_shape"), ({"pipe": 2, "context": 2, "tensor": 2}, 1, "1f1b")]
CASES += [({"fsdp": 4}, 2, None), ({"context": 4}, 2, None), ({"fsdp": 2, "expert": 2}, 2, None)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_two_collectives_of_one_channel_and_group_may_run_at_the_same_time(case):
    sequence = thunks.thunks_of(compiled(*case))
    assert thunks.num_collectives(sequence) > 2
    assert thunks.unordered(sequence) == []


@pytest.mark.slow
def test_with_one_channel_for_all_as_jax_has_it_some_could():
    sequence = thunks.thunks_of(compiled({"pipe": 2, "context": 2}, 1, "zero_bubble"))
    assert thunks.unordered(thunks.in_one_channel(sequence))


# in processes of their own, fresh and from the cache

PROGRAM = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_enable_x64", True)
if "late" in sys.argv:
    jax.devices()
import numpy as np
import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.training.check import synthetic_batch

sizes = TransformerConfig(
    vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, num_kv_heads=2, head_size=8, mlp_size=32,
    attention="xla",
)
model, params, batch = transformer(sizes), init_params(sizes, jax.random.key(0)), synthetic_batch(8)
found = jaxfb.check_equivalence(
    model, params, batch, [{"pipe": 2, "fsdp": 2}, {"pipe": 2, "context": 2, "tensor": 2}],
    ["zero_bubble"], rows_per_microbatch=4,
)
assert all(one.num_microbatches <= 2 for one in found.ran) and len(found.ran) == 2
found.raise_if_above(1e-12)
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["early", "late"])
def test_the_law_holds_in_a_fresh_program_and_in_one_from_the_cache(tmp_path, when):
    """The two worst cases. "late": XLA started before jaxfb was imported, so without the flag and the threads."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    given = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "PJRT_NPROC")}
    asked = {
        "XLA_FLAGS": flags(),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }  # no scheduler, no devices
    environment = {**given, **kept, **asked}
    for _ in range(2):
        command = [sys.executable, "-c", PROGRAM, when]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-3000:]
