"""The contracts: what a loss function returns, how a model is cut for a pipeline, what one call gives back.

Used by everything below. All of them are pytrees, so they pass
through `jax.jit`, `lax.scan` and `jax.shard_map` unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.refusal import Refused

PyTree = Any
LossFn = Callable[[PyTree, PyTree, "jax.Array | None"], "LossOutput | Sum"]
CheckedLossFn = Callable[[PyTree, PyTree, "jax.Array | None"], "LossOutput"]


class _Reduced:
    """A quantity that knows how to become one number: `.value`, `float(x)`, `np.asarray(x)`."""

    @property
    def value(self) -> jax.Array:
        """Returns the number itself."""
        raise NotImplementedError

    def __float__(self) -> float:
        return float(self.value)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return np.asarray(self.value, dtype=dtype)

    def __jax_array__(self) -> jax.Array:
        return jnp.asarray(self.value)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sum(_Reduced):
    """Holds a sum and the weight that it will be divided by. Loss functions never divide.

    total:  float[...], the sum over the rows or tokens of a microbatch (coefficients multiplied in). What reads no row
      is another term, with a constant weight, and not added to it.
    weight: float or int, same shape or [], what was counted; it must depend on the data alone. None (the default):
      nothing divides the total, the objective has the sum itself. A constant such as 1.0 is counted once for each
      microbatch on each replica: right for what is the same in all of them, such as a penalty on the parameters.
    `a + b` adds totals and weights. `.value` is total / weight, and 0 where the weight is 0.
    """

    total: Any
    weight: Any = None

    def __add__(self, other: Sum) -> Sum:
        if (self.weight is None) != (other.weight is None):
            raise Refused(
                "Sums can be added where both have a weight or neither has, got Sum(total, weight) and Sum(total); "
                "give both what they counted"
            )
        if self.weight is None:
            return Sum(self.total + other.total)
        return Sum(self.total + other.total, self.weight + other.weight)

    @property
    def value(self) -> jax.Array:
        """Returns total / weight, 0 where the weight is 0; the total where there is no weight."""
        if self.weight is None:
            return jnp.asarray(self.total)
        total, weight = jnp.asarray(self.total), jnp.asarray(self.weight)
        with jax.numpy_dtype_promotion("standard"):  # also where the caller lets JAX promote no dtypes
            if not jnp.issubdtype(weight.dtype, jnp.floating):
                weight = weight.astype(jnp.result_type(total, 1.0))
            return jnp.where(weight != 0, total / jnp.where(weight != 0, weight, 1), 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Single(_Reduced):
    """An array that is reduced by a rule other than the weighted sum."""

    array: Any

    @property
    def value(self) -> jax.Array:
        return jnp.asarray(self.array)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Max(_Single):
    """Reports a metric's largest value over all microbatches and replicas."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Min(_Single):
    """Reports a metric's smallest value over all microbatches and replicas."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Last(_Single):
    """Reports a metric's value at the last rows of the global batch."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossOutput:
    """Holds what a loss function returns for one microbatch.

    terms:   name -> Sum. The objective is the sum over terms of total / weight, after both were summed
             over the whole global batch; a coefficient is multiplied into `total` by the loss function.
    metrics: name -> Sum, Max, Min or Last; reported, never differentiated.
    outputs: pytree of [rows, ...] arrays to collect (such as log-probs), or None.
    """

    terms: Mapping[str, Sum]
    metrics: Mapping[str, Sum | Max | Min | Last] = field(default_factory=dict)
    outputs: PyTree = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Unembedding:
    """Describes how a model's last hidden states become logits: softcap * tanh((hidden @ kernel) / softcap).

    hidden:  float[rows, seq, width], after the last norm.
    kernel:  float[width, vocab/tensor].
    softcap: None leaves the logits as they are.
    chunk:   how many tokens' logits may exist at one time.
    table:   the kernel, or its transpose, as a `jaxfb.parallel.table.Table`, of which losses gather a share or parts;
             None: it is whole already.
    """

    hidden: jax.Array
    kernel: jax.Array
    softcap: float | None = field(default=None, metadata={"static": True})
    chunk: int = field(default=1024, metadata={"static": True})
    table: Any = None


@dataclass(frozen=True)
class Pipelined:
    """Cuts a model for stages: three pure functions over `params`, a dict with "layers" and anything beside it.

    Any other mapping, such as an OrderedDict or an nnx.State, serves as well. `params["layers"]` has every leaf stacked
    [num_layers, ...]; `outer` is params without "layers", so tied weights are simply used twice. `hidden` is any pytree
    of [rows, ...] arrays.

    embed: (outer, microbatch, rng) -> hidden
    layer: (layer_params, hidden, microbatch, rng) -> hidden, or (hidden, {name: Sum}) whose sums are added
           over layers and become terms of the loss, or (hidden, LossOutput) with such terms and with metrics,
           each a Sum, which are reported of every layer: [num_layers, ...].
    head:  (outer, hidden, microbatch, rng) -> LossOutput or Sum
    param_specs: optional, params -> tree of PartitionSpec that names the "tensor" axis only.
    vocabulary: optional, how embedding and head are computed by all stages, each with its share.
    unembed: optional, (outer, hidden) -> Unembedding; with it the head can be replaced by another loss over the
           model's log-probs (`losses.heads`), under `vocabulary` too, where `outer` is this device's share.
    counted: optional, which leaves are made by counting over the whole global batch.
    layer_piece: optional, (layer_params, hidden, microbatch, rng, piece) -> (hidden, own): a layer on a `Piece` of the
           sequences, for schedules that cut them. hidden and microbatch then have the tokens of the piece alone, in
           `embed` and `head` too, whose terms and metrics must be sums over tokens and outputs [rows, tokens, ...].
           `own` is a tree of float arrays [rows, tokens, ...], such as keys and values, that later pieces read.
    halves: optional, the layer as two functions, one after the other; what remat="halves" keeps is between them.
    tables: optional, outer -> tree like it of int: the vocabulary's dim of each leaf that `embed` and `head` accept as
           a `jaxfb.parallel.table.Table` too, of which they gather a part, a share or some columns (an embedding by
           `jaxfb.parallel.look_up.look_up`); -1 for the others.
    check: optional, (microbatch of shapes [rows, ...], num_parts) -> None: raises ValueError if the head would not give
           the same of a global batch split into so many parts. Asked before a training call is compiled.

    rng: keys [rows], one a row; layer i receives them folded with i; None where the caller gave none.
    """

    embed: Callable[..., PyTree]
    layer: Callable[..., Any]
    head: Callable[..., Any]
    param_specs: Callable[[PyTree], PyTree] | None = None
    vocabulary: VocabularyParallel | None = None
    unembed: Callable[..., Unembedding] | None = None
    counted: Counted | None = None
    layer_piece: Callable[..., tuple[PyTree, PyTree]] | None = None
    check: Callable[[PyTree, int], None] | None = None
    halves: Halves | None = None
    tables: Callable[[PyTree], PyTree] | None = None


class Halves(NamedTuple):
    """A layer as two functions.

    first:  (layer_params, hidden, microbatch, rng) -> hidden between the two.
    second: (layer_params, hidden, microbatch, rng, beside) -> (what `layer` returns, beside). `beside` is a tree of
            arrays that the second half does not need. It returns them unchanged, and may order their computation, so
            that they are computed while it waits for an exchange between devices.
    second_params: patterns of dotted names, such as "mlp", of the layer's parameters that `second` alone reads.
            gather_ahead="half" gathers them while `first` is computed.
    """

    first: Callable[..., PyTree]
    second: Callable[..., tuple[Any, PyTree]]
    second_params: tuple[str, ...] = ()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Piece:
    """A piece of the sequences of a microbatch, equally long for all, as `Pipelined.layer_piece` is given it.

    number: i32[], which piece of each sequence, from 0.
    whole:  the microbatch with whole sequences, leaves [rows, length, ...] and [rows].
    past:   what the layer returned as `own` for all pieces, [rows, length, ...]. Only that of earlier pieces is
      defined; the rest must not be read, or be hidden by a mask. None where only shapes are asked for.
    """

    number: jax.Array
    whole: PyTree
    past: PyTree


def outer_params(params: Mapping) -> dict:
    """Returns what a `Pipelined` calls `outer`: everything besides the stacked layers."""
    return {name: value for name, value in params.items() if name != "layers"}


def restrict_to(like: PyTree, tree: PyTree) -> PyTree:
    """Returns the leaves of `tree` that `like` has, found by their paths, in the containers of `like`."""
    by_path = dict(jax.tree_util.tree_leaves_with_path(tree))
    return jax.tree_util.tree_map_with_path(lambda path, _: by_path[path], like)


@dataclass(frozen=True)
class VocabularyParallel:
    """Provides embedding and head with the vocabulary cut over a manual mesh axis, so that no pipeline stage waits.

    dims:  outer -> tree like it of int: the vocabulary's dim of each leaf, -1 where a leaf has none.
    embed: (outer, microbatch, rng, axis) -> this device's part of hidden; the sum over `axis` is hidden.
    head:  (outer, hidden, microbatch, rng, axis) -> LossOutput, equal on all devices of `axis`; it sums over
           the axis inside, and so does the gradient that it defines for hidden.
    shared: optional, outer -> tree like it of bool: replicated leaves whose gradient is a partial sum on each device
           (of its rows, see `jaxfb.parallel.rows`); other replicated leaves have the full gradient on every device.
    In all of them, leaves of `outer` that `dims` names are cut: [..., vocab / axis size, ...].
    """

    dims: Callable[[PyTree], PyTree]
    embed: Callable[..., PyTree]
    head: Callable[..., Any]
    shared: Callable[[PyTree], PyTree] | None = None


@dataclass(frozen=True)
class Counted:
    """Names parameters that are updated from counts over the global batch (such as expert load) and not by gradients.

    They depend only on the batch's reduced metrics, so the split of the batch cannot change them. The model reads them
    through `lax.stop_gradient`; they are never cast to a compute dtype, and no optimizer changes them.

    leaves: params -> tree like it of bool: True for such a leaf.
    before: optional, (params, metrics) -> params with additional leaves that the layers need before the backward. It
            costs one more forward pass without the head, whose metrics it receives; the added leaves have no gradient.
    after:  optional, (params, metrics) -> params; called once per applied update, after the optimizer. The metrics are
            those of another loss where an update is of that alone.
    """

    leaves: Callable[[PyTree], PyTree]
    before: Callable[[PyTree, dict], PyTree] | None = None
    after: Callable[[PyTree, dict], PyTree] | None = None
