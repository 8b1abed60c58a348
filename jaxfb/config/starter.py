"""The starter configs that are installed with the package: looked up by name, and copied by `jaxfb init`."""

from __future__ import annotations

import difflib
import json
import re
from importlib.resources import files
from pathlib import Path

from jaxfb.config.schema import ConfigError
from jaxfb.data.samples import sample_file

_DIRECTORY = files("jaxfb") / "starter"
_SAMPLES = re.compile(r"examples/data/(\w+\.jsonl)")
"""Small data sets, installed too, that a starter config names relative to the working directory."""
_OTHERS = re.compile(r"configs/([\w-]+)\.yaml")


def starter_names() -> list[str]:
    """Returns the names of the installed configs, such as "quickstart"."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in _DIRECTORY.iterdir() if entry.name[-5:] == ".yaml"
    )


def starter_text(name: str) -> str | None:
    """Returns the YAML text of a starter config, or None if there is none of that name."""
    return (_DIRECTORY / f"{name}.yaml").read_text() if name in starter_names() else None


def described_starters() -> list[tuple[str, str]]:
    """Returns (name, what it trains) of every starter config: the second line of its file, up to a semicolon."""
    lines = {name: (starter_text(name) or "").split("\n")[1] for name in starter_names()}
    first = {name: line.removeprefix("# ").partition(";")[0] for name, line in lines.items()}
    return [(name, _OTHERS.sub(r"\1", text)) for name, text in first.items()]


def runnable_starter(name: str) -> str | None:
    """Returns `starter_text` with the installed sample data in place of that which the working directory lacks."""

    def found(match: re.Match[str]) -> str:
        return match[0] if Path(match[0]).exists() else json.dumps(str(sample_file(match[1])))

    text = starter_text(name)
    return None if text is None else _SAMPLES.sub(found, text)


def write_starter(name: str, directory: Path) -> list[Path]:
    """Copies a starter config, and the sample data it names, into a directory; returns the files written.

    A file of sample data that is already there is kept.

    Raises:
      ConfigError: there is no such starter, or a file of its name exists already.
    """
    text = starter_text(name)
    if text is None:
        close = difflib.get_close_matches(Path(name).stem, starter_names(), n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(
            f"[init] there is no starter config {name!r}; {hint}choose one of {', '.join(starter_names())}",
            [{"name": one} for one in starter_names()],
        )
    target = directory / f"{name}.yaml"
    if target.exists():
        raise ConfigError(f"[init] {target} exists already; remove it, or use --out with another directory")
    samples = sorted({match[0] for match in _SAMPLES.finditer(text)})
    for path in (target, *(directory / sample for sample in samples)):
        _make_directory(path.parent)
    # another starter is known by its name, from any directory
    text = _OTHERS.sub(r"\1", text.replace(f"configs/{name}.yaml", target.name))
    target.write_text(text)
    return [target, *(_copy(path, directory) for path in samples if not (directory / path).exists())]


def _make_directory(directory: Path) -> None:
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"[init] {path} is not a directory; use --out with another")
    directory.mkdir(parents=True, exist_ok=True)


def _copy(path: str, directory: Path) -> Path:
    target = directory / path
    target.write_bytes((files("jaxfb") / "sample_data" / target.name).read_bytes())
    return target
