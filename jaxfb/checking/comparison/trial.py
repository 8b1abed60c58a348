"""Runs one case by the engine and by one device, and compares all results."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxfb.checking.comparison import tolerance
from jaxfb.checking.comparison.difference import Difference, compare
from jaxfb.checking.comparison.reference import Answer, answer_of, value_of, values_of
from jaxfb.checking.comparison.rounding import allowing_for_rounding
from jaxfb.checking.comparison.update import differences_of_updates
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.outcome import DIFFERENT, FAILED, REFUSED, SAME, Outcome
from jaxfb.checking.toy_models import arguments
from jaxfb.checking.toy_models.problem import OwnModel, Problem, problem_of
from jaxfb.forward_backward import get_forward_backward_func
from jaxfb.output import ForwardBackwardOutput
from jaxfb.parallel import data
from jaxfb.refusal import Refused
from jaxfb.types import Sum

PyTree = Any


def try_case(case: Case, own: OwnModel | None = None) -> Outcome:
    """Runs a case and returns its outcome, whatever it raises."""
    begun = time.monotonic()
    try:
        with warnings.catch_warnings(), large_tables(case):
            warnings.simplefilter("ignore")
            problem = problem_of(case, own)
            outcome = _judged(allowing_for_rounding(differences(case, problem), case, problem))
    except Exception as error:
        outcome = _refused_or_failed(error)
    jax.clear_caches()
    return replace(outcome, seconds=round(time.monotonic() - begun, 1))


@contextmanager
def large_tables(case: Case) -> Iterator[None]:
    """Lowers the size from which an embedding or a head is large, if the case asks for it.

    The size is not an argument of what JAX traces: clear its caches afterwards, as `try_case` does.
    """
    usual = data.LARGEST_SCATTER
    data.LARGEST_SCATTER = 2**9 if case.large_tables else usual
    try:
        yield
    finally:
        data.LARGEST_SCATTER = usual


def differences(case: Case, problem: Problem) -> list[Difference]:
    """Returns everything that was compared, whether it differs or not."""
    if case.update:
        return differences_of_updates(case, problem)
    return differences_of_outputs(case, problem, _engine(case, problem), answer_of(case, problem))


def differences_of_outputs(
    case: Case, problem: Problem, got: ForwardBackwardOutput, want: Answer
) -> list[Difference]:
    """Compares one call of the engine: loss, terms, weights, gradients, metrics, each microbatch, outputs."""
    values, weights = tolerance.of_values(case), tolerance.OF_WEIGHTS
    totals = {"loss": got.loss, **_of_terms(case, got.terms)}
    found = [
        compare("loss", totals, {"loss": want.loss, **_of_terms(case, want.terms)}, values, floor=0.1),
        compare("metrics", values_of(got.metrics), values_of(want.metrics), values, floor=1e-6),
        compare("outputs", got.outputs, want.outputs, values),
        _of_metrics_by_microbatch(got, want, values),
    ]
    for part in ("total", "weight"):
        allowed = values if part == "total" else weights
        ours, theirs = (_parts(out.per_microbatch, part, want.per_microbatch) for out in (got, want))
        found.append(compare(f"per_microbatch {part}", ours, theirs, allowed))
    if case.normalize != "microbatch":
        ours, theirs = (_parts(out.terms, "weight", want.terms) for out in (got, want))
        found.append(compare("weights", ours, theirs, weights))
    return found if case.forward_only else [*found, *_of_gradients(case, problem, got, want)]


def _engine(case: Case, problem: Problem) -> ForwardBackwardOutput:
    with jax.enable_x64(case.x64):
        options, plan = arguments.engine_options(case), arguments.plan_of(case)
        forward_backward = get_forward_backward_func(arguments.mesh_of(case), **options)
        how = {"forward_only": case.forward_only, "grad_scale": case.grad_scale}

        def call(params, batch, rng):
            return forward_backward(problem.model, params, batch, plan, rng, **how)

        params = arguments.params_as_called(case, problem.params)
        rows = arguments.batch_as_called(case, problem.batch)
        call = jax.jit(call) if case.call == "jit" else call
        return jax.device_get(call(params, rows, arguments.rng_of(case)))


def _of_gradients(case: Case, problem: Problem, got, want) -> list[Difference]:
    scaled = jax.tree.map(lambda leaf: leaf * case.grad_scale, want.grads)
    given = jax.tree.leaves(problem.params)
    expected = [case.accum_dtype or ("float64" if leaf.dtype == np.float64 else "float32") for leaf in given]
    made = [str(leaf.dtype) for leaf in jax.tree.leaves(got.grads)]
    found = [compare("grads", got.grads, scaled, tolerance.of_gradients(case))]
    if made != expected:
        found.append(Difference("grads", problem=f"dtypes {made}, not {expected}"))
    return found


def _of_terms(case: Case, terms: Mapping[str, Sum]) -> dict[str, Any]:
    """Returns what the objective adds up: values, or totals under normalize="none"."""
    return {name: term.total if case.normalize == "none" else value_of(term) for name, term in terms.items()}


def _of_metrics_by_microbatch(got: ForwardBackwardOutput, want: Answer, allowed: float) -> Difference:
    """Compares each microbatch's metrics, measured by the largest number of the same metric in any of them: one that is
    a logit may be near zero by chance.
    """
    ours, theirs = _of_microbatches(got, want)
    of_all = {
        name: np.stack([np.asarray(one[name]) for one in theirs]) for name in (theirs[0] if theirs else {})
    }
    return compare(
        "per_microbatch metrics", ours, theirs, allowed, floor=1e-6, measured_by=[of_all for _ in theirs]
    )


def _of_microbatches(got: ForwardBackwardOutput, want: Answer) -> tuple[list[dict], list[dict]]:
    """Returns the values of each microbatch's metrics, of the engine and of one device."""
    called = {f"metrics/{name}" if name in want.terms else name: name for name in want.metrics}
    named = {called.get(name, name): m for name, m in got.per_microbatch.items() if name not in want.terms}
    number = len(want.metrics_of_microbatches)
    ours = [values_of(jax.tree.map(lambda leaf, part=part: leaf[part], named)) for part in range(number)]
    return ours, [values_of(metrics) for metrics in want.metrics_of_microbatches]


def _parts(terms: Mapping[str, Sum], part: str, like: Mapping[str, Sum]) -> dict[str, Any]:
    """Returns the totals, or the weights of the terms that have one."""
    names = [name for name in like if part == "total" or like[name].weight is not None]
    return {name: getattr(terms[name], part) for name in names if name in terms}


def _judged(found: list[Difference]) -> Outcome:
    wrong = [one for one in found if one.found]
    if not wrong:
        largest = max(found, key=_share)
        return Outcome(SAME, largest=_share(largest), kind=largest.quantity)
    return Outcome(DIFFERENT, "; ".join(map(str, wrong)), wrong[0].quantity)


def _share(one: Difference) -> float:
    return one.size / one.allowed if one.allowed else 0.0


def _refused_or_failed(error: Exception) -> Outcome:
    text = str(error).strip() or repr(error)
    if isinstance(error, Refused):
        return Outcome(REFUSED, text.partition("\n")[0], "ValueError")
    place = _place(error.__traceback__)
    return Outcome(FAILED, f"{type(error).__name__}: {text[:600]}\n  in {place}", type(error).__name__)


def _place(trace: TracebackType | None) -> str:
    """Returns the last line of jaxfb that an exception came through."""
    ours = [frame for frame in traceback.extract_tb(trace) if "jaxfb" in frame.filename]
    last = (ours or traceback.extract_tb(trace))[-1]
    return f"{last.filename.rpartition('jaxfb/')[2]}:{last.lineno} {last.name}"
