"""Metrics of every kind, shape and dtype are those of the whole batch, however it is split."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from marks import some_slow

import jaxfb
from jaxfb import Last, LossOutput, Max, Min, Pipelined, Sum
from jaxfb.hlo import collectives

ROWS, WIDTH = 8, 4
RNG = np.random.default_rng(0)
PARAMS = {"layers": RNG.normal(size=(4, WIDTH, WIDTH))}
BATCH = {"x": RNG.normal(size=(ROWS, WIDTH)), "mask": np.array([1.0, 0, 1, 1, 0, 0, 1, 1])}


def metrics_of(hidden, microbatch):
    """Two numbers a row, so that the vectors are as long as there are microbatches."""
    pairs, mask, rows = hidden[:, :2], microbatch["mask"], hidden.shape[0]
    return {
        "scalar": Sum((pairs[:, 0] * mask).sum(), mask.sum()),
        "vector": Sum((pairs * mask[:, None]).sum(0), mask.sum()),
        "matrix": Sum((pairs[:, :, None] * pairs[:, None, :]).sum(0), rows),
        "weights": Sum(pairs.sum(0), jnp.stack([mask.sum(), (2 * mask).sum()])),
        "halves": Sum((pairs > 0).sum(0), 0.5 * rows),
        "undivided": Sum(pairs.sum(0), None),
        "default": Sum(pairs.sum()),
        "counts": Sum((pairs > 0).sum(0), None),
        "largest": Max(pairs.max(0)),
        "largest int": Max((10 * pairs).astype(jnp.int32).max()),
        "any": Max((pairs > 1).any(0)),
        "smallest": Min(pairs.min()),
        "smallest int": Min((10 * pairs).astype(jnp.int8).min(0)),
        "all": Min((pairs > -1).all()),
        "last": Last(pairs[-1]),
        "last int": Last((10 * pairs[-1]).astype(jnp.int32)),
        "last bool": Last(pairs[-1] > 0),
    }


def embed(outer, microbatch, rng):
    return microbatch["x"]


def layer(weights, hidden, microbatch, rng):
    return jnp.tanh(hidden @ weights)


def head(outer, hidden, microbatch, rng):
    loss = Sum((hidden.sum(1) * microbatch["mask"]).sum(), microbatch["mask"].sum())
    return LossOutput({"loss": loss}, metrics_of(hidden, microbatch))


def loss_fn(params, microbatch, rng):
    hidden = microbatch["x"]
    for weights in params["layers"]:
        hidden = layer(weights, hidden, microbatch, rng)
    return head({}, hidden, microbatch, rng)


MODEL = Pipelined(embed, layer, head)
CASES = {
    "one device": (loss_fn, {}, {}),
    "data": (loss_fn, {"data": 2}, {}),
    "fsdp": (MODEL, {"data": 2, "fsdp": 2}, {}),
    "1f1b": (MODEL, {"pipe": 2}, dict(schedule="1f1b")),
    "interleaved": (MODEL, {"pipe": 2}, dict(schedule="interleaved", num_chunks=2)),
    "zero_bubble": (MODEL, {"pipe": 2, "data": 2}, dict(schedule="zero_bubble")),
    "v_shape": (MODEL, {"pipe": 2}, dict(schedule="v_shape", num_chunks=2)),
    "gpipe": (MODEL, {"pipe": 2, "data": 2}, dict(schedule="gpipe", head_placement="rows")),
}


@cache
def run(case, **call):
    model, sizes, options = CASES[case]
    replicas = int(np.prod([size for axis, size in sizes.items() if axis != "pipe"], dtype=int))
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**sizes), **options)
    return fb(model, PARAMS, BATCH, plan, **call)


def reported(rows=slice(None)):
    """name -> (value, dtype) of these rows at once."""
    out = loss_fn(PARAMS, jax.tree.map(lambda leaf: jnp.asarray(leaf[rows]), BATCH), None)
    return {name: jnp.asarray(metric.value) for name, metric in out.metrics.items()}


@pytest.mark.parametrize("case", some_slow(CASES, fast=("fsdp", "1f1b")))
def test_metrics_are_those_of_the_whole_batch(case):
    got, wanted = {name: metric.value for name, metric in run(case).metrics.items()}, reported()
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-13)
    for name in ("last bool", "any", "all", "last int", "smallest int"):
        assert got[name].dtype == wanted[name].dtype, name


@pytest.mark.parametrize("case", some_slow(CASES, fast=("fsdp", "1f1b")))
def test_metrics_of_each_microbatch_are_those_of_its_rows(case):
    """In the order of the rows, of all replicas; terms are reported beside them."""
    per_microbatch = run(case).per_microbatch
    assert set(per_microbatch) == {"loss", *reported()}
    for microbatch in range(2):
        wanted = reported(slice(microbatch * ROWS // 2, (microbatch + 1) * ROWS // 2))
        got = {name: per_microbatch[name].value[microbatch] for name in wanted}
        chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-13)
        assert all(got[name].dtype == wanted[name].dtype for name in ("any", "last int", "smallest int"))


def test_a_metric_with_the_name_of_a_term_is_reported_under_another():
    def same_name(params, microbatch, rng):
        term = Sum(microbatch["x"].sum() * params, microbatch["x"].shape[0])
        return LossOutput({"loss": term}, {"loss": Max(microbatch["x"].max())})

    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=4)
    out = jaxfb.get_forward_backward_func()(same_name, np.float64(2), BATCH, plan)
    np.testing.assert_allclose(out.per_microbatch["loss"].total.sum(), 2 * BATCH["x"].sum())
    by_microbatch = BATCH["x"].reshape(4, -1).max(1)
    np.testing.assert_array_equal(out.per_microbatch["metrics/loss"].value, by_microbatch)


def test_records_of_microbatches_that_nobody_reads_cost_nothing():
    """And no collective more where somebody does: theirs travel with those of the whole batch."""
    mesh, plan = jaxfb.make_mesh(data=2), jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=2)
    fb = jaxfb.get_forward_backward_func(mesh)

    def few(params, microbatch, rng):
        out = loss_fn(params, microbatch, rng)
        return LossOutput(out.terms, {name: out.metrics[name] for name in ("scalar", "matrix", "largest")})

    def sent(*fields):
        call = jax.jit(lambda p, b: [getattr(fb(few, p, b, plan), field) for field in fields])
        found = collectives(call.lower(PARAMS, BATCH).compile().as_text())
        return len(found), sum(one.bytes for one in found)

    without, read = sent("grads", "loss", "metrics"), sent("grads", "loss", "metrics", "per_microbatch")
    assert read[0] == without[0] and read[1] > without[1]
    assert without[1] < 6000 + 8 * PARAMS["layers"].size  # the records of the term, in one block, and scalars


def test_forward_only_reports_the_same():
    both, forward = run("zero_bubble"), run("zero_bubble", forward_only=True)
    chex.assert_trees_all_close(both.metrics, forward.metrics, rtol=0, atol=1e-13)


@pytest.mark.slow
def test_metrics_of_layers_may_have_any_weight():
    def counting(weights, hidden, microbatch, rng):
        after = layer(weights, hidden, microbatch, rng)
        sums = {"one": Sum(after.sum(0), 2.0), "none": Sum(after.sum(0)), "bool": Sum((after > 0).any(), 1.0)}
        return after, LossOutput({}, sums)

    model, plan = Pipelined(embed, counting, head), jaxfb.BatchPlan(rows=ROWS, num_microbatches=2)
    meshes = (None, jaxfb.make_mesh(pipe=2))
    one, other = (
        jaxfb.get_forward_backward_func(mesh)(model, PARAMS, BATCH, plan).metrics for mesh in meshes
    )
    chex.assert_trees_all_close(one, other, rtol=0, atol=1e-13)
    assert one["none"].value.shape == (4, WIDTH) and one["none"].weight is None
    np.testing.assert_allclose(one["one"].value, one["none"].value / 4, rtol=1e-13)


@pytest.mark.parametrize(("replicas", "pipe"), [(1, 1), (2, 1), (1, 2)])
def test_a_maximum_of_nan_is_nan(replicas, pipe):
    """As on one device, where `jnp.max` is NaN if any number is; integers and flags stay as they are."""

    def embed(outer, microbatch, rng):
        return microbatch["x"]

    def head(outer, hidden, microbatch, rng):
        numbers = {"largest": Max(hidden.max()), "smallest": Min(hidden.min())}
        flags = {
            "some": Max((hidden > 5).any()),
            "none": Max((hidden > 10).any()),
            "not all": Min((hidden < 5).all()),
            "all": Min((hidden < 10).any() | jnp.isnan(hidden).any()),
            "last": Last(hidden[-1] > 1.5),
        }
        return LossOutput({"loss": Sum(hidden.sum(), 1.0)}, numbers | flags | {"int": Min(jnp.int8(-128))})

    model = Pipelined(embed, lambda weight, hidden, microbatch, rng: hidden * weight, head)
    x = np.array([9.0, np.nan, 1.0, 2.0])
    plan = jaxfb.BatchPlan(rows=4, rows_per_microbatch=1, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=replicas, pipe=pipe))
    out = fb(model, {"layers": np.ones(2)}, {"x": x}, plan)
    assert np.isnan(out.metrics["largest"].value) and np.isnan(out.metrics["smallest"].value)
    assert out.metrics["int"].value == -128
    flags = {name: out.metrics[name].value for name in ("some", "none", "all", "not all", "last")}
    assert flags == {"some": True, "none": False, "all": True, "not all": False, "last": True}
    assert all(flag.dtype == bool for flag in flags.values())
    np.testing.assert_array_equal(
        out.per_microbatch["some"].value, (x.reshape(-1, replicas) > 5).any(1), strict=True
    )
    each = np.isnan(x.reshape(-1, replicas)).any(1)
    np.testing.assert_array_equal(np.isnan(out.per_microbatch["largest"].value), each)
    np.testing.assert_array_equal(np.isnan(out.per_microbatch["smallest"].value), each)
