"""The order in which the devices of a pipeline hold the layers, and the way to it from the model's order and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.parallel import pipe
from jaxfb.parallel.host_memory import HOST, brought, is_on_host, on_device
from jaxfb.parallel.layers.slices import stacked_moments, stacked_params
from jaxfb.parallel.sharding import in_layers, optimizer_specs
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused

PyTree = Any
STACKED = P("pipe")


@dataclass(frozen=True)
class LayerOrder:
    """Moves stacked layers, leaves [num_layers, ...], between the model's order and that of a pipeline.

    In the pipeline's order each device's share of the first dim is its own chunks, one after the other. Where stages
    are of uneven length, each is stored in arrays of the longest one's size, and what it does not fill is zero.
    """

    mesh: Mesh
    layout: pipe.Layout

    def to_pipeline(self, params: PyTree, donate: bool = False) -> PyTree:
        """Returns parameters, or their gradients, with "layers" in the pipeline's order, from the model's."""
        return self._moved_where(stacked_params(params), params, False, donate)

    def to_model(self, params: PyTree, donate: bool = False) -> PyTree:
        """Returns parameters, or their gradients, with "layers" in the model's order, from the pipeline's."""
        return self._moved_where(stacked_params(params), params, True, donate)

    def moments(self, opt_state: PyTree, params: PyTree, back: bool, donate: bool = False) -> PyTree:
        """Returns an optimizer's state with all that mirrors a stacked parameter in the other order."""
        return self._moved_where(stacked_moments(opt_state, params), opt_state, back, donate)

    def _moved_where(self, stacked: PyTree, tree: PyTree, back: bool, donate: bool) -> PyTree:
        return jax.tree.map(
            lambda leaf, moves: self.move(leaf, back, donate) if moves else leaf, tree, stacked
        )

    def empty(self, params: PyTree) -> int:
        """Returns how many numbers of stacked leaves in the pipeline's order belong to no layer."""
        layout = self.layout
        leaves = jax.tree_util.tree_leaves_with_path(params)
        one_layer = sum(leaf.size // layout.num_places for path, leaf in leaves if in_layers(path))
        return (layout.num_places - layout.num_layers) * one_layer

    def move(self, leaf: Any, back: bool, donate: bool = False) -> Any:
        """Returns one stacked array in the other order; `back`: in the model's."""
        self._check(leaf, back)
        if self.layout.even and not leaf.size:  # of a program's array without elements JAX knows wrong parts
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            length = self.layout.num_layers if back else self.layout.num_places
            return leaf.update(
                shape=(length, *leaf.shape[1:]), sharding=leaf.sharding and self._place(leaf, back)
            )
        if is_traced(leaf):
            return self._moved(back)(leaf)
        donate = donate and self.layout.even  # otherwise the other one has another shape
        place, here = self._place(leaf, back), brought(leaf)
        moved = _program(self, back, donate or (here is not leaf and self.layout.even), on_device(place))(
            here
        )
        return jax.device_put(moved, place) if is_on_host(place) else moved

    def _check(self, leaf: Any, back: bool) -> None:
        layout = self.layout
        if leaf.shape[0] != (layout.num_places if back else layout.num_layers):
            raise Refused(
                f"layers_per_stage={list(layout.layers_per_stage)} is for {layout.num_layers} stacked layers, got "
                f"{leaf.shape[0]}"
            )

    def _place(self, leaf: Any, back: bool) -> NamedSharding:
        """Returns where a leaf is in the other order.

        Layers of uneven stages are cut over pipe in the pipeline's order, and in the model's along any dim that pipe
        divides.
        """
        if self.layout.even:
            return leaf.sharding
        memory = {"memory_kind": HOST} if is_on_host(leaf.sharding) else {}
        spec = [None if entry == "pipe" else entry for entry in getattr(leaf.sharding, "spec", P())]
        if not back:
            return NamedSharding(self.mesh, P("pipe", *spec[1:]), **memory)
        shape = jax.ShapeDtypeStruct((self.layout.num_layers, *leaf.shape[1:]), leaf.dtype)
        # JAX makes no array without elements that is cut
        cut = optimizer_specs(P(*spec), shape, self.mesh, "pipe") if shape.size else P(*spec)
        return NamedSharding(self.mesh, cut, **memory)

    def _moved(self, back: bool) -> Callable[[jax.Array], jax.Array]:
        if not self.layout.even:
            return partial(pipe.unpadded if back else pipe.padded, layout=self.layout)
        move = partial(pipe.rearranged, layout=self.layout, back=back)
        cut = {"in_specs": STACKED, "out_specs": STACKED}
        return jax.shard_map(move, mesh=self.mesh, axis_names={"pipe"}, check_vma=False, **cut)


@lru_cache(maxsize=256)
def _program(order: LayerOrder, back: bool, donate: bool, place: NamedSharding) -> Callable:
    return jax.jit(order._moved(back), out_shardings=place, donate_argnums=(0,) if donate else ())
