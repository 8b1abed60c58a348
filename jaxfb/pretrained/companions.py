"""The files beside a model's weights: tokenizer, chat template, special tokens and generation config, as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

from jaxfb.refusal import Refused

CARRIED = "hf"  # in a run's directory: config.json and the companions of the model that it began with
OF_A_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
COMPANIONS = (
    *OF_A_TOKENIZER,
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
)


def copy_companions(source: Path, target: Path, also: tuple[str, ...] = ()) -> list[Path]:
    """Copies the files of these names that there are, unchanged; returns the copies.

    Raises:
      ValueError: one of them is a symbolic link to nothing, as in a download that is not complete.
    """
    for name in (*also, *COMPANIONS):
        if (source / name).is_symlink() and not (source / name).exists():
            raise Refused(
                f"[hf] {source / name} is a symbolic link to nothing, as in a download that is not complete; download "
                "the model again"
            )
    found = [name for name in (*also, *COMPANIONS) if (source / name).is_file()]
    return [Path(shutil.copyfile(source / name, target / name)) for name in found]


def carry(source: str | Path, run_dir: str | Path) -> Path:
    """Copies config.json and the companions into a run's directory; returns where they are then."""
    target = Path(run_dir) / CARRIED
    target.mkdir(exist_ok=True)
    copy_companions(Path(source), target, ("config.json",))
    return target
