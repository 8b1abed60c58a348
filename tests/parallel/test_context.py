"""Attention over a sequence cut by the context axis, and the whole engine on such a mesh: what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.models.attention import packed_attention
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import context
from jaxfb.parallel.scores import Scores

ROWS, LENGTH, VOCAB = 8, 16, 32
SEGMENTS = np.repeat([[1] * 5 + [2] * 7 + [0] * 4], ROWS, 0).astype(np.int32)


def test_zigzag_gives_every_device_an_early_and_a_late_piece():
    assert context.zigzag(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    for length, size in ((16, 2), (24, 4)):
        assert sorted(context.zigzag(length, size)) == list(range(length))
    with pytest.raises(
        ValueError, match="cannot be cut into 2 x context 4 = 8 equal pieces; use a length of 16 or 24"
    ):
        context.zigzag(20, 4)


def test_an_unknown_method_is_refused_on_one_device_too():
    heads = jnp.zeros((1, 4, 2, 4))
    with pytest.raises(ValueError, match="method must be one of 'ring', .*; did you mean 'ring'"):
        context.context_attention(heads, heads, heads, segments=None, method="rign")


@pytest.mark.parametrize(
    "size, window",
    [
        pytest.param(4, None, marks=pytest.mark.slow),
        (4, 3),
        pytest.param(4, 9, marks=pytest.mark.slow),
        pytest.param(2, None, marks=pytest.mark.slow),
    ],
)
def test_every_method_equals_attention_on_one_device(size, window):
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (8, 4, 4, 8)
    query, key, value, seen = (
        jax.random.normal(k, (2, LENGTH, h, 4)) for k, h in zip(keys, heads, strict=True)
    )
    segments = jnp.asarray(SEGMENTS[:2])

    def whole(query, key, value):
        out = packed_attention(query, key, value, segments=segments, backend="xla", window=window)
        return (out * seen).sum()

    wanted = jax.value_and_grad(whole, (0, 1, 2))(query, key, value)
    order = context.zigzag(LENGTH, size)
    mesh = jax.make_mesh((size,), ("context",), axis_types=(AxisType.Auto,))
    cut = P(None, "context")

    def parts(*arrays):
        *qkv, segments, seen = arrays

        def loss(method, *qkv):
            out = context.context_attention(*qkv, segments=segments, method=method, window=window)
            return (out * seen).sum()

        found = {m: jax.value_and_grad(loss, (1, 2, 3))(m, *qkv) for m in context.METHODS}
        return {m: (jax.lax.psum(loss, "context"), grads) for m, (loss, grads) in found.items()}

    specs = {method: (P(), (cut,) * 3) for method in context.METHODS}
    run = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=(cut,) * 5, out_specs=specs, check_vma=False))
    found = run(*(array[:, order] for array in (query, key, value, segments, seen)))
    alone = {
        m: context.context_attention(query, key, value, segments=segments, method=m, window=window)
        for m in found
    }
    for method, (loss, grads) in found.items():
        np.testing.assert_allclose((alone[method] * seen).sum(), wanted[0], rtol=1e-12, err_msg=method)
        np.testing.assert_allclose(loss, wanted[0], rtol=1e-12, err_msg=method)
        for got, want in zip(grads, wanted[1], strict=True):
            np.testing.assert_allclose(got[:, np.argsort(order)], want, atol=1e-12, err_msg=method)


def test_every_method_gives_the_softmax_that_is_written_out():
    """Two devices; with a window, several documents, a soft cap, and a sink for each head."""
    rng, length, window, softcap = np.random.default_rng(0), 8, 3, 1.5
    query, key, value = (rng.normal(size=(1, length, heads, 2)) for heads in (4, 2, 2))
    sinks, segments = rng.normal(size=4), np.array([[1, 1, 1, 1, 1, 2, 2, 0]])
    apart = np.arange(length)[:, None] - np.arange(length)
    seen = (apart >= 0) & (apart < window) & (segments[0][:, None] == segments[0])

    products = np.einsum("rthk,rshk->rhts", query, key.repeat(2, 2)) / 2**0.5
    powers = np.exp(softcap * np.tanh(products / softcap)) * seen
    shares = powers / (powers.sum(-1, keepdims=True) + np.exp(sinks)[:, None, None])
    wanted = np.einsum("rhts,rshk->rthk", shares, value.repeat(2, 2))

    order, cut = context.zigzag(length, 2), P(None, "context")

    def parts(query, key, value, segments):
        return [
            context.context_attention(
                query,
                key,
                value,
                Scores(softcap, jnp.asarray(sinks)),
                segments=segments,
                method=method,
                window=window,
            )
            for method in context.METHODS
        ]

    mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = jax.jit(jax.shard_map(parts, mesh=mesh, in_specs=(cut,) * 4, out_specs=cut, check_vma=False))
    found = run(*(array[:, order] for array in (query, key, value, segments)))
    for method, got in zip(context.METHODS, found, strict=True):
        np.testing.assert_allclose(got[:, np.argsort(order)], wanted, rtol=1e-12, err_msg=method)


def batch():
    rng = np.random.default_rng(0)
    ids = lambda: rng.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)  # noqa: E731
    mask = (rng.random((ROWS, LENGTH)) > 0.3).astype(np.float64)
    mask[2] = 0
    return {"tokens": ids(), "targets": ids(), "loss_mask": mask, "segments": SEGMENTS}


def model(**settings):
    sizes = dict(vocab_size=VOCAB, num_layers=2, hidden_size=16, mlp_size=16, num_heads=4, num_kv_heads=2)
    config = TransformerConfig(**sizes, tied_embeddings=True, dropout=0.1, loss_chunk=16, **settings)
    return transformer(config), init_params(config, jax.random.key(0), jnp.float64)


def run(cut, mesh, rows_per_microbatch=2, normalize="global", **options):
    mesh = jaxfb.make_mesh(**mesh)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=rows_per_microbatch, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(mesh, normalize=normalize, **options)
    return fb(*cut, batch(), plan, rng=jax.random.key(1))


@pytest.mark.parametrize(
    "mesh, options",
    [
        pytest.param(dict(context=2), {}, marks=pytest.mark.slow),
        (dict(context=2, data=2), dict(normalize="microbatch", rows_per_microbatch=2)),
        pytest.param(dict(context=4), dict(gather_ahead=True), marks=pytest.mark.slow),
        pytest.param(dict(context=2, pipe=2, tensor=2), dict(schedule="1f1b"), marks=pytest.mark.slow),
        pytest.param(
            dict(context=2, fsdp=2),
            dict(remat="full", gather_ahead=True, fsdp_gather=1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(context=2, fsdp=2, data=2),
            dict(remat="full", optimizer_sharding="data"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            dict(context=2, fsdp=2, data=2), dict(optimizer_sharding="gradients"), marks=pytest.mark.slow
        ),
        pytest.param(
            dict(context=2, pipe=2, fsdp=2),
            dict(schedule="zero_bubble", fsdp_gather="step"),
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_cut_sequence_changes_nothing(mesh, options):
    """Dropout, packing, ragged masks, an empty row; in "microbatch" the counts are those of whole sequences."""
    cut = model()
    plain = {name: options[name] for name in ("normalize", "rows_per_microbatch") if name in options}
    wanted = run(cut, {axis: size for axis, size in mesh.items() if axis == "data"}, **plain)
    found = run(cut, mesh, **options)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-12)
    np.testing.assert_allclose(found.metrics["accuracy"], wanted.metrics["accuracy"], rtol=1e-12)
    for got, want in zip(jax.tree.leaves(found.grads), jax.tree.leaves(wanted.grads), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_weights_of_rows_count_once_and_outputs_come_back_in_order(size):
    """A weight that reads no token (rows, a constant) is not summed over context; token outputs are put in order."""

    def loss_fn(params, microbatch, rng):
        score = params * microbatch["x"]
        terms = {
            "rows": jaxfb.Sum(score.sum(), float(score.shape[0])),
            "tokens": jaxfb.Sum(score.sum(), score.size),
        }
        return jaxfb.LossOutput(terms, outputs={"score": score, "row": score.sum(1)})

    x = np.random.default_rng(0).normal(size=(4, 8))
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(context=size))
    out = fb(loss_fn, jnp.float64(2), {"x": x}, jaxfb.BatchPlan(rows=4, rows_per_microbatch=2))
    np.testing.assert_allclose(out.loss, 2 * x.sum() / 4 + 2 * x.mean(), rtol=1e-12)
    np.testing.assert_allclose(out.grads, x.sum() / 4 + x.mean(), rtol=1e-12)
    np.testing.assert_allclose(out.outputs["score"], 2 * x, rtol=1e-12)
    np.testing.assert_allclose(out.outputs["row"], 2 * x.sum(1), rtol=1e-12)


def test_sequences_that_do_not_divide_are_refused():
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(context=4))
    plan = jaxfb.BatchPlan(rows=2, rows_per_microbatch=1)
    loss_fn = lambda p, mb, rng: jaxfb.Sum((p * mb["x"]).sum(), 1.0)  # noqa: E731
    with pytest.raises(ValueError, match="sequences of 12 tokens cannot be cut"):
        fb(loss_fn, jnp.float64(1), {"x": np.ones((2, 12))}, plan)
    with pytest.raises(ValueError, match=r"which must be the same for all; got lengths \[8, 16\]"):
        fb(loss_fn, jnp.float64(1), {"x": np.ones((2, 16)), "y": np.ones((2, 8))}, plan)


@pytest.mark.parametrize("distance", [0, 2, 3, 4, 9])
def test_beyond_a_whole_sequence_there_are_zeros(distance):
    x = jnp.arange(1, 7).reshape(2, 3)
    wanted = np.pad(x, ((0, 0), (0, distance)))[:, distance : distance + 3]
    np.testing.assert_array_equal(context.later(x, distance), wanted)


def test_a_token_beyond_the_next_piece_is_refused_with_the_nearest_length():
    def later(length):
        cut = P(None, "context")
        run = jax.shard_map(
            lambda x: context.later(x, 5),
            mesh=jaxfb.make_mesh(context=2),
            in_specs=cut,
            out_specs=cut,
            check_vma=False,
        )
        return jax.eval_shape(run, np.zeros((1, length)))

    with pytest.raises(
        ValueError, match="sequences of 16 tokens .* into pieces of 4; use sequences of 20 or a smaller"
    ):
        later(16)
    assert later(20).shape == (1, 20)


@pytest.mark.slow
def test_a_context_axis_cuts_the_state_and_reduces_into_shards():
    """The bytes of arguments fall by its size, and no gradient of a whole leaf is all-reduced over it."""
    cut, params = model()
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=2, num_microbatches=2)

    def compiled(**sizes):
        mesh = jaxfb.make_mesh(fsdp=2, **sizes)
        step = jaxfb.make_train_step(cut, optax.adam(1e-3), mesh, plan, dropout=False)
        return step.lower(step.abstract_state(lambda _: params), jax.eval_shape(batch)).compile(), mesh

    (alone, _), (both, mesh) = compiled(), compiled(context=2)
    less = 1 - both.memory_analysis().argument_size_in_bytes / alone.memory_analysis().argument_size_in_bytes
    assert 0.45 < less < 0.5  # norms' scales are whole
    over = [one for one in collectives(both.as_text()) if "context" in one.axes(mesh)]
    scattered = [one.bytes for one in over if one.kind == "reduce-scatter"]
    reduced = [one.bytes for one in over if one.kind == "all-reduce" and "reduce_gradients" in one.op_name]
    assert scattered and reduced and max(reduced) < min(scattered)
