"""Token sequences to rows for post-training: which tokens stand where, and which of them count.

Part of the data (rows of the language-model microbatch, one sequence a row). A token counts where it is a
target: the mask of slot t is that of targets[t].
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxfb.refusal import Refused


def token_rows(
    ids: Sequence[np.ndarray], counts: Sequence[np.ndarray], length: int | None = None
) -> dict[str, np.ndarray]:
    """Returns leaves [rows, length]: tokens, targets, segments i32 and loss_mask f32.

    Args:
      ids: i32[n] of each sequence; a row has n - 1 slots, slot t holds token t and its target, token t + 1.
      counts: bool[n] of each sequence: the tokens to be learnt (or scored). The first can never be a target.
      length: slots of a row; None is the longest. Segments are 1 where there is a token, 0 at padding.
    Raises:
      ValueError: a sequence has more slots than `length`.
    """
    slots = [max(len(one) - 1, 0) for one in ids]
    length = max(slots, default=0) if length is None else length
    dtypes = {"tokens": np.int32, "targets": np.int32, "segments": np.int32, "loss_mask": np.float32}
    rows = {name: np.zeros((len(ids), length), dtype) for name, dtype in dtypes.items()}
    for row, (one, counted, size) in enumerate(zip(ids, counts, slots, strict=True)):
        if size > length:
            raise Refused(
                f"[data] row {row} has {size + 1} tokens, a row of length {length} takes {length + 1}; "
                "raise the length, or cut the sequence"
            )
        rows["tokens"][row, :size], rows["targets"][row, :size] = one[:-1], one[1:]
        rows["segments"][row, :size], rows["loss_mask"][row, :size] = 1, counted[1:]
    return rows


def prompt_and_response(prompt: np.ndarray, response: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (ids, counts) of a prompt followed by a response; the response counts."""
    ids = np.concatenate([prompt, response]).astype(np.int32)
    return ids, np.arange(len(ids)) >= len(prompt)
