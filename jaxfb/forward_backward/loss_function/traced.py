"""A traced loss function: which inputs each result reads, and the program cut down to some of its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh

from jaxfb.forward_backward.loss_function.repeated_draws import repeats_draws
from jaxfb.forward_backward.loss_function.summands import CLOSED_OVER, Summand, Summands, summands
from jaxfb.mesh import AUTOMATIC_AXES, axis_size, manual_axes, platform_of
from jaxfb.platforms.compat import cut_down, equations, is_traced, opened, silent
from jaxfb.types import LossFn, LossOutput, PyTree

MOST_OF_A_SAMPLE = 2**24
"""Results of more numbers than these are not computed at random ones."""


class Traced:
    """Traces a loss function for one microbatch.

    shape:  the shapes of its LossOutput.
    places: a LossOutput of integers with the same structure: the position of each leaf among the program's results.
    num_params, num_inputs: how many leaves of parameters, and of all its inputs, it has.
    mesh: that on which it was traced; None: without one.
    manual: the axes of the mesh over which `jax.shard_map` ran it by hand, and has to run it.
    """

    mesh: Mesh | None = None
    manual: tuple[str, ...] = ()

    def __init__(self, loss_fn: LossFn, params: PyTree, microbatch: PyTree, rng: Any):
        program, self.shape = jax.make_jaxpr(loss_fn, return_shape=True)(params, microbatch, rng)
        leaves, structure = jax.tree.flatten(self.shape)
        self.places: LossOutput = jax.tree.unflatten(structure, range(len(leaves)))
        self._program, self._num_results = silent(program), len(leaves)
        self.num_params, self.num_inputs = len(jax.tree.leaves(params)), len(program.jaxpr.invars)
        self._summands: dict[tuple[bool, ...], list[Summands]] = {}

    @classmethod
    def inside(cls, mesh: Mesh, loss_fn: LossFn, params: PyTree, microbatch: PyTree, rng: Any) -> Traced:
        """Traces it inside `jax.shard_map`, where it may name the mesh's axes.

        On CPU devices an automatic axis of size 1 is manual too, unless the function's forward names it in a sharding
        constraint. Beside an automatic axis JAX annotates every operation for XLA's partitioner: a third of the
        instructions of a pipeline of experts, and a sixth of the time to trace and compile it. On TPUs the axis stays
        automatic: without annotations their compiler chooses one layout for the inputs of all layers in the forward
        and another in the backward, and copies them (8B on v5p, fsdp 64: 7.20 GB in place of 5.86 GB, libtpu 0.0.48).
        Not measured on GPUs.
        """
        given = (loss_fn, params, microbatch, rng)
        if platform_of(mesh) == "cpu" and axis_size(mesh, *AUTOMATIC_AXES) == 1:
            with suppress(Exception):  # a function that is broken fails again below
                return cls._over(mesh, mesh.axis_names, *given)
        return cls._over(mesh, manual_axes(mesh), *given)

    @classmethod
    def _over(cls, mesh: Mesh, axes: tuple[str, ...], *given: Any) -> Traced:
        traced = _on_mesh(mesh, axes, lambda: cls(*given))
        traced.mesh, traced.manual = mesh, axes
        return traced

    def open(self) -> None:
        """Inlines calls, in loops and branches too, so that results computed by one call are separated."""
        program = self._program
        if self.mesh is None:
            self._program = opened(program)
        else:  # which may name the mesh's axes
            self._program = _on_mesh(self.mesh, self.manual, lambda: opened(program))
        self._summands = {}

    def reads(self, *places: int) -> tuple[list[bool], list[bool]]:
        """Returns which parameters those results depend on, and which leaves of (microbatch, rng)."""
        used = self._cut(places)[1]
        return used[: self.num_params], used[self.num_params :]

    def summands(self, places: PyTree, is_data: Sequence[bool] | None = None) -> PyTree:
        """Returns what each of these results adds up, in place of the result.

        is_data: for each leaf of (microbatch, rng), whether it is data of which a total may be the sum; None: all are.
        """
        key = self._data(is_data)
        if key not in self._summands:
            self._summands[key] = summands(self._program, [*[False] * self.num_params, *key])
        return jax.tree.map(lambda place: self._summands[key][place], places)

    def closes_over(self, place: int) -> bool:
        """Returns whether a result depends on a traced value that is not an input, whose number is not known yet."""
        return any(CLOSED_OVER in one.reads for one in self.summands(place))

    def with_numbers(self) -> Traced:
        """Returns the same function with random numbers in place of traced values that it closes over."""
        known = copy(self)
        known._summands = {}
        consts = [_drawn(value) if is_traced(value) else value for value in self._program.consts]
        known._program = self._program.replace(consts=consts)
        return known

    def names(self, axis: str, *places: int) -> bool:
        """Returns whether those results (none given: any) depend on a collective or an index along a mesh axis."""
        program = self._cut(places or range(self._num_results))[0]
        return any(
            axis == name or (isinstance(name, tuple) and axis in name)
            for eqn in equations(program)
            for name in (eqn.params.get("axis_name"), eqn.params.get("axes"))
        )

    def draws(self) -> list[tuple[int, ...]]:
        """Returns the shapes of the random numbers that are drawn, in order."""
        return [
            eqn.params["shape"] for eqn in equations(self._program) if eqn.primitive.name == "random_bits"
        ]

    def repeats_draws(self) -> bool:
        """Returns whether random numbers are drawn from what is not an input: every call draws the same ones."""
        return repeats_draws(self._program, [True] * self.num_inputs)

    def function(self, *places: int) -> Callable:
        """Returns a function (params, microbatch, rng) -> those results, in ascending order, without other computation.

        params, (microbatch, rng): may be None where no result depends on them.
        """
        program, used = self._cut(places)
        run = jaxpr_as_fun(program)

        def call(params, microbatch, rng):
            leaves = jax.tree.leaves(params) or [None] * self.num_params
            leaves += jax.tree.leaves((microbatch, rng)) or [None] * (len(used) - self.num_params)
            return run(*(leaf for leaf, needed in zip(leaves, used, strict=True) if needed))

        return call

    def data(self, is_data: Sequence[bool] | None) -> set[int]:
        """Returns the numbers of the inputs that are data."""
        return {self.num_params + number for number, one in enumerate(self._data(is_data)) if one}

    def _data(self, is_data: Sequence[bool] | None) -> tuple[bool, ...]:
        return (True,) * (self.num_inputs - self.num_params) if is_data is None else tuple(is_data)

    def sample(self, place: int) -> np.ndarray | None:
        """Returns a result for random numbers as inputs; None where they are many, or keys."""
        program, _ = self.with_numbers()._cut([place])
        shapes, draw = [var.aval for var in program.jaxpr.invars], np.random.default_rng(0)
        if sum(aval.size for aval in shapes) > MOST_OF_A_SAMPLE:
            return None
        if any(jnp.issubdtype(aval.dtype, jax.dtypes.extended) for aval in shapes):
            return None
        with jax.ensure_compile_time_eval():
            given = [jnp.asarray(draw.uniform(1, 2, aval.shape), aval.dtype) for aval in shapes]
            return np.asarray(jaxpr_as_fun(program)(*given)[0])

    def _cut(self, places: Sequence[int]) -> tuple[Any, list[bool]]:
        return cut_down(self._program, [place in places for place in range(self._num_results)])


def _on_mesh(mesh: Mesh, axes: Sequence[str], trace: Callable[[], Any]) -> Any:
    """Returns what trace() returns, called where `jax.shard_map` traces over those axes; no array leaves it."""
    found = []

    def body() -> tuple:
        found.append(trace())
        return ()

    jax.eval_shape(
        jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=(), axis_names=set(axes), check_vma=False)
    )
    return found[0]


def _drawn(like: jax.Array) -> jax.Array:
    """Returns positive numbers, or keys, of the shape and dtype of an array whose own are not known yet."""
    with jax.ensure_compile_time_eval():
        if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
            return jax.random.split(jax.random.key(0, impl=jax.random.key_impl(like)), like.shape)
        return jnp.asarray(np.random.default_rng(0).uniform(1, 2, like.shape), like.dtype)


def reads_none(
    one: Traced, more: Traced, place: int, is_data: Sequence[bool] | None = None, axis: str | None = None
) -> list[Summand]:
    """Returns the summands of a result that read no data and do not grow with them, such as a penalty or a constant.

    one, more: the same function traced for data of two sizes, which makes different programs of what grows.
    is_data: as for `Traced.summands`. axis: of the mesh; what communicates along it reads data too.
    """
    numbers = {axis, *one.data(is_data)}
    other = {summand.text for summand in more.summands(place, is_data)}
    return [
        summand
        for summand in one.summands(place, is_data)
        if summand.reads.isdisjoint(numbers) and summand.text in other
    ]


def constant(traced: Traced, place: int) -> np.ndarray | jax.Array:
    """Returns a result of a traced function that depends on none of its inputs; traced where it closes over such."""
    if traced.closes_over(place):
        return traced.function(place)(None, None, None)[0]
    with jax.ensure_compile_time_eval():
        return np.asarray(traced.function(place)(None, None, None)[0])


def is_constant(one: Traced, more: Traced, place: int | None, of_more: int | None) -> bool:
    """Returns whether a result depends on none of the inputs and is the same for data of two sizes; not so None.

    place, of_more: of the result in each of the two.
    """
    if place is None or of_more is None or any(map(any, one.reads(place))):
        return False
    if one.closes_over(place) or more.closes_over(of_more):
        return one.summands(place) == more.summands(of_more)
    return np.array_equal(constant(one, place), constant(more, of_more))
