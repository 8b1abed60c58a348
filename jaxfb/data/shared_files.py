"""Warns of files that one source of a mixture holds out and another trains on."""

from __future__ import annotations

import warnings
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

from jaxfb.data.config import DataConfig
from jaxfb.data.stored.shards import files_of


class _Split(NamedTuple):
    """The files of a source: those trained on, wholly or in part, and those held out, wholly or in part.

    cut: the share of each file's documents that is held out of training; 0 where `held_out_path` names the files.
    share: the share of the documents of `held_out` that is held out.
    kind: what decides which documents those are; sources of one kind and share hold out the same.
    """

    trained: set[Path]
    held_out: set[Path]
    cut: float
    share: float
    kind: tuple[Any, ...]


def warn_of_shared_files(config: DataConfig) -> None:
    """Warns of each file of a mixture that is trained on in one source and held out in another, with both names."""
    splits = {name: _split(config.of(name, config.tokenizer)) for name in config.mixture}
    for (trainer, one), (holder, other) in permutations(splits.items(), 2):
        both = one.trained & other.held_out if config.mixture[trainer].weight else set()
        if both and _may_leak(one, other):
            warnings.warn(
                f"[data] {min(both)} is trained on in the source {trainer!r} of the mixture and held out, in part or "
                f"whole, in {holder!r}, so held-out numbers may be too good; name it in one of them, or give both the "
                "same held_out_fraction and no held_out_path",
                stacklevel=2,
            )


def _split(source: DataConfig) -> _Split:
    trained, held_out = ({file.path for file in each} for each in files_of(source))
    in_documents = source.source == "text" and len(trained) == 1
    kind = (source.source, source.text_field, in_documents)
    if held_out:
        return _Split(trained, held_out, 0.0, 1.0, kind)
    return _Split(trained, trained, source.held_out_fraction, source.held_out_fraction, kind)


def _may_leak(trainer: _Split, holder: _Split) -> bool:
    """Returns whether documents that `holder` holds out may be among those that `trainer` trains on."""
    return holder.share > trainer.cut or (holder.share > 0 and holder.kind != trainer.kind)
