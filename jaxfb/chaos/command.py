"""`jaxfb chaos`: runs the trials and prints what came of each."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from jaxfb.chaos import trials
from jaxfb.chaos.runs import Laboratory, last_sums
from jaxfb.chaos.trials import Outcome, Trial
from jaxfb.process.signals import terminated_like_ctrl_c
from jaxfb.refusal import Refused


def chosen(kills: int, flips: int, faults: bool, devices: int, skip: int = 0) -> Iterator[Trial]:
    """Returns the trials of one call: so many kills and flipped bits, and every fault once.

    skip: of the kills, so many are left out, from the first on.
    """
    yield from islice(trials.kills(kills), skip, None)
    yield from (trials.flipped_bit(seed) for seed in range(flips))
    if faults:
        yield from trials.faults()
        if devices > 1:
            yield from trials.faults_of_copies()


def run_trials(
    wanted: Iterable[Trial], laboratory: Laboratory, say: Callable[[str], None] = print
) -> list[Outcome]:
    """Runs trials one after another; prints a line for each."""
    outcomes = []
    for trial in wanted:
        began = time.monotonic()
        outcome = trial.run(laboratory)
        verdict = "; ".join(outcome.problems) if outcome.problems else "ok"
        say(f"{trial.name:36} {time.monotonic() - began:6.1f} s  {verdict}  ({outcome.note})")
        outcomes.append(outcome)
    return outcomes


def _check_reference(laboratory: Laboratory, faults: bool) -> None:
    """Makes the run without a fault before any trial: where that is refused, all trials would have this problem.

    Refuses runs that end before the last fault is noticed: it would count as one that nobody notices.
    """
    from jaxfb.chaos.faults import ENOUGH

    updates, _ = last_sums(laboratory.reference)
    if faults and updates < ENOUGH:
        raise Refused(
            f"[chaos] the runs have {updates} updates, too few for the faults inside a process, of which the last is "
            f"noticed in update {ENOUGH}; use run.updates={ENOUGH} or more, or --no-faults"
        )


def main(kills: int, flips: int, faults: bool, overrides: tuple[str, ...] = (), skip: int = 0) -> int:
    """Runs all trials but the first `skip` kills in a directory that is removed; returns 0 if nothing was wrong."""
    import jax

    with terminated_like_ctrl_c(), tempfile.TemporaryDirectory() as directory:
        laboratory = Laboratory(Path(directory), overrides)
        wanted = list(chosen(kills, flips, faults, jax.device_count(), skip))
        if wanted:
            _check_reference(laboratory, faults)
        outcomes = run_trials(wanted, laboratory)
    bad = [outcome for outcome in outcomes if outcome.problems]
    print(f"{len(outcomes)} trials, {len(bad)} with a problem")
    return 1 if bad else 0
