"""Learning-rate and weight-decay schedules against transformers and Megatron, and what they refuse."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.optim import lr_schedule, weight_decay_schedule


def curve(schedule, counts):
    """Traced, as in a train step."""
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.asarray(counts, jnp.int32)))


def from_transformers(name, peak_lr, num_warmup_steps, num_training_steps, specific, steps):
    """The arguments of `get_scheduler`, in our words."""
    words = dict(peak=peak_lr, warmup=num_warmup_steps or 0, total=num_training_steps)
    given = dict(specific)
    floor = given.pop("min_lr_rate", given.pop("min_lr_ratio", None))
    if floor is not None:
        words["final"] = floor * peak_lr
    for theirs, ours in (("min_lr", "final"), ("lr_end", "final"), ("num_cycles", "cycles")):
        if theirs in given:
            words[ours] = given.pop(theirs)
    if name == "polynomial":
        words.setdefault("final", 1e-7)
    if name == "warmup_stable_decay":
        words |= wsd_from_transformers(words, given)
    if name == "cosine_warmup_with_min_lr":
        # Theirs peaks one update before the end of its warmup and runs one update ahead from there.
        words |= dict(initial=given.pop("warmup_lr_rate") * peak_lr)
        words |= dict(warmup=words["warmup"] - 1, total=words["total"] - 1)
    if name.startswith("cosine") and name != "cosine_with_restarts":
        words["clamp"] = False
    ours = {
        "cosine_with_restarts": "cosine_restarts",
        "cosine_with_min_lr": "cosine",
        "cosine_warmup_with_min_lr": "cosine",
        "constant_with_warmup": "constant",
        "warmup_stable_decay": "wsd",
    }
    return lr_schedule(ours.get(name, name), **words, **given)


def wsd_from_transformers(words, given):
    shapes = {"1-sqrt": "minus_sqrt"}
    tail, rise = given.pop("decay_type", "cosine"), given.pop("warmup_type", "linear")
    decay, stable = given.pop("num_decay_steps"), given.pop("num_stable_steps", None)
    total = words["total"] if stable is None else words["warmup"] + stable + decay
    return dict(
        initial=words["final"],
        total=total,
        decay=decay,
        tail=shapes.get(tail, tail),
        warmup_shape=shapes.get(rise, rise),
    )


def test_rates_are_those_of_transformers(golden):
    for case in golden("hf_schedules.json")["cases"]:
        inputs, name = case["inputs"], case["name"]
        if "error" not in case["expected"]:
            rates = curve(from_transformers(**inputs), inputs["steps"])
            np.testing.assert_allclose(rates, case["expected"]["lr"], rtol=1e-12, atol=1e-18, err_msg=name)
        elif name not in ("error_linear_without_warmup", "error_cosine_with_min_lr_missing"):
            # Those two leave out an argument that has a default here.
            with pytest.raises(ValueError):
                from_transformers(**inputs)


def from_megatron(inputs, group):
    """The arguments of `OptimizerParamScheduler` for one parameter group: (learning rate, weight decay)."""
    given = {**inputs, **group}
    style = given["lr_decay_style"]
    wsd = dict(decay=given["wsd_decay_steps"], tail=given["lr_wsd_decay_style"]) if style == "WSD" else {}
    rate = lr_schedule(
        {"WSD": "wsd", "inverse-square-root": "inverse_sqrt"}.get(style, style),
        peak=given["max_lr"],
        initial=given["init_lr"],
        final=given["min_lr"],
        warmup=given["lr_warmup_steps"],
        total=given["lr_decay_steps"],
        unit="samples",
        **wsd,
    )
    decay = weight_decay_schedule(
        given["wd_incr_style"],
        initial=given["start_wd"],
        final=given["end_wd"],
        total=given["wd_incr_steps"],
        unit="samples",
    )
    return rate, decay


@pytest.mark.slow
def test_rates_and_decay_are_those_of_megatron(golden):
    for case in golden("megatron_lr_wd.json")["cases"]:
        inputs, expected = case["inputs"], case["expected"]
        groups = inputs["param_groups"] or [{}]
        if "error" in expected:
            with pytest.raises(ValueError):
                from_megatron(inputs, {})
            continue
        for i, group in enumerate(groups):
            rate, decay = from_megatron(inputs, group)
            scaled = curve(decay, expected["num_steps"]) * group.get("wd_mult", 1.0)
            for ours, theirs in (
                (curve(rate, expected["num_steps"]), expected["lr"]),
                (scaled, expected["weight_decay"]),
            ):
                theirs = np.asarray(theirs).reshape(len(ours), -1)[:, i]
                np.testing.assert_allclose(ours, theirs, rtol=1e-12, err_msg=case["name"])


def test_float32_keeps_its_digits_early_in_a_long_warmup_and_late_in_a_cosine():
    for shape in ("linear", "cosine", "exponential", "minus_sqrt"):
        schedule = lr_schedule("constant", peak=1.0, warmup=100_000, warmup_shape=shape)
        single = schedule.function(jnp.float32(3))
        assert single.dtype == jnp.float32
        np.testing.assert_allclose(single, schedule(3), rtol=3e-6, err_msg=shape)
    cosine = lr_schedule("cosine", peak=1.0, total=100_000)
    np.testing.assert_allclose(cosine.function(jnp.float32(99_900)), cosine(99_900), rtol=1e-3)


@pytest.mark.parametrize(("length", "cycles"), [(98, 3), (49, 1), (98, 2), (115, 5), (6, 3)])
def test_restarts_are_at_their_counts_and_none_is_at_the_end(length, cycles):
    """A compiler multiplies by 1 / length in place of dividing, so that the end is at 0.99999994 of it."""
    schedule = lr_schedule("cosine_restarts", peak=1.0, total=length + 7, warmup=7, cycles=cycles)
    counts = np.arange(length + 2)
    done = counts * cycles % length / length
    expected = np.where(counts < length, (1 + np.cos(np.pi * done)) / 2, 0)
    single = jax.jit(jax.vmap(schedule.function))(jnp.asarray(counts + 7, jnp.float32))
    np.testing.assert_allclose(single, expected, atol=1e-6)
    np.testing.assert_allclose(curve(schedule, counts + 7), expected, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("cosin", {}, "unknown learning-rate schedule 'cosin'; did you mean 'cosine'?"),
        ("cosine", dict(power=2), "lr_schedule('cosine') does not take 'power'; choose from clamp, cycles"),
        ("cosine_restarts", dict(cycles=1.5), "cycles=1.5 must be a whole number of falls; use 2"),
        ("wsd", dict(decay=3, tial="linear"), "does not take 'tial'; did you mean 'tail'?"),
        ("wsd", dict(decay=3, tail="cosin"), "unknown tail 'cosin'; did you mean 'cosine'?"),
        ("linear", dict(total=None), "its decay needs an end; give the length of the run as total"),
        ("linear", dict(warmup=10), "warmup=10 must be below total=10; use at most 9"),
        ("linear", dict(warmup=-1), "warmup=-1 must not be negative; use 0 for none"),
        ("linear", dict(final=2.0), "final=2.0 must not be above peak=1.0; use at most 1.0"),
        ("linear", dict(peak=-1.0), "peak=-1.0 must be a finite rate, not negative"),
        ("wsd", dict(warmup=4, decay=7), "decay=7 must be from 1 to total - warmup = 6; use 1"),
        ("linear", dict(unit="update"), "unknown unit 'update'; did you mean 'updates'?"),
    ],
)
def test_refused_with_the_nearest_legal_choice(name, arguments, sentence):
    with pytest.raises(ValueError) as refusal:
        lr_schedule(name, **(dict(peak=1.0, total=10) | arguments))
    assert sentence in str(refusal.value)


def test_a_constant_decay_does_not_rise():
    assert float(weight_decay_schedule("constant", initial=0.1, final=0.1, total=10)(5)) == pytest.approx(0.1)
    with pytest.raises(ValueError, match="initial=0.1 is not final=0.2; use 'linear'"):
        weight_decay_schedule("constant", initial=0.1, final=0.2, total=10)
    assert float(weight_decay_schedule("linear", initial=0.1, final=0.2, total=10)(5)) == pytest.approx(0.15)
