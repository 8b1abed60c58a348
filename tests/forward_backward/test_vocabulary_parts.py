"""An embedding and a head of which a part of the vocabulary at a time is gathered: the gradients of one device."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from comparisons import close, worst_error
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.forward_backward.head_placement import choose_placement
from jaxfb.losses import cross_entropy, heads, token_log_probs
from jaxfb.losses.cross_entropy import chunked_cross_entropy
from jaxfb.losses.language_model import next_token_loss
from jaxfb.losses.token_log_probs import log_probs_of_logits
from jaxfb.losses.vocabulary import logits
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel import data, table
from jaxfb.parallel import look_up as look_up_module
from jaxfb.parallel.look_up import look_up
from jaxfb.platforms.compat import cut_down, equations
from jaxfb.types import outer_params

ROWS, LENGTH, VOCAB = 8, 12, 192
SIZES = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "mlp_size": 32,
    "loss_chunk": 5,
}
TIED, CAPPED = {"tied_embeddings": True}, {"logit_softcap": 2.0}
WIDTH_CUT = {"vocab_size": VOCAB + 6}
"""Not divided by four devices, which share out the width instead."""


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 48 tokens in float64, and no shares."""
    monkeypatch.setattr(data, "LARGEST_SCATTER", 48 * 16 * 8)
    for module in (cross_entropy, token_log_probs):
        monkeypatch.setattr(module, "shares_of", lambda table, num_tokens: None)


@cache
def batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)
    mask = rng.random((ROWS, LENGTH)) > 0.2
    targets = np.where(mask, np.roll(tokens, -1, 1), -100).astype(np.int32)
    return {"tokens": tokens, "targets": targets, "loss_mask": mask.astype(np.float64)}


def gradients(mesh, sizes=None, dtype=np.float64, num_microbatches=2, model=None, given=None, **options):
    config = TransformerConfig(**SIZES | (sizes or {}))
    params = init_params(config, jax.random.key(1), dtype)
    plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas(mesh), num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), fsdp_gather="layer", **options)
    return fb(model or transformer(config), params, given or batch(), plan)


def replicas(mesh):
    return mesh.get("data", 1) * mesh.get("fsdp", 1) * mesh.get("expert", 1)


@cache
def of_one_device(sizes=()):
    """Whole tables: nothing is in shards."""
    return gradients({"data": 1}, dict(sizes), num_microbatches=1)


@pytest.mark.parametrize(
    ("mesh", "sizes", "options"),
    [
        ({"fsdp": 4}, {}, {"gather_ahead": True}),
        ({"fsdp": 2}, TIED, {}),
        ({"fsdp": 4}, WIDTH_CUT, {}),
        slow({"fsdp": 4}, TIED | WIDTH_CUT, {"gather_ahead": True}),
        slow({"fsdp": 2}, CAPPED, {}),
        slow({"fsdp": 2}, TIED | CAPPED, {"num_microbatches": 4}),
        slow({"data": 2, "fsdp": 2}, {}, {"optimizer_sharding": "data"}),
        slow({"fsdp": 2, "context": 2}, {}, {}),
        slow({"fsdp": 2, "tensor": 2}, {}, {}),
        slow({"fsdp": 2, "expert": 2}, {"num_experts": 4}, {"gather_ahead": True}),
        slow({"fsdp": 4}, {"mtp_depth": 1}, {"num_microbatches": 2}),
        slow({"fsdp": 4}, {"z_loss": 1e-3, "label_smoothing": 0.1}, {}),
        slow({"fsdp": 4}, {}, {"num_microbatches": 1, "gather_ahead": "half"}),
    ],
    ids=str,
)
def test_gradients_are_those_of_one_device(mesh, sizes, options):
    out, wanted = gradients(mesh, sizes, **options), of_one_device(tuple(sizes.items()))
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)
    close(out.metrics, wanted.metrics)


def uneven():
    """A batch of whose rows some weigh little."""
    mask = batch()["loss_mask"] * np.array([0.1, 1, 0.1, 1, 1, 2, 1, 1])[:, None]
    mask[2, 3:] = 0
    return batch() | {"loss_mask": mask}


@pytest.mark.parametrize("sizes", [{}, slow(TIED | CAPPED)], ids=str)
def test_devices_whose_microbatches_weigh_differently_each_scale_their_own_part(sizes):
    """A mean of the microbatches' means: the cotangent of a device's sum is one over the weight of its rows."""
    options = {"sizes": sizes, "normalize": "microbatch", "given": uneven()}
    out = gradients({"fsdp": 4}, **options)
    close(out.grads, gradients({"data": 1}, num_microbatches=ROWS, **options).grads)


@pytest.mark.parametrize("sizes", [{}, slow(TIED | CAPPED)], ids=str)
def test_a_loss_on_log_probs_may_weigh_the_tokens_of_each_device_differently(sizes):
    def loss(log_probs, entropy, microbatch):
        weights = microbatch["loss_mask"] * jnp.exp(microbatch["tokens"] / 20)
        total = jnp.sum(weights * (jnp.exp(log_probs) - 0.1 * entropy))
        return jaxfb.Sum(total, microbatch["loss_mask"].sum())

    own = heads.policy_loss_fn(transformer(TransformerConfig(**SIZES | sizes)), loss)
    out, wanted = (gradients(mesh, sizes, model=own) for mesh in ({"fsdp": 4}, {"data": 1}))
    close(out.grads, wanted.grads)


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [({"fsdp": 4}, TIED), ({"fsdp": 4}, WIDTH_CUT), slow({"fsdp": 2, "context": 2}, {})],
    ids=str,
)
def test_gradients_are_those_of_one_device_with_an_embedding_in_parts(mesh, sizes, monkeypatch):
    """Where its rows are not looked up by columns."""
    monkeypatch.setattr(look_up_module, "columns_of", lambda table, num_tokens: None)
    test_gradients_are_those_of_one_device(mesh, sizes, {})


def products_before_a_gather(early, monkeypatch, which=-1, number_before=0):
    """How many products must be there before a part of the head is gathered for its gradients.

    number_before: of products that run before these gradients.
    """
    monkeypatch.setattr(logits, "gathers_early", lambda: early)
    mesh = jaxfb.make_mesh(fsdp=4)
    head = table.Table(jnp.ones((4, VOCAB)), P("fsdp"), 1, jnp.dtype("float64"))

    def run(hidden):
        before = [hidden[0] @ hidden[0].T * number for number in range(number_before)]
        counted = jnp.ones(hidden.shape[:2], bool)
        given = lambda _, kernel: hidden[0] @ kernel, hidden, counted, head, 1.0, before  # noqa: E731
        return logits.gradients_by_part(*given)[0]

    run = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    program = [*equations(jax.make_jaxpr(run)(jnp.ones((1, LENGTH, 16))).jaxpr)]
    made_by = {id(var): eqn for eqn in program for var in eqn.outvars}
    wanted, seen = [[eqn for eqn in program if eqn.primitive.name == "all_gather"][which]], {}
    while wanted:
        for var in wanted.pop().invars:
            if (eqn := made_by.get(id(var))) is not None and id(eqn) not in seen:
                seen[id(eqn)] = eqn
                wanted.append(eqn)
    return sum(eqn.primitive.name == "dot_general" for eqn in seen.values())


def test_gathered_early_a_part_waits_for_fewer_products(monkeypatch):
    late, early = (products_before_a_gather(each, monkeypatch) for each in (False, True))
    assert 0 < early < late
    kinds = {"TPU v5p": True, "TPU v6 lite": True, "TPU v5 lite": False, "NVIDIA H100": False, None: False}
    for kind, expected in kinds.items():
        monkeypatch.setattr(table, "kind_here", lambda kind=kind: kind)
        assert table.gathers_early() == expected


@pytest.mark.parametrize("early", [False, True])
def test_no_part_is_gathered_for_gradients_before_the_scores_are_nearly_there(early, monkeypatch):
    """The first once the last but one of three products is there; the second once the last is, and what it made."""
    first, second = (products_before_a_gather(early, monkeypatch, which, 3) for which in (0, 1))
    assert first == 1 and second >= 1
    assert products_before_a_gather(early, monkeypatch, 0, 0) == 0


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("sizes", [{}, slow(TIED)], ids=str)
def test_gradients_are_those_of_one_device_however_early_parts_are_gathered(sizes, early, monkeypatch):
    monkeypatch.setattr(logits, "gathers_early", lambda: early)
    out, wanted = gradients({"fsdp": 4}, sizes), of_one_device(tuple(sizes.items()))
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


@pytest.mark.parametrize("trainable", [["layers"], ["head", "layers"], ["embed", "layers"]], ids=str)
@pytest.mark.slow
def test_a_frozen_table_is_gathered_whole(trainable):
    wanted = of_one_device().grads
    out = gradients({"fsdp": 2}, trainable=trainable).grads
    for name in trainable:
        close(out[name], wanted[name])


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"compute_dtype": "bfloat16"}, 0.1),
        slow({"compute_dtype": "bfloat16", "reduce_dtype": "bfloat16"}, 0.1),
        slow({"compute_dtype": "float16"}, 0.01),
        slow({"dtype": np.float32}, 3e-6),
    ],
    ids=str,
)
def test_in_other_dtypes_gradients_are_as_close_as_those_of_whole_tables(options, tolerance, monkeypatch):
    options = {"dtype": np.float32} | options
    wanted = of_one_device().grads
    in_parts = gradients({"fsdp": 2}, **options).grads
    monkeypatch.setattr(data, "LARGEST_SCATTER", 2**28)
    whole = gradients({"fsdp": 2}, **options).grads

    assert worst_error(in_parts, wanted) < min(tolerance, 1.3 * worst_error(whole, wanted))


def test_a_confident_token_has_the_gradient_of_its_own_target_to_the_last_digit():
    """Probabilities times the cap's slope are kept in bfloat16 but for the target, where that less the slope would be
    all error."""
    mesh, cap = jaxfb.make_mesh(fsdp=2), 30.0
    hidden, kernel = np.ones((1, 1, 8), np.float32), np.zeros((8, VOCAB), np.float32)
    kernel[:, 70] = 1.5
    targets, mask = np.full((1, 1), 70, np.int32), np.ones((1, 1), np.float32)

    def loss(shard):
        made = table.Table(shard, jax.P("fsdp"), 1, jnp.dtype("bfloat16"))
        given = jnp.asarray(hidden, jnp.bfloat16), made, targets, mask
        return chunked_cross_entropy(*given, logit_softcap=cap).loss_sum / 2  # on both devices

    run = jax.shard_map(
        jax.grad(loss), mesh=mesh, in_specs=jax.P("fsdp"), out_specs=jax.P("fsdp"), check_vma=False
    )
    grad = np.asarray(jax.jit(run)(kernel))
    capped = cap * np.tanh(kernel.astype(np.float64).sum(0) / cap)
    slope = 1 - (capped[70] / cap) ** 2
    wanted = slope * (np.exp(capped[70]) / np.exp(capped).sum() - 1)
    np.testing.assert_allclose(grad[:, 70], wanted, rtol=2**-8)


def largest_array(make, sizes, part):
    """Returns the largest dim of any array of a device with a dim of the width. make: config -> model, a new one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "LARGEST_SCATTER", part)
        config = TransformerConfig(**SIZES | sizes)
        params = jax.eval_shape(lambda: init_params(config, jax.random.key(1), jnp.float32))
        fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(fsdp=2), fsdp_gather="layer")
        plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=2, num_microbatches=4)
        program = jax.make_jaxpr(lambda p, b: fb(make(config), p, b, plan).grads)(params, batch())
        program, _ = cut_down(program, [True] * len(program.jaxpr.outvars))
    (inside,) = (one.params["jaxpr"] for one in equations(program.jaxpr) if one.primitive.name == "shard_map")
    shapes = [var.aval.shape for one in equations(inside) for var in one.outvars]
    return max(max(shape) for shape in shapes if len(shape) > 1 and SIZES["hidden_size"] in shape)


@pytest.mark.parametrize("sizes", [{}, TIED], ids=str)
def test_no_table_exists_whole(sizes):
    """Nor its gradient."""
    assert largest_array(transformer, sizes, 48 * 16 * 4) < VOCAB == largest_array(transformer, sizes, 2**28)


@pytest.mark.parametrize(
    ("shape", "vocabulary", "own", "number"),
    [
        ((4096, 128256), 1, 128256, 6),  # 167 columns of 128 each
        ((128256, 4096), 0, 2004, 6),  # a shard of 64; no number of parts fills tiles
        ((128256, 4096), 0, 501, 3),
        ((6144, 32768), 1, 32768, 4),
        ((1024, 32000), 1, 32000, 1),
        ((16384, 128257), 1, 128257, 1),  # 11 x 89 x 131
    ],
)
def test_the_number_of_parts(shape, vocabulary, own, number, monkeypatch):
    monkeypatch.setattr(data, "LARGEST_SCATTER", 2**28)
    assert table.num_parts(shape, vocabulary, own, "float32") == number


@pytest.mark.parametrize("sizes", [{}, TIED | CAPPED], ids=str)
def test_log_probs_and_entropies_are_made_in_parts_too(sizes):
    """Of a sampler with a temperature, that never draws some ids."""

    def loss(log_probs, entropy, microbatch):
        total = jnp.sum(jnp.exp(log_probs) - 0.1 * entropy * microbatch["loss_mask"])
        return jaxfb.LossOutput(
            {"loss": jaxfb.Sum(total, microbatch["loss_mask"].sum())}, outputs=(log_probs, entropy)
        )

    def make(config):
        return heads.policy_loss_fn(
            transformer(config), loss, temperature=0.7, absent_ids=((40, 60), (180, VOCAB))
        )

    own = make(TransformerConfig(**SIZES | sizes))
    out, wanted = (gradients(mesh, sizes, model=own) for mesh in ({"fsdp": 2}, {"data": 1}))
    close(out.outputs, wanted.outputs)
    close(out.grads, wanted.grads)
    assert largest_array(make, sizes, 48 * 16 * 4) < VOCAB == largest_array(make, sizes, 2**28)


def test_a_model_of_your_own_has_its_tables_in_parts():
    """Its embedding and its head each accept a `Table`; on one device they are given arrays."""
    given = []

    def embed(outer, microbatch, rng):
        words = outer["words"]
        given.append(isinstance(words, table.Table))
        return look_up(words, microbatch["tokens"])

    def head(outer, hidden, microbatch, rng):
        return next_token_loss(jnp.tanh(hidden), outer["answers"], microbatch, chunk=5)

    def layer(weights, hidden, microbatch, rng):
        return hidden + jnp.tanh(hidden @ weights["w"])

    model = jaxfb.Pipelined(embed, layer, head, tables=lambda outer: {"words": 0, "answers": 1})
    keys = jax.random.split(jax.random.key(3), 3)
    shapes = {"words": (VOCAB, 16), "answers": (16, VOCAB), "w": (3, 16, 16)}
    arrays = {
        name: jax.random.normal(key, shape, np.float64) / 4
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    params = {"words": arrays["words"], "answers": arrays["answers"], "layers": {"w": arrays["w"]}}

    def run(mesh):
        plan = jaxfb.BatchPlan(rows=ROWS, data_parallel=replicas(mesh), num_microbatches=2)
        fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), fsdp_gather="layer")
        return fb(model, params, batch(), plan)

    wanted = run({"data": 1})
    assert not any(given)
    out = run({"fsdp": 2})
    assert any(given)
    close(out.loss, wanted.loss)
    close(out.grads, wanted.grads)


@pytest.mark.slow
def test_a_loss_of_your_own_on_the_logits_gets_the_whole_head():
    model = transformer(TransformerConfig(**SIZES))

    def loss(unembedding, microbatch, axis):
        logits = (unembedding.hidden @ unembedding.kernel).astype(np.float64)
        scores = log_probs_of_logits(logits, jnp.maximum(microbatch["targets"], 0)).log_probs
        return jaxfb.Sum(-(microbatch["loss_mask"] * scores).sum(), microbatch["loss_mask"].sum())

    close(gradients({"fsdp": 2}, model=heads.with_head(model, loss)).grads, of_one_device().grads)


@pytest.mark.parametrize(
    ("size", "pipe", "tensor", "chosen"),
    [(12, 2, 3, "vocabulary"), (10, 2, 3, "last"), (15, 2, 3, "last"), (10, 1, 10, "vocabulary")],
)
def test_the_ends_of_a_pipeline_share_a_vocabulary_that_stages_times_shards_divide(
    size, pipe, tensor, chosen
):
    """Leaves without a vocabulary do not count."""
    config = TransformerConfig(**SIZES | {"vocab_size": size})
    params = jax.eval_shape(lambda key: init_params(config, key), jax.random.key(0))
    assert choose_placement(None, transformer(config), outer_params(params), pipe, tensor) == chosen
