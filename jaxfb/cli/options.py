"""The commands and options of `jaxfb`, as argparse reads them; `commands.py` names what each command does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from jaxfb import __version__
from jaxfb.cli.parser import OVERRIDE, Parser, not_taken
from jaxfb.process.exit_codes import REFUSED
from jaxfb.schedules import NAMES

CONFIG = "a YAML file, a run's directory, or the name of a starter config such as {}"
RUN = "a run directory, or a config that names it in run.dir"
MODEL = f"{RUN}, or a directory of Hugging Face files"
FILTERS = {
    "top_k": (int, "draw among the k likeliest tokens"),
    "top_p": (float, "draw among the fewest tokens whose probabilities add up to p"),
    "min_p": (float, "draw among tokens at least p times as likely as the likeliest"),
}
RESUME = "continue from the newest checkpoint in run.dir; where there is none, begin a run"
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
    "axes": (str, None, "A,B", "mesh axes of that model (default: pipe,data,fsdp,tensor)"),
}
POST_TRAINING = {
    "sft": "fine-tune on conversations; only the assistant's tokens are in the loss",
    "dpo": "train on preference pairs (DPO and related losses)",
    "rl": "train a policy on rewards of its own samples: GRPO, PPO and related methods",
}
LAUNCHED = ("train", *POST_TRAINING)
TOPOLOGIES = "such as v5p:4x4x8, v5e:4x4, v6e:16x16, tpu7x:4x4x4, cpu:8 or gpu:h100x8"
SCHEDULE_SIZES = {
    "pipe": "devices on the pipe axis",
    "microbatches": "microbatches of an update",
    "chunks": "stages per device (default: depends on the kind)",
    "pieces": "pieces of each sequence, for seq1f1b and seq_abreast (default: 1)",
}
SCHEDULE_COSTS = {
    "forward": "a forward of one microbatch on a device",
    "backward-input": "an input gradient",
    "backward-weight": "a weight gradient",
    "head": "head and loss",
    "attention": "attention to other tokens, as a share of the first three costs; it makes late pieces cost more",
}
STARTERS = {"sft": "sft", "dpo": "dpo", "rl": "grpo_arithmetic"}
"""Command -> the starter config that its help names; of the other commands that is quickstart."""
EXAMPLES = {
    "init": "jaxfb init quickstart",
    "train": "jaxfb train quickstart --smoke",
    "sft": "jaxfb sft sft --smoke",
    "dpo": "jaxfb dpo dpo start.run=runs/sft",
    "rl": "jaxfb rl grpo_arithmetic --smoke",
    "eval": "jaxfb eval runs/quickstart",
    "generate": 'jaxfb generate runs/quickstart --prompt "class Queue:"',
    "chat": "jaxfb chat runs/quickstart",
    "replay": "jaxfb replay runs/quickstart/dumps/update-000100",
    "launch": "jaxfb launch --processes 2 train quickstart",
    "check": "jaxfb check quickstart mesh.pipe=2",
    "schedule": "jaxfb schedule --pipe 4 --microbatches 8 --compare",
    "import-hf": "jaxfb import-hf downloads/model --out runs/imported",
    "export-hf": "jaxfb export-hf runs/quickstart exported",
    "plan": "jaxfb plan 8b --topology v5p:4x4x4",
    "config": "jaxfb config show quickstart",
}
"""A whole command for each; its help and a refusal for lack of arguments end with it."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parses options and overrides in any order, which argparse alone does not."""
    parser = _parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    if not given:
        parser.print_help()
        parser.exit(REFUSED)
    options, rest = parser.parse_known_args(given)
    (commands,) = (one.choices for one in parser._actions if isinstance(one.choices, dict))
    for text in rest:
        if text.startswith("-") or not hasattr(options, "overrides"):
            parser.error(not_taken(commands[options.verb], text))
        options.overrides.append(text)
    return options


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="jaxfb",
        description="Trains transformers with JAX. On any mesh of GPUs or TPUs the gradients are those of one device.",
        epilog="Try `jaxfb train quickstart --smoke` first. `jaxfb COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"jaxfb {__version__}")
    verbs = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in (
        _add_init,
        _add_training,
        _add_eval,
        _add_generate,
        _add_chat,
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
    init = _verb(verbs, "init", "write a starter config to edit, or list them")
    init.add_argument(
        "name",
        nargs="?",
        metavar="NAME",
        help="a starter config, such as quickstart; without a name, list them",
    )
    init.add_argument("--out", default=".", metavar="DIR", help="where to write it (default: here)")


def _add_training(verbs) -> None:
    for name, text in {"train": "train from a config, into a run directory", **POST_TRAINING}.items():
        verb = _verb(verbs, name, text)
        _add_config(verb)
        _add_hosts(verb)
        if name == "train":
            verb.add_argument(
                "--profile", action="store_true", help="trace a few updates into the run's directory"
            )
        _add_where_to_begin(verb)


def _add_eval(verbs) -> None:
    evaluate = _verb(
        verbs,
        "eval",
        "compute the held-out loss of a run's newest checkpoint, or its scores on texts and tasks",
    )
    evaluate.add_argument(
        "run_dir", metavar="RUN", help=f"{RUN}; with --text or --task also a directory of Hugging Face files"
    )
    evaluate.add_argument("--text", metavar="FILE", help="print the perplexity of this text")
    evaluate.add_argument(
        "--task",
        metavar="FILE",
        action="append",
        help="score these questions, in JSON lines (docs/generation.md); may be repeated",
    )
    evaluate.add_argument(
        "--length",
        type=int,
        metavar="N",
        help="longest context in tokens (default: a row of training, 1024 for Hugging Face files)",
    )
    _add_number(evaluate, "--rows", 8, "rows scored at the same time on each replica")
    evaluate.add_argument("--json", action="store_true", help="print the scores as JSON")
    evaluate.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)
    _add_hosts(evaluate)


def _add_generate(verbs) -> None:
    generate = _verb(verbs, "generate", "continue a prompt with a run's newest checkpoint")
    generate.add_argument("run_dir", metavar="RUN", help=MODEL)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue, or the user's message in a chat"
    )
    prompt.add_argument(
        "--prompts", metavar="FILE", help='one prompt per line, or .jsonl with {"prompt"} or {"messages"}'
    )
    _add_sampling(generate)
    _add_number(generate, "--samples", 1, "continuations of each prompt")
    _add_number(generate, "--batch", 16, "rows continued at the same time")
    generate.add_argument("--out", metavar="FILE", help="write the answers as JSON lines")
    generate.add_argument(
        "--raw", action="store_true", help="continue the prompt without the run's chat template"
    )
    _add_hosts(generate)


def _add_chat(verbs) -> None:
    chat = _verb(verbs, "chat", "talk with a run's newest checkpoint in the terminal")
    chat.add_argument("run_dir", metavar="RUN", help=MODEL)
    chat.add_argument("--system", metavar="TEXT", help="the message that the conversation begins with")
    _add_sampling(chat)


def _add_sampling(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--tokens", type=int, metavar="N", help="tokens to generate (default: eval.tokens)")
    verb.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 takes the most likely token"
    )
    for name, (kind, text) in FILTERS.items():
        verb.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=name[-1].upper(), help=text)
    verb.add_argument("--seed", type=int, default=0, metavar="S", help="random seed (default: 0)")
    verb.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16, of parameters and computation (default: as saved)",
    )
    verb.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)


def _add_replay(verbs) -> None:
    text = "compute again the update at which a guard ended a run; exit code 0 if the bits are the same, 1 if not"
    verb = _verb(verbs, "replay", text)
    verb.add_argument("dump", metavar="DUMP", help="a directory RUN/dumps/update-N")
    _add_hosts(verb)


def _add_launch(verbs) -> None:
    text = "run a command as several processes on this machine, and restart it when one is lost"
    launch = _verb(verbs, "launch", text)
    _add_number(launch, "--processes", 1, "processes to start")
    _add_number(launch, "--restarts", 3, "give up after this many restarts in a row")
    launch.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="COMMAND",
        help="the command and its arguments, such as: train CONFIG key=value",
    )


def _add_pretrained(verbs) -> None:
    importing = _verb(verbs, "import-hf", "make a run directory from a directory of Hugging Face files")
    importing.add_argument("directory", metavar="DIR", help="a directory with config.json and *.safetensors")
    importing.add_argument(
        "--out", required=True, metavar="RUN", help="the run directory to write, new or empty"
    )
    exporting = _verb(verbs, "export-hf", "write a run's checkpoint as Hugging Face files")
    exporting.add_argument("run_dir", metavar="RUN", help="a run directory")
    exporting.add_argument("directory", metavar="DIR", help="the directory to write, new or empty")
    exporting.add_argument(
        "--dtype", help="float32, bfloat16 or float16 (default: as imported, else float32)"
    )
    exporting.add_argument(
        "--adapter",
        action="store_true",
        help="write the adapters alone, in PEFT's format (default: merged into the weights)",
    )
    exporting.add_argument(
        "--update",
        metavar="N",
        help="the checkpoint saved after update N, or best: the one whose metric checkpoint.keep_best is best, such as "
        "the one with the lowest held-out loss (default: the newest)",
    )


def _add_check(verbs) -> None:
    text = "compare gradients on a mesh with those of one device, for a config or for random cases"
    check = _verb(verbs, "check", text)
    check.add_argument("config", metavar="CONFIG", nargs="?", help=CONFIG.format("quickstart"))
    check.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)
    check.add_argument(
        "--tolerance",
        type=float,
        help="largest relative difference allowed (default: 1e-10 in float64)",
    )
    group = check.add_argument_group(
        "random cases", "draw models, meshes and options at random; without a config"
    )
    group.add_argument("--random", type=int, metavar="N", help="number of cases")
    for name, (kind, default, metavar, text) in RANDOM.items():
        group.add_argument(f"--{name}", type=kind, default=default, metavar=metavar, help=text)


def _add_chaos(verbs) -> None:
    text = "inject faults into small runs: killed processes, flipped bits, devices that compute wrongly"
    chaos = _verb(verbs, "chaos", text)
    _add_number(chaos, "--kills", 18, "processes to kill")
    _add_number(chaos, "--skip", 0, "leave out the first N kills, to continue an interrupted command")
    _add_number(chaos, "--flips", 20, "bits to flip in checkpoints")
    chaos.add_argument("--no-faults", action="store_true", help="leave out the faults inside a process")
    chaos.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)


def _add_schedule(verbs) -> None:
    text = "print, simulate and draw a pipeline schedule, or compare all kinds"
    schedule = _verb(verbs, "schedule", text)
    for name, size in SCHEDULE_SIZES.items():
        schedule.add_argument(f"--{name}", type=int, metavar="N", help=size)
    schedule.add_argument("--kind", help=f"{', '.join(NAMES)}, or package.module:function")
    schedule.add_argument(
        "--table", metavar="FILE", help="file with your own schedule, in the format that this command prints"
    )
    for name, what in SCHEDULE_COSTS.items():
        default = 0.0 if name in ("head", "attention") else 1.0
        help_ = f"cost of {what} (default: {default:g})"
        schedule.add_argument(f"--{name}", type=float, default=default, metavar="COST", help=help_)
    schedule.add_argument(
        "--compare", action="store_true", help="compare all kinds, and Megatron's schedules"
    )
    schedule.add_argument("--out", metavar="DIR", help="directory for a picture and a Perfetto trace")
    schedule.add_argument("--svg", metavar="FILE", help="write a picture: .svg, .png or .pdf")
    schedule.add_argument("--trace", metavar="FILE", help="write a trace for ui.perfetto.dev")


def _add_plan(verbs) -> None:
    text = (
        "compute whether a config fits a machine and how fast it can run, without the machine; exit code 1 if it does "
        "not fit"
    )
    plan = _verb(verbs, "plan", text)
    _add_config(plan)
    plan.add_argument("--topology", required=True, metavar="NAME", help=TOPOLOGIES)
    plan.add_argument("--no-compile", action="store_true", help="use a formula only, which takes seconds")
    plan.add_argument("--json", action="store_true", help="print the result as JSON")
    plan.add_argument("--search", action="store_true", help="try layouts, and write the fastest that fits")
    _add_number(plan, "--layouts", 24, "layouts that --search lists")
    plan.add_argument("--out", default="plan", metavar="DIR", help="where --search writes (default: plan)")


def _add_bench(verbs) -> None:
    text = "run a benchmark by its name, or list them; `jaxfb bench report` writes docs/performance.md again"
    bench = _verb(verbs, "bench", text)
    bench.add_argument(
        "name", nargs="?", metavar="NAME", help="a benchmark, or report; without a name, list them"
    )
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of that benchmark")


def _add_show(verbs) -> None:
    show = _verb(verbs, "config", "show every key of a config after overrides, or describe all keys")
    show.add_argument(
        "action",
        choices=("show", "reference"),
        metavar="{show,reference}",
        help="show: print every key of a config after overrides; reference: describe all keys, in Markdown",
    )
    show.set_defaults(refuse=show.error)
    show.add_argument("config", nargs="?", metavar="CONFIG", help=f"{CONFIG.format('quickstart')}; for show")
    show.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)


def _add_config(verb: argparse.ArgumentParser) -> None:
    starter = STARTERS.get(verb.get_default("verb"), "quickstart")
    verb.add_argument("config", metavar="CONFIG", help=CONFIG.format(starter))
    verb.add_argument("overrides", nargs="*", metavar=OVERRIDE, help=OVERRIDES)


def _add_where_to_begin(verb: argparse.ArgumentParser) -> None:
    how = verb.add_mutually_exclusive_group()
    how.add_argument("--resume", action="store_true", help=RESUME)
    how.add_argument(
        "--fresh", action="store_true", help="move an existing run in run.dir aside and start over"
    )
    how.add_argument(
        "--smoke",
        action="store_true",
        help="run a few updates without warm-up in a temporary directory, which is removed at the end",
    )
    changes = (
        "resume although a key was changed that saved parameters or rows depend on, such as model.rope_theta"
    )
    verb.add_argument("--allow-changes", action="store_true", help=changes)


def _add_hosts(verb: argparse.ArgumentParser) -> None:
    group = verb.add_argument_group(
        "several processes",
        "only needed where Slurm, Open MPI, Kubernetes or a TPU pod does not provide this",
    )
    for name, (kind, metavar, text) in HOSTS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


def _add_number(verb: argparse.ArgumentParser, name: str, default: int, text: str) -> None:
    verb.add_argument(name, type=int, default=default, metavar="N", help=f"{text} (default: {default})")


def _verb(verbs, name: str, text: str) -> argparse.ArgumentParser:
    """Adds a command, which `commands.py` finds under its name."""
    example = EXAMPLES.get(name)
    epilog = f"Example: {example}" if example else None
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", epilog=epilog)
    verb.example = example
    verb.set_defaults(verb=name)
    return verb
