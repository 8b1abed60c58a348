"""`jaxfb schedule` and `jaxfb check` as a shell sees them: output, files, exit codes."""

import json
import subprocess
import sys

import pytest
from tiny import write_tiny

from jaxfb.cli.commands import main
from jaxfb.forward_backward.equivalence import Difference, Equivalence
from jaxfb.training import check

SIZES = ["schedule", "--pipe", "4", "--microbatches", "8"]


def test_schedule_prints_the_table_and_its_price(capsys):
    assert main([*SIZES, "--kind", "interleaved", "--chunks", "2"]) == 0
    out = capsys.readouterr().out
    assert "device 0 F  F0.0  F1.0  F2.0  F3.0  F0.1" in out
    assert "28.5; 24 if no device ever idled" in out and "15.8% of the time" in out and "11 9 7 5" in out
    assert (
        main([*SIZES, "--forward", "2", "--backward-input", "2", "--backward-weight", "2", "--head", "1"])
        == 0
    )
    assert "74; 56 if no device ever idled" in capsys.readouterr().out  # 11 ticks of 6, and 8 heads


def test_schedule_writes_a_picture_and_a_trace(tmp_path, capsys):
    assert main([*SIZES, "--kind", "v_shape", "--out", str(tmp_path / "new")]) == 0
    assert capsys.readouterr().out.endswith(
        f"wrote {tmp_path}/new/v_shape.svg\nwrote {tmp_path}/new/v_shape.json\n"
    )
    assert "</svg>" in (tmp_path / "new" / "v_shape.svg").read_text()
    events = json.loads((tmp_path / "new" / "v_shape.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 4 * 2 * 8 * 2  # F and B of 2 chunks on 4 devices


def test_compare_puts_megatron_beside_all_kinds(capsys):
    assert main([*SIZES, "--compare"]) == 0
    table, legend = capsys.readouterr().out.split("\n\n")
    assert "bubble: " in legend
    names = [line.split("|")[1].strip() for line in table.splitlines()[2:]]
    assert names[:4] == ["dualpipe_v", "gpipe", "1f1b", "interleaved"] and names[-3:] == [
        "Megatron interleaved",
        "published ZB-V",
        "published DualPipeV",
    ]


def test_a_table_of_ones_own_is_read_back_and_its_bad_cell_marked(tmp_path, capsys):
    main(["schedule", "--pipe", "2", "--microbatches", "3"])
    printed = capsys.readouterr().out
    own = tmp_path / "own.txt"
    own.write_text(printed)
    assert main(["schedule", "--table", str(own)]) == 0
    assert capsys.readouterr().out == printed.replace("1f1b: ", "own: ")
    own.write_text("device 0 F0.0 B0.0\ndevice 1 . F0.0+B0.0")
    assert main(["schedule", "--table", str(own)]) == 2
    assert "[B0.0]!" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--pipe", "4"], "[schedule] --microbatches must be given, such as --pipe 4 --microbatches 8"),
        (["--pipe", "0", "--microbatches", "4"], "[schedule] --pipe 0 must be at least 1; use --pipe 1"),
        ([*SIZES[1:], "--kind", "zerobubble"], "unknown schedule 'zerobubble'; use 'zero_bubble'"),
        (
            [*SIZES[1:], "--kind", "v_shape", "--chunks", "3"],
            "got --chunks 3; use --chunks 2, or --kind interleaved for --chunks 3\n",
        ),
        ([*SIZES[1:], "--forward", "-1"], "--forward -1 must not be negative"),
        ([*SIZES[1:], "--compare", "--head", "1"], "leave out --head 1"),
        ([*SIZES[1:], "--svg", "timeline.gif"], "got --svg 'timeline.gif'; use --svg 'timeline.svg'\n"),
        (
            [*SIZES[1:], "--kind", "1f1b", "--pieces", "4"],
            "--pieces 4 cuts them; use --kind seq1f1b or --pieces 1\n",
        ),
        ([*SIZES[1:], "--compare", "--kind", "1f1b"], "without --kind 1f1b; leave it out"),
        (
            [*SIZES[1:], "--compare", "--svg", "a.svg", "--out", "b"],
            "--out b and --svg a.svg; leave them out",
        ),
        (["--table", "nowhere.txt"], "--table=nowhere.txt is not a file"),
        (["--table", "nowhere.txt", "--pipe", "2"], "already defines sizes and kind; leave out"),
    ],
)
def test_refusals_are_one_sentence_and_code_2(arguments, words, capsys):
    assert main(["schedule", *arguments]) == 2
    printed, error = capsys.readouterr()
    assert words in error and error.startswith("jaxfb: ") and error.count("\n") == 1
    assert not printed


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("xyz", ""),
        ("1f1b", " (did you mean --kind 1f1b?)"),
        ("--stages", ""),
        ("--num-chunks=2", " (did you mean --chunks?)"),
    ],
)
def test_an_argument_that_the_command_does_not_take_is_named_with_the_command(wrong, near, capsys):
    with pytest.raises(SystemExit):
        main(["schedule", wrong])
    assert (
        f"`jaxfb schedule` does not take '{wrong}'{near}; `jaxfb schedule --help`" in capsys.readouterr().err
    )


@pytest.mark.processes
def test_schedule_imports_no_jax():
    code = "import sys; from jaxfb.cli.commands import main\nmain(sys.argv[1:])\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *SIZES], capture_output=True, text=True, check=True)
    assert not {"jax", "numpy", "yaml", "matplotlib"} & set(done.stdout.split())


@pytest.mark.slow
def test_check_compares_a_configs_model_on_its_mesh(tmp_path, capsys):
    config = str(write_tiny(tmp_path, mesh={"pipe": 2, "data": 2}, model={"dropout": 0.1}))
    assert main(["check", config, "schedule=zero_bubble"]) == 0
    title, _, row, verdict = capsys.readouterr().out.splitlines()
    assert verdict == "the same gradients as on one device: all differences are at most 1e-10"
    assert title == "relative difference to one device, 16 rows in float64"
    assert row.startswith("pipe=2 data=2  zero_bubble  8 ")


def test_a_check_that_fails_is_code_1(tmp_path, capsys, monkeypatch):
    found = Equivalence("float64", 8, (Difference("data=2", "", 4, relative=1e-3, leaf="embed"),))
    monkeypatch.setattr(check, "check_config", lambda *_: found)
    arguments = ["check", str(write_tiny(tmp_path))]
    assert main(arguments) == 1
    assert capsys.readouterr().err.endswith(
        "without dividing or comparing them, and draws with each row's key\n"
    )
    assert main([*arguments, "--tolerance", "1e-2"]) == 0
    assert capsys.readouterr().out.endswith("on one device: all differences are at most 0.01\n")


def test_a_check_counts_what_it_could_not_compare(tmp_path, capsys, monkeypatch):
    some = (
        Difference("data=2", "", 4, leaf="embed"),
        Difference("pipe=2", "1f1b", refused="2 layers do not divide"),
    )
    monkeypatch.setattr(check, "check_config", lambda *_: Equivalence("float64", 8, some))
    assert main(["check", str(write_tiny(tmp_path))]) == 0
    assert capsys.readouterr().out.endswith("1e-10; 1 not compared, for the reasons in the table\n")


def test_check_refuses_what_does_not_fit(tmp_path, capsys):
    config = str(write_tiny(tmp_path, mesh={"pipe": 4, "data": 1}))
    assert main(["check", config]) == 2
    printed, said = capsys.readouterr()
    *progress, last = said.splitlines()
    assert not printed and progress[-1] == "  pipe=4 1f1b: refused"
    assert last.startswith("jaxfb: no mesh and schedule could be compared with one device: mesh.pipe=4: ")
    assert last.endswith("or parallel.layers_per_stage=[0, 1, 1, 0]") and "2 layers do not divide" in last


@pytest.mark.parametrize("name", ["sft", "dpo", "rl"])
def test_check_names_what_to_give_in_place_of_a_config_of_post_training(name, capsys):
    config = {"rl": "ppo_arithmetic"}.get(name, name)
    assert main(["check", config, "mesh.data=2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"jaxfb: [check] {config} is a config for `jaxfb {name}`; `jaxfb check` reads one for "
    )
    assert "jaxfb.check_equivalence" in said


def test_a_check_of_several_cases_lists_each_refusal_once(tmp_path, capsys, monkeypatch):
    refused = [Difference(f"pipe={size}", "1f1b", refused="no; use layers_per_stage=[1]") for size in (2, 4)]
    monkeypatch.setattr(check, "check_config", lambda *_: Equivalence("float64", 8, tuple(refused)))
    assert main(["check", str(write_tiny(tmp_path))]) == 2
    printed, said = capsys.readouterr()
    assert printed.count("refused: no; use parallel.layers_per_stage=[1]\n") == 2
    assert said.endswith("could be compared with one device; the table has the reasons\n")


def test_a_key_with_dashes_is_told_how_keys_are_written(capsys):
    with pytest.raises(SystemExit):
        main(["train", "quickstart", "--run.updates=5"])
    said = capsys.readouterr().err
    assert (
        "does not take '--run.updates=5'; keys of the config have no dashes, such as run.updates=100; `"
        in said
    )
