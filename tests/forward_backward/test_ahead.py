"""FSDP's gathers a layer ahead of their use, and scatters a layer late: the same numbers on every kind of mesh."""

import jax
import numpy as np
import pytest
import toy
from comparisons import close
from jax.sharding import PartitionSpec as P
from late import call

import jaxfb
from jaxfb.config import load_config
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.planner import parse_topology
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job
from jaxfb.platforms.compat import equations

KEY = jax.random.key(5)
LAYERS = 3  # odd: the last of them is no half of a pair


def gradients(mesh, layers=LAYERS, num_microbatches=2, schedule=None, dtype=np.float64, **options):
    """The result of a call on a mesh."""
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), schedule, **options)
    return fb(toy.model, toy.params(layers=layers, dtype=dtype), toy.batch(), plan, KEY)


def tensor_specs(params):
    return {
        "embed": P("tensor"),
        "gain": P(),
        "layers": {"w": P(None, None, "tensor"), "b": P(None, "tensor")},
    }


def named(case):
    return str({**case, "param_specs": "tensor"}) if "param_specs" in case else str(case)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 4}, {"remat": "layer", "reduce_dtype": "float64"}),
        ({"fsdp": 2}, {"remat": "none", "num_microbatches": 1}),
        slow({"pipe": 2, "fsdp": 2}, {"remat": "full", "layers": 10, "schedule": "1f1b"}),
        slow({"pipe": 2, "fsdp": 2}, {"remat": "none", "layers": 10, "schedule": "zero_bubble"}),
        slow({"fsdp": 2}, {"remat": "selective", "layers": 4}),
        slow({"fsdp": 4}, {"remat": "full", "layers": 1}),
        slow({"fsdp": 2, "tensor": 2}, {"remat": "full", "param_specs": tensor_specs}),
        slow({"data": 2, "fsdp": 2}, {"remat": "full", "optimizer_sharding": "data"}),
        slow({"pipe": 2, "data": 2, "fsdp": 2}, {"remat": "layer", "layers": 12, "schedule": "1f1b"}),
        slow(
            {"pipe": 2, "fsdp": 2},
            {"remat": "layer", "layers": 7, "schedule": "1f1b", "layers_per_stage": (6, 1)},
        ),
    ],
    ids=named,
)
def test_gradients_are_those_of_one_device(mesh, options):
    out = gradients(mesh, **options, gather_ahead=True)
    loss, grads = toy.gradient(options.get("layers", LAYERS), seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"fsdp": 4}, {"remat": "full"}),
        ({"fsdp": 4}, {"remat": "layer", "fsdp_gather": 2, "reduce_dtype": "float64"}),
        slow({"fsdp": 4}, {"remat": "full", "layers": 1}),
        slow({"data": 2, "fsdp": 4}, {"remat": "none", "layers": 2}),
        slow({"pipe": 2, "fsdp": 4}, {"remat": "full", "layers": 10, "schedule": "1f1b"}),
        ({"pipe": 2, "fsdp": 4}, {"remat": "layer", "layers": 4, "schedule": "1f1b"}),
        slow({"pipe": 2, "fsdp": 4}, {"remat": "full", "layers": 6, "schedule": "zero_bubble"}),
    ],
    ids=named,
)
def test_steps_of_a_scatter_a_layer_apart_give_the_gradients_of_one_device(mesh, options, in_two_steps):
    out = gradients(mesh, **options, gather_ahead=True)
    loss, grads = toy.gradient(options.get("layers", LAYERS), seed=5)
    close(out.loss, loss)
    close(out.grads, grads)


@pytest.mark.parametrize(
    ("topology", "remat"),
    [
        ("v6e:2x4", "full"),
        ("v5p:2x2x2", "selective"),
        slow("v5e:2x4", "full"),
        slow("v5p:2x2x2", "full"),
    ],
)
def test_on_a_whole_slice_a_layer_waits_between_the_steps_of_its_scatter_but_on_v5e(topology, remat):
    over = (
        "mesh.fsdp=8",
        "data.tokenizer=bytes",
        f"parallel.remat={remat}",
        "model.num_heads=8",
        "model.num_kv_heads=8",
    )
    config = load_config("configs/quickstart.yaml", over)
    job = make_job(config, abstract_mesh(config, 8, abstract_device(parse_topology(topology))))
    program = job.step.trace(job.state, job.batch).jaxpr
    scans = [eqn.params["jaxpr"].jaxpr for eqn in equations(program) if eqn.primitive.name == "scan"]
    of_layers = [body for body in scans if not any(eqn.primitive.name == "scan" for eqn in body.eqns)]
    assert sum(len(scattered(body)) for body in of_layers) > 2
    returned = {id(var) for body in of_layers for eqn in scattered(body) for var in eqn.outvars}
    at_once = [eqn for body in of_layers for eqn in scattered(body) if id(eqn.invars[0]) in returned]
    assert bool(at_once) == (topology == "v5e:2x4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"trainable": ["layers.b"], "remat": "full"},
        slow({"trainable": ["layers.w", "embed"], "remat": "none"}),
        slow({"dtype": np.float32, "compute_dtype": "bfloat16", "remat": "layer"}),
        slow({"dtype": np.float32, "reduce_dtype": "bfloat16", "remat": "full"}),
    ],
    ids=str,
)
def test_gradients_are_those_without_it(options):
    """Frozen leaves have none; in bfloat16 every sum is formed in the same order and dtype."""
    now, ahead = (gradients({"fsdp": 4}, **options, gather_ahead=each) for each in (False, True))
    assert jax.tree.structure(now.grads) == jax.tree.structure(ahead.grads)
    exact = options.get("dtype") is None
    close(ahead.grads, now.grads) if exact else np.testing.assert_allclose(
        ahead.grads["layers"]["w"], now.grads["layers"]["w"], rtol=0.05, atol=1e-3
    )


@pytest.mark.slow
def test_experts_of_several_devices_are_gathered_ahead():
    sizes = TransformerConfig(
        vocab_size=32, num_layers=3, hidden_size=16, num_heads=2, mlp_size=16, num_experts=4
    )
    model, params = transformer(sizes), init_params(sizes, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), params)
    tokens = np.random.default_rng(0).integers(0, 32, (8, 8))
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((8, 8))}
    plan = jaxfb.BatchPlan(rows=8, data_parallel=4, num_microbatches=2)
    mesh = jaxfb.make_mesh(fsdp=2, expert=2)
    now, ahead = (
        jaxfb.get_forward_backward_func(mesh, gather_ahead=each, remat="full")(model, params, batch, plan)
        for each in (False, True)
    )
    close(ahead.loss, now.loss)
    close(ahead.grads, now.grads)


def carried_gathers(program):
    """(gather, the loop's body) wherever a loop hands what it gathers to its next turn."""
    for eqn in equations(program):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            made = {id(var): one for one in body.eqns if gathers(one) for var in one.outvars}
            yield from ((made[id(var)], body) for var in body.outvars if id(var) in made)


def scatters_of_a_pipeline(layers, **options):
    """How many reduce-scatters are written in the program of a pipeline of two stages."""
    mesh = {"pipe": 2, "fsdp": 2}
    fb, (model, params, *rest) = call(mesh, layers, schedule="1f1b", remat="layer", **options)
    traced = jax.make_jaxpr(lambda params: fb(model, params, *rest))(params).jaxpr
    return sum(eqn.primitive.name == "reduce_scatter" for eqn in equations(traced))


@pytest.mark.parametrize("layers", [2, 6])
def test_a_backward_that_is_no_loop_scatters_no_zeros(layers):
    """In a loop the first turn scatters what waits before it, of which there is nothing."""
    assert scatters_of_a_pipeline(layers, gather_ahead=True) == scatters_of_a_pipeline(layers)


def depends_on(wanted_one, eqn, body):
    """Whether such an equation is among those whose results lead to this one."""
    maker = {id(var): one for one in body.eqns for var in one.outvars}
    wanted, seen = [eqn], set()
    while wanted:
        one = wanted.pop()
        makers = [maker[id(var)] for var in one.invars if id(var) in maker]
        if any(map(wanted_one, makers)):
            return True
        wanted += [made for made in makers if id(made) not in seen]
        seen |= {id(made) for made in makers}
    return False


def is_pause(eqn):
    """Whether it is a barrier that the number of a turn goes through."""
    return eqn.primitive.name == "optimization_barrier" and any(v.aval.dtype == np.int32 for v in eqn.invars)


def scattered(body):
    """The reduce-scatters of a loop's body."""
    return [eqn for eqn in body.eqns if eqn.primitive.name == "reduce_scatter"]


def gathers(eqn):
    """Whether it is an all-gather or a call of one, and not a whole layer."""
    names = {one.primitive.name for one in [eqn, *equations(tuple(eqn.params.values()))]}
    return "all_gather" in names and "dot_general" not in names


@pytest.mark.parametrize("topology", ["cpu:4", "v5e:2x2", "v6e:2x2"])
def test_it_is_the_default_on_accelerators_but_v5e(topology):
    over = ("mesh.fsdp=4", "data.tokenizer=bytes", "precision.reduce_dtype=bfloat16")
    config = load_config("configs/quickstart.yaml", over)
    where = parse_topology(topology)
    job = make_job(config, abstract_mesh(config, 4, abstract_device(where)))
    traced = job.step.trace(job.state, job.batch).jaxpr
    carried = list(carried_gathers(traced))
    assert bool(carried) == (topology == "v6e:2x2")
    # what the next turn begins with is gathered after this turn's first layer, whose parameters lie where it will
    assert all(depends_on(is_pause, eqn, body) for eqn, body in carried)
    # on CPU, which adds up no 16-bit floats, what is rounded is summed in float32
    sent = {one.invars[0].aval.dtype for one in equations(traced) if one.primitive.name == "reduce_scatter"}
    assert sent == {jax.numpy.dtype("float32" if topology == "cpu:4" else "bfloat16")}


@pytest.mark.parametrize("topology", ["cpu:4", "v5e:2x2", "v6e:2x2"])
def test_a_loop_on_a_tpu_reads_shards_as_they_are_stored(topology):
    """Whether they are gathered ahead or not: XLA would otherwise convert all of them in front of the loop."""
    config = load_config("configs/quickstart.yaml", ("mesh.fsdp=4", "data.tokenizer=bytes"))
    job = make_job(config, abstract_mesh(config, 4, abstract_device(parse_topology(topology))))
    program = job.step.trace(job.state, job.batch).jaxpr
    bits = [one for one in equations(program) if one.primitive.name == "bitcast_convert_type"]
    assert bool(bits) == (topology != "cpu:4")


def without_the_chunks_dim(program, num_layers):
    """What makes each array [1, num_layers, ...] of which a loop over microbatches takes the first dim off."""
    for eqn in equations(program):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            made = {id(var): one for one in body.eqns for var in one.outvars}
            for one in body.eqns:
                if one.primitive.name == "squeeze" and one.invars[0].aval.shape[:2] == (1, num_layers):
                    yield made[id(one.invars[0])].primitive.name


def test_the_last_gradients_are_added_before_the_sums_change_their_shape():
    """A compiler that changes the shape of the sums first copies all of them."""
    config = load_config("configs/quickstart.yaml", ("mesh.fsdp=4", "data.tokenizer=bytes"))
    job = make_job(config, abstract_mesh(config, 4, abstract_device(parse_topology("v5e:2x2"))))
    program = job.step.trace(job.state, job.batch).jaxpr
    assert {*without_the_chunks_dim(program, config.model.num_layers)} == {"optimization_barrier"}


def carried_cuts(program):
    """Dims that `tensor` cuts of each gradient that a loop hands to its next turn and that is annotated."""
    for eqn in equations(program):
        if eqn.primitive.name == "scan":
            body = eqn.params["jaxpr"].jaxpr
            made = {id(var): one for one in body.eqns for var in one.outvars}
            for maker in (made.get(id(var)) for var in body.outvars):
                if maker and maker.primitive.name == "sharding_constraint":
                    spec = maker.params["sharding"].spec
                    yield (
                        maker.outvars[0].aval.shape,
                        [dim for dim, one in enumerate(spec) if one == "tensor"],
                    )


def test_gradients_that_wait_for_their_scatter_are_cut_as_their_parameters():
    """Over tensor: the partitioner is otherwise free to cut them along another dim, and exchanges them later."""
    over = ("mesh.fsdp=2", "mesh.tensor=2", "data.tokenizer=bytes", "parallel.gather_ahead=true")
    config = load_config("configs/quickstart.yaml", over)
    job = make_job(config, abstract_mesh(config, 4, abstract_device(parse_topology("cpu:4"))))
    found = list(carried_cuts(job.step.trace(job.state, job.batch).jaxpr))
    width, heads, kv, mlp = 96, 96, 48, 256
    columns = [((width, size), [1]) for size in (heads, kv, kv, mlp, mlp)]
    assert all(found.count(one) >= columns.count(one) for one in columns)
    assert {((heads, width), (0,)), ((mlp, width), (0,))} <= {(shape, tuple(dims)) for shape, dims in found}


@pytest.mark.slow
def test_on_tpus_the_experts_matrices_are_gathered_in_the_order_of_their_rows():
    """A wish for another order would be carried to the shards of all layers."""
    config = load_config("configs/moe.yaml", ["mesh.dp=1", "mesh.fsdp=2", "mesh.ep=2", "parallel.remat=full"])

    def pinned(topology):
        job = make_job(config, abstract_mesh(config, 4, abstract_device(parse_topology(topology))))
        program = job.step.trace(job.state, job.batch).jaxpr
        found = [eqn for eqn in equations(program) if eqn.primitive.name == "layout_constraint"]
        assert all(eqn.params["layout"].major_to_minor == (0, 1, 2) for eqn in found)
        return {eqn.invars[0].aval.shape for eqn in found}

    assert pinned("v5p:2x2x1") == {(4, 48, 96)}
    assert not pinned("gpu:h100x4")
