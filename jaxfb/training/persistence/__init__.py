"""Keeps what a run needs to continue, also on the hosts' own disks, and decides whether and where it resumes."""
