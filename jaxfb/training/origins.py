"""Names the weights that a run begins with or a command reads, by what their files hold.

Processes that read other weights under the same path would train on a model that nobody has, without an error. Files
are compared before they are read, so that the sentence names the setting; `Guards` compares the arrays made of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jaxfb.config import load_config
from jaxfb.data.chat import FILE as CHAT
from jaxfb.data.stored.fingerprint import sampled_fingerprints
from jaxfb.pretrained import peft
from jaxfb.pretrained.companions import CARRIED, COMPANIONS
from jaxfb.pretrained.repository import INDEX
from jaxfb.training.parameters import weights_of
from jaxfb.training.run_dir import RunDirectory

MISSING = "missing"
CONFIG, RECORD = "config.yaml", "jaxfb/data.json"
_OF_TEXT = (*COMPANIONS, CHAT)


def origins(config: Any) -> dict[str, str]:
    """Returns the settings of a config that name what a new run begins with, and what their files hold, in digits."""
    model, start, lora = (getattr(config, name, None) for name in ("model", "start", "lora"))
    weights, run, adapter = (
        getattr(section, name, None)
        for section, name in ((model, "from_"), (start, "run"), (lora, "adapter"))
    )
    found = {}
    if weights is not None:
        found[f"model.from={weights}, by its weights,"] = of_weights(weights)
    if run is not None:
        found[f"start.run={run}, by what is saved there,"] = of_run(run)
    if adapter is not None:
        files = [Path(adapter) / name for name in (peft.CONFIG, peft.WEIGHTS)]
        found[f"lora.adapter={adapter}, by its weights,"] = _digits(files)
    return found


def of_weights(directory: str | Path) -> str:
    """Returns digits of config.json and the weights in a directory of Hugging Face files."""
    path = Path(directory)
    return _digits([path / "config.json", path / INDEX, *sorted(path.glob("*.safetensors"))])


def of_run(directory: str | Path) -> str:
    """Returns the newest update that is saved in a run, with digits of its record, which has a checksum of each array;
    of a run that has saved nothing, digits of the weights that it begins with.
    """
    path = Path(directory)
    if (update := RunDirectory(path).newest_update()) is not None:
        record = RunDirectory(path).checkpoints / str(update) / RECORD
        return f"update {update}, {_digits([path / CONFIG, record])}"
    try:
        source = weights_of(path, load_config(path))
    except (ValueError, OSError) as error:  # the same words on every process, unless they see different runs
        return str(error).partition(";")[0]
    return f"no update, {_digits([path / CONFIG])}, {MISSING if source is None else of_weights(source)}"


def of_model(directory: Path, config: Any) -> dict[str, str]:
    """Returns, for each part of a model that is only read, what its files hold: weights, and how texts become tokens.

    directory: of a run, or of Hugging Face files. config: of it.
    """
    update, source = RunDirectory(directory).newest_update(), weights_of(directory, config)
    weights = of_run(directory) if update is not None or source is None else of_weights(source)
    places: list[Path] = [directory, directory / CARRIED]
    if source is not None and source not in places:
        places.append(source)
    return {
        "weights": weights,
        "tokenizer and chat": _digits(place / name for place in places for name in _OF_TEXT),
    }


def _digits(files: Iterable[Path]) -> str:
    """Returns 16 hexadecimal digits of the names and contents of the files that are there."""
    there = [path for path in files if path.is_file()]
    if not there:
        return MISSING
    try:
        found = sampled_fingerprints(there)
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    pairs = [f"{path.name} {digits}" for path, digits in zip(there, found, strict=True)]
    return hashlib.sha256("\n".join(pairs).encode()).hexdigest()[:16]
