"""Builds the frozen config out of plain values: checks every key and type, names the nearest legal one."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from keyword import iskeyword
from typing import Any, Literal, Union, get_args, get_origin

from jaxfb.refusal import INT64, Refused, shown
from jaxfb.registry import OWN, Registry

# What people coming from other trainers type, and what it is called here.
ALIASES = {
    "mesh.pp": "mesh.pipe",
    "mesh.dp": "mesh.data",
    "mesh.ep": "mesh.expert",
    "mesh.cp": "mesh.context",
    "mesh.tp": "mesh.tensor",
}
SYNONYMS = {
    "batch_size": "batch.rows",
    "size": "batch.rows",
    "per_device_train_batch_size": "batch.rows_per_microbatch",
    "per_device_batch_size": "batch.rows_per_microbatch",
    "global_batch_size": "batch.rows",
    "micro_batch_size": "batch.rows_per_microbatch",
    "microbatch_size": "batch.rows_per_microbatch",
    "gradient_accumulation_steps": "batch.num_microbatches",
    "lr": "optimizer.learning_rate",
    "peak": "optimizer.learning_rate",
    "clip_grad": "optimizer.max_grad_norm",
    "grad_clip": "optimizer.max_grad_norm",
    "zero": "optimizer.sharding",
    "steps": "run.updates",
    "max_steps": "run.updates",
    "train_iters": "run.updates",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "eval_every": "eval.every",
    "save_every": "checkpoint.every",
    "log_every": "log.every",
    "dtype": "precision.compute_dtype",
    "warmup_steps": "lr.warmup",
    "num_chunks": "chunks",
    "num_pieces": "parallel.pieces",
    "iterations_to_skip": "run.skip_updates",
    "exit_duration_in_mins": "run.minutes",
    "exit_interval": "run.stop_at",
    "seed": "run.seed",
    "stage": "mesh.pipe",
    "mesh.model": "mesh.tensor",
    "mesh.sequence": "mesh.context",
    **{
        f"{name}_parallel{ending}": f"mesh.{axis}"
        for ending in ("", "ism", "_size", "_degree")
        for name, axis in {
            "pipeline": "pipe",
            "pipeline_model": "pipe",
            "data": "data",
            "expert": "expert",
            "expert_model": "expert",
            "context": "context",
            "tensor": "tensor",
            "tensor_model": "tensor",
        }.items()
    },
    **dict.fromkeys(
        ("seq_len", "seq_length", "block_size", "context_length", "max_length"), "data.sequence_length"
    ),
    **dict.fromkeys(("column", "text_column", "text_key", "content_key"), "data.text_field"),
    **dict.fromkeys(("d_model", "n_embd", "hidden_dim", "dim"), "model.hidden_size"),
    **dict.fromkeys(("n_layer", "n_layers", "depth"), "model.num_layers"),
    **dict.fromkeys(("n_head", "n_heads"), "model.num_heads"),
}
# What arguments of optimizers are called, here and in other libraries -> their key in optimizer.options.
OPTIMIZER_OPTIONS = {
    **{name: name for name in ("b1", "b2", "eps", "momentum", "nesterov")},
    **dict.fromkeys(("beta1", "adam_beta1"), "b1"),
    **dict.fromkeys(("beta2", "adam_beta2"), "b2"),
    **dict.fromkeys(("adam_eps", "epsilon"), "eps"),
}
# What verl calls the numbers of a rollout.
POLICY_SYNONYMS = {
    "train_batch_size": "rollout.prompts",
    "n": "rollout.samples_per_prompt",
    "ppo_mini_batch_size": "rollout.rows_per_update",
    "ppo_epochs": "rollout.epochs",
    "ppo_micro_batch_size_per_gpu": "plans.train.rows_per_microbatch",
    "log_prob_micro_batch_size_per_gpu": "plans.logprob_old.rows_per_microbatch",
    "forward_micro_batch_size_per_gpu": "plans.value.rows_per_microbatch",
    "ppo_max_token_len_per_gpu": "plans.train.max_tokens_per_microbatch",
    "clip_ratio": "policy.options",
    "kl_loss_coef": "policy.kl_coef",
    "entropy_coeff": "policy.entropy_coef",
    "loss_agg_mode": "policy.aggregation",
    "adv_estimator": "advantage.name",
    "remat_policy": "parallel.remat",
}


class ConfigError(Refused):
    """A config that is refused: one sentence with the full key, its value and the nearest legal choice."""


def build(cls: type, values: Any, prefix: str = "", root: type | None = None) -> Any:
    """Returns an instance of the dataclass `cls` from a mapping; nested dataclasses are built from nested mappings.

    A class with `of_word` stands for a section that is one word.

    Raises:
      ConfigError: an unknown or missing key, or a value of a wrong type.
      ValueError: raised by a section's own checks.
    """
    root = root or cls
    if isinstance(values, str) and hasattr(cls, "of_word"):
        return cls.of_word(values)
    if not isinstance(values, Mapping):
        raise ConfigError(_not_a_section(cls, values, prefix))
    fields = _fields(cls)
    for key in values:
        if not isinstance(key, str) or not key.isprintable() or len(key) > 100:
            raise ConfigError(
                f"[config] {prefix}{shown(key)} is not a key; choose one of {', '.join(fields)}"
            )
        if key not in fields:
            _check_kind(fields, values, f"{prefix}{key}", root)
            raise ConfigError(unknown_key(f"{prefix}{key}", root))
    built = {name: _value(fields[name], given, f"{prefix}{name}", root) for name, given in values.items()}
    if hasattr(cls, "completed"):
        built = cls.completed(built)
    missing = [f"{prefix}{name}" for name in _required(cls) if name not in built]
    if missing:
        them = "it" if len(missing) == 1 else "them"
        raise ConfigError(f"[config] {', '.join(missing)} must be given; add {them} to the file")
    return cls(**{_attribute(name): value for name, value in built.items()})


def _check_kind(fields: Mapping[str, _Field], values: Mapping[str, Any], key: str, root: type) -> None:
    """Refuses a key that exists, but in another kind of its section: model.num_layers with model.name=bigram."""
    if key not in all_keys(root):
        return
    section = key.rpartition(".")[0]
    for name in fields:
        if name in values:  # a wrong name of the kind is refused instead
            _value(fields[name], values[name], f"{section}.{name}", root)
    given = " and ".join(f"{section}.{name}={_as_written(values[name])}" for name in fields if name in values)
    raise ConfigError(f"[config] {key} is no key of a {section} with {given}; it has {', '.join(fields)}")


def without_aliases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the plain values of a config with `mesh.data` where they have `mesh.dp`, and so on.

    Raises:
      ConfigError: a key is given by both of its names.
    """
    plain = dict(values)
    for alias, key in ALIASES.items():
        section, short = alias.split(".")
        name, given = key.partition(".")[2], plain.get(section)
        if not isinstance(given, Mapping) or short not in given:
            continue
        if name in given:
            raise ConfigError(f"[config] {alias} and {key} are one key; leave {alias} out")
        plain[section] = {name if each == short else each: value for each, value in given.items()}
    return plain


def key_of(attribute: str) -> str:
    """Returns the key of a field: its name, without the underscore that keeps Python's own words apart (`from_`)."""
    return attribute.removesuffix("_")


def _attribute(key: str) -> str:
    return f"{key}_" if iskeyword(key) else key


@cache
def fields_of(cls: type) -> dict[str, Any]:
    """Returns key -> type of every field that `cls(...)` takes; None is a value of each whose default it is."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        key_of(field.name): hints[field.name] | None if field.default is None else hints[field.name]
        for field in fields_taken(cls)
    }


@cache
def fields_taken(cls: type) -> list[dataclasses.Field]:
    """Returns the fields that `cls(...)` takes, those that must be given first, as in a file."""
    taken = [field for field in dataclasses.fields(cls) if field.init]
    return sorted(taken, key=_has_default)


def _has_default(field: dataclasses.Field) -> bool:
    return not (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)


def sections_of(hint: Any) -> list[type]:
    """Returns the dataclasses that a field may hold, the usual one first."""
    return [
        option for option in _options(hint) if isinstance(option, type) and dataclasses.is_dataclass(option)
    ]


def section_of(hint: Any) -> type | None:
    """Returns the dataclass a field holds (perhaps or None), or None for a leaf."""
    return next(iter(sections_of(hint)), None)


def named_sections(hint: Any) -> type | None:
    """Returns the dataclass of `dict[str, dataclass]`, sections whose names are the user's; None for anything else."""
    if get_origin(hint) is dict and dataclasses.is_dataclass(get_args(hint)[1]):
        return get_args(hint)[1]
    return None


def listed_section(hint: Any) -> type | None:
    """Returns the dataclass of `tuple[dataclass, ...]`, a list of sections; None for anything else."""
    if get_origin(hint) is tuple and dataclasses.is_dataclass(get_args(hint)[0]):
        return get_args(hint)[0]
    return None


class _Field:
    """Reads a field's type once; a config of a hundred keys is built thousands of times by tests and searches."""

    def __init__(self, hint: Any):
        self.hint = hint
        self.may_be_none = type(None) in _options(hint)
        self.sections = sections_of(hint)
        self.named, self.listed = named_sections(hint), listed_section(hint)
        self.registries = tuple(_registries(hint))

    def section_for(self, given: Any) -> type | None:
        """Returns the section that the given values are of, where the field may hold several kinds."""
        usual = next(iter(self.sections), None)
        return next((section for section in self.sections[1:] if section.accepts(given)), usual)


@cache
def _fields(cls: type) -> dict[str, _Field]:
    return {key: _Field(hint) for key, hint in fields_of(cls).items()}


@cache
def _adapter(hint: Any):
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(strict=True, allow_inf_nan=False))


def _named_section(cls: type, given: Any, key: str) -> Any:
    for name in given if isinstance(given, Mapping) else ():
        if name not in fields_of(cls):
            near = difflib.get_close_matches(str(name), fields_of(cls), n=1, cutoff=0.0)[0]
            raise ConfigError(f"[config] unknown key {key}.{name}; did you mean {key}.{near}?")
    try:
        return build(cls, given, f"{key}.")
    except ConfigError:
        raise
    except Refused as error:  # its own checks do not know its name
        error.args = (re.sub(r"^\[\w+\]", f"[{key}]", str(error)),)
        raise


def all_keys(cls: type, prefix: str = "") -> Iterator[str]:
    """Yields every dotted key below `cls`, leaves and sections."""
    for name, hint in fields_of(cls).items():
        yield f"{prefix}{name}"
        if section := section_of(hint):
            yield from all_keys(section, f"{prefix}{name}.")


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
    anywhere = {k.rpartition(".")[2]: k for k in reversed(keys)}
    known = ALIASES.get(key) or SYNONYMS.get(key) or SYNONYMS.get(name) or POLICY_SYNONYMS.get(name)
    known = known if known in keys else None
    for names in (siblings, {name: known} if known else {}, anywhere):
        close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
        if close:
            return names[close[0]]
    return next(iter(difflib.get_close_matches(key, keys, n=1, cutoff=0.8)), None)


def _value(field: _Field, given: Any, key: str, root: type) -> Any:
    if field.named and isinstance(given, Mapping):
        return {str(name): _named_section(field.named, each, f"{key}.{name}") for name, each in given.items()}
    if field.listed and isinstance(given, list | tuple):
        return tuple(
            _named_section(field.listed, each, f"{key}[{number}]") for number, each in enumerate(given)
        )
    if field.named or field.listed:
        raise ConfigError(f"[config] {key}={_as_written(given)} must be {describe(field.hint)}")
    section = field.section_for(given)
    if section is None:
        return _leaf(field, given, key)
    return None if given is None and field.may_be_none else build(section, given, f"{key}.", root)


def _leaf(field: _Field, given: Any, key: str) -> Any:
    from pydantic import ValidationError

    given = _as_word(field.hint, given)
    _check_registered(field, given, key)
    try:
        value = _adapter(field.hint).validate_python(tuple(given) if isinstance(given, list) else given)
    except (ValidationError, RecursionError):
        raise ConfigError(_wrong_type(field.hint, given, key)) from None
    for number in value if isinstance(value, tuple) else (value,):
        if isinstance(number, int) and abs(number) > INT64:
            raise ConfigError(f"[config] {key}={shown(number)} must be an int of at most 64 bits")
    return value


def _as_word(hint: Any, given: Any) -> Any:
    """Returns the legal word `off` or `on` where YAML read it as false or true."""
    if not isinstance(given, bool) or bool in _options(hint):
        return given
    word = "on" if given else "off"
    return word if word in _words(hint) else given


def _wrong_type(hint: Any, given: Any, key: str) -> str:
    words = [str(word) for word in _words(hint)]
    lower = {word.lower(): word for word in words}
    near = difflib.get_close_matches(given.lower(), lower, n=1) if isinstance(given, str) else []
    close = [lower[word] for word in near]
    word = f"[{close[0]}]" if close and get_origin(_options(hint)[0]) is tuple else "".join(close)
    nearest = word or _of_the_type(hint, given)
    return f"[config] {key}={_as_written(given)} must be {describe(hint)}" + (
        f"; did you mean {nearest}?" if nearest else ""
    )


def _of_the_type(hint: Any, given: Any) -> str | None:
    """Returns how a value of the wrong type is written in the right one: '8' as 8, 1e3 as 1000, a as [a]."""
    if get_origin(_options(hint)[0]) is tuple and not isinstance(given, list | Mapping):
        item = given if isinstance(given, str) else _as_written(given)
        return f"[{item}]" if _PLAIN.fullmatch(item) and _fits(hint, (given,)) else None
    if not isinstance(given, str | float):
        return None
    for kind in (int, float):
        with suppress(ValueError, OverflowError):
            number = kind(given)
            if (isinstance(given, str) or number == given) and abs(number) <= INT64 and _fits(hint, number):
                return str(number)
    return None


_PLAIN = re.compile(r"(?!(true|false|yes|no|on|off|null)$)[A-Za-z][\w./:-]{0,99}|-?\d{1,18}", re.IGNORECASE)
"""An item that means the same in a list of YAML."""


def _fits(hint: Any, value: Any) -> bool:
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError:
        return False
    return True


def _as_written(value: Any) -> str:
    """Returns a value as YAML has it where that differs from Python."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else shown(value)


def describe(hint: Any) -> str:
    """Returns a type in the words of an error: `an int or null`, `one of gpipe, 1f1b`."""
    names = {int: "an int", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return " or ".join(alternatives(hint, names, lambda item: f"a list, each {describe(item)}"))


def alternatives(hint: Any, names: Mapping[Any, str], list_of: Callable[[Any], str]) -> list[str]:
    """Returns what a value of a type may be, in words.

    names: words of the plain types. list_of: words for a list, from the type of its items.
    """
    parts = []
    for option in _options(hint):
        if get_origin(option) is Literal:
            words = ", ".join(map(str, get_args(option)))
            parts.append(f"one of {words}" if len(get_args(option)) > 1 else words)
        elif registry := _registry(option):
            parts.append(f"one of {', '.join(registry.names)}, or your own as {OWN}")
        elif listed := listed_section(option):
            parts.append(f"a list of sections with {', '.join(fields_of(listed))}")
        elif get_origin(option) is tuple:
            parts.append(list_of(get_args(option)[0]))
        elif named := named_sections(option):
            parts.append(f"a mapping of names to sections with {', '.join(fields_of(named))}")
        elif get_origin(option) in (dict, Mapping):
            parts.append("a mapping of names to values")
        else:
            parts.append(names.get(option, getattr(option, "__name__", str(option))))
    return parts


def _options(hint: Any) -> tuple:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _words(hint: Any) -> Iterator[Any]:
    for option in _options(hint):
        if get_origin(option) is Literal:
            yield from get_args(option)
        elif registry := _registry(option):
            yield from registry.names
        elif get_origin(option) is tuple:
            yield from _words(get_args(option)[0])


def _registry(option: Any) -> Registry | None:
    """Returns the registry that names the values of `Annotated[str, registry]`."""
    extras = getattr(option, "__metadata__", ())
    return next((extra for extra in extras if isinstance(extra, Registry)), None)


def _registries(hint: Any) -> Iterator[Registry]:
    for option in _options(hint):
        if registry := _registry(option):
            yield registry
        elif get_origin(option) is tuple:
            yield from _registries(get_args(option)[0])


def _check_registered(field: _Field, given: Any, key: str) -> None:
    """Refuses a text that names no part; a wrong type is left to the type's own check."""
    texts = [name for name in (given if isinstance(given, list) else [given]) if isinstance(name, str)]
    for registry in field.registries:
        if any(":" not in name and name not in registry for name in texts):
            raise ConfigError(_wrong_type(field.hint, given, key))
        for name in texts:
            registry.check(name, key)


def _required(cls: type) -> list[str]:
    return [key_of(field.name) for field in fields_taken(cls) if not _has_default(field)]


def _not_a_section(cls: type, values: Any, prefix: str) -> str:
    name = prefix.rstrip(".")
    if values is None:
        return f"[config] {name or 'the file'} is empty; give {', '.join(_required(cls) or fields_of(cls))}"
    meant = _meant_by_a_word(cls, values, name)
    hint = f"; did you mean {meant}?" if meant else ""
    return f"[config] {name}={_as_written(values)} must be a section with {', '.join(fields_of(cls))}{hint}"


_PLAIN_VALUE = re.compile(r"[\w.+-]{1,40}")
"""A value that is short and without signs of YAML."""


def _meant_by_a_word(cls: type, value: Any, section: str) -> str | None:
    """Returns the override that was probably meant by one value in place of a section: optimizer=adam is its name."""
    if isinstance(value, str):
        names = [*_words(fields_of(cls).get("name", str))]
        for word in difflib.get_close_matches(value, names, n=1):
            return f"{section}.name={word}"
        key, _, rest = value.replace(":", " ").partition(" ")
        if key in fields_of(cls) and _PLAIN_VALUE.fullmatch(rest.strip()):
            return f"{key}: {rest.strip()} (with a colon and a space)"
    return f"{SYNONYMS[section]}={shown(value)}" if section in SYNONYMS else None
