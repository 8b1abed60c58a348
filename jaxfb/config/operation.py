"""The sections of how a run is operated: its checkpoints, its records and its hosts. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from jaxfb.config.checks import at_least_zero, directory_is_named, positive
from jaxfb.parts import WRITERS


@dataclass(frozen=True)
class LocalConfig:
    """Checkpoints on the disk of each host, between those of the run directory; see docs/reliability.md.

    every: saves after each so many updates.
    keep:  how many of the newest checkpoints are kept.
    dir:   a directory of each host, such as /scratch/jaxfb, or /dev/shm/jaxfb for memory; $VARIABLES are filled in.
    """

    every: int
    dir: str
    keep: int = 2

    def __post_init__(self):
        positive("checkpoint.local", every=self.every, keep=self.keep)
        directory_is_named("checkpoint.local", self.dir)


@dataclass(frozen=True)
class CheckpointConfig:
    """A checkpoint every `every` updates and at the end (null: at the end only); see `jaxfb.checkpoint`.

    every: saves after each so many updates; null: at the end only.
    keep_best: a number of the evaluation; the checkpoint where it is best is kept as well; null: none.
    best_is: which value of that number is best, the "lowest" or the "highest"; null: the highest if its name ends in
      accuracy, else the lowest.
    asynchronous: training continues while a checkpoint is written.
    local: others, on the hosts' own disks, that a killed process continues from; null: none.
    keep: how many of the newest are kept, at least 2, since the newest is known to be good only when an update after it
      was applied. While updates fail, and where the state is not finite, none is written and none is removed.
    """

    every: int | None = None
    keep: int = 3
    keep_best: str | None = "eval/loss"
    best_is: Literal["lowest", "highest"] | None = None
    asynchronous: bool = True
    local: LocalConfig | None = None

    def __post_init__(self):
        positive("checkpoint", every=self.every, keep=self.keep)


@dataclass(frozen=True)
class LogConfig:
    """A record every `every` updates.

    every: writes a record after each so many updates.
    split_update: records have `forward_backward_seconds` and `optimizer_seconds`. An update is then two programs,
      and the host waits for the devices after each: the same numbers, in somewhat more time.
    count_zeros: records have `num_zeros`, the elements of the gradient that are 0, at the price of a pass over it.
    writers: where records go in addition to metrics.jsonl, which is always written; docs/extending.md shows one of
      your own.
    """

    every: int = 1
    count_zeros: bool = False
    split_update: bool = False
    writers: tuple[Annotated[str, WRITERS], ...] = ()

    def __post_init__(self):
        positive("log", every=self.every)


@dataclass(frozen=True)
class HostsConfig:
    """Lists the processes of the job, and how long they wait; it never changes results and is not saved with the run.

    coordinator: HOST:PORT of process 0, [ADDRESS]:PORT for IPv6; null: $JAX_COORDINATOR_ADDRESS, else what the
      launcher sets.
    processes: number of processes of the job; null: $JAX_NUM_PROCESSES, else what the launcher sets.
    process_id: number of this process, from 0; null: $JAX_PROCESS_ID, else what the launcher sets.
    cluster:       "auto" detects Slurm, Open MPI, Kubernetes and TPU pods; "none" detects nothing; or the name of a
      cluster environment of jax.
    local_devices: ids of this process's accelerators; null: all, or one each where a host runs several.
    timeout:       seconds to wait for other processes: until they join, agree, or have read the text.
    lost_after:    seconds without a sign of life after which a process counts as lost and the others end.
    stuck_after:   seconds in one and the same step (a compilation, an update, one batch of an evaluation, one reward, a
      save, a callback) after which the job ends with exit code 76, even a job of one process. null: never.
    """

    coordinator: str | None = None
    processes: int | None = None
    process_id: int | None = None
    cluster: str = "auto"
    local_devices: tuple[int, ...] | None = None
    timeout: float = 600.0
    lost_after: float = 60.0
    stuck_after: float | None = 1800.0

    def __post_init__(self):
        positive("hosts", processes=self.processes, timeout=self.timeout)
        positive("hosts", lost_after=self.lost_after, stuck_after=self.stuck_after)
        at_least_zero("hosts", process_id=self.process_id)
