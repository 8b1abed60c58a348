"""KL estimators, their gradients and the adaptive controller equal the reference's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.kl import KL_ESTIMATORS, AdaptiveKL, kl_in_reward, kl_penalty

SAME = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+"}


def _cases(golden, kind):
    return [c for c in golden("rl_policy_losses.json")["cases"] if c["inputs"].get("kind") == kind]


def test_estimators_and_their_gradients(golden):
    for case in _cases(golden, "kl"):
        given, expected = case["inputs"], case["expected"]
        name = SAME.get(given["estimator"], given["estimator"])
        log_probs, ref, mask = (jnp.array(given[k]) for k in ("log_prob", "ref_log_prob", "mask"))
        np.testing.assert_allclose(kl_penalty(log_probs, ref, name), expected["per_token"], atol=1e-12)
        grad = jax.grad(lambda x: jnp.sum(mask * kl_penalty(x, ref, name)))(log_probs)  # noqa: B023
        np.testing.assert_allclose(grad, expected["grad_of_masked_sum"], atol=1e-12, err_msg=case["name"])
        # sum over rows with tokens of mean over tokens: what the reward's controller is told
        if not name.endswith("+"):
            rewards, mean = kl_in_reward(
                np.zeros(mask.shape), *map(np.array, (log_probs, ref, mask)), 0.5, name
            )
            np.testing.assert_allclose(-2 * rewards, mask * np.array(expected["per_token"]), atol=1e-12)
            kl, tokens = -2 * rewards.sum(1), np.array(mask).sum(1)
            np.testing.assert_allclose(mean, (kl[tokens > 0] / tokens[tokens > 0]).mean(), rtol=1e-12)


def test_a_policy_that_equals_its_reference_is_moved_by_no_estimator_but_k1():
    """As at the first update of a run; JAX's gradient of |0| is 1, PyTorch's 0."""
    log_probs = jnp.array([-1.0, -0.5])
    for name in KL_ESTIMATORS:
        value, grad = jax.value_and_grad(lambda x, name=name: kl_penalty(x, log_probs, name).sum())(log_probs)
        assert value == 0
        np.testing.assert_array_equal(grad, 1 if name == "k1" else 0, err_msg=name)


def test_adaptive_controller(golden):
    for case in _cases(golden, "adaptive_kl"):
        given = case["inputs"]
        controller = AdaptiveKL(given["init_coef"], given["target"], given["horizon"])
        values = []
        for update in given["updates"]:
            controller = controller.updated(*update)
            values.append(controller.coefficient)
        np.testing.assert_allclose(values, case["expected"]["values"][-len(values) :], rtol=1e-12)


def test_the_coefficient_stays_positive():
    assert AdaptiveKL(0.1, 6.0, 26).updated(0.0, 128).coefficient > 0
    with pytest.raises(
        ValueError, match=r"\[kl\] horizon=25.6 must be above a fifth of the 128 rows .*horizon=26"
    ):
        AdaptiveKL(0.1, 6.0, 25.6).updated(9.0, 128)


def test_what_has_no_meaning_is_refused():
    with pytest.raises(ValueError, match="one of k1, k2, k3, abs"):
        kl_penalty(jnp.zeros(1), jnp.zeros(1), "k4")
    with pytest.raises(ValueError, match="use 'k3'"):
        kl_in_reward(*[np.zeros((1, 1))] * 4, 0.1, "k3+")
