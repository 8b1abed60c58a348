"""Advice in refusals of a post-training config: keys to change, each change tried by the code that refused.

Used where a run is built. Refusals of plans name arguments of plans (rows, remainder), which a config calls otherwise
or does not have; here their choices become keys of the config, and those that would be refused in turn are left out.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from itertools import islice
from math import gcd, isqrt
from typing import Any, TypeVar

from jaxfb.batch_plan import PURPOSES, PlanError
from jaxfb.batch_plan.plan import UPDATES
from jaxfb.batch_plan.refusal import around
from jaxfb.config import config_from_dict, config_to_dict
from jaxfb.config.policy import RolloutConfig
from jaxfb.config.post_training import CutConfig, RLConfig
from jaxfb.config.suggestions import as_written
from jaxfb.mesh import data_parallel

MOST = 4  # changes that a sentence offers
T = TypeVar("T")


def planned(base: Any, make: Callable[[Any], T]) -> T:
    """Returns make(base); if that refuses, the error names changes of the config that `make` accepts.

    base: a dataclass with `config` and `mesh`, such as `jaxfb.rl.start.Base`.

    Raises:
      PlanError: that of `make`; its `choices` are {dotted key: value}, each of which makes the config legal or, where
        more of it is wrong, leads to the refusal of something else.
    """
    try:
        return make(base)
    except PlanError as error:
        direct = list(filter(None, (_in_config(base.config, error, choice) for choice in error.choices)))
        legal = [choice for choice in direct if _accepts(make, base, choice)]
        if not legal:
            legal = list(islice((c for c in _other_cuts(base) if _accepts(make, base, c)), 2))
        if not legal:
            legal = [choice for choice in direct if _puts_right(make, base, choice, error)]
        reason = str(error).partition("; use ")[0]
        raise PlanError(reason + _words(legal[:MOST]), legal[:MOST]) from None


def changed(config: Any, choice: Mapping[str, Any]) -> Any:
    """Returns the config with these dotted keys set."""
    values = config_to_dict(config)
    for key, value in choice.items():
        *sections, name = key.split(".")
        node = values
        for section in sections:
            node[section] = {**(node.get(section) or {})}  # never a dict of the caller's
            node = node[section]
        node[name] = value
    return config_from_dict(values)


def _accepts(make: Callable[[Any], Any], base: Any, choice: Mapping[str, Any]) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(replace(base, config=changed(base.config, choice)))
    except ValueError:
        return False
    return True


def _puts_right(make: Callable[[Any], Any], base: Any, choice: Mapping[str, Any], error: PlanError) -> bool:
    """Returns whether another cut of a pass leads to the refusal of something else; sizes may make more wrong."""
    if not all(key.startswith("plans.") for key in choice):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(replace(base, config=changed(base.config, choice)))
    except PlanError as other:
        return _who(other) != _who(error)
    except ValueError:
        return False
    return True


def _who(error: PlanError) -> str:
    """Returns the purpose, or the section, whose refusal it is; "" where it names none."""
    found = re.match(r"\[(\w+)\]", str(error))
    return found[1] if found else ""


def _in_config(config: Any, error: PlanError, choice: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translates a plan's choice into keys of the config; None where the config has no such key.

    The plans of a choice are left out: a config's are made anew from its sizes.
    """
    changes = {name: value for name, value in choice.items() if name != "plans"}
    keyed = {name: _key(config, _who(error), name) for name in changes}
    found = {key: changes[name] for name, key in keyed.items() if key is not None}
    return found if found and None not in keyed.values() else None


def _key(config: Any, who: str, name: str) -> str | None:
    if "." in name:
        return name
    if who in PURPOSES and name in {field.name for field in fields(CutConfig)}:
        return f"plans.{who}.{name}"
    if name == "rows" and not isinstance(config, RLConfig):
        return "batch.rows"
    if name == "rows" and who in UPDATES:
        return "rollout.rows_per_update"
    if who == "rollout" and name in {field.name for field in fields(RolloutConfig)}:
        return f"rollout.{name}"
    return None


def _other_cuts(base: Any) -> Iterator[dict[str, Any]]:
    """Yields other rows of an update with cuts that divide them, the nearest first; then other numbers of prompts."""
    config, replicas = base.config, data_parallel(base.mesh)
    if not isinstance(config, RLConfig):
        for rows in around(config.batch.rows, replicas):
            yield {"batch.rows": rows, **_cuts(config, rows // replicas)}
        return
    sizes = config.rollout
    whole, update = sizes.prompts * sizes.samples_per_prompt, sizes.rows_per_update
    legal = [n for n in _divisors(whole) if n % replicas == 0]
    for rows in sorted(legal, key=lambda n: abs(n - update)):
        yield _different(config, {"rollout.rows_per_update": rows, **_cuts(config, rows // replicas)})
    for prompts in around(sizes.prompts, replicas // gcd(replicas, sizes.samples_per_prompt)):
        rows = prompts * sizes.samples_per_prompt
        rollout = {"rollout.prompts": prompts, "rollout.rows_per_update": rows}
        yield _different(config, {**rollout, **_cuts(config, rows // replicas)})


def _cuts(config: Any, rows: int) -> dict[str, int]:
    """Returns, for each plan of an update cut by rows, the nearest smaller cut that divides a replica's rows."""
    found = {}
    for purpose in UPDATES:
        cut: CutConfig | None = getattr(config.plans, purpose, None)
        for name in ("rows_per_microbatch", "num_microbatches"):
            if cut is not None and (value := getattr(cut, name)) is not None:
                found[f"plans.{purpose}.{name}"] = max(n for n in _divisors(rows) if n <= value)
    return found


def _divisors(number: int) -> list[int]:
    """Returns what divides a number of rows, which the memory of the machine bounds."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _different(config: Any, choice: Mapping[str, Any]) -> dict[str, Any]:
    values = config_to_dict(config)

    def present(key: str) -> Any:
        node: Any = values
        for name in key.split("."):
            node = (node or {}).get(name)
        return node

    return {key: value for key, value in choice.items() if present(key) != value}


def _words(choices: list[dict[str, Any]]) -> str:
    """Writes choices as '; use plans.train.rows_per_microbatch=64 or 128, or rollout.prompts=4 with ...'."""
    grouped: dict[str, list[str]] = {}
    for choice in choices:
        (key, first), *rest = choice.items()
        grouped.setdefault(key, []).append(_yaml(first) + "".join(f" with {k}={_yaml(v)}" for k, v in rest))
    options = [f"{key}={' or '.join(texts)}" for key, texts in grouped.items()]
    return f"; use {', or '.join(options)}" if options else ""


def _yaml(value: Any) -> str:
    """Returns a value as an override is written in a shell: no spaces, a list in brackets."""
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_yaml, value))}]"
    return as_written(value)
