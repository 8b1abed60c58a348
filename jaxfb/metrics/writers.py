"""Writes records: to a JSON-lines file always, to TensorBoard and Weights & Biases as extras.

A record is a step and plain numbers by name, such as {"loss": 3.2, "eval/loss": 3.4}; a value may also be a list of
numbers, which TensorBoard and Weights & Biases are not given. A writer of your own is any function of
`(directory, config, resume)` that returns a `Writer`.

The file has every record. A writer beside it that fails later than at the start is reported and not used again, since a
service that is down must not end a run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import platform
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, MutableSequence
from io import FileIO
from pathlib import Path
from typing import Any, Protocol

from jaxfb.metrics.strict_json import strict_json
from jaxfb.parts import WRITERS
from jaxfb.process.whole_file import write_whole
from jaxfb.refusal import Refused, shown
from jaxfb.registry import OWN

log = logging.getLogger(__name__)
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb"}  # of the writers that come as extras


class Writer(Protocol):
    """Takes records. `write` returns at once; `close` returns when everything is stored."""

    def write(self, step: int, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """Writes one JSON object a line, {"step": 12, "loss": 3.2}; what is not finite is written as null.

    path:   the file; made with its directory.
    resume: the step of the checkpoint a run continues from: records of later steps, which will be written
            again, and a line torn by a crash are dropped. None starts the file anew.
    unwritten: records that an earlier run could not write, which now are; then it receives those that this one cannot
            write: the first, for which `write` raises OSError, and all after it, which are not tried.

    say:    receives a sentence where the file was removed or replaced during the run. One that was removed is written
            again with all its records; one that is there instead is written to.

    A record is in the operating system's hands when `write` returns: killing the process loses none.
    """

    def __init__(
        self,
        path: str | Path,
        resume: int | None = None,
        unwritten: MutableSequence[dict] | None = None,
        say: Callable[[str], None] = log.warning,
    ):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        records = [] if resume is None else read_jsonl(self.path)
        kept = [record for record in records if record["step"] <= resume]
        self._unwritten = [] if unwritten is None else unwritten
        kept += [record for record in self._unwritten if record not in kept]
        write_whole(self.path, "".join(_line(record) for record in kept))
        self._unwritten.clear()
        self._file, self._say = self._opened(), say

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        plain = {"step": int(step), **{name: _plain(v) for name, v in record.items()}}
        if self._unwritten:  # a line after one that was torn would be lost with it
            self._unwritten.append(plain)
            return
        try:
            if not self._is_there():
                self._open_again()
            self._append(_line(plain).encode())
        except OSError:
            self._unwritten.append(plain)
            raise

    def _opened(self) -> FileIO:
        # Not buffered: what a full disk did not take must not be tried again at the end. Read where it was removed.
        return self.path.open("a+b", buffering=0)

    def _is_there(self) -> bool:
        """Returns whether the path still leads to the file that is open: what goes to another is lost in silence."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self.path), os.fstat(self._file.fileno()))
        return False

    def _open_again(self) -> None:
        """Goes on with the file that is there now, or writes the one that was removed again."""
        was_removed = not self.path.exists()
        if was_removed:
            self._file.seek(0)
            write_whole(self.path, self._file.readall())
        before, self._file = self._file, self._opened()
        before.close()
        if was_removed:
            self._say(f"[log] {self.path} was removed; it is written again, with all records")
        else:
            self._say(f"[log] {self.path} was replaced; further records go to the new file")

    def _append(self, line: bytes) -> None:
        while line:
            line = line[self._file.write(line) :]

    def close(self) -> None:
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()


class TensorBoardWriter:
    """Writes scalars for TensorBoard with the package tensorboardX, into a new file of `directory`.

    Not with its `SummaryWriter`: its thread ends at a full disk without a word, and `add_scalar` then waits for ever.
    """

    def __init__(self, directory: str | Path, resume: int | None = None):
        self._library = _extra("tensorboard")
        name = f"events.out.tfevents.{int(time.time())}.{platform.node()}.{os.getpid()}"
        self._path = Path(directory) / name
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._library.RecordWriter(str(self._path))
        self._add(file_version="brain.Event:2")
        if resume is not None:  # TensorBoard then leaves out what earlier files have of these steps
            start = self._library.proto.event_pb2.SessionLog(status="START")
            self._add(step=resume + 1, session_log=start)
        self._file.flush()

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        _check_is_there(self._path)
        for name, value in record.items():
            if not isinstance(value, str | list):
                self._add(step=int(step), summary=self._library.summary.scalar(name, float(value)))
        self._file.flush()

    def _add(self, **content: Any) -> None:
        event = self._library.proto.event_pb2.Event(wall_time=time.time(), **content)
        self._file.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class WandbWriter:
    """Scalars for Weights & Biases; offline, in directory/wandb, without WANDB_API_KEY or WANDB_MODE."""

    def __init__(self, directory: str | Path, config: Mapping[str, Any], resume: int | None = None):
        wandb = _extra("wandb")
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE") or (None if os.environ.get("WANDB_API_KEY") else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "jaxfb"),
            name=directory.name,
            id=_run_id(directory, new=resume is None),
            dir=str(directory),
            config=dict(config),
            resume="allow",
            mode=mode,
        )
        self._offline = Path(self._run.dir) if mode == "offline" else None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        if self._offline is not None:
            _check_is_there(self._offline)
        self._run.log({name: v for name, v in record.items() if not isinstance(v, list)}, step=int(step))

    def close(self) -> None:
        self._run.finish()


def _check_is_there(path: Path) -> None:
    """Raises for a file that was removed while it was open: it could still be written to, and would be lost."""
    if not path.exists():
        raise FileNotFoundError(f"{path} was removed")


class _Beside:
    """A writer beside the file, which may fail: it is then reported, and gets no more records.

    name: as in `log.writers`. say: receives the report, and once more at the end, where it is not overlooked.
    """

    def __init__(self, name: str, writer: Writer, say: Callable[[str], None]):
        self._name, self._writer, self._say = name, writer, say
        self._report: str | None = None

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        if self._report is not None:
            return
        try:
            self._writer.write(step, record)
        except (Exception, SystemExit) as error:  # a service's package may raise anything
            self._report = (
                f"[log] the writer {self._name!r} failed at step {step} ({_described(error)}) and gets no more "
                "records; metrics.jsonl has all"
            )
            self._say(self._report)

    def close(self) -> None:
        if self._report is not None:
            self._say(self._report)
        try:
            self._writer.close()
        except (Exception, SystemExit) as error:
            if self._report is None:
                self._say(
                    f"[log] the writer {self._name!r} failed when it was closed ({_described(error)}), so it may lack "
                    "records; metrics.jsonl has all"
                )


class _Fan:
    """Writes to the file, and to the writers beside it, also what the file does not take."""

    def __init__(self, file: Writer, beside: Iterable[Writer]):
        self._file, self._beside = file, tuple(beside)

    def write(self, step: int, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(step, record)
        finally:
            for writer in self._beside:
                writer.write(step, record)

    def close(self) -> None:
        try:
            self._file.close()
        finally:
            for writer in self._beside:
                writer.close()


def make_writers(
    names: Iterable[str],
    directory: str | Path,
    config: Mapping[str, Any],
    resume: int | None = None,
    extra: Iterable[Writer] = (),
    *,
    unwritten: MutableSequence[dict] | None = None,
    say: Callable[[str], None] = log.warning,
) -> Writer:
    """Returns one writer to directory/metrics.jsonl, to those of `names` and to `extra`.

    It raises the OSErrors of the file alone. Another writer that fails is reported to `say` and not used again.

    names: of `jaxfb.parts.WRITERS`, such as "tensorboard" and "wandb", or "package.module:function".
    resume: the step that the run continues from, or None for a new run.
    unwritten: see `JsonlWriter`.

    Raises:
      ValueError: the package a name needs is not installed; the message gives the command to install it. Or a writer
        cannot begin, since its disk or service cannot be reached.
    """
    directory, names = Path(directory), tuple(names)
    check_writers(names)
    named = [(name, _begun(name, directory, config, resume)) for name in names]
    named += [(type(writer).__name__, writer) for writer in extra]
    file = JsonlWriter(directory / "metrics.jsonl", resume, unwritten, say)
    return _Fan(file, [_Beside(name, writer, say) for name, writer in named])


def _begun(name: str, directory: Path, config: Mapping[str, Any], resume: int | None) -> Writer:
    """Returns the writer of a name, or refuses one that fails before anything is trained."""
    try:
        writer = WRITERS[name](directory, config, resume)
    except Refused:
        raise
    except (Exception, SystemExit) as error:  # a service's package may raise anything
        raise Refused(
            f"[log] the writer {name!r} cannot begin ({_described(error)}); correct it, or leave it out of log.writers"
        ) from error
    return _checked(name, writer)


def _described(error: BaseException) -> str:
    """Returns the kind of an error, its message, and the line that raised it, on one line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f", {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}{where}"


def check_writers(names: Iterable[str]) -> None:
    """Refuses, before anything is written, a writer whose package is not installed.

    Raises:
      ValueError: names the package and the command to install it.
    """
    for name in names:
        if name not in WRITERS and ":" not in name:
            raise Refused(
                f"[log] no writer {name!r}; use one of {', '.join(WRITERS)} (jsonl is always on), or your own as {OWN}"
            )
        WRITERS.check(name)
        if name in PACKAGES:
            _extra(name)


def tensorboard(directory: Path, config: Mapping[str, Any], resume: int | None) -> Writer:
    """Returns the writer into `tensorboard` in a run's directory."""
    return TensorBoardWriter(directory / "tensorboard", resume)


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads the records of a metrics file, in order; an incomplete line is passed over, a missing file has none."""
    records = []
    for line in Path(path).read_bytes().split(b"\n") if Path(path).exists() else []:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
    return records


def _checked(name: str, writer: Any) -> Writer:
    for method in ("write", "close"):
        if not callable(getattr(writer, method, None)):
            raise Refused(
                f"[log] the writer of {name!r} is {shown(writer)}, which has no {method}; return an object with "
                "write(step, record) and close()"
            )
    return writer


def _line(record: Mapping[str, Any]) -> str:
    return strict_json(record) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, list):
        return [_plain(each) for each in value]
    number = value.item() if hasattr(value, "item") else float(value)
    return number if not isinstance(number, float) or math.isfinite(number) else None


def _extra(name: str) -> Any:
    """Returns the package of a writer that comes as an extra."""
    try:
        return importlib.import_module(PACKAGES[name])
    except ImportError:
        raise Refused(
            f"[log] writer {name!r} needs the package {PACKAGES[name]}: pip install 'jaxfb[{name}]'"
        ) from None
    except Exception as error:  # of a package that does not fit another one
        raise Refused(
            f"[log] writer {name!r} needs the package {PACKAGES[name]}, which cannot be imported "
            f"({_described(error)}); correct it, or leave it out of log.writers"
        ) from error


def _run_id(directory: Path, new: bool) -> str:
    """Returns the same id when a run is resumed, so that its curves continue."""
    file = directory / "wandb-id"
    if new or not file.exists() or not file.read_text():
        write_whole(file, os.urandom(8).hex())
    return file.read_text()
