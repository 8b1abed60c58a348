"""Makes the optimizer of a config, with its schedules."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxfb.batch_plan import RunPlan, horizon_warning
from jaxfb.config.sections import LearningRateConfig, OptimizerConfig
from jaxfb.optim import Optimizer, lr_schedule, make_optimizer, weight_decay_schedule
from jaxfb.refusal import Refused
from jaxfb.training.from_config.dtypes import AnyConfig
from jaxfb.training.from_config.plans import length_of


def check_optimizer(config: AnyConfig, length: int | None = None) -> None:
    """Refuses options of the optimizer and of its schedules, before data are read.

    length: of the run, in `lr.unit`; None where that depends on the data, and then what depends on it is refused later.
    """
    with warnings.catch_warnings(action="ignore"):  # they come with the optimizer itself
        _optimizer(config, length)


def optimizer_of_any_length(config: AnyConfig) -> Optimizer:
    """Returns the optimizer without schedules that end with the run: the same state, where no update is made."""
    with warnings.catch_warnings(action="ignore"):
        return _optimizer(config, None)


def optimizer(config: AnyConfig, plan: RunPlan) -> Optimizer:
    """Returns the optimizer with its schedules, which end with the run unless the config sets something else."""
    length = length_of(config, plan)
    if config.lr.name != "constant" and config.lr.total:
        unit = "" if config.lr.unit == "updates" else " in rows:"
        if warning := horizon_warning(config.lr.total, length, config.lr.final):
            warnings.warn(f"[lr]{unit} {warning}", stacklevel=2)
    return _optimizer(config, length)


def _optimizer(config: AnyConfig, length: int | None) -> Optimizer:
    """Returns the optimizer; without a length, schedules that end with the run are left out."""
    settings, lr = config.optimizer, config.lr
    assert settings is not None  # without it, a program hands its own optimizer over
    rate, decay, horizon = settings.learning_rate, settings.weight_decay, lr.total or length
    if horizon is not None:
        rate = _learning_rate(settings.learning_rate, lr, horizon)
    with _in_section("optimizer"):
        if length is not None:
            decay = _weight_decay(settings, length, lr.unit)
        options: dict[str, Any] = settings.options
        return make_optimizer(settings.name, learning_rate=rate, weight_decay=decay, **options)


def _learning_rate(peak: float, lr: LearningRateConfig, total: int) -> Any:
    """Returns the schedule of the learning rate."""
    options: dict[str, Any] = lr.options
    with _in_section("lr"):
        return lr_schedule(
            lr.name,
            peak=peak,
            total=total,
            warmup=lr.warmup,
            warmup_shape=lr.warmup_shape,
            initial=lr.initial,
            final=lr.final,
            unit=lr.unit,
            **options,
        )


def _weight_decay(settings: OptimizerConfig, length: int, unit: str) -> Any:
    """Returns the weight decay: one number, or its schedule over the run."""
    if settings.weight_decay_ramp == "constant":
        return settings.weight_decay
    first = 0.0 if settings.weight_decay_initial is None else settings.weight_decay_initial
    return weight_decay_schedule(
        settings.weight_decay_ramp, initial=first, final=settings.weight_decay, total=length, unit=unit
    )


@contextmanager
def _in_section(section: str) -> Iterator[None]:
    """Puts the section of a config in front of what is refused inside."""
    try:
        yield
    except Refused as error:
        error.args = (f"[{section}] {error}",)
        raise
