"""The small data sets that are installed with the package, under the names of their files."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path


def sample_file(name: str) -> Path | None:
    """Returns the path of an installed data set, such as that of "facts.jsonl"; None if there is none of that name."""
    path = Path(str(files("jaxfb") / "sample_data")) / name
    return path if path.is_file() else None
