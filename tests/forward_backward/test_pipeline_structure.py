"""Law 5 and 6 under a pipeline, on the compiled program: flat memory, one reduction, nothing that grows with M."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from flax import nnx
from jax.sharding import AbstractDevice, AbstractMesh

import jaxfb
from jaxfb.forward_backward import strategies
from jaxfb.forward_backward.layers.ahead import Ahead
from jaxfb.forward_backward.layers.layer_passes import Layers, StageInputs
from jaxfb.forward_backward.layers.slot import Slot, empty_slots
from jaxfb.forward_backward.layers.stage import Stage, layers_written_out
from jaxfb.forward_backward.layers.target import Target
from jaxfb.forward_backward.sequential import layer_output
from jaxfb.hlo import collectives, traffic
from jaxfb.schedules import make

ROWS, SEQ, WIDTH, LAYERS = 16, 16, 64, 8
HIDDEN_BYTES = ROWS * SEQ * WIDTH * 4
AS_IT_IS = Ahead(lambda shards: shards, (lambda grads: grads,), lambda grads: grads)


def embed(outer, microbatch, rng):
    return outer["rows"][microbatch["token"]][:, None] * outer["columns"]


def layer(weights, hidden, microbatch, rng):
    return hidden + jnp.tanh(hidden @ weights)


def head(outer, hidden, microbatch, rng):
    return jaxfb.Sum((hidden @ outer["columns"].T).mean(2).sum(), float(ROWS))


def compiled(kind, num_microbatches, num_chunks=1, data=1, layers=LAYERS, **options):
    """Every microbatch is so many rows of a model whose hidden is far larger than what a row is given as."""
    float32 = lambda *shape: jax.ShapeDtypeStruct(shape, np.float32)  # noqa: E731
    params = {
        "rows": float32(8, WIDTH),
        "columns": float32(SEQ, WIDTH),
        "layers": float32(layers, WIDTH, WIDTH),
    }
    plan = jaxfb.BatchPlan(rows=num_microbatches * data * ROWS, rows_per_microbatch=ROWS, data_parallel=data)
    mesh = jaxfb.make_mesh(pipe=4, data=data)
    fb = jaxfb.get_forward_backward_func(mesh, kind, num_chunks=num_chunks, **options)
    call = jax.jit(lambda params, batch: fb(jaxfb.Pipelined(embed, layer, head), params, batch, plan))
    lowered = call.lower(params, {"token": jax.ShapeDtypeStruct((plan.rows,), np.int32)})
    return mesh, lowered.as_text(), lowered.compile()


@pytest.mark.parametrize(
    "kind, chunks, remat",
    [
        ("1f1b", 1, "none"),
        pytest.param("v_shape", 2, "full", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, "layer", marks=pytest.mark.slow),
        pytest.param("1f1b", 1, "full", marks=pytest.mark.slow),
        pytest.param("interleaved", 2, "none", marks=pytest.mark.slow),
        pytest.param("interleaved", 2, "full", marks=pytest.mark.slow),
        pytest.param("zero_bubble", 1, "none", marks=pytest.mark.slow),
        pytest.param("zero_bubble", 2, "selective", marks=pytest.mark.slow),
        pytest.param("v_shape", 2, "none", marks=pytest.mark.slow),
        pytest.param("zb_v", 2, "none", marks=pytest.mark.slow),
    ],
)
def test_memory_and_program_do_not_grow_with_the_number_of_microbatches(kind, chunks, remat):
    sizes, lines, loops = [], [], []
    for count in (8, 64):
        _, text, program = compiled(kind, count, chunks, remat=remat)
        sizes.append(program.memory_analysis().temp_size_in_bytes)
        lines.append(len(text.splitlines()))
        loops.append(text.count("stablehlo.while"))
    assert max(sizes) <= 1.02 * min(sizes), sizes
    assert lines[0] == lines[1] and loops[0] == loops[1], (lines, loops)
    assert len({len(make(kind, 4, count, chunks).phases) for count in (8, 64)}) == 1


def test_layers_kept_by_their_inputs_are_run_once_more_and_no_stage_as_a_whole():
    """ "full" has a loop for the inputs of a stage's layers that "layer" reads from its slots."""
    loops = {
        remat: compiled("1f1b", 8, 1, remat=remat)[1].count("stablehlo.while") for remat in ("layer", "full")
    }
    assert loops["layer"] < loops["full"]


def test_memory_is_the_slots_of_the_schedule():
    """GPipe holds every microbatch, 1f1b 2P - 1 of them; the difference is slots and nothing else."""
    sizes = {count: compiled("gpipe", count)[2].memory_analysis().temp_size_in_bytes for count in (8, 32)}
    kept = 2 * LAYERS // 4 * HIDDEN_BYTES  # a layer keeps its input and its tanh
    assert 24 * kept <= sizes[32] - sizes[8] <= 1.5 * 24 * (kept + HIDDEN_BYTES)


def test_one_gradient_reduction_a_call_and_permutes_as_the_schedule_says():
    """Over data: each gradient once. Over pipe: a hidden a tick each way, the ends' gradients and records once."""
    seen = []
    for count in (2, 8):
        mesh, _, program = compiled("1f1b", count, data=2)
        found = collectives(program.as_text())
        over_data = [one for one in found if "data" in one.axes(mesh)]
        assert all(one.times == 1 for one in over_data)
        reduced = [one for one in over_data if "reduce_gradients" in one.op_name]
        kinds = [one.kind for one in reduced]
        assert kinds == ["all-reduce"] * 2  # the stages' layers; the ends, over pipe as well
        gradients = 4 * WIDTH * (8 + SEQ + LAYERS // 4 * WIDTH)
        assert gradients <= sum(one.bytes for one in reduced) < gradients + 5_000  # padded records ride along
        seen.append(traffic(over_data))

        along_pipe = [one for one in found if one.axes(mesh) == ("pipe",)]
        assert {one.kind for one in along_pipe} <= {"collective-permute", "all-reduce"}
        assert all(one.times == 1 for one in along_pipe if one.kind == "all-reduce")
        arrays, size = traffic(along_pipe)["collective-permute"]
        ticks = count + 3  # with a forward, and as many with a backward
        assert (arrays, size) == (2 * ticks, 2 * ticks * HIDDEN_BYTES)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["interleaved", "zero_bubble", "v_half"])
def test_a_tick_reads_layers_where_they_are_in_all_chunks(kind):
    """A chunk's layers cut from those of all would be a copy in every tick."""
    _, text, _ = compiled(kind, 4, 2, layers=2 * LAYERS)
    found = re.findall(rf"dynamic_slice .*\(tensor<2x2x{WIDTH}x{WIDTH}xf32>.* -> tensor<1x(\d)x", text)
    assert found.count("1") >= 4
    assert (
        found.count("2") == 4
    )  # two chunks change places before the loops over ticks, and two sums behind them


def test_layers_change_places_once_a_call_if_a_device_holds_several_chunks():
    """By permutes of whole chunks before and after the loops; no gather, whatever the placement."""
    for kind in ("interleaved", "v_shape"):
        mesh, _, program = compiled(kind, 4, 2)
        found = [one for one in collectives(program.as_text()) if "pipe" in one.axes(mesh)]
        assert {one.kind for one in found} <= {"collective-permute", "all-reduce"}
        moved = [one for one in found if one.kind == "collective-permute" and one.times == 1]
        chunk = LAYERS // 8 * WIDTH * WIDTH * 4
        layers = [one.bytes for one in moved if one.bytes != HIDDEN_BYTES]
        assert layers and all(size == chunk for size in layers) and len(layers) <= 2 * 2 * 2


def kept_of(layer, params, hidden, microbatch=None, rng=None, **options):
    """Shapes of what a slot keeps of a stage of two layers, the layer dim left out."""
    stage = Stage(lambda *given: layer_output(layer(*given)), **options)
    layers = Layers(params, jnp.arange(2), jnp.ones(2, bool))
    inputs = jax.eval_shape(
        lambda: StageInputs(microbatch or {}, rng)
    )  # as the executor has them: shapes alone
    slots = jax.eval_shape(lambda: stage.empty(layers, hidden, inputs, 1))
    beside = 1 if options.get("keep") == "input" else 2  # slots, and layers
    return sorted(leaf.shape[beside:] for leaf in jax.tree.leaves(slots))


def products(jaxpr) -> int:
    """Matrix products that run, those in a loop once for each turn."""
    count = 0
    for eqn in jaxpr.eqns:
        inner = [value for value in eqn.params.values() if hasattr(value, "jaxpr") or hasattr(value, "eqns")]
        turns = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        count += eqn.primitive.name == "dot_general"
        count += turns * sum(products(getattr(value, "jaxpr", value)) for value in inner)
    return count


@pytest.mark.parametrize("keep, forwards", [("residuals", 3), ("inputs", 6), ("input", 8)])
def test_how_often_a_stage_of_three_layers_runs_forward(keep, forwards):
    """Beside the backward's two products a layer. "input" computes the inputs of all but the first layer again."""
    stage = Stage(lambda *given: layer_output(jnp.tanh(given[1] @ given[0])), keep)
    layers, inputs = Layers(jnp.zeros((3, *KERNEL)), jnp.arange(3), jnp.ones(3, bool)), StageInputs({}, None)
    target = Target(jnp.zeros((1, 3, *KERNEL)), jnp.int32(0), jnp.bool_(True))

    def both(hidden):
        slot = Slot(stage.empty(layers, hidden, inputs, 1), jnp.int32(0))
        slot = stage.forward(layers, hidden, inputs, slot)[2]
        return stage.backward(layers, slot, hidden, {}, inputs, target)

    assert products(jax.make_jaxpr(both)(jnp.zeros(HIDDEN)).jaxpr) == forwards + 2 * 3


@pytest.mark.parametrize("keep, again", [("residuals", 0), ("inputs", 3), ("input", 5)])
def test_the_products_of_weight_gradients_are_put_off(keep, again):
    """Of a backward in two parts, each part has one product a layer; what runs again does so in the first alone."""
    stage = Stage(lambda *given: layer_output(jnp.tanh(given[1] @ given[0])), keep)
    layers, inputs = Layers(jnp.zeros((3, *KERNEL)), jnp.arange(3), jnp.ones(3, bool)), StageInputs({}, None)
    target = Target(jnp.zeros((1, 3, *KERNEL)), jnp.int32(0), jnp.bool_(True))
    hidden = jnp.zeros(HIDDEN)
    slot = Slot(stage.empty(layers, hidden, inputs, 1), jnp.int32(0))
    saved = Slot(empty_slots(stage.saved(layers, hidden, {}, inputs), 1), jnp.int32(0))

    def now(slot, saved, cotangent):
        return stage.backward_input(layers, slot, cotangent, {}, inputs, saved)

    def later(slot, saved):
        return stage.backward_weight(layers, slot, saved, {}, inputs, target)

    assert products(jax.make_jaxpr(now)(slot, saved, hidden).jaxpr) == again + 3
    assert products(jax.make_jaxpr(later)(slot, saved).jaxpr) == 3


IN_TURN = replace(AS_IT_IS, in_turn=("*",))


@pytest.mark.parametrize("ahead, waits", [(None, [0, 1, 2]), (AS_IT_IS, [0, 0, 0]), (IN_TURN, [0, 1, 2])])
def test_layers_that_are_no_loop_wait_for_one_another(ahead, waits):
    """A layer is computed again when the gradients of those behind it are in their sums, of which it reads nothing.

    Not where those of whole layers are summed a layer late.
    """
    stage = Stage(
        lambda *given: layer_output(jnp.tanh(given[1] @ given[0])), "inputs", written_out=3, ahead=ahead
    )
    layers, inputs = Layers(jnp.zeros((3, *KERNEL)), jnp.arange(3), jnp.ones(3, bool)), StageInputs({}, None)
    target = Target(jnp.zeros((1, 3, *KERNEL)), jnp.int32(0), jnp.bool_(True))
    kept = stage.empty(layers, jnp.zeros(HIDDEN), inputs, 1)

    def backward(kept, hidden):
        return stage.backward(layers, Slot(kept, jnp.int32(0)), hidden, {}, inputs, target)

    body = jax.make_jaxpr(backward)(kept, jnp.zeros(HIDDEN)).jaxpr
    again = [eqn for eqn in body.eqns if eqn.primitive.name == "tanh"]
    assert [written_before(body, eqn) for eqn in again] == waits


def written_before(body, eqn) -> int:
    """How many arrays are written into that an operation waits for."""
    maker = {id(var): one for one in body.eqns for var in one.outvars}
    wanted, seen = [eqn], {}
    while wanted:
        makers = [maker[id(var)] for var in wanted.pop().invars if id(var) in maker]
        wanted += [one for one in makers if id(one) not in seen]
        seen |= {id(one): one for one in makers}
    return sum(one.primitive.name == "dynamic_update_slice" for one in seen.values())


HIDDEN, KERNEL = (3, 5, 8), (8, 8)


@pytest.mark.parametrize(
    "product",
    [
        lambda hidden, kernel: hidden @ kernel,
        lambda hidden, kernel: hidden @ kernel.T,
        lambda hidden, kernel: (hidden.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(
            hidden.dtype
        ),
        lambda hidden, kernel: jnp.einsum("btd,dhk->bthk", hidden, kernel.reshape(8, 2, 4)).reshape(
            hidden.shape
        ),
        lambda hidden, kernel: hidden @ (kernel / jnp.linalg.norm(kernel, axis=0)),
    ],
    ids=["plain", "transposed", "cast", "reshaped", "normalised"],
)
def test_no_parameter_is_kept_in_any_disguise(product):
    """A copy of a weight in a slot would be there once for each microbatch in flight."""
    params, hidden = jax.ShapeDtypeStruct((2, *KERNEL), np.float64), jax.ShapeDtypeStruct(HIDDEN, np.float64)
    assert kept_of(lambda p, h, *_: product(h, p), params, hidden) == [HIDDEN]


def test_a_flax_layer_in_bfloat16_keeps_activations_alone():
    module = nnx.Linear(8, 8, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    params = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), nnx.to_pure_dict(state))
    kept = kept_of(lambda p, h, *_: nnx.merge(graph, p)(h).astype(h.dtype), params, jnp.zeros(HIDDEN))
    assert kept == [HIDDEN]


def test_what_a_layer_of_the_toy_keeps():
    """Its matmul's input, its tanh and what it squares; of dropout the mask, which would cost random bits again."""
    params, hidden = toy.params(layers=2)["layers"], jnp.zeros((3, toy.SEQ, toy.WIDTH))
    rng = jax.random.split(jax.random.key(0), 3)
    assert set(kept_of(toy.layer, params, hidden, rng=rng)) <= {hidden.shape, ()}
    for keep in ("inputs", "input"):
        assert kept_of(toy.layer, params, hidden, rng=rng, keep=keep) == [hidden.shape]


def test_masks_made_of_the_microbatch_are_made_again():
    def layer(kernel, hidden, microbatch, rng):
        same = microbatch["segments"][:, :, None] == microbatch["segments"][:, None]
        scores = jnp.where(same, hidden @ hidden.swapaxes(1, 2), -1.0)
        return hidden + scores @ (hidden @ kernel)

    kept = kept_of(
        layer, jnp.zeros((2, *KERNEL)), jnp.zeros(HIDDEN), {"segments": jnp.zeros((3, 5), jnp.int32)}
    )
    assert (3, 5, 5) in kept and kept.count((3, 5, 5)) == 1  # the scores, not the mask


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_buffers_on_the_host_are_not_made_of_zeros_on_the_device(platform):
    shapes = {"hidden": jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)}
    make = jax.jit(lambda: empty_slots(shapes, 3, on_host=True))
    program = make.trace().lower(lowering_platforms=(platform,)).as_text()
    assert "AllocateBuffer" in program and "broadcast" not in program


@pytest.mark.parametrize(
    "platform, experts, number", [("tpu", 2, 0), ("tpu", 1, 4), ("gpu", 2, 4), ("cpu", 2, 4)]
)
def test_backwards_of_layers_that_exchange_rows_of_experts_are_a_loop_on_tpus(platform, experts, number):
    """Written out, all layers have the memory of their rows at once."""
    device = AbstractDevice(device_kind="any", platform=platform, num_cores=None)
    mesh = AbstractMesh((2, experts), ("pipe", "expert"), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert layers_written_out() == number


def test_a_pipeline_makes_its_stages_with_that_number(monkeypatch):
    made = []
    monkeypatch.setattr(strategies, "layers_written_out", lambda: 0)
    monkeypatch.setattr(Stage, "_is_written_out", lambda self, layers: bool(made.append(self._written_out)))
    compiled("1f1b", 4)
    assert set(made) == {0}
