"""Stores what a search has found so far in a file, so that a search that was stopped continues from there."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from jaxfb.config import Config, config_to_dict
from jaxfb.planner.compiled import Compiled, TooLarge
from jaxfb.planner.formula.estimate import Estimate
from jaxfb.planner.gpu import version_of
from jaxfb.planner.topology import Topology, parse_topology
from jaxfb.planner.verdict import Verdict
from jaxfb.training.job.versions import source_fingerprint

_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")


class Known:
    """Verdicts by layout, read from and added to a file of JSON lines; without a path, in memory alone.

    A verdict is used again only for the same config, topology, compiler flags, source of jaxfb, and versions of JAX
    and its compilers.
    """

    def __init__(self, path: Path | None = None):
        self._path = path
        self._rows: dict[str, dict] = {}
        for line in path.read_text().splitlines() if path and path.exists() else ():
            row = _read(line)
            self._rows |= {row["key"]: row} if row else {}

    def get(self, config: Config, topology: Topology) -> Verdict | None:
        """Returns the verdict of a layout, with the compiler's answer where there was one."""
        row = self._rows.get(_key(config, topology))
        return _from_row(row) if row else None

    def add(self, config: Config, verdict: Verdict) -> None:
        """Appends a verdict; a later one of the same layout replaces it."""
        row = {"key": _key(config, verdict.topology), **_to_row(verdict)}
        self._rows[row["key"]] = row
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _read(line: str) -> dict | None:
    """Reads a row; None for a line that was cut off when its search was killed."""
    try:
        return json.loads(line)
    except json.JSONDecodeError:
        return None


def _key(config: Config, topology: Topology) -> str:
    flags = [os.environ.get(name) for name in _FLAGS]
    asked = json.dumps([config_to_dict(config), topology.text, flags, _versions()], sort_keys=True)
    return hashlib.sha256(asked.encode()).hexdigest()


@cache
def _versions() -> list[str | None]:
    """Returns what an answer depends on beside the question: jaxfb's own source, and the packages that compile."""
    return [source_fingerprint(), *map(version_of, _PACKAGES)]


def _to_row(verdict: Verdict) -> dict[str, Any]:
    compiled = verdict.compiled
    return {
        **vars(verdict),
        "topology": verdict.topology.text,
        "estimate": vars(verdict.estimate),
        "compiled": asdict(compiled) if isinstance(compiled, Compiled) else None,
        "too_large": asdict(compiled) if isinstance(compiled, TooLarge) else None,
    }


def _from_row(row: dict[str, Any]) -> Verdict:
    values = {name: value for name, value in row.items() if name not in ("key", "too_large")}
    values |= {"topology": parse_topology(row["topology"]), "estimate": Estimate(**row["estimate"])}
    for name, kind in (("compiled", Compiled), ("too_large", TooLarge)):
        if row[name]:
            values["compiled"] = kind(**row[name])
    return Verdict(**values)
