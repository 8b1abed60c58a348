"""The config on its way out: a dict to save with a checkpoint, a YAML file beside it, a table to print."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxfb.config.fields import fields_taken, key_of
from jaxfb.config.load import add_numbers
from jaxfb.config.post_training import COMMANDS
from jaxfb.process.whole_file import write_whole


class _Dumper(yaml.SafeDumper):
    """Writes YAML that `load_config` reads as the same values."""


add_numbers(_Dumper)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Returns plain nested values, JSON-able; `config_from_dict(config_to_dict(c)) == c`."""
    return {key_of(field.name): _plain(getattr(config, field.name)) for field in fields_taken(type(config))}


def save_yaml(config: Any, path: str | Path) -> None:
    """Writes the whole resolved config; `load_config(path) == config`."""
    text = yaml.dump(config_to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    target = Path(path)
    command = COMMANDS.get(type(config), "train")
    write_whole(target, f"# jaxfb {command} {target}\n{text}")


def table(config: Any) -> list[tuple[str, Any]]:
    """Returns (dotted key, value) of every leaf, in reading order."""
    return list(leaves_of(config_to_dict(config)))


def as_yaml(value: Any) -> str:
    """Returns a value as it would be written in the file or on the command line."""
    words = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return words[value]
    if isinstance(value, str):
        return value if _in_one_line(value) == value else json.dumps(value, ensure_ascii=False)
    return _in_one_line(value) if isinstance(value, list | dict) else str(value)


def _in_one_line(value: Any) -> str:
    text = yaml.dump(
        value, Dumper=_Dumper, allow_unicode=True, width=math.inf, sort_keys=False, default_flow_style=True
    )
    return text.removesuffix("...\n").removesuffix("\n")


def changed_keys(config: Any) -> list[tuple[str, Any]]:
    """Returns (dotted key, value) of every leaf that differs from its default or has none."""
    return list(_changed(config, ""))


def _changed(config: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields_taken(type(config)):
        value, name = getattr(config, field.name), f"{prefix}{key_of(field.name)}"
        if hasattr(value, "WORD"):
            yield name, value.WORD
        elif dataclasses.is_dataclass(value):
            yield from _changed(value, f"{name}.")
        elif field.default_factory is not dataclasses.MISSING:
            if value != field.default_factory():
                yield name, _plain(value)
        elif value != field.default:
            yield name, _plain(value)


def leaves_of(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted key, value) of every leaf of nested values, in their order."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from leaves_of(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _plain(value: Any) -> Any:
    if hasattr(value, "WORD"):
        return value.WORD
    if dataclasses.is_dataclass(value):
        return config_to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return str(value) if isinstance(value, Path) else value
