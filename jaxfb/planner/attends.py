"""Tells how the devices of a layout attend: by which kernels, and over a context axis by which method."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxfb.config import Config
from jaxfb.models.attention_kernels import cudnn, splash, splash_gather
from jaxfb.models.config import TransformerConfig
from jaxfb.planner.topology import Topology


def runs_flash(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns True if attention never makes scores: GPUs run cuDNN's and a TPU splash, where they can."""
    dtype, mesh = jnp.dtype(config.precision.compute_dtype), config.mesh
    if topology.platform == "cpu" or sizes.attention == "xla":
        return False
    attends = attends_over(config, sizes, topology)
    if topology.platform == "gpu":
        return attends != "ring" and dtype.itemsize == 2 and sizes.variant.has_plain_scores
    if attends is None:
        if sizes.num_kv_heads // mesh.context % mesh.tensor and mesh.context > 1:
            return False
        return splash.refused_sizes(dtype, config.data.sequence_length, sizes.head_size) is None
    kernels = attends == "all_gather" or (attends == "ring" and sizes.window is None)
    return kernels and _context_refusal(config, sizes, attends == "all_gather") is None


def attends_over(config: Config, sizes: TransformerConfig, topology: Topology) -> str | None:
    """Returns how devices of a context axis attend to each other's keys; None where each attends to whole sequences, as
    with all_to_all.
    """
    if config.mesh.context == 1:
        return None
    method = context_method(config, sizes, topology)
    return None if method == "all_to_all" else method


def scores_at_once(config: Config, sizes: TransformerConfig, topology: Topology) -> bool:
    """Returns True if a device makes all scores of its queries at once, those that are masked too: to gathered keys,
    without kernels.
    """
    gathered = attends_over(config, sizes, topology) == "all_gather"
    return gathered and not runs_flash(config, sizes, topology)


def context_method(config: Config, sizes: TransformerConfig, topology: Topology) -> str:
    """Returns how devices of a context axis attend to each other's tokens, as `models.attend.context_method`."""
    if sizes.context_attention != "auto":
        return sizes.context_attention
    if topology.platform == "gpu":
        return _method_of_gpus(config, sizes)
    kernels = topology.platform == "tpu" and sizes.attention != "xla"
    return "all_gather" if kernels and _context_refusal(config, sizes, gathers=True) is None else "ring"


def _method_of_gpus(config: Config, sizes: TransformerConfig) -> str:
    mesh, half = config.mesh, config.data.sequence_length // (2 * config.mesh.context)
    dtype = jnp.dtype(config.precision.compute_dtype)
    query = jax.ShapeDtypeStruct((1, half, sizes.num_heads, sizes.head_size), dtype)
    asked = "cudnn" if sizes.attention == "auto" else sizes.attention  # the GPU is not at hand
    if not cudnn.runs(asked, query, packed=True, plain=sizes.variant.has_plain_scores):
        return "ring"
    return "all_gather" if sizes.num_kv_heads % (mesh.context * mesh.tensor) else "all_to_all"


def _context_refusal(config: Config, sizes: TransformerConfig, gathers: bool) -> str | None:
    """Returns why a TPU's kernels cannot attend over the context axis, or None."""
    dtype, length = (
        jnp.dtype(config.precision.compute_dtype),
        config.data.sequence_length // config.mesh.context,
    )
    refused = splash.refused_sizes(dtype, length // 2, sizes.head_size)
    return refused or (splash_gather.refused_length(length, config.mesh.context) if gathers else None)
