"""Training configs small enough for a test: bytes, two narrow layers, a little of the standard library; and a model of
one's own, a line of three numbers."""

from pathlib import Path

import yaml

TINY = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 32, "tied_embeddings": True},
    "data": {
        "source": "python-stdlib",
        "tokenizer": "bytes",
        "sequence_length": 32,
        "max_bytes": 60_000,
        "held_out_fraction": 0.1,
    },
    "batch": {"rows": 8, "rows_per_microbatch": 2},
    "run": {"updates": 12},
    "optimizer": {"learning_rate": 1e-2, "max_grad_norm": 1.0},
    "lr": {"warmup": 2},
    "eval": {"every": 4, "batches": 2, "prompt": "def ", "tokens": 8},
    "mesh": {"data": 1},
    "checkpoint": {"every": 4},
}


def write_tiny(directory: Path, **sections: dict) -> Path:
    """tiny.yaml in `directory`, its run beside it; `sections` are merged over TINY."""
    values = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in {**TINY, **sections}}
    values["run"].setdefault("dir", str(directory / "run"))
    values["data"].setdefault("cache_dir", str(directory / "data"))
    path = directory / "tiny.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


OWN_MODULE = """
import jax, numpy as np
import jaxfb

def model(params, microbatch, rng):
    error = jax.numpy.square(microbatch["x"] @ params["w"] - 1.0)
    return jaxfb.Sum(error.sum(), error.size)

def params(key):
    return {"w": jax.random.normal(key, (3,))}

def data():
    return {"x": np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)}
"""
OWN = {
    **{name: f"tiny_own:{name}" for name in ("model", "params", "data")},
    "batch": {"rows": 8, "rows_per_microbatch": 2},
    "run": {"dir": "run", "updates": 4},
    "optimizer": {"learning_rate": 0.01},
    "lr": {"name": "constant"},
    "mesh": {"data": 2},
}


def write_own(directory: Path) -> Path:
    """own.yaml in `directory`, where its command is to be called, and the module beside it that it names."""
    (directory / "tiny_own.py").write_text(OWN_MODULE)
    path = directory / "own.yaml"
    path.write_text(yaml.safe_dump(OWN))
    return path
