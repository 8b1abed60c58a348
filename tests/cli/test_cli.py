"""The command line refuses in one sentence, quickly, and hands the trainer what was asked for."""

import errno
import os
import resource
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from tiny import write_tiny

import jaxfb
from jaxfb.cli import commands
from jaxfb.cli.commands import main
from jaxfb.cli.options import EXAMPLES, parse
from jaxfb.refusal import Missing, Refused, StorageError

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "quickstart.yaml")


class Stopped(Exception):
    exit_code = 78


@pytest.fixture
def calls(monkeypatch):
    """What the trainer was called with; training raises `calls.error` where it is set."""
    seen = SimpleNamespace(made=[], error=None, status="finished")

    def train(*args, **kwargs):
        seen.made.append((args, kwargs))
        if seen.error:
            raise seen.error
        return SimpleNamespace(status=seen.status)

    def other(*args, **kwargs):
        seen.made.append((args, kwargs))
        return "generated text"

    trainer = SimpleNamespace(
        train=train,
        evaluate=other,
        generate=other,
        GuardAbort=Stopped,
        LostProcess=ConnectionError,
    )
    monkeypatch.setitem(sys.modules, "jaxfb.trainer", trainer)
    monkeypatch.setattr(jaxfb, "trainer", trainer, raising=False)
    return seen


def test_train_takes_options_and_overrides_in_any_order(calls):
    assert main(["train", QUICKSTART, "mesh.tp=2", "--resume", "run.updates=70"]) == 0
    (config,), options = calls.made[0]
    assert (config.mesh.tensor, config.run.updates) == (2, 70)
    assert options == {"resume": True, "fresh": False, "allow_changes": False}


def test_exit_codes_tell_how_a_run_ended(calls):
    calls.status = "interrupted"
    assert main(["train", QUICKSTART]) == 75
    calls.error = Stopped("10 updates in a row were not finite")
    assert main(["train", QUICKSTART]) == 78


def test_a_run_is_named_by_directory_or_config(calls, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("runs/quickstart").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(Path(QUICKSTART).read_text())
    assert main(["eval", str(tmp_path), "eval.batches=3"]) == 0
    assert main(["generate", QUICKSTART, "--prompt", "def ", "--tokens", "5"]) == 0
    assert calls.made[0][0] == (tmp_path, ["eval.batches=3"])
    assert calls.made[1] == ((Path("runs/quickstart"), "def "), {"tokens": 5, "seed": 0, "raw": False})
    assert capsys.readouterr().out == "generated text\n"


def test_config_show(capsys):
    assert main(["config", "show", QUICKSTART, "mesh.dp=2"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    written_as_in_yaml = ["mesh.data", "2"], ["model.tied_embeddings", "true"], ["model.window", "null"]
    assert all(row in rows for row in written_as_in_yaml)


@pytest.mark.parametrize(
    "arguments, stream, words",
    [
        ([], "out", "Try `jaxfb train quickstart --smoke` first."),
        (["trian"], "err", "unknown COMMAND 'trian'; did you mean train?"),
        (["help"], "err", "unknown COMMAND 'help'; did you mean --help?"),
        (["version"], "err", "unknown COMMAND 'version'; did you mean --version?"),
        (["train"], "err", "required: CONFIG; for example: jaxfb train quickstart --smoke\n"),
        (["generate", "runs/a"], "err", "is required; for example: jaxfb generate runs/quickstart --prompt"),
        (["config"], "err", "required: {show,reference}; for example: jaxfb config show quickstart\n"),
        (["chaos", "--kills", "x"], "err", "argument --kills: must be an integer, such as 18, got 'x'\n"),
        (["chat", "a", "--top-p", "x"], "err", "argument --top-p: must be a number, such as 1, got 'x'\n"),
        (["config", "shw"], "err", "did you mean show?"),
        (["plan", "a", "--topolgy", "v5p:4x4x4"], "err", "not take '--topolgy' (did you mean --topology?)"),
        (["import-hf", "a", "--output=b"], "err", "not take '--output' (did you mean --out?)"),
        (["plan", "a", "--no-comp"], "err", "required: --topology; for example"),
        (
            ["train", "quickstart", "--updates", "3"],
            "err",
            "keys of the config have no dashes, such as run.updates=100; `jaxfb train --help`",
        ),
        (["frobnicate"], "err", "choose from"),
    ],
)
def test_a_wrong_command_is_answered_by_what_would_be_right(arguments, stream, words, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and words in getattr(capsys.readouterr(), stream)


@pytest.mark.parametrize(
    "arguments, name, value",
    [
        (["export-hf", "runs/a", "adapter", "--adapter"], "directory", "adapter"),
        (["generate", "runs/a", "--prompt", "seed"], "prompt", "seed"),
        (["train", "smoke"], "config", "smoke"),
    ],
)
def test_a_text_or_a_path_may_be_called_as_an_option_is(arguments, name, value):
    assert getattr(parse(arguments), name) == value


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_of_a_command_is_one_that_it_takes(name):
    assert parse(shlex.split(EXAMPLES[name])[1:]).verb == name


@pytest.mark.parametrize("name", ["kills", "flips", "skip"])
def test_a_number_of_faults_below_zero_is_answered_by_the_nearest(name, capsys):
    assert main(["chaos", f"--{name}=-1"]) == 2
    said = capsys.readouterr().err
    assert said == f"jaxfb: [chaos] --{name} -1 must not be negative; use --{name} 0 for none\n"


def test_an_unknown_benchmark_is_answered_by_one_that_is_spelt_alike_or_none(capsys):
    assert main(["bench", "gpuu"]) == main(["bench", "frobnicate"]) == 2
    near, far = capsys.readouterr().err.splitlines()
    assert near.endswith("no benchmark 'gpuu'; did you mean gpu? `jaxfb bench` lists them")
    assert far.endswith("no benchmark 'frobnicate'; `jaxfb bench` lists them")


def test_refusals_are_one_sentence_and_code_2(calls, capsys):
    assert main(["train", QUICKSTART, "model.hiden_size=3"]) == 2
    expected = "jaxfb: [config] unknown key model.hiden_size; did you mean model.hidden_size?\n"
    assert capsys.readouterr().err == expected and not calls.made
    for arguments in (
        ["train"],
        ["trian", QUICKSTART],
        ["train", QUICKSTART, "--resum-e"],
        ["config", "show"],
    ):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2


def test_another_librarys_error_keeps_its_traceback(calls):
    calls.error = ValueError("shapes (3,) and (4,) do not match")
    with pytest.raises(ValueError, match="do not match"):
        main(["train", QUICKSTART])


@pytest.mark.parametrize(
    "error, code",
    [
        (Refused("rows=3 must be even; use 4"), 2),
        (Missing("no checkpoint in runs/x"), 2),
        (StorageError("step 3 is damaged"), 74),
    ],
)
def test_each_of_jaxfbs_own_errors_is_one_sentence_with_its_code(calls, capsys, error, code):
    calls.error = error
    assert main(["train", QUICKSTART]) == code
    assert capsys.readouterr().err == f"jaxfb: {error}\n"


@pytest.mark.processes
def test_help_imports_nothing_heavy():
    code = (
        "import sys; from jaxfb.cli.commands import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"jax", "numpy", "yaml", "pydantic", "flax", "optax", "orbax", "rich", "matplotlib"}
    assert not heavy & set(done.stdout.split())
    assert "train" in done.stdout and "generate" in done.stdout


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["--temperature", "nan"], "temperature must be a finite number of at least 0, got nan"),
        (["--temperature", "-1"], "temperature must be a finite number of at least 0, got -1.0"),
        (
            ["--seed", str(10**20)],
            f"seed must be an integer that is not negative of at most {2**32 - 1}, got {10**20}",
        ),
        (["--seed", "-1"], "seed must be an integer that is not negative, got -1"),
        (["--tokens", "0"], "tokens must be a positive integer, got 0"),
        (["--prompt", "caf\udce9"], "prompt must be text in UTF-8, got 'caf\\udce9'"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_read(tmp_path, capsys, arguments, sentence):
    (tmp_path / "config.yaml").write_text(Path(QUICKSTART).read_text())
    assert main(["generate", str(tmp_path), "--prompt", "def ", *arguments]) == 2
    assert capsys.readouterr().err == f"jaxfb: [generate] {sentence}\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.ENOTDIR])
def test_what_a_disk_refuses_is_a_sentence_and_code_74(calls, capsys, number):
    calls.error = OSError(number, os.strerror(number), "runs/x/plan.json.tmp")
    assert main(["train", QUICKSTART]) == 74
    sentence, place = capsys.readouterr().err.split(" (")
    assert sentence == f"jaxfb: {os.strerror(number)}: runs/x/plan.json.tmp"
    assert place.startswith(
        f"{__file__}, line "
    )  # code that is not jaxfb's raised it: where a user would look
    assert main(["export-hf", "nowhere", "out"]) in (2, 74)
    assert " (" not in capsys.readouterr().err
    calls.error = OSError(errno.EBADF, "a bug")
    with pytest.raises(OSError, match="a bug"):
        main(["train", QUICKSTART])


@pytest.mark.parametrize(
    "command, code",
    [
        ("eval runs/x", 2),
        ("generate runs/x --prompt a", 2),
        ("replay runs/x", 2),
        ("export-hf runs/y runs/x", 2),
        ("init quickstart --out runs/x", 2),
        ("train runs/x", 2),
        ("eval runs/y", 74),
        (f"train {QUICKSTART}", 74),
    ],
)
def test_a_path_of_the_command_that_may_not_be_read_or_written_is_refused(monkeypatch, capsys, command, code):
    def denied(options):
        raise PermissionError(
            errno.EACCES, os.strerror(errno.EACCES), str(Path("runs/x/config.yaml").absolute())
        )

    verb, *arguments = command.split()
    monkeypatch.setitem(commands.HANDLERS, verb, denied)
    assert main([verb, *arguments]) == code
    assert "runs/x/config.yaml" in capsys.readouterr().err


def test_too_many_open_files_are_one_sentence_that_names_the_limit(calls, capsys, monkeypatch):
    calls.error = StorageError("[checkpoint] step 3 could not be written")
    calls.error.__cause__ = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert main(["train", QUICKSTART]) == 74
    assert capsys.readouterr().err == f"jaxfb: {calls.error}; allow more open files: ulimit -n 4096\n"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (24, 24))
    assert main(["train", QUICKSTART]) == 2
    assert "this process may open 24 files" in capsys.readouterr().err and len(calls.made) == 1


def test_too_many_open_files_in_the_compiler_are_one_sentence_too(calls, capsys):
    """XLA's error has the system's words and not its number."""
    words = "INTERNAL: Failed to open x.o: Too many open files"
    calls.error = jax.errors.JaxRuntimeError(f"{words}\nwith a stack trace of C++")
    assert main(["train", QUICKSTART]) == 74
    assert capsys.readouterr().err == f"jaxfb: {words}; allow more open files: ulimit -n 4096\n"
    calls.error = jax.errors.JaxRuntimeError("INTERNAL: another")
    with pytest.raises(jax.errors.JaxRuntimeError):
        main(["train", QUICKSTART])


def test_output_that_nobody_reads_to_its_end_is_no_error():
    """As in `jaxfb schedule ... | head`: the exit code is SIGPIPE's, without a traceback."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "jaxfb", "schedule", "--pipe", "4", "--microbatches", "8"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_characters_that_the_output_cannot_encode_are_escaped():
    """A model writes any character, and a run its sample at the end; the output may be a terminal of Latin letters."""
    code = (
        "import sys; from jaxfb.cli import commands as c; c.HANDLERS['init'] = lambda _: print('a\ufffd'); "
    )
    command = [sys.executable, "-c", code + "sys.argv[1:] = ['init']; sys.exit(c.main())"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "a\\ufffd\n", "")


@pytest.mark.processes
def test_training_continues_when_nobody_reads_its_output(tmp_path):
    """As in `jaxfb train ... | head`: the run ends as it would, with one line about it among the errors."""
    read, write = os.pipe()
    os.close(read)
    command = [
        sys.executable,
        "-m",
        "jaxfb",
        "train",
        str(write_tiny(tmp_path, run={"updates": 2}, lr={"warmup": 1})),
    ]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(write)
    assert done.returncode == 0
    assert done.stderr.count("nobody reads the output any more; training continues without it") == 1
    assert (tmp_path / "run" / "summary.json").exists()


def test_training_needs_no_standard_output(calls, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["train", QUICKSTART]) == 0


@pytest.mark.parametrize(
    "out, sentence",
    [
        (".", "--out . is a directory; give a file in it"),
        ("nowhere/a.jsonl", "which is not a directory; make it first"),
    ],
)
def test_answers_that_cannot_be_written_are_not_computed(tmp_path, monkeypatch, capsys, out, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "no-run", "--prompt", "a", "--out", out]) == 2
    assert sentence in capsys.readouterr().err


def test_eval_of_a_post_trained_run_names_what_can_be_scored(tmp_path, capsys):
    text = (Path(QUICKSTART).parent / "sft.yaml").read_text()
    (tmp_path / "sft.yaml").write_text(text)
    assert main(["eval", str(tmp_path / "sft.yaml")]) == 2
    assert "is of `jaxfb sft`" in (said := capsys.readouterr().err) and "--text FILE" in said


INTERRUPTED = """
import importlib.abc, os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background may ignore it
class Interrupting(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == wanted:
            os.kill(os.getpid(), signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupting())
from jaxfb.cli import main
main()
"""


@pytest.mark.parametrize("name", ["jaxfb.cli.options", "numpy"])
def test_ctrl_c_while_modules_are_imported_is_one_word(name):
    """It was a traceback, or an ImportError of numpy's and exit code 1."""
    command = [sys.executable, "-c", INTERRUPTED, name, "eval", "quickstart"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "jaxfb: stopped\n")


LEFT_WAITING = """
import sys, threading, time
from jaxfb.cli import commands
from jaxfb.refusal import StorageError

def fails(options):
    threading.Thread(target=time.sleep, args=[100]).start()
    print("of the run")
    raise StorageError("a save failed")

commands.HANDLERS["train"] = fails
sys.argv = ["jaxfb", "train", "quickstart"]
sys.exit(commands.main())
"""


def test_a_command_that_could_not_write_does_not_wait_for_the_threads_of_its_save():
    """With too many open files those waited for each other: ten minutes after the sentence the process was there."""
    command = [sys.executable, "-c", LEFT_WAITING]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (74, "of the run\n", "jaxfb: a save failed\n")


def test_a_command_that_ctrl_c_has_ended_does_not_wait_for_what_still_runs():
    """A continuation that devices still computed was freed under them: exit code 139 for 130."""
    code = LEFT_WAITING.replace('StorageError("a save failed")', "KeyboardInterrupt")
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "of the run\n", "jaxfb: stopped\n")
