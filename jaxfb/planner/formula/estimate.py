"""Memory and time of a step by formula: microseconds for a layout, no trace and no compiler.

It orders the layouts of a search, and answers where no compiler is asked. Constants are counts of what the steps of a
1B and an 8B model do; `docs/planner.md` shows how near the formula comes to the compiler.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from jaxfb.config import Config
from jaxfb.models.config import TransformerConfig
from jaxfb.planner.chips import Chip
from jaxfb.planner.counts import held_numbers, state_bytes, stored, stored_bytes, trained_numbers
from jaxfb.planner.formula.loops import loop_seconds
from jaxfb.planner.formula.memory import (
    HOLES,
    frozen_bytes,
    gradient_bytes,
    kept_bytes,
    relaid_bytes,
    streamed_bytes,
    whole_bytes,
    working_bytes,
)
from jaxfb.planner.formula.time import (
    exchange_seconds,
    exposed_exchange,
    exposed_scatters,
    exposed_seconds,
    kept_scatter_seconds,
    offload_seconds,
    scatter_seconds,
    step_flops,
    wire_seconds,
    work_seconds,
)
from jaxfb.planner.formula.update import copied_for_update, muon_bytes, muon_flops, muon_seconds
from jaxfb.planner.topology import Topology


@dataclass(frozen=True)
class Estimate:
    """Bytes, operations and seconds of one device, in one step.

    gradients: the sums that the loop over microbatches carries. activations: what forward keeps for backward at the
    peak. working: whole weights, one layer's backward, logits, and on a TPU the holes between all of these; or
    what an update takes, if that is more.
    wire_seconds: communication; exposed_seconds: what of it nothing hides.
    host: bytes of the optimizer's state in the host's memory, which are not part of any sum here. host_seconds: to read
    them twice; they are written while others are read.
    offload_seconds: for which layers' inputs are waited for on their way to the host and back (remat "offload").
    """

    parameters: float
    optimizer: float
    batch: float
    gradients: float
    activations: float
    working: float
    flops: float
    work_seconds: float
    wire_seconds: float
    exposed_seconds: float
    host: float = 0.0
    host_seconds: float = 0.0
    offload_seconds: float = 0.0

    @property
    def arguments(self) -> float:
        return self.parameters + self.optimizer + self.batch

    @property
    def temporaries(self) -> float:
        return self.gradients + self.activations + self.working

    @property
    def total(self) -> float:
        return self.arguments + self.temporaries

    @property
    def seconds(self) -> float:
        return self.work_seconds + self.exposed_seconds + self.host_seconds + self.offload_seconds

    def with_host(self, on_device: float, on_host: float, chip: Chip | None) -> Estimate:
        """Returns the estimate for so many bytes of optimizer state in either memory."""
        seconds = 2 * on_host / chip.host_bandwidth if chip else 0.0
        return replace(self, optimizer=on_device, host=on_host, host_seconds=seconds)


def estimate(config: Config, sizes: TransformerConfig, topology: Topology) -> Estimate:
    """Estimates the step of a config whose mesh has no size left open, with its optimizer's state.

    Frozen parameters have no moments and no gradients.

    Args:
      sizes: of the model of `config`.
      topology: without a chip nothing takes time.
    """
    held, trained = (sum(stored(of, config, sizes)) for of in (held_numbers, trained_numbers))
    state = state_bytes(config, sizes) * trained
    state /= config.mesh.data if config.optimizer.sharding != "none" else 1
    on_host = state if config.optimizer.memory == "host" else 0.0
    gradients, activations = gradient_bytes(config, sizes), kept_bytes(config, sizes, topology)
    working, holes = working_bytes(config, sizes, topology), HOLES.get(topology.platform, 1.0) - 1
    in_loop = working + holes * (working - whole_bytes(config, sizes)) + relaid_bytes(config, sizes, topology)
    of_update = muon_bytes(config, sizes) + copied_for_update(config, sizes, topology)
    in_update = (1 + holes) * of_update - activations
    wire = wire_seconds(config, sizes, topology.chip) if topology.chip else 0.0
    exchange = exchange_seconds(config, sizes, topology.chip) if topology.chip else 0.0
    scatters = scatter_seconds(config, sizes, topology.chip) if topology.chip else 0.0
    work = work_seconds(config, sizes, topology) if topology.chip else 0.0
    updating, sent = muon_seconds(config, sizes, topology.chip) if topology.chip else (0.0, 0.0)
    return Estimate(
        parameters=stored_bytes(config) * trained + frozen_bytes(config) * (held - trained),
        optimizer=state,
        batch=0,
        gradients=gradients,
        activations=activations,
        working=streamed_bytes(config, sizes) + max(in_loop, in_update),
        flops=step_flops(config, sizes, topology) + muon_flops(config, sizes),
        work_seconds=work + updating,
        wire_seconds=wire + exchange + scatters + sent,
        exposed_seconds=exposed_seconds(config, sizes, topology, wire, work)
        + loop_seconds(config, sizes, topology)
        + kept_scatter_seconds(config, sizes, topology)
        + exposed_exchange(config, sizes, topology)
        + exposed_scatters(config, sizes, topology)
        + sent,
        offload_seconds=offload_seconds(config, sizes, topology, work),
    ).with_host(state - on_host, on_host, topology.chip)
