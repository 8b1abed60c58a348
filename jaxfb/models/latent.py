"""Multi-head latent attention's sizes (DeepSeek-V2, arXiv:2405.04434). Plain Python: part of a config."""

from __future__ import annotations

from dataclasses import dataclass

from jaxfb.refusal import Refused, boolean, integer

_WHO = "[model.latent]"


@dataclass(frozen=True)
class Latent:
    """Sets how keys and values, and perhaps queries, are made from short vectors of a token (DeepSeek-V3).

    Each head of `head_size` numbers ends with those that rotary positions turn, which all heads' keys share.

    key_value_rank: size of a token's vector from which keys and values of all heads are projected.
    rotary_size: width of the part of a head that rotary positions turn.
    value_size: width of one head's values.
    query_rank: size of a token's vector from which the queries are projected; null: from the hidden state itself.
    interleaved: pairs that turn together are neighbours in the weights, and not the two halves.
    """

    key_value_rank: int
    rotary_size: int
    value_size: int
    query_rank: int | None = None
    interleaved: bool = True

    def __post_init__(self):
        for name in ("key_value_rank", "rotary_size", "value_size"):
            integer(name, getattr(self, name), who=_WHO)
        if self.query_rank is not None:
            integer("query_rank", self.query_rank, who=_WHO)
        boolean("interleaved", self.interleaved, who=_WHO)
        if self.rotary_size % 2:
            raise Refused(
                f"{_WHO} rotary_size={self.rotary_size} must be even; use {self.rotary_size + 1}",
                [{"rotary_size": self.rotary_size + 1}],
            )

    def check_head(self, head_size: int) -> None:
        """Refuses a head that is shorter than its rotary part or its values."""
        for name in ("rotary_size", "value_size"):
            if getattr(self, name) > head_size:
                raise Refused(
                    f"{_WHO} {name}={getattr(self, name)} must be at most head_size={head_size}; use {head_size}",
                    [{name: head_size}],
                )

    def matmul_params(self, hidden_size: int, heads: int, head_size: int) -> int:
        """Returns the parameters of all of attention's matrices."""
        queries = hidden_size if self.query_rank is None else self.query_rank
        down = hidden_size * (self.key_value_rank + self.rotary_size + (self.query_rank or 0))
        expanded = self.key_value_rank * (head_size - self.rotary_size + self.value_size)
        return down + heads * (queries * head_size + expanded + self.value_size * hidden_size)

    @property
    def norm_params(self) -> int:
        """Returns the parameters of the norms of the short vectors."""
        return self.key_value_rank + (self.query_rank or 0)
