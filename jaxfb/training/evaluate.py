"""Held-out loss: the same rows at every evaluation, in nats a token and in bits a byte."""

from __future__ import annotations

from typing import Any

import jax

from jaxfb.data import Baselines, bits_per_byte, count_baselines, evaluation_batches
from jaxfb.data.mixture import MixedRows
from jaxfb.data.packing import Rows
from jaxfb.process.position import here
from jaxfb.training.rows.batches import place, rows_here
from jaxfb.training.setup import Setup
from jaxfb.types import Sum

PyTree = Any
TERM = "cross_entropy"


class HeldOut:
    """The held-out rows of a run, and their use in evaluation."""

    def __init__(self, setup: Setup):
        self._setup = setup
        self._plan = setup.plan.by_purpose["eval"]
        self.rows: Rows = _choose_rows(setup)
        self._bytes_per_token = setup.corpus.bytes_per_token(self.rows) if len(self.rows) else None

    def evaluate(self, params: PyTree) -> dict[str, float]:
        """Returns eval/loss (nats a token), eval/accuracy, eval/tokens; eval/bits_per_byte where bytes are known.

        Of a mixture also eval/loss/<source>.

        Sums and weights of all batches are added before the one division. Empty without held-out rows.
        """
        if not len(self.rows):
            return {}
        if not isinstance(self.rows, MixedRows):
            loss, correct, weight = self._sums(params, self.rows)
            return self._named(loss / weight, correct / weight, weight)
        sums = {name: self._sums(params, rows) for name, rows in self.rows.parts.items() if len(rows)}
        loss, correct, weight = (sum(column) for column in zip(*sums.values(), strict=True))
        of_sources = {f"eval/loss/{name}": loss / weight for name, (loss, _, weight) in sums.items()}
        return self._named(loss / weight, correct / weight, weight) | of_sources

    def _sums(self, params: PyTree, held_out: Rows) -> tuple[float, float, float]:
        """Returns the summed loss, the correct tokens and the counted tokens of some rows."""
        loss, correct, weight = 0.0, 0.0, 0.0
        mine = rows_here(self._plan, self._setup.mesh)
        for batch in evaluation_batches(held_out, self._plan.rows, local_rows=lambda start, rows: mine):
            here.enter("evaluation")
            term, accuracy = self._forward(params, batch)
            loss, weight = loss + float(term.total), weight + float(term.weight)
            correct += float(accuracy.total)
        return loss, correct, weight

    def baselines(self) -> Baselines | None:
        """Returns what a unigram and a bigram of the training text reach on the very same tokens."""
        corpus = self._setup.corpus
        if not len(self.rows):
            return None
        return count_baselines(corpus.train, self.rows, corpus.vocab_size)

    def bits_per_byte(self, nats: float) -> float | None:
        """Returns a loss in the unit that does not depend on the tokenizer; None where the bytes are not known."""
        return bits_per_byte(nats, self._bytes_per_token) if self._bytes_per_token else None

    def _forward(self, params: PyTree, batch: dict):
        setup, plan = self._setup, self._plan
        placed = place(batch, plan, setup.mesh)
        out = setup.eval_forward(setup.model, params, placed, plan, forward_only=True)
        accuracy = out.metrics.get("accuracy", Sum(0.0, 0.0))  # a model of the user's own may have none
        return jax.device_get((out.terms[TERM], accuracy))

    def _named(self, nats: float, accuracy: float, weight: float) -> dict[str, float]:
        bits = self.bits_per_byte(nats)
        named = {"eval/loss": nats, "eval/accuracy": accuracy, "eval/tokens": weight}
        return named if bits is None else {**named, "eval/bits_per_byte": bits}


def _choose_rows(setup: Setup) -> Rows:
    rows, batches = setup.corpus.held_out, setup.config.eval.batches
    return rows if batches is None else rows.spread(batches * setup.plan.by_purpose["eval"].rows)
