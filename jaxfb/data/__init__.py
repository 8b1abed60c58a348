"""Host side: text to rows of tokens. No device code; a position in the stream is a number to save."""

from jaxfb.data.baselines import Baselines, count_baselines
from jaxfb.data.config import DataConfig, SourceConfig
from jaxfb.data.corpus import Corpus, SplitStats, bits_per_byte, prepare
from jaxfb.data.loader import Loader, evaluation_batches
from jaxfb.data.mixture import Mixture
from jaxfb.data.packing import PackedRows
from jaxfb.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "Baselines",
    "ByteTokenizer",
    "Corpus",
    "DataConfig",
    "Loader",
    "Mixture",
    "PackedRows",
    "SourceConfig",
    "SplitStats",
    "Tokenizer",
    "bits_per_byte",
    "count_baselines",
    "evaluation_batches",
    "load_tokenizer",
    "prepare",
]
