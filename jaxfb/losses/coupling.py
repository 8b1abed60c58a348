"""Does a loss look across rows? Then microbatches would change it, and it is refused before anything is compiled.

The engine checks this before a call whose global batch is in more than one part (microbatches times replicas), by
running the loss itself: on made-up log-probs and leaves of the real names and dtypes, every total, every weight and the
gradient of three rows together must be those of the rows one by one.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.refusal import Refused, name_of
from jaxfb.types import LossOutput, Sum

PyTree = Any
ROWS = 3
GRADIENT = "the gradient"
# Far above the rounding of float32 sums, far below what one row does to another through a mean or a top-k.
_TOLERANCE = 1e-3
# Numbers in a row of the largest leaf that is made up: three such rows are 200 MB in float32.
_LARGEST = 2**24


def check_rows_uncoupled(loss: Callable, num_inputs: int, microbatch: PyTree, num_parts: int) -> None:
    """Raises ValueError if `loss(*inputs, microbatch)` couples rows and they are in more than one part.

    Args:
      loss: gives a LossOutput or Sum of `num_inputs` arrays float[rows, seq] and a microbatch.
      microbatch: arrays or shapes [rows, ...]. Only names, dtypes and dims after the first are read; leaves that a
        language model's microbatch has are filled with what they mean there.
    """
    if num_parts == 1:
        return
    leaves, structure = jax.tree_util.tree_flatten_with_path(microbatch)
    names = [str(getattr(path[-1], "key", path[-1])) if path else "" for path, _ in leaves]
    shapes = [(tuple(leaf.shape[1:]), jnp.dtype(leaf.dtype).name) for _, leaf in leaves]
    if (most := max(math.prod(dims) for dims, _ in shapes)) > _LARGEST:
        warnings.warn(
            f"the loss {getattr(loss, '__name__', loss)} was not checked for coupled rows: {most:,} numbers a row "
            "are too many for a test batch; call losses.coupling.check_rows_uncoupled with a shorter microbatch",
            stacklevel=2,
        )
        return
    found = coupled(loss, num_inputs, tuple(zip(names, shapes, strict=True)), structure)
    if found:
        raise Refused(
            f"the loss {getattr(loss, '__name__', loss)} couples rows: {found[0]} of three rows together is not what "
            f"they give one by one, so it would depend on how the global batch is split, here into {num_parts} parts. "
            "Sum over rows and let Sum.weight divide; compute statistics of groups or of the batch before the update "
            "(losses.advantages); or use one microbatch on one replica"
        )


@lru_cache(maxsize=64)
def coupled(loss: Callable, num_inputs: int, leaves: tuple, structure: Any) -> tuple[str, ...]:
    """Returns the names of quantities that do not add up over rows; leaves: ((name, (dims after the first, dtype)),
    ...).
    """
    rng = np.random.default_rng(0)
    made_up = {name: _made_up(name, dims, dtype, rng) for name, (dims, dtype) in leaves}
    microbatch = jax.tree.unflatten(structure, [made_up[name] for name, _ in leaves])
    mask = made_up["loss_mask"]
    floats = [np.where(mask != 0, rng.normal(-1, 0.5, mask.shape), 0) for _ in range(num_inputs)]
    with jax.ensure_compile_time_eval():
        together, apart = jax.tree.map(np.asarray, _both_ways(loss)(floats, microbatch))
    names = sorted(together, key=lambda name: name == GRADIENT)
    return tuple(name for name in names if not _close(together[name], apart[name]))


def _both_ways(loss: Callable) -> Callable:
    """Returns (floats, microbatch) -> the loss of all rows together, and the sum of the losses of single rows."""

    def values_and_gradient(floats, microbatch):
        def objective(floats):
            out = loss(*floats, microbatch)
            out = LossOutput({"loss": out}) if isinstance(out, Sum) else out
            if not isinstance(out, LossOutput):
                raise Refused(
                    f"[loss] {name_of(loss)} must return jaxfb.Sum(total, weight) or jaxfb.LossOutput, sums over rows "
                    f"and tokens, got a {type(out).__name__}"
                )
            return sum(jnp.sum(term.total) for term in out.terms.values()), out

        gradient, out = jax.grad(objective, has_aux=True)(floats)
        return jax.tree.map(jnp.asarray, _named(out)), gradient

    def one_by_one(floats, microbatch):
        alone = jax.tree.map(lambda leaf: jnp.asarray(leaf)[:, None], (floats, microbatch))
        named, gradient = jax.vmap(lambda row: values_and_gradient(*row))(alone)
        return jax.tree.map(lambda x: x.sum(0), named), [x[:, 0] for x in gradient]

    def run(floats, microbatch):
        (named, gradient), (added, stacked) = (
            values_and_gradient(floats, microbatch),
            one_by_one(floats, microbatch),
        )
        return named | {GRADIENT: jnp.stack(gradient)}, added | {GRADIENT: jnp.stack(stacked)}

    return jax.jit(run)


def _named(out: LossOutput) -> dict[str, Any]:
    """Returns the quantities that must add up over rows, by name."""
    named = {f"the total of term {name!r}": term.total for name, term in out.terms.items()}
    weighted = {name: term for name, term in out.terms.items() if term.weight is not None}
    named |= {f"the weight of term {name!r}": term.weight for name, term in weighted.items()}
    sums = {name: metric for name, metric in out.metrics.items() if isinstance(metric, Sum)}
    return named | {f"the metric {name!r}": metric.total for name, metric in sums.items()}


def _made_up(name: str, shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Makes up a leaf [3, ...] of that name: ragged masks, a few sequences a row; else small numbers of its dtype."""
    whole = (ROWS, *shape)
    length = shape[0] if shape else 1
    if name == "loss_mask":
        ends = np.array([length, max(1, length // 2), max(1, length - length // 4)])
        return (np.arange(length) < ends[:, None]).astype(dtype)
    if name == "segments":
        return np.broadcast_to(1 + np.arange(length) * min(4, length) // length, whole).astype(dtype)
    if name == "positions":
        return np.broadcast_to(np.arange(length), whole).astype(dtype)
    if jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
        return rng.normal(-1, 0.5, whole).astype(dtype)
    return rng.integers(0, 2, whole).astype(dtype)


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    scale = np.nanmax(np.abs(b), initial=0)
    return np.allclose(a, b, rtol=0, atol=_TOLERANCE * max(scale, 1e-6), equal_nan=True)
