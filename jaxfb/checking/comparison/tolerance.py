"""Sets how far a case's numbers may be from those of one device in float64."""

from __future__ import annotations

from jaxfb.checking.drawing.case import Case, narrower
from jaxfb.forward_backward.equivalence import TOLERANCES

EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
OF_WEIGHTS = TOLERANCES["float32"]
"""The tolerance of terms' weights, which do not depend on parameters."""


def of_values(case: Case) -> float:
    """Returns the tolerance of loss, terms, metrics and outputs: what the computation's dtype rounds away."""
    return TOLERANCES[case.computes_in]


def of_gradients(case: Case) -> float:
    """Returns the tolerance of gradients, which are summed in dtypes of their own; those of "sums" are exact but for
    that.
    """
    summed = case.reduces_in
    return TOLERANCES[summed if case.model == "sums" else narrower(case.computes_in, summed)]
