"""Exit codes of the command line: what a supervisor or a script decides by. README.md lists them."""

DONE = 0
FAILED = 1
"""A check found a difference, a plan does not fit, or a bug ended the process."""
REFUSED = 2
UNWRITTEN = 74
"""Something could not be written or read, as on a full disk."""
RESUMABLE = 75
"""Stopped by a signal; what there is to continue from is saved."""
LOST = 76
"""Another process of the job was lost, or this one hung; started again, it continues."""
GAVE_UP = 78
"""Updates stayed non-finite, or spikes kept coming."""
FAULTY = 79
"""A device computes wrongly."""
