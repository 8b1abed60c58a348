"""Low-rank adapters as parameters beside the kernels that they adapt, and as a part of the modules that read them.

    {"kernel": [layers, in, out], "lora_a": [layers, in, rank], "lora_b": [layers, rank, out]}

Those of experts are all below "adapters", beside the experts' arrays: {"gate": [layers, experts, in, out], ...,
"adapters": {"gate": {"lora_a": [layers, experts, in, rank], "lora_b": [layers, experts, rank, out]}, ...}}.

A module is adapted after it was rebuilt from its arrays, so no module knows of adapters but `Linear`, which adds the
output of its adapter. The kernel itself is not changed: a frozen one has no gradient.

Shapes: R = rows, T = tokens of a row.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxfb.models.adapted import ADAPTERS, EXPERTS, A, B, LoRA
from jaxfb.models.layers import dropout
from jaxfb.models.pattern import LEADING, is_layer
from jaxfb.refusal import Refused
from jaxfb.types import PyTree

_SITES = 2  # of dropout, which the layers themselves use
_NOT_LINEAR = ("router",)
_EXPERTS = "moe.experts"  # below a layer


@dataclass(frozen=True)
class Adapter:
    """scale * (x @ a) @ b, of x with some of it dropped. keys: one a row, or None."""

    a: jax.Array
    b: jax.Array
    lora: LoRA
    keys: jax.Array | None
    site: int

    def __call__(self, x: jax.Array) -> jax.Array:
        x = dropout(x, self.lora.dropout, self.keys, self.site)
        return (x @ self.a) @ self.b * self.lora.scale


@dataclass(frozen=True)
class ExpertAdapter:
    """scale * (x @ a) @ b of each expert's rows."""

    a: jax.Array
    b: jax.Array
    scale: float

    def __call__(self, product: Callable[[jax.Array, jax.Array], jax.Array], rows_SD: jax.Array) -> jax.Array:
        """Returns what is added for rows; product: of rows, each with the matrix of its expert."""
        return product(product(rows_SD, self.a), self.b) * self.scale


def attach(module: nnx.Module, params: Mapping, lora: LoRA, keys: jax.Array | None, path: str = "") -> None:
    """Gives every projection of a layer that has an adapter in `params` that adapter."""
    for name, value in params.items():
        if not isinstance(value, Mapping) or not hasattr(module, name):
            continue  # leading layers are none of the embedding's
        child, below = getattr(module, name), f"{path}.{name}".lstrip(".")
        if ADAPTERS in value:
            adapters = {
                name: ExpertAdapter(node[A], node[B], lora.scale) for name, node in value[ADAPTERS].items()
            }
            object.__setattr__(child, ADAPTERS, adapters)
        elif A in value:
            adapter = Adapter(value[A], value[B], lora, keys, _SITES + zlib.crc32(below.encode()) % 2**30)
            object.__setattr__(child, "adapter", adapter)  # no state of the module: its arrays are arguments
        else:
            attach(child, value, lora, keys, below)


def with_adapters(lora: LoRA | None, params: PyTree, key: jax.Array, dtype: Any = jnp.float32) -> PyTree:
    """Returns a transformer's parameters with new adapters, which are of that dtype; as they are without `lora`.

    A is uniform in +-1/sqrt(in), as PEFT draws it; B is zero, so that the model computes what it did before.

    Raises:
      ValueError: a target is the name of no projection.
    """
    if lora is None:
        return params
    names = check_targets(lora, all_layers(params))

    def new(path: str, kernel: jax.Array) -> dict:
        own = jax.random.fold_in(key, zlib.crc32(path.encode()))
        *layers, inputs, outputs = kernel.shape
        bound = inputs**-0.5
        a = jax.random.uniform(own, (*layers, inputs, lora.rank), jnp.float32, -bound, bound)
        return {A: a.astype(dtype), B: jnp.zeros((*layers, lora.rank, outputs), dtype)}

    def one(path: str, node: Mapping) -> dict:
        return {**node, **new(path, node["kernel"])}

    def of_experts(path: str, node: Mapping) -> dict:
        of_these = [name for name in EXPERTS if f"{_EXPERTS}.{name}" in names]
        return {**node, ADAPTERS: {name: new(f"{path}.{name}", node[name]) for name in of_these}}

    functions = {name: one for name in names if not name.startswith(f"{_EXPERTS}.")}
    return _with_all_layers_changed(
        params, functions | ({_EXPERTS: of_experts} if len(functions) < len(names) else {})
    )


def without_adapters(params: PyTree) -> PyTree:
    """Returns the parameters without the leaves of adapters; no kernel is changed."""
    if not isinstance(params, Mapping):
        return params
    return {name: without_adapters(value) for name, value in params.items() if name not in (A, B, ADAPTERS)}


def merged(params: PyTree, lora: LoRA) -> PyTree:
    """Returns parameters without adapters, which are added to the kernels; in float32 at least."""

    def one(_: str, node: Mapping) -> dict:
        rest = {name: leaf for name, leaf in node.items() if name not in (A, B)}
        return {**rest, "kernel": merged_kernel(node["kernel"], node[A], node[B], lora)}

    def of_experts(_: str, node: Mapping) -> dict:
        adapters = node.get(ADAPTERS, {})
        rest = {name: leaf for name, leaf in node.items() if name != ADAPTERS}
        return rest | {
            name: merged_kernel(node[name], own[A], own[B], lora) for name, own in adapters.items()
        }

    found = {name for name, node in projections(all_layers(params)) if A in node}
    return _with_all_layers_changed(params, dict.fromkeys(found, one) | {_EXPERTS: of_experts})


def all_layers(params: Mapping) -> Mapping:
    """Returns the layers of a model, those before the first period among them."""
    return {**params["layers"], LEADING: params[LEADING]} if LEADING in params else params["layers"]


def _with_all_layers_changed(params: Mapping, functions: Mapping[str, Any]) -> dict:
    leading = {LEADING: changed(params[LEADING], functions, path=LEADING)} if LEADING in params else {}
    return {**params, "layers": changed(params["layers"], functions), **leading}


def merged_kernel(kernel: jax.Array, a: jax.Array, b: jax.Array, lora: LoRA) -> jax.Array:
    """Returns kernel + scale * a @ b, in float32 at least."""
    dtype = jnp.promote_types(kernel.dtype, jnp.float32)
    change = jnp.matmul(a.astype(dtype), b.astype(dtype), precision="highest") * lora.scale
    return kernel.astype(dtype) + change


def adapter_path(kernel: str, leaf: str) -> str:
    """Returns the dotted path of a leaf of the adapter of a kernel, or of an array of experts, from its own."""
    above, _, name = kernel.rpartition(".")
    return f"{above}.{leaf}" if name == "kernel" else f"{above}.{ADAPTERS}.{name}.{leaf}"


def projections(layers: Mapping, path: str = "") -> Iterator[tuple[str, Mapping]]:
    """Yields (dotted name below its layer, arrays) of every projection of the layers, those of experts left out."""
    for name, value in layers.items():
        if not isinstance(value, Mapping) or name in _NOT_LINEAR:
            continue
        below = path if is_layer(name) or name == LEADING else f"{path}.{name}".lstrip(".")
        if "kernel" in value:
            yield below, value
        else:
            yield from projections(value, below)


def check_targets(lora: LoRA, layers: Mapping) -> list[str]:
    """Returns the dotted names of the projections, and of the experts' matrices, that have an adapter.

    Raises:
      ValueError: a target is the name of none, or what experts' adapters read would be dropped.
    """
    plain = list(dict.fromkeys(name for name, _ in projections(layers)))
    names = plain + [f"{_EXPERTS}.{name}" for name in EXPERTS if has_experts(layers)]
    for target in lora.targets:
        if not any(LoRA(targets=(target,)).adapts(name) for name in names):
            legal = list(dict.fromkeys(name.rpartition(".")[2] for name in plain))
            kept = [one for one in lora.targets if any(LoRA(targets=(one,)).adapts(name) for name in names)]
            use = kept or legal
            raise Refused(
                f"[lora] targets: {target!r} is not a projection of a layer of this model (routers have no adapters; "
                f"name experts by a pattern such as experts.*); it has {', '.join(names)}; use "
                f"targets=[{', '.join(use)}]",
                [{"targets": use}],
            )
    chosen = [name for name in names if lora.adapts(name)]
    if lora.dropout and any(name.startswith(f"{_EXPERTS}.") for name in chosen):
        raise Refused(
            f"[lora] dropout={lora.dropout} is not for adapters of experts, whose rows come from several places; use "
            "dropout=0, or targets without experts",
            [{"dropout": 0.0}],
        )
    _warn_of_rank(lora, max(min(matrix.shape[-2:]) for name, matrix in _matrices(layers) if name in chosen))
    return chosen


@cache  # a run looks at its targets several times
def _warn_of_rank(lora: LoRA, largest: int) -> None:
    """Warns, once, of a rank that no target can use: a change of a matrix has no higher rank than its smaller
    dimension, `largest`.
    """
    if lora.rank > largest:
        warnings.warn(
            f"[lora] rank={lora.rank} is above the smaller dimension of every target, at most {largest}: such adapters "
            f"take more memory and change no more than those of rank={largest}",
            stacklevel=3,
        )


def _matrices(layers: Mapping) -> Iterator[tuple[str, jax.Array]]:
    """Yields (dotted name, matrices) of every projection, those of experts too."""
    yield from ((name, node["kernel"]) for name, node in projections(layers))
    for one in _each_layer(layers):
        if "moe" in one:
            yield from ((f"{_EXPERTS}.{name}", one["moe"]["experts"][name]) for name in EXPERTS)


def has_experts(layers: Mapping) -> bool:
    """Returns whether some of the layers have experts."""
    return any("moe" in one for one in _each_layer(layers))


def _each_layer(layers: Mapping) -> tuple[Mapping, ...]:
    """Returns the layers of a period; of one alone, `layers` themselves."""
    return (layers, *(value for name, value in layers.items() if is_layer(name)))


def changed(layers: Mapping, functions: Mapping[str, Any], own: str = "", path: str = "") -> dict:
    """Returns the layers with function(path, arrays) in place of the arrays of each named projection.

    Args:
      functions: by dotted names below a layer.
      own, path: the names above, below the layer and in all.
    """
    found = {}
    for name, value in layers.items():
        below = own if is_layer(name) else f"{own}.{name}".lstrip(".")
        whole = f"{path}.{name}".lstrip(".")
        if below in functions:
            found[name] = functions[below](whole, value)
        else:
            found[name] = changed(value, functions, below, whole) if isinstance(value, Mapping) else value
    return found
