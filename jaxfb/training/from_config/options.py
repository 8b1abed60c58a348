"""Reads from a config what the engine and the update take."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from jaxfb.config.adapters import trained_patterns
from jaxfb.config.custom import CustomConfig
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.data.config import SMALLEST_VOCAB
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layout import layers_of_stages
from jaxfb.registry import attribute_of
from jaxfb.shared_options import LayoutOptions, PrecisionOptions
from jaxfb.training.from_config.dtypes import AnyConfig, compute_dtype, loss_scale
from jaxfb.training.from_config.sizes import model_sizes

_CHECK_PROGRAM = "jaxfb.planner.host_fit", "check_of_programs"
"""By name, since the planner is made of what the trainer runs."""


def step_options(config: AnyConfig) -> dict[str, Any]:
    """Returns what `make_train_step` takes from the config whatever it updates: policy, critic or model."""
    more = {"loss_scale": loss_scale(config), "count_zeros": config.log.count_zeros}
    more |= {"check_program": attribute_of(*_CHECK_PROGRAM)(config)}
    more |= {"trainable": trained_patterns(config)}
    more |= {"optimizer_memory": config.optimizer.memory if config.optimizer else "device"}
    return {**more, **engine_options(config)}


def engine_options(config: AnyConfig) -> dict[str, Any]:
    """Returns what `get_forward_backward_func` takes from the config: the options that it shares, and its own."""
    shared = {
        **_of(config.precision, PrecisionOptions),
        **_of(config.parallel, LayoutOptions),
        "compute_dtype": compute_dtype(config),
        "layers_per_stage": stage_lengths(config),
    }
    return shared | {
        "schedule": config.schedule,
        "num_chunks": config.chunks,
        "num_pieces": config.parallel.pieces,
        "optimizer_sharding": config.optimizer.sharding if config.optimizer else "none",
    }


def _of(section: Any, shared: type) -> dict[str, Any]:
    return {option.name: getattr(section, option.name) for option in fields(shared)}


def stage_lengths(config: AnyConfig) -> tuple[int, ...] | None:
    """Returns `layers_per_stage` as the engine takes it: of a layout in words, the numbers of layers or periods.

    Raises:
      ValueError: the layout does not fit the model.
    """
    given = config.parallel.layers_per_stage
    if not isinstance(given, str):
        return given
    if isinstance(config, CustomConfig) or isinstance(config.model, OwnModelConfig):
        return layers_of_stages(given)
    sizes = model_sizes(config, SMALLEST_VOCAB)
    return layers_of_stages(given, sizes if isinstance(sizes, TransformerConfig) else None)
