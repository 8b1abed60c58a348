"""Connects the processes of a job by `jax.distributed`: they agree on what they run, and process 0 prints and writes.

Every process runs the same program on the same config; what they tell each other here goes
through the coordinator's key-value store, so it works before the first collective and when there can be none.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TextIO, TypeVar

import jax

from jaxfb.config.operation import HostsConfig
from jaxfb.platforms.compat import coordination, leave_coordination
from jaxfb.platforms.runtime_errors import is_of_network, is_of_runtime
from jaxfb.process.exit_codes import DONE, LOST, REFUSED, RESUMABLE, UNWRITTEN, code_of
from jaxfb.process.fault_points import reach
from jaxfb.process.position import here
from jaxfb.refusal import Refused
from jaxfb.training.job.abort import is_answering, report_before_abort
from jaxfb.training.job.agreement import check_agreement
from jaxfb.training.job.interrupt import Stopped
from jaxfb.training.job.join import join
from jaxfb.training.job.watch import (
    CANNOT_WRITE,
    EXIT_CODES,
    FAILED,
    REFUSES,
    STOPPED,
    LostProcess,
    Watch,
    briefly,
    leave,
    leave_after_main,
    start_again,
)

__all__ = ["LOST", "Hosts", "LostProcess", "leave"]

Value = TypeVar("Value")
ABORT_PATIENCE = 4.0
"""Seconds for an answer of the coordinator before an abort, which the kernel lets take 10."""
SLICE = 5.0  # seconds between two looks at whether there is still time
_rounds = itertools.count()  # the store outlives a `Hosts`, so each has its own keys


class RefusedByAll(Refused):
    """A refusal of process 0 that every process raises at the same point, so that they can still save together."""


class Hosts:
    """The processes of this job while a command runs; used as a context. Alone, every method is immediate.

    index, count: this process and how many there are. is_first: whether this one prints and writes.
    """

    def __init__(self, config: HostsConfig):
        self.config = config
        here.reset()
        join(config)
        self._client, self.index, self.count, self._coordinator = coordination()
        self._prefix, self._calls = f"jaxfb/{next(_rounds)}", itertools.count()
        self._watch: Watch | None = None
        self._slow: set[int] = set()  # processes that were found slow
        self._advice = start_again

    @property
    def is_first(self) -> bool:
        return self.index == 0

    def __enter__(self) -> Hosts:
        if self._coordinator is not None and self.count > 1:
            report_before_abort(self._before_abort, LOST)
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
        else:
            reach("end")
            self._end_together(watch)
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
          ValueError: process 0 raised one; where there are several, each raises `RefusedByAll`.
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
            raise RefusedByAll(outcome["refused"])
        return outcome["value"]

    def in_turn(self, function: Callable[[], Value]) -> Value:
        """Calls `function` on process 0 first; the others call it afterwards and find its results in a cache.

        Raises:
          ValueError: process 0 raised one.
        """
        kept: list[Value] = []
        self.first(lambda: kept.append(function()))  # which the others do not call
        return kept[0] if self.is_first else function()

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Prints a line, once for the whole job; to standard output unless a file is given."""
        if self.is_first:
            print(text, file=file, flush=True)

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

    def _hear_together(self, key: str, without: Sequence[int] = ()) -> None:
        """Waits, on process 0, at most SLICE seconds until the others have read what it wrote: its store ends with it.

        without: processes that are gone.
        """
        self._client.key_value_set(f"{key}/{self.index}", "")
        if self.is_first:
            deadline = time.monotonic() + SLICE
            with contextlib.suppress(LostProcess):
                for other in set(range(self.count)) - set(without):
                    self._wait(f"{key}/{other}", f"process {other} to read it", deadline)

    def _before_abort(self) -> str | None:
        """Returns what to print where the coordination service makes the runtime abort; None for any other abort.

        A coordinator that is stopped still listens, but answers nothing. One that ends the job answers, but the client
        that aborts because of it takes no more calls.
        """
        here, lost = f"process {self.index} of {self.count} ({socket.gethostname()})", None
        if self.index and not is_answering(str(self._coordinator), ABORT_PATIENCE):
            lost = f"process 0 of {self.count}, the coordinator at {self._coordinator}, is gone"
        elif not briefly(self._is_served, False, ABORT_PATIENCE / 2):
            lost = (
                "the coordinator has ended the job, as where a process was started again on its own or two have the "
                "same number (its message is above)"
            )
        return (
            lost
            and f"jaxfb: [hosts] {lost}; {here} ends; {briefly(self._advice, start_again(), ABORT_PATIENCE / 2)}"
        )

    def _is_served(self) -> bool:
        """Returns once the coordinator has answered a call of this process's client."""
        self._client.key_value_dir_get(f"{self._prefix}/failed/")
        return True

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

    def _end_together(self, watch: Watch) -> None:
        """Waits until all have come to their end. Whoever is gone by then is not waited for by jax either.

        It would wait for minutes and then abort the process, after a run of which nothing is missing.

        Raises:
          LostProcess: process 0 is gone, without which nobody knows whether all was written.
        """
        if self.count == 1:
            return
        key = f"{self._prefix}/ended"
        watch.gone()  # from here on this thread decides how the process ends
        try:
            with here.waiting():
                gone = self._gather_at_the_end(key, watch)
                if gone:
                    self._hear_together(f"{key}/heard", without=gone)
                    leave_coordination()
        except jax.errors.JaxRuntimeError as error:
            self._fail(watch, error)
            raise

    def _gather_at_the_end(self, key: str, watch: Watch) -> list[int]:
        """Returns, on every process, whom process 0 has found gone while it waited for all."""
        self._client.key_value_set(f"{key}/{self.index}", "")
        if not self.is_first:
            if (told := self._await(f"{key}/gone", 0, watch)) is None:
                raise LostProcess(f"{watch.cause(SLICE)}; {self._advice()}", EXIT_CODES[watch.kind])
            return json.loads(told)
        gone = [k for k in range(1, self.count) if self._await(f"{key}/{k}", k, watch) is None]
        self._client.key_value_set(f"{key}/gone", json.dumps(gone))
        if gone:
            lost = f"process{'es' * (len(gone) > 1)} {', '.join(map(str, gone))} of {self.count}"
            print(
                f"jaxfb: [hosts] {lost} ended early; all was written before, nothing is missing",
                file=sys.stderr,
            )
        return gone

    def _await(self, key: str, other: int, watch: Watch) -> str | None:
        """Returns what another process writes, or None once it is gone."""
        while True:
            try:
                return self._client.blocking_key_value_get(key, 500)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
            if other in watch.gone():
                return None

    def _fail(self, watch: Watch, error: BaseException) -> None:
        """Notifies the others; where a collective broke, names the process that broke it."""
        if self.count == 1:
            return
        ends = [error]  # the last one decides
        # before jax's own end, which would wait for the others
        atexit.register(lambda: leave(_code_of_program(ends[-1])))
        leave_after_main(lambda: _code_of_program(ends[-1]))
        try:
            self._tell(watch, error)
        except LostProcess as lost:
            ends.append(lost)
            raise

    def _tell(self, watch: Watch, error: BaseException) -> None:
        """Tells the others of an error.

        Raises:
          LostProcess: another process is the cause.
        """
        if is_of_runtime(error) and "RESOURCE_EXHAUSTED" not in str(error):
            cause = watch.cause(self.config.lost_after + 2 * SLICE)
            if cause:
                watch.fail(cause, watch.kind)
                raise LostProcess(f"{cause}; {self._advice()}", EXIT_CODES[watch.kind]) from error
            if is_of_network(error):
                broken = self._broken(error)
                watch.fail(broken)
                raise LostProcess(f"{broken}; {self._advice()}") from error
        kind = _kind_of(error)
        name = "" if kind in (STOPPED, REFUSES) else f"{type(error).__name__}: "
        watch.fail(f"{name}{str(error).partition(chr(10))[0]}"[:500], kind)

    def _broken(self, error: BaseException) -> str:
        """Returns what to say where a computation was cut off from other processes that are all alive."""
        first = str(error).partition("\n")[0][:300]
        return (
            f"[hosts] a computation of process {self.index} of {self.count} ({socket.gethostname()}) lost touch with "
            f"another process, though none is lost, as where the job was suspended for long: {first}"
        )


def _code_of_program(error: BaseException) -> int:
    """Returns the exit code of a program that an error has ended, which `leave` ends before Python does."""
    if isinstance(error, Stopped):
        return RESUMABLE
    if isinstance(error, LostProcess):
        return error.exit_code
    if isinstance(error, SystemExit) and (error.code is None or isinstance(error.code, int)):
        return (error.code or DONE) & 0xFF
    return 1  # as of any program that fails


def _kind_of(error: BaseException) -> str:
    """Returns how a process ends that tells the others of this error."""
    if isinstance(error, Stopped):
        return STOPPED
    return {REFUSED: REFUSES, UNWRITTEN: CANNOT_WRITE}.get(code_of(error), FAILED)


def _outcome(function: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": function()}
    except ValueError as error:
        if is_of_runtime(error):
            raise
        return {"refused": str(error)}
