"""`jaxfb check --random` as a shell sees it: output, exit codes, a finding with its program."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfb.cli.commands import main

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_cases_that_agree_are_counted(capfd):
    assert main(["check", "--random", "2", "--seed", "1", "--first", "5"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("2 cases of seed 1 in ") and ": 2 same\n" in out
    assert "random cases of seed 1, each next to one device, on cpu" in err and "    6  " in err


@pytest.mark.slow
def test_a_finding_is_code_1_and_comes_with_a_program(capfd, monkeypatch, tmp_path):
    tests = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*tests, os.environ.get("PYTHONPATH", "")]))
    command = ["check", "--random", "1", "--model", "users:dies_on_a_mesh", "--axes", "data", "--tries", "1"]
    first = next(str(index) for index in range(20) if _drawn(index).mesh)
    assert main([*command, "--first", first]) == 1
    out = capfd.readouterr().out
    assert "1 aborted" in out and f"FOUND in case {first}: data=" in out and "aborted: SIGABRT" in out
    program = tmp_path / "program.py"
    program.write_text(out[out.index('"""jaxfb check found') :])
    assert subprocess.run([sys.executable, program], capture_output=True).returncode == -6


@pytest.mark.slow
def test_what_a_function_raises_is_a_sentence(capfd, monkeypatch):
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    assert main(["check", "--random", "1", "--model", "users:raises"]) == 2
    err = capfd.readouterr().err
    assert "--model users:raises raised RuntimeError: 'boom'" in err and "users.py, line" in err


def _drawn(index):
    from jaxfb.checking.drawing.draw import Own, draw

    return draw(0, index, Own(8, None, ("data",)))


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "use: jaxfb check quickstart, or jaxfb check --random 20"),
        (["--random", "0"], "--random must be a positive integer, got 0"),
        (["--random", "1", "--limit", "0"], "--limit must be a finite number above 0, got 0.0"),
        (["configs/quickstart.yaml", "--random", "1"], "leave out the config and --tolerance"),
        (["--random", "1", "--axes", "data"], "name the model by --model, or leave --axes out"),
        (["--random", "1", "--model", "a:b", "--axes", "dataa"], "got 'dataa'; did you mean 'data'?"),
        (
            ["--random", "1", "--model", "users"],
            "--model must be module:function, such as my_model:small, got 'users'",
        ),
    ],
)
def test_illegal_arguments_are_refused_in_a_sentence(arguments, words, capfd):
    assert main(["check", *arguments]) == 2
    said = capfd.readouterr().err
    assert "jaxfb: [check] " in said and words in said
