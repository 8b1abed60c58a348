"""Reads a pipeline's layout from a string like "Et*3|(tt|)*29,m|L", as Megatron's `--pipeline-model-parallel-layout`.

Stages are separated by `|`, in the order in which a row of the batch passes them. E is the embedding, t a layer, m a
depth of multi-token prediction, L the loss. `x*n` is n times x, `(...)*n` n times what is between the parentheses;
commas and spaces mean nothing. Plain Python.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import stack_of
from jaxfb.refusal import Refused, instance, shown

NAME = "layers_per_stage"
_MOST = 100_000  # symbols of a layout that is written out
_SYMBOLS = {"E": "the embedding", "t": "a layer", "m": "multi-token prediction", "L": "the loss"}
_TOKEN = re.compile(r"\*\d+|[EtmL|()]")


def stages_of(layout: str) -> tuple[str, ...]:
    """Returns the symbols of each stage, such as ("Ett", "tt", "tL"), with repetitions written out.

    Raises:
      ValueError: what is written is not a layout, or E is not its first symbol, or L not its last.
    """
    instance(NAME, layout, str, 'a layout such as "Ett|tt|ttL"')
    written = _written_out(layout)
    symbols = written.replace("|", "")
    if symbols.count("E") != 1 or symbols.count("L") != 1 or symbols[0] != "E" or symbols[-1] != "L":
        inner = re.sub("[EL]", "", written)
        proposed = None if _has_early_depth(inner) or len(inner) > 200 else f"E{inner}L"
        raise _refused(layout, "must begin with one E and end with one L", proposed)
    if _has_early_depth(symbols):
        raise _refused(layout, "must have m, multi-token prediction, behind its last t")
    return tuple(written.split("|"))


def layers_of_stages(layout: str, config: TransformerConfig | None = None) -> tuple[int, ...]:
    """Returns how many entries of `params["layers"]` each stage of a layout has: `layers_per_stage` of the engine.

    These are layers, or periods where the model's layers are of several kinds. Leading layers, which the embedding is
    followed by, are t of the first stage. E, m and L are checked; `head_placement` chooses where they are computed.

    Args:
      layout: as at the top of this file.
      config: of the model; None for one whose entries of "layers" are its layers.
    Raises:
      ValueError: it is not a layout, has other layers than the model, or a stage has no whole periods.
    """
    stages = stages_of(layout)
    counts = [stage.count("t") for stage in stages]
    if config is None:
        return tuple(counts)
    stack, depths = stack_of(config), sum(stage.count("m") for stage in stages)
    if sum(counts) != config.num_layers or depths != config.mtp_depth:
        raise _refused(
            layout,
            f"has {sum(counts)} t and {depths} m, but the model has num_layers={config.num_layers} and "
            f"mtp_depth={config.mtp_depth}",
            _nearest(counts, config),
        )
    first, period = len(stack.leading), len(stack.period)
    inner = [counts[0] - first, *counts[1:]]
    if inner[0] < 0 or any(count % period for count in inner):
        kinds = (
            f"{first} leading layers in the first stage and " * bool(first)
            + f"whole periods of {period} layers"
        )
        raise _refused(layout, f"must have {kinds} in every stage", _nearest(counts, config))
    return tuple(count // period for count in inner)


def written(counts: Sequence[int], depths: int = 0) -> str:
    """Returns the layout whose stages have so many layers, with multi-token prediction in the last."""
    stages = ["t" * count if count < 4 else f"t*{count}" for count in counts]
    return "|".join([f"E{stages[0]}", *stages[1:]]) + "m" * depths + "L"


def _has_early_depth(symbols: str) -> bool:
    return "t" in symbols.partition("m")[2]


def _written_out(layout: str) -> str:
    """Returns a layout without parentheses, numbers, commas and spaces."""
    plain, at = re.sub(r"[,\s]", "", layout), 0
    open_groups, last = [""], ""  # last: what a number would repeat
    while at < len(plain):
        token = _TOKEN.match(plain, at)
        if token is None:
            words = ", ".join(f"{symbol} ({what})" for symbol, what in _SYMBOLS.items())
            raise _refused(layout, f"has {shown(plain[at])}, which is none of {words}, | ( ) and *number")
        at, symbol = token.end(), token[0]
        if symbol == "(":
            open_groups.append("")
            last = ""
            continue
        if symbol == ")":
            if len(open_groups) == 1:
                raise _refused(layout, "has a ) without its (")
            last = open_groups.pop()
        elif symbol[0] == "*":
            last = _repeated(layout, last, int(symbol[1:][:9]))
        else:
            last = symbol
        open_groups[-1] += last
        if len(open_groups[-1]) > _MOST:
            raise _refused(layout, f"is longer than {_MOST} symbols when it is written out")
        if symbol[0] == "*":
            last = ""
    if len(open_groups) > 1:
        raise _refused(layout, "has a ( without its )")
    return open_groups[0]


def _repeated(layout: str, what: str, times: int) -> str:
    """Returns what is to be added behind `what`, which is there once already."""
    if not what or not times:
        raise _refused(layout, "must have a symbol or a ) before each *, and a number above 0 behind it")
    if len(what) * times > _MOST:
        raise _refused(layout, f"is longer than {_MOST} symbols when it is written out")
    return what * (times - 1)


def _nearest(counts: Sequence[int], config: TransformerConfig) -> str:
    """Returns the legal layout whose stages end nearest to where these end."""
    stack, ends = stack_of(config), [0]
    first, period = len(stack.leading), len(stack.period)
    for done in accumulate(counts):
        share = done / max(sum(counts), 1) * config.num_layers
        ends.append(first + period * round(max(share - first, 0) / period))
    ends[-1] = config.num_layers
    return written([end - start for start, end in pairwise(ends)], config.mtp_depth)


def _refused(layout: str, why: str, instead: str | None = None) -> Refused:
    use, choices = ("", []) if instead is None else (f"; use {instead}", [{NAME: instead}])
    return Refused(f"[parallel] {NAME}={shown(layout)} {why}{use}", choices)
