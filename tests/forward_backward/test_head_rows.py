"""A head that stages compute for their share of the rows: what reads no row counts once, as on one device."""

import dataclasses

import jax
import jax.numpy as jnp
import toy
from test_pipeline import close

import jaxfb


def model_with(*names):
    """The toy with some of these in its head: sums over rows, and quantities of the parameters alone."""

    def head(outer, hidden, microbatch, rng):
        error = jnp.square(hidden @ outer["embed"].T).sum((1, 2))
        rows, penalty = hidden.shape[0], jnp.square(outer["embed"]).sum()
        terms = {
            "error": jaxfb.Sum(error.sum(), 4.0),
            "penalty": jaxfb.Sum(penalty, 1.0),
            "of_each_row": jaxfb.Sum(penalty * rows, rows),
            "of_counted_rows": jaxfb.Sum(penalty, microbatch["row_weight"].sum()),
            "alone": jaxfb.Sum(penalty),
        }
        metrics = {
            "norm": jaxfb.Sum(jnp.sqrt(penalty), 1.0),
            "norm_of_each_row": jaxfb.Sum(jnp.sqrt(penalty) * rows, rows),
            "rows": jaxfb.Sum(float(rows)),
            "of_a_microbatch": jaxfb.Sum(error.sum(), 1.0),
            "rows_a_counted_row": jaxfb.Sum(float(rows), microbatch["row_weight"].sum()),
            "most_rows": jaxfb.Max(float(rows)),
        }
        return jaxfb.LossOutput({name: terms[name] for name in names}, metrics)

    return dataclasses.replace(
        toy.model, embed=lambda outer, microbatch, _: outer["embed"][microbatch["tokens"]],
        layer=lambda weights, hidden, *_: jnp.tanh(hidden @ weights["w"]), head=head,
    )  # fmt: skip


def compared(model, rows_per_microbatch, **options):
    params, batch = toy.params(layers=4), toy.batch(rows=8)
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=rows_per_microbatch)
    wanted = jaxfb.get_forward_backward_func()(model, params, batch, plan)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2), head_placement="rows", **options)
    found = fb(model, params, batch, plan)
    for part in ("loss", "grads", "terms", "metrics", "per_microbatch"):
        close(getattr(found, part), getattr(wanted, part))
    forward = fb(model, params, batch, plan, forward_only=True)
    close((forward.loss, forward.terms), (wanted.loss, wanted.terms))


def test_what_reads_no_row_counts_once_a_microbatch():
    compared(model_with("error", "penalty", "of_each_row"), 4, schedule="zero_bubble")


def test_a_term_that_one_microbatch_alone_may_have_counts_once():
    compared(model_with("error", "alone", "of_counted_rows"), 8)


def test_it_is_the_gradient_of_one_device():
    model, params, batch = model_with("error", "penalty"), toy.params(layers=4), toy.batch(rows=8)

    def loss(params):
        hidden = model.embed(params, batch, None)
        for index in range(4):
            hidden = model.layer(jax.tree.map(lambda leaf: leaf[index], params["layers"]), hidden)  # noqa: B023
        terms = model.head(params, hidden, batch, None).terms
        return terms["error"].total / 8 + terms["penalty"].total  # two microbatches with a weight of 4 each

    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2), head_placement="rows")
    out = fb(model, params, batch, jaxfb.BatchPlan(rows=8, rows_per_microbatch=4))
    close((out.loss, out.grads), jax.value_and_grad(loss)(params))
