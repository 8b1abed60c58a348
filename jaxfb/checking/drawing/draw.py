"""Draws cases: case k of seed S is a pure function of (S, k), legal by construction. No JAX in here."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from jaxfb.checking.drawing.case import PIPELINED, REPLICA_AXES, Case, can_overlap
from jaxfb.checking.drawing.dice import Dice
from jaxfb.schedules.by_device import runs_on

NUM_DEVICES = 16
FEW_DEVICES = 8  # unless the mesh has four axes
MOST_ROWS = 48
AXES = {"pipe": 6, "data": 3, "fsdp": 4, "expert": 1, "context": 2, "tensor": 3}
OWN_AXES = ("pipe", "data", "fsdp", "tensor")
MODELS = {
    **{"stages": 40, "loss": 20, "linen": 4, "nnx": 4, "equinox": 4},
    **{"transformer": 6, "moe": 3, "sums": 8},
}
TOYS = ("stages", "loss")
WITH_ANSWERS = (*TOYS, "linen", "nnx", "equinox")
TERMS = ("rows", "sum", "shape", "negative")
METRICS = (
    *("mean", "sum_vector", "sum_vectors", "sum_undivided", "count"),
    *("max", "max_vector", "max_int", "max_bool", "min", "min_vector", "min_int", "min_bool"),
    *("last", "last_vector", "last_int", "last_bool"),
)
OUTPUTS = ("row", "token", "vector", "int", "bool", "id")
ATTENTION = ("ring", "all_gather", "all_to_all")
LEAVES = ("empty", "unused", "stopped", "scalar")
RANDOM = "random"
SCHEDULES = {
    "1f1b": (1, 2),
    "interleaved": (1, 2, 3),
    "zero_bubble": (1, 2),
    "v_shape": (2,),
    "gpipe": (1, 2),
    "zb_v": (2,),
    "v_half": (2,),
    "v_min": (2,),
    "dualpipe_v": (2,),
    RANDOM: (1, 2),
}
OPTIMIZERS = (
    *("adamw", "lion", "adafactor", "muon", "sgd", "momentum"),
    *(
        "optax.adam",
        "optax.rmsprop",
        "optax.adafactor",
        "optax.lamb",
        "optax.optimistic",
        "optax.schedule_free",
    ),
    *("optax.amsgrad", "optax.bfloat16_moments", "optax.masked", "optax.per_leaf", "optax.hyperparameters"),
)
FOR_FEW_BITS = ("sgd", "momentum", "lion", "optax.masked")
"""Optimizers that do not divide by a moment that underflows in 16 bits."""


@dataclass(frozen=True)
class Own:
    """Describes a user's own model to the draw.

    rows:        of its batch.
    num_layers:  of a `Pipelined`, None for a loss function.
    axes:        those that the mesh may have.
    num_devices: that there are.
    """

    rows: int
    num_layers: int | None
    axes: tuple[str, ...] = OWN_AXES
    num_devices: int = NUM_DEVICES


def draw(seed: int, index: int, own: Own | None = None) -> Case:
    """Draws case `index` of a seed; around a user's own model if `own` describes one."""
    dice = Dice("jaxfb check", seed, index)
    model = "own" if own else dice.weighted(MODELS)
    mesh = _mesh(dice, model, own)
    values: dict[str, Any] = {"model": model, "mesh": mesh, "data_seed": dice.one(*range(1000))}
    values |= _dtypes(dice, model)
    values |= _pipeline(dice, model, mesh, own) if "pipe" in mesh else _layers(dice, own)
    values |= _rows(dice, values, own)
    values |= _model(dice, values) if own is None else {}
    values |= _engine(dice, mesh)
    values |= _update(dice, values)
    values |= _reduction(dice, values)
    values |= _overlap(dice, values)
    values |= _tables(dice, values)
    return Case(**values)


def _mesh(dice: Dice, model: str, own: Own | None) -> dict[str, int]:
    axes = {axis: weight for axis, weight in AXES.items() if _may_have(model, axis, own)}
    number = dice.weighted({0: 1, 1: 6, 2: 8, 3: 6, 4: 2})
    large = (2, 2, 3, 4) if model in (*TOYS, "sums", "own") and number < 4 else (2,)
    mesh: dict[str, int] = {}
    most = min(NUM_DEVICES if number == 4 else FEW_DEVICES, own.num_devices if own else NUM_DEVICES)
    for _ in range(number):
        left = most // prod(mesh.values())
        sizes = [size for size in large if size <= left]
        if not sizes or not axes:
            break
        axis = dice.weighted(axes)
        del axes[axis]
        mesh[axis] = dice.one(*sizes)
    if own and "pipe" in mesh:
        mesh["pipe"] = min(mesh["pipe"], own.num_layers or 1)
    return {axis: mesh[axis] for axis in AXES if mesh.get(axis, 1) > 1}


def _may_have(model: str, axis: str, own: Own | None) -> bool:
    if own:
        return axis in own.axes and (axis != "pipe" or own.num_layers is not None)
    if axis == "pipe":
        return model in PIPELINED
    return axis != "context" or model != "sums"


def _dtypes(dice: Dice, model: str) -> dict[str, Any]:
    if model == "sums":
        param, compute = dice.one(("bfloat16", None), ("float16", None), ("float32", "bfloat16"))
    elif model in ("moe", "own"):  # experts are chosen by comparing numbers: other rounding, other experts
        param, compute = dice.weighted({"float64": 3, "float32": 1}), None
    else:
        param = dice.weighted({"float64": 10, "float32": 5, "bfloat16": 3, "float16": 2})
        lower = {"float64": ("float32", "bfloat16"), "float32": ("bfloat16", "float16")}.get(
            param, ("float32",)
        )
        compute = dice.one(*lower) if dice.chance(0.25) else None
    accum = dice.weighted({None: 8, "float32": 1, "float64": 1})
    x64 = "float64" in (param, compute, accum) or dice.chance(0.5)
    return {"param_dtype": param, "compute_dtype": compute, "accum_dtype": accum, "x64": x64}


def _pipeline(dice: Dice, model: str, mesh: dict[str, int], own: Own | None) -> dict[str, Any]:
    pipe = mesh["pipe"]
    heavy = model in ("transformer", "moe")  # whose layers take long to compile
    own_layers = own.num_layers if own else None
    most = min(4 if heavy else FEW_DEVICES, own_layers or FEW_DEVICES)
    possible = [name for name in SCHEDULES if name == RANDOM or runs_on(name, mesh, "layer")]
    fitting = {name: [c for c in SCHEDULES[name] if c * pipe <= most] for name in possible}
    schedule = dice.one(*(name for name, chunks in fitting.items() if chunks))
    chunks = dice.one(*fitting[schedule])
    stages = pipe * chunks
    layers = own_layers or stages * (2 if stages <= 3 and not heavy and dice.chance(0.4) else 1)
    per_stage = None
    if layers % stages or dice.chance(0.25):
        layers = own_layers or max(1, layers + dice.one(-1, 0, 1, 2))
        per_stage = dice.cuts(layers, stages, smallest=int(layers >= stages and dice.chance(0.6)))
    placements = ["last", "rows", None] + (["vocabulary"] if model in ("transformer", "moe") else [])
    return {
        "schedule": schedule,
        "num_chunks": chunks,
        "num_layers": layers,
        "layers_per_stage": per_stage,
        "head_placement": dice.one(*placements),
        "table_seed": dice.one(*range(1000)) if schedule == RANDOM else 0,
        "splits_backward": schedule == RANDOM and dice.chance(0.5),
    }


def _layers(dice: Dice, own: Own | None) -> dict[str, Any]:
    return {"num_layers": own.num_layers or 1 if own else dice.one(1, 2, 3)}


def _rows(dice: Dice, values: dict[str, Any], own: Own | None) -> dict[str, Any]:
    """Draws the number of microbatches, their rows, and how many rows are missing or left over."""
    replicas = prod(values["mesh"].get(axis, 1) for axis in REPLICA_AXES)
    parts = values["mesh"]["pipe"] if values.get("head_placement") == "rows" else 1
    if own:
        return _own_rows(dice, replicas, parts, own.rows)
    rows = parts * dice.one(1, 1, 2, 3)
    microbatches = dice.one(1, 2, 3, 4, 5, 8)
    microbatches = max(1, min(microbatches, MOST_ROWS // (replicas * rows)))
    remainder = dice.weighted({"error": 6, "pad": 3, "drop": 2}) if replicas * rows > 1 else "error"
    surplus = dice.one(*range(1, replicas * rows)) if remainder != "error" else 0
    return {
        "num_microbatches": microbatches,
        "rows_per_microbatch": rows,
        "remainder": remainder,
        "surplus": surplus,
    }


def _own_rows(dice: Dice, replicas: int, parts: int, rows: int) -> dict[str, Any]:
    """Draws microbatches that the rows at hand divide into, else as many whole ones as there are rows for."""
    most = rows // (replicas * parts)
    exact = [b * parts for b in range(1, most + 1) if rows % (replicas * parts * b) == 0]
    each = dice.one(*exact) if exact else parts
    microbatches = max(1, rows // (replicas * each))
    surplus = rows - replicas * each * microbatches
    return {
        "num_microbatches": microbatches,
        "rows_per_microbatch": each,
        "remainder": "drop" if surplus else "error",
        "surplus": surplus,
    }


def _model(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    model, mesh = values["model"], values["mesh"]
    context = mesh.get("context", 1)
    drawn: dict[str, Any] = {
        "length": 2 * context * dice.one(1, 2) if context > 1 else dice.one(1, 3, 4),
        "masks": dice.weighted({"full": 2, "ragged": 5, "empty_microbatch": 2, "empty": 1}),
        "tensor_specs": "tensor" in mesh and dice.chance(0.7),
    }
    if context > 1 and model in (*TOYS, "transformer", "moe"):
        drawn["attention"] = dice.one(*ATTENTION, *([None, None] if model in TOYS else []))
    if model in ("transformer", "moe"):
        drawn |= {"length": 8, "tied": dice.chance(0.5), "dropout": dice.chance(0.4), "tensor_specs": False}
    if model in TOYS:
        drawn |= {
            "tied": dice.chance(0.5),
            "dropout": dice.chance(0.4),
            "container": dice.weighted({"dict": 5, "ordered": 1, "namedtuple": 2, "list": 1}),
            "leaves": dice.some(LEAVES, 0.15),
            "mixed": values["param_dtype"] in ("bfloat16", "float16") and dice.chance(0.4),
            "layer_terms": model == "stages" and dice.chance(0.4),
            "layer_metrics": model == "stages" and dice.chance(0.2),
        }
    if model in WITH_ANSWERS:
        drawn |= _answers(dice, context > 1, values["remainder"] == "pad")
    with_rng = ("key", "key", "rows", "legacy") if drawn.get("dropout") else ("none", "none", "none", "key")
    return drawn | {"rng": dice.one(*with_rng)}


def _answers(dice: Dice, context: bool, padded: bool) -> dict[str, Any]:
    """Draws what the loss function returns: nothing that a row of padding or a part of the tokens would change."""
    terms = dice.some([term for term in TERMS if not (padded and term == "shape")], 0.3)
    metrics = [name for name in METRICS if not (padded and name.startswith("last"))]
    outputs = [name for name in OUTPUTS if not context or name != "bool"]
    return {
        "terms": ("tokens", *terms),
        "metrics": dice.some(metrics, 0.2),
        "outputs": dice.some(outputs, 0.3),
    }


def _engine(dice: Dice, mesh: dict[str, int]) -> dict[str, Any]:
    shardings = {"none": 4, "data": 3} | ({} if "pipe" in mesh else {"gradients": 2})
    return {
        "normalize": dice.weighted({"global": 6, "microbatch": 3, "none": 2}),
        "remat": dice.weighted({"none": 4, "selective": 2, "layer": 2, "halves": 2, "offload": 2, "full": 2}),
        "fsdp_gather": dice.one("layer", "step"),
        "optimizer_sharding": dice.weighted(shardings),
        "poison_bubbles": "pipe" in mesh and dice.chance(0.5),
        "forward_only": dice.chance(0.06),
    }


def _update(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    """Draws the optimizer and its options, and how the function is called."""
    plain = values["remainder"] == "error" and "context" not in values["mesh"]
    calls = {"direct": 5, "jit": 2, "placed": 2} | ({"split": 2} if plain else {})
    drawn: dict[str, Any] = {"call": dice.weighted(calls), "grad_scale": dice.weighted({1.0: 9, 4.0: 1})}
    if values["forward_only"] or dice.chance(0.5):
        return drawn
    few_bits = values["param_dtype"] in ("bfloat16", "float16")
    seconds = {"none": 3, "same": 2} | ({"nonfinite": 3} if values["model"] in WITH_ANSWERS else {})
    if values["model"] in WITH_ANSWERS and not {"sum", "shape"} & set(values["terms"]):
        seconds |= {"empty": 2}
    return drawn | {
        "update": True,
        "optimizer": dice.one(*(FOR_FEW_BITS if few_bits else OPTIMIZERS)),
        "max_grad_norm": dice.weighted({None: 3, 0.3: 2, 100.0: 1}),
        "clip_convention": dice.one("exact", "torch"),
        "loss_scale": dice.weighted({None: 6, "static": 1, "dynamic": 1}),
        "second": dice.weighted(seconds),
    }


def _overlap(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    """Draws whether the last microbatch's backward reduces gradients, where it can."""
    given = values["mesh"].get("pipe", 1), values.get("schedule"), values["optimizer_sharding"]
    if values["model"] not in PIPELINED or not can_overlap(*given):
        return {}
    return {"overlap_grad_reduce": dice.weighted({None: 2, True: 1})}


def _reduction(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    """Draws the dtype of each microbatch's sum over devices: none wider than that of the sum over microbatches."""
    widest = values["accum_dtype"] or ("float64" if values["param_dtype"] == "float64" else "float32")
    choices = {None: 6, "float32": 1, widest: 1}
    if values["model"] != "sums" and values.get("optimizer", "sgd") in FOR_FEW_BITS:
        choices |= {"bfloat16": 2}
    return {"reduce_dtype": dice.weighted(choices)}


def _tables(dice: Dice, values: dict[str, Any]) -> dict[str, Any]:
    """Draws whether the built-in model's embedding and head are large, where that makes a difference."""
    mesh = values["mesh"]
    in_shards = bool({"fsdp", "expert", "context"} & mesh.keys()) and values["fsdp_gather"] == "layer"
    if values["model"] not in ("transformer", "moe") or "pipe" in mesh or not in_shards:
        return {}
    return {"large_tables": dice.chance(0.7)}
