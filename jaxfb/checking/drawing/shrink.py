"""Finds a smaller case that still fails: the simplest one, with as few features as show the finding. No JAX in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxfb.checking.drawing.case import SIMPLEST, Case, can_overlap, narrower

MOST_TRIES = 60
LISTS = ("terms", "metrics", "outputs", "leaves")
OF_A_TABLE = ("table_seed", "splits_backward")
OF_A_PIPELINE = (
    *OF_A_TABLE,
    "schedule",
    "num_chunks",
    "layers_per_stage",
    "head_placement",
    "poison_bubbles",
)
OF_AN_UPDATE = ("second", "optimizer", "max_grad_norm", "clip_convention", "loss_scale")
OF_OWN_MODEL = ("model", "num_layers", "rows_per_microbatch")
Feature = tuple[str, Any]
"""A field and its value, or an item of a field that is a list or a mesh."""


def shrink(case: Case, fails: Callable[[Case], bool], most: int = MOST_TRIES) -> Case:
    """Returns the simplest case found that `fails`, after at most so many tries.

    Features are left out by halves, then by smaller parts, as long as the rest fails (Zeller's ddmin); then sizes
    are made small.
    """
    tries = _Tries(case, fails, most)
    parts, features = 2, features_of(case)
    while len(features) > 1 and parts <= len(features):
        rest = next((rest for rest in _leaving_out(features, parts) if tries(build(case, rest))), None)
        if rest is None:
            parts = len(features) if len(features) > parts > len(features) // 2 else 2 * parts
        else:
            features, parts = rest, max(2, parts - 1)
    smallest = build(case, features)
    for change in _smaller_sizes(smallest):
        smaller = legal(smallest.but(**change), case)
        smallest = smaller if tries(smaller) else smallest
    return smallest


class _Tries:
    """Answers whether a case fails, each tried once and no more than so many; what is not tried does not fail."""

    def __init__(self, case: Case, fails: Callable[[Case], bool], most: int):
        self._known, self._fails, self._most = {str(case): True}, fails, most

    def __call__(self, case: Case) -> bool:
        text = str(case)
        if text not in self._known:
            self._known[text] = len(self._known) <= self._most and self._fails(case)
        return self._known[text]


def features_of(case: Case) -> list[Feature]:
    """Lists what makes a case other than the simplest."""
    features: list[Feature] = []
    for name, value in case.not_default().items():
        if name == "mesh":
            features += [("mesh", pair) for pair in value.items()]
        elif name in LISTS:
            features += [(name, item) for item in value if item not in getattr(SIMPLEST, name)]
        else:
            features.append((name, value))
    return features


def build(case: Case, features: Sequence[Feature]) -> Case:
    """Builds the simplest case with these features of `case`, and what has to follow from them."""
    changes: dict[str, Any] = {name: getattr(SIMPLEST, name) for name in LISTS} | {"mesh": {}}
    for name, value in features:
        if name == "mesh":
            changes["mesh"] |= dict([value])
        elif name in LISTS:
            changes[name] += (value,)
        else:
            changes[name] = value
    if case.model == "own":
        changes |= {name: getattr(case, name) for name in OF_OWN_MODEL}
    return legal(SIMPLEST.but(**changes), case)


def legal(after: Case, before: Case) -> Case:
    """Makes a case legal again that was put together of parts of another."""
    if after.pipe == 1:
        after = after.but(**{name: getattr(SIMPLEST, name) for name in OF_A_PIPELINE})
    if after.schedule != "random":
        after = after.but(**{name: getattr(SIMPLEST, name) for name in OF_A_TABLE})
    if not after.update:
        after = after.but(**{name: getattr(SIMPLEST, name) for name in OF_AN_UPDATE})
    context = after.mesh.get("context", 1)
    if context == 1:
        after = after.but(attention=None)
    if context > 1 and after.length % (2 * context):
        after = after.but(length=2 * context)
    if not can_overlap(after.pipe, after.schedule, after.optimizer_sharding):
        after = after.but(overlap_grad_reduce=None)
    if after.reduce_dtype and narrower(after.reduce_dtype, after.accumulates_in) != after.reduce_dtype:
        after = after.but(reduce_dtype=None)
    if "float64" in (after.param_dtype, after.compute_dtype, after.accum_dtype):
        after = after.but(x64=True)
    return _with_rows(_with_layers(after, before), before)


def _leaving_out(features: list[Feature], parts: int):
    """Yields the features without one of so many parts, for each of them."""
    bounds = [len(features) * part // parts for part in range(parts + 1)]
    for start, stop in zip(bounds, bounds[1:], strict=False):
        yield features[:start] + features[stop:]


def _smaller_sizes(case: Case) -> list[dict[str, Any]]:
    halved = [{"mesh": case.mesh | {axis: 2}} for axis, size in case.mesh.items() if size > 2]
    numbers = [{"num_microbatches": number} for number in (2, 3) if number < case.num_microbatches]
    shortest = 1 if "context" not in case.mesh else 2 * case.mesh["context"]
    return [*halved, *numbers, {"length": min(case.length, shortest)}, {"num_layers": 1}]


def _with_layers(case: Case, before: Case) -> Case:
    """Gives the case as many layers as its stages ask for."""
    stages = case.pipe * case.num_chunks
    if case.layers_per_stage is not None:
        fits = (len(case.layers_per_stage), sum(case.layers_per_stage)) == (stages, case.num_layers)
        return case if fits else _with_layers(case.but(layers_per_stage=None), before)
    if before.model == "own":
        return case.but(num_layers=before.num_layers)
    return case if case.num_layers % stages == 0 else case.but(num_layers=stages)


def _with_rows(case: Case, before: Case) -> Case:
    """Gives the case rows that divide into its microbatches; those of a user stay as many as before."""
    if case.head_placement == "rows" and case.rows_per_microbatch % case.pipe:
        case = case.but(rows_per_microbatch=case.pipe)
    if case.model != "own":
        odd = case.remainder == "error" or not 0 < case.surplus < case.rows_per_global_microbatch
        return case.but(remainder="error", surplus=0) if odd else case
    at_once = case.rows_per_global_microbatch
    microbatches = max(1, before.rows // at_once)
    surplus = before.rows - microbatches * at_once
    remainder = "drop" if surplus > 0 else "error"
    return case.but(num_microbatches=microbatches, surplus=max(surplus, 0), remainder=remainder)
