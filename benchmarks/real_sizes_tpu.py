"""Compiles models of 8B and 70B for TPU pods, without a TPU: memory, work, exposed communication, next to MaxText.

    python3.12 -m venv maxtext_env && maxtext_env/bin/pip install -r benchmarks/maxtext_requirements.txt
    maxtext_env/bin/pip install --no-deps maxtext==0.2.5 && maxtext_env/bin/pip install libtpu==0.0.48
    maxtext_env/bin/python benchmarks/real_sizes_tpu.py                        # two to ten minutes a row and side
    maxtext_env/bin/python benchmarks/real_sizes_tpu.py --only "8B, v6e:8x8" --sides jaxfb

Each row is one job, compiled by the same jax and libtpu for jaxfb and for MaxText: the same model, mesh, rows and
microbatches, full recomputation (but for rows with memory used or with overlap) and flash attention, in a process each.
`real_sizes.py` says what is read.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import real_sizes
from real_sizes import LIKE_DEEPSEEK, Job, Rows, jaxfb_config, lower_jaxfb, sizes, version

from jaxfb.config import Config
from jaxfb.planner import parse_topology, tpu
from jaxfb.planner.program_cost.routing import Routed
from jaxfb.platforms import compiler
from jaxfb.platforms.programs import size_of_refusal

SIDES = ("jaxfb", "jaxfb_best", "jaxfb_rounded", "maxtext", "maxtext_best")
"""`_best`: with the options of `jaxfb/platforms/compiler.py`; `_rounded`: and with gradients summed over chips in
bfloat16, as MaxText's are; the others with options that the compiler has by itself."""
ROUNDED = "precision.reduce_dtype=bfloat16"

STAGES = ("mesh.pp=8", "mesh.fsdp=8", "mesh.tp=8", "schedule=1f1b")
PIPELINE = {
    "ici_pipeline_parallelism": 8,
    "ici_fsdp_parallelism": 8,
    "ici_tensor_parallelism": 8,
    "num_pipeline_microbatches": 64,
    "num_layers_per_pipeline_stage": 10,
    "per_device_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "scan_layers": False,
}
TENSOR = {"ici_fsdp_parallelism": 64, "ici_tensor_parallelism": 8, "per_device_batch_size": 1 / 8}
LONG = ("data.sequence_length=32768", "batch.rows=128", "mesh.fsdp=16", "mesh.context=4")
LONG_MAXTEXT = {
    "ici_fsdp_parallelism": 16,
    "ici_context_parallelism": 4,
    "per_device_batch_size": 1 / 4,
    "gradient_accumulation_steps": 8,
}
LONGER = ("data.sequence_length=131072", "batch.rows=32", "mesh.fsdp=4", "mesh.context=16")
LONGER_MAXTEXT = LONG_MAXTEXT | {
    "ici_fsdp_parallelism": 4,
    "ici_context_parallelism": 16,
    "per_device_batch_size": 1 / 16,
}
FIVE_CHUNKS = ("schedule=interleaved", "chunks=5", "parallel.remat=layer")
"""Stages of two layers, five on each device."""
TWO_LAYER_STAGES = {"num_layers_per_pipeline_stage": 2}
"""The same in MaxText, whose pipeline is then circular."""
LONG_STAGES = (
    "data.sequence_length=131072",
    "batch.rows=4",
    "mesh.fsdp=1",
    "mesh.pp=8",
    "parallel.remat=layer",
)
"""Few microbatches of long sequences, four in a pipeline of eight stages."""
MIXTRAL = {
    "decoder_block": "mixtral",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 16384,
    "megablox": True,
    "sparse_matmul": True,
    "ici_fsdp_parallelism": 16,
    "ici_expert_parallelism": 8,
}
"""Dropless, as ours: with space for the worst case, of which an even share of rows is multiplied."""
OVERLAP = (
    "model.expert_overlap=true",
    "parallel.remat=halves",
    "parallel.compiler_options.xla_tpu_enable_async_ragged_all_to_all=true",
)
SIXTEEN = (*LIKE_DEEPSEEK, "mesh.expert=16")
ON_HOST = ("optimizer.memory=host",)
INPUTS_ON_HOST = ("parallel.remat=offload",)
HALF = ("parallel.gather_ahead=half",)
NOTHING_AHEAD = ("parallel.gather_ahead=false",)
IN_STEP = ("parallel.remat=selective", "parallel.fsdp_gather=step")
INPUTS_OFFLOADED = {"remat_policy": "custom", "decoder_layer_input": "offload"}
SHARED_RING = {"allow_split_physical_axes": True}
"""Two axes in one ring of the torus, which MaxText refuses unless it is asked."""
LESS_REMAT = {"remat_policy": "minimal_with_context"}
"""Use the memory that full recomputation leaves: both libraries keep the results of products and of attention."""
BUT_FIRST = {"remat_policy": "save_dot_except_mlpwi"}
"""Keeps all products but the first two of an MLP or of the experts, where "minimal" takes more memory than there is."""
JOBS = {
    "8B, v5p:4x4x4, fsdp 64": Job("8b", "v5p:4x4x4"),
    "8B, v6e:8x8, fsdp 64": Job("8b", "v6e:8x8"),
    "8B, v5e:16x16, fsdp 256": Job("8b", "v5e:16x16", maxtext={"gradient_accumulation_steps": 4}),
    "8B, v5p:4x4x4, fsdp 64, half a layer ahead": Job("8b", "v5p:4x4x4", HALF),
    "8B, v6e:8x8, fsdp 64, half a layer ahead": Job("8b", "v6e:8x8", HALF),
    "8B, v5p:4x4x4, fsdp 64, nothing ahead": Job("8b", "v5p:4x4x4", NOTHING_AHEAD, None),
    "8B, v6e:8x8, fsdp 64, nothing ahead": Job("8b", "v6e:8x8", NOTHING_AHEAD, None),
    "8B at 32k tokens, v5p:4x4x4, fsdp 16 x context 4": Job("8b", "v5p:4x4x4", LONG, LONG_MAXTEXT),
    "8B at 128k tokens, v5p:4x4x4, fsdp 4 x context 16": Job("8b", "v5p:4x4x4", LONGER, LONGER_MAXTEXT),
    "8B at 32k tokens, v5p:4x4x4, fsdp 16 x context 4, memory used": Job(
        "8b", "v5p:4x4x4", LONG + IN_STEP[:1], LONG_MAXTEXT | LESS_REMAT
    ),
    "8B at 128k tokens, v5p:4x4x4, fsdp 4 x context 16, memory used": Job(
        "8b", "v5p:4x4x4", LONGER + IN_STEP[:1], LONGER_MAXTEXT | LESS_REMAT
    ),
    "8B at 32k tokens, v5p:4x4x4, fsdp 8 x context 8": Job(
        "8b",
        "v5p:4x4x4",
        (*LONG[:2], "mesh.fsdp=8", "mesh.context=8"),
        LONG_MAXTEXT
        | SHARED_RING
        | {
            "ici_fsdp_parallelism": 8,
            "ici_context_parallelism": 8,
            "per_device_batch_size": 1 / 8,
            "gradient_accumulation_steps": 16,
        },
    ),
    "8B at 8k tokens, v5p:4x4x4, fsdp 32 x context 2": Job(
        "8b",
        "v5p:4x4x4",
        ("data.sequence_length=8192", "batch.rows=512", "mesh.fsdp=32", "mesh.context=2"),
        SHARED_RING
        | {"ici_fsdp_parallelism": 32, "ici_context_parallelism": 2, "per_device_batch_size": 1 / 2},
    ),
    "8B at 128k tokens, v5p:2x2x2, pipe 8": Job("8b", "v5p:2x2x2", LONG_STAGES, None),
    "8B at 128k tokens, v5p:2x2x2, pipe 8, 16 pieces": Job(
        "8b", "v5p:2x2x2", (*LONG_STAGES, "parallel.pieces=16"), None
    ),
    "8B at 128k tokens, v5p:2x2x2, pipe 8, 16 pieces abreast": Job(
        "8b", "v5p:2x2x2", (*LONG_STAGES, "parallel.pieces=16", "schedule=seq_abreast"), None
    ),
    "8B, v5p:4x4x4, data 8 x fsdp 8, ZeRO-1": Job(
        "8b", "v5p:4x4x4", ("mesh.data=8", "mesh.fsdp=8", "optimizer.sharding=data"), None
    ),  # MaxText refuses ZeRO-1 beside fsdp
    "8B, v5p:4x4x4, pipe 4 x data 16, ZeRO-1, 8 microbatches": Job(
        "8b",
        "v5p:4x4x4",
        (
            *("mesh.pp=4", "mesh.data=16", "mesh.fsdp=1", "schedule=1f1b", "batch.rows=128"),
            *("optimizer.sharding=data", "parallel.remat=layer"),
        ),
        None,
    ),
    "8B, v6e:8x8, data 2 x fsdp 32": Job(
        "8b",
        "v6e:8x8",
        ("mesh.data=2", "mesh.fsdp=32"),
        SHARED_RING | {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 32},
    ),
    "8B, v5e:16x16, pipe 4 x fsdp 32 x tensor 2, memory used": Job(
        "8b",
        "v5e:16x16",
        (
            *("mesh.pp=4", "mesh.fsdp=32", "mesh.tp=2", "schedule=zero_bubble", "chunks=4"),
            *IN_STEP,
            "batch.rows_per_microbatch=1",
        ),
        None,
    ),  # the layout that the planner's search finds
    "8B, v5e:16x16, fsdp 256, memory used": Job(
        "8b", "v5e:16x16", IN_STEP[:1], {"gradient_accumulation_steps": 4, "remat_policy": "minimal"}
    ),  # attention's results kept too: 6.31 s in place of 5.93 s, since its scatters are then less hidden
    "8B, v6e:4x4, fsdp 16": Job("8b", "v6e:4x4", maxtext={"gradient_accumulation_steps": 64}),
    "8B, v6e:4x4, fsdp 16, half a layer ahead": Job(
        "8b", "v6e:4x4", HALF, {"gradient_accumulation_steps": 64}
    ),
    "8B, v5e:4x4, fsdp 16": Job("8b", "v5e:4x4", (), None),
    "8B, v5e:4x4, fsdp 16, state on the host": Job("8b", "v5e:4x4", ON_HOST, None),
    "8B, v5e:2x4, fsdp 8, state on the host": Job("8b", "v5e:2x4", ON_HOST, None),
    "8B, v5p:4x4x4, fsdp 64, layers' inputs on the host": Job(
        "8b", "v5p:4x4x4", INPUTS_ON_HOST, INPUTS_OFFLOADED
    ),
    "8B, v6e:8x8, fsdp 64, layers' inputs on the host": Job(
        "8b", "v6e:8x8", INPUTS_ON_HOST, INPUTS_OFFLOADED
    ),
    "8B, v5p:4x4x4, fsdp 64, memory used": Job("8b", "v5p:4x4x4", IN_STEP[:1], LESS_REMAT),
    "8B, v5p:4x4x4, fsdp 64, memory used, gathered once an update": Job("8b", "v5p:4x4x4", IN_STEP, None),
    "8B, v6e:8x8, fsdp 64, memory used": Job("8b", "v6e:8x8", IN_STEP[:1], LESS_REMAT),
    "70B, v6e:4x8, fsdp 16 x tensor 2, state on the host": Job(
        "70b", "v6e:4x8", ("mesh.fsdp=16", "mesh.tp=2", *ON_HOST), None
    ),
    "70B, v5p:8x8x8, fsdp 64 x tensor 8": Job("70b", "v5p:8x8x8", maxtext=TENSOR),
    "70B, v5p:8x8x8, fsdp 64 x tensor 8, layers' inputs on the host": Job(
        "70b", "v5p:8x8x8", INPUTS_ON_HOST, TENSOR | INPUTS_OFFLOADED
    ),
    "70B, v5p:8x8x8, fsdp 64 x tensor 8, memory used": Job("70b", "v5p:8x8x8", IN_STEP, TENSOR | LESS_REMAT),
    "70B, v5p:8x8x8, fsdp 512, memory used": Job(
        "70b",
        "v5p:8x8x8",
        ("mesh.fsdp=512", "mesh.tp=1", "batch.rows_per_microbatch=1", *IN_STEP[:1]),
        {"ici_fsdp_parallelism": 512, "per_device_batch_size": 1, "gradient_accumulation_steps": 2}
        | LESS_REMAT,
    ),  # the layout that the planner's search finds
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8": Job(
        "70b", "v5p:8x8x8", (*STAGES, "batch.rows=512"), None
    ),  # MaxText keeps each layer's input, as the next row does
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, layers' inputs kept": Job(
        "70b", "v5p:8x8x8", (*STAGES, "batch.rows=512", "parallel.remat=layer"), PIPELINE
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, five chunks": Job(
        "70b", "v5p:8x8x8", (*STAGES, *FIVE_CHUNKS, "batch.rows=512"), PIPELINE | TWO_LAYER_STAGES
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, five chunks, memory used": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, *FIVE_CHUNKS[:2], *IN_STEP, "batch.rows=512"),
        PIPELINE | TWO_LAYER_STAGES | LESS_REMAT,
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, layers' inputs on the host": Job(
        "70b", "v5p:8x8x8", (*STAGES, "batch.rows=512", *INPUTS_ON_HOST), None
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, 16 microbatches": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, "batch.rows=128", "parallel.remat=layer"),
        PIPELINE | {"num_pipeline_microbatches": 16, "per_device_batch_size": 1 / 4},
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, 16 microbatches, five chunks": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, *FIVE_CHUNKS, "batch.rows=128"),
        PIPELINE | {"num_pipeline_microbatches": 16, "per_device_batch_size": 1 / 4} | TWO_LAYER_STAGES,
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, 16 microbatches, five chunks, memory used": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, *FIVE_CHUNKS[:2], *IN_STEP, "batch.rows=128"),
        PIPELINE
        | {"num_pipeline_microbatches": 16, "per_device_batch_size": 1 / 4}
        | TWO_LAYER_STAGES
        | LESS_REMAT,
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, 16 microbatches, layers' inputs on the host": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, "batch.rows=128", *INPUTS_ON_HOST),
        PIPELINE | {"num_pipeline_microbatches": 16, "per_device_batch_size": 1 / 4} | INPUTS_OFFLOADED,
    ),
    "70B, v5p:8x8x8, pipe 8 x fsdp 8 x tensor 8, 16 microbatches, layers' inputs on the host, nothing ahead": Job(
        "70b",
        "v5p:8x8x8",
        (*STAGES, "batch.rows=128", *INPUTS_ON_HOST, *NOTHING_AHEAD),
        PIPELINE | {"num_pipeline_microbatches": 16, "per_device_batch_size": 1 / 4} | INPUTS_OFFLOADED,
    ),
    "405B with 128 layers, v5p:8x8x16, fsdp 128 x tensor 8": Job(
        "400b", "v5p:8x8x16", ("model.sequence_parallel=true",), TENSOR | {"ici_fsdp_parallelism": 128}
    ),
    "405B with 128 layers, v5p:8x8x16, fsdp 128 x tensor 8, nothing ahead": Job(
        "400b",
        "v5p:8x8x16",
        ("model.sequence_parallel=true", *NOTHING_AHEAD),
        TENSOR | {"ici_fsdp_parallelism": 128},
    ),
    "405B with 128 layers, v5p:8x8x16, fsdp 128 x tensor 8, layers' inputs on the host": Job(
        "400b",
        "v5p:8x8x16",
        ("model.sequence_parallel=true", *INPUTS_ON_HOST),
        TENSOR | {"ici_fsdp_parallelism": 128} | INPUTS_OFFLOADED,
    ),
    "405B with 128 layers, v5p:8x8x16, fsdp 256 x tensor 4, memory used": Job(
        "400b",
        "v5p:8x8x16",
        ("mesh.fsdp=256", "mesh.tp=4", "model.sequence_parallel=true", *IN_STEP[:1]),
        SHARED_RING
        | {"ici_fsdp_parallelism": 256, "ici_tensor_parallelism": 4}
        | LESS_REMAT
        | {"per_device_batch_size": 1 / 4, "gradient_accumulation_steps": 8},
    ),
    "405B with 128 layers, v5p:8x8x16, fsdp 1024, memory used": Job(
        "400b",
        "v5p:8x8x16",
        ("mesh.fsdp=1024", "mesh.tp=1", "parallel.remat=selective*16+layer"),
        {
            "ici_fsdp_parallelism": 1024,
            "gradient_accumulation_steps": 2,
        }
        | BUT_FIRST,
    ),  # neither has memory for all of the products
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8": Job("moe-141b", "v5p:4x4x8", (), MIXTRAL),
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8, memory used": Job(
        "moe-141b", "v5p:4x4x8", IN_STEP[:1], MIXTRAL | BUT_FIRST
    ),
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8, overlap": Job("moe-141b", "v5p:4x4x8", OVERLAP, None),
    "Mixtral 8x22B, v5p:4x4x8, fsdp 16 x expert 8, half a layer ahead": Job(
        "moe-141b", "v5p:4x4x8", HALF, MIXTRAL
    ),
    "like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16, half a layer ahead": Job(
        "moe-141b", "v5p:8x8x8", SIXTEEN + HALF, None
    ),
    "like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16": Job("moe-141b", "v5p:8x8x8", SIXTEEN, None),
    "like DeepSeek-V3, v5p:8x8x8, fsdp 32 x expert 16, overlap": Job(
        "moe-141b", "v5p:8x8x8", SIXTEEN + OVERLAP, None
    ),
}


def options_of(job: Job) -> dict[str, Any]:
    """The options by kind of chip and layout."""
    chip = parse_topology(job.topology).chip
    assert chip is not None
    return dict(compiler.table_for(chip.kind, jaxfb_config(job).mesh.tensor))


def config_of(job: Job, side: str) -> Config:
    """The config that jaxfb's step of a side is compiled with."""
    own = (ROUNDED,) if side == "jaxfb_rounded" else ()
    return jaxfb_config(replace(job, overrides=(*job.overrides, *own)))


def lower(job: Job, side: str, compiled) -> None:
    """Lowers jaxfb's step, which sets the options of the chip, without them if it is not the best; or MaxText's."""
    if side.startswith("maxtext"):
        lower_maxtext(job, compiled)
        return
    none = dict.fromkeys(options_of(job)) if side == "jaxfb" else {}
    try:
        lower_with(job, side, none, compiled)
    except jax.errors.JaxRuntimeError as error:
        if none or size_of_refusal(str(error)) is None:
            raise
        lower_with(
            job, side, dict.fromkeys(compiler.names_taking_memory(tuple(options_of(job).items()))), compiled
        )


def lower_with(job: Job, side: str, options: dict[str, Any], compiled) -> None:
    """Lowers jaxfb's step with some options changed."""
    config = config_of(job, side)
    own = dict(config.parallel.compiler_options or {})
    config = replace(config, parallel=replace(config.parallel, compiler_options=own | options))
    lower_jaxfb(config, tpu.devices(parse_topology(job.topology)), compiled)


def compile_program(lowered: Any, job: Job, side: str) -> tuple[Any, float]:
    with tempfile.TemporaryDirectory() as folder:
        options, report = options_of(job) if side == "maxtext_best" else {}, tpu.report_into(Path(folder))
        try:
            program = lowered.compile(options | report)
        except jax.errors.JaxRuntimeError as error:
            if not options or size_of_refusal(str(error)) is None:
                raise
            fewer = compiler.without_memory(tuple(options.items()))
            program = lowered.compile(dict(fewer) | report)
        return program, tpu.reported_bytes(Path(folder))


def lower_maxtext(job: Job, compiled) -> None:
    """Lowers the step of MaxText: Llama's decoder with the same sizes, a microbatch of the same rows."""
    from maxtext_compiled import compile_step

    config, devices = jaxfb_config(job), parse_topology(job.topology).num_devices
    model = sizes(config)
    keys = {
        "decoder_block": "llama2",
        "base_num_decoder_layers": model.num_layers,
        "base_emb_dim": model.hidden_size,
        "base_num_query_heads": model.num_heads,
        "base_num_kv_heads": model.num_kv_heads,
        "base_mlp_dim": model.expert_mlp_size if model.num_experts else model.mlp_size,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "rope_max_timescale": int(config.model.rope_theta),
        "max_target_length": config.data.sequence_length,
        "attention": "flash",
        "remat_policy": "full",
        "ici_fsdp_parallelism": devices,
        "per_device_batch_size": 1,
        "gradient_accumulation_steps": 16,
    }
    compile_step(keys | job.maxtext, job.topology, lambda lowered: compiled(lowered, maxtext_work(job)))


def maxtext_work(job: Job) -> Routed | None:
    """What its experts multiply of the rows for which there is space, where they are equally popular: the space is for
    every choice of all devices of the axis, or for one of every expert on a device."""
    if (job.maxtext or {}).get("num_experts") is None:
        return None
    experts, chosen = job.maxtext["num_experts"], job.maxtext["num_experts_per_tok"]
    return Routed(share=1 / min(job.maxtext["ici_expert_parallelism"], experts / chosen))


ROWS = Rows(
    script=Path(__file__),
    jobs=JOBS,
    sides=SIDES,
    usual=("jaxfb", "jaxfb_best", "jaxfb_rounded", "maxtext"),
    environment=tpu.ENVIRONMENT,
    packages=("libtpu",),
    settings={
        "seq": 4096,
        "compute_dtype": "bfloat16",
        "accum_dtype": "float32",
        "remat": "full",
        "maxtext": version("maxtext"),
    },
    config=config_of,
    lower=lower,
    compile=compile_program,
)

if __name__ == "__main__":
    real_sizes.main(ROWS, __doc__)
