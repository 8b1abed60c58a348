"""The tensors of a Hugging Face directory by name, and which part of a tensor one of our arrays is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxfb.models.config import TransformerConfig

Shape = tuple[int, ...]

OUTER_NAMES = {
    "embed.embedding": "model.embed_tokens.weight",
    "norm.scale": "model.norm.weight",
    "head.kernel": "lm_head.weight",
}
ATTENTION = {
    "attention_norm.scale": "input_layernorm.weight",
    "mlp_norm.scale": "post_attention_layernorm.weight",
    **{
        f"attention.{ours}.{part}": f"self_attn.{theirs}_proj.{stored}"
        for ours, theirs in (("query", "q"), ("key", "k"), ("value", "v"), ("output", "o"))
        for part, stored in (("kernel", "weight"), ("bias", "bias"))
    },
    "attention.query_norm.scale": "self_attn.q_norm.weight",
    "attention.key_norm.scale": "self_attn.k_norm.weight",
}
MLP = {
    f"mlp.{name}.{part}": f"mlp.{name}_proj.{stored}"
    for name in ("gate", "up", "down")
    for part, stored in (("kernel", "weight"), ("bias", "bias"))
}
DENSE = {**ATTENTION, **MLP}


@dataclass(frozen=True)
class Place:
    """Names the tensor that is one of our arrays. name: below "model.layers.N"; "{expert}" numbers experts.

    turned: whether it is stored transposed; None: as every matrix of torch.nn.Linear.
    """

    name: str
    turned: bool | None = None

    def within(self, shape: Shape, sizes: TransformerConfig) -> tuple[Shape, tuple[slice, ...]]:
        """Returns the shape of the whole tensor, and which part of it is an array that is stored in `shape`."""
        return shape, ()


@dataclass(frozen=True)
class Rows(Place):
    """Names rows of a fused tensor: of consecutive parts with so many rows each, the one numbered `part`."""

    part: int = 0
    rows: Callable[[TransformerConfig], tuple[int, ...]] = lambda _: ()

    def within(self, shape: Shape, sizes: TransformerConfig) -> tuple[Shape, tuple[slice, ...]]:
        counts = self.rows(sizes)
        first = sum(counts[: self.part])
        return (sum(counts), *shape[1:]), (slice(first, first + counts[self.part]),)


@dataclass(frozen=True)
class Every(Place):
    """Names every `step`th number of the last dim, from the one numbered `first` on, of an interleaved tensor."""

    first: int = 0
    step: int = 2

    def within(self, shape: Shape, sizes: TransformerConfig) -> tuple[Shape, tuple[slice, ...]]:
        last = (*[slice(None)] * (len(shape) - 1), slice(self.first, None, self.step))
        return (*shape[:-1], self.step * shape[-1]), last
