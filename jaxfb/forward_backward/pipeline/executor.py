"""Forward and backward through a pipeline: one program that walks any schedule's ticks on every device.

A schedule's table becomes rows of integers (`jaxfb/schedules/program.py` has the format); each of its phases is one
`lax.scan` whose body runs just the kinds of that phase, on all devices, valid or not. Where the last tick reduces
gradients it stands alone, behind the loops (`last_tick.py`). What an invalid entry gives goes to a slot that nobody
reads and is masked out of every sum. Where the program is by device, the body branches instead: a device runs the
kinds that are valid for it. What it sends and receives is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.forward_backward.accumulate import added, empty_sums
from jaxfb.forward_backward.head_placement import HeadPlacement
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.mixed_stage import MixedStage
from jaxfb.forward_backward.layers.slot import Slot, SlotInRows, empty_slots, read_one
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.layers.target import Target
from jaxfb.forward_backward.pipeline.buffers import Buffers, Shapes, Weights, add, get, put
from jaxfb.forward_backward.pipeline.last_tick import LastTick
from jaxfb.forward_backward.reduce import masked
from jaxfb.forward_backward.sequential import with_layers
from jaxfb.parallel import pipe
from jaxfb.parallel.row_order import in_rows
from jaxfb.refusal import Refused
from jaxfb.schedules import Phase, Program
from jaxfb.types import LossOutput, PyTree


@dataclass(frozen=True)
class Executor:
    """Runs a program. `poison` fills bubbles with NaN: they must reach neither loss nor gradient.

    whole: parameters of the first layers of each chunk that stay gathered, [num_chunks, k, ...], or None.
    last: reduces the gradients of the layers over the devices in the last tick; None: they stay this device's.
    """

    program: Program
    stage: Stage | MixedStage
    head: HeadPlacement
    layout: pipe.Layout
    poison: bool = False
    whole: PyTree = None
    last: LastTick | None = None

    @property
    def tick(self) -> type[Tick]:
        """Returns what runs a tick."""
        return Tick

    def run(
        self,
        weights: Weights,
        microbatches: PyTree,
        keys: Any,
        seeds: dict | None,
        accum_dtypes: Weights | None,
        so_far: Weights | None = None,
    ) -> tuple[Weights | None, LossOutput]:
        """Computes gradients of this device's layers, its part of those of `outer`, and every microbatch's records.

        seeds, accum_dtypes: None for a program without a backward. so_far: a sum to add to; None: zeros.
        """
        tick = self.tick(self, weights, microbatches, keys, seeds)
        buffers = tick.empty_buffers(accum_dtypes)
        if so_far is not None:
            buffers = buffers._replace(grads=so_far)
        last, program = self.last, self.program
        for phase in program.phases if last is None else program.phases_before_last_tick:
            one, rows = self._of_phase(phase, tick)
            with jax.named_scope(f"phase_{phase.kinds}"):
                buffers = lax.scan(lambda b, row: (one(b, row), None), buffers, rows)[0]  # noqa: B023
        if last is not None:
            buffers = self._last_tick(last, tick, buffers)
        return buffers.grads, self._output(buffers)

    def _last_tick(self, last: LastTick, tick: Tick, buffers: Buffers) -> Buffers:
        """Runs the last tick; the gradients of the layers are reduced then."""
        sums = buffers.grads.layers
        phase = self.program.last_tick
        one, rows = self._of_phase(phase, tick.reducing(last))
        with jax.named_scope(f"phase_{phase.kinds}"):
            buffers = one(buffers, jax.tree.map(lambda row: row[0], rows))
        return buffers._replace(grads=buffers.grads._replace(layers=last.joined(sums, buffers.grads.layers)))

    def _of_phase(self, phase: Phase, tick: Tick) -> tuple[Callable[[Buffers, Any], Buffers], tuple]:
        """Returns what runs a tick of a phase, (buffers, row) -> buffers, and the rows of all its ticks."""
        rows = {name: np.asarray(row, np.int32) for name, row in self.program.phase_rows(phase).items()}
        own = {name: row for name, row in rows.items() if row.ndim == 2}
        shared = {name: row for name, row in rows.items() if row.ndim == 1}
        # one array for all rows of a device: an array each takes several operations each, out of the loop and in it
        mine = read_one(np.stack([*own.values()], 1), lax.axis_index("pipe"), 2)
        arrivals = self.program.arrivals(phase)
        events = {name: _when(rows[f"{name}_valid"]) for name in ("embed", "loss", "embed_gradient")}

        def run(b, row):
            row = row[0] | {name: row[1][place] for place, name in enumerate(own)}
            return tick(b, row, phase.kinds, arrivals, events)

        return run, (shared, mine)

    def _output(self, buffers: Buffers) -> LossOutput:
        """Returns the records as one LossOutput with [num_microbatches, ...] leaves, equal on all devices of the
        pipe.
        """
        records, layers = jax.tree.map(lambda leaf: leaf[:-1], (buffers.records, buffers.layer_records))
        return self.head.whole(with_layers(records, layers))


class Tick:
    """Runs one tick: store what arrived, F, loss, B, W."""

    def __init__(
        self, executor: Executor, weights: Weights, microbatches: PyTree, keys: Any, seeds: dict | None
    ):
        self._program, self._stage, self._head = executor.program, executor.stage, executor.head
        self._layout, self._whole_layers = executor.layout, executor.whole
        self._weights, self._microbatches, self._keys, self._seeds = weights, microbatches, keys, seeds
        me = lax.axis_index("pipe")
        self._index, self._real = (
            read_one(np.asarray(table), me) for table in (self._layout.index, self._layout.real)
        )
        self._poison, self._shapes = executor.poison, self._traced()
        self._keeps_order = self._layout.num_chunks > 1 and self._program.num_pieces == 1
        self._target: Callable[[PyTree, jax.Array, jax.Array], Target] = Target

    def reducing(self, last: LastTick) -> Tick:
        """Returns what runs the last tick where it reduces gradients."""
        tick = copy(self)
        tick._stage, tick._target = last.stage(self._stage), last.target
        return tick

    def _traced(self) -> Shapes:
        """Returns what a stage reads and writes, in shapes."""
        zero = jnp.int32(0)
        inputs, layers = jax.eval_shape(lambda: (self._inputs(zero), self._layers(zero)))
        hidden = _check_float(jax.eval_shape(self._head.embed, self._weights.outer, inputs))
        return Shapes(inputs, layers, hidden, self._output_of_layers(layers, hidden, inputs))

    def _output_of_layers(self, layers: Layers, hidden: PyTree, inputs: StageInputs) -> LossOutput:
        """Returns shapes of the terms and metrics of a stage's layers."""
        return jax.eval_shape(self._stage.forward, layers, hidden, inputs)[1]

    def __call__(self, b: Buffers, row: dict, kinds: str, arrivals: tuple, events: dict) -> Buffers:
        gradients = {channel: pipe.shift(b.leaving, channel) for channel in arrivals[1]}
        for channel in arrivals[0]:
            b = b._replace(
                activation=put(b.activation, row[f"activation_from_{channel}"], b.arriving[channel])
            )
        if "F" in kinds:
            b, hidden = self._forward(b, row, events["embed"])
            b = self._loss(b, row, hidden, events["loss"])
        for channel, gradient in gradients.items():
            b = b._replace(gradient=put(b.gradient, row[f"gradient_from_{channel}"], gradient))
        if "B" in kinds:
            b = self._backward(b, row, events["embed_gradient"])
        if "W" in kinds:
            b = self._weight(b, row)
        return b

    def _forward(self, b: Buffers, row: dict, when_embed: str) -> tuple[Buffers, PyTree]:
        inputs = self._stage_inputs(row["f_microbatch"])
        before = self._filled(row["f_valid"], self._input(b, row, when_embed))

        def run(carried):
            residual, records, before = carried
            layers = self._layers(row["f_chunk"])
            hidden, out, residual = self._stage_forward(row, layers, before, inputs, residual)
            out = masked(row["f_valid"] == 1, self._among_all(layers, out))
            records = add(records, row["f_microbatch"], out)
            return residual, records, hidden

        with jax.named_scope("F"):
            residual, records, hidden = self._run("f", row, run, (b.residual, b.layer_records, before))
        arriving = {channel: pipe.shift(hidden, channel) for channel in self._program.forward_channels}
        return b._replace(residual=residual, layer_records=records, arriving=arriving), hidden

    def _stage_forward(
        self, row: dict, layers: Layers, before: PyTree, inputs: Any, residual: PyTree
    ) -> tuple[PyTree, LossOutput, PyTree]:
        """Returns (hidden, the layers' terms and metrics, residual)."""
        slot = self._slot(residual, row, "f_residual")
        hidden, out, slot, _ = self._stage.forward(layers, before, inputs, slot)
        return hidden, out, residual if slot is None else slot.buffers

    def _input(self, b: Buffers, row: dict, when: str) -> PyTree:
        arrived = get(b.activation, row["f_input"])
        if when == "none":
            return arrived
        inputs = self._inputs(row["embed_microbatch"])

        def embed(_: PyTree) -> PyTree:
            return self._head.embed(self._weights.outer, inputs)

        embedded = self._if("embed", when, row["embed_valid"], embed, _zeros(arrived))
        return _choose(row["f_embed"], embedded, arrived)

    def _loss(self, b: Buffers, row: dict, hidden: PyTree, when: str) -> Buffers:
        inputs, microbatch = self._inputs(row["loss_microbatch"]), row["loss_microbatch"]

        if self._seeds is None:

            def loss_only(records):
                return put(records, microbatch, self._head.loss(self._weights.outer, hidden, inputs))

            return b._replace(records=self._if("loss", when, row["loss_valid"], loss_only, b.records))

        def add_loss(carried):
            records, gradient, outer = carried
            seeds = self._seed(microbatch, records.terms)
            out, grads, cotangent = self._head.loss_backward(self._weights.outer, hidden, inputs, seeds)
            gradient = put(gradient, row["loss_gradient"], cotangent)
            return put(records, microbatch, out), gradient, added(outer, grads)

        carried = self._if("loss", when, row["loss_valid"], add_loss, (b.records, b.gradient, b.grads.outer))
        return b._replace(records=carried[0], gradient=carried[1], grads=b.grads._replace(outer=carried[2]))

    def _backward(self, b: Buffers, row: dict, when: str) -> Buffers:
        inputs = self._stage_inputs(row["b_microbatch"])
        seeds = self._seed(row["b_microbatch"], b.layer_records.terms)
        cotangent = self._filled(row["b_valid"], get(b.gradient, row["b_gradient"]))

        def run(carried):
            return self._stage_backward(row, b.residual, seeds, inputs, *carried)

        with jax.named_scope("B"):
            saved, sums, before = self._run("b", row, run, (b.cotangent, b.grads.layers, cotangent))
        b = b._replace(cotangent=saved, grads=b.grads._replace(layers=sums), leaving=before)
        return self._embed_backward(b, row, before, when)

    def _stage_backward(
        self,
        row: dict,
        residual: PyTree,
        seeds: dict,
        inputs: Any,
        saved: PyTree,
        sums: PyTree,
        cotangent: PyTree,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Returns (saved, sums, cotangent of the stage's input)."""
        chunk = row["b_chunk"]
        arguments = (
            self._layers(chunk),
            self._slot_at(residual, row["b_residual"]),
            cotangent,
            seeds,
            inputs,
        )
        if self._splits:
            slot, before = self._stage.backward_input(*arguments, self._slot_at(saved, row["b_cotangent"]))
            return slot.buffers, sums, before
        target = self._target(sums, chunk, row["b_valid"] == 1)
        return saved, *self._stage.backward(*arguments, target)[:2]

    def _embed_backward(self, b: Buffers, row: dict, before: PyTree, when: str) -> Buffers:
        if not jax.tree.leaves(b.grads.outer):
            return b
        inputs, mine = self._inputs(row["embed_gradient_microbatch"]), row["b_embed"] == 1

        def scatter(outer: PyTree) -> PyTree:
            return added(outer, self._head.embed_backward(self._weights.outer, inputs, before, mine))

        outer = self._if("embed_gradient", when, row["embed_gradient_valid"], scatter, b.grads.outer)
        return b._replace(grads=b.grads._replace(outer=outer))

    def _weight(self, b: Buffers, row: dict) -> Buffers:
        chunk, inputs = row["w_chunk"], self._inputs(row["w_microbatch"])
        slots = self._slot_at(b.residual, row["w_residual"]), self._slot_at(b.cotangent, row["w_cotangent"])
        seeds = self._seed(row["w_microbatch"], b.layer_records.terms)

        def run(sums):
            target = self._target(sums, chunk, row["w_valid"] == 1)
            return self._stage.backward_weight(self._layers(chunk), *slots, seeds, inputs, target)

        with jax.named_scope("W"):
            sums = self._run("w", row, run, b.grads.layers)
        return b._replace(grads=b.grads._replace(layers=sums))

    def _run(self, kind: str, row: dict, do: Callable[[PyTree], PyTree], carried: PyTree) -> PyTree:
        """Returns `do(carried)`; by device, where the kind is not valid, `carried` unchanged and nothing computed."""
        if not self._program.by_device:
            return do(carried)
        return lax.cond(row[f"{kind}_valid"] == 1, do, lambda same: same, carried)

    def _if(
        self, event: str, when: str, valid: jax.Array, do: Callable[[PyTree], PyTree], tree: PyTree
    ) -> PyTree:
        """Returns `do(tree)` where valid, else tree; all devices agree on it, so collectives may be inside.

        Sums that pass through branches keep one order in all, or each branch would copy them to its own. The planner
        knows a branch by its scope (`jaxfb/planner/program_cost/branches.py`).
        """
        if when == "none":
            return tree

        def same(given: PyTree) -> PyTree:
            return jax.tree.map(in_rows, given) if self._keeps_order else given

        with jax.named_scope(event):
            if when == "all":
                return do(tree)
            return lax.cond(valid == 1, lambda given: same(do(same(given))), same, tree)

    def _filled(self, valid: jax.Array, tree: PyTree) -> PyTree:
        """Returns the input of a stage; with `poison`, in a bubble, NaN in its place.

        A device with nothing to do computes what nobody reads: it would wait for the others whatever it did, and a
        branch would keep the compiler from hiding transfers behind the stage.
        """
        if not self._poison:
            return tree
        return jax.tree.map(lambda leaf: jnp.where(valid == 1, leaf, jnp.full_like(leaf, jnp.nan)), tree)

    def _slot(self, buffers: PyTree, row: dict, name: str) -> Slot | None:
        """Returns the slot's shapes; None where the program keeps nothing for a backward."""
        return self._slot_at(buffers, row[name]) if self._program.num_residual_slots else None

    def _slot_at(self, buffers: PyTree, index: jax.Array) -> Slot:
        return (SlotInRows if self._keeps_order else Slot)(buffers, index)

    def _layers(self, chunk: jax.Array) -> Layers:
        params, whole = self._weights.layers, self._whole_layers
        if self._layout.num_chunks == 1:
            return Layers(*get((params, self._index, self._real, whole), chunk))
        index, real = get((self._index, self._real), chunk)
        return Layers(params, index, real, whole, chunk)

    def _inputs(self, microbatch: jax.Array) -> StageInputs:
        return StageInputs(*get((self._microbatches, self._keys), microbatch))

    def _stage_inputs(self, microbatch: jax.Array) -> Any:
        """Returns what the layers are given besides hidden."""
        return self._inputs(microbatch)

    def _seed(self, microbatch: jax.Array, terms: Mapping) -> dict:
        seeds = self._seeds or {}
        return {name: seeds[name][microbatch].astype(term.total.dtype) for name, term in terms.items()}

    def _among_all(self, layers: Layers, out: LossOutput) -> LossOutput:
        """Puts metrics [l, ...] of a chunk's layers at their places among all layers, [num_layers, ...]."""
        number = sum(self._layout.layers_per_stage)
        place = lambda leaf: jnp.zeros((number, *leaf.shape[1:]), leaf.dtype).at[layers.index].add(leaf)  # noqa: E731
        return LossOutput(out.terms, jax.tree.map(place, out.metrics))

    @property
    def _splits(self) -> bool:
        return self._program.num_cotangent_slots > 0

    def empty_buffers(self, accum_dtypes: Weights | None) -> Buffers:
        """Returns buffers of zeros, whose shapes come from an abstract run of the parts of one tick."""
        program, (inputs, layers, hidden, out) = self._program, self._shapes
        records = jax.eval_shape(self._head.loss, self._weights.outer, hidden, inputs)
        count = jax.tree.leaves(self._microbatches)[0].shape[0] * program.num_pieces
        grads = None if self._seeds is None else empty_sums(self._weights, accum_dtypes)
        residual, cotangent = self._empty_kept()
        return Buffers(
            residual=residual,
            activation=empty_slots(hidden, program.allocated("activation")),
            gradient=empty_slots(hidden, program.allocated("gradient")),
            cotangent=cotangent,
            arriving={channel: _zeros(hidden) for channel in program.forward_channels},
            leaving=_zeros(hidden),
            grads=grads,
            records=empty_slots(records, count + 1),
            layer_records=empty_slots(jax.eval_shape(self._among_all, layers, out), count + 1),
        )

    def _empty_kept(self) -> tuple[PyTree, PyTree]:
        """Returns empty buffers of what F keeps for B, and of what B keeps for W."""
        program, (inputs, layers, hidden, out) = self._program, self._shapes
        saved = None
        if self._splits:
            seeds = {name: jax.ShapeDtypeStruct((), term.total.dtype) for name, term in out.terms.items()}
            saved = self._stage.saved(layers, hidden, seeds, inputs)
        residual = self._stage.empty(layers, hidden, inputs, program.allocated("residual"))
        return residual, empty_slots(saved, program.allocated("cotangent"))


def _when(valid: np.ndarray) -> str:
    """Returns whether something happens in "all" ticks of a phase, in "some" or in "none"."""
    return "all" if valid.all() else "some" if valid.any() else "none"


def _check_float(hidden: PyTree) -> PyTree:
    for path, leaf in jax.tree_util.tree_leaves_with_path(hidden):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise Refused(
                f"under a pipeline hidden must be float arrays, but embed gives hidden{jax.tree_util.keystr(path)} "
                f"in {leaf.dtype}; leave it out and read it from the microbatch, which every layer is given"
            )
    return hidden


def _zeros(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)


def _choose(first: jax.Array, yes: PyTree, no: PyTree) -> PyTree:
    return jax.tree.map(lambda a, b: jnp.where(first == 1, a, b), yes, no)
