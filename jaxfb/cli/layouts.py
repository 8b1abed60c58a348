"""The commands that show a config or a layout and run nothing: `jaxfb init`, `config`, `plan`, `schedule`."""

from __future__ import annotations

from pathlib import Path

from jaxfb.cli.options import SCHEDULE_COSTS
from jaxfb.training.job.simulated import without_devices


def init(options) -> None:
    """Writes a starter config, or lists them."""
    from jaxfb.config import described_starters, write_starter
    from jaxfb.display import print_table

    if options.name is None:
        print_table("starter configs", described_starters())
        print("copy one with: jaxfb init quickstart")
        return
    written = write_starter(options.name, Path(options.out))
    print("\n".join(f"wrote {path}" for path in written))
    print("train with it:")
    command = written[0].read_text().partition("\n")[0].removeprefix("# ")
    print(f"cd {options.out} && {command}" if Path(options.out).resolve() != Path.cwd() else command)


def config(options) -> None:
    """Prints a config, or the reference of all keys."""
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


def plan(options) -> int:
    """Sizes a config on a topology, or searches its layouts; returns the exit code."""
    from jaxfb.config import load_config, refuse_own_model
    from jaxfb.planner.topology import parse_topology

    config = load_config(options.config, options.overrides)
    refuse_own_model(config, "plan", "use a config with sizes, such as 8b")
    topology = parse_topology(options.topology)
    without_devices()
    from jaxfb.planner import command

    compiles = not options.no_compile
    if options.search:
        return command.search(options.config, config, topology, compiles, options.layouts, options.out)
    return command.plan(options.config, config, topology, compiles, options.json)


def schedule(options) -> None:
    """Prints a pipeline's schedule, or compares all."""
    from jaxfb.schedules import command

    costs = {name.replace("-", "_"): getattr(options, name.replace("-", "_")) for name in SCHEDULE_COSTS}
    if options.compare:
        command.check_compared(
            {name: getattr(options, name) for name in ("kind", "table", "out", "svg", "trace")}
        )
        print(command.compared(options.pipe, options.microbatches, options.chunks, costs, options.pieces))
        return
    sizes = options.pipe, options.microbatches, options.chunks, options.pieces
    schedule = command.chosen(options.table, options.kind, *sizes)
    paths = command.written(schedule, costs, options.out, options.svg, options.trace)
    print(command.described(schedule, costs))
    for path in paths:
        print(f"wrote {path}")
