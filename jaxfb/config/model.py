"""The section `model`: the built-in transformer's sizes, given or read from a directory of Hugging Face files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxfb.config.checks import expand_home, not_empty
from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.architectures import sizes_in
from jaxfb.refusal import Refused, shown

OF_A_MODEL = ("vocab_size", "num_layers", "hidden_size", "num_heads")
# Keys of `model` that set how it is computed or what its loss adds, but not what its parameters mean.
FREE_OF_MODEL = (
    *("attention", "context_attention", "sequence_parallel", "loss_chunk", "vocab_size", "from"),
    *("dropout", "label_smoothing", "z_loss", "mtp_weight"),
    *("balance_coefficient", "batch_balance_coefficient", "batch_balance_layers"),
    *("router_z_coefficient", "router_bias_rate"),
)


@dataclass(frozen=True)
class ModelConfig(TransformerConfig):
    """A `TransformerConfig` whose vocabulary may be left to the tokenizer: `vocab_size` null.

    from: a directory of Hugging Face files, or null. The sizes are those of its config.json and may be left out; a
      fresh run begins with its weights and, unless the config names others, has its tokenizer, chat template and stop
      tokens.
    name: "transformer", whose sizes these are; `jaxfb train` also takes a model of your own, see below.
    """

    name: str = field(default="transformer", kw_only=True)
    vocab_size: int | None = field(default=None, kw_only=True)
    from_: str | None = field(default=None, kw_only=True)

    def __post_init__(self):
        if self.name != "transformer":
            raise Refused(
                f"[model] name={shown(self.name)} cannot be used here: only `jaxfb train` takes a model of your own; "
                "use model.name=transformer",
                [{"name": "transformer"}],
            )
        expand_home(self, "from_")
        if self.vocab_size is not None:
            return super().__post_init__()
        for name, value in vars(self.sized(1)).items():
            object.__setattr__(self, name, None if name == "vocab_size" else value)

    def sized(self, vocab_size: int) -> TransformerConfig:
        """Returns the transformer itself: `vocab_size` where the config gives one, otherwise the tokenizer's."""
        sizes = {name: value for name, value in vars(self).items() if name not in ("name", "from_")}
        return TransformerConfig(**{**sizes, "vocab_size": self.vocab_size or vocab_size})

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a config's section with the sizes that `from` gives.

        Sizes that the section has already are those of a saved run, which does not need the directory any more.

        Raises:
          ValueError: `from` is not a directory of a model, or the section has another value than its config.json.
        """
        source = given.get("from")
        if isinstance(source, str):
            not_empty("model", **{"from": source})
        if source is None or all(name in given for name in OF_A_MODEL):
            return dict(given)
        sizes = vars(sizes_in(os.path.expanduser(source)))
        check_sizes(source, sizes, given)
        return {**sizes, **given}


def check_sizes(source: str, sizes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuses a value of `model` that is not the directory's, where it would give the weights another meaning."""
    for name, value in given.items():
        if name in (*FREE_OF_MODEL, "name", "from_") and name != "vocab_size":
            continue
        if name == "mtp_depth" and sizes["mtp_as_published"]:  # the directory may have such layers
            continue
        if value is not None and value != sizes[name]:
            raise Refused(
                f"[model] {name}={shown(value)} differs from {shown(sizes[name])}, that of from={source}; leave the "
                f"sizes out, on the command line by 'model={{from: {source}}}' in place of model.from",
                [{name: sizes[name]}],
            )
