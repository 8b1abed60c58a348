"""What the planner makes of a step whose attention is a kernel: its work counted, no scores in memory."""

import math
from dataclasses import replace

import jax
import pytest
from jax.interpreters.partial_eval import dce_jaxpr

from jaxfb.config import load_config
from jaxfb.models.attention_kernels.splash import block_size
from jaxfb.models.attention_kernels.splash_gather import _tables_of_all
from jaxfb.models.attention_kernels.splash_whole import _kernel
from jaxfb.planner import tpu
from jaxfb.planner.chips import Chip
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import abstract_device, abstract_mesh, make_job, model_sizes
from jaxfb.planner.program_cost import hlo_cost
from jaxfb.planner.program_cost.kernels import kernel_flops
from jaxfb.planner.program_cost.routing import Routed, equations
from jaxfb.planner.topology import parse_topology
from jaxfb.planner.verdict import estimated, plan

LENGTH, HEADS, SIZE, LAYERS, ROWS = 1024, 4, 64, 2, 2
CONFIG = load_config(
    "configs/mesh8.yaml",
    f"model.num_layers={LAYERS} model.hidden_size=256 model.num_heads={HEADS} model.num_kv_heads=2 "
    f"data.sequence_length={LENGTH} data.tokenizer=bytes mesh.dp=2 mesh.fsdp=2 mesh.tp=1 batch.rows=8 "
    f"precision.compute_dtype=bfloat16 batch.rows_per_microbatch={ROWS} parallel.remat=selective".split(),
)
TPU = parse_topology("v5e:2x2")


@pytest.fixture(autouse=True)
def integers_of_32_bits():
    """As outside tests, where only float64 asks for more, and takes plain attention."""
    with jax.enable_x64(False):
        yield


def visible_pairs(length: int) -> int:
    """(query, key) pairs of the blocks that are computed: those on the diagonal whole, those above it not at all."""
    return length * (length + block_size(length)) // 2


def by(attention: str):
    """(config, sizes) with that attention."""
    config = replace(CONFIG, model=replace(CONFIG.model, attention=attention))
    return config, model_sizes(config)


def test_segments_of_one_row_are_no_places_of_queries():
    """As libtpu writes calls for one row: places of queries make a mask causal, which has half of the pairs."""
    table, one, segments = (1, 4, 4), (1, 2048, SIZE), [(2048, 128), (8, 2048)]
    whole, causal = (
        kernel_flops("splash_mha_fwd_segmented_x", [table, table, one, one, one, *segments, *more])
        for more in ([], [(2048, 128)])
    )
    assert whole == 2 * 2 * SIZE * 2048**2 and causal == 2 * 2 * SIZE * visible_pairs(2048)


@pytest.mark.parametrize("length, window, blocks", [(2048, 512, 2 * 4), (4096, 512, 2 * 8), (2048, 4096, 10)])
def test_blocks_before_a_window_are_not_counted(length, window, blocks):
    """The table of blocks that are visited is narrower then, but no narrower in the first rows."""
    table = _kernel(1, length, window, None, True).fwd_mask_info.data_next.shape
    one = (1, length, SIZE)
    flops = kernel_flops("splash_mha_fwd_x", [table, table, one, one, one, (length, 128)])
    assert flops == 2 * 2 * SIZE * blocks * 512**2


@pytest.mark.parametrize("queries, keys", [(1024, 1024), (1024, 4096)])
def test_blocks_that_are_seen_whole_are_counted_whole_and_those_of_a_part_of_the_queries_by_halves(
    queries, keys
):
    """Each block of a ring's turn is visible; queries of a part of a sequence see every other block on average."""
    table, query, key = (1, queries // 512, keys // 512), (2, 4, queries, SIZE), (2, 2, keys, SIZE)
    operands = [table, table, query, key, key, (2, queries, 128), (2, 8, keys)]
    pairs = 2 * 4 * SIZE * 2 * 2 * queries
    assert kernel_flops("splash_mha_fwd_x", operands) == pairs * keys
    assert kernel_flops("splash_mha_fwd_x", [*operands, (queries, 128)]) == pairs * (keys + 512) / 2


@pytest.mark.parametrize("window, blocks", [(None, 4 * (16 + 1) / 2), (700, 4 * 3)])
def test_tables_of_a_context_axis_are_counted_as_every_devices(window, blocks):
    """Every device of it visits as many blocks of the whole sequence; in a window the first rows visit fewer."""
    info = _tables_of_all(length=2048, size=4, window=window)  # two pieces of two blocks of 512
    visited = (info.block_mask > 0).sum((1, 2))
    assert (visited == blocks).all() if window is None else (visited <= blocks).all()
    table, query, key = (1, *info.data_next.shape[1:]), (1, 2, 2048, SIZE), (1, 1, 8192, SIZE)
    operands = [table, table, table, query, key, key, (1, 2048, 128), info.partial_mask_blocks.shape]
    assert kernel_flops("splash_mha_fwd_x", operands) == 2 * 2 * 2 * SIZE * blocks * 512**2


def test_a_trace_counts_the_kernels_products():
    """Forward, and the gradients; in a rematerialised layer forward runs once."""
    job = make_job(CONFIG, abstract_mesh(CONFIG, 4, abstract_device(TPU)))
    jaxpr = job.step.trace(job.state, job.batch).jaxpr.jaxpr
    needed, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    kernels = 0
    for eqn, times in equations(needed):
        if eqn.primitive.name == "pallas_call":
            kernels += times * kernel_flops(eqn.params["name"], [one.aval.shape for one in eqn.invars])
    assert kernels == LAYERS * (2 + 5) * 2 * ROWS * HEADS * SIZE * visible_pairs(LENGTH)


def test_the_formula_knows_where_scores_are_made():
    splash, xla = (estimate(*by(attention), TPU) for attention in ("auto", "xla"))
    assert splash.seconds < xla.seconds and splash.total < xla.total
    assert estimate(*by("splash"), TPU) == splash


def test_a_compiled_program_names_its_kernels():
    query, keys = "bf16[2,4,1024,64]{3,2,1,0}", "bf16[2,2,1024,64]{3,2,1,0}"
    text = f"""HloModule step
ENTRY %main (t: s8[1,2,2], q: bf16[2,4,1024,64], k: bf16[2,2,1024,64], p: s32[1024,128]) -> {query} {{
  %t = s8[1,2,2]{{2,1,0}} parameter(0)
  %q = {query} parameter(1)
  %k = {keys} parameter(2)
  %p = s32[1024,128]{{1,0}} parameter(3)
  ROOT %splash_mha_dq_segmented_no_residuals.3 = {query} custom-call(%t, %t, %q, %k, %k, %p), metadata={{}}
}}
"""
    cost = hlo_cost.cost_of(text, None, Chip("made up", 1.0, 1.0, math.inf, 1.0, source=""))
    assert cost.flops == cost.work_seconds == 3 * 2 * 2 * HEADS * SIZE * visible_pairs(LENGTH)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ("data.sequence_length=1000", "takes lengths that are multiples of 128, not 1000"),
        ("precision.compute_dtype=float16", "takes bfloat16 and float32, not float16"),
    ],
)
def test_splash_where_it_cannot_run_is_refused_before_tracing(change, sentence):
    name, value = change.split("=")
    part, field = name.split(".")
    section = getattr(CONFIG, part)
    changed = replace(
        by("splash")[0], **{part: replace(section, **{field: type(getattr(section, field))(value)})}
    )
    with pytest.raises(ValueError, match=sentence):
        estimated(changed, TPU)


def test_splash_is_refused_for_gpus():
    with pytest.raises(ValueError, match="runs on TPUs, not on a gpu; use attention='xla'"):
        estimated(by("splash")[0], parse_topology("gpu:h100x4"))


@pytest.mark.slow
@pytest.mark.skipif(not tpu.is_installed(), reason="no libtpu here; pip install 'jaxfb[plan]'")
@pytest.mark.parametrize(
    "layout, most",
    [
        ("mesh.dp=4", 1.001),
        ("mesh.dp=2 mesh.tp=2", 1.001),
        # a schedule that splits the backward multiplies 1.12 times as much
        ("mesh.pp=2 mesh.tp=2 schedule=zero_bubble", 1.15),
    ],
)
def test_the_tpu_compiler_takes_the_kernels(layout, most):
    """Its program multiplies what the model needs; in attention more, since blocks are computed whole, and scores again
    in the backward, once for queries and once for keys and values.
    """
    base = (
        "mesh.dp=1 mesh.fsdp=1 mesh.tp=1 data.tokenizer=bytes batch.rows=16 precision.compute_dtype=bfloat16"
    )
    sizes = f"data.sequence_length={LENGTH} parallel.remat=selective"
    config = load_config("configs/mesh8.yaml", [*base.split(), *sizes.split(), *layout.split()])
    verdict = plan(config, TPU)
    model = config.model
    of_a_layer = 2 * model.num_heads * (model.hidden_size // model.num_heads) * config.batch.rows / 4
    whole, needed = (2 + 3 + 4) * visible_pairs(LENGTH), (2 + 4) * LENGTH**2 / 2
    by_hand = verdict.model_flops + model.num_layers * of_a_layer * (whole - needed)
    assert 0.999 < verdict.compiled.flops / by_hand < most


@pytest.mark.parametrize(
    "name, operands, flops",
    [
        ("grouped_product", [(12,), (12,), (12,), (96, 32), (4, 32, 48)], 2 * 96 * 32 * 48),
        ("grouped_outer_product", [(4,), (4,), (1,), (96, 32), (96, 48), (4, 32, 48)], 2 * 96 * 32 * 48),
        ("another", [(12,), (12,), (12,), (96, 32), (4, 32, 48)], 0),
    ],
)
def test_a_kernel_of_gpus_is_known_by_its_name_and_counted_by_its_rows(name, operands, flops):
    given = ", ".join(f"%p{i}" for i, _ in enumerate(operands))
    types = {
        f"p{i}": f"{'s32' if len(shape) == 1 else 'bf16'}{list(shape)}" for i, shape in enumerate(operands)
    }
    parameters = "\n".join(
        f"  %{p} = {kind.replace(' ', '')} parameter({p[1:]})" for p, kind in types.items()
    )
    text = f"""HloModule m
ENTRY %main (p: f32[]) -> bf16[96,48] {{
{parameters}
  ROOT %pallas_call.7 = bf16[96,48]{{1,0}} custom-call({given}), custom_call_target="__gpu$xla.gpu.triton", """
    text += f"""metadata={{op_name="jit(run)/mlp/{name}/pallas_call"}}, backend_config={{grid_x = 3 : i32}}
}}
"""
    chip = Chip("made up", 1.0, 1.0, math.inf, 1.0, source="")
    (call,) = [one for one in hlo_cost.executed(text, chip) if one.instruction.opcode == "custom-call"]
    assert call.cost.flops == flops
    half = hlo_cost.cost_of(text, None, chip, Routed(share=0.5))
    assert half.flops == flops / 2
