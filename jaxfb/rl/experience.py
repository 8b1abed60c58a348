"""Makes rollouts: prompts are answered, rewarded and scored by the policy, the reference and the critic.

    prompts -> responses -> rewards -> log-probs (old, reference), values -> KL in the reward -> advantages

Whatever needs a group's or the whole rollout's statistics is computed here, once, before rows are split. Arrays
are numpy, [R, S] with R = prompts * samples_per_prompt rows and S slots, aligned with `targets`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxfb.batch_plan import BatchPlan, RolloutPlan
from jaxfb.config.policy import FROM_SAMPLER
from jaxfb.config.post_training import RLConfig
from jaxfb.data.token_rows import prompt_and_response, token_rows
from jaxfb.losses.estimators import estimator_of
from jaxfb.losses.heads import log_prob_fn
from jaxfb.losses.importance import rollout_weights
from jaxfb.losses.kl import AdaptiveKL, kl_in_reward
from jaxfb.rl.sampler import Responses, Sampler
from jaxfb.rl.start import Base
from jaxfb.rl.tasks import (
    Problem,
    Problems,
    Response,
    Task,
    check_unchanged,
    checked_correct,
    checked_reward,
    messages_of,
)
from jaxfb.types import Pipelined

PyTree = Any
INPUTS = ("tokens", "targets", "segments", "loss_mask")
Leaves = dict[str, np.ndarray]


class Models(NamedTuple):
    """The parameters at the start of a rollout. reference, critic: None where there is none."""

    policy: PyTree
    reference: PyTree | None
    critic: PyTree | None


class Rollout(NamedTuple):
    """A finished rollout.

    rows: leaves [R, S] that updates read. record: numbers about the rollout by name. kl: the controller after it.
    """

    rows: Leaves
    record: dict[str, float]
    kl: AdaptiveKL


@dataclass(frozen=True)
class Experience:
    """Makes rollouts.

    problems:    of the task when the run began.
    length:      slots of a row.
    value_model: of the critic, whose outputs are {"values"}.
    once:        calls a function on process 0 and returns its JSON-able value on every process of the job; rewards may
      be costly or random, so they are computed once.
    """

    base: Base[RLConfig]
    task: Task
    problems: Problems
    plan: RolloutPlan
    sampler: Sampler
    length: int
    value_model: Pipelined | None = None
    once: Callable[[Callable[[], Any]], Any] = lambda compute: compute()

    def rollout(self, number: int, models: Models, kl: AdaptiveKL) -> Rollout:
        """Makes rollout `number` of the run, from 0; it depends on that, the seed and the models alone."""
        places, groups = self._drawn(number)
        problems = [self.problems.train[place] for place in places]
        began, record = time.monotonic(), {}
        placed = self.sampler.place(models.policy)
        key = jax.random.fold_in(jax.random.key(self._config.run.seed), number)
        prompts = self._encoded(problems)
        responses = self.sampler(placed, prompts, key)
        sampled = time.monotonic()
        rewards, correct = self._rewards(places, responses)
        estimator = estimator_of(self._config.advantage.name)
        baseline = self._greedy_rewards(placed, places, prompts) if "baselines" in estimator.reads else None
        rows, from_sampler = self._rows(prompts, responses)
        record |= _numbers_of(rewards, correct, responses, sampled - began)
        if estimator.by_group:
            record["groups_without_signal"] = _share_without_signal(rewards, groups)
        scores = self._scores(rows, models, from_sampler, record)
        token_rewards, kl = self._token_rewards(rewards, rows["loss_mask"], scores, kl, record)
        inputs = {"token_rewards": token_rewards, "rewards": token_rewards.sum(1), "groups": groups}
        inputs |= {"mask": rows["loss_mask"], "values": scores.get("values"), "baselines": baseline}
        scores |= estimator(inputs, vars(self._config.advantage))
        record["forward_seconds"] = time.monotonic() - sampled
        kept = {name: scores[name] for name in self.leaves if name not in INPUTS}
        rows = {**rows, **{name: np.asarray(leaf, self._dtype) for name, leaf in kept.items()}}
        return Rollout(rows, record, kl)

    def accuracy(self, params: PyTree, problems: list[Problem]) -> float:
        """Returns the share of problems that greedy responses solve."""
        placed, solved = self.sampler.place(params), 0
        for start in range(0, len(problems), self.plan.rows):
            part = problems[start : start + self.plan.rows]
            full = part + [part[0]] * (self.plan.rows - len(part))  # one shape, one program
            responses = self.sampler(placed, self._encoded(full), None, greedy=True)
            texts = self._texts(responses)[: len(part)]
            solved += self.once(partial(self._solved, part, texts))
        return solved / len(problems)

    def _solved(self, problems: list[Problem], texts: list[Response]) -> int:
        return sum(bool(checked_correct(self.task, p, text)) for p, text in zip(problems, texts, strict=True))

    @cached_property
    def leaves(self) -> tuple[str, ...]:
        """Lists the names of the leaves of a rollout's rows."""
        config = self._config
        wanted = {
            "ref_log_probs": config.policy.kl_coef > 0,
            "rollout_weights": config.rollout.importance_cap is not None,
            "old_values": config.critic is not None,
            "returns": config.critic is not None,
        }
        return (*INPUTS, "advantages", "old_log_probs", *(name for name, needed in wanted.items() if needed))

    def empty(self) -> Leaves:
        """Makes rows of zeros with the shapes and dtypes of a rollout."""
        whole = {"tokens", "targets", "segments"}
        shape = (self.plan.rows, self.length)
        dtype_of = lambda name: np.int32 if name in whole else np.float32 if name in INPUTS else self._dtype  # noqa: E731
        return {name: np.zeros(shape, dtype_of(name)) for name in self.leaves}

    @property
    def _config(self) -> RLConfig:
        return self.base.config

    @property
    def _dtype(self) -> type:
        return np.float64 if self._config.precision.compute_dtype == "float64" else np.float32

    @cached_property
    def _log_probs(self) -> Pipelined:
        temperature = self._config.rollout.temperature
        return log_prob_fn(self.base.model, temperature=temperature, absent_ids=self.base.absent_ids)

    def _drawn(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Draws one problem a row, by its place in `train`, samples of one prompt side by side; and numbers the prompt
        that each row answers.
        """
        rng = np.random.default_rng([self._config.run.seed, number])
        total, sizes = len(self.problems.train), self._config.rollout
        chosen = rng.choice(total, sizes.prompts, replace=total < sizes.prompts)
        groups = np.repeat(np.arange(sizes.prompts), sizes.samples_per_prompt)
        return chosen[groups], groups

    def _encoded(self, problems: list[Problem]) -> list[np.ndarray]:
        return self.base.chat.prompts([messages_of(problem) for problem in problems])

    def _texts(self, responses: Responses) -> list[Response]:
        """Decodes responses for the rewards. Special tokens inside one appear by name, so that they are noticed."""
        decode = self.base.tokenizer.decode
        return [
            Response.of(decode(ids[: len(ids) - ended], keep_special=True), ids, ended)
            for ids, ended in zip(responses.ids, responses.ended, strict=True)
        ]

    def _rewards(self, places: np.ndarray, responses: Responses) -> tuple[np.ndarray, np.ndarray]:
        """Returns the reward of each response, and whether it counts as solved. places: of the problems of the rows."""
        problems = [self.problems.train[place] for place in places]
        answered = list(zip(problems, self._texts(responses), strict=True))

        def judge() -> tuple[list[float], list[bool]]:
            rewards = [float(checked_reward(self.task, problem, text)) for problem, text in answered]
            correct = [bool(checked_correct(self.task, problem, text)) for problem, text in answered]
            check_unchanged(self.task, self.problems, places)
            return rewards, correct

        rewards, correct = self.once(judge)
        return np.array(rewards), np.array(correct, bool)

    def _greedy_rewards(self, placed: PyTree, places: np.ndarray, prompts: list[np.ndarray]) -> np.ndarray:
        """Returns float[R], the reward of the greedy response to each row's prompt: the baseline of ReMax."""
        return self._rewards(places, self.sampler(placed, prompts, None, greedy=True))[0]

    def _rows(self, prompts: list[np.ndarray], responses: Responses) -> tuple[Leaves, np.ndarray]:
        """Makes the rows of prompts and responses, and the sampler's log-probs on them."""
        pairs = [prompt_and_response(p, r) for p, r in zip(prompts, responses.ids, strict=True)]
        rows = token_rows([ids for ids, _ in pairs], [counts for _, counts in pairs], self.length)
        log_probs = np.zeros(rows["tokens"].shape, self._dtype)
        log_probs[rows["loss_mask"] > 0] = np.concatenate(responses.log_probs)
        return rows, log_probs

    def _scores(self, rows: Leaves, models: Models, sampled: np.ndarray, record: dict) -> Leaves:
        """Scores the rows by each model, with the plan of its purpose."""
        if self._config.rollout.log_probs == FROM_SAMPLER:
            scores = {"old_log_probs": sampled}
        else:
            scores = {"old_log_probs": self._pass("logprob_old", models.policy, rows)}
            gap = np.abs(scores["old_log_probs"] - sampled)[rows["loss_mask"] > 0]
            record["sampler_gap"] = float(gap.max(initial=0))
        if (cap := self._config.rollout.importance_cap) is not None:
            scores["rollout_weights"], statistics = rollout_weights(
                scores["old_log_probs"], sampled, rows["loss_mask"], upper=cap
            )
            record |= {f"importance_{name}": value for name, value in statistics.items()}
        if self._config.uses_reference:
            scores["ref_log_probs"] = self._pass("logprob_ref", models.reference, rows)
        if models.critic is not None and self.value_model is not None:
            plan = self.plan.plan("value")
            scores["values"] = self._forward(self.value_model, models.critic, rows, plan)["values"]
            scores["old_values"] = scores["values"]
        return scores

    def _pass(self, purpose: str, params: PyTree, rows: Leaves) -> np.ndarray:
        return self._forward(self._log_probs, params, rows, self.plan.plan(purpose))["log_probs"]

    def _forward(self, model: Pipelined, params: PyTree, rows: Leaves, plan: BatchPlan) -> Leaves:
        out = self.base.forward(model, params, rows, plan, forward_only=True)
        return jax.tree.map(np.asarray, out.outputs)

    def _token_rewards(
        self, rewards: np.ndarray, mask: np.ndarray, scores: Leaves, kl: AdaptiveKL, record: dict
    ) -> tuple[np.ndarray, AdaptiveKL]:
        """Puts each row's reward on its last token and takes the KL to the reference off every token."""
        at_end = on_last_token(rewards, mask)
        if self._config.reward.kl_coef == 0:
            return at_end, kl
        found, mean = kl_in_reward(
            at_end,
            scores["old_log_probs"],
            scores["ref_log_probs"],
            mask,
            kl.coefficient,
            self._config.reward.kl_estimator,
        )
        record |= {"reward_kl": mean, "reward_kl_coefficient": kl.coefficient}
        adapts = self._config.reward.target is not None
        return found, kl.updated(mean, len(rewards)) if adapts else kl


def on_last_token(per_row: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Puts float[R] on the last counted token of each row, [R, S]; nothing where none counts."""
    counted = mask != 0
    last = mask.shape[1] - 1 - counted[:, ::-1].argmax(1)
    out = np.zeros(mask.shape, np.float64)
    out[np.arange(len(mask)), last] = per_row
    return np.where(counted, out, 0.0)


def _share_without_signal(rewards: np.ndarray, groups: np.ndarray) -> float:
    """Returns the share of prompts whose samples all have the same reward, so that none is better than their mean.

    A single sample is compared with none and keeps its reward: without signal only if that is 0.
    """
    each = [rewards[groups == group] for group in np.unique(groups)]
    return float(np.mean([np.ptp(one) == 0 and (len(one) > 1 or one[0] == 0) for one in each]))


def _numbers_of(
    rewards: np.ndarray, correct: np.ndarray, responses: Responses, seconds: float
) -> dict[str, float]:
    """Summarizes the responses for the record; `at_length_limit` is the share that no stop token ended."""
    lengths = np.array([len(ids) for ids in responses.ids])
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "accuracy": float(correct.mean()),
        "response_length": float(lengths.mean()),
        "response_length_max": int(lengths.max()),
        "at_length_limit": float(1 - responses.ended.mean()),
        "rollout_seconds": seconds,
        "rollout_tokens_per_second": responses.num_tokens / seconds,
    }
