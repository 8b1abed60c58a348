"""The tests' compiled programs are kept in the checkout, for a month."""

import os
import time

import program_cache


def test_only_old_programs_are_removed(tmp_path):
    days = {"old-cache": 31, "new-cache": 29, "notes": 100}
    for name, age in days.items():
        (tmp_path / name).touch()
        then = time.time() - age * 24 * 3600
        os.utime(tmp_path / name, (then, then))
    program_cache.remove_old(tmp_path, days=30)
    assert {path.name for path in tmp_path.iterdir()} == {"new-cache", "notes"}
