"""Layers that compute complex numbers, such as Fourier transforms and state spaces: the gradients of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close
from jax import lax

import jaxfb
from jaxfb import Pipelined, Sum

ROWS, LENGTH, WIDTH, LAYERS = 4, 4, 4, 2
RNG = np.random.default_rng(0)
PARAMS = {
    "into": RNG.normal(size=(WIDTH, WIDTH)),
    "layers": {
        "mix": RNG.normal(size=(LAYERS, WIDTH, WIDTH)),
        "angle": RNG.normal(size=(LAYERS, WIDTH)),
    },
}
BATCH = {"x": RNG.normal(size=(ROWS, LENGTH, WIDTH))}


def layer(weights, hidden, microbatch, rng):
    """A filter of frequencies, a complex product with a weight, and a recurrence with a complex state."""
    turn = jnp.exp(1j * weights["angle"])
    filtered = jnp.fft.ifft(jnp.fft.fft(hidden, axis=1) * turn, axis=1)
    mixed = (filtered @ (weights["mix"] * (1 + 0.5j))).real

    def step(state, x):
        state = 0.9 * turn * state + x
        return state, state.real

    _, out = lax.scan(step, jnp.zeros((hidden.shape[0], WIDTH), complex), jnp.swapaxes(mixed, 0, 1))
    return jnp.tanh(jnp.swapaxes(out, 0, 1))


MODEL = Pipelined(
    lambda outer, microbatch, rng: microbatch["x"] @ outer["into"],
    layer,
    lambda outer, hidden, microbatch, rng: Sum(jnp.square(hidden).sum(), hidden.shape[0]),
)


def whole(params):
    hidden = BATCH["x"] @ params["into"]
    for index in range(LAYERS):
        weights = jax.tree.map(lambda leaf: leaf[index], params["layers"])  # noqa: B023
        hidden = layer(weights, hidden, BATCH, None)
    return jnp.square(hidden).sum() / ROWS


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 2}, {}),
        ({"fsdp": 2}, {"remat": "selective"}),
        ({"pipe": 2}, {"schedule": "zero_bubble"}),
        pytest.param({"pipe": 2, "fsdp": 2}, {"remat": "selective"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(sizes, options):
    mesh = jaxfb.make_mesh(**sizes)
    plan = jaxfb.BatchPlan(rows=ROWS, num_microbatches=2, data_parallel=jaxfb.mesh.data_parallel(mesh))
    out = jaxfb.get_forward_backward_func(mesh, **options)(MODEL, PARAMS, BATCH, plan)
    wanted = jax.jit(jax.value_and_grad(whole))(jax.tree.map(jnp.asarray, PARAMS))
    close((out.loss, out.grads), wanted)
