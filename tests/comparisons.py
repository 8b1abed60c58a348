"""Comparisons of trees that several files of tests make."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def close(got, wanted, tolerance=1e-12):
    """Asserts that two trees are of one structure and each leaf the same, relative to its largest number."""
    chex.assert_trees_all_equal_structs(got, wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        worst, scale = np.max(np.abs(a - b), initial=0), np.max(np.abs(b), initial=0)
        assert worst <= tolerance * (scale or 1), (jax.tree_util.keystr(path), worst, scale)


def worst_error(got, wanted):
    """Returns the largest error relative to the largest number of its leaf, over all leaves."""
    one = lambda a, b: np.abs(a - b).max() / np.abs(b).max()  # noqa: E731
    return max(jax.tree.leaves(jax.tree.map(one, *map(jax.device_get, (got, wanted)))))


def on_the_host(tree):
    """Returns every leaf as numpy, PRNG keys as their data; a copy, since a step's state is donated."""
    plain = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.array(plain(leaf)) for leaf in jax.tree.leaves(tree)]
