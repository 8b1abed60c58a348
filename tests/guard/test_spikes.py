"""Spikes are judged by a median and the median absolute deviation of the updates before them."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from jaxfb.config.guard import GuardConfig
from jaxfb.guard.spikes import SpikeDetector, robust_z
from jaxfb.training.guarding.spike_guard import SpikeGuard


def test_the_score_is_that_of_the_definition():
    before = [1.0, 2.0, 3.0, 4.0, 100.0]  # median 3, absolute deviations 2 1 0 1 97: their median is 1
    assert robust_z(6.0, before) == pytest.approx(3 / 1.4826)
    assert robust_z(0.0, before) == pytest.approx(-3 / 1.4826)


def test_of_normal_numbers_it_is_the_ordinary_score():
    before = np.random.default_rng(0).normal(5.0, 2.0, 20_001).tolist()
    assert robust_z(11.0, before) == pytest.approx(3.0, rel=0.05)


def test_a_flat_curve_has_no_infinite_scores():
    assert robust_z(2.0, [2.0] * 9) == 0
    assert robust_z(2.02, [2.0] * 9) == pytest.approx(1.0)
    assert robust_z(1.0, [0.0] * 9) == math.inf


def fed(detector, losses, norms=None):
    norms = losses if norms is None else norms
    return [detector.judge({"loss": a, "grad_norm": b}) for a, b in zip(losses, norms, strict=True)]


def test_nothing_is_judged_before_half_a_window():
    assert not any(fed(SpikeDetector(8, 5.0), [1.0, 1.1, 0.9, 50.0]))


def test_a_spike_is_named_and_the_next_one_is_still_seen():
    detector = SpikeDetector(8, 5.0)
    smooth = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1]
    assert not any(fed(detector, smooth))
    first, second = fed(detector, [9.0, 9.0], [1.0, 1.0])
    assert set(first) == {"loss"} == set(second)
    assert set(detector.judge({"loss": 1.0, "grad_norm": 9.0})) == {"grad_norm"}


def test_a_new_level_is_normal_after_a_while():
    found = fed(SpikeDetector(8, 5.0), [1.0] * 8 + [3.0] * 8)
    assert all(found[8:12]) and not any(found[13:])


def test_numbers_below_the_others_are_no_spike():
    assert not any(fed(SpikeDetector(8, 5.0), [5.0, 5.1, 4.9, 5.0, 5.0, 5.1, 0.1, -9.0]))


def test_limits_are_the_largest_numbers_that_are_no_spike():
    detector = SpikeDetector(8, 5.0)
    assert detector.limits() == {"loss": math.inf, "grad_norm": math.inf}
    fed(detector, [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.1], [0.0] * 8)
    limits = detector.limits()
    assert limits["grad_norm"] == 0 and 1.1 < limits["loss"] < 2
    assert not fed(detector, [limits["loss"] * 0.999], [0.0])[0]
    assert set(fed(detector, [detector.limits()["loss"] * 1.001], [1e-9])[0]) == {"loss", "grad_norm"}


@pytest.mark.parametrize("seen", [3, 4, 5, 8, 9, 20])
def test_limits_without_the_last_number_are_those_before_it_came(seen):
    losses = np.random.default_rng(2).normal(3, 1, seen).tolist()
    before, after = SpikeDetector(8, 5.0), SpikeDetector(8, 5.0)
    fed(before, losses[:-1])
    fed(after, losses)
    restored = SpikeDetector(8, 5.0)
    restored.restore(after.to_dict())
    assert before.limits() == after.limits(without_last=True) == restored.limits(without_last=True)


def test_a_restored_detector_judges_alike():
    rng = np.random.default_rng(1)
    losses = (2 + 0.1 * rng.normal(size=60)).tolist() + [4.0] + (2 + 0.1 * rng.normal(size=9)).tolist()
    whole = fed(SpikeDetector(16, 8.0), losses)
    first = SpikeDetector(16, 8.0)
    start = fed(first, losses[:40])
    second = SpikeDetector(16, 8.0)
    second.restore(first.to_dict())
    assert start + fed(second, losses[40:]) == whole and any(whole)


@pytest.mark.parametrize("update", [9, 10])
def test_a_restored_guard_has_the_limits_of_the_one_that_was_saved(update):
    """Judged by the updates up to the last but one: of update 9 without the 8th, of update 10 with it."""
    config = GuardConfig(spikes="skip", spike_window=8)
    whole = SpikeGuard(config, {})
    for number, loss in enumerate(np.random.default_rng(3).normal(3, 1, 8).tolist(), 1):
        whole.judge(number, SimpleNamespace(loss=loss, grad_norm=1.0, skipped=False, spike=None), print)
    assert whole.limits(9) != whole.limits(10)
    assert SpikeGuard(config, whole.to_dict()).limits(update) == whole.limits(update)
