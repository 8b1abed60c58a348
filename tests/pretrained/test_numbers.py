"""Tiny models give the logits, loss and gradient norms of transformers (`benchmarks/pretrained_goldens.py`)."""

import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import logits

from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of
from jaxfb.pretrained.architectures import ARCHITECTURES, describe

GOLDEN = Path(__file__).parent.parent / "golden"
MODELS = sorted(path.parent.name for path in GOLDEN.glob("hf_*_tiny/expected.json"))
SLOW = {
    f"hf_{name}_tiny"
    for name in (
        "deepseek_v3_dense",
        "deepseek_v3",
        "deepseek_v3_yarn",
        "gemma2",
        "gemma3",
        "gpt_oss",
        "gemma",
        "smollm3",
        "qwen3_moe_sparse",
    )
}
"""Models whose gradients take seconds to compile."""


def loaded(directory, dtype=jnp.float64):
    repository = open_repository(directory)
    sizes = sizes_of(repository.config)
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0), dtype))
    return repository, sizes, load_params(repository, sizes, shapes)


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in MODELS])
def test_logits_loss_and_gradient_norms_are_those_of_transformers(name, tmp_path):
    repository, sizes, params = loaded(GOLDEN / name)
    expected = json.loads((GOLDEN / name / "expected.json").read_text())
    tokens = np.asarray(expected["input_ids"])

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def run(params):
        ours = logits(sizes, params, {"tokens": tokens})
        log_probs = jax.nn.log_softmax(ours[:, :-1])
        return -jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1).mean(), ours

    (loss, ours), grads = run(params)
    np.testing.assert_allclose(ours[:, expected["positions"]], expected["logits"], rtol=0, atol=5e-5)
    np.testing.assert_allclose(loss, expected["loss"], rtol=0, atol=2e-6)
    export_model(tmp_path / "gradients", grads, repository.config)
    stored = open_repository(tmp_path / "gradients")
    norms = {tensor: np.linalg.norm(stored.read(tensor)) for tensor in stored.tensors}
    without = set(norms) - set(
        expected["grad_norms"]
    )  # those of no parameter: a bias that gradients do not move
    assert not any(norms[tensor] for tensor in without) and set(expected["grad_norms"]) <= set(norms)
    for tensor, theirs in expected["grad_norms"].items():
        np.testing.assert_allclose(norms[tensor], theirs, rtol=5e-5, atol=1e-6, err_msg=tensor)


@pytest.mark.parametrize("name", [pytest.param(m, marks=[pytest.mark.slow] * (m in SLOW)) for m in MODELS])
def test_a_round_trip_is_bitwise(name, tmp_path):
    repository, _, params = loaded(GOLDEN / name, jnp.float32)
    export_model(tmp_path / "out", params, repository.config)
    again = open_repository(tmp_path / "out")
    assert {n: t[1:] for n, t in again.tensors.items()} == {n: t[1:] for n, t in repository.tensors.items()}
    for tensor in repository.tensors:
        np.testing.assert_array_equal(again.read(tensor), repository.read(tensor))


@pytest.mark.parametrize("name", MODELS)
def test_a_description_is_of_the_same_transformer(name):
    sizes = sizes_of(open_repository(GOLDEN / name).config)
    assert sizes_of(describe(sizes)) == sizes


def test_every_architecture_has_numbers():
    configs = [json.loads(path.read_text()) for path in GOLDEN.glob("hf_*_tiny/config.json")]
    assert {config["model_type"] for config in configs} == set(ARCHITECTURES)
