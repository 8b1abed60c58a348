"""Defines the options that a call of forward and backward and a config file have in common, each in one place.

`jaxfb.forward_backward.options.EngineOptions` and the config's sections `precision` and `parallel` inherit these
classes, so that an option has one name, type, default, description and check in Python and in YAML, where None is null.
Plain Python: configs are read without JAX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, get_args

from jaxfb.parts import HEADS
from jaxfb.recomputation import AHEAD, Gather, Half, Remat, checked_gather, checked_remat
from jaxfb.refusal import boolean, choice

Float = Literal["float32", "bfloat16", "float16", "float64"]
Normalization = Literal["global", "microbatch", "none"]
NORMALIZATIONS = get_args(Normalization)
OptimizerSharding = Literal["none", "data", "gradients"]
OPTIMIZER_SHARDINGS = get_args(OptimizerSharding)


@dataclass(frozen=True)
class PrecisionOptions:
    """Dtypes of forward and backward, by name; a program may also give them as `jnp.bfloat16`.

    compute_dtype: params are cast to it once a call, before the microbatch loop; None leaves them.
    accum_dtype: dtype of the gradient sum; None is float32, or float64 for float64 params.
    reduce_dtype: dtype in which each microbatch's gradients are sent and summed over fsdp, expert and context under
      fsdp_gather="layer", and over data under optimizer_sharding="gradients", before they are added to the sum over
      microbatches; None is accum_dtype. "bfloat16" sends half the bytes of float32, and rounds each device's part
      and their sum. Reductions after the last microbatch are in accum_dtype.
    """

    compute_dtype: Float | None = None
    accum_dtype: Float | None = None
    reduce_dtype: Float | None = None


@dataclass(frozen=True)
class LayoutOptions:
    """Settings of how the work is laid out on the devices, never of what is computed. The last two are for pipelines.

    remat: what a layer of a `Pipelined` computes again in its backward. "none"; "selective" is all but products of
      matrices. "layer" keeps the layer's input and computes it again, "offload" keeps the input in the host's memory;
      "halves" keeps the input of the MLP or the experts too, so that a backward with experts computes attention again
      while it sends rows to them (as "layer" for models without `Pipelined.halves`, and on pieces);
      "full" is as "layer", but under a pipeline keeps a stage's input alone and computes its forward twice more: least
      memory without the host, most time. "selective*8+layer" is "selective" in the first eight layers (periods, of a
      pattern) of each stage and "layer" in the rest.
    fsdp_gather: when parameters are gathered, which are stored in shards over fsdp, expert and context. "layer" gathers
      them where they are used, in every microbatch (ZeRO-3): a layer at a time for a `Pipelined`, all for a plain
      loss function. "step" gathers all once a call, in training an update, so that the number of gathers does not
      depend on the number of microbatches. A number: of the first so many layers of each stage, parameters are
      gathered once a call and stay; the others, and all gradients, are as with "layer".
    gather_ahead: under fsdp_gather="layer", gathers a `Pipelined`'s layer while the layer before it computes, and
      scatters its gradients while the next one's are computed; takes the memory of one more layer and its
      gradients. "half" does so for the parameters of attention alone; those of the MLP or the experts are gathered
      while attention is computed, and their gradients scattered while attention's are. That takes less memory, and
      with fsdp alone more time. None: on GPUs and TPUs except v5e, whose compiler does as well by itself; "half" on
      TPUs with a tensor or context axis. Not with optimizer_sharding="gradients".
    overlap_grad_reduce: sums a `Pipelined`'s gradients over the devices, a layer at a time, while the last microbatch's
      backward, in a pipeline that of the last tick, computes those of the layer before; takes two layers' gradients in
      float32 and a larger program. None: on GPUs and TPUs, but in a pipeline only on TPUs except v5e, where something
      is left to sum after the last microbatch, over data or under fsdp_gather="step". Not with
      optimizer_sharding="gradients", pieces, or schedules that compute by device (dualpipe_v, v_half, v_min, zb_v).
    compiler_options: name -> value of options of XLA that change those chosen by the kind of device
      (`jaxfb/platforms/compiler.py`); None in place of a value leaves the compiler its default. They have no effect
      inside the caller's own `jax.jit`, which takes such options itself.
    head_placement: where a pipeline computes head and loss: "vocabulary" (each stage its share, for models
      that offer it), "rows" (each stage its share of the microbatch's rows: for heads whose terms are sums
      over rows, and rows that pipe divides) or "last" (every device spends the time of the whole head in a
      tick, the last stage's answer counts). None: "vocabulary" where it is possible, else "last".
    layers_per_stage: number of layers (periods, of a pattern) of each of the pipe * chunks stages, where they do not
      divide evenly. Every device then spends the time of the longest stage, and holds all layers' parameters unless
      they are stored in the order of the pipeline.
    """

    SECTION: ClassVar[str] = ""
    """What an error begins with, such as "[parallel]"."""

    remat: Remat | str = "none"
    fsdp_gather: Gather | int = "layer"
    gather_ahead: bool | Half | None = None
    overlap_grad_reduce: bool | None = None
    compiler_options: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    head_placement: Annotated[str, HEADS] | None = None
    layers_per_stage: tuple[int, ...] | None = None

    def __post_init__(self):
        object.__setattr__(self, "remat", checked_remat(self.remat, self.SECTION))
        object.__setattr__(self, "fsdp_gather", checked_gather(self.fsdp_gather, self.SECTION))
        if self.gather_ahead is not None:
            choice("gather_ahead", self.gather_ahead, AHEAD, who=self.SECTION)
        if self.overlap_grad_reduce is not None:
            boolean("overlap_grad_reduce", self.overlap_grad_reduce, who=self.SECTION)
