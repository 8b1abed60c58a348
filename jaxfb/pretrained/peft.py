"""Adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, read and written."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxfb.models.adapted import ADAPTERS, A, B, LoRA
from jaxfb.models.lora import changed, projections
from jaxfb.models.pattern import LEADING, is_layer, layer_name, named
from jaxfb.pretrained.architectures import ARCHITECTURES
from jaxfb.pretrained.family import Architecture
from jaxfb.pretrained.new_directory import check_new, new_directory
from jaxfb.pretrained.repository import FLOATS, read_json
from jaxfb.refusal import Refused, integer, number, shown

PyTree = Any
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NAMES = {A: "lora_A", B: "lora_B"}
# keys of adapter_config.json that change what is computed, and the only values that are read
_SUPPORTED = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "use_qalora"), (False, None)),
    "use_bdlora": (None, False),
    **dict.fromkeys(("modules_to_save", "layers_to_transform", "layer_replication"), (None, [])),
    "target_parameters": (None, []),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), (None, {})),
    "trainable_token_indices": (None, [], {}),
    **dict.fromkeys(
        ("alora_invocation_tokens", "arrow_config", "kasa_config", "velora_config", "monteclora_config"),
        (None,),
    ),
}
# those that change nothing in what a trained adapter computes
_INERT = frozenset(
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha "
    "lora_dropout target_modules exclude_modules layers_pattern init_lora_weights loftq_config eva_config corda_config "
    "lora_ga_config qalora_group_size megatron_config megatron_core ensure_weight_tying runtime_config".split()
)
# initialisations that leave the weights of the model as they are; pissa, olora, corda, loftq and lora_ga change them
_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")


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
    check_new(directory)
    tensors, modules = _tensors(params, architecture)
    if adapted_experts(params):
        raise Refused(
            "[lora] experts have adapters, which in PEFT's format are of gate and up together; export the merged "
            "model, without --adapter"
        )
    values = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": sorted({module.rpartition(".")[2] for module in modules}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    from safetensors.numpy import save_file

    with new_directory(directory) as target:
        save_file(tensors, target / WEIGHTS, metadata={"format": "pt"})
        (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n")
    return [target / CONFIG, target / WEIGHTS]


def load_adapter(directory: str | Path, params: PyTree, lora: LoRA) -> PyTree:
    """Returns the parameters with the adapters of a directory in PEFT's format in place of their own.

    Raises:
      ValueError: the directory has none, or other ones than `lora` describes.
    """
    path = Path(directory)
    if adapted_experts(params):
        raise Refused(
            f"[lora] adapter={str(path)!r} cannot be read for experts, whose gate and up have one adapter in PEFT's "
            "format; leave it out, or the experts out of targets"
        )
    for name in (CONFIG, WEIGHTS):
        if not (path / name).is_file():
            raise Refused(
                f"[lora] adapter={str(path)!r} has no file {name}; give a directory that PEFT wrote"
            )
    _check_config(path, read_json(path / CONFIG), lora)
    stacks, wanted = _stacks(params), {}
    for where, stack in enumerate(stacks):
        for name, node in adapted_projections(stack.layers):
            wanted |= {
                key: (where, name, leaf, shape)
                for key, (leaf, _, shape) in _keys(_module(name), node, stack).items()
            }
    found = _read(path / WEIGHTS)
    problems = [f"{key}: missing" for key in wanted if key not in found]
    problems += [f"{key}: unexpected" for key in found if key not in wanted]
    problems += [
        f"{key}: shape {list(found[key].shape)}, must be {list(shape)}"
        for key, (*_, shape) in wanted.items()
        if key in found and found[key].shape != shape
    ]
    if problems:
        more = [f"and {len(problems) - 6} more"] * (len(problems) > 6)
        raise Refused(
            f"[lora] {path / WEIGHTS} does not fit lora.targets: {'; '.join([*problems[:6], *more])}"
        )
    loaded: dict[tuple[int, str, str], list[np.ndarray]] = {}
    for key, (where, name, leaf, _) in wanted.items():
        loaded.setdefault((where, name, leaf), []).append(found[key].T)
    return _with_stacks(params, [_replaced(stack, loaded, where) for where, stack in enumerate(stacks)])


class _Stack(NamedTuple):
    """Layers of one kind. numbers: theirs in the model. is_stacked: every array has a first dim of so many."""

    layers: Mapping[str, Any]
    numbers: list[int]
    is_stacked: bool


def _stacks(params: PyTree) -> list[_Stack]:
    """Returns the leading layers one by one, then each kind of a period."""
    leading = [params[LEADING][layer_name(k)] for k in range(len(params.get(LEADING, {})))]
    kinds = [params["layers"]]
    if any(map(is_layer, params["layers"])):
        kinds = [params["layers"][layer_name(k)] for k in range(len(params["layers"]))]
    periods = jax.tree.leaves(kinds[0])[0].shape[0]
    return [
        *(_Stack(layers, [number], False) for number, layers in enumerate(leading)),
        *(
            _Stack(layers, [at + k * len(kinds) for k in range(periods)], True)
            for at, layers in enumerate(kinds, len(leading))
        ),
    ]


def _with_stacks(params: PyTree, stacks: list[Mapping[str, Any]]) -> PyTree:
    """Returns the parameters with other layers, in the order of `_stacks`."""
    number = len(params.get(LEADING, {}))
    leading = {LEADING: named(stacks[:number])} if number else {}
    kinds = stacks[number:]
    return {**params, **leading, "layers": named(kinds) if len(kinds) > 1 else kinds[0]}


def _replaced(
    stack: _Stack, loaded: Mapping[tuple[int, str, str], list[np.ndarray]], where: int
) -> Mapping[str, Any]:
    def own(name: str) -> Callable[[str, Mapping], dict]:
        def replaced(_: str, node: Mapping) -> dict:
            parts = {leaf: loaded[where, name, leaf] for leaf in _NAMES}
            arrays = {leaf: np.stack(one) if stack.is_stacked else one[0] for leaf, one in parts.items()}
            return {**node, **{leaf: jnp.asarray(one, node[leaf].dtype) for leaf, one in arrays.items()}}

        return replaced

    return changed(stack.layers, {name: own(name) for name, _ in adapted_projections(stack.layers)})


def adapted_experts(params: PyTree) -> bool:
    """Returns whether some experts have adapters."""
    return any(ADAPTERS in stack.layers.get("moe", {}).get("experts", {}) for stack in _stacks(params))


def adapted_projections(layers: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns (name below its layer, arrays) of every projection with an adapter."""
    return [(name, node) for name, node in projections(layers) if A in node]


def _check_config(path: Path, values: Mapping[str, Any], lora: LoRA) -> None:
    for key, legal in _SUPPORTED.items():
        if values.get(key, legal[0]) not in legal:
            raise Refused(
                f"[lora] {path / CONFIG}: {key}={shown(values[key])} is not supported; only {legal[0]!r} is"
            )
    _check_initialisation(path, values.get("init_lora_weights", True))
    if unknown := [key for key, value in values.items() if key not in (*_SUPPORTED, *_INERT) and value]:
        raise Refused(
            f"[lora] {path / CONFIG} has keys that are not known here and may change what the adapter computes: "
            f"{', '.join(sorted(unknown))}"
        )
    read = {"rank": integer, "alpha": partial(number, above=0)}
    for ours, theirs in (("rank", "r"), ("alpha", "lora_alpha")):
        given = read[ours](theirs, values.get(theirs), who=f"[lora] {path / CONFIG}:")
        if given != getattr(lora, ours):
            raise Refused(
                f"[lora] {ours}={getattr(lora, ours)}, but {path / CONFIG} has {theirs}={given}; use "
                f"lora.{ours}={given}",
                [{f"lora.{ours}": given}],
            )


def _check_initialisation(path: Path, given: Any) -> None:
    """Refuses an adapter that adds to other weights than those of the model it began from."""
    is_plain = given is None or isinstance(given, bool)
    if not is_plain and str(given).lower() not in _INITIALISATIONS:
        raise Refused(
            f"[lora] {path / CONFIG}: init_lora_weights={shown(given)} is not supported; only true, false, "
            f"{', '.join(_INITIALISATIONS)} are, which leave the model's weights alone: merge the adapter, or "
            "convert it with PEFT's path_initial_model_for_weight_conversion"
        )


def _module(name: str, architecture: Architecture | None = None) -> str:
    """Returns what transformers calls a projection below its layer: "attention.query" is "self_attn.q_proj".

    architecture: None for the name that it has wherever it is a module of its own.
    """
    stored = (_usual_names() if architecture is None else architecture.layer_names).get(f"{name}.kernel")
    if not isinstance(stored, str):
        raise Refused(
            f"[lora] {name} has no adapter in PEFT's format: transformers has no module of its own for that kernel; "
            "export the merged model, without --adapter"
        )
    return stored.removesuffix(".weight")


def _usual_names() -> dict[str, str]:
    """Returns the tensor's name of each of our arrays, from all architectures that store it as one tensor."""
    found = [architecture.layer_names for _, architecture in ARCHITECTURES.items()]
    return {ours: stored for names in found for ours, stored in names.items() if isinstance(stored, str)}


def _keys(module: str, node: Mapping[str, Any], stack: _Stack) -> dict[str, tuple[str, int, tuple[int, ...]]]:
    """Returns PEFT's name of each layer's tensor -> (leaf, place in the stack, shape as stored), layer by layer."""
    return {
        f"base_model.model.model.layers.{number}.{module}.{theirs}.weight": (
            leaf,
            place,
            node[leaf].shape[-1:-3:-1],
        )
        for leaf, theirs in _NAMES.items()
        for place, number in enumerate(stack.numbers)
    }


def _tensors(params: PyTree, architecture: Architecture) -> tuple[dict[str, np.ndarray], set[str]]:
    """Returns the tensors by PEFT's names, and the modules that they adapt."""
    found, modules, stacks = {}, set(), _stacks(params)
    has_experts = any("moe" in stack.layers for stack in stacks)
    for stack in stacks:
        for name, node in adapted_projections(stack.layers):
            module = _module(name, architecture)
            if has_experts and not name.startswith("attention."):
                raise Refused(
                    f"[lora] {name} has no adapter in PEFT's format: in a model with experts PEFT takes that name for "
                    "theirs; export the merged model, without --adapter"
                )
            modules.add(module)
            host = {leaf: np.asarray(jax.device_get(node[leaf])) for leaf in _NAMES}
            for key, (leaf, place, _) in _keys(module, node, stack).items():
                one = host[leaf][place] if stack.is_stacked else host[leaf]
                found[key] = np.ascontiguousarray(one.T)
    return found, modules


def _read(file: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy") as opened:
            dtypes = {name: opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118
            if wrong := [name for name, dtype in dtypes.items() if dtype not in FLOATS]:
                raise Refused(
                    f"[lora] {file}: {wrong[0]} has dtype {dtypes[wrong[0]]}, must be one of {', '.join(FLOATS)}"
                )
            return {name: opened.get_tensor(name) for name in dtypes}
    except (SafetensorError, OSError) as error:
        raise Refused(f"[lora] {file} cannot be read as safetensors: {str(error).splitlines()[0]}") from None
