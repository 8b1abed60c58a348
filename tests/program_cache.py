"""Where compiled programs of the tests are kept for later runs: in this checkout.

Not for all checkouts: in a program from the cache XLA:CPU starts a loop with collectives and a collective beside it in
any order, and now and then two devices wait for each other (`jaxfb/platforms/cpu.py`). A new checkout compiles afresh.
"""

import time
from contextlib import suppress
from pathlib import Path

KEPT_DAYS = 30
DIRECTORY = Path(__file__).resolve().parent.parent / ".cache" / "jax"


def remove_old(kept: Path, days: float = KEPT_DAYS) -> None:
    """Removes programs that were compiled more than `days` days ago: most are of code that has changed since."""
    oldest = time.time() - days * 24 * 3600
    for program in kept.glob("*-cache"):
        with suppress(FileNotFoundError):  # another run of the tests removed it meanwhile
            if program.stat().st_mtime < oldest:
                program.unlink()
