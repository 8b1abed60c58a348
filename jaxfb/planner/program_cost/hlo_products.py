"""Operations of the matrix products in a compiled program's text, instruction by instruction."""

from __future__ import annotations

import math
import re
from functools import cache

from jaxfb import hlo
from jaxfb.hlo import Instruction
from jaxfb.hlo.text import searched, shape_of
from jaxfb.planner.program_cost import gpu_calls
from jaxfb.planner.program_cost.kernels import kernel_flops
from jaxfb.planner.program_cost.routing import Routed


class Products:
    """flops of the instructions of some computations; loops and branches apart, what a fusion holds included.

    routed: the share of the rows of a kernel for experts that it works through.
    """

    def __init__(self, computations: dict[str, list[Instruction]], routed: Routed):
        self._computations, self._routed = computations, routed
        self._types = {name: hlo.types(body) for name, body in computations.items()}
        self._inside: dict[str, float] = {}

    def of(self, instruction: Instruction, name: str) -> float:
        """Returns the products of one run of an instruction of the computation `name`."""
        if instruction.opcode in hlo.REGIONS:
            return 0.0
        types = self._types[name]
        operands = [types.get(one, "") for one in hlo.operand_names(instruction)]
        if instruction.opcode in ("dot", "convolution"):
            return product_flops(instruction.opcode, instruction.result, *operands[:2], instruction.rest)
        if instruction.opcode == "custom-call":
            shapes = [shape_of(one) for one in operands]
            share, _ = self._routed.of({shape[0] for shape in shapes if len(shape) == 2})
            of_kernel = kernel_flops(gpu_calls.kernel(instruction) or instruction.name, shapes, share)
            return of_kernel or gpu_calls.flops(instruction, next(iter(operands), ""))
        return sum(self._of_all(inner) for inner, _ in hlo.callees(instruction, self._computations))

    def _of_all(self, name: str) -> float:
        if name not in self._inside:
            self._inside[name] = sum(self.of(one, name) for one in self._computations[name])
        return self._inside[name]


@cache
def product_flops(opcode: str, result: str, left: str, right: str, rest: str) -> float:
    """Returns 2 x multiplications of a product; a TPU writes most of them as convolutions."""
    out = shape_of(result)
    if opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        dims = [int(dim) for dim in contracted[1].split(",") if dim] if contracted else []
        return 2.0 * math.prod(out) * math.prod(shape_of(left)[dim] for dim in dims)
    labels = searched(r"dim_labels=(\w+)_(\w+)->(\w+)", rest)
    image, kernel, out_labels = labels[1], labels[2], labels[3]
    fixed = math.prod(out[out_labels.index(label)] for label in "bf")
    fixed *= shape_of(right)[kernel.index("i")]
    spatial = [label for label in out_labels if label.isdigit()]
    window = _window(rest, len(spatial))
    pairs = 1
    for axis, label in enumerate(spatial):
        sizes = (
            shape_of(left)[image.index(label)],
            shape_of(right)[kernel.index(label)],
            out[out_labels.index(label)],
        )
        pairs *= _valid_pairs(*sizes, *window[axis])
    return 2.0 * fixed * pairs


def _window(rest: str, dims: int) -> list[tuple[int, int, int, int]]:
    """Returns (stride, low padding, dilation of the image, of the kernel) of each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", rest)
    given = dict(part.split("=") for part in found[1].split()) if found else {}
    read = lambda name, default: given[name].split("x") if name in given else [default] * dims  # noqa: E731
    stride, image, kernel = (map(int, read(name, "1")) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = (int(low.split("_")[0]) for low in read("pad", "0_0"))
    return list(zip(stride, padding, image, kernel, strict=True))


@cache
def _valid_pairs(size, kernel, out, stride, padding, image_dilation, kernel_dilation) -> int:
    """Returns (result, kernel) positions that meet a number and not padding."""
    length, count = (size - 1) * image_dilation + 1, 0
    for position in range(out):
        at = (position * stride + tap * kernel_dilation - padding for tap in range(kernel))
        count += sum(0 <= place < length and place % image_dilation == 0 for place in at)
    return count
