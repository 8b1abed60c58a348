"""Updates that were skipped: said with the names of the leaves, and the end of a run that only skips."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from jaxfb.optim import DynamicLossScale
from jaxfb.train_step import StepMetrics
from jaxfb.training.run import Run
from jaxfb.training.setup import loss_scale

SHOWN = 4


class NonFiniteAbort(RuntimeError):
    """So many updates in a row had gradients that were not finite that going on is pointless."""


class SkipGuard:
    """Watches every update. A skipped one changed no parameter, so the state after it is still good.

    limit:   end the run after so many non-finite updates in a row; None never does.
    patient: do not count them while a dynamic loss scale can still go down.
    params:  anything with the tree structure of the parameters, for the names.
    """

    def __init__(self, limit: int | None, params: Any, say: Callable[[str], None], patient: bool = False):
        self._limit, self._params, self._say, self._patient = limit, params, say, patient
        self._in_a_row = 0

    @classmethod
    def of(cls, run: Run) -> SkipGuard:
        config = run.setup.config
        params = jax.eval_shape(lambda: run.setup.init_params(jax.random.key(0)))
        patient = isinstance(loss_scale(config), DynamicLossScale)
        return cls(config.run.max_nonfinite, params, lambda text: run.say(text), patient)

    def check(self, step: int, metrics: StepMetrics) -> None:
        """Reports a skipped update; raises NonFiniteAbort at the limit. Metrics are on the host."""
        if not metrics.skipped:
            self._in_a_row = 0
        elif math.isfinite(metrics.grad_norm):
            self._say(f"update {step} skipped: its rows count nothing, their loss mask is zero")
        elif self._patient and metrics.loss_scale > 1:
            self._say(f"update {step} skipped: overflow at loss scale {float(metrics.loss_scale):g}")
        else:
            self._count(step, metrics, metrics.nonfinite_leaves(self._params))

    def _count(self, step: int, metrics: StepMetrics, leaves: list[str]) -> None:
        self._in_a_row += 1
        names = ", ".join(leaves[:SHOWN]) + (f" and {len(leaves) - SHOWN} more" if leaves[SHOWN:] else "")
        self._say(
            f"update {step} skipped: loss {float(metrics.loss):.4g}, gradient not finite in "
            f"{names or 'its norm'}; {self._in_a_row} in a row"
        )
        if self._in_a_row == self._limit:
            raise NonFiniteAbort(
                f"[train] {self._in_a_row} updates in a row, up to update {step}, had gradients that are not "
                f"finite, in {names or 'their norm'}; the parameters of before are saved: lower "
                "optimizer.learning_rate or look at the data, then go on with --resume"
            )
