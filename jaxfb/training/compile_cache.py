"""Compiled programs, kept between runs: the second start of a run does not compile again."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import jax

from jaxfb.data.cache import cache_directory

PRIVATE = 0o700


def use_compile_cache(configured: str | Path | None = None) -> Path | None:
    """Turns JAX's persistent compilation cache on, beside the data's; the directory, or None if it is off.

    What lies in it is executed, so it belongs to this user alone: mode 0700, and a directory that others can
    write to is not used. JAX_COMPILATION_CACHE_DIR or an earlier `jax.config.update` is left as it is.
    """
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    directory = Path(configured or cache_directory().parent / "jaxfb-compiled")
    directory.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    if not _belongs_to_us_alone(directory):
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory.absolute()))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    return directory


def _belongs_to_us_alone(directory: Path) -> bool:
    facts = directory.stat()
    if facts.st_uid != os.getuid():
        return False
    if stat.S_IMODE(facts.st_mode) & 0o022:
        return False
    directory.chmod(PRIVATE)
    return True
