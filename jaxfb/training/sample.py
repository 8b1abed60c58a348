"""A continuation of a prompt by trained parameters, as text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfb.data import Tokenizer
from jaxfb.data.tokenizer import absent_ids
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate import generate


def continue_text(
    sizes: TransformerConfig,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int = 0,
    mesh: Mesh | None = None,
) -> str:
    """The text that follows `prompt`, at most `tokens` tokens; it ends where the model ends the document.

    An empty prompt is the start of a document. mesh: where the parameters are, if on several processes: each
    of them must call this, and gets the text.
    """
    start = [] if tokenizer.start_id is None else [tokenizer.start_id]
    ids = [*start, *tokenizer.encode([prompt])[0].tolist()] if not prompt else tokenizer.encode([prompt])[0]
    if len(ids) == 0:
        raise ValueError(
            "[generate] the prompt is empty and this tokenizer has no start token; give a prompt"
        )

    def draw(params):
        return generate(
            sizes,
            params,
            jnp.asarray(ids, jnp.int32)[None],
            tokens,
            temperature=temperature,
            stop_token=tokenizer.eos_id,
            absent_ids=absent_ids(tokenizer, sizes.vocab_size),
            key=jax.random.key(seed),
        )

    if mesh is not None:
        draw = jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()))
    return tokenizer.decode(jax.device_get(draw(params).tokens)[0])
