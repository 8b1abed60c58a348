"""Where compiled programs of the tests are kept for later runs: one folder of the user's, for all checkouts."""

import os
import time
from contextlib import suppress
from pathlib import Path

KEPT_DAYS = 30
_BESIDE_THE_TESTS = Path(__file__).resolve().parent.parent / ".cache" / "jax"


def directory() -> Path:
    """Returns $XDG_CACHE_HOME/jaxfb/tests, else ~/.cache/jaxfb/tests, else .cache/jax of this checkout.

    What lies in it is executed, so nobody else may write to it.
    """
    try:
        found = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxfb" / "tests"
        found.mkdir(parents=True, exist_ok=True, mode=0o700)
        found.chmod(0o700)
    except (OSError, RuntimeError):  # no home, or one that is another's or cannot be written to
        return _BESIDE_THE_TESTS
    return found if os.access(found, os.W_OK) else _BESIDE_THE_TESTS


def remove_old(kept: Path, days: float = KEPT_DAYS) -> None:
    """Removes programs that were compiled more than `days` days ago: most are of code that has changed since."""
    oldest = time.time() - days * 24 * 3600
    for program in kept.glob("*-cache"):
        with suppress(FileNotFoundError):  # the tests of another checkout removed it meanwhile
            if program.stat().st_mtime < oldest:
                program.unlink()
