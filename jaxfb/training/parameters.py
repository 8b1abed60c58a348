"""The parameters that a run has by now: of its newest checkpoint, or of the model's files that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.config import load_config
from jaxfb.config.model import check_sizes
from jaxfb.models.adapted import adapted
from jaxfb.models.config import TransformerConfig
from jaxfb.models.lora import merged, with_adapters, without_adapters
from jaxfb.pretrained.architectures import sizes_in
from jaxfb.pretrained.companions import CARRIED, carry
from jaxfb.pretrained.load import load_params
from jaxfb.pretrained.peft import load_adapter
from jaxfb.pretrained.repository import holds_weights, open_repository
from jaxfb.trainable import name_of
from jaxfb.training.from_config.dtypes import param_dtype
from jaxfb.training.from_config.sizes import abstract_params as saved_shapes
from jaxfb.training.run_dir import RunDirectory

PyTree = Any
ADAPTERS = 3  # folded into the run's key, which adapters are drawn from


def newest_params(
    run_dir: str | Path, config: Any, abstract_params: PyTree, dtype: str | None = None
) -> tuple[PyTree, Mapping]:
    """Returns the parameters of a run, sharded like `abstract_params`, and the record of their checkpoint.

    Of a run that has saved nothing yet these are the parameters of the files that it begins with, if it begins with
    any; the record is then {"update": 0}.

    dtype: of the parameters that are returned, in which files are read at once; None: as in `abstract_params`, which
      has those of a checkpoint.

    Raises:
      ValueError: the files are not of a model of these sizes, or a checkpoint's parameters are not.
      FileNotFoundError: there is neither a checkpoint nor such files.
    """
    directory = RunDirectory(Path(run_dir))
    source = weights_of(directory.path, config)
    if source is not None and directory.newest_update() is None:
        shapes = jax.tree.map(lambda leaf: leaf.update(dtype=jnp.dtype(dtype or leaf.dtype)), abstract_params)
        params = begun(config, params_in(source, config.model, without_adapters(shapes)))
        record: Mapping = {"update": 0}
    else:
        store = CheckpointStore(directory.checkpoints, keep_best=None)
        state, record = store.restore({"params": abstract_params}, partial=True)
        params = state["params"]
    return (params if dtype is None else jax.tree.map(lambda leaf: leaf.astype(dtype), params)), record


def params_of_run(run_dir: str | Path, sizes: TransformerConfig, abstract_params: PyTree) -> PyTree:
    """Returns the parameters of a run to begin another one with, its adapters merged into its kernels.

    abstract_params: without adapters; shapes, dtypes and shardings of what is returned.

    Raises:
      ValueError, FileNotFoundError: as for `newest_params`.
    """
    config, directory = load_config(run_dir), RunDirectory(Path(run_dir))
    lora = config.lora
    if directory.newest_update() is None:
        return newest_params(run_dir, replace(config, lora=None), abstract_params)[0]
    places = {name_of(path): leaf.sharding for path, leaf in tree_leaves_with_path(abstract_params)}

    def placed(path: tuple, leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places.get(name_of(path)))

    shapes = tree_map_with_path(placed, saved_shapes(config, adapted(sizes, lora)))
    params, _ = newest_params(run_dir, config, shapes)
    params = params if lora is None else merged(params, lora)
    return jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract_params)


def begun(config: Any, params: PyTree) -> PyTree:
    """Returns the parameters that a run begins with, from those of a model without adapters."""
    if config.lora is None:
        return params
    key = jax.random.fold_in(jax.random.key(config.run.seed), ADAPTERS)
    params = with_adapters(config.lora, params, key, param_dtype(config))
    return params if config.lora.adapter is None else load_adapter(config.lora.adapter, params, config.lora)


def with_given_adapter(config: Any, init: Callable[[jax.Array], PyTree]) -> Callable[[jax.Array], PyTree]:
    """Returns a function of a key that draws parameters, with the adapters of `lora.adapter` if there is one."""
    if config.lora is None or config.lora.adapter is None:
        return init
    return lambda key: load_adapter(config.lora.adapter, init(key), config.lora)


def weights_of(run_dir: str | Path, config: Any) -> Path | None:
    """Returns the directory of the files that a run begins with, its own copy first; None if there is none."""
    own = Path(run_dir) / CARRIED
    if holds_weights(own):
        return own
    source = getattr(config.model, "from_", None)
    return None if source is None else Path(source)


def params_in(source: str | Path, model: TransformerConfig, abstract_params: PyTree) -> PyTree:
    """Returns the parameters in a directory of Hugging Face files, tensor by tensor cast and sharded as asked; of
    adapters there are none.

    model: the sizes that they are to have, beside settings that do not concern the parameters.

    Raises:
      ValueError: the directory has another model, or its tensors are not those of its config.json.
    """
    sizes = sizes_in(source)
    check_sizes(str(source), vars(sizes), vars(model))
    sizes = replace(sizes, mtp_depth=model.mtp_depth)  # which a directory may have and need not be asked for
    return load_params(open_repository(source), sizes, abstract_params)


def carried_of(run_dir: Path, config: Any) -> Path | None:
    """Returns the companions of the model that was imported, in a run's directory or in that of the run that it began
    with; None if there are none.
    """
    own = run_dir / CARRIED
    return own if (own / "config.json").is_file() else _carried_before(config)


def _carried_before(config: Any) -> Path | None:
    start = getattr(config, "start", None)
    begun = None if start is None or start.run is None else Path(start.run)
    return None if begun is None or not begun.is_dir() else carried_of(begun, load_config(begun))


def carry_from(config: Any, directory: RunDirectory) -> None:
    """Copies the companions of the model that a run begins with into its directory, once."""
    source = getattr(config.model, "from_", None) or _carried_before(config)
    if source is not None and not (directory.path / CARRIED).exists():
        carry(source, directory.path)
