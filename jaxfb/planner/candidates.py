"""Lists every way to lay one job over so many devices."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from jaxfb.config import Config
from jaxfb.display import number_of
from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import stack_of
from jaxfb.planner.counts import num_shards
from jaxfb.schedules import KINDS
from jaxfb.schedules.by_device import runs_on

CHUNKS = (1, 2, 4, 5)
"""Five for models of 80 layers. Not more: the formula is too fast for stages of one layer (docs/measurements.md)."""
REMAT = ("none", "selective", "layer", "offload", "full")
ONE_STAGE_REMAT = REMAT[:-1]
ROWS = (1, 2, 4, 8, 16)
MOST_TENSOR, MOST_PIPE = 8, 16


@dataclass(frozen=True)
class Fixed:
    """The parts of a layout that are not searched; None: is searched.

    rows: of a microbatch. microbatches: in place of it. schedule, chunks: with either, there is a pipeline.
    """

    remat: str | None = None
    gather: str | int | None = None
    rows: int | None = None
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int | None = None

    def remats(self, pipe: int) -> Sequence[str]:
        return (REMAT if pipe > 1 else ONE_STAGE_REMAT) if self.remat is None else (self.remat,)

    def gathers(self, shards: int) -> Sequence[str | int]:
        if shards == 1:
            return ("layer",)
        return ("layer", "step") if self.gather is None else (self.gather,)

    def rows_for(self, rows: int, replicas: int) -> Sequence[int]:
        """Returns the rows a microbatch by which the rows of an update divide."""
        asked = ROWS if self.rows is None else (self.rows,)
        if self.microbatches is not None:
            asked = [rows // (replicas * self.microbatches)]
        found = [one for one in asked if one and rows % (replicas * one) == 0]
        return [one for one in found if self.microbatches in (None, rows // (replicas * one))]

    def stays(self, config: Config) -> bool:
        """Returns whether a layout that was changed has still what is fixed of remat and gathers."""
        parallel = config.parallel
        return self.remat in (None, parallel.remat) and self.gather in (None, parallel.fsdp_gather)

    def takes(self, schedule: str | None, chunks: int) -> bool:
        return self.schedule in (None, schedule) and self.chunks in (None, chunks)


NOTHING = Fixed()


def candidates(
    config: Config, sizes: TransformerConfig, num_devices: int, fixed: Fixed = NOTHING
) -> Iterator[Config]:
    """Returns the config on every mesh x schedule x chunks x remat x rows a microbatch that divides. The rows of an
    update, the model, the optimizer and mesh.context stay, and what is `fixed`."""
    for mesh in _meshes(config, sizes, num_devices):
        replicas = mesh["data"] * mesh["fsdp"] * mesh["expert"]
        choices = itertools.product(
            [one for one in _schedules(mesh, sizes) if fixed.takes(*one)],
            fixed.remats(mesh["pipe"]),
            fixed.rows_for(config.batch.rows, replicas),
        )
        for (schedule, chunks), remat, rows in choices:
            for gather in fixed.gathers(mesh["fsdp"] * mesh["context"]):
                if schedule is not None and not runs_on(schedule, mesh, gather):
                    continue
                yield _with(config, mesh, schedule, chunks, remat, rows, gather)


def label(config: Config) -> str:
    """Returns a label such as `pipe 4 x fsdp 16, 1f1b, remat full, 2 rows, gather layer`."""
    axes = [f"{axis} {size}" for axis, size in vars(config.mesh).items() if size > 1]
    parts = [" x ".join(axes) or "one device"]
    if config.schedule:
        parts.append(config.schedule + (f" {config.chunks}" if config.chunks > 1 else ""))
    parts.append(f"remat {config.parallel.remat}")
    rows = config.batch.rows_per_microbatch
    parts.append(f"{rows} rows" if rows is None else number_of(rows, "row"))
    parts += ["state on the host"] if config.optimizer.memory == "host" else []
    return ", ".join(parts + ([f"gather {config.parallel.fsdp_gather}"] if num_shards(config) > 1 else []))


def _meshes(config: Config, sizes: TransformerConfig, devices: int) -> Iterator[dict[str, int]]:
    context = config.mesh.context
    tensors = [n for n in _divisors(devices // context, MOST_TENSOR) if _tensor_divides(sizes, n)]
    most = 1 if config.optimizer.sharding == "gradients" else MOST_PIPE  # ZeRO-2 is refused in a pipeline
    pipes = [n for n in _divisors(devices // context, most) if stack_of(sizes).num_periods % n == 0]
    experts = _divisors(devices // context, sizes.num_experts) if sizes.num_experts else [1]
    for tensor, pipe, expert in itertools.product(tensors, pipes, experts):
        rest, left = divmod(devices, context * tensor * pipe * expert)
        if left or not rest or (sizes.num_experts and sizes.num_experts % expert):
            continue
        for fsdp in _fsdp_sizes(rest, sizes.hidden_size):
            sizes_ = {"pipe": pipe, "data": rest // fsdp, "fsdp": fsdp, "expert": expert}
            yield sizes_ | {"context": context, "tensor": tensor}


def _fsdp_sizes(devices: int, hidden_size: int) -> list[int]:
    """Returns 1, those of 8 to 64, and the largest of what divides the hidden size, which is a dim of every matrix."""
    found = [size for size in _divisors(devices, devices) if hidden_size % size == 0]
    return [size for size in found if size in (1, found[-1]) or 8 <= size <= 64]


def _schedules(mesh: dict[str, int], sizes: TransformerConfig) -> list[tuple[str | None, int]]:
    if mesh["pipe"] == 1:
        return [(None, 1)]
    kinds = [name for name in KINDS if not (KINDS[name].baseline or KINDS[name].pieces)]
    choices = dict.fromkeys(
        (name, v) for name in kinds for asked in CHUNKS for v in KINDS[name].chunks(asked)
    )
    return [one for one in choices if stack_of(sizes).num_periods % (mesh["pipe"] * one[1]) == 0]


def _with(config: Config, mesh, schedule, chunks, remat, rows, gather) -> Config:
    return replace(
        config,
        mesh=replace(config.mesh, **mesh),
        schedule=schedule,
        chunks=chunks,
        batch=replace(config.batch, rows_per_microbatch=rows, num_microbatches=None),
        parallel=replace(
            config.parallel,
            remat=remat,
            fsdp_gather=gather,
            head_placement=None,
            layers_per_stage=None,
            pieces=1,
        ),
    )


def _divisors(number: int, most: int) -> list[int]:
    return [n for n in range(1, min(number, most) + 1) if number % n == 0]


def _tensor_divides(sizes: TransformerConfig, tensor: int) -> bool:
    cut = (sizes.num_heads, sizes.num_kv_heads, sizes.mlp_size, sizes.vocab_size, sizes.expert_mlp_size)
    return all(size % tensor == 0 for size in cut)
