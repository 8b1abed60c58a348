"""Reads what layers compute again in their backward, one word for all of them or for each part, and how many stay
gathered.

`"selective*8+layer"` is "selective" in the first eight layers of each stage and "layer" in the rest. Plain Python:
configs are read without JAX.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

from jaxfb.refusal import Refused, choice, integer, shown

Gather = Literal["layer", "step"]
GATHERS = get_args(Gather)
Half = Literal["half"]
AHEAD = (True, False, *get_args(Half))
"""How far ahead of their use parameters are gathered: a layer, not at all, or half a layer."""
Remat = Literal["none", "selective", "layer", "halves", "offload", "full"]
REMAT_POLICIES = get_args(Remat)
Part = tuple[str, int | None]
"""A word, and the number of layers; None for the rest."""


def checked_remat(value: Any, who: str = "") -> str:
    """Returns `value` if it is a word of REMAT_POLICIES, or parts such as "selective*8+layer".

    Raises:
      ValueError: it is neither.
    """
    if isinstance(value, str) and ("+" in value or "*" in value):
        remat_parts(value)
        return value
    return choice("remat", value, REMAT_POLICIES, who=who)


def remat_parts(text: str) -> tuple[Part, ...]:
    """Returns the parts of such a text, in the order of the layers.

    Raises:
      ValueError: it is not `word*number`, one or more times, and a word.
    """
    *counted, last = text.split("+")
    parts = [_part(text, one) for one in counted]
    if last not in REMAT_POLICIES:
        _refuse(text, last)
    return (*parts, (last, None))


def checked_gather(value: Any, who: str = "") -> str | int:
    """Returns `value` if it is a word of GATHERS, or a number of layers that stay gathered.

    Raises:
      ValueError: it is neither.
    """
    if hasattr(value, "__index__") and not isinstance(value, bool):
        return integer("fsdp_gather", value, who=who)
    return choice("fsdp_gather", value, GATHERS, who=who)


def check_gathered_layers(gather: str | int, number: int) -> None:
    """Raises ValueError if more layers are to stay gathered than a stage has."""
    if isinstance(gather, int) and gather > number:
        raise Refused(
            f"fsdp_gather={gather} keeps {gather} layers of each stage gathered, but a stage has {number}; use "
            f"fsdp_gather={number}",
            [{"fsdp_gather": number}],
        )


def check_remat_layers(text: str, number: int) -> None:
    """Raises ValueError if the parts are for more layers than a stage has, or leave none to the last."""
    parts = remat_parts(text)
    counted = sum(count or 0 for _, count in parts)
    if len(parts) > 1 and counted >= number:
        nearest = parts[0][0] if number == 1 else f"{parts[0][0]}*{number - 1}+{parts[-1][0]}"
        raise Refused(
            f"remat={text!r} counts {counted} layers and leaves the rest to {parts[-1][0]!r}, but a stage has "
            f"{number}; use {nearest!r}",
            [{"remat": nearest}],
        )


def _part(text: str, one: str) -> Part:
    word, _, count = one.partition("*")
    if word not in REMAT_POLICIES or not count.isascii() or not count.isdigit() or int(count) < 1:
        _refuse(text, one)
    return word, int(count)


def _refuse(text: str, one: str) -> None:
    raise Refused(
        f"remat={shown(text)} has the part {shown(one)}; a part is one of {', '.join(REMAT_POLICIES)} with a "
        "number of layers, and the last one, for all other layers, has no number, such as 'selective*8+layer'",
        [{"remat": "selective*8+layer"}, {"remat": "layer"}],
    )
