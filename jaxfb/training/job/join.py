"""Makes this process one of its job by `jax.distributed`, or ends it with a sentence where the runtime would abort."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxfb.config.operation import HostsConfig
from jaxfb.platforms.compat import backends_are_made
from jaxfb.process.exit_codes import LOST
from jaxfb.refusal import Refused
from jaxfb.training.job.abort import is_listening, report_before_abort
from jaxfb.training.job.cluster import Place, find_place
from jaxfb.training.job.watch import LostProcess, leave

SLICE = 5.0  # seconds of one attempt to reach process 0
RUNTIME_PATIENCE = 100  # seconds: jax's own heartbeat, which ends a process without a word, comes after ours


def join(config: HostsConfig) -> None:
    """Makes this process one of its job; nothing where it is alone, or has joined already.

    Raises:
      ValueError: too little is known of the job, or jax has made its devices already.
      LostProcess: the coordinator cannot be reached in time, or cannot listen.
    """
    if jax.distributed.is_initialized():
        return
    place = find_place(config)
    if place is None:
        return
    if backends_are_made():
        raise Refused(
            f"[hosts] process {place.process_id} of {place.processes} cannot join the others once jax has made its "
            "devices; call jaxfb, or jax.distributed.initialize, before the first computation"
        )
    if place.process_id:
        _reach(place, config.timeout)
    else:
        _check_port(place)
    report_before_abort(lambda: _turned_away(place), LOST)  # until `Hosts` knows more
    with _patience(place, config.timeout):
        jax.distributed.initialize(
            place.coordinator,
            place.processes,
            place.process_id,
            local_device_ids=place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(config.timeout) + RUNTIME_PATIENCE,
            coordinator_bind_address=_bind_address(place.coordinator),
            heartbeat_timeout_seconds=int(2 * config.lost_after) + RUNTIME_PATIENCE,
        )


def _turned_away(place: Place) -> str:
    """Returns what to print where the runtime aborts while this process joins."""
    return (
        f"jaxfb: [hosts] the coordinator at {place.coordinator} has ended the job while process {place.process_id} of "
        f"{place.processes} on {socket.gethostname()} joined it, as where two have the same number (its message is "
        "above); start them all again, each with its own hosts.process_id"
    )


def _bind_address(coordinator: str) -> str | None:
    """Returns where process 0 listens: at the coordinator's address where that is one of this machine's, on loopback
    alone if it is there; else None, which is everywhere.

    A name may resolve to loopback here and to another address on the other hosts, so for a name it is everywhere.
    Nobody has to prove who they are there, so the port is to be closed to all but the job's hosts.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    return coordinator if host == "localhost" or _is_of_this_machine(host) else None


def _is_of_this_machine(host: str) -> bool:
    """Returns whether it is an IP address at which this machine can listen."""
    try:
        address = ipaddress.ip_address(host)
        family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
        socket.create_server((host, 0), family=family).close()
    except (ValueError, OSError):
        return False
    return not address.is_unspecified


def _reach(place: Place, timeout: float) -> None:
    """Waits until process 0 listens; the runtime itself would abort without a word."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if is_listening(place.coordinator, SLICE):
            return
        time.sleep(min(0.5, timeout / 10))
    raise LostProcess(
        f"[hosts] process {place.process_id} of {place.processes} on {socket.gethostname()} could not reach the "
        f"coordinator, process 0 at {place.coordinator}, within {timeout:g} s; look at process 0's log, name and "
        "port, or raise hosts.timeout"
    )


def _check_port(place: Place) -> None:
    """Refuses a port that process 0 cannot listen at, where newer runtimes crash."""
    host, _, port = (_bind_address(place.coordinator) or place.coordinator).rpartition(":")
    host = host.strip("[]") if _bind_address(place.coordinator) else ""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, int(port)), family=family).close()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return
        raise LostProcess(
            f"[hosts] process 0 on {socket.gethostname()} cannot listen at {place.coordinator}: the port is in use; "
            "use another port in hosts.coordinator"
        ) from None


@contextmanager
def _patience(place: Place, timeout: float) -> Iterator[None]:
    """Ends the process with a sentence where the others do not come in time; the runtime would abort."""

    def give_up() -> None:
        print(
            f"jaxfb: [hosts] not all of the {place.processes} processes came to {place.coordinator} within "
            f"{timeout:g} s; this one is process {place.process_id} on {socket.gethostname()}; start them all with "
            "the same hosts.processes, or raise hosts.timeout",
            file=sys.stderr,
        )
        leave(LOST)

    timer = threading.Timer(timeout, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
