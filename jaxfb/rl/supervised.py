"""Supervised fine-tuning: learn the tokens that count. The work of `jaxfb sft`, and the warm start of a policy.

conversations -> rows -> [rows of one window -> forward_backward -> one optax update] -> held-out loss
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

import jax
import numpy as np

from jaxfb.batch_plan import BatchPlan, RunPlan, explain_difference, explain_shift
from jaxfb.config.policy import WarmStartConfig
from jaxfb.config.post_training import DPOConfig, SFTConfig
from jaxfb.data.chat import Message
from jaxfb.data.conversations import cut_to, longest, read_conversations, split_held_out, warn_of_shared
from jaxfb.data.token_rows import token_rows
from jaxfb.mesh import data_parallel
from jaxfb.metrics import plot_losses
from jaxfb.optim import lr_schedule, make_optimizer
from jaxfb.refusal import Refused
from jaxfb.rl.advice import planned
from jaxfb.rl.rows import Rows, Stream, count, cut, digest, held_out_means
from jaxfb.rl.start import Base, make_base, row_multiple
from jaxfb.rl.work import PostTraining, flat
from jaxfb.training.from_config.options import step_options
from jaxfb.training.machine import check_table
from jaxfb.training.run_dir import RunDirectory
from jaxfb.update.train_state import StepMetrics, TrainState
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any


@dataclass
class SupervisedWork(PostTraining):
    """A run over rows in memory. Also the part that preferences share: only the loss differs.

    model: a Pipelined with a loss, updated and evaluated. term: of the loss; its mean over held-out rows is eval/loss.
    """

    term: ClassVar[str] = "cross_entropy"
    base: Base
    plan: RunPlan
    stream: Stream
    held_out: Rows
    step: TrainStep
    model: Any

    def __post_init__(self):
        super().__init__()
        self._text = digest(self.stream.rows)

    def tables(self) -> Iterable[tuple[str, Iterable[tuple[str, Any]]]]:
        yield "chat", self.base.chat.table()
        yield "rows", [("train", count(self.stream.rows)), ("held out", count(self.held_out))]
        yield "batch plans", [(purpose, plan.summary()) for purpose, plan in self.plan.by_purpose.items()]
        yield "run plan", self.plan.table()

    @property
    def row_length(self) -> int:
        return self.stream.rows["tokens"].shape[1]

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "seed": self.base.config.run.seed, "text": self._text}

    def facts(self) -> Mapping[str, Any]:
        return {**super().facts(), "text: held out": digest(self.held_out)}

    def start(self, say: Callable[[str], None]) -> None:
        self.train_state = self.base.begin(self.step)

    def read(self, number: int) -> Rows:
        return self.stream.read(self.plan.window(number))

    def update(self, number: int, rows: Rows) -> tuple[StepMetrics, dict[str, Any]]:
        window = self.plan.window(number)
        batch, padding = cut(rows, window.plan)
        metrics, seconds = self.apply(self.step, batch, window.rows)
        epoch = window.end / count(self.stream.rows)
        tokens = int((rows["segments"] > 0).sum())
        counted = {"tokens": tokens, "rows": window.rows, "epoch": epoch, "padding_fraction": padding}
        return metrics, {**counted, **seconds}

    def evaluate(self) -> dict[str, float]:
        if not count(self.held_out):
            return {}
        plan = self.plan.by_purpose["eval"]
        found = held_out_means(self.base.forward, self.model, self.train_state.params, self.held_out, plan)
        loss = found.pop(f"eval/{self.term}", None)
        return found if loss is None else {"eval/loss": loss, **found}

    def host(self, done: int) -> dict[str, Any]:
        return {}

    def abstract_state(self) -> PyTree:
        return flat(self.step.abstract_state(self.base.init_params))

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        saved = record["plan"]
        mine = {name: self.to_dict()[name] for name in ("seed", "dataset_rows")}
        before = {**saved["plans"]["train"], **{name: saved[name] for name in mine}}
        # first, since nothing allows it: the other refusal offers to allow other rows
        if difference := explain_difference(before, self.plan.train, **mine):
            raise Refused(difference)
        if shift := explain_shift(self.plan, record["update"], self._consumed(saved, record["update"])):
            raise Refused(shift)
        if not allow_changes:
            self.check_same_text(saved)

    def _consumed(self, saved: Mapping[str, Any], update: int) -> int:
        """Returns the rows that a run of the saved length consumed in so many updates."""
        if update == 0:
            return 0
        plan = replace(self.plan, updates=saved["updates"], epochs=saved["epochs"])
        return plan.window(update - 1).end

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        self.train_state = TrainState(**state)

    def summary(self) -> dict[str, Any]:
        return {**super().summary(), "rows": count(self.stream.rows)}

    def plot(self, directory: RunDirectory) -> None:
        if find_spec("matplotlib"):
            plot_losses(directory.metrics, directory.picture)


def make_supervised_work(config: SFTConfig, fresh: bool = False) -> SupervisedWork:
    """Builds everything a run is made of; nothing is compiled. fresh: as for `make_base`."""
    base = make_base(config, fresh)
    section = config.conversations
    train = read_conversations(section.path)
    if section.held_out_path:
        held_out = read_conversations(section.held_out_path)
        warn_of_shared(train, held_out, "conversations")
    else:
        train, held_out = split_held_out(train, section.held_out_fraction)
    base.check_characters(message["content"] for messages in train for message in messages)
    encoded = [base.chat.encode(conversations, section.learn) for conversations in (train, held_out)]
    length = row_length(base, "conversations", longest(*(ids for ids, _ in encoded)))
    check_table("conversations", len(train) + len(held_out), length)
    warn_of_cut("conversations", encoded, length)
    rows = [token_rows(*cut_to(*one, length), length) for one in encoded]
    if train and not np.any(rows[0]["loss_mask"]):
        raise Refused(
            f"[conversations] nothing is learned from {section.path}: no conversation has a token of the assistant "
            f"among its first {length}; give conversations with messages of the assistant, or a larger sequence_length"
        )
    _warn_of_unanswered(encoded)
    return work_on(SupervisedWork, base, rows[0], rows[1], base.model)


def work_on(
    kind: type,
    base: Base[SFTConfig] | Base[DPOConfig],
    train: Rows,
    held_out: Rows,
    model: Any,
    purposes: Sequence[str] = (),
) -> Any:
    """Builds that kind of work on these rows, with plans, optimizer and step by the config.

    purposes: of forward passes over all rows beside "eval", in batches of as many rows as an update has.
    """
    config, length = base.config, train["tokens"].shape[1]
    plans = update_plans(base, length, [*purposes, *(["eval"] if count(held_out) else [])])
    total = count(train)
    if not total:
        raise Refused("[data] there is no row to train on; give more data, or a smaller held_out_fraction")
    run = RunPlan(plans, updates=config.batch.updates, epochs=config.batch.epochs, dataset_rows=total)
    step = base.train_step(model, plans["train"], run)
    return kind(base, run, Stream(train, config.run.seed), held_out, step, model)


def update_plans(
    base: Base[SFTConfig] | Base[DPOConfig], length: int, purposes: Sequence[str]
) -> dict[str, BatchPlan]:
    """Makes the plan of the updates and those of other purposes, of as many rows as an update has.

    Raises:
      PlanError: a purpose has no plan, or its rows cannot be cut; it names changes of the config.
    """
    needed = ["train", *purposes]
    return planned(base, lambda base: base.plans(dict.fromkeys(needed, base.config.batch.rows), length))


def row_length(base: Base, name: str, tokens: int, sequences: int = 1) -> int:
    """Returns the section's `sequence_length` if its slots hold the longest sequence and the mesh can cut it.

    tokens: of the longest sequence; it needs one slot less. sequences: how many share a row in equal parts.

    Raises:
      ValueError: a sequence is longer and `truncate` is false, or the mesh cannot cut a row.
    """
    section = getattr(base.config, name)
    length, multiple = section.sequence_length, row_multiple(base.mesh)
    needed = max(tokens - 1, 1) * sequences
    if needed > sequences * (length // sequences) and not section.truncate:
        enough = -(-needed // multiple) * multiple
        each = f", {length // sequences} for each of {sequences}" * (sequences > 1)
        raise Refused(
            f"[{name}] sequence_length={length} has slots for {length} tokens{each}, the longest item needs "
            f"{tokens - 1}; use {name}.sequence_length={enough}, or {name}.truncate=true to cut it",
            [{f"{name}.sequence_length": enough}, {f"{name}.truncate": True}],
        )
    if length % multiple:
        use = -(-length // multiple) * multiple
        raise Refused(
            f"[{name}] sequence_length={length} is not a multiple of 2 * mesh.context = {multiple}; use "
            f"{name}.sequence_length={use}",
            [{f"{name}.sequence_length": use}],
        )
    return length


def warn_of_cut(name: str, encoded: Sequence[tuple[list, list]], length: int, sequences: int = 1) -> None:
    """Warns of sequences that are longer than their part of a row, with what of their answers is cut off.

    encoded: (ids, counts) of the sequences of each table. name: the section of the config.
    sequences: how many share a row of `length` slots in equal parts.
    """
    both, end = [one for side in encoded for one in zip(*side, strict=True)], length // sequences + 1
    long = [counts for ids, counts in both if len(ids) > end]
    if not long:
        return
    learnt, lost = sum(int(one.sum()) for _, one in both), sum(int(one[end:].sum()) for one in long)
    empty = sum(bool(one.any()) and not one[1:end].any() for one in long)
    enough = (longest(*(ids for ids, _ in encoded)) - 1) * sequences
    warnings.warn(
        f"[{name}] truncate=true cuts {len(long)} of {len(both)} conversations after {end} tokens, and with them "
        f"{lost} of the {learnt} tokens of answers; {empty} keep no token of an answer and weigh nothing; "
        f"{name}.sequence_length={enough} cuts none",
        stacklevel=3,
    )


def _warn_of_unanswered(encoded: Sequence[tuple[list, list]]) -> None:
    """Warns of conversations without a message of the assistant: they take rows of updates and weigh nothing.

    encoded: (ids, counts) of the conversations of each table.
    """
    counts = [one for _, side in encoded for one in side]
    unanswered = sum(not one.any() for one in counts)
    if unanswered:
        warnings.warn(
            f"[conversations] {unanswered} of {len(counts)} conversations have no message of the assistant, and weigh "
            "nothing; remove them",
            stacklevel=3,
        )


def fine_tuned(
    base: Base,
    params: PyTree | Callable[[jax.Array], PyTree],
    pairs: Sequence[tuple[Sequence[Message], str]],
    length: int,
    settings: WarmStartConfig,
    say: Callable[[str], None],
) -> PyTree:
    """Returns the parameters after `settings.updates` updates on pairs of messages and the answer to learn."""
    rows = _answered(base, pairs, length)
    plan = BatchPlan(
        rows=settings.rows, num_microbatches=1, data_parallel=data_parallel(base.mesh), remainder="pad"
    )
    run = RunPlan(plan, updates=settings.updates)
    rate = lr_schedule(
        "constant", peak=settings.learning_rate, total=settings.updates, warmup=settings.updates // 20
    )
    optimizer, options = make_optimizer("adamw", learning_rate=rate), step_options(base.config)
    step = make_train_step(base.model, optimizer, base.mesh, plan, max_grad_norm=1.0, **options)
    stream, state = Stream(rows, base.config.run.seed), step.init(params, base.config.run.seed)
    for window in run.windows():
        state, metrics = step(state, stream.read(window), window.rows)
        loss = float(metrics.loss)  # waits: XLA:CPU can deadlock with several updates queued
        if window.update % 100 == 0 or window.update == settings.updates - 1:
            say(f"warm start {window.update + 1}/{settings.updates}  loss {loss:.4f}")
    return state.params


def _answered(base: Base, pairs: Sequence[tuple[Sequence[Message], str]], length: int) -> Rows:
    """Makes rows of prompts with their answers, without what a template writes after the stop token."""
    whole = [(*prompt, {"role": "assistant", "content": answer}) for prompt, answer in pairs]
    ids, counts = base.chat.encode(whole, "last", "task")
    ends = [int(np.flatnonzero(one)[-1]) + 1 for one in counts]
    kept = lambda part: [one[:end] for one, end in zip(part, ends, strict=True)]  # noqa: E731
    return token_rows(kept(ids), kept(counts), length)
