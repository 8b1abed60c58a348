"""Reads the tensors of a directory into sharded arrays, one tensor at a time."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.architectures import architecture_of
from jaxfb.pretrained.family import depths
from jaxfb.pretrained.names import Leaf, Part, leaves_of, tensor_shapes, turn
from jaxfb.pretrained.repository import Repository
from jaxfb.refusal import Refused
from jaxfb.trainable import name_of

PyTree = Any
_COPIES = ("embed_tokens.", "shared_head.head.")
_ROWS_COMPARED = 4096  # of the embedding at a time


def load_params(repository: Repository, sizes: TransformerConfig, abstract_params: PyTree) -> PyTree:
    """Returns the parameters of a directory, cast and sharded like `abstract_params`.

    The host holds one tensor at a time, and of it only what the devices of this process need.

    Args:
      sizes: of `sizes_of(repository.config)`.
      abstract_params: tree of ShapeDtypeStruct like `init_params(sizes, key)`; a leaf without a sharding goes to the
        first device.
    Raises:
      ValueError: tensors are missing, unexpected or of other shapes; nothing was allocated then.
    """
    leaves = checked_leaves(repository, sizes)
    flat, structure = jax.tree_util.tree_flatten_with_path(abstract_params)
    return jax.tree.unflatten(
        structure, [load_leaf(repository, leaves[name_of(path)], leaf) for path, leaf in flat]
    )


def checked_leaves(repository: Repository, sizes: TransformerConfig) -> dict[str, Leaf]:
    """Returns our arrays by dotted path, after comparing all tensors of the directory with what they are made of.

    Raises:
      ValueError: tensors are missing, unexpected or of other shapes.
    """
    architecture = architecture_of(repository.config)
    leaves = leaves_of(architecture, sizes)
    # tensors that old files hold though they follow from config.json
    buffers = [name for name in repository.tensors if name.endswith("rotary_emb.inv_freq")]
    # some files store it twice
    tied = [architecture.outer_names["head.kernel"]] if sizes.tied_embeddings else []
    repository.check(tensor_shapes(leaves), ignored=[*tied, *buffers, *_behind(repository, sizes)])
    for head in tied:
        _check_tied(repository, head, architecture.outer_names["embed.embedding"])
    return leaves


def _check_tied(repository: Repository, head: str, embedding: str) -> None:
    """Refuses a head that is stored beside the embedding it is tied to and differs from it: it would be left out."""
    if head not in repository.tensors:
        return
    shape, other = (repository.tensors[name][1] for name in (embedding, head))
    ends = [*range(0, shape[0], _ROWS_COMPARED), shape[0]]
    parts = [(slice(*ends_of),) for ends_of in pairwise(ends)]
    read = lambda part: (repository.read(name, part) for name in (embedding, head))  # noqa: E731
    if shape != other or not all(np.array_equal(*read(part), equal_nan=True) for part in parts):
        raise Refused(
            f"[hf] {repository.path}: {head} differs from {embedding}, though config.json has (or leaves out) "
            "tie_word_embeddings=true, by which it is left out; write tie_word_embeddings=false into config.json to "
            f"read it, or remove {head}"
        )


def _behind(repository: Repository, sizes: TransformerConfig) -> list[str]:
    """Returns the tensors of layers of multi-token prediction that are not asked for, and the copies of embedding and
    head in the others.
    """
    layers = [f"model.layers.{sizes.num_layers + k}." for k in range(depths(repository.config))]
    places = (*layers[sizes.mtp_depth :], *(f"{layer}{name}" for layer in layers for name in _COPIES))
    return [name for name in repository.tensors if name.startswith(places)]


def load_leaf(repository: Repository, leaf: Leaf, like: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns one of our arrays, cast and sharded like `like`; the host has one of its tensors at a time."""
    sharding = like.sharding or SingleDeviceSharding(jax.local_devices()[0])
    depth = len(leaf.parts[0].index)
    own = _without_leading(sharding, depth)
    if not depth:
        return _read(repository, leaf, leaf.parts[0], like.dtype, own)
    whole = jax.jit(partial(jnp.zeros, like.shape, like.dtype), out_shardings=sharding)()
    put = jax.jit(_put, donate_argnums=0, out_shardings=sharding)
    for part in leaf.parts:
        one = _read(repository, leaf, part, like.dtype, own)
        whole = put(whole, one, np.asarray(part.index, np.int32))
        whole.block_until_ready()  # so that the host lets go of this tensor before it reads the next
    return whole


def load_part(repository: Repository, leaf: Leaf, part: Part) -> np.ndarray:
    """Returns a part of one of our arrays on the host, in the dtype that it is stored in."""
    found = repository.read(part.name, part.cut)
    return found.swapaxes(-1, -2) if leaf.turned else found


def _put(whole: jax.Array, one: jax.Array, index: jax.Array) -> jax.Array:
    start = [*index, *[jnp.int32(0)] * one.ndim]
    return jax.lax.dynamic_update_slice(whole, one[(None,) * len(index)], start)


def _read(repository: Repository, leaf: Leaf, part: Part, dtype: Any, sharding: Sharding) -> jax.Array:
    def share(index: Any) -> np.ndarray:
        found = repository.read(part.name, part.within(turn(index, leaf.turned)))
        return np.ascontiguousarray(found.swapaxes(-1, -2) if leaf.turned else found).astype(dtype)

    return jax.make_array_from_callback(turn(leaf.part_shape, leaf.turned), sharding, share)


def _without_leading(sharding: Sharding, depth: int) -> Sharding:
    """Returns the sharding of one layer's (or expert's) array, from that of the stack."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[depth:]))
