"""Searches around a model at hand, in this process: meshes, schedules and options are drawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxfb import refusal
from jaxfb.batch_plan import BatchPlan
from jaxfb.checking.comparison.trial import try_case
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.draw import AXES, draw
from jaxfb.checking.drawing.shrink import MOST_TRIES
from jaxfb.checking.found import Found, Result
from jaxfb.checking.search import result_of
from jaxfb.checking.toy_models.problem import check_own, facts
from jaxfb.forward_backward import get_forward_backward_func
from jaxfb.types import LossFn, Pipelined

PyTree = Any


def check_random(
    model: LossFn | Pipelined,
    params: PyTree,
    batch: PyTree,
    *,
    cases: int = 20,
    seed: int = 0,
    axes: Sequence[str] | None = None,
    tries: int = MOST_TRIES,
    report: Callable[[Result], None] | None = None,
) -> Found:
    """Runs your own model on random meshes under random schedules and options, and compares each with one device.

    Loss, terms, weights, gradients, metrics, each microbatch's records, outputs and one optimizer update are compared
    with plain `jax.value_and_grad` of all rows at once, in float64, and optax. `jaxfb check --random N --model
    module:function` does the same in separate processes, so it survives an abort of XLA and does not wait for ever.

    Args:
      model: `loss_fn(params, microbatch, rng) -> LossOutput | Sum`, or a `Pipelined`.
      params: any pytree of float arrays; cast to float64, in some cases to float32.
      batch: pytree of [rows, ...] arrays; 16 or 24 rows divide in many ways.
      cases, seed: how many, and of which seed; case k of a seed is always the same.
      axes: those that a mesh may have; None for pipe (of a `Pipelined`), data, fsdp and tensor. "context" is for
        models that know of it, and "expert" for those with experts or none at all.
      tries: how many smaller cases to try for a finding; 0 leaves it as it is.
      report: called with every `Result` as it comes, None for nothing; a case takes seconds to compile.
    Returns:
      `Found`: print it, or call `.raise_if_found()`. A case that jaxfb refuses is listed with the reason.
    Raises:
      ValueError: the model or the batch is not what it should be.
    """
    begun = time.monotonic()
    for name, value, least in (("cases", cases, 1), ("seed", seed, -refusal.INT64), ("tries", tries, 0)):
        refusal.integer(name, value, least=least, most=refusal.INT64)
    if not isinstance(axes, list | tuple | None):
        refusal.refuse("axes", axes, f"a list of some of {', '.join(AXES)}, or None")
    for axis in axes or ():
        refusal.choice("each of axes", axis, tuple(AXES))
    report = (lambda result: None) if report is None else refusal.function("report", report, "(result)")
    own = check_own((model, params, batch), "check_random(model, params, batch)")
    _check_together(*own)
    around = facts(own, axes, len(jax.devices()))

    def run(request):
        case = request if isinstance(request, Case) else draw(seed, request, around)
        return case, try_case(case, own)

    results = [result_of(index, run, tries, report) for index in range(cases)]
    return Found(tuple(results), seed, seconds=time.monotonic() - begun)


def _check_together(model: LossFn | Pipelined, params: PyTree, batch: PyTree) -> None:
    """Raises ValueError where the model does not take these parameters and rows; nothing is compiled."""
    rows = len(jax.tree.leaves(batch)[0])
    forward, plan = get_forward_backward_func(), BatchPlan(rows=rows, num_microbatches=1)
    jax.eval_shape(lambda: forward(model, params, batch, plan, rng=jax.random.key(0)))
