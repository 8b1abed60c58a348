"""The sizes of a directory's model, from its config.json alone. No jax is imported."""

from __future__ import annotations

import os
from pathlib import Path

from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.architectures import sizes_of
from jaxfb.pretrained.repository import read_json
from jaxfb.refusal import Refused, shown


def sizes_in(directory: str | Path) -> TransformerConfig:
    """Returns the transformer that config.json of a directory of Hugging Face files describes; no weights are read.

    Raises:
      ValueError: there is no config.json, or it describes a model that cannot be read.
    """
    path = Path(directory)
    if not os.path.isfile(path / "config.json"):  # unlike pathlib's, False for what cannot be a name
        raise Refused(
            f"[model] from={shown(str(path))} must be a directory with config.json and *.safetensors"
        )
    return sizes_of(read_json(path / "config.json"))
