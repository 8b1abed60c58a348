"""Keeps what a run needs to continue: its lock, its checkpoints and the copies on the hosts' own disks."""
