"""A continuation of a prompt by trained parameters, as text."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxfb.data import Tokenizer
from jaxfb.data.tokenizer import absent_ids
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate import generate
from jaxfb.refusal import Refused
from jaxfb.training.machine import check_continuation


def continue_text(
    sizes: TransformerConfig,
    params: Any,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    mesh: Mesh | None,
) -> str:
    """Returns the text that follows `prompt`, at most `tokens` tokens; it ends where the model ends the document.

    An empty prompt is the start of a document. mesh: where the parameters are, if on several processes: each
    of them must call this, and gets the text.
    """
    check_continuation(sizes, tokens)
    ids, stops = _prompt(tokenizer, prompt)

    def draw(params):
        return generate(
            sizes,
            params,
            jnp.asarray(ids, jnp.int32)[None],
            tokens,
            temperature=temperature,
            stop_token=stops,
            absent_ids=absent_ids(tokenizer, sizes.vocab_size),
            key=jax.random.key(seed),
        )

    if mesh is not None:
        draw = jax.jit(draw, out_shardings=NamedSharding(mesh, PartitionSpec()))
    drawn = jax.device_get(draw(params).tokens)[0]
    ends = np.flatnonzero(np.isin(drawn, stops))
    return tokenizer.decode(drawn[: ends[0]] if len(ends) else drawn)


def _prompt(tokenizer: Tokenizer, prompt: str) -> tuple[np.ndarray, tuple[int, ...]]:
    """Returns the ids of the prompt, and those that end what follows it."""
    start = tokenizer.before_text
    if not prompt and not start and tokenizer.start_id is not None:
        start = (tokenizer.start_id,)
    ids = np.array([*start, *tokenizer.encode([prompt])[0]], np.int32)
    if len(ids) == 0:
        raise Refused("[generate] the prompt is empty and this tokenizer has no start token; give a prompt")
    return ids, () if tokenizer.eos_id is None else (tokenizer.eos_id,)
