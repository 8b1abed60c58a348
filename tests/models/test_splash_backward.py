"""The backward of splash attention: what it visits, and its numbers where not all sums fit at once."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.models.attention import packed_attention
from jaxfb.models.attention_kernels import splash, splash_backward, splash_gradients, splash_whole
from jaxfb.models.attention_kernels.splash_backward import in_parts
from jaxfb.models.attention_kernels.splash_gradients import Settings
from jaxfb.models.attention_kernels.splash_order import NOTHING, in_order, unmasked, visits, visits_of_devices
from jaxfb.parallel.scores import Scores

BLOCK = 128
LENGTH, HEADS, KV_HEADS, SIZE = 4 * BLOCK, 4, 2, 16
OF_ONE_BLOCK = 4 * BLOCK * splash.LANES  # bytes of the sums of one head


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(splash, "LARGEST_BLOCK", BLOCK)
    splash_whole._kernel.cache_clear()
    with jax.enable_x64(False):
        yield
    splash_whole._kernel.cache_clear()


def pairs(found) -> list[tuple[int, int]]:
    """(queries, keys) of the visits at which something is computed."""
    return [(int(q), int(k)) for k, q, d in zip(*found, strict=True) if d != NOTHING]


@pytest.mark.parametrize("window, reach", [(None, 4), (1, 1), (2, 2), (128, 2), (130, 3), (257, 3), (258, 4)])
def test_pairs_of_which_something_is_seen_are_visited_once_by_their_keys(window, reach):
    """In a window of 129 tokens the first query of a block sees the first key of the one before, and no further."""
    found = visits(in_order(4, 4), BLOCK, window)
    wanted = [(q, k) for k in range(4) for q in range(k, min(4, k + reach))]
    assert pairs(found) == wanted == list(zip(found.queries, found.keys, strict=True))
    assert (found.distance == found.queries - found.keys).all()


def test_keys_that_nothing_sees_are_visited_for_their_zeros():
    found = visits(in_order(2, 4), BLOCK)
    assert pairs(found) == [(0, 0), (1, 0), (1, 1)]
    assert found.keys.tolist() == [0, 0, 1, 2, 3] and found.distance.tolist()[3:] == [NOTHING] * 2


def test_devices_visit_as_many_pairs_each_and_the_last_ones_for_nothing():
    found = visits_of_devices(np.stack([in_order(2, 4), unmasked(2, 4)]), BLOCK)
    first, second = (pairs([x[device] for x in found]) for device in range(2))
    assert first == [(0, 0), (1, 0), (1, 1)] and len(second) == 8
    assert found.keys.shape == (2, 8) and found.keys[0].tolist() == [0, 0, 1, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "largest, parts, together",
    [(8, 1, 2), (7, 2, 2), (4, 2, 2), (3, 4, 2), (2, 4, 2), (1, 4, 1), (0, 4, 1)],
)
def test_queries_and_heads_are_cut_until_their_sums_fit(monkeypatch, largest, parts, together):
    monkeypatch.setattr(splash_gradients, "LARGEST_SUMS", largest * OF_ONE_BLOCK)
    assert len(in_parts(in_order(4, 4), 2, SIZE, Settings(BLOCK))) == parts
    assert splash_backward._heads_at_once(2, SIZE, BLOCK) == together


@pytest.mark.parametrize(
    "largest, window, softcap, packed",
    [
        (8, None, None, False),
        (4, None, 2.0, True),
        (2, 200, None, True),
        (1, 130, 2.0, True),
    ],
)
def test_gradients_do_not_depend_on_how_many_sums_fit(monkeypatch, largest, window, softcap, packed):
    """In float32, to 5e-6 of the largest number: both sum 512 products, in another order."""
    monkeypatch.setattr(splash_gradients, "LARGEST_SUMS", largest * OF_ONE_BLOCK)
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True)
    *inputs, cotangent = (jax.random.normal(key, (2, LENGTH, n, SIZE), jnp.float32) for key, n in shapes)
    drawn = np.sort(np.random.default_rng(0).integers(0, 4, (2, LENGTH)), axis=1)[:, ::-1]
    how = dict(
        segments=jnp.asarray(drawn, jnp.int32) if packed else None, window=window, scores=Scores(softcap)
    )

    def of(attention):
        _, vjp = jax.vjp(partial(attention, **how), *inputs)
        return vjp(cotangent)

    ours = jax.jit(lambda: of(partial(splash_whole.splash_attention, interpret=True)))()
    plain = jax.jit(lambda: of(partial(packed_attention, backend="xla")))()
    for mine, theirs in zip(ours, plain, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=5e-6 * float(jnp.abs(theirs).max()))


def test_in_bfloat16_the_sums_are_rounded_once(monkeypatch):
    """Gradients in bfloat16 are those of the same rounded numbers in float32, within what rounding the scores takes."""
    keys = jax.random.split(jax.random.key(1), 4)
    shapes = zip(keys, (HEADS, KV_HEADS, KV_HEADS, HEADS), strict=True)
    *inputs, cotangent = (
        jax.random.normal(key, (1, LENGTH, n, SIZE), jnp.float32).astype(jnp.bfloat16) for key, n in shapes
    )
    wide = [x.astype(jnp.float32) for x in inputs]

    def of(attention, inputs):
        out, vjp = jax.vjp(lambda *x: attention(*x, segments=None), *inputs)
        return vjp(cotangent.astype(out.dtype))

    ours = jax.jit(lambda: of(partial(splash_whole.splash_attention, interpret=True), inputs))()
    exact = jax.jit(lambda: of(partial(packed_attention, backend="xla"), wide))()
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.dtype == jnp.bfloat16
        error = float(jnp.linalg.norm(mine.astype(jnp.float32) - theirs) / jnp.linalg.norm(theirs))
        assert error < 0.01


@pytest.mark.parametrize("kind, largest", [("TPU v4", 2**22), ("TPU v5", 2**24), (None, 2**24)])
def test_a_v4_has_less_memory_for_the_sums(monkeypatch, kind, largest):
    monkeypatch.setattr(splash_gradients, "kind_here", lambda: kind)
    assert splash_gradients.largest_sums() == largest
    assert splash_gradients._limit(jnp.bfloat16) == 2 * largest + splash_gradients.BESIDE_THE_SUMS
