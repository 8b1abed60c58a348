"""Defines the options of forward and backward, which check themselves where they are made."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import lru_cache
from typing import Any, TypedDict, TypeVar

from jax.sharding import Mesh

from jaxfb import schedules
from jaxfb.described import described_fields
from jaxfb.forward_backward.arguments import check_reduce_dtype, float_dtype, layer_counts
from jaxfb.forward_backward.head_placement import check_placement
from jaxfb.mesh import axis_size
from jaxfb.platforms.compiler import checked_options
from jaxfb.recomputation import Half, remat_parts
from jaxfb.refusal import Refused, boolean, check_keywords, choice, function, shown
from jaxfb.schedules.by_device import check_by_device
from jaxfb.shared_options import NORMALIZATIONS, OPTIMIZER_SHARDINGS, LayoutOptions, PrecisionOptions
from jaxfb.trainable import checked_patterns
from jaxfb.types import PyTree

Function = TypeVar("Function", bound=Callable)
LAYER_ORDERS = ("model", "pipeline")
OF_A_PIPELINE = ("schedule", "num_chunks", "num_pieces", "head_placement", "layers_per_stage")
"""The options that have a meaning in a pipeline alone."""
_made_once = lru_cache(maxsize=64)(schedules.make)


class EngineKeywords(TypedDict, total=False):
    """The options as keywords, for editors and type checkers; the function that takes them adds those that it names.

    A test holds it to the fields of `EngineOptions`.
    """

    num_chunks: int
    num_pieces: int
    normalize: str
    accum_dtype: Any
    reduce_dtype: Any
    compute_dtype: Any
    remat: str | None
    fsdp_gather: str | int
    gather_ahead: bool | Half | None
    overlap_grad_reduce: bool | None
    optimizer_sharding: str | None
    param_specs: Callable[[PyTree], PyTree] | None
    head_placement: str | None
    layers_per_stage: Sequence[int] | None
    trainable: Sequence[str] | None
    compiler_options: Mapping[str, Any] | None
    poison_bubbles: bool


class ScheduledKeywords(EngineKeywords, total=False):
    """The same with `schedule`, which `get_forward_backward_func` also takes by its position."""

    schedule: str | schedules.Schedule | None


@dataclass(frozen=True)
class EngineOptions(LayoutOptions, PrecisionOptions):
    """Holds the options of forward and backward and checks them; a config gives those of the two classes it inherits.

    schedule: with pipe > 1, "gpipe", "1f1b", "interleaved", "zero_bubble", "v_shape", "zb_v", "v_half",
      "v_min", "dualpipe_v", "seq1f1b", "seq_abreast", or your own `Schedule` for the plan's number of
      microbatches. None: "1f1b", "interleaved" if num_chunks > 1, or "seq1f1b" if num_pieces > 1.
    num_chunks: stages a device of the pipeline holds; the layers are cut into pipe * num_chunks stages.
    num_pieces: pieces that each sequence is cut into, which go through the pipeline one after the other; more than 1
      needs schedule="seq1f1b" (or None) or "seq_abreast", and a model with `layer_piece`.
    normalize: "global" divides each term by its weight over the whole global batch; "microbatch" is
      Megatron's mean over microbatches and replicas of total / weight; "none" sums.
    optimizer_sharding: "data" returns gradients cut over data as well, by one reduce-scatter (ZeRO-1).
      "gradients" cuts the sum over microbatches too, by a reduce-scatter in each (ZeRO-2); not in a pipeline.
    param_specs: params -> tree of PartitionSpec naming "tensor" only; default: the `Pipelined`'s own.
    layer_order: "model": parameters and gradients have their layers in the model's order; with several chunks, or a
      V, a call then moves layers between devices before its loops and gradients after them. "pipeline": they have
      them in the order of `ForwardBackward.layer_order`, in which nothing moves, and in which stages of uneven length
      are all stored as if they were as long as the longest. Metrics are in the model's order.
    trainable: patterns of dotted names such as "layers.attention.*" or "*.bias" (`*` also matches dots, and the
      name of a subtree selects everything below it). Parameters that none of them matches are frozen: they have no
      gradient (None in `grads`), and nothing is kept, summed or reduced for one. None trains every parameter.
    poison_bubbles: fills what a pipeline computes in its bubbles with NaN; for tests, it changes nothing.

    Raises:
      ValueError: a value is not among the legal ones.
    """

    schedule: str | schedules.Schedule | None = None
    num_chunks: int = 1
    num_pieces: int = 1
    normalize: str = "global"
    optimizer_sharding: str = "none"
    param_specs: Callable[[PyTree], PyTree] | None = None
    layer_order: str = "model"
    trainable: tuple[str, ...] | None = None
    compiler_options: Any = None  # given as a mapping, kept as pairs, which can be hashed
    poison_bubbles: bool = False

    def __post_init__(self):
        for name in ("remat", "optimizer_sharding"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, "none")
        super().__post_init__()
        self._check_pipeline()
        if self.param_specs is not None:
            function("param_specs", self.param_specs, "from params to PartitionSpecs")
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        if self.accum_dtype is not None:
            check_reduce_dtype(self.reduce_dtype, self.accum_dtype)

    def _check_pipeline(self) -> None:
        chunks, pieces = self.num_chunks, self.num_pieces
        if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
            raise Refused(
                f"num_chunks must be a positive integer, got {shown(chunks)}; 1 is one stage a device"
            )
        if isinstance(pieces, bool) or not isinstance(pieces, int) or pieces < 1:
            raise Refused(
                f"num_pieces must be a positive integer, got {shown(pieces)}; 1 leaves sequences whole"
            )
        if isinstance(self.schedule, schedules.Schedule):
            self.schedule.validate()
        elif self.schedule is not None:
            schedules.check_name(self.schedule)
        if self.head_placement is not None:
            check_placement(self.head_placement)

    def _checked(self) -> dict[str, Any]:
        """Returns the values as they are stored: dtypes by name, sequences as tuples, which can be hashed."""
        dtypes = [option.name for option in fields(PrecisionOptions)]
        return {
            **{name: float_dtype(name, getattr(self, name)) for name in dtypes},
            "normalize": choice("normalize", self.normalize, NORMALIZATIONS),
            "optimizer_sharding": choice("optimizer_sharding", self.optimizer_sharding, OPTIMIZER_SHARDINGS),
            "layers_per_stage": layer_counts(self.layers_per_stage),
            "layer_order": choice("layer_order", self.layer_order, LAYER_ORDERS),
            "trainable": checked_patterns(self.trainable),
            "compiler_options": checked_options(self.compiler_options),
            "poison_bubbles": boolean("poison_bubbles", self.poison_bubbles),
        }

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
            self._check_schedule_on(
                mesh, self.schedule_for(pipe, getattr(self.schedule, "num_microbatches", 1))
            )

    def _check_schedule_on(self, mesh: Mesh, schedule: schedules.Schedule) -> None:
        if schedule.by_device:
            check_by_device(schedule.name, mesh.shape, self.fsdp_gather)
        if schedule.num_pieces == 1:
            return
        if (context := axis_size(mesh, "context")) > 1:
            raise Refused(
                f"num_pieces={schedule.num_pieces} runs a sequence piece by piece on one device, but "
                f"context={context} cuts it over several; use num_pieces=1, or a mesh with context=1",
                [{"num_pieces": 1, "schedule": None}, {"context": 1}],
            )
        if isinstance(self.fsdp_gather, int):
            raise Refused(
                f"num_pieces={schedule.num_pieces} gathers all layers alike, got fsdp_gather={self.fsdp_gather}; "
                'use fsdp_gather="layer"',
                [{"fsdp_gather": "layer"}],
            )
        if len(parts := remat_parts(self.remat or "none")) > 1:
            raise Refused(
                f"num_pieces={schedule.num_pieces} needs one remat for all layers, got {self.remat!r}; use "
                f"{parts[-1][0]!r}",
                [{"remat": parts[-1][0]}],
            )

    def schedule_for(self, pipe: int, num_microbatches: int) -> schedules.Schedule:
        """Returns the schedule of a pipeline that a plan with so many microbatches runs under."""
        if isinstance(self.schedule, schedules.Schedule):
            return _check_schedule(self.schedule, pipe, num_microbatches, self)
        name = (
            schedules.default_name(self.num_chunks, self.num_pieces)
            if self.schedule is None
            else self.schedule
        )
        return _made_once(name, pipe, num_microbatches, self.num_chunks, self.num_pieces)

    def _check_no_pipeline(self) -> None:
        given = {name: getattr(self, name) for name in OF_A_PIPELINE}
        found = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
        if found:
            names = " and ".join(f"{name}={shown(value)}" for name, value in found.items())
            belong, them = ("belongs", "it") if len(found) == 1 else ("belong", "them")
            raise Refused(
                f"{names} {belong} to a pipeline, but the mesh has pipe=1; make the mesh with pipe=2 or more, or leave "
                f"{them} out",
                [{name: _DEFAULTS[name] for name in found}],
            )


_DEFAULTS = {
    option.name: {} if option.default is MISSING else option.default for option in fields(EngineOptions)
}


def with_options(function: Function) -> Function:
    """Adds the options to what `help` and `inspect` show of a function that takes them as keywords."""
    own = list(inspect.signature(function).parameters.values())[:-1]
    named = {parameter.name for parameter in own}
    keywords = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_DEFAULTS[option.name],
            annotation=option.type,
        )
        for option in fields(EngineOptions)
        if option.name not in named
    ]
    setattr(function, "__signature__", inspect.Signature([*own, *keywords]))  # noqa: B010
    function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\nOptions:\n{_described()}\n"
    return function


def check_names(function: str, options: Mapping[str, Any], further: Collection[str] = ()) -> None:
    """Raises TypeError, as Python does of a misspelt keyword, for what is not an option.

    further: names of the function's other arguments, of which one may be meant.
    """
    check_keywords(function, options, [*_DEFAULTS, *further])


def _described() -> str:
    return "\n".join(
        textwrap.fill(f"{name}: {text}", 116, initial_indent="  ", subsequent_indent="    ")
        for name, text in described_fields(EngineOptions).items()
    )


def _check_schedule(
    schedule: schedules.Schedule, pipe: int, num_microbatches: int, options: EngineOptions
) -> schedules.Schedule:
    for name in ("num_chunks", "num_pieces"):
        own, given = getattr(schedule, name), getattr(options, name)
        if given not in (1, own):
            raise Refused(
                f"schedule {schedule.name!r} has {name}={own}, but the option is {name}={given}; leave the option out",
                [{name: 1}],
            )
    if (schedule.num_stages, schedule.num_microbatches) != (pipe, num_microbatches):
        raise Refused(
            f"schedule {schedule.name!r} is for pipe={schedule.num_stages} and {schedule.num_microbatches} "
            f"microbatches, the call has pipe={pipe} and {num_microbatches}; make it for these"
        )
    return schedule
