"""Several sources in one stream: which source, and which row of it, stands at each position.

A pure function of the seed, the weights and the position, so that it is the same on any number of hosts and replicas,
and a run is resumed from a few numbers. The stream is cut into blocks. In each a source has its exact share, and the
order within the block is drawn from the seed; so after any number of rows a source is less than a block's share away
from its weight. The rows of one source are reshuffled each time all of them were seen.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from jaxfb.data.config import check_shares
from jaxfb.data.order import row_order
from jaxfb.data.packing import Rows
from jaxfb.data.stored.cache import digest
from jaxfb.refusal import Refused, number, shown

BLOCK = 1024  # rows of the stream that are ordered together, at least
Weights = Mapping[str, float]


@dataclass(frozen=True)
class Mixture:
    """Rows of several sources with weights, for `jaxfb.Trainer(data=...)`.

    sources: name -> arrays [rows, ...] in a tree, or a sequence of rows; rows of all have one structure.
    weights: name -> share of the rows of training, of any sum, for every source.
    """

    sources: Mapping[str, Any]
    weights: Weights

    def __post_init__(self):
        if not isinstance(self.sources, Mapping) or not isinstance(self.weights, Mapping):
            raise Refused("[data] a Mixture takes two dicts, name -> rows and name -> weight")
        if not self.sources or {*self.sources} != {*self.weights}:
            raise Refused(
                f"[data] a Mixture needs a weight for each source; sources: {', '.join(map(shown, self.sources))}; "
                f"weights: {', '.join(map(shown, self.weights))}"
            )
        for name, weight in self.weights.items():
            number(f"weights[{name!r}]", weight, who="[data]", least=0)
        if not any(self.weights.values()):
            raise Refused("[data] every weight of the Mixture is 0; use 1.0 for one of them")
        check_shares(self.weights)


class Source(Protocol):
    """A source as the order of a mixture sees it: how many rows it has, and a fingerprint of them."""

    def __len__(self) -> int: ...

    @property
    def fingerprint(self) -> str: ...


@dataclass(frozen=True)
class MixedSources:
    """Sources whose rows are numbered one source after the other.

    parts:   name of a source -> its rows. weights: name -> its share of the rows of training, of any sum.
    """

    parts: Mapping[str, Source]
    weights: Weights

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    @property
    def starts(self) -> dict[str, int]:
        """Returns the number of each source's first row."""
        ends = np.cumsum([0, *map(len, self.parts.values())])
        return dict(zip(self.parts, ends.tolist(), strict=False))


@dataclass(frozen=True)
class MixedRows(MixedSources, Rows):
    """Rows of several sources; otherwise as `PackedRows`."""

    parts: Mapping[str, Rows]

    @property
    def sequence_length(self) -> int:
        return next(iter(self.parts.values())).sequence_length

    @property
    def num_tokens(self) -> int:
        return sum(rows.num_tokens for rows in self.parts.values())

    @property
    def fingerprint(self) -> str:
        return digest({name: rows.fingerprint for name, rows in self.parts.items()})

    def gather(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the leaves of those rows, [num_rows, sequence_length]; -1 gives a row of zeros."""
        rows = np.asarray(rows, np.int64)
        leaves = next(iter(self.parts.values())).gather(np.full(len(rows), -1))
        for start, part in zip(self.starts.values(), self.parts.values(), strict=True):
            here = np.flatnonzero((rows >= start) & (rows < start + len(part)))
            for name, leaf in part.gather(rows[here] - start).items():
                leaves[name][here] = leaf
        return leaves

    def select(self, rows: np.ndarray) -> MixedRows:
        """Returns these rows alone, those of each source together."""
        rows = np.asarray(rows, np.int64)

        def chosen(start: int, part: Rows) -> Rows:
            return part.select(rows[(rows >= start) & (rows < start + len(part))] - start)

        return MixedRows({n: chosen(self.starts[n], part) for n, part in self.parts.items()}, self.weights)


class MixedOrder:
    """Position in the endless stream -> row of the mixture.

    rows:  of all sources. seed: of the order.
    spans: (first position, weights by name) of each part of the stream; a new one begins where a resumed run has other
      weights. Sources that are no longer there keep their places in the spans in which they were.
    """

    def __init__(self, rows: MixedSources, seed: int, spans: list[tuple[int, Weights]] | None = None):
        self._rows, self._seed = rows, seed
        self.spans = [(0, dict(rows.weights))] if spans is None else spans
        self._starts, self._orders = rows.starts, _orders(rows, seed)

    def __call__(self, position: int) -> int:
        name, row = self.row(position)
        return self._starts[name] + row

    def row(self, position: int) -> tuple[str, int]:
        """Returns the source at a position, and which of its rows."""
        name, before = self.place(position)
        return name, self._orders[name](before)

    def place(self, position: int) -> tuple[str, int]:
        """Returns the source at a position, and how many rows of it were before."""
        index = self._span_at(position)
        start, weights = self.spans[index]
        name, before = _Span(tuple(weights.items()), self._seed, start).place(position - start)
        return name, before + self._in_spans(index, start).get(name, 0)

    def consumed(self, position: int) -> dict[str, int]:
        """Returns how many rows of each source stand before a position."""
        return self._in_spans(self._span_at(max(position - 1, 0)) + 1, position)

    def passes(self, position: int) -> dict[str, float]:
        """Returns how often each source was read through before a position."""
        consumed = self.consumed(position)
        return {name: consumed.get(name, 0) / len(part) for name, part in self._rows.parts.items()}

    def to_dict(self) -> dict[str, Any]:
        """Returns what `continued` needs, as JSON."""
        sources = {name: part.fingerprint for name, part in self._rows.parts.items()}
        return {"sources": sources, "spans": [[start, dict(weights)] for start, weights in self.spans]}

    def continued(self, saved: Mapping[str, Any], position: int) -> MixedOrder:
        """Returns the order of a saved run, with this one's weights from `position` on if they differ.

        Raises:
          ValueError: a source of the saved run has other rows now.
        """
        mine = self.to_dict()
        for name, fingerprint in mine["sources"].items():
            if saved["sources"].get(name, fingerprint) != fingerprint:
                raise Refused(
                    f"[data] the source {name!r} of the mixture has other rows than in the saved run; use the saved "
                    "run's text and settings, or give the new rows another name"
                )
        spans = [(start, weights) for start, weights in saved["spans"] if start < position or start == 0]
        weights = self.spans[-1][1]
        if _shares(tuple(spans[-1][1].items())) != _shares(tuple(weights.items())):
            spans = [span for span in spans if span[0] < position] + [(position, weights)]
        return MixedOrder(self._rows, self._seed, spans)

    def _span_at(self, position: int) -> int:
        return max(k for k, (start, _) in enumerate(self.spans) if start <= position)

    def _in_spans(self, number: int, end: int) -> Counter[str]:
        """Counts the rows of each source in so many spans, the last of which ends there."""
        counts: Counter[str] = Counter()
        ends = [*(start for start, _ in self.spans[1:number]), end]
        for (start, weights), stop in zip(self.spans[:number], ends, strict=False):
            counts.update(_Span(tuple(weights.items()), self._seed, start).counts(stop - start))
        return counts


@dataclass(frozen=True)
class _Span:
    """A part of the stream with one set of weights; positions are counted from its start.

    weights: (name, weight) of each source. start: where it begins in the whole stream.
    """

    weights: tuple[tuple[str, float], ...]
    seed: int
    start: int

    def place(self, position: int) -> tuple[str, int]:
        """Returns the source at a position, and how many rows of it stand before, within the span."""
        names = list(_shares(self.weights))
        block, slot = divmod(position, _block_size(self.weights))
        sources, ranks = _slots(self, block)
        source = int(sources[slot])
        return names[source], _quota(self.weights, block)[source] + int(ranks[slot])

    def counts(self, position: int) -> dict[str, int]:
        """Returns how many rows of each source stand before a position."""
        names = list(_shares(self.weights))
        block, slot = divmod(position, _block_size(self.weights))
        within = np.bincount(_slots(self, block)[0][:slot], minlength=len(names))
        whole = _quota(self.weights, block)
        return {name: whole[k] + int(within[k]) for k, name in enumerate(names)}


@lru_cache(maxsize=1024)
def _shares(weights: tuple[tuple[str, float], ...]) -> dict[str, Fraction]:
    """Returns the exact share of each source with a weight above 0."""
    exact = {name: Fraction(str(weight)) for name, weight in weights if weight}
    total = sum(exact.values())
    return {name: weight / total for name, weight in exact.items()}


def _block_size(weights: tuple[tuple[str, float], ...]) -> int:
    """Returns the rows of a block: enough for one of each source, so that no share of a block is negative."""
    return max(BLOCK, math.ceil(1 / min(_shares(weights).values())))


@lru_cache(maxsize=1024)
def _quota(weights: tuple[tuple[str, float], ...], block: int) -> list[int]:
    """Returns the rows of each source before a block: differences of rounded cumulative shares, whose sum is exact."""
    before, rows = Fraction(0), block * _block_size(weights)
    counts, last = [], 0
    for share in _shares(weights).values():
        before += share
        counts.append(math.floor(rows * before) - last)
        last += counts[-1]
    return counts


@lru_cache(maxsize=64)
def _slots(span: _Span, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each slot of a block, and how many slots of the block before it have the same source."""
    here = np.subtract(_quota(span.weights, block + 1), _quota(span.weights, block))
    sources = np.repeat(np.arange(len(here)), here)
    sources = np.random.default_rng([span.seed, span.start, block]).permutation(sources)
    ranks = np.empty(len(sources), np.int64)
    for source, count in enumerate(here):
        ranks[sources == source] = np.arange(count)
    return sources, ranks


def _orders(rows: MixedSources, seed: int) -> dict[str, Any]:
    """Returns the order of each source, which depends on the seed and its name alone."""
    return {
        name: row_order(len(part), int(digest([seed, name]), 16) % 2**63)
        for name, part in rows.parts.items()
        if len(part)
    }
