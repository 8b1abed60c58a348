"""`jaxfb generate` and `jaxfb chat` on a directory of Hugging Face files: batches, samples, pieces, a conversation."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest
from tiny_directory import make

from jaxfb.cli.commands import main
from jaxfb.config.sections import MeshConfig
from jaxfb.data.chat import make_chat
from jaxfb.inference.chat import chat, with_line_editing
from jaxfb.inference.complete import Sampling, answers, complete, ids_of, until
from jaxfb.inference.model import cut, open_model, sampling_mesh
from jaxfb.inference.prompts import read_prompts, read_text, write_answers
from jaxfb.models.config import TransformerConfig
from jaxfb.models.generate import generate
from jaxfb.models.transformer import init_params
from jaxfb.refusal import Refused

SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hub") / "model", **SMALL)


@pytest.fixture(scope="module")
def model(directory):
    return open_model(directory)


def test_prompts_of_a_file_are_continued_in_batches(directory, tmp_path, capsys):
    lines = [
        {"prompt": "Who?"},
        {"messages": [{"role": "user", "content": "Who?"}]},
        {"prompt": "What is it?"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [
        "generate",
        str(directory),
        "--prompts",
        str(tmp_path / "in.jsonl"),
        "--tokens",
        "4",
        "--batch",
        "2",
    ]
    assert main([*command, "--temperature", "0", "--out", str(tmp_path / "out.jsonl")]) == 0
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert found[0]["answers"] == found[1]["answers"] and found[1]["messages"] == lines[1]["messages"]
    assert main(["generate", str(directory), "--prompt", "Who?", "--tokens", "4", "--temperature", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] in ("Who?\n" + found[0]["answers"][0]).splitlines()


@pytest.mark.slow
def test_a_model_on_several_devices_continues_as_on_one(directory, model):
    parts = open_model(directory, ["mesh.fsdp=2", "mesh.tensor=2"])
    kernel = parts.params["layers"]["mlp"]["up"]["kernel"]
    assert len(kernel.devices()) == 4 and kernel.addressable_shards[0].data.size * 4 == kernel.size
    how = Sampling(tokens=4)
    assert complete(parts, ["Who?", "What is it?"], how) == complete(model, ["Who?", "What is it?"], how)
    messages = [{"role": "user", "content": "Who?"}]
    assert "".join(answers(parts, messages, how)) == "".join(answers(model, messages, how))


@pytest.mark.slow
def test_log_probs_of_experts_over_several_devices_are_those_of_one():
    sizes = TransformerConfig(
        vocab_size=32,
        num_layers=2,
        hidden_size=16,
        num_heads=2,
        mlp_size=16,
        num_experts=4,
        expert_mlp_size=8,
    )
    params = init_params(sizes, jax.random.key(0))
    mesh = sampling_mesh(MeshConfig(pipe=2, data=1, expert=2, tensor=2))
    placed = jax.device_put(params, jax.tree.map(lambda leaf: leaf.sharding, cut(params, mesh)))
    prompts = np.random.default_rng(0).integers(0, 32, (2, 5))
    one, several = (generate(sizes, tree, prompts, 3, stop_token=31) for tree in (params, placed))
    assert (
        placed["layers"]["moe"]["experts"]["up"].addressable_shards[0].data.size * 8
        == params["layers"]["moe"]["experts"]["up"].size
    )
    chex.assert_trees_all_equal(one.tokens, several.tokens)
    chex.assert_trees_all_close(one.log_probs, several.log_probs, atol=1e-6)


def test_the_mesh_of_continuations_cuts_parameters_and_no_rows():
    assert dict(sampling_mesh(MeshConfig(pipe=2, data=2, fsdp=2)).shape) | {"fsdp": 4} == dict.fromkeys(
        ("pipe", "data", "expert", "context", "tensor"), 1
    ) | {"fsdp": 4}
    assert dict(sampling_mesh(MeshConfig(fsdp=2, context=2, data=2)).shape)["fsdp"] == 4
    assert sampling_mesh(MeshConfig(data=-1)) is None
    assert sampling_mesh(MeshConfig(fsdp=3), asked=False) is None
    with pytest.raises(ValueError, match="cannot be made of 8 devices"):
        sampling_mesh(MeshConfig(fsdp=3))


def test_a_model_computes_in_the_dtype_that_is_asked_for(directory, capsys):
    model = open_model(directory, dtype="bfloat16")
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    command = ["generate", str(directory), "mesh.tensor=3", "--prompt", "Who?"]
    assert main(command) == 2 and "cannot be made of 8 devices" in capsys.readouterr().err


def test_another_dtype_is_refused_before_anything_is_read():
    with pytest.raises(ValueError, match="dtype must be one of .* got 'half'"):
        open_model("nowhere", dtype="half")


def test_a_directory_without_its_tokenizer_is_refused():
    golden = Path(__file__).parent.parent / "golden" / "hf_llama_tiny"
    with pytest.raises(
        ValueError, match="has 37 ids, fewer than the 257 of the tokenizer; put the model's own"
    ):
        open_model(golden)


def test_samples_differ_and_return_with_their_seed(model):
    how = Sampling(tokens=4, temperature=1.0, top_p=0.95, samples=3, seed=7)
    found = complete(model, ["Who?"], how, batch=4)
    assert len(found[0]) == 3 and len(set(found[0])) > 1
    assert complete(model, ["Who?"], how, batch=4) == found


def test_a_text_without_the_template_goes_on(model):
    how = Sampling(tokens=4)
    assert complete(model, ["Who?"], how, raw=True, batch=4) != complete(model, ["Who?"], how, batch=4)


def test_texts_may_end_a_continuation():
    assert until("one. two.\nthree", ["\n", ". "]) == "one" and until("one", ["x"]) == "one"


def test_a_conversation_keeps_what_was_written_until_it_is_reset(model):
    lines, out = iter(["Hello", "/help", "And?", "/reset", "Hello"]), []

    def read(prompt):
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    last = chat(model, Sampling(tokens=4), "Be brief.", read, out.append)
    assert [m["role"] for m in last] == ["system", "user", "assistant"]
    text = "".join(out)
    first, second = text.index(last[-1]["content"]), text.index("forgotten")
    assert 0 < first < second and text.endswith("\n")


def test_each_answer_of_a_conversation_is_drawn_with_another_seed(model, monkeypatch):
    """What is drawn after a line that was refused is as if nobody had written it."""
    lines, seeds = iter(["Hello", "\udcff", "Hello", "/exit"]), []

    def drawn(_, messages, how):
        if messages[-1]["content"] != "Hello":
            raise Refused("no text")
        seeds.append(how.seed)
        return ["Hi"]

    monkeypatch.setattr("jaxfb.inference.chat.answers", drawn)
    chat(model, Sampling(seed=2**32 - 1), None, lambda _: next(lines), lambda _: None)
    assert seeds == [2**32 - 1, 0]


def test_a_line_that_is_refused_does_not_end_a_conversation(model):
    lines, out = iter(["Hello", "\udcff", "And?", "/exit"]), []
    last = chat(model, Sampling(tokens=2), None, lambda _: next(lines), out.append)
    assert [m["content"] for m in last if m["role"] == "user"] == ["Hello", "And?"]
    assert "must be text in UTF-8" in "".join(out)


def test_a_conversation_without_an_input_ends(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)  # closed by the shell's <&-
    with pytest.raises(EOFError):
        with_line_editing()("> ")


def test_answers_that_a_file_does_not_take_name_it():
    with pytest.raises(OSError, match="/dev/full"):
        write_answers("/dev/full", ["a"], [["b" * 10**5]])


@pytest.mark.slow
def test_pieces_of_an_answer_are_the_answer(model):
    messages, how = [{"role": "user", "content": "Who?"}], Sampling(tokens=6)
    assert "".join(answers(model, messages, how)) == complete(model, [messages], how, batch=1)[0][0].rstrip(
        "\ufffd"
    )


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "has no prompts"),
        ("{", "line 1 of .* is not JSON"),
        ('{"messages": []}', 'must be {"prompt": text}'),
        ('\n\n{"prompt": "a"}\n{"prmpt": "b"}', 'line 4 of .* must be {"prompt": text}'),
        ('\n{"prompt": "\\ud800"}', r"the prompt in line 2 of .* must be text in UTF-8, got '\\ud800'"),
    ],
)
def test_files_without_prompts_are_refused(tmp_path, text, message):
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "in.jsonl")


def test_prompts_in_another_encoding_are_refused(tmp_path):
    (tmp_path / "in.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(ValueError, match="is not UTF-8: .* at offset 3"):
        read_prompts(tmp_path / "in.txt")


def test_prompts_are_read_by_lines_of_their_file(tmp_path):
    """A line separator inside a text is part of it, as in the files that are written; so is no byte order mark."""
    written, marked, lines = (tmp_path / name for name in ("out.jsonl", "marked.jsonl", "in.txt"))
    write_answers(written, ["one\u2028two\x85three", "four"], [["a\u2028"], ["b"]])
    texts = lambda path: list(read_prompts(path).values())  # noqa: E731
    assert texts(written) == ["one\u2028two\x85three", "four"]
    marked.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\r\n{"prompt": "b"}\r\n')
    assert texts(marked) == ["a", "b"]
    lines.write_bytes("\ufeffone\u2028two\r\n\r\nthree\x0cfour".encode())
    assert texts(lines) == ["one\u2028two", "three\x0cfour"]
    assert list(read_prompts(lines)) == [f"the prompt in line {number} of {lines}" for number in (1, 3)]


def test_an_empty_prompt_is_refused_beside_others_as_alone(model):
    bare = dataclasses.replace(model, chat=make_chat(model.tokenizer, "none"))
    advice = "is empty, and a continuation needs a first token; give it some text"
    for prompts, names, name in (
        ([""], None, "prompt 1 of 1"),
        (["abc", ""], None, "prompt 2 of 2"),
        (["abc", ""], ["first", "second"], "second"),
    ):
        with pytest.raises(ValueError, match=rf"\[generate\] {name} {advice} \(with .* --raw"):
            complete(bare, prompts, Sampling(tokens=2), names=names)
    unstarted = SimpleNamespace(start_id=None, before_text=(), encode=model.tokenizer.encode)
    with pytest.raises(ValueError, match=rf"prompt 1 of 1 {advice}$"):
        complete(dataclasses.replace(bare, tokenizer=unstarted), [""], Sampling(tokens=2), raw=True)


@pytest.mark.parametrize(
    "prompts, how, message",
    [
        ("abc", {}, "prompts must be a list, got 'abc'"),
        (["abc"], {"stops": "end"}, "stops must be a list, got 'end'"),
        ([None], {}, "prompt 1 of 1 must be a string, or messages .*, got None"),
        (["abc", 3], {}, "prompt 2 of 2 must be a string, or messages .*, got 3"),
        ([[{"role": "user"}]], {}, "prompt 1 of 1 must be a string, or messages .*, got .*'role': 'user'"),
        ([{"role": "user", "content": "abc"}], {}, "prompt 1 of 1 must be a string, or messages"),
        ([[{"role": "usr", "content": "abc"}]], {}, "role.*: one of system, user, assistant, tool"),
        ([[]], {}, r"prompt 1 of 1 must be a string, or messages .*, got \[\]"),
    ],
)
def test_what_is_no_prompt_is_refused(model, prompts, how, message):
    with pytest.raises(ValueError, match=message):
        complete(model, prompts, Sampling(tokens=2), **how)


def test_a_vocabulary_with_padding_draws_tokens_alone(model):
    assert model.absent_ids == ((259, 320),) and model.stop_tokens == (256, 258)
    assert np.asarray(model.params["embed"]["embedding"]).shape == (320, 16)


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_a_text_without_a_chat_ends_where_the_files_of_the_model_end_it(directory, name, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(directory, bare)
    for one in ("chat_template.jinja", "generation_config.json"):
        (bare / one).unlink()
    values = json.loads((bare / name).read_text()) if name == "config.json" else {}
    (bare / name).write_text(json.dumps({**values, "eos_token_id": [7, 9, 300]}))
    model = open_model(bare)
    assert model.chat is None and model.absent_ids == ((259, 320),)
    assert model.stop_tokens == (model.tokenizer.eos_id, 7, 9)
    (bare / name).write_text(json.dumps({**values, "eos_token_id": "7"}))
    with pytest.raises(ValueError, match="eos_token_id='7' must be an id or a list of ids"):
        open_model(bare)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "2"], "top_p=2.0 must be above 0 and at most 1"),
        (["--tokens", "0"], "tokens must be a positive integer"),
        (["--samples", "0"], "samples must be a positive integer"),
        (["--batch", "0"], "batch must be a positive integer"),
    ],
)
def test_settings_out_of_range_are_refused(directory, flags, message, capsys):
    assert main(["generate", str(directory), "--prompt", "Who?", "--tokens", "2", *flags]) == 2
    assert message in capsys.readouterr().err


def _of_eval(path):
    return read_text(path, "[eval]")


def _prompts(path):
    return [*read_prompts(path).values()]


@pytest.mark.parametrize("read, said", [(_prompts, ["one", "two"]), (_of_eval, "one\ntwo\n")])
def test_a_pipe_is_read_as_a_file_is(read, said):
    """As <(command) and /dev/stdin are."""
    source, target = os.pipe()
    os.write(target, b"one\ntwo\n")
    os.close(target)
    try:
        assert read(f"/dev/fd/{source}") == said
    finally:
        os.close(source)


@pytest.mark.parametrize("read", [read_prompts, _of_eval])
def test_a_directory_is_no_file(read, tmp_path):
    for path in (tmp_path, tmp_path / "gone"):
        with pytest.raises(ValueError, match=f"there is no file {path}"):
            read(path)


def test_a_text_goes_on_after_what_the_tokenizer_puts_before_it(directory, model, tmp_path):
    """As by transformers: Llama's and Gemma's files put their start token before a prompt."""
    assert model.tokenizer.before_text == ()
    for name in os.listdir(directory):
        (tmp_path / name).write_bytes((directory / name).read_bytes())
    file = tmp_path / "tokenizer.json"
    values = json.loads(file.read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    single = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [256], "tokens": ["<|endoftext|>"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    file.write_text(json.dumps({**values, "post_processor": processor}))
    started = open_model(tmp_path)
    assert started.tokenizer.before_text == (256,)
    assert ids_of(started, "ab", raw=True).tolist() == [256, *ids_of(model, "ab", raw=True)]
    assert ids_of(started, "", raw=True).tolist() == [256]
    np.testing.assert_array_equal(
        ids_of(started, "ab", raw=False), ids_of(model, "ab", raw=False)
    )  # by the template


def test_a_model_whose_probabilities_are_nan_continues_nothing(model):
    """Its tokens would all be the first of the vocabulary."""
    broken = dataclasses.replace(model, params=jax.tree.map(lambda leaf: leaf * np.nan, model.params))
    with pytest.raises(ValueError, match="probabilities of tokens by .* are nan"):
        complete(broken, ["Who?"], Sampling(tokens=4), batch=4)
    lines, out = iter(["Hello", "/exit"]), []
    assert chat(broken, Sampling(tokens=4), None, lambda _: next(lines), out.append) == []
    assert "are nan" in "".join(out)


@pytest.mark.parametrize("temperature", [1e-40, 1e39])
def test_temperatures_that_make_logits_infinite_are_refused(model, temperature):
    """Drawn were then tokens that are not the likeliest, or none."""
    with pytest.raises(ValueError, match="temperature must be 0, which .*, or from 1e-30 to 1e"):
        complete(model, ["Who?"], Sampling(tokens=4, temperature=temperature), batch=4)
