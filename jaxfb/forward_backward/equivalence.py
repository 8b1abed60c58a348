"""Compares a model's gradients on any mesh under any schedule with those of one device.

The comparison is plain `jax.value_and_grad` of all rows at once, or of a sum over microbatches where `normalize`
divides each by itself or none. It shares no code with the engine but the way a `Pipelined` is put together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.forward_backward.arguments import check_model, check_params, layer_counts, prng_keys
from jaxfb.forward_backward.engine import get_forward_backward_func
from jaxfb.forward_backward.head_placement import check_placement
from jaxfb.forward_backward.loss_function.loss import as_loss_output
from jaxfb.forward_backward.microbatches import check_leaves, row_keys
from jaxfb.forward_backward.offered import counted_of
from jaxfb.forward_backward.options import OF_A_PIPELINE, EngineKeywords
from jaxfb.forward_backward.sequential import sequential
from jaxfb.mesh import AXES, axis_size, data_parallel, make_mesh
from jaxfb.platforms.compat import config_value
from jaxfb.refusal import Refused, choice, function, instance, integer, refuse
from jaxfb.schedules import KINDS, Schedule, kind_of
from jaxfb.schedules.by_device import runs_on
from jaxfb.trainable import Patterns, checked_patterns, joined, pruned
from jaxfb.types import LossFn, Pipelined, PyTree, Sum

ScheduleChoice = str | Schedule | tuple[str, int]

MESHES = (
    *({"data": 2}, {"fsdp": 2}, {"tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
    *({"pipe": 2}, {"pipe": 4, "data": 2}, {"pipe": 2, "fsdp": 2, "tensor": 2}),
)
TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
"""How far loss and gradients that are computed in a dtype may be from those of one device in the widest dtype, relative
to the largest number of the leaf: rounding of the layers, a few units of the dtype (2^-52, 2^-23, 2^-8, 2^-11), not of
sums over rows, microbatches and devices, which are float32 at least."""
_PIPELINE_OPTIONS = tuple(name for name in OF_A_PIPELINE if name not in ("schedule", "num_chunks"))
_SMALL = 1e-3  # of the largest gradient: leaves below are judged by this scale, not by their own rounding


@dataclass(frozen=True)
class Difference:
    """The difference between one mesh under one schedule and one device.

    mesh, schedule:   as text, such as "pipe=2 data=2" and "interleaved x2" (chunks); "" without a pipeline.
    num_microbatches: of the plan that ran.
    loss:             |loss - reference| / |reference|.
    absolute:         largest absolute difference of any element of the gradient.
    relative:         largest over leaves of (absolute difference / largest |gradient| of that leaf; leaves below
                      a thousandth of the largest gradient of all are measured against that).
    leaf:             path of the leaf with the largest relative difference.
    refused:          why it did not run, or "".
    """

    mesh: str
    schedule: str
    num_microbatches: int = 0
    loss: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    leaf: str = ""
    refused: str = ""

    @property
    def size(self) -> float:
        """Returns the larger of the relative differences, of loss and gradient."""
        return max(self.loss, self.relative)

    @property
    def where(self) -> str:
        """Returns mesh and schedule."""
        return f"{self.mesh} {self.schedule}".strip()


@dataclass(frozen=True)
class Equivalence:
    """The result of `check_equivalence`; prints as a table. dtype: what the meshes computed in."""

    dtype: str
    rows: int
    differences: tuple[Difference, ...]

    @property
    def ran(self) -> tuple[Difference, ...]:
        """Returns the cases that were not refused."""
        return tuple(one for one in self.differences if not one.refused)

    @property
    def worst(self) -> Difference:
        """Returns the case with the largest relative difference, of loss or gradient.

        Raises:
          ValueError: nothing ran.
        """
        if not self.ran:
            reasons = "; ".join(f"{one.mesh}: {one.refused}" for one in self.differences)
            raise Refused(
                f"no mesh and schedule could be compared with one device: {reasons or 'none given'}"
            )
        return max(self.ran, key=lambda one: one.size)

    def raise_if_above(self, tolerance: float | None = None) -> None:
        """Raises AssertionError with the table if any relative difference is above (or is NaN), or nothing ran.

        tolerance: None is that of the dtype in `TOLERANCES`, such as 1e-10 in float64 and 1e-4 in float32.
        """
        tolerance = TOLERANCES[self.dtype] if tolerance is None else tolerance
        one = self.worst
        if not one.size <= tolerance:
            raise AssertionError(
                f"gradients on {one.where} differ from one device by {one.size:.1e} in {one.leaf}, above "
                f"{tolerance:g}; check that the loss sums over rows without dividing or comparing them, and draws with "
                "each row's key\n"
                f"{self}"
            )

    def __str__(self) -> str:
        head = ("mesh", "schedule", "microbatches", "loss", "gradient", "absolute", "worst leaf")
        lines = [head, *(_cells(one) for one in self.differences)]
        widths = [max(len(line[i]) for line in lines if len(line) > i + 1) for i in range(len(head) - 1)]
        table = [
            "  ".join(c.ljust(w) for c, w in zip(line, [*widths, 0], strict=False)).rstrip() for line in lines
        ]
        title = f"relative difference to one device, {self.rows} rows in {self.dtype}"
        return "\n".join([title, *table])


def check_equivalence(
    model: LossFn | Pipelined,
    params: PyTree,
    batch: PyTree,
    meshes: Sequence[Mapping[str, int] | Mesh] | None = None,
    schedules: Sequence[ScheduleChoice] | None = None,
    *,
    rng: jax.Array | None = None,
    rows_per_microbatch: int = 1,
    dtype: str | None = None,
    report: Callable[[Difference], None] | None = None,
    **options: Unpack[EngineKeywords],
) -> Equivalence:
    """Runs your own model on each mesh under each schedule and compares loss and gradient with one device.

    Args:
      model: `loss_fn(params, microbatch, rng) -> LossOutput | Sum`, or a `Pipelined`.
      params: any pytree of float arrays; cast to `dtype`.
      batch: pytree of [rows, ...] arrays; a few rows are enough. Its float leaves are cast likewise.
      meshes: sizes such as {"pipe": 2, "data": 2}, or meshes; None takes the kinds of mesh that the devices at hand
        allow. `XLA_FLAGS=--xla_force_host_platform_device_count=8` makes eight devices of a CPU.
      schedules: for meshes with pipe > 1: names, (name, num_chunks) or `Schedule`s; None takes every kind
        that runs sequences whole, or in `num_pieces` where the options have it.
      rng: PRNG key of dropout and the like, None for none.
      rows_per_microbatch: on each replica; small, so that there are several microbatches.
      dtype: "float64", "float32", "bfloat16" or "float16"; None is float64 where x64 is enabled (`JAX_ENABLE_X64=1`),
        else float32. The one device computes in float64 or float32 whatever the dtype, from the same rounded numbers.
      report: called with each `Difference` as it is found; a case takes seconds to compile.
      options: of `get_forward_backward_func`, such as remat, fsdp_gather, optimizer_sharding, trainable. The one
        device divides by the rule of `normalize`.
    Returns:
      `Equivalence`: print it, or call `.raise_if_above(tolerance)`. A mesh or schedule that does not fit the model
      is listed with the reason.
    Raises:
      ValueError: an argument is not what it must be, or the model breaks its contract already on one device.
    """
    trainable = _check_call(model, params, batch, schedules, report, options)
    rng, rows_per_microbatch = prng_keys(rng), integer("rows_per_microbatch", rows_per_microbatch)
    meshes = _allowed(model) if meshes is None else _check_meshes(meshes)
    widest = "float64" if config_value("jax_enable_x64") else "float32"
    dtype = _check_dtype(dtype or widest, widest)
    params, batch = _cast((params, batch), dtype)
    rows = len(jax.tree.leaves(batch)[0])
    objective = _objective(options.get("normalize", "global"), rows, rows_per_microbatch)
    wide_params, wide_batch = _cast((params, batch), widest)
    whole = _whole(model, wide_params, wide_batch, rng, objective, trainable)
    compare, found = _Comparison(model, params, batch, rng, rows_per_microbatch, options), []
    for mesh in meshes:
        for schedule in _kinds(mesh, schedules, options.get("num_pieces", 1) != 1):
            found.append(compare(mesh, schedule, whole))
            if report is not None:
                report(found[-1])
    return Equivalence(dtype, rows, tuple(found))


def _check_call(
    model: Any, params: Any, batch: Any, schedules: Any, report: Any, options: Mapping[str, Any]
) -> Patterns | None:
    """Refuses what no mesh could run, and returns the patterns of the trained parameters."""
    check_model(model)
    _check_options(options)
    trainable = checked_patterns(options.get("trainable"))
    check_params(params, forward_only=False, concrete=True, trainable=trainable)
    _check_rows(batch)
    if report is not None:
        function("report", report, "(difference)")
    if schedules is not None:
        names = "a list of names, (name, num_chunks) or Schedules, or None"
        instance("schedules", schedules, list | tuple, names)
    return trainable


@dataclass(frozen=True)
class _Comparison:
    model: Any
    params: PyTree
    batch: PyTree
    rng: Any
    rows_per_microbatch: int
    options: Mapping[str, Any]

    def __call__(self, mesh: Mapping | Mesh, schedule: ScheduleChoice | None, whole: tuple) -> Difference:
        sizes = {axis: size for axis, size in _sizes(mesh).items() if size > 1}
        names = (" ".join(f"{axis}={size}" for axis, size in sizes.items()) or "one device", _name(schedule))
        try:
            plan, out = self._run(mesh if isinstance(mesh, Mesh) else make_mesh(**mesh), schedule)
        except ValueError as refusal:
            return Difference(*names, refused=str(refusal).partition("\n")[0])
        return _difference(names, plan, (out.loss, out.grads), whole)

    def _run(self, mesh: Mesh, schedule: ScheduleChoice | None):
        replicas = data_parallel(mesh)
        rows = len(jax.tree.leaves(self.batch)[0])
        plan = BatchPlan(rows=rows, rows_per_microbatch=self.rows_per_microbatch, data_parallel=replicas)
        options = dict(self.options)
        if schedule is not None and axis_size(mesh, "pipe") > 1:
            name, chunks = schedule if isinstance(schedule, tuple) else (schedule, _chunks(schedule))
            options |= {"schedule": name, "num_chunks": chunks, "poison_bubbles": True}
        else:
            options = {name: value for name, value in options.items() if name not in _PIPELINE_OPTIONS}
        fb = get_forward_backward_func(mesh, **options)
        return plan, fb(self.model, self.params, self.batch, plan, self.rng)


def _check_dtype(dtype: str, widest: str) -> str:
    choice("dtype", dtype, tuple(TOLERANCES))
    if dtype == "float64" and widest != dtype:
        raise Refused(
            'dtype="float64" needs 64-bit numbers; set JAX_ENABLE_X64=1 or use "float32"',
            [{"dtype": "float32"}],
        )
    return dtype


def _check_rows(batch: PyTree) -> None:
    check_leaves(batch)
    rows = sorted({leaf.shape[0] for leaf in jax.tree.leaves(batch)})
    if len(rows) > 1:
        raise Refused(f"every leaf of a batch must have the same rows, got leaves of {rows} rows")
    integer("the number of rows of batch", rows[0])


def _check_options(options: Mapping[str, Any]) -> None:
    """Refuses an option that no mesh takes, rather than listing it with every mesh as the reason."""
    legal = list(inspect.signature(get_forward_backward_func).parameters)[2:]
    for name in options:
        choice("an option of check_equivalence", name, legal)
    if options.get("head_placement") is not None:
        check_placement(options["head_placement"])
    layer_counts(options.get("layers_per_stage"))
    get_forward_backward_func(**{name: v for name, v in options.items() if name not in _PIPELINE_OPTIONS})


def _check_meshes(meshes: Any) -> Sequence[Mapping[str, int] | Mesh]:
    meshes = [meshes] if isinstance(meshes, (Mapping, Mesh)) else meshes
    example = "a list of jax meshes or of sizes by axis, such as [{'pipe': 2, 'data': 2}]"
    instance("meshes", meshes, list | tuple, example)
    for mesh in meshes:
        if not isinstance(mesh, Mesh) and not (isinstance(mesh, Mapping) and set(mesh) <= set(AXES)):
            refuse("meshes", mesh, f"{example}, with axes among {', '.join(AXES)}")
    return meshes


Objective = Callable[[Callable[[PyTree], Mapping[str, Sum]], PyTree], Any]
"""Returns the loss, from a function of rows to their terms and all rows."""


def _objective(normalize: str, rows: int, rows_per_microbatch: int) -> Objective:
    """Returns what is minimized under this option, over microbatches of so many rows of one replica each."""
    if normalize == "global":
        return lambda terms_of, data: sum(term.value for term in terms_of(data).values())
    number = BatchPlan(rows=rows, rows_per_microbatch=rows_per_microbatch).num_microbatches

    def value(term: Sum) -> jax.Array:
        return term.total if normalize == "none" or term.weight is None else term.value / number

    def over_microbatches(terms_of, data):
        def one(part):
            return sum(value(term) for term in terms_of(part).values())

        return lax.map(one, jax.tree.map(lambda x: x.reshape(number, -1, *x.shape[1:]), data)).sum()

    return over_microbatches


def _whole(
    model: LossFn | Pipelined,
    params: PyTree,
    batch: PyTree,
    rng: Any,
    objective: Objective,
    trainable: Patterns | None,
) -> tuple[float, PyTree]:
    """Returns (loss, gradient) of all rows on one device; the gradient is of the trained parameters alone."""
    loss_fn = sequential(model) if isinstance(model, Pipelined) else model
    rows = len(jax.tree.leaves(batch)[0])
    keys, counted = row_keys(rng, BatchPlan(rows=rows, num_microbatches=1)), counted_of(model)

    def loss(trained, params, batch, keys):
        params = joined(trained, params)
        if counted is not None and counted.before is not None:
            metrics = dict(as_loss_output(loss_fn(params, batch, keys)).metrics)
            params = counted.before(params, lax.stop_gradient(metrics))
        return objective(lambda data: as_loss_output(loss_fn(params, *data)).terms, (batch, keys))

    device = jax.devices()[0]
    given = jax.device_put((pruned(trainable, params), params, batch, keys), device)
    return jax.device_get(jax.jit(jax.value_and_grad(loss))(*given))


def _difference(names: tuple[str, str], plan: BatchPlan, got: tuple, whole: tuple) -> Difference:
    loss, grads = jax.device_get(got)
    leaves = jax.tree_util.tree_leaves_with_path(whole[1])
    largest = max((_largest(leaf) for _, leaf in leaves), default=0.0)
    absolute = [_apart(a, b) for a, (_, b) in zip(jax.tree.leaves(grads), leaves, strict=True)]
    scales = [max(_largest(leaf), _SMALL * largest) or 1.0 for _, leaf in leaves]
    relative = [apart / scale for apart, scale in zip(absolute, scales, strict=True)]
    worst = int(np.argmax(relative))
    return Difference(
        *names,
        num_microbatches=plan.num_microbatches,
        loss=_apart(loss, whole[0]) / (_largest(whole[0]) or 1.0),
        absolute=max(absolute),
        relative=relative[worst],
        leaf=jax.tree_util.keystr(leaves[worst][0], simple=True, separator="."),
    )


def _apart(a: Any, b: Any) -> float:
    """Returns largest |a - b|; infinite where one alone is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0))


def _largest(a: Any) -> float:
    a = np.abs(np.asarray(a, np.float64))
    return float(np.max(a, where=np.isfinite(a), initial=0.0))


def _cast(tree: PyTree, dtype: str) -> PyTree:
    def one(leaf):
        leaf = jnp.asarray(leaf)
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(one, jax.device_get(tree))


def _allowed(model: LossFn | Pipelined) -> list[dict[str, int]]:
    """Returns the meshes of MESHES for which there are devices, and of which the model can use each axis."""
    usable = lambda sizes: isinstance(model, Pipelined) or "pipe" not in sizes  # noqa: E731
    count = len(jax.devices())
    return [sizes for sizes in MESHES if usable(sizes) and count % int(np.prod(list(sizes.values()))) == 0]


def _kinds(mesh: Mapping | Mesh, schedules: Sequence | None, in_pieces: bool) -> Sequence:
    sizes = _sizes(mesh)
    if sizes.get("pipe", 1) == 1:
        return (None,)
    if schedules is not None:
        return schedules
    return [
        name
        for name, kind in KINDS.items()
        if kind.pieces == in_pieces and runs_on(name, dict(sizes), "layer")
    ]


def _sizes(mesh: Mapping | Mesh) -> Mapping[str, int]:
    return mesh.shape if isinstance(mesh, Mesh) else mesh


def _chunks(schedule: str | Schedule) -> int:
    if isinstance(schedule, Schedule):
        return schedule.num_chunks
    return kind_of(schedule).default_chunks


def _name(schedule: ScheduleChoice | None) -> str:
    if schedule is None:
        return ""
    name, chunks = schedule if isinstance(schedule, tuple) else (schedule, _chunks(schedule))
    name = name.name if isinstance(name, Schedule) else name
    return name if chunks == 1 else f"{name} x{chunks}"


def _cells(one: Difference) -> tuple[str, ...]:
    if one.refused:
        return one.mesh, one.schedule, f"refused: {one.refused}"
    numbers = [f"{value:.1e}" for value in (one.loss, one.relative, one.absolute)]
    return one.mesh, one.schedule, str(one.num_microbatches), *numbers, one.leaf
