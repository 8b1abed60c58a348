"""`check_equivalence` finds no difference where there is none, names the leaf where there is one, lists refusals."""

import dataclasses

import jax
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.forward_backward import equivalence

KEY = jax.random.key(1)


@pytest.mark.slow
def test_no_difference_in_a_model_that_keeps_its_contract():
    found = jaxfb.check_equivalence(
        toy.model,
        toy.params(dtype=np.float32),
        toy.batch(rows=8),
        meshes=[{"data": 2}, {"pipe": 2, "data": 2}],
        schedules=["1f1b", ("zero_bubble", 2)],
        rng=KEY,
    )
    found.raise_if_above(1e-12)
    assert found.dtype == "float64" and [one.num_microbatches for one in found.ran] == [4, 4, 4]
    lines = str(found).splitlines()
    assert lines[0] == "relative difference to one device, 8 rows in float64"
    assert lines[1].split() == [
        "mesh",
        "schedule",
        "microbatches",
        "loss",
        "gradient",
        "absolute",
        "worst",
        "leaf",
    ]
    assert lines[4].startswith("pipe=2 data=2  zero_bubble x2  4  ")


def test_a_mean_inside_the_loss_is_found():
    """Sum(mean, 1) is a mean of means: right on one device, wrong as soon as rows count differently."""

    def loss(params, microbatch, rng):
        mask = microbatch["mask"]
        squares = ((params["embed"][microbatch["tokens"]] ** 2).sum(-1) * mask).sum()
        return jaxfb.Sum(squares / jax.numpy.maximum(mask.sum(), 1), 1.0)

    found = jaxfb.check_equivalence(
        loss, {"embed": toy.params()["embed"]}, toy.batch(rows=8), [{}, {"data": 2}]
    )
    assert found.worst.leaf == "embed" and found.worst.relative > 1e-2
    with pytest.raises(
        AssertionError, match="differ from one device by .* in embed, above 1e-10; check that"
    ):
        found.raise_if_above()


@pytest.mark.parametrize("normalize", ["global", "microbatch", "none"])
def test_one_device_divides_as_the_meshes_are_asked_to(normalize):
    def loss(params, microbatch, rng):
        rows, weights = microbatch["row_weight"].shape[0], microbatch["row_weight"]
        squares = (params["embed"][microbatch["tokens"]] ** 2).sum((1, 2))
        terms = {"loss": jaxfb.Sum((squares * weights).sum(), weights.sum())}
        terms |= {"sum": jaxfb.Sum(squares.sum()), "penalty": jaxfb.Sum((params["embed"] ** 4).sum(), 1.0)}
        return jaxfb.LossOutput(terms | {"rows": jaxfb.Sum(squares.sum(), rows)})

    params, given = {"embed": toy.params()["embed"]}, ([{}, {"data": 2}, {"fsdp": 2, "data": 2}],)
    batch = toy.batch(rows=8)
    jaxfb.check_equivalence(loss, params, batch, *given, normalize=normalize).raise_if_above(1e-12)
    of_two = jaxfb.check_equivalence(
        loss, params, batch, [{"data": 2}], rows_per_microbatch=2, normalize=normalize
    )
    of_two.raise_if_above(1e-12)


@pytest.mark.parametrize("normalize", ["microbatch", "none"])
def test_microbatches_of_several_sizes_are_not_compared(normalize):
    given = toy.model, toy.params(), toy.batch(rows=8), [{}]
    with pytest.raises(ValueError, match="rows_per_microbatch"):
        jaxfb.check_equivalence(*given, rows_per_microbatch=3, normalize=normalize)


def test_a_gradient_that_is_not_finite_is_found():
    def loss(params, microbatch, rng):  # 0 * inf in a backward, only where a microbatch is one row
        rows = microbatch["row_weight"].shape[0]
        return jaxfb.Sum(params.sum() * (np.nan if rows == 1 else 1.0), float(rows))

    found = jaxfb.check_equivalence(loss, np.ones(3), toy.batch(rows=4), [{"data": 2}])
    assert found.worst.relative == np.inf
    with pytest.raises(AssertionError):
        found.raise_if_above(1e9)


def test_what_does_not_fit_is_listed_and_alone_is_an_error():
    model = dataclasses.replace(toy.model, param_specs=lambda params: jax.tree.map(lambda _: P(), params))
    found = jaxfb.check_equivalence(
        model, toy.params(layers=3), toy.batch(rows=3), [{"data": 2}, {"pipe": 2}], ["1f1b"]
    )
    assert not found.ran
    assert "refused: 3 layers do not divide into 2 stages" in str(found)
    with pytest.raises(ValueError, match="no mesh and schedule could be compared with one device: data=2: "):
        found.raise_if_above()


@pytest.mark.slow
def test_by_default_every_kind_of_mesh_and_schedule(monkeypatch):
    """The meshes of one axis, each of which has tests of its own, are left out to save their compilation."""
    several = [sizes for sizes in equivalence.MESHES if len(sizes) > 1]
    monkeypatch.setattr(equivalence, "MESHES", several)
    found = jaxfb.check_equivalence(
        toy.model, toy.params(layers=8), toy.batch(rows=16), rng=KEY, rows_per_microbatch=2
    )
    found.raise_if_above(1e-12)
    assert len(found.ran) == len(found.differences) == 1 + 9 + 5  # four schedules allow no tensor axis
    monkeypatch.undo()
    plain = jaxfb.check_equivalence(
        lambda p, mb, rng: jaxfb.Sum((p * mb).sum(), len(mb)), np.ones(2), np.ones((8, 2))
    )
    assert {one.mesh for one in plain.ran} == {"data=2", "fsdp=2", "tensor=2", "data=2 fsdp=2 tensor=2"}
