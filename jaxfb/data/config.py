"""Defines the settings of the data: what to read and how to cut it; plain and cheap to import.

Part of the data (its settings). `prepare(DataConfig(...))` turns them into rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, get_args, get_type_hints

from jaxfb.refusal import INT32, INT64, Refused, instance, integer, number, only_legal, refuse, shown

_WHO = "[data]"
SMALLEST_VOCAB = 257  # every byte, and the one token that stands between documents
LEAST_SHARE = Fraction(1, 10**6)  # of a source in a mixture; blocks of rows have one of each source
LARGEST_VOCAB = 2**22  # the trainer of the tokenizers library asks for the memory of them all at once


Source = Literal["python-stdlib", "text", "jsonl", "parquet", "arrow", "tokens"]
OF_A_SOURCE = ("source", "path", "held_out_path", "held_out_fraction", "text_field", "max_bytes")


@dataclass(frozen=True)
class SourceConfig:
    """A source of a mixture; tokenizer, packing, row length and seed are those of all.

    weight: its share of the rows of training; the weights may have any sum. 0 leaves the source out.
    source, path, held_out_path, held_out_fraction, text_field, max_bytes: as for a single source.
    """

    weight: float
    source: Source = "text"
    path: str | tuple[str, ...] = ()
    held_out_path: str | tuple[str, ...] = ()
    held_out_fraction: float = 0.05
    text_field: str = "text"
    max_bytes: int | None = None

    def __post_init__(self):
        if number("weight", self.weight, who=_WHO) < 0:
            raise Refused(
                f"[data] weight={self.weight} of a source must not be negative; use 1.0", [{"weight": 1.0}]
            )
        checked = DataConfig(**{name: getattr(self, name) for name in OF_A_SOURCE})
        for name in OF_A_SOURCE:
            object.__setattr__(self, name, getattr(checked, name))


@dataclass(frozen=True)
class DataConfig:
    """The settings that decide which tokens are in which row; only `seed` decides their order.

    source: "python-stdlib" (the running interpreter's own source), "text", "jsonl", "parquet", "arrow" (IPC files or
      streams, such as those of Hugging Face's datasets) or "tokens".
    mixture: several sources by name, each with its weight, instead of one; see docs/data.md.
    path: file, directory or glob, or several of them; unused by "python-stdlib".
    held_out_path: like `path`; all of it is held out, and nothing of `path` is. Empty: split by document.
    held_out_fraction: share of the documents held out, in [0, 1); 0 holds out none.
    text_field: the key of the text in each JSONL record, or the column of a Parquet or Arrow file.
    tokenizer: "bpe" (trained on the train documents), "bytes", or the path of a tokenizer.json.
    vocab_size: tokens of "bpe"; a small text may yield fewer.
    sequence_length: tokens in a row.
    packing: "concat" (one stream cut into rows), "best_fit" (documents whole where they fit, rest padded) or
      "stream" (the rows of "concat", whose tokens also see the documents before theirs: attention needs no mask).
    seed: seed of the row order, reshuffled each epoch.
    max_bytes: read no more text than this; None reads all.
    cache_dir: where shards are kept; None means $JAXFB_CACHE/data, else $XDG_CACHE_HOME/jaxfb/data, else
      .cache/jaxfb-data.
    """

    source: Source = "python-stdlib"
    path: str | tuple[str, ...] = ()
    held_out_path: str | tuple[str, ...] = ()
    held_out_fraction: float = 0.05
    text_field: str = "text"
    tokenizer: str = "bpe"
    vocab_size: int = 4096
    sequence_length: int = 256
    packing: Literal["concat", "best_fit", "stream"] = "concat"
    seed: int = 0
    max_bytes: int | None = None
    cache_dir: str | None = None
    mixture: dict[str, SourceConfig] = field(default_factory=dict)

    def __post_init__(self):
        _check_types(self)
        for name in ("path", "held_out_path"):
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value or ()))
        _check_choice(self, "source")
        _check_choice(self, "packing")
        _check_paths(self)
        _check_sizes(self)
        _check_mixture(self)

    @classmethod
    def completed(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the keys of a config's section; refuses a mixture of nothing where no other source is named.

        Beside a source it is what the saved config of every run without a mixture has.
        """
        if given.get("mixture") == {} and "source" not in given:
            raise Refused(
                "[data] mixture={} has no source, and no other is named; give sources, such as "
                "data.mixture.notes={weight: 1.0, source: text, path: notes.txt}, or data.source=python-stdlib for "
                "the interpreter's own"
            )
        return dict(given)

    @property
    def held_out_from(self) -> str:
        """Returns where held-out rows are read, as words for a sentence."""
        if self.mixture:
            return ", ".join(self.mixture)
        return ", ".join(self.held_out_path or self.path) or self.source

    def of(self, name: str, tokenizer: str) -> DataConfig:
        """Returns the settings of one source of the mixture, with the tokenizer that all share."""
        own = {key: getattr(self.mixture[name], key) for key in OF_A_SOURCE}
        return replace(self, mixture={}, tokenizer=tokenizer, **own)


def check_shares(weights: Mapping[str, float]) -> None:
    """Refuses a share of a mixture so small that the rows which are ordered together would not fit in memory."""
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    total = sum(exact.values())
    for name, weight in exact.items():
        if 0 < weight < LEAST_SHARE * total:
            least = float(f"{float((total - weight) * LEAST_SHARE) * 1.1:.1e}")  # rounded, yet enough
            raise Refused(
                f"[data] the weight {weights[name]} of the source {shown(name)} of the mixture is less than a "
                f"millionth of all weights; use {least} or more, or 0"
            )


def _check_mixture(config: DataConfig) -> None:
    if not config.mixture:
        return
    defaults = {"source": "python-stdlib", "path": (), "held_out_path": (), "max_bytes": None}
    given = [name for name, default in defaults.items() if getattr(config, name) != default]
    if given:
        raise Refused(
            f"[data] {', '.join(given)} and mixture are both given; move {given[0]} into a source of the mixture"
        )
    if not any(source.weight for source in config.mixture.values()):
        raise Refused(
            f"[data] every weight of the mixture is 0; use data.mixture.{next(iter(config.mixture))}.weight=1.0"
        )
    check_shares({name: source.weight for name, source in config.mixture.items()})
    for name in config.mixture:
        if not name.isidentifier():
            raise Refused(
                f"[data] mixture: {shown(name)} must be a name of letters, digits and _; use source_1"
            )


def _check_types(config: DataConfig) -> None:
    """Refuses a number of another kind, NaN, infinity, and what is not text."""
    for name in ("path", "held_out_path"):
        value = getattr(config, name)
        paths = value if isinstance(value, list | tuple) else ["" if value is None else value]
        if not all(isinstance(path, str) for path in paths):
            refuse(name, value, "a string with a path, or a list of such strings", who=_WHO)
    for name in ("source", "packing", "tokenizer", "text_field", "cache_dir"):
        if name != "cache_dir" or config.cache_dir is not None:
            instance(name, getattr(config, name), str, "a string", who=_WHO)
    for name, most in (
        ("sequence_length", INT32),
        ("vocab_size", INT32),
        ("seed", INT64),
        ("max_bytes", INT64),
    ):
        if name != "max_bytes" or config.max_bytes is not None:
            value = integer(name, getattr(config, name), who=_WHO, least=-INT64, most=most)
            object.__setattr__(config, name, value)  # numpy's integers would overflow further on
    number("held_out_fraction", config.held_out_fraction, who=_WHO)


def _check_choice(config: DataConfig, name: str) -> None:
    known, value = get_args(get_type_hints(DataConfig)[name]), getattr(config, name)
    if value not in known:
        choices = only_legal([{name: one} for one in known], lambda choice: replace(config, **choice))
        raise Refused(f"[data] {name}={shown(value)} is not known; use one of {', '.join(known)}", choices)


def _check_paths(config: DataConfig) -> None:
    for name in ("path", "held_out_path"):
        if any(not path.strip() for path in getattr(config, name)):
            is_read = name == "path" and config.source != "python-stdlib"
            use = f"{name}='.' for the working directory" if is_read else f"{name}=[] for none"
            raise Refused(
                f"[data] {name}={shown(getattr(config, name))} has an empty path; use {use}",
                [{name: "." if is_read else ()}],
            )
    if config.cache_dir is not None and not config.cache_dir.strip():
        raise Refused(
            f"[data] cache_dir={config.cache_dir!r} must not be empty; use data.cache_dir=null for .cache/jaxfb-data",
            [{"cache_dir": None}],
        )
    if config.source != "python-stdlib" and not config.path:
        raise Refused(f"[data] source={config.source!r} needs path: a file, a directory or a glob")
    if config.source == "python-stdlib" and (config.path or config.held_out_path):
        raise Refused(
            f"[data] source='python-stdlib' reads the interpreter's own source and takes no path, "
            f"got path={shown(config.path)} held_out_path={shown(config.held_out_path)}; "
            + ("use source='text', or path=[]" if config.path else "leave it out"),
            [{"source": "text"}] if config.path else [{"held_out_path": None}],
        )


def _check_sizes(config: DataConfig) -> None:
    if config.sequence_length < 2:
        raise Refused(
            f"[data] sequence_length={config.sequence_length} must be at least 2; use 2 or more",
            [{"sequence_length": 2}],
        )
    if config.tokenizer == "bpe" and config.vocab_size < SMALLEST_VOCAB:
        raise Refused(
            f"[data] vocab_size={config.vocab_size} is too small for the 256 bytes and the end token; "
            f"use {SMALLEST_VOCAB} or more",
            [{"vocab_size": SMALLEST_VOCAB}],
        )
    if config.tokenizer == "bpe" and config.vocab_size > LARGEST_VOCAB:
        raise Refused(
            f"[data] vocab_size={config.vocab_size} is more than a tokenizer can be trained to; use at most "
            f"{LARGEST_VOCAB}",
            [{"vocab_size": LARGEST_VOCAB}],
        )
    if not 0 <= config.held_out_fraction < 1:
        raise Refused(
            f"[data] held_out_fraction={config.held_out_fraction} must lie in [0, 1); try 0.05",
            [{"held_out_fraction": 0.05}],
        )
    if not 0 <= config.seed < 2**63:
        use = abs(config.seed) % 2**63
        raise Refused(f"[data] seed={config.seed} must lie in [0, 2**63); use {use}", [{"seed": use}])
    if config.max_bytes is not None and (config.max_bytes < 1 or config.source == "tokens"):
        raise Refused(
            f"[data] max_bytes={config.max_bytes} must be a positive number of bytes of text "
            f"(source={config.source!r}); leave it out to read everything",
            [{"max_bytes": None}],
        )
