"""Makes everything a run consists of from a config: text, model, mesh, plans, optimizer.

The first step of a run. What can be refused is refused here, in the order in which it costs: sizes and mesh
first, then the text, then what depends on both. Nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan
from jaxfb.config import Config
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.config.sections import AutoMesh
from jaxfb.data import Corpus, DataConfig, prepare
from jaxfb.data.config import SMALLEST_VOCAB
from jaxfb.forward_backward import ForwardBackward, get_forward_backward_func
from jaxfb.mesh import axis_size, make_mesh
from jaxfb.models.config import TransformerConfig
from jaxfb.models.language_model import LanguageModel
from jaxfb.models.trained_flops import trained_flops
from jaxfb.optim import Optimizer
from jaxfb.parallel.expert import check_expert_divides
from jaxfb.parallel.tensor import check_tensor_divides
from jaxfb.process.position import here
from jaxfb.refusal import Refused
from jaxfb.training.from_config.dtypes import enable_float64, least_bytes, param_dtype
from jaxfb.training.from_config.optimizer import check_optimizer, optimizer
from jaxfb.training.from_config.options import engine_options, step_options
from jaxfb.training.from_config.plans import eval_plan, length_of, run_plan, train_plan
from jaxfb.training.from_config.sizes import (
    abstract_params,
    as_stored,
    check_attention,
    language_model_of,
    model_sizes,
    with_lora,
)
from jaxfb.training.machine import check_continuation, check_model, check_rows
from jaxfb.types import LossFn, Pipelined
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any


@dataclass(frozen=True)
class Setup:
    """A run before its first update; every part a plain value that can be used alone.

    corpus: the text; absent where a run is only planned (`jaxfb.planner`), from shapes alone.
    """

    config: Config
    mesh: Mesh
    plan: RunPlan
    corpus: Corpus
    sizes: TransformerConfig | OwnModelConfig
    model: Pipelined | LossFn
    optimizer: Optimizer

    @cached_property
    def language_model(self) -> LanguageModel:
        """Returns what the model is called, how its parameters begin, and what is known of its speed."""
        return language_model_of(self.sizes)

    @property
    def flops_per_token(self) -> float | None:
        """Returns operations of one token, forward and backward; None where they are not known."""
        length = self.config.data.sequence_length
        if isinstance(self.sizes, TransformerConfig):
            return trained_flops(self.sizes, length, trained_patterns(self.config)).total
        count = self.language_model.flops_per_token
        return None if count is None else count(length)

    @cached_property
    def eval_forward(self) -> ForwardBackward:
        """Returns the engine as evaluation calls it, forward only."""
        return get_forward_backward_func(self.mesh, **engine_options(self.config))

    def train_step(self, plan: BatchPlan, change_gradients: Callable | None = None) -> TrainStep:
        """Returns the compiled update for one plan; a run that ramps up its rows has one for each size."""
        config = self.config
        return make_train_step(
            self.model,
            self.optimizer,
            self.mesh,
            plan,
            max_grad_norm=config.optimizer.max_grad_norm,
            clip_convention=config.optimizer.clip,
            dropout=self.language_model.dropout,
            normalize=config.batch.normalize,
            change_gradients=change_gradients,
            **step_options(config),
        )

    def init_params(self, key: jax.Array) -> PyTree:
        """Returns random parameters, in the dtypes in which they are stored."""
        return as_stored(self.config, self.language_model.init_params(key, param_dtype(self.config)))


def make_setup(
    config: Config, say: Callable[[str], None] = print, read: Callable[[DataConfig], Corpus] = prepare
) -> Setup:
    """Builds it all; `say` is called before what takes a while, `read` makes rows of the text.

    Raises:
      ValueError: the first impossible size or missing file, in one sentence with the nearest legal choice.
    """
    enable_float64(config)
    if isinstance(config.mesh, AutoMesh):
        raise Refused("[mesh] auto is chosen by jaxfb.train; give the sizes here, such as mesh.fsdp=8")
    mesh = make_mesh(**vars(config.mesh))
    plans = {"train": train_plan(config, mesh), "eval": eval_plan(config, mesh)}
    for section, plan in (("batch", plans["train"]), ("eval", plans["eval"])):
        check_rows(section, plan, config.data.sequence_length)
    check_fits(config, config.model.sized(SMALLEST_VOCAB), mesh)
    check_optimizer(config, None if config.run.epochs else length_of(config, run_plan(config, plans, 0)))
    if trained_patterns(config) is not None:
        abstract_params(config, with_lora(config, config.model.sized(SMALLEST_VOCAB)))
    say("reading the text")
    here.enter("reading the text")
    corpus = read(config.data)
    sizes = model_sizes(config, corpus.vocab_size)
    check_fits(config, sizes, mesh)
    if isinstance(sizes, TransformerConfig):
        check_tensor_divides(sizes, axis_size(mesh, "tensor"))
        check_expert_divides(sizes, axis_size(mesh, "expert"))
        check_attention(config, sizes, mesh)
    plan = run_plan(config, plans, len(corpus.train))
    model = language_model_of(sizes).model
    setup = Setup(config, mesh, plan, corpus, sizes, model, optimizer(config, plan))
    setup.eval_forward.check(setup.model, abstract_params(config, sizes), plans["train"])
    return setup


def check_fits(config: Config, sizes: TransformerConfig | OwnModelConfig, mesh: Mesh) -> None:
    """Refuses a model or a continuation that is larger than the machine; of a user's own model nothing is known."""
    if isinstance(sizes, OwnModelConfig):
        return
    check_model(sizes, mesh, least_bytes(config))
    check_continuation(sizes, config.eval.tokens)
