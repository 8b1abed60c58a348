"""The part of the package tensorboardX that is used, which the tests do not install; its disk can be full."""

import errno
import os
import sys
import types
from pathlib import Path

namespace = types.SimpleNamespace


class FakeTensorboard:
    """Takes the place of the package in `sys.modules`.

    events: those that are on the disk, each as a dict, and "closed". full: the disk takes no more.
    """

    def __init__(self, monkeypatch):
        self.events, self.full, self._kept = [], False, []
        proto = namespace(Event=_event, SessionLog=lambda status: status)
        package = namespace(
            RecordWriter=self._opened,
            proto=namespace(event_pb2=proto),
            summary=namespace(scalar=lambda name, value: (name, value)),
        )
        monkeypatch.setitem(sys.modules, "tensorboardX", package)

    def _opened(self, path):
        Path(path).touch()
        closed = lambda: self.events.append("closed")  # noqa: E731
        return namespace(write=self._kept.append, flush=self._flush, close=closed)

    def _flush(self):
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.events += self._kept
        self._kept.clear()


def _event(wall_time, **content):
    return namespace(SerializeToString=lambda: content)
