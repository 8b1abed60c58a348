"""Per-token log-probs, entropies and KLs equal the plain formulas, gradients too, and masked slots are inert."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxfb.losses.token_log_probs import log_probs_of_logits, token_log_probs
from jaxfb.losses.vocabulary.full_kl import full_kl

ROWS, SEQ, WIDTH, VOCAB, TOP = 3, 7, 8, 29, 4
SOFTCAP, TEMPERATURE = 5.0, 0.7


def _inputs(dtype=jnp.float64):
    keys = jax.random.split(jax.random.key(0), 6)
    hidden = jax.random.normal(keys[0], (ROWS, SEQ, WIDTH), dtype)
    kernel = jax.random.normal(keys[1], (WIDTH, VOCAB), dtype)
    targets = jax.random.randint(keys[2], (ROWS, SEQ, TOP), 0, VOCAB, jnp.int32)
    mask = (jax.random.uniform(keys[3], (ROWS, SEQ)) > 0.3).astype(jnp.float32).at[1].set(0)
    seeds = jax.random.normal(keys[4], (ROWS, SEQ, TOP + 1), dtype)
    teacher = jax.nn.log_softmax(jax.random.normal(keys[5], (ROWS, SEQ, VOCAB), dtype))
    return hidden, kernel, targets, mask, seeds, teacher


def _log_p(hidden, kernel):
    return jax.nn.log_softmax(SOFTCAP * jnp.tanh(hidden @ kernel / SOFTCAP) / TEMPERATURE)


def _scored(hidden, kernel, targets, mask, seeds, chunk):
    how = {"chunk": chunk, "logit_softcap": SOFTCAP, "temperature": TEMPERATURE}
    out = token_log_probs(hidden, kernel, targets, mask, **how)
    return jnp.sum(seeds[..., :-1] * out.log_probs) + jnp.sum(seeds[..., -1] * out.entropy), out


def _close(ours, expected, atol=1e-13):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol), ours, expected)


@pytest.mark.parametrize("chunk", [5, 64])
def test_log_probs_entropies_and_gradients_equal_the_plain_formula(chunk):
    hidden, kernel, targets, mask, seeds, _ = _inputs()

    def plain(hidden, kernel):
        log_p = _log_p(hidden, kernel)
        picked = mask[..., None] * jnp.take_along_axis(log_p, targets, axis=-1)
        entropy = -mask * (jnp.exp(log_p) * log_p).sum(-1)
        return jnp.sum(seeds[..., :-1] * picked) + jnp.sum(seeds[..., -1] * entropy), (picked, entropy)

    expected = jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, kernel)
    run = jax.jit(jax.value_and_grad(partial(_scored, chunk=chunk), (0, 1), has_aux=True))
    (value, out), grads = run(hidden, kernel, targets, mask, seeds)
    _close(((value, tuple(out)), grads), expected, 2e-13)
    dirty = jnp.where(mask[..., None] == 0, jnp.nan, hidden), kernel
    ids = jnp.where(mask[..., None] == 0, -100, targets)
    nan_seeds = jnp.where(mask[..., None] == 0, jnp.nan, seeds)
    (_, masked), masked_grads = run(*dirty, ids, mask, nan_seeds)
    jax.tree.map(np.testing.assert_array_equal, (masked, masked_grads), (out, grads))


@pytest.mark.parametrize("devices", [1, 2])
def test_absent_ids_have_no_probability_and_no_gradient(devices):
    """Also where the vocabulary is cut over a mesh axis; equal to the softmax over the ids that are there."""
    absent, there = ((0, 3), (12, 17), (27, 28)), [*range(3, 12), *range(17, 27)]
    hidden, kernel, _, mask, seeds, _ = _inputs()
    kernel = kernel[:, :28]
    targets = jnp.array(there)[jax.random.randint(jax.random.key(7), (ROWS, SEQ), 0, len(there))]

    def plain(hidden, kernel):
        log_p = _log_p(hidden, kernel[:, jnp.array(there)])
        index = jnp.searchsorted(jnp.array(there), targets)
        picked = mask * jnp.take_along_axis(log_p, index[..., None], axis=-1)[..., 0]
        entropy = -mask * (jnp.exp(log_p) * log_p).sum(-1)
        return jnp.sum(seeds[..., 0] * picked) + jnp.sum(seeds[..., -1] * entropy), (picked, entropy)

    def scored(hidden, kernel, axis=None):
        how = {"chunk": 5, "logit_softcap": SOFTCAP, "temperature": TEMPERATURE, "axis": axis}
        out = token_log_probs(hidden, kernel, targets, mask, absent_ids=absent, **how)
        return jnp.sum(seeds[..., 0] * out.log_probs) + jnp.sum(seeds[..., -1] * out.entropy), tuple(out)

    run = jax.value_and_grad(scored, (0, 1), has_aux=True)
    if devices == 2:
        mesh = jax.make_mesh(
            (2,), ("pipe",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
        )
        cut, whole = P(None, "pipe"), P()
        run = jax.shard_map(
            jax.value_and_grad(partial(scored, axis="pipe"), (0, 1), has_aux=True),
            mesh=mesh,
            in_specs=(whole, cut),
            out_specs=((whole, (whole, whole)), (whole, cut)),
            check_vma=False,
        )
    ours = jax.jit(run)(hidden, kernel)
    _close(ours, jax.value_and_grad(plain, (0, 1), has_aux=True)(hidden, kernel), 2e-13)
    gone = np.concatenate([np.arange(*ids) for ids in absent])
    assert (np.asarray(ours[1][1])[:, gone] == 0).all()


@pytest.mark.slow
def test_one_target_a_position_and_logits_that_exist_already(golden):
    hidden, kernel, targets, mask, *_ = _inputs()
    one = token_log_probs(hidden, kernel, targets[..., 0], mask)
    plain = log_probs_of_logits(hidden @ kernel, targets[..., 0])
    _close(tuple(one), tuple(mask * x for x in plain))
    none = token_log_probs(hidden, kernel, jnp.full_like(targets, -1), mask)
    assert (none.log_probs == 0).all()
    with pytest.raises(ValueError, match="temperature=0 must be positive"):
        token_log_probs(hidden, kernel, targets, mask, temperature=0)
    case = next(c for c in golden("rl_policy_losses.json")["cases"] if c["inputs"].get("kind") == "logits")
    logits, labels = jnp.array(case["inputs"]["logits"]), jnp.array(case["inputs"]["labels"])
    grads = [jax.grad(lambda x, i=i: log_probs_of_logits(x, labels)[i].sum())(logits) for i in (0, 1)]
    expected = [case["expected"][k] for k in ("log_prob", "entropy", "grad_log_prob_sum", "grad_entropy_sum")]
    _close([*log_probs_of_logits(logits, labels), *grads], [jnp.array(x) for x in expected], 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype, close", [(jnp.bfloat16, 3e-2), (jnp.float16, 4e-3)])
def test_half_precision_sums_in_float32_whatever_the_size_of_the_cotangents(dtype, close):
    hidden, kernel, targets, mask, seeds, _ = _inputs(dtype)
    small = 1e-3 * seeds.astype(jnp.float32)
    grad = jax.grad(lambda h, k: _scored(h, k, targets, mask, small, 64)[0], (0, 1))
    wide, narrow = grad(hidden.astype(jnp.float32), kernel.astype(jnp.float32)), grad(hidden, kernel)
    for ours, theirs in zip(narrow, wide, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(
            ours.astype(jnp.float32), theirs, atol=close * float(jnp.abs(theirs).max())
        )


@pytest.mark.parametrize("reverse", [False, True])
def test_full_kl_and_its_gradient_equal_the_plain_formula(reverse):
    hidden, kernel, _, mask, seeds, teacher = _inputs()

    def plain(hidden, kernel):
        student = _log_p(hidden, kernel)
        p, q = (student, teacher) if reverse else (teacher, student)
        return jnp.sum(seeds[..., 0] * mask * (jnp.exp(p) * (p - q)).sum(-1))

    @partial(jax.value_and_grad, argnums=(0, 1))
    def chunked(hidden, kernel, teacher, size):
        how = {"chunk": 5, "logit_softcap": SOFTCAP, "temperature": TEMPERATURE}
        return jnp.sum(size * seeds[..., 0] * full_kl(hidden, kernel, teacher, mask, reverse=reverse, **how))

    expected = jax.value_and_grad(plain, (0, 1))(hidden, kernel)
    gone, chunked = mask[..., None] == 0, jax.jit(chunked)
    dirty = jnp.where(gone, jnp.nan, hidden), kernel, jnp.where(gone, jnp.nan, teacher)
    for size in (1, 1e-3, 0):  # of the cotangents
        _close(chunked(*dirty, size), jax.tree.map(lambda x, size=size: size * x, expected))


def test_memory_is_far_below_all_the_logits():
    rows, seq, width, vocab, chunk = 4, 2048, 64, 128 * 1024, 256
    shapes = [
        jax.ShapeDtypeStruct((rows, seq, width), jnp.bfloat16),
        jax.ShapeDtypeStruct((width, vocab), jnp.bfloat16),
        jax.ShapeDtypeStruct((rows, seq), jnp.int32),
        jax.ShapeDtypeStruct((rows, seq), jnp.float32),
    ]

    def loss(*inputs):
        out = token_log_probs(*inputs, chunk=chunk)
        return jnp.sum(jnp.exp(out.log_probs) + out.entropy)

    compiled = jax.jit(jax.value_and_grad(loss, (0, 1))).lower(*shapes).compile()
    used, all_logits = compiled.memory_analysis().temp_size_in_bytes, rows * seq * vocab * 4
    kernel_grad, chunk_logits = width * vocab * 4, chunk * vocab * 4
    assert used < 5 * (kernel_grad + chunk_logits) < all_logits / 5
    print(f"{used=:,} {all_logits=:,}")
