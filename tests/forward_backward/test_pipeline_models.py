"""Pipelines of other models than the toy, and schedules of one's own; what no pipeline can run is refused.

Megatron-LM's own gradients, of its own 1F1B and interleaved schedules, come out of the same schedules here.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from losses.test_megatron import assert_golden_grads, run_golden
from marks import some_slow
from test_pipeline import KEY, close

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.schedules import Schedule


def two_streams():
    """Hidden is a dict of arrays of two dtypes and shapes; the layers have no terms; the head returns a Sum."""

    def embed(outer, microbatch, rng):
        return {
            "wide": outer["embed"][microbatch["tokens"]],
            "mean": microbatch["row_weight"][:, None] * outer["gain"],
        }

    def layer(weights, hidden, microbatch, rng):
        wide = jnp.tanh(hidden["wide"] @ weights["w"]) * hidden["mean"].sum(1)[:, None, None]
        wide = jnp.where(microbatch["mask"][..., None] > 0, wide, hidden["wide"])
        return {"wide": wide, "mean": hidden["mean"] + wide.mean((1, 2))[:, None] * weights["b"][:3]}

    def head(outer, hidden, microbatch, rng):
        return jaxfb.Sum(((hidden["wide"] @ outer["embed"].T) ** 2).sum() + hidden["mean"].sum(), 4.0)

    return jaxfb.Pipelined(embed, layer, head)


def own_schedule():
    """Three microbatches on two devices; nothing regular about it."""
    return Schedule.from_text(
        """
        device 0  F0.0  F1.0  .     .     B0.0  F2.0  .          B1.0  B2.0
        device 1  .     F0.0  B0.0  F1.0  B1.0  .     F2.0+B2.0  .     .
        """
    )


REMAT = {"schedule": "zero_bubble", "remat": "full"}


@pytest.mark.parametrize(
    "options", [{"schedule": own_schedule()}, pytest.param(REMAT, marks=pytest.mark.slow)]
)
def test_any_model_and_a_schedule_of_ones_own(options):
    model, params, batch = two_streams(), toy.params(layers=4), toy.batch(rows=6)
    outer = {name: leaf for name, leaf in params.items() if name != "layers"}

    def loss(params):
        hidden = model.embed(params, batch, None)
        for index in range(4):
            weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
            hidden = model.layer(weights, hidden, batch, None)
        return model.head(params, hidden, batch, None).total / 12

    assert outer.keys() == {"embed", "gain"}
    wanted = jax.value_and_grad(loss)(params)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2), poison_bubbles=True, **options)
    out = fb(model, params, batch, jaxfb.BatchPlan(rows=6, rows_per_microbatch=2))
    close((out.loss, out.grads), wanted)


def test_what_no_pipeline_can_run_is_refused():
    mesh, plan = jaxfb.make_mesh(pipe=2), jaxfb.BatchPlan(rows=4, rows_per_microbatch=1)
    fb = jaxfb.get_forward_backward_func(mesh, own_schedule())
    with pytest.raises(ValueError, match="is for pipe=2 and 3 microbatches, the call has pipe=2 and 4"):
        fb(toy.model, toy.params(), toy.batch(rows=4), plan)
    with pytest.raises(ValueError, match="is for pipe=2 .* pipe=4"):
        jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=4), own_schedule())
    with pytest.raises(ValueError, match="pipe=2 needs a model cut for stages"):
        jaxfb.get_forward_backward_func(mesh)(
            lambda p, mb, rng: jaxfb.Sum(0.0), toy.params(), toy.batch(rows=4), plan
        )
    with pytest.raises(ValueError, match="unknown schedule '1f1c'; use '1f1b'"):
        jaxfb.get_forward_backward_func(mesh, "1f1c")
    with pytest.raises(ValueError, match="schedule='1f1b' and num_chunks=2 belong to a pipeline"):
        jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2), "1f1b", num_chunks=2)
    with pytest.raises(ValueError, match="cuts a microbatch of 1 rows over pipe=2.*rows_per_microbatch=2"):
        jaxfb.get_forward_backward_func(mesh, head_placement="rows")(
            toy.model, toy.params(), toy.batch(rows=4), plan
        )


def test_an_integer_in_hidden_is_refused():
    """It has no gradient to send back; what is not float is in the microbatch anyway."""

    def embed(outer, microbatch, rng):
        return {"x": outer["embed"][microbatch["tokens"]], "t": microbatch["tokens"]}

    model = dataclasses.replace(two_streams(), embed=embed, layer=lambda weights, hidden, *_: hidden)
    model = dataclasses.replace(model, head=lambda outer, hidden, *_: jaxfb.Sum(hidden["x"].sum(), 1.0))
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2))
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=2)
    with pytest.raises(ValueError, match=r"embed gives hidden\['t'\] in int.*read it from the microbatch"):
        fb(model, toy.params(layers=2), toy.batch(rows=4), plan)


@pytest.mark.slow
def test_without_a_pipeline_an_integer_in_hidden_is_carried_along():
    def embed(outer, microbatch, rng):
        return {"x": toy.embed(outer, microbatch, rng), "t": microbatch["tokens"]}

    def layer(weights, hidden, microbatch, rng):
        x, terms = toy.layer(weights, hidden["x"], microbatch, rng)
        return {"x": x, "t": hidden["t"]}, terms

    def head(outer, hidden, microbatch, rng):
        return toy.head(outer, hidden["x"], {**microbatch, "tokens": hidden["t"]}, rng)

    fb, plan = jaxfb.get_forward_backward_func(), jaxfb.BatchPlan(rows=8, rows_per_microbatch=2)
    arguments = toy.params(), toy.batch(rows=8), plan, jax.random.key(1)
    carrying, plain = fb(jaxfb.Pipelined(embed, layer, head), *arguments), fb(toy.model, *arguments)
    close((carrying.grads, carrying.loss), (plain.grads, plain.loss))


@pytest.mark.slow  # of the fast ones tests/models/test_moe.py has a transformer in a pipeline
def test_the_built_in_transformer_with_packing_and_dropout():
    """pipe x data x tensor against one device: documents packed into rows, a mask drawn per row and layer."""
    config = TransformerConfig(
        vocab_size=24,
        num_layers=4,
        hidden_size=8,
        num_heads=2,
        mlp_size=16,
        dropout=0.3,
        tied_embeddings=True,
    )
    params = init_params(config, jax.random.key(0), jnp.float64)
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 4, (8, 12)), axis=1)[:, ::-1]
    batch = {
        "tokens": rng.integers(0, 24, (8, 12)).astype(np.int32),
        "targets": rng.integers(0, 24, (8, 12)).astype(np.int32),
        "loss_mask": (segments > 0).astype(np.float32),
        "segments": segments.astype(np.int32),
    }

    def run(mesh, plan, **options):
        fb = jaxfb.get_forward_backward_func(mesh, **options)
        call = jax.jit(lambda *given: fb(transformer(config), *given, plan, KEY))
        out = call(params, batch)
        return out.loss, out.grads, out.terms

    mesh = jaxfb.make_mesh(pipe=2, data=2, tensor=2)
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=1, data_parallel=2)
    whole = run(None, jaxfb.BatchPlan(rows=8, num_microbatches=1))
    close(run(mesh, plan, num_chunks=2, remat="selective", poison_bubbles=True), whole)


# Megatron's own runs of its own schedules.

GOLDEN_FAST = ("dp2_sum3_per_token_P2_V2_g2_overlap",)
GOLDEN = [
    "eight_layers_sum3_mean_of_means_P4_V2_g8",
    "base_sum3_per_token_P2_V1_layers1-3",
    *("base_mean2_P2_V1", "base_mean2_P4_V1", "base_mean2_P2_V2_g2_overlap", "base_mean2_P2_V1_dealloc"),
    *(
        f"base_sum3_{n}_{s}"
        for n in ("mean_of_means", "per_token")
        for s in ("P2_V1", "P4_V1", "P2_V2_g2_overlap")
    ),
    "base_sum3_per_token_P2_V1_gradscale",
    *(
        f"zero_token_microbatch_sum3_{n}_{s}"
        for n in ("mean_of_means", "per_token")
        for s in ("P2_V1", "P2_V2_g4_overlap")
    ),
    *("tied_sum3_per_token_P2_V1", "tied_sum3_per_token_P4_V1", "tied_sum3_mean_of_means_P2_V1"),
    *(
        "dp2_mean2_P2_V1",
        "dp2_sum3_mean_of_means_P2_V1",
        "dp2_sum3_per_token_P2_V1",
        "eight_layers_sum3_per_token_P4_V2_g4",
    ),
]


@pytest.mark.parametrize("name", some_slow([*GOLDEN_FAST, *GOLDEN], fast=GOLDEN_FAST))
def test_gradients_of_megatrons_own_pipelines(golden, name):
    """Its 1F1B and interleaved schedules, to 1e-9, through the same schedules here."""
    cases = {case["name"]: case for case in golden("megatron_pipeline_grads.json")["cases"]}
    assert {n for n, case in cases.items() if case["inputs"]["pipeline_size"] > 1} == {*GOLDEN_FAST, *GOLDEN}
    case = cases[name]
    given = case["inputs"]
    mesh = jaxfb.make_mesh(pipe=given["pipeline_size"], data=given["data_parallel_size"])
    lengths = [1, 3] if name.endswith("layers1-3") else None
    out = run_golden(given, mesh, num_chunks=given["num_chunks"], layers_per_stage=lengths)
    np.testing.assert_allclose(out.loss, case["expected"]["normalised_loss"], rtol=1e-9)
    assert_golden_grads(out.grads, case)


@pytest.mark.parametrize("lengths", [(0, 2, 2, 0), pytest.param((2, 0, 0, 2), marks=pytest.mark.slow)])
def test_stages_without_layers_give_the_same_gradients(golden, lengths):
    """Megatron's stages of embedding or loss alone; its gradients do not depend on where the layers are."""
    cases = {case["name"]: case for case in golden("megatron_pipeline_grads.json")["cases"]}
    case = cases["base_sum3_per_token_P4_V1"]
    out = run_golden(case["inputs"], jaxfb.make_mesh(pipe=4), layers_per_stage=lengths)
    np.testing.assert_allclose(out.loss, case["expected"]["normalised_loss"], rtol=1e-9)
    assert_golden_grads(out.grads, case)
