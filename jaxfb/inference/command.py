"""`jaxfb generate`, `jaxfb chat`, and `jaxfb eval` of a text or of tasks: options in, lines out."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from typing import Any

from jaxfb.config.operation import HostsConfig
from jaxfb.display import print_table
from jaxfb.inference import complete, tasks
from jaxfb.inference import prompts as files
from jaxfb.inference.chat import chat as converse
from jaxfb.inference.chat import with_line_editing
from jaxfb.inference.model import files_of, open_model
from jaxfb.inference.scores import Scorer, perplexity
from jaxfb.metrics.strict_json import strict_json
from jaxfb.training.compile_cache import use_compile_cache
from jaxfb.training.job.hosts import Hosts

PLACE = ("coordinator", "processes", "process_id")
SAMPLING = ("tokens", "temperature", "top_k", "top_p", "min_p", "seed")


def _hosts(options: Namespace) -> Hosts:
    """Returns the processes of a job that the flags describe; without any, this process alone."""
    given: dict[str, Any] = {name: getattr(options, name) for name in PLACE}
    if all(value is None for value in given.values()):
        given["processes"] = 1
    return Hosts(HostsConfig(**given, stuck_after=None))


def _agree(hosts: Hosts, options: Namespace, texts: Any) -> None:
    """Refuses processes with other options, texts or models than the others: they would wait for each other, or print
    numbers of a model that nobody has.
    """
    given = {name: value for name, value in vars(options).items() if name != "process_id"}
    read = hashlib.sha256(repr(texts).encode()).hexdigest()
    hosts.agree("options or texts", lambda: {**given, "texts": read})
    hosts.agree(f"the model {options.run_dir}", lambda: files_of(options.run_dir, options.overrides))


def generate(options: Namespace) -> None:
    """Prints continuations of a prompt, or of each prompt of a file; with --out, writes them."""
    given: dict[str, Any] = {name: getattr(options, name) for name in (*SAMPLING, "samples")}
    complete.Sampling(**{name: value for name, value in given.items() if value is not None})
    one = {"prompt": options.prompt}
    named = one if options.prompts is None else files.read_prompts(options.prompts)
    names, prompts = list(named), list(named.values())
    if options.out is not None:
        files.check_target(options.out)
    with _hosts(options) as hosts:
        _agree(hosts, options, prompts)
        use_compile_cache()
        model = open_model(options.run_dir, options.overrides, dtype=options.dtype)
        how = complete.sampling_of(model, **given)
        found = complete.complete(model, prompts, how, raw=options.raw, batch=options.batch, names=names)
        if not hosts.is_first:
            return
    if options.out is not None:
        files.write_answers(options.out, prompts, found)
        print(f"wrote {options.out}")
        return
    between = "\n" if complete.is_answered(model, options.raw) else ""
    for prompt, texts in zip(prompts, found, strict=True):
        for text in texts:
            shown = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            print(f"{shown}{between}{text}" + "\n" * (sum(map(len, found)) > 1))


def evaluate(options: Namespace) -> None:
    """Prints the perplexity of a text and the scores of tasks."""
    text = None if options.text is None else files.read_text(options.text, "[eval]")
    items = {path: tasks.read_task(path) for path in options.task or ()}
    with _hosts(options) as hosts:
        _agree(hosts, options, (text, items))
        use_compile_cache()
        model = open_model(options.run_dir, options.overrides, on_mesh=True)
        scorer = Scorer(model, options.length, options.rows)
        found = {} if text is None else {options.text: perplexity(scorer, text)}
        for path, questions in items.items():
            found[path] = tasks.evaluate(scorer, questions)
        if not hosts.is_first:
            return
    if options.json:
        print(strict_json({"update": model.update, "scores": found}, indent=1))
        return
    print(model.title)
    for name, numbers in found.items():
        print_table(str(name), [(key, f"{value:.6g}") for key, value in numbers.items()])


def chat(options: Namespace) -> None:
    """Talks in the terminal until the input ends."""
    given = {name: getattr(options, name) for name in SAMPLING}
    complete.Sampling(**{name: value for name, value in given.items() if value is not None})
    use_compile_cache()
    model = open_model(options.run_dir, options.overrides, dtype=options.dtype)
    converse(model, complete.sampling_of(model, **given), options.system, with_line_editing())
