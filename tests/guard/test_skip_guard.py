"""Which updates that changed nothing count as failed ones, and how many of them in a row end a run."""

from types import SimpleNamespace

import numpy as np
import pytest

from jaxfb.training.guard import NonFiniteAbort, SkipGuard


def metrics(*causes, skipped=None, spike=False, loss_scale=1.0):
    skipped = bool(causes) if skipped is None else skipped
    found = {cause: ["['w']"] for cause in causes}
    return SimpleNamespace(
        nonfinite_causes=lambda params: found,
        skipped=skipped,
        spike=spike,
        loss_scale=np.float32(loss_scale),
        loss=np.float32(np.nan if "loss" in causes else 1),
    )


GOOD, BAD = metrics(), metrics("loss", "gradients")
NO_TOKENS, SPIKE = metrics(skipped=True), metrics(skipped=True, spike=True)
OVERFLOW, LOSS_TOO = metrics("gradients", loss_scale=8), metrics("loss", "gradients", loss_scale=8)
SMALLEST, PARAMETER = metrics("gradients"), metrics("parameters", "gradients", loss_scale=8)


@pytest.mark.parametrize(
    "updates, patient, failed",
    [
        ((BAD, BAD, GOOD, BAD), False, [1, 2, 0, 1]),
        ((BAD, NO_TOKENS, BAD), False, [1, 1, 2]),  # which tells nothing of the parameters
        ((BAD, SPIKE, BAD), False, [1, 0, 1]),  # whose numbers were finite
        ((OVERFLOW, OVERFLOW, OVERFLOW), False, [1, 2, 3]),
        ((OVERFLOW,) * 9, True, [0] * 9),  # until the scale is low enough
        ((OVERFLOW, LOSS_TOO, GOOD), True, [0, 1, 0]),
        ((OVERFLOW, SMALLEST, SMALLEST), True, [0, 1, 2]),
        ((PARAMETER, PARAMETER), True, [1, 2]),
    ],
)
def test_failed_updates_are_counted_since_the_last_sound_one(updates, patient, failed):
    said, guard = [], SkipGuard(4, {"w": 0}, lambda text: said.append(text), patient)
    found = []
    for number, update in enumerate(updates, 1):
        guard.check(number, update)
        found.append(guard.failed)
    assert found == failed
    assert [text.split(":")[0] for text in said] == [
        f"update {number} skipped" for number, one in enumerate(updates, 1) if one.skipped and not one.spike
    ]


def test_the_limit_of_failed_updates_in_a_row_ends_the_run():
    guard, never = (SkipGuard(limit, {"w": 0}, lambda text: None) for limit in (3, None))
    for number, update in enumerate((BAD, BAD, GOOD, BAD, BAD), 1):
        guard.check(number, update)
    with pytest.raises(
        NonFiniteAbort, match="3 updates in a row, up to update 6, were not finite in the loss"
    ):
        guard.check(6, BAD)
    for number in range(100):
        never.check(number, BAD)


def test_what_is_told_of_another_model_than_the_trained_one_names_it():
    said, guard = [], SkipGuard(2, {"w": 0}, lambda text: said.append(text), whose="the critic")
    guard.check(1, NO_TOKENS)
    with pytest.raises(NonFiniteAbort, match="2 updates of the critic in a row, up to update 3"):
        for number in (2, 3):
            guard.check(number, BAD)
    assert all(f"update {number} of the critic skipped" in said[number - 1] for number in (1, 2, 3))
