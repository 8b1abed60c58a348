"""Lists what each chip can do, with the source of each number. Plain Python.

`memory` is what a program may use, so it is what the TPU compiler itself reports as available where there is such a
compiler, and a little below the size on the box. Bandwidths and rates are the makers' peaks: no program reaches them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jaxfb.platforms.kinds import V5E, V5P, V6E

GIB = 2**30
_TPU = "https://docs.cloud.google.com/tpu/docs/"
_AVAILABLE = "available HBM as libtpu 0.0.42 reports it"


@dataclass(frozen=True)
class Chip:
    """A kind of chip, its numbers per JAX device (a chip of TPU7x is two devices).

    flops:     peak bfloat16 matmul rate, operations a second.
    memory:    bytes of HBM that a program may use.
    bandwidth: of the HBM, bytes a second.
    axis_bandwidth: bytes a second that a device sends along one mesh axis: a ring in both directions along one
               dimension of a TPU's torus; one direction of all NVLinks of a GPU.
    torus:     dimensions of the interconnect; 0 for GPUs.
    kind:      a TPU's `device_kind`, by which programs know what they are traced for.
    devices:   JAX devices of a chip.
    host_bandwidth: bytes a second between a device and its host's memory, each way: of a TPU what "How to scale your
               model" counts with (https://jax-ml.github.io/scaling-book/tpus), of a GPU its page's PCIe, halved.
    island:    devices that the fast interconnect joins; beyond it `outer_bandwidth` bytes a second a device.
    """

    name: str
    flops: float
    memory: float
    bandwidth: float
    axis_bandwidth: float
    source: str
    torus: int = 0
    kind: str = ""
    devices: int = 1
    island: int | None = None
    outer_bandwidth: float | None = None
    host_bandwidth: float = 15e9

    def group_bandwidth(self, group: Sequence[int]) -> float:
        """Returns bytes a second that each device of a group sends: positions in the mesh, islands one after the other.

        A ring over several islands leaves each by the network of all its members there, as NCCL's rings do.
        """
        if self.island is None or self.outer_bandwidth is None:
            return self.axis_bandwidth
        members = Counter(position // self.island for position in group)
        if len(members) == 1:
            return self.axis_bandwidth
        return min(self.axis_bandwidth, self.outer_bandwidth * min(members.values()))


def _tpu(name, tflops, memory, bandwidth, both_ways, torus, kind, devices=1) -> Chip:
    """Makes a TPU; both_ways: bidirectional interconnect bandwidth of a chip, GB/s, shared by the dimensions of the
    torus.
    """
    return Chip(
        name=name,
        flops=tflops * 1e12 / devices,
        memory=memory * GIB,
        bandwidth=bandwidth * 1e9 / devices,
        axis_bandwidth=both_ways * 1e9 / (2 * torus) / devices,
        source=f"{_TPU}{name}; {_AVAILABLE}",
        torus=torus,
        kind=kind,
        devices=devices,
    )


def _gpu(name, tflops, memory, bandwidth, nvlink, pcie, page) -> Chip:
    """Makes a GPU; nvlink, pcie: of all links and both directions, GB/s; 8 GPUs an island, 400 Gb/s a GPU between
    islands.
    """
    return Chip(
        name=name,
        flops=tflops * 1e12,
        memory=memory * 1e9,
        bandwidth=bandwidth * 1e9,
        axis_bandwidth=nvlink * 1e9 / 2,
        source=f"https://www.nvidia.com/en-us/data-center/{page}/",
        island=8,
        outer_bandwidth=50e9,
        host_bandwidth=pcie * 1e9 / 2,
    )


TPUS = {
    chip.name: chip
    for chip in (
        _tpu("v4", 275, 30.75, 1200, 600, 3, "TPU v4"),
        _tpu("v5e", 197, 15.75, 819, 400, 2, V5E),
        _tpu("v5p", 459, 95.74, 2765, 1200, 3, V5P[0]),
        _tpu("v6e", 918, 31.25, 1638, 800, 2, V6E),
        _tpu("tpu7x", 2307, 94.75, 7380, 1200, 3, "TPU7x", devices=2),
    )
}
GPUS = {
    chip.name: chip
    for chip in (
        _gpu("a100", 312, 80, 2039, 600, 64, "a100"),
        _gpu("h100", 989.4, 80, 3350, 900, 128, "h100"),
        _gpu("h200", 989.4, 141, 4800, 900, 128, "h200"),
        _gpu("b200", 2250, 180, 7700, 1800, 128, "dgx-b200"),
    )
}
