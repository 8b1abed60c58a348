"""MaxText's own train step, as its `train_compile` lowers it for a TPU that is not there.

Nothing of MaxText is changed: what it would compile is handed to whoever asks, who compiles it with his own options.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "DECOUPLE_GCLOUD": "TRUE",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

import jax
from maxtext.trainers.pre_train import train_compile
from maxtext_step import ALONE, BASE

COUNTED_BY_CORES = ("v4", "v5p")


def compile_step(
    options: dict[str, Any], topology: str, compiled: Callable[[jax.stages.Lowered], Any]
) -> None:
    """Lowers the step of these keys of MaxText's base.yml for a topology such as `v5e:4x4`, and has it compiled.

    compiled: compiles what it is given, and returns the executable.
    """
    plain = jax.stages.Lowered.compile

    def instead(lowered, *_, **__):
        with mock.patch.object(jax.stages.Lowered, "compile", plain):
            return compiled(lowered)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(jax.stages.Lowered, "compile", instead),
    ):
        target = {"compile_topology": _name(topology), "compile_topology_num_slices": 1, "steps": 6}
        keys = ALONE | target | options | {"hardware": "tpu", "base_output_directory": folder}
        train_compile.main([sys.argv[0], str(BASE), *(f"{name}={value}" for name, value in keys.items())])


def _name(topology: str) -> str:
    """MaxText's name of a slice: `v5p:4x4x4` is v5p-128, since these count tensor cores."""
    chip, shape = topology.split(":")
    count = 2 if chip in COUNTED_BY_CORES else 1
    for size in shape.split("x"):
        count *= int(size)
    return f"{chip}-{count}"
