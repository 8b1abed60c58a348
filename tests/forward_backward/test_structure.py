"""Laws 5 and 6 on the compiled program: one reduction a step, flat memory, whatever the split."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy

import jaxfb
from jaxfb.hlo import collectives, traffic

ROWS = 64
COUNTS = (1, 16)


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def compile_fb(mesh, plan, **options):
    """The compiled program of one call that returns everything."""
    fb = jaxfb.get_forward_backward_func(mesh, **options)
    call = jax.jit(lambda params, batch: fb(toy.model, params, batch, plan))
    return call.lower(abstract(toy.params()), abstract(toy.batch(rows=plan.rows))).compile()


def compile_step(mesh, plan, **options):
    step = jaxfb.make_train_step(toy.model, optax.adam(1e-3), mesh, plan, dropout=False, **options)
    state = jax.eval_shape(lambda: jaxfb.TrainState.create(toy.params(), optax.adam(1e-3)))
    placed = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        state,
        step.state_shardings(state),
    )
    return step.lower(placed, abstract(toy.batch(rows=plan.rows))).compile()


def over(compiled, mesh, axis):
    return [one for one in collectives(compiled.as_text()) if axis in one.axes(mesh)]


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_one_reduction_a_call_whatever_the_number_of_microbatches():
    mesh = jaxfb.make_mesh(data=4)
    plans = [jaxfb.BatchPlan(rows=ROWS, data_parallel=4, num_microbatches=count) for count in COUNTS]
    seen = [over(compile_fb(mesh, plan), mesh, "data") for plan in plans]
    assert traffic(seen[0]) == traffic(seen[1])
    for found in seen:
        assert all(one.times == 1 for one in found), "a collective over data inside the microbatch loop"
        gradients = [one for one in found if "reduce_gradients" in one.op_name]
        assert [one.kind for one in gradients] == ["all-reduce"]
        assert bytes_of(toy.params()) <= gradients[0].bytes < bytes_of(toy.params()) + 20_000


def test_zero2_scatters_in_every_microbatch_and_keeps_its_part_of_the_sum():
    mesh, weights = jaxfb.make_mesh(data=4), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    plan = jaxfb.BatchPlan(rows=32, data_parallel=4, num_microbatches=4)

    def loss_fn(weights, microbatch, rng):
        return jaxfb.Sum(jnp.square(microbatch["x"] @ weights).sum(), 1.0 * microbatch["x"].shape[0])

    def compiled(kind):
        fb = jaxfb.get_forward_backward_func(mesh, optimizer_sharding=kind)
        batch = {"x": jax.ShapeDtypeStruct((32, 256), jnp.float32)}
        return jax.jit(lambda w, batch: fb(loss_fn, w, batch, plan).grads).lower(weights, batch).compile()

    programs = {kind: compiled(kind) for kind in ("data", "gradients")}
    times = {
        kind: [one.times for one in over(program, mesh, "data") if one.kind == "reduce-scatter"]
        for kind, program in programs.items()
    }
    assert times == {"data": [1], "gradients": [4]}
    temp = {kind: program.memory_analysis().temp_size_in_bytes for kind, program in programs.items()}
    assert temp["data"] - temp["gradients"] >= 0.7 * bytes_of(weights)
    with pytest.raises(ValueError, match='needs a mesh with pipe=1; in a pipeline use "data"'):
        jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=2), optimizer_sharding="gradients")


def test_zero1_step_scatters_gradients_and_gathers_parameters_once():
    mesh = jaxfb.make_mesh(data=4)
    plans = [jaxfb.BatchPlan(rows=ROWS, data_parallel=4, num_microbatches=count) for count in COUNTS]
    seen = [over(compile_step(mesh, plan, optimizer_sharding="data"), mesh, "data") for plan in plans]
    assert traffic(seen[0]) == traffic(seen[1])
    cut = {
        name: leaf for name, leaf in toy.params().items() if name != "gain"
    }  # 3 numbers: no axis divides them
    for found in seen:
        assert all(one.times == 1 for one in found)
        scattered = [one for one in found if one.kind == "reduce-scatter"]
        assert all("reduce_gradients" in one.op_name for one in scattered)
        assert sum(one.bytes for one in scattered) == bytes_of(cut)
        assert sum(one.bytes for one in found if one.kind == "all-gather") == bytes_of(cut)


@pytest.mark.slow
def test_fsdp_gathers_once_a_step_or_once_a_microbatch_as_asked():
    mesh = jaxfb.make_mesh(data=2, fsdp=2)

    def arrays(gather, num_microbatches):
        plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=4, num_microbatches=num_microbatches)
        found = over(compile_fb(mesh, plan, fsdp_gather=gather), mesh, "fsdp")
        mine = [one for one in found if "data" not in one.axes(mesh)]
        return {kind: number for kind, (number, _) in traffic(mine).items()}

    leaves = 2  # embed, layers.w
    assert arrays("step", 2) == arrays("step", 8) == {"all-gather": leaves, "reduce-scatter": leaves}
    assert arrays("layer", 8) == {
        # w forward and again backward, since gathered weights are not kept; embed for the embedding and for the head
        "all-gather": 8 * (2 * toy.LAYERS + 2),
        "reduce-scatter": 8 * (toy.LAYERS + 2),
    }


def test_what_only_the_head_reads_is_gathered_and_scattered_once_a_microbatch_and_summed_in_shards():
    """Whole sums of it, or a gathered copy that waits from before the loop, are what fills a chip at 8B."""
    mesh = jaxfb.make_mesh(fsdp=4)
    plan = jaxfb.BatchPlan(rows=16, data_parallel=4, num_microbatches=4)
    fb = jaxfb.get_forward_backward_func(mesh)
    params = abstract(toy.params(tied=False))
    call = jax.jit(lambda params, batch: fb(toy.model, params, batch, plan))
    text = call.lower(params, abstract(toy.batch(rows=16))).compile().as_text()
    loops = [one for one in collectives(text) if one.times == 4 and "fsdp" in one.axes(mesh)]
    whole = toy.WIDTH * toy.VOCAB * 8
    kinds = [one.kind for one in loops if one.bytes == whole]
    assert sorted(kinds) == ["all-gather", "all-gather", "reduce-scatter", "reduce-scatter"]
    carried = [line for line in text.splitlines() if " while(" in line and "/layers/" not in line]
    assert carried and not any(f"f64[{toy.WIDTH},{toy.VOCAB}]" in line for line in carried)


@pytest.mark.parametrize(
    "remat", ["none", *(pytest.param(r, marks=pytest.mark.slow) for r in ("selective", "full"))]
)
def test_gathered_weights_are_not_kept_for_the_backward(remat):
    """A stack of whole weights in the program would be ZeRO-3 undone."""
    plan = jaxfb.BatchPlan(rows=16, data_parallel=2, num_microbatches=2)
    text = compile_fb(jaxfb.make_mesh(fsdp=2), plan, remat=remat).as_text()
    assert f"f64[{toy.LAYERS},{toy.WIDTH // 2},{toy.WIDTH}]" in text  # the shards
    assert f"f64[{toy.LAYERS},{toy.WIDTH},{toy.WIDTH}]" not in text


@pytest.mark.parametrize("remat", ["layer", "offload"])
@pytest.mark.parametrize("pipe, num_microbatches", [(1, 1), (1, 4), (2, 4)])
def test_the_inputs_of_layers_wait_in_the_hosts_memory_where_they_are_asked_to(remat, pipe, num_microbatches):
    mesh = jaxfb.make_mesh(pipe=pipe)
    plan = jaxfb.BatchPlan(rows=4 * num_microbatches, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(mesh, remat=remat)
    arguments = abstract((toy.params(), toy.batch(rows=plan.rows)))
    program = str(jax.make_jaxpr(lambda params, batch: fb(toy.model, params, batch, plan).grads)(*arguments))
    assert ("<host>" in program) == (remat == "offload")


def scans_in(jaxpr):
    """The bodies of all loops below a jaxpr."""
    for eqn in jaxpr.eqns:
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            if eqn.primitive.name == "scan":
                yield inner
            yield from scans_in(inner)


def fetched_in(jaxpr):
    """The arrays that a body itself brings from the host's memory."""
    return [
        eqn.outvars[0]
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "device_put"
        and eqn.invars[0].aval.memory_space == jax.memory.Space.Host
        and eqn.outvars[0].aval.memory_space == jax.memory.Space.Device
    ]


def multiplies(jaxpr, var):
    """Whether anything but views of an array is computed from it."""
    views, read = {"reshape", "squeeze", "copy"}, {var}
    for eqn in jaxpr.eqns:
        if read & {one for one in eqn.invars if isinstance(one, jax.extend.core.Var)}:
            if eqn.primitive.name not in views:
                return True
            read |= set(eqn.outvars)
    return False


def test_the_input_of_a_layer_is_brought_from_the_host_a_turn_before_its_backward():
    """In its own turn its backward would wait for it."""
    plan = jaxfb.BatchPlan(rows=16, num_microbatches=4)
    fb = jaxfb.get_forward_backward_func(remat="offload")
    arguments = abstract((toy.params(), toy.batch(rows=plan.rows)))
    program = jax.make_jaxpr(lambda params, batch: fb(toy.model, params, batch, plan).grads)(*arguments)
    inside = [body for body in scans_in(program.jaxpr) if not list(scans_in(body))]
    fetched = [(body, var) for body in inside for var in fetched_in(body)]
    assert fetched and not any(multiplies(body, var) for body, var in fetched)


@pytest.mark.parametrize("remat", ["none", "selective", "layer", "full"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_the_layers_gradients_of_a_microbatch_never_exist_beside_their_sum(remat, num_microbatches):
    """They are added a layer at a time; autodiff of the whole model would hold another array like the parameters."""
    params = {"layers": {"w": jax.ShapeDtypeStruct((16, 128, 128), np.float32)}}
    model = jaxfb.Pipelined(
        embed=lambda outer, microbatch, rng: microbatch["x"],
        layer=lambda weights, hidden, microbatch, rng: jnp.tanh(hidden @ weights["w"]),
        head=lambda outer, hidden, microbatch, rng: jaxfb.Sum((hidden**2).sum(), 1.0 * hidden.shape[0]),
    )
    plan = jaxfb.BatchPlan(rows=4 * num_microbatches, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(remat=remat)
    batch = {"x": jax.ShapeDtypeStruct((plan.rows, 128), np.float32)}
    compiled = jax.jit(lambda p, b: fb(model, p, b, plan).grads).lower(params, batch).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 0.3 * bytes_of(params)


def wide_loss(params, microbatch, rng):
    hidden = microbatch["x"]
    for weights in params:
        hidden = jnp.tanh(hidden @ weights)
    return jaxfb.Sum((hidden**2).sum(), microbatch["x"].shape[0])


def temp_bytes(num_microbatches, rows_per_microbatch):
    params = [jax.ShapeDtypeStruct((64, 64), np.float32)] * 3
    rows = num_microbatches * rows_per_microbatch
    plan = jaxfb.BatchPlan(rows=rows, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func()
    batch = {"x": jax.ShapeDtypeStruct((rows, 64), np.float32)}
    compiled = jax.jit(lambda p, b: fb(wide_loss, p, b, plan)).lower(params, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_flat_in_the_number_of_microbatches():
    flat = [temp_bytes(count, 128) for count in (4, 64)]
    assert max(flat) <= 1.02 * min(flat), flat
    assert temp_bytes(1, 16 * 128) > 2 * max(flat)  # the measure does notice activations of more rows


@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_embedding_gradient_equals_add_at(num_microbatches):
    """Repeated tokens: scatter-add inside an accumulation loop is what openxla/xla #49143 miscompiled."""
    rng = np.random.default_rng(0)
    tokens, scale = rng.integers(0, 5, (16, 7)), rng.normal(size=(16, 7, 3))

    def loss(table, microbatch, _):
        return jaxfb.Sum((table[microbatch["tokens"]] * microbatch["scale"]).sum(), microbatch["tokens"].size)

    plan = jaxfb.BatchPlan(rows=16, data_parallel=2, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=2))
    out = fb(loss, rng.normal(size=(9, 3)), {"tokens": tokens, "scale": scale}, plan)
    expected = np.zeros((9, 3))
    np.add.at(expected, tokens, scale)
    np.testing.assert_allclose(out.grads, expected / tokens.size, rtol=0, atol=1e-15)
