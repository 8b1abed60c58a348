"""Direct preference optimization: the work of `jaxfb dpo`.

    pairs -> rows of two segments -> log-probs of the reference, once -> [rows -> one update] -> held-out accuracy

A row is a pair: the chosen conversation is its segment 1, the rejected one its segment 2, so no loss looks across
rows and a pair is never torn. The reference is the policy at the start; its log-probs are data from then on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxfb.config.post_training import DPOConfig
from jaxfb.data.conversations import (
    cut_to,
    encode_pairs,
    longest,
    read_preferences,
    split_held_out,
    warn_of_shared,
)
from jaxfb.data.token_rows import token_rows
from jaxfb.losses.heads import log_prob_fn, policy_loss_fn
from jaxfb.losses.preference import PreferenceLoss
from jaxfb.refusal import Refused
from jaxfb.rl.rows import Rows, batches, count, digest
from jaxfb.rl.start import make_base
from jaxfb.rl.supervised import SupervisedWork, row_length, warn_of_cut, work_on
from jaxfb.training.machine import check_table

PyTree = Any
REFERENCE = "ref_log_probs"


class PreferenceWork(SupervisedWork):
    """Rows of pairs; before the first update they receive the reference's log-probs, which are saved with the state."""

    term = "preference"

    def __post_init__(self):
        super().__post_init__()
        self._pairs = {name: digest(_of_pairs(rows)) for name, rows in self._tables().items()}

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "pairs": self._pairs}

    def start(self, say: Callable[[str], None]) -> None:
        super().start(say)
        say("log-probs of the reference")
        for rows in self._tables().values():
            rows[REFERENCE] = self._reference_of(rows)

    def state(self) -> PyTree:
        return {**super().state(), "reference": self._log_probs()}

    def abstract_state(self) -> PyTree:
        return {**super().abstract_state(), "reference": self._log_probs()}

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        section, saved = self.base.config.preferences, record["plan"].get("pairs", {})
        for name, key in (("train", "path"), ("held_out", "held_out_path")):
            if saved.get(name, self._pairs[name]) != self._pairs[name]:
                raise Refused(_other_pairs(key, getattr(section, key)))
        super().check_resume(record, allow_changes)

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        for name, log_probs in state.pop("reference").items():
            self._tables()[name][REFERENCE] = np.asarray(log_probs)
        super().restore(state, record, allow_changes)

    def _tables(self) -> dict[str, Rows]:
        return {"train": self.stream.rows, "held_out": self.held_out}

    def _log_probs(self) -> dict[str, np.ndarray]:
        """Returns those of the reference by table; a table without rows has no element to save."""
        return {name: rows[REFERENCE] for name, rows in self._tables().items() if count(rows)}

    def _reference_of(self, rows: Rows) -> np.ndarray:
        """Returns float[rows, length], the log-probs by the present parameters, with the plan "logprob_ref"."""
        plan, model = self.plan.by_purpose["logprob_ref"], log_prob_fn(self.base.model)
        out = rows[REFERENCE].copy()
        for number, batch in enumerate(batches(_of_pairs(rows), plan)):
            got = self.base.forward(model, self.train_state.params, batch, plan, forward_only=True)
            part = slice(number * plan.rows, min((number + 1) * plan.rows, len(out)))
            out[part] = np.asarray(got.outputs["log_probs"])[: part.stop - part.start]
        return out


def _of_pairs(rows: Rows) -> Rows:
    """Returns the leaves that the pairs alone decide."""
    return {name: leaf for name, leaf in rows.items() if name != REFERENCE}


def _other_pairs(key: str, path: str | None) -> str:
    """Words a refusal without --allow-changes, since a reference of other pairs would make every number wrong."""
    return (
        f"[preferences] {key}={'null' if path is None else path} gives other pairs than the saved run has, whose "
        "log-probs of the reference are saved with it; use its file, tokenizer and template, or begin a new run in "
        "another run.dir"
    )


def make_preference_work(config: DPOConfig, fresh: bool = False) -> PreferenceWork:
    """Builds everything a run is made of; nothing is compiled. fresh: as for `make_base`."""
    base, section = make_base(config, fresh), config.preferences
    train = read_preferences(section.path)
    if section.held_out_path:
        held_out = read_preferences(section.held_out_path)
        warn_of_shared(train, held_out, "preferences")
    else:
        train, held_out = split_held_out(train, section.held_out_fraction, "preferences")
    base.check_characters(text for pair in train for text in (pair.chosen, pair.rejected))
    encoded = [encode_pairs(pairs, base.chat) for pairs in (train, held_out)]
    tokens = longest(*(ids for sides in encoded for ids, _ in sides))
    length = row_length(base, "preferences", tokens, sequences=2)
    check_table("preferences", len(train) + len(held_out), length)
    warn_of_cut("preferences", [side for sides in encoded for side in sides], length, sequences=2)
    dtype = np.float64 if config.precision.compute_dtype == "float64" else np.float32
    rows = [pair_rows(sides, length, dtype) for sides in encoded]
    check_answers(rows[0], section.path)
    loss = PreferenceLoss(section.kind, section.beta, section.label_smoothing)
    model = policy_loss_fn(base.model, loss)
    return work_on(PreferenceWork, base, rows[0], rows[1], model, ("logprob_ref",))


def check_answers(rows: Rows, path: str) -> None:
    """Warns of pairs that teach nothing, and refuses to train on those alone.

    Such are pairs without a token of one of their answers, which truncation makes and which weigh nothing, and pairs
    whose two conversations have the same tokens, so that no update makes one of them likelier than the other.
    """
    number, alike = count(rows), _alike(rows)
    answered = [((rows["segments"] == side) & (rows["loss_mask"] != 0)).any(1) for side in (1, 2)]
    lost = ~(answered[0] & answered[1])
    kinds = {
        f"no token of an answer among the first {rows['tokens'].shape[1] // 2} of each, and weigh nothing": lost,
        "two answers with the same tokens, and teach nothing": alike & ~lost,
    }
    found = [f"{which.sum()} of {number} pairs have {what}" for what, which in kinds.items() if which.any()]
    use = "remove them, or use a larger preferences.sequence_length where answers are cut"
    if found and (lost | alike).all():
        raise Refused(f"[preferences] nothing is learned from {path}: {'; '.join(found)}; {use}")
    if found:
        warnings.warn(f"[preferences] {'; '.join(found)}; {use}", stacklevel=3)


def _alike(rows: Rows) -> np.ndarray:
    """Returns bool[pairs]: whether the two conversations have the same tokens."""

    def side(row: int, segment: int) -> np.ndarray:
        at = rows["segments"][row] == segment
        return np.stack([rows["tokens"][row][at], rows["targets"][row][at]])

    return np.array([np.array_equal(side(row, 1), side(row, 2)) for row in range(count(rows))], bool)


def pair_rows(sides: Sequence[tuple[list, list]], length: int, dtype: type) -> Rows:
    """Makes leaves [pairs, length]: two conversations a row, of length / 2 slots at most each; log-probs still zero.

    sides: (ids, counts) of the chosen conversations, and of the rejected ones.
    """
    half = length // 2
    chosen, rejected = (token_rows(*cut_to(*side, half), half) for side in sides)
    return _side_by_side(chosen, rejected, length, dtype)


def _side_by_side(chosen: Rows, rejected: Rows, length: int, dtype: type) -> Rows:
    """Puts the rejected conversation behind the chosen one, as segment 2, with positions from 0 again."""
    number = count(chosen)
    rows = {name: np.zeros((number, length), leaf.dtype) for name, leaf in chosen.items()}
    rows |= {"positions": np.zeros((number, length), np.int32), REFERENCE: np.zeros((number, length), dtype)}
    for row in range(number):
        at = 0
        for segment, side in enumerate((chosen, rejected), 1):
            size = int(side["segments"][row].sum())
            for name, leaf in side.items():
                rows[name][row, at : at + size] = leaf[row, :size]
            rows["segments"][row, at : at + size] = segment
            rows["positions"][row, at : at + size] = np.arange(size)
            at += size
    return rows
