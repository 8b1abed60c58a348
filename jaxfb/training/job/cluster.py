"""Finds the processes that make up the job, and this one's number: from the config, the environment, the launcher.

Nothing is joined here, and nothing is asked of a machine that runs one process.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass

from jaxfb.config.operation import HostsConfig
from jaxfb.platforms.compat import cluster_names, find_cluster
from jaxfb.refusal import Refused

GIVEN = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
# Launchers that number their processes without giving the address of process 0.
NUMBERED = {
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    "PMI": ("PMI_SIZE", "PMI_RANK"),
}
PORT, LAST_PORT = 8476, 65535
TASKS_PER_NODE = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Place:
    """The place of this process in its job. coordinator: HOST:PORT of process 0. local_devices: None is all it sees."""

    coordinator: str
    processes: int
    process_id: int
    local_devices: tuple[int, ...] | None = None


def find_place(config: HostsConfig, environment: Mapping[str, str] = os.environ) -> Place | None:
    """Returns where this process is in its job, or None where it is alone.

    The config goes before the environment (`GIVEN`), that before what jax detects of Slurm, Open MPI, Kubernetes
    and TPU pods; what one leaves open the next may fill.

    Raises:
      ValueError: too little is known, or what is known is no place in a job.
    """
    given = _given(config, environment)
    if given["processes"] == 1:
        return None
    local_devices = config.local_devices
    if None in given.values() and config.cluster != "none":
        given, local_devices = _detected_or_refused(given, config, environment)
    given = _numbered(given, environment)
    if given["processes"] == 1 or not _is_configured(given):
        return None
    return Place(*_checked(given), local_devices)


def _given(config: HostsConfig, environment: Mapping[str, str]) -> dict[str, str | int | None]:
    """Returns what the config gives, then the environment."""
    given = {}
    for name, variable in GIVEN.items():
        value = getattr(config, name)
        if value is None and environment.get(variable):
            value = environment[variable] if name == "coordinator" else _number(variable, environment)
        given[name] = value
    return given


def _detected_or_refused(
    given: dict, config: HostsConfig, environment: Mapping[str, str]
) -> tuple[dict, tuple | None]:
    """Returns what `_detected` does; jax reads the variables of a launcher as they are."""
    try:
        return _detected(given, config, environment)
    except Refused:
        raise
    except (ValueError, LookupError) as error:
        raise Refused(
            f"[hosts] what the launcher has set in the environment cannot be read: {error}; correct or unset it, or "
            "use hosts.cluster=none, which does not look at it",
            [{"cluster": "none"}],
        ) from error


def _detected(given: dict, config: HostsConfig, environment: Mapping[str, str]) -> tuple[dict, tuple | None]:
    """Returns `given` with its gaps filled by the launcher; and the accelerators of one of several processes on a
    host.
    """
    cluster = _cluster(config.cluster, environment)
    processes = given["processes"] or (cluster.get_process_count() if cluster else None)
    if cluster is None or processes == 1:
        return {**given, "processes": processes}, config.local_devices
    port = environment.get("JAX_COORDINATOR_PORT")
    process_id = given["process_id"]
    filled = {
        "coordinator": given["coordinator"]
        or cluster.get_coordinator_address(timeout_secs=int(config.timeout), override_coordinator_port=port),
        "processes": processes,
        "process_id": cluster.get_process_id() if process_id is None else process_id,
    }
    alone_on_its_host = not any(_several(environment.get(name, "1")) for name in TASKS_PER_NODE)
    number = None if alone_on_its_host else cluster.get_local_process_id()
    return filled, config.local_devices or (None if number is None else (number,))


def _cluster(name: str, environment: Mapping[str, str]):
    if name != "auto" and name not in cluster_names():
        raise Refused(
            f"[hosts] cluster={name!r} is not known to jax; use auto, none or one of {', '.join(cluster_names())}",
            [{"cluster": one} for one in ("auto", "none")],
        )
    # a pod that is not a numbered member of a job, such as a notebook's, is alone; to ask would fail
    skipped = () if "JOB_COMPLETION_INDEX" in environment else ("k8s",)
    found = find_cluster(None if name == "auto" else name, skipped)
    if found is None and name != "auto":
        raise Refused(
            f"[hosts] cluster={name!r}, but this process was not started by it; use cluster=auto",
            [{"cluster": "auto"}],
        )
    return found


def _numbered(given: dict, environment: Mapping[str, str]) -> dict:
    """Returns `given` with the numbers of a launcher that has them; several copies must not train side by side."""
    for launcher, (size, rank) in NUMBERED.items():
        if given["processes"] is None and given["process_id"] is None and size in environment:
            processes, process_id = _number(size, environment), _number(rank, environment)
            if processes > 1 and given["coordinator"] is None:
                raise Refused(
                    f"[hosts] {launcher} numbers this process {process_id} of {processes}, but does not give "
                    "the address of process 0; set hosts.coordinator=HOST:PORT, or hosts.processes=1 to run alone"
                )
            return {**given, "processes": processes, "process_id": process_id}
    return given


def _is_configured(given: dict) -> bool:
    """Returns whether all three of coordinator, processes and process id are given; False if none is.

    Raises:
      ValueError: there is some of it.
    """
    missing = [name for name, value in given.items() if value is None]
    if missing and len(missing) < len(given):
        known = ", ".join(f"{name}={value}" for name, value in given.items() if value is not None)
        raise Refused(
            f"[hosts] {known} is given but not {' and '.join(missing)}; give all of "
            f"{', '.join(f'hosts.{name}' for name in given)} (or {', '.join(GIVEN.values())}), or none of them "
            "where Slurm, Open MPI, Kubernetes or a TPU pod provides them"
        )
    return not missing


def _checked(given: dict) -> tuple[str, int, int]:
    coordinator, processes, process_id = given.values()
    if not _is_address(coordinator):
        use = _nearest_address(coordinator)
        raise Refused(
            f"[hosts] coordinator={coordinator!r} must be HOST:PORT, a name or address (of IPv6 in brackets) and a "
            f"number up to {LAST_PORT}; try {use}",
            [{"coordinator": use}],
        )
    if processes < 1:
        raise Refused(
            f"[hosts] processes={processes} must be at least 1; use 1 to run alone", [{"processes": 1}]
        )
    if process_id >= processes:
        raise Refused(
            f"[hosts] process_id={process_id} must be below processes={processes}, since they count from 0; "
            f"use 0 to {processes - 1}",
            [{"process_id": processes - 1}],
        )
    return coordinator, processes, process_id


def _is_address(coordinator: str) -> bool:
    """Returns whether it is HOST:PORT as a socket takes it: no port 0, which is any, and no empty part of a name."""
    host, _, port = coordinator.rpartition(":")
    return _is_host(host) and port.isdecimal() and 0 < int(port) <= LAST_PORT


def _nearest_address(coordinator: str) -> str:
    """Returns an address that is one: the brackets or the port may be what is missing."""
    host, _, port = coordinator.rpartition(":")
    name = coordinator.partition(":")[0]
    tried = (f"[{host}]:{port}", f"[{coordinator.strip('[]')}]:{PORT}", f"{name}:{PORT}", f"localhost:{PORT}")
    return next(filter(_is_address, tried))


def _is_host(host: str) -> bool:
    """Returns whether it is a name, or an address; one of IPv6 has colons, so only brackets tell where it ends."""
    try:
        if any(mark in host for mark in ":[]"):
            return host == f"[{host[1:-1]}]" and bool(ipaddress.IPv6Address(host[1:-1]))
        host.encode("idna")
    except ValueError:
        return False
    return bool(host)


def _number(variable: str, environment: Mapping[str, str]) -> int:
    text = environment.get(variable, "")
    if not text.isdecimal():
        raise Refused(f"[hosts] ${variable}={text!r} must be a number; correct it or unset it")
    return int(text)


def _several(tasks_per_node: str) -> bool:
    """Returns whether a list of tasks by node has several on a node: "8(x2)" and "4,3" have, "1(x2)" has not."""
    return any(int(part.partition("(")[0] or 1) > 1 for part in tasks_per_node.split(","))
