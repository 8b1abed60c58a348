"""Implements what every kind of post-training has in common for the training loop; see `jaxfb.training.work.Work`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from jaxfb.batch_plan import RolloutPlan, RunPlan
from jaxfb.config import save_yaml
from jaxfb.config.adapters import trained_patterns
from jaxfb.config.post_training import COMMANDS
from jaxfb.models.trained_flops import trained_flops
from jaxfb.refusal import Refused
from jaxfb.rl.start import Base
from jaxfb.training.from_config.sizes import abstract_params, config_with_model
from jaxfb.training.job.agreement import devices_and_mesh
from jaxfb.training.parameters import carry_from
from jaxfb.training.persistence.changes import FLAG
from jaxfb.training.run_dir import RunDirectory
from jaxfb.training.work import Work
from jaxfb.update.train_state import TrainState

PyTree = Any


class PostTraining(Work):
    """The part of a `Work` that does not depend on the kind.

    base: what it is made of. plan: of its updates. train_state: of the model that is trained.
    """

    learns_from = ("rows", "file and tokenizer")  # in words, and what they follow from
    starts_with_evaluation = True
    base: Base
    plan: RunPlan | RolloutPlan

    @property
    def config(self) -> Any:
        return self.base.config

    @property
    def command(self) -> str:
        return COMMANDS[type(self.config)]

    @property
    def mesh(self) -> Any:
        return self.base.mesh

    @property
    def tokenizer(self) -> Any:
        return self.base.tokenizer

    @cached_property
    def abstract_params(self) -> PyTree:
        return abstract_params(self.config, self.base.sizes)

    @property
    def flops_per_token(self) -> float:
        return trained_flops(self.base.sizes, self.row_length, trained_patterns(self.config)).total

    @property
    def total(self) -> int:
        return self.plan.total_updates

    @property
    def row_length(self) -> int:
        """Returns tokens of a row."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Returns the plans as plain values."""
        return self.plan.to_dict()

    def facts(self) -> Mapping[str, Any]:
        made = self.to_dict()
        text = {"text: train": made.pop("text"), "tokenizer": self.tokenizer.fingerprint}
        chat = {"stop tokens": list(self.base.chat.stop_tokens)}
        return {**text, **chat, "plans": made, **devices_and_mesh(self.mesh)}

    def write_start(self, directory: RunDirectory) -> None:
        self.base.chat.save(directory.path)
        carry_from(self.config, directory)
        if self.config.start.run is not None:
            save_yaml(config_with_model(self.config), directory.first_config)

    def state(self) -> PyTree:
        return flat(super().state())

    def check_same_text(self, saved: Mapping[str, Any]) -> None:
        """Refuses to continue with other rows than the saved run was trained on; older runs have no fingerprint."""
        mine, (what, source) = self.to_dict()["text"], self.learns_from
        if saved.get("text", mine) != mine:
            raise Refused(
                f"[data] the saved run was trained on other {what} (fingerprint {saved['text']}, these have {mine}); "
                f"use its {source}, another run.dir, or {FLAG} to continue anyway"
            )


def flat(state: TrainState) -> dict[str, Any]:
    """Returns a TrainState as a dict of its fields, so that a checkpoint has its parameters under "params"."""
    return {name: value for name, value in vars(state).items() if value is not None}
