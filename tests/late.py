"""Calls of small models whose layers are gathered ahead of their use, and whose gradients are scattered late."""

import math

import jax
import numpy as np
import toy

import jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer

KEY = jax.random.key(5)


def call(mesh, layers, num_microbatches=2, schedule=None, dtype=np.float64, model=toy.model, **options):
    """Returns (forward_backward on a mesh, its arguments)."""
    replicas = mesh.get("data", 1) * mesh.get("fsdp", 1)
    plan = jaxfb.BatchPlan(rows=toy.ROWS, data_parallel=replicas, num_microbatches=num_microbatches)
    fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**mesh), schedule, **options)
    return fb, (model, toy.params(layers=layers, dtype=dtype), toy.batch(), plan, KEY)


def gradients(*args, **options):
    """The result of such a call."""
    fb, arguments = call(*args, **options)
    return fb(*arguments)


def of_transformer(experts, **options):
    """Results of a transformer, (on one device, with the options on several)."""
    sizes = TransformerConfig(
        vocab_size=32, num_layers=3, hidden_size=16, num_heads=2, mlp_size=32, **experts
    )
    model, params = transformer(sizes), init_params(sizes, jax.random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype("float64"), params)
    tokens = np.random.default_rng(0).integers(0, 32, (8, 8))
    batch = {"tokens": tokens, "targets": tokens, "loss_mask": np.ones((8, 8))}

    def result(axes, **options):
        plan = jaxfb.BatchPlan(rows=8, data_parallel=math.prod(axes.values()), num_microbatches=2)
        fb = jaxfb.get_forward_backward_func(jaxfb.make_mesh(**axes), **options)
        return fb(model, params, batch, plan, KEY)

    return result({}), result({"fsdp": 2, "expert": 2} if experts else {"fsdp": 4}, **options)
