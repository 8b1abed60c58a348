"""Named points of a run at which `JAXFB_KILL_AT=point:count` kills its process, to prove that nothing is lost there.

Without that variable a point costs one look into the environment. `jaxfb chaos` and the tests set it.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from jaxfb.refusal import Refused, choice

VARIABLE = "JAXFB_KILL_AT"
POINTS = {
    "start": "the config is read, no device is asked for",
    "start.ready": "parameters and optimizer state are made or restored, no update was computed",
    "read": "the rows of an update are read",
    "update": "an update was dispatched, its numbers are not there",
    "logged": "the record of an update was handed to the writers",
    "eval": "an evaluation begins",
    "eval.done": "an evaluation is over, nothing of it is saved",
    "save": "a save begins, nothing is written",
    "save.writing": "the arrays are being written",
    "save.renaming": "all is written, the checkpoint is about to get its name",
    "save.done": "the checkpoint has its name",
    "local": "a local checkpoint is about to be written",
    "local.done": "one file of a local checkpoint is written",
    "restore": "a checkpoint is about to be read",
    "restore.done": "a checkpoint was read",
    "rollout": "a rollout is about to be sampled",
    "rollout.done": "a rollout was sampled and rewarded, none of it was trained on",
    "end": "all is done and written, the process has not ended",
}
_reached: Counter[str] = Counter()


def reach(point: str) -> None:
    """Kills this process with SIGKILL if it is to die at this point and has reached it often enough.

    Raises:
      ValueError: the variable names no point, or is no point and a count.
    """
    if wanted := os.environ.get(VARIABLE):
        name, count = _place(wanted)
        _reached[point] += 1
        if point == name and _reached[point] == count:
            os.kill(os.getpid(), signal.SIGKILL)


def _place(wanted: str) -> tuple[str, int]:
    """Returns the point and how often it is to be reached."""
    name, colon, count = wanted.partition(":")
    choice(VARIABLE, name, POINTS)
    if colon and not (count.isdecimal() and int(count)):
        raise Refused(f"{VARIABLE}={wanted} must end with a count; use {name}:1")
    return name, int(count or 1)


def watch_renames(directory: Any) -> None:
    """Makes every rename of a path into `directory` reach "save.renaming"; nothing unless a process is to die there.

    The rename happens deep in the library that writes checkpoints, in its own thread.
    """
    if not os.environ.get(VARIABLE, "").startswith("save.renaming"):
        return
    parent = Path(os.fspath(directory)).absolute()
    for name in ("rename", "replace"):
        setattr(os, name, _announced(getattr(os, name), parent))


def _announced(move: Any, parent: Path) -> Any:
    def moved(source: Any, target: Any, **more: Any) -> Any:
        if Path(os.fspath(target)).absolute().parent == parent:
            reach("save.renaming")
        return move(source, target, **more)

    return moved
