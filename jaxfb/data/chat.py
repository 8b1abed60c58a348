"""Chat templates: messages become one text, whose special tokens are the template's and never the messages'.

Part of the data step (post-training's documents, and the prompts of a policy). A template is that of the tokenizer,
written in Jinja as Hugging Face's are, or one of three built-in ones. The text of a prompt is encoded by itself, and so
is each answer, so that a model is prompted with the same token ids that it was trained on.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import yaml

from jaxfb.data.jinja import compile_template
from jaxfb.data.tokenizer import Tokenizer
from jaxfb.process.whole_file import write_whole
from jaxfb.refusal import Refused, shown

Message = Mapping[str, str]
_SOURCES = {
    "chatml": "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' }}"
    "{{- (end if m['role'] == 'assistant' else '') + '\\n' }}{%- endfor %}"
    "{{- '<|im_start|>assistant\\n' if add_generation_prompt else '' }}",
    "plain": "{%- for m in messages %}{{- m['role'] | capitalize + ': ' + m['content'] }}"
    "{{- end if m['role'] == 'assistant' else '\\n\\n' }}{%- endfor %}"
    "{{- 'Assistant: ' if add_generation_prompt else '' }}",
    "none": "{%- for m in messages %}{{- m['content'] + (end if m['role'] == 'assistant' else '') }}{%- endfor %}",
}
BUILT_IN = tuple(_SOURCES)
FILE = "chat.json"
# One of these that a conversation does not contain is put into names of special tokens that a message contains.
_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


class Piece(NamedTuple):
    """Text between two ends of tokens, in parts that are encoded apart. learnt: what the assistant is to write."""

    parts: tuple[str, ...]
    learnt: bool = False


@dataclass(frozen=True)
class Chat:
    """Turns messages into token ids, and knows which ids end an answer.

    tokenizer:   that the ids are of.
    template:    a name in BUILT_IN, or the source of a Jinja template.
    stop_tokens: ids, any of which ends an answer.
    variables:   what the template reads beside the messages: bos_token, eos_token and the like, by name.
    """

    tokenizer: Tokenizer
    template: str
    stop_tokens: tuple[int, ...]
    variables: Mapping[str, str] = field(default_factory=dict)

    def prompts(self, conversations: Sequence[Sequence[Message]]) -> list[np.ndarray]:
        """Returns i32[n] of each conversation, which then waits for the assistant.

        Raises:
          ValueError: the template refuses the messages.
        """
        return [ids for ids, _ in self._encoded([self._pieces(one, "none", True) for one in conversations])]

    def encode(
        self, conversations: Sequence[Sequence[Message]], learn: str = "assistant", who: str = "conversations"
    ) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Returns (ids i32[n], counts bool[n]) of each conversation; what counts is to be learnt.

        learn: "assistant", all its messages, or "last", the last of them. An answer is learnt up to and with the
        stop token that ends it. who: the section of the config that refusals name.

        Raises:
          ValueError: the template refuses the messages, writes an answer otherwise once others follow, or ends it
            with no stop token.
        """
        pieces = []
        for number, one in enumerate(conversations):
            try:
                pieces.append(self._pieces(one, learn, False))
            except ValueError as error:
                raise Refused(f"[{who}] item {number}: {str(error).partition('] ')[2]}") from None
        encoded = self._encoded(pieces)
        counts = [self._counts(*one, who) for one in zip(pieces, encoded, strict=True)]
        return [ids for ids, _ in encoded], counts

    def render(self, messages: Sequence[Message], opening: bool = False) -> str:
        """Returns the text of the messages, with what stands before the assistant's next words if `opening`.

        Names of special tokens in it are the template's and the messages' alike: to be read, not to be encoded.
        """
        plain = [dict(message) for message in messages]
        return self._compiled(messages=plain, add_generation_prompt=opening, **self.variables)

    @property
    def jinja(self) -> str:
        """Returns the source of the template, as chat_template.jinja has it."""
        if self.template not in BUILT_IN:
            return self.template
        has_end = self.template == "chatml" and self.tokenizer.id_of("<|im_end|>") is not None
        end = "" if has_end else self.variables.get("eos_token", "")  # what ends an answer must be a token
        return f"{{%- set end = {json.dumps(end, ensure_ascii=False)} %}}{_SOURCES[self.template]}"

    def table(self) -> list[tuple[str, str]]:
        """Lists (name, value), for the start of a run."""
        template = self.template if self.template in BUILT_IN else "the tokenizer's own, or a file's (Jinja)"
        stops = ", ".join(f"{self.tokenizer.name_of(i)} ({i})" for i in self.stop_tokens)
        return [("template", template), ("stop tokens", stops)]

    def save(self, directory: Path) -> None:
        """Writes it beside the tokenizer, for `read_chat`."""
        values = {"template": self.template, "stop_tokens": list(self.stop_tokens)}
        text = json.dumps({**values, "variables": dict(self.variables)}, indent=2)
        write_whole(Path(directory) / FILE, text + "\n")

    @cached_property
    def _compiled(self) -> Any:
        return compile_template(self.jinja)

    @cached_property
    def _special(self) -> re.Pattern:
        return _any_of(self.tokenizer.special_names)

    @cached_property
    def _of_template(self) -> re.Pattern:
        """Finds special tokens, and all other added ones that the template writes."""
        added = [name for name in self.tokenizer.added_names if name in self.template]
        return _any_of([*self.tokenizer.special_names, *added])

    def _pieces(self, messages: Sequence[Message], learn: str, opening: bool) -> list[Piece]:
        """Renders a conversation and cuts it before and after each answer."""
        mark = _unused(messages)
        messages = [self._escaped(message, mark) for message in messages]
        whole, at, found = self.render(messages, opening), 0, []
        answers = [k for k, message in enumerate(messages) if message["role"] == "assistant"]
        for k in answers:
            before = self._before(messages[:k], messages[k], mark)
            through = self.render(messages[: k + 1])
            learnt = learn == "assistant" or (learn == "last" and k == answers[-1])
            if at <= len(before) and through.startswith(before) and whole.startswith(through):
                found += [(whole[at : len(before)], False), (through[len(before) :], learnt)]
                at = len(through)
            elif learnt:
                self._refuse_unmarked(k + 1, before, through, k != answers[-1])
        return [Piece(tuple(text.split(mark)), learnt) for text, learnt in [*found, (whole[at:], False)]]

    def _refuse_unmarked(self, number: int, before: str, through: str, has_others: bool) -> NoReturn:
        """Refuses an answer whose part of the text cannot be found."""
        if not through.startswith(before):
            raise Refused(
                f"[chat] the template opens an answer with {before[-40:]!r} and writes message {number} without it, so "
                "a model would be prompted differently from how it was trained; use another template"
            )
        last = "conversations.learn=last, or " * has_others
        raise Refused(
            f"[chat] the template changes message {number} when others follow, so its tokens cannot be marked for the "
            f"loss; use {last}another template"
        )

    def _before(self, messages: Sequence[Message], answer: Message, mark: str) -> str:
        """Renders what stands before an answer to these messages; where there are none and the template wants at least
        one, what it writes before the answer's own words.
        """
        try:
            return self.render(messages, True)
        except ValueError:
            if messages:
                raise
            return self.render([{**answer, "content": mark}]).partition(mark)[0]

    def _escaped(self, message: Message, mark: str) -> Message:
        """Returns the message with a mark in each name of a control token, after its first character.

        The assistant's words keep tokens that are not special, such as <think>: a model may be taught them.
        """
        names = self._special if message["role"] == "assistant" else self._of_template
        content = names.sub(lambda name: name[0][0] + mark + name[0][1:], message["content"])
        return {**message, "content": content}

    def _encoded(self, conversations: list[list[Piece]]) -> list[tuple[np.ndarray, list[int]]]:
        """Returns (ids, how many of them each piece has).

        Parts are encoded apart, so that a name that was cut in two does not form again.
        """
        flat = [
            (part, k + j > 0)
            for ps in conversations
            for k, p in enumerate(ps)
            for j, part in enumerate(p.parts)
        ]
        encoded = iter(
            self.tokenizer.encode_template([part for part, _ in flat], [later for _, later in flat])
        )
        found = []
        for pieces in conversations:
            ids = [np.concatenate([next(encoded) for _ in piece.parts]) for piece in pieces]
            found.append((np.concatenate(ids).astype(np.int32), [len(one) for one in ids]))
        return found

    def _counts(self, pieces: list[Piece], encoded: tuple[np.ndarray, list[int]], who: str) -> np.ndarray:
        ids, sizes = encoded
        counts, at = np.zeros(len(ids), bool), 0
        for piece, size in zip(pieces, sizes, strict=True):
            if piece.learnt:
                ends = np.flatnonzero(np.isin(ids[at : at + size], self.stop_tokens))
                if not len(ends):
                    raise Refused(f"[{who}] {self._no_end(''.join(piece.parts))}")
                counts[at : at + ends[-1] + 1] = True
            at += size
        return counts

    def _no_end(self, text: str) -> str:
        names = [self.tokenizer.name_of(i) for i in self.stop_tokens]
        last = [name[0] for name in self._special.finditer(text)][-1:]
        use = f"start.stop_tokens=[{last[0]!r}]" if last else "another template"
        return (
            f"the template ends the answer {text[-40:]!r} with none of the stop tokens "
            f"{', '.join(map(repr, names))}, so a model could not learn to stop; use {use}"
        )


def make_chat(
    tokenizer: Tokenizer,
    template: str,
    stop_tokens: Sequence[str | int] | None = None,
    variables: Mapping[str, str] | None = None,
    more_stops: Sequence[int] = (),
) -> Chat:
    """Makes a chat, after checking that its template and stop tokens work.

    stop_tokens: names or ids; None are those that end a text, `more_stops`, and the special token that the template
      writes after an answer.

    Raises:
      ValueError: the template cannot be read, a stop token is not the tokenizer's, or there is none.
    """
    names = {"bos_token": tokenizer.start_id, "eos_token": tokenizer.eos_id}
    found = {name: tokenizer.name_of(i) for name, i in names.items() if i is not None}
    chat = Chat(tokenizer, template, (), {**found, **(variables or {})})
    if stop_tokens is not None:
        stops = [_id_of(tokenizer, one) for one in stop_tokens]
    else:
        ends = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
        stops = [*ends, *more_stops, *_end_of_turn(chat)]
    if not stops:
        raise Refused(
            "[start] neither the tokenizer nor the template has a token that ends an answer; give start.stop_tokens, a "
            "list of names of tokens"
        )
    return Chat(tokenizer, template, tuple(dict.fromkeys(stops)), chat.variables)


def read_chat(directory: str | Path, tokenizer: Tokenizer) -> Chat | None:
    """Reads the chat that a run saved (`Chat.save`), or that a tokenizer's own files describe; None if there is none.

    Those files are chat_template.jinja or tokenizer_config.json's "chat_template", the names of its special tokens, and
    "eos_token_id" of generation_config.json, or of config.json where that is missing.

    Raises:
      ValueError: a file is not JSON, or has another value than such a key may have; or as `make_chat`.
    """
    path = Path(directory)
    if (path / FILE).is_file():
        saved = _json(path / FILE)
        return make_chat(tokenizer, saved["template"], saved["stop_tokens"], saved["variables"])
    config = _json(path / "tokenizer_config.json")
    template = _template_of(path, config)
    if template is None:
        return None
    ends = _ends_in(path, tokenizer)
    variables = {name: _text(config[name]) for name in _VARIABLES if config.get(name)}
    if "bos_token" in config:  # null is none, which a template then writes as nothing
        variables.setdefault("bos_token", "")
    if end := variables.get("eos_token"):
        ends = [*ends, *[i for i in [tokenizer.id_of(end)] if i is not None]]
    return make_chat(tokenizer, template, None, variables, ends)


def saved_chat(directory: str | Path, tokenizer: Tokenizer) -> Chat | None:
    """Reads the chat of a run's directory: its own, or that of the model that it was imported from (`RUN/hf`).

    Runs of earlier versions have the name of their template in config.yaml alone.
    """
    places = (Path(directory), Path(directory) / "hf")
    found = next((chat for place in places if (chat := read_chat(place, tokenizer))), None)
    if found is None and (name := _template_in_config(Path(directory) / "config.yaml")) is not None:
        return make_chat(tokenizer, name)
    return found


def _template_in_config(path: Path) -> str | None:
    """Returns the built-in template that a run of `sft` or `dpo` was made with; None for other runs and none."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return None  # a directory of Hugging Face files may have any file of that name
    named = values if isinstance(values, Mapping) else {}
    sections = [
        one for name in ("conversations", "preferences") if isinstance(one := named.get(name), Mapping)
    ]
    return next((name for one in sections if (name := one.get("template")) in BUILT_IN), None)


_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def _unused(messages: Sequence[Message]) -> str:
    """Returns a character that is in none of the messages."""
    text = "".join(message["content"] for message in messages)
    free = [mark for mark in _MARKS if mark not in text]
    if not free:
        raise Refused(
            "[conversations] a conversation contains all of the noncharacters U+FDD0 to U+FDEF; remove one of them"
        )
    return free[-1]


def _any_of(names: Sequence[str]) -> re.Pattern:
    """Finds the names, the longest first, in any case: a tokenizer may lower it before it looks for them."""
    longest_first = sorted(set(names), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)", re.IGNORECASE)


def _end_of_turn(chat: Chat) -> list[int]:
    """Returns the id of the first special token that the template writes after an answer, if there is one."""
    answer = "an answer"
    text = chat.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
    name = chat._special.search(text, text.rfind(answer) + len(answer))
    known = None if name is None else chat.tokenizer.id_of(name[0])
    return [] if known is None else [known]


def _id_of(tokenizer: Tokenizer, asked: str | int) -> int:
    if isinstance(asked, str):
        found = tokenizer.id_of(asked)
        if found is None:
            names = tokenizer.special_names
            near = difflib.get_close_matches(asked, names, n=1) or names[:3]
            raise Refused(
                f"[start] stop_tokens: this tokenizer has no token {asked!r}; use {', '.join(map(repr, near))}"
            )
        return found
    if isinstance(asked, bool) or not 0 <= asked < tokenizer.vocab_size or not tokenizer.is_token()[asked]:
        raise Refused(
            f"[start] stop_tokens: this tokenizer has no token {asked!r}, its ids lie below {tokenizer.vocab_size}; "
            "use the name of a token"
        )
    return int(asked)


def read_template(file: Path) -> str:
    """Returns the source of a Jinja template.

    Raises:
      ValueError: the file is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            f"[start] the chat template {file} is not UTF-8: {error.reason} at offset {error.start}"
        ) from None


def _template_of(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return read_template(file)
    given = config.get("chat_template")
    if isinstance(given, list):  # several by name
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None


def saved_ends(directory: str | Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the ids that end a text by the files of a model, or by those that a run carries (`RUN/hf`)."""
    places = (Path(directory), Path(directory) / "hf")
    return tuple(dict.fromkeys(one for place in places for one in _ends_in(place, tokenizer)))


def _ends_in(path: Path, tokenizer: Tokenizer) -> list[int]:
    """Returns the "eos_token_id" of a model's files; ids that the tokenizer lacks are left out, for none is sampled."""
    names = [name for name in ("generation_config.json", "config.json") if (path / name).is_file()]
    found = _json(path / names[0]).get("eos_token_id") if names else None
    ends = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(one, int) and not isinstance(one, bool) for one in ends):
        raise Refused(
            f"[start] {path / names[0]}: eos_token_id={shown(found)} must be an id or a list of ids, such as "
            f"{tokenizer.eos_id or 0}"
        )
    known = tokenizer.is_token()
    return [one for one in ends if 0 <= one < len(known) and known[one]]


def _text(value: Any) -> str:
    """Returns the name of a token that is given as its name, or as a dict with it."""
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise Refused(f"[start] {file} is not JSON: {error}") from None
    return values if isinstance(values, dict) else {}
