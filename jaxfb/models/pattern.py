"""Describes stacks whose layers are of several kinds: a period of kinds that repeats, and layers before it.

Plain Python, part of a config. A period is run as one block of a `Pipelined`, whose parameters are stacked over
periods; leading layers run after the embedding, with their parameters beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.refusal import FLOAT32, INT32, Refused, boolean, instance, integer, number, shown

if TYPE_CHECKING:
    from jaxfb.models.config import TransformerConfig

_WHO = "[model.pattern]"
LEADING = "leading"
"""The name of the leading layers among the parameters."""
MOST = 1000  # layers of a period, each of which is traced by itself


@dataclass(frozen=True)
class LayerKind:
    """Describes what is particular to some layers in a row; all else they have from the model.

    layers:       how many of them follow each other.
    window:       attention sees a token itself and the window - 1 tokens before it; null: all before it.
    rope:         false: no rotary positions.
    rope_theta:   base of the rotary positions' wavelengths; null: the model's.
    rope_scaling: null: the model's.
    experts:      false: an MLP of the model's `mlp_size` instead of its experts.
    """

    layers: int = 1
    window: int | None = None
    rope: bool = True
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    experts: bool = True

    def __post_init__(self):
        integer("layers", self.layers, who=_WHO, least=1, most=MOST)
        if self.window is not None:
            integer("window", self.window, who=_WHO, least=1, most=INT32)
        if self.rope_theta is not None:
            number("rope_theta", self.rope_theta, who=_WHO, above=0, most=FLOAT32)
        if self.rope_scaling is not None:
            words = "a jaxfb.models.rope_scaling.RopeScaling, or None"
            instance("rope_scaling", self.rope_scaling, RopeScaling, words, who=_WHO)
        boolean("rope", self.rope, who=_WHO)
        boolean("experts", self.experts, who=_WHO)


def one_by_one(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the kind of every layer, each with `layers` 1."""
    return tuple(replace(kind, layers=1) for kind in kinds for _ in range(kind.layers))


def in_rows(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the same kinds with equal ones that follow each other as one."""
    return tuple(replace(kind, layers=len(list(same))) for kind, same in groupby(one_by_one(kinds)))


def shortest_period(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Returns the fewest kinds, one a layer, that give these when they are repeated."""
    each = one_by_one(kinds)
    lengths = (n for n in range(1, len(each) + 1) if len(each) % n == 0)
    return next(each[:n] for n in lengths if each[:n] * (len(each) // n) == each)


def found_in(
    kinds: Sequence[LayerKind], has_experts: bool = False
) -> tuple[tuple[LayerKind, ...], tuple[LayerKind, ...]]:
    """Returns (leading, pattern) of a stack from the kinds of all its layers, so that the fewest are traced.

    Args:
      has_experts: of the model; layers with experts do not lead.
    """
    each = one_by_one(kinds)
    best = (each[:0], shortest_period(each))
    for lead in range(1, len(each)):
        if has_experts and each[lead - 1].experts:
            break
        rest = shortest_period(each[lead:])
        if lead + len(rest) < sum(map(len, best)):
            best = (each[:lead], rest)
    leading, period = best
    return in_rows(leading), in_rows(period)


class Stack(NamedTuple):
    """The layers of a transformer, each with the config of a model whose layers are all like it.

    leading: before the first period.  period: of one period, in order.  num_periods: how often it is run.
    """

    leading: tuple[TransformerConfig, ...]
    period: tuple[TransformerConfig, ...]
    num_periods: int

    def counted(self) -> Iterator[tuple[TransformerConfig, int]]:
        """Yields the config of each layer that is traced and how many layers of the stack it is."""
        yield from ((config, 1) for config in self.leading)
        yield from ((config, self.num_periods) for config in self.period)

    @property
    def turns_by_length(self) -> bool:
        """Returns whether the rotary positions of any layer depend on how long a document is."""
        scalings = [one.rope_scaling for one in (*self.leading, *self.period)]
        return any(scaling is not None and scaling.kind == "longrope" for scaling in scalings)

    def split(self, tree: Any) -> list[Any]:
        """Returns what each layer of a period has of `params["layers"]`, or of what a period is given of it."""
        return [tree] if len(self.period) == 1 else [tree[layer_name(i)] for i in range(len(self.period))]

    def joined(self, trees: Sequence[Any]) -> Any:
        """Returns the inverse of `split`."""
        return trees[0] if len(self.period) == 1 else named(trees)


def layer_name(place: int) -> str:
    """Returns the name, in the parameters, of a leading layer or of one of a period of several."""
    return f"layer_{place}"


def is_layer(name: str) -> bool:
    """Returns whether a name in the parameters is one of `layer_name`."""
    return name.startswith("layer_") and name.removeprefix("layer_").isdigit()


def place_of(name: str) -> int:
    """Returns the inverse of `layer_name`."""
    return int(name.removeprefix("layer_"))


def named(trees: Sequence[Any]) -> dict[str, Any]:
    """Returns what each of several layers has, by name."""
    return {layer_name(place): tree for place, tree in enumerate(trees)}


@lru_cache(maxsize=64)
def stack_of(config: TransformerConfig) -> Stack:
    """Returns the layers that a config describes."""
    plain = replace(config, pattern=(), leading=())
    period = tuple(_of_kind(plain, kind) for kind in one_by_one(config.pattern)) or (plain,)
    leading = tuple(_of_kind(plain, kind) for kind in one_by_one(config.leading))
    return Stack(leading, period, (config.num_layers - len(leading)) // len(period))


def _of_kind(plain: TransformerConfig, kind: LayerKind) -> TransformerConfig:
    return replace(
        plain,
        window=kind.window,
        rope_theta=(kind.rope_theta or plain.rope_theta) if kind.rope else None,
        rope_scaling=(kind.rope_scaling or plain.rope_scaling) if kind.rope else None,
        num_experts=plain.num_experts if kind.experts else 0,
    )


def settle(config: TransformerConfig) -> dict[str, Any]:
    """Returns the fields of a config with the one description of its stack that there is.

    Layers that are not a whole period come first, a period is the shortest there is, and a pattern of one kind is no
    pattern.

    Raises:
      ValueError: the stack has no whole period, or layers with experts before the first.
    """
    leading, pattern = (one_by_one(check_kinds(name, getattr(config, name))) for name in (LEADING, "pattern"))
    if not leading and not pattern:
        return {LEADING: (), "pattern": ()}
    if pattern and config.window is not None:
        raise Refused(
            f"[model] window={config.window} cannot be combined with a pattern; use null, and a window in its kinds",
            [{"window": None}],
        )
    period = shortest_period(pattern or (LayerKind(window=config.window),))
    rest, size = config.num_layers - len(leading), len(period)
    if rest < size:
        least = len(leading) + size
        raise Refused(
            f"[model] num_layers={config.num_layers} must be at least the {len(leading)} leading layers and one period "
            f"of {size}; use num_layers={least}",
            [{"num_layers": least}],
        )
    leading, period = leading + period[: rest % size], period[rest % size :] + period[: rest % size]
    if config.num_experts:
        _check_experts(config, leading, period, rest % size)
    alone = period[0] if size == 1 else None
    if alone and (not leading or alone == LayerKind(window=alone.window, experts=alone.experts)):
        plain = _of_kind(replace(config, pattern=(), leading=()), alone)
        of_model = {name: getattr(plain, name) for name in ("window", "rope_theta", "rope_scaling")}
        return {"pattern": (), LEADING: in_rows(leading), **of_model}
    return {"pattern": in_rows(period), LEADING: in_rows(leading)}


def _check_experts(
    config: TransformerConfig, leading: Sequence[LayerKind], period: Sequence, over: int
) -> None:
    if not any(kind.experts for kind in period):
        raise Refused(
            f"[model] num_experts={config.num_experts} needs a kind with experts in the pattern; use 0 for none",
            [{"num_experts": 0}],
        )
    if any(kind.experts for kind in leading):
        size, number = len(period), config.num_layers
        legal = [number - over, number - over + size] if over else []
        use = f"num_layers={' or '.join(map(str, legal))}" if legal else "experts=false in the leading kinds"
        raise Refused(
            f"[model] num_layers={number} is {len(leading)} leading layers and {number // size} periods of {size}, but "
            f"leading layers have no experts; use {use}",
            [{"num_layers": one} for one in legal],
        )


def check_kinds(name: str, kinds: Any) -> tuple[LayerKind, ...]:
    """Returns a list of kinds as a tuple.

    Raises:
      ValueError: it is not a list of `LayerKind`, or they are too many.
    """
    if not isinstance(kinds, list | tuple) or not all(isinstance(kind, LayerKind) for kind in kinds):
        raise Refused(
            f"[model] {name}={shown(kinds)} must be a list of jaxfb.models.pattern.LayerKind; use () for none",
            [{name: ()}],
        )
    if (number_of := sum(kind.layers for kind in kinds)) > MOST:
        raise Refused(f"[model] {name} has {number_of} layers, which must be at most {MOST}", [{name: ()}])
    return tuple(kinds)
