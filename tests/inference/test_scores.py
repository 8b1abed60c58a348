"""Perplexity, multiple choice, exact match and the adapter for lm-evaluation-harness."""

import dataclasses
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny_directory import make
from whole import logits

from jaxfb.cli.commands import main
from jaxfb.data.chat import make_chat
from jaxfb.data.tokenizer import ByteTokenizer
from jaxfb.inference.complete import Sampling, complete
from jaxfb.inference.harness import HarnessModel, _open
from jaxfb.inference.model import open_model
from jaxfb.inference.scores import Score, Scorer, perplexity, windows
from jaxfb.inference.tasks import Choice, Question, answer, encode_pair, evaluate, normalized, read_task
from jaxfb.pretrained.companions import OF_A_TOKENIZER

GOLDEN = Path(__file__).parent.parent / "golden"
START = 256
SMALL = {"num_layers": 1, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "mlp_size": 16}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make(tmp_path_factory.mktemp("hub") / "model", **SMALL)


@pytest.fixture(scope="module")
def scorer(directory):
    return Scorer(
        open_model(directory, ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2"], on_mesh=True), 32, rows=2
    )


def by_hand(model, context, continuation):
    """One forward of the whole row, without an engine."""
    params = jax.device_get(model.params)
    row = np.concatenate([context, continuation]).astype(np.int32)
    found = jax.nn.log_softmax(logits(model.sizes, params, {"tokens": row[None, :-1]})[0])
    picked = found[np.arange(len(row) - 1), row[1:]][-len(continuation) :]
    return float(picked.sum()), bool((found.argmax(-1) == row[1:])[-len(continuation) :].all())


@pytest.mark.slow
def test_scores_on_a_mesh_are_those_of_a_forward_of_each_row(scorer):
    rng = np.random.default_rng(0)
    pairs = [
        (rng.integers(0, 256, n), rng.integers(0, 256, m))
        for n, m in ((3, 2), (20, 7), (0, 5), (9, 1), (1, 30))
    ]
    greedy = np.argmax(
        logits(scorer.model.sizes, jax.device_get(scorer.model.params), {"tokens": np.array([[65]])})[0, 0]
    )
    pairs.append(([65], [int(greedy)]))
    for (context, continuation), found in zip(pairs, scorer.score(pairs), strict=True):
        begin = context if len(context) else [scorer.first_token]
        log_prob, is_greedy = by_hand(scorer.model, begin, continuation)
        np.testing.assert_allclose(found.log_prob, log_prob, rtol=1e-5)
        assert found.greedy == is_greedy and found.tokens == len(continuation)
    assert found.greedy


def test_a_text_is_cut_into_windows_that_count_each_token_once(scorer):
    cut = [(list(a), list(b)) for a, b in windows(np.arange(10), 99, 4)]
    assert cut == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    text = "A text of more tokens than one window has."
    found = perplexity(scorer, text)
    ids = scorer.model.tokenizer.encode([text])[0]
    total = sum(by_hand(scorer.model, a, b)[0] for a, b in windows(ids, scorer.first_token, 32))
    np.testing.assert_allclose(found["nats_per_token"], -total / len(ids), rtol=1e-5)
    np.testing.assert_allclose(found["word_perplexity"], math.exp(-total / 9), rtol=1e-4)
    assert found["bytes"] == len(text) and found["words"] == 9


def write_lines(path, *records):
    path.write_text("\n".join(map(json.dumps, records)))
    return str(path)


@pytest.mark.slow
def test_texts_and_tasks_from_the_command_line(directory, tmp_path, capsys, scorer):
    choices = ["yes", "no, certainly not"]
    prompt = "Is it?"
    best = [by_hand(scorer.model, *encode_pair(scorer.model.tokenizer, prompt, " " + c))[0] for c in choices]
    right = [int(np.argmax(best)), int(np.argmax(np.array(best) / [len(c) for c in choices]))]
    record = {"prompt": prompt, "choices": choices, "answer": right[0]}
    task = write_lines(tmp_path / "choice.jsonl", record, {**record, "answer": 1 - right[0]})
    exact = write_lines(tmp_path / "exact.jsonl", {"prompt": "Who?", "answer": ["nobody", "no one"]})
    (tmp_path / "text.txt").write_text("Some text.")
    command = ["eval", str(directory), "--task", task, "--task", exact, "--text", str(tmp_path / "text.txt")]
    mesh = ["--length", "32", "mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "--rows", "2", "eval.tokens=4"]
    assert main([*command, *mesh, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["scores"]
    assert found[task]["acc"] == found[task]["acc_norm"] == 0.5 and found[task]["questions"] == 2
    assert found[exact]["exact_match"] == 0 and found[str(tmp_path / "text.txt")]["tokens"] == 10


def test_answers_are_compared_without_case_articles_and_punctuation():
    assert normalized(" The  Sky, is BLUE!") == normalized("sky is blue") != normalized("skies are blue")


def test_the_likeliest_choice_is_right_by_itself_or_by_byte():
    """Of four questions: both ways, the shorter one alone, and twice the one that is likelier by byte alone."""
    log_probs = iter([-1.0, -2.0, -2.0, -3.0, -2.0, -3.0, -2.0, -3.0])
    scorer = SimpleNamespace(
        model=SimpleNamespace(tokenizer=ByteTokenizer()),
        score=lambda pairs: [Score(next(log_probs), False, len(ids)) for _, ids in pairs],
    )
    items = [Choice("a", ["bc", "bc"], 0), *(Choice("a", ["b", "bcde"], one) for one in (0, 1, 1))]
    found = evaluate(scorer, items)
    errors = found.pop("acc_stderr"), found.pop("acc_norm_stderr")
    assert found == {"acc": 0.5, "acc_norm": 0.75, "questions": 4}
    assert errors == pytest.approx((math.sqrt(0.25 / 3), math.sqrt(0.1875 / 3)))
    log_probs = iter([-1.0, -2.0])
    assert math.isnan(evaluate(scorer, items[:1])["acc_stderr"])


def test_answers_are_right_in_any_of_their_forms(monkeypatch):
    asked = []

    def drawn(model, prompts, how, *, stops, names):
        asked.append((prompts, how.tokens, stops, names))
        return [["The Sky."], ["no"]]

    monkeypatch.setattr("jaxfb.inference.tasks.complete", drawn)
    items = [Question("Where?", ("sea", "sky"), "one"), Question("Really?", ("yes",), "two")]
    model = SimpleNamespace(chat=None, config=SimpleNamespace())
    found = evaluate(SimpleNamespace(model=model), items)
    assert found["exact_match"] == 0.5 and found["questions"] == 2
    assert asked == [(["Where?", "Really?"], 64, ["\n"], ["one", "two"])]


@pytest.mark.parametrize(
    "lines, message",
    [
        ([], "has no questions"),
        ([{"prompt": "a", "choices": ["b"], "answer": 1}], "line 1 of"),
        ([{"prompt": "a", "answer": 4}], "must be"),
        ([{"prompt": "a", "answer": "4"}, {"prompt": "a", "choices": ["b"], "answer": 0}], "make two files"),
        ([{"prompt": "a", "choices": ["b", "c"], "answer": True}], "line 1 of .* must be"),
        ([{"prompt": "a", "choices": ["b", ""], "answer": 0}], "line 1 of .* must be"),
        ([{"prompt": "a", "answer": ["4", "An."]}], "line 1 of .* is left of answer 'An.'"),
        ([{"prompt": "\ud800", "answer": "4"}], r"line 1 of .*: prompt must be text in UTF-8, got '\\ud800'"),
        ([{"prompt": "a", "answer": "\ud800"}], "line 1 of .*: answer must be text in UTF-8"),
        (
            [{"prompt": "a", "choices": ["\ud800"], "answer": 0}],
            "line 1 of .*: choices must be text in UTF-8",
        ),
    ],
)
def test_files_that_are_no_task_are_refused(tmp_path, lines, message):
    with pytest.raises(ValueError, match=message):
        read_task(write_lines(tmp_path / "task.jsonl", *lines))


def test_a_task_is_read_by_lines_of_its_file(tmp_path):
    question = '{"prompt": "one\u2028two", "answer": "4"}'
    (tmp_path / "task.jsonl").write_text(f"\ufeff\n{question}\n", encoding="utf-8")
    name = f"the prompt in line 2 of {tmp_path / 'task.jsonl'}"
    assert read_task(tmp_path / "task.jsonl") == [Question("one\u2028two", ("4",), name)]
    (tmp_path / "task.jsonl").write_text(f"{question}\n\n{{\n", encoding="utf-8")
    with pytest.raises(ValueError, match="line 3 of .* is not JSON"):
        read_task(tmp_path / "task.jsonl")
    (tmp_path / "task.jsonl").write_bytes(b'{"prompt": "\xff", "answer": "4"}')
    with pytest.raises(ValueError, match="task.jsonl is not UTF-8: .* at offset 12"):
        read_task(tmp_path / "task.jsonl")


def test_a_question_without_a_prompt_is_refused_with_its_line(scorer, tmp_path):
    bare = dataclasses.replace(scorer.model, chat=make_chat(scorer.model.tokenizer, "none"))
    task = write_lines(tmp_path / "task.jsonl", *({"prompt": text, "answer": "4"} for text in ("abc", "")))
    with pytest.raises(ValueError, match="the prompt in line 2 of .*task.jsonl is empty"):
        answer(bare, read_task(task), 2)


def test_a_chat_that_the_harness_gives_back_has_the_tokens_of_the_template(directory):
    harness = HarnessModel(str(directory), max_length=64, overrides="mesh.data=1", max_gen_toks=4)
    message = [{"role": "user", "content": "Who?"}]
    (prompt,) = harness.model.chat.prompts([message])
    text = harness.apply_chat_template(message)
    ids = np.concatenate([prompt, harness.model.tokenizer.encode(["I"])[0]])
    np.testing.assert_array_equal(np.concatenate(harness._pair(text, "I")), ids)
    asked = [SimpleNamespace(args=(text, {"until": []}))]
    assert harness.generate_until(asked) == complete(harness.model, [message], Sampling(tokens=4))[0]
    empty = [SimpleNamespace(args=("", {"until": []}))]  # begins a document
    assert len(harness.generate_until(empty)) == 1


@pytest.fixture(scope="module")
def started(directory, tmp_path_factory):
    """The same model with a tokenizer that puts a start token before every text, as Llama's and Gemma's do."""
    path = tmp_path_factory.mktemp("hub") / "started"
    shutil.copytree(directory, path)
    values = json.loads((path / "tokenizer.json").read_text())
    single = [
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [START], "tokens": ["<|endoftext|>"]}}
    processor = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}
    (path / "tokenizer.json").write_text(json.dumps({**values, "post_processor": processor}))
    return path


def test_a_choice_and_a_request_stand_behind_the_start_token(started):
    """As in lm-evaluation-harness's class for transformers, which leaves start tokens to the tokenizer."""
    harness = HarnessModel(str(started), max_length=32, overrides="mesh.data=1")
    model = harness.model
    a, b, is_ = (model.tokenizer.encode([text])[0].tolist() for text in ("<|endoftext|>", " b", "Is"))
    assert len(a) > 1  # as a text
    for name, (context, continuation), expected in (
        ("a context", ("Is", " b"), ([START, *is_], b)),
        ("none", ("", " b"), ([START], b)),
        ("one that begins with it", ("<|endoftext|>Is", " b"), ([START, *is_], b)),
        ("white space", (" ", "b"), ([START], b)),
        ("a continuation that begins with it", ("", "<|endoftext|> b"), ([START], b)),
    ):
        context, continuation = harness._pair(context, continuation)
        found = (list(context) or [harness.scorer.first_token], list(continuation))
        assert found == expected, name
    of_a_task = encode_pair(model.tokenizer, "Is", " b")
    assert [list(one) for one in of_a_task] == [[START, *is_], b]
    assert list(encode_pair(model.tokenizer, "<|endoftext|>", " b")[0]) == [START, *a]  # a user's text
    (found,) = harness.loglikelihood([SimpleNamespace(args=("Is", " b"))])
    np.testing.assert_allclose(found[0], by_hand(model, [START, *is_], b)[0], rtol=1e-5)
    row = [START, *is_, b[0]]
    likeliest = logits(model.sizes, model.params, {"tokens": np.array([row])})[0, -1].argmax()
    (drawn,) = harness.scorer.score([(row, [int(likeliest)])])
    assert drawn.greedy and not found[1]
    for text in ("Is b", "<|endoftext|>Is b"):
        (rolled,) = harness.loglikelihood_rolling([SimpleNamespace(args=(text,))])
        np.testing.assert_allclose(rolled, by_hand(model, [START], [START, *is_, *b])[0], rtol=1e-5)
    assert math.isfinite(perplexity(harness.scorer, "    ")["word_perplexity"])
    alone = perplexity(harness.scorer, "Is b")
    np.testing.assert_allclose(
        -4 * alone["nats_per_token"], by_hand(model, [START], [*is_, *b])[0], rtol=1e-5
    )


def test_a_continuation_of_the_harness_begins_with_the_start_token_and_has_space(started, monkeypatch):
    seen = []
    harness = HarnessModel(str(started), max_length=8, overrides="mesh.data=1", max_gen_toks=4)
    letter = harness.model.tokenizer.encode(["A"])[0][None]
    drawn = lambda model, prompts, *more: seen.extend(prompts) or letter  # noqa: E731
    monkeypatch.setattr("jaxfb.inference.complete._drawn", drawn)
    ask = lambda text, **settings: harness.generate_until([SimpleNamespace(args=(text, settings))])  # noqa: E731
    for text, settings in (("ab", {}), ("<|endoftext|>ab", {}), ("", {}), ("abcdefg", {"max_new_tokens": 2})):
        assert ask(text, **settings) == ["A"]
    ids = harness.model.tokenizer.encode(["ab", "bcdefg"])
    begun = [START, *ids[0]]
    assert [list(one) for one in seen] == [begun, begun, [START], list(ids[1])]
    with pytest.raises(
        ValueError, match="max_gen_toks=8 leaves none of max_length=8 .* use max_gen_toks=4, or max"
    ):
        ask("ab", max_tokens=8)


def test_a_text_begins_with_the_start_token_that_its_files_name_or_else_with_the_end(directory, scorer):
    tokenizer = scorer.model.tokenizer
    for bos, expected in (("<|im_start|>", 257), ("", 258)):  # SmolLM2's, and Qwen's, which is null
        chat = make_chat(tokenizer, "plain", None, {"bos_token": bos, "eos_token": "<|im_end|>"})
        model = dataclasses.replace(scorer.model, chat=chat)
        assert Scorer(model, 32, rows=2).first_token == expected


def test_a_last_message_that_is_to_be_continued_stays_open(directory):
    harness = HarnessModel(str(directory), max_length=32, overrides="mesh.data=1")
    asked = {"role": "user", "content": "Who?"}
    for content, end in (("I am", "I am"), ("I am ", "I am "), ("", "<|im_end|>\n")):
        text = harness.apply_chat_template([asked, {"role": "assistant", "content": content}], False)
        assert text.endswith(f"<|im_start|>assistant\n{end}")


@pytest.mark.parametrize(
    ("last", "opened"), [("I am", "I am"), ("I am ", "I am"), (" I am", "I am"), ("you", "I am<end>")]
)
def test_a_template_may_cut_white_space_and_write_nothing_before_a_message(last, opened):
    assert _open("I am<end>", last) == opened


@pytest.mark.slow
def test_the_harness_gets_what_transformers_would_give(golden):
    """Numbers of transformers' own model on the very same files."""
    case = golden("hf_harness.json")
    model = HarnessModel(
        str(GOLDEN / case["model_dir"]), batch_size=2, max_length=case["max_length"], overrides="mesh.data=1"
    )
    requests = [SimpleNamespace(args=(one["context"], one["continuation"])) for one in case["loglikelihood"]]
    for (log_prob, greedy), one in zip(model.loglikelihood(requests), case["loglikelihood"], strict=True):
        np.testing.assert_allclose(log_prob, one["log_prob"], rtol=2e-5)
        assert greedy == one["greedy"]
    texts = [SimpleNamespace(args=(one["text"],)) for one in case["rolling"]]
    for log_prob, one in zip(model.loglikelihood_rolling(texts), case["rolling"], strict=True):
        np.testing.assert_allclose(log_prob, one["log_prob"], rtol=2e-5)
    asked = [SimpleNamespace(args=(one["context"], one["settings"])) for one in case["generate"]]
    assert model.generate_until(asked) == [one["text"] for one in case["generate"]]
    message = [{"role": "user", "content": "Who?"}]
    assert model.apply_chat_template(message) == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"


def test_scores_that_are_nan_are_refused(scorer, monkeypatch):
    """The first choice of each question counted as the best."""
    monkeypatch.setattr(scorer, "_scores", lambda rows: [Score(math.nan, False, 1)] * len(rows))
    with pytest.raises(ValueError, match="log-probabilities by .* are nan, .* in float32, are not finite"):
        scorer.score([([65], [66]), ([65], [67])])


def test_a_choice_beyond_the_length_is_refused_with_one_that_holds_it(scorer):
    with pytest.raises(ValueError, match="33 tokens must have from 1 to length=32; use --length 33 or more"):
        scorer.score([([65], [66] * 33)])


def test_a_model_without_its_tokenizer_is_not_read_as_bytes(directory, tmp_path):
    """Every number would be that of other tokens."""
    shutil.copytree(directory, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer.model").touch()
    with pytest.raises(ValueError, match="there is .* but no tokenizer.json beside it"):
        open_model(tmp_path / "model")
    for name in OF_A_TOKENIZER:
        (tmp_path / "model" / name).unlink(missing_ok=True)
    assert isinstance(open_model(tmp_path / "model").tokenizer, ByteTokenizer)
