"""Which processes keep their compiled programs."""

import errno
import os
import subprocess
import sys

import jax
import pytest
from jax._src import compilation_cache
from processes import ROOT

from jaxfb.platforms.compat import replace_damaged_programs
from jaxfb.training.compile_cache import use_compile_cache


@pytest.fixture
def no_directory(tmp_path, monkeypatch):
    """JAX keeps no programs yet, and jaxfb's caches are in an empty directory."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAXFB_CACHE", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_of_several_cpu_devices_are_not_kept_unless_it_is_asked_for(no_directory):
    assert jax.local_device_count() == 8
    assert use_compile_cache() is None and not jax.config.jax_compilation_cache_dir
    assert use_compile_cache(no_directory / "asked") == no_directory / "asked"


def test_programs_of_one_device_are(no_directory, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert use_compile_cache() == no_directory / "jaxfb-compiled"
    assert jax.config.jax_compilation_cache_dir == str(no_directory / "jaxfb-compiled")


def test_programs_of_several_gpus_are(no_directory, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert use_compile_cache() == no_directory / "jaxfb-compiled"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES], ids=errno.errorcode.get)
def test_a_run_goes_on_without_the_cache_where_it_cannot_be_made(no_directory, monkeypatch, number):
    """A full disk for what a run can do without ended it."""

    def fail(self, *_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    monkeypatch.setattr("pathlib.Path.mkdir", fail)
    with pytest.warns(
        UserWarning, match=f"jaxfb-compiled cannot be used: {os.strerror(number)}; every start"
    ):
        assert use_compile_cache() is None
    assert not jax.config.jax_compilation_cache_dir


def test_a_cache_on_a_read_only_disk_is_read(no_directory, monkeypatch):
    def read_only(self, mode):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    (no_directory / "asked").mkdir(mode=0o700)
    monkeypatch.setattr("pathlib.Path.chmod", read_only)
    assert use_compile_cache(no_directory / "asked") == no_directory / "asked"


CUT = """
import pathlib, sys, warnings
import jax, jax.numpy as jnp
from jaxfb.platforms.compat import replace_damaged_programs
from jaxfb.training.compile_cache import use_compile_cache
warnings.simplefilter("ignore")
directory = use_compile_cache(sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
program = jax.jit(lambda x: jnp.sin(x) @ x)
def sizes():
    program(jnp.ones((4, 4)))
    jax.clear_caches()
    return [path.stat().st_size for path in sorted(directory.glob("jit__lambda*-cache"))]
before = sizes()
for path in directory.glob("*-cache"):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
print(len(before), [round(after / size, 1) for after, size in zip(sizes(), before)])
"""


def test_a_program_that_was_cut_short_is_written_again(tmp_path):
    """After a kill or a full disk during the first compilation every later start compiled anew."""
    command = [sys.executable, "-c", CUT, str(tmp_path / "kept")]
    alone = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=alone)
    assert done.stdout == "1 [1.0]\n", (
        done.stderr
    )  # not to the byte, since an entry has the time that compiling took


@pytest.mark.parametrize(
    "error, stays", [(OSError(errno.EMFILE, "too many open files"), True), (EOFError(), False)]
)
def test_a_program_that_cannot_be_read_for_now_stays(tmp_path, monkeypatch, error, stays):
    """Too many open files removed sound programs from the cache, which others may share."""

    def read(key):
        raise error

    program = tmp_path / "key-cache"
    program.write_bytes(b"a program")
    monkeypatch.setattr("jaxfb.platforms.compat.config_value", lambda name: str(tmp_path))
    monkeypatch.setattr(compilation_cache, "get_executable_and_time", read)
    replace_damaged_programs()
    with pytest.raises(type(error)):
        compilation_cache.get_executable_and_time("key")
    assert program.exists() == stays
