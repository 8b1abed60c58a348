"""Advantages equal the reference implementation's numbers, and masked slots are inert."""

from functools import partial

import numpy as np
import pytest

from jaxfb.losses import advantages as adv
from jaxfb.parts import ESTIMATORS

CLOSE = 5e-9  # the reference adds 1e-8 to the number of tokens


def _case(golden, name):
    case = next(c for c in golden("rl_advantages.json")["cases"] if c["name"] == name)
    arrays = {k: np.array(v) if isinstance(v, list) else v for k, v in case["inputs"].items()}
    return arrays, {k: np.array(v) for k, v in case["expected"].items() if k != "error"}


def _poisoned(x, mask):
    return np.where(mask == 0, np.nan, x)


@pytest.mark.parametrize(
    "name",
    [
        "gamma0.99_lam0.95",
        "gamma1.0_lam1.0",
        "gamma1.0_lam0.95",
        "gamma0.99_lam0.95_holes",
        "gamma1.0_lam0.9_holes",
    ],
)
def test_gae(golden, name):
    given, expected = _case(golden, f"gae_{name}")
    mask = given["mask"]
    rewards, values = (_poisoned(given[key], mask) for key in ("rewards", "values"))
    for whitened, key in ((False, "advantages_raw"), (True, "advantages_whitened")):
        ours = adv.gae(rewards, values, mask, gamma=given["gamma"], lam=given["lam"], whitened=whitened)
        np.testing.assert_allclose(ours.advantages, np.where(mask, expected[key], 0), rtol=0, atol=CLOSE)
        np.testing.assert_allclose(ours.returns, np.where(mask, expected["returns"], 0), rtol=0, atol=CLOSE)


OUTCOME = [name for name, found in ESTIMATORS.items() if found.reads == ("rewards", "groups", "mask")]


@pytest.mark.parametrize("name", OUTCOME)
def test_outcome_estimators(golden, name):
    given, expected = _case(golden, name)
    ours = getattr(adv, name)(given["rewards"].sum(1), given["group"], given["mask"])
    np.testing.assert_allclose(ours, expected["advantages"], rtol=0, atol=CLOSE)


def test_a_pair_is_a_group_and_one_row_is_none():
    """Two answers to a prompt are compared by every outcome estimator; a single one keeps its reward."""
    rewards, groups = np.array([1.0, 4.0, 5.0]), np.array([0, 0, 1])
    mask = np.array([[1, 1], [1, 0], [1, 1]])  # the longer answer weighs twice in OPO's mean of 2
    for function, pair in (
        (adv.dr_grpo, (-1.5, 1.5)),
        (adv.rloo, (-3, 3)),
        (adv.opo, (-1, 2)),
        (partial(adv.grpo, eps=0), np.array([-1, 1]) / np.sqrt(2)),
    ):
        found = function(rewards, groups, mask)
        np.testing.assert_allclose(found[:, 0], [*pair, 5.0], rtol=1e-12)


def test_groups_may_be_any_labels_in_any_order(golden):
    given, _ = _case(golden, "grpo")
    rewards, order = given["rewards"].sum(1), np.random.default_rng(0).permutation(len(given["mask"]))
    labels = np.array(["b", "z", "a"])[given["group"]]
    shuffled = adv.grpo(rewards[order], labels[order], given["mask"][order])
    expected = adv.grpo(rewards, given["group"], given["mask"])[order]
    np.testing.assert_allclose(shuffled, expected, rtol=0, atol=1e-14)


def test_remax(golden):
    given, expected = _case(golden, "remax")
    ours = adv.remax(given["rewards"], given["baselines"], given["mask"])
    np.testing.assert_allclose(
        ours.advantages, np.where(given["mask"], expected["advantages"], 0), atol=1e-12
    )
    np.testing.assert_allclose(ours.returns, np.where(given["mask"], expected["returns"], 0), atol=1e-12)


@pytest.mark.parametrize("name", ["gamma1.0", "gamma0.9", "gamma1.0_holes", "gamma0.9_holes"])
def test_reinforce_plus_plus(golden, name):
    given, expected = _case(golden, f"reinforce_plus_plus_{name}")
    mask = given["mask"]
    ours = adv.reinforce_plus_plus(_poisoned(given["rewards"], mask), mask, gamma=given["gamma"])
    np.testing.assert_allclose(ours.advantages, expected["advantages"], rtol=0, atol=CLOSE)
    np.testing.assert_allclose(ours.returns, np.where(mask, expected["returns"], 0), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("name", ["shiftTrue", "shiftFalse", "shiftTrue_holes", "shiftFalse_holes"])
def test_whitening(golden, name):
    given, expected = _case(golden, f"masked_whiten_{name}")
    mask = given["mask"]
    ours = adv.whiten(_poisoned(given["values"], mask), mask, shift_mean=given["shift_mean"])
    np.testing.assert_allclose(ours, np.where(mask, expected["whitened"], 0), rtol=0, atol=CLOSE)


@pytest.mark.parametrize("mask, count", [([[0.0, 0.0]], 0), ([[1.0, 0.0]], 1)])
def test_whitening_needs_two_tokens(mask, count):
    with pytest.raises(ValueError, match=f"needs 2 counted tokens, got {count}"):
        adv.whiten(np.array([[1.0, 2.0]]), np.array(mask))


def test_rewards_per_token_are_refused_where_one_a_row_is_meant():
    with pytest.raises(ValueError, match="one reward and one group a row"):
        adv.grpo(np.ones((2, 3)), np.zeros(2), np.ones((2, 3)))


MASK, ROW = np.ones((4, 3)), np.ones(4)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: adv.gae(MASK, MASK[:, :1], MASK), r"values must have the mask's shape \(4, 3\), got \(4, 1\)"),
        (lambda: adv.gae(ROW, ROW, ROW), r"mask must be \[rows, tokens\], got the shape \(4,\)"),
        (lambda: adv.gae(ROW, MASK, MASK), r"rewards must have the mask's shape"),
        (lambda: adv.whiten(ROW, MASK), r"values must have the mask's shape \(4, 3\), got \(4,\)"),
        (lambda: adv.grpo(ROW, ROW, ROW), r"mask must be \[rows, tokens\]"),
        (lambda: adv.opo(ROW, ROW, ROW), r"mask must be \[rows, tokens\]"),
        (lambda: adv.rloo(ROW, ROW, MASK[:3]), r"one number a row is needed, got the shape \(4,\) for a mask \(3, 3\)"),
        (lambda: adv.remax(MASK, MASK, MASK), r"one number a row is needed, got the shape \(4, 3\)"),
        (lambda: adv.reinforce_plus_plus(ROW, MASK), r"rewards must have the mask's shape"),
    ],
)  # fmt: skip
def test_other_shapes_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


LARGE = 1e9 + 0.1  # the rounded mean of seven of these is another number


@pytest.mark.parametrize("name", OUTCOME)
def test_equal_rewards_of_any_size_have_advantages_of_zero(name):
    for reward in (0.1, LARGE, 1e17 / 3):
        for rows in (3, 7):
            found = getattr(adv, name)(np.full(rows, reward), np.zeros(rows), np.ones((rows, 2)))
            np.testing.assert_array_equal(found, 0)


def test_equal_values_of_any_size_are_whitened_to_zero():
    np.testing.assert_array_equal(adv.whiten(np.full((7, 1), LARGE), np.ones((7, 1))), 0)


@pytest.mark.parametrize(
    "call, what",
    [
        (lambda bad: adv.grpo(bad, np.zeros(4), MASK), r"rewards\[2\]=nan"),
        (lambda bad: adv.rloo(bad, np.zeros(4), MASK), r"rewards\[2\]=nan"),
        (lambda bad: adv.remax(bad, ROW, MASK), r"rewards\[2\]=nan"),
        (lambda bad: adv.remax(ROW, bad, MASK), r"baselines\[2\]=nan"),
        (lambda bad: adv.gae(MASK * bad[:, None], MASK, MASK), r"rewards\[2, 0\]=nan"),
        (lambda bad: adv.gae(MASK, MASK * bad[:, None], MASK), r"values\[2, 0\]=nan"),
    ],
)
def test_a_reward_that_is_not_finite_is_warned_of_by_its_place(call, what):
    with pytest.warns(UserWarning, match=what + " is not finite, so the advantages made of it are not"):
        call(np.array([1.0, 2.0, np.nan, 4.0]))
