"""A simulated device with nothing to do computes nothing, unless the others would wait for it inside a stage."""

import jax
import numpy as np
import pytest
import toy
from jax import lax

import jaxfb

ROWS, COUNT = 8, 4


def run(layer, *, forward_only=False, data=1, **options):
    """(output, how often `layer` ran) of four microbatches through four stages of one layer each."""
    times = []

    def counted(weights, hidden, microbatch, rng):
        jax.debug.callback(lambda: times.append(1))
        return layer(weights, hidden, microbatch, rng)

    model = jaxfb.Pipelined(toy.embed, counted, toy.head)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(pipe=4, data=data), **options)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=data, num_microbatches=COUNT)
    out = fb(model, toy.params(), toy.batch(rows=ROWS), plan, forward_only=forward_only)
    jax.block_until_ready(out)
    jax.effects_barrier()
    return out, len(times)


@pytest.mark.parametrize(
    "schedule, forward_only, passes",  # a callback runs in the backward as well, if that is not split
    [("1f1b", False, 2), ("1f1b", True, 1), ("zero_bubble", False, 1), ("gpipe", False, 2)],
)
def test_a_layer_runs_for_each_microbatch_and_in_no_bubble(schedule, forward_only, passes):
    out, times = run(toy.layer, schedule=schedule, forward_only=forward_only)
    assert times == toy.LAYERS * COUNT * passes
    poisoned, more = run(toy.layer, schedule=schedule, forward_only=forward_only, poison_bubbles=True)
    assert more > times
    jax.tree.map(np.testing.assert_array_equal, (out.loss, out.grads), (poisoned.loss, poisoned.grads))


def test_a_layer_whose_devices_swap_what_they_hold_runs_in_bubbles_too():
    def there_and_back(weights, hidden, microbatch, rng):
        swapped = lax.ppermute(hidden, "data", [(0, 1), (1, 0)])
        return toy.layer(weights, lax.ppermute(swapped, "data", [(0, 1), (1, 0)]), microbatch, rng)

    out, times = run(there_and_back, data=2)
    plain, fewer = run(toy.layer, data=2)
    assert times > fewer
    np.testing.assert_allclose(out.loss, plain.loss, rtol=0, atol=1e-12)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), out.grads, plain.grads)
