"""Names your own rows by what they hold, so that the processes of a job notice that theirs differ."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
MOST_BYTES, MOST_ROWS = 2**26, 2**12


def fingerprint(rows: PyTree, num_rows: int) -> str:
    """Returns 16 hexadecimal digits of the values of rows; of many only samples, evenly over them.

    Objects, and arrays that are cut over several processes, are left out.

    Args:
      rows: a list of rows, of which at most 4096 are read; or a tree of arrays [num_rows, ...], of which at most 64 MiB
        are.
    """
    if isinstance(rows, list | tuple) and not hasattr(rows, "_fields"):  # a named tuple is a tree of arrays
        leaves = _leaves([rows[number] for number in _evenly(num_rows, MOST_ROWS)])
    else:
        leaves = _leaves(rows)
        size = sum(leaf.nbytes for leaf in leaves.values())
        if size > MOST_BYTES:
            which = _evenly(num_rows, max(1, num_rows * MOST_BYTES // size))
            leaves = {name: leaf[which] for name, leaf in leaves.items()}
    state = hashlib.blake2b(str(num_rows).encode(), digest_size=8)
    for name, leaf in leaves.items():
        array = np.asarray(leaf)
        state.update(f"{name} {array.dtype}{array.shape}".encode() + array.tobytes())
    return state.hexdigest()


def is_whole(rows: PyTree) -> bool:
    """Returns whether this process has all values, so that the fingerprint is that of a job of any size."""
    return all(leaf.is_fully_addressable for leaf in jax.tree.leaves(rows) if isinstance(leaf, jax.Array))


def _leaves(tree: PyTree) -> dict[str, Any]:
    """Returns the arrays of a tree that the host can read, by their paths; numbers become arrays."""
    named = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
    arrays = {name: leaf if hasattr(leaf, "dtype") else np.asarray(leaf) for name, leaf in named.items()}
    return {name: leaf for name, leaf in arrays.items() if _is_readable(leaf)}


def _is_readable(leaf: Any) -> bool:
    if isinstance(leaf, jax.Array):
        return leaf.is_fully_addressable and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
    return isinstance(leaf, np.ndarray | np.generic) and not leaf.dtype.hasobject


def _evenly(number: int, most: int) -> np.ndarray:
    """Returns at most so many of the numbers below `number`, in order, the first and the last among them."""
    return np.unique(np.linspace(0, number - 1, min(number, max(most, 2))).round().astype(np.int64))
