"""A process that is refused before it joins its job tells the others, who would wait for it for minutes."""

import time

import pytest

from jaxfb.cli import others
from jaxfb.cli.commands import main
from jaxfb.training.job import cluster, hosts

PLACE = ("--coordinator", "127.0.0.1:1", "--processes", "2", "--process-id", "1")


@pytest.fixture
def joined(monkeypatch):
    """What each job that was joined was left with: (its config, the error)."""
    left = []

    class Job:
        def __init__(self, config):
            self.config = config

        def __enter__(self):
            return self

        def __exit__(self, kind, error, trace):
            left.append((self.config, error))

    monkeypatch.setattr(hosts, "Hosts", Job)
    return left


def test_a_refusal_is_told_to_the_others(joined, tmp_path, capsys):
    assert main(["train", str(tmp_path / "none.yaml"), *PLACE]) == 2
    ((config, error),) = joined
    assert (config.coordinator, config.processes, config.process_id) == ("127.0.0.1:1", 2, 1)
    assert "none.yaml" in str(error)
    assert capsys.readouterr().err.count("\n") == 1


def test_so_is_an_error_of_another_kind(joined, tmp_path, monkeypatch, capsys):
    def fail(options):
        raise ImportError("no module of the user's own")

    monkeypatch.setitem(main.__globals__["HANDLERS"], "train", fail)
    assert main(["train", "quickstart", *PLACE]) == 1
    assert str(joined[0][1]) == "no module of the user's own"
    assert "Traceback" in capsys.readouterr().err


def test_one_process_tells_nobody(joined, tmp_path):
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert main(["export-hf", str(tmp_path / "none"), str(tmp_path / "out")]) == 2
    assert not joined


def test_a_launcher_counts_where_the_command_asks_it(joined, tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NODELIST", "node[1-2]")
    assert main(["generate", str(tmp_path / "none"), "--prompt", "x"]) == 2
    assert not joined
    assert main(["train", str(tmp_path / "none.yaml")]) == 2
    assert len(joined) == 1


def test_it_does_not_wait_for_ever(monkeypatch, tmp_path, capsys):
    class Job:
        def __init__(self, config):
            time.sleep(30)
            over.append(config)

    over = []
    monkeypatch.setattr(hosts, "Hosts", Job)
    monkeypatch.setattr(others, "SHORTLY", 0.1)
    monkeypatch.setattr(others.tell, "__defaults__", (0.5,))
    assert main(["train", str(tmp_path / "none.yaml"), *PLACE]) == 2
    assert not over
    assert "waiting for the other processes at most 0.5 s" in capsys.readouterr().err


def test_the_launchers_that_jaxfb_reads_are_all_noticed():
    told = {cluster.GIVEN["coordinator"], *(names[0] for names in cluster.NUMBERED.values())}
    assert told <= set(others.SIGNS)
