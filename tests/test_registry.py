"""Names of interchangeable parts: one list each, and parts of one's own from any package."""

import sys

import pytest

from jaxfb.cli.commands import main
from jaxfb.config import load_config
from jaxfb.registry import Registry, load
from jaxfb.schedules import KINDS, NAMES, make


def test_a_name_is_looked_up_or_refused_with_the_nearest():
    parts = Registry("colour")
    parts.register("red")("#f00")
    assert parts["red"] == "#f00" and parts.names == ("red",)
    with pytest.raises(ValueError, match=r"\[colour\] unknown colour 'rad'; use 'red' \(known: red\)"):
        parts["rad"]
    with pytest.raises(ValueError, match="the name 'red' is taken"):
        parts.register("red")("#e00")
    with pytest.raises(ValueError, match="unknown colour None"):
        parts[None]


def later(num_stages, num_microbatches, num_chunks):
    return make("1f1b", num_stages, num_microbatches, num_chunks)


def test_a_function_where_a_name_is_expected_is_refused_with_the_name_that_it_has():
    """The sentence offered 'zero_bubble', the nearest to an empty text."""
    with pytest.raises(ValueError, match=rf"must be a name; use '{__name__}:later'") as refusal:
        make(later, 2, 4)
    (choice,) = refusal.value.choices
    assert make(**choice, num_stages=2, num_microbatches=4).num_microbatches == 4


@pytest.mark.parametrize(
    "name", [None, 3, lambda *sizes: make("1f1b", *sizes)], ids=["none", "number", "lambda"]
)
def test_what_no_name_stands_for_is_refused_without_a_nearest_one(name):
    with pytest.raises(ValueError, match="must be a name: one of .*1f1b.* or your own as") as refusal:
        make(name, 2, 4)
    assert not refusal.value.choices and "use '" not in str(refusal.value)


@pytest.mark.parametrize(
    "path, wanted",
    [
        ("no_such_module:x", "cannot be imported"),
        ("math:tau_tau", "math has no tau_tau"),
        ("os.system('x'):y", "must be written as 'package.module:attribute'"),
        (":x", "must be written as"),
    ],
)
def test_a_path_that_names_nothing_is_refused(path, wanted):
    with pytest.raises(ValueError, match=wanted):
        load(path, "part")


SCHEDULE = """
from jaxfb.schedules import schedule_kind
from jaxfb.schedules.builders.one_f_one_b import one_f_one_b

@schedule_kind("one_of_a_test", chunks=lambda asked: (2,))
def mine(num_stages, num_microbatches, num_chunks):
    return one_f_one_b(num_stages, num_microbatches, num_chunks, "one_of_a_test")
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of the user's own, in the directory where they work."""
    (tmp_path / "my_parts.py").write_text(SCHEDULE)
    monkeypatch.chdir(tmp_path)
    yield "my_parts"
    sys.modules.pop("my_parts", None)
    KINDS._parts.pop("one_of_a_test", None)
    sys.path[:] = [entry for entry in sys.path if entry != str(tmp_path)]


def test_a_schedule_of_ones_own_needs_one_file(package, capsys):
    assert (
        main(["schedule", "--pipe", "2", "--microbatches", "4", "--chunks", "2", "--kind", "my_parts:mine"])
        == 0
    )
    assert "one_of_a_test" in capsys.readouterr().out
    assert make("one_of_a_test", 2, 4, 2).validate().num_chunks == 2
    config = load_config("quickstart", ["mesh.pipe=2", "mesh.dp=1", "schedule=my_parts:mine", "chunks=2"])
    assert config.schedule == "my_parts:mine"
    assert main(["schedule", "--pipe", "2", "--microbatches", "4", "--compare"]) == 0
    assert "| one_of_a_test " in capsys.readouterr().out


def test_an_unknown_schedule_is_refused_by_the_config_with_every_name(capsys):
    assert main(["config", "show", "quickstart", "mesh.pipe=2", "schedule=zero_buble"]) == 2
    error = capsys.readouterr().err
    assert "use 'zero_bubble'" in error and all(name in error for name in NAMES)
