"""Makes everything a run consists of from a config: text, model, mesh, plans, optimizer.

The first step of a run. What can be refused is refused here, in the order in which it costs: sizes and mesh
first, then the text, then what depends on both. Nothing is compiled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan, horizon_warning
from jaxfb.config import Config, load_config
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.custom import CustomConfig
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.config.sections import AutoMesh, LearningRateConfig, OptimizerConfig
from jaxfb.data import Corpus, DataConfig, prepare
from jaxfb.data.config import SMALLEST_VOCAB
from jaxfb.forward_backward import ForwardBackward, get_forward_backward_func
from jaxfb.mesh import axis_size, data_parallel, make_mesh
from jaxfb.models.adapted import adapted
from jaxfb.models.attention import check_backend
from jaxfb.models.config import TransformerConfig
from jaxfb.models.language_model import LanguageModel, language_model
from jaxfb.models.layout import layers_of_stages
from jaxfb.models.lora import all_layers, check_targets
from jaxfb.models.transformer import init_params
from jaxfb.optim import (
    DynamicLossScale,
    Optimizer,
    StaticLossScale,
    lr_schedule,
    make_optimizer,
    weight_decay_schedule,
)
from jaxfb.parallel.expert import check_expert_divides
from jaxfb.parallel.tensor import check_tensor_divides
from jaxfb.process.position import here
from jaxfb.refusal import Refused
from jaxfb.registry import attribute_of
from jaxfb.shared_options import LayoutOptions, PrecisionOptions
from jaxfb.trainable import stored
from jaxfb.training.machine import check_continuation, check_model, check_rows
from jaxfb.types import LossFn, Pipelined
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any
AnyConfig = Config | PostTrainingConfig | CustomConfig
Sizes = TypeVar("Sizes", bound=TransformerConfig)
POST_TRAINING = ("post-training", "train it with jaxfb.Trainer")
_CHECK_PROGRAM = "jaxfb.planner.host_fit", "check_of_programs"
"""By name, since the planner is made of what the trainer runs."""
VOCAB_MULTIPLE = (
    128  # the vocabulary is rounded up, so that its size does not depend on the mesh that cuts it
)


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
        count = self.language_model.flops_per_token
        return None if count is None else count(self.config.data.sequence_length)

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


def language_model_of(sizes: TransformerConfig | OwnModelConfig) -> LanguageModel:
    """Returns the model of these sizes, or the one of the user's own that they name."""
    if isinstance(sizes, OwnModelConfig):
        return language_model(sizes.name, sizes.vocab_size or 0, sizes.options)
    options = dict(vars(sizes))
    return language_model("transformer", options.pop("vocab_size"), options)


def built_in(sizes: Sizes | OwnModelConfig, what: str, instead: str) -> Sizes:
    """Returns the sizes of the built-in transformer; refuses what only it can do for a model of the user's own."""
    if isinstance(sizes, OwnModelConfig):
        raise Refused(
            f"[model] name={sizes.name!r}: {what} works for the built-in transformer alone; {instead}"
        )
    return sizes


def check_attention(config: Config, sizes: TransformerConfig, mesh: Mesh) -> None:
    """Raises ValueError where `model.attention` cannot run on rows of this length, in this dtype, on this mesh."""
    dtype, packed = jnp.dtype(config.precision.compute_dtype), config.data.packing != "stream"
    check_backend(sizes, mesh, dtype, config.data.sequence_length, packed=packed)


def train_plan(config: Config | CustomConfig, mesh: Mesh) -> BatchPlan:
    """Returns how the rows of one update are cut on this mesh."""
    batch = config.batch
    cut: dict[str, Any] = {name: getattr(batch, name) for name in ("rows_per_microbatch", "num_microbatches")}
    return BatchPlan(
        "train",
        rows=batch.rows,
        data_parallel=data_parallel(mesh),
        remainder=batch.remainder,
        **cut,
    )


def eval_plan(config: Config, mesh: Mesh) -> BatchPlan:
    """Returns how the rows of one evaluation batch are cut; what does not fill it weighs nothing."""
    per_replica = config.eval.rows_per_microbatch or train_plan(config, mesh).rows_per_microbatch
    return BatchPlan(
        "eval",
        rows=config.eval.rows or config.batch.rows,
        rows_per_microbatch=per_replica,
        data_parallel=data_parallel(mesh),
        remainder="pad",
    )


def run_plan(config: Config | CustomConfig, plans: dict[str, BatchPlan], train_rows: int | None) -> RunPlan:
    """Returns the length of the run. Only a length in epochs ends a window of rows where an epoch ends."""
    run = config.run
    return RunPlan(
        plans,
        updates=run.updates,
        samples=run.samples,
        tokens=run.tokens,
        epochs=run.epochs,
        dataset_rows=train_rows if run.epochs else None,
        sequence_length=getattr(config.data, "sequence_length", None),
        ramp_up=config.batch.ramp_up,
        remainder=run.remainder,
    )


def model_sizes(config: Config | PostTrainingConfig, vocab_size: int) -> TransformerConfig | OwnModelConfig:
    """Returns the transformer's sizes: the config's vocabulary, or the tokenizer's rounded up to a multiple of 128.

    A post-training config without a model has that of the run it starts from.

    Raises:
      ValueError: the config's vocabulary is smaller than the tokenizer's.
    """
    if isinstance(config, PostTrainingConfig) and config.model is None:
        sizes = model_sizes(load_config(config.start.run or ""), vocab_size)
        return with_lora(config, adapted(built_in(sizes, *POST_TRAINING), None))
    assert config.model is not None  # a config of pretraining has one
    rounded = -(-vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    if config.model.vocab_size is not None and config.model.vocab_size < vocab_size:
        if (source := getattr(config.model, "from_", None)) is not None:
            raise Refused(
                f"[model] the model of {source} has {config.model.vocab_size} ids, fewer than the {vocab_size} of the "
                "tokenizer; put the model's own tokenizer.json into that directory"
            )
        raise Refused(
            f"[model] vocab_size={config.model.vocab_size} is below the {vocab_size} ids of the tokenizer; "
            f"use {rounded}, or leave it out",
            [{"model.vocab_size": rounded}, {"model.vocab_size": None}],
        )
    return with_lora(config, config.model.sized(rounded))


def with_lora(
    config: Config | PostTrainingConfig, sizes: TransformerConfig | OwnModelConfig
) -> TransformerConfig | OwnModelConfig:
    """Returns the sizes with the adapters of the config.

    Raises:
      ValueError: a target of theirs is no projection of the model.
    """
    lora = getattr(config, "lora", None)
    if lora is None:
        return sizes
    own = built_in(sizes, "lora", "leave it out")
    check_targets(lora, all_layers(jax.eval_shape(lambda: init_params(own, jax.random.key(0)))))
    return adapted(own, lora)


def check_optimizer(config: AnyConfig, length: int | None = None) -> None:
    """Refuses options of the optimizer and of its schedules, before data are read.

    length: of the run, in `lr.unit`; None where that depends on the data, and then what depends on it is refused later.
    """
    with warnings.catch_warnings(action="ignore"):  # they come with the optimizer itself
        _optimizer(config, length)


def optimizer(config: AnyConfig, plan: RunPlan) -> Optimizer:
    """Returns the optimizer with its schedules, which end with the run unless the config sets something else."""
    length = length_of(config, plan)
    if config.lr.name != "constant" and config.lr.total:
        unit = "" if config.lr.unit == "updates" else " in rows:"
        if warning := horizon_warning(config.lr.total, length, config.lr.final):
            warnings.warn(f"[lr]{unit} {warning}", stacklevel=2)
    return _optimizer(config, length)


def length_of(config: AnyConfig, plan: RunPlan) -> int:
    """Returns the length of the run in `lr.unit`."""
    last = plan.window(plan.total_updates - 1)
    return {"updates": plan.total_updates, "samples": last.start + last.rows}[config.lr.unit]


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


def abstract_params(config: AnyConfig, sizes: TransformerConfig | OwnModelConfig) -> PyTree:
    """Returns the parameters as shapes and dtypes, on no device in particular."""
    made, dtype = language_model_of(sizes), param_dtype(config)
    return jax.eval_shape(lambda: as_stored(config, made.init_params(jax.random.key(0), dtype)))


def as_stored(config: AnyConfig, params: PyTree) -> PyTree:
    """Returns the parameters in the dtypes of the config: frozen ones may have one of their own.

    Raises:
      ValueError: a pattern of `trainable` is the name of none.
    """
    return stored(trained_patterns(config), params, config.precision.frozen_dtype)


def loss_scale(config: AnyConfig) -> DynamicLossScale | StaticLossScale | None:
    """Returns the loss scaling: by default dynamic for float16, none otherwise."""
    asked = config.precision.loss_scale
    if isinstance(asked, float | int):
        return StaticLossScale(asked)
    dynamic = asked == "dynamic" or (asked == "auto" and config.precision.compute_dtype == "float16")
    return DynamicLossScale() if dynamic else None


def least_bytes(config: AnyConfig) -> int:
    """Returns the bytes that a parameter takes at least: frozen ones may be stored in fewer."""
    return jnp.dtype(config.precision.frozen_dtype or param_dtype(config)).itemsize


def param_dtype(config: AnyConfig) -> Any:
    """Returns the dtype of the master parameters: float32, or float64 where the whole run is."""
    return jnp.float64 if config.precision.compute_dtype == "float64" else jnp.float32


def enable_float64(config: AnyConfig) -> None:
    """Enables float64 arrays in JAX where the config asks for them, for the rest of the process."""
    if config.precision.compute_dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def with_float64(config: AnyConfig) -> AbstractContextManager[Any]:
    """Returns a context in which JAX has the float64 arrays that the config asks for: for a plan, which is no run."""
    return jax.enable_x64(True) if config.precision.compute_dtype == "float64" else nullcontext()


def step_options(config: AnyConfig) -> dict[str, Any]:
    """Returns what `make_train_step` takes from the config whatever it updates: policy, critic or model."""
    more = {"loss_scale": loss_scale(config), "count_zeros": config.log.count_zeros}
    more |= {"check_program": attribute_of(*_CHECK_PROGRAM)(config)}
    more |= {"trainable": trained_patterns(config)}
    more |= {"optimizer_memory": config.optimizer.memory if config.optimizer else "device"}
    return {**more, **engine_options(config)}


def compute_dtype(config: AnyConfig) -> str | None:
    """Returns the dtype that parameters are cast to for the computation; None where they all have it."""
    dtype = config.precision.compute_dtype
    stored_alike = config.precision.frozen_dtype is None and dtype in ("float32", "float64")
    return None if stored_alike else dtype


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
