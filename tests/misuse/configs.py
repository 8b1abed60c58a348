"""Draws configs: a starter config with some keys changed, any key of its command, to values that fit or do not.

`python tests/misuse/configs.py 5000 [seed]` counts what comes of them: each is read, or refused in a sentence; some of
those that are read are planned too. The keys are found in the classes of the configs, so new ones are drawn as well.
"""

import collections
import copy
import dataclasses
import math
import random
import sys
import typing
import warnings

import jaxfb
from jaxfb.config import config_from_dict, config_to_dict
from jaxfb.config.fields import (
    fields_of,
    listed_section,
    named_sections,
    options_of,
    registries_of,
    sections_of,
)
from jaxfb.config.load import _parse, kind_of
from jaxfb.config.starter import starter_text
from jaxfb.planner import parse_topology
from jaxfb.planner.verdict import estimated
from jaxfb.schedules import KINDS

BASES = (
    "quickstart",
    "mesh8",
    "moe",
    "fine_tune",
    "lora-8b",
    "sft",
    "dpo",
    "grpo_arithmetic",
    "ppo_arithmetic",
)
WRONG = (
    *(
        None,
        True,
        "",
        "two",
        "nan",
        "\0",
        "x" * 5000,
        "a.b:c",
        "../..",
        [],
        {},
        [None],
        [[1]],
        {"a": 1},
        {1: {}},
    ),
    *(math.nan, math.inf, -1, 0, 10**9, 2**31, 2**63, 10**40, -0.5, 1e300, [1, "a"], ["*"], ["layers"]),
)
NUMBERS = {int: (1, 2, 3, 4, 8, 16, 64), float: (0.0, 0.1, 0.5, 0.9, 1.0, 2.0), bool: (True, False)}
WORDS = ("bytes", "none", "layers.attention.*", "wq", "full", "8", "runs/x")
PATTERNS = ("full", "window", "global", "local")
LOCAL = parse_topology("cpu:1"), parse_topology("cpu:8")


def keys(cls, prefix=()):
    """Yields (path, type) of every key below a class, sections too."""
    for name, hint in fields_of(cls).items():
        yield (*prefix, name), hint
        if sections := sections_of(hint):
            yield from keys(sections[0], (*prefix, name))


def drawn(hint, rng):
    """Returns a value of a type: mostly a small one that could be legal."""
    option = rng.choice([one for one in options_of(hint) if one is not type(None)] or [type(None)])
    if registries := list(registries_of(option)):
        return rng.choice(list(registries[0].names))
    if typing.get_origin(option) is typing.Literal:
        return rng.choice(typing.get_args(option))
    if option in NUMBERS:
        return rng.choice(NUMBERS[option])
    if section := listed_section(option):
        return [section_of(section, rng) for _ in range(rng.randrange(4))]
    if section := named_sections(option):
        return {name: section_of(section, rng) for name in "ab"[: rng.randrange(3)]}
    if typing.get_origin(option) is tuple:
        return [drawn(typing.get_args(option)[0], rng) for _ in range(rng.randrange(4))]
    if dataclasses.is_dataclass(option):
        return section_of(option, rng)
    return {} if typing.get_origin(option) is dict else rng.choice(WORDS)


def section_of(cls, rng):
    """Returns values of some keys of a section, those without a default among them."""
    found = {}
    for field in dataclasses.fields(cls):
        name = field.name.removesuffix("_")
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if field.init and (required or rng.random() < 0.3):
            found[name] = drawn(fields_of(cls)[name], rng)
    return found


def config(seed):
    """Returns plain values, and the keys that were changed."""
    rng = random.Random(seed)
    base = rng.choice(BASES)
    values = _parse(starter_text(base) or "", base)
    kind, changed = kind_of(values), []
    if base == "mesh8" and rng.random() < 0.5:
        values |= {"schedule": rng.choice(sorted(KINDS)), "mesh": {"data": 2, "pipe": 2, "tensor": 2}}
        changed.append("schedule")
    every = list(keys(kind))
    for path, hint in rng.sample(every, rng.choice((1, 1, 1, 2, 3))):
        node, cls = values, kind
        for name in path[:-1]:
            cls = sections_of(fields_of(cls)[name])[0]
            if not isinstance(node.get(name), dict):
                node[name] = section_of(cls, rng)
            node = node[name]
        node[path[-1]] = copy.deepcopy(rng.choice(WRONG)) if rng.random() < 0.2 else drawn(hint, rng)
        changed.append(".".join(path))
    return values, changed


def outcome(seed, plans=False):
    """Returns "read", "planned" or "refused"; raises what should not have come."""
    values, _ = config(seed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = config_from_dict(values)
            assert config_from_dict(config_to_dict(found)) == found, "read again it is another config"
            if plans:
                estimated(found, LOCAL[seed % 2])
    except ValueError as error:
        sentence = str(error)
        assert isinstance(error, jaxfb.refusal.Refused | FileNotFoundError), repr(error)
        assert sentence.strip() and len(sentence) < 4000, sentence
        return "refused"
    return "planned" if plans else "read"


def main(number, seed):
    """Prints every config that is neither read nor refused, then the sums."""
    total, seen = collections.Counter(), collections.Counter()
    for one in range(seed, seed + number):
        seen.update(config(one)[1])
        try:
            total[outcome(one, plans=one % 10 == 0)] += 1
        except Exception as error:
            total["other"] += 1
            print(f"  {one} {config(one)[1]}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    print(f"{number} configs: {dict(total)}; {len(seen)} different keys were changed")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
