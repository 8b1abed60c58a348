"""Impossible sizes are refused with the nearest legal choice; parameters and operations are counted."""

import math

import jax
import jax.numpy as jnp
import pytest
from whole import logits

from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.models.transformer import init_params

SIZES = {"vocab_size": 32, "num_layers": 3, "hidden_size": 24, "num_heads": 4}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 26}, "hidden_size=26 must be a multiple of num_heads=4 .* use hidden_size=24 or 32"),
        ({"num_kv_heads": 3}, "num_heads=4 must be a multiple of num_kv_heads=3; use num_kv_heads=2"),
        ({"head_size": 5}, "head_size=5 must be even .* use 6"),
        ({"num_layers": 0}, "num_layers=0 must be positive"),
        ({"dropout": 1.0}, "dropout=1.0 must be at least 0 and below 1"),
        ({"window": 0}, "window=0 must be positive; use null for none"),
        ({"attention": "flash"}, "attention='flash' must be one of auto, xla, cudnn"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        TransformerConfig(**{**SIZES, **change})


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embeddings": True, "qkv_bias": True, "num_kv_heads": 2},
        {"qk_norm": True, "head_size": 8, "mlp_size": 40},
    ],
)
def test_params_and_operations_are_counted_exactly(change):
    config, length = TransformerConfig(**SIZES, **change), 10
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == num_params(config)

    tokens = jnp.zeros((1, length), jnp.int32)
    forward = jax.make_jaxpr(lambda params: logits(config, params, {"tokens": tokens}))(shapes)
    causal_half = 2 * config.num_layers * config.num_heads * config.head_size * length
    assert 3 * (_dot_flops(forward.jaxpr) - causal_half * length) == flops_per_token(config, length) * length


@pytest.mark.parametrize("window, seen", [(None, 50), (100, 50), (300, 50), (1, 1), (10, 9.5)])
def test_a_window_counts_the_tokens_that_are_seen(window, seen):
    full, cut = (flops_per_token(TransformerConfig(**SIZES, window=w), 100) for w in (None, window))
    attention = 12 * 3 * 24  # layers, heads x head_size
    assert (
        full - cut == attention * (50 - seen)
        if window != 1
        else attention * 49 <= full - cut < attention * 50
    )


def _dot_flops(jaxpr):
    """Multiplications and additions of all matrix products, loops counted as often as they run."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            contracted = equation.params["dimension_numbers"][0][0]
            lengths = [equation.invars[0].aval.shape[dim] for dim in contracted]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(lengths)
        for inner in equation.params.values():
            if hasattr(inner, "jaxpr"):
                total += equation.params.get("length", 1) * _dot_flops(inner.jaxpr)
    return total
