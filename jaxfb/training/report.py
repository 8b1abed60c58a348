"""What a run says at its start and at its end: tables of what was decided, then what came of it."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from jaxfb.config import table
from jaxfb.data import SplitStats
from jaxfb.display import duration, print_table
from jaxfb.metrics import plot_losses
from jaxfb.models.config import flops_per_token, num_params
from jaxfb.training.run import Run
from jaxfb.training.run_dir import write_json
from jaxfb.training.sample import continue_text
from jaxfb.training.setup import Setup, abstract_params


def print_start(setup: Setup) -> None:
    """The whole resolved config, then what follows from it."""
    keys = ((name, value) for name, value in table(setup.config) if not name.startswith("hosts."))
    print_table("config", ((name, _as_yaml(value)) for name, value in keys))
    print_table("text", _text(setup))
    print_table("model", _model(setup))
    print_table("mesh", _mesh(setup))
    for purpose, plan in setup.plan.plans.items():
        print_table(f"batch plan: {purpose}", plan.table()[1:])
    print_table("run plan", setup.plan.table())


def summarize(run: Run, seconds: float, sample: str | None) -> dict[str, Any]:
    """The end of a run as plain values: losses beside those of counting, and the sample."""
    baselines = run.held_out.baselines()
    losses = {"held_out": run.metrics.get("eval/loss")}
    if baselines:
        losses |= {"unigram": baselines.unigram, "bigram": baselines.bigram}
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return {
        "updates": run.done,
        "applied_updates": int(run.state.step),
        "nonfinite_updates": int(run.state.nonfinite_updates),
        "zero_weight_updates": int(run.state.zero_weight_updates),
        "nats_per_token": known,
        "bits_per_byte": {name: run.held_out.bits_per_byte(loss) for name, loss in known.items()},
        "held_out_accuracy": run.metrics.get("eval/accuracy"),
        "parameters": num_params(run.setup.sizes),
        "seconds": round(seconds, 2),
        "sample": sample,
    }


def write_end(run: Run, summary: dict[str, Any]) -> None:
    """summary.json, sample.txt and, where matplotlib is installed, loss.png."""
    counted = {name: loss for name, loss in summary["nats_per_token"].items() if name != "held_out"}
    if find_spec("matplotlib"):
        plot_losses(run.directory.metrics, run.directory.picture, counted)
    else:
        run.say("no loss.png without matplotlib; pip install 'jaxfb[plot]'")
    if summary["sample"] is not None:
        run.directory.sample.write_text(summary["sample"])
    write_json(run.directory.summary, summary)


def print_end(run: Run, summary: dict[str, Any], say: Callable[[str], None] = print) -> None:
    """Held-out loss of the model, a unigram and a bigram, the sample, and where everything lies."""
    for line in loss_lines(summary):
        say(line)
    if summary["sample"]:
        say(f"\na sample at temperature {run.setup.config.eval.temperature}:\n{indented(summary['sample'])}")
    where = run.directory
    say(f"\n{summary['updates']} updates in {duration(summary['seconds'])}; everything is in {where.path}:")
    say("  " + "  ".join(where.contents()))
    say(f'go on with: {command()} generate {where.path} --prompt "class Queue:"')


def loss_lines(summary: dict[str, Any]) -> Iterator[str]:
    """One line a model: nats a token, bits a byte."""
    yield f"{'held-out loss':<16}{'nats/token':>12}{'bits/byte':>12}"
    names = {"held_out": "this model", "unigram": "unigram", "bigram": "bigram"}
    for name, nats in summary["nats_per_token"].items():
        bits = summary["bits_per_byte"][name]
        yield f"  {names[name]:<14}{nats:>12.4f}" + ("" if bits is None else f"{bits:>12.4f}")


def sample(run: Run) -> str | None:
    """The prompt of the config and its continuation; None without a prompt or a tokenizer."""
    settings, tokenizer = run.setup.config.eval, run.setup.corpus.tokenizer
    if not settings.prompt or tokenizer is None:
        return None
    text = continue_text(
        run.setup.sizes,
        run.state.params,
        tokenizer,
        settings.prompt,
        tokens=settings.tokens,
        temperature=settings.temperature,
        seed=run.setup.config.run.seed,
        mesh=run.setup.mesh if jax.process_count() > 1 else None,
    )
    return settings.prompt + text


def command() -> str:
    """How this user starts jaxfb again: by its name if a shell finds it, otherwise by its path."""
    started = Path(sys.argv[0])
    if started.name != "jaxfb" or shutil.which("jaxfb"):
        return "jaxfb"
    return os.path.relpath(started)


def indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _as_yaml(value: Any) -> str:
    """As it would be written in the file or on the command line."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)


def _text(setup: Setup) -> Iterator[tuple[str, Any]]:
    corpus = setup.corpus
    for name, stats in (("train", corpus.train_stats), ("held out", corpus.held_out_stats)):
        yield name, _split(stats)
    yield "vocabulary", f"{corpus.vocab_size:,} ids (the model has room for {setup.sizes.vocab_size:,})"


def _split(stats: SplitStats) -> str:
    size = "" if stats.bytes is None else f" of {stats.bytes / 1e6:,.2f} MB"
    rows = f"{stats.rows:,} rows, {stats.fill:.1%} full"
    return f"{stats.tokens:,} tokens{size} in {stats.documents:,} documents; {rows}"


def _model(setup: Setup) -> Iterator[tuple[str, Any]]:
    yield "parameters", f"{num_params(setup.sizes):,}"
    flops = flops_per_token(setup.sizes, setup.config.data.sequence_length)
    yield "flops a token", f"{flops:,} (forward and backward)"
    tokens = setup.plan.train.real_rows * setup.config.data.sequence_length
    yield "tokens an update", f"{tokens:,}"


def _mesh(setup: Setup) -> Iterator[tuple[str, Any]]:
    devices = setup.mesh.devices.flatten()
    used = f"{len(devices)} of {jax.device_count()} {devices[0].device_kind} ({devices[0].platform})"
    yield "devices", used
    axes = {axis: size for axis, size in setup.mesh.shape.items() if size > 1}
    yield "axes", " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one device"
    yield "processes", jax.process_count()
    schedule = setup.eval_forward.schedule_for(setup.plan.train.num_microbatches)
    if schedule is not None:
        yield "pipeline", schedule.summary()
        yield (
            "head",
            setup.eval_forward.head_placement_for(setup.model, abstract_params(setup.config, setup.sizes)),
        )
