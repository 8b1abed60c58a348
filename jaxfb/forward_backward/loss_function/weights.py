"""Denominators first: every term's weight, before any backward.

The division has one owner. Because the weights of all microbatches are known beforehand, the backward is
seeded with 1/weight, terms with different weights compose exactly, and nothing is rescaled afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.loss_function.over_context import OverContext
from jaxfb.forward_backward.loss_function.summands import CLOSED_OVER
from jaxfb.forward_backward.loss_function.traced import Traced, is_constant, reads_none
from jaxfb.forward_backward.reduce import reduce_records
from jaxfb.mesh import EXPERT
from jaxfb.parallel.annotations import check_statistics
from jaxfb.refusal import Refused
from jaxfb.types import PyTree, Sum


def term_weights(
    traced: Traced,
    microbatches: PyTree,
    keys: jax.Array | None,
    num_parts: int,
    context: OverContext | None = None,
) -> dict:
    """Returns weights of every term in every microbatch of this replica: name -> [num_microbatches].

    Only the part of the loss function that the weights need is run; the forward itself is cut away.
    A weight that reads tokens which a context axis cuts is a part, and summed over context; one that does not
    (a number of rows or tokens, a constant) is what it would be of whole sequences. A term without a weight gets
    1 / num_parts, so that its weight over the global batch is 1.

    Args:
      traced: the loss function of one microbatch, which `check_terms` has accepted.
      num_parts: microbatches times replicas.
      context: of a context axis that cuts sequences.
    """
    terms = traced.places.terms
    weighted = {name: term.weight for name, term in terms.items() if term.weight is not None}
    with jax.named_scope("weights"):
        if context is None:
            weights = _run(traced, weighted, microbatches, keys)
        else:
            shared = [name for name in weighted if context.shared.terms[name].weight]
            parts = {name: place for name, place in weighted.items() if name not in shared}
            weights = reduce_records(_run(traced, parts, microbatches, keys), ("context",)) if parts else {}
            of_whole = {name: context.whole.places.terms[name].weight for name in shared}
            weights |= _run(context.whole, of_whole, microbatches, keys)
        even = _evenly(traced.shape.terms, microbatches, num_parts)
        weights |= {name: even for name in terms if name not in weighted}
    # else XLA merges the reduction of a single microbatch's weight with that of a metric that counts the same
    return lax.optimization_barrier(weights)


def check_terms(traced: Traced, params: PyTree, num_parts: int) -> None:
    """Checks what decides the division: weights by the data alone, and sums that each microbatch adds to.

    Raises:
      ValueError: a weight depends on the parameters, a sum is one over replicas already, a term without a weight
        reads nothing of the microbatch, or there are running statistics among the parameters.
    """
    check_data_only(traced, params)
    _check_reduced(traced)
    totals = (term.total for term in traced.places.terms.values())
    check_statistics(params, traced.reads(*totals)[0])
    for name, term in traced.places.terms.items():
        if num_parts > 1 and term.weight is None and not reads_microbatch(traced, name):
            raise Refused(
                f"term {name!r} has no weight and reads nothing of the microbatch, so it would be counted once "
                f"for each of the {num_parts} microbatches; give it a constant weight to count it once, "
                "Sum(total, 1.0)"
            )


def _check_reduced(traced: Traced) -> None:
    """Raises ValueError for a total or a metric that the loss function sums over replicas, as the engine does again."""
    for name, result in (*traced.places.terms.items(), *traced.places.metrics.items()):
        places = jax.tree.leaves(result) if isinstance(result, Sum) else ()
        for summand in (one for place in places for one in traced.summands(place)):
            if axes := sorted(summand.over & {"data", "fsdp"}):
                raise Refused(
                    f"{name!r} is summed over the devices of {' and '.join(axes)} in the loss function, by "
                    "jax.lax.psum or pmean, and jaxfb sums it over them once more; return the sums over the rows of "
                    "the microbatch alone"
                )


def check_sums(traced: Traced, more: Callable[[], Traced | None], params: PyTree, num_parts: int) -> None:
    """Checks that no total adds up what each microbatch would count, though it reads no row, such as a penalty.

    A constant weight is counted by each microbatch as well, so that its total counts once.

    Args:
      more: returns the loss function traced for a microbatch of more rows, or None where that is not possible.

    Raises:
      ValueError: a total has such a summand, which does not grow with the number of rows, and no constant weight.
    """
    suspects = _reading_no_data(traced) if num_parts > 1 else []
    larger = more() if suspects else None
    if larger is None:
        return
    for name in suspects:
        term, of_larger = traced.places.terms[name], larger.places.terms[name]
        found = reads_none(traced, larger, term.total)
        if found and not is_constant(traced, larger, term.weight, of_larger.weight):
            raise Refused(
                f"term {name!r} adds up something that reads no row, {_penalty(params, found[0].reads)}, so it would "
                f"be counted once for each of the {num_parts} microbatches before the division; make it a term with a "
                "constant weight, which counts once: Sum(penalty, 1.0)"
            )


def check_experts(traced: Traced, params: PyTree, is_cut: Sequence[bool]) -> None:
    """Raises ValueError for a sum of this device's experts that nothing adds up over the devices of the expert axis.

    is_cut: for each leaf of the parameters, whether devices have different experts of it.
    """
    experts = {number for number, cut in enumerate(is_cut) if cut}
    given = [*traced.places.terms.items(), *traced.places.metrics.items()] if experts else ()
    for name, result in given:
        for summand in traced.summands(result.total) if isinstance(result, Sum) else ():
            own = experts & summand.reads
            if own and EXPERT not in summand.reads:
                raise Refused(
                    f"{name!r} reads params{_path(params, own)}, of which each device of the expert axis has its own "
                    "experts, so that it would count a part of them; add it up over the axis by "
                    "jaxfb.parallel.expert.of_all_experts"
                )


def _reading_no_data(traced: Traced) -> list[str]:
    """Returns the names of the terms whose totals have a summand that reads at most parameters."""
    known = {CLOSED_OVER, *range(traced.num_params)}
    return [
        name
        for name, term in traced.places.terms.items()
        if any(one.reads <= known for one in traced.summands(term.total))
    ]


def _penalty(params: PyTree, reads: Set) -> str:
    """Returns what a summand that reads no row is, for a message."""
    numbers = reads - {CLOSED_OVER}
    if numbers:
        return f"such as a penalty on params{_path(params, numbers)}"
    return "a traced value that the loss function closes over" if reads else "a constant"


def _path(params: PyTree, reads: Set) -> str:
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    return paths[min(reads)]


def check_given(given: dict | None, traced: Traced) -> None:
    """Raises ValueError for weights of the whole update that are not those of the terms which have one."""
    weighted = sorted(name for name, term in traced.places.terms.items() if term.weight is not None)
    if given is not None and sorted(given) != weighted:
        raise Refused(
            f"weights must have the terms that are divided, {weighted}, got {sorted(given)}; add up what "
            "forward_backward.weights(...) returns for each call"
        )


def check_data_only(traced: Traced, params: PyTree) -> None:
    """Raises ValueError if a weight depends on the parameters."""
    weights = {name: term.weight for name, term in traced.places.terms.items() if term.weight is not None}
    if not any(traced.reads(*weights.values())[0]):
        return
    traced.open()  # the weight may only be made in one call or loop with what does
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    for name, place in weights.items():
        guilty = [path for path, used in zip(paths, traced.reads(place)[0], strict=True) if used]
        if guilty:
            raise Refused(
                f"the weight of term {name!r} must depend on the data alone, but it depends on "
                f"params{guilty[0]}{' and others' if len(guilty) > 1 else ''}; weights are summed before the "
                "first backward, so count rows or mask tokens and put what depends on params into the total"
            )


def reads_microbatch(traced: Traced, name: str) -> bool:
    """Returns whether a term's total differs between microbatches, by their rows or by their keys."""
    return any(traced.reads(traced.places.terms[name].total)[1])


def _run(traced: Traced, places: dict[str, int], microbatches: PyTree, keys: jax.Array | None) -> dict:
    """Computes those results in every microbatch: name -> [num_microbatches]."""
    function = traced.function(*places.values())
    names = sorted(places, key=lambda name: places[name])

    def one(_, data):
        return None, dict(zip(names, function(None, *data), strict=True))

    return lax.scan(one, None, (microbatches, keys))[1]


def _evenly(terms: dict, microbatches: PyTree, num_parts: int) -> jax.Array:
    """Returns 1 / num_parts for each microbatch: [num_microbatches]."""
    dtype = jnp.result_type(*(term.total.dtype for term in terms.values()))
    return jnp.full(jax.tree.leaves(microbatches)[0].shape[0], 1 / num_parts, dtype)


def seeds(local: dict, reduced: dict, normalize: str, num_parts: int, scale: Any, dtype: Any) -> dict:
    """Returns cotangent of every term's total in every microbatch of this replica: name -> [num_microbatches].

    "global":     scale / (weight of the whole global batch)
    "microbatch": scale / (weight of this microbatch * number of microbatches * replicas): a mean of means
    "none":       scale
    A weight of zero gives a seed of zero (in "none" there is no weight to be zero).
    """
    # in float even where the scale is 1, so that one compiled step serves every loss scale
    scale = jnp.asarray(scale, dtype)

    def seed(name):
        if normalize == "none":
            return jnp.broadcast_to(scale, local[name].shape)
        if normalize == "microbatch":
            return reciprocal(local[name].astype(dtype)) * (scale / num_parts)
        return jnp.broadcast_to(reciprocal(reduced[name].sum().astype(dtype)) * scale, local[name].shape)

    return {name: seed(name) for name in local}


def reciprocal(weight: jax.Array) -> jax.Array:
    """Returns 1 / weight, and 0 where the weight is 0."""
    return jnp.where(weight != 0, 1 / jnp.where(weight != 0, weight, 1), 0)
