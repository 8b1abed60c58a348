"""Describes one case in plain values, so that it can be drawn without JAX, printed, sent and made smaller."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from jaxfb.schedules import kind_of

REPLICA_AXES = ("data", "fsdp", "expert")
PIPELINED = ("stages", "transformer", "moe", "sums")
"""The models that can be cut into stages."""
Remainder = Literal["error", "pad", "drop"]


def can_overlap(pipe: int, schedule: str | None, optimizer_sharding: str | None) -> bool:
    """Returns whether `overlap_grad_reduce` is possible: a drawn table may end with several chunks."""
    if pipe > 1 and schedule is not None and (schedule == "random" or kind_of(schedule).by_device):
        return False
    return optimizer_sharding != "gradients"


@dataclass(frozen=True)
class Case:
    """Lists everything that one comparison depends on. The defaults are the simplest choice of each.

    mesh:        sizes of the axes above 1.
    model:       "stages", a toy `Pipelined`; "loss", the same as a plain loss function; "linen", "nnx" and "equinox",
                 a module of that library; "transformer" and "moe", the built-in one; "sums", integers whose sum
                 a 16-bit float cannot represent; or "own", the user's.
    tied, dropout, tensor_specs: of the toy and the transformer; tensor_specs cuts parameters over tensor.
    attention:   over a context axis, how the toy's and the transformer's tokens see each other: ring, all_gather or
                 all_to_all; None leaves the toy's alone.
    container:   what kind of pytree the toy's parameters are: dict, ordered, namedtuple or list.
    leaves:      unusual leaves beside them: empty (of size zero), unused, stopped (read without a gradient), scalar.
    mixed:       vectors stay float32 where matrices are 16-bit.
    large_tables: embedding and head are treated as so large that no device has all of them, as for 8B.
    terms, layer_terms, metrics, layer_metrics, outputs: what the toy's loss function returns, by name (`outputs.py`).
    masks:       full, ragged, empty_microbatch (one of them counts nothing) or empty (none counts anything).
    length:      tokens of a row.
    surplus:     rows of padding under remainder="pad", rows too many under remainder="drop".
    schedule:    a name that the engine knows, or random, a table drawn from table_seed (`tables.py`), whose weight
                 gradients are separate actions if splits_backward.
    rng:         none, key, rows (one a row) or legacy (an old-style uint32 key).
    call:        direct, jit (inside the caller's own, and parameters made by a function), split (rows already in
                 microbatches) or placed (parameters already on one device).
    x64:         whether 64-bit numbers are enabled.
    update:      whether a train step with its optimizer is compared, or the function of forward and backward alone.
    second:      what a second update is given: none, same (the same rows again), nonfinite (rows that make the loss
                 infinite) or empty (rows that count nothing); the last two must leave parameters and state alone.
    data_seed:   of parameters and rows.
    The other fields are arguments of `BatchPlan`, `get_forward_backward_func` and `make_train_step`.
    """

    mesh: dict[str, int] = field(default_factory=dict)
    model: str = "stages"
    num_layers: int = 2
    tied: bool = False
    dropout: bool = False
    tensor_specs: bool = False
    attention: str | None = None
    container: str = "dict"
    leaves: tuple[str, ...] = ()
    mixed: bool = False
    large_tables: bool = False
    terms: tuple[str, ...] = ("tokens",)
    layer_terms: bool = False
    metrics: tuple[str, ...] = ()
    layer_metrics: bool = False
    outputs: tuple[str, ...] = ()
    masks: str = "full"
    length: int = 4
    num_microbatches: int = 1
    rows_per_microbatch: int = 1
    remainder: Remainder = "error"
    surplus: int = 0
    rng: str = "none"
    call: str = "direct"
    schedule: str | None = None
    table_seed: int = 0
    splits_backward: bool = False
    num_chunks: int = 1
    layers_per_stage: tuple[int, ...] | None = None
    head_placement: str | None = None
    normalize: str = "global"
    remat: str = "none"
    fsdp_gather: str = "layer"
    optimizer_sharding: str = "none"
    overlap_grad_reduce: bool | None = None
    poison_bubbles: bool = False
    param_dtype: str = "float64"
    compute_dtype: str | None = None
    accum_dtype: str | None = None
    reduce_dtype: str | None = None
    x64: bool = True
    grad_scale: float = 1.0
    forward_only: bool = False
    update: bool = False
    optimizer: str = "sgd"
    max_grad_norm: float | None = None
    clip_convention: str = "exact"
    loss_scale: str | None = None
    second: str = "none"
    data_seed: int = 0

    @property
    def num_devices(self) -> int:
        """Counts the devices that the mesh takes."""
        return prod(self.mesh.values())

    @property
    def accumulates_in(self) -> str:
        """Names the dtype in which gradients are summed over microbatches."""
        return self.accum_dtype or ("float64" if self.param_dtype == "float64" else "float32")

    @property
    def reduces_in(self) -> str:
        """Names the narrowest dtype in which gradients are summed over devices or microbatches."""
        in_loop = bool({"fsdp", "context"} & self.mesh.keys()) and self.fsdp_gather == "layer"
        in_loop |= "data" in self.mesh and self.optimizer_sharding == "gradients"
        dtype = self.reduce_dtype if in_loop else None
        return narrower(self.accumulates_in, dtype or self.accumulates_in)

    @property
    def data_parallel(self) -> int:
        """Counts the replicas: data * fsdp * expert."""
        return prod(self.mesh.get(axis, 1) for axis in REPLICA_AXES)

    @property
    def pipe(self) -> int:
        """Counts the devices along the pipe axis."""
        return self.mesh.get("pipe", 1)

    @property
    def rows_per_global_microbatch(self) -> int:
        """Counts the rows of one microbatch over all replicas."""
        return self.data_parallel * self.rows_per_microbatch

    @property
    def padded_rows(self) -> int:
        """Counts the rows that are computed, padding included."""
        return self.rows_per_global_microbatch * self.num_microbatches

    @property
    def rows(self) -> int:
        """Counts the rows of the batch that the engine is given."""
        return self.padded_rows + {"pad": -self.surplus, "drop": self.surplus}.get(self.remainder, 0)

    @property
    def real_rows(self) -> int:
        """Counts the rows of the batch without those that are dropped."""
        return min(self.rows, self.padded_rows)

    @property
    def computes_in(self) -> str:
        """Returns the narrowest dtype of the computation."""
        return narrower(self.param_dtype, self.compute_dtype or self.param_dtype)

    def engine_options(self) -> dict[str, Any]:
        """Returns the keyword arguments of `get_forward_backward_func` that are not its defaults."""
        return {name: value for name, value in self.not_default().items() if name in ENGINE_OPTIONS}

    def step_options(self) -> dict[str, Any]:
        """Returns the keyword arguments that `make_train_step` gets besides."""
        return {name: value for name, value in self.not_default().items() if name in CLIPPING}

    def not_default(self) -> dict[str, Any]:
        """Returns the fields that are not as in the simplest case: name -> value."""
        pairs = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: value for name, value in pairs if value != getattr(SIMPLEST, name)}

    def but(self, **changes: Any) -> Case:
        """Returns the same case with some fields changed."""
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        """Writes one line: the mesh, the model, then what is not as in the simplest case."""
        sizes = " ".join(f"{axis}={size}" for axis, size in self.mesh.items()) or "one device"
        others = {name: v for name, v in self.not_default().items() if name not in ("mesh", "model")}
        return f"{sizes} | {self.model} | {' '.join(f'{name}={_short(v)}' for name, v in others.items())}"


ENGINE_OPTIONS = (
    *("schedule", "num_chunks", "layers_per_stage", "head_placement", "normalize", "remat", "fsdp_gather"),
    *("optimizer_sharding", "overlap_grad_reduce", "poison_bubbles"),
    *("compute_dtype", "accum_dtype", "reduce_dtype"),
)
CLIPPING = ("max_grad_norm", "clip_convention")
SIMPLEST = Case()
BY_WIDTH = ("bfloat16", "float16", "float32", "float64")


def narrower(one: str, other: str) -> str:
    """Returns the dtype with the fewer bits of precision."""
    return min(one, other, key=BY_WIDTH.index)


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)
