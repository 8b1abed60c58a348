"""Restores a checkpoint in this process, and tells whether its arrays are those that were saved."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax

from jaxfb.chaos.runs import Laboratory
from jaxfb.checkpoint import CheckpointStore
from jaxfb.config import load_config
from jaxfb.config.sections import HostsConfig
from jaxfb.parallel.totals import checksums
from jaxfb.trainer import make_work
from jaxfb.training.hosts import Hosts

Sums = dict[str, Any]


def restored(laboratory: Laboratory, checkpoints: Path) -> tuple[int, Sums, dict[int, Sums]]:
    """Restores the newest checkpoint that can be read.

    Returns:
      (its update, checksums of the arrays that came back, checksums of all that were saved, by update), out of the
      reference run's records, which nothing happened to.
    """
    abstract = _abstract(laboratory.reference)
    state, record = CheckpointStore(checkpoints).restore(abstract)
    leaves = jax.tree_util.tree_leaves_with_path(state)
    sums = checksums({jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    return (
        record["update"],
        _by_value(sums),
        {step: _by_value(saved) for step, saved in _saved(laboratory).items()},
    )


def _by_value(sums: Sums) -> Sums:
    """Checksums without names: the store names leaves in another way than `keystr`."""
    return {str(number): value for number, value in enumerate(sorted(map(str, sums.values())))}


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
