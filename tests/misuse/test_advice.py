"""Whoever follows the advice of a refusal is not refused again: every choice that it offers is legal, and is data."""

import functools
import pathlib
import random
import re
import sys

import pytest
import yaml
from refused import REFUSED
from test_inventory import PACKAGE, sites
from wrong import outcome

import jaxfb
from jaxfb import BatchPlan, RolloutPlan, RunPlan, get_forward_backward_func, make_mesh
from jaxfb.batch_plan import RampUp, data_parallel_size
from jaxfb.mesh import mesh_sizes
from jaxfb.models.config import TransformerConfig
from jaxfb.refusal import Refused
from jaxfb.schedules import make, megatron_order
from jaxfb.schedules.sizes import checked_sizes

STEPS = 14  # as many as there are arguments
ADVICE = re.compile(r"[;,?] (?:use|try|choose|make it|did you mean|set) ")


def choices_of(error: Exception, arguments: dict) -> tuple[dict, ...] | None:
    """The changes that a refusal offers, as data or read out of its text; None if its text cannot be read."""
    if getattr(error, "choices", ()):
        return error.choices
    sentence = str(error).partition("\n")[0]
    return read(sentence, arguments) if ADVICE.search(sentence) else ()


def read(sentence: str, arguments: dict) -> tuple[dict, ...] | None:
    """Reads "...; use name=1 or 2", "... name=3 must ...; use 4 for none", and "...; did you mean 'word'?"."""
    rule, _, words = sentence.rpartition(ADVICE.findall(sentence)[-1])
    names = re.findall(r"\b(\w+)=", rule)
    subject = next((name for name in names if name in arguments), names[0] if names else None)
    if named := re.match(r"(\w+)[= ](.+)", words):
        subject, words = (named[1], named[2]) if named[1] in arguments else (subject, words)
    if (word := re.match(r"'(\w+)'", words)) and subject is None:
        wrong = next((name for name, value in arguments.items() if repr(value) in rule), None)
        return (
            ({wrong: word[1]},) if wrong and " take " not in rule else ()
        )  # the name of an argument is misspelt
    values = re.match(r"(?:at most )?([-\w.']+)(?: or ([-\w.']+))?", words)
    if subject is None or values is None:
        return None
    found = [yaml.safe_load(value.rstrip(".")) for value in values.groups() if value]
    return tuple({subject: value} for value in found if value != "more")


FOLLOWED = set()
"""Where the refusals were made whose choices were all accepted, as file::function."""


@pytest.fixture(autouse=True, scope="module")
def places():
    """Lets each refusal know where it was made."""
    plain = Refused.__init__

    def init(self, *args, **kwargs):
        code = sys._getframe(1).f_code
        file = pathlib.Path(code.co_filename)
        self.place = f"{file.relative_to(PACKAGE).as_posix()}::{code.co_qualname.replace('.<locals>', '')}"
        plain(self, *args, **kwargs)

    Refused.__init__ = init
    yield
    Refused.__init__ = plain


TRIED_BY_JAXFB = {"rl/start.py::Base.plans", "rl/start.py::_check_budget"}
"""Whose choices `jaxfb.rl.advice.planned` tries before it passes them on."""


def problem_of(function, arguments: dict, error: Exception) -> str | None:
    """What is wrong with the advice of a refusal of one wrong argument; None if all of it is accepted."""
    if not isinstance(error, ValueError):
        return f"no refusal: {error!r}"
    choices = choices_of(error, arguments)
    if choices is None:
        return f"advice that cannot be read: {error}"
    for choice in choices:
        again = outcome(lambda choice=choice: function(**{**arguments, **choice}))
        if again is not None:
            return f"{error}\n    offers {choice}\n    which is refused: {again!r}"
    if choices:
        FOLLOWED.add(error.place)
    return None


def followed(function, arguments: dict, rng: random.Random) -> str | None:
    """What is wrong with following one piece of advice after the other; None if that leads to an accepted call."""
    said = []
    for _ in range(STEPS):
        error = outcome(lambda: function(**arguments))  # noqa: B023
        if error is None:
            return None
        choices = choices_of(error, arguments)
        if not isinstance(error, ValueError) or choices is None:
            return f"no refusal, or advice that cannot be read: {error!r}"
        if not choices:
            return None
        choice = rng.choice(choices)
        said.append(f"{error} -> {choice}")
        arguments = {**arguments, **choice}
    return "\n    ".join(["goes on and on", *said])


def few(rng: random.Random, *values):
    """One of a few values."""
    return rng.choice(values)


def batch_plan(rng):
    given = {
        "purpose": few(rng, "train", "train", "logprob_old", "trian"),
        "rows": few(rng, None, rng.randint(1, 100), 64),
        "rows_per_microbatch": few(rng, None, rng.randint(1, 12), 0),
        "num_microbatches": few(rng, None, None, rng.randint(1, 12)),
        "data_parallel": few(rng, 1, 2, 3, 8, -1),
        "multiple_of": few(rng, 1, 1, 2, 3),
        "remainder": few(rng, "error", "pad", "drop", "pat"),
    }
    if rng.random() < 0.3:
        budget = {"max_tokens_per_microbatch": rng.randint(1, 40), "sequence_length": few(rng, None, 8, 20)}
        given |= budget | {"widths": few(rng, None, (4, 9), (9, 4), (20,)), "packing": few(rng, False, True)}
        given["max_context"] = few(rng, None, None, 2, 4)
    return given


def run_plan(rng):
    plan = BatchPlan(rows=8, rows_per_microbatch=2)
    return {
        "plans": plan,
        "updates": few(rng, None, rng.randint(1, 9)),
        "samples": few(rng, None, None, rng.randint(1, 30)),
        "tokens": few(rng, None, None, rng.randint(1, 300)),
        "epochs": few(rng, None, None, 1, 0.3),
        "dataset_rows": few(rng, None, rng.randint(1, 30)),
        "sequence_length": few(rng, None, 7),
        "remainder": few(rng, "error", "pad", "drop", "trim"),
    }


def rollout_plan(rng):
    train = BatchPlan(rows=few(rng, 8, 16), rows_per_microbatch=few(rng, 1, 2, 4))
    return {
        "plans": {
            "train": train,
            "logprob_ref": BatchPlan("logprob_ref", rows=16, rows_per_microbatch=few(rng, 2, 16)),
        },
        "prompts": few(rng, 4, 8, 5),
        "samples_per_prompt": few(rng, 1, 2, 4),
        "rows_per_update": few(rng, 8, 16, 7, 40),
        "groups": few(rng, "", "grpo"),
        "whole_groups": few(rng, False, True),
        "seed": few(rng, None, 0),
    }


def model(rng):
    return {
        "vocab_size": 32,
        "num_layers": 2,
        "hidden_size": few(rng, 16, 18, 17),
        "num_heads": few(rng, 1, 4, 6, 0),
        "num_kv_heads": few(rng, None, 1, 3, 5),
        "head_size": few(rng, None, 4, 5),
        "dropout": few(rng, 0.0, 1.0, -0.1),
        "attention": few(rng, "auto", "xlaa"),
        "label_smoothing": few(rng, 0.0, 1.5),
        "z_loss": few(rng, 0.0, -1.0),
        "logit_softcap": few(rng, None, 0.0),
        "num_experts": few(rng, 0, 2, 4),
        "experts_per_token": few(rng, 1, 2, 3, 0),
        "router_scores": few(rng, "softmax", "softmaxx"),
    }


PLAN = BatchPlan(rows=8, rows_per_microbatch=2)
PLANS = {"train": PLAN, "logprob_ref": BatchPlan("logprob_ref", rows=16, rows_per_microbatch=2)}
SIZE = (1, 2, 3, 4, 8, 16, -1, 0)
# (name, function, legal arguments, others to draw from, how many draws)
CALLS = [
    ("BatchPlan", BatchPlan, dict(rows=64, rows_per_microbatch=2), batch_plan, 1500),
    (
        "BatchPlan by tokens",
        BatchPlan,
        dict(rows=64, max_tokens_per_microbatch=40, sequence_length=8),
        batch_plan,
        700,
    ),
    ("RunPlan", RunPlan, dict(plans=PLAN, updates=3), run_plan, 1000),
    ("RunPlan of tokens", RunPlan, dict(plans=PLAN, tokens=7 * 64, sequence_length=7), run_plan, 1000),
    (
        "RolloutPlan",
        RolloutPlan,
        dict(plans=PLANS, prompts=4, samples_per_prompt=4, rows_per_update=8, seed=None),
        rollout_plan,
        1000,
    ),
    (
        "RampUp.linear",
        RampUp.linear,
        dict(start=4, increment=4, samples=40, rows=16),
        lambda rng: {name: rng.randint(1, 40) for name in ("start", "increment", "samples", "rows")},
        500,
    ),
    (
        "data_parallel_size",
        data_parallel_size,
        dict(devices=8),
        lambda rng: {name: rng.randint(1, 9) for name in ("devices", "tensor", "pipe", "context")},
        300,
    ),
    (
        "mesh_sizes",
        lambda **given: mesh_sizes(given, 8, "tpu"),
        dict(data=2),
        lambda rng: {axis: few(rng, *SIZE) for axis in ("pipe", "data", "fsdp", "tensor")},
        600,
    ),
    (
        "schedules.make",
        make,
        dict(name="1f1b", num_stages=2, num_microbatches=4),
        lambda rng: {
            "name": few(rng, "gpipe", "1f1b", "v_shape", "zb_v", "1fb1", "zero-bubble"),
            "num_stages": few(rng, 1, 2, 0),
            "num_microbatches": few(rng, 1, 4, -1),
            "num_chunks": few(rng, 1, 2, 3, 0),
        },
        400,
    ),
    (
        "sizes of schedules",
        checked_sizes,
        dict(num_stages=2, num_microbatches=4, num_chunks=1),
        lambda rng: {
            "num_stages": few(rng, 1, 700, 3000, 10**9),
            "num_microbatches": few(rng, 1, 10**6, 10**9),
            "num_chunks": few(rng, 1, 50, 10**6, 10**9),
        },
        400,
    ),
    (
        "megatron_order",
        megatron_order,
        dict(num_stages=2, num_microbatches=4, num_chunks=2),
        lambda rng: {
            "num_stages": rng.randint(1, 5),
            "num_microbatches": rng.randint(1, 12),
            "num_chunks": rng.randint(1, 3),
            "group_size": few(rng, None, rng.randint(1, 7)),
            "interleaved": few(rng, None, True, False),
        },
        600,
    ),
    (
        "TransformerConfig",
        TransformerConfig,
        dict(vocab_size=32, num_layers=2, hidden_size=16, num_heads=4),
        model,
        1500,
    ),
    (
        "get_forward_backward_func",
        get_forward_backward_func,
        dict(mesh=make_mesh(pipe=2, data=2)),
        lambda rng: {
            "mesh": make_mesh(pipe=few(rng, 1, 2), data=2),
            "schedule": few(rng, None, "1f1b", "1f1c"),
            "num_chunks": few(rng, 1, 2, 0),
            "normalize": few(rng, "global", "globl"),
            "remat": few(rng, None, "fulll"),
            "fsdp_gather": few(rng, "layer", "layers"),
            "optimizer_sharding": few(rng, "none", "gradients"),
            "head_placement": few(rng, None, "last", "lasts"),
        },
        200,
    ),
    (
        "make_optimizer",
        jaxfb.make_optimizer,
        dict(name="adamw", learning_rate=0.1),
        lambda rng: {
            "name": few(rng, "adamw", "lion", "adamv"),
            "learning_rate": few(rng, 0.1, -0.1, float("nan")),
            "weight_decay": few(rng, 0.0, -1.0),
            few(rng, "b1", "b2", "b3"): few(rng, 0.9, 1.5, -1),
        },
        200,
    ),
    (
        "lr_schedule",
        jaxfb.lr_schedule,
        dict(name="cosine", peak=1.0, total=10),
        lambda rng: {
            "name": few(rng, "cosine", "cosin", "linear", "wsd", "constant"),
            "peak": few(rng, 1.0, -1.0),
            "total": few(rng, None, 0, 10),
            "warmup": few(rng, 0, 5, 20, -1),
            "final": few(rng, 0.0, 2.0),
            "unit": few(rng, "updates", "update"),
            "warmup_shape": few(rng, "linear", "linea"),
        },
        300,
    ),
]
NAMES = [name for name, *_ in CALLS]


@functools.cache
def with_one_wrong_argument(name):
    """(how many calls, how many were refused, what is wrong with the advice of these)."""
    function, legal, draw, count = next(call[1:] for call in CALLS if call[0] == name)
    rng, refused, problems = random.Random(12), 0, []
    for _ in range(count):
        others = draw(rng)
        changed = rng.choice(list(others))
        arguments = {**legal, changed: others[changed]}
        error = outcome(lambda arguments=arguments: function(**arguments))
        if error is not None:
            refused += 1
            problem = problem_of(function, arguments, error)
            problems += [f"{name}({arguments}): {problem}"] if problem else []
    return count, refused, problems


@pytest.mark.parametrize("name", NAMES)
def test_with_one_wrong_argument_every_choice_is_accepted(name):
    count, refused, problems = with_one_wrong_argument(name)
    assert refused >= count / 40
    assert not problems, "\n".join(problems[:5])


@pytest.mark.parametrize("name, function, legal, draw, count", CALLS, ids=NAMES)
def test_with_many_wrong_arguments_one_choice_after_the_other_leads_to_what_is_accepted(
    name, function, legal, draw, count
):
    rng, problems = random.Random(13), []
    for _ in range(count):
        arguments = {**legal, **draw(rng)}
        problem = followed(function, arguments, rng)
        problems += [f"{name}({arguments}): {problem}"] if problem else []
    assert not problems, "\n".join(problems[:5])


@functools.cache
def problem_of_refused(number):
    """What is wrong with the answer to a call that is to be refused with choices; None if nothing is."""
    function, arguments = REFUSED[number]
    error = outcome(lambda: function(**arguments))
    return (
        problem_of(function, arguments, error) if getattr(error, "choices", ()) else f"no choices: {error!r}"
    )


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_every_choice_of_a_refused_call_is_accepted(number):
    assert problem_of_refused(number) is None


def test_all_advice_that_is_data_was_followed():
    for name in NAMES:
        with_one_wrong_argument(name)
    for number in range(len(REFUSED)):
        problem_of_refused(number)
    missing = {site.place for site in sites() if site.has_choices} - FOLLOWED - TRIED_BY_JAXFB
    assert not missing
