"""What every benchmark writes: its numbers, beside the machine and the versions that gave them, as one JSON file."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from pathlib import Path
from statistics import median

import jax

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy")


def machine() -> dict:
    """The machine in words and numbers; nothing that names it."""
    cpu = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.processor(),
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load_before": round(os.getloadavg()[0], 2),
        "devices": sorted({device.device_kind for device in jax.devices()}),
        "num_devices": jax.device_count(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def interleaved(functions: dict, rounds: int) -> dict[str, list[float]]:
    """Seconds of every function in every round. Each round runs all of them, every other round backwards.

    Neighbours in time see the same machine, so ratios within a round survive a load that comes and goes.
    """
    for function in functions.values():
        function()
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for index in range(rounds):
        for name in list(functions)[:: 1 if index % 2 else -1]:
            start = time.perf_counter()
            functions[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], name: str, to: str) -> dict[str, float]:
    """How long `name` takes for each second of `to`: median over rounds, and best against best."""
    each = [a / b for a, b in zip(seconds[name], seconds[to], strict=True)]
    best = min(seconds[name]) / min(seconds[to])
    return {"median_of_rounds": round(median(each), 4), "best_to_best": round(best, 4)}


def peak_bytes(compiled) -> int:
    """Bytes that one run of a compiled program needs at its peak: arguments, results and temporaries."""
    m = compiled.memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + results + m.temp_size_in_bytes


def temp_bytes(compiled) -> int:
    """Bytes of temporaries alone."""
    return compiled.memory_analysis().temp_size_in_bytes


def write(name: str, settings: dict, numbers: dict) -> Path:
    """Saves and prints results/<name>_jax<version>.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}_{jax.default_backend()}_jax{jax.__version__}.json"
    text = json.dumps({"benchmark": name, "settings": settings, "machine": machine(), **numbers}, indent=2)
    path.write_text(text + "\n")
    print(text)
    return path


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
