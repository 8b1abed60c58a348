"""Searches: draws cases, runs them in separate processes, makes findings small. No JAX in here."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import local

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.drawing.shrink import MOST_TRIES, shrink
from jaxfb.checking.found import Found, Result
from jaxfb.checking.outcome import Outcome
from jaxfb.checking.worker import Request, Setup, Worker

Run = Callable[[Request], tuple[Case, Outcome]]
Report = Callable[[Result], None]


def search(
    number: int,
    setup: Setup,
    first: int = 0,
    jobs: int = 1,
    tries: int = MOST_TRIES,
    report: Report = lambda result: None,
) -> Found:
    """Runs cases first, first + 1, ... of the setup's seed, and shrinks those that find something.

    Args:
      jobs: how many processes at a time.
      tries: how many smaller cases to try for a finding; 0 leaves it as it is.
      report: called with every result as it comes.

    Raises:
      ValueError: the user's model cannot be used.
    """
    begun = time.monotonic()
    indices = range(first, first + number)
    if jobs == 1:
        with closing(Worker(setup)) as worker:
            results = [result_of(index, worker, tries, report) for index in indices]
    else:
        results = _side_by_side(indices, setup, jobs, tries, report)
    return Found(tuple(results), setup.seed, setup.model, time.monotonic() - begun)


def result_of(index: int, run: Run, tries: int, report: Report) -> Result:
    """Runs case `index`, and makes it small if it finds something."""
    case, outcome = run(index)
    smallest = None
    if outcome.is_finding and tries:
        smallest = shrink(case, lambda smaller: run(smaller)[1].like(outcome), tries)
    result = Result(index, case, outcome, smallest)
    report(result)
    return result


def _side_by_side(indices: range, setup: Setup, jobs: int, tries: int, report: Report) -> list[Result]:
    """Runs the cases with a worker for every thread."""
    own, workers = local(), []

    def run(index):
        if not hasattr(own, "worker"):
            own.worker = Worker(setup)
            workers.append(own.worker)
        return result_of(index, own.worker, tries, report)

    try:
        with ThreadPoolExecutor(jobs) as pool:
            return list(pool.map(run, indices))
    finally:
        for worker in workers:
            worker.close()
