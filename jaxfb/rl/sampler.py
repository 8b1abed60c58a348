"""Samples responses to prompts from the policy, on the mesh that trains it.

Rows are spread over every mesh axis but tensor, over which the weights stay cut; the
numbers drawn for a row depend on the key and its place among the rows alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.mesh import axis_size
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate import generate
from jaxfb.parallel.sharding import moved_by_program
from jaxfb.parallel.tensor import transformer_param_specs
from jaxfb.refusal import Refused

PyTree = Any


class Responses(NamedTuple):
    """The sampled responses, on the host.

    ids:       i32[n] of each row, its stop token included where it came.
    log_probs: f32[n] of each row.
    ended:     bool[rows], whether a stop token ended the row; False where max_new_tokens cut it.
    """

    ids: list[np.ndarray]
    log_probs: list[np.ndarray]
    ended: np.ndarray

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class Sampler:
    """Samples from a transformer.

    sizes, mesh:     of the policy.
    prompt_width:    tokens that prompts are padded to; a longer one is refused.
    max_new_tokens:  of a response. stop_tokens: any of them ends it.
    absent_ids:      ranges (first, end) of ids that are never drawn.
    temperature:     of sampling, and of the log-probs that are reported. top_k: draws among so many.
    compute_dtype:   that parameters are cast to, as training does; None leaves them.
    """

    sizes: TransformerConfig
    mesh: Mesh
    prompt_width: int
    max_new_tokens: int
    stop_tokens: tuple[int, ...]
    absent_ids: IdRanges = ()
    temperature: float = 1.0
    top_k: int | None = None
    compute_dtype: str | None = None

    def __post_init__(self):
        tokens = self.sizes.vocab_size - sum(end - first for first, end in self.absent_ids)
        if self.top_k is not None and not 1 <= self.top_k <= tokens:
            use = min(50, tokens)
            raise Refused(
                f"[rollout] top_k={self.top_k} must be from 1 to the {tokens} tokens there are; use "
                f"rollout.top_k={use}, or null to draw among all",
                [{"top_k": use}, {"top_k": None}],
            )

    def place(self, params: PyTree) -> PyTree:
        """Places parameters for sampling: whole on each device but for `tensor`. Called once a rollout."""
        specs = transformer_param_specs(params)
        if axis_size(self.mesh, "tensor") == 1:
            specs = jax.tree.map(lambda _: P(), params)
        targets = jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
        )
        if self.compute_dtype is not None:
            params = jax.tree.map(lambda leaf: leaf.astype(self.compute_dtype), params)
        if jax.process_count() == 1:
            return jax.device_put(params, targets)
        return moved_by_program(params, targets)

    def __call__(
        self, placed: PyTree, prompts: list[np.ndarray], key: jax.Array | None, greedy: bool = False
    ) -> Responses:
        """Samples one response a prompt. `placed`: from `place`. Greedy takes the likeliest tokens and no key."""
        rows, lengths = self._padded(prompts)
        drawn = generate(
            self.sizes,
            placed,
            rows,
            self.max_new_tokens,
            prompt_lengths=lengths,
            temperature=0.0 if greedy else self.temperature,
            top_k=None if greedy else self.top_k,
            stop_token=self.stop_tokens,
            absent_ids=self.absent_ids,
            key=None if greedy else key,
            log_prob_temperature=1.0 if greedy else self.temperature,
        )
        # on several processes each receives the rows of all, in their order
        whole = NamedSharding(self.mesh, P())
        tokens, log_probs = map(np.asarray, moved_by_program(tuple(drawn), (whole, whole)))
        return _cut(tokens[: len(prompts)], log_probs[: len(prompts)], self.stop_tokens)

    def _padded(self, prompts: list[np.ndarray]) -> tuple[jax.Array, jax.Array]:
        """Returns prompts [rows, prompt_width] and their lengths, with rows for each device that shares them."""
        longest = max(map(len, prompts))
        if longest > self.prompt_width:
            raise Refused(
                f"[rollout] a prompt has {longest} tokens, above the {self.prompt_width} that prompts are padded to; "
                "cut it"
            )
        axes = tuple(axis for axis in self.mesh.axis_names if axis != "tensor")
        shards = axis_size(self.mesh, *axes)
        count = -(-len(prompts) // shards) * shards
        rows, lengths = np.zeros((count, self.prompt_width), np.int32), np.ones(count, np.int32)
        for row, prompt in enumerate(prompts):
            rows[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        sharding = NamedSharding(self.mesh, P(axes))
        return to_devices(rows, sharding), to_devices(lengths, sharding)


def to_devices(leaf: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """Returns an array that every process has whole as one on the devices of all."""
    if jax.process_count() == 1:
        return jax.device_put(leaf, sharding)
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])


def _cut(tokens: np.ndarray, log_probs: np.ndarray, stop_tokens: tuple[int, ...]) -> Responses:
    """Cuts each row after its first stop token."""
    stops = np.isin(tokens, stop_tokens)
    ended = stops.any(1)
    lengths = np.where(ended, stops.argmax(1) + 1, tokens.shape[1])
    return Responses(
        [row[:n] for row, n in zip(tokens, lengths, strict=True)],
        [row[:n] for row, n in zip(log_probs, lengths, strict=True)],
        np.asarray(ended),
    )
