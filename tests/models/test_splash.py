"""Splash attention without a TPU: its numbers in Pallas' interpreter, where it is chosen, what a TPU has to run."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.config import load_config
from jaxfb.forward_backward import Microbatches
from jaxfb.mesh import AXES
from jaxfb.models import attend, attention
from jaxfb.models.attend import context_method
from jaxfb.models.attention import check_backend, choose_backend, packed_attention
from jaxfb.models.attention_kernels import cudnn, splash, splash_gather, splash_ring, splash_whole
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
from jaxfb.parallel.scores import Scores
from jaxfb.planner import attends, parse_topology
from jaxfb.planner.job import model_sizes
from jaxfb.planner.program_cost.routing import equations

TPU = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
LENGTH, HEADS, KV_HEADS, SIZE = 256, 4, 2, 16
SIZES = dict(
    vocab_size=64, num_layers=4, hidden_size=HEADS * SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, mlp_size=64
)


@pytest.fixture(autouse=True)
def integers_of_32_bits():
    """As outside tests, where only float64 asks for more; with 64 the kernel's grouped heads do not trace."""
    with jax.enable_x64(False):
        yield


def tpu_mesh(kind=AxisType.Auto, **sizes) -> AbstractMesh:
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    return AbstractMesh(shape, AXES, axis_types=(kind,) * len(AXES), abstract_device=TPU)


def in_engine(mesh: AbstractMesh) -> AbstractMesh:
    """As a layer sees it: every axis but tensor is manual."""
    return mesh.update_axis_types({axis: AxisType.Manual for axis in AXES if axis != "tensor"})


def documents(rows: int) -> jax.Array:
    """Segments in falling order of length, the last tokens of a row padding."""
    drawn = np.random.default_rng(0).integers(0, 4, (rows, LENGTH))
    return jnp.asarray(np.sort(drawn, axis=1)[:, ::-1], jnp.int32)


@pytest.fixture
def small_blocks(monkeypatch):
    """Four of them, one of which is skipped."""
    monkeypatch.setattr(splash, "LARGEST_BLOCK", 128)
    kernel = splash_whole._kernel
    kernel.cache_clear()
    yield
    kernel.cache_clear()


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    "kv_heads, packed, window, softcap",
    [
        pytest.param(HEADS, False, None, None, marks=pytest.mark.slow),
        pytest.param(KV_HEADS, True, None, None, marks=pytest.mark.slow),
        (KV_HEADS, True, 70, 2.0),
    ],
)
def test_the_kernel_is_attention_and_its_gradient_is_too(kv_heads, packed, window, softcap):
    """In float32, to 5e-6 of the largest number: both sum 256 products, in another order."""
    keys = jax.random.split(jax.random.key(0), 4)
    heads = (HEADS, kv_heads, kv_heads, HEADS)
    *inputs, cotangent = (
        jax.random.normal(key, (2, LENGTH, n, SIZE), jnp.float32) for key, n in zip(keys, heads, strict=True)
    )
    how = dict(segments=documents(2) if packed else None, window=window)

    sinks = [] if softcap is None else [jnp.linspace(-1, 2, HEADS, dtype=jnp.float32)]

    def with_gradient(run):
        def scored(query, key, value, *sinks):
            return run(query, key, value, scores=Scores(softcap, *sinks))

        out, vjp = jax.vjp(scored, *inputs, *sinks)
        return out, *vjp(cotangent)

    ours = jax.jit(lambda: with_gradient(partial(splash_whole.splash_attention, **how, interpret=True)))
    theirs = jax.jit(lambda: with_gradient(partial(packed_attention, **how, backend="xla")))
    for kernel, plain in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(kernel, plain, rtol=0, atol=5e-6 * float(jnp.abs(plain).max()))


@pytest.mark.parametrize(
    "case, refusal",
    [
        ({}, None),
        (dict(dtype=jnp.float32, size=64), None),
        (dict(length=128, size=256), None),
        (dict(tensor=2), None),
        (dict(dtype=jnp.float16), "bfloat16 and float32, not float16; use compute_dtype='bfloat16'"),
        (dict(length=200), "multiples of 128, not 200; use a sequence length of 256"),
        (dict(length=16), "multiples of 128, not 16; use a sequence length of 128"),
        (dict(size=320), "head sizes up to 256, not 320; use head_size=256"),
        (dict(tensor=4), "kv heads that tensor=4 divides, not 2; use num_kv_heads=4"),
    ],
)
def test_auto_is_splash_on_a_tpu_wherever_it_can_train_and_asking_elsewhere_is_refused(case, refusal):
    shape = dict(dtype=jnp.bfloat16, length=LENGTH, size=128, tensor=1) | case
    config = TransformerConfig(
        vocab_size=8, num_layers=1, hidden_size=8, num_heads=4, num_kv_heads=2, head_size=shape["size"]
    )
    where = (tpu_mesh(data=2, tensor=shape["tensor"]), shape["dtype"], shape["length"])
    wanted = "xla" if refusal else "splash"
    with jax.sharding.use_abstract_mesh(in_engine(where[0])):
        shapes = (jax.ShapeDtypeStruct((2, where[2], n, config.head_size), where[1]) for n in (4, 2))
        assert choose_backend("auto", *shapes, packed=True) == wanted
    check_backend(config, *where, packed=True)
    asked = replace(config, attention="splash")
    if refusal is None:
        return check_backend(asked, *where, packed=True)
    with pytest.raises(ValueError, match=f"attention='splash' takes .*{refusal}, or attention='auto'"):
        check_backend(asked, *where, packed=True)


def test_over_a_context_axis_auto_gathers_keys_where_a_kernel_takes_them_and_else_passes_them_around():
    def chosen(asked="auto", backend="auto", length=LENGTH, platform="tpu") -> str:
        shapes = (jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16) for n in (4, 2))
        mesh = in_engine(tpu_mesh(context=2, fsdp=2))
        with jax.sharding.use_abstract_mesh(mesh if platform == "tpu" else mesh.update(abstract_device=None)):
            return context_method(asked, backend, *shapes)

    assert chosen() == chosen(backend="splash") == "all_gather"
    assert chosen(backend="xla") == chosen(length=64) == chosen(platform="cpu") == "ring"
    assert chosen(length=2**20) == "ring"  # the tables of blocks would be too large
    assert [chosen(asked) for asked in ("ring", "all_to_all")] == ["ring", "all_to_all"]


def test_over_a_context_axis_each_method_has_its_kernel_and_no_other():
    def kernel(method, backend="auto", window=None, length=LENGTH):
        shapes = (jax.ShapeDtypeStruct((1, length, n, 128), jnp.bfloat16) for n in (4, 2))
        with jax.sharding.use_abstract_mesh(in_engine(tpu_mesh(context=2, fsdp=2))):
            found = attend._context_kernel(method, backend, window, *shapes, True)
        return getattr(found, "func", found), getattr(found, "keywords", {})

    assert kernel("all_gather") == (splash_gather.splash_gathered, {"window": None})
    assert kernel("all_gather", window=5) == (splash_gather.splash_gathered, {"window": 5})
    assert kernel("ring") == kernel("ring", "splash") == (splash_ring.splash_ring, {})
    others = kernel("ring", window=5), kernel("ring", length=64), kernel("all_gather", length=64)
    methods = kernel("all_to_all"), kernel("ring", "xla"), kernel("all_gather", "xla")
    assert {found for found, _ in (*others, *methods)} == {None}


def test_over_a_context_axis_of_gpus_auto_exchanges_heads_or_gathers_keys_where_a_kernel_runs(monkeypatch):
    for module in (attend, attention, splash):
        monkeypatch.setattr(module, "platform_here", lambda: "gpu")
    monkeypatch.setattr(cudnn, "compute_capability", lambda: 9.0)

    def chosen(backend="auto", heads=8, length=32768, tensor=1, **scores) -> str:
        shapes = (jax.ShapeDtypeStruct((1, length // 2, n, 128), jnp.bfloat16) for n in (2 * heads, heads))
        with jax.sharding.use_abstract_mesh(in_engine(tpu_mesh(context=2, tensor=tensor))):
            return context_method("auto", backend, *shapes, **scores)

    assert {chosen(), chosen("cudnn"), chosen(length=2**17), chosen(tensor=4)} == {"all_to_all"}
    assert {chosen(heads=3), chosen(tensor=8)} == {"all_gather"}
    assert {chosen("xla"), chosen(length=20), chosen(plain=False)} == {"ring"}


def test_the_planner_chooses_as_the_model_does_over_a_context_axis():
    def counted(topology="v5p:2x2x2", length=65536, packing="concat", **options) -> str:
        given = [f"model.{name}={value}" for name, value in options.items()]
        given += ["mesh.cp=4", f"data.sequence_length={length}", f"data.packing={packing}"]
        config = load_config("configs/8b.yaml", given)
        return attends.context_method(config, model_sizes(config), parse_topology(topology))

    assert counted() == "all_gather"
    assert counted(attention="xla") == counted(length=512) == "ring"
    assert counted(context_attention="all_to_all") == "all_to_all"
    assert counted("gpu:h100x8", 32768) == counted("gpu:h100x8", packing="stream") == "all_to_all"
    assert counted("gpu:h100x8", num_kv_heads=2) == "all_gather"
    assert counted("gpu:h100x8", num_kv_heads=2, attention="xla") == "ring"


def test_where_integers_have_64_bits_attention_is_plain():
    query = jax.ShapeDtypeStruct((2, LENGTH, HEADS, SIZE), jnp.bfloat16)
    mesh = tpu_mesh(AxisType.Manual)
    with jax.enable_x64(True), jax.sharding.use_abstract_mesh(mesh):
        assert choose_backend("auto", query, query, packed=False) == "xla"
        with pytest.raises(ValueError, match="needs jax_enable_x64 off; turn it off"):
            choose_backend("splash", query, query, packed=False)


def test_splash_is_for_tpus_and_never_for_the_partitioner():
    query = jax.ShapeDtypeStruct((2, LENGTH, HEADS, SIZE), jnp.bfloat16)
    with pytest.raises(ValueError, match="runs on TPUs, not on a cpu; use attention='xla'"):
        choose_backend("splash", query, query, packed=False)
    with jax.sharding.use_abstract_mesh(tpu_mesh(data=2)):  # all of it automatic
        assert choose_backend("auto", query, query, packed=False) == "xla"
        with pytest.raises(
            ValueError, match="automatic axes, here pipe, data, .*; run it inside jax.shard_map"
        ):
            choose_backend("splash", query, query, packed=False)


@pytest.mark.parametrize("length, block", [(128, 128), (384, 384), (640, 128), (768, 384), (4096, 512)])
def test_a_block_divides_the_length(length, block):
    assert splash.block_size(length) == block


def traced_step(mesh, remat, context_attention="auto", **options):
    """An update of eight rows in bfloat16, traced for a mesh of TPUs that do not exist."""
    config = TransformerConfig(**SIZES, context_attention=context_attention)
    data, length = mesh.shape["data"], LENGTH * mesh.shape["context"]
    plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=1, data_parallel=data)
    step = jaxfb.make_train_step(
        transformer(config), optax.sgd(1e-3), mesh, plan, dropout=False, remat=remat, compute_dtype=jnp.bfloat16,
        **options,
    )  # fmt: skip
    rows = NamedSharding(mesh, P(None, "data"))
    leaf = lambda dtype: jax.ShapeDtypeStruct((8 // data, data, length), dtype, sharding=rows)  # noqa: E731
    batch = {name: leaf(jnp.int32) for name in ("tokens", "targets", "segments")}
    batch["loss_mask"] = leaf(jnp.float32)
    return step.trace(step.abstract_state(lambda key: init_params(config, key)), Microbatches(batch))


def runs(traced) -> dict[str, int]:
    """How often one device runs each of the two kernels in an update."""
    found = dict.fromkeys(("mha_fwd", "gradients"), 0)
    needed, _ = dce_jaxpr(traced.jaxpr.jaxpr, [True] * len(traced.jaxpr.jaxpr.outvars))
    for eqn, times in equations(needed):
        if eqn.primitive.name == "pallas_call":
            found[re.match("splash_(mha_fwd|gradients)_", eqn.params["name"])[1]] += times
    return found


PIPE = dict(pipe=2, tensor=2)
RING = dict(context_attention="ring")


@pytest.mark.parametrize(
    "sizes, remat, options, forward",
    [
        (dict(data=2, tensor=2), "none", {}, 1),
        pytest.param(dict(data=2, tensor=2), "selective", {}, 1, marks=pytest.mark.slow),
        (dict(data=2, tensor=2), "full", {}, 2),
        pytest.param(dict(data=2, context=3, tensor=2), "full", {}, 2, marks=pytest.mark.slow),
        pytest.param(dict(data=2, context=3, tensor=2), "full", RING, 2, marks=pytest.mark.slow),
        pytest.param(dict(data=2, context=3, tensor=2), "selective", RING, 1, marks=pytest.mark.slow),
        pytest.param(PIPE, "none", dict(schedule="1f1b"), 1, marks=pytest.mark.slow),
        pytest.param(PIPE, "selective", dict(schedule="1f1b"), 1, marks=pytest.mark.slow),
        pytest.param(PIPE, "layer", dict(schedule="1f1b"), 2, marks=pytest.mark.slow),
        pytest.param(PIPE, "selective", dict(schedule="zero_bubble"), 1, marks=pytest.mark.slow),
        pytest.param(PIPE, "selective", dict(num_pieces=2), 1, marks=pytest.mark.slow),
        pytest.param(PIPE, "layer", dict(num_pieces=2), 2, marks=pytest.mark.slow),
    ],
)
def test_a_layer_runs_the_forward_kernel_once_unless_it_is_recomputed_whole(sizes, remat, options, forward):
    traced = traced_step(tpu_mesh(**sizes), remat, **options)
    found = runs(traced)
    assert found["mha_fwd"] == forward * found["gradients"] > 0
    if "pipe" not in sizes:
        turns = (
            sizes["context"] if options is RING else 1
        )  # a shard has one head of keys, so one group is gathered
        assert found["gradients"] == 4 * 4 * turns  # layers, microbatches
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and f"{LENGTH}x{LENGTH}" not in text
    assert not shared_functions_with_manual_parts(text)


@pytest.mark.parametrize("remat, forward", [("full", 2), ("selective", 1)])
def test_heads_in_place_of_tokens_attend_by_the_kernel(remat, forward):
    test_a_layer_runs_the_forward_kernel_once_unless_it_is_recomputed_whole(
        dict(data=2, context=2), remat, dict(context_attention="all_to_all"), forward
    )


def shared_functions_with_manual_parts(text: str) -> list[str]:
    """Functions with a `shard_map` in them that are called twice: on those XLA for TPUs ends the process."""
    bodies = re.findall(r"func\.func private @(\w+)\((.*?)\n  }", text, re.DOTALL)
    return [
        name
        for name, body in bodies
        if "manual_computation" in body and len(re.findall(rf"call @{name}\(", text)) > 1
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.slow
def test_gradients_of_a_pipeline_are_those_of_one_device_and_plain_attention(monkeypatch):
    """The engine with the kernel interpreted, in float32: 2e-5 of the largest gradient of a leaf."""
    monkeypatch.setattr(splash, "platform_here", lambda: "tpu")
    interpreted = partial(splash_whole.splash_attention, interpret=True)
    monkeypatch.setattr(splash_whole, "splash_attention", interpreted)
    plan, one = (jaxfb.BatchPlan(rows=4, rows_per_microbatch=size) for size in (1, 4))
    tokens = jax.random.randint(jax.random.key(1), (4, LENGTH), 0, 64)
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": jnp.ones((4, LENGTH), jnp.float32)}
    batch["segments"] = documents(4)
    config = TransformerConfig(**SIZES)
    params = init_params(config, jax.random.key(0))

    def gradients(mesh, backend, plan, **how):
        fb = jaxfb.get_forward_backward_func(mesh, **how)
        model = transformer(replace(config, attention=backend))
        return jax.jit(lambda p, b: fb(model, p, b, plan).grads)(params, batch)

    mesh = jaxfb.make_mesh(**PIPE, devices=jax.devices()[:4])
    ours = gradients(mesh, "splash", plan, remat="selective", schedule="zero_bubble")
    theirs = gradients(None, "xla", one)

    def close(mine, plain):
        np.testing.assert_allclose(mine, plain, rtol=0, atol=2e-5 * float(jnp.abs(plain).max()))

    jax.tree.map(close, ours, theirs)
