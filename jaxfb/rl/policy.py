"""Policies that learn from rewards: the work of `jaxfb rl`.

    rollout -> [rows of one update -> forward_backward -> one optax update] x K x epochs -> next rollout

A rollout is kept until its last update is done, and saved with a checkpoint, so that a run may stop in the middle
of it. The critic, where there is one, is updated on the same rows by its own plan and optimizer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.batch_plan import RolloutPlan, RunPlan, explain_difference
from jaxfb.config.post_training import RLConfig
from jaxfb.losses.estimators import estimator_of
from jaxfb.losses.heads import policy_loss_fn
from jaxfb.losses.kl import AdaptiveKL, check_horizon
from jaxfb.losses.policy import PolicyLoss
from jaxfb.losses.surrogates import make_surrogate
from jaxfb.metrics import plot_policy
from jaxfb.process.fault_points import reach
from jaxfb.refusal import Refused
from jaxfb.rl.advice import planned
from jaxfb.rl.critic import Critic
from jaxfb.rl.experience import Experience, Models
from jaxfb.rl.resume import refuse_ids_without_probability, refuse_other_rollout
from jaxfb.rl.rows import Rows, cut
from jaxfb.rl.sampler import Sampler, to_devices
from jaxfb.rl.start import Base, make_base, row_multiple
from jaxfb.rl.supervised import fine_tuned
from jaxfb.rl.tasks import Arithmetic, Task, check_task, fingerprint, messages_of
from jaxfb.rl.work import PostTraining, flat
from jaxfb.trainable import joined
from jaxfb.training.from_config.dtypes import compute_dtype, param_dtype
from jaxfb.training.machine import check_sampler, check_table
from jaxfb.training.persistence.changes import changes_between
from jaxfb.training.run_dir import RunDirectory
from jaxfb.update.pipeline_state import in_model_order
from jaxfb.update.train_state import StepMetrics, TrainState
from jaxfb.update.train_step import TrainStep

PyTree = Any
WITHOUT_SIGNAL = "rollouts_without_signal"


@dataclass
class PolicyWork(PostTraining):
    """A run of rollouts and updates. Made by `make_policy_work`.

    text: the fingerprint of the task's problems.
    """

    learns_from = ("problems", "task, template and tokenizer")
    call = "post_train(config, task=task, resume=True)"
    base: Base[RLConfig]
    task: Task
    plan: RolloutPlan
    experience: Experience
    step: TrainStep
    critic: Critic | None
    text: str

    def __post_init__(self):
        super().__init__()
        self._config = self.base.config
        self._reference: PyTree | None = None
        self._rows: Rows = self.experience.empty()
        self._record: dict[str, float] = {}
        reward = self._config.reward
        self._kl = AdaptiveKL(reward.kl_coef, reward.target or 1.0, reward.horizon)
        self._keeps_kl = True  # unless a resumed run is to steer it otherwise
        self._checks_ids = False  # until a run is resumed
        if self.critic:
            self.critic.say = lambda text: self.say(text)

    def tables(self) -> Iterable[tuple[str, Iterable[tuple[str, Any]]]]:
        yield "chat", self.base.chat.table()
        yield "rollout plan (what it is, what it counts, what verl calls it)", self.plan.table()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "text": self.text}

    def start(self, say: Callable[[str], None]) -> None:
        if self._config.warm_start.updates:
            params = self._warm_start(self.base.starting_params(self.step), say)
            self.train_state = self.step.init(params, self._config.run.seed)
        else:
            self.train_state = self.base.begin(self.step)
        if self._config.uses_reference:
            # a copy: an update deletes the arrays that it is given
            self._reference = jax.tree.map(jnp.copy, self._trained(self.train_state.params))
        if self.critic:
            self.critic.start(self.train_state.params, self._config.run.seed)

    def read(self, number: int) -> Rows:
        """Returns the rows of an update; the first update of a rollout makes the rollout."""
        which = self.plan.update(number)
        if number % self.plan.updates_per_rollout == 0:
            self._roll_out(which.rollout)
        return {name: leaf[list(which.rows)] for name, leaf in self._rows.items()}

    def update(self, number: int, rows: Rows) -> tuple[StepMetrics, dict[str, Any]]:
        which = self.plan.update(number)
        began = time.monotonic()
        batch, padding = cut(rows, self.plan.train)
        metrics, parts = self.apply(self.step, batch)
        metrics = jax.device_get(metrics)
        self._check_weight(metrics, rows)
        more = self.critic.update(number, rows) if self.critic else {}
        seconds, tokens = time.monotonic() - began, int((rows["segments"] > 0).sum())
        speed = {"update_seconds": seconds, "tokens_per_second": tokens / seconds, "tokens": tokens}
        counted = {"rollout": which.rollout, "epoch": which.epoch, "padding_fraction": padding}
        return metrics, {**self._record, **counted, **speed, **parts, **more}

    def evaluate(self) -> dict[str, float]:
        return {
            "eval/accuracy": self.experience.accuracy(
                self.train_state.params, self.experience.problems.held_out
            )
        }

    @property
    def row_length(self) -> int:
        return self.experience.length

    def state(self) -> PyTree:
        arrays = {**super().state(), "rollout": self._rows_on_devices()}
        if self._reference is not None:
            arrays["reference"] = self._reference
        if self.critic:
            self.critic.state = in_model_order(self.critic.state, donate=True)
            arrays["critic"] = flat(self.critic.state)
        return arrays

    def host(self, done: int) -> dict[str, Any]:
        return {"work": {"record": self._record, "kl_coefficient": self._kl.coefficient}}

    def abstract_state(self) -> PyTree:
        """Returns shapes and shardings, without computing a value."""
        state = self.step.abstract_state(self.base.init_params)
        arrays = {**flat(state), "rollout": self._rows_on_devices()}
        if self._config.uses_reference:
            arrays["reference"] = self._trained(state.params)
        if self.critic:
            arrays["critic"] = flat(self.critic.abstract_state())
        return arrays

    def check_resume(self, record: Mapping[str, Any], allow_changes: bool) -> None:
        saved, free = record["plan"], ("plans", "rollouts", "text")
        if not allow_changes:
            self.check_same_text(saved)
        sizes = {name: value for name, value in self.to_dict().items() if name not in free}
        before = {**saved["plans"]["train"], **{name: saved[name] for name in sizes}}
        if difference := explain_difference(before, self.plan.train, **sizes):
            raise Refused(difference)
        refuse_other_rollout(record["config"], self._config, record["update"], self.plan.updates_per_rollout)
        # a coefficient that was steered continues from where it is, unless it is to be steered otherwise from now on
        changes = changes_between(record["config"], self._config)
        self._keeps_kl = not any(key.startswith("reward.") for key, _, _ in changes)
        self._checks_ids = not allow_changes

    def restore(self, state: PyTree, record: Mapping[str, Any], allow_changes: bool) -> None:
        rows, host = state.pop("rollout"), record["work"]
        self._reference = state.pop("reference", None)
        self._rows = {name: np.asarray(leaf) for name, leaf in rows.items()}
        if self._checks_ids and record["update"] % self.plan.updates_per_rollout:
            targets, mask = self._rows["targets"], self._rows["loss_mask"]
            refuse_ids_without_probability(targets, mask, self.base.absent_ids, record["update"])
        if self.critic:
            self.critic.state = TrainState(**state.pop("critic"))
        self.train_state = TrainState(**state)
        self._record = host["record"]
        if self._keeps_kl:
            self._kl = replace(self._kl, coefficient=host["kl_coefficient"])

    def summary(self) -> dict[str, Any]:
        counted = {name: self._record.get(name) for name in ("reward", WITHOUT_SIGNAL)}
        return {**counted, **super().summary()}

    def plot(self, directory: RunDirectory) -> None:
        if find_spec("matplotlib"):
            plot_policy([directory.metrics], directory.path / "accuracy.png")

    def _trained(self, params: PyTree) -> PyTree:
        """Returns the trained parameters, which are those that the reference does not share with the policy."""
        return self.step.forward_backward.trained(params)

    def _roll_out(self, number: int) -> None:
        critic = self.critic.state.params if self.critic else None
        policy = self.train_state.params
        reference = None if self._reference is None else joined(self._reference, policy)
        models = Models(policy, reference, critic)
        before = self._record.get(WITHOUT_SIGNAL, 0)
        reach("rollout")
        self._rows, self._record, self._kl = self.experience.rollout(number, models, self._kl)
        reach("rollout.done")
        if "groups_without_signal" in self._record:
            self._count_signal(number, before)

    def _count_signal(self, number: int, before: float) -> None:
        """Counts rollouts whose rewards teach nothing, and reports them at 1, 2, 4, 8, ... of them."""
        nothing = self._record["groups_without_signal"] == 1
        found = int(before) + nothing
        self._record[WITHOUT_SIGNAL] = found
        if nothing and found & (found - 1) == 0:
            self.say(
                f"rollout {number + 1}: all samples of each prompt have the same reward, so its updates learn nothing "
                f"from rewards ({found} of {number + 1} rollouts so far)"
            )

    def _warm_start(self, params: Any, say: Callable[[str], None]) -> PyTree:
        settings = self._config.warm_start
        train = self.experience.problems.train
        problems = train[: settings.problems]
        all_ = ", all there are" if len(problems) == len(train) else ""
        say(f"warm start on {len(problems)} problems{all_}")
        pairs = [(messages_of(problem), problem.answer) for problem in problems]
        return fine_tuned(self.base, params, pairs, self.experience.length, settings, say)

    def _check_weight(self, metrics: StepMetrics, rows: Rows) -> None:
        """Checks that the policy term was divided by what its rows count, so that a changed mask is found."""
        tokens, sequences = rows["loss_mask"].sum(), (rows["loss_mask"] > 0).any(1).sum()
        aggregation = self._config.policy.aggregation
        if aggregation is None:  # the surrogate's own
            return
        wanted = {"token-mean": tokens, "token-sum": 1}.get(aggregation, sequences)
        if not np.isclose(metrics.weights["policy"], wanted, rtol=1e-6):
            raise RuntimeError(
                f'term "policy": Σ weight {metrics.weights["policy"]} ≠ {wanted} counted in the rows of this update '
                f"({aggregation}); loss_mask was changed on the way to the loss"
            )

    def _rows_on_devices(self) -> PyTree:
        everywhere = NamedSharding(self.base.mesh, P())
        return {name: to_devices(leaf, everywhere) for name, leaf in self._rows.items()}


def make_policy_work(
    config: RLConfig,
    task: Task | None = None,
    once: Callable[[Callable[[], Any]], Any] | None = None,
    fresh: bool = False,
) -> PolicyWork:
    """Builds everything a run is made of; nothing is compiled.

    task: replaces the config's. once: see `Experience`. fresh: as for `make_base`.

    Raises:
      ValueError: an impossible size, in one sentence with the nearest legal choice.
    """
    base, own = make_base(config, fresh), task is not None
    task = make_task(config) if task is None else task
    problems, prompts = check_task(task, base.chat)
    sampler = _sampler(config, base, max(map(len, prompts)))
    length = row_slots(sampler.prompt_width, sampler.max_new_tokens, base.mesh)
    if config.warm_start.updates:
        check_table("warm_start", config.warm_start.rows, length)
    rows = config.rollout.prompts * config.rollout.samples_per_prompt
    check_table("rollout", rows, length)
    if config.reward.target is not None:
        check_horizon(config.reward.horizon, rows, "reward", "reward.horizon")
    slots, dtype = sampler.prompt_width + sampler.max_new_tokens, sampler.compute_dtype
    check_sampler(base.sizes, base.mesh, rows, slots, dtype or param_dtype(config))
    plan = planned(base, lambda base: rollout_plan(base, length))
    loss = PolicyLoss(
        make_surrogate(config.policy.surrogate, **config.policy.options),
        config.policy.aggregation,
        config.policy.scale,
        config.policy.kl_coef,
        config.policy.kl_estimator,
        config.policy.entropy_coef,
    )
    temperature = config.rollout.temperature
    model = policy_loss_fn(base.model, loss, temperature=temperature, absent_ids=base.absent_ids)
    run = RunPlan(plan.train, updates=plan.total_updates)
    step = base.train_step(model, plan.train, run)
    critic = Critic(base, plan.plan("critic")) if config.critic else None
    shared = {} if once is None else {"once": once}
    value_model = critic and critic.forward_model
    experience = Experience(base, task, problems, plan, sampler, length, value_model, **shared)
    work = PolicyWork(base, task, plan, experience, step, critic, fingerprint(problems, prompts))
    work.in_program = own
    return work


def make_task(config: RLConfig) -> Task:
    """Builds the config's task."""
    task = config.task
    return Arithmetic(task.digits, task.operations, task.held_out, task.seed)


def _sampler(config: RLConfig, base: Base, prompt_width: int) -> Sampler:
    return Sampler(
        base.sizes,
        base.mesh,
        prompt_width=prompt_width,
        max_new_tokens=config.rollout.max_new_tokens,
        stop_tokens=base.chat.stop_tokens,
        absent_ids=base.absent_ids,
        temperature=config.rollout.temperature,
        top_k=config.rollout.top_k,
        compute_dtype=compute_dtype(config),
    )


def row_slots(prompt_width: int, max_new_tokens: int, mesh: Mesh) -> int:
    """Returns the slots of a row: a prompt and a response less one, rounded up to what the mesh cuts."""
    slots, multiple = prompt_width + max_new_tokens - 1, row_multiple(mesh)
    return -(-slots // multiple) * multiple


def rollout_plan(base: Base[RLConfig], length: int) -> RolloutPlan:
    """Makes the plans of all purposes of a policy's run, for rows of so many slots.

    Raises:
      PlanError: a purpose that the run needs has no plan, or its rows cannot be cut.
    """
    config = base.config
    sizes = config.rollout
    rows, update = sizes.prompts * sizes.samples_per_prompt, sizes.rows_per_update
    needed = {
        "train": (update, True),
        "critic": (update, config.critic is not None),
        "logprob_old": (rows, sizes.log_probs == "recompute"),
        "logprob_ref": (rows, config.uses_reference),
        "value": (rows, config.critic is not None),
    }
    plans = base.plans({purpose: number for purpose, (number, wanted) in needed.items() if wanted}, length)
    return RolloutPlan(
        plans,
        prompts=sizes.prompts,
        samples_per_prompt=sizes.samples_per_prompt,
        rows_per_update=sizes.rows_per_update,
        epochs=sizes.epochs,
        rollouts=sizes.rollouts,
        seed=config.run.seed if sizes.shuffle else None,
        groups=config.advantage.name if estimator_of(config.advantage.name).by_group else "",
    )
