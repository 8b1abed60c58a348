"""Aggregations: the reference's numbers, the same however the rows are split, masked slots inert, packing invisible."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxfb.losses.aggregation import AGGREGATIONS, aggregate
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.sequences import Sequences, ranks
from jaxfb.mesh import make_mesh
from jaxfb.types import Sum


def _sum(loss, mask, given, segments=None):
    return aggregate(
        jnp.array(loss), Sequences(jnp.array(mask), segments), given["mode"], scale=given["loss_scale_factor"]
    )


def _cases(golden, prefix=""):
    for case in golden("rl_aggregation.json")["cases"]:
        if "global_rows_with_tokens" in case["expected"] and case["name"].startswith(prefix):
            given = case["inputs"]
            yield case, given, np.array(given["loss"]), np.array(given["mask"])


def _added(parts):
    return sum(parts[1:], parts[0])


def test_values_and_gradients_are_the_references(golden):
    for case, given, loss, mask in _cases(golden):
        poisoned = np.where(mask == 0, np.nan, loss)
        value, grad = jax.value_and_grad(lambda x: _sum(x, mask, given).value)(jnp.array(poisoned))  # noqa: B023
        # the reference adds 1e-8 to the number of tokens of a row
        close = {"rtol": 2e-8, "atol": 2e-8, "err_msg": case["name"]}
        np.testing.assert_allclose(value, case["expected"]["global_rows_with_tokens"], **close)
        np.testing.assert_allclose(grad, case["expected"]["local_denominators_grad"], **close)


def test_any_split_of_the_rows_gives_the_same_value(golden):
    for case, given, loss, mask in _cases(golden):
        whole = _sum(loss, mask, given)
        for split in case["expected"]["split"]:
            bounds = split["row_bounds"]
            parts = [_sum(loss[a:b], mask[a:b], given) for a, b in zip(bounds, bounds[1:], strict=False)]
            np.testing.assert_allclose(_added(parts).value, whole.value, rtol=1e-12, err_msg=case["name"])


def test_a_batch_that_counts_nothing_is_zero():
    for mode in AGGREGATIONS:
        given = {"mode": mode, "loss_scale_factor": 4 if mode.endswith("norm") else None}
        assert _sum(np.full((2, 3), np.nan), np.zeros((2, 3)), given).value == 0


def test_packed_sequences_weigh_what_rows_of_their_own_do(golden):
    """Two sequences a row, and a last row of one, equal the rows unpacked."""
    for case, given, loss, mask in _cases(golden, "ragged"):
        width = loss.shape[1]
        packed = lambda x: np.concatenate([x[:2], x[2:]], axis=1)  # noqa: E731
        segments = np.broadcast_to(np.repeat([1, 2], width), (2, 2 * width))
        segments = jnp.array(np.where(packed(mask) > 0, segments, 0))
        apart, together = _sum(loss, mask, given), _sum(packed(loss), packed(mask), given, segments)
        np.testing.assert_allclose(together.value, apart.value, rtol=1e-12, err_msg=case["name"])
        assert together.weight == apart.weight


@pytest.mark.parametrize("numbers", [(9, 10), (7_000, 3), (1, 4)])
def test_a_sequence_may_have_any_number_in_its_row(numbers):
    """A document's number, say; the loss and its gradient stay as they are."""
    mask = jnp.array([[0.0, 1, 1, 1, 1, 1]])
    leaves = {"loss_mask": mask, "advantages": jnp.arange(6.0)[None], "old_log_probs": jnp.full((1, 6), -1.0)}
    loss = PolicyLoss(aggregation="seq-mean-token-mean")

    def answer(segments):
        value = lambda x: loss(x, x, leaves | {"segments": jnp.array([segments])}).terms["policy"].value  # noqa: E731
        return jax.value_and_grad(value)(jnp.linspace(-1.1, -0.9, 6)[None])

    one, other = numbers
    in_order, numbered = answer([1, 1, 2, 2, 2, 0]), answer([one, one, other, other, other, 0])
    if one > other:  # places change, and with them the order of the sum
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), numbered, in_order)
    else:
        jax.tree.map(np.testing.assert_array_equal, numbered, in_order)
    assert np.abs(in_order[1][0, 1:5]).min() > 0


def test_ranks_are_those_of_the_whole_row_also_where_a_context_axis_cuts_it():
    segments = np.array([[3, 3, 900, 0, 7, 7, 3, -1], [1, 1, 2, 2, 3, 3, 0, 0], [5, 6, 7, 8, 9, 10, 11, 12]])
    expected = [[1, 1, 3, 0, 2, 2, 1, 0], [1, 1, 2, 2, 3, 3, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8]]
    np.testing.assert_array_equal(ranks(jnp.array(segments)), expected)
    mesh = make_mesh(context=2, devices=jax.devices()[:2])
    cut = P(None, "context")
    on_two = jax.jit(jax.shard_map(ranks, mesh=mesh, in_specs=cut, out_specs=cut))
    np.testing.assert_array_equal(on_two(jnp.array(segments)), expected)


def test_sums_of_sequences_are_divided_by_the_scale():
    found = aggregate(jnp.ones((2, 3)), Sequences(jnp.ones((2, 3))), "seq-mean-token-sum-norm", scale=4)
    assert (found.total, found.weight) == (6 / 4, 2)


def test_what_cannot_be_aggregated_is_refused():
    sequences = Sequences(jnp.ones((1, 2)))
    with pytest.raises(ValueError, match="must be one of token-mean"):
        aggregate(jnp.ones((1, 2)), sequences, "mean")
    with pytest.raises(ValueError, match="needs a positive constant scale"):
        aggregate(jnp.ones((1, 2)), sequences, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="'token-mean' takes none"):
        aggregate(jnp.ones((1, 2)), sequences, "token-mean", scale=4)


def test_a_sum_without_a_weight_adds_up_undivided():
    assert (Sum(2.0, None) + Sum(3.0, None)).value == 5
