"""Finds which tokens of a microbatch count, and to which sequence each belongs.

What post-training losses ask of a microbatch before they aggregate: it is found for whole sequences, also where
a context axis cuts them, and for sequences rather than rows where several are packed in one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxfb.parallel.context import AXIS, size_here
from jaxfb.refusal import Refused


@dataclass(frozen=True)
class Sequences:
    """The counted tokens of a microbatch, sequence by sequence.

    mask:     float[rows, seq], the weight of each token, 0 where it does not count.
    segments: i32[rows, seq], which sequence of its row a token belongs to, by any positive number, such as that of a
              document (0: padding); None: a row is one.

    Under a context axis both are this device's tokens.
    """

    mask: jax.Array
    segments: jax.Array | None = None

    @classmethod
    def of(cls, microbatch: Mapping[str, jax.Array]) -> Sequences:
        """Makes sequences from the leaves `loss_mask` and, if present, `segments`.

        Raises:
          ValueError: one of them is not [rows, seq].
        """
        mask = microbatch["loss_mask"]
        for name in ("loss_mask", "segments"):
            if name in microbatch:
                check_per_token(name, microbatch[name], mask)
        return cls(mask.astype(jnp.promote_types(mask.dtype, jnp.float32)), microbatch.get("segments"))

    def where_counted(self, x: jax.Array) -> jax.Array:
        """Returns x [rows, seq], and 0 where the mask is 0; applied to inputs, so that NaN there does not reach
        gradients either.
        """
        return jnp.where(self.mask != 0, x, 0)

    def total(self, x: jax.Array) -> jax.Array:
        """Sums mask * x over this device's tokens: []."""
        return jnp.sum(self.where_counted(x) * self.mask)

    def totals(self, x: jax.Array) -> jax.Array:
        """Returns, for each token, the sum of mask * x over its whole sequence: [rows, seq]."""
        return self._spread(self.sums(x))

    def sums(self, x: jax.Array) -> jax.Array:
        """Sums mask * x for each sequence: [rows, 1], or with segments [rows, whole row's tokens + 1], the sequences of
        a row in the order of their numbers, behind place 0 for padding.

        Of whole sequences, and so equal on all devices of a context axis: count what is made of them `once`.
        """
        return self._sums(self.where_counted(x) * self.mask)

    def means(self, x: jax.Array) -> jax.Array:
        """Returns, for each token, the mean of x over its sequence, 0 where nothing there counts: [rows, seq]."""
        lengths = self.lengths()
        return jnp.where(lengths > 0, self.totals(x) / jnp.where(lengths > 0, lengths, 1), 0)

    def lengths(self) -> jax.Array:
        """Returns, for each token, the summed mask of its whole sequence: [rows, seq]."""
        return self._spread(self._sums(self.mask))

    def number(self) -> jax.Array:
        """Returns how many sequences have a counted token: [] in the mask's dtype; under a context axis a part
        of it.
        """
        number = jnp.sum(self._sums((self.mask != 0).astype(self.mask.dtype)) > 0).astype(self.mask.dtype)
        return self.once(number)

    def once(self, x: jax.Array) -> jax.Array:
        """Returns x on one device of the context axis and 0 on the others, so that the engine's sum over them is x."""
        return x if size_here() == 1 else jnp.where(lax.axis_index(AXIS) == 0, x, 0)

    def _sums(self, x: jax.Array) -> jax.Array:
        """Sums [rows, seq] to [rows, sequences of a row], over whole sequences."""
        if self.segments is None:
            sums = x.sum(1, keepdims=True)
        else:
            # a row of n tokens holds at most n sequences, and 0 is padding
            sums = jnp.zeros((x.shape[0], x.shape[1] * size_here() + 1), x.dtype)
            sums = sums.at[jnp.arange(x.shape[0])[:, None], ranks(self.segments)].add(x)
        return sums if size_here() == 1 else lax.psum(sums, AXIS)

    def _spread(self, sums: jax.Array) -> jax.Array:
        """Spreads [rows, sequences of a row] to [rows, seq]."""
        if self.segments is None:
            return jnp.broadcast_to(sums, self.mask.shape)
        return jnp.take_along_axis(sums, ranks(self.segments), axis=1)


def check_per_token(name: str, leaf: jax.Array, mask: jax.Array, dims: int = 2) -> None:
    """Refuses a leaf of a microbatch that does not begin with [rows, seq] as the mask does, or has other dims."""
    shape, wanted = jnp.shape(leaf), jnp.shape(mask)
    if len(shape) != dims or shape[:2] != wanted:
        like = "" if name == "loss_mask" else f", as loss_mask is with {wanted}"
        form = ", ".join(["rows", "seq", *["..."] * (dims - 2)])
        raise Refused(
            f"[loss] the leaf {name!r} must be [{form}]{like}, got the shape {shape}; a value of a row is to be given "
            "at each of its tokens"
        )


def ranks(segments: jax.Array) -> jax.Array:
    """Returns the rank of each number among the different positive ones of its row, from 1, and 0 for the others:
    i32[rows, seq].

    Numbers 1.. without a gap are their own ranks. Under a context axis the row is the whole one.
    """
    whole = segments if size_here() == 1 else lax.all_gather(segments, AXIS, axis=1, tiled=True)
    order = jnp.argsort(whole, axis=1)
    ordered = jnp.take_along_axis(whole, order, axis=1)
    is_new = (jnp.diff(ordered, axis=1, prepend=0) != 0) & (ordered > 0)
    rows = jnp.arange(whole.shape[0])[:, None]
    found = jnp.zeros(whole.shape, jnp.int32).at[rows, order].set(jnp.cumsum(is_new, axis=1, dtype=jnp.int32))
    if size_here() == 1:
        return found
    length = segments.shape[1]
    return lax.dynamic_slice_in_dim(found, lax.axis_index(AXIS) * length, length, axis=1)
