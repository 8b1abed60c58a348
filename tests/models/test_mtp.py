"""Multi-token prediction: a plain loop over documents gives its losses, and no mesh or schedule changes them."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import apply, hidden_states

import jaxfb
from jaxfb.models.attention import packed_attention
from jaxfb.models.block import Read, rebuilder
from jaxfb.models.config import TransformerConfig, flops_per_token, num_params
from jaxfb.models.mtp import Depth, MultiToken, shifted
from jaxfb.models.pattern import LayerKind
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.context import later
from jaxfb.types import outer_params

ROWS, LENGTH, DEPTH, WEIGHT = 8, 16, 2, 0.6
SIZES = dict(
    vocab_size=32, num_layers=2, hidden_size=16, mlp_size=16, num_heads=4, num_kv_heads=2, loss_chunk=16,
    mtp_depth=DEPTH, mtp_weight=WEIGHT, logit_softcap=5.0,
)  # fmt: skip
DENSE = TransformerConfig(**SIZES, tied_embeddings=True, dropout=0.1)
EXPERTS = TransformerConfig(
    **SIZES, num_experts=4, expert_mlp_size=8, balance_coefficient=0.1, router_bias_rate=0.01
)


def _batch(dtype=np.float64):
    """Documents of 1, 2, 5 and more tokens, one that ends its row, padding, a ragged mask, an empty row."""
    draw = np.random.default_rng(0)
    lengths = [[5, 1, 7], [2, 14], [16], [], [3, 3, 3], [1, 1, 1], [8, 8], [4, 9]]
    segments = np.zeros((ROWS, LENGTH), np.int32)
    for row, parts in enumerate(lengths):
        ids = np.repeat(np.arange(len(parts)) + 1, parts)
        segments[row, : len(ids)] = ids
    tokens, targets = draw.integers(0, 32, (2, ROWS, LENGTH)).astype(np.int32)
    mask = (segments > 0) * np.round(draw.random((ROWS, LENGTH)) * (draw.random((ROWS, LENGTH)) > 0.2), 2)
    return {"tokens": tokens, "targets": targets, "loss_mask": mask.astype(dtype), "segments": segments}


@cache
def _params(config):
    return jax.jit(lambda key: jax.tree.map(lambda x: 2 * x, init_params(config, key, jnp.float64)))(
        jax.random.key(0)
    )


def _attend(query, key, value):
    return packed_attention(query, key, value, segments=None, backend="xla"), None


def _plain(config, params, row):
    """{depth: [total, weight]} of one row, by a loop over its documents, each alone and a token shorter a depth."""
    sums, batch = {depth: [0.0, 0.0] for depth in range(1, DEPTH + 1)}, _batch()
    for document in np.unique(batch["segments"][row][batch["segments"][row] > 0]):
        places = np.flatnonzero(batch["segments"][row] == document)
        tokens, targets, mask = (batch[name][row, places] for name in ("tokens", "targets", "loss_mask"))
        for depth, nll in enumerate(_document(config, params, tokens, targets, places), start=1):
            sums[depth][0] += WEIGHT / DEPTH * (mask[depth:] * nll).sum()
            sums[depth][1] += mask[depth:].sum()
    return sums


@partial(jax.jit, static_argnums=0)
def _document(config, params, tokens, targets, places):
    """One document's losses of every depth that it is long enough for, [length - depth] each."""
    depth_of = rebuilder(Depth, config)
    x = hidden_states(transformer(config), params, {"tokens": tokens[None], "positions": places[None]})
    table, losses = params["embed"]["embedding"], []
    for depth in range(1, min(DEPTH, len(tokens) - 1) + 1):
        module, length = depth_of(params["mtp"][str(depth)]), len(tokens) - depth
        read = Read(places[None, :length], None, None, None)
        x, _ = module(x[:, :length], table[tokens[depth:]][None], read, _attend)
        logits = config.logit_softcap * jnp.tanh(module.norm(x)[0] @ table.T / config.logit_softcap)
        losses.append(-jax.nn.log_softmax(logits)[jnp.arange(length), targets[depth:]])
    return losses


def test_a_place_counts_where_a_token_further_on_is_in_its_document():
    """With the weight that it has there; the last row is one document without segments."""
    mask = np.arange(1.0, 7.0)
    row = {"targets": np.arange(10, 16)[None], "loss_mask": mask[None]}
    segments = {"segments": np.array([[1, 1, 1, 2, 2, 0]])}
    for depth, packed, alone in (
        (1, [2, 3, 0, 5, 0, 0], [2, 3, 4, 5, 6, 0]),
        (2, [3, 0, 0, 0, 0, 0], [3, 4, 5, 6, 0, 0]),
    ):
        found = shifted(row | segments, depth)
        np.testing.assert_array_equal(found["loss_mask"], [packed])
        np.testing.assert_array_equal(found["targets"][0, :-depth], np.arange(10 + depth, 16))
        np.testing.assert_array_equal(shifted(row, depth)["loss_mask"], [alone])
    blank = shifted({**row, "segments": np.zeros((1, 6), np.int32)}, 1)
    assert not blank["loss_mask"].any()


@pytest.mark.parametrize("as_published", [False, True])
def test_each_depth_reads_a_token_further_and_predicts_the_next(as_published, monkeypatch):
    """By layers that add what they read, so that every depth has what is behind it in its hidden states."""
    heads = MultiToken(replace(DENSE, mtp_as_published=as_published))

    def add(x, embedded, read, attend):
        return x + embedded, {"balance": jaxfb.Sum(jax.random.uniform(read.keys[1]), read.counted.sum())}

    add.norm = lambda x: 2 * x
    monkeypatch.setattr(heads, "_depth_of", lambda _: add)
    draw, keys = np.random.default_rng(0), jax.random.split(jax.random.key(0), 2)
    table, hidden = draw.normal(size=(32, 16)), draw.normal(size=(2, LENGTH, 16))
    batch = {name: leaf[:2] for name, leaf in _batch().items()}

    @jax.jit
    def terms(table, hidden):
        outer = SimpleNamespace(embed=lambda tokens: table[tokens], head_kernel=table.T, norm=add.norm)
        read = Read(None, batch["segments"], batch["segments"] != 0, keys)
        return heads.terms(outer, {"1": None, "2": None}, hidden, batch, read, None)

    out, x = terms(table, hidden), 2 * hidden if as_published else hidden
    for depth in (1, 2):
        x = x + table[np.asarray(later(batch["tokens"], depth))]
        normed = 2 * x
        x = normed if as_published else x
        exps = np.exp(5.0 * np.tanh(normed @ table.T / 5.0))
        targets, mask = (np.asarray(shifted(batch, depth)[name]) for name in ("targets", "loss_mask"))
        nll = -np.log(np.take_along_axis(exps, targets[..., None], 2)[..., 0] / exps.sum(-1))
        term, balance = out.terms[f"mtp_{depth}"], out.terms[f"mtp_{depth}_balance"]
        np.testing.assert_allclose(term.total, WEIGHT / DEPTH * (nll * mask).sum(), rtol=1e-12)
        np.testing.assert_allclose(term.weight, mask.sum(), rtol=1e-12)
        assert balance.total == jax.random.uniform(jax.random.fold_in(keys[1], 1 + depth))
        assert balance.weight == {1: 10 + 14, 2: 8 + 12}[depth]  # no token of another document is read there
        assert f"mtp_{depth}_accuracy" in out.metrics


@pytest.mark.slow
def test_the_loss_equals_a_loop_over_documents():
    run = jax.jit(lambda params, batch: apply(transformer(DENSE), params, batch).terms)
    for row in (0, 4):
        terms = run(_params(DENSE), jax.tree.map(lambda x, row=row: x[row : row + 1], _batch()))
        assert set(terms) == {"cross_entropy", "mtp_1", "mtp_2"}
        for depth, (total, weight) in _plain(DENSE, _params(DENSE), row).items():
            np.testing.assert_allclose(terms[f"mtp_{depth}"].total, total, rtol=1e-12)
            np.testing.assert_allclose(terms[f"mtp_{depth}"].weight, weight, rtol=1e-12)


def _run(config, sizes, rows_per_microbatch, **options):
    mesh = jaxfb.make_mesh(**sizes)
    replicas = mesh.shape["data"] * mesh.shape["fsdp"] * mesh.shape["expert"]
    plan = jaxfb.BatchPlan(rows=ROWS, rows_per_microbatch=rows_per_microbatch, data_parallel=replicas)
    fb = jaxfb.get_forward_backward_func(mesh, **options)
    return fb(transformer(config), _params(config), _batch(), plan, rng=jax.random.key(1))


@cache
def _one_device(config):
    return _run(config, {}, ROWS)


CASES = [
    (DENSE, dict(context=4, data=2), 2, {}),
    (DENSE, dict(pipe=2, context=2, tensor=2), 1, dict(schedule="1f1b", poison_bubbles=True)),
    (DENSE, dict(fsdp=2, data=2, tensor=2), 1, dict(optimizer_sharding="data")),
    (DENSE, dict(pipe=2, data=2), 2, dict(schedule="zero_bubble", head_placement="rows")),
    (EXPERTS, dict(pipe=2, expert=2), 1, dict(schedule="1f1b", poison_bubbles=True)),
    (EXPERTS, dict(expert=2, context=2, tensor=2), 2, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "config, sizes, rows_per_microbatch, options",
    CASES,
    ids=lambda value: "experts" if value is EXPERTS else "dense" if value is DENSE else str(value),
)
def test_a_split_changes_nothing(config, sizes, rows_per_microbatch, options):
    """Rows that the stages cannot share out evenly (1 over 2), packing, tied tables, dropout, experts."""
    wanted, found = _one_device(config), _run(config, sizes, rows_per_microbatch, **options)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-12)
    for name, term in wanted.terms.items():
        np.testing.assert_allclose(found.terms[name].total, term.total, rtol=1e-12, err_msg=name)
        np.testing.assert_allclose(found.terms[name].weight, term.weight, rtol=1e-12, err_msg=name)
    for (path, want), got in zip(
        jax.tree_util.tree_leaves_with_path(wanted.grads), jax.tree.leaves(found.grads), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-12, err_msg=jax.tree_util.keystr(path))
    assert np.abs(found.grads["mtp"]["2"]["project"]["kernel"]).max() > 1e-4


def test_sizes_count_the_heads():
    for config in (DENSE, EXPERTS):
        shapes = jax.eval_shape(lambda config=config: init_params(config, jax.random.key(0)))
        assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(shapes)) == num_params(config)
    plain = TransformerConfig(**{**SIZES, "mtp_depth": 0})
    assert flops_per_token(DENSE, LENGTH) > (1 + DEPTH / 2) * flops_per_token(plain, LENGTH) > 0
    assert "mtp" not in outer_params(jax.eval_shape(lambda: init_params(plain, jax.random.key(0))))


@pytest.mark.parametrize("first", [True, False])
def test_further_layers_are_like_the_last_of_the_model(first):
    """With experts where it has them."""
    config = replace(EXPERTS, pattern=(LayerKind(experts=first), LayerKind(experts=not first)))
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    assert ("moe" in shapes["mtp"]["1"]["block"]) == (not first)


def test_another_loss_is_of_the_last_hidden_states_alone():
    """And of whole sequences."""
    model = transformer(DENSE, loss=lambda hidden, kernel, microbatch: jaxfb.Sum(hidden.sum(), 1.0))
    hidden = jnp.zeros((ROWS, LENGTH, SIZES["hidden_size"]))
    outer = outer_params(jax.eval_shape(lambda: init_params(DENSE, jax.random.key(0))))
    out = jax.eval_shape(lambda *given: model.head(*given, None), outer, hidden, _batch())
    assert isinstance(out, jaxfb.Sum)
    plain = replace(DENSE, mtp_depth=0, dropout=0.0)
    assert (
        transformer(plain).layer_piece is not None and transformer(plain, loss=model.head).layer_piece is None
    )


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="mtp_depth must be an integer that is not negative, got -1"):
        TransformerConfig(**{**SIZES, "mtp_depth": -1})
