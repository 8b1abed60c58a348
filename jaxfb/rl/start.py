"""Builds what every kind of post-training begins with: mesh, tokenizer, chat, model and starting parameters.

Nothing is compiled here; sizes and mesh are checked first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, PlanError, RunPlan
from jaxfb.batch_plan.plan import UPDATES
from jaxfb.config.post_training import (
    KINDS,
    CutConfig,
    DPOConfig,
    PostTrainingConfig,
    RLConfig,
    SFTConfig,
)
from jaxfb.data import Tokenizer, load_tokenizer
from jaxfb.data.chat import BUILT_IN, Chat, make_chat, read_template, saved_chat
from jaxfb.data.tokenizer import ByteTokenizer, absent_ids, sampled, warn_of_unknown
from jaxfb.forward_backward import ForwardBackward, get_forward_backward_func
from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.mesh import axis_size, data_parallel, make_mesh
from jaxfb.models.adapted import draws
from jaxfb.models.config import TransformerConfig
from jaxfb.models.lora import merged, without_adapters
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.expert import check_expert_divides
from jaxfb.parallel.tensor import check_tensor_divides
from jaxfb.refusal import Refused
from jaxfb.training.from_config.dtypes import enable_float64, least_bytes, param_dtype
from jaxfb.training.from_config.optimizer import check_optimizer, optimizer
from jaxfb.training.from_config.options import engine_options, step_options
from jaxfb.training.from_config.sizes import POST_TRAINING, as_stored, built_in, model_sizes
from jaxfb.training.machine import check_continuation, check_model, check_rows
from jaxfb.training.parameters import begun, params_in, params_of_run, with_given_adapter
from jaxfb.training.run_dir import RunDirectory
from jaxfb.types import LossFn, Pipelined
from jaxfb.update.train_state import TrainState
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any


Kind = TypeVar("Kind", bound=PostTrainingConfig, covariant=True)


@dataclass(frozen=True)
class Base(Generic[Kind]):
    """A model that is about to be trained further.

    model: the transformer, whose head is replaced by the loss at hand (`losses.heads`).
    kept: the directory of the run itself, where it is saved and has the tokenizer and the chat that it began with.
    """

    config: Kind
    mesh: Mesh
    tokenizer: Tokenizer
    sizes: TransformerConfig
    kept: Path | None = None

    @cached_property
    def model(self) -> Pipelined:
        return transformer(self.sizes)

    @cached_property
    def chat(self) -> Chat:
        """Returns how messages become token ids: by the config's template, or that of the run or of the tokenizer.

        Raises:
          ValueError: the template cannot be read, or a stop token is not the tokenizer's.
        """
        return _chat(self.config, self.tokenizer, self.kept)

    @cached_property
    def absent_ids(self) -> IdRanges:
        """Returns ranges of the ids in the model's vocabulary that the tokenizer lacks; they are never sampled."""
        return absent_ids(self.tokenizer, self.sizes.vocab_size)

    def plans(self, rows: Mapping[str, int], length: int) -> dict[str, BatchPlan]:
        """Makes the plan of each purpose, of so many rows, from its own section of `plans`; nothing is inherited.

        Raises:
          PlanError: a section is missing, or cannot cut its rows.
        """
        missing = [purpose for purpose in rows if getattr(self.config.plans, purpose) is None]
        if missing:
            replicas = data_parallel(self.mesh)
            fill = {f"plans.{p}.rows_per_microbatch": max(1, rows[p] // replicas) for p in missing}
            raise PlanError(
                f"[{missing[0]}] needs plans.{' and plans.'.join(missing)} with rows_per_microbatch, "
                "num_microbatches or max_tokens_per_microbatch; nothing is inherited from plans.train",
                [fill],
            )
        return {purpose: self._plan(purpose, number, length) for purpose, number in rows.items()}

    def _plan(self, purpose: Any, rows: int, length: int) -> BatchPlan:
        cut: CutConfig = getattr(self.config.plans, purpose)
        budget = cut.max_tokens_per_microbatch is not None
        _check_budget(f"plans.{purpose}", purpose, cut, length)
        exact = purpose in UPDATES or budget
        sizes = dict(vars(cut))
        if sizes.pop("context_by_width"):
            sizes["max_context"] = axis_size(self.mesh, "context")
        plan = BatchPlan(
            purpose,
            rows=rows,
            data_parallel=data_parallel(self.mesh),
            sequence_length=length if budget else None,
            remainder="error" if exact else "pad",
            **sizes,
        )
        self.check_plan(plan, length)
        return plan

    def check_plan(self, plan: BatchPlan, length: int) -> None:
        """Refuses a plan of rows that this machine cannot hold, and warns of one that leaves a pipeline idle."""
        check_rows(f"plans.{plan.purpose}", plan, length, _length_key(self.config))
        self._warn_of_bubbles(plan)

    def _warn_of_bubbles(self, plan: BatchPlan) -> None:
        pipe = axis_size(self.mesh, "pipe")
        if not plan.by_tokens and plan.num_microbatches < pipe:
            idle = (pipe - 1) / (pipe - 1 + plan.num_microbatches)
            warnings.warn(
                f"[{plan.purpose}] {plan.num_microbatches} microbatches in a pipeline of {pipe} stages leave it idle "
                f"{idle:.0%} of the time; use plans.{plan.purpose}.num_microbatches={pipe} or more",
                stacklevel=3,
            )

    def train_step(self, model: LossFn | Pipelined, plan: BatchPlan, run: RunPlan) -> TrainStep:
        """Makes the compiled update of that model under the config's optimizer.

        Raises:
          ValueError: something is dropped of packed rows.
        """
        check_packing(self.config, self.sizes, plan)
        return make_train_step(
            model,
            optimizer(self.config, run),
            self.mesh,
            plan,
            max_grad_norm=self.config.optimizer.max_grad_norm,
            clip_convention=self.config.optimizer.clip,
            dropout=draws(self.sizes),
            **step_options(self.config),
        )

    def check_characters(self, texts: Iterable[str]) -> None:
        """Warns of characters that the tokenizer does not know, with their share of the first texts."""
        warn_of_unknown("[start] tokenizer", *self.tokenizer.unknown(sampled(texts)))

    @cached_property
    def forward(self) -> ForwardBackward:
        """Makes the engine of forward-only passes."""
        return get_forward_backward_func(self.mesh, **engine_options(self.config))

    def init_params(self, key: jax.Array) -> PyTree:
        """Draws random parameters, in the dtypes in which they are stored."""
        return as_stored(self.config, init_params(self.sizes, key, param_dtype(self.config)))

    def begin(self, step: TrainStep) -> TrainState:
        """Returns the state of a fresh run, with the parameters that it begins with, read onto the mesh."""
        params, seed = self.starting_params(step), self.config.run.seed
        return step.init(params, seed, donate=not callable(params))

    def starting_params(self, step: TrainStep) -> PyTree | Callable[[jax.Array], PyTree]:
        """Returns the parameters of `start.run` or of `model.from`, cut as the step cuts them, or a function that draws
        them.

        Adapters of that run are merged into its kernels; those of this run are new, or of `lora.adapter`.
        """
        model, run = self.config.model, self.config.start.run
        check_run(self.config)
        if run is None and (model is None or model.from_ is None):
            return with_given_adapter(self.config, self.init_params)
        abstract = without_adapters(step.abstract_state(self.init_params).params)
        if run is not None:
            return begun(self.config, params_of_run(run, self.sizes, abstract))
        assert model is not None and model.from_ is not None  # by the first condition
        return begun(self.config, params_in(model.from_, model, abstract))

    def whole(self, params: PyTree) -> PyTree:
        """Returns the parameters without adapters, which are merged into the kernels, in the master copy's dtype."""
        params = params if self.config.lora is None else merged(params, self.config.lora)
        return jax.tree.map(lambda leaf: leaf.astype(param_dtype(self.config)), params)


def make_base(config: Kind, fresh: bool = False) -> Base[Kind]:
    """Reads what the config starts from.

    fresh: a run begins, whatever is saved in its directory. Otherwise a run that is saved there is to continue, and
      needs nothing but its own directory.

    Raises:
      ValueError: an impossible size, a missing file.
    """
    enable_float64(config)
    mesh = make_mesh(**vars(config.mesh))
    check_optimizer(config, _length(config))
    kept = None if fresh else kept_by_run(config)
    if kept is None:
        check_run(config)
    check_head(config)
    tokenizer = tokenizer_of(config, kept)
    sizes = built_in(model_sizes(config, tokenizer.vocab_size, fresh), *POST_TRAINING)
    check_model(sizes, mesh, least_bytes(config))
    check_continuation(sizes, config.eval.tokens)
    check_tensor_divides(sizes, axis_size(mesh, "tensor"))
    check_expert_divides(sizes, axis_size(mesh, "expert"))
    return Base(config, mesh, tokenizer, sizes, kept)


def _length(config: PostTrainingConfig) -> int | None:
    """Returns the length of the run in `lr.unit`; None where it depends on the data, or has no whole updates."""
    if isinstance(config, SFTConfig | DPOConfig):
        return config.batch.updates if config.lr.unit == "updates" else None
    assert isinstance(config, RLConfig)
    sizes = config.rollout
    updates, left = divmod(sizes.prompts * sizes.samples_per_prompt, sizes.rows_per_update)
    unit = {"updates": 1, "samples": sizes.rows_per_update}[config.lr.unit]
    return None if left else updates * sizes.epochs * sizes.rollouts * unit


def _check_budget(key: str, purpose: str, cut: CutConfig, length: int) -> None:
    """Refuses settings of a token budget where a plan is cut by rows, with a budget of as many tokens."""
    given = [name for name in ("widths", "packing") if getattr(cut, name)]
    if cut.max_tokens_per_microbatch is not None or not given:
        return
    without = {
        f"{key}.{name}": None for name in ("rows_per_microbatch", "num_microbatches") if getattr(cut, name)
    }
    tokens = (cut.rows_per_microbatch or 1) * length
    raise PlanError(
        f"[{purpose}] {' and '.join(f'{key}.{name}' for name in given)} need{'s' * (len(given) == 1)} a token budget",
        [
            {f"{key}.max_tokens_per_microbatch": tokens, **without},
            {f"{key}.{name}": {"widths": None, "packing": False}[name] for name in given},
        ],
    )


def check_packing(config: PostTrainingConfig, sizes: TransformerConfig, plan: BatchPlan) -> None:
    """Refuses dropout of packed rows, by the keys of the config that turn either off.

    sizes: of the model that is updated by the plan.
    """
    if not (plan.packing and draws(sizes)):
        return
    packing = f"plans.{plan.purpose}.packing"
    off = {"model.dropout": 0.0} if sizes.dropout and config.model is not None else {}
    if draws(replace(sizes, dropout=0.0)):
        off["lora.dropout"] = 0.0
    keys = " and ".join(f"{key}=0" for key in off)
    raise Refused(
        f"[{plan.purpose}] dropout with {packing}=true would depend on how rows are packed; use {packing}=false"
        f"{f', or {keys}' if off else ''}",
        [{packing: False}, *([off] if off else [])],
    )


def kept_by_run(config: PostTrainingConfig) -> Path | None:
    """Returns the directory of the config's run where what it began with is kept there, so that it can continue."""
    directory = RunDirectory(Path(config.run.dir))
    return directory.path if directory.began_as(config) else None


def check_run(config: PostTrainingConfig) -> None:
    """Refuses a run to start from that is not there."""
    run = config.start.run
    if run is not None and not Path(run).is_dir():
        raise Refused(
            f"[start] there is no run {run} to start from; train it first, or give another start.run"
        )


def check_head(config: PostTrainingConfig) -> None:
    """Refuses settings of the loss of tokens where another loss takes its place, so that they would do nothing.

    Those of a run or of files to start from are left: they were learnt with another loss.
    """
    warm = isinstance(config, RLConfig) and config.warm_start.updates
    if config.model is None or isinstance(config, SFTConfig) or warm:
        return
    sized = ("mtp_depth",) if config.model.from_ is None else ()
    for name in ("z_loss", "label_smoothing", *sized):
        if value := getattr(config.model, name):
            raise Refused(
                f"[model] {name}={value} belongs to the loss of pretraining and sft, which dpo and rl do not compute; "
                f"use model.{name}=0",
                [{f"model.{name}": 0}],
            )


def _length_key(config: PostTrainingConfig) -> str:
    """Returns the key of a config that makes its rows longer or shorter."""
    section = next(name for name in KINDS if getattr(config, name, None) is not None)
    return "rollout.max_new_tokens" if section == "task" else f"{section}.sequence_length"


def row_multiple(mesh: Mesh) -> int:
    """Returns the number that a row's length must be a multiple of: the context axis cuts a row in twice its size."""
    size = axis_size(mesh, "context")
    return 1 if size == 1 else 2 * size


def tokenizer_of(config: PostTrainingConfig, kept: Path | None = None) -> Tokenizer:
    """Returns the tokenizer that the config names, or that of what the run begins with.

    kept: as for `Base`; the tokenizer there counts.

    Raises:
      ValueError: none is named, or there is no such file.
    """
    if kept is not None:
        return load_tokenizer(kept / "tokenizer.json")
    asked = config.start.tokenizer
    if asked == "bytes":
        return ByteTokenizer()
    if asked is None and _source(config) is None:
        raise Refused(
            "[start] needs tokenizer where there is no run to take it from; use start.tokenizer=bytes"
        )
    path = Path(asked or _source(config) or "")
    if not asked or path.is_dir():
        path = (_tokenizer_directory(config) or path) / "tokenizer.json"
    if not path.is_file():
        raise Refused(f"[start] there is no tokenizer {path}; give start.tokenizer, or a run that has one")
    return load_tokenizer(path)


def _source(config: PostTrainingConfig) -> Path | None:
    """Returns the directory of what the run begins with: a run's, or one of Hugging Face files."""
    of_model = None if config.model is None else config.model.from_
    found = config.start.run or of_model
    return None if found is None else Path(found)


def _tokenizer_directory(config: PostTrainingConfig) -> Path | None:
    """Returns the directory of the tokenizer's files; None for bytes."""
    asked = config.start.tokenizer
    if asked == "bytes":
        return None
    path = Path(asked or _source(config) or "")
    return path if path.is_dir() else path.parent


def _chat(config: PostTrainingConfig, tokenizer: Tokenizer, kept: Path | None) -> Chat:
    """Makes the chat by the template that the config names, else that of the starting run or the tokenizer's files."""
    if kept is not None and (chat := saved_chat(kept, tokenizer)):
        return chat
    section = next(found for name in KINDS if (found := getattr(config, name, None)) is not None)
    places = [place for place in (_source(config), _tokenizer_directory(config)) if place is not None]
    known = next((chat for place in places if (chat := saved_chat(place, tokenizer))), None)
    asked, stops = section.template, config.start.stop_tokens
    if asked is None and known is not None:
        return known if stops is None else make_chat(tokenizer, known.template, stops, known.variables)
    if asked is None:
        asked = "none" if isinstance(config, RLConfig) else "chatml"
    template = asked if asked in BUILT_IN else _read_template(Path(asked))
    if known is None:
        return make_chat(tokenizer, template, stops)
    return make_chat(tokenizer, template, stops, known.variables, known.stop_tokens)


def _read_template(path: Path) -> str:
    if not path.is_file():
        raise Refused(f"[start] there is no chat template {path}; use one of {', '.join(BUILT_IN)}")
    return read_template(path)
