"""What XLA is told about the host's memory before it starts on GPUs."""

import os
import subprocess
import sys

import pytest

from jaxfb.platforms import pinned_memory

LARGE, SMALL = 2000 * 2**30, 32 * 2**30


@pytest.fixture
def machine(monkeypatch):
    """A function that sets the bytes of this machine's memory; the environment names no limit."""
    for name in (pinned_memory.LIMIT, pinned_memory.RESERVED):
        monkeypatch.delenv(name, raising=False)
    return lambda memory: monkeypatch.setattr(pinned_memory, "host_memory", lambda: memory)


@pytest.mark.parametrize(("memory", "limit"), [(LARGE, "2000"), (SMALL, None), (None, None)])
def test_the_limit_is_the_memory_of_a_machine_with_more_than_xlas_limit(machine, memory, limit):
    machine(memory)
    pinned_memory.prepare()
    assert os.environ.get(pinned_memory.LIMIT) == limit


@pytest.mark.parametrize(
    ("name", "value", "limit"), [(pinned_memory.LIMIT, "100", "100"), (pinned_memory.RESERVED, "true", None)]
)
def test_what_the_environment_sets_is_kept(machine, monkeypatch, name, value, limit):
    machine(LARGE)
    monkeypatch.setenv(name, value)
    pinned_memory.prepare()
    assert os.environ.get(pinned_memory.LIMIT) == limit


IMPORTED = """
import os, pathlib

def unknown(path):
    raise OSError

pages, pathlib.Path.read_text = {"SC_PHYS_PAGES": 2**31, "SC_PAGE_SIZE": 4096}, unknown  # no container
os.sysconf = pages.get
import jaxfb
print(os.environ[NAME])
"""


def test_the_limit_is_set_as_soon_as_jaxfb_is_imported():
    environment = {name: value for name, value in os.environ.items() if name != pinned_memory.LIMIT}
    program = IMPORTED.replace("NAME", repr(pinned_memory.LIMIT))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == str(2**31 * 4096 // 2**30), done.stderr


def test_the_limit_is_xlas_where_none_is_set(machine, monkeypatch):
    assert pinned_memory.limit() == 64
    monkeypatch.setenv(pinned_memory.LIMIT, "100")
    assert pinned_memory.limit() == 100
