"""MaxText's own train step for one of its configurations, in this process: compiled, and its parameters as ours.

What `against_maxtext.py` runs beside our step. The calls are those of `maxtext.trainers.pre_train.train.train_loop`
in 0.2.5; nothing of MaxText is changed.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import maxtext.configs
import numpy as np
from flax import nnx
from flax.core.spmd import logical_axis_rules
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import sharding, train_utils

BASE = Path(maxtext.configs.__path__[0]) / "base.yml"
ALONE = {
    "run_name": "benchmark",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "dataset_type": "synthetic",
    "packing": False,
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "monitor_goodput": False,
    "enable_tensorboard": False,
    "log_config": False,
    "jax_cache_dir": "",
}


class Step:
    """A compiled train step and its state; `run()` is one update, on the same tokens every time.

    compiled:    the executable, of `mesh`; `state` is what it takes and gives.
    start_up:    seconds of the CPU, to lower and to compile.
    losses, grad_norms: f32[] of every update so far; norms before clipping.
    cpu_seconds: of all cores together, of every update.
    """

    def __init__(self, mesh: jax.sharding.Mesh, lower: Callable):
        self.mesh = mesh
        self.compiled, self.start_up = _compiled(lower)
        self.losses, self.grad_norms, self.cpu_seconds = [], [], []

    def run(self) -> None:
        start = time.process_time()
        loss, grad_norm = self.update()
        jax.block_until_ready((self.state, loss, grad_norm))
        self.cpu_seconds.append(time.process_time() - start)
        self.losses.append(loss)
        self.grad_norms.append(grad_norm)

    def update(self) -> tuple[jax.Array, jax.Array]:
        """Replaces the state; (loss, gradient norm) of the update."""
        raise NotImplementedError


class MaxTextStep(Step):
    """One configuration, from keys of its base.yml.

    learning_rate: count -> float[], its schedule.
    params:        the initial parameters, as `jaxfb_params` gives them.
    """

    def __init__(self, options: dict[str, Any], devices: list, tokens: np.ndarray, num_layers: int):
        with tempfile.TemporaryDirectory() as folder:
            config = _config(options, len(devices), folder)
            *_, shardings, _, self.mesh, self.learning_rate, _, _, _, _, state = train_utils.setup_train_loop(
                config, None, devices
            )
        graph, self.state = nnx.split(state)
        self.params = jaxfb_params(nnx.to_pure_dict(self.state["model"]), num_layers)
        of_params, shardings = sharding.maybe_update_params_sharding_with_opt(config, shardings)
        step, _ = train_utils.jit_train_and_eval_step(
            config, graph, self.mesh, self.state, shardings, train.train_step, params_shardings=of_params
        )
        with jax.set_mesh(self.mesh), logical_axis_rules(config.logical_axis_rules):
            self._batch = jax.device_put(_batch(tokens), sharding.get_input_data_sharding(config, self.mesh))
            super().__init__(self.mesh, lambda: step.lower(self.state, self._batch))

    def update(self):
        self.state, metrics = self.compiled(self.state, self._batch)
        return metrics["scalar"]["learning/loss"], metrics["scalar"]["learning/raw_grad_norm"]


def _compiled(lower: Callable) -> tuple[Any, dict[str, float]]:
    """(executable, seconds of the CPU that its two parts took); `lower` traces and lowers."""
    start = time.process_time()
    lowered = lower()
    middle = time.process_time()
    executable = lowered.compile()
    return executable, {"lower": middle - start, "compile": time.process_time() - middle}


def jaxfb_params(model: dict, num_layers: int) -> dict:
    """MaxText's Llama parameters in our names and shapes, on the host.

    Layers are stacked behind the first dim of every leaf (scan_layers), or by stage and, where a stage has several
    layers, in a dict of them each, or by repeat and stage (circular).
    """
    decoder = model["decoder"]
    if "pipeline_module" in decoder:
        layers = _of_stages(decoder["pipeline_module"]["layers"], num_layers)
    else:
        layers = jax.tree.map(lambda leaf: np.moveaxis(np.asarray(leaf), 1, 0), _weights(decoder["layers"]))
    attention, mlp, width = (
        layers["self_attention"],
        layers["mlp"],
        model["token_embedder"]["embedding"].shape[1],
    )

    def kernel(leaf, *shape):
        return {"kernel": leaf["kernel"].reshape(num_layers, *shape)}

    return jax.tree.map(
        np.array,
        {
            "embed": {"embedding": model["token_embedder"]["embedding"]},
            "norm": {"scale": decoder["decoder_norm"]["scale"]},
            "head": {"kernel": decoder["logits_dense"]["kernel"]},
            "layers": {
                "attention_norm": layers["pre_self_attention_layer_norm"],
                "attention": {
                    **{name: kernel(attention[name], width, -1) for name in ("query", "key", "value")},
                    "output": kernel(attention["out"], -1, width),
                },
                "mlp_norm": layers["post_self_attention_layer_norm"],
                "mlp": {"gate": mlp["wi_0"], "up": mlp["wi_1"], "down": mlp["wo"]},
            },
        },
    )


def _of_stages(layers: dict, num_layers: int) -> dict:
    if "layers_0" in layers:  # [stages, ...] each
        of_stage = [_weights(layers[f"layers_{index}"]) for index in range(len(layers))]
        layers = jax.tree.map(lambda *leaves: np.stack(leaves, 1), *of_stage)
        dims = 2
    else:  # [repeats, stages, ...]; a single layer in each
        layers, dims = _weights(layers), 2
    return jax.tree.map(lambda leaf: np.asarray(leaf).reshape(num_layers, *leaf.shape[dims:]), layers)


def _weights(layer: dict) -> dict:
    """Without the random number generators that its modules carry."""
    return {
        name: _weights(value) if isinstance(value, dict) else value
        for name, value in layer.items()
        if name != "rngs"
    }


def _config(options: dict[str, Any], num_devices: int, folder: str):
    given = ALONE | {"base_output_directory": folder} | options
    if num_devices < jax.device_count():
        given |= {"internal_compile": True, "internal_compile_num_devices": num_devices}
    written = [
        f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()
    ]
    return pyconfig.initialize(["", str(BASE), *written])


def _batch(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """tokens i32[rows, seq + 1] under MaxText's names: whole rows, one document each."""
    rows, positions = tokens.shape[0], np.arange(tokens.shape[1] - 1, dtype=np.int32)
    batch = {}
    for name, values in (("inputs", tokens[:, :-1]), ("targets", tokens[:, 1:])):
        batch |= {name: values, f"{name}_position": np.tile(positions, (rows, 1))}
        batch[f"{name}_segmentation"] = np.ones_like(values)
    return batch
