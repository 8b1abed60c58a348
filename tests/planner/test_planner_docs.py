"""The Python on docs/planner.md runs as it is written."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_pages_python_prints_a_plan(capsys):
    (block,) = re.findall(
        r"^```python\n(.*?)^```", (DOCS / "planner.md").read_text(), re.MULTILINE | re.DOTALL
    )
    exec(compile(block, "planner.md", "exec"), {})
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "mesh8 on cpu:8" and re.fullmatch(r"\d+ \d+", printed[-1])
