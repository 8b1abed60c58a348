"""Environment variables are as they were after a test, and those that it left alone are not set again."""

import os

import environment


def test_what_was_set_changed_and_removed_is_as_before_and_nothing_else_is_touched(monkeypatch):
    monkeypatch.setenv("JAXFB_CHANGED", "1")
    monkeypatch.setenv("JAXFB_REMOVED", "2")
    before, touched = dict(os.environ), []
    os.environ["JAXFB_CHANGED"], os.environ["JAXFB_ADDED"] = "3", "4"
    del os.environ["JAXFB_REMOVED"]
    monkeypatch.setattr(os, "putenv", lambda name, value: touched.append(name))
    monkeypatch.setattr(os, "unsetenv", lambda name: touched.append(name))
    environment.restore(before)
    assert dict(os.environ) == before
    assert sorted(touched) == [b"JAXFB_ADDED", b"JAXFB_CHANGED", b"JAXFB_REMOVED"]
