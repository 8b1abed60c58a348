"""The state-space example at a tiny size: its chunks equal the recurrence, and no schedule changes its gradient."""

import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxfb

PATH = Path(__file__).parent.parent / "examples" / "state_space.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("state_space", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_chunks_equal_the_recurrence(example):
    draw, (rows, length, heads, size, state) = np.random.default_rng(0), (2, 12, 3, 4, 5)
    x = draw.normal(size=(rows, length, heads, size))
    log_decay = -draw.random((rows, length, heads))
    write, read = draw.normal(size=(2, rows, length, state))
    wanted, memory = np.zeros_like(x), np.zeros((rows, heads, size, state))
    for t in range(length):
        memory = np.exp(log_decay[:, t])[..., None, None] * memory
        memory = memory + x[:, t, ..., None] * write[:, t, None, None]
        wanted[:, t] = (memory * read[:, t, None, None]).sum(-1)
    for chunk in (1, 4, 12):
        np.testing.assert_allclose(example.scan(x, log_decay, write, read, chunk), wanted, rtol=1e-12)


@pytest.mark.slow
def test_no_schedule_changes_its_gradient(example):
    params = example.init(jax.random.key(0), width=8, heads=2, state=4)
    params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), params)
    batch = example.windows(example.text(10_000), 4, 8, np.random.default_rng(0))
    found = jaxfb.check_equivalence(example.model, params, batch, [{"pipe": 2}])
    found.raise_if_above(1e-11)
    assert len(found.ran) == 5
