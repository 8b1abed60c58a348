"""Law 1 under a pipeline: every schedule gives the loss, gradient and records of the whole batch on one device.

The comparison is with plain autodiff of the toy, all rows at once, without the engine. Which combinations of
schedule, sizes, mesh and options are tried is decided by `pairwise`: any two values that may meet do meet in a case.
"""

import dataclasses
from functools import partial
from itertools import combinations, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from jax.sharding import PartitionSpec as P
from losses.test_megatron import assert_golden_grads, run_golden

import jaxfb
from jaxfb.forward_backward import ends, pipeline, stage
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.schedules import Schedule

TOLERANCE = 1e-12
KEY = jax.random.key(3)
MESHES = {"tensor": {"tensor": 2}, "data": {"data": 2}, "zero1": {"data": 2}, "fsdp": {"fsdp": 2}}
FACTORS = {
    "kind": ("1f1b", "interleaved", "zero_bubble", "v_shape", "gpipe"),
    "pipe": (2, 4, 8),
    "chunks": (1, 2),
    "count": ("P", "2P+1", "1", "P-1", "2P"),
    "beside": ("data", "tensor", "fsdp layer", "fsdp step", "zero1", "nothing"),
    "tied": (True, False),
    "remat": ("none", "selective", "full"),
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


def close(got, wanted, tolerance=TOLERANCE):
    """Every leaf, relative to its largest number."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        worst, scale = np.max(np.abs(a - b), initial=0), np.max(np.abs(b), initial=0)
        assert worst <= tolerance * (scale or 1), (jax.tree_util.keystr(path), worst, scale)


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


def some_slow(values, fast):
    """Parameters for pytest, all but the first `fast` marked slow."""
    return [pytest.param(v, id=str(v), marks=[pytest.mark.slow] * (i >= fast)) for i, v in enumerate(values)]


@pytest.mark.parametrize("case", some_slow(pairwise(FACTORS), fast=10))
def test_a_pipeline_changes_nothing(case):
    check(case)


def test_every_two_values_that_may_meet_do_meet():
    cases = [dataclasses.asdict(case) for case in pairwise(FACTORS)]
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


@pytest.mark.parametrize("case", some_slow(FORWARD, fast=1))
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
    Uneven("interleaved", 2, 2, "2P+1", "data", dropout=False, lengths=(2, 2, 2, 2)),
]


@pytest.mark.parametrize("case", some_slow(UNEVEN, fast=1))
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
        (7, (0, 2, 2, 3), "at least one"),
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


# Models of another shape than the toy.


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


@pytest.mark.parametrize(
    "options", [{"schedule": own_schedule()}, {"schedule": "zero_bubble", "remat": "full"}]
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

GOLDEN_FAST = (
    "dp2_sum3_per_token_P2_V2_g2_overlap",
    "eight_layers_sum3_mean_of_means_P4_V2_g8",
    "base_sum3_per_token_P2_V1_layers1-3",
)
GOLDEN = [
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


@pytest.mark.parametrize("name", some_slow([*GOLDEN_FAST, *GOLDEN], fast=len(GOLDEN_FAST)))
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
    breaks(pipeline, "_where", lambda valid, tree: tree)


def test_a_weight_gradient_of_a_bubble_is_noticed(breaks):
    always = lambda sums, chunk, valid: stage.Target(sums, chunk, jnp.ones_like(valid))  # noqa: E731
    breaks(pipeline, "Target", always)


def test_a_missing_mask_of_the_ends_is_noticed(breaks):
    breaks(ends, "_masked", lambda mine, tree: tree)


def test_an_activation_of_another_microbatch_is_noticed(breaks):
    right = pipeline._get
    breaks(pipeline, "_get", lambda tree, slot: right(tree, jnp.maximum(slot - 1, 0)))


def test_a_layer_that_pads_a_stage_is_noticed(breaks):
    breaks(stage.Stage, "_masked", lambda self, layer, tree: tree, Uneven("1f1b", 2, 1, "P", lengths=(1, 2)))
