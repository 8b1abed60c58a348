"""The tests' compiled programs: kept in one folder of the user's for all checkouts, for a month."""

import os
import time

import program_cache


def test_the_folder_is_this_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = program_cache.directory()
    assert found == tmp_path / "jaxfb" / "tests" and found.stat().st_mode & 0o077 == 0


def test_without_a_home_that_can_be_written_to_it_is_in_the_checkout(tmp_path, monkeypatch):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert program_cache.directory().parts[-2:] == (".cache", "jax")


def test_only_old_programs_are_removed(tmp_path):
    days = {"old-cache": 31, "new-cache": 29, "notes": 100}
    for name, age in days.items():
        (tmp_path / name).touch()
        then = time.time() - age * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    program_cache.remove_old(tmp_path, days=30)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "notes"}
