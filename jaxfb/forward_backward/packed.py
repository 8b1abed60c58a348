"""Rows of many lengths to array rows of one width and back: an `Arrangement` applied to arrays, on the host.

Before forward_backward where the plan has a token budget. Array rows hold one row each, or with packing several,
distinguished by `segments` (1.., 0 is padding), each with `positions` from 0 at its first token unless the batch has
them. A value per row becomes, with packing, that value at each of its tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np

from jaxfb.batch_plan import Arrangement, BatchPlan, PlanError, arrange
from jaxfb.forward_backward.arguments import prng_keys
from jaxfb.output import ForwardBackwardOutput
from jaxfb.platforms.compat import is_traced
from jaxfb.refusal import Refused
from jaxfb.types import PyTree

SEGMENTS, POSITIONS = "segments", "positions"


class Packed:
    """A batch in array rows, and the way back for what is collected from them.

    batch: leaves [array rows, width, ...]; `plan` cuts it, and its `outputs` are undone by `restore`.
    """

    def __init__(self, batch: dict, plan: BatchPlan):
        self.arrangement = arrange(plan, row_lengths(batch, plan).tolist())
        self.plan = self.arrangement.plan
        _check_lengths(batch, plan)
        self._packing = plan.packing
        self._row, self._column, self._segment = _index(self.arrangement)
        self._shape = (plan.rows, batch[SEGMENTS].shape[1])
        self.batch = self._arranged(batch)

    @property
    def padding_fraction(self) -> float:
        """Returns the share of the computed tokens that belong to no row."""
        return self.arrangement.padding_fraction

    def restore(self, outputs: PyTree, of_tokens: tuple[bool, ...] | None = None) -> PyTree:
        """Restores [array rows, width, ...] to [rows, length, ...] in the order of the rows, 0 where no token was.

        Without packing also [array rows, ...] to [rows, ...].

        Args:
          of_tokens: which leaves are per token, the `origin.of_tokens` of the output; None: those whose second dim is
            the width.
        """
        leaves, structure = jax.tree.flatten(outputs)
        known = of_tokens or [
            np.ndim(leaf) > 1 and leaf.shape[1] == self.arrangement.width for leaf in leaves
        ]
        return jax.tree.unflatten(structure, map(self._restored, leaves, known))

    def restored(self, out: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """Returns the output of a call on `batch` with what was collected in the order of the rows."""
        origin = replace(out.origin, of_tokens=None)
        return replace(out, outputs=self.restore(out.outputs, out.origin.of_tokens), origin=origin)

    def keys(self, rng: jax.Array | int | None) -> jax.Array | None:
        """Returns the same key for each row as without a budget: one key, or one for each array row from one per row.

        Raises:
          PlanError: rows share array rows.
        """
        rng = prng_keys(rng)
        if rng is None:
            return None
        if self._packing:
            raise PlanError(
                "[budget] packed rows share array rows, which have one key each, so dropout would depend on the "
                "packing; use packing=False, or no rng"
            )
        return (
            rng if rng.ndim == 0 else rng[np.array([row[0] if row else 0 for row in self.arrangement.bins])]
        )

    def _arranged(self, batch: dict) -> dict:
        valid = self._segment > 0
        first = (np.asarray(batch[SEGMENTS]) > 0).argmax(1)
        positions = np.where(valid, np.maximum(self._column - first[self._row], 0), 0).astype(np.int32)
        made = {
            name: jax.tree.map(lambda leaf: self._leaf(np.asarray(leaf), valid), leaf)
            for name, leaf in batch.items()
        }
        if not self._packing:
            return made
        # padding before a row's last token, such as that of a prompt padded on the left, stays padding
        segments = np.where(made[SEGMENTS] > 0, self._segment, 0)
        return {POSITIONS: positions, **made, SEGMENTS: segments}

    def _leaf(self, leaf: np.ndarray, valid: np.ndarray) -> np.ndarray:
        inside = valid
        if leaf.ndim > 1:
            values = leaf[self._row, self._column]
        elif self._packing:
            values = leaf[self._row]
        else:
            values, inside = leaf[self._row[:, 0]], np.array([bool(b) for b in self.arrangement.bins])
        blank = np.zeros([], leaf.dtype)
        return np.where(inside.reshape(inside.shape + (1,) * (values.ndim - inside.ndim)), values, blank)

    def _restored(self, output: Any, is_of_tokens: bool) -> np.ndarray:
        output, (rows, length) = np.asarray(output), self._shape
        width = self.arrangement.width
        if is_of_tokens:
            valid = self._segment > 0
            back = np.zeros((rows, length, *output.shape[2:]), output.dtype)
            back[self._row[valid], self._column[valid]] = output[valid]
            return back
        if self._packing:
            alike = output.ndim > 1 and output.shape[1] == width
            why = ", of which the second dim does not grow with the width" if alike else ""
            raise Refused(
                f"packed rows share array rows, so outputs must be per token, [{len(output)}, {width}, ...], got "
                f"shape {output.shape}{why}; return them per token, or use packing=False"
            )
        return output[:rows]


def is_arranged(batch: PyTree) -> bool:
    """Returns whether a batch has the leaf that every batch under a token budget has."""
    return isinstance(batch, dict) and SEGMENTS in batch


def _check_lengths(batch: dict, plan: BatchPlan) -> None:
    """Raises PlanError for a leaf with a second dim that is not the tokens', which would be rearranged with them."""
    length = batch[SEGMENTS].shape[1]
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if len(leaf.shape) > 1 and leaf.shape[1] != length:
            raise PlanError(
                f"[{plan.purpose}] a token budget rearranges leaves [rows, length, ...] token by token, and "
                f'batch["segments"] has length {length}, but batch{jax.tree_util.keystr(path)} has shape {leaf.shape}; '
                "put values that belong to rows into leaves [rows]"
            )


def row_lengths(batch: Any, plan: BatchPlan) -> np.ndarray:
    """Returns tokens of each row: its last token that belongs to a segment, counted on the host.

    Raises:
      ValueError: the batch is traced, or has no `segments`.
    """
    if is_traced(batch):
        raise PlanError(
            f"[{plan.purpose}] a token budget needs the lengths of the rows, which are not known inside jax.jit; "
            "call outside it, or pass jaxfb.forward_backward.Packed(batch, plan).batch with its .plan"
        )
    if not is_arranged(batch):
        raise PlanError(
            f'[{plan.purpose}] a token budget needs batch["segments"] i32[rows, length], 1 at the tokens of a row '
            "and 0 at padding"
        )
    plan.check_keys(batch)
    real = np.asarray(batch[SEGMENTS]) > 0
    plan.check_rows(real.shape[0])
    if (np.asarray(batch[SEGMENTS]) > 1).any() and plan.packing:
        raise PlanError(
            f"[{plan.purpose}] packing takes rows of one segment, but this batch has rows of several; use packing=False"
        )
    return np.where(real.any(1), real.shape[1] - real[:, ::-1].argmax(1), 0)


def _index(made: Arrangement) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns row, column and segment number (0: padding) of every token of every array row, i32[array rows, width]."""
    row, column, segment = (np.zeros((len(made.bins), made.width), np.int32) for _ in range(3))
    for line, bin_ in enumerate(made.bins):
        at = 0
        for number, one in enumerate(bin_):
            end = at + made.lengths[one]
            row[line, at:end], segment[line, at:end] = one, number + 1
            column[line, at:end] = np.arange(end - at)
            at = end
        if not at and bin_:
            row[line] = bin_[0]
    return row, column, segment
