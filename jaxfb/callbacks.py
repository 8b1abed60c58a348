"""Defines hooks around the updates, for library users and for the trainer's own logging.

The loop calls these on the host; nothing in here touches what is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from jaxfb.process.forks import ending_children
from jaxfb.refusal import Refused, function, is_several, refuse, shown

HOOKS = (
    "on_train_start",
    "on_step_start",
    "before_update",
    "on_step_end",
    "on_eval",
    "on_save",
    "on_train_end",
)

CHANGE = "change_gradients"


class RunInProgress(Protocol):
    """The object that `on_train_start` receives, in pre-training and post-training; keep it for the other hooks.

    config:    of the run, as it was loaded.
    directory: where the run lives: `.path`, `.metrics`, `.checkpoints` and the like.
    mesh:      that it runs on.
    state:     the train state (params, opt_state, step) after `done` updates; the next update deletes its arrays, so
               read what you need in the hook and copy what you keep.
    done:      updates consumed so far, applied or skipped. total: of the whole run.
    metrics:   numbers of the last evaluation, by name. outputs: its arrays, where it returned some.
    """

    @property
    def config(self) -> Any: ...

    @property
    def directory(self) -> Any: ...

    @property
    def mesh(self) -> Any: ...

    @property
    def state(self) -> Any: ...

    @property
    def done(self) -> int: ...

    @property
    def total(self) -> int: ...

    @property
    def metrics(self) -> Mapping[str, float]: ...

    @property
    def outputs(self) -> Mapping[str, Any]: ...

    @property
    def say(self) -> Callable[[str], None]:
        """Prints a line without disturbing the live progress line."""
        ...

    def stop(self, reason: str) -> None:
        """Ends the run after the update in progress, saved; for callbacks.

        On several processes every one must call it after the same update. Where one alone does, it saves while the
        others compute: all wait for each other until hosts.stuck_after ends the job.
        """
        ...

    def tick(self) -> None:
        """Tells the watchdog that something moves; for callbacks that take longer than hosts.stuck_after."""
        ...

    def sync(self) -> None:
        """Waits until the devices have computed what was dispatched."""
        ...


class Callback:
    """Defines hooks around the updates of a run: override those you need.

    Each does nothing by default, and what it returns is ignored.

    Steps are numbered from 1: when step n ends, n global batches have been consumed. `metrics` are plain
    numbers by name, already on the host. The loop runs ahead of the device: `on_step_end` of a step comes
    after the next one was started. An exception raised in a hook ends the run.

    Args of the hooks:
      run: the `RunInProgress`, to be kept for the other hooks.
      step: the number of the update.
      batch: {name: [rows, ...] array} on the host.
      metrics: numbers by name, of the update or the evaluation.
      directory: where the checkpoint is written.
    """

    change_gradients: Callable[[Any, Any], Any] | None = None
    """(gradients, state) -> gradients: part of the compiled update, before the clip; see `make_train_step`.

    Of several callbacks each changes what the one before returned. For pretraining and `jaxfb.Trainer`."""

    def on_train_start(self, run: RunInProgress) -> None:
        """Runs once, when the state exists (drawn, loaded or restored), before the first evaluation and update."""

    def on_step_start(self, step: int) -> None:
        """Runs before the rows of this update are fetched."""

    def before_update(self, step: int, batch: Any) -> None:
        """Runs when the rows of this update are there, before the compiled step runs on them.

        batch: {name: [rows, ...] array} on the host; of several processes, each has its own rows. A policy's rows are
        those of the update, with their advantages and log-probs.
        """

    def on_step_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs when the numbers of this update have arrived."""

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs after an evaluation of the parameters that step left."""

    def on_save(self, step: int, directory: Any) -> None:
        """Runs after the state that step left was handed to the checkpoint writer."""

    def on_train_end(self, step: int, metrics: Mapping[str, float]) -> None:
        """Runs once, after the last update; not where the run is stopped before, or ends by an exception."""


def callback(**hooks: Callable) -> Callback:
    """Makes a callback out of functions: callback(on_eval=lambda step, metrics: print(step, metrics))."""
    _check_names(hooks)
    return _with_hooks(hooks)


def combine(callbacks: Iterable[Callback]) -> Callback:
    """Makes one callback whose every hook calls those of all, in the order given."""
    members = checked(callbacks)
    made = _with_hooks({hook: _in_order([getattr(member, hook) for member in members]) for hook in HOOKS})
    changes = [change for member in members if (change := getattr(member, CHANGE, None)) is not None]
    made.change_gradients = _one_after_the_other(changes) if changes else None
    return made


def checked(callbacks: Iterable[Callback]) -> tuple[Callback, ...]:
    """Returns the callbacks as a tuple; ValueError if one lacks a hook."""
    if not is_several(callbacks):
        refuse("callbacks", callbacks, "a list of jaxfb.Callback", who="[callbacks]")
    members = tuple(callbacks)
    for member in members:
        if isinstance(member, type):
            raise Refused(
                f"[callbacks] {member.__name__} is a class; give an object of it, {member.__name__}(...)"
            )
        missing = [hook for hook in HOOKS if not callable(getattr(member, hook, None))]
        if missing:
            raise Refused(
                f"[callbacks] {shown(member)} lacks {', '.join(missing)}; subclass jaxfb.Callback, or make one "
                "with jaxfb.callback(on_step_end=...)"
            )
    return members


def _in_order(functions: list[Callable]) -> Callable:
    def call(*args):
        for each in functions:
            with ending_children():
                each(*args)

    return call


def _one_after_the_other(changes: list[Callable]) -> Callable:
    def change(gradients, state):
        for each in changes:
            gradients = each(gradients, state)
        return gradients

    return change


def _with_hooks(hooks: Mapping[str, Callable]) -> Callback:
    made = Callback()
    for name, hook in hooks.items():
        setattr(made, name, hook)
    return made


def _check_names(hooks: Mapping[str, Callable]) -> None:
    for name, hook in hooks.items():
        if name not in (*HOOKS, CHANGE):
            raise Refused(f"[callbacks] there is no hook {name}; use one of {', '.join((*HOOKS, CHANGE))}")
        function(name, hook, f"as Callback.{name} is", who="[callbacks]")
