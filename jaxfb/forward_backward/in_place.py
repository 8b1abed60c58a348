"""Forward and backward of a `Pipelined` model on one stage: each layer's gradients are added as soon as they exist.

Equals `accumulate` of the model as one loss function. Autodiff of that makes the gradients of all layers of a
microbatch before the first of them is added: one more array the size of the parameters, filled with zeros, written
and read again in every microbatch.

Measured on four layers of `configs/1b.yaml` with a vocabulary of 8192, fsdp 4, by the compiler of libtpu 0.0.48 for
v5e:2x2: temporaries of 2.87 GB in place of 3.25 GB, and 0.152 s of work in place of 0.165 s. On CPU, with 34.6 MB of
parameters in float32, temporaries of 85.8 MB in place of 119.4 MB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.forward_backward.accumulate import empty_sums, split_totals
from jaxfb.forward_backward.layers.handed import Handed
from jaxfb.forward_backward.layers.last_microbatch import LastMicrobatch
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.mixed_stage import MixedStage
from jaxfb.forward_backward.layers.slot import Slot
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.target import Target, only_chunk
from jaxfb.forward_backward.loss_function.loss import as_loss_output
from jaxfb.forward_backward.sequential import num_layers, with_layers
from jaxfb.platforms.compat import cut_down
from jaxfb.trainable import joined, like
from jaxfb.types import LossOutput, Pipelined, PyTree, outer_params


@dataclass(frozen=True)
class InPlace:
    """Runs all layers as one stage between the model's embedding and head.

    gather_outer: makes whole parameters beside the layers out of shards (FSDP), for the embedding and again for the
      head, so that they take no memory while the layers run; None where they are whole.
    keep_layers: makes whole parameters of the layers that stay gathered for the whole call, or None.
    last: runs the layers of the last microbatch, whose backward sums all their gradients over the devices; None: they
      stay this replica's.
    """

    model: Pipelined
    stage: Stage | MixedStage
    gather_outer: Callable[[PyTree], PyTree] | None
    keep_layers: Callable[[PyTree], PyTree] = lambda layers: None
    last: LastMicrobatch | None = None

    def takes(
        self, params: PyTree, microbatches: PyTree, keys: jax.Array | None, accum_dtypes: PyTree
    ) -> bool:
        """Returns whether there is something to add up in the layers, to gather ahead or to reduce, and every leaf of
        hidden has a cotangent (integers have none).
        """
        several = jax.tree.leaves(microbatches)[0].shape[0] > 1
        pays = several or self.stage.gathers_ahead or self.last is not None
        if not pays or not jax.tree.leaves(accum_dtypes["layers"]):
            return False
        hidden = self._hidden(params, _first(microbatches, keys))
        return all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(hidden))

    def run(
        self,
        params: PyTree,
        microbatches: PyTree,
        keys: jax.Array | None,
        seeds: dict,
        accum_dtypes: PyTree,
        so_far: PyTree | None = None,
    ) -> tuple[PyTree, LossOutput]:
        """Computes, as `accumulate`, gradients of this replica's rows and every microbatch's LossOutput.

        so_far: what they are added to; not with `last`.
        """
        each, kept = (microbatches, keys, seeds), self._empty(params, _first(microbatches, keys))
        if self.last is not None:
            return self._run_reduced(params, self.last, each, kept, accum_dtypes)
        start = empty_sums(params, accum_dtypes) if so_far is None else so_far
        (grads, _), out = self._loop(params, (start, kept), each)
        return grads, out

    def _loop(self, params: PyTree, start: tuple[PyTree, PyTree], each: tuple) -> tuple:
        """Runs (microbatch, keys, seeds) one after the other: ((sums of gradients, what layers kept), the records)."""
        layers = self._layers(params)

        def step(carry, xs):
            ((grads, kept), handed), (microbatch, row_keys, seed) = carry, xs
            target, inputs = only_chunk(grads["layers"]), StageInputs(microbatch, row_keys)
            given = outer_params(grads), target, kept, inputs, seed, handed
            return self._microbatch(params, layers, *given)

        first = self.stage.hand_to_first(layers, only_chunk(start[0]["layers"]))
        ((grads, kept), handed), out = lax.scan(step, (start, first), each)
        sums = self.stage.add_handed(only_chunk(grads["layers"]), handed)
        return (_with_sums(outer_params(grads), sums), kept), out

    def _run_reduced(self, params, last: LastMicrobatch, each: tuple, kept: PyTree, accum_dtypes: PyTree):
        """Runs the last microbatch behind the loop over the others."""
        outs, before = [], empty_sums(outer_params(params), outer_params(accum_dtypes))
        if jax.tree.leaves(each)[0].shape[0] > 1:
            start = empty_sums(params, accum_dtypes), kept
            (before, kept), out = self._loop(params, start, jax.tree.map(lambda leaf: leaf[:-1], each))
            outs.append(out)
        microbatch, row_keys, seed = jax.tree.map(lambda leaf: leaf[-1], each)
        target = last.target(params["layers"], accum_dtypes["layers"], before.get("layers"))
        given = target, kept, StageInputs(microbatch, row_keys), seed, None
        of_last = replace(self, stage=last.stage)
        ((grads, _), _), out = of_last._microbatch(params, self._layers(params), outer_params(before), *given)
        outs.append(jax.tree.map(lambda leaf: leaf[None], out))
        return grads, jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *outs)

    def _microbatch(
        self,
        params,
        layers: Layers,
        so_far,
        target: Target,
        kept,
        inputs: StageInputs,
        seeds,
        handed: Handed | None,
    ):
        """Returns (((gradients with this microbatch's added, what its layers kept), what they hand on), its records).

        so_far: the sums of the gradients beside the layers, to which this microbatch's are added; target: of theirs.
        """
        slot, outer = Slot(kept, jnp.int32(0)), outer_params(params)
        with jax.named_scope("forward"):
            embedded, embed_vjp = self._embed_vjp(so_far, *self._in_this_turn(outer, inputs))
            with jax.named_scope("layers"):
                given = layers, embedded, inputs, slot, handed
                hidden, of_layers, slot, handed = self.stage.forward(*given)
                assert slot is not None  # one was given
            outer, hidden = self._in_this_turn(outer, hidden)
            totals, head_vjp, out = self._head_vjp(so_far, outer, hidden, inputs)
        with jax.named_scope("backward"):
            of_head, cotangent = head_vjp(_seeded(totals, seeds))
            so_far, cotangent = self._in_this_turn(self._added(so_far, of_head), cotangent)
            of_terms = _seeded(split_totals(of_layers)[0], seeds)
            with jax.named_scope("layers"):
                given = layers, slot, cotangent, of_terms, inputs, target, handed
                sums, cotangent, handed = self.stage.backward(*given)
            so_far = self._added(so_far, *embed_vjp(cotangent))
        # Else XLA removes the chunk's dim from the sums before the last layer's gradients are added to them, and has
        # to copy all sums for it: 0.5 GB in each microbatch of 70B on v5p:8x8x8 (libtpu 0.0.48).
        (sums,) = self._in_this_turn(sums)
        grads = _with_sums(so_far, sums)
        return ((grads, slot.buffers), handed), with_layers(out, of_layers)

    def _embed_vjp(self, so_far: PyTree, outer: PyTree, inputs: StageInputs):
        """Returns (hidden, VJP to those shards beside the layers that the embedding reads and that are trained)."""

        def embed(trained):
            return self._embed(self._whole(joined(trained, outer)), inputs)

        return jax.vjp(embed, _read_by(embed, like(so_far, outer)))

    def _head_vjp(self, so_far: PyTree, outer: PyTree, hidden: PyTree, inputs: StageInputs):
        """Returns (totals of the terms, VJP to the head's likewise and to hidden, the records)."""

        def head(trained, hidden):
            return self._head(self._whole(joined(trained, outer)), hidden, inputs)

        read = _read_by(lambda trained: head(trained, hidden), like(so_far, outer))
        return jax.vjp(head, read, hidden, has_aux=True)

    def _in_this_turn(self, *arrays: PyTree) -> tuple:
        """Returns the same arrays; where parameters are gathered, all of them together, and in each turn of the loop.

        A compiler would otherwise gather parameters before the loop over microbatches, keep them whole through all of
        it, and leave gradients whole until the end of a turn.
        """
        return arrays if self.gather_outer is None else lax.optimization_barrier(arrays)

    def _added(self, so_far: PyTree, grads: PyTree) -> PyTree:
        """Adds the gradients that are there to the sums.

        The barrier keeps the compiler from taking the second step of a reduce-scatter out of the loop over
        microbatches: sums of what the first step gives are several times the shards.
        """
        (grads,) = self._in_this_turn(grads)
        with jax.named_scope("accumulate"):
            return jax.tree.map(
                lambda leaf, grad: leaf if grad is None else leaf + grad.astype(leaf.dtype), so_far, grads
            )

    def _whole(self, outer: PyTree) -> PyTree:
        return outer if self.gather_outer is None else self.gather_outer(outer)

    def _embed(self, outer, inputs: StageInputs) -> PyTree:
        with jax.named_scope("embed"):
            return self.model.embed(outer, *inputs)

    def _head(self, outer, hidden, inputs: StageInputs) -> tuple[dict, LossOutput]:
        with jax.named_scope("head"):
            return split_totals(as_loss_output(self.model.head(outer, hidden, *inputs)))

    def _hidden(self, params, inputs: StageInputs) -> PyTree:
        """Returns shapes of what the layers are given."""
        return jax.eval_shape(lambda p, g: self._embed(self._whole(outer_params(p)), g), params, inputs)

    def _layers(self, params: PyTree) -> Layers:
        number = num_layers(params)
        whole = self.keep_layers(params["layers"])
        return Layers(params["layers"], jnp.arange(number), jnp.ones(number, bool), whole)

    def _empty(self, params, inputs: StageInputs) -> PyTree:
        """Returns zeros for what the layers keep of one microbatch, [1, l, ...]."""
        return self.stage.empty(jax.eval_shape(self._layers, params), self._hidden(params, inputs), inputs, 1)


def _with_sums(outer: PyTree, sums: PyTree) -> PyTree:
    """Returns gradients like params; sums: those of the layers, [1, l, ...]."""
    return outer | {"layers": jax.tree.map(lambda leaf: leaf[0], sums)}


def _read_by(function: Callable, trained: PyTree) -> PyTree:
    """Returns the leaves that a function of them reads, with None in place of the others."""
    leaves, structure = jax.tree.flatten(trained)
    program = jax.make_jaxpr(function)(trained)
    _, read = cut_down(program, [True] * len(program.jaxpr.outvars))
    return structure.unflatten([leaf if one else None for leaf, one in zip(leaves, read, strict=True)])


def _first(microbatches: PyTree, keys: jax.Array | None) -> StageInputs:
    """Returns shapes of one microbatch and its keys."""
    one = lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)  # noqa: E731
    return jax.tree.map(one, StageInputs(microbatches, keys))


def _seeded(totals: dict, seeds: dict) -> dict:
    return {name: seeds[name].astype(total.dtype) for name, total in totals.items()}
