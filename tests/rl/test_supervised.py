"""`jaxfb sft` and `jaxfb dpo` from the command line, what is learnt of a conversation, and the law under packing."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from warnings import catch_warnings

import jax
import numpy as np
import pytest
import yaml

from jaxfb.batch_plan import BatchPlan
from jaxfb.cli.commands import main
from jaxfb.config import ConfigError, load_config, save_yaml
from jaxfb.data.chat import make_chat
from jaxfb.data.conversations import Pair, encode_pairs, read_conversations, read_preferences, split_held_out
from jaxfb.data.tokenizer import ByteTokenizer
from jaxfb.metrics import read_jsonl
from jaxfb.rl.preference import make_preference_work
from jaxfb.rl.rows import held_out_means
from jaxfb.rl.supervised import make_supervised_work
from jaxfb.training.from_config.sizes import config_with_model
from jaxfb.training.run_dir import RunDirectory
from jaxfb.types import Max, Sum

DATA = Path(__file__).parent.parent.parent / "examples" / "data"
BASE = {
    "model": {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "mlp_size": 16, "tied_embeddings": True},
    "start": {"tokenizer": "bytes"},
    "batch": {"rows": 16, "updates": 6},
    "lr": {"name": "constant"},
    "optimizer": {"learning_rate": 0.01},
    "mesh": {"data": 1},
    "plans": {
        "train": {"rows_per_microbatch": 4},
        "eval": {"rows_per_microbatch": 8},
        "logprob_ref": {"rows_per_microbatch": 8},
    },
    "checkpoint": {"every": 3},
    "precision": {"compute_dtype": "float64"},
}
ROWS = {"held_out_fraction": 0.2, "sequence_length": 96, "template": "plain"}
SFT = {"conversations": {"path": str(DATA / "conversations.jsonl"), **ROWS}}
DPO = {"preferences": {"path": str(DATA / "preferences.jsonl"), **ROWS}}
PACKED = {"max_tokens_per_microbatch": 192, "packing": True}
BY_WIDTH = {"max_tokens_per_microbatch": 192, "widths": [48, 96], "context_by_width": True}


def one_update(work, number):
    """What the training loop does for one update."""
    return work.update(number, work.read(number))


def write(path, *sections, **more):
    values = {**BASE, "run": {"dir": str(path / "run")}}
    for changes in (*sections, more):
        values = {**values, **changes}
    path.mkdir(exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(values))
    return path / "config.yaml"


def text_of(ids, counts):
    tokenizer = ByteTokenizer()
    shown = lambda part: "".join("$" if i == 256 else tokenizer.decode([i]) for i in part)  # noqa: E731
    return shown(ids), shown(ids[counts])


@pytest.mark.parametrize(
    "template, learn, whole, learnt",
    [
        ("plain", "assistant", "System: Add.\n\nUser: 1\n\nAssistant: 2$User: 3\n\nAssistant: 4$", "2$4$"),
        ("plain", "last", "System: Add.\n\nUser: 1\n\nAssistant: 2$User: 3\n\nAssistant: 4$", "4$"),
        ("none", "assistant", "Add.12$34$", "2$4$"),
        (
            "chatml",
            "last",
            "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>$\n"
            "<|im_start|>user\n3<|im_end|>\n<|im_start|>assistant\n4<|im_end|>$\n",
            "4<|im_end|>$",
        ),
    ],
)
def test_only_the_assistant_is_learnt(template, learn, whole, learnt):
    turns = [("system", "Add."), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (ids,), (counts,) = make_chat(ByteTokenizer(), template).encode([messages], learn)
    assert text_of(ids, counts) == (whole, learnt)


def test_both_answers_follow_the_same_prompt():
    pairs = read_preferences(DATA / "preferences.jsonl")[:3]
    (chosen, _), (rejected, _) = encode_pairs(pairs, make_chat(ByteTokenizer(), "plain"))
    for pair, one, other in zip(pairs, chosen, rejected, strict=True):
        assert text_of(one, one >= 0)[0].endswith(f"Assistant: {pair.chosen}$")
        assert text_of(other, other >= 0)[0].endswith(f"Assistant: {pair.rejected}$")


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"messages": []}', 'line 1 needs "messages"'),
        ("{", "line 1 is not JSON"),
        (
            '{"messages": [{"role": "bot", "content": "x"}]}',
            "role 'bot' must be one of system, user, assistant",
        ),
        ('{"messages": [{"role": "user", "content": 3}]}', "with a string"),
        (
            '{"messages": [{"role": "user", "content": "\\ud800"}]}',
            r"line 1: content must be text in UTF-8, got '\\ud800'",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": [{"name": "add"}]}]}',
            "line 1: tool_calls=.* is not read, so other tokens would be learnt",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "no", "weight": 0}]}',
            "line 1: weight=0 is not read",
        ),
        ('{"tools": [{"name": "add"}], "messages": [{"role": "user", "content": "x"}]}', "line 1: tools=.*"),
        (
            '{"system": "Add.", "messages": [{"role": "user", "content": "x"}]}',
            "line 1: system='Add.' is not read",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_conversations(tmp_path / "bad.jsonl")


def test_keys_that_change_nothing_are_left_out(tmp_path):
    message = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [],
        "weight": 1,
        "name": "a",
        "thinking": None,
    }
    (tmp_path / "good.jsonl").write_text(json.dumps({"messages": [message], "tools": None, "id": 7}) + "\n")
    assert read_conversations(tmp_path / "good.jsonl") == [({"role": "assistant", "content": "x"},)]


def test_a_preference_that_no_tokenizer_takes_is_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "\\udc00"}\n')
    with pytest.raises(ValueError, match=r"line 1: rejected must be text in UTF-8, got '\\udc00'"):
        read_preferences(tmp_path / "bad.jsonl")


@pytest.mark.parametrize(
    "prompt, message",
    [
        (
            {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
            'line 1 has "prompt" and "messages"',
        ),
        (
            {"prompt": [{"role": "user", "content": "b"}]},
            'needs "prompt", a string, or "messages".*got prompt=',
        ),
        ({}, 'needs "prompt", a string, or "messages"'),
        ({"prompt": "a", "system": "Add."}, "line 1: system='Add.' is not read"),
    ],
)
def test_a_preference_has_one_prompt(tmp_path, prompt, message):
    (tmp_path / "bad.jsonl").write_text(json.dumps({**prompt, "chosen": "b", "rejected": "c"}))
    with pytest.raises(ValueError, match=message):
        read_preferences(tmp_path / "bad.jsonl")


def updates(work, number=2):
    work.start(lambda text: None)
    return [one_update(work, k)[0] for k in range(number)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, make, mesh, train",
    [
        (SFT, make_supervised_work, {"data": 2}, PACKED),
        (SFT, make_supervised_work, {"data": 2, "context": 2}, BY_WIDTH),
        (DPO, make_preference_work, {"data": 2}, {"rows_per_microbatch": 2}),
    ],
    ids=["sft", "sft by width", "dpo"],
)
def test_packing_and_replicas_change_no_update(tmp_path, kind, make, mesh, train):
    plain = load_config(write(tmp_path / "plain", kind))
    plans = {**BASE["plans"], "train": train, "logprob_ref": {"rows_per_microbatch": 2}}
    other = load_config(write(tmp_path / "other", kind, plans=plans, mesh=mesh))
    for one, two in zip(updates(make(plain)), updates(make(other)), strict=True):
        np.testing.assert_allclose(one.loss, two.loss, rtol=0, atol=1e-12)
        np.testing.assert_allclose(one.grad_norm, two.grad_norm, rtol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, train",
    [
        ({"data": 2}, PACKED),
        ({"data": 2, "context": 2}, BY_WIDTH),
    ],
    ids=["packed", "by width"],
)
def test_an_update_in_two_programs_is_the_same(tmp_path, mesh, train):
    plans = {**BASE["plans"], "train": train}
    one, two = (
        make_supervised_work(
            load_config(
                write(tmp_path / str(split), SFT, plans=plans, mesh=mesh, log={"split_update": split})
            )
        )
        for split in (False, True)
    )
    np.testing.assert_array_equal(*([metrics.loss for metrics in updates(work)] for work in (one, two)))
    _, record = one_update(two, 2)
    assert record["forward_backward_seconds"] > 0 and record["optimizer_seconds"] > 0


def test_pairs_that_are_cut_before_an_answer_are_counted_and_not_trained_on_alone(tmp_path):
    lines = [{"prompt": "?" * size, "chosen": "1", "rejected": "2"} for size in (60, 61, 3)]
    made = lambda kept: make_preference_work(load_config(write(tmp_path / kept, pairs)))  # noqa: E731
    file = tmp_path / "pairs.jsonl"
    pairs = {"preferences": {**ROWS, "path": str(file), "held_out_fraction": 0.0, "truncate": True}}
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.warns(
        UserWarning, match="2 of 3 pairs have no token of an answer among the first 48 .* weigh nothing"
    ):
        made("some")
    file.write_text("".join(json.dumps(line) + "\n" for line in lines[:2]))
    with pytest.raises(
        ValueError, match="nothing is learned from .*: 2 of 2 pairs .*preferences.sequence_length"
    ):
        made("none")


def test_pairs_of_the_same_tokens_are_counted_and_not_trained_on_alone(tmp_path):
    long = "4" * 60
    lines = [("1", "2"), ("3", "3"), (long + "5", long + "6")]
    made = lambda kept: make_preference_work(load_config(write(tmp_path / kept, pairs)))  # noqa: E731
    file = tmp_path / "pairs.jsonl"
    section = {**ROWS, "path": str(file), "held_out_fraction": 0.0, "truncate": True, "template": "none"}
    pairs = {"preferences": section}
    write_pairs = lambda some: file.write_text(  # noqa: E731
        "".join(json.dumps({"prompt": "?", "chosen": c, "rejected": r}) + "\n" for c, r in some)
    )
    write_pairs(lines)
    with pytest.warns(
        UserWarning, match="2 of 3 pairs have two answers with the same tokens, and teach nothing"
    ):
        made("some")
    write_pairs(lines[1:])
    with pytest.raises(
        ValueError, match="nothing is learned from .*: 2 of 2 pairs have two answers with the same"
    ):
        made("none")


def test_conversations_without_an_answer_are_counted(tmp_path):
    file = tmp_path / "talks.jsonl"
    talks = [[("user", "?"), ("assistant", "!")], [("system", "Add.")], [("user", "?")]]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {**SFT["conversations"], "path": str(file), "held_out_fraction": 0.0}
    with pytest.warns(
        UserWarning, match="2 of 3 conversations have no message of the assistant, and weigh nothing"
    ):
        make_supervised_work(load_config(write(tmp_path / "run", {"conversations": section})))


def test_a_run_may_have_a_number_of_passes_over_the_conversations(tmp_path):
    """10 of them in updates of 4: a pass is 2 whole updates and one of 2 rows."""
    lines = (DATA / "conversations.jsonl").read_text().splitlines(keepends=True)[:10]
    (tmp_path / "ten.jsonl").write_text("".join(lines))
    section = {**SFT["conversations"], "path": str(tmp_path / "ten.jsonl"), "held_out_fraction": 0.0}
    sections = {"conversations": section, "batch": {"rows": 4, "epochs": 2}}
    plan = make_supervised_work(load_config(write(tmp_path / "run", sections))).plan
    assert [window.rows for window in plan.windows()] == [4, 4, 2] * 2


def test_what_truncation_cuts_off_is_counted(tmp_path):
    file = tmp_path / "long.jsonl"
    talks = [[("user", "?"), ("assistant", "a" * n)] for n in (3, 100)] + [
        [("user", "?" * 99), ("assistant", "b")]
    ]
    lines = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in talks]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    section = {**SFT["conversations"], "path": str(file), "held_out_fraction": 0.0, "template": "none"}
    cut = load_config(write(tmp_path / "cut", {"conversations": {**section, "truncate": True}}))
    # an answer ends with a stop token: 4 + 101 + 2 tokens, of which the rows of 97 hold 4 + 96 + 0
    with pytest.warns(
        UserWarning, match="cuts 2 of 3 conversations after 97 .* 7 of the 107 .*; 1 keep no token"
    ) as warned:
        make_supervised_work(cut)
    enough = int(re.search(r"conversations.sequence_length=(\d+) cuts none", str(warned[0].message))[1])
    for length, cuts in ((enough, False), (enough - 1, True)):
        section |= {"truncate": True, "sequence_length": length}
        config = load_config(write(tmp_path / str(length), {"conversations": section}))
        with (
            pytest.warns(UserWarning, match="truncate=true cuts") if cuts else catch_warnings(action="error")
        ):
            make_supervised_work(config)


def test_repeated_items_are_left_out_with_a_warning():
    items = [Pair((), "1", "2"), Pair((), "3", "4"), Pair((), "1", "2")]
    with pytest.warns(
        UserWarning, match=r"\[preferences\] 1 of 3 items are repeated .*preferences.held_out_path"
    ):
        assert split_held_out(items, 0.0, "preferences") == (items[:2], [])


@pytest.mark.parametrize("kind, make", [(SFT, make_supervised_work), (DPO, make_preference_work)])
def test_held_out_items_that_are_trained_on_are_counted(tmp_path, kind, make):
    (name,) = {"conversations", "preferences"} & {*kind}
    section = {**kind[name], "held_out_path": kind[name]["path"]}
    with pytest.warns(
        UserWarning, match=rf"\[{name}\] \d+ of the \d+ items of {name}.held_out_path are trained on"
    ):
        make(load_config(write(tmp_path, {**kind, name: section})))


def test_packing_of_pairs_is_refused_when_the_config_is_read(tmp_path):
    plans = {**BASE["plans"], "train": PACKED}
    with pytest.raises(
        ValueError, match="plans.train.packing=true packs rows .* use plans.train.packing=false"
    ):
        load_config(write(tmp_path, DPO, plans=plans))


@pytest.mark.slow
def test_the_first_preference_loss_is_log_2(tmp_path):
    work = make_preference_work(load_config(write(tmp_path, DPO)))
    (metrics,) = updates(work, 1)
    np.testing.assert_allclose(metrics.loss, np.log(2), atol=1e-12)
    assert metrics.metrics["reward_margin"] == 0


def bits(run):
    from jaxfb.checkpoint.store import CheckpointStore

    with CheckpointStore(run / "checkpoints", keep_best=None) as store:
        config = load_config(run)
        make = make_preference_work if hasattr(config, "preferences") else make_supervised_work
        state, host = store.restore(make(config).abstract_state())
    state["rng"] = jax.random.key_data(state["rng"])
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)], host


@pytest.mark.slow
def test_sft_then_dpo_from_the_command_line_stopped_and_resumed(tmp_path, capsys):
    sft = write(tmp_path / "sft", SFT)
    assert main(["sft", str(sft)]) == 0
    records = read_jsonl(tmp_path / "sft" / "run" / "metrics.jsonl")
    losses = [record["eval/loss"] for record in records if "eval/loss" in record]
    assert losses[-1] < losses[0]
    values = {**BASE, **DPO, "start": {"run": str(tmp_path / "sft" / "run")}, "model": None}
    whole, parts = write(tmp_path / "whole", values), write(tmp_path / "parts", values)
    assert main(["dpo", str(whole)]) == 0
    assert main(["dpo", str(parts), "batch.updates=3"]) == 0
    assert main(["dpo", str(parts), "--resume"]) == 0
    for one, other in zip(
        bits(tmp_path / "whole" / "run")[0], bits(tmp_path / "parts" / "run")[0], strict=True
    ):
        np.testing.assert_array_equal(one, other)
    assert json.loads((tmp_path / "whole" / "run" / "summary.json").read_text())["updates"] == 6
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "whole" / "run"), "--prompt", "User: 1+1", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("User: 1+1\n")
    raw = ["generate", str(tmp_path / "whole" / "run"), "--raw", "--prompt", "User: 1+1\n\nAssistant: "]
    assert main([*raw, "--tokens", "3"]) == 0
    assert main(["generate", str(tmp_path / "whole" / "run"), "--prompt", "1+1", "--tokens", "3"]) == 0
    continued, answered = capsys.readouterr().out.split("Assistant: ")[1].split("\n", 1)
    assert answered == f"1+1\n{continued}\n"
    assert main(["sft", str(whole)]) == 2
    assert "is a config for `jaxfb dpo`, not for `jaxfb sft`" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "sft" / "run")  # the run that it started from is not read again
    assert main([*raw, "--tokens", "3"]) == 0
    assert capsys.readouterr().out.split("Assistant: ")[1].split("\n")[0] == continued
    assert main(["export-hf", str(tmp_path / "whole" / "run"), str(tmp_path / "exported")]) == 0
    assert main(["dpo", str(tmp_path / "whole" / "run"), "--resume", "batch.updates=7"]) == 0


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_keeps_the_config_of_the_one_that_it_started_from(tmp_path, kept):
    """Moved away, or read from another directory, that one is not found any more."""
    first = load_config(write(tmp_path / "first", SFT))
    last = load_config(write(tmp_path / "last", DPO, model=None, start={"run": "not/there"}))
    directory = RunDirectory.of(last)
    directory.path.mkdir(exist_ok=True)
    if kept:
        save_yaml(first, directory.first_config)
        assert config_with_model(last).model == first.model
    else:
        with pytest.raises(ConfigError, match="not/there"):
            config_with_model(last)


TURNS = [{"role": "user", "content": "1+1"}]


def chat_of(path, *sections, **more):
    """The chat of a config, from a run's directory or a tokenizer's."""
    from jaxfb.rl.start import make_base

    return make_base(load_config(write(path, *sections, **more))).chat


def test_one_template_from_the_tokenizer_through_fine_tuning_to_a_policy(tmp_path, golden):
    """Each run keeps the template and the stop tokens that it used, and the next one takes them from there."""
    files = golden("chat_templates.json")
    hub = tmp_path / "hub"
    hub.mkdir()
    (hub / "tokenizer.json").write_text(json.dumps(files["tokenizer"]))
    (hub / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": files["templates"]["llama3"], "eos_token": "<|eot_id|>"})
    )
    sft = {"conversations": {"path": "unused"}}
    first = chat_of(tmp_path / "sft", sft, start={"tokenizer": str(hub)})
    assert first.template == files["templates"]["llama3"]
    names = {first.tokenizer.name_of(i) for i in first.stop_tokens}
    assert names == {"<|end_of_text|>", "<|eot_id|>"}
    run = tmp_path / "sft" / "run"
    run.mkdir()
    (run / "config.yaml").write_text((tmp_path / "sft" / "config.yaml").read_text())
    first.tokenizer.save(run / "tokenizer.json")
    first.save(run)
    rl = {"task": {}, "rollout": {"prompts": 1, "samples_per_prompt": 2, "rows_per_update": 2, "rollouts": 1}}
    rl["rollout"]["max_new_tokens"] = 4
    for kind in ({"preferences": {"path": "unused"}, "batch": BASE["batch"]}, rl):
        values = {**kind, "start": {"run": str(run)}, "model": None}
        config = {
            name: value for name, value in {**BASE, **values}.items() if name != "batch" or "batch" in kind
        }
        path = tmp_path / ("rl" if kind is rl else "dpo")
        path.mkdir()
        (path / "config.yaml").write_text(yaml.safe_dump({**config, "run": {"dir": str(path / "run")}}))
        from jaxfb.rl.start import make_base

        chat = make_base(load_config(path / "config.yaml")).chat
        assert (chat.template, chat.stop_tokens) == (first.template, first.stop_tokens)
        np.testing.assert_array_equal(chat.prompts([TURNS])[0], first.prompts([TURNS])[0])
        asked = make_base(load_config(path / "config.yaml", ["start.stop_tokens=[<|eot_id|>]"])).chat
        assert asked.stop_tokens == (first.tokenizer.id_of("<|eot_id|>"),)
        other = make_base(load_config(path / "config.yaml", [f"{next(iter(kind))}.template=plain"])).chat
        assert other.template == "plain"


def test_without_a_template_of_its_own_a_tokenizer_gets_a_built_in_one(tmp_path):
    assert chat_of(tmp_path, {"conversations": {"path": "unused"}}).template == "chatml"
    with pytest.raises(ValueError, match=r"template='chatlm' must be one of chatml, .*did you mean chatml"):
        chat_of(tmp_path, {"conversations": {"path": "unused", "template": "chatlm"}})
    with pytest.raises(ValueError, match="there is no chat template nowhere.jinja"):
        chat_of(tmp_path, {"conversations": {"path": "unused", "template": "nowhere.jinja"}})
    with pytest.raises(ValueError, match=r"stop_tokens=\[\] would never end an answer"):
        chat_of(
            tmp_path, {"conversations": {"path": "unused"}}, start={"tokenizer": "bytes", "stop_tokens": []}
        )


@pytest.mark.parametrize("kind", [SFT, DPO], ids=["sft", "dpo"])
def test_rows_too_short_are_refused_once_with_a_length_that_holds_all(tmp_path, kind):
    (section,) = kind
    short = {section: {**kind[section], "sequence_length": 10}}
    make = make_supervised_work if kind is SFT else make_preference_work
    with pytest.raises(
        ValueError, match=rf"use {section}.sequence_length=(\d+), or {section}.truncate=true"
    ) as refusal:
        make(load_config(write(tmp_path, short)))
    length = int(str(refusal.value).split("sequence_length=")[2].split(",")[0])
    for legal in (length, length - 1):
        config = load_config(write(tmp_path, short), [f"{section}.sequence_length={legal}"])
        if legal == length:
            assert make(config).stream.rows["tokens"].shape[1] == length
        else:
            with pytest.raises(ValueError, match=f"use {section}.sequence_length={length}"):
                make(config)


def test_conversations_of_which_nothing_is_learned_are_refused(tmp_path):
    (tmp_path / "asked.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n' * 4)
    section = {"conversations": {**SFT["conversations"], "path": str(tmp_path / "asked.jsonl")}}
    with pytest.raises(
        ValueError, match="nothing is learned from .*asked.jsonl: no conversation has .* its first 96;"
    ):
        make_supervised_work(load_config(write(tmp_path / "run", section)))


def test_held_out_means_of_an_array_are_its_smallest_mean_and_largest_over_all_batches():
    """A model with experts has such a metric, the load of each expert, of which there is no single number."""
    parts = iter([(1.0, [[2.0, 4.0]], 2.0), (5.0, [[6.0, 0.0]], 2.0)])

    def forward(model, params, batch, plan, forward_only):
        total, load, weight = next(parts)
        metrics = {"expert_load": Sum(np.array(load), np.array(weight)), "largest": Max(1.0)}
        return SimpleNamespace(terms={"loss": Sum(total, weight), "none": Sum(0.0, 0.0)}, metrics=metrics)

    rows = {"tokens": np.zeros((8, 4), np.int32)}
    found = held_out_means(forward, None, None, rows, BatchPlan(rows=4, rows_per_microbatch=4))
    load = {"eval/expert_load/min": 1.0, "eval/expert_load/mean": 1.5, "eval/expert_load/max": 2.0}
    assert found == {"eval/loss": 1.5, "eval/none": 0.0, **load}


EXPERTS = {"model": {**BASE["model"], "num_experts": 2, "experts_per_token": 1, "expert_mlp_size": 8}}


@pytest.mark.slow
def test_preferences_train_a_model_with_experts_and_are_evaluated(tmp_path):
    assert main(["dpo", str(write(tmp_path, DPO, EXPERTS, batch={"rows": 16, "updates": 1}))]) == 0
    records = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    last = [record for record in records if "eval/accuracy" in record][-1]
    assert 0 <= last["eval/expert_load/min"] <= last["eval/expert_load/mean"] <= last["eval/expert_load/max"]
