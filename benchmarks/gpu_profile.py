"""Where an update's time goes on the device, by phase and kind of work: a trace, read back as a short table.

The names are the `jax.named_scope`s of the program, which each kernel carries. Beside `gpu.py`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import jax
from gpu_step import Setting, compiled_step
from jax.profiler import ProfileData

from jaxfb.models.config import TransformerConfig

PARTS = ("attention", "mlp", "head", "embed", "layers")
# lines of a trace that say again what the streams say
SUMMARIES = {"XLA Ops", "XLA Modules", "Steps", "Framework Ops", "Framework Name Scope", "Source code"}
AROUND = "around other instructions"
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([^\s=]+) = (.*)$")
_AROUND = re.compile(r" (?:while|call|conditional)\(")
_OP_NAME = re.compile(r'op_name="([^"]*)"')


def profile(sizes: TransformerConfig, setting: Setting, steps: int, directory: str) -> dict[str, float]:
    """A trace of so many updates in `directory`, and milliseconds of an update by phase, part and kind of work."""
    compiled, state, batch, rows = compiled_step(sizes, setting)
    for _ in range(2):
        state, metrics = compiled(state, batch, rows)
    jax.block_until_ready(metrics)
    with jax.profiler.trace(directory):
        for _ in range(steps):
            state, metrics = compiled(state, batch, rows)
        jax.block_until_ready(metrics)
    (trace,) = Path(directory).rglob("*.xplane.pb")
    return table(durations(trace), labels(compiled.as_text()), steps)


def table(nanoseconds: dict[str, float], labels: dict[str, str], steps: int) -> dict[str, float]:
    """label -> milliseconds of an update, the largest first; a kernel of no known instruction under its own name."""
    by_label: Counter = Counter()
    for operation, time in nanoseconds.items():
        by_label[labels.get(operation, operation[:60])] += time
    by_label.pop(AROUND, None)
    return {label: round(time / steps / 1e6, 3) for label, time in by_label.most_common(30)}


def durations(trace: Path) -> dict[str, float]:
    """Instruction of the program -> nanoseconds that its kernels took, all together."""
    taken: Counter = Counter()
    for plane in ProfileData.from_file(str(trace)).planes:
        for line in plane.lines:
            if line.name in SUMMARIES:
                continue
            for event in line.events:
                kernel = event.name if "GPU" in plane.name else None
                if operation := dict(event.stats).get("hlo_op", kernel):
                    taken[str(operation)] += event.duration_ns
    return taken


def labels(compiled_text: str) -> dict[str, str]:
    """Instruction -> such as "backward mlp: products"."""
    found = {}
    for line in compiled_text.splitlines():
        if match := _INSTRUCTION.match(line):
            name, text = match.groups()
            found[name] = AROUND if _AROUND.search(text) else label(name, text)
    return found


def label(instruction: str, text: str) -> str:
    """Of one instruction, from its op_name: the phase, the part of the model, and what kind of work it is."""
    named = _OP_NAME.search(text)
    path = named.group(1) if named else ""
    part = next((part for part in PARTS if re.search(rf"\b{part}\b", path)), "")
    return f"{_phase(path)} {part}".strip() + f": {_kind(instruction, text, path)}"


def _phase(path: str) -> str:
    for phase in ("optimizer", "accumulate", "weights", "reduce_gradients"):
        if f"/{phase}/" in path:
            return phase
    if "transpose(" in path:
        return "backward"
    return "forward" if "forward" in path else "update"


def _kind(instruction: str, text: str, path: str) -> str:
    if "fmha" in text or "dot_product_attention" in path:
        return "flash attention"
    if (
        "/grouped_" in path
        or "gemm" in instruction
        or "cublas" in text
        or path.endswith("dot_general")
        or " dot(" in text
    ):
        return "products"
    if "copy" in instruction or "dynamic" in instruction:
        return "copies"
    return "elementwise"
