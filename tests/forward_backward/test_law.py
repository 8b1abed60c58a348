"""Law 1: loss, gradient and records depend on the rows of the update, and not on how they were split.

Every program below is compared with `toy.whole_batch`: all rows at once, on one device, without the engine. A
program is compiled once and then run on many batches: ragged masks, empty rows, empty microbatches.
"""

import dataclasses
import sys
from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from comparisons import close
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P
from marks import some_slow

import jaxfb
from jaxfb.forward_backward import accumulate
from jaxfb.forward_backward.loss_function import weights
from jaxfb.forward_backward.microbatches import row_keys, split_keys
from jaxfb.parallel import data
from jaxfb.types import Halves

ROWS, LAYERS = 48, 2
KEY = jax.random.key(11)


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program: a mesh, a split, a model and the options that must not change a number."""

    mesh: tuple
    num_microbatches: int
    model: object = toy.model
    tied: bool = True
    dropout: bool = False
    options: tuple = ()

    def __str__(self):
        mesh = "x".join(f"{axis}{size}" for axis, size in self.mesh) or "one"
        words = ["layers" if self.model is toy.model else "plain", "tied" if self.tied else "untied"]
        words += ["dropout"] * self.dropout + [
            str(value) for name, value in self.options if name != "param_specs"
        ]
        return "-".join([mesh, f"M{self.num_microbatches}", *words])

    @property
    def plan(self):
        replicas = int(np.prod([size for axis, size in self.mesh if axis != "tensor"], dtype=int))
        return jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas, num_microbatches=self.num_microbatches)

    @property
    def parts(self):
        return self.num_microbatches * self.plan.data_parallel

    def __call__(self, batch, rng, **call):
        fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**dict(self.mesh)), **dict(self.options))
        return fb(self.model, params(self.tied), batch, self.plan, rng, **call)


def second_half(weights, hidden, microbatch, keys, beside=()):
    return toy.layer(weights, hidden, microbatch, keys), beside


IN_HALVES = replace(
    toy.model, halves=Halves(lambda weights, hidden, microbatch, keys: hidden, second_half, ("w",))
)


def program(mesh, num_microbatches, plain=False, tied=True, dropout=False, **options):
    if "tensor" in mesh:
        options["param_specs"] = tensor_specs
    model = plain_loss if plain else toy.model
    if options.get("gather_ahead") == "half":
        model = IN_HALVES
    return Program(tuple(mesh.items()), num_microbatches, model, tied, dropout, tuple(options.items()))


def tensor_specs(tree):
    specs = {
        "embed": P("tensor"),
        "gain": P(),
        "layers": {"w": P(None, None, "tensor"), "b": P(None, "tensor")},
    }
    return specs | ({"head": P(None, "tensor")} if "head" in tree else {})


def plain_loss(tree, microbatch, keys):
    """The toy as any user's loss function: nothing in it says layers, stages or Pipelined."""
    hidden = toy.embed(tree, microbatch, keys)
    balance = jaxfb.Sum(0.0, 0.0)
    for index in range(LAYERS):
        layer_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        one = jax.tree.map(lambda leaf: leaf[index], tree["layers"])  # noqa: B023
        hidden, terms = toy.layer(one, hidden, microbatch, layer_keys)
        balance = balance + terms["balance"]
    out = toy.head(tree, hidden, microbatch, keys)
    return jaxfb.LossOutput({**out.terms, "balance": balance}, out.metrics, out.outputs)


@lru_cache
def params(tied):
    return toy.params(layers=LAYERS, tied=tied)


@lru_cache
def whole(normalize, parts):
    """(params, batch, rng) -> ((loss, records of the whole batch), gradient), jitted."""

    def loss(tree, batch, rng):
        keys = None if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(ROWS))
        return toy.whole_batch(tree, batch, rng, normalize, parts)[0], plain_loss(tree, batch, keys)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def check_law(one, batch, rng=KEY, rows=None):
    """Runs the program on the batch and compares what it returns. `rows`: a permutation of them."""
    rng = rng if one.dropout else None
    normalize = dict(one.options).get("normalize", "global")
    (loss, records), grads = whole(normalize, one.parts if normalize == "microbatch" else 1)(
        params(one.tied), batch, rng
    )
    out = one(*(batch, rng) if rows is None else permuted(batch, rng, rows, one.plan))
    order = slice(None) if rows is None else rows
    close(out.loss, loss)
    close(out.grads, grads)
    close(out.outputs, jax.tree.map(lambda leaf: leaf[order], records.outputs))
    metrics = [name for name in records.metrics if rows is None or name != "last"]
    close({name: out.metrics[name].value for name in metrics}, {n: records.metrics[n].value for n in metrics})
    check_per_microbatch(out, records, batch, order, one.num_microbatches)
    if normalize != "microbatch":
        close(out.terms, jax.tree.map(jnp.asarray, records.terms))
    return out


def check_per_microbatch(out, records, batch, order, count):
    by_microbatch = lambda leaf: np.asarray(leaf)[order].reshape(count, -1).sum(1)  # noqa: E731
    close(out.per_microbatch["cross_entropy"].total, by_microbatch(records.outputs["row_loss"]))
    close(out.per_microbatch["cross_entropy"].weight, by_microbatch(batch["mask"].sum(1)))
    close(out.per_microbatch["rows"].weight, by_microbatch(batch["row_weight"]))
    totals = {name: out.per_microbatch[name].total.sum() for name in out.terms}
    close(totals, {name: term.total for name, term in records.terms.items()})
    assert set(out.per_microbatch) == {*records.terms, *records.metrics}
    largest, hard = out.per_microbatch["largest"].value, out.per_microbatch["hard"].total
    close(largest.max(), records.metrics["largest"].value)
    close(hard.sum(), records.metrics["hard"].total)
    assert largest.shape == hard.shape == (count,)


def permuted(batch, rng, rows, plan):
    """The same rows in another order, each with its own key."""
    keys = None if rng is None else row_keys(rng, plan)[rows]
    return jax.tree.map(lambda leaf: leaf[rows], batch), keys


@st.composite
def batches(draw):
    """Ragged masks; some rows, and perhaps every row of some microbatches, count nothing."""
    batch = toy.batch(draw(st.integers(0, 9)), ROWS)
    empty_rows = draw(st.lists(st.integers(0, ROWS - 1), max_size=6))
    parts = draw(st.sampled_from([3, 8, 16]))
    for part in draw(st.lists(st.integers(0, parts - 1), max_size=2)):
        empty_rows += range(part * ROWS // parts, (part + 1) * ROWS // parts)
    batch["mask"][empty_rows] = 0
    batch["row_weight"][empty_rows] = 0
    return batch


PROGRAMS = [
    program({}, 1),
    program({}, 3, plain=True, tied=False, dropout=True),
    program({}, 8, remat="full", normalize="none"),
    program({"data": 2}, 2, normalize="microbatch"),
    program({"data": 2}, 8, dropout=True, tied=False, remat="selective"),
    program({"data": 4}, 3, plain=True, optimizer_sharding="data"),
    program({"data": 2, "fsdp": 2}, 3, dropout=True, optimizer_sharding="gradients"),
    program({"data": 8}, 2),
    program({"fsdp": 4}, 1, normalize="microbatch"),
    program({"fsdp": 4}, 4, dropout=True, fsdp_gather="step"),
    program({"fsdp": 2}, 8, plain=True, tied=False),
    program({"tensor": 4}, 4, normalize="none"),
    program({"tensor": 2}, 2, plain=True, tied=False),
    program({"data": 2, "tensor": 2}, 3, remat="layer"),
    program({}, 1, remat="offload", tied=False),
    program({"data": 2, "fsdp": 2}, 3, remat="offload"),
    program({"data": 2, "tensor": 4}, 8, dropout=True, plain=True),
    program({"data": 2, "fsdp": 2}, 4, optimizer_sharding="data", normalize="none"),
    program({"data": 2, "fsdp": 4}, 2, fsdp_gather="step", tied=False),
    program({"data": 2, "fsdp": 2}, 3, dropout=True, remat="full", tied=False),
    program({"expert": 2, "fsdp": 2}, 4, dropout=True, remat="full", gather_ahead=True),
    program({"expert": 4}, 3, plain=True, tied=False),
    program({"expert": 2, "fsdp": 2, "tensor": 2}, 3, remat="layer", reduce_dtype="float64"),
    program({"expert": 2, "data": 2}, 3, optimizer_sharding="data", fsdp_gather="step"),
    program({"expert": 2, "data": 2, "fsdp": 2}, 2, optimizer_sharding="gradients", tied=False),
    program({"expert": 2, "fsdp": 2}, 3, fsdp_gather=1, gather_ahead=True),
    program({"expert": 2, "fsdp": 2, "tensor": 2}, 3, remat="layer", gather_ahead="half"),
]
QUICK = (0, 1, 2, 4, 5, 6, 8, 9, 12, 14, 22, 25)  # every option occurs in them
few = settings(max_examples=3, derandomize=True, deadline=None, database=None)


@pytest.mark.parametrize("one", some_slow(PROGRAMS, fast=[PROGRAMS[i] for i in QUICK]), ids=str)
@few
@given(batches())
def test_a_split_changes_nothing(one, batch):
    check_law(one, batch)


@pytest.mark.parametrize("one", [PROGRAMS[4], PROGRAMS[9]], ids=str)
@few
@given(batches(), st.permutations(range(ROWS)))
def test_the_order_of_the_rows_changes_nothing(one, batch, rows):
    """Each row keeps its key, so its dropout mask moves with it; outputs come in the order of the rows."""
    check_law(one, batch, rows=np.asarray(rows))


@pytest.mark.parametrize("one", [PROGRAMS[1], PROGRAMS[14]], ids=str)
def test_forward_only_is_the_forward_of_the_same_call(one):
    rng = KEY if one.dropout else None
    both, forward = one(toy.batch(1, ROWS), rng), one(toy.batch(1, ROWS), rng, forward_only=True)
    assert forward.grads is None
    close(dataclasses.replace(both, grads=None), forward)


def test_rows_added_to_fill_the_last_microbatch_weigh_nothing():
    """45 rows padded to 48, dropout and outputs included; the model counts by masks, as it must."""

    def loss(table, microbatch, keys):
        hidden = toy.dropped(table[microbatch["tokens"]], keys)
        per_row = jnp.where(microbatch["mask"] > 0, (hidden**2).sum(-1), 0).sum(1)
        return jaxfb.LossOutput(
            {"square": jaxfb.Sum(per_row.sum(), microbatch["mask"].sum())}, outputs=per_row
        )

    batch = toy.batch(2, 45)
    table = params(True)["embed"]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(KEY, jnp.arange(45))
    loss_of = lambda t: ((out := loss(t, batch, keys)).terms["square"].value, out.outputs)  # noqa: E731
    (wanted, per_row), grads = jax.value_and_grad(loss_of, has_aux=True)(table)
    plan = jaxfb.BatchPlan(rows=45, data_parallel=2, rows_per_microbatch=6, remainder="pad")
    assert (plan.num_microbatches, plan.padding_rows) == (4, 3)
    out = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2))(loss, table, batch, plan, KEY)
    close((out.loss, out.grads, out.outputs), (wanted, grads, per_row))


MESHES = [
    {},
    {"data": 2},
    {"data": 4},
    {"fsdp": 2},
    {"tensor": 2},
    {"data": 2, "tensor": 2},
    {"data": 2, "fsdp": 2},
]


@st.composite
def programs(draw):
    options = {
        "normalize": draw(st.sampled_from(["global", "microbatch", "none"])),
        "remat": draw(st.sampled_from(["none", "selective", "layer", "halves", "offload", "full"])),
        "fsdp_gather": draw(st.sampled_from(["layer", "step"])),
        "optimizer_sharding": draw(st.sampled_from(["none", "data"])),
    }
    counts = st.sampled_from([1, 2, 3, 4] if options["normalize"] == "microbatch" else [1, 2, 3, 4, 8])
    mesh, count = draw(st.sampled_from(MESHES)), draw(counts)
    if ROWS % (count * mesh.get("data", 1) * mesh.get("fsdp", 1)):
        count = 3
    return program(mesh, count, draw(st.booleans()), draw(st.booleans()), draw(st.booleans()), **options)


@pytest.mark.slow
@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(programs(), batches(), st.permutations(range(ROWS)))
def test_a_split_changes_nothing_in_any_combination(one, batch, rows):
    check_law(one, batch)
    if dict(one.options)["normalize"] != "microbatch":  # a mean of means asks which rows share a microbatch
        check_law(one, batch, rows=np.asarray(rows))


# What must not pass. Each mutant is a bug that some trainer shipped; the law test has to notice it.

MUTATED = program({"data": 2}, 2, plain=True, dropout=True)


def mutate(monkeypatch, original, mutant):
    """Puts `mutant` wherever the engine refers to `original`."""
    places = [
        (module, name)
        for path, module in list(sys.modules.items())
        if path.startswith("jaxfb.")
        for name, value in list(vars(module).items())
        if value is original
    ]
    assert places
    for module, name in places:
        monkeypatch.setattr(module, name, mutant)


@pytest.fixture
def law_breaks(monkeypatch):
    def broken(original, mutant):
        mutate(monkeypatch, original, mutant)
        not_compiled_yet = dataclasses.replace(MUTATED, model=lambda *args: plain_loss(*args))
        with pytest.raises(AssertionError):
            check_law(not_compiled_yet, toy.batch(4, ROWS))

    return broken


def test_the_law_holds_for_what_is_mutated_below():
    check_law(MUTATED, toy.batch(4, ROWS))


def test_the_law_notices_a_dropped_weight(law_breaks):
    law_breaks(weights.reciprocal, jnp.ones_like)


def test_the_law_notices_a_mean_of_means(law_breaks):
    law_breaks(
        weights.seeds, lambda local, reduced, normalize, *rest: SEEDS(local, reduced, "microbatch", *rest)
    )


def test_the_law_notices_a_clip_per_microbatch(law_breaks):
    """Clipping before the sum: the bug of `optax.chain(clip, MultiSteps)` in the wrong order."""

    def clipped(loss_fn, tree, microbatches, keys, seeds, *rest):
        each = []
        for index in range(MUTATED.num_microbatches):
            one = jax.tree.map(lambda leaf: leaf[index : index + 1], (microbatches, keys, seeds))  # noqa: B023
            grads, out = ACCUMULATE(loss_fn, tree, *one, *rest)
            each.append(
                (jaxfb.gradients.clip_by_global_norm(grads, jaxfb.gradients.global_norm(grads), 1e-3)[0], out)
            )
        grads = jax.tree.map(lambda *parts: sum(parts), *(grads for grads, _ in each))
        return grads, jax.tree.map(lambda *parts: jnp.concatenate(parts), *(out for _, out in each))

    law_breaks(accumulate.accumulate, clipped)


def test_the_law_notices_replicas_counted_twice(law_breaks):
    def twice(grads, *rest):
        return jax.tree.map(lambda grad: lax.psum(grad, "data"), REDUCE(grads, *rest))

    law_breaks(data.reduce_gradients, twice)


def test_the_law_notices_one_mask_for_all_microbatches(law_breaks):
    """Dropout drawn from the place in the microbatch instead of the row."""

    def same(keys, plan):
        rows = plan.rows_per_global_microbatch
        return jnp.broadcast_to(keys[:rows], (plan.num_microbatches, rows))

    law_breaks(split_keys, same)


SEEDS, ACCUMULATE, REDUCE = weights.seeds, accumulate.accumulate, data.reduce_gradients
