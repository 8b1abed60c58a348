"""Compiled programs, kept between runs: the second start of a run does not compile again."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import jax

from jaxfb.data.stored.cache import cache_directory
from jaxfb.platforms.compat import config_value, replace_damaged_programs

PRIVATE = 0o700


def use_compile_cache(configured: str | Path | None = None) -> Path | None:
    """Turns JAX's persistent compilation cache on, beside the data's; the directory, or None if it is off.

    What lies in it is executed, so it belongs to this user alone: mode 0700, and a directory that others can
    write to is not used. That of JAX_COMPILATION_CACHE_DIR or an earlier `jax.config.update` is used as it is, unless
    others can write to it. Of a bucket (gs://...) nothing can be known here.
    Where this process simulates several CPU devices it stays off, unless a directory is named: a program from the
    cache can hang there (`jaxfb/platforms/cpu.py`).
    """
    replace_damaged_programs()
    if given := config_value("jax_compilation_cache_dir"):
        return _checked(given)
    if configured is None and jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        return None
    directory = Path(configured or cache_directory().parent / "jaxfb-compiled")
    if not _made(directory):
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return directory


def _made(directory: Path) -> bool:
    """Makes a directory for this user alone; returns whether there is one, which a run can do without."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        if not _only_we_write(directory):
            return False
        if stat.S_IMODE(directory.stat().st_mode) != PRIVATE:
            directory.chmod(PRIVATE)
    except OSError as error:
        warnings.warn(
            f"the compile cache {directory} cannot be used: {error.strerror}; every start compiles anew; set "
            "JAXFB_CACHE or JAX_COMPILATION_CACHE_DIR to a directory that can be written to",
            stacklevel=3,
        )
        return False
    return True


def _checked(given: str) -> Path | None:
    """Returns the inherited directory, or turns the cache off where others can write to it."""
    directory = Path(given)
    if "://" in given or not directory.exists() or _only_we_write(directory):
        return directory
    warnings.warn(
        f"the compile cache {directory} is not used: other users can write programs into it that would be executed; "
        "chmod 700 it, or unset JAX_COMPILATION_CACHE_DIR",
        stacklevel=3,
    )
    jax.config.update("jax_compilation_cache_dir", None)
    return None


def _only_we_write(directory: Path) -> bool:
    facts = directory.stat()
    return facts.st_uid == os.getuid() and not stat.S_IMODE(facts.st_mode) & 0o022
