"""Allows one writer for each run directory, by a lock that ends with its process, however that ends.

The lock is `flock` on the file `.lock` in the directory, so it follows the directory when that is moved. The kernel
releases it when the process ends, kill -9 included; a file that a dead process left behind locks nothing.

Across hosts it is as good as the file system. NFS (version 4, or 3 with lockd) and most cluster file systems keep
the lock on their server, so it counts for all hosts; of a host that vanishes the server keeps it until its lease
ends (about 90 s for NFSv4). A file system that keeps locks apart on each host (Lustre mounted with localflock)
protects against processes of the same host only. One without any locks gets a warning, and no protection.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from jaxfb.config import ConfigError
from jaxfb.metrics import check_writers
from jaxfb.process.forks import close_in_children, forget
from jaxfb.training.run_dir import PRIVATE, RunDirectory

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger(__name__)
NAME = ".lock"
TRIES = 100
TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
GONE = (FileNotFoundError, NotADirectoryError)


class RunLock(contextlib.AbstractContextManager["RunLock"]):
    """The right to write into one run directory; used as a context, which releases it at its end.

    Nothing is taken before `acquire`. The directory is made if it is missing, and removed again at the end if it is
    still empty, so that a run that is refused leaves nothing behind.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._file: int | None = None
        self._made: list[Path] = []

    def __exit__(self, *_) -> None:
        self.release()

    @property
    def path(self) -> Path:
        return self._directory / NAME

    def acquire(self) -> None:
        """Takes the lock, or refuses at once.

        Raises:
          ConfigError: another process has it, or nothing can be written there.
        """
        try:
            self._file = self._locked()
        except OSError as error:
            self._unmake()
            raise ConfigError(
                f"[run] dir={self._directory} cannot be written to: {error.strerror}; fix that, or choose another "
                "run.dir"
            ) from None
        except ConfigError:
            self._unmake()
            raise

    def release(self) -> None:
        """Gives the lock back and removes its file; nothing happens where it is not taken."""
        file, self._file = self._file, None
        if file is not None:
            # removed while it is locked: whoever opened it before finds out that it is gone, see `_locked`
            with contextlib.suppress(OSError):
                if self._is_current(file):  # not that of a run that lies here now
                    self.path.unlink()
            forget(file)
            os.close(file)
        self._unmake()

    def move_with(self, target: Path) -> None:
        """Locks a new directory in the old place of one that was renamed to `target`, then unlocks `target`."""
        moved, fresh = RunLock(target), RunLock(self._directory)
        moved._file, self._file = self._file, None
        with moved:
            fresh.acquire()
        self._file, self._made = fresh._file, fresh._made

    def _locked(self) -> int | None:
        """Opens and locks the file that is in the directory; None where the file system has no locks."""
        for _ in range(TRIES):
            self._made = [*_make(self._directory), *self._made]
            try:
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError:  # its last user has just removed the directory that it had made
                continue
            try:
                if not self._lock(file):
                    self.path.unlink()
                    os.close(file)
                    return None
                if self._is_current(file):
                    self._sign(file)
                    close_in_children(file)  # which may outlive this process
                    return file
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # the process that had it removed it between our opening and locking
        raise OSError(errno.EBUSY, "the lock file keeps vanishing")

    def _lock(self, file: int) -> bool:
        if fcntl is None:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in TAKEN:
                raise ConfigError(self._in_use(file)) from None
            log.warning(
                "[run] dir=%s is on a file system without locks (%s): make sure that no second run writes there",
                self._directory,
                error.strerror,
            )
            return False
        return True

    def _sign(self, file: int) -> None:
        """Writes who has the lock, for the sentence that others get; removes the file where that fails."""
        try:
            os.ftruncate(file, 0)
            os.write(file, json.dumps(_holder()).encode())
        except OSError:
            self.path.unlink()
            raise

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _in_use(self, file: int) -> str:
        who = "another process"
        with contextlib.suppress(ValueError, KeyError, TypeError):
            known = json.loads(os.read(file, 4096))
            who = f"process {known['process']} on {known['host']}, started at {known['since']}"
        return (
            f"[run] dir={self._directory} is in use by {who}; wait until it ends, stop it, or choose another "
            "run.dir"
        )

    def _unmake(self) -> None:
        made, self._made = self._made, []
        with contextlib.suppress(OSError):
            for directory in dict.fromkeys(made):
                directory.rmdir()


class OpenDirectory:
    """A run's directory, held open, so that the run notices when another one lies at its path.

    Some file systems (FUSE) number their files anew: a directory with the run's lock file is the run's all the same.
    Where a file system has no locks, and so no lock file, nothing is noticed.
    """

    def __init__(self, path: Path):
        self._path, self._open = path, None
        self._lock = self._locked_by()
        with contextlib.suppress(OSError):  # a system that opens no directories
            self._open = os.open(path, os.O_RDONLY)  # kept open, so that no other one gets its number

    def is_replaced(self) -> bool:
        """Returns whether the path leads to another directory by now, or to nothing.

        Raises:
          OSError: it cannot be read for another reason.
        """
        if self._open is None or self._lock is None:
            return False
        with contextlib.suppress(*GONE):
            if os.path.samestat(os.stat(self._path), os.fstat(self._open)):
                return False
        return self._locked_by() != self._lock

    def close(self) -> None:
        """Forgets the directory."""
        opened, self._open = self._open, None
        if opened is not None:
            os.close(opened)

    def _locked_by(self) -> str | None:
        with contextlib.suppress(*GONE):
            return (self._path / NAME).read_text()
        return None


def claim(directory: RunDirectory, lock: RunLock, config: Any, resume: bool, fresh: bool) -> None:
    """Makes this the only run that writes there, or refuses; nothing that lies there is changed yet.

    Raises:
      ValueError: the directory is impossible, in use, or holds what would be overwritten; a writer is missing.
    """
    check_writers(config.log.writers)
    directory.check()
    lock.acquire()
    if fresh:
        directory.refuse_unless_run()
    elif resume:
        directory.refuse_dangling()
    else:
        directory.refuse_unless_free()


def _make(directory: Path) -> list[Path]:
    """Returns the directories that had to be made, the innermost first."""
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(parents=True, exist_ok=True, mode=PRIVATE)
    return missing


def _holder() -> dict[str, object]:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"process": os.getpid(), "host": socket.gethostname(), "since": since}
