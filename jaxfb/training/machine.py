"""Refuses a size beyond this machine's memory in a sentence, before anything is allocated.

Each bound is what a run needs at the very least. What passes may still not fit: `jaxfb plan` counts exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan
from jaxfb.models.config import TransformerConfig, num_params
from jaxfb.models.generate import cache_of
from jaxfb.platforms.machine_memory import host_memory
from jaxfb.refusal import Refused

FEW_SLOTS = 8  # of which the keys and values are counted, to know those of one
SLOT_BYTES = 16  # of a row on the host: tokens, targets, segments and the mask of the loss, 4 bytes each


def bytes_of_device(devices: Sequence[Any]) -> int | None:
    """Returns the bytes of one of this process's devices; None where that is unknown. CPU devices share the host's."""
    if devices[0].platform == "cpu":
        host = host_memory()
        return host and host // len(devices)
    return (devices[0].memory_stats() or {}).get("bytes_limit")


def check_table(section: str, rows: int, length: int) -> None:
    """Refuses rows that every process keeps whole where they are larger than its memory.

    Raises:
      ValueError: names the sizes, and the greatest length or number of rows.
    """
    memory, needed = host_memory(), rows * length * SLOT_BYTES
    if memory is not None and needed > memory:
        most = memory // (rows * SLOT_BYTES)
        use = f"rows of {most} tokens" if most > 1 else f"{memory // (length * SLOT_BYTES)} rows"
        raise Refused(
            f"[{section}] {rows} rows of {length} tokens take {_gb(needed)}, but this machine has {_gb(memory)}; "
            f"use at most {use}"
        )


def check_rows(section: str, plan: BatchPlan, length: int, key: str = "data.sequence_length") -> None:
    """Refuses the rows of one batch where the part that this process reads is larger than its memory.

    key: of the config, that gives the length.

    Raises:
      ValueError: names the sizes and the largest number of rows.
    """
    memory, processes = host_memory(), jax.process_count()
    # A plan cut by tokens has no number of microbatches before the lengths of its rows are known.
    rows, cut = (plan.rows, 1) if plan.by_tokens else (plan.padded_rows, plan.rows_per_global_microbatch)
    needed = rows * length * SLOT_BYTES // processes
    if memory is not None and needed > memory:
        each = length * SLOT_BYTES
        most = memory * processes // each // cut * cut
        shorter = memory * processes // (rows * SLOT_BYTES)
        advice = f"use {most} rows or fewer" if most else f"use {key}={shorter} or less"
        raise Refused(
            f"[{section}] rows={rows} of sequence_length={length} take {_gb(needed)}, but this machine has "
            f"{_gb(memory)}; {advice}"
        )


def check_model(sizes: TransformerConfig, mesh: Mesh, itemsize: int) -> None:
    """Refuses a model whose parameters alone, cut over all devices, are larger than their memory.

    Raises:
      ValueError: names the parameters and the memory.
    """
    memory, count = bytes_of_device(mesh.local_devices), num_params(sizes)
    if memory is not None and count * itemsize > memory * mesh.size:
        # devices of a CPU share its memory, so more of them have no more
        more = "" if mesh.local_devices[0].platform == "cpu" else " or more devices"
        raise Refused(
            f"[model] {count:,} parameters (num_layers={sizes.num_layers}, hidden_size={sizes.hidden_size}, "
            f"vocab_size={sizes.vocab_size}, num_experts={sizes.num_experts}) take {_gb(count * itemsize)}, but "
            f"the memory of all {mesh.size} devices is {_gb(memory * mesh.size)}; use a smaller model{more}"
        )


def check_sampler(sizes: TransformerConfig, mesh: Mesh, rows: int, slots: int, dtype: Any) -> None:
    """Refuses the responses of one rollout whose keys and values are larger than the memory of all devices.

    slots: of a row, for its prompt and response. dtype: that is sampled with.

    Raises:
      ValueError: names the sizes, and the greatest number of rows or their greatest length.
    """
    memory = bytes_of_device(mesh.local_devices)
    short = jax.tree.leaves(cache_of(sizes, 1, FEW_SLOTS, dtype))
    each = sum(leaf.size * leaf.dtype.itemsize for leaf in short) // FEW_SLOTS
    if memory is not None and rows * slots * each > memory * mesh.size:
        most = memory * mesh.size // (each * slots)
        use = f"{most} rows" if most else f"rows of {memory * mesh.size // (each * rows)} tokens"
        raise Refused(
            f"[rollout] {rows} responses of up to {slots} tokens, prompts included, need "
            f"{_gb(rows * slots * each)} for keys and values, but the memory of all {mesh.size} devices is "
            f"{_gb(memory * mesh.size)}; use at most {use}"
        )


def check_continuation(sizes: TransformerConfig, tokens: int) -> None:
    """Refuses a continuation whose keys and values are larger than the host's memory.

    Raises:
      ValueError: names the largest number of tokens.
    """
    memory = host_memory()
    each = 2 * 2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_size
    if memory is not None and tokens * each > memory:
        raise Refused(
            f"[eval] tokens={tokens} need {_gb(tokens * each)} for keys and values, but this machine has "
            f"{_gb(memory)}; use at most {memory // each}",
            [{"tokens": memory // each}],
        )


def _gb(size: float) -> str:
    return f"{size / 1e9:,.1f} GB"
