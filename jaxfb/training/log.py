"""The trainer's own logging: a callback like any user's, to the terminal and to the metrics file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from jaxfb.batch_plan import Window
from jaxfb.callbacks import Callback
from jaxfb.config import config_to_dict
from jaxfb.display import Progress
from jaxfb.metrics import Throughput, arrays, make_writers, scalars
from jaxfb.models.config import flops_per_token
from jaxfb.train_step import StepMetrics
from jaxfb.training.evaluate import TERM
from jaxfb.training.run import Run


class Log(Callback):
    """Shows every step on a live line and writes every `log.every`-th record; used as a context.

    fail: called once, with a sentence, where a record cannot be written; none is tried after that.
    """

    def __init__(self, run: Run, fail: Callable[[str], None]):
        self._fail, self._failed = fail, False
        self._config, self._total = run.setup.config, run.total
        self._progress = Progress(run.total, run.done)
        self._throughput, self._timed = Throughput(), False
        self._flops = flops_per_token(run.setup.sizes, self._config.data.sequence_length)
        self._devices = run.setup.mesh.size
        self._path = run.directory.metrics
        self._writer = make_writers(
            self._config.log.writers,
            run.directory.path,
            config_to_dict(self._config),
            resume=run.done if run.resumed else None,
        )

    def __enter__(self) -> Log:
        self._progress.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self._progress.__exit__(*error)
        with self._noticing():
            self._writer.close()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._progress.say(text)

    def on_train_start(self, run: Run) -> None:
        run.say = self.say

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        self._count(step, int(metrics["tokens"]))
        due = step % self._config.log.every == 0 or step in (1, self._total)
        record = {**metrics, **self._speed()}
        self._progress.update(step, record, self._throughput.seconds_left(self._total), line=due)
        if due or metrics["skipped"]:
            self._write(step, record)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        if metrics:
            self._write(step, metrics)
            self.say(f"{step}/{self._total}  held-out {held_out(metrics)}")
        self._throughput.start(step)

    def on_save(self, step: int, directory: Any) -> None:
        self._throughput.start(step)

    def _write(self, step: int, record: Mapping[str, Any]) -> None:
        if not self._failed:
            with self._noticing():
                self._writer.write(step, record)

    @contextmanager
    def _noticing(self) -> Iterator[None]:
        """A failing write ends the run in an orderly way, not where it happens: the state is still to be saved."""
        try:
            yield
        except OSError as error:
            if not self._failed:
                self._failed = True
                self._fail(f"[log] {self._path} cannot be written: {error.strerror or error}")

    def _count(self, step: int, tokens: int) -> None:
        """The first step of a process compiles: time is counted from its end."""
        if self._timed:
            self._throughput.update(step, tokens)
        else:
            self._throughput.start(step)
            self._timed = True

    def _speed(self) -> dict[str, float]:
        rate, seconds = self._throughput.tokens_per_second, self._throughput.seconds_per_step
        if rate is None or seconds is None:
            return {}
        teraflops = rate * self._flops / self._devices / 1e12
        return {
            "tokens_per_second": rate,
            "seconds_per_step": seconds,
            "teraflops_per_device": teraflops,
        }


def record_of(metrics: StepMetrics, window: Window, rows_an_epoch: int) -> dict[str, Any]:
    """The numbers of one update by name; `tokens` are those that its loss counted.

    A metric of many numbers, such as the load of each expert of each layer, is a list, and its "/min", "/mean" and
    "/max" are numbers beside it.
    """
    named = scalars(replace(metrics, nonfinite=None)) | arrays(metrics.metrics)
    named["applied_updates"] = named.pop("step")
    record = {name.removeprefix("metrics/"): value for name, value in named.items()}
    tokens = record.pop(f"weights/{TERM}")
    epoch = (window.start + window.rows) / rows_an_epoch
    return {**record, "tokens": tokens, "rows": window.rows, "epoch": epoch}


def held_out(metrics: Mapping[str, float]) -> str:
    """`loss 3.2101 nats/token  1.981 bits/byte`."""
    bits = metrics.get("eval/bits_per_byte")
    return f"loss {metrics['eval/loss']:.4f} nats/token" + ("" if bits is None else f"  {bits:.4f} bits/byte")
