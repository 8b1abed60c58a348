"""Calls that are refused with advice: a function, and arguments of which one or two are wrong."""

import dataclasses
import os
import pathlib
import tempfile
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import optax

import jaxfb
from jaxfb import BatchPlan, LossOutput, Pipelined, RolloutPlan, RunPlan, Sum, gradients, make_mesh
from jaxfb.config import config_from_dict
from jaxfb.config.model import check_sizes
from jaxfb.config.operation import HostsConfig
from jaxfb.config.post_training import CutConfig
from jaxfb.config.sections import AnyRunConfig, AutoMesh
from jaxfb.config.starter import write_starter
from jaxfb.data.config import DataConfig, SourceConfig
from jaxfb.data.loader import Loader
from jaxfb.forward_backward.equivalence import _check_dtype
from jaxfb.forward_backward.head_placement import _check_sum, check_rows, choose_placement
from jaxfb.forward_backward.layers.last_microbatch import check_overlap, obstacle_to_overlap
from jaxfb.forward_backward.loss_function.traced import Traced
from jaxfb.forward_backward.offered import check_offers_pieces
from jaxfb.forward_backward.pipeline.pieces import check_lengths, check_terms
from jaxfb.losses.kl import AdaptiveKL, kl_in_reward
from jaxfb.losses.surrogates import make_surrogate
from jaxfb.mesh import with_context
from jaxfb.models.adapted import LoRA
from jaxfb.models.attention import choose_backend
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate_arguments import check_filters, checked_temperatures
from jaxfb.models.latent import Latent
from jaxfb.models.layout import layers_of_stages
from jaxfb.models.lora import check_targets
from jaxfb.models.pattern import LayerKind
from jaxfb.models.rope_scaling import RopeScaling
from jaxfb.models.variant import Variant
from jaxfb.parallel.context import context_attention, zigzag
from jaxfb.parallel.expert import check_expert_divides
from jaxfb.parallel.host_memory import check_memory
from jaxfb.parallel.pipe import layout_of
from jaxfb.parallel.tensor import check_tensor_divides
from jaxfb.planner.auto import _check_stages
from jaxfb.pretrained.peft import _check_config as peft_config
from jaxfb.recomputation import check_gathered_layers, check_remat_layers
from jaxfb.rl.advice import changed
from jaxfb.rl.sampler import Sampler
from jaxfb.rl.start import check_head, check_packing
from jaxfb.rl.supervised import row_length
from jaxfb.rl.tasks import Arithmetic
from jaxfb.schedules import KINDS, make
from jaxfb.schedules.draw import timeline_figure
from jaxfb.trainable import checked_patterns, pruned
from jaxfb.training.from_config.sizes import model_sizes
from jaxfb.training.job.cluster import find_place
from jaxfb.training.machine import check_continuation
from tests.data.test_loader import numbered_rows
from tests.rl.test_checks import plan_of, with_
from tests.rl.test_policy import TINY

FILES = tempfile.TemporaryDirectory()  # removed at the end of the process
SIZES = dict(vocab_size=32, num_layers=2, hidden_size=16, num_heads=4)
PLAN = BatchPlan(rows=8, rows_per_microbatch=2)
MODEL = Pipelined(*[lambda *_: None] * 3)  # never run
COUNTED = jaxfb.types.Counted(*[lambda *_: None] * 2)
OWN = {
    "model": "math:sqrt",
    "params": "math:sqrt",
    "data": "math:sqrt",
    "batch": {"rows": 8, "rows_per_microbatch": 2},
    "run": {"dir": "runs/own", "updates": 3},
}


def run_plan(**given):
    return RunPlan(**{"plans": PLAN, **given})


def section(config, name, /, **wrong):
    """A section of a starter config: its class, and its values with some of them changed."""
    plain = getattr(jaxfb.load_config(config), name)
    return type(plain), {**vars(plain), **wrong}


def config(name, *path, **wrong):
    """A starter config with dotted keys changed; a double underscore stands for the dot."""
    plain = jaxfb.load_config(name)
    return lambda **keys: changed(plain, keys), {key.replace("__", "."): v for key, v in wrong.items()}


def own_config(**keys):
    return changed(config_from_dict(OWN), keys)


ONE_SAMPLE = dict(
    plans={"train": BatchPlan(rows=4, rows_per_microbatch=2)},
    **dict(prompts=2, samples_per_prompt=1, rows_per_update=4, groups="grpo"),
)


def policy_plans(**keys):
    return plan_of(changed(with_(), keys))


def without_tokens(**keys):
    return check_head(changed(jaxfb.load_config("dpo"), {"start.run": None, "model": TINY["model"], **keys}))


def packed_and_dropped(**keys):
    """The check of an update by packed rows of a model that drops."""
    cut = {"plans.train.max_tokens_per_microbatch": 64, "plans.train.rows_per_microbatch": None}
    config = changed(with_({"model": {"dropout": 0.1}}), {**cut, "plans.train.packing": True, **keys})
    sizes = TransformerConfig(
        vocab_size=16, num_layers=1, hidden_size=8, num_heads=2, dropout=config.model.dropout
    )
    cuts = {"rows": 8, "max_tokens_per_microbatch": 64, "sequence_length": 8}
    return check_packing(config, sizes, BatchPlan(**cuts, packing=config.plans.train.packing))


def width(context=1):
    """The width of the rows of fine-tuning, for a longest conversation of 50 tokens."""
    plain, mesh = jaxfb.load_config("sft"), make_mesh(context=context)
    return lambda **keys: row_length(
        SimpleNamespace(config=changed(plain, keys), mesh=mesh), "conversations", 50
    )


def vocabulary(**keys):
    return model_sizes(changed(jaxfb.load_config("quickstart"), keys), 257)


def clip(max_grad_norm=None, clip_convention="exact"):
    gradients.check_clipping(max_grad_norm, clip_convention)


def compared(dtype):
    return _check_dtype(dtype, "float32")


def rows_of_head(head_placement="rows", rows_per_microbatch=2):
    check_rows(head_placement, rows_per_microbatch, 2)


def placement(head_placement):
    return choose_placement(head_placement, MODEL, {}, 2, 1)


def tensor(tensor=1, **sizes):
    check_tensor_divides(TransformerConfig(**SIZES | {"num_kv_heads": 2, "mlp_size": 12} | sizes), tensor)


def experts(num_experts=4, expert=1):
    check_expert_divides(TransformerConfig(**SIZES, num_experts=num_experts), expert)


def sampler(**given):
    return Sampler(TransformerConfig(**SIZES), make_mesh(), 4, 4, (0,), **given)


def filters(top_k=None, **shares):
    check_filters(TransformerConfig(**SIZES), top_k, **shares)


def temperatures(temperature):
    checked_temperatures(temperature, 1.0, None)


def arithmetic(held_out):
    return Arithmetic(digits=1, num_held_out=held_out).train


def stages(layers_per_stage):
    return layers_of_stages(layers_per_stage, TransformerConfig(**{**SIZES, "num_layers": 2}))


def over_tokens(method):
    heads = np.zeros((1, 4, 2, 4), np.float32)
    return context_attention(heads, heads, heads, segments=None, method=method)


def attention(backend):
    shape = jax.ShapeDtypeStruct((1, 8, 4, 4), "float32")
    return choose_backend(backend, shape, shape, packed=False)


def reward(estimator):
    return kl_in_reward(*[np.zeros((1, 2))] * 3, np.ones((1, 2)), 0.1, estimator)


def drawn(path):
    return timeline_figure(make("1f1b", 1, 1), pathlib.Path(FILES.name) / path)


def started(name):
    return write_starter(name, pathlib.Path(tempfile.mkdtemp(dir=FILES.name)))


def place(**given):
    return find_place(
        HostsConfig(**{"coordinator": "localhost:1", "processes": 2, "process_id": 0, **given}), {}
    )


def left_behind(cluster):
    """A place where a launcher of jobs left a variable that is no number, which jax reads from os.environ."""
    left = {
        "SLURM_JOB_ID": "two",
        "SLURM_STEP_NODELIST": "node[003-004]",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    with mock.patch.dict(os.environ, left):
        return find_place(HostsConfig(cluster=cluster))


def packed_step(dropout=True):
    plan = BatchPlan(rows=8, max_tokens_per_microbatch=64, sequence_length=8, packing=True)
    return jaxfb.make_train_step(
        lambda params, microbatch, rng: None, optax.sgd(0.1), None, plan, dropout=dropout
    )


def memory_of_toaster(optimizer_memory):
    toaster = SimpleNamespace(device_kind="toaster", addressable_memories=lambda: [])
    return check_memory(optimizer_memory, SimpleNamespace(devices=np.array([toaster])))


def reordered_step(layer_order="pipeline"):
    return jaxfb.make_train_step(
        Pipelined(lambda *_: None, lambda *_: None, lambda *_: None),
        optax.sgd(0.1),
        make_mesh(pipe=2),
        BatchPlan(rows=8, rows_per_microbatch=2),
        schedule="v_shape",
        num_chunks=2,
        change_gradients=lambda grads, state: grads,
        layer_order=layer_order,
    )


def options_on_fsdp(**given):
    return jaxfb.get_forward_backward_func(make_mesh(pipe=2, fsdp=2), **given)


def gathered_of_a_function(fsdp_gather):
    fb = jaxfb.get_forward_backward_func(fsdp_gather=fsdp_gather)
    params, batch = {"w": np.ones(2)}, {"x": np.ones((8, 2))}
    return fb(lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"]).sum(), 1.0), params, batch, PLAN)


def half_a_function_ahead(gather_ahead):
    fb = jaxfb.get_forward_backward_func(gather_ahead=gather_ahead)
    params, batch = {"w": np.ones(2)}, {"x": np.ones((8, 2))}
    return fb(lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"]).sum(), 1.0), params, batch, PLAN)


def reduced_late(overlap_grad_reduce=True, schedule=None, optimizer_sharding="none"):
    check_overlap(overlap_grad_reduce, True, obstacle_to_overlap(schedule, optimizer_sharding))


def weighed(weights):
    fb = jaxfb.get_forward_backward_func(normalize="microbatch")
    params, batch = {"w": np.ones(2)}, {"x": np.ones((8, 2))}
    return fb(
        lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"]).sum(), 1.0), params, batch, PLAN, weights=weights
    )


def donated(donate):
    weight = jax.numpy.ones(())
    loss = lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"] * p["v"]).sum(), 1.0)  # noqa: E731
    step = jaxfb.make_train_step(loss, optax.sgd(0.1), None, PLAN)
    return step.init({"w": weight, "v": weight}, donate=donate)


def reduced_of_a_function(overlap_grad_reduce):
    fb = jaxfb.get_forward_backward_func(overlap_grad_reduce=overlap_grad_reduce)
    params, batch = {"w": np.ones(2)}, {"x": np.ones((8, 2))}
    return fb(lambda p, mb, rng: jaxfb.Sum((mb["x"] * p["w"]).sum(), 1.0), params, batch, PLAN)


def pieces_on(context=2, num_pieces=2, schedule=None):
    return jaxfb.get_forward_backward_func(
        make_mesh(pipe=2, context=context), schedule, num_pieces=num_pieces
    )


def pieces_of_a_table(num_pieces):
    fb = jaxfb.get_forward_backward_func(
        make_mesh(pipe=2, devices=jax.devices()[:2]), make("seq1f1b", 2, 4, 1, 4), num_pieces=num_pieces
    )
    return fb.schedule_for(4)


def chunks_of_a_table(num_chunks):
    fb = jaxfb.get_forward_backward_func(
        make_mesh(pipe=2, devices=jax.devices()[:2]), make("1f1b", 2, 4), num_chunks=num_chunks
    )
    return fb.schedule_for(4)


def pieces_with_penalty(num_pieces, schedule):
    """The engine asks this of pieces only."""
    if num_pieces > 1:
        tokens = jax.ShapeDtypeStruct((1, 4), np.float32)
        check_terms(lambda outer, *_: jaxfb.Sum(outer, 1.0), np.ones(()), tokens, (tokens, None), num_pieces)


def rows_with_penalty(head_placement):
    """The engine asks this of shares of the rows only."""

    def traced(rows):
        rows = jax.ShapeDtypeStruct((rows,), np.float32)
        return Traced(
            lambda outer, data, _: LossOutput({"loss": Sum(outer + data.sum())}), np.ones(()), rows, None
        )

    if head_placement == "rows":
        share, whole = traced(1), traced(2)
        _check_sum("loss", Sum, share, whole, share.places.terms["loss"].total)


def pieces_of_model(num_pieces, schedule=None):
    return check_offers_pieces(MODEL, num_pieces)


def compiled_with(**given):
    one = make_mesh(devices=jax.devices()[:1])
    return jaxfb.get_forward_backward_func(one, **given).compiler_options


def sizes_of_a_directory(**given):
    return check_sizes("a directory", {"num_layers": 4}, given)


def over_context(max_context, normalize="global", counted=None):
    fb = jaxfb.get_forward_backward_func(make_mesh(context=2, devices=jax.devices()[:2]), normalize=normalize)
    sizes = dict(rows=8, max_tokens_per_microbatch=64, sequence_length=8)
    return fb.check_plan(
        dataclasses.replace(MODEL, counted=counted), BatchPlan(**sizes, max_context=max_context)
    )


def latent_head(**given):
    return Latent(**given).check_head(8)


LATENT = dict(key_value_rank=4, rotary_size=4, value_size=4)
SIZES = dict(vocab_size=32, num_layers=2, hidden_size=32, num_heads=4)


def rotary_size(**given):
    return Variant(**given).rotary_size(8)


def targets(**given):
    return check_targets(LoRA(**given), {"attention": {"query": {"kernel": np.ones(1)}}})


def config_of_an_adapter(**given):
    values = {"r": 4, "lora_alpha": 16.0}
    return peft_config(pathlib.Path("adapter"), values, LoRA(rank=given["lora.rank"]))


def trained(**given):
    return pruned(checked_patterns(given["trainable"]), {"head": {"kernel": np.ones(1)}})


def loader(**given):
    return Loader(numbered_rows(11), **{"rows_per_update": 3, **given})


REFUSED = [
    # plans
    (BatchPlan, dict(purpose="logprob_ref", rows=10, rows_per_microbatch=4, remainder="drop")),
    (run_plan, dict(tokens=1000, sequence_length=300, remainder="error")),
    (run_plan, dict(epochs=1, dataset_rows=1001, remainder="error")),
    (run_plan, dict(samples=9, remainder="error")),
    (run_plan, dict(updates=3, dataset_rows=5, remainder="drop")),
    (run_plan, dict(samples=5, remainder="drop")),
    (run_plan, dict(epochs=100, dataset_rows=2**60 + 1)),
    (run_plan, dict(epochs=2.0**40, dataset_rows=2**40)),
    (RolloutPlan, ONE_SAMPLE),
    (policy_plans, {"rollout.rows_per_update": 12}),
    (policy_plans, {"plans.train.rows_per_microbatch": 5}),
    (policy_plans, {"plans.logprob_old": None}),
    # configs
    section("quickstart", "batch", rows=-1),
    section("quickstart", "batch", rows_per_microbatch=None, num_microbatches=None),
    section("quickstart", "run", tokens=5),
    section("quickstart", "run", tokens=5, updates=3, epochs=1.0),
    section("quickstart", "run", **dict.fromkeys(("updates", "samples", "tokens", "epochs"))),
    section("quickstart", "run", dir=" "),
    section("sft", "model", name="other"),
    section("quickstart", "run", seed=2**32 + 5),
    section("quickstart", "mesh", data=-1, fsdp=-1, tensor=-1),
    section("quickstart", "optimizer", weight_decay_initial=0.5, weight_decay_ramp="constant"),
    section("quickstart", "optimizer", weight_decay=-1.0),
    section("grpo_arithmetic", "task", operations="+/"),
    section("grpo_arithmetic", "task", operations="+-+"),
    section("grpo_arithmetic", "task", template="chatmll"),
    section("grpo_arithmetic", "task", template="no such"),
    section("grpo_arithmetic", "rollout", importance_cap=2.0, log_probs="sampler"),
    section("grpo_arithmetic", "rollout", importance_cap=1.0),
    section("grpo_arithmetic", "advantage", gamma=2.0),
    section("grpo_arithmetic", "reward", kl_coef=0.0, target=1.0),
    section("sft", "start", stop_tokens=()),
    section("sft", "conversations", held_out_fraction=1.0),
    section("sft", "batch", updates=None, epochs=None),
    section("sft", "batch", updates=3, epochs=1.0),
    section("dpo", "preferences", label_smoothing=0.5),
    section("sft", "conversations", held_out_path=""),
    section("sft", "start", tokenizer=""),
    section("quickstart", "parallel", layers_per_stage=()),
    (CutConfig, dict(max_tokens_per_microbatch=64, widths=())),
    config("sft", start__run="runs/other"),
    *(config("dpo", **{f"plans__{name}__packing": True}) for name in ("train", "logprob_ref")),
    *((without_tokens, {f"model.{name}": 1}) for name in ("z_loss", "mtp_depth")),
    (without_tokens, {"model.label_smoothing": 0.1}),
    (packed_and_dropped, {}),
    config("quickstart", schedule="1f1b"),
    section("quickstart", "guard", spike_window=1),
    config("quickstart", guard__spikes="rollback", checkpoint__every=None),
    config("grpo_arithmetic", guard__spikes="rollback"),
    config("grpo_arithmetic", advantage__gamma=0.9),
    config("quickstart", lr__final=100.0),
    config("quickstart", lr__warmup=10**6),
    config("quickstart", precision__frozen_dtype="bfloat16"),
    (LoRA, dict(alpha=-1.0)),
    (LoRA, dict(targets="query")),
    (targets, dict(targets=("keys",))),
    (config_of_an_adapter, {"lora.rank": 8}),
    (trained, dict(trainable="head.*")),
    (trained, dict(trainable=["haed.*"])),
    *((filters, wrong) for wrong in (dict(top_p=1.5), dict(min_p=0.0), dict(top_k=0), dict(top_k=33))),
    (temperatures, dict(temperature=1.0)),
    (sizes_of_a_directory, dict(num_layers=3)),
    (rotary_size, dict(rotary_share=0.4)),
    (latent_head, {**LATENT, "value_size": 10}),
    (Latent, {**LATENT, "rotary_size": 3}),
    (TransformerConfig, dict(**SIZES, num_kv_heads=2, latent=Latent(**LATENT))),
    (TransformerConfig, dict(**SIZES, num_experts=8, router_groups=3)),
    (TransformerConfig, dict(**SIZES, num_experts=8, router_groups=2, router_top_groups=3)),
    (options_on_fsdp, dict(schedule="zb_v", num_chunks=2)),
    (over_context, dict(max_context=4)),
    (over_context, dict(max_context=2, normalize="microbatch")),
    (over_context, dict(max_context=2, counted=COUNTED)),
    (lambda size: with_context(make_mesh(context=4, devices=jax.devices()[:4]), size), dict(size=3)),
    (BatchPlan, dict(rows=8, max_tokens_per_microbatch=9, sequence_length=9, max_context=2)),
    (BatchPlan, dict(rows=8, max_tokens_per_microbatch=50, sequence_length=100, max_context=8)),
    (BatchPlan, dict(rows=8, max_tokens_per_microbatch=4, sequence_length=9, widths=(4,), max_context=2)),
    (AnyRunConfig, dict(dir="runs/\n")),
    (CutConfig, dict(rows_per_microbatch=2, context_by_width=True)),
    (pieces_on, dict(context=2)),
    (pieces_of_a_table, dict(num_pieces=2)),
    (chunks_of_a_table, dict(num_chunks=2)),
    (lambda remat: jaxfb.get_forward_backward_func(remat=remat), dict(remat="selectiv*8+layer")),
    (lambda remat: check_remat_layers(remat, 4), dict(remat="none*4+layer")),
    (lambda fsdp_gather: jaxfb.get_forward_backward_func(fsdp_gather=fsdp_gather), dict(fsdp_gather=0)),
    (lambda fsdp_gather: check_gathered_layers(fsdp_gather, 4), dict(fsdp_gather=5)),
    (lambda **given: jaxfb.get_forward_backward_func(optimizer_sharding="gradients", **given), dict(fsdp_gather=2)),
    (
        lambda fsdp_gather: jaxfb.get_forward_backward_func(make_mesh(pipe=2), num_pieces=2, fsdp_gather=fsdp_gather),
        dict(fsdp_gather=2),
    ),
    (gathered_of_a_function, dict(fsdp_gather=2)),
    (half_a_function_ahead, dict(gather_ahead="half")),
    (reduced_of_a_function, dict(overlap_grad_reduce=True)),
    (weighed, dict(weights={"loss": 2.0})),
    (donated, dict(donate=True)),
    (lambda overlap_grad_reduce: reduced_late(overlap_grad_reduce, "zb_v"), dict(overlap_grad_reduce=True)),
    (reduced_late, dict(optimizer_sharding="gradients")),
    (lambda gather_ahead: jaxfb.get_forward_backward_func(gather_ahead=gather_ahead), dict(gather_ahead="hafl")),
    (
        lambda remat: jaxfb.get_forward_backward_func(make_mesh(pipe=2), num_pieces=2, remat=remat),
        dict(remat="none*1+layer"),
    ),
    (pieces_of_model, dict(num_pieces=2)),
    (lambda num_pieces: check_lengths({"tokens": np.zeros((1, 1, 8))}, num_pieces), dict(num_pieces=3)),
    (pieces_with_penalty, dict(num_pieces=2, schedule="seq1f1b")),
    (rows_with_penalty, dict(head_placement="rows")),
    (make, dict(name="1f1b", num_stages=2, num_microbatches=2, num_pieces=2)),
    (make, dict(name="seq1f1b", num_stages=2, num_microbatches=100, num_pieces=10**5)),
    (own_config, {"run.updates": None, "run.tokens": 10}),
    (lambda mesh: AutoMesh.of_word(mesh), dict(mesh="atuo")),
    (lambda **keys: _check_stages(changed(jaxfb.load_config("quickstart"), keys)), {"parallel.pieces": 2}),
    (started, dict(name="quickstrt")),
    # data
    (DataConfig, dict(source="txt", path="a.txt")),
    (DataConfig, dict(source="txt")),
    (DataConfig, dict(source="text", path="")),
    (DataConfig, dict(source="jsonl", path=["a.jsonl", " "])),
    (DataConfig, dict(path="")),
    (DataConfig, dict(source="text", path="a.txt", held_out_path="")),
    (DataConfig, dict(cache_dir="")),
    (SourceConfig, dict(weight=-1.0, source="text", path="a.txt")),
    (DataConfig, dict(source="text", path="a.txt", packing="concatt")),
    (DataConfig, dict(source="python-stdlib", path="a.txt")),
    (DataConfig, dict(source="python-stdlib", held_out_path="a.txt")),
    (DataConfig, dict(source="text", path="a.txt", sequence_length=1)),
    (DataConfig, dict(source="text", path="a.txt", tokenizer="bpe", vocab_size=100)),
    (DataConfig, dict(source="text", path="a.txt", tokenizer="bpe", vocab_size=10**9)),
    (
        check_continuation,
        dict(sizes=TransformerConfig(vocab_size=9, num_layers=1, hidden_size=8, num_heads=1), tokens=10**15),
    ),
    (DataConfig, dict(source="text", path="a.txt", held_out_fraction=1.0)),
    (DataConfig, dict(source="text", path="a.txt", seed=-5)),
    (DataConfig, dict(source="text", path="a.txt", max_bytes=0)),
    (DataConfig, dict(source="tokens", path="a.bin", max_bytes=5)),
    *((loader, wrong) for wrong in (dict(rows_per_update=0), dict(total_rows=0), dict(seed=-3))),
    *((loader, dict(remainder=remainder, total_rows=total)) for remainder, total in (("pat", 9), ("error", 10))),
    (loader, dict(remainder="error", total_rows=2)),
    (vocabulary, {"model.vocab_size": 100}),
    (width(), {"conversations.sequence_length": 10}),
    (width(context=2), {"conversations.sequence_length": 66}),
    # models and meshes
    (make_mesh, dict(data=-1, fsdp=-1)),
    *((TransformerConfig, {**SIZES, "num_experts": 2, "experts_per_token": number}) for number in (0, 3)),
    *((TransformerConfig, {**SIZES, **wrong}) for wrong in (
        dict(window=0), dict(window=3, pattern=(LayerKind(),)), dict(pattern=3), dict(leading=(LayerKind(layers=7),)),
        dict(leading=(LayerKind(layers=999),) * 2), dict(num_experts=2, pattern=(LayerKind(experts=False),)),
        dict(num_experts=2, num_layers=3, pattern=(LayerKind(), LayerKind(window=2))),
    )),
    *((RopeScaling, {"factor": 2.0, "original_length": 8, **wrong}) for wrong in (
        dict(kind="yarm"), dict(kind="yarn", factor=0.5), dict(kind="llama3", original_length=None),
    )),
    *((tensor, wrong) for wrong in (dict(tensor=3), dict(tensor=4), dict(tensor=2, vocab_size=33))),
    (tensor, dict(tensor=2, num_heads=1, num_kv_heads=1)),
    (experts, dict(num_experts=6, expert=4)),
    *((zigzag, dict(length=length, size=2)) for length in (3, 10)),
    (lambda layers_per_stage: layout_of(4, [[0], [1]], layers_per_stage), dict(layers_per_stage=[1, 2])),
    *((stages, dict(layers_per_stage=layout)) for layout in ("tt", "Et|L", "EtttttL", "Et|tmL", "E|||L")),
    (attention, dict(backend="cudnn")),
    (over_tokens, dict(method="ringg")),
    (sampler, dict(top_k=0)),
    (sampler, dict(top_k=33)),
    # forward and backward, and the step
    (placement, dict(head_placement="vocabulary")),
    (rows_of_head, dict(rows_per_microbatch=1)),
    (rows_of_head, dict(rows_per_microbatch=5)),
    (jaxfb.get_forward_backward_func, dict(schedule="1f1b", num_chunks=2)),
    (jaxfb.get_forward_backward_func, dict(layers_per_stage=[2], head_placement="last")),
    (jaxfb.get_forward_backward_func, dict(compiler_options=["xla"])),
    (jaxfb.get_forward_backward_func, dict(accum_dtype="float32", reduce_dtype="float64")),
    (compiled_with, dict(compiler_options={"xla_cpu_no_such_option": True})),
    (compared, dict(dtype="float64")),
    (lambda schedule: KINDS[schedule], dict(schedule="1f1c")),
    (clip, dict(max_grad_norm=-1.0)),
    (clip, dict(clip_convention="torhc")),
    (packed_step, dict(dropout=True)),
    (reordered_step, dict(layer_order="pipeline")),
    (memory_of_toaster, dict(optimizer_memory="host")),
    # losses and tasks
    (jaxfb.PreferenceLoss, dict(kind="sigmoidd")),
    (jaxfb.PreferenceLoss, dict(kind="hinge", label_smoothing=0.1)),
    (jaxfb.PreferenceLoss, dict(beta=-1.0)),
    (make_surrogate, dict(name="kl_cov")),
    (make_surrogate, dict(name="ppoo")),
    (reward, dict(estimator="k3+")),
    (lambda horizon: AdaptiveKL(0.1, 1.0, horizon).updated(1.0, 128), dict(horizon=20)),
    (arithmetic, dict(held_out=100)),
    # drawing and processes
    (drawn, dict(path="picture.gif")),
    *((place, wrong) for wrong in (dict(coordinator="host"), dict(coordinator=""), dict(process_id=2))),
    *((find_place_of, wrong) for find_place_of in (lambda cluster: find_place(HostsConfig(cluster=cluster), {}),)
      for wrong in (dict(cluster="slurmm"), dict(cluster="slurm"))),
    (left_behind, dict(cluster="auto")),
]  # fmt: skip
