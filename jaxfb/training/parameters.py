"""The parameters that a run has by now: of its newest checkpoint, or of the model's files that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxfb.checkpoint import CheckpointStore
from jaxfb.config.sections import check_sizes
from jaxfb.models.config import TransformerConfig
from jaxfb.pretrained.companions import CARRIED, carry
from jaxfb.pretrained.load import load_params
from jaxfb.pretrained.repository import holds_weights, open_repository
from jaxfb.pretrained.sizes import sizes_in
from jaxfb.training.run_dir import RunDirectory

PyTree = Any


def newest_params(run_dir: str | Path, config: Any, abstract_params: PyTree) -> tuple[PyTree, Mapping]:
    """Returns the parameters of a run, sharded like `abstract_params`, and the record of their checkpoint.

    Of a run that has saved nothing yet these are the parameters of the files that it begins with, if it begins with
    any; the record is then {"update": 0}.

    Raises:
      ValueError: the files are not of a model of these sizes, or a checkpoint's parameters are not.
      FileNotFoundError: there is neither a checkpoint nor such files.
    """
    directory = RunDirectory(Path(run_dir))
    source = weights_of(directory.path, config)
    if source is not None and directory.newest_update() is None:
        return params_in(source, config.model, abstract_params), {"update": 0}
    store = CheckpointStore(directory.checkpoints, keep_best=None)
    state, record = store.restore({"params": abstract_params}, partial=True)
    return state["params"], record


def weights_of(run_dir: str | Path, config: Any) -> Path | None:
    """Returns the directory of the files that a run begins with, its own copy first; None if there is none."""
    own = Path(run_dir) / CARRIED
    if holds_weights(own):
        return own
    source = getattr(config.model, "from_", None)
    return None if source is None else Path(source)


def params_in(source: str | Path, model: TransformerConfig, abstract_params: PyTree) -> PyTree:
    """Returns the parameters in a directory of Hugging Face files, tensor by tensor cast and sharded as asked.

    model: the sizes that they are to have, beside settings that do not concern the parameters.

    Raises:
      ValueError: the directory has another model, or its tensors are not those of its config.json.
    """
    sizes = sizes_in(source)
    check_sizes(str(source), vars(sizes), vars(model))
    return load_params(open_repository(source), sizes, abstract_params)


def carry_from(config: Any, directory: RunDirectory) -> None:
    """Copies the companions of the model that a run begins with into its directory, once."""
    source = getattr(config.model, "from_", None)
    if source is not None and not (directory.path / CARRIED).exists():
        carry(source, directory.path)
