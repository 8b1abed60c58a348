"""Sizes of a schedule, and costs of its actions: what is refused before a table is built."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfb.refusal import Refused, integer, number, shown

WHO = "[schedule]"
LARGEST = 500_000
"""The most cells of a table: building and checking more takes minutes."""


def checked_sizes(num_stages: Any, num_microbatches: Any, num_chunks: Any) -> tuple[int, int, int]:
    """Returns the sizes as integers.

    Raises:
      ValueError: one is not a positive integer, or their table would be too large to be built.
    """
    sizes = {"num_stages": num_stages, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    stages, microbatches, chunks = (_size(name, value, sizes) for name, value in sizes.items())
    if cells_of(stages, microbatches, chunks) > LARGEST:
        choices = _smaller(stages, microbatches, chunks)
        raise Refused(
            f"{WHO} num_stages={stages} with num_chunks={chunks} and num_microbatches={microbatches} makes a table of "
            f"more than {LARGEST} cells; use {' or '.join(_words(choice) for choice in choices)}",
            choices,
        )
    return stages, microbatches, chunks


def checked_pieces(num_stages: int, num_microbatches: int, num_chunks: int, num_pieces: Any) -> int:
    """Returns the number of pieces of a sequence; ValueError if it is not positive, or makes a table too large."""
    pieces = _size("num_pieces", num_pieces, {})
    if pieces > 1 and cells_of(num_stages, num_microbatches * pieces, num_chunks) > LARGEST:
        most = max(1, (LARGEST // (num_stages * num_chunks) - num_stages) // num_microbatches)
        raise Refused(
            f"{WHO} num_stages={num_stages} with num_microbatches={num_microbatches} and num_pieces={pieces} makes a "
            f"table of more than {LARGEST} cells; use num_pieces={most}",
            [{"num_pieces": most}],
        )
    return pieces


def _size(name: str, value: Any, sizes: Mapping[str, Any]) -> int:
    try:
        return integer(name, value, most=LARGEST)
    except Refused as refused:
        too_large = bool(refused.choices) and refused.choices[0][name] == LARGEST
        most = f" and at most {LARGEST}" if too_large else ""
        use = _largest(name, sizes) if too_large else {name: 1}
        raise Refused(
            f"{WHO} {name} must be an integer of at least 1{most}; got {name}={shown(value)}; use {_words(use)}",
            [use],
        ) from None


def _largest(name: str, sizes: Mapping[str, Any]) -> dict[str, int]:
    """Returns the largest power of 2 that fits to the other sizes, if these are small; else 1."""
    others = {other: size for other, size in sizes.items() if other != name}
    if not all(isinstance(size, int) and 1 <= size <= 1000 for size in others.values()):
        return {name: 1}
    fitting = [2**power for power in range(20) if cells_of(**others, **{name: 2**power}) <= LARGEST]
    return {name: max(fitting, default=1)}


def cells_of(num_stages: int, num_microbatches: int, num_chunks: int) -> int:
    """Returns about how many cells the forwards take, with the idle ones of the ramp."""
    return num_stages * num_chunks * (num_microbatches + num_stages)


def checked_costs(**costs: Any) -> dict[str, float]:
    """Returns the costs by name; ValueError for one that is negative, infinite or no number."""
    return {name: number(name, value, who=WHO, least=0) for name, value in costs.items()}


def _smaller(stages: int, microbatches: int, chunks: int) -> list[dict[str, int]]:
    """Returns the largest sizes that fit: of one alone, as far as that is enough, else of all three."""
    found = []
    if (most := LARGEST // (stages * chunks) - stages) >= 1:
        found.append({"num_microbatches": most})
    if (most := LARGEST // (stages * (microbatches + stages))) >= 1:
        found.append({"num_chunks": most})
    return found or [{"num_stages": 64, "num_microbatches": 256, "num_chunks": min(chunks, 16)}]


def _words(choice: dict[str, int]) -> str:
    return " with ".join(f"{name}={value}" for name, value in choice.items())
