"""One rank of torch.distributed.pipelining on CPU: the same transformer, driven by `pipeline_against_torch.py`.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=29511 python torch_pipelining.py model.npz

Rank 0 reads lines "schedule num_microbatches" and answers each with the seconds of one forward and backward and
the loss. One thread a rank, gloo. Needs torch_requirements.txt and no JAX.
"""

import json
import os
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining as p

SCHEDULES = {
    "gpipe": (p.ScheduleGPipe, 1),
    "1f1b": (p.Schedule1F1B, 1),
    "interleaved": (p.ScheduleInterleaved1F1B, 2),
    "zero_bubble": (p.ScheduleInterleavedZeroBubble, 2),
    "v_shape": (p.ScheduleZBVZeroBubble, 2),
}
"""Ours to theirs, and stages a rank. Their zero bubble is interleaved, their V is a zero bubble schedule as well."""


class Block(nn.Module):
    def __init__(self, weights: dict, index: int, config: dict):
        super().__init__()
        self.config = config
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(torch.tensor(value[index])))

    def forward(self, x):
        x = x + self.attention(norm(x, self.attention_norm, self.config["norm_eps"]))
        h = norm(x, self.mlp_norm, self.config["norm_eps"])
        return x + (F.silu(h @ self.gate) * (h @ self.up)) @ self.down

    def attention(self, x):
        heads = lambda y: y.unflatten(-1, (self.config["num_heads"], -1)).transpose(1, 2)  # noqa: E731
        query, key, value = (heads(x @ kernel) for kernel in (self.query, self.key, self.value))
        query, key = (rotate(y, self.config["rope_theta"]) for y in (query, key))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return out.transpose(1, 2).flatten(2) @ self.output


class Stage(nn.Module):
    """Some layers; the embedding before the first, norm and head after the last."""

    def __init__(self, arrays: dict, config: dict, stage: int, num_stages: int):
        super().__init__()
        length = config["num_layers"] // num_stages
        layers = {name.split(".")[1]: value for name, value in arrays.items() if name.startswith("layers.")}
        self.blocks = nn.ModuleList(Block(layers, stage * length + i, config) for i in range(length))
        self.eps = config["norm_eps"]
        for name, held in (
            ("embed", stage == 0),
            ("norm", stage == num_stages - 1),
            ("head", stage == num_stages - 1),
        ):
            self.register_parameter(name, nn.Parameter(torch.tensor(arrays[name])) if held else None)

    def forward(self, x):
        x = x if self.embed is None else F.embedding(x, self.embed)
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else norm(x, self.norm, self.eps) @ self.head


def norm(x, scale, eps):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * scale


def rotate(x, theta):
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[-2])[:, None] * theta ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Runs:
    """Pipelines by (schedule, num_microbatches), made when first asked for."""

    def __init__(self, arrays: dict, config: dict):
        self.arrays, self.config, self.made = arrays, config, {}

    def one(self, name: str, count: int) -> tuple[float, float]:
        """(seconds from the common start until all ranks are done, loss)."""
        if (name, count) not in self.made:
            self.made[name, count] = self.make(name, count)
        schedule, stages, first, last = self.made[name, count]
        tokens, targets = (
            torch.tensor(self.arrays[f"{what}_{count}"]).long() for what in ("tokens", "targets")
        )
        for stage in stages:
            stage.submod.zero_grad(set_to_none=True)
        losses = []
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*([tokens] if first else []), **({"target": targets, "losses": losses} if last else {}))
        dist.barrier()
        seconds = time.perf_counter() - start
        loss = torch.stack(losses).sum().detach() if last else torch.zeros(())
        dist.all_reduce(loss)
        return seconds, float(loss)

    def make(self, name: str, count: int):
        rank, size = dist.get_rank(), dist.get_world_size()
        kind, per_rank = SCHEDULES[name]
        mine = [rank] if per_rank == 1 else [rank, 2 * size - 1 - rank if name == "v_shape" else size + rank]
        number = size * per_rank
        tokens = self.arrays[f"tokens_{count}"].size

        def loss(logits, target):
            return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / tokens

        stages = [
            p.PipelineStage(Stage(self.arrays, self.config, s, number), s, number, torch.device("cpu"))
            for s in mine
        ]
        given = stages[0] if kind in (p.ScheduleGPipe, p.Schedule1F1B) else stages
        return kind(given, count, loss_fn=loss, scale_grads=False), stages, 0 in mine, number - 1 in mine


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    arrays = dict(np.load(sys.argv[1]))
    runs = Runs(arrays, json.loads(str(arrays.pop("config"))))
    while True:
        line = [sys.stdin.readline().split() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(line, 0)
        if not line[0]:
            break
        seconds, loss = runs.one(line[0][0], int(line[0][1]))
        if dist.get_rank() == 0:
            print(seconds, loss, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
