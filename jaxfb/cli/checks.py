"""The commands that put a build to the test: `jaxfb check`, `chaos`, `replay`, `bench`."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxfb.cli.given import hosts_given
from jaxfb.cli.keys import as_typed
from jaxfb.cli.options import RANDOM
from jaxfb.process.exit_codes import DONE, FAILED
from jaxfb.refusal import Refused
from jaxfb.training.job.simulated import simulate_devices

if TYPE_CHECKING:
    from jaxfb.forward_backward.equivalence import Equivalence


def check(options) -> int:
    """Compares a model on a mesh with one device; returns the exit code."""
    if options.random is not None:
        return _check_random(options)
    if options.config is None:
        raise Refused(
            "[check] needs a config or a number of random cases; "
            "use: jaxfb check quickstart, or jaxfb check --random 20"
        )
    from jaxfb.config import load_config, refuse_own_model

    config = load_config(options.config, options.overrides)
    _refuse_post_training(options.config, config)
    refuse_own_model(
        config, "check", "call jaxfb.check_equivalence on it, or use --random 20 --model module:function"
    )
    simulate_devices(vars(config.mesh))
    from jaxfb.training.check import check_config

    print(f"checking the model of {options.config}, made narrow, on simulated devices", file=sys.stderr)
    found = check_config(
        config,
        lambda one: print(
            f"  {one.where}: {'refused' if one.refused else f'{one.size:.1e}'}", file=sys.stderr
        ),
    )
    found = _as_typed(found, options)
    _show(found)
    try:
        found.raise_if_above(options.tolerance)
    except AssertionError as error:
        print(f"jaxfb: {str(error).partition(chr(10))[0]}", file=sys.stderr)
        return FAILED
    print(_verdict(found, options.tolerance))
    return 0


def _refuse_post_training(path: str, config: Any) -> None:
    from jaxfb.config.post_training import COMMANDS

    if (command := COMMANDS.get(type(config))) is not None:
        raise Refused(
            f"[check] {path} is a config for `jaxfb {command}`; `jaxfb check` reads one for `jaxfb train`: give it one "
            "with the same model, mesh and schedule, or call jaxfb.check_equivalence on the loss in a program"
        )


def _verdict(found: Equivalence, tolerance: float | None) -> str:
    """Returns that all comparisons agree, and how many could not be made."""
    from jaxfb.forward_backward.equivalence import TOLERANCES

    limit = TOLERANCES[found.dtype] if tolerance is None else tolerance
    refused = len(found.differences) - len(found.ran)
    left_out = f"; {refused} not compared, for the reasons in the table" if refused else ""
    return f"the same gradients as on one device: all differences are at most {limit:g}{left_out}"


def _show(found: Equivalence) -> None:
    """Prints the table of what was compared.

    Raises:
      ValueError: nothing could be compared. The reason of a single case is left to `raise_if_above`.
    """
    if not found.ran and len(found.differences) == 1:
        return
    print(found)
    if not found.ran:
        raise Refused(
            "[check] no mesh and schedule could be compared with one device; the table has the reasons"
        )


def _as_typed(found: Equivalence, options) -> Equivalence:
    """Returns the same with the keys of the config in each refusal."""
    rows = (replace(one, refused=as_typed(one.refused or "", options) or None) for one in found.differences)
    return replace(found, differences=tuple(rows))


def _check_random(options) -> int:
    from jaxfb.checking.command import random_check

    if options.config is not None or options.tolerance is not None:
        raise Refused("[check] --random draws everything itself; leave out the config and --tolerance")
    how: dict[str, Any] = {name: getattr(options, name) for name in RANDOM}
    how["axes"] = None if options.axes is None else options.axes.split(",")
    return FAILED if random_check(options.random, **how).findings else 0


def chaos(options) -> int:
    """Breaks runs on purpose; returns the exit code."""
    for name in ("kills", "flips", "skip"):
        if (given := getattr(options, name)) < 0:
            raise Refused(f"[chaos] --{name} {given} must not be negative; use --{name} 0 for none")
    if own := [text for text in options.overrides if text.startswith("run.dir=")]:
        raise Refused(
            f"[chaos] {own[0]}: its runs, which it breaks, are in a temporary directory; leave run.dir out"
        )
    from jaxfb.chaos import command

    faults, overrides = not options.no_faults, tuple(options.overrides)
    return command.main(options.kills, options.flips, faults, overrides, options.skip)


def replay(options) -> int:
    """Computes a dumped update again; returns the exit code."""
    from jaxfb.training.guarding.dump import read_dump

    dump = read_dump(options.dump)
    from jaxfb import rl, trainer
    from jaxfb.training.guarding import replay

    is_post_training = any(section in dump.config for section in ("conversations", "preferences", "task"))
    make_work = rl.make_work if is_post_training else trainer.make_work
    found = replay.replay(options.dump, make_work, hosts_given(options))
    print("\n".join(replay.report(found)))
    return FAILED if found.is_same is False else DONE


def bench(options) -> int:
    """Runs a benchmark; returns the exit code."""
    from jaxfb.cli import bench as benchmark

    return benchmark.run(options.name, options.arguments)
