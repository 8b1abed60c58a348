"""The checkpoints that a directory has: which are complete, and what is saved beside their arrays.

Nothing is written here and no array is read, so that any process may look alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from etils import epath

from jaxfb.checkpoint.manifest import (
    WHO,
    Mismatch,
    abstract_leaf,
    check_fit_of,
    named_leaves,
    sealed,
    shapes_of,
)
from jaxfb.checkpoint.obstacles import Unreadable, unreadable
from jaxfb.checkpoint.record import RECORD
from jaxfb.checkpoint.step_directories import steps_in
from jaxfb.checkpoint.stored_parts import StoredArrays
from jaxfb.checkpoint.together import NOT_OF_A_FILE
from jaxfb.refusal import INT64, Missing, StorageError, choice, instance, integer, refuse

FORMAT, WITHOUT_SUMS = 2, 1
EXTREMES = ("lowest", "highest")


class SavedSteps:
    """The steps in `directory/<step>/`, each either complete or invisible.

    Args:
      directory: need not exist.
      keep_best: name of a metric by which one step is the best; None: no step is.
      best_is: "lowest" or "highest" value of it; None: "highest" where the name ends in "accuracy".
    """

    def __init__(
        self, directory: str | Path, keep_best: str | None = "eval/loss", best_is: str | None = None
    ):
        if not isinstance(directory, str | os.PathLike) or not str(directory) or "\0" in str(directory):
            refuse("directory", directory, "the path of a directory", who=WHO)
        if keep_best is not None:
            instance("keep_best", keep_best, str, "the name of a metric, or None", who=WHO)
        self.directory = epath.Path(directory).absolute()
        self.keep_best = keep_best
        self.best_is = None if best_is is None else choice("best_is", best_is, EXTREMES, who=WHO)
        self._damaged: set[int] = set()

    def check_fit(self, abstract_state: Any, step: int, partial: bool = False) -> None:
        """Compares names, shapes and dtypes with those of a complete step, without reading its arrays.

        Raises:
          ValueError: they differ; the message lists them.
        """
        wanted = {name: abstract_leaf(leaf) for name, leaf in named_leaves(abstract_state).items()}
        where = f"step {step} of {self.directory}"
        check_fit_of(self._record(step)["leaves"], shapes_of(wanted), where, partial)

    def host(self, step: int | None = None) -> dict:
        """Returns the host dict of a step (None: the newest complete), read without its arrays."""
        return self._record(self.existing(step))["host"]

    def shapes(self, step: int | None = None) -> dict[str, tuple[int, ...]]:
        """Returns the shape of every saved leaf of a step (None: the newest complete) by dotted path."""
        leaves = self._record(self.existing(step))["leaves"]
        return {name: tuple(leaf["shape"]) for name, leaf in leaves.items()}

    def arrays(self, step: int) -> StoredArrays:
        """Returns the saved leaves of a step by dotted path, to be read a part at a time."""
        record = self._record(step)
        sums = {name: record.get("sums", {}).get(name) for name in record["leaves"]}
        return StoredArrays(self.directory / str(step) / "state", sums)

    def existing(self, step: int | None = None) -> int:
        """Returns the step itself, the newest complete one for None.

        Raises:
          FileNotFoundError: there is none.
        """
        if step is None:
            step = self.latest()
        else:
            integer("step", step, who=WHO, least=0, most=INT64)
        if step is None or not (self.directory / str(step)).is_dir():
            raise Missing(self._no_step(step))
        return step

    def steps(self) -> list[int]:
        """Returns complete steps, oldest first. One without a readable manifest is none, nor one that `restore` passed
        over as damaged.
        """
        return [step for step in steps_in(self.directory) if self._is_complete(step)]

    def latest(self) -> int | None:
        """Returns the newest complete step; a save still being written does not count."""
        return next((step for step in reversed(steps_in(self.directory)) if self._is_complete(step)), None)

    def best(self) -> int | None:
        """Returns the complete step with the best `keep_best` metric, the newer of equals."""
        scored = []
        for step in self.steps():
            score = self._score(self._record(step)["host"])
            if score is not None:
                scored.append((score["score"], -step))
        return -min(scored)[1] if scored else None

    def _record(self, step: int) -> dict:
        # Read as a file: Orbax's reading is a collective, and one process may look at steps alone.
        path = self.directory / str(step)
        with unless_prevented(path):
            record = json.loads((path / RECORD / "data.json").read_text())
        _refuse_newer(record, f"step {step} of {self.directory}")
        if not isinstance(record, dict) or record.get("format") not in (FORMAT, WITHOUT_SUMS):
            raise StorageError(f"{path} contains no jaxfb checkpoint of format {FORMAT}")
        if record["format"] == FORMAT and record != sealed(record):
            raise StorageError(f"the record of {path} is not the one that was written")
        if (saved := record.get("step", step)) != step:  # older records have none
            raise StorageError(f"step {step} is a copy of step {saved}")
        return record

    def _is_complete(self, step: int) -> bool:
        try:
            return step not in self._damaged and bool(self._record(step))
        except (Unreadable, Mismatch):  # nothing is known to be wrong with it; reading it raises
            return True
        except Exception:  # whatever is wrong with it, it is not a checkpoint one can resume from
            return False

    def _score(self, host: Mapping[str, Any]) -> dict | None:
        """Returns a number that is lower where the step is better; None where the metric is not known or not finite."""
        value = (host.get("metrics") or {}).get(self.keep_best) if self.keep_best else None
        if value is None or not math.isfinite(value):
            return None
        is_highest = (self.best_is or usual_best(self.keep_best)) == "highest"
        return {"score": -float(value) if is_highest else float(value)}

    def _no_step(self, step: int | None) -> str:
        have = ", ".join(map(str, self.steps())) or "none"
        what = "no checkpoint that can be read" if step is None else f"no checkpoint of step {step}"
        return f"[checkpoint] {what} in {self.directory}; complete steps: {have}"


def usual_best(metric: str | None) -> str:
    """Returns whether the best value of a metric is the "highest", as of an accuracy, or the "lowest", as of a loss."""
    return "highest" if metric is not None and metric.endswith("accuracy") else "lowest"


@contextlib.contextmanager
def unless_prevented(checkpoint: epath.Path) -> Iterator[None]:
    """Raises Unreadable in place of an error whose cause is that this process may not read the checkpoint."""
    try:
        yield
    except (*NOT_OF_A_FILE, Mismatch):
        raise
    except Exception as error:
        if told := unreadable(checkpoint, error):
            raise told from error
        raise


def _refuse_newer(record: Any, where: str) -> None:
    """Refuses the whole record of a later format: nothing is damaged, and an older step is not what was asked for."""
    found = record.get("format") if isinstance(record, dict) else None
    if type(found) is int and found > FORMAT and record == sealed(record):
        raise Mismatch(
            f"[checkpoint] {where} has format {found}, which a newer jaxfb has written, and this one reads up to "
            f"{FORMAT}; continue with the newer one, or in another run directory"
        )
