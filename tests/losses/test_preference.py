"""Preference losses, value loss and importance weights against formulas written out and the reference's numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.losses.importance import rollout_weights
from jaxfb.losses.preference import PreferenceLoss
from jaxfb.losses.value import ValueLoss


def _pairs():
    """Row 0 holds two pairs, row 1 one pair and an odd sequence without its other, row 2 nothing that counts."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 2, 2, 2, 3, 4, 0], [1, 2, 2, 2, 3, 3, 3, 0], [1, 1, 1, 2, 2, 2, 0, 0]])
    mask = (segments > 0) * 1.0
    mask[0, 2], mask[2] = 0, 0
    log_probs, ref = rng.normal(-2, 1, (2, *mask.shape))
    return segments, mask, log_probs, ref


def _by_hand(log_probs, ref, segments, mask, mean=False):
    """(chosen, rejected) of each of the three pairs."""
    sums = []
    for row, k in ((0, 0), (0, 1), (1, 0)):
        pair = []
        for segment in (2 * k + 1, 2 * k + 2):
            picked = (segments[row] == segment) & (mask[row] > 0)
            total = (log_probs - ref)[row][picked].sum()
            pair.append(total / picked.sum() if mean else total)
        sums.append(pair)
    return np.array(sums).T


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


FORMULAS = {
    "dpo": (PreferenceLoss(beta=0.5), lambda c, r: -np.log(_sigmoid(0.5 * (c - r)))),
    "cdpo": (
        PreferenceLoss(beta=0.5, label_smoothing=0.1),
        lambda c, r: -0.9 * np.log(_sigmoid(0.5 * (c - r))) - 0.1 * np.log(_sigmoid(0.5 * (r - c))),
    ),
    "robust": (
        PreferenceLoss("robust", beta=0.5, label_smoothing=0.1),
        lambda c, r: (-0.9 * np.log(_sigmoid(0.5 * (c - r))) + 0.1 * np.log(_sigmoid(0.5 * (r - c)))) / 0.8,
    ),
    "ipo": (PreferenceLoss("ipo", beta=0.5), lambda c, r: (c - r - 1) ** 2),
    "hinge": (PreferenceLoss("hinge", beta=0.5), lambda c, r: np.maximum(0, 1 - 0.5 * (c - r))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_preference_losses_are_their_formulas(name):
    segments, mask, log_probs, ref = _pairs()
    loss, formula = FORMULAS[name]
    dirty = np.where(mask > 0, ref, np.nan)
    out = loss(log_probs, None, {"loss_mask": mask, "segments": segments, "ref_log_probs": dirty})
    chosen, rejected = _by_hand(log_probs, ref, segments, mask)
    np.testing.assert_allclose(out.terms["preference"].value, formula(chosen, rejected).mean(), rtol=1e-12)
    assert out.terms["preference"].weight == 3
    np.testing.assert_allclose(out.metrics["accuracy"].value, (chosen > rejected).mean(), rtol=1e-12)
    np.testing.assert_allclose(out.metrics["reward_chosen"].value, 0.5 * chosen.mean(), rtol=1e-12)


def test_pairs_may_have_any_numbers_in_their_row():
    segments, mask, log_probs, ref = _pairs()
    leaves = {"loss_mask": mask, "ref_log_probs": ref}

    def answer(segments):
        loss = lambda x: PreferenceLoss()(x, None, leaves | {"segments": segments}).terms["preference"].value  # noqa: E731
        return jax.value_and_grad(loss)(jnp.array(log_probs))

    in_order, numbered = answer(segments), answer(np.where(segments > 0, segments + 8, 0))
    jax.tree.map(np.testing.assert_array_equal, numbered, in_order)
    for missing in (1, 2):  # 9 or 10 is alone, 11 and 12 are a pair
        (alone, grad), first = (
            answer(np.where(segments == missing, 0, segments + 8 * (segments > 0))),
            in_order[1],
        )
        assert alone > 0 and np.abs(grad[0, 5:7]).min() > 0 and np.abs(first[0, 0]) > 0
        np.testing.assert_array_equal(grad[0, :5], 0)


def test_simpo_and_the_likelihood_of_the_chosen():
    segments, mask, log_probs, _ = _pairs()
    loss = PreferenceLoss(beta=2.0, reference_free=True, length_normalized=True, margin=0.5, sft_coef=0.1)
    out = loss(log_probs, None, {"loss_mask": mask, "segments": segments})
    chosen, rejected = _by_hand(log_probs, 0 * log_probs, segments, mask, mean=True)
    expected = -np.log(_sigmoid(2 * (chosen - rejected) - 0.5)).mean()
    np.testing.assert_allclose(out.terms["preference"].value, expected, rtol=1e-12)
    of_chosen = (mask > 0) & (segments % 2 == 1)
    np.testing.assert_allclose(out.terms["chosen_nll"].value, -0.1 * log_probs[of_chosen].mean(), rtol=1e-12)


def test_preference_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="must be one of sigmoid, ipo"):
        PreferenceLoss("dpo")
    with pytest.raises(ValueError, match=r"must be in \[0, 0.5\)"):
        PreferenceLoss(label_smoothing=0.5)
    with pytest.raises(
        ValueError, match=r"kind 'json:loads' must take \(h, settings\), but loads takes \(s, "
    ):
        PreferenceLoss("json:loads")
    with pytest.raises(ValueError, match=r"kind 'math:pi' must be a function \(h, settings\), got 3.14"):
        PreferenceLoss("math:pi")
    with pytest.raises(ValueError, match="reads the leaf 'segments'"):
        PreferenceLoss()(jnp.zeros((1, 2)), None, {"loss_mask": jnp.ones((1, 2))})


def test_value_loss_is_the_references(golden):
    cases = [c for c in golden("rl_policy_losses.json")["cases"] if c["inputs"].get("kind") == "value_loss"]
    for case in cases:
        given, expected = case["inputs"], case["expected"]
        mask = np.array(given["mask"])
        leaves = {"returns": given["returns"], "old_values": given["old_values"]}
        microbatch = {name: np.where(mask > 0, leaf, np.nan) for name, leaf in leaves.items()} | {
            "loss_mask": mask
        }
        loss = ValueLoss(given["clip_range"], aggregation=given["mode"])

        def value(values, loss=loss, microbatch=microbatch):
            out = loss(values, microbatch)
            return out.terms["value"].value, out.metrics["value_clip_fraction"].value

        (ours, clipped), grad = jax.value_and_grad(value, has_aux=True)(jnp.array(given["vpreds"]))
        close = {"rtol": 3e-8, "atol": 1e-12, "err_msg": case["name"]}
        np.testing.assert_allclose(ours, expected["loss"], **close)
        np.testing.assert_allclose(grad, expected["grad_vpreds"], **close)
        np.testing.assert_allclose(clipped, expected["clipfrac"], **close)


def test_importance_weights_by_token_by_sequence_truncated_and_rejected():
    mask = np.array([[1.0, 1, 0], [1, 1, 1], [0, 0, 0]])
    ratio = np.array([[2.0, 0.25, np.nan], [4, 1, 1], [np.nan] * 3])
    sampler = np.where(mask > 0, -1.0, np.nan)
    weigh = lambda **how: rollout_weights(np.log(ratio) + sampler, sampler, mask, **how)  # noqa: E731
    by_token, said = weigh(upper=3.0)
    np.testing.assert_allclose(by_token, [[2, 0.25, 0], [3, 1, 1], [0, 0, 0]])
    assert said["weight_max"] == pytest.approx(4) and said["outside_fraction"] == pytest.approx(0.2)
    np.testing.assert_allclose(weigh(upper=3.0, lower=0.5)[0], [[2, 0.5, 0], [3, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(weigh(upper=3.0, lower=0.5, reject=True)[0], [[2, 0, 0], [0, 1, 1], [0, 0, 0]])
    np.testing.assert_allclose(weigh(upper=9.0, level="sequence")[0], [[0.5, 0.5, 0], [4, 4, 4], [0, 0, 0]])
    root = np.array([[np.sqrt(0.5)] * 2 + [0], [4 ** (1 / 3)] * 3, [0, 0, 0]])
    np.testing.assert_allclose(weigh(upper=9.0, level="geometric")[0], root)
    single = rollout_weights(
        np.log([[2.0, 9.0]]), np.zeros((1, 2)), np.array([[1.0, 0]]), level="geometric", upper=3.0
    )
    np.testing.assert_allclose(single[0], [[2, 0]])
    with pytest.raises(ValueError, match="upper=1.0 must be above 1"):
        weigh(upper=1.0)
