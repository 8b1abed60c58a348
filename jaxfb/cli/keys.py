"""Names in a refusal what was typed: keys of a config, or flags of `jaxfb schedule`, in place of Python's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping

FLAGS = {
    "schedule": "--kind",
    "num_stages": "--pipe",
    "num_microbatches": "--microbatches",
    "num_chunks": "--chunks",
    "num_pieces": "--pieces",
    "path": "--svg",
}
"""Arguments of schedules, and the flags of `jaxfb schedule` that give them."""
KEYS = {
    "num_chunks": "chunks",
    "num_pieces": "parallel.pieces",
    "optimizer_sharding": "optimizer.sharding",
}
"""Arguments of the engine that are called otherwise in a config."""
SECTIONS = ("mesh", "parallel")
"""The sections whose keys are arguments of the engine and of its mesh, by the same names."""


def as_typed(sentence: str, options) -> str:
    """Returns a refusal with `name=value` as it is given to the command: `mesh.pipe=4`, or `--chunks 2`."""
    if options.verb == "schedule":
        return _renamed(sentence, FLAGS, " ")
    return _renamed(sentence, _keys(sentence), "=") if hasattr(options, "overrides") else sentence


def _keys(sentence: str) -> dict[str, str]:
    """Returns the key of each argument; none of a section whose name the sentence begins with."""
    from jaxfb.config.fields import fields_of
    from jaxfb.config.sections import MeshConfig, ParallelConfig

    found = dict(KEYS)
    for section, cls in zip(SECTIONS, (MeshConfig, ParallelConfig), strict=True):
        if not sentence.startswith(f"[{section}]"):
            found |= {name: f"{section}.{name}" for name in fields_of(cls)}
    return found


def _renamed(sentence: str, names: Mapping[str, str], between: str) -> str:
    """Returns the sentence with each `name=` exchanged that is not part of another key or of Python code."""
    pattern = rf"(?<![\w.(\[{{\"'-])({'|'.join(map(re.escape, names))})=(?=\S)"
    return re.sub(pattern, lambda found: f"{names[found[1]]}{between}", sentence)
