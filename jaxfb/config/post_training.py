"""The configs of post-training: supervised fine-tuning, preferences, and policies. Plain Python.

They share the sections of `sections.py`. A file is known by the section that only its
kind has: `conversations` (`jaxfb sft`), `preferences` (`jaxfb dpo`), `task` (`jaxfb rl`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from jaxfb.config.checks import at_least_zero, expand_home, not_empty, one_length, positive
from jaxfb.config.common import CommonConfig
from jaxfb.config.model import ModelConfig
from jaxfb.config.operation import CheckpointConfig
from jaxfb.config.policy import (
    AdvantageConfig,
    CriticConfig,
    PolicyConfig,
    RewardConfig,
    RolloutConfig,
    TaskConfig,
    WarmStartConfig,
    known_template,
    numbers_of,
)
from jaxfb.config.sections import AnyRunConfig, OptimizerConfig
from jaxfb.losses.estimators import estimator_of
from jaxfb.models.adapted import LoRA
from jaxfb.parts import PREFERENCES
from jaxfb.refusal import Refused, shown

ACCURACY = "eval/accuracy"
"""Of greedy answers to held-out problems: the one number by which policies are evaluated."""


@dataclass(frozen=True)
class CutConfig:
    """Cuts the rows of one purpose: exactly one of rows, a number of microbatches, or a token budget.

    rows_per_microbatch: rows of one microbatch on one replica.
    num_microbatches: microbatches of all the rows.
    max_tokens_per_microbatch: tokens of one microbatch on one replica, padding included.
    widths:  padded row lengths to compile for; null: quarters of the longest.
    packing: several rows share an array row.
    context_by_width: rows of each width are cut over as few devices of mesh.context as hold them, each within
             max_tokens_per_microbatch / mesh.context tokens; the other devices of the axis compute other rows.
    """

    rows_per_microbatch: int | None = None
    num_microbatches: int | None = None
    max_tokens_per_microbatch: int | None = None
    widths: tuple[int, ...] | None = None
    packing: bool = False
    context_by_width: bool = False

    def __post_init__(self):
        positive("plans", **numbers_of(self))
        if self.widths is not None and not self.widths:
            raise Refused(
                "[plans] widths=[] has no row length to compile for; use widths=null for quarters of the longest",
                [{"widths": None}],
            )
        if self.context_by_width and self.max_tokens_per_microbatch is None:
            raise Refused(
                "[plans] context_by_width=true chooses devices for rows by a token budget; give "
                "max_tokens_per_microbatch, or use context_by_width=false",
                [{"context_by_width": False}],
            )


@dataclass(frozen=True)
class PlansConfig:
    """Gives one cut for each purpose; none is inherited from another. A purpose that the run needs must be given.

    train, critic:            updates of the model, and of the critic where there is one.
    eval:                     held-out rows (sft, dpo).
    logprob_old, logprob_ref: log-probs of a rollout by the old policy, and by the reference.
    value:                    values of a rollout by the critic.
    """

    train: CutConfig
    critic: CutConfig | None = None
    eval: CutConfig | None = None
    logprob_old: CutConfig | None = None
    logprob_ref: CutConfig | None = None
    value: CutConfig | None = None


@dataclass(frozen=True)
class StartConfig:
    """Gives the initial parameters: the newest checkpoint of `run` (a run's directory), or random ones (null).

    run:         a run's directory; null: none.
    tokenizer:   "bytes", the path of a tokenizer.json or of a directory with one, or null for that of the run or of
                 `model.from`.
    stop_tokens: names or ids of tokens, any of which ends an answer; null: those that the tokenizer's files, the
                 template and the run name.
    """

    run: str | None = None
    tokenizer: str | None = None
    stop_tokens: tuple[str | int, ...] | None = None

    def __post_init__(self):
        not_empty("start", run=self.run, tokenizer=self.tokenizer)
        expand_home(self, "run", "tokenizer")
        if self.stop_tokens is not None and not self.stop_tokens:
            raise Refused(
                "[start] stop_tokens=[] would never end an answer; use start.stop_tokens=null for those of the "
                "template",
                [{"stop_tokens": None}],
            )


@dataclass(frozen=True)
class ItemsConfig:
    """Names the file of items to learn from, one JSON object a line.

    path:            a .jsonl file.
    held_out_path:   a .jsonl file to evaluate on; null holds out `held_out_fraction` of the items.
    held_out_fraction: share of the items that is held out where there is no held_out_path.
    template:        "chatml", "plain" (roles in words), "none" (contents alone), or the path of a .jinja file; null:
                     that of `start.run` or of the tokenizer's own files, else "chatml"; see docs/post_training.md.
    sequence_length: tokens of a row; a longer conversation is refused, or cut at its end with truncate.
    truncate:        whether a longer conversation is cut.
    """

    NAME: ClassVar[str]
    """The name of the section in a refusal."""

    path: str
    held_out_path: str | None = None
    held_out_fraction: float = 0.05
    template: str | None = None
    sequence_length: int = 512
    truncate: bool = False

    def __post_init__(self):
        positive(self.NAME, sequence_length=self.sequence_length)
        if not 0 <= self.held_out_fraction < 1:
            raise Refused(
                f"[{self.NAME}] held_out_fraction={self.held_out_fraction} must lie in [0, 1); try 0.05",
                [{"held_out_fraction": 0.05}],
            )
        if not self.path.strip():
            raise Refused(
                f"[{self.NAME}] path={self.path!r} must not be empty; use the path of a .jsonl file"
            )
        not_empty(self.NAME, held_out_path=self.held_out_path)
        known_template(self.NAME, self.template)
        expand_home(self, "path", "held_out_path", "template")


@dataclass(frozen=True)
class ConversationsConfig(ItemsConfig):
    """Conversations to learn from, one JSON object a line: {"messages": [{"role", "content"}, ...]}.

    learn: which messages count: those of the "assistant", or its "last" one.
    """

    NAME = "conversations"

    learn: Literal["assistant", "last"] = "assistant"


@dataclass(frozen=True)
class PreferencesConfig(ItemsConfig):
    """Pairs of answers, one JSON object a line: {"messages" or "prompt", "chosen", "rejected"}.

    beta:            how strongly the policy is held to the reference.
    label_smoothing: share of pairs whose labels are taken to be wrong.
    kind:            "sigmoid" (DPO), "ipo", "hinge" or "robust"; see docs/policy_losses.md.
    sequence_length: tokens of a row, which holds both conversations of a pair: half of it is each one's limit.
    """

    NAME = "preferences"

    beta: float = 0.1
    label_smoothing: float = 0.0
    kind: Annotated[str, PREFERENCES] = "sigmoid"

    def __post_init__(self):
        super().__post_init__()
        positive(self.NAME, beta=self.beta)
        if not 0 <= self.label_smoothing < 0.5:
            raise Refused(
                f"[preferences] label_smoothing={self.label_smoothing} must be in [0, 0.5); use 0",
                [{"label_smoothing": 0.0}],
            )


@dataclass(frozen=True)
class UpdatesConfig:
    """The rows of one update (pairs, for preferences), and how long: exactly one of updates and epochs.

    rows:    rows of one update, over all replicas.
    updates: the length in updates.
    epochs:  the length in passes through the items; a fraction is legal.
    """

    rows: int
    updates: int | None = None
    epochs: float | None = None

    def __post_init__(self):
        lengths = {"updates": self.updates, "epochs": self.epochs}
        given = {name: value for name, value in lengths.items() if value is not None}
        positive("batch", rows=self.rows, **given)
        one_length("batch", tuple(lengths), given, {"epochs": 1})


@dataclass(frozen=True)
class PostEvalConfig:
    """Evaluation every `every` updates and at the end (null: at the end only).

    every: evaluates after each so many updates; null: at the end only.
    tokens: tokens of a continuation by `jaxfb generate`, unless --tokens is given.
    temperature: temperature of `jaxfb generate`, unless --temperature is given; 0 takes the likeliest token.
    """

    every: int | None = None
    tokens: int = 64
    temperature: float = 0.0

    def __post_init__(self):
        positive("eval", every=self.every, tokens=self.tokens)
        at_least_zero("eval", temperature=self.temperature)


def check_one_start(model: object, source: object, run: object) -> None:
    """Refuses both or neither of what gives the sizes and the initial parameters. source: `model.from`."""
    if source is not None and run is not None:
        raise Refused(
            f"[model] from={source} and start.run={run} both give the initial parameters; leave one out",
            [{"model": None}, {"start.run": None}],
        )
    if (model is None) == (run is None):
        given = "neither" if model is None else f"both; start.run={shown(run)} has its own sizes and settings"
        raise Refused(
            f"[model] give model, for random parameters, or start.run, for those of a run; got {given}",
            () if model is None else [{"model": None}, {"start.run": None}],
        )


@dataclass(frozen=True)
class PolicyCheckpointConfig(CheckpointConfig):
    """Checkpoints as in the other commands, with the best by the accuracy on held-out problems."""

    keep_best: str | None = ACCURACY


@dataclass(frozen=True, kw_only=True)
class PostTrainingConfig(CommonConfig):
    """Settings of every kind of post-training; `model` sizes are those of `start.run` where one is given.

    Its label_smoothing, z_loss and mtp_depth are of the loss of tokens, which dpo and rl (but its warm start) replace.

    lora:     low-rank adapters to train in place of the model's own parameters; null: none.
    """

    model: ModelConfig | None = None
    start: StartConfig = field(default_factory=StartConfig)
    plans: PlansConfig
    run: AnyRunConfig
    optimizer: OptimizerConfig
    eval: PostEvalConfig = field(default_factory=PostEvalConfig)
    lora: LoRA | None = None

    def __post_init__(self):
        check_one_start(self.model, self.model and self.model.from_, self.start.run)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class SFTConfig(PostTrainingConfig):
    """Supervised fine-tuning on conversations; the loss is that of the assistant's tokens."""

    conversations: ConversationsConfig
    batch: UpdatesConfig


@dataclass(frozen=True, kw_only=True)
class DPOConfig(PostTrainingConfig):
    """Direct preference optimization; the reference is the policy at the start."""

    preferences: PreferencesConfig
    batch: UpdatesConfig

    def __post_init__(self):
        super().__post_init__()
        for purpose in ("train", "eval", "logprob_ref"):
            if getattr(getattr(self.plans, purpose), "packing", False):
                key = f"plans.{purpose}.packing"
                raise Refused(
                    f"[preferences] {key}=true packs rows of one conversation, but a row of preferences is packed "
                    f"already: it holds both of its pair; use {key}=false",
                    [{key: False}],
                )


@dataclass(frozen=True, kw_only=True)
class RLConfig(PostTrainingConfig):
    """Rollouts and policy updates."""

    task: TaskConfig
    rollout: RolloutConfig
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    critic: CriticConfig | None = None
    checkpoint: PolicyCheckpointConfig = field(default_factory=PolicyCheckpointConfig)

    def __post_init__(self):
        super().__post_init__()
        self._check_guard()
        if (self.critic is None) == estimator_of(self.advantage.name).needs_critic:
            fix = "add a section critic" if self.critic is None else "use advantage.name=gae, or no critic"
            raise Refused(
                f"[advantage] name={self.advantage.name} {'needs' if self.critic is None else 'does not use'} "
                f"a critic; {fix}"
            )
        self._check_advantage()

    def _check_guard(self) -> None:
        repeats = {"guard.verify_every": None} if self.guard.verify_every and self.critic else {}
        if self.guard.spikes == "rollback":
            raise Refused(
                "[guard] spikes=rollback skips rows after a spike, but a policy samples its own rows; use "
                "guard.spikes=warn",
                [{"guard.spikes": "warn", **repeats}],
            )
        if repeats:
            raise Refused(
                f"[guard] verify_every={self.guard.verify_every} computes updates twice, which those of a policy with "
                "a critic cannot be; use guard.verify_every=null",
                [repeats],
            )

    def _check_advantage(self) -> None:
        """Refuses settings that the estimator does not read, where they are not at their defaults."""
        given, default = vars(self.advantage), vars(AdvantageConfig())
        read = {"name", *estimator_of(self.advantage.name).options}
        for key in [key for key in given if key not in read and given[key] != default[key]]:
            raise Refused(
                f"[advantage] {key}={given[key]} is not read by name={self.advantage.name}; use "
                f"advantage.{key}={default[key]}, or another advantage.name",
                [{f"advantage.{key}": default[key]}],
            )

    @property
    def uses_reference(self) -> bool:
        """Returns whether log-probs of a reference are asked for."""
        return self.policy.kl_coef > 0 or self.reward.kl_coef > 0


KINDS = {"conversations": SFTConfig, "preferences": DPOConfig, "task": RLConfig}
COMMANDS = {SFTConfig: "sft", DPOConfig: "dpo", RLConfig: "rl"}
