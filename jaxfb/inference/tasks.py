"""Tasks from JSON lines: multiple choice by log-probabilities, and exact match of a greedy continuation.

{"prompt": "The sky is", "choices": ["blue", "green"], "answer": 0}      multiple choice; answer: the index
{"prompt": "2 + 2 =", "answer": "4"}                                     exact match; answer: a text, or several
"""

from __future__ import annotations

import math
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxfb.data.tokenizer import Tokenizer
from jaxfb.inference.complete import Sampling, complete, encode_texts
from jaxfb.inference.model import Model
from jaxfb.inference.prompts import lines_of, prompt_in, read_text, record_of
from jaxfb.inference.scores import Score, Scorer
from jaxfb.refusal import Refused, text

DELIMITER = " "  # between a prompt and a choice, as in lm-evaluation-harness


class Choice(NamedTuple):
    """A question of multiple choice. answer: the index of the right one."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


class Question(NamedTuple):
    """A question whose answer is compared with texts, any of which is right. name: of the prompt, in refusals."""

    prompt: str
    answers: tuple[str, ...]
    name: str = "prompt"


def read_task(path: str | Path) -> list[Choice] | list[Question]:
    """Reads a file of questions, which are all of one kind.

    Raises:
      ValueError: the file is missing, empty or not UTF-8, or a line is neither or of the other kind; it names the line.
    """
    file = Path(path)
    lines = lines_of(read_text(file, "[eval]"))
    items = [_item(line, f"line {number} of {file}") for number, line in lines]
    if not items:
        raise Refused(f"[eval] {file} has no questions")
    choices = [item for item in items if isinstance(item, Choice)]
    questions = [item for item in items if isinstance(item, Question)]
    if choices and questions:
        raise Refused(f"[eval] {file} has questions with and without choices; make two files of them")
    return choices or questions


def evaluate(scorer: Scorer, items: Sequence[Choice] | Sequence[Question]) -> dict[str, float]:
    """Returns the scores of one task: see `choose` and `answer`."""
    choices = [item for item in items if isinstance(item, Choice)]
    if choices:
        return choose(scorer, choices)
    section = getattr(scorer.model.config, "eval", None)
    questions = [item for item in items if isinstance(item, Question)]
    return answer(scorer.model, questions, getattr(section, "tokens", 64))


def choose(scorer: Scorer, items: Sequence[Choice]) -> dict[str, float]:
    """Returns acc and acc_norm with their standard errors, and the number of questions.

    acc: the right choice has the highest log-probability. acc_norm: the highest per byte of its UTF-8, so that short
    choices have no advantage. Each is scored after the prompt and one space.
    """
    pairs = [
        encode_pair(scorer.model.tokenizer, item.prompt, DELIMITER + choice)
        for item in items
        for choice in item.choices
    ]
    scores = iter(scorer.score(pairs))
    right = np.array([_is_right(item, [next(scores) for _ in item.choices]) for item in items])
    return {**_mean("acc", right[:, 0]), **_mean("acc_norm", right[:, 1]), "questions": len(items)}


def answer(model: Model, items: Sequence[Question], tokens: int) -> dict[str, float]:
    """Returns exact_match with its standard error, and the number of questions.

    A greedy continuation of at most `tokens` tokens, up to its first line break where there is no chat template, is
    compared with the answers after `normalized`.
    """
    stops = ["\n"] if model.chat is None else []
    prompts, names = [item.prompt for item in items], [item.name for item in items]
    found = complete(model, prompts, Sampling(tokens), stops=stops, names=names)
    right = np.array(
        [
            normalized(texts[0]) in map(normalized, item.answers)
            for item, texts in zip(items, found, strict=True)
        ]
    )
    return {**_mean("exact_match", right), "questions": len(items)}


def normalized(text: str) -> str:
    """Returns a text in lower case without punctuation, articles (a, an, the) and extra white space, as SQuAD does."""
    plain = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", plain).split())


def encode_pair(
    tokenizer: Tokenizer, context: str, continuation: str, rendered: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids of both, encoded as one text and cut where the context ends, as lm-evaluation-harness does.

    White space at the end of the context counts to the continuation. What the tokenizer puts before every text is in
    the context. rendered: as `encode_texts`.
    """
    whole, first = encode_texts(tokenizer, [context + continuation, context.rstrip()], rendered)
    return whole[: len(first)], whole[len(first) :]


def _is_right(item: Choice, scores: Sequence[Score]) -> tuple[bool, bool]:
    sums = np.array([score.log_prob for score in scores])
    sizes = np.array([len(choice.encode()) for choice in item.choices])
    return bool(sums.argmax() == item.answer), bool((sums / sizes).argmax() == item.answer)


def _mean(name: str, right: np.ndarray) -> dict[str, float]:
    number, mean = len(right), float(right.mean())
    error = math.sqrt(mean * (1 - mean) / (number - 1)) if number > 1 else float("nan")
    return {name: mean, f"{name}_stderr": error}


def _item(line: str, where: str) -> Choice | Question:
    record = record_of(line, f"[eval] {where}")
    prompt, choices, found = (record.get(name) for name in ("prompt", "choices", "answer"))
    answers, named = _texts([found] if isinstance(found, str) else found), _texts(choices)
    if isinstance(prompt, str) and choices is None and answers:
        _check_texts(where, prompt=[prompt], answer=answers)
        _check_answers(where, answers)
        return Question(prompt, answers, prompt_in(where))
    if isinstance(prompt, str) and named and type(found) is int and 0 <= found < len(named):  # not a bool
        _check_texts(where, prompt=[prompt], choices=named)
        return Choice(prompt, named, found)
    raise Refused(
        f'[eval] {where} must be {{"prompt": text, "choices": [texts], "answer": index}} or {{"prompt": text, '
        '"answer": text or [texts]}'
    )


def _check_texts(where: str, **named: Sequence[str]) -> None:
    for name, texts in named.items():
        for one in texts:
            text(name, one, who=f"[eval] {where}:")


def _check_answers(where: str, answers: Sequence[str]) -> None:
    """Refuses an answer of which nothing is left to compare: a continuation without any words would be right."""
    for one in answers:
        if not normalized(one):
            raise Refused(
                f"[eval] {where}: nothing is left of answer {one!r} without articles and punctuation; give another "
                "answer, or make it a question with choices"
            )


def _texts(values: Any) -> tuple[str, ...]:
    """Returns the texts of a list, () where it is none or has anything else in it."""
    found = tuple(values) if isinstance(values, list) else ()
    return found if all(isinstance(one, str) and one for one in found) else ()
