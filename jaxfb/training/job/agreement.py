"""Checks that all processes of a job run the same config, code, packages and text, before the first collective.

Processes that do not would wait for each other for ever, or worse: train on something else than anybody asked for.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.config import Config, as_yaml, table
from jaxfb.refusal import Refused
from jaxfb.training.job.versions import SOURCE, package_versions, source_fingerprint
from jaxfb.training.setup import Setup

FLAGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
"""Settings of jax that decide the bits; the environment may set them on one host alone."""
COMPILERS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
"""Variables of the environment with flags of the compiler, which decide the bits as well."""
OF_A_HOST = ("dump", "cache", "_dir", "device_count")
"""Words in the names of flags that say where files lie, or of devices, which are compared themselves."""
SHOWN = 6
ABSENT = "(absent)"


def what_runs(config: Config, **more: Any) -> dict[str, Any]:
    """Returns every key of the config, versions of Python and the packages, jaxfb's own code, settings of jax, and
    flags of the compiler.
    """
    keys = {name: value for name, value in table(config) if not name.startswith("hosts.")}
    flags = {name: getattr(jax.config, name) for name in FLAGS}
    source = {SOURCE: source_fingerprint()}
    return {**keys, **package_versions(), **source, **flags, **compiler_flags(), **more}


def what_is_made(setup: Setup) -> dict[str, Any]:
    """Returns the text as rows, every plan, the mesh, and the devices of a process."""
    corpus = setup.corpus
    rows = {"train": corpus.train, "held out": corpus.held_out}
    return {
        **{f"text: {name}": f"{split.fingerprint} ({len(split):,} rows)" for name, split in rows.items()},
        "vocabulary": corpus.vocab_size,
        **{f"plan: {purpose}": plan.fingerprint() for purpose, plan in setup.plan.by_purpose.items()},
        "updates": setup.plan.total_updates,
        **devices_and_mesh(setup.mesh),
    }


def devices_and_mesh(mesh: Mesh) -> dict[str, str]:
    """Returns the mesh, and the devices of a process, in words."""
    devices = jax.local_devices()
    return {
        "mesh": " x ".join(f"{axis} {size}" for axis, size in mesh.shape.items()),
        "devices": f"{len(devices)} x {devices[0].device_kind}",
    }


def compiler_flags() -> dict[str, str]:
    """Returns the compiler's flags in the environment, by variable and name; the last of a name counts, as for XLA."""
    found = {}
    for variable in COMPILERS:
        text = os.environ.get(variable, "")
        if text and not text.lstrip().startswith("-"):  # the name of a file with the flags
            with contextlib.suppress(OSError, ValueError):
                text = Path(text).read_text()
        for word in text.split():
            name, _, value = word.partition("=")
            if not any(part in name for part in OF_A_HOST):
                found[f"{variable} {name}"] = value or "true"
    return found


def check_agreement(what: str, facts: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Refuses facts that are not the same on every process.

    Args:
      what: the processes differ in, such as "config or code".
      facts: of each process, by name.
      names: of the host each runs on.
    Raises:
      ValueError: which values there are of what, and which processes have them.
    """
    keys = dict.fromkeys(key for one in facts for key in one)
    lines = [
        f"{key} is {_who_has([one.get(key, ABSENT) for one in facts], names)}"
        for key in keys
        if any(one.get(key, ABSENT) != facts[0].get(key, ABSENT) for one in facts)
    ]
    if lines:
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise Refused(
            f"[hosts] the {len(facts)} processes differ in {what}: {'; '.join(lines[:SHOWN])}{more}; start all "
            "with the same"
        )


def _who_has(values: Sequence[Any], names: Sequence[str]) -> str:
    """Returns `0.01 on processes 0, 2-7 but 0.02 on process 1 (node3)`: the commonest value first."""
    holders: dict[str, list[int]] = {}
    for index, value in enumerate(values):
        holders.setdefault(as_yaml(value), []).append(index)
    common = sorted(holders.items(), key=lambda item: (-len(item[1]), item[1]))
    return " but ".join(f"{value} on {_processes(indices, names)}" for value, indices in common)


def _processes(indices: Sequence[int], names: Sequence[str]) -> str:
    if len(indices) == 1:
        return f"process {indices[0]} ({names[indices[0]]})"
    return f"processes {', '.join(_ranges(indices))}"


def _ranges(indices: Sequence[int]) -> Iterable[str]:
    """Maps [0, 2, 3, 4] -> "0", "2-4"."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return (f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
