"""Reads what several commands have in their options: a run, a model, the place of a process in its job."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from jaxfb.cli.options import HOSTS, POST_TRAINING

_WRONG_PATH = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR)


def run_dir_of(path: str, overrides: Sequence[str] = (), command: str | None = None) -> Path:
    """Returns the directory of a run, given itself or by the config that made it."""
    from jaxfb.config import load_config, saved_run

    return saved_run(path, load_config(path, overrides, command))


def model_of(path: str) -> Path:
    """Returns a run's directory, or the path itself: of Hugging Face files, or of a config that begins with them."""
    if Path(path).is_dir() and not (Path(path) / "config.yaml").exists():
        return Path(path)
    from jaxfb.config import load_config

    config = load_config(path)
    begins = getattr(getattr(config, "model", None), "from_", None) is not None
    return Path(path) if begins and not Path(config.run.dir).exists() else run_dir_of(path)


def hosts_given(options) -> list[str]:
    """Returns the flags that place this process in its job, as overrides."""
    given = {name: getattr(options, name) for name in HOSTS}
    return [f"hosts.{name}={value}" for name, value in given.items() if value is not None]


def is_of_a_given_path(error: OSError, options) -> bool:
    """Returns whether a path among the options, or one in it, is not there or may not be read or written.

    Of a command that trains only its config counts: a run that cannot write later has not been called wrongly.
    """
    if error.errno not in _WRONG_PATH or not isinstance(error.filename, str | os.PathLike):
        return False
    path = Path(os.path.abspath(error.filename))
    given = [Path(os.path.abspath(value)) for value in vars(options).values() if isinstance(value, str)]
    if options.verb in ("train", *POST_TRAINING):
        return any(path in (one, one / "config.yaml") for one in given)
    return any(path.is_relative_to(one) for one in given)
