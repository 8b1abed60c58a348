"""Turns a config of post-training into what can be sized: its update, as if of pretraining, and what is beside it.

The update of `jaxfb sft`, `dpo` and `rl` is that of the same model on rows of the same length; only the loss differs,
by a few numbers a token. A reference and a critic stay in memory during the updates; sampling, forward passes and the
critic's update come after one another, when the update's gradients and activations are not there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.batch_plan.budget import context_sizes, share_of
from jaxfb.batch_plan.plan import UPDATES, BatchPlan
from jaxfb.config import Config
from jaxfb.config.post_training import CutConfig, DPOConfig, PostTrainingConfig, RLConfig, SFTConfig
from jaxfb.config.sections import BatchConfig, LearningRateConfig, RunConfig
from jaxfb.data.config import DataConfig
from jaxfb.mesh import axis_size, mesh_sizes
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.generate import cache_of
from jaxfb.planner.formula.memory import forward_bytes
from jaxfb.planner.job import abstract_device, abstract_mesh
from jaxfb.planner.topology import Topology
from jaxfb.refusal import Refused
from jaxfb.rl.advice import planned as advised
from jaxfb.rl.policy import make_task, rollout_plan, row_slots
from jaxfb.rl.start import Base, check_run, kept_by_run, tokenizer_of
from jaxfb.rl.supervised import row_length, update_plans
from jaxfb.rl.tasks import check_task
from jaxfb.training.from_config.dtypes import compute_dtype, param_dtype
from jaxfb.training.from_config.sizes import POST_TRAINING, built_in, config_with_model, model_sizes

MANY = 10**6  # updates of a run whose length nobody asks for
_PROMPTS: dict[str, int] = {}
"""Tokens of the longest prompt, by the settings that it depends on: all problems are encoded to find it."""


@dataclass(frozen=True)
class Planned:
    """The parts of a run that are sized one by one. Bytes of one device.

    update:  the model's update. critic: that of the critic; None without one.
    phases:  what other phases than updates need at their peaks beside all that stays, by name.
    keeps_reference: whether a copy of the trained parameters stays in memory.
    widths:  where rows take context devices by their width, the update as if all rows were of one of them, by name.
    """

    update: Config
    critic: Config | None = None
    phases: dict[str, float] = field(default_factory=dict)
    keeps_reference: bool = False
    widths: dict[str, Config] = field(default_factory=dict)


def planned(config: PostTrainingConfig, topology: Topology) -> Planned:
    """Returns what a config of post-training needs on a topology.

    Raises:
      ValueError: the mesh does not fit the topology, a file that gives the size of the model is missing, or the command
        of the config would refuse its plans.
    """
    sized: Any = config  # its mesh is all that is read
    mesh: Any = abstract_mesh(sized, topology.num_devices, abstract_device(topology))
    kept = kept_by_run(config)
    if kept is None:
        check_run(config)
    tokenizer = tokenizer_of(config, kept)
    sizes = built_in(model_sizes(config, tokenizer.vocab_size), *POST_TRAINING)
    base = _Elsewhere(config, mesh, tokenizer, sizes, kept)
    length = _row_length(config, base)
    _check_plans(base, length)
    update = _as_pretraining(config, sizes, length, config.plans.train, topology)
    widths = dict(_by_width(config, update, topology))
    if not isinstance(config, RLConfig):
        phases = dict(_forward_passes(config, update, sizes, topology))
        return Planned(update, phases=phases, widths=widths)
    critic = None
    if config.critic and config.plans.critic:
        own = replace(
            config, lora=None, trainable=None, precision=replace(config.precision, frozen_dtype=None)
        )
        own_sizes = replace(sizes, tied_embeddings=True)  # `rl.critic` has no matrix of logits
        critic = _as_pretraining(own, own_sizes, length, config.plans.critic, topology)
    phases = {"sampling": _sampling_bytes(config, sizes, mesh, length)}
    phases |= dict(_forward_passes(config, update, sizes, topology))
    return Planned(update, critic, phases, config.uses_reference, widths)


class _Elsewhere(Base):
    """A model on devices that are not here."""

    def check_plan(self, plan: BatchPlan, length: int) -> None:
        """Checks nothing: this machine does not hold the rows."""


def _check_plans(base: Base[Any], length: int) -> None:
    """Refuses what the command refuses: a purpose without a plan, rows that cannot be cut."""
    config = base.config
    if isinstance(config, RLConfig):
        advised(base, lambda base: rollout_plan(base, length))
        return
    section = config.preferences if isinstance(config, DPOConfig) else config.conversations
    passes = ["logprob_ref"] * isinstance(config, DPOConfig)
    held_out = section.held_out_path is not None or section.held_out_fraction > 0
    update_plans(base, length, [*passes, *["eval"] * held_out])


def _by_width(config: PostTrainingConfig, update: Config, topology: Topology) -> Iterator[tuple[str, Config]]:
    """Yields (name, the update of full microbatches of one width), each on as few context devices as hold a row.

    Devices that the context axis leaves have other rows, and the same shards of the parameters: they count as fsdp.
    """
    cut, sizes = config.plans.train, mesh_sizes(vars(config.mesh), topology.num_devices, "none")
    if not cut.context_by_width:
        return
    replicas, devices = _replicas(config, topology), sizes["context"]
    budget = BatchPlan(
        "train",
        rows=_rows(config),
        data_parallel=replicas,
        sequence_length=update.data.sequence_length,
        max_tokens_per_microbatch=cut.max_tokens_per_microbatch,
        widths=cut.widths,
        packing=cut.packing,
        max_context=devices,
        remainder="error",
    )
    for width in budget.widths or ():
        context = context_sizes(budget, width)[0]
        mesh = replace(
            config.mesh, **sizes | {"context": context, "fsdp": sizes["fsdp"] * devices // context}
        )
        each = share_of(budget, context) // width
        at_once = each * replicas * devices // context
        batch = BatchConfig(-(-budget.rows // at_once) * at_once, rows_per_microbatch=each)
        name = f"rows of up to {width:,} tokens on {context} of {devices} context devices"
        yield name, replace(update, mesh=mesh, data=replace(update.data, sequence_length=width), batch=batch)


def _rows(config: PostTrainingConfig) -> int:
    """Returns the rows of an update."""
    if isinstance(config, RLConfig):
        return config.rollout.rows_per_update
    assert isinstance(config, SFTConfig | DPOConfig)
    return config.batch.rows


def _row_length(config: PostTrainingConfig, base: Base[Any]) -> int:
    if isinstance(config, SFTConfig):
        return row_length(base, "conversations", tokens=0)
    if isinstance(config, DPOConfig):
        return row_length(base, "preferences", tokens=0, sequences=2)
    assert isinstance(config, RLConfig)
    asked = repr((config.task, config.start, config.model))
    if asked not in _PROMPTS:
        _PROMPTS[asked] = max(map(len, check_task(make_task(config), base.chat)[1]))
    return row_slots(_PROMPTS[asked], config.rollout.max_new_tokens, base.mesh)


def _as_pretraining(
    config: PostTrainingConfig, sizes: TransformerConfig, length: int, cut: CutConfig, topology: Topology
) -> Config:
    model = replace(
        config_with_model(config).model, vocab_size=sizes.vocab_size, tied_embeddings=sizes.tied_embeddings
    )
    names = (
        "optimizer",
        "mesh",
        "schedule",
        "chunks",
        "lora",
        "trainable",
        "precision",
        "parallel",
        "plugins",
    )
    return Config(
        model=model,
        # of the text nothing but the length of a row matters; some file, since its vocabulary is known
        data=DataConfig("tokens", path="rows", tokenizer="tokenizer.json", sequence_length=length),
        batch=_batch(config, cut, length, topology),
        run=RunConfig(config.run.dir, updates=MANY),
        lr=LearningRateConfig(name="constant", warmup=0),
        **{name: getattr(config, name) for name in names},
    )


def _batch(config: PostTrainingConfig, cut: CutConfig, length: int, topology: Topology) -> BatchConfig:
    """Returns the rows of an update and their cut.

    A cut by tokens is sized by full microbatches of rows of the whole length, the last filled up as a run fills it.
    """
    rows = _rows(config)
    if cut.max_tokens_per_microbatch is None:
        sizes = {name: getattr(cut, name) for name in ("rows_per_microbatch", "num_microbatches")}
        return BatchConfig(rows, **sizes)
    replicas = _replicas(config, topology)
    each = -(-rows // replicas)
    full = max(1, min(each, cut.max_tokens_per_microbatch // length))
    return BatchConfig(-(-each // full) * full * replicas, rows_per_microbatch=full)


def _replicas(config: PostTrainingConfig, topology: Topology) -> int:
    sizes = mesh_sizes(vars(config.mesh), topology.num_devices, "none")
    return sizes["data"] * sizes["fsdp"] * sizes["expert"]


def _sampling_bytes(config: RLConfig, sizes: TransformerConfig, mesh: Any, length: int) -> float:
    """Counts the copy of the weights that samples, whole but for `tensor`, and the keys and values of its rows."""
    tensor = axis_size(mesh, "tensor")
    dtype = jnp.dtype(compute_dtype(config) or param_dtype(config))
    rows = -(-config.rollout.prompts * config.rollout.samples_per_prompt * tensor // mesh.size)
    cache = cache_of(sizes, rows, length, dtype)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    logits = 2 * 4 * rows * sizes.vocab_size
    return num_params(sizes) * dtype.itemsize / tensor + (kept + logits) / tensor


def _forward_passes(
    config: PostTrainingConfig, update: Config, sizes: TransformerConfig, topology: Topology
) -> Iterator[tuple[str, float]]:
    """Yields what forward passes over other cuts than the update's need."""
    mesh = replace(update.mesh, **mesh_sizes(vars(update.mesh), topology.num_devices, "none"))
    replicas = _replicas(config, topology)
    for purpose, cut in vars(config.plans).items():
        if cut is None or purpose in UPDATES:
            continue
        rows = _rows(config)
        if isinstance(config, RLConfig):
            rows = config.rollout.prompts * config.rollout.samples_per_prompt
        each = -(-rows // replicas)
        tokens = cut.max_tokens_per_microbatch
        by_number = -(-each // cut.num_microbatches) if cut.num_microbatches else each
        at_once = tokens // update.data.sequence_length if tokens else cut.rows_per_microbatch or by_number
        batch = replace(update.batch, rows_per_microbatch=max(1, at_once), num_microbatches=None)
        yield purpose, forward_bytes(replace(update, mesh=mesh, batch=batch), sizes, topology)


def check_searchable(config: Any) -> None:
    """Refuses a search for layouts of post-training, whose purposes each have a cut of their own."""
    if isinstance(config, PostTrainingConfig):
        raise Refused("[plan] --search tries layouts of `jaxfb train` alone; plan one layout after another")
