"""The command line: `jaxfb train configs/quickstart.yaml model.num_layers=6`; `trainer.py` does the work.

Nothing heavy is imported until a config has been read and found legal, so a typo costs half a second.
Exit codes: 0 done; 1 a check that failed; 2 a refused command or config (one sentence, no traceback); 74 something
could not be written or read, as on a full disk; 75 stopped by a signal, saved, to be resumed; 76 another process of
the job was lost; 78 given up because updates stayed non-finite or spikes kept coming; 79 a device computes wrongly.
"""

from __future__ import annotations

import argparse
import errno
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

from jaxfb import __version__
from jaxfb.refusal import Refused, StorageError, integer
from jaxfb.schedules import NAMES
from jaxfb.training.simulated import simulate_devices, without_devices

RUN = "a run directory, or a config that names it in run.dir"
REFUSED, UNWRITTEN, RESUMABLE, LOST, DIFFERS, FAILED = 2, 74, 75, 76, 1, 1
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
OVERRIDES = "key.path=value, such as optimizer.learning_rate=1e-3 or mesh.tp=2; a later one wins"
HOSTS = {
    "coordinator": (str, "HOST:PORT", "address of process 0 (short for hosts.coordinator=...)"),
    "processes": (int, "N", "number of processes of the job"),
    "process_id": (int, "I", "number of this process, from 0"),
}
RANDOM = {
    "seed": (int, 0, "S", "seed of the random draw (default: 0)"),
    "first": (int, 0, "K", "number of the first case (default: 0); case K of a seed is always the same"),
    "jobs": (int, 1, "J", "cases to run at the same time (default: 1)"),
    "limit": (float, 600.0, "SECONDS", "time limit of one case (default: 600)"),
    "tries": (int, 60, "T", "attempts to make a failing case smaller (default: 60)"),
    "model": (str, None, "MODULE:FUNCTION", "check the (model, params, batch) that this function returns"),
    "axes": (str, None, "A,B", "mesh axes to draw from (default: pipe,data,fsdp,tensor)"),
}
POST_TRAINING = {
    "sft": "fine-tune on conversations; the loss counts the assistant's tokens",
    "dpo": "train on preference pairs (DPO and related losses)",
    "rl": "sample, reward and update: GRPO, PPO and related methods",
}
LAUNCHED = ("train", *POST_TRAINING)
TOPOLOGIES = "such as v5p:4x4x8, v5e:4x4, v6e:16x16, tpu7x:4x4x4, cpu:8 or gpu:h100x8"
SCHEDULE_SIZES = {
    "pipe": "devices on the pipe axis",
    "microbatches": "microbatches of an update",
    "chunks": "stages per device (default: depends on the kind)",
}
SCHEDULE_COSTS = {
    "forward": "a forward",
    "backward-input": "an input gradient",
    "backward-weight": "a weight gradient",
    "head": "head and loss",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    options = _parse(arguments)
    try:
        code = _run(options)
    except Exception:
        if not _among_several():
            raise
        traceback.print_exc()
        code = FAILED
    if code not in (0, RESUMABLE) and _among_several():
        sys.stderr.flush()
        os._exit(code)  # an orderly end would wait for the other processes
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        return options.run(options) or 0
    except Refused as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in OF_THE_DISK and not isinstance(error, StorageError):
            raise
        where = f": {error.filename}" if error.filename else ""
        print(f"jaxfb: {f'{error.strerror}{where}' if error.errno else error}", file=sys.stderr)
        return UNWRITTEN
    except KeyboardInterrupt:
        print("jaxfb: stopped", file=sys.stderr)
        return 130


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses options and overrides in any order, which argparse alone does not."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    for text in rest:
        if text.startswith("-") or not hasattr(options, "overrides"):
            parser.error(f"cannot read {text!r}")
        options.overrides.append(text)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxfb",
        description="Trains transformers with JAX on GPU and TPU meshes, with exact gradients on each.",
    )
    parser.add_argument("--version", action="version", version=f"jaxfb {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_init,
        _add_training,
        _add_uses_of_a_run,
        _add_replay,
        _add_pretrained,
        _add_launch,
        _add_check,
        _add_schedule,
        _add_plan,
        _add_chaos,
        _add_bench,
        _add_show,
    ):
        add(verbs)
    return parser


def _add_init(verbs) -> None:
    init = _verb(verbs, "init", _init, "write a starter config to edit; without a name, list them")
    init.add_argument("name", nargs="?", metavar="NAME", help="of a starter config, such as quickstart")
    init.add_argument("--out", default=".", metavar="DIR", help="where to write it (default: here)")


def _add_training(verbs) -> None:
    train = _verb(verbs, "train", _train, "train from a config, into a run directory")
    _add_config(train, "a YAML file, or the name of a starter config such as quickstart")
    _add_hosts(train)
    train.add_argument("--profile", action="store_true", help="trace a few updates into the run's directory")
    _add_where_to_begin(train)
    for name, text in POST_TRAINING.items():
        verb = _verb(verbs, name, _post_train, text)
        verb.set_defaults(command=name)
        _add_config(verb)
        _add_hosts(verb)
        _add_where_to_begin(verb)


def _add_uses_of_a_run(verbs) -> None:
    evaluate = _verb(verbs, "eval", _evaluate, "held-out loss of a run's newest checkpoint")
    evaluate.add_argument("run_dir", metavar="RUN", help=RUN)
    evaluate.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    _add_hosts(evaluate)
    generate = _verb(verbs, "generate", _generate, "continue a prompt with a run's newest checkpoint")
    generate.add_argument("run_dir", metavar="RUN", help=RUN)
    generate.add_argument("--prompt", required=True, help="the text to continue")
    generate.add_argument("--tokens", type=int, default=None, help="how many tokens (default: eval.tokens)")
    generate.add_argument(
        "--temperature", type=float, default=None, help="sampling temperature; 0 takes the most likely token"
    )
    generate.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt without the run's chat template"
    )


def _add_replay(verbs) -> None:
    text = "compute the update again at which a guard ended a run; 0: the same bits, 1: others"
    verb = _verb(verbs, "replay", _replay, text)
    verb.add_argument("dump", metavar="DUMP", help="a directory RUN/dumps/update-N")
    _add_hosts(verb)


def _add_launch(verbs) -> None:
    text = "run a command as several processes of this machine, and start it again when one is lost"
    launch = _verb(verbs, "launch", _launch, text)
    launch.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes to start (default: 1)"
    )
    launch.add_argument(
        "--restarts",
        type=int,
        default=3,
        metavar="N",
        help="restarts in a row before it gives up (default: 3)",
    )
    launch.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="COMMAND", help="such as: train CONFIG key=value"
    )


def _add_pretrained(verbs) -> None:
    importing = _verb(verbs, "import-hf", _import_hf, "make a run out of a directory of Hugging Face files")
    importing.add_argument("directory", metavar="DIR", help="with config.json and safetensors")
    importing.add_argument(
        "--out", required=True, metavar="RUN", help="the run directory to write, new or empty"
    )
    exporting = _verb(verbs, "export-hf", _export_hf, "write a run's newest checkpoint as Hugging Face files")
    exporting.add_argument("run_dir", metavar="RUN", help="a run directory")
    exporting.add_argument("directory", metavar="DIR", help="the directory to write, new or empty")
    exporting.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: as imported, else float32)"
    )


def _add_check(verbs) -> None:
    text = "compare gradients on a mesh with those of one device, for a config or for random cases"
    check = _verb(verbs, "check", _check, text)
    check.add_argument("config", metavar="CONFIG", nargs="?", help="a YAML file or a run's directory")
    check.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)
    check.add_argument(
        "--tolerance",
        type=float,
        default=None,
        help="largest relative difference allowed (default: 1e-10 in float64)",
    )
    group = check.add_argument_group("random search", "draws models, meshes and options; takes no config")
    group.add_argument("--random", type=int, metavar="N", help="number of cases")
    for name, (kind, default, metavar, text) in RANDOM.items():
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def _add_chaos(verbs) -> None:
    text = "try small runs against faults: killed processes, flipped bits, devices that compute wrongly"
    chaos = _verb(verbs, "chaos", _chaos, text)
    chaos.add_argument("--kills", type=int, default=13, metavar="N", help="processes to kill (default: 13)")
    chaos.add_argument(
        "--flips", type=int, default=20, metavar="N", help="bits to flip in checkpoints (default: 20)"
    )
    chaos.add_argument("--no-faults", action="store_true", help="leave out the faults inside a process")
    chaos.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _add_schedule(verbs) -> None:
    text = "print, simulate and draw a pipeline schedule, or compare all"
    schedule = _verb(verbs, "schedule", _schedule, text)
    for name, size in SCHEDULE_SIZES.items():
        schedule.add_argument(f"--{name}", type=int, default=None, metavar="N", help=size)
    schedule.add_argument("--kind", default=None, help=f"{', '.join(NAMES)}, or package.module:function")
    schedule.add_argument(
        "--table", metavar="FILE", help="file with your own schedule, in the format that this command prints"
    )
    for name, what in SCHEDULE_COSTS.items():
        default = 0.0 if name == "head" else 1.0
        help_ = f"cost of {what}, one microbatch on a device (default: {default:g})"
        schedule.add_argument(f"--{name}", type=float, default=default, metavar="COST", help=help_)
    schedule.add_argument(
        "--compare", action="store_true", help="compare all kinds, and Megatron's schedules"
    )
    schedule.add_argument("--out", metavar="DIR", help="directory for a picture and a Perfetto trace")
    schedule.add_argument("--svg", metavar="FILE", help="write a picture: .svg, .png or .pdf")
    schedule.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")


def _add_plan(verbs) -> None:
    text = "tell whether a config fits a machine, and how fast it can run, without the machine"
    plan = _verb(verbs, "plan", _plan, text)
    _add_config(plan)
    plan.add_argument("--topology", required=True, metavar="NAME", help=TOPOLOGIES)
    plan.add_argument("--no-compile", action="store_true", help="a formula alone: seconds, no compiler")
    plan.add_argument("--json", action="store_true", help="everything as JSON")
    plan.add_argument("--search", action="store_true", help="try layouts, write the fastest that fits")
    plan.add_argument("--layouts", type=int, default=24, metavar="N", help="layouts to list (default: 24)")
    plan.add_argument("--out", default="plan", metavar="DIR", help="where --search writes (default: plan)")


def _add_bench(verbs) -> None:
    text = "run a benchmark by name; report rewrites docs/performance.md from the results"
    bench = _verb(verbs, "bench", _bench, text)
    bench.add_argument("name", nargs="?", metavar="NAME", help="name of a benchmark; without it, list them")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="the benchmark's own, after its name")


def _add_show(verbs) -> None:
    show = _verb(
        verbs, "config", _config, "show every key of a config after overrides, or describe every key there is"
    )
    show.add_argument(
        "action", choices=("show", "reference"), help="reference: what every key means, in Markdown"
    )
    show.set_defaults(refuse=show.error)
    show.add_argument("config", nargs="?", metavar="CONFIG", help="of show: a config, or a run directory")
    show.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _add_config(verb: argparse.ArgumentParser, text: str = "a YAML file or a run's directory") -> None:
    verb.add_argument("config", metavar="CONFIG", help=text)
    verb.add_argument("overrides", nargs="*", metavar="key=value", help=OVERRIDES)


def _add_where_to_begin(verb: argparse.ArgumentParser) -> None:
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help="continue from the newest checkpoint in run.dir")
    how.add_argument(
        "--fresh", action="store_true", help="move an existing run in run.dir aside and start over"
    )
    how.add_argument(
        "--smoke",
        action="store_true",
        help="run a few updates without warm-up, in a directory that is then removed",
    )
    changes = (
        "resume with keys that give the saved parameters or rows another meaning, such as model.rope_theta"
    )
    verb.add_argument("--allow-changes", action="store_true", help=changes)


def _add_hosts(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group(
        "several processes",
        "only needed where Slurm, Open MPI, Kubernetes or a TPU pod does not provide this",
    )
    for name, (kind, metavar, text) in HOSTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, default=None, metavar=metavar, help=text)


def _verb(verbs, name: str, run, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    verb.set_defaults(run=run)
    return verb


def _init(options) -> None:
    from jaxfb.config import starter_names, write_starter

    if options.name is None:
        print("starter configs: " + ", ".join(starter_names()))
        return
    written = write_starter(options.name, Path(options.out))
    print("\n".join(f"wrote {path}" for path in written))
    print(written[0].read_text().partition("\n")[0].removeprefix("# ").replace("configs/", f"{options.out}/"))


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
    print("the smoke run worked; its directory was removed")


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
        return _train_on(config, options)


def _train_on(config, options) -> int:
    from jaxfb import trainer

    more = _changes(options)
    if options.profile:
        from jaxfb.training.profile import Profile

        more["callbacks"] = [Profile()]
    return _ended(lambda: trainer.train(config, resume=options.resume, fresh=options.fresh, **more), config)


def _post_train(options) -> int:
    with _starting(), _configured(options, options.command) as config:
        return _post_train_on(config, options)


def _post_train_on(config, options) -> int:
    from jaxfb import rl

    return _ended(
        lambda: rl.post_train(config, resume=options.resume, fresh=options.fresh, **_changes(options))
    )


def _ended(train: Callable[[], Any], config: Any = None) -> int:
    """Returns the exit code of a training command; config: of pretraining, for which memory can be planned."""
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
    return RESUMABLE if result.status == "interrupted" else 0


def _lacks_memory(error: Exception, config: Any) -> bool:
    """Returns whether memory ran out; prints then what the step needs and what would fit."""
    from jaxfb.planner.too_large import advice, is_lack_of_memory

    if not is_lack_of_memory(error):
        return False
    import jax

    from jaxfb.config import Config
    from jaxfb.training.machine import bytes_of_device

    first = str(error).partition("\n")[0][:300] or "no memory left on the host"
    print(f"jaxfb: [memory] the run does not fit: {first}", file=sys.stderr)
    if isinstance(config, Config):
        print(advice(config, jax.devices(), bytes_of_device(jax.local_devices())), file=sys.stderr)
    else:
        print("use fewer rows a microbatch, parallel.remat=full, or more devices", file=sys.stderr)
    return True


def _evaluate(options) -> int:
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
    run_dir = _run_dir(options.run_dir)
    given = {name: getattr(options, name) for name in ("tokens", "temperature", "seed")}
    from jaxfb import trainer

    given = {name: value for name, value in given.items() if value is not None}
    raw = {"raw": True} if options.raw else {}
    text = trainer.generate(run_dir, options.prompt, **given, **raw)
    print(text)


def _chaos(options) -> int:
    for name in ("kills", "flips"):
        integer(f"--{name}", getattr(options, name), least=0)
    from jaxfb.chaos import command

    return command.main(options.kills, options.flips, not options.no_faults, tuple(options.overrides))


def _replay(options) -> int:
    from jaxfb.training.dump import read_dump

    dump = read_dump(options.dump)
    from jaxfb import rl, trainer
    from jaxfb.training import replay

    is_post_training = any(section in dump.config for section in ("conversations", "preferences", "task"))
    make_work = rl.make_work if is_post_training else trainer.make_work
    found = replay.replay(options.dump, make_work, _hosts(options))
    print("\n".join(replay.report(found)))
    return DIFFERS if found.is_same is False else 0


def _launch(options) -> int:
    from jaxfb.supervisor import Supervisor, job_command

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
    from jaxfb.pretrained.run import import_run

    target = import_run(options.directory, options.out)
    print(f'wrote {target}; try: jaxfb generate {target} --prompt "..."')


def _export_hf(options) -> None:
    from jaxfb.pretrained.run import export_run, lines

    print(lines(export_run(options.run_dir, options.directory, options.dtype)))


def _check(options) -> int:
    if options.random is not None:
        return _check_random(options)
    if options.config is None:
        raise Refused("check needs a config, such as configs/quickstart.yaml, or --random 20")
    from jaxfb.config import load_config

    config = load_config(options.config, options.overrides, "train")

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
        return DIFFERS
    return 0


def _check_random(options) -> int:
    from jaxfb.checking.command import random_check

    if options.config is not None or options.tolerance is not None:
        raise Refused("--random draws everything itself; leave out the config and --tolerance")
    how = {name: getattr(options, name) for name in RANDOM}
    axes = None if options.axes is None else options.axes.split(",")
    return DIFFERS if random_check(options.random, **how | {"axes": axes}).findings else 0


def _schedule(options) -> None:
    from jaxfb.schedules import command

    costs = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SCHEDULE_COSTS}
    if options.compare:
        print(command.compared(options.pipe, options.microbatches, options.chunks, costs))
        return
    schedule = command.chosen(options.table, options.kind, options.pipe, options.microbatches, options.chunks)
    print(command.described(schedule, costs))
    for path in command.written(schedule, costs, options.out, options.svg, options.trace):
        print(f"wrote {path}")


def _plan(options) -> None:
    from jaxfb.config import load_config
    from jaxfb.planner.topology import parse_topology

    config = load_config(options.config, options.overrides, "train")
    topology = parse_topology(options.topology)
    without_devices()
    from jaxfb.planner import command

    compiles = not options.no_compile
    if options.search:
        command.search(options.config, config, topology, compiles, options.layouts, options.out)
    else:
        command.plan(options.config, config, topology, compiles, options.json)


def _bench(options) -> int:
    from jaxfb import benchmark

    return benchmark.run(options.name, options.arguments)


def _config(options) -> None:
    if options.action == "reference":
        from jaxfb.config.reference import reference

        print(reference(), end="")
        return
    from jaxfb.config import load_config, table
    from jaxfb.display import print_table

    if options.config is None:
        options.refuse("show needs a CONFIG, such as quickstart")
    print_table(options.config, table(load_config(options.config, options.overrides)))


def _run_dir(path: str, overrides: Sequence[str] = (), command: str | None = None) -> Path:
    """Returns the directory of a run, given itself or by the config that made it."""
    from jaxfb.config import load_config

    config = load_config(path, overrides, command)
    return Path(path) if Path(path).is_dir() else Path(config.run.dir)


def _changes(options) -> dict[str, bool]:
    """Returns allow_changes=True if the command has --allow-changes."""
    return {"allow_changes": True} if options.allow_changes else {}


def _hosts(options) -> list[str]:
    """Returns the flags that place this process in its job, as overrides."""
    given = {name: getattr(options, name) for name in HOSTS}
    return [f"hosts.{name}={value}" for name, value in given.items() if value is not None]


def _among_several() -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and jax.distributed.is_initialized()


if __name__ == "__main__":
    sys.exit(main())
