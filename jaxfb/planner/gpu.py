"""Uses XLA's compiler for GPUs on a machine without one: finds it, describes chips to it, gets devices from it.

It comes with JAX's CUDA plugin. Instead of a device it takes a description (stream_executor.GpuTargetConfigProto), here
made of `chips.py` and of what an architecture has; kernels that are chosen by trying them on the device are not tried.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from jaxfb.config import Config
from jaxfb.mesh import mesh_sizes
from jaxfb.planner.chips import Chip
from jaxfb.planner.topology import Topology
from jaxfb.platforms.device_order import across_slices
from jaxfb.refusal import Refused

PLUGINS = ("xla_cuda13", "xla_cuda12")
INSTALL = "pip install 'jaxfb[cuda]' adds it (no GPU is needed; Linux)"
CUDA, CUDNN = "13.0.0", (9, 10, 0)
NO_STATE_ON_HOST = (
    "optimizer.memory=host is not compiled without a GPU, since JAX's description of one has no memories"
)
"""With jax 0.10.2 every sharding over such devices loses its memory kind ("DefaultMemory is not supported"), so that
arguments cannot be in the host's memory. What a program itself moves there (remat="offload") is compiled."""


@dataclass(frozen=True)
class Architecture:
    """The facts that the compiler needs beyond a chip's peaks.

    capability: major of the compute capability. cores: streaming multiprocessors. float32_units: of each.
    shared_memory: KiB of each core; a block may take one less. l2: MiB. clock: GHz, boosted.
    """

    name: str
    capability: int
    cores: int
    float32_units: int
    shared_memory: int
    l2: float
    clock: float


# NVIDIA's whitepapers of each architecture; limits of a compute capability: CUDA programming guide, appendix
_ARCHITECTURES = {
    "a100": Architecture("NVIDIA A100-SXM4-80GB", 8, 108, 64, 164, 40, 1.41),
    "h100": Architecture("NVIDIA H100 80GB HBM3", 9, 132, 128, 228, 50, 1.98),
    "h200": Architecture("NVIDIA H200", 9, 132, 128, 228, 50, 1.98),
    "b200": Architecture("NVIDIA B200", 10, 148, 128, 228, 126, 1.965),
}


def is_installed() -> bool:
    """Returns whether JAX's CUDA plugin is installed; nothing is loaded."""
    try:
        return any(find_spec(f"jax_plugins.{name}") for name in PLUGINS)
    except ModuleNotFoundError:
        return False


def target_config(chip: Chip) -> str:
    """Returns the description of the chip that XLA takes, in protobuf's text format."""
    made = _ARCHITECTURES[chip.name]
    dnn = "major: {} minor: {} patch: {}".format(*CUDNN)
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: {48 * 1024}
  shared_memory_per_core: {made.shared_memory * 1024}
  shared_memory_per_block_optin: {(made.shared_memory - 1) * 1024}
  core_count: {made.cores}
  fpus_per_core: {made.float32_units}
  block_dim_limit_x: {2**31 - 1}
  block_dim_limit_y: {2**16 - 1}
  block_dim_limit_z: {2**16 - 1}
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  memory_bandwidth: {chip.bandwidth:.0f}
  l2_cache_size: {made.l2 * 2**20:.0f}
  clock_rate_ghz: {made.clock}
  device_memory_size: {chip.memory:.0f}
  cuda_compute_capability {{ major: {made.capability} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{made.name}"
  driver_version: "{CUDA}"
  runtime_version: "{CUDA}"
  compile_time_toolkit_version: "{CUDA}"
  dnn_version: "{".".join(map(str, CUDNN))}"
}}
platform_name: "CUDA"
dnn_version_info {{ {dnn} }}
device_description_str: "{made.name}"
"""


def devices(chip: Chip, count: int = 1) -> list:
    """Returns so many devices to compile for, island after island.

    Raises:
      ValueError: the plugin is missing, or JAX does not take the one that is installed.
    """
    from jax.experimental import topologies

    if not is_installed():
        raise Refused(f"[plan] XLA's compiler for GPUs is not installed; {INSTALL}")
    each = min(count, chip.island or count)
    try:
        described = topologies.get_topology_desc(
            platform="cuda", target_config=target_config(chip), topology=f"1x{count // each}x{each}"
        )
    except Exception as error:
        raise Refused(_not_taken(error)) from error
    return described.devices


def check_hosts(config: Config, topology: Topology) -> None:
    """Refuses a mesh whose tensor axis would go over the network between hosts, as `make_mesh` would there.

    Raises:
      ValueError: what to make larger or smaller.
    """
    if topology.platform != "gpu":
        return
    island = topology.chip.island if topology.chip else None
    hosts = topology.num_devices // min(topology.num_devices, island or topology.num_devices)
    if hosts > 1:
        across_slices(mesh_sizes(vars(config.mesh), topology.num_devices, "gpu"), hosts)


def takes_flash(config: Config, topology: Topology) -> bool:
    """Returns whether attention is cuDNN's there, by the trainer's own check, which at run time asks the device at
    hand.

    Raises:
      ValueError: "cudnn" was asked for where it cannot run.
    """
    from jaxfb.planner.attends import attends_over
    from jaxfb.planner.job import abstract_device, abstract_mesh, model_sizes
    from jaxfb.training.from_config.sizes import check_attention

    chosen = getattr(config.model, "attention", None)
    if chosen not in ("auto", "cudnn"):
        return False
    asked = with_attention(config, "cudnn")
    if attends_over(asked, model_sizes(asked), topology) == "ring":
        return False
    mesh: Any = abstract_mesh(config, topology.num_devices, abstract_device(topology))
    try:
        check_attention(asked, model_sizes(asked), mesh)
    except ValueError:
        if chosen == "cudnn":
            raise
        return False
    return True


def with_attention(config: Config, attention: str) -> Config:
    """Returns the config with that attention in place of "auto", which would ask the device at hand."""
    return replace(config, model=replace(config.model, attention=attention))


def _not_taken(error: Exception) -> str:
    import jax

    packages = [f"jax-{plugin.removeprefix('xla_')}-pjrt" for plugin in PLUGINS]
    found = ", ".join(f"{name} {one}" for name in packages if (one := version_of(name)))
    cuda = "12" if found.startswith("jax-cuda12") else "13"
    reason = (str(error).splitlines() or [""])[0]
    return (
        f"[plan] jax {jax.__version__} (jaxlib {version_of('jaxlib')}) does not compile for GPUs with {found}: "
        f"{reason}; pip install 'jax[cuda{cuda}]=={jax.__version__}' gives the plugin of the same version"
    )


def version_of(package: str) -> str | None:
    """Returns the version of a package; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
