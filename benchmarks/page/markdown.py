"""Tables, numbers, settings and machines as Markdown."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jaxfb.models.config import TransformerConfig

SIZES = ("vocab_size", "num_layers", "hidden_size", "num_heads", "mlp_size")
ABOUT_ONE_RUN = ("load_before", "num_devices")


@dataclass(frozen=True)
class Table:
    """head: column -> format of its numbers, such as ".1f"; ">" for the four digits that count; "" for words."""

    head: dict[str, str]
    rows: list[list[Any]]

    def lines(self) -> list[str]:
        rule = ["---:" if spec else "---" for spec in self.head.values()]
        rows = [
            [cell(value, spec) for value, spec in zip(row, self.head.values(), strict=True)]
            for row in self.rows
        ]
        return [f"| {' | '.join(row)} |" for row in ([*self.head], rule, *rows)] + [""]


def cell(value: Any, spec: str = "") -> str:
    """One cell; nothing for what is not a word or a number."""
    if not plain(value):
        return ""
    if spec.strip(">") and isinstance(value, int | float) and not isinstance(value, bool):
        return format(value, spec)
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value).replace("|", "/")


def plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool)


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return out


DEFAULT_BEFORE = {"context_attention": "ring"}
"""Fields whose default has changed since some results were taken, on meshes where they change nothing."""


def settings_line(settings: dict[str, Any]) -> str:
    """`pipe 4, seq 128; model num_layers 8`: a model's sizes, and its other fields where not at their default."""
    models = {key: said(value) for key, value in settings.items() if is_model(value)}
    own = flat({key: value for key, value in settings.items() if key not in models})
    words = [", ".join(f"{key} {cell(value)}" for key, value in own.items() if plain(value))]
    words += [f"{key} " + ", ".join(f"{k} {v}" for k, v in model.items()) for key, model in models.items()]
    return "; ".join(filter(None, words))


def is_model(value: Any) -> bool:
    return isinstance(value, dict) and "num_layers" in value


def said(model: dict[str, Any]) -> dict[str, Any]:
    """The sizes, and every field that is not what TransformerConfig makes of the sizes."""
    sizes = {key: model[key] for key in SIZES if key in model}
    try:
        default = asdict(TransformerConfig(**sizes))
    except (TypeError, ValueError):  # a model of somebody else's
        default = {}
    defaults = ((default | DEFAULT_BEFORE).items(), default.items())
    others = [one for one in model.items() if one[0] not in sizes and not any(one in of for of in defaults)]
    return sizes | dict(others)


def machines(results: dict[str, dict[str, Any]]) -> list[str]:
    """Each machine with its versions once, and which result came from which, under what load."""
    known: list[dict[str, Any]] = []
    files = []
    for name, result in results.items():
        facts = dict(result.get("machine", {}))
        run = {key: facts.pop(key, None) for key in ABOUT_ONE_RUN}
        if facts not in known:
            known.append(facts)
        letter = chr(ord("A") + known.index(facts))
        link = f"[`{name}`](../benchmarks/results/{name})"
        files.append([link, letter, run["num_devices"], run["load_before"]])
    columns = list(dict.fromkeys(key for facts in known for key in facts))
    rows = [
        [chr(ord("A") + index), *(joined(facts.get(column)) for column in columns)]
        for index, facts in enumerate(known)
    ]
    head = {"": "", **{column: "" for column in columns}}
    of_files = {"result": "", "machine": "", "devices": "d", "load before the run": ".1f"}
    return Table(head, rows).lines() + Table(of_files, files).lines()


def joined(value: Any) -> Any:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value) if value is not None else ""
