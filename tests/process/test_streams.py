"""A process whose output nobody takes goes on, and ends with the exit code that it would have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfb.display import Progress
from jaxfb.process.streams import WhileTaken
from jaxfb.training.job import watch

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="no device that is always full")


def test_output_to_a_terminal_that_is_gone_is_dropped(capsys):
    controller, terminal = os.openpty()
    with open(terminal, "w", buffering=1) as stream:
        os.close(controller)  # writing fails with EIO from now on
        passed = WhileTaken(stream)
        passed.write("update 1\n"), passed.write("update 2\n"), passed.flush()
    assert capsys.readouterr().err.count("nobody reads the output any more") == 1


@needs_full
def test_output_to_a_full_disk_is_dropped(capsys):
    """It ended a run with a sentence that named no file, without a save."""
    with FULL.open("w") as stream:  # closing it flushes what it still has
        passed = WhileTaken(stream)
        passed.write("update 1\n"), passed.flush(), passed.write("update 2\n"), passed.flush()
    said = capsys.readouterr().err
    assert (
        said
        == "jaxfb: the output cannot be written (No space left on device); training continues without it\n"
    )


LOOK = """
import os, sys
from jaxfb.cli import commands

def look(options):
    with open({seen!r}, "w") as file:
        file.writelines(os.readlink(f"/proc/self/fd/{{number}}") + "\\n" for number in range(3))

commands.HANDLERS["schedule"] = look
sys.argv[1:] = ["schedule"]
sys.exit(commands.main())
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed")
def test_no_file_of_a_command_gets_the_number_of_a_stream_that_the_shell_has_closed(tmp_path):
    """The lock of a run was number 2, where libraries print; a closed standard output ended a run with a traceback."""
    program, seen = tmp_path / "look.py", tmp_path / "seen"
    program.write_text(LOOK.format(seen=str(seen)))
    done = subprocess.run(["sh", "-c", f"exec {sys.executable} {program} <&- >&- 2>&-"], timeout=100)
    assert (done.returncode, seen.read_text()) == (0, "/dev/null\n" * 3)


def test_progress_may_be_shown_to_nobody(monkeypatch):
    """A program whose standard output is closed ended with an AttributeError."""
    monkeypatch.setattr(sys, "stdout", None)
    Progress(total=2).say("update 1")
    Progress(total=2, stream=WhileTaken(None)).say("update 1")


@needs_full
def test_an_exit_code_does_not_depend_on_whether_its_reason_can_be_printed():
    """A refusal whose sentence a full disk did not take ended with 1, and a run that a signal had stopped with 120."""
    command = [sys.executable, "-m", "jaxfb", "train", "no/such/file.yaml"]
    with FULL.open("w") as full:
        assert subprocess.run(command, stderr=full, timeout=100).returncode == 2


@needs_full
def test_a_process_that_is_to_end_now_ends_where_it_cannot_print(monkeypatch):
    """It went on waiting for a process that was lost, since the thread that should have ended it had failed."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with pytest.raises(OSError, match="No space"), FULL.open("w") as stream:  # as it is closed
        print("what is still buffered", file=stream)
        monkeypatch.setattr(sys, "stdout", stream)
        watch.leave(76)
        assert ended == [76]
