"""Words what was probably meant by a key that does not exist, or by a value of the wrong type."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, get_origin

from jaxfb.config.fields import (
    adapter_of,
    all_keys,
    describe,
    fields_of,
    options_of,
    registries_of,
    required_keys,
    words_of,
)
from jaxfb.config.names import ALIASES, OPTIMIZER_OPTIONS, POLICY_SYNONYMS, SYNONYMS
from jaxfb.refusal import INT64, shown


def unknown_key(key: str, root: type) -> str:
    """Returns the sentence for a key that does not exist: its nearest sibling, a namesake, or all there is."""
    keys = list(all_keys(root))
    near = _nearest(key, keys)
    if near:
        namesakes = [k for k in keys if "." not in key and k.endswith(f".{key}")]
        return f"[config] unknown key {key}; did you mean {' or '.join(namesakes[:3] or [near])}?"
    section = key.rpartition(".")[0]
    depth = key.count(".")
    legal = [k for k in keys if k.rpartition(".")[0] == section and k.count(".") == depth]
    legal = legal or [k for k in keys if "." not in k]
    return f"[config] unknown key {key}; choose one of {', '.join(legal)}"


def _nearest(key: str, keys: list[str]) -> str | None:
    section, _, name = key.rpartition(".")
    if name in OPTIMIZER_OPTIONS and "optimizer.options" in keys:
        return f"optimizer.options.{OPTIMIZER_OPTIONS[name]}"
    named = [*keys, *(alias for alias, meant in ALIASES.items() if meant in keys)]
    siblings = {k.rpartition(".")[2]: k for k in named if k.rpartition(".")[0] == section}
    sections = {k.rpartition(".")[0] for k in keys}
    values = (
        keys if not section else [k for k in keys if k not in sections]
    )  # a key is not meant to be a section
    anywhere = {k.rpartition(".")[2]: k for k in reversed(values)}
    axis = ALIASES.get(key) or ALIASES.get(f"mesh.{key}")
    known = axis or SYNONYMS.get(key) or SYNONYMS.get(name) or POLICY_SYNONYMS.get(name)
    known = known if known in keys else None
    for names in (siblings, {name: known} if known else {}, anywhere):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    return next(iter(difflib.get_close_matches(key, values, n=1, cutoff=0.8)), None)


def not_a_section(cls: type, values: Any, prefix: str) -> str:
    """Returns the sentence for one value, or none, where a section with keys is expected."""
    name = prefix.rstrip(".")
    if values is None:
        return (
            f"[config] {name or 'the file'} is empty; give {', '.join(required_keys(cls) or fields_of(cls))}"
        )
    meant = _meant_by_a_word(cls, values, name)
    hint = f"; did you mean {meant}?" if meant else ""
    return f"[config] {name}={as_written(values)} must be a section with {', '.join(fields_of(cls))}{hint}"


def _meant_by_a_word(cls: type, value: Any, section: str) -> str | None:
    """Returns the override that was probably meant by one value in place of a section: optimizer=adam is its name."""
    if isinstance(value, str):
        names = [*words_of(fields_of(cls).get("name", str))]
        for word in difflib.get_close_matches(value, names, n=1):
            return f"{section}.name={word}"
        key, _, rest = value.replace(":", " ").partition(" ")
        if key in fields_of(cls) and _PLAIN_VALUE.fullmatch(rest.strip()):
            return f"{key}: {rest.strip()} (with a colon and a space)"
    return f"{SYNONYMS[section]}={shown(value)}" if section in SYNONYMS else None


_PLAIN_VALUE = re.compile(r"[\w.+-]{1,40}")
"""A value that is short and without signs of YAML."""


def wrong_type(hint: Any, given: Any, key: str) -> str:
    """Returns the sentence for a value of the wrong type, with the nearest legal one."""
    if found := next(_not_finite(given, key), None):
        return f"[config] {found[0]}={as_written(found[1])} must be a finite number"
    words = [str(word) for word in words_of(hint)]
    lower = {word.lower(): word for word in words}
    near = difflib.get_close_matches(given.lower(), lower, n=1) if isinstance(given, str) else []
    close = [lower[word] for word in near]
    word = f"[{close[0]}]" if close and get_origin(options_of(hint)[0]) is tuple else "".join(close)
    nearest = word or _of_the_type(hint, given)
    if nearest is None and str in options_of(hint) and isinstance(given, int | float):
        return f"[config] {key}={as_written(given)} must be {describe(hint)}; put quotes around it"
    return f"[config] {key}={as_written(given)} must be {describe(hint)}" + (
        f"; did you mean {nearest}?" if nearest else ""
    )


def _not_finite(given: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yields the keys and values of the numbers in a value, or in a mapping, that are infinite or NaN."""
    for name, value in given.items() if isinstance(given, Mapping) else ():
        yield from _not_finite(value, f"{key}.{name}")
    if isinstance(given, float) and not math.isfinite(given):
        yield key, given


def _of_the_type(hint: Any, given: Any) -> str | None:
    """Returns how a value of the wrong type is written in the right one: '8' as 8, 1e3 as 1000, a as [a]."""
    if get_origin(options_of(hint)[0]) is tuple and not isinstance(given, list | Mapping):
        item = given if isinstance(given, str) else as_written(given)
        names = ":" not in item and any(registries_of(hint))
        if len(item) > _LONGEST or names or not _fits(hint, (given,)):
            return None
        return f"[{item}]" if _PLAIN.fullmatch(item) else f"[{json.dumps(item, ensure_ascii=False)}]"
    if not isinstance(given, str | float):
        return None
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            number = kind(given)
            if (isinstance(given, str) or number == given) and abs(number) <= INT64 and _fits(hint, number):
                return str(number)
    return None


_LONGEST = 100  # characters of an item that is written again
_PLAIN = re.compile(r"(?!(true|false|yes|no|on|off|null)$)[A-Za-z][\w./:-]{0,99}|-?\d{1,18}", re.IGNORECASE)
"""An item that means the same in a list of YAML."""


def _fits(hint: Any, value: Any) -> bool:
    from pydantic import ValidationError

    try:
        adapter_of(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def as_written(value: Any) -> str:
    """Returns a value as YAML has it where that differs from Python."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shown(value)
