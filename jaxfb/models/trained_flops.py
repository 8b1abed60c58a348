"""Counts the operations that training some parameters of a transformer takes: what MFU and plans count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import jax

from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.models.transformer import init_params
from jaxfb.trainable import Patterns, name_of, parted

_BEHIND_LAYERS = ("norm", "head", "mtp")
"""Sections of the parameters whose gradients need no backward of the layers; those of all others do."""


@dataclass(frozen=True)
class TrainedFlops:
    """Operations of one token, forward and backward, no recomputation, of layers and of the head.

    layers: and of multi-token prediction with its heads.
    """

    layers: float
    head: float

    @property
    def total(self) -> float:
        return self.layers + self.head


def trained_flops(sizes: TransformerConfig, seq_len: int, patterns: Patterns | None) -> TrainedFlops:
    """Counts `flops_per_token` without the gradients that are not computed: of frozen matrices, 2 of 6 operations, and
    of everything in front of the first trained parameter, 4 of 6. What adapters multiply, less than a hundredth, is not
    counted.

    patterns: of the parameters that are trained; None: all.
    """
    return _counted(sizes, seq_len, None if patterns is None else tuple(patterns))


def runs_backward(sizes: TransformerConfig, patterns: Patterns | None) -> bool:
    """Returns whether a step that trains those parameters has a backward of the layers."""
    return patterns is None or bool(_trained_sections(sizes, tuple(patterns)) - set(_BEHIND_LAYERS))


@lru_cache(maxsize=64)
def _counted(sizes: TransformerConfig, seq_len: int, patterns: Patterns | None) -> TrainedFlops:
    heads = 6 * sizes.vocab_size * sizes.hidden_size
    plain = flops_per_token(replace(sizes, mtp_depth=0), seq_len)
    whole = flops_per_token(sizes, seq_len)
    if patterns is None:
        return TrainedFlops(whole - heads, heads)
    sections, of_layers, of_mtp, of_head = _trained_sections(sizes, patterns), *_frozen(sizes, patterns)
    through = runs_backward(sizes, patterns)
    through_mtp = through or "mtp" in sections
    depth = sizes.mtp_depth
    layers = plain - heads - 2 * of_layers if through else (plain - heads) / 3
    mtp = whole - plain - depth * heads
    mtp = mtp - 2 * of_mtp if through_mtp else mtp / 3
    head = heads - 2 * of_head
    to_hidden, to_mtp = through or "norm" in sections, through_mtp or "norm" in sections
    layers += mtp + depth * (head - (0 if to_mtp else heads / 3))
    return TrainedFlops(layers, head - (0 if to_hidden else heads / 3))


@lru_cache(maxsize=64)
def _trained_sections(sizes: TransformerConfig, patterns: Patterns) -> frozenset[str]:
    """Returns the first words of the names of trained parameters."""
    _, trained = parted(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(trained))
    return frozenset(name_of(path).partition(".")[0] for path in paths)


def _frozen(sizes: TransformerConfig, patterns: Patterns) -> tuple[float, float, float]:
    """Returns how many numbers of frozen matrices a token is multiplied by: of layers, of multi-token prediction, of
    the head.
    """
    tied = "embed.embedding" if sizes.tied_embeddings else None
    frozen, _ = parted(patterns, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    matrices = {
        name: leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(frozen)
        if (name := name_of(path)).endswith(".kernel") or ".experts." in name or name == tied
    }
    of_head = matrices.pop(tied or "head.kernel", 0)
    met = sizes.experts_per_token / sizes.num_experts if sizes.num_experts else 1.0
    products = {name: size * (met if ".experts." in name else 1) for name, size in matrices.items()}
    of_mtp = sum(size for name, size in products.items() if name.startswith("mtp."))
    return sum(products.values()) - of_mtp, of_mtp, of_head
