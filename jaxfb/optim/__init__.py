"""Provides learning-rate and weight-decay schedules, optimizers by name, and loss scaling for float16.

The step after `jaxfb.gradients`: the gradients arrive reduced, divided and clipped and leave as
one optax update. Nothing here knows about microbatches.
"""

from jaxfb.optim.learning_rate import Schedule, lr_schedule
from jaxfb.optim.loss_scale import DynamicLossScale, LossScaleState, StaticLossScale
from jaxfb.optim.optimizers import Optimizer, OptimizerState, learning_rate_of, make_optimizer, of_trained
from jaxfb.optim.weight_decay import decay_mask, weight_decay_schedule

__all__ = [
    "DynamicLossScale",
    "LossScaleState",
    "Optimizer",
    "OptimizerState",
    "Schedule",
    "StaticLossScale",
    "decay_mask",
    "learning_rate_of",
    "lr_schedule",
    "make_optimizer",
    "of_trained",
    "weight_decay_schedule",
]
