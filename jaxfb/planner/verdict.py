"""A plan's answer: does the step fit, what does it do, how fast can it be. One value, for the page and for JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from jaxfb.config import Config, refuse_own_model
from jaxfb.config.post_training import PostTrainingConfig
from jaxfb.models.config import num_params
from jaxfb.parallel.host_memory import is_on_host
from jaxfb.planner import gpu, tpu
from jaxfb.planner.chips import Chip
from jaxfb.planner.compiled import Compiled, TooLarge, compile_for, compiles_here
from jaxfb.planner.counts import flops_counted
from jaxfb.planner.formula.estimate import Estimate, estimate
from jaxfb.planner.job import (
    Job,
    abstract_device,
    abstract_mesh,
    bytes_per_device,
    dense_bytes,
    make_job,
    model_sizes,
    uncut_share,
)
from jaxfb.planner.post_training import planned
from jaxfb.planner.program_cost.hlo_cost import HOST, Traffic
from jaxfb.planner.topology import Topology
from jaxfb.refusal import instance

MARGIN = 0.2  # of the formula, see the tables in docs/planner.md


@dataclass(frozen=True)
class Verdict:
    """The verdict on one config on one topology. Bytes, operations and seconds of one device, in one step.

    needed:  bytes, the compiler's where it answered, else the formula's.
    fits:    None where there is no chip to fit on.
    model_flops: by hand, without recomputation: what MFU counts.
    kept, phases: of post-training, by name: bytes that stay beside the update's state, and what other phases than the
      update need at their peaks where it needs its temporaries.
    widths:  tokens a second of one device by formula, by name, where rows take context devices by their width.
    uncut:   share of the parameters that no axis of `SHARD_AXES` cuts, though there is one.
    bubble:  share of the schedule's time in which a device idles; 0 without a pipeline.
    """

    topology: Topology
    mesh: dict[str, int]
    num_params: int
    rows: int
    rows_per_microbatch: int
    num_microbatches: int
    tokens: int
    schedule: str | None
    bubble: float
    model_flops: float
    estimate: Estimate
    compiled: Compiled | TooLarge | None
    kept: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)
    widths: dict[str, float] = field(default_factory=dict)
    uncut: float = 0.0

    @property
    def chip(self) -> Chip | None:
        return self.topology.chip

    @property
    def needed(self) -> float:
        found = self.compiled if isinstance(self.compiled, Compiled) else self.estimate
        others = found.arguments + max(self.phases.values(), default=0.0)
        return max(self.of_update, others) + sum(self.kept.values())

    @property
    def of_update(self) -> float:
        """Returns the bytes that the update needs, without what is kept beside its state."""
        if isinstance(self.compiled, TooLarge):
            return max(self.compiled.needed, self.compiled.available)
        return self.compiled.total if isinstance(self.compiled, Compiled) else self.estimate.total

    @property
    def available(self) -> float | None:
        if isinstance(self.compiled, TooLarge):
            return self.compiled.available
        return self.chip.memory if self.chip else None

    @property
    def fits(self) -> bool | None:
        if self.available is None:
            return None
        if isinstance(self.compiled, TooLarge):
            return False
        return self.needed <= self.available

    @property
    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """Maps (axes, kind) -> what the compiled program moves between devices, and ("host", "read" or "write") -> with
        the host's memory; empty without a compiler."""
        if not isinstance(self.compiled, Compiled):
            return {}
        names = Traffic.__dataclass_fields__
        return {
            (row["axes"], row["kind"]): Traffic(**{name: row[name] for name in names})
            for row in self.compiled.traffic
        }

    @property
    def work_seconds(self) -> float:
        found = self.compiled if isinstance(self.compiled, Compiled) else self.estimate
        return found.work_seconds

    @property
    def exposed_seconds(self) -> float:
        """Returns communication that nothing hides, the host's in a compiled program too; by the formula, of TPUs a
        share and otherwise all of it.
        """
        if not isinstance(self.compiled, Compiled):
            return self.estimate.exposed_seconds
        return sum(row.exposed_seconds for row in self.traffic.values())

    @property
    def step_seconds(self) -> float:
        """Returns work and what it does not hide of the communication; the bubble is work that counts for nothing."""
        return self.work_seconds + self.exposed_seconds + self.host_seconds

    @property
    def host_seconds(self) -> float:
        """Returns the time of what travels to the host and back, where no compiled program shows what hides it."""
        if any(axes == HOST for axes, _ in self.traffic):
            return 0.0
        return self.estimate.host_seconds + self.estimate.offload_seconds

    @property
    def mfu(self) -> float | None:
        return self.model_flops / (self.step_seconds * self.chip.flops) if self.chip else None

    @property
    def tokens_per_second(self) -> float | None:
        """Returns tokens per second of one device."""
        devices = self.topology.num_devices
        return self.tokens / self.step_seconds / devices if self.chip and self.step_seconds else None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for JSON."""
        skip = {"topology", "estimate", "compiled"}
        plain = {name: value for name, value in vars(self).items() if name not in skip}
        derived = ("needed", "available", "fits", "work_seconds", "exposed_seconds", "step_seconds")
        return {
            "topology": self.topology.text,
            "devices": self.topology.num_devices,
            **plain,
            **{name: getattr(self, name) for name in (*derived, "mfu", "tokens_per_second")},
            "traffic": self.compiled.traffic if isinstance(self.compiled, Compiled) else [],
            "estimate": asdict(self.estimate),
            "compiled": asdict(self.compiled) if isinstance(self.compiled, Compiled) else None,
            "refused": asdict(self.compiled) if isinstance(self.compiled, TooLarge) else None,
        }


def plan(
    config: Config | PostTrainingConfig,
    topology: Topology,
    *,
    compiles: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Sizes the training step of `config` by formula on `topology` and, where it can, asks the compiler.

    Args:
      compiles: False leaves the compiler out.
      say: is called with progress messages.
    Raises:
      ValueError: config, mesh and topology do not fit together, the config is of another model than the built-in
        transformer, or the TPU compiler is not installed.
    """
    refuse_own_model(config, "plan", "use a config with sizes, such as 8b")
    instance(
        "config",
        config,
        Config | PostTrainingConfig,
        "a config, such as load_config(path) returns",
        who="[plan]",
    )
    instance("topology", topology, Topology, "such as parse_topology(name) returns", who="[plan]")
    update = config if isinstance(config, Config) else planned(config, topology).update
    gpu.check_hosts(update, topology)
    verdict = estimated(config, topology)
    asked = compiles and compiles_here(update, topology, say)
    return compiled_verdict(update, verdict, say) if asked else verdict


def estimated(config: Config | PostTrainingConfig, topology: Topology) -> Verdict:
    """Returns the verdict before a compiler is asked.

    Raises:
      ValueError: the mesh does not fit the topology, or the command of the config would refuse it.
    """
    if isinstance(config, Config):
        return _of_update(config, topology)
    found = planned(config, topology)
    kept, phases, verdict = {}, dict(found.phases), _of_update(found.update, topology)
    if found.keeps_reference:
        kept["reference"] = _reference_bytes(found.update, topology)
    if found.critic:
        critic = _of_update(found.critic, topology).estimate
        kept["critic"] = critic.parameters + critic.optimizer
        phases["critic's update"] = critic.temporaries
    widths = {name: _of_update(one, topology) for name, one in found.widths.items()}
    phases |= {name: one.estimate.temporaries for name, one in widths.items()}
    speeds = {name: one.tokens_per_second for name, one in widths.items() if one.tokens_per_second}
    return replace(verdict, kept=kept, phases=phases, widths=speeds)


def _reference_bytes(config: Config, topology: Topology) -> float:
    """Returns the bytes of a copy of the trained parameters."""
    job = make_job(config, abstract_mesh(config, topology.num_devices, abstract_device(topology)))
    return bytes_per_device(job.step.forward_backward.trained(job.state.params), _bytes_of(topology))


def _of_update(config: Config, topology: Topology) -> Verdict:
    shapes = config
    if topology.platform == "gpu" and gpu.takes_flash(config, topology):
        shapes = gpu.with_attention(config, "xla")  # cuDNN's is there only with the plugin
    job = make_job(shapes, abstract_mesh(config, topology.num_devices, abstract_device(topology)))
    schedule = job.schedule
    return Verdict(
        topology=topology,
        mesh=dict(job.mesh.shape),
        num_params=num_params(job.sizes),
        rows=job.plan.rows,
        rows_per_microbatch=job.plan.rows_per_microbatch,
        num_microbatches=job.plan.num_microbatches,
        tokens=job.tokens,
        schedule=schedule.name if schedule else None,
        bubble=schedule.simulate().bubble_fraction if schedule else 0.0,
        model_flops=flops_counted(job.config, job.sizes).total * job.tokens / topology.num_devices,
        estimate=_estimate(config, job, topology),
        compiled=None,
        uncut=uncut_share(job.state.params, job.mesh),
    )


def _estimate(config: Config, job: Job, topology: Topology) -> Estimate:
    """Returns the formula's answer, with what is known exactly: bytes of the state and of the batch."""
    mesh = replace(config.mesh, **job.mesh.shape)
    batch = replace(config.batch, rows_per_microbatch=job.plan.rows_per_microbatch)
    counted = estimate(replace(config, mesh=mesh, batch=batch), model_sizes(config), topology)
    bytes_of = _bytes_of(topology)
    return replace(
        counted,
        parameters=bytes_per_device(job.state.params, bytes_of),
        batch=bytes_per_device(job.batch, bytes_of),
    ).with_host(*_bytes_of_moments(job.state.opt_state, bytes_of), topology.chip)


def _bytes_of_moments(opt_state: Any, bytes_of: Callable[..., int]) -> tuple[int, int]:
    """Returns a device's bytes of the optimizer's state in its own memory and in the host's."""
    leaves = jax.tree.leaves(opt_state)
    near = [leaf for leaf in leaves if not is_on_host(leaf.sharding)]
    far = [leaf for leaf in leaves if is_on_host(leaf.sharding)]
    return bytes_per_device(near, bytes_of), bytes_per_device(far)


def _bytes_of(topology: Topology) -> Callable[..., int]:
    return tpu.tiled_bytes if topology.platform == "tpu" else dense_bytes


def compiled_verdict(config: Config, verdict: Verdict, say: Callable[[str], None]) -> Verdict:
    """Returns the same, with the compiler's answer."""
    return replace(verdict, compiled=compile_for(config, verdict.topology, say))
