"""Compares the bytes that a device sends along each mesh axis in the compiled program with a formula.

    python benchmarks/axis_bytes.py                      # three minutes on two cores; nothing is run, only compiled

Sent bytes of a collective of n bytes over k devices: 2 n (k-1)/k for an all-reduce, n (k-1)/k for a gather (n its
result), a scatter (n its operand) or an all-to-all, n for a permute. What is counted is what the CPU's compiler made,
which (a) adds up the gradients of several projections of one input after the tensor axis's all-reduces, not before,
(b) makes no reduce-scatter of an all-reduce and a slice, and (c) exchanges tokens for experts densely.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

from collections import Counter

import jax
from abstract import abstract_batch, abstract_params
from report import write

import jaxfb
from jaxfb.hlo import Collective, collectives
from jaxfb.mesh import data_parallel
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.transformer import transformer
from jaxfb.parallel.sharding import shardings

K, M, ROWS, LENGTH = (
    4,
    4,
    2,
    64,
)  # devices of the axis, microbatches, rows of one on a replica, tokens of a row
SIZES = dict(
    vocab_size=256, num_layers=4, hidden_size=64, num_heads=4, mlp_size=128, loss_chunk=ROWS * LENGTH
)
MODEL = TransformerConfig(**SIZES)
EXPERTS = TransformerConfig(**SIZES, num_experts=4, experts_per_token=2)
PART = (K - 1) / K

# by hand, in bytes of float32
N, L = 4 * num_params(MODEL), MODEL.num_layers  # all parameters; layers
OUTER = 4 * (2 * MODEL.vocab_size + 1) * MODEL.hidden_size
HIDDEN = (
    4 * ROWS * LENGTH * MODEL.hidden_size
)  # one microbatch's hidden states; queries, keys, values are as large
EXPERT_PARAMS = 4 * 3 * L * EXPERTS.num_experts * MODEL.hidden_size * EXPERTS.expert_mlp_size
CASES = {
    "data": (dict(data=K), {}, 2 * PART * N, "one all-reduce of the gradients"),
    "data, ZeRO-1": (dict(data=K), dict(optimizer_sharding="data"), PART * N, "one reduce-scatter of the gradients"),
    "data, ZeRO-2": (
        dict(data=K), dict(optimizer_sharding="gradients"), M * PART * N, "a reduce-scatter in every microbatch",
    ),
    "fsdp, by layer": (
        dict(fsdp=K), {}, M * PART * (OUTER + 2 * (N - OUTER) + N),
        "in every microbatch: outer gathered once, layers in forward and backward, gradients scattered",
    ),
    "fsdp, by step": (dict(fsdp=K), dict(fsdp_gather="step"), 2 * PART * N, "one gather, one reduce-scatter"),
    "tensor": (
        dict(tensor=K), {}, M * 2 * PART * (4 * L + 2) * HIDDEN,
        "all-reduces: two forward, two backward a layer; embedding; head's gradient",
    ),
    "tensor, sequence parallel": (
        dict(tensor=K), dict(sequence_parallel=True), M * 2 * PART * (4 * L + 2) * HIDDEN,
        "the same in halves: a gather and a reduce-scatter for each",
    ),
    "context, ring": (
        dict(context=K), dict(fsdp_gather="step"), M * L * (4 * (K - 1) + 2 * K) * HIDDEN / K + 2 * PART * N,
        "keys and values go round forward and backward (C-1), their gradients once (C); as fsdp by step",
    ),
    "context, all_gather": (
        dict(context=K), dict(context_attention="all_gather", fsdp_gather="step"),
        M * L * PART * 4 * HIDDEN + 2 * PART * N,
        "keys and values gathered, their gradients scattered; as fsdp by step",
    ),
    "context, all_to_all": (
        dict(context=K), dict(context_attention="all_to_all", fsdp_gather="step"),
        M * L * PART * 8 * HIDDEN / K + 2 * PART * N,
        "queries, keys, values, answers, forward and backward; as fsdp by step",
    ),
    "expert": (
        dict(expert=K), dict(fsdp_gather="step"),
        M * L * PART * 4 * 2 * HIDDEN + 2 * PART * (4 * num_params(EXPERTS) - EXPERT_PARAMS),
        "each token to 2 experts and back, forward and backward; all parameters but the experts' as fsdp by step",
    ),
    "pipe, 1f1b": (
        dict(pipe=K), dict(head_placement="last"), 2 * (M + K - 1) * HIDDEN + 2 * PART * OUTER,
        "hidden states and their gradients, one of each a tick; all-reduce of the gradients beside the layers",
    ),
}  # fmt: skip


def main():
    rows = {}
    for name, (sizes, options, by_hand, why) in CASES.items():
        sent = sent_by_kind(sizes, options)
        rows[name] = {
            "sent_kb": round(sum(sent.values()) / 1e3, 1),
            "by_hand_kb": round(by_hand / 1e3, 1),
            "ratio": round(sum(sent.values()) / by_hand, 2),
            "kinds_kb": {kind: round(value / 1e3, 1) for kind, value in sorted(sent.items())},
            "by_hand": why,
        }
        print(f"{name:26} {rows[name]}", flush=True)
    settings = {"devices": K, "num_microbatches": M, "rows": ROWS, "length": LENGTH, "model": SIZES}
    write(
        "axis_bytes",
        settings | {"dtype": "float32", "parameter_kb": N / 1e3, "hidden_kb": HIDDEN / 1e3},
        {"rows": rows},
    )


def sent_by_kind(sizes: dict, options: dict) -> Counter:
    """kind -> bytes that one device sends along the axis in one call."""
    of_model = {name: options[name] for name in options if name in TransformerConfig.__dataclass_fields__}
    config = TransformerConfig(**vars(EXPERTS if "expert" in sizes else MODEL) | of_model)
    mesh = jaxfb.make_mesh(**sizes)
    fb = jaxfb.get_forward_backward_func(mesh, **{k: v for k, v in options.items() if k not in of_model})
    model, plan = transformer(config), plan_of(mesh)
    params, batch = abstract_params(fb, config), abstract_batch(plan.rows, LENGTH)
    out = shardings(fb.grad_specs(model, params), mesh)
    call = jax.jit(lambda params, batch: fb(model, params, batch, plan).grads, out_shardings=out)
    sent = Counter()
    for one in collectives(call.lower(params, batch).compile().as_text()):
        sent[one.kind] += sent_by(one) * one.times
    return sent


def plan_of(mesh) -> jaxfb.BatchPlan:
    replicas = data_parallel(mesh)
    return jaxfb.BatchPlan(rows=ROWS * M * replicas, data_parallel=replicas, num_microbatches=M)


def sent_by(one: Collective) -> float:
    if one.kind == "collective-permute":
        return one.bytes
    return one.bytes * PART * (2 if one.kind == "all-reduce" else 1)


if __name__ == "__main__":
    main()
