"""The model of a run, or of a directory of Hugging Face files, ready to be used: sizes, parameters, tokenizer, chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.config import config_from_dict, load_config, refuse_own_model, saved_run
from jaxfb.config.sections import AutoMesh, MeshConfig
from jaxfb.data import load_tokenizer
from jaxfb.data.chat import Chat, saved_chat, saved_ends
from jaxfb.data.tokenizer import ByteTokenizer, Tokenizer, absent_ids
from jaxfb.forward_backward import ForwardBackward, get_forward_backward_func
from jaxfb.losses.vocabulary.logits import IdRanges
from jaxfb.mesh import axis_size, make_mesh
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import transformer
from jaxfb.parallel.sharding import abstract, param_specs, shardings
from jaxfb.parallel.tensor import transformer_param_specs
from jaxfb.pretrained.companions import CARRIED, OF_A_TOKENIZER
from jaxfb.pretrained.repository import holds_weights
from jaxfb.refusal import Refused, choice
from jaxfb.training.from_config.dtypes import enable_float64
from jaxfb.training.from_config.options import engine_options
from jaxfb.training.from_config.sizes import abstract_params, built_in, model_sizes
from jaxfb.training.open_mesh import with_layout
from jaxfb.training.origins import MISSING, of_model
from jaxfb.training.parameters import newest_params
from jaxfb.training.persistence.changes import check_model
from jaxfb.training.run_dir import RunDirectory

PyTree = Any
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Model:
    """Parameters that are ready to be used.

    name:   what it was opened by. config: of the run, or as if a run began with the directory.
    update: of the checkpoint. chat: None where there is no template, and a prompt is continued as it stands.
    mesh:   over which the parameters are cut; None where they are all on one device.
    ends:   ids that end a text by generation_config.json, or config.json, of the model's files.
    """

    name: str
    config: Any
    sizes: TransformerConfig
    params: PyTree
    tokenizer: Tokenizer
    chat: Chat | None
    update: int
    mesh: Mesh | None = None
    ends: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Returns the name and, of a run, how far it was trained."""
        return f"{self.name} after {self.update} updates" if self.update else self.name

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """Returns the ids that end an answer, or a text where there is no chat."""
        if self.chat is not None:
            return self.chat.stop_tokens
        own = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return tuple(dict.fromkeys((*own, *self.ends)))

    @cached_property
    def absent_ids(self) -> IdRanges:
        """Returns ranges of the ids in the model's vocabulary that the tokenizer lacks."""
        return absent_ids(self.tokenizer, self.sizes.vocab_size)

    @cached_property
    def forward(self) -> ForwardBackward:
        """Makes the engine of forward-only passes on the mesh."""
        return get_forward_backward_func(self.mesh, **engine_options(self.config))


def open_model(
    path: str | Path, overrides: Sequence[str] = (), on_mesh: bool = False, dtype: str | None = None
) -> Model:
    """Opens a run's newest checkpoint, or the model of a directory of Hugging Face files.

    Args:
      path: a run's directory, a config whose run.dir is one or whose `model.from` names files, or a directory of
        Hugging Face files.
      overrides: of the config, such as mesh.fsdp=8.
      on_mesh: spread the parameters over the config's mesh, as training does, for scores. Otherwise each is cut over as
        many devices as the mesh cuts it over (`sampling_mesh`), for continuations.
      dtype: "float32", "bfloat16" or "float16", of the parameters and of what is computed with them; None: as saved.
    Raises:
      ValueError: there is no such model, it has no tokenizer, or the overrides would read the parameters wrongly.
    """
    if dtype is not None:
        choice("dtype", dtype, DTYPES, who="[model]")
    directory, config = _run_of(Path(path), overrides)
    enable_float64(config)
    tokenizer = _tokenizer(directory, config)
    sizes = model_sizes(config, tokenizer.vocab_size)
    built_in(sizes, "this", "use its parameters in a program, with CheckpointStore.restore")
    assert isinstance(sizes, TransformerConfig)
    shapes = abstract_params(config, sizes)
    if on_mesh:
        mesh = make_mesh(**vars(config.mesh))
        forward = get_forward_backward_func(mesh, **engine_options(config))
        shapes = abstract(shapes, shardings(forward.param_specs(transformer(sizes), shapes), mesh))
    else:
        asked = bool(overrides) and config.mesh != _run_of(Path(path), ())[1].mesh
        mesh = sampling_mesh(config.mesh, asked)
        shapes = shapes if mesh is None else cut(shapes, mesh)
    params, record = newest_params(directory, config, shapes, dtype)
    if "config" in record:  # not where nothing was trained yet
        check_model(record["config"], config)
    chat, ends = saved_chat(directory, tokenizer), saved_ends(directory, tokenizer)
    return Model(str(path), config, sizes, params, tokenizer, chat, record["update"], mesh, ends)


def files_of(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, str]:
    """Returns what `open_model` would read, in digits, for processes that must all read the same.

    What it would refuse is a text in their place, so that a process that finds no model differs from the others.
    """
    try:
        return of_model(*_run_of(Path(path), overrides))
    except (ValueError, OSError) as error:
        return {"weights": str(error).partition(";")[0], "tokenizer and chat": MISSING}


def sampling_mesh(settings: MeshConfig, asked: bool = True) -> Mesh | None:
    """Returns the mesh on which a model continues texts: fsdp, expert and tensor as in training, stages and context as
    more fsdp.

    Replicas cut no parameters, so one is enough; in several processes all devices take part.

    Args:
      settings: the config's mesh.
      asked: it is refused where these devices are not there; otherwise one device then has all parameters.
    Returns:
      None where nothing would be cut.
    """
    try:
        whole = make_mesh(**vars(settings))
    except Refused:
        if asked:
            raise
        return None
    one_of_each = tuple(0 if axis == "data" else slice(None) for axis in whole.axis_names)
    devices = list(whole.devices[one_of_each].flat)
    kinds = ("pipe", "fsdp", "context"), ("expert",), ("tensor",)
    fsdp, expert, tensor = (axis_size(whole, *axes) for axes in kinds)
    if jax.process_count() > 1:
        return make_mesh(data=axis_size(whole, "data"), fsdp=fsdp, expert=expert, tensor=tensor)
    if len(devices) == 1:
        return None
    return make_mesh(fsdp=fsdp, expert=expert, tensor=tensor, devices=devices)


def cut(shapes: PyTree, mesh: Mesh) -> PyTree:
    """Returns shapes with the shardings of parameters that continue texts.

    Raises:
      ValueError: an axis does not divide what it cuts.
    """
    specs = param_specs(shapes, mesh, transformer_param_specs(shapes), stacked=True)
    return abstract(shapes, shardings(specs, mesh))


def is_directory_of_files(path: str | Path) -> bool:
    """Returns whether Hugging Face files lie there, and no run."""
    found = Path(path)
    return found.is_dir() and not (found / "config.yaml").exists() and (found / "config.json").is_file()


def config_of_files(directory: str | Path, overrides: Sequence[str] = ()) -> Any:
    """Returns the config of a run that would begin with a directory of Hugging Face files."""
    path = Path(directory)
    if not holds_weights(path):
        raise Refused(f"[model] {path} has a config.json but no *.safetensors; download the whole model")
    limit = json.loads((path / "config.json").read_text()).get("max_position_embeddings") or 1024
    has_tokenizer = (path / "tokenizer.json").is_file()
    values = {
        "model": {"from": str(path)},
        "data": {
            "tokenizer": str(path / "tokenizer.json") if has_tokenizer else "bytes",
            "sequence_length": max(2, min(limit, 4096)),
        },
        "batch": {"rows": 8, "rows_per_microbatch": 1},
        "run": {"dir": str(path), "updates": 1},
        "optimizer": {"learning_rate": 1e-5},
    }
    return config_from_dict(values, overrides)


def _run_of(path: Path, overrides: Sequence[str]) -> tuple[Path, Any]:
    if is_directory_of_files(path):
        return path, config_of_files(path, overrides)
    config = load_config(path, overrides)
    refuse_own_model(
        config, "sampling and scoring text", "call your model on the parameters of its checkpoint"
    )
    begins = getattr(config.model, "from_", None) is not None
    directory = Path(config.run.dir) if begins and not path.is_dir() else saved_run(path, config)
    if isinstance(config.mesh, AutoMesh) and (saved := RunDirectory(directory).saved_config()):
        config = with_layout(config, {"mesh": saved["mesh"]})
    return directory, config


def _tokenizer(directory: Path, config: Any) -> Tokenizer:
    source = getattr(config.model, "from_", None)
    places = [directory] if source is None else [directory, Path(source)]
    for place in places:
        if (place / "tokenizer.json").is_file():
            return load_tokenizer(place / "tokenizer.json")
    if getattr(getattr(config, "data", None), "tokenizer", None) == "bytes":
        _refuse_other_tokenizer([*places, directory / CARRIED])
        return ByteTokenizer()
    raise Refused(f"[model] {directory} has no tokenizer.json, so its tokens cannot become text")


def _refuse_other_tokenizer(places: Sequence[Path]) -> None:
    """Refuses to read texts as bytes where files other than tokenizer.json show that the model has a tokenizer."""
    found = [
        place / name
        for place in places
        for name in OF_A_TOKENIZER
        if (place / name).is_symlink() or (place / name).exists()
    ]
    if found:
        raise Refused(
            f"[model] there is {found[0]} but no tokenizer.json beside it, so texts cannot become the model's tokens; "
            "download it, or write it with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
