"""Tells the other processes of a job why this one ends before it has joined them: they would wait for it, for minutes.

This process joins late, only to tell them.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from typing import Any

from jaxfb.cli.options import HOSTS, LAUNCHED

SECONDS = 30.0  # in which the others may come; they are started with this one
SHORTLY = 5.0  # seconds after which a process that still waits for them explains it
JOINING = (*LAUNCHED, "replay", "eval", "generate")
BY_FLAGS_ALONE = ("eval", "generate")
# what a launcher of several processes sets, or a user; `training/job/cluster.py` reads them, with jax
SIGNS = (
    "JAX_COORDINATOR_ADDRESS",
    "SLURM_STEP_NODELIST",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "JOB_COMPLETION_INDEX",
)


def are_expected(options: Any) -> bool:
    """Returns whether the command is one of several processes, as far as flags and environment tell; imports no jax."""
    if options.verb not in JOINING:
        return False
    by_flags = any(getattr(options, name, None) is not None for name in HOSTS)
    return by_flags or (options.verb not in BY_FLAGS_ALONE and any(os.environ.get(name) for name in SIGNS))


def tell(options: Any, error: BaseException, seconds: float = SECONDS) -> None:
    """Returns once the other processes know of the error, or after so many seconds; Ctrl-C ends it."""
    thread = threading.Thread(target=_join_and_fail, args=(options, error, seconds), daemon=True)
    with suppress(KeyboardInterrupt):
        thread.start()
        thread.join(min(seconds, SHORTLY))
        if thread.is_alive():
            print(
                f"jaxfb: [hosts] waiting for the other processes at most {seconds:g} s, to tell them; Ctrl-C ends this",
                file=sys.stderr,
                flush=True,
            )
            thread.join(max(0.0, seconds - SHORTLY))


def _join_and_fail(options: Any, error: BaseException, seconds: float) -> None:
    """Joins the job, and leaves it as a process that has failed; nothing where this process is alone."""
    with suppress(Exception):
        from jaxfb.config.operation import HostsConfig
        from jaxfb.training.job.hosts import Hosts

        given: dict[str, Any] = {name: getattr(options, name, None) for name in HOSTS}
        # this thread is left to itself before the time limit, at which joining ends the process
        with Hosts(HostsConfig(**given, timeout=2 * seconds + SHORTLY, stuck_after=None)):
            raise error
