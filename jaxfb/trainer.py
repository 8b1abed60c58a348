"""The trainer: a config in, a trained model with its checkpoints, metrics and samples out.

    config -> text, model, mesh, plan -> [rows -> one update -> its numbers] -> evaluate, save -> report

The loop itself is `jaxfb/training/loop.py`, which every kind of training shares.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import optax

from jaxfb import gradients
from jaxfb.callbacks import Callback, checked
from jaxfb.checkpoint.cannot_write import CannotWrite
from jaxfb.config import Config, CustomConfig, config_from_dict, load_config, refuse_own_model
from jaxfb.config.operation import HostsConfig
from jaxfb.data import load_tokenizer, prepare
from jaxfb.inference.complete import Sampling, complete, is_answered, sampling_of
from jaxfb.inference.model import open_model
from jaxfb.inference.prompts import check_prompt
from jaxfb.metrics.strict_json import strict_json
from jaxfb.refusal import Refused, boolean, function_of, instance, integer, number, refuse
from jaxfb.training import loop
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.custom import Custom, described, make_custom
from jaxfb.training.evaluate import HeldOut
from jaxfb.training.guard import DeviceFault, GuardAbort, NonFiniteAbort, SpikeAbort
from jaxfb.training.guarding.replay import Replay, replay
from jaxfb.training.job.agreement import what_is_made, what_runs
from jaxfb.training.job.hosts import Hosts
from jaxfb.training.job.watch import LostProcess
from jaxfb.training.open_mesh import with_mesh
from jaxfb.training.origins import of_model
from jaxfb.training.parameters import newest_params
from jaxfb.training.persistence.changes import check_model, other_text
from jaxfb.training.pretraining import Pretraining
from jaxfb.training.reporting import report
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.session import Result
from jaxfb.training.setup import Setup, make_setup
from jaxfb.training.work import Work

__all__ = [
    "CannotWrite",
    "DeviceFault",
    "GuardAbort",
    "LostProcess",
    "NonFiniteAbort",
    "Replay",
    "Result",
    "SpikeAbort",
    "Trainer",
    "evaluate",
    "generate",
    "train",
]

_WHO = "[trainer]"


def train(
    config: Config | CustomConfig,
    *,
    resume: bool = False,
    fresh: bool = False,
    allow_changes: bool = False,
    callbacks: Iterable[Callback] = (),
) -> Result:
    """Trains from a config; everything it makes is in `config.run.dir`.

    SIGINT, SIGTERM and SIGHUP end it after the update in progress, saved. On several processes every one calls this.
    One run at a time writes into a directory (`jaxfb.training.persistence.run_lock`); one that is refused changes no
    file there.

    Args:
      config: as `load_config` returns it.
      resume: continue from the newest checkpoint there, bit for bit as if it had never stopped; without one,
        start. A run that is finished stays as it is.
      fresh: move a run that lies there aside and start over.
      allow_changes: resume with a config that gives the saved parameters or rows another meaning, such as another
        model.rope_theta or text; without it that is refused.
      callbacks: called at every hook, after the trainer's own logging.
    Raises:
      ValueError: an impossible size, a missing file, a saved run in run.dir or one that is in progress, a checkpoint
        that does not fit.
      LostProcess: another process of the job is gone; what was saved is whole.
      NonFiniteAbort: too many updates in a row were not finite, or the state is not; of it nothing is saved.
      CannotWrite: the disk is full or not writable; the message names the update that is saved.
    """
    kinds = (Config, CustomConfig)
    instance("config", config, kinds, "a config of `jaxfb train`, such as jaxfb.load_config('quickstart')")
    return loop.run(make_work, config, loop.Start(resume, fresh, allow_changes), callbacks)


class Sections(TypedDict, total=False):
    """The further sections and keys of `CustomConfig` that `Trainer` takes, for editors and type checkers."""

    batch: Mapping[str, Any]
    run: Mapping[str, Any]
    eval: Mapping[str, Any]
    mesh: Mapping[str, Any]
    schedule: str | None
    chunks: int
    trainable: Sequence[str] | None
    precision: Mapping[str, Any]
    parallel: Mapping[str, Any]
    checkpoint: Mapping[str, Any]
    log: Mapping[str, Any]
    guard: Mapping[str, Any]
    hosts: Mapping[str, Any]
    plugins: Sequence[str]


class Trainer:
    """Trains any model with the loop of `jaxfb train`: resume, several hosts, guard, checkpoints, logging, callbacks.

        trainer = jaxfb.Trainer(
            model=loss_fn, params=init, data=rows, optimizer=optax.adam(1e-3),
            dir="runs/mine", updates=1000, rows=64, rows_per_microbatch=8,
        )
        trainer.train(resume=True)

    Args:
      model: `loss_fn(params, microbatch, rng) -> Sum | LossOutput`, a `Pipelined`, or, with `loss`, a function of the
        same arguments that returns predictions.
      params: a pytree of float arrays, or a function of a PRNG key that returns one (then drawn sharded, from `seed`).
      data: arrays [rows, ...] in a tree, a sequence of rows (a grain MapDataset too), or an iterable of rows (a grain
        IterDataset too, whose position is saved), or a `jaxfb.data.Mixture` of arrays and sequences. Arrays and
        sequences are shuffled each epoch by the seed alone; a resumed run reads the consumed rows of an iterable
        without get_state again.
      optimizer: any optax transformation.
      loss: `loss(predictions, microbatch) -> Sum | LossOutput`; None where the model returns its terms itself.
      evaluate: a function of the parameters that returns numbers by name, called on every process; None: none. Arrays
        that it returns go into no record: callbacks read them as `run.outputs`.
      callbacks: see `jaxfb.Callback`; called on every process.
      dir: the run directory.
      rows: of one update, over all replicas.
      rows_per_microbatch, num_microbatches: how an update's rows are cut; one of them.
      updates, epochs: the length of the run; one of them.
      max_grad_norm: the global norm to clip to before the optimizer; None leaves that to the optimizer.
      seed: of parameters, dropout and the order of rows.
      sections: further sections or keys of a config: mesh={"fsdp": 8}, checkpoint={"every": 100}, eval={"every": 100},
        log={"every": 10}, precision={"compute_dtype": "bfloat16"}, parallel={"remat": "full"}, schedule="1f1b",
        chunks=1, hosts={...}, batch={"ramp_up": ...}, run={"max_nonfinite": 10}.
    Raises:
      ValueError: a section or key is unknown, or a value illegal; nothing is written before `train`.
    """

    def __init__(
        self,
        *,
        model: Any,
        params: Any,
        data: Any,
        optimizer: optax.GradientTransformation,
        dir: str | Path,
        rows: int,
        rows_per_microbatch: int | None = None,
        num_microbatches: int | None = None,
        updates: int | None = None,
        epochs: float | None = None,
        loss: Callable | None = None,
        evaluate: Callable[[Any], Mapping[str, float]] | None = None,
        callbacks: Iterable[Callback] = (),
        max_grad_norm: float | None = None,
        seed: int = 0,
        **sections: Unpack[Sections],
    ):
        further: dict[str, Any] = {**sections}
        _check_parts(optimizer, loss, evaluate)
        _check_settings(dir, max_grad_norm, further)
        self._parts = {
            "model": model, "params": params, "data": data, "evaluate": evaluate, "loss": loss, "optimizer": optimizer
        }  # fmt: skip
        names = {name: described(self._parts[name]) for name in ("model", "params", "data")}
        cut = {"rows": rows, "rows_per_microbatch": rows_per_microbatch, "num_microbatches": num_microbatches}
        run = {"dir": str(dir), "updates": updates, "epochs": epochs, "seed": seed}
        given = {
            **further,
            "batch": {**cut, **further.get("batch", {})},
            "run": {**run, **further.get("run", {})},
        }
        self.config: CustomConfig = config_from_dict({**names, **given})
        for name, size in {**cut, "updates": updates}.items():
            if size is not None:
                integer(name, size, who=_WHO)
        self._callbacks, self._max_grad_norm = checked(callbacks), max_grad_norm

    def train(self, *, resume: bool = False, fresh: bool = False, allow_changes: bool = False) -> Result:
        """Runs to the end, to a signal, or until a callback stops it; the arguments are those of `jaxfb.train`."""
        start = loop.Start(resume, fresh, allow_changes)
        return loop.run(self._work, self.config, start, self._callbacks)

    def replay(self, dump: str | Path) -> Replay:
        """Computes again the update at which a guard ended a run of this trainer; `dump`: RUN/dumps/update-N."""
        return replay(dump, self._work)

    def _work(self, config: CustomConfig, hosts: Hosts) -> Custom:
        return make_custom(config, max_grad_norm=self._max_grad_norm, **self._parts)


def _check_parts(optimizer: Any, loss: Any, evaluate: Any) -> None:
    """Refuses an optimizer that is not optax's, and functions that take other arguments."""
    instance("optimizer", optimizer, optax.GradientTransformation, "an optax transformation", who=_WHO)
    if loss is not None:
        function_of("loss", loss, "(predictions, microbatch)", who=_WHO)
    if evaluate is not None:
        function_of("evaluate", evaluate, "(params)", who=_WHO)


def _check_settings(directory: Any, max_grad_norm: Any, sections: Mapping[str, Any]) -> None:
    """Refuses what the checks of a config would not see, or would not name as the argument that it is."""
    if not isinstance(directory, str | os.PathLike) or not str(directory) or "\0" in str(directory):
        refuse("dir", directory, "the path of a run directory", who=_WHO)
    gradients.check_clipping(max_grad_norm)
    for name in ("batch", "run"):
        if not isinstance(sections.get(name, {}), Mapping):
            refuse(name, sections[name], "a section of a config, its keys and their values", who=_WHO)
    if not isinstance(sections.get("schedule"), str | None):
        rule = 'the name of a kind of schedule, or "package.module:function" of a kind of your own'
        refuse("schedule", sections["schedule"], rule, who=_WHO)


def make_work(config: Config | CustomConfig, hosts: Hosts) -> Work:
    """Returns everything that a training config describes, ready to run; nothing is compiled."""
    if isinstance(config, CustomConfig):
        return make_custom(config)
    return Pretraining(_setup(hosts, config, hosts.say), hosts.say)


def evaluate(
    run_dir: str | Path, overrides: Sequence[str] = (), *, as_json: bool = False
) -> dict[str, float]:
    """Computes the held-out loss of a run's newest checkpoint, prints and returns it.

    overrides: of the run's config, such as another mesh, `eval.batches=null` or `data.held_out_path=...`.
    as_json: prints what is returned, and the update, as JSON instead of sentences.

    Raises:
      ValueError: there is nothing to evaluate on, or overrides that would read the parameters or token ids wrongly.
    """
    config = load_config(run_dir, overrides)
    refuse_own_model(config, "eval", "its function `evaluate` runs during training, every eval.every updates")
    with Hosts(config.hosts) as hosts:
        config = replace(config, hosts=HostsConfig())
        hosts.agree("config or code", lambda: what_runs(config))
        config = with_mesh(config, hosts)
        use_compile_cache()
        setup = _setup(hosts, config, partial(hosts.say, file=sys.stderr) if as_json else hosts.say)
        hosts.agree("text, plan or devices", lambda: what_is_made(setup))
        held_out = HeldOut(setup)
        _check_tokenizer(setup, RunDirectory(Path(run_dir)))
        hosts.agree(f"the model {run_dir}", lambda: of_model(Path(run_dir), config))
        params, update = _saved_params(
            setup, RunDirectory(Path(run_dir)), partial(hosts.say, file=sys.stderr)
        )
        hosts.agree("the checkpoint", lambda: {"update": update})
        metrics = held_out.evaluate(params)
        if not metrics:
            raise Refused("[eval] no text was held out; give data.held_out_fraction or data.held_out_path")
        if as_json:
            hosts.say(strict_json({"update": update, "scores": {"held_out": metrics}}, indent=1))
            return metrics
        losses = {"held_out": metrics["eval/loss"], **hosts.first(lambda: vars(held_out.baselines()))}
        bits = {name: held_out.bits_per_byte(loss) for name, loss in losses.items()}
        tokens = f"{int(metrics['eval/tokens']):,} held-out tokens of {config.data.held_out_from}"
        hosts.say(f"{run_dir} after {update} updates, on {tokens}")
        hosts.say("\n".join(report.loss_lines({"nats_per_token": losses, "bits_per_byte": bits})))
        return metrics


def generate(
    run_dir: str | Path,
    prompt: str,
    *,
    tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    seed: int = 0,
    raw: bool = False,
) -> str:
    """Returns the prompt and its continuation by a run's newest checkpoint; the training text is not needed.

    A run that has a chat template (of `jaxfb sft`, `dpo` or `rl`, or of a model that it began with) is given the prompt
    as a user's message, and its answer follows on its own line; raw: the prompt is continued as it stands all the same.

    run_dir: a run, a config that names one, or a directory of Hugging Face files. tokens: at most so many, at least 1.
    temperature: at least 0, which takes the likeliest token. top_k, top_p, min_p: draw among fewer tokens, see
    `jaxfb.models.generate`. seed: below 2**32.

    Raises:
      ValueError: one of them is not that, or the run cannot be read.
    """
    who = "[generate]"
    if tokens is not None:
        integer("tokens", tokens, who=who)
    if temperature is not None:
        number("temperature", temperature, who=who, least=0)
    boolean("raw", raw, who=who)
    instance("prompt", prompt, str, "text", who=who)
    check_prompt(prompt)
    how = Sampling(tokens or 1, temperature or 0.0, top_k, top_p, min_p, seed=seed)
    use_compile_cache()
    model = open_model(run_dir)
    how = sampling_of(
        model, tokens=tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
    )
    text = complete(model, [prompt], how, raw=raw)[0][0]
    return prompt + ("\n" if is_answered(model, raw) else "") + text


def _saved_params(setup: Setup, directory: RunDirectory, warn: Callable[[str], None]) -> tuple[Any, int]:
    """Returns parameters of the newest checkpoint on this setup's mesh, and the update that they are of.

    warn: is given a sentence where they were trained on another text than the setup's.
    """
    step = setup.train_step(setup.plan.train)
    abstract = step.abstract_state(setup.init_params).params
    params, record = newest_params(directory.path, setup.config, abstract)
    if "config" in record:  # not where nothing was trained yet
        check_model(record["config"], setup.config)
        if other := other_text(record, setup.config, setup.corpus.train.fingerprint):
            warn(f"[eval] {other}")
    return params, record["update"]


def _check_tokenizer(setup: Setup, directory: RunDirectory) -> None:
    """Refuses a text whose token ids mean something else than those that the parameters were trained on."""
    tokenizer = setup.corpus.tokenizer
    if tokenizer is None or not directory.tokenizer.is_file():
        return
    if tokenizer.fingerprint != load_tokenizer(directory.tokenizer).fingerprint:
        raise Refused(
            f"[eval] a tokenizer trained on this text differs from the run's; use data.tokenizer={directory.tokenizer}"
        )


def _setup(hosts: Hosts, config: Config, say: Callable[[str], None]) -> Setup:
    """Returns the setup; its text is read by process 0 before the others look for it."""
    return make_setup(config, say, lambda data: hosts.in_turn(lambda: prepare(data)))
