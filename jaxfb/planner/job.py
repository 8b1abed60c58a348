"""The training step of a config in shapes alone: what the trainer would run on a mesh, with nothing made.

Covers everything up to the one update, before there is a device or a text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.config import Config
from jaxfb.forward_backward import Microbatches, specs_of
from jaxfb.mesh import AXES, SHARD_AXES, mesh_sizes
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import transformer
from jaxfb.parallel.expert import check_expert_divides
from jaxfb.parallel.sharding import axes_of, shardings
from jaxfb.parallel.tensor import check_tensor_divides
from jaxfb.planner.topology import Topology
from jaxfb.refusal import Refused
from jaxfb.training.from_config.dtypes import with_float64
from jaxfb.training.from_config.optimizer import optimizer
from jaxfb.training.from_config.plans import run_plan, train_plan
from jaxfb.training.from_config.sizes import built_in, check_attention
from jaxfb.training.from_config.sizes import model_sizes as sizes_of
from jaxfb.training.setup import Setup
from jaxfb.update.train_state import TrainState
from jaxfb.update.train_step import TrainStep

PyTree = Any
LEAVES = {
    "tokens": "int32",
    "targets": "int32",
    "loss_mask": "float32",
    "segments": "int32",
    "positions": "int32",
}
MANY_ROWS = 10**9  # of a text that nobody has read: only a length in epochs looks at it


@dataclass(frozen=True)
class Job:
    """A config on a mesh (a `Mesh` or an `AbstractMesh`), abstract.

    state: TrainState of ShapeDtypeStructs with shardings. batch: Microbatches likewise.
    """

    config: Config
    mesh: Mesh | AbstractMesh
    sizes: TransformerConfig
    plan: BatchPlan
    step: TrainStep
    state: TrainState
    batch: Microbatches

    @property
    def tokens(self) -> int:
        """Returns the tokens of one update, all replicas together."""
        return self.plan.rows * self.config.data.sequence_length

    @property
    def schedule(self):
        """Returns the pipeline's schedule, or None."""
        return self.step.forward_backward.schedule_for(self.plan.num_microbatches)


def make_job(config: Config, mesh: Mesh | AbstractMesh, sizes: TransformerConfig | None = None) -> Job:
    """Builds the step as `jaxfb train` would.

    Raises:
      ValueError: what `jaxfb train` would refuse before it compiles.
    """
    with with_float64(config):
        return _made_job(config, mesh, sizes or model_sizes(config))


def _made_job(config: Config, mesh: Mesh | AbstractMesh, sizes: TransformerConfig) -> Job:
    on: Any = mesh  # sizes and names of its axes are all that is read of it
    check_tensor_divides(sizes, mesh.shape["tensor"])
    check_expert_divides(sizes, mesh.shape["expert"])
    check_attention(config, sizes, on)
    plan = train_plan(config, on)
    run = run_plan(config, {"train": plan}, MANY_ROWS)
    text: Any = None  # nothing reads it
    made = Setup(config, on, run, text, sizes, transformer(sizes), optimizer(config, run))
    step = made.train_step(plan)
    state = step.abstract_state(made.init_params)
    step.forward_backward.check(step.model, state.params, plan)
    return Job(config, mesh, sizes, plan, step, state, _batch(config, plan, mesh))


def model_sizes(config: Config) -> TransformerConfig:
    """Returns the transformer's sizes without its text; a tokenizer.json on another machine must give its
    vocabulary.
    """
    what, instead = "jaxfb plan", "compile its step with make_train_step(...).lower"
    model = built_in(config.model, what, instead)
    known = {"bpe": config.data.vocab_size, "bytes": 257}
    if model.vocab_size is None and config.data.tokenizer not in known:
        raise Refused(
            f"[plan] the vocabulary of {config.data.tokenizer} is not known without the file; "
            "add model.vocab_size=128256"
        )
    vocabulary = known.get(config.data.tokenizer, model.vocab_size or 0)
    return built_in(sizes_of(config, vocabulary), what, instead)


def abstract_mesh(config: Config, num_devices: int, device: AbstractDevice | None) -> AbstractMesh:
    """Returns the config's mesh on so many devices that do not exist, of that kind.

    Raises:
      ValueError: the sizes do not form that number.
    """
    sizes = mesh_sizes(vars(config.mesh), num_devices, "none")
    types = (AxisType.Auto,) * len(AXES)
    return AbstractMesh(tuple(sizes.values()), AXES, axis_types=types, abstract_device=device)


def abstract_device(topology: Topology) -> AbstractDevice:
    """Returns what a step traced for this topology takes itself to run on: attention, for one, depends on it."""
    kind = topology.chip.kind if topology.chip else ""
    return AbstractDevice(device_kind=kind or topology.platform, num_cores=None, platform=topology.platform)


def dense_bytes(shape: Sequence[int], itemsize: int) -> int:
    """Returns the bytes of an array without padding."""
    return math.prod(shape) * itemsize


def bytes_per_device(tree: PyTree, bytes_of: Callable[[Sequence[int], int], int] = dense_bytes) -> int:
    """Returns the bytes of a tree of ShapeDtypeStructs with NamedShardings, on the device that has most.

    bytes_of: of an array of a shape and of items of a size, as the device holds it.
    """
    return sum(bytes_of(_shard_shape(leaf), _itemsize(leaf.dtype)) for leaf in jax.tree.leaves(tree))


def uncut_share(params: PyTree, mesh: Mesh | AbstractMesh) -> float:
    """Returns the share of the parameters' bytes that no axis of `SHARD_AXES` cuts; 0 where none is larger than 1."""
    axes = {axis for axis in SHARD_AXES if mesh.shape.get(axis, 1) > 1}
    if not axes:
        return 0.0
    sizes = [(leaf, dense_bytes(leaf.shape, leaf.dtype.itemsize)) for leaf in jax.tree.leaves(params)]
    whole = sum(size for leaf, size in sizes if not _axes_of(leaf) & axes)
    return whole / sum(size for _, size in sizes)


def _axes_of(leaf: jax.ShapeDtypeStruct) -> set[str]:
    return {axis for entry in leaf.sharding.spec for axis in axes_of(entry)}


def _shard_shape(leaf: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    spec, mesh = leaf.sharding.spec, leaf.sharding.mesh
    parts = [math.prod(mesh.shape[axis] for axis in axes_of(entry)) for entry in spec]
    return tuple(-(-size // part) for size, part in zip(leaf.shape, parts + [1] * leaf.ndim, strict=False))


def _itemsize(dtype) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize


def _batch(config: Config, plan: BatchPlan, mesh) -> Microbatches:
    shape = (plan.num_microbatches, plan.rows_per_global_microbatch, config.data.sequence_length)
    absent = {"segments"} if config.data.packing == "stream" else set()
    leaves = {name: jax.ShapeDtypeStruct(shape, LEAVES[name]) for name in LEAVES if name not in absent}
    places = shardings(specs_of(leaves, mesh), mesh)
    placed = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places[name])
        for name, leaf in leaves.items()
    }
    return Microbatches(placed)
