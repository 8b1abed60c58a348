"""Chooses XLA's options for the kind of device that a program is compiled for.

Programs of jaxfb leave work between the start of a collective and the use of its result; whether the compiler runs the
two at the same time is up to its options. The table has what was found by compiling ahead of time for each kind.
"""

from __future__ import annotations

import difflib
import re
import warnings
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import Mesh

from jaxfb.platforms import cpu
from jaxfb.platforms.compat import is_tracing
from jaxfb.platforms.kinds import V5P, V6E
from jaxfb.refusal import Refused, shown

Value = bool | int | float | str
Options = tuple[tuple[str, Value], ...]
"""Options in a form that can be hashed: (name, value), sorted."""

# Collectives run on the SparseCores, as calls of their own, while the TensorCore multiplies. Without them every gather
# and scatter of FSDP is synchronous on these chips (libtpu 0.0.48).
_ON_SPARSECORE: dict[str, Value] = {
    f"xla_tpu_enable_{name}": True
    for kind in ("all_gather", "reduce_scatter", "all_reduce")
    for name in (f"sparse_core_collective_offload_{kind}", f"{kind}_offload_tracing")
} | {
    "xla_tpu_enable_sparse_core_collective_offload_2d_all_gather": True,
    "xla_tpu_use_tc_device_shape_on_sc": True,
    "xla_sc_disable_megacore_partitioning": True,
    # the scheduler otherwise lets a collective wait for the one before it to be done: a step of 8B on v5p:4x4x4 took
    # 11.3 s, and takes 10.3 s with more of them in the queue
    "xla_tpu_enable_sparse_core_offload_queuing_in_lhs": True,
    # it takes a gather for shorter than it is and starts the second half of one too late: 9.9 s in place of 10.3 s with
    # 4; with 12, 8.28 s in place of 8.58 s for 70B on v5p:8x8x8, fsdp 512, remat=selective, and 28.6 GB in place of
    # 29.5 GB for Mixtral 8x22B on v5p:4x4x8; other steps change by 0.2% at most
    "xla_tpu_sparse_core_all_gather_latency_multiplier": 12,
    # an exchange of an embedding's or a head's slices otherwise waits for all collectives that are under way: 4.92 s in
    # place of 4.94 s for 8B on v6e:8x8
    "xla_tpu_enable_async_all_to_all": True,
    # some scatters are otherwise all-reduces of the whole array: 10.0 s in place of 10.1 s for 8B on v5p:4x4x4 with
    # data 8 and fsdp 8, 4.97 s in place of 6.48 s on v6e:8x8 with data 2 and fsdp 32
    "xla_tpu_check_legacy_constraints_in_reduce_scatter_legalizer": False,
}

# Gathers of tokens over tensor become loops of products that run beside them: 12.5 s in place of 13.3 s for 70B on
# v5p:8x8x8, fsdp 64 x tensor 8. FSDP's scatters are otherwise taken for shorter than they are and may end too late:
# 12.9 s in place of 13.5 s while attention gathered its gradient twice, 12.5 s either way since; 405B on v5p:8x8x16,
# fsdp 128 x tensor 8, takes 11.8 GB in place of 12.1 GB, for 67.7 s either way. Without a tensor axis the second option
# takes 0.1 GB of 8B on v5p:4x4x4 for nothing.
_WITH_TENSOR: dict[str, Value] = {
    "xla_tpu_decompose_all_gather_einsum": True,
    "xla_tpu_sparse_core_reduce_scatter_latency_multiplier": 6,
}

# A TPU's compiler computes products again to come below a limit that is less than the chip's memory, though the program
# may fit without: 8B on v5e:4x4, pipe 8 x fsdp 2, takes 87.4 s in place of 101.2 s, for 15.4 GB in place of 15.0 GB of
# 16.9 GB. And it counts arguments in the host's memory as if they were the chip's: 8B on v5e:2x4, state on the host,
# takes 214 s in place of 277 s (13.2 GB in place of 13.1 GB), 70B on v6e:4x8 132 s in place of 143 s. A number has four
# bytes of parameters on the chip and eight of AdamW's moments on the host, so that three times the chip's memory is
# enough for both. Where a program does not fit with it, it is compiled without (`programs.py`).
_COMPUTE_ONCE: dict[str, Value] = {"xla_jf_rematerialization_percent_shared_memory_limit": 300}

# Left to itself, XLA does not use this scheduler in programs with an exchange of experts: 32.8 s in place of 33.2 s for
# Mixtral 8x22B on 128 H100 (jax 0.10.2). In others it is on anyway.
_ON_GPUS: dict[str, Value] = {"xla_gpu_enable_latency_hiding_scheduler": True}

TABLE: dict[str, Mapping[str, Value]] = dict.fromkeys((*V5P, V6E), _ON_SPARSECORE)
"""By `device_kind`. Kinds that are not listed are best served by the compiler's defaults for collectives, as far as is
known.
"""

TENSOR_TABLE: dict[str, Mapping[str, Value]] = dict.fromkeys(TABLE, _WITH_TENSOR)
"""What is added where the mesh has a tensor axis."""

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")


def checked_options(given: Any) -> Options | None:
    """Returns `compiler_options` in a form that can be hashed; None stays None.

    Raises:
      ValueError: they are not a mapping from names to values, or to None.
    """
    if given is None:
        return None
    items = tuple(given.items()) if isinstance(given, Mapping) else given
    if not isinstance(items, tuple) or not all(map(_is_option, items)):
        raise Refused(
            "compiler_options must map names of XLA's options to True, False, a number, a string or None, "
            f"got {shown(given)}; None in its place takes those of the table by kind of device",
            [{"compiler_options": None}],
        )
    return tuple(sorted(items))


def table_for(kind: str, tensor: int = 1) -> Mapping[str, Value]:
    """Returns the table's options for a `device_kind` and a size of the tensor axis."""
    return {
        **TABLE.get(kind, _ON_GPUS if kind.startswith("NVIDIA") else {}),
        **(TENSOR_TABLE.get(kind, {}) if tensor > 1 else {}),
        **(_COMPUTE_ONCE if kind.startswith("TPU") else {}),
    }


def options_for(mesh: Mesh, asked: Options | None = None) -> Options:
    """Returns the options to compile a program over this mesh with: the table's, changed by those that are asked for.

    asked: (name, value); a value of None drops the table's option of that name.
    An option of the table that this compiler does not have is left out with a warning.

    Raises:
      ValueError: the compiler does not take one of the options that are asked for.
    """
    device = mesh.abstract_mesh.abstract_device
    table: Mapping[str, Value] = {}
    if device is not None:
        table = table_for(device.device_kind, mesh.shape.get("tensor", 1))
    if cpu.wants_options(mesh):
        table = cpu.IN_ORDER
    changed = {**table, **dict(asked or ())}
    wanted = tuple((name, value) for name, value in sorted(changed.items()) if value is not None)
    if not wanted or wanted == tuple(cpu.IN_ORDER.items()) or not isinstance(mesh, Mesh) or is_tracing():
        return wanted
    return _known(mesh.devices.flat[0], wanted, frozenset(name for name, _ in asked or ()))


def without_memory(options: Options) -> Options:
    """Returns the options without those of the table for which a program takes more memory."""
    return tuple(one for one in options if one not in _COMPUTE_ONCE.items())


def names_taking_memory(options: Options) -> list[str]:
    """Returns the names of the options that `without_memory` leaves out."""
    return [name for name, _ in sorted(set(options) - set(without_memory(options)))]


def _is_option(item: Any) -> bool:
    named = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
    return named and isinstance(item[1], Value | None)


@lru_cache(maxsize=64)
def _known(device: Any, options: Options, asked: frozenset[str]) -> Options:
    """Returns the options that the compiler for that device has, found by compiling next to nothing with them."""
    while (error := _refusal(device, options)) is not None:
        found = _UNKNOWN.search(error)
        name = found[1] if found else next((name for name, _ in options if name in error), None)
        if name is None or name in asked:
            raise Refused(_sentence(device, name, error), [{"compiler_options": None}])
        warnings.warn(
            f"the compiler for {device.device_kind} does not take {name}, which saves time where it is known; it is "
            "left out",
            stacklevel=2,
        )
        options = tuple(one for one in options if one[0] != name)
    return options


def _refusal(device: Any, options: Options) -> str | None:
    one = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        jax.jit(lambda x: x, compiler_options=dict(options)).lower(one).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _sentence(device: Any, name: str | None, error: str) -> str:
    tables = (*TABLE.values(), *TENSOR_TABLE.values(), _COMPUTE_ONCE)
    known = sorted({one for table in tables for one in table})
    near = difflib.get_close_matches(name or "", known, n=1, cutoff=0.0)
    hint = f"; the nearest that it may have is {near[0]}" if near else ""
    return f"compiler_options: the compiler for {device.device_kind} answers {error!r}{hint}, or leave the option out"
