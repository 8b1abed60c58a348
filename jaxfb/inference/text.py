"""Perplexity of a text: `jaxfb eval RUN --text FILE`."""

from __future__ import annotations

import math
from pathlib import Path

from jaxfb.inference.scores import Scorer
from jaxfb.refusal import Refused


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


def read_text(path: str | Path) -> str:
    """Returns the text of a file.

    Raises:
      ValueError: there is no such file, or it is not UTF-8.
    """
    file = Path(path)
    if not file.is_file():
        raise Refused(f"[eval] there is no file {file}")
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"[eval] {file} is not UTF-8: {error.reason} at offset {error.start}") from None


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf
