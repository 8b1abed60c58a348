"""The directory of a run: what lies where, and whether a run may start, continue or is over.

config.yaml plan.json tokenizer.json      what was asked for, resolved
config.until-<update>.yaml                the config of before, where a run went on from that update with another
start.yaml                                of post-training, the config with the model of the run that it started from
metrics.jsonl checkpoints/<update>/       what happened
summary.json loss.png sample.txt          what came of it
.identity                                 a name for what lies on the hosts' own disks
.saved                                    left once a checkpoint is complete, so that lost ones are missed
.lock                                     while a run writes here (`jaxfb.training.persistence.run_lock`)
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxfb.checkpoint.step_directories import step_of
from jaxfb.config import Config, ConfigError, config_to_dict, load_config, save_yaml
from jaxfb.config.load import holds_a_run
from jaxfb.config.post_training import KINDS
from jaxfb.config.smoke import is_kept
from jaxfb.metrics.strict_json import strict_json
from jaxfb.process.whole_file import write_whole
from jaxfb.refusal import shown

# Every file that a run writes or removes by name; none of them is taken from a directory that is not a run's.
FILES = (
    "config.yaml",
    "plan.json",
    "tokenizer.json",
    "start.yaml",
    "metrics.jsonl",
    "summary.json",
    "loss.png",
    "sample.txt",
)

PRIVATE = 0o700  # parameters and text are for the user who runs; chmod shares them


def _inside(name: str) -> cached_property[Path]:
    """Returns a property of a `RunDirectory`: the path of that name in it."""
    return cached_property(lambda directory: directory.path / name)


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; nothing is made before `create`."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        return cls(Path(config.run.dir))

    @property
    def is_kept(self) -> bool:
        """Returns whether it stays after the run, so that what lies in it is worth naming."""
        return is_kept(self.path)

    checkpoints = _inside("checkpoints")
    metrics = _inside("metrics.jsonl")
    tokenizer = _inside("tokenizer.json")
    first_config = _inside("start.yaml")
    summary = _inside("summary.json")
    picture = _inside("loss.png")
    sample = _inside("sample.txt")
    _config = _inside("config.yaml")
    _identity = _inside(".identity")
    _marked = _inside(".shared")
    _saved = _inside(".saved")

    def contents(self) -> list[str]:
        """Returns names of what lies in it, directories with a slash; hidden files are left out."""
        return sorted(p.name + "/" * p.is_dir() for p in self.path.iterdir() if p.name[0] != ".")

    def newest_update(self) -> int | None:
        """Returns the newest update among the checkpoints, by name alone, without opening one."""
        steps = map(step_of, self.checkpoints.iterdir()) if self.checkpoints.is_dir() else ()
        return max((step for step in steps if step is not None), default=None)

    def is_run(self) -> bool:
        """Returns whether a run wrote what is here."""
        return self._config.is_file() and holds_a_run(self.path)

    def finished(self, config: Config) -> dict[str, Any] | None:
        """Returns the summary, if a run of this very config ended here."""
        try:
            if not self.summary.is_file() or self.saved_config() != _but_its_place(config):
                return None
            return json.loads(self.summary.read_text())
        except (
            OSError,
            ValueError,
        ):  # an impossible path is refused by `check`, a torn summary written again
            return None

    def began_as(self, config: Any) -> bool:
        """Returns whether the run that is saved here began with the start and the template of a post-training config:
        then tokenizer, chat and start.yaml are here, and what lies at `start.run` now may be another run.
        """
        if self.newest_update() is None or not self.tokenizer.is_file():
            return False
        is_whole = config.start.run is None or self.first_config.is_file()
        return is_whole and _start_of(self.saved_config() or {}) == _start_of(config_to_dict(config))

    def saved_config(self) -> dict[str, Any] | None:
        """Returns the config of the run that lies here, but for the directory, or None if it cannot be read."""
        try:
            return _but_its_place(load_config(self.path))
        except ValueError:
            return None

    def check(self) -> None:
        """Refuses a path that no run can write into, before anything is read or computed.

        Raises:
          ConfigError: it cannot be a directory, or what lies in it is not what a run puts there.
        """
        try:
            nearest = next(path for path in (self.path, *self.path.absolute().parents) if _exists(path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(
                f"[run] dir={shown(str(self.path))} is not a path: {reason}; use runs/NAME"
            ) from None
        if not nearest.is_dir():
            raise ConfigError(f"[run] dir={self.path}: {nearest} is not a directory; choose another run.dir")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ConfigError(
                f"[run] dir={self.path}: {nearest} cannot be written to; choose another run.dir"
            )
        self._check_kinds()

    def _check_kinds(self) -> None:
        for path in map(self.path.joinpath, FILES):
            if path.is_dir():
                raise ConfigError(f"[run] {path} is a directory, but a run writes a file there; move it away")
        if not self.checkpoints.exists():
            return
        if not self.checkpoints.is_dir():
            raise ConfigError(f"[run] {self.checkpoints} is not a directory; move it away")
        for path in self.checkpoints.iterdir():
            if path.name.isdecimal() and step_of(path) is None:
                raise ConfigError(f"[run] {path} is named like a checkpoint but is not one; move it away")

    def note_saved(self) -> bool:
        """Notes that a checkpoint was completed here, for `refuse_lost`; returns whether that is noted now."""
        if self.newest_update() is None:
            return False
        with contextlib.suppress(OSError):  # such as a full disk, which ends no run that can still save
            self._saved.touch()
        return self._saved.exists()

    def refuse_dangling(self) -> None:
        """Refuses checkpoints behind a symbolic link to nothing, such as a disk that is not mounted.

        Raises:
          ConfigError: no checkpoint could be read or written there.
        """
        if self.checkpoints.is_symlink() and not self.checkpoints.exists():
            raise ConfigError(
                f"[run] {self.checkpoints} is a symbolic link to {os.readlink(self.checkpoints)}, which is not there; "
                "mount or restore that, start over with --fresh (what is here is moved aside), or choose another "
                "run.dir"
            )

    def refuse_lost(self) -> None:
        """Refuses to begin at update 0 where a run was saved whose checkpoints are gone: its records would be erased.

        Raises:
          ConfigError: there is no checkpoint, though one was completed here.
        """
        self.refuse_dangling()
        if self.newest_update() is None and self.is_run() and (self._saved.exists() or self.summary.exists()):
            raise ConfigError(
                f"[run] dir={self.path} contains the records of a run that was saved, but {self.checkpoints} has no "
                "checkpoint any more; put its checkpoints back, start over with --fresh (what is here is moved aside), "
                "or choose another run.dir"
            )

    def refuse_unless_free(self) -> None:
        """Refuses a directory with a saved run, or with files that no run has written.

        Raises:
          ConfigError: it holds checkpoints, the records of a run that had some, or such files.
        """
        self.refuse_lost()
        newest = self.newest_update()
        if newest is not None:
            raise ConfigError(
                f"[run] dir={self.path} contains a run saved at update {newest}; continue it with --resume "
                "(resume=True in a program), start over with --fresh (fresh=True; the old one is moved aside), or "
                "choose another run.dir"
            )
        foreign = [name for name in FILES if (self.path / name).exists()]
        if foreign == ["config.yaml"] and self.saved_config():
            return  # a config that was put there by hand, for the run to be
        if foreign and not self.is_run():
            raise ConfigError(
                f"[run] dir={self.path} is not a run directory, and its {', '.join(foreign)} would be overwritten; "
                "choose another run.dir"
            )

    def refuse_unless_run(self) -> None:
        """Refuses to move anything but a run aside.

        Raises:
          ConfigError: it holds something else.
        """
        if self.path.exists() and any(p.name != ".lock" for p in self.path.iterdir()) and not self.is_run():
            raise ConfigError(
                f"[run] dir={self.path} is not a run directory, so --fresh does not move it aside; "
                "choose another run.dir"
            )

    def move_aside(self) -> Path | None:
        """Renames what is here to a free name beside it; returns that, or None if there was nothing."""
        if not self.is_run():
            return None
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(target)
        return target

    def create(self, config: Config, plan: dict[str, Any], tokenizer: Any, update: int = 0) -> None:
        """Makes the directory and writes what is known at the start; a summary of before is removed.

        update: that the run starts from; another config that lies here is kept as config.until-<update>.yaml.
        """
        self.path.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
        self._keep_config(config, update)
        save_yaml(config, self._config)
        write_json(self.path / "plan.json", plan)
        if tokenizer is not None:
            tokenizer.save(self.tokenizer)
        self.summary.unlink(missing_ok=True)

    def _keep_config(self, config: Config, update: int) -> None:
        if not self._config.is_file() or self.saved_config() == _but_its_place(config):
            return
        kept, number = self.path / f"config.until-{update}.yaml", 1
        while kept.exists():
            number += 1
            kept = self.path / f"config.until-{update}-{number}.yaml"
        write_whole(kept, self._config.read_bytes())

    def mark(self) -> str:
        """Leaves a file here and returns what is in it."""
        text = secrets.token_hex(8)
        self._marked.write_text(text)
        return text

    def shows(self, mark: str, seconds: float) -> bool:
        """Returns whether the file that `mark` left can be read here; network file systems may take their time."""
        deadline = time.monotonic() + seconds
        while not (seen := self._marked.is_file() and self._marked.read_text() == mark):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return seen

    def unmark(self) -> None:
        self._marked.unlink(missing_ok=True)

    def identity(self, new: bool) -> str:
        """Returns a name of the run that no other has, for what it keeps elsewhere.

        A copy of a run gets its own, since both would write to the same place; a directory that was moved does not.

        new: whether a run begins here; then it gets a new one.
        """
        known, place = self._identified(), str(self.path.resolve())
        is_own = known[0] and not new and self.copied_from() is None
        name = known[0] if is_own else secrets.token_hex(16)
        if known != (name, place):
            write_whole(self._identity, f"{name}\n{place}")
        return name

    def copied_from(self) -> Path | None:
        """Returns the directory of the run that this one is a copy of, where that is still there, else None."""
        name, place = self._identified()
        other = RunDirectory(Path(place))
        with contextlib.suppress(OSError):
            if name and place and other._identified()[0] == name and not other.path.samefile(self.path):
                return other.path
        return None

    def _identified(self) -> tuple[str, str]:
        """Returns the name of the run that lies here and the directory it was given in; empty where there is none."""
        try:
            name, _, place = self._identity.read_text().partition("\n")
        except (FileNotFoundError, NotADirectoryError):
            return "", ""
        return name, place

    @property
    def has_identity(self) -> bool:
        return self._identity.is_file()


def _but_its_place(config: Config) -> dict[str, Any]:
    """Returns the config as plain values, without `run.dir`: a run may be moved, and reached by more than one path."""
    values = config_to_dict(config)
    return {**values, "run": {**values["run"], "dir": None}}


def _exists(path: Path) -> bool:
    """Returns `Path.exists`, but raises where the path itself is impossible."""
    try:
        os.stat(path)
    except FileNotFoundError:
        if path.is_symlink():
            raise NotADirectoryError(0, "a symbolic link to nothing") from None
        return False
    return True


def _start_of(values: Mapping[str, Any]) -> list[Any]:
    """Returns what decides sizes, tokenizer and chat in the config of a run of post-training."""
    return [values.get("start"), *(values[name].get("template") for name in KINDS if values.get(name))]


def write_json(path: Path, values: Any) -> None:
    """Writes a file whole or not at all; numbers that are not finite are null."""
    write_whole(path, strict_json(values, indent=2) + "\n")
