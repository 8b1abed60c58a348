"""A checkpoint records what decides its bits beside the config; a run that goes on with something else prints it."""

import errno
import os
import shutil
from pathlib import Path

import jax
import pytest
from tiny import write_tiny

import jaxfb
from jaxfb import trainer
from jaxfb.config import load_config
from jaxfb.training.job import versions as module
from jaxfb.training.job.versions import package_versions, source_fingerprint, version_changes, versions

ROOT = Path(jaxfb.__file__).parent


def test_the_versions_that_a_save_records_are_read_once(monkeypatch):
    """Where too many files were open, a run ended with the name of a package's file in place of its checkpoint's."""
    package_versions()

    def fails(name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(module, "version", fails)
    assert package_versions()["jax"] == jax.__version__


@pytest.mark.parametrize("name", ["types.py", "forward_backward/scaling.py", "training/loop.py"])
def test_every_file_of_jaxfb_is_in_the_fingerprint_of_its_code(name, monkeypatch, tmp_path):
    """It was that of jaxfb/training alone: processes with unlike engines trained together."""
    copy = shutil.copytree(ROOT, tmp_path / "jaxfb", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(jaxfb, "__file__", str(copy / "__init__.py"))
    compute = source_fingerprint.__wrapped__
    assert compute() == source_fingerprint()
    with (copy / name).open("a") as file:
        file.write("# changed\n")
    assert compute() != source_fingerprint()


def test_what_differs_from_a_checkpoint_is_named_and_what_it_does_not_have_is_not():
    here = versions()
    assert version_changes(here) == []
    assert version_changes({"jax": "0.1.0", "numpy": here["numpy"]}) == [("jax", "0.1.0", here["jax"])]
    assert version_changes({"a package that is read no more": "1.0"}) == []


def test_a_run_that_resumes_with_other_versions_prints_them(monkeypatch, tmp_path, capsys):
    path = write_tiny(
        tmp_path, run={"updates": 4}, lr={"name": "constant"}, eval={"every": None, "prompt": ""}
    )
    trainer.train(load_config(path, ["run.stop_at=1"]))
    trainer.train(load_config(path, ["run.stop_at=2"]), resume=True)
    assert "other versions" not in capsys.readouterr().out
    now = versions() | {"jax": "9.9.9", "platform": "abacus"}
    monkeypatch.setattr(module, "versions", lambda: now)
    trainer.train(load_config(path, ["run.stop_at=3"]), resume=True)
    said = capsys.readouterr().out
    assert "saved with other versions, so that numbers may differ from here on:\n" in said
    assert f"\n  jax: {jax.__version__} -> 9.9.9\n" in said and "\n  platform: cpu -> abacus" in said
