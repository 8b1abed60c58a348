"""Loads a frozen config from a YAML file and `key.path=value` overrides."""

from __future__ import annotations

import copy
import difflib
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from jaxfb.config.custom import CustomConfig
from jaxfb.config.fields import fields_of, sections_of
from jaxfb.config.names import ALIASES
from jaxfb.config.post_training import COMMANDS, KINDS, check_one_start
from jaxfb.config.root import Config
from jaxfb.config.schema import ConfigError, build, without_aliases
from jaxfb.config.starter import runnable_starter, starter_names
from jaxfb.config.suggestions import unknown_key
from jaxfb.pretrained.repository import download_hint
from jaxfb.refusal import Missing, choice, instance, is_several, refuse, shown
from jaxfb.registry import load_plugins

MAX_BYTES = 1 << 20
_OF_A_RUN = ("plan.json", "checkpoints")


def load_config(path: str | Path, overrides: Iterable[str] = (), command: str | None = None) -> Any:
    """Reads a config and applies overrides, refusing whatever is not legal before anything is compiled.

    A `Config`, or for post-training the one that the file is known by: `SFTConfig`, `DPOConfig` or `RLConfig`.

    Args:
      path: a YAML file, the name of a starter config such as "quickstart", or a run's directory: its config.yaml, with
        that directory as `run.dir`, wherever the run was when it was saved.
      overrides: "key.path=value", the value in YAML; a later one wins. mesh.pp, dp, ep, cp, tp are short for
        mesh.pipe, data, expert, context, tensor, here and in the file.
      command: "train", "sft", "dpo" or "rl": a config of another command is refused; None takes any.
    Raises:
      ConfigError, ValueError: one sentence naming the key, the value and the nearest legal choice.
    """
    if not isinstance(path, str | os.PathLike) or not _can_be_a_name(str(path)):
        refuse("path", path, "a YAML file, a run's directory or the name of a starter config", who="[config]")
    if not is_several(overrides):
        refuse("overrides", overrides, 'a list of strings "key.path=value"', who="[config]")
    if command is not None:
        choice("command", command, ("train", *COMMANDS.values()), who="[config]")
    values = _read(Path(path))
    if holds_a_run(Path(path)) and isinstance(values.get("run"), dict):
        values["run"]["dir"] = str(path)  # moved or copied, its config.yaml may name another directory
    values = without_aliases(values)
    root = kind_of(values)
    if command not in (None, found := COMMANDS.get(root, "train")):
        raise ConfigError(
            f"[config] {path} is a config for `jaxfb {found}`, not for `jaxfb {command}`; use jaxfb {found} "
            f"{shlex.quote(str(path))}"
        )
    for override in overrides:
        _apply(values, override, root)
    kind_of(values)  # refuses a name in place of the sizes of `model`
    return _built(root, values)


def config_from_dict(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> Any:
    """Returns the config of plain nested values, such as those saved with a checkpoint (`config_to_dict`).

    overrides: "key.path=value" as for `load_config`; `values` stay as they are.
    """
    if not isinstance(values, Mapping):
        refuse("values", values, f"a dict of sections such as {', '.join(fields_of(Config))}", who="[config]")
    root = kind_of(values)
    plain = without_aliases(copy.deepcopy(dict(values)) if overrides else dict(values))
    for override in overrides:
        _apply(plain, override, root)
    return _built(root, plain)


def _built(root: type, values: Mapping[str, Any]) -> Any:
    """Imports the plugins first, for the names that they register are legal values."""
    if isinstance(plugins := values.get("plugins"), list | tuple):
        load_plugins(plugins)
    _check_one_start(root, values)
    return build(root, values)


def _check_one_start(root: type, values: Mapping[str, Any]) -> None:
    """Refuses sizes of a model beside a run to start from, before those are missed that are not given."""
    model, start = values.get("model"), values.get("start")
    run = start.get("run") if root in COMMANDS and isinstance(start, Mapping) else None
    if isinstance(run, str) and isinstance(model, Mapping) and "from" not in model:
        check_one_start(model, None, run)


def kind_of(values: Mapping[str, Any]) -> type:
    """Returns the root that these sections belong to."""
    if isinstance(model := values.get("model"), str):
        if isinstance(values.get("data"), Mapping):
            raise ConfigError(
                f"[config] model={shown(model)} must be a section with num_layers, hidden_size and so on; a model of "
                "your own, 'package.module:attribute', also needs data written that way"
            )
        return CustomConfig
    return next((root for section, root in KINDS.items() if section in values), Config)


def kind_of_command(command: str) -> type:
    """Returns the class of the configs that `jaxfb train`, `sft`, `dpo` or `rl` reads."""
    return next((kind for kind, name in COMMANDS.items() if name == command), Config)


def holds_a_run(directory: Path) -> bool:
    """Returns whether there is in a directory what only a run makes."""
    return any((directory / name).exists() for name in _OF_A_RUN)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-3 as a number, 010 and 1:30 as strings, and refuses a key given twice and aliases."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node, deep=False):
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((i for i, key in enumerate(keys) if key in keys[:i]), None)
        if twice is not None:
            mark = node.value[twice][0].start_mark
            raise yaml.MarkedYAMLError(problem=f"{keys[twice]} is given twice", problem_mark=mark)
        return super().construct_mapping(node, deep)

    def compose_node(self, parent, index):
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not supported", problem_mark=mark)
        return super().compose_node(parent, index)


# YAML 1.1 takes 1e-3 for a string because it lacks the dot, 010 for 8 and 1:30 for 90.
_WHOLE = r"[-+]?(0|[1-9][\d_]*|0x[\da-fA-F_]+|0b[01_]+)"
_BROKEN = (
    r"[-+]?(\d[\d_]*\.[\d_]*|\.\d[\d_]*|(\d[\d_]*\.?\d*|\.\d+)[eE][-+]?\d+|\.(inf|Inf|INF))|\.(nan|NaN|NAN)"
)


def add_numbers(cls: Any) -> None:
    """Makes a loader read, or a dumper put in quotes as a string, what is a number in a config."""
    cls.add_implicit_resolver(_INT, re.compile(f"^(?:{_WHOLE})$"), list("-+0123456789"))
    cls.add_implicit_resolver(_FLOAT, re.compile(f"^(?:{_BROKEN})$"), list("-+0123456789."))


add_numbers(_Loader)


def _can_be_a_name(path: str) -> bool:
    """Returns whether a file system accepts the name: printable, not empty and not too long."""
    return bool(path) and path.isprintable() and all(len(part.encode()) < 256 for part in path.split(os.sep))


def _read(path: Path) -> dict:
    path = path / "config.yaml" if path.is_dir() else path
    if not path.exists() and (text := runnable_starter(str(path))) is not None:
        return _parse(text, f"the starter config {path}")
    if not path.is_file():
        raise ConfigError(_not_found(path))
    if path.stat().st_size > MAX_BYTES:
        raise ConfigError(
            f"[config] {path} has {path.stat().st_size} bytes; a config has at most {MAX_BYTES}"
        )
    values = _parse(_text(path), str(path))
    if not isinstance(values, dict):
        raise ConfigError(f"[config] {path} must contain sections such as {', '.join(fields_of(Config))}")
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"[config] {path} is not UTF-8: {error.reason} at offset {error.start}") from None
    except OSError as error:
        raise ConfigError(f"[config] {path} cannot be read: {error.strerror}") from None


# A part of what YAML writes about a mistake -> what to do.
_HINTS = {
    "alphabetic": "put quotes around a string that begins with *",
    r"'\t'": "indent with spaces, not tabs",
    "mapping values are not allowed": "check the indentation, and put quotes around a string that contains ': '",
    "could not find expected ':'": "write key: value, with a colon and a space",
    "another document": "a file holds one config",
    "yaml.org,2002:merge": "merged keys (<<) are not supported",
}


# What PyYAML raises of a value: of 2001-13-45, !!float abc, !!bool 3.
_UNREADABLE = (ValueError, AttributeError, TypeError, OverflowError, LookupError)


def _parse(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        hint = next((f"; {hint}" for part, hint in _HINTS.items() if part in str(error.problem)), "")
        raise ConfigError(f"[config] {where}{line}: {error.problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"[config] {where}: {str(error).splitlines()[0]}") from None
    except RecursionError:
        raise ConfigError(f"[config] {where} has maps or lists that are nested too deeply") from None
    except _UNREADABLE:
        raise ConfigError(f"[config] {where} has a value that YAML cannot read: {_culprit(text)}") from None


def _culprit(text: str) -> str:
    """Returns the first value that cannot be read alone, with its line."""
    for node in _scalars(yaml.compose(text, _Loader)):
        try:
            _Loader("").construct_object(node)
        except _UNREADABLE:
            tag = (
                ""
                if node.tag.startswith("tag:yaml.org,2002:str")
                else f", read as {node.tag.rpartition(':')[2]}"
            )
            return (
                f"{shown(node.value, 40)} in line {node.start_mark.line + 1}{tag}; put quotes around a string"
            )
    return "put quotes around strings"


def _scalars(node: Any) -> Iterator[yaml.ScalarNode]:
    if isinstance(node, yaml.ScalarNode):
        yield node
        return
    for part in chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value:
        yield from _scalars(part)


def saved_run(path: str | Path, config: Any) -> Path:
    """Returns the directory of a run, given itself or by the config that trains it.

    Raises:
      Missing: nothing was trained by that config yet.
    """
    if Path(path).is_dir():
        return Path(path)
    directory = Path(config.run.dir)
    if not directory.is_dir():
        command = COMMANDS.get(type(config), "train")
        raise Missing(
            f"[run] there is no run in {directory} yet; train it first: jaxfb {command} {shlex.quote(str(path))}"
        )
    return directory


def _not_found(path: Path) -> str:
    """Returns the refusal of a missing file or run: the nearest one beside it, or the nearest starter config."""
    missing = f"no file {path}" if path.suffix else f"no file or run's directory {path}"
    named = path.parent if path.name == "config.yaml" and path.parent.is_dir() else path
    if named != path:
        missing = f"{named} is not a run's directory, for there is no {path}"
    run = path.parent.parent.parent
    if path.parent.parent.name == "checkpoints" and holds_a_run(run):
        return (
            f"[config] {path.parent} is a checkpoint of the run {run}; give {run}, whose newest checkpoint is read, or "
            f"what this writes: jaxfb export-hf {shlex.quote(str(run))} DIR --update {path.parent.name}"
        )
    names = sorted(p.name for p in _beside(path) if p.name.isprintable())
    if close := difflib.get_close_matches(path.name, names, n=1, cutoff=0.5):
        return f"[config] {missing}; did you mean {path.parent / close[0]}?"
    starters = starter_names()
    if close := difflib.get_close_matches(path.stem, starters, n=1, cutoff=0.6):
        return f"[config] {missing}; did you mean the starter config {close[0]}?"
    beside = f"in {path.parent}: {', '.join(names)}; " if names else ""
    return f"[config] {missing}; {beside}starter configs: {', '.join(starters)}{download_hint(named)}"


def _beside(path: Path) -> list[Path]:
    """Returns the configs and runs in the directory where a path was looked for."""
    if not path.parent.is_dir():
        return []
    runs = {found.parent for name in _OF_A_RUN for found in path.parent.glob(f"*/{name}")}
    return [*path.parent.glob("*.yaml"), *runs]


def _apply(values: dict, override: str, root: type) -> None:
    instance("each of overrides", override, str, 'a string "key.path=value"', who="[config]")
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"[config] cannot read the override {shown(override)}; write key.path=value")
    key = ALIASES.get(key, key)
    hint = _hint_at(key, root)
    *sections, name = key.split(".")
    node = values
    for section in sections:
        if node.get(section) is None:
            node[section] = {}
        node = node[section]
        if not isinstance(node, dict):
            raise ConfigError(
                f"[config] {section}={shown(node)} must be a section, since {key} belongs in it; leave one of the two "
                "out"
            )
    node[name] = _override_value(hint, text, key)
    if not sections:
        values |= without_aliases({name: node[name]})


def _override_value(hint: Any, text: str, key: str) -> Any:
    """Returns the text itself where a string is wanted (2024-01-01, `1 + 1 =`), otherwise what YAML reads in it."""
    if text.startswith("*"):  # a pattern of files; in YAML an alias, which is never legal here
        return text
    wants_text = hint is str or hint == (str | None) or getattr(hint, "__origin__", None) is str
    if wants_text and text not in ("null", "~", "") and text[0] not in "\"'":
        return text
    return _parse(text, key) if text else ""


def _hint_at(key: str, root: type) -> Any:
    """Returns the type of the field that a dotted key names; below a mapping (optimizer.options.b2) it is free."""
    kinds, hint = [root], None
    for name in key.split("."):
        if not kinds and getattr(hint, "__origin__", None) in (dict, Mapping):
            return Any
        found = next((fields_of(cls)[name] for cls in kinds if name in fields_of(cls)), None)
        if found is None:
            raise ConfigError(unknown_key(key, root))
        hint, kinds = found, sections_of(found)
    return hint
