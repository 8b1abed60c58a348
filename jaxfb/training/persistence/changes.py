"""Compares the config of a saved run with the one that it is resumed with, and decides which keys may differ.

The checkpoint itself refuses parameters of other shapes, and the data those of other rows (`Loader.restore`). This
file is about what no shape shows: a model that reads the same parameters in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxfb.config import as_yaml, config_from_dict, config_to_dict, table
from jaxfb.config.model import FREE_OF_MODEL
from jaxfb.config.show import leaves_of
from jaxfb.refusal import Refused

FLAG = "--allow-changes (allow_changes=True in a program)"
ABSENT = "(absent)"

# A restored state has its random key already, so another seed would be printed and not be used.
FIXED_KEYS = ("run.seed",)
# Post-training: what the saved position, rollout or reference was made from.
FIXED_SECTIONS = ("start", "task", "warm_start", "lora", "trainable")
# The pairs belong to the reference's log-probs that are saved with them, so that no flag allows others.
NEVER_OFFERED = "preferences."
# The rows themselves are compared, so that a file may be moved.
FIXED_OF_ROWS = ("held_out_fraction", "template", "learn", "sequence_length", "truncate")

Change = tuple[str, Any, Any]


def check_changes(saved: Mapping[str, Any], config: Any, update: int, offer: bool = True) -> None:
    """Refuses a config that gives what was saved another meaning.

    Args:
      saved: the config of the checkpoint, as plain nested values.
      config: the one to continue with.
      update: of the checkpoint.
      offer: name the flag that allows it.
    Raises:
      ValueError: a key has another value that the saved parameters, rows or rollout were made with.
    """
    if fixed := [change for change in changes_between(saved, config) if is_fixed(change[0])]:
        had = " and ".join(f"{key}={as_yaml(old)} (now {as_yaml(new)})" for key, old, new in fixed)
        offer = offer and not any(key.startswith(NEVER_OFFERED) for key, _, _ in fixed)
        choices = f", another run.dir, or {FLAG} to continue anyway" if offer else " or another run.dir"
        raise Refused(
            f"[config] the run saved at update {update} has {had}, which would give its parameters or its rows another "
            f"meaning; use the saved values{choices}"
        )


def listing(changes: list[Change]) -> str:
    """Returns one indented line for each change, each after a line break; empty where there is none."""
    return "".join(f"\n  {key}: {as_yaml(old)} -> {as_yaml(new)}" for key, old, new in changes)


def changes_between(saved: Mapping[str, Any], config: Any) -> list[Change]:
    """Returns (key, saved value, new value) of every leaf that differs, in the order of the config."""
    old, new = dict(leaves_of(_with_defaults(saved))), dict(table(config))
    return [
        (key, old.get(key, ABSENT), new.get(key, ABSENT))
        for key in {**new, **old}
        if old.get(key, ABSENT) != new.get(key, ABSENT)
    ]


def skipped_too_late(saved: Mapping[str, Any], config: Any, update: int) -> str | None:
    """Returns a sentence where run.skip_updates newly names updates that were made before `update`, which is saved."""
    known = saved.get("run", {}).get("skip_updates", ())
    late = [
        number
        for number in getattr(config.run, "skip_updates", ())
        if number <= update and number not in known
    ]
    if not late:
        return None
    return (
        f"run.skip_updates={late}: the state saved after update {update} has their rows already, and keeps them; to "
        "leave them out, move the checkpoints after them away and resume"
    )


def check_model(saved: Mapping[str, Any], config: Any) -> None:
    """Refuses to read saved parameters by another model, as for an evaluation; whatever else differs is accepted.

    Raises:
      ValueError: a key of `model` that gives the parameters another meaning is not the saved run's.
    """
    changes = [c for c in changes_between(saved, config) if c[0].startswith("model") and is_fixed(c[0])]
    if changes:
        had = " and ".join(f"{key}={as_yaml(old)} (now {as_yaml(new)})" for key, old, new in changes)
        raise Refused(
            f"[eval] the run was trained with {had}; leave that out, since the saved parameters would be read wrongly"
        )


def other_text(record: Mapping[str, Any], config: Any, fingerprint: str) -> str | None:
    """Returns a sentence where rows to train on, of this fingerprint, are not those of the saved run; None otherwise.

    Also None where the held-out files or the cut into rows were changed: then the rows to train on tell nothing.
    """
    saved = record.get("data", {}).get("fingerprint", fingerprint)
    changed = {key for key, _, _ in changes_between(record["config"], config)}
    if saved == fingerprint or changed & {"data.held_out_path", "data.sequence_length", "data.packing"}:
        return None
    return (
        f"this is not the text that the run was trained on (its rows were {saved}, these are {fingerprint}), so the "
        "loss does not compare with the run's own, and what is held out here may be text that it was trained on"
    )


def is_fixed(key: str) -> bool:
    """Returns whether another value of this key gives what is saved another meaning."""
    section, _, name = key.partition(".")
    if section == "model":
        return name not in FREE_OF_MODEL
    if key == "lora.dropout":
        return False
    if section in ("conversations", "preferences"):
        return name in FIXED_OF_ROWS
    return key in FIXED_KEYS or section in FIXED_SECTIONS


def _with_defaults(saved: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the saved values with those that a newer jaxfb has added, where it can still read them."""
    try:
        return config_to_dict(config_from_dict(saved))
    except ValueError:
        return saved
