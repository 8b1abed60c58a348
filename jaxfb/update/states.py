"""Makes the states of a train step, and moves states to where it keeps them: the part of its interface about states."""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxfb.forward_backward import ForwardBackward
from jaxfb.types import PyTree
from jaxfb.update.placement import StatePlacement
from jaxfb.update.train_state import TrainState


class StepStates:
    """A train step's methods about states."""

    _placement: StatePlacement

    @property
    def forward_backward(self) -> ForwardBackward:
        """Returns the engine, which knows how parameters are cut over the mesh."""
        return self._placement.forward_backward

    def init(
        self,
        params: PyTree | Callable[[jax.Array], PyTree],
        rng: int | jax.Array = 0,
        *,
        donate: bool = False,
    ) -> TrainState:
        """Returns a fresh state on the mesh, whose arrays are its own: `params` stay the caller's.

        Args:
          params: the parameters, any pytree of float arrays; a model that can be called, such as an Equinox module, is
            one. Or a function key -> parameters (see `is_init_function`), which is then run sharded, so that no device
            ever holds them whole.
          rng: a seed, or a PRNG key.
          donate: the state takes over the arrays of `params`, which must not be used again: there is no second copy.

        Raises:
          ValueError: a leaf is no float array, or is one that Flax does not keep as a parameter.
        """
        return self._placement.init(params, rng, donate)

    def abstract_state(self, params: Callable[[jax.Array], PyTree]) -> TrainState:
        """Returns what `init` would return for a function key -> parameters, as shapes, dtypes and shardings."""
        return self._placement.abstract_state(params)

    def place(self, state: TrainState) -> TrainState:
        """Returns the state moved to where this step keeps it; nothing happens to what is there already.

        Raises:
          ValueError: it is no TrainState, or a step has overwritten it.
        """
        return self._placement.place(state)

    def state_shardings(self, state: TrainState) -> TrainState:
        """Returns NamedShardings of a (possibly abstract) state: params over fsdp, expert, context and tensor, moments
        as the gradients.
        """
        return self._placement.state_shardings(state)
