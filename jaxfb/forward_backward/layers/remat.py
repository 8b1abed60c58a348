"""Names what a layer keeps for its backward and what it computes again."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxfb.models import attention, grouped_matmul
from jaxfb.models.attention_kernels import splash
from jaxfb.parallel.host_memory import HOST

PIPELINE_KEEPS = {
    "none": "residuals",
    "selective": "residuals",
    "layer": "inputs",
    "halves": "inputs",
    "offload": "inputs",
    "full": "input",
}
"""What a slot of a pipeline keeps of a stage's forward; see `Stage`."""
_INPUT = "input of a layer"
_NAMED = {attention.KEPT, splash.KEPT, grouped_matmul.KEPT}

# flash attention: its output and softmax sums take no more memory than a product with a weight. cuDNN's is a primitive;
# splash names the two, since what its kernel writes has the sums 128 times
_FLASH = {"dot_product_attention_fwd_wrapper"}
# shape-only primitives: saving one of these would keep a gathered weight under another name
_VIEWS = {
    "reshape",
    "transpose",
    "convert_element_type",
    "broadcast_in_dim",
    "squeeze",
    "expand_dims",
    "copy",
}


def checkpoint_layer(layer: Callable, name: str, keep_gathered: bool = True) -> Callable:
    """Returns `layer` with the recomputation of that name.

    "none" keeps every intermediate; "selective" keeps the outputs of matrix products with a weight, experts' included
    (on TPUs rotated queries and keys in place of two of them), and of flash attention (cuDNN's, or splash on a TPU),
    and computes elementwise work, the exchange of rows with experts and any other attention again; "layer", "halves"
    and "full" keep the layer's input only; "offload" too, in the host's memory.
    keep_gathered=False never keeps an all-gathered weight, whatever the name: the backward gathers it again.
    """
    if name == "none" and keep_gathered:
        return layer
    if name == "offload":
        layer = _input_named(layer)
    policies = {
        "none": _all_but_gathered,
        "selective": _products_with_weights_and_flash_attention,
        "layer": jax.checkpoint_policies.nothing_saveable,
        "halves": jax.checkpoint_policies.nothing_saveable,
        "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[_INPUT],
            offload_src="device",
            offload_dst=HOST,
        ),
        "full": jax.checkpoint_policies.nothing_saveable,
    }
    return jax.checkpoint(layer, policy=policies[name], prevent_cse=False)


def _input_named(layer: Callable) -> Callable:
    def named(params, hidden, *more):
        return layer(params, jax.tree.map(lambda leaf: checkpoint_name(leaf, _INPUT), hidden), *more)

    return named


def _products_with_weights_and_flash_attention(primitive, *shapes, **params) -> bool:
    if _may_be_complex(primitive, shapes, params):
        return False
    if primitive.name in _FLASH or (primitive.name == "name" and params["name"] in _NAMED):
        return True
    return jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *shapes, **params)


def _all_but_gathered(primitive, *shapes, **params) -> bool:
    kept = primitive.name != "all_gather" and primitive.name not in _VIEWS
    return kept and not _may_be_complex(primitive, shapes, params)


def _may_be_complex(primitive, shapes, params) -> bool:
    """Returns whether a result may be complex, which `jax.checkpoint` cannot keep (seen on jax 0.10.2)."""
    dtypes = [getattr(one, "dtype", None) for one in shapes] + [params.get("new_dtype"), params.get("dtype")]
    return primitive.name in ("complex", "fft") or any(
        dtype is not None and jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes
    )
