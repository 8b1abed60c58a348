"""The page that describes every key is the one that the code writes."""

import subprocess
import sys
from pathlib import Path

from jaxfb.config.reference import reference


def test_the_page_of_keys_is_what_the_command_writes():
    page = Path(__file__).parents[2] / "docs" / "config.md"
    assert page.read_text() == reference(), "write it again: jaxfb config reference > docs/config.md"


def test_a_key_has_its_legal_values_default_and_meaning():
    row = next(line for line in reference().splitlines() if line.startswith("| `model.rope_scaling.factor`"))
    meaning = "how many times longer sequences may be than those that the model was trained on."
    assert row == f"| `model.rope_scaling.factor` | number | must be given | {meaning} |"


def test_every_key_has_a_meaning():
    rows = [line for line in reference().splitlines() if line.startswith("| `")]
    assert rows and not [row for row in rows if row.endswith("|  |")]


def test_without_docstrings_the_page_is_refused():
    """Every meaning was empty."""
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "jaxfb", "config", "reference"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "") and "made of docstrings" in done.stderr
