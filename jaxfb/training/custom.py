"""Any model as a `Work`: a loss function or a `Pipelined`, your own rows, any optax transformation."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jaxfb.batch_plan import BatchPlan, RunPlan
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.custom import CustomConfig
from jaxfb.forward_backward.arguments import check_params
from jaxfb.forward_backward.loss_function.padding import check_padding
from jaxfb.forward_backward.sequential import as_loss_fn
from jaxfb.mesh import make_mesh
from jaxfb.refusal import Refused, function_of, shown
from jaxfb.registry import load
from jaxfb.training.from_config.dtypes import enable_float64
from jaxfb.training.from_config.optimizer import check_optimizer, optimizer
from jaxfb.training.from_config.options import step_options
from jaxfb.training.from_config.plans import length_of, run_plan, train_plan
from jaxfb.training.job.agreement import devices_and_mesh
from jaxfb.training.rows.batches import rows_here
from jaxfb.training.rows.own_rows import OwnRows, own_rows
from jaxfb.training.windowed_work import WindowedWork
from jaxfb.training.work import Say, Table
from jaxfb.types import LossFn, Pipelined
from jaxfb.update.arguments import check_init_function
from jaxfb.update.train_state import StepMetrics, is_init_function
from jaxfb.update.train_step import TrainStep, make_train_step

PyTree = Any
Params = PyTree | Callable[[jax.Array], PyTree]


class Custom(WindowedWork):
    """Your own model; see `work.Work`. Made by `jaxfb.Trainer`.

    model:    a loss function or a `Pipelined`. params: a tree, or a function of a key.
    run_plan: rows of each update. rows: where they come from.
    evaluation: parameters -> numbers by name, called on every process; None: none.
    """

    tokenizer = None
    flops_per_token = None

    def __init__(
        self,
        config: CustomConfig,
        mesh: Mesh,
        model: LossFn | Pipelined,
        params: Params,
        optimizer: optax.GradientTransformation,
        run_plan: RunPlan,
        rows: OwnRows,
        evaluation: Callable[[PyTree], Mapping[str, float]] | None,
        max_grad_norm: float | None = None,
    ):
        super().__init__(mesh, run_plan)
        self.config, self.rows = config, rows
        self._model, self._params, self._optimizer = model, params, optimizer
        self._evaluation, self._max_grad_norm = evaluation, max_grad_norm
        self.outputs: dict[str, Any] = {}
        self._has_checked_padding = False

    @cached_property
    def abstract_params(self) -> PyTree:
        return jax.eval_shape(self._init, jax.random.key(0))

    def facts(self) -> Mapping[str, Any]:
        rows = {"rows": self.rows.num_rows, "values of the rows": self.rows.fingerprint()}
        return {"plan": self.run_plan.to_dict(), **rows, **devices_and_mesh(self.mesh)}

    def tables(self) -> Iterable[Table]:
        sizes = [leaf.size for leaf in jax.tree.leaves(self.abstract_params)]
        rows = self.rows.num_rows
        yield (
            "model",
            [
                ("parameters", f"{sum(sizes):,}"),
                ("rows of data", "not counted" if rows is None else f"{rows:,}"),
            ],
        )
        yield "batch plans", [("train", self.run_plan.train.summary())]
        yield "run plan", self.run_plan.table()

    def start(self, say: Say) -> None:
        self.say = say
        step = self.step_of(self.run_plan.window(0).plan)
        self.train_state = step.init(self._params, self.config.run.seed)

    def read(self, number: int) -> PyTree:
        window = self.run_plan.window(number)
        return self.rows.read(window, rows_here(window.plan, self.mesh))

    def update(self, number: int, batch: PyTree) -> tuple[StepMetrics, dict[str, Any]]:
        if self.run_plan.pads and not self._has_checked_padding:
            self._check_padding(self.run_plan.window(number).plan, batch)
            self._has_checked_padding = True
        return super().update(number, batch)

    def _check_padding(self, plan: BatchPlan, batch: PyTree) -> None:
        """Refuses a model that counts the rows of zeros which fill up a short window, before the first update."""
        cut = (plan.num_microbatches, plan.rows_per_microbatch)
        shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*cut, *leaf.shape[1:]), leaf.dtype), batch)
        keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), cut))
        otherwise = 'run={"remainder": "drop"} or "error"'
        check_padding(as_loss_fn(self._model), self.abstract_params, shapes, keys, otherwise)

    def record(self, number: int, metrics: StepMetrics) -> dict[str, Any]:
        return {**super().record(number, metrics), "rows": self.run_plan.window(number).rows}

    def evaluate(self) -> dict[str, float]:
        if self._evaluation is None:
            return {}
        found = self._evaluation(self.train_state.params)
        if not isinstance(found, Mapping):
            raise Refused(f"[eval] evaluate must return numbers by name, got {type(found).__name__}")
        for name, value in found.items():
            if not isinstance(name, str) or (
                np.ndim(value) == 0 and np.asarray(value).dtype.kind in "OSUMmc"
            ):
                raise Refused(f"[eval] evaluate must return real numbers by name, got {shown({name: value})}")
        named = {name if name.startswith("eval/") else f"eval/{name}": value for name, value in found.items()}
        numbers = {name: float(value) for name, value in named.items() if np.ndim(value) == 0}
        self.outputs = {name: value for name, value in named.items() if name not in numbers}
        return numbers

    def host(self, done: int) -> dict[str, Any]:
        last = self.run_plan.window(done - 1) if done else None
        start = last.end if last else 0
        return {"data": {**self.rows.position(start), "start": start}}

    def abstract_state(self) -> PyTree:
        return self.step_of(self.run_plan.train).abstract_state(self._init)

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        super().check_resume(record, allow_changes)
        if not allow_changes:
            self.rows.check_same(record["data"])

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        self.rows.restore(record["data"])
        self.train_state = state

    def _init(self, key: jax.Array) -> PyTree:
        params = self._params(key) if is_init_function(self._params) else self._params
        check_params(params, forward_only=False, trainable=trained_patterns(self.config))
        return params

    def make_step(self, plan: BatchPlan) -> TrainStep:
        settings, clip = self.config.optimizer, {"max_grad_norm": self._max_grad_norm}
        if settings is not None:
            clip = {"max_grad_norm": settings.max_grad_norm, "clip_convention": settings.clip}
        options = {"normalize": self.config.batch.normalize, **clip, **step_options(self.config)}
        options["change_gradients"] = self.change_gradients
        return make_train_step(self._model, self._optimizer, self.mesh, plan, **options)


def make_custom(config: CustomConfig, **own: Any) -> Custom:
    """Returns the work of a config, with your own parts in place of those that it names.

    own: model, params, data, evaluate, loss and optimizer, any of them.

    Raises:
      ValueError: a part is missing or cannot be used, or the sizes do not fit; nothing is compiled before.
    """
    enable_float64(config)
    mesh = make_mesh(**vars(config.mesh))
    plans = {"train": train_plan(config, mesh)}
    if own.get("optimizer") is None:
        _check_optimizer(config, plans)
    names = ("model", "params", "data", "evaluate")
    parts = {name: own[name] if name in own else _named(config, name) for name in names}
    _check_functions(parts["params"], parts["evaluate"])
    rows = own_rows(_made(parts["data"]), config.run.seed)
    if config.run.epochs is not None and rows.num_rows is None:
        raise Refused(
            f"[run] epochs={config.run.epochs} needs rows that can be counted; use run.updates, or a sequence of rows"
        )
    length = run_plan(config, plans, rows.num_rows)
    model = _model(parts["model"], own.get("loss"))
    transformation = own.get("optimizer") or optimizer(config, length)
    rest = (transformation, length, rows, parts["evaluate"], own.get("max_grad_norm"))
    work = Custom(config, mesh, model, parts["params"], *rest)
    work.in_program = bool(own)
    return work


def _check_functions(params: Any, evaluate: Any) -> None:
    """Raises ValueError for functions that cannot be called with what they are given, before data are read."""
    if is_init_function(params):
        check_init_function(params)
    if evaluate is not None:
        function_of("evaluate", evaluate, "(params)", who="[trainer]")


def described(part: Any) -> str:
    """Returns what your own part is called in config.yaml, such as "mine:loss_fn" or "list"."""
    module, name = getattr(part, "__module__", None), getattr(part, "__qualname__", None)
    return (
        f"{module}:{name}" if module and name else type(part).__name__
    )  # a generator has a name and no module


def _named(config: CustomConfig, name: str) -> Any:
    """Returns the part that the config names, None where it names none."""
    path = getattr(config, name)
    return None if path is None else load(path, name)


def _made(part: Any) -> Any:
    """Returns what a function without arguments makes, anything else as it is."""
    return part() if inspect.isfunction(part) and not inspect.signature(part).parameters else part


def _model(model: Any, loss: Callable | None) -> LossFn | Pipelined:
    """Returns a model that the engine takes: with `loss`, its terms of what the model returns."""
    model = _made(model)
    if loss is None:
        return model
    if isinstance(model, Pipelined):
        raise Refused(
            "[trainer] loss is for a model that returns predictions; the head of a Pipelined returns its terms"
        )

    def loss_fn(params: PyTree, microbatch: PyTree, rng: jax.Array | None) -> Any:
        return loss(model(params, microbatch, rng), microbatch)

    return loss_fn


def _check_optimizer(config: CustomConfig, plans: dict[str, BatchPlan]) -> None:
    """Refuses an optimizer that is missing, or options that it does not take, before data are read."""
    if config.optimizer is None:
        raise Refused(
            "[optimizer] must be given: a section optimizer with learning_rate, or an optax transformation"
        )
    check_optimizer(config, None if config.run.epochs else length_of(config, run_plan(config, plans, None)))
