"""An exported run has its chat template and names the tokens that end a text, as transformers reads both."""

import json

import pytest

from jaxfb.data.chat import make_chat, read_chat
from jaxfb.data.tokenizer import load_tokenizer
from jaxfb.training.exported_tokenizer import add_tokenizer, token_ids

MESSAGES = [{"role": role, "content": f"a {role}"} for role in ("system", "user", "assistant", "user")]


@pytest.fixture
def run(tmp_path):
    """Returns a run's directory with a tokenizer that has a token for the end of a text."""
    (tmp_path / "run").mkdir()
    added = [
        {"id": 2 + place, "content": name, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for place, name in enumerate(("<s>", "</s>"))
    ]
    tokenizer = {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}}
    text = json.dumps({**tokenizer, "version": "1.0", "added_tokens": added})
    (tmp_path / "run" / "tokenizer.json").write_text(text)
    (tmp_path / "out").mkdir()
    return tmp_path / "run"


def test_a_model_of_the_runs_own_has_its_tokenizers_ends(run):
    assert token_ids(run, is_own=True) == {"bos_token_id": 2, "eos_token_id": 3}
    assert token_ids(run, is_own=False) == {}  # those of the files that it began with stay
    assert [path.name for path in add_tokenizer(run, run.parent / "out")] == ["tokenizer.json"]


@pytest.mark.parametrize("template", ["chatml", "plain", "none", "{{ messages[0]['content'] }}</s>"])
def test_the_template_of_a_run_is_written(run, template):
    chat = make_chat(load_tokenizer(run), template)
    chat.save(run)
    out = run.parent / "out"
    (out / "generation_config.json").write_text('{"eos_token_id": [1], "temperature": 0.5}')
    written = add_tokenizer(run, out)
    assert [path.name for path in written] == ["tokenizer.json", "chat_template.jinja"]
    again = read_chat(out, load_tokenizer(out))
    for opening in (False, True):
        assert again.render(MESSAGES, opening) == chat.render(MESSAGES, opening)
    assert again.stop_tokens == chat.stop_tokens == (3,)
    assert token_ids(run, is_own=False) == {"eos_token_id": 3}
    found = json.loads((out / "generation_config.json").read_text())
    assert found == {"eos_token_id": 3, "temperature": 0.5}


def test_files_with_the_same_template_keep_their_further_ones(run):
    make_chat(load_tokenizer(run), "{{ messages[0]['content'] }}</s>").save(run)
    (run.parent / "out" / "tokenizer.json").write_bytes((run / "tokenizer.json").read_bytes())
    named = [
        {"name": "default", "template": "{{ messages[0]['content'] }}</s>"},
        {"name": "tools", "template": ""},
    ]
    (run.parent / "out" / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert add_tokenizer(run, run.parent / "out") == []


def test_several_ends_are_a_list(run):
    make_chat(load_tokenizer(run), "plain", ["b", "</s>"]).save(run)
    assert token_ids(run, is_own=True) == {"bos_token_id": 2, "eos_token_id": [1, 3]}
