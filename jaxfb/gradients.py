"""Treats the gradients between forward_backward and the update: unscale, measure, clip.

Everything here sees the gradient of the whole global batch, reduced over replicas and divided by its weights.
The order: `unscale`; `global_norm`; not finite? skip the update and name the leaves; `clip_by_global_norm`.
"""

from __future__ import annotations

from numbers import Real

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.refusal import Refused, shown
from jaxfb.types import PyTree

LARGEST = float(np.finfo(np.float32).max)
"""The largest float32: norms are float32, and so is a loss scale."""


def unscale(grads: PyTree, loss_scale: jax.typing.ArrayLike | None) -> PyTree:
    """Returns gradients without the loss scale, in float32 (float64 for f64 leaves). None: there was no scale."""
    if loss_scale is None:
        return grads
    return jax.tree.map(lambda g: _wide(g) / jnp.asarray(loss_scale, _wide(g).dtype), grads)


def global_norm(tree: PyTree) -> jax.Array:
    """Returns L2 norm over all leaves together: f32[], or f64[] if any leaf is f64. Leaves are widened, then squared.

    Outside shard_map a sharded leaf is one array, so every parameter is counted once on any mesh.
    """
    return norm_of(squares(tree))


def squares(tree: PyTree) -> list[jax.Array]:
    """Returns the sum of squares of each leaf, float[], widened before it is squared."""
    return [jnp.sum(jnp.square(_wide(leaf))) for leaf in jax.tree.leaves(tree)]


def norm_of(squares: list[jax.Array]) -> jax.Array:
    """Returns the global norm of leaves with those sums of squares."""
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_by_global_norm(
    grads: PyTree, norm: jax.Array, max_norm: float | None, convention: str = "exact"
) -> tuple[PyTree, jax.Array]:
    """Scales gradients down to a global norm of `max_norm`; returns them and the coefficient, float[].

    norm:       `global_norm(grads)`. Where it is not finite, neither is the result: skip the update.
    max_norm:   None does not clip (coefficient 1); 0 or less is refused.
    convention: "exact", min(1, max_norm / norm), as optax; "torch", min(1, max_norm / (norm + 1e-6)), as
                Megatron too.
    """
    check_clipping(max_norm, convention, ("max_norm", "convention"))
    if max_norm is None:
        return grads, jnp.ones_like(norm)
    max_norm = float(max_norm)
    coefficient = max_norm / jnp.maximum(norm + 1e-6 if convention == "torch" else norm, max_norm)
    return jax.tree.map(lambda g: g * coefficient.astype(g.dtype), grads), coefficient


def check_clipping(
    max_norm: float | None,
    convention: str = "exact",
    names: tuple[str, str] = ("max_grad_norm", "clip_convention"),
) -> None:
    """Raises ValueError for what `clip_by_global_norm` cannot do; to be called before anything is traced.

    names: what the caller calls the two arguments.
    """
    norm_name, convention_name = names
    real = isinstance(max_norm, Real) and not isinstance(max_norm, bool)
    if max_norm is not None and not (real and 0 < max_norm <= LARGEST):
        raise Refused(
            f"{norm_name} must be positive and finite, got {shown(max_norm)}; use None to disable clipping",
            [{norm_name: None}],
        )
    if not isinstance(convention, str) or convention not in ("exact", "torch"):
        raise Refused(
            f'{convention_name} must be "exact" or "torch", got {shown(convention)}; use "exact"',
            [{convention_name: "exact"}],
        )


def nonfinite_leaves(tree: PyTree) -> jax.Array:
    """Flags the leaves that make `global_norm` inf or nan: bool[num_leaves], in the order of `jax.tree.leaves`.

    Those are the leaves with an inf or a nan, or with a norm that overflows. Where only the sum over all leaves
    overflows, all are flagged.
    """
    return nonfinite_squares(squares(tree))


def nonfinite_squares(squares: list[jax.Array]) -> jax.Array:
    """Returns what `nonfinite_leaves` returns of leaves with those sums of squares."""
    if not squares:
        return jnp.zeros([0], bool)
    flags = ~jnp.stack([jnp.isfinite(square) for square in squares])
    return flags | (~jnp.isfinite(sum(squares)) & ~jnp.any(flags))


def num_zeros(tree: PyTree) -> jax.Array:
    """Counts the numbers that are exactly zero, over all leaves together: float[]."""
    # by rows in int32, which float32 cannot count beyond 2**24, and then in float, which does not overflow
    rows = [jnp.sum(jnp.atleast_1d(leaf) == 0, axis=-1, dtype=jnp.int32) for leaf in jax.tree.leaves(tree)]
    return sum((jnp.sum(row.astype(float)) for row in rows), jnp.zeros([], float))


def names_of(flags: jax.typing.ArrayLike, tree: PyTree) -> list[str]:
    """Returns, on the host, the paths of the leaves whose flag is set, such as `["['layers']['w1']"]`."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    return [path for path, flag in zip(paths, np.asarray(flags), strict=True) if flag]


def _wide(x: jax.Array) -> jax.Array:
    """Returns float32, or float64 where it is already."""
    return jnp.asarray(x, jnp.promote_types(jnp.result_type(x), jnp.float32))
