"""`jaxfb import-hf` and `export-hf`: a directory of Hugging Face files becomes a run, and a run becomes one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxfb.checkpoint import CheckpointStore
from jaxfb.config import config_from_dict, load_config, save_yaml
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params
from jaxfb.pretrained.architectures import describe, sizes_of
from jaxfb.pretrained.export import export_model
from jaxfb.pretrained.load import load_params
from jaxfb.pretrained.repository import COMPANIONS, open_repository
from jaxfb.refusal import Refused

CARRIED = "hf"  # in a run's directory: config.json and the companions of the model that it was imported from
DTYPES = ("float32", "bfloat16", "float16")


def import_run(directory: str | Path, run_dir: str | Path) -> Path:
    """Writes a run directory from which `eval`, `generate` and every kind of training can start; returns it.

    The checkpoint holds float32 parameters, which hold 16-bit weights exactly.

    Raises:
      ValueError: the directory cannot be read as a model, or the run directory holds something.
    """
    repository, target = open_repository(directory), Path(run_dir)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise Refused(f"[hf] {target} must be a new or an empty directory; choose another --out")
    sizes = sizes_of(repository.config)
    params = load_params(repository, sizes, jax.eval_shape(lambda: init_params(sizes, jax.random.key(0))))
    target.mkdir(parents=True, exist_ok=True)
    with CheckpointStore(target / "checkpoints", asynchronous=False) as store:
        store.save(0, {"params": params}, {"update": 0, "imported": str(repository.config.get("model_type"))})
    _carry(repository.path, target)
    save_yaml(config_from_dict(_config(target, sizes)), target / "config.yaml")
    return target


def export_run(run_dir: str | Path, directory: str | Path, dtype: str | None = None) -> list[Path]:
    """Writes the newest checkpoint of a run as a directory of Hugging Face files; returns the files.

    dtype: of the weights; None is that of the model that the run was imported from, else float32.

    Raises:
      ValueError: there is no checkpoint, or no architecture of transformers computes what this model computes.
    """
    source = Path(run_dir)
    config = load_config(source)
    origin = _origin(source, config)
    sizes, description = _described(source, config, origin)
    if dtype not in (None, *DTYPES):
        raise Refused(f"[hf] dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    wanted = jnp.dtype(dtype or description.get("dtype") or description.get("torch_dtype") or "float32")
    shapes = jax.eval_shape(lambda: init_params(sizes, jax.random.key(0)))
    store = CheckpointStore(source / "checkpoints", keep_best=None)
    params = store.restore({"params": shapes}, partial=True)[0]["params"]
    params = jax.tree.map(lambda leaf: leaf.astype(wanted), params)
    files = export_model(directory, params, description, origin)
    if not (Path(directory) / "tokenizer.json").exists() and _is_library_tokenizer(source / "tokenizer.json"):
        files.append(Path(shutil.copyfile(source / "tokenizer.json", Path(directory) / "tokenizer.json")))
    return files


def _described(source: Path, config: Any, origin: Path | None) -> tuple[TransformerConfig, dict[str, Any]]:
    """Returns the sizes of the run's model and a config.json of it."""
    if origin is not None:
        values = json.loads((origin / "config.json").read_text())
        return sizes_of(values), values
    model = config.model or load_config(config.start.run).model
    if isinstance(model, OwnModelConfig):
        raise Refused(
            f"[export] the run trained model.name={model.name!r}, for which no Hugging Face format is known; only the "
            "built-in transformer is exported"
        )
    sizes = model.sized(_stored_vocabulary(source))
    return sizes, describe(sizes)


def _stored_vocabulary(source: Path) -> int:
    """Returns the rows of the saved embedding: a config may leave the vocabulary to the tokenizer."""
    store = CheckpointStore(source / "checkpoints", keep_best=None)
    return store.shapes()["params.embed.embedding"][0]


def _origin(source: Path, config: Any) -> Path | None:
    """Returns what was carried from the imported model, of this run or of the one that it started from."""
    if (source / CARRIED / "config.json").is_file():
        return source / CARRIED
    start = getattr(config, "start", None)
    return _origin(Path(start.run), load_config(start.run)) if start is not None and start.run else None


def _carry(source: Path, target: Path) -> None:
    (target / CARRIED).mkdir()
    for name in ("config.json", *COMPANIONS):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / CARRIED / name)
    if (source / "tokenizer.json").is_file():
        shutil.copyfile(source / "tokenizer.json", target / "tokenizer.json")


def _config(target: Path, sizes: TransformerConfig) -> dict[str, Any]:
    """Returns the config of a run that goes on training: everything but the model is a place to start from."""
    tokenizer = target / "tokenizer.json"
    model = {
        name: vars(value) if name == "rope_scaling" and value else value
        for name, value in vars(sizes).items()
    }
    return {
        "model": model,
        "data": {"tokenizer": str(tokenizer) if tokenizer.exists() else "bytes", "sequence_length": 512},
        "batch": {"rows": 8, "rows_per_microbatch": 1},
        "run": {"dir": str(target), "updates": 1000},
        "optimizer": {"learning_rate": 1e-5},
    }


def _is_library_tokenizer(path: Path) -> bool:
    return path.is_file() and "model" in json.loads(path.read_text(encoding="utf-8"))


def lines(files: Iterable[Path]) -> str:
    """Returns what the commands print: a line a file."""
    return "\n".join(f"wrote {file}" for file in files)
