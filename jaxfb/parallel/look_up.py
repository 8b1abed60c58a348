"""Finds the rows of tokens in an embedding, and sums its gradient over the tokens in float32.

A token that a microbatch has a thousand times adds a thousand terms to one row. Autodiff of `matrix[tokens]` adds them
in the dtype of the matrix: in bfloat16 the row of the commonest byte of a Python file, 1,902 of 8,192, came out 7%
wrong. Here the terms of a row are added in float32, and their sum is rounded once.

All functions here run inside `jax.shard_map` and see one device's shard.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.parallel.columns import Columns, columns_of
from jaxfb.parallel.table import Table, after
from jaxfb.parallel.tensor import AXIS, constrain, num_shards
from jaxfb.platforms.compat import custom_vjp


def look_up(matrix: jax.Array | Table, tokens: jax.Array) -> jax.Array:
    """Returns `matrix[tokens]`, float[..., width], for tokens of any shape; zeros, and no gradient, for a token outside
    [0, vocab).

    Such a token has no row: a negative one does not count from the end.

    Args:
      matrix: float[vocab, width], or a table of it in shards, of which each device gathers a few columns, or one part
        after the other. Its gradient is summed over the tokens in float32, or in its own dtype if that is wider.
      tokens: int[...].
    """
    vocab = matrix.whole_shape[0] if isinstance(matrix, Table) else matrix.shape[0]
    # an int32, since ids may be of a dtype that does not hold `vocab`
    is_inside = (tokens >= 0) & (tokens < np.int32(vocab))
    rows = _rows_inside(matrix, jnp.where(is_inside, tokens, 0))
    return jnp.where(is_inside[..., None], rows, 0)


def _rows_inside(matrix: jax.Array | Table, tokens: jax.Array) -> jax.Array:
    """Returns `matrix[tokens]` for tokens in [0, vocab)."""
    if isinstance(matrix, Table):
        columns = columns_of(matrix, tokens.size)
        return _in_parts(matrix, tokens) if columns is None else _in_columns(columns, matrix, tokens)
    exact = jnp.promote_types(matrix.dtype, jnp.float32) == matrix.dtype
    return matrix[tokens] if exact else _rows(matrix, tokens)


@custom_vjp()
def _rows(matrix: jax.Array, tokens: jax.Array) -> jax.Array:
    return matrix[tokens]


def _rows_forward(matrix, tokens):
    # not the matrix, which may have been gathered for this alone
    like = jnp.zeros((matrix.shape[0], 0), matrix.dtype)
    return matrix[tokens], (like, tokens)


def _rows_backward(residuals, cotangent):
    like, tokens = residuals
    (vocab, _), width = like.shape, cotangent.shape[-1]
    # whole, since its rows are taken in another order: split by tokens, each device would send zeros for the others'
    rows, tokens = constrain(cotangent.reshape(-1, width), None, None), tokens.reshape(-1)
    if vocab <= tokens.size * num_shards():
        zeros = constrain(jnp.zeros((vocab, width), jnp.float32), AXIS, None)
        return zeros.at[tokens].add(rows.astype(jnp.float32), mode="drop").astype(like.dtype), None
    places, sums = _summed_by_token(tokens, rows, vocab)
    zeros = constrain(jnp.zeros((vocab, width), like.dtype), AXIS, None)
    return zeros.at[places].add(sums.astype(like.dtype), mode="drop"), None


_rows.defvjp(_rows_forward, _rows_backward)


def _summed_by_token(tokens: jax.Array, rows: jax.Array, vocab: int) -> tuple[jax.Array, jax.Array]:
    """Sums the rows of each token in float32.

    Sums of as many rows as there are tokens, for a device with more rows of the vocabulary: those of [vocab, width]
    would take twice the memory of the gradient.

    Returns:
      (the token of each sum, int[n], beyond the vocabulary where there is none; the sums, float32[n, width]), for n
      tokens.
    """
    number = tokens.shape[0]
    order = jnp.argsort(tokens)
    tokens = tokens[order]
    run = jnp.cumsum(jnp.diff(tokens, prepend=tokens[:1]) != 0)
    sums = jnp.zeros(rows.shape, jnp.float32).at[run].add(rows[order].astype(jnp.float32), mode="drop")
    return jnp.full((number,), vocab, tokens.dtype).at[run].set(tokens, mode="drop"), sums


@custom_vjp()
def _in_parts(table: Table, tokens: jax.Array) -> jax.Array:
    number, place = table.places(tokens)
    found, before = jnp.zeros((*tokens.shape, table.whole_shape[1]), table.dtype), None
    for index in range(table.num_parts):
        here = number == index
        rows = after(table, before).part(index)[jnp.where(here, place, 0)]
        found, before = jnp.where(here[..., None], rows, found), found
    return found


def _in_parts_forward(table: Table, tokens: jax.Array):
    return _in_parts(table, tokens), (table, tokens)


def _in_parts_backward(residuals: tuple[Table, jax.Array], cotangent: jax.Array):
    table, tokens = residuals
    number, place = table.places(tokens)
    rows = table.whole_shape[0] // table.num_parts
    parts: list[jax.Array] = []
    for index in range(table.num_parts):
        # the zeros too, which a compiler may otherwise make of all parts before the first of them is needed
        zero = jnp.zeros((), table.sum_dtype)
        cotangent, zero, _ = lax.optimization_barrier((cotangent, zero, parts[:-1]))
        own = jnp.where((number == index)[..., None], cotangent, 0).astype(table.sum_dtype)
        grad = jnp.full((rows, cotangent.shape[-1]), zero)
        parts.append(table.scattered(grad.at[jnp.where(number == index, place, rows)].add(own, mode="drop")))
    return table.joined(parts), None


_in_parts.defvjp(_in_parts_forward, _in_parts_backward)


@custom_vjp(0)
def _in_columns(columns: Columns, table: Table, tokens: jax.Array) -> jax.Array:
    places = columns.places(table, columns.ask(tokens.reshape(-1)))
    return columns.give(columns.of(table)[places]).reshape(*tokens.shape, -1)


def _in_columns_forward(columns: Columns, table: Table, tokens: jax.Array):
    return _in_columns(columns, table, tokens), (table, tokens)


def _in_columns_backward(columns: Columns, residuals: tuple[Table, jax.Array], cotangent: jax.Array):
    table, tokens = residuals
    places = columns.places(table, columns.ask(tokens.reshape(-1)))
    found = columns.give_back(cotangent.reshape(tokens.size, -1))
    zeros = jnp.zeros((table.whole_shape[0], found.shape[-1]), table.sum_dtype)
    return columns.scattered(table, _with_added(zeros, places, found)), None


_in_columns.defvjp(_in_columns_forward, _in_columns_backward)


def _with_added(sums: jax.Array, places: jax.Array, rows: jax.Array) -> jax.Array:
    """Adds rows [devices, n, columns] to the sums at their places [devices, n], those of one device at a time.

    The compiler of TPUs sorts the places of a scatter. It takes 0.1 s to compile a sort of 8,192 of them, 2 s of twice
    and 6 s of sixteen times as many (libtpu 0.0.48).
    """

    def step(sums, of_device):
        places, rows = of_device
        return sums.at[places].add(rows, mode="drop"), None

    return lax.scan(step, sums, (places, rows))[0]
