"""Measures the host's memory while Hugging Face files of 8B sizes are read, imported and exported.

python benchmarks/weights_memory.py --layers 4      # two minutes on two cores; 32 layers: ten times that, 35 GB of disk

The directory has the config.json of Llama 3 8B and files of 5 GB, all zeros; the checkpoint that is exported has the
same arrays in float32, in the pieces in which a run stores them. The device is the host here, so what the arrays
themselves take is taken off while they are read: each is read as a run reads it, measured and dropped.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import threading
import time
from pathlib import Path

os.environ.update(JAX_PLATFORMS="cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from orbax.checkpoint._src.arrays.subchunking import choose_chunk_shape  # noqa: E402
from report import RESULTS, machine  # noqa: E402

from jaxfb.checkpoint.manifest import sealed, shapes_of  # noqa: E402
from jaxfb.checkpoint.record import RECORD  # noqa: E402
from jaxfb.checkpoint.store import FORMAT  # noqa: E402
from jaxfb.checkpoint.stored_parts import storage_of  # noqa: E402
from jaxfb.pretrained import open_repository, sizes_of  # noqa: E402
from jaxfb.pretrained.export import FILE_BYTES  # noqa: E402
from jaxfb.pretrained.load import checked_leaves, load_leaf  # noqa: E402
from jaxfb.pretrained.names import tensor_shapes  # noqa: E402
from jaxfb.pretrained.tensor_files import Tensor, TensorFile  # noqa: E402
from jaxfb.training.hugging_face import export_run, import_run  # noqa: E402

LLAMA_8B = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu", "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
             "num_attention_heads": 64}  # fmt: skip


def resident() -> int:
    """Bytes of memory of this process, without what it only shares with the files that it reads."""
    fields = dict(
        line.split(":") for line in Path("/proc/self/status").read_text().splitlines() if ":" in line
    )
    return int(fields["RssAnon"].split()[0]) * 1024


class Peak:
    """The most memory while inside, above what there was at the start."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.first, self.most, self._ended = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.01):
            self.most = max(self.most, resident() - self.first)

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()


def tensors_of(config: dict) -> dict[str, tuple[int, ...]]:
    """The tensors of a directory with that config.json."""
    from jaxfb.pretrained.architectures import architecture_of
    from jaxfb.pretrained.names import leaves_of

    return tensor_shapes(leaves_of(architecture_of(config), sizes_of(config)))


def write_sparse(directory: Path, config: dict) -> None:
    """Writes files of the right sizes whose tensors are holes."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    dtype, groups, size = jnp.dtype("bfloat16"), [[]], 0
    for name, shape in tensors_of(config).items():
        tensor = Tensor(name, shape, dtype)
        if size + tensor.nbytes > FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    names = [f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors" for k in range(len(groups))]
    for name, group in zip(names, groups, strict=True):
        TensorFile(directory / name, group).close(holes=True)
    weight_map = {one.name: name for name, group in zip(names, groups, strict=True) for one in group}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def write_checkpoint(directory: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Writes a checkpoint of zeros in float32, in the pieces in which a run stores its arrays."""
    import tensorstore

    leaves = {f"params.{path}": np.broadcast_to(np.float32(0), shape) for path, shape in shapes.items()}
    for name, leaf in leaves.items():
        how = storage_of(None, leaf)
        piece = leaf.shape if how is None else choose_chunk_shape(
            leaf.shape, leaf.shape, leaf.dtype, how.chunk_byte_size, shard_axes=how.shard_axes
        )  # fmt: skip
        codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd"}]
        grid = {"name": "regular", "configuration": {"chunk_shape": piece}}
        metadata = {"shape": leaf.shape, "data_type": "float32", "chunk_grid": grid, "codecs": codecs}
        store = {"driver": "ocdbt", "base": f"file://{directory}/state/", "path": f"{name}/"}
        spec = {"driver": "zarr3", "kvstore": store, "metadata": metadata}
        stored = tensorstore.open({**spec, "store_data_equal_to_fill_value": True}, create=True).result()
        for start in np.ndindex(*(-(-size // of) for size, of in zip(leaf.shape, piece, strict=True))):
            cut = tuple(slice(at * of, (at + 1) * of) for at, of in zip(start, piece, strict=True))
            stored[cut].write(np.zeros(leaf[cut].shape, np.float32)).result()
    sums = dict.fromkeys(leaves, "0" * 16)  # of zeros
    record = {"format": FORMAT, "leaves": shapes_of(leaves), "sums": sums, "host": {}}
    (directory / RECORD).mkdir()
    (directory / RECORD / "data.json").write_text(json.dumps(sealed(record)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--layers", type=int, default=32, help="of 32: every tensor has its size all the same"
    )
    config, rows = {**LLAMA_8B, "num_hidden_layers": parser.parse_args().layers}, {}
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "model"
        write_sparse(directory, config)
        repository = open_repository(directory)
        leaves = checked_leaves(repository, sizes_of(repository.config))
        began, beyond, largest = time.perf_counter(), 0, 0
        for leaf in leaves.values():
            like = jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
            nbytes = 2 * int(jnp.prod(jnp.array(leaf.shape, jnp.float32)))
            with Peak() as peak:
                array = load_leaf(repository, leaf, like)
                array.block_until_ready()
            beyond, largest = max(beyond, peak.most - nbytes), max(largest, nbytes)
            del array
        rows["read: host memory beside the arrays, GB"] = round(beyond / 1e9, 2)
        rows["read: seconds"] = round(time.perf_counter() - began, 1)
        with Peak() as peak:
            import_run(directory, Path(temporary) / "run")
        rows["import: host memory, GB"] = round(peak.most / 1e9, 2)

        for file in (Path(temporary) / "run" / "hf").glob("*.safetensors"):
            file.unlink()  # makes space for the next
        began = time.perf_counter()
        write_checkpoint(
            Path(temporary) / "run" / "checkpoints" / "1", {path: leaf.shape for path, leaf in leaves.items()}
        )
        rows["a checkpoint written piece by piece: seconds"] = round(time.perf_counter() - began, 1)
        began = time.perf_counter()
        with Peak() as peak:
            export_run(Path(temporary) / "run", Path(temporary) / "out")
        rows["export of a checkpoint in float32: host memory, GB"] = round(peak.most / 1e9, 2)
        rows["export: seconds"] = round(time.perf_counter() - began, 1)
    tensors = {name: 2 * max(_bytes(one) for one in tensors_of(config).values())
               for name, config in (("8B", LLAMA_8B), ("70B", LLAMA_70B))}  # fmt: skip
    rows["two files, GB"] = round(2 * FILE_BYTES / 1e9, 2)
    rows["largest tensor of 8B in bfloat16, GB"] = round(tensors["8B"] / 1e9, 2)
    rows["largest tensor of 70B in bfloat16, GB"] = round(tensors["70B"] / 1e9, 2)
    settings = {
        "model": "Llama 3 8B",
        "layers": config["num_hidden_layers"],
        "files_gb": FILE_BYTES / 1e9,
        "dtype": "bfloat16",
    }
    numbers = {"benchmark": "weights_memory", "settings": settings, "machine": machine(), "rows": rows}
    (RESULTS / "weights_memory.json").write_text(json.dumps(numbers, indent=2) + "\n")
    print(json.dumps(rows, indent=2))


def _bytes(shape: tuple[int, ...]) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


if __name__ == "__main__":
    main()
