"""The machine that a plan is for, read from a name: `v5p:4x4x8`, `cpu:8`, `gpu:h100x8`. Plain Python.

Only the name and its arithmetic; `compiled.py` asks the compiler for the devices.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxfb.display import number_of
from jaxfb.planner.chips import GPUS, TPUS, Chip
from jaxfb.refusal import INT32, Refused
from jaxfb.refusal import text as text_of

MOST_ON_A_HOST = 8
EXAMPLES = "v5p:4x4x8, v5e:4x4, cpu:8 or gpu:h100x8"
SLICES = {
    2: ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
    3: ((1, 1, 1), (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4)),
}
"""The slices that Cloud TPU makes, by the dimensions of the torus; larger ones of three dimensions consist of cubes of
4 x 4 x 4 chips. https://docs.cloud.google.com/tpu/docs/v6e and https://docs.cloud.google.com/tpu/docs/v5p."""
NAMED_BY_CORES = ("v4", "v5p")
"""Chips whose slices Cloud TPU names by cores, two of a chip: v5p-8 has four chips. Others are named by chips."""
ALIASES = {"v7x": "tpu7x", "ironwood": "tpu7x", "trillium": "v6e", "v5litepod": "v5e", "v6": "v6e"}


@dataclass(frozen=True)
class Topology:
    """text: as asked. platform: "tpu", "gpu" or "cpu". shape: of the torus, or (devices,).

    chip: None for a simulated CPU, which has no peak to be measured against.
    """

    text: str
    platform: str
    shape: tuple[int, ...]
    chip: Chip | None

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape) * (self.chip.devices if self.chip else 1)

    def __str__(self) -> str:
        halves = f" ({self.chip.devices} devices a chip)" if self.chip and self.chip.devices > 1 else ""
        what = number_of(math.prod(self.shape), "GPU" if self.platform == "gpu" else "chip")
        return f"{self.text}: {what}{halves}" if self.chip else self.text


def parse_topology(text: str) -> Topology:
    """Reads a name.

    Raises:
      ValueError: an unknown generation, or a shape it does not come in, with the nearest that exists.
    """
    name, colon, shape = text_of("topology", text, who="[plan]").lower().partition(":")
    name = ALIASES.get(name, name)
    if not colon or not shape:
        near = _without_a_colon(text.lower())
        hint = f"did you mean {near}?" if near else f"write one such as {EXAMPLES}"
        raise Refused(f"[plan] cannot read the topology {text!r}; {hint}")
    if name == "cpu":
        return Topology(text, "cpu", (_count(shape, text, _example(name)),), None)
    if name == "gpu":
        return _gpus(shape, text)
    if name not in TPUS:
        close = difflib.get_close_matches(name, [*TPUS, "cpu", "gpu"], n=1, cutoff=0.0)[0]
        raise Refused(
            f"[plan] unknown topology {text!r}: no chip {name!r} among {', '.join(TPUS)}, cpu and gpu; "
            f"did you mean {_like(close, shape)}?"
        )
    return Topology(f"{name}:{shape}", "tpu", _torus(TPUS[name], shape, text), TPUS[name])


def _without_a_colon(text: str) -> str | None:
    """Returns the topology meant by Cloud TPU's name of a slice (v5p-8, v5litepod-16), or by GPUs alone (h100x8)."""
    gpus = re.fullmatch(rf"({'|'.join(GPUS)})(?:x(\d+))?", text)
    if gpus:
        return f"gpu:{gpus[1]}x{gpus[2] or 8}"
    name, _, number = text.partition("-")
    name = ALIASES.get(name, name)
    if name not in TPUS or name == "tpu7x" or not re.fullmatch(r"[1-9]\d{0,5}", number):
        return None
    chips = int(number) // (2 if name in NAMED_BY_CORES else 1)
    shape = _slice_of(chips, TPUS[name].torus)
    return shape and f"{name}:{shape} ({chips} chip{'s' * (chips != 1)})"


def _slice_of(chips: int, dims: int) -> str | None:
    """Returns the most compact slice of so many chips, or None where there is none."""
    cubes = itertools.combinations_with_replacement(range(4, 65, 4), 3) if dims == 3 else ()
    shapes = [shape for shape in (*SLICES[dims], *cubes) if math.prod(shape) == chips]
    return _written(min(shapes, key=sum)) if shapes else None


def _like(name: str, shape: str) -> str:
    """Returns the topology of that shape where a machine of the name comes in it, otherwise one that it comes in."""
    try:
        return parse_topology(f"{name}:{shape}").text
    except Refused:
        return _example(name)


def _example(name: str) -> str:
    shape = {"cpu": "8", "gpu": "h100x8"}.get(name) or "x".join(["4"] * TPUS[name].torus)
    return f"{name}:{shape}"


def topology_of(devices: list[Any]) -> Topology:
    """Returns the topology of devices at hand; without a chip where their kind is not known."""
    first = devices[0]
    chip = _chip(first.platform, first.device_kind)
    platform = first.platform if chip else "cpu"
    return Topology(f"{first.device_kind} x {len(devices)}", platform, (len(devices),), chip)


def _chip(platform: str, kind: str) -> Chip | None:
    if platform == "tpu":
        return next((replace(chip, devices=1) for chip in TPUS.values() if chip.kind == kind), None)
    names = sorted(GPUS, key=len, reverse=True) if platform in ("gpu", "cuda") else ()
    return next((GPUS[name] for name in names if name in kind.lower()), None)


def _gpus(shape: str, text: str) -> Topology:
    found = re.fullmatch(r"([a-z]+\d+)x(\d+)", shape)
    if not found or found[1] not in GPUS:
        raise Refused(
            f"[plan] cannot read the GPUs in {text!r}; write gpu:NAMExCOUNT with a name among "
            f"{', '.join(GPUS)}, such as gpu:h100x8"
        )
    chip = GPUS[found[1]]
    count = _count(found[2], text, f"gpu:{chip.name}x8")
    island = chip.island or count
    if count > island and count % island:
        nearest = island * round(count / island)
        raise Refused(
            f"[plan] more than {chip.island} GPUs are hosts of {chip.island}, {text!r} does not fill them; "
            f"the nearest is gpu:{chip.name}x{nearest}"
        )
    return Topology(text, "gpu", (count,), chip)


def _count(number: str, text: str, example: str) -> int:
    if not number.isdecimal() or not number.strip("0"):
        raise Refused(
            f"[plan] {number!r} in the topology {text!r} is not a number of devices; write {example}"
        )
    _check_size([_size(number)], text, example)
    return _size(number)


def _size(digits: str) -> int:
    """Returns a number; of one that is too large in any case, the first that is."""
    return int(digits) if len(digits) <= len(str(INT32)) else INT32 + 1


def _check_size(sizes: Sequence[int], text: str, example: str) -> None:
    """Refuses more devices than their number may be; a round one above the sizes still has to fit."""
    if math.prod(size + MOST_ON_A_HOST for size in sizes) > INT32:
        raise Refused(
            f"[plan] {text!r} has too many devices, a plan is for fewer than {INT32}; write {example}"
        )


def _torus(chip: Chip, shape: str, text: str) -> tuple[int, ...]:
    sizes = tuple(_size(part) for part in shape.split("x") if part.isdecimal())
    if len(sizes) != len(shape.split("x")) or len(sizes) != chip.torus or min(sizes) < 1:
        same = _slice_of(math.prod(sizes), chip.torus)
        meant = _example(chip.name) if same is None else f"{chip.name}:{same}"
        raise Refused(
            f"[plan] {text!r} must give the {chip.torus} dimensions of a slice of {chip.name}; write {meant}"
        )
    _check_size(sizes, text, _example(chip.name))
    if not _is_a_slice(sizes):
        shapes = ", ".join(_written(shape) for shape in SLICES[chip.torus])
        larger = " and those of multiples of 4" if chip.torus == 3 else ""
        raise Refused(
            f"[plan] {chip.name} has no slice {shape}, it has {shapes}{larger}; "
            f"the nearest is {chip.name}:{_written(_nearest_slice(sizes))}"
        )
    return sizes


def _is_a_slice(sizes: tuple[int, ...]) -> bool:
    """Returns whether there are slices of this shape, turned in any way."""
    of_cubes = len(sizes) == 3 and all(size % 4 == 0 for size in sizes)
    return of_cubes or sorted(sizes) in map(sorted, SLICES[len(sizes)])


def _nearest_slice(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the slice whose sides have the least product of ratios to these; of two such the smaller."""
    turned = {one for shape in SLICES[len(sizes)] for one in itertools.permutations(shape)}
    if len(sizes) == 3:
        turned |= set(itertools.product(*({max(4, size // 4 * 4), -(-size // 4) * 4} for size in sizes)))
    return min(turned, key=lambda one: (_distance(one, sizes), math.prod(one), tuple(-side for side in one)))


def _distance(one: tuple[int, ...], other: tuple[int, ...]) -> float:
    return sum(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def _written(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes))
