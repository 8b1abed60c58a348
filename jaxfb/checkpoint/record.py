"""Writes the record of a checkpoint beside its arrays, as soon as the checksums of the arrays are known.

They are computed while Orbax already writes the arrays, so that a save takes little longer for them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from concurrent.futures import Future
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxfb.checkpoint.stored_parts import storage_of

RECORD = "jaxfb"  # <step>/jaxfb/data.json: format, leaves, sums, host, digest of these

SAVE_SECONDS = 7 * 24 * 3600
"""For one save, by the system's clock, which may be set forward and goes on while a machine is suspended. A save that
hangs is noticed by `hosts.stuck_after`, which counts neither."""


class RecordHandler(ocp.handlers.CheckpointableHandler[Future, None]):
    """Writes a record, given as a future of a dict, into one readable JSON file; process 0 does."""

    async def save(self, directory: Any, checkpointable: Future) -> Awaitable[None]:
        """Returns what remains to be done in Orbax's thread: to wait for the record, and to write it."""
        return self._written(directory, checkpointable)

    async def _written(self, directory: Any, record: Future) -> None:
        text = json.dumps(await asyncio.wrap_future(record))
        folder = await directory.await_creation()
        if jax.process_index() == 0:
            await asyncio.to_thread((folder / "data.json").write_text, text)

    async def load(self, directory: Any, abstract_checkpointable: None = None) -> Awaitable[Future]:
        """Refuses: `CheckpointStore` reads the file itself."""
        raise NotImplementedError("the record of a checkpoint is read as a file")

    async def metadata(self, directory: Any) -> None:
        """Returns nothing."""

    def is_handleable(self, checkpointable: Any) -> bool:
        """Returns whether it is a future."""
        return isinstance(checkpointable, Future)

    def is_abstract_handleable(self, abstract_checkpointable: Any) -> bool | None:
        """Returns None: the name of the part decides."""


def context(alone: bool = False) -> ocp.Context:
    """Returns Orbax's settings: the record is one readable JSON file, not a tree of arrays; large arrays are stored in
    pieces.

    alone: this process waits for no other one.
    """
    registry = ocp.handlers.local_registry()
    registry.add(RecordHandler, checkpointable_name=RECORD)
    settings = ocp.Context()
    settings.checkpointables.registry = registry
    settings.asynchronous.timeout_secs = SAVE_SECONDS
    settings.array.saving.scoped_storage_options_creator = storage_of
    if alone:
        settings.multiprocessing.active_processes = {jax.process_index()}
        settings.multiprocessing.primary_host = jax.process_index()
    return settings
