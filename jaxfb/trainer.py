"""The trainer: a config in, a trained model with its checkpoints, metrics and samples out.

    config -> text, model, mesh, plan -> [rows -> one update -> its numbers] -> evaluate, save -> report

The loop itself is `jaxfb/training/loop.py`, which every kind of training shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxfb.callbacks import Callback
from jaxfb.checkpoint import CannotWrite, CheckpointStore
from jaxfb.config import Config, load_config
from jaxfb.config.sections import HostsConfig
from jaxfb.data import load_tokenizer, prepare
from jaxfb.data.chat import saved_chat
from jaxfb.refusal import integer, number, refuse
from jaxfb.training import loop, report
from jaxfb.training.agreement import what_is_made, what_runs
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.evaluate import HeldOut
from jaxfb.training.guard import NonFiniteAbort
from jaxfb.training.hosts import Hosts, LostProcess
from jaxfb.training.pretraining import Pretraining
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.sample import continue_text
from jaxfb.training.session import Result
from jaxfb.training.setup import Setup, abstract_params, enable_float64, make_setup, model_sizes

__all__ = ["CannotWrite", "LostProcess", "NonFiniteAbort", "Result", "evaluate", "generate", "train"]


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
      CannotWrite: the disk is full or not writable; the message tells which update is saved.
    """
    return loop.run(_pretraining, config, loop.Start(resume, fresh, allow_changes), callbacks)


def _pretraining(config: Config, hosts: Hosts) -> Pretraining:
    return Pretraining(_setup(hosts, config), hosts.say)


def evaluate(run_dir: str | Path, overrides: Sequence[str] = ()) -> dict[str, float]:
    """Held-out loss of a run's newest checkpoint, printed and returned.

    overrides: of the run's config, such as another mesh, `eval.batches=null` or `data.held_out_path=...`.
    """
    config = load_config(run_dir, overrides)
    with Hosts(config.hosts) as hosts:
        config = replace(config, hosts=HostsConfig())
        hosts.agree("config or code", lambda: what_runs(config))
        use_compile_cache()
        setup = _setup(hosts, config)
        hosts.agree("text, plan or devices", lambda: what_is_made(setup))
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


def _saved_params(setup: Setup, directory: RunDirectory) -> tuple[Any, int]:
    """Parameters of the newest checkpoint on this setup's mesh, and the update that they are of."""
    step = setup.train_step(setup.plan.train)
    return _restore(setup.config, directory, step.abstract_state(setup.init_params).params)


def _restore(config: Config, directory: RunDirectory, params: Any) -> tuple[Any, int]:
    store = CheckpointStore(directory.checkpoints, config.checkpoint.keep, config.checkpoint.keep_best)
    state, host = store.restore({"params": params}, partial=True)
    return state["params"], host["update"]


def _setup(hosts: Hosts, config: Config) -> Setup:
    """Returns the setup; its text is read by process 0 before the others look for it."""
    return make_setup(config, hosts.say, lambda data: hosts.in_turn(lambda: prepare(data)))
