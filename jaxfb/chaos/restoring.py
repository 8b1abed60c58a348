"""Restores a checkpoint in this process and computes the checksums of what came back."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jaxfb.chaos.runs import Laboratory
from jaxfb.checkpoint.manifest import named_leaves
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import load_config
from jaxfb.config.operation import HostsConfig
from jaxfb.parallel.totals import checksums
from jaxfb.trainer import make_work
from jaxfb.training.job.hosts import Hosts

Sums = dict[str, Any]


def restored(laboratory: Laboratory, checkpoints: Path) -> tuple[int, Sums, dict[int, Sums]]:
    """Restores the newest checkpoint that can be read.

    Returns:
      (its update, checksums of the arrays that came back, checksums of all that were saved, by update), out of the
      reference run's records, which nothing happened to.
    """
    abstract = _abstract(laboratory.reference)
    state, record = CheckpointStore(checkpoints).restore(abstract)
    return record["update"], checksums(named_leaves(state)), _saved(laboratory)


def _saved(laboratory: Laboratory) -> dict[int, Sums]:
    directories = [path for path in (laboratory.reference / "checkpoints").iterdir() if path.name.isdecimal()]
    return {
        int(path.name): json.loads((path / "jaxfb" / "data.json").read_text())["sums"] for path in directories
    }


@lru_cache(maxsize=2)
def _abstract(run: Path) -> Any:
    config = load_config(run)
    with Hosts(HostsConfig()) as hosts:
        work = make_work(config, hosts)
        try:
            return work.abstract_state()
        finally:
            work.close()
