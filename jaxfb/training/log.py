"""The trainer's own logging: a callback like any user's, to the terminal and to the metrics file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxfb.callbacks import Callback
from jaxfb.config import config_to_dict
from jaxfb.display import Progress
from jaxfb.metrics import Throughput, arrays, make_writers, scalars
from jaxfb.process.os_errors import FULL
from jaxfb.process.position import here
from jaxfb.training.phases import PHASES
from jaxfb.training.session import Run
from jaxfb.update.train_state import StepMetrics


class Log(Callback):
    """Shows every step on a live line and writes every `log.every`-th record; used as a context.

    fail: called once, with a sentence and what to do, where a record cannot be written. Those that metrics.jsonl does
      not take are `run.unwritten`, which is saved.
    """

    def __init__(self, run: Run, fail: Callable[[str, str], None]):
        self._fail, self._failed, self._path = fail, False, run.directory.metrics
        self._check_directory = run.check_directory
        self._every, self._total = run.config.log.every, run.total
        self._progress = Progress(run.total, run.done)
        self._throughput, self._timed = Throughput(), False
        self._flops, self._devices = run.work.flops_per_token, run.work.mesh.size
        self._writer = make_writers(
            run.config.log.writers,
            run.directory.path,
            config_to_dict(run.config),
            resume=run.done if run.resumed else None,
            unwritten=run.unwritten,
            say=self._progress.say,
        )
        run.say = self._progress.say

    def __enter__(self) -> Log:
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)
        with self._noticing(), here.alone():
            here.enter("closing")
            self._writer.close()

    def on_step_end(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._count(step, int(metrics.get("tokens", 0)))
        due = step % self._every == 0 or step in (1, self._total)
        record = {**self._speed(), **metrics}
        self._progress.update(step, record, self._throughput.seconds_left(self._total), line=due)
        if due or metrics["skipped"]:
            self._write(step, record)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._write(step, metrics)
            self._progress.say(f"{step}/{self._total}  held-out {held_out(metrics)}")
        self._throughput.start(step)

    def on_save(self, step: int, directory: Any) -> None:
        self._throughput.start(step)

    def _write(self, step: int, record: Mapping[str, Any]) -> None:
        with self._noticing():
            self._check_directory()
            self._writer.write(step, record)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """Ends the run in an orderly way where a write fails, not right there: the state is still to be saved."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                remedy = "free some space, then " if error.errno in FULL else ""
                self._fail(f"[log] {self._path} cannot be written: {error.strerror or error}", remedy)

    def _count(self, step: int, tokens: int) -> None:
        """Counts time from the end of a process's first step, which compiles."""
        if self._timed:
            self._throughput.update(step, tokens)
        else:
            self._throughput.start(step)
            self._timed = True

    def _speed(self) -> dict[str, float]:
        rate, seconds = self._throughput.tokens_per_second, self._throughput.seconds_per_step
        if rate is None or seconds is None:
            return {}
        if not rate:  # rows of your own, which have no tokens to count
            return {"seconds_per_step": seconds}
        speed = {"tokens_per_second": rate, "seconds_per_step": seconds}
        if self._flops is not None:
            speed["teraflops_per_device"] = rate * self._flops / self._devices / 1e12
        return speed


OF_A_RECORD = frozenset(
    "step rows tokens epoch goodput tokens_per_second seconds_per_step teraflops_per_device host_seconds "
    "forward_backward_seconds optimizer_seconds".split()
) | {f"{phase}_seconds" for phase in PHASES}
"""Names that a record has beside those of `StepMetrics`."""


def named_numbers(metrics: StepMetrics) -> dict[str, Any]:
    """Returns the numbers of one update by name.

    A metric of many numbers, such as the load of each expert of each layer, is a list, and its "/min", "/mean" and
    "/max" are numbers beside it. A metric of the model's whose name a record has already, such as "loss", is
    "metrics/loss".
    """
    named = scalars(replace(metrics, nonfinite=None)) | arrays(metrics.metrics)
    named["applied_updates"] = named.pop("step")
    taken = {*named, *OF_A_RECORD}
    short = {name: name.removeprefix("metrics/") for name in named}
    return {name if short[name] in taken else short[name]: value for name, value in named.items()}


def held_out(metrics: Mapping[str, float]) -> str:
    """Returns `loss 3.2101 nats/token  1.9810 bits/byte`, or what your own evaluation returned, without units."""
    nats = " nats/token" if "eval/tokens" in metrics else ""
    units = {"eval/loss": ("loss ", nats), "eval/bits_per_byte": ("", " bits/byte")}
    shown = [
        f"{before}{metrics[name]:.4f}{after}" for name, (before, after) in units.items() if name in metrics
    ]
    rest = {n: value for n, value in metrics.items() if n not in units and n != "eval/tokens"}
    if "eval/loss" in metrics and "eval/bits_per_byte" in metrics:
        rest = {}
    return "  ".join([*shown, *(f"{name.removeprefix('eval/')} {value:.4f}" for name, value in rest.items())])
