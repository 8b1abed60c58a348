"""A pipeline's train state stores layers where the devices use them; whoever reads it finds the model's order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy
from comparisons import close
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from tiny import write_tiny

import jaxfb
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.cli.commands import main
from jaxfb.hlo import collectives
from jaxfb.schedules import Schedule, make
from jaxfb.update.pipeline_state import PipelineState, in_model_order

MESH = jaxfb.make_mesh(pipe=2)
ADAMW = jaxfb.make_optimizer("adamw", learning_rate=0.1, weight_decay=0.1)


def step_of(schedule, mesh=MESH, model=toy.model, optimizer=ADAMW, chunks=2, **options):
    replicas = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=max(2 // replicas, 1), data_parallel=replicas)
    options |= {} if mesh is None else {"schedule": schedule, "num_chunks": chunks}
    return jaxfb.make_train_step(model, optimizer, mesh, plan, max_grad_norm=0.5, **options)


def updated(step, state, number=2, first=0):
    for seed in range(first, first + number):
        state, _ = step(state, toy.batch(seed, rows=8))
    return state


def copied(state):
    return jax.tree.map(jnp.copy, state)


def trained(state):
    return state.params, state.opt_state


@pytest.fixture(scope="module")
def wanted():
    """The states of one device after each of three updates."""
    step = step_of(None, None)
    states = [step.init(toy.params())]
    for seed in range(3):
        states.append(updated(step, copied(states[-1]), 1, seed))
    return states


@pytest.fixture(scope="module")
def interleaved():
    return step_of("interleaved")


def is_in_the_order_of(schedule, state):
    """Whether the state stores layers as the schedule's devices hold them, and gives the model's order."""
    order = [chunk for device in make(schedule, 2, 4, 2).placement for chunk in device]
    stored, read = state.stored.params["layers"]["w"], state.params["layers"]["w"]
    assert stored.sharding == read.sharding
    return order != [0, 1, 2, 3] and np.array_equal(stored, np.asarray(read)[np.array(order)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule, sizes, options",
    [
        ("v_shape", {"pipe": 2, "data": 2}, {"optimizer_sharding": "data"}),
        ("zb_v", {"pipe": 2, "fsdp": 2}, {"fsdp_gather": "step"}),
        ("interleaved", {"pipe": 2, "fsdp": 2, "data": 2}, {}),
        ("interleaved", {"pipe": 2}, {"trainable": ["layers"]}),
    ],
)
def test_updates_are_those_of_one_device(schedule, sizes, options, wanted):
    step = step_of(schedule, jaxfb.make_mesh(**sizes), **options)
    state = updated(step, step.init(toy.params()))
    assert isinstance(state, PipelineState) and isinstance(state, jaxfb.TrainState)
    assert is_in_the_order_of(schedule, state)
    if "trainable" in options:
        step = step_of(None, None, **options)
        wanted = [None, None, updated(step, step.init(toy.params()))]
    close(trained(state), trained(wanted[2]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "chunks, sizes, options",
    [
        (1, {"pipe": 2}, {"layers_per_stage": (3, 1)}),
        (
            2,
            {"pipe": 2, "data": 2},
            {"layers_per_stage": (2, 1, 0, 1), "optimizer_sharding": "data", "schedule": "zb_v"},
        ),
        (
            1,
            {"pipe": 2, "fsdp": 2},
            {"layers_per_stage": (1, 3), "remat": "layer", "schedule": "zero_bubble"},
        ),
    ],
)
def test_a_device_holds_the_layers_of_its_own_uneven_stages(chunks, sizes, options, wanted, tmp_path):
    """Each stage takes as much room as the longest; what is left is zero, and nothing of it is seen."""
    step = step_of(
        **{"schedule": None} | options, mesh=jaxfb.make_mesh(**sizes), chunks=chunks, count_zeros=True
    )
    state = step.init(toy.params())
    state, metrics = step(state, toy.batch(0, rows=8))
    counts = options["layers_per_stage"]
    stored = state.stored.params["layers"]["w"]
    assert stored.shape[0] == len(counts) * max(counts) and stored.sharding.spec[0] == "pipe"
    assert np.count_nonzero(np.any(np.asarray(stored), axis=(1, 2))) == sum(counts) == toy.LAYERS
    assert metrics.num_zeros == 0
    close(trained(state), trained(wanted[1]))
    with CheckpointStore(tmp_path, asynchronous=False) as store:
        store.save(1, {"state": state}, {})
        plain, again = (store.restore({"state": like})[0]["state"] for like in (wanted[1], state))
    close(trained(plain), trained(wanted[1]))
    gradients = step.gradients(again, toy.batch(1, rows=8))
    state, metrics = step.apply(step.place(again), gradients)
    close(trained(state), trained(wanted[2]))
    shapes = step.abstract_state(lambda key: toy.params())
    assert step.lower(shapes, toy.batch(0, rows=8)).in_tree is not None


def test_stacked_layers_that_the_stages_do_not_take_are_refused():
    step = step_of(None, layers_per_stage=(2, 1), chunks=1)
    with pytest.raises(
        ValueError, match=r"layers_per_stage=\[2, 1\] must give each of 2 stages .* of the 4 layers"
    ):
        step.init(toy.params())
    fb = jaxfb.get_forward_backward_func(MESH, layers_per_stage=(3, 1), layer_order="pipeline")
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=2)
    with pytest.raises(ValueError, match="must be 6, .* got 4; use fb.layer_order"):
        fb(toy.model, toy.params(), toy.batch(0, rows=8), plan)
    order = fb.layer_order(toy.model, toy.params(), plan)
    params = jax.tree.map(jnp.asarray, toy.params())
    with pytest.raises(ValueError, match="is for 4 stacked layers, got 6"):
        order.to_pipeline(order.to_pipeline(params))


def test_a_loop_of_ones_own_saves_and_restores_the_order_of_the_model(interleaved, wanted, tmp_path):
    """A checkpoint names arrays and no classes, so it must not depend on how a state stores them."""
    state = updated(interleaved, interleaved.init(toy.params()), 1)
    with CheckpointStore(tmp_path, asynchronous=False) as store:
        store.save(1, {"state": state}, {})
        plain, again = (store.restore({"state": like})[0]["state"] for like in (wanted[1], state))
    close(trained(plain), trained(wanted[1]))
    close(trained(again), trained(wanted[1]))
    ordered = in_model_order(again)
    placed = interleaved.place(ordered)
    assert is_in_the_order_of("interleaved", placed)
    close(trained(placed), trained(ordered))  # which is still there
    close(trained(updated(interleaved, again, 1, 1)), trained(wanted[2]))


@pytest.mark.slow
def test_a_state_goes_from_one_schedule_to_another_and_to_one_device(interleaved, wanted):
    """What is saved is in the model's order; a step takes any state and stores it in its own order."""
    state = updated(interleaved, interleaved.init(toy.params()), 1)
    assert is_in_the_order_of("interleaved", state)
    saved = in_model_order(state)
    assert type(saved) is jaxfb.TrainState and type(dataclasses.replace(state)) is jaxfb.TrainState
    close(trained(saved), trained(wanted[1]))
    names = lambda tree: [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]  # noqa: E731
    assert names(state) == names(saved)
    other = step_of("v_shape")
    assert is_in_the_order_of("v_shape", other.place(state)) and not state.step.is_deleted()
    close(trained(other.place(state)), trained(wanted[1]))
    again = interleaved.place(copied(saved))
    assert is_in_the_order_of("interleaved", again)
    close(trained(updated(interleaved, again, 1, 1)), trained(wanted[2]))
    on_one = step_of(None, None)
    assert type(on_one.place(state)) is jaxfb.TrainState
    close(trained(updated(on_one, state, 1, 1)), trained(wanted[2]))


@pytest.mark.slow
def test_gradients_are_in_the_order_of_the_model(interleaved, wanted):
    state, batch = interleaved.init(toy.params()), toy.batch(0, rows=8)
    one = step_of(None, None)
    close(interleaved.gradients(state, batch).grads, one.gradients(copied(wanted[0]), batch).grads)
    state, _ = interleaved.apply(state, interleaved.gradients(state, batch))
    assert is_in_the_order_of("interleaved", state)
    close(trained(state), trained(wanted[1]))


def moved_once(step):
    """Bytes of what an update moves along the pipe outside its loops."""
    state = in_model_order(step.init(toy.params()))
    program = step.lower(state, toy.batch(0, rows=8)).compile()
    found = [one for one in collectives(program.as_text()) if "pipe" in one.axes(MESH)]
    assert any(one.kind == "collective-permute" and one.times > 1 for one in found)
    return [one.bytes for one in found if one.kind != "all-reduce" and one.times == 1]


@pytest.mark.slow
def test_an_update_moves_no_layer_between_devices(interleaved):
    hidden, matrix = 2 * toy.SEQ * toy.WIDTH * 8, toy.WIDTH**2 * 8
    assert set(moved_once(interleaved)) <= {hidden}
    # a chunk there and its gradient back, for the chunks that change places
    assert moved_once(step_of("interleaved", layer_order="model")).count(matrix) >= 2


def test_layers_stay_in_the_order_of_the_model_where_the_optimizer_may_tell_them_apart():
    for optimizer in (optax.adam(0.1), jaxfb.make_optimizer("adafactor", learning_rate=0.1)):
        state = step_of("interleaved", optimizer=optimizer).init(toy.params())
        assert type(state) is jaxfb.TrainState
    state = step_of("interleaved", change_gradients=lambda grads, state: grads).init(toy.params())
    assert type(state) is jaxfb.TrainState
    assert type(step_of("1f1b", chunks=1).init(toy.params())) is jaxfb.TrainState
    asked = step_of("interleaved", optimizer=optax.adam(0.1), layer_order="pipeline")
    assert is_in_the_order_of("interleaved", asked.init(toy.params()))
    with pytest.raises(ValueError, match="layer_order=.pipeline. does not go with change_gradients"):
        step_of("interleaved", change_gradients=lambda grads, state: grads, layer_order="pipeline")


def test_counted_leaves_are_changed_by_the_metrics_of_their_own_layer():
    """The metrics of layers are in the model's order, and so is what the function of the user receives."""

    def layer(weights, hidden, microbatch, rng):
        hidden = toy.layer({"w": weights["w"], "b": weights["b"]}, hidden, microbatch, rng)[0]
        hidden = hidden + jax.lax.stop_gradient(weights["count"])
        return hidden, jaxfb.LossOutput(
            {}, {"size": jaxfb.Sum(jnp.abs(hidden).sum(), jnp.float64(hidden.size))}
        )

    def after(params, metrics):
        assert params["layers"]["w"].shape[0] == toy.LAYERS
        return {
            **params,
            "layers": {
                **params["layers"],
                "count": params["layers"]["count"] + metrics["size"].value[:, None],
            },
        }

    leaves = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: "count" in str(path[-1]), params)  # noqa: E731
    counted = jaxfb.types.Counted(leaves, after=after)
    model = dataclasses.replace(toy.model, layer=layer, counted=counted)
    params = toy.params()
    params["layers"]["count"] = np.zeros((toy.LAYERS, 1))
    found = []
    for schedule, mesh in (("v_shape", MESH), (None, None)):
        step = step_of(schedule, mesh, model)
        state = step.init(params)
        assert isinstance(state, PipelineState) == (mesh is not None)
        found.append(trained(updated(step, state)))
    assert len({*np.asarray(found[1][0]["layers"]["count"]).ravel()}) == toy.LAYERS
    close(*found)


def test_chunks_of_a_device_may_be_in_any_order():
    """Stages 1 and 0 on the first device: all stay on their device, and still change places."""
    actions = {0: "F0.1 F0.0 . . . . B0.0 B0.1", 1: ". . F0.1 F0.0 B0.0 B0.1 . ."}
    table = [
        [[actions[d].split()[t].strip(".")] if actions[d].split()[t] != "." else [] for d in (0, 1)]
        for t in range(8)
    ]
    schedule = Schedule.from_table(table, placement=((1, 0), (3, 2)))
    plan, batch = jaxfb.BatchPlan(rows=8, rows_per_microbatch=8), toy.batch(rows=8)
    wanted = jaxfb.get_forward_backward_func(None)(toy.model, toy.params(), batch, plan)
    fb = jaxfb.get_forward_backward_func(MESH, schedule)
    out = fb(toy.model, toy.params(), batch, plan)
    close((out.loss, out.grads), (wanted.loss, wanted.grads))


@pytest.mark.slow
def test_a_run_continues_under_another_schedule(tmp_path):
    """Its checkpoint is in the model's order: after two more updates the run is where 1F1B alone would be."""
    sections = {
        "model": {"num_layers": 4},
        "lr": {"name": "constant", "warmup": 1},
        "run": {"updates": 4},
        "eval": {"every": 100},
        "checkpoint": {"every": 2},
    }
    straight, changed = tmp_path / "straight", tmp_path / "changed"
    for directory in (straight, changed):
        directory.mkdir()
    path = str(write_tiny(straight, **sections))
    assert main(["train", path, "mesh.pipe=2", "schedule=1f1b"]) == 0
    path = str(write_tiny(changed, **sections, data={"cache_dir": str(straight / "data")}))
    assert main(["train", path, "mesh.pipe=2", "schedule=interleaved", "chunks=2", "run.updates=2"]) == 0
    more = ["mesh.pipe=2", "schedule=v_shape", "chunks=2", "run.updates=4", "--resume", "--allow-changes"]
    assert main(["train", path, *more]) == 0
    found = []
    for directory in (straight, changed):
        store = CheckpointStore(directory / "run" / "checkpoints", keep_best=None)
        shapes = {name: shape for name, shape in store.shapes(4).items() if name.startswith("params.layers.")}
        leaves = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
        found.append(store.restore(_nested(leaves), 4, partial=True)[0])
    close(*found, tolerance=1e-4)  # float32


def _nested(leaves):
    tree = {}
    for name, leaf in leaves.items():
        *above, last = name.split(".")
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[last] = leaf
    return tree


def test_a_parameter_without_elements_is_read_in_the_models_order():
    """Pipe divides its last dim, but an array without elements is cut nowhere."""
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=2)
    fb = jaxfb.get_forward_backward_func(MESH, layers_per_stage=[2, 1])
    params = {"layers": {"w": np.arange(24.0).reshape(3, 8), "empty": np.zeros((3, 0, 8))}}
    order = fb.layer_order(toy.model, params, plan)
    back = order.to_model(order.to_pipeline(jax.tree.map(jnp.asarray, params)))
    assert np.asarray(back["layers"]["empty"]).shape == (3, 0, 8)
    np.testing.assert_array_equal(back["layers"]["w"], params["layers"]["w"])


def test_a_leaf_without_elements_stays_as_it_is_where_stages_are_alike():
    """What a program made of it had other parts than JAX knew, and could not be read."""
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=2)
    fb = jaxfb.get_forward_backward_func(MESH, schedule="interleaved", num_chunks=2)
    params = {"layers": {"w": np.arange(16.0).reshape(8, 2), "empty": np.zeros((8, 0, 12))}}
    order = fb.layer_order(toy.model, params, plan)
    moved = order.to_pipeline(jax.device_put(params, NamedSharding(MESH, P("pipe"))))
    back = order.to_model(moved)
    assert np.asarray(moved["layers"]["empty"]).shape == np.asarray(back["layers"]["empty"]).shape
    assert (np.asarray(moved["layers"]["w"]) != params["layers"]["w"]).any()
    np.testing.assert_array_equal(back["layers"]["w"], params["layers"]["w"])
