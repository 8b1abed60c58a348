"""Fixed cases agree with one device, and every kind of fault put into the engine is found."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import users
from marks import some_slow

import jaxfb
from jaxfb.checking.comparison import rounding, trial
from jaxfb.checking.comparison.difference import Difference
from jaxfb.checking.comparison.rounding import allowing_for_rounding
from jaxfb.checking.comparison.trial import try_case
from jaxfb.checking.drawing.case import Case
from jaxfb.checking.outcome import DIFFERENT, FAILED, REFUSED, SAME
from jaxfb.checking.program import program
from jaxfb.checking.toy_models.problem import problem_of
from jaxfb.forward_backward import calls
from jaxfb.types import Last, Sum

SMALL = Case(
    model="loss",
    mesh={"data": 2},
    num_layers=1,
    length=1,
    masks="ragged",
    num_microbatches=2,
    rows_per_microbatch=2,
    metrics=("mean", "max"),
    outputs=("row",),
)
UPDATED = SMALL.but(update=True, optimizer="momentum", second="same", metrics=(), outputs=())
CASES = {
    "accumulation": SMALL,
    "two updates": UPDATED,
    "a skipped update": UPDATED.but(second="nonfinite"),
    "a pipeline": SMALL.but(
        model="stages", mesh={"pipe": 2}, num_layers=2, schedule="1f1b", layer_terms=True
    ),
    "attention over cut sequences": SMALL.but(mesh={"context": 2}, length=4, attention="all_to_all"),
    "16 bits": SMALL.but(param_dtype="bfloat16", x64=False),
    "sums over devices in 16 bits": SMALL.but(
        mesh={"fsdp": 2}, reduce_dtype="bfloat16", metrics=(), outputs=()
    ),
    "sums": SMALL.but(model="sums", mesh={"fsdp": 2}, param_dtype="float16", metrics=(), outputs=()),
    "a key a row": SMALL.but(remainder="drop", surplus=1, rng="rows", dropout=True),
    "large tables": SMALL.but(
        model="transformer",
        mesh={"fsdp": 2},
        length=8,
        large_tables=True,
        normalize="microbatch",
        metrics=(),
        outputs=(),
    ),
    "a mean of means": SMALL.but(normalize="microbatch", remainder="pad", surplus=1, rng="key", dropout=True),
}


SLOW = {
    "large tables",
    "a mean of means",
    "two updates",
    "a skipped update",
    "a key a row",
    "16 bits",
    "attention over cut sequences",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=[pytest.mark.slow] * (name in SLOW)) for name, case in CASES.items()],
)
def test_equals_one_device(case):
    outcome = try_case(case)
    assert outcome.status == SAME, outcome
    assert outcome.largest <= 1


def changed(monkeypatch, change):
    """The engine, with `change(ForwardBackwardOutput) -> ForwardBackwardOutput` at its end."""
    right = calls.one_pass
    monkeypatch.setattr(calls, "one_pass", lambda *arguments: change(right(*arguments)))
    jax.clear_caches()


def field(name, change):
    return lambda out: dataclasses.replace(out, **{name: jax.tree.map(change, getattr(out, name))})


def backwards(out, name):
    """The records of the microbatches in another order."""
    records = jax.tree.map(lambda x: x[::-1], out.per_microbatch[name])
    return dataclasses.replace(out, per_microbatch=out.per_microbatch | {name: records})


FAULTS = {
    "loss": field("loss", lambda x: x * (1 + 1e-8)),
    "grads": field("grads", lambda x: x + 1e-8),
    "metrics": lambda out: dataclasses.replace(out, metrics=out.metrics | {"mean": Sum(jnp.ones(()), 1.0)}),
    "outputs": field("outputs", lambda x: x[::-1]),
    "per_microbatch total": lambda out: backwards(out, "tokens"),
    "per_microbatch metrics": lambda out: backwards(out, "max"),
    "weights": lambda out: dataclasses.replace(
        out, terms={name: Sum(2 * term.total, 2 * term.weight) for name, term in out.terms.items()}
    ),
}


@pytest.mark.parametrize("quantity", some_slow(FAULTS, fast=("loss", "grads")))
def test_a_fault_is_found(quantity, monkeypatch):
    changed(monkeypatch, FAULTS[quantity])
    outcome = try_case(SMALL)
    assert (outcome.status, outcome.kind) == (DIFFERENT, quantity), outcome


def test_gradients_of_another_dtype_are_found(monkeypatch):
    changed(monkeypatch, field("grads", lambda x: x.astype(jnp.float32).astype(x.dtype)))
    assert try_case(SMALL).kind == "grads"
    changed(monkeypatch, field("grads", lambda x: x.astype(jnp.float32)))
    assert "dtypes ['float32'" in try_case(SMALL.but(param_dtype="float32", accum_dtype="float64")).detail


def test_a_lost_bit_of_a_16_bit_sum_is_found(monkeypatch):
    changed(monkeypatch, field("grads", lambda x: x.astype(jnp.bfloat16).astype(x.dtype)))
    assert try_case(CASES["sums"].but(param_dtype="bfloat16")).kind == "grads"


@pytest.mark.slow
def test_an_update_that_is_not_the_optimizers_is_found(monkeypatch):
    from jaxfb.update.apply import Update

    right = Update._attempt

    def of_wrong_size(step, state, *others):
        made = right(step, state, *others)
        params = jax.tree.map(lambda old, new: old + (new - old) * (1 + 1e-7), state.params, made.params)
        return made._replace(params=params)

    def of_old_moments(step, state, *others):
        return right(step, state, *others)._replace(opt_state=state.opt_state)

    monkeypatch.setattr(Update, "_attempt", of_wrong_size)
    assert try_case(UPDATED).kind == "parameters"
    monkeypatch.setattr(Update, "_attempt", of_old_moments)
    assert try_case(UPDATED).kind == "optimizer state"


def test_an_update_that_should_have_been_skipped_is_found(monkeypatch):
    from jaxfb.update import apply as update

    right = update.find_nonfinite
    monkeypatch.setattr(update, "find_nonfinite", lambda *args: jax.tree.map(jnp.zeros_like, right(*args)))
    outcome = try_case(CASES["a skipped update"])
    assert "second parameters after a skipped update" in outcome.detail


def test_a_refusal_is_no_finding_and_any_other_error_is(monkeypatch):
    refused = try_case(SMALL.but(accum_dtype="int32"))
    assert refused.status == REFUSED and not refused.is_finding and "accum_dtype must be" in refused.detail
    errors = {
        "KeyError": lambda: {}["nothing"],
        "ValueError": lambda: jax.vmap(jnp.add)(jnp.ones(2), jnp.ones(3)),
    }
    for kind, error in errors.items():
        monkeypatch.setattr(calls, "one_pass", lambda *_, error=error: error())
        jax.clear_caches()
        failed = try_case(SMALL)
        assert (failed.status, failed.kind) == (FAILED, kind) and failed.is_finding


@pytest.mark.slow
def test_a_model_at_hand():
    found = jaxfb.check_random(*users.small(), cases=2, axes=["pipe", "data"])
    found.raise_if_found()
    assert [one.outcome.status for one in found.results] == [SAME, SAME]
    assert str(found).startswith("2 cases of seed 0 in ")


def test_a_mean_inside_the_loss_is_found_and_made_small():
    found = jaxfb.check_random(*users.mean_inside(), cases=1, seed=1, axes=["data"], tries=4)
    (one,) = found.findings
    assert one.outcome.kind == "loss"
    with pytest.raises(AssertionError, match="FOUND in case 0"):
        found.raise_if_found()


@pytest.mark.slow
def test_the_program_of_a_finding_runs(capsys):
    exec(program(UPDATED, try_case(UPDATED), "--xla_force_host_platform_device_count=8"), {})
    out = capsys.readouterr().out
    assert out.startswith("loss ") and "\nsame" in out


@pytest.mark.parametrize(
    "own, words",
    [
        ((None, {}, {"x": jnp.ones(4)}), "model must be a loss function or a jaxfb.Pipelined, got NoneType"),
        ((users.small()[0], {}, {}), r"every leaf of the batch must be \[rows, ...\]"),
        ((users.small()[0], {}, {"x": jnp.ones(4), "y": jnp.ones(3)}), r"got shapes \[\(4,\), \(3,\)\]"),
    ],
)
def test_what_is_no_model_or_batch_is_refused(own, words):
    with pytest.raises(ValueError, match=words):
        jaxfb.check_random(*own)


def test_float64_is_compared_in_float64_in_a_program_that_computes_in_float32():
    with jax.enable_x64(False):
        assert try_case(SMALL).status == SAME


def test_a_metric_that_is_near_zero_in_one_microbatch_is_measured_by_the_others():
    of_each = [{"last": Last(np.float64(1))}, {"last": Last(np.float64(1e-4))}]
    want = SimpleNamespace(
        terms={}, metrics={"last": Last(np.float64(1e-4))}, metrics_of_microbatches=of_each
    )
    got = SimpleNamespace(per_microbatch={"last": Last(np.array([1, 1.001e-4]))})
    assert trial._of_metrics_by_microbatch(got, want, 1e-4).size == pytest.approx(1e-7)


ROUNDED = Case(
    model="transformer",
    mesh={"data": 2},
    dropout=True,
    length=8,
    rows_per_microbatch=3,
    remainder="drop",
    surplus=2,
    rng="legacy",
    compute_dtype="bfloat16",
    reduce_dtype="bfloat16",
    data_seed=260,
)


def test_rounding_that_one_device_shows_as_well_is_no_finding():
    """The attention of 8 tokens has gradients that bfloat16 makes wrong by a quarter, on one device too."""
    differences = trial.differences(ROUNDED, problem_of(ROUNDED))
    assert [one.quantity for one in differences if one.found] == ["grads"]
    assert try_case(ROUNDED).status == SAME


def test_what_is_beyond_the_rounding_of_one_device_stays_a_finding():
    off = [Difference("second grad_norm", size=8.0, allowed=0.4), Difference("loss", size=0.2, allowed=0.1)]
    assert all(one.found for one in allowing_for_rounding(off, ROUNDED, problem_of(ROUNDED)))
    in_words = [Difference("grads", problem="another shape"), Difference("metrics", size=np.nan, allowed=0.1)]
    assert all(one.found for one in allowing_for_rounding(in_words, ROUNDED, problem_of(ROUNDED)))


def test_wide_dtypes_are_allowed_no_more(monkeypatch):
    monkeypatch.setattr(rounding, "_rounded_away", lambda *_: pytest.fail("computed for float32"))
    case = ROUNDED.but(compute_dtype="float32", param_dtype="float32")
    off = [Difference("grads", size=2e-4, allowed=1e-4)]
    assert allowing_for_rounding(off, case, None) == off
    same = [Difference("grads", size=1e-2, allowed=1e-1)]
    assert allowing_for_rounding(same, ROUNDED, None) == same
