"""Measures what a dtype of few bits rounds away on one device, for cases in which that is more than its tolerance."""

from __future__ import annotations

from dataclasses import replace

from jaxfb.checking.comparison import tolerance
from jaxfb.checking.comparison.difference import Difference, compare
from jaxfb.checking.comparison.reference import Answer, answer_of, values_of
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.toy_models.problem import Problem

FEW_BITS = ("bfloat16", "float16")
TIMES = 4
"""How many times as far the engine may be off as one device in the same dtype: both are off by chance."""
_OF_GRADIENTS = ("grads", "parameters", "optimizer state", "grad_norm", "clipped_grad_norm")


def allowing_for_rounding(found: list[Difference], case: Case, problem: Problem) -> list[Difference]:
    """Returns the differences with more allowed where one device, in the case's dtype, is far from itself in float64.

    A mistake of the engine stays one: it is not part of what the device alone is off by. Where nothing differs, or the
    dtype has many bits, all is returned as it is.
    """
    if case.computes_in not in FEW_BITS or not any(one.found for one in found):
        return found
    values, gradients = _rounded_away(case, problem)
    more = max(1.0, TIMES * values / tolerance.of_values(case))
    of_gradients = max(1.0, TIMES * gradients / tolerance.of_gradients(case))
    return [
        replace(one, allowed=one.allowed * (of_gradients if _of_gradients(one) else more)) for one in found
    ]


def _rounded_away(case: Case, problem: Problem) -> tuple[float, float]:
    """Returns how far one device is off in the case's dtype: the loss, terms and metrics, and the gradients."""
    want, got = (answer_of(case, problem, wide) for wide in (True, False))
    measures = [values_of(want.metrics)] * (1 + len(want.metrics_of_microbatches))
    values = [
        compare("loss", _objective(got), _objective(want), 0, floor=0.1),
        compare("metrics", _all_metrics(got), _all_metrics(want), 0, floor=1e-6, measured_by=measures),
        compare("outputs", got.outputs, want.outputs, 0),
    ]
    gradients = 0.0 if case.forward_only else compare("grads", got.grads, want.grads, 0).size
    return max(one.size for one in values), gradients


def _objective(answer: Answer) -> dict:
    return {"loss": answer.loss, "terms": values_of(answer.terms)}


def _all_metrics(answer: Answer) -> list[dict]:
    """Returns the metrics of all rows and of each microbatch: one that is a single number is off by chance."""
    return [values_of(answer.metrics), *map(values_of, answer.metrics_of_microbatches)]


def _of_gradients(one: Difference) -> bool:
    return one.quantity.removeprefix("second ") in _OF_GRADIENTS
