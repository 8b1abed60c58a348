"""Errors that JAX and Flax raise inside a model's functions, in sentences that tell what to write instead."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from jaxfb.refusal import Refused, shown

_OF_ONE_KEY = ("accepts a single key", "``rngs`` argument")
"""How jax.random and Linen name an array of keys where they need one."""

_FROM_OUTSIDE = "TraceContextError"
"""What Flax raises where a trace changes a Variable that was made before it."""

_OF_OTHER_AXES = re.compile(r"(?:spec=|axis: .* of )(P\(.*?\))(?: and mesh=| is not found in mesh)")
"""How JAX refuses a sharding constraint over axes of which a device computes its own part, or that are none of the
mesh, and the constraint."""

_OF_ANOTHER_MESH = re.compile(r"Context mesh .* should match the mesh of sharding .* passed to")
"""How JAX refuses to index an array that lies on the mesh, and that a function has from outside."""


@contextmanager
def explained(rng: jax.Array | None) -> Iterator[None]:
    """Raises a known error of a library as a refusal, and any other as it is.

    rng: what the function was given for it.

    Raises:
      ValueError: `rng` is taken for one key, a Variable or an array is of outside, or a constraint names another axis.
    """
    try:
        yield
    except Exception as error:
        for explain in (_own_variables, _keys_of_rows, _constraints, _own_arrays):
            if sentence := explain(error, rng):
                raise Refused(sentence) from error
        raise


def _keys_of_rows(error: Exception, rng: jax.Array | None) -> str | None:
    """Returns what to write where `rng` is taken for one key."""
    if rng is None or not _is_value_error(error) or not any(words in str(error) for words in _OF_ONE_KEY):
        return None
    return (
        "rng must be taken as an array of keys, one for each row of the microbatch, so that dropout does not "
        f"depend on how rows are cut, but the loss function takes it for one key ({shown(str(error))}); draw row "
        "by row, jax.vmap(lambda row, key: ...)(microbatch, rng)"
    )


def _own_variables(error: Exception, _: jax.Array | None) -> str | None:
    """Returns what to write where a Variable of Flax NNX is changed that was made outside of the function."""
    if type(error).__name__ != _FROM_OUTSIDE:
        return None
    kind = re.search(r"Cannot mutate (\w+)", str(error))
    return (
        f"the loss function changes a {kind[1] if kind else 'Variable'} of NNX that was made outside of it, as a "
        "BatchNorm and a Dropout do when they are called; put nnx.merge(graph, params, rest, copy=True) together "
        "in the loss function"
    )


def _constraints(error: Exception, _: jax.Array | None) -> str | None:
    """Returns what to write where a sharding constraint names an axis that is not "tensor"."""
    found = _OF_OTHER_AXES.search(str(error)) if _is_value_error(error) else None
    return found and (
        f"a sharding constraint in the model may name no axis but 'tensor', got {found[1]}, since a device is "
        "given its own rows, tokens, experts and layers already; leave the other axes out, or map their logical "
        "names to None in Flax's rules"
    )


def _own_arrays(error: Exception, _: jax.Array | None) -> str | None:
    """Returns what to write where an array is indexed that lies on the mesh, and comes from outside."""
    if not _is_value_error(error) or not _OF_ANOTHER_MESH.search(str(error)):
        return None
    return (
        "the model indexes an array that it has from outside and that lies on a mesh, such as the embedding of a "
        "frozen teacher, which JAX refuses here; make it a part of the parameters, and name those that are trained "
        'in trainable=["student"], or close over jnp.asarray(jax.device_get(array))'
    )


def _is_value_error(error: Exception) -> bool:
    return isinstance(error, ValueError) and not isinstance(error, Refused)
