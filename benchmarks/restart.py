"""Times from the death of a process to the next applied update under `jaxfb launch`, and counts the lost updates.

python benchmarks/restart.py              # six minutes on two cores; the quickstart, a process for each CPU device

A process is killed with SIGKILL, of two in turn process 1 and process 0 (which runs the coordinator), each time after
the run has made 24 updates since its last start; the compile cache is warm from the first start. A checkpoint in the
run directory after 50 updates, without and with others on the hosts' own disks after every second one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import RESULTS, machine

KILLS, UPDATES, PATIENCE = 3, 24, 300.0
SETTINGS = ("checkpoint.every=50", "eval.every=null", "log.every=1", "run.updates=100000")
LOCAL = ("checkpoint.local.every=2", "checkpoint.local.dir=$DISK")


def updates(metrics: Path) -> int:
    """The number of records, which fall when a resumed run drops those behind its checkpoint."""
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def children(job: subprocess.Popen) -> list[int]:
    """The processes of the job, in the order of their start."""
    found = subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout
    return sorted(map(int, found.split()))


def wait(condition) -> float:
    """Seconds until the condition holds."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > PATIENCE:
            raise TimeoutError("nothing happened")
        time.sleep(0.02)
    return time.monotonic() - began


def seconds_of_a_kill(job: subprocess.Popen, metrics: Path, index: int) -> dict[str, float]:
    """Kills one process; how long until all are started again, and until the next record is there."""
    before = children(job)
    began = time.monotonic()
    os.kill(before[index], signal.SIGKILL)
    made = updates(metrics)
    started = wait(lambda: len(set(children(job)) - set(before)) == len(before))
    seen = [made]

    def is_one_more() -> bool:
        now = updates(metrics)
        seen[0] = min(seen[0], now)
        return now > seen[0]

    wait(is_one_more)
    seconds = time.monotonic() - began
    return {"killed": index, "seconds to the new processes": round(started, 1),
            "seconds to the next update": round(seconds, 1), "updates lost": made - seen[0]}  # fmt: skip


def kills(processes: int, settings: tuple[str, ...]) -> list[dict[str, float]]:
    """Seconds and updates of each kill of one job."""
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        where = [f"run.dir={directory}/run", f"data.cache_dir={directory}/data"]
        line = [
            sys.executable,
            "-m",
            "jaxfb.cli",
            "launch",
            "--processes",
            str(processes),
            "--restarts",
            str(KILLS),
        ]
        line += ["train", "configs/quickstart.yaml", *settings, *where]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "DISK": f"{directory}/disk"}
        metrics = Path(directory) / "run" / "metrics.jsonl"
        with (Path(directory) / "log").open("w") as log:
            job = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                for number in range(KILLS):
                    least = updates(metrics) + UPDATES
                    wait(lambda least=least: updates(metrics) >= least)
                    rows.append(seconds_of_a_kill(job, metrics, (number + 1) % processes))
            finally:
                job.terminate()
                job.wait(60)
    return rows


def main() -> None:
    """Measures, prints and writes the seconds."""
    rows, facts = {}, machine()
    for processes in (1, 2):
        for name, more in {"run directory": (), "local disks too": LOCAL}.items():
            case = f"{processes} process{'es' * (processes > 1)}, {name}"
            rows[case] = kills(processes, (*SETTINGS, *more))
            print(case, *rows[case], sep="\n  ", flush=True)
    settings = {"overrides": SETTINGS, "local": LOCAL, "kills": KILLS, "updates": UPDATES}
    numbers = {"benchmark": "restart", "settings": settings, "machine": facts, "rows": rows}
    (RESULTS / "restart.json").write_text(json.dumps(numbers, indent=2) + "\n")


if __name__ == "__main__":
    main()
