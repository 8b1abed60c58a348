"""Docstrings make sense alone, and prose keeps to words that a stranger knows."""

import ast
import inspect
import io
import re
import tokenize
from functools import cache
from pathlib import Path

import jaxfb

ROOT = Path(jaxfb.__file__).parent
PAGES = (ROOT.parent / "README.md", *sorted((ROOT.parent / "docs").glob("*.md")))
FRAGMENTS = frozenset(
    "Of What Those Its By As From In Where How That Which Who When If On At For With Without Whether Beside Under "
    "Over To One None All Both Each Every And Or Else Only Also Not They Among Between Because Than Same Such Until "
    "While Why Into Per Through Everything Nothing Whatever".split()
)
"""Words with which a docstring continues the name above it in place of being a sentence."""
NOUNS_IN_S = frozenset(
    "Updates Rows Replicas Operations Titles Types Variables Layouts Rewards Documents Zeros Axis Loss Progress "
    "Log-probs Cotangents Bytes Seconds Tokens Parameters".split()
)
"""Words with which a docstring begins as a noun phrase."""
VERBS_IN_S = re.compile(r"[A-Z][a-z]+(-[a-z]+)?s[,;:]?")
PRIVATE = re.compile(
    r"\b(stor(y|ies)|rooms?|witness(es)?|hears?|speaks?|brings|says|told|of one's own|beside the story)\b"
)
"""Words with a private meaning that came back again and again."""


@cache
def sources() -> dict[Path, str]:
    """Returns path -> text of every module."""
    return {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}


@cache
def nodes() -> list[tuple[Path, ast.AST]]:
    """Returns (path, node) of everything that can have a docstring."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [
        (path, n)
        for path, text in sources().items()
        for n in ast.walk(ast.parse(text))
        if isinstance(n, kinds)
    ]


def definitions(kinds) -> list[tuple[str, str]]:
    """Returns (where, docstring) of every definition of those kinds."""
    found = []
    for path, node in nodes():
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            found.append((f"{path.relative_to(ROOT)}:{getattr(node, 'name', 'module')}", text))
    return found


def prose() -> list[tuple[str, str]]:
    """Returns (where, line) of strings and comments of the package, and of the pages."""
    found = []
    for path, text in sources().items():
        with io.StringIO(text) as file:
            for token in tokenize.generate_tokens(file.readline):
                if token.type in (
                    tokenize.STRING,
                    tokenize.COMMENT,
                    getattr(tokenize, "FSTRING_MIDDLE", None),
                ):
                    found += [
                        (f"{path.relative_to(ROOT)}:{token.start[0]}", line)
                        for line in token.string.split("\n")
                    ]
    return found + [(page.name, line) for page in PAGES for line in page.read_text().split("\n")]


def test_no_docstring_begins_as_a_fragment():
    every = definitions((ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
    assert len(every) > 1500
    assert [(where, text[:60]) for where, text in every if text.split()[0].rstrip(",;:") in FRAGMENTS] == []


def test_docstrings_of_functions_begin_with_a_verb():
    every = definitions((ast.FunctionDef, ast.AsyncFunctionDef))
    first = [(where, text.split()[0], text[:60]) for where, text in every]
    assert [found for found in first if not VERBS_IN_S.fullmatch(found[1])] == []
    nouns = [found for found in first if found[1].rstrip(",;:") in NOUNS_IN_S]
    assert nouns == []


def test_the_first_sentence_of_a_public_docstring_ends():
    every = definitions((ast.ClassDef, ast.FunctionDef))
    public = [(where, text) for where, text in every if not re.search(r":_", where)]
    assert [(where, text[:60]) for where, text in public if not re.search(r"[.:;]( |$|\n)", text)] == []


def public_objects() -> list[tuple[str, object]]:
    """Returns (name, object) of what users import, with the methods and properties of classes."""
    modules = {"jaxfb": jaxfb, "schedules": jaxfb.schedules, "batch_plan": jaxfb.batch_plan}
    found = []
    for where, module in modules.items():
        for name in module.__all__:
            if inspect.isclass(one := getattr(module, name)) or inspect.isfunction(one):
                found.append((f"{where}.{name}", one))
            for method, value in vars(one).items() if inspect.isclass(one) else ():
                function = getattr(value, "fget", None) or getattr(value, "func", None) or value
                function = getattr(function, "__func__", function)
                if (
                    not method.startswith("_")
                    and inspect.isfunction(function)
                    and function.__name__ == method
                ):
                    found.append((f"{where}.{name}.{method}", function))
    return found


def test_the_first_line_of_every_public_object_is_a_whole_sentence():
    every = public_objects()
    assert len(every) > 120
    first = [(name, (inspect.getdoc(one) or "").split("\n")[0]) for name, one in every]
    assert [(name, line) for name, line in first if not line.endswith((".", ":"))] == []


def test_the_docstring_of_every_public_class_begins_with_a_verb():
    classes = [(name, inspect.getdoc(one) or "") for name, one in public_objects() if inspect.isclass(one)]
    assert len(classes) > 30
    first = [(name, text.split()[0], text[:60]) for name, text in classes]
    assert [found for found in first if not VERBS_IN_S.fullmatch(found[1])] == []
    assert [found for found in first if found[1].rstrip(",;:") in NOUNS_IN_S] == []


def test_no_private_word_in_code_or_pages():
    code = re.compile(r"`[^`]*`|\{[^}]*\}|\w+\(\)")
    assert [(where, line) for where, line in prose() if PRIVATE.search(code.sub("", line))] == []


def test_refusals_are_of_their_class():
    """A bare ValueError is shown with a traceback; those listed are mistakes of jaxfb itself, or caught nearby."""
    allowed = {"batch_plan/ramp_up.py", "hlo/groups.py", "schedules/replay.py"}
    found = {str(path.relative_to(ROOT)) for path, text in sources().items() if "raise ValueError" in text}
    assert found <= allowed
