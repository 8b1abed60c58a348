"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.models.adapted import A, B, LoRA
from jaxfb.models.lora import changed, projections
from jaxfb.models.pattern import LEADING, is_layer
from jaxfb.pretrained.family import Architecture
from jaxfb.pretrained.tensors import DENSE
from jaxfb.refusal import Refused

PyTree = Any
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = {A: "lora_A", B: "lora_B"}
# keys of adapter_config.json that change what is computed, and the only values that are read
_SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layers_to_transform": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
}


def save_adapter(
    directory: str | Path, params: PyTree, lora: LoRA, architecture: Architecture, base: str
) -> list[Path]:
    """Writes the adapters of a model for PEFT's `PeftModel.from_pretrained`; returns the files.

    Args:
      directory: new or empty.
      params: of a transformer with adapters; the adapters are written in their dtype.
      base: the name or the path of the model that they adapt.
    Raises:
      ValueError: the directory holds files, or transformers stores an adapted kernel as a part of a larger one.
    """
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"[hf] {target} must be a new or an empty directory")
    _check_one_kind(params)
    names = {name: _module(name, architecture) for name, node in projections(params["layers"]) if A in node}
    tensors = _tensors(params, names)
    target.mkdir(parents=True, exist_ok=True)
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in names.values()}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    from safetensors.numpy import save_file

    save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
    return [target / CONFIG, target / WEIGHTS]


def load_adapter(directory: str | Path, params: PyTree, lora: LoRA) -> PyTree:
    """Returns the parameters with the adapters of a directory in PEFT's format in place of their own.

    Raises:
      ValueError: the directory has none, or other ones than `lora` describes.
    """
    path = Path(directory)
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise Refused(
                f"[lora] adapter={str(path)!r} has no file {name}; give a directory that PEFT wrote"
            )
    _check_config(path, json.loads((path / CONFIG).read_text(encoding="utf-8")), lora)
    _check_one_kind(params)
    nodes = {name: node for name, node in projections(params["layers"]) if A in node}
    wanted = {key: leaf for name in nodes for key, leaf in _keys(name, _module(name), nodes[name]).items()}
    found = _read(path / WEIGHTS)
    problems = [f"{key}: missing" for key in wanted if key not in found]
    problems += [f"{key}: unexpected" for key in found if key not in wanted]
    problems += [
        f"{key}: shape {list(found[key].shape)}, must be {list(shape)}"
        for key, (_, _, shape) in wanted.items()
        if key in found and found[key].shape != shape
    ]
    if problems:
        more = [f"and {len(problems) - 6} more"] * (len(problems) > 6)
        raise Refused(
            f"[lora] {path / WEIGHTS} does not fit lora.targets: {'; '.join([*problems[:6], *more])}"
        )
    loaded: dict[str, dict[str, list]] = {name: {A: [], B: []} for name in nodes}
    for key, (name, leaf, _) in wanted.items():
        loaded[name][leaf].append(found[key].T)

    def replaced(name: str, node: Mapping) -> dict:
        stacks = {
            leaf: jnp.asarray(np.stack(parts), node[leaf].dtype) for leaf, parts in loaded[name].items()
        }
        return {**node, **stacks}

    return {**params, "layers": changed(params["layers"], dict.fromkeys(nodes, replaced))}


def _check_one_kind(params: PyTree) -> None:
    if LEADING in params or any(map(is_layer, params["layers"])):
        raise Refused(
            "[lora] adapters of a model with layers of several kinds are not read or written in PEFT's format; export "
            "the merged model, without --adapter"
        )


def _check_config(path: Path, values: Mapping[str, Any], lora: LoRA) -> None:
    for key, legal in _SUPPORTED.items():
        if values.get(key, legal[0]) not in legal:
            raise Refused(
                f"[lora] {path / CONFIG}: {key}={values[key]!r} is not supported; only {legal[0]!r} is"
            )
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha")):
        if values.get(theirs) != getattr(lora, ours):
            raise Refused(
                f"[lora] {ours}={getattr(lora, ours)}, but {path / CONFIG} has {theirs}={values.get(theirs)}; use "
                f"lora.{ours}={values.get(theirs)}",
                [{f"lora.{ours}": values.get(theirs)}],
            )


def _module(name: str, architecture: Architecture | None = None) -> str:
    """Returns what transformers calls a projection below its layer: "attention.query" is "self_attn.q_proj"."""
    known = DENSE.get(f"{name}.kernel")
    stored = known if architecture is None else architecture.layer_names.get(f"{name}.kernel")
    if known is None or stored != known:
        raise Refused(
            f"[lora] {name} has no adapter in PEFT's format: transformers has no module of its own for that kernel; "
            "export the merged model, without --adapter"
        )
    return known.removesuffix(".weight")


def _keys(name: str, module: str, node: Mapping[str, Any]) -> dict[str, tuple[str, str, tuple[int, int]]]:
    """Returns PEFT's name of each layer's tensor -> (projection, leaf, shape as stored), layer by layer."""
    return {
        f"base_model.model.model.layers.{layer}.{module}.{theirs}.weight": (
            name,
            leaf,
            node[leaf].shape[:0:-1],
        )
        for leaf, theirs in _NAMES.items()
        for layer in range(node[leaf].shape[0])
    }


def _tensors(params: PyTree, names: Mapping[str, str]) -> dict[str, np.ndarray]:
    nodes = dict(projections(params["layers"]))
    found = {}
    for name, module in names.items():
        host = jax.device_get({leaf: nodes[name][leaf] for leaf in _NAMES})
        layers = {leaf: iter(np.asarray(stack)) for leaf, stack in host.items()}
        for key, (_, leaf, _) in _keys(name, module, nodes[name]).items():
            found[key] = np.ascontiguousarray(next(layers[leaf]).T)
    return found


def _read(file: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise Refused(f"[lora] {file} cannot be read as safetensors: {str(error).splitlines()[0]}") from None
