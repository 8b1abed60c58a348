"""Continuations of many prompts: in batches of a few widths, several samples of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxfb.data.tokenizer import Tokenizer
from jaxfb.inference.model import Model
from jaxfb.inference.prompts import Message, Prompt, check_prompt
from jaxfb.models.generate import generate, stream
from jaxfb.parallel.sharding import moved_by_program
from jaxfb.refusal import Refused, integer, is_several, number, refuse
from jaxfb.training.machine import check_continuation

WIDTH = 64  # prompts are padded to a multiple of it, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """Settings of a continuation.

    tokens:       of each, at most. temperature: 0 takes the likeliest token.
    top_k, top_p, min_p: draw among the k likeliest; among the fewest whose probabilities reach p; among those at least
      min_p times as likely as the likeliest. None: among all.
    samples:      of each prompt. seed: of the draws.
    """

    tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    samples: int = 1
    seed: int = 0

    def __post_init__(self):
        who = "[generate]"
        integer("tokens", self.tokens, who=who)
        integer("samples", self.samples, who=who)
        integer("seed", self.seed, who=who, least=0, most=2**32 - 1)
        number("temperature", self.temperature, who=who, least=0)

    @property
    def filters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("temperature", "top_k", "top_p", "min_p")}


def sampling_of(model: Model, **given: Any) -> Sampling:
    """Returns the settings that are given, and otherwise those of the run's section `eval`."""
    ours = {"tokens": model.config.eval.tokens, "temperature": model.config.eval.temperature}
    return Sampling(**ours | {name: value for name, value in given.items() if value is not None})


def is_answered(model: Model, raw: bool) -> bool:
    """Returns whether a prompt gets an answer on its own line, rather than to continue."""
    return model.chat is not None and not raw and model.chat.template != "none"


def complete(
    model: Model,
    prompts: Sequence[Prompt],
    how: Sampling,
    *,
    raw: bool = False,
    rendered: bool = False,
    batch: int = 16,
    stops: Sequence[str] = (),
    names: Sequence[str] | None = None,
    last: int | None = None,
) -> list[list[str]]:
    """Returns the continuations of each prompt, `how.samples` of them.

    The same prompts, seed and batch give the same continuations.

    Args:
      prompts: texts, or lists of messages. With a chat template a text is a user's message.
      raw: continue texts even so, each after the tokens that the tokenizer puts before a text.
      rendered: texts are those of a template already: names of special tokens in them are these tokens, the tokenizer
        puts none before a text that begins with its start token, and what ends an answer ends a continuation.
      batch: rows that are continued at the same time.
      stops: texts that end a continuation too; they are left out of it.
      names: what refusals call each prompt; None: by its number.
      last: so many tokens of a prompt are looked at, the last ones; None: all.
    Raises:
      ValueError: a prompt is empty or longer than memory allows, or a setting is out of range.
    """
    integer("batch", batch, who="[generate]")
    prompts, stops = _several("prompts", prompts), _several("stops", stops)
    check_continuation(model.sizes, how.tokens)
    names = names or [f"prompt {number} of {len(prompts)}" for number in range(1, len(prompts) + 1)]
    named = list(zip(prompts, names, strict=True))
    if rendered:
        read = encode_texts(model.tokenizer, prompts, rendered=True)
        encoded = [
            ids if len(ids) else ids_of(model, one[0], True, one[1])
            for ids, one in zip(read, named, strict=True)
        ]
    else:
        encoded = [ids_of(model, prompt, raw, name) for prompt, name in named]
    if last is not None:
        encoded = [ids[-integer("last", last, who="[generate]") :] for ids in encoded]
    rows = [(k, ids) for k, ids in enumerate(encoded) for _ in range(how.samples)]
    found: list[list[str]] = [[] for _ in prompts]
    ends = (replace(model, chat=None) if raw and not rendered else model).stop_tokens
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        drawn = _drawn(model, [ids for _, ids in part], how, ends, first)
        for (k, _), row in zip(part, drawn, strict=True):
            found[k].append(until(text_of(model, row, ends), stops))
    return found


def _several(name: str, values: Any) -> list:
    """Returns texts or prompts as a list; refuses one text, which would be taken letter by letter."""
    if not is_several(values):
        refuse(name, values, "a list", who="[generate]")
    return list(values)


def _drawn(model: Model, prompts: list, how: Sampling, ends: tuple[int, ...], first: int) -> np.ndarray:
    """Returns the tokens that continue the ids of prompts, in every process; first: the number of the first of them."""
    key = jax.random.key(how.seed) if not first else jax.random.fold_in(jax.random.key(how.seed), first)
    tokens, log_probs = generate(**_request(model, prompts, how, ends, key))
    if log_probs.is_fully_addressable and np.isnan(jax.device_get(log_probs)).any():
        raise _not_finite(model)
    if not tokens.is_fully_addressable and model.mesh is not None:
        tokens = moved_by_program(tokens, NamedSharding(model.mesh, PartitionSpec()))
    return np.asarray(jax.device_get(tokens))


def _not_finite(model: Model) -> Refused:
    return Refused(
        f"[generate] probabilities of tokens by {model.name} are nan, so its weights, or what is computed of them, "
        "are not finite; of 16-bit dtypes, bfloat16 overflows less than float16"
    )


def _request(model: Model, prompts: list, how: Sampling, ends: tuple, key: jax.Array) -> dict[str, Any]:
    """Returns the arguments with which `generate` and `stream` continue the ids of prompts."""
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.zeros((len(prompts), -(-lengths.max() // WIDTH) * WIDTH), np.int32)
    for row, ids in enumerate(prompts):
        tokens[row, : len(ids)] = ids
    return {
        "config": model.sizes,
        "params": model.params,
        "prompt_tokens": tokens,
        "max_new_tokens": how.tokens,
        "prompt_lengths": lengths,
        "stop_token": ends,
        "absent_ids": model.absent_ids,
        "key": key,
        **how.filters,
    }


def answers(model: Model, messages: Sequence[Message], how: Sampling) -> Iterator[str]:
    """Yields one answer to a conversation piece by piece, as it is made.

    Raises:
      ValueError: as `complete`; also in the middle of an answer, once probabilities are nan.
    """
    check_continuation(model.sizes, how.tokens)
    ids = ids_of(model, messages, raw=False)
    made, shown = [], ""
    for piece in stream(**_request(model, [ids], how, model.stop_tokens, jax.random.key(how.seed))):
        if np.isnan(piece.log_probs).any():
            raise _not_finite(model)
        made.extend(piece.tokens[0].tolist())
        text = text_of(model, np.array(made), model.stop_tokens)
        whole = text.rstrip("\ufffd")  # the first bytes of a character, until the others come
        if whole.startswith(shown) and whole != shown:
            yield whole[len(shown) :]
            shown = whole


def ids_of(model: Model, prompt: Prompt, raw: bool, name: str = "prompt") -> np.ndarray:
    """Returns the token ids of a prompt, which then waits for what is to follow. name: of the prompt, in refusals."""
    check_prompt(prompt, name)
    ids = _encoded(model, prompt, raw)
    if len(ids) == 0:
        begins = model.chat is not None and not raw and model.tokenizer.start_id is not None
        more = " (with `jaxfb generate --raw`, raw=True, an empty one begins a document)" * begins
        raise Refused(
            f"[generate] {name} is empty, and a continuation needs a first token; give it some text{more}"
        )
    return ids


def _encoded(model: Model, prompt: Prompt, raw: bool) -> np.ndarray:
    if not isinstance(prompt, str) or (model.chat is not None and not raw):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if model.chat is None:
            raise Refused(
                f"[generate] {model.name} has no chat template for messages; give the prompt as a string"
            )
        return model.chat.prompts([messages])[0]
    (ids,) = encode_texts(model.tokenizer, [prompt])
    if not prompt and len(ids) == 0 and model.tokenizer.start_id is not None:
        return np.array([model.tokenizer.start_id], np.int32)
    return ids


def encode_texts(tokenizer: Tokenizer, texts: Sequence[str], rendered: bool = False) -> list[np.ndarray]:
    """Returns i32[n] of each text, after the tokens that the tokenizer's file puts before every text (Llama, Gemma).

    rendered: names of special tokens are tokens, and a text that begins with the first of those tokens gets no other.
    """
    texts, before = list(texts), np.array(tokenizer.before_text, np.int32)
    read = tokenizer.encode_template(texts, [False] * len(texts)) if rendered else tokenizer.encode(texts)
    begun = [rendered and len(ids) > 0 and ids[0] in before[:1] for ids in read]
    return [ids if has else np.concatenate([before, ids]) for ids, has in zip(read, begun, strict=True)]


def text_of(model: Model, row: np.ndarray, ends: Sequence[int]) -> str:
    """Returns the text before the first stop token."""
    at = np.flatnonzero(np.isin(row, ends))
    return model.tokenizer.decode(row[: at[0]] if len(at) else row)


def until(text: str, stops: Sequence[str]) -> str:
    """Returns the text before the first of some texts."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
