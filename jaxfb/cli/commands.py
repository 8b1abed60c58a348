"""The command line: `jaxfb train configs/quickstart.yaml model.num_layers=6`; `trainer.py` does the work.

Nothing heavy is imported until a config has been read and found legal, so a typo costs half a second.
Exit codes: 0 done; 1 a check that failed, or a plan that does not fit; 2 a refused command or config (one sentence, no
traceback); 74 something could not be written or read, as on a full disk; 75 stopped by a signal, saved, to be resumed;
76 another process of the job was lost; 78 given up because updates stayed non-finite or spikes kept coming; 79 a device
computes wrongly; 130 and 143 ended at once by Ctrl-C or SIGTERM, a training run only by a second one.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from jaxfb.cli import checks, layouts, models, others, training
from jaxfb.cli.devices import without_devices
from jaxfb.cli.given import is_of_a_given_path
from jaxfb.cli.keys import as_typed
from jaxfb.cli.memory import lacks_memory
from jaxfb.cli.options import POST_TRAINING, parse
from jaxfb.process.exit_codes import DONE, FAILED, REFUSED, RESUMABLE, UNWRITTEN, code_of
from jaxfb.process.last_threads import name_last_threads
from jaxfb.process.os_errors import chain, lacks_files
from jaxfb.process.streams import WhileTaken, open_closed
from jaxfb.refusal import Refused

# After so many new objects Python looks for cycles among them. Its own number, 700, takes 0.8 s of the 10 s of
# processor time that a tiny run needs: nearly all that imports and tracing make stays.
COLLECT_AFTER = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    if arguments is None:
        open_closed()
        _print_what_can_be_printed()
        sys.stderr = WhileTaken(sys.stderr, report=False)  # a sentence that is lost changes no exit code
    options, code = None, FAILED
    first, *older = gc.get_threshold()
    gc.set_threshold(max(first, COLLECT_AFTER), *older)
    was_interrupted = False
    try:
        options = parse(arguments)
        code = HANDLERS[options.verb](options) or DONE
        print(end="", flush=True)  # also where the shell has closed the output
    except KeyboardInterrupt as error:
        print("jaxfb: stopped", file=sys.stderr)
        code, was_interrupted = 128 + getattr(error, "number", signal.SIGINT), True
    except Exception as error:
        if options is None:
            raise
        code = _ended_by(error, options)
    finally:
        if arguments is None:
            name_last_threads(code, getattr(options, "stuck_after", None))
    # a call from Python, which passes arguments, goes on after this one
    may_wait_for_threads = arguments is None and (code == UNWRITTEN or was_interrupted)
    if may_wait_for_threads or (code not in (DONE, RESUMABLE) and _among_several()):
        _leave(code)
    return code


def _print_what_can_be_printed() -> None:
    """Writes characters that the output's encoding lacks as \\xe9, as Python does on stderr, rather than end there."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _leave(code: int) -> NoReturn:
    """Ends this process now.

    An orderly end would wait for the other processes, or for the threads of a save that failed, which wait for minutes.
    Where devices still compute what Ctrl-C has ended, it would free memory under them (a segmentation fault).
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # closed, or on the disk that is full
            stream.flush()
    os._exit(code)


def _ended_by(error: Exception, options: argparse.Namespace) -> int:
    """Returns the exit code of a command that an error has ended, once it is printed and the other processes know."""
    has_joined, code = _among_several(), _explained(error, options)
    is_of_several = has_joined or others.are_expected(options)
    if code is None:
        if not is_of_several:
            raise
        traceback.print_exc()
        code = FAILED
    if is_of_several and not has_joined:
        sys.stderr.flush()
        others.tell(options, error)
    return code


def _explained(error: Exception, options: argparse.Namespace) -> int | None:
    """Prints an error as a sentence and returns its exit code; None for one of which nothing is known."""
    if isinstance(error, Refused):
        print(f"jaxfb: {as_typed(str(error), options)}", file=sys.stderr)
        return REFUSED
    if isinstance(error, BrokenPipeError):  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    if isinstance(error, OSError):
        return _explained_by_system(error, options)
    if lacks_files(error):  # of XLA, as while it compiles
        print(f"jaxfb: {str(error).partition(chr(10))[0][:300]}{_more_files(error)}", file=sys.stderr)
        return UNWRITTEN
    if (code := without_devices(error)) is not None:
        return code
    return REFUSED if lacks_memory(error, None) else None


def _explained_by_system(error: OSError, options: argparse.Namespace) -> int | None:
    if code_of(error) != UNWRITTEN:
        return None
    where = f": {error.filename}" if error.filename else ""
    sentence = f"{error.strerror}{where}{_place_of(error)}" if error.errno else str(error)
    print(f"jaxfb: {sentence}{_more_files(error)}", file=sys.stderr)
    return REFUSED if is_of_a_given_path(error, options) else UNWRITTEN


def _more_files(error: BaseException) -> str:
    """Returns what to do where an error, or one that it follows from, is that too many files are open."""
    return "; allow more open files: ulimit -n 4096" * any(map(lacks_files, chain(error)))


def _place_of(error: Exception) -> str:
    """Returns the line of the caller's own code that an error passed through last, if it did, as words."""
    libraries = [Path(__file__).parents[1], *map(Path, sysconfig.get_paths().values())]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_absolute() and not any(path.is_relative_to(library) for library in libraries):
            return f" ({path}, line {frame.lineno}, in {frame.name})"
    return ""


def _among_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


HANDLERS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "init": layouts.init,
    **dict.fromkeys(("train", *POST_TRAINING), training.train),
    "eval": models.evaluate,
    "generate": models.generate,
    "chat": models.chat,
    "replay": checks.replay,
    "import-hf": models.import_hf,
    "export-hf": models.export_hf,
    "launch": training.launch,
    "check": checks.check,
    "schedule": layouts.schedule,
    "plan": layouts.plan,
    "chaos": checks.chaos,
    "bench": checks.bench,
    "config": layouts.config,
}
"""The function of each command of `options.py`."""
