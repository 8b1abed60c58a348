"""Defines the options of forward and backward, which check themselves where they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypedDict

from jax.sharding import Mesh

from jaxfb import schedules
from jaxfb.forward_backward.arguments import check_reduce_dtype, float_dtype, layer_counts
from jaxfb.forward_backward.head_placement import check_placement
from jaxfb.forward_backward.weights import NORMALIZATIONS
from jaxfb.mesh import axis_size
from jaxfb.platforms.compiler import checked_options
from jaxfb.recomputation import checked_gather, checked_remat, remat_parts
from jaxfb.refusal import Refused, boolean, choice, function, shown
from jaxfb.schedules.by_device import check_by_device
from jaxfb.trainable import checked_patterns

PyTree = Any
OPTIMIZER_SHARDINGS = ("none", "data", "gradients")
LAYER_ORDERS = ("model", "pipeline")


class EngineKeywords(TypedDict, total=False):
    """The keywords of `get_forward_backward_func`, for editors and type checkers where a function passes them on."""

    schedule: str | schedules.Schedule | None
    num_chunks: int
    num_pieces: int
    normalize: str
    accum_dtype: Any
    reduce_dtype: Any
    compute_dtype: Any
    remat: str | None
    fsdp_gather: str | int
    gather_ahead: bool | None
    optimizer_sharding: str
    param_specs: Callable[[PyTree], PyTree] | None
    head_placement: str | None
    layers_per_stage: Sequence[int] | None
    trainable: Sequence[str] | None
    compiler_options: Mapping[str, Any] | None
    poison_bubbles: bool


@dataclass(frozen=True)
class EngineOptions:
    """Holds the keyword arguments of `get_forward_backward_func`, where each is described.

    Raises:
      ValueError: a value is not among the legal ones.
    """

    schedule: str | schedules.Schedule | None = None
    num_chunks: int = 1
    num_pieces: int = 1
    normalize: str = "global"
    accum_dtype: Any = None
    reduce_dtype: Any = None
    compute_dtype: Any = None
    remat: str | None = None
    fsdp_gather: str | int = "layer"
    gather_ahead: bool | None = None
    optimizer_sharding: str | None = "none"
    param_specs: Callable[[PyTree], PyTree] | None = None
    head_placement: str | None = None
    layers_per_stage: tuple[int, ...] | None = None
    layer_order: str = "model"
    trainable: tuple[str, ...] | None = None
    compiler_options: Any = None
    poison_bubbles: bool = False

    def __post_init__(self):
        chunks = self.num_chunks
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise Refused(f"num_chunks must be a positive int, got {shown(chunks)}; 1 is one stage a device")
        pieces = self.num_pieces
        if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
            raise Refused(f"num_pieces must be a positive int, got {shown(pieces)}; 1 leaves sequences whole")
        if isinstance(self.schedule, schedules.Schedule):
            self.schedule.validate()
        elif self.schedule is not None:
            schedules.check_name(self.schedule)
        if self.param_specs is not None:
            function("param_specs", self.param_specs, "from params to PartitionSpecs")
        if self.head_placement is not None:
            check_placement(self.head_placement)
        checked = {
            "normalize": choice("normalize", self.normalize, NORMALIZATIONS),
            "accum_dtype": float_dtype("accum_dtype", self.accum_dtype),
            "reduce_dtype": float_dtype("reduce_dtype", self.reduce_dtype),
            "compute_dtype": float_dtype("compute_dtype", self.compute_dtype),
            "remat": checked_remat("none" if self.remat is None else self.remat),
            "fsdp_gather": checked_gather(self.fsdp_gather),
            "gather_ahead": None if self.gather_ahead is None else boolean("gather_ahead", self.gather_ahead),
            "optimizer_sharding": choice(
                "optimizer_sharding",
                "none" if self.optimizer_sharding is None else self.optimizer_sharding,
                OPTIMIZER_SHARDINGS,
            ),
            "layers_per_stage": layer_counts(self.layers_per_stage),
            "layer_order": choice("layer_order", self.layer_order, LAYER_ORDERS),
            "trainable": checked_patterns(self.trainable),
            "compiler_options": checked_options(self.compiler_options),
            "poison_bubbles": boolean("poison_bubbles", self.poison_bubbles),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.accum_dtype is not None:
            check_reduce_dtype(self.reduce_dtype, self.accum_dtype)

    @property
    def even(self) -> bool:
        """Returns whether all stages have as many layers."""
        return self.layers_per_stage is None or len(set(self.layers_per_stage)) == 1

    @property
    def cuts_layers(self) -> bool:
        """Returns whether a device of a pipeline holds its own layers alone."""
        return self.even or self.layer_order == "pipeline"

    def check_mesh(self, mesh: Mesh) -> None:
        """Raises ValueError for options that this mesh cannot have."""
        pipe = axis_size(mesh, "pipe")
        if self.optimizer_sharding == "gradients" and isinstance(self.fsdp_gather, int):
            raise Refused(
                f'optimizer_sharding="gradients" gathers all layers alike, got fsdp_gather={self.fsdp_gather}; use '
                'fsdp_gather="layer"',
                [{"fsdp_gather": "layer"}],
            )
        if pipe == 1:
            self._check_no_pipeline()
        elif self.optimizer_sharding == "gradients":
            raise Refused('optimizer_sharding="gradients" needs a mesh with pipe=1; in a pipeline use "data"')
        else:
            schedule = self.schedule_for(pipe, getattr(self.schedule, "num_microbatches", 1))
            if schedule is not None and schedule.by_device:
                check_by_device(schedule.name, mesh.shape, self.fsdp_gather)
            if schedule.num_pieces > 1 and (context := axis_size(mesh, "context")) > 1:
                raise Refused(
                    f"num_pieces={schedule.num_pieces} runs a sequence piece by piece on one device, context={context} "
                    "cuts it over several; use num_pieces=1, or a mesh with context=1",
                    [{"num_pieces": 1, "schedule": None}, {"context": 1}],
                )
            if schedule.num_pieces > 1 and isinstance(self.fsdp_gather, int):
                raise Refused(
                    f"num_pieces={schedule.num_pieces} gathers all layers alike, got fsdp_gather={self.fsdp_gather}; "
                    'use fsdp_gather="layer"',
                    [{"fsdp_gather": "layer"}],
                )
            if schedule.num_pieces > 1 and len(parts := remat_parts(self.remat or "none")) > 1:
                raise Refused(
                    f"num_pieces={schedule.num_pieces} needs one remat for all layers, got {self.remat!r}; use "
                    f"{parts[-1][0]!r}",
                    [{"remat": parts[-1][0]}],
                )

    def schedule_for(self, pipe: int, num_microbatches: int) -> schedules.Schedule:
        """Returns the schedule of a pipeline that a plan with so many microbatches runs under."""
        if isinstance(self.schedule, schedules.Schedule):
            return _check_schedule(self.schedule, pipe, num_microbatches, self.num_pieces)
        name = (
            schedules.default_name(self.num_chunks, self.num_pieces)
            if self.schedule is None
            else self.schedule
        )
        return _make_schedule(name, pipe, num_microbatches, self.num_chunks, self.num_pieces)

    def _check_no_pipeline(self) -> None:
        given = {
            "schedule": self.schedule,
            "num_chunks": self.num_chunks if self.num_chunks > 1 else None,
            "num_pieces": self.num_pieces if self.num_pieces > 1 else None,
            "head_placement": self.head_placement,
            "layers_per_stage": self.layers_per_stage,
        }
        found = {name: value for name, value in given.items() if value is not None}
        if found:
            names = " and ".join(f"{name}={shown(value)}" for name, value in found.items())
            raise Refused(
                f"{names} belong to a pipeline: they need a mesh with pipe > 1, this one has pipe=1; "
                "make the mesh with pipe=2 or more, or leave them out",
                [{name: 1 if name in ("num_chunks", "num_pieces") else None for name in found}],
            )


@lru_cache(maxsize=64)
def _make_schedule(name: str, *sizes: int) -> schedules.Schedule:
    return schedules.make(name, *sizes)


def _check_schedule(
    schedule: schedules.Schedule, pipe: int, num_microbatches: int, num_pieces: int
) -> schedules.Schedule:
    if num_pieces not in (1, schedule.num_pieces):
        raise Refused(
            f"schedule {schedule.name!r} has num_pieces={schedule.num_pieces}, the call has {num_pieces}; leave the "
            "latter out",
            [{"num_pieces": 1}],
        )
    if (schedule.num_stages, schedule.num_microbatches) != (pipe, num_microbatches):
        raise Refused(
            f"schedule {schedule.name!r} is for pipe={schedule.num_stages} and {schedule.num_microbatches} "
            f"microbatches, the call has pipe={pipe} and {num_microbatches}; make it for these"
        )
    return schedule
