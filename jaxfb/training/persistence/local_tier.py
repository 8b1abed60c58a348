"""Frequent checkpoints on the hosts' own disks: each process writes what its devices keep, and a copy of a neighbour's.

DIR/<run>/process-<k>/<update>_<base>_<kind>_<start>
  base: the newest checkpoint in the run directory then; kind: which parts; start: of the job, which wrote it

A process that is killed finds its own file again; a host whose disk is lost gets its parts from the copy. Such a
checkpoint is used only while its base is still the newest one of the run directory, and on processes that keep the same
parts. All its parts are of one start: a disk that was away has others of the same update, computed with another config.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfb.checkpoint.obstacles import OBSTACLES, Unreadable
from jaxfb.checkpoint.together import gathered
from jaxfb.config.operation import LocalConfig
from jaxfb.process.fault_points import reach
from jaxfb.training.persistence import neighbours
from jaxfb.training.persistence.snapshot import UNFINISHED, kind_of, put_back, read, taken, write
from jaxfb.training.run_dir import RunDirectory

log = logging.getLogger(__name__)
PyTree = Any
PRIVATE = 0o700
NONE = -1  # the base where the run directory has no checkpoint
NUMBER = 6  # digits of a start's number
Point = tuple[str, int]  # start and update


class Name(NamedTuple):
    """The name of a file: which update, since which checkpoint, which parts, written by which start of the job.

    start: a number, which grows, and a random word; those of a later start come later in the order of strings.
    """

    update: int
    base: int
    kind: str
    start: str = "0" * NUMBER  # of files that have none in their name

    @classmethod
    def of(cls, path: Path) -> Name | None:
        """Returns what a file is called, None for a file of another kind."""
        try:
            update, base, *parts = path.name.split("_")
            found = cls(int(update), int(base), *parts)
        except (ValueError, TypeError):
            return None
        named = found.kind.isalnum() and found.start.isalnum() and found.start[:NUMBER].isdecimal()
        return found if named else None

    @property
    def point(self) -> Point:
        return self.start, self.update

    def __str__(self) -> str:
        return f"{self.update}_{self.base}_{self.kind}_{self.start}"


class LocalTier:
    """The local checkpoints of one run. Every process of a job makes the same calls in the same order.

    settings: of the config. run: a name that no other run has.
    """

    def __init__(self, settings: LocalConfig, run: str):
        self._root = Path(os.path.expandvars(settings.dir)).expanduser().absolute() / run
        self._own = self._root / f"process-{jax.process_index()}"
        self._keep = settings.keep
        self._writing: threading.Thread | None = None
        self._written: list[Point] = []  # the latest first
        self._start = ""  # known from the first save on
        self._kinds: Sequence[str] = ()  # of all processes, known from the first save on
        self._shift: int | None = None
        self._failure: str | None = None  # of the last one to be written

    def save(self, update: int, base: int | None, state: PyTree, host: Mapping[str, Any]) -> None:
        """Copies a state from the devices, and writes it while the run goes on.

        A disk that cannot be written to is reported, and the run goes on without. Args as for `CheckpointStore.save`.
        """
        kind = kind_of(state)
        if not self._kinds:
            facts = [socket.gethostname(), kind, self._newest_start(), secrets.token_hex(4)]
            hosts, self._kinds, numbers, words = zip(*gathered(facts), strict=True)
            self._shift, self._start = shift(hosts, self._kinds), f"{max(numbers) + 1:0{NUMBER}}{words[0]}"
        body = taken(state, host)
        name = Name(update, NONE if base is None else base, kind, self._start)
        files = {name: body}
        if self._shift is not None:
            source = self._kinds[(jax.process_index() - self._shift) % len(self._kinds)]
            files[name._replace(kind=source)] = neighbours.shifted(body, self._shift)
        self.wait()
        self._writing = threading.Thread(target=self._write, args=(files,), name="jaxfb local")
        self._writing.start()

    def wait(self) -> None:
        """Returns when the last one is written."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None

    def restore(self, base: int | None, abstract_state: PyTree) -> tuple[int, PyTree, dict[str, Any]] | None:
        """Returns the newest update that is whole, its state and host values; None if there is none.

        A damaged file is passed over with a warning, for a copy of it or an older update.

        Raises:
          Unreadable: this process may not read what is there, so that updates would be lost without need.
        """
        self._check_readable()
        files, kind, me = self._there(base), kind_of(abstract_state), jax.process_index()
        while (found := self._chosen(files, kind)) is not None:
            point, kinds, sources = found
            wanted = {kinds[process] for process, source in enumerate(sources) if source == me}
            bodies = {one: body for one in wanted if (body := self._read(files, point, one)) is not None}
            if not all(gathered(len(bodies) == len(wanted))):
                continue
            body: Any = bodies.get(kind) if sources[me] == me else None
            for process, source in enumerate(sources):
                if source != process:
                    given = bodies[kinds[process]] if source == me else None
                    received = neighbours.sent(given, source, process)
                    body = received if process == me else body
            state, host = put_back(body, abstract_state)
            return point[1], state, host
        self._report_unused(update for (_, update, _), paths in files.items() if paths)
        return None

    def remove(self) -> None:
        """Removes what this process has written."""
        self.wait()
        shutil.rmtree(self._own, ignore_errors=True)
        # not empty, or gone: other processes of this host remove theirs at the same time
        with suppress(OSError):
            self._root.rmdir()

    def _write(self, files: Mapping[Name, np.ndarray]) -> None:
        try:
            self._own.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
            self._remove_unfinished()
            reach("local")
            for name, body in files.items():
                write(self._own / str(name), body)
                reach("local.done")
            self._rotate(next(iter(files)).point)
            self._report(None)
        except OSError as error:
            self._report(error.strerror or str(error))
            with suppress(OSError):
                self._remove_unfinished()

    def _report(self, failure: str | None) -> None:
        """Reports why none was written, and that one is again; each once, since a full disk is full for long."""
        before, self._failure = self._failure, failure
        if failure not in (None, before):
            text = "[checkpoint] no local checkpoint was written to %s: %s; later failures are not reported"
            log.warning(text, self._own, failure)
        elif failure is None and before is not None:
            log.warning("[checkpoint] local checkpoints are written to %s again", self._own)

    def _remove_unfinished(self) -> None:
        """Removes what a full disk or a kill left of a file: it would keep the next one from being written."""
        for path in self._own.glob(f"*{UNFINISHED}"):
            path.unlink(missing_ok=True)

    def _newest_start(self) -> int:
        """Returns the number of the latest start that has written to this machine; 0 for none."""
        names = [Name.of(path) for path in self._root.glob("process-*/*")]
        return max((int(name.start[:NUMBER]) for name in names if name is not None), default=0)

    def _rotate(self, point: Point) -> None:
        """Keeps the files of the points that were written last, now `point`; numbers may have gone back since.

        So may the clock, and with it the times of files: they order what an earlier process has written.
        """
        self._written = [point, *(one for one in self._written if one != point)][: self._keep]
        files = {path: name for path in self._own.iterdir() if (name := Name.of(path)) is not None}
        latest = sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)
        kept = list(dict.fromkeys([*self._written, *(files[path].point for path in latest)]))[: self._keep]
        for path, name in files.items():
            if name.point not in kept:
                path.unlink()

    def _there(self, base: int | None) -> dict[tuple[str, int, str], list[Path]]:
        """Returns the files on this machine, also of other processes, by start, update and kind."""
        found: dict[tuple[str, int, str], list[Path]] = {}
        for path in sorted(self._root.glob("process-*/*")):
            name = Name.of(path)
            if name is not None and name.base == (NONE if base is None else base):
                found.setdefault((*name.point, name.kind), []).append(path)
        return found

    def _chosen(
        self, files: Mapping[tuple[str, int, str], Sequence[Path]], kind: str
    ) -> tuple[Point, Sequence[str], Sequence[int]] | None:
        """Returns the point to restore, the kind of each process and who gives it; equal on every process."""
        there = sorted(key for key, paths in files.items() if paths)
        kinds, everyone = zip(*gathered([kind, there]), strict=True)
        found = chosen(kinds, [{((start, update), one) for start, update, one in each} for each in everyone])
        return found and (found[0], kinds, found[1])

    def _read(
        self, files: dict[tuple[str, int, str], list[Path]], point: Point, kind: str
    ) -> np.ndarray | None:
        """Returns the body of the first sound file; damaged ones are taken out of `files`."""
        paths = files[(*point, kind)]
        while paths:
            try:
                return read(paths[0])
            except OSError as error:
                if error.errno in OBSTACLES:
                    raise self._unreadable(error) from error
                log.warning("[checkpoint] skipping a local checkpoint: %s", error)
                paths.pop(0)
        return None

    def _report_unused(self, updates: Iterable[int]) -> None:
        """Reports files of updates that are lost now, as after a change of the mesh."""
        if newest := max(updates, default=None):
            log.warning(
                "[checkpoint] the local checkpoints in %s, up to update %d, are not used: the arrays were cut over the "
                "processes or devices in another way, or parts are missing; to continue from them, resume with the "
                "mesh of before",
                self._root,
                newest,
            )

    def _check_readable(self) -> None:
        """Looks into every directory of the run: `glob` takes what it may not look into for empty."""
        try:
            for path in self._root.iterdir() if self._root.is_dir() else ():
                if path.is_dir():
                    os.scandir(path).close()
        except PermissionError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> Unreadable:
        return Unreadable(
            f"[checkpoint] the local checkpoints of this run cannot be read: {error.strerror}: {error.filename}; "
            "correct that and start again, or continue without them by checkpoint.local=null"
        )


def local_tier(
    settings: LocalConfig | None, directory: RunDirectory, new: bool, say: Callable[[str], None]
) -> LocalTier | None:
    """Returns the local checkpoints of the run in `directory`; None where the config asks for none.

    new: whether a run begins there, which forgets those of an older one.
    """
    if settings is None:
        return None
    name = _identity(directory, new, say) if jax.process_index() == 0 else None
    return LocalTier(settings, gathered(name)[0])


def _identity(directory: RunDirectory, new: bool, say: Callable[[str], None]) -> str:
    """Returns the name under which a run keeps its local checkpoints."""
    if not new and (other := directory.copied_from()):
        say(
            f"{directory.path} is a copy of {other}: local checkpoints, which belong to that run, are not used"
        )
    return directory.identity(new)


def chosen(
    kinds: Sequence[str], there: Sequence[Iterable[tuple[Point, str]]]
) -> tuple[Point, list[int]] | None:
    """Returns the newest point of which every process can get its parts, and from whom; None if there is none.

    The latest start goes before the highest update: the records of updates that it has not made are gone.

    Args:
      kinds: the parts that each process needs. there: (point, kind) of the files that each process can read.
    """
    for point in sorted({point for files in there for point, _ in files}, reverse=True):
        sources = []
        for process, kind in enumerate(kinds):
            holders = [one for one, files in enumerate(there) if (point, kind) in files]
            if not holders:
                break
            sources.append(process if process in holders else holders[0])
        else:
            return point, sources
    return None


def shift(hosts: Sequence[str], kinds: Sequence[str]) -> int | None:
    """Returns how many places further a process sends its copy: to another host if possible; None if none is needed.

    None is where all parts of every process are on a second host anyway, as on replicas.
    """
    count = len(hosts)
    where: dict[str, set[str]] = {}
    for host, kind in zip(hosts, kinds, strict=True):
        where.setdefault(kind, set()).add(host)
    if count == 1 or all(len(places) > 1 for places in where.values()):
        return None

    def stays(by: int) -> int:
        return sum(hosts[k] == hosts[(k + by) % count] for k in range(count))

    return min(range(1, count), key=stays)
