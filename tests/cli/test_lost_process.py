"""A process that another one leaves alone ends with a sentence and an exit code that tells whether to start again."""

import pytest

from jaxfb.cli.commands import main
from jaxfb.inference import command
from jaxfb.training.job.watch import LostProcess

COMMANDS = {
    "eval": (["eval", "hf", "--text", "a.txt"], "evaluate"),
    "generate": (["generate", "hf", "--prompt", "a", "--samples", "2"], "generate"),
}


@pytest.mark.parametrize("code", [{}, {"exit_code": 2}], ids=["lost", "refused"])
@pytest.mark.parametrize("arguments, name", COMMANDS.values(), ids=COMMANDS)
def test_a_lost_process_is_a_sentence_and_an_exit_code(arguments, name, code, monkeypatch, capsys):
    def lost(options):
        raise LostProcess("[hosts] process 1 of 2 (b) has failed; start again", **code)

    monkeypatch.setattr(command, name, lost)
    assert main(arguments) == code.get("exit_code", 76)
    assert capsys.readouterr().err == "jaxfb: [hosts] process 1 of 2 (b) has failed; start again\n"
