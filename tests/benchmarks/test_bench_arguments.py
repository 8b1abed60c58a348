"""`jaxfb bench NAME --help` runs nothing, and a benchmark without options refuses arguments."""

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest

from jaxfb.cli import bench
from jaxfb.cli.commands import main
from jaxfb.process.signals import Terminated


@pytest.fixture
def started(monkeypatch):
    """The commands that would have been run."""
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def scripts():
    """name -> text of each benchmark."""
    paths = {name: bench.directory() / f"{name}.py" for name in bench.names()}
    return {name: path.read_text() for name, path in paths.items()}


def test_every_benchmark_answers_a_call_for_help(started, capsys):
    parsing = [name for name, text in scripts().items() if bench.PARSES.search(text)]
    assert {"accumulation", "real_sizes_tpu", "gpu"} <= set(parsing)
    for name in [*bench.names(), "report"]:
        assert main(["bench", name, "--help"]) == 0
        own, printed = name in parsing, capsys.readouterr().out
        assert bool(printed.strip()) != own, name
        assert [command[2:] for command in started] == [["--help"]] * own, name
        started.clear()


def test_a_script_with_a_parser_is_one_that_uses_it():
    """`PARSES` is searched for in the text of the script alone."""
    for name, text in scripts().items():
        if bench.PARSES.search(text):
            assert "ArgumentParser(" in text or "real_sizes.main(ROWS" in text, name


@pytest.mark.parametrize("name", ["guard_cost", "restart", "report"])
def test_arguments_are_refused_where_none_is_read(name, started, capsys):
    assert main(["bench", name, "--rounds", "3"]) == 2 and not started
    assert f"{name} takes no arguments, got '--rounds 3'; use `jaxfb bench {name}`" in capsys.readouterr().err


def test_arguments_are_passed_on_where_they_are_read(started):
    assert main(["bench", "context_by_width", "4096:1"]) == 0
    assert main(["bench", "accumulation", "--hidden", "64"]) == 0
    assert [command[2:] for command in started] == [["4096:1"], ["--hidden", "64"]]


def test_sigterm_ends_the_script_as_well(monkeypatch):
    """It ran on without the command that had started it."""
    monkeypatch.setattr(subprocess, "run", lambda command: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated):
        bench.run(next(iter(bench.names())), [])
