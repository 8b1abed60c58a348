"""Runs a stage whose layers differ in what they keep for their backward, or in whether their parameters stay
gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jaxfb.forward_backward.layers.handed import Handed
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.slot import Slot
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.target import Target
from jaxfb.forward_backward.sequential import joined_parts
from jaxfb.types import LossOutput, PyTree


class MixedStage:
    """Runs several `Stage`s, each over its part of the same layers, as one: the same methods.

    A slot has the buffers of each part, one after the other.
    """

    def __init__(self, parts: Sequence[Stage]):
        self._parts = tuple(parts)

    @property
    def gathers_ahead(self) -> bool:
        """Returns whether layers are gathered before their use."""
        return any(part.gathers_ahead for part in self._parts)

    def reducing(self, reduce: Callable[[PyTree], PyTree], before: Callable[[PyTree], PyTree]) -> MixedStage:
        """Returns as `Stage.reducing`."""
        return MixedStage([part.reducing(reduce, before) for part in self._parts])

    def forward(
        self,
        layers: Layers,
        hidden: PyTree,
        inputs: StageInputs,
        slot: Slot | None = None,
        handed: Handed | None = None,
    ) -> tuple[PyTree, LossOutput, Slot | None, None]:
        """Returns as `Stage.forward`; nothing is handed on."""
        outs, kept = [], []
        for part, own in zip(self._parts, self._slots(slot), strict=True):
            hidden, out, own, _ = part.forward(_of(part, layers), hidden, inputs, own)
            outs.append(out)
            kept.append(own)
        return hidden, joined_parts(outs), None if slot is None else _slot_of(kept), None

    def backward(
        self,
        layers: Layers,
        slot: Slot,
        cotangent: PyTree,
        seeds: dict,
        inputs: StageInputs,
        target: Target,
        handed: Handed | None = None,
    ) -> tuple[PyTree, PyTree, None]:
        """Returns as `Stage.backward`; nothing is handed on."""
        for part, own in self._backwards(slot):
            sums, cotangent, _ = part.backward(_of(part, layers), own, cotangent, seeds, inputs, target)
            target = target._replace(sums=sums)
        return target.sums, cotangent, None

    def hand_to_first(self, layers: Layers, target: Target) -> None:
        """Hands nothing on: another part's layers run before these run again."""

    def add_handed(self, target: Target, handed: Handed | None) -> PyTree:
        """Returns target.sums."""
        return target.sums

    def backward_input(
        self, layers: Layers, slot: Slot, cotangent: PyTree, seeds: dict, inputs: StageInputs, saved: Slot
    ) -> tuple[Slot, PyTree]:
        """Returns as `Stage.backward_input`."""
        made = []
        for (part, own), before in zip(self._backwards(slot), reversed(self._slots(saved)), strict=True):
            after, cotangent = part.backward_input(_of(part, layers), own, cotangent, seeds, inputs, before)
            made.append(after)
        return _slot_of(made[::-1]), cotangent

    def backward_weight(
        self, layers: Layers, slot: Slot, saved: Slot, seeds: dict, inputs: StageInputs, target: Target
    ) -> PyTree:
        """Returns as `Stage.backward_weight`."""
        for (part, own), waiting in zip(self._backwards(slot), reversed(self._slots(saved)), strict=True):
            sums = part.backward_weight(_of(part, layers), own, waiting, seeds, inputs, target)
            target = target._replace(sums=sums)
        return target.sums

    def empty(self, layers: Layers, hidden: PyTree, inputs: StageInputs, number: int) -> PyTree:
        """Returns as `Stage.empty`, of each part."""
        return tuple(part.empty(_of(part, layers), hidden, inputs, number) for part in self._parts)

    def saved(self, layers: Layers, hidden: PyTree, seeds: dict, inputs: StageInputs) -> PyTree:
        """Returns as `Stage.saved`, of each part."""
        return tuple(part.saved(_of(part, layers), hidden, seeds, inputs) for part in self._parts)

    def _slots(self, slot: Slot | None) -> list:
        if slot is None:
            return [None] * len(self._parts)
        return [slot._replace(buffers=buffers) for buffers in slot.buffers]

    def _backwards(self, slot: Slot) -> list[tuple[Stage, Slot]]:
        return [*zip(self._parts, self._slots(slot), strict=True)][::-1]


def _of(part: Stage, layers: Layers) -> Layers:
    """Returns the layers as a part takes them."""
    return layers._replace(params=layers.whole if part.takes_whole else layers.params, whole=None)


def _slot_of(parts: Sequence[Slot]) -> Slot:
    return parts[0]._replace(buffers=tuple(one.buffers for one in parts))
