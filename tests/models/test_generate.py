"""A sampled token is the one the training forward would have predicted, with the same log-probability."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some_slow
from whole import logits

from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate import _request, generate, stream
from jaxfb.models.pick import Pick
from jaxfb.models.transformer import init_params

CONFIG = TransformerConfig(
    vocab_size=23, num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, qk_norm=True, qkv_bias=True
)
all_logits = jax.jit(logits, static_argnums=0)


@pytest.fixture(scope="module")
def params():
    # ten times the initial weights: random, but far from a tie between two tokens
    make = jax.jit(lambda key: init_params(CONFIG, key, jnp.float64))
    return jax.tree.map(lambda x: 10 * x, make(jax.random.key(0)))


@pytest.mark.parametrize("window", some_slow([None, 4], fast=[4]))
def test_greedy_equals_the_training_forward_at_every_step_for_ragged_prompts(params, window):
    config = dataclasses.replace(CONFIG, window=window)
    prompts, lengths = np.array([[3, 1, 4, 1, 5], [9, 2, 0, 0, 0], [6, 5, 3, 0, 0]]), [5, 2, 3]
    out = generate(config, params, prompts, 6, prompt_lengths=jnp.array(lengths))
    for row, length in enumerate(lengths):
        whole = np.concatenate([prompts[row, :length], out.tokens[row]])[None]
        log_probs = jax.nn.log_softmax(all_logits(config, params, {"tokens": whole}))[0, length - 1 : -1]
        np.testing.assert_array_equal(out.tokens[row], log_probs.argmax(-1))
        np.testing.assert_allclose(out.log_probs[row], log_probs.max(-1), rtol=0, atol=1e-12)


@pytest.mark.slow
def test_sampling_is_keyed_by_row_and_top_k_cuts_the_tail(params):
    prompts = jnp.array([[3, 1], [9, 2], [3, 1]])
    sample = lambda rows, **how: generate(  # noqa: E731
        CONFIG, params, prompts[rows], 8, temperature=2.0, key=jax.random.key(5), **how
    )
    out = sample(slice(0, 3))
    np.testing.assert_array_equal(out.tokens[:2], sample(slice(0, 2)).tokens)
    assert (out.tokens[0] != out.tokens[2]).any()
    greedy = generate(CONFIG, params, prompts, 8)
    np.testing.assert_array_equal(sample(slice(0, 3), top_k=1).tokens, greedy.tokens)
    whole = jnp.concatenate([prompts[:1], out.tokens[:1]], axis=1)
    expected = jax.nn.log_softmax(all_logits(CONFIG, params, {"tokens": whole}))[0, 1:-1]
    np.testing.assert_allclose(out.log_probs[0], expected[jnp.arange(8), out.tokens[0]], atol=1e-12)


@pytest.mark.slow
def test_log_probs_are_of_the_temperature_that_was_sampled_at(params):
    prompts, how = jnp.array([[3, 1]]), {"temperature": 2.0, "key": jax.random.key(5)}
    out = generate(CONFIG, params, prompts, 4, log_prob_temperature=2.0, **how)
    whole = jnp.concatenate([prompts, out.tokens], axis=1)
    expected = jax.nn.log_softmax(all_logits(CONFIG, params, {"tokens": whole}) / 2)[0, 1:-1]
    np.testing.assert_allclose(out.log_probs[0], expected[jnp.arange(4), out.tokens[0]], atol=1e-12)


def test_a_row_ends_at_its_stop_token(params):
    prompts = jnp.array([[3, 1], [9, 2]])
    free = generate(CONFIG, params, prompts, 8)
    stop = int(free.tokens[0, 2])
    first = int(np.argmax(np.asarray(free.tokens[0]) == stop))
    out = generate(CONFIG, params, prompts, 8, stop_token=stop)
    np.testing.assert_array_equal(out.tokens[0, : first + 1], free.tokens[0, : first + 1])
    assert (out.tokens[0, first:] == stop).all() and (out.log_probs[0, first + 1 :] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["cudnn", "splash"])
def test_a_kernel_that_training_names_does_not_refuse_a_prompt(params, attention):
    prompts = jnp.array([[3, 1], [9, 2]])
    out = generate(dataclasses.replace(CONFIG, attention=attention), params, prompts, 2)
    np.testing.assert_array_equal(out.tokens, generate(CONFIG, params, prompts, 2).tokens)


@pytest.mark.parametrize(
    "how, message",
    [
        ({"temperature": 1.0}, "a key to draw from"),
        ({"temperature": float("nan")}, "temperature must be a finite number of at least 0, got nan"),
        ({"temperature": "1"}, "temperature must be a finite number of at least 0, got '1'"),
        *(
            ({"log_prob_temperature": t}, "log_prob_temperature must be .* above 0")
            for t in (0, math.nan, -1)
        ),
        *(({"top_k": k}, "top_k must be a positive integer, got") for k in (0, 2.5, "3", True)),
        ({"top_k": 24}, "top_k must be a positive integer of at most 23, got 24"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"min_p": 1.5}, "min_p=1.5 must be above 0 and at most 1"),
        ({"stop_token": 23}, "stop_token=23 must be ids from 0 to 22"),
        ({"stop_token": ["</s>"]}, "must be ids from 0 to 22"),
        ({"stop_token": True}, "stop_token=True must be ids from 0 to 22"),
        ({"stop_token": [3, 1.0]}, "must be ids from 0 to 22"),
        ({"absent_ids": (3,)}, r"absent_ids must be ranges \(first, end\) of ids, such as .*, got \(3,\)"),
        ({"absent_ids": ((5, 3),)}, "absent_ids must be ranges"),
        ({"absent_ids": ((0, 7), (7, 40))}, "leave none of the 23 ids to draw"),
        ({"key": "3"}, r"key must be one key, such as jax.random.key\(0\), or an integer, got '3'"),
        ({"key": jax.random.split(jax.random.key(0))}, "key must be one key"),
        *(({"max_new_tokens": n}, "max_new_tokens must be a positive integer, got") for n in (0, 1.5, True)),
        ({"prompt_tokens": np.zeros((0, 2), int)}, "prompt_tokens must be ids .* of at least one row"),
        (
            {"prompt_tokens": np.zeros((2, 0), int)},
            r"of \(2, 0\) have no token; start an empty prompt with the id",
        ),
        (
            {"prompt_tokens": [3, 1]},
            r"prompt_tokens must be ids \[rows, length\] of at least one row, got \[3, 1\]",
        ),
        ({"prompt_tokens": [[3, 1], [3]]}, r"prompt_tokens must be ids \[rows, length\], got"),
        (
            {"prompt_tokens": np.array([[3.0, 1.0]])},
            r"prompt_tokens must be ids \[rows, length\], which are integers",
        ),
        ({"prompt_tokens": [[3, 23]]}, "prompt_tokens must be ids from 0 to 22, padding too, got 23"),
        ({"prompt_tokens": [[3, -1]]}, "prompt_tokens must be ids from 0 to 22, padding too, got -1"),
        *(
            ({"prompt_lengths": [n]}, f"must be from 1 to the 2 tokens of prompt_tokens, got {n}")
            for n in (0, -2, 3)
        ),
        *(({"prompt_lengths": n}, "prompt_lengths must be 1 lengths, one a row") for n in ([1, 2], 2, [1.0])),
    ],
)
def test_impossible_requests_are_refused(params, how, message):
    with pytest.raises(ValueError, match=message):
        generate(CONFIG, params, **{"prompt_tokens": jnp.ones((1, 2), jnp.int32), "max_new_tokens": 3, **how})


def test_a_model_that_is_no_transformers_sizes_is_refused(params):
    with pytest.raises(ValueError, match=r"\[generate\] config must be a TransformerConfig, got {}"):
        generate({}, params, jnp.ones((1, 2), jnp.int32), 3)


@pytest.mark.parametrize("lengths", [[1, 2], np.array([1, 2], np.uint8)])
def test_a_request_may_be_made_of_lists_and_an_int_as_key(lengths):
    given = {
        "prompt_lengths": lengths,
        "temperature": 1.0,
        "stop_token": (np.int64(3), 4),
        "absent_ids": [[5, 6]],
    }
    prompt, pick, (found, _, stops, keys) = _request(CONFIG, [[3, 1], [9, 2]], 3, 7, **given)
    assert prompt.tolist() == [[3, 1], [9, 2]] and found.tolist() == [1, 2] and stops.tolist() == [3, 4]
    assert pick.absent == ((5, 6),) and prompt.dtype == np.int32 and found.dtype == np.int32
    for key in (jax.random.key(7), jax.random.PRNGKey(7)):
        same = _request(CONFIG, [[3, 1], [9, 2]], 3, key, **given)[2][3]
        np.testing.assert_array_equal(jax.random.key_data(keys), jax.random.key_data(same))


def test_values_that_are_traced_are_not_looked_at(params):
    traced = jax.eval_shape(
        lambda prompt, lengths, key: generate(
            CONFIG, params, prompt, 3, prompt_lengths=lengths, temperature=1.0, key=key
        ),
        *(jnp.ones((2, 4), jnp.int32), jnp.ones(2, jnp.int32), jax.random.key(0)),
    )
    assert traced.tokens.shape == (2, 3)
    with pytest.raises(ValueError, match="prompt_lengths must be 2 lengths"):
        jax.eval_shape(
            lambda n: generate(CONFIG, params, jnp.ones((2, 4), jnp.int32), 3, prompt_lengths=n), 1
        )


def test_of_several_stop_tokens_any_ends_its_row(params):
    prompts = jnp.array([[3, 1], [9, 2]])
    free = np.asarray(generate(CONFIG, params, prompts, 8).tokens)
    stops = [int(free[0, 2]), int(free[1, 4])]
    out = generate(CONFIG, params, prompts, 8, stop_token=stops)
    for row in (0, 1):
        end = int(np.isin(free[row], stops).argmax())
        np.testing.assert_array_equal(out.tokens[row, : end + 1], free[row, : end + 1])
        assert (out.tokens[row, end:] == free[row, end]).all() and (out.log_probs[row, end + 1 :] == 0).all()


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"temperature": 3.0}, marks=pytest.mark.slow),
        pytest.param({"temperature": 3.0, "top_k": 22}, marks=pytest.mark.slow),
    ],
)
def test_absent_ids_are_never_drawn_and_the_others_probabilities_add_up(params, how):
    prompts, absent = jnp.tile(jnp.array([[3, 1]]), (16, 1)), ((0, 7), (11, 12), (20, 23))
    if how:
        how = how | {"key": jax.random.key(5)}
    out = generate(CONFIG, params, prompts, 8, absent_ids=absent, log_prob_temperature=3.0, **how)
    gone = np.concatenate([np.arange(*ids) for ids in absent])
    assert not np.isin(out.tokens, gone).any()
    whole = jnp.concatenate([prompts, out.tokens], axis=1)
    kept = all_logits(CONFIG, params, {"tokens": whole})[:, 1:-1].at[..., gone].set(-jnp.inf) / 3
    expected = jnp.take_along_axis(jax.nn.log_softmax(kept), out.tokens[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(out.log_probs, expected, rtol=0, atol=1e-12)


def test_filters_keep_what_their_words_mean():
    probabilities = np.array([[0.5, 0.25, 0.15, 0.06, 0.04], [0.05, 0.05, 0.1, 0.3, 0.5]])
    kept = lambda **how: Pick(False, **how).filtered(jnp.log(probabilities)) != -np.inf  # noqa: E731
    np.testing.assert_array_equal(kept(top_k=2), [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(kept(top_p=0.76), [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(kept(top_p=1e-6), [[1, 0, 0, 0, 0], [0, 0, 0, 0, 1]])
    np.testing.assert_array_equal(kept(top_p=1.0), np.ones((2, 5)))
    np.testing.assert_array_equal(kept(min_p=0.29), [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1]])
    np.testing.assert_array_equal(kept(top_k=3, top_p=0.8, min_p=0.5), [[1, 1, 0, 0, 0], [0, 0, 0, 1, 1]])


@pytest.mark.slow
def test_what_comes_piece_by_piece_is_what_comes_at_once(params):
    prompts, lengths = jnp.array([[3, 1, 4], [9, 2, 0]]), jnp.array([3, 2])
    how = {
        "prompt_lengths": lengths,
        "temperature": 1.0,
        "top_p": 0.9,
        "min_p": 0.01,
        "key": jax.random.key(3),
    }
    whole = generate(CONFIG, params, prompts, 8, **how)
    pieces = list(stream(CONFIG, params, prompts, 8, every=3, **how))
    assert [piece.tokens.shape[1] for piece in pieces] == [3, 3, 2]
    for number, leaf in enumerate(whole):
        np.testing.assert_array_equal(np.concatenate([piece[number] for piece in pieces], axis=1), leaf)


@pytest.mark.slow
def test_generation_ends_when_every_row_has_stopped(params):
    prompts = jnp.array([[3, 1], [9, 2]])
    free = np.asarray(generate(CONFIG, params, prompts, 8).tokens)
    stops = [int(free[0, 1]), int(free[1, 2])]
    assert len(list(stream(CONFIG, params, prompts, 8, every=1, stop_token=stops))) <= 3
    whole = generate(CONFIG, params, prompts, 10_000, stop_token=stops)  # as many steps would take minutes
    np.testing.assert_array_equal(whole.tokens[:, -1], whole.tokens[:, 8])
    assert (np.asarray(whole.log_probs)[:, 3:] == 0).all()
