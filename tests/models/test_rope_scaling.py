"""Frequencies of rotary positions for longer sequences, by the formulas of those who published them."""

import math

import numpy as np
import pytest

from jaxfb.models.rope import amplitude, frequencies
from jaxfb.models.rope_scaling import RopeScaling

SIZE, THETA, LENGTH, FACTOR = 16, 10000.0, 64, 4.0
PLAIN = THETA ** (-np.arange(SIZE // 2) * 2 / SIZE)


def of_llama3(low, high):
    """By wavelengths, as Llama 3.1's code has it."""
    found = []
    for frequency in PLAIN:
        wavelength = 2 * math.pi / frequency
        smooth = (LENGTH / wavelength - low) / (high - low)
        if wavelength < LENGTH / high:
            found.append(frequency)
        elif wavelength > LENGTH / low:
            found.append(frequency / FACTOR)
        else:
            found.append((1 - smooth) * frequency / FACTOR + smooth * frequency)
    return found


def of_yarn(slow, fast, truncate):
    """By the pair, whole or not, that turns so often within the original length."""
    first, last = (SIZE / 2 * math.log(LENGTH / (2 * math.pi * turns), THETA) for turns in (fast, slow))
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    scaled = [min(max((pair - first) / (last - first), 0), 1) for pair in range(SIZE // 2)]
    return [f * (1 - share) + f / FACTOR * share for f, share in zip(PLAIN, scaled, strict=True)]


@pytest.mark.parametrize(
    ("kind", "options", "wanted"),
    [
        ("linear", {}, PLAIN / FACTOR),
        ("llama3", {"low_frequency_factor": 0.5, "high_frequency_factor": 4.0}, of_llama3(0.5, 4.0)),
        ("yarn", {"beta_slow": 0.2, "beta_fast": 4.0}, of_yarn(0.2, 4.0, True)),
        ("yarn", {"beta_slow": 0.2, "beta_fast": 4.0, "truncate": False}, of_yarn(0.2, 4.0, False)),
        ("yarn", {"beta_slow": 1.0, "beta_fast": 32.0, "truncate": False}, of_yarn(1.0, 32.0, False)),
    ],
    ids=["linear", "llama3", "yarn", "yarn between pairs", "yarn from the first pair on"],
)
def test_frequencies_are_those_of_their_formula(kind, options, wanted):
    scaling = RopeScaling(kind, FACTOR, original_length=LENGTH, **options)
    found = frequencies(SIZE, THETA, scaling)
    np.testing.assert_allclose(found, wanted, rtol=1e-12)
    assert frequencies(SIZE, THETA)[0] == 1 and found[-1] == pytest.approx(PLAIN[-1] / FACTOR)


def test_long_documents_have_other_factors():
    short, long = (tuple(np.linspace(1, most, SIZE // 2)) for most in (2, 8))
    scaling = RopeScaling("longrope", FACTOR, original_length=LENGTH, short_factors=short, long_factors=long)
    for is_long, factors in ((False, short), (True, long)):
        np.testing.assert_allclose(frequencies(SIZE, THETA, scaling, is_long=is_long), PLAIN / factors)
    assert amplitude(scaling) == pytest.approx(math.sqrt(1 + math.log(4) / math.log(64)))


def test_yarn_multiplies_queries_and_keys():
    yarn = {"kind": "yarn", "factor": FACTOR, "original_length": LENGTH}
    assert amplitude(RopeScaling(**yarn)) == pytest.approx(0.1 * math.log(4) + 1)
    assert amplitude(RopeScaling(**yarn, attention_factor=1.5)) == 1.5
    assert amplitude(None) == amplitude(RopeScaling("linear", FACTOR)) == 1
