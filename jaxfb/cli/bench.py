"""`jaxfb bench`: runs the benchmarks in benchmarks/ by name, and writes a page of their results."""

from __future__ import annotations

import ast
import difflib
import re
import subprocess
import sys
from pathlib import Path

from jaxfb.process.signals import terminated_like_ctrl_c
from jaxfb.refusal import Refused

CHILDREN = {"performance", "loop_of_accelerate", "loop_of_jaxfb", "torch_pipelining"}
"""Scripts that another one runs."""
PARSES = re.compile(r"argparse|real_sizes\.main\(")
"""What a script contains that reads options and answers --help itself."""
READS = re.compile(r"sys\.argv\[\d*:?\d*\]")
"""What a script contains that reads its arguments without a parser."""


def directory() -> Path:
    """Returns the directory benchmarks/ of this checkout.

    Raises:
      ValueError: jaxfb was installed without it.
    """
    found = Path(__file__).parents[2] / "benchmarks"
    if not found.is_dir():
        raise Refused(
            "[bench] benchmarks/ is not part of an installed jaxfb; use a checkout: pip install -e ."
        )
    return found


def names() -> dict[str, str]:
    """Returns name -> first line of the benchmark's docstring."""
    texts = {path.stem: path.read_text() for path in sorted(directory().glob("*.py"))}
    return {
        name: (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
        for name, text in texts.items()
        if '__name__ == "__main__"' in text and name not in CHILDREN
    }


def run(name: str | None, arguments: list[str]) -> int:
    """Runs one benchmark in a separate process, "report" for the page; lists them all for None. Its exit code.

    Raises:
      ValueError: there is no such benchmark.
    """
    known = names()
    if name is None:
        for known_name, text in known.items():
            print(f"{known_name:<24}{text}")
        print(f"{'report':<24}Writes docs/performance.md from benchmarks/results/*.json.")
        return 0
    if name not in (*known, "report"):
        close = difflib.get_close_matches(name, [*known, "report"], n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise Refused(f"[bench] no benchmark {name!r}; {hint}`jaxfb bench` lists them")
    script = directory() / f"{'performance' if name == 'report' else name}.py"
    if arguments and (text := _without_parser(name, script.read_text(), arguments)) is not None:
        print(text)
        return 0
    with terminated_like_ctrl_c():  # which ends the script as well
        return subprocess.run([sys.executable, str(script), *arguments]).returncode


def _without_parser(name: str, source: str, arguments: list[str]) -> str | None:
    """Returns what is printed in place of running a script without a parser, which would not look at them.

    Raises:
      ValueError: the script takes no arguments.
    """
    if PARSES.search(source):
        return None
    if {"-h", "--help"} & set(arguments):
        return ast.get_docstring(ast.parse(source)) or f"benchmarks/{name}.py has no description"
    if READS.search(source):
        return None
    raise Refused(f"[bench] {name} takes no arguments, got {' '.join(arguments)!r}; use `jaxfb bench {name}`")
