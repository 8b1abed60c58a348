"""Bytes that a chip sends along each mesh axis in the rows of `real_sizes_tpu`, and by hand.

What is sent is the seconds of the collectives in the compiled program times the bytes a second that they were counted
with. By hand is what the layout needs, each library in its own way of doing it: see `BY_HAND`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import real_sizes_tpu
from real_sizes import Job, sizes

from jaxfb.config import Config
from jaxfb.mesh import mesh_sizes
from jaxfb.models.config import TransformerConfig
from jaxfb.planner import parse_topology
from jaxfb.planner.counts import (
    held_numbers,
    layers_here,
    mean_over_layers,
    num_microbatches,
    share_gathered,
    tokens_of_microbatch,
    turns_of_layers,
)

COMPUTE, MASTER = 2, 4
"""Bytes of a number: of weights and activations, of parameters and sums."""
ALIKE = (("jaxfb", "jaxfb_best"), ("jaxfb_rounded",), ("maxtext", "maxtext_best"))


@dataclass(frozen=True)
class Layout:
    """What is sent depends on this alone. config: of jaxfb, no size of its mesh left open. ours: or MaxText.

    cut: the axes over which parameters are cut, and gathered. in_turn: over one of them after the other, as jaxfb does
      where they are all axes of a slice.
    """

    config: Config
    sizes: TransformerConfig
    ours: bool
    cut: tuple[str, ...]
    in_turn: bool = False

    def size(self, axis: str) -> int:
        if axis == "fsdp":
            return math.prod(getattr(self.config.mesh, one) for one in self.cut)
        return getattr(self.config.mesh, axis)

    def share(self, axis: str) -> float:
        """The part of an array that goes around a ring of all devices of an axis."""
        return 1 - 1 / (self.config.mesh.fsdp if self.in_turn and axis == "fsdp" else self.size(axis))

    @property
    def layer_turns(self) -> float:
        """How many layers run on a device in a step, those that fill and drain a pipeline included."""
        turns = num_microbatches(self.config) * turns_of_layers(self.config)
        return turns * layers_here(self.config, self.sizes)

    @property
    def hidden(self) -> float:
        """Bytes of a microbatch's hidden states."""
        return COMPUTE * tokens_of_microbatch(self.config) * self.sizes.hidden_size

    @property
    def again(self) -> float:
        """How often a layer's forward runs again in the backward, in the mean: from a stage's input twice."""
        times = {"none": 0, "selective": 0, "full": 2 if self.config.mesh.pipe > 1 else 1}
        return mean_over_layers(self.config, self.sizes, lambda word: times.get(word, 1))


def fsdp(one: Layout) -> float:
    return one.share("fsdp") * gathered_and_scattered(one)


def gathered_and_scattered(one: Layout) -> float:
    """Layers gathered in the forward and in the backward, the rest once; gradients scattered, by jaxfb in the accum
    dtype or precision.reduce_dtype, by MaxText in the compute dtype. In every microbatch, or once a step what stays
    gathered. A stage that runs again from its input gathers once more.
    """
    layers, outer = held_numbers(one.config, one.sizes)
    turns = turns_of_layers(one.config)
    microbatches, rounded = num_microbatches(one.config), one.config.precision.reduce_dtype == "bfloat16"
    scattered = COMPUTE if rounded or not one.ours else MASTER
    stays = share_gathered(one.config, one.sizes) if one.ours else 0.0
    if one.ours and one.config.parallel.fsdp_gather == "step":
        return (COMPUTE + MASTER) * (layers + outer)
    gathered = COMPUTE * (2 + max(0, one.again - 1))
    of_layers = microbatches * turns * (gathered + scattered) * (1 - stays) + (COMPUTE + MASTER) * stays
    of_outer = microbatches * (COMPUTE + scattered)
    return of_layers * layers + of_outer * outer


def data(one: Layout) -> float:
    """Gradients reduced once a step: scattered and gathered again, as one sum or around the optimizer."""
    return one.share("data") * 2 * MASTER * sum(held_numbers(one.config, one.sizes)) / one.size("fsdp")


def tensor(one: Layout) -> float:
    """A layer's inputs of attention and of the MLP gathered, their results scattered: in the forward, where it runs
    again, and in the backward, there with the inputs gathered once more. Around embedding and head one of each, there
    and back.
    """
    of_layer = 4 * (1 + one.again) + 6
    around = 4 * num_microbatches(one.config)
    return one.share("tensor") * (of_layer * one.layer_turns + around) * one.hidden


def context(one: Layout) -> float:
    """Keys and values to all devices of the axis in the forward and where it runs again, in a ring in the backward too,
    and their gradients back; jaxfb's summed in float32, MaxText's gathered once for the backward. The gradients of
    what is not cut over the axis are reduced once a step. In turn, what fsdp has gathered or not scattered yet follows.
    """
    size, sizes_ = one.size("context"), one.sizes
    own = 2 * COMPUTE * tokens_of_microbatch(one.config) * sizes_.num_kv_heads * sizes_.head_size
    passes = 3 * (size - 1)
    if one.ours:
        ring = sizes_.context_attention == "ring"
        passes = (2 + one.again) * (size - 1) + 2 * size if ring else (3 + one.again) * (size - 1)
    weights = gathered_and_scattered(one) / one.config.mesh.fsdp if one.in_turn else 0.0
    reduced = 0.0 if "context" in one.cut else sum(held_numbers(one.config, sizes_)) / one.size("fsdp")
    return passes * own * one.layer_turns + one.share("context") * (2 * MASTER * reduced + weights)


def expert(one: Layout) -> float:
    """Each token to its experts and back: in the forward, where it runs again, and in the backward. What is no expert's
    is in shards along the axis too: in turn, what fsdp has gathered or not scattered yet follows.
    """
    exchanged = (4 + 2 * one.again) * one.hidden * one.sizes.experts_per_token * one.layer_turns
    share = _shared(one) / sum(held_numbers(one.config, one.sizes)) if one.in_turn else 0.0
    return one.share("expert") * (exchanged + share * gathered_and_scattered(one) / one.config.mesh.fsdp)


def _shared(one: Layout) -> float:
    """Parameters that are no expert's: of experts that are not cut a device has `size` times as many."""
    size, whole = one.size("expert"), replace(one.config, mesh=replace(one.config.mesh, expert=1))
    cut, all_of_them = (sum(held_numbers(config, one.sizes)) for config in (one.config, whole))
    return (size * cut - all_of_them) / (size - 1)


def pipe(one: Layout) -> float:
    """A stage's result to the next one and its gradient back, in every tick; around a head whose vocabulary is cut over
    the axis, hidden states to all of its devices and the sum of their gradients. MaxText cuts the head's rows instead:
    each goes from the last stage to one device, and its gradient back.
    """
    turns = turns_of_layers(one.config)
    cut = one.size("tensor") if one.sizes.sequence_parallel else 1
    handed_on = 2 * turns * one.config.chunks * one.hidden / cut
    # ours: the sum of the head's gradients in float32, and hidden states around it and the embedding
    around = (10 / one.size("tensor") if one.ours else 2 / cut) * one.share("pipe") * one.hidden
    return num_microbatches(one.config) * (handed_on + around)


BY_HAND = {"fsdp": fsdp, "data": data, "tensor": tensor, "context": context, "expert": expert, "pipe": pipe}
"""Bytes that a chip sends along an axis in a step."""


def beside_formula(name: str, sides: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Side -> axis -> gigabytes: of what differs in options of the compiler alone, the shorter step."""
    job, found = real_sizes_tpu.JOBS[name], {}
    for same in ALIKE:
        steps = {side: sides[side]["step_s"] for side in same if side in sides}
        if steps:
            side = min(steps, key=lambda one: steps[one])
            found[side] = of_program(job, side, sides[side]["traffic"])
    return found


def of_program(job: Job, side: str, traffic: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Axis -> what the compiled program sends along it, alone or with others, and what the layout needs."""
    sent = sent_by_axis(traffic, parse_topology(job.topology).chip.axis_bandwidth)
    cut = max((axes for axes in sent if "fsdp" in axes), key=lambda axes: sent[axes], default=("fsdp",))
    one = layout(job, side, cut)
    if one.ours and one.size("context") > 1:
        one = replace(one, cut=("fsdp", "context"), in_turn=cut == ("fsdp",))
    if one.ours and one.size("expert") > 1:
        one = replace(one, in_turn=("fsdp", "expert") not in sent)
    found = {}
    for axis in (axis for axis in BY_HAND if one.size(axis) > 1):
        along = sum(size for axes, size in sent.items() if axes[0] == axis)
        found[axis] = {"sent_gb": _gb(along), "by_hand_gb": _gb(BY_HAND[axis](one))}
    return found


def sent_by_axis(traffic: dict[str, Any], rate: float) -> Counter[tuple[str, ...]]:
    """Axes -> bytes. traffic: of a row, "fsdp+context all-gather" -> its seconds and more."""
    sent: Counter[tuple[str, ...]] = Counter()
    for name, one in traffic.items():
        axes = name.partition(" ")[0]
        if axes != "none":
            sent[tuple(axes.split("+"))] += one["s"] * rate
    return sent


def layout(job: Job, side: str, cut: tuple[str, ...]) -> Layout:
    config = real_sizes_tpu.config_of(job, side)
    mesh = mesh_sizes(vars(config.mesh), parse_topology(job.topology).num_devices, "none")
    config = replace(config, mesh=replace(config.mesh, **mesh))
    if side.startswith("maxtext"):  # its weights are always gathered; "minimal" keeps what "selective" does
        config = replace(config, parallel=replace(config.parallel, fsdp_gather="layer"))
    return Layout(config, sizes(config), side.startswith("jaxfb"), cut)


def _gb(size: float) -> float:
    return round(size / 1e9, 2)
