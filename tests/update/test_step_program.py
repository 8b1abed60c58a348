"""What an update costs beside its arithmetic, read off its program: casts, copies, what is kept for the backward."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxfb
from jaxfb.hlo import parse
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.update.attempt import count_bad

ROWS, LENGTH = 6, 10
SIZES = TransformerConfig(
    vocab_size=40, num_layers=3, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=24, loss_chunk=8
)


def traced(remat="selective"):
    """(step, its abstract state and batch) in bfloat16, two rows a microbatch."""
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=2)
    options = {"dropout": False, "compute_dtype": "bfloat16", "remat": remat}
    step = jaxfb.make_train_step(transformer(SIZES), optax.adamw(1e-3), None, plan, **options)
    state = step.abstract_state(lambda key: init_params(SIZES, key))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    mask = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.float32)
    return step, state, {"tokens": tokens, "targets": tokens, "loss_mask": mask}


def equations(jaxpr, loops=()):
    """Every equation of a program, and the lengths of the loops around it."""
    for eqn in jaxpr.eqns:
        yield eqn, loops
        inside = (*loops, eqn.params["length"]) if eqn.primitive.name == "scan" else loops
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner, inside)


@pytest.fixture(scope="module")
def program():
    step, state, batch = traced()
    return list(equations(step.trace(state, batch).jaxpr.jaxpr)), state


def test_parameters_are_cast_once_an_update_and_not_once_a_microbatch(program):
    eqns, state = program
    leaves = [leaf.shape for leaf in jax.tree.leaves(state.params)]
    layers = [leaf.shape for leaf in jax.tree.leaves(state.params["layers"])]
    matrices = {shape for shape in leaves if shape not in layers and len(shape) == 2}
    matrices |= {shape[cut:] for shape in layers if len(shape) == 3 for cut in (0, 1)}
    down = [
        (eqn.invars[0].aval.shape, loops)
        for eqn, loops in eqns
        if eqn.primitive.name == "convert_element_type"
        and eqn.invars[0].aval.dtype == jnp.float32
        and eqn.outvars[0].aval.dtype == jnp.bfloat16
    ]
    once = [shape for shape, loops in down if not loops]
    assert sorted(once) == sorted(leaves)
    in_loops = {shape for shape, loops in down if loops}
    # the head's gradient is summed up in float32 and handed on in bfloat16; no other array of a kernel's shape is cast
    assert in_loops & matrices == {(SIZES.hidden_size, SIZES.vocab_size)}


def test_products_are_of_bfloat16_and_sums_of_gradients_float32(program):
    eqns, state = program
    products = [eqn for eqn, loops in eqns if eqn.primitive.name == "dot_general" and loops]
    of_weights = [eqn for eqn in products if not any(eqn.params["dimension_numbers"][1])]
    assert len(of_weights) > 20
    assert {str(var.aval.dtype) for eqn in of_weights for var in eqn.invars} == {"bfloat16"}
    shapes = {leaf.shape for leaf in jax.tree.leaves(state.params)}
    loops = [eqn for eqn, loops in eqns if eqn.primitive.name == "scan" and not loops]
    sums = [var.aval for loop in loops for var in loop.outvars if var.aval.shape in shapes]
    assert len(sums) >= len(jax.tree.leaves(state.params)) and all(aval.dtype == jnp.float32 for aval in sums)


def test_the_backward_of_a_layer_keeps_products_in_bfloat16_and_nothing_else(program):
    """Recomputing selectively: a layer's input and the products of its kernels but the last; no float32."""
    eqns, state = program
    layers = SIZES.num_layers
    forward = next(
        eqn for eqn, loops in eqns
        if eqn.primitive.name == "scan" and len(loops) == 1 and eqn.params["length"] == layers
    )  # fmt: skip
    kept = [
        var.aval for var in forward.outvars if var.aval.shape[:2] == (1, layers)
    ]  # one slot of all layers
    big = [aval for aval in kept if aval.ndim > 2]
    assert {str(aval.dtype) for aval in big} == {"bfloat16"}
    tokens = 2 * LENGTH
    widths = sorted(int(np.prod(aval.shape)) // (layers * tokens) for aval in big)
    hidden, kv, mlp = SIZES.hidden_size, SIZES.num_kv_heads * SIZES.head_size, SIZES.mlp_size
    assert widths == sorted([hidden, hidden, kv, kv, hidden, mlp, mlp])


def test_parameters_that_are_not_finite_are_counted_without_an_array_of_zeros():
    """XLA for GPUs would share such an array with the sums of gradients and keep it through all microbatches."""
    leaf = jax.ShapeDtypeStruct((4, 6), jnp.float32)
    eqns = [eqn for eqn, _ in equations(jax.make_jaxpr(count_bad)(leaf, leaf, leaf).jaxpr)]
    assert [eqn.outvars[0].aval.dtype for eqn in eqns if eqn.primitive.name == "reduce_sum"] == [jnp.float32]
    assert not [eqn for eqn in eqns if eqn.primitive.name == "broadcast_in_dim"]


@pytest.mark.slow
def test_the_state_is_updated_where_it_is():
    step, state, batch = traced()
    compiled = step.lower(state, batch).compile()
    computations, entry = parse(compiled.as_text())
    given = {one.name for one in computations[entry] if one.opcode == "parameter" and "," in one.result}
    copied = [
        one for one in computations[entry] if one.opcode == "copy" and one.rest[1:].split(")")[0] in given
    ]
    # XLA for CPU heeds a barrier since jax 0.11; before, it copies parameters, but no moments
    assert len(copied) <= (0 if jax.__version_info__ >= (0, 11) else len(jax.tree.leaves(state.params)))
    memory = compiled.memory_analysis()
    numbers = [leaf for leaf in jax.tree.leaves(state) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in numbers)
    assert size <= memory.alias_size_in_bytes <= size + 64  # and the key
