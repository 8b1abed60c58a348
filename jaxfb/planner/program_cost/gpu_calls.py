"""Counts what XLA's compiler for GPUs leaves to libraries: products by cuBLAS, attention by cuDNN, from the calls'
text.
"""

from __future__ import annotations

import math
import re

from jaxfb.hlo import Instruction
from jaxfb.hlo.text import shape_of

_WORKSPACE = re.compile(r"\b[su]8\[\d+\](?:\{[^}]*\})?")
_ATTENTION, _PRODUCT = "__cudnn$fmha", "__cublas$"
_KERNEL = re.compile(
    r'custom_call_target="__gpu\$xla\.gpu\.triton".*?op_name="[^"]*?([^"/]*)/pallas_call"', re.DOTALL
)


def flops(call: Instruction, left: str) -> float:
    """Returns the FLOPs of a library's product or attention; 0 of any other call.

    Attention (its scores are [rows, heads, T, S]) is two products of that size forward and five backward, and half of
    each where it is causal: cuDNN leaves out the blocks that nobody sees, and those before a window.

    Args:
      left: the type of the first operand.
    """
    target = re.search(r'custom_call_target="([^"]*)"', call.rest)
    if target and target[1].startswith(_PRODUCT):
        shape = shape_of(left)
        return 2.0 * math.prod(shape_of(call.result)) * math.prod(shape[d] for d in _contracted(call.rest))
    if target and target[1].startswith(_ATTENTION):
        scores, size = math.prod(_score_dims(call.rest)), shape_of(left)[-1]
        products = 5 if "Backward" in target[1] else 2
        return 2.0 * products * scores * size * _share_seen(call.rest)
    return 0.0


def kernel(call: Instruction) -> str | None:
    """Returns the name of the Pallas kernel that it calls; None of any other call."""
    found = _KERNEL.search(call.rest)
    return found[1] if found else None


def result(instruction: Instruction) -> str:
    """Returns the types that it writes, a library's workspace left out."""
    called = instruction.opcode == "custom-call" and instruction.result.startswith("(")
    return _WORKSPACE.sub("", instruction.result) if called else instruction.result


def _share_seen(rest: str) -> float:
    if "CAUSAL" not in rest:
        return 1.0
    found = re.search(r'"sliding_window_length":\s*"?(\d+)', rest)
    window, length = int(found[1]) if found else 0, _score_dims(rest)[-1]
    return window * (2 * length - window) / (2 * length**2) if 0 < window < length else 0.5


def _contracted(rest: str) -> list[int]:
    found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', rest)
    return [int(dim) for dim in re.findall(r"\d+", found[1])] if found else []


def _score_dims(rest: str) -> list[int]:
    found = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', rest)
    return [int(size) for size in re.findall(r"\d+", found[1])] if found else [0]
