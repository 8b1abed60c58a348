"""Llama, Qwen2 and Qwen3 of the transformers library: logits, losses, log-probs and gradients, in float64."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some_slow
from whole import apply, logits

sys.path.insert(0, str(Path(__file__).parent))
from hf_weights import hf_leaves, load_hf  # noqa: E402

from jaxfb.losses.language_model import next_token_loss
from jaxfb.models.transformer import transformer

GOLDEN = Path(__file__).parent.parent / "golden"
ROWS, LENGTH = 3, 8  # every case is padded to one shape: one compilation a model, and padding must be inert
MODELS = ("hf_llama_tiny", "hf_qwen2_tiny", "hf_qwen3_tiny")


def _padded(values, fill=0):
    values = np.asarray(values)
    out = np.full((ROWS, LENGTH), fill, np.int32)
    out[: values.shape[0], : values.shape[1]] = values
    return out


def _microbatch(inputs):
    labels = _padded(inputs["labels"], fill=-100)
    targets = np.concatenate([labels[:, 1:], np.full((ROWS, 1), -100, np.int32)], axis=1)
    positions = inputs["position_ids"]
    return {
        "tokens": _padded(inputs["input_ids"]),
        "targets": targets,
        "loss_mask": (targets != -100).astype(np.float32),
        "segments": _padded(inputs["attention_mask"]),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
        if positions is None
        else _padded(positions),
    }


@pytest.fixture(scope="module", params=some_slow(MODELS, fast=("hf_llama_tiny",)))
def model(request):
    config, params = load_hf(GOLDEN / request.param)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), params)
    cut = transformer(
        config, loss=lambda *args: next_token_loss(*args, chunk=config.loss_chunk, outputs="tokens")
    )

    @jax.jit
    def run(params, microbatch):
        def mean_loss(params):
            out = apply(cut, params, microbatch)
            return out.terms["cross_entropy"].value, out.outputs["log_probs"]

        (loss, log_probs), grads = jax.value_and_grad(mean_loss, has_aux=True)(params)
        return loss, log_probs, logits(config, params, microbatch), grads

    return request.param, params, run


def test_logits_losses_and_gradients_are_theirs(model, golden):
    name, params, run = model
    cases = [case for case in golden("llama_tiny.json")["cases"] if case["inputs"]["model_dir"] == name]
    assert len(cases) >= 2
    for case in cases:
        inputs, expected = case["inputs"], case["expected"]
        loss, log_probs, all_logits, grads = run(params, _microbatch(inputs))
        _same_logits(all_logits, expected["logits"])
        np.testing.assert_allclose(loss, expected["loss_from_logits_float64"], rtol=5e-6)
        _same_log_probs(log_probs, expected["next_token_log_prob"], inputs)
        _same_gradients(hf_leaves(grads), expected)


def _same_logits(ours, theirs):
    for row, row_logits in enumerate(theirs):
        for position, expected in enumerate(row_logits):
            if expected is not None and expected[0] is not None:
                np.testing.assert_allclose(ours[row, position], expected, rtol=0, atol=5e-5)


def _same_log_probs(ours, theirs, inputs):
    counted = _microbatch(inputs)["loss_mask"]
    for row, values in enumerate(theirs):
        for position, expected in enumerate(values):
            if counted[row, position]:
                np.testing.assert_allclose(ours[row, position], expected, rtol=0, atol=5e-5)


def _same_gradients(ours, expected):
    assert set(ours) == set(expected["grad_norms"])
    for name, norm in expected["grad_norms"].items():
        np.testing.assert_allclose(np.linalg.norm(ours[name]), norm, rtol=5e-6, err_msg=name)
    for name, grad in expected["grads_of_small_params"].items():
        np.testing.assert_allclose(ours[name], grad, rtol=0, atol=5e-6 * np.linalg.norm(grad), err_msg=name)
