"""The process that compiles drops the options that a step drops where it is too large, and tells that it did."""

import os
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from jaxfb.config import load_config
from jaxfb.planner import command, compiled, parse_topology, tpu
from jaxfb.planner.compiled import Compiled
from jaxfb.planner.text import page
from jaxfb.planner.verdict import estimated
from jaxfb.platforms import compiler
from jaxfb.process.signals import Terminated

ONCE = tuple(compiler.table_for("TPU v5 lite").items())
ANSWER = Compiled(1, 2, 0, 4, 0.1, 0.2, 5.0, 7.0, 8.0, 5.0, [])


@pytest.fixture
def compiles(monkeypatch):
    """Stands for the compiler: with the options in `.refused` a step is too large; `.tried` are those of each try."""
    stand_in = SimpleNamespace(refused=[], tried=[])

    def program(options):
        def compile(report):
            stand_in.tried.append(options)
            if options in stand_in.refused:
                raise jax.errors.JaxRuntimeError("Used 18.00G of 15.75G hbm")

        return compile

    def make_job(config, mesh):
        asked = config.parallel.compiler_options or {}
        options = tuple(one for one in ONCE if one[0] not in asked)
        traced = SimpleNamespace(jaxpr=None, lower=lambda: SimpleNamespace(compile=program(options)))
        step = SimpleNamespace(compiler_options=options, trace=lambda *_: traced)
        return SimpleNamespace(step=step, state=None, batch=None)

    monkeypatch.setattr("jaxfb.planner.job.make_job", make_job)
    monkeypatch.setattr("jaxfb.planner.program_cost.routing.routed", lambda *_: None)
    monkeypatch.setattr(compiled, "_mesh", lambda *_: None)
    monkeypatch.setattr(compiled, "_read", lambda *_: ANSWER)
    monkeypatch.setattr(compiled.tpu, "reported_bytes", lambda _: 100)
    before = jax.config.jax_compilation_cache_include_metadata_in_key
    yield stand_in
    jax.config.update("jax_compilation_cache_include_metadata_in_key", before)


def answered(tmp_path):
    return compiled._result(load_config("configs/8b.yaml", []), parse_topology("v5e:4x4"), tmp_path)


@pytest.mark.parametrize("refused", [[], [ONCE]])
def test_a_program_that_is_too_large_is_compiled_as_its_step_is(compiles, refused, tmp_path):
    compiles.refused += refused
    answer = answered(tmp_path)["compiled"]
    assert compiles.tried == [ONCE, ()][: 1 + len(refused)]
    assert answer["computed_twice"] == bool(refused)
    verdict = estimated(load_config("configs/8b.yaml", []), parse_topology("v5e:4x4"))
    told = page("8b", replace(verdict, compiled=Compiled(**answer)))
    assert ("XLA computes products twice to save memory" in told) == bool(refused)


def test_what_is_too_large_in_any_form_does_not_fit(compiles, tmp_path):
    compiles.refused += [ONCE, ()]
    assert answered(tmp_path)["too_large"]["needed"] == 18 * 2**30
    assert compiles.tried == [ONCE, ()]


@pytest.mark.parametrize(
    ("topology", "flags"),
    [("cpu:8", "--xla_force_host_platform_device_count=8"), ("gpu:h100x8", "--mine"), ("v5e:2x2", None)],
)
def test_the_process_that_compiles_has_the_flags_of_its_platform(topology, flags, monkeypatch):
    """A TPU's are not known to the CPU's client, and the reverse; on GPUs they are what is planned."""
    monkeypatch.setenv("XLA_FLAGS", "--mine")
    monkeypatch.setenv("JAX_ENABLE_X64", "1")
    environment = compiled._environment(parse_topology(topology))
    assert environment.get("XLA_FLAGS") == flags and "JAX_ENABLE_X64" not in environment
    assert environment["JAX_PLATFORMS"] == "cpu"
    assert flags is not None or tpu.ENVIRONMENT.items() <= environment.items()


def test_a_compiler_that_is_killed_is_a_sentence(tmp_path, monkeypatch):
    """It was a traceback, though the lack of memory is what most often kills it."""
    (tmp_path / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ValueError, match=r"\[plan\] the process that compiles was killed .* --no-compile"):
        compiled.compile_for(load_config("quickstart"), parse_topology("cpu:1"))


def test_sigterm_ends_a_plan_as_ctrl_c_does(monkeypatch):
    """The files of the process that compiles were left, and a process that was stopped."""
    monkeypatch.setattr(command, "plan_of", lambda *_, **how: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated):
        command.plan("quickstart", load_config("quickstart"), parse_topology("cpu:1"), True, False)
