"""`jaxfb import-hf` and `export-hf`: a directory of Hugging Face files becomes a run, and a run becomes one."""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxfb.checkpoint.damage import damage
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.checkpoint.stored_parts import StoredArrays
from jaxfb.config import config_from_dict, load_config, refuse_own_model, save_yaml, saved_run
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.adapted import A, B, LoRA, adapted
from jaxfb.models.config import TransformerConfig
from jaxfb.models.lora import adapter_path, merged_kernel
from jaxfb.pretrained.architectures import architecture_of, describe, sizes_of, with_depths
from jaxfb.pretrained.companions import CARRIED, carry, copy_companions
from jaxfb.pretrained.export import export_arrays
from jaxfb.pretrained.load import checked_leaves, load_part
from jaxfb.pretrained.new_directory import NO_SPACE, check_new, new_directory, whole_directory
from jaxfb.pretrained.peft import save_adapter
from jaxfb.pretrained.repository import open_repository, read_json
from jaxfb.pretrained.tensor_files import NAMES
from jaxfb.refusal import Missing, Refused, StorageError, choice, shown
from jaxfb.trainable import name_of
from jaxfb.training.exported_tokenizer import add_tokenizer, token_ids
from jaxfb.training.from_config.dtypes import with_float64
from jaxfb.training.from_config.sizes import abstract_params, config_with_model
from jaxfb.training.parameters import carried_of, weights_of
from jaxfb.training.run_dir import RunDirectory

log = logging.getLogger(__name__)
DTYPES = ("float32", "bfloat16", "float16")
_OF_THE_TARGET = NO_SPACE | {errno.EROFS, errno.EACCES, errno.EPERM}
"""What a disk refuses where the files are written; other errors are of the checkpoint that is read."""


def import_run(directory: str | Path, run_dir: str | Path) -> Path:
    """Writes a run directory from which `eval`, `generate` and every kind of training can start; returns it.

    The weights are checked, and copied as they are: a model takes as much of the disk as its files, whatever their
    dtype, and no memory. Whatever uses the run reads them tensor by tensor onto its own mesh.

    Raises:
      ValueError: the directory cannot be read as a model, or the run directory holds something.
    """
    repository = open_repository(directory)
    check_new(run_dir, " --out")
    sizes = sizes_of(repository.config)
    checked_leaves(repository, sizes)
    with new_directory(run_dir, " --out") as target:
        (target / "checkpoints").mkdir()
        kept = carry(repository.path, target)
        for file in repository.files:
            shutil.copyfile(file, kept / file.name)
        if (kept / "tokenizer.json").is_file():
            shutil.copyfile(kept / "tokenizer.json", target / "tokenizer.json")
        save_yaml(config_from_dict(_config(target)), target / "config.yaml")
    return target


def export_run(
    run_dir: str | Path,
    directory: str | Path,
    dtype: str | None = None,
    adapter: bool = False,
    update: int | str | None = None,
) -> list[Path]:
    """Writes a checkpoint of a run as a directory of Hugging Face files; returns the files.

    Of the checkpoint one layer of an array is in memory at a time.

    Args:
      dtype: of the weights; None is that of the model that the run was imported from, else float32.
      adapter: write the adapters alone, in PEFT's format; otherwise those of a run with `lora` are merged into the
        kernels.
      update: after which the checkpoint was saved; "best": the one whose metric `checkpoint.keep_best` is best;
        None: the newest.

    Raises:
      ValueError: there is no such checkpoint, no architecture of transformers computes what this model computes, or
        there are not adapters.
    """
    source = Path(run_dir)
    config = load_config(source)
    refuse_own_model(
        config, "export-hf", "jaxfb.checkpoint.store.CheckpointStore reads the parameters of your own"
    )
    if dtype not in (None, *DTYPES):
        raise Refused(f"[hf] dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    source = saved_run(source, config)
    step = None if update is None else _step_of(source, config, update)
    with with_float64(config):
        if adapter:
            return _export_adapter(source, config, Path(directory), step)
        return _export_model(source, config, Path(directory), dtype, step)


def _export_model(
    source: Path, config: Any, directory: Path, dtype: str | None, step: int | None
) -> list[Path]:
    with whole_directory(directory, last="config.json") as inside:
        if RunDirectory(source).newest_update() is None and (files := weights_of(source, config)):
            written = _export_files(files, inside, dtype)
        else:
            written = _export_checkpoint(source, config, inside, dtype, step)
        written += add_tokenizer(source, inside)
    return [directory / path.name for path in written]


def _step_of(source: Path, config: Any, update: int | str) -> int:
    """Returns the checkpoint that was saved after an update, or the "best" one."""
    settings = config.checkpoint
    store = CheckpointStore(source / "checkpoints", keep_best=settings.keep_best, best_is=settings.best_is)
    steps = store.steps()
    if not steps:
        raise Missing(
            f"[export] {source} has saved no update, so update={shown(update)} names none; leave it out to export an "
            "imported model as it is"
        )
    have = f"the updates that {source} has saved: {', '.join(map(str, steps))}"
    if update == "best":
        best = store.best()
        if best is None:
            metric = settings.keep_best
            why = f"none was saved with the metric {metric}" if metric else "checkpoint.keep_best is null"
            raise Refused(f"[export] no checkpoint is known to be the best: {why}; choose one of {have}")
        return best
    if type(update) is not int or update not in steps:
        raise Refused(f'[export] update={shown(update)} must be "best" or one of {have}')
    return update


def _export_files(source: Path, target: Path, dtype: str | None) -> list[Path]:
    """Writes the files of a model that was not trained: the same bits, unless another dtype is asked for."""
    repository = open_repository(source)
    sizes = sizes_of(repository.config)
    has_depths = any(name.startswith(f"model.layers.{sizes.num_layers}.") for name in repository.tensors)
    sizes = with_depths(sizes, repository.config) if has_depths else sizes
    leaves = checked_leaves(repository, sizes)
    if dtype is not None:
        shapes = {path: leaf.shape for path, leaf in leaves.items()}

        def read(path: str, _: int) -> Iterator[np.ndarray]:
            return (load_part(repository, leaves[path], part) for part in leaves[path].parts)

        return export_arrays(target, shapes, read, dtype, repository.config, source)
    with new_directory(target):
        weights = [Path(shutil.copyfile(file, target / file.name)) for file in repository.files]
        return copy_companions(source, target, ("config.json",)) + weights


def _export_checkpoint(
    source: Path, config: Any, target: Path, dtype: str | None, given: int | None = None
) -> list[Path]:
    origin = carried_of(source, config)
    sizes, description = _described(source, config, origin)
    wanted = dtype or description.get("dtype") or description.get("torch_dtype") or "float32"
    choice("dtype", wanted, tuple(NAMES), who="[hf] config.json:")
    stored, lora = _stored(config, sizes), getattr(config, "lora", None)
    shapes = {path: leaf.shape for path, leaf in stored.items() if not path.endswith((A, B))}
    store = CheckpointStore(source / "checkpoints", keep_best=None)
    store.check_fit({"params": _nested(stored)}, store.existing(given), partial=True)
    for step in reversed(store.steps()) if given is None else [given]:
        try:
            store.check_fit({"params": _nested(stored)}, step, partial=True)
            read = partial(_parts, store.arrays(step), lora)
            return export_arrays(target, shapes, read, wanted, description, origin)
        except Refused:
            raise
        except Exception as error:  # damage shows up as any of a dozen storage errors
            if isinstance(error, OSError) and error.errno in _OF_THE_TARGET:
                raise
            if given is not None:
                raise StorageError(
                    f"[export] update {step} of {source} {damage(store.directory / str(step), error)}"
                ) from error
            log.warning("[export] skipping update %d of %s: %s", step, source, error)
    raise Refused(f"[export] no checkpoint of {source} can be read whole")


def _parts(saved: StoredArrays, lora: LoRA | None, path: str, depth: int) -> Iterator[Any]:
    """Yields the parts of a saved parameter, with those of its adapter merged into them."""
    names = [path, *(adapter_path(path, leaf) for leaf in (A, B))]
    arrays = [saved.parts(f"params.{name}", depth) for name in names if f"params.{name}" in saved]
    if lora is None or len(arrays) == 1:
        return arrays[0]
    return (merged_kernel(kernel, a, b, lora) for kernel, a, b in zip(*arrays, strict=True))


def _export_adapter(source: Path, config: Any, target: Path, step: int | None) -> list[Path]:
    lora = getattr(config, "lora", None)
    if lora is None:
        raise Refused(
            f"[hf] {source} has no adapters, since its config has no lora; export it without --adapter"
        )
    if config.trainable:
        raise Refused(
            f"[hf] {source} trained {', '.join(config.trainable)} beside its adapters, which an adapter's files would "
            "leave out; export the merged model, without --adapter"
        )
    sizes, description = _described(source, config, carried_of(source, config))
    stored = _stored(config, sizes)
    store = CheckpointStore(source / "checkpoints", keep_best=None)
    wanted = _nested({path: leaf for path, leaf in stored.items() if path.endswith((A, B))})
    found = _by_path(store.restore({"params": wanted}, step, partial=True)[0]["params"])
    base = _base_of(source, config)
    return save_adapter(target, _nested(stored | found), lora, architecture_of(description), str(base))


def _base_of(source: Path, config: Any) -> Path:
    """Returns the directory of the weights that the adapters of a run belong to, or the run with them, with a
    warning, where no files have them.
    """
    begun = config.start.run if getattr(config, "start", None) else None
    if begun is None and (files := getattr(config.model, "from_", None)) is not None:
        return Path(files)
    base = source if begun is None else Path(begun)
    if begun is not None and not base.is_dir():
        log.warning(
            "[export] the run %s, to whose weights the adapters belong, is no longer there, so PEFT must be given a "
            "model with these weights by name",
            base,
        )
        return base
    files = None if begun is None else weights_of(base, load_config(base))
    if files is not None and RunDirectory(base).newest_update() is None:
        return files
    log.warning(
        "[export] the adapters belong to weights that only the run %s has, so PEFT must not load them onto another "
        "model%s",
        base,
        ""
        if begun is None
        else f"; export that run too, and load them onto its directory: jaxfb export-hf {base} DIR",
    )
    return base


def _stored(config: Any, sizes: TransformerConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of every saved parameter by dotted path."""
    return _by_path(abstract_params(config, adapted(sizes, getattr(config, "lora", None))))


def _by_path(tree: Any) -> dict[str, Any]:
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Returns the tree of dicts in which these leaves have these dotted paths."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        reduce(lambda node, parent: node.setdefault(parent, {}), parents, tree)[name] = leaf
    return tree


def _described(source: Path, config: Any, origin: Path | None) -> tuple[TransformerConfig, dict[str, Any]]:
    """Returns the sizes of the run's model and a config.json of it."""
    model = config_with_model(config).model
    if origin is not None:
        values = read_json(origin / "config.json") | token_ids(source, is_own=False)
        return replace(sizes_of(values), mtp_depth=getattr(model, "mtp_depth", 0)), values
    if isinstance(model, OwnModelConfig):
        raise Refused(
            f"[export] the run trained model.name={model.name!r}, for which no Hugging Face format is known; only the "
            "built-in transformer is exported"
        )
    # the rows of the saved embedding, since a config may leave the vocabulary to the tokenizer
    shapes = CheckpointStore(source / "checkpoints", keep_best=None).shapes()
    sizes = model.sized(shapes["params.embed.embedding"][0])
    return sizes, describe(sizes) | token_ids(source, is_own=True)


def _config(target: Path) -> dict[str, Any]:
    """Returns the config of a run that continues training: everything but the model is a place to start from."""
    tokenizer = target / "tokenizer.json"
    return {
        "model": {"from": str(target / CARRIED)},
        "data": {"tokenizer": str(tokenizer) if tokenizer.exists() else "bytes", "sequence_length": 512},
        "batch": {"rows": 8, "rows_per_microbatch": 1},
        "run": {"dir": str(target), "updates": 1000},
        "optimizer": {"learning_rate": 1e-5},
    }
