"""Reduces the layers' gradients over the devices while the last microbatch's backward runs (`overlap_grad_reduce`).

The one reduction of a call otherwise waits until all is computed, and nothing is left to run beside it. Here the last
microbatch is written out behind the loop over the others. Its backward adds what they have summed up to each layer's
gradients, and reduces these while it computes those of the layer before: still once, and in the same order. Megatron-LM
does so under the same name, in buckets. What is beside the layers is reduced after them. A pipeline reduces them in its
last tick (`last_tick.py`).

The price is a larger program, and on TPUs two layers' gradients in float32. Gradients whose shape the reduction does
not change are written over the sums of the other microbatches, and take no memory beside them: 8B on v6e:8x8, data 2 x
fsdp 32, takes 7.78 GB in place of 8.58 GB, and 7.77 GB if it reduces at the end. By the compilers of libtpu 0.0.48 and
jax-cuda13-pjrt 0.10.2, with fsdp_gather="step" but for the last row:

| at the end -> beside the last microbatch | s a step | memory, GB |
| --- | --- | --- |
| 8B, v5p:4x4x4, fsdp 64, remat=selective | 7.82 -> 7.75 | 64.6 -> 66.3 |
| 70B, v5p:8x8x8, fsdp 64 x tensor 8, remat=selective | 11.51 -> 11.33 | 62.9 -> 63.7 |
| 8B, 64 H100, fsdp 64, remat=full | 4.68 -> 4.50 | 58.1 -> 47.8 |
| 8B, 64 H100, data 8 x fsdp 8, fsdp_gather="layer" | 4.39 -> 4.30 | 50.0 -> 50.0 |

Where FSDP sums each microbatch's gradients into shards, little is left for a fast network: of the 9.7 s of 8B on
v5p:4x4x4 with data 8, fsdp 8 and ZeRO-1, 0.018 s, of which 0.001 s are exposed in place of 0.017 s, for 0.08 GB. The
larger program takes longer to compile: the first row 110 s in place of 103 s, this one 70 s in place of 51 s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.layers.mixed_stage import MixedStage
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.target import Target, only_chunk
from jaxfb.parallel.collectives import scatters_beside_products
from jaxfb.parallel.sharding import axes_of
from jaxfb.refusal import Refused
from jaxfb.trainable import like
from jaxfb.types import PyTree

Reduce = Callable[[PyTree], PyTree]


@dataclass(frozen=True)
class LastMicrobatch:
    """Runs the layers of a call's last microbatch.

    stage: as those of the other microbatches, with `reduce` behind its scatters.
    reduce: sums one layer's gradients over the devices.
    """

    stage: Stage | MixedStage
    reduce: Reduce

    def target(self, layers: PyTree, accum_dtypes: PyTree, before: PyTree | None) -> Target:
        """Returns as `reduced_target`. before: sums of the microbatches before the last; None: there are none."""

        def one(leaf: jax.Array, dtype: Any) -> jax.ShapeDtypeStruct | None:
            return None if dtype is None else jax.ShapeDtypeStruct(leaf.shape, dtype)

        return reduced_target(self.reduce, jax.tree.map(one, layers, accum_dtypes), before)


def reduced_target(reduce: Reduce, sums: PyTree, before: PyTree | None) -> Target:
    """Returns what the reduced gradients of all layers are written to, with the sums of the microbatches before.

    Args:
      reduce: sums one layer's gradients over the devices.
      sums: the shapes and dtypes of a device's sums, [l, ...].
      before: those sums themselves; None: there are none. Reduced gradients of the same shape are written over them, so
        that the memory of one sum is enough; the others are written to zeros.
    """
    number = jax.tree.leaves(sums)[0].shape[0]
    of_layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), sums)
    shapes = jax.eval_shape(reduce, of_layer)
    zeros = jax.tree.map(lambda leaf: jnp.zeros((number, *leaf.shape), leaf.dtype), shapes)
    if before is None:
        return only_chunk(zeros)
    fits = jax.tree.map(lambda zero, so_far: zero.shape == so_far.shape, zeros, before)
    written = jax.tree.map(lambda fit, zero, so_far: so_far if fit else zero, fits, zeros, before)
    apart = jax.tree.map(lambda fit, so_far: None if fit else so_far, fits, before)
    return only_chunk(written)._replace(before=only_chunk(apart).sums)


def reduce_layer(
    specs: PyTree, grad_specs: PyTree, reduce: Callable[[jax.Array, P, P], jax.Array], stacked: int = 0
) -> Reduce:
    """Returns a function that reduces the gradients of one layer, or of some of its leaves.

    specs: of one layer. grad_specs: of the stacked gradients; those that it cuts among the layers stay as they are.
    reduce: (gradient, spec, spec of the gradient) of one leaf.
    stacked: number of dims, which nothing cuts, in which gradients of several layers are stacked.
    """
    lead = (None,) * stacked

    def one(grad: jax.Array, spec: P, grad_spec: P) -> jax.Array:
        return grad if cuts_layers(grad_spec) else reduce(grad, P(*lead, *spec), P(*lead, *grad_spec[1:]))

    def reduce_all(grads: PyTree) -> PyTree:
        return jax.tree.map(one, grads, like(grads, specs), like(grads, grad_specs))

    return reduce_all


def cuts_layers(spec: P) -> bool:
    """Returns whether a spec of stacked leaves cuts the layers of a stage: their first dim, other than over pipe."""
    return len(spec) > 0 and bool({*axes_of(spec[0])} - {"pipe"})


Obstacle = tuple[str, dict[str, Any]]
"""What is needed to reduce gradients beside the last microbatch, with what to use, and the option to change."""


def overlaps(
    asked: bool | None, kind: str | None, obstacle: Obstacle | None, reduces: bool, pipelined: bool
) -> bool:
    """Returns whether gradients are reduced beside the last microbatch, on devices of a kind.

    Unless it is asked for it is left to GPUs and TPUs: simulated devices on a CPU run nothing beside anything. In a
    pipeline to TPUs but v5e: there nothing would be hidden, and for GPUs XLA copies all sums as well (Mixtral 8x22B on
    128 H100 takes 59.9 GB in place of 49.8 GB in the same time).
    reduces: whether the layers' gradients are summed over devices after the last microbatch at all.
    """
    if asked is not None:
        return asked
    pays = scatters_beside_products(kind) if pipelined else kind not in (None, "cpu")
    return pays and obstacle is None and reduces


def obstacle_to_overlap(schedule: str | None, sharding: str | None) -> Obstacle | None:
    """Returns the first obstacle of a `Pipelined` with these options, None where there is none.

    schedule: the name of one without `Program.ends_with_first_chunk`, None if there is no such pipeline.
    """
    if schedule is not None:
        needed = (
            "a schedule of whole sequences whose devices are in lockstep and end with their first chunk, such as "
            f'schedule="1f1b", got {schedule!r}; use None'
        )
        return needed, {"overlap_grad_reduce": None}
    if sharding == "gradients":
        needed = 'optimizer_sharding="none" or "data", got "gradients"; use "data"'
        return needed, {"optimizer_sharding": "data"}
    return None


def check_overlap(asked: bool | None, pipelined: bool, obstacle: Obstacle | None) -> None:
    """Raises ValueError where `overlap_grad_reduce` is asked for and cannot be."""
    if asked and not pipelined:
        needed = "a Pipelined model, and this one is a loss function; use None"
        obstacle = needed, {"overlap_grad_reduce": None}
    if asked and obstacle is not None:
        needed, change = obstacle
        raise Refused(f"overlap_grad_reduce=True needs {needed}", [change])
