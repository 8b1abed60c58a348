"""Compiles sequence parallelism for TPUs, without a TPU: collectives along tensor and memory, with and without it.

pip install "jaxfb[plan]"
python benchmarks/sequence_parallel_tpu.py           # four minutes on two cores; v5e 2x2, tensor 4
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"

from collections import Counter
from dataclasses import replace

import jax
from abstract import abstract_batch, abstract_params
from jax.experimental import topologies
from report import RESULTS, machine, temp_bytes

import jaxfb
from jaxfb.hlo import collectives
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import transformer

ROWS, LENGTH, M = 2, 1024, 4
CONFIG = TransformerConfig(vocab_size=4096, num_layers=8, hidden_size=512, num_heads=8, mlp_size=2048)


def main():
    mesh = jaxfb.make_mesh(devices=topologies.get_topology_desc("v5e:2x2", platform="tpu").devices, tensor=4)
    rows = {}
    for remat in ("none", "full"):
        for on in (False, True):
            program = compiled(mesh, replace(CONFIG, sequence_parallel=on), remat)
            rows[f"remat {remat}, sequence_parallel {on}"] = {
                "temp_mb": round(temp_bytes(program) / 1e6, 2),
                "in_a_layer": in_a_layer(mesh, program),
            }
    settings = {
        "rows": ROWS,
        "length": LENGTH,
        "num_microbatches": M,
        "model": asdict(CONFIG),
        "dtype": "bfloat16",
    }
    numbers = {"benchmark": "sequence_parallel", "settings": settings, "machine": machine(), "rows": rows}
    (RESULTS / "sequence_parallel_tpu_v5e.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def in_a_layer(mesh, program) -> dict[str, int]:
    """Kind -> how many collectives of whole hidden states along tensor one layer has, forward and backward."""
    whole = 2 * ROWS * LENGTH * CONFIG.hidden_size
    return dict(
        Counter(
            one.kind
            for one in collectives(program.as_text())
            if "tensor" in one.axes(mesh) and one.times == M * CONFIG.num_layers and one.bytes >= whole
        )
    )


def compiled(mesh, config: TransformerConfig, remat: str):
    fb = jaxfb.get_forward_backward_func(mesh, compute_dtype="bfloat16", remat=remat)
    model, plan = transformer(config), jaxfb.BatchPlan(rows=ROWS * M, rows_per_microbatch=ROWS)
    params, batch = abstract_params(fb, config), abstract_batch(plan.rows, LENGTH)
    return jax.jit(lambda params, batch: fb(model, params, batch, plan).grads).lower(params, batch).compile()


if __name__ == "__main__":
    main()
