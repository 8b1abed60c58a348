"""Megatron's loss forms: its own scaling numbers, and its own gradients of a small model."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb

PLAN = dict(purpose="train", rows_per_microbatch=1)


def test_scaling_of_every_loss_form(golden):
    """One microbatch of M carries the loss, the rest are empty; Megatron's factor cp is cancelled by its DDP's 1/cp."""
    for case in golden("megatron_loss_scaling.json")["cases"]:
        given = case["inputs"]
        scored = given["is_last_stage"] and not given["collect_non_loss_data"]
        if scored and given["form"] in ("two_tuple", "three_tuple"):
            check_scaling(given, case["expected"], case["name"])


def check_scaling(given, expected, name):
    num_microbatches, tokens, raw = given["num_microbatches"], given["num_tokens"], given["raw_loss"]
    per_token, scale = given["calculate_per_token_loss"], given["grad_scale"] or 1.0
    first = np.arange(num_microbatches) == 0
    out = jaxfb.get_forward_backward_func()(
        scaled_model(given["form"], per_token),
        jnp.float64(1),
        {"raw": np.where(first, raw, 0.0), "tokens": np.where(first, tokens or 0, 0)},
        jaxfb.BatchPlan(rows=num_microbatches, **PLAN),
        grad_scale=scale,
    )
    scaled = expected["scaled_loss"] / (given["cp_size"] if given["form"] == "two_tuple" else 1)
    if given["form"] == "three_tuple" and per_token:
        # finalize_model_grads divides by the tokens of all microbatches; where there are none, ours is zero
        scaled = scaled / tokens if tokens else 0.0
    np.testing.assert_allclose(out.loss, scaled, rtol=1e-12, err_msg=name)
    np.testing.assert_allclose(out.grads, scaled * scale, rtol=1e-12, err_msg=name)
    assert out.per_microbatch["loss"].total.shape == (num_microbatches,)


@cache  # one program for all cases of a form
def scaled_model(form, per_token):
    def loss_func(params, microbatch, rng):
        loss, tokens = params * microbatch["raw"].sum(), microbatch["tokens"].sum()
        if form == "two_tuple":
            return loss, {"loss": loss}
        return loss, tokens, {"loss": (loss, tokens)}

    return jaxfb.from_megatron(loss_func, per_token=per_token)


@pytest.mark.slow
def test_gradients_of_megatrons_own_runs(golden):
    for case in golden("megatron_pipeline_grads.json")["cases"]:
        given, expected = case["inputs"], case["expected"]
        out = run_golden(given, jaxfb.make_mesh(data=given["data_parallel_size"]))
        np.testing.assert_allclose(out.loss, expected["normalised_loss"], rtol=1e-9, err_msg=case["name"])
        assert_golden_grads(out.grads, case)


def run_golden(given, mesh, **options):
    """The model of the golden file (its README gives the formulas) through jaxfb on `mesh`."""
    params = golden_params(given)
    dp, num_microbatches = given["data_parallel_size"], given["num_microbatches"]
    plan = jaxfb.BatchPlan(
        "train", rows=dp * num_microbatches * given["micro_batch_size"], data_parallel=dp,
        rows_per_microbatch=given["micro_batch_size"],
    )  # fmt: skip
    rows = lambda leaf: np.asarray(leaf).swapaxes(0, 1).reshape(plan.rows, -1)  # noqa: E731
    batch = {name: rows(given[name]) for name in ("tokens", "labels", "loss_mask")}
    fb = jaxfb.get_forward_backward_func(mesh, normalize="global", **options)
    model = golden_model(given["loss_form"], given["calculate_per_token_loss"])
    return fb(model, params, batch, plan, grad_scale=given["grad_scale"] or 1.0)


def golden_params(given):
    """The golden file's flat names as a dict with stacked layers."""
    flat = {name: np.asarray(value, np.float64) for name, value in given["params"].items()}
    stack = lambda leaf: np.stack([flat[f"layers.{i}.{leaf}"] for i in range(given["num_layers"])])  # noqa: E731
    outer = {name: value for name, value in flat.items() if not name.startswith("layers.")}
    return {**outer, "layers": {leaf: stack(leaf) for leaf in ("w1", "b1", "w2", "b2")}}


@cache
def golden_model(form, per_token):
    def embed(outer, microbatch, rng):
        return outer["embed"][microbatch["tokens"]]

    def layer(p, hidden, microbatch, rng):
        return hidden + jax.nn.gelu(hidden @ p["w1"] + p["b1"], approximate=False) @ p["w2"] + p["b2"]

    def head(outer, hidden, microbatch, rng):
        kernel = outer["head.w"] if "head.w" in outer else outer["embed"].T
        logits = hidden @ kernel + outer.get("head.b", 0)
        picked = jnp.take_along_axis(logits, microbatch["labels"][..., None], -1)[..., 0]
        mask = microbatch["loss_mask"]
        loss, tokens = (mask * (jax.nn.logsumexp(logits, -1) - picked)).sum(), mask.sum()
        answer = (loss, tokens, {}) if form == "three_tuple" else (loss / jnp.maximum(tokens, 1), {})
        return jaxfb.from_megatron(lambda *_: answer, per_token=per_token)(None, None, None)

    return jaxfb.Pipelined(embed, layer, head)


def assert_golden_grads(grads, case):
    for name, value in case["expected"]["grads"].items():
        got = grads[name] if name in grads else grads["layers"][name.split(".")[-1]][int(name.split(".")[1])]
        np.testing.assert_allclose(got, value, rtol=1e-9, atol=1e-12, err_msg=f"{case['name']} {name}")


def test_refuses_what_is_not_a_megatron_tuple():
    fb = jaxfb.get_forward_backward_func()
    plan = jaxfb.BatchPlan(rows=2, **PLAN)
    with pytest.raises(ValueError, match="must return .loss, dict. or"):
        fb(jaxfb.from_megatron(lambda p, mb, rng: p), jnp.float64(1), {"x": np.ones(2)}, plan)
