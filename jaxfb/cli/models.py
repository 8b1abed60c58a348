"""The commands that use a trained model: `jaxfb eval`, `generate`, `chat`, `import-hf`, `export-hf`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Sequence

from jaxfb.cli.given import hosts_given, model_of, run_dir_of
from jaxfb.cli.options import FILTERS
from jaxfb.process.exit_codes import DONE
from jaxfb.process.signals import terminated_like_ctrl_c
from jaxfb.refusal import Refused, integer


def evaluate(options) -> int:
    """Computes the held-out loss of a run, or scores texts and tasks."""
    if options.text is not None or options.task:
        from jaxfb.inference import command

        return _unless_lost(lambda: command.evaluate(options))
    if options.length is not None:
        raise Refused("--length is the context of --text and --task; give one of them, or leave --length out")
    overrides = [*options.overrides, *hosts_given(options)]
    _check_pretrained(options.run_dir, overrides)
    run_dir = run_dir_of(options.run_dir, overrides, "train")
    from jaxfb import trainer

    return _unless_lost(lambda: trainer.evaluate(run_dir, overrides, as_json=options.json))


def _unless_lost(run: Callable[[], object]) -> int:
    """Returns the exit code of a command that several processes may run together."""
    from jaxfb.training.job.watch import LostProcess

    try:
        run()
    except LostProcess as error:
        print(f"jaxfb: {error}", file=sys.stderr)
        return error.exit_code
    return DONE


def _check_pretrained(path: str, overrides: Sequence[str]) -> None:
    """Refuses a run of post-training, whose held-out loss is not of texts."""
    from jaxfb.config import load_config
    from jaxfb.config.post_training import COMMANDS

    command = COMMANDS.get(type(load_config(path, overrides)))
    if command is not None:
        raise Refused(
            f"{path} is of `jaxfb {command}`, which computes its own held-out numbers (metrics.jsonl); score the model "
            "on a text or a task of yours: jaxfb eval RUN --text FILE, or --task FILE"
        )


def generate(options) -> int:
    """Continues a prompt, or every prompt of a file."""
    is_one = options.samples == 1 and options.out is None and not hosts_given(options)
    if options.prompt is None or not is_one or options.overrides or options.dtype is not None:
        from jaxfb.inference import command

        return _unless_lost(lambda: command.generate(options))
    integer("batch", options.batch, who="[generate]")
    path = model_of(options.run_dir)
    given = {name: getattr(options, name) for name in ("tokens", "temperature", *FILTERS, "seed")}
    given = {name: value for name, value in given.items() if value is not None}
    from jaxfb import trainer

    print(trainer.generate(path, options.prompt, **given, raw=options.raw))
    return DONE


def chat(options) -> None:
    """Talks with a model in the terminal."""
    from jaxfb.inference import command

    command.chat(options)


def import_hf(options) -> None:
    """Makes a run of a directory of Hugging Face files."""
    from jaxfb.training.hugging_face import import_run

    with terminated_like_ctrl_c():  # which removes what was written
        target = import_run(options.directory, options.out)
    print(f'wrote {target}; try: jaxfb generate {shlex.quote(str(target))} --prompt "..."')


def export_hf(options) -> None:
    """Writes a run as Hugging Face files."""
    from jaxfb.training.hugging_face import export_run

    update = _update_of(options.update)
    with terminated_like_ctrl_c():  # which removes what was written
        written = export_run(options.run_dir, options.directory, options.dtype, options.adapter, update)
    for path in written:
        print(f"wrote {path}")


def _update_of(given: str | None) -> int | str | None:
    try:
        return given if given is None else int(given)
    except ValueError:
        return given
