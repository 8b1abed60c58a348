"""Updates that were skipped: reported with what was not finite, and the end of a run that only skips.

A checkpoint is worth having only if training can continue from it. So nothing is saved while the latest updates failed,
nor where the state itself holds a nan or an inf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jaxfb.optim import DynamicLossScale
from jaxfb.parallel.totals import finite
from jaxfb.process.exit_codes import FAULTY, GAVE_UP
from jaxfb.training.from_config.dtypes import loss_scale
from jaxfb.update.train_state import StepMetrics

SHOWN = 4


class GuardAbort(RuntimeError):
    """A guard ends the run; what was saved before is sound.

    exit_code: that of the command line. rate: the key of the learning rate that may be too high.
    """

    exit_code = GAVE_UP
    rate = "optimizer.learning_rate"


class NonFiniteAbort(GuardAbort):
    """Ends a run after so many updates in a row that were not finite, or whose state is not."""


class CriticAbort(NonFiniteAbort):
    """Ends a run after so many updates of its critic in a row that were not finite."""

    rate = "critic.learning_rate"


class SpikeAbort(GuardAbort):
    """The run returned to one checkpoint as often as `guard.max_rollbacks` allows, and another spike came."""


class DeviceFault(GuardAbort):
    """A device computes wrongly, or keeps wrong copies: the run must continue without it."""

    exit_code = FAULTY


class SkipGuard:
    """Watches every update. A skipped one changed no parameter, but they may have been bad before it.

    limit:   end the run after so many failed updates in a row; None never does.
    patient: do not count gradients that overflow while a dynamic loss scale can still go down.
    params:  anything with the tree structure of the parameters, for the names.
    whose:   what the updates are of if not of the trained model, such as "the critic". error: ends the run.

    failed: updates in a row, up to the latest, that were not finite; while it is not 0 nothing is to be saved.
    """

    def __init__(
        self,
        limit: int | None,
        params: Any,
        say: Callable[[str], None],
        patient: bool = False,
        whose: str = "",
        error: type[NonFiniteAbort] = NonFiniteAbort,
    ):
        self._limit, self._params, self._say, self._patient = limit, params, say, patient
        self._of, self._error = f" of {whose}" if whose else "", error
        self._in_a_row = self.failed = 0

    @classmethod
    def of(cls, config: Any, params: Any, say: Callable[[str], None], **more: Any) -> SkipGuard:
        """Returns the guard that a config asks for. more: `whose` and `error`, as for the class."""
        patient = isinstance(loss_scale(config), DynamicLossScale)
        return cls(config.run.max_nonfinite, params, say, patient, **more)

    def check(self, step: int, metrics: StepMetrics) -> None:
        """Reports a skipped update; raises NonFiniteAbort at the limit. Metrics are on the host."""
        causes = metrics.nonfinite_causes(self._params)
        if not causes:
            if metrics.skipped and not metrics.spike:
                self._say(f"update {step}{self._of} skipped: its loss mask is zero, so no token counts")
            else:
                self._in_a_row = self.failed = 0
        elif self._patient and metrics.loss_scale > 1 and "parameters" not in causes:
            # Gradients alone may overflow, and the next scale is lower; a loss that does is a sign of more.
            self.failed += "loss" in causes
            self._say(
                f"update {step}{self._of} skipped: overflow at loss scale {float(metrics.loss_scale):g}"
            )
        else:
            self._count(step, metrics, described(causes))

    def _count(self, step: int, metrics: StepMetrics, what: str) -> None:
        self._in_a_row, self.failed = self._in_a_row + 1, self.failed + 1
        self._say(
            f"update {step}{self._of} skipped: loss {float(metrics.loss):.4g}, not finite in {what}; "
            f"{self._in_a_row} in a row"
        )
        if self._in_a_row == self._limit:
            raise self._error(
                f"[train] {self._in_a_row} updates{self._of} in a row, up to update {step}, were not finite in {what}"
            )


def described(causes: dict[str, list[str]]) -> str:
    """Returns, such as `parameter ['norm']['scale'], the loss, gradient of ['embed'] and 3 more`, causes before
    effects.

    causes: from `StepMetrics.nonfinite_causes`.
    """
    words = {
        "parameters": "parameter ",
        "loss": "the loss",
        "gradients": "gradient of ",
        "updates": "update of ",
    }
    return ", ".join(word + listed(causes[part]) for part, word in words.items() if part in causes)


def listed(names: list[str]) -> str:
    """Returns the first names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if names[SHOWN:] else "")


def trained(state: Any) -> dict[str, Any]:
    """Returns the parts of a saved state that training changes, and which must therefore be finite."""
    parts = state if isinstance(state, dict) else vars(state)
    return {name: parts[name] for name in ("params", "opt_state", "critic") if name in parts}


def unsound_leaves(tree: Any) -> list[str]:
    """Returns the paths of the float leaves with a nan in them, or an inf; a single number may be infinite.

    (Some optimizers begin with an infinite best value.) Every process of a job must call it; it waits for the devices.
    """
    return [name for name, is_finite in finite(by_path(tree)).items() if not is_finite]


def by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths, such as "['layers']['w1']"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
