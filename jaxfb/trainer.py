"""The trainer: a config in, a trained model with its checkpoints, metrics and samples out.

    config -> text, model, mesh, plan -> [rows -> one update -> its numbers] -> evaluate, save -> report

This file is that line; the rooms are in `jaxfb/training/`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from jaxfb.callbacks import Callback, callback, combine
from jaxfb.checkpoint import CannotWrite, CheckpointStore
from jaxfb.config import Config, load_config
from jaxfb.config.sections import HostsConfig
from jaxfb.data import load_tokenizer, prepare
from jaxfb.data.chat import saved_chat
from jaxfb.metrics import Pending
from jaxfb.refusal import integer, number, refuse
from jaxfb.train_step import StepMetrics
from jaxfb.training import report
from jaxfb.training.agreement import what_is_made, what_runs
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.ending import after_failures, what_is_saved
from jaxfb.training.evaluate import HeldOut
from jaxfb.training.guard import NonFiniteAbort, SkipGuard
from jaxfb.training.hosts import Hosts, LostProcess
from jaxfb.training.interrupt import Interrupt
from jaxfb.training.log import Log, record_of
from jaxfb.training.run import Run
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.run_lock import RunLock, claim, move_aside
from jaxfb.training.sample import continue_text
from jaxfb.training.setup import Setup, abstract_params, enable_float64, make_setup, model_sizes

__all__ = ["CannotWrite", "LostProcess", "NonFiniteAbort", "Result", "evaluate", "generate", "train"]
SHARED_WITHIN_SECONDS = 30  # a network file system may show late what another host wrote


@dataclass(frozen=True)
class Result:
    """How `train` ended.

    status:  "finished" or "interrupted". updates: of the run, consumed so far.
    summary: of a finished run, as in summary.json.
    """

    status: str
    directory: Path
    updates: int
    summary: dict[str, Any] | None = None


def train(
    config: Config,
    *,
    resume: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Trains from a config; everything it makes is in `config.run.dir`.

    resume: continue from the newest checkpoint there, bit for bit as if it had never stopped; without one,
      start. A run that is finished stays as it is.
    fresh: move a run that lies there aside and start over.
    allow_changes: resume with a config that gives the saved parameters or rows another meaning, such as another
      model.rope_theta or text; without it that is refused.
    callbacks: called at every hook, after the trainer's own logging.

    SIGINT and SIGTERM end it after the update in progress, saved. On several processes every one calls this. One
    run at a time writes into a directory (`jaxfb.training.run_lock`), and a run that is refused changes no file there.

    Raises:
      ValueError: an impossible size, a missing file, a saved run in the way or one that is in progress, a checkpoint
        that does not fit.
      LostProcess: another process of the job is gone; what was saved is whole.
      NonFiniteAbort: too many updates in a row were not finite, or the state is not; of it nothing is saved.
      CannotWrite: the disk is full or not writable; the message says which update is saved.
    """
    callbacks = [combine(callbacks)]
    directory = RunDirectory.of(config)
    with Hosts(config.hosts) as hosts, RunLock(directory.path) as lock:
        config = replace(config, hosts=HostsConfig())
        asked = {"resume": resume, "fresh": fresh, "allow_changes": allow_changes}
        hosts.agree("config or code", lambda: what_runs(config, **asked))
        hosts.advise(lambda: _after_a_loss(directory))
        if not fresh and (summary := hosts.first(lambda: directory.finished(config))):
            return _already_finished(hosts, directory, summary["updates"], summary)
        hosts.first(lambda: claim(directory, lock, config, resume, fresh))
        use_compile_cache()
        setup = _agreed_setup(hosts, config)
        if fresh:
            hosts.first(lambda: move_aside(directory, lock))
        with Run(setup, directory, hosts.say) as run, Interrupt() as interrupt:
            if resume:
                run.resume(allow_changes)
            hosts.agree("what they resume from", lambda: {"update": run.done})
            if run.finished:
                return _already_finished(hosts, directory, run.done, None)
            hosts.first(
                lambda: directory.create(config, setup.plan.to_dict(), setup.corpus.tokenizer, run.done)
            )
            _check_shared(hosts, directory)
            if hosts.is_first:
                report.print_start(setup)
            hosts.say(_where_from(run, resume))
            if not run.resumed:
                run.start()
            return _train(hosts, run, callbacks, interrupt)


def evaluate(run_dir: str | Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Held-out loss of a run's newest checkpoint, printed and returned.

    overrides: of the run's config, such as another mesh, `eval.batches=null` or `data.held_out_path=...`.
    """
    config = load_config(run_dir, overrides)
    with Hosts(config.hosts) as hosts:
        config = replace(config, hosts=HostsConfig())
        hosts.agree("config or code", lambda: what_runs(config))
        use_compile_cache()
        setup = _agreed_setup(hosts, config)
        held_out = HeldOut(setup)
        params, update = _saved_params(setup, RunDirectory(Path(run_dir)))
        hosts.agree("the checkpoint", lambda: {"update": update})
        metrics = held_out.evaluate(params)
        if not metrics:
            raise ValueError("[eval] no text was held out; give data.held_out_fraction or data.held_out_path")
        losses = {"held_out": metrics["eval/loss"], **hosts.first(lambda: vars(held_out.baselines()))}
        bits = {name: held_out.bits_per_byte(loss) for name, loss in losses.items()}
        hosts.say(f"{run_dir} after {update} updates, on {int(metrics['eval/tokens']):,} held-out tokens")
        hosts.say("\n".join(report.loss_lines({"nats_per_token": losses, "bits_per_byte": bits})))
        return metrics


def generate(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int | None = None,
    temperature: float | None = None,
    seed: int = 0,
    raw: bool = False,
) -> str:
    """The prompt and its continuation by a run's newest checkpoint; the training text is not needed.

    A run that has a chat template (of `jaxfb sft`, `dpo` or `rl`, or imported with one) is given the prompt as a user's
    message, and its answer follows on a line of its own; raw: the prompt is continued as it stands all the same.

    tokens: at most so many, at least 1. temperature: at least 0, which takes the likeliest token. seed: below 2**32.

    Raises:
      ValueError: one of them is not that, or the run cannot be read.
    """
    who = "[generate]"
    integer("seed", seed, who=who, least=0, most=2**32 - 1)
    if tokens is not None:
        integer("tokens", tokens, who=who)
    if temperature is not None:
        number("temperature", temperature, who=who, least=0)
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        refuse("prompt", prompt, "text in UTF-8", who=who)
    use_compile_cache()
    directory, config = RunDirectory(Path(run_dir)), load_config(run_dir)
    enable_float64(config)
    if not directory.tokenizer.is_file():
        raise ValueError(f"[generate] {run_dir} has no tokenizer.json, so its tokens cannot become text")
    tokenizer = load_tokenizer(directory.tokenizer)
    sizes = model_sizes(config, tokenizer.vocab_size)
    params, _ = _restore(config, directory, abstract_params(config, sizes))
    chat = None if raw else saved_chat(run_dir, tokenizer)
    text = continue_text(
        sizes,
        params,
        tokenizer,
        prompt,
        tokens=tokens or config.eval.tokens,
        temperature=config.eval.temperature if temperature is None else temperature,
        seed=seed,
        chat=chat,
    )
    return prompt + ("" if chat is None or chat.template == "none" else "\n") + text


def _train(hosts: Hosts, run: Run, callbacks: Iterable[Callback], interrupt: Interrupt) -> Result:
    """The loop between its hooks, and how it ended. Process 0 logs; the caller's hooks are called on every one."""
    began = time.monotonic()
    with Log(run, interrupt.fail) if hosts.is_first else nullcontext(Callback()) as log:
        hooks = combine([callback(on_step_start=hosts.reach), log, *callbacks])
        hooks.on_train_start(run)
        params = abstract_params(run.setup.config, run.setup.sizes)
        guard = SkipGuard.of(run.setup.config, params, lambda text: run.say(text))
        try:
            _loop(run, hooks, guard, interrupt)
        except NonFiniteAbort as error:
            run.wait_saved()
            raise NonFiniteAbort(f"{error}; {after_failures(run.newest_saved(), _again(run))}") from None
    run.wait_saved()
    if interrupt.failure:
        raise CannotWrite(f"{interrupt.failure}; {_saved(run)}; make room, then go on with: {_again(run)}")
    if not run.finished:
        hosts.say(f"{interrupt.signal}: {_saved(run)}; go on with: {_again(run)}")
        return Result("interrupted", run.directory.path, run.done)
    sample = report.sample(run)
    summary = hosts.first(lambda: report.summarize(run, time.monotonic() - began, sample))
    hosts.first(lambda: report.write_end(run, summary))
    hooks.on_train_end(run.done, run.metrics)
    if hosts.is_first:
        report.print_end(run, summary)
    return Result("finished", run.directory.path, run.done, summary)


def _loop(run: Run, hooks: Callback, guard: SkipGuard, interrupt: Interrupt) -> None:
    """Every window of rows that is left: read, update, and take the numbers of the update before.

    The host runs one update ahead of the device. On CPU it waits for each before it starts the next, since
    XLA:CPU can deadlock with several queued.
    """
    pending, on_cpu = Pending(), run.setup.mesh.devices.flat[0].platform == "cpu"
    saves = False  # stays due while the latest updates failed

    def arrive(arrived: tuple[int, StepMetrics] | None) -> None:
        if arrived is not None:
            step, metrics = arrived
            guard.check(step, metrics)
            record = record_of(metrics, run.setup.plan.window(step - 1), run.rows_an_epoch)
            hooks.on_step_end(step, record | {"data_wait_seconds": run.waited(step)})

    for window in run.windows():
        step = window.update + 1
        hooks.on_step_start(step)
        try:
            batch = run.read(window)
        except ValueError as error:
            arrive(pending.flush())
            raise _unreadable(run, hooks, guard, error) from None
        hooks.before_update(step, batch)
        if on_cpu:
            arrive(pending.flush())
        arrive(pending.push(step, run.update(window, batch)))
        evaluates, saves = run.is_due("eval"), interrupt.is_due(step) or run.is_due("checkpoint") or saves
        if evaluates or saves:
            arrive(pending.flush())
        if evaluates:
            try:
                metrics = run.evaluate()
            except ValueError as error:
                raise _unreadable(run, hooks, guard, error) from None
            hooks.on_eval(step, metrics)
        if saves and not guard.failed:
            _save(run, hooks)
            saves = False
        if interrupt.signal is not None:
            return
    if guard.failed:
        raise NonFiniteAbort(f"[train] the last updates of the run, {guard.failed} of them, were not finite")


def _save(run: Run, hooks: Callback) -> None:
    if run.save():
        hooks.on_save(run.done, run.directory.checkpoints / str(run.done))


def _saved_params(setup: Setup, directory: RunDirectory) -> tuple[Any, int]:
    """Parameters of the newest checkpoint on this setup's mesh, and the update that they are of."""
    step = setup.train_step(setup.plan.train)
    return _restore(setup.config, directory, step.abstract_state(setup.init_params).params)


def _restore(config: Config, directory: RunDirectory, params: Any) -> tuple[Any, int]:
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep, config.checkpoint.keep_best)
    state, host = store.restore({"params": params}, partial=True)
    return state["params"], host["update"]


def _agreed_setup(hosts: Hosts, config: Config) -> Setup:
    """The setup, its text read by process 0 before the others look for it, once all have the same."""
    setup = make_setup(config, hosts.say, lambda data: hosts.in_turn(lambda: prepare(data)))
    hosts.agree("text, plan or devices", lambda: what_is_made(setup))
    return setup


def _check_shared(hosts: Hosts, directory: RunDirectory) -> None:
    """Every process writes its part of a checkpoint, so run.dir must be one directory for all."""
    if hosts.count == 1:
        return
    mark = hosts.first(directory.mark)
    there = "there" if directory.shows(mark, SHARED_WITHIN_SECONDS) else "missing"
    fact = {f"what process 0 wrote to {directory.path}": there}
    hosts.agree("run.dir, which must be one directory for all", lambda: fact)
    hosts.first(directory.unmark)


def _after_a_loss(directory: RunDirectory) -> str:
    newest = directory.newest_update()
    if newest is None:
        return "nothing is saved yet: start all again"
    return f"update {newest} is saved: start all again with --resume"


def _already_finished(
    hosts: Hosts, directory: RunDirectory, updates: int, summary: dict[str, Any] | None
) -> Result:
    hosts.say(
        f"{directory.path} is finished: {updates} updates. Train it longer with --resume and a greater "
        "length (run.updates=...), or start over with --fresh"
    )
    if summary:
        hosts.say("\n".join(report.loss_lines(summary)))
    return Result("finished", directory.path, updates, summary)


def _where_from(run: Run, resume: bool) -> str:
    if run.resumed:
        return f"resuming {run.directory.path} after update {run.done} of {run.total}"
    return f"nothing to resume in {run.directory.path}: starting at update 0" if resume else "starting"


def _unreadable(run: Run, hooks: Callback, guard: SkipGuard, error: ValueError) -> ValueError:
    """The refusal of rows that cannot be read, after what can still be saved was saved.

    On several processes the others wait in the next update, so that there is nobody to save with.
    """
    if jax.process_count() > 1 or guard.failed or not run.done:
        return error
    _save(run, hooks)
    run.wait_saved()
    return ValueError(f"{error}; {_saved(run)}")


def _saved(run: Run) -> str:
    return what_is_saved(run.done, run.total, run.newest_saved())


def _again(run: Run) -> str:
    return f"{report.command()} train {run.directory.path} --resume"
