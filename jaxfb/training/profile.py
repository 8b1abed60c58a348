"""`jaxfb train --profile`: a trace of a few updates, for TensorBoard or ui.perfetto.dev.

The phases carry names: forward, backward, accumulate, embed, layers (attention, mlp), head, optimizer; under a
pipeline phase_F, F, B and W.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxfb.callbacks import Callback


class Profile(Callback):
    """Traces `steps` updates, after as many of this process have gone by that nothing compiles any more.

    directory: None is `trace` in the run's.
    """

    def __init__(self, directory: str | Path | None = None, skip: int = 2, steps: int = 3):
        self._directory, self._skip, self._steps = directory, skip, steps
        self._first: int | None = None
        self._last = 0
        self._run: Any = None
        self._begun = False

    def on_train_start(self, run: Any) -> None:
        self._run = run
        run.ending.callback(self._stop)  # of a run that ends while it is traced

    def on_step_start(self, step: int) -> None:
        if self._first is None:
            self._first = step + self._skip
        if step < self._first + self._steps:
            self._last = step
        if step == self._first:
            self._run.sync()
            self._begun = self._written(lambda: jax.profiler.start_trace(self._where))
        elif step == self._first + self._steps:
            self._run.sync()
            self._stop()

    def on_train_end(self, step: int, metrics: Any) -> None:
        self._run.sync()
        self._stop()

    def _written(self, write: Callable[[], None]) -> bool:
        """Returns whether a part of the trace was written; a disk that does not take it must not end the run."""
        try:
            write()
        except (OSError, RuntimeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            self._run.say(f"no trace is written to {self._where}, the run goes on without: {reason}")
            return False
        return True

    @property
    def _where(self) -> str:
        return str(self._directory or self._run.directory.path / "trace")

    def _stop(self) -> None:
        begun, self._begun = self._begun, False
        if not begun or not self._written(jax.profiler.stop_trace):
            return
        traces = sorted(Path(self._where).rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
        opened = f"open {traces[-1]} at https://ui.perfetto.dev, or " if traces else ""
        self._run.say(
            f"traced updates {self._first} to {self._last} into {self._where}: {opened}"
            f"tensorboard --logdir {self._where}"
        )
