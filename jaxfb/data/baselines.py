"""Computes the losses that counting alone reaches, on the very tokens that a model's loss counts.

Part of the data (a yardstick printed beside the held-out loss).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxfb.data.packing import Rows

CHUNK_TOKENS = 2**22
MAX_TOKENS = 2**24  # counted at most; more text sharpens a bigram table very little
STRENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
TUNING_SHARE = 10  # one train row in ten tunes the interpolation


@dataclass(frozen=True)
class Baselines:
    """Held-out cross-entropy in nats/token under counts from the train tokens."""

    unigram: float
    bigram: float


def count_baselines(train: Rows, held_out: Rows, vocab_size: int) -> Baselines:
    """Counts a unigram model with add-one smoothing and a bigram model p(y|x) = (count(x, y) + k p(y)) / (count(x) +
    k).

    k is chosen on train rows that the counts were not taken from, then everything is counted again.
    """
    train = train.spread(max(MAX_TOKENS // train.sequence_length, 1))
    strength = _tuned_strength(train, vocab_size)
    counts, pairs = _Counts.of(train, vocab_size), _pairs(held_out)
    return Baselines(counts.unigram(pairs[1]), counts.bigram(*pairs, strength))


def _tuned_strength(train: Rows, vocab_size: int) -> float:
    row = np.arange(len(train))
    tuning = row % TUNING_SHARE == 0
    if tuning.all():
        return STRENGTHS[len(STRENGTHS) // 2]
    counts = _Counts.of(train.select(row[~tuning]), vocab_size)
    pairs = _pairs(train.select(row[tuning]))
    return min(STRENGTHS, key=lambda strength: counts.bigram(*pairs, strength))


@dataclass(frozen=True)
class _Counts:
    """Counts of tokens, and of pairs as sorted keys previous * vocab_size + token."""

    vocab_size: int
    token: np.ndarray
    previous: np.ndarray
    pair_keys: np.ndarray
    pair: np.ndarray

    @staticmethod
    def of(rows: Rows, vocab_size: int) -> _Counts:
        previous, token = _pairs(rows)
        keys, pair = np.unique(previous * vocab_size + token, return_counts=True)
        count = lambda values: np.bincount(values, minlength=vocab_size)  # noqa: E731
        return _Counts(vocab_size, count(token), count(previous), keys, pair)

    def _probability(self, token: np.ndarray) -> np.ndarray:
        return (self.token[token] + 1) / (self.token.sum() + self.vocab_size)

    def unigram(self, token: np.ndarray) -> float:
        return float(-np.log(self._probability(token)).mean())

    def bigram(self, previous: np.ndarray, token: np.ndarray, strength: float) -> float:
        key = previous * self.vocab_size + token
        place = np.minimum(np.searchsorted(self.pair_keys, key), len(self.pair_keys) - 1)
        seen = np.where(self.pair_keys[place] == key, self.pair[place], 0)
        interpolated = (seen + strength * self._probability(token)) / (self.previous[previous] + strength)
        return float(-np.log(interpolated).mean())


def _pairs(rows: Rows) -> tuple[np.ndarray, np.ndarray]:
    """Returns input and target of every counted slot, i64[num_tokens] each."""
    step = max(CHUNK_TOKENS // rows.sequence_length, 1)
    batches = [rows.gather(np.arange(k, min(k + step, len(rows)))) for k in range(0, len(rows), step)]
    counted = [batch["loss_mask"] > 0 for batch in batches]
    joined = [
        np.concatenate([batch[name][mask] for batch, mask in zip(batches, counted, strict=True)])
        for name in ("tokens", "targets")
    ]
    return joined[0].astype(np.int64), joined[1].astype(np.int64)
