"""Runs a schedule whose items are pieces of sequences: the pipeline's ticks with caches of keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.piece_stage import Cache, PieceInputs, PieceSlot, PieceStage
from jaxfb.forward_backward.layers.slot import Slot
from jaxfb.forward_backward.layers.target import Target
from jaxfb.forward_backward.pipeline.buffers import Buffers, Shapes
from jaxfb.forward_backward.pipeline.executor import Executor, Tick
from jaxfb.forward_backward.pipeline.pieces import check_outputs, check_terms, piece_of, whole_records
from jaxfb.types import LossOutput, PyTree


@dataclass(frozen=True)
class PieceExecutor(Executor):
    """An `Executor` of a program with several pieces, and a `PieceStage`."""

    @property
    def tick(self) -> type[Tick]:
        """Returns what runs a tick."""
        return _PieceTick

    def _output(self, buffers: Buffers) -> LossOutput:
        return whole_records(super()._output(buffers), self.program.num_pieces)


class _PieceTick(Tick):
    """Runs one tick. The residual buffers are (what F keeps, caches), those between B and W are caches of gradients."""

    _stage: PieceStage

    def _traced(self) -> Shapes:
        shapes = super()._traced()
        out = jax.eval_shape(self._head.loss, self._weights.outer, shapes.hidden, shapes.inputs)
        check_outputs(out.outputs, shapes.inputs.microbatch)
        if not self._head.cuts_vocabulary:  # whose own head computes with a share of the kernel
            given = jax.tree.map(lambda leaf: jax.typeof(leaf), self._weights.outer)
            check_terms(
                self._head.model.head, given, shapes.hidden, tuple(shapes.inputs), self._program.num_pieces
            )
        return shapes

    def _output_of_layers(self, layers, hidden, inputs) -> LossOutput:
        return LossOutput({})

    def _inputs(self, microbatch: jax.Array) -> StageInputs:
        """Returns what embedding and head are given: the tokens of the piece."""
        whole, number = self._whole(microbatch)
        return whole._replace(microbatch=piece_of(whole.microbatch, number, self._program.num_pieces))

    def _stage_inputs(self, microbatch: jax.Array) -> PieceInputs:
        whole, number = self._whole(microbatch)
        return PieceInputs(*self._inputs(microbatch), whole.microbatch, number)

    def _seed(self, microbatch, terms) -> dict:
        return super()._seed(self._divided(microbatch)[0], terms)

    def _whole(self, item: jax.Array) -> tuple[StageInputs, jax.Array]:
        microbatch, number = self._divided(item)
        return super()._inputs(microbatch), number

    def _divided(self, item: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (microbatch, piece) of an item of the schedule."""
        pieces = self._program.num_pieces
        return lax.div(item, item.dtype.type(pieces)), lax.rem(item, item.dtype.type(pieces))

    def _stage_forward(self, row, layers: Layers, before, inputs, residual):
        kept, caches = residual
        cache = Cache(Slot(caches, row["f_cache"]), row["f_valid"] == 1)
        slot = PieceSlot(self._slot(kept, row, "f_residual"), cache)
        hidden, out, slot = self._stage.forward_of_piece(layers, before, inputs, slot)
        kept = kept if slot.kept is None else slot.kept.buffers
        return hidden, out, (kept, slot.cache.slot.buffers)

    def _stage_backward(self, row, residual, seeds, inputs, saved, sums, cotangent):
        kept, caches = residual
        valid, chunk = row["b_valid"] == 1, row["b_chunk"]
        slot = PieceSlot(Slot(kept, row["b_residual"]), Cache(Slot(caches, row["b_cache"]), valid))
        gradients = Cache(Slot(saved, row["b_cache"]), valid)
        sums, before, gradients = self._stage.backward_of_piece(
            self._layers(chunk), slot, cotangent, seeds, inputs, gradients, Target(sums, chunk, valid)
        )
        return gradients.slot.buffers, sums, before

    def _empty_kept(self) -> tuple[PyTree, PyTree]:
        program, shapes = self._program, self._shapes
        inputs = jax.eval_shape(lambda: self._stage_inputs(jnp.int32(0)))
        kept, caches, gradients = self._stage.empty_slots(
            shapes.layers, shapes.hidden, inputs, program.allocated("residual"), program.allocated("cache")
        )
        return (kept, caches), gradients
