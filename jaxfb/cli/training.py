"""The commands that train: `jaxfb train`, `sft`, `dpo`, `rl`, with --smoke or without, and `jaxfb launch`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from tempfile import TemporaryDirectory
from typing import Any

from jaxfb.cli.given import hosts_given
from jaxfb.cli.memory import lacks_memory
from jaxfb.cli.options import LAUNCHED
from jaxfb.process.exit_codes import DONE, REFUSED, RESUMABLE
from jaxfb.process.launcher import end_with_launcher
from jaxfb.process.signals import caught_here
from jaxfb.process.streams import WhileTaken
from jaxfb.refusal import Refused

LEAST_OPEN_FILES = 64


def train(options) -> int:
    """Trains by a config, of pre-training or post-training; returns the exit code.

    With --smoke it prints first whether the run worked.
    """
    _check_open_files()
    with redirect_stdout(WhileTaken(sys.stdout)), _starting(), _configured(options) as config:
        end_with_launcher()
        options.stuck_after = config.hosts.stuck_after  # holds for threads too that outlive the command
        code = _ended(config, options)
        if options.smoke:
            worked = {DONE: "worked", RESUMABLE: "was stopped"}.get(code, "did not end as it should")
            print(
                f"\n--smoke: the run {worked}. Its directory is removed now; leave out --smoke to keep one."
            )
        return code


def launch(options) -> int:
    """Starts the processes of a job and restarts them; returns the exit code."""
    from jaxfb.cli.supervisor import Supervisor, config_of, job_command

    for name, least in (("processes", 1), ("restarts", 0)):
        if getattr(options, name) < least:
            raise Refused(f"[launch] --{name} {getattr(options, name)} must be at least {least}; use {least}")
    command = [word for word in options.command if word != "--"]
    if not command or command[0] not in LAUNCHED:
        given = command[0] if command else "nothing"
        raise Refused(
            f"[launch] runs one of {', '.join(LAUNCHED)}, got {given}; use: jaxfb launch train CONFIG"
        )
    job = job_command(command)
    return Supervisor(job, options.processes, options.restarts, config=config_of(command)).run()


def _check_open_files() -> None:
    """Refuses a limit of open files that would end the run at its first checkpoint."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < LEAST_OPEN_FILES:
        raise Refused(
            f"[train] this process may open {limit} files, but a run opens up to {LEAST_OPEN_FILES} and one for each "
            "token file; allow more: ulimit -n 4096"
        )


@contextmanager
def _configured(options) -> Iterator[Any]:
    """Yields the config of a training command; with --smoke, that of a few updates in a temporary directory."""
    from jaxfb.config import kind_of_command, load_config, smoke_overrides
    from jaxfb.config.smoke import DIRECTORY

    given = [*options.overrides, *hosts_given(options)]
    if not options.smoke:
        yield load_config(options.config, given, options.verb)
        return
    with TemporaryDirectory(prefix=DIRECTORY) as directory, _cache_in(directory):
        first = smoke_overrides(kind_of_command(options.verb))
        yield load_config(options.config, [*first, *given, f"run.dir={directory}/run"], options.verb)


@contextmanager
def _cache_in(directory: str) -> Iterator[None]:
    """Keeps prepared text and compiled programs in a directory, unless there is a place for them already."""
    from jaxfb.data.stored.cache import is_chosen_or_there

    if is_chosen_or_there():
        yield
        return
    os.environ["JAXFB_CACHE"] = f"{directory}/cache"
    try:
        yield
    finally:
        del os.environ["JAXFB_CACHE"]


@contextmanager
def _starting() -> Iterator[None]:
    """Ends the process at Ctrl-C, SIGTERM or SIGHUP until the run itself catches them; makes files private."""

    def end(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        with suppress(OSError):  # of a terminal that was closed
            print(
                f"jaxfb: {name} in start-up: nothing was trained, so nothing is lost",
                file=sys.stderr,
                flush=True,
            )
        os._exit(RESUMABLE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    umask = os.umask(0o077)  # what a run writes is for this user alone
    before = {number: signal.signal(number, end) for number in caught_here()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.umask(umask)


def _ended(config: Any, options) -> int:
    """Returns the exit code of a training command."""
    from jaxfb import trainer

    try:
        result = _trained(config, options)
    except trainer.GuardAbort as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return error.exit_code
    except trainer.LostProcess as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:
        if not lacks_memory(error, config):
            raise
        return REFUSED
    return RESUMABLE if result.status == "interrupted" else DONE


def _trained(config: Any, options) -> Any:
    from jaxfb import rl, trainer

    how: dict[str, Any] = {name: getattr(options, name) for name in ("resume", "fresh", "allow_changes")}
    if options.verb != "train":
        return rl.post_train(config, **how)
    if options.profile:
        from jaxfb.training.profile import Profile

        how["callbacks"] = [Profile()]
    return trainer.train(config, **how)
