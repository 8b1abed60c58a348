"""What differs from Llama's layers obeys the law on every axis, is counted, and is refused where it makes no sense."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import logits

from jaxfb import check_equivalence
from jaxfb.config.model import ModelConfig
from jaxfb.models import rope
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.generate import generate, stream
from jaxfb.models.latent import Latent
from jaxfb.models.rope import document_lengths, positions_in_documents
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.transformer import init_params, transformer
from jaxfb.models.variant import Variant
from jaxfb.training.check import narrow

SIZES = TransformerConfig(
    vocab_size=24, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=24, loss_chunk=8,
    attention="xla", mtp_weight=0.5,
)  # fmt: skip
VARIANTS = {
    "gemma": replace(
        SIZES,
        tied_embeddings=True,
        variant=Variant(
            "gelu_tanh",
            "both",
            norm_offset=True,
            embedding_scale=4.0,
            attention_scale=0.3,
            rotary_share=0.5,
            attention_softcap=1.5,
        ),
    ),
    "olmo2": replace(
        SIZES,
        qk_norm=True,
        qkv_bias=True,
        dropout=0.2,
        variant=Variant(norms="post", qk_norm_over="token", output_bias=True, mlp_bias=True),
    ),
    "gpt_oss": replace(
        SIZES,
        num_experts=4,
        expert_mlp_size=8,
        shared_expert_size=8,
        variant=Variant("clamped_silu", mlp_bias=True, attention_sinks=True),
    ),
}
VARIANTS["deepseek"] = replace(
    VARIANTS["gpt_oss"],
    num_experts=8,
    num_kv_heads=4,
    head_size=8,
    router_scores="sigmoid",
    router_bias=True,
    router_groups=4,
    router_top_groups=2,
    latent=Latent(key_value_rank=6, rotary_size=4, value_size=6, query_rank=8),
    variant=Variant(attention_scale=0.3),
)
VARIANTS["longrope"] = replace(
    SIZES,
    variant=Variant(rotary_share=0.5),
    head_size=8,
    rope_scaling=RopeScaling(
        "longrope", 4.0, original_length=4, short_factors=(1.0, 1.5), long_factors=(2.0, 5.0)
    ),
)
VARIANTS["published"] = replace(SIZES, mtp_depth=2, mtp_as_published=True)
LAWS = {
    "published": [dict(pipe=2, tensor=2, fsdp=2)],
    "longrope": [dict(tensor=2, context=2, fsdp=2), dict(pipe=2, context=2)],
    "deepseek": [dict(tensor=2, context=2, expert=2), dict(pipe=2, tensor=2)],
    "gemma": [dict(pipe=2, tensor=2, fsdp=2)],
    "olmo2": [dict(tensor=2, context=2, fsdp=2), dict(pipe=2, fsdp=2)],
    "gpt_oss": [dict(expert=2, tensor=2, fsdp=2)],
}

whole_logits = jax.jit(logits, static_argnums=0)


def drawn(config):
    """Parameters in float64 whose scales and biases are no ones and zeros."""
    params = jax.jit(lambda key: init_params(config, key, "float64"))(jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: np.asarray(leaf) + 0.2 * rng.normal(size=leaf.shape), params)


def batch(rows=8, length=8):
    rng = np.random.default_rng(0)
    tokens, targets = rng.integers(0, 24, (2, rows, length), np.int32)
    segments = np.where(np.arange(length) < rng.integers(2, length, (rows, 1)), 1, 2).astype(np.int32)
    segments[1, -2:] = 0
    mask = (segments > 0).astype(np.float64)
    return {"tokens": tokens, "targets": targets, "segments": segments, "loss_mask": mask}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAWS)
def test_no_mesh_changes_a_gradient(name):
    config = VARIANTS[name]
    rng = jax.random.key(3) if config.dropout else None
    check_equivalence(
        transformer(config), drawn(config), batch(), LAWS[name], ["1f1b"], rng=rng, fsdp_gather="layer"
    ).raise_if_above(1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma", "longrope", "gpt_oss", "deepseek"])
def test_a_cache_of_keys_changes_no_probability(name):
    config, params = replace(VARIANTS[name], dropout=0.0), drawn(VARIANTS[name])
    prompt, lengths = batch(rows=2)["tokens"], np.array([8, 3])
    found = generate(config, params, prompt, 5, prompt_lengths=lengths)
    for row, length in enumerate(lengths):
        tokens = np.concatenate([prompt[row, :length], found.tokens[row]])[None]
        wanted = jax.nn.log_softmax(whole_logits(config, params, {"tokens": tokens}))[0, length - 1 : -1]
        np.testing.assert_array_equal(found.tokens[row], wanted.argmax(-1))
        np.testing.assert_allclose(found.log_probs[row], wanted.max(-1), rtol=1e-12)


@pytest.mark.slow
def test_a_text_is_turned_as_a_short_one_until_it_is_long():
    config, params = VARIANTS["longrope"], drawn(VARIANTS["longrope"])  # long are more than 4 tokens
    prompt, lengths = batch(rows=2, length=4)["tokens"], np.array([3, 2])
    found = generate(config, params, prompt, 5, prompt_lengths=lengths, stop_token=[22, 23])
    for row, length in enumerate(lengths):
        tokens = np.concatenate([prompt[row, :length], found.tokens[row]])[None, : length + 4]
        short, long = (
            jax.nn.log_softmax(whole_logits(one, params, {"tokens": tokens}))[0, length - 1 :]
            for one in (replace(config, rope_scaling=config.rope_scaling.of_length(size)) for size in (4, 5))
        )
        wanted = np.concatenate([short[:2], long[2:]])  # the third is drawn after five tokens of the longest
        np.testing.assert_array_equal(found.tokens[row], wanted.argmax(-1))
        np.testing.assert_allclose(found.log_probs[row], wanted.max(-1), rtol=1e-12)
        assert np.abs(short - long).max() > 1e-3
    pieces = stream(config, params, prompt, 5, prompt_lengths=lengths, stop_token=[22, 23], every=3)
    np.testing.assert_array_equal(np.concatenate([piece.tokens for piece in pieces], axis=1), found.tokens)
    stops = np.asarray(found.tokens[:, 1])  # both rows end before the longest is long
    ended = generate(config, params, prompt, 5, prompt_lengths=lengths, stop_token=stops)
    for row, tokens in enumerate(np.asarray(found.tokens)):
        number = np.isin(tokens, stops).argmax()
        np.testing.assert_array_equal(
            ended.tokens[row], np.append(tokens[:number], [tokens[number]] * (5 - number))
        )


def test_a_document_has_the_length_that_its_positions_tell():
    positions = np.array([[0, 1, 2, 0, 1, 0, 0, 1], [4, 5, 6, 7, 8, 0, 0, 0]])
    wanted = [[3, 3, 3, 2, 2, 1, 2, 2], [9, 9, 9, 9, 9, 1, 1, 1]]
    np.testing.assert_array_equal(document_lengths(positions), wanted)


@pytest.mark.parametrize("size", [128, 256])
def test_a_product_turns_heads_as_slices_do(monkeypatch, size):
    """On TPUs halves are swapped by a product; the rotation and its gradient are the same to the last bit."""
    draw = np.random.default_rng(3).normal
    x, cotangent = (jnp.asarray(draw(size=(2, 7, 3, size)), jnp.bfloat16) for _ in range(2))
    positions = jnp.arange(14).reshape(2, 7)
    turned = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(rope, "platform_here", lambda platform=platform: platform)
        out, back = jax.vjp(lambda x: rope.rotate(x, positions, 10_000.0), x)
        turned.append((out, back(cotangent)[0]))
    jax.tree.map(np.testing.assert_array_equal, *turned)


@pytest.mark.parametrize(
    "kind, shards, size, dtype, by_product",
    [
        ("TPU v6 lite", 1, 128, jnp.bfloat16, True),
        ("TPU v5", 1, 256, jnp.float16, True),
        ("TPU v5 lite", 1, 128, jnp.bfloat16, False),
        ("TPU v6 lite", 2, 128, jnp.bfloat16, False),
        ("TPU v6 lite", 1, 64, jnp.bfloat16, False),  # half of the lanes
        ("TPU v6 lite", 1, 128, jnp.float32, False),  # rounded by a product
        ("cpu", 1, 128, jnp.bfloat16, False),
    ],
)
def test_heads_are_turned_by_a_product_where_it_pays(monkeypatch, kind, shards, size, dtype, by_product):
    monkeypatch.setattr(rope, "platform_here", lambda: "tpu" if "TPU" in kind else kind)
    monkeypatch.setattr(rope, "kind_here", lambda: kind)
    monkeypatch.setattr(rope, "num_shards", lambda: shards)
    x, positions = jax.ShapeDtypeStruct((1, 4, 2, size), dtype), jnp.arange(4)[None]
    program = str(jax.make_jaxpr(lambda x: rope.rotate(x, positions, 10_000.0))(x))
    assert ("dot_general" in program) == by_product


def test_short_and_long_documents_of_a_row_are_turned_as_alone():
    config, tokens = VARIANTS["longrope"], batch(rows=2, length=10)["tokens"]
    params = drawn(config)
    starts = np.where(np.arange(10) < 3, 0, 3)
    packed = {
        "tokens": tokens,
        "positions": np.broadcast_to(np.arange(10) - starts, tokens.shape),
        "segments": np.broadcast_to(starts + 1, tokens.shape),
    }
    found = whole_logits(config, params, packed)
    alone = [whole_logits(config, params, {"tokens": tokens[:, part]}) for part in (slice(3), slice(3, None))]
    np.testing.assert_allclose(found, np.concatenate(alone, axis=1), rtol=0, atol=1e-12)
    for part, of_part in zip(
        (tokens[:, :3], tokens[:, 3:]), alone, strict=True
    ):  # by the factors of its length
        scaled = replace(config, rope_scaling=config.rope_scaling.of_length(part.shape[1]))
        wanted = whole_logits(scaled, params, {"tokens": part})
        np.testing.assert_allclose(of_part, wanted, rtol=0, atol=1e-12)


def test_a_document_without_positions_is_as_long_as_its_segment():
    """And no longer: its row has padding or other documents. Padding within a document counts as in a row."""
    segments = [[0, 0, 3, 3, 3, 9, 9, 0], [1, 1, 0, 0, 1, 2, 0, 0], [0] * 8, [5, 6, 7, 7, 7, 7, 0, 7]]
    found = positions_in_documents(jnp.array(segments))
    wanted = [[0, 0, 0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 0, 0, 0], [0] * 8, [0, 0, 0, 1, 2, 3, 4, 5]]
    np.testing.assert_array_equal(found, wanted)

    config, tokens = VARIANTS["longrope"], batch(rows=2, length=8)["tokens"][:1]
    params, segments = drawn(config), np.array([[1, 1, 1, 2, 2, 0, 0, 0]])
    packed = whole_logits(config, params, {"tokens": tokens, "segments": segments})
    for part in (slice(3), slice(3, 5)):
        alone = whole_logits(config, params, {"tokens": tokens[:, part]})
        np.testing.assert_allclose(packed[:, part], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"long_factors": (1.0,)}, "needs 2 short_factors and as many long_factors, got 2 and 1"),
        ({"short_factors": (1.0, 0.0)}, r"short_factors\[1\] must be .* above 0"),
        ({"short_factors": 3}, "short_factors must be a list of numbers, got 3"),
        ({"kind": "yarn"}, "kind=yarn needs 0 short_factors"),
        ({"original_length": None}, "needs original_length"),
    ],
)
def test_wrong_factors_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(VARIANTS["longrope"].rope_scaling, **change)


def test_factors_for_another_head_are_refused():
    with pytest.raises(ValueError, match="needs 4 short_factors and as many long_factors, got 2 and 2"):
        replace(VARIANTS["longrope"], variant=Variant())


@pytest.mark.parametrize("name", VARIANTS)
def test_the_check_of_a_config_keeps_what_a_layer_has(name):
    own = {**vars(VARIANTS[name]), "head_size": 40, "num_layers": 4}
    if name == "longrope":
        ten = dict.fromkeys(("short_factors", "long_factors"), (1.0,) * 10)
        own["rope_scaling"] = replace(own["rope_scaling"], **ten)
    small = narrow(ModelConfig(**own))
    assert small.head_size == 8 and small.num_layers == 4
    assert small.variant.norms == own["variant"].norms and bool(small.latent) == bool(own["latent"])
    assert small.router_groups == min(own["router_groups"], 2)


@pytest.mark.parametrize("name", VARIANTS)
def test_parameters_are_counted(name):
    config = replace(VARIANTS[name], mtp_depth=1)
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == num_params(config)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"activation": "relu"}, "activation must be one of 'silu', .* did you mean 'gelu'"),
        ({"norms": "none"}, "norms must be one of 'pre', 'post', 'both'"),
        ({"rotary_share": 1.5}, "rotary_share"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"attention_scale": float("nan")}, "attention_scale"),
        ({"norm_offset": 1}, "norm_offset"),
    ],
)
def test_wrong_variants_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Variant(**change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_kv_heads": 2}, "num_kv_heads=2 does not go with latent attention; use 4"),
        ({"qkv_bias": True}, "qkv_bias=True does not go with latent attention; use False"),
        ({"variant": Variant(attention_sinks=True)}, "variant.attention_sinks=True does not go with latent"),
        ({"head_size": 4}, "value_size=6 must be at most head_size=4"),
        ({"router_groups": 3}, "must be a multiple of router_groups=3"),
        ({"router_top_groups": 5}, "router_top_groups=5 must be from 1 to router_groups=4; use 4"),
        ({"experts_per_token": 5}, "at most the 4 experts of router_top_groups=2 groups"),
    ],
)
def test_what_does_not_go_with_latents_and_groups_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(VARIANTS["deepseek"], **change)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rotary_size": 3}, "rotary_size=3 must be even; use 4"),
        ({"key_value_rank": 0}, "key_value_rank"),
        ({"query_rank": 0}, "query_rank"),
        ({"interleaved": 1}, "interleaved"),
    ],
)
def test_wrong_latents_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Latent(**{"key_value_rank": 6, "rotary_size": 4, "value_size": 6, **change})


def test_a_share_that_makes_no_pairs_is_refused_with_one_that_does():
    with pytest.raises(ValueError, match="must be pairs; use rotary_share=1.0") as error:
        replace(SIZES, variant=Variant(rotary_share=0.75))
    replace(SIZES, variant=Variant(**error.value.choices[0]))


def test_the_share_of_a_head_that_is_proposed_is_legal():
    """Though a product of floats may be a little less than the number it stands for, as 44 * (30 / 44) is."""
    for head_size in range(2, 300, 2):
        for size in range(2, head_size + 1, 2):
            assert Variant(rotary_share=size / head_size).rotary_size(head_size) == size
