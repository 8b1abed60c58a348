"""One job as several processes of this machine, each with simulated devices of its own, joined over loopback."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from quickly import flags

ROOT = Path(__file__).parent.parent
PATIENCE = 280


def start(directory, processes, devices, *arguments, verb="train", own=None, environments=None):
    """`jaxfb train directory/tiny.yaml` as so many processes; a list of Popen, their output in directory/log<i>.

    own: index -> arguments that only that process gets. environments: of each, added to this process's.
    """
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", processes]
    if processes == 1:
        return [launch(directory, 0, devices, verb, *arguments)]
    return [
        launch(
            directory,
            k,
            devices,
            verb,
            *arguments,
            *(own or {}).get(k, ()),
            *place,
            "--process-id",
            k,
            **more,
        )
        for k, more in enumerate(environments or [{}] * processes)
    ]


def launch(directory, index, devices, verb, *arguments, **more):
    """One of them; more: of its environment."""
    command = [
        sys.executable,
        "-m",
        "jaxfb.cli",
        *verb.split(),
        str(directory / "tiny.yaml"),
        *map(str, arguments),
    ]
    environment = {
        **os.environ,
        **more,
        "XLA_FLAGS": flags(devices),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }
    with (directory / f"log{index}").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


def finish(jobs):
    """Exit codes; whoever is not done in time is killed, and the test fails."""
    deadline = time.monotonic() + PATIENCE
    try:
        return [job.wait(max(0.1, deadline - time.monotonic())) for job in jobs]
    finally:
        for job in jobs:
            job.kill()


def logs(directory, processes):
    return [(directory / f"log{index}").read_text(errors="replace") for index in range(processes)]


def wait_for(path, jobs):
    """Returns once the path is there and all processes still run."""
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        assert all(job.poll() is None for job in jobs) and time.monotonic() < deadline, _said(path, jobs)
        time.sleep(0.02)


def _said(path, jobs):
    """Why there is no such path yet, in the words of those who did not write it."""
    ends = [
        f"exit {job.poll()}: {log[-1500:]}"
        for job, log in zip(jobs, logs(path.parents[2], len(jobs)), strict=True)
    ]
    return "\n".join([f"{path} is not there", *ends])


_PORTS = itertools.count(20_000 + os.getpid() * 97 % 10_000)


def free_port():
    """Returns a port below those that the system gives to others, so that it is still free when it is used."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
