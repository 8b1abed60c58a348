"""Defines what one call of the engine returns, and the exact sum of several calls.

The gradient of a call is divided by the weights of its own rows. The gradient of all rows of two calls is the mean of
theirs, weighted by what each counted: (w1 * g1 + w2 * g2) / (w1 + w2). That is exact where all terms of the calls have
the same ratio w1 : w2. Where they have not, the weights of the whole update must be known before the first backward.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused
from jaxfb.types import Last, Max, Min, Sum

PyTree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Origin:
    """Records how the gradients of one call, or of a sum of calls, were divided and scaled.

    rows:        i32[], rows of the global batches; rows that fill up a plan are not counted.
    grad_scale:  float[], what the gradients are multiplied by; None is 1.
    weights:     name -> float[], weights of the whole update that divided the terms; None: those of the call's rows.
    normalize:   as for `get_forward_backward_func`.
    undivided:   names of the terms without a weight.
    groups:      names of the terms of each call whose gradients are added up in one tree without new weights.
    whole_batch: the model reads statistics of the whole global batch before its backward (`Counted.before`).
    of_tokens:   which leaves of the outputs are per token and still in array rows (`Packed.restore`), where known.
    """

    rows: Any
    grad_scale: Any
    weights: dict[str, jax.Array] | None
    normalize: str = field(metadata={"static": True})
    undivided: tuple[str, ...] = field(metadata={"static": True})
    groups: tuple[tuple[str, ...], ...] = field(metadata={"static": True})
    whole_batch: bool = field(default=False, metadata={"static": True})
    of_tokens: tuple[bool, ...] | None = field(default=None, metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ForwardBackwardOutput:
    """Holds the results of one call over all microbatches of a global batch, equal on every device of the mesh.

    `a + b` is the output of one call over the rows of both, in this order: the loss, terms, gradients and metrics of
    all rows, and the microbatches and outputs of both. Calls with different terms can be added too; the objective is
    then the sum of all terms. `sum([a, b, c])` works likewise. ValueError is raised where the calls were normalized in
    different ways, or where their terms were divided by weights of different ratios (see `TrainStep.weights`).

    loss:           f32[] (f64 for f64 params), the objective of the whole global batch.
    terms:          name -> Sum over the whole global batch, reduced.
    grads:          tree like params in the accumulation dtype, divided and reduced, with None in place of each frozen
                    leaf (see `trainable`); None if forward_only.
    metrics:        name -> Sum, Max, Min or Last over the whole global batch, reduced.
    per_microbatch: every term and metric of each microbatch, reduced over replicas: name -> Sum of [num_microbatches]
                    arrays for a term; Sum, Max, Min or Last of [num_microbatches, ...] arrays for a metric, which is
                    under "metrics/<name>" where a term has its name.
    outputs:        [rows, ...] leaves in the original row order, or None. A sum has None where the calls' outputs are
                    trees of different structure or differ in more than their rows.
    origin:         how the gradients were divided and scaled.
    """

    loss: jax.Array
    terms: dict[str, Sum]
    grads: PyTree
    metrics: dict[str, Any]
    per_microbatch: dict[str, Any]
    outputs: PyTree
    origin: Origin

    def __add__(self, other: ForwardBackwardOutput) -> ForwardBackwardOutput:
        if not isinstance(other, ForwardBackwardOutput):
            return NotImplemented
        _check_addable(self, other)
        return _add(self, other, plain=_adds_plainly(self, other))

    def __radd__(self, other: int) -> ForwardBackwardOutput:
        return self if isinstance(other, int) and other == 0 else NotImplemented


def recorded_scale(grad_scale: Any) -> Any:
    """Returns a scale of gradients as `Origin` records it: None for the 1 that no caller asked for."""
    return None if isinstance(grad_scale, float) and grad_scale == 1 else grad_scale


def objective(
    terms: dict[str, Sum], normalize: str, weights: dict[str, jax.Array] | None = None
) -> jax.Array:
    """Returns the loss of the whole global batch from its reduced terms.

    weights: of the whole update, where terms are part of one.
    """
    given = weights or {}
    parts = {name: Sum(term.total, given.get(name, term.weight)) for name, term in terms.items()}
    values = [part.total if normalize == "none" else part.value for part in parts.values()]
    return sum(values[1:], values[0])


def check_complete(out: ForwardBackwardOutput) -> None:
    """Raises ValueError if the weights of the calls are not those of the whole update by which terms were divided."""
    given = out.origin.weights
    if given is None or is_traced(out):
        return
    for name, weight in given.items():
        counted = float(out.terms[name].weight) if name in out.terms else 0.0
        if not np.isclose(counted, float(weight), rtol=1e-5, atol=0):
            raise Refused(
                f"the calls added up count {counted:g} for term {name!r}, but they were divided by weights=, which has "
                f"{float(weight):g}; add up exactly the calls whose weights were added up"
            )


def _check_addable(a: ForwardBackwardOutput, b: ForwardBackwardOutput) -> None:
    if a.origin is None or b.origin is None:
        raise Refused(
            "only outputs of a forward_backward function can be added; one of these is not such an output"
        )
    if None not in (places := (_devices(a), _devices(b))):
        _check_alike("devices", *places)
    _check_alike("normalize", a.origin.normalize, b.origin.normalize)
    _check_alike("gradients", _shapes(a.grads), _shapes(b.grads))
    for name in set(a.metrics) & set(b.metrics):
        _check_alike(f"metric {name!r}", _shapes(a.metrics[name]), _shapes(b.metrics[name]))
    for name in set(a.terms) & set(b.terms):
        _check_alike(f"weights of term {name!r}", *(_weighing(name, out) for out in (a, b)))
    if a.origin.whole_batch or b.origin.whole_batch:
        raise Refused(
            "calls of a model that reads statistics of the whole global batch before its backward (Counted.before) "
            "cannot be added, because each call had those of its own rows; make one call of all rows"
        )
    _check_weights(a.origin.weights, b.origin.weights)


def _check_alike(what: str, one: Any, other: Any) -> None:
    if one != other:
        raise Refused(f"calls can only be added if their {what} agree, got {one} and {other}")


def _devices(out: ForwardBackwardOutput) -> list[int] | None:
    """Returns the numbers of the devices that an output is on; None while it is traced, or on the host."""
    if is_traced(out.loss) or not isinstance(out.loss, jax.Array):
        return None
    return sorted(device.id for device in out.loss.devices())


def _weighing(name: str, out: ForwardBackwardOutput) -> str:
    return "none" if name in out.origin.undivided else "one"


def _shapes(tree: PyTree) -> PyTree:
    """Returns something to compare and to print: the structure of a tree with shapes and dtypes as its leaves."""
    return jax.tree.map(lambda leaf: f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}", tree)


def _check_weights(one: dict | None, other: dict | None) -> None:
    if one is None and other is None:
        return
    names = [
        name
        for name in {**(one or {}), **(other or {})}
        if not _equal((one or {}).get(name), (other or {}).get(name))
    ]
    if names or one is None or other is None:
        raise Refused(
            f"calls of one update must be divided by the same weights, got weights={_values(one)} and "
            f"weights={_values(other)}; pass the sum of the weights of all calls to each of them, or none"
        )


def _equal(one: Any, other: Any) -> bool:
    if one is other or is_traced((one, other)):
        return True
    return one is not None and other is not None and float(one) == float(other)


def _values(weights: dict | None) -> Any:
    return None if weights is None else {name: float(weight) for name, weight in weights.items()}


def _adds_plainly(a: ForwardBackwardOutput, b: ForwardBackwardOutput) -> bool:
    """Returns whether gradients are added as they are, or else as a mean weighted by what each call counted.

    Raises:
      ValueError: neither is exact.
    """
    names = set(a.terms), set(b.terms)
    undivided = {*a.origin.undivided, *b.origin.undivided}
    if a.origin.normalize == "none" or a.origin.weights is not None or names[0] & names[1] <= undivided:
        return True
    several = len(a.origin.groups) > 1 or len(b.origin.groups) > 1
    if several or names[0] != names[1] or undivided:
        _refuse(a, b, f"{sorted(names[0])} and {sorted(names[1])} are not divided by one weight each")
    if a.origin.normalize == "global" and len(names[0]) > 1:
        _check_ratios(a, b)
    return False


def _check_ratios(a: ForwardBackwardOutput, b: ForwardBackwardOutput) -> None:
    """Raises ValueError where one ratio of weights is not that of all terms."""
    weights = {name: (a.terms[name].weight, term.weight) for name, term in b.terms.items()}
    if is_traced(weights):
        _refuse(a, b, "and inside jax.jit their weights cannot be compared")
    (first, one), *others = ((name, np.asarray(pair, float)) for name, pair in weights.items())
    for name, other in others:
        if not np.isclose(one[0] * other[1], other[0] * one[1], rtol=1e-12, atol=0):
            _refuse(
                a,
                b,
                f"the weights are {one[0]:g} and {one[1]:g} for {first!r}, {other[0]:g} and {other[1]:g} for {name!r}",
            )


def _refuse(a: ForwardBackwardOutput, b: ForwardBackwardOutput, why: str) -> None:
    instead = (
        "pass weights= to every call, the sum of step.weights(state, batch) over all batches, or first add the calls "
        "that have the same single term"
    )
    if a.origin.normalize != "global":
        instead = (
            'make one call of all rows, give every term a weight, or use normalize="global" with weights='
        )
    raise Refused(
        f"the gradients of calls with terms {sorted({*a.terms, *b.terms})} cannot be added exactly, because each tree "
        f"is a sum over terms that need different factors: {why}; {instead}"
    )


@partial(jax.jit, static_argnames="plain")
def _add(a: ForwardBackwardOutput, b: ForwardBackwardOutput, plain: bool) -> ForwardBackwardOutput:
    undivided = {*a.origin.undivided, *b.origin.undivided}
    terms = _union(a.terms, b.terms, lambda name, x, y: _undivided_sum(x, y) if name in undivided else x + y)
    origin = replace(
        a.origin,
        rows=a.origin.rows + b.origin.rows,
        undivided=tuple(sorted(undivided)),
        groups=tuple(dict.fromkeys((*a.origin.groups, *b.origin.groups))),
    )
    return ForwardBackwardOutput(
        objective(terms, origin.normalize, origin.weights),
        terms,
        None if a.grads is None else _added_gradients(a, b, plain),
        _union(a.metrics, b.metrics, _metric_of_both),
        _union(a.per_microbatch, b.per_microbatch, partial(_microbatches_of_both, undivided)),
        _rows_of_both(a.outputs, b.outputs),
        origin,
    )


def _union(a: dict, b: dict, both: Any) -> dict:
    return {
        name: both(name, a[name], b[name]) if name in a and name in b else {**a, **b}[name]
        for name in {**a, **b}
    }


def _undivided_sum(x: Sum, y: Sum) -> Sum:
    """Adds terms without a weight, to which the engine gives one that their value does not depend on."""
    weight = jnp.maximum(x.weight, y.weight)
    return Sum((x.value + y.value) * weight, weight)


def _added_gradients(a: ForwardBackwardOutput, b: ForwardBackwardOutput, plain: bool) -> PyTree:
    name = next(iter(a.terms))
    scales = a.origin.grad_scale, b.origin.grad_scale

    def one(x, y):
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        of_x = of_y = jnp.ones([], dtype)
        if not plain:
            weights = [jnp.asarray(out.terms[name].weight, dtype) for out in (a, b)]
            of_x, of_y = (Sum(weight, weights[0] + weights[1]).value for weight in weights)
        return (x.astype(dtype) * of_x + y.astype(dtype) * (of_y * _ratio(scales, dtype))).astype(x.dtype)

    return jax.tree.map(one, a.grads, b.grads)


def _ratio(scales: tuple, dtype: Any) -> jax.Array:
    """Returns what the second call's gradients are multiplied by to have the scale of the first."""
    one, other = (jnp.asarray(1 if scale is None else scale, dtype) for scale in scales)
    return one / other


def _metric_of_both(_: str, x: Any, y: Any) -> Any:
    if isinstance(x, Sum):
        return x + y
    if isinstance(x, Last):
        return y
    return type(x)({Max: jnp.maximum, Min: jnp.minimum}[type(x)](x.array, y.array))


def _microbatches_of_both(undivided: set[str], name: str, x: Any, y: Any) -> Any:
    both = jax.tree.map(lambda one, other: jnp.concatenate([one, other]), x, y)
    if name in undivided:
        return Sum(both.total, jnp.full_like(both.weight, 1 / len(both.weight)))
    return both


def _rows_of_both(a: PyTree, b: PyTree) -> PyTree:
    alike = jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.shape[1:] == y.shape[1:] for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y]), a, b) if alike else None
