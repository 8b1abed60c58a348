"""The dynamic loss scale, against sequences worked out by hand from Megatron's DynamicGradScaler."""

import jax
import pytest

from jaxfb.optim import DynamicLossScale, StaticLossScale

CONFIG = dict(initial=64.0, minimum=4.0, growth_interval=3, hysteresis=2)


def scales(config, finite):
    """The scale after each update; finite is a string of "." (finite) and "x"."""
    state, update = config.init(), jax.jit(config.update)
    seen = []
    for mark in finite:
        state = update(state, mark == ".")
        seen.append(float(state.scale))
    return seen


@pytest.mark.parametrize(
    ("finite", "expected"),
    [
        # The first overflow is forgiven, every later one halves, down to the minimum.
        ("xxxxxx", [64, 32, 16, 8, 4, 4]),
        # Forgiveness is not renewed by finite updates short of a growth: overflows need not be consecutive.
        ("x..x..x", [64, 64, 64, 32, 32, 32, 16]),
        # Three finite ones in a row grow the scale and renew the forgiveness.
        ("x...xx", [64, 64, 64, 128, 128, 64]),
        # An overflow, forgiven or not, starts the run again; a growth starts it too.
        ("..x..." "...", [64, 64, 64, 64, 64, 128, 128, 128, 256]),
    ],
)  # fmt: skip
def test_backs_off_and_grows_like_megatron(finite, expected):
    assert scales(DynamicLossScale(**CONFIG), finite) == expected


def test_without_hysteresis_the_first_overflow_backs_off():
    assert scales(DynamicLossScale(**CONFIG | dict(hysteresis=1)), "x.x") == [32, 32, 16]


def test_it_grows_to_what_float32_has_and_no_further():
    """Infinite, it would make every gradient nan, and half of it would be infinite again."""
    config = DynamicLossScale(initial=2.0**126, growth_interval=1, hysteresis=1)
    assert scales(config, "...x") == [2.0**127, 2.0**127, 2.0**127, 2.0**126]


def test_it_grows_where_more_updates_were_finite_than_the_interval_has():
    """As after a run that continues with a shorter interval."""
    longer = DynamicLossScale(**CONFIG | dict(growth_interval=9))
    state = longer.init()
    for _ in range(5):
        state = longer.update(state, True)
    state = DynamicLossScale(**CONFIG).update(state, True)
    assert (float(state.scale), int(state.finite_updates)) == (128, 0)


def test_a_static_scale_stays():
    assert scales(StaticLossScale(128.0), "x.x") == [128, 128, 128]


def test_the_state_keeps_its_dtypes():
    config = DynamicLossScale(**CONFIG)
    before, after = config.init(), config.update(config.init(), False)
    assert jax.tree.map(lambda x: x.dtype, before) == jax.tree.map(lambda x: x.dtype, after)


@pytest.mark.parametrize(
    "wrong", [dict(initial=0), dict(minimum=128), dict(growth=1), dict(backoff=2), dict(growth_interval=0)]
)
def test_impossible_numbers_are_refused(wrong):
    with pytest.raises(ValueError, match=f"DynamicLossScale: {next(iter(wrong))}=.*; use"):
        DynamicLossScale(**CONFIG | wrong)
