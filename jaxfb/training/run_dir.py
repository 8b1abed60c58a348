"""The directory of a run: what lies where, and whether a run may start, go on or is over.

config.yaml plan.json tokenizer.json      what was asked for, resolved
metrics.jsonl checkpoints/<update>/       what happened
summary.json loss.png sample.txt          what came of it
"""

from __future__ import annotations

import json
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxfb.config import Config, ConfigError, config_to_dict, load_config, save_yaml


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run; nothing is made before `create`."""

    path: Path

    @classmethod
    def of(cls, config: Config) -> RunDirectory:
        return cls(Path(config.run.dir))

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def sample(self) -> Path:
        return self.path / "sample.txt"

    def contents(self) -> list[str]:
        """Names of what lies in it, directories with a slash."""
        return sorted(p.name + "/" * p.is_dir() for p in self.path.iterdir())

    def newest_update(self) -> int | None:
        """Of the checkpoints by name alone, without opening one."""
        names = [p.name for p in self.checkpoints.iterdir()] if self.checkpoints.is_dir() else []
        return max((int(name) for name in names if name.isdecimal()), default=None)

    def finished(self, config: Config) -> dict[str, Any] | None:
        """The summary, if a run of this very config ended here."""
        if not self.summary.is_file() or self.saved_config() != config_to_dict(config):
            return None
        return json.loads(self.summary.read_text())

    def saved_config(self) -> dict[str, Any] | None:
        """The config of the run that lies here, or None if it cannot be read."""
        try:
            return config_to_dict(load_config(self.path))
        except ValueError:
            return None

    def refuse_unless_free(self) -> None:
        """A new run does not write into one that has been saved.

        Raises:
          ConfigError: it holds checkpoints.
        """
        newest = self.newest_update()
        if newest is not None:
            raise ConfigError(
                f"[run] dir={self.path} holds a run saved at update {newest}; go on with --resume, start "
                "over with --fresh (the old one is moved aside), or choose another run.dir"
            )

    def move_aside(self) -> Path | None:
        """Renames what is here to a free name beside it; returns that, or None if there was nothing."""
        if not self.path.exists():
            return None
        number = 1
        while (target := self.path.with_name(f"{self.path.name}.old{number}")).exists():
            number += 1
        self.path.rename(target)
        return target

    def create(self, config: Config, plan: dict[str, Any], tokenizer: Any) -> None:
        """Makes the directory and writes what is known at the start; a summary of before is removed."""
        self.path.mkdir(parents=True, exist_ok=True)
        save_yaml(config, self.path / "config.yaml")
        write_json(self.path / "plan.json", plan)
        if tokenizer is not None:
            tokenizer.save(self.tokenizer)
        self.summary.unlink(missing_ok=True)

    def mark(self) -> str:
        """Leaves a file here and returns what is in it."""
        text = secrets.token_hex(8)
        self._marked.write_text(text)
        return text

    def shows(self, mark: str, seconds: float) -> bool:
        """Whether what `mark` left can be read here; network file systems may take their time."""
        deadline = time.monotonic() + seconds
        while not (seen := self._marked.is_file() and self._marked.read_text() == mark):
            if time.monotonic() > deadline:
                break
            time.sleep(0.1)
        return seen

    def unmark(self) -> None:
        self._marked.unlink(missing_ok=True)

    @property
    def _marked(self) -> Path:
        return self.path / ".shared"


def write_json(path: Path, values: Any) -> None:
    """Whole or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(values, indent=2) + "\n")
    os.replace(temporary, path)
