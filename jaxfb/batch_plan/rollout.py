"""Reinforcement learning as arithmetic: prompts -> samples -> rows of a rollout -> updates of some epochs.

Part of the batch-plan step. P prompts with n samples each are R = P n rows; an update consumes G of them, so a
pass over the rollout is K = R / G updates. Prompts are counted in this file and nowhere after it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, NamedTuple

from jaxfb.batch_plan.plan import PURPOSES, UPDATES, BatchPlan, plans_by_purpose
from jaxfb.batch_plan.refusal import (
    PlanError,
    nearest,
    not_negative,
    offer,
    one_of,
    positive_int,
    true_or_false,
)
from jaxfb.refusal import INT32, integer, only_legal, shown

FORWARD_PURPOSES = ("logprob_old", "logprob_ref", "value")
_COUNTS = ("prompts", "samples_per_prompt", "rows_per_update", "epochs", "rollouts")
_VERL = {
    "prompts": "data.train_batch_size",
    "samples_per_prompt": "rollout.n",
    "rows_per_update": "actor.ppo_mini_batch_size, which counts prompts",
    "epochs": "actor.ppo_epochs",
    "train": "actor.ppo_micro_batch_size_per_gpu",
    "critic": "critic.ppo_micro_batch_size_per_gpu",
    "logprob_old": "rollout.log_prob_micro_batch_size_per_gpu",
    "logprob_ref": "ref.log_prob_micro_batch_size_per_gpu",
    "value": "critic.forward_micro_batch_size_per_gpu",
}


class PolicyUpdate(NamedTuple):
    """Lists the rows of a rollout that one update consumes, in order."""

    update: int
    rollout: int
    epoch: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class RolloutPlan:
    """Holds the numbers of prompts, samples, rows and updates, and one immutable `BatchPlan` for each purpose.

    Which rows form an update follows from (seed, rollout, epoch) alone: replicas and microbatches change
    nothing about it.

    Args:
      plans: {"train": plan of rows_per_update rows, with a critic "critic" of as many, and plans of all R rows for
        "logprob_old", "logprob_ref" and "value" as far as they are needed}. Nothing is inherited from one to another.
        Kept as a read-only mapping.
      prompts: of one rollout (P).
      samples_per_prompt: n; row p * n + s is sample s of prompt p.
      rows_per_update: rows of one optimizer update (G).
      epochs: passes over one rollout (E).
      rollouts: of the whole run.
      seed: of the order of the rows; None keeps it.
      groups: name of what needs groups of samples, such as "grpo"; "" for nothing.
      whole_groups: every microbatch holds whole groups (for losses that share work within one).

    Raises:
      PlanError: one sentence with the values, the arithmetic and the nearest legal choice.
    """

    plans: Mapping[str, BatchPlan] = field(hash=False)
    _: KW_ONLY
    prompts: int
    samples_per_prompt: int
    rows_per_update: int
    epochs: int = 1
    rollouts: int = 1
    seed: int | None = 0
    groups: str = ""
    whole_groups: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "plans", plans_by_purpose("rollout", self.plans))
        for name in _COUNTS:
            object.__setattr__(self, name, positive_int("rollout", name, getattr(self, name)))
        if self.seed is not None:
            integer("seed", self.seed, who="[rollout]", least=-(2**63), most=2**63, error=PlanError)
        if not isinstance(self.groups, str):
            raise PlanError(
                f'[rollout] groups must be a name such as "grpo", or "", got {shown(self.groups)}'
            )
        true_or_false("rollout", "whole_groups", self.whole_groups)
        for name, value in (("rows of one rollout", self.rows), ("total_updates", self.total_updates)):
            if value > INT32:
                raise PlanError(
                    f"[rollout] prompts {self.prompts} × samples_per_prompt {self.samples_per_prompt} in updates of "
                    f"rows_per_update {self.rows_per_update} over epochs {self.epochs} and rollouts {self.rollouts} "
                    f"makes {name} {value}, above {INT32}; make one of them smaller"
                )
        _check_samples(self)
        _check_updates(self)
        _check_groups(self)
        _check_plans(self)

    @property
    def rows(self) -> int:
        """Returns the rows of one rollout: R = P n."""
        return self.prompts * self.samples_per_prompt

    @property
    def updates_per_pass(self) -> int:
        """Returns the updates of one pass over a rollout: K = R / G."""
        return self.rows // self.rows_per_update

    @property
    def updates_per_rollout(self) -> int:
        """Returns the updates that are made from one rollout: U = K E."""
        return self.updates_per_pass * self.epochs

    @property
    def total_updates(self) -> int:
        """Returns the updates of the whole run: the horizon of the learning rate."""
        return self.updates_per_rollout * self.rollouts

    @property
    def train(self) -> BatchPlan:
        """Returns the plan of one update."""
        return self.plans["train"]

    def plan(self, purpose: str) -> BatchPlan:
        """Returns the plan of one purpose, which must have been given: nothing is inherited from another."""
        one_of("rollout", "purpose", purpose, PURPOSES)
        if purpose not in self.plans:
            given = ", ".join(self.plans)
            raise PlanError(
                f"[{purpose}] has no plan, there are plans for {given}; give one for this purpose, nothing is inherited"
            )
        return self.plans[purpose]

    def update(self, number: int) -> PolicyUpdate:
        """Returns update `number` of the run, from 0."""
        number = not_negative("rollout", "number", number)
        if not 0 <= number < self.total_updates:
            raise PlanError(
                f"[rollout] no update {number}: there are {self.total_updates}, number counts from 0"
            )
        rollout, within = divmod(number, self.updates_per_rollout)
        epoch, index = divmod(within, self.updates_per_pass)
        start = index * self.rows_per_update
        return PolicyUpdate(
            number, rollout, epoch, tuple(self._order(rollout, epoch)[start : start + self.rows_per_update])
        )

    def table(self) -> list[tuple[str, str]]:
        """Returns (name, what it is) of every number, what it counts, and what verl calls it."""
        update_prompts = self.rows_per_update / self.samples_per_prompt
        numbers = [
            ("prompts (P)", f"{self.prompts} prompts a rollout", "prompts"),
            ("samples_per_prompt (n)", f"{self.samples_per_prompt} rows a prompt", "samples_per_prompt"),
            ("rows (R = P n)", f"{self.rows} rows a rollout", ""),
            (
                "rows_per_update (G)",
                f"{self.rows_per_update} rows = {update_prompts:g} prompts",
                "rows_per_update",
            ),
            ("updates_per_pass (K = R/G)", f"{self.updates_per_pass} updates", ""),
            ("epochs (E)", f"{self.epochs} pass{'es' * (self.epochs > 1)} over a rollout", "epochs"),
            ("updates_per_rollout (K E)", f"{self.updates_per_rollout} updates", ""),
            ("rollouts", f"{self.rollouts}", ""),
            ("total_updates", f"{self.total_updates} updates, the horizon of the learning rate", ""),
        ]
        cuts = [(f"[{purpose}]", plan.summary(), purpose) for purpose, plan in self.plans.items()]
        width = max(len(text) for _, text, _ in numbers + cuts)
        return [
            (name, f"{text:<{width}}  {_VERL.get(key, '')}".rstrip()) for name, text, key in numbers + cuts
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values, for saving with a run."""
        names = (*_COUNTS, "seed", "groups", "whole_groups")
        plans = {purpose: plan.to_dict() for purpose, plan in self.plans.items()}
        return {**{name: getattr(self, name) for name in names}, "plans": plans}

    def _order(self, rollout: int, epoch: int) -> list[int]:
        rows = list(range(self.rows))
        if self.seed is not None:
            random.Random(f"{self.seed}/{rollout}/{epoch}").shuffle(rows)
        return rows


def check_whole_groups(prompt_of_row: Sequence[int], samples_per_prompt: int) -> None:
    """Refuses rows that are not whole groups of samples of one prompt."""
    for prompt, count in Counter(map(int, prompt_of_row)).items():
        if count != samples_per_prompt:
            raise PlanError(
                f"prompt {prompt} has {count} of {samples_per_prompt} samples; group statistics need all of them"
            )


def _check_updates(plan: RolloutPlan) -> None:
    """Checks that R >= G, and R is a multiple of G."""
    rows, update = plan.rows, plan.rows_per_update
    if rows % update == 0:
        return
    replicas = plan.train.data_parallel if "train" in plan.plans else 1
    group = plan.samples_per_prompt if plan.whole_groups else 1
    legal = nearest(update, rows, lambda n: rows % n == 0 and n % replicas == 0 and n % group == 0)
    choices = only_legal([_for_updates(plan, n) for n in legal], lambda one: replace(plan, **one))
    why = f"update of {update} rows needs more than the {rows} a rollout yields"
    if rows >= update:
        made = f"rollout gives {plan.prompts} prompts × {plan.samples_per_prompt} = {rows} rows"
        why = f"{made}; updates of {update} leave {rows % update} rows"
    sizes = f"prompts={plan.prompts} and samples_per_prompt={plan.samples_per_prompt}"
    words = offer([{"rows_per_update": choice["rows_per_update"]} for choice in choices])
    raise PlanError(f"[rollout] with {sizes}, {why}{words}", choices)


def _fitted(plan: RolloutPlan, **sizes: int) -> dict[str, Any]:
    """Returns these sizes with plans for them: of as many rows as an update and a rollout then have."""
    all_sizes = {name: getattr(plan, name) for name in _COUNTS} | sizes
    rollout = all_sizes["prompts"] * all_sizes["samples_per_prompt"]
    rows = _rows_by_purpose(all_sizes["rows_per_update"], rollout)
    plans = {purpose: _of_rows(one, rows.get(purpose)) for purpose, one in plan.plans.items()}
    return {**sizes, "plans": plans}


def _rows_by_purpose(update: int, rollout: int) -> dict[str, int]:
    return {purpose: update for purpose in UPDATES} | {purpose: rollout for purpose in FORWARD_PURPOSES}


def _of_rows(plan: BatchPlan, rows: int | None) -> BatchPlan:
    """Returns the plan for so many rows, none of them dropped; the plan itself where there is none."""
    if rows is None or rows == plan.rows == plan.real_rows:
        return plan
    try:
        return plan.replace(rows=rows, remainder="pad")
    except PlanError:
        return plan


def _for_updates(plan: RolloutPlan, rows_per_update: int) -> dict[str, Any]:
    """Returns so many rows an update with plans for them, which keep groups whole where that is asked for."""
    fitted = _fitted(plan, rows_per_update=rows_per_update)
    if not plan.whole_groups:
        return fitted
    train = _of_groups(plan.train, plan.samples_per_prompt, rows_per_update)
    return {**fitted, "plans": {**fitted["plans"], "train": train}, "seed": None}


def _of_groups(train: BatchPlan, samples: int, rows: int) -> BatchPlan:
    """Returns a plan of so many rows with whole groups in each microbatch."""
    return BatchPlan(
        train.purpose,
        rows=rows,
        rows_per_microbatch=samples,
        data_parallel=train.data_parallel,
        remainder="pad",
    )


def _check_samples(plan: RolloutPlan) -> None:
    """Checks that a prompt has samples to compare; before what updates need, whose advice depends on their number."""
    if plan.groups and plan.samples_per_prompt < 2:
        raise PlanError(
            f"[rollout] {plan.groups} needs samples_per_prompt ≥ 2, got {plan.samples_per_prompt}; use 2 or more",
            only_legal([_fitted(plan, samples_per_prompt=2)], lambda one: replace(plan, **one)),
        )


def _check_groups(plan: RolloutPlan) -> None:
    """Checks that whole groups stay whole in each microbatch, where that is asked for."""
    train, samples = plan.train, plan.samples_per_prompt
    if not plan.whole_groups:
        return
    if plan.rows_per_update % samples:
        legal = nearest(plan.rows_per_update, plan.rows, lambda n: plan.rows % n == 0 and n % samples == 0)
        choices = [_for_updates(plan, rows) for rows in legal]
        words = offer([{"rows_per_update": rows} for rows in legal])
        raise PlanError(
            f"[rollout] whole_groups keeps groups of {samples} samples together, but updates of {plan.rows_per_update} "
            f"rows cut them{words}",
            only_legal(choices, lambda one: replace(plan, **one)),
        )
    if train.by_tokens or train.rows_per_microbatch % plan.samples_per_prompt:
        per = f"{train.rows_per_microbatch} rows" if not train.by_tokens else "a token budget"
        raise PlanError(
            f"[train] whole_groups keeps groups of {plan.samples_per_prompt} samples together, but microbatches "
            f"of {per} cut them; use rows_per_microbatch={plan.samples_per_prompt} or a multiple of it",
            [{"plans": {**plan.plans, "train": _of_groups(train, samples, train.rows)}, "seed": None}],
        )
    if plan.seed is not None:
        raise PlanError(
            "[rollout] whole_groups keeps groups together, but a shuffle of rows cuts them; use seed=None",
            [{"seed": None}],
        )


def _check_plans(plan: RolloutPlan) -> None:
    """Checks that each plan has its own purpose, the right number of rows, none dropped, and one mesh."""
    for purpose, one in plan.plans.items():
        wanted = _rows_by_purpose(plan.rows_per_update, plan.rows).get(purpose)
        if wanted and one.rows != wanted:
            what = "an update" if purpose in UPDATES else "a rollout"
            raise PlanError(
                f"[{purpose}] covers {one.rows} rows, {what} has {wanted}; use rows={wanted}", [_fitted(plan)]
            )
        if wanted and one.real_rows != wanted:
            raise PlanError(
                f'[{purpose}] remainder="drop" would leave out {wanted - one.real_rows} of the {wanted} rows; use '
                'remainder="pad"',
                [_fitted(plan)],
            )
    replicas = {purpose: one.data_parallel for purpose, one in plan.plans.items()}
    if len(set(replicas.values())) > 1:
        raise PlanError(
            f"[rollout] plans of one mesh must have the same data_parallel, got {replicas}; use that of train"
        )
