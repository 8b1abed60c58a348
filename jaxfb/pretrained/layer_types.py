"""Reads and writes layers of several kinds in config.json: `layer_types`, and a window for some of the layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxfb.models.config import TransformerConfig
from jaxfb.models.pattern import LayerKind, found_in, stack_of
from jaxfb.pretrained.values import Values
from jaxfb.refusal import Refused

FULL, SLIDING = "full_attention", "sliding_attention"
TYPES = (FULL, SLIDING)


def stack_sizes(kinds: Sequence[LayerKind], has_experts: bool = False) -> dict[str, Any]:
    """Returns the fields of `TransformerConfig` for a stack of these layers."""
    leading, pattern = found_in(kinds, has_experts)
    return {"leading": leading, "pattern": pattern}


def types_of(values: Values, default: Sequence[str]) -> list[str]:
    """Returns `layer_types`, one for each layer, or what they are where config.json has none."""
    types, number = values.several("layer_types") or list(default), values.integer("num_hidden_layers")
    if other := sorted(set(map(str, types)) - set(TYPES)):
        raise Refused(f"[hf] layer_types={other} are not supported; only {' and '.join(TYPES)} are")
    if len(types) != number:
        raise Refused(f"[hf] layer_types has {len(types)} entries for num_hidden_layers={number} layers")
    return types


def windows_of(types: Sequence[str], window: int | None) -> list[int | None]:
    """Returns the window of each layer, None for full attention.

    Raises:
      ValueError: a layer is to have a window, and there is none.
    """
    if window is None and SLIDING in types:
        raise Refused(
            "[hf] layer_types has sliding_attention, but use_sliding_window is false or sliding_window null"
        )
    return [window if one == SLIDING else None for one in types]


def used_window(values: Values, default: int | None = 4096) -> int | None:
    """Returns `sliding_window` where `use_sliding_window` is true."""
    window, used = values.integer_or_none("sliding_window", default), values.flag("use_sliding_window")
    return window if used else None


def layers_in(sizes: TransformerConfig) -> list[TransformerConfig]:
    """Returns the config of each layer of a stack, as that of a model whose layers are all like it."""
    stack = stack_of(sizes)
    return [*stack.leading, *stack.period * stack.num_periods]


def types_in(sizes: TransformerConfig) -> list[str]:
    """Returns the `layer_types` of a stack."""
    return [FULL if one.window is None else SLIDING for one in layers_in(sizes)]


def window_in(sizes: TransformerConfig) -> int | None:
    """Returns the window of all layers that have one, the first layer's if they differ."""
    return next((one.window for one in layers_in(sizes) if one.window is not None), None)


def type_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys of a model with both types, whose mask of local layers needs a width even if none has it."""
    window = window_in(sizes)
    return {"layer_types": types_in(sizes), **({} if window is None else {"sliding_window": window})}


def qwen_windows(values: Values) -> dict[str, Any]:
    """Returns the stack of Qwen2 and Qwen3, where the layers from `max_window_layers` on may have a window."""
    window, first = used_window(values), values.integer("max_window_layers", 28, least=0)
    layers = range(values.integer("num_hidden_layers"))
    default = [SLIDING if window is not None and layer >= first else FULL for layer in layers]
    return stack_sizes([LayerKind(window=one) for one in windows_of(types_of(values, default), window)])


def qwen_window_keys(sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the keys that `qwen_windows` reads."""
    window = window_in(sizes)
    if window is None:
        return {}
    types = types_in(sizes)
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": types.index(SLIDING),
        "layer_types": types,
    }
