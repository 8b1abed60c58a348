"""A refusal names keys and flags as they are typed, not the arguments of Python that they become."""

from types import SimpleNamespace

import pytest

from jaxfb.cli.commands import main
from jaxfb.cli.keys import as_typed
from jaxfb.cli.options import SCHEDULE_SIZES

SCHEDULE, CONFIG = SimpleNamespace(verb="schedule"), SimpleNamespace(verb="plan", overrides=[])


@pytest.mark.parametrize(
    ("sentence", "typed"),
    [
        ("use fsdp=32 or fsdp=64", "use mesh.fsdp=32 or mesh.fsdp=64"),
        ("set data=-1 to take the rest", "set mesh.data=-1 to take the rest"),
        ("use chunks=2 or layers_per_stage=[1, 2]", "use chunks=2 or parallel.layers_per_stage=[1, 2]"),
        ("got num_chunks=3; use num_chunks=2", "got chunks=3; use chunks=2"),
        ("[mesh] auto: use mesh.fsdp=8, or pipe=2", "[mesh] auto: use mesh.fsdp=8, or pipe=2"),
        ("make it with jaxfb.make_mesh(data=2)", "make it with jaxfb.make_mesh(data=2)"),
        ("or XLA_FLAGS=--xla_force_host_platform_device_count=8", None),
        ("a mesh of data 3 and its data", None),
    ],
)
def test_arguments_become_keys_of_the_config(sentence, typed):
    assert as_typed(sentence, CONFIG) == (typed or sentence)


def test_arguments_of_a_schedule_become_its_flags():
    assert as_typed("got num_stages=3, num_chunks=2; use num_pieces=1", SCHEDULE) == (
        "got --pipe 3, --chunks 2; use --pieces 1"
    )
    assert set(SCHEDULE_SIZES) == {"pipe", "microbatches", "chunks", "pieces"}


def test_other_commands_keep_their_sentences():
    assert as_typed("use fsdp=32", SimpleNamespace(verb="bench")) == "use fsdp=32"


def test_both_sizes_that_are_equally_near_are_proposed_by_their_key(capsys):
    assert main(["plan", "8b", "--topology", "v5p:4x4x4", "--no-compile", "mesh.fsdp=48"]) == 2
    said = capsys.readouterr().err
    assert said == "jaxfb: a mesh of fsdp 48 cannot be made of 64 devices; use mesh.fsdp=32 or mesh.fsdp=64\n"
    assert main(["plan", "8b", "--topology", "v5p:4x4x4", "--no-compile", "mesh.fsdp=64"]) == 0


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("mesh.tpp", "mesh.tp"),
        ("mesh.ppp", "mesh.pp"),
        ("mesh.fsdpp", "mesh.fsdp"),
        ("mesh.tensr", "mesh.tensor"),
    ],
)
def test_a_misspelt_alias_is_answered_by_the_alias(wrong, right, capsys):
    assert main(["config", "show", "quickstart", f"{wrong}=2"]) == 2
    assert f"unknown key {wrong}; did you mean {right}?" in capsys.readouterr().err
