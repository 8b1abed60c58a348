"""Connects the processes of a job by `jax.distributed`: they agree on what they run, and process 0 prints and writes.

Every process runs the same program on the same config; what they tell each other here goes
through the coordinator's key-value store, so it works before the first collective and when there can be none.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import ipaddress
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from jaxfb.config.operation import HostsConfig
from jaxfb.platforms.compat import backends_are_made, coordination
from jaxfb.process.exit_codes import LOST, RESUMABLE
from jaxfb.process.position import here
from jaxfb.refusal import Refused
from jaxfb.training.abort import is_listening, report_before_abort
from jaxfb.training.agreement import check_agreement
from jaxfb.training.cluster import Place, find_place
from jaxfb.training.interrupt import Stopped
from jaxfb.training.watch import FAILED, STOPPED, LostProcess, Watch, leave, start_again

__all__ = ["LOST", "Hosts", "LostProcess", "leave"]

Value = TypeVar("Value")
SLICE = 5.0  # seconds between two looks at whether there is still time
RUNTIME_PATIENCE = 100  # seconds: jax's own heartbeat, which ends a process without a word, comes after ours
_rounds = itertools.count()  # the store outlives a `Hosts`, so each has its own keys


class Hosts:
    """The processes of this job while a command runs; used as a context. Alone, every method is immediate.

    index, count: this process and how many there are. is_first: whether this one prints and writes.
    """

    def __init__(self, config: HostsConfig):
        self.config = config
        here.reset()
        _join(config)
        self._client, self.index, self.count, self._coordinator = coordination()
        self._prefix, self._calls = f"jaxfb/{next(_rounds)}", itertools.count()
        self._watch: Watch | None = None
        self._slow: set[int] = set()  # processes that were found slow
        self._advice = start_again

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def __enter__(self) -> Hosts:
        if self.index and self._coordinator is not None:
            report_before_abort(self._coordinator, self._without_coordinator, LOST)
        if self.count > 1 or self.config.stuck_after is not None:
            client = self._client if self.count > 1 else None
            self._watch = Watch(client, self._prefix, self.index, self._names(), self.config)
            self._watch.advice = lambda: self._advice()
            self._watch.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        watch, self._watch = self._watch, None
        if watch is None:
            return
        if error is not None:
            self._fail(watch, error)
        watch.stop()

    def advise(self, how_to_go_on: Callable[[], str]) -> None:
        """Sets the advice that is printed when a process is lost."""
        self._advice = how_to_go_on

    def pace(self) -> tuple[list[float] | None, list[str]]:
        """Returns the seconds of an update that each process spends on its own, and who has become slow since."""
        if self.count == 1 or self._watch is None:
            return None, []
        seconds, slow = self._watch.pace()
        news = [text for index, text in slow.items() if index not in self._slow]
        self._slow = set(slow)
        return seconds, news

    def first(self, function: Callable[[], Any]) -> Any:
        """Returns on every process what `function` returns on process 0, a JSON-able value.

        Raises:
          ValueError: process 0 raised one.
        """
        if self.count == 1:
            return function()
        key = f"{self._prefix}/{next(self._calls)}"
        if self.is_first:
            with here.alone():
                outcome = _outcome(function)
            self._client.key_value_set(key, json.dumps(outcome))
        outcome = json.loads(self._wait(key, "process 0 to decide", None))
        if "refused" in outcome:
            self._hear_together(f"{key}/heard")
            raise Refused(outcome["refused"])
        return outcome["value"]

    def in_turn(self, function: Callable[[], Value]) -> Value:
        """Calls `function` on process 0 first; the others call it afterwards and find its results in a cache.

        Raises:
          ValueError: process 0 raised one.
        """
        kept = []
        if self.is_first:
            self.first(lambda: kept.append(function()))
        else:
            self.first(lambda: None)
            kept.append(function())
        return kept[0]

    def say(self, text: str) -> None:
        """Prints a line, once for the whole job."""
        if self.is_first:
            print(text, flush=True)

    def agree(self, what: str, facts: Callable[[], Mapping[str, Any]]) -> None:
        """Refuses, on every process with the same sentence, where one of its `facts()` is not the same on all.

        Raises:
          ValueError: names which processes have which value.
          LostProcess: one did not answer in time.
        """
        if self.count == 1:
            return
        key = self._publish(json.dumps([socket.gethostname(), facts()], sort_keys=True, default=str))

        def compare() -> None:
            names, everyone = zip(*map(json.loads, self._collect(key)), strict=True)
            check_agreement(what, everyone, names)

        self.first(compare)

    def _hear_together(self, key: str) -> None:
        """Waits, on process 0, at most SLICE seconds until the others have read the refusal: its store ends with it."""
        self._client.key_value_set(f"{key}/{self.index}", "")
        if self.is_first:
            deadline = time.monotonic() + SLICE
            with contextlib.suppress(LostProcess):
                for other in range(self.count):
                    self._wait(f"{key}/{other}", f"process {other} to read it", deadline)

    def _without_coordinator(self) -> str:
        here = f"process {self.index} of {self.count} ({socket.gethostname()})"
        lost = f"process 0 of {self.count}, the coordinator at {self._coordinator}"
        return f"jaxfb: [hosts] {lost}, is gone; {here} ends; {self._advice()}"

    def _names(self) -> list[str]:
        """Returns how the processes are called in messages."""
        key = self._publish(socket.gethostname()) if self.count > 1 else ""
        hosts = self.first(lambda: self._collect(key)) if self.count > 1 else [socket.gethostname()]
        return [f"process {index} of {self.count} ({host})" for index, host in enumerate(hosts)]

    def _publish(self, text: str) -> str:
        """Writes a text for process 0; returns the key under which it finds those of all."""
        key = f"{self._prefix}/{next(self._calls)}"
        self._client.key_value_set(f"{key}/{self.index}", text)
        return key

    def _collect(self, key: str) -> list[str]:
        """Returns what every process has written, in their order; for process 0 alone, as reads by all would be too
        many.
        """
        deadline = time.monotonic() + self.config.timeout
        return [
            self._wait(f"{key}/{other}", f"process {other} to come this far", deadline)
            for other in range(self.count)
        ]

    def _wait(self, key: str, whom: str, deadline: float | None) -> str:
        """Returns the value of a key, once it has one; without a deadline as long as no process is lost."""
        while True:
            rest = SLICE if deadline is None else min(SLICE, deadline - time.monotonic())
            if rest <= 0:
                raise LostProcess(
                    f"[hosts] process {self.index} of {self.count} waited {self.config.timeout:g} s for {whom}; "
                    "look at its log, or raise hosts.timeout"
                )
            try:
                with here.waiting():
                    return self._client.blocking_key_value_get(key, int(rest * 1000))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def _fail(self, watch: Watch, error: BaseException) -> None:
        """Notifies the others; where a collective broke, names the process that broke it."""
        if self.count == 1:
            return
        stopped = isinstance(error, Stopped)
        # before jax's own end, which would wait for the others
        atexit.register(leave, RESUMABLE if stopped else 1)
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            cause = watch.cause(self.config.lost_after + 2 * SLICE)
            if cause:
                watch.fail(cause)
                raise LostProcess(f"{cause}; {self._advice()}") from error
        kind = "" if stopped else f"{type(error).__name__}: "
        watch.fail(f"{kind}{str(error).partition(chr(10))[0]}"[:500], STOPPED if stopped else FAILED)


def _outcome(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except ValueError as error:
        return {"refused": str(error)}


def _join(config: HostsConfig) -> None:
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


class _patience:
    """Ends the process with a sentence where the others do not come in time; the runtime would abort."""

    def __init__(self, place: Place, timeout: float):
        self._timer = threading.Timer(timeout, self._give_up)
        self._timer.daemon = True
        self._said = (
            f"jaxfb: [hosts] not all of the {place.processes} processes came to {place.coordinator} within "
            f"{timeout:g} s; this one is process {place.process_id} on {socket.gethostname()}; start them all with "
            "the same hosts.processes, or raise hosts.timeout"
        )

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_) -> None:
        self._timer.cancel()

    def _give_up(self) -> None:
        print(self._said, file=sys.stderr)
        leave(LOST)
