"""Prints a pretraining run's decisions at its start, and its results at its end."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from jaxfb.config import as_yaml, changed_keys
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.data import SplitStats
from jaxfb.data.mixture import MixedRows
from jaxfb.metrics import draw_or_say, plot_losses
from jaxfb.process.whole_file import write_whole
from jaxfb.trainable import pruned
from jaxfb.training.ending import where_it_lies
from jaxfb.training.from_config.sizes import abstract_params
from jaxfb.training.reporting.sample import continue_text
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Run
from jaxfb.training.setup import Setup
from jaxfb.training.work import Table
from jaxfb.types import Pipelined


def start_tables(setup: Setup) -> Iterator[Table]:
    """Yields what differs from the defaults, then what follows from it."""
    keys = ((name, value) for name, value in changed_keys(setup.config) if not name.startswith("hosts."))
    yield "config (keys that differ from their defaults)", ((name, as_yaml(value)) for name, value in keys)
    yield "text", _text(setup)
    yield "model", _model(setup)
    yield "mesh", _mesh(setup)
    yield "batch plans", [(purpose, plan.summary()) for purpose, plan in setup.plan.by_purpose.items()]
    yield "run plan", setup.plan.table()


def summarize(work: Any, metrics: Mapping[str, float], sample: str | None) -> dict[str, Any]:
    """Returns the end of a pretraining run as plain values: losses beside those of counting, and the sample.

    work: a `Pretraining`. metrics: of the last evaluation.
    """
    baselines, state = work.held_out.baselines(), work.train_state
    losses = {"held_out": metrics.get("eval/loss")}
    if baselines:
        losses |= vars(baselines)
    known = {name: loss for name, loss in losses.items() if loss is not None}
    return {
        "applied_updates": int(state.step),
        "nonfinite_updates": int(state.nonfinite_updates),
        "zero_weight_updates": int(state.zero_weight_updates),
        "nats_per_token": known,
        "bits_per_byte": {name: work.held_out.bits_per_byte(loss) for name, loss in known.items()},
        "held_out_accuracy": metrics.get("eval/accuracy"),
        "parameters": _num_params(work.setup),
        "sample": sample,
    }


def write_end(run: Run, summary: dict[str, Any]) -> None:
    """Writes sample.txt and, where matplotlib is installed, loss.png."""
    counted = {name: loss for name, loss in summary["nats_per_token"].items() if name != "held_out"}
    if find_spec("matplotlib"):
        draw_or_say(lambda: plot_losses(run.directory.metrics, run.directory.picture, counted), run.say)
    else:
        run.say("no loss.png without matplotlib; pip install 'jaxfb[plot]'")
    if summary["sample"] is not None:
        write_whole(run.directory.sample, summary["sample"])


def last_lines(config: Any, where: RunDirectory, summary: Mapping[str, Any]) -> Iterator[str]:
    """Yields the held-out loss of the model, a unigram and a bigram, the sample, and where everything lies."""
    yield from loss_lines(summary)
    if summary["sample"]:
        yield f"\na sample at temperature {config.eval.temperature}:\n{indented(summary['sample'])}"
    yield ""
    yield from where_it_lies(where, summary)
    if where.is_kept:
        yield f'try it: {command()} generate {shlex.quote(str(where.path))} --prompt "{config.eval.prompt or "..."}"'


def loss_lines(summary: Mapping[str, Any]) -> Iterator[str]:
    """Returns one line for each model: nats a token, bits a byte; none where no text was held out."""
    if not summary["nats_per_token"]:
        return
    yield f"{'held-out loss':<16}{'nats/token':>12}{'bits/byte':>12}"
    names = {"held_out": "this model", "unigram": "unigram", "bigram": "bigram"}
    for name, nats in summary["nats_per_token"].items():
        bits = summary["bits_per_byte"][name]
        yield f"  {names[name]:<14}{nats:>12.4f}" + ("" if bits is None else f"{bits:>12.4f}")


def sample(setup: Setup, params: Any) -> str | None:
    """Returns the prompt of the config and its continuation; None without a prompt or a tokenizer."""
    settings, tokenizer, sizes = setup.config.eval, setup.corpus.tokenizer, setup.sizes
    # of a model of the user's own it is not known how to sample the next token
    if not settings.prompt or tokenizer is None or isinstance(sizes, OwnModelConfig):
        return None
    text = continue_text(
        sizes,
        params,
        tokenizer,
        settings.prompt,
        tokens=settings.tokens,
        temperature=settings.temperature,
        seed=setup.config.run.seed,
        mesh=setup.mesh if jax.process_count() > 1 else None,
    )
    return settings.prompt + text


def command() -> str:
    """Returns how this user starts jaxfb again: by its name if a shell finds it, otherwise by its path."""
    started = Path(sys.argv[0])
    if started.name != "jaxfb" or shutil.which("jaxfb"):
        return "jaxfb"
    return os.path.relpath(started)


def indented(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


def _text(setup: Setup) -> Iterator[tuple[str, Any]]:
    corpus = setup.corpus
    for name, stats in (("train", corpus.train_stats), ("held out", corpus.held_out_stats)):
        yield name, _split(stats)
    if isinstance(corpus.train, MixedRows):
        total = sum(corpus.train.weights.values())
        for name, rows in corpus.train.parts.items():
            share = corpus.train.weights[name] / total
            yield (
                f"source {name}",
                f"{share:.1%} of the rows of training; {len(rows):,} rows, {rows.num_tokens:,} tokens",
            )
    yield "vocabulary", f"{corpus.vocab_size:,} ids (padded to {setup.sizes.vocab_size:,} in the model)"


def _split(stats: SplitStats) -> str:
    size = "" if stats.bytes is None else f" of {stats.bytes / 1e6:,.2f} MB"
    rows = f"{stats.rows:,} rows, {stats.fill:.1%} full"
    return (
        f"{stats.tokens:,} tokens{size} in {stats.documents:,} document{'s' * (stats.documents != 1)}; {rows}"
    )


def _model(setup: Setup) -> Iterator[tuple[str, Any]]:
    yield "parameters", f"{_num_params(setup):,}"
    if (patterns := trained_patterns(setup.config)) is not None:
        trained = pruned(patterns, abstract_params(setup.config, setup.sizes))
        yield (
            "trained",
            f"{sum(leaf.size for leaf in jax.tree.leaves(trained)):,} of them; the others are frozen",
        )
    if (flops := setup.flops_per_token) is not None:
        yield "flops a token", f"{flops:,.0f} (forward and backward)"
    tokens = setup.plan.train.real_rows * setup.config.data.sequence_length
    yield "tokens an update", f"{tokens:,}"


def _num_params(setup: Setup) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_params(setup.config, setup.sizes)))


def _mesh(setup: Setup) -> Iterator[tuple[str, Any]]:
    devices = setup.mesh.devices.flatten()
    used = f"{len(devices)} of {jax.device_count()} {devices[0].device_kind} ({devices[0].platform})"
    yield "devices", used
    axes = {axis: size for axis, size in setup.mesh.shape.items() if size > 1}
    yield "axes", " x ".join(f"{axis} {size}" for axis, size in axes.items()) or "one device"
    yield "processes", jax.process_count()
    for number, (name, value) in enumerate(setup.train_step(setup.plan.train).compiler_options):
        yield "" if number else "compiler options", f"{name}={as_yaml(value)}"
    schedule = setup.eval_forward.schedule_for(setup.plan.train.num_microbatches)
    if schedule is not None and isinstance(model := setup.model, Pipelined):
        params = abstract_params(setup.config, setup.sizes)
        yield "pipeline", schedule.summary()
        yield "head", setup.eval_forward.head_placement_for(model, params)
