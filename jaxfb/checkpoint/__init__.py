"""Saves and restores: the store of a run's steps, the record of each, and arrays that are read layer by layer."""

from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.checkpoint.store import CheckpointStore

__all__ = ["CannotWrite", "CheckpointStore"]
