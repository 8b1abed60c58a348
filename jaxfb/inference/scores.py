"""Log-probabilities of given tokens: what perplexity, multiple choice and lm-evaluation-harness are made of."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxfb.batch_plan import BatchPlan
from jaxfb.inference.model import Model
from jaxfb.losses.heads import with_head
from jaxfb.losses.vocabulary.logits import cut_tokens, join_tokens, largest, project, summed, token_ids
from jaxfb.mesh import axis_size, data_parallel
from jaxfb.models.transformer import transformer
from jaxfb.refusal import Refused, integer
from jaxfb.types import LossOutput, Sum, Unembedding

WIDTH = 64  # rows are padded to a multiple of it, so that few programs are compiled
Ids = Sequence[int] | np.ndarray


class Score(NamedTuple):
    """The log-probability of a continuation in nats, whether greedy decoding would write it, and its tokens."""

    log_prob: float
    greedy: bool
    tokens: int


class Scorer:
    """Scores continuations by a model that is on a mesh (`open_model(..., on_mesh=True)`).

    length: tokens that are looked at; of a longer context the last.
    rows:   that are scored at the same time on each replica.
    """

    def __init__(self, model: Model, length: int | None = None, rows: int = 8):
        if model.mesh is None:
            raise Refused("[eval] scores need a model on a mesh; open it with on_mesh=True")
        self.model, self.length = model, _length_of(model) if length is None else integer("length", length)
        self._plan = BatchPlan(
            "eval",
            rows=integer("rows", rows) * data_parallel(model.mesh),
            rows_per_microbatch=rows,
            data_parallel=data_parallel(model.mesh),
        )
        self._scored = with_head(transformer(model.sizes), _score)
        self._multiple = WIDTH * axis_size(model.mesh, "context")

    @property
    def first_token(self) -> int:
        """Returns the id that a text begins with: the start of a document, or else its end.

        Files of a chat model that name no start token (Qwen's) name the end themselves.
        """
        tokenizer, named = self.model.tokenizer, {} if self.model.chat is None else self.model.chat.variables
        found = tokenizer.start_id if tokenizer.start_id is not None else tokenizer.eos_id
        name = named.get("bos_token") or named.get("eos_token")
        if name and (own := tokenizer.id_of(name)) is not None:
            found = own
        if found is None:
            raise Refused(
                "[eval] this tokenizer has no token to begin a text with; give every text a context"
            )
        return found

    def score(self, pairs: Sequence[tuple[Ids, Ids]]) -> list[Score]:
        """Returns the score of each continuation after its context, in order.

        pairs: (ids of the context, ids of the continuation); an empty context is `first_token`.

        Raises:
          ValueError: a continuation is empty or longer than `length`, or a score is nan.
        """
        rows = [self._row(*pair) for pair in pairs]
        order = sorted(range(len(rows)), key=lambda k: -len(rows[k][0]))
        found: list[Score] = [Score(0.0, False, 0)] * len(rows)
        for first in range(0, len(rows), self._plan.rows):
            part = order[first : first + self._plan.rows]
            for k, score in zip(part, self._scores([rows[k] for k in part]), strict=True):
                found[k] = score
        # of choices that are all nan the first would count as the best
        if any(math.isnan(score.log_prob) for score in found):
            dtype = self.model.config.precision.compute_dtype
            raise Refused(
                f"[eval] log-probabilities by {self.model.name} are nan, so its weights, or what is computed of them "
                f"in {dtype}, are not finite"
            )
        return found

    def score_text(self, ids: Ids) -> Score:
        """Returns the score of a whole text, every token of it counted once.

        It is cut as lm-evaluation-harness does: into windows of `length` tokens, the last one moved back so that it is
        full, each after the token before it.
        """
        scores = self.score(list(windows(ids, self.first_token, self.length)))
        return Score(
            sum(one.log_prob for one in scores),
            all(one.greedy for one in scores),
            sum(one.tokens for one in scores),
        )

    def _row(self, context: Ids, continuation: Ids) -> tuple[np.ndarray, int]:
        """Returns the ids to look at, and how many of the last of them are scored."""
        size = len(continuation)
        if not 1 <= size <= self.length:
            longer = f"; use --length {size} or more (length={size})" * (size > self.length)
            raise Refused(
                f"[eval] a continuation of {size} tokens must have from 1 to length={self.length}{longer}"
            )
        context = context if len(context) else [self.first_token]
        return np.concatenate([context, continuation])[-(self.length + 1) :].astype(np.int32), size

    def _scores(self, rows: list[tuple[np.ndarray, int]]) -> Iterator[Score]:
        longest = max(len(ids) for ids, _ in rows) - 1
        shape = self._plan.rows, -(-longest // self._multiple) * self._multiple
        batch = {name: np.zeros(shape, np.int32) for name in ("tokens", "targets", "segments")}
        mask = np.zeros(shape, np.float32)
        for row, (ids, size) in enumerate(rows):
            used = len(ids) - 1
            batch["tokens"][row, :used], batch["targets"][row, :used] = ids[:-1], ids[1:]
            batch["segments"][row, :used], mask[row, used - size : used] = 1, 1
        out = self.model.forward(
            self._scored, self.model.params, {**batch, "loss_mask": mask}, self._plan, forward_only=True
        )
        log_probs, greedy = (
            np.asarray(jax.device_get(out.outputs[name])) for name in ("log_probs", "greedy")
        )
        for row, (_, size) in enumerate(rows):
            counted = mask[row] > 0
            total = float(log_probs[row][counted].sum(dtype=np.float64))
            yield Score(total, bool((greedy[row][counted] > 0).all()), size)


def windows(ids: Ids, first_token: int, length: int) -> Iterator[tuple[Ids, Ids]]:
    """Yields (context, continuation) of consecutive windows, whose continuations are the text.

    A full window has `length` inputs; the last continuation may be shorter and has the more context.
    """
    ids = np.asarray(ids, np.int32)
    head = min(length, len(ids))
    if head:
        yield [first_token], ids[:head]
    for start in range(head, len(ids), length):
        end = min(start + length, len(ids))
        yield ids[max(0, end - length - 1) : start], ids[start:end]


def perplexity(scorer: Scorer, text: str) -> dict[str, float]:
    """Returns nats a token, and the perplexities that lm-evaluation-harness calls so.

    nats_per_token, token_perplexity: by this model's tokens. bits_per_byte, byte_perplexity, word_perplexity: the same
    sum over the bytes of the UTF-8 and over the words between white space, which compare models with other tokenizers.

    Raises:
      ValueError: the text is empty.
    """
    ids = scorer.model.tokenizer.encode([text])[0]
    if not len(ids):
        raise Refused("[eval] the text is empty")
    nats = -scorer.score_text(ids).log_prob
    sizes = {"bytes": len(text.encode()), "words": len(text.split())}
    return {
        "nats_per_token": nats / len(ids),
        "token_perplexity": _exp(nats / len(ids)),
        "bits_per_byte": nats / math.log(2) / sizes["bytes"],
        "byte_perplexity": _exp(nats / sizes["bytes"]),
        "word_perplexity": _exp(nats / max(sizes["words"], 1)),
        "tokens": len(ids),
        **sizes,
    }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _length_of(model: Model) -> int:
    section = getattr(model.config, "data", None)
    for name in ("conversations", "preferences"):
        section = section or getattr(model.config, name, None)
    return getattr(section, "sequence_length", 1024)


def _score(unembedding: Unembedding, microbatch, axis: str | None) -> LossOutput:
    """Returns as outputs the log-prob of each target, and whether it is the likeliest token."""
    targets, mask = microbatch["targets"], microbatch["loss_mask"]

    def step(tokens):
        hidden, target = tokens
        logits = project(hidden, unembedding.kernel, unembedding.softcap)
        top = largest(jnp.max(logits, axis=-1), axis)
        total = summed(jnp.exp(logits - top[:, None]).sum(-1), axis)
        here = token_ids(logits, target.dtype, axis) == target[:, None]
        picked = summed(jnp.where(here, logits, 0).sum(-1), axis)
        return picked - top - jnp.log(total), (picked >= top).astype(logits.dtype)

    chunks = lax.map(step, cut_tokens(unembedding.chunk, unembedding.hidden, targets))
    log_probs, greedy = (jnp.where(mask > 0, join_tokens(x, targets.shape), 0) for x in chunks)
    return LossOutput(
        {"nll": Sum(-log_probs.sum(), mask.sum())}, {}, {"log_probs": log_probs, "greedy": greedy}
    )
