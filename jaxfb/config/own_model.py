"""The section `model` of your own language model: its name and options in place of the transformer's sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from jaxfb.config.checks import positive
from jaxfb.config.sections import Number
from jaxfb.parts import MODELS


@dataclass(frozen=True)
class OwnModelConfig:
    """A language model of your own on text; docs/extending.md shows one.

    name:       what `jaxfb.parts.MODELS` knows it by, or "package.module:function".
    options:    the arguments of that function other than the vocabulary.
    vocab_size: ids of tokens; null is the tokenizer's number, rounded up to a multiple of 128.
    """

    name: Annotated[str, MODELS]
    options: dict[str, Number] = field(default_factory=dict)
    vocab_size: int | None = None

    def __post_init__(self):
        positive("model", vocab_size=self.vocab_size)

    @classmethod
    def accepts(cls, values: Any) -> bool:
        """Tells whether the values of a section are meant for this class."""
        name = values.get("name") if isinstance(values, Mapping) else None
        return isinstance(name, str) and name != "transformer"

    def sized(self, vocab_size: int) -> OwnModelConfig:
        """Returns the section with `vocab_size` where it gives none."""
        return replace(self, vocab_size=self.vocab_size or vocab_size)
