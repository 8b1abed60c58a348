"""Makes the stages of a model: how its parameters are cut, cast, gathered and recomputed.

Shared by accumulation and pipeline (`strategies.py`). Everything here runs on one device inside `jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxfb.forward_backward.layers.ahead import Ahead, Gathered, Late
from jaxfb.forward_backward.layers.half_passes import LayerInHalves, StageOfHalves
from jaxfb.forward_backward.layers.handed import handing_on_pays
from jaxfb.forward_backward.layers.last_microbatch import Reduce, reduce_layer
from jaxfb.forward_backward.layers.mixed_stage import MixedStage
from jaxfb.forward_backward.layers.overwriting import Overwriting, overwriting_pays
from jaxfb.forward_backward.layers.piece_stage import PieceStage
from jaxfb.forward_backward.layers.remat import PIPELINE_KEEPS, checkpoint_layer
from jaxfb.forward_backward.layers.stage import Stage
from jaxfb.forward_backward.sequential import as_is, layer_output, piece_output
from jaxfb.mesh import kind_here, platform_here
from jaxfb.parallel import data, sharding, tensor
from jaxfb.parallel.table import Table
from jaxfb.recomputation import Half, remat_parts
from jaxfb.trainable import is_trained, joined, like
from jaxfb.types import Pipelined, PyTree, outer_params


@dataclass(frozen=True)
class Execution:
    """Options that accumulation and pipeline share: how params are cut, cast and recomputed.

    specs, dtypes: trees like params: where each leaf lives, and what it is cast to for the computation.
    sums: the dtype in which each leaf's gradient is summed, None where it is frozen.
    ahead: whether a layer's parameters are gathered while the layer before it computes; "half": those of its first
      half.
    kept: number of a stage's first layers whose parameters are gathered once a call, under fsdp_gather="layer".
    reduce_dtype: in which one microbatch's gradients are summed over devices; None: as `sums`.
    overlap_grad_reduce: whether the layers' gradients are reduced while the last microbatch's backward runs.
    """

    specs: PyTree
    dtypes: PyTree
    sums: PyTree
    fsdp_gather: str
    remat: str
    ahead: bool | Half = False
    kept: int = 0
    reduce_dtype: str | None = None
    overlap_grad_reduce: bool = False

    @property
    def gathers_in_loop(self) -> bool:
        """Returns whether FSDP gathers parameters in the loop over microbatches, where each is used."""
        return self.fsdp_gather == "layer"

    @property
    def shard_dtypes(self) -> PyTree:
        """Returns the dtype that a shard is kept in: that of its gradient's sum, its own where it is frozen."""
        return joined(self.sums, self.dtypes)

    def trained(self, params: PyTree, of: str = "all") -> PyTree:
        """Returns the parameters that have a gradient; of: "all", "outer" or "layers"."""
        return like(_part(self.sums, of), params)

    def gather(self, of: str = "all"):
        """Returns a function from shards to whole parameters, for use inside the loop; of: "all" or "outer"."""
        specs, dtypes, sums = (_part(tree, of) for tree in (self.specs, self.dtypes, self.sums))
        return self._gather(specs, dtypes, is_trained(sums, dtypes))

    def _gather(self, specs: PyTree, dtypes: PyTree, trained: PyTree, stored: bool = False):
        if not self.gathers_in_loop:
            return as_is

        def gather(shards: PyTree) -> PyTree:
            alike = like(shards, specs), like(shards, dtypes), like(shards, trained)
            return data.gather_parameters(shards, *alike, self.reduce_dtype, stored)

        return gather

    def gather_layer(self, stored: bool = False):
        """Returns `gather` for one layer, or some of its leaves, with None in place of the others.

        stored: shards are read in the dtype that they are stored in (`stored_dtype.py`).
        """
        dtypes = self.dtypes["layers"]
        trained = is_trained(self.sums["layers"], dtypes)
        return self._gather(self._layer_specs(), dtypes, trained, stored)

    def layer_to_shards(self, exposed: bool = False):
        """Returns the functions, one after the other, from gradients of one whole layer, or of some of its leaves, to
        those of its shards.

        exposed: as of `steps_apart`.
        """
        specs = like(self.sums["layers"], self._layer_specs())
        *firsts, last = range(data.steps_to_shards(specs, "halves" in self.remat, exposed))
        steps = [*(slice(first, first + 1) for first in firsts), slice(last, None)]

        def to_shards(steps: slice, grads: PyTree) -> PyTree:
            return data.to_shards(grads, like(grads, specs), self.reduce_dtype, steps)

        return tuple(partial(to_shards, step) for step in steps)

    def layer_before_scatter(self, reduce_dtype: str | None):
        """Returns a function that casts and annotates gradients of one whole layer, or of some of its leaves, for
        `layer_to_shards`.
        """
        sums = self.sums["layers"]
        specs = like(sums, self._layer_specs())
        # as gradients in the dtype of their parameters would be; some come in a wider one (`unrounded`)
        dtypes = jax.tree.map(jnp.promote_types, like(sums, self.dtypes["layers"]), sums)
        return lambda grads: data.before_scatter(grads, like(grads, specs), like(grads, dtypes), reduce_dtype)

    def reduce_layer(self, grad_specs: PyTree, axes: tuple[str, ...], stacked: int = 0) -> Reduce:
        """Returns what sums the gradients of one layer over `axes`; grad_specs: of the gradients of all layers.

        stacked: as of `last_microbatch.reduce_layer`.
        """
        specs = like(self.sums["layers"], self._layer_specs())
        reduce = partial(data.reduce_gradients, axes=axes, gather=self.fsdp_gather)
        return reduce_layer(specs, grad_specs, reduce, stacked)

    def _layer_specs(self) -> PyTree:
        """Returns those of the stacked leaves without their first dim."""
        return jax.tree.map(lambda spec: P(*spec[1:]), self.specs["layers"])

    def gather_outer(self, tables: Callable[[PyTree], PyTree] | None = None):
        """Returns `gather` of what is beside the layers; None where it is in no shards, or the loop gets it whole.

        tables: of the model; of large ones the gathered tree has a `Table` in place of the whole.
        """
        specs = jax.tree.leaves(outer_params(self.specs))
        is_cut = any(sharding.shards_of(spec) is not None for spec in specs)
        if not self.gathers_in_loop or not is_cut:
            return None
        return self.gather("outer") if tables is None else partial(self._with_tables, tables)

    def _with_tables(self, tables: Callable[[PyTree], PyTree], shards: PyTree) -> PyTree:
        def one(dim: int, shard: jax.Array, spec: P, dtype: Any, trained: bool) -> Table | None:
            if dim < 0 or not trained or sharding.shards_of(spec) is None or is_cut_over(spec, "tensor"):
                return None
            table = Table(shard, spec, dim, dtype, self.reduce_dtype)
            return table if table.num_parts > 1 else None

        sums, dtypes, specs = map(outer_params, (self.sums, self.dtypes, self.specs))
        found = jax.tree.map(one, tables(shards), shards, specs, dtypes, is_trained(sums, dtypes))
        rest = jax.tree.map(lambda table, shard: None if table else shard, found, shards, is_leaf=_is_table)
        whole = self.gather("outer")(rest)
        return jax.tree.map(lambda table, leaf: table or leaf, found, whole, is_leaf=_is_table)

    def keep_layers(self, layers: PyTree, lead: int = 0) -> PyTree:
        """Returns the first layers of each stage that stay gathered, [..., kept, ...]; None if there are none.

        layers: shards, stacked below so many dims.
        """
        if not self.kept:
            return None
        first = jax.tree.map(lambda leaf: leaf[(slice(None),) * lead + (slice(self.kept),)], layers)
        of_stack = lambda spec: P(*(None,) * (lead + 1), *spec[1:])  # noqa: E731
        specs = jax.tree.map(of_stack, self.specs["layers"])
        dtypes = self.dtypes["layers"]
        return data.gather_parameters(first, specs, dtypes, jax.tree.map(lambda _: False, dtypes))

    def stage(
        self,
        model: Pipelined,
        number: int,
        in_pipeline: bool,
        num_pieces: int = 1,
        reduce: Reduce | None = None,
        **options,
    ) -> Stage | MixedStage:
        """Returns a run of so many of the model's layers, whose parts are recomputed as `remat` has them; of a piece of
        the sequences, where there are several.

        reduce: of a layer's gradients of all microbatches, in the last one's backward. options: arguments of `Stage`.
        """
        stages = []
        for remat, first, end in self._parts(number):
            keep = PIPELINE_KEEPS[remat]
            keep = "inputs" if keep == "input" and not in_pipeline else keep
            overwrites = not in_pipeline and self.ahead is True and overwrites_gradients(remat)
            hands = not in_pipeline and bool(self.ahead) and hands_on(remat)
            part = options | {
                "first": first,
                "end": end,
                "ahead": self._ahead(model, first < self.kept, reduce, overwrites, hands),
            }
            stages.append(self._stage_of_part(model, remat, keep, num_pieces, first < self.kept, part))
        return stages[0] if len(stages) == 1 and not self.kept else MixedStage(stages)

    def _ahead(
        self, model: Pipelined, is_kept: bool, reduce: Reduce | None, overwrites: bool, hands: bool
    ) -> Ahead | None:
        """Returns what is gathered ahead, scattered or reduced late, of layers that stay gathered or do not."""
        in_turn = model.halves.second_params if self.ahead == "half" and model.halves is not None else ()
        steps = (
            self.layer_to_shards(overwrites or hands),
            self.layer_before_scatter(self.reduce_dtype),
            in_turn,
        )
        last = () if reduce is None else (reduce,)
        if is_kept:
            return Gathered(as_is, *steps, last)
        if self.ahead:
            buffers = Overwriting(like(self.sums["layers"], self._layer_specs())) if overwrites else None
            return Ahead(self.gather_layer(), *steps, last, buffers, hands)
        return Late(as_is, (), self.layer_before_scatter(None), (), last) if last else None

    def _parts(self, number: int) -> Iterator[tuple[str, int, int]]:
        """Returns (remat, first, end) of each run of layers that are alike, of so many."""
        first = 0
        for remat, count in remat_parts(self.remat):
            end = number if count is None else first + count
            for cut in sorted({min(max(self.kept, first), end), end} - {first}):
                yield remat, first, cut
                first = cut

    def _stage_of_part(
        self, model: Pipelined, remat: str, keep: str, num_pieces: int, is_kept: bool, options
    ) -> Stage:
        gather = as_is if self.ahead or is_kept else self.gather_layer(platform_here() == "tpu")

        def whole(shards, hidden, microbatch, rng):
            return layer_output(model.layer(gather(shards), hidden, microbatch, rng))

        def of_piece(shards, hidden, given, rng):
            assert model.layer_piece is not None  # `check_offers_pieces` refuses a model without
            arguments = gather(shards), hidden, given.microbatch, rng, given.piece
            return piece_output(model.layer_piece(*arguments))

        layer = whole if num_pieces == 1 else of_piece
        halves = model.halves if remat == "halves" and num_pieces == 1 else None
        if halves is not None:
            layer = LayerInHalves(*(_of_gathered(half, gather) for half in (halves.first, halves.second)))

        if keep == "residuals":
            layer = checkpoint_layer(layer, remat, bool(self.ahead) or is_kept or not self.gathers_in_loop)
        options = options | {"trained": partial(self.trained, of="layers"), "on_host": remat == "offload"}
        if halves is not None:
            return StageOfHalves(layer, keep, **options)
        return (
            Stage(layer, keep, **options)
            if num_pieces == 1
            else PieceStage(layer, keep, num_pieces=num_pieces, **options)
        )


def _part(tree: PyTree, of: str) -> PyTree:
    """Returns "all" of a tree like params, what is "outer", or its "layers"."""
    return {"all": lambda: tree, "outer": lambda: outer_params(tree), "layers": lambda: tree["layers"]}[of]()


def _of_gathered(half: Callable, gather: Callable[[PyTree], PyTree]) -> Callable:
    return lambda shards, *rest: half(gather(shards), *rest)


def overwrites_gradients(remat: str) -> bool:
    """Returns whether a layer's gradients are written over those of another on the devices in context."""
    return overwriting_pays(kind_here(), tensor.num_shards(), remat)


def hands_on(remat: str) -> bool:
    """Returns whether a loop over the layers hands on what it has on the devices in context."""
    return handing_on_pays(kind_here(), remat)


def is_cut_over(spec: P, axis: str) -> bool:
    """Returns whether one of the dims is cut over an axis."""
    return any(axis in sharding.axes_of(entry) for entry in spec)


def _is_table(leaf: Any) -> bool:
    return leaf is None or isinstance(leaf, Table)
