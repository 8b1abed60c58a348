"""Sizes beyond the machine are refused before anything is allocated, with advice that is legal itself."""

import re

import pytest
from tiny import write_tiny

from jaxfb.config import load_config
from jaxfb.data import token_rows
from jaxfb.rl.policy import make_policy_work, make_task
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training import machine
from jaxfb.training.setup import make_setup

BILLION = 10**9
MAKERS = {"grpo_arithmetic": make_policy_work, "sft": make_supervised_work, "dpo": make_preference_work}
PAIRS = ["start.run=null", "start.tokenizer=bytes", "model={num_layers: 1, hidden_size: 16, num_heads: 2}"]


def unread(data):
    raise AssertionError("the text was read before the sizes were looked at")


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["batch.rows=1000000000"], r"\[batch\] rows=1000000000 of sequence_length=32 take 512.0 GB, but this"),
        (["batch.rows=1000000000", "batch.rows_per_microbatch=1000000000"], r"use data.sequence_length=1 or less"),
        (["batch.rows_per_microbatch=1000000000", "batch.remainder=pad"], r"\[batch\] rows=1000000000 of"),
        (["eval.rows=1000000000"], r"\[eval\] rows=1000000000 of sequence_length=32 take 512.0 GB"),
        (["data.sequence_length=1000000000"], r"sequence_length=1000000000 take 128.0 GB.*sequence_length=\d+ or less"),
        (["model.vocab_size=1000000000"], r"\[model\] 16,000,005,200 parameters .* take 64.0 GB"),
        (["model.hidden_size=1000000000"], r"hidden_size=1000000000.* use a smaller model$"),
        (["model.num_experts=100000000"], r"num_experts=100000000\) take 1,241.6 GB"),
        (["eval.tokens=1000000000"], r"\[eval\] tokens=1000000000 need 128.0 GB .*use at most \d+"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_a_size_beyond_the_machine_is_refused_before_the_text_is_read(
    tmp_path, monkeypatch, overrides, sentence
):
    monkeypatch.setattr(machine, "host_memory", lambda: 25 * BILLION)
    with pytest.raises(ValueError, match=sentence) as refusal:
        make_setup(load_config(write_tiny(tmp_path), overrides), lambda text: None, unread)
    if found := re.search(r"use (\d+) rows or fewer", str(refusal.value)):
        section = re.match(r"\[(\w+)", str(refusal.value))[1]
        with pytest.raises(AssertionError, match="the text was read"):  # so the sizes were accepted
            less = load_config(write_tiny(tmp_path), [*overrides, f"{section}.rows={found[1]}"])
            make_setup(less, lambda text: None, unread)


POLICY = ["mesh.data=1", "task.digits=1", "task.held_out=8"]
SAMPLED = [*POLICY, "rollout.log_probs=sampler", "policy.kl_coef=0"]


@pytest.mark.parametrize(
    ("name", "overrides", "sentence"),
    [
        ("grpo_arithmetic", [*POLICY, "rollout.prompts=1000000000"], "8000000000 rows of 8 tokens take"),
        ("grpo_arithmetic", [*SAMPLED, "rollout.prompts=100000000"], r"use at most \d+ rows"),
        ("grpo_arithmetic", [*SAMPLED, "rollout.max_new_tokens=10000000"], r"use at most rows of \d+"),
        ("grpo_arithmetic", [*POLICY, "warm_start.rows=1000000000"], r"\[warm_start\] 1000000000 rows"),
        ("sft", ["conversations.sequence_length=1000000000"], r"use at most rows of \d+ tokens"),
        pytest.param(
            "grpo_arithmetic",
            [*SAMPLED, "rollout.prompts=500000"],
            r"4000000 responses of .*at most \d+ rows",
            marks=pytest.mark.slow,
        ),
        ("grpo_arithmetic", [*POLICY, "eval.tokens=1000000000"], r"\[eval\] tokens=1000000000 need"),
        ("sft", ["eval.tokens=1000000000"], r"\[eval\] tokens=1000000000 need .*use at most \d+"),
        ("sft", ["batch.rows=1000000000"], r"\[plans.train\] rows=1000000000 .* rows or fewer"),
        ("dpo", [*PAIRS, "preferences.sequence_length=1000000000"], r"\[preferences\] \d+ rows of 1000000000"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)  # fmt: skip
def test_post_training_beyond_the_machine_is_refused_before_rows_are_made(
    monkeypatch, name, overrides, sentence
):
    monkeypatch.setattr(machine, "host_memory", lambda: 5 * BILLION)
    monkeypatch.setattr(token_rows, "token_rows", unread)
    with pytest.raises(ValueError, match=sentence):
        MAKERS[name](load_config(name, overrides))


@pytest.mark.slow
def test_problems_of_more_digits_than_64_bits_have_are_refused():
    with pytest.raises(ValueError, match="digits=10 must be at most 9"):
        load_config("grpo_arithmetic", ["task.digits=10"])
    assert (
        len(make_task(load_config("grpo_arithmetic", ["task.digits=9", "task.operations=+-*"])).held_out)
        == 512
    )


def test_a_vocabulary_that_no_tokenizer_has_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"vocab_size=1000000000 is more .* use at most 4194304"):
        load_config(write_tiny(tmp_path), ["data.tokenizer=bpe", f"data.vocab_size={BILLION}"])
