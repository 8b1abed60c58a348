"""Law 1 under a pipeline: every schedule gives the loss, gradient and records of the whole batch on one device.

The comparison is with plain autodiff of the toy, all rows at once, without the engine. Which combinations of
schedule, sizes, mesh and options are tried is decided by `pairwise`: any two values that may meet do meet in a case.
"""

import dataclasses
from functools import partial
from itertools import combinations, product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from comparisons import close
from jax.sharding import PartitionSpec as P
from marks import some_slow

import jaxfb
from jaxfb.forward_backward import head_placement
from jaxfb.forward_backward.layers import slot, stage, target
from jaxfb.forward_backward.pipeline import executor
from jaxfb.parallel import pipe

KEY = jax.random.key(3)
MESHES = {"tensor": {"tensor": 2}, "data": {"data": 2}, "zero1": {"data": 2}, "fsdp": {"fsdp": 2}}
FACTORS = {
    "kind": ("1f1b", "interleaved", "zero_bubble", "v_shape", "gpipe"),
    "pipe": (2, 4, 8),
    "chunks": (1, 2),
    "count": ("P", "2P+1", "1", "P-1", "2P"),
    "beside": ("data", "tensor", "fsdp layer", "fsdp step", "zero1", "nothing"),
    "tied": (True, False),
    "remat": ("none", "selective", "layer", "full"),
    "normalize": ("global", "microbatch", "none"),
    "dropout": (True, False),
    "head": ("last", "rows"),
    "poison": (True, False),
}


def may_meet(values):
    """v_shape has two chunks, interleaved at least two; eight stages leave no device for another axis."""
    return values not in ({"kind": "v_shape", "chunks": 1}, {"kind": "interleaved", "chunks": 1}) and not (
        values.get("pipe") == 8 and values.get("beside", "nothing") != "nothing"
    )


def pairwise(factors):
    """Few cases in which every two values that may meet do meet; those with most new pairs come first."""
    pair = lambda a, x, b, y: frozenset({(a, x), (b, y)})  # noqa: E731
    left = {
        pair(a, x, b, y): None
        for a, b in combinations(factors, 2)
        for x, y in product(factors[a], factors[b])
        if may_meet({a: x, b: y})
    }
    while left:
        case = dict(sorted(next(iter(left)), key=lambda item: list(factors).index(item[0])))
        for name in factors:
            if name not in case:
                legal = [v for v in factors[name] if all(may_meet({name: v, k: x}) for k, x in case.items())]
                new = lambda v: sum(pair(name, v, k, x) in left for k, x in case.items())  # noqa: B023, E731
                case[name] = max(legal, key=new)
        for (a, x), (b, y) in combinations(case.items(), 2):
            left.pop(pair(a, x, b, y), None)
        yield Case(**case)


@dataclasses.dataclass(frozen=True)
class Case:
    """One program: a schedule, its sizes, the mesh beside the pipe axis and what must not change a number."""

    kind: str = "1f1b"
    pipe: int = 2
    chunks: int = 1
    count: str = "2P"
    beside: str = "nothing"
    tied: bool = True
    remat: str = "none"
    normalize: str = "global"
    dropout: bool = True
    head: str = "last"
    poison: bool = True

    def __str__(self):
        values = dataclasses.asdict(self)
        words = [f"{self.kind}-P{self.pipe}-V{self.chunks}-M{self.num_microbatches}"]
        for name in ("beside", "tied", "remat", "normalize", "dropout", "head", "poison"):
            words += [name] * values[name] if isinstance(values[name], bool) else [str(values[name])]
        return "-".join(words).replace(" ", "_")

    @property
    def num_microbatches(self):
        return eval(self.count.replace("2P", "2*P"), {"P": self.pipe})

    @property
    def layers(self):
        return self.pipe * self.chunks * (2 if self.pipe == 2 else 1)

    @property
    def mesh(self):
        return jaxfb.make_mesh(pipe=self.pipe, **MESHES.get(self.beside.split()[0], {}))

    @property
    def plan(self):
        replicas = 1 if self.beside in ("tensor", "nothing") else 2
        per_microbatch = self.pipe if self.head == "rows" else 2
        rows = self.num_microbatches * replicas * per_microbatch
        return jaxfb.BatchPlan(rows=rows, rows_per_microbatch=per_microbatch, data_parallel=replicas)

    @property
    def parts(self):
        return self.plan.num_microbatches * self.plan.data_parallel if self.normalize == "microbatch" else 1

    def __call__(self, params, batch, rng, **call):
        fb = jaxfb.get_forward_backward_func(self.mesh, self.kind, **self.options)
        return fb(toy.model, params, batch, self.plan, rng, **call)

    @property
    def options(self):
        return {
            "num_chunks": self.chunks,
            "normalize": self.normalize,
            "remat": self.remat,
            "fsdp_gather": self.beside.removeprefix("fsdp ") if "fsdp" in self.beside else "layer",
            "optimizer_sharding": "data" if self.beside == "zero1" else "none",
            "param_specs": tensor_specs if self.beside == "tensor" else None,
            "head_placement": self.head,
            "poison_bubbles": self.poison,
        }


def tensor_specs(params):
    specs = {
        "embed": P("tensor"),
        "gain": P(),
        "layers": {"w": P(None, None, "tensor"), "b": P(None, "tensor")},
    }
    return specs | ({"head": P(None, "tensor")} if "head" in params else {})


@partial(jax.jit, static_argnums=(0, 1))
def whole(normalize, parts, params, batch, rng):
    """((loss, LossOutput), gradient) of all rows at once: plain autodiff, the whole batch on one device."""
    keys = (
        rng if rng is None else jax.vmap(jax.random.fold_in, (None, 0))(rng, jnp.arange(len(batch["mask"])))
    )

    def loss(params):
        cut = lambda leaf: leaf.reshape(parts, -1, *leaf.shape[1:])  # noqa: E731
        terms = jax.vmap(partial(run_toy, params))(*jax.tree.map(cut, (batch, keys))).terms.values()
        total = sum((term.total if normalize == "none" else term.value).sum() for term in terms)
        return total / parts, run_toy(params, batch, keys)

    return jax.value_and_grad(loss, has_aux=True)(params)


def run_toy(params, batch, keys):
    """The toy without jaxfb, [rows, ...] at once."""

    def step(hidden, indexed):
        index, weights = indexed
        row_keys = None if keys is None else jax.vmap(jax.random.fold_in, (0, None))(keys, index)
        return toy.layer(weights, hidden, batch, row_keys)

    layers = (jnp.arange(len(params["layers"]["w"])), params["layers"])
    hidden, terms = jax.lax.scan(step, toy.embed(params, batch, keys), layers)
    out = toy.head(params, hidden, batch, keys)
    return dataclasses.replace(out, terms=out.terms | jax.tree.map(lambda leaf: leaf.sum(0), terms))


def check(case, **call):
    """Runs the case and compares all that it returns with the whole batch."""
    params, batch = toy.params(layers=case.layers, tied=case.tied), toy.batch(1, case.plan.rows)
    rng = KEY if case.dropout else None
    (loss, records), grads = whole(case.normalize, case.parts, params, batch, rng)
    run = jax.jit(lambda params, batch: case(params, batch, rng, **call))
    out = run(params, batch)
    close(out.grads, None if call.get("forward_only") else grads)
    close((out.loss, out.outputs), (loss, records.outputs))
    close(*({name: m.value for name, m in metrics.items()} for metrics in (out.metrics, records.metrics)))
    sums = lambda leaf: np.asarray(leaf).reshape(case.num_microbatches, -1).sum(1)  # noqa: E731
    close(out.per_microbatch["cross_entropy"].total, sums(records.outputs["row_loss"]))
    close(out.per_microbatch["rows"].weight, sums(batch["row_weight"]))
    assert float(out.per_microbatch["balance"].weight.sum()) == case.plan.rows * case.layers
    if case.normalize != "microbatch":
        close(out.terms, jax.tree.map(jnp.asarray, records.terms))


def covering(cases):
    """A few of them in which every value of every factor occurs."""
    left, chosen = {(name, value) for name, values in FACTORS.items() for value in values}, []
    while left:
        chosen.append(max(cases, key=lambda case: len(left & dataclasses.asdict(case).items())))
        left -= dataclasses.asdict(chosen[-1]).items()
    return chosen


CASES = list(pairwise(FACTORS))


@pytest.mark.parametrize("case", some_slow(CASES, fast=covering(CASES)))
def test_a_pipeline_changes_nothing(case):
    check(case)


def test_every_two_values_that_may_meet_do_meet():
    cases = [dataclasses.asdict(case) for case in CASES]
    for a, b in combinations(FACTORS, 2):
        seen = {(case[a], case[b]) for case in cases}
        wanted = {(x, y) for x, y in product(FACTORS[a], FACTORS[b]) if may_meet({a: x, b: y})}
        assert seen == wanted, (a, b)
    assert all(may_meet(case) for case in cases)


FORWARD = [
    Case("interleaved", 4, 2, "P-1", "data", head="rows"),
    Case("v_shape", 2, 2, "2P+1", "fsdp layer", tied=False, normalize="microbatch"),
    Case("zero_bubble", 8, 1, "2P", remat="full", normalize="none"),
    Case("gpipe", 4, 1, "P", "tensor", dropout=False),
]


@pytest.mark.parametrize("case", some_slow(FORWARD, fast=FORWARD[:1]))
def test_forward_only_gives_the_same_loss_and_outputs(case):
    """The same records in the same order of rows, without the gradient."""
    check(case, forward_only=True)


@dataclasses.dataclass(frozen=True)
class Uneven(Case):
    """Stages of different lengths."""

    lengths: tuple = ()

    @property
    def layers(self):
        return sum(self.lengths)

    @property
    def options(self):
        return super().options | {"layers_per_stage": self.lengths}


UNEVEN = [
    Uneven("zero_bubble", 2, 2, "P", "fsdp layer", tied=False, lengths=(1, 2, 2, 1)),
    Uneven("1f1b", 4, 1, "P-1", "tensor", remat="full", lengths=(1, 3, 2, 1)),
    Uneven("v_shape", 2, 2, "2P", "zero1", remat="selective", head="rows", lengths=(1, 1, 2, 1)),
    Uneven("interleaved", 2, 2, "2P+1", "data", dropout=False, remat="layer", lengths=(2, 2, 2, 2)),
    Uneven("zero_bubble", 4, 1, "P", lengths=(0, 3, 3, 0)),
    Uneven("1f1b", 4, 1, "P-1", "fsdp layer", remat="full", lengths=(0, 1, 1, 0)),
    Uneven("v_shape", 2, 2, "P", remat="layer", lengths=(3, 0, 0, 3)),
    Uneven("interleaved", 2, 2, "2P", tied=False, lengths=(0, 2, 0, 3)),
]


BY_DEVICE = [
    Case("1f1b", 4, 1, "2P+1", "data", remat="offload"),
    Case("zero_bubble", 2, 2, "P", "fsdp layer", remat="offload"),
    Case("v_half", 2, 2, "P", remat="offload"),
    Case("zb_v", 4, 2, "2P+1", "data"),
    Case("dualpipe_v", 4, 2, "2P+1", "data"),
    Case("v_half", 4, 2, "P", "zero1", tied=False, remat="selective", head="rows"),
    Case("v_min", 2, 2, "2P", "fsdp step", remat="full", normalize="microbatch"),
    Case("zb_v", 8, 2, "P-1", remat="layer", normalize="none", dropout=False),
    Uneven("zb_v", 2, 2, "P", "data", lengths=(1, 2, 2, 1)),
]


@pytest.mark.parametrize("case", some_slow(BY_DEVICE, fast=(BY_DEVICE[0], BY_DEVICE[3])))
def test_devices_that_compute_different_things_in_a_tick_change_nothing(case):
    check(case)


@pytest.mark.parametrize("case", BY_DEVICE[:3])
def test_places_on_the_host_may_hold_anything_before_they_are_written(case, monkeypatch):
    """On accelerators they begin as memory that nobody cleared."""
    called = []

    def anything(shape, dtype):
        called.append(shape)
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.floating) else 1, dtype)

    monkeypatch.setattr(slot, "lax", SimpleNamespace(**{**vars(slot.lax), "empty": anything}))
    jax.clear_caches()  # of the same case, traced by another test
    check(case)
    assert called
    jax.clear_caches()  # of programs that begin with NaN


@pytest.mark.slow
def test_forwards_of_a_schedule_by_device():
    check(Case("zb_v", 4, 2, "P", "data"), forward_only=True)


@pytest.mark.parametrize(
    "beside, words",
    [
        ({"tensor": 2}, 'tensor=2; use schedule="zero_bubble"$'),
        ({"fsdp": 2}, 'fsdp_gather="layer"; use schedule="zero_bubble" or fsdp_gather="step"'),
    ],
)
def test_a_schedule_by_device_is_refused_where_stages_have_collectives(beside, words):
    with pytest.raises(ValueError, match=words):
        jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2, **beside), schedule="zb_v", num_chunks=2)


@pytest.mark.parametrize("case", some_slow(UNEVEN, fast=UNEVEN[:1]))
def test_stages_of_different_lengths(case):
    check(case)


@pytest.mark.parametrize(
    "layers, lengths, words",
    [
        (
            7,
            None,
            r"7 layers .* 4 stages .pipe 2 x chunks 2.; use 8 layers or layers_per_stage=\[2, 2, 2, 1\]",
        ),
        (
            7,
            (2, 2, 2, 2),
            r"layers_per_stage=\[2, 2, 2, 2\] must give each of 4 stages .* try \[2, 2, 2, 1\]",
        ),
        (6, None, "6 layers do not divide into 4 .*; use chunks=1 or 8 layers or layers_per_stage"),
        (7, (3, 4), "must give each of 4 stages"),
        (7, (0, 2, 2, 2), r"0 for a stage that passes hidden on; try \[2, 2, 2, 1\]"),
        (
            2,
            None,
            r"2 layers do not divide into 4 .*; use chunks=1 or 4 layers or layers_per_stage=\[0, 1, 1, 0\]",
        ),
    ],
)
def test_layers_that_do_not_fit_the_stages_are_refused(layers, lengths, words):
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2), num_chunks=2, layers_per_stage=lengths)
    with pytest.raises(ValueError, match=words):
        fb(
            toy.model,
            toy.params(layers=layers),
            toy.batch(rows=4),
            jaxfb.BatchPlan(rows=4, rows_per_microbatch=2),
        )


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
def test_the_layers_per_stage_that_a_refusal_proposes_are_legal(layers):
    placement = jaxfb.schedules.make("1f1b", 4, 4).placement
    with pytest.raises(ValueError, match="layers_per_stage=") as refusal:
        pipe.layout_of(layers, placement)
    proposed = [int(n) for n in str(refusal.value).split("layers_per_stage=[")[1].split("]")[0].split(",")]
    assert pipe.layout_of(layers, placement, proposed).layers_per_stage == tuple(proposed)


# What must not pass: each mutant takes one mask or one piece of bookkeeping out of the executor.


@pytest.fixture
def breaks(monkeypatch):
    """breaks(owner, name, mutant): a pipeline with `mutant` in place of owner.name is wrong."""

    def broken(owner, name, mutant, case=MUTATED):
        monkeypatch.setattr(owner, name, mutant)
        jax.clear_caches()
        with pytest.raises(AssertionError):
            check(case)

    yield broken
    jax.clear_caches()


MUTATED = Case("1f1b", 2, 1, "P", dropout=False)


def test_garbage_in_a_bubble_is_noticed_where_a_mask_is_missing(breaks):
    breaks(executor, "masked", lambda valid, tree: tree)


@pytest.mark.slow
def test_a_weight_gradient_of_a_bubble_is_noticed(breaks):
    always = lambda sums, chunk, valid: target.Target(sums, chunk, jnp.ones_like(valid))  # noqa: E731
    breaks(executor, "Target", always)


@pytest.mark.slow
def test_a_missing_mask_of_the_ends_is_noticed(breaks):
    breaks(head_placement, "masked", lambda mine, tree: tree)


@pytest.mark.slow
def test_an_activation_of_another_microbatch_is_noticed(breaks):
    right = executor.get
    breaks(executor, "get", lambda tree, slot: right(tree, jnp.maximum(slot - 1, 0)))


@pytest.mark.slow
def test_a_layer_that_pads_a_stage_is_noticed(breaks):
    breaks(stage.Stage, "_masked", lambda self, layer, tree: tree, Uneven("1f1b", 2, 1, "P", lengths=(1, 2)))
