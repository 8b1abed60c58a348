"""What a command says where jax cannot open the devices."""

import os
import subprocess
import sys

import pytest
from processes import ROOT

from jaxfb.cli.devices import without_devices

DEVICES = """
import sys
from jaxfb.cli import commands
commands.HANDLERS["check"] = lambda options: print(__import__("jax").devices())
sys.exit(commands.main(["check"]))
"""


def test_devices_that_are_not_there_are_a_sentence():
    environment = {**os.environ, "JAX_PLATFORMS": "foo"}
    done = subprocess.run(
        [sys.executable, "-c", DEVICES], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    (sentence,) = done.stderr.splitlines()
    assert done.returncode == 2 and "the devices that JAX_PLATFORMS=foo asks for: 'foo': " in sentence
    assert "unset JAX_PLATFORMS to take what this machine has, or set JAX_PLATFORMS=cpu" in sentence


@pytest.mark.parametrize(
    "raised, code, reason",
    [
        ("AssertionError", 2, "none of its plugins is for them"),
        (
            "RuntimeError(\"Unable to initialize backend 'tpu': ABORTED: in use\")",
            1,
            "'tpu': ABORTED: in use",
        ),
    ],
)
def test_an_assertion_or_a_device_in_use_is_of_the_devices(raised, code, reason, capsys):
    """A device in use may be free when the command is started again, so that is not final."""
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        exec(compile(f"raise {raised}", "jax/_src/xla_bridge.py", "exec"))
    assert without_devices(caught.value) == code and reason in capsys.readouterr().err
    assert without_devices(AssertionError("of somebody else")) is None
