"""The command line: `jaxfb train configs/quickstart.yaml model.num_layers=6`; `trainer.py` does the work.

Nothing heavy is imported until a config has been read and found legal, so a typo costs half a second.
Exit codes: 0 done; 1 a check that failed; 2 a refused command or config (one sentence, no traceback); 74 something
could not be written or read, as on a full disk; 75 stopped by a signal, saved, to be resumed; 76 another process of
the job was lost; 78 given up because updates stayed non-finite or spikes kept coming; 79 a device computes wrongly.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxfb.cli.options import FILTERS, HOSTS, LAUNCHED, POST_TRAINING, RANDOM, SCHEDULE_COSTS, parse
from jaxfb.process.exit_codes import DONE, FAILED, LOST, REFUSED, RESUMABLE, UNWRITTEN
from jaxfb.refusal import Refused, StorageError, integer
from jaxfb.training.simulated import simulate_devices, without_devices

# What a disk or its permissions refuse; no bug of a program, so a sentence without a traceback is enough.
OF_THE_DISK = frozenset(
    getattr(errno, name)
    for name in (
        "ENOSPC",
        "EDQUOT",
        "EROFS",
        "EACCES",
        "EPERM",
        "EIO",
        "EFBIG",
        "ESTALE",
        "ELOOP",
        "ENAMETOOLONG",
    )
    if hasattr(errno, name)
)

# After so many new objects Python looks for cycles among them. Its own number, 700, takes 0.8 s of the 10 s of
# processor time that a tiny run needs: nearly all that imports and tracing make stays.
COLLECT_AFTER = 10_000


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = parse(arguments)
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, COLLECT_AFTER), *others)
    try:
        code = _run(options)
    except Exception:
        if not _among_several():
            raise
        traceback.print_exc()
        code = FAILED
    if code not in (DONE, RESUMABLE) and _among_several():
        sys.stderr.flush()
        os._exit(code)  # an orderly end would wait for the other processes
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        code = HANDLERS[options.verb](options) or DONE
        sys.stdout.flush()
        return code
    except Refused as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:  # the reader of our output has ended, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in OF_THE_DISK and not isinstance(error, StorageError):
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"jaxfb: {f'{error.strerror}{where}' if error.errno else error}", file=sys.stderr)
        return UNWRITTEN
    except KeyboardInterrupt:
        print("jaxfb: stopped", file=sys.stderr)
        return 130
    except Exception as error:
        if not _lacks_memory(error, None):
            raise
        return REFUSED


def _init(options) -> None:
    from jaxfb.config import starter_names, write_starter

    if options.name is None:
        print("starter configs: " + ", ".join(starter_names()))
        return
    written = write_starter(options.name, Path(options.out))
    print("\n".join(f"wrote {path}" for path in written))
    command = written[0].read_text().partition("\n")[0].removeprefix("# ")
    print(f"cd {options.out} && {command}" if Path(options.out).resolve() != Path.cwd() else command)


@contextmanager
def _configured(options, command: str) -> Iterator[Any]:
    """Yields the config of a training command; with --smoke, that of a few updates in a temporary directory."""
    from jaxfb.config import kind_of_command, load_config, smoke_overrides

    hosts = _hosts(options) if hasattr(options, "coordinator") else []
    if not options.smoke:
        yield load_config(options.config, [*options.overrides, *hosts], command)
        return
    with TemporaryDirectory(prefix="jaxfb-smoke-") as directory:
        first = smoke_overrides(kind_of_command(command))
        yield load_config(
            options.config, [*first, *options.overrides, *hosts, f"run.dir={directory}/run"], command
        )


@contextmanager
def _starting() -> Iterator[None]:
    """Ends the process at SIGTERM or Ctrl-C until the run itself catches them; makes files private."""

    def end(number: int, frame: object) -> None:
        name = signal.Signals(number).name
        print(
            f"jaxfb: {name} in start-up: nothing was trained, so nothing is lost", file=sys.stderr, flush=True
        )
        os._exit(RESUMABLE)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    umask = os.umask(0o077)  # what a run writes is for this user alone
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.umask(umask)


def _train(options) -> int:
    with _starting(), _configured(options, "train") as config:
        return _tried(_train_on(config, options), options)


def _tried(code: int, options) -> int:
    """Returns the exit code; with --smoke, prints first whether the run worked."""
    if options.smoke:
        worked = "worked" if code == DONE else "did not end as it should"
        removed = "Its directory is removed now, with all files named above"
        print(f"\n--smoke: the run {worked}. {removed}; leave out --smoke to keep one.")
    return code


def _train_on(config, options) -> int:
    from jaxfb import trainer

    more = _changes(options)
    if options.profile:
        from jaxfb.training.profile import Profile

        more["callbacks"] = [Profile()]
    return _ended(lambda: trainer.train(config, resume=options.resume, fresh=options.fresh, **more), config)


def _post_train(options) -> int:
    with _starting(), _configured(options, options.verb) as config:
        return _tried(_post_train_on(config, options), options)


def _post_train_on(config, options) -> int:
    from jaxfb import rl

    return _ended(
        lambda: rl.post_train(config, resume=options.resume, fresh=options.fresh, **_changes(options)), config
    )


def _ended(train: Callable[[], Any], config: Any) -> int:
    """Returns the exit code of a training command."""
    from jaxfb import trainer

    try:
        result = train()
    except trainer.GuardAbort as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return error.exit_code
    except trainer.LostProcess as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return LOST
    except Exception as error:
        if not _lacks_memory(error, config):
            raise
        return REFUSED
    return RESUMABLE if result.status == "interrupted" else DONE


def _lacks_memory(error: Exception, config: Any) -> bool:
    """Returns whether memory ran out; prints then what the step needs and what would fit."""
    if not isinstance(error, MemoryError) and "jax" not in sys.modules:
        return False
    from jaxfb.planner.too_large import is_lack_of_memory, remedy

    if not is_lack_of_memory(error):
        return False
    first = str(error).partition("\n")[0][:300] or "no memory left on the host"
    print(f"jaxfb: [memory] the run does not fit: {first}\n{remedy(config)}", file=sys.stderr)
    return True


def _evaluate(options) -> int:
    if options.text is not None or options.task:
        from jaxfb.inference import command

        command.evaluate(options)
        return DONE
    overrides = [*options.overrides, *_hosts(options)]
    run_dir = _run_dir(options.run_dir, overrides, "train")
    from jaxfb import trainer

    try:
        trainer.evaluate(run_dir, overrides)
    except trainer.LostProcess as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return LOST
    return 0


def _generate(options) -> None:
    is_one = options.samples == 1 and options.out is None and not _hosts(options)
    if options.prompt is None or not is_one or options.overrides or options.dtype is not None:
        from jaxfb.inference import command

        command.generate(options)
        return
    path = _model_of(options.run_dir)
    given = {name: getattr(options, name) for name in ("tokens", "temperature", *FILTERS, "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    from jaxfb import trainer

    raw = {"raw": True} if options.raw else {}
    print(trainer.generate(path, options.prompt, **given, **raw))


def _chat(options) -> None:
    from jaxfb.inference import command

    command.chat(options)


def _chaos(options) -> int:
    for name in ("kills", "flips", "skip"):
        integer(f"--{name}", getattr(options, name), least=0)
    from jaxfb.chaos import command

    faults, overrides = not options.no_faults, tuple(options.overrides)
    return command.main(options.kills, options.flips, faults, overrides, options.skip)


def _replay(options) -> int:
    from jaxfb.training.dump import read_dump

    dump = read_dump(options.dump)
    from jaxfb import rl, trainer
    from jaxfb.training import replay

    is_post_training = any(section in dump.config for section in ("conversations", "preferences", "task"))
    make_work = rl.make_work if is_post_training else trainer.make_work
    found = replay.replay(options.dump, make_work, _hosts(options))
    print("\n".join(replay.report(found)))
    return FAILED if found.is_same is False else DONE


def _launch(options) -> int:
    from jaxfb.cli.supervisor import Supervisor, job_command

    for name, least in (("processes", 1), ("restarts", 0)):
        if getattr(options, name) < least:
            raise Refused(f"[launch] --{name} {getattr(options, name)} must be at least {least}; use {least}")
    command = [word for word in options.command if word != "--"]
    if not command or command[0] not in LAUNCHED:
        given = command[0] if command else "nothing"
        raise Refused(
            f"[launch] runs one of {', '.join(LAUNCHED)}, got {given}; use: jaxfb launch train CONFIG"
        )
    return Supervisor(job_command(command), options.processes, options.restarts).run()


def _import_hf(options) -> None:
    from jaxfb.training.hugging_face import import_run

    target = import_run(options.directory, options.out)
    print(f'wrote {target}; try: jaxfb generate {target} --prompt "..."')


def _export_hf(options) -> None:
    from jaxfb.training.hugging_face import export_run, lines

    print(lines(export_run(options.run_dir, options.directory, options.dtype, options.adapter)))


def _check(options) -> int:
    if options.random is not None:
        return _check_random(options)
    if options.config is None:
        raise Refused("check needs a config, such as configs/quickstart.yaml, or --random 20")
    from jaxfb.config import load_config, refuse_own_model

    config = load_config(options.config, options.overrides, "train")
    refuse_own_model(
        config, "check", "call jaxfb.check_equivalence on it, or use --random 20 --model module:function"
    )
    simulate_devices(vars(config.mesh))
    from jaxfb.training.check import check_config

    print(f"checking the model of {options.config}, made narrow, on simulated devices", file=sys.stderr)
    found = check_config(
        config, lambda one: print(f"  {one.where}: {one.refused or f'{one.size:.1e}'}", file=sys.stderr)
    )
    print(found)
    try:
        found.raise_if_above(options.tolerance)
    except AssertionError as error:
        print(f"jaxfb: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return FAILED
    return 0


def _check_random(options) -> int:
    from jaxfb.checking.command import random_check

    if options.config is not None or options.tolerance is not None:
        raise Refused("--random draws everything itself; leave out the config and --tolerance")
    how: dict[str, Any] = {name: getattr(options, name) for name in RANDOM}
    how["axes"] = None if options.axes is None else options.axes.split(",")
    return FAILED if random_check(options.random, **how).findings else 0


def _schedule(options) -> None:
    from jaxfb.schedules import command

    costs = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SCHEDULE_COSTS}
    if options.compare:
        print(command.compared(options.pipe, options.microbatches, options.chunks, costs, options.pieces))
        return
    sizes = options.pipe, options.microbatches, options.chunks, options.pieces
    schedule = command.chosen(options.table, options.kind, *sizes)
    print(command.described(schedule, costs))
    for path in command.written(schedule, costs, options.out, options.svg, options.trace):
        print(f"wrote {path}")


def _plan(options) -> None:
    from jaxfb.config import load_config, refuse_own_model
    from jaxfb.planner.topology import parse_topology

    config = load_config(options.config, options.overrides)
    refuse_own_model(config, "plan", "use a config with sizes, such as 8b")
    topology = parse_topology(options.topology)
    without_devices()
    from jaxfb.planner import command

    compiles = not options.no_compile
    if options.search:
        command.search(options.config, config, topology, compiles, options.layouts, options.out)
    else:
        command.plan(options.config, config, topology, compiles, options.json)


def _bench(options) -> int:
    from jaxfb.cli import bench as benchmark

    return benchmark.run(options.name, options.arguments)


def _config(options) -> None:
    if options.action == "reference":
        from jaxfb.config.reference import reference

        print(reference(), end="")
        return
    from jaxfb.config import as_yaml, load_config, table
    from jaxfb.display import print_table

    if options.config is None:
        return options.refuse("show needs a CONFIG, such as quickstart")
    rows = table(load_config(options.config, options.overrides))
    print_table(options.config, [(key, as_yaml(value)) for key, value in rows])


def _run_dir(path: str, overrides: Sequence[str] = (), command: str | None = None) -> Path:
    """Returns the directory of a run, given itself or by the config that made it."""
    from jaxfb.config import load_config

    config = load_config(path, overrides, command)
    return Path(path) if Path(path).is_dir() else Path(config.run.dir)


def _model_of(path: str) -> Path:
    """Returns a run's directory, or the path itself: of Hugging Face files, or of a config that begins with them."""
    if Path(path).is_dir() and not (Path(path) / "config.yaml").exists():
        return Path(path)
    from jaxfb.config import load_config

    config = load_config(path)
    directory = _run_dir(path)
    begins = getattr(getattr(config, "model", None), "from_", None) is not None
    return Path(path) if begins and not directory.exists() else directory


def _changes(options) -> dict[str, Any]:
    """Returns allow_changes=True if the command has --allow-changes."""
    return {"allow_changes": True} if options.allow_changes else {}


def _hosts(options) -> list[str]:
    """Returns the flags that place this process in its job, as overrides."""
    given = {name: getattr(options, name) for name in HOSTS}
    return [f"hosts.{name}={value}" for name, value in given.items() if value is not None]


def _among_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


HANDLERS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "init": _init,
    "train": _train,
    **dict.fromkeys(POST_TRAINING, _post_train),
    "eval": _evaluate,
    "generate": _generate,
    "chat": _chat,
    "replay": _replay,
    "import-hf": _import_hf,
    "export-hf": _export_hf,
    "launch": _launch,
    "check": _check,
    "schedule": _schedule,
    "plan": _plan,
    "chaos": _chaos,
    "bench": _bench,
    "config": _config,
}
"""The function of each command of `options.py`."""
