"""Prepares rows from settings, in one call that reads, tokenises, splits, stores and packs.

Part of the data (all of it, in order; read this file first).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from jaxfb.data.config import DataConfig
from jaxfb.data.mixture import MixedRows
from jaxfb.data.packing import Rows, pack
from jaxfb.data.shared_files import warn_of_shared_files
from jaxfb.data.stored.cache import cache_directory
from jaxfb.data.stored.shards import TokenDocuments
from jaxfb.data.stored.text_shards import common_tokenizer, open_text_shards
from jaxfb.data.stored.token_shards import open_token_shards
from jaxfb.data.tokenizer import Tokenizer
from jaxfb.refusal import Refused

COUNTED_ROWS = 4096


@dataclass(frozen=True)
class SplitStats:
    """`tokens`: those predicted. `bytes`: of text, None if not known. `fill`: share of slots used."""

    documents: int
    tokens: int
    bytes: int | None
    rows: int
    fill: float


@dataclass(frozen=True)
class Corpus:
    """A prepared text: two sets of rows, and what is known of them.

    tokenizer: None for token files that came without one. vocab_size: all ids lie below it.
    """

    train: Rows
    held_out: Rows
    tokenizer: Tokenizer | None
    vocab_size: int
    train_stats: SplitStats
    held_out_stats: SplitStats

    def bytes_per_token(self, rows: Rows | None = None) -> float | None:
        """Returns bytes of text for each predicted token of `rows` (default: held out); None without a tokenizer.

        Exact for "bytes" and byte-level BPE. The end of a document is a token of 0 bytes.
        """
        rows = self.held_out if rows is None else rows
        if self.tokenizer is None or not rows.num_tokens:
            return None
        sizes, total = self.tokenizer.token_bytes(), 0
        for k in range(0, len(rows), COUNTED_ROWS):
            batch = rows.gather(np.arange(k, min(k + COUNTED_ROWS, len(rows))))
            total += int(sizes[batch["targets"]][batch["loss_mask"] > 0].sum())
        return total / rows.num_tokens


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Returns the loss in a unit that does not depend on the tokenizer."""
    return nats_per_token / math.log(2) / bytes_per_token


def prepare(config: DataConfig) -> Corpus:
    """Reads, tokenises, splits and packs; the second time, finds it all in the cache.

    Every process of a job may call it: they write the same and the first to finish is kept.
    Raises ValueError when a path is missing, a file cannot be used, or there is nothing to train on.
    """
    if config.mixture:
        return _mixed(config)
    open_shards = open_token_shards if config.source == "tokens" else open_text_shards
    shards = open_shards(config, cache_directory(config.cache_dir))
    rows = {
        name: pack(split, config.sequence_length, config.packing, shards.directory / "rows" / name)
        for name, split in (("train", shards.train), ("held_out", shards.held_out))
    }
    return Corpus(
        **rows,
        tokenizer=shards.tokenizer,
        vocab_size=shards.vocab_size,
        train_stats=_stats(shards.train, rows["train"]),
        held_out_stats=_stats(shards.held_out, rows["held_out"]),
    )


def _mixed(config: DataConfig) -> Corpus:
    """Prepares each source of a mixture with one tokenizer, and joins their rows."""
    tokenizer = _common_tokenizer(config)
    corpora = {name: prepare(config.of(name, tokenizer)) for name in config.mixture}
    weights = {name: source.weight for name, source in config.mixture.items()}
    if empty := [name for name, corpus in corpora.items() if weights[name] and not len(corpus.train)]:
        raise Refused(
            f"[data] the source {empty[0]!r} of the mixture has no row to train on; give it more text, or "
            f"data.mixture.{empty[0]}.weight=0"
        )
    warn_of_shared_files(config)
    first = next(iter(corpora.values()))
    return Corpus(
        train=MixedRows({name: corpus.train for name, corpus in corpora.items()}, weights),
        held_out=MixedRows({name: corpus.held_out for name, corpus in corpora.items()}, weights),
        tokenizer=first.tokenizer,
        vocab_size=max(corpus.vocab_size for corpus in corpora.values()),
        train_stats=_sum([corpus.train_stats for corpus in corpora.values()]),
        held_out_stats=_sum([corpus.held_out_stats for corpus in corpora.values()]),
    )


def _common_tokenizer(config: DataConfig) -> str:
    """Returns what `tokenizer` is for each source: the one given, or the path of one trained on all of them."""
    of_tokens = [name for name, source in config.mixture.items() if source.source == "tokens"]
    if config.tokenizer != "bpe" or len(of_tokens) == len(config.mixture):
        return config.tokenizer
    if of_tokens:
        raise Refused(
            f"[data] the tokens of {of_tokens[0]!r} in the mixture were not made by tokenizer=bpe; "
            "use data.tokenizer=path/to/tokenizer.json"
        )
    cache = cache_directory(config.cache_dir)
    return str(common_tokenizer([config.of(name, "bpe") for name in config.mixture], cache))


def _sum(stats: list[SplitStats]) -> SplitStats:
    rows = sum(each.rows for each in stats)
    sizes = [each.bytes for each in stats if each.bytes is not None]
    return SplitStats(
        documents=sum(each.documents for each in stats),
        tokens=sum(each.tokens for each in stats),
        bytes=sum(sizes) if len(sizes) == len(stats) else None,
        rows=rows,
        fill=sum(each.fill * each.rows for each in stats) / max(rows, 1),
    )


def _stats(documents: TokenDocuments, rows: Rows) -> SplitStats:
    return SplitStats(len(documents.length), documents.num_tokens, documents.num_bytes, len(rows), rows.fill)
