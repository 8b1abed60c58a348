"""The three commands of docs/pretrained.md: a directory comes in, learns facts, goes out and answers."""

import json

import pytest
from tiny_directory import ROOT, make

from jaxfb.cli.commands import main
from jaxfb.inference.complete import Sampling, complete
from jaxfb.inference.model import open_model

FACTS = ROOT / "examples" / "data" / "facts.jsonl"


@pytest.mark.slow
def test_a_directory_is_fine_tuned_and_answers_what_it_was_taught(tmp_path, monkeypatch, capsys):
    make(tmp_path / "tiny", num_layers=1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    assert main(["import-hf", "tiny", "--out", "runs/imported"]) == 0
    assert main(["sft", str(ROOT / "configs" / "fine_tune.yaml"), "mesh.data=1"]) == 0
    assert main(["export-hf", "runs/tuned", "tuned"]) == 0
    conversations = [json.loads(line)["messages"] for line in FACTS.read_text().splitlines()]
    questions = [messages[0]["content"] for messages in conversations]
    answers = [messages[1]["content"] for messages in conversations]
    found = complete(open_model("tuned"), questions, Sampling(tokens=16), batch=4)
    assert [texts[0] for texts in found] == answers
    assert {"chat_template.jinja", "generation_config.json"} <= {
        path.name for path in (tmp_path / "tuned").iterdir()
    }


@pytest.mark.slow
def test_the_tiny_model_is_the_same_again(tmp_path):
    first, again = make(tmp_path / "a"), make(tmp_path / "b")
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
