"""The `tensor` axis: which dim of each weight is split, and annotations that keep activations split alike.

`tensor` stays automatic (Shardy inserts its collectives) while the engine runs every other axis by hand, so
a layer only has to annotate where its arrays are split. Column-parallel then row-parallel: one all-reduce after
attention and one after the MLP (Megatron-LM, arXiv:1909.08053), or with sequence parallelism its two halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxfb.parallel.sharding import axes_of
from jaxfb.platforms.compat import custom_vjp
from jaxfb.refusal import Refused

AXIS = "tensor"

# (module, leaf) -> the dim that is split, counted from the last; leaves not listed are whole on every device.
_SPLIT_DIM: dict[tuple[str, ...], int] = {
    **{
        (name, leaf): -1
        for name in ("query", "query_up", "key", "value", "key_value_up", "gate", "up", "project")
        for leaf in ("kernel", "bias", "lora_b")
    },
    **{(name, leaf): -2 for name in ("output", "down") for leaf in ("kernel", "lora_a")},
    ("embed", "embedding"): -2,
    ("head", "kernel"): -1,
    **{("experts", "gate"): -1, ("experts", "up"): -1, ("experts", "down"): -2},
    **{("experts", "gate_bias"): -1, ("experts", "up_bias"): -1},
}
_EXPERT_DIM = -3
_LONG = 2048
"""A product of so many features on a device takes as long as a gather of its tokens: 2,000 on v5p (459 TFLOP/s and 200
GB/s), 1,900 on an H100. 405B has 2,048 of them with tensor 8, and takes 68.8 s in place of 67.7 s if it gathers once.
"""
_VOCABULARY = (("embed", "embedding"), ("head", "kernel"))


def constrain(x: jax.Array, *spec: str | None) -> jax.Array:
    """Annotates `x` as split over `tensor` where `spec` has "tensor", whole over it where it has None.

    A `with_sharding_constraint` when the mesh in context has an automatic `tensor` axis of size > 1 that
    divides the dim; otherwise `x` itself, so model code runs unchanged outside any mesh. Other automatic
    axes are left to the compiler.

    Args:
      x: any array.
      spec: one entry per dim of x, "tensor" or None.
    Raises:
      ValueError: as many entries as dims were not given.
    """
    if len(spec) != x.ndim:
        raise Refused(f"[tensor] constrain needs one entry per dim: {spec=} for an array of {x.shape=}")
    mesh, size = jax.sharding.get_abstract_mesh(), num_shards()
    if size == 1:
        return x
    if any(name == AXIS and dim % size for name, dim in zip(spec, x.shape, strict=True)):
        return x
    others = any(mesh.shape[axis] > 1 for axis in automatic_axes() if axis != AXIS)
    free = P.UNCONSTRAINED if others else None
    return jax.lax.with_sharding_constraint(x, P(*(AXIS if name == AXIS else free for name in spec)))


def num_shards() -> int:
    """Returns the size of the `tensor` axis where XLA partitions over it, otherwise 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in automatic_axes() else 1


def on_shards(function: Callable[[jax.Array], jax.Array], x: jax.Array, spec: P) -> jax.Array:
    """Calls `function(x)` on every tensor shard of `x` by itself, where `spec` splits one dim over `tensor`.

    For collectives over other axes: XLA's partitioner leaves a split operand of an all-reduce split, but makes that
    of an all-gather or a reduce-scatter whole over `tensor` first: a gather more, and `tensor` times the bytes.

    Args:
      function: keeps the number of dims, and the size of the split one.
      spec: other axes may cut the same dim, as `pipe` does a vocabulary; x has this device's part of it.
    """
    size, split = num_shards(), [dim for dim, entry in enumerate(spec) if AXIS in axes_of(entry)]
    if size == 1 or len(split) != 1 or x.shape[split[0]] % size:
        return function(x)
    only = P(*(AXIS if dim == split[0] else None for dim in range(x.ndim)))
    return jax.shard_map(function, in_specs=only, out_specs=only, axis_names={AXIS}, check_vma=False)(x)


def on_head_shards(function: Callable[..., jax.Array], heads: Sequence[jax.Array], whole: Any) -> jax.Array:
    """Calls `function(*heads, whole)` on every tensor shard by itself: for kernels, which XLA's partitioner cannot cut.

    With `tensor` of size 1 too: beside any automatic axis JAX hands cuDNN's attention to that partitioner, where a
    program of several devices then does not compile (jax 0.10.2), and refuses a TPU's kernel.

    Args:
      function: [R, T, heads, K] arrays and `whole` to another [R, T, heads, K].
      heads: arrays [R, T, heads, K], cut by heads where `tensor` is the automatic axis; where it does not divide them
        all, every shard computes all heads.
      whole: a tree of arrays that every shard sees whole.
    """
    if automatic_axes() != [AXIS]:
        return function(*heads, whole)
    cut = P() if any(array.shape[2] % num_shards() for array in heads) else P(None, None, AXIS)
    specs = (*(cut for _ in heads), P())
    run = jax.shard_map(function, in_specs=specs, out_specs=cut, axis_names={AXIS}, check_vma=False)
    return run(*heads, whole)


def on_whole(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls `function(*arrays)` out of reach of XLA's partitioner, for kernels that it cannot cut; `tensor` is 1."""
    if automatic_axes() != [AXIS]:
        return function(*arrays)
    return jax.shard_map(function, in_specs=P(), out_specs=P(), axis_names={AXIS}, check_vma=False)(*arrays)


def automatic_axes() -> list[str]:
    """Returns the axes of the mesh in context that XLA partitions, those of size 1 among them."""
    types = _axis_types(jax.sharding.get_abstract_mesh())
    return [axis for axis, kind in types.items() if kind == AxisType.Auto]


def manual_size(axis: str) -> int:
    """Returns the size of an axis where collectives over it are written by hand in what is traced, otherwise 1."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if _axis_types(mesh).get(axis) == AxisType.Manual else 1


def residual_stream(x: jax.Array, sequence_parallel: bool) -> jax.Array:
    """Annotates what is between the parts of a layer, [rows, tokens, width].

    With sequence parallelism (arXiv:2205.05198) the tokens are split over `tensor`: norms, dropout and residual sums
    are of a device's own tokens, and what was one all-reduce after attention and MLP is a reduce-scatter, and an
    all-gather before the next. Otherwise, and where `tensor` does not divide the tokens, whole.
    """
    return constrain(x, None, AXIS if sequence_parallel else None, None)


def gathered_once_backward(x: jax.Array, features: int) -> jax.Array:
    """Returns x, whose gradient is gathered over `tensor` once, for both products that read it, where that is faster.

    For attention's output where the tokens are split. Each product would otherwise gather the gradient in a loop
    that multiplies meanwhile, and waits for the gather if it is shorter. By libtpu 0.0.48 a step of 70B on v5p:8x8x8,
    fsdp 64 x tensor 8, takes 12.55 s in place of 12.91 s. An MLP's products are long enough: with its output's
    gradient gathered once too, that step is no shorter and takes 0.13 GB more.

    Args:
      x: [rows, tokens, width].
      features: of a token, which the product that gave x multiplied; those of all devices.
    """
    shards = num_shards()
    return x if shards == 1 or features >= _LONG * shards else _gathered_once_backward(x)


@custom_vjp()
def _gathered_once_backward(x: jax.Array) -> jax.Array:
    return x


def _as_is(x: jax.Array):
    return x, None


def _gathered(_: None, cotangent: jax.Array):
    return (residual_stream(cotangent, sequence_parallel=False),)


_gathered_once_backward.defvjp(_as_is, _gathered)


def _axis_types(mesh: Any) -> dict[str, AxisType]:
    return {} if mesh.empty else dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def transformer_param_specs(params: Any) -> Any:
    """Returns the PartitionSpec of every leaf of the built-in transformer's params, naming `tensor`, and `expert` for
    experts.

    Queries, keys, values, gate and up are split by output, attention output and down by input, embedding
    and head by vocabulary, experts by expert besides; norms and routers are whole. The leading dim of stacked
    layers is never split.

    Args:
      params: the tree of `init_params`, arrays or ShapeDtypeStructs.
    Returns:
      A tree like params of PartitionSpecs.
    """
    return jax.tree_util.tree_map_with_path(_leaf_spec, params)


def _leaf_spec(path: tuple, leaf: Any) -> P:
    names = tuple(str(getattr(entry, "key", entry)) for entry in path)
    of_expert = names[-2:-1] == ("experts",) or names[-4:-2] == ("experts", "adapters")
    dim = _SPLIT_DIM.get(names[-2:])
    if dim is None and not of_expert:
        return P()
    spec: list[str | None] = [None] * len(leaf.shape)
    if dim is not None:
        spec[dim] = AXIS
    if of_expert:
        spec[-2 if names[-1].endswith("_bias") else _EXPERT_DIM] = "expert"
    return P(*spec)


def vocabulary_dims(outer: Any) -> Any:
    """Returns the vocabulary's dim of every leaf of the transformer's params beside the layers, -1 where there is
    none.
    """

    def dim(path, leaf):
        names = tuple(str(getattr(entry, "key", entry)) for entry in path)
        return _SPLIT_DIM[names] % len(leaf.shape) if names in _VOCABULARY else -1

    return jax.tree_util.tree_map_with_path(dim, outer)


def check_tensor_divides(config: Any, tensor: int) -> None:
    """Refuses a transformer whose heads, MLP or vocabulary the `tensor` axis does not divide.

    Args:
      config: a TransformerConfig.
      tensor: size of the mesh axis.
    Raises:
      ValueError: names the field, both numbers and the nearest legal choice.
    """
    mlp: tuple[str, ...] = ("mlp_size",)
    if getattr(config, "num_experts", 0):
        kinds = (*config.pattern, *config.leading)
        dense = mlp if any(not kind.experts for kind in kinds) else ()
        mlp = ("expert_mlp_size", "shared_expert_size", *dense)
    sizes = {name: getattr(config, name) for name in ("num_heads", "num_kv_heads", *mlp, "vocab_size")}
    for name, value in sizes.items():
        if value % tensor:
            common = gcd(*sizes.values())
            divisor = max(size for size in range(1, tensor + 1) if common % size == 0)
            choices = [{"tensor": divisor}]
            alone = all(other == name or not size % tensor for other, size in sizes.items())
            if alone and _accepts(config, name, larger := value + tensor - value % tensor):
                choices.insert(0, {name: larger})
            use = " or ".join(f"{key}={size}" for choice in choices for key, size in choice.items())
            raise Refused(
                f"[tensor] {name}={value} must be a multiple of tensor={tensor}; use {use}", choices
            )


def _accepts(config: Any, name: str, size: int) -> bool:
    """Returns whether the transformer's other sizes go with this one."""
    if name == "num_kv_heads":
        return config.num_heads % size == 0
    return name != "num_heads" or (size % config.num_kv_heads == 0 and config.hidden_size % (2 * size) == 0)
