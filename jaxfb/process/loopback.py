"""Finds a port for processes of one job that run on this machine and talk over loopback."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns a port of 127.0.0.1 that nobody uses now; another program may still take it before the job does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
